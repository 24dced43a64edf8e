"""Shares one large run among owners who are each too small to be inspected alone."""

from scene import Scene, caught, main

from tallystick.fleet.sampling.scenarios import owners_audited_apart, owners_in_one_pool
from tallystick.fleet.sampling.simulate import play
from tallystick.testing.attacks import must

TRIALS = 3000


def attack(scene: Scene) -> str:
    del scene
    pooled = play(owners_in_one_pool(), trials=TRIALS, seed=4)
    apart = play(owners_audited_apart(), trials=TRIALS, seed=4)
    wanted = pooled.scenario.question.probability
    must(pooled.low >= wanted - 0.03 and pooled.agrees, f"one pool: {pooled.rate}, wanted {wanted}")
    must(apart.high < wanted and apart.agrees, f"apart: {apart.rate}")
    return caught(
        f"sampling all owners as one pool: the run of ten owners is found in {100 * pooled.rate:.1f} % of {TRIALS} plays "
        f"({100 * wanted:.0f} % wanted). Limit: where owners are sampled apart and small ones left out, {100 * apart.rate:.1f} %"
    )


if __name__ == "__main__":
    main(attack, __doc__)
