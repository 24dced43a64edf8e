"""Chains of X.509 certificates to a root that the reader pins, checked offline (spec/chip-log.md 8).

    chain = parse_chain(pem)                     # leaf first
    verify_chain(chain, root, at=now)

RFC 5280 as far as devices need it: elliptic-curve keys and signatures, names that follow each other, periods, basic
constraints, key usage; a critical extension beyond those is refused. Revocation is for ``revocation``, with lists
that the reader has as files. Not looked at: policies and name constraints. Curve and DER work is the library's.
"""

from __future__ import annotations

import datetime
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from cryptography import x509
from cryptography.exceptions import InternalError, InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.utils import CryptographyDeprecationWarning
from cryptography.x509.oid import ExtensionOID, NameOID, SignatureAlgorithmOID

from tallystick.errors import InvalidInput, Mismatch
from tallystick.signing.keys import PublicKey, parse_public_key

CHAIN_LIMIT = 1 << 16  # bytes of PEM; a device's five certificates have about 5000
LONGEST_CHAIN = 10
SIGNATURES = (SignatureAlgorithmOID.ECDSA_WITH_SHA256, SignatureAlgorithmOID.ECDSA_WITH_SHA384)
UNDERSTOOD = frozenset({ExtensionOID.BASIC_CONSTRAINTS, ExtensionOID.KEY_USAGE})
REFUSALS = (
    ValueError, TypeError, OverflowError, UnsupportedAlgorithm, InternalError, CryptographyDeprecationWarning,
    x509.InvalidVersion, x509.DuplicateExtension, x509.UnsupportedGeneralNameType,
)  # fmt: skip
LeafUse = Literal["signs data", "agrees keys"]
OLDEST, LATEST = 0, 253402300799  # seconds: 1970 to the end of 9999, "no end" in RFC 5280 4.1.2.5


@dataclass(frozen=True)
class Certificate:
    """What a certificate says; nothing of it is verified until ``verify_chain``.

    Attributes:
        der: its bytes.
        key: the key it is about.
        subject: its name in RFC 4514's form.
        common_name, serial: of the subject, or empty.
        starts, ends: its period, in seconds since 1970.
        is_ca: whether it may sign others, and under how many (None for any number).
        signs_certificates, signs_lists, signs_data, agrees_keys: its key usage, as far as devices need it.
        extensions: the values of all extensions in DER, by dotted identifier.
    """

    der: bytes
    key: PublicKey
    subject: str
    common_name: str
    serial: str
    starts: int
    ends: int
    is_ca: bool
    signs_certificates: bool
    signs_lists: bool
    signs_data: bool
    agrees_keys: bool
    depth: int | None
    extensions: tuple[tuple[str, bytes], ...]

    def pem(self) -> bytes:
        """Return the certificate as PEM."""
        return x509.load_der_x509_certificate(self.der).public_bytes(Encoding.PEM)


def parse_chain(
    data: bytes, *, what: str = "certificates", understood: frozenset[x509.ObjectIdentifier] = UNDERSTOOD
) -> tuple[Certificate, ...]:
    """Return the certificates in PEM ``data``, in their order; nothing may stand between them.

    ``understood`` are the critical extensions that the caller reads itself, besides those read here.

    Raises:
        InvalidInput: too long or too many, malformed, another spelling of the same PEM, a key or signature that is not
            on P-256 or P-384, or a critical extension that is not understood.
    """
    if len(data) > CHAIN_LIMIT:
        raise InvalidInput(f"{what}: {len(data)} bytes exceed the limit of {CHAIN_LIMIT}")
    with strictly(f"{what}: are no certificates in PEM"):
        found = x509.load_pem_x509_certificates(data)
    if len(found) > LONGEST_CHAIN:
        raise InvalidInput(f"{what}: {len(found)} certificates, {LONGEST_CHAIN} at most can be a chain")
    whole = b"".join(certificate.public_bytes(Encoding.PEM) for certificate in found)
    if whole.rstrip(b"\n") != data.rstrip(b"\n"):  # files end with a newline or without
        raise InvalidInput(f"{what}: are not the one PEM spelling of these certificates")
    return tuple(
        _read(certificate, f"{what}: certificate {at}", understood) for at, certificate in enumerate(found)
    )


def encode_chain(chain: tuple[Certificate, ...]) -> bytes:
    """Return the chain as PEM."""
    return b"".join(certificate.pem() for certificate in chain)


def parse_root(data: bytes, *, what: str = "root") -> Certificate:
    """Return the one certificate in PEM ``data``: what a reader pins.

    Raises:
        InvalidInput: malformed, or not exactly one.
    """
    found = parse_chain(data, what=what)
    if len(found) != 1:
        raise InvalidInput(f"{what}: {len(found)} certificates; one is pinned")
    return found[0]


