"""Noise that grows in a loop of one's own is measured again, as that of a job is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tallystick.execution.determinism import Profile, parse_profile
from tallystick.reports.run import read_run
from tallystick.roles.follower import FOLLOW_VARIABLE
from tallystick.store.files import RunDirectory

MODELS = Path(__file__).parent / "models"
STEPS = 14


def loop(run: Path, policy: str, parts: int, *, follow: Profile | None = None) -> str:
    """Record ``zero_head`` in a loop of one's own, or follow it; return what the program printed."""
    given = [MODELS / "own_loop.py", MODELS / "zero_head.py", run, policy, STEPS, parts]
    more = {} if follow is None else {FOLLOW_VARIABLE: str(run), **follow.environment()}
    done = subprocess.run(
        [sys.executable, *map(str, given)], capture_output=True, text=True, check=False, env=os.environ | more
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(("policy", "parts"), [("fp32", 1), ("fp32", 2), ("fp64", 1)])
def test_noise_that_reaches_its_floor_in_a_loop_accuses_nobody(
    policy: str, parts: int, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    loop(run, policy, parts)
    log = read_run(RunDirectory(run)).log

    verdicts = [loop(run, policy, parts, follow=parse_profile(text)) for text in ("native", "sse4,threads=1")]

    assert log is not None
    assert log.kinds["calibration"].payloads > 0, "no noise reached its floor: this test shows nothing"
    assert verdicts == [f"match {STEPS} None"] * 2
