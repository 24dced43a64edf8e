from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

PARAMETERS = 8 * 16 + 16 + 16 * 4 + 4


def record(tally, job: Path, run: Path, *more: str | Path):
    return tally("record", job, "--run", run, "--policy", "fp32", "--checkpoint-every", "2", *more)


def test_a_recorded_run_is_summarised(
    tally, job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)  # a pipe's width
    answer = record(tally, job, tmp_path / "run")

    assert answer.code == 0
    assert answer.out.startswith("recorded 6 steps under policy fp32\n")
    for part in (
        str(tmp_path / "run"),
        "root",
        "final state",
        "bytes/step",
        "bits/parameter/step",
        "calibrate",
    ):
        assert part in answer.out


def test_json_holds_roots_sizes_and_times(tally, job: Path, tmp_path: Path) -> None:
    answer = record(tally, job, tmp_path / "run", "--json", "--set", "width=8", "--seed", "3")

    fields = json.loads(answer.out)
    assert (answer.code, fields["policy"], fields["steps"], fields["seed"]) == (0, "fp32", 6, 3)
    assert fields["parameters"] == 8 * 8 + 8 + 8 * 4 + 4
    assert fields["job"]["settings"] == {"width": "8"}
    assert len(fields["root"]) == len(fields["state_root"]) == 64
    assert fields["log_bits_per_parameter_step"] == pytest.approx(
        8 * fields["log_bytes"] / (fields["parameters"] * 6)
    )
    assert {"calibrate", "step", "commit", "store"} <= set(fields["seconds"])


def test_the_same_order_has_the_same_root_and_another_seed_has_not(
    tally, job: Path, recorded: Path, tmp_path: Path
) -> None:
    again = record(tally, job, tmp_path / "again", "--json")
    other = record(tally, job, tmp_path / "other", "--json", "--seed", "1")

    root = json.loads((recorded / "run.json").read_bytes())["root"]
    assert json.loads(again.out)["root"] == root
    assert json.loads(other.out)["root"] != root


def test_a_directory_that_holds_something_is_left_alone(tally, job: Path, tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")

    answer = record(tally, job, tmp_path)

    assert (answer.code, answer.out) == (2, "")
    assert "exists and is not empty" in answer.err
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--policy", "fp16"], "policy fp16: unknown; known are fp64, fp32"),
        (["--set", "width"], "--set width: must have the form name=value"),
        (["--set", "=8"], "--set =8: must have the form name=value"),
        (["--set", "width=8", "--set", "width=9"], "width is already set to '8'"),
        (["--profile", "sse9"], "unknown word 'sse9'"),
        (["--profile", "threads=0"], "threads must be a whole number from 1 to 1024"),
        (["--device", "tpu"], "device tpu: unknown; known are cpu, cuda"),
        (["--steps", "0"], "--steps"),
        (["--steps", "many"], "--steps"),
        (["--checkpoint-every", "0"], "--checkpoint-every"),
        (["--recalibrate-every", "0"], "--recalibrate-every"),
        (["--seed", "-1"], "--seed"),
        (["--colour", "red"], "--colour"),
        (["--resume"], "there is no run to resume"),
    ],
)
def test_a_wrong_argument_is_refused_with_its_reason(
    tally, job: Path, tmp_path: Path, arguments: list[str], reason: str
) -> None:
    answer = record(tally, job, tmp_path / "run", *arguments)

    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith("tally: ")
    assert answer.err.count("\n") == 1
    assert reason in answer.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("job_name", "reason"),
    [
        ("nowhere.py", "no such file"),
        ("no_such_module", "neither a shipped job"),
        ("tallystick.errors", "needs a function build"),
    ],
)
def test_a_job_that_is_none_is_refused_with_its_reason(
    tally, tmp_path: Path, job_name: str, reason: str
) -> None:
    answer = record(tally, Path(job_name), tmp_path / "run")

    assert answer.code == 2
    assert reason in answer.err


