"""How a TPM's attestation key becomes known: under the certificate of the TPM's endorsement key (spec/chip-log.md 7.1).

    request   the owner: certificates of the endorsement key (EK), public area of the attestation key (AK)
    challenge the enroller, who pins makers' roots: a secret that only the TPM with that EK reads, while it holds that AK
    answer    the owner: what the TPM gave back, hashed with the request
    enrolment the enroller's signed statement: this AK is in the TPM of this EK certificate

Whoever trusts the enroller's key takes the AK from the statement, instead of knowing it beforehand. An EK never signs, so this
exchange is the only way to tie an AK to it. Pure; ``tallystick.integrations.tpm`` asks the TPM.

Not shown: where the TPM is, that it sits in the machine that runs the agent, or that its maker keeps keys well.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from cryptography import x509
from cryptography.x509.oid import ExtensionOID

from tallystick.commit.codec import Document
from tallystick.commit.encoding import HASH_BYTES, digest, kind_of, parse_hex
from tallystick.commit.field_rules import At, Hash, Hex, Secret, Size, Via, hexed
from tallystick.errors import InvalidInput, Mismatch
from tallystick.fleet.attestation.certificates import (
    CHAIN_LIMIT,
    LATEST,
    UNDERSTOOD,
    Certificate,
    encode_chain,
    parse_chain,
    strictly,
    verify_chain,
)
from tallystick.fleet.attestation.credential import SECRET_BYTES, Credential, make_credential
from tallystick.fleet.attestation.tpm import TpmEvidence, TpmPublic, parse_tpm_public
from tallystick.fleet.attestation.tpm_verification import must_attest
from tallystick.signing.dsse import Statement, Subject, known_fields
from tallystick.signing.keys import PublicKey

REQUEST_FORMAT = "tallystick/tpm-enrolment-request/1"
CHALLENGE_FORMAT = "tallystick/tpm-challenge/1"
ANSWER_FORMAT = "tallystick/tpm-answer/1"
KEPT_FORMAT = "tallystick/tpm-challenge-kept/1"
REQUEST_TAG, ANSWER_TAG = "tallystick/tpm-enrolment-request/1", "tallystick/tpm-answer/1"
ENROLMENT_TYPE = "https://tallystick/tpm-enrolment/v0.1"
NAME_DIGEST = "tallystickTpmName"
DOCUMENT_LIMIT = 2 * CHAIN_LIMIT
LARGEST_PART = 512  # bytes of a credential or a public area

EK_USE = x509.ObjectIdentifier("2.23.133.8.1")  # tcg-kp-EKCertificate
MANUFACTURER, MODEL, VERSION = (x509.ObjectIdentifier(f"2.23.133.2.{at}") for at in (1, 2, 3))
EK_UNDERSTOOD = UNDERSTOOD | {ExtensionOID.SUBJECT_ALTERNATIVE_NAME, ExtensionOID.EXTENDED_KEY_USAGE}
_MANUFACTURER = re.compile(r"id:[0-9A-F]{8}", re.ASCII)
WHAT = "endorsement key"


@dataclass(frozen=True)
class TpmIdentity:
    """Which TPM an EK certificate is of: its maker (four letters in hexadecimal after ``id:``), model and firmware version."""

    manufacturer: str
    model: str
    version: str

    def __str__(self) -> str:
        letters = bytes.fromhex(self.manufacturer[3:]).rstrip(b"\0 ")
        name = letters.decode("ascii") if letters.isascii() and letters.decode("ascii").isprintable() else ""
        return f"{name or self.manufacturer} {self.model} {self.version}"


def _pem(chain: tuple[Certificate, ...]) -> str:
    return encode_chain(chain).decode("ascii")


def _read_pem(value: object, what: str) -> tuple[Certificate, ...]:
    if not isinstance(value, str) or not value.isascii():
        raise InvalidInput(f"{what} must be PEM, is {kind_of(value)}")
    chain = parse_chain(value.encode("ascii"), what=what, understood=EK_UNDERSTOOD)
    if _pem(chain) != value:
        raise InvalidInput(f"{what}: certificates must be PEM with one newline at the end")
    return chain


_KEY = hexed(parse_tpm_public, most=LARGEST_PART)
PublicArea = Annotated[TpmPublic, _KEY]


@dataclass(frozen=True)
class EnrolmentRequest(Document, form=REQUEST_FORMAT, what="enrolment request", limit=DOCUMENT_LIMIT):
    """What an owner asks to be enrolled: an attestation key, and the certificates of its TPM's endorsement key, leaf first."""

    attestation_key: PublicArea
    certificates: Annotated[tuple[Certificate, ...], At("endorsement"), Via(_pem, _read_pem)]

    def digest(self) -> bytes:
        """Return the 32 bytes that name the request."""
        return digest(REQUEST_TAG, self.encode())


