"""Trains and declares nothing, under an agent that sees no memory: every snapshot there, and every one empty."""

from scene import UEIDS, Scene, caught, main, must_find

from tallystick.testing.attacks import must
from tallystick.testing.watched import STEP_MS

DAYS = 18


def attack(scene: Scene) -> str:
    fleet = scene.fleet(1)
    (chip,) = fleet.chips
    for _ in range(DAYS * 24 * 3_600_000 // STEP_MS):
        fleet.time.now += STEP_MS
        chip.agent.poll()
    (fleet.out / "runs").mkdir()
    alone = scene.verdict(fleet)
    empty = [f for f in alone.findings if f.rule == 112]
    must(alone.verdict == "unknown" and empty[0].severity == "unknown", f"verdict {alone.verdict}")
    idle = scene.verdict(fleet, use={UEIDS[0].hex(): 0.0})
    must(idle.verdict == "pass", f"control, a chip whose meter says that nothing ran: {idle.verdict}")
    found = must_find(scene.verdict(fleet, use={UEIDS[0].hex(): 24.0 * DAYS}), 112)
    return caught(f"nothing passes by snapshots alone (unknown); with a meter's hours {found}")


if __name__ == "__main__":
    main(attack, __doc__)
