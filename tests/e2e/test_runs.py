"""Runs recorded here and followed on other arithmetic reach the same bytes; killed runs go on to the same root."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tallystick.errors import InvalidInput, StoreError
from tallystick.execution.determinism import parse_profile
from tallystick.execution.job import JobSource
from tallystick.numerics.policy import find_policy
from tallystick.roles.auditor import audit
from tallystick.roles.trainer import Order, record
from tallystick.store.files import RunDirectory, frame_digest
from tallystick.testing.cheats import forge
from tallystick_bench.measure import control

JOB = """
import numpy as np, torch
from torch import nn
from torch.nn import functional as F
from tallystick.execution.job import Job

MAKE = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(17, 12)
        self.mix = nn.Linear(12, 24)
        self.norm = nn.BatchNorm1d(24)
        self.out = nn.Linear(24, 12, bias=False)
        self.frozen = nn.Parameter(torch.ones(12), requires_grad=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.seen += 1
        h = self.embed(x).mean(dim=1) * self.frozen
        h = F.dropout(F.relu(self.norm(self.mix(h))), 0.1, self.training)
        return self.out(h).clamp(-3.0, 3.0) @ self.embed.weight.T  # tied

def batch(step):
    rng = np.random.default_rng(step)
    return torch.from_numpy(rng.integers(0, 17, (16, 5))), torch.from_numpy(rng.integers(0, 17, 16))

def build(settings):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = Net()
    slow = [model.out.weight]
    fast = [p for n, p in model.named_parameters() if n not in ("out.weight", "frozen")]
    optimizer = MAKE[settings.get("optimizer", "adamw")]([{"params": fast}, {"params": slow, "lr": 0.02}])
    average = Net()
    average.load_state_dict(model.state_dict())
    def after_step(step):
        with torch.no_grad():
            for a, p in zip(average.parameters(), model.parameters()):
                a.lerp_(p.detach().to(a.dtype), 0.1)
    return Job(model=model, optimizer=optimizer, batch=batch, loss=lambda m, b: F.cross_entropy(m(b[0]), b[1]),
               steps=int(settings.get("steps", 36)), accumulation=2, clip_norm=1.0, extra={"average": average},
               after_step=after_step, scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 36))
