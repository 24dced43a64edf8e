"""One dispatch mode sees every operator of a step, forward and backward.

It does four things, each only where the operator table says so:

* an operator whose output jumps becomes a decision site: near its switching point the branch taken
  is logged, or the logged branch is taken, by moving the input to the stated side of the point;
* random operators draw from Philox instead of torch's generators;
* under ``fp64`` a cast to a narrower float is lifted, and its name kept;
* for calibration and for the ``jitter`` profile, outputs receive last-bit noise.

The user's model is not touched; leaving the mode leaves nothing behind.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tallystick.errors import Nondeterminism
from tallystick.execution.determinism import filling_results
from tallystick.execution.operators import (
    CHOICES,
    COMPARISONS,
    EXACT,
    LATTICES,
    RANDOM,
    REDUCTIONS,
    RESTRICTED,
    SMOOTH,
    STATEFUL,
    SWITCHES,
)
from tallystick.execution.randomness import RandomStream
from tallystick.numerics import kernels

BELOW, EQUAL, ABOVE = 0, 1, 2  # symbols of a two-bit decision
NARROW = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
RARELY = 4  # one in so many sixteen-bit results is disturbed (docs/adr/0006)
UNSET = frozenset(
    f"aten::{name}"
    for name in (
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "resize_",
        "resize_as_",
    )
)  # operators that leave memory unset
SAMPLE = 1 << 12  # elements whose rms stands for that of a decision's input
ACCUMULATOR = 4  # bytes of the narrowest format in which contractions add up
NOWHERE = torch.empty(0, dtype=torch.int64)
Operator = Any  # torch._ops.OpOverload; its stubs are private
Arguments = tuple[Any, ...]


class DecisionTape(Protocol):
    """Where decisions are written, or read from. Sites come in the order of the operators."""

    def pending(self, x: Tensor) -> bool:
        """Go to the next site, whose input is ``x``; whether anything has to be logged or obeyed there."""
        ...

    def band(self, rms: float) -> float:
        """Return the distance below which elements of this site are ambiguous."""
        ...

    def decide(self, numel: int, width: int, near: Tensor, symbols: Callable[[Tensor], Tensor],
               distance: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor] | None:  # fmt: skip
        """Take the decision of this site.

        Args:
            numel: elements of the site.
            width: bits of a symbol.
            near: ambiguous flat indexes, ascending, by the caller's own values.
            symbols: the caller's own branches at given flat indexes (int64).
            distance: for pairs (flat index, symbol) the distance between that branch and the caller's own.

        Returns:
            Indexes and symbols to obey, or None.
        """
        ...


@dataclass
class Findings:
    """What a pass over the operators met that people should know by name."""

    unknown: set[str] = field(default_factory=set[str])
    lifted: set[str] = field(default_factory=set[str])
    read: set[str] = field(default_factory=set[str])


DTYPES = {torch.float32: np.float32, torch.float64: np.float64}
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
        if _name(func) in EXACT:
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


Handler = Callable[["Capture", Operator, Arguments, dict[str, Any]], Any]


class Capture(TorchDispatchMode):
    """The mode itself; active during forward, backward and clipping of one step."""

    def __init__(
        self,
        tape: DecisionTape,
        random: RandomStream,
        *,
        compute: torch.dtype,
        findings: Findings,
        smooth: frozenset[str] = frozenset(),
        jitter: Jitter | None = None,
    ) -> None:
        super().__init__()
        self.tape = tape
        self.random = random
        self.compute = compute
        self.findings = findings
        self.smooth = smooth
        self.jitter = jitter

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # compiled modules are refused: no need of torch's guard around every operator

    def __torch_dispatch__(self, func: Operator, types: Any, args: Arguments = (), kwargs: Any = None) -> Any:
        """Run ``func``, through its handler where it has one."""
        kwargs = kwargs or {}
        handler = _HANDLERS.get(func)
        if handler is None:
            handler = _HANDLERS[func] = _handler_for(func)
        if self.compute is torch.float64 and kwargs.get("dtype") in NARROW:
            self.findings.lifted.add(_name(func))
            kwargs = {**kwargs, "dtype": torch.float64}
        if self.jitter is not None and _name(func) in REDUCTIONS:
            inputs = 1 if _name(func) in STATEFUL else len(args)
            args = (*(self.jitter.disturbed(value) for value in args[:inputs]), *args[inputs:])
        result = handler(self, func, args, kwargs)
        if self.jitter is not None:
            self.jitter.after(func, args, result)
        return result

    # -- decisions -------------------------------------------------------------------------

    def forced(
        self, x: Tensor, nearest: Callable[[Tensor], Tensor], *, exact_is_structural: bool = False
    ) -> Tensor | None:
        """Take one decision on ``x`` against the switching point ``nearest(x)`` of each element.

        Returns a contiguous copy of ``x`` with the obeyed elements moved to the stated side, or None
        when there is nothing to obey.
        """
        moved = self.moved(x, nearest, exact_is_structural=exact_is_structural)
        if moved is None:
            return None
        target = x.detach().reshape(-1).clone()
        at, values = moved
        target[at] = values
        return target.reshape(x.shape)

    def moved(
        self, x: Tensor, nearest: Callable[[Tensor], Tensor], *, exact_is_structural: bool = False
    ) -> tuple[Tensor, Tensor] | None:
        """Take the decision; return the flat indexes of the elements to obey and the values that put them there."""
        flat = x.detach().reshape(-1)
        if not self.tape.pending(flat):
            return None
        band = self.tape.band(sampled_rms(flat))
        point = nearest(flat)
        near = _near(flat, point, band) if band > 0.0 else NOWHERE.to(x.device)
        if exact_is_structural:
            near = _without_structural(flat, point, near)
        return self._obeyed(flat, point, near)

    def rectified(self, func: Operator, x: Tensor) -> Tensor:
        """Return ``relu(x)`` of a contiguous ``x``, its decision taken; on the CPU in the pass that looks for near elements."""
        flat = x.detach().view(-1)
        if not self.tape.pending(flat):
            return func(x)
        band, point = self.tape.band(sampled_rms(flat)), torch.zeros((), dtype=x.dtype, device=x.device)
        if band > 0.0 and x.device.type == "cpu" and x.dtype in DTYPES:
            result = torch.empty_like(x, memory_format=torch.contiguous_format)
            found = kernels.relu(flat.numpy(), result.view(-1).numpy(), band, threads=torch.get_num_threads())
            near = torch.from_numpy(found)
        else:
            result = func(x)
            near = _near(flat, point, band) if band > 0.0 else NOWHERE.to(x.device)
        moved = self._obeyed(flat, point, near)
        if moved is not None:
            at, values = moved
            result.view(-1)[at] = values.clamp_(min=0.0)
        return result

    def _obeyed(self, flat: Tensor, point: Tensor, near: Tensor) -> tuple[Tensor, Tensor] | None:
        """Put the pending decision on the elements ``near`` to the tape; return what ``moved`` does."""

        def symbols(at: Tensor) -> Tensor:
            return (torch.sign(flat[at] - _take(point, at)) + 1).to(torch.int64)

        def distance(pairs: Tensor) -> Tensor:
            away = (flat[pairs[:, 0]] - _take(point, pairs[:, 0])).abs()
            return torch.where(pairs[:, 1] <= ABOVE, away, math.inf)

        obey = self.tape.decide(flat.numel(), 2, near, symbols, distance)
        if obey is None:
            return None
        at, side = obey
        own, at_point = flat[at], _take(point, at)
        below, above = _neighbours(at_point)
        values = torch.where(
            side == ABOVE,
            torch.maximum(own, above),
            torch.where(side == BELOW, torch.minimum(own, below), at_point),
        )
        return at, values

    def chosen(self, index: Tensor, runner_up_gap: Tensor, choices: int, rms: float,
               gap_to: Callable[[Tensor], Tensor]) -> Tensor:  # fmt: skip
        """Take the pending decision on an operator that chose ``index`` per output element.

        Args:
            index: int64 output of the operator.
            runner_up_gap: distance to the best candidate that was not chosen, same shape.
            choices: number of values ``index`` may take.
            rms: size of the operator's input.
            gap_to: for pairs (flat output position, other index), how far that other candidate is behind;
                infinite for an index that does not exist.

        Returns:
            The indexes to use.
        """
        flat = index.reshape(-1)
        band = self.tape.band(rms)
        near = (runner_up_gap.reshape(-1) < band).nonzero().squeeze(1)
        width = max(1, (choices - 1).bit_length())
        obey = self.tape.decide(flat.numel(), width, near, lambda at: flat[at], gap_to)
        if obey is None:
            return index
        at, symbol = obey
        out = flat.clone()
        out[at] = symbol
        return out.reshape(index.shape)


@cache
def _name(func: Operator) -> str:
    name = func._schema.name
    return (
        name[:-1]
        if name.endswith("_") and not name.endswith("__") and name not in RANDOM and name not in EXACT
        else name
    )


def sampled_rms(flat: Tensor) -> float:
    """Return the rms of a decision's input, from an even sample of large ones: both parties take the same elements.

    An odd stride, so that a sample of images is not one of their borders.
    """
    sample = flat[:: flat.numel() // SAMPLE | 1] if flat.numel() > 2 * SAMPLE else flat
    return _rms(sample) or _rms(flat)


def _rms(flat: Tensor) -> float:
    if flat.numel() == 0:
        return 0.0
    if flat.device.type == "cpu" and flat.dtype in (torch.float32, torch.float64):
        total = np.empty(1, dtype=np.float64)
        kernels.block_square_sums(
            flat.contiguous().numpy(), flat.numel(), total, threads=torch.get_num_threads()
        )
        return math.sqrt(float(total[0]) / flat.numel())
    return float(torch.linalg.vector_norm(flat, dtype=torch.float64).item()) / math.sqrt(flat.numel())


def _near(flat: Tensor, point: Tensor, band: float) -> Tensor:
    if flat.device.type == "cpu" and flat.dtype in DTYPES and not point.dim():
        found = kernels.near(flat.contiguous().numpy(), point.item(), band, threads=torch.get_num_threads())
        return torch.from_numpy(found)
    return ((flat - point).abs() < band).nonzero().squeeze(1)


def _without_structural(flat: Tensor, point: Tensor, near: Tensor) -> Tensor:
    """Return ``near`` without the elements that lie on a lattice point because of what they are, not by chance.

    Zeros (of a ReLU, of padding) are such; other points where more than one element in eight hits one exactly,
    as counts and codes do. A chance hit is logged: elsewhere it may fall beside the point.
    """
    value = flat[near]
    exact = value == _take(point, near)
    structural = exact & (value == 0.0)
    if int((exact & ~structural).sum()) > flat.numel() // 8:
        structural = exact
    return near[~structural]


def _take(point: Tensor, at: Tensor) -> Tensor:
    return point[at] if point.dim() else point.expand(at.shape)


def _neighbours(point: Tensor) -> tuple[Tensor, Tensor]:
    """The values just below and above; around zero the smallest normal number, which no machine flushes."""
    tiny = torch.finfo(point.dtype).tiny
    infinity = torch.tensor(math.inf, dtype=point.dtype, device=point.device)
    below = torch.where(point == 0, -tiny, torch.nextafter(point, -infinity))
    above = torch.where(point == 0, tiny, torch.nextafter(point, infinity))
    return below, above


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


# -- handlers ----------------------------------------------------------------------------------


def _plain(mode: Capture, func: Operator, args: Arguments, kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


def _unset(mode: Capture, func: Operator, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """Run an operator that leaves memory unset with torch filling it: whoever reads it has no number, here as elsewhere."""
    with filling_results(True):
        return func(*args, **kwargs)


def _read(mode: Capture, func: Operator, args: Arguments, kwargs: dict[str, Any]) -> Any:
    if _is_float(args[0]):
        mode.findings.read.add(_name(func))
    return func(*args, **kwargs)


def _unknown(mode: Capture, func: Operator, args: Arguments, kwargs: dict[str, Any]) -> Any:
    name = _name(func)
    if name not in mode.smooth and any(map(_is_float, tree_leaves((args, kwargs)))):
        mode.findings.unknown.add(name)
        raise Nondeterminism(
            f"operator {func}: not in the operator table, so nobody can say whether its output jumps; "
            f'if it is continuous, declare it: smooth={{"{name}"}}'
        )
    return func(*args, **kwargs)


def _restricted(mode: Capture, func: Operator, args: Arguments, kwargs: dict[str, Any]) -> Any:
    _refuse_jumping_form(func, args, kwargs)
    return func(*args, **kwargs)


def _refuse_jumping_form(func: Operator, args: Arguments, kwargs: dict[str, Any]) -> None:
    restriction = RESTRICTED[_name(func)]
    value = _named(func, args, kwargs, restriction.argument)
    if value is not None and restriction.jumps(value) and any(map(_is_float, tree_leaves((args, kwargs)))):
        raise Nondeterminism(
            f"operator {func}: jumps with {restriction.argument}={value}, and has no decision site; "
            f"{restriction.reason}"
        )


def _switch(mode: Capture, func: Operator, args: Arguments, kwargs: dict[str, Any]) -> Any:
    name = _name(func)
    switch = SWITCHES[name]
    x = args[switch.argument]
    if name in COMPARISONS and isinstance(args[1], Tensor):
        return _compare_tensors(mode, func, args, kwargs)
    if not _is_float(x) or x.numel() == 0:
        return func(*args, **kwargs)
    points = sorted(set(switch.points(args, kwargs)))
    if name == "aten::threshold_backward" and points == [0.0]:
        return func(*args, **kwargs)  # of a ReLU: the branch was decided at its input and shows in its output
    if name == "aten::threshold" and points == [0.0]:
        raise Nondeterminism(
            f"operator {func}: threshold 0 cannot be told from a ReLU in the backward pass; use relu or where"
        )
    if not points:
        return func(*args, **kwargs)
    values = torch.tensor(points, dtype=x.dtype, device=x.device)

    def nearest(flat: Tensor) -> Tensor:
        if len(points) == 1:
            return values[0]
        return values[(flat.unsqueeze(1) - values).abs().argmin(dim=1)]

    if name == "aten::relu" and x.is_contiguous() and not func._schema.is_mutable:
        return mode.rectified(func, x)
    moved = mode.forced(x, nearest)
    if moved is not None:
        if func._schema.is_mutable:
            x.copy_(moved)
        else:
            args = (*args[: switch.argument], moved, *args[switch.argument + 1 :])
    return func(*args, **kwargs)


def _compare_tensors(mode: Capture, func: Operator, args: Arguments, kwargs: dict[str, Any]) -> Any:
    x, y = args[0], args[1]
    if not (_is_float(x) or _is_float(y)) or (x.numel() == 0 or y.numel() == 0):
        return func(*args, **kwargs)
    dtype = torch.promote_types(x.dtype, y.dtype)
    x, y = torch.broadcast_tensors(x.to(dtype), y.to(dtype))
    flat = y.reshape(-1)
    moved = mode.forced(x, lambda _: flat)
    if moved is None:
        return func(*args, **kwargs)
    if func._schema.is_mutable:
        args[0].copy_(moved)
        return func(*args, **kwargs)
    return func(moved, y, *args[2:], **kwargs)


def _lattice(mode: Capture, func: Operator, args: Arguments, kwargs: dict[str, Any]) -> Any:
    x = args[0]
    if not _is_float(x) or x.numel() == 0:
        return func(*args, **kwargs)
    name = _name(func)
    if name in RESTRICTED:
        _refuse_jumping_form(func, args, kwargs)
    offset = LATTICES[name]
    moved = mode.forced(x, lambda flat: torch.round(flat - offset) + offset, exact_is_structural=True)
    if moved is None:
        return func(*args, **kwargs)
    if func._schema.is_mutable:
        x.copy_(moved)
        return func(*args, **kwargs)
    return func(moved, *args[1:], **kwargs)


def _cast(mode: Capture, func: Operator, args: Arguments, kwargs: dict[str, Any]) -> Any:
    x, dtype = args[0], kwargs.get("dtype")
    if not _is_float(x) or dtype is None or x.numel() == 0:
        return func(*args, **kwargs)
    if not dtype.is_floating_point and not dtype.is_complex:
        moved = mode.forced(x, torch.round, exact_is_structural=True)
        return func(x if moved is None else moved, *args[1:], **kwargs)
    if (
        torch.finfo(dtype).eps > torch.finfo(mode.compute).eps
        and torch.finfo(x.dtype).eps < torch.finfo(dtype).eps
    ):
        mode.findings.unknown.add("aten::_to_copy")
        raise Nondeterminism(
            f"cast from {x.dtype} to {dtype}: a jump of {torch.finfo(dtype).eps:.1e} inside a step that computes in "
            f"{mode.compute}; leave the cast (or autocast) out, or use a policy made for it"
        )
    return func(*args, **kwargs)


def _max_pool(dims: int) -> Handler:
    def handle(mode: Capture, func: Operator, args: Arguments, kwargs: dict[str, Any]) -> Any:
        x = args[0]
        values, index = func(*args, **kwargs)
        spec = [_spread(_positional(func, args, kwargs, i), dims) for i in range(1, 5)]
        kernel, stride, padding, dilation = spec
        stride = stride or kernel
        ceil_mode = bool(_positional(func, args, kwargs, 5))
        _decide_windows(mode, x, values, index, kernel, stride, padding, dilation, ceil_mode)
        return _windows_taken(x, values, index, dims)

    return handle


def _adaptive_max_pool(dims: int) -> Handler:
    def handle(mode: Capture, func: Operator, args: Arguments, kwargs: dict[str, Any]) -> Any:
        x, size = args[0], args[1]
        sides = x.shape[-dims:]
        if any(side % out for side, out in zip(sides, size, strict=True)):
            raise Nondeterminism(
                f"operator {func}: input {tuple(sides)} is not a multiple of output {tuple(size)}; "
                "windows of unequal size have no decision site"
            )
        values, index = func(*args, **kwargs)
        kernel = [side // out for side, out in zip(sides, size, strict=True)]
        _decide_windows(mode, x, values, index, kernel, kernel, [0] * dims, [1] * dims, False)
        return _windows_taken(x, values, index, dims)

    return handle


def _positional(func: Operator, args: Arguments, kwargs: dict[str, Any], position: int) -> Any:
    argument = func._schema.arguments[position]
    return args[position] if len(args) > position else kwargs.get(argument.name, argument.default_value)


def _named(func: Operator, args: Arguments, kwargs: dict[str, Any], name: str) -> Any:
    """Return the argument called ``name``, its default if not given, None if ``func`` has none of that name."""
    position, default = _declared(func, name)
    return args[position] if position < len(args) else kwargs.get(name, default)


@cache
def _declared(func: Operator, name: str) -> tuple[int, Any]:
    """Position and default of an argument; a position that no call has, and None, if there is none of that name."""
    for position, declared in enumerate(func._schema.arguments):
        if declared.name == name:
            return position, declared.default_value
    return sys.maxsize, None


def _spread(value: Any, dims: int) -> list[int]:
    sides = list(value)
    return sides * dims if len(sides) == 1 else sides


def _decide_windows(mode: Capture, x: Tensor, values: Tensor, index: Tensor, kernel: list[int], stride: list[int],
                    padding: list[int], dilation: list[int], ceil_mode: bool) -> None:  # fmt: skip
    """Compare each window's maximum with its runner-up; obey the log by writing into ``index``."""
    dims = len(kernel)
    if not mode.tape.pending(x.detach().reshape(-1)):
        return
    rms = sampled_rms(x.detach().reshape(-1))
    band = mode.tape.band(rms)
    outs = values.shape[-dims:]
    pads: list[int] = []
    for axis in reversed(range(dims)):
        need = (outs[axis] - 1) * stride[axis] + dilation[axis] * (kernel[axis] - 1) + 1
        pads += [padding[axis], max(0, need - x.shape[-dims + axis] - padding[axis])]
    padded = torch.nn.functional.pad(x, pads, value=-math.inf) if any(pads) else x
    within = torch.zeros(values.shape, dtype=torch.int16, device=x.device)
    zeros = torch.zeros_like(within)
    total = 0
    for offset in np.ndindex(*kernel):
        window = padded
        for axis in range(dims):
            first = offset[axis] * dilation[axis]
            window = window.narrow(-dims + axis, first, window.shape[-dims + axis] - first)
            window = _every(window, axis - dims, stride[axis], outs[axis])
        within += (values - window) < band
        zeros += (window == 0) | torch.isinf(window)
        total += 1
    # A window of exact zeros is what a ReLU leaves; its zeros are decided there, equal on both sides.
    near = ((within > 1) & (zeros < total)).reshape(-1).nonzero().squeeze(1)
    plane = math.prod(x.shape[-dims:])
    flat_index = index.reshape(-1)
    flat_x = x.detach().reshape(-1)
    per_plane = math.prod(outs)

    def gap_to(pairs: Tensor) -> Tensor:
        at, other = pairs[:, 0], pairs[:, 1].clamp(max=plane - 1)
        position = at // per_plane * plane + other
        gap = (values.reshape(-1)[at] - flat_x[position]).abs()
        inside = _inside_window(
            at % per_plane, other, outs, x.shape[-dims:], kernel, stride, padding, dilation
        )
        return torch.where(inside & (pairs[:, 1] < plane), gap, math.inf)

    width = max(1, (plane - 1).bit_length())
    obey = mode.tape.decide(flat_index.numel(), width, near, lambda at: flat_index[at], gap_to)
    if obey is not None:
        at, symbol = obey
        flat_index = flat_index.clone()
        flat_index[at] = symbol
        index.copy_(flat_index.reshape(index.shape))


