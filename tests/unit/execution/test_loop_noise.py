"""What a recorder does that measures noise in the middle of a step, and what its auditor makes of it."""

from __future__ import annotations

import numpy as np
import pytest

from tallystick.execution.noise.buffers import lifted_grid
from tallystick.execution.noise.held import with_larger
from tallystick.execution.noise.measured import Calibration, SiteNoise
from tallystick.execution.rounding.context import RecordingContext
from tallystick.execution.rounding.grids import UNSEEN, site_grid, unseen_grid
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
    # It stays coarse where it is loud, however quiet it was in between.
    assert found.table.sites[GRADIENT].band == (-7 if quiet == 0 else -8) - quiet


@pytest.mark.parametrize(("before", "now"), [(2.0**-40, 2.0**-34), (2.0**-34, 2.0**-40)])
def test_a_mean_that_is_nothing_but_noise_has_that_of_the_last_measurement(before: float, now: float) -> None:
    """The scales of the step before are allowed anyway; over its own scale no noise looks larger than another."""

    def measured(largest: float, relative: float) -> Calibration:
        noise = SiteNoise(relative, np.zeros(1, dtype=np.int64), largest / 16, largest, 4096)
        lifted = lifted_grid(FP32, noise)
        noise.relative = relative
        return Calibration({(Kind.BUFFER, 0): noise}, GridTable({(Kind.BUFFER, 0): lifted}))

    found = with_larger(FP32, measured(now, 2.0**-13), measured(before, 2.0**-12))

    assert found.noise[(Kind.BUFFER, 0)].largest == now
    assert found.table.sites[(Kind.BUFFER, 0)] == lifted_grid(FP32, found.noise[(Kind.BUFFER, 0)])


@pytest.mark.parametrize(("held", "now"), [(-6, -12), (-12, -6), (-8, -6)])
@pytest.mark.parametrize("between", [0.0, 2.0**-32])
def test_the_grid_of_a_gradient_that_was_quieter_in_between_stays_no_finer(
    held: int, now: int, between: float
) -> None:
    """Its floor cannot fall where grids are not chosen, so its trainer leaves the band too; moves count as noise is."""

    def measured(band: int, largest: float, rms: float) -> Calibration:
        noise = SiteNoise(largest, np.zeros(1, dtype=np.int64), rms, largest, 4096)
        grid = site_grid(FP32, Kind.GRADIENT, band, np.zeros(1, dtype=np.int64))
        return Calibration({GRADIENT: noise}, GridTable({GRADIENT: grid}))

    found = with_larger(FP32, measured(now, 2.0**-30, 1.0), measured(held, between, 1.0 if between else 0.0))

    assert found.noise[GRADIENT].largest == 2.0**-30
    assert found.table.sites[GRADIENT].band == -6


def test_a_gradient_that_had_no_value_before_has_the_grid_that_is_measured() -> None:
    """What stands there before is no measurement, and eight octaves wider (attacks/unseen_wide.py)."""
    nothing = SiteNoise(0.0, np.full(1, UNSEEN), 0.0, 0.0, 4)
    unseen = GridTable({GRADIENT: unseen_grid(FP32, Kind.GRADIENT, nothing.scales)})
    noise = SiteNoise(2.0**-20, np.zeros(1, dtype=np.int64), 1.0, 2.0**-20, 4)
    grid = site_grid(FP32, Kind.GRADIENT, -16, noise.scales)
    measured = Calibration({GRADIENT: noise}, GridTable({GRADIENT: grid}))
    assert unseen.sites[GRADIENT].band > grid.band

    assert with_larger(FP32, measured, Calibration({GRADIENT: nothing}, unseen)).table.sites[GRADIENT] == grid