def verify_chain(
    chain: tuple[Certificate, ...],
    root: Certificate,
    *,
    at: int,
    what: str = "certificates",
    leaf: LeafUse = "signs data",
) -> None:
    """Return if every certificate is signed by the next, the last by ``root`` or is it, all of them valid at second ``at``.

    ``leaf`` is what the first one's key must be for.

    Raises:
        Mismatch: a link does not hold; the message says which, and why.
    """
    whole = chain if chain[-1].der == root.der else (*chain, root)
    for place, certificate in enumerate(whole):
        name = f"{what}: certificate {place} ({certificate.subject[:80]})"
        if not certificate.starts <= at <= certificate.ends:
            raise Mismatch(
                f"{name}: holds from {certificate.starts} to {certificate.ends}, the moment is {at}"
            )
        if place:
            if not (certificate.is_ca and certificate.signs_certificates):
                raise Mismatch(f"{name}: must not sign certificates, and signs one")
            if certificate.depth is not None and place - 1 > certificate.depth:
                raise Mismatch(
                    f"{name}: may stand {certificate.depth} above a leaf's issuer, stands {place - 1}"
                )
    fit = whole[0].signs_data if leaf == "signs data" else whole[0].agrees_keys
    if not fit or whole[0].is_ca:
        raise Mismatch(f"{what}: the first certificate is none of a key that {leaf}")
    for place, (below, above) in enumerate(pairwise(whole)):
        try:
            x509.load_der_x509_certificate(below.der).verify_directly_issued_by(
                x509.load_der_x509_certificate(above.der)
            )
        except (InvalidSignature, ValueError, TypeError):
            raise Mismatch(
                f"{what}: certificate {place} ({below.subject[:80]}) is not signed by {above.subject[:80]}"
            ) from None


def verify_endorsement(chain: tuple[Certificate, ...], root: Certificate, key: PublicKey, *, at: int) -> None:
    """Return if the chain to ``root`` is that of ``key``: a device's maker vouches for the key of its log.

    Raises:
        Mismatch: another key, or a link does not hold.
    """
    if chain[0].key != key:
        raise Mismatch(
            f"endorsement: is of key {chain[0].key.key_id[:16]}.., the log's is {key.key_id[:16]}.."
        )
    verify_chain(chain, root, at=at, what="endorsement")


def _read(
    certificate: x509.Certificate, what: str, understood: frozenset[x509.ObjectIdentifier]
) -> Certificate:
    with strictly(f"{what}: malformed"):
        return _facts(certificate, what, understood)


@contextmanager
def strictly(what: str) -> Generator[None]:
    """Inside, whatever the library raises or warns of is a refusal that begins with ``what``."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", CryptographyDeprecationWarning)  # of spellings that it accepts for now
        try:
            yield
        except InvalidInput:
            raise
        except REFUSALS as problem:
            raise InvalidInput(f"{what} ({str(problem)[:100]})") from None


def _facts(
    certificate: x509.Certificate, what: str, understood: frozenset[x509.ObjectIdentifier]
) -> Certificate:
    if certificate.version is not x509.Version.v3:
        raise InvalidInput(f"{what}: must be of version 3")
    if certificate.signature_algorithm_oid not in SIGNATURES:
        raise InvalidInput(
            f"{what}: is signed with {certificate.signature_algorithm_oid.dotted_string}, not with ECDSA"
        )
    spki = certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    is_ca, depth, usage = False, None, None
    others: list[tuple[str, bytes]] = []
    for extension in certificate.extensions:
        if extension.critical and extension.oid not in understood:
            raise InvalidInput(f"{what}: critical extension {extension.oid.dotted_string} is not understood")
        value = extension.value
        if isinstance(value, x509.BasicConstraints):
            is_ca, depth = value.ca, value.path_length
        elif isinstance(value, x509.KeyUsage):
            usage = value
        else:
            others.append((extension.oid.dotted_string, value.public_bytes()))
    return Certificate(
        certificate.public_bytes(Encoding.DER),
        parse_public_key(spki, what=f"{what}: key"),
        certificate.subject.rfc4514_string(),
        _attribute(certificate.subject, NameOID.COMMON_NAME),
        _attribute(certificate.subject, NameOID.SERIAL_NUMBER),
        seconds_of(certificate.not_valid_before_utc),
        seconds_of(certificate.not_valid_after_utc),
        is_ca,
        usage is not None and usage.key_cert_sign,
        usage is not None and usage.crl_sign,
        usage is not None and usage.digital_signature,
        usage is not None and usage.key_agreement,
        depth,
        tuple(others),
    )


def _attribute(name: x509.Name, which: x509.ObjectIdentifier) -> str:
    values = name.get_attributes_for_oid(which)
    return str(values[0].value) if values else ""


def seconds_of(moment: datetime.datetime) -> int:
    """Return a moment in seconds since 1970, kept within what a certificate can say."""
    return min(max(int(moment.timestamp()), OLDEST), LATEST)
