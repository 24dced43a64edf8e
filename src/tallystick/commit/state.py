"""The commitment to a state: named tensors in, one 32-byte root out (spec/state-commitment.md).

A state is a set of entries, each a name, a dtype, a shape and raw little-endian bytes in row
order. Two levels of RFC 6962 trees commit to it: one over the 64 KiB chunks of each tensor,
one over the entries in order of their names. So a single chunk can be opened, and the same
bytes under another name, dtype or shape have another root.

    root = state_root([Entry("weight", "F32", (2, 3), data)])

Pure bytes: whoever holds torch or numpy arrays hands over a memoryview of them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from tallystick.commit.codec import Document
from tallystick.commit.encoding import frame
from tallystick.commit.field_rules import Hash
from tallystick.commit.merkle import EMPTY_ROOT, inclusion_proof, leaf_hash, leaf_hashes, verify_inclusion
from tallystick.commit.merkle import root as merkle_root
from tallystick.errors import InvalidInput, Mismatch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from concurrent.futures import Executor, Future

CHUNK_BYTES = 2**16  # spec/state-commitment.md 2: part of the format, named in every entry leaf
DTYPE_BYTES = {  # the codes of the safetensors format
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "F64": 8,
    "I64": 8,
    "U64": 8,
}
NAME_LIMIT = 1024  # bytes of UTF-8; keeps every proof below PROOF_LIMIT
RANK_LIMIT = 64  # dimensions; no array library has more

SUMMARY_LIMIT = 2**26  # bytes; some 200,000 entries
PROOF_LIMIT = 2**17  # bytes of JSON

ENTRY_TAG = "tallystick/state-entry/1"
SUMMARY_FORMAT = "tallystick/state-summary/1"
PROOF_FORMAT = "tallystick/chunk-proof/1"

Leaves = Callable[[memoryview, int], list[bytes]]
"""What ``merkle.leaf_hashes`` does."""

_POOL_BYTES = 2**24  # smaller tensors hash faster than a pool hands them out
_SPAN_CHUNKS = 128  # chunks hashed by one task of a pool


@dataclass(frozen=True)
class Entry:
    """One named tensor of a state.

    Attributes:
        name: unique in its state, 1 to 1024 bytes of UTF-8.
        dtype: a key of ``DTYPE_BYTES``.
        shape: dimensions, outermost first; () is a scalar.
        data: the elements in row order, little-endian; a memoryview must be contiguous.

    Raises:
        InvalidInput: a field breaks its rule, ``data`` has another length than dtype and shape
            demand, or a BOOL byte is neither 0 nor 1.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes | memoryview = field(repr=False)

    def __post_init__(self) -> None:
        check_tensor(self.name, self.dtype, self.shape)
        view = memoryview(self.data)
        if not view.c_contiguous:
            raise InvalidInput(f"entry {self.name!r}: data must be contiguous")
        expected = _tensor_bytes(self.dtype, self.shape)
        if view.nbytes != expected:
            raise InvalidInput(
                f"entry {self.name!r}: {self.dtype} of shape {list(self.shape)} needs {expected} bytes,"
                f" got {view.nbytes}"
            )
        if self.dtype == "BOOL" and any(bytes(chunk).translate(None, b"\x00\x01") for chunk in _chunks(view)):
            raise InvalidInput(f"entry {self.name!r}: a BOOL byte must be 0 or 1")


