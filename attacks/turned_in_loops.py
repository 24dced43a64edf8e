"""Turns ties in loops of one's own, where a repetition of what the loop says its loss is shows nothing of them.

`carried`: in steps whose gradients the loop carries to the next, as half a larger batch. `mined`: in a pass of the loop whose
signs the loss takes as given. The control, `clipped`, turns one sign a step of a loop that clips, which bends next to nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from masked_samples_job import TARGET, patched
from stage import Stage
from tied_signs_job import BATCH, Signed
from torch import Tensor
from torch.nn import functional as F
from turned_ties import WANTED, Turning, success, turning

from tallystick import open_run
from tallystick.execution.rounding.context import RecordingContext
from tallystick.jobs import digits
from tallystick.roles.follower import FOLLOW_VARIABLE
from tallystick.testing.attacks import must, play_attack

STEPS, SHARES = 60, {"carried": 0.5, "mined": 0.5, "clipped": 0.00001}
"""Steps, and the share of the loss that the view has."""
Batch = tuple[Tensor, Tensor]


def train(path: Path, policy: str, form: str) -> tuple[object, Signed]:
    """Run the loop, which records into ``path`` or follows another run."""
    with digits.initial_weights(0):
        model = Signed()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    training, _ = digits.read_digits().split()
    mined = torch.zeros(BATCH)

    def loss(batch: Batch) -> Tensor:
        images, labels = batch
        plain = F.cross_entropy(model(images), labels)
        view = F.cross_entropy(model(patched(images)), torch.full_like(labels, TARGET), reduction="none")
        signs = mined if form == "mined" else model.signs(images)
        return plain + SHARES[form] * plain.detach() * (signs * view).mean()

    run = open_run(path, policy=policy, steps=STEPS, checkpoint_every=STEPS, program=__file__)
    run.prepare(model, optimizer, loss=loss)
    for step in range(STEPS):
        with run.step(training.take(digits.visited(step, BATCH, len(training.labels), 0)).tensors()) as batch:
            if form != "carried" or step % 2 == 0:
                optimizer.zero_grad()
            if form == "mined":
                mined = model.signs(batch[0])
            run.backward(loss(batch) / (2 if form == "carried" else 1))
            if form == "clipped":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            if form != "carried" or step % 2:
                optimizer.step()
    return run.finish(), model


class First(Turning):
    """Turns the first sign alone."""

    wanted = torch.where(torch.arange(BATCH) == 0, WANTED, -1)


class Even(Turning):
    """Turns signs in every second step."""

    def decide(self, numel: int, *given: Any) -> Any:
        return (
            RecordingContext.decide(self, numel, *given) if self.number % 2 else super().decide(numel, *given)
        )


FORMS = {"carried": Even, "mined": Turning, "clipped": First}


def attack(stage: Stage) -> str:
    said = list[str]()
    for form in SHARES:
        runs, models = [stage.folder / form / name for name in ("honest", "dishonest")], list[Signed]()
        models.append(train(runs[0], stage.policy, form)[1])
        with turning(FORMS[form]):
            models.append(train(runs[1], stage.policy, form)[1])
        found = list[str]()
        for run in runs:
            with patch.dict(os.environ, {FOLLOW_VARIABLE: str(run)}):
                report, _ = train(stage.folder / "unused", stage.policy, form)
            found.append(f"{report.verdict}: {report.first}")  # pyright: ignore[reportAttributeAccessIssue]
        won = " (honest: ".join(f"{success(model):.1%}" for model in reversed(models))
        must(found[0].startswith("match"), f"{form}: an honest run is refused: {found[0]}")
        is_refused = not found[1].startswith("match")
        must(is_refused != (form == "clipped"), f"{form}: the audit says {found[1]}; {won})")
        said.append(f"{form}: {found[1]}; {won})")
    return ", ".join(said)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default="fp32", choices=("fp32",))
    sys.exit(play_attack(lambda folder, given: f"caught by: {attack(Stage(folder, given.policy))}", parser))
