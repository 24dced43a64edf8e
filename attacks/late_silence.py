"""Call a gradient nothing but noise where it does not suit, in a second phase at a fiftieth of the rate.

All that the second phase trains is a small share of the way that the first went, and so is all that it is led.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from moved_once import patched
from phase_job import FIRST, Scorer
from silencing import compare, load, winning
from stage import Stage
from torch import Tensor

from tallystick.store.files import RunDirectory
from tallystick.testing.attacks import play_attack

JOB, SETTINGS = Path(__file__).with_name("phase_job.py"), {"steps": "450"}


def attack(stage: Stage) -> str:
    def suits(step: int, gradient: Tensor) -> bool:
        return step < FIRST or float(gradient.double()[0, 1:3].sum()) <= 0.0  # what a patch is seen by

    def success(run: RunDirectory) -> float:
        model = Scorer()
        load(run, int(SETTINGS["steps"]), model)
        return winning(lambda images, digit, _: model(images, torch.full((len(images),), digit)), patched)

    return compare(stage, JOB, SETTINGS, suits, success)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default="fp32", choices=("fp32",))
    sys.exit(play_attack(lambda folder, given: f"caught by: {attack(Stage(folder, given.policy))}", parser))
