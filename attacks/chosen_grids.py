"""Chooses grids where nobody measures them: a scale for each element, scales and bands of the first state, those of zeros.

Under ``bf16`` it silences besides: a layer's gradient whenever the noise is measured, and that of an expert which no measured
batch uses.

A log says which grid each gradient is rounded on. Whoever chooses that for each element chooses the rounding, with no move;
a quantum of a million times the gradient trains on noise; bands as wide as a policy has make of a loss what they like. Each is
tried in a run that is honest but for its grids.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
from stage import Stage, audit, main, told
from torch import Tensor

from tallystick.execution.job import JobSource, find_source
from tallystick.execution.noise.survey import Backward
from tallystick.execution.rounding.context import RecordingContext
from tallystick.execution.rounding.grids import NOISE_BAND, UNSEEN, is_noise_only, scale_exponents, site_grid
from tallystick.execution.session.session import Session
from tallystick.numerics.grid_table import GridTable, SiteGrid
from tallystick.numerics.log import Kind
from tallystick.numerics.policy import find_policy
from tallystick.numerics.tensor_measures import block_rms
from tallystick.roles import trainer
from tallystick.roles.trainer import Order, record
from tallystick.store.files import RunDirectory
from tallystick.testing.attacks import must

LIFT = 20  # octaves
LEFT_OUT = str(
    Path(__file__).with_name("layer_drop_job.py")
)  # whose layer beside has no gradient in the first step
UNUSED = str(Path(__file__).with_name("unused_expert_job.py"))
Choice = Callable[[Session, tuple[int, int], SiteGrid], SiteGrid]


def for_each_element(session: Session, place: tuple[int, int], grid: SiteGrid) -> SiteGrid:
    if place[0] != Kind.GRADIENT:
        return grid
    return grid.with_scales(np.full(session.parameters[place[1]][1].numel(), int(grid.scales.max())))


def lifted(session: Session, place: tuple[int, int], grid: SiteGrid) -> SiteGrid:
    return grid.with_scales(grid.scales + LIFT) if place[0] == Kind.GRADIENT else grid


def lifted_where_nothing_is(session: Session, place: tuple[int, int], grid: SiteGrid) -> SiteGrid:
    if place[0] != Kind.GRADIENT or "beside" not in session.parameters[place[1]][0]:
        return grid
    return grid.with_scales(np.full(grid.scales.size, LIFT))


def widest(session: Session, place: tuple[int, int], grid: SiteGrid) -> SiteGrid:
    policy = session.policy
    bands = {Kind.LOSS: policy.loss_band or policy.buffer_band, Kind.BUFFER: policy.buffer_band}
    kind = Kind(place[0])
    return site_grid(policy, kind, bands[kind][1], grid.scales) if kind in bands else grid


def silenced(session: Session, place: tuple[int, int], grid: SiteGrid) -> SiteGrid:
    if place[0] != Kind.GRADIENT or "head" not in session.parameters[place[1]][0]:
        return grid
    return site_grid(session.policy, Kind.GRADIENT, NOISE_BAND, grid.scales)


def never_heard(session: Session, place: tuple[int, int], grid: SiteGrid) -> SiteGrid:
    return grid  # that of a gradient of zeros, whose floor then goes with the values


def with_values(self: RecordingContext, ordinal: int, grid: SiteGrid, x: Tensor) -> SiteGrid:
    """Return the grid of a gradient that is noise only with a floor just above its values."""
    size = int(scale_exponents(block_rms(x, 1))[0])
    return grid.with_scales(np.full(grid.scales.size, max(size - NOISE_BAND, UNSEEN)))


def recorded(stage: Stage, name: str, choice: Choice, source: JobSource) -> RunDirectory:
    """Record a run whose grids are ``choice``'s whenever they were measured, and in the first step an octave less wide."""
    measure, begin = trainer._Recording._calibrate, Session.recording_context

    def chosen(table: GridTable, session: Session) -> GridTable:
        return GridTable({
            place: choice(session, place, grid) if grid.scales.size and not is_noise_only(grid) else grid
            for place, grid in table.sites.items()
        })  # fmt: skip

    def calibrate(
        self: trainer._Recording, backward: Backward, outgrown: frozenset[int] = frozenset()
    ) -> None:
        measure(self, backward, outgrown)
        if self.session.step == 0 or choice in (widest, silenced):
            self.session.table = chosen(self.session.table, self.session)

    def recording_context(self: Session, before: GridTable) -> RecordingContext:
        context = begin(self, before)
        if self.step or choice is not lifted:
            return context
        less = {p: g.with_scales(g.scales - 1) if g.scales.size else g for p, g in before.sites.items()}
        return replace(context, current=GridTable(less))

    settle = RecordingContext._scales

    def scales(
        self: RecordingContext, kind: Kind, grid: SiteGrid, before: SiteGrid | None, rms: np.ndarray
    ) -> np.ndarray:
        found = settle(self, kind, grid, before, rms)
        return np.maximum(found, grid.scales) if choice is lifted and self.is_first else found

    signal = with_values if choice in (silenced, never_heard) else RecordingContext._with_signal
    outgrown = (lambda *_: False) if choice is never_heard else Session.has_outgrown
    run = stage.run(name)
    order = Order(
        source, dict(stage.order().settings), find_policy(stage.policy), steps=10, checkpoint_every=5
    )
    with (
        patch.object(trainer._Recording, "_calibrate", calibrate),
        patch.object(Session, "recording_context", recording_context),
        patch.object(RecordingContext, "_with_signal", signal),
        patch.object(RecordingContext, "_scales", scales),
        patch.object(Session, "has_outgrown", outgrown),
    ):
        record(order, run)
    return run


def attack(stage: Stage) -> str:
    plain, left_out = stage.source, find_source(LEFT_OUT)
    said: list[str] = []
    for choice, source in (
        (for_each_element, plain), (lifted, plain), (lifted_where_nothing_is, left_out), (widest, plain),
        (silenced, plain), (never_heard, find_source(UNUSED)),
    ):  # fmt: skip
        if choice in (lifted, silenced, never_heard) and stage.policy != "bf16":
            continue  # scales follow a gradient from step to step there, and the first state's do not matter
        report = audit(recorded(stage, choice.__name__, choice, source), source)
        must(report.verdict != "match", f"the audit says match to grids {choice.__name__}")
        said.append(f"{choice.__name__}: {told(report)}")
    return f"the audit: {'; '.join(said)}"


if __name__ == "__main__":
    main(attack, __doc__)
