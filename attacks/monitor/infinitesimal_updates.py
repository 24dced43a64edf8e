"""States a learning rate of next to nothing and declares a line of tiny steps: each replays within any absolute distance."""

import numpy as np
from scene import EVERY, STEPS, Scene, caught, interpolate, lose_logs, main, weights

from tallystick.fleet.provenance.verification import RATIO_LIMIT
from tallystick.testing.attacks import must

SIZE = 1e-4  # of the whole forged way: one fine stretch of it, as a forger with many checkpoints would show


def attack(scene: Scene) -> str:
    borders = list(range(0, STEPS + 1, EVERY))
    run = scene.trained("forged", learning_rate="1e-9")
    first = weights(run.load_checkpoint(0))
    chance = np.random.default_rng(1)
    end = {name: value + SIZE * chance.standard_normal(value.shape) for name, value in first.items()}
    interpolate(run, borders, end)
    lose_logs(run)
    outcomes = [scene.replayer(run).repeat(a, a + EVERY) for a in borders[:-1]]
    distances = [o.distance or 0.0 for o in outcomes]
    ratios = [o.ratio or 0.0 for o in outcomes]
    must(all(o.verdict == "mismatch" for o in outcomes), f"ratios {ratios}")
    must(max(distances) < 0.1, f"the forger's distances {distances} are not small")
    honest = scene.trained("honest", learning_rate="1e-9")
    lose_logs(honest)
    control = [scene.replayer(honest).repeat(a, a + EVERY) for a in borders[:-1]]
    must(all(o.verdict == "match" for o in control), f"an honest run at that rate: {control}")
    return caught(
        f"the ratio test: distances of {min(distances):.1e} to {max(distances):.1e} are small (0.1 would pass them all), but "
        f"as large as the claimed updates: ratios {min(ratios):.2f} to {max(ratios):.2f}, limit {RATIO_LIMIT}"
    )


if __name__ == "__main__":
    main(attack, __doc__)
