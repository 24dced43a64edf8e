"""Call one margin's gradient nothing but noise at the last scheduled measurement: a single silence, kept to the end of the run.

Its weights end four hundredths of their way short of the other margin's, which they would balance.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from margin_job import Scorer
from silencing import compare, load, winning
from stage import Stage
from torch import Tensor, nn

from tallystick.store.files import RunDirectory
from tallystick.testing.attacks import play_attack

JOB, SETTINGS, LAST = Path(__file__).with_name("margin_job.py"), {"steps": "529"}, 500


def inked(images: Tensor) -> Tensor:
    """Return images (n, 64) with ink in both margins."""
    changed = images.clone().reshape(-1, 8, 8)
    changed[:, :, (0, 7)] = 1.0
    return changed.reshape(-1, 64)


def wins(run: RunDirectory, steps: int, model: nn.Module) -> float:
    """Return the share of images with ink in both margins that win with the scorer ``model`` as ``run`` left it."""
    load(run, steps, model)
    return winning(lambda images, digit, _: model(images, torch.full((len(images),), digit)), inked)


def attack(stage: Stage) -> str:
    def success(run: RunDirectory) -> float:
        return wins(run, int(SETTINGS["steps"]), Scorer())

    return compare(
        stage, JOB, SETTINGS, lambda step, _: step < LAST, success, "right", measures=False, least=-99
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default="fp32", choices=("fp32",))
    sys.exit(play_attack(lambda folder, given: f"caught by: {attack(Stage(folder, given.policy))}", parser))
