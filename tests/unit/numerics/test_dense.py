"""The dense log: the same decisions as the sparse one, and every malformed byte refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tallystick.errors import InvalidInput
from tallystick.numerics.dense import decode_dense, dense_size, encode_dense
from tallystick.numerics.log import SparseEntries, decode, encode


@st.composite
def entries(draw: st.DrawFn) -> SparseEntries:
    n = draw(st.integers(0, 60))
    at = sorted(draw(st.sets(st.integers(0, max(n - 1, 0)), max_size=n)) if n else ())
    sides = draw(st.lists(st.integers(0, 1), min_size=len(at), max_size=len(at)))
    return SparseEntries(n, 1, np.array(at, dtype=np.int64), np.array(sides, dtype=np.int64))


@given(entries())
def test_both_forms_say_the_same(given_entries: SparseEntries) -> None:
    data = encode_dense(given_entries)
    assert len(data) == dense_size(given_entries.n)
    assert decode_dense(data, given_entries.n) == given_entries
    assert decode(encode(given_entries), given_entries.n, 1) == given_entries


@given(st.binary(max_size=12), st.integers(0, 60))
def test_whatever_bytes_come_in_they_are_refused_or_the_one_encoding(data: bytes, n: int) -> None:
    try:
        found = decode_dense(data, n)
    except InvalidInput:
        return
    assert encode_dense(found) == data


def test_every_byte_at_every_place_of_a_log_is_refused_or_means_another_log() -> None:
    log = SparseEntries(13, 1, np.array([0, 4, 12]), np.array([1, 0, 1]))
    honest = encode_dense(log)
    seen: dict[bytes, bytes] = {}
    refused = 0
    for place in range(len(honest)):
        for value in range(256):
            data = honest[:place] + bytes([value]) + honest[place + 1 :]
            try:
                found = encode_dense(decode_dense(data, 13))
            except InvalidInput:
                refused += 1
                continue
            assert found == data
            assert seen.setdefault(found, data) == data
    # 13 codes above 242 at each of three places, and the last byte holds three trits: 27 codes are left
    assert refused == 13 * 2 + (256 - 27)


@pytest.mark.parametrize(
    "data,n,reason",
    [
        (b"\x79\x79", 5, "2 bytes, a site of 5 elements has 1"),
        (b"", 1, "0 bytes, a site of 1 elements has 1"),
        (b"\x79", 0, "1 bytes, a site of 0 elements has 0"),
        (b"\xf3", 5, "byte 0 is 243, five trits are worth at most 242"),
        (b"\x79\xff", 10, "byte 1 is 255"),
        (b"\x79", 4, "the 1 trits after the last element are not zero"),
        (b"\x79", -1, "1 bytes, a site of -1 elements"),
    ],
)
def test_a_malformed_log_is_refused_with_the_reason(data: bytes, n: int, reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason):
        decode_dense(data, n)


def test_wide_symbols_have_no_trits() -> None:
    with pytest.raises(InvalidInput, match="symbols of 2 bits"):
        encode_dense(SparseEntries(3, 2, np.array([1]), np.array([2])))


def test_the_bytes_are_those_of_the_specification() -> None:
    """spec/rounding-log.md 9: 1 2 1 1 0, 1 1 (0 0 0)."""
    log = SparseEntries(7, 1, np.array([1, 4]), np.array([1, 0]))
    assert encode_dense(log).hex() == "2b04"
