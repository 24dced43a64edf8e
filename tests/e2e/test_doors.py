"""People's own training loops, with two lines more each: recorded by tally, and followed to the same bytes.

That last bits make other weights of such a script where no log is followed, `test_attached.py` shows.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from tallystick.cli.main import main
from tallystick.errors import Nondeterminism

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


@pytest.mark.parametrize("door", sorted(DOORS))
def test_a_loop_with_two_lines_more_is_recorded_and_followed(
    door: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = [name for name in NEEDED.get(door, ()) if find_spec(name) is None]
    if missing:
        pytest.skip(f"{door}.py needs {' and '.join(missing)}: pip install -c constraints.txt '.[trl]'")
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
