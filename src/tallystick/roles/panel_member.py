"""A member of a judge's panel (``roles.panel``): reads questions line by line and answers each, until its input ends."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tallystick.commit.state import Entry, HeldState, hold
from tallystick.dispute.terms import DisputedPosition, Party
from tallystick.dispute.verdict import parse_log_objection
from tallystick.errors import InvalidInput, JobFailed, Mismatch, Nondeterminism, TallyError
from tallystick.execution.determinism import parse_profile
from tallystick.execution.job import JobSource
from tallystick.execution.session.hyperparameters import read_hyperparameters
from tallystick.execution.snapshot import load_state
from tallystick.execution.step import batch_digest, run_step
from tallystick.roles.audit_report import Deviation
from tallystick.roles.log_judge import rule_on_log
from tallystick.roles.operator_replay import find_structure
from tallystick.roles.panel import Opinion, asked_of
from tallystick.roles.rebuilt import STEPS_BEFORE, shift_place
from tallystick.roles.referee import find_other_beginning
from tallystick.roles.replay import Replay, open_replay
from tallystick.roles.step_judge import StepJudge
from tallystick.run.transcript import Transcript
from tallystick.store.files import RunDirectory


@dataclass
class HandedSeat:
    """A party as a member sees it: what the judge has handed over, else what lies in the party's run directory.

    A referee of parties elsewhere has their documents alone: then what was not handed over cannot be opened.
    """

    run: RunDirectory
    transcript: Transcript
    step: int
    held: dict[int, HeldState] = field(default_factory=dict[int, HeldState])
    unopened: str | None = None
    log: bytes | None = None
    no_log: str | None = None

    def witness_at(self, index: int, names: Sequence[str] | None = None) -> HeldState | None:
        """Return the state after ``index`` steps, if it was handed over or committed to."""
        del names
        if index not in self.held:
            roots = {each.steps_done: each.state_root for each in self.transcript.checkpoints()}
            try:
                return self.run.load_held(index, roots[index]) if index in roots else None
            except (InvalidInput, Mismatch):
                return None
        return self.held[index]

    def commitment_at(self, index: int) -> bytes:
        """Return the root of the state after ``index`` steps that was handed over, else nothing."""
        return self.held[index].root if index in self.held else b""

    def find_unopened_checkpoint(self, index: int) -> str | None:
        """Return what the judge was told about the checkpoint before the step."""
        del index
        return self.unopened

    def frame(self, step: int) -> bytes:
        """Return the trainer's log of the step.

        Raises:
            InvalidInput, Mismatch: the trainer has none.
            Nondeterminism: the judge did not hand it over.
        """
        if step != self.step:
            return self.run.load_frames(self.transcript, step, step + 1)[step]
        if self.log is not None:
            return self.log
        if self.no_log is None:
            raise Nondeterminism(f"step {step}: the judge did not hand over the log")
        raise InvalidInput(self.no_log)


def answer(line: bytes, *, jitter: bool = False, steps_before: int = 0) -> Opinion:
    """Return the opinion on one question; of what the job is here, after so many other steps.

    Raises:
        TallyError: this arithmetic cannot find out.
    """
    asked = asked_of(line)
    trainer, auditor = RunDirectory(Path(asked["trainer"])), RunDirectory(Path(asked["auditor"]))
    ours, theirs = trainer.load_transcript(), auditor.load_transcript()
    source = JobSource(asked["job"], base64.b64decode(asked["source"]))
    replay = open_replay(ours.specification, source, jitter=jitter)
    if isinstance(replay, Deviation):
        return Opinion("none", f"{replay.subject} is {replay.own}")
    try:
        if asked["kind"] == "beginning":
            other = find_other_beginning(_state(Path(asked["place"]) / "agreed"), replay)
            return Opinion("none" if other is None else "trainer", str(other))
        if asked["kind"] == "same":
            agreed = _state(Path(asked["place"]) / "agreed").entries if asked["agreed"] else None
            return Opinion(json.dumps(_computed_here(replay, asked["step"], agreed, steps_before)), "")
        return _answer(asked, ours, theirs, replay)
    finally:
        replay.session.close()


def _answer(
    asked: Mapping[str, Any],
    ours: Transcript,
    theirs: Transcript,
    replay: Replay,
) -> Opinion:
    step, place = asked["step"], Path(asked["place"])
    agreed = _state(place / "agreed") if asked["agreed"] else None
    if asked["kind"] == "structure":
        assert agreed is not None
        found = find_structure(replay, agreed, ours.record(step), (place / "frame").read_bytes(), asked["at"])
        return Opinion(found.hex(), "its own list has it")
    frame = (place / "frame").read_bytes() if asked["frame"] else None
    seats: dict[Party, HandedSeat] = {}
    runs = {"trainer": ours, "auditor": theirs}
    for party in asked["parties"]:
        unopened, run = asked["unopened"].get(party), RunDirectory(Path(asked[party]))
        seat = seats[party] = HandedSeat(run, runs[party], step, {}, unopened, frame, asked["no_frame"])
        if agreed is not None:
            seat.held[step] = agreed
        if party in asked["states"]:
            seat.held[step + 1] = _state(place / party)
    judge = StepJudge(ours, theirs, replay, seats)
    if asked["kind"] == "log":
        objection = parse_log_objection(asked["objection"].encode())
        found = rule_on_log(
            seats["trainer"].frame, ours, replay, objection, None if agreed is None else agreed.entries
        )
        return Opinion(found.ruling.loser, found.ruling.reason)
    if asked["kind"] == "records":
        who = judge.who_misstates(step)
        return Opinion("none", "the records agree") if who is None else Opinion(who[0].loser, who[0].reason)
    where = asked["position"]
    position = DisputedPosition(
        where["level"],
        where["agreed"],
        where["disputed"],
        bytes.fromhex(where["agreed_commitment"]),
        {party: bytes.fromhex(claim) for party, claim in where["claims"].items()},
    )
    ruling = judge.rule(position)
    return Opinion(ruling.loser, ruling.reason)


def _computed_here(
    replay: Replay, step: int, state: Mapping[str, Entry] | None, steps_before: int
) -> dict[str, str]:
    """Return digests of what this process has of the job, and of what the job's own step makes of ``state``.

    Up to ``steps_before`` of the steps before that one are taken first: a job that is a function of its state and the step is
    none the worse for them.
    """
    settings = hashlib.sha256()
    for _, entry in sorted(replay.settings.items()):
        settings.update(hashlib.sha256(entry.data).digest())
    built = [b"" if each.trained else each.digest for _, each in sorted(replay.built.items())]
    found = {
        "batch": batch_digest(replay.job.batch(step)),
        "built": hashlib.sha256(b"".join(built)).hexdigest(),
        "settings": settings.hexdigest(),
    }
    if state is not None:
        session = replay.session
        with suppress(
            TallyError, RuntimeError
        ):  # such steps may not end here; the one that counts is taken anew
            load_state(session, state)
            steps_before = min(steps_before, session.step)
            session.step -= steps_before
            for _ in range(steps_before):
                run_step(session, replay.job, session.recording_context(session.table))
        try:
            load_state(session, state)
            outcome = run_step(session, replay.job, session.recording_context(session.table))
        except (InvalidInput, Nondeterminism, JobFailed, RuntimeError):  # as in whoever repeats the run
            return found
        found["step"] = f"{outcome.fingerprint:016x} {outcome.loss} {read_hyperparameters(session.optimizer)}"
    return found


def _state(folder: Path) -> HeldState:
    return hold(RunDirectory(folder).load_checkpoint(0).values())


def main() -> None:
    """Answer on what was standard output; what a job prints goes nowhere."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    profile = parse_profile(sys.argv[1])
    shift_place(int(sys.argv[2]))
    before = STEPS_BEFORE if int(sys.argv[2]) else 0
    lines = iter(sys.stdin.buffer)
    for environment, line in zip(lines, lines, strict=False):
        os.environ.clear()
        os.environ.update(json.loads(environment))  # what the asking process has by now
        paths = os.environ["PYTHONPATH"].split(os.pathsep)  # and where it finds modules
        sys.path[:] = [*paths, *(path for path in sys.path if path not in paths)]
        try:
            opinion = answer(line, jitter=profile.jitter, steps_before=before)
        except TallyError as problem:
            opinion = Opinion("none", f"it cannot find out: {problem}")
        out.write(json.dumps({"answer": opinion.answer, "reason": opinion.reason}).encode() + b"\n")
        out.flush()


if __name__ == "__main__":
    main()
