"""Level three of a dispute on a real step: the trainer lists its operators, an auditor looks for a false one, a judge rules.

The trainer repeats the step from the agreed state, keeps every result and opens what it is asked for. The auditor repeats it
too and compares result by result; where its own differs by more than noise can explain, it evaluates that element from the
trainer's own inputs with the operator's error bound, and objects to the first operator that fails. So it never objects to
an honest operator, however different the two machines are. What neither shows goes to the judge of the whole step.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from tallystick.commit.encoding import parse_canonical_json
from tallystick.commit.merkle import root as merkle_root
from tallystick.commit.state import CHUNK_BYTES, DTYPE_BYTES, Entry, HeldState, StateSummary, parse_entry
from tallystick.commit.tensors import OpenedChunk, TensorDigest, chunk_size, digest_of, open_chunks
from tallystick.dispute.bisection import Outcome, Silence
from tallystick.dispute.bounds.formulas import Indexes, Point, Sum, is_within
from tallystick.dispute.bounds.operands import UnknownFormError, stored_at
from tallystick.dispute.bounds.steps import StepFacts, formula_for, needs_log
from tallystick.dispute.exchange import (
    LONGEST_REASON,
    MOST_PARTS,
    Answer,
    ForfeitError,
    Part,
    Question,
    Table,
    ask_one,
)
from tallystick.dispute.moves import bytes_of, items_in, move_fields, parse_move, whole_in
from tallystick.dispute.openings import Opening, store_nodes, stores_opened, widened
from tallystick.dispute.operator_game import (
    Committed,
    Declined,
    Handed,
    Move,
    OperatorGame,
    open_operator_game,
    play_move,
)
from tallystick.dispute.operator_list import (
    ADAM,
    BATCH,
    END,
    LOAD,
    ROUND,
    SGD,
    STORE,
    EarlierLeaf,
    Objection,
    OpenedLeaf,
    Operator,
    OperatorList,
    Output,
    base_of,
    hash_of,
    parse_operator,
)
from tallystick.dispute.record import DISPUTE_LIMIT, LONGEST_SIGNATURE, handed_digest, parse_opening
from tallystick.dispute.rulings import Accusation, Finding, rule_on_operator
from tallystick.dispute.signed_moves import History, Terms, is_move_signed
from tallystick.dispute.terms import PARTIES, Party, Ruling
from tallystick.errors import InvalidInput, Mismatch
from tallystick.execution.operator_trace import KINDS, StepTrace, Value, array_of, trace_step, whole
from tallystick.execution.snapshot import load_state
from tallystick.execution.step import map_tensors
from tallystick.numerics.kernels import block_differences, block_square_sums
from tallystick.roles.costs import Ledger
from tallystick.roles.replay import Replay, adopting
from tallystick.run.documents import StepRecord
from tallystick.run.proofs import StepProof
from tallystick.signing.keys import PublicKey

State = Mapping[str, Entry]
NOISE = {"F32": 2.0**-13, "F64": 2.0**-40}  # of a result's rms; what differs by more is looked at first
PORTABLE = frozenset({ROUND, ADAM, SGD, LOAD, BATCH, "aten::bernoulli_"})
LOOKED_AT = 64
SHOWN_LIMIT = 1 << 26  # bytes of results that an auditor asks for at a time
SHOWN_FIRST = 1 << 20  # and the first time; then four times as many each time
BLOCK = 1 << 14  # elements compared at a time
THREADS = os.cpu_count() or 1


@dataclass(frozen=True)
class Cost:
    """What level three took.

    Attributes:
        operators: leaves of the trainer's list.
        trainer_bytes, auditor_bytes: what each sent in the game.
        opened_bytes: results that the trainer opened to the auditor while it looked for the false one.
        judge_bytes: what the judge read.
        seconds: by party: trainer (repeating, hashing), auditor (repeating, comparing), judge.
    """

    operators: int
    trainer_bytes: int
    auditor_bytes: int
    opened_bytes: int
    judge_bytes: int
    seconds: Mapping[str, float]


@dataclass(frozen=True)
class OperatorResult:
    """How level three ended.

    Attributes:
        loser: ``trainer`` or ``auditor``; None where the whole step has to be judged.
        reason: in words; of a fallback, why.
        rounds: of bisection.
        index, operator: the disputed leaf, as number and as module, phase and name; None if there is none.
        accusation: the element or structure that the auditor named.
        cost: what it took.
        evidence: what a record needs.
        step_seconds: time of one plain step on this machine.
        signed: keys of the parties that signed their moves.
    """

    loser: Party | None
    reason: str
    rounds: int
    index: int | None
    operator: Operator | None
    accusation: Accusation | None
    cost: Cost
    evidence: Evidence | None = None
    step_seconds: float | None = None
    signed: Mapping[Party, PublicKey] = field(default_factory=dict[Party, PublicKey])

    @property
    def share_of_step(self) -> float | None:
        """The judge's time over that of one step, both on this machine; None if either was not measured."""
        judged = self.cost.seconds.get("judge")
        return None if judged is None or not self.step_seconds else judged / self.step_seconds

    def fields(self) -> dict[str, object]:
        """Return what a verdict says of it."""
        op, accusation, cost = self.operator, self.accusation, self.cost
        named = None if op is None else {"module": op.module, "name": op.name, "phase": op.phase}
        element = (
            None if accusation is None or accusation.structure else [accusation.output, accusation.element]
        )
        return {
            "element": element,
            "fallback": None if self.loser is not None else self.reason,
            "index": self.index,
            "judge_bytes": cost.judge_bytes,
            "opened_bytes": cost.opened_bytes,
            "operator": named,
            "operators": cost.operators,
            "signed": {p: self.signed[p].key_id if p in self.signed else None for p in PARTIES},
            "sent": {"auditor": cost.auditor_bytes, "trainer": cost.trainer_bytes},
            "structure": accusation is not None and accusation.structure,
        }


