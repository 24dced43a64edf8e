"""Decision sites of every operator that jumps; what is refused; which modules run."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import deterministic

from tallystick.errors import Nondeterminism
from tallystick.execution.determinism import repeatable
from tallystick.execution.dispatch import handlers
from tallystick.execution.dispatch.boundaries import sampled_rms
from tallystick.execution.dispatch.operator_noise import OPERATOR_NOISE
from tallystick.execution.dispatch.table import (
    BUCKETS,
    CHOICES,
    COMPARISONS,
    EXACT,
    INSTEAD,
    LATTICES,
    LOGICAL,
    RANDOM,
    RESTRICTED,
    SMOOTH,
    SWITCHES,
)
from tallystick.numerics.log import Frame, SiteAddress, SparseEntries, decode_decision, encode_decision

SPREAD = (-2.3, 0.9, 1.7, 0.0, -1.1, 0.2, 2.6, -0.6)  # element 3 is put beside the switching point
AT, RIVAL = 3, 5


@dataclass(frozen=True)
class Case:
    """A function of eight numbers that jumps where element 3 crosses ``point`` (None: crosses element 5)."""

    function: Callable[[Tensor], Tensor]
    point: float | None = 0.0
    exact: bool = False  # the trainer's element lies on the point itself


def at_least(flag: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.where(flag(x), 2.0 * x + 1.0, x)


def chosen(index: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: x.square().gather(0, index(x).reshape(-1))


def pool(function: Callable[..., Tensor], *shape: int) -> Callable[[Tensor], Tensor]:
    return lambda x: function(x.reshape(1, 1, *shape)).square()


def points(x: Tensor) -> Tensor:
    return torch.tensor([[-1.5, 0.4, 0.4, 2.0], [-2.0, 0.0, 1.0, 1.5]], dtype=x.dtype)


CASES: dict[str, Case] = {
    "aten::relu": Case(F.relu),
    "aten::sign": Case(lambda x: x * torch.sign(x.detach() * 1.0)),
    "aten::sgn": Case(torch.abs),  # the backward pass of abs
    "aten::threshold": Case(lambda x: F.threshold(x, 0.5, 0.1), 0.5),
    "aten::threshold_backward": Case(lambda x: F.threshold(x, 0.5, 0.5), 0.5),
    "aten::hardtanh_backward": Case(lambda x: F.hardtanh(x, -0.4, 0.4), 0.4),
    "aten::leaky_relu_backward": Case(F.leaky_relu),
    "aten::elu_backward": Case(lambda x: F.elu(x, alpha=0.5)),
    "aten::hardswish_backward": Case(F.hardswish, 3.0),
    "aten::hardsigmoid_backward": Case(F.hardsigmoid, -3.0),
    "aten::_prelu_kernel_backward": Case(lambda x: F.prelu(x, torch.full((1,), 0.2, dtype=x.dtype))),
    "aten::hardshrink": Case(F.hardshrink, -0.5),
    "aten::hardshrink_backward": Case(F.hardshrink, 0.5),
    "aten::softshrink_backward": Case(F.softshrink, 0.5),
    "aten::softplus": Case(lambda x: F.softplus(x, beta=1.0, threshold=0.7), 0.7),
    "aten::softplus_backward": Case(lambda x: F.softplus(x, beta=2.0, threshold=1.0), 0.5),
    "aten::gt": Case(at_least(lambda x: x > 0.3), 0.3),
    "aten::ge": Case(at_least(lambda x: x >= 0.3), 0.3),
    "aten::lt": Case(at_least(lambda x: x < 0.3), 0.3),
    "aten::le": Case(at_least(lambda x: x <= x.roll(-2)), None),
    "aten::eq": Case(at_least(lambda x: x == 0.25), 0.25, exact=True),
    "aten::ne": Case(at_least(lambda x: x != x.roll(-2)), None, exact=True),
    "aten::floor": Case(lambda x: x * torch.floor(x.detach()), 1.0),
    "aten::ceil": Case(lambda x: x * torch.ceil(x.detach()), 1.0),
    "aten::trunc": Case(lambda x: x * torch.trunc(x.detach()), -1.0),
    "aten::frac": Case(torch.frac, 2.0),
    "aten::round": Case(lambda x: x * torch.round(x.detach()), 0.5),
    "aten::max_pool2d_with_indices": Case(pool(lambda x: F.max_pool2d(x, 2, stride=2), 4, 2), None),
    "aten::max_pool3d_with_indices": Case(pool(lambda x: F.max_pool3d(x, 2), 2, 2, 2), None),
    "aten::adaptive_max_pool2d": Case(pool(lambda x: F.adaptive_max_pool2d(x, (1, 2)), 2, 4), None),
    "aten::adaptive_max_pool3d": Case(pool(lambda x: F.adaptive_max_pool3d(x, 1), 2, 2, 2), None),
    "aten::max.dim": Case(lambda x: x.max(dim=0, keepdim=True).values.square(), None),
    "aten::min.dim": Case(lambda x: x.reshape(2, 4).min(dim=0).values.square(), None),
    "aten::argmax": Case(chosen(lambda x: x.argmax()), None),
    "aten::argmin": Case(chosen(lambda x: x.reshape(2, 4).argmin(dim=1) + torch.tensor([0, 4])), None),
    "aten::topk": Case(lambda x: x.topk(3).values.square(), None),
    "aten::sort": Case(lambda x: x.sort(descending=True).values.square(), None),
    "aten::median.dim": Case(
        lambda x: torch.cat((x, torch.arange(5.0, 11.0, dtype=x.dtype))).median(dim=0).values.square(), None
    ),
    "aten::kthvalue": Case(lambda x: x.reshape(8, 1).kthvalue(7, dim=0).values.square(), None),
    "aten::any": Case(at_least(lambda x: x.reshape(8, 1).any(dim=1)), exact=True),
    "aten::all": Case(at_least(lambda x: x.reshape(8, 1).all(dim=1)), exact=True),
    "aten::logical_not": Case(at_least(torch.logical_not), exact=True),
    "aten::logical_and": Case(at_least(lambda x: x.logical_and(torch.ones(8, dtype=torch.bool))), exact=True),
    "aten::logical_or": Case(
        at_least(lambda x: (x.detach() * 1.0).logical_or_(torch.zeros(8, dtype=torch.bool)) > 0.5), exact=True
    ),
    "aten::logical_xor": Case(at_least(lambda x: x.logical_xor(x.roll(-2))), exact=True),
    "aten::nonzero": Case(
        at_least(lambda x: torch.zeros(8).index_fill(0, x.nonzero()[:, 0], 1.0) > 0), exact=True
    ),
    "aten::bucketize": Case(lambda x: x * torch.bucketize(x.detach(), points(x)[0], right=True), 0.4),
    "aten::searchsorted": Case(
        lambda x: x * torch.searchsorted(points(x), x.detach().reshape(2, 4)).reshape(8), 0.4
    ),
    "aten::histc": Case(lambda x: x * torch.histc(x.detach(), 4, -4.0, 4.0).repeat(2), 2.0),
}


def inputs(name: str, case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The trainer's input and the auditor's: element 3 just above, and just below, the point where the operator jumps."""
    x = torch.tensor(SPREAD, dtype=torch.float64)
    away = 1e-13 if dtype == torch.float64 else 4e-7
    if case.point is not None:
        x[AT] = case.point
    else:
        x[AT] = x[RIVALS.get(name, RIVAL)] = 3.1 if "min" not in name else -3.1
    trainer, auditor = x.clone(), x.clone()
    trainer[AT] += 0.0 if case.exact else away
    auditor[AT] -= away
    return trainer.to(dtype), auditor.to(dtype)


