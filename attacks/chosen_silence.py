"""Measure the noise in every step, and call a gradient nothing but noise in those that do not suit, with no move at all.

Near the loudest band that is heard a gradient may honestly be either: what it comes to is where the auditor's own choice leads.
With ``--hear`` the other way round: one that is nothing but noise is heard in the steps that suit.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from unittest.mock import patch

import numpy as np
import torch
from heard_noise import JOB, PATCH, won
from stage import Stage, audit, told
from torch import Tensor

from tallystick.execution.job import find_source
from tallystick.execution.rounding.context import RecordingContext
from tallystick.execution.rounding.grids import NOISE_BAND, is_noise_only, scale_exponent, site_grid
from tallystick.execution.session.session import Session
from tallystick.numerics.grid_table import SiteGrid
from tallystick.numerics.log import Kind
from tallystick.numerics.policy import find_policy
from tallystick.numerics.rounded_sites import NO_KEY, Key
from tallystick.numerics.tensor_measures import block_rms
from tallystick.roles.trainer import Order, record
from tallystick.testing.attacks import must, play_attack

STEPS, APART, NEARER = 800, "1e-4", "2e-5"  # nearer, honest machines do not hear it
LEAST, WIDEST = -4, -2  # the band from which on the trainer chooses, and in which it hears noise
FIRST = 33  # step in which it begins


@dataclass
class Choosing(RecordingContext):
    """Silences the quality's gradient where it points away from ``way``, if it is near enough to its noise.

    Or hears it where it points along, if it is not much more than that, and ``hears``.
    """

    way: Tensor = field(default_factory=lambda: torch.zeros(0))
    chosen: list[SiteGrid] = field(default_factory=list[SiteGrid])
    hears: bool = False

    def round(self, kind: Kind, ordinal: int, x: Tensor, *, out: Tensor, old: Tensor | None = None,
              key: Key = NO_KEY, name: str) -> None:  # fmt: skip
        if self.way.numel() and kind == Kind.GRADIENT and "quality" in name and bool(x.any()):
            grid = self._grids[(kind, ordinal)]
            is_loud = self.is_calibrated and (is_noise_only(grid) or grid.band >= LEAST)
            suits = float(x.double().reshape(-1) @ self.way.double().reshape(-1)) <= 0.0
            if is_loud and (suits if self.hears else not suits and not is_noise_only(grid)):
                size = scale_exponent(float(block_rms(x, 1)[0]))
                band, scale = (WIDEST, size) if self.hears else (NOISE_BAND, size + 1 - NOISE_BAND)
                last = self.chosen[-1].scales if self.hears and self.chosen else np.array([scale])
                self.chosen.append(site_grid(self.policy, kind, band, last))
                self._grids[(kind, ordinal)] = self.chosen[-1]
            super().round(kind, ordinal, x, out=out, old=old, key=key, name=name)
            if self.chosen and is_loud:
                self.chosen[-1] = self._grids[(kind, ordinal)]
            return
        super().round(kind, ordinal, x, out=out, old=old, key=key, name=name)


def attack(stage: Stage, steps: int = STEPS, apart: str = APART, *, hears: bool = False) -> str:
    source, begin, said = find_source(JOB), Session.recording_context, list[str]()
    settings = {"steps": str(steps), "apart": apart}
    order = Order(source, settings, find_policy(stage.policy), steps=steps, checkpoint_every=steps)
    for is_honest in (True, False):
        run, chosen = stage.run(f"honest-{is_honest}"), list[SiteGrid]()
        way = torch.zeros(16)
        way[PATCH] = 1.0

        def choosing(
            session: Session, before: object, way: Tensor = way, chosen: list[SiteGrid] = chosen
        ) -> Choosing:
            made = begin(session, before)  # pyright: ignore[reportArgumentType]
            return Choosing(
                made.policy, before, current=made.current, base=made.base, is_first=made.is_first,  # pyright: ignore[reportArgumentType]
                chooses=made.chooses, way=way if session.step >= FIRST else torch.zeros(0), chosen=chosen, hears=hears,
            )  # fmt: skip

        if is_honest:
            record(order, run)
        else:
            with (
                patch.object(Session, "recording_context", choosing),
                patch.object(Session, "has_outgrown", lambda _: True),
            ):
                record(order, run)
        report, share = audit(run, source), won(run, steps)
        said.append(
            f"{'honest' if is_honest else 'steered'}: chosen in {len(chosen)} steps, "
            f"{share:.1%} of the patched images win, {told(report)}; led {report.freedom.led:.3g}"
        )
        must((report.verdict == "match") == is_honest, f"the audit says {report.verdict}: {'; '.join(said)}")
    return f"the audit: {'; '.join(said)}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default="fp32", choices=("fp32",))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--apart", help="how far the images of a pair lie apart")
    parser.add_argument("--hear", action="store_true", help="hear what is noise, where it suits")
    sys.exit(
        play_attack(
            lambda folder, given: (
                "caught by: "
                + attack(
                    Stage(folder, given.policy),
                    given.steps,
                    given.apart or (NEARER if given.hear else APART),
                    hears=given.hear,
                )
            ),
            parser,
        )
    )
