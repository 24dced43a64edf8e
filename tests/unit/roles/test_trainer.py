"""Committing a state while the next step computes: the same bytes, and nothing unnoticed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tallystick.errors import EditedOutside, InvalidInput, Nondeterminism, StoreError
from tallystick.execution.job import Job, JobSource
from tallystick.numerics.policy import find_policy
from tallystick.roles import run_writer
from tallystick.roles.auditor import audit
from tallystick.roles.trainer import Order, record
from tallystick.store.files import RunDirectory

BOTH = pytest.mark.parametrize("policy", ["fp64", "fp32"])


class Source(JobSource):
    """A small job with batch norm; ``during`` is called in every forward pass."""

    during: Callable[[nn.Module], None] = staticmethod(lambda model: None)

    def build(self, settings: Any, seed: int = 0) -> Job:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
        data = torch.randn(16, 6, generator=torch.Generator().manual_seed(2))

        def loss(net: nn.Module, x: Tensor) -> Tensor:
            self.during(net)
            return net(x).square().mean()

        return Job(
            model,
            torch.optim.AdamW(model.parameters(), lr=0.01),
            lambda step: data * (step + 1),
            loss,
            steps=6,
        )


def recorded(into: Path, policy: str, during: Callable[[nn.Module], None] | None = None) -> dict[str, bytes]:
    """The files of a run with a checkpoint every second step."""
    source = Source("job.py", b"")
    if during is not None:
        object.__setattr__(source, "during", during)
    directory = RunDirectory(into)
    record(Order(source, {}, find_policy(policy), checkpoint_every=2), directory)
    assert audit(directory, source).verdict == "match"
    return {str(p.relative_to(into)): p.read_bytes() for p in sorted(into.rglob("*")) if p.is_file()}


@BOTH
def test_overlapping_writes_the_same_bytes_as_writing_at_once(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[str] = set()
    own = RunDirectory.write_checkpoint

    def noting(self: RunDirectory, steps_done: int, *args: Any, **more: Any) -> None:
        if steps_done:
            threads.add(threading.current_thread().name.rstrip("_0123456789"))
        own(self, steps_done, *args, **more)

    monkeypatch.setattr(RunDirectory, "write_checkpoint", noting)
    beside = recorded(tmp_path / "beside", policy)
    assert threads == {"tally-commit"}
    threads.clear()
    monkeypatch.setattr(run_writer, "APART", 0)
    assert recorded(tmp_path / "at-once", policy) == beside
    assert threads == {"MainThread"}


@pytest.mark.parametrize("policy", ["fp32", pytest.param("fp64", marks=pytest.mark.slow)])
def test_weights_that_a_forward_pass_changes_for_a_while_stay_out_of_the_commitment(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writing is held up until the weights are changed: it notices, and writes the state once they are back."""
    plain = recorded(tmp_path / "plain", policy)
    changed, back = threading.Event(), threading.Event()
    own, own_try, tries = RunDirectory.write_checkpoint, run_writer._Commitment.try_to_write, list[bool]()  # pyright: ignore[reportPrivateUsage]

    def held_up(self: RunDirectory, *args: Any, **more: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            changed.wait(1.0)
        own(self, *args, **more)
        back.set()

    def noting(self: Any, entries: Any) -> bool:
        tries.append(own_try(self, entries))
        return tries[-1]

    def disturb(model: nn.Module) -> None:
        weight = model[0].weight.data.numpy()  # type: ignore[index]  # unseen by capture and jitter
        kept = weight.copy()
        weight += 1.0
        changed.set()
        back.wait(0.5)
        weight[:] = kept
        changed.clear()
        back.clear()

    if policy == "fp32":  # under fp64 what is committed is a copy anyway
        monkeypatch.setattr(RunDirectory, "write_checkpoint", held_up)
        monkeypatch.setattr(run_writer._Commitment, "try_to_write", noting)  # pyright: ignore[reportPrivateUsage]
    disturbed = recorded(tmp_path / "disturbed", policy, disturb)
    assert disturbed == plain
    assert policy == "fp64" or False in tries


def test_a_state_that_is_not_the_steps_own_is_never_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = RunDirectory.write_checkpoint

    def other(self: RunDirectory, steps_done: int, entries: Any, **more: Any) -> None:
        for entry in entries if steps_done == 4 else ():
            if entry.name == "model/0.bias":
                entries[entries.index(entry)] = type(entry)(entry.name, entry.dtype, entry.shape, bytes(32))
        own(self, steps_done, entries, **more)

    monkeypatch.setattr(RunDirectory, "write_checkpoint", other)
    with pytest.raises(Nondeterminism, match="step 3: the state was changed after the step"):
        recorded(tmp_path / "run", "fp32")
    monkeypatch.undo()
    run, order = (
        RunDirectory(tmp_path / "run"),
        Order(Source("job.py", b""), {}, find_policy("fp32"), checkpoint_every=2),
    )
    assert run.load_transcript().num_steps == 2, "it ended there, and can be gone on with"
    with pytest.raises(InvalidInput, match="steps of the run is 2, this order has 1"):
        record(replace(order, steps=1), run, resume=True)
    record(order, run, resume=True)
    recorded(tmp_path / "whole", "fp32")
    assert run.load_transcript() == RunDirectory(tmp_path / "whole").load_transcript()


def test_a_disk_that_refuses_ends_the_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = RunDirectory.write_checkpoint

    def full(self: RunDirectory, steps_done: int, *args: Any, **more: Any) -> None:
        if steps_done == 4:
            time.sleep(0.05)
            raise StoreError("checkpoint: the disk is full; what was written before is intact")
        own(self, steps_done, *args, **more)

    monkeypatch.setattr(RunDirectory, "write_checkpoint", full)
    with pytest.raises(StoreError, match="the disk is full"):
        recorded(tmp_path / "run", "fp32")
    monkeypatch.undo()
    assert RunDirectory(tmp_path / "run").load_partial().num_steps == 3

    order = Order(Source("job.py", b""), {}, find_policy("fp32"), checkpoint_every=2)
    record(order, RunDirectory(tmp_path / "run"), resume=True)
    whole = recorded(tmp_path / "whole", "fp32")
    assert (tmp_path / "run" / "run.json").read_bytes() == whole["run.json"]


class Setting(Source):
    """The same, where a function of the job's does what only a scheduler, or nobody, may."""

    def build(self, settings: Any, seed: int = 0) -> Job:
        job = super().build(settings, seed)
        own, group = job.batch, job.optimizer.param_groups[0]

        def batch(step: int) -> Tensor:
            group["lr"] = 0.01 * (step + 1) / 4
            return own(step)

        def loss(net: nn.Module, x: Tensor) -> Tensor:
            found = net(x).square().mean()
            group["betas"] = (0.5, 1 - 0.001 * float(found.detach()))
            return found

        if self.path == "batch.py":
            job.batch = batch
        if self.path == "loss.py":
            job.loss = loss
        if self.path == "eval.py":
            job.after_step = lambda step: job.model[1].eval() and None if step == 2 else None
        return job


@pytest.mark.parametrize(("where", "name"), [("batch", "lr of group 0"), ("loss", "betas of group 0")])
def test_a_job_that_sets_its_own_optimizer_before_the_first_step_is_refused(
    where: str, name: str, tmp_path: Path
) -> None:
    """The first state would not be the one that the job builds, and its honest trainer would be accused."""
    order = Order(Setting(f"{where}.py", b""), {}, find_policy("fp32"))
    with pytest.raises(Nondeterminism, match=f"{name} was .* the job's batch or loss sets it"):
        record(order, RunDirectory(tmp_path / "run"))


def test_a_module_that_is_left_in_another_mode_is_refused(tmp_path: Path) -> None:
    """No checkpoint holds the mode: who begins at one would compute otherwise."""
    order = Order(Setting("eval.py", b""), {}, find_policy("fp32"))
    with pytest.raises(EditedOutside, match="step 2: after the step model/1 is no longer in train mode"):
        record(order, RunDirectory(tmp_path / "run"))


@pytest.mark.parametrize(("at", "left"), [(0, 0), (1, 0), (4, 4), (5, 4)])
def test_a_recording_that_must_stop_names_its_data_and_leaves_a_run_up_to_its_last_state(
    at: int, left: int, tmp_path: Path
) -> None:
    class Missing(Source):
        """Its data have a number missing in one step."""

        def build(self, settings: Any, seed: int = 0) -> Job:
            job = super().build(settings, seed)
            whole = job.batch
            job.batch = lambda step: whole(step) * torch.nan if step == at else whole(step)
            return job

    order = Order(Missing("job.py", b""), {}, find_policy("fp32"), checkpoint_every=2)

    run = RunDirectory(tmp_path / "run")
    with pytest.raises(Nondeterminism, match="the step's batch holds numbers that are not finite") as raised:
        record(order, run)

    said = str(raised.value)
    assert (f"the run ends after {left} steps, at its last committed state" in said) == (left > 0)
    assert (f"the {at} steps before it can be recorded: --steps {at}" in said) == (at > 0 == left)
    if left:
        record(replace(order, steps=left), RunDirectory(tmp_path / "shorter"))
        assert run.load_transcript() == RunDirectory(tmp_path / "shorter").load_transcript()
        assert audit(run, order.source).verdict == "match"
    else:
        assert not run.statement_path.exists()
