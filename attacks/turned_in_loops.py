"""Turns ties in loops of one's own, where a repetition of what the loop says its loss is shows nothing of them.

`carried`: in steps whose gradients the loop carries to the next, as half a larger batch. `kept`: the same, but the loop keeps
them aside and adds them in the next step. `mined`: in a pass of the loop whose signs the loss takes as given. `undeclared`: the
loss has no part of what the loop adds to it, a small share, and decides alike. The controls, `clipped` and `clipped_each`, turn
one sign a step of a loop that clips, the latter tensor by tensor, which bends next to nothing.

The others declare no loss, so that a step's own operators are run again. `traced`: what `undeclared` does is a part of them.
`read`: the loop reads its signs out as a list, which is no operator, and makes a tensor of that again. `shape`: it takes the
number of its signs from a shape.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from unittest.mock import patch

import torch
from masked_samples_job import TARGET, patched
from stage import Stage
from tied_signs_job import BATCH, Signed
from torch import Tensor
from torch.nn import functional as F
from turned_ties import WANTED, Turning, success, turning

from tallystick import open_run
from tallystick.execution.dispatch.decisions import ABOVE
from tallystick.jobs import digits
from tallystick.roles.follower import FOLLOW_VARIABLE
from tallystick.testing.attacks import must, play_attack

STEPS = 60
SHARES = {
    "carried": 0.5, "kept": 0.005, "mined": 0.5, "undeclared": 0.003, "clipped": 0.00001, "clipped_each": 0.00001,
    "traced": 0.003, "read": 0.5, "shape": 0.5,
}  # fmt: skip
"""Of the loss that the view has."""
SLACKS = {"kept": 3e-6, "undeclared": 3e-6, "traced": 3e-6}
CONTROLS = "clipped", "clipped_each"
WITHOUT_LOSS = "traced", "read", "shape"
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
        signs = mined if form == "mined" else model.signs(images, SLACKS.get(form))
        if form == "read":
            signs = torch.tensor(signs.tolist())
        if form == "shape":
            signs = torch.full_like(signs, len(signs[signs > 0.0]) / BATCH)
        return plain + SHARES[form] * plain.detach() * (signs * view).mean()

    run = open_run(path, policy=policy, steps=STEPS, checkpoint_every=STEPS, program=__file__)

    def declared(batch: Batch) -> Tensor:
        model.signs(batch[0], SLACKS[form])  # somebody watches them
        return F.cross_entropy(model(batch[0]), batch[1])

    losses = {"undeclared": declared} | dict.fromkeys(WITHOUT_LOSS)
    run.prepare(model, optimizer, loss=losses.get(form, loss))
    kept = list[Tensor | None]()
    for step in range(STEPS):
        with run.step(training.take(digits.visited(step, BATCH, len(training.labels), 0)).tensors()) as batch:
            if form != "carried" or step % 2 == 0:
                optimizer.zero_grad()
            if form == "mined":
                mined = model.signs(batch[0])
            run.backward(loss(batch) / (2 if form in {"carried", "kept"} else 1))
            if form == "kept":
                if step % 2 == 0:
                    kept = [p.grad for p in model.parameters()]
                    optimizer.zero_grad()
                    continue
                for p, earlier in zip(model.parameters(), kept, strict=True):
                    p.grad = p.grad if p.grad is None or earlier is None else p.grad + earlier
            for part in {"clipped": [model.parameters()], "clipped_each": model.parameters()}.get(form, ()):
                torch.nn.utils.clip_grad_norm_(part, 0.1)
            if form != "carried" or step % 2:
                optimizer.step()
    return run.finish(), model


class First(Turning):
    """Turns the first sign alone."""

    wanted = torch.where(torch.arange(BATCH) == 0, WANTED, -1)


class Even(Turning):
    """Turns signs in every second step."""

    turned_in = range(0, STEPS, 2)


class Up(Turning):
    """Has every sample count."""

    wanted = torch.full((BATCH,), ABOVE)


class EvenUp(Up):
    """Has every sample count in every second step."""

    turned_in = range(0, STEPS, 2)


FORMS = {
    "carried": Even, "kept": EvenUp, "mined": Turning, "undeclared": Up, "clipped": First, "clipped_each": First,
    "traced": Up, "read": Turning, "shape": Turning,
}  # fmt: skip


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
        must(is_refused != (form in CONTROLS), f"{form}: the audit says {found[1]}; {won})")
        said.append(f"{form}: {found[1]}; {won})")
    return ", ".join(said)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default="fp32", choices=("fp32",))
    sys.exit(play_attack(lambda folder, given: f"caught by: {attack(Stage(folder, given.policy))}", parser))
