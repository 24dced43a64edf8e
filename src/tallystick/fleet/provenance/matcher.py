"""Which run, step, rank and slices a snapshot is of, exactly; page by page where it is torn (spec/monitoring.md 4).

    match = match_snapshot(opening, shard_map, states)      # states: (steps done, entries), in order
    match.status, match.steps_done, match.unexplained_bytes

The expected bytes of every mapped region are made from a state's entries, hashed under the snapshot's own salt and
compared with the pages that the chip signed. Nothing is compared with a tolerance. What no slice covers counts as
unexplained memory, whatever it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from tallystick.commit.state import Entry
from tallystick.fleet.agent.memory import Region, SnapshotOpening, page_hashes, reader_of
from tallystick.fleet.provenance.transcripts import Slice

Status = Literal["exact", "torn", "unexplained"]
State = tuple[int, Mapping[str, Entry]]
PageReader = Callable[[int, int], bytes]
"""Returns bytes [start, start + size) of the owner's memory.bin."""

_NUMPY = {
    "F32": "<f4",
    "F64": "<f8",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "U8": "u1",
    "I8": "i1",
    "BOOL": "u1",
}


@dataclass(frozen=True)
class SnapshotMatch:
    """What a snapshot was found to be.

    Attributes:
        status: ``exact`` (every mapped page is of one state), ``torn`` (each is of one of two states that follow each
            other, or mixes the two element by element), or ``unexplained``.
        steps_done: of the state, or of the first of the two; None if unexplained.
        slices: what the mapped regions hold.
        mixed_pages: pages of a torn snapshot that belong to neither state as a whole.
        unexplained_bytes: memory that no slice covers, or whose pages match nothing.
        size: bytes of all memory.
        differing: regions whose pages match nothing at the best candidate.
    """

    status: Status
    steps_done: int | None
    slices: tuple[Slice, ...] = field(repr=False)
    mixed_pages: int
    unexplained_bytes: int
    size: int
    differing: tuple[str, ...] = ()

    def fields(self) -> dict[str, object]:
        """Return the match as JSON."""
        return {
            "status": self.status,
            "steps_done": self.steps_done,
            "slices": len(self.slices),
            "mixed_pages": self.mixed_pages,
            "unexplained_bytes": self.unexplained_bytes,
            "bytes": self.size,
            "differing": list(self.differing[:8]),
        }


