"""The judge's rule on one operator: what the trainer opened against what honest arithmetic can have made.

Nothing here runs the step or needs torch. The judge reads the disputed leaf, the leaves that its inputs come from, the
chunks that the named element needs, and for a rounding site or a decision the step's log; everything is checked against
commitments that both parties stand by. An element that is a long sum is opened by partial sums, of which one is repeated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np

from tallystick.commit.encoding import HASH_BYTES, digest, parse_hex_float
from tallystick.commit.merkle import root as merkle_root
from tallystick.commit.state import CHUNK_BYTES, ChunkProof, parse_entry, verify_chunk
from tallystick.commit.tensors import OpenedChunk, TensorDigest, digest_of, verify_opened
from tallystick.errors import InvalidInput, Mismatch
from tallystick.numerics.log import (
    Frame,
    GridTable,
    Kind,
    SiteAddress,
    SiteGrid,
    SparseEntries,
    decode,
    decode_decision,
    decode_frame,
    find_grid,
)
from tallystick.numerics.policy import entry_budget
from tallystick.numerics.random import bernoulli, stream_key, words
from tallystick.numerics.reference import AdamRule, Entry, ScaledBand, SgdRule, adam, follow, sgd
from tallystick.protocol.formulas import (
    Formula,
    Indexes,
    Point,
    Read,
    Sum,
    is_right_partial,
    is_within,
)
from tallystick.protocol.operands import UnknownFormError, flat_of, position_of, stored_at
from tallystick.protocol.operator_table import find_rule
from tallystick.protocol.operators import (
    ADAM,
    BATCH,
    END,
    LOAD,
    ROUND,
    SGD,
    STORE,
    EarlierLeaf,
    OpenedLeaf,
    Operator,
    number_of,
    parse_operator,
    verify_earlier,
    verify_opened_leaf,
)
from tallystick.protocol.transcript import Specification, StepRecord

CONSTANT = "tallystick::constant"
NARROW = ("F16", "BF16")
ARRAY = {
    "F32": "<f4", "F64": "<f8", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1", "BOOL": "u1",
}  # fmt: skip
FRAME_TAG = "tallystick/log-frame/1"
STORES_A_NODE = 16  # a power of two, so that the tree over the nodes is the tree over the stores
Fault = Literal["faulty", "sound", "unknown"]


@dataclass(frozen=True)
class Accusation:
    """What an auditor says is false: one element of one output of the disputed operator, or the operator's structure.

    ``block`` names the partial sum that is false, where the element is a long sum, and the node where it is the list's end;
    -1 for what they make up.
    """

    output: int
    element: int
    block: int = -1
    structure: bool = False


@dataclass(frozen=True)
class Finding:
    """What the judge found.

    Attributes:
        fault: whether the trainer's operator is at fault.
        reason: why.
        is_shown: whether what was opened shows it to anybody. That an opening does not fit the commitments costs the trainer
            the game, and is the judge's word: whoever passes a record on could have spoilt the opening.
    """

    fault: Fault
    reason: str
    is_shown: bool = True


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
    return found


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
    if grid.parity:
        raise UnknownFormError(f"rounding site {kind}/{ordinal}: is logged by parities")
    entries = _entries(facts, kind, ordinal, numel)
    sides = _symbol(entries, element)
    y = float(read(0, flat_of(op.inputs[0].view, _at(op, element)))[0])
    drawn = None
    if grid.dithered:
        purpose = "dither" if kind == Kind.GRADIENT else "dither-buffer"
        record = facts.record
        key = stream_key(facts.specification.seed, purpose, record.step, record.rank, 0, ordinal)
        drawn = [int(words(key, element, 1)[0])]
    logged = [] if sides is None else [Entry(0, sides)]
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


# -- openings ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Opening:
    """What the trainer hands to the judge, and the judge reads.

    Attributes:
        leaf: the disputed leaf.
        sources: the leaves that its inputs come from, by leaf number.
        pieces: chunks by slot: inputs from 0 on, outputs of the operator itself at -1 - k.
        partials: of a long sum, each block's sum and magnitude.
        nodes: of the list's end, the roots over each 16 stores.
        state: chunks of the agreed state, where a load is disputed.
        entry: chunks of the state entry that a store writes: index, data, path.
        batch: parts of the step's data, where that is disputed: what ``batch_digest`` hashes.
        frame, grids: log and grids, where the operator depends on them.
    """

    leaf: OpenedLeaf
    sources: Mapping[int, EarlierLeaf] = field(default_factory=dict[int, EarlierLeaf])
    pieces: Mapping[int, tuple[OpenedChunk, ...]] = field(default_factory=dict[int, tuple[OpenedChunk, ...]])
    partials: tuple[tuple[float, float], ...] = ()
    nodes: tuple[bytes, ...] = ()
    state: tuple[tuple[ChunkProof, bytes], ...] = ()
    stored: tuple[OpenedChunk, ...] = ()

    @property
    def nbytes(self) -> int:
        """What the judge reads of it."""
        total = self.leaf.nbytes + sum(source.nbytes for source in self.sources.values())
        total += sum(piece.nbytes for pieces in self.pieces.values() for piece in pieces)
        total += 16 * len(self.partials) + HASH_BYTES * len(self.nodes)
        total += sum(piece.nbytes for piece in self.stored)
        return total + sum(len(proof.encode()) + len(data) for proof, data in self.state)


class OpenedReader:
    """Reads elements from opened chunks, and nothing else."""

    def __init__(
        self,
        op: Operator,
        chunk: int,
        pieces: Mapping[int, tuple[OpenedChunk, ...]],
        stored: Mapping[int, str],
    ) -> None:
        self._op, self._chunk, self._stored = op, chunk, stored
        self._pieces = {slot: {piece.index: piece.data for piece in held} for slot, held in pieces.items()}

    def __call__(self, slot: int, flat: Indexes) -> np.ndarray:
        """Return the elements at flat indexes.

        Raises:
            InvalidInput: a chunk was not opened.
        """
        dtype = self._stored.get(slot)
        if dtype is None or dtype not in ARRAY:
            raise InvalidInput(f"opening: slot {slot} is not there")
        width = np.dtype(ARRAY[dtype]).itemsize
        held = self._pieces.get(slot, {})
        at = np.asarray(flat, dtype=np.int64) * width
        number = at // self._chunk
        found = np.empty(at.size, dtype=ARRAY[dtype])
        for index in np.unique(number):
            if int(index) not in held:
                raise InvalidInput(f"opening: chunk {int(index)} of slot {slot} is not there")
            data = np.frombuffer(held[int(index)], dtype=ARRAY[dtype])
            here = number == index
            found[here] = data[(at[here] - int(index) * self._chunk) // width]
        return widened(found, dtype, self._op.inputs[slot].dtype if slot >= 0 else dtype)


def widened(found: np.ndarray, stored: str, wanted: str) -> np.ndarray:
    """Return elements as the operator reads them: a wider float than stored is exact; nothing else is allowed."""
    if stored == wanted:
        return found
    if (stored, wanted) == ("F32", "F64"):
        return found.astype(np.float64)
    raise InvalidInput(f"operator: reads {stored} as {wanted}")


def rule_on_operator(
    facts: StepFacts,
    base: bytes,
    chunk: int,
    *,
    agreed: bytes,
    claimed: bytes,
    agreed_state: bytes,
    claimed_state: bytes,
    accusation: Accusation,
    opening: Opening,
    own_structure: bytes | None = None,
    own_batch: Mapping[str, bytes] | None = None,
) -> Finding:
    """Return whether the trainer's operator is at fault, given what the trainer opened.

    Args:
        facts: agreed facts of the step.
        base: what the lists begin with.
        chunk: bytes in a chunk of a result's tree.
        agreed: commitment before the disputed leaf.
        claimed: the trainer's commitment after it.
        agreed_state: root of the agreed state.
        claimed_state: root of the state that the trainer claims after the step.
        accusation: what the auditor named.
        opening: what the trainer opened.
        own_structure: the leaf's structure in the judge's own list, where structure is disputed; empty if the judge's list
            ends before.
        own_batch: the job's data for the step, by place, where that is disputed.
    """
    at = opening.leaf.index
    try:
        before = verify_opened_leaf(base, opening.leaf, agreed=agreed, claimed=claimed)
    except (InvalidInput, Mismatch) as problem:
        return Finding("faulty", f"the trainer cannot open operator {at}: {problem}", is_shown=False)
    try:
        op = None if opening.leaf.leaf is None else parse_operator(opening.leaf.leaf)
    except InvalidInput as problem:
        return Finding("faulty", f"operator {at}: is malformed: {problem}")
    if accusation.structure:
        return _structural(at, op, own_structure)
    if op is None:
        return Finding(
            "unknown", f"the trainer's list ends before operator {at}, and its structure was not disputed"
        )
    where = f"operator {at}, {op}"
    if op.name == END:
        try:
            return _end(where, op, accusation, opening, before, claimed_state)
        except (InvalidInput, Mismatch) as problem:
            return _unfit(where, problem)
    if not op.outputs and op.name != STORE:
        return Finding("unknown", f"{where}: has no output")
    try:
        if op.name == BATCH:
            return _batch(where, op, chunk, accusation, opening, own_batch)
        stored = _stored_dtypes(op, opening, before)
        for slot, pieces in opening.pieces.items():
            tensor = _tensor_of(op, slot, opening)
            verify_opened(tensor, chunk, pieces)
        if op.name == LOAD:
            return _load(where, op, chunk, accusation, opening, agreed_state)
        if op.name == STORE:
            return _store(where, op, chunk, accusation, opening, stored)
        if op.name == ROUND and (over := _over_budget(op, facts)):
            return Finding("faulty", f"{where}: {over}")
        reader = OpenedReader(op, chunk, opening.pieces, stored)
        return _value(where, op, accusation, opening, reader, facts)
    except (
        UnknownFormError,
        ArithmeticError,
        LookupError,
        ValueError,
    ) as problem:  # no value, or none in the table
        return Finding("unknown", f"{where}: {problem}")
    except (InvalidInput, Mismatch) as problem:
        return _unfit(where, problem)


def _unfit(where: str, problem: Exception) -> Finding:
    return Finding("faulty", f"{where}: what the trainer opened does not fit: {problem}", is_shown=False)


def _structural(at: int, op: Operator | None, own: bytes | None) -> Finding:
    if own is None:
        return Finding("unknown", f"operator {at}: the judge has no list of its own")
    stated = b"" if op is None else op.structure
    name = "the end of the list" if op is None else str(op)
    if stated == own:
        return Finding("sound", f"operator {at}: {name} is what the job asks for there")
    wanted = str(parse_operator(_rooted(own))) if own else "the end of the list"
    return Finding(
        "faulty", f"operator {at}: the trainer has {name}, the job has {wanted}{_difference(op, own)}"
    )


def _rooted(structure: bytes) -> bytes:
    return structure.replace(b'"root":""', b'"root":"' + b"0" * 64 + b'"')


def _difference(op: Operator | None, own: bytes) -> str:
    if op is None or not own:
        return ""
    mine, theirs = parse_operator(_rooted(own)).fields(), op.fields()
    for name in ("name", "overload", "attributes", "inputs", "outputs", "phase", "micro_batch", "module"):
        if name == "outputs":
            continue
        if mine[name] != theirs[name]:
            return f", which differs in its {name}: {_short(theirs[name])} for {_short(mine[name])}"
    return ", which differs in the form of its outputs"


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) < 120 else text[:117] + "..."


def _stored_dtypes(op: Operator, opening: Opening, before: bytes) -> dict[int, str]:
    """Return how each slot's elements are stored, having checked the leaves that they come from."""
    found = {-1 - number: output.tensor.dtype for number, output in enumerate(op.outputs)}
    for slot in range(len(op.inputs)):
        if slot in opening.pieces or op.name == STORE:
            source = _source(op, slot, opening, before)
            found[slot] = source.outputs[op.inputs[slot].source[1]].tensor.dtype
    return found


