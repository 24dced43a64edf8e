"""Which certificates of a chain their issuers have revoked, by lists that a reader has as files (spec/chip-log.md 8.1); pure.

    found = check_revocation(chain, root, lists, at=now)      # Mismatch if one is revoked
    found.status                                              # "checked" or "not checked"; unknown is never checked

RFC 5280, section 5, as far as devices need it: complete lists of the issuer itself, signed by the key that issued the
certificate. A serial on a signed list is revoked, whenever the list was made; that it is on none counts only under a list that
is in force at the moment given. Lists with a critical extension (deltas, parts, lists for others) are refused: their silence
says nothing. The pinned root is the reader's own choice and is not looked up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from typing import Annotated, Literal

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from tallystick.commit.codec import Document
from tallystick.commit.field_rules import At
from tallystick.errors import InvalidInput, Mismatch
from tallystick.fleet.attestation.certificates import SIGNATURES, Certificate, seconds_of, strictly

LIST_LIMIT = 1 << 23  # bytes; a maker's list has 40 for each certificate that it revoked
MARKER = b"-----BEGIN X509 CRL-----"
Status = Literal["checked", "not checked"]


@dataclass(frozen=True)
class RevocationList:
    """A list as its issuer made it; nothing of it is verified until ``check_revocation``.

    Attributes:
        der: its bytes.
        issuer: its issuer's name in RFC 4514's form.
        starts, ends: from when to when it is in force, in seconds since 1970.
    """

    der: bytes
    issuer: str
    starts: int
    ends: int

    def pem(self) -> bytes:
        """Return the list as PEM."""
        return x509.load_der_x509_crl(self.der).public_bytes(Encoding.PEM)


@dataclass(frozen=True)
class Revocation(Document, what="revocation", implied=("status",)):
    """Which certificates of a chain (their subjects) are on no list in force, and for which nobody gave a list."""

    checked: tuple[str, ...]
    unknown: Annotated[tuple[str, ...], At("not_checked")]

    @property
    def status(self) -> Status:
        """``checked`` only if every certificate is."""
        return "checked" if self.checked and not self.unknown else "not checked"

    def __str__(self) -> str:
        if self.status == "checked":
            return f"checked: none of {len(self.checked)} certificates is revoked"
        return (
            f"revocation not checked, no list was given for: {'; '.join(name[:80] for name in self.unknown)}"
        )


def parse_revocation_list(data: bytes, *, what: str = "revocation list") -> RevocationList:
    """Return the one list that ``data`` holds, in PEM or DER.

    Raises:
        InvalidInput: too long, malformed, another spelling of the same PEM, signed otherwise than by ECDSA, without an end, or
            with a critical extension: it might cover less than it seems.
    """
    if len(data) > LIST_LIMIT:
        raise InvalidInput(f"{what}: {len(data)} bytes exceed the limit of {LIST_LIMIT}")
    with strictly(f"{what}: is no list of revoked certificates"):
        in_pem = data.startswith(MARKER)
        found = x509.load_pem_x509_crl(data) if in_pem else x509.load_der_x509_crl(data)
        if in_pem and found.public_bytes(Encoding.PEM).rstrip(b"\n") != data.rstrip(b"\n"):
            raise InvalidInput(f"{what}: is not the one PEM spelling of this list")
        if found.signature_algorithm_oid not in SIGNATURES:
            raise InvalidInput(
                f"{what}: is signed with {found.signature_algorithm_oid.dotted_string}, not with ECDSA"
            )
        for extension in found.extensions:
            if extension.critical:
                raise InvalidInput(
                    f"{what}: critical extension {extension.oid.dotted_string} is not understood: it might cover a part alone"
                )
        for entry in found:
            seconds_of(entry.revocation_date_utc)
            if any(extension.critical for extension in entry.extensions):
                raise InvalidInput(
                    f"{what}: the entry of {entry.serial_number:x} has a critical extension that is not understood"
                )
        if found.next_update_utc is None:
            raise InvalidInput(f"{what}: does not say until when it is in force")
        return RevocationList(
            found.public_bytes(Encoding.DER),
            found.issuer.rfc4514_string(),
            seconds_of(found.last_update_utc),
            seconds_of(found.next_update_utc),
        )


def check_revocation(
    chain: Sequence[Certificate],
    root: Certificate,
    lists: Sequence[RevocationList],
    *,
    at: int,
    what: str = "certificates",
    required: bool = False,
) -> Revocation:
    """Return which certificates of ``chain``, which ``verify_chain`` accepted under ``root``, are known not to be revoked.

    Raises:
        Mismatch: a certificate is revoked; a list in its issuer's name has another signature, or is not in force at second
            ``at``; or its issuer must not sign lists.
        InvalidInput: ``required``, and there is no list for a certificate.
    """
    whole = [*chain] if chain[-1].der == root.der else [*chain, root]
    checked: list[str] = []
    unknown: list[str] = []
    for certificate, issuer in pairwise(whole):
        name = certificate.subject or f"of {issuer.subject}"
        told = [_held(found, certificate, issuer, what) for found in lists if found.issuer == issuer.subject]
        if any(each.starts <= at <= each.ends for each in told):
            checked.append(name)
        elif told:
            each = max(told, key=lambda one: one.ends)
            raise Mismatch(
                f"{what}: the revocation list of {each.issuer[:80]} is in force from {each.starts} to {each.ends}, "
                f"the moment is {at}"
            )
        elif required:
            raise InvalidInput(
                f"{what}: revocation must be checked, and no list of {issuer.subject[:80]} was given (for {name[:80]})"
            )
        else:
            unknown.append(name)
    return Revocation(tuple(checked), tuple(unknown))


def _held(found: RevocationList, certificate: Certificate, issuer: Certificate, what: str) -> RevocationList:
    """Return the list if ``issuer`` made it and ``certificate`` is not on it."""
    held = x509.load_der_x509_crl(found.der)
    key = x509.load_der_x509_certificate(issuer.der).public_key()
    if not issuer.signs_lists:
        raise Mismatch(
            f"{what}: {issuer.subject[:80]} must not sign revocation lists, and one is in its name"
        )
    if not isinstance(key, ec.EllipticCurvePublicKey) or not held.is_signature_valid(key):
        raise Mismatch(
            f"{what}: the revocation list of {found.issuer[:80]} is not signed by that issuer's key"
        )
    serial = x509.load_der_x509_certificate(certificate.der).serial_number
    entry = held.get_revoked_certificate_by_serial_number(serial)
    if entry is not None:
        since = datetime.fromtimestamp(seconds_of(entry.revocation_date_utc), UTC)
        raise Mismatch(
            f"{what}: certificate {serial:x} ({certificate.subject[:80] or 'without a name'}) was revoked by "
            f"{issuer.subject[:80]} on {since:%Y-%m-%d}"
        )
    return found
