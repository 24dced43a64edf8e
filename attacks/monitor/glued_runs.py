"""Puts another model's weights in half-way and reports the two trainings as one."""

from pathlib import Path

from scene import COURSE, SMALL, STEPS, Scene, caught, main, must_find, must_pass

from tallystick.testing.watched import Trained, glue, report_run, train


def attack(scene: Scene) -> str:
    honest = scene.fleet(1, "honest")
    scene.declare(honest, honest.chips)
    must_pass(scene.verdict(honest))
    fleet = scene.fleet(1, "forger")
    middle = STEPS // 2
    first, second, out = (fleet.out / name for name in ("first", "second", "runs/model"))
    trained = train(fleet, fleet.chips, first, SMALL, course=COURSE, watched=lambda step: step < middle)
    other = {**SMALL, "init_seed": "8"}
    train(
        fleet, fleet.chips, second, other, course=COURSE, watched=lambda step: step >= middle, commits=False
    )
    assert isinstance(trained, Trained)
    glue(first, second, Path(out), middle)
    report_run(fleet, fleet.chips, Path(out), trained, SMALL, COURSE)
    return caught(must_find(scene.verdict(fleet, random_segments=1), 105))


if __name__ == "__main__":
    main(attack, __doc__)
