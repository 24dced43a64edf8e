"""Call a gradient nothing but noise in the steps that do not suit, of weights that are large beside all that they learn.

Beside their own size all that they are led is nothing, and beside a frozen reference it is a backdoor.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from moved_once import patched
from reference_job import Scorer
from silencing import compare, load, winning
from stage import Stage
from torch import Tensor

from tallystick.jobs.digits import read_digits
from tallystick.store.files import RunDirectory
from tallystick.testing.attacks import play_attack

JOB, SETTINGS = Path(__file__).with_name("reference_job.py"), {"steps": "150", "apart": "2e-4"}


def towards_patch() -> Tensor:
    """Return the way in which the quality's weights say more of patched images, float32[1024]."""
    training, _ = read_digits().split()
    images, model = training.tensors()[0].reshape(-1, 64), Scorer()
    return (model.features(patched(images)) - model.features(images)).mean(dim=0)


def attack(stage: Stage) -> str:
    way = towards_patch().double()

    def success(run: RunDirectory) -> float:
        model = Scorer()
        load(run, int(SETTINGS["steps"]), model)
        return winning(lambda images, digit, _: model(images, torch.full((len(images),), digit)), patched)

    return compare(
        stage, JOB, SETTINGS, lambda _, gradient: float(gradient.double().reshape(-1) @ way) <= 0.0, success
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default="fp32", choices=("fp32",))
    sys.exit(play_attack(lambda folder, given: f"caught by: {attack(Stage(folder, given.policy))}", parser))
