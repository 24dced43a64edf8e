"""Row operators: rounded once, accurate where torch's cancel, the same bits on every processor, and right gradients."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from tallystick.execution.determinism import INSTRUCTION_SETS
from tallystick.execution.dispatch.calls import table_name
from tallystick.execution.dispatch.handlers import handler_for
from tallystick.execution.dispatch.rows import ROW_HANDLERS, RowOperators
from tallystick.execution.job import find_source
from tallystick.numerics import rows
from tallystick.numerics.kernels import native
from tallystick.numerics.policy import find_policy
from tallystick.numerics.rows import Form
from tallystick.roles.auditor import audit
from tallystick.roles.trainer import Order, record
from tallystick.store.files import RunDirectory

A: Any = torch.ops.aten
CONFIDENT = (12.0, 20.0, 28.0)  # how far the best logit is ahead: losses of 1e-5 to 1e-12


def call(op: Any, *args: Any) -> Any:
    """What the handler of ``op`` returns; no capture is needed for it."""
    return ROW_HANDLERS[table_name(op)](None, op, args, {})  # pyright: ignore[reportArgumentType]


def widened(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.double()
    return torch.float64 if value is torch.float32 else value


def ulps(found: Tensor, exact: Tensor) -> Tensor:
    """How many units in the last place of its own format, at ``exact``, each element is off."""
    eps, tiny = torch.finfo(found.dtype).eps, torch.finfo(found.dtype).smallest_normal
    exponent = torch.frexp(exact.double().abs().clamp_min(tiny)).exponent - 1
    return (found.double() - exact).abs() / torch.ldexp(torch.full_like(exact, eps), exponent)


# -- the definition, in plain Python -------------------------------------------------------------


def plain_log_softmax(row: list[float]) -> list[float]:
    """Log-softmax of one row, to some units in the last place of float64."""
    top = max(row)
    best = row.index(top)
    rest = math.log1p(math.fsum(math.exp(v - top) for i, v in enumerate(row) if i != best))
    return [(v - top) - rest for v in row]


def plain_softmax(row: list[float]) -> list[float]:
    return [math.exp(v) for v in plain_log_softmax(row)]


def plain_gradient(g: list[float], row: list[float]) -> list[float]:
    """Gradient of a row's logits from that of its log-softmax, given with relative accuracy."""
    total = math.fsum(g)
    found: list[float] = []
    for i, (own, log_p) in enumerate(zip(g, row, strict=True)):
        others = math.fsum(v for j, v in enumerate(g) if j != i)
        found.append(-others - math.expm1(log_p) * total if log_p > -0.5 else own - math.exp(log_p) * total)
    return found


REGIMES: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "plain": lambda r, n: r.normal(0.0, 3.0, n),
    "confident": lambda r, n: np.where(np.arange(n) == n // 2, r.choice(CONFIDENT), 0.0) + r.normal(0.0, 0.3, n),
    "offset": lambda r, n: 1e4 + r.normal(0.0, 0.01, n),
    "nearly equal": lambda r, n: 1.0 + 1e-6 * r.normal(0.0, 1.0, n),
    "equal": lambda r, n: np.full(n, r.normal()),
    "large": lambda r, n: r.normal(0.0, 1e4, n),
    "masked": lambda r, n: np.where(np.arange(n) % 3 == 1, -np.inf, r.normal(0.0, 2.0, n)),
}  # fmt: skip
examples = settings(max_examples=60)


