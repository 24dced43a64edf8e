"""The state commitment: what changes the root, what does not, and opened chunks."""

from __future__ import annotations

import array
import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tallystick.commit.encoding import canonical_json
from tallystick.commit.merkle import EMPTY_ROOT, leaf_hash, node_hash
from tallystick.commit.state import (
    CHUNK_BYTES,
    DTYPE_BYTES,
    ChunkProof,
    Entry,
    EntrySummary,
    StateSummary,
    entry_digest,
    open_chunk,
    parse_chunk_proof,
    parse_state_summary,
    state_root,
    summarise,
    verify_chunk,
    verify_state,
)
from tallystick.errors import InvalidInput, Mismatch

WEIGHT = Entry("weight", "F32", (2, 3), bytes(range(24)))
STEP = Entry("step", "I64", (), bytes(8))


def painted(n: int) -> bytes:
    # 251 is prime, so no two chunks are equal and an exchange is noticed.
    return (bytes(range(251)) * (n // 251 + 1))[:n]


@st.composite
def entries(draw: st.DrawFn) -> list[Entry]:
    names = draw(
        st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=3), unique=True, max_size=4)
    )
    made: list[Entry] = []
    for name in names:
        dtype = draw(st.sampled_from([name for name in DTYPE_BYTES if name != "BOOL"]))
        shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
        n_bytes = DTYPE_BYTES[dtype]
        for size in shape:
            n_bytes *= size
        made.append(Entry(name, dtype, shape, draw(st.binary(min_size=n_bytes, max_size=n_bytes))))
    return made


@given(entries(), st.randoms())
def test_the_order_of_entries_does_not_matter(made: list[Entry], random: Any) -> None:
    shuffled = list(made)
    random.shuffle(shuffled)

    assert state_root(shuffled) == state_root(made)


@given(entries(), entries())
def test_equal_roots_mean_equal_states(a: list[Entry], b: list[Entry]) -> None:
    def facts(made: list[Entry]) -> set[tuple[object, ...]]:
        return {(entry.name, entry.dtype, entry.shape, bytes(entry.data)) for entry in made}

    assert (state_root(a) == state_root(b)) == (facts(a) == facts(b))


@given(entries())
def test_a_summary_survives_its_encoding(made: list[Entry]) -> None:
    summary = summarise(made)

    assert parse_state_summary(summary.encode()) == summary
    assert {entry.digest() for entry in summary.entries} == {entry_digest(entry) for entry in made}


@pytest.mark.parametrize(
    "other",
    [
        dataclasses.replace(WEIGHT, name="weighs"),
        dataclasses.replace(WEIGHT, dtype="I32"),
        dataclasses.replace(WEIGHT, shape=(3, 2)),
        dataclasses.replace(WEIGHT, shape=(6,)),
        dataclasses.replace(WEIGHT, shape=(1, 2, 3)),
        dataclasses.replace(WEIGHT, data=bytes(range(1, 25))),
    ],
)
def test_everything_about_an_entry_counts(other: Entry) -> None:
    verify_state([STEP, WEIGHT], state_root([WEIGHT, STEP]))

    with pytest.raises(
        Mismatch, match=r"checkpoint 3: root is [0-9a-f]{64}, stated root is [0-9a-f]{64}"
    ) as raised:
        verify_state([STEP, other], state_root([WEIGHT, STEP]), what="checkpoint 3")
    own, stated = state_root([STEP, other]).hex(), state_root([WEIGHT, STEP]).hex()
    found = raised.value
    assert (found.where, found.own, found.stated) == ("checkpoint 3", own, stated)


def test_bytes_and_views_of_any_format_are_the_same_entry() -> None:
    values = array.array("f", [1.0, 2.0, 3.0, 4.0])
    as_bytes = Entry("x", "F32", (2, 2), values.tobytes())
    flat = Entry("x", "F32", (2, 2), memoryview(values))
    square = Entry("x", "F32", (2, 2), cast("memoryview", memoryview(values).cast("B").cast("f", (2, 2))))

    assert entry_digest(as_bytes) == entry_digest(flat) == entry_digest(square)