def _every(window: Tensor, dim: int, step: int, count: int) -> Tensor:
    return window.narrow(dim, 0, (count - 1) * step + 1)[
        (..., slice(None, None, step)) + (slice(None),) * (-dim - 1)
    ]


def _inside_window(out: Tensor, other: Tensor, outs: Any, sides: Any, kernel: list[int], stride: list[int],
                   padding: list[int], dilation: list[int]) -> Tensor:  # fmt: skip
    inside = torch.ones_like(out, dtype=torch.bool)
    for axis in reversed(range(len(kernel))):
        o, i = out % outs[axis], other % sides[axis]
        out, other = out // outs[axis], other // sides[axis]
        offset = i - (o * stride[axis] - padding[axis])
        inside &= (offset >= 0) & (offset % dilation[axis] == 0) & (offset // dilation[axis] < kernel[axis])
    return inside


def _windows_taken(x: Tensor, values: Tensor, index: Tensor, dims: int) -> tuple[Tensor, Tensor]:
    plane = x.reshape(*x.shape[:-dims], -1)
    taken = plane.gather(-1, index.reshape(*index.shape[:-dims], -1)).reshape(values.shape)
    return taken, index


def _best_of_dim(largest: bool) -> Handler:
    def handle(mode: Capture, func: Operator, args: Arguments, kwargs: dict[str, Any]) -> Any:
        x, dim = args[0], args[1]
        values, index = func(*args, **kwargs)
        if not _is_float(x) or x.dim() == 0 or x.shape[dim] < 2:
            return values, index
        keep = values.dim() == x.dim()
        index = _decide_ranks(mode, x, dim, index if keep else index.unsqueeze(dim), largest)
        values = x.gather(dim, index)
        return (values, index) if keep else (values.squeeze(dim), index.squeeze(dim))

    return handle


def _arg_best(largest: bool) -> Handler:
    def handle(mode: Capture, func: Operator, args: Arguments, kwargs: dict[str, Any]) -> Any:
        x = args[0]
        index = func(*args, **kwargs)
        if not _is_float(x):
            return index
        dim = _positional(func, args, kwargs, 1)
        keep = bool(_positional(func, args, kwargs, 2))
        flat = x.reshape(-1) if dim is None else x
        axis = 0 if dim is None else dim
        if flat.dim() == 0 or flat.shape[axis] < 2:
            return index
        kept = index.reshape(1) if dim is None else (index if keep else index.unsqueeze(axis))
        return _decide_ranks(mode, flat, axis, kept, largest).reshape(index.shape)

    return handle


def _topk(mode: Capture, func: Operator, args: Arguments, kwargs: dict[str, Any]) -> Any:
    x, k, dim = args[0], args[1], _positional(func, args, kwargs, 2)
    largest = bool(_positional(func, args, kwargs, 3))
    # In rank order whatever was asked: an unsorted result may come in any order, so every device may choose this one.
    values, index = func(x, k, dim, largest, True)
    if not _is_float(x) or x.dim() == 0 or index.numel() == 0:
        return values, index
    index = _decide_ranks(mode, x, dim, index, largest)
    return x.gather(dim, index), index


def _sort(mode: Capture, func: Operator, args: Arguments, kwargs: dict[str, Any]) -> Any:
    x = args[0]
    values, index = func(*args, **kwargs)
    if not _is_float(x) or x.dim() == 0 or index.numel() == 0:
        return values, index
    offset = 1 if func._schema.overload_name.startswith("stable") else 0
    dim = kwargs.get("dim", args[1 + offset] if len(args) > 1 + offset else -1)
    descending = kwargs.get("descending", args[2 + offset] if len(args) > 2 + offset else False)
    index = _decide_ranks(mode, x, dim, index, bool(descending))
    return x.gather(dim, index), index


def _decide_ranks(mode: Capture, x: Tensor, dim: int, index: Tensor, largest: bool) -> Tensor:
    """Decide the first ``k`` ranks along ``dim``: a rank is ambiguous if a neighbour in rank is within the band."""
    x = x.detach()
    if not mode.tape.pending(x.reshape(-1)):
        return index
    k, n = index.shape[dim], x.shape[dim]
    extended = torch.topk(x, min(k + 1, n), dim=dim, largest=largest, sorted=True).values.movedim(dim, -1)
    steps = (extended[..., 1:] - extended[..., :-1]).abs()
    infinite = torch.full_like(extended[..., :1], math.inf)
    after = torch.cat((steps, infinite), dim=-1)[..., :k]
    before = torch.cat((infinite, steps), dim=-1)[..., :k]
    gap = torch.minimum(before, after)
    moved = index.movedim(dim, -1).contiguous()
    rows = x.movedim(dim, -1).reshape(-1, n)
    flat = moved.reshape(-1)

    def gap_to(pairs: Tensor) -> Tensor:
        at, other = pairs[:, 0], pairs[:, 1].clamp(max=n - 1)
        row = at // k
        stated = flat.clone()
        stated[at] = other
        ranks = stated.reshape(-1, k)[row].sort(dim=1).values
        twice = (ranks[:, 1:] == ranks[:, :-1]).any(dim=1)  # no honest order holds one element at two ranks
        gap = (rows[row, flat[at]] - rows[row, other]).abs()
        return torch.where(twice | (pairs[:, 1] >= n), math.inf, gap)

    return mode.chosen(moved, gap, n, sampled_rms(x.reshape(-1)), gap_to).movedim(-1, dim)


def _random(mode: Capture, func: Operator, args: Arguments, kwargs: dict[str, Any]) -> Any:
    if func._schema.name in ("aten::bernoulli", "aten::bernoulli_"):
        p = _named(func, args, kwargs, "p")
        probability = args[0] if p is None else p
        if _is_float(probability):
            return _bernoulli(mode, func, args, kwargs, probability)
    return mode.random.draw(func, args, kwargs)


def _bernoulli(
    mode: Capture, func: Operator, args: Arguments, kwargs: dict[str, Any], probability: Tensor
) -> Tensor:
    """Compare computed probabilities with portable uniform numbers: a decision where the two are close."""
    p = probability.detach().double()
    point = mode.random.thresholds(func, kwargs.get("generator"), p)
    flat = point.reshape(-1)
    moved = mode.forced(p, lambda _: flat) if p.numel() else None
    drawn = (p if moved is None else moved) > point
    return args[0].copy_(drawn) if func._schema.is_mutable else drawn.to(args[0].dtype)


def _refuse_random(mode: Capture, func: Operator, args: Arguments, kwargs: dict[str, Any]) -> Any:
    if _named(func, args, kwargs, "dropout_p") == 0.0:
        return func(*args, **kwargs)
    raise Nondeterminism(
        f"operator {func}: draws random numbers that other devices cannot repeat; replaced are dropout, bernoulli, "
        "rand*, randint, randperm, uniform_ and normal_"
    )


_CHOICE_HANDLERS: dict[str, Handler] = {
    "aten::max_pool2d_with_indices": _max_pool(2),
    "aten::max_pool3d_with_indices": _max_pool(3),
    "aten::adaptive_max_pool2d": _adaptive_max_pool(2),
    "aten::adaptive_max_pool3d": _adaptive_max_pool(3),
    "aten::max.dim": _best_of_dim(True),
    "aten::min.dim": _best_of_dim(False),
    "aten::argmax": _arg_best(True),
    "aten::argmin": _arg_best(False),
    "aten::topk": _topk,
    "aten::sort": _sort,
}
assert frozenset(_CHOICE_HANDLERS) == CHOICES


def _handler_for(func: Operator) -> Handler:
    name = _name(func)
    for key in (name, f"{name}.{func._schema.overload_name}"):
        if key in _CHOICE_HANDLERS:
            return _CHOICE_HANDLERS[key]
    if name in RANDOM:
        return _random
    if torch.Tag.nondeterministic_seeded in func.tags:
        return _refuse_random
    if name in SWITCHES:
        return _switch
    if name in LATTICES:
        return _lattice
    if name in RESTRICTED:
        return _restricted
    if name == "aten::_to_copy":
        return _cast
    if name == "aten::_local_scalar_dense":
        return _read
    if name in UNSET:
        return _unset
    return _plain if name in SMOOTH or name in EXACT or name.startswith("prim::") else _unknown


_HANDLERS: dict[Operator, Handler] = {}