RIVALS = {  # the element that competes with element 3 where it is not element 5
    "aten::max_pool2d_with_indices": 2,  # windows of a 4 by 2 image are pairs of rows
    "aten::adaptive_max_pool2d": 2,  # the windows of 2 by 4 are its left and right halves
    "aten::min.dim": 7,
    "aten::argmin": 1,
}


def test_every_operator_of_the_tables_has_a_case() -> None:
    assert set(CASES) == set(SWITCHES) | set(LATTICES) | CHOICES | BUCKETS | LOGICAL


KNOWN: dict[str, Callable[[Tensor], Tensor]] = {
    "a mask of its shape": lambda x: x.masked_fill(torch.zeros_like(x, dtype=torch.bool), 0.0).square(),
    "indices of its shape": lambda x: x[torch.ones_like(x, dtype=torch.long).cumsum(0) - 1].square(),
    "numbers beside it": lambda x: x[x.new_zeros(2, dtype=torch.long) + x.new_full((), 3, dtype=torch.long)],
    "clip_grad_value_": lambda x: (torch._foreach_clamp_min_([x.detach().clone()], -0.5), 2.0 * x)[1],
    "the product with a conjugate": lambda x: torch.complex(x[:4], x[4:]).reshape(2, 2).mH.imag.square(),
    "forward mode": lambda x: torch.func.jvp(torch.sin, (x,), (torch.ones_like(x),))[1],
    "aminmax": lambda x: x.aminmax().max - x.aminmax().min,
    "median": lambda x: x.median().square(),
    "masked_scatter": lambda x: torch.zeros_like(x).masked_scatter(torch.arange(8) % 2 == 0, x).square(),
    "max_unpool2d": lambda x: F.max_unpool2d(
        *F.max_pool2d(x.reshape(1, 1, 4, 2), 2, return_indices=True), 2
    ).square(),
    "the derivative of digamma": lambda x: torch.digamma(x.abs() + 1.0),
}


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.script.*:DeprecationWarning"
)  # torch itself, for forward mode
@pytest.mark.parametrize("what", KNOWN)
def test_operators_that_copy_or_choose_without_a_jump_are_followed(what: str, branches: Any) -> None:
    x = torch.tensor(SPREAD, dtype=getattr(torch, branches.policy.compute))
    trainer = branches.record(KNOWN[what], x)

    follower = branches.follow(KNOWN[what], x, trainer.frame)

    assert follower.violations == []
    assert torch.equal(follower.gradient, trainer.gradient)


@pytest.mark.parametrize("name", CASES)
def test_a_follower_takes_the_recorded_branch_forward_and_backward(name: str, branches: Any) -> None:
    case = CASES[name]
    dtype = getattr(torch, branches.policy.compute)
    trainer_x, auditor_x = inputs(name, case, dtype)
    trainer = branches.record(case.function, trainer_x)
    assert len(trainer.frame) > 0, "the recorder must log the ambiguous element"

    follower = branches.follow(case.function, auditor_x, trainer.frame)

    close = {"atol": 1e-11 if dtype == torch.float64 else 5e-5, "rtol": 0.0}
    assert follower.violations == []
    torch.testing.assert_close(follower.output, trainer.output, **close)
    torch.testing.assert_close(follower.gradient, trainer.gradient, **close)
    # The control: without the log the auditor goes the other way.
    alone = branches.record(case.function, auditor_x)
    outputs = (alone.output - trainer.output).abs().max()
    gradients = (alone.gradient - trainer.gradient).abs().max()
    assert max(outputs, gradients) > 1e-3


@pytest.mark.parametrize("name", CASES)
def test_an_entry_far_from_its_switching_point_is_a_violation_and_not_obeyed(
    name: str, branches: Any
) -> None:
    case = CASES[name]
    dtype = getattr(torch, branches.policy.compute)
    trainer_x, auditor_x = inputs(name, case, dtype)
    trainer = branches.record(case.function, trainer_x)
    auditor_x[AT] -= 0.011
    alone = branches.record(case.function, auditor_x)
    follower = branches.follow(case.function, auditor_x, trainer.frame)
    assert len(follower.violations) >= 1
    assert all("twice the band" in violation.rule for violation in follower.violations)
    assert torch.equal(follower.output, alone.output)
    assert torch.equal(follower.gradient, alone.gradient)


@pytest.mark.parametrize("name", CASES)
def test_an_input_away_from_every_switching_point_is_not_logged(name: str, branches: Any) -> None:
    case = CASES[name]
    x = torch.tensor(
        (-2.33, 0.91, 1.72, 0.63, -1.14, 0.21, 2.64, -0.66), dtype=getattr(torch, branches.policy.compute)
    )
    assert len(branches.record(case.function, x).frame) == 0


def _assigned(x: Tensor) -> Tensor:
    whole = torch.zeros(8, dtype=torch.int32)
    whole[:] = x
    return whole


IN_PLACE: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "relu_": (lambda x: F.relu_(x * 1.0), 0.0),
    "leaky_relu_": (lambda x: F.leaky_relu_(x * 1.0, 0.1), 0.0),
    "elu_": (lambda x: F.elu_(x * 1.0, 0.5), 0.0),
    "hardtanh_": (lambda x: F.hardtanh_(x * 1.0, -0.4, 0.4), 0.4),
    "threshold_": (lambda x: F.threshold_(x * 1.0, 0.5, 0.1), 0.5),
    "floor_": (lambda x: x * (x.detach() * 1.0).floor_(), 1.0),
    "gt_": (lambda x: x * (x.detach() * 1.0).gt_(0.3), 0.3),
    "gt_ of tensors": (lambda x: x * (x.detach() * 1.0).gt_(torch.full_like(x, 0.3)), 0.3),
    "Hardswish module": (lambda x: nn.Hardswish(inplace=True)(x * 1.0), 3.0),
    "ReLU module": (lambda x: nn.ReLU(inplace=True)(x * 1.0), 0.0),
    "a cast": (lambda x: x * x.detach().long(), 2.0),
    "a copy into whole numbers": (lambda x: x * torch.zeros(8, dtype=torch.int64).copy_(x.detach()), 2.0),
    "an assignment to whole numbers": (lambda x: x * _assigned(x.detach()), 2.0),
}


@pytest.mark.parametrize("form", IN_PLACE)
def test_forms_in_place_follow_too(form: str, branches: Any) -> None:
    function, point = IN_PLACE[form]
    case = Case(function, point)
    trainer_x, auditor_x = inputs("aten::relu", case, getattr(torch, branches.policy.compute))
    trainer = branches.record(function, trainer_x)
    follower = branches.follow(function, auditor_x, trainer.frame)
    assert follower.violations == []
    torch.testing.assert_close(follower.output, trainer.output, atol=5e-5, rtol=0.0)
    torch.testing.assert_close(follower.gradient, trainer.gradient, atol=5e-5, rtol=0.0)
    alone = branches.record(function, auditor_x)
    difference = (alone.gradient - trainer.gradient).abs().max() + (alone.output - trainer.output).abs().max()
    assert difference > 1e-3


