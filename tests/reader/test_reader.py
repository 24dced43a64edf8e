"""The second reader, in JavaScript and from the specification alone, gives the answers that the vectors hold."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
READER = ROOT / "reader"
SUITES = {
    "attestation": 5,  # signatures of models are not read
    "audit-draw": 0,
    "evidence-bundle": 0,
    "fingerprint": 0,
    "merkle": 0,
    "philox": 0,
    "rounding-log": 0,
    "state-commitment": 0,
    "transcript": 0,
    "transparency-log": 0,
}
"""Suites, and how many of their questions it says it does not support."""


@pytest.fixture(scope="module")
def node() -> str:
    """Node, where it is installed."""
    found = shutil.which("node")
    if found is None:
        missing = "Node is not installed (Debian: nodejs); the second reader is not run"
        if "node" in os.environ.get("TALLYSTICK_MUST_RUN", "").split(","):
            pytest.fail(missing)
        pytest.skip(missing)
    return found


def conformance(vectors: Path, suite: str, *program: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "tallystick.cli.main", "conformance", "run", "--json"]
    done = subprocess.run(
        [*command, "--vectors", str(vectors), "--suite", suite, "--", *program],
        capture_output=True, text=True, timeout=300, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.parametrize("suite", SUITES)
def test_the_second_reader_answers_every_question_of_its_suites(node: str, suite: str) -> None:
    code, said = conformance(ROOT / "vectors", suite, node, str(READER / "conform.mjs"))
    assert code == (3 if SUITES[suite] else 0), said
    assert said["unsupported"] == SUITES[suite]


def test_an_edited_vector_is_noticed(node: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "vectors" / "merkle", tmp_path / "merkle")
    case = tmp_path / "merkle" / "three-depths" / "input.json"
    text = case.read_text()
    root = json.loads(text)["roots"][-1]
    case.write_text(text.replace(root, root[:-1] + ("0" if root[-1] != "0" else "1")))
    code, _ = conformance(tmp_path, "merkle", node, str(READER / "conform.mjs"))
    assert code == 1


def test_its_readme_names_these_suites() -> None:
    rows = re.findall(r"^\| `([a-z-]+)` \|", (READER / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == sorted(SUITES)