@st.composite
def tensors(draw: st.DrawFn) -> tuple[Tensor, int]:
    """A float32 tensor of some regime, and the dimension along which its rows lie."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    shape[dim] = draw(st.sampled_from([1, 2, 5, 9, 31, 300]))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    regime = REGIMES[draw(st.sampled_from(sorted(REGIMES)))]
    moved = shape.copy()
    moved[-1], moved[dim] = moved[dim], moved[-1]
    lines = np.array([regime(generator, moved[-1]) for _ in range(math.prod(moved[:-1]))])
    x = torch.from_numpy(lines.astype(np.float32)).reshape(moved)
    swapped = x.transpose(dim, -1)
    return (swapped if draw(st.booleans()) else swapped.contiguous()), dim


def by_row(function: Callable[..., list[float]], dim: int, *given: Tensor) -> Tensor:
    """Apply a function of plain rows along ``dim``."""
    moved = [x.double().movedim(dim, -1) for x in given]
    lines = [x.reshape(-1, x.shape[-1]).tolist() for x in moved]
    found = [function(*line) for line in zip(*lines, strict=True)]
    return torch.tensor(found, dtype=torch.float64).reshape(moved[0].shape).movedim(-1, dim)


@examples
@given(tensors())
def test_softmax_and_its_logarithm_are_the_float64_value_rounded_once(case: tuple[Tensor, int]) -> None:
    x, dim = case
    logs, exact = call(A._log_softmax.default, x, dim, False), by_row(plain_log_softmax, dim, x)
    finite = exact > -math.inf
    assert torch.equal(finite, logs > -math.inf)
    assert (
        ulps(logs[finite], exact[finite]).max() <= 0.5001
    )  # half a unit: correctly rounded, but for one case in 2**12
    for op in (A._softmax.default, A._safe_softmax.default):
        p = call(op, x, dim, *((False,) if op is A._softmax.default else ()))
        assert ulps(p, by_row(plain_softmax, dim, x)).max() <= 0.5001


@examples
@given(tensors(), st.integers(0, 2**32))
def test_the_gradient_of_log_softmax_is_the_float64_value_rounded_once(
    case: tuple[Tensor, int], seed: int
) -> None:
    x, dim = case
    y = by_row(plain_log_softmax, dim, x).float()
    generator = torch.Generator().manual_seed(seed)
    g = torch.randn(y.shape, generator=generator)
    if seed % 2:  # of a loss: one element of each row
        g = g * (torch.rand(y.shape, generator=generator) > 0.9)
    found = call(A._log_softmax_backward_data.default, g, y, dim, torch.float32)
    exact = by_row(plain_gradient, dim, g, y)
    terms = g.double().abs() + y.double().exp() * g.double().abs().sum(dim, keepdim=True)
    assert ((found - exact).abs() <= exact.abs() * 2.0**-23.99 + terms * 2.0**-40 + 2.0**-149).all()


@examples
@given(tensors(), st.integers(0, 2**32))
def test_the_gradient_of_softmax_is_that_of_probabilities_that_add_up_to_1(
    case: tuple[Tensor, int], seed: int
) -> None:
    x, dim = case
    p = by_row(plain_softmax, dim, x).float()
    g = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed))
    found = call(A._softmax_backward_data.default, g, p, dim, torch.float32)
    wide = p.double()
    pairs = g.double().movedim(dim, -1).unsqueeze(-1) - g.double().movedim(dim, -1).unsqueeze(-2)
    exact = wide * (pairs * wide.movedim(dim, -1).unsqueeze(-2)).sum(-1).movedim(-1, dim)
    # g_j - g is taken as (g_j - g_k) - (g - g_k), with k the likeliest
    largest = g.double().abs().amax(dim, keepdim=True)
    shaken = 2.0 * largest * (wide.sum(dim, keepdim=True) - 1.0).abs() * wide
    assert (
        (found - exact).abs() <= exact.abs() * 2.0**-23.99 + shaken + largest * wide * 2.0**-48 + 2.0**-149
    ).all()


def confident(ahead: float, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(8, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 0.3
    x[torch.arange(8), torch.arange(8)] += ahead
    return x.float().to(dtype)


@pytest.mark.parametrize("ahead", CONFIDENT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sure_row_keeps_its_relative_accuracy_where_torch_loses_it(
    ahead: float, dtype: torch.dtype
) -> None:
    x = confident(ahead, dtype)
    exact = by_row(plain_log_softmax, 1, x)
    found, native = call(A._log_softmax.default, x, 1, False), A._log_softmax(x, 1, False)
    g = torch.zeros_like(x)
    g[torch.arange(8), torch.arange(8)] = -0.125
    gradient = call(A._log_softmax_backward_data.default, g, found, 1, dtype)
    native_gradient = A._log_softmax_backward_data(g, found, 1, dtype)
    exact_gradient = by_row(plain_gradient, 1, g, found)

    assert ulps(found, exact).max() <= 4.0
    assert ulps(gradient, exact_gradient).max() <= 4.0
    # The control: the loss is about exp(-ahead), torch's is off by a unit in the last place of 1.
    lost = 2.0**-6 * torch.finfo(dtype).eps * math.exp(ahead)
    assert ((native - exact) / exact).abs().max() > min(lost, 0.5)
    assert ((native_gradient - exact_gradient) / exact_gradient).abs().max() > min(lost, 0.5)


@pytest.mark.parametrize("ahead", CONFIDENT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_gradient_of_a_sure_softmax_keeps_its_accuracy(ahead: float, dtype: torch.dtype) -> None:
    """Against the derivative at the logits, not at rounded probabilities: in attention that is what is meant."""
    x = confident(ahead, dtype)
    p = by_row(plain_softmax, 1, x)
    g = torch.randn(8, 10, generator=torch.Generator().manual_seed(1)).double()
    pairs = g.unsqueeze(2) - g.unsqueeze(1)
    exact = p * (pairs * p.unsqueeze(1)).sum(2)
    given_g, given_p = g.to(dtype), p.to(dtype)
    found = call(A._softmax_backward_data.default, given_g, given_p, 1, dtype)
    native = A._softmax_backward_data(given_g, given_p, 1, dtype)
    lost = 2.0**-6 * torch.finfo(dtype).eps * math.exp(ahead)
    size = exact.abs().amax(1, keepdim=True)
    assert ((found - exact).abs() / size).max() < 16 * torch.finfo(dtype).eps
    assert ((native - exact).abs() / size).max() > min(lost, 0.25)


@pytest.mark.parametrize("op", [A._log_softmax.default, A._softmax.default, A._safe_softmax.default])
def test_rows_without_a_number_are_as_torch_has_them(op: Any) -> None:
    inf, nan = math.inf, math.nan
    x = torch.tensor(
        [
            [-inf, -inf, -inf],
            [0.0, -inf, 1.0],
            [inf, 0.0, 1.0],
            [nan, 0.0, 1.0],
            [-inf, nan, -inf],
            [0.0, 0.0, 0.0],
        ]
    )
    more = () if op is A._safe_softmax.default else (False,)
    torch.testing.assert_close(call(op, x, 1, *more), op(x, 1, *more), equal_nan=True)


# -- norms ---------------------------------------------------------------------------------------

OFFSETS = [0.0, 1e3, 1e5]  # over the spread


def batch(offset: float, *shape: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Numbers of spread 0.1 around an offset, an upstream gradient, and weight and bias for dimension 1."""
    generator = torch.Generator().manual_seed(3)
    x, g = (
        torch.randn(shape, generator=generator) * 0.1 + 0.1 * offset,
        torch.randn(shape, generator=generator),
    )
    return x, g, torch.randn(shape[1], generator=generator), torch.randn(shape[1], generator=generator)


