"""The log's bytes: every value back, one encoding each, nothing but InvalidInput from arbitrary bytes."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tallystick.errors import InvalidInput
from tallystick.numerics import log
from tallystick.numerics.grid_table import GridTable, SiteGrid, find_grid
from tallystick.numerics.log import Frame, Kind, SiteAddress, SparseEntries

# ---------------------------------------------------------------------------------------------------- entries


def entries_of(n: int, width: int, pairs: dict[int, int]) -> SparseEntries:
    indexes = sorted(pairs)
    return SparseEntries(
        n, width, np.array(indexes, dtype=np.int64), np.array([pairs[i] for i in indexes], dtype=np.int64)
    )


@st.composite
def sparse_entries(draw: st.DrawFn) -> SparseEntries:
    n = draw(st.one_of(st.integers(1, 60), st.integers(1, log.LARGEST_N)))
    width = draw(st.integers(1, 32))
    positions = st.one_of(st.integers(0, n - 1), st.integers(0, min(n, 200) - 1))
    return entries_of(n, width, draw(st.dictionaries(positions, st.integers(0, 2**width - 1), max_size=50)))


@given(sparse_entries())
def test_entries_come_back(entries: SparseEntries) -> None:
    assert log.decode(log.encode(entries), entries.n, entries.width) == entries


@given(
    st.binary(max_size=60), st.one_of(st.integers(0, 300), st.integers(0, log.LARGEST_N)), st.integers(1, 32)
)
@settings(max_examples=500)
def test_arbitrary_bytes_are_refused_or_the_one_encoding_of_what_they_say(
    data: bytes, n: int, width: int
) -> None:
    try:
        entries = log.decode(data, n, width)
    except InvalidInput:
        return
    assert log.encode(entries) == data


@given(sparse_entries(), st.data())
def test_a_flipped_bit_never_reads_as_the_same_entries(entries: SparseEntries, data: st.DataObject) -> None:
    encoded = bytearray(log.encode(entries))
    bit = data.draw(st.integers(0, 8 * len(encoded) - 1))
    encoded[bit // 8] ^= 1 << bit % 8
    try:
        changed = log.decode(bytes(encoded), entries.n, entries.width)
    except InvalidInput:
        return
    assert changed != entries


@given(sparse_entries())
def test_a_cut_or_extended_encoding_is_refused(entries: SparseEntries) -> None:
    encoded = log.encode(entries)
    for wrong in (encoded[:-1], encoded + b"\0", encoded + b"\x01"):
        with pytest.raises(InvalidInput):
            log.decode(wrong, entries.n, entries.width)


def test_no_entries_are_one_zero_byte() -> None:
    assert log.encode(SparseEntries.none(10**12, 1)) == b"\0"
    assert len(log.decode(b"\0", 10**12, 1)) == 0
    assert log.decode(b"\0", 0, 1) == SparseEntries.none(0, 1)


def test_every_subset_of_a_small_site_has_its_own_encoding() -> None:
    seen: set[bytes] = set()
    for subset in range(1 << 8):
        entries = entries_of(8, 1, {i: i % 2 for i in range(8) if subset >> i & 1})
        encoded = log.encode(entries)
        assert log.decode(encoded, 8, 1) == entries
        seen.add(encoded)
    assert len(seen) == 256


def test_the_fully_dense_site_takes_a_bit_and_the_symbol_per_element() -> None:
    entries = SparseEntries(800, 1, np.arange(800), np.ones(800, dtype=np.int64))
    assert len(log.encode(entries)) == 2 + 100 + 100


def test_the_rice_parameter_is_derived_from_the_density() -> None:
    assert [log.rice_parameter(n, 1) for n in (1, 2, 3, 5, 1000, 2**48)] == [0, 0, 1, 2, 9, 47]
    golden = -2 * math.log((math.sqrt(5) - 1) / 2)
    assert round(golden * 2**16) == log.GOLDEN_NUMERATOR


@pytest.mark.parametrize("p", [1e-2, 5.6e-3, 3.3e-3, 1.1e-3, 1e-3, 7e-4, 3.5e-4, 1e-4])
def test_the_size_is_within_three_percent_of_entropy(p: float) -> None:
    n = 1 << 24
    rng = np.random.Generator(np.random.PCG64(7))
    indexes = np.unique(rng.integers(0, n, size=round(n * p)))
    entries = SparseEntries(n, 1, indexes, rng.integers(0, 2, size=indexes.size))
    share = indexes.size / n
    entropy = n * -(share * math.log2(share) + (1 - share) * math.log2(1 - share)) + indexes.size
    size = len(log.encode(entries))
    print(f"p = {p:.1e}: {size} bytes, entropy {entropy / 8:.0f}, {100 * (8 * size / entropy - 1):+.2f} %")
    assert entropy <= 8 * size < 1.03 * entropy


@pytest.mark.parametrize(
    ("data", "n", "reason"),
    [
        (b"", 8, "ends where count should be"),
        (b"\x80\x00", 8, "count 0 is written with more bytes than it needs"),
        (b"\xff" * 9 + b"\x01", 8, "count is 2\\*\\*63 or more"),
        (b"\x09" + bytes(20), 8, "count 9 exceeds the 8 elements"),
        (b"\x05\x01", 8, "5 entries need 10 bits, 1 bytes left"),
        (b"\x01\x00\x00", 8, "the quotients of 1 gaps do not end within 2 bits"),
        (b"\x01\x02\x01", 8, "1 bytes after the end"),
        (b"\x01\x81", 8, "padding bits of byte 1 are not zero"),
        (b"\x01\x0e", 5, "index 7 in a site of 5 elements"),
        (b"\x02\x02\x00", 4, "the quotients of 2 gaps do not end within 4 bits"),
        (b"\x00\x00", 8, "1 bytes after the end"),
    ],
)
def test_malformed_entries_are_refused_with_their_reason(data: bytes, n: int, reason: str) -> None:
    assert log.decode(b"\x01\x02", 8, 1) == entries_of(8, 1, {4: 0})
    with pytest.raises(InvalidInput, match=reason):
        log.decode(data, n, 1)


@given(sparse_entries().filter(len), st.integers(-1100, 1000))
def test_a_decision_comes_back_with_its_band(entries: SparseEntries, band: int) -> None:
    data = log.encode_decision(band, entries)
    assert log.decode_decision(data, entries.n, entries.width) == (band, entries)
    assert log.read_decision_head(data) == (band, entries.width)


@given(st.binary(max_size=40), st.integers(0, 300), st.integers(1, 3))
@settings(max_examples=300)
def test_arbitrary_bytes_are_no_decision_or_the_one_encoding_of_it(data: bytes, n: int, width: int) -> None:
    try:
        band, entries = log.decode_decision(data, n, width)
    except InvalidInput:
        return
    assert log.encode_decision(band, entries) == data


@pytest.mark.parametrize(
    ("band", "entries", "reason"),
    [
        (-17, SparseEntries.none(8, 2), "decision: a site without entries is left out"),
        (-1101, entries_of(8, 2, {3: 1}), "decision: band exponent -1101 is outside"),
        (1001, entries_of(8, 2, {3: 1}), "decision: band exponent 1001 is outside"),
    ],
)
def test_a_decision_without_entries_or_with_a_far_band_is_not_written(
    band: int, entries: SparseEntries, reason: str
) -> None:
    for good in (-1100, 1000):
        log.encode_decision(good, entries_of(8, 2, {3: 1}))
    with pytest.raises(InvalidInput, match=reason):
        log.encode_decision(band, entries)


def peak_bytes(call: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        with pytest.raises(InvalidInput):
            call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


HUGE = b"\xff\xff\xff\xff\xff\x3f"
"""2**41 - 1 as a varint."""


@pytest.mark.parametrize("tail", [b"", b"\0" * 1000, b"\xff" * 1000, b"\x55" * 1000])
def test_claimed_sizes_allocate_nothing(tail: bytes) -> None:
    calls: list[Callable[[], object]] = [
        lambda: log.decode(HUGE + tail, log.LARGEST_N, 1),
        lambda: log.decode(b"\x01" + tail + b"\0", log.LARGEST_N, 32),
        lambda: log.decode_frame(b"\x01" + HUGE + tail),
        lambda: log.decode_frame(b"\x01\x01\x03" + HUGE + tail),
        lambda: log.find_site(b"\x01" + HUGE + tail, SiteAddress(0, 0, 0, 0)),
        lambda: GridTable.decode(b"\x01" + HUGE + tail),
        lambda: GridTable.decode(b"\x01\x01\x01\x04\x00\x00\x00" + HUGE + b"\x01" + tail),
    ]
    for call in calls:
        assert peak_bytes(call) < 200_000


@pytest.mark.parametrize(
    ("n", "width", "indexes", "symbols", "reason"),
    [
        (8, 1, [3, 3], [0, 0], "not strictly ascending"),
        (8, 1, [3, 2], [0, 0], "not strictly ascending"),
        (8, 1, [8], [0], r"indexes 8..8 outside \[0, 8\)"),
        (8, 1, [-1], [0], "indexes -1..-1 outside"),
        (8, 1, [1], [2], r"a symbol is outside \[0, 2\*\*1\)"),
        (8, 1, [1], [-1], "a symbol is outside"),
        (8, 1, [1], [0, 1], "1 indexes and 2 symbols"),
        (8, 0, [1], [0], "width 0"),
        (8, 33, [1], [0], "width 33"),
        (2**48 + 1, 1, [1], [0], "n 281474976710657"),
    ],
)
def test_entries_that_break_a_rule_cannot_be_made(
    n: int, width: int, indexes: list[int], symbols: list[int], reason: str
) -> None:
    assert len(entries_of(8, 1, {3: 0, 4: 1})) == 2
    with pytest.raises(InvalidInput, match=reason):
        SparseEntries(n, width, np.array(indexes), np.array(symbols))


def test_entries_are_rows_of_integers() -> None:
    small: Any = np.array([1], dtype=np.uint8)
    narrow = SparseEntries(8, 1, small, small)
    assert (narrow.indexes.dtype, narrow.symbols.dtype) == (np.int64, np.int64)
    wrongs: list[Any] = [np.array([1.0]), np.array([[1]]), np.array([1], dtype=np.uint64)]
    for wrong in wrongs:
        with pytest.raises(InvalidInput, match="not a row of int64"):
            SparseEntries(8, 1, wrong, np.array([1]))
    assert narrow != 3


# ------------------------------------------------------------------------------------------------------ frame

addresses = st.one_of(
    st.builds(SiteAddress, *([st.integers(0, 3)] * 2), st.integers(0, 7), st.integers(0, 300)),
    st.builds(SiteAddress, *([st.integers(0, 2**32 - 1)] * 2), st.integers(0, 7), st.integers(0, 2**32 - 1)),
)
frames = st.dictionaries(addresses, st.binary(min_size=1, max_size=200), max_size=12).map(Frame.of)


@given(frames)
def test_a_frame_comes_back_and_each_site_is_found(frame: Frame) -> None:
    data = log.encode_frame(frame)
    assert log.decode_frame(data) == frame
    for address, payload in frame:
        assert log.find_site(data, address) == payload == frame.find(address)


@given(frames, addresses)
def test_an_absent_site_is_not_found(frame: Frame, address: SiteAddress) -> None:
    expected = dict(frame.sites).get(address)
    assert log.find_site(log.encode_frame(frame), address) == expected
    assert frame.find(address) == expected


@given(st.one_of(st.binary(max_size=60), st.binary(max_size=60).map(lambda rest: b"\x01" + rest)))
@settings(max_examples=500)
def test_arbitrary_bytes_are_refused_or_the_one_encoding_of_a_frame(data: bytes) -> None:
    try:
        frame = log.decode_frame(data)
    except InvalidInput:
        with pytest.raises(InvalidInput):
            log.find_site(data, SiteAddress(0, 0, 0, 0))
        return
    assert log.encode_frame(frame) == data


@given(frames)
def test_a_cut_or_extended_frame_is_refused(frame: Frame) -> None:
    data = log.encode_frame(frame)
    for wrong in (data[:-1], data + b"\0"):
        with pytest.raises(InvalidInput):
            log.decode_frame(wrong)


def test_an_empty_frame_is_two_bytes() -> None:
    assert log.encode_frame(Frame()) == b"\x01\x00"
    assert len(log.decode_frame(b"\x01\x00")) == 0


def test_neighbouring_sites_cost_two_bytes_of_directory() -> None:
    payloads = {SiteAddress(0, 0, Kind.GRADIENT, i): b"abc" for i in range(100)}
    assert len(log.encode_frame(Frame.of(payloads))) == 2 + 3 + 99 * 2 + 100 * 3


def test_find_site_reads_only_the_directory() -> None:
    first, second = SiteAddress(0, 0, Kind.LOSS, 0), SiteAddress(0, 0, Kind.STATE, 0)
    data = log.encode_frame(Frame(((first, b"\xff\xff"), (second, b"ok"))))
    assert log.find_site(data, second) == b"ok"
    with pytest.raises(InvalidInput, match="payload lengths add up to 4, 3 bytes follow"):
        log.find_site(data[:-1], first)


def test_an_address_orders_by_rank_then_micro_batch_then_kind_then_ordinal() -> None:
    order = [
        SiteAddress(0, 0, Kind.GRADIENT, 9),
        SiteAddress(0, 0, Kind.STATE, 0),
        SiteAddress(0, 1, Kind.GRID, 0),
        SiteAddress(1, 0, Kind.GRID, 0),
    ]
    assert sorted([order[2], order[0], order[3], order[1]]) == order
    assert Frame.of(dict.fromkeys(order[::-1], b"x")).sites == tuple((each, b"x") for each in order)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "ends where the version should be"),
        (b"\x02\x00", "version 2, this reader knows 1"),
        (b"\x01", "ends where number of sites"),
        (b"\x01\x80\x00", "number of sites 0 is written with more bytes"),
        (b"\x01\x02\x03\x01", "2 sites need at least 6 bytes, 2 left"),
        (b"\x01\x01\x03\x00\x00", r"site \(0, 0, 0, 0\) has an empty payload"),
        (b"\x01\x01\x03\x02\x00", "payload lengths add up to 2, 1 bytes follow"),
        (b"\x01\x01\x03\x01\x00\x00", "payload lengths add up to 1, 2 bytes follow"),
        (b"\x01\x01\x22\x00\x01\x00", "kind 9 is not one of 0..8"),
        (b"\x01\x01\x83\x80\x80\x80\x40\x01\x00", r"a field of .* is outside \[0, 2\*\*32\)"),
        (b"\x01\x00\x00", "add up to 0, 1 bytes follow"),
    ],
)
def test_malformed_frames_are_refused_with_their_reason(data: bytes, reason: str) -> None:
    assert log.decode_frame(b"\x01\x01\x03\x01\x00").sites == ((SiteAddress(0, 0, 0, 0), b"\0"),)
    with pytest.raises(InvalidInput, match=reason):
        log.decode_frame(data)


def test_frames_that_break_a_rule_cannot_be_made() -> None:
    low, high = SiteAddress(0, 0, 3, 0), SiteAddress(0, 0, 3, 1)
    assert len(Frame(((low, b"x"), (high, b"x")))) == 2
    with pytest.raises(InvalidInput, match="is not ascending"):
        Frame(((high, b"x"), (low, b"x")))
    with pytest.raises(InvalidInput, match="is not ascending"):
        Frame(((low, b"x"), (low, b"x")))
    with pytest.raises(InvalidInput, match="has an empty payload"):
        Frame(((low, b""),))
    with pytest.raises(InvalidInput, match="outside"):
        SiteAddress(-1, 0, 0, 0)
    with pytest.raises(InvalidInput, match="kind 9"):
        SiteAddress(0, 0, 9, 0)


def test_an_absent_site_has_no_entries_and_a_present_one_must_have_some() -> None:
    here, empty, absent = (SiteAddress(0, 0, Kind.STATE, i) for i in range(3))
    entries = entries_of(8, 1, {4: 0})
    frame = Frame(((here, log.encode(entries)), (empty, b"\0")))
    assert frame.entries(here, 8, 1) == entries
    assert frame.entries(absent, 8, 1) == SparseEntries.none(8, 1)
    with pytest.raises(InvalidInput, match="is present and has no entries"):
        frame.entries(empty, 8, 1)


# ------------------------------------------------------------------------------------------------------ grids

scale_rows = st.lists(st.integers(-1100, 1000), max_size=12)


@st.composite
def site_grids(draw: st.DrawFn) -> SiteGrid:
    precision = draw(st.sampled_from([0, 0, 8, 24, 53]))
    dithered = precision == 0 and draw(st.booleans())
    return SiteGrid(
        precision, draw(st.integers(-1100, -1)), draw(st.integers(-1100, 0)), dithered, draw(scale_rows)
    )


keys = st.tuples(st.integers(0, 7), st.one_of(st.integers(0, 5), st.integers(0, 2**32 - 1)))
tables = st.dictionaries(keys, site_grids(), max_size=6).map(GridTable)


@st.composite
def table_pairs(draw: st.DrawFn) -> tuple[GridTable, GridTable]:
    """A table and one that grew out of it: sites kept, moved by a little, changed, added and removed."""
    old = draw(tables)
    sites = dict(draw(tables).sites)
    for key, grid in old.sites.items():
        moves = draw(
            st.lists(
                st.sampled_from([0, 0, 0, 1, -1, -7]), min_size=len(grid.scales), max_size=len(grid.scales)
            )
        )
        moved = np.clip(grid.scales + np.array(moves, dtype=np.int64), -1100, 1000)
        fate = draw(st.sampled_from(["keep", "move", "band", "remove"]))
        if fate == "keep":
            sites[key] = grid
        elif fate == "move":
            sites[key] = grid.with_scales(moved)
        elif fate == "band":
            sites[key] = SiteGrid(grid.precision, -5, grid.floor, grid.dithered, moved)
    return old, GridTable(sites)


@given(tables)
def test_a_table_comes_back(table: GridTable) -> None:
    assert GridTable.decode(table.encode()) == table


@given(table_pairs())
def test_a_change_leads_from_the_old_table_to_the_new(pair: tuple[GridTable, GridTable]) -> None:
    old, new = pair
    data = old.diff(new)
    assert old.apply(data) == new
    assert (data == b"\0") == (old == new)


@given(table_pairs())
def test_one_grid_is_found_without_reading_the_table(pair: tuple[GridTable, GridTable]) -> None:
    old, new = pair
    for key in {*old.sites, *new.sites, (3, 10**6)}:
        assert find_grid(old.encode(), None, key) == old.sites.get(key)
        assert find_grid(old.encode(), old.diff(new), key) == new.sites.get(key)


@given(table_pairs(), st.data())
def test_one_grid_of_damaged_bytes_is_refused_or_read(
    pair: tuple[GridTable, GridTable], data: st.DataObject
) -> None:
    old, new = pair
    table, update = bytearray(old.encode()), bytearray(old.diff(new))
    damaged = data.draw(st.sampled_from([table, update]))
    if damaged:
        damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
    for key in [*new.sites][:2]:
        try:
            found = find_grid(bytes(table), bytes(update), key)
        except InvalidInput:
            continue
        assert found is None or isinstance(found, SiteGrid)


@given(table_pairs(), st.data())
def test_a_damaged_change_is_refused_or_the_one_encoding_of_another(
    pair: tuple[GridTable, GridTable], data: st.DataObject
) -> None:
    old, new = pair
    damaged = bytearray(old.diff(new))
    bit = data.draw(st.integers(0, 8 * len(damaged) - 1))
    damaged[bit // 8] ^= 1 << bit % 8
    try:
        other = old.apply(bytes(damaged))
    except InvalidInput:
        return
    assert other != new
    assert old.diff(other) == bytes(damaged)


@given(st.binary(max_size=60))
@settings(max_examples=500)
def test_arbitrary_bytes_are_refused_or_the_one_encoding_of_a_table(data: bytes) -> None:
    for encoded in (data, b"\x01\x01" + data):
        try:
            table = GridTable.decode(encoded)
        except InvalidInput:
            continue
        assert table.encode() == encoded


@given(st.binary(max_size=40), table_pairs())
def test_arbitrary_bytes_are_refused_or_the_one_encoding_of_a_change(
    data: bytes, pair: tuple[GridTable, GridTable]
) -> None:
    try:
        new = pair[0].apply(data)
    except InvalidInput:
        return
    assert pair[0].diff(new) == data


def embedding_table() -> GridTable:
    scales = np.arange(50_000) % 7 - 12
    return GridTable({(Kind.GRADIENT, 0): SiteGrid(0, -16, -5, True, scales)})


def test_a_block_that_moves_by_one_costs_a_few_bytes() -> None:
    old = embedding_table()
    grid = old.sites[Kind.GRADIENT, 0]
    moved = grid.scales.copy()
    moved[[17, 40_000]] += 1
    new = GridTable({(Kind.GRADIENT, 0): grid.with_scales(moved)})
    assert len(old.encode()) < 50_000 * 5 / 8 + 20
    assert len(old.diff(new)) <= 12
    assert old.apply(old.diff(new)) == new


def test_tables_are_ordered_and_scales_cannot_be_changed() -> None:
    table = GridTable({(4, 1): SiteGrid(24, -47, 0), (3, 2): SiteGrid(24, -44, -22, scales=(-3,))})
    assert list(table.sites) == [(3, 2), (4, 1)]
    with pytest.raises(ValueError, match="read-only"):
        table.sites[3, 2].scales[0] = 1
    assert table.sites[3, 2] != 3


HEAD = b"\x04\x00"
"""The key of site (3, 0) after nothing: the kind grows by 3, ordinal 0."""

ONE = b"\x01\x01\x04\x00\x04\x30\x5d\x00\x00"
"""A table of one site: (3, 0), precision 24, band -47, floor 0, no scales."""


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "ends where the version should be"),
        (b"\x02\x00", "version 2, this reader knows 1"),
        (b"\x01\x05\x01", "5 sites need 10 bytes"),
        (ONE + b"\0", "1 bytes after the end"),
        (ONE[:-1], "ends where number of blocks should be"),
        (b"\x01\x01\x04\x00\x05\x30\x5d\x00\x00", "change 5 of site \\(3, 0\\) is not one of 0..4"),
        (b"\x01\x01\x04\x00\x02\x30\x5d\x00", "change 2 of site \\(3, 0\\), which the table does not hold"),
        (b"\x01\x01\x04\x00\x00", "change 0 of site \\(3, 0\\), which the table does not hold"),
        (b"\x01\x01\x04\x00\x04\x6c\x5d\x00\x00", "precision 54 is outside"),
        (b"\x01\x01\x04\x00\x04\x31\x5d\x00\x00", "dither needs an absolute grid"),
        (b"\x01\x01\x04\x00\x04\x30\x00\x00\x00", "band exponent 0 is outside"),
        (b"\x01\x01\x04\x00\x04\x30\x5d\x9a\x11\x00", "floor exponent 1101 is outside"),
        (b"\x01\x01\x04\x00\x04\x30\x5d\x00\x01\x00", "symbol width 0 is outside"),
        (b"\x01\x01\x04\x00\x04\x30\x5d\x00\x01\x02\x01", "canonical encoding"),
        (b"\x01\x01\x04\x00\x04\x30\x5d\x00\x01\x01\x03", "padding bits of byte 10"),
        (b"\x01\x01\x04\x00\x04\x30\x5d\x00\x01\x0c\xff\x0f", "scales -2048..-2048 outside"),
        (b"\x01\x01\x04\x00\x04\x30\x5d\x00\x01\x0c\xd2\x07", "scale 1001 with floor 0 and band -47 exceeds"),
        (b"\x01\x01\x10\x00\x04\x30\x5d\x00\x00", "kind 9 is not one of 0..8"),
    ],
)
def test_malformed_tables_are_refused_with_their_reason(data: bytes, reason: str) -> None:
    assert GridTable.decode(ONE) == GridTable({(3, 0): SiteGrid(24, -47, 0)})
    with pytest.raises(InvalidInput, match=reason):
        GridTable.decode(data)


def test_a_change_that_changes_nothing_is_refused() -> None:
    table = GridTable({(3, 0): SiteGrid(24, -44, -22, scales=(-3, -3))})
    same_fields = b"\x01" + HEAD + b"\x02\x30\x57\x2b"
    with pytest.raises(InvalidInput, match="canonical encoding"):
        table.apply(same_fields)
    no_scales = b"\x01" + HEAD + b"\x01\x01\x00"
    with pytest.raises(InvalidInput, match="canonical encoding"):
        table.apply(no_scales)
    assert table.apply(b"\x01" + HEAD + b"\x02\x30\x57\x2a").sites[3, 0].floor == 21


@pytest.mark.parametrize("scales", [np.array([0.5]), np.zeros((2, 2), dtype=np.int16)])
def test_scales_are_a_row_of_integers(scales: np.ndarray) -> None:
    with pytest.raises(InvalidInput, match="not a row of integers"):
        SiteGrid(24, -44, 0, scales=scales)


@pytest.mark.parametrize(
    ("key", "reason"), [((9, 0), "kind 9"), ((3, -1), "outside"), ((3, 2**32), "outside")]
)
def test_a_table_refuses_a_key_that_is_no_site(key: tuple[int, int], reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason):
        GridTable({key: SiteGrid(24, -47, 0)})
