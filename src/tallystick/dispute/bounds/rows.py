"""Rules of operators that need a whole row or channel for each element: softmax, its losses, and normalisation."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from tallystick.dispute.bounds.formulas import (
    UNDER,
    UNIT,
    Floats,
    Formula,
    Indexes,
    Point,
    Read,
    Sum,
    exact_sum,
    gamma,
    products,
    triple_products,
    two_product,
    two_sum,
)
from tallystick.dispute.bounds.operands import (
    FUNCTION,
    Rule,
    UnknownFormError,
    allow_only,
    as_floats,
    dtype_of,
    fixed_at,
    flat_of,
    indices_of,
    position_of,
    read_along,
    scalar_at,
    slot_of,
    span,
    verify_bounded,
    wanted_output,
)
from tallystick.dispute.bounds.sums import dot_product
from tallystick.dispute.operator_list import Operator

MODEST = 2.0**20
"""What normalisation is judged of: squares of as many as there are, times a deviation's inverse to the third, are numbers."""
LEAST_VARIANCE = 2.0**-40


def _row(op: Operator, read: Read, name: str, position: tuple[int, ...]) -> tuple[Floats, int]:
    axis = int(op.number("dim")) % max(len(position), 1)
    return read_along(op, read, name, (axis,), position), position[axis]


def _softmax(log: bool) -> Rule:
    def rule(op: Operator, output: int, element: int, read: Read) -> Formula:
        row, at = _row(op, read, "self", position_of(op.outputs[output].view.shape, element))
        top = float(row.max())
        if not math.isfinite(top):
            raise UnknownFormError(f"operator {op.name}: a row without a largest number")
        away = row - top
        weights = np.exp(away)
        total = float(math.fsum(weights.tolist()))
        n = row.size + 2.0 * FUNCTION
        if log:
            value = float(away[at]) - math.log(total)
            return Point(value, n + 8.0 * (abs(float(away[at])) + abs(math.log(total)) + abs(top)))
        value = float(weights[at]) / total
        return Point(value, value * (n + 4.0 * (abs(float(away[at])) if value else 0.0) + 4.0))

    return rule


def _softmax_backward(log: bool) -> Rule:
    def rule(op: Operator, output: int, element: int, read: Read) -> Formula:
        position = position_of(op.outputs[output].view.shape, element)
        g, at = _row(op, read, "grad_output", position)
        y, _ = _row(op, read, "output", position)
        n = g.size + 8.0
        verify_bounded(op, output, float(np.abs(g).sum()))
        if log:
            weight, total = math.exp(float(y[at])), exact_sum(g)
            units = 8.0 * abs(float(g[at])) + weight * (n + FUNCTION) * float(np.abs(g).sum())
            return Point(float(g[at]) - weight * total, units)
        total, magnitude = products(g, y)
        own = float(y[at])
        # Differences from the gradient at the largest y give the same, but for that gradient times 1 - sum(y).
        apart = 4.0 * abs(float(g[int(y.argmax())]))
        units = abs(own) * (12.0 * abs(float(g[at])) + (n + 12.0) * magnitude + apart)
        units += UNDER[dtype_of(op, output)] * (1.0 + float(np.abs(g).sum()))
        return Point(own * (float(g[at]) - total), units)

    return rule


def _nll(op: Operator, output: int, element: int, read: Read) -> Formula:
    allow_only(op, "reduction", 1)
    allow_only(op, "weight", None)
    scores, target = slot_of(op, "self"), slot_of(op, "target")
    view = op.inputs[target].view
    count = view.shape[0]
    classes = np.asarray(read(target, flat_of(view, (span(0, count),))), dtype=np.int64)
    rows = np.flatnonzero(classes != int(op.number("ignore_index")))
    if output == 1:
        return Point(float(rows.size), exact=True)
    if not rows.size:
        return Point(math.nan, exact=True)

    def finish(total: float, magnitude: float, each: float) -> tuple[float, float]:
        return -total / rows.size, (each + 4.0) * magnitude / rows.size

    return dot_product(
        op, output, int(rows.size), (scores, lambda k: (rows[k], classes[rows[k]])), 1.0, read, finish
    )


