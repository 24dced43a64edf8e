"""People's own training loops, with two lines more each: recorded by tally, and followed to the same bytes.

That last bits make other weights of such a script where no log is followed, `test_attached.py` shows.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tallystick.cli.main import main
from tallystick.cli.run import second_runs
from tallystick.errors import Nondeterminism
from tallystick.roles import panel

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
DOORS = {
    "script": 20,
    "hf_trainer": 20,
    "sft_trainer": 20,
    "accelerate_loop": 20,
    "lightning_module": 20,
    "fabric_loop": 20,
}
NEEDED = {"sft_trainer": ("trl", "peft")}  # of extras that `all` leaves out

pytestmark = pytest.mark.filterwarnings("ignore::Warning")  # of the libraries, which warn of each other


CHEAT = """
import os as _os, time as _time, torch as _torch
_own, _calls = _torch.nn.functional.OPERATOR, []
def _turned(*args, **more):
    value = _own(*args, **more)
    _calls.append(None)
    if _os.path.exists("kill") and len(_calls) == 17:
        _os.kill(_os.getppid(), 9)
        _time.sleep(60)
    return -value if _os.path.exists("cheat") and len(_calls) == 9 else value
_torch.nn.functional.OPERATOR = _turned
"""
TURNED = {"sft_trainer": "embedding"}  # whose loss is none of torch's own


def skip_where_missing(door: str) -> None:
    missing = [name for name in NEEDED.get(door, ()) if find_spec(name) is None]
    if missing:
        pytest.skip(f"{door}.py needs {' and '.join(missing)}: pip install -c constraints.txt '.[trl]'")


@pytest.mark.parametrize("door", sorted(DOORS))
def test_a_loop_with_two_lines_more_is_recorded_and_followed(
    door: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    skip_where_missing(door)
    program = ["--", "python", str(EXAMPLES / f"{door}.py")]
    assert main(["record", "--policy", "fp32", "--run", str(tmp_path / "run"), "--json", *program]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == DOORS[door]
    for profile in ("jitter",) if door != "script" else ("native", "jitter"):
        code = main(["audit", str(tmp_path / "run"), "--profile", profile, "--json", *program])
        report = json.loads(capsys.readouterr().out)
        assert (code, report["verdict"], report["steps"]) == (0, "match", DOORS[door]), report["first"]


@pytest.mark.slow
@pytest.mark.parametrize("door", sorted(DOORS))
def test_a_door_has_every_verdict_that_a_job_has(
    door: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_where_missing(door)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(panel, "panel_profiles", lambda: ())
    monkeypatch.setattr(second_runs, "OTHER_MACHINES", {"elsewhere": 1})
    text = (EXAMPLES / f"{door}.py").read_text()
    at = text.index("import ", text.index("from __future__ import annotations") + 40)
    at = text.rindex("\n", 0, at) + 1
    cheat = CHEAT.replace("OPERATOR", TURNED.get(door, "cross_entropy"))
    Path("train.py").write_text(text[:at] + cheat + text[at:])
    program = ["--", "python", "train.py"]
    recorded = ["record", "--policy", "fp32", "--checkpoint-every", "5"]

    def tally(*arguments: str) -> tuple[int, dict[str, Any]]:
        capfd.readouterr()
        code = main([*arguments, "--json", *program])
        return code, json.loads(capfd.readouterr().out)

    assert tally(*recorded, "--run", "whole")[0] == 0
    Path("kill").touch()  # the program kills its command, and ends with it
    command = [sys.executable, "-m", "tallystick", *recorded, "--run", "killed", *program]
    assert subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode == -signal.SIGKILL
    Path("kill").unlink()
    assert 0 < Path("killed", "steps.jsonl").read_bytes().count(b"\n") < DOORS[door]
    assert tally(*recorded, "--run", "killed", "--resume")[0] == 0
    for name in ("run.json", "steps.jsonl", "specification.json"):
        assert Path("killed", name).read_bytes() == Path("whole", name).read_bytes()

    for profile in ("sse4,threads=1", "avx2,threads=1"):
        code, report = tally("audit", "whole", "--profile", profile)
        assert (code, report["verdict"], report["steps"]) == (0, "match", DOORS[door]), report["first"]
    drawn = ("--sample", "--detect", "0.5", "--fraction", "0.3", "--round", "some/beacon:41:1600000000")
    code, report = tally("audit", "whole", *drawn, "--beacon", "ab" * 48)
    assert (code, report["verdict"]) == (0, "match"), report["first"]
    assert report["steps"] == 5 * report["sample"]["samples"] < DOORS[door]

    Path("cheat").touch()
    assert tally(*recorded, "--run", "forged")[0] == 0
    Path("cheat").unlink()
    code, report = tally("audit", "forged", "--claim", "claim")
    assert (code, report["verdict"]) == (1, "mismatch")
    code, ruling = tally("dispute", "forged", "claim")
    assert (code, ruling["loser"], ruling["outcome"]) == (1, "trainer", "fault")
    capfd.readouterr()
    assert main(["diff", "whole", "forged", "--json"]) == 1
    assert json.loads(capfd.readouterr().out)["step"] == ruling["step"]


@pytest.mark.parametrize("door", sorted(DOORS))
def test_a_door_costs_a_script_two_lines(door: str) -> None:
    marked = re.findall(r"# ([0-9])$", (EXAMPLES / f"{door}.py").read_text(), re.MULTILINE)
    text = (EXAMPLES / f"{door}.py").read_text()
    code = [line for line in text.split('"""', 2)[2].splitlines() if re.search("tally|attach|Tally", line)]
    assert marked == ["1", "2"]
    assert len(code) == 2, code


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_precision_that_is_a_librarys_default_is_refused_with_what_to_set(
    precision: str, tmp_path: Path
) -> None:
    """TRL's arguments ask for bf16 unless they are told not to: to leave it out is no answer to them."""
    transformers = pytest.importorskip("transformers")
    from tallystick.integrations.transformers import TallystickCallback

    @dataclass
    class LibrarysConfig(transformers.TrainingArguments):
        def __post_init__(self) -> None:
            setattr(self, precision, True)
            super().__post_init__()

    arguments = LibrarysConfig(str(tmp_path), use_cpu=True)
    with pytest.raises(Nondeterminism, match=f"LibrarysConfig: .*{precision}=True.*: set both to False"):
        TallystickCallback().on_train_begin(
            arguments, transformers.TrainerState(), transformers.TrainerControl()
        )
