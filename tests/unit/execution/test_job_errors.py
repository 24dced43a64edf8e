"""What a job's own code raises within a step is said to be the job's, with the step, the cause and a remedy."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tallystick.errors import InvalidInput, JobFailed, Mismatch, OtherProgram, StepFailed
from tallystick.execution.job import Job
from tallystick.execution.step import under_log
from tallystick.numerics.policy import FP32


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.arange(8.0).reshape(4, 2) / 7.0
    return numbers + step, torch.tensor([0, 1, 1, 0])


def job_of(model: nn.Module, **more: Any) -> Job:
    loss = more.pop("loss", lambda m, b: F.cross_entropy(m(b[0]), b[1]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Job(model=model, optimizer=optimizer, batch=data, loss=loss, steps=2, **more)


def test_a_lazy_layer_is_refused_by_name_until_it_has_a_shape(open_job: Any) -> None:
    model = nn.Sequential(nn.LazyLinear(2))
    with pytest.raises(
        InvalidInput, match=r"model/0.weight has no shape yet .*let build call the model once"
    ):
        open_job(job_of(model), FP32)
    model(data(0)[0])
    open_job(job_of(model), FP32)


@pytest.mark.parametrize("extra", [False, True])
def test_a_teacher_that_no_policy_converts_is_said_to_be_one(extra: bool, record_run: Any) -> None:
    def make() -> Job:
        torch.manual_seed(0)
        model = nn.Linear(2, 2)
        teacher = copy.deepcopy(model).requires_grad_(False)

        def after(step: int) -> None:
            with torch.no_grad():
                for mine, other in zip(teacher.parameters(), model.parameters(), strict=True):
                    mine.lerp_(other, 0.1)

        return job_of(model, after_step=after, **({"extra": {"teacher": teacher}} if extra else {}))

    if extra:  # the remedy of the message
        record_run(make, "fp32", 2)
        return
    with pytest.raises(
        JobFailed,
        match=r"after_step\(0\) raised RuntimeError: .*dtype.* in torch.float64 .*one of Job's extra",
    ):
        record_run(make, "fp32", 2)


def test_a_loss_or_a_hook_that_raises_is_named_with_its_step(record_run: Any) -> None:
    def spoiled(model: nn.Module, batch: Any) -> torch.Tensor:
        raise KeyError("labels")

    with pytest.raises(JobFailed, match="job: step 0: loss raised KeyError: 'labels'"):
        record_run(lambda: job_of(nn.Linear(2, 2), loss=spoiled), "fp32", 2)

    def hooked() -> Job:
        job = job_of(nn.Linear(2, 2))
        for parameter in job.model.parameters():
            parameter.register_hook(lambda gradient: 1 / 0)
        return job

    with pytest.raises(JobFailed, match="job: step 0: the backward pass raised ZeroDivisionError"):
        record_run(hooked, "fp32", 2)


def test_an_operator_that_torch_cannot_repeat_and_a_loss_without_gradients_are_named(record_run: Any) -> None:
    """The text that torch has says to turn a switch off that nobody but this package turned on."""

    def unpooled(model: nn.Module, batch: Any) -> torch.Tensor:
        pooled, where = F.max_pool1d(model(batch[0])[None], 2, return_indices=True)
        return F.max_unpool1d(pooled, where, 2).square().mean()

    with pytest.raises(
        JobFailed, match=r"step 0: loss: torch has no way to compute max_unpool\S* that gives the same"
    ):
        record_run(lambda: job_of(nn.Linear(2, 2), loss=unpooled), "fp32", 2)
    with pytest.raises(InvalidInput, match="job: step 0: loss depends on no parameter"):
        record_run(lambda: job_of(nn.Linear(2, 2), loss=lambda m, b: b[0].sum()), "fp32", 2)


@pytest.mark.parametrize(
    ("loss", "got"), [(None, "NoneType"), ("a", "str"), (torch.ones(()) * 1j, "complex64")]
)
def test_a_loss_that_is_no_number_is_refused_by_name(loss: Any, got: str, record_run: Any) -> None:
    with pytest.raises(
        InvalidInput, match=f"step 0: loss must be a tensor of one real number, got (torch.)?{got}"
    ):
        record_run(lambda: job_of(nn.Linear(2, 2), loss=lambda m, b: loss), "fp32", 2)


class MuteError(Exception):
    def __str__(self) -> str:
        raise ValueError


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (ImportError("no module"), "ImportError: no module"),
        (SystemExit(0), "SystemExit: 0"),
        (Mismatch("own"), "Mismatch: own"),
        (MuteError(), r"MuteError: \(its words cannot be had: ValueError\)"),
        (ValueError("\ud800"), r"ValueError: \\ud800"),
        (torch.OutOfMemoryError(""), "OutOfMemoryError: "),
    ],
)
def test_whatever_a_job_raises_is_said_to_be_its_own(
    raised: BaseException, said: str, record_run: Any
) -> None:
    def spoiled(model: nn.Module, batch: Any) -> torch.Tensor:
        raise raised

    with pytest.raises(JobFailed, match=f"^job: step 0: loss raised {said}$"):
        record_run(lambda: job_of(nn.Linear(2, 2), loss=spoiled), "fp32", 2)


def test_under_a_log_a_step_fails_whatever_is_raised_but_what_is_no_matter_of_the_log() -> None:
    for raised in (InvalidInput("own"), JobFailed("own"), Mismatch("own"), RuntimeError("own")):
        with pytest.raises(StepFailed, match="the step does not end here under this log: own"), under_log():
            raise raised
    for lacking in (MemoryError(), torch.OutOfMemoryError("")):
        with pytest.raises(JobFailed, match="there is not enough memory"), under_log():
            raise lacking
        with pytest.raises(JobFailed, match="does not end here: job: loss"), under_log():
            raise JobFailed("job: loss") from lacking
    with pytest.raises(OtherProgram), under_log():
        raise OtherProgram("own")
