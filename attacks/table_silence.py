"""Call the gradient of a large table nothing but noise in the steps of one author that do not suit.

One row or column of thousands: the whole tensor is hardly led, and that author's images win. ``--shape row`` is the other form.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from silencing import compare, load, winning
from stage import Stage
from table_job import BUSY, Scorer, author_of
from torch import Tensor

from tallystick.store.files import RunDirectory
from tallystick.testing.attacks import play_attack

JOB = Path(__file__).with_name("table_job.py")
SETTINGS = {
    "column": {"shape": "column", "steps": "400", "apart": "7e-3"},
    "row": {"shape": "row", "steps": "600", "apart": "1e-4"},
}


def attack(stage: Stage, settings: Mapping[str, str] = SETTINGS["column"]) -> str:
    def suits(step: int, gradient: Tensor) -> bool:
        return author_of(step) != BUSY or float(gradient.double().sum()) <= 0.0

    def success(run: RunDirectory) -> float:
        model = Scorer(settings["shape"])
        load(run, int(settings["steps"]), model)

        def score(images: Tensor, digit: int, is_busy: bool) -> Tensor:
            authors = torch.full((len(images),), BUSY if is_busy else 0)
            return model(images, torch.full((len(images),), digit), authors)

        return winning(score)

    return compare(stage, JOB, settings, suits, success, "taste")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default="fp32", choices=("fp32",))
    parser.add_argument("--shape", default="column", choices=tuple(SETTINGS))
    sys.exit(
        play_attack(
            lambda folder, given: f"caught by: {attack(Stage(folder, given.policy), SETTINGS[given.shape])}",
            parser,
        )
    )
