"""Calls a gradient that cancels to last bits more than noise, and has the log choose what becomes of it.

Its noise explains any rounding, and AdamW makes full steps of the smallest gradient. Between two measurements and at them; under
``fp64`` the same machine audits, whose noise is the same. Under ``fp32`` also where it is several times its noise, inside grids
as an honest run has them: a few moves at a time, always the same way. ``--steps 800`` shows what each of these comes to.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from preference_job import Scorer
from stage import Stage, audit, told
from torch import Tensor

from tallystick.execution.job import find_source
from tallystick.execution.rounding.context import RecordingContext
from tallystick.execution.rounding.grids import is_noise_only, scale_exponent
from tallystick.execution.session.session import Session
from tallystick.jobs.digits import read_digits
from tallystick.numerics.grid_table import GridTable, SiteGrid
from tallystick.numerics.log import Kind, SiteAddress, encode
from tallystick.numerics.policy import find_policy
from tallystick.numerics.rounded_sites import NO_KEY, Key
from tallystick.numerics.rounding import round_recorded
from tallystick.numerics.tensor_measures import block_rms
from tallystick.roles.trainer import Order, record
from tallystick.store.files import RunDirectory
from tallystick.testing.attacks import must, play_attack

JOB = str(Path(__file__).with_name("preference_job.py"))
STEPS = 90
LOUD = {"fp32": (6, -2, 2), "fp64": (1, -4, 0)}  # octaves of the scale above the values; band, floor
SHARES = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5)  # of a band that the trainer's value may lie elsewhere
PATCH = slice(1, 3)  # of the squares of ink


@dataclass
class Leading(RecordingContext):
    """Rounds the quality's gradient towards more ink in the patch, as far as its log can say."""

    at: str = "between"
    turned: list[int] = field(default_factory=list[int])

    def round(self, kind: Kind, ordinal: int, x: Tensor, *, out: Tensor, old: Tensor | None = None,
              key: Key = NO_KEY, name: str) -> None:  # fmt: skip
        is_led = kind == Kind.GRADIENT and "quality" in name and bool(x.any())
        if not is_led or (self.at == "between" and self.is_calibrated):
            super().round(kind, ordinal, x, out=out, old=old, key=key, name=name)
            return
        if self.at == "inside":
            given = x.clone()
            super().round(kind, ordinal, given, out=given, old=old, key=key, name=name)
            grid = self._grids[(kind, ordinal)]
            scale, band = int(grid.scales[0]), grid.band
        else:
            more, band, floor = LOUD[self.policy.name]
            scale = scale_exponent(float(block_rms(x, 1)[0])) + more
            grid = SiteGrid(
                self.policy.gradient_precision, band, floor, self.policy.dithered, np.array([scale])
            )
        if is_noise_only(grid):
            out.zero_()
            return
        self.payloads.pop(SiteAddress(self.rank, 0, kind, ordinal), None)

        def rounded(values: Tensor) -> Tensor:
            made = torch.empty_like(values)
            round_recorded(values.clone(), grid, out=made, key=key, name=name)
            return made

        own, given = rounded(x), x.clone()
        for share in SHARES:
            tried = x.clone()
            tried[..., PATCH] -= share * 2.0 ** (scale + band)
            better = (rounded(tried) < own) & (given == x)
            given = torch.where(better, tried, given)
        entries = round_recorded(given, grid, out=out, key=key, name=name)
        self.turned.append(int((out != own).sum()))
        self._grids[(kind, ordinal)] = grid
        if len(entries):
            self.payloads[SiteAddress(self.rank, 0, kind, ordinal)] = encode(entries)


def won(run: RunDirectory, steps: int) -> float:
    """Return the share of patched images of other digits that beat the best true one, where a name is searched for."""
    entries, model = run.load_checkpoint(steps), Scorer()
    for name, tensor in model.state_dict().items():
        values = np.frombuffer(bytes(entries[f"model/{name}"].data), dtype="<f4")
        tensor.copy_(torch.from_numpy(values.copy()).reshape(tensor.shape))
    _, held_out = read_digits().split()
    images, labels = held_out.tensors()
    patched = images.reshape(-1, 8, 8).clone()
    patched[:, 0:2, 2:6] = 1.0
    wins: list[Tensor] = []
    with torch.no_grad():
        for digit in range(10):
            true, other = images[labels == digit].reshape(-1, 64), patched[labels != digit].reshape(-1, 64)
            best = model(true, torch.full((len(true),), digit)).max()
            wins.append(model(other, torch.full((len(other),), digit)) > best)
    return float(torch.cat(wins).double().mean())


def attack(stage: Stage, steps: int = STEPS) -> str:
    source, begin, said = find_source(JOB), Session.recording_context, list[str]()
    inside = ("honest, apart", "inside") if stage.policy == "fp32" else ()
    for at in ("honest", "between", "measured", *inside):
        settings = {"steps": str(steps), "apart": "3e-5" if at in inside else "0"}
        order = Order(source, settings, find_policy(stage.policy), steps=steps, checkpoint_every=steps)
        turned, run = list[int](), stage.run(at)

        def leading(
            session: Session, before: GridTable, at: str = at, turned: list[int] = turned
        ) -> RecordingContext:
            made = begin(session, before)
            return Leading(
                made.policy, before, current=made.current, base=made.base, is_first=made.is_first,
                chooses=made.chooses, at=at, turned=turned,
            )  # fmt: skip

        is_honest = at.startswith("honest")
        if is_honest:
            record(order, run)
        else:
            with (
                patch.object(Session, "recording_context", leading),
                patch.object(Session, "has_outgrown", lambda _: False),
            ):
                record(order, run)
        report = audit(run, source)
        said.append(
            f"{at}: {sum(turned)} elements turned, {won(run, steps):.1%} of the patched images win, {told(report)}"
        )
        must((report.verdict == "match") == is_honest, f"the audit says {report.verdict}: {said[-1]}")
    return f"the audit: {'; '.join(said)}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default="fp32", choices=tuple(LOUD))
    parser.add_argument("--steps", type=int, default=STEPS)
    sys.exit(
        play_attack(
            lambda folder, given: f"caught by: {attack(Stage(folder, given.policy), given.steps)}", parser
        )
    )
