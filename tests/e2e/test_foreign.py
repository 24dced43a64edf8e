"""Runs recorded on other processors (tests/foreign) match here, whatever this processor is.

`scripts/record_foreign.py` adds this machine's.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tallystick.execution.job import find_source
from tallystick.roles.auditor import audit
from tallystick.store.files import RunDirectory

FOREIGN = Path(__file__).resolve().parents[1] / "foreign"
RUNS = sorted(path.parent for path in FOREIGN.glob("*/*/specification.json"))


def test_runs_of_more_than_one_processor_are_here() -> None:
    processors = {run.parent for run in RUNS}
    for policy, least in (
        ("fp64", 6),
        ("fp32", 3),
        ("bf16", 3),
    ):  # those of fp32 and bf16 that are missing are of before a change of their bytes
        assert sum(run.name == policy for run in RUNS) >= least
    for place in processors:
        facts = json.loads((place / "processor.json").read_text())
        assert facts["features"] and facts["environment"]["torch"]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.parent.name}-{run.name}")
def test_a_run_of_another_processor_matches_here(run: Path) -> None:
    report = audit(RunDirectory(run), find_source(str(FOREIGN / "tiny.py")))
    assert (report.verdict, report.first, report.differing_elements) == ("match", None, 0)
    assert 3 * report.freedom.moved <= report.freedom.move_budget, "a third of what noise explains, at most"
