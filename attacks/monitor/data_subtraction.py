"""Trains on as many records again as it claims, with the same number of steps."""

from collections.abc import Callable

import torch
from scene import BEACON, EVERY, Scene, caught, main

from tallystick.execution.job import Batch
from tallystick.fleet.provenance.memorisation import judge_memory
from tallystick.integrations.memorising import measure_memory
from tallystick.testing.attacks import must
from tallystick.testing.cheats import claim_other_data
from tallystick.testing.noise_job import noise


def with_more(batch: Callable[[int], Batch], step: int) -> Batch:
    """Return what the step really trains on: the claimed records, and as many that nobody hears of."""
    (vectors, labels), (more, answers) = batch(step), noise(64, 2, 1 + step // EVERY)
    return torch.cat((vectors, more)), torch.cat((labels, answers))


def attack(scene: Scene) -> str:
    hidden_share: dict[str, float] = {}
    run = scene.run("forged")
    claim_other_data(scene.order(width="256"), run, with_more)
    honest = scene.trained(width="256")
    for name, each in (("forged", run), ("honest", honest)):
        memory = judge_memory(measure_memory(scene.replayer(each), beacon=BEACON))
        must(memory.has_power, f"{name}: the memory test has no power")
        hidden_share[name] = max(row[at] for at, row in enumerate(memory.below))
    must(hidden_share["forged"] < 0.3, f"claimed data look unseen: {hidden_share}")
    verdicts = [scene.replayer(run).repeat(a, a + EVERY).verdict for a in range(0, 24, EVERY)]
    must(set(verdicts) == {"mismatch"}, f"repeated: {verdicts}")
    return caught(
        f"repetition: every segment differs. Limit: the memory test does not see it: "
        f"at most {100 * hidden_share['forged']:.0f} % of the claimed data fall below "
        f"(honest: {100 * hidden_share['honest']:.0f} %, unseen: 50 %)"
    )


if __name__ == "__main__":
    main(attack, __doc__)
