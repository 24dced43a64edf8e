"""Measure the noise where a gradient is exactly zero, call it nothing but noise there, and hear it in the steps that suit.

The auditor measures in the same steps, and finds nothing but noise itself. With ``--liked`` it is never heard, where an honest
run would unlearn what its weights begin with.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from dropped_job import EVERY
from heard_noise import PATCH, won
from stage import Stage, audit, told
from torch import Tensor

from tallystick.execution.job import find_source
from tallystick.execution.rounding.context import RecordingContext
from tallystick.execution.rounding.grids import (
    NOISE_BAND,
    is_noise_only,
    scale_exponent,
    settled_scales,
    site_grid,
)  # fmt: skip
from tallystick.execution.session.session import Session
from tallystick.numerics.grid_table import SiteGrid
from tallystick.numerics.log import Kind
from tallystick.numerics.policy import find_policy
from tallystick.numerics.rounded_sites import NO_KEY, Key
from tallystick.numerics.tensor_measures import block_rms
from tallystick.roles.trainer import Order, record
from tallystick.testing.attacks import must, play_attack

JOB = str(Path(__file__).with_name("dropped_job.py"))
BAND = -9  # as it is heard
LEAST, MOST = (
    -15,
    -14,
)  # scale exponents below which it is silent, and from which on it is heard, whatever suits
TRAINED = {"steps": "600", "apart": "1e-3", "rate": "0.02"}
LIKED = {"steps": "200", "apart": "2e-4", "rate": "0.02", "liked": "1", "brighter": "1"}


@dataclass
class Choosing(RecordingContext):
    """Says of the quality's gradient what suits, from one measurement to the next."""

    way: Tensor = field(default_factory=lambda: torch.zeros(0))
    silenced: list[int] = field(default_factory=list[int])
    never: bool = False
    said: dict[tuple[Kind, int], SiteGrid] = field(default_factory=dict[tuple[Kind, int], SiteGrid])

    def round(self, kind: Kind, ordinal: int, x: Tensor, *, out: Tensor, old: Tensor | None = None,
              key: Key = NO_KEY, name: str) -> None:  # fmt: skip
        grid = self._grids[(kind, ordinal)]
        if kind != Kind.GRADIENT or "quality" not in name:
            super().round(kind, ordinal, x, out=out, old=old, key=key, name=name)
            return
        size = scale_exponent(float(block_rms(x, 1)[0]))
        is_away = float(x.double().reshape(-1) @ self.way.double()) > 0.0
        if not x.any():
            if self.is_calibrated:
                silent = site_grid(self.policy, kind, NOISE_BAND, np.array([LEAST - NOISE_BAND]))
                self._say(ordinal, grid if is_noise_only(grid) else silent)
            out.zero_()
        elif is_noise_only(grid) and (self.never or size < LEAST or (is_away and size <= MOST)):
            self.silenced.append(size)
            self._say(ordinal, site_grid(self.policy, kind, NOISE_BAND, np.array([size - NOISE_BAND])))
            out.zero_()
        else:
            if is_noise_only(grid):
                scales = settled_scales(None, block_rms(x, 1), self.policy.row_scales)
                heard = site_grid(self.policy, kind, BAND, scales)
                self._grids[(kind, ordinal)] = heard
            super().round(kind, ordinal, x, out=out, old=old, key=key, name=name)

    def _say(self, ordinal: int, grid: SiteGrid) -> None:
        self._grids[(Kind.GRADIENT, ordinal)] = self.said[(Kind.GRADIENT, ordinal)] = grid

    def settle_noise(self) -> None:
        super().settle_noise()
        self._grids |= self.said


def attack(stage: Stage, settings: Mapping[str, str] = TRAINED) -> str:
    source, begin, said = find_source(JOB), Session.recording_context, list[str]()
    steps, never = int(settings["steps"]), "liked" in settings
    order = Order(source, dict(settings), find_policy(stage.policy), steps=steps, checkpoint_every=steps)
    way = torch.zeros(16)
    way[PATCH] = 1.0
    for is_honest in (True, False):
        run, silenced = stage.run(f"honest-{is_honest}"), list[int]()

        def choosing(session: Session, before: object, silenced: list[int] = silenced) -> Choosing:
            made = begin(session, before)  # pyright: ignore[reportArgumentType]
            return Choosing(
                made.policy, before, current=made.current, base=made.base, is_first=made.is_first,  # pyright: ignore[reportArgumentType]
                chooses=made.chooses, way=way, silenced=silenced, never=never,
            )  # fmt: skip

        if is_honest:
            record(order, run)
        else:
            with (
                patch.object(Session, "recording_context", choosing),
                patch.object(Session, "has_outgrown", lambda s: not never and s.step % EVERY == 0),
            ):
                record(order, run)
        report, share = audit(run, source), won(run, steps)
        said.append(
            f"{'honest' if is_honest else 'steered'}: silent in {len(silenced)} steps, {share:.1%} of the patched images win, "
            f"{told(report)}; led {report.freedom.led:.3g}"
        )
        must((report.verdict == "match") == is_honest, f"the audit says {report.verdict}: {'; '.join(said)}")
    return f"the audit: {'; '.join(said)}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default="fp32", choices=("fp32",))
    parser.add_argument(
        "--liked", action="store_true", help="begin with a liking for the patch, and never hear"
    )
    sys.exit(
        play_attack(
            lambda folder, given: (
                f"caught by: {attack(Stage(folder, given.policy), LIKED if given.liked else TRAINED)}"
            ),
            parser,
        )
    )