def test_a_dotted_path_is_looked_for_in_the_working_directory(
    tally, job: Path, recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "ordered_jobs"
    package.mkdir()
    (package / "tiny.py").write_bytes(job.read_bytes())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    answer = record(tally, Path("ordered_jobs.tiny"), tmp_path / "run", "--json")

    assert answer.code == 0
    fields = json.loads(answer.out)
    assert fields["job"]["path"] == "ordered_jobs.tiny"
    assert fields["state_root"] == json.loads((recorded / "run.json").read_bytes())["final_state"]


def test_policy_and_run_must_be_given(tally, job: Path, tmp_path: Path) -> None:
    assert "--policy" in tally("record", job, "--run", tmp_path / "run").err
    assert "--run" in tally("record", job, "--policy", "fp32").err


def test_a_device_that_is_not_there_is_named(tally, job: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has the device")

    answer = record(tally, job, tmp_path / "run", "--device", "cuda")

    assert answer.code == 2
    assert "torch sees no CUDA device" in answer.err


def test_an_interrupted_run_says_what_is_on_disk_and_resumes_to_the_same_root(
    tally, job: Path, recorded: Path, tmp_path: Path
) -> None:
    stop = job.with_name("stop")
    stop.touch()
    try:
        interrupted = record(tally, job, tmp_path / "run")
    finally:
        stop.unlink()

    assert interrupted.code == 130
    assert "holds 4 of 6 steps, the last committed state is after 4" in interrupted.err
    assert "--resume" in interrupted.err

    shown = json.loads(tally("show", tmp_path / "run", "--json").out)
    assert (shown["finished"], shown["steps"], shown["steps_ordered"], shown["root"]) == (False, 4, 6, None)

    resumed = record(tally, job, tmp_path / "run", "--resume")
    assert resumed.code == 0
    assert resumed.out.startswith("recorded 2 steps under policy fp32; the run has 6\n")
    assert (tmp_path / "run" / "run.json").read_bytes() == (recorded / "run.json").read_bytes()


def test_an_interrupt_passes_through_to_the_child_of_a_profile(tally, tmp_path: Path) -> None:
    job = tmp_path / "interrupting.py"
    job.write_text(
        "import os, signal, time, torch\n"
        "from tallystick.execution.job import Job\n"
        "def build(settings):\n"
        "    model = torch.nn.Linear(2, 1)\n"
        "    def batch(step):\n"
        "        if step == 4:\n"
        "            os.kill(os.getppid(), signal.SIGINT)\n"
        "            while True:\n"
        "                time.sleep(0.01)  # not signal.pause: a signal just before it would be waited for in vain\n"
        "        return torch.full((4, 2), step / 8)\n"
        "    return Job(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.125), steps=6,\n"
        "               batch=batch, loss=lambda model, batch: model(batch).square().mean())\n"
    )

    answer = record(tally, job, tmp_path / "run", "--profile", "threads=1")

    assert answer.code == 130
    assert "holds 4 of 6 steps" in answer.err
    assert "Traceback" not in answer.err


def test_another_order_does_not_resume_a_run(tally, job: Path, copied: Path) -> None:
    answer = record(tally, job, copied, "--resume", "--seed", "5")

    assert answer.code == 2
    assert "--resume: seed of the run is 0, this order has 5" in answer.err


def test_a_job_that_draws_at_random_outside_the_stream_cannot_be_reproduced(tally, tmp_path: Path) -> None:
    job = tmp_path / "impure.py"
    job.write_text(
        "import itertools, torch\n"
        "from tallystick.execution.job import Job\n"
        "def build(settings):\n"
        "    model, calls = torch.nn.Linear(2, 1), itertools.count()\n"
        "    return Job(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), steps=3,\n"
        "               batch=lambda step: torch.full((4, 2), float(next(calls))),\n"
        "               loss=lambda model, batch: model(batch).sum())\n"
    )

    answer = record(tally, job, tmp_path / "run", "--json")

    assert answer.code == 3
    assert json.loads(answer.out)["kind"] == "Nondeterminism"
    assert "it must depend on the step alone" in answer.err


def test_a_defect_in_the_job_is_no_verdict(tally, job: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("def build(settings):\n    return 1 / 0\n")

    answer = record(tally, broken, tmp_path / "run", "--json")

    assert answer.code == 2
    wanted = f"job {broken}: build raised ZeroDivisionError: division by zero (line 2 of broken.py)"
    assert json.loads(answer.out) == {"error": wanted, "kind": "JobFailed"}
    assert "Traceback" not in answer.err

    text = job.read_text() + "\n_whole = build\n\ndef build(settings):\n    made = _whole(settings)\n"
    broken.write_text(text + "    made.loss = lambda model, batch: 1 / 0\n    return made\n")
    answer = record(tally, broken, tmp_path / "other", "--json")

    assert answer.code == 2
    wanted = "job: step 0: loss raised ZeroDivisionError: division by zero"
    assert json.loads(answer.out) == {"error": wanted, "kind": "JobFailed"}
    assert "Traceback" not in answer.err

    rate = "    from torch.optim.lr_scheduler import LambdaLR\n"
    rate += (
        "    made.scheduler = LambdaLR(made.optimizer, lambda epoch: 1 // (epoch == 0))\n    return made\n"
    )
    broken.write_text(text + rate)
    answer = record(tally, broken, tmp_path / "third", "--json")
    assert answer.code == 2
    wanted = (
        "job: step 0: the optimizer or scheduler raised ZeroDivisionError: integer division or modulo by zero"
    )
    assert json.loads(answer.out) == {"error": wanted, "kind": "JobFailed"}
    assert "Traceback" not in answer.err