@dataclass(frozen=True)
class Signing:
    """Whose signatures over operators count.

    Attributes:
        known: keys of the parties that sign; moves of one that is absent are unsigned.
        asked: keys that the judge knows; a party's move without a signature of its key here counts as not made.
    """

    known: Mapping[Party, PublicKey] = field(default_factory=dict[Party, PublicKey])
    asked: Mapping[Party, PublicKey] = field(default_factory=dict[Party, PublicKey])


@dataclass(frozen=True)
class Evidence:
    """What a record of the dispute needs besides the run's own documents."""

    facts: StepFacts
    base: bytes
    chunk: int
    game: OperatorGame
    accusation: Accusation
    opening: Opening
    agreed_state: bytes
    finding: Finding
    keys: Mapping[Party, PublicKey]
    signatures: tuple[bytes | None, ...]


Source = tuple[int, int]


def reader_of(trace: StepTrace, at: int) -> Callable[[int, Indexes], np.ndarray]:
    """Return a reader of the inputs and outputs of operator ``at`` of a list."""
    op = trace.operators[at]

    def reading(slot: int, flat: Indexes) -> np.ndarray:
        if slot < 0:
            return trace.array((at, -1 - slot))[flat]
        source = op.inputs[slot].source
        stored = trace.operators[source[0]].outputs[source[1]].tensor.dtype
        return widened(trace.array(source)[flat], stored, op.inputs[slot].dtype)

    return reading


