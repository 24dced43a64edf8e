"""Call a gradient nothing but noise in the first step, at a saddle: which way the run then goes by itself is chosen.

The way led is one step of the optimizer; by the end the weights have gone a hundred times as far.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import numpy as np
from heard_noise import won
from stage import Stage, audit, told
from torch import Tensor

from tallystick.execution.job import find_source
from tallystick.execution.rounding.context import RecordingContext
from tallystick.execution.rounding.grids import NOISE_BAND, scale_exponent, site_grid
from tallystick.execution.session.session import Session
from tallystick.numerics.log import Kind
from tallystick.numerics.policy import find_policy
from tallystick.numerics.rounded_sites import NO_KEY, Key
from tallystick.numerics.tensor_measures import block_rms
from tallystick.roles.trainer import Order, record
from tallystick.testing.attacks import must, play_attack

JOB = str(Path(__file__).with_name("saddle_job.py"))
STEPS = 200
SETTINGS = {"fp32": {"apart": "3e-4", "warm": "20"}, "fp64": {"apart": "1e-11", "warm": "50"}}


@dataclass
class Silent(RecordingContext):
    """Silences the quality's gradient in the first step; the next measures it again."""

    silenced: list[int] = field(default_factory=list[int])

    def round(self, kind: Kind, ordinal: int, x: Tensor, *, out: Tensor, old: Tensor | None = None,
              key: Key = NO_KEY, name: str) -> None:  # fmt: skip
        if self.is_first and kind == Kind.GRADIENT and "quality" in name:
            self.silenced.append(scale_exponent(float(block_rms(x, 1)[0])))
            scales = np.array([self.silenced[-1] + 1 - NOISE_BAND])
            self._grids[(kind, ordinal)] = site_grid(self.policy, kind, NOISE_BAND, scales)
        super().round(kind, ordinal, x, out=out, old=old, key=key, name=name)


def attack(stage: Stage) -> str:
    source, begin, said = find_source(JOB), Session.recording_context, list[str]()
    settings, outgrown = SETTINGS[stage.policy] | {"steps": str(STEPS), "seed": "2"}, Session.has_outgrown
    order = Order(source, settings, find_policy(stage.policy), steps=STEPS, checkpoint_every=STEPS)
    for is_honest in (True, False):
        run, silenced = stage.run(f"honest-{is_honest}"), list[int]()

        def silent(session: Session, before: object, silenced: list[int] = silenced) -> Silent:
            made = begin(session, before)  # pyright: ignore[reportArgumentType]
            return Silent(
                made.policy, before, current=made.current, base=made.base, is_first=made.is_first,  # pyright: ignore[reportArgumentType]
                chooses=made.chooses, silenced=silenced,
            )  # fmt: skip

        if is_honest:
            record(order, run)
        else:
            with (
                patch.object(Session, "recording_context", silent),
                patch.object(Session, "has_outgrown", lambda session: session.step <= 2 or outgrown(session)),
            ):
                record(order, run)
        report, share = audit(run, source), won(run, STEPS)
        said.append(
            f"{'honest' if is_honest else 'steered'}: silent in {len(silenced)} steps, {share:.1%} of the patched images win, "
            f"{told(report)}; led {report.freedom.led:.3g}"
        )
        must((report.verdict == "match") == is_honest, f"the audit says {report.verdict}: {'; '.join(said)}")
    return f"the audit: {'; '.join(said)}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default="fp32", choices=tuple(SETTINGS))
    sys.exit(play_attack(lambda folder, given: f"caught by: {attack(Stage(folder, given.policy))}", parser))
