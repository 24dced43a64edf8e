"""Rules of operators that make each element of one element of each input, or move and fill elements."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from tallystick.dispute.bounds.formulas import UNIT, Formula, Point, Read
from tallystick.dispute.bounds.operands import (
    ARRAY,
    FUNCTION,
    Rule,
    UnknownFormError,
    allow_only,
    broadcast_at,
    dtype_of,
    fixed_at,
    flat_of,
    is_float,
    position_of,
    scalar_at,
    slot_of,
    verify_readable,
)
from tallystick.dispute.operator_list import Operator
from tallystick.errors import InvalidInput

Elementwise = Callable[..., tuple[float, float]]


def _elementwise(arguments: tuple[str, ...], function: Elementwise) -> Rule:
    """A rule that gives value and units from the arguments' elements; whole numbers are exact."""

    def rule(op: Operator, output: int, element: int, read: Read) -> Formula:
        position = position_of(op.outputs[output].view.shape, element)
        values = [scalar_at(op, name, position, read) for name in arguments]
        verify_readable(op, output, *values, op.number("alpha", 1))
        if any(each.dtype in UNIT and each.dtype != dtype_of(op, output) for each in op.inputs):
            raise UnknownFormError(f"operator {op.name}: rounds to one float and is stored as another")
        with np.errstate(all="ignore"):
            try:
                value, units = function(op, *values)
            except (ZeroDivisionError, OverflowError, ValueError):
                raise UnknownFormError(f"operator {op.name}: not finite at element {element}") from None
        if not is_float(op, output):
            if any(isinstance(each, float) for each in (*values, value)):
                raise UnknownFormError(f"operator {op.name}: turns floats into whole numbers")
            return Point(value, exact=True)
        if math.isinf(value) and any(math.isinf(each) for each in values):
            return Point(value, exact=True)  # whatever is added to a mask's infinity
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
    allow_only(op, "rounding_mode", None)
    if isinstance(a, int) and isinstance(b, int):
        raise UnknownFormError(f"operator {op.name}: divides whole numbers")
    return a / b, 6.0 * abs(a / b)  # by a number: some machines multiply by its reciprocal


def _pow(op: Operator, a: float, b: float) -> tuple[float, float]:
    if isinstance(a, int) and isinstance(b, int):
        if not 0 <= b <= 64:
            raise UnknownFormError(f"operator {op.name}: a whole number to the power {b}")
        return a**b, 0.0
    if math.isinf(a) or math.isinf(b):
        raise UnknownFormError(f"operator {op.name}: of an infinity")
    value, doubled = math.pow(a, b), 2.0 * abs(b * math.log(abs(a))) if a else 0.0  # the exponent is rounded
    return value, (FUNCTION * max(1.0, abs(b)) + doubled) * abs(value)


def _relative(function: Callable[[float], float], units: float = FUNCTION) -> Elementwise:
    def of(op: Operator, a: float) -> tuple[float, float]:
        value = function(a)
        return value, units * abs(value)

    return of


def _tanh_backward(op: Operator, g: float, y: float) -> tuple[float, float]:
    return g * (1.0 - y * y), 6.0 * abs(g) * (1.0 + y * y)


def _gelu(op: Operator, x: float) -> tuple[float, float]:
    allow_only(op, "approximate", "none", None)
    return x * 0.5 * (1.0 + math.erf(x * math.sqrt(0.5))), FUNCTION * abs(x)


def _gelu_backward(op: Operator, g: float, x: float) -> tuple[float, float]:
    allow_only(op, "approximate", "none", None)
    cdf = 0.5 * (1.0 + math.erf(x * math.sqrt(0.5)))
    pdf = math.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)
    return g * (cdf + x * pdf), FUNCTION * abs(g) * (1.0 + abs(x) * pdf * (1.0 + x * x))


def _exact(arguments: tuple[str, ...], function: Callable[..., float | int | bool]) -> Rule:
    """A rule for an operator that moves or compares numbers: no rounding."""

    def rule(op: Operator, output: int, element: int, read: Read) -> Formula:
        position = position_of(op.outputs[output].view.shape, element)
        values = [scalar_at(op, name, position, read) for name in arguments]
        return Point(function(op, *values), exact=True)

    return rule


def _compared(function: Callable[[float, float], bool]) -> Rule:
    inner = _exact(("self", "other"), lambda op, a, b: function(a, b))

    def rule(op: Operator, output: int, element: int, read: Read) -> Formula:
        if any(operand.dtype in UNIT for operand in op.inputs):
            raise UnknownFormError(f"operator {op.name}: a comparison of floats is a decision")
        if op.slot("other") is None and not _holds(op.inputs[0].dtype, op.number("other")):
            raise UnknownFormError(f"operator {op.name}: against a number that torch makes another one")
        return inner(op, output, element, read)

    return rule