@dataclass(frozen=True)
class EntrySummary(Document, what="entry", implied=("chunk_bytes",)):
    """What an entry leaf commits to: everything about an entry but its bytes, and their root.

    Raises:
        InvalidInput: a field breaks its rule or contradicts another.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    tensor_root: Hash

    def __post_init__(self) -> None:
        super().__post_init__()
        check_tensor(self.name, self.dtype, self.shape)
        expected = _tensor_bytes(self.dtype, self.shape)
        if self.nbytes != expected:
            raise InvalidInput(
                f"entry {self.name!r}: {self.dtype} of shape {list(self.shape)} needs {expected} bytes,"
                f" states {self.nbytes}"
            )
        if self.nbytes == 0 and self.tensor_root != EMPTY_ROOT:
            raise InvalidInput(f"entry {self.name!r}: an empty tensor must have the empty tree's root")

    @property
    def chunk_bytes(self) -> int:
        """The length of a chunk; one for all entries."""
        return CHUNK_BYTES

    @property
    def num_chunks(self) -> int:
        """The number of leaves of the tensor tree."""
        return -(-self.nbytes // CHUNK_BYTES)

    def leaf(self) -> bytes:
        """Return the bytes of the entry leaf (spec/state-commitment.md 3)."""
        return frame(
            ENTRY_TAG,
            self.name.encode("utf-8"),
            self.dtype.encode("ascii"),
            struct.pack(f"<{len(self.shape)}Q", *self.shape),
            struct.pack("<Q", self.nbytes),
            struct.pack("<Q", CHUNK_BYTES),
            self.tensor_root,
        )

    def digest(self) -> bytes:
        """Return the entry's leaf hash in the state tree."""
        return leaf_hash(self.leaf())


@dataclass(frozen=True)
class StateSummary(Document, form=SUMMARY_FORMAT, what="state summary", limit=SUMMARY_LIMIT):
    """The leaves of a state tree: enough to compute its root and to name the entry that differs.

    Raises:
        InvalidInput: names are not strictly ascending in their UTF-8 bytes.
    """

    entries: tuple[EntrySummary, ...]

    def __post_init__(self) -> None:
        for before, after in zip(self.entries, self.entries[1:], strict=False):
            if before.name == after.name:
                raise InvalidInput(f"state: duplicate name {after.name!r}")
            if _order(before) > _order(after):
                raise InvalidInput(f"state: entry {after.name!r} must come before {before.name!r}")

    def root(self) -> bytes:
        """Return the state root."""
        return merkle_root([entry.digest() for entry in self.entries])

    def index(self, name: str) -> int:
        """Return the position of entry ``name``.

        Raises:
            InvalidInput: there is none.
        """
        for index, entry in enumerate(self.entries):
            if entry.name == name:
                return index
        raise InvalidInput(f"state: there is no entry {name!r}")


@dataclass(frozen=True)
class HeldState:
    """A state at hand with its summary, so that nobody who holds it hashes it again.

    Attributes:
        entries: by name.
        summary: of them; whoever makes the pair vouches that the two belong together.
    """

    entries: Mapping[str, Entry] = field(repr=False)
    summary: StateSummary = field(repr=False)

    @cached_property
    def root(self) -> bytes:
        """The state root."""
        return self.summary.root()

    @cached_property
    def nbytes(self) -> int:
        """The length of all data."""
        return sum(entry.nbytes for entry in self.summary.entries)

    def open(self, name: str, chunk_index: int) -> ChunkProof:
        """Return the proof for one chunk; see ``open_chunk``."""
        return open_chunk([self.entries[name]], name, chunk_index, summary=self.summary)


@dataclass(frozen=True)
class ChunkProof(Document, form=PROOF_FORMAT, what="chunk proof", limit=PROOF_LIMIT):
    """The path from one chunk of one entry to a state root; self-contained.

    Not promised: that the state holds the name only once, or nothing else; for that, compare
    the root of a whole ``StateSummary``.
    """

    entry: EntrySummary
    entry_index: int
    entry_count: int
    entry_path: tuple[Hash, ...]
    chunk_index: int
    chunk_path: tuple[Hash, ...]


