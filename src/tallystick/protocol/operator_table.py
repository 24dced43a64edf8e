"""The operator table of the judge: how one element of each operator follows from its inputs, and how exactly it must.

Each rule takes the operator, the number of an output, the position of an element in it (row order of the view that the
operator returned), and a reader of the inputs; it reads no more than that element needs. An operator that has no rule here
cannot be judged by itself; the whole step is judged then.

Units are counted in unit roundoffs u of the output's dtype: a chain of k correctly rounded operations on a magnitude m has
k m of them (Higham 2002, section 3.1: (1 + u)**k - 1 <= gamma_k). Elementary functions may be off by ``FUNCTION`` units: what
vector libraries promise is 1 to 4 in the last place, and torch's attention on the CPU uses an exponential good to 20.
Every bound leaves room for some ten more roundings of inputs and output, so that machines that flush, contract or scale
differently, and the jitter that stands in for another machine in tests, stay within it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tallystick.errors import InvalidInput
from tallystick.protocol.formulas import (
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
from tallystick.protocol.operators import Geometry, Operator

FUNCTION = 32.0
MOST_TERMS = 1 << 24  # indexed at once for one element; some hundred megabytes
Rule = Callable[[Operator, int, int, Read], Formula]
Wide = tuple[int, ...]


class UnknownFormError(InvalidInput):
    """A form of an operator that the table does not cover."""


def _span(low: int, high: int) -> Indexes:
    """Return the numbers from low up to high: a view of stride 0 may claim more elements than any memory holds."""
    if high - low > MOST_TERMS:
        raise UnknownFormError(f"operator: {high - low} terms at once, a reader takes {MOST_TERMS}")
    return np.arange(low, high, dtype=np.int64)


def _indices(sizes: Sequence[int]) -> Indexes:
    """Return what ``numpy.indices`` does, for as many elements as a reader takes."""
    if any(size < 0 for size in sizes) or math.prod(sizes) > MOST_TERMS:
        raise UnknownFormError(f"operator: {math.prod(sizes)} terms at once, a reader takes {MOST_TERMS}")
    return np.indices(tuple(sizes), dtype=np.int64)


def find_rule(operator: Operator) -> Rule | None:
    """Return the rule for ``operator``, or None if the table has none."""
    name = operator.name
    if name.endswith("_") and not name.endswith("__"):
        name = _IN_PLACE.get(name, name[:-1])
    return _RULES.get(f"{name}.{operator.overload}") or _RULES.get(name)


# -- positions -----------------------------------------------------------------------------------


def flat_of(view: Geometry, position: tuple[Indexes, ...]) -> Indexes:
    """Return the flat indexes of positions, one array a dimension."""
    found = np.asarray(view.offset, dtype=np.int64)
    for at, stride in zip(position, view.stride, strict=True):
        found = found + np.asarray(at, dtype=np.int64) * stride
    return np.atleast_1d(found).reshape(-1)


def position_of(shape: Wide, element: int) -> tuple[int, ...]:
    """Return the position of the element with row-order index ``element``."""
    if not 0 <= element < max(math.prod(shape), 0):
        raise InvalidInput(f"operator: element {element} of an output of {math.prod(shape)}")
    found: list[int] = []
    for size in reversed(shape):
        element, at = divmod(element, size)
        found.append(at)
    return tuple(reversed(found))


def stored_at(view: Geometry, element: int) -> int:
    """Return the flat index at which element ``element`` of a view is stored."""
    return int(flat_of(view, _fixed(position_of(view.shape, element)))[0])


def _fixed(position: tuple[int, ...]) -> tuple[Indexes, ...]:
    return tuple(np.asarray([at], dtype=np.int64) for at in position)


def _broadcast(view: Geometry, position: tuple[int, ...]) -> Indexes:
    """Return where an input of fewer or unit dimensions is read for an output's position."""
    if len(view.shape) > len(position):
        raise InvalidInput("operator: an input has more dimensions than the output")
    tail = position[len(position) - len(view.shape) :]
    if any(size not in (1,) and at >= size for size, at in zip(view.shape, tail, strict=True)):
        raise InvalidInput("operator: an input does not broadcast to the output")
    return flat_of(view, _fixed(tuple(0 if n == 1 else at for n, at in zip(view.shape, tail, strict=True))))


def _floats(values: np.ndarray) -> Floats:
    return np.asarray(values, dtype=np.float64)


def _scalar(op: Operator, name: str, position: tuple[int, ...], read: Read) -> float | int:
    """Return an argument that is a tensor, broadcast, or a number."""
    slot = op.slot(name)
    if slot is None:
        return op.number(name)
    value = read(slot, _broadcast(op.inputs[slot].view, position))[0]
    return value.item()


def _need(op: Operator, name: str) -> int:
    slot = op.slot(name)
    if slot is None:
        raise UnknownFormError(f"operator {op.name}: {name} is not given")
    return slot


def _dtype(op: Operator, output: int) -> str:
    return op.outputs[output].tensor.dtype


def _is_float(op: Operator, output: int) -> bool:
    return _dtype(op, output) in UNIT


def _only(op: Operator, name: str, *allowed: object) -> None:
    value = op.attributes.get(name)
    if isinstance(value, dict) and "float" in value:
        value = op.number(name)
    if value not in allowed:
        raise UnknownFormError(f"operator {op.name}: {name} is {value!r}")


