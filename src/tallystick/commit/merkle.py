"""Merkle trees over bytes, as RFC 6962 and RFC 9162 define them, with SHA-256.

Leaves and nodes carry different prefixes, an odd node moves up unpaired, and the empty tree
has the hash of nothing. Everything but ``leaf_hash`` works on 32-byte leaf hashes, so a
caller may hash large leaves where and when it likes:

    hashes = [leaf_hash(item) for item in items]
    proof = inclusion_proof(hashes, 3)
    verify_inclusion(hashes[3], index=3, size=len(items), proof=proof, root=root(hashes))

A root does not commit to the number of leaves. Whoever publishes a root publishes the size
beside it, and each leaf says what it is.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from tallystick.commit.encoding import HASH_BYTES
from tallystick.errors import InvalidInput, Mismatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

EMPTY_ROOT = hashlib.sha256(b"").digest()  # RFC 6962 2.1: the hash of an empty list

_LEAF = hashlib.sha256(b"\x00")
_NODE = hashlib.sha256(b"\x01")


def leaf_hash(data: bytes | memoryview) -> bytes:
    """Return SHA-256(0x00 | ``data``), the hash of a leaf."""
    state = _LEAF.copy()
    state.update(data)
    return state.digest()


def leaf_hashes(data: memoryview, chunk: int) -> list[bytes]:
    """Return the hashes of the leaves that flat bytes make up, cut every ``chunk`` bytes."""
    return [leaf_hash(data[at : at + chunk]) for at in range(0, data.nbytes, chunk)]


def node_hash(left: bytes, right: bytes) -> bytes:
    """Return SHA-256(0x01 | ``left`` | ``right``), the hash of an inner node."""
    state = _NODE.copy()
    state.update(left + right)
    return state.digest()


def root(leaf_hashes: Sequence[bytes]) -> bytes:
    """Return the root of the tree over ``leaf_hashes``."""
    row = list(leaf_hashes)
    if not row:
        return EMPTY_ROOT
    while len(row) > 1:
        row = _next_row(row)
    return row[0]


def inclusion_proof(leaf_hashes: Sequence[bytes], index: int) -> list[bytes]:
    """Return the hashes that lead from leaf ``index`` to the root, lowest first (RFC 9162 2.1.3.1).

    Raises:
        InvalidInput: there is no leaf ``index``.
    """
    _must_be_a_leaf(index, len(leaf_hashes))
    row, at, proof = list(leaf_hashes), index, list[bytes]()
    while len(row) > 1:
        if (sibling := at ^ 1) < len(row):
            proof.append(row[sibling])
        row, at = _next_row(row), at // 2
    return proof


def verify_inclusion(leaf: bytes, *, index: int, size: int, proof: Sequence[bytes], root: bytes) -> None:
    """Return if ``leaf`` is leaf hash ``index`` of the ``size`` ones under ``root`` (RFC 9162 2.1.3.2).

    Raises:
        InvalidInput: no such leaf, a proof of another length than index and size demand, or a
            hash that is not 32 bytes.
        Mismatch: the proof leads to another root.
    """
    _must_be_a_leaf(index, size)
    _must_be_hashes((leaf, root, *proof))
    expected = _inclusion_length(index, size)
    if len(proof) != expected:
        raise InvalidInput(
            f"inclusion proof: leaf {index} of {size} needs {expected} nodes, got {len(proof)}"
        )
    found, at, last = leaf, index, size - 1
    for sibling in proof:
        # At the right edge an unpaired node moves up without a sibling.
        while not at & 1 and at == last:
            at, last = at >> 1, last >> 1
        found = node_hash(sibling, found) if at & 1 else node_hash(found, sibling)
        at, last = at >> 1, last >> 1
    _must_lead_to(found, root, f"inclusion proof of leaf {index} of {size}")


def consistency_proof(leaf_hashes: Sequence[bytes], old_size: int) -> list[bytes]:
    """Return the hashes that show the first ``old_size`` leaves to be a prefix of all (RFC 9162 2.1.4.1).

    Empty for ``old_size`` 0 and for the whole size: there the two roots say everything.

    Raises:
        InvalidInput: ``old_size`` exceeds the number of leaves.
    """
    return [root(leaf_hashes[start:end]) for start, end in consistency_ranges(old_size, len(leaf_hashes))]


def inclusion_ranges(index: int, size: int) -> list[tuple[int, int]]:
    """Return the ranges of leaves whose roots make up ``inclusion_proof``, in its order; for trees kept in tiles.

    Raises:
        InvalidInput: there is no leaf ``index``.
    """
    _must_be_a_leaf(index, size)
    ranges: list[tuple[int, int]] = []
    start, end = 0, size
    while end - start > 1:
        split = start + _largest_power_below(end - start)
        ranges.append((split, end) if index < split else (start, split))
        start, end = (start, split) if index < split else (split, end)
    return ranges[::-1]


def consistency_ranges(old_size: int, size: int) -> list[tuple[int, int]]:
    """Return the ranges of leaves whose roots make up ``consistency_proof``, in its order.

    Raises:
        InvalidInput: ``old_size`` exceeds ``size``.
    """
    _must_be_a_prefix(old_size, size)
    ranges: list[tuple[int, int]] = []
    start, end, whole = 0, size, True
    while start < old_size < end:
        split = start + _largest_power_below(end - start)
        if old_size <= split:
            ranges.append((split, end))
            end = split
        else:
            ranges.append((start, split))
            start, whole = split, False
    if not whole:
        ranges.append((start, end))
    return ranges[::-1]


def range_root(start: int, end: int, subtree: Callable[[int, int], bytes]) -> bytes:
    """Return the root over leaves ``start`` to ``end``, from ``subtree(level, index)``: full subtrees of 2**level leaves.

    ``start`` must be a multiple of the largest power of two not above the range's length, as in every proof.
    """
    if (end - start) & (end - start - 1) == 0:
        level = (end - start).bit_length() - 1
        return subtree(level, start >> level)
    split = start + _largest_power_below(end - start)
    return node_hash(range_root(start, split, subtree), range_root(split, end, subtree))


def verify_consistency(
    *, old_size: int, size: int, old_root: bytes, root: bytes, proof: Sequence[bytes]
) -> None:
    """Return if the tree under ``root`` begins with the one under ``old_root`` (RFC 9162 2.1.4.2).

    Raises:
        InvalidInput: ``old_size`` exceeds ``size``, a proof of another length than the sizes
            demand, or a hash that is not 32 bytes.
        Mismatch: the proof leads to another old or new root.
    """
    _must_be_a_prefix(old_size, size)
    _must_be_hashes((old_root, root, *proof))
    expected = _consistency_length(old_size, size)
    if len(proof) != expected:
        raise InvalidInput(
            f"consistency proof: {old_size} to {size} leaves needs {expected} nodes, got {len(proof)}"
        )
    what = f"consistency proof of {old_size} to {size} leaves"
    if old_size == 0:
        _must_lead_to(EMPTY_ROOT, old_root, f"{what}: old tree")
        if size == 0:
            _must_lead_to(EMPTY_ROOT, root, f"{what}: new tree")
        return
    if old_size == size:
        _must_lead_to(old_root, root, what)
        return
    at, last = old_size - 1, size - 1
    while at & 1:
        at, last = at >> 1, last >> 1
    # A full old tree is itself a node of the new one, and the proof leaves it out.
    path = [old_root, *proof] if at == 0 else list(proof)
    old = new = path[0]
    for sibling in path[1:]:
        while not at & 1 and at == last:
            at, last = at >> 1, last >> 1
        if at & 1:
            old, new = node_hash(sibling, old), node_hash(sibling, new)
        else:
            new = node_hash(new, sibling)
        at, last = at >> 1, last >> 1
    _must_lead_to(old, old_root, f"{what}: old tree")
    _must_lead_to(new, root, f"{what}: new tree")


class Accumulator:
    """The root of a growing list of leaf hashes, in memory logarithmic in its length."""

    def __init__(self, leaf_hashes: Iterable[bytes] = ()) -> None:
        self.size = 0
        # One full subtree for each set bit of size, largest first.
        self._peaks: list[bytes] = []
        for leaf in leaf_hashes:
            self.append(leaf)

    def append(self, leaf: bytes) -> None:
        """Add one leaf hash at the end.

        Raises:
            InvalidInput: ``leaf`` is not 32 bytes.
        """
        _must_be_hashes((leaf,))
        node, pairs = leaf, self.size
        while pairs & 1:
            node, pairs = node_hash(self._peaks.pop(), node), pairs >> 1
        self._peaks.append(node)
        self.size += 1

    def root(self) -> bytes:
        """Return the root over all leaves so far."""
        if not self._peaks:
            return EMPTY_ROOT
        found = self._peaks[-1]
        for peak in self._peaks[-2::-1]:
            found = node_hash(peak, found)
        return found


def _next_row(row: list[bytes]) -> list[bytes]:
    paired = [node_hash(row[i], row[i + 1]) for i in range(0, len(row) - 1, 2)]
    return [*paired, row[-1]] if len(row) & 1 else paired


def _largest_power_below(n: int) -> int:
    """Return the largest power of two smaller than ``n``, which is at least 2."""
    return 1 << (n - 1).bit_length() - 1


def _inclusion_length(index: int, size: int) -> int:
    # Below the level where the paths of this leaf and the last one part, every level has a
    # sibling; above it, only the levels where this leaf's path is a right child.
    inner = (index ^ (size - 1)).bit_length()
    return inner + (index >> inner).bit_count()


def _consistency_length(old_size: int, size: int) -> int:
    if old_size in (0, size):
        return 0
    trailing = (old_size & -old_size).bit_length() - 1
    whole = old_size == 1 << trailing
    return _inclusion_length(old_size - 1, size) - trailing + (0 if whole else 1)


def _must_be_a_leaf(index: int, size: int) -> None:
    if not 0 <= index < size:
        raise InvalidInput(f"Merkle tree: leaf index {index} is out of range for {size} leaves")


def _must_be_a_prefix(old_size: int, size: int) -> None:
    if not 0 <= old_size <= size:
        raise InvalidInput(f"Merkle tree: old size {old_size} is out of range for {size} leaves")


def _must_be_hashes(values: Iterable[bytes]) -> None:
    for value in values:
        if len(value) != HASH_BYTES:
            raise InvalidInput(f"Merkle tree: a hash must be {HASH_BYTES} bytes, got {len(value)}")


def _must_lead_to(found: bytes, stated: bytes, what: str) -> None:
    if found != stated:
        raise Mismatch(
            f"{what}: leads to root {found.hex()}, stated root is {stated.hex()}",
            where=what,
            own=found.hex(),
            stated=stated.hex(),
        )