def check_tensor(name: str, dtype: str, shape: Sequence[int]) -> None:
    """Return if name, dtype and shape can be those of an entry.

    Raises:
        InvalidInput: an empty, over-long or unencodable name, an unknown dtype, or a dimension
            that is negative or beyond 63 bits.
    """
    try:
        n_bytes = len(name.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise InvalidInput(f"entry {name!r}: name is not encodable as UTF-8") from error
    if not 0 < n_bytes <= NAME_LIMIT:
        raise InvalidInput(f"entry {name[:80]!r}: name must be 1 to {NAME_LIMIT} bytes, is {n_bytes}")
    if dtype not in DTYPE_BYTES:
        raise InvalidInput(f"entry {name!r}: dtype {dtype[:80]!r} is unknown")
    if len(shape) > RANK_LIMIT:
        raise InvalidInput(f"entry {name!r}: {len(shape)} dimensions exceed {RANK_LIMIT}")
    if any(not 0 <= size < 2**63 for size in shape):
        raise InvalidInput(f"entry {name!r}: shape {list(shape)} has a dimension out of range")


def summarise(
    entries: Iterable[Entry], *, pool: Executor | None = None, leaves: Leaves = leaf_hashes
) -> StateSummary:
    """Return the summary of the state that ``entries``, in any order, make up.

    ``pool`` hashes the chunks of several tensors at a time; it must be a thread pool, as the bytes
    are shared, and gains because hashing releases the interpreter lock. ``leaves`` is what hashes
    there: another function with the same results.

    Raises:
        InvalidInput: two entries have one name.
    """
    if pool is None:
        return StateSummary(tuple(sorted((_summarise(entry, None) for entry in entries), key=_order)))
    held = list(entries)
    promised = [_hash_later(_bytes_of(entry), pool, leaves) for entry in held]
    found = [
        _summarise_with(entry, [leaf for part in parts for leaf in part.result()])
        for entry, parts in zip(held, promised, strict=True)
    ]
    return StateSummary(tuple(sorted(found, key=_order)))


def hold(
    entries: Iterable[Entry], *, pool: Executor | None = None, leaves: Leaves = leaf_hashes
) -> HeldState:
    """Return ``entries``, in any order, with their summary; see ``summarise``."""
    held = list(entries)
    return HeldState({entry.name: entry for entry in held}, summarise(held, pool=pool, leaves=leaves))


def entry_digest(entry: Entry, *, pool: Executor | None = None) -> bytes:
    """Return the leaf hash of ``entry`` in the state tree."""
    return _summarise(entry, pool).digest()


def state_root(entries: Iterable[Entry], *, pool: Executor | None = None) -> bytes:
    """Return the root of the state that ``entries``, in any order, make up; see ``summarise``."""
    return summarise(entries, pool=pool).root()


def verify_state(
    entries: Iterable[Entry], root: bytes, *, what: str = "state", pool: Executor | None = None
) -> None:
    """Return if ``entries`` are the state under ``root``.

    Raises:
        Mismatch: they are not; the message begins with ``what``.
    """
    found = state_root(entries, pool=pool)
    if found != root:
        raise Mismatch(
            f"{what}: root is {found.hex()}, stated root is {root.hex()}",
            where=what,
            own=found.hex(),
            stated=root.hex(),
        )


parse_state_summary = StateSummary.parse
parse_chunk_proof = ChunkProof.parse


def open_chunk(
    entries: Iterable[Entry], name: str, chunk_index: int, *, summary: StateSummary | None = None
) -> ChunkProof:
    """Return the proof for chunk ``chunk_index`` of entry ``name``.

    With the state's ``summary`` at hand, ``entries`` need hold no more than the one entry.

    Raises:
        InvalidInput: there is no such entry or chunk.
        Mismatch: the entry is not the one the summary describes.
    """
    held = list(entries)
    summary = summarise(held) if summary is None else summary
    entry_index = summary.index(name)
    entry = next((entry for entry in held if entry.name == name), None)
    if entry is None:
        raise InvalidInput(f"state: the bytes of entry {name!r} are not at hand")
    hashes = _chunk_hashes(_bytes_of(entry), None)
    found = _summarise_with(entry, hashes)
    if found != summary.entries[entry_index]:
        raise Mismatch(
            f"entry {name!r}: digest is {found.digest().hex()}, summary says"
            f" {summary.entries[entry_index].digest().hex()}",
            where=f"entry {name!r}",
            own=found.digest().hex(),
            stated=summary.entries[entry_index].digest().hex(),
        )
    return ChunkProof(
        entry=found,
        entry_index=entry_index,
        entry_count=len(summary.entries),
        entry_path=tuple(inclusion_proof([entry.digest() for entry in summary.entries], entry_index)),
        chunk_index=chunk_index,
        chunk_path=tuple(inclusion_proof(hashes, chunk_index)),
    )


def verify_chunk(proof: ChunkProof, chunk: bytes | memoryview, root: bytes) -> None:
    """Return if ``chunk`` is the part of the state under ``root`` that ``proof`` says it is.

    Raises:
        InvalidInput: an index out of range, a path or chunk of another length than the entry demands.
        Mismatch: the chunk or the entry does not lie under the root.
    """
    entry, at = proof.entry, proof.chunk_index
    if not 0 <= at < entry.num_chunks:
        raise InvalidInput(
            f"entry {entry.name!r}: chunk index {at} is out of range for {entry.num_chunks} chunks"
        )
    expected = min(CHUNK_BYTES, entry.nbytes - at * CHUNK_BYTES)
    n_bytes = memoryview(chunk).nbytes
    if n_bytes != expected:
        raise InvalidInput(f"entry {entry.name!r}: chunk {at} must be {expected} bytes, got {n_bytes}")
    # 1. The entry lies under the state root.
    verify_inclusion(
        entry.digest(), index=proof.entry_index, size=proof.entry_count, proof=proof.entry_path, root=root
    )
    # 2. The chunk lies under the entry's tensor root; the entry alone says how many chunks there are.
    verify_inclusion(
        leaf_hash(chunk), index=at, size=entry.num_chunks, proof=proof.chunk_path, root=entry.tensor_root
    )


def _summarise(entry: Entry, pool: Executor | None) -> EntrySummary:
    return _summarise_with(entry, _chunk_hashes(_bytes_of(entry), pool))


def _summarise_with(entry: Entry, chunk_hashes: Sequence[bytes]) -> EntrySummary:
    n_bytes = memoryview(entry.data).nbytes
    return EntrySummary(entry.name, entry.dtype, tuple(entry.shape), n_bytes, merkle_root(chunk_hashes))


def _chunk_hashes(view: memoryview, pool: Executor | None) -> list[bytes]:
    if pool is None or view.nbytes <= _POOL_BYTES:
        return [leaf_hash(chunk) for chunk in _chunks(view)]
    return [leaf for part in _hash_later(view, pool, leaf_hashes) for leaf in part.result()]


def _hash_later(view: memoryview, pool: Executor, leaves: Leaves) -> list[Future[list[bytes]]]:
    span = _SPAN_CHUNKS * CHUNK_BYTES
    spans = [view[start : start + span] for start in range(0, view.nbytes, span)]
    return [pool.submit(leaves, part, CHUNK_BYTES) for part in spans]


def _chunks(view: memoryview) -> Iterable[memoryview]:
    flat = _flat(view)
    return (flat[start : start + CHUNK_BYTES] for start in range(0, flat.nbytes, CHUNK_BYTES))


def _bytes_of(entry: Entry) -> memoryview:
    return _flat(memoryview(entry.data))


def _flat(view: memoryview) -> memoryview:
    # A view with a zero in its shape cannot be cast.
    return view.cast("B") if view.nbytes else memoryview(b"")


def _tensor_bytes(dtype: str, shape: Sequence[int]) -> int:
    return DTYPE_BYTES[dtype] * math.prod(shape)


def _order(entry: EntrySummary) -> bytes:
    return entry.name.encode("utf-8")
