"""Jitter: what moves, what stays, and that no write into an argument is lost."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from tallystick.execution.dispatch import jitter
from tallystick.execution.dispatch.boundaries import DTYPES
from tallystick.execution.dispatch.calls import table_name
from tallystick.execution.dispatch.jitter import Jitter, JitterMode
from tallystick.execution.dispatch.operator_noise import APART, OPERATOR_NOISE, SHORT, WHOLE, find_noise
from tallystick.execution.dispatch.table import EXACT, RANDOM, SMOOTH, UNSET
from tallystick.numerics.kernels import random_words

# -- operators that write into their arguments ---------------------------------------------------

# What their arguments must be where torch's schema alone does not say.
GIVEN: dict[str, tuple[Any, ...]] = {
    "acosh_": (torch.full((3, 3), 1.5),),
    "addbmm_": (torch.rand(3, 3), torch.rand(2, 3, 3), torch.rand(2, 3, 3)),
    "addmv_": (torch.rand(3), torch.rand(3, 3), torch.rand(3)),
    "addr_": (torch.rand(3, 3), torch.rand(3), torch.rand(3)),
    "baddbmm_": (torch.rand(2, 3, 3), torch.rand(2, 3, 3), torch.rand(2, 3, 3)),
    "index_add_": (torch.rand(3, 3), 0, torch.tensor([0, 2, 2]), torch.rand(3, 3)),
    "index_copy_": (torch.rand(3, 3), 0, torch.tensor([0, 2]), torch.rand(2, 3)),
    "index_fill_": (torch.rand(3, 3), 0, torch.tensor([0, 2]), 0.3),
    "index_put_": (torch.rand(3, 3), [torch.tensor([0, 2])], torch.rand(2, 3)),
    "_index_put_impl_": (torch.rand(3, 3), [torch.tensor([0, 2])], torch.rand(2, 3)),
    "index_reduce_": (torch.rand(3, 3), 0, torch.tensor([0, 2]), torch.rand(2, 3), "prod"),
    "masked_fill_": (torch.rand(3, 3), torch.eye(3) > 0, 0.3),
    "masked_scatter_": (torch.rand(3, 3), torch.eye(3) > 0, torch.rand(9)),
    "put_": (torch.rand(3, 3), torch.tensor([1, 5]), torch.rand(2), True),
    "scatter_": (torch.rand(3, 3), 0, torch.tensor([[0, 1, 2]]), torch.rand(1, 3)),
    "scatter_add_": (torch.rand(3, 3), 0, torch.tensor([[0, 1, 1]]), torch.rand(1, 3)),
    "scatter_reduce_": (torch.rand(3, 3), 0, torch.tensor([[0, 1, 1]]), torch.rand(1, 3), "sum"),
    "renorm_": (torch.rand(3, 3), 2.0, 0, 0.5),
    "set_": (torch.rand(3, 3), torch.rand(3, 3)),
    "celu_": (torch.rand(3, 3) - 0.5,),
    "native_batch_norm": (),
}
CALLED = 60
"""Forms that must have been called, lest the list above should rot away unseen."""


def writing() -> list[Any]:
    """Every overload of an operator of the table that writes into its first argument."""
    found: list[Any] = []
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads() if hasattr(packet, "overloads") else ():
            func = getattr(packet, overload)
            first = func._schema.arguments[0] if func._schema.arguments else None
            known = table_name(func) in SMOOTH | EXACT and table_name(func) not in RANDOM | UNSET
            if known and first is not None and first.alias_info is not None and first.alias_info.is_write:
                found.append(func)
    return found


def made_up(kind: str, number: int, lead: Tensor) -> Any:
    if kind == "Tensor":
        return (
            lead.clone()
            if number == 0
            else torch.rand(3, 3, generator=torch.Generator().manual_seed(number)) + 0.5
        )
    if kind == "List[Tensor]":
        return [made_up("Tensor", number, lead), made_up("Tensor", number + 9, lead)]
    return {"int": 0, "number": 0.5, "float": 0.5, "bool": False, "List[number]": [0.5, 0.5]}.get(kind)


def arguments_of(func: Any) -> tuple[Any, ...]:
    name = func._schema.name.removeprefix("aten::")
    if name in GIVEN:
        return tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, GIVEN[name])
    lead = torch.rand(3, 3, generator=torch.Generator().manual_seed(77)) * 0.5 + 0.25
    needed = [a for a in func._schema.arguments if not a.has_default_value() and not a.kwarg_only]
    return tuple(made_up(str(a.type), number, lead) for number, a in enumerate(needed))


def views(x: Any) -> tuple[Any, Any]:
    """The tensors that ``x`` is made of as parts of larger ones, and those larger ones."""
    wholes: list[Tensor] = []

    def within(each: Any) -> Any:
        if not isinstance(each, Tensor):
            return each
        whole = torch.full((*each.shape[:-1], each.shape[-1] + 2), 0.375, dtype=each.dtype)
        wholes.append(whole)
        return whole[..., 1:-1].copy_(each)

    return tree_map(within, x), wholes


@pytest.mark.parametrize("inside", ["own memory", "a view"])
def test_no_operator_loses_its_write_under_jitter(inside: str) -> None:
    called: set[str] = set()
    for func in writing():
        args = arguments_of(func)
        plain = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, args)
        if inside == "a view":
            (first, wholes), (plain_first, plain_wholes) = views(args[0]), views(plain[0])
            args, plain = (first, *args[1:]), (plain_first, *plain[1:])
        else:
            wholes, plain_wholes = tree_leaves(args[0]), tree_leaves(plain[0])
        try:
            func(*plain)
        except (RuntimeError, TypeError, IndexError, NotImplementedError):
            continue  # this form needs arguments that are not made up here; ``CALLED`` says how many at most
        called.add(str(func))
        with JitterMode(Jitter(5, units=0.0)):
            func(*args)
        for mine, wanted in zip(wholes, plain_wholes, strict=True):
            assert torch.equal(mine.isnan(), wanted.isnan()), str(func)
            assert torch.equal(mine.nan_to_num(), wanted.nan_to_num()), str(func)
    assert len(called) >= CALLED, sorted(called)
    assert {"aten.index_add_.default", "aten.index_put_.default", "aten.scatter_add_.default", "aten.addmm_.default",
            "aten.baddbmm_.default", "aten.cumsum_.default"} <= called  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_what_is_written_into_a_view_is_there_and_has_noise(dtype: torch.dtype) -> None:
    whole, plain = torch.zeros(4, 6, dtype=dtype), torch.zeros(4, 6, dtype=dtype)
    rows, values = (
        torch.tensor([0, 2, 0]),
        torch.rand(3, 2, generator=torch.Generator().manual_seed(1)).to(dtype),
    )
    with JitterMode(Jitter(3)):
        whole[:, 2:4].index_add_(0, rows, values)
    plain[:, 2:4].index_add_(0, rows, values)
    torch.testing.assert_close(whole, plain)
    assert whole[[0, 2], 2:4].ne(0).all()
    if dtype != torch.bfloat16:
        assert not torch.equal(whole, plain)


def test_elements_that_an_operator_does_not_touch_stay() -> None:
    x = torch.rand(50, 3, generator=torch.Generator().manual_seed(1))
    before, rows = x.clone(), torch.tensor([7, 9])
    with JitterMode(Jitter(3)):
        x.index_add_(0, rows, torch.full((2, 3), 0.3))
    same = (x == before).all(dim=1)
    assert (~same).nonzero().flatten().tolist() == [7, 9]


def test_values_put_into_places_are_the_values() -> None:
    x, mask = torch.zeros(5), torch.tensor([True, False, True, True, False])
    with JitterMode(Jitter(3)):
        x[mask] = torch.tensor([0.1, 0.2, 0.3])
        x[1] = 0.7
    assert x.tolist() == torch.tensor([0.1, 0.7, 0.2, 0.3, 0.0]).tolist()


def test_values_that_are_added_up_in_places_move() -> None:
    x, plain = torch.full((3,), 0.3), torch.full((3,), 0.3)
    place = (torch.tensor([0, 0, 2]),)
    with JitterMode(Jitter(3)):
        x.index_put_(place, torch.full((3,), 0.1), accumulate=True)
    plain.index_put_(place, torch.full((3,), 0.1), accumulate=True)
    assert (x != plain).tolist()[1] is False
    assert 0.0 < float((x - plain).abs().max()) < 1e-6


# -- whole numbers -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "function",
    [lambda x: torch.softmax(x, -1), torch.sigmoid, torch.tanh, lambda x: torch.exp(0 * x), torch.erf],
    ids=["softmax", "sigmoid", "tanh", "exp", "erf"],
)
def test_a_whole_number_that_is_rounded_moves(function: Any, dtype: torch.dtype) -> None:
    x = torch.tensor([[60.0, 0.0, -900.0]] * 40, dtype=dtype)
    plain = function(x)
    assert plain[0, 0] == 1.0
    with JitterMode(Jitter(2)):
        moved = function(x)
    eps = torch.finfo(dtype).eps
    units = (moved - plain)[:, 0] / eps
    assert float(units.min()) < 0.0 < float(units.max())
    assert units.abs().ge(1.0).all()
    assert units.abs().le(2.0).all()
    assert (moved[plain == 0.0] == 0.0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_masks_and_counts_stay(dtype: torch.dtype) -> None:
    mask = (torch.rand(64, 9, generator=torch.Generator().manual_seed(1)) > 0.5).to(dtype)
    with JitterMode(Jitter(2)):
        found = [
            1.0 - mask,
            mask * mask,
            mask.sum(1),
            mask.bool().sum(0, dtype=dtype),
            mask.T @ mask,
            mask.cumsum(0),
            mask / 1.0,
        ]
    wanted = [1.0 - mask, mask * mask, mask.sum(1), mask.sum(0), mask.T @ mask, mask.cumsum(0), mask]
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_numbers_too_large_to_have_fractions_move() -> None:
    """They are whole because the format has no room for more: nothing is known to be exact about them."""
    x = torch.full((8,), 2.0**25)
    with JitterMode(Jitter(2)):
        assert (x * 1.0 != x).all()


@pytest.mark.parametrize("draw", [lambda: torch.rand(9), lambda: torch.zeros(9).uniform_(1.0, 2.0)])
def test_drawn_numbers_and_copies_stay(draw: Any) -> None:
    with JitterMode(Jitter(2)):
        torch.manual_seed(1)
        drawn = draw()
        copies = [
            drawn.clone(),
            drawn.flip(0).flip(0),
            torch.where(drawn > 2.0, 0.0, drawn),
            drawn.topk(9).values.sort().values,
        ]
    torch.manual_seed(1)
    plain = draw()
    assert all(torch.equal(each, plain) for each in (drawn, *copies[:3]))
    assert torch.equal(copies[3], plain.sort().values)


# -- what cancels --------------------------------------------------------------------------------


def test_a_zero_that_comes_about_by_cancellation_is_no_zero_under_jitter() -> None:
    # Products that are exact: of others a fused multiply-add rounds one and not the other, and their sum is no zero.
    x, w = torch.tensor([[0.375, -0.375]] * 64), torch.full((2, 1), 0.625)
    constant = torch.tensor([[0.375, 0.375]] * 64)
    assert all(bool((each == 0).all()) for each in (x @ w, x.sum(1), constant.var(1)))
    with JitterMode(Jitter(2)):
        found = [x @ w, x.sum(1), constant.var(1)]
    assert all(float((each != 0).float().mean()) > 0.3 for each in found)
    assert all(float(each.abs().max()) < 1e-6 for each in found)


def test_alpha_decides_whether_a_sum_of_two_cancels_roughly() -> None:
    x = torch.rand(1000, generator=torch.Generator().manual_seed(1)) + 0.5
    with JitterMode(Jitter(2)):
        once, scaled = x - x, torch.sub(x, x / 3.0, alpha=3.0)
    assert once.eq(0).all(), "a difference of two numbers is rounded once, here not at all"
    assert 1e-8 < float(scaled.abs().median()) < 1e-6


def test_the_tail_of_a_gelu_has_the_noise_of_its_factor() -> None:
    x = torch.full((100,), -4.5)
    plain = torch.nn.functional.gelu(x)
    with JitterMode(Jitter(2)):
        moved = torch.nn.functional.gelu(x)
    assert (
        float((moved - plain).abs().max())
        >= 4.5 * 2.0**-24
        > 1000 * torch.finfo(torch.float32).eps * float(plain.abs().max()) / 1e3
    )


@pytest.mark.parametrize(
    ("terms", "units"), [(64, APART), (int(SHORT) ** 2, APART), (4 * int(SHORT) ** 2, 2.0)]
)
def test_long_sums_of_products_move_by_the_root_of_their_length(terms: int, units: float) -> None:
    noise = find_noise(torch.ops.aten.mm.default)
    a, b = torch.rand(2, terms), torch.rand(terms, 5)
    assert noise is not None
    assert noise.units((a, b), a @ b, 0, moved=True) == units
    weights, image = torch.rand(3, 4, 5, 5), torch.rand(2, 4, 9, 9)
    backward = find_noise(torch.ops.aten.convolution_backward.default)
    assert backward is not None
    gradient = torch.rand(2, 3, terms, 1)
    assert backward.units((gradient, image, weights), weights, 1, moved=False) == max(
        1.0, math.sqrt(2 * terms) / SHORT
    )
    assert backward.units((gradient, image, weights), image, 0, moved=False) == 1.0


# -- formats and layouts -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("units", [1.0, 3.0])
def test_elements_move_up_or_down_by_the_unit_wherever_they_lie(dtype: torch.dtype, units: float) -> None:
    x = torch.rand(40, 31, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(dtype) + 0.5
    forms = {"rows": x, "columns": x.mT, "every second": x.repeat_interleave(2, dim=1)[:, ::2]}
    for name, form in forms.items():
        moved = Jitter(9, units).disturbed(form)
        relative = (moved - form) / form / torch.finfo(dtype).eps
        assert float((relative.abs() - units).abs().max()) <= 1.01, name
        assert 0.4 < float((relative > 0).double().mean()) < 0.6, name
        assert form.data_ptr() != moved.data_ptr()


def test_what_is_not_finite_stays() -> None:
    x = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, 1.0])
    for form in (x, torch.stack((x, x), dim=1)[:, 0]):
        moved = Jitter(9).disturbed(form)
        assert moved[:2].tolist() == [math.inf, -math.inf]
        assert moved[2].isnan()
        assert moved[3:5].tolist() == [0.0, 0.0]
        assert moved[5] != 1.0


def test_complex_numbers_move_in_both_parts() -> None:
    x = torch.rand(64, generator=torch.Generator().manual_seed(1))
    with JitterMode(Jitter(2)):
        moved = torch.fft.rfft(x)
    apart = torch.view_as_real(moved - torch.fft.rfft(x))
    assert float(apart[1:-1].ne(0).float().mean()) > 0.8
    assert float(apart.abs().max()) < 1e-5


def test_the_table_names_operators_and_what_is_exact_is_not_in_it() -> None:
    assert not OPERATOR_NOISE.keys() & (EXACT | RANDOM)
    assert all(not noise.whole or noise.beside is None for noise in OPERATOR_NOISE.values())
    assert set(WHOLE.values()) == {2.0**11, 2.0**26}


# -- sixteen bits --------------------------------------------------------------------------------


def sixteen(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def share_that_differs(x: Tensor, y: Tensor) -> float:
    units = (x.view(torch.int16).int() - y.view(torch.int16).int()).abs()
    return float((units != 0).float().mean())


def test_products_of_bfloat16_move_where_their_float32_sums_meet_a_boundary() -> None:
    a, b = sixteen(256, 512, seed=1), sixteen(512, 256, seed=2)
    with JitterMode(Jitter(2)):
        moved = a @ b
    assert moved.dtype == torch.bfloat16
    assert 1e-5 < share_that_differs(moved, a @ b) < 5e-3, (
        "one in four would claim that bfloat16 kernels add up in bfloat16"
    )


def test_few_elementwise_results_of_bfloat16_move_and_by_one_unit() -> None:
    x = sixteen(1 << 20, seed=3)
    with JitterMode(Jitter(2)):
        moved = torch.tanh(x)
    plain = torch.tanh(x)
    units = (moved.view(torch.int16).int() - plain.view(torch.int16).int()).abs()
    assert set(units.unique().tolist()) == {0, 1}
    assert 1e-5 < float((units != 0).float().mean()) < 2e-4
    assert (moved == 0).equal(plain == 0)


def test_attention_in_bfloat16_moves_as_its_rounded_probabilities_do() -> None:
    q, k, v = (sixteen(2, 4, 64, 16, seed=s) for s in (1, 2, 3))
    with JitterMode(Jitter(2)):
        moved = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    plain = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert 1e-5 < share_that_differs(moved, plain) < 2e-2
    torch.testing.assert_close(moved, plain, atol=2e-2, rtol=2e-2)


def test_sums_over_bfloat16_into_float32_keep_their_dtype() -> None:
    x = sixteen(64, 64, seed=5)
    with JitterMode(Jitter(2)):
        found = x.sum(0, dtype=torch.float32), x.sum(0), x.float().sum(0, dtype=torch.bfloat16)
    assert [t.dtype for t in found] == [torch.float32, torch.bfloat16, torch.bfloat16]


# -- what a loss is made of --------------------------------------------------------------------------


def under(jitter: Jitter, func: Any, *args: Any) -> tuple[Tensor, Tensor]:
    """Return the first argument that the operator was called with, and its result."""
    seen: list[Tensor] = []

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        seen.append(args[0].clone())
        return func(*args, **kwargs)

    result = jitter.around(func, args, {}, run)
    return seen[0], result


def test_every_sixteen_bit_number_that_a_loss_is_made_of_moves_by_its_last_place() -> None:
    logits = (torch.randn(64, 10) * 8).bfloat16()
    log_softmax = torch.ops.aten._log_softmax.default
    moved, _ = under(Jitter(0, 0.0, fewest=0, outputs=True), log_softmax, logits.float(), 1, False)
    steps = moved.bfloat16().view(torch.int16).int() - logits.view(torch.int16).int()
    assert torch.equal(moved, moved.bfloat16().float())
    assert set(steps.abs().unique().tolist()) == {1}
    assert 0.3 < float((steps > 0).float().mean()) < 0.7
    plain, _ = under(Jitter(0, 0.0, fewest=0), log_softmax, logits.float(), 1, False)
    assert torch.equal(plain, logits.float())


@pytest.mark.parametrize("x", [torch.randn(8, 4), torch.randn(8, 4, dtype=torch.float64), torch.zeros(8, 4)])
def test_numbers_of_a_loss_that_never_had_sixteen_bits_stay(x: Tensor) -> None:
    moved, _ = under(Jitter(0, 0.0, fewest=0, outputs=True), torch.ops.aten._log_softmax.default, x, 1, False)
    assert torch.equal(moved, x)


def test_one_last_place_of_a_sure_logit_is_a_large_part_of_its_gradient() -> None:
    """Sixteen has a last place of 1/8: the error's gradient goes with exp of it. Drawn results would rarely show that one."""
    logits = torch.zeros(256, 10)
    logits[:, 0] = 40.0  # all but the last example know their answer
    logits[255, 0], logits[255, 1] = 16.0, 10.0
    labels = torch.zeros(256, dtype=torch.int64)

    def gradient(jitter: Jitter) -> Tensor:
        x = logits.clone().bfloat16().requires_grad_()
        with JitterMode(jitter):
            loss = torch.nn.functional.cross_entropy(x.float(), labels)
        (found,) = torch.autograd.grad(loss, x)
        return found.float()

    plain = gradient(Jitter(0, 0.0, fewest=0))
    assert bool((plain[:255] == 0).all()) or float(plain[255].norm() / plain.norm()) > 0.99
    moved = [gradient(Jitter(seed, 0.0, fewest=0, outputs=True)) for seed in range(8)]
    assert max(float((each - plain).norm() / plain.norm()) for each in moved) > 0.1


