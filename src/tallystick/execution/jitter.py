"""Last-bit noise on what operators compute: stands in for another machine when noise is measured, and in tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tallystick.execution.boundaries import DTYPES
from tallystick.execution.calls import Arguments, Operator, table_name
from tallystick.execution.operators import EXACT
from tallystick.numerics import kernels

RARELY = 4  # one in so many sixteen-bit results is disturbed (docs/adr/0006)
ACCUMULATOR = 4  # bytes of the narrowest format in which contractions add up
MASK32 = 0xFFFFFFFF


class Jitter:
    """Last-bit noise: Monte Carlo arithmetic in its simplest form (Parker 1997), for measuring and for auditing.

    ``units`` is the noise's size in units of the last place: 1, but for experiments that need to see rare events.
    """

    def __init__(self, seed: int, units: float = 1.0) -> None:
        self._seed, self._units = seed, units
        self._generators: dict[torch.device, torch.Generator] = {}
        self._drawn = 0  # bytes of the CPU's stream

    def _noise(self, x: Tensor) -> Tensor:
        generator = self._generators.get(x.device)
        if generator is None:
            generator = torch.Generator(device=x.device).manual_seed(self._seed)
            self._generators[x.device] = generator
        noise = torch.randint(-1, 2, x.shape, generator=generator, device=x.device, dtype=torch.int8)
        if x.dtype.itemsize < ACCUMULATOR:
            rare = torch.randint(0, RARELY, x.shape, generator=generator, device=x.device, dtype=torch.int8)
            noise = torch.where(rare == 0, noise, 0)
        # Whole numbers are mostly exact results (counts, masks, zeros) that every machine gets right.
        return torch.where((x == x.round()) | ~torch.isfinite(x), 0, noise).to(x.dtype)

    def disturb_(self, x: Tensor) -> None:
        """Move every element of ``x`` by up to one unit in the last place, whole numbers excepted."""
        if not _can_move(x):
            return
        if self._units == 1.0 and _is_dense_on_cpu(x):
            self._move(x, x)
        else:
            x.addcmul_(_finite(x), self._noise(x), value=self._units * _last_bit(x))

    def disturbed(self, x: Any) -> Any:
        """Return a disturbed copy of a floating tensor, anything else unchanged.

        Sixteen-bit inputs of a contraction stay: it accumulates in float32, whose noise is below their last bit.
        """
        if not isinstance(x, Tensor) or not _can_move(x) or x.dtype.itemsize < ACCUMULATOR:
            return x
        if self._units != 1.0 or not _is_dense_on_cpu(x):
            return torch.addcmul(x, _finite(x), self._noise(x), value=self._units * _last_bit(x))
        moved = torch.empty_like(x)
        if moved.stride() != x.stride():
            return self.disturbed(x.contiguous())
        self._move(x, moved)
        return moved

    def _move(self, x: Tensor, out: Tensor) -> None:
        kernels.jitter(
            x.data_ptr(), out.data_ptr(), DTYPES[x.dtype], x.numel(), self._seed & MASK32, self._seed >> 32 & MASK32,
            self._drawn, threads=torch.get_num_threads(),
        )  # fmt: skip
        self._drawn += -(-x.numel() // 16) * 16

    def after(self, func: Operator, args: Arguments, result: Any) -> None:
        """Disturb what ``func`` newly computed: its fresh outputs and the tensors it wrote in place."""
        if table_name(func) in EXACT:
            return
        schema = func._schema
        results = result if isinstance(result, (tuple, list)) else (result,)
        for value, declared in zip(results, schema.returns, strict=False):
            if declared.alias_info is None:
                for tensor in value if isinstance(value, (tuple, list)) else (value,):
                    if isinstance(tensor, Tensor):
                        self.disturb_(tensor)
        for value, declared in zip(args, schema.arguments, strict=False):
            if declared.alias_info is not None and declared.alias_info.is_write:
                for tensor in value if isinstance(value, (tuple, list)) else (value,):
                    if isinstance(tensor, Tensor):
                        self.disturb_(tensor)


def _can_move(x: Tensor) -> bool:
    """Whether noise can be added: to dense floating numbers (what a sparse tensor adds up was disturbed before)."""
    return x.is_floating_point() and x.layout == torch.strided and x.numel() > 0


def _last_bit(x: Tensor) -> float:
    """The factor by which noise moves a value: a unit in the last place of float32 and float64, or nearly two.

    Sixteen-bit results were added up in float32 and rounded once: two machines are one unit apart, if at all
    (docs/adr/0006), so half the factor, which rounds to one unit or to none.
    """
    eps = torch.finfo(x.dtype).eps
    return eps if x.dtype.itemsize >= ACCUMULATOR else 0.5 * eps


def _is_dense_on_cpu(x: Tensor) -> bool:
    """Whether the elements fill a stretch of memory, in whatever order, so that a kernel may go over them."""
    if x.device.type != "cpu" or x.dtype not in DTYPES or type(x) not in (Tensor, torch.nn.Parameter):
        return False
    if x.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _finite(x: Tensor) -> Tensor:
    return x.nan_to_num(0.0, 0.0, 0.0)


class JitterMode(TorchDispatchMode):
    """Disturb every operator's output; for code that has no decisions, such as an optimizer."""

    def __init__(self, jitter: Jitter) -> None:
        super().__init__()
        self._jitter = jitter

    def __torch_dispatch__(self, func: Operator, types: Any, args: Arguments = (), kwargs: Any = None) -> Any:
        """Run ``func`` and disturb what it computed."""
        result = func(*args, **(kwargs or {}))
        self._jitter.after(func, args, result)
        return result
