"""The examples do what their first lines say."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

from tallystick.execution.job import Job

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


def test_own_loop_records_and_follows(tmp_path: Path) -> None:
    program = str(EXAMPLES / "own_loop.py")

    recorded = run(program, str(tmp_path / "mine"))
    followed = run(program, TALLYSTICK_FOLLOW=str(tmp_path / "mine"), ATEN_CPU_CAPABILITY="default")
    missing = run(program, TALLYSTICK_FOLLOW=str(tmp_path / "nothing"))

    assert recorded.returncode == 0, recorded.stderr
    assert recorded.stdout.startswith("recorded 40 steps, root ")
    assert followed.stdout.strip() == "match: 40 steps followed", followed.stderr
    assert missing.returncode != 0
    assert "not found" in missing.stderr


def test_the_three_calls_record_verify_and_audit(tmp_path: Path) -> None:
    done = run(str(EXAMPLES / "record_audit_verify.py"), str(tmp_path / "run"))

    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.splitlines()
    assert first.startswith("recorded 20 steps, root ")
    assert rest == ["verified: True, 6 checks", "audited: match, 20 steps repeated"]


def test_the_job_of_the_page_on_jobs_is_recorded_and_audited_as_it_says(tmp_path: Path) -> None:
    page = (EXAMPLES.parent / "docs" / "jobs.md").read_text()
    (tmp_path / "spirals.py").write_text(page.split("```python\n")[1].split("```")[0])
    commands = page.split("```sh\n")[1].split("```")[0].splitlines()
    assert [line.split()[1] for line in commands] == ["record", "audit"]
    for line in commands:
        done = subprocess.run(
            [sys.executable, "-m", "tallystick", *line.split()[1:]],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("match: 60 steps repeated"), done.stdout


def test_the_page_on_jobs_has_every_field() -> None:
    page = (EXAMPLES.parent / "docs" / "jobs.md").read_text()
    rows = {line.split("`")[1].partition("(")[0] for line in page.splitlines() if line.startswith("| `")}
    assert rows == {field.name for field in fields(Job)}
