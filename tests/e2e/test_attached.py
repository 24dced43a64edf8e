"""A training script with two lines more, recorded and followed by tally and by its environment."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tallystick
from tallystick.cli.main import main
from tallystick.cli.run.programs import run_program
from tallystick.errors import InvalidInput
from tallystick.execution.dispatch.jitter import Jitter, JitterMode
from tallystick.execution.session.hooks import Hook
from tallystick.roles.attached import ProgramRun
from tallystick.store.files import RunDirectory

SPIRALS = Path(__file__).parent / "programs" / "spirals.py"
STEPS = 24


def tally(capfd: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any], str]:
    """The exit code, the answer in JSON, and what was said besides."""
    given = [str(argument) for argument in arguments]
    at = given.index("--") if "--" in given else len(given)
    code = main([*given[:at], "--json", *given[at:]])
    out, err = capfd.readouterr()
    return code, json.loads(out), err


@pytest.fixture
def recorded(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Path:
    path = tmp_path / "run"
    assert tally(capfd, "record", "--policy", "fp32", "--run", path, "--", "python", SPIRALS)[0] == 0
    return path


@pytest.mark.parametrize(
    ("policy", "parts"),
    [
        ("fp32", 1), ("fp64", 2), ("bf16", 1),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("fp32", 2), ("fp64", 1), ("bf16", 2))),
    ],
)  # fmt: skip
def test_a_recorded_script_is_followed_to_the_same_bytes(
    policy: str, parts: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program = ("--", "python", SPIRALS, "--parts", parts)
    code, run, said = tally(capfd, "record", "--policy", policy, "--run", tmp_path / "run", *program)
    assert (code, run["steps"]) == (0, STEPS)
    assert "right" in said  # what the script prints goes where the answer is not

    code, report, _ = tally(capfd, "audit", tmp_path / "run", *program)
    assert (code, report["verdict"], report["steps"]) == (0, "match", STEPS)
    assert report["freedom"]["moved"] == 0
    code, noisy, _ = tally(capfd, "audit", tmp_path / "run", "--profile", "jitter", *program)
    assert (code, noisy["verdict"]) == (0, "match"), noisy


def weights_of(capfd: pytest.CaptureFixture[str], *, noisy: bool) -> list[torch.Tensor]:
    """What the script comes to where it is left alone, with or without last-bit noise in its operators."""
    with JitterMode(Jitter(20241)) if noisy else nullcontext():
        attached = run_program(["python", str(SPIRALS)], ProgramRun())
    capfd.readouterr()
    return [parameter.detach().clone() for parameter in attached._model.parameters()]


def test_without_a_log_last_bits_make_other_weights_of_the_same_script(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The control: so the bytes above are the same because the log is followed."""
    own, again, noisy = (weights_of(capfd, noisy=noisy) for noisy in (False, False, True))
    assert all(map(torch.equal, own, again))
    assert not any(map(torch.equal, own, noisy))


def test_a_step_commits_to_its_data_once_whatever_reads_it_first(recorded: Path) -> None:
    transcript = RunDirectory(recorded).load_transcript()
    batches = [transcript.record(step).batch for step in range(STEPS)]
    assert len(set(batches)) == STEPS
    assert transcript.specification.steps == STEPS
    assert [transcript.record(step).state_root is not None for step in (19, 22, 23)] == [True, False, True]


@pytest.mark.parametrize(
    ("arguments", "here"),
    [
        (("--lr", "0.02"), "settings {'arguments': '--lr 0.02'}"),
        pytest.param(("--epochs", "3"), "settings {'arguments': '--epochs 3'}", marks=pytest.mark.slow),
        pytest.param(("--epochs", "1"), "settings {'arguments': '--epochs 1'}", marks=pytest.mark.slow),
    ],
)
def test_a_script_with_other_arguments_accuses_nobody(
    recorded: Path, capfd: pytest.CaptureFixture[str], arguments: tuple[str, ...], here: str
) -> None:
    code, report, _ = tally(capfd, "audit", recorded, "--", "python", SPIRALS, *arguments)
    assert (code, report["verdict"]) == (3, "cannot_reproduce")
    assert report["first"]["own"] == here