def _rest(op: Operator, read: Read, name: str, axes: tuple[int, ...], at: tuple[int, ...]) -> Floats:
    """Return the elements of an input along ``axes`` (row order), the other dimensions at ``at``."""
    slot = _need(op, name)
    view = op.inputs[slot].view
    sizes = [view.shape[axis] for axis in axes]
    grid = _indices(sizes).reshape(len(sizes), -1)
    along = dict(zip(axes, grid, strict=True))
    position = tuple(along.get(axis, np.asarray(at[axis], dtype=np.int64)) for axis in range(len(view.shape)))
    return _floats(read(slot, flat_of(view, position)))


# -- element by element --------------------------------------------------------------------------

Elementwise = Callable[..., tuple[float, float]]


def _elementwise(arguments: tuple[str, ...], function: Elementwise) -> Rule:
    """A rule that gives value and units from the arguments' elements; whole numbers are exact."""

    def rule(op: Operator, output: int, element: int, read: Read) -> Formula:
        position = position_of(op.outputs[output].view.shape, element)
        values = [_scalar(op, name, position, read) for name in arguments]
        with np.errstate(all="ignore"):
            try:
                value, units = function(op, *values)
            except (ZeroDivisionError, OverflowError, ValueError):
                raise UnknownFormError(f"operator {op.name}: not finite at element {element}") from None
        if not _is_float(op, output):
            if any(isinstance(each, float) for each in values):
                raise UnknownFormError(f"operator {op.name}: turns floats into whole numbers")
            return Point(int(value), exact=True)
        return Point(float(value), units)

    return rule


def _add(op: Operator, a: float, b: float) -> tuple[float, float]:
    alpha = op.number("alpha", 1)
    return a + alpha * b, 4.0 * (abs(a) + abs(alpha * b))


def _sub(op: Operator, a: float, b: float) -> tuple[float, float]:
    alpha = op.number("alpha", 1)
    return a - alpha * b, 4.0 * (abs(a) + abs(alpha * b))


def _mul(op: Operator, a: float, b: float) -> tuple[float, float]:
    return a * b, 4.0 * abs(a * b)


def _div(op: Operator, a: float, b: float) -> tuple[float, float]:
    _only(op, "rounding_mode", None)
    if isinstance(a, int) and isinstance(b, int):
        raise UnknownFormError(f"operator {op.name}: divides whole numbers")
    return a / b, 6.0 * abs(a / b)  # by a number: some machines multiply by its reciprocal


def _pow(op: Operator, a: float, b: float) -> tuple[float, float]:
    value = math.pow(a, b)
    return value, FUNCTION * max(1.0, abs(b)) * abs(value)


def _relative(function: Callable[[float], float], units: float = FUNCTION) -> Elementwise:
    def of(op: Operator, a: float) -> tuple[float, float]:
        value = function(a)
        return value, units * abs(value)

    return of


def _tanh_backward(op: Operator, g: float, y: float) -> tuple[float, float]:
    return g * (1.0 - y * y), 6.0 * abs(g) * (1.0 + y * y)


def _gelu(op: Operator, x: float) -> tuple[float, float]:
    _only(op, "approximate", "none", None)
    return x * 0.5 * (1.0 + math.erf(x * math.sqrt(0.5))), FUNCTION * abs(x)


def _gelu_backward(op: Operator, g: float, x: float) -> tuple[float, float]:
    _only(op, "approximate", "none", None)
    cdf = 0.5 * (1.0 + math.erf(x * math.sqrt(0.5)))
    pdf = math.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)
    return g * (cdf + x * pdf), FUNCTION * abs(g) * (1.0 + abs(x) * pdf * (1.0 + x * x))


def _exact(arguments: tuple[str, ...], function: Callable[..., float | int | bool]) -> Rule:
    """A rule for an operator that moves or compares numbers: no rounding."""

    def rule(op: Operator, output: int, element: int, read: Read) -> Formula:
        position = position_of(op.outputs[output].view.shape, element)
        values = [_scalar(op, name, position, read) for name in arguments]
        found = function(op, *values)
        if isinstance(found, float) and _dtype(op, output) == "F32":
            found = float(np.float32(found))
        return Point(found if isinstance(found, float) else int(found), exact=True)

    return rule


def _compared(function: Callable[[float, float], bool]) -> Rule:
    inner = _exact(("self", "other"), lambda op, a, b: function(a, b))

    def rule(op: Operator, output: int, element: int, read: Read) -> Formula:
        if any(operand.dtype in UNIT for operand in op.inputs):
            raise UnknownFormError(f"operator {op.name}: a comparison of floats is a decision")
        return inner(op, output, element, read)

    return rule


def _constant(argument: str | float) -> Rule:
    def rule(op: Operator, output: int, element: int, read: Read) -> Formula:
        value = op.number(argument) if isinstance(argument, str) else argument
        if _dtype(op, output) == "F32":
            value = float(np.float32(value))
        return Point(value if _is_float(op, output) else int(value), exact=True)

    return rule


def _arange(op: Operator, output: int, element: int, read: Read) -> Formula:
    start, step = op.number("start", 0), op.number("step", 1)
    if not isinstance(start, int) or not isinstance(step, int) or _is_float(op, output):
        raise UnknownFormError("operator arange: of floats")
    return Point(start + element * step, exact=True)


