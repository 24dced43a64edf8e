"""What a recorder does that measures noise in the middle of a step, and what its auditor makes of it."""

from __future__ import annotations

import numpy as np
import pytest

from tallystick.execution.noise.measured import Calibration, SiteNoise
from tallystick.execution.noise.yardstick import with_larger
from tallystick.execution.rounding.context import RecordingContext
from tallystick.numerics.grid_table import GridTable, SiteGrid
from tallystick.numerics.log import Kind, SiteAddress, decode_frame
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


@pytest.mark.parametrize("kind", [Kind.DECISION, Kind.LOSS])
@pytest.mark.parametrize("quiet", [0, 8])
@pytest.mark.parametrize(("before", "band"), [(2.0**-9, -7), (2.0**-12, -8)])
def test_a_decision_or_loss_may_be_as_noisy_as_it_was_in_a_step_measured_out_of_schedule(
    before: float, band: int, quiet: int, kind: Kind
) -> None:
    def measured(relative: float, band: int) -> Calibration:
        noise = SiteNoise(relative, np.zeros(1, dtype=np.int64), 1.0, relative, 4096)
        grids = table(band - quiet, band).sites
        return Calibration(
            {(kind, 0): noise, GRADIENT: noise},
            GridTable({GRADIENT: grids[GRADIENT], (kind, 0): grids[DECISION]}),
        )

    found = with_larger(FP32, measured(2.0**-10, -8), measured(before, -7))

    assert found.noise[(kind, 0)].relative == max(before, 2.0**-10)
    assert found.table.sites[(kind, 0)].band == band
    loud = quiet == 0 and before > 2.0**-10  # its grid only becomes coarser too
    assert found.noise[GRADIENT].relative == (before if loud else 2.0**-10)
    assert found.table.sites[GRADIENT].band == (-7 if loud else -8) - quiet
