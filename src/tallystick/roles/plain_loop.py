"""A job trained in plain PyTorch, which recording and observing are measured against."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from tallystick.execution.dispatch.table import RANDOM
from tallystick.execution.job import Batch, Job

# A plain loop does without session, trainer and auditor, and its memory is measured without.
if TYPE_CHECKING:
    from tallystick.execution.dispatch.jitter import Jitter
    from tallystick.execution.dispatch.randomness import RandomStream

Times = dict[str, float]


class PortableRandomness(TorchDispatchMode):
    """Random operators draw what they draw in a recorded run; nothing else changes, unless ``jitter`` is given."""

    def __init__(self, stream: RandomStream, jitter: Jitter | None) -> None:
        super().__init__()
        self._stream, self._jitter = stream, jitter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func``, drawing from the stream where it is random."""
        if func._schema.name in RANDOM:
            return self._stream.draw(func, args, kwargs or {})
        if self._jitter is None:
            return func(*args, **(kwargs or {}))
        return self._jitter.around(func, args, kwargs or {}, lambda args, kwargs: func(*args, **kwargs))


class PlainLoop:
    """A job's own loop in plain PyTorch: nothing is rounded, logged or hashed.

    Args:
        job: its model becomes ``compute``.
        compute: dtype of model, gradients and, without ``masters``, of the optimizer's state. With bfloat16 these are
            float32, and the forward pass runs under torch's autocast.
        masters: the optimizer works on float64 copies of the parameters, kept from step to step.
        stream: draws the random numbers of a recorded run; None for torch's own generator.
        jitter: last-bit noise on every operator of forward and backward pass; needs ``stream``.
        device: where it computes, by name. Times end when it is done.
    """

    def __init__(
        self,
        job: Job,
        compute: torch.dtype,
        *,
        masters: bool = False,
        stream: RandomStream | None = None,
        jitter: Jitter | None = None,
        device: str = "cpu",
    ) -> None:
        self.job, self.stream, self.jitter, self.device = job, stream, jitter, device
        self.autocast = compute is torch.bfloat16
        self.compute = torch.float32 if self.autocast else compute
        for module in (job.model, *job.extra.values()):
            module.to(device, self.compute)
        self.masters = _hold_masters(job) if masters else []

    def step(self, number: int) -> Times:
        """Train on step ``number`` and return the seconds of its two phases and in all."""
        job, started = self.job, time.perf_counter()
        for micro_batch, part in enumerate(
            _parts(job.batch(number), job.accumulation, self.compute, self.device)
        ):
            with self._randomness(number, micro_batch):
                with torch.autocast(self.device, torch.bfloat16) if self.autocast else nullcontext():
                    share = job.loss(job.model, part) / job.accumulation
                torch.autograd.backward(share)
        if job.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(job.model.parameters(), job.clip_norm)
        middle = _now(self.device)
        for parameter, master in self.masters:
            if parameter.grad is not None:
                master.grad, parameter.grad = parameter.grad.double(), None
        job.optimizer.step()
        job.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for parameter, master in self.masters:
                parameter.copy_(master)
        if job.scheduler is not None:
            job.scheduler.step()
        if job.after_step is not None:
            job.after_step(number)
        ended = _now(self.device)
        return {"forward_backward": middle - started, "optimizer": ended - middle, "total": ended - started}

    def _randomness(self, number: int, micro_batch: int) -> AbstractContextManager[object]:
        if self.stream is None:
            return nullcontext()
        self.stream.start(number, 0, micro_batch)
        return PortableRandomness(self.stream, self.jitter)


def _hold_masters(job: Job) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Put float64 copies of the parameters in their places in the optimizer; return both, in pairs."""
    pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
    for group in job.optimizer.param_groups:
        originals: list[nn.Parameter] = group["params"]
        copies = [nn.Parameter(p.detach().double(), requires_grad=p.requires_grad) for p in originals]
        group["params"] = copies
        pairs += zip(originals, copies, strict=True)
    return pairs


def _now(device: str) -> float:
    """Return the time at which all that was asked of the device is done."""
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter()


def _parts(batch: Batch, count: int, compute: torch.dtype, device: str) -> list[Batch]:
    """Return ``count`` equal cuts of ``batch`` along dimension 0 on ``device``, floating tensors in ``compute``."""

    def cut(number: int) -> Callable[[Any], Any]:
        def one(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            part = leaf if count == 1 else leaf.chunk(count)[number]
            return part.to(device, compute if part.is_floating_point() else part.dtype)

        return one

    return [tree_map(cut(number), batch) for number in range(count)]