INTO: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gt": lambda x, out: torch.gt(x, 0.0, out=out),
    "gt of tensors": lambda x, out: torch.gt(x, x * 0.0, out=out),
    "floor": lambda x, out: torch.floor(x, out=out),
    "div": lambda x, out: torch.div(x, 0.25, rounding_mode="floor", out=out),
    "logical_and": lambda x, out: torch.logical_and(x, x, out=out),
    "atan2": lambda x, out: torch.atan2(x, x * 0.0 - 1.0, out=out),
    "rand": lambda x, out: torch.rand(8, out=out),
    "bernoulli": lambda x, out: torch.bernoulli(x.abs() / 4.0, out=out),
    "normal": lambda x, out: torch.normal(x, 1.0, out=out),
    "sums": lambda x, out: torch.sum(x.reshape(8, 1), 1, out=out),
    "multinomial": lambda x, out: torch.multinomial(x.abs(), 3, out=out.long()).to(x.dtype),
    "relu of another shape": lambda x, out: torch.clamp(x, min=0.0, out=out[:0].clone()),
}


@pytest.mark.parametrize("name", INTO)
def test_a_result_is_written_where_a_program_wants_it_and_nowhere_else(name: str, branches: Any) -> None:
    """Operators with a decision wrote it into what they read, and what was to have it stayed as it was."""
    dtype = getattr(torch, branches.policy.compute)
    x = torch.tensor(SPREAD, dtype=dtype)
    seen: list[Tensor] = []

    def inside(t: Tensor) -> Tensor:
        given, out = t.detach().clone(), torch.full((8,), -77.0, dtype=dtype)
        kept = given.clone()
        found = INTO[name](given, out)
        seen.extend((found, out, given - kept))
        return t * 1.0

    branches.record(inside, x)
    found, out, changed = seen
    assert not changed.any()
    assert not (found == -77.0).any()
    if name not in ("multinomial", "relu of another shape"):
        assert torch.equal(found, out) and found.shape == (8,)
    plain = {"gt": (x > 0.0).to(dtype), "floor": x.floor(), "atan2": torch.atan2(x, x * 0.0 - 1.0),
             "div": torch.div(x, 0.25, rounding_mode="floor")}  # fmt: skip
    if name in plain:
        torch.testing.assert_close(found.to(dtype), plain[name])


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.reshape(2, 4).t(),
    "every second": lambda x: torch.stack((x, x + 7.0), dim=1).reshape(-1)[::2],
    "channels last": lambda x: x.reshape(1, 2, 2, 2).contiguous(memory_format=torch.channels_last),
    "expanded": lambda x: x.reshape(1, 8).expand(3, 8),
}


@pytest.mark.parametrize(
    ("operator", "layout"),
    [*((o, layout) for o in ("relu", "round", "gt") for layout in LAYOUTS), ("pool", "channels last")],
)
def test_the_memory_layout_does_not_matter(layout: str, operator: str, branches: Any) -> None:
    function: dict[str, tuple[Callable[[Tensor], Tensor], float | None]] = {
        "relu": (F.relu, 0.0),
        "round": (lambda x: x * torch.round(x.detach()), 0.5),
        "gt": (at_least(lambda x: x > 0.3), 0.3),
        "pool": (
            lambda x: F.max_pool2d(x.unsqueeze(0) if x.dim() == 3 else x, 2, stride=1, padding=1).square(),
            None,
        ),
    }
    inside, point = function[operator]
    change = LAYOUTS[layout]
    dtype = getattr(torch, branches.policy.compute)
    name = "aten::relu" if point is not None else "aten::argmax"
    trainer_x, auditor_x = inputs(name, Case(inside, point), dtype)
    if operator == "pool":  # element 2 stands beside element 3 in the image
        trainer_x[2] = auditor_x[2] = 3.1
    trainer = branches.record(lambda x: inside(change(x)), trainer_x)
    follower = branches.follow(lambda x: inside(change(x)), auditor_x, trainer.frame)
    assert follower.violations == []
    assert len(trainer.frame) > 0
    torch.testing.assert_close(follower.output, trainer.output, atol=5e-5, rtol=0.0)
    torch.testing.assert_close(follower.gradient, trainer.gradient, atol=5e-5, rtol=0.0)


def forged(frame: Frame, width: int, symbol: Callable[[int], int]) -> Frame:
    """A frame whose decisions state other symbols at the same elements."""
    payloads: dict[SiteAddress, bytes] = {}
    for address, payload in frame:
        numel = 8 if width == 2 else None
        band, entries = decode_decision(payload, numel or 8, width)
        symbols = entries.symbols.copy()
        for i, old in enumerate(entries.symbols):
            symbols[i] = symbol(int(old))
        payloads[address] = encode_decision(band, SparseEntries(entries.n, width, entries.indexes, symbols))
    return Frame.of(payloads)


def test_a_symbol_that_names_no_side_is_a_violation(branches: Any) -> None:
    trainer_x, auditor_x = inputs("aten::relu", CASES["aten::relu"], getattr(torch, branches.policy.compute))
    frame = branches.record(F.relu, trainer_x).frame
    assert branches.follow(F.relu, auditor_x, forged(frame, 2, lambda s: s)).violations == []
    follower = branches.follow(F.relu, auditor_x, forged(frame, 2, lambda s: 3))
    assert [v.element for v in follower.violations] == [AT]
    assert torch.equal(follower.output, F.relu(auditor_x))


def test_an_index_twice_in_one_row_is_a_violation(branches: Any) -> None:
    """Two near-equal elements may change places; the same one may not stand at both ranks."""

    def ranks(x: Tensor) -> Tensor:
        return x.sort(descending=True).values.square()

    trainer_x, auditor_x = inputs("aten::sort", CASES["aten::sort"], getattr(torch, branches.policy.compute))
    frame = branches.record(ranks, trainer_x).frame
    assert branches.follow(ranks, auditor_x, frame).violations == []
    swapped = branches.follow(ranks, auditor_x, forged(frame, 3, lambda s: AT + RIVAL - s))
    assert swapped.violations == [], "either order is honest"
    follower = branches.follow(ranks, auditor_x, forged(frame, 3, lambda s: AT))
    assert len(follower.violations) == 1
    assert torch.equal(follower.output, ranks(auditor_x))


def test_an_index_outside_its_window_is_a_violation(branches: Any) -> None:
    def image(x: Tensor) -> Tensor:  # 6 places: indexes have three bits, and 6 and 7 are none
        return F.max_pool2d(x[:6].reshape(1, 1, 2, 3), (2, 2), stride=1).square()

    dtype = getattr(torch, branches.policy.compute)
    x = torch.tensor([0.1, 0.2, 2.0, -0.4, 0.3, 2.0, 0.0, 0.0], dtype=dtype)
    frame = branches.record(image, x).frame
    ((address, payload),) = list(frame)
    band, entries = decode_decision(payload, 2, 3)
    assert entries.indexes.tolist() == [1]
    for symbol, honest in ((2, True), (5, True), (1, False), (0, False), (6, False), (7, False)):
        other = SparseEntries(2, 3, entries.indexes, entries.symbols * 0 + symbol)
        follower = branches.follow(image, x, Frame.of({address: encode_decision(band, other)}))
        assert (follower.violations == []) is honest, symbol
        assert torch.equal(follower.output, image(x))


def test_zeros_that_a_relu_leaves_under_a_pool_are_not_logged(branches: Any) -> None:
    x = torch.full((1, 1, 4, 4), -1.0, dtype=getattr(torch, branches.policy.compute))
    x[0, 0, 2:, 2:] = torch.tensor([[0.3, 0.9], [0.1, 1.4]])
    assert len(branches.record(lambda t: F.max_pool2d(F.relu(t), 2), x).frame) == 0
    ties = torch.full((1, 1, 4, 4), 0.75, dtype=x.dtype)
    assert len(branches.record(lambda t: F.max_pool2d(t, 2), ties).frame) == 1
    masked = torch.tensor([0.0, 0.0, -math.inf, 0.0]).reshape(1, 1, 2, 2)  # nothing there but zeros either
    assert len(branches.record(lambda t: F.max_pool2d(t, 2), masked).frame) == 0