def off(found: Any, exact: Any) -> list[float]:
    """Largest deviation of each result, in units of 2**-24 of its rms."""
    pairs = zip(found, exact, strict=True)
    return [float((a - b).abs().max() / (b.square().mean().sqrt() * 2.0**-24)) for a, b in pairs]


def norm_cases(offset: float) -> dict[str, tuple[Any, Any, Any]]:
    """By name: results here, torch's float32 ones, and those of torch in float64 with float64 statistics.

    The last from numbers without their offset, which torch's group norm does not bear even in float64.
    """
    on, off_ = [True] * 3, {}
    for layout in (torch.contiguous_format, torch.channels_last):
        x, g, w, b = (t.to(memory_format=layout) if t.dim() == 4 else t for t in batch(offset, 6, 8, 5, 7))
        away = float(np.float32(0.1 * offset))
        wide = x.double() - away, *(t.double() for t in (g, w, b))
        stats = torch.zeros(8), torch.ones(8)
        for name, forward, backward in (
            ("batch", lambda x, w, b, s: (A.native_batch_norm.default, x, w, b, *s, True, 0.1, 1e-5),
             lambda g, x, w, b, m, r: (A.native_batch_norm_backward.default, g, x, w, None, None, m, r, True, 1e-5, on)),
            ("group", lambda x, w, b, s: (A.native_group_norm.default, x, w, b, 6, 8, 35, 2, 1e-5),
             lambda g, x, w, b, m, r: (A.native_group_norm_backward.default, g, x, m, r, w, 6, 8, 35, 2, on)),
            ("layer", lambda x, w, b, s: (A.native_layer_norm.default, x.transpose(1, 3), [8], w, b, 1e-5),
             lambda g, x, w, b, m, r: (A.native_layer_norm_backward.default, g.transpose(1, 3), x.transpose(1, 3), [8], m, r,
                                       w, b, on)),
        ):  # fmt: skip
            mine, native, exact = [], [], []
            for out, run, values in (
                (mine, call, (x, g, w, b)),
                (native, None, (x, g, w, b)),
                (exact, None, wide),
            ):
                held = tuple(s.clone().to(values[0].dtype) for s in stats)
                op, *args = forward(values[0], values[2], values[3], held)
                found = run(op, *args) if run else op(*args)
                op, *args = backward(values[1], values[0], *values[2:], *found[1:])
                gradients = run(op, *args) if run else op(*args)
                out += [*found, *(held if name == "batch" else ()), *gradients]
            exact[1] = exact[1] + away
            if name == "batch":
                exact[3] = exact[3] + 0.1 * away
            off_[f"{name} {layout}"] = mine, native, exact
    return off_


@pytest.mark.parametrize("offset", OFFSETS)
def test_norms_are_accurate_however_small_the_spread_is(offset: float) -> None:
    for name, (mine, torchs_own, exact) in norm_cases(offset).items():
        here, torchs = off(mine, exact), off(torchs_own, exact)
        assert max(here) < 16.0, (name, here)  # an element may be some times the rms
        for a, b in zip(mine, torchs_own, strict=True):
            assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride()), name
        if offset > 1.0:
            assert max(torchs) > 8.0 * max(here), (name, here, torchs)


def test_constant_rows_are_normalised_to_the_bias() -> None:
    x, _, w, b = batch(0.0, 4, 6, 3, 3)
    x = torch.full_like(x, 7.3)
    out, mean, rstd = call(A.native_layer_norm.default, x[..., 0, 0], [6], w, b, 1e-5)
    assert torch.equal(out, b.expand(4, 6))
    assert (mean == x[0, 0, 0, 0]).all()
    assert torch.equal(rstd, torch.full((4, 1), 1e-5, dtype=torch.float64).rsqrt().float())
    out, *_ = call(A.native_batch_norm.default, x, w, b, None, None, True, 0.1, 1e-5)
    assert torch.equal(out, b.view(6, 1, 1).expand(x.shape))


