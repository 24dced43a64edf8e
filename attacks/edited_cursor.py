"""Commits to a checkpoint whose cursor stands elsewhere, so that whoever starts from it trains on other data.

Then the same with the steps after it computed from there: they follow from the state that was committed to, and only what its
cursor says is not so.
"""

from dataclasses import replace

from stage import EVERY, Stage, audit, edit_checkpoint, main

from tallystick.commit.encoding import canonical_json
from tallystick.commit.state import Entry, summarise
from tallystick.execution.snapshot import load_state, state_entries
from tallystick.execution.step import run_step
from tallystick.roles.replay import Replay, open_replay
from tallystick.roles.run_writer import step_record
from tallystick.run.documents import StepRecord
from tallystick.store.files import RunDirectory
from tallystick.testing.attacks import must
from tallystick.testing.cheats import forge

SHIFT = 100


def edit(entries: dict[str, Entry]) -> None:
    data = canonical_json({"step": EVERY + 3})
    entries["document/cursor"] = Entry("document/cursor", "U8", (len(data),), data)


def shift(run: RunDirectory) -> None:
    """Let the segment after the first checkpoint be the job's steps from ``EVERY + SHIFT`` on."""
    transcript, entries = run.load_transcript(), run.load_checkpoint(EVERY)
    data = canonical_json({"step": EVERY + SHIFT})
    entries["document/cursor"] = Entry("document/cursor", "U8", (len(data),), data)
    run.write_checkpoint(EVERY, list(entries.values()))
    replay = open_replay(transcript.specification, Stage(run.path, "fp32").source)
    assert isinstance(replay, Replay)
    session = replay.session
    load_state(session, entries)
    records, frames = dict[int, StepRecord](), list[bytes]()
    records[EVERY - 1] = _committing(transcript.record(EVERY - 1), list(entries.values()))
    for step in range(EVERY, 2 * EVERY):
        context = session.recording_context(session.table)
        outcome = run_step(session, replay.job, context)
        frames.append(context.finish())
        session.settle(context)
        records[step] = step_record(step, outcome, frames[-1], None)
    ended = state_entries(session)
    run.write_checkpoint(2 * EVERY, ended)
    records[2 * EVERY - 1] = _committing(records[2 * EVERY - 1], ended)
    run.log_path(EVERY).write_bytes(b"".join(frames))
    session.close()
    forge(run, lambda record: records.get(record.step, record))


def _committing(record: StepRecord, entries: list[Entry]) -> StepRecord:
    return replace(record, state_root=summarise(entries).root().hex())


def attack(stage: Stage) -> str:
    run = stage.honest_run()
    edit_checkpoint(run, EVERY, edit)
    found = stage.caught_by_audit_and_dispute(run, step=EVERY - 1, verdicts={"mismatch"})
    other = stage.honest_run("shifted")
    shift(other)
    report = audit(other, stage.source, steps=(EVERY, 2 * EVERY))
    must(report.verdict == "mismatch", f"the audit of a segment of other steps says {report.verdict}")
    return f"{found}; of a segment: {report.first}"


if __name__ == "__main__":
    main(attack, __doc__)
