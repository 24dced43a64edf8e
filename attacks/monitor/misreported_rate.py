"""Trains with four times the learning rate that it declares."""

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

    fleet = scene.fleet(1, "forger")
    scene.declare(fleet, fleet.chips, source=scene.tampered(faster), edit=deny)
    return caught(must_find(scene.verdict(fleet), 105))


if __name__ == "__main__":
    main(attack, __doc__)
