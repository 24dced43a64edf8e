"""Commits to a checkpoint that differs in one optimizer moment only; weights and logs are the honest ones."""

import numpy as np
from stage import EVERY, Stage, edit_checkpoint, main

from tallystick.commit.state import Entry


def edit(entries: dict[str, Entry]) -> None:
    name = next(
        n
        for n in sorted(entries)
        if n.startswith("optimizer/") and entries[n].dtype == "F32" and entries[n].shape
    )
    values = np.frombuffer(bytes(entries[name].data), "<f4").copy()
    values[0] += np.float32(0.125)
    entries[name] = Entry(name, "F32", entries[name].shape, values.tobytes())


def attack(stage: Stage) -> str:
    run = stage.honest_run()
    edit_checkpoint(run, EVERY, edit)
    return stage.caught_by_audit_and_dispute(run, step=EVERY - 1, verdicts={"mismatch"})


if __name__ == "__main__":
    main(attack, __doc__)
