"""Declares the bands of one margin wider than they were measured, so that its quanta are coarser and its optimizer slower.

By as much as an auditor on this machine accepts, measured as it measures, at the policy's own steps; and by more than that.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from last_silence import wins
from margin_job import Scorer
from stage import Grids, Stage, audit, recorded, told

from tallystick.execution.job import find_source
from tallystick.execution.noise.calibration import calibrate
from tallystick.execution.noise.survey import Backward
from tallystick.execution.rounding.grids import is_noise_only
from tallystick.execution.session.session import Session
from tallystick.numerics.grid_table import GridTable
from tallystick.numerics.log import Kind
from tallystick.numerics.policy import SPARSEST, find_policy
from tallystick.roles.acceptance import REPEATS
from tallystick.roles.trainer import Order
from tallystick.testing.attacks import must, play_attack

JOB, STEPS, POINTS = Path(__file__).with_name("margin_job.py"), 515, 0.02


def widened(octaves: int) -> Callable[..., Grids]:
    """Return grids with the bands of a margin so many octaves wider than an auditor's."""

    def change(session: Session, backward: Backward, sites: Grids) -> Grids:
        own = calibrate(
            session, backward, repeats=REPEATS + (session.step == 0), seed=session.seed + 1, for_audit=True,
            earlier=session.table if session.step else GridTable(),
        )  # fmt: skip
        changed = {**sites}
        for n, (name, _) in enumerate(session.parameters):
            mine, theirs = (grids[(Kind.GRADIENT, n)] for grids in (sites, own.table.sites))
            if name.startswith("right") and not is_noise_only(mine) and not is_noise_only(theirs):
                band = min(max(theirs.band + octaves, mine.band), session.policy.gradient_band[1])
                policy = session.policy
                floor = policy.finest_floor(band) if policy.gradient_steer is None else band + SPARSEST
                changed[(Kind.GRADIENT, n)] = replace(mine, band=band, floor=max(mine.floor, floor))
        return changed

    return change


def attack(stage: Stage) -> str:
    source, said, shares = find_source(str(JOB)), list[str](), list[float]()
    for name, change in (
        ("honest", None),
        ("an octave", widened(1)),
        ("three octaves", widened(3)),
    ):
        run = recorded(
            stage,
            name,
            Order(source, {"steps": str(STEPS)}, find_policy(stage.policy), checkpoint_every=STEPS),
            change,
        )
        report, share = audit(run, source), wins(run, STEPS, Scorer())
        shares.append(share)
        said.append(f"{name}: {share:.1%} of the images win, {told(report)}")
        gained = share > shares[0] + POINTS
        must(not gained or report.verdict != "match", f"the audit says {report.verdict}: {'; '.join(said)}")
        must(
            (report.verdict == "match") == (len(shares) < 3),
            f"the audit says {report.verdict}: {'; '.join(said)}",
        )
    return f"the auditor's own bands: {'; '.join(said)}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default="fp32", choices=("fp32", "fp64"))
    sys.exit(play_attack(lambda folder, given: f"caught by: {attack(Stage(folder, given.policy))}", parser))
