"""The judge: two parties' transcripts differ; find the first step on which they part, repeat it, and rule.

The bisection is played by ``dispute.bisection`` on each side's commitments: roots at checkpoints first, then a root
for every step of the disputed segment, which both sides repeat. The judge then holds the agreed state before the
disputed step, the job and the trainer's log of that step, and nothing else.

A state is acceptable if every element is a value that honest arithmetic within the declared bands can give: where the
judge's own gradient or state lies within the band of a rounding boundary, both neighbours will do. (This holds element
by element, so the optimizer must be elementwise; every optimizer that ``policy`` accepts today is.) Where the
optimizer's arithmetic is portable the state has no bands: for each choice of the gradient one state is acceptable.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from tallystick.commit.state import (
    CHUNK_BYTES,
    SUMMARY_LIMIT,
    Entry,
    EntrySummary,
    HeldState,
    StateSummary,
    hold,
    parse_state_summary,
    summarise,
)
from tallystick.dispute.bisection import Claim, Game, Level, Silence, apply, open_game, receive
from tallystick.dispute.bounds.steps import StepFacts, needs_log
from tallystick.dispute.exchange import Answer, ForfeitError, Question, Table, ask_one, size_of
from tallystick.dispute.moves import hash_in
from tallystick.dispute.operator_list import Objection
from tallystick.dispute.record import GRIDS_ENTRY, DisputeRecord, StepsGame
from tallystick.dispute.signed_moves import Terms
from tallystick.dispute.terms import PARTIES, DisputedPosition, Party, Ruling
from tallystick.dispute.verdict import FORFEIT, LogObjection, Pair, Verdict, record_claims
from tallystick.errors import InvalidInput, Mismatch, Nondeterminism
from tallystick.execution.hashing import leaf_hashes
from tallystick.execution.job import JobSource
from tallystick.execution.program import verify_program
from tallystick.execution.rounding.follow import FollowTape
from tallystick.execution.snapshot import copied_state, load_state, state_entries
from tallystick.execution.step import batch_digest, run_step
from tallystick.numerics.log import Kind, decode_frame
from tallystick.numerics.rounding import NO_KEY, Candidates, Key, find_candidates
from tallystick.roles.auditor import (
    BATCH_DIGEST,
    EVIDENCE,
    FINGERPRINT,
    Deviation,
    Replay,
    compare_states,
    compare_step,
    farther_than_trained,
    find_noisy_sites,
    is_excused,
    open_program,
    open_replay,
)
from tallystick.roles.costs import Ledger
from tallystick.roles.data_noise import REMEDY, Shaking, is_explained, shaking
from tallystick.roles.initial_state import DOCUMENTS, find_other_setting
from tallystick.roles.log_judge import rule_on_log
from tallystick.roles.operator_dispute import OperatorDispute, OperatorResult, Signing, list_base
from tallystick.roles.panel import Panel
from tallystick.roles.parties import LocalTable, RecordedTrace, Respondent
from tallystick.roles.rebuilt import find_unsteady
from tallystick.roles.signed_before import FILE, SignedBefore
from tallystick.run.documents import Specification, StepRecord
from tallystick.run.transcript import CURSOR, Transcript, check_cursor, check_fingerprint
from tallystick.signing.keys import PublicKey, Signer
from tallystick.store.docket import Docket
from tallystick.store.files import RunDirectory, frame_digest

CANNOT = "cannot_reproduce"
NOT_PROVEN = "not_proven"
LARGER_STATE, LARGER_BY = (
    8,
    1 << 26,
)  # times the job's own first state, and bytes: what a state may have at most
DATA_NOISE_REASON = (
    f"the {{}}'s data differ from the judge's by no more than floating noise explains; {REMEDY}"
)
State = Mapping[str, Entry]


@dataclass(frozen=True)
class DisputeResult:
    """How a dispute ended.

    Attributes:
        loser: ``trainer``, ``auditor`` or ``none``.
        outcome: ``fault`` (somebody loses), ``agreement`` (nothing is in dispute), ``both_acceptable`` (honest arithmetic
            can give either state), ``not_proven`` (arithmetics of the judge's own machine disagree on who is at fault),
            ``cannot_reproduce`` (the judge could not find out; after these two nobody is cleared), or ``forfeit`` (somebody
            did not answer in time, or contradicted itself).
        step: the disputed step, or None if nothing was in dispute.
        rounds: of bisection, all levels together.
        rounds_per_level: the same, by level.
        reason: in words.
        moves: every claim that was made: (party, steps done, commitment in hexadecimal).
        operator: how level three ended; None if it was not played.
        record: the portable record (``dispute.record``) of a dispute that ended at an operator.
        ends, records, objection: what the verdict rests on (``dispute.verdict``).
        ledger: what each party spent; no part of the verdict.
        runs: roots of the trainer's and the auditor's run that were judged, in hexadecimal.
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
    runs: tuple[str, str] = ("", "")

    @property
    def accuses(self) -> bool:
        """Whether somebody loses for what was computed, not for silence."""
        return self.loser != "none" and self.outcome == "fault"

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
    replay = open_job(ours.specification, source)
    own = replay if defence is None else defence(ours.specification)
    keys: dict[Party, PublicKey] = {party: each.public_key for party, each in (signers or {}).items()}
    ledger, hands = Ledger(), signers or {}
    traces: dict[Party, RecordedTrace] = {
        "trainer": RecordedTrace(trainer, ours, own, "trainer", ledger),
        "auditor": RecordedTrace(auditor, theirs, replay, "auditor", ledger),
    }
    parties: dict[Party, Respondent] = {
        "trainer": Respondent(traces["trainer"], theirs.root(), signer=hands.get("trainer")),
        "auditor": Respondent(
            traces["auditor"], ours.root(), signer=hands.get("auditor"), objection=objection
        ),
    }
    try:
        panel = Panel(trainer.path, auditor.path, source, ledger)
        referee = Referee(
            LocalTable(parties), ours, theirs, replay, auditor.load_objection(), level,
            Signing(keys, asked or {}), answers_itself=defence is not None, ledger=ledger, panel=panel,
        )  # fmt: skip
        result = referee.rule()
        verify_program(source.program, ours.specification.job.program, accusing=result.accuses)
        return result
    finally:
        replay.session.close()
        if own is not replay:
            own.session.close()


def referee(docket: Docket, source: JobSource) -> DisputeResult:
    """Go on with the dispute on disk and return the ruling.

    Raises:
        AwaitingError: an answer is missing.
        InvalidInput, Mismatch, Nondeterminism, OtherProgram: as ``dispute``.
    """
    directories = [docket.run(party) for party in PARTIES]
    ours, theirs = (directory.load_transcript() for directory in directories)
    replay, keys, ledger = open_job(ours.specification, source), docket.exchange.keys, Ledger()
    panel = Panel(directories[0].path, directories[1].path, source, ledger, docket.path / "panel")
    try:
        referee = Referee(
            docket, ours, theirs, replay, directories[1].load_objection(), docket.exchange.level,
            Signing(keys, keys), answers_itself=True, ledger=ledger, panel=panel,
        )  # fmt: skip
        result = referee.rule()
        verify_program(source.program, ours.specification.job.program, accusing=result.accuses)
        return result
    finally:
        replay.session.close()


def respondent(
    directory: RunDirectory, source: JobSource, party: Party, other_run: bytes, signer: Signer
) -> Respondent:
    """Return the party that answers for a run with its own program; the auditor's must be the job's.

    Raises:
        InvalidInput, Mismatch: the run's documents are malformed, or contradict each other.
        Nondeterminism: this machine cannot repeat the job.
    """
    transcript, memory = directory.load_transcript(), SignedBefore(directory.path / FILE)
    specification = transcript.specification
    if party == "trainer":
        trace = RecordedTrace(directory, transcript, defend_with(source)(specification), party, Ledger())
        return Respondent(trace, other_run, signer=signer, memory=memory)
    trace = RecordedTrace(directory, transcript, open_job(specification, source), party, Ledger())
    return Respondent(
        trace,
        other_run,
        signer=signer,
        verify=lambda: verify_program(source.program, specification.job.program),
        memory=memory,
    )


def open_job(specification: Specification, source: JobSource) -> Replay:
    """Return a replay of the job.

    Raises:
        Nondeterminism: this machine cannot repeat it.
    """
    replay = open_replay(specification, source)
    if isinstance(replay, Deviation):
        raise Nondeterminism(
            f"this machine cannot repeat the job: {replay.subject} is {replay.own}, the run has {replay.stated}"
        )
    return replay


class Witness(Protocol):
    """What a judge of one step asks of a party."""

    def witness_at(self, index: int, names: Sequence[str] | None = None) -> HeldState | None:
        """Return the state after ``index`` steps, or entries of it; None if the party cannot open it."""
        ...

    def commitment_at(self, index: int) -> bytes:
        """Return what the party claims for the state after ``index`` steps."""
        ...

    def find_unopened_checkpoint(self, index: int) -> str | None:
        """Return why the party cannot open its own last checkpoint up to ``index``, or None if it can."""
        ...

    def frame(self, step: int) -> bytes:
        """Return the trainer's log of a step.

        Raises:
            InvalidInput: there is none.
        """
        ...


class Seat:
    """What the referee knows of one party, and how it asks for more; nothing is asked for twice.

    A state of more than ``most`` bytes is not taken: the party that claims it cannot open it.
    """

    def __init__(
        self, table: Table, party: Party, transcript: Transcript, hints: Mapping[str, object], most: int
    ) -> None:
        self.table, self.transcript, self.hints, self.most = table, transcript, hints, most
        self.party: Party = party
        self.claims = {c.steps_done: bytes.fromhex(c.state_root) for c in transcript.checkpoints()}
        self.claims[0] = bytes.fromhex(transcript.specification.initial_state)
        self._summaries: dict[int, StateSummary | str] = {}
        self._states: dict[tuple[int, tuple[str, ...]], HeldState | None] = {}
        self._frames: dict[int, bytes | str] = {}

    def question(self, index: int) -> Question:
        """Return the question for the state's root after ``index`` steps."""
        return Question(self.party, "claim", {"index": index, **self.hints})

    def commitment_at(self, index: int) -> bytes:
        """Return what the party claims for the state after ``index`` steps: what it published, else what it answers."""
        if index not in self.claims:
            self.claims[index] = ask_one(self.table, self.question(index), read_claim)
        return self.claims[index]

    def summary_at(self, index: int) -> StateSummary | str:
        """Return the summary of the state that opens the party's claim, or why there is none."""
        if index not in self._summaries:
            root = self.commitment_at(index)

            def read(answer: Answer) -> StateSummary | str:
                if answer.cannot is not None:
                    return answer.cannot
                (part,) = answer.expect_parts(1)
                summary = parse_state_summary(bytes(part))
                if summary.root() != root:
                    raise Mismatch(
                        f"answer: the summary is of state {summary.root().hex()}, claimed is {root.hex()}"
                    )
                if (size := sum(entry.nbytes for entry in summary.entries)) > self.most:
                    return f"the state has {size} bytes, at most {self.most} are taken"
                return summary

            question = Question(self.party, "summary", {"index": index}, (), SUMMARY_LIMIT)
            self._summaries[index] = ask_one(self.table, question, read)
        return self._summaries[index]

    def witness_at(self, index: int, names: Sequence[str] | None = None) -> HeldState | None:
        """Return the state that opens the party's claim, all of it or the entries of those names; None if it cannot open it."""
        summary = self.summary_at(index)
        if isinstance(summary, str):
            return None
        entries = [entry for entry in summary.entries if names is None or entry.name in names]
        wanted = tuple(entry.name for entry in entries)
        if (index, wanted) not in self._states:
            body = {"index": index, "names": list(wanted)}
            question = Question(self.party, "entries", body, (), sum(entry.nbytes for entry in entries))
            self._states[(index, wanted)] = ask_one(
                self.table, question, partial(_read_entries, entries, summary)
            )
        return self._states[(index, wanted)]

    def find_unopened_checkpoint(self, index: int) -> str | None:
        """Return why the party cannot open its own last checkpoint up to ``index``, or None if it can."""
        start = max(c.steps_done for c in self.transcript.checkpoints() if c.steps_done <= index)
        summary = self.summary_at(start)
        return summary if isinstance(summary, str) else None

    def frame(self, step: int) -> bytes:
        """Return the trainer's log of a step, which its record names.

        Raises:
            InvalidInput: the trainer says that it has none.
        """
        if step not in self._frames:
            record = self.transcript.record(step)

            def read(answer: Answer) -> bytes | str:
                if answer.cannot is not None:
                    return answer.cannot
                data = bytes(answer.expect_parts(1)[0])
                if frame_digest(data) != record.log:
                    raise Mismatch(f"answer: the log of step {step} is not the one that its record names")
                return data

            question = Question(self.party, "frame", {"step": step}, (), record.log_bytes)
            self._frames[step] = ask_one(self.table, question, read)
        found = self._frames[step]
        if isinstance(found, str):
            raise InvalidInput(found)
        return found


def read_claim(answer: Answer) -> bytes:
    """Return the root that an answer claims."""
    answer.expect_parts(0)
    return hash_in(answer.fields("commitment").text("commitment"), "a commitment")


def _read_entries(entries: Sequence[EntrySummary], summary: StateSummary, answer: Answer) -> HeldState | None:
    if answer.cannot is not None:
        return None
    held: dict[str, Entry] = {}
    for stated, part in zip(entries, answer.expect_parts(len(entries)), strict=True):
        if size_of(part) != stated.nbytes:
            raise InvalidInput(
                f"answer: entry {stated.name!r} has {stated.nbytes} bytes, got {size_of(part)}"
            )
        held[stated.name] = Entry(stated.name, stated.dtype, stated.shape, memoryview(part))
    with ThreadPoolExecutor(os.cpu_count() or 1, "tally-hash") as pool:
        found = summarise(held.values(), pool=pool, leaves=leaf_hashes)
    if list(found.entries) != list(entries):
        raise Mismatch("answer: the entries are not those of the summary")
    return HeldState(held, summary)


@dataclass
class Referee:
    """Leads one dispute: asks both parties at ``table``, and rules.

    Attributes:
        table: where it asks.
        ours, theirs: the trainer's transcript and the auditor's.
        replay: the job, which it repeats where it has to judge.
        objection: what the auditor's claim objects to in the trainer's log, or None.
        level: ``operators`` or ``steps``.
        signing: whose signatures over operators count.
        answers_itself: whether the trainer plays its own part with its own program.
        ledger: what each party spent.
        panel: whom it asks before it convicts on what it computed.
    """

    table: Table
    ours: Transcript
    theirs: Transcript
    replay: Replay
    objection: LogObjection | None
    level: str
    signing: Signing
    answers_itself: bool
    ledger: Ledger
    panel: Panel

    def rule(self) -> DisputeResult:
        """Play the dispute and return the ruling.

        Raises:
            InvalidInput, Mismatch: the auditor's objection is not one to this run.
        """
        hints = {"suspected": find_parting(self.ours, self.theirs), "traced": self.level == "operators"}
        own = sum(memoryview(entry.data).nbytes for entry in state_entries(self.replay.session))
        most = LARGER_STATE * own + LARGER_BY
        self.seats: dict[Party, Seat] = {
            "trainer": Seat(self.table, "trainer", self.ours, hints, most),
            "auditor": Seat(self.table, "auditor", self.theirs, hints, most),
        }
        runs = self.ours.root().hex(), self.theirs.root().hex()
        self.played = DisputeResult("none", None, 0, {}, "", ledger=self.ledger, runs=runs)
        try:
            return self._rule()
        except ForfeitError as forfeit:
            loser = "none" if forfeit.loser == "both" else forfeit.loser
            return replace(self.played, loser=loser, reason=str(forfeit), outcome=FORFEIT)

    def _rule(self) -> DisputeResult:
        ours, theirs, seats, ledger = self.ours, self.theirs, self.seats, self.ledger
        checkpoints = [checkpoint.steps_done for checkpoint in ours.checkpoints()]
        objection = _checked_objection(self.objection, ours)
        if (begun := self._judged_beginning()) is not None:
            return begun
        claims = {party: [seat.commitment_at(done) for done in checkpoints] for party, seat in seats.items()}
        step_judge = StepJudge(ours, theirs, self.replay, seats, self.panel)
        # A false state in the middle is disputed too, where both sides end in the same one.
        last = next(
            (i for i in reversed(range(len(checkpoints))) if claims["trainer"][i] != claims["auditor"][i]),
            None,
        )
        if last is None:
            why = "both sides reached the same state"
            same = replace(self.played, reason=why, outcome="agreement")
            return _first_ground(step_judge.rule_on_agreed(ours.num_steps, objection), same)
        levels = [Level("checkpoints", checkpoints[: last + 1]), Level("steps", range(checkpoints[last] + 1))]
        agreed, trainers, auditors = claims["trainer"][0], claims["trainer"][last], claims["auditor"][last]
        ended = checkpoints[last] - 1
        self.played = replace(self.played, ends=(ours.prove_step(ended), theirs.prove_step(ended)))
        game = open_game(levels, agreed=agreed, trainer=trainers, auditor=auditors)
        game, rounds = self._bisect(game)
        position = game.position
        assert position is not None
        for party, claim in position.claims.items():
            seats[party].claims[position.disputed] = claim
        stated = tuple(move for move in game.log if isinstance(move, Claim))
        # What records and log say of the steps before, on whose states both agree, can be false all the same.
        earlier = step_judge.rule_on_agreed(position.agreed, objection)
        if any(ground.decides for ground in earlier):
            return _first_ground(earlier, self.played)
        found: OperatorResult | None = None
        written: bytes | None = None
        if self.level == "operators":
            case = self._operator_case(step_judge, position)
            found = None if case is None else case.play()
            if found is not None and ledger.steps:
                found = replace(found, step_seconds=min(step.wall for step in ledger.steps))
            if case is not None and found is not None:
                ends: dict[Party, bytes] = {"trainer": trainers, "auditor": auditors}
                steps = StepsGame(tuple(checkpoints[: last + 1]), agreed, ends, stated)
                written = _record_of(ours, theirs, case.agreed, steps, position, found)
        if found is not None and found.rounds:
            rounds["operators"] = found.rounds
        played = replace(self.played, rounds=sum(rounds.values()), rounds_per_level=rounds, operator=found)
        ruling: Ruling | None = None
        if found is not None and found.loser == "trainer" and not self.answers_itself:
            # The trainer's part was played by the job's program on this machine, whose noise may be to blame for where it
            # ended: the whole step is judged as well, and only if that convicts too does the operator stand.
            ruling = step_judge.rule(position)
            if ruling.loser != "trainer":
                why = f"the trainer did not answer itself, and the whole step does not convict it: {found.reason}"
                found, written = replace(found, loser=None, reason=why, evidence=None), None
                played = replace(played, operator=found)
        if found is not None and found.loser is not None:
            reason = f"step {game.agreed}: {found.reason}"
            result = replace(played, loser=found.loser, step=game.agreed, reason=reason, record=written)
        else:
            ruling = ruling or step_judge.rule(position)
            result = replace(
                played,
                loser=ruling.loser,
                step=step_judge.step,
                reason=ruling.reason,
                outcome=step_judge.outcome,
            )
        # Who objects falsely to a log loses, unless the trainer's state convicts the trainer all the same.
        return result if result.loser == "trainer" else _first_ground(earlier, result)

    def _judged_beginning(self) -> DisputeResult | None:
        trainer = self.seats["trainer"]
        other = find_other_beginning(trainer, self.replay)
        if other is None:
            return None
        why = f"step 0: the first state is not the job's: {other}"
        dissent = find_unsteady(self.panel.trainer, self.panel.source, 0) or self.panel.find_dissent(
            "beginning", "trainer", 0, agreed=trainer.witness_at(0, DOCUMENTS)
        )
        if dissent is None:
            return replace(self.played, loser="trainer", step=0, reason=why)
        reason = f"{why}; not proven: {dissent}"
        return replace(self.played, step=0, reason=reason, outcome=NOT_PROVEN)

    def _bisect(self, game: Game) -> tuple[Game, dict[str, int]]:
        """Play until one step is disputed; return the game and the rounds of each level.

        Raises:
            ForfeitError: a party did not answer in time.
        """
        rounds: dict[str, int] = {}
        while game.position is None:
            name, index = game.level.name, game.midpoint
            assert index is not None
            asked: dict[Party, Question] = {
                party: seat.question(index) for party, seat in self.seats.items() if index not in seat.claims
            }
            replies = self.table.ask(asked, lambda _, answer: read_claim(answer)) if asked else {}
            for party, seat in self.seats.items():
                if party in replies:
                    seat.claims[index] = replies[party]
                if index in seat.claims:
                    game = receive(game, party, Claim(party, index, seat.claims[index]))
            if len(replies) < len(asked):
                game = apply(game, Silence(self.table.deadline))
                assert game.outcome is not None
                raise ForfeitError(game.outcome.loser, game.outcome.reason)
            rounds[name] = rounds.get(name, 0) + 1
            claims = [move for move in game.log if isinstance(move, Claim)]
            self.played = replace(
                self.played, rounds=sum(rounds.values()), rounds_per_level=dict(rounds),
                moves=[(move.party, move.index, move.commitment.hex()) for move in claims],
            )  # fmt: skip
        return game, rounds

    def _operator_case(self, judge: StepJudge, position: DisputedPosition) -> OperatorDispute | None:
        """Return the case for level three, or None where the step fails before any operator: no state, other data, no log."""
        step = position.agreed
        record = self.ours.record(step)
        state = judge.opened(step, position.agreed_commitment, (GRIDS_ENTRY, CURSOR))
        if state is None:
            return None
        try:
            check_cursor(step, state.entries)
        except Mismatch:
            return None
        stated = {record.batch, self.theirs.record(step).batch}
        if GRIDS_ENTRY not in state.entries or stated != {batch_digest(self.replay.job.batch(step))}:
            return None
        try:
            frame = self.seats["trainer"].frame(step)
            decode_frame(frame)
        except (InvalidInput, Mismatch):
            return None
        facts = StepFacts(self.ours.specification, record, frame, bytes(state.entries[GRIDS_ENTRY].data))
        base, chunk = list_base(state, facts)
        terms = Terms(self.ours.root(), self.theirs.root(), step, base, position.claims)
        return OperatorDispute(
            self.table, step, state, lambda: judge.opened(step, position.agreed_commitment), facts,
            self.ours.prove_step(step), terms, chunk, self.replay, self.signing, self.ledger,
            confirms=lambda agreed, at, structure: self.panel.find_dissent(
                "structure", structure.hex(), step, agreed=agreed, frame=frame, at=at
            ),
        )  # fmt: skip


def _checked_objection(objection: LogObjection | None, ours: Transcript) -> LogObjection | None:
    """Return what the auditor's claim objects to in the trainer's log, or None.

    Raises:
        InvalidInput: the objection is to a step that the run does not have.
        Mismatch: it is about another run.
    """
    if objection is None:
        return None
    if objection.run != ours.root().hex():
        raise Mismatch(f"objection.json: objects to run {objection.run}, disputed is {ours.root().hex()}")
    if objection.step >= ours.num_steps:
        raise InvalidInput(f"objection.json: objects to step {objection.step}, the run has {ours.num_steps}")
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


def find_other_beginning(trainer: Witness, replay: Replay) -> str | None:
    """Return a number in the run's first state that is not the job's own, or None; both parties' runs begin there."""
    state = trainer.witness_at(0, DOCUMENTS)
    if state is None:
        return None  # judged where the state is asked for
    try:
        other = find_other_setting(replay.settings, state.entries)
    except (InvalidInput, Mismatch):
        return None
    return other.text if other is not None and other.is_number else None


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


def _has_form_of(entry: Entry | None, other: Entry | None) -> bool:
    return (
        entry is not None and other is not None and (entry.dtype, entry.shape) == (other.dtype, other.shape)
    )


@dataclass
class StepJudge:
    """Repeats one step from the agreed state and compares both sides' claims with what honest arithmetic allows.

    With a ``panel`` it asks that before it convicts anybody, but on bytes alone (``by_bytes``, of the last ruling).
    """

    transcript: Transcript
    auditors_transcript: Transcript
    replay: Replay
    seats: Mapping[Party, Witness]
    panel: Panel | None = None
    outcome: str = "fault"
    step: int | None = None
    by_bytes: bool = False
    _pasts: dict[int, HeldState | None] = field(default_factory=dict[int, "HeldState | None"])

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
        found = rule_on_log(self.seats["trainer"].frame, self.transcript, self.replay, objection, entries)
        ruling, outcome = self._confirmed(
            found.ruling, found.outcome, "log", objection.step, agreed=state, objection=objection
        )
        return Ground(objection.step, ruling, outcome, objection=objection)

    def _agreed_state(self, step: int) -> HeldState | None:
        """Return the state before ``step``, from whichever side can open it.

        No game has asked for it, so a party may claim another than the one that it trained. Then it is the one to which the
        trainer's own log leads from the last state before that both claim.
        """
        for start in (step, *(done for done in reversed(self._checkpoints) if done < step)):
            claims = {seat.commitment_at(start) for seat in self.seats.values()}
            if len(claims) == 1:
                state = self.opened(start, claims.pop())
                if state is None or start == step:
                    return state
                if step not in self._pasts:
                    self._pasts[step] = self._repeated(state, start, step)
                return self._pasts[step]
        return None

    @property
    def _checkpoints(self) -> list[int]:
        return [0, *(checkpoint.steps_done for checkpoint in self.transcript.checkpoints())]

    def _repeated(self, state: HeldState, start: int, step: int) -> HeldState | None:
        """Return the state before ``step``, repeated from that after ``start`` steps; None if the log does not lead there."""
        session = self.replay.session
        try:
            load_state(session, state.entries)
            for each in range(start, step):
                self.replay.follow(self.transcript.record(each), self.seats["trainer"].frame(each))
        except (InvalidInput, Mismatch, Nondeterminism):
            return None
        return hold(copied_state(session).values())

    def _rule_on_records(self, step: int) -> Ground | None:
        who = self.who_misstates(step)
        if who is None:
            return None
        ruling, outcome = self._confirmed(*who, "records", step, agreed=self._agreed_state(step))
        pair = (self.transcript.prove_step(step), self.auditors_transcript.prove_step(step))
        return Ground(step, ruling, outcome, records=pair)

    def _confirmed(
        self, ruling: Ruling, outcome: str, kind: str, step: int, **more: Any
    ) -> tuple[Ruling, str]:
        """Return a ruling and its outcome as they stand once the panel has been asked: it convicts with one voice or not."""
        if ruling.loser == "none" or self.panel is None or self.by_bytes:
            return ruling, outcome
        try:
            logged: dict[str, Any] = {"frame": self.seats["trainer"].frame(step)}
        except InvalidInput as problem:
            logged = {"no_frame": str(problem)}
        dissent = find_unsteady(self.panel.trainer, self.panel.source, step, more.get("agreed"))
        dissent = dissent or self.panel.find_dissent(kind, ruling.loser, step, **logged, **more)
        if dissent is None:
            return ruling, outcome
        return Ruling("none", f"step {step}: not proven: {dissent}; {ruling.reason}"), NOT_PROVEN

    def who_misstates(self, step: int) -> tuple[Ruling, str] | None:
        """Return who misstates a step on whose states both agree, and the outcome; None if the difference is nobody's fault.

        Logs and what is derived from them may differ honestly.
        """
        state, self.by_bytes = self._agreed_state(step), False
        if state is None:
            return Ruling("none", f"step {step}: neither side can open the state both agree on"), CANNOT
        try:
            check_cursor(step, state.entries)  # an honest auditor's own states all say what is so
        except Mismatch as problem:
            self.by_bytes = True
            return Ruling("trainer", str(problem)), "fault"
        load_state(self.replay.session, state.entries)
        record = self.transcript.record(step)
        try:
            frame = self.seats["trainer"].frame(step)
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

    def rule(self, position: DisputedPosition) -> Ruling:
        """Return who is at fault at ``position``; the parties' states are asked for here, one at a time."""
        ruling = self._rule(position)
        if ruling.loser == "none" or self.panel is None or self.by_bytes:
            return ruling
        states = {party: seat.witness_at(position.disputed) for party, seat in self.seats.items()}
        unopened = {
            party: seat.find_unopened_checkpoint(position.agreed)
            for party, seat in self.seats.items()
            if states[party] is None
        }
        ruling, self.outcome = self._confirmed(
            ruling, self.outcome, "state", position.agreed, position=position,
            agreed=self.opened(position.agreed, position.agreed_commitment),
            states={party: state for party, state in states.items() if state is not None},
            unopened={party: why for party, why in unopened.items() if why is not None},
        )  # fmt: skip
        return ruling

    def _rule(self, position: DisputedPosition) -> Ruling:
        step, self.by_bytes = position.agreed, False
        self.step = step
        record = self.transcript.record(step)
        # 1. Somebody opens the agreed commitment.
        state = self.opened(position.agreed, position.agreed_commitment)
        if state is None:
            self.outcome = "cannot_reproduce"
            return Ruling("none", f"step {step}: neither side can open the state both agree on")
        try:
            check_cursor(step, state.entries)  # an honest auditor's own states all say what is so
        except Mismatch as problem:
            self.by_bytes = True
            return Ruling("trainer", str(problem))
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
            frame = self.seats["trainer"].frame(step)
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
        faults = {party: self._find_fault(party, position, repeated) for party in self.seats}
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
        blamed = faults["trainer"] or faults["auditor"]
        self.by_bytes = blamed is not None and blamed.subject == EVIDENCE
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
        step, session, seat = position.agreed, self.replay.session, self.seats[party]
        if not self.replay.may_be_noise(step):
            return False
        steps, logs, transcript = range(step, step + 1), self.seats["trainer"], self.transcript
        first: HeldState | None = before
        claimed = seat.witness_at(position.disputed)
        if claimed is None:
            transcript = self.transcript if party == "trainer" else self.auditors_transcript
            done = [checkpoint.steps_done for checkpoint in transcript.checkpoints()]
            steps = range(max(n for n in done if n <= step), min(n for n in done if n > step))
            first, claimed, logs = seat.witness_at(steps.start), seat.witness_at(steps.stop), seat
        if first is None or claimed is None:
            return False
        states: list[dict[str, Entry]] = []
        try:
            frames = {each: logs.frame(each) for each in steps}
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
        state = self.seats[party].witness_at(position.disputed)
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

    def opened(self, index: int, commitment: bytes, names: Sequence[str] | None = None) -> HeldState | None:
        """Return the state after ``index`` steps that opens ``commitment``, or entries of it, from whichever side has it."""
        for seat in self.seats.values():
            state = seat.witness_at(index, names)
            if state is not None and state.root == commitment:
                return state
        return None

    def _find_fault(
        self, party: Party, position: DisputedPosition, repeated: AcceptableStates
    ) -> Deviation | None:
        state = self.seats[party].witness_at(position.disputed)
        if state is None and (problem := self.seats[party].find_unopened_checkpoint(position.agreed)):
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
                check_cursor(position.disputed, state.entries)
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
