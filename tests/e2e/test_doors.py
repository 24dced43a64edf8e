"""People's own training loops, with two lines more each: recorded by tally, and followed to the same bytes.

That last bits make other weights of such a script where no log is followed, `test_attached.py` shows.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tallystick.cli.main import main

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
DOORS = {"script": 20, "hf_trainer": 20, "accelerate_loop": 20, "lightning_module": 20, "fabric_loop": 20}

pytestmark = pytest.mark.filterwarnings("ignore::Warning")  # of the libraries, which warn of each other


@pytest.mark.parametrize("door", sorted(DOORS))
def test_a_loop_with_two_lines_more_is_recorded_and_followed(
    door: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = ["--", "python", str(EXAMPLES / f"{door}.py")]
    assert main(["record", "--policy", "fp32", "--run", str(tmp_path / "run"), "--json", *program]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == DOORS[door]
    for profile in ("jitter",) if door != "script" else ("native", "jitter"):
        code = main(["audit", str(tmp_path / "run"), "--profile", profile, "--json", *program])
        report = json.loads(capsys.readouterr().out)
        assert (code, report["verdict"], report["steps"]) == (0, "match", DOORS[door]), report["first"]


@pytest.mark.parametrize("door", sorted(DOORS))
def test_a_door_costs_a_script_two_lines(door: str) -> None:
    marked = re.findall(r"# ([0-9])$", (EXAMPLES / f"{door}.py").read_text(), re.MULTILINE)
    text = (EXAMPLES / f"{door}.py").read_text()
    code = [line for line in text.split('"""', 2)[2].splitlines() if re.search("tally|attach|Tally", line)]
    assert marked == ["1", "2"]
    assert len(code) == 2, code
