"""Commits to the log of another step: the two frames are exchanged, and every digest is made to fit."""

from dataclasses import replace

from stage import AT, EVERY, Stage, main

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
    return stage.caught_by_audit_and_dispute(run, step=AT, verdicts={"mismatch", "log_violation"})


if __name__ == "__main__":
    main(attack, __doc__)
