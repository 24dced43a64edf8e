"""Begins with a model that somebody trained before, and declares it as initialised by the job."""

import torch
from scene import Scene, caught, main, must_find, must_pass, weights

from tallystick.execution.job import Job


def attack(scene: Scene) -> str:
    honest = scene.fleet(1, "honest")
    scene.declare(honest, honest.chips)
    must_pass(scene.verdict(honest))
    before = weights(scene.trained("before", data_seed="7").load_checkpoint(24))

    def start_there(job: Job) -> None:
        with torch.no_grad():
            for name, parameter in job.model.named_parameters():
                old = before[f"model/{name}"]
                parameter.copy_(torch.from_numpy(old).reshape(parameter.shape))

    fleet = scene.fleet(1, "forger")
    scene.declare(fleet, fleet.chips, source=scene.tampered(start_there))
    return caught(must_find(scene.verdict(fleet), 107))


if __name__ == "__main__":
    main(attack, __doc__)
