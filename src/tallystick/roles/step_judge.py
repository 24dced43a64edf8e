"""The judge of one step: repeats it from the agreed state and says whose statements honest arithmetic does not allow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from tallystick.commit.state import Entry, HeldState, hold
from tallystick.dispute.terms import DisputedPosition, Party, Ruling
from tallystick.dispute.verdict import LogObjection, Pair, record_claims
from tallystick.errors import InvalidInput, Mismatch, Nondeterminism
from tallystick.execution.snapshot import copied_state, load_state
from tallystick.execution.step import batch_digest
from tallystick.numerics.log import decode_frame
from tallystick.roles import log_judge
from tallystick.roles.acceptable_states import AcceptableStates
from tallystick.roles.audit_report import Deviation
from tallystick.roles.comparison import (
    compare_step,
    excusable,
    find_noisy_sites,
    is_excused,
    may_follow_from_data,
    violations_of,
    with_near_rates,
)
from tallystick.roles.data_noise import DATA_NOISE_REASON, Shaking, is_explained, shaking
from tallystick.roles.findings import CANNOT, NOT_PROVEN, StepFinding, contradiction, other_state
from tallystick.roles.noise_bound import farther_than_noise, is_loss_farther
from tallystick.roles.panel import Panel
from tallystick.roles.partings import is_agreed
from tallystick.roles.rebuilt import find_unsteady
from tallystick.roles.replay import Replay
from tallystick.roles.seats import StepParty
from tallystick.run.documents import StepRecord
from tallystick.run.transcript import Transcript, check_cursor, check_fingerprint, state_fingerprint

MOST_RECORDS = 16  # steps on whose records the judge rules, of those before the disputed one


@dataclass
class StepJudge:
    """Repeats one step from the agreed state and compares both sides' claims with what honest arithmetic allows.

    ``seats`` are of those who are judged. With a ``panel`` it asks that before it convicts anybody, but on bytes alone
    (``by_bytes``, of the last ruling).
    ``answers_itself`` is whether the trainer plays its own part: then it has every state that it claims.
    """

    transcript: Transcript
    auditors_transcript: Transcript
    replay: Replay
    seats: Mapping[Party, StepParty]
    panel: Panel | None = None
    answers_itself: bool = False
    outcome: str = "fault"
    step: int | None = None
    by_bytes: bool = False
    _pasts: dict[int, HeldState | None] = field(default_factory=dict[int, "HeldState | None"])
    _withheld: dict[int, str] = field(default_factory=dict[int, str])

    def rule_on_agreed(self, end: int, objection: LogObjection | None) -> list[StepFinding]:
        """Return the rulings on steps before ``end``, on whose states both parties agree; one that convicts the trainer ends it.

        The auditor's objection to a log, and a step that the parties' records describe differently, the earlier first. Of such
        steps those that differ in more than data are looked at first, until one blames somebody: what blames nobody hides none.
        Behind a log that cannot be followed the auditor went its own way, and its records differ honestly.
        """
        pending: list[tuple[int, Callable[[], StepFinding | None]]] = []
        if objection is not None and (
            objection.step < end or (objection.site == "log" and objection.step == end)
        ):
            pending.append((objection.step, lambda: self.rule_on_log(objection)))
        agreed = (s for s in range(end) if is_agreed(self.transcript, self.auditors_transcript, s, end))
        records = ((s, self.transcript.record(s), self.auditors_transcript.record(s)) for s in agreed)
        pairs = ((s, ours, with_near_rates(ours, theirs)) for s, ours, theirs in records)
        differing = [(s, a, b) for s, a, b in pairs if record_claims(a) != record_claims(b)]
        if differing:
            chosen = [s for s, _, _ in sorted(differing, key=lambda each: (*excusable(*each[1:]), each[0]))]
            pending.append((differing[0][0], lambda: self._rule_on_any(chosen)))
        found: list[StepFinding] = []
        for _, rule in sorted(pending, key=lambda each: each[0]):
            finding = rule()
            found += [] if finding is None else [finding]
            if finding is not None and finding.ruling.loser == "trainer":
                break
        return found

    def rule_on_log(self, objection: LogObjection) -> StepFinding:
        """Return the ruling on an objection to the trainer's log of a step on whose states the parties agree."""
        state = self._agreed_state(objection.step)
        if (withheld := self._ruling_on_withheld(objection.step)) is not None:
            return StepFinding(objection.step, withheld, "fault", objection=objection)
        entries = None if state is None else state.entries
        found = log_judge.rule_on_log(
            self.seats["trainer"].frame, self.transcript, self.replay, objection, entries
        )
        if found.ruling.loser == "auditor" and self._has_noisy_data("auditor", objection.step):
            why = f"step {objection.step}: {DATA_NOISE_REASON.format('auditor')}"
            return StepFinding(objection.step, Ruling("none", why), CANNOT, objection=objection)
        ruling, outcome = self._confirmed(
            found.ruling, found.outcome, "log", objection.step, agreed=state, objection=objection
        )
        return StepFinding(objection.step, ruling, outcome, objection=objection)

    def _has_noisy_data(self, party: Party, step: int) -> bool:
        """Whether a party's record states other data than the judge's, as noise may have it: it saw another step."""
        transcript = self.transcript if party == "trainer" else self.auditors_transcript
        other = transcript.record(step).batch != batch_digest(self.replay.job.batch(step))
        return other and self.replay.may_be_noise(step)

    def _agreed_state(self, step: int) -> HeldState | None:
        """Return the state before ``step``, from whichever side can open it.

        Where a segment begins it is the trainer's, from which the auditor goes on. Within it no game may have asked for it, so
        a party may claim another than the one that it trained. Then it is the one to which the trainer's own log leads.
        """
        start = step - step % self.transcript.specification.checkpoint_every
        claims = {seat.commitment_at(step) for seat in self.seats.values()} if step > start else set[bytes]()
        if step == start or len(claims) == 1:
            opened = self.opened(step, self.seats["trainer"].commitment_at(step))
            if step == start or opened is not None:
                return opened
        state = self.opened(start, self.seats["trainer"].commitment_at(start))
        if state is None:
            return None
        if step not in self._pasts:
            self._pasts[step] = self._repeated(state, start, step)
        return self._pasts[step]

    def _repeated(self, state: HeldState, start: int, step: int) -> HeldState | None:
        """Return the state before ``step``, repeated from that after ``start`` steps; None if the log does not lead there.

        Nor if it leads elsewhere than the auditor's records say: both parties may have rounded an element as the judge does not.
        The trainer's, where it alone is judged.
        """
        records = self.auditors_transcript if "auditor" in self.seats else self.transcript
        session, seat = self.replay.session, self.seats["trainer"]
        try:
            frames = {each: seat.frame(each) for each in range(start, step)}
        except (InvalidInput, Mismatch) as problem:
            self._withheld[step] = (
                f"step {step}: a log that leads there from {start} cannot be used: {problem}"
            )
            return None
        try:
            load_state(session, state.entries)
            for each, frame in frames.items():
                outcome, _ = self.replay.follow(self.transcript.record(each), frame)
                if f"{outcome.fingerprint:016x}" != records.record(each).fingerprint:
                    return None
        except (InvalidInput, Mismatch, Nondeterminism):
            return None
        return hold(copied_state(session).values())

    def _ruling_on_withheld(self, step: int) -> Ruling | None:
        """Return that the trainer loses who hands over no log that its records name and that leads to ``step``, if so."""
        if step not in self._withheld:
            return None
        self.by_bytes = True
        return Ruling("trainer", self._withheld[step])

    def _rule_on_any(self, steps: Sequence[int]) -> StepFinding | None:
        """Return the first finding that blames somebody, else the first of all; of ``MOST_RECORDS`` steps at most."""
        found: StepFinding | None = None
        for step in steps[:MOST_RECORDS]:
            finding = self.rule_on_records(step)
            if finding is not None and finding.ruling.loser != "none":
                return finding
            found = found or finding
        if found is None and len(steps) > MOST_RECORDS:
            step, all_of = steps[MOST_RECORDS], len(steps)
            why = f"the records of {all_of} steps differ; of the {MOST_RECORDS} that were judged nobody misstates one"
            found = StepFinding(step, Ruling("none", f"step {step}: {why}"), CANNOT, self._records_of(step))
        return found

    def rule_on_records(self, step: int) -> StepFinding | None:
        """Return the ruling on what records say of a step on whose states the parties agree; None if nobody misstates it."""
        who = self.who_misstates(step)
        if who is None:
            return None
        ruling, outcome = self._confirmed(*who, "records", step, agreed=self._agreed_state(step))
        return StepFinding(step, ruling, outcome, records=self._records_of(step))

    def _records_of(self, step: int) -> Pair:
        return self.transcript.prove_step(step), self.auditors_transcript.prove_step(step)

    def _confirmed(
        self, ruling: Ruling, outcome: str, kind: str, step: int, **more: Any
    ) -> tuple[Ruling, str]:
        """Return a ruling and its outcome as they stand once the panel has been asked: it convicts with one voice or not."""
        if ruling.loser == "none" or self.panel is None or self.by_bytes:
            return ruling, outcome
        try:
            more["frame"] = self.seats["trainer"].frame(step)
        except InvalidInput as problem:
            more["no_frame"] = str(problem)
        dissent = find_unsteady(self.panel.trainer, self.panel.source, step, more.get("agreed"))
        dissent = dissent or self.panel.find_dissent(
            kind, ruling.loser, step, parties=list(self.seats), **more
        )
        if dissent is None:
            return ruling, outcome
        return Ruling("none", f"step {step}: not proven: {dissent}; {ruling.reason}"), NOT_PROVEN

    def who_misstates(self, step: int) -> tuple[Ruling, str] | None:
        """Return who misstates a step on whose states both agree, and the outcome; None if the difference is nobody's fault.

        Logs and what is derived from them may differ honestly.
        """
        state, self.by_bytes = self._agreed_state(step), False
        if (withheld := self._ruling_on_withheld(step)) is not None:
            return withheld, "fault"
        if state is None:
            return Ruling("none", f"step {step}: neither side can open the state both agree on"), CANNOT
        record, committed = self.transcript.record(step), None
        if record.state_root is not None:
            committed = self.seats["trainer"].witness_at(step + 1)
        try:
            check_cursor(step, state.entries)  # an honest auditor's own states all say what is so
            if committed is not None:
                check_fingerprint(record, committed.entries)
        except Mismatch as problem:
            self.by_bytes = True
            return Ruling("trainer", str(problem)), "fault"
        load_state(self.replay.session, state.entries)
        try:
            frame = self.seats["trainer"].frame(step)
            outcome, _ = self.replay.follow(record, frame)
        except (InvalidInput, Mismatch) as problem:
            return Ruling("trainer", f"step {step}: the log cannot be followed: {problem}"), "fault"
        except Nondeterminism as problem:
            return self._rule_without_log(step, state, problem)
        statements: dict[Party, StepRecord] = {
            "trainer": record,
            "auditor": self.auditors_transcript.record(step),
        }
        for party, stated in statements.items():
            found = compare_step(stated, outcome, []) if party in self.seats else []
            if not found:
                continue
            is_noise = any(each.about == "data" for each in found) and self.replay.may_be_noise(step)
            if is_noise and all(may_follow_from_data(each) for each in found):
                return Ruling("none", f"step {step}: {DATA_NOISE_REASON.format(party)}"), CANNOT
            noisy = find_noisy_sites(self.replay, self.transcript, step, step, {step: frame}, state.entries)
            is_unknown = all(is_excused(deviation, noisy) for deviation in found)
            more = (self.replay, record, frame, state.entries, found, noisy)
            if is_unknown and not (party == "trainer" and is_loss_farther(*more)):
                why = f"step {step}: the judge cannot reproduce what the {party} did: {noisy[0]}"
                return Ruling("none", why), CANNOT
            if party == "auditor" and self._may_state(found, state, frame):
                why = f"step {step}: the auditor may have another state or loss there, by honest arithmetic"
                return Ruling("none", why), CANNOT
            first = next((each for each in found if not (is_noise and may_follow_from_data(each))), found[0])
            why = f"step {step}: {first.subject} is {first.own}, the {party} says {first.stated}"
            return Ruling(party, why), "fault"
        return None

    def _may_state(self, found: Sequence[Deviation], state: HeldState, frame: bytes) -> bool:
        """Whether honest arithmetic may have given the auditor's state and loss, or nobody can open that state here."""
        step, differing = found[0].step, {each.about for each in found}
        if not differing <= {"fingerprint", "loss"}:
            return False
        claimed = self.seats["auditor"].witness_at(step + 1) if "fingerprint" in differing else None
        load_state(self.replay.session, state.entries)
        try:
            repeated = AcceptableStates(self.replay, frame)
            if repeated.leaves_open:
                return True
            return "loss" not in differing and (
                claimed is None or repeated.find_fault(claimed.entries) is None
            )
        except (InvalidInput, Nondeterminism):
            return True

    def rule(self, position: DisputedPosition) -> Ruling:
        """Return who is at fault at ``position``; the parties' states are asked for here, one at a time."""
        ruling = self._rule(position)
        if ruling.loser == "none" or self.panel is None or self.by_bytes:
            return ruling
        judged: list[Party] = ["trainer"] if ruling.loser == "trainer" else list(self.seats)
        states = {party: self.seats[party].witness_at(position.disputed) for party in judged}
        unopened = {party: self._find_unopened(party, position.disputed) for party in judged}
        ruling, self.outcome = self._confirmed(
            ruling, self.outcome, "state", position.agreed, position=position,
            agreed=self.opened(position.agreed, position.agreed_commitment),
            states={party: state for party, state in states.items() if state is not None},
            unopened={party: why for party, why in unopened.items() if why is not None},
        )  # fmt: skip
        return ruling

    def _rule(self, position: DisputedPosition) -> Ruling:
        step, self.by_bytes, self.outcome = position.agreed, False, "fault"
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
        if (misstated := self._rule_on_batch(position, state)) is not None:
            return misstated
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
            ruling, self.outcome = self._rule_without_log(step, state, problem)
            return ruling
        # 5. Hyper-parameters are the job's.
        schedule = [d for d in compare_step(record, repeated.outcome, []) if d.about == "schedule"]
        if schedule:
            return Ruling("trainer", str(schedule[0]))
        return self._rule_on_states(position, state, frame, repeated)

    def _rule_on_batch(self, position: DisputedPosition, state: HeldState) -> Ruling | None:
        """Rule on a trainer's record of other data than the job's; None if it is of the job's."""
        step = position.agreed
        own, stated = batch_digest(self.replay.job.batch(step)), self.transcript.record(step).batch
        if own == stated:
            return None
        if self._is_data_noise("trainer", position, state):
            self.outcome = CANNOT
            return Ruling("none", f"step {step}: {DATA_NOISE_REASON.format('trainer')}")
        return Ruling(
            "trainer", f"step {step}: the committed batch {stated[:16]}.. is not the job's, {own[:16]}.."
        )

    def _rule_on_states(
        self, position: DisputedPosition, state: HeldState, frame: bytes, repeated: AcceptableStates
    ) -> Ruling:
        """Rule on both parties' states after the step, which was repeated from ``state`` under the log's ``frame``."""
        step = position.agreed
        # 6. Entries and headers that honest arithmetic could not have written; then a party's state, element by element, and
        # the trainer's loss. The auditor's state is asked for only if the trainer's is not false.
        noisy: list[Deviation] | None = None
        for party in self.seats:
            if not (faults := self._faults(party, position, repeated)):
                continue
            # 7. A fault that this machine's own noise can explain is nobody's.
            if noisy is None:
                frames = {step: frame}
                noisy = find_noisy_sites(self.replay, self.transcript, step, step, frames, state.entries)
            stays = [each for each in faults if not is_excused(each, noisy)]
            more = (self.replay, self.transcript.record(step), frame, state.entries, faults, noisy)
            if not stays and is_loss_farther(*more):
                stays = [each for each in faults if each.about == "loss"]  # the trainer's
            fault = min([*stays, *faults], key=lambda each: not each.is_evidence)
            if not stays and not self._is_far(party, position, state):
                self.outcome = "cannot_reproduce"
                why = f"the judge cannot reproduce what the {party} did: {noisy[0]}"
                return Ruling("none", f"step {step}: {why}")
            self.by_bytes = fault.is_evidence
            if party == "trainer":
                return Ruling("trainer", str(fault))
            other = self.auditors_transcript.record(step).batch != batch_digest(self.replay.job.batch(step))
            if other and self._is_data_noise("auditor", position, state):
                self.outcome = CANNOT
                return Ruling("none", f"step {step}: {DATA_NOISE_REASON.format('auditor')}")
            if repeated.leaves_open and not fault.is_evidence:
                self.outcome = CANNOT
                return Ruling("none", f"step {step}: {log_judge.UNLISTED}")
            return Ruling("auditor", fault.of("auditor"))
        self.outcome = "both_acceptable"
        what = "both states" if len(self.seats) > 1 else "the trainer's state"
        return Ruling("none", f"step {step}: honest arithmetic can give {what}")

    def _is_data_noise(self, party: Party, position: DisputedPosition, before: HeldState) -> bool:
        """Whether floating noise in the data explains the state that ``party`` claims after the disputed step.

        Where nobody can open that claim (a party played on this machine, with other bits in its data), the states that the
        party committed to on both sides of the step are compared instead.
        """
        session = self.replay.session
        if not self.replay.may_be_noise(position.agreed):
            return False
        steps, first, claimed, transcript, logs = self._spanned(party, position, before)
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

    def _is_far(self, party: Party, position: DisputedPosition, before: HeldState) -> bool:
        """Whether the party's state lies farther from the judge's than noise carries it.

        In one step; where it cannot be opened, the party's committed states around the step are compared, and its logs between.
        """
        steps, first, claimed, transcript, logs = self._spanned(party, position, before)
        if first is None or claimed is None:
            return False
        try:
            frames = {step: logs.frame(step) for step in steps}
        except (InvalidInput, Mismatch, Nondeterminism):
            return False
        return farther_than_noise(self.replay, transcript, frames, first.entries, claimed.entries) is not None

    def _spanned(
        self, party: Party, position: DisputedPosition, before: HeldState
    ) -> tuple[range, HeldState | None, HeldState | None, Transcript, StepParty]:
        """Return the steps, the party's states around them, and whose records and logs they are repeated under."""
        step, seat = position.agreed, self.seats[party]
        if (claimed := seat.witness_at(position.disputed)) is not None:
            return range(step, step + 1), before, claimed, self.transcript, self.seats["trainer"]
        transcript = self.transcript if party == "trainer" else self.auditors_transcript
        done = [checkpoint.steps_done for checkpoint in transcript.checkpoints()]
        steps = range(max(n for n in done if n <= step), min(n for n in done if n > step))
        return steps, seat.witness_at(steps.start), seat.witness_at(steps.stop), transcript, seat

    def _rule_without_log(self, step: int, state: HeldState, problem: Nondeterminism) -> tuple[Ruling, str]:
        """Rule where the step does not come to an end: the log is to blame only if the job's own step does without it."""
        record, frame = self.transcript.record(step), self.seats["trainer"].frame(step)
        if not self.replay.ends_without(
            record, frame, lambda: load_state(self.replay.session, state.entries)
        ):
            why = f"step {step}: the judge cannot repeat the job's own step either: {problem}"
            return Ruling("none", why), CANNOT
        return Ruling("trainer", f"step {step}: the log cannot be followed: {problem}"), "fault"

    def opened(self, index: int, commitment: bytes, names: Sequence[str] | None = None) -> HeldState | None:
        """Return the state after ``index`` steps that opens ``commitment``, or entries of it, from whichever side has it."""
        for seat in self.seats.values():
            state = seat.witness_at(index, names)
            if state is not None and state.root == commitment:
                return state
        return None

    def _find_unopened(self, party: Party, index: int) -> str | None:
        """Return what a party cannot open that it committed to, or claims in the dispute it answers itself; None if nothing."""
        if self.seats[party].witness_at(index) is not None:
            return None
        problem = self.seats[party].find_unopened_checkpoint(index)
        if problem is None and party == "trainer" and self.answers_itself:
            return f"the state that it claims after {index} steps is not handed over"
        return problem

    def _find_fault(
        self, party: Party, position: DisputedPosition, repeated: AcceptableStates
    ) -> Deviation | None:
        step, state = position.agreed, self.seats[party].witness_at(position.disputed)
        if (problem := self._find_unopened(party, position.disputed)) is not None:
            return contradiction(step, problem, f"the {party}'s own root")
        if state is None or state.root != position.claims[party]:
            own = f"{repeated.outcome.fingerprint:016x}"
            return other_state(step, own, f"another one, which the {party} cannot open")
        record = (self.transcript if party == "trainer" else self.auditors_transcript).record(step)
        if record.state_root is not None:
            try:
                check_cursor(position.disputed, state.entries)
                check_fingerprint(record, state.entries)
            except Mismatch as problem:
                return contradiction(step, str(problem), f"the {party}'s own")
        fault = repeated.find_fault(state.entries, has_logged=party == "trainer")
        own = f"{state_fingerprint(state.entries):016x}"
        if fault is None and party == "trainer" and own != record.fingerprint:
            return other_state(step, own, record.fingerprint)  # than its own record says
        return fault

    def _faults(
        self, party: Party, position: DisputedPosition, repeated: AcceptableStates
    ) -> list[Deviation]:
        """Return what is false of a party's state, for the trainer also of its log and of the loss that it states."""
        step, found = position.agreed, self._find_fault(party, position, repeated)
        faults = [] if found is None else [found]
        if party != "trainer":
            return faults
        stated = compare_step(self.transcript.record(step), repeated.outcome, [])
        losses = [each for each in stated if each.about == "loss"]
        return [*violations_of(step, repeated.violations), *faults, *losses]
