"""Trains hidden weights for a quarter of the time and shows the declared ones otherwise, hoping that no snapshot falls there."""

import random
from collections.abc import Callable

from scene import HOUR, Scene, agent_at, caught, main

from tallystick.fleet.agent.memory import Region
from tallystick.testing.attacks import must
from tallystick.testing.watched import SimulatedTime

HIDDEN, SNAPSHOTS, GROUP = 0.25, 160, 8
Hides = Callable[[int], bool]


def seen_hidden(scene: Scene, name: str, hides: Hides, draw: Callable[[float], float]) -> list[bool]:
    """Return, snapshot by snapshot, whether it saw the hidden weights."""
    time, seen = SimulatedTime(), list[bool]()

    def memory() -> list[tuple[Region, bytes]]:
        seen.append(hides(time.now))
        return [(Region("w", "U8", "weights", 8), b"hidden.." if seen[-1] else b"declared")]

    agent = agent_at(scene.folder / name, time, take=memory, draw=draw)
    agent.start()
    while len(seen) < SNAPSHOTS:
        time.now += HOUR // 2
        agent.poll()
    agent.stop()
    return seen


def escape(seen: list[bool]) -> float:
    groups = [seen[at : at + GROUP] for at in range(0, len(seen), GROUP)]
    return sum(not any(group) for group in groups) / len(groups)


def attack(scene: Scene) -> str:
    chance = random.Random(7)

    def by_night(now: int) -> bool:
        return (now // HOUR) % 24 < 24 * HIDDEN

    exponential = seen_hidden(scene, "exponential", by_night, chance.expovariate)
    share = sum(exponential) / SNAPSHOTS
    must(
        abs(share - HIDDEN) < 5 * (HIDDEN * (1 - HIDDEN) / SNAPSHOTS) ** 0.5,
        f"{share} of the snapshots see it",
    )
    expected = (1 - HIDDEN) ** GROUP
    measured = escape(exponential)
    must(
        abs(measured - expected) < 5 * (expected * (1 - expected) / (SNAPSHOTS / GROUP)) ** 0.5, f"{measured}"
    )
    # The control: a chip that takes its snapshots at noon every day sees nothing, however many it takes.
    at_noon = seen_hidden(
        scene, "daily", lambda now: (now // HOUR) % 24 in range(1, 7), lambda rate: 1.0 / rate
    )
    must(not any(at_noon), f"a schedule is outwitted only {1 - sum(at_noon) / SNAPSHOTS:.2f} of the time")
    return caught(
        f"times that cannot be foreseen: {100 * share:.0f} % of {SNAPSHOTS} snapshots saw what was hidden for 25 % of the time. "
        f"Limit: {GROUP} snapshots of one run all miss it in {100 * measured:.0f} % of cases ({100 * expected:.0f} % expected); "
        "a fixed schedule sees it never"
    )


if __name__ == "__main__":
    main(attack, __doc__)