def test_batch_norm_in_evaluation_and_frozen() -> None:
    x, g, w, b = batch(1e4, 6, 8, 5)
    stats = x.mean((0, 2)), x.var((0, 2))
    args = (x, w, b, *stats, False, 0.1, 1e-5)
    before = [s.clone() for s in stats]
    mine, native = call(A.native_batch_norm.default, *args), A.native_batch_norm(*args)
    assert [t.shape for t in mine] == [t.shape for t in native]
    exact = A.native_batch_norm(*map(widened, args))[0]
    assert max(off(mine[:1], [exact])) < 4.0 < max(off(native[:1], [exact]))
    back = (g, x, w, *stats, None, None, False, 1e-5, [True] * 3)
    exact = A.native_batch_norm_backward(*map(widened, back))
    assert max(off(call(A.native_batch_norm_backward.default, *back), exact)) < 4.0
    assert all(torch.equal(s, t) for s, t in zip(stats, before, strict=True))


def test_rms_norm_where_it_is_one_operator() -> None:
    x, g, w, _ = batch(0.0, 6, 8)
    out, rstd = call(A._fused_rms_norm.default, x, [8], w, None)
    dx, dw = call(A._fused_rms_norm_backward.default, g, x, [8], rstd, w, [True, True])
    leaf, scale = x.double().requires_grad_(), w.double().requires_grad_()
    exact = F.rms_norm(leaf, (8,), scale, torch.finfo(torch.float32).eps)
    exact.backward(g.double())
    assert max(off((out, dx, dw), (exact.detach(), leaf.grad, scale.grad))) < 8.0
    assert rstd.shape == (6, 1)


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("weighted", [False, True])
def test_binary_cross_entropy_of_sure_logits(reduction: int, weighted: bool) -> None:
    x = torch.tensor([[-20.0, 14.0, 0.3], [17.0, -9.0, 0.0]])
    target = torch.tensor([[0.0, 1.0, 0.2], [1.0, 0.0, 0.5]])
    weight = torch.tensor([0.5, 2.0, 3.0]) if weighted else None
    positive = torch.tensor([[1.5], [0.25]]) if weighted else None
    found = call(A.binary_cross_entropy_with_logits.default, x, target, weight, positive, reduction)
    p = positive.double().expand(2, 3).tolist() if positive is not None else [[1.0] * 3] * 2
    w = weight.double().tolist() if weight is not None else [1.0] * 3
    exact = torch.tensor(
        [[w[j] * (p[i][j] * t * math.log1p(math.exp(-v)) + (1 - t) * math.log1p(math.exp(v)))
          for j, (v, t) in enumerate(zip(xs.tolist(), ts.double().tolist(), strict=True))]
         for i, (xs, ts) in enumerate(zip(x, target, strict=True))], dtype=torch.float64,
    )  # fmt: skip
    exact = exact if reduction == 0 else exact.mean() if reduction == 1 else exact.sum()
    assert ulps(found, exact).max() <= 0.5001
    if reduction == 0 and not weighted:
        native = A.binary_cross_entropy_with_logits(x, target, None, None, 0)
        assert ((native - exact) / exact).abs().max() > 1e-3


def test_norms_and_log_sums_of_float32_are_those_of_float64() -> None:
    x = torch.randn(300, 400, generator=torch.Generator().manual_seed(2))
    y = A._log_softmax(x, 1, False)  # whose log-sum is nearly 0
    for op, args in (
        (A.linalg_vector_norm.default, (x, 2, None, False)), (A.linalg_vector_norm.default, (x, 3, [0], True)),
        (A.norm.Scalar, (x,)), (A.norm.ScalarOpt_dim, (x, None, [1])), (A.logsumexp.default, (y, [1], False)),
        (A.logsumexp.default, (x, [0], True)), (A.logsumexp.default, (x.view(3, 100, 400), [-1, 1], False)),
    ):  # fmt: skip
        found, exact = call(op, *args), op(*map(widened, args))
        assert (found.shape, found.dtype) == (exact.shape, torch.float32)
        assert ulps(found, exact).max() <= 0.5001
    exact = A.logsumexp(y.double(), [1])
    assert ulps(A.logsumexp(y, [1]), exact).max() > 100.0


def test_the_norm_of_many_numbers_is_that_of_float64_and_so_is_what_clipping_makes_of_them() -> None:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(1 << 21, generator=generator) * torch.rand(1 << 21, generator=generator) ** 3
    exact = torch.linalg.vector_norm(x, dtype=torch.float64)

    found = call(A.linalg_vector_norm.default, x)
    pair = call(A._foreach_norm.Scalar, [x, x[:5]], 2)
    across = call(A.linalg_vector_norm.default, x.view(2048, 1024).t(), 2, [0, 1], True)

    assert ulps(found, exact).max() <= 0.5001
    assert [each.item() for each in pair] == [found.item(), x[:5].double().norm().float().item()]
    assert across.shape == (1, 1)
    assert across.item() == found.item()
    one_by_one = np.sqrt(np.add.accumulate(x.square().numpy())[-1])  # as a kernel without lanes does
    assert abs(one_by_one / exact.item() - 1.0) > 1e-5
    wide = call(A.linalg_vector_norm.default, x.double())
    pairwise = math.sqrt(np.square(x.double().numpy()).sum())
    assert abs(wide.item() / pairwise - 1.0) < 1e-14

    with RowOperators():
        total = torch.nn.utils.clip_grad_norm_([_with_gradient(x)], 0.5)
    assert total.item() == found.item()


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
def test_a_norm_that_is_no_float32_number_is_what_torch_says(value: float) -> None:
    """Squares of 1e30 overflow in float32, and their sum does not in float64."""
    x = torch.full((4,), value)
    exact = torch.linalg.vector_norm(x, dtype=torch.float64).float()
    assert str(call(A.linalg_vector_norm.default, x).item()) == str(exact.item())


