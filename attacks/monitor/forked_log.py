"""Writes two histories with one key: the inspector sees one, the registry's copy is of the other."""

import shutil

from scene import Scene, agent_at, caught, live, main, must_have_rule, rules_of

from tallystick.testing.attacks import must
from tallystick.testing.watched import SimulatedTime


def attack(scene: Scene) -> str:
    time = SimulatedTime()
    first = agent_at(scene.folder / "a", time)
    first.start()
    live(first, time, 5)
    first.stop()
    shutil.copytree(scene.folder / "a", scene.folder / "b")  # the owner copies the disk, key and all
    branches = []
    for name in ("a", "b"):
        agent = agent_at(scene.folder / name, time)
        agent.start()
        live(agent, time, 5)
        agent.stop()
        branches.append(agent.log)
    one, two = branches
    must(not rules_of(one) and not rules_of(two), "each branch alone has findings")
    must(not rules_of(one, others=[one[:4]]), "an earlier copy of the same branch is called a fork")
    return caught(
        f"{must_have_rule(one, 12, others=[two])}; each branch alone is whole. Limit: copies that never meet prove nothing"
    )


if __name__ == "__main__":
    main(attack, __doc__)
