"""The judge's arithmetic is exact where it says so, and its bounds are neither broken by honest orders nor idle."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tallystick.commit.tensors import TensorDigest
from tallystick.dispute.bounds.formulas import (
    MARGIN,
    OWN_UNIT,
    STATED,
    STATED_MAGNITUDE,
    Point,
    Sum,
    exact_sum,
    gamma,
    is_false,
    is_right_partial,
    is_within,
    products,
    readings_of,
    tolerance,
    triple_products,
    two_product,
    two_sum,
)
from tallystick.dispute.bounds.operands import flat_of, position_of, stored_at
from tallystick.dispute.bounds.table import find_rule
from tallystick.dispute.objections import Objection, parse_objection
from tallystick.dispute.operator_list import Geometry, Input, Operator, Output, parse_operator
from tallystick.errors import InvalidInput

NUMBERS = st.floats(-1e30, 1e30, allow_nan=False).filter(lambda x: x == 0.0 or abs(x) > 1e-30)


@given(NUMBERS, NUMBERS)
def test_products_and_sums_of_two_are_exact_pairs(a: float, b: float) -> None:
    p, low = two_product(np.array([a]), np.array([b]))
    s, rest = two_sum(np.array([a]), np.array([b]))

    assert Fraction(float(p[0])) + Fraction(float(low[0])) == Fraction(a) * Fraction(b)
    assert Fraction(float(s[0])) + Fraction(float(rest[0])) == Fraction(a) + Fraction(b)


@given(st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), min_size=1, max_size=30))
def test_long_products_lose_less_than_the_bound_that_is_granted(
    rows: list[tuple[float, float, float]],
) -> None:
    a, b, c = (np.array(column) for column in zip(*rows, strict=True))
    value, magnitude = products(a, b)
    exact = sum((Fraction(x) * Fraction(y) for x, y, _ in rows), Fraction(0))
    assert abs(Fraction(value) - exact) <= Fraction(OWN_UNIT) * Fraction(magnitude)
    high, low = triple_products(a, b, c)
    threefold = sum((Fraction(x) * Fraction(y) * Fraction(z) for x, y, z in rows), Fraction(0))
    size = Fraction(float(np.abs(a * b * c).sum()))
    assert abs(Fraction(exact_sum(high, low)) - threefold) <= Fraction(2.0**-52) * size


@pytest.mark.parametrize(("dtype", "u"), [("F32", 2.0**-24), ("F64", 2.0**-53)])
def test_a_tolerance_ends_where_it_says(dtype: str, u: float) -> None:
    point = Point(1.0, 10.0)
    room = tolerance(point, dtype)

    assert 10.0 * u <= room <= 32.0 * u
    assert is_within(1.0 + 0.8 * room, point, dtype)
    assert not is_within(1.0 + 1.2 * room, point, dtype)
    assert not is_within(math.nan, point, dtype)
    assert not is_within(math.inf, point, dtype)
    assert is_within(1.0, Point(1.0, exact=True), dtype)
    assert not is_within(math.nextafter(1.0, 2.0), Point(1.0, exact=True), dtype)


def test_gamma_is_infinite_where_the_analysis_ends() -> None:
    assert gamma(3, 2.0**-24) == pytest.approx(3 * 2.0**-24)
    assert gamma(2.0**24, 2.0**-24) == math.inf


def test_a_sum_is_opened_by_blocks_that_cover_it() -> None:
    terms = np.arange(1.0, 1001.0)
    summed = Sum(1000, lambda low, high: products(terms[low:high], terms[low:high]), Point)

    assert summed.num_blocks == 64
    assert [summed.bounds(n)[0] for n in range(1, 64)] == [summed.bounds(n)[1] for n in range(63)]
    assert summed.total(summed.partials()).value == float((terms * terms).sum())
    (p, q), *_ = summed.partials()
    assert is_right_partial((p, q), (p, q))
    assert not is_right_partial((p * (1 + 2.0**-40), q), (p, q))
    assert not is_right_partial((p, q * 1.01), (p, q))


# -- rules on real arithmetic -------------------------------------------------------------------


def tensor(data: np.ndarray) -> Output:
    shape = tuple(data.shape)
    strides = tuple(each // data.itemsize for each in data.strides)
    dtype = "F32" if data.dtype == np.float32 else "F64"
    return Output(TensorDigest(dtype, data.size, bytes(32)), Geometry(shape, strides))


def operand(number: int, data: np.ndarray) -> Input:
    made = tensor(data)
    return Input((number, 0), made.tensor.dtype, made.view)


def evaluate(
    name: str, attributes: dict[str, object], inputs: list[np.ndarray], out: np.ndarray, element: int
) -> bool:
    op = Operator(
        name, "default", "", "forward", 0, attributes, tuple(map(operand, range(9), inputs)), (tensor(out),)
    )
    rule = find_rule(op)
    assert rule is not None

    def read(slot: int, flat: np.ndarray) -> np.ndarray:
        return inputs[slot].ravel(order="K")[flat]

    formula = rule(op, 0, element, read)
    point = formula.total(formula.partials()) if isinstance(formula, Sum) else formula
    stated = out.ravel(order="K")[stored_at(op.outputs[0].view, element)].item()
    return is_within(stated, point, op.outputs[0].tensor.dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("inner", [1, 40, 3000])
def test_a_product_in_any_order_is_within_and_a_changed_one_is_not(dtype: type, inner: int) -> None:
    rng = np.random.default_rng(inner)
    a, b = rng.standard_normal((3, inner)).astype(dtype), rng.standard_normal((inner, 4)).astype(dtype)
    attributes: dict[str, object] = {"self": {"input": 0}, "mat2": {"input": 1}}
    order = rng.permutation(inner)
    forwards = np.zeros((3, 4), dtype)
    for k in order:  # one rounding a product and a sum, in an order of its own
        forwards += a[:, k : k + 1] * b[k]
    for element in range(12):
        assert evaluate("aten::mm", attributes, [a, b], forwards, element)
    magnitude = np.abs(a) @ np.abs(b)
    u = 2.0**-24 if dtype is np.float32 else 2.0**-53
    wrong = (forwards + (6.0 * (inner + 20) * u * magnitude)).astype(dtype)
    for element in range(12):
        assert not evaluate("aten::mm", attributes, [a, b], wrong, element)


def test_a_transposed_operand_is_read_through_its_strides() -> None:
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((3, 5)), np.asfortranarray(rng.standard_normal((5, 4)))
    attributes: dict[str, object] = {"self": {"input": 0}, "mat2": {"input": 1}}

    assert all(evaluate("aten::mm", attributes, [a, b], a @ b, element) for element in range(12))
    assert not all(
        evaluate("aten::mm", attributes, [a, np.ascontiguousarray(b)], a @ b[::-1], e) for e in range(12)
    )


@given(st.integers(0, 119))
def test_positions_count_in_row_order(element: int) -> None:
    position = position_of((2, 3, 4, 5), element)
    view = Geometry((2, 3, 4, 5), (60, 20, 5, 1))

    assert np.ravel_multi_index(position, (2, 3, 4, 5)) == element
    assert stored_at(view, element) == element
    assert flat_of(view, tuple(np.array([at]) for at in position)).tolist() == [element]


def test_an_operator_outside_the_table_has_no_rule() -> None:
    assert find_rule(Operator("aten::_fft_r2c", "", "", "forward", 0, {})) is None


# -- leaves -------------------------------------------------------------------------------------

LEAF = Operator(
    "aten::mm", "default", "layer", "forward", 1, {"alpha": {"float": (0.5).hex()}, "self": {"input": 0}},
    (Input((3, 0), "F32", Geometry((2, 2), (2, 1))),),
    (Output(TensorDigest("F32", 4, bytes(32)), Geometry((2, 2), (2, 1))),),
)  # fmt: skip


def test_a_leaf_has_one_encoding() -> None:
    assert parse_operator(LEAF.encode()) == LEAF
    assert parse_operator(LEAF.encode()).encode() == LEAF.encode()
    assert LEAF.number("alpha") == 0.5
    assert LEAF.slot("self") == 0


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (b'"phase":"forward"', b'"phase":"sideways"', "phase 'sideways' is unknown"),
        (b'"from":[3,0]', b'"from":[-3,0]', "no output of a leaf"),
        (b'"from":[3,0]', b'"from":[3]', "no output of a leaf"),
        (b'"stride":[2,1]', b'"stride":[2]', "dimensions and 1 strides"),
        (b'"stride":[2,1]', b'"stride":[2,-1]', "negative or too large"),
        (b'"elements":4', b'"elements":3', "shows element 3 of 3"),
        (b'"dtype":"F32"', b'"dtype":"F31"', "is unknown"),
        (b'"micro_batch":1', b'"micro_batch":-1', "out of range"),
        (b"{", b"{ ", "canonical"),
    ],
)
def test_a_leaf_of_another_form_is_refused(old: bytes, new: bytes, reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason):
        parse_operator(LEAF.encode().replace(old, new, 1))


def test_an_objection_has_one_encoding_and_a_structure_no_element() -> None:
    assert parse_objection(Objection(7, 1, 2).encode()) == Objection(7, 1, 2)
    with pytest.raises(InvalidInput, match="a structure has no element"):
        parse_objection(Objection(7, structure=True).encode().replace(b'"element":0', b'"element":1'))
    with pytest.raises(InvalidInput, match="out of range"):
        Objection(-1)


@given(st.binary(max_size=300))
def test_any_bytes_are_refused_with_one_kind_of_error(data: bytes) -> None:
    with pytest.raises(InvalidInput):
        parse_operator(data)
    with pytest.raises(InvalidInput):
        parse_objection(data)


@pytest.mark.parametrize("name", ["mm", "addmm", "baddbmm", "sum", "mean", "linalg_vector_norm"])
def test_a_sums_bound_is_that_of_its_terms_and_hardly_more(name: str) -> None:
    """Of ``n`` terms any order may differ by ``n u`` times their magnitudes; four times that nobody's arithmetic does."""
    n, u = 40, 2.0**-24
    rng = np.random.default_rng(3)
    a, b, bias = (rng.standard_normal(n) for _ in range(3))
    a, b, bias = (each.astype(np.float32) for each in (a, b, bias[:1]))
    exact, size = float(a.astype(float) @ b.astype(float)), float(np.abs(a.astype(float) * b).sum())
    attributes: dict[str, object] = {"self": {"input": 0}}
    if name in ("mm", "addmm", "baddbmm"):
        outer = (1,) if name == "baddbmm" else ()
        row, column = a.reshape(*outer, 1, n), b.reshape(*outer, n, 1)
        names = {"mm": ("self", "mat2"), "addmm": ("mat1", "mat2"), "baddbmm": ("batch1", "batch2")}[name]
        inputs = [row, column]
        attributes = {each: {"input": at} for at, each in enumerate(names)}
        if name != "mm":
            inputs, attributes = [*inputs, bias.reshape(*outer, 1, 1)], {**attributes, "self": {"input": 2}}
            exact, size = exact + float(bias[0]), size + abs(float(bias[0]))
        shape: tuple[int, ...] = (*outer, 1, 1)
    else:
        inputs, shape, attributes = [a], (1,), {**attributes, "dim": [0]}
        exact, size = float(a.astype(float).sum()), float(np.abs(a.astype(float)).sum())
        if name == "mean":
            exact, size = exact / n, size / n
        if name == "linalg_vector_norm":
            exact = size = math.sqrt(float(a.astype(float) @ a.astype(float)))
    for factor, within in ((0.4, True), (-0.4, True), (4.0, False), (-4.0, False)):
        stated = np.full(shape, np.float32(exact + factor * (n + 13) * u * size))
        assert evaluate(f"aten::{name}", attributes, inputs, stated, 0) == within, factor


