"""Every script in attacks/monitor ends as its table says: caught, with an honest control inside, or a measured limit."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tallystick.testing.attacks import NotCaught

FOLDER = Path(__file__).resolve().parents[2] / "attacks" / "monitor"
ATTACKS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "scene")
STATE_A_LIMIT = {
    "colluding_owners", "data_addition", "data_subtraction", "decoy_weights", "forked_log", "guessed_hashes", "lying_collector",
    "foreign_attestation_key", "relayed_device", "rolled_back_log", "scheduled_swap", "synthetic_data", "truncated_log",
}  # fmt: skip


NEED_A_TPM = {"foreign_attestation_key"}


@pytest.fixture(autouse=True)
def beside_the_scene(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_ends_as_stated(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if name in NEED_A_TPM:
        request.getfixturevalue("tcti")  # skips, or fails where TPM tests must run
    scene = importlib.import_module("scene").Scene(tmp_path)
    try:
        line = importlib.import_module(name).attack(scene)
    finally:
        scene.close()

    assert line.startswith("caught by: ")
    assert ("Limit: " in line) == (name in STATE_A_LIMIT)


def test_an_honest_owner_is_not_caught(tmp_path: Path) -> None:
    """The control of the test itself: what the scripts ask for is not found where there is nothing to find."""
    module = importlib.import_module("scene")
    scene = module.Scene(tmp_path)
    fleet = scene.fleet(1)
    scene.declare(fleet, fleet.chips)
    verdict = scene.verdict(fleet)
    scene.close()

    module.must_pass(verdict)
    with pytest.raises(NotCaught, match="not 105"):
        module.must_find(verdict, 105)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [([], 0, "caught by: "), (["--keep", "/"], 2, "")],
)
def test_a_script_says_how_it_ended(arguments: list[str], code: int, said: str) -> None:
    done = subprocess.run(
        [sys.executable, str(FOLDER / "guessed_hashes.py"), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )

    assert done.returncode == code, done.stderr
    assert done.stdout.startswith(said)
