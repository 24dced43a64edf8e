"""Decisions of operators that choose an index: pooling by maxima, the largest along a dimension, sorting."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tallystick.errors import Nondeterminism
from tallystick.execution.dispatch.boundaries import MASK, is_finite, is_float, sampled_rms
from tallystick.execution.dispatch.calls import (
    Arguments,
    Handler,
    Operator,
    argument_at,
    argument_named,
)
from tallystick.execution.dispatch.decisions import OperatorPass
from tallystick.execution.dispatch.table import CHOICES

MOST_WAITS = 1 << 24  # random numbers of one ``multinomial``


def _max_pool(dims: int) -> Handler:
    def handle(here: OperatorPass, func: Operator, args: Arguments, kwargs: dict[str, Any]) -> Any:
        x = args[0]
        values, index = func(*args, **kwargs)
        spec = [_spread(argument_at(func, args, kwargs, i), dims) for i in range(1, 5)]
        kernel, stride, padding, dilation = spec
        stride = stride or kernel
        ceil_mode = bool(argument_at(func, args, kwargs, 5))
        _decide_windows(here, x, values, index, kernel, stride, padding, dilation, ceil_mode)
        return _windows_taken(x, values, index, dims)

    return handle


def _adaptive_max_pool(dims: int) -> Handler:
    def handle(here: OperatorPass, func: Operator, args: Arguments, kwargs: dict[str, Any]) -> Any:
        x, size = args[0], args[1]
        sides = x.shape[-dims:]
        if any(side % out for side, out in zip(sides, size, strict=True)):
            raise Nondeterminism(
                f"operator {func}: input {tuple(sides)} is not a multiple of output {tuple(size)}; "
                "windows of unequal size have no decision site"
            )
        values, index = func(*args, **kwargs)
        kernel = [side // out for side, out in zip(sides, size, strict=True)]
        _decide_windows(here, x, values, index, kernel, kernel, [0] * dims, [1] * dims, False)
        return _windows_taken(x, values, index, dims)

    return handle


def _spread(value: Any, dims: int) -> list[int]:
    sides = list(value)
    return sides * dims if len(sides) == 1 else sides


def _decide_windows(here: OperatorPass, x: Tensor, values: Tensor, index: Tensor, kernel: list[int], stride: list[int],
                    padding: list[int], dilation: list[int], ceil_mode: bool) -> None:  # fmt: skip
    """Compare each window's maximum with its runner-up; obey the log by writing into ``index``."""
    dims = len(kernel)
    if not here.context.pending(x.detach().reshape(-1)):
        return
    rms = sampled_rms(x.detach().reshape(-1))
    band = here.context.band(rms)
    outs = values.shape[-dims:]
    pads: list[int] = []
    for axis in reversed(range(dims)):
        need = (outs[axis] - 1) * stride[axis] + dilation[axis] * (kernel[axis] - 1) + 1
        pads += [padding[axis], max(0, need - x.shape[-dims + axis] - padding[axis])]
    padded = torch.nn.functional.pad(x, pads, value=-math.inf) if any(pads) else x
    has_infinite = any(pads) or not is_finite(x.detach().reshape(-1))
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
        zeros += (window == 0) | torch.isinf(window) if has_infinite else window == 0
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
    obey = here.context.decide(flat_index.numel(), width, near, lambda at: flat_index[at], gap_to)
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
    def handle(here: OperatorPass, func: Operator, args: Arguments, kwargs: dict[str, Any]) -> Any:
        x, dim = args[0], args[1]
        values, index = func(*args, **kwargs)
        if not is_float(x) or x.dim() == 0 or x.shape[dim] < 2:
            return values, index
        keep = values.dim() == x.dim()
        index = decide_ranks(here, x, dim, index if keep else index.unsqueeze(dim), largest)
        values = x.gather(dim, index)
        return (values, index) if keep else (values.squeeze(dim), index.squeeze(dim))

    return handle


def _arg_best(largest: bool) -> Handler:
    def handle(here: OperatorPass, func: Operator, args: Arguments, kwargs: dict[str, Any]) -> Any:
        x = args[0]
        index = func(*args, **kwargs)
        if not is_float(x):
            return index
        dim = argument_at(func, args, kwargs, 1)
        keep = bool(argument_at(func, args, kwargs, 2))
        flat = x.reshape(-1) if dim is None else x
        axis = 0 if dim is None else dim
        if flat.dim() == 0 or flat.shape[axis] < 2:
            return index
        kept = index.reshape(1) if dim is None else (index if keep else index.unsqueeze(axis))
        return decide_ranks(here, flat, axis, kept, largest).reshape(index.shape)

    return handle


def _topk(here: OperatorPass, func: Operator, args: Arguments, kwargs: dict[str, Any]) -> Any:
    x, k, dim = args[0], args[1], argument_at(func, args, kwargs, 2)
    largest = bool(argument_at(func, args, kwargs, 3))
    # In rank order whatever was asked: an unsorted result may come in any order, so every device may choose this one.
    values, index = func(x, k, dim, largest, True)
    if not is_float(x) or x.dim() == 0 or index.numel() == 0:
        return values, index
    index = decide_ranks(here, x, dim, index, largest)
    return x.gather(dim, index), index


