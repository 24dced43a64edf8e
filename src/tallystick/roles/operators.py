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
from typing import Any

import numpy as np
from torch import Tensor

from tallystick.commit.merkle import root as merkle_root
from tallystick.commit.state import CHUNK_BYTES, Entry, HeldState, StateSummary, parse_entry
from tallystick.commit.tensors import OpenedChunk, chunk_size, digest_of, open_chunks
from tallystick.errors import InvalidInput, Mismatch, Nondeterminism
from tallystick.execution.snapshot import load_state
from tallystick.execution.step import map_tensors
from tallystick.execution.trace import KINDS, StepTrace, array_of, trace_step, whole
from tallystick.numerics.kernels import block_differences, block_square_sums
from tallystick.protocol.dispute import handed_digest
from tallystick.protocol.formulas import Indexes, Point, Sum, is_right_partial, is_within
from tallystick.protocol.game import Claim, Outcome
from tallystick.protocol.openings import Opening, store_nodes, stores_opened, widened
from tallystick.protocol.operands import UnknownFormError, stored_at
from tallystick.protocol.operator_game import (
    Answered,
    Committed,
    Declined,
    Handed,
    Move,
    Opened,
    OperatorGame,
    Pointed,
    Revealed,
    open_operator_game,
    play_move,
)
from tallystick.protocol.operators import (
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
)
from tallystick.protocol.rulings import Accusation, Finding, rule_on_operator
from tallystick.protocol.signed_moves import History, Terms, is_move_signed, sign_move
from tallystick.protocol.signing import PublicKey, Signer
from tallystick.protocol.step_rules import StepFacts, formula_for, needs_log
from tallystick.protocol.trace import PARTIES, Party, Ruling
from tallystick.roles.auditor import Replay, adopting
from tallystick.roles.ledger import Ledger

State = Mapping[str, Entry]
NOISE = {"F32": 2.0**-13, "F64": 2.0**-40}  # of a result's rms; what differs by more is looked at first
PORTABLE = frozenset({ROUND, ADAM, SGD, LOAD, BATCH, "aten::bernoulli_"})
LOOKED_AT = 64
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
    """Who signs its moves at level three, and for which dispute.

    Attributes:
        run, auditor_run, claims: as ``protocol.signed_moves.Terms`` has them.
        signers: of the parties that sign; moves of one that is absent are unsigned.
        asked: keys that the judge knows; a party's move without a signature of its key here counts as not made.
    """

    run: bytes
    auditor_run: bytes
    claims: Mapping[Party, bytes]
    signers: Mapping[Party, Signer] = field(default_factory=dict[Party, Signer])
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
        op = self.trace.operators[at]

        def reading(slot: int, flat: Indexes) -> np.ndarray:
            if slot < 0:
                return self.trace.array((at, -1 - slot))[flat]
            source = op.inputs[slot].source
            stored = self.trace.operators[source[0]].outputs[source[1]].tensor.dtype
            return widened(self.trace.array(source)[flat], stored, op.inputs[slot].dtype)

        return reading

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
    record: Any,
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
    """The auditor's own list parts from the trainer's in its structure: the rest of the step shows nothing."""


