"""Evaluates operators and small programs in this process's arithmetic: a child process of the tests, and what they load.

As a program it reads calls from its input and writes their results, both as torch saves them behind a length of eight
bytes. What arithmetic it has is said by its environment (``execution.determinism``), read when torch is loaded.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from tallystick.execution.determinism import repeatable
from tallystick.execution.dispatch.capture import Capture
from tallystick.execution.dispatch.decisions import OperatorFindings
from tallystick.execution.dispatch.jitter import Jitter
from tallystick.execution.dispatch.randomness import RandomStream

Call = tuple[str, tuple[Any, ...], dict[str, Any]]
"""``aten.addmm.default`` or the name of a program, arguments by position, arguments by name."""


class NoDecisions:
    """A context for calls that have none to take."""

    def pending(self, x: Tensor) -> bool:
        return False


def evaluate(call: Call, jitter: Jitter | None = None, *, compute: torch.dtype | None = None) -> list[Tensor]:
    """The floating results of a call as a step would compute them, and what it wrote in place."""
    name, args, kwargs = call
    floats = [x.dtype for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.is_floating_point()]
    dtype = compute or (torch.float64 if torch.float64 in floats else torch.float32)
    context: Any = NoDecisions()
    capture = Capture(context, RandomStream(1), compute=dtype, findings=OperatorFindings(), jitter=jitter)
    with repeatable(str(dtype).removeprefix("torch.")), capture:
        if name in PROGRAMS:
            found: Any = PROGRAMS[name](*args, **kwargs)
        else:
            _, packet, overload = name.split(".")
            with torch.no_grad():
                found = getattr(getattr(torch.ops.aten, packet), overload)(*args, **kwargs)
    results = [x for x in tree_leaves(found) if isinstance(x, Tensor)]
    return [
        torch.view_as_real(x) if x.is_complex() else x
        for x in results
        if x.is_floating_point() or x.is_complex()
    ]


# -- programs: what users write, whose gradients differ between machines -------------------------


def _gradients(loss: Tensor, *leaves: Tensor) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def confident_classifier(x: Tensor, first: Tensor, second: Tensor, target: Tensor) -> list[Tensor]:
    first, second = first.requires_grad_(), second.requires_grad_()
    return _gradients(F.cross_entropy(F.gelu(x @ first) @ second, target), first, second)


def attention(x: Tensor, w: Tensor, weight: Tensor) -> list[Tensor]:
    w = w.requires_grad_()
    q, k, v = (x @ w).chunk(3, dim=-1)
    scores = torch.softmax(q @ k.mT, dim=-1)
    return _gradients(((scores @ v) * weight).sum(), w)


def fused_attention(x: Tensor, w: Tensor, weight: Tensor) -> list[Tensor]:
    w = w.requires_grad_()
    q, k, v = (x @ w).unsqueeze(1).chunk(3, dim=-1)
    return _gradients(
        (F.scaled_dot_product_attention(q, k, v, is_causal=True) * weight.unsqueeze(1)).sum(), w
    )


def norms(x: Tensor, w: Tensor, weight: Tensor) -> list[Tensor]:
    w = w.requires_grad_()
    for _ in range(3):
        x = F.layer_norm(torch.tanh(x @ w) + x, (x.shape[-1],))
    return _gradients((x * weight).sum(), w)


def variance(x: Tensor, w: Tensor) -> list[Tensor]:
    w = w.requires_grad_()
    return _gradients(torch.log((x * w).var(dim=0) + 1e-3).sum() + (x * w).std(dim=1).mean(), w)


def gate(x: Tensor, w: Tensor, target: Tensor) -> list[Tensor]:
    w = w.requires_grad_()
    return _gradients(
        F.binary_cross_entropy_with_logits((torch.sigmoid(x @ w) * torch.tanh(x @ w)).sum(-1), target), w
    )


PROGRAMS: Mapping[str, Callable[..., list[Tensor]]] = {
    f.__name__: f for f in (confident_classifier, attention, fused_attention, norms, variance, gate)
}


# -- the process ---------------------------------------------------------------------------------


def send(value: Any, to: BinaryIO) -> None:
    held = io.BytesIO()
    torch.save(value, held)
    to.write(len(held.getvalue()).to_bytes(8, "little") + held.getvalue())
    to.flush()


def receive(source: BinaryIO) -> Any:
    length = int.from_bytes(source.read(8), "little")
    return torch.load(io.BytesIO(source.read(length)), weights_only=True) if length else None


def main() -> None:
    """Evaluate lists of calls until there are no more."""
    given, taken = sys.stdin.buffer, sys.stdout.buffer
    while (calls := receive(given)) is not None:
        send([evaluate(call) for call in calls], taken)


if __name__ == "__main__":
    main()
