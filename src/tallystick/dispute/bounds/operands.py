"""Where an operator's elements lie and what its arguments are, for the rules of the judge's operator table.

A rule names its inputs as the operator's schema does and reads single elements of them; what an operator's leaf says that
no rule understands raises ``UnknownFormError``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from tallystick.dispute.bounds.formulas import LARGEST, LEAST, UNIT, Floats, Formula, Indexes, Read
from tallystick.dispute.operator_list import Geometry, Operator
from tallystick.errors import InvalidInput

FUNCTION = 32.0
"""Units that an elementary function may be off by (see ``operator_table``)."""
ARRAY = {
    "F32": "<f4", "F64": "<f8", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1", "BOOL": "u1",
}  # fmt: skip
"""How numpy reads the elements of each dtype that rules know."""
MOST_TERMS = 1 << 24  # indexed at once for one element; some hundred megabytes
Rule = Callable[[Operator, int, int, Read], Formula]
Wide = tuple[int, ...]


class UnknownFormError(InvalidInput):
    """A form of an operator that the table does not cover."""


def span(low: int, high: int) -> Indexes:
    """Return the numbers from low up to high: a view of stride 0 may claim more elements than any memory holds."""
    if high - low > MOST_TERMS:
        raise UnknownFormError(f"operator: {high - low} terms at once, a reader takes {MOST_TERMS}")
    return np.arange(low, high, dtype=np.int64)


def indices_of(sizes: Sequence[int]) -> Indexes:
    """Return what ``numpy.indices`` does, for as many elements as a reader takes."""
    if any(size < 0 for size in sizes) or math.prod(sizes) > MOST_TERMS:
        raise UnknownFormError(f"operator: {math.prod(sizes)} terms at once, a reader takes {MOST_TERMS}")
    return np.indices(tuple(sizes), dtype=np.int64)


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
    return int(flat_of(view, fixed_at(position_of(view.shape, element)))[0])


def fixed_at(position: tuple[int, ...]) -> tuple[Indexes, ...]:
    """Return one position as ``flat_of`` takes it: an array of one index for each dimension."""
    return tuple(np.asarray([at], dtype=np.int64) for at in position)


def broadcast_at(view: Geometry, position: tuple[int, ...]) -> Indexes:
    """Return where an input of fewer or unit dimensions is read for an output's position."""
    if len(view.shape) > len(position):
        raise InvalidInput("operator: an input has more dimensions than the output")
    tail = position[len(position) - len(view.shape) :]
    if any(size not in (1,) and at >= size for size, at in zip(view.shape, tail, strict=True)):
        raise InvalidInput("operator: an input does not broadcast to the output")
    return flat_of(view, fixed_at(tuple(0 if n == 1 else at for n, at in zip(view.shape, tail, strict=True))))


def as_floats(values: np.ndarray) -> Floats:
    """Return elements as float64, which holds every format exactly that a rule reads."""
    return np.asarray(values, dtype=np.float64)


def scalar_at(op: Operator, name: str, position: tuple[int, ...], read: Read) -> float | int:
    """Return an argument that is a tensor, broadcast, or a number."""
    slot = op.slot(name)
    if slot is None:
        return op.number(name)
    value = read(slot, broadcast_at(op.inputs[slot].view, position))[0]
    return value.item()


def slot_of(op: Operator, name: str) -> int:
    """Return the number of the input called ``name``; an operator without it has a form that no rule covers."""
    slot = op.slot(name)
    if slot is None:
        raise UnknownFormError(f"operator {op.name}: {name} is not given")
    return slot


def dtype_of(op: Operator, output: int) -> str:
    """Return the dtype of an output."""
    return op.outputs[output].tensor.dtype


def is_float(op: Operator, output: int) -> bool:
    """Return whether an output holds floating-point numbers that are rounded."""
    return dtype_of(op, output) in UNIT


def verify_bounded(op: Operator, output: int, *numbers: float) -> None:
    """Return if every machine has these numbers, which it may meet on the way to an output's element.

    Raises:
        UnknownFormError: one may be infinite there, or nothing.
    """
    if not all(abs(number) < LARGEST[dtype_of(op, output)] for number in numbers):
        raise UnknownFormError(f"operator {op.name}: numbers that some machines do not have")


def verify_readable(op: Operator, output: int, *numbers: float) -> None:
    """Return if every machine reads these numbers alike in the dtype of an output: none is flushed, none beyond its largest.

    Raises:
        UnknownFormError: some machine takes one for zero, or for an infinity.
    """
    dtype = dtype_of(op, output)
    if dtype not in UNIT:
        return
    if any(0.0 < abs(number) < LEAST[dtype] for number in numbers):
        raise UnknownFormError(f"operator {op.name}: of a number that some machines take for zero")
    if any(LARGEST[dtype] <= abs(number) < math.inf for number in numbers):
        raise UnknownFormError(f"operator {op.name}: of a number that some machines take for an infinity")


def allow_only(op: Operator, name: str, *allowed: object) -> None:
    """Return if the attribute ``name`` has one of the ``allowed`` values; of another form no rule covers it."""
    value = op.attributes.get(name)
    if isinstance(value, dict) and "float" in value:
        value = op.number(name)
    if value not in allowed:
        raise UnknownFormError(f"operator {op.name}: {name} is {value!r}")


def read_along(op: Operator, read: Read, name: str, axes: tuple[int, ...], at: tuple[int, ...]) -> Floats:
    """Return the elements of an input along ``axes`` (row order), the other dimensions at ``at``."""
    slot = slot_of(op, name)
    view = op.inputs[slot].view
    sizes = [view.shape[axis] for axis in axes]
    grid = indices_of(sizes).reshape(len(sizes), -1)
    along = dict(zip(axes, grid, strict=True))
    position = tuple(along.get(axis, np.asarray(at[axis], dtype=np.int64)) for axis in range(len(view.shape)))
    return as_floats(read(slot, flat_of(view, position)))


def wanted_output(op: Operator, output: int) -> int:
    """Return which of the operator's results output number ``output`` is: ``output_mask`` leaves some out."""
    given = op.attributes.get("output_mask")
    if not isinstance(given, list) or not all(isinstance(each, bool) for each in given):
        raise InvalidInput(f"operator {op.name}: output_mask must be a list of booleans")
    return [number for number, wanted in enumerate(given) if wanted][output]
