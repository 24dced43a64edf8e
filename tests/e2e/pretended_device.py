"""A device that there is not: its tensors say that they are elsewhere, compute here, and refuse what a CUDA device refuses.

    python tests/e2e/pretended_device.py JOB POLICY STEPS

records the job on the processor and follows it on the device under jitter, and the other way round, and prints a JSON line for
each. Operators run on a processor's tensor inside; one that is given tensors of both devices raises, as there; so does
``numpy()``. A program of its own, since torch keeps the name of a device until it ends.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)

from tallystick.execution.dispatch import rows
from tallystick.execution.job import find_source
from tallystick.numerics.policy import find_policy
from tallystick.roles.auditor import audit
from tallystick.roles.trainer import Order, record
from tallystick.store.files import RunDirectory

NAME = "elsewhere"
CPU = torch.device("cpu")
BOTH = {"aten::copy_", "aten::_to_copy"}  # take a tensor of each device
INDEXED = {
    "aten::index",
    "aten::index_put",
    "aten::index_put_",
    "aten::_index_put_impl_",
}  # by indices of either


class Module(_DummyBackendModule):
    """What torch asks of a device's module when it forks or seeds its generators."""

    def get_rng_state(self, device: Any = 0) -> Tensor:
        return torch.zeros(16, dtype=torch.uint8)

    def set_rng_state(self, state: Tensor, device: Any = 0) -> None:
        pass

    def manual_seed_all(self, seed: int) -> None:
        pass

    def _is_in_bad_fork(self) -> bool:
        return False


_setup_privateuseone_for_python_backend(NAME, backend_module=Module())
DEVICE = torch.device(NAME, 0)


class There(Tensor):
    """A tensor of the device; ``here`` is the processor's with its values."""

    here: Tensor

    @staticmethod
    def __new__(cls, here: Tensor, requires_grad: bool = False) -> There:
        made = Tensor._make_wrapper_subclass(
            cls, here.shape, strides=here.stride(), storage_offset=here.storage_offset(), dtype=here.dtype,
            layout=here.layout, requires_grad=requires_grad, dispatch_device=True,
        )  # fmt: skip
        made.here = here
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["here"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: None, size: Any, stride: Any) -> There:
        return There(inner["here"])

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        made: Tensor = There(self.here.detach().clone(), self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            made = torch.nn.Parameter(made, self.requires_grad)
        memo[id(self)] = made
        return made

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: There) -> None:
        Tensor.data.__set__(self, value)
        self.here = value.here

    def data_ptr(self) -> int:
        return self.here.data_ptr()

    def untyped_storage(self) -> Any:
        return self.here.untyped_storage()

    def tolist(self) -> Any:
        return self.here.tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError(f"can't convert {DEVICE} device type tensor to numpy")


def _check(func: Any, args: Any, kwargs: Any) -> None:
    name = func._schema.name
    given = (args[0], *args[2:]) if name in INDEXED and isinstance(args[0], There) else args
    tensors = [] if name in BOTH else [x for x in tree_leaves((given, kwargs)) if isinstance(x, Tensor)]
    of_both = {isinstance(x, There) for x in tensors if x.dim() or isinstance(x, There)}
    if len(of_both) == 2:
        raise RuntimeError(
            f"{func}: expected all tensors to be on the same device, but found {DEVICE} and cpu"
        )


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator on what is inside, and wrap what comes of it: an argument as the tensor that it is."""
    if func is torch.ops.prim.device.default:
        return DEVICE
    if func._schema.name == "aten::to":  # seen below autograd alone, where nothing takes it apart
        return _to(dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | kwargs)
    _check(func, args, kwargs)
    known = {id(x.here): x for x in tree_leaves((args, kwargs)) if isinstance(x, There)}
    asked = kwargs.get("device")
    if func._schema.name == "aten::copy_":
        goes = isinstance(args[0], There)
    else:
        goes = bool(known) if asked is None else torch.device(asked).type == NAME
    here, named = tree_map(lambda x: x.here if isinstance(x, There) else x, (args, kwargs))
    found = func(*here, **(named if asked is None else {**named, "device": CPU}))

    def wrapped(x: Any) -> Any:
        return known[id(x)] if id(x) in known else There(x) if goes and isinstance(x, Tensor) else x

    return tree_map(wrapped, found)


def _to(given: dict[str, Any]) -> Tensor:
    x, other = given["self"], given.get("other")
    device = _numbered(given.get("device") or (x if other is None else other).device)
    dtype = given.get("dtype") or (x if other is None else other).dtype
    if (x.device, x.dtype) == (torch.device(device), dtype) and not given.get("copy"):
        return x
    return _run(torch.ops.aten._to_copy.default, (x,), {"device": device, "dtype": dtype})


def _numbered(value: Any) -> Any:
    """Return the device with its number where a device is named without: torch would ask the backend for it."""
    is_device = isinstance(value, torch.device) and value.type == NAME
    return DEVICE if is_device or (isinstance(value, str) and value == NAME) else value


class _Operators(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(_numbered, (args, kwargs or {}))
        return func(*args, **kwargs)


def _made_here(maker: Any) -> Any:
    """Return a constructor from Python's numbers, which sees no mode, that makes them here and takes them there."""

    def make(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        made = maker(*args, **kwargs)
        return made if device is None else made.to(_numbered(device))

    return make


@contextmanager
def pretended_device() -> Generator[None]:
    """Within, ``device="elsewhere"`` is a device, of which tensors are dense ones like any other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "DENSE", (*rows.DENSE, There))
        for maker in (torch.tensor, torch.as_tensor):
            patch.setattr(torch, maker.__name__, _made_here(maker))
        before = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            with _Operators(), _Functions():
                yield
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)


def _refuses_both() -> bool:
    with pretended_device(), pytest.raises(RuntimeError, match="same device"):
        torch.isin(torch.arange(3), torch.arange(3).to(NAME))
    with pretended_device(), pytest.raises(TypeError, match="numpy"):
        torch.ones(2, device=NAME).numpy()
    return True


def main(job: str, policy: str, steps: str) -> None:
    source = find_source(job)
    print(json.dumps({"refuses_both": _refuses_both()}))
    for trainer, auditor in (("cpu", NAME), (NAME, "cpu")):
        with tempfile.TemporaryDirectory() as place:
            run = RunDirectory(Path(place) / "run")
            order = Order(source, {}, find_policy(policy), steps=int(steps), device=trainer)
            with pretended_device() if trainer == NAME else nullcontext():
                record(order, run)
            with pretended_device() if auditor == NAME else nullcontext():
                report = audit(run, source, device=auditor, jitter=True)
        facts = {"verdict": report.verdict, "first": str(report.first), "moved": report.freedom.moved}
        print(json.dumps({"auditor": auditor, **facts, "differing": report.differing_elements}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