@dataclass
class Examination:
    """What an auditor saw while it repeated the step beside the trainer's list.

    Attributes:
        structure: first leaf whose structure is not its own.
        suspects: (leaf, output, element, by how much) where results differ.
        opened_bytes: of results that it compared.
        summary: of its own state after the step.
    """

    trainer: TrainerSide
    structure: int | None = None
    own_count: int = 0
    suspects: list[tuple[int, int, int, float]] = field(default_factory=list[tuple[int, int, int, float]])
    opened_bytes: int = 0
    summary: StateSummary | None = None
    unknown: str | None = None

    def look_at(self, own: StepTrace) -> None:
        """Compare a step that the auditor has repeated and kept."""
        try:
            for at, op in enumerate(own.operators):
                outputs = range(len(op.outputs) if op.name != LOAD else 0)
                self._look(at, op, [own.array((at, number)) for number in outputs])
        except _StoppedError:
            return
        self.end(own)

    def end(self, own: StepTrace) -> None:
        """Take in how the auditor's own step ended."""
        self.summary = own.summary
        if len(own.operators) < len(self.trainer.trace.operators) and self.structure is None:
            self.structure = len(own.operators)

    def watch(self, at: int, op: Operator, results: Sequence[Tensor]) -> None:
        """Compare one operator of the auditor's own step with the trainer's, while it runs."""
        self._look(at, op, [array_of(whole(tensor)) for tensor in results])

    def _look(self, at: int, op: Operator, results: Sequence[np.ndarray]) -> None:
        theirs = self.trainer.trace.operators
        self.own_count = at + 1
        if at >= len(theirs) or not op.has_structure_of(theirs[at]):
            self.structure = at
            raise _StoppedError
        if op.name == LOAD:
            if op.outputs[0].tensor.root != theirs[at].outputs[0].tensor.root:
                held = self.trainer.agreed.entries[op.module]
                mine = np.frombuffer(held.data, dtype=KINDS[op.outputs[0].tensor.dtype])
                self._compare(at, 0, op, mine, self.trainer.trace.array((at, 0)))
            return
        for number, mine in enumerate(results):
            other = self.trainer.trace.array((at, number))
            self.opened_bytes += other.nbytes
            self._compare(at, number, op, mine, other)

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

    def objection(self, facts: StepFacts) -> Objection | None:
        """Return the objection to the first operator that can be shown to be false; None if there is none."""
        loud = sorted(suspect for suspect in self.suspects if suspect[3] > 1.0)
        quiet = sorted((suspect for suspect in self.suspects if suspect[3] <= 1.0), key=lambda s: -s[3])[
            :LOOKED_AT
        ]
        checked = 0
        for at, number, element, _ in [*loud, *sorted(quiet)]:
            if self.structure is not None and at >= self.structure:
                continue
            checked += 1
            if checked > 8 * LOOKED_AT:
                break
            if self._is_false(at, number, element, facts):
                return Objection(at, number, element)
        if self.structure is not None:
            return Objection(self.structure, structure=True)
        return self._at_the_end()

    def _is_false(self, at: int, number: int, element: int, facts: StepFacts) -> bool:
        op = self.trainer.trace.operators[at]
        if op.name in (LOAD, BATCH):
            return True  # the state is agreed upon, and the data is the job's
        read = self.trainer.read(at)
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

    def _at_the_end(self) -> Objection | None:
        """Compare what the trainer stores with what its own operators gave, and with its claim."""
        assert self.summary is not None
        own = {entry.name: entry.fields() for entry in self.summary.entries}
        for at, op in enumerate(self.trainer.trace.operators):
            if op.name == STORE and op.attributes["entry"] != own.get(op.module) and op.inputs:
                data = self.trainer.trace.array(op.inputs[0].source)
                written = self.trainer.stored_data(at)
                if written.nbytes != data.nbytes:
                    return Objection(at)
                stored = np.frombuffer(written, dtype=data.dtype)
                bits = f"u{data.dtype.itemsize}"
                apart = np.flatnonzero(data.view(bits) != stored.view(bits))
                if apart.size:
                    return Objection(at, 0, int(apart[0]))
            if op.name == END:
                stores = [each for each in self.trainer.trace.operators[:at] if each.name == STORE]
                if end_root(stores) != op.attributes["state_root"]:
                    return Objection(at)
        return None


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


def examine(
    replay: Replay,
    agreed: HeldState,
    frame: bytes,
    record: Any,
    trainer: TrainerSide,
    *,
    own: StepTrace | None = None,
) -> Examination:
    """Repeat the step as an honest auditor beside the trainer's list; ``own`` is what it kept of it, if it has repeated it.

    Raises:
        InvalidInput, Nondeterminism: the auditor cannot repeat the step.
    """
    seen = Examination(trainer)
    if own is not None:
        seen.look_at(own)
        return seen
    session = replay.session
    load_state(session, agreed.entries)
    tape = session.follow_tape(frame)
    try:
        with adopting(session, record):
            trace = trace_step(
                session, replay.job, agreed, tape,
                chunk=trainer.trace.chunk, keep=False, watch=seen.watch,
            )  # fmt: skip
        seen.end(trace)
    except _StoppedError:
        pass
    return seen


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


