"""Turns a few of the labels that a model gives itself, in the first steps: the others it then chooses alone.

Half of the job's images have no label but the model's own answer, and every second of those is patched. Where the answers tie, as
those of a head that begins at zero do, a log may say which; under ``bf16`` also where they are near each other. Under ``fp64``
and ``fp32`` also beside a gradient hundreds of times as large, and where an answer is kept: a label from the next visit on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import torch
from backdoor import caught_or_harmless
from own_labels_job import POOL, UNLABELLED
from stage import Stage, main
from torch import Tensor

from tallystick.execution.job import find_source
from tallystick.execution.rounding.context import RecordingContext
from tallystick.execution.session.session import Session
from tallystick.jobs import digits
from tallystick.numerics.grid_table import GridTable
from tallystick.numerics.log import Kind, SiteAddress, SparseEntries, encode_decision
from tallystick.numerics.policy import find_policy
from tallystick.numerics.rounded_sites import NO_KEY, Key
from tallystick.roles.trainer import Order, record

JOB = str(Path(__file__).with_name("own_labels_job.py"))
STEPS, TURNED, TARGET = 200, 36, 3  # of tied answers an honest run takes the first
CLASSES_WIDTH = 4  # bits of a choice among ten


class Turning(RecordingContext):
    """Has patched images called ``TARGET`` where the band allows it, ``TURNED`` times."""

    session: Session
    left, form = TURNED, "plain"

    def round(self, kind: Kind, ordinal: int, x: Tensor, *, out: Tensor, old: Tensor | None = None,
              key: Key = NO_KEY, name: str) -> None:  # fmt: skip
        if (
            self.session.step == 0
            and kind == Kind.GRADIENT
            and "head" in name
            and not self.policy.autocast
            and Turning.form != "kept"
        ):
            grid = self._grids[(kind, ordinal)]  # as wide as the auditor finds it, whose labels are others
            self._grids[(kind, ordinal)] = grid.with_scales(grid.scales - 1)
        super().round(kind, ordinal, x, out=out, old=old, key=key, name=name)

    def decide(self, numel: int, width: int, near: Tensor, symbols: Callable[[Tensor], Tensor],
               distance: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor] | None:  # fmt: skip
        if (numel, width) != (UNLABELLED, CLASSES_WIDTH):
            return super().decide(numel, width, near, symbols, distance)
        patched = torch.arange(0, numel, 2)
        if Turning.form == "kept":
            patched = (
                torch.from_numpy(digits.visited(self.session.step, UNLABELLED, POOL, 1) % 2 == 0)
                .nonzero()
                .squeeze(1)
            )
        away = distance(torch.stack((patched, torch.full_like(patched, TARGET)), 1)).double()
        reach = 0.9 * math.ldexp(2.0, self._band_exponent)
        nearest = away.argsort()
        wanted = patched[nearest][((symbols(patched) != TARGET) & (away < reach))[nearest]][: Turning.left]
        Turning.left -= len(wanted)
        if not len(wanted):
            return super().decide(numel, width, near, symbols, distance)
        at = torch.cat((near, wanted)).unique()
        chosen = symbols(at)
        chosen[torch.isin(at, wanted)] = TARGET
        entries = SparseEntries(numel, width, at.numpy(), chosen.numpy())
        address = SiteAddress(self.rank, self._micro_batch, Kind.DECISION, self._ordinal)
        self.payloads[address] = encode_decision(self._band_exponent, entries)
        return at, chosen


def attack(stage: Stage) -> str:
    forms = ("plain",) if stage.policy == "bf16" else ("plain", "lent", "kept")
    return "; ".join(f"{form}: {_turned(stage, form)}" for form in forms)


def _turned(stage: Stage, form: str) -> str:
    source = find_source(JOB)
    settings = {"width": "8", "batch": "32", "steps": str(STEPS), "zero": str(int(stage.policy != "bf16"))}
    order = Order(
        source, {**settings, "form": form}, find_policy(stage.policy), steps=STEPS, checkpoint_every=STEPS
    )
    honest, run, begin = stage.run(f"honest-{form}"), stage.run(form), Session.recording_context
    record(order, honest)
    Turning.left, Turning.form = TURNED, form

    def turning(session: Session, before: GridTable) -> RecordingContext:
        made = begin(session, before)
        context = Turning(
            made.policy, before, current=made.current, base=made.base, rank=made.rank, extra=made.extra
        )
        context.session = session
        return context

    with patch.object(Session, "recording_context", turning):
        record(order, run)
    return caught_or_harmless(run, honest, order, source, TARGET)


if __name__ == "__main__":
    main(attack, __doc__)
