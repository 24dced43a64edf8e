"""Digests of the tensors inside a step, and proofs that a few of their elements are what they are said to be.

A tensor is committed to as its elements lie in memory, in chunks whose size the trace states: small enough that a judge
who looks at one element of a small job reads little. With chunks of 2**16 bytes the root is the tensor root of
``commit.state``, so a large state needs no second hash.
"""

from __future__ import annotations

import itertools
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from tallystick.commit.codec import Document
from tallystick.commit.encoding import HASH_BYTES, digest
from tallystick.commit.field_rules import Hash, Hex
from tallystick.commit.merkle import inclusion_proof, leaf_hash, leaf_hashes, verify_inclusion
from tallystick.commit.merkle import root as merkle_root
from tallystick.commit.state import CHUNK_BYTES, DTYPE_BYTES, Leaves
from tallystick.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from concurrent.futures import Executor, Future

SMALLEST_CHUNK = 1 << 12
TENSOR_TAG = "tallystick/step-tensor/1"
_SPAN = 1 << 23  # bytes hashed by one task of a pool


def chunk_size(state_bytes: int) -> int:
    """Return the chunk size of the traces of a run whose state has so many bytes: a power of two, about 1/1024 of it."""
    wanted = max(SMALLEST_CHUNK, min(CHUNK_BYTES, state_bytes >> 10))
    return 1 << (wanted.bit_length() - 1)


@dataclass(frozen=True)
class TensorDigest:
    """What a trace commits to of one tensor: dtype, number of elements, and the root over its bytes.

    Raises:
        InvalidInput: a field breaks its rule.
    """

    dtype: str
    elements: int
    root: bytes

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise InvalidInput(f"tensor: dtype {self.dtype[:80]!r} is unknown")
        if not 0 <= self.elements < 1 << 48:
            raise InvalidInput(f"tensor: {self.elements} elements are out of range")
        if len(self.root) != HASH_BYTES:
            raise InvalidInput(f"tensor: root must be 32 bytes, got {len(self.root)}")

    @property
    def nbytes(self) -> int:
        """The length of the data."""
        return self.elements * DTYPE_BYTES[self.dtype]

    def chunks(self, chunk: int) -> int:
        """Return the number of chunks of ``chunk`` bytes."""
        return -(-self.nbytes // chunk)

    def digest(self, chunk: int) -> bytes:
        """Return 32 bytes that bind dtype, number of elements, chunk size and root."""
        numbers = struct.pack("<QQ", self.elements, chunk)
        return digest(TENSOR_TAG, self.dtype.encode("ascii"), numbers, self.root)


@dataclass(frozen=True)
class OpenedChunk(Document, what="chunk"):
    """Chunk ``index`` of a tensor with the path to its root."""

    index: int
    data: Annotated[bytes, Hex()]
    path: tuple[Hash, ...]

    @property
    def nbytes(self) -> int:
        """What a judge reads: the chunk and its path."""
        return len(self.data) + HASH_BYTES * len(self.path)


def chunk_hashes(view: memoryview, chunk: int, pool: Executor | None = None) -> list[bytes]:
    """Return the leaf hashes of ``view``'s bytes; a thread pool hashes large tensors in parts."""
    if pool is None or view.nbytes <= 2 * max(_SPAN, chunk):
        return leaf_hashes(_flat(view), chunk)
    return joined(hash_later(view, chunk, pool))


def hash_later(
    view: memoryview, chunk: int, pool: Executor, leaves: Leaves = leaf_hashes
) -> list[Future[list[bytes]]]:
    """Return promises of the leaf hashes of ``view``'s bytes, in parts, which must not change before they are kept."""
    flat, span = _flat(view), max(_SPAN, chunk)
    return [pool.submit(leaves, flat[at : at + span], chunk) for at in range(0, flat.nbytes, span)]


def joined(parts: Sequence[Future[list[bytes]]]) -> list[bytes]:
    """Return the leaf hashes that ``hash_later`` promised, once they are there."""
    return [found for part in parts for found in part.result()]


def _flat(view: memoryview) -> memoryview:
    return view.cast("B") if view.nbytes else memoryview(b"")


def digest_of(
    dtype: str, elements: int, data: memoryview, chunk: int, pool: Executor | None = None
) -> TensorDigest:
    """Return the digest of a tensor of ``elements`` elements.

    Raises:
        InvalidInput: ``data`` has another length than they need.
    """
    found = TensorDigest(dtype, elements, merkle_root(chunk_hashes(data, chunk, pool)))
    if data.nbytes != found.nbytes:
        raise InvalidInput(f"tensor: {elements} of {dtype} need {found.nbytes} bytes, got {data.nbytes}")
    return found


def open_chunks(
    data: memoryview, chunk: int, indexes: Iterable[int], hashes: Sequence[bytes] | None = None
) -> tuple[OpenedChunk, ...]:
    """Return chunks of ``data`` with their paths, in ascending order; ``hashes`` are its chunk hashes, if at hand."""
    hashes = chunk_hashes(data, chunk) if hashes is None else hashes
    flat = _flat(data)
    return tuple(
        OpenedChunk(at, bytes(flat[at * chunk : (at + 1) * chunk]), tuple(inclusion_proof(hashes, at)))
        for at in sorted(set(indexes))
    )


def verify_opened(tensor: TensorDigest, chunk: int, opened: Sequence[OpenedChunk]) -> None:
    """Return if every opened chunk is the part of ``tensor`` that it says it is.

    Raises:
        InvalidInput: a chunk twice or out of order, out of range, of another length, or a path of another length.
        Mismatch: a chunk does not lie under the tensor's root.
    """
    count = tensor.chunks(chunk)
    for before, after in itertools.pairwise(opened):
        if before.index >= after.index:
            raise InvalidInput(f"tensor: chunk {after.index} must not follow chunk {before.index}")
    for piece in opened:
        if not 0 <= piece.index < count:
            raise InvalidInput(f"tensor: chunk {piece.index} is out of range for {count} chunks")
        expected = min(chunk, tensor.nbytes - piece.index * chunk)
        if len(piece.data) != expected:
            raise InvalidInput(f"tensor: chunk {piece.index} must be {expected} bytes, got {len(piece.data)}")
        verify_inclusion(
            leaf_hash(piece.data), index=piece.index, size=count, proof=piece.path, root=tensor.root
        )
