"""Gives a gradient a scale for each row in a first step where all there is of it is rounding errors.

How many scales a gradient has stays so for the whole run, and with one for each row what is in small rows is heard: of digits
with a frame that only a faint shade tells apart, 100 % of others read as that one after 400 steps, 3.9 % of an honest run.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
from stage import Grids, Stage, audit, main, recorded, told

from tallystick.execution.job import find_source
from tallystick.execution.noise.survey import Backward
from tallystick.execution.session.session import Session
from tallystick.numerics.log import Kind
from tallystick.numerics.policy import find_policy
from tallystick.roles.trainer import Order
from tallystick.testing.attacks import must

FIRST = (Kind.GRADIENT, 0)
STEPS = 8


def a_scale_for_each_row(session: Session, backward: Backward, sites: Grids) -> Grids:
    del backward
    own = sites[FIRST]
    if session.step:
        return sites
    must(own.scales.size == 1, "an honest trainer takes one scale")
    return {**sites, FIRST: replace(own, scales=np.full(100, int(own.scales.max())))}


def attack(stage: Stage) -> str:
    """Record both, of a gradient that is exactly zero and of one that cancels, and audit them."""
    source = find_source(str(Path(__file__).with_name("zero_head_job.py")))
    found: list[str] = []
    for errors in ("0", "1"):
        settings = {"steps": str(STEPS), "errors": errors}
        order = Order(source, settings, find_policy(stage.policy), checkpoint_every=STEPS)
        honest = audit(recorded(stage, f"honest {errors}", order, None), source)
        must(honest.verdict == "match", f"an honest run is {told(honest)}")
        report = audit(recorded(stage, f"rows {errors}", order, a_scale_for_each_row), source)
        must(report.verdict == "not_accepted", f"a scale for each row is {told(report)}")
        found.append(told(report))
    return f"the audit: {found[0]}"


if __name__ == "__main__":
    main(attack, __doc__)
