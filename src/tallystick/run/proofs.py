"""Proofs about one run tree: that a record or the specification is in it, and that it goes on from an earlier tree."""

from __future__ import annotations

from dataclasses import dataclass

from tallystick.commit.codec import Document
from tallystick.commit.field_rules import Hash, Positive
from tallystick.commit.merkle import leaf_hash, verify_consistency, verify_inclusion
from tallystick.errors import InvalidInput
from tallystick.run.documents import RECORD_LIMIT, Specification, StepRecord

STEP_PROOF_FORMAT = "tallystick/step-proof/1"
SPECIFICATION_PROOF_FORMAT = "tallystick/specification-proof/1"
EXTENSION_PROOF_FORMAT = "tallystick/extension-proof/1"
_PATH_LIMIT = 2**13  # bytes of JSON for an envelope and 63 nodes


@dataclass(frozen=True)
class StepProof(
    Document, form=STEP_PROOF_FORMAT, what="step proof", limit=RECORD_LIMIT + _PATH_LIMIT, implied=("index",)
):
    """A step record and its path to a run root; self-contained.

    Not promised: that no other leaf speaks of the same step; ``verify_transcript`` shows that.
    """

    record: StepRecord
    world_size: Positive
    tree_size: int
    path: tuple[Hash, ...]

    @property
    def index(self) -> int:
        """The record's leaf number: its place in the order of steps and ranks, after leaf 0."""
        return 1 + self.record.step * self.world_size + self.record.rank


@dataclass(frozen=True)
class SpecificationProof(
    Document, form=SPECIFICATION_PROOF_FORMAT, what="specification proof", limit=_PATH_LIMIT
):
    """The path of leaf 0 to a run root; the specification itself travels beside it."""

    tree_size: int
    path: tuple[Hash, ...]


@dataclass(frozen=True)
class ExtensionProof(Document, form=EXTENSION_PROOF_FORMAT, what="extension proof", limit=_PATH_LIMIT):
    """That a run tree of ``tree_size`` leaves begins with the one of ``old_size`` leaves."""

    old_size: Positive
    tree_size: int
    path: tuple[Hash, ...]


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


parse_step_proof = StepProof.parse
parse_specification_proof = SpecificationProof.parse
parse_extension_proof = ExtensionProof.parse
