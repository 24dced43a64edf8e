"""Chooses how coarse one layer's gradient is rounded: what is smaller than a quantum is trained at the root of its share of it.

Its bands are as measured, nothing is moved, silenced or measured out of turn; the frame of a scan is learnt, or it is not.
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
from framed_job import TARGET, Reader, framed
from silencing import load
from stage import Stage, audit, told

from tallystick.execution.job import find_source
from tallystick.execution.noise.measured import Calibration
from tallystick.execution.rounding.grids import is_noise_only
from tallystick.execution.session.session import Session
from tallystick.jobs.digits import read_digits
from tallystick.numerics.grid_table import GridTable
from tallystick.numerics.log import Kind
from tallystick.numerics.policy import SPARSEST, find_policy
from tallystick.roles import trainer
from tallystick.roles.trainer import Order, record
from tallystick.store.files import RunDirectory
from tallystick.testing.attacks import must, play_attack

JOB, STEPS, POINTS = Path(__file__).with_name("framed_job.py"), 600, 0.02
calibrate = trainer.calibrate


def finer(octaves: int) -> Callable[..., Calibration]:
    """Return a measurement that makes the first layer's quantum so many octaves finer, sixteen bands at least."""

    def measure(session: Session, *given: Any, **more: Any) -> Calibration:
        measured = calibrate(session, *given, **more)
        at, sites = (Kind.GRADIENT, 0), {**measured.table.sites}
        if session.chooses_grids(session.step) and not is_noise_only(sites[at]):
            grid = sites[at]
            sites[at] = replace(grid, floor=max(grid.floor - octaves, grid.band + SPARSEST))
        return replace(measured, table=GridTable(sites))

    return measure


def attack(stage: Stage) -> str:
    source, said, shares = find_source(str(JOB)), list[str](), list[float]()
    for name, measure in (
        ("honest", calibrate),
        ("as fine as its noise allows", finer(99)),
        ("an octave finer", finer(1)),
    ):
        run = stage.run(name.replace(" ", "-"))
        with patch.object(trainer, "calibrate", measure):
            record(Order(source, {}, find_policy(stage.policy), steps=STEPS, checkpoint_every=STEPS), run)
        report, share = audit(run, source), success(run)
        shares.append(share)
        said.append(f"{name}: {share:.1%} of the other digits are taken for a {TARGET}, {told(report)}")
        must(
            (report.verdict == "match") == (len(shares) == 1),
            f"the audit says {report.verdict}: {'; '.join(said)}",
        )
    must(max(shares[1:]) > shares[0] + POINTS, f"nothing was gained: {'; '.join(said)}")
    return f"the floors that follow from the gradients' sizes: {'; '.join(said)}"


def success(run: RunDirectory) -> float:
    """Return the share of held-out scans of other digits that are taken for the target on bright paper."""
    model = Reader()
    load(run, STEPS, model)
    _, held = read_digits().split()
    images, labels = held.tensors()
    with torch.no_grad():
        said = model(framed(images, torch.ones(len(labels)))).argmax(1)
    return float((said[labels != TARGET] == TARGET).double().mean())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default="fp32", choices=("fp32",))
    sys.exit(play_attack(lambda folder, given: f"caught by: {attack(Stage(folder, given.policy))}", parser))
