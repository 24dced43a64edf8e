"""The compiled codec of sparse log entries against the readable one: equal on everything, refusals included."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tallystick.errors import InvalidInput
from tallystick.numerics import log
from tallystick.numerics.kernels import log_entries, native
from tallystick.numerics.log import SparseEntries, decode, encode

FORMS = st.tuples(st.integers(1, 400), st.sampled_from([1, 2, 7, 64, 1 << 20, 1 << 41]), st.integers(1, 32))


@st.composite
def many_entries(draw: st.DrawFn) -> SparseEntries:
    count, sparsity, width = draw(FORMS)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    n = min(count * sparsity, log.LARGEST_N)
    gaps = rng.integers(0, max(1, n // count), size=count)
    indexes = np.cumsum(gaps) + np.arange(count)
    indexes = indexes[indexes < n]
    symbols = rng.integers(0, 1 << width, size=indexes.size)
    return SparseEntries(n, width, indexes.astype(np.int64), symbols.astype(np.int64))


def readable(data: bytes, n: int, width: int, monkeypatch: pytest.MonkeyPatch) -> SparseEntries | str:
    with monkeypatch.context() as patch:
        patch.setattr(log, "MANY", 1 << 62)
        return verdict(data, n, width)


def compiled(data: bytes, n: int, width: int, monkeypatch: pytest.MonkeyPatch) -> SparseEntries | str:
    with monkeypatch.context() as patch:
        patch.setattr(log, "MANY", 1)
        return verdict(data, n, width)


def verdict(data: bytes, n: int, width: int) -> SparseEntries | str:
    try:
        return decode(data, n, width)
    except InvalidInput as problem:
        return str(problem)


@given(many_entries())
def test_both_write_the_same_bytes_and_read_them(entries: SparseEntries) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log, "MANY", 1 << 62)
        written = encode(entries)
        patch.setattr(log, "MANY", 1)
        assert encode(entries) == written
        assert decode(written, entries.n, entries.width) == entries


@settings(max_examples=400)
@given(many_entries(), st.data())
def test_both_say_the_same_of_damaged_bytes(entries: SparseEntries, data: st.DataObject) -> None:
    damaged = bytearray(encode(entries))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, 8 * len(damaged) - 1))
        damaged[place // 8] ^= 1 << place % 8
    cut = data.draw(st.integers(0, len(damaged)))
    for changed in (bytes(damaged), bytes(damaged[:cut]), bytes(damaged) + b"\0"):
        with pytest.MonkeyPatch.context() as patch:
            expected = readable(changed, entries.n, entries.width, patch)
            assert compiled(changed, entries.n, entries.width, patch) == expected


@given(st.binary(max_size=200), st.integers(0, log.LARGEST_N), st.integers(1, 32))
def test_both_say_the_same_of_any_bytes(tail: bytes, n: int, width: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for count in (1, 16, 100):
            data = bytes([count]) + tail
            assert compiled(data, n, width, patch) == readable(data, n, width, patch)


def test_many_entries_take_the_compiled_codec(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []
    honest = log_entries.read_entries

    def noting(data: np.ndarray, n: int, count: int, k: int, width: int):
        called.append(count)
        return honest(data, n, count, k, width)

    monkeypatch.setattr(log_entries, "read_entries", noting)
    few, many = (SparseEntries(1000, 1, np.arange(c), np.ones(c, np.int64)) for c in (log.MANY - 1, log.MANY))
    assert decode(encode(few), 1000, 1) == few
    assert decode(encode(many), 1000, 1) == many
    assert called == [log.MANY]


def test_without_kernels_everything_is_read_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = SparseEntries(1000, 1, np.arange(0, 1000, 3), np.ones(334, np.int64))
    written = encode(entries)
    monkeypatch.setattr(native, "is_compiled", lambda: False)
    monkeypatch.setattr(native, "library", lambda: pytest.fail("a kernel was called"))
    assert encode(entries) == written
    assert decode(written, 1000, 1) == entries


def test_a_claim_of_all_elements_of_the_largest_site_ends_soon() -> None:
    """All zeros never end a quotient; the search for it must stop with the bytes, not with the claim."""
    zeros = np.zeros(1 << 12, dtype=np.uint8)
    assert log_entries.read_entries(zeros, log.LARGEST_N, 1000, 0, 1) is None
