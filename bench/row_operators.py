"""How far row operators are from float64, as torch evaluates them in float32 and as a recorded step does.

    python bench/row_operators.py

Largest deviation of any result over its rms, of losses by element over that element. Statistics that a backward operator reads
are those of float64, rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tallystick.execution.dispatch.handlers import handler_for

A: Any = torch.ops.aten
Case = tuple[str, str, Any, tuple[Any, ...], tuple[Any, ...]]


def cases() -> Iterator[Case]:
    """Operator, regime, overload, float32 arguments, and float64 arguments without what was rounded before."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    yield from loss_cases(draw)
    yield from norm_cases(draw)
    yield from convolution_cases(draw)
    x = draw(4_000_000)
    yield "vector norm", "4 million", A.linalg_vector_norm.default, (x,), (x.double(),)
    y = draw(64, 768).log_softmax(1)
    yield "logsumexp", "of log-probabilities", A.logsumexp.default, (y, [1]), (y.double(), [1])


def convolution_cases(draw: Callable[..., Tensor]) -> Iterator[Case]:
    """Gradients of a convolution's weights, of more and more results."""
    for images, channels, side in ((8, 128, 28), (8, 64, 56), (16, 8, 56), (8, 16, 112)):
        x, w, g = (
            draw(images, channels, side, side).relu(),
            draw(channels, channels, 3, 3),
            draw(images, channels, side, side),
        )
        rest = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [False, True, False])
        where = f"{channels} channels, {images * side**2:,} results"
        yield (
            "convolution backward, weights", where, A.convolution_backward.default, (g, x, w, *rest),
            (g.double(), x.double(), w.double(), *rest),
        )  # fmt: skip


def loss_cases(draw: Callable[..., Tensor]) -> Iterator[Case]:
    """Losses of models that are more and more confident."""
    for ahead in (0.0, 12.0, 20.0):
        x = draw(64, 10)
        x[torch.arange(64), torch.arange(64) % 10] += ahead
        y, p = x.double().log_softmax(1), x.double().softmax(1)
        g, h = torch.zeros(64, 10), draw(64, 10)
        g[torch.arange(64), torch.arange(64) % 10] = -1 / 64
        where = f"best logit {ahead:g} ahead"
        yield "log_softmax", where, A._log_softmax.default, (x, 1, False), (x.double(), 1, False)
        yield (
            "log_softmax backward", where, A._log_softmax_backward_data.default, (g, y.float(), 1, torch.float32),
            (g.double(), y.float().double(), 1, torch.float64),
        )  # fmt: skip
        yield (
            "softmax backward", where, A._softmax_backward_data.default, (h, p.float(), 1, torch.float32),
            (h.double(), p, 1, torch.float64),
        )  # fmt: skip
        sure = (x + ahead) * torch.where(torch.arange(10) % 2 == 0, 1.0, -1.0)
        target = (sure > 0).float()
        bce = A.binary_cross_entropy_with_logits.default
        yield "bce with logits", where, bce, (sure, target, None, None, 0), (
            sure.double(), target.double(), None, None, 0
        )  # fmt: skip


def norm_cases(draw: Callable[..., Tensor]) -> Iterator[Case]:
    """Normalisations of activations that lie farther and farther from zero."""
    on = [True] * 3
    for offset in (0.0, 1e3, 1e5):
        x, g, w, b = draw(8, 16, 6, 6) * 0.1 + 0.1 * offset, draw(8, 16, 6, 6), draw(16), draw(16)
        far = [t.double() for t in (x, g, w, b)]
        where = f"offset {offset:g} spreads"
        for name, forward, backward, tail, back in (
            ("batch norm", A.native_batch_norm.default, A.native_batch_norm_backward.default,
             (None, None, True, 0.1, 1e-5), lambda g, x, w, m, r: (g, x, w, None, None, m, r, True, 1e-5, on)),
            ("group norm", A.native_group_norm.default, A.native_group_norm_backward.default,
             (8, 16, 36, 4, 1e-5), lambda g, x, w, m, r: (g, x, m, r, w, 8, 16, 36, 4, on)),
        ):  # fmt: skip
            stated = [t.float() for t in forward(far[0] - 0.1 * offset, far[2], far[3], *tail)]
            stated[1] = stated[1] + 0.1 * offset
            yield name, where, forward, (x, w, b, *tail), (far[0], far[2], far[3], *tail)
            near = far[0] - 0.1 * offset  # torch's group norm does not bear the offset even in float64
            still = forward(near, far[2], far[3], *tail)
            yield (
                f"{name} backward",
                where,
                backward,
                back(g, x, w, *stated[1:]),
                back(far[1], near, far[2], *still[1:]),
            )
        x, g, w, b = draw(64, 768) * 0.1 + 0.1 * offset, draw(64, 768), draw(768), draw(768)
        far = [t.double() for t in (x, g, w, b)]
        _, *exact = A.native_layer_norm(far[0], [768], far[2], far[3], 1e-5)
        stated = [t.float() for t in exact]
        tail = ([768],)
        yield (
            "layer norm",
            where,
            A.native_layer_norm.default,
            (x, *tail, w, b, 1e-5),
            (far[0], *tail, far[2], far[3], 1e-5),
        )
        yield (
            "layer norm backward", where, A.native_layer_norm_backward.default, (g, x, *tail, *stated, w, b, on),
            (far[1], far[0], *tail, *exact, far[2], far[3], on),
        )  # fmt: skip


def deviation(name: str, found: Any, exact: Any) -> float:
    """Return the largest deviation over rms of any result, over each element's own size for losses."""
    worst = 0.0
    for a, b in zip(*((r if isinstance(r, tuple) else (r,)) for r in (found, exact)), strict=True):
        if b is None:
            continue
        size = b.abs() if name in ("log_softmax", "bce with logits") else b.square().mean().sqrt()
        worst = max(worst, float(((a - b).abs() / size).max()))
    return worst


def main() -> None:
    """Print the table."""
    print("| operator | regime | torch, float32 | here |\n|---|---|---|---|")
    for name, regime, op, narrow, wide in cases():
        exact = op(*wide)
        if name == "bce with logits":  # torch's own cancels in float64 too
            exact = torch.log1p(torch.exp(-wide[0].abs()))
        here = handler_for(op)(None, op, narrow, {})  # pyright: ignore[reportArgumentType] # needs no capture
        if name in ("batch norm", "group norm"):
            exact, here, native = exact[:1], here[:1], op(*narrow)[:1]
        else:
            native = op(*narrow)
        print(
            f"| {name} | {regime} | {deviation(name, native, exact):.1e} | {deviation(name, here, exact):.1e} |"
        )


if __name__ == "__main__":
    main()
