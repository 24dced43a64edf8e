"""Replays evidence: the proof of a step of another run, shown against this run's root."""

from stage import AT, Stage, main

from tallystick.roles.trainer import record
from tallystick.run.proofs import verify_specification_proof, verify_step_proof
from tallystick.testing.attacks import must, must_refuse


def attack(stage: Stage) -> str:
    run, other = stage.honest_run(), stage.run("other")
    record(stage.order(learning_rate="0.01"), other)
    mine, foreign = run.load_transcript(), other.load_transcript()
    must(mine.root() != foreign.root(), "two runs have one root")
    step = must_refuse(lambda: verify_step_proof(foreign.prove_step(AT), mine.root()), naming="root")
    must_refuse(
        lambda: verify_specification_proof(foreign.prove_specification(), foreign.specification, mine.root()),
        naming="root",
    )
    must_refuse(
        lambda: verify_specification_proof(mine.prove_specification(), foreign.specification, mine.root()),
        naming="",
    )
    return f"the verifier ({step})"


if __name__ == "__main__":
    main(attack, __doc__)
