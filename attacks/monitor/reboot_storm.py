"""Reboots again and again, so that the waiting time to a snapshot is drawn anew each time."""

import random

from scene import Scene, agent_at, caught, live, main, must_have_rule, rules_of

from tallystick.fleet.agent.chip_log import snapshots_of
from tallystick.fleet.agent.chip_record import LoggedRecord
from tallystick.testing.attacks import must
from tallystick.testing.watched import SimulatedTime

DAYS, BOOTS = 10, 6  # a day


def lived(scene: Scene, name: str, boots_a_day: int) -> tuple[int, list[LoggedRecord]]:
    time, chance = SimulatedTime(), random.Random(3)
    for _ in range(max(1, DAYS * boots_a_day)):
        agent = agent_at(scene.folder / name, time, draw=chance.expovariate)
        agent.start()
        live(agent, time, DAYS / max(1, DAYS * boots_a_day), every=1)
        agent.stop()
    return len(snapshots_of(agent.log)), agent.log


def attack(scene: Scene) -> str:
    quiet, honest = lived(scene, "honest", 0)
    many, stormy = lived(scene, "storm", BOOTS)
    must(not rules_of(honest), f"the honest log: {rules_of(honest)}")
    found = must_have_rule(stormy, 13)
    for count in (quiet, many):
        must(abs(count - DAYS) < 5 * DAYS**0.5, f"{count} snapshots in {DAYS} days at one a day")
    return caught(
        f"{found}; and it gains nothing: {many} snapshots in {DAYS} days with {BOOTS * DAYS} boots, {quiet} with one, "
        f"{DAYS} expected (the waiting time is memoryless)"
    )


if __name__ == "__main__":
    main(attack, __doc__)