def test_a_partial_sum_is_right_to_its_last_bits_and_an_infinity_is_no_number() -> None:
    for bits, right in ((-52, True), (-49, False)):
        assert is_right_partial((1.0 + 2.0**bits, 1.0), (1.0, 1.0)) == right
    assert not is_within(math.inf, Point(1.0, math.inf), "F64")  # whatever a bound without end allows
    assert is_right_partial((1.0, 1.0 + 2.0**-31), (1.0, 1.0))
    assert not is_right_partial((1.0, 1.0 + 2.0**-29), (1.0, 1.0))


def test_partial_sums_of_what_are_no_numbers_are_right_if_they_are_none() -> None:
    for found in ((math.nan, 1.0), (math.inf, math.inf), (1.0, math.inf)):
        assert is_right_partial(found, found)
        assert is_right_partial((math.nan, math.nan), found)
        assert not is_right_partial((1.0, 1.0), found)
    assert not is_right_partial((math.nan, 1.0), (1.0, 1.0))
    for odd in ([math.inf, -math.inf], [math.nan, 1.0], [1e308] * 3):
        assert math.isnan(exact_sum(np.array(odd)))
    assert exact_sum(np.array([math.inf, 1.0])) == math.inf


LONG = Sum(
    1000,
    lambda low, high: (float(sum((-1) ** n for n in range(low, high))), float(high - low)),
    lambda total, magnitude: Point(total, 1003.0 * magnitude),
)


