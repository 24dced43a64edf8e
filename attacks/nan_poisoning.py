"""Poisons one step with a NaN: in the loss of the job, in a committed weight, and in the recorded loss."""

from dataclasses import replace

import numpy as np
from stage import AT, EVERY, Stage, edit_checkpoint, main

from tallystick.commit.state import Entry
from tallystick.execution.job import Job
from tallystick.roles.trainer import record
from tallystick.testing.attacks import must, must_refuse
from tallystick.testing.cheats import forge, tampered


def poison(job: Job) -> None:
    honest = job.loss
    count = 0

    def loss(*arguments: object) -> object:
        nonlocal count
        count += 1
        value = honest(*arguments)
        return value * float("nan") if count > AT else value

    job.loss = loss


def edit(entries: dict[str, Entry]) -> None:
    name = next(n for n in sorted(entries) if n.startswith("model/") and entries[n].dtype == "F32")
    values = np.frombuffer(bytes(entries[name].data), "<f4").copy()
    values[0] = np.nan
    entries[name] = Entry(name, "F32", entries[name].shape, values.tobytes())


def attack(stage: Stage) -> str:
    said = must_refuse(
        lambda: record(tampered(stage.order(), poison), stage.run("own")), naming="loss is nan"
    )
    told = stage.honest_run("told")
    forge(told, lambda r: replace(r, loss="nan") if r.step == AT else r)
    stage.caught_by_audit_and_dispute(told, step=AT, verdicts={"mismatch"})
    run = stage.honest_run()
    edit_checkpoint(run, EVERY, edit)
    by = stage.caught_by_audit_and_dispute(run, step=EVERY - 1, verdicts={"mismatch"})
    must("nan" in by, f"nobody names the NaN: {by}")
    return f"the recorder ({said}); {by}"


if __name__ == "__main__":
    main(attack, __doc__)
