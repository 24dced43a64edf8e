"""The judge: two parties' transcripts differ; find the first step on which they part, repeat it, and rule.

The bisection is played by ``protocol.game`` on each side's commitments: roots at checkpoints first, then a root
for every step of the disputed segment, which both sides repeat. The judge then holds the agreed state before the
disputed step, the job and the trainer's log of that step, and nothing else.

A state is acceptable if every element is a value that honest arithmetic within the declared bands can give: where the
judge's own gradient or state lies within the band of a rounding boundary, both neighbours will do. (This holds element
by element, so the optimizer must be elementwise; every optimizer that ``policy`` accepts today is.) Where the
optimizer's arithmetic is portable the state has no bands: for each choice of the gradient one state is acceptable.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from tallystick.commit.encoding import digest
from tallystick.commit.state import CHUNK_BYTES, Entry, HeldState, hold, summarise
from tallystick.commit.tensors import chunk_size
from tallystick.errors import InvalidInput, Mismatch, Nondeterminism
from tallystick.execution.follow_tape import FollowTape
from tallystick.execution.hashing import leaf_hashes
from tallystick.execution.job import JobSource
from tallystick.execution.program import verify_program
from tallystick.execution.snapshot import copied_state, held_state, load_state, state_entries
from tallystick.execution.step import StepOutcome, batch_digest, run_step
from tallystick.execution.trace import StepTrace, trace_step
from tallystick.numerics.log import Kind, decode_frame
from tallystick.numerics.rounding import NO_KEY, Candidates, Key, find_candidates
from tallystick.protocol.dispute import GRIDS_ENTRY, DisputeRecord, StepsGame
from tallystick.protocol.game import Claim, Game, Level, apply, open_game
from tallystick.protocol.operators import Objection
from tallystick.protocol.run_documents import Specification, StepRecord
from tallystick.protocol.signing import PublicKey, Signer
from tallystick.protocol.step_rules import StepFacts, needs_log
from tallystick.protocol.strategy import next_moves
from tallystick.protocol.trace import PARTIES, DisputedPosition, Party, Ruling
from tallystick.protocol.transcript import Transcript, check_fingerprint
from tallystick.protocol.verdict import LogObjection, Pair, Verdict, record_claims
from tallystick.roles.auditor import (
    BATCH_DIGEST,
    EVIDENCE,
    FINGERPRINT,
    Deviation,
    Replay,
    adopting,
    compare_states,
    compare_step,
    farther_than_trained,
    find_noisy_sites,
    is_excused,
    open_program,
    open_replay,
)
from tallystick.roles.beginning import find_other_setting
from tallystick.roles.data_noise import REMEDY, Shaking, is_explained, shaking
from tallystick.roles.ledger import Ledger, Spent
from tallystick.roles.log_judge import rule_on_log
from tallystick.roles.operators import OperatorDispute, OperatorResult, Signing
from tallystick.roles.panel import Question, find_dissent
from tallystick.store.files import RunDirectory

CANNOT = "cannot_reproduce"
NOT_PROVEN = "not_proven"
UNOPENED_TAG = "tallystick/unopened-state/1"
DATA_NOISE_REASON = (
    f"the {{}}'s data differ from the judge's by no more than floating noise explains; {REMEDY}"
)
TRACED = ("fp32", "fp64")  # policies whose steps have a list of operators
State = Mapping[str, Entry]


@dataclass(frozen=True)
class DisputeResult:
    """How a dispute ended.

    Attributes:
        loser: ``trainer``, ``auditor`` or ``none``.
        outcome: ``fault`` (somebody loses), ``agreement`` (nothing is in dispute), ``both_acceptable`` (honest arithmetic
            can give either state), ``not_proven`` (arithmetics of the judge's own machine disagree on who is at fault) or
            ``cannot_reproduce`` (the judge could not find out). After the last two nobody is cleared.
        step: the disputed step, or None if nothing was in dispute.
        rounds: of bisection, all levels together.
        rounds_per_level: the same, by level.
        reason: in words.
        moves: every claim that was made: (party, steps done, commitment in hexadecimal).
        operator: how level three ended; None if it was not played.
        record: the portable record (``protocol.dispute``) of a dispute that ended at an operator.
        ends, records, objection: what the verdict rests on (``protocol.verdict``).
        ledger: what each party spent; no part of the verdict.
    """

    loser: str
    step: int | None
    rounds: int
    rounds_per_level: dict[str, int]
    reason: str
    moves: list[tuple[str, int, str]] = field(default_factory=list[tuple[str, int, str]])
    outcome: str = "fault"
    operator: OperatorResult | None = None
    record: bytes | None = None
    ends: Pair | None = None
    records: Pair | None = None
    objection: LogObjection | None = None
    ledger: Ledger = field(default_factory=Ledger)

    def encode(self) -> bytes:
        """Return the canonical JSON of the verdict."""
        return Verdict(
            loser=self.loser,
            outcome=self.outcome,
            reason=self.reason,
            step=self.step,
            rounds=self.rounds,
            rounds_per_level=self.rounds_per_level,
            moves=tuple(self.moves),
            operator=None if self.operator is None else self.operator.fields(),
            ends=self.ends,
            records=self.records,
            objection=self.objection,
        ).encode()


Defence = Callable[[Specification], Replay]


def defend_with(source: JobSource) -> Defence:
    """Return the defence of a trainer who answers with the program ``source``, which need not be the job's.

    Opening it raises InvalidInput where that program has other data or sites than the order.
    """

    def defence(specification: Specification) -> Replay:
        opened = open_program(specification, source)
        if isinstance(opened, Deviation):
            raise InvalidInput(
                f"the trainer's program {source.path}: {opened.subject} is {opened.own}, the order has {opened.stated}"
            )
        return opened

    return defence


def dispute(
    trainer: RunDirectory,
    auditor: RunDirectory,
    source: JobSource,
    *,
    level: str = "operators",
    defence: Defence | None = None,
    objection: Objection | None = None,
    signers: Mapping[Party, Signer] | None = None,
    asked: Mapping[Party, PublicKey] | None = None,
) -> DisputeResult:
    """Play the dispute between two run directories and rule.

    Args:
        trainer: the trainer's run.
        auditor: the auditor's claim.
        source: the job's, which auditor and judge repeat.
        level: ``operators``, or ``steps`` to have the judge repeat the whole disputed step.
        defence: the program with which the trainer defends itself; by default the job's.
        objection: what the auditor objects to; by default to what it finds. A dishonest one may say anything.
        signers: with which the parties sign their moves over operators; those of a party that is absent are unsigned.
        asked: keys whose signatures the judge asks for: a party that does not sign with its own does not answer, and loses.

    Raises:
        InvalidInput: a document is malformed, or the two runs are not of one specification.
        Mismatch: one side's documents contradict each other.
        Nondeterminism: this machine cannot repeat the job, or has another program: nobody is convicted.
        OtherProgram: the job imported something on the way that the run does not state: nobody either.
    """
    ours, theirs = trainer.load_transcript(), auditor.load_transcript()
    if ours.specification.encode() != theirs.specification.encode():
        raise InvalidInput(
            "dispute: the two runs have different specifications, so they are not about one order"
        )
    replay = open_replay(ours.specification, source)
    if isinstance(replay, Deviation):
        raise Nondeterminism(
            f"this machine cannot repeat the job: {replay.subject} is {replay.own}, the run has {replay.stated}"
        )
    own = replay if defence is None else defence(ours.specification)
    try:
        hands = signers or {}, asked or {}
        result = _play(trainer, ours, auditor, theirs, replay, own, source, level, objection, *hands)
        verify_program(source.program, ours.specification.job.program)
        return result
    finally:
        replay.session.close()
        if own is not replay:
            own.session.close()


def _play(
    trainer: RunDirectory,
    ours: Transcript,
    auditor: RunDirectory,
    theirs: Transcript,
    replay: Replay,
    defence: Replay,
    source: JobSource,
    level: str,
    operator_objection: Objection | None,
    signers: Mapping[Party, Signer],
    asked: Mapping[Party, PublicKey],
) -> DisputeResult:
    checkpoints = [checkpoint.steps_done for checkpoint in ours.checkpoints()]
    ledger = Ledger()
    traces: dict[Party, RecordedTrace] = {
        "trainer": RecordedTrace(trainer, ours, defence, "trainer", ledger),
        "auditor": RecordedTrace(auditor, theirs, replay, "auditor", ledger),
    }
    _prepare(traces, find_parting(ours, theirs), traced=level == "operators")
    if (begun := _judged_beginning(trainer, auditor, ours, replay, source, ledger)) is not None:
        return begun
    claims = {party: [trace.commitment_at(done) for done in checkpoints] for party, trace in traces.items()}
    step_judge = StepJudge(trainer, ours, auditor, theirs, replay, traces, source)
    objection = _objection_of(auditor, ours)
    # A false state in the middle is disputed too, where both sides end in the same one.
    last = next(
        (i for i in reversed(range(len(checkpoints))) if claims["trainer"][i] != claims["auditor"][i]), None
    )
    if last is None:
        why = "both sides reached the same state"
        same = DisputeResult("none", None, 0, {}, why, outcome="agreement", ledger=ledger)
        return _first_ground(step_judge.rule_on_agreed(ours.num_steps, objection), same)
    levels = [Level("checkpoints", checkpoints[: last + 1]), Level("steps", range(checkpoints[last] + 1))]
    agreed, trainers, auditors = claims["trainer"][0], claims["trainer"][last], claims["auditor"][last]
    game = open_game(levels, agreed=agreed, trainer=trainers, auditor=auditors)
    game, rounds = _bisect(game, traces)
    assert game.position is not None
    share_agreed(traces, game.position.agreed)
    stated = tuple(move for move in game.log if isinstance(move, Claim))
    ended = checkpoints[last] - 1
    played = DisputeResult(
        "none", None, sum(rounds.values()), rounds, "", [(m.party, m.index, m.commitment.hex()) for m in stated],
        ends=(ours.prove_step(ended), theirs.prove_step(ended)), ledger=ledger,
    )  # fmt: skip
    # What records and log say of the steps before, on whose states both agree, can be false all the same.
    earlier = step_judge.rule_on_agreed(game.position.agreed, objection)
    if any(ground.decides for ground in earlier):
        return _first_ground(earlier, played)
    found: OperatorResult | None = None
    written: bytes | None = None
    if level == "operators":
        case = _operator_case(step_judge, game.position, defence, operator_objection, signers, asked)
        found = None if case is None else case.play()
        if found is not None and ledger.steps:
            found = replace(found, step_seconds=min(step.wall for step in ledger.steps))
        if case is not None and found is not None:
            ends: dict[Party, bytes] = {"trainer": trainers, "auditor": auditors}
            steps = StepsGame(tuple(checkpoints[: last + 1]), agreed, ends, stated)
            written = _record_of(ours, theirs, case.agreed, steps, game.position, found)
    if found is not None and found.rounds:
        rounds["operators"] = found.rounds
    played = replace(played, rounds=sum(rounds.values()), operator=found)
    ruling: Ruling | None = None
    if found is not None and found.loser == "trainer" and defence is replay:
        # The trainer's part was played by the job's program on this machine, whose noise may be to blame for where it
        # ended: the whole step is judged as well, and only if that convicts too does the operator stand.
        ruling = step_judge.rule(game.position, {})
        if ruling.loser != "trainer":
            why = f"the trainer did not answer itself, and the whole step does not convict it: {found.reason}"
            found, written = replace(found, loser=None, reason=why, evidence=None), None
            played = replace(played, operator=found)
    if found is not None and found.loser is not None:
        reason = f"step {game.agreed}: {found.reason}"
        result = replace(played, loser=found.loser, step=game.agreed, reason=reason, record=written)
    else:
        ruling = ruling or step_judge.rule(game.position, {})
        result = replace(
            played,
            loser=ruling.loser,
            step=step_judge.step,
            reason=ruling.reason,
            outcome=step_judge.outcome,
        )
    # Who objects falsely to a log loses, unless the trainer's state convicts the trainer all the same.
    return result if result.loser == "trainer" else _first_ground(earlier, result)


def _objection_of(auditor: RunDirectory, ours: Transcript) -> LogObjection | None:
    """Return what the auditor's claim objects to in the trainer's log, or None.

    Raises:
        InvalidInput: the objection is malformed, or to a step that the run does not have.
        Mismatch: it is about another run.
    """
    objection = auditor.load_objection()
    if objection is None:
        return None
    if objection.run != ours.root().hex():
        raise Mismatch(
            f"{auditor.objection_path}: objects to run {objection.run}, disputed is {ours.root().hex()}"
        )
    if objection.step >= ours.num_steps:
        raise InvalidInput(
            f"{auditor.objection_path}: objects to step {objection.step}, the run has {ours.num_steps}"
        )
    return objection


@dataclass(frozen=True)
class Ground:
    """A ruling on a step before and after which both parties have the same states, and what it rests on."""

    step: int
    ruling: Ruling
    outcome: str
    records: Pair | None = None
    objection: LogObjection | None = None

    @property
    def decides(self) -> bool:
        """Whether it ends the dispute, whatever the states show: it convicts the trainer, or two records differ."""
        return self.ruling.loser == "trainer" or self.records is not None


def _first_ground(grounds: Sequence[Ground], otherwise: DisputeResult) -> DisputeResult:
    """Return ``otherwise`` with the ruling of the weightiest ground: one that decides, then one that blames, then any."""

    def weight(ground: Ground) -> tuple[bool, bool]:
        return not ground.decides, ground.ruling.loser == "none"

    chosen = min(grounds, key=weight, default=None)
    if chosen is None or (chosen.ruling.loser == "none" and otherwise.step is not None):
        return otherwise
    return replace(
        otherwise,
        loser=chosen.ruling.loser,
        step=chosen.step,
        reason=chosen.ruling.reason,
        outcome=chosen.outcome,
        record=None,
        records=chosen.records,
        objection=chosen.objection,
    )


def _judged_beginning(
    trainer: RunDirectory,
    auditor: RunDirectory,
    ours: Transcript,
    replay: Replay,
    source: JobSource,
    ledger: Ledger,
) -> DisputeResult | None:
    other = find_other_beginning(trainer, ours, replay)
    if other is None:
        return None
    why = f"step 0: the first state is not the job's: {other}"
    with ledger.charging("judge", "panel"):
        dissent = find_dissent(Question("beginning", trainer.path, auditor.path, source, 0), "trainer")
    if dissent is None:
        return DisputeResult("trainer", 0, 0, {}, why, ledger=ledger)
    reason = f"{why}; not proven: {dissent}"
    return DisputeResult("none", 0, 0, {}, reason, outcome=NOT_PROVEN, ledger=ledger)


def find_other_beginning(trainer: RunDirectory, ours: Transcript, replay: Replay) -> str | None:
    """Return a number in the run's first state that is not the job's own, or None; both parties' runs begin there."""
    try:
        state = trainer.load_committed(0, ours.specification.initial_state)
        other = find_other_setting(replay.settings, state)
    except (InvalidInput, Mismatch):
        return None  # judged where the state is asked for
    return other.text if other is not None and other.is_number else None


def _bisect(game: Game, traces: Mapping[Party, RecordedTrace]) -> tuple[Game, dict[str, int]]:
    """Play until one step is disputed; return the game and the rounds of each level."""
    rounds: dict[str, int] = {}
    while game.position is None:
        name = game.level.name
        for party, trace in traces.items():
            for move in next_moves(game, party, trace):
                game = apply(game, move)
        rounds[name] = rounds.get(name, 0) + 1
    return game, rounds


def _prepare(traces: Mapping[Party, RecordedTrace], suspected: int | None, *, traced: bool) -> None:
    for trace in traces.values():
        trace.suspected = suspected
        trace.traces = traced and trace.transcript.specification.policy.name in TRACED


def share_agreed(traces: Mapping[Party, RecordedTrace], index: int) -> None:
    """Let both parties hold the state they agree on only once in this process's memory."""
    mine, other = traces["trainer"].held.get(index), traces["auditor"].held.get(index)
    if mine is not None and other is not None and mine.root == other.root:
        traces["auditor"].held[index] = mine


def find_parting(ours: Transcript, theirs: Transcript) -> int | None:
    """Return the first step after which the two runs' records have different fingerprints of the state, or None.

    No claim, as a record may lie: it says which states are worth keeping while a segment is repeated.
    """
    pairs = zip(ours.records, theirs.records, strict=False)
    return next((mine.step for mine, other in pairs if mine.fingerprint != other.fingerprint), None)


def _record_of(
    ours: Transcript,
    theirs: Transcript,
    state: HeldState,
    steps: StepsGame,
    position: DisputedPosition,
    found: OperatorResult,
) -> bytes | None:
    """Return the portable record of a dispute that ended at an operator, None if there is none or it would show nothing."""
    if found.evidence is None or found.loser is None or not found.evidence.finding.is_shown:
        return None
    evidence = found.evidence
    needed = needs_log(found.operator)
    grids = state.entries[GRIDS_ENTRY]
    chunks = range(-(-len(grids.data) // CHUNK_BYTES)) if needed else range(0)
    record = DisputeRecord(
        specification=ours.specification,
        specification_proof=ours.prove_specification(),
        step_proof=ours.prove_step(position.agreed),
        run_root=ours.root(),
        steps=steps,
        chunk=evidence.chunk,
        frame=evidence.facts.frame if needed else b"",
        grids=tuple(
            (
                state.open(GRIDS_ENTRY, at),
                bytes(grids.data[at * CHUNK_BYTES : (at + 1) * CHUNK_BYTES]),
            )
            for at in chunks
        ),
        moves=tuple(move for move in evidence.game.log if not isinstance(move, Ruling)),
        opening=evidence.opening,
        loser=found.loser,
        reason=found.reason,
        auditor_run=theirs.root(),
        keys=evidence.keys,
        signatures=evidence.signatures,
    )
    return record.encode()


def _operator_case(
    judge: StepJudge,
    position: DisputedPosition,
    defence: Replay,
    objection: Objection | None,
    signers: Mapping[Party, Signer],
    asked: Mapping[Party, PublicKey],
) -> OperatorDispute | None:
    """Return the case for level three, or None where the step fails before any operator: no state, other data, no log."""
    step = position.agreed
    record = judge.transcript.record(step)
    state = judge.opened(step, position.agreed_commitment)
    if (
        state is None
        or GRIDS_ENTRY not in state.entries
        or batch_digest(judge.replay.job.batch(step)) != record.batch
    ):
        return None
    try:
        frame = judge.trainer.load_frames(judge.transcript, step, step + 1)[step]
        decode_frame(frame)
    except (InvalidInput, Mismatch):
        return None
    facts = StepFacts(judge.transcript.specification, record, frame, bytes(state.entries[GRIDS_ENTRY].data))
    claimed = judge.traces["trainer"].witness_at(position.disputed)
    root = position.claims["trainer"]
    if claimed is not None and claimed.root != root:
        claimed = None
    roots = judge.transcript.root(), judge.auditors_transcript.root()
    signing = Signing(*roots, position.claims, signers, asked)
    made, own = (judge.traces[party].traced_under(record) for party in PARTIES)
    return OperatorDispute(
        step, state, facts, defence, judge.replay, root, claimed, made, own, objection, signing,
        ledger=judge.ledger,
        confirms=lambda at, structure: judge.confirms_structure(state, step, at, structure),
    )  # fmt: skip


class RecordedTrace:
    """One party's claims, from its run directory; positions are numbers of steps done.

    At checkpoints the claim is the committed root. In between the party repeats its segment from the checkpoint. Where that
    leads elsewhere than its own committed fingerprints, it cannot open what it committed to: the claim is then a digest of the
    fingerprint, which no state opens.

    Where the two runs part is known from their records before the first round, unless these lie. So a segment is repeated
    once: the states that bisection will ask for are hashed on the way, and those on both sides of the ``suspected`` step
    are kept. Asked for anything else, the party repeats the segment again.

    Attributes:
        suspected: first step after which the records of the two runs differ; None if they do not say.
        held: states at hand, by number of steps done.
        traces: whether the suspected step is traced operator by operator while it is repeated.
        traced: that list; the trainer's with the roots of all results.
    """

    def __init__(
        self,
        directory: RunDirectory,
        transcript: Transcript,
        replay: Replay,
        party: Party,
        ledger: Ledger,
        *,
        suspected: int | None = None,
    ) -> None:
        self.directory, self.transcript, self.replay = directory, transcript, replay
        self.party: Party = party
        self.ledger, self.suspected = ledger, suspected
        self._roots = {c.steps_done: bytes.fromhex(c.state_root) for c in transcript.checkpoints()}
        self._repeated: dict[int, bytes] = {}
        self.held: dict[int, HeldState] = {}
        self.traces = False
        self.traced: StepTrace | None = None
        self._deed: Literal["segment", "again"] = "segment"

    def commitment_at(self, index: int) -> bytes:
        """Return the 32 bytes this party claims for the state after ``index`` steps."""
        if index in self._roots:
            return self._roots[index]
        if index not in self._repeated:
            start = max(done for done in self._roots if done < index)
            end = min(done for done in self._roots if done > index)
            wanted = self._asked_for(start, end)
            self._repeat(start, wanted if index in wanted else set(range(start + 1, end)))
        return self._repeated[index]

    def _asked_for(self, start: int, end: int) -> set[int]:
        """Return the positions that bisection between two checkpoints asks for if the suspicion holds."""
        found: set[int] = set()
        if self.suspected is None or not start <= self.suspected < end:
            return found
        while end - start > 1:
            middle = (start + end) // 2
            found.add(middle)
            start, end = (middle, end) if middle <= self.suspected else (start, middle)
        return found

    def _repeat(self, start: int, wanted: set[int]) -> None:
        honest = self._load(start)
        last = max(wanted)
        if self.traces and self.suspected is not None and self.suspected >= start:
            last = max(last, min(self.suspected + 1, *(done for done in self._roots if done > start)))
        for step in range(start, last):
            honest = honest and self._follow(step)
            if step + 1 not in wanted:
                continue
            if honest:
                self._repeated[step + 1] = self._own_root(step + 1)
            else:
                self._repeated[step + 1] = digest(UNOPENED_TAG, self.transcript.record(step).leaf())
        self._deed = "again"

    def _is_kept(self, index: int) -> bool:
        return self.suspected is not None and index in (self.suspected, self.suspected + 1)

    def _own_root(self, index: int) -> bytes:
        """Return the root of the state that the session is in, and keep that state if it is wanted."""
        if index in self.held:
            return self.held[index].root
        session = self.replay.session
        with (
            self.ledger.charging(self.party, "roots"),
            ThreadPoolExecutor(os.cpu_count() or 1, "tally-hash") as pool,
        ):
            if not self._is_kept(index):
                return summarise(state_entries(session), pool=pool, leaves=leaf_hashes).root()
            self.held[index] = held_state(session, pool)
            return self.held[index].root

    def _load(self, start: int) -> bool:
        with self.ledger.charging(self.party, "load" if self._deed == "segment" else "again"):
            state = self._committed(start)
            if state is None:
                return False
            try:
                load_state(self.replay.session, state.entries)
            except InvalidInput:
                return False
        return True

    def _committed(self, index: int) -> HeldState | None:
        """Return the state of a checkpoint, None if this party cannot open it."""
        if index not in self.held:
            try:
                state = self.directory.load_held(index, self._roots[index].hex())
            except (InvalidInput, Mismatch):
                return None
            if not self._is_kept(index):
                return state
            self.held[index] = state
        return self.held[index]

    def committed_around(self, step: int) -> tuple[range, HeldState | None, HeldState | None]:
        """Return the steps of the segment that ``step`` is in and the committed states on both its sides, as far as they open."""
        start = max(done for done in self._roots if done <= step)
        end = min(done for done in self._roots if done > step)
        return range(start, end), self._committed(start), self._committed(end)

    def _follow(self, step: int) -> bool:
        """Repeat one step under this party's own log; whether it ends where the party's record says."""
        record = self.transcript.record(step)
        agreed = self.held.get(step)
        tracing = self.traces and step == self.suspected and self.traced is None and agreed is not None
        try:
            with self.ledger.charging(self.party, "traced" if tracing else self._deed):
                frame = self.directory.load_frames(self.transcript, step, step + 1)[step]
                if tracing and agreed is not None:
                    outcome = self._trace(record, frame, agreed)
                else:
                    clock = time.perf_counter(), time.process_time()
                    outcome, _ = self.replay.follow(record, frame)
                    passed = Spent(time.perf_counter() - clock[0], time.process_time() - clock[1])
                    self.ledger.steps.append(passed)
        except (InvalidInput, Mismatch, Nondeterminism):
            return False
        return f"{outcome.fingerprint:016x}" == record.fingerprint

    def _trace(self, record: StepRecord, frame: bytes, agreed: HeldState) -> StepOutcome:
        """Repeat the suspected step operator by operator; the state after it is kept as well."""
        session = self.replay.session
        tape = session.follow_tape(frame)
        with adopting(session, record):
            traced = trace_step(
                session, self.replay.job, agreed, tape,
                chunk=chunk_size(agreed.nbytes), keep=True, hashed=self.party == "trainer",
            )  # fmt: skip
        assert traced.outcome is not None
        assert traced.after is not None
        self.traced = traced
        after, committed = traced.after, self._roots.get(record.step + 1, traced.after.root)
        if f"{traced.outcome.fingerprint:016x}" == record.fingerprint and after.root == committed:
            self.held[record.step + 1] = after
        return traced.outcome

    def traced_under(self, record: StepRecord) -> StepTrace | None:
        """Return the list of the suspected step, if it was made under a record with the same log, data and schedule."""
        own = self.transcript.record(record.step)
        same = (own.log, own.batch, own.schedule) == (record.log, record.batch, record.schedule)
        return self.traced if same and self.suspected == record.step else None

    def find_unopened_checkpoint(self, index: int) -> str | None:
        """Return why this party cannot open its own last checkpoint up to ``index``, or None if it can."""
        start = max(done for done in self._roots if done <= index)
        try:
            self.directory.load_committed(start, self._roots[start].hex())
        except (InvalidInput, Mismatch) as problem:
            return str(problem)
        return None

    def witness_at(self, index: int) -> HeldState | None:
        """Return the state after ``index`` steps that opens this party's claim, or None if it cannot open it."""
        if index in self.held:
            return self.held[index]
        if index in self._roots:
            with self.ledger.charging(self.party, "again"):
                return self._committed(index)
        self._deed = "again"
        start = max(done for done in self._roots if done < index)
        if not self._load(start) or not all(self._follow(step) for step in range(start, index)):
            return None
        return hold(copied_state(self.replay.session).values())


def _has_form_of(entry: Entry | None, other: Entry | None) -> bool:
    return (
        entry is not None and other is not None and (entry.dtype, entry.shape) == (other.dtype, other.shape)
    )


@dataclass
class StepJudge:
    """Repeats one step from the agreed state and compares both sides' claims with what honest arithmetic allows.

    With ``source`` it asks its panel before it convicts anybody.
    """

    trainer: RunDirectory
    transcript: Transcript
    auditor: RunDirectory
    auditors_transcript: Transcript
    replay: Replay
    traces: Mapping[Party, RecordedTrace]
    source: JobSource | None = None
    outcome: str = "fault"
    step: int | None = None

    def rule_on_agreed(self, end: int, objection: LogObjection | None) -> list[Ground]:
        """Return the rulings on steps before ``end``, on whose states both parties agree; one that convicts the trainer ends it.

        The auditor's objection to a log, and the first step that the parties' records describe differently, the earlier
        first. Behind a log that cannot be followed the auditor went its own way, and its records differ honestly.
        """
        pending: list[tuple[int, Callable[[], Ground | None]]] = []
        if objection is not None and objection.step < end:
            pending.append((objection.step, lambda: self._rule_on_log(objection)))
            end = objection.step + 1 if objection.site == "log" else end
        differing = next(
            (
                s
                for s in range(end)
                if record_claims(self.transcript.record(s))
                != record_claims(self.auditors_transcript.record(s))
            ),
            None,
        )
        if differing is not None:
            pending.append((differing, lambda: self._rule_on_records(differing)))
        found: list[Ground] = []
        for _, rule in sorted(pending, key=lambda each: each[0]):
            ground = rule()
            found += [] if ground is None else [ground]
            if ground is not None and ground.ruling.loser == "trainer":
                break
        return found

    def _rule_on_log(self, objection: LogObjection) -> Ground:
        state = self._agreed_state(objection.step)
        entries = None if state is None else state.entries
        found = rule_on_log(self.trainer, self.transcript, self.replay, objection, entries)
        asked = self._question("log", objection.step, state, objection=objection)
        ruling, outcome = self._confirmed(asked, found.ruling, found.outcome)
        return Ground(objection.step, ruling, outcome, objection=objection)

    def _agreed_state(self, step: int) -> HeldState | None:
        """Return the state before ``step``, which both agree on, from whichever side can open it."""
        return next((s for trace in self.traces.values() if (s := trace.witness_at(step)) is not None), None)

    def _rule_on_records(self, step: int) -> Ground | None:
        who = self.who_misstates(step)
        if who is None:
            return None
        ruling, outcome = self._confirmed(self._question("records", step, self._agreed_state(step)), *who)
        pair = (self.transcript.prove_step(step), self.auditors_transcript.prove_step(step))
        return Ground(step, ruling, outcome, records=pair)

    def _question(self, kind: str, step: int, agreed: HeldState | None, **more: Any) -> Question | None:
        """Return the question for the panel; None for a member of one."""
        if self.source is None:
            return None
        return Question(kind, self.trainer.path, self.auditor.path, self.source, step, agreed=agreed, **more)

    def _confirmed(self, question: Question | None, ruling: Ruling, outcome: str) -> tuple[Ruling, str]:
        """Return a ruling and its outcome as they stand once the panel has been asked: it convicts with one voice or not."""
        if ruling.loser == "none" or question is None:
            return ruling, outcome
        with self.ledger.charging("judge", "panel"):
            dissent = find_dissent(question, ruling.loser)
        if dissent is None:
            return ruling, outcome
        return Ruling("none", f"step {question.step}: not proven: {dissent}; {ruling.reason}"), NOT_PROVEN

    @property
    def ledger(self) -> Ledger:
        """What the parties and the judge spend."""
        return self.traces["trainer"].ledger

    def confirms_structure(self, agreed: HeldState, step: int, at: int, structure: bytes) -> str | None:
        """Return which arithmetics list another operator at leaf ``at`` of the job's step than the judge; None if none does."""
        question = self._question("structure", step, agreed, at=at)
        if question is None:
            return None
        with self.ledger.charging("judge", "panel"):
            return find_dissent(question, structure.hex())

    def who_misstates(self, step: int) -> tuple[Ruling, str] | None:
        """Return who misstates a step on whose states both agree, and the outcome; None if the difference is nobody's fault.

        Logs and what is derived from them may differ honestly.
        """
        state = self._agreed_state(step)
        if state is None:
            return Ruling("none", f"step {step}: neither side can open the state both agree on"), CANNOT
        load_state(self.replay.session, state.entries)
        record = self.transcript.record(step)
        try:
            frame = self.trainer.load_frames(self.transcript, step, step + 1)[step]
            outcome, _ = self.replay.follow(record, frame)
        except (InvalidInput, Mismatch) as problem:
            return Ruling("trainer", f"step {step}: the log cannot be followed: {problem}"), "fault"
        except Nondeterminism as problem:
            return Ruling("none", f"step {step}: the judge cannot repeat the step: {problem}"), CANNOT
        statements: dict[Party, StepRecord] = {
            "trainer": record,
            "auditor": self.auditors_transcript.record(step),
        }
        for party, stated in statements.items():
            found = compare_step(stated, outcome, [])
            if not found:
                continue
            if all(each.subject == BATCH_DIGEST for each in found) and self.replay.may_be_noise(step):
                return Ruling("none", f"step {step}: {DATA_NOISE_REASON.format(party)}"), CANNOT
            noisy = find_noisy_sites(self.replay, self.transcript, step, step, {step: frame}, state.entries)
            if all(is_excused(deviation, noisy) for deviation in found):
                why = f"step {step}: the judge cannot reproduce what the {party} did: {noisy[0]}"
                return Ruling("none", why), CANNOT
            first = found[0]
            why = f"step {step}: {first.subject} is {first.own}, the {party} says {first.stated}"
            return Ruling(party, why), "fault"
        return None

    def rule(self, position: DisputedPosition, witnesses: Mapping[Party, object]) -> Ruling:
        """Return who is at fault at ``position``; the parties' states are asked for here, one at a time."""
        del witnesses
        ruling = self._rule(position)
        if ruling.loser == "none" or self.source is None:
            return ruling
        states = {party: trace.witness_at(position.disputed) for party, trace in self.traces.items()}
        asked = self._question(
            "state", position.agreed, self.opened(position.agreed, position.agreed_commitment), position=position,
            states={party: state for party, state in states.items() if state is not None},
        )  # fmt: skip
        ruling, self.outcome = self._confirmed(asked, ruling, self.outcome)
        return ruling

    def _rule(self, position: DisputedPosition) -> Ruling:
        step = self.step = position.agreed
        record = self.transcript.record(step)
        # 1. Somebody opens the agreed commitment.
        state = self.opened(position.agreed, position.agreed_commitment)
        if state is None:
            self.outcome = "cannot_reproduce"
            return Ruling("none", f"step {step}: neither side can open the state both agree on")
        # 2. The trainer's record speaks of the job's own data.
        own_batch = batch_digest(self.replay.job.batch(step))
        if own_batch != record.batch:
            if self._is_data_noise("trainer", position, state):
                self.outcome = CANNOT
                return Ruling("none", f"step {step}: {DATA_NOISE_REASON.format('trainer')}")
            return Ruling(
                "trainer",
                f"step {step}: the committed batch {record.batch[:16]}.. is not the job's, {own_batch[:16]}..",
            )
        # 3. The trainer's log is there and well formed.
        try:
            frame = self.trainer.load_frames(self.transcript, step, step + 1)[step]
            decode_frame(frame)
        except (InvalidInput, Mismatch) as problem:
            return Ruling("trainer", f"step {step}: the log cannot be used: {problem}")
        # 4. The step, repeated from the agreed state under the trainer's log.
        load_state(self.replay.session, state.entries)
        try:
            repeated = AcceptableStates(self.replay, frame)
        except InvalidInput as problem:
            return Ruling("trainer", f"step {step}: the log cannot be followed: {problem}")
        except Nondeterminism as problem:
            return self._rule_without_log(step, state, problem)
        # 5. Hyper-parameters are the job's.
        schedule = [
            d
            for d in compare_step(record, repeated.outcome, [])
            if d.subject.startswith(("hyper", "skipped", "micro"))
        ]
        if schedule:
            return Ruling("trainer", str(schedule[0]))
        # 6. Entries and headers that honest arithmetic could not have written; then both states, element by element.
        faults = {party: self._find_fault(party, position, repeated) for party in self.traces}
        if repeated.violations:
            violation = repeated.violations[0]
            faults["trainer"] = Deviation(
                step,
                "log_violation",
                violation.site.removeprefix(f"step {step}: "),
                violation.element,
                violation.rule,
                "an honest log",
            )
        # 7. A fault that this machine's own noise can explain is nobody's.
        noisy = (
            find_noisy_sites(self.replay, self.transcript, step, step, {step: frame}, state.entries)
            if any(faults.values())
            else []
        )
        parties: tuple[Party, Party] = ("trainer", "auditor")
        for party in parties:
            fault = faults[party]
            excused = fault is not None and is_excused(fault, noisy)
            if excused and not self._is_far(party, position, state, repeated):
                self.outcome = "cannot_reproduce"
                return Ruling(
                    "none", f"step {step}: the judge cannot reproduce what the {party} did: {noisy[0]}"
                )
        if faults["trainer"] is not None:
            return Ruling("trainer", str(faults["trainer"]))
        if faults["auditor"] is not None:
            other_data = self.auditors_transcript.record(step).batch != own_batch
            if other_data and self._is_data_noise("auditor", position, state):
                self.outcome = CANNOT
                return Ruling("none", f"step {step}: {DATA_NOISE_REASON.format('auditor')}")
            return Ruling("auditor", str(faults["auditor"]))
        self.outcome = "both_acceptable"
        return Ruling("none", f"step {step}: honest arithmetic can give both states")

    def _is_data_noise(self, party: Party, position: DisputedPosition, before: HeldState) -> bool:
        """Whether floating noise in the data explains the state that ``party`` claims after the disputed step.

        Where nobody can open that claim (a party played on this machine, with other bits in its data), the states that the
        party committed to on both sides of the step are compared instead.
        """
        step, session, trace = position.agreed, self.replay.session, self.traces[party]
        if not self.replay.may_be_noise(step):
            return False
        steps = range(step, step + 1)
        first: HeldState | None = before
        claimed = trace.witness_at(position.disputed)
        directory, transcript = self.trainer, self.transcript
        if claimed is None:
            steps, first, claimed = trace.committed_around(step)
            directory, transcript = trace.directory, trace.transcript
        if first is None or claimed is None:
            return False
        states: list[dict[str, Entry]] = []
        try:
            frames = directory.load_frames(transcript, steps.start, steps.stop)
            for bracket in (nullcontext(Shaking()), shaking(self.replay.job, self.replay.noisy)):
                load_state(session, first.entries)
                with bracket as shaken:
                    for each in steps:
                        self.replay.follow(transcript.record(each), frames[each])
                states.append(copied_state(session))
        except (InvalidInput, Mismatch, Nondeterminism):
            return False
        return is_explained(first.entries, states[0], states[1], claimed.entries, shaken.most_share)

    def _is_far(
        self, party: Party, position: DisputedPosition, before: HeldState, repeated: AcceptableStates
    ) -> bool:
        """Whether the party's state lies farther from the judge's than noise carries it in one step."""
        state = self.traces[party].witness_at(position.disputed)
        if state is None:
            return False
        return farther_than_trained(before.entries, repeated.entries, state.entries) is not None

    def _rule_without_log(self, step: int, state: HeldState, problem: Nondeterminism) -> Ruling:
        """Rule where the step does not come to an end: the log is to blame only if the job's own step does without it."""
        session = self.replay.session
        load_state(session, state.entries)
        try:
            run_step(session, self.replay.job, session.record_tape(session.table))
        except (InvalidInput, Nondeterminism) as own:
            self.outcome = "cannot_reproduce"
            return Ruling("none", f"step {step}: the judge cannot repeat the job's own step: {own}")
        return Ruling("trainer", f"step {step}: the log cannot be followed: {problem}")

    def opened(self, index: int, commitment: bytes) -> HeldState | None:
        """Return the state after ``index`` steps that opens ``commitment``, from whichever side has it, or None."""
        for trace in self.traces.values():
            state = trace.witness_at(index)
            if state is not None and state.root == commitment:
                return state
        return None

    def _find_fault(
        self, party: Party, position: DisputedPosition, repeated: AcceptableStates
    ) -> Deviation | None:
        state = self.traces[party].witness_at(position.disputed)
        if state is None and (problem := self.traces[party].find_unopened_checkpoint(position.agreed)):
            return Deviation(position.agreed, "mismatch", EVIDENCE, None, problem, f"the {party}'s own root")
        if state is None or state.root != position.claims[party]:
            own = f"{repeated.outcome.fingerprint:016x}"
            return Deviation(
                position.agreed,
                "mismatch",
                FINGERPRINT,
                None,
                own,
                f"another one, which the {party} cannot open",
            )
        record = (self.transcript if party == "trainer" else self.auditors_transcript).record(position.agreed)
        if record.state_root is not None:
            try:
                check_fingerprint(record, state.entries)
            except Mismatch as problem:
                return Deviation(
                    position.agreed, "mismatch", EVIDENCE, None, str(problem), f"the {party}'s own"
                )
        return repeated.find_fault(state.entries)


class AcceptableStates:
    """The states after one step that honest arithmetic within the bands can give; the session stands before it."""

    def __init__(self, replay: Replay, frame: bytes) -> None:
        before = copied_state(replay.session)
        self.step = replay.session.step
        session = replay.session
        plain = session.follow_tape(frame)
        base, sites = plain.base, plain.sites
        tape = _TwoWayTape(session.policy, session.table, decode_frame(frame), base, sites=sites)
        self.outcome = run_step(session, replay.job, tape)
        tape.finish()
        session.settle(tape)
        self.violations = tape.violations
        self.entries = copied_state(session)
        self.values = tape.candidates
        self.flipped: dict[tuple[int, int], Candidates] = {}
        if any(kind == Kind.GRADIENT and c.index.size for (kind, _), c in tape.candidates.items()):
            load_state(session, before)
            other = _TwoWayTape(
                session.policy, session.table, decode_frame(frame), base, sites=sites, flip=True
            )
            run_step(session, replay.job, other)
            self.flipped = other.candidates
            self.other_entries = copied_state(session)
        else:
            self.other_entries = self.entries
        self.names = ["parameter", *session.optimizer_keys]
        self.parameters = [name for name, _ in session.parameters]
        self.buffers: dict[str, list[tuple[int, int]]] = {}
        for site in session.sites:
            if site.kind in (Kind.BUFFER, Kind.STATE):
                self.buffers.setdefault(site.name, []).append((int(site.kind), site.ordinal))

    def find_fault(self, state: State) -> Deviation | None:
        """Return the first difference between ``state`` and what is acceptable, or None."""
        _, differences = compare_states(self.step, self.entries, state)
        if not differences:
            return None
        trained = {f"model/{name}": position for position, name in enumerate(self.parameters)}
        trained |= {
            f"optimizer/{name}/{key}": position
            for position, name in enumerate(self.parameters)
            for key in self.names[1:]
        }
        for difference in differences:
            position = trained.get(difference.subject)
            if not _has_form_of(state.get(difference.subject), self.entries.get(difference.subject)):
                return difference
            if position is None:
                if not self._buffer_is_acceptable(difference.subject, state):
                    return difference
            elif self._find_bad_element(position, state) is not None:
                return difference
        return None

    def _buffer_is_acceptable(self, subject: str, state: State) -> bool:
        theirs = _floats(state[subject])
        found = np.zeros(theirs.shape, dtype=bool)
        for place in self.buffers.get(subject, []):
            # An average follows the weights, so it too has a value for each of the two gradients.
            for entries, values in ((self.entries, self.values), (self.other_entries, self.flipped)):
                own = _floats(entries[subject])
                if own.shape != theirs.shape:
                    return False
                found |= _matches(own, theirs, values.get(place))
        return bool(found.all())

    def _find_bad_element(self, position: int, state: State) -> int | None:
        """Return the first element of a parameter, together with its optimizer state, that neither gradient choice explains."""
        plain: np.ndarray | None = None
        other: np.ndarray | None = None
        for offset, key in enumerate(self.names):
            name = self.parameters[position]
            subject = f"model/{name}" if key == "parameter" else f"optimizer/{name}/{key}"
            if subject not in self.entries:
                continue
            own, flipped = _floats(self.entries[subject]), _floats(self.other_entries[subject])
            if subject not in state or len(state[subject].data) != len(self.entries[subject].data):
                return 0
            theirs = _floats(state[subject])
            place = (int(Kind.STATE), position * len(self.names) + offset)
            first = _matches(own, theirs, self.values.get(place))
            second = _matches(flipped, theirs, self.flipped.get(place))
            if own.size == 1 and plain is not None and plain.size > 1:
                if not (first | second).all():
                    return 0  # one number for the whole tensor: no element's gradient chooses it
                continue
            plain = first if plain is None else plain & first
            other = second if other is None else other & second
        if plain is None or other is None:
            return None
        gradient = self.values.get((int(Kind.GRADIENT), position))
        may_flip = np.zeros(plain.shape, dtype=bool)
        if gradient is not None and gradient.index.size:
            may_flip[gradient.index] = True
        bad = np.flatnonzero(~(plain | (other & may_flip)))
        return int(bad[0]) if bad.size else None


def _floats(entry: Entry) -> np.ndarray:
    return (
        np.frombuffer(entry.data, dtype="<f4")
        if entry.dtype == "F32"
        else np.frombuffer(entry.data, dtype=np.uint8)
    )


def _matches(own: np.ndarray, theirs: np.ndarray, candidates: Candidates | None) -> np.ndarray:
    bits = "<u4" if own.dtype.itemsize == 4 else "u1"
    same = own.view(bits) == theirs.view(bits)
    if candidates is not None and candidates.index.size:
        at = candidates.index
        value = theirs[at].astype(np.float64)
        same[at] |= (value == candidates.lower) | (value == candidates.upper)
    return same


@dataclass
class _TwoWayTape(FollowTape):
    """Follows a frame and notes, for every site but activations, which elements could have gone the other way.

    With ``flip`` each such gradient element does go the other way.
    """

    flip: bool = False
    candidates: dict[tuple[int, int], Candidates] = field(default_factory=dict[tuple[int, int], Candidates])

    def round(self, kind: Kind, ordinal: int, x: Tensor, *, out: Tensor, old: Tensor | None = None,
              key: Key = NO_KEY, name: str) -> None:  # fmt: skip
        """Round as the log says, after noting both values of every element near a boundary."""
        grid = self.table.sites.get((kind, ordinal))
        found: Candidates | None = None
        if grid is not None and (not grid.scales.size or x.numel() % grid.scales.size == 0):
            found = find_candidates(x, grid, old=old, key=key)
            self.candidates[(int(kind), ordinal)] = found
        super().round(kind, ordinal, x, out=out, old=old, key=key, name=name)
        if self.flip and kind == Kind.GRADIENT and found is not None and found.index.size:
            flat = out.reshape(-1)
            at = torch.from_numpy(found.index).to(flat.device)
            lower, upper = torch.from_numpy(found.lower).to(flat), torch.from_numpy(found.upper).to(flat)
            flat[at] = torch.where(flat[at] == lower, upper, lower)