def _source(op: Operator, slot: int, opening: Opening, before: bytes) -> Operator:
    number, output = op.inputs[slot].source
    earlier = opening.sources.get(number)
    if earlier is None or earlier.index != number:
        raise InvalidInput(f"opening: leaf {number}, where input {slot} comes from, is not there")
    source = verify_earlier(earlier, before=opening.leaf.index, root=before)
    if output >= len(source.outputs):
        raise InvalidInput(f"opening: leaf {number} has no output {output}")
    if op.inputs[slot].view.last >= source.outputs[output].tensor.elements:
        raise InvalidInput(f"input {slot} reads beyond the end of leaf {number}")
    return source


def _tensor_of(op: Operator, slot: int, opening: Opening) -> TensorDigest:
    if slot < 0:
        if -1 - slot >= len(op.outputs):
            raise InvalidInput(f"opening: the operator has no output {-1 - slot}")
        return op.outputs[-1 - slot].tensor
    if slot >= len(op.inputs):
        raise InvalidInput(f"opening: the operator has no input {slot}")
    number, output = op.inputs[slot].source
    return parse_operator(opening.sources[number].leaf).outputs[output].tensor


def _over_budget(op: Operator, facts: StepFacts) -> str | None:
    kind, ordinal = int(op.number("kind")), int(op.number("ordinal"))
    grid = facts.grid(kind, ordinal)
    if grid is None or grid.parity:
        return None
    numel = op.outputs[0].view.numel
    entries, budget = _entries(facts, kind, ordinal, numel), entry_budget(grid, numel)
    return f"{len(entries)} log entries exceed the budget of {budget}" if len(entries) > budget else None


