"""Claims records that it never trained on, in one segment of six; nobody happens to repeat that segment."""

from scene import BEACON, EVERY, Scene, caught, main

from tallystick.fleet.provenance.memorisation import judge_memory
from tallystick.integrations.memorising import measure_memory
from tallystick.testing.attacks import must
from tallystick.testing.cheats import claim_other_data
from tallystick.testing.noise_job import noise


def attack(scene: Scene) -> str:
    run = scene.run("forged")
    claim_other_data(
        scene.order(width="256"),
        run,
        lambda batch, step: noise(64, 1, step) if step // EVERY == 2 else batch(step),
    )
    memory = judge_memory(measure_memory(scene.replayer(run), beacon=BEACON))
    doubted = [(s.start, s.end) for s in memory.doubtful]
    must(doubted == [(8, 12)], f"doubted: {doubted}")
    must(scene.replayer(run).repeat(8, 12).verdict == "mismatch", "the doubted segment repeats")
    honest = judge_memory(measure_memory(scene.replayer(scene.trained(width="256")), beacon=BEACON))
    must(honest.has_power and not honest.doubtful, "the honest run is doubted")
    return caught(
        f"the memory test, without a repetition ({memory.doubtful[0]}), and by repeating that segment. Limit: a share "
        f"below {100 * max(s.most_unseen for s in honest.segments):.0f} % of a segment's data would not be doubted here"
    )


if __name__ == "__main__":
    main(attack, __doc__)