def _nll_backward(op: Operator, output: int, element: int, read: Read) -> Formula:
    allow_only(op, "reduction", 1)
    allow_only(op, "weight", None)
    i, j = position_of(op.outputs[output].view.shape, element)
    target = slot_of(op, "target")
    wanted = int(read(target, flat_of(op.inputs[target].view, fixed_at((i,))))[0])
    if wanted != j or wanted == int(op.number("ignore_index")):
        return Point(0.0, exact=True)
    g = float(scalar_at(op, "grad_output", (), read))
    total = float(scalar_at(op, "total_weight", (), read))
    verify_bounded(op, output, 1.0 / total)
    return Point(-g / total, 6.0 * abs(g / total))


def _moments(row: Floats) -> tuple[float, float, float, float]:
    """Return mean, variance, and the units of both in u: of the mean absolute, of the variance relative."""
    n = row.size
    mean = exact_sum(row) / n
    centred = row - mean
    variance = math.fsum((centred * centred).tolist()) / n
    square = float((row * row).sum()) / n
    mean_units = (n + 16.0) * float(np.abs(row).sum()) / n
    # However the variance is computed: two passes, updating, or the difference of two sums (Chan, Golub, LeVeque 1983).
    variance_units = (n + 24.0) * (square / variance if variance > 0.0 else math.inf)
    return mean, variance, mean_units, variance_units


def _inverse(variance: float, eps: float, units: float) -> tuple[float, float]:
    """Return 1 / sqrt(variance + eps) and its relative units."""
    total = variance + eps
    if not total >= LEAST_VARIANCE:
        raise UnknownFormError("operator: next to no variance, and no eps beside it")
    share = variance / total if variance > 0.0 else 0.0
    relative = 0.5 * (units * share if share else 0.0) + 8.0
    return 1.0 / math.sqrt(total), relative


def _modest(read: Read) -> Read:
    """Return ``read`` for rules that square what they read, or worse: of numbers that are none, or large, there is none."""

    def found(slot: int, flat: Indexes) -> npt.NDArray[np.generic]:
        values = read(slot, flat)
        if values.dtype.kind == "f" and not bool((np.abs(values) < MODEST).all()):
            raise UnknownFormError("operator: of numbers that some machines cannot square")
        return values

    return found


def _underflow(op: Operator, output: int, n: int, *factors: float) -> float:
    """Return the units that flushed numbers may make on the way, each multiplied by these ``factors`` at most."""
    return UNDER[dtype_of(op, output)] * n * math.prod(1.0 + abs(each) for each in factors)


def _normalised(x: float, row: Floats, eps: float, weight: float, bias: float) -> Point:
    mean, variance, mean_units, variance_units = _moments(row)
    inverse, relative = _inverse(variance, eps, variance_units)
    value = (x - mean) * inverse * weight + bias
    units = abs(weight) * inverse * (mean_units + 4.0 * (abs(x) + abs(mean)) + abs(x - mean) * relative)
    return Point(value, units + 4.0 * (abs(value) + abs(bias)))


def _affine(op: Operator, read: Read, name: str, position: tuple[int, ...], default: float) -> float:
    slot = op.slot(name)
    if slot is None:
        return default
    return float(read(slot, flat_of(op.inputs[slot].view, fixed_at(position)))[0])


def _layer_norm(op: Operator, output: int, element: int, read: Read) -> Formula:
    read = _modest(read)
    x = slot_of(op, "input")
    shape = op.inputs[x].view.shape
    inner = len(op.integers("normalized_shape"))
    rank = len(shape)
    axes = tuple(range(rank - inner, rank))
    position = position_of(op.outputs[output].view.shape, element)
    at = (*position[: rank - inner], *((0,) * inner if output else position[rank - inner :]))
    row = read_along(op, read, "input", axes, at)
    eps = op.number("eps")
    if output:
        mean, variance, mean_units, variance_units = _moments(row)
        inverse, relative = _inverse(variance, eps, variance_units)
        return Point(mean, mean_units) if output == 1 else Point(inverse, inverse * relative)
    own = float(row[int(np.ravel_multi_index(at[rank - inner :], shape[rank - inner :]))])
    weight, bias = (_affine(op, read, n, at[rank - inner :], d) for n, d in (("weight", 1.0), ("bias", 0.0)))
    return _normalised(own, row, eps, weight, bias)


