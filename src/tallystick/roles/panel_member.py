"""A member of a judge's panel (``roles.panel``): reads questions line by line and answers each, until its input ends."""

from __future__ import annotations

import base64
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tallystick.commit.state import HeldState, hold
from tallystick.errors import TallyError
from tallystick.execution.determinism import parse_profile
from tallystick.execution.job import JobSource
from tallystick.protocol.trace import PARTIES, DisputedPosition, Party
from tallystick.protocol.transcript import Transcript
from tallystick.protocol.verdict import parse_log_objection
from tallystick.roles.auditor import Deviation, Replay, open_replay
from tallystick.roles.judge import RecordedTrace, StepJudge, find_other_beginning
from tallystick.roles.ledger import Ledger
from tallystick.roles.log_judge import rule_on_log
from tallystick.roles.operators import find_structure
from tallystick.roles.panel import Opinion, asked_of
from tallystick.store.files import RunDirectory


class HandedTrace(RecordedTrace):
    """A party's trace whose states the judge has handed over; what is not among them cannot be opened."""

    def witness_at(self, index: int) -> HeldState | None:
        """Return the state after ``index`` steps, if it was handed over."""
        return self.held.get(index)


def answer(line: bytes, *, jitter: bool = False) -> Opinion:
    """Return the opinion on one question.

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
            other = find_other_beginning(trainer, ours, replay)
            return Opinion("none" if other is None else "trainer", str(other))
        return _answer(asked, (trainer, ours), (auditor, theirs), replay)
    finally:
        replay.session.close()


def _answer(
    asked: Mapping[str, Any],
    trainers: tuple[RunDirectory, Transcript],
    auditors: tuple[RunDirectory, Transcript],
    replay: Replay,
) -> Opinion:
    step, place = asked["step"], Path(asked["place"])
    agreed = _state(place / "agreed") if asked["agreed"] else None
    if asked["kind"] == "structure":
        assert agreed is not None
        record = trainers[1].record(step)
        frame = trainers[0].load_frames(trainers[1], step, step + 1)[step]
        return Opinion(
            find_structure(replay, agreed, record, frame, asked["at"]).hex(), "its own list has it"
        )
    traces: dict[Party, RecordedTrace] = {}
    for party, (directory, transcript) in zip(PARTIES, (trainers, auditors), strict=True):
        trace = traces[party] = HandedTrace(directory, transcript, replay, party, Ledger())
        if agreed is not None:
            trace.held[step] = agreed
        if party in asked["states"]:
            trace.held[step + 1] = _state(place / party)
    judge = StepJudge(*trainers, *auditors, replay, traces, source=None)
    if asked["kind"] == "log":
        objection = parse_log_objection(asked["objection"].encode())
        found = rule_on_log(*trainers, replay, objection, None if agreed is None else agreed.entries)
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
    ruling = judge.rule(position, {})
    return Opinion(ruling.loser, ruling.reason)


def _state(folder: Path) -> HeldState:
    return hold(RunDirectory(folder).load_checkpoint(0).values())


def main() -> None:
    """Answer on what was standard output; what a job prints goes nowhere."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    profile = parse_profile(sys.argv[1])
    for line in sys.stdin.buffer:
        try:
            opinion = answer(line, jitter=profile.jitter)
        except TallyError as problem:
            opinion = Opinion("none", f"it cannot find out: {problem}")
        out.write(json.dumps({"answer": opinion.answer, "reason": opinion.reason}).encode() + b"\n")
        out.flush()


if __name__ == "__main__":
    main()
