"""How one element of an operator follows from its inputs and from what is agreed about its step: the log, the grids, the seed.

Rounding sites, decisions, portable random numbers and optimizer steps are judged by the log and the reference arithmetic;
every other operator by its rule in the operator table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from tallystick.commit.encoding import digest
from tallystick.dispute.bounds.formulas import UNIT, Formula, Indexes, Point, Read
from tallystick.dispute.bounds.operands import (
    ARRAY,
    MOST_TERMS,
    UnknownFormError,
    flat_of,
    position_of,
    stored_at,
)
from tallystick.dispute.bounds.table import find_rule
from tallystick.dispute.operator_list import ADAM, ROUND, SGD, Operator
from tallystick.errors import InvalidInput
from tallystick.numerics.grid_table import GridTable, SiteGrid, find_grid
from tallystick.numerics.log import (
    Frame,
    Kind,
    SiteAddress,
    SparseEntries,
    decode,
    decode_decision,
    decode_frame,
)
from tallystick.numerics.policy import entry_budget
from tallystick.numerics.random import bernoulli, stream_key, words
from tallystick.numerics.reference import AdamRule, LoggedElement, ScaledBand, SgdRule, adam, follow, sgd
from tallystick.numerics.rounded_sites import may_rest
from tallystick.run.documents import Specification, StepRecord

CONSTANT = "tallystick::constant"
NARROW = ("F16", "BF16")
FRAME_TAG = "tallystick/log-frame/1"


@dataclass(frozen=True)
class StepFacts:
    """What both parties agree on about the disputed step.

    Attributes:
        specification, record: of the run, and of the step as the trainer committed to it.
        frame: the step's log, of which the record states the digest.
        grids: bytes of the state entry ``document/grids`` before the step.
    """

    specification: Specification
    record: StepRecord
    frame: bytes
    grids: bytes

    @cached_property
    def log(self) -> Frame:
        """The decoded log."""
        if digest(FRAME_TAG, self.frame).hex() != self.record.log:
            raise InvalidInput(f"step {self.record.step}: the log is not the one its record names")
        return decode_frame(self.frame)

    @cached_property
    def table(self) -> GridTable:
        """The grids of the step."""
        table = GridTable.decode(self.grids)
        update = self.log.find(SiteAddress(self.record.rank, 0, Kind.GRID, 0))
        return table if update is None else table.apply(update)

    def grid(self, kind: int, ordinal: int) -> SiteGrid | None:
        """Return the grid of one site of the step, None if it has none; the others are not read."""
        if (kind, ordinal) not in self._found:
            update = self.log.find(SiteAddress(self.record.rank, 0, Kind.GRID, 0))
            self._found[(kind, ordinal)] = find_grid(self.grids, update, (kind, ordinal))
        return self._found[(kind, ordinal)]

    @cached_property
    def _found(self) -> dict[tuple[int, int], SiteGrid | None]:
        return {}

    def parameter(self, name: str) -> int | str:
        """Return one of the policy's numbers."""
        return self.specification.policy.parameters.get(name, 0)


def needs_log(op: Operator | None) -> bool:
    """Whether judging an operator takes the step's log and grids."""
    return op is not None and (op.name == ROUND or "decision" in op.attributes)


def formula_for(op: Operator, output: int, element: int, read: Read, facts: StepFacts) -> Formula:
    """Return how one element follows from the operator's inputs.

    Raises:
        UnknownFormError: the table does not have this operator, or not this form of it.
        InvalidInput: the operator contradicts itself or the log.
    """
    if op.outputs[output].tensor.dtype in NARROW:
        raise UnknownFormError(
            f"operator {op.name}: results of {op.outputs[output].tensor.dtype} are not in the table"
        )
    own = _OWN.get(op.name)
    if own is not None:
        return own(op, output, element, read, facts)
    rule = find_rule(op)
    if rule is None:
        raise UnknownFormError(f"operator {op.name}: is not in the table")
    found = rule(op, output, element, read)
    if op.name in ("aten::relu", "aten::relu_") and isinstance(found, Point):
        return _decided_relu(op, element, read, facts, found)
    if isinstance(found, Point) and found.exact:
        return replace(found, value=_converted(op, output, found.value))
    return found


def _converted(op: Operator, output: int, value: float | int) -> float | int:
    """Return an exact value as the output's dtype holds it: rounded; whole numbers modulo its range; truths as 0 and 1.

    Raises:
        UnknownFormError: machines differ in what becomes of it.
    """
    dtype = op.outputs[output].tensor.dtype
    if dtype in UNIT:
        if isinstance(value, int) and abs(value) > 2**53:
            raise UnknownFormError(f"operator {op.name}: a whole number beyond 2**53, as {dtype}")
        with np.errstate(over="ignore"):
            return float(value) if dtype == "F64" else float(np.float32(value))
    if isinstance(value, float):
        if not value.is_integer():
            raise UnknownFormError(f"operator {op.name}: {value} as {dtype}")
        value = int(value)
    if dtype == "BOOL":
        return int(value != 0)
    bits = 8 * np.dtype(ARRAY[dtype]).itemsize
    return (value + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1) if dtype != "U8" else value % 2**bits