def _layer_norm_backward(op: Operator, output: int, element: int, read: Read) -> Formula:
    under = UNDER[dtype_of(op, output)]
    which = wanted_output(op, output)
    x, g = slot_of(op, "input"), slot_of(op, "grad_out")
    shape = op.inputs[x].view.shape
    inner = len(op.integers("normalized_shape"))
    outer = shape[: len(shape) - inner]
    position = position_of(op.outputs[output].view.shape, element)
    if which == 0:
        return _layer_norm_input(op, output, position, inner, _modest(read))
    leading = tuple(a.reshape(-1) for a in indices_of(outer))

    def block(low: int, high: int) -> tuple[float, float]:
        rows = tuple(axis[low:high] for axis in leading)
        at = (*rows, *(p + 0 * rows[0] for p in position))
        dy = as_floats(read(g, flat_of(op.inputs[g].view, at)))
        if which == 2:
            return exact_sum(dy), float(np.abs(dy).sum())
        mean, rstd = (_per_row(op, read, name, rows) for name in ("mean", "rstd"))
        value = as_floats(read(x, flat_of(op.inputs[x].view, at)))
        apart, lost = two_sum(value, -mean)
        high_part, low_part = triple_products(dy, apart, rstd)
        magnitude = np.abs(dy) * (np.abs(value) + np.abs(mean)) * np.abs(rstd)
        magnitude += under * (1.0 + np.abs(dy)) * (1.0 + np.abs(value) + np.abs(mean)) * (1.0 + np.abs(rstd))
        return exact_sum(high_part, low_part, dy * lost * rstd), float(magnitude.sum())

    count = math.prod(outer)
    u = UNIT[dtype_of(op, output)]
    return Sum(count, block, lambda total, magnitude: Point(total, gamma(count + 24.0, u) / u * magnitude))


def _per_row(op: Operator, read: Read, name: str, rows: tuple[Indexes, ...]) -> Floats:
    slot = slot_of(op, name)
    view = op.inputs[slot].view
    zeros = (0 * rows[0],) * (len(view.shape) - len(rows))
    return as_floats(read(slot, flat_of(view, (*rows, *zeros))))


def _layer_norm_input(
    op: Operator, output: int, position: tuple[int, ...], inner: int, read: Read
) -> Formula:
    rank = len(position)
    axes = tuple(range(rank - inner, rank))
    row = tuple(np.asarray([p]) for p in position[: rank - inner])
    x = read_along(op, read, "input", axes, position)
    dy = read_along(op, read, "grad_out", axes, position)
    weight = np.ones_like(x)
    if op.slot("weight") is not None:
        weight = read_along(op, read, "weight", tuple(range(inner)), (0,) * inner)
    mean, rstd = (float(_per_row(op, read, name, row)[0]) for name in ("mean", "rstd"))
    shape = op.inputs[slot_of(op, "input")].view.shape
    at = int(np.ravel_multi_index(position[rank - inner :], shape[rank - inner :]))
    n = x.size
    a = dy * weight
    unit = (x - mean) * rstd
    first, second = exact_sum(a) / n, exact_sum(a * unit) / n
    value = rstd * (float(a[at]) - first - float(unit[at]) * second)
    reach = abs(float(x[at])) + abs(mean)
    sums = float(np.abs(a).sum()), float((np.abs(a) * (np.abs(x) + abs(mean))).sum())
    magnitude = rstd * (abs(float(a[at])) + sums[0] / n) + reach * rstd**3 * sums[1] / n
    spread = float(np.abs(x).max()) + abs(mean)
    under = _underflow(op, output, n, rstd, rstd, rstd, float(np.abs(weight).max()), spread, spread)
    return Point(value, (n + 32.0) * magnitude + under)