def _value(
    where: str, op: Operator, accusation: Accusation, opening: Opening, read: Read, facts: StepFacts
) -> Finding:
    output, element = accusation.output, accusation.element
    if not 0 <= output < len(op.outputs):
        return Finding("sound", f"{where}: has no output {output}")
    if not 0 <= element < op.outputs[output].view.numel:
        return Finding("sound", f"{where}: output {output} has no element {element}")
    dtype = op.outputs[output].tensor.dtype
    stated = read(-1 - output, np.asarray([stored_at(op.outputs[output].view, element)]))[0].item()
    try:
        formula = formula_for(op, output, element, read, facts)
    except InvalidInput as problem:
        if isinstance(problem, UnknownFormError):
            raise
        return Finding("faulty", f"{where}: {problem}")
    if isinstance(formula, Sum):
        if formula.num_blocks > 1:
            if len(opening.partials) != formula.num_blocks:
                return Finding(
                    "faulty",
                    f"{where}: {len(opening.partials)} partial sums open a sum of {formula.num_blocks}",
                )
            if accusation.block >= 0:
                if accusation.block >= formula.num_blocks:
                    return Finding("sound", f"{where}: has no partial sum {accusation.block}")
                found = formula.block(*formula.bounds(accusation.block))
                given = opening.partials[accusation.block]
                if not is_right_partial(given, found):
                    return Finding(
                        "faulty",
                        f"{where}: partial sum {accusation.block} of element {element} is {found[0].hex()},"
                        f" the trainer says {given[0].hex()}",
                    )
            point = formula.total(opening.partials)
        else:
            point = formula.total(formula.partials())
    else:
        point = formula
    shown = f"element {element} of output {output}" if len(op.outputs) > 1 else f"element {element}"
    if is_within(stated, point, dtype):
        return Finding("sound", f"{where}: {shown} is {_text(stated)}, within what honest arithmetic gives")
    return Finding(
        "faulty", f"{where}: {shown} must be {_text(point.value)}, the trainer has {_text(stated)}"
    )


