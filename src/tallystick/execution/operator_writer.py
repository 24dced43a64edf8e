"""Writing the list of a step's operators: which result an input is a view of, and what becomes of results.

Views are no operators: an input says which part of which earlier result it reads. What is written in place is a new result.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import (
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage] # the only way to step out of a mode
)

from tallystick.commit.merkle import root as merkle_root
from tallystick.commit.state import HeldState
from tallystick.commit.tensors import TensorDigest, chunk_hashes, hash_later
from tallystick.dispute.operator_list import LOAD, Geometry, Input, Operator, Output
from tallystick.execution.dispatch.table import OVERWRITES
from tallystick.execution.hashing import leaf_hashes
from tallystick.execution.operator_attributes import renumbered
from tallystick.execution.pass_trace import storage_key
from tallystick.execution.snapshot import CODES
from tallystick.execution.step_trace import KINDS, StepTrace, Value, array_of

STORED = {**CODES, torch.float64: "F64", torch.bfloat16: "BF16", torch.float16: "F16"}
WIDER = {"F32": "F64"}  # what a result may be read as besides: the optimizer's arithmetic
CONSTANT = "tallystick::constant"
SMALL_CONSTANT = 4096  # bytes that stand in the list itself
NO_ROOT = bytes(32)
SOON = 1 << 16  # bytes that are hashed at once: less than handing them to another thread takes
Watch = Callable[[int, Operator, Sequence[Tensor]], None]


def whole(tensor: Tensor) -> Tensor:
    """Return all of the memory that ``tensor`` is a view of, flat."""
    storage = tensor.detach().untyped_storage()
    count = storage.nbytes() // tensor.element_size()
    flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return flat.set_(storage, 0, (count,), (1,))  # pyright: ignore[reportArgumentType]


class Whereabouts:
    """Where in the step an operator runs: micro-batch, phase and module."""

    def __init__(self) -> None:
        self.phase, self.micro_batch = "forward", 0
        self.names: dict[nn.Module, str] = {}
        self._modules: list[str] = []
        self._by_sequence: dict[int, str] = {}

    def now(self) -> tuple[str, str]:
        """Return the module and the phase of the operator being run."""
        node: Any = torch._C._current_autograd_node()  # pyright: ignore[reportAttributeAccessIssue, reportPrivateUsage]
        if node is not None:
            phase = "backward" if self.phase == "forward" else self.phase
            return self._by_sequence.get(int(node._sequence_nr()), ""), phase
        module = self._modules[-1] if self._modules else ""
        numbers: Any = (
            torch.autograd
        )  # the next node gets this number, the operator being run has the one before
        self._by_sequence[int(numbers._get_sequence_nr()) - 1] = module
        return module, self.phase

    @contextmanager
    def named_modules(self) -> Generator[None]:
        """Inside, operators know in which module they ran."""
        hooks = nn.modules.module

        def enter(module: nn.Module, _: Any) -> None:
            self._modules.append(self.names.get(module, ""))

        def leave(module: nn.Module, _: Any, __: Any) -> None:
            if self._modules:
                self._modules.pop()

        handles = [hooks.register_module_forward_pre_hook(enter), hooks.register_module_forward_hook(leave)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._modules = []


class ListWriter:
    """Writes the list of one step.

    Args:
        chunk: bytes in a chunk of a result's tree.
        keep, hashed: whether results are kept, and hashed.
        watch: called with every operator and its results, before they can change.
    """

    def __init__(self, *, chunk: int, keep: bool, hashed: bool, watch: Watch | None) -> None:
        self.trace = StepTrace([], {}, chunk, None)
        self.where = Whereabouts()
        self.keep, self.hashed, self.watch = keep, hashed, watch
        self.pool = ThreadPoolExecutor(max(1, min(4, os.cpu_count() or 1)))
        self._current: dict[int, tuple[StorageWeakRef, Value]] = {}
        self._unfilled: set[int] = set()

    def find(self, tensor: Tensor) -> Value | None:
        """Return the result that ``tensor`` is a view of, if an operator of the step made it."""
        held = self._current.get(storage_key(tensor))
        return None if held is None or held[0].expired() else held[1]

    def hold(self, tensor: Tensor, value: Value) -> None:
        """Take the memory of ``tensor`` for a result's from now on."""
        self._current[storage_key(tensor)] = (StorageWeakRef(tensor.untyped_storage()), value)

    def leave_unfilled(self, tensors: Sequence[Tensor]) -> None:
        """Note memory in which nothing has been computed; what fills it is an operator."""
        self._unfilled |= {storage_key(tensor) for tensor in tensors}

    def operands(self, tensors: Sequence[Tensor], *, unread: object = None) -> list[Input | None]:
        """Return which part of which result each tensor is; None for ``unread`` and for what no operator of the step made."""
        found: list[Input | None] = []
        for tensor in tensors:
            if tensor is unread:
                found.append(None)
                continue
            value = self.find(tensor)
            if value is None:
                value = self._constant(tensor)
            dtype = STORED.get(tensor.dtype, "")
            if value is None or not dtype:
                found.append(None)
                continue
            if tensor.is_neg() or tensor.is_conj():
                self.give_up("a result is read with its sign turned, which its bytes do not say")
            if dtype not in (value.dtype, WIDER.get(value.dtype)):
                self.give_up(f"a result of {value.dtype} is read as {dtype}, bit by bit")
            found.append(Input(value.source, dtype, view_of(tensor)))
        return found

    def _constant(self, tensor: Tensor) -> Value | None:
        """Write a small tensor that no operator made into the list; None for memory not yet filled."""
        if storage_key(tensor) in self._unfilled:
            return None
        with _disable_current_modes():
            flat = whole(tensor)
            if flat.nbytes > SMALL_CONSTANT or tensor.dtype not in STORED:
                return None
            data = array_of(flat).tobytes()
        at = len(self.trace.operators)
        self.write(CONSTANT, "", {"data": data.hex()}, [], [tensor])
        return None if len(self.trace.operators) == at else self.find(tensor)

    def preserve(self, tensor: Tensor) -> None:
        """Copy what is kept of ``tensor`` before its memory is written to."""
        value = self.find(tensor)
        if value is None or not isinstance(value.data, Tensor):
            return
        if storage_key(value.data) == storage_key(tensor):
            value.settle()
            with _disable_current_modes():
                value.data = value.data.clone()

    def write(
        self,
        name: str,
        overload: str,
        attributes: Mapping[str, object],
        operands: Sequence[Input | None],
        results: Sequence[Tensor],
        *,
        place: tuple[str, str] | None = None,
        lazily: bool = False,
    ) -> None:
        """Write an operator and its results; ``place`` is its module and phase, ``lazily`` leaves roots for later."""
        known = [operand for operand in operands if operand is not None]
        if len(known) != len(operands):
            if name not in OVERWRITES:
                self.give_up(f"operator {name}: reads a tensor that no operator of the step made")
            attributes = renumbered(attributes, operands)
        at = len(self.trace.operators)
        with _disable_current_modes():
            outputs = [self._register((at, n), tensor, lazily=lazily) for n, tensor in enumerate(results)]
        module, phase = self.where.now() if place is None else place
        operator = Operator(
            name,
            overload,
            module,
            phase,
            self.where.micro_batch,
            dict(attributes),
            tuple(known),
            tuple(outputs),
        )
        with _disable_current_modes():
            self.append(operator, results)

    def append(self, operator: Operator, results: Sequence[Tensor]) -> None:
        """Put an operator at the end of the list, and show it to who watches."""
        self.trace.operators.append(operator)
        if self.watch is not None:
            self.watch(len(self.trace.operators) - 1, operator, results)

    def _register(self, source: tuple[int, int], tensor: Tensor, *, lazily: bool) -> Output:
        flat = whole(tensor)
        dtype = STORED.get(tensor.dtype)
        if dtype is None or tensor.device.type != "cpu":
            self.give_up(f"a tensor of {tensor.dtype} on {tensor.device} has no digest here")
            dtype = "U8"
        value = Value(source, dtype, flat.numel(), None)
        if self.keep:
            value.data = flat
            self.trace.values[source] = value
            self.trace.held_bytes += flat.nbytes
            if self.hashed and not lazily and self.trace.incomplete is None:
                view = array_of(flat).data if flat.numel() else memoryview(b"")
                if view.nbytes > SOON:
                    value.promised = hash_later(view, self.trace.chunk, self.pool, leaf_hashes)
                else:
                    value.hashes = chunk_hashes(view, self.trace.chunk)
        self.hold(tensor, value)
        self._unfilled.discard(storage_key(tensor))
        return Output(TensorDigest(dtype, flat.numel(), NO_ROOT), view_of(tensor))

    def give_up(self, why: str) -> None:
        """Say why the list cannot stand for the step; the first reason counts."""
        if self.trace.incomplete is None:
            self.trace.incomplete = why

    def let_go(self, live: Mapping[str, Tensor], after: HeldState) -> None:
        """Keep no tensor of the session's, which goes on to other steps; the copied state does not."""
        for name, tensor in live.items():
            value = self.find(tensor)
            if value is None or not isinstance(value.data, Tensor):
                continue
            if storage_key(value.data) == storage_key(tensor) and value.dtype == after.entries[name].dtype:
                value.settle()
                value.data = np.frombuffer(after.entries[name].data, dtype=KINDS[value.dtype])
            else:
                self.preserve(tensor)

    def fill_in(self, lazily: Mapping[tuple[int, int], bytes]) -> None:
        """Put the roots of all results into the list; ``lazily`` has those that were left for later."""
        for at, operator in enumerate(self.trace.operators):
            if operator.name == LOAD or not operator.outputs:
                continue
            outputs: list[Output] = []
            for number, output in enumerate(operator.outputs):
                root = lazily.get((at, number))
                if root is None:
                    value = self.trace.values[(at, number)]
                    value.settle()
                    root = NO_ROOT if value.hashes is None else merkle_root(value.hashes)
                outputs.append(Output(replace(output.tensor, root=root), output.view))
            self.trace.operators[at] = replace(operator, outputs=tuple(outputs))


def view_of(tensor: Tensor) -> Geometry:
    """Return which elements of its memory a tensor shows."""
    return Geometry(tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))