@pytest.mark.parametrize(
    ("steps", "own", "stated"),
    [(1, "more steps than 24", "24 steps"), pytest.param(2, "24 steps", "48 steps", marks=pytest.mark.slow)],
)
def test_a_run_of_other_length_is_no_match_and_no_accusation(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], steps: int, own: str, stated: str
) -> None:
    """Even where the arguments are the same: the number of steps may come from the environment, or a file."""
    program = tmp_path / "program.py"
    text = SPIRALS.read_text().replace("default=2", 'default=int(__import__("os").environ["EPOCHS"])')
    program.write_text(text.replace("12 * given.epochs", "24"))
    environment = pytest.MonkeyPatch()
    try:
        environment.setenv("EPOCHS", "2" if steps == 1 else "4")
        tally(capfd, "record", "--policy", "fp32", "--run", tmp_path / "run", "--", "python", program)
        environment.setenv("EPOCHS", "4" if steps == 1 else "2")
        code, report, _ = tally(capfd, "audit", tmp_path / "run", "--", "python", program)
    finally:
        environment.undo()
    assert (code, report["verdict"]) == (3, "cannot_reproduce"), report
    assert (report["first"]["own"], report["first"]["stated"]) == (own, stated)


def test_a_script_that_ends_within_a_step_ends_its_run_before_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A last pass in training mode, which changes statistics, is none of the last step's."""
    program = ("--", "python", SPIRALS, "--leaves")
    code, run, _ = tally(capfd, "record", "--policy", "fp32", "--run", tmp_path / "run", *program)
    assert (code, run["steps"]) == (0, STEPS)
    code, report, _ = tally(capfd, "audit", tmp_path / "run", *program)
    assert (code, report["verdict"], report["steps"]) == (0, "match", STEPS), report