def _text(value: float | int | bool) -> str:
    return value.hex() if isinstance(value, float) else str(value)


def _load(
    where: str, op: Operator, chunk: int, accusation: Accusation, opening: Opening, root: bytes
) -> Finding:
    tensor = op.outputs[0].tensor
    width = np.dtype(ARRAY[tensor.dtype]).itemsize
    if not 0 <= accusation.element < tensor.elements:
        return Finding("sound", f"{where}: has no element {accusation.element}")
    at = accusation.element * width
    for proof, data in opening.state:
        verify_chunk(proof, data, root)
        if proof.entry.name == op.module and proof.chunk_index == at // CHUNK_BYTES:
            if (proof.entry.dtype, proof.entry.nbytes) != (tensor.dtype, tensor.nbytes):
                return Finding("faulty", f"{where}: the agreed state has another form")
            own = data[at % CHUNK_BYTES :][:width]
            piece = next((p for p in opening.pieces.get(-1, ()) if p.index == at // chunk), None)
            if piece is None:
                raise InvalidInput(f"chunk {at // chunk} is not there")
            stated = piece.data[at % chunk :][:width]
            if own == stated:
                return Finding("sound", f"{where}: element {accusation.element} is that of the agreed state")
            return Finding(
                "faulty",
                f"{where}: element {accusation.element} is {stated.hex()}, the agreed state has {own.hex()}",
            )
    raise InvalidInput(f"chunk {at // CHUNK_BYTES} of the agreed state's {op.module} is not there")


def _store(
    where: str, op: Operator, chunk: int, accusation: Accusation, opening: Opening, stored: Mapping[int, str]
) -> Finding:
    if not op.inputs:
        return Finding("unknown", f"{where}: a document is a matter of the whole step")
    entry = op.attributes.get("entry")
    if not isinstance(entry, dict):
        raise InvalidInput("the store names no entry")
    summary = parse_entry(entry, "operator")
    tensor = _tensor_of(op, 0, opening)
    if (summary.dtype, summary.nbytes) != (tensor.dtype, tensor.nbytes):
        return Finding("faulty", f"{where}: is stored as {summary.dtype} of {summary.nbytes} bytes")
    width = np.dtype(ARRAY[tensor.dtype]).itemsize
    at = accusation.element * width
    if not 0 <= at < tensor.nbytes:
        return Finding("sound", f"{where}: has no element {accusation.element}")
    verify_opened(
        TensorDigest(summary.dtype, tensor.elements, summary.tensor_root), CHUNK_BYTES, opening.stored
    )
    mine = next((p for p in opening.pieces.get(0, ()) if p.index == at // chunk), None)
    theirs = next((p for p in opening.stored if p.index == at // CHUNK_BYTES), None)
    if mine is None or theirs is None:
        raise InvalidInput(f"the chunks of element {accusation.element} are not there")
    own, written = mine.data[at % chunk :][:width], theirs.data[at % CHUNK_BYTES :][:width]
    if own == written:
        return Finding("sound", f"{where}: element {accusation.element} is what the step computed")
    return Finding(
        "faulty",
        f"{where}: element {accusation.element} is stored as {written.hex()}, the step computed {own.hex()}",
    )


def store_nodes(stores: Sequence[Operator]) -> tuple[bytes, ...]:
    """Return the roots over each ``STORES_A_NODE`` of what stores write; their tree is the state tree.

    Raises:
        InvalidInput: a leaf writes no entry.
    """
    leaves = [parse_entry(each.attributes.get("entry"), "operator").digest() for each in stores]
    return tuple(merkle_root(leaves[at : at + STORES_A_NODE]) for at in range(0, len(leaves), STORES_A_NODE))


def stores_opened(first: int, end: int, block: int) -> list[int]:
    """Return which leaves open node ``block``: those of the stores below it, the first store, and the leaf before that."""
    low = first + STORES_A_NODE * block
    below = range(low, min(low + STORES_A_NODE, end)) if block >= 0 else range(0)
    return sorted({first - 1, first, *below} & set(range(end)))


def _end(
    where: str, op: Operator, accusation: Accusation, opening: Opening, before: bytes, claimed: bytes
) -> Finding:
    """The list must end in the state that the trainer claims, and its stores must make it up."""
    at, block = opening.leaf.index, accusation.block
    stated = op.attributes.get("state_root")
    if stated != claimed.hex():
        return Finding(
            "faulty", f"{where}: the list ends in state {_short(stated)}, the trainer claims {claimed.hex()}"
        )
    held = {
        number: verify_earlier(earlier, before=at, root=before) for number, earlier in opening.sources.items()
    }
    first = next((number for number in sorted(held) if held[number].name == STORE), at)
    if first > 0 and (first - 1 not in held or held[first - 1].name == STORE):
        raise InvalidInput("where the stores begin is not shown")
    if len(opening.nodes) != -(-(at - first) // STORES_A_NODE):
        raise InvalidInput(f"{len(opening.nodes)} nodes open {at - first} stores")
    made = merkle_root(opening.nodes)
    if made != claimed:
        return Finding(
            "faulty", f"{where}: the nodes make up state {made.hex()}, the trainer claims {claimed.hex()}"
        )
    if block < 0:
        return Finding("sound", f"{where}: the nodes make up the claimed state")
    if block >= len(opening.nodes):
        return Finding("sound", f"{where}: has no node {block}")
    low = first + STORES_A_NODE * block
    numbers = range(low, min(low + STORES_A_NODE, at))
    if any(number not in held for number in numbers):
        raise InvalidInput(f"the stores below node {block} are not all there")
    if any(held[number].name != STORE for number in numbers):
        raise InvalidInput("something else stands between the stores and the end")
    own = store_nodes([held[number] for number in numbers])[0]
    if own == opening.nodes[block]:
        return Finding("sound", f"{where}: node {block} is that of its stores")
    return Finding(
        "faulty",
        f"{where}: the stores make up node {block} as {own.hex()}, the trainer says {opening.nodes[block].hex()}",
    )


def _batch(
    where: str,
    op: Operator,
    chunk: int,
    accusation: Accusation,
    opening: Opening,
    own: Mapping[str, bytes] | None,
) -> Finding:
    if own is None:
        return Finding("unknown", f"{where}: the judge does not have the step's data")
    data = own.get(op.module)
    if data is None:
        return Finding("faulty", f"{where}: the job's data has no such tensor")
    tensor = op.outputs[0].tensor
    if len(data) != tensor.nbytes:
        return Finding(
            "faulty", f"{where}: the committed data has {len(data)} bytes, the trainer used {tensor.nbytes}"
        )
    if digest_of(tensor.dtype, tensor.elements, memoryview(data), chunk).root == tensor.root:
        return Finding("sound", f"{where}: is the committed data")
    return Finding("faulty", f"{where}: is not the committed data")


__all__ = [
    "Accusation",
    "Finding",
    "OpenedReader",
    "Opening",
    "StepFacts",
    "formula_for",
    "needs_log",
    "number_of",
    "parse_hex_float",
    "rule_on_operator",
    "widened",
]
