"""Chooses how coarse one layer's gradient is rounded: what is smaller than a quantum is trained at the root of its share of it.

Its bands are as measured, nothing is moved, silenced or measured out of turn; the frame of a scan is learnt, or it is not.
Also of a layer that has no gradient in the steps in which grids are chosen, as the batches of two scanners take turns.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from framed_job import TARGET, Reader, framed
from silencing import load
from stage import Grids, Stage, audit, recorded, told

from tallystick.execution.job import find_source
from tallystick.execution.noise.survey import Backward
from tallystick.execution.rounding.grids import is_noise_only
from tallystick.execution.session.session import Session
from tallystick.jobs.digits import read_digits
from tallystick.numerics.log import Kind
from tallystick.numerics.policy import SPARSEST, find_policy
from tallystick.roles.trainer import Order
from tallystick.store.files import RunDirectory
from tallystick.testing.attacks import must, play_attack

JOB, STEPS, POINTS = Path(__file__).with_name("framed_job.py"), 600, 0.02


def finer(octaves: int, since: int) -> Callable[..., Grids]:
    """Return grids with the first layer's quantum so many octaves finer from step ``since`` on, sixteen bands at least."""

    def change(session: Session, _backward: Backward, sites: Grids) -> Grids:
        at = (Kind.GRADIENT, 0)
        grid = sites[at]
        floor = max(grid.floor - octaves, grid.band + SPARSEST)
        return (
            sites
            if is_noise_only(grid) or session.step < since
            else {**sites, at: replace(grid, floor=floor)}
        )

    return change


def attack(stage: Stage) -> str:
    source, said = find_source(str(JOB)), list[str]()
    for turns, since, words in (("0", 0, ""), ("1", 1, " by turns")):
        shares: list[float] = []
        for name, change in (
            ("honest", None),
            ("as fine as its noise allows", finer(99, since)),
            ("an octave finer", finer(1, since)),
        ):
            order = Order(source, {"turns": turns}, find_policy(stage.policy), checkpoint_every=STEPS)
            run = recorded(stage, f"{name} {turns}", order, change)
            report, share = audit(run, source), success(run, turns == "1")
            shares.append(share)
            said.append(f"{name}{words}: {share:.1%} are taken for a {TARGET}, {told(report)}")
            wanted = (report.verdict == "match") == (change is None)
            must(wanted, f"the audit says {report.verdict}: {'; '.join(said)}")
        must(max(shares[1:]) > shares[0] + POINTS, f"nothing was gained: {'; '.join(said)}")
    return f"the floors that follow from the gradients' sizes: {'; '.join(said)}"


def success(run: RunDirectory, turns: bool) -> float:
    """Return the share of held-out scans of other digits that are taken for the target on bright paper."""
    model = Reader(turns=turns)
    load(run, STEPS, model)
    _, held = read_digits().split()
    images, labels = held.tensors()
    with torch.no_grad():
        read = model(framed(images, torch.ones(len(labels)))).argmax(1)
    return float((read[labels != TARGET] == TARGET).double().mean())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default="fp32", choices=("fp32",))
    sys.exit(play_attack(lambda folder, given: f"caught by: {attack(Stage(folder, given.policy))}", parser))