@pytest.mark.parametrize("least", [-math.inf, None])
@pytest.mark.parametrize("size", [2.0**-12, 2.0**12])
def test_what_masks_an_element_says_nothing_of_the_size_of_the_others(
    least: float | None, size: float, branches: Any
) -> None:
    """Scores of a router, half of them masked by minus infinity or by the least number that there is."""
    dtype = getattr(torch, branches.policy.compute)
    mask = torch.finfo(dtype).min if least is None else least
    trainer_x, auditor_x = (x * size for x in inputs("aten::topk", CASES["aten::topk"], dtype))

    def best(x: Tensor) -> Tensor:
        scores = torch.cat((x, torch.full((56,), mask, dtype=dtype)))
        return (scores.topk(3).indices * (x.sum() / x.sum().detach())).to(dtype)

    trainer = branches.record(best, trainer_x)
    assert len(trainer.frame) == 1
    follower = branches.follow(best, auditor_x, trainer.frame)
    alone = branches.record(best, auditor_x)
    assert follower.violations == []
    assert torch.equal(follower.output.round(), trainer.output.round())
    assert not torch.equal(alone.output.round(), trainer.output.round())
    auditor_x[AT] -= 0.011 * size
    assert len(branches.follow(best, auditor_x, trainer.frame).violations) == 1


def test_hits_of_a_lattice_point_are_logged_where_nobody_has_seen_that_they_stay(branches: Any) -> None:
    dtype = getattr(torch, branches.policy.compute)
    x = torch.linspace(0.3, 5.1, 64, dtype=dtype)
    x[10] = 3.0
    frame = branches.record(lambda t: t * torch.floor(t.detach()), x).frame
    assert len(frame) == 1
    off = x.clone()
    off[10] = torch.nextafter(off[10], torch.tensor(0.0, dtype=dtype))
    follower = branches.follow(lambda t: t * torch.floor(t.detach()), off, frame)
    torch.testing.assert_close(follower.output[10], torch.tensor(9.0, dtype=dtype))
    counts = torch.arange(64, dtype=dtype)
    assert len(branches.record(lambda t: t * torch.floor(t.detach()), counts).frame) == 1


def test_halfway_between_two_lattice_points_nothing_is_near_either(branches: Any) -> None:
    whole = (
        2.0**52 if branches.policy.compute == "float64" else 2.0**22
    )  # half a unit is the last bit there: noise reaches far
    x = (torch.arange(64, dtype=torch.float64) + whole / 2 + 0.5).to(getattr(torch, branches.policy.compute))
    assert len(branches.record(lambda t: t * torch.floor(t.detach()), x).frame) == 0
    assert len(branches.record(lambda t: t * torch.floor(t.detach()), x + 0.5).frame) == 1


JUMPS: dict[str, Callable[[Tensor], Tensor]] = {
    "nanmedian": lambda x: x.nanmedian(dim=0).values,
    "cummax": lambda x: x.cummax(0).values,
    "renorm": lambda x: x.reshape(2, 4).renorm(2, 0, 0.5),
    "mode": lambda x: x.mode().values,
    "_unique2": lambda x: x * x.detach().unique().numel(),
    "signbit": lambda x: x * torch.signbit(x.detach()),
    "copysign": lambda x: torch.copysign(x, x.detach().flip(0)),
    "heaviside": lambda x: x * torch.heaviside(x.detach(), x.detach()),
    "angle": lambda x: x * torch.angle(x.detach()),
    "linalg_qr": lambda x: torch.linalg.qr(x.reshape(4, 2))[1],
    "multi_margin_loss": lambda x: F.multi_margin_loss(x.reshape(2, 4), torch.tensor([0, 2])),
}


@pytest.mark.parametrize("name", JUMPS)
def test_an_operator_outside_the_table_is_refused_by_name(name: str, branches: Any) -> None:
    x = torch.tensor(SPREAD, dtype=getattr(torch, branches.policy.compute))
    said = rf"operator aten\.{name}\S*: not in the operator table, as it jumps .*; instead: "
    with pytest.raises(Nondeterminism, match=said + re.escape(INSTEAD[f"aten::{name}"])):
        branches.record(JUMPS[name], x)


def test_what_to_write_instead_is_said_of_operators_that_torch_has_and_no_table_does() -> None:
    listed = {name.partition(".")[0] for name in SMOOTH | EXACT | RANDOM | CHOICES | set(SWITCHES)}
    for name in INSTEAD:
        assert hasattr(torch.ops.aten, name.removeprefix("aten::")), name
        assert name not in listed


def test_the_same_operators_on_whole_numbers_are_let_through(branches: Any) -> None:
    def inside(x: Tensor) -> Tensor:
        counts = torch.arange(8)
        return x * (
            counts % 3 + counts // 2 + counts.median() + counts.unique().numel() + counts.logical_not()
        )

    x = torch.tensor(SPREAD, dtype=getattr(torch, branches.policy.compute))
    assert torch.equal(branches.record(inside, x).output, inside(x))


def apart(x: Tensor, p: float) -> Tensor:
    return torch.cdist(x.reshape(4, 2), x.reshape(4, 2).flip(0) + 3, p=p)


RESTRICTED_FORMS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "aten::round": (
        lambda x: x * torch.round(x.detach(), decimals=1),
        lambda x: x * torch.round(x.detach() * 10) / 10,
    ),
    "aten::_embedding_bag": (
        lambda x: F.embedding_bag(torch.tensor([[0, 1], [2, 3]]), x.reshape(4, 2), mode="max"),
        lambda x: F.embedding_bag(torch.tensor([[0, 1], [2, 3]]), x.reshape(4, 2), mode="mean"),
    ),
    "aten::segment_reduce": (
        lambda x: torch.segment_reduce(x, "max", lengths=torch.tensor([3, 5])),
        lambda x: torch.segment_reduce(x, "sum", lengths=torch.tensor([3, 5])),
    ),
    "aten::_cdist_forward": (functools.partial(apart, p=0.0), lambda x: x * apart(x.detach(), p=1.0).sum()),
    "aten::_cdist_backward": (functools.partial(apart, p=1.0), functools.partial(apart, p=1.5)),
    "aten::linalg_vector_norm": (
        lambda x: x * torch.linalg.vector_norm(x.detach(), 0),
        lambda x: x * torch.linalg.vector_norm(x.detach(), 3),
    ),
    "aten::norm": (
        lambda x: x * torch.ops.aten.norm.Scalar(x.detach(), 0),
        lambda x: x * torch.ops.aten.norm.Scalar(x.detach(), 3),
    ),
    "aten::view": (
        lambda x: x * (x.detach().view(torch.uint8)[:8] & 1),
        lambda x: x * x.detach().view(2, 4).reshape(8),
    ),
    "aten::view_copy": (
        lambda x: x * (torch.view_copy(x.detach(), torch.uint8)[:8] & 1),
        lambda x: x * torch.view_copy(x.detach(), [2, 4]).reshape(8),
    ),
}


@pytest.mark.parametrize("name", RESTRICTED_FORMS)
def test_a_jumping_form_of_a_listed_operator_is_refused_and_its_smooth_form_is_not(
    name: str, branches: Any
) -> None:
    jumping, smooth = RESTRICTED_FORMS[name]
    x = torch.tensor(SPREAD, dtype=getattr(torch, branches.policy.compute))
    restriction = RESTRICTED[name]
    with pytest.raises(Nondeterminism, match=f"jumps with {restriction.argument}=.*{restriction.reason}"):
        branches.record(jumping, x)
    assert branches.record(smooth, x).output.isfinite().all()