@pytest.mark.parametrize("dim", [[1], [2], [0, 3], [0, 1, 0], [0, 1, -1], [0, -1, 1]])
def test_false_dimensions_of_a_norm_go_to_torch(dim: list[int]) -> None:
    x = torch.ones(2, 3) if dim != [1] else torch.ones(3)
    with pytest.raises((IndexError, RuntimeError)):
        call(A.linalg_vector_norm.default, x, 2, dim)


def test_norms_of_float64_are_right_to_their_last_digit_and_out_of_range() -> None:
    for values in ([3.0, 4.0], [1e-170], [1e200, 1e200], [0.0]):
        x = torch.tensor(values, dtype=torch.float64)
        assert call(A.linalg_vector_norm.default, x).item() == torch.linalg.vector_norm(x).item()
        assert call(A._foreach_norm.Scalar, [x], 2)[0].item() == torch.linalg.vector_norm(x).item()
    absent = torch._efficientzerotensor((3,))  # whose numbers are in no memory
    assert call(A.linalg_vector_norm.default, absent).item() == 0.0
    assert [norm.item() for norm in call(A._foreach_norm.Scalar, [absent, absent], 2)] == [0.0, 0.0]
    out = torch.zeros(())
    with RowOperators():
        torch.linalg.vector_norm(torch.tensor([3.0, 4.0]), out=out)
    assert out.item() == 5.0


def _with_gradient(x: Tensor) -> nn.Parameter:
    p = nn.Parameter(torch.zeros_like(x))
    p.grad = x.clone()
    return p


