"""Adam, AdamW and SGD in three forms, bit for bit: scalar reference, fused CPU kernel, tensor operations in chunks."""

# pyright: reportPrivateUsage=false
# The tensor path is called directly: from outside it is reached on other devices only.

from __future__ import annotations

import ctypes
import math
import platform
import re
import runpy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tallystick.errors import InvalidInput, Nondeterminism
from tallystick.numerics import optimizers, reference
from tallystick.numerics.kernels import native
from tallystick.numerics.optimizers import Marks, SgdNumbers, adam_numbers, adam_step, power, sgd_step
from tallystick.numerics.reference import FP32_LARGEST, AdamRule, SgdRule
from tallystick.numerics.tensor_measures import fingerprint, fingerprint_all

SUBNORMAL, TINY = 2.0**-149, 2.0**-126
SPECIAL = [0.0, -0.0, SUBNORMAL, -3 * SUBNORMAL, TINY, 1.0, -1.0, 0.1, 2.0**-40, -(2.0**60), 3e38, 1e-20]
ADAM = {
    "adam": AdamRule(1e-3, 0.9, 0.999, 1e-8, 0.0, False),
    "adam with decay": AdamRule(3e-4, 0.9, 0.95, 1e-8, 0.1, False),
    "adamw": AdamRule(1e-3, 0.9, 0.999, 1e-8, 0.01, True),
    "adamw without betas": AdamRule(0.1, 0.0, 0.0, 1e-3, 0.5, True),
}
SGD = {
    "plain": SgdRule(0.1),
    "decay": SgdRule(0.1, weight_decay=5e-4),
    "momentum": SgdRule(0.1, 0.9),
    "dampened": SgdRule(0.3, 0.9, 0.1, 1e-4),
    "nesterov": SgdRule(0.1, 0.9, 0.0, 1e-3, True),
}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
ADAMS = pytest.mark.parametrize("rule", ADAM.values(), ids=ADAM)
SGDS = pytest.mark.parametrize("rule", SGD.values(), ids=SGD)


def float32s(values: list[float]) -> list[float]:
    return torch.tensor(values, dtype=torch.float64).float().double().tolist()


def elements(n: int = 500) -> tuple[list[float], ...]:
    """Parameters, gradients, means and squares: random over forty binades, with special values at the front."""
    generator = np.random.default_rng(4)
    drawn = [generator.standard_normal(n) * np.exp2(generator.uniform(-30, 10, n)) for _ in range(4)]
    drawn[3] = np.abs(drawn[3])
    for row, shift in zip(drawn, (0, 3, 7, 5), strict=True):
        special = np.roll(SPECIAL, shift)
        row[: len(SPECIAL)] = np.clip(special, -1e18, 1e18)
    drawn[3] = np.abs(drawn[3])
    return tuple(float32s(row.tolist()) for row in drawn)


def row(values: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).to(dtype)


def same_bits(tensor: Tensor, values: list[float]) -> bool:
    return tensor.numpy().tobytes() == row(values, tensor.dtype).numpy().tobytes()


def numbers_of(rule: AdamRule, step: int) -> optimizers.AdamNumbers:
    return adam_numbers(
        step, lr=rule.lr, betas=(rule.beta1, rule.beta2), eps=rule.eps,
        weight_decay=rule.weight_decay, decoupled=rule.decoupled,
    )  # fmt: skip


def sgd_numbers(rule: SgdRule) -> SgdNumbers:
    return SgdNumbers(rule.lr, rule.weight_decay, rule.momentum, 1.0 - rule.dampening, rule.nesterov)


def tensor_adam(p: Tensor, g: Tensor, m: Tensor, v: Tensor, numbers: Any, *, name: str) -> None:
    assert optimizers._adam_tensor(p, g, m, v, numbers), name


def tensor_sgd(p: Tensor, g: Tensor, b: Tensor | None, numbers: Any, *, first: bool, name: str) -> None:
    assert optimizers._sgd_tensor(p, g, b, numbers, first=first), name


# ------------------------------------------------------------------------------------------- one body, all forms


@DTYPES
@ADAMS
@pytest.mark.parametrize("step", [1, 2, 1000, 123457])
@pytest.mark.parametrize("form", [adam_step, tensor_adam], ids=["kernel", "tensor"])
def test_adam_equals_the_reference(
    rule: AdamRule, step: int, dtype: torch.dtype, form: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizers, "CHUNK", 37)
    ps, gs, ms, vs = elements()
    expected = [reference.adam(rule, step, *each) for each in zip(ps, gs, ms, vs, strict=True)]
    p, g, m, v = row(ps, dtype), row(gs, dtype), row(ms), row(vs)

    form(p, g, m, v, numbers_of(rule, step), name="weight")

    for tensor, values in zip((p, m, v), zip(*expected, strict=True), strict=True):
        assert same_bits(tensor, list(values))
    assert same_bits(g, gs)