def _site(grid: SiteGrid, numel: int, element: int) -> ScaledBand:
    if not grid.scales.size or numel % grid.scales.size:
        raise UnknownFormError("rounding site: has a relative band")
    scale = int(grid.scales[element // (numel // grid.scales.size)])
    return ScaledBand(grid.band, grid.floor, (scale,))


def _entries(facts: StepFacts, kind: int, ordinal: int, numel: int) -> SparseEntries:
    payload = facts.log.find(SiteAddress(facts.record.rank, 0, kind, ordinal))
    return SparseEntries.none(numel, 1) if payload is None else decode(payload, numel, 1)


def _rounded(op: Operator, output: int, element: int, read: Read, facts: StepFacts) -> Formula:
    kind, ordinal = int(op.number("kind")), int(op.number("ordinal"))
    numel = op.outputs[0].view.numel
    grid = facts.grid(kind, ordinal)
    if grid is None or kind not in (Kind.GRADIENT, Kind.BUFFER):
        raise UnknownFormError(f"rounding site {kind}/{ordinal}: has no grid")
    if grid.residue_bits:
        raise UnknownFormError(f"rounding site {kind}/{ordinal}: is logged by residues")
    entries = _entries(facts, kind, ordinal, numel)
    sides = _symbol(entries, element)
    y = float(read(0, flat_of(op.inputs[0].view, _at(op, element)))[0])
    drawn = None
    if grid.dithered:
        purpose = "dither" if kind == Kind.GRADIENT else "dither-buffer"
        record = facts.record
        key = stream_key(facts.specification.seed, purpose, record.step, record.rank, 0, ordinal)
        drawn = [int(words(key, element, 1)[0])]
    logged = [] if sides is None else [LoggedElement(0, sides)]
    values, _ = follow([y], logged, grid.precision, _site(grid, numel, element), drawn)
    return Point(values[0], exact=True)


def _at(op: Operator, element: int) -> tuple[Indexes, ...]:
    position = position_of(op.inputs[0].view.shape, element)
    return tuple(np.asarray([at], dtype=np.int64) for at in position)


def _symbol(entries: SparseEntries, element: int) -> int | None:
    at = int(np.searchsorted(entries.indexes, element))
    if at < len(entries) and int(entries.indexes[at]) == element:
        return int(entries.symbols[at])
    return None


def _decision(
    facts: StepFacts, op: Operator, numel: int, width: int, element: int
) -> tuple[float, int] | None:
    """Return reach and symbol of the log's entry for an element of a decision, or None."""
    address = SiteAddress(facts.record.rank, op.micro_batch, Kind.DECISION, int(op.number("decision")))
    payload = facts.log.find(address)
    if payload is None:
        return None
    exponent, entries = decode_decision(payload, numel, width)
    symbol = _symbol(entries, element)
    return None if symbol is None else (math.ldexp(2.0, exponent), symbol)


def _decided_relu(op: Operator, element: int, read: Read, facts: StepFacts, plain: Point) -> Point:
    if "decision" not in op.attributes:
        return plain
    view = op.inputs[0].view
    decided = _decision(facts, op, view.numel, 2, element)
    x = float(read(0, flat_of(view, _at(op, element)))[0])
    if decided is None or abs(x) >= decided[0]:
        return plain
    tiny = 2.0**-126 if op.inputs[0].dtype == "F32" else 2.0**-1022
    return Point(plain.value, exact=True, also=max(x, tiny) if decided[1] == 2 else 0.0)


def _max_pool(op: Operator, output: int, element: int, read: Read, facts: StepFacts) -> Formula:
    kernel, stride, padding, dilation = (
        op.integers(n) for n in ("kernel_size", "stride", "padding", "dilation")
    )
    stride = stride or kernel
    view = op.inputs[0].view
    if (
        len(kernel) != 2
        or not 0 < kernel[0] * kernel[1] <= MOST_TERMS
        or len(stride) != 2
        or any(padding)
        or any(d != 1 for d in dilation)
        or len(view.shape) != 4
    ):
        raise UnknownFormError("operator max_pool2d_with_indices: only plain windows are in the table")
    n, c, y, x = position_of(op.outputs[output].view.shape, element)
    chosen = int(read(-2, np.asarray([stored_at(op.outputs[1].view, element)]))[0])
    row, column = divmod(chosen, view.shape[3])
    ky, kx = (a.reshape(-1) for a in np.indices((kernel[0], kernel[1]), dtype=np.int64))
    rows, columns = y * stride[0] + ky, x * stride[1] + kx
    ok = (rows < view.shape[2]) & (columns < view.shape[3])
    rows, columns = rows[ok], columns[ok]
    zero = 0 * rows
    values = np.asarray(read(0, flat_of(view, (n + zero, c + zero, rows, columns))), dtype=np.float64)
    if not np.isfinite(values).all():
        raise UnknownFormError("operator max_pool2d_with_indices: of numbers that are not finite")
    hit = np.flatnonzero((rows == row) & (columns == column))
    if output == 0:
        value = float(values[hit[0]]) if hit.size else math.nan
        return Point(value, 4.0 * abs(value))
    reach = 0.0
    plane = view.shape[2] * view.shape[3]
    decided = _decision(facts, op, op.outputs[1].view.numel, max(1, (plane - 1).bit_length()), element)
    if decided is not None and decided[1] == chosen:
        reach = decided[0]
    if hit.size and float(values.max()) - float(values[hit[0]]) <= reach:
        return Point(chosen, exact=True)
    best = int(values.argmax())
    return Point(int(rows[best] * view.shape[3] + columns[best]), exact=True)


def _bernoulli(op: Operator, output: int, element: int, read: Read, facts: StepFacts) -> Formula:
    record = facts.record
    call = int(op.number("call"))
    key = stream_key(facts.specification.seed, "operator", record.step, record.rank, op.micro_batch, call)
    return Point(float(bernoulli(key, element, 1, float(op.number("p")))[0]), exact=True)


def _constant(op: Operator, output: int, element: int, read: Read, facts: StepFacts) -> Formula:
    text = op.attributes.get("data")
    dtype = op.outputs[0].tensor.dtype
    if not isinstance(text, str) or dtype not in ARRAY:
        raise UnknownFormError("operator constant: no data")
    try:
        held = np.frombuffer(bytes.fromhex(text), dtype=ARRAY[dtype])
    except ValueError:
        raise InvalidInput("operator constant: its data is not hexadecimal elements") from None
    at = stored_at(op.outputs[0].view, element)
    if at >= held.size:
        raise InvalidInput(f"operator constant: element {at} of {held.size}")
    return Point(held[at].item(), exact=True)


def _elements(op: Operator, element: int, read: Read, slots: Sequence[int]) -> list[float]:
    found: list[float] = []
    for slot in slots:
        view = op.inputs[slot].view
        position = position_of(view.shape, element if view.numel > 1 else 0)
        found.append(float(read(slot, flat_of(view, tuple(np.asarray([p]) for p in position)))[0]))
    return found


def _adam(op: Operator, output: int, element: int, read: Read, facts: StepFacts) -> Formula:
    step = int(op.number("step"))
    if output == 3:
        return Point(float(step), exact=True)
    lr, beta1, beta2, eps, decay = (
        float(op.number(n)) for n in ("lr", "beta1", "beta2", "eps", "weight_decay")
    )
    rule = AdamRule(lr, beta1, beta2, eps, decay, bool(op.number("decoupled")))
    held = len(op.inputs) >= 4
    numbers = _elements(op, element, read, (0, 1, 2, 3) if held else (0, 1))
    g, p, m, v = numbers if held else (*numbers, 0.0, 0.0)
    return Point(adam(rule, step, p, g, m, v)[output], exact=True)


def _sgd(op: Operator, output: int, element: int, read: Read, facts: StepFacts) -> Formula:
    lr, momentum, dampening, decay = (
        float(op.number(n)) for n in ("lr", "momentum", "dampening", "weight_decay")
    )
    rule = SgdRule(lr, momentum, dampening, decay, bool(op.number("nesterov")))
    held = len(op.inputs) >= 3
    numbers = _elements(op, element, read, (0, 1, 2) if held else (0, 1))
    first = bool(op.number("first"))
    found = sgd(rule, numbers[1], numbers[0], None if first or not held else numbers[2])[output]
    if found is None:
        raise InvalidInput("operator sgd: has a momentum buffer without momentum")
    return Point(found, exact=True)


Own = Callable[[Operator, int, int, Read, StepFacts], Formula]
_OWN: Mapping[str, Own] = {
    ROUND: _rounded,
    ADAM: _adam,
    SGD: _sgd,
    CONSTANT: _constant,
    "aten::bernoulli_": _bernoulli,
    "aten::max_pool2d_with_indices": _max_pool,
}


def over_budget(op: Operator, facts: StepFacts) -> str | None:
    """Return in words that a rounding site has more log entries than its budget; None if it has not, or if nobody can tell.

    A buffer of which a step leaves a part as it is has as many as it likes: see ``rounded_sites.is_dense``.
    """
    kind, ordinal = int(op.number("kind")), int(op.number("ordinal"))
    grid = facts.grid(kind, ordinal)
    if grid is None or grid.residue_bits or (kind == Kind.BUFFER and may_rest(grid)):
        return None
    numel = op.outputs[0].view.numel
    entries, budget = _entries(facts, kind, ordinal, numel), entry_budget(grid, numel)
    return f"{len(entries)} log entries exceed the budget of {budget}" if len(entries) > budget else None
