"""A job small enough to be recorded in every test session, its run, and the command line as a function."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tallystick.cli.main import main

JOB = """
import pathlib
import torch
from torch.nn.functional import cross_entropy
from tallystick.execution.job import Job

STOP = pathlib.Path(__file__).with_name("stop")


def build(settings):
    width = int(settings.get("width", "16"))
    generator = torch.Generator().manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.ReLU(), torch.nn.Linear(width, 4))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-64, 64, parameter.shape, generator=generator) / 128)

    def batch(step):
        if step == 4 and STOP.exists():
            raise KeyboardInterrupt
        drawn = torch.Generator().manual_seed(step)
        x = torch.randint(-64, 64, (16, 8), generator=drawn) / 64
        return x, torch.randint(0, 4, (16,), generator=drawn)

    return Job(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5),
        batch=batch,
        loss=lambda model, batch: cross_entropy(model(batch[0]), batch[1]),
        steps=6,
    )
"""
STEPS, EVERY = 6, 2
REPEATING = ("audit", "dispute", "diff")
PARAMETERS = 8 * 16 + 16 + 16 * 4 + 4


@dataclass(frozen=True)
class Answer:
    """What one call of the command line left behind."""

    code: int
    out: str
    err: str


Tally = Callable[..., Answer]


@pytest.fixture
def tally(capfd: pytest.CaptureFixture[str], job: Path) -> Tally:
    """The command line as a function of its arguments; children's output is caught too.

    What repeats a run is told to run the fixtures' job, unless ``unasked`` or another one is named.
    """

    def call(*arguments: str | Path, unasked: bool = False) -> Answer:
        capfd.readouterr()
        given = [str(argument) for argument in arguments]
        repeats = given[0] in REPEATING and given[1:] and Path(given[1]).is_dir() and "--job" not in given
        code = main([*given, "--job", str(job)] if repeats and not unasked else given)
        caught = capfd.readouterr()
        return Answer(code, caught.out, caught.err)

    return call


@pytest.fixture(scope="session")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The job's file."""
    path = tmp_path_factory.mktemp("job") / "tiny.py"
    path.write_text(JOB)
    return path


@pytest.fixture(scope="session")
def recorded(job: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An honest run of the job; to be read, not changed."""
    path = tmp_path_factory.mktemp("run") / "honest"
    arguments = ["record", job, "--run", path, "--policy", "fp32", "--checkpoint-every", EVERY, "--json"]
    assert main([str(argument) for argument in arguments]) == 0
    return path


@pytest.fixture(scope="session")
def edited(job: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose final weights were changed and committed to; to be read, not changed."""
    from tallystick.testing import cheats

    path = tmp_path_factory.mktemp("run") / "edited"
    arguments = [
        "edited_weights", "--run", path, "--job", job, "--steps", STEPS, "--checkpoint-every", EVERY,
    ]  # fmt: skip
    assert cheats.main([str(argument) for argument in arguments]) == 0
    return path


@pytest.fixture
def copied(recorded: Path, tmp_path: Path) -> Path:
    """A copy of the honest run, to be changed."""
    return Path(shutil.copytree(recorded, tmp_path / "copied"))
