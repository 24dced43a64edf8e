"""Proofs about one run tree: that a record or the specification is in it, and that it goes on from an earlier tree."""

from __future__ import annotations

from dataclasses import dataclass

from tallystick.commit.encoding import canonical_json, parse_document
from tallystick.commit.merkle import leaf_hash, verify_consistency, verify_inclusion
from tallystick.errors import InvalidInput
from tallystick.run.documents import RECORD_LIMIT, Specification, StepRecord, check_range, record_of

STEP_PROOF_FORMAT = "tallystick/step-proof/1"
SPECIFICATION_PROOF_FORMAT = "tallystick/specification-proof/1"
EXTENSION_PROOF_FORMAT = "tallystick/extension-proof/1"
_PATH_LIMIT = 2**13  # bytes of JSON for an envelope and 63 nodes


@dataclass(frozen=True)
class StepProof:
    """A step record and its path to a run root; self-contained.

    Not promised: that no other leaf speaks of the same step; ``verify_transcript`` shows that.
    """

    record: StepRecord
    world_size: int
    tree_size: int
    path: tuple[bytes, ...]

    @property
    def index(self) -> int:
        """The record's leaf number: its place in the order of steps and ranks, after leaf 0."""
        return 1 + self.record.step * self.world_size + self.record.rank

    def encode(self) -> bytes:
        """Return the canonical JSON of the proof."""
        return canonical_json(
            {
                "format": STEP_PROOF_FORMAT,
                "index": self.index,
                "path": [node.hex() for node in self.path],
                "record": self.record.fields(),
                "tree_size": self.tree_size,
                "world_size": self.world_size,
            }
        )


@dataclass(frozen=True)
class SpecificationProof:
    """The path of leaf 0 to a run root; the specification itself travels beside it."""

    tree_size: int
    path: tuple[bytes, ...]

    def encode(self) -> bytes:
        """Return the canonical JSON of the proof."""
        return canonical_json(
            {
                "format": SPECIFICATION_PROOF_FORMAT,
                "path": [node.hex() for node in self.path],
                "tree_size": self.tree_size,
            }
        )


@dataclass(frozen=True)
class ExtensionProof:
    """That a run tree of ``tree_size`` leaves begins with the one of ``old_size`` leaves."""

    old_size: int
    tree_size: int
    path: tuple[bytes, ...]

    def encode(self) -> bytes:
        """Return the canonical JSON of the proof."""
        return canonical_json(
            {
                "format": EXTENSION_PROOF_FORMAT,
                "old_size": self.old_size,
                "path": [node.hex() for node in self.path],
                "tree_size": self.tree_size,
            }
        )


def verify_step_proof(proof: StepProof, root: bytes) -> None:
    """Return if the record lies under ``root`` at the leaf that its step and rank demand.

    Raises:
        InvalidInput: a rank beyond the world, a tree that cannot be a run's, or a malformed path.
        Mismatch: the path leads to another root.
    """
    if proof.record.rank >= proof.world_size:
        raise InvalidInput(
            f"step proof: rank {proof.record.rank} is out of range for world size {proof.world_size}"
        )
    verify_inclusion(
        leaf_hash(proof.record.leaf()), index=proof.index, size=proof.tree_size, proof=proof.path, root=root
    )


def verify_specification_proof(proof: SpecificationProof, specification: Specification, root: bytes) -> None:
    """Return if ``specification`` is leaf 0 under ``root``.

    Raises:
        InvalidInput: a malformed path.
        Mismatch: the path leads to another root.
    """
    verify_inclusion(
        leaf_hash(specification.leaf()), index=0, size=proof.tree_size, proof=proof.path, root=root
    )


def verify_extension(proof: ExtensionProof, *, old_root: bytes, root: bytes) -> None:
    """Return if the tree under ``root`` begins with the tree under ``old_root``.

    Raises:
        InvalidInput: a malformed path.
        Mismatch: the path leads to another old or new root.
    """
    verify_consistency(
        old_size=proof.old_size, size=proof.tree_size, old_root=old_root, root=root, proof=proof.path
    )


def parse_step_proof(data: bytes) -> StepProof:
    """Return the proof that ``data`` encodes; it is not verified.

    Raises:
        InvalidInput: ``data`` is not what ``StepProof.encode`` returns.
    """
    what = "step proof"
    names = ("format", "index", "path", "record", "tree_size", "world_size")
    fields = parse_document(data, STEP_PROOF_FORMAT, what=what, limit=RECORD_LIMIT + _PATH_LIMIT, names=names)
    proof = StepProof(
        record=record_of(fields.value("record"), what),
        world_size=fields.integer("world_size"),
        tree_size=fields.integer("tree_size"),
        path=fields.hashes("path"),
    )
    check_range(proof.world_size, 1, f"{what}: world_size")
    fields.constant("index", proof.index)
    return proof


def parse_specification_proof(data: bytes) -> SpecificationProof:
    """Return the proof that ``data`` encodes; it is not verified.

    Raises:
        InvalidInput: ``data`` is not what ``SpecificationProof.encode`` returns.
    """
    what = "specification proof"
    fields = parse_document(
        data, SPECIFICATION_PROOF_FORMAT, what=what, limit=_PATH_LIMIT, names=("format", "path", "tree_size")
    )
    return SpecificationProof(fields.integer("tree_size"), fields.hashes("path"))


def parse_extension_proof(data: bytes) -> ExtensionProof:
    """Return the proof that ``data`` encodes; it is not verified.

    Raises:
        InvalidInput: ``data`` is not what ``ExtensionProof.encode`` returns.
    """
    what = "extension proof"
    names = ("format", "old_size", "path", "tree_size")
    fields = parse_document(data, EXTENSION_PROOF_FORMAT, what=what, limit=_PATH_LIMIT, names=names)
    old_size = fields.integer("old_size")
    check_range(old_size, 1, f"{what}: old_size")
    return ExtensionProof(old_size, fields.integer("tree_size"), fields.hashes("path"))