def _tril(op: Operator, output: int, element: int, read: Read) -> Formula:
    position = position_of(op.outputs[output].view.shape, element)
    kept = position[-1] - position[-2] <= op.number("diagonal", 0)
    slot = _need(op, "self")
    value = read(slot, _broadcast(op.inputs[slot].view, position))[0].item()
    return Point(value if kept else type(value)(0), exact=True)


def _cat(op: Operator, output: int, element: int, read: Read) -> Formula:
    position = list(position_of(op.outputs[output].view.shape, element))
    axis = int(op.number("dim", 0)) % max(len(position), 1)
    for slot, operand in enumerate(op.inputs):
        if operand.view.shape == (0,):
            continue
        size = operand.view.shape[axis]
        if position[axis] < size:
            flat = flat_of(operand.view, _fixed(tuple(position)))
            return Point(read(slot, flat)[0].item(), exact=True)
        position[axis] -= size
    raise InvalidInput("operator cat: the inputs are smaller than the output")


def _stack(op: Operator, output: int, element: int, read: Read) -> Formula:
    position = list(position_of(op.outputs[output].view.shape, element))
    slot = position.pop(int(op.number("dim", 0)) % max(len(position), 1))
    if slot >= len(op.inputs):
        raise InvalidInput("operator stack: the output is larger than its inputs")
    return Point(read(slot, flat_of(op.inputs[slot].view, _fixed(tuple(position))))[0].item(), exact=True)