def edge_of(point: Point) -> float:
    """Return how far an auditor that objects beyond it is safe."""
    return (1.0 + MARGIN[0]) * tolerance(point, "F64") + MARGIN[1] * abs(point.value)


@pytest.mark.parametrize("towards", [1.0, -1.0])
def test_an_auditor_objects_beyond_all_that_right_partial_sums_can_excuse(towards: float) -> None:
    low, own, high = readings_of(LONG)
    plain = towards * (tolerance(own, "F64") + 0.9 * STATED * LONG.count)
    share = 0.999 * towards * STATED, 1.0 + 0.999 * STATED_MAGNITUDE
    shifted = [(p + share[0] * q, share[1] * q) for p, q in LONG.partials()]

    assert all(map(is_right_partial, shifted, LONG.partials()))
    assert not is_within(plain, LONG.total(LONG.partials()), "F64")  # it is false, by the sums as they are
    assert abs(plain) > edge_of(own)
    assert is_within(plain, LONG.total(shifted), "F64")  # and the trainer clears itself of it
    assert not is_false(plain, (low, own, high), "F64")
    last = high if towards > 0.0 else low
    for factor, beyond in ((1.0 - 2.0**-40, False), (1.0 + 2.0**-40, True)):
        assert is_false(last.value + towards * factor * edge_of(last), (low, own, high), "F64") == beyond


