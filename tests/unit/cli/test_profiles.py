"""Commands in processes of their own: which arithmetic they have."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tallystick.cli.profiles import OutOfTime, run_aside
from tallystick.execution.determinism import Profile

VARIABLE = "ATEN_CPU_CAPABILITY"


@pytest.mark.parametrize(("profile", "has"), [(Profile(), "asked"), (Profile("avx2", 1), "avx2")])
def test_a_second_run_has_the_arithmetic_of_who_asks(
    profile: Profile, has: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless its profile names another one."""
    seen: dict[str, str] = {}

    def run(*_: object, env: dict[str, str], **__: object) -> Any:
        seen.update(env)
        return SimpleNamespace(returncode=3)

    monkeypatch.setenv(VARIABLE, "asked")
    monkeypatch.setattr(subprocess, "run", run)
    assert run_aside(["version"], profile, {"TOLD": "here"}, tmp_path, 1.0) == 3
    assert (seen[VARIABLE], seen["TOLD"]) == (has, "here")


def test_a_second_run_that_does_not_end_is_killed_and_said(tmp_path: Path) -> None:
    with pytest.raises(OutOfTime, match="it has not ended in 0 seconds"):
        run_aside(["version"], Profile(), {}, tmp_path, 0.0)