def test_every_restricted_form_has_a_case() -> None:
    """Those of torchvision have one in ``test_suppression.py``, which declares the operator where torchvision is not there."""
    others = {
        "aten::_embedding_bag_forward_only",
        "torchvision::roi_align",
        "torchvision::_roi_align_backward",
    }
    assert set(RESTRICTED_FORMS) == set(RESTRICTED) - others


@torch.library.custom_op("tallystick_tests::cube", mutates_args=())
def cube(x: Tensor) -> Tensor:
    """An operator nobody has heard of."""
    return x * x * x


def _cube_backward(context: Any, gradient: Tensor) -> Tensor:
    return 3.0 * gradient * context.saved_tensors[0].square()


cube.register_autograd(
    _cube_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


def test_a_custom_operator_is_refused_by_name_and_runs_when_declared_smooth(branches: Any) -> None:
    x = torch.tensor(SPREAD, dtype=getattr(torch, branches.policy.compute))
    with pytest.raises(Nondeterminism, match=r'declare it .* smooth=\("tallystick_tests::cube",\)'):
        branches.record(cube, x)
    declared = branches.record(cube, x, smooth=frozenset({"tallystick_tests::cube"}))
    torch.testing.assert_close(declared.output, x**3)
    torch.testing.assert_close(declared.gradient, 3 * x**2 * torch.linspace(1, 2, 8, dtype=x.dtype))


def as_complex(x: Tensor) -> Tensor:
    return torch.complex(x[:4], x[4:])


OF_COMPLEX_NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "angle": torch.angle,
    "log": torch.log,
    "log10": torch.log10,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "atan": torch.atan,
    "acosh": torch.acosh,
    "pow": lambda z: z**0.5,
    "pow of both": lambda z: z**z,
    "pow of a negative number": lambda z: torch.pow(-2.0, z),
    "eq": lambda z: z == z.flip(0),
    "ne": lambda z: z != 1.0,
    "equal": lambda z: torch.tensor(torch.equal(z, z * 1.0)),
    "any": lambda z: z.any(),
    "nonzero": torch.nonzero,
    "logical_and": lambda z: z.logical_and(z),
    "eigenvalues": lambda z: torch.linalg.eigh(z.reshape(2, 2))[0],
}


@pytest.mark.parametrize("name", OF_COMPLEX_NUMBERS)
def test_what_jumps_of_complex_numbers_is_refused(name: str, branches: Any) -> None:
    x = torch.tensor(SPREAD, dtype=getattr(torch, branches.policy.compute))
    with pytest.raises(Nondeterminism, match=r"jumps, of complex numbers|not in the operator table"):
        branches.record(lambda t: t * OF_COMPLEX_NUMBERS[name](as_complex(t.detach())).real.sum(), x)


def test_what_is_smooth_of_complex_numbers_is_followed(branches: Any) -> None:
    def spectrum(t: Tensor) -> Tensor:
        z = torch.fft.rfft(t)
        return torch.fft.irfft(z**2 * z.conj() + z.exp() * 1e-3 + 1.1**z, n=8) + (z.abs() + z.real).sum()

    x = torch.tensor(SPREAD, dtype=getattr(torch, branches.policy.compute))
    trainer = branches.record(spectrum, x)
    follower = branches.follow(spectrum, x, trainer.frame)
    assert follower.violations == [] and torch.equal(follower.gradient, trainer.gradient)


@pytest.mark.parametrize("form", ["plain", "in place", "across"])
def test_an_angle_jumps_where_a_point_crosses_the_left_half_of_the_axis(form: str, branches: Any) -> None:
    dtype = getattr(torch, branches.policy.compute)

    def angle(y: Tensor) -> Tensor:
        if form == "in place":
            return (y * 1.0).atan2_(torch.full((8,), -1.5, dtype=dtype))
        x = torch.full((3, 1), -1.5, dtype=dtype) if form == "across" else torch.full((8,), -1.5, dtype=dtype)
        return torch.atan2(y, x).sum(dim=0) if form == "across" else torch.atan2(y, x)

    trainer_x, auditor_x = inputs("aten::relu", Case(angle, 0.0), dtype)
    trainer = branches.record(angle, trainer_x)
    follower = branches.follow(angle, auditor_x, trainer.frame)
    assert follower.violations == []
    torch.testing.assert_close(follower.output, trainer.output, atol=1e-5, rtol=0.0)
    torch.testing.assert_close(follower.gradient, trainer.gradient, atol=1e-5, rtol=1e-5)
    assert (branches.record(angle, auditor_x).output - trainer.output).abs().max() > 6.0
    right = branches.record(lambda y: torch.atan2(y, torch.full((8,), 1.5, dtype=dtype)), trainer_x)
    assert len(right.frame) == 0, "on the right it does not jump"
    signed = branches.record(lambda y: torch.atan2(y * 0.0, torch.full((8,), -1.0, dtype=dtype)), trainer_x)
    assert (signed.output > 3.0).all(), "a zero has no sign that decides"


class Turning:
    """Stands for a pass that obeys a log which turns every element."""

    def forced(self, x: Tensor, nearest: Callable[[Tensor], Tensor], spacing: float = math.inf) -> Tensor:
        return -x


def test_what_lies_on_the_right_half_is_turned_by_no_log() -> None:
    """Under bf16 elements without a switching point were moved to none, and their angle was no number."""
    y = torch.tensor([0.5, -0.5, 0.0, 2.0])
    x = torch.tensor([-1.0, 1.0, -0.0, 3.0])
    found = handlers._angle(Turning(), torch.ops.aten.atan2.default, (y, x), {})  # type: ignore[arg-type]
    assert torch.equal(found, torch.atan2(torch.tensor([-0.5, -0.5, 0.0, 2.0]), x + 0.0))


def test_a_threshold_at_zero_is_refused(branches: Any) -> None:
    x = torch.tensor(SPREAD, dtype=getattr(torch, branches.policy.compute))
    with pytest.raises(Nondeterminism, match="threshold 0 cannot be told from a ReLU"):
        branches.record(lambda t: F.threshold(t, 0.0, -1.0), x)


