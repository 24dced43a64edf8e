"""Suppresses every snapshot for 200 days: its log has a boot and nothing else, and no time in use passes between records."""

from scene import Scene, caught, main, must_find

from tallystick.fleet.agent.chip_record import DAY_MS
from tallystick.testing.attacks import must

DAYS = 200


def attack(scene: Scene) -> str:
    fleet = scene.fleet(1)
    fleet.time.now += DAYS * DAY_MS  # it never polls
    (fleet.out / "runs").mkdir()
    found = must_find(scene.verdict(fleet), 118)
    unasked = scene.verdict(fleet, attest=False)
    rules = {f.rule for f in unasked.findings if f.severity == "unknown"}
    must(unasked.verdict == "unknown" and 116 in rules, f"without an attestation: {unasked.verdict}, {rules}")
    return caught(f"{found}; whoever has no attestation of now is told that the time is unknown")


if __name__ == "__main__":
    main(attack, __doc__)
