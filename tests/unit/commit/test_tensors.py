"""Digests of a step's tensors: chunks open, and nothing else does."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tallystick.commit.merkle import EMPTY_ROOT
from tallystick.commit.state import CHUNK_BYTES, Entry, summarise
from tallystick.commit.tensors import TensorDigest, chunk_size, digest_of, open_chunks, verify_opened
from tallystick.errors import InvalidInput, Mismatch

CHUNK = 4096
DATA = bytes(range(251)) * 132  # 33132 bytes: nine chunks, the last one short
GOOD = digest_of("U8", len(DATA), memoryview(DATA), CHUNK)


@given(st.sets(st.integers(0, 8)))
def test_any_chunks_open(indexes: set[int]) -> None:
    opened = open_chunks(memoryview(DATA), CHUNK, indexes)

    verify_opened(GOOD, CHUNK, opened)

    assert [piece.index for piece in opened] == sorted(indexes)
    assert all(piece.data == DATA[piece.index * CHUNK : (piece.index + 1) * CHUNK] for piece in opened)


def test_other_bytes_order_length_or_place_are_refused() -> None:
    first, second = open_chunks(memoryview(DATA), CHUNK, [1, 2])
    with pytest.raises(Mismatch, match="leads to root"):
        verify_opened(GOOD, CHUNK, [replace(first, data=bytes(CHUNK))])
    with pytest.raises(Mismatch, match="leads to root"):
        verify_opened(GOOD, CHUNK, [replace(first, index=0)])
    with pytest.raises(InvalidInput, match="must not follow"):
        verify_opened(GOOD, CHUNK, [second, first])
    with pytest.raises(InvalidInput, match="must not follow"):
        verify_opened(GOOD, CHUNK, [first, first])
    with pytest.raises(InvalidInput, match="out of range for 9 chunks"):
        verify_opened(GOOD, CHUNK, [replace(first, index=9)])
    with pytest.raises(InvalidInput, match="must be 4096 bytes"):
        verify_opened(GOOD, CHUNK, [replace(first, data=first.data[:-1])])


def test_the_digest_binds_dtype_elements_and_chunk_size() -> None:
    as_floats = digest_of("F32", len(DATA) // 4, memoryview(DATA), CHUNK)

    assert as_floats.root == GOOD.root
    found = {
        GOOD.digest(CHUNK),
        as_floats.digest(CHUNK),
        GOOD.digest(2 * CHUNK),
        replace(GOOD, elements=1).digest(CHUNK),
    }
    assert len(found) == 4


def test_with_chunks_of_64_kibibytes_the_root_is_the_states_own() -> None:
    data = bytes(3 * CHUNK_BYTES + 5)
    entry = Entry("a", "U8", (len(data),), data)

    with ThreadPoolExecutor(2) as pool:
        found = digest_of("U8", len(data), memoryview(data), CHUNK_BYTES, pool)

    assert found.root == summarise([entry]).entries[0].tensor_root


def test_an_empty_tensor_has_the_empty_root_and_no_chunk() -> None:
    empty = digest_of("F64", 0, memoryview(b""), CHUNK)

    assert (empty.root, empty.chunks(CHUNK)) == (EMPTY_ROOT, 0)


@pytest.mark.parametrize(
    ("state", "chunk"), [(0, 4096), (12_200_000, 8192), (1_493_000_000, 1 << 16), (1 << 40, 1 << 16)]
)
def test_the_chunk_follows_the_state(state: int, chunk: int) -> None:
    assert chunk_size(state) == chunk


@pytest.mark.parametrize(
    ("dtype", "elements", "root"), [("F8", 1, 32), ("F32", -1, 32), ("F32", 1 << 48, 32), ("F32", 1, 31)]
)
def test_a_digest_of_another_form_is_refused(dtype: str, elements: int, root: int) -> None:
    with pytest.raises(InvalidInput):
        TensorDigest(dtype, elements, bytes(root))
