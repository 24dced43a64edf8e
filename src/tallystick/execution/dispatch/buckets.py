"""Decisions of operators that ask between which of several points a number lies: ``bucketize``, ``searchsorted``, ``histc``."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tallystick.errors import Nondeterminism
from tallystick.execution.dispatch.boundaries import is_float
from tallystick.execution.dispatch.calls import Arguments, Handler, Operator, argument_named
from tallystick.execution.dispatch.decisions import OperatorPass
from tallystick.execution.dispatch.table import BUCKETS


def _between(points_at: int, x_at: int) -> Handler:
    """Return a handler of an operator that finds ``x`` among sorted points, arguments at these positions."""

    def handle(here: OperatorPass, func: Operator, args: Arguments, kwargs: dict[str, Any]) -> Any:
        x, points = args[x_at], args[points_at]
        if not (isinstance(x, Tensor) and (is_float(x) or is_float(points))) or 0 in (
            x.numel(),
            points.numel(),
        ):
            return func(*args, **kwargs)
        if argument_named(func, args, kwargs, "sorter") is not None:
            raise Nondeterminism(
                f"operator {func}: with a sorter it has no decision site; sort the points first"
            )
        x = x.to(torch.promote_types(x.dtype, points.dtype))
        rows = points.to(x.dtype).reshape(-1, points.shape[-1])
        own = rows.expand(x.numel(), -1) if rows.shape[0] == 1 else rows.repeat_interleave(x.shape[-1], 0)

        def nearest(flat: Tensor) -> Tensor:
            above = torch.searchsorted(rows, flat.reshape(rows.shape[0], -1)).reshape(-1)
            beside = torch.stack((above - 1, above)).clamp(0, rows.shape[1] - 1)
            low, high = own.gather(1, beside.T).T
            return torch.where(flat - low <= high - flat, low, high)

        gaps = rows.diff(dim=1)
        gaps = gaps[gaps > 0]  # the same point twice is one
        moved = here.forced(x, nearest, float(gaps.min()) if gaps.numel() else math.inf)
        if moved is not None:
            args = (*args[:x_at], moved, *args[x_at + 1 :])
        return func(*args, **kwargs)

    return handle


def _histogram(here: OperatorPass, func: Operator, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """Count by what lies between which edges, decided at each edge; the last bin has its upper edge too."""
    x = args[0]
    if x.numel() == 0:
        return func(*args, **kwargs)
    bins, low, high = (argument_named(func, args, kwargs, name) for name in ("bins", "min", "max"))
    wide = x.detach().double().reshape(-1)
    if low == high:
        low, high = float(wide.min()), float(wide.max())
    if low == high:
        low, high = low - 1.0, high + 1.0
    at = (wide - low) * (bins / (high - low))
    moved = here.forced(at, torch.round, 1.0)
    at = at if moved is None else moved
    within = at[(at >= 0.0) & (at <= bins)]
    index = within.floor().long().clamp(max=bins - 1)
    return torch.bincount(index, minlength=bins).to(x.dtype)


BUCKET_HANDLERS: dict[str, Handler] = {
    "aten::bucketize": _between(1, 0),
    "aten::searchsorted": _between(0, 1),
    "aten::histc": _histogram,
}
assert frozenset(BUCKET_HANDLERS) == BUCKETS