@dataclass(frozen=True)
class Challenge(Document, form=CHALLENGE_FORMAT, what="TPM challenge", limit=DOCUMENT_LIMIT):
    """A secret for the TPM of the request with digest ``request``: a credential and the seed that unwraps it."""

    request: Hash
    blob: Annotated[bytes, At("credential"), Hex(), Size(0, LARGEST_PART)]
    seed: Annotated[bytes, Hex(), Size(0, LARGEST_PART)]

    @property
    def credential(self) -> Credential:
        """What the TPM takes."""
        return Credential(self.blob, self.seed)


@dataclass(frozen=True)
class TpmAnswer(Document, form=ANSWER_FORMAT, what="TPM answer", limit=DOCUMENT_LIMIT):
    """What shows that the TPM read the secret; it does not show the secret."""

    answer: Hash


@dataclass(frozen=True)
class KeptChallenge(Document, form=KEPT_FORMAT, what="kept challenge", limit=DOCUMENT_LIMIT):
    """What the enroller keeps to itself until the answer comes: the secret, and for which request it was."""

    request: Hash
    secret: Secret = field(repr=False)


@dataclass(frozen=True)
class Enrolment:
    """What an enroller stated: this attestation key is in the TPM that this EK certificate is of.

    Attributes:
        attestation_key: with its attributes.
        certificate: SHA-256 of the EK certificate, hexadecimal.
        tpm: which TPM, as its maker wrote into the certificate.
        root: SHA-256 of the root certificate that was pinned, hexadecimal.
        at: when certificates were held to be valid, in seconds since 1970.
        revocation: ``checked`` for every certificate, or ``not checked``.
        enroller: key id of whoever signed.
    """

    attestation_key: TpmPublic
    certificate: str
    tpm: TpmIdentity
    root: str
    at: int
    revocation: str
    enroller: str

    def statement(self) -> Statement:
        """Return the statement to be signed by the enroller."""
        subject = Subject("attestation-key", {NAME_DIGEST: self.attestation_key.name().hex()})
        predicate = {
            "at": self.at,
            "attestationKey": self.attestation_key.encode().hex(),
            "endorsementCertificate": self.certificate,
            "enroller": self.enroller,
            "manufacturer": self.tpm.manufacturer,
            "model": self.tpm.model,
            "revocation": self.revocation,
            "root": self.root,
            "version": self.tpm.version,
        }
        return Statement((subject,), ENROLMENT_TYPE, predicate)

    def fields(self) -> dict[str, object]:
        """Return the enrolment as JSON."""
        return {**self.statement().predicate, "attestationKey": self.attestation_key.key().key_id}


def read_identity(certificate: Certificate) -> TpmIdentity:
    """Return which TPM an EK certificate names; it must be one (TCG EK Credential Profile).

    Raises:
        Mismatch: it is not meant for endorsement keys, or does not name maker, model and version, each once.
        InvalidInput: an extension is malformed.
    """
    names: list[x509.Name] = []
    uses: tuple[x509.ObjectIdentifier, ...] = ()
    with strictly(f"{WHAT}: certificate: malformed"):
        for extension in x509.load_der_x509_certificate(certificate.der).extensions:
            if isinstance(extension.value, x509.SubjectAlternativeName):
                names = extension.value.get_values_for_type(x509.DirectoryName)
            elif isinstance(extension.value, x509.ExtendedKeyUsage):
                uses = tuple(extension.value)
    if EK_USE not in uses:
        shown = ", ".join(use.dotted_string for use in uses) or "nothing"
        raise Mismatch(f"{WHAT}: its certificate is for {shown}, must be for {EK_USE.dotted_string}")
    texts: list[str] = []
    for wanted in (MANUFACTURER, MODEL, VERSION):
        values = [str(each.value) for name in names for each in name.get_attributes_for_oid(wanted)]
        if len(values) != 1 or not 1 <= len(values[0]) <= 100 or not values[0].isprintable():
            raise Mismatch(
                f"{WHAT}: its certificate must name {wanted.dotted_string} of the TPM once, names it {len(values)} times"
            )
        texts.append(values[0])
    if not _MANUFACTURER.fullmatch(texts[0]):
        raise Mismatch(f"{WHAT}: the TPM's maker must be id: and eight digits, is {ascii(texts[0])[:40]}")
    return TpmIdentity(*texts)


def verify_request(
    request: EnrolmentRequest, roots: Sequence[Certificate], *, at: int
) -> tuple[TpmIdentity, Certificate]:
    """Return which TPM the request is of, and the root under which its EK certificate holds at second ``at``.

    Raises:
        Mismatch: a link of the chain does not hold, no root fits, the certificate is of no EK, or the key is no AK.
        InvalidInput: an extension is malformed.
    """
    must_attest(request.attestation_key, what=f"{WHAT}: attestation key")
    problems: list[str] = []
    for root in roots:
        try:
            verify_chain(request.certificates, root, at=at, what=WHAT, leaf="agrees keys")
        except Mismatch as problem:
            problems.append(str(problem))
            continue
        return read_identity(request.certificates[0]), root
    raise Mismatch(problems[0] if len(problems) == 1 else f"{WHAT}: holds under none of {len(roots)} roots")


