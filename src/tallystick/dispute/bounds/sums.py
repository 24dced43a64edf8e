"""Rules of operators whose elements are sums: matrix products, reductions, the gradient of a look-up."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from tallystick.dispute.bounds.formulas import (
    LARGEST,
    LEAST,
    UNDER,
    UNIT,
    Formula,
    Indexes,
    Point,
    Read,
    Sum,
    exact_sum,
    gamma,
    products,
)
from tallystick.dispute.bounds.operands import (
    Rule,
    UnknownFormError,
    as_floats,
    dtype_of,
    flat_of,
    indices_of,
    is_float,
    position_of,
    scalar_at,
    slot_of,
    span,
    verify_readable,
)
from tallystick.dispute.operator_list import Operator

Place = Callable[[Indexes], tuple[Indexes, ...]]


def dot_product(
    op: Operator,
    output: int,
    count: int,
    a: tuple[int, Place],
    b: tuple[int, Place] | float,
    read: Read,
    finish: Callable[[float, float, float], tuple[float, float]] | None = None,
    *,
    more: float = 10.0,
) -> Sum:
    """A sum of products; ``finish`` makes value and units of total, magnitude and n units a product."""

    def terms(low: int, high: int) -> tuple[float, float]:
        at = span(low, high)
        left = as_floats(read(a[0], flat_of(op.inputs[a[0]].view, a[1](at))))
        if not isinstance(b, tuple):
            return exact_sum(left * b), float(np.abs(left * b).sum())
        right = as_floats(read(b[0], flat_of(op.inputs[b[0]].view, b[1](at))))
        value, magnitude = products(left, right)
        return value, magnitude + under * float((1.0 + np.abs(left) + np.abs(right)).sum())

    u, under = UNIT[dtype_of(op, output)], UNDER[dtype_of(op, output)]
    each = gamma(count + more, u) / u

    def done(total: float, magnitude: float) -> Point:
        if finish is None:
            return Point(total, each * magnitude)
        return Point(*finish(total, magnitude, each))

    return Sum(count, terms, done)


def _mm(op: Operator, output: int, element: int, read: Read) -> Formula:
    i, j = position_of(op.outputs[output].view.shape, element)
    a, b = slot_of(op, "self"), slot_of(op, "mat2")
    count = op.inputs[a].view.shape[1]
    return dot_product(op, output, count, (a, lambda k: (i + 0 * k, k)), (b, lambda k: (k, j + 0 * k)), read)


def _bmm(op: Operator, output: int, element: int, read: Read) -> Formula:
    n, i, j = position_of(op.outputs[output].view.shape, element)
    a, b = slot_of(op, "self"), slot_of(op, "mat2")
    count = op.inputs[a].view.shape[2]
    return dot_product(
        op,
        output,
        count,
        (a, lambda k: (n + 0 * k, i + 0 * k, k)),
        (b, lambda k: (n + 0 * k, k, j + 0 * k)),
        read,
    )


def _addmm(op: Operator, output: int, element: int, read: Read) -> Formula:
    i, j = position_of(op.outputs[output].view.shape, element)
    a, b = slot_of(op, "mat1"), slot_of(op, "mat2")
    alpha, beta = op.number("alpha", 1), op.number("beta", 1)
    verify_readable(op, output, alpha, beta)
    bias = float(scalar_at(op, "self", (i, j), read))

    def finish(total: float, magnitude: float, each: float) -> tuple[float, float]:
        return beta * bias + alpha * total, (each + 3.0) * (abs(alpha) * magnitude + abs(beta * bias))

    count = op.inputs[a].view.shape[1]
    return dot_product(
        op, output, count, (a, lambda k: (i + 0 * k, k)), (b, lambda k: (k, j + 0 * k)), read, finish
    )


def _baddbmm(op: Operator, output: int, element: int, read: Read) -> Formula:
    n, i, j = position_of(op.outputs[output].view.shape, element)
    a, b = slot_of(op, "batch1"), slot_of(op, "batch2")
    alpha, beta = op.number("alpha", 1), op.number("beta", 1)
    verify_readable(op, output, alpha, beta)
    bias = float(scalar_at(op, "self", (n, i, j), read)) if beta else 0.0

    def finish(total: float, magnitude: float, each: float) -> tuple[float, float]:
        return beta * bias + alpha * total, (each + 3.0) * (abs(alpha) * magnitude + abs(beta * bias))

    count = op.inputs[a].view.shape[2]
    return dot_product(
        op, output, count, (a, lambda k: (n + 0 * k, i + 0 * k, k)), (b, lambda k: (n + 0 * k, k, j + 0 * k)),
        read, finish,
    )  # fmt: skip


def _axes(op: Operator, rank: int) -> tuple[int, ...]:
    given = op.attributes.get("dim")
    if given is None or given == []:
        return tuple(range(rank))
    listed = op.integers("dim") if isinstance(given, list) else (int(op.number("dim")),)
    return tuple(sorted({axis % rank for axis in listed}))


def _reduced(op: Operator, output: int, element: int, slot: int) -> tuple[int, Place]:
    """Return how many elements an output element sums up, and where they are."""
    view = op.inputs[slot].view
    axes = _axes(op, len(view.shape))
    position = position_of(op.outputs[output].view.shape, element)
    kept = [axis for axis in range(len(view.shape)) if axis not in axes]
    if len(position) == len(view.shape):
        position = tuple(position[axis] for axis in kept)
    fixed = dict(zip(kept, position, strict=True))
    sizes = tuple(view.shape[axis] for axis in axes)

    def place(at: Indexes) -> tuple[Indexes, ...]:
        along = dict(zip(axes, np.unravel_index(at, sizes), strict=True)) if axes else {}
        return tuple(
            np.asarray(along[axis], dtype=np.int64) if axis in along else fixed[axis] + 0 * at
            for axis in range(len(view.shape))
        )

    return math.prod(sizes), place


def _sum(mean: bool) -> Rule:
    def rule(op: Operator, output: int, element: int, read: Read) -> Formula:
        slot = slot_of(op, "self")
        count, place = _reduced(op, output, element, slot)
        if not is_float(op, output):
            values = read(slot, flat_of(op.inputs[slot].view, place(span(0, count))))
            return Point(int(np.asarray(values, dtype=np.int64).sum()), exact=True)
        divisor = float(count) if mean else 1.0

        def finish(total: float, magnitude: float, each: float) -> tuple[float, float]:
            return total / divisor, (each + 2.0) * magnitude / divisor

        return dot_product(op, output, count, (slot, place), 1.0, read, finish)

    return rule


def _norm(op: Operator, output: int, element: int, read: Read) -> Formula:
    if op.number("ord", 2) != 2:
        raise UnknownFormError(f"operator {op.name}: only the 2-norm is in the table")
    slot, dtype = slot_of(op, "self"), dtype_of(op, output)
    count, place = _reduced(op, output, element, slot)

    def finish(total: float, magnitude: float, each: float) -> tuple[float, float]:
        if not magnitude < LARGEST[dtype]:
            return math.inf, math.inf  # its squares are, on some machines
        root = math.sqrt(max(total, 0.0))
        return root, (0.5 * each + 4.0) * root + math.sqrt(count * LEAST[dtype]) / UNIT[dtype]

    return dot_product(op, output, count, (slot, place), (slot, place), read, finish)


def _all(op: Operator, output: int, element: int, read: Read) -> Formula:
    slot = slot_of(op, "self")
    count, place = _reduced(op, output, element, slot)
    values = read(slot, flat_of(op.inputs[slot].view, place(span(0, count))))
    return Point(int(bool(np.all(values))), exact=True)


def _cumsum(op: Operator, output: int, element: int, read: Read) -> Formula:
    if is_float(op, output):
        raise UnknownFormError("operator cumsum: of floats")
    slot = slot_of(op, "self")
    position = position_of(op.outputs[output].view.shape, element)
    axis = int(op.number("dim")) % len(position)
    at = tuple(span(0, position[axis] + 1) if d == axis else np.asarray(p) for d, p in enumerate(position))
    values = read(slot, flat_of(op.inputs[slot].view, at))
    return Point(int(np.asarray(values, dtype=np.int64).sum()), exact=True)


def _embedding_backward(op: Operator, output: int, element: int, read: Read) -> Formula:
    if op.attributes.get("scale_grad_by_freq") not in (False, 0):
        raise UnknownFormError("operator embedding_dense_backward: scaled by frequency")
    grad, indices = slot_of(op, "grad_output"), slot_of(op, "indices")
    row, column = position_of(op.outputs[output].view.shape, element)
    view = op.inputs[indices].view
    everywhere = tuple(indices_of(view.shape).reshape(len(view.shape), -1))
    rows = np.asarray(read(indices, flat_of(view, everywhere)), dtype=np.int64)
    hits = np.flatnonzero(rows == row)
    if not hits.size or row == op.number("padding_idx"):
        return Point(0.0, exact=True)

    def place(at: Indexes) -> tuple[Indexes, ...]:
        return (*(axis[hits[at]] for axis in everywhere), column + 0 * at)

    return dot_product(op, output, int(hits.size), (grad, place), 1.0, read)


SUMS: Mapping[str, Rule] = {
    "aten::mm": _mm,
    "aten::bmm": _bmm,
    "aten::addmm": _addmm,
    "aten::baddbmm": _baddbmm,
    "aten::sum": _sum(False),
    "aten::mean": _sum(True),
    "aten::linalg_vector_norm": _norm,
    "aten::_foreach_norm": _norm,
    "aten::all": _all,
    "aten::cumsum": _cumsum,
    "aten::embedding_dense_backward": _embedding_backward,
}
"""The rules by operator."""
