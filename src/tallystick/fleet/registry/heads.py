"""A registry's signed heads: what it answers for at one moment (spec/registry.md section 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from tallystick.commit.codec import Document
from tallystick.commit.encoding import HASH_BYTES, canonical_json, frame, parse_canonical_json
from tallystick.commit.field_rules import At, Embedded, HashText, Hex, Positive, Size, Whole
from tallystick.commit.merkle import verify_consistency
from tallystick.errors import Mismatch
from tallystick.signing.keys import PublicKey, Signer

HEAD_FORMAT = "tallystick/registry-head/1"
HEAD_TAG = "tallystick/registry-head/1"
LARGEST_HEAD = 1 << 16


@dataclass(frozen=True)
class RegistryHead(Document, form=HEAD_FORMAT, what="registry head", limit=LARGEST_HEAD):
    """What the registry answers for at one moment: a log of ``entries`` deeds and the state after them."""

    registry: HashText
    entries: Positive
    log_root: Annotated[bytes, At("log"), Hex(HASH_BYTES)]
    state_root: Annotated[bytes, At("state"), Hex(HASH_BYTES)]
    time: Whole


@dataclass(frozen=True)
class SignedHead(Document, what="registry head"):
    """A head and the registry's signature over it; in documents the list of both."""

    head: Annotated[RegistryHead, Embedded()]
    signature: Annotated[bytes, Hex(), Size(0, 256)]

    def encode(self) -> bytes:
        """Return the signed head as canonical JSON."""
        return canonical_json(self.row())


def parse_signed_head(data: bytes, *, what: str = "registry head") -> SignedHead:
    """Return the signed head whose encoding is exactly ``data``.

    Raises:
        InvalidInput: any other bytes.
    """
    return SignedHead.read_row(parse_canonical_json(data, what=what, limit=LARGEST_HEAD), what=what)


def sign_head(head: RegistryHead, signer: Signer) -> SignedHead:
    """Return ``head`` with the registry's signature."""
    return SignedHead(head, signer.sign(frame(HEAD_TAG, head.encode())))


def verify_head(signed: SignedHead, key: PublicKey) -> RegistryHead:
    """Return the head if ``key`` signed it.

    Raises:
        Mismatch: it did not.
    """
    key.verify(signed.signature, frame(HEAD_TAG, signed.head.encode()), what="registry head")
    return signed.head


def verify_extension(old: RegistryHead, new: RegistryHead, proof: Sequence[bytes]) -> None:
    """Return if the log under ``new`` begins with the one under ``old``: nothing was taken back or rewritten.

    Raises:
        Mismatch: another registry, or the proof leads elsewhere.
        InvalidInput: the new log is shorter, or the proof has another length.
    """
    if old.registry != new.registry:
        raise Mismatch(f"registry: {new.registry[:16]}.. is not {old.registry[:16]}..")
    verify_consistency(
        old_size=old.entries, size=new.entries, old_root=old.log_root, root=new.log_root, proof=proof
    )
