"""Where and why a run leaves what an audit repeated: the step, its states, and a diagnosis of it."""

from __future__ import annotations

import time

from tallystick.diagnosis.causes import Divergence, Explanation
from tallystick.diagnosis.divergence import compare
from tallystick.diagnosis.recorded_run import RecordedRun
from tallystick.diagnosis.repetition import Bench, Repeated, copied_state
from tallystick.diagnosis.search import EFFORT, Diagnosis, Tell
from tallystick.errors import InvalidInput, Mismatch, Nondeterminism
from tallystick.execution.job import JobSource
from tallystick.execution.snapshot import load_state
from tallystick.roles.audit_report import AuditReport, Deviation, SegmentResult
from tallystick.roles.replay import Replay, open_replay
from tallystick.store.files import RunDirectory


def explain_audit(
    directory: RunDirectory,
    source: JobSource,
    report: AuditReport,
    *,
    jitter: bool = False,
    device: str = "cpu",
    seconds: float = EFFORT,
    tell: Tell | None = None,
) -> Divergence | None:
    """Return where and why the run in ``directory`` leaves what was repeated; None if the audit accuses nobody."""
    if report.verdict not in ("mismatch", "log_violation"):
        return None
    started = time.monotonic()
    segment = next(s for s in report.segments if s.verdict == report.verdict)
    step = segment.first_step
    assert step is not None
    found = Divergence("here", "trainer", step, environment=dict(report.environment))
    first = segment.deviations[0]
    if first.is_evidence:
        cause = "broken_log" if first.about == "copied log" else "broken_state"
        found.findings.append(Explanation(cause, "confirmed", first.own))
        return found
    transcript = directory.load_transcript()
    replay = open_replay(transcript.specification, source, jitter=jitter, device=device)
    if isinstance(replay, Deviation):
        found.notes.append(f"the step cannot be repeated here: {replay}")
        return found
    try:
        _explain_segment(RecordedRun(directory, transcript), replay, segment, found, seconds, tell)
    except (InvalidInput, Mismatch, Nondeterminism) as problem:
        found.notes.append(f"looking for the cause ended early: {problem}")
    finally:
        replay.session.close()
    found.seconds = time.monotonic() - started
    return found


def _explain_segment(
    trainer: RecordedRun,
    replay: Replay,
    segment: SegmentResult,
    found: Divergence,
    seconds: float,
    tell: Tell | None,
) -> None:
    step = found.step
    assert step is not None
    transcript = trainer.transcript
    frames = trainer.directory.load_frames(transcript, segment.start, segment.end)
    load_state(replay.session, trainer.state(segment.start))
    for before in range(segment.start, step):
        replay.follow(transcript.record(before), frames[before])
    bench = Bench(replay, copied_state(replay), transcript.record(step), frames[step])
    diagnosis = Diagnosis(bench, transcript, found, seconds=seconds, tell=tell)
    diagnosis.run(trainer.state_or_note(step + 1, found))
    if found.state is None and diagnosis.own is not None and segment.end > step + 1:
        _compare_at_end(trainer, replay, diagnosis.own, frames, segment.end, found)


def _compare_at_end(
    trainer: RecordedRun,
    replay: Replay,
    own: Repeated,
    frames: dict[int, bytes],
    end: int,
    found: Divergence,
) -> None:
    """Compare the next states that both sides have: the committed ones, some steps after the parting."""
    assert found.step is not None
    stated = trainer.state_or_note(end, found)
    if stated is None:
        return
    load_state(replay.session, own.entries)
    try:
        for step in range(found.step + 1, end):
            replay.follow(trainer.transcript.record(step), frames[step])
    except (InvalidInput, Nondeterminism) as problem:
        found.notes.append(
            f"the log cannot be followed up to the committed state after {end} steps: {problem}"
        )
        return
    found.after, found.state = end, compare(copied_state(replay), stated)
