"""tally bench where the benchmarks are not installed: listed, and refused with what it needs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tallystick


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what a wheel carries: the package alone."""
    place = tmp_path_factory.mktemp("site-packages")
    shutil.copytree(Path(tallystick.__file__).parent, place / "tallystick")
    return place


def tally(wheel: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "tallystick", *arguments],
        env={**os.environ, "PYTHONPATH": str(wheel)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_help_lists_it_and_says_that_it_is_not_installed(wheel: Path) -> None:
    found = tally(wheel, "--help")

    assert found.returncode == 0
    assert "bench " in found.stdout
    assert "Not installed here" in " ".join(found.stdout.replace("│", " ").split())


@pytest.mark.parametrize("words", [[], ["training"], ["training", "log", "--job", "text", "--quick"]])
def test_it_is_refused_as_a_missing_extra_with_where_to_get_it(wheel: Path, words: list[str]) -> None:
    found = tally(wheel, "bench", *words)

    assert found.returncode == 2
    assert found.stderr.splitlines() == [
        "tally: tallystick_bench is not installed and this command needs it: run tally from the source tree, "
        "or pip install ./bench there"
    ]


def test_the_refusal_is_json_where_that_was_asked_for(wheel: Path) -> None:
    found = tally(wheel, "bench", "honest", "--json")

    assert found.returncode == 2
    assert json.loads(found.stdout)["kind"] == "MissingExtra"


def test_the_benchmarks_installed_beside_the_package_are_found(wheel: Path, tmp_path: Path) -> None:
    bench = Path(__file__).parents[4] / "bench"
    shutil.copytree(wheel, tmp_path, dirs_exist_ok=True)
    shutil.copytree(bench / "tallystick_bench", tmp_path / "tallystick_bench")

    found = tally(tmp_path, "bench", "training", "nothing")

    assert found.returncode == 2
    assert "part nothing: unknown" in found.stderr