# -- the same noise on every device ---------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("greatest", [-1.0, WHOLE[torch.float32]])
def test_tensor_operations_move_as_the_kernel_does(
    dtype: torch.dtype, greatest: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What other devices than the CPU do, in chunks, on a tensor in another order than its shape's."""
    monkeypatch.setattr(jitter, "CHUNK", 64)
    x = torch.randn(7, 11, 13, generator=torch.Generator().manual_seed(5), dtype=dtype).permute(2, 0, 1)
    x[0, 0, :4] = torch.tensor([math.nan, math.inf, 3.0, 0.0], dtype=dtype)
    expected, out = torch.empty_like(x), torch.empty_like(x)
    key, start, size = (7, 9), 3 << 4, torch.finfo(dtype).eps
    random_words.jitter(
        x.data_ptr(), expected.data_ptr(), DTYPES[dtype], x.numel(), *key, start, size=size, whole=greatest
    )

    jitter.move_by_words(x, out, key, start, size, greatest)

    assert x.stride() == out.stride() == expected.stride()
    kept = x == expected
    assert bool(kept[0, 0, 2]) is (greatest >= 0.0)  # a whole number moves where it may
    assert int(kept.sum()) < 4
    torch.testing.assert_close(out, expected, rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mask", [2.0**100, -(2.0**127), -math.inf])
def test_what_masks_other_elements_stays_and_the_others_move(dtype: torch.dtype, mask: float) -> None:
    """``torch.finfo(dtype).min`` and a score: the sum is the mask, on every machine; moved by a last place it was infinite."""
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(5), dtype=dtype)
    x[::3] = mask
    words = torch.empty_like(x)
    jitter.move_by_words(x, words, (7, 9), 0, torch.finfo(dtype).eps, -1.0)
    in_place = x.clone()
    Jitter(3).disturb_(in_place)
    for moved in (Jitter(3).disturbed(x), Jitter(3).disturbed(x.t()), in_place, words):
        found = moved if moved.shape == x.shape else moved.t()
        assert bool((found[::3] == mask).all())
        assert bool((found[1::3] != x[1::3]).all())
    largest = x.masked_fill(x.abs() >= 2.0**100, 2.0**99)
    assert bool((Jitter(3).disturbed(largest) != largest).all())


def test_tensors_without_numbers_are_left_alone() -> None:
    """The second derivative of a sign is a tensor of zeros that has no memory: it was written into."""
    nothing = torch._efficientzerotensor((3,))
    assert Jitter(1).disturbed(nothing) is nothing
    somewhere = torch.empty(3, device="meta")
    assert Jitter(1).disturbed(somewhere) is somewhere
    Jitter(1).disturb_(nothing)


@pytest.mark.parametrize(
    ("order", "moves"), [(math.inf, False), (-math.inf, False), (2.0, True), (1.0, True)]
)
def test_the_largest_of_a_row_is_chosen_and_not_computed(order: float, moves: bool) -> None:
    """Its backward asks which element it is: none, where it moved."""
    op, x = (
        torch.ops.aten.linalg_vector_norm.default,
        torch.rand(40, 7, generator=torch.Generator().manual_seed(2)),
    )
    moved = Jitter(3).around(op, (x, order, [1]), {}, lambda args, kwargs: op(*args, **kwargs))
    assert torch.equal(moved, op(x, order, [1])) == (not moves)


OF_ONE: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(),
    "sum of a side of one": lambda x: x.expand(5, 1).sum(dim=1),
    "mean": lambda x: x.mean(dim=0),
    "size": torch.linalg.vector_norm,
    "norm": lambda x: torch.ops.aten.norm.Scalar(x, 2),
    "what spectral_norm keeps of a layer with one output": lambda x: torch.nn.functional.normalize(x, dim=0),
}


@pytest.mark.parametrize("name", OF_ONE)
def test_what_is_made_of_one_element_alone_does_not_move(name: str) -> None:
    """A vector of one element over its size is 1 on every machine: audits under jitter called an honest run another one."""
    x = torch.tensor([0.3])
    for seed in range(5):
        with JitterMode(Jitter(seed)):
            found = OF_ONE[name](x)
        assert torch.equal(found, OF_ONE[name](x))
    turned = torch.tensor([0.3 + 0.4j])
    sizes: set[float] = set()
    for seed in range(5):
        with JitterMode(Jitter(seed)):
            sizes.add(float(torch.linalg.vector_norm(turned)))
    assert len(sizes) > 1, "the size of a complex number is a root"
    longer = torch.tensor([0.3, 0.7])
    moved = []
    for seed in range(5):
        with JitterMode(Jitter(seed)):
            moved.append(longer.sum())
    assert len({float(each) for each in moved}) > 1
