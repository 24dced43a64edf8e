"""Gives the judge another state than the one committed to, hoping that the step is repeated from it."""

import numpy as np
from stage import AT, EVERY, Stage, claim_path, dispute, main

from tallystick.commit.state import Entry
from tallystick.roles.claim import write_claim
from tallystick.testing.attacks import must, must_refuse
from tallystick.testing.cheats import EditedWeights, LyingAuditor


def swap(run, done: int) -> None:
    entries = run.load_checkpoint(done)
    name = next(n for n in sorted(entries) if n.startswith("model/") and entries[n].dtype == "F32")
    values = np.frombuffer(bytes(entries[name].data), "<f4") * np.float32(2)
    entries[name] = Entry(name, "F32", entries[name].shape, values.tobytes())
    run.write_checkpoint(done, list(entries.values()))


def attack(stage: Stage) -> str:
    # The trainer's own: the edited final state is disputed, and the agreed state before it is not handed out.
    run = stage.run()
    EditedWeights().run(stage.order(), run)
    claim = claim_path(run)
    write_claim(run, stage.source, claim)
    last = run.load_transcript().num_steps
    start = last - last % EVERY
    swap(run, start)
    root = next(c.state_root for c in run.load_transcript().checkpoints() if c.steps_done == start)
    said = must_refuse(lambda: run.load_committed(start, root), naming="root")
    ruling = dispute(run, claim, stage.source)
    must(ruling.loser == "trainer", f"the judge says {ruling.loser}: {ruling.reason}")
    # The auditor's: it opens another state to make the trainer's step look wrong.
    honest = stage.run("honest")
    LyingAuditor(AT).run(stage.order(), honest)
    swap(claim_path(honest), EVERY)
    second = dispute(honest, claim_path(honest), stage.source)
    must(second.loser == "auditor", f"the judge says {second.loser}: {second.reason}")
    return f"the judge, who takes no state that does not open the commitment ({said})"


if __name__ == "__main__":
    main(attack, __doc__)
