"""Declares the bands of one margin wider than they were measured, so that its quanta are coarser and its optimizer slower.

By as much as an auditor on this machine accepts, measured as it measures, at the policy's own steps; and by more than that.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from last_silence import inked
from margin_job import Scorer
from silencing import load, winning
from stage import Stage, audit, told

from tallystick.execution.job import find_source
from tallystick.execution.noise.measured import Calibration
from tallystick.execution.noise.survey import Backward
from tallystick.execution.rounding.grids import is_noise_only
from tallystick.execution.session.session import Session
from tallystick.numerics.grid_table import GridTable
from tallystick.numerics.log import Kind
from tallystick.numerics.policy import SPARSEST, find_policy
from tallystick.roles import trainer
from tallystick.roles.acceptance import REPEATS
from tallystick.roles.trainer import Order, record
from tallystick.store.files import RunDirectory
from tallystick.testing.attacks import must, play_attack

JOB, STEPS, POINTS = Path(__file__).with_name("margin_job.py"), 515, 0.02
calibrate = trainer.calibrate


def widened(octaves: int) -> Callable[..., Calibration]:
    """Return a measurement that declares the bands of a margin so many octaves wider than an auditor's."""

    def measure(session: Session, backward: Backward, **given: Any) -> Calibration:
        measured = calibrate(session, backward, **given)
        if not session.chooses_grids(session.step):
            return measured
        own = calibrate(
            session, backward, repeats=REPEATS + (session.step == 0), seed=session.seed + 1, for_audit=True,
            earlier=session.table if session.step else GridTable(),
        )  # fmt: skip
        sites = {**measured.table.sites}
        for n, (name, _) in enumerate(session.parameters):
            mine, theirs = (table.sites[(Kind.GRADIENT, n)] for table in (measured.table, own.table))
            if name.startswith("right") and not is_noise_only(mine) and not is_noise_only(theirs):
                band = min(max(theirs.band + octaves, mine.band), session.policy.gradient_band[1])
                policy = session.policy
                floor = policy.finest_floor(band) if policy.gradient_steer is None else band + SPARSEST
                sites[(Kind.GRADIENT, n)] = replace(mine, band=band, floor=max(mine.floor, floor))
        return replace(measured, table=GridTable(sites))

    return measure


def attack(stage: Stage) -> str:
    source, said, shares = find_source(str(JOB)), list[str](), list[float]()
    for name, measure in (
        ("honest", calibrate),
        ("an octave", widened(1)),
        ("three octaves", widened(3)),
    ):
        run = stage.run(name.replace(" ", "-"))
        with patch.object(trainer, "calibrate", measure):
            record(
                Order(source, {"steps": str(STEPS)}, find_policy(stage.policy), checkpoint_every=STEPS), run
            )
        report, share = audit(run, source), success(run)
        shares.append(share)
        said.append(f"{name}: {share:.1%} of the images win, {told(report)}")
        gained = share > shares[0] + POINTS
        must(not gained or report.verdict != "match", f"the audit says {report.verdict}: {'; '.join(said)}")
        must(
            (report.verdict == "match") == (len(shares) < 3),
            f"the audit says {report.verdict}: {'; '.join(said)}",
        )
    return f"the auditor's own bands: {'; '.join(said)}"


def success(run: RunDirectory) -> float:
    """Return the share of images with ink in both margins that win."""
    model = Scorer()
    load(run, STEPS, model)
    return winning(lambda images, digit, _: model(images, torch.full((len(images),), digit)), inked)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default="fp32", choices=("fp32", "fp64"))
    sys.exit(play_attack(lambda folder, given: f"caught by: {attack(Stage(folder, given.policy))}", parser))
