"""The one envelope of signed documents, DSSE 1.0; and in-toto Statements v1 in it (spec/attestation.md).

    envelope = sign_payload("application/vnd.tallystick.work-order+json", order.encode(), [key])
    data = sign_statement(Statement(subject, predicate_type, predicate), key)
    envelope = parse_envelope(data)
    statement = envelope.open([public_key])        # verified, then parsed; in this order

What is signed is the payload's bytes and their type, never a value that was written again. Fields that this
version does not know are ignored, as in-toto asks, so nothing may be granted because a field is absent.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from tallystick.commit.encoding import Fields, canonical_json, parse_json
from tallystick.errors import InvalidInput, Mismatch
from tallystick.signing.keys import PublicKey, Signer
from tallystick.signing.note import decode_base64

PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
ENVELOPE_LIMIT = 1 << 24  # bytes
PAYLOAD_LIMIT = 1 << 23
_SIGNATURES = 16


def pre_authentication_encoding(payload_type: str, payload: bytes) -> bytes:
    """Return the bytes that a DSSE signature is over."""
    kind = payload_type.encode("utf-8")
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)


@dataclass(frozen=True)
class Subject:
    """What a statement is about: a name, and digests by algorithm (lower-case hexadecimal)."""

    name: str
    digest: Mapping[str, str]


@dataclass(frozen=True)
class Statement:
    """An in-toto statement: its subjects, and a predicate of the type named."""

    subject: tuple[Subject, ...]
    predicate_type: str
    predicate: Mapping[str, object]

    def encode(self) -> bytes:
        """Return the canonical JSON of the statement."""
        return canonical_json(
            {
                "_type": STATEMENT_TYPE,
                "predicate": dict(self.predicate),
                "predicateType": self.predicate_type,
                "subject": [{"digest": dict(s.digest), "name": s.name} for s in self.subject],
            }
        )

    def digest_of(self, name: str, algorithm: str) -> str | None:
        """Return the digest of the subject ``name``, or None; two of that name are as good as none."""
        found = [subject.digest.get(algorithm) for subject in self.subject if subject.name == name]
        return found[0] if len(found) == 1 else None


@dataclass(frozen=True)
class Envelope:
    """A DSSE envelope: the payload's bytes and, for each signature, the key id it names and the signature."""

    payload_type: str
    payload: bytes
    signatures: tuple[tuple[str, bytes], ...]

    def encode(self) -> bytes:
        """Return the canonical JSON of the envelope."""
        return canonical_json(self.fields())

    def fields(self) -> dict[str, object]:
        """Return the envelope as a JSON object."""
        return {
            "payload": base64.b64encode(self.payload).decode(),
            "payloadType": self.payload_type,
            "signatures": [
                {"keyid": key_id, "sig": base64.b64encode(signature).decode()}
                for key_id, signature in self.signatures
            ],
        }

    def signers(self, keys: Sequence[PublicKey]) -> list[PublicKey]:
        """Return which of ``keys`` signed, in their order; key ids in the envelope are hints and decide nothing."""
        message = pre_authentication_encoding(self.payload_type, self.payload)
        return [
            key for key in keys if any(key.is_signed(signature, message) for _, signature in self.signatures)
        ]

    def payload_of(self, payload_type: str, *, what: str) -> bytes:
        """Return the payload, whoever signed it.

        Raises:
            InvalidInput: it is of another type than ``payload_type``.
        """
        if self.payload_type != payload_type:
            raise InvalidInput(f"{what}: payloadType must be {payload_type}, is {self.payload_type[:80]!a}")
        return self.payload

    def open(self, keys: Sequence[PublicKey], *, what: str = "statement") -> Statement:
        """Return the statement inside, if one of ``keys`` signed it.

        Raises:
            Mismatch: none did.
            InvalidInput: the payload is of another type, or no statement.
        """
        if not self.signers(keys):
            named = ", ".join(key_id[:16] for key_id, _ in self.signatures)
            raise Mismatch(f"{what}: is not signed by any of the {len(keys)} keys given (it names {named})")
        return self.statement(what=what)

    def statement(self, *, what: str = "statement") -> Statement:
        """Return the statement inside, whoever signed it.

        Raises:
            InvalidInput: the payload is of another type, or no statement.
        """
        return parse_statement(self.payload_of(PAYLOAD_TYPE, what=what), what=what)


