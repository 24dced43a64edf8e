"""A cut of ``make zoo``: tiny models of other people's architectures are recorded, and followed under other instructions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ZOO = Path(__file__).parents[2] / "bench" / "zoo.py"
MODELS = ("causal_lm/MixtralFor", "image_classification/ViTForImage")


def test_models_of_two_families_match_under_other_instructions(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    command = [sys.executable, str(ZOO), str(tmp_path), "--steps", "3", "--only", "|".join(MODELS)]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}, check=False
    )
    lines = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert done.returncode == 0, done.stdout
    assert [each["state"] for each in lines] == ["match"] * len(MODELS)
    assert f"| all | {len(MODELS)} | {len(MODELS)} |" in done.stdout
