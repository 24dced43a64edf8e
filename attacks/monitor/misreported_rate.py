"""Trains with four times the learning rate that it declares: denied in the records, or consistent in every committed state."""

from dataclasses import replace

from scene import Scene, caught, main, must_find, must_pass

from tallystick.execution.job import Job
from tallystick.store.files import RunDirectory
from tallystick.testing.cheats import forge

FACTOR = 4.0


def attack(scene: Scene) -> str:
    honest = scene.fleet(1, "honest")
    declared = scene.declare(honest, honest.chips).load_transcript()
    must_pass(scene.verdict(honest))

    def faster(job: Job) -> None:
        for group in job.optimizer.param_groups:
            group["lr"] *= FACTOR

    def deny(run: RunDirectory) -> None:
        """State in every record what an honest run states."""
        forge(run, lambda r: replace(r, schedule=declared.record(r.step).schedule))

    denied = scene.fleet(1, "denied")
    scene.declare(denied, denied.chips, source=scene.tampered(faster), edit=deny)
    found = must_find(scene.verdict(denied), 105)
    admitted = scene.fleet(1, "admitted")
    scene.declare(admitted, admitted.chips, source=scene.tampered(faster))
    return caught(f"{found}; with records and states that agree, {must_find(scene.verdict(admitted), 114)}")


if __name__ == "__main__":
    main(attack, __doc__)
