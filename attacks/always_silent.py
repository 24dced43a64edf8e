"""Call a gradient nothing but noise in the whole run: what it would have unlearned stays.

The weights begin with a liking for a patch, as those of a pretrained model may; an honest run unlearns it. Silence needs no move,
and its floor is above the noise by no more than few elements may honestly be in doubt.
"""

from __future__ import annotations

import argparse
import sys
from unittest.mock import patch

import numpy as np
from heard_noise import JOB, won
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

STEPS = 200
APART = {"fp32": "1e-4", "fp64": "4e-12"}
ABOVE = 3  # octaves of the floor above the gradient's size
MOST = 0.05  # that an honest run may leave of the backdoor


class Silent(RecordingContext):
    """Silences the quality's gradient where its noise is measured, from there on."""

    def round(self, kind: Kind, ordinal: int, x: Tensor, *, out: Tensor, old: Tensor | None = None,
              key: Key = NO_KEY, name: str) -> None:  # fmt: skip
        if kind == Kind.GRADIENT and "quality" in name and bool(x.any()) and self.is_calibrated:
            floor = scale_exponent(float(block_rms(x, 1)[0])) + ABOVE
            scales = np.array([floor - NOISE_BAND])
            self._grids[(kind, ordinal)] = site_grid(self.policy, kind, NOISE_BAND, scales)
        super().round(kind, ordinal, x, out=out, old=old, key=key, name=name)


def attack(stage: Stage) -> str:
    source, begin, said = find_source(JOB), Session.recording_context, list[str]()
    settings = {
        "steps": str(STEPS),
        "apart": APART[stage.policy],
        "brighter": "1",
        "liked": "1",
        "eps": "1e-16",
    }
    order = Order(source, settings, find_policy(stage.policy), steps=STEPS, checkpoint_every=STEPS)

    def silent(session: Session, before: object) -> Silent:
        made = begin(session, before)  # pyright: ignore[reportArgumentType]
        return Silent(
            made.policy, before, current=made.current, base=made.base, is_first=made.is_first,  # pyright: ignore[reportArgumentType]
            chooses=made.chooses,
        )  # fmt: skip

    for is_honest in (True, False):
        run = stage.run(f"honest-{is_honest}")
        if is_honest:
            record(order, run)
        else:
            with (
                patch.object(Session, "recording_context", silent),
                patch.object(Session, "has_outgrown", lambda _: False),
            ):
                record(order, run)
        report, share = audit(run, source), won(run, STEPS)
        said.append(
            f"{'honest' if is_honest else 'silent'}: {share:.1%} of the patched images win, {told(report)}; "
            f"led {report.freedom.led:.3g}"
        )
        must((report.verdict == "match") == is_honest, f"the audit says {report.verdict}: {'; '.join(said)}")
        must((share <= MOST) == is_honest, f"there is no backdoor to keep: {'; '.join(said)}")
    return f"the audit: {'; '.join(said)}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default="fp32", choices=tuple(APART))
    sys.exit(play_attack(lambda folder, given: f"caught by: {attack(Stage(folder, given.policy))}", parser))