# -- all three -----------------------------------------------------------------------------------


@dataclass
class OperatorDispute:
    """Everything that the parties of level three have at hand.

    Attributes:
        step: the disputed one.
        agreed: state before it.
        facts: agreed facts of the step.
        trainer, auditor: how each repeats the step; the judge uses the auditor's where structure is disputed.
        claimed_root, claimed: the trainer's claim after the step, and the state that opens it, if there is one.
        made, own: the lists of trainer and auditor, if they made them while they repeated the segment.
        objection: what a dishonest auditor objects to, whatever it saw.
        signing: who signs its moves; None if nobody does.
        confirms: says in which arithmetics the job's own list has another leaf at a place than the judge's; None in none.
    """

    step: int
    agreed: HeldState
    facts: StepFacts
    trainer: Replay
    auditor: Replay
    claimed_root: bytes
    claimed: HeldState | None
    made: StepTrace | None = None
    own: StepTrace | None = None
    objection: Objection | None = None
    signing: Signing | None = None
    ledger: Ledger = field(default_factory=Ledger)
    confirms: Callable[[int, bytes], str | None] = lambda at, structure: None

    def play(self) -> OperatorResult:
        """Play level three and return how it ended."""
        record, frame = self.facts.record, self.facts.frame
        base, chunk = list_base(self.agreed, self.facts)
        try:
            with self.ledger.charging("trainer", "list"):
                side = defend(
                    self.trainer, self.agreed, frame, record,
                    base=base, chunk=chunk, claimed_root=self.claimed_root, claimed=self.claimed, made=self.made,
                )  # fmt: skip
                count = side.committed.count
        except (InvalidInput, Nondeterminism) as problem:
            return _fallback(f"the trainer cannot repeat its step: {problem}", Cost(0, 0, 0, 0, 0, {}))
        if side.trace.incomplete is not None:
            return _fallback(side.trace.incomplete, Cost(count, 0, 0, 0, 0, _seconds(self.ledger)))
        objection, seen = self.objection, None
        if objection is None:
            try:
                with self.ledger.charging("auditor", "examination"):
                    seen = examine(self.auditor, self.agreed, frame, record, side, own=self.own)
                    objection = seen.objection(self.facts)
            except (InvalidInput, Nondeterminism) as problem:
                cost = Cost(count, 0, 0, 0, 0, _seconds(self.ledger))
                return _fallback(f"the auditor cannot repeat the step: {problem}", cost)
        table = _Table(self, side, base, chunk, 0 if seen is None else seen.opened_bytes)
        try:
            if objection is None:
                why = "no operator lies outside its error bound"
                if seen is not None and seen.unknown is not None:
                    why = f"{why}, and one is not in the table: {seen.unknown}"
                found = table.declined(why)
            else:
                found = table.play(objection)
        except _SilentError as silent:
            found = table.silent(silent)
        return replace(found, signed=table.keys)

    def own_structure(self, at: int) -> bytes:
        """Return the structure of leaf ``at`` of the job's own list; empty if it ends before."""
        return find_structure(self.auditor, self.agreed, self.facts.record, self.facts.frame, at)

    def own_batch(self) -> dict[str, bytes]:
        """Return the job's own data of the step, by place."""
        found: dict[str, bytes] = {}

        def one(where: str, tensor: Tensor) -> Tensor:
            plain = tensor.detach().contiguous()
            found[where] = array_of(whole(plain.clone())).tobytes()
            return tensor

        map_tensors(self.auditor.job.batch(self.step), one, "batch")
        return found


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