@pytest.mark.parametrize("mask", [[True, True, True], [False, False, True], [True, False, False]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_gradient_of_a_convolutions_bias_is_a_sum_of_its_own(
    mask: list[bool], dtype: torch.dtype
) -> None:
    """Kernels of the whole backward add 50,000 terms one by one, as numpy does here."""
    generator = torch.Generator().manual_seed(8)
    gradient = torch.randn(64, 3, 28, 28, generator=generator, dtype=dtype) + 0.3
    image, weight = (
        torch.randn(64, 2, 28, 28, generator=generator).to(dtype),
        torch.randn(3, 2, 3, 3).to(dtype),
    )
    op = A.convolution_backward.default
    rest = ([3], [1, 1], [1, 1], [1, 1], False, [0, 0], 1)

    asked: list[list[bool]] = []

    def asking(*args: Any) -> Any:
        asked.append(list(args[-1]))
        return op(*args)

    asking._schema = op._schema
    found = handler_for(op)(None, asking, (gradient, image, weight, *rest, mask), {})  # pyright: ignore[reportArgumentType]
    plain = op(gradient, image, weight, *rest, mask)
    is_split = mask[1] and dtype is torch.float32
    whole = [mask[0], mask[1] and not is_split, False]
    pieces = [[False, True, False]] * 13 if is_split else []
    assert asked == ([whole] if any(whole) else []) + pieces, "the kernel is never asked for a bias"

    assert [x is None for x in found] == [not each for each in mask]
    same = found[:1] if is_split else found[:2]
    assert all(torch.equal(x, y) for x, y in zip(same, plain, strict=False) if x is not None)
    if mask[2]:
        terms = gradient.transpose(0, 1).reshape(3, -1)
        exact = torch.tensor([math.fsum(row.tolist()) for row in terms], dtype=torch.float64)
        one_by_one = torch.from_numpy(np.add.accumulate(terms.numpy(), axis=1)[:, -1].copy())
        assert (found[2].dtype, found[2].shape) == (dtype, (3,))
        assert ulps(found[2], exact).max() <= 3.0
        assert ulps(one_by_one, exact).max() > 20.0


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("images", "side", "kernel", "pieces"),
    [(7, 64, 3, 7), (9, 32, 3, 3), (4, 32, 3, 1), (2, 96, 3, 2), (7, 64, 1, 1)],
)
def test_the_gradient_of_a_convolutions_weights_is_added_up_in_pieces(
    images: int, side: int, kernel: int, pieces: int, transposed: bool
) -> None:
    """Of 4,096 results of a channel, of one image at least: kernels add all of them one by one in float32.

    Those of one place are matrix products, which are not.
    """
    generator = torch.Generator().manual_seed(5)
    gradient = torch.randn(images, 4, side, side, generator=generator)
    image = torch.randn(images, 2, side, side, generator=generator)
    weight = torch.randn((*((2, 4) if transposed else (4, 2)), kernel, kernel), generator=generator)
    op, rest = (
        A.convolution_backward.default,
        (None, [1, 1], [kernel // 2] * 2, [1, 1], transposed, [0, 0], 1),
    )
    asked = 0

    def counting(*args: Any) -> Any:
        nonlocal asked
        asked += 1
        return op(*args)

    counting._schema = op._schema
    arguments = (gradient, image, weight, *rest, [False, True, False])
    found = handler_for(op)(None, counting, arguments, {})[1]  # pyright: ignore[reportArgumentType]

    at_once = max(1, 4096 // side**2) if kernel > 1 else images
    parts = zip(gradient.split(at_once), image.split(at_once), strict=True)
    sums = [op(g, x, weight, *rest, [False, True, False])[1].double() for g, x in parts]
    assert asked == pieces
    assert torch.equal(found, torch.stack(sums).sum(0).float())
    assert pieces < 3 or not torch.equal(found, op(*arguments)[1]), "the whole batch at once gives others"


# -- which calls are meant -----------------------------------------------------------------------


def test_other_dtypes_and_false_arguments_go_to_torch() -> None:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.bfloat16, torch.float16):
        low = x.to(dtype)
        assert torch.equal(call(A._log_softmax.default, low, 1, False), A._log_softmax(low, 1, False))
    wide = x.double()
    assert torch.equal(call(A._softmax.default, wide, 1, False), A._softmax(wide, 1, False))
    assert torch.equal(
        call(A.native_layer_norm.default, wide, [4], None, None, 1e-5)[0],
        A.native_layer_norm(wide, [4], None, None, 1e-5)[0],
    )
    assert call(A._softmax.default, torch.empty(0, 4), 1, False).shape == (0, 4)
    assert call(A._log_softmax.default, torch.tensor(3.0), 0, False).item() == 0.0
    for op, args in (
        (A._log_softmax.default, (x, 2, False)),
        (A.native_layer_norm.default, (x, [5], None, None, 1e-5)),
    ):
        with pytest.raises((IndexError, RuntimeError)):
            call(op, *args)


@pytest.mark.parametrize("shape", [(4, 1), (1, 5, 1), (7,), (3, 6, 2)])
def test_every_dimension_gives_the_layout_of_torch(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for dim in range(-len(shape), len(shape)):
        for given_x in (x, x.flip(0), x.transpose(0, -1)):
            found, native = (
                call(A._log_softmax.default, given_x, dim, False),
                A._log_softmax(given_x, dim, False),
            )
            assert found.stride() == native.stride()
            torch.testing.assert_close(found, native, atol=1e-6, rtol=1e-5)


# -- chunks, threads, processors -----------------------------------------------------------------


def work() -> dict[str, Tensor]:
    """Results of every kernel, from inputs that are the same everywhere, by name."""
    steps = torch.arange(6 * 500 * 12, dtype=torch.float64)
    x = ((steps * 0.754877666).frac() * 30.0).float().view(6, 500, 12)
    g = ((steps * 0.569840291).frac() - 0.5).float().view(6, 500, 12)
    weight, found = g[0, :, 0].contiguous(), {}
    for form in Form:
        for dim in (1, 2):
            y = found[f"{form.name} {dim}"] = rows.softmax(x, dim, form)
            found[f"{form.name} {dim} gradient"] = rows.softmax_backward(g, y, dim, form)
        wide = found[f"{form.name} float64"] = rows.softmax(x.double(), 2, form)
        found[f"{form.name} float64 gradient"] = rows.softmax_backward(g.double(), wide, 2, form)
    matrix, dy = x.transpose(1, 2).reshape(-1, 500), g.transpose(1, 2).reshape(-1, 500)
    found["layer"], _, rstd = rows.layer_norm(matrix, weight, None, 1e-5)
    for number, gradient in enumerate(rows.layer_norm_backward(dy, matrix, rstd, weight, (True, True))):
        assert gradient is not None
        found[f"layer gradient {number}"] = gradient
    for groups in (rows.Groups(6, 12), rows.Groups(6, 12, 3)):
        scale = weight[:12].contiguous()
        out, *_, inverse = rows.group_norm(matrix, groups, scale, scale, 1e-5)
        dx, dw, db = rows.group_norm_backward(dy, matrix, groups, scale, inverse, None, True)
        assert dx is not None
        for name, value in (("", out), (" dx", dx), (" dw", dw), (" db", db)):
            found[f"{groups.together} together{name}"] = value
    return found


def digests() -> dict[str, str]:
    """The results of ``work`` and of torch's own operators, as digests; for other processes."""
    found = {name: value.contiguous() for name, value in work().items()}
    x = ((torch.arange(3000, dtype=torch.float64) * 0.754877666).frac() * 30.0).float().view(30, 100)
    found["torch"] = torch.cat(
        (A._log_softmax(x, 1, False), A.native_layer_norm(x, [100], None, None, 1e-5)[0])
    )
    return {name: hashlib.sha256(value.numpy().tobytes()).hexdigest() for name, value in found.items()}


def test_chunks_and_threads_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    before, threads = work(), torch.get_num_threads()
    monkeypatch.setattr(rows, "CHUNK", 700)
    try:
        torch.set_num_threads(3)
        monkeypatch.setattr(native, "rows_in_chunk", lambda width: max(1, 1500 // width))
        after = work()
    finally:
        torch.set_num_threads(threads)
    for name, value in before.items():
        if (
            name.startswith("layer gradient") and name[-1] != "0"
        ):  # sums over rows are added up by chunks of fixed size
            torch.testing.assert_close(value, after[name], rtol=1e-12, atol=1e-12)
        else:
            assert torch.equal(value, after[name]), name


def test_tensor_code_agrees_with_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other devices run, on the CPU: only the evaluation in float64 differs."""
    here = work()

    monkeypatch.setattr(rows, "_is_cpu", lambda x: False)
    there = work()
    for name, value in here.items():
        wide = value.dtype == torch.float64
        torch.testing.assert_close(
            value, there[name], rtol=2e-14 if wide else 1.2e-7, atol=1e-14 if wide else 1e-12
        )


@pytest.mark.skipif(
    platform.machine().lower() not in ("x86_64", "amd64"), reason="these are x86-64 instruction sets"
)
def test_instruction_sets_and_threads_give_the_same_bits() -> None:
    here = str(Path(__file__).parent)
    program = f"import json, sys; sys.path.insert(0, {here!r}); import test_rows as t"
    program = f"{program}; print(json.dumps(t.digests()))"
    found: list[dict[str, str]] = []
    for name, threads in (("native", "2"), ("sse4", "1")):
        variables = {**INSTRUCTION_SETS[name], "OMP_NUM_THREADS": threads}
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, **variables},
        )
        found.append(json.loads(done.stdout))
    control = [each.pop("torch") for each in found]
    assert found[0] == found[1]
    if control[0] == control[1]:
        pytest.skip("inconclusive: torch's own operators do not differ here either")


@pytest.mark.slow  # compiles the kernels once for each instruction set
@pytest.mark.skipif(
    shutil.which("gcc") is None or platform.machine() != "x86_64", reason="needs gcc on x86-64"
)
@pytest.mark.parametrize("march", ["x86-64", "x86-64-v3", "x86-64-v4"])
def test_every_compilation_gives_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, march: str
) -> None:
    """The library chooses its clone by the processor, not by the variables of a profile."""
    flags = Path("/proc/cpuinfo").read_text()
    if {"x86-64-v3": "avx2", "x86-64-v4": "avx512dq"}.get(march, "sse2") not in flags:
        pytest.skip(f"this processor does not run {march}")
    before = work()
    script = runpy.run_path(str(Path(__file__).parents[3] / "scripts" / "compile_kernels.py"))
    sources = [str(script["ROOM"] / source) for source in script["SOURCES"]]
    library = tmp_path / "libkernels.so"
    more = ("-DFAST=", f"-march={march}", "-o", str(library), *sources, "-lm")
    subprocess.run(["gcc", *script["FLAGS"].split(), *more], check=True)
    monkeypatch.setattr(native, "FOLDER", tmp_path)
    monkeypatch.setattr(native, "LIBRARY", library.name)
    native.library.cache_clear()
    try:
        after = work()
    finally:
        native.library.cache_clear()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


# -- under a capture -----------------------------------------------------------------------------


def test_cross_entropy_under_a_capture_has_accurate_gradients(branches: Any) -> None:
    dtype = getattr(torch, branches.policy.compute)
    x, target = confident(14.0, dtype), torch.arange(8)
    found = branches.record(lambda x: F.cross_entropy(x, target, reduction="none"), x)
    p = by_row(plain_softmax, 1, x)
    p[torch.arange(8), target] = 0.0
    p[torch.arange(8), target] = -p.sum(1)
    exact = p * torch.linspace(1.0, 2.0, 8, dtype=torch.float64).unsqueeze(1).to(dtype)

    assert ((found.gradient - exact) / exact).abs().max() < 8 * torch.finfo(dtype).eps
    leaf = x.clone().requires_grad_()
    (
        F.cross_entropy(leaf, target, reduction="none") * torch.linspace(1.0, 2.0, 8, dtype=dtype)
    ).sum().backward()
    assert leaf.grad is not None
    assert ((leaf.grad - exact) / exact).abs().max() > 1e3 * torch.finfo(dtype).eps


def attention(x: Tensor) -> Tensor:
    q = x.view(2, 2, 3, 4)
    mask = torch.ones(3, 3).tril().bool()
    scores = (q @ q.transpose(-1, -2)).masked_fill(~mask, -math.inf)
    return scores.softmax(-1) @ q


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "attention": attention,
    "log-softmax of planes": lambda x: x.view(2, 4, 6).log_softmax(1),
    "layer norm": lambda x: F.layer_norm(x.view(4, 12), (12,), x.view(4, 12)[0], x.view(4, 12)[1]),
    "group norm": lambda x: F.group_norm(x.view(2, 4, 6), 2, x[:4] + 1.0, x[4:8]),
    "batch norm": lambda x: F.batch_norm(x.view(4, 3, 4), None, None, x[:3] + 1.0, x[3:6], training=True),
    "instance norm": lambda x: F.instance_norm(x.view(2, 4, 6)),
    "binary cross entropy": lambda x: F.binary_cross_entropy_with_logits(
        x, torch.full_like(x, 0.3), reduction="none"
    ),
    "log-sum-exp": lambda x: x.view(4, 12).logsumexp(1),
    "vector norm": lambda x: torch.linalg.vector_norm(x.view(4, 12), dim=1),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_autograd_gives_the_gradients_of_float64(name: str, branches: Any) -> None:
    dtype = getattr(torch, branches.policy.compute)
    x = torch.randn(48, generator=torch.Generator().manual_seed(4)).to(dtype)
    found = branches.record(FUNCTIONS[name], x)
    leaf = x.double().requires_grad_()
    y = FUNCTIONS[name](leaf)
    (y * torch.linspace(1.0, 2.0, y.numel(), dtype=dtype).double().reshape(y.shape)).sum().backward()
    assert leaf.grad is not None
    close = 1e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(found.output.double(), y.detach(), rtol=close, atol=close)
    torch.testing.assert_close(found.gradient.double(), leaf.grad, rtol=close, atol=close)


def test_running_statistics_are_written_as_torch_writes_them(branches: Any) -> None:
    dtype = getattr(torch, branches.policy.compute)
    x = torch.randn(60, generator=torch.Generator().manual_seed(5)).to(dtype) + 3.0
    mine, plain = nn.BatchNorm1d(5).to(dtype), nn.BatchNorm1d(5).to(torch.float64)
    assert mine.running_mean is not None
    before = mine.running_mean._version
    branches.record(lambda x: mine(x.view(4, 5, 3)), x)
    plain(x.double().view(4, 5, 3))
    for name in ("running_mean", "running_var"):
        assert ulps(getattr(mine, name), getattr(plain, name).double()).max() <= (
            0.5001 if dtype == torch.float32 else 4.0
        )
    assert mine.running_mean._version == before  # torch does not count it either


@pytest.mark.parametrize("examples", [1, 2, 33])
def test_the_gradients_of_a_batch_norm_of_one_channel_are_sums_over_all_examples(examples: int) -> None:
    """Each example's own were written, past the end of what was held for the channel's."""
    generator = torch.Generator().manual_seed(7)
    x, g = (torch.randn(examples, 1, 3, generator=generator) for _ in range(2))
    w, b = torch.tensor([1.5]), torch.tensor([0.5])

    def gradients(x: Tensor, g: Tensor, w: Tensor, b: Tensor, run: Any) -> list[Tensor]:
        _, mean, inverse = run(A.native_batch_norm.default, x, w, b, None, None, True, 0.1, 1e-5)
        on = [True] * 3
        return list(
            run(A.native_batch_norm_backward.default, g, x, w, None, None, mean, inverse, True, 1e-5, on)
        )

    exact = gradients(*(t.double() for t in (x, g, w, b)), lambda op, *args: op(*args))
    for mine, right in zip(gradients(x, g, w, b, call), exact, strict=True):
        torch.testing.assert_close(mine.double(), right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_batch_norm_takes_its_statistics_as_closely_on_a_processor_as_on_a_device(dtype: torch.dtype) -> None:
    """Control: torch's kernel for processors adds up one by one, and is off by more."""
    x = torch.randn(16, 8, 32, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    kept = torch.float64 if dtype is torch.float64 else torch.float32
    right: list[float] = []
    for channel in x.double().transpose(0, 1).reshape(8, -1).tolist():
        mean = math.fsum(channel) / len(channel)
        right.append(math.fsum((value - mean) ** 2 for value in channel) / (len(channel) - 1))
    off: list[float] = []
    for op in (lambda *args: call(A.native_batch_norm.default, *args), A.native_batch_norm.default):
        ones, running = torch.ones(8, dtype=kept), torch.ones(8, dtype=kept)
        out, *_ = op(x, ones, torch.zeros_like(ones), torch.zeros_like(ones), running, True, 1.0, 1e-5)
        assert out.dtype is dtype
        off.append(max(abs(a / b - 1.0) for a, b in zip(running.tolist(), right, strict=True)))
    assert off[0] <= 2 * torch.finfo(kept).eps
    assert off[1] > 4 * torch.finfo(kept).eps


def test_the_gradient_of_batch_norm_of_sixteen_bits_has_its_dtypes() -> None:
    x = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(1)).bfloat16()
    ones, zeros = torch.ones(3), torch.zeros(3)
    out, mean, inverse = call(A.native_batch_norm.default, x, ones, zeros, None, None, True, 0.1, 1e-5)
    given = (torch.ones_like(out), x, ones, None, None, mean, inverse, True, 1e-5, [True] * 3)
    own, torchs = (
        call(A.native_batch_norm_backward.default, *given),
        A.native_batch_norm_backward.default(*given),
    )
    for a, b in zip(own, torchs, strict=True):
        assert a.dtype is b.dtype
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("policy", ["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("job", ["digits", "text"])
def test_a_run_recorded_by_tensor_code_matches_by_the_kernels(
    job: str, policy: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What other devices run, in whole steps on the CPU: a device records, a processor audits."""
    settings = {
        "digits": {"batch": "16"},
        "text": {"width": "32", "layers": "1", "batch": "2", "block": "16"},
    }
    run, source = RunDirectory(tmp_path / "run"), find_source(job)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(rows, "_is_cpu", lambda x: False)
        record(Order(source, settings[job], find_policy(policy), steps=3, checkpoint_every=3), run)

    report = audit(run, source)

    assert (report.verdict, report.first) == ("match", None)