def test_a_view_with_gaps_is_refused() -> None:
    with pytest.raises(InvalidInput, match="entry 'x': data must be contiguous"):
        Entry("x", "U8", (2,), memoryview(bytes(4))[::2])


@pytest.mark.parametrize("size", [CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1])
def test_a_tensor_root_is_the_tree_over_its_chunks(size: int) -> None:
    data = painted(size)

    (summary,) = summarise([Entry("x", "U8", (size,), data)]).entries

    hashes = [leaf_hash(data[at : at + CHUNK_BYTES]) for at in range(0, size, CHUNK_BYTES)]
    assert summary.num_chunks == len(hashes)
    assert summary.tensor_root == (hashes[0] if len(hashes) == 1 else node_hash(*hashes))


def test_a_pool_changes_nothing() -> None:
    big = Entry("big", "U8", (17 * CHUNK_BYTES + 3,), painted(17 * CHUNK_BYTES + 3))

    with ThreadPoolExecutor(2) as pool:
        assert state_root([big, STEP], pool=pool) == state_root([big, STEP])


def test_an_empty_tensor_keeps_its_shape() -> None:
    wide, tall = (summarise([Entry("x", "F32", shape, b"")]) for shape in ((0, 3), (3, 0)))

    assert wide.entries[0].tensor_root == EMPTY_ROOT
    assert wide.root() != tall.root()
    assert summarise([]).root() == EMPTY_ROOT


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "data", "reason"),
    [
        ("", "U8", (), b"a", "name must be 1 to 1024 bytes, is 0"),
        ("\u00e9" * 513, "U8", (), b"a", "name must be 1 to 1024 bytes, is 1026"),
        ("\ud800", "U8", (), b"a", "not encodable as UTF-8"),
        ("x", "F8", (), b"a", "dtype 'F8' is unknown"),
        ("x", "U8", (2,), b"a", r"U8 of shape \[2\] needs 2 bytes, got 1"),
        ("x", "U8", (-1, -1), b"a", "dimension out of range"),
        ("x", "U8", (2**63, 0), b"", "dimension out of range"),
        ("x", "U8", (1,) * 65, b"a", "65 dimensions exceed 64"),
        ("x", "BOOL", (2,), b"\x01\x02", "a BOOL byte must be 0 or 1"),
    ],
)
def test_a_malformed_entry_is_refused(
    name: str, dtype: str, shape: tuple[int, ...], data: bytes, reason: str
) -> None:
    with pytest.raises(InvalidInput, match=reason):
        Entry(name, dtype, shape, data)


def test_the_largest_entry_of_each_kind_passes() -> None:
    Entry("\u00e9" * 512, "U8", (1,) * 64, b"a")
    Entry("x", "U8", (2**63 - 1, 0), b"")
    Entry("x", "BOOL", (2,), b"\x01\x00")


def test_a_state_holds_a_name_once_and_in_order() -> None:
    with pytest.raises(InvalidInput, match="duplicate name 'step'"):
        summarise([STEP, WEIGHT, STEP])
    with pytest.raises(InvalidInput, match="entry 'step' must come before 'weight'"):
        StateSummary(summarise([STEP, WEIGHT]).entries[::-1])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"nbytes": 20}, "needs 24 bytes, states 20"),
        ({"tensor_root": b"short"}, "tensor_root: must be 64 lower-case hexadecimal digits"),
        ({"shape": (0,), "nbytes": 0}, "must have the empty tree's root"),
    ],
)
def test_a_summary_that_contradicts_itself_is_refused(changes: dict[str, Any], reason: str) -> None:
    (summary,) = summarise([WEIGHT]).entries

    with pytest.raises(InvalidInput, match=reason):
        dataclasses.replace(summary, **changes)


BIG = Entry("big", "U8", (2 * CHUNK_BYTES + 5,), painted(2 * CHUNK_BYTES + 5))
STATE = [BIG, STEP, WEIGHT]


@pytest.mark.parametrize("index", [0, 1, 2])
def test_every_chunk_can_be_opened(index: int) -> None:
    chunk = memoryview(BIG.data)[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]

    proof = open_chunk(STATE, "big", index)

    verify_chunk(parse_chunk_proof(proof.encode()), chunk, state_root(STATE))
    assert open_chunk([BIG], "big", index, summary=summarise(STATE)) == proof


