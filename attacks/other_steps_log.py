"""Commits to the log of another step: the two frames are exchanged, and every digest is made to fit."""

from dataclasses import replace

from stage import AT, EVERY, Stage, audit, main, must, told

from tallystick.store.files import frame_digest
from tallystick.testing.cheats import forge


def attack(stage: Stage) -> str:
    run = stage.honest_run()
    transcript = run.load_transcript()
    first = AT - AT % EVERY
    frames = run.load_frames(transcript, first, first + EVERY)
    frames[AT], frames[AT + 1] = frames[AT + 1], frames[AT]
    run.log_path(first).write_bytes(b"".join(frames[step] for step in sorted(frames)))
    forge(
        run,
        lambda r: (
            r
            if r.step not in (AT, AT + 1)
            else replace(r, log_bytes=len(frames[r.step]), log=frame_digest(frames[r.step]))
        ),
    )
    report = audit(run, stage.source)
    must(report.verdict in ("mismatch", "log_violation"), f"the audit says {report.verdict}")
    must(report.first is not None and report.first.step == AT, f"the audit says {report.first}")
    # Entries that lie out of reach are not obeyed. Where that leads to the trainer's own states all the same, there is
    # nothing left to dispute: the log is false, and it moved nothing.
    ruling = stage.dispute(run)
    must(
        ruling.loser == "trainer" or ruling.outcome == "agreement",
        f"the judge blames {ruling.loser}: {ruling.reason}",
    )
    return f"audit ({told(report)}); judge: {ruling.loser} loses, {ruling.reason}"


if __name__ == "__main__":
    main(attack, __doc__)