def test_pools_with_unequal_windows_are_refused(branches: Any) -> None:
    x = torch.tensor(SPREAD, dtype=getattr(torch, branches.policy.compute))
    with pytest.raises(Nondeterminism, match="windows of unequal size"):
        branches.record(lambda t: F.adaptive_max_pool1d(t.reshape(1, 1, 8), 3), x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_cast_below_the_compute_precision_is_refused_under_fp32_and_lifted_under_fp64(
    dtype: torch.dtype, branches: Any
) -> None:
    def halved(t: Tensor) -> Tensor:
        return t * t.to(dtype).to(t.dtype)

    x = torch.tensor(SPREAD, dtype=getattr(torch, branches.policy.compute))
    if branches.policy.name == "fp32":
        with pytest.raises(Nondeterminism, match=r"cast from torch\.float32 to torch\.\w*float16: a jump"):
            branches.record(halved, x)
    else:
        found = branches.record(halved, x)
        assert torch.equal(found.output, x * x)
        assert found.findings.lifted == {"aten::_to_copy"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_copying_into_a_narrower_tensor_is_a_cast(dtype: torch.dtype, branches: Any) -> None:
    narrow = torch.zeros(8, dtype=dtype)  # made before the step: what a step makes is lifted under fp64

    def copied(t: Tensor) -> Tensor:
        return t * narrow.copy_(t.detach()).to(t.dtype)

    x = torch.tensor(SPREAD, dtype=getattr(torch, branches.policy.compute))
    with pytest.raises(Nondeterminism, match=r"cast from torch\.float\d\d to torch\.\w*float16: a jump"):
        branches.record(copied, x)


@pytest.mark.parametrize(
    "sums",
    [
        lambda t: t.sum(dtype=torch.int64),
        lambda t: t.cumsum(0, dtype=torch.int32),
        lambda t: (t + 5.0).prod(dtype=torch.int64),
        lambda t: (t + 5.0).cumprod(0, dtype=torch.int32),
    ],
    ids=["sum", "cumsum", "prod", "cumprod"],
)
def test_sums_of_floating_numbers_as_whole_ones_are_followed(sums: Any, branches: Any) -> None:
    def total(t: Tensor) -> Tensor:
        return t * sums(t.detach())

    case = Case(total, 1.0)
    trainer_x, auditor_x = inputs("sum", case, getattr(torch, branches.policy.compute))
    trainer = branches.record(total, trainer_x)
    follower = branches.follow(total, auditor_x, trainer.frame)
    assert follower.violations == [] and len(trainer.frame) > 0
    torch.testing.assert_close(follower.output, trainer.output, atol=1e-2, rtol=1e-5)
    assert torch.equal(
        branches.record(lambda t: t * 0 + sums(t.detach()), trainer_x).output, sums(trainer_x) + 0 * trainer_x
    )
    alone = branches.record(total, auditor_x)
    assert (alone.output - trainer.output).abs().max() > 0.1


@pytest.mark.parametrize("other", ["itself", "another", "a shape more"])
def test_whether_two_tensors_are_equal_is_decided_as_each_pair_of_elements_is(
    other: str, branches: Any
) -> None:
    def asked(t: Tensor) -> Tensor:
        beside = {"itself": t * 1.0, "another": t.new_full((8,), 0.25), "a shape more": t.reshape(8, 1)}[
            other
        ]
        return 2.0 * t if torch.equal(t.detach(), beside.detach()) else t

    dtype = getattr(torch, branches.policy.compute)
    trainer_x = torch.full((8,), 0.25, dtype=dtype)
    trainer = branches.record(asked, trainer_x)
    auditor_x = trainer_x.clone()
    auditor_x[AT] += 1e-13 if dtype == torch.float64 else 4e-7
    follower = branches.follow(asked, auditor_x, trainer.frame)
    assert follower.violations == []
    torch.testing.assert_close(follower.output, trainer.output, atol=5e-6, rtol=0.0)
    assert torch.equal(trainer.output, trainer_x * (1.0 if other == "a shape more" else 2.0))
    alone = branches.record(asked, auditor_x)
    assert torch.equal(alone.output, auditor_x * (2.0 if other == "itself" else 1.0))


def test_whole_numbers_made_of_floating_ones_without_a_site_are_refused() -> None:
    with pytest.raises(Nondeterminism, match="makes whole numbers of floating ones"):
        handlers._plain(None, torch.ops.aten.argmax.default, (torch.tensor(SPREAD),), {})


QUOTIENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "floor": lambda x: x * torch.div(x.detach(), 0.25, rounding_mode="floor"),
    "trunc": lambda x: x * torch.div(x.detach(), x.new_full((8,), 0.25), rounding_mode="trunc"),
    "floor_divide": lambda x: x * (x.detach() // 0.25),
    "floor_divide_": lambda x: x * x.detach().clone().floor_divide_(0.25),
    "remainder": lambda x: x % 0.25,
    "fmod": lambda x: torch.fmod(x, 0.25),
    "remainder of both": lambda x: torch.remainder(x, x.abs().sum() * 0.0 + 0.25),
}


@pytest.mark.parametrize("name", QUOTIENTS)
def test_whole_parts_of_quotients_are_followed(name: str, branches: Any) -> None:
    function = QUOTIENTS[name]
    dtype = getattr(torch, branches.policy.compute)
    trainer_x, auditor_x = inputs(name, Case(function, 1.5), dtype)
    trainer = branches.record(function, trainer_x)
    follower = branches.follow(function, auditor_x, trainer.frame)
    close = {"atol": 1e-11 if dtype == torch.float64 else 5e-5, "rtol": 0.0}
    assert follower.violations == [] and len(trainer.frame) > 0
    torch.testing.assert_close(follower.output, trainer.output, **close)
    torch.testing.assert_close(follower.gradient, trainer.gradient, **close)
    torch.testing.assert_close(branches.record(function, trainer_x).output, function(trainer_x), **close)
    alone = branches.record(function, auditor_x)
    assert (alone.output - trainer.output).abs().max() > 0.1


def test_remainders_of_infinite_divisors_are_torchs_own(branches: Any) -> None:
    x = torch.tensor(SPREAD, dtype=getattr(torch, branches.policy.compute))
    for function, given in ((torch.fmod, x), (torch.remainder, x.abs())):
        own = function(given, math.inf)
        assert torch.equal(own, given)
        assert torch.equal(branches.record(lambda t, f=function: f(t, math.inf), given).output, own)


def test_tables_do_not_contradict_each_other() -> None:
    assert not SMOOTH & EXACT
    assert not SMOOTH & RANDOM
    assert not EXACT & RANDOM
    assert set(SWITCHES) >= COMPARISONS
    assert {name for name in OPERATOR_NOISE if "foreach" not in name} <= SMOOTH | set(SWITCHES)
    assert not set(SWITCHES) & set(LATTICES)
    assert set(SWITCHES) & SMOOTH <= {n for n in SWITCHES if n in SMOOTH}  # a switch is looked up first


# -- what people use ---------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, need_weights: bool, masked: bool = False) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(6, 2, dropout=0.1, batch_first=True)
        self.need_weights, self.masked = need_weights, masked

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.tensor([[False, False]] * 7 + [[False, True]]) if self.masked else None
        return self.inner(x, x, x, need_weights=self.need_weights, key_padding_mask=mask)[0]


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(3, 5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.tensor([4, 4, 3, 3, 2, 2, 1, 1])
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        return nn.utils.rnn.pad_packed_sequence(self.inner(packed)[0], batch_first=True)[0]


class WithTable(nn.Module):
    def __init__(self, table: nn.Module, columns: bool = False) -> None:
        super().__init__()
        self.table, self.columns = table, columns

    def forward(self, x: Tensor) -> Tensor:
        index = torch.arange(16).reshape(8, 2) % 5
        return x + self.table(index if self.columns else index[:, 0])


class Residual(nn.Module):
    """A block of a ResNet with ReLUs in place, and a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(4)
        self.short = nn.Conv2d(1, 4, 1)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        y += self.short(x)
        return F.adaptive_avg_pool2d(F.max_pool2d(self.relu(y), 3, stride=2, padding=1), 1)


IMAGE, SERIES, VOLUME, TOKENS = (8, 1, 3, 4), (8, 3, 4), (4, 1, 2, 2, 6), (8, 2, 6)
MODULES: dict[str, tuple[Callable[[], Any], tuple[int, ...] | None]] = {
    **{
        name: (getattr(nn, name), None)
        for name in (
            "ReLU ReLU6 LeakyReLU ELU SELU CELU GELU SiLU Mish Hardswish Hardsigmoid Hardtanh Hardshrink Softshrink "
            "Tanhshrink Softplus Softsign Sigmoid Tanh LogSigmoid PReLU GLU"
        ).split()
    },
    "GELU by tanh": (lambda: nn.GELU(approximate="tanh"), None),
    "Softmax": (lambda: nn.Softmax(dim=1), None),
    "LogSoftmax": (lambda: nn.LogSoftmax(dim=1), None),
    "residual block": (Residual, IMAGE),
    "Conv1d": (lambda: nn.Conv1d(3, 4, 3, padding=1, padding_mode="reflect"), SERIES),
    "Conv2d circular": (lambda: nn.Conv2d(1, 4, 2, padding_mode="circular", padding=1), IMAGE),
    "Conv2d grouped": (lambda: nn.Conv2d(3, 6, 1, groups=3), (8, 3, 2, 2)),
    "Conv3d": (lambda: nn.Conv3d(1, 4, 2), VOLUME),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(3, 4, 3), SERIES),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(3, 4, 3, stride=2), (8, 3, 2, 2)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 6), (8, 6, 2)),
    "LayerNorm": (lambda: nn.LayerNorm(12), None),
    "RMSNorm": (lambda: nn.RMSNorm(12), None),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(3, affine=True, track_running_stats=True), SERIES),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(12), None),
    "LocalResponseNorm": (lambda: nn.LocalResponseNorm(2), (8, 3, 2, 2)),
    "MaxPool1d": (lambda: nn.MaxPool1d(2), SERIES),
    "MaxPool2d": (lambda: nn.MaxPool2d(2, stride=1, padding=1, dilation=2, ceil_mode=True), IMAGE),
    "MaxPool2d unbatched": (lambda: nn.MaxPool2d(2), (8, 4, 3)),
    "MaxPool3d": (lambda: nn.MaxPool3d(2), VOLUME),
    "MaxPool3d unbatched": (lambda: nn.MaxPool3d(2), (4, 4, 2, 3)),
    "AdaptiveMaxPool1d": (lambda: nn.AdaptiveMaxPool1d(2), SERIES),
    "AdaptiveMaxPool3d": (lambda: nn.AdaptiveMaxPool3d(1), VOLUME),
    "AdaptiveAvgPool2d": (lambda: nn.AdaptiveAvgPool2d(2), IMAGE),
    "AvgPool3d": (lambda: nn.AvgPool3d(2), VOLUME),
    "LPPool1d": (lambda: nn.LPPool1d(2, 2), SERIES),
    "ReflectionPad3d": (lambda: nn.ReflectionPad3d(1), (8, 1, 3, 2, 2)),
    "ReplicationPad2d": (lambda: nn.ReplicationPad2d(1), IMAGE),
    "Upsample nearest": (lambda: nn.Upsample(scale_factor=2), IMAGE),
    "Upsample exact": (lambda: nn.Upsample(scale_factor=2, mode="nearest-exact"), IMAGE),
    "Upsample bicubic": (lambda: nn.Upsample(scale_factor=2, mode="bicubic"), IMAGE),
    "Upsample antialiased": (
        lambda: lambda x: F.interpolate(x, scale_factor=2, mode="bilinear", antialias=True),
        IMAGE,
    ),
    "PixelShuffle": (lambda: nn.PixelShuffle(2), (8, 4, 3, 1)),
    "ChannelShuffle": (lambda: nn.ChannelShuffle(2), (8, 4, 3, 1)),
    "Unfold": (lambda: nn.Unfold(2), IMAGE),
    "Fold": (lambda: nn.Fold((2, 3), (2, 2)), (12, 4, 2)),
    "RNN": (lambda: nn.RNN(3, 5, num_layers=2, dropout=0.2, bidirectional=True, batch_first=True), (8, 4, 3)),
    "LSTM": (
        lambda: nn.LSTM(3, 5, num_layers=2, dropout=0.2, bidirectional=True, batch_first=True),
        (8, 4, 3),
    ),
    "GRU": (lambda: nn.GRU(3, 5, num_layers=2, dropout=0.2, bidirectional=True, batch_first=True), (8, 4, 3)),
    "LSTMCell": (lambda: nn.LSTMCell(12, 5), None),
    "GRUCell": (lambda: nn.GRUCell(12, 5), None),
    "packed LSTM": (Packed, (8, 4, 3)),
    "MultiheadAttention": (lambda: Attention(False), TOKENS),
    "MultiheadAttention with weights": (lambda: Attention(True), TOKENS),
    "MultiheadAttention masked": (lambda: Attention(False, True), TOKENS),
    "TransformerEncoderLayer": (lambda: nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), TOKENS),
    "TransformerEncoderLayer gelu": (
        lambda: nn.TransformerEncoderLayer(6, 2, 8, batch_first=True, norm_first=True, activation="gelu"),
        TOKENS,
    ),
    "attention, masked": (
        lambda: (
            lambda x: F.scaled_dot_product_attention(
                x, x, x, attn_mask=torch.ones(4, 4, dtype=torch.bool).tril()
            )
        ),
        (4, 2, 4, 3),
    ),
    "attention, dropped": (
        lambda: lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True, dropout_p=0.3),
        (4, 2, 4, 3),
    ),
    "Embedding": (lambda: WithTable(nn.Embedding(5, 12, padding_idx=0)), None),
    "Embedding sparse": (lambda: WithTable(nn.Embedding(5, 12, sparse=True)), None),
    "EmbeddingBag": (lambda: WithTable(nn.EmbeddingBag(5, 12, mode="mean"), columns=True), None),
    "Bilinear": (
        lambda: lambda x: F.bilinear(x, x.flip(0), torch.ones(2, 12, 12, dtype=x.dtype) * 0.1),
        None,
    ),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(12, 3)), None),
    "spectral norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(12, 3)), None),
    "orthogonal": (lambda: nn.utils.parametrizations.orthogonal(nn.Linear(12, 12)), None),
    "alpha dropout": (lambda: nn.AlphaDropout(0.3), None),
    "Dropout2d": (lambda: nn.Dropout2d(0.3), (8, 3, 2, 2)),
    "sums and norms": (
        lambda: (
            lambda x: (
                x.logsumexp(1) + x.norm(dim=1) + x.std(1) + x.prod(1) + x.norm(p=1, dim=1) + x.cumsum(1)[:, 3]
            )
        ),
        None,
    ),
    "fft": (lambda: lambda x: torch.fft.rfft(x).abs(), None),
    "solve": (lambda: lambda x: torch.linalg.solve(x[:, :8] + 3 * torch.eye(8, dtype=x.dtype), x), None),
    "clamp by tensors": (lambda: lambda x: torch.clamp(x, min=x.flip(0) - 0.5, max=x.flip(0) + 0.5), None),
}

ONES = torch.ones(8, 12)
LABELS = torch.arange(8) % 5
LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "l1": lambda x: F.l1_loss(x, x.detach().flip(0)),
    "mse": lambda x: F.mse_loss(x, x.detach().flip(0)),
    "smooth l1": lambda x: F.smooth_l1_loss(x, torch.zeros_like(x)),
    "huber": lambda x: F.huber_loss(x, torch.zeros_like(x)),
    "cross entropy": lambda x: F.cross_entropy(x, LABELS, label_smoothing=0.1, ignore_index=2),
    "cross entropy, weighted": lambda x: F.cross_entropy(
        x, LABELS, weight=torch.arange(1.0, 13.0).to(x.dtype)
    ),
    "cross entropy, soft": lambda x: F.cross_entropy(x, torch.softmax(x.detach().flip(0), 1)),
    "cross entropy, image": lambda x: F.cross_entropy(
        x.reshape(8, 3, 4), (torch.arange(32) % 3).reshape(8, 4)
    ),
    "nll": lambda x: F.nll_loss(F.log_softmax(x, 1), LABELS),
    "poisson": lambda x: F.poisson_nll_loss(x, ONES.to(x.dtype), full=True),
    "gaussian": lambda x: F.gaussian_nll_loss(x, torch.zeros_like(x), F.softplus(x)),
    "kl": lambda x: F.kl_div(F.log_softmax(x, 1), torch.softmax(x.detach() * 2, 1), reduction="batchmean"),
    "bce": lambda x: F.binary_cross_entropy(torch.sigmoid(x), 0.3 * ONES.to(x.dtype)),
    "bce with logits": lambda x: F.binary_cross_entropy_with_logits(x, 0.3 * ONES.to(x.dtype)),
    "margin ranking": lambda x: F.margin_ranking_loss(x[:, 0], x[:, 1], ONES[:, 0].to(x.dtype)),
    "hinge": lambda x: F.hinge_embedding_loss(x, -ONES.to(x.dtype)),
    "soft margin": lambda x: F.soft_margin_loss(x, ONES.to(x.dtype)),
    "multilabel soft margin": lambda x: F.multilabel_soft_margin_loss(x, ONES.to(x.dtype)),
    "cosine": lambda x: F.cosine_embedding_loss(x, x.flip(0), -ONES[:, 0].to(x.dtype)),
    "triplet": lambda x: F.triplet_margin_loss(x, x.roll(1, 0), x.roll(2, 0)),
    "ctc": lambda x: F.ctc_loss(
        F.log_softmax(x.reshape(8, 2, 6), 2), torch.tensor([[1, 2, 3], [3, 2, 1]]), (8, 8), (3, 3)
    ),
    "contrastive": lambda x: F.cross_entropy(
        F.normalize(x) @ F.normalize(x).T / 0.1, torch.arange(8).flip(0)
    ),
}


@pytest.mark.parametrize("name", [*MODULES, *(f"loss {name}" for name in LOSSES)])
@pytest.mark.parametrize("policy", ["fp64", "fp32"])
def test_common_modules_and_losses_are_followed_under_noise(
    name: str, policy: str, around: Any, record_run: Any, follow_run: Any
) -> None:
    make = (
        around(lambda: LOSSES[name.removeprefix("loss ")])
        if name.startswith("loss ")
        else around(*MODULES[name])
    )
    run = record_run(make, policy, 2)
    done = follow_run(make, policy, run)
    assert done.violations == [[], []]
    assert done.roots == run.roots


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own compiler, as it is imported
def test_a_compiled_module_is_refused(open_job: Any, zoo: Any, branches: Any) -> None:
    job = zoo.build({})
    job.model.first.compile()
    with pytest.raises(Nondeterminism, match="module first is compiled; leave "):
        open_job(job, branches.policy)
    whole = zoo.build({})
    whole.model.second = torch.compile(whole.model.second)
    with pytest.raises(Nondeterminism, match="module second is compiled"):
        open_job(whole, branches.policy)
    open_job(zoo.build({}), branches.policy).close()


def test_reading_a_number_of_the_step_is_noted(branches: Any) -> None:
    x = torch.tensor(SPREAD, dtype=getattr(torch, branches.policy.compute))
    assert branches.record(lambda t: t * float(t.detach().sum()), x).findings.read == {
        "aten::_local_scalar_dense"
    }
    assert branches.record(lambda t: t * int(torch.arange(3).sum()), x).findings.read == set()


@pytest.mark.parametrize(
    "unset",
    [
        lambda x: torch.empty(8, dtype=x.dtype),
        torch.empty_like,
        lambda x: torch.empty_strided((8,), (1,), dtype=x.dtype),
        lambda x: x.new_empty(8),
        lambda x: x.new_empty_strided((8,), (1,)),
        lambda x: torch.zeros(0, dtype=x.dtype).resize_(8),
    ],
    ids=["empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_"],
)
def test_memory_that_a_model_leaves_unset_holds_no_number(
    branches: Any, unset: Callable[[Tensor], Tensor]
) -> None:
    """What operators allocate for their own results is not filled, and their results are what they were."""
    x = torch.tensor(SPREAD, dtype=getattr(torch, branches.policy.compute))
    with repeatable(branches.policy.storage):
        assert not deterministic.fill_uninitialized_memory
        found = branches.record(lambda t: unset(t) + 0.0 * t, x)
        assert found.output.isnan().all()
        assert torch.equal(branches.record(torch.sin, x).output, torch.sin(x))
    assert deterministic.fill_uninitialized_memory


def test_the_band_of_a_large_input_comes_from_a_sample_that_both_sides_share(branches: Any) -> None:
    """Every image's border is zero and so are all even elements: a sample with an even stride would see nothing else."""
    dtype = getattr(torch, branches.policy.compute)
    x = torch.randn(4, 64, 64, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    x[:, :, 0] = 0.0
    x = x.reshape(-1)
    x[::2] = 0.0
    x[12345] = 2.0 ** (branches.policy.decision_band[0] - 2)
    x = x.to(dtype)
    assert sampled_rms(x) == pytest.approx(float(x.double().square().mean().sqrt()), rel=0.05)
    assert sampled_rms(torch.zeros(1 << 15)) == 0.0
    for mask in (2.0**100, -math.inf, math.nan, torch.finfo(torch.float32).min):
        masked = torch.stack((x.float(), torch.full_like(x, mask, dtype=torch.float32)), 1).reshape(-1)
        assert sampled_rms(masked) == pytest.approx(float(x.double().square().mean().sqrt()), rel=0.05)
        assert sampled_rms(torch.full((9,), mask)) == 0.0
    assert sampled_rms(torch.eye(181).reshape(-1)[1:]) > 0.0  # nothing in the sample: then all elements count
    trainer = branches.record(F.relu, x)
    other = x.clone()
    other[12345] *= -1.0
    follower = branches.follow(F.relu, other, trainer.frame)
    assert follower.violations == []
    assert bool(follower.output[12345] > 0.0)
    assert not bool(F.relu(other)[12345] > 0.0), "control: by itself the follower takes the other branch"


@pytest.mark.parametrize("policy", ["fp64", "fp32"])
def test_memory_that_a_model_makes_and_never_writes_is_not_whatever_lay_there(policy: str) -> None:
    """Operators leave their own fresh results unfilled; what the model itself asks for is filled, and so found."""
    from tallystick.execution.session.session import Session
    from tallystick.numerics.policy import find_policy

    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    session = Session(model, torch.optim.SGD(model.parameters(), lr=0.1), policy=find_policy(policy), seed=0)
    session.prepare()
    before = torch.utils.deterministic.fill_uninitialized_memory  # pyright: ignore[reportAttributeAccessIssue]
    held: list[Tensor] = []
    with session.stepping(session.recording_context(session.table)):
        assert not torch.utils.deterministic.fill_uninitialized_memory  # pyright: ignore[reportAttributeAccessIssue]
        with session.open_step.micro_batch(0):
            x = torch.ones(3, 2)
            held += [
                torch.empty(5),
                torch.empty_like(x),
                x.new_empty(2, 2),
                torch.empty_strided((2, 3), (3, 1)),
            ]
            held.append(torch.arange(4.0).resize_(6))
            whole, flags = torch.empty(3, dtype=torch.int64), torch.empty(3, dtype=torch.bool)
    assert torch.utils.deterministic.fill_uninitialized_memory == before  # pyright: ignore[reportAttributeAccessIssue]
    assert all(bool(one.isnan().all()) for one in held[:4])
    assert held[4][:4].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert bool(held[4][4:].isnan().all())
    assert whole.tolist() == [torch.iinfo(torch.int64).max] * 3
    assert bool(flags.all())
    session.close()