@pytest.mark.parametrize("is_lazy", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_weights_that_a_script_sets_after_it_attached_are_its_first_state(
    is_lazy: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A trainer that leaves them out has begun with others, and the report says so."""
    line, lazy = "run = tallystick.attach(model, optimizer, scheduler)\n", tmp_path / "lazy"
    own = f"if not __import__('os').path.exists({str(lazy)!r}):\n    model[0].weight.data.fill_(0.1)\n"
    program = tmp_path / "program.py"
    program.write_text(SPIRALS.read_text().replace(line, line + own))
    if is_lazy:
        lazy.touch()
    tally(capfd, "record", "--policy", "fp32", "--run", tmp_path / "run", "--", "python", program)
    lazy.unlink(missing_ok=True)
    code, report, _ = tally(capfd, "audit", tmp_path / "run", "--", "python", program)
    assert (code, report["verdict"]) == (0, "match")
    assert report["beginning"]["others"] == (["model/0.weight"] if is_lazy else [])


def test_data_are_committed_as_a_step_first_reads_them(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A loader that uses one buffer for all of its batches, and clears it within the step, commits to no other data."""
    batches = list[list[str]]()
    for name, changes in {
        "own": {},
        "reused": {
            "for x, y in loader:\n": "for fresh, y in loader:\n        x = buffer.copy_(fresh)\n",
            "        optimizer.step()\n": "        buffer.zero_()\n        optimizer.step()\n",
            "total, before =": "buffer = torch.zeros(16, 10)\ntotal, before =",
        },
    }.items():
        text = SPIRALS.read_text()
        for old, new in changes.items():
            assert old in text
            text = text.replace(old, new)
        program = tmp_path / f"{name}.py"
        program.write_text(text)
        tally(capfd, "record", "--policy", "fp32", "--run", tmp_path / name, "--", "python", program)
        transcript = RunDirectory(tmp_path / name).load_transcript()
        batches.append([transcript.record(step).batch for step in range(STEPS)])
    assert batches[0] == batches[1]


def test_what_a_step_computed_is_no_data_by_way_of_a_generator(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "program.py"
    drawn = "torch.bernoulli(model(part).softmax(1)[:, 0].detach(), generator=draw).mean()"
    text = SPIRALS.read_text().replace("loss.backward()", f"(loss * (1.0 + {drawn})).backward()")
    program.write_text(text)
    code, answer, _ = tally(
        capfd, "record", "--policy", "fp32", "--run", tmp_path / "run", "--", "python", program
    )
    assert code == 3
    assert "draws by a generator of its own from what the step computed" in answer["error"]


def test_what_an_earlier_step_has_computed_is_refused_by_name(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program = ("--", "python", SPIRALS, "--keeps")
    code, answer, _ = tally(capfd, "record", "--policy", "fp32", "--run", tmp_path / "run", *program)
    assert code == 3
    assert re.search(r"step 1: uses a tensor of shape \[\] that an earlier step computed", answer["error"])


def test_a_script_is_recorded_and_followed_by_its_environment_alone(recorded: Path, tmp_path: Path) -> None:
    """The same bytes as under tally, whose process it is not; and left alone where nothing is asked for.

    All but the hash seed, which tally fixes and states.
    """

    def run(**asked: str) -> str:
        ended = subprocess.run(
            [sys.executable, str(SPIRALS)],
            env={**os.environ, **asked},
            capture_output=True,
            text=True,
            check=True,
        )
        return ended.stderr

    said = run(TALLYSTICK_RECORD=str(tmp_path / "own"))
    ours, theirs = (RunDirectory(path).load_transcript() for path in (tmp_path / "own", recorded))
    assert f"recorded {STEPS} steps, root {ours.root().hex()}" in said
    assert ours.records == theirs.records
    assert ours.specification.job.program.environment == {}
    assert [*theirs.specification.job.program.environment] == ["PYTHONHASHSEED"]
    assert f"match: {STEPS} steps followed" in run(TALLYSTICK_FOLLOW=str(recorded))
    assert "tallystick" not in run()


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("ls", "-l"), "is no job and no Python program"),
        (("python", "-c", "pass"), "needs a FILE or -m MODULE"),
        (("python", "nowhere.py"), "there is no such program"),
        (("python", "empty.py"), "ended without tallystick.attach"),
        (("python", "raises.py"), "raised ValueError: of its own"),
        (("python", "exits.py"), "ended with exit code 3"),
    ],
)
def test_what_is_no_training_script_is_refused_in_words(
    command: tuple[str, ...],
    words: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.py").write_text("")
    Path("raises.py").write_text("raise ValueError('of its own')\n")
    Path("exits.py").write_text("raise SystemExit(3)\n")
    code, answer, _ = tally(capfd, "record", "--policy", "fp32", "--run", "run", "--", *command)
    assert code == 2
    assert words in answer["error"]
    assert not Path("run").exists()


@pytest.mark.parametrize(
    "option", [("--steps", "4"), ("--set", "a=b"), ("--chip", "c"), ("--device", "cuda")]
)
def test_options_of_jobs_are_refused_with_a_script(
    option: tuple[str, ...], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, answer, _ = tally(
        capfd, "record", "--policy", "fp32", "--run", tmp_path, *option, "--", "python", SPIRALS
    )
    assert code == 2
    assert f"{option[0]}: is for jobs" in answer["error"]


ODD = Path(__file__).parent / "programs" / "odd.py"


@pytest.mark.parametrize(
    ("kind", "steps"),
    [
        ("recurrent", 12),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ("averages", 12), ("sparse", 6), ("experts", 12),
                ("recomputed", 12), ("penalty", 12), ("skips", 9), ("closure", 12), ("prefetches", 24), ("warms_up", 12),
            )
        ),
    ],
)  # fmt: skip
def test_what_people_do_in_a_loop_is_recorded_and_followed_under_other_arithmetic(
    kind: str, steps: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program = ("--", "python", ODD, kind)
    code, run, _ = tally(capfd, "record", "--policy", "fp32", "--run", tmp_path / "run", *program)
    assert (code, run.get("steps")) == (0, steps), run
    code, report, _ = tally(capfd, "audit", tmp_path / "run", "--profile", "jitter", *program)
    assert (code, report["verdict"], report["steps"]) == (0, "match", steps), report["first"]


def test_a_step_without_a_pass_in_training_mode_is_refused_with_the_remedy(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "program.py"
    program.write_text(SPIRALS.read_text().replace("model.train()", "model.eval()"))
    code, answer, _ = tally(
        capfd, "record", "--policy", "fp32", "--run", tmp_path / "run", "--", "python", program
    )
    assert code == 2
    assert "model.train(), or begin the step by run.open_step()" in answer["error"]


GRADIENTS = """
import sys
import torch
from torch import nn
import tallystick

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
optimizer = getattr(torch.optim, sys.argv[1])(model.parameters(), lr=0.125)
tallystick.attach(model, optimizer)
how, seen = sys.argv[2], []
for step in range(6):
    x = torch.arange(32.0).reshape(4, 8).remainder(7 + step) / 8

    def passes():
        if how == "closure":
            optimizer.zero_grad()
        loss = model(x).square().mean()
        if how in ("between", "zeros"):
            optimizer.zero_grad(set_to_none=how == "between")
        loss.backward()
        return loss

    if how == "closure":
        loss = optimizer.step(passes)
    else:
        loss = passes()
        optimizer.step()
    seen.append([float(loss.detach()), *(float(p.grad.norm()) for p in model.parameters())])
    assert all(p.grad.dtype == p.dtype for p in model.parameters())
torch.save(seen, sys.argv[3])
"""


@pytest.mark.parametrize(
    "how", ["closure", "never", *(pytest.param(how, marks=pytest.mark.slow) for how in ("between", "zeros"))]
)
@pytest.mark.parametrize(  # one that is portable, one that is torch's own
    "optimizer", ["SGD", pytest.param("Adagrad", marks=pytest.mark.slow)]
)
def test_gradients_stay_after_a_step_and_must_be_gone_before_the_next(
    how: str, optimizer: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Before, they were gone after a step, so a script that never clears them trained otherwise than it does alone."""
    script, run, seen = (
        tmp_path / "train.py",
        tmp_path / "run",
        [tmp_path / "own.pt", tmp_path / "recorded.pt"],
    )
    script.write_text(GRADIENTS)
    command = ("--", "python", script, optimizer, how)
    run_program(["python", str(script), optimizer, how, str(seen[0])], ProgramRun())
    capfd.readouterr()
    code, said, _ = tally(capfd, "record", "--policy", "fp32", "--run", run, *command, seen[1])
    if how == "never":
        assert code == 3 and "has a gradient from before the step" in said["error"]
        return
    assert code == 0
    own, recorded = (torch.tensor(torch.load(path)) for path in seen)
    assert torch.allclose(own, recorded, rtol=1e-3, atol=1e-5)
    code, report, _ = tally(capfd, "audit", run, "--profile", "jitter", *command, seen[1])
    assert (code, report["verdict"]) == (0, "match")


DONE = [
    "copy.deepcopy(model)", "torch.save(model, io.BytesIO())", "copy.deepcopy(optimizer)", "os.chdir('/')",
    "torch.optim.swa_utils.AveragedModel(model)", "warnings.simplefilter('ignore'); torch.jit.trace(model, inputs[:2])",
]  # fmt: skip


def test_what_is_done_with_a_model_between_steps_is_no_part_of_its_run(
    recorded: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A copy has none of the hooks that stand on a model, and a run stays where it was begun."""
    program = tmp_path / "program.py"
    lines = "".join(f"    {line}\n" for line in ["model.eval()", *DONE])
    text = SPIRALS.read_text().replace("    model.eval()\n", lines)
    program.write_text(text.replace("import argparse\n", "import argparse, copy, io, os, warnings\n"))
    monkeypatch.chdir(tmp_path)
    code, run, _ = tally(capfd, "record", "--policy", "fp32", "--run", "own", "--", "python", "program.py")
    assert (code, run.get("steps"), Path.cwd()) == (0, STEPS, tmp_path), run
    own, other = (RunDirectory(path).load_transcript() for path in (tmp_path / "own", recorded))
    assert [own.record(step) for step in range(STEPS)] == [other.record(step) for step in range(STEPS)]
    assert tally(capfd, "audit", "own", "--", "python", "program.py")[1]["verdict"] == "match"


EVERYDAY = """
import copy, random
import numpy as np
import torch
from torch import nn
from torch import nn
import tallystick

torch.manual_seed(0), np.random.seed(0), random.seed(0)
model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
compiled, best = torch.compile(model), None
run = tallystick.attach(compiled, optimizer)
for step in range(6):
    for part in range(2):
        x = torch.from_numpy(np.random.randint(-8, 8, (8, 6)).astype("f4") / 8)
        y = torch.tensor([random.randrange(3) for _ in range(8)])
        loss = nn.functional.cross_entropy(compiled(x), y)
        loss.backward()
        if part == 0:
            seen = copy.deepcopy((loss.detach(), model, model.state_dict()))
    optimizer.step()
    optimizer.zero_grad()
    if step == 3:
        best = copy.deepcopy(model.state_dict())
model.load_state_dict(best)
model.load_state_dict(best, assign=True)
assert torch.equal(model[0].weight, best["0.weight"])
"""


def test_compiled_copied_drawn_by_numpy_and_the_best_weights_at_the_end(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each of these ended a recording: early stopping after all of it, with the best weights not the last ones."""
    program = tmp_path / "program.py"
    program.write_text(EVERYDAY)
    code, run, _ = tally(
        capfd, "record", "--policy", "fp32", "--run", tmp_path / "run", "--", "python", program
    )
    assert (code, run.get("steps")) == (0, 6), run
    under = ("--profile", "sse4,threads=1")
    code, report, _ = tally(capfd, "audit", tmp_path / "run", *under, "--", "python", program)
    assert (code, report["verdict"]) == (0, "match"), report


@pytest.mark.parametrize(
    ("model", "optimizer", "named"),
    [
        (nn.Linear(2, 2), [], "optimizer: an empty list was given; give at least one torch.optim.Optimizer"),
        (
            nn.Linear(2, 2),
            "adam",
            "optimizer is a str; give a torch.optim.Optimizer, or a list of them",
        ),
        (
            [],
            torch.optim.SGD(nn.Linear(2, 2).parameters()),
            "attach: model is a list; a run has one torch.nn.Module",
        ),
    ],
)
def test_what_is_no_model_or_optimizer_is_named(model: Any, optimizer: Any, named: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(named)):
        tallystick.attach(model, optimizer)


def test_a_copied_models_hooks_call_nothing() -> None:
    hook = Hook(lambda: 7)
    again = copy.copy(hook)
    assert (hook(), again(1, x=2), copy.deepcopy(hook)()) == (7, None, None)
