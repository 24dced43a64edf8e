"""Trains and commits honestly, then delivers another file: a bit of the final weights is flipped, or of a state in between."""

from stage import EVERY, STEPS, Stage, audit, main

from tallystick.store.files import RunDirectory
from tallystick.testing.attacks import must


def flip(run: RunDirectory, steps_done: int) -> None:
    """Flip the lowest bit of the last element of the checkpoint's file."""
    path = run.checkpoint_path(steps_done)
    data = bytearray(path.read_bytes())
    data[-4] ^= 1
    path.write_bytes(bytes(data))


def attack(stage: Stage) -> str:
    run = stage.honest_run()
    found: list[str] = []
    for steps_done in (STEPS, EVERY):
        flip(run, steps_done)
        report = audit(run, stage.source)
        must(
            report.verdict == "mismatch",
            f"the audit of another file after {steps_done} steps says {report.verdict}",
        )
        assert report.first is not None
        must("root is" in report.first.own, f"the audit names {report.first}")
        found.append(report.first.own)
        flip(run, steps_done)
        must(audit(run, stage.source).verdict == "match", "the audit of what was committed is no match")
    return f"audit: {'; '.join(found)}"


if __name__ == "__main__":
    main(attack, __doc__)