def sign_payload(payload_type: str, payload: bytes, signers: Iterable[Signer]) -> Envelope:
    """Return ``payload`` in an envelope, signed by each of ``signers``."""
    message = pre_authentication_encoding(payload_type, payload)
    signed = tuple((signer.public_key.key_id, signer.sign(message)) for signer in signers)
    return Envelope(payload_type, payload, signed)


def sign_statement(statement: Statement, signer: Signer) -> bytes:
    """Return the envelope of ``statement``, signed by ``signer``, as canonical JSON."""
    return sign_payload(PAYLOAD_TYPE, statement.encode(), [signer]).encode()


def parse_envelope(data: bytes, *, what: str = "envelope", limit: int = PAYLOAD_LIMIT) -> Envelope:
    """Return the envelope in the JSON ``data``, in any spelling; nothing is verified.

    ``limit`` is the most bytes of a payload; the envelope may have twice as many.

    Raises:
        InvalidInput: not JSON, a field too few or too many, no signature or more than 16, or malformed base64.
    """
    return envelope_of(parse_json(data, what=what, limit=2 * limit), what=what, limit=limit)


def envelope_of(value: object, *, what: str, limit: int = PAYLOAD_LIMIT) -> Envelope:
    """Return the envelope that a JSON object is.

    Raises:
        InvalidInput: as for ``parse_envelope``.
    """
    fields = Fields(value, what=what, names=("payload", "payloadType", "signatures"))
    payload = decode_base64(fields.text("payload"), what=f"{what}: payload")
    if len(payload) > limit:
        raise InvalidInput(f"{what}: a payload of {len(payload)} bytes exceeds the limit of {limit}")
    lines = fields.items("signatures")
    if not 1 <= len(lines) <= _SIGNATURES:
        raise InvalidInput(f"{what}: must have 1 to {_SIGNATURES} signatures, has {len(lines)}")
    return Envelope(fields.text("payloadType"), payload, tuple(_signature(line, what) for line in lines))


def parse_statement(data: bytes, *, what: str = "statement") -> Statement:
    """Return the statement in the JSON ``data``; unknown fields beside the four are ignored.

    Raises:
        InvalidInput: not JSON, another type, no subject, a subject without a digest, or a field of another type.
    """
    value = parse_json(data, what=what, limit=PAYLOAD_LIMIT)
    known = known_fields(value, ("_type", "predicate", "predicateType", "subject"), what=what)
    known.constant("_type", STATEMENT_TYPE)
    subject = tuple(_subject(item, what) for item in known.items("subject"))
    if not subject:
        raise InvalidInput(f"{what}: has no subject")
    return Statement(subject, known.text("predicateType"), known.mapping("predicate"))


def known_fields(value: object, names: Sequence[str], *, what: str, optional: Sequence[str] = ()) -> Fields:
    """Return the object's fields ``names`` and, where there, ``optional`` (else null); others are ignored.

    Raises:
        InvalidInput: no object, or one of ``names`` is missing.
    """
    if not isinstance(value, dict):
        raise InvalidInput(f"{what}: must be an object, is a {type(value).__name__}")
    held = cast("dict[str, object]", value)
    kept = {name: held[name] for name in names if name in held}
    return Fields(
        {**kept, **{name: held.get(name) for name in optional}}, what=what, names=(*names, *optional)
    )


def _signature(value: object, what: str) -> tuple[str, bytes]:
    fields = known_fields(value, ("sig",), what=f"{what}: signature", optional=("keyid",))
    key_id = fields.optional_text("keyid") or ""
    return key_id, decode_base64(fields.text("sig"), what=f"{what}: signature")


def _subject(value: object, what: str) -> Subject:
    fields = known_fields(value, ("digest",), what=f"{what}: subject", optional=("name",))
    digest = fields.text_mapping("digest")
    if not digest:
        raise InvalidInput(f"{what}: a subject has no digest")
    return Subject(fields.optional_text("name") or "", digest)
