"""A run is gone on with by the order that began it, on the software that began it; what is refused is left as it is."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tallystick.errors import InvalidInput, OtherProgram, StoreError
from tallystick.execution.job import Job, JobSource
from tallystick.numerics.policy import find_policy
from tallystick.roles import trainer
from tallystick.roles.auditor import audit
from tallystick.roles.trainer import Order, record
from tallystick.run.documents import JobRecord, Notes, PolicyRecord, SiteRecord, Specification
from tallystick.store.files import RunDirectory


class Source(JobSource):
    """A small job with a cast that is lifted."""

    def build(self, settings: Any, seed: int = 0) -> Job:
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.arange(float(p.numel())).remainder(7).sub(3).div(8).reshape(p.shape))
        data = torch.arange(96.0).remainder(11).div(11).reshape(16, 6)
        return Job(
            model,
            torch.optim.SGD(model.parameters(), lr=0.01),
            lambda step: data * (step + 1),
            lambda net, x: net(x).float().square().mean(),
            steps=6,
        )


SOURCE = Source("job.py", b"")


def order(**changes: Any) -> Order:
    return replace(Order(SOURCE, {}, find_policy("fp64"), checkpoint_every=2), **changes)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "run"
    record(order(), RunDirectory(path))
    return path


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> RunDirectory:
    """The run as it was when it broke off after five steps."""
    shutil.copytree(whole, tmp_path / "run")
    run = RunDirectory(tmp_path / "run")
    run.statement_path.unlink()
    run.checkpoint_path(6).unlink()
    run.records_path.write_bytes(b"".join(run.records_path.read_bytes().splitlines(keepends=True)[:5]))
    return run


@pytest.fixture
def threads() -> Generator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def files_of(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


def said_by(resumed: Order, run: RunDirectory) -> list[str]:
    said: list[str] = []
    record(resumed, run, resume=True, said=said.append)
    return said


def test_an_interrupted_run_ends_as_the_whole_one_and_nothing_is_said(run: RunDirectory, whole: Path) -> None:
    assert said_by(order(), run) == []
    assert files_of(run.path) == files_of(whole)
    assert run.load_specification().notes.lifted_casts != ()


def test_other_threads_end_as_the_whole_one_and_are_said(
    run: RunDirectory, whole: Path, threads: None
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    assert said_by(order(), run) == [
        f"--resume: threads of the run is {before}, here it is {before + 1}; the specification keeps the former"
    ]
    assert files_of(run.path) == files_of(whole)


Edit = Callable[[Specification], Specification]
EDITS: dict[str, tuple[Edit, str]] = {
    "accumulation": (lambda s: replace(s, accumulation=2), "accumulation of the run is 2, this order has 1"),
    "world size": (lambda s: replace(s, world_size=2), "world size of the run is 2, this order has 1"),
    "seed": (lambda s: replace(s, seed=7), "seed of the run is 7, this order has 0"),
    "steps": (lambda s: replace(s, steps=8), "steps of the run is 8, this order has 6"),
    "interval": (lambda s: replace(s, checkpoint_every=3), "checkpoint interval of the run is 3, this order has 2"),
    "policy": (
        lambda s: replace(s, policy=PolicyRecord("fp64", {**s.policy.parameters, "safety": 1})), "policy of the run is",
    ),
    "path": (lambda s: with_job(s, path="other.py"), "job path of the run is other.py, this order has job.py"),
    "settings": (
        lambda s: with_job(s, settings={"a": "b"}), r"settings of the run is {'a': 'b'}, this order has {}",
    ),
    "dataset": (lambda s: with_job(s, dataset_digest="0" * 64), "dataset of the run is 0+, this order has None"),
    "torch": (
        lambda s: replace(s, versions={**s.versions, "torch": "9.9"}), "version of torch of the run is 9.9, this order has",
    ),
    "numpy": (
        lambda s: replace(s, versions={k: v for k, v in s.versions.items() if k != "numpy"}),
        "version of numpy of the run is not stated, this order has",
    ),
    "further": (
        lambda s: replace(s, versions={**s.versions, "extra": "1"}), "version of extra of the run is 1, this order has absent",
    ),
    "fewer sites": (
        lambda s: replace(s, sites=s.sites[:-1]), r"number of sites of the run is \d, this order has \d",
    ),
    "another site": (
        lambda s: replace(s, sites=(s.sites[0], SiteRecord("gradient", "zz", (1,), "F32"), *s.sites[2:])),
        r"site 1 of the run is gradient 'zz' F32\[1\], this order has gradient '0.weight' F32\[8, 6\]",
    ),
    "lifted": (
        lambda s: replace(s, notes=Notes()), r"list of lifted casts of the run is \[\], this order has \['aten::",
    ),
    "densified": (
        lambda s: replace(s, notes=replace(s.notes, densified=("w",))),
        r"list of densified gradients of the run is \['w'\], this order has \[\]",
    ),
    "first state": (lambda s: replace(s, initial_state="0" * 64), "the specification's initial_state says 00000000"),
}  # fmt: skip


def with_job(specification: Specification, **changes: Any) -> Specification:
    job: JobRecord = replace(specification.job, **changes)
    return replace(specification, job=job)


@pytest.mark.parametrize("name", EDITS)
def test_every_field_of_the_specification_must_be_the_orders(name: str, run: RunDirectory) -> None:
    edit, reason = EDITS[name]
    run.specification_path.write_bytes(edit(run.load_specification()).encode())
    before = files_of(run.path)
    with pytest.raises(InvalidInput, match=reason):
        record(order(), run, resume=True)
    assert files_of(run.path) == before


def test_a_distribution_that_the_specification_alone_states_is_another_program(run: RunDirectory) -> None:
    specification = run.load_specification()
    program = replace(specification.job.program, distributions={"numpy": "0.1"})
    run.specification_path.write_bytes(with_job(specification, program=program).encode())
    with pytest.raises(OtherProgram, match=r"distribution numpy is .*, stated is 0\.1"):
        record(order(), run, resume=True)


def test_a_finished_run_keeps_its_statement_when_another_order_is_refused(
    whole: Path, tmp_path: Path
) -> None:
    shutil.copytree(whole, tmp_path / "run")
    with pytest.raises(InvalidInput, match="seed of the run is 0, this order has 1"):
        record(order(seed=1), RunDirectory(tmp_path / "run"), resume=True)
    assert files_of(tmp_path / "run") == files_of(whole)


def test_damage_in_a_written_log_is_said_and_mended(run: RunDirectory, whole: Path) -> None:
    log = run.log_path(2)
    data = log.read_bytes()
    log.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    (said,) = said_by(order(), run)
    assert "logs/000002.tlog: the digest of step 3's frame is" in said
    assert "going on from the state after 2 steps; 3 recorded steps are computed again" in said
    assert files_of(run.path) == files_of(whole)
    assert audit(run, SOURCE).verdict == "match"


def test_a_run_that_is_being_written_is_not_resumed_by_a_second_recorder(
    run: RunDirectory,
) -> None:
    """While the first is between two steps; it goes on undisturbed."""
    refused: list[str] = []

    def second(progress: trainer.Progress) -> None:
        for resume in (True, False):
            with pytest.raises(StoreError) as caught:
                record(order(), RunDirectory(run.path), resume=resume)
            refused.append(str(caught.value))

    record(order(), run, resume=True, progress=second)
    assert len(refused) == 4
    assert all("another recorder is writing there" in text for text in refused)
    assert audit(run, SOURCE).verdict == "match"
