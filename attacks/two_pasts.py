"""Trains one step on other data, and puts a decoy before it: a false record that follows from a past made up for the judge.

No round of bisection asks for the state before the decoy. Whoever rules on its record from the trainer's word for that state
finds the auditor's record false, and never sees the other data.
"""

from dataclasses import replace
from unittest.mock import patch

import numpy as np
from stage import AT, EVERY, Stage, audit, claim_path, dispute, main

from tallystick.commit.encoding import hex_float
from tallystick.commit.state import Entry, HeldState, hold
from tallystick.execution.snapshot import copied_state, load_state
from tallystick.roles import judge
from tallystick.roles.claim import write_claim
from tallystick.roles.recorded_trace import RecordedTrace
from tallystick.roles.replay import Replay, open_replay
from tallystick.run.documents import StepRecord
from tallystick.store.files import RunDirectory
from tallystick.testing.attacks import must
from tallystick.testing.cheats import CHEATS, forge

DECOY = AT - 1
ELSEWHERE = 1_000_003  # as in ``CHEATS["other_data"]``


def put_decoy(run: RunDirectory, stage: Stage) -> dict[int, HeldState]:
    """Let the record of step ``DECOY`` follow from a state that was never there; return what the trainer shows, by steps done."""
    transcript, end = run.load_transcript(), EVERY + EVERY
    frames = run.load_frames(transcript, EVERY, end)
    replay = open_replay(transcript.specification, stage.source)
    assert isinstance(replay, Replay)
    honest = replay.job.batch
    replay.job.batch = lambda step: honest(step + ELSEWHERE if step == AT else step)
    load_state(replay.session, run.load_checkpoint(EVERY))
    shown: dict[int, HeldState] = {}
    for step in range(EVERY, end):
        shown[step] = hold(copied_state(replay.session).values())
        replay.follow(transcript.record(step), frames[step])
    past = dict(shown[DECOY].entries)
    name = max(name for name in past if name.startswith("model/") and name.endswith("weight"))
    values = np.frombuffer(past[name].data, "<f4") * np.float32(2)
    past[name] = Entry(name, "F32", past[name].shape, values.tobytes())
    load_state(replay.session, past)
    outcome, _ = replay.follow(transcript.record(DECOY), frames[DECOY])
    replay.session.close()

    def false(record: StepRecord) -> StepRecord:
        if record.step != DECOY:
            return record
        return replace(record, loss=hex_float(outcome.loss), fingerprint=f"{outcome.fingerprint:016x}")

    forge(run, false)
    return {**shown, DECOY: hold(past.values())}


def attack(stage: Stage) -> str:
    run = stage.run()
    CHEATS["other_data"](AT).run(stage.order(), run)
    shown = put_decoy(run, stage)
    found = audit(run, stage.source)
    must(found.verdict in ("mismatch", "log_violation"), f"an honest auditor says {found.verdict}")
    claim = claim_path(run)
    write_claim(run, stage.source, claim)

    class TwoPasts(RecordedTrace):
        """Of the trainer: the states that it had, and one made up where nobody but a judge of records asks."""

        def commitment_at(self, index: int) -> bytes:
            shows = self.party == "trainer" and index in shown
            return shown[index].root if shows else super().commitment_at(index)

        def witness_at(self, index: int) -> HeldState | None:
            shows = self.party == "trainer" and index in shown
            return shown[index] if shows else super().witness_at(index)

    with patch.object(judge, "RecordedTrace", TwoPasts):
        ruling = dispute(run, claim, stage.source)
    must((ruling.loser, ruling.step) == ("trainer", DECOY), f"the judge says {ruling.loser}: {ruling.reason}")
    return f"judge: trainer loses, {ruling.reason}"


if __name__ == "__main__":
    main(attack, __doc__)