@DTYPES
@SGDS
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("form", [sgd_step, tensor_sgd], ids=["kernel", "tensor"])
def test_sgd_equals_the_reference(
    rule: SgdRule, first: bool, dtype: torch.dtype, form: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizers, "CHUNK", 37)
    ps, gs, bs, _ = elements()
    held = [None if first else b for b in bs]
    expected = [reference.sgd(rule, *each) for each in zip(ps, gs, held, strict=True)]
    p, g, b = row(ps, dtype), row(gs, dtype), torch.zeros(len(bs)) if first else row(bs)

    form(p, g, b if rule.momentum else None, sgd_numbers(rule), first=first, name="weight")

    assert same_bits(p, [value for value, _ in expected])
    if rule.momentum:
        assert same_bits(b, [value for _, value in expected if value is not None])


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("chunk", [4, 96, 1 << 18])
def test_neither_threads_nor_chunks_change_a_bit(
    workers: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ps, gs, ms, vs = elements()
    alone = row(ps), row(gs), row(ms), row(vs)
    adam_step(*alone, numbers_of(ADAM["adamw"], 3), name="weight")
    monkeypatch.setattr(native.in_chunks, "__defaults__", (chunk,))
    monkeypatch.setattr(torch, "get_num_threads", lambda: workers)
    again = row(ps), row(gs), row(ms), row(vs)
    adam_step(*again, numbers_of(ADAM["adamw"], 3), name="weight")

    assert all(
        torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(alone, again, strict=True)
    )


def test_empty_tensors_and_shapes() -> None:
    none = torch.zeros(0)
    adam_step(none, none.clone(), none.clone(), none.clone(), numbers_of(ADAM["adam"], 1), name="none")
    sgd_step(none, none.clone(), None, sgd_numbers(SGD["plain"]), first=True, name="none")
    p, g = torch.ones(2, 3, 4), torch.full((2, 3, 4), 0.5)
    sgd_step(p, g, None, sgd_numbers(SGD["plain"]), first=True, name="cube")
    assert (p == torch.tensor(0.95)).all()


def test_the_order_of_operations_matters() -> None:
    """The control: the same formula with 1 / unbias under the root, as torch has it, gives other bits for some elements."""
    rule, (ps, gs, ms, vs) = ADAM["adamw"], elements(4000)
    p, g, m, v = row(ps), row(gs), row(ms), row(vs)
    numbers = numbers_of(rule, 3)
    adam_step(p, g, m, v, numbers, name="weight")
    x, y, mean, square = (row(values, torch.float64) for values in (ps, gs, ms, vs))
    mean, square = torch.lerp(mean, y, numbers.fresh1), rule.beta2 * square + numbers.fresh2 * y * y
    down = square.sqrt() / math.sqrt(1 - rule.beta2**3) + rule.eps
    other = (x - rule.lr * rule.weight_decay * x - rule.lr / (1 - rule.beta1**3) * mean / down).float()
    assert torch.allclose(p, other, rtol=1e-6, atol=0.0)

    naive = row(ps)  # all in float32
    naive_m = rule.beta1 * row(ms) + numbers.fresh1 * row(gs)
    naive_v = rule.beta2 * row(vs) + numbers.fresh2 * row(gs).square()
    naive = naive * numbers.keep - numbers.rate * naive_m / (naive_v.sqrt() * numbers.unbias + rule.eps)
    assert (naive != p).double().mean() > 0.02


@pytest.mark.parametrize("kind", ["adam", "adamw", "sgd"])
def test_torchs_own_optimizer_in_float64_agrees_to_an_ulp(kind: str) -> None:
    generator = torch.Generator().manual_seed(2)
    start = torch.randn(3000, generator=generator)
    make = {
        "adam": lambda w: torch.optim.Adam([w], lr=1e-2, weight_decay=0.1, foreach=False),
        "adamw": lambda w: torch.optim.AdamW([w], lr=1e-2, weight_decay=0.1, foreach=False),
        "sgd": lambda w: torch.optim.SGD([w], lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
    }[kind]
    weight = torch.nn.Parameter(start.double())
    optimizer = make(weight)
    p, m, v = start.clone(), torch.zeros(3000), torch.zeros(3000)
    for step in range(1, 6):
        g = torch.randn(3000, generator=generator)
        weight.grad = g.double()
        optimizer.step()
        if kind == "sgd":
            sgd_step(p, g, m, sgd_numbers(SGD["nesterov"]), first=step == 1, name="weight")
        else:
            rule = AdamRule(1e-2, 0.9, 0.999, 1e-8, 0.1, kind == "adamw")
            adam_step(p, g, m, v, numbers_of(rule, step), name="weight")
    assert torch.allclose(p.double(), weight.detach(), rtol=1e-6, atol=1e-6)
    assert not torch.equal(p, start)


# -------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(
    ("values", "where"),
    [
        ((math.nan, 0.0, 0.0, 0.0), "weight/parameter: element 9"),
        ((0.0, math.inf, 0.0, 0.0), "weight/parameter: element 9"),
        ((1.0, 0.0, math.nan, 0.0), "weight/parameter: element 9"),
        ((1.0, 0.0, 0.0, -1.0), "weight/parameter: element 9"),
        ((1.0, 3e38, 0.0, 0.0), "weight/exp_avg_sq: element 9"),
        ((1.0, 0.0, 0.0, math.inf), "weight/exp_avg_sq: element 9"),
    ],
)
def test_what_is_not_finite_is_named(
    values: tuple[float, ...], where: str, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native.in_chunks, "__defaults__", (4,))
    monkeypatch.setattr(torch, "get_num_threads", lambda: workers)
    given = [torch.full((20,), 0.5) for _ in range(4)]
    for tensor, value in zip(given, values, strict=True):
        tensor[9] = value
    rule = ADAM["adamw"]
    with pytest.raises(InvalidInput):
        reference.adam(rule, 1, *values)
    with pytest.raises(Nondeterminism, match=f"^{re.escape(where)} is not finite or does not fit float32"):
        adam_step(*given, numbers_of(rule, 1), name="weight")


def test_the_largest_value_stays_and_half_an_ulp_more_is_refused() -> None:
    rule = SgdRule(1.0)
    for gradient, refused in ((-(2.0**102), False), (-(2.0**103), True)):
        p, g = row([1.0, FP32_LARGEST]), row([0.0, gradient])
        if refused:
            with pytest.raises(InvalidInput, match="beyond the largest"):
                reference.sgd(rule, FP32_LARGEST, gradient, None)
            with pytest.raises(Nondeterminism, match="weight/parameter: element 1 "):
                sgd_step(p, g, None, sgd_numbers(rule), first=False, name="weight")
        else:
            sgd_step(p, g, None, sgd_numbers(rule), first=False, name="weight")
            assert same_bits(p, [1.0, FP32_LARGEST])


def test_a_parameter_and_eps_of_zero_divide_by_zero() -> None:
    rule = AdamRule(1e-3, 0.9, 0.999, 0.0, 0.0, False)
    with pytest.raises(InvalidInput, match="not finite"):
        reference.adam(rule, 1, 1.0, 0.0, 0.0, 0.0)
    with pytest.raises(Nondeterminism, match="weight/parameter: element 0"):
        adam_step(torch.ones(1), *torch.zeros(3, 1), numbers_of(rule, 1), name="weight")


def test_betas_too_near_one_are_refused() -> None:
    with pytest.raises(Nondeterminism, match=r"bias corrections 0\.0 and .* at step 1"):
        adam_numbers(1, lr=1.0, betas=(1.0, 0.5), eps=0.0, weight_decay=0.0, decoupled=False)


@pytest.mark.parametrize("betas", [(1.8, 0.5), (0.9, 1.998), (-0.1, 0.5)])
def test_betas_that_are_no_averages_are_refused(betas: tuple[float, float]) -> None:
    with pytest.raises(Nondeterminism, match="both must be above 0"):
        adam_numbers(2, lr=1.0, betas=betas, eps=0.0, weight_decay=0.0, decoupled=False)


# ------------------------------------------------------------------------------------------- powers, and the machine


def test_powers_are_made_by_squaring_alone() -> None:
    for base in (0.9, 0.999, 0.95, 0.5, 0.0):
        for exponent in (0, 1, 2, 3, 7, 1000, 65535, 10**9):
            assert power(base, exponent) == reference.whole_power(base, exponent)
            assert power(base, exponent) == pytest.approx(base**exponent, rel=1e-9)
    assert any(power(0.999, n) != 0.999**n for n in range(2, 200)), "no control: pow() agrees everywhere"


OBJDUMP, CC = shutil.which("objdump"), shutil.which("cc")
FUSED = re.compile(r"\bv?fn?m(add|sub)(sub|add)?\d*[sp][sd]\b|\bfn?m(add|sub)\b|\bfml[as]\b|\bv?(rcp|rsqrt)")
SOURCE = native.FOLDER / "optimizers.c"


def compiled(into: Path, *flags: str) -> str:
    """The machine code of optimizers.c under the build's own flags, with ``flags`` after them."""
    script = runpy.run_path(str(Path(__file__).parents[3] / "scripts" / "compile_kernels.py"))
    subprocess.run(
        [str(CC), *script["FLAGS"].split(), *flags, "-o", str(into), str(SOURCE), "-lm"], check=True
    )
    return subprocess.run([str(OBJDUMP), "-d", str(into)], check=True, capture_output=True, text=True).stdout


@pytest.mark.skipif(CC is None or OBJDUMP is None, reason="needs cc and objdump")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="knows the instructions of x86-64")
def test_no_operation_is_contracted(tmp_path: Path) -> None:
    """In no variant of the machine code is there a fused multiply-add or an estimate; with contraction there is."""
    code = compiled(tmp_path / "strict.so")
    assert re.search(r"\bv?sqrtpd\b", code), "the loops are not vector code"
    assert re.search(r"\bv?divpd\b", code)
    assert FUSED.search(code) is None
    assert FUSED.search(compiled(tmp_path / "loose.so", "-ffp-contract=fast")) is not None


