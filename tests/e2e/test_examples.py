"""The examples do what their first lines say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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
