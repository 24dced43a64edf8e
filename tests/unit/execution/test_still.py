"""Which elements that lie exactly on a switching point are logged: those that moved when the step was repeated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tallystick.errors import Nondeterminism
from tallystick.execution.dispatch.capture import Capture
from tallystick.execution.dispatch.decisions import OperatorFindings
from tallystick.execution.dispatch.randomness import RandomStream
from tallystick.execution.noise.probes import EchoingContext, ProbingContext, still_sites
from tallystick.execution.rounding.context import RecordingContext
from tallystick.execution.rounding.grids import STILL
from tallystick.numerics.grid_table import GridTable, SiteGrid
from tallystick.numerics.log import Kind, decode_frame
from tallystick.numerics.policy import POLICIES

FP32 = POLICIES["fp32"]
ON_POINTS = torch.tensor([0.0, 1.0, 2.0, 2.5, 3.0])  # all but one on a whole number


def cast(context: ProbingContext | EchoingContext | RecordingContext, x: torch.Tensor) -> None:
    context.start_micro_batch(0)
    with Capture(context, RandomStream(0), compute=torch.float32, findings=OperatorFindings()):
        x.to(torch.int64)


def still_after(moved: torch.Tensor) -> frozenset[int]:
    probe = ProbingContext()
    cast(probe, ON_POINTS.clone())
    echo = EchoingContext(probe)
    cast(echo, moved)
    return still_sites(probe, echo.left)


def test_what_never_left_its_point_is_still() -> None:
    assert still_after(ON_POINTS + torch.tensor([0.0, 0.0, 0.0, 1e-6, 0.0])) == {0}


def test_one_element_that_left_its_point_is_enough() -> None:
    assert still_after(ON_POINTS - torch.tensor([0.0, 0.0, 2.4e-7, 0.0, 0.0])) == frozenset()


def topk(context: ProbingContext | EchoingContext, x: torch.Tensor, k: int) -> None:
    context.start_micro_batch(0)
    with Capture(context, RandomStream(0), compute=torch.float32, findings=OperatorFindings()):
        x.topk(k)


@pytest.mark.parametrize("only_near", [True, False])
@pytest.mark.parametrize(
    ("repeat", "why"),
    [
        (lambda echo: topk(echo, torch.arange(5.0), 3), "its input .* are 9, and 5 under noise"),
        (lambda echo: topk(echo, torch.arange(9.0), 2), r"symbol .* are \(3, 4\), and \(2, 4\) under noise"),
    ],
)
def test_a_decision_of_another_size_is_no_noise_that_could_be_measured(
    repeat: Callable[[EchoingContext], None], why: str, only_near: bool
) -> None:
    """Positions of the one are none of the other: both audit and dispute ended in an IndexError."""
    probe = ProbingContext(4, only_near)
    topk(probe, torch.arange(9.0), 3)
    topk(EchoingContext(probe), torch.arange(9.0) + 0.25, 3)
    with pytest.raises(Nondeterminism, match=f"decision 0 of micro-batch 0: elements.*{why}"):
        repeat(EchoingContext(probe))


def test_a_cast_of_fewer_numbers_is_no_noise_that_could_be_measured() -> None:
    probe = ProbingContext(only_near=True)
    cast(probe, ON_POINTS.clone())
    with pytest.raises(Nondeterminism, match="are 5, and 3 under noise"):
        cast(EchoingContext(probe), ON_POINTS[:3].clone())


def entries(grids: dict[tuple[int, int], SiteGrid]) -> int:
    context = RecordingContext(FP32, GridTable(grids), base=GridTable(grids))
    cast(context, ON_POINTS.clone())
    return len(decode_frame(context.finish()).sites)


def test_a_decision_that_was_not_measured_logs_them() -> None:
    assert entries({}) == 1


def test_only_a_still_decision_leaves_them_out() -> None:
    place = (int(Kind.DECISION), 0)
    assert entries({place: SiteGrid(0, -17, 0)}) == 1
    assert entries({place: SiteGrid(0, -17, STILL)}) == 0


def test_a_relu_of_nothing_but_zeros_is_followed(branches: Any) -> None:
    """The band of zeros lies below the smallest float32: zero is nearer all the same."""
    x = torch.zeros(4, dtype=getattr(torch, branches.policy.compute))
    trainer = branches.record(torch.relu, x)
    assert len(trainer.frame.sites) == 1
    assert branches.follow(torch.relu, x, trainer.frame).violations == []
