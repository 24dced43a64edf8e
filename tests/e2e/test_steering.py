"""Steering trainers on a small run: what exceeds the auditor's own measurement is not accepted, and what is moved is seen.

These are statements about limits, whatever the processor. How far a backdoor gets, the scripts in attacks/ measure.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest

from tallystick.execution.job import find_source
from tallystick.execution.rounding.grids import site_grid
from tallystick.execution.session.session import Session
from tallystick.numerics.grid_table import GridTable
from tallystick.numerics.log import Kind
from tallystick.numerics.policy import find_policy
from tallystick.roles import trainer
from tallystick.roles.audit_report import AuditReport
from tallystick.roles.auditor import audit
from tallystick.roles.trainer import Order, record
from tallystick.store.files import RunDirectory

FOLDER = Path(__file__).resolve().parents[2] / "attacks"
SETTINGS = {"width": "4", "batch": "16"}
STEPS = 30
NEARLY = 0.99  # two sums of the same squares, in another order


@pytest.fixture
def steering(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("steering")


def played(steering: Any, folder: Path, policy: str = "fp32", **limits: Any) -> tuple[AuditReport, Any]:
    """Record under these limits, and return what an audit says and what the attacker knows."""
    order = steering.Scene(folder, policy, STEPS, SETTINGS).order()
    run, attacker = RunDirectory(folder / "run"), steering.Attacker(steering.Limits(**limits))
    with steering.steering(attacker):
        record(order, run)
    return audit(run, order.source), attacker.told


def excesses(report: AuditReport) -> list[str]:
    return [
        str(deviation)
        for segment in report.segments
        for deviation in segment.deviations
        if deviation.kind == "not_accepted"
    ]


@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp64"])
def test_a_trainer_that_steers_nothing_is_accepted(steering: ModuleType, tmp_path: Path, policy: str) -> None:
    """The control: the same context, with nothing chosen."""
    report, told = played(steering, tmp_path, policy, gradients=False)

    assert report.verdict == "match", report.first
    assert (
        told.moves
        == told.gates
        == told.silenced
        == report.freedom.moved
        == report.freedom.decisions_moved
        == 0
    )


def test_the_widest_bands_are_not_accepted(steering: ModuleType, tmp_path: Path) -> None:
    report, told = played(steering, tmp_path, widest=True)

    assert told.moves > 0
    assert report.verdict == "not_accepted", report.first
    assert any("a band of 2**" in text for text in excesses(report))
    assert report.freedom.moved > report.freedom.move_budget
    assert report.freedom.largest_move >= NEARLY * told.largest_steer


def test_scales_above_the_rule_are_not_accepted(steering: ModuleType, tmp_path: Path) -> None:
    report, told = played(steering, tmp_path, lift=True)

    assert told.moves > 0
    assert report.verdict == "not_accepted", report.first
    assert any("scale 2**" in text for text in excesses(report))
    assert report.freedom.largest_move >= NEARLY * told.largest_steer


def test_moves_above_the_budget_are_not_accepted(steering: ModuleType, tmp_path: Path) -> None:
    """Honest bands and scales, and every move that the rules let a follower obey."""
    report, told = played(steering, tmp_path)

    assert told.moves > 0
    assert report.verdict == "not_accepted", report.first
    assert any("roundings moved" in text for text in excesses(report))
    assert report.freedom.largest_move >= NEARLY * told.largest_steer


def test_silenced_parameters_that_are_not_noise_are_not_accepted(
    steering: ModuleType, tmp_path: Path
) -> None:
    report, told = played(steering, tmp_path, gradients=False, silenced=("*",))

    assert told.silenced > 0
    assert report.verdict == "not_accepted", report.first
    assert any("silenced" in text for text in excesses(report))
    assert report.freedom.silenced_parameters >= told.silenced


@pytest.mark.parametrize("policy", ["fp32", "bf16"])
def test_a_layer_that_measured_steps_leave_out_is_measured_where_it_appears(
    steering: ModuleType, tmp_path: Path, policy: str
) -> None:
    """A trainer that measures it too is accepted; one that does not, and declares the widest bands for it, is not."""
    job = str(FOLDER / "layer_drop_job.py")
    order = steering.Scene(tmp_path, policy, 6, SETTINGS, job=job).order()
    honest, run = RunDirectory(tmp_path / "honest"), RunDirectory(tmp_path / "run")
    record(order, honest)
    assert audit(honest, order.source).verdict == "match"

    with (
        patch.object(Session, "has_outgrown", lambda *_: False),
        steering.steering(steering.Attacker(steering.Limits(audited=0.9, pull=30.0))),
    ):
        record(order, run)
    report = audit(run, order.source)
    assert report.verdict == "not_accepted", report.first
    limit = "beside.weight: 2**-2; accepted is a band of" if policy == "fp32" else "of this step's gradient"
    assert any(limit in text for text in excesses(report)), excesses(report)


TURNS = """
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from tallystick.execution.job import Job

