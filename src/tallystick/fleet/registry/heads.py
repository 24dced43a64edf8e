"""A registry's signed heads: what it answers for at one moment (spec/registry.md section 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from tallystick.commit.codec import Document
from tallystick.commit.encoding import HASH_BYTES, parse_canonical_json
from tallystick.commit.field_rules import At, HashText, Hex, Positive, Whole
from tallystick.commit.merkle import verify_consistency
from tallystick.errors import InvalidInput, Mismatch
from tallystick.signing.dsse import Envelope, envelope_of, sign_payload
from tallystick.signing.keys import PublicKey, Signer

HEAD_FORMAT = "tallystick/registry-head/1"
HEAD_TYPE = "application/vnd.tallystick.registry-head+json"
LARGEST_HEAD = 1 << 16


@dataclass(frozen=True)
class RegistryHead(Document, form=HEAD_FORMAT, what="registry head", limit=LARGEST_HEAD):
    """What the registry answers for at one moment: a log of ``entries`` events and the state after them."""

    registry: HashText
    entries: Positive
    log_root: Annotated[bytes, At("log"), Hex(HASH_BYTES)]
    state_root: Annotated[bytes, At("state"), Hex(HASH_BYTES)]
    time: Whole


@dataclass(frozen=True)
class SignedHead:
    """A head and the registry's signature over it: a DSSE envelope with the head as payload."""

    head: RegistryHead
    key_id: str
    signature: bytes

    def envelope(self) -> Envelope:
        """Return the envelope."""
        return Envelope(HEAD_TYPE, self.head.encode(), ((self.key_id, self.signature),))

    def encode(self) -> bytes:
        """Return the signed head as canonical JSON."""
        return self.envelope().encode()

    def fields(self) -> dict[str, object]:
        """Return the signed head as a JSON object, as it stands in other documents."""
        return self.envelope().fields()

    @staticmethod
    def read(value: object, what: str) -> SignedHead:
        """Return the signed head that a JSON object says.

        Raises:
            InvalidInput: no envelope of a head with one signature, or not as ``fields`` writes it.
        """
        envelope = envelope_of(value, what=what, limit=LARGEST_HEAD)
        head = RegistryHead.parse(envelope.payload_of(HEAD_TYPE, what=what), what=what)
        if len(envelope.signatures) != 1 or envelope.fields() != value:
            raise InvalidInput(f"{what}: must have one signature, with keyid and sig and nothing else")
        return SignedHead(head, *envelope.signatures[0])


def parse_signed_head(data: bytes, *, what: str = "registry head") -> SignedHead:
    """Return the signed head whose encoding is exactly ``data``.

    Raises:
        InvalidInput: any other bytes.
    """
    return SignedHead.read(parse_canonical_json(data, what=what, limit=2 * LARGEST_HEAD), what)


def sign_head(head: RegistryHead, signer: Signer) -> SignedHead:
    """Return ``head`` with the registry's signature."""
    return SignedHead(head, *sign_payload(HEAD_TYPE, head.encode(), [signer]).signatures[0])


def verify_head(signed: SignedHead, key: PublicKey) -> RegistryHead:
    """Return the head if ``key`` signed it.

    Raises:
        Mismatch: it did not.
    """
    if key not in signed.envelope().signers([key]):
        raise Mismatch(f"registry head: the signature is not of key {key.key_id[:16]}.. ({key.algorithm})")
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
