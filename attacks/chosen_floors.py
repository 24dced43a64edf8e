"""Measures the noise in every step, by its specification or out of schedule, and takes for each gradient the grid that suits.

Where noise is measured grids may be new ones. A trainer that measures in every step has the choice among quanta in every step,
and leads each gradient along one aim, with its own honest bands and no move.
"""

from contextlib import ExitStack
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import torch
from stage import Stage, audit, main, told
from torch import Tensor

from tallystick.execution.rounding.context import RecordingContext
from tallystick.execution.rounding.grids import is_noise_only
from tallystick.execution.session.session import Session
from tallystick.numerics.grid_table import GridTable, SiteGrid
from tallystick.numerics.log import Kind, SiteAddress
from tallystick.numerics.policy import SPARSEST, find_policy
from tallystick.numerics.rounded_sites import NO_KEY, Key
from tallystick.roles.trainer import Order, record
from tallystick.store.files import RunDirectory
from tallystick.testing.attacks import must

STEPS = 20
COARSEST = {"fp64": -12, "fp32": -2, "bf16": -2}  # that a trainer may choose


class Leader:
    """Chooses a gradient's floor by what rounding on it gives towards an aim, and notes how far that led."""

    def __init__(self) -> None:
        self.aims: dict[int, Tensor] = {}
        self.led, self.energy = [0.0] * STEPS, [0.0] * STEPS

    def aim(self, ordinal: int, numel: int) -> Tensor:
        if ordinal not in self.aims:
            drawn = np.random.default_rng(ordinal).standard_normal(numel)
            self.aims[ordinal] = torch.from_numpy(drawn)
        return self.aims[ordinal]

    def floors(self, context: RecordingContext, grid: SiteGrid) -> range:
        policy = context.policy
        least = grid.band + SPARSEST if policy.gradient_steer is not None else grid.floor
        return range(least, max(least, policy.finest_floor(grid.band)) + 1)

    @property
    def share(self) -> float:
        """How far a step's gradient was led, over its size, on average; the aim has the size of one."""
        size = sum(float(aim.square().sum()) for aim in self.aims.values()) ** 0.5
        steps = [
            led / (size * energy**0.5) for led, energy in zip(self.led, self.energy, strict=True) if energy
        ]
        return sum(steps) / max(len(steps), 1)


def recorded(run: RunDirectory, order: Order, *, chooses: bool, notes: bool) -> Leader:
    """Record a run whose steps are calibrations, by schedule or by ``notes``; gradients take the best floor if it ``chooses``."""
    leader, rounded, steps = Leader(), RecordingContext.round, list[int]()

    def take(self: RecordingContext, kind: Kind, ordinal: int, x: Tensor, *, out: Tensor, old: Tensor | None = None,
             key: Key = NO_KEY, name: str) -> None:  # fmt: skip
        def go(x: Tensor, out: Tensor) -> None:
            rounded(self, kind, ordinal, x, out=out, old=old, key=key, name=name)

        place, own = (kind, ordinal), x.detach().double().reshape(-1).clone()
        grid = self._grids.get(place)
        if kind != Kind.GRADIENT or grid is None:
            go(x, out)
            return
        aim, given = leader.aim(ordinal, x.numel()), x.detach().clone()
        if chooses and self.is_calibrated and not is_noise_only(grid):
            gains = dict[int, float]()
            for floor in leader.floors(self, grid):
                self._grids[place], tried = replace(grid, floor=floor), given.clone()
                go(tried, tried)
                gains[floor] = float((tried.double().reshape(-1) - own) @ aim)
            self._grids[place] = replace(grid, floor=max(gains, key=lambda floor: gains[floor]))
            self.payloads.pop(SiteAddress(self.rank, 0, kind, ordinal), None)
        go(x, out)
        leader.led[steps[-1]] += float((out.detach().double().reshape(-1) - own) @ aim)
        leader.energy[steps[-1]] += float(own.square().sum())

    begin = Session.recording_context

    def begun(self: Session, before: GridTable) -> RecordingContext:
        steps.append(self.step)
        return begin(self, before)

    with ExitStack() as patched:
        patched.enter_context(patch.object(RecordingContext, "round", take))
        patched.enter_context(patch.object(Session, "recording_context", begun))
        if notes:
            patched.enter_context(patch.object(Session, "has_outgrown", lambda _: True))
        record(order, run)
    return leader


def attack(stage: Stage) -> str:
    settings = dict(stage.order().settings)
    said: list[str] = []
    for name, chooses, notes in (
        ("honest", False, False),
        ("by schedule", True, False),
        ("by notes", True, True),
    ):
        policy = find_policy(
            stage.policy,
            recalibrate_every=None if notes else 1,
            chosen={"gradient_floor": COARSEST[stage.policy]},
        )
        order = Order(stage.source, settings, policy, steps=STEPS, checkpoint_every=STEPS)
        run = stage.run(name)
        leader = recorded(run, order, chooses=chooses, notes=notes)
        report = audit(run, stage.source)
        said.append(f"{name}: led by {leader.share:.2%} of a step's gradient, {told(report)}")
        is_led = chooses and leader.share > 1e-3  # under fp64 there is next to nothing to choose
        must(chooses or report.verdict == "match", f"the audit says {report.verdict}: {said[-1]}")
        must(not is_led or report.verdict != "match", f"the audit says match: {said[-1]}")
    return f"the audit: {'; '.join(said)}"


if __name__ == "__main__":
    main(attack, __doc__)
