"""Trains on the data in another order than was committed to, and tries both: to claim the old order, and to admit the new."""

from scene import BEACON, EVERY, Scene, caught, main, must_find

from tallystick.execution.job import Job
from tallystick.fleet.provenance.memorisation import judge_memory
from tallystick.integrations.memorising import measure_memory
from tallystick.testing.attacks import must, must_refuse
from tallystick.testing.cheats import claim_other_data

PLACES = {2: 4, 4: 2}


def swapped(step: int) -> int:
    return PLACES.get(step // EVERY, step // EVERY) * EVERY + step % EVERY


def attack(scene: Scene) -> str:
    run = scene.run("forged")
    claim_other_data(scene.order(width="256"), run, lambda batch, step: batch(swapped(step)))
    memory = judge_memory(measure_memory(scene.replayer(run), beacon=BEACON))
    learned = {s.start: s.learned for s in memory.doubtful}
    must(learned == {8: (16, 20), 16: (8, 12)}, f"learned: {learned}")
    must(scene.replayer(run).repeat(8, 12).verdict == "mismatch", "the segment repeats")

    def reorder(job: Job) -> None:
        own = job.batch
        job.batch = lambda step: own(swapped(step))

    fleet = scene.fleet(1)  # the pre-commitment holds the job's order, the records that of the training
    admitted = scene.declare(fleet, fleet.chips, source=scene.tampered(reorder))
    found = must_find(scene.verdict(fleet), 101)
    must_refuse(
        lambda: measure_memory(scene.replayer(admitted), beacon=BEACON),
        naming="the job's data are",
    )
    return caught(
        f"the memory test (data of steps 8-12 were learned in 16-20) and repetition; admitted, by {found}"
    )


if __name__ == "__main__":
    main(attack, __doc__)
