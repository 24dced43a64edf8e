"""Keeps the grid that a gradient has before it had any value, eight octaves wider than its noise, where it has one first.

No scheduled measurement has a gradient in this job, so that grid holds for the whole run, and rounds as it suits without a move:
one of two margins that balance each other stays behind. Every image with ink in both then wins (98.0 %; 0.0 % of an honest run,
300 steps).
"""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from stage import Grids, Stage, audit, main, told

from tallystick.execution.job import find_source
from tallystick.execution.noise.calibration import calibrate
from tallystick.execution.noise.measured import Calibration
from tallystick.execution.noise.survey import Backward
from tallystick.execution.session.session import Session
from tallystick.numerics.budget import chosen_floor, coarsest_quantum
from tallystick.numerics.grid_table import GridTable
from tallystick.numerics.log import Kind
from tallystick.numerics.policy import find_policy
from tallystick.roles import trainer
from tallystick.roles.trainer import Order, record
from tallystick.testing.attacks import must

STEPS, BAND = 8, -10


def wide(session: Session, sites: Grids) -> Grids:
    heard = [
        (session.parameters[at[1]][1].numel(), grid.scales)
        for at, grid in sites.items()
        if at[0] == Kind.GRADIENT
    ]
    coarsest, changed = coarsest_quantum(session.policy, heard), {**sites}
    for number, (name, p) in enumerate(session.parameters):
        if name.startswith("right"):
            own = sites[Kind.GRADIENT, number]
            must(own.band < BAND, f"an honest band is narrower, not 2**{own.band}")
            grid = replace(own, band=BAND)
            floor = max(own.floor, chosen_floor(session.policy, grid, coarsest, p.numel()))
            changed[Kind.GRADIENT, number] = replace(grid, floor=floor)
    return changed


def measure(session: Session, backward: Backward, **given: Any) -> Calibration:
    """Measure as an honest trainer, and have other grids in the step whose gradient has outgrown what none had."""
    measured = calibrate(session, backward, **given)
    return (
        replace(measured, table=GridTable(wide(session, measured.table.sites)))
        if session.step == 1
        else measured
    )


def attack(stage: Stage) -> str:
    """Record both, and audit them."""
    source = find_source(str(Path(__file__).with_name("resting_job.py")))
    order = Order(source, {"steps": str(STEPS)}, find_policy(stage.policy), checkpoint_every=STEPS)
    record(order, honest := stage.run("honest"))
    report = audit(honest, source)
    must(report.verdict == "match", f"an honest run is {told(report)}")
    with patch.object(trainer, "calibrate", measure):
        record(order, cheat := stage.run("wide"))
    report = audit(cheat, source)
    must(report.verdict == "not_accepted", f"the grid of the unseen is {told(report)}")
    return f"the audit: {told(report)}"


if __name__ == "__main__":
    main(attack, __doc__)