class _SilentError(Exception):
    """A party owed a signed move and none came by the deadline."""

    def __init__(self, party: Party, game: OperatorGame, key: PublicKey) -> None:
        owed = f"the {party} owed a signed move ({game.stage}), and none came with key {key.key_id[:16]}.."
        super().__init__(f"no answer: {owed}; that is the judge's word")
        self.party: Party = party
        self.game = game


class _Table:
    """The table at which one game of level three is played; counts what goes over it."""

    def __init__(
        self,
        case: OperatorDispute,
        side: TrainerSide,
        base: bytes,
        chunk: int,
        opened: int,
    ) -> None:
        self.case, self.side, self.base, self.chunk, self.opened = case, side, base, chunk, opened
        self.sent = {"trainer": 36 + sum(map(len, side.leaves.leaves)), "auditor": 0}
        self.judged = 0
        self.signatures: list[bytes | None] = []
        signing = case.signing
        signers = {} if signing is None else signing.signers
        self.keys: dict[Party, PublicKey] = {party: each.public_key for party, each in signers.items()}
        self.said = (
            None
            if signing is None
            else History(Terms(signing.run, signing.auditor_run, case.step, base, signing.claims))
        )

    def _moved(self, game: OperatorGame, party: Party, move: Move) -> OperatorGame:
        """Return the game after a move that its party has signed, if it signs.

        Raises:
            _SilentError: the judge asks for a signature that it did not get, so the move was not made in time.
        """
        signing = self.case.signing
        signature: bytes | None = None
        if signing is not None and self.said is not None:
            claim = self.said.claim(move)
            signer, asked = signing.signers.get(party), signing.asked.get(party)
            if signer is not None:
                with self.case.ledger.charging(party, "moves"):
                    signature = sign_move(claim, signer)
                self.sent[party] += len(signature)
            if asked is not None and not (signature is not None and is_move_signed(claim, signature, asked)):
                raise _SilentError(party, game, asked)
        after = play_move(game, party, move)
        self.signatures.append(signature)
        if self.said is not None:
            self.said.add(move)
        return after

    def silent(self, silent: _SilentError) -> OperatorResult:
        """Return the result where a party did not answer: it loses, on the judge's word and without a record."""
        return OperatorResult(silent.party, str(silent), silent.game.rounds, None, None, None, self.cost())

    def cost(self) -> Cost:
        """Return what was counted so far."""
        count = len(self.side.leaves.leaves)
        seconds = _seconds(self.case.ledger)
        return Cost(count, self.sent["trainer"], self.sent["auditor"], self.opened, self.judged, seconds)

    def declined(self, why: str) -> OperatorResult:
        """Return the fallback to the whole step."""
        game = open_operator_game(self.base)
        game = self._moved(game, "trainer", self.side.committed)
        game = self._moved(game, "auditor", Declined())
        self.sent["auditor"] += 1
        return replace(_fallback(why, self.cost()), rounds=game.rounds)

    def play(self, objection: Objection) -> OperatorResult:
        """Play the game to its ruling."""
        side, facts, charging = self.side, self.case.facts, self.case.ledger.charging
        with charging("auditor", "moves"):
            own = OperatorList(self.base, [*side.leaves.leaves[: objection.index], objection.encode()])
            answered = Answered(len(own.leaves), merkle_root(own.hashes))
        game = self._moved(open_operator_game(self.base), "trainer", side.committed)
        game = self._moved(game, "auditor", answered)
        self.sent["auditor"] += 36
        lists: dict[Party, OperatorList] = {"trainer": side.leaves, "auditor": own}
        while game.stage == "bisect":
            for party in game.awaited:
                bisection = game.bisection
                assert bisection is not None
                at = bisection.midpoint
                assert at is not None
                with charging(party, "moves"):
                    claim = Claim(party, at, lists[party].commitment_at(at))
                game = self._moved(game, party, claim)
                self.sent[party] += 32
        at = game.index
        with charging("auditor", "moves"):
            revealed = Revealed(own.witness_at(at))
        self.sent["auditor"] += revealed.opened.nbytes
        game = self._moved(game, "auditor", revealed)
        accusation = Accusation(objection.output, objection.element, structure=objection.structure)
        with charging("trainer", "moves"):
            nodes = () if accusation.structure else side.nodes(at)
            opened = Opened(side.leaves.witness_at(at), side.partials(accusation, at, facts), nodes)
        self.sent["trainer"] += opened.leaf.nbytes + 16 * len(opened.partials) + 32 * len(opened.nodes)
        game = self._moved(game, "trainer", opened)
        if game.stage == "point":
            with charging("auditor", "moves"):
                accusation = replace(accusation, block=self._block(accusation, at, opened))
            self.sent["auditor"] += 4
            game = self._moved(game, "auditor", Pointed(accusation.block))
        with charging("trainer", "moves"):
            opening = side.open(accusation, at, facts)
        self.sent["trainer"] += opening.nbytes
        game = self._moved(game, "trainer", Handed(handed_digest(opening)))
        return self._ruled(game, at, accusation, opening)

    def _block(self, accusation: Accusation, at: int, opened: Opened) -> int:
        """Return which partial sum or node the auditor points at."""
        if opened.nodes:
            pairs = zip(opened.nodes, nodes_of(self.side.trace.operators, at), strict=False)
            return next((number for number, (stated, own) in enumerate(pairs) if stated != own), -1)
        op = self.side.trace.operators[at]
        formula = formula_for(op, accusation.output, accusation.element, self.side.read(at), self.case.facts)
        if isinstance(formula, Sum):
            for number, (stated, found) in enumerate(zip(opened.partials, formula.partials(), strict=True)):
                if not is_right_partial(stated, found):
                    return number
        return -1

    def _ruled(self, game: OperatorGame, at: int, accusation: Accusation, opening: Opening) -> OperatorResult:
        case = self.case
        ops = self.side.trace.operators
        op = ops[at] if at < len(ops) else None
        with case.ledger.charging("judge", "ruling"):
            structure = case.own_structure(at) if accusation.structure else None
            batch = case.own_batch() if op is not None and op.name == BATCH else None
        assert game.bisection is not None
        position = game.bisection.position
        assert position is not None
        # As a judge of its own, who has decoded nothing for the parties.
        facts = replace(case.facts)
        with case.ledger.charging("judge", "ruling"):
            finding = rule_on_operator(
                facts, self.base, self.chunk, agreed=position.agreed_commitment, claimed=position.claims["trainer"],
                agreed_state=case.agreed.root, claimed_state=case.claimed_root, accusation=accusation, opening=opening,
                own_structure=structure, own_batch=batch,
            )  # fmt: skip
        if structure is not None and (dissent := case.confirms(at, structure)) is not None:
            fallback = _fallback(f"the operator's structure is not proven: {dissent}", self.cost())
            return replace(fallback, rounds=game.rounds, index=at, operator=op)
        self.judged = opening.nbytes + (len(case.facts.frame) + len(case.facts.grids) if needs_log(op) else 0)
        if batch is not None:
            self.judged += sum(map(len, batch.values()))
        evidence = Evidence(
            case.facts, self.base, self.chunk, game, accusation, opening, case.agreed.root, finding,
            self.keys, tuple(self.signatures),
        )  # fmt: skip
        if finding.fault == "unknown":
            fallback = _fallback(f"the operator cannot be judged by itself: {finding.reason}", self.cost())
            return replace(fallback, rounds=game.rounds, index=at, operator=op)
        loser: Party = "trainer" if finding.fault == "faulty" else "auditor"
        game = play_move(game, None, Ruling(loser, finding.reason))
        return OperatorResult(
            loser, finding.reason, game.rounds, at, op, accusation, self.cost(), replace(evidence, game=game)
        )


__all__ = [
    "Cost",
    "Evidence",
    "Mismatch",
    "OperatorDispute",
    "OperatorResult",
    "Outcome",
    "Signing",
    "defend",
    "examine",
]
