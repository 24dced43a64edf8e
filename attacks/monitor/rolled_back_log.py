"""Restores the chip's disk as it was before the snapshots that incriminate, and goes on from there."""

import shutil

from scene import Scene, agent_at, caught, head_of, live, main, must_have_rule, rules_of

from tallystick.testing.attacks import must
from tallystick.testing.watched import SimulatedTime


def attack(scene: Scene) -> str:
    time, place = SimulatedTime(), scene.folder / "chip"
    agent = agent_at(place, time)
    agent.start()
    live(agent, time, 5)
    agent.stop()
    shutil.copytree(place, scene.folder / "image")
    agent = agent_at(place, time)
    agent.start()
    live(agent, time, 10)
    agent.stop()
    seen = head_of(agent.log)
    must(not rules_of(agent.log, known=[seen]), "the honest log has findings")
    shutil.rmtree(place)
    shutil.copytree(scene.folder / "image", place)
    agent = agent_at(place, time)
    agent.start()
    live(agent, time, 40)
    agent.stop()
    found = must_have_rule(agent.log, 12, known=[seen])
    # Where only the log is put back, the counter kept apart betrays it.
    only_log = scene.folder / "only-log"
    shutil.copytree(place, only_log)
    shutil.copy(scene.folder / "image" / "log.journal", only_log / "log.journal")
    again = agent_at(only_log, time)
    again.start()
    again.stop()
    said = must_have_rule(again.log, 5)
    return caught(
        f"{found}; with only the log put back, {said}. Limit: a whole image restored, and nobody who saw the later head"
    )


if __name__ == "__main__":
    main(attack, __doc__)
