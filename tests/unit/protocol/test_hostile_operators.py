"""Leaves that no honest step has: a reader neither fails nor reserves the memory that they claim, and clears nobody by them."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Mapping
from typing import Any

import pytest

from tallystick.commit.encoding import hex_float
from tallystick.commit.state import Entry, hold
from tallystick.commit.tensors import OpenedChunk, TensorDigest, digest_of
from tallystick.protocol.openings import Opening
from tallystick.protocol.operators import (
    ADAM,
    LOAD,
    EarlierLeaf,
    Geometry,
    Input,
    Operator,
    OperatorList,
    Output,
)
from tallystick.protocol.rulings import Accusation, Finding, rule_on_operator
from tallystick.protocol.run_documents import JobRecord, PolicyRecord, Specification, StepRecord
from tallystick.protocol.step_rules import StepFacts

CHUNK = 4096
DATA = struct.pack("<4f", 1.0, 2.0, 3.0, 4.0)
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
HUGE = 1 << 46
FLAT = Geometry((4,), (1,))


def tensor() -> TensorDigest:
    return digest_of("F32", 4, memoryview(DATA), CHUNK)


def ruled(
    name: str,
    attributes: Mapping[str, Any],
    views: list[Geometry],
    shown: Geometry = FLAT,
    partials: int = 0,
    block: int = -1,
) -> Finding:
    """Return the ruling on an operator whose operands and result all are the four numbers of DATA."""
    loads = [
        Operator(LOAD, "", f"model/{n}", "load", 0, {}, (), (Output(tensor(), FLAT),))
        for n in range(len(views))
    ]
    inputs = tuple(Input((n, 0), "F32", view) for n, view in enumerate(views))
    op = Operator(name, "default", "m", "forward", 0, attributes, inputs, (Output(tensor(), shown),))
    listed = OperatorList(bytes(32), [each.encode() for each in (*loads, op)])
    at, piece = len(loads), (OpenedChunk(0, DATA, ()),)
    sources = {n: listed.open_earlier(n, at) for n in range(at)}
    assert all(isinstance(each, EarlierLeaf) for each in sources.values())
    opening = Opening(
        listed.witness_at(at), sources, dict.fromkeys((-1, *range(at)), piece), ((0.0, 0.0),) * partials
    )
    return rule_on_operator(
        FACTS, bytes(32), CHUNK, agreed=listed.commitment_at(at), claimed=listed.commitment_at(at + 1),
        agreed_state=bytes(32), claimed_state=bytes(32), accusation=Accusation(0, 0, block), opening=opening,
    )  # fmt: skip


def tensors(*names: str) -> dict[str, Any]:
    return {name: {"input": n} for n, name in enumerate(names)}


def number(value: float) -> dict[str, str]:
    return {"float": hex_float(value)}


ROW = Geometry((2, HUGE), (0, 0))  # so large that no memory holds it, over one element
COLUMN = Geometry((HUGE, 2), (0, 0))
PLANE = Geometry((1, 1, 1 << 20, 1 << 20), (0, 0, 0, 0))
ONE = Geometry((1, 1, 1, 1), (1, 1, 1, 1))
POOL = {"kernel_size": [1 << 20, 1 << 20], "stride": [], "padding": [0, 0], "ceil_mode": False}
WINDOW = {"stride": [1, 1], "padding": [0, 0], "dilation": [1, 1], "transposed": False, "groups": 1}
ADAM_NUMBERS = {
    "lr": number(0.1), "beta1": number(0.9), "beta2": number(0.99), "eps": number(0.0), "weight_decay": number(0.0),
    "decoupled": True, "step": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "attributes", "views", "shown", "partials"),
    [
        ("aten::mm", tensors("self", "mat2"), [ROW, COLUMN], Geometry((2, 2), (2, 1)), 1024),
        ("aten::_log_softmax", {**tensors("self"), "dim": 1}, [ROW], Geometry((2, 2), (2, 1)), 0),
        ("aten::sum", {**tensors("self"), "dim": [1]}, [ROW], Geometry((2,), (1,)), 1024),
        ("aten::max_pool2d_with_indices", {**POOL, **tensors("self"), "dilation": [1, 1]}, [PLANE], ONE, 0),
        ("aten::avg_pool2d", {**POOL, **tensors("self")}, [PLANE], ONE, 0),
        ("aten::convolution", {**WINDOW, **tensors("input", "weight")}, [PLANE, PLANE], ONE, 0),
        (
            "aten::native_layer_norm",
            {**tensors("input"), "normalized_shape": [1], "eps": number(0.0)},
            [ROW],
            ONE,
            0,
        ),
    ],
)
def test_a_claimed_size_reserves_no_memory(
    name: str, attributes: dict[str, Any], views: list[Geometry], shown: Geometry, partials: int
) -> None:
    tracemalloc.start()
    try:
        found = ruled(name, attributes, views, shown, partials, block=0 if partials else -1)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (found.fault, "at once" in found.reason or "plain windows" in found.reason) == ("unknown", True), (
        found
    )
    assert most < 1 << 24


@pytest.mark.parametrize(
    ("name", "attributes"),
    [
        (ADAM, {**ADAM_NUMBERS, "beta1": number(1.0)}),
        (ADAM, {**ADAM_NUMBERS, "step": 0}),
        (ADAM, {**ADAM_NUMBERS, "beta2": number(1.5)}),
        (ADAM, {**ADAM_NUMBERS, "step": number(float("inf"))}),
        ("aten::constant_pad_nd", {**tensors("self"), "pad": [1, 1, 1, 1, 1, 1]}),
        ("aten::cumsum", {**tensors("self"), "dim": number(float("nan"))}),
        ("aten::stack", {"dim": 0}),
        ("aten::sum", {**tensors("self"), "dim": [7]}),
        (
            "aten::avg_pool2d",
            {**tensors("self"), "kernel_size": [], "stride": [], "padding": [0], "ceil_mode": False},
        ),
        ("aten::convolution", {**tensors("input"), "weight": {"input": 0}, **WINDOW, "groups": 0}),
        ("aten::mm", {**tensors("self"), "mat2": {"input": 0}}),
    ],
)
def test_arguments_without_meaning_neither_clear_nor_fail(name: str, attributes: dict[str, Any]) -> None:
    found = ruled(name, attributes, [FLAT, FLAT, FLAT, FLAT])
    assert found.fault != "sound", found


def test_an_operand_that_reads_beyond_its_source_is_the_trainers_fault() -> None:
    found = ruled("aten::clone", tensors("self"), [Geometry((8,), (1,))])
    assert (found.fault, found.reason.rpartition(": ")[2]) == (
        "faulty",
        "input 0 reads beyond the end of leaf 0",
    )
    assert ruled("aten::clone", tensors("self"), [Geometry((4,), (1,))]).fault == "sound"


@pytest.mark.parametrize(("dtype", "fault"), [("F32", "sound"), ("I32", "faulty")])
def test_a_load_has_the_form_of_the_agreed_entry(dtype: str, fault: str) -> None:
    """The same bytes under another dtype are other numbers."""
    state = hold([Entry("model/0", dtype, (4,), memoryview(DATA))])
    load = Operator(LOAD, "", "model/0", "load", 0, {}, (), (Output(tensor(), FLAT),))
    listed = OperatorList(bytes(32), [load.encode()])
    opening = Opening(
        listed.witness_at(0), {}, {-1: (OpenedChunk(0, DATA, ()),)}, state=((state.open("model/0", 0), DATA),)
    )
    found = rule_on_operator(
        FACTS, bytes(32), CHUNK, agreed=listed.commitment_at(0), claimed=listed.commitment_at(1),
        agreed_state=state.root, claimed_state=bytes(32), accusation=Accusation(0, 0), opening=opening,
    )  # fmt: skip
    assert found.fault == fault, found


def test_the_same_leaf_with_meaning_is_judged() -> None:
    """The control: the scaffold opens what an honest operator needs."""
    assert ruled("aten::clone", tensors("self"), [FLAT]).fault == "sound"
    assert ruled("aten::neg", tensors("self"), [FLAT]).fault == "faulty"
    square, two = Geometry((2, 2), (2, 1)), tensors("self", "mat2")
    found = ruled("aten::mm", two, [square, square], square)
    assert (found.fault, "must be 0x1.c" in found.reason) == (
        "faulty",
        True,
    )  # 1 * 1 + 2 * 3 = 7, stated is 1