def _sort(here: OperatorPass, func: Operator, args: Arguments, kwargs: dict[str, Any]) -> Any:
    x = args[0]
    values, index = func(*args, **kwargs)
    if not is_float(x) or x.dim() == 0 or index.numel() == 0:
        return values, index
    offset = 1 if func._schema.overload_name.startswith("stable") else 0
    dim = kwargs.get("dim", args[1 + offset] if len(args) > 1 + offset else -1)
    descending = kwargs.get("descending", args[2 + offset] if len(args) > 2 + offset else False)
    index = decide_ranks(here, x, dim, index, bool(descending))
    return x.gather(dim, index), index


def _one_rank(rank_of: Callable[[int, Arguments], int], place_of_dim: int) -> Handler:
    """Return a handler for an operator that gives the element of one rank, from the smallest, along a dimension."""

    def handle(here: OperatorPass, func: Operator, args: Arguments, kwargs: dict[str, Any]) -> Any:
        x, dim = args[0], argument_at(func, args, kwargs, place_of_dim)
        values, index = func(*args, **kwargs)
        if not is_float(x) or x.dim() == 0 or index.numel() == 0 or x.shape[dim] < 2:
            return values, index
        keep = values.dim() == x.dim()
        index = index if keep else index.unsqueeze(dim)
        index = _decide_rank(here, x, dim, index, rank_of(x.shape[dim], args))
        values = x.gather(dim, index)
        return (values, index) if keep else (values.squeeze(dim), index.squeeze(dim))

    return handle


def _decide_rank(here: OperatorPass, x: Tensor, dim: int, index: Tensor, rank: int) -> Tensor:
    """Decide which element has one ``rank`` along ``dim``: it is ambiguous if a neighbour in rank is within the band."""
    x = x.detach()
    if not here.context.pending(x.reshape(-1)):
        return index
    n = x.shape[dim]
    rows = x.movedim(dim, -1).reshape(-1, n)
    ordered = rows.sort(dim=1).values
    gaps = [
        (ordered[:, rank] - ordered[:, beside]).abs() for beside in (rank - 1, rank + 1) if 0 <= beside < n
    ]
    moved = index.movedim(dim, -1).contiguous()
    flat = moved.reshape(-1)

    def gap_to(pairs: Tensor) -> Tensor:
        at, other = pairs[:, 0], pairs[:, 1].clamp(max=n - 1)
        gap = (rows[at, flat[at]] - rows[at, other]).abs()
        return torch.where(pairs[:, 1] >= n, math.inf, gap)

    gap = torch.stack(gaps).amin(dim=0)
    return here.chosen(moved, gap, n, sampled_rms(x.reshape(-1)), gap_to).movedim(-1, dim)


def decide_ranks(here: OperatorPass, x: Tensor, dim: int, index: Tensor, largest: bool) -> Tensor:
    """Decide the first ``k`` ranks along ``dim``: a rank is ambiguous if a neighbour in rank is within the band."""
    x = x.detach()
    if not here.context.pending(x.reshape(-1)):
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

    return here.chosen(moved, gap, n, sampled_rms(x.reshape(-1)), gap_to).movedim(-1, dim)


def sampled_from(here: OperatorPass, func: Operator, args: Arguments, kwargs: dict[str, Any]) -> Tensor:
    """Return categories drawn by weight (``multinomial``): those whose exponential waiting time over their weight is shortest.

    A decision, as the weights are computed: which categories come first. Waiting times are compared by their logarithms, whose
    differences do not depend on how large weights are (Gumbel's trick: Maddison, Tarlow and Minka 2014, "A* sampling",
    section 2).

    Raises:
        Nondeterminism: more waiting times than ``MOST_WAITS``.
    """
    weights, count = args[0], argument_named(func, args, kwargs, "num_samples")
    again, generator = (argument_named(func, args, kwargs, name) for name in ("replacement", "generator"))
    x = weights.detach().double()
    drawable = ((x >= 0.0) & (x < math.inf)).all() & (x.sum(dim=-1) > 0.0).all()
    if x.numel() == 0 or not drawable or (count > x.shape[-1] and not again):
        return func(*args, **kwargs)  # refused there, in torch's words
    shape = (*x.shape[:-1], count, x.shape[-1]) if again else tuple(x.shape)
    if math.prod(shape) > MOST_WAITS:
        raise Nondeterminism(
            f"operator {func}: {count} draws with replacement, each among {x.shape[-1]} categories, take {math.prod(shape)} "
            f"random numbers, {MOST_WAITS} at most; draw them where batches are made, or by bucketize of rand"
        )
    waits = here.random.waits(func, generator, shape, x.device)
    logs = x.log().clamp_(min=-MASK)  # without weight: behind all others, and none of their size
    scores = (logs.unsqueeze(-2) if again else logs) - waits.log()
    index = torch.topk(scores, 1 if again else count, dim=-1).indices
    index = decide_ranks(here, scores, -1, index, largest=True)
    return index.squeeze(-1) if again else index


CHOICE_HANDLERS: dict[str, Handler] = {
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
    "aten::median.dim": _one_rank(lambda n, args: (n - 1) // 2, 1),
    "aten::kthvalue": _one_rank(lambda n, args: args[1] - 1, 2),
}
assert frozenset(CHOICE_HANDLERS) == CHOICES
