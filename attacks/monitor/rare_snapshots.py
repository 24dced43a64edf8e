"""Sets its chip to a snapshot in a thousand days, trains, and declares nothing: a log without a finding of its own."""

from dataclasses import replace

from scene import COURSE, SMALL, Scene, caught, main, must_find, must_pass

from tallystick.testing.attacks import must
from tallystick.testing.watched import train

RATE = 1  # thousandths of a snapshot a day


def attack(scene: Scene) -> str:
    honest = scene.fleet(1, "honest")
    scene.declare(honest, honest.chips)
    must_pass(scene.verdict(honest))
    fleet = scene.fleet(1, rate=RATE)
    train(fleet, fleet.chips, scene.folder / "hidden", SMALL, course=replace(COURSE, steps=8), commits=False)
    (fleet.out / "runs").mkdir()
    verdict = scene.verdict(fleet)
    must(not any(f.rule < 100 for f in verdict.findings), "its log has a finding of its own")
    return caught(must_find(verdict, 117))


if __name__ == "__main__":
    main(attack, __doc__)
