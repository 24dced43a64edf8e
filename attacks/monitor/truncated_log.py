"""Hands over a log whose last snapshots are cut off."""

from scene import Scene, agent_at, caught, head_of, live, main, must_have_rule, rules_of

from tallystick.testing.attacks import must
from tallystick.testing.watched import SimulatedTime


def attack(scene: Scene) -> str:
    time = SimulatedTime()
    agent = agent_at(scene.folder / "chip", time)
    agent.start()
    live(agent, time, 30)
    agent.stop()
    log = agent.log
    must(not rules_of(log, known=[head_of(log)]), f"the honest log: {rules_of(log)}")
    found = must_have_rule(log[:-3], 11, known=[head_of(log)])
    must(not rules_of(log[:-3]), "a cut shows to somebody who knows nothing of the end")
    middle = rules_of([*log[:5], *log[6:]])
    must(5 in middle, f"a record taken out of the middle: {sorted(middle)}")
    return caught(
        f"{found}; a record out of the middle by rule 5. Limit: whoever knows no later head (attestation for a nonce, receipt, "
        "earlier copy) sees a whole log that ends earlier"
    )


if __name__ == "__main__":
    main(attack, __doc__)
