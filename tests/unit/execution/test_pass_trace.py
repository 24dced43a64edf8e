"""A step's operators written down to be run again: what the program reads in between is noted, what operators read is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tallystick.execution.determinism import filling_results
from tallystick.execution.dispatch.capture import Capture
from tallystick.execution.dispatch.decisions import OperatorFindings
from tallystick.execution.dispatch.randomness import RandomStream
from tallystick.execution.noise.probes import ProbingContext
from tallystick.execution.pass_trace import OtherShapes, PassTrace


def read_again(function: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Return what the program reads, by a repetition of one step whose gradient is that of ``function``."""
    weight = torch.linspace(-2.0, 3.0, 96).reshape(2, 3, 4, 4).requires_grad_()
    trace, stream, context = PassTrace({"weight": weight}), RandomStream(5), ProbingContext()
    capture = Capture(context, stream, compute=torch.float32, findings=OperatorFindings(), sink=trace)
    with torch.random.fork_rng(devices=[]), filling_results(True):
        context.start_micro_batch(0)
        stream.start(0, 0, 0)
        trace.begin_part()
        with stream.seeding(), capture, trace.noting_reads():
            function(weight).backward()
        assert weight.grad is not None
        trace.end({"weight": weight.grad})
        again = trace.repetition({"weight": weight})
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            again.run(0)
    return again.read


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.relu(x * 1.0, inplace=True).square().sum(),
        lambda x: F.max_pool2d(x * 1.0, 2).square().sum(),
        lambda x: F.dropout(x * 1.0, 0.5).sum(),
        lambda x: F.batch_norm(x * 1.0, None, None, training=True).pow(3).sum(),
    ],
    ids=["relu", "max_pool", "dropout", "batch_norm"],
)
def test_what_operators_read_is_not_what_the_program_reads(function: Callable[[Tensor], Tensor]) -> None:
    assert read_again(function) == []


@pytest.mark.parametrize(
    "reads",
    [lambda y: y.detach().numpy().sum(), lambda y: y.tolist(), lambda y: y.sum().item()],
    ids=["numpy", "tolist", "item"],
)
def test_what_the_program_reads_between_operators_is_noted(reads: Callable[[Tensor], object]) -> None:
    def function(x: Tensor) -> Tensor:
        y = F.relu(x * 1.0)
        reads(y)
        return y.square().sum()

    assert len(read_again(function)) == 1


def test_an_operator_that_fails_leaves_reads_noted() -> None:
    def function(x: Tensor) -> Tensor:
        y = x * 1.0
        with pytest.raises(RuntimeError):
            torch.mm(y, y)
        y.detach().numpy()
        return y.square().sum()

    assert len(read_again(function)) == 1


def test_a_value_lies_in_a_repetition_as_it_lay_in_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel of another precision leaves a convolution in another order: a view of it could not be made, or was another one."""
    weight = torch.linspace(-1.0, 1.0, 2 * 3 * 4 * 4).reshape(2, 3, 4, 4).requires_grad_()
    trace, stream, context = PassTrace({"weight": weight}), RandomStream(5), ProbingContext()
    capture = Capture(context, stream, compute=torch.float32, findings=OperatorFindings(), sink=trace)
    with torch.random.fork_rng(devices=[]):
        context.start_micro_batch(0)
        stream.start(0, 0, 0)
        trace.begin_part()
        with stream.seeding(), capture, trace.noting_reads():
            laid = torch.clone(weight, memory_format=torch.channels_last)
            flat = laid.permute(0, 2, 3, 1).view(2, 48)
            loss = (flat * torch.arange(48.0)).sum()
            loss.backward()
            trace.note_loss(loss)
        assert weight.grad is not None
        trace.end({"weight": weight.grad})
    plain = PassTrace.laid_out

    def usual(trace: PassTrace, number: int, result: Tensor) -> Tensor:
        """As a kernel that leaves everything in the usual order."""
        has_memory = number in trace._layouts  # pyright: ignore[reportPrivateUsage]
        return result.contiguous() if has_memory else result

    monkeypatch.setattr(
        PassTrace,
        "laid_out",
        lambda trace, number, result: plain(trace, number, usual(trace, number, result)),
    )
    again = trace.repetition({"weight": weight})
    with torch.enable_grad():
        again.run(0)
    assert torch.equal(again.value(trace.losses[0]), loss.detach())
    assert torch.equal(again.value(trace.gradients["weight"]), weight.grad)
    # The control: in the usual order the view cannot be made.
    monkeypatch.setattr(PassTrace, "laid_out", usual)
    with torch.enable_grad(), pytest.raises(OtherShapes, match="cannot be run again"):
        trace.repetition({"weight": weight}).run(0)