def test_what_is_not_in_the_state_cannot_be_opened() -> None:
    with pytest.raises(InvalidInput, match="there is no entry 'bias'"):
        open_chunk(STATE, "bias", 0)
    with pytest.raises(InvalidInput, match="leaf index 1 is out of range for 1 leaves"):
        open_chunk(STATE, "step", 1)
    with pytest.raises(InvalidInput, match="the bytes of entry 'step' are not at hand"):
        open_chunk([WEIGHT], "step", 0, summary=summarise(STATE))
    with pytest.raises(InvalidInput, match="duplicate name"):
        open_chunk([STEP, STEP], "step", 0)
    with pytest.raises(Mismatch, match="entry 'step': digest is"):
        open_chunk([dataclasses.replace(STEP, data=b"othertep")], "step", 0, summary=summarise(STATE))


def mutated(proof: ChunkProof, **entry: Any) -> ChunkProof:
    return dataclasses.replace(proof, entry=dataclasses.replace(proof.entry, **entry))


def test_a_chunk_proof_holds_for_nothing_else() -> None:
    proof, top, data = open_chunk(STATE, "step", 0), state_root(STATE), bytes(8)
    verify_chunk(proof, data, top)

    with pytest.raises(Mismatch, match="inclusion proof of leaf 0 of 1"):
        verify_chunk(proof, b"othertep", top)
    with pytest.raises(Mismatch, match="inclusion proof of leaf 1 of 3"):
        verify_chunk(mutated(proof, name="stop"), data, top)
    with pytest.raises(Mismatch, match="inclusion proof of leaf 1 of 3"):
        verify_chunk(mutated(proof, dtype="U64"), data, top)
    with pytest.raises(Mismatch, match="inclusion proof of leaf 1 of 3"):
        verify_chunk(proof, data, state_root([STEP]))
    with pytest.raises(InvalidInput, match="chunk 0 must be 8 bytes, got 7"):
        verify_chunk(proof, data[:7], top)
    with pytest.raises(InvalidInput, match="chunk index 1 is out of range for 1 chunks"):
        verify_chunk(dataclasses.replace(proof, chunk_index=1), data, top)


@given(st.data())
def test_a_chunk_proof_with_one_changed_byte_is_refused(data: st.DataObject) -> None:
    encoded = bytearray(open_chunk([STEP, WEIGHT], "step", 0).encode())
    encoded[data.draw(st.integers(0, len(encoded) - 1))] ^= data.draw(st.integers(1, 255))

    with pytest.raises((InvalidInput, Mismatch)):
        verify_chunk(parse_chunk_proof(bytes(encoded)), bytes(8), state_root([STEP, WEIGHT]))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**63) | st.text(max_size=4) | st.just("ab" * 32),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(st.binary(max_size=60))
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    for parse in (parse_state_summary, parse_chunk_proof):
        with pytest.raises(InvalidInput):
            parse(data)


@given(st.data())
def test_a_document_with_any_value_in_a_field_is_refused_or_has_that_encoding(data: st.DataObject) -> None:
    encoded, parse = data.draw(
        st.sampled_from(
            [
                (open_chunk([STEP, WEIGHT], "step", 0).encode(), parse_chunk_proof),
                (summarise([STEP, WEIGHT]).encode(), parse_state_summary),
            ]
        )
    )
    document = json.loads(encoded)
    places: list[dict[str, Any]] = [
        document,
        *(value for value in document.values() if isinstance(value, dict)),
    ]
    places += document.get("entries", [])
    place = data.draw(st.sampled_from(places))
    place[data.draw(st.sampled_from(sorted(place)))] = data.draw(JSON)
    try:
        changed = canonical_json(document)
        parsed = parse(changed)
    except InvalidInput:
        return

    assert parsed.encode() == changed


def test_an_entry_summary_is_what_its_leaf_says() -> None:
    (summary,) = summarise([WEIGHT]).entries

    assert summary == EntrySummary("weight", "F32", (2, 3), 24, leaf_hash(bytes(range(24))))
    assert entry_digest(WEIGHT) == leaf_hash(summary.leaf())