"""
OPTIMIZERS = ("sgd", "nesterov", "adam", "adamw", "rmsprop", "adagrad", "adadelta", "nadam", "radam")


@pytest.fixture(scope="session")
def job_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("job") / "job.py"
    path.write_text(JOB)
    return path


def order(job_file: Path, policy: str = "fp32", **settings: str) -> Order:
    source = JobSource(str(job_file), job_file.read_bytes())
    return Order(source, settings, find_policy(policy), checkpoint_every=12)


def tally(*arguments: str, profile: str | None = None, **options: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if profile is not None:
        environment |= parse_profile(profile).environment()
    return subprocess.run(
        [sys.executable, "-m", "tallystick", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        **options,  # type: ignore[call-overload]
    )


@pytest.mark.parametrize("policy", ["fp32", "fp64"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_is_followed_bit_for_bit_under_jitter(
    optimizer: str, policy: str, job_file: Path, tmp_path: Path
) -> None:
    """Tied, frozen and unused parameters, two groups, accumulation, clipping, schedule, batch norm, an averaged copy."""
    run = RunDirectory(tmp_path / "run")
    wanted = order(job_file, policy, optimizer=optimizer)
    record(wanted, run)

    report = audit(run, wanted.source, jitter=True)

    assert report.verdict == "match", str(report.first)
    assert report.differing_elements == 0
    assert report.steps == 36


@pytest.mark.parametrize(
    ("trainer", "auditor", "policy"),
    [
        ("native", "sse4", "fp32"),
        ("native", "sse4", "fp64"),
        ("native", "sse4", "bf16"),
        *(
            pytest.param("sse4", "native", policy, marks=pytest.mark.slow)
            for policy in ("fp32", "fp64", "bf16")
        ),
    ],
)
def test_instruction_sets_reach_the_same_bytes_and_last_bits_without_the_log_do_not(
    policy: str, trainer: str, auditor: str, job_file: Path, tmp_path: Path
) -> None:
    run = str(tmp_path / "run")
    recorded = tally(
        "record", str(job_file), "--run", run, "--policy", policy, "--checkpoint-every", "12", profile=trainer
    )
    followed = tally("audit", run, "--job", str(job_file), "--json", profile=auditor)

    assert recorded.returncode == 0, recorded.stderr
    assert followed.returncode == 0, followed.stdout + followed.stderr
    report = json.loads(followed.stdout)
    assert (report["verdict"], report["differing_elements"], report["first_step"]) == ("match", 0, None)
    # Control: without sites and log last bits decide where training ends, on whatever processor this is.
    ends = [tmp_path / "plain", tmp_path / "jittered"]
    for jitter, end in enumerate(ends):
        control(run, str(end), bool(jitter), str(job_file))
    assert ends[0].read_bytes() != ends[1].read_bytes()


def test_a_killed_recording_goes_on_to_the_same_root(job_file: Path, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    arguments = ("record", str(job_file), "--policy", "fp32", "--checkpoint-every", "5", "--json")
    undisturbed = tally(*arguments, "--run", str(whole))
    assert undisturbed.returncode == 0, undisturbed.stderr
    chance = random.Random(7)
    for attempt in range(4):
        resume = ("--resume",) if attempt else ()
        process = subprocess.Popen(
            [sys.executable, "-m", "tallystick", *arguments, "--run", str(killed), *resume],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": str(1 + attempt % 2)},
        )
        records = killed / "steps.jsonl"
        target = attempt * 5 + chance.randrange(1, 6)
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            if records.exists() and records.read_bytes().count(b"\n") >= target:
                break
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()

    finished = tally(*arguments, "--run", str(killed), "--resume")

    assert finished.returncode == 0, finished.stderr
    assert (killed / "run.json").read_bytes() == (whole / "run.json").read_bytes()
    assert (killed / "steps.jsonl").read_bytes() == (whole / "steps.jsonl").read_bytes()


def test_a_full_disk_is_named_and_nothing_is_lost(job_file: Path, tmp_path: Path) -> None:
    """The limit on file size stands for a full disk: the write fails in the middle of a checkpoint."""
    run = tmp_path / "run"
    record(order(job_file, steps="12"), RunDirectory(tmp_path / "measure"))
    room = (tmp_path / "measure" / "checkpoints" / "000012.safetensors").stat().st_size

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (room - 100, room - 100))

    refused = tally(
        "record", str(job_file), "--run", str(run), "--policy", "fp32", "--checkpoint-every", "12", "--steps", "24",
        preexec_fn=limit,
    )  # fmt: skip
    resumed = tally(
        "record",
        str(job_file),
        "--run",
        str(run),
        "--policy",
        "fp32",
        "--checkpoint-every",
        "12",
        "--steps",
        "24",
        "--resume",
    )

    assert refused.returncode == 2
    assert "000012.safetensors: cannot be written" in refused.stderr
    assert "what was written before is intact" in refused.stderr
    assert resumed.returncode == 0, resumed.stderr


def test_an_existing_directory_is_left_alone(job_file: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep me")

    with pytest.raises(StoreError, match="exists and is not empty"):
        record(order(job_file), RunDirectory(tmp_path))
    with pytest.raises(InvalidInput, match=r"holds mine\.txt and no specification"):
        record(order(job_file), RunDirectory(tmp_path), resume=True)

    assert (tmp_path / "mine.txt").read_text() == "keep me"


def test_a_second_recorder_of_one_directory_is_refused(job_file: Path, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    with run.writing(), pytest.raises(StoreError, match="another recorder is writing there"):
        record(order(job_file), run)
    record(order(job_file), run)


def test_resuming_another_order_is_refused(job_file: Path, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    record(order(job_file, steps="12"), run)

    with pytest.raises(InvalidInput, match="settings of the run is"):
        record(order(job_file, steps="24"), run, resume=True)


@pytest.mark.parametrize(
    "edit", [lambda frame: frame + b"\0", lambda frame: frame[:-1]], ids=["extended", "cut"]
)
def test_a_log_that_was_edited_with_its_digest_is_never_a_match(
    edit: Callable[[bytes], bytes], job_file: Path, tmp_path: Path
) -> None:
    run = RunDirectory(tmp_path / "run")
    wanted = order(job_file, steps="12")
    record(wanted, run)
    transcript = run.load_transcript()
    frames = [run.load_frames(transcript, step, step + 1)[step] for step in range(12)]
    frames[4] = edit(frames[4])
    run.log_path(0).write_bytes(b"".join(frames))
    forge(run, lambda r: replace(r, log=frame_digest(frames[r.step]), log_bytes=len(frames[r.step])))

    report = audit(run, wanted.source)

    assert report.first is not None
    assert (report.verdict, report.first.step, report.first.subject) == ("log_violation", 4, "log")


@pytest.mark.slow
@pytest.mark.parametrize("job", ["digits", "text"])
@pytest.mark.parametrize("policy", ["fp32", "fp64"])
@pytest.mark.parametrize("profile", ["sse4,threads=1", "avx2", "jitter"])
def test_shipped_jobs_match_over_200_steps(job: str, policy: str, profile: str, tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    tally("record", job, "--run", run, "--policy", policy, "--steps", "200")

    followed = tally("audit", run, "--profile", profile, "--json")

    assert json.loads(followed.stdout)["verdict"] == "match", followed.stdout


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["sse4,threads=1", "avx2", "jitter"])
def test_batches_with_hardly_any_gradient_late_in_training_match(profile: str, tmp_path: Path) -> None:
    """The noise of a sure prediction does not shrink with its gradient; bands must not either."""
    run = str(tmp_path / "run")
    tally("record", "digits", "--run", run, "--policy", "fp32", "--steps", "300")

    followed = tally("audit", run, "--profile", profile, "--json")

    assert json.loads(followed.stdout)["verdict"] == "match", followed.stdout