def _holds(dtype: str, number: float) -> bool:
    """Whether elements of ``dtype`` can be a whole ``number``."""
    bits = 8 * np.dtype(ARRAY[dtype]).itemsize
    least, most = (0, 2**bits - 1) if dtype in ("U8", "BOOL") else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return isinstance(number, int) and least <= number <= (1 if dtype == "BOOL" else most)


def _constant(argument: str | float) -> Rule:
    def rule(op: Operator, output: int, element: int, read: Read) -> Formula:
        return Point(op.number(argument) if isinstance(argument, str) else argument, exact=True)

    return rule


def _arange(op: Operator, output: int, element: int, read: Read) -> Formula:
    start, step = op.number("start", 0), op.number("step", 1)
    if not isinstance(start, int) or not isinstance(step, int) or is_float(op, output):
        raise UnknownFormError("operator arange: of floats")
    return Point(start + element * step, exact=True)


def _tril(op: Operator, output: int, element: int, read: Read) -> Formula:
    position = position_of(op.outputs[output].view.shape, element)
    kept = position[-1] - position[-2] <= op.number("diagonal", 0)
    slot = slot_of(op, "self")
    value = read(slot, broadcast_at(op.inputs[slot].view, position))[0].item()
    return Point(value if kept else type(value)(0), exact=True)


def _cat(op: Operator, output: int, element: int, read: Read) -> Formula:
    position = list(position_of(op.outputs[output].view.shape, element))
    axis = int(op.number("dim", 0)) % max(len(position), 1)
    for slot, operand in enumerate(op.inputs):
        if operand.view.shape == (0,):
            continue
        size = operand.view.shape[axis]
        if position[axis] < size:
            flat = flat_of(operand.view, fixed_at(tuple(position)))
            return Point(read(slot, flat)[0].item(), exact=True)
        position[axis] -= size
    raise InvalidInput("operator cat: the inputs are smaller than the output")


def _stack(op: Operator, output: int, element: int, read: Read) -> Formula:
    position = list(position_of(op.outputs[output].view.shape, element))
    slot = position.pop(int(op.number("dim", 0)) % max(len(position), 1))
    if slot >= len(op.inputs):
        raise InvalidInput("operator stack: the output is larger than its inputs")
    return Point(read(slot, flat_of(op.inputs[slot].view, fixed_at(tuple(position))))[0].item(), exact=True)


def _pad(op: Operator, output: int, element: int, read: Read) -> Formula:
    position = list(position_of(op.outputs[output].view.shape, element))
    slot, pads = slot_of(op, "self"), op.integers("pad")
    view = op.inputs[slot].view
    for number in range(len(pads) // 2):
        position[-1 - number] -= pads[2 * number]
    if all(0 <= at < size for at, size in zip(position, view.shape, strict=True)):
        return Point(read(slot, flat_of(view, fixed_at(tuple(position))))[0].item(), exact=True)
    return Point(op.number("value", 0), exact=True)


def _embedding(op: Operator, output: int, element: int, read: Read) -> Formula:
    position = position_of(op.outputs[output].view.shape, element)
    weight, indices = slot_of(op, "weight"), slot_of(op, "indices")
    row = int(read(indices, flat_of(op.inputs[indices].view, fixed_at(position[:-1])))[0])
    value = read(weight, flat_of(op.inputs[weight].view, fixed_at((row, position[-1]))))[0]
    return Point(value.item(), exact=True)


def _relu(op: Operator, output: int, element: int, read: Read) -> Formula:
    """The branch of an element near zero may be the log's; the caller gives it as attribute-free ``decided``."""
    slot = slot_of(op, "self")
    position = position_of(op.outputs[output].view.shape, element)
    return Point(max(read(slot, broadcast_at(op.inputs[slot].view, position))[0].item(), 0), exact=True)


def _threshold_backward(op: Operator, output: int, element: int, read: Read) -> Formula:
    """Of a ReLU; at another threshold the log may say on which side an element lies."""
    allow_only(op, "threshold", 0)
    position = position_of(op.outputs[output].view.shape, element)
    g = float(scalar_at(op, "grad_output", position, read))
    x = float(scalar_at(op, "self", position, read))
    return Point(0.0 if x <= 0.0 else g, exact=True)


def _same(op: Operator, output: int, element: int, read: Read) -> Formula:
    """A copy: of the first input, broadcast, to the output's own dtype."""
    name = "src" if op.name.startswith("aten::copy") else "self"
    slot = slot_of(op, name)
    position = position_of(op.outputs[output].view.shape, element)
    value = read(slot, broadcast_at(op.inputs[slot].view, position))[0].item()
    source, target = op.inputs[slot].dtype, dtype_of(op, output)
    if source in UNIT and target not in UNIT:
        raise UnknownFormError(f"operator {op.name}: from {source} to {target}")
    return Point(value, exact=True)


ELEMENTWISE: Mapping[str, Rule] = {
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
}
"""The rules by operator, where they differ with the overload."""
