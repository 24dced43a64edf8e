"""Register a PyTorch program with the chip agent of its machine, with one call.

    tallystick.observe("/var/lib/tallystick/chip0", model, optimizer)

From then on the agent may stop the process at any time, read parameters and optimizer state, and let it go on. A hook on
the optimizer keeps the table of addresses and says when the optimizer writes. Buffers are left out: the forward pass
changes them at any time, so that no state of the run has them as they were. Of a ``DTensor`` (FSDP2, tensor parallelism) the
process has its own part, and ``integrations.sharded`` says which. Linux, CPU memory.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tallystick.errors import InvalidInput
from tallystick.fleet.agent.probes import (
    CONTROL_ENTRY,
    CONTROL_HEAD,
    CONTROL_MAGIC,
    Observed,
    start_of,
)
from tallystick.store.chips import ChipDirectory
from tallystick.store.files import write_whole

DTYPES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.int32: "I32", torch.int64: "I64",
    torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64",
}  # fmt: skip
MOST_REGIONS = 65536
_SEQUENCE_AT, _STEP_AT, _COUNT_AT = 8, 16, 24
_PR_SET_PTRACER, _PR_SET_PTRACER_ANY = 0x59616D61, ctypes.c_ulong(-1).value


def observe(
    directory: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer
) -> Registration:
    """Let the agent of the chip in ``directory`` observe this process's training; close the result to end it.

    Raises:
        InvalidInput: no chip lies there, or a tensor is not in this machine's memory.
        StoreError: the directory cannot be written.
    """
    chip = ChipDirectory(Path(directory))
    if not chip.settings_path.exists():
        raise InvalidInput(f"{directory}: no chip lies there; `tally chip init` makes one")
    return Registration(chip, model, optimizer)


class Registration:
    """A registration that holds until ``close`` or the end of the process."""

    def __init__(
        self, chip: ChipDirectory, model: nn.Module, optimizer: torch.optim.Optimizer, *, steps_done: int = 0
    ) -> None:
        self._chip, self._model, self._optimizer = chip, model, optimizer
        self._names: list[tuple[str, str, str]] = []
        self._sequence, self._step = 0, steps_done
        others = (f"{os.getpid()}-{number}" for number in itertools.count(1))
        names = itertools.chain([str(os.getpid())], others)
        name = next(each for each in names if not (chip.observed_path / f"{each}.json").exists())
        self._path, self._file = (chip.observed_path / f"{name}.{kind}" for kind in ("control", "json"))
        self._places: list[tuple[int, int]] = []
        write_whole(self._path, bytes(CONTROL_HEAD.size + MOST_REGIONS * CONTROL_ENTRY.size))
        with self._path.open("r+b") as file:
            self._block = mmap.mmap(file.fileno(), 0)
        self._publish()
        before = optimizer.register_step_pre_hook(lambda *_: self._begin())
        hooks: Any = before.hooks_dict_ref()
        hooks.move_to_end(before.id, last=False)  # other hooks, such as a recorder's, may change the weights
        self._handles = [before, optimizer.register_step_post_hook(lambda *_: self._end())]
        _let_others_read()
        atexit.register(self.close)

    def close(self) -> None:
        """Remove the hooks and the registration."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for path in (self._file, self._path):
            with suppress(OSError):
                path.unlink()

    def _begin(self) -> None:
        self._mark(odd=True)

    def _end(self) -> None:
        self._step += 1
        self._publish()

    def _publish(self) -> None:
        """Write the table, inside an odd sequence, and register again where the list of tensors has grown."""
        tensors = [
            (name, kind, _plain(name, each)) for name, kind, each in tensors_of(self._model, self._optimizer)
        ]
        names = [(name, DTYPES[tensor.dtype], kind) for name, kind, tensor in tensors]
        places = [(tensor.data_ptr(), tensor.nbytes) for _, _, tensor in tensors]
        if len(places) > MOST_REGIONS:
            raise InvalidInput(f"observe: {len(places)} tensors exceed {MOST_REGIONS}")
        self._mark(odd=True)
        if places != self._places:
            table = b"".join(CONTROL_ENTRY.pack(address, size) for address, size in places)
            self._block[CONTROL_HEAD.size : CONTROL_HEAD.size + len(table)] = table
            self._places = places
        if names != self._names:
            self._block[:8] = CONTROL_MAGIC
            self._block[_COUNT_AT : _COUNT_AT + 8] = struct.pack("<Q", len(places))
            named = Observed(os.getpid(), start_of(os.getpid()) or 0, self._path.resolve(), tuple(names))
            write_whole(self._file, named.encode())
            self._names = names
        self._block[_STEP_AT : _STEP_AT + 8] = struct.pack("<Q", self._step)
        self._mark(odd=False)

    def _mark(self, *, odd: bool) -> None:
        if self._sequence % 2 != odd:
            self._sequence += 1
            self._block[_SEQUENCE_AT : _SEQUENCE_AT + 8] = struct.pack("<Q", self._sequence)


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, str, Tensor]]:
    """Yield name, kind and value of every tensor of the training's state, named as in a committed state."""
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        names[id(parameter)] = name
        yield f"model/{name}", "weights", parameter
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            values: dict[str, Any] = optimizer.state.get(parameter, {})
            for key, value in values.items():
                if isinstance(value, Tensor):
                    owner = names.get(id(parameter), "unnamed")
                    yield f"optimizer/{owner}/{key}", "optimizer", value


def _plain(name: str, tensor: Tensor) -> Tensor:
    to_local: Any = getattr(tensor, "to_local", None)
    if to_local is not None:  # a DTensor, of which this process has its own part
        with torch.no_grad():
            tensor = to_local()
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.dtype not in DTYPES:
        raise InvalidInput(
            f"observe: {name} is {tensor.dtype} on {tensor.device}, contiguous {tensor.is_contiguous()}; "
            "the agent reads contiguous tensors in this machine's memory"
        )
    return tensor.detach()


def _let_others_read() -> None:
    """Allow a process of the same user to read this one's memory, where the kernel's Yama module forbids it."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(_PR_SET_PTRACER_ANY), 0, 0, 0)
