"""Last-bit noise on what operators compute: stands in for another machine when noise is measured, and in tests."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tallystick.execution.dispatch.boundaries import DTYPES, MASK, may_mask
from tallystick.execution.dispatch.calls import Arguments, Operator
from tallystick.execution.dispatch.operator_noise import (
    ATTENTION_UNITS,
    FEWEST,
    ONE_IN,
    SIXTEEN_BIT,
    WHOLE,
    Noise,
    Sixteen,
    find_noise,
    only_moves,
    sixteen_bit,
    written_by,
)
from tallystick.numerics.kernels import random_words
from tallystick.numerics.rounding_tensors import philox_words

LOSSES = frozenset(
    f"aten::{name}"
    for name in (
        "_log_softmax", "binary_cross_entropy_with_logits", "huber_loss", "log_sigmoid_forward", "mse_loss", "smooth_l1_loss"
    )
)  # fmt: skip
"""Operators whose first argument is what a model says: one last place of sixteen bits there may be a tenth of a gradient."""
MASK32 = 0xFFFFFFFF
CHUNK = 1 << 24  # elements that tensor operations move at a time; a multiple of 16
EPS32 = 2.0**-23
Run = Callable[[Arguments, dict[str, Any]], Any]


class Jitter:
    """Last-bit noise: Monte Carlo arithmetic in its simplest form (Parker 1997), for measuring and for auditing.

    How much an operator moves is said by ``operator_noise``. ``units`` multiplies it: 1, but for experiments that need to
    see rare events. Of sixteen-bit results ``fewest`` move in each call at least, where what is rare has to be seen: none
    where it counts how rare. With ``outputs`` all sixteen-bit numbers that a loss is made of move by their last place: what the
    worst of them would do, which a few drawn ones rarely show.
    """

    def __init__(self, seed: int, units: float = 1.0, *, fewest: int = FEWEST, outputs: bool = False) -> None:
        self._seed, self._units, self._fewest, self._outputs = seed, units, fewest, outputs
        self._generator = torch.Generator().manual_seed(seed)  # of the CPU wherever the tensors are
        self._drawn = 0  # bytes of the stream of dense tensors

    # -- one call --------------------------------------------------------------------------

    def around(self, func: Operator, args: Arguments, kwargs: dict[str, Any], run: Run) -> Any:
        """Return what ``run`` makes of the arguments of ``func``, with the noise of another machine.

        Arguments that ``func`` writes into are passed as they are, so that every view of them sees the write.
        """
        if self._outputs and func._schema.name in LOSSES:
            args = (self._at_last_place(args[0]), *args[1:])
        noise = find_noise(func)
        if noise is None or only_moves(func, args, kwargs):
            return run(args, kwargs)
        written = written_by(func)
        form = sixteen_bit(func, noise, args, kwargs)
        if form is Sixteen.ACCUMULATED:
            return self._accumulated(args, kwargs, run, noise)
        if form is Sixteen.ATTENTION:
            kwargs = {**kwargs, "scale": self._moved_scale(args, kwargs)}
        count = noise.moved_inputs(func, args, kwargs)
        way = noise.input_units(args)
        given = tuple(
            self.disturbed(value, whole=noise.whole, units=way) if at < count and at not in written else value
            for at, value in enumerate(args)
        )
        before = (
            tree_map(_cloned, args[0])
            if noise.touched and 0 in written
            else args[0]
            if noise.touched
            else None
        )
        result = run(given, kwargs)
        for number, tensor in enumerate(_computed(func, args, kwargs, result, written)):
            self._move_result(tensor, noise, args, before, noise.units(args, tensor, number, count > 0))
        return result

    def _at_last_place(self, x: Any) -> Any:
        """Return a tensor of sixteen-bit numbers, or of float32 that were, each moved to a neighbour; anything else as it is."""
        if not isinstance(x, Tensor) or not x.numel():
            return x
        if x.dtype in SIXTEEN_BIT:
            return self._neighbours(x)
        if x.dtype != torch.float32:
            return x
        for narrow in (
            torch.bfloat16,
            torch.float16,
        ):  # most numbers of the first are some of the second, too
            if torch.equal(x, x.to(narrow).to(x.dtype)):
                return self._neighbours(x.to(narrow)).to(x.dtype)
        return x

    def _neighbours(self, x: Tensor) -> Tensor:
        up = torch.randint(0, 2, x.shape, generator=self._generator, dtype=torch.int16)
        return _neighbour(x, up.to(x.device))

    def _accumulated(self, args: Arguments, kwargs: dict[str, Any], run: Run, noise: Noise) -> Any:
        """Return the sixteen-bit sums of sixteen-bit arguments: added up in float32, disturbed there, and rounded once."""
        narrow = next(t.dtype for t in tree_leaves(args) if _is_sixteen(t))
        wanted = kwargs.get("dtype") or narrow
        if wanted in SIXTEEN_BIT and "dtype" in kwargs:
            kwargs = {**kwargs, "dtype": torch.float32}
        wide = tree_map(lambda t: t.float() if _is_sixteen(t) else t, args)
        plain = run(wide, kwargs)
        way = noise.input_units(args)
        noisy = run(tree_map(lambda t: self.disturbed(t, whole=noise.whole, units=way), wide), kwargs)
        numbers = itertools.count()

        def rounded(own: Any, moved: Any) -> Any:
            number = next(numbers)
            if not isinstance(own, Tensor) or not own.is_floating_point():
                return own
            self.disturb_(moved, whole=noise.whole, units=noise.units(args, moved, number, True))
            if wanted not in SIXTEEN_BIT:
                return moved
            found = torch.where(_is_tie(own, wanted), own, moved).to(wanted)
            if found.numel():
                self._nudge_(found, 0.0)
            return found

        return tree_map(rounded, plain, noisy)

    def _moved_scale(self, args: Arguments, kwargs: dict[str, Any]) -> float:
        """Return the factor of attention's scores, moved by some last places of float32: the scores' noise on another machine."""
        scale = kwargs.get("scale") or args[0].shape[-1] ** -0.5
        way = float(self._noise(torch.zeros(())))
        return scale * (1.0 + way * self._units * ATTENTION_UNITS * EPS32)

    def _move_result(
        self, x: Tensor, noise: Noise, args: Arguments, before: Tensor | None, units: float
    ) -> None:
        if not _can_move(x):
            return
        if x.dtype in SIXTEEN_BIT:
            if noise.sixteenths:
                self._nudge_(x, noise.sixteenths)
            return
        old = before is not None and before.shape == x.shape and x == before
        moved = x.clone() if isinstance(old, Tensor) else x
        self.disturb_(moved, whole=noise.whole, units=units)
        if isinstance(old, Tensor):
            x.copy_(torch.where(old, x, moved))
        if noise.beside is not None:
            aside = _finite(args[noise.beside])
            x.addcmul_(aside * (x != 0), self._noise(x), value=self._units * _eps(x))

    # -- one tensor ------------------------------------------------------------------------

    def _noise(self, x: Tensor) -> Tensor:
        way = torch.randint(0, 2, x.shape, generator=self._generator, dtype=torch.int8)
        return (2 * way - 1).to(x.device, x.dtype)

    def disturb_(self, x: Tensor, *, whole: bool = False, units: float = 1.0) -> None:
        """Move every element of float32 or float64 by up to ``units`` last places; with ``whole`` not small whole numbers."""
        if not _can_move(x) or x.dtype not in WHOLE:
            return
        if x.is_complex():
            x = torch.view_as_real(x)
        size = units * self._units * _eps(x)
        if _is_dense(x) and not _is_masked(x):
            self._move(x, x, size, whole)
        else:
            x.copy_(self._moved(x, size, whole))

    def disturbed(self, x: Any, *, whole: bool = False, units: float = 1.0) -> Any:
        """Return a disturbed copy of a tensor of float32 or float64 or the complex numbers of them, anything else unchanged.

        A list of tensors becomes a list of copies.
        """
        if isinstance(x, (list, tuple)):
            return [self.disturbed(each, whole=whole, units=units) for each in x]
        if not isinstance(x, Tensor) or not _can_move(x) or x.dtype not in WHOLE:
            return x
        if x.is_complex():
            return torch.view_as_complex(
                self.disturbed(torch.view_as_real(x.resolve_conj()), whole=whole, units=units).contiguous()
            )
        size = units * self._units * _eps(x)
        if not _is_dense(x) or _is_masked(x):
            return self._moved(x, size, whole)
        moved = torch.empty_like(x)
        if moved.stride() != x.stride():
            return self.disturbed(x.contiguous(), whole=whole, units=units)
        self._move(x, moved, size, whole)
        return moved

    def _moved(self, x: Tensor, size: float, whole: bool) -> Tensor:
        stays = ~(x.abs() < MASK)
        if whole:
            stays |= (x == x.round()) & (x.abs() <= WHOLE[x.dtype])
        return torch.where(stays, x, torch.addcmul(x, _finite(x), self._noise(x), value=size))

    def _move(self, x: Tensor, out: Tensor, size: float, whole: bool) -> None:
        key, start, greatest = (self._seed & MASK32, self._seed >> 32 & MASK32), self._drawn, WHOLE[x.dtype]
        self._drawn += -(-x.numel() // 16) * 16
        if x.device.type == "cpu":
            random_words.jitter(
                x.data_ptr(), out.data_ptr(), DTYPES[x.dtype], x.numel(), *key, start,
                size=size, whole=greatest if whole else -1.0, threads=torch.get_num_threads(),
            )  # fmt: skip
        else:
            move_by_words(x, out, key, start, size, greatest if whole else -1.0)

    def _nudge_(self, x: Tensor, share: float) -> None:
        """Move this share of sixteen-bit elements, or a few, to a neighbour; zero and what is not finite stay."""
        mean = min(
            float(x.numel()), self._units * max(x.numel() * share, min(x.numel() / ONE_IN, self._fewest))
        )
        count = int(torch.poisson(torch.tensor(mean), generator=self._generator))
        at = torch.randint(0, x.numel(), (count,), generator=self._generator).to(x.device)
        place = torch.unravel_index(at, x.shape) if x.dim() else ...
        old = x[place]
        up = torch.randint(0, 2, old.shape, generator=self._generator, dtype=torch.int16)
        x[place] = _neighbour(old, up.to(x.device))


def move_by_words(
    x: Tensor, out: Tensor, key: tuple[int, int], start: int, size: float, greatest: float
) -> None:
    """Do what ``random_words.jitter`` does, by tensor operations on any device, with the same bits; what masks others stays.

    Args:
        x: dense, of float32 or float64.
        out: the same, in the same order; it may be ``x``.
        key: of the stream that says which way each goes.
        start: its first byte, a multiple of 16.
        size: of a move, relative to the element.
        greatest: whole numbers up to it stay; none where it is negative.
    """
    source, target = (t.as_strided((t.numel(),), (1,)) for t in (x, out))
    for begin in range(0, x.numel(), CHUNK):
        part = source[begin : begin + CHUNK]
        words = philox_words(key, (start + begin) // 16, -(-part.numel() // 16), x.device)
        way = (words.to(torch.int32).view(torch.uint8)[: part.numel()] & 2).to(x.dtype) - 1.0
        stays = ~(part.abs() < MASK) | ((part.abs() <= greatest) & (part == part.round()))
        target[begin : begin + CHUNK] = torch.where(stays, part, part + part * (way * size))


def _neighbour(x: Tensor, up: Tensor) -> Tensor:
    """Return the sixteen-bit neighbour of each of ``x``, larger in size where ``up`` is 1; zero and what is not finite stay."""
    new = (x.contiguous().view(torch.int16) + (2 * up - 1)).view(x.dtype)
    return torch.where((x == 0) | ~torch.isfinite(x) | ~torch.isfinite(new), x, new)


def _computed(
    func: Operator, args: Arguments, kwargs: dict[str, Any], result: Any, written: frozenset[int]
) -> Iterator[Tensor]:
    """Yield the tensors that ``func`` newly computed: its fresh outputs and those that it wrote in place."""
    schema = func._schema
    results = result if isinstance(result, (tuple, list)) and len(schema.returns) > 1 else (result,)
    for value, declared in zip(results, schema.returns, strict=False):
        if declared.alias_info is None:
            yield from (each for each in tree_leaves(value) if isinstance(each, Tensor))
    for at in sorted(written):
        value = args[at] if at < len(args) else kwargs.get(schema.arguments[at].name)
        yield from (each for each in tree_leaves(value) if isinstance(each, Tensor))


def _cloned(x: Any) -> Any:
    return x.clone() if isinstance(x, Tensor) else x


def _is_sixteen(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype in SIXTEEN_BIT


def _is_tie(x: Tensor, narrow: torch.dtype) -> Tensor:
    """Whether float32 numbers lie halfway between two of ``narrow``: short sums of its products are exact, and often do."""
    bits = 16 if narrow is torch.bfloat16 else 13
    return (x.contiguous().view(torch.int32) & ((1 << bits) - 1)).view(x.shape) == 1 << (bits - 1)


def _can_move(x: Tensor) -> bool:
    """Whether noise can be added: to dense floating numbers (what a sparse tensor adds up was disturbed before) in some memory.

    Autograd adds a tensor of zeros that has none, and asks one of the device ``meta`` for the sum's shape.
    """
    is_there = (
        x.layout == torch.strided and x.numel() > 0 and x.device.type != "meta" and not x._is_zerotensor()
    )
    return is_there and (x.is_floating_point() or x.is_complex())


def _eps(x: Tensor) -> float:
    return torch.finfo(x.dtype).eps


def _is_dense(x: Tensor) -> bool:
    """Whether the elements fill a stretch of memory, in whatever order, so that a kernel may go over them."""
    if x.dtype not in DTYPES or type(x) not in (Tensor, torch.nn.Parameter):
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


def _is_masked(x: Tensor) -> bool:
    """Whether dense numbers on the CPU may mask others: these stay on every machine, whatever is added to them."""
    return x.device.type == "cpu" and may_mask(x)


def _finite(x: Tensor) -> Tensor:
    return x.nan_to_num(0.0, 0.0, 0.0)


class JitterMode(TorchDispatchMode):
    """Disturb every operator's output; for code that has no decisions, such as an optimizer."""

    def __init__(self, jitter: Jitter) -> None:
        super().__init__()
        self._jitter = jitter

    def __torch_dispatch__(self, func: Operator, types: Any, args: Arguments = (), kwargs: Any = None) -> Any:
        """Run ``func`` and disturb what it computed."""
        return self._jitter.around(func, args, kwargs or {}, lambda args, kwargs: func(*args, **kwargs))
