"""The referee: leads one dispute, asks both parties, and rules.

The bisection is played by ``dispute.bisection`` on each side's commitments: roots at checkpoints first, then a root
for every step of the disputed segment, which both sides repeat. The judge then holds the agreed state before the
disputed step, the job and the trainer's log of that step, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tallystick.commit.state import (
    CHUNK_BYTES,
    HeldState,
)
from tallystick.dispute.bisection import Claim, Game, Level, Silence, apply, open_game, receive
from tallystick.dispute.bounds.steps import StepFacts, needs_log
from tallystick.dispute.exchange import ANSWER_LIMIT, HEAD_LIMIT, ForfeitError, Question, QuestionChannel
from tallystick.dispute.openings import StateChunk
from tallystick.dispute.operator_list import BATCH
from tallystick.dispute.record import GRIDS_ENTRY, DisputeRecord, StepsGame
from tallystick.dispute.signed_moves import Terms
from tallystick.dispute.terms import DisputedPosition, Party, Ruling
from tallystick.dispute.verdict import FORFEIT, LogObjection, Pair, Verdict
from tallystick.errors import InvalidInput, Mismatch
from tallystick.execution.snapshot import state_entries
from tallystick.execution.step import batch_digest
from tallystick.numerics.log import decode_frame
from tallystick.roles.chain_judge import ChainJudge
from tallystick.roles.costs import Ledger
from tallystick.roles.findings import CANNOT, NOT_PROVEN, StepFinding
from tallystick.roles.initial_state import DOCUMENTS, find_other_setting
from tallystick.roles.operator_dispute import OperatorDispute, OperatorResult, Signing
from tallystick.roles.operator_replay import list_base
from tallystick.roles.panel import Panel
from tallystick.roles.partings import find_agreed, find_known, find_parting
from tallystick.roles.rebuilt import find_unsteady
from tallystick.roles.replay import Replay
from tallystick.roles.seats import Seat, nbytes_of_name, read_claim
from tallystick.roles.step_judge import StepJudge
from tallystick.run.proofs import StepProof
from tallystick.run.transcript import CURSOR, Transcript, check_cursor

LARGER_STATE, LARGER_BY = (
    8,
    1 << 26,
)  # times the job's own first state, and bytes: what a state may have at most
NAMES_LARGER_BY = 1 << 16  # bytes: what its names may have beside so many times as many


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
        ends, records, objection, chain: what the verdict rests on (``dispute.verdict``).
        ledger: what each party spent; no part of the verdict.
        runs: roots of the trainer's and the auditor's run that were judged, in hexadecimal.
    """

    loser: str
    step: int | None
    rounds: int
    rounds_per_level: dict[str, int]
    reason: str
    moves: list[tuple[Party, int, str]] = field(default_factory=list[tuple[Party, int, str]])
    outcome: str = "fault"
    operator: OperatorResult | None = None
    record: bytes | None = None
    ends: Pair | None = None
    records: Pair | None = None
    objection: LogObjection | None = None
    chain: StepProof | None = None
    ledger: Ledger = field(default_factory=Ledger)
    runs: tuple[str, str] = ("", "")

    @property
    def accuses(self) -> bool:
        """Whether somebody loses for what was computed, not for silence."""
        return self.loser != "none" and self.outcome == "fault"

    @property
    def clears(self) -> bool:
        """Whether it finds out that the trainer is not to blame."""
        return self.loser not in ("trainer", "both") and self.outcome not in ("cannot_reproduce", NOT_PROVEN)

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
            chain=self.chain,
        ).encode()


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
        confirms: whether the auditor is asked for its claim once more before a ruling clears the trainer, so that nobody accuses
            in its name.
    """

    table: QuestionChannel
    ours: Transcript
    theirs: Transcript
    replay: Replay
    objection: LogObjection | None
    level: str
    signing: Signing
    answers_itself: bool
    ledger: Ledger
    panel: Panel
    confirms: bool = False

    def rule(self) -> DisputeResult:
        """Play the dispute and return the ruling.

        Raises:
            InvalidInput, Mismatch: the auditor's objection is not one to this run.
        """
        hints = {"suspected": find_parting(self.ours, self.theirs), "traced": self.level == "operators"}
        entries = list(state_entries(self.replay.session))
        own = (
            sum(memoryview(entry.data).nbytes for entry in entries),
            sum(nbytes_of_name(entry.name) for entry in entries),
        )
        # What does not fit an answer, or a question, nobody can open; but the job's own state.
        most = (
            min(LARGER_STATE * own[0] + LARGER_BY, max(own[0], ANSWER_LIMIT)),
            min(LARGER_STATE * own[1] + NAMES_LARGER_BY, max(own[1], HEAD_LIMIT // 2)),
        )
        self.seats: dict[Party, Seat] = {
            "trainer": Seat(self.table, "trainer", self.ours, hints, *most),
            "auditor": Seat(self.table, "auditor", self.theirs, hints, *most),
        }
        runs = self.ours.root().hex(), self.theirs.root().hex()
        self.played = DisputeResult("none", None, 0, {}, "", ledger=self.ledger, runs=runs)
        try:
            # Without its own first state nobody knows whether the run is the job's: whatever else is found clears nobody.
            is_seen = any(seat.witness_at(0, DOCUMENTS) is not None for seat in self.seats.values())
            result = self._rule()
            if result.clears and not is_seen:
                why = f"step 0: not proven: neither side can open the first state; otherwise: {result.reason}"
                return DisputeResult("none", 0, 0, {}, why, outcome=NOT_PROVEN, ledger=self.ledger, runs=runs)
            if self.confirms and (result.clears or result.objection is not None):
                self.seats["auditor"].confirm(self.ours.num_steps)
            return result
        except ForfeitError as forfeit:
            loser = "none" if forfeit.loser == "both" else forfeit.loser
            return replace(self.played, loser=loser, reason=str(forfeit), outcome=FORFEIT)

    def _rule(self) -> DisputeResult:
        ours, theirs, seats = self.ours, self.theirs, self.seats
        checkpoints = [checkpoint.steps_done for checkpoint in ours.checkpoints()]
        objection = self.objection
        if objection is not None:
            objection.verify_about(ours.root().hex(), ours.num_steps)
        if (begun := self._judged_beginning()) is not None:
            return begun
        claims: dict[Party, list[bytes]] = {
            party: [seat.commitment_at(done) for done in checkpoints] for party, seat in seats.items()
        }
        step_judge = StepJudge(ours, theirs, self.replay, seats, self.panel, self.answers_itself)
        # A false state in the middle is disputed too, where both sides end in the same one.
        known = find_known(ours, theirs, objection)
        last = next(
            (
                i
                for i in reversed(range(len(checkpoints)))
                if checkpoints[i] <= known and claims["trainer"][i] != claims["auditor"][i]
            ),
            None,
        )
        if last is None:
            why, outcome = "both sides reached the same state", "agreement"
            if known < ours.num_steps:
                why = f"step {known}: the auditor did not follow the trainer's log from there on, and its own states say nothing"
                outcome = CANNOT
            same = replace(self.played, reason=why, outcome=outcome)
            ruled = _weightiest(step_judge.rule_on_agreed(find_agreed(ours, theirs, known), objection), same)
            return ruled if known == ours.num_steps else self._with_chain(ruled, None)
        levels = [Level("checkpoints", checkpoints[: last + 1]), Level("steps", range(checkpoints[last] + 1))]
        ends: dict[Party, bytes] = {party: claimed[last] for party, claimed in claims.items()}
        agreed, ended = claims["trainer"][0], checkpoints[last] - 1
        self.played = replace(self.played, ends=(ours.prove_step(ended), theirs.prove_step(ended)))
        game = open_game(levels, agreed=agreed, trainer=ends["trainer"], auditor=ends["auditor"])
        game, rounds = self._bisect(game)
        position = game.position
        assert position is not None
        for party, claim in position.claims.items():
            seats[party].claims[position.disputed] = claim
        stated = tuple(move for move in game.log if isinstance(move, Claim))
        # What records and log say of the steps before, on whose states both agree, can be false all the same.
        earlier = step_judge.rule_on_agreed(position.agreed, objection)
        if any(finding.decides for finding in earlier):
            return _weightiest(earlier, self.played)
        steps = StepsGame(tuple(checkpoints[: last + 1]), agreed, ends, stated)
        result = self._rule_on_step(step_judge, position, steps, rounds)
        # Who objects falsely to a log loses, unless the trainer's state convicts the trainer all the same.
        return self._with_chain(
            result if result.loser == "trainer" else _weightiest(earlier, result), position.agreed
        )

    def _with_chain(self, result: DisputeResult, parted: int | None) -> DisputeResult:
        """Return a ruling that convicts nobody with what the trainer's own steps show, those behind ``parted`` among them."""
        if result.loser != "none":
            return result
        trainer = self.seats["trainer"]
        judge = ChainJudge(
            self.ours, self.theirs, self.replay, trainer, self.panel, self.answers_itself, self.objection
        )
        finding = judge.find_fault(parted)
        if finding is not None:
            ruled = replace(result, record=None, records=None, objection=None, chain=finding.chain)
            loser, reason = finding.ruling.loser, finding.ruling.reason
            return replace(ruled, loser=loser, step=finding.step, reason=reason, outcome=finding.outcome)
        if not judge.doubts or result.outcome in (CANNOT, NOT_PROVEN):
            return result
        return replace(
            result, outcome=CANNOT, reason=f"{result.reason}; of the steps behind it: {judge.doubts[0]}"
        )

    def _rule_on_step(
        self, step_judge: StepJudge, position: DisputedPosition, steps: StepsGame, rounds: dict[str, int]
    ) -> DisputeResult:
        """Rule on the disputed step: on the operator that is false in it, or by repeating the whole step."""
        found, written = self._play_operators(step_judge, position, steps)
        if found is not None and found.rounds:
            rounds["operators"] = found.rounds
        played = replace(self.played, rounds=sum(rounds.values()), rounds_per_level=rounds, operator=found)
        ruling: Ruling | None = None
        is_by_rule = found is not None and found.evidence is None  # of the game
        if (
            found is not None
            and found.loser is not None
            and not (is_by_rule and (self.answers_itself or found.loser == "auditor"))
            and not self._contradicts_itself(found, position.agreed)
        ):
            # The table may be wrong about an operator, a list may differ with the machine, and where the job's program played
            # the trainer's part here, its noise may be to blame: the whole step is judged as well, and has the last word.
            ruling = step_judge.rule(position)
            if not stands(found, ruling):
                why = f"the whole step does not convict the {found.loser}: {ruling.reason}; the operator alone: {found.reason}"
                found, written = replace(found, loser=None, reason=why, evidence=None), None
                played = replace(played, operator=found)
        if found is not None and found.loser is not None:
            reason = f"step {position.agreed}: {found.reason}"
            return replace(played, loser=found.loser, step=position.agreed, reason=reason, record=written)
        ruling = ruling or step_judge.rule(position)
        return replace(
            played,
            loser=ruling.loser,
            step=step_judge.step,
            reason=ruling.reason,
            outcome=step_judge.outcome,
        )

    def _contradicts_itself(self, found: OperatorResult, step: int) -> bool:
        """Whether the trainer's own list has other data than its record commits to, which no table and no noise decides."""
        return (
            found.loser == "trainer"
            and self.answers_itself
            and found.operator is not None
            and found.operator.name == BATCH
            and found.accusation is not None
            and not found.accusation.structure  # in which honest lists may differ
            and not self.replay.may_be_noise(step)
            and find_unsteady(self.panel.trainer, self.panel.source, step) is None
        )

    def _play_operators(
        self, step_judge: StepJudge, position: DisputedPosition, steps: StepsGame
    ) -> tuple[OperatorResult | None, bytes | None]:
        """Return how the dispute over the step's operators ended and its portable record; None where there is none."""
        case = self._operator_case(step_judge, position) if self.level == "operators" else None
        found = None if case is None else case.play()
        if case is None or found is None:
            return None, None
        if self.ledger.steps:
            found = replace(found, step_seconds=min(step.wall for step in self.ledger.steps))
        return found, _record_of(self.ours, self.theirs, case.agreed, steps, position, found)

    def _judged_beginning(self) -> DisputeResult | None:
        opened = (seat.witness_at(0, DOCUMENTS) for seat in self.seats.values())
        agreed = next((state for state in opened if state is not None), None)
        other = None if agreed is None else find_other_beginning(agreed, self.replay)
        if other is None:
            return None
        why = f"step 0: the first state is not the job's: {other}"
        dissent = find_unsteady(self.panel.trainer, self.panel.source, 0) or self.panel.find_dissent(
            "beginning", "trainer", 0, agreed=agreed
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


def _weightiest(findings: Sequence[StepFinding], otherwise: DisputeResult) -> DisputeResult:
    """Return ``otherwise`` with the ruling of the weightiest finding: one that decides, then one that blames, then any.

    One that blames nobody says nothing of a later step but that nobody is cleared by it.
    """

    def weight(finding: StepFinding) -> tuple[bool, bool]:
        return not finding.decides, finding.ruling.loser == "none"

    chosen = min(findings, key=weight, default=None)
    if chosen is None:
        return otherwise
    if chosen.ruling.loser == "none" and otherwise.step is not None:
        if otherwise.loser != "none" or not otherwise.clears:
            return otherwise
        why = f"{otherwise.reason}; of the steps before it: {chosen.ruling.reason}"
        return replace(otherwise, outcome=chosen.outcome, reason=why)
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


def find_other_beginning(state: HeldState, replay: Replay) -> str | None:
    """Return a number in the run's first state that is not the job's own, or None; both parties' runs begin there."""
    try:
        other = find_other_setting(replay.settings, state.entries)
    except (InvalidInput, Mismatch):
        return None
    return other.text if other is not None and other.is_number else None


def stands(found: OperatorResult, whole: Ruling) -> bool:
    """Whether a ruling on an operator stands beside that on the whole step."""
    return found.loser == whole.loser


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
            StateChunk(
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
