"""Leaves that no honest step has: a reader neither fails nor reserves the memory that they claim, and clears nobody by them."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tallystick.commit.encoding import digest, hex_float
from tallystick.commit.merkle import root as merkle_root
from tallystick.commit.state import CHUNK_BYTES, Entry, hold
from tallystick.commit.tensors import OpenedChunk, TensorDigest, digest_of
from tallystick.dispute.bounds.steps import FRAME_TAG, StepFacts
from tallystick.dispute.openings import Opening, StateChunk, store_nodes
from tallystick.dispute.operator_list import (
    ADAM,
    BATCH,
    END,
    LOAD,
    ROUND,
    STORE,
    EarlierLeaf,
    Geometry,
    Input,
    Operator,
    OperatorList,
    Output,
)
from tallystick.dispute.rulings import Accusation, OperatorFinding, rule_on_operator
from tallystick.numerics.grid_table import GridTable, SiteGrid
from tallystick.numerics.log import Frame, Kind, SiteAddress, SparseEntries, encode, encode_frame
from tallystick.run.documents import JobRecord, PolicyRecord, Specification, StepRecord

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
    element: int = 0,
    partial: tuple[float, float] = (0.0, 0.0),
    facts: StepFacts = FACTS,
    nodes: int = 0,
) -> OperatorFinding:
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
        listed.witness_at(at), sources, dict.fromkeys((-1, *range(at)), piece), (partial,) * partials,
        (bytes(32),) * nodes,
    )  # fmt: skip
    return rule_on_operator(
        facts, bytes(32), CHUNK, agreed=listed.commitment_at(at), claimed=listed.commitment_at(at + 1),
        agreed_state=bytes(32), claimed_state=bytes(32), accusation=Accusation(0, element, block), opening=opening,
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
        listed.witness_at(0),
        {},
        {-1: (OpenedChunk(0, DATA, ()),)},
        state=(StateChunk(state.open("model/0", 0), DATA),),
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


# -- each bound of an accusation and of an opening, just inside and just outside ---------------------------------------


@pytest.mark.parametrize(("element", "reason"), [(3, "is 0x1.0000000000000p+2"), (4, "has no element 4")])
def test_who_names_an_element_beyond_the_last_accuses_nobody(element: int, reason: str) -> None:
    found = ruled("aten::clone", tensors("self"), [FLAT], element=element)
    assert (found.fault, reason in found.reason) == ("sound", True), found


TERMS = Geometry((1, 128), (0, 0))  # 128 times 1.0, in 64 partial sums of two terms


@pytest.mark.parametrize(
    ("partials", "block", "fault", "reason"),
    [
        (64, 63, "faulty", "must be 0x1.0000000000000p+7"),
        (64, 64, "sound", "has no partial sum 64"),
        (63, 0, "faulty", "63 partial sums open a sum of 64"),
        (65, 0, "faulty", "65 partial sums open a sum of 64"),
    ],
)
def test_a_long_sum_has_as_many_partial_sums_as_it_has(
    partials: int, block: int, fault: str, reason: str
) -> None:
    asked = {**tensors("self"), "dim": [1]}
    found = ruled("aten::sum", asked, [TERMS], Geometry((1,), (1,)), partials, block, partial=(2.0, 2.0))
    assert (found.fault, reason in found.reason) == (fault, True), found


@pytest.mark.parametrize(("partials", "block"), [(0, -1), (64, -1), (64, 0)])
def test_nodes_open_the_lists_end_alone(partials: int, block: int) -> None:
    """Before, one beside partial sums made to fit a false element had the auditor point at none of them, and lose."""
    asked = {**tensors("self"), "dim": [1]}
    found = ruled(
        "aten::sum", asked, [TERMS], Geometry((1,), (1,)), partials, block, partial=(2.0, 2.0), nodes=1
    )
    assert (found.fault, "which open the list's end alone" in found.reason) == ("faulty", True), found


@pytest.mark.parametrize("name", ["aten::clone", "aten::sum"])
def test_partial_sums_open_a_long_sum_alone(name: str) -> None:
    asked = {**tensors("self"), "dim": [0]} if name == "aten::sum" else tensors("self")
    shown = Geometry((), ()) if name == "aten::sum" else FLAT
    found = ruled(name, asked, [FLAT], shown, partials=1)
    assert (found.fault, "1 partial sums" in found.reason) == ("faulty", True), found


@pytest.mark.parametrize(
    ("count", "kind", "dithered", "is_over"),
    [
        (16, Kind.GRADIENT, False, False),
        (17, Kind.GRADIENT, False, True),
        (17, Kind.BUFFER, False, False),
        (17, Kind.BUFFER, True, True),
    ],
)
def test_a_rounding_site_has_no_more_entries_than_its_budget(
    count: int, kind: Kind, dithered: bool, is_over: bool
) -> None:
    """Twenty elements of which hardly one is ambiguous: the budget is the sixteen that every site has.

    But of a buffer, of which a step may leave all near boundaries.
    """
    address = SiteAddress(0, 0, kind, 0)
    entries = SparseEntries(20, 1, np.arange(count), np.ones(count, dtype=np.int64))
    frame = encode_frame(Frame(((address, encode(entries)),)))
    grid = SiteGrid(0, -20, 0, dithered, scales=np.zeros(1, dtype=np.int16))
    facts = replace(
        FACTS,
        record=replace(FACTS.record, log=digest(FRAME_TAG, frame).hex(), log_bytes=len(frame)),
        frame=frame,
        grids=GridTable({(int(kind), 0): grid}).encode(),
    )
    asked = {"kind": int(kind), "ordinal": 0}
    found = ruled(ROUND, asked, [Geometry((20,), (0,))], Geometry((20,), (0,)), facts=facts)
    assert ("17 log entries exceed the budget of 16" in found.reason) == is_over, found
    assert found.fault == "faulty" or not is_over


def ruled_on_leaf(leaves: Sequence[Operator], opening: Mapping[str, Any], **asked: Any) -> OperatorFinding:
    """Return the ruling on the last of ``leaves``, opened with ``opening`` besides its witness."""
    listed, at = OperatorList(bytes(32), [each.encode() for each in leaves]), len(leaves) - 1
    sources = {n: listed.open_earlier(n, at) for n in opening.get("shown", ())}
    opened = Opening(listed.witness_at(at), sources, nodes=opening.get("nodes", ()))
    facts = {"agreed_state": bytes(32), "claimed_state": bytes(32), "accusation": Accusation(0, 0), **asked}
    return rule_on_operator(
        FACTS, bytes(32), CHUNK, agreed=listed.commitment_at(at), claimed=listed.commitment_at(at + 1),
        opening=opened, **facts,
    )  # fmt: skip


def store(number: int) -> Operator:
    entry = {
        "chunk_bytes": CHUNK_BYTES, "dtype": "F32", "name": f"model/{number:02d}", "nbytes": len(DATA), "shape": [4],
        "tensor_root": f"{number:064x}",
    }  # fmt: skip
    return Operator(STORE, "", f"model/{number:02d}", "store", 0, {"entry": entry})


STORES = tuple(store(number) for number in range(17))  # one more than a node is over
NODES = store_nodes(STORES)
STATE = merkle_root(NODES)


def ended(state: bytes, nodes: Sequence[bytes], claimed: bytes, block: int) -> OperatorFinding:
    """Return the ruling on the end of a list that stores 17 entries."""
    load = Operator(LOAD, "", "model/0", "load", 0, {}, (), (Output(tensor(), FLAT),))
    end = Operator(END, "", "state", "store", 0, {"state_root": state.hex()})
    opening = {"shown": range(18), "nodes": tuple(nodes)}
    return ruled_on_leaf(
        (load, *STORES, end), opening, claimed_state=claimed, accusation=Accusation(0, 0, block)
    )


@pytest.mark.parametrize(
    ("state", "nodes", "claimed", "block", "fault", "reason"),
    [
        (STATE, NODES, STATE, -1, "sound", "the nodes make up the claimed state"),
        (STATE, NODES, STATE, 1, "sound", "node 1 is that of its stores"),
        (STATE, NODES, STATE, 2, "sound", "has no node 2"),
        (bytes(32), NODES, STATE, -1, "faulty", "the list ends in state"),
        (bytes(32), NODES[::-1], bytes(32), -1, "faulty", "the nodes make up state"),
        (merkle_root(NODES[::-1]), NODES[::-1], merkle_root(NODES[::-1]), 1, "faulty", "the stores make up node 1"),
    ],
)  # fmt: skip
def test_a_list_ends_in_the_claimed_state_that_its_stores_make_up(
    state: bytes, nodes: Sequence[bytes], claimed: bytes, block: int, fault: str, reason: str
) -> None:
    found = ended(state, nodes, claimed, block)
    assert (found.fault, reason in found.reason) == (fault, True), found


@pytest.mark.parametrize(
    ("data", "fault", "reason"),
    [
        (DATA, "sound", "is the committed data"),
        (DATA[:-1] + b"\x00", "faulty", "is not the committed data"),
        (DATA[:-1], "faulty", "has 15 bytes"),
    ],
)
def test_a_batch_is_the_committed_data_to_the_last_bit(data: bytes, fault: str, reason: str) -> None:
    batch = Operator(BATCH, "", "batch/0", "load", 0, {}, (), (Output(tensor(), FLAT),))
    found = ruled_on_leaf((batch,), {}, own_batch={"batch/0": data})
    assert (found.fault, reason in found.reason) == (fault, True), found


def test_an_operators_structure_is_the_judges_own() -> None:
    batch = Operator(BATCH, "", "batch/0", "load", 0, {}, (), (Output(tensor(), FLAT),))
    other = replace(batch, module="batch/1")
    accused = Accusation(0, 0, structure=True)
    for own, fault in (
        (batch.structure, "sound"),
        (other.structure, "faulty"),
        (b"", "faulty"),
        (None, "unknown"),
    ):
        found = ruled_on_leaf((batch,), {}, accusation=accused, own_structure=own)
        assert found.fault == fault, found


@pytest.mark.parametrize(("name", "key"), [(END, "state_root"), (STORE, "tensor_root")])
def test_what_is_stored_without_a_root_has_another_structure_than_an_honest_partys(
    name: str, key: str
) -> None:
    """An auditor objects to such a leaf, which it could not read: before, it fell silent and lost."""

    def leaf(held: dict[str, object], **beside: object) -> Operator:
        attributes: dict[str, object] = held if name == END else {"entry": {"name": "model/0.bias", **held}}
        return Operator(name, "", "state", "store", 0, {**attributes, **beside}, (), ())

    honest = leaf({key: "0" * 64})
    assert leaf({key: "f" * 64}).has_structure_of(honest)
    for other in (
        leaf({}),
        leaf({key: "zz"}),
        leaf({key: 3}),
        leaf({key: "F" * 64}),
        leaf({key: "f" * 64}, more=1),
    ):
        assert not other.has_structure_of(honest)
