"""A chip's memory as pages under one root, and the port through which an agent sees it (spec/chip-log.md 5).

    with probe.frozen(copy=False) as seen:
        opening = hash_memory(seen, page_size=1 << 21, salt=salt)
    opening.root(), opening.layout_digest()     # what the snapshot record states

The salt hides what somebody could guess; whoever is shown the opening can match every page.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Annotated, Protocol

from tallystick.commit.codec import Document
from tallystick.commit.encoding import HASH_BYTES, canonical_json, digest, kind_of, parse_hex
from tallystick.commit.field_rules import Hex, Row, Size, Via, Whole
from tallystick.commit.merkle import root as merkle_root
from tallystick.commit.state import DTYPE_BYTES
from tallystick.errors import InvalidInput, Mismatch

LAYOUT_TAG = "tallystick/layout/1"
OPENING_FORMAT = "tallystick/snapshot-opening/1"
PAGE_TAG = b"tallystick/page/1\0"
SALT_BYTES = 16
OPENING_LIMIT = 1 << 28  # bytes of JSON; four million pages
REGION_KINDS = ("weights", "buffer", "optimizer", "other")
LEAST_PAGE, LARGEST_PAGE = 64, 1 << 30

Reader = Callable[[int, int], "bytes | memoryview | None"]
"""Returns ``size`` bytes from ``start`` on, or None where they cannot be read."""


@dataclass(frozen=True)
class Region(Document, what="region"):
    """A named piece of memory: what it is called, the dtype its owner claims, what it is for, and its bytes."""

    name: str
    dtype: str
    kind: str
    size: int

    def __post_init__(self) -> None:
        if not 1 <= len(self.name.encode("utf-8", "replace")) <= 1024 or not self.name.isprintable():
            raise InvalidInput(f"region {self.name[:80]!a}: a name has 1 to 1024 printable characters")
        if self.dtype not in DTYPE_BYTES and self.dtype != "RAW":
            raise InvalidInput(f"region {self.name}: dtype {self.dtype[:40]!r} is unknown")
        if self.kind not in REGION_KINDS:
            raise InvalidInput(
                f"region {self.name}: kind must be one of {', '.join(REGION_KINDS)}, is {self.kind[:40]!r}"
            )
        if not 0 <= self.size < 2**63:
            raise InvalidInput(f"region {self.name}: size {self.size} is out of range")

    def pages(self, page_size: int) -> int:
        """Return how many pages the region has."""
        return -(-self.size // page_size)


@dataclass(frozen=True)
class Observation:
    """Memory while it holds still: regions, a reader for each, and what the observed program says of itself.

    Attributes:
        step: steps it says it has done, or None. A claim, for finding the match sooner.
        torn: whether its optimizer was writing.
        timed_out: whether the probe waited for a quiet moment in vain.
    """

    regions: tuple[Region, ...]
    readers: tuple[Reader, ...] = field(repr=False)
    step: int | None = None
    torn: bool = False
    timed_out: bool = False


class Probe(Protocol):
    """Whoever can hold a program still and read its memory."""

    def frozen(self, *, copy: bool) -> AbstractContextManager[Observation]:
        """Hold the memory still inside the block; afterwards the program goes on.

        With ``copy`` the readers give the same bytes after the block, else only inside it.
        """
        ...


def _packed(leaves: Sequence[bytes]) -> str:
    return b"".join(leaves).hex()


def _unpacked(value: object, what: str) -> tuple[bytes, ...]:
    if not isinstance(value, str) or len(value) % (2 * HASH_BYTES):
        raise InvalidInput(f"{what}: must be a string of whole hashes, is {kind_of(value)}")
    packed = parse_hex(value, n_bytes=len(value) // 2, what=what)
    return tuple(packed[at : at + HASH_BYTES] for at in range(0, len(packed), HASH_BYTES))


@dataclass(frozen=True)
class SnapshotOpening(Document, form=OPENING_FORMAT, what="snapshot opening", limit=OPENING_LIMIT):
    """What opens a snapshot's root: salt, layout and the hash of every page. For the owner and whom it trusts.

    Raises:
        InvalidInput: two regions of one name, or as many leaves as the layout does not have.
    """

    ueid: Annotated[bytes, Hex(), Size(7, 33)]
    seq: Whole
    salt: Annotated[bytes, Hex(SALT_BYTES)]
    page_size: int
    regions: tuple[Annotated[Region, Row()], ...]
    leaves: Annotated[tuple[bytes, ...], Via(_packed, _unpacked)] = field(repr=False)
    step: Whole | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_page_size(self.page_size)
        if len({region.name for region in self.regions}) != len(self.regions):
            raise InvalidInput("snapshot opening: two regions have one name")
        pages = sum(region.pages(self.page_size) for region in self.regions)
        if len(self.leaves) != pages:
            raise InvalidInput(
                f"snapshot opening: the layout has {pages} pages, there are {len(self.leaves)} hashes"
            )

    @property
    def size(self) -> int:
        """Bytes of all regions."""
        return sum(region.size for region in self.regions)

    def root(self) -> bytes:
        """Return the Merkle root over all pages."""
        return merkle_root(self.leaves)

    def layout_digest(self) -> bytes:
        """Return the salted digest of the list of regions."""
        return layout_digest(self.regions, self.page_size, self.salt)

    def pages_of(self) -> Iterator[tuple[Region, int, Sequence[bytes]]]:
        """Yield each region with the number of its first page and its page hashes."""
        at = 0
        for region in self.regions:
            n = region.pages(self.page_size)
            yield region, at, self.leaves[at : at + n]
            at += n


def verify_opening(opening: SnapshotOpening, *, root: bytes, layout: bytes, what: str = "snapshot") -> None:
    """Return if the opening opens ``root`` and ``layout``.

    Raises:
        Mismatch: it opens others.
    """
    if opening.root() != root:
        raise Mismatch(
            f"{what}: the pages have root {opening.root().hex()[:16]}.., the chip signed {root.hex()[:16]}.."
        )
    if opening.layout_digest() != layout:
        raise Mismatch(f"{what}: the layout is not the one that the chip signed")


def layout_digest(regions: Iterable[Region], page_size: int, salt: bytes) -> bytes:
    """Return the salted digest of a layout."""
    document = {
        "format": LAYOUT_TAG,
        "page_size": page_size,
        "regions": [region.row() for region in regions],
    }
    return digest(LAYOUT_TAG, salt, canonical_json(document))


def page_hashes(
    read: Reader,
    size: int,
    *,
    page_size: int,
    salt: bytes,
    first: int,
    each: Callable[[bytes | memoryview], object] | None = None,
    pool: Executor | None = None,
) -> tuple[list[bytes], bool]:
    """Return the leaf of each page of a region whose first page has number ``first``, and whether all could be read.

    ``each`` is given every page in order (to keep it); ``pool`` hashes pages side by side, if ``each`` is None.
    """
    prefix = hashlib.sha256(b"\0" + PAGE_TAG + salt)
    whole = True

    def one(number: int) -> tuple[bytes, bool]:
        start = number * page_size
        wanted = min(page_size, size - start)
        page = read(start, wanted)
        if each is not None:
            each(page if page is not None else bytes(wanted))
        state = prefix.copy()
        state.update(struct.pack("<Q", first + number))
        if page is not None:
            state.update(page)
        return state.digest(), page is not None

    numbers = range(-(-size // page_size))
    found = list(map(one, numbers) if pool is None or each is not None else pool.map(one, numbers))
    whole = all(readable for _, readable in found)
    return [leaf for leaf, _ in found], whole


def hash_memory(
    seen: Observation,
    *,
    page_size: int,
    salt: bytes,
    ueid: bytes,
    seq: int,
    each: Callable[[bytes | memoryview], object] | None = None,
    pool: Executor | None = None,
) -> tuple[SnapshotOpening, bool]:
    """Return the opening of everything seen, and whether every page could be read."""
    leaves: list[bytes] = []
    whole = True
    for region, read in zip(seen.regions, seen.readers, strict=True):
        found, readable = page_hashes(
            read, region.size, page_size=page_size, salt=salt, first=len(leaves), each=each, pool=pool
        )
        leaves += found
        whole &= readable
    return SnapshotOpening(ueid, seq, salt, page_size, seen.regions, tuple(leaves), seen.step), whole


def check_page_size(page_size: int) -> None:
    """Return if pages may have this size.

    Raises:
        InvalidInput: they may not.
    """
    if not LEAST_PAGE <= page_size <= LARGEST_PAGE or page_size % 64:
        raise InvalidInput(
            f"page size {page_size}: must be a multiple of 64 from {LEAST_PAGE} to {LARGEST_PAGE} bytes"
        )


def reader_of(data: bytes | memoryview) -> Reader:
    """Return a reader of bytes in this process."""
    view = memoryview(data).cast("B") if len(data) else memoryview(b"")
    return functools.partial(_slice, view)


def _slice(view: memoryview, start: int, size: int) -> memoryview:
    return view[start : start + size]