def slice_bytes(piece: Slice, dtype: str, entries: Mapping[str, Entry]) -> bytes | None:
    """Return the bytes that a region of ``dtype`` holds if it is ``piece`` of the state ``entries``.

    None where the state has no such elements, or none that ``dtype`` holds exactly: then nothing can match.
    """
    entry = entries.get(piece.entry)
    if entry is None or entry.dtype not in _NUMPY or dtype not in _NUMPY:
        return None
    values: npt.NDArray[np.generic] = np.frombuffer(entry.data, dtype=_NUMPY[entry.dtype])
    rows, run = (piece.count // piece.run, piece.run) if piece.run else (1, piece.count)
    end = piece.start + (rows - 1) * piece.stride + run
    if end > values.size:
        return None
    steps = (piece.stride * values.itemsize, values.itemsize)
    part = np.lib.stride_tricks.as_strided(
        values[piece.start : end], (rows, run), steps, writeable=False
    ).reshape(-1)
    if dtype == entry.dtype:
        return part.tobytes()
    return part.astype("<f8").tobytes() if (entry.dtype, dtype) == ("F32", "F64") else None


def match_snapshot(
    opening: SnapshotOpening,
    shard_map: Sequence[Slice],
    states: Iterable[State],
    memory: PageReader | None = None,
) -> SnapshotMatch:
    """Return what the snapshot is of, having looked at ``states`` in their order until one fits.

    A torn snapshot is found where two states that follow each other stand in ``states`` one after the other. ``memory`` opens
    pages that mix the two; without it such pages stay unexplained.
    """
    known = {piece.region: piece for piece in shard_map}
    pages = [
        (region, first, leaves, known[region.name])
        for region, first, leaves in opening.pages_of()
        if region.name in known
    ]
    covered = sum(region.size for region, _, _, _ in pages)
    uncovered = opening.size - covered
    slices = tuple(piece for _, _, _, piece in pages)
    best: tuple[int, tuple[str, ...]] = (covered + 1, ())
    before: tuple[int, Mapping[str, Entry], list[list[bytes]]] | None = None
    if not covered:  # of nothing every state is the state
        return SnapshotMatch("unexplained", None, (), 0, opening.size, opening.size)
    for steps_done, entries in states:
        expected = [_expected(piece, region, entries, opening, first) for region, first, _, piece in pages]
        wrong = [
            (region.name, sum(a != b for a, b in zip(leaves, made, strict=True)))
            for (region, _, leaves, _), made in zip(pages, expected, strict=True)
        ]
        differing = tuple(name for name, count in wrong if count)
        if not differing:
            return SnapshotMatch("exact", steps_done, slices, 0, uncovered, opening.size)
        if before is not None and steps_done == before[0] + 1:
            mixed = _torn(opening, pages, before, (entries, expected), memory)
            if mixed is not None:
                return SnapshotMatch("torn", before[0], slices, mixed, uncovered, opening.size)
        missing = sum(count for _, count in wrong) * opening.page_size
        best = min(best, (missing, differing))
        before = (steps_done, entries, expected)
    unexplained = min(uncovered + best[0], opening.size)
    return SnapshotMatch("unexplained", None, slices, 0, unexplained, opening.size, best[1])


def _expected(
    piece: Slice, region: Region, entries: Mapping[str, Entry], opening: SnapshotOpening, first: int
) -> list[bytes]:
    """Return the leaves of a region; hashes of nothing where the state cannot fill it."""
    data = slice_bytes(piece, region.dtype, entries)
    if data is None or len(data) != region.size:
        return [b""] * region.pages(opening.page_size)
    return page_hashes(
        reader_of(data), region.size, page_size=opening.page_size, salt=opening.salt, first=first
    )[0]


def _torn(
    opening: SnapshotOpening,
    pages: Sequence[tuple[Region, int, Sequence[bytes], Slice]],
    before: tuple[int, Mapping[str, Entry], list[list[bytes]]],
    after: tuple[Mapping[str, Entry], list[list[bytes]]],
    memory: PageReader | None,
) -> int | None:
    """Return how many pages mix two states, or None if a page is of neither."""
    starts = _offsets(opening)
    mixed = 0
    for (region, first, leaves, piece), old, new in zip(pages, before[2], after[1], strict=True):
        both: tuple[bytes | None, bytes | None] | None = None
        for number, leaf in enumerate(leaves):
            if leaf in (old[number], new[number]):
                continue
            if memory is None:
                return None
            if both is None:
                both = slice_bytes(piece, region.dtype, before[1]), slice_bytes(piece, region.dtype, after[0])
            page = _SignedPage(opening, starts[piece.region], first, number, leaf)
            if not _is_mixed(page, region.dtype, *both, memory):
                return None
            mixed += 1
    return mixed


@dataclass(frozen=True)
class _SignedPage:
    """Page ``number`` of a region that begins at byte ``offset`` and page ``first`` of the memory."""

    opening: SnapshotOpening
    offset: int
    first: int
    number: int
    leaf: bytes


def _is_mixed(
    page: _SignedPage, dtype: str, one: bytes | None, two: bytes | None, memory: PageReader
) -> bool:
    """Whether every element of a page is that of one of two states of its region; the page must be the one that was signed."""
    if one is None or two is None or len(one) != len(two):
        return False
    page_size, salt = page.opening.page_size, page.opening.salt
    start = page.number * page_size
    size = min(page_size, len(one) - start)
    held = memory(page.offset + start, size)
    if len(held) != size:
        return False
    signed, _ = page_hashes(
        reader_of(held), size, page_size=page_size, salt=salt, first=page.first + page.number
    )
    if signed != [page.leaf]:
        return False
    bits = f"<u{np.dtype(_NUMPY[dtype]).itemsize}"
    found, a, b = (
        np.frombuffer(data, dtype=bits)
        for data in (held, one[start : start + size], two[start : start + size])
    )
    return bool(np.all((found == a) | (found == b)))


def _offsets(opening: SnapshotOpening) -> dict[str, int]:
    offsets: dict[str, int] = {}
    at = 0
    for region in opening.regions:
        offsets[region.name] = at
        at += region.size
    return offsets