def test_tensors_that_are_not_contiguous_are_never_updated_as_copies() -> None:
    """A copy would be updated and lost."""
    p, g = torch.ones(4, 3).t(), torch.ones(3, 4)
    with pytest.raises(ValueError, match="not contiguous"):
        sgd_step(p, g, None, sgd_numbers(SGD["plain"]), first=True, name="weight")
    with pytest.raises(ValueError, match="not contiguous"):
        adam_step(p, g, torch.zeros(3, 4), torch.zeros(3, 4), numbers_of(ADAM["adam"], 1), name="weight")
    assert (p == 1.0).all()


@pytest.mark.parametrize("begin", [0, 2**31 - 100, 2**31 + 5, 2**33 + 1])
@DTYPES
def test_positions_beyond_two_to_the_31_are_not_cut_short(begin: int, dtype: torch.dtype) -> None:
    """The passes are given addresses so far below the tensors that the tensors begin at element ``begin``."""
    ps, gs, ms, vs = elements(200)
    wanted = row(ps, dtype), row(gs, dtype), row(ms), row(vs)
    adam_step(*wanted, numbers_of(ADAM["adamw"], 3), name="weight")
    found = row(ps, dtype), row(gs, dtype), row(ms), row(vs)
    at = [tensor.data_ptr() - begin * tensor.element_size() for tensor in found]
    n = numbers_of(ADAM["adamw"], 3)
    plain = (n.keep, n.decay, n.beta1, n.fresh1, n.beta2, n.fresh2, n.rate, n.unbias, n.eps)
    numbers = (ctypes.c_double * 9)(*plain)
    kind = 0 if dtype == torch.float32 else 1
    done = native.library().tally_adam(
        at[0], at[1], kind, at[2], at[3], ctypes.addressof(numbers), begin, begin + 200, None
    )
    assert done == 1
    for a, b in zip(found, wanted, strict=True):
        assert a.numpy().tobytes() == b.numpy().tobytes()