def _batch_norm(op: Operator, output: int, element: int, read: Read) -> Formula:
    read = _modest(read)
    if op.attributes.get("training") is not True:
        raise UnknownFormError("operator native_batch_norm: not training")
    position = position_of(op.outputs[output].view.shape, element)
    rank = len(op.inputs[slot_of(op, "input")].view.shape)
    channel = position[1] if output == 0 else position[0]
    axes = (0, *range(2, rank))
    at = position if output == 0 else (0, channel, *((0,) * (rank - 2)))
    row = read_along(op, read, "input", axes, at)
    eps = op.number("eps")
    mean, variance, mean_units, variance_units = _moments(row)
    if output == 0:
        slot = slot_of(op, "input")
        own = float(read(slot, flat_of(op.inputs[slot].view, fixed_at(position)))[0])
        weight, bias = (_affine(op, read, n, (channel,), d) for n, d in (("weight", 1.0), ("bias", 0.0)))
        return _normalised(own, row, eps, weight, bias)
    if output == 1:
        return Point(mean, mean_units)
    if output == 2:
        inverse, relative = _inverse(variance, eps, variance_units)
        return Point(inverse, inverse * relative)
    momentum = op.number("momentum")
    if output == 3:
        old = _affine(op, read, "running_mean", (channel,), 0.0)
        value = (1.0 - momentum) * old + momentum * mean
        return Point(value, 4.0 * (abs(old) + abs(mean)) + momentum * mean_units)
    old = _affine(op, read, "running_var", (channel,), 0.0)
    fresh = variance * row.size / (row.size - 1)
    value = (1.0 - momentum) * old + momentum * fresh
    units = momentum * fresh * variance_units if fresh else 0.0
    return Point(value, 4.0 * (abs(old) + fresh) + 2.0 * units)


def _batch_norm_backward(op: Operator, output: int, element: int, read: Read) -> Formula:
    read = _modest(read)
    if op.attributes.get("train") is not True:
        raise UnknownFormError("operator native_batch_norm_backward: not training")
    which = wanted_output(op, output)
    position = position_of(op.outputs[output].view.shape, element)
    rank = len(op.inputs[slot_of(op, "input")].view.shape)
    channel = position[1] if which == 0 else position[0]
    axes = (0, *range(2, rank))
    at = position if which == 0 else (0, channel, *((0,) * (rank - 2)))
    dy = read_along(op, read, "grad_out", axes, at)
    n = dy.size
    total, magnitude = exact_sum(dy), float(np.abs(dy).sum())
    if which == 2:
        return Point(total, (n + 24.0) * magnitude)
    x = read_along(op, read, "input", axes, at)
    mean = _affine(op, read, "save_mean", (channel,), 0.0)
    inverse = _affine(op, read, "save_invstd", (channel,), 1.0)
    apart = x - mean
    high, low = two_product(dy, apart)
    dotted = exact_sum(high, low)
    reach, spread = float((np.abs(dy) * (np.abs(x) + abs(mean))).sum()), float(np.abs(x).max()) + abs(mean)
    if which == 1:
        under = _underflow(op, output, n, inverse, spread)
        return Point(dotted * inverse, (n + 24.0) * reach * abs(inverse) + under)
    weight = _affine(op, read, "weight", (channel,), 1.0)
    sizes = [op.inputs[slot_of(op, "input")].view.shape[axis] for axis in axes]
    own = int(np.ravel_multi_index([position[axis] for axis in axes], sizes))
    value = (float(dy[own]) - total / n - float(apart[own]) * inverse**2 * dotted / n) * inverse * weight
    parts = abs(float(dy[own])) + magnitude / n + (abs(float(x[own])) + abs(mean)) * inverse**2 * reach / n
    under = _underflow(op, output, n, inverse, inverse, inverse, weight, spread, spread)
    return Point(value, (n + 32.0) * parts * abs(inverse * weight) + under)


ROWS: Mapping[str, Rule] = {
    "aten::_softmax": _softmax(False),
    "aten::_safe_softmax": _softmax(False),
    "aten::_log_softmax": _softmax(True),
    "aten::_softmax_backward_data": _softmax_backward(False),
    "aten::_log_softmax_backward_data": _softmax_backward(True),
    "aten::nll_loss_forward": _nll,
    "aten::nll_loss_backward": _nll_backward,
    "aten::native_layer_norm": _layer_norm,
    "aten::native_layer_norm_backward": _layer_norm_backward,
    "aten::native_batch_norm": _batch_norm,
    "aten::native_batch_norm_backward": _batch_norm_backward,
}
"""The rules by operator."""
