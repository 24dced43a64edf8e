from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main

import tallystick
from tallystick.cli import commands, profiles
from tallystick.errors import Nondeterminism
from tallystick.execution.determinism import parse_profile
from tallystick.execution.job import JobSource

COMMANDS = ("record", "audit", "show", "verify", "prove", "dispute", "demo")


def test_help_names_every_command(tally) -> None:
    answer = tally("--help")

    assert answer.code == 0
    assert all(command in answer.out for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(tally, command: str) -> None:
    answer = tally(command, "--help")

    assert answer.code == 0
    assert "Usage: tally " + command in answer.out


def test_no_command_is_answered_with_help_and_counts_as_wrong_usage(tally) -> None:
    answer = tally()

    assert answer.code == 2
    assert "Usage" in answer.out


def test_the_version_is_the_packages(tally) -> None:
    assert tally("--version").out == f"tallystick {tallystick.__version__}\n"


def test_an_unknown_command_is_one_line_and_one_json_object(tally) -> None:
    answer = tally("nosuch", "--json")

    assert answer.code == 2
    assert answer.err.count("\n") == 1
    assert json.loads(answer.out)["kind"] == "Usage"


def test_what_a_stranger_wrote_cannot_move_the_cursor(tally, tmp_path: Path) -> None:
    answer = tally("show", tmp_path / "\x1b[2Jgone")

    assert "\x1b" not in answer.err
    assert "\\x1b[2Jgone" in answer.err


def test_the_module_is_the_command() -> None:
    child = subprocess.run(
        [sys.executable, "-m", "tallystick", "show", "/no/such/run", "--json"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )

    assert child.returncode == 2
    assert json.loads(child.stdout)["kind"] == "StoreError"
    assert child.stderr == "tally: /no/such/run: there is no such run directory\n"


@pytest.mark.parametrize("called", [["--help"], ["audit", "--help"], ["key", "--help"]])
def test_a_command_loads_no_torch_and_no_other_command(called: list[str]) -> None:
    code = """
import sys
from tallystick.cli.main import main
main(sys.argv[1:])
print(*(name for name in sys.modules if name == "torch" or name.startswith("tallystick.cli.fleet.")), file=sys.stderr)
"""
    loaded = subprocess.run([sys.executable, "-c", code, *called], check=True, capture_output=True, text=True)

    assert "torch" not in loaded.stderr.split()
    assert ("tallystick.cli.fleet.chips" in loaded.stderr) == (called == ["--help"])


def test_each_command_is_where_the_table_says() -> None:
    everything: Any = typer.main.get_command(commands.load())
    assert set(everything.commands) == set(commands.COMMANDS)
    for name in commands.COMMANDS:
        alone: Any = typer.main.get_command(commands.load([name]))
        assert name in alone.commands


def test_a_child_without_its_profile_does_not_start_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(profiles.CHILD, "native,threads=3")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    with pytest.raises(Nondeterminism, match="did not reach the process"):
        profiles.rerun_under(parse_profile("threads=3"), ["show"])


def test_native_needs_no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(profiles.CHILD, "native")

    assert profiles.rerun_under(parse_profile("native"), ["show"]) is None
    assert profiles.rerun_under(parse_profile("jitter"), ["show"]) is None


def test_a_reader_that_goes_away_is_no_defect(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as pipe:
        child = subprocess.run(
            [sys.executable, "-m", "tallystick", "--help"],
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )

    assert child.returncode != 70
    assert "Traceback" not in child.stderr


def test_a_closed_pipe_is_no_verdict() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    said = subprocess.run(
        [sys.executable, "-m", "tallystick", "--help"], stdout=writer, stderr=subprocess.PIPE, check=False
    )
    os.close(writer)
    assert (said.returncode, b"Traceback" in said.stderr) == (141, False)


def test_sets_have_one_order_for_all_who_use_the_command(tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text("def build(settings):\n    raise ValueError(hash('vocabulary'))\n")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    command = [
        sys.executable,
        "-m",
        "tallystick",
        "record",
        job,
        "--policy",
        "fp32",
        "--run",
        tmp_path / "run",
    ]
    said = {
        subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stderr
        for _ in range(2)
    }
    assert len(said) == 1
    assert "ValueError: " in said.pop()


ENDING = """
import os, sys
import torch
from torch.nn import functional as F
from tallystick.execution.job import Job

def build(settings):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    def batch(step):
        drawn = torch.Generator().manual_seed(step)
        return torch.randint(-8, 8, (4, 4), generator=drawn) / 8, torch.tensor([0, 1, 0, 1])
    def loss(model, batch):
        if not os.path.exists({flag!r}):
            {ends}
        return F.cross_entropy(model(batch[0]), batch[1])
    return Job(model, torch.optim.SGD(model.parameters(), lr=0.1), batch, loss, steps=4)
"""


@pytest.mark.parametrize("ends", ["sys.exit(0)", "sys.exit(1)", "raise GeneratorExit"])
def test_a_job_that_ends_the_process_gives_no_verdict(tally, ends: str, tmp_path: Path) -> None:
    """0 would be a match, 1 an accusation."""
    job, run, flag = tmp_path / "job.py", tmp_path / "run", tmp_path / "flag"
    job.write_text(ENDING.format(flag=str(flag), ends=ends))
    flag.touch()
    assert tally("record", job, "--run", run, "--steps", "4", "--policy", "fp32").code == 0
    assert tally("audit", run, "--job", job).code == 0
    flag.unlink()

    answer = tally("audit", run, "--job", job, "--json")

    assert answer.code == 3, answer.err
    assert json.loads(answer.out)["verdict"] == "cannot_reproduce"


@pytest.mark.parametrize("where", ["its file", "build"])
@pytest.mark.parametrize(
    "does", ["sys.exit(0)", "raise GeneratorExit", "1 / 0", "raise Mismatch('two values')", "raise Mute"]
)
def test_a_job_that_cannot_be_built_is_said_to_be_one(tally, does: str, where: str, tmp_path: Path) -> None:
    """Code 1 would be an accusation, 70 an error of this program."""
    job, at = tmp_path / "job.py", "" if where == "its file" else "def build(settings):\n    "
    mute = "class Mute(Exception):\n    def __str__(self):\n        return 1 / 0\n"
    job.write_text(f"import sys\nfrom tallystick.errors import Mismatch\n{mute}\n{at}{does}  # build\n")

    answer = tally("record", job, "--run", tmp_path / "run", "--steps", "2", "--policy", "fp32", "--json")

    assert answer.code == 2, answer.err
    assert json.loads(answer.out)["kind"] == "JobFailed" and f"{where} raised" in answer.err


@pytest.mark.parametrize(("ends", "code"), [(SystemExit(0), 2), (SystemExit(1), 2), (GeneratorExit(), 70)])
def test_nothing_that_ends_a_command_on_its_way_gives_a_verdict(
    tally, ends: BaseException, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*given: object) -> object:
        raise ends

    monkeypatch.setattr(JobSource, "build", build)
    answer = tally(
        "record", "digits", "--run", tmp_path / "run", "--steps", "2", "--policy", "fp32", "--json"
    )

    assert answer.code == code, answer.err
    assert json.loads(answer.out)["kind"] == ("JobFailed" if code == 2 else "Defect")