@pytest.mark.parametrize("threads", [1, 2])
@DTYPES
def test_fingerprints_are_taken_of_what_is_written(
    dtype: torch.dtype, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "CHUNK", 3000)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    ps, gs, ms, vs = elements(9001)
    p, g, m, v = row(ps, dtype), row(gs, dtype), row(ms), row(vs)
    state = [torch.ones(5), p, m, torch.ones(()), v]
    known = Marks({tensor.data_ptr(): ordinal for ordinal, tensor in enumerate(state)})
    adam_step(p, g, m, v, numbers_of(ADAM["adamw"], 3), name="weight", marks=known)
    assert known.held == {tensor.data_ptr() for tensor in (p, m, v)}
    assert known.taken == sum(fingerprint(tensor, i) for i, tensor in ((1, p), (2, m), (4, v))) % 2**64
    assert (fingerprint_all(state, known.held) + known.taken) % 2**64 == fingerprint_all(state)

    known = Marks({tensor.data_ptr(): ordinal for ordinal, tensor in enumerate(state)})
    sgd_step(p, g, m, sgd_numbers(SGD["nesterov"]), first=False, name="weight", marks=known)
    sgd_step(v, row(gs), None, sgd_numbers(SGD["plain"]), first=False, name="other", marks=known)
    assert (fingerprint_all(state, known.held) + known.taken) % 2**64 == fingerprint_all(state)

    stranger = Marks({p.data_ptr(): 0})
    sgd_step(p, g, m, sgd_numbers(SGD["nesterov"]), first=False, name="weight", marks=stranger)
    assert (stranger.taken, stranger.held) == (0, set()), "of a tensor without a number none is taken"
