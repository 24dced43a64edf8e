"""bench/device.py: what it asks for where there is a device, played on a processor, and what it says where there is none."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[4] / "bench" / "device.py"


@pytest.fixture
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


def test_without_a_device_it_measures_nothing_and_says_so(
    script: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["device.py", str(tmp_path / "out")])
    assert script["main"]() == 3
    assert "torch sees no CUDA device; nothing was measured" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("verdict", "differing"), [("match", True), ("mismatch", True), ("match", False)])
def test_every_way_is_asked_for_and_anything_but_a_match_beside_a_control_that_differs_fails(
    script: dict[str, Any], tmp_path: Path, verdict: str, differing: bool
) -> None:
    asked: list[list[str]] = []

    class Played(script["Measuring"]):
        def command(self, part: str, name: str, arguments: list[str], ends: tuple[int, ...] = (0,)) -> Any:
            asked.append(arguments)
            if arguments[0] == "bench":
                given = json.loads(arguments[3])
                Path(given["out"]).parent.mkdir(exist_ok=True)
                Path(given["out"]).write_bytes(
                    b"\1\2\3\4" if given["device"] == "cpu" or not differing else b"\1\2\3\5"
                )
            return {"verdict": verdict} if arguments[0] == "audit" else {"weights": 1}

    measuring = Played(tmp_path, 5, 2, False, ["digits-fp32"])
    measuring.exact()

    devices = [words[words.index("--device") + 1] for words in asked if words[0] in ("record", "audit")]
    assert devices == ["cuda", "cpu", "cuda", "cpu", "cuda"]
    assert measuring.failed == (verdict != "match" or not differing)
    lines = [json.loads(line) for line in (tmp_path / "device.jsonl").read_text().splitlines()]
    assert {line["name"] for line in lines} == {
        "digits-fp32-cuda-cpu", "digits-fp32-cuda-cuda", "digits-fp32-cpu-cuda", "digits-fp32-control",
    }  # fmt: skip


def test_a_command_that_fails_is_told_and_its_words_are_kept(script: dict[str, Any], tmp_path: Path) -> None:
    measuring = script["Measuring"](tmp_path, 5, 2, False, [])
    assert measuring.command("exact", "none", ["audit", str(tmp_path / "absent")]) is None
    assert measuring.failed
    line = json.loads((tmp_path / "device.jsonl").read_text())
    assert line["failed"] == 2
    assert "absent" in line["said"]
    assert "absent" in (tmp_path / "none.txt").read_text()