def challenge_request(
    request: EnrolmentRequest, *, secret: bytes | None = None
) -> tuple[Challenge, KeptChallenge]:
    """Return a challenge for the TPM of ``request``, which ``verify_request`` accepted, and what to keep until the answer.

    ``secret`` is for tests alone; by default it is fresh.

    Raises:
        InvalidInput: the endorsement key is not on P-256.
    """
    hidden = secrets.token_bytes(SECRET_BYTES) if secret is None else secret
    credential = make_credential(request.certificates[0].key, request.attestation_key.name(), hidden)
    asked = request.digest()
    return Challenge(asked, credential.blob, credential.seed), KeptChallenge(asked, hidden)


def answer_to(request: bytes, secret: bytes) -> bytes:
    """Return the answer of whoever read ``secret`` for the request with that digest; it does not show the secret."""
    return digest(ANSWER_TAG, request, secret)


def enrol(
    request: EnrolmentRequest,
    answer: bytes,
    kept: KeptChallenge,
    roots: Sequence[Certificate],
    *,
    at: int,
    revocation: str,
    enroller: str,
) -> Enrolment:
    """Return the enrolment of the request's attestation key, to be signed.

    Raises:
        Mismatch: another request, an answer without the secret, or as ``verify_request``.
    """
    if kept.request != request.digest():
        raise Mismatch(
            f"enrolment: the challenge was for request {kept.request.hex()[:16]}.., this is {request.digest().hex()[:16]}.."
        )
    if not hmac.compare_digest(answer, answer_to(kept.request, kept.secret)):
        raise Mismatch(
            "enrolment: the answer is not that of the TPM with this endorsement key and this attestation key"
        )
    tpm, root = verify_request(request, roots, at=at)
    return Enrolment(
        request.attestation_key, fingerprint(request.certificates[0]), tpm, fingerprint(root), at, revocation, enroller
    )  # fmt: skip


def enrolled_key(enrolment: Enrolment, evidence: TpmEvidence) -> PublicKey:
    """Return the attestation key of ``evidence`` as one that the enroller vouches for, attributes and all.

    Raises:
        Mismatch: another attestation key was enrolled.
    """
    shown, known = evidence.attestation_key, enrolment.attestation_key
    if shown != known:
        raise Mismatch(
            f"enrolment: is of attestation key {known.name().hex()[:16]}.., the evidence is signed by {shown.name().hex()[:16]}.."
        )
    return known.key()


def fingerprint(certificate: Certificate) -> str:
    """Return the SHA-256 of a certificate in DER, hexadecimal: what other tools call its fingerprint."""
    return hashlib.sha256(certificate.der).hexdigest()


def read_enrolment(statement: Statement, signer: str, *, what: str = "enrolment") -> Enrolment:
    """Return the enrolment that a statement makes; that key ``signer`` signed it is for the caller to know.

    Raises:
        InvalidInput: another predicate, a field missing or malformed, or another enroller or key than it says itself.
    """
    if statement.predicate_type != ENROLMENT_TYPE:
        raise InvalidInput(
            f"{what}: predicateType must be {ENROLMENT_TYPE}, is {statement.predicate_type[:80]!a}"
        )
    names = (
        "at", "attestationKey", "endorsementCertificate", "enroller", "manufacturer", "model", "revocation", "root", "version",
    )  # fmt: skip
    fields = known_fields(statement.predicate, names, what=what)
    public = _KEY.read(fields.value("attestationKey"), f"{what}: attestation key")
    certificate, root = (
        parse_hex(fields.text(name), n_bytes=HASH_BYTES, what=f"{what}: {name}").hex()
        for name in ("endorsementCertificate", "root")
    )
    texts = [fields.text(name) for name in ("manufacturer", "model", "version")]
    if not _MANUFACTURER.fullmatch(texts[0]) or not all(
        1 <= len(t) <= 100 and t.isprintable() for t in texts
    ):
        raise InvalidInput(
            f"{what}: maker, model and version of the TPM must be printable, the maker id: and eight digits"
        )
    revocation, at = fields.text("revocation"), fields.integer("at")
    if revocation not in ("checked", "not checked") or not 0 <= at <= LATEST:
        raise InvalidInput(f"{what}: revocation must be checked or not checked, at a second up to {LATEST}")
    if fields.text("enroller") != signer:
        raise InvalidInput(
            f"{what}: names enroller {fields.text('enroller')[:16]!a}, signed has {signer[:16]}"
        )
    if statement.digest_of("attestation-key", NAME_DIGEST) != public.name().hex():
        raise InvalidInput(f"{what}: its subject is not its attestation key")
    return Enrolment(public, certificate, TpmIdentity(*texts), root, at, revocation, signer)
