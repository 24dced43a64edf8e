"""States a band wider or a quantum coarser than the policy allows, so that more may be chosen."""

from unittest.mock import patch

from stage import STEPS, Stage, main

from tallystick.execution.rounding.context import RecordingContext
from tallystick.execution.rounding.grids import is_noise_only
from tallystick.execution.session import session
from tallystick.numerics.grid_table import GridTable, SiteGrid
from tallystick.numerics.log import Kind
from tallystick.roles.trainer import record


def replace_band(grid: SiteGrid) -> SiteGrid:
    band = grid.band if grid.residue_bits else min(grid.band + 6, -1)
    return SiteGrid(
        grid.precision, band, grid.floor + 6, grid.dithered, grid.scales, residue_bits=grid.residue_bits
    )


def attack(stage: Stage) -> str:
    honest = session.Session.recording_context

    def make(self: session.Session, before: GridTable) -> RecordingContext:
        made = honest(self, before)
        wide = {
            place: replace_band(grid) if place[0] == Kind.GRADIENT and not is_noise_only(grid) else grid
            for place, grid in made.table.sites.items()
        }
        made.table, made._grids = GridTable(wide), dict(wide)
        return made

    with patch.object(session.Session, "recording_context", make):
        record(stage.order(), stage.run())
    return stage.caught_by_audit_and_dispute(stage.run(), step=0, verdicts={"log_violation"}, at_most=STEPS)


if __name__ == "__main__":
    main(attack, __doc__)
