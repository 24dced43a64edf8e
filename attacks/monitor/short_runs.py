"""Reports one long run as two short ones, each below a threshold, the second one as if it began anew."""

import torch
from scene import STEPS, Scene, caught, main, must_find, weights

from tallystick.execution.job import Job
from tallystick.fleet.provenance.transcripts import Lineage
from tallystick.testing.attacks import must


def attack(scene: Scene) -> str:
    fleet = scene.fleet(1)
    first = scene.declare(fleet, fleet.chips, "first")
    last = weights(first.load_checkpoint(STEPS))

    def go_on(job: Job) -> None:
        with torch.no_grad():
            for name, parameter in job.model.named_parameters():
                parameter.copy_(torch.from_numpy(last[f"model/{name}"]).reshape(parameter.shape))

    scene.declare(fleet, fleet.chips, "second", source=scene.tampered(go_on), data_seed="1")
    found = must_find(scene.verdict(fleet), 107)
    honest = scene.fleet(1, "honest")
    parent = scene.declare(honest, honest.chips, "first")
    stated = Lineage("continued", parent.load_transcript().root().hex(), STEPS)
    scene.declare(honest, honest.chips, "second", source=scene.tampered(go_on), data_seed="1", lineage=stated)
    answers = [run.correct for run in scene.verdict(honest).runs]
    must(answers == ["pass", "pass"], f"the owner who states the lineage: {answers}")
    return caught(f"{found}; stated as continued, both runs pass and count as one lineage")


if __name__ == "__main__":
    main(attack, __doc__)