def test_no_right_partial_sums_clear_what_an_auditor_objects_to() -> None:
    rng, points = np.random.default_rng(4), readings_of(LONG)
    least = points[2].value + edge_of(points[2]) * (1.0 + 2.0**-40)
    assert is_false(least, points, "F64")
    upwards = np.ones((2, LONG.num_blocks))
    for p, q in (upwards, *(rng.choice([-1.0, 1.0], upwards.shape) for _ in range(50))):
        stated = [
            (own + STATED * size * up, size + STATED_MAGNITUDE * size * more)
            for (own, size), up, more in zip(LONG.partials(), p, q, strict=True)
        ]
        assert all(map(is_right_partial, stated, LONG.partials()))
        assert not is_within(least, LONG.total(stated), "F64")


def test_a_short_sum_and_a_number_have_one_reading_and_a_margin() -> None:
    short = Sum(64, LONG.block, LONG.finish)
    assert readings_of(short) == (short.total(short.partials()),)
    point = Point(0.0, 10.0)
    assert readings_of(point) == (point,)
    for bits, beyond in ((-17, False), (-15, True)):
        assert is_false((1.0 + 2.0**bits) * tolerance(point, "F32"), (point,), "F32") == beyond
    for bits, beyond in ((-50, False), (-49, True)):
        assert is_false(1.0 + 2.0**bits, (Point(1.0),), "F64") == beyond
    assert not is_false(1.0, (Point(1.0, exact=True),), "F64")
    assert is_false(math.nextafter(1.0, 2.0), (Point(1.0, exact=True),), "F64")
