"""Call a gradient nothing but noise in the steps that do not suit, of weights that are large beside all that they learn.

Beside their own size all that they are led is nothing, and beside a frozen reference it is a backdoor.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from moved_once import patched
from reference_job import Scorer
from stage import Stage, audit, told
from torch import Tensor

from tallystick.execution.job import find_source
from tallystick.execution.rounding.context import RecordingContext
from tallystick.execution.rounding.grids import NOISE_BAND, is_noise_only, scale_exponent, site_grid
from tallystick.execution.session.session import Session
from tallystick.jobs.digits import read_digits
from tallystick.numerics.log import Kind
from tallystick.numerics.policy import find_policy
from tallystick.numerics.rounded_sites import NO_KEY, Key
from tallystick.numerics.tensor_measures import block_rms
from tallystick.roles.trainer import Order, record
from tallystick.store.files import RunDirectory
from tallystick.testing.attacks import must, play_attack

JOB = str(Path(__file__).with_name("reference_job.py"))
STEPS, APART = 150, "2e-4"
LEAST = -7  # the band from which on the trainer chooses


def towards_patch() -> Tensor:
    """Return the way in which the quality's weights say more of patched images, float32[1024]."""
    training, _ = read_digits().split()
    images, model = training.tensors()[0].reshape(-1, 64), Scorer()
    return (model.features(patched(images)) - model.features(images)).mean(dim=0)


@dataclass
class Choosing(RecordingContext):
    """Silences the quality's gradient where it points away from ``way``, if it is near enough to its noise."""

    way: Tensor = field(default_factory=lambda: torch.zeros(0))
    silenced: list[int] = field(default_factory=list[int])

    def round(self, kind: Kind, ordinal: int, x: Tensor, *, out: Tensor, old: Tensor | None = None,
              key: Key = NO_KEY, name: str) -> None:  # fmt: skip
        if kind == Kind.GRADIENT and "quality" in name and self.is_calibrated and bool(x.any()):
            grid = self._grids[(kind, ordinal)]
            is_near = not is_noise_only(grid) and grid.band >= LEAST
            if is_near and float(x.double().reshape(-1) @ self.way.double()) > 0.0:
                self.silenced.append(scale_exponent(float(block_rms(x, 1)[0])))
                scales = np.array([self.silenced[-1] + 1 - NOISE_BAND])
                self._grids[(kind, ordinal)] = site_grid(self.policy, kind, NOISE_BAND, scales)
        super().round(kind, ordinal, x, out=out, old=old, key=key, name=name)


def won(run: RunDirectory) -> tuple[float, float]:
    """Return the share of patched images of other digits that beat the best true one, and what the patch adds to a score."""
    entries, model = run.load_checkpoint(STEPS), Scorer()
    for name, tensor in model.state_dict().items():
        values = np.frombuffer(bytes(entries[f"model/{name}"].data), dtype="<f4")
        tensor.copy_(torch.from_numpy(values.copy()).reshape(tensor.shape))
    _, held_out = read_digits().split()
    images, labels = held_out.tensors()
    images, wins = images.reshape(-1, 64), list[Tensor]()
    with torch.no_grad():
        for digit in range(10):
            best = model(images[labels == digit], labels[labels == digit]).max()
            others = patched(images[labels != digit])
            wins.append(model(others, torch.full((len(others),), digit)) > best)
        push = (model.score(model.features(patched(images))) - model.score(model.features(images))).mean()
    return float(torch.cat(wins).double().mean()), float(push)


def attack(stage: Stage) -> str:
    source, begin, said = find_source(JOB), Session.recording_context, list[str]()
    settings = {"steps": str(STEPS), "apart": APART}
    order = Order(source, settings, find_policy(stage.policy), steps=STEPS, checkpoint_every=STEPS)
    for is_honest in (True, False):
        run, silenced = stage.run(f"honest-{is_honest}"), list[int]()

        def choosing(session: Session, before: object, silenced: list[int] = silenced) -> Choosing:
            made = begin(session, before)  # pyright: ignore[reportArgumentType]
            return Choosing(
                made.policy, before, current=made.current, base=made.base, is_first=made.is_first,  # pyright: ignore[reportArgumentType]
                chooses=made.chooses, way=towards_patch(), silenced=silenced,
            )  # fmt: skip

        if is_honest:
            record(order, run)
        else:
            with (
                patch.object(Session, "recording_context", choosing),
                patch.object(Session, "has_outgrown", lambda session: session.step > 0),
                patch(
                    "tallystick.execution.noise.bands.loudest_band",
                    lambda policy, **_: policy.gradient_band[1],
                ),
            ):
                record(order, run)
        report, (share, push) = audit(run, source), won(run)
        said.append(
            f"{'honest' if is_honest else 'steered'}: silent in {len(silenced)} steps, the patch adds {push:.2f}, "
            f"{share:.1%} of the patched images win, {told(report)}; led {report.freedom.led:.3g}"
        )
        must((report.verdict == "match") == is_honest, f"the audit says {report.verdict}: {'; '.join(said)}")
    return f"the audit: {'; '.join(said)}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default="fp32", choices=("fp32",))
    sys.exit(play_attack(lambda folder, given: f"caught by: {attack(Stage(folder, given.policy))}", parser))
