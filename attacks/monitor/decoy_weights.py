"""Keeps the declared model in memory as a decoy, and trains another one beside it."""

from scene import Scene, caught, main, must_find, must_pass

from tallystick.fleet.agent.chip_log import snapshots_of
from tallystick.fleet.agent.memory import Region
from tallystick.testing.attacks import must


def attack(scene: Scene) -> str:
    honest = scene.fleet(1, "honest")
    scene.declare(honest, honest.chips)
    must_pass(scene.verdict(honest))
    hidden = scene.trained("hidden", data_seed="5").load_checkpoint(8)
    fleet = scene.fleet(1, "forger")
    chip = fleet.chips[0]
    own = chip.memory.read
    secret = [
        (Region(f"workspace/{at}", "U8", "other", len(bytes(e.data))), bytes(e.data))
        for at, e in enumerate(hidden.values())
        if e.name.startswith("model/")
    ]
    chip.probe.take = lambda: [*own(), *secret]
    scene.declare(fleet, fleet.chips)
    verdict = scene.verdict(fleet)
    found = must_find(verdict, 111)
    must(len(snapshots_of(chip.agent.log)) > 0, "no snapshot")
    share = sum(len(data) for _, data in secret) / sum(len(data) for _, data in [*own(), *secret])
    return caught(
        f"{found}. Limit: a reader who tolerates {100 * share:.0f} % of memory as workspace lets this model pass, and a software "
        "agent sees only what the program registers"
    )


if __name__ == "__main__":
    main(attack, __doc__)