class TrainerSide:
    """The trainer at level three: its list, and everything it opens."""

    def __init__(
        self, trace: StepTrace, base: bytes, agreed: HeldState, claimed: HeldState | None = None
    ) -> None:
        self.trace, self.base, self.agreed = trace, base, agreed
        self.claimed: State = {} if claimed is None else claimed.entries
        self.leaves = OperatorList(base, [operator.encode() for operator in trace.operators])

    @property
    def committed(self) -> Committed:
        """The commitment to the whole list."""
        return Committed(len(self.leaves.leaves), merkle_root(self.leaves.hashes))

    def read(self, at: int) -> Callable[[int, Indexes], np.ndarray]:
        """Return a reader of the inputs and outputs of operator ``at``."""
        return reader_of(self.trace, at)

    def show(self, source: Source) -> memoryview:
        """Return the bytes of a result, or of the state entry that leaf ``source`` stores."""
        if self.trace.operators[source[0]].name == STORE:
            return self.stored_data(source[0])
        data = np.ascontiguousarray(self.trace.array(source))
        return data.data.cast("B") if data.size else memoryview(b"")

    def partials(self, accusation: Accusation, at: int, facts: StepFacts) -> tuple[tuple[float, float], ...]:
        """Return the partial sums of the accused element, none if it is no long sum."""
        found = self._formula(accusation, at, facts, self.read(at))
        return tuple(found.partials()) if isinstance(found, Sum) and found.num_blocks > 1 else ()

    def _formula(
        self, accusation: Accusation, at: int, facts: StepFacts, read: Callable[[int, Indexes], np.ndarray]
    ) -> Point | Sum | None:
        if accusation.structure or at >= len(self.trace.operators):
            return None
        op = self.trace.operators[at]
        if not op.outputs or op.name in (LOAD, BATCH, STORE, END):
            return None
        try:
            return formula_for(op, accusation.output, accusation.element, read, facts)
        except (InvalidInput, ArithmeticError, LookupError, ValueError):
            return None

    def open(self, accusation: Accusation, at: int, facts: StepFacts) -> Opening:
        """Return what the judge needs for the accused element."""
        leaf = self.leaves.witness_at(at)
        if accusation.structure or at >= len(self.trace.operators):
            return Opening(leaf)
        op = self.trace.operators[at]
        wanted: dict[int, set[int]] = {}
        read = self.read(at)

        def noting(slot: int, flat: Indexes) -> np.ndarray:
            stored = self._stored(op, slot)
            width = np.dtype(KINDS[stored]).itemsize
            numbers = np.unique(np.asarray(flat, dtype=np.int64) * width // self.trace.chunk)
            wanted.setdefault(slot, set()).update(int(number) for number in numbers)
            return read(slot, flat)

        partials: tuple[tuple[float, float], ...] = ()
        state: tuple[Any, ...] = ()
        stored: tuple[OpenedChunk, ...] = ()
        if op.name == END:
            return self._open_end(leaf, accusation, at)
        if op.name == LOAD:
            noting(-1, np.asarray([accusation.element]))
            number = accusation.element * np.dtype(KINDS[op.outputs[0].tensor.dtype]).itemsize // CHUNK_BYTES
            proof = self.agreed.open(op.module, number)
            held = memoryview(self.agreed.entries[op.module].data).cast("B")
            state = ((proof, bytes(held[number * CHUNK_BYTES :][:CHUNK_BYTES])),)
        elif op.name == STORE and op.inputs:
            noting(0, np.asarray([accusation.element]))
            number = accusation.element * np.dtype(KINDS[self._stored(op, 0)]).itemsize // CHUNK_BYTES
            stored = open_chunks(self.stored_data(at), CHUNK_BYTES, [number])
        elif op.outputs and op.name != BATCH:
            position = stored_at(op.outputs[accusation.output].view, accusation.element)
            noting(-1 - accusation.output, np.asarray([position]))
            found = self._formula(accusation, at, facts, noting)
            if isinstance(found, Sum):
                if found.num_blocks > 1:
                    partials = self.partials(accusation, at, facts)
                    if accusation.block >= 0:
                        found.block(*found.bounds(accusation.block))
                else:
                    found.partials()
        pieces: dict[int, tuple[OpenedChunk, ...]] = {}
        for slot, numbers in sorted(wanted.items()):
            source = (at, -1 - slot) if slot < 0 else op.inputs[slot].source
            data = self.trace.array(source)
            view = np.ascontiguousarray(data).data if data.size else memoryview(b"")
            pieces[slot] = open_chunks(view, self.trace.chunk, numbers, self.trace.hashes(source))
        sources = {op.inputs[slot].source[0] for slot in wanted if slot >= 0}
        earlier = self._earlier(sources, at)
        return Opening(leaf, earlier, pieces, partials, state=state, stored=stored)

    def stored_data(self, at: int) -> memoryview:
        """Return the bytes that the state entry of a store has."""
        op = self.trace.operators[at]
        held = self.claimed.get(op.module)
        if held is not None:
            return memoryview(held.data).cast("B")
        data = self.trace.array(op.inputs[0].source)
        return np.ascontiguousarray(data).data.cast("B")

    def _stored(self, op: Operator, slot: int) -> str:
        if slot < 0:
            return op.outputs[-1 - slot].tensor.dtype
        number, output = op.inputs[slot].source
        return self.trace.operators[number].outputs[output].tensor.dtype

    def _earlier(self, numbers: set[int], at: int) -> dict[int, EarlierLeaf]:
        return {number: self.leaves.open_earlier(number, at) for number in sorted(numbers)}

    def nodes(self, at: int) -> tuple[bytes, ...]:
        """Return what opens leaf ``at`` if it is the list's end: the nodes over its stores; else nothing."""
        return nodes_of(self.trace.operators, at)

    def _open_end(self, leaf: OpenedLeaf, accusation: Accusation, at: int) -> Opening:
        wanted = stores_opened(_first_store(self.trace.operators, at), at, accusation.block)
        return Opening(leaf, self._earlier(set(wanted), at), nodes=self.nodes(at))


def nodes_of(operators: Sequence[Operator], at: int) -> tuple[bytes, ...]:
    """Return the nodes over the stores before leaf ``at`` if it is the end of a list, else nothing."""
    if at >= len(operators) or operators[at].name != END:
        return ()
    return store_nodes(operators[_first_store(operators, at) : at])


def _first_store(operators: Sequence[Operator], at: int) -> int:
    first = at
    while first and operators[first - 1].name == STORE:
        first -= 1
    return first


def list_base(agreed: HeldState, facts: StepFacts) -> tuple[bytes, int]:
    """Return what both lists of a step begin with, and the bytes in a chunk of its results' trees."""
    chunk = chunk_size(agreed.nbytes)
    specification, record = facts.specification.leaf(), facts.record.leaf()
    return base_of(agreed=agreed.root, specification=specification, record=record, chunk=chunk), chunk


def defend(
    replay: Replay,
    agreed: HeldState,
    frame: bytes,
    record: StepRecord,
    *,
    base: bytes,
    chunk: int,
    claimed_root: bytes,
    claimed: HeldState | None,
    made: StepTrace | None = None,
) -> TrainerSide:
    """Return the trainer's side: the step repeated as its own program does it, ending in the state it claims.

    ``made`` is its list, if the trainer made one while it repeated the segment.
    Where the claimed state can be opened and differs from what was computed, the results say what was claimed.

    Raises:
        InvalidInput, Nondeterminism: the trainer cannot repeat its own step.
    """
    trace = made
    if trace is None:
        session = replay.session
        load_state(session, agreed.entries)
        tape = session.follow_tape(frame)
        with adopting(session, record):
            trace = trace_step(session, replay.job, agreed, tape, chunk=chunk, keep=True)
    if trace.incomplete is None:
        _claim(trace, claimed_root, claimed)
    return TrainerSide(trace, base, agreed, claimed)


def _claim(trace: StepTrace, root: bytes, claimed: HeldState | None) -> None:
    """Make the list end in the claimed state."""
    summary = {} if claimed is None else {entry.name: entry for entry in claimed.summary.entries}
    for at, op in enumerate(trace.operators):
        if op.name == STORE and op.module in summary:
            entry = summary[op.module]
            stated = op.attributes["entry"]
            if stated == entry.fields():
                continue
            trace.operators[at] = replace(op, attributes={"entry": entry.fields()})
            if op.inputs and claimed is not None:
                _override(trace, op.inputs[0].source, claimed.entries[op.module])
        elif op.name == END:
            trace.operators[at] = replace(op, attributes={"state_root": root.hex()})


def _override(trace: StepTrace, source: tuple[int, int], entry: Entry) -> None:
    """Make a result say what the claimed entry says, unless it is the agreed state's own."""
    op = trace.operators[source[0]]
    output = op.outputs[source[1]]
    if op.name in (LOAD, BATCH) or (entry.dtype, memoryview(entry.data).nbytes) != (
        output.tensor.dtype,
        output.tensor.nbytes,
    ):
        return
    data = np.frombuffer(bytes(entry.data), dtype=KINDS[entry.dtype])
    trace.values[source].data = data
    trace.values[source].hashes = None
    digested = digest_of(entry.dtype, data.size, data.data if data.size else memoryview(b""), trace.chunk)
    outputs = list(op.outputs)
    outputs[source[1]] = Output(digested, output.view)
    trace.operators[source[0]] = replace(op, outputs=tuple(outputs))


# -- the auditor ---------------------------------------------------------------------------------


class _StoppedError(Exception):
    """What was looked for in a step is found."""


@dataclass(frozen=True)
class Wanted:
    """What an auditor asks the trainer to show: results by (leaf, output), and what a store writes at (leaf, 0)."""

    sources: tuple[Source, ...]


class Examination:
    """An honest auditor who has repeated the step looks for a false operator in the trainer's list.

    Where the list states the root of a result of its own, the auditor has that result; the others it asks for, in the
    list's order, few at first, as the first false operator ends it, and at most as many bytes at a time as ``most``.

    Attributes:
        own, theirs: the auditor's step with its results and roots; the trainer's operators.
        structure: first leaf whose structure is not its own.
        suspects: (leaf, output, element, by how much) where results differ.
        opened_bytes: of what it was shown.
        unknown: why an operator could not be evaluated, or None.
    """

    def __init__(
        self, own: StepTrace, theirs: Sequence[Operator], agreed: HeldState, most: int = SHOWN_LIMIT
    ) -> None:
        self.own, self.theirs, self.agreed, self.most = own, list(theirs), agreed, most
        self._next_most = min(SHOWN_FIRST, most)
        pairs = zip(own.operators, self.theirs, strict=False)
        self.structure = next((at for at, (a, b) in enumerate(pairs) if not a.has_structure_of(b)), None)
        if self.structure is None and len(own.operators) != len(self.theirs):
            self.structure = min(len(own.operators), len(self.theirs))
        self.suspects: list[tuple[int, int, int, float]] = []
        self._new: list[tuple[int, int, int, float]] = []
        self.opened_bytes = 0
        self.unknown: str | None = None
        self._checked = 0
        self._stored: dict[int, memoryview] = {}
        self._asked: list[Source] = []
        self.seen = StepTrace(self.theirs, {}, own.chunk, None)
        self._left: list[Source] = []
        for at in range(len(own.operators) if self.structure is None else self.structure):
            for number, (mine, stated) in enumerate(
                zip(own.operators[at].outputs, self.theirs[at].outputs, strict=True)
            ):
                if mine.tensor == stated.tensor:
                    self.seen.values[(at, number)] = own.values[(at, number)]
                else:
                    self._left.append((at, number))

    def show(self, shown: Sequence[memoryview | bytes]) -> None:
        """Take in what was asked for, in that order, each of the length that ``nbytes_of`` gives."""
        for source, data in zip(self._asked, shown, strict=True):
            self.opened_bytes += memoryview(data).nbytes
            op = self.theirs[source[0]]
            if op.name == STORE:
                self._stored[source[0]] = memoryview(data)
                continue
            tensor = op.outputs[source[1]].tensor
            array = np.frombuffer(data, dtype=KINDS[tensor.dtype])
            self.seen.values[source] = Value(source, tensor.dtype, tensor.elements, array)
            self._compare(source[0], source[1], op, self._own(source), array)
        self._asked = []

    def next(self, facts: StepFacts) -> Wanted | Objection | None:
        """Return what has to be shown next, or the objection to the first operator that is false; None if there is none."""
        if self._asked:
            return Wanted(tuple(self._asked))
        if (
            found := self._first_false(sorted(each for each in self._new if each[3] > 1.0), facts)
        ) is not None:
            return found
        self._new = []
        if self._left:
            return self._want(self._left)
        quiet = sorted((each for each in self.suspects if each[3] <= 1.0), key=lambda s: -s[3])[:LOOKED_AT]
        if (found := self._first_false(sorted(quiet), facts)) is not None:
            return found
        if self.structure is not None:
            return Objection(self.structure, structure=True)
        return self._at_the_end()

    def _want(self, left: list[Source]) -> Wanted:
        total = 0
        while left and (not self._asked or total + nbytes_of(self.theirs, left[0]) <= self._next_most):
            total += nbytes_of(self.theirs, left[0])
            self._asked.append(left.pop(0))
        self._next_most = min(4 * self._next_most, self.most)
        return Wanted(tuple(self._asked))

    def _own(self, source: Source) -> np.ndarray:
        op = self.own.operators[source[0]]
        if op.name == LOAD:
            return np.frombuffer(self.agreed.entries[op.module].data, dtype=KINDS[op.outputs[0].tensor.dtype])
        return self.own.array(source)

    def _first_false(
        self, suspects: Sequence[tuple[int, int, int, float]], facts: StepFacts
    ) -> Objection | None:
        for at, number, element, _ in suspects:
            self._checked += 1
            if self._checked > 8 * LOOKED_AT:
                break
            if self._is_false(at, number, element, facts):
                return Objection(at, number, element)
        return None

    def _compare(self, at: int, number: int, op: Operator, mine: np.ndarray, other: np.ndarray) -> None:
        if not mine.size:
            return
        dtype = op.outputs[number].tensor.dtype
        if op.name in PORTABLE or dtype not in NOISE or mine.dtype != other.dtype:
            if (stored := _first_apart(mine, other)) is not None:
                self._suspect(at, number, op, stored, math.inf)
            return
        where, largest = _largest_difference(mine, other)
        if not math.isfinite(largest):
            same = (mine == other) | (np.isnan(mine) & np.isnan(other))
            if bool(same.all()):
                return
            where = int(np.flatnonzero(~same)[0])
        if largest == 0.0:
            return
        total = np.zeros(1)
        block_square_sums(mine, mine.size, total, THREADS)
        rms = math.sqrt(float(total[0]) / mine.size)
        measure = largest / rms if math.isfinite(rms) and rms > 0.0 else math.inf
        self._suspect(at, number, op, where, measure / NOISE[dtype])

    def _suspect(self, at: int, number: int, op: Operator, stored: int, measure: float) -> None:
        element = _logical(op.outputs[number], stored)
        if element is not None:
            self.suspects.append((at, number, element, measure))
            self._new.append(self.suspects[-1])

    def _is_false(self, at: int, number: int, element: int, facts: StepFacts) -> bool:
        op = self.theirs[at]
        if op.name in (LOAD, BATCH):
            return True  # the state is agreed upon, and the data is the job's
        read = reader_of(self.seen, at)
        stated = read(-1 - number, np.asarray([stored_at(op.outputs[number].view, element)]))[0].item()
        try:
            formula = formula_for(op, number, element, read, facts)
        except (UnknownFormError, ArithmeticError, LookupError, ValueError) as problem:
            self.unknown = self.unknown or str(problem)
            return False
        except InvalidInput:
            return True
        point = formula.total(formula.partials()) if isinstance(formula, Sum) else formula
        return not is_within(stated, point, op.outputs[number].tensor.dtype)

    def _at_the_end(self) -> Wanted | Objection | None:
        """Compare what the trainer stores with what its own operators gave, and with its claim."""
        for at, op in enumerate(self.theirs):
            if op.name == STORE and op.attributes != self.own.operators[at].attributes and op.inputs:
                data = np.ascontiguousarray(self.seen.array(op.inputs[0].source))
                entry = parse_entry(op.attributes["entry"], "operator")
                if entry.nbytes != data.nbytes:
                    return Objection(at)
                bits = f"u{data.dtype.itemsize}"
                if at not in self._stored:
                    made = digest_of(
                        entry.dtype, data.size, data.data if data.size else memoryview(b""), CHUNK_BYTES
                    )
                    if made.root == entry.tensor_root:
                        continue
                    return self._want([(at, 0)])
                stored = np.frombuffer(self._stored[at], dtype=data.dtype)
                apart = np.flatnonzero(data.view(bits) != stored.view(bits))
                if apart.size:
                    return Objection(at, 0, int(apart[0]))
            if op.name == END:
                stores = [each for each in self.theirs[:at] if each.name == STORE]
                if end_root(stores) != op.attributes["state_root"]:
                    return Objection(at)
        return None


def nbytes_of(operators: Sequence[Operator], source: Source) -> int:
    """Return how long a result is, or what a store writes.

    Raises:
        InvalidInput: the list has no such result.
    """
    at, number = source
    if not 0 <= at < len(operators):
        raise InvalidInput(f"operator {at}: the list has {len(operators)}")
    op = operators[at]
    if op.name == STORE:
        return parse_entry(op.attributes.get("entry"), "operator").nbytes
    if not 0 <= number < len(op.outputs):
        raise InvalidInput(f"operator {at}: has no output {number}")
    return op.outputs[number].tensor.nbytes


def verify_shown(operators: Sequence[Operator], source: Source, data: memoryview, chunk: int) -> None:
    """Return if ``data`` is the result that the list commits to at ``source``, or what a store writes there.

    Raises:
        InvalidInput, Mismatch: it is not.
    """
    if memoryview(data).nbytes != (wanted := nbytes_of(operators, source)):
        raise InvalidInput(
            f"operator {source[0]}: {wanted} bytes were asked for, {memoryview(data).nbytes} shown"
        )
    op = operators[source[0]]
    if op.name == STORE:
        entry = parse_entry(op.attributes.get("entry"), "operator")
        stated = TensorDigest(entry.dtype, entry.nbytes // DTYPE_BYTES[entry.dtype], entry.tensor_root)
        chunk = CHUNK_BYTES
    else:
        stated = op.outputs[source[1]].tensor
    if digest_of(stated.dtype, stated.elements, memoryview(data), chunk).root != stated.root:
        raise Mismatch(f"operator {source[0]}: what was shown is not what the list commits to")


def _first_apart(mine: np.ndarray, other: np.ndarray) -> int | None:
    """Return the first element whose bits differ, None if all are equal."""
    bits = f"u{mine.dtype.itemsize}"
    a, b = mine.view(bits), other.view(bits)
    for at in range(0, a.size, BLOCK):
        here = a[at : at + BLOCK] != b[at : at + BLOCK]
        if here.any():
            return at + int(here.argmax())
    return None


def _largest_difference(mine: np.ndarray, other: np.ndarray) -> tuple[int, float]:
    """Return where two tensors of one float type differ most, and by how much; infinity where that is not a number."""
    whole_blocks = mine.size // BLOCK
    blocks, sums = np.zeros(whole_blocks + 1), np.zeros(whole_blocks + 1)
    if whole_blocks:
        end = whole_blocks * BLOCK
        block_differences(mine[:end], other[:end], BLOCK, blocks[:whole_blocks], sums[:whole_blocks], THREADS)
    if rest := mine.size - whole_blocks * BLOCK:
        block_differences(mine[-rest:], other[-rest:], rest, blocks[whole_blocks:], sums[whole_blocks:])
    worst = int(blocks.argmax())
    largest = float(blocks[worst])
    if largest == 0.0 or not math.isfinite(largest):
        return 0, largest
    here = slice(worst * BLOCK, (worst + 1) * BLOCK)
    return worst * BLOCK + int(np.abs(mine[here] - other[here]).argmax()), largest


def end_root(stores: Sequence[Operator]) -> str:
    """Return the state root over what stores write, hexadecimal."""
    return StateSummary(tuple(parse_entry(op.attributes["entry"], "operator") for op in stores)).root().hex()


def _logical(output: Output, stored: int) -> int | None:
    """Return the row-order position of the element stored at a flat index, None if the view does not show it."""
    view = output.view
    at = stored - view.offset
    position = [0] * len(view.shape)
    for axis in sorted(range(len(view.shape)), key=lambda axis: -view.stride[axis]):
        if view.shape[axis] > 1 and view.stride[axis]:
            position[axis], at = divmod(at, view.stride[axis])
    if at or any(not 0 <= p < n for p, n in zip(position, view.shape, strict=True)):
        return None
    found = 0
    for p, n in zip(position, view.shape, strict=True):
        found = found * n + p
    return found


def own_step(replay: Replay, agreed: HeldState, frame: bytes, record: StepRecord, *, chunk: int) -> StepTrace:
    """Return the step with its list, results and their roots, repeated from the agreed state under the trainer's log.

    Raises:
        InvalidInput, Nondeterminism: this party cannot repeat the step.
    """
    session = replay.session
    load_state(session, agreed.entries)
    tape = session.follow_tape(frame)
    with adopting(session, record):
        return trace_step(session, replay.job, agreed, tape, chunk=chunk, keep=True)


def find_structure(replay: Replay, agreed: HeldState, record: Any, frame: bytes, at: int) -> bytes:
    """Return the structure of leaf ``at`` of the list that ``replay`` makes of a step; empty if it ends before."""
    found: list[bytes] = []

    def watch(number: int, op: Operator, results: Sequence[Tensor]) -> None:
        if number == at:
            found.append(op.structure)
            raise _StoppedError

    session = replay.session
    load_state(session, agreed.entries)
    try:
        with adopting(session, record):
            tape = session.follow_tape(frame)
            trace_step(session, replay.job, agreed, tape, chunk=CHUNK_BYTES, keep=False, watch=watch)
    except _StoppedError:
        pass
    return found[0] if found else b""


# -- the referee ---------------------------------------------------------------------------------

LIST_LIMIT = 1 << 28  # bytes of a list
OPENING_LIMIT = DISPUTE_LIMIT // 2


@dataclass
class OperatorDispute:
    """Level three as the referee leads it: it asks both parties, checks what they say, and rules.

    Attributes:
        table: where questions are asked.
        step: the disputed one.
        agreed: state before it: its summary, and the grids.
        agreed_whole: asks for all of it, where structure is disputed.
        facts: agreed facts of the step.
        step_proof: the trainer's record of the step under its run's root, for the auditor.
        terms: which dispute it is.
        replay: the job, for where structure or data are disputed.
        signing: keys whose signatures are asked for, and those that sign at all.
        confirms: says, for the whole state before the step and a leaf's place and structure, in which arithmetics the job's
            own list has another leaf there than the judge's; None if in none.
    """

    table: Table
    step: int
    agreed: HeldState
    agreed_whole: Callable[[], HeldState | None]
    facts: StepFacts
    step_proof: StepProof
    terms: Terms
    chunk: int
    replay: Replay
    signing: Signing
    ledger: Ledger = field(default_factory=Ledger)
    confirms: Callable[[HeldState, int, bytes], str | None] = lambda agreed, at, structure: None

    def __post_init__(self) -> None:
        self.sent: dict[Party, int] = dict.fromkeys(PARTIES, 0)
        self.opened = self.judged = self.count = 0
        self.signatures: list[bytes | None] = []
        self.said = History(self.terms)
        self.operators: list[Operator] = []
        self.game = open_operator_game(self.terms.base)

    def play(self) -> OperatorResult:
        """Play level three and return how it ended.

        Raises:
            ForfeitError: a party did not answer in time.
        """
        try:
            return replace(self._play(), signed=dict(self.signing.known))
        except _UnsignedError as unsigned:
            # At the judge's table alone: files without a signature are not taken.
            return OperatorResult(
                unsigned.party, str(unsigned), self.game.rounds, None, None, None, self.cost(), signed=dict(self.signing.known)
            )  # fmt: skip

    def _play(self) -> OperatorResult:
        listed = self._ask("trainer", "list", self._listed, most=LIST_LIMIT)
        if isinstance(listed, str):
            return _fallback(listed, self.cost())
        blob, said = listed
        self._moved("trainer", said)
        looked = self._ask("auditor", "look", self._looked, parts=(self.facts.frame, blob), sources=[])
        while isinstance(looked, list):
            wanted, sources = looked, [list(source) for source in looked]
            most = sum(nbytes_of(self.operators, source) for source in wanted)
            shown = self._ask("trainer", "show", partial(self._shown, wanted), most=most, sources=sources)
            self.opened += most
            looked = self._ask("auditor", "look", self._looked, parts=shown, sources=sources)
        if isinstance(looked, str):
            return _fallback(looked, self.cost())
        said, why = looked
        self._moved("auditor", said)
        if self.game.stage == "step":
            return replace(_fallback(why, self.cost()), rounds=self.game.rounds)
        while self.game.awaited:
            self._round(self.game.awaited[0])
        if self.game.outcome is not None:
            return self._broken(self.game.outcome)
        return self._ruled()

    # -- asking --

    def body(self, party: Party, **more: object) -> dict[str, object]:
        """Return what every question of level three says; to the auditor also the trainer's record of the step."""
        if party == "auditor":
            more["step_proof"] = self.step_proof.encode().decode("ascii")
        moves = [move_fields(move) for move in self.game.log if not isinstance(move, (Silence, Ruling))]
        claims = {party: claim.hex() for party, claim in self.terms.claims.items()}
        return {"claims": claims, "moves": moves, "step": self.step, **more}

    def _ask(
        self, party: Party, kind: str, read: Callable[[Answer], Read], *,
        most: int = 0, parts: Sequence[Part] = (), **more: object,
    ) -> Read:  # fmt: skip
        question = Question(party, kind, self.body(party, **more), tuple(parts), most)

        def reading(answer: Answer) -> Read:
            found = read(answer)
            self.sent[party] += answer.nbytes if kind != "show" else 0
            return found

        return ask_one(self.table, question, reading)

    def _listed(self, answer: Answer) -> str | tuple[bytes, SaidMove]:
        if answer.cannot is not None:
            return answer.cannot
        (blob,) = answer.expect_parts(1)
        leaves = bytes(blob).split(b"\n") if blob else []
        said = self._said(answer, "trainer")
        if not isinstance(said.move, Committed):
            raise InvalidInput("answer: the trainer must commit to its list")
        if (said.move.count, said.move.root) != (
            len(leaves),
            merkle_root([hash_of(leaf) for leaf in leaves]),
        ):
            raise Mismatch("answer: the list is not the one that the move commits to")
        self.operators = [parse_operator(leaf) for leaf in leaves]
        self.count = len(leaves)
        return bytes(blob), said

    def _looked(self, answer: Answer) -> str | list[Source] | tuple[SaidMove, str]:
        answer.expect_parts(0)
        if answer.cannot is not None:
            return f"the auditor cannot repeat the step: {answer.cannot}"
        if "wanted" in answer.body:
            wanted: list[Source] = []
            for item in answer.fields("wanted").items("wanted"):
                at, number = items_in(item, "a result", 2)
                wanted.append((whole_in(at, "a leaf"), whole_in(number, "an output")))
            if not 0 < len(wanted) <= MOST_PARTS or len({*wanted}) != len(wanted):
                raise InvalidInput(f"answer: must want 1 to {MOST_PARTS} results, each once")
            if sum(nbytes_of(self.operators, source) for source in wanted) > SHOWN_LIMIT and len(wanted) > 1:
                raise InvalidInput(f"answer: several results may have {SHOWN_LIMIT} bytes together")
            return wanted
        why = answer.body.get("why", "")
        if not isinstance(why, str) or len(why) > LONGEST_REASON:
            raise InvalidInput("answer: why must be a short text")
        return self._said(answer, "auditor"), why

    def _shown(self, wanted: Sequence[Source], answer: Answer) -> tuple[Part, ...]:
        answer.fields()
        for source, data in zip(wanted, answer.expect_parts(len(wanted)), strict=True):
            verify_shown(self.operators, source, memoryview(data), self.chunk)
        return answer.parts

    def _said(self, answer: Answer, party: Party) -> SaidMove:
        """Return the move in an answer, whose signature fits and that the rules allow now.

        Raises:
            InvalidInput, Mismatch, ProtocolViolation: it is none.
        """
        signature = answer.body.get("signature")
        if signature is not None and not (
            isinstance(signature, str) and 0 < len(signature) <= 2 * LONGEST_SIGNATURE
        ):
            raise InvalidInput(f"answer: signature must be null or 1 to {LONGEST_SIGNATURE} bytes")
        fields = answer.body.get("move")
        move = Declined() if fields == ["declined"] else parse_move(fields)
        opening: Opening | None = None
        if isinstance(move, Handed):
            (part,) = answer.expect_parts(1)
            value = parse_canonical_json(bytes(part), what="opening", limit=OPENING_LIMIT)
            opening = parse_opening(value, self.game.log)
            if handed_digest(opening) != move.digest:
                raise Mismatch("answer: what was handed over is not what the move names")
        found = SaidMove(move, None if signature is None else bytes_of(signature, "signature"), opening)
        key = self.signing.known.get(party)
        claim = self.said.claim(move)
        if key is not None and (found.signature is None or not is_move_signed(claim, found.signature, key)):
            raise Mismatch(f"answer: the move is not signed with key {key.key_id[:16]}..")
        play_move(
            self.game, party, move
        )  # raises where the rules do not allow it; its effect is taken when its turn comes
        return found

    def _round(self, party: Party) -> None:
        """Ask a party for the move that it owes; one after the other, as each signs what was said before."""

        def read(asked: Party, answer: Answer) -> SaidMove:
            found = self._said(answer, asked)
            self.sent[asked] += answer.nbytes
            return found

        replies = self.table.ask({party: Question(party, "move", self.body(party), (), OPENING_LIMIT)}, read)
        if party not in replies:
            self.game = play_move(self.game, None, Silence(self.table.deadline))
            assert self.game.outcome is not None
            raise ForfeitError(self.game.outcome.loser, self.game.outcome.reason)
        self._moved(party, replies[party])

    def _moved(self, party: Party, said: SaidMove) -> None:
        """Take in a move; where a signature is asked for and there is none, it was not made in time.

        Raises:
            _UnsignedError: as said.
        """
        asked = self.signing.asked.get(party)
        claim = self.said.claim(said.move)
        if asked is not None and not (
            said.signature is not None and is_move_signed(claim, said.signature, asked)
        ):
            raise _UnsignedError(party, self.game, asked)
        self.game = play_move(self.game, party, said.move)
        self.signatures.append(said.signature)
        self.said.add(said.move)
        if said.opening is not None:
            self.opening = said.opening

    # -- how it ends --

    def cost(self) -> Cost:
        """Return what was counted so far."""
        return Cost(
            self.count,
            self.sent["trainer"],
            self.sent["auditor"],
            self.opened,
            self.judged,
            _seconds(self.ledger),
        )

    def _broken(self, outcome: Outcome) -> OperatorResult:
        """Return the result where a party lost by a rule of the game: no operator was judged."""
        loser: Party = "trainer" if outcome.loser == "trainer" else "auditor"
        return OperatorResult(loser, outcome.reason, self.game.rounds, None, None, None, self.cost())

    def _ruled(self) -> OperatorResult:
        game, at, opening = self.game, self.game.index, self.opening
        assert game.objection is not None
        assert game.opened is not None
        assert game.bisection is not None
        position = game.bisection.position
        assert position is not None
        accusation = Accusation(
            game.objection.output, game.objection.element, game.block, game.objection.structure
        )
        opening = replace(
            opening, leaf=game.opened.leaf, partials=game.opened.partials, nodes=game.opened.nodes
        )
        op = self.operators[at] if at < len(self.operators) else None
        state = self.agreed_whole() if accusation.structure else None
        with self.ledger.charging("judge", "ruling"):
            structure = None if state is None else self.own_structure(state, at)
            batch = self.own_batch() if op is not None and op.name == BATCH else None
        # As a judge of its own, who has decoded nothing for the parties.
        facts = replace(self.facts)
        with self.ledger.charging("judge", "ruling"):
            finding = rule_on_operator(
                facts, self.terms.base, self.chunk, agreed=position.agreed_commitment, claimed=position.claims["trainer"],
                agreed_state=self.agreed.root, claimed_state=self.terms.claims["trainer"], accusation=accusation,
                opening=opening, own_structure=structure, own_batch=batch,
            )  # fmt: skip
        if state is not None and structure is not None:
            dissent = self.confirms(state, at, structure)
            if dissent is not None:
                fallback = _fallback(f"the operator's structure is not proven: {dissent}", self.cost())
                return replace(fallback, rounds=game.rounds, index=at, operator=op)
        self.judged = opening.nbytes + (len(facts.frame) + len(facts.grids) if needs_log(op) else 0)
        if batch is not None:
            self.judged += sum(map(len, batch.values()))
        if finding.fault == "unknown":
            fallback = _fallback(f"the operator cannot be judged by itself: {finding.reason}", self.cost())
            return replace(fallback, rounds=game.rounds, index=at, operator=op)
        loser: Party = "trainer" if finding.fault == "faulty" else "auditor"
        game = play_move(game, None, Ruling(loser, finding.reason))
        evidence = Evidence(
            self.facts, self.terms.base, self.chunk, game, accusation, opening, self.agreed.root, finding,
            self.signing.known, tuple(self.signatures),
        )  # fmt: skip
        return OperatorResult(loser, finding.reason, game.rounds, at, op, accusation, self.cost(), evidence)

    def own_structure(self, state: HeldState, at: int) -> bytes:
        """Return the structure of leaf ``at`` of the job's own list; empty if it ends before."""
        return find_structure(self.replay, state, self.facts.record, self.facts.frame, at)

    def own_batch(self) -> dict[str, bytes]:
        """Return the job's own data of the step, by place."""
        found: dict[str, bytes] = {}

        def one(where: str, tensor: Tensor) -> Tensor:
            plain = tensor.detach().contiguous()
            found[where] = array_of(whole(plain.clone())).tobytes()
            return tensor

        map_tensors(self.replay.job.batch(self.step), one, "batch")
        return found


Read = TypeVar("Read")


@dataclass(frozen=True)
class SaidMove:
    """A move as a party said it: with its signature, and what it handed over."""

    move: Move
    signature: bytes | None
    opening: Opening | None = None


def _seconds(ledger: Ledger) -> dict[str, float]:
    """Return what level three took of each party that has done something there."""
    found = {
        "trainer": ledger.of("trainer", "list", "moves").wall,
        "auditor": ledger.of("auditor", "examination", "moves").wall,
        "judge": ledger.of("judge", "ruling").wall,
    }
    return {who: seconds for who, seconds in found.items() if seconds}


def _fallback(reason: str, cost: Cost) -> OperatorResult:
    return OperatorResult(None, reason, 0, None, None, None, cost)


class _UnsignedError(Exception):
    """A party owed a signed move and none came by the deadline."""

    def __init__(self, party: Party, game: OperatorGame, key: PublicKey) -> None:
        owed = f"the {party} owed a signed move ({game.stage}), and none came with key {key.key_id[:16]}.."
        super().__init__(f"no answer: {owed}; that is the judge's word")
        self.party: Party = party