class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(16, 12), nn.Linear(12, 4)
        self.branches = nn.ModuleList(nn.Linear(12, 12) for _ in range(2))
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) * 0.2)

    def forward(self, x, gate):
        x = torch.tanh(self.first(x))
        return self.head(torch.tanh(x + (1.0 - gate) * self.branches[0](x) + gate * self.branches[1](x)))

def build(settings):
    model = Branches()
    def batch(step):
        rng = np.random.default_rng(step)
        x = torch.from_numpy(rng.standard_normal((32, 16)).astype(np.float32))
        return x, torch.from_numpy(rng.integers(0, 4, 32)), float(step % 2)
    return Job(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.05), batch=batch,
               loss=lambda model, b: F.cross_entropy(model(b[0], b[2]), b[1]), steps=8)
"""


def test_a_sample_measures_a_branch_that_its_first_step_leaves_out(tmp_path: Path) -> None:
    """Declared once, the widest band of a branch held in every segment that begins with the other one's turn: match."""
    job = tmp_path / "turns.py"
    job.write_text(TURNS)
    source, measure = find_source(str(job)), trainer._Recording._calibrate

    def calibrate(self: Any, backward: Any, *outgrown: Any) -> None:
        measure(self, backward, *outgrown)
        session = self.session
        wide = {
            place: site_grid(session.policy, Kind.GRADIENT, -2, grid.scales)
            for place, grid in session.table.sites.items()
            if place[0] == Kind.GRADIENT and session.parameters[place[1]][0] == "branches.1.weight"
        }
        if session.step % 2 and lies:
            session.table = GridTable({**session.table.sites, **wide})

    for lies, verdict in ((False, "match"), (True, "not_accepted")):
        run = RunDirectory(tmp_path / f"run{lies}")
        with patch.object(trainer._Recording, "_calibrate", calibrate):
            record(Order(source, {}, find_policy("fp32"), steps=8, checkpoint_every=2), run)
        for begin in (2, 4, 6):
            report = audit(run, source, steps=(begin, begin + 2))
            assert report.verdict == verdict, (begin, report.first)


@pytest.mark.parametrize("policy", ["fp32", "bf16"])
def test_flipped_gates_are_charged_with_what_they_do(
    steering: ModuleType, tmp_path: Path, policy: str
) -> None:
    report, told = played(steering, tmp_path, policy, gates=True, gate_band=None, gradients=False)

    assert told.gates > 0
    assert report.verdict in ("match", "not_accepted"), report.first
    assert report.freedom.largest_move >= NEARLY * told.largest_gate_steer


@pytest.mark.parametrize("policy", ["fp32", "bf16"])
def test_who_knows_the_limits_ends_within_them(steering: ModuleType, tmp_path: Path, policy: str) -> None:
    """Whoever measures what an auditor will can use the budgets up, and what that did is printed."""
    report, told = played(
        steering, tmp_path, policy, audited=0.5, gates=True, gate_band=2, buffers=True, pull=30.0
    )

    assert told.moves > 0
    assert report.verdict == "match", report.first
    assert report.freedom.moved <= report.freedom.move_budget
    assert report.freedom.largest_move >= NEARLY * max(told.largest_steer, told.largest_gate_steer)
