"""A committed map from keys to values: one root, and short proofs of what a key has or that it has nothing.

Format: spec/registry.md section 5. A key's hash says in which of 2**depth buckets it lies, a bucket is a leaf with all
its keys in ascending order, and the leaves form the Merkle tree of ``commit.merkle``. So there is one
place in the whole map where a key can stand: a proof that shows a bucket shows the only value of its keys,
and the absence of all others. That is what makes "owned once" provable.

    root = map_root(depth, size, merkle_root)
    verify_lookup(proof, b"chip/01ab", root)  ->  the value, or None: no such key
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from tallystick.commit.encoding import HASH_BYTES, Fields, canonical_json, digest, frame, parse_hex
from tallystick.commit.merkle import leaf_hash, verify_inclusion
from tallystick.errors import InvalidInput, Mismatch

MAP_TAG = "tallystick/map/1"
KEY_TAG = "tallystick/map-key/1"
BUCKET_TAG = "tallystick/map-bucket/1"
PREFIX_BITS = 32
PER_BUCKET = 8  # entries on average where a level is added
MOST_IN_BUCKET = 4096  # entries a reader accepts; 8 are expected, and chosen keys cost a search each
LARGEST_PART = 1 << 20  # bytes of one key or value

Item = tuple[bytes, bytes]
_KEY_HEAD = frame(KEY_TAG)  # the frame's tag; a single part follows
_BUCKET_HEAD = frame(BUCKET_TAG)


def prefix_of(key: bytes) -> int:
    """Return the first 32 bits of the key's tagged hash; its leading ``depth`` bits are its bucket."""
    hashed = hashlib.sha256(_KEY_HEAD + len(key).to_bytes(8, "little") + key).digest()
    return int.from_bytes(hashed[:4], "big")


def depth_for(size: int) -> int:
    """Return the depth of a map of ``size`` entries: the least whose buckets hold 8 on average, at most 32."""
    depth = 0
    while size > PER_BUCKET << depth and depth < PREFIX_BITS:
        depth += 1
    return depth


def bucket_leaf(items: Sequence[Item]) -> bytes:
    """Return the leaf hash of a bucket whose items are in ascending order of their keys."""
    parts = [_BUCKET_HEAD]
    for key, value in items:
        parts += [len(key).to_bytes(8, "little"), key, len(value).to_bytes(8, "little"), value]
    return leaf_hash(b"".join(parts))


def map_root(depth: int, size: int, merkle_root: bytes) -> bytes:
    """Return the map's root, which fixes its depth and its number of entries too."""
    return digest(MAP_TAG, bytes([depth]), size.to_bytes(8, "little"), merkle_root)


@dataclass(frozen=True)
class MapProof:
    """One bucket, its path, and what the root is made of."""

    depth: int
    size: int
    merkle_root: bytes
    bucket: int
    items: tuple[Item, ...]
    path: tuple[bytes, ...]

    def fields(self) -> dict[str, object]:
        """Return the proof as it stands in documents."""
        return {
            "depth": self.depth,
            "size": self.size,
            "root": self.merkle_root.hex(),
            "bucket": self.bucket,
            "items": [[key.hex(), value.hex()] for key, value in self.items],
            "path": [node.hex() for node in self.path],
        }


def parse_map_proof(value: object, *, what: str) -> MapProof:
    """Return the proof that ``MapProof.fields`` writes.

    Raises:
        InvalidInput: another form, or more entries than a bucket may have.
    """
    fields = Fields(value, what=what, names=("depth", "size", "root", "bucket", "items", "path"))
    items = fields.items("items")
    if len(items) > MOST_IN_BUCKET:
        raise InvalidInput(f"{what}: {len(items)} entries in a bucket exceed the limit of {MOST_IN_BUCKET}")
    depth, size = fields.integer("depth"), fields.integer("size")
    if not 0 <= depth <= PREFIX_BITS or size < 0:
        raise InvalidInput(
            f"{what}: depth {depth} must lie in [0, {PREFIX_BITS}], size {size} not be negative"
        )
    return MapProof(
        depth,
        size,
        parse_hex(fields.text("root"), n_bytes=HASH_BYTES, what=f"{what}: root"),
        fields.integer("bucket"),
        tuple(_item(item, what) for item in items),
        fields.hashes("path"),
    )


def verify_lookup(proof: MapProof, key: bytes, root: bytes) -> bytes | None:
    """Return the one value of ``key`` in the map under ``root``, or None if it has none.

    Raises:
        Mismatch: the proof leads to another root.
        InvalidInput: it shows another bucket, or entries out of order or of other buckets.
    """
    if proof.depth != depth_for(proof.size):
        raise InvalidInput(
            f"map proof: depth {proof.depth}, {proof.size} entries have {depth_for(proof.size)}"
        )
    if (stated := map_root(proof.depth, proof.size, proof.merkle_root)) != root:
        raise Mismatch(
            f"map proof: leads to root {stated.hex()}, the head states {root.hex()}",
            where="map proof",
            own=stated.hex(),
            stated=root.hex(),
        )
    bucket = prefix_of(key) >> (PREFIX_BITS - proof.depth)
    if proof.bucket != bucket:
        raise InvalidInput(f"map proof: shows bucket {proof.bucket}, the key lies in {bucket}")
    keys = [entry for entry, _ in proof.items]
    if any(first >= second for first, second in pairwise(keys)):
        raise InvalidInput("map proof: keys must be in ascending order, none twice")
    for entry in keys:
        if prefix_of(entry) >> (PREFIX_BITS - proof.depth) != bucket:
            raise InvalidInput(f"map proof: bucket {bucket} holds a key of another bucket")
    verify_inclusion(
        bucket_leaf(proof.items),
        index=bucket,
        size=1 << proof.depth,
        proof=proof.path,
        root=proof.merkle_root,
    )
    return dict(proof.items).get(key)


def encode_map_proof(proof: MapProof) -> bytes:
    """Return the proof as canonical JSON."""
    return canonical_json(proof.fields())


def _item(value: object, what: str) -> Item:
    match value:
        case [str(key), str(content)] if len(key) <= 2 * LARGEST_PART and len(content) <= 2 * LARGEST_PART:
            return (
                parse_hex(key, n_bytes=len(key) // 2, what=f"{what}: key"),
                parse_hex(content, n_bytes=len(content) // 2, what=f"{what}: value"),
            )
        case _:
            raise InvalidInput(f"{what}: an entry must be [key, value] in hexadecimal")
