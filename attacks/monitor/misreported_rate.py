"""Trains with three times the learning rate that it declares."""

from dataclasses import replace

from scene import Scene, caught, main, must, must_find, must_pass

from tallystick.commit.encoding import hex_float
from tallystick.execution.job import Job
from tallystick.store.files import RunDirectory
from tallystick.testing.cheats import forge

FACTOR = 3.0


def attack(scene: Scene) -> str:
    honest = scene.fleet(1, "honest")
    scene.declare(honest, honest.chips)
    must_pass(scene.verdict(honest))

    def faster(job: Job) -> None:
        for group in job.optimizer.param_groups:
            group["lr"] *= FACTOR

    def deny(run: RunDirectory) -> None:
        """State the declared rate in every record."""
        forge(
            run,
            lambda r: replace(
                r,
                schedule=tuple(
                    (g, n, hex_float(float.fromhex(v) / FACTOR) if n == "lr" and isinstance(v, str) else v)
                    for g, n, v in r.schedule
                ),
            ),
        )

    fleet = scene.fleet(1, "forger")
    run = scene.declare(fleet, fleet.chips, source=scene.tampered(faster), edit=deny)
    stated = {v for r in run.load_transcript().records for _, n, v in r.schedule if n == "lr"}
    must(len(stated) == 1, f"stated rates {stated}")
    return caught(must_find(scene.verdict(fleet), 105))


if __name__ == "__main__":
    main(attack, __doc__)
