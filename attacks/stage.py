"""What the attack scripts share: a small run to attack, and how the outcome is told.

Every script makes one cheat for real and hands it to the honest parties. It ends in one line, "caught by: ..",
and exit status 0; in "NOT CAUGHT: .." and status 1 if they let it pass. `--policy` chooses the policy,
`--keep DIR` keeps what was written there.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from tallystick.commit.state import Entry, summarise
from tallystick.execution.job import JobSource, find_source
from tallystick.execution.noise.calibration import calibrate
from tallystick.execution.noise.measured import Calibration
from tallystick.execution.noise.survey import Backward
from tallystick.execution.session.session import Session
from tallystick.numerics.grid_table import GridTable, SiteGrid, SiteKey
from tallystick.numerics.policy import find_policy
from tallystick.roles import trainer
from tallystick.roles.audit_report import AuditReport
from tallystick.roles.auditor import audit
from tallystick.roles.claim import write_claim
from tallystick.roles.judge import dispute
from tallystick.roles.referee import DisputeResult
from tallystick.roles.trainer import Order, record
from tallystick.run.documents import StepRecord
from tallystick.store.files import RunDirectory
from tallystick.testing.attacks import must, play_attack
from tallystick.testing.cheats import CHEATS, claim_path, forge

STEPS, EVERY, AT = 14, 5, 7
Grids = Mapping[SiteKey, SiteGrid]
SETTINGS = {"width": "8", "batch": "16"}


@dataclass(frozen=True)
class Stage:
    """Where one attack happens: a folder and a policy."""

    folder: Path
    policy: str

    @property
    def source(self) -> JobSource:
        return find_source("digits")

    def order(self, **changes: str) -> Order:
        policy = find_policy(self.policy)
        return Order(self.source, {**SETTINGS, **changes}, policy, steps=STEPS, checkpoint_every=EVERY)

    def run(self, name: str = "run") -> RunDirectory:
        return RunDirectory(self.folder / name)

    def honest_run(self, name: str = "run") -> RunDirectory:
        directory = self.run(name)
        record(self.order(), directory)
        return directory

    def caught_by_audit_and_dispute(
        self, run: RunDirectory, *, step: int, verdicts: set[str], at_most: int | None = None
    ) -> str:
        """Return who noticed: an audit at the right step, then a judge who blames the trainer for that step.

        A cheat that goes on for several steps may leave the states alone at first: the judge then names
        one up to ``at_most``.
        """
        report = audit(run, self.source)
        must(report.verdict in verdicts, f"the audit says {report.verdict}, expected {' or '.join(verdicts)}")
        assert report.first is not None
        must(report.first.step == step, f"the audit names step {report.first.step}, the crime is at {step}")
        ruling = self.dispute(run)
        must(ruling.loser == "trainer", f"the judge blames {ruling.loser}: {ruling.reason}")
        named = ruling.step if ruling.step is not None else -1
        must(step <= named <= (at_most or step), f"the judge names step {named}, the crime is at {step}")
        return f"audit ({told(report)}); judge: trainer loses, {ruling.reason}"

    def dispute(self, run: RunDirectory) -> DisputeResult:
        claim = claim_path(run)
        write_claim(run, self.source, claim)
        return dispute(run, claim, self.source)


def recorded(
    stage: Stage, name: str, order: Order, change: Callable[[Session, Backward, Grids], Grids] | None
) -> RunDirectory:
    """Return the run ``name``; where grids are chosen it has those that ``change`` makes of the measured ones, if any."""

    def measure(session: Session, backward: Backward, **given: Any) -> Calibration:
        measured = calibrate(session, backward, **given)
        if change is None or not session.chooses_grids(session.step):
            return measured
        return replace(measured, table=GridTable(change(session, backward, measured.table.sites)))

    run = stage.run(name.replace(" ", "-"))
    with patch.object(trainer, "calibrate", measure):
        record(order, run)
    return run


def told(report: AuditReport) -> str:
    return f"{report.verdict}: {report.first}"


def edit_checkpoint(run: RunDirectory, done: int, edit: Callable[[dict[str, Entry]], None]) -> None:
    """Change the state committed after ``done`` steps, and make every digest of the run fit it."""
    entries = run.load_checkpoint(done)
    edit(entries)
    root = summarise(entries.values()).root().hex()
    run.write_checkpoint(done, list(entries.values()))

    def with_root(r: StepRecord) -> StepRecord:
        return r if r.step != done - 1 else type(r)(**{**vars(r), "state_root": root})

    forge(run, with_root)


def run_cheat(name: str, *, verdicts: set[str]) -> Callable[[Stage], str]:
    """Return the attack that makes one of the shipped cheats and expects it to be caught at its step."""

    def attack(stage: Stage) -> str:
        run = stage.run()
        step = CHEATS[name](AT).run(stage.order(), run)
        return stage.caught_by_audit_and_dispute(run, step=step, verdicts=verdicts)

    return attack


def play(attack: Callable[[Stage], str], description: str | None) -> int:
    """Run the attack and say how it ended; the exit status."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--policy", default="fp32", choices=("fp64", "fp32", "bf16"))
    return play_attack(lambda folder, given: f"caught by: {attack(Stage(folder, given.policy))}", parser)


def main(attack: Callable[[Stage], str], description: str | None) -> None:
    sys.exit(play(attack, description))
