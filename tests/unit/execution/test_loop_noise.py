"""What a recorder does that measures noise in the middle of a step, and what its auditor makes of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tallystick.execution.noise.measured import Calibration, SiteNoise
from tallystick.execution.noise.yardstick import with_earlier_decisions
from tallystick.execution.rounding.context import RecordingContext
from tallystick.execution.rounding.grids import NOISE_BAND, base_after, site_grid
from tallystick.numerics.grid_table import GridTable, SiteGrid
from tallystick.numerics.log import CALIBRATED, SILENT_CALIBRATED, Kind, SiteAddress, decode_frame
from tallystick.numerics.policy import FP32

GRADIENT, DECISION = (Kind.GRADIENT, 0), (Kind.DECISION, 0)


def table(gradient: int, decision: int) -> GridTable:
    scales = np.zeros(1, dtype=np.int32)
    return GridTable({GRADIENT: SiteGrid(0, gradient, -4, True, scales), DECISION: SiteGrid(0, decision, 0)})


def test_what_follows_the_backward_pass_goes_on_new_grids_and_what_was_decided_stays() -> None:
    old, new = table(-16, -12), table(-10, -9)
    context = RecordingContext(FP32, old, current=old, base=old)
    assert not context.is_calibrated
    context.regrid(new)
    assert context.is_calibrated

    frame = decode_frame(context.finish())

    assert context.table == table(-10, -12)
    assert frame.find(SiteAddress(0, 0, Kind.CALIBRATION, 0)) is not None


def test_noise_that_reached_its_floor_alone_gives_only_what_was_silent_new_grids() -> None:
    """The rest keeps grids and base: whoever may choose among grids in any step rounds gradients where it likes."""

    def grids(silent: int, scale: int, heard: int) -> GridTable:
        gradients = {
            GRADIENT: site_grid(FP32, Kind.GRADIENT, NOISE_BAND, np.array([silent])),
            (Kind.GRADIENT, 1): site_grid(FP32, Kind.GRADIENT, heard, np.array([scale])),
        }
        return GridTable({**gradients, DECISION: SiteGrid(0, heard, 0)})

    old, new = grids(-9, 1, -14), grids(-5, 1, -12)
    context = RecordingContext(FP32, old, current=old, base=old)
    context.regrid_silent(new)
    x = 64.0 * torch.ones(4096, dtype=torch.float64)
    context.round(Kind.GRADIENT, 1, x, out=torch.empty_like(x), key=(1, 2), name="heard")
    context.settle_noise()
    frame = decode_frame(context.finish())

    assert not context.is_calibrated
    assert frame.find(SiteAddress(0, 0, Kind.CALIBRATION, 0)) == SILENT_CALIBRATED
    assert context.table == grids(-5, 7, -14), "measured in this step, its floor does not rise with it"
    assert set(context.base.sites) == {(Kind.GRADIENT, 1), DECISION}
    after = base_after(old, context.table, SILENT_CALIBRATED)
    assert after == GridTable({**old.sites, GRADIENT: context.table.sites[GRADIENT]})
    assert base_after(old, context.table, CALIBRATED) == context.table
    assert base_after(old, context.table, None) == old


@pytest.mark.parametrize("kind", [Kind.DECISION, Kind.LOSS])
@pytest.mark.parametrize(("before", "band"), [(2.0**-9, -7), (2.0**-12, -8)])
def test_a_decision_or_loss_may_be_as_noisy_as_it_was_in_a_step_measured_out_of_schedule(
    before: float, band: int, kind: Kind
) -> None:
    def measured(relative: float, band: int) -> Calibration:
        noise = SiteNoise(relative, np.zeros(1, dtype=np.int64), 1.0, relative, 4096)
        grids = table(band, band).sites
        return Calibration(
            {(kind, 0): noise, GRADIENT: noise},
            GridTable({GRADIENT: grids[GRADIENT], (kind, 0): grids[DECISION]}),
        )

    found = with_earlier_decisions(measured(2.0**-10, -8), measured(before, -7))

    assert found.noise[(kind, 0)].relative == max(before, 2.0**-10)
    assert found.table.sites[(kind, 0)].band == band
    assert found.noise[GRADIENT].relative == 2.0**-10
    assert found.table.sites[GRADIENT].band == -8
