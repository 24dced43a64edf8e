"""Elements that have one value, whatever the machine: the judge knows it, or says that it does not."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tallystick.commit.tensors import digest_of, open_chunks
from tallystick.dispute import rulings
from tallystick.dispute.bounds.steps import StepFacts
from tallystick.dispute.openings import OPENING_LIMIT, SHOWN_WHOLE, Opening
from tallystick.dispute.operator_list import LOAD, Geometry, Input, Operator, OperatorList, Output
from tallystick.dispute.rulings import Accusation, OperatorFinding, rule_on_operator
from tallystick.run.documents import JobRecord, PolicyRecord, Specification, StepRecord

CHUNK = 4096
ZERO = "00" * 32
FACTS = StepFacts(
    Specification(
        job=JobRecord("job", ZERO, {}, None), policy=PolicyRecord("fp32", {}), seed=1, steps=1, checkpoint_every=1,
        accumulation=1, world_size=1, initial_state=ZERO, versions={}, sites=(),
    ),
    StepRecord(
        step=0, rank=0, micro_batches=1, batch=ZERO, log=ZERO, log_bytes=0, loss=None, schedule=(), skipped=False,
        fingerprint="0" * 16, state_root=ZERO,
    ),
    b"",
    b"",
)  # fmt: skip
KINDS = {
    "float32": "F32",
    "float64": "F64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "uint8": "U8",
    "bool": "BOOL",
}
INF, NAN = math.inf, math.nan
MOST = float(np.finfo(np.float32).max)


def result(data: np.ndarray) -> Output:
    shape = tuple(data.shape)
    strides = tuple(each // data.itemsize for each in np.empty(shape, data.dtype).strides)
    digest = digest_of(KINDS[data.dtype.name], data.size, data.reshape(-1).view("u1").data, CHUNK)
    return Output(digest, Geometry(shape, strides))


def ruled(
    name: str,
    attributes: dict[str, Any],
    inputs: list[np.ndarray],
    out: np.ndarray,
    element: int = 0,
    opened: bool = True,
) -> OperatorFinding:
    """Return the ruling on one element of an operator of which everything is opened, or nothing; all inputs are loaded."""
    name, _, overload = name.partition(".")
    loads = [
        Operator(LOAD, "", f"model/{n}", "load", 0, {}, (), (result(data),)) for n, data in enumerate(inputs)
    ]
    read = [Input((n, 0), each.outputs[0].tensor.dtype, each.outputs[0].view) for n, each in enumerate(loads)]
    op = Operator(f"aten::{name}", overload, "", "forward", 0, attributes, tuple(read), (result(out),))
    listed, at = OperatorList(bytes(32), [each.encode() for each in (*loads, op)]), len(loads)
    pieces = {
        slot: open_chunks(data.reshape(-1).view("u1").data, CHUNK, range(-(-data.nbytes // CHUNK)))
        for slot, data in enumerate((*inputs, out))
    }
    pieces[-1] = pieces.pop(len(inputs))
    if not opened:
        pieces = {}
    opening = Opening(listed.witness_at(at), {n: listed.open_earlier(n, at) for n in range(at)}, pieces)
    return rule_on_operator(
        FACTS, bytes(32), CHUNK, agreed=listed.commitment_at(at), claimed=listed.commitment_at(at + 1),
        agreed_state=bytes(32), claimed_state=bytes(32), accusation=Accusation(0, element), opening=opening,
    )  # fmt: skip


def tensors(*names: str, **more: Any) -> dict[str, Any]:
    return {**{name: {"input": n} for n, name in enumerate(names)}, **more}


def number(value: float) -> dict[str, str]:
    return {"float": value.hex()}


BOTH, OWN = tensors("self", "other"), tensors("self")
I64, F32 = "int64", "float32"
EXACT = [
    ("truth of a whole number", "_to_copy", OWN, [([3], I64)], True, False, "bool"),
    ("truth of an even number", "_to_copy", OWN, [([256], I64)], True, False, "bool"),
    ("truth of none", "_to_copy", OWN, [([0], I64)], False, True, "bool"),
    ("truth or truth", "add.Tensor", BOTH, [([1], "bool"), ([1], "bool")], True, False, "bool"),
    ("product that wraps", "mul.Tensor", BOTH, [([7], I64), ([2**61 + 1], I64)], 7 - 2**61, 7, I64),
    ("sum that wraps", "add.Tensor", BOTH, [([2**63 - 1], I64), ([1], I64)], -(2**63), 2**63 - 1, I64),
    ("sum just below", "add.Tensor", BOTH, [([2**63 - 2], I64), ([1], I64)], 2**63 - 1, -(2**63), I64),
    ("byte that wraps", "mul.Tensor", BOTH, [([3], "uint8"), ([100], "uint8")], 44, 255, "uint8"),
    ("byte that just does not", "add.Tensor", BOTH, [([155], "uint8"), ([100], "uint8")], 255, 0, "uint8"),
    ("short that wraps", "mul.Tensor", BOTH, [([4], "int16"), ([9000], "int16")], -29536, 32767, "int16"),
    ("narrowed", "_to_copy", OWN, [([2**31 + 5], I64)], 5 - 2**31, 2**31 - 1, "int32"),
    ("narrowed without loss", "_to_copy", OWN, [([2**31 - 1], I64)], 2**31 - 1, -(2**31), "int32"),
    ("byte negated", "neg", OWN, [([1], "uint8")], 255, 1, "uint8"),
    ("filled with a truth", "full", {"fill_value": 3}, [], True, False, "bool"),
    ("power of whole numbers", "pow.Tensor_Scalar", tensors("self", exponent=20), [([11], I64)],
     (11**20 + 2**63) % 2**64 - 2**63, 2**63 - 1, I64),
    ("padded", "constant_pad_nd", tensors("self", pad=[1, 0], value=number(0.3)), [([1.0], F32)], 0.3, 0.3000001, F32),
    ("rounded number", "_to_copy", OWN, [([2**24 + 1], I64)], 2.0**24, 2.0**24 + 2, F32),
    ("number just held", "_to_copy", OWN, [([2**24 - 1], I64)], 2.0**24 - 1, 2.0**24, F32),
    ("infinite mask", "add.Tensor", BOTH, [([-INF], F32), ([3.0], F32)], -INF, -MOST, F32),
    ("masked out", "masked_fill.Scalar", tensors("self", "mask", value=number(-INF)),
     [([3.0], F32), ([1], "bool")], -INF, 3.0, F32),
    ("narrowed to infinity", "_to_copy", OWN, [([1e300], "float64")], INF, MOST, F32),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "attributes", "inputs", "right", "wrong", "dtype"),
    [case[1:] for case in EXACT],
    ids=[c[0] for c in EXACT],
)
def test_an_element_of_one_value_has_that_and_no_other(
    name: str,
    attributes: dict[str, Any],
    inputs: list[tuple[list[Any], str]],
    right: Any,
    wrong: Any,
    dtype: str,
) -> None:
    held = [np.array(data, kind) for data, kind in inputs]
    size = 2 if "pad" in attributes else 1
    for value, fault in ((right, "sound"), (wrong, "faulty")):
        found = ruled(name, attributes, held, np.full(size, value, dtype))
        assert found.fault == fault, found.reason
    if size == 2:  # what it does not pad it moves
        assert ruled(name, attributes, held, np.ones(2, dtype), 1).fault == "sound"


ROW = tensors("self", dim=1, half_to_float=False)
NOWHERE = [
    ("masks added", "add.Tensor", BOTH, [[-MOST], [-MOST]], 1),
    ("exponential", "exp", OWN, [[200.0]], 1),
    ("product", "mul.Tensor", BOTH, [[2.0**100], [2.0**100]], 1),
    ("quotient", "div.Tensor", BOTH, [[2.0**100], [2.0**-100]], 1),
    ("mean", "mean.dim", tensors("self", dim=[1]), [[[MOST, MOST]]], 1),
    ("sum", "sum.dim_IntList", tensors("self", dim=[1]), [[[MOST, -MOST]]], 1),
    ("sum of infinities", "sum.dim_IntList", tensors("self", dim=[1]), [[[INF, -INF]]], 1),
    ("norm", "linalg_vector_norm", tensors("self", dim=[1]), [[[2.0**64, 1.0]]], 1),
    ("power", "pow.Tensor_Scalar", tensors("self", exponent=number(3.0)), [[2.0**60]], 1),
    ("row masked out", "_softmax", ROW, [[[-INF, -INF]]], 2),
    ("row masked out safely", "_log_softmax", ROW, [[[-INF, -INF]]], 2),
    ("row with a NaN", "_softmax", ROW, [[[NAN, 0.0]]], 2),
    (
        "softmax's gradient",
        "_softmax_backward_data",
        tensors("grad_output", "output", dim=1),
        [[[2.0**125, 0.0]], [[2.0**-20, 1.0]]],
        2,
    ),
    ("infinity from infinity", "sub.Tensor", BOTH, [[INF], [INF]], 1),
    ("number that is flushed", "mul.Tensor", BOTH, [[2.0**-140], [2.0**100]], 1),
]


@pytest.mark.parametrize(
    ("name", "attributes", "inputs", "size"),
    [case[1:] for case in NOWHERE],
    ids=[case[0] for case in NOWHERE],
)
def test_nothing_is_said_of_numbers_that_some_machine_does_not_have(
    name: str, attributes: dict[str, Any], inputs: list[Any], size: int
) -> None:
    held = [np.array(data, np.float32) for data in inputs]
    shape = (1, 2) if size == 2 else (1,)
    for value in (0.0, 1.0, MOST, INF, -INF, NAN):
        found = ruled(name, attributes, held, np.full(shape, value, np.float32))
        assert found.fault == "unknown", (value, found.reason)


def test_a_number_just_below_the_largest_is_judged() -> None:
    for exponent, fault in ((124.0, "faulty"), (125.0, "unknown")):
        held = [np.array([2.0 ** (exponent - 10)], np.float32), np.array([2.0**8], np.float32)]
        assert ruled("mul.Tensor", BOTH, held, np.array([1.0], np.float32)).fault == fault, exponent
    for large, fault in ((2.0**53, "faulty"), (2.0**53 + 2, "unknown")):
        assert ruled("_to_copy", OWN, [np.array([int(large)])], np.array([1.0], np.float32)).fault == fault


def test_normalisation_is_judged_of_modest_numbers() -> None:
    attributes = tensors("input", normalized_shape=[4], eps=number(1e-5))
    for top, fault in ((2.0**20 - 0.0625, "faulty"), (2.0**20, "unknown"), (INF, "unknown")):
        row = np.array([[1.0, 2.0, 3.0, top]], np.float32)
        assert (
            ruled("native_layer_norm", attributes, [row], np.full((1, 4), 9.0, np.float32)).fault == fault
        ), top


@pytest.mark.parametrize(
    ("name", "attributes", "inputs", "out"),
    [
        ("neg", OWN, [np.zeros(500, np.uint8)], np.zeros(500, np.uint8)),
        ("all", OWN, [np.ones(999, bool)], np.ones((), bool)),
        (
            "sum.dim_IntList",
            tensors("self", dim=[1]),
            [np.ones((1, 249), np.float32)],
            np.full(1, 249, np.float32),
        ),
    ],
    ids=["what it gives is large", "what it reads is large", "a sum"],
)
def test_what_is_too_large_to_be_shown_is_not_judged_and_anything_smaller_must_be_shown(
    name: str,
    attributes: dict[str, Any],
    inputs: list[np.ndarray],
    out: np.ndarray,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a thousand bytes it may not be shown, of as many as the limit it must."""
    size = out.nbytes + sum(each.nbytes for each in inputs)
    for limit, fault in ((size - 1, "unknown"), (size, "faulty")):
        monkeypatch.setattr(rulings, "SHOWN_WHOLE", limit)
        found = ruled(name, attributes, inputs, out, opened=False)
        assert found.fault == fault, (limit, found.reason)


def test_normalisation_is_judged_of_no_less_than_some_variance() -> None:
    row = np.ones((1, 4), np.float32)
    for eps, fault in ((2.0**-40, "faulty"), (2.0**-41, "unknown")):
        attributes = tensors("input", normalized_shape=[4], eps=number(eps))
        assert ruled("native_layer_norm", attributes, [row], 9.0 * row).fault == fault, eps


def test_what_can_be_shown_whole_fits_an_opening() -> None:
    """A sixty-fourth of it, and six hashes more in each path."""
    data = bytes(SHOWN_WHOLE // 64)
    pieces = open_chunks(memoryview(data), CHUNK, range(len(data) // CHUNK))
    size = 64 * len(Opening(pieces={0: pieces}).encode()) + 6 * 70 * SHOWN_WHOLE // CHUNK
    assert OPENING_LIMIT // 2 < size < 3 * OPENING_LIMIT // 4