def _pad(op: Operator, output: int, element: int, read: Read) -> Formula:
    position = list(position_of(op.outputs[output].view.shape, element))
    slot, pads = _need(op, "self"), op.integers("pad")
    view = op.inputs[slot].view
    for number in range(len(pads) // 2):
        position[-1 - number] -= pads[2 * number]
    if all(0 <= at < size for at, size in zip(position, view.shape, strict=True)):
        return Point(read(slot, flat_of(view, _fixed(tuple(position))))[0].item(), exact=True)
    value = op.number("value", 0)
    return Point(float(value) if _is_float(op, output) else int(value), exact=True)


def _embedding(op: Operator, output: int, element: int, read: Read) -> Formula:
    position = position_of(op.outputs[output].view.shape, element)
    weight, indices = _need(op, "weight"), _need(op, "indices")
    row = int(read(indices, flat_of(op.inputs[indices].view, _fixed(position[:-1])))[0])
    value = read(weight, flat_of(op.inputs[weight].view, _fixed((row, position[-1]))))[0]
    return Point(value.item(), exact=True)


def _relu(op: Operator, output: int, element: int, read: Read) -> Formula:
    """The branch of an element near zero may be the log's; the caller gives it as attribute-free ``decided``."""
    slot = _need(op, "self")
    position = position_of(op.outputs[output].view.shape, element)
    x = float(read(slot, _broadcast(op.inputs[slot].view, position))[0])
    return Point(max(x, 0.0), exact=True)


def _threshold_backward(op: Operator, output: int, element: int, read: Read) -> Formula:
    position = position_of(op.outputs[output].view.shape, element)
    g = float(_scalar(op, "grad_output", position, read))
    x = float(_scalar(op, "self", position, read))
    return Point(g if x > op.number("threshold") else 0.0, exact=True)


# -- sums ----------------------------------------------------------------------------------------

Place = Callable[[Indexes], tuple[Indexes, ...]]


def _dot(
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
        at = _span(low, high)
        left = _floats(read(a[0], flat_of(op.inputs[a[0]].view, a[1](at))))
        if not isinstance(b, tuple):
            return exact_sum(left * b), float(np.abs(left * b).sum())
        right = _floats(read(b[0], flat_of(op.inputs[b[0]].view, b[1](at))))
        return products(left, right)

    u = UNIT[_dtype(op, output)]
    each = gamma(count + more, u) / u

    def done(total: float, magnitude: float) -> Point:
        if finish is None:
            return Point(total, each * magnitude)
        return Point(*finish(total, magnitude, each))

    return Sum(count, terms, done)


def _mm(op: Operator, output: int, element: int, read: Read) -> Formula:
    i, j = position_of(op.outputs[output].view.shape, element)
    a, b = _need(op, "self"), _need(op, "mat2")
    count = op.inputs[a].view.shape[1]
    return _dot(op, output, count, (a, lambda k: (i + 0 * k, k)), (b, lambda k: (k, j + 0 * k)), read)


def _bmm(op: Operator, output: int, element: int, read: Read) -> Formula:
    n, i, j = position_of(op.outputs[output].view.shape, element)
    a, b = _need(op, "self"), _need(op, "mat2")
    count = op.inputs[a].view.shape[2]
    return _dot(
        op,
        output,
        count,
        (a, lambda k: (n + 0 * k, i + 0 * k, k)),
        (b, lambda k: (n + 0 * k, k, j + 0 * k)),
        read,
    )


def _addmm(op: Operator, output: int, element: int, read: Read) -> Formula:
    i, j = position_of(op.outputs[output].view.shape, element)
    a, b = _need(op, "mat1"), _need(op, "mat2")
    alpha, beta = op.number("alpha", 1), op.number("beta", 1)
    bias = float(_scalar(op, "self", (i, j), read))

    def finish(total: float, magnitude: float, each: float) -> tuple[float, float]:
        return beta * bias + alpha * total, (each + 3.0) * (abs(alpha) * magnitude + abs(beta * bias))

    count = op.inputs[a].view.shape[1]
    return _dot(op, output, count, (a, lambda k: (i + 0 * k, k)), (b, lambda k: (k, j + 0 * k)), read, finish)


def _baddbmm(op: Operator, output: int, element: int, read: Read) -> Formula:
    n, i, j = position_of(op.outputs[output].view.shape, element)
    a, b = _need(op, "batch1"), _need(op, "batch2")
    alpha, beta = op.number("alpha", 1), op.number("beta", 1)
    bias = float(_scalar(op, "self", (n, i, j), read)) if beta else 0.0

    def finish(total: float, magnitude: float, each: float) -> tuple[float, float]:
        return beta * bias + alpha * total, (each + 3.0) * (abs(alpha) * magnitude + abs(beta * bias))

    count = op.inputs[a].view.shape[2]
    return _dot(
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
        slot = _need(op, "self")
        count, place = _reduced(op, output, element, slot)
        if not _is_float(op, output):
            values = read(slot, flat_of(op.inputs[slot].view, place(_span(0, count))))
            return Point(int(np.asarray(values, dtype=np.int64).sum()), exact=True)
        divisor = float(count) if mean else 1.0

        def finish(total: float, magnitude: float, each: float) -> tuple[float, float]:
            return total / divisor, (each + 2.0) * magnitude / divisor

        return _dot(op, output, count, (slot, place), 1.0, read, finish)

    return rule


def _norm(op: Operator, output: int, element: int, read: Read) -> Formula:
    if op.number("ord", 2) != 2:
        raise UnknownFormError(f"operator {op.name}: only the 2-norm is in the table")
    slot = _need(op, "self")
    count, place = _reduced(op, output, element, slot)

    def finish(total: float, magnitude: float, each: float) -> tuple[float, float]:
        root = math.sqrt(max(total, 0.0))
        return root, (0.5 * each + 4.0) * root

    return _dot(op, output, count, (slot, place), (slot, place), read, finish)


def _all(op: Operator, output: int, element: int, read: Read) -> Formula:
    slot = _need(op, "self")
    count, place = _reduced(op, output, element, slot)
    values = read(slot, flat_of(op.inputs[slot].view, place(_span(0, count))))
    return Point(int(bool(np.all(values))), exact=True)


def _cumsum(op: Operator, output: int, element: int, read: Read) -> Formula:
    if _is_float(op, output):
        raise UnknownFormError("operator cumsum: of floats")
    slot = _need(op, "self")
    position = position_of(op.outputs[output].view.shape, element)
    axis = int(op.number("dim")) % len(position)
    at = tuple(_span(0, position[axis] + 1) if d == axis else np.asarray(p) for d, p in enumerate(position))
    values = read(slot, flat_of(op.inputs[slot].view, at))
    return Point(int(np.asarray(values, dtype=np.int64).sum()), exact=True)


def _embedding_backward(op: Operator, output: int, element: int, read: Read) -> Formula:
    if op.attributes.get("scale_grad_by_freq") not in (False, 0):
        raise UnknownFormError("operator embedding_dense_backward: scaled by frequency")
    grad, indices = _need(op, "grad_output"), _need(op, "indices")
    row, column = position_of(op.outputs[output].view.shape, element)
    view = op.inputs[indices].view
    everywhere = tuple(_indices(view.shape).reshape(len(view.shape), -1))
    rows = np.asarray(read(indices, flat_of(view, everywhere)), dtype=np.int64)
    hits = np.flatnonzero(rows == row)
    if not hits.size or row == op.number("padding_idx"):
        return Point(0.0, exact=True)

    def place(at: Indexes) -> tuple[Indexes, ...]:
        return (*(axis[hits[at]] for axis in everywhere), column + 0 * at)

    return _dot(op, output, int(hits.size), (grad, place), 1.0, read)


# -- convolution and pooling ---------------------------------------------------------------------


def _window(op: Operator) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int], int]:
    if op.attributes.get("transposed") is not False:
        raise UnknownFormError(f"operator {op.name}: transposed")
    stride, padding, dilation = (op.integers(name) for name in ("stride", "padding", "dilation"))
    if len(stride) != 2 or len(padding) != 2 or len(dilation) != 2:
        raise UnknownFormError(f"operator {op.name}: only two dimensions are in the table")
    return (
        (stride[0], stride[1]),
        (padding[0], padding[1]),
        (dilation[0], dilation[1]),
        int(op.number("groups")),
    )


def _product_of(op: Operator, output: int, read: Read, a: tuple[int, list[Indexes]], b: tuple[int, list[Indexes]],
                finish: Callable[[float, float, float], tuple[float, float]] | None = None) -> Sum:  # fmt: skip
    """A sum of products over listed positions of two inputs."""
    count = int(a[1][0].size)

    def left(at: Indexes) -> tuple[Indexes, ...]:
        return tuple(axis[at] for axis in a[1])

    def right(at: Indexes) -> tuple[Indexes, ...]:
        return tuple(axis[at] for axis in b[1])

    return _dot(op, output, count, (a[0], left), (b[0], right), read, finish)


def _convolution(op: Operator, output: int, element: int, read: Read) -> Formula:
    stride, padding, dilation, groups = _window(op)
    x, w = _need(op, "input"), _need(op, "weight")
    n, o, oy, ox = position_of(op.outputs[output].view.shape, element)
    shape, kernel = op.inputs[x].view.shape, op.inputs[w].view.shape
    c, ky, kx = (axis.reshape(-1) for axis in _indices(kernel[1:]))
    iy, ix = oy * stride[0] - padding[0] + ky * dilation[0], ox * stride[1] - padding[1] + kx * dilation[1]
    ok = (iy >= 0) & (iy < shape[2]) & (ix >= 0) & (ix < shape[3])
    c, ky, kx, iy, ix = c[ok], ky[ok], kx[ok], iy[ok], ix[ok]
    first = o // (kernel[0] // groups) * kernel[1]
    bias = 0.0
    if op.slot("bias") is not None:
        bias = float(read(_need(op, "bias"), flat_of(op.inputs[_need(op, "bias")].view, _fixed((o,))))[0])

    def finish(total: float, magnitude: float, each: float) -> tuple[float, float]:
        return total + bias, (each + 2.0) * (magnitude + abs(bias))

    zero = 0 * c
    return _product_of(
        op, output, read, (x, [n + zero, first + c, iy, ix]), (w, [o + zero, c, ky, kx]), finish
    )


def _convolution_backward(op: Operator, output: int, element: int, read: Read) -> Formula:
    stride, padding, dilation, groups = _window(op)
    g, x, w = _need(op, "grad_output"), _need(op, "input"), _need(op, "weight")
    out, shape, kernel = (op.inputs[slot].view.shape for slot in (g, x, w))
    which = [number for number, wanted in enumerate(_mask(op)) if wanted][output]
    position = position_of(op.outputs[output].view.shape, element)
    per_group = kernel[0] // groups
    if which == 2:
        n, y, xx = (a.reshape(-1) for a in _indices((out[0], out[2], out[3])))
        o = position[0]
        return _dot(op, output, int(n.size), (g, lambda k: (n[k], o + 0 * k, y[k], xx[k])), 1.0, read)
    if which == 1:
        o, c, ky, kx = position
        n, y, xx = (a.reshape(-1) for a in _indices((out[0], out[2], out[3])))
        iy, ix = y * stride[0] - padding[0] + ky * dilation[0], xx * stride[1] - padding[1] + kx * dilation[1]
        ok = (iy >= 0) & (iy < shape[2]) & (ix >= 0) & (ix < shape[3])
        n, y, xx, iy, ix = n[ok], y[ok], xx[ok], iy[ok], ix[ok]
        channel = o // per_group * kernel[1] + c
        return _product_of(op, output, read, (g, [n, o + 0 * n, y, xx]), (x, [n, channel + 0 * n, iy, ix]))
    n, c, iy, ix = position
    group, inside = divmod(c, kernel[1])
    o, ky, kx = (a.reshape(-1) for a in _indices((per_group, kernel[2], kernel[3])))
    o = o + group * per_group
    ny, nx = iy + padding[0] - ky * dilation[0], ix + padding[1] - kx * dilation[1]
    oy, ox = ny // stride[0], nx // stride[1]
    ok = (ny % stride[0] == 0) & (nx % stride[1] == 0)
    ok &= (oy >= 0) & (oy < out[2]) & (ox >= 0) & (ox < out[3])
    o, ky, kx, oy, ox = o[ok], ky[ok], kx[ok], oy[ok], ox[ok]
    if not o.size:
        return Point(0.0, exact=True)
    return _product_of(op, output, read, (g, [n + 0 * o, o, oy, ox]), (w, [o, inside + 0 * o, ky, kx]))


def _mask(op: Operator) -> list[bool]:
    given = op.attributes.get("output_mask")
    if not isinstance(given, list) or not all(isinstance(each, bool) for each in given):
        raise InvalidInput(f"operator {op.name}: output_mask must be a list of booleans")
    return [bool(each) for each in given]


def _pool_form(op: Operator) -> tuple[tuple[int, int], tuple[int, int]]:
    kernel = op.integers("kernel_size")
    stride = op.integers("stride") or kernel
    if len(kernel) == 1:
        kernel = (kernel[0], kernel[0])
    if len(stride) == 1:
        stride = (stride[0], stride[0])
    for name in ("ceil_mode",):
        _only(op, name, False, None)
    if any(op.integers("padding")) or op.attributes.get("divisor_override") is not None:
        raise UnknownFormError(f"operator {op.name}: padding or a divisor of its own")
    return (kernel[0], kernel[1]), (stride[0], stride[1])


def _avg_pool(op: Operator, output: int, element: int, read: Read) -> Formula:
    kernel, stride = _pool_form(op)
    slot = _need(op, "self")
    n, c, y, x = position_of(op.outputs[output].view.shape, element)
    ky, kx = (a.reshape(-1) for a in _indices(kernel))
    area = float(kernel[0] * kernel[1])

    def finish(total: float, magnitude: float, each: float) -> tuple[float, float]:
        return total / area, (each + 2.0) * magnitude / area

    def place(k: Indexes) -> tuple[Indexes, ...]:
        return n + 0 * k, c + 0 * k, y * stride[0] + ky[k], x * stride[1] + kx[k]

    return _dot(op, output, int(ky.size), (slot, place), 1.0, read, finish)


def _avg_pool_backward(op: Operator, output: int, element: int, read: Read) -> Formula:
    kernel, stride = _pool_form(op)
    slot = _need(op, "grad_output")
    out = op.inputs[slot].view.shape
    n, c, y, x = position_of(op.outputs[output].view.shape, element)
    ky, kx = (a.reshape(-1) for a in _indices(kernel))
    oy, ox = (y - ky) // stride[0], (x - kx) // stride[1]
    ok = ((y - ky) % stride[0] == 0) & ((x - kx) % stride[1] == 0)
    ok &= (oy >= 0) & (oy < out[2]) & (ox >= 0) & (ox < out[3])
    oy, ox = oy[ok], ox[ok]
    area = float(kernel[0] * kernel[1])
    if not oy.size:
        return Point(0.0, exact=True)

    def finish(total: float, magnitude: float, each: float) -> tuple[float, float]:
        return total / area, (2.0 * each + 2.0) * magnitude / area

    return _dot(
        op, output, int(oy.size), (slot, lambda k: (n + 0 * k, c + 0 * k, oy[k], ox[k])), 1.0, read, finish
    )


def _max_pool_backward(op: Operator, output: int, element: int, read: Read) -> Formula:
    slot, indices = _need(op, "grad_output"), _need(op, "indices")
    shape, out = op.outputs[output].view.shape, op.inputs[slot].view.shape
    n, c, y, x = position_of(shape, element)
    oy, ox = (a.reshape(-1) for a in _indices(out[2:]))
    where = (n + 0 * oy, c + 0 * oy, oy, ox)
    chosen = np.asarray(read(indices, flat_of(op.inputs[indices].view, where)), dtype=np.int64)
    hits = np.flatnonzero(chosen == y * shape[3] + x)
    if not hits.size:
        return Point(0.0, exact=True)
    return _dot(
        op, output, int(hits.size),
        (slot, lambda k: (n + 0 * k, c + 0 * k, oy[hits[k]], ox[hits[k]])), 1.0, read,
    )  # fmt: skip


# -- rows: softmax, losses, norms ----------------------------------------------------------------


def _row(op: Operator, read: Read, name: str, position: tuple[int, ...]) -> tuple[Floats, int]:
    axis = int(op.number("dim")) % max(len(position), 1)
    return _rest(op, read, name, (axis,), position), position[axis]


def _softmax(log: bool) -> Rule:
    def rule(op: Operator, output: int, element: int, read: Read) -> Formula:
        row, at = _row(op, read, "self", position_of(op.outputs[output].view.shape, element))
        top = float(row.max())
        if not math.isfinite(top):
            return Point(0.0, exact=True) if top == -math.inf and not log else Point(math.nan, exact=True)
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
        if log:
            weight, total = math.exp(float(y[at])), exact_sum(g)
            units = 8.0 * abs(float(g[at])) + weight * (n + FUNCTION) * float(np.abs(g).sum())
            return Point(float(g[at]) - weight * total, units)
        total, magnitude = products(g, y)
        own = float(y[at])
        return Point(
            own * (float(g[at]) - total), abs(own) * (12.0 * abs(float(g[at])) + (n + 12.0) * magnitude)
        )

    return rule


def _nll(op: Operator, output: int, element: int, read: Read) -> Formula:
    _only(op, "reduction", 1)
    _only(op, "weight", None)
    scores, target = _need(op, "self"), _need(op, "target")
    view = op.inputs[target].view
    count = view.shape[0]
    classes = np.asarray(read(target, flat_of(view, (_span(0, count),))), dtype=np.int64)
    rows = np.flatnonzero(classes != int(op.number("ignore_index")))
    if output == 1:
        return Point(float(rows.size), exact=True)
    if not rows.size:
        return Point(math.nan, exact=True)

    def finish(total: float, magnitude: float, each: float) -> tuple[float, float]:
        return -total / rows.size, (each + 4.0) * magnitude / rows.size

    return _dot(
        op, output, int(rows.size), (scores, lambda k: (rows[k], classes[rows[k]])), 1.0, read, finish
    )


def _nll_backward(op: Operator, output: int, element: int, read: Read) -> Formula:
    _only(op, "reduction", 1)
    _only(op, "weight", None)
    i, j = position_of(op.outputs[output].view.shape, element)
    target = _need(op, "target")
    wanted = int(read(target, flat_of(op.inputs[target].view, _fixed((i,))))[0])
    if wanted != j or wanted == int(op.number("ignore_index")):
        return Point(0.0, exact=True)
    g = float(_scalar(op, "grad_output", (), read))
    total = float(_scalar(op, "total_weight", (), read))
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
    if not total > 0.0:
        raise UnknownFormError("operator: a variance of zero without eps")
    share = variance / total if variance > 0.0 else 0.0
    relative = 0.5 * (units * share if share else 0.0) + 8.0
    return 1.0 / math.sqrt(total), relative


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
    return float(read(slot, flat_of(op.inputs[slot].view, _fixed(position)))[0])


def _layer_norm(op: Operator, output: int, element: int, read: Read) -> Formula:
    x = _need(op, "input")
    shape = op.inputs[x].view.shape
    inner = len(op.integers("normalized_shape"))
    rank = len(shape)
    axes = tuple(range(rank - inner, rank))
    position = position_of(op.outputs[output].view.shape, element)
    at = (*position[: rank - inner], *((0,) * inner if output else position[rank - inner :]))
    row = _rest(op, read, "input", axes, at)
    eps = op.number("eps")
    if output:
        mean, variance, mean_units, variance_units = _moments(row)
        inverse, relative = _inverse(variance, eps, variance_units)
        return Point(mean, mean_units) if output == 1 else Point(inverse, inverse * relative)
    own = float(row[int(np.ravel_multi_index(at[rank - inner :], shape[rank - inner :]))])
    weight, bias = (_affine(op, read, n, at[rank - inner :], d) for n, d in (("weight", 1.0), ("bias", 0.0)))
    return _normalised(own, row, eps, weight, bias)


def _layer_norm_backward(op: Operator, output: int, element: int, read: Read) -> Formula:
    which = [number for number, wanted in enumerate(_mask(op)) if wanted][output]
    x, g = _need(op, "input"), _need(op, "grad_out")
    shape = op.inputs[x].view.shape
    inner = len(op.integers("normalized_shape"))
    outer = shape[: len(shape) - inner]
    position = position_of(op.outputs[output].view.shape, element)
    if which == 0:
        return _layer_norm_input(op, position, inner, read)
    leading = tuple(a.reshape(-1) for a in _indices(outer))

    def block(low: int, high: int) -> tuple[float, float]:
        rows = tuple(axis[low:high] for axis in leading)
        at = (*rows, *(p + 0 * rows[0] for p in position))
        dy = _floats(read(g, flat_of(op.inputs[g].view, at)))
        if which == 2:
            return exact_sum(dy), float(np.abs(dy).sum())
        mean, rstd = (_per_row(op, read, name, rows) for name in ("mean", "rstd"))
        value = _floats(read(x, flat_of(op.inputs[x].view, at)))
        apart, lost = two_sum(value, -mean)
        high_part, low_part = triple_products(dy, apart, rstd)
        magnitude = np.abs(dy) * (np.abs(value) + np.abs(mean)) * np.abs(rstd)
        return exact_sum(high_part, low_part, dy * lost * rstd), float(magnitude.sum())

    count = math.prod(outer)
    u = UNIT[_dtype(op, output)]
    return Sum(count, block, lambda total, magnitude: Point(total, gamma(count + 24.0, u) / u * magnitude))


def _per_row(op: Operator, read: Read, name: str, rows: tuple[Indexes, ...]) -> Floats:
    slot = _need(op, name)
    view = op.inputs[slot].view
    zeros = (0 * rows[0],) * (len(view.shape) - len(rows))
    return _floats(read(slot, flat_of(view, (*rows, *zeros))))


def _layer_norm_input(op: Operator, position: tuple[int, ...], inner: int, read: Read) -> Formula:
    rank = len(position)
    axes = tuple(range(rank - inner, rank))
    row = tuple(np.asarray([p]) for p in position[: rank - inner])
    x = _rest(op, read, "input", axes, position)
    dy = _rest(op, read, "grad_out", axes, position)
    weight = np.ones_like(x)
    if op.slot("weight") is not None:
        weight = _rest(op, read, "weight", tuple(range(inner)), (0,) * inner)
    mean, rstd = (float(_per_row(op, read, name, row)[0]) for name in ("mean", "rstd"))
    shape = op.inputs[_need(op, "input")].view.shape
    at = int(np.ravel_multi_index(position[rank - inner :], shape[rank - inner :]))
    n = x.size
    a = dy * weight
    unit = (x - mean) * rstd
    first, second = exact_sum(a) / n, exact_sum(a * unit) / n
    value = rstd * (float(a[at]) - first - float(unit[at]) * second)
    reach = abs(float(x[at])) + abs(mean)
    sums = float(np.abs(a).sum()), float((np.abs(a) * (np.abs(x) + abs(mean))).sum())
    magnitude = rstd * (abs(float(a[at])) + sums[0] / n) + reach * rstd**3 * sums[1] / n
    return Point(value, (n + 32.0) * magnitude)


def _batch_norm(op: Operator, output: int, element: int, read: Read) -> Formula:
    if op.attributes.get("training") is not True:
        raise UnknownFormError("operator native_batch_norm: not training")
    position = position_of(op.outputs[output].view.shape, element)
    rank = len(op.inputs[_need(op, "input")].view.shape)
    channel = position[1] if output == 0 else position[0]
    axes = (0, *range(2, rank))
    at = position if output == 0 else (0, channel, *((0,) * (rank - 2)))
    row = _rest(op, read, "input", axes, at)
    eps = op.number("eps")
    mean, variance, mean_units, variance_units = _moments(row)
    if output == 0:
        slot = _need(op, "input")
        own = float(read(slot, flat_of(op.inputs[slot].view, _fixed(position)))[0])
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
    if op.attributes.get("train") is not True:
        raise UnknownFormError("operator native_batch_norm_backward: not training")
    which = [number for number, wanted in enumerate(_mask(op)) if wanted][output]
    position = position_of(op.outputs[output].view.shape, element)
    rank = len(op.inputs[_need(op, "input")].view.shape)
    channel = position[1] if which == 0 else position[0]
    axes = (0, *range(2, rank))
    at = position if which == 0 else (0, channel, *((0,) * (rank - 2)))
    dy = _rest(op, read, "grad_out", axes, at)
    n = dy.size
    total, magnitude = exact_sum(dy), float(np.abs(dy).sum())
    if which == 2:
        return Point(total, (n + 24.0) * magnitude)
    x = _rest(op, read, "input", axes, at)
    mean = _affine(op, read, "save_mean", (channel,), 0.0)
    inverse = _affine(op, read, "save_invstd", (channel,), 1.0)
    apart = x - mean
    high, low = two_product(dy, apart)
    dotted = exact_sum(high, low)
    reach = float((np.abs(dy) * (np.abs(x) + abs(mean))).sum())
    if which == 1:
        return Point(dotted * inverse, (n + 24.0) * reach * abs(inverse))
    weight = _affine(op, read, "weight", (channel,), 1.0)
    sizes = [op.inputs[_need(op, "input")].view.shape[axis] for axis in axes]
    own = int(np.ravel_multi_index([position[axis] for axis in axes], sizes))
    value = (float(dy[own]) - total / n - float(apart[own]) * inverse**2 * dotted / n) * inverse * weight
    parts = abs(float(dy[own])) + magnitude / n + (abs(float(x[own])) + abs(mean)) * inverse**2 * reach / n
    return Point(value, (n + 32.0) * parts * abs(inverse * weight))


def _same(op: Operator, output: int, element: int, read: Read) -> Formula:
    """A copy: of the first input, broadcast, to the output's own dtype."""
    name = "src" if op.name.startswith("aten::copy") else "self"
    slot = _need(op, name)
    position = position_of(op.outputs[output].view.shape, element)
    value = read(slot, _broadcast(op.inputs[slot].view, position))[0]
    source, target = op.inputs[slot].dtype, _dtype(op, output)
    if source == target or (source, target) == ("F32", "F64"):
        return Point(value.item(), exact=True)
    if (source, target) == ("F64", "F32"):
        return Point(float(np.float32(value)), exact=True)
    if source not in UNIT:
        return Point(float(value) if target in UNIT else int(value), exact=True)
    raise UnknownFormError(f"operator {op.name}: from {source} to {target}")


_IN_PLACE: Mapping[str, str] = {"aten::bernoulli_": "aten::bernoulli_"}

_RULES: Mapping[str, Rule] = {
    "aten::add": _elementwise(("self", "other"), _add),
    "aten::sub": _elementwise(("self", "other"), _sub),
    "aten::rsub": _elementwise(("other", "self"), _sub),
    "aten::mul": _elementwise(("self", "other"), _mul),
    "aten::_foreach_mul": _elementwise(("self", "other"), _mul),
    "aten::div": _elementwise(("self", "other"), _div),
    "aten::pow.Tensor_Scalar": _elementwise(("self", "exponent"), _pow),
    "aten::tanh": _elementwise(("self",), _relative(math.tanh)),
    "aten::exp": _elementwise(("self",), _relative(math.exp, 2.0 * FUNCTION)),
    "aten::sqrt": _elementwise(("self",), _relative(math.sqrt)),
    "aten::rsqrt": _elementwise(("self",), _relative(lambda x: 1.0 / math.sqrt(x))),
    "aten::reciprocal": _elementwise(("self",), _relative(lambda x: 1.0 / x)),
    "aten::tanh_backward": _elementwise(("grad_output", "output"), _tanh_backward),
    "aten::gelu": _elementwise(("self",), _gelu),
    "aten::gelu_backward": _elementwise(("grad_output", "self"), _gelu_backward),
    "aten::neg": _exact(("self",), lambda op, a: -a),
    "aten::where.self": _exact(("condition", "self", "other"), lambda op, c, a, b: a if c else b),
    "aten::masked_fill.Scalar": _exact(("mask", "self", "value"), lambda op, c, a, b: b if c else a),
    "aten::clamp": _exact(
        ("self",), lambda op, a: min(max(a, op.number("min", -math.inf)), op.number("max", math.inf))
    ),
    "aten::eq": _compared(lambda a, b: a == b),
    "aten::ne": _compared(lambda a, b: a != b),
    "aten::le": _compared(lambda a, b: a <= b),
    "aten::lt": _compared(lambda a, b: a < b),
    "aten::ge": _compared(lambda a, b: a >= b),
    "aten::gt": _compared(lambda a, b: a > b),
    "aten::clone": _same,
    "aten::copy": _same,
    "aten::_to_copy": _same,
    "aten::fill.Scalar": _constant("value"),
    "aten::zero": _constant(0.0),
    "aten::zeros": _constant(0.0),
    "aten::zeros_like": _constant(0.0),
    "aten::new_zeros": _constant(0.0),
    "aten::ones": _constant(1.0),
    "aten::ones_like": _constant(1.0),
    "aten::full": _constant("fill_value"),
    "aten::full_like": _constant("fill_value"),
    "aten::scalar_tensor": _constant("s"),
    "aten::arange": _arange,
    "aten::tril": _tril,
    "aten::cat": _cat,
    "aten::stack": _stack,
    "aten::constant_pad_nd": _pad,
    "aten::embedding": _embedding,
    "aten::relu": _relu,
    "aten::threshold_backward": _threshold_backward,
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
    "aten::convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
    "aten::avg_pool2d": _avg_pool,
    "aten::avg_pool2d_backward": _avg_pool_backward,
    "aten::max_pool2d_with_indices_backward": _max_pool_backward,
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
