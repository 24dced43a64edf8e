"""A maker of TPMs that certifies endorsement keys: chains for tests, with issuers' keys that follow from names.

    maker = TpmMaker("maker")
    request = EnrolmentRequest(attestation_key, maker.chain(endorsement_key))

Nothing here is a maker: whoever runs it holds every key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, load_der_public_key

from tallystick.fleet.attestation.certificates import Certificate, parse_chain, parse_root
from tallystick.fleet.attestation.enrolment import EK_UNDERSTOOD, EK_USE, MANUFACTURER, MODEL, VERSION
from tallystick.signing.keys import PublicKey
from tallystick.testing.devices import END, START, issue, key_of

NAMES = ((MANUFACTURER, "id:54414C59"), (MODEL, "software"), (VERSION, "id:00010002"))
Named = Sequence[tuple[x509.ObjectIdentifier, str]]


@dataclass(frozen=True)
class TpmMaker:
    """A maker: a root, a line of products under it, and certificates of endorsement keys."""

    name: str

    @property
    def root(self) -> Certificate:
        """The certificate that enrollers pin."""
        return parse_root(issue(f"{self.name} root", f"{self.name} root").public_bytes(Encoding.PEM))

    def chain(
        self,
        key: PublicKey,
        *,
        names: Named | None = NAMES,
        use: x509.ObjectIdentifier | None = EK_USE,
        agrees: bool = True,
        is_ca: bool = False,
        serial: int = 77,
    ) -> tuple[Certificate, ...]:
        """Return the certificates of endorsement key ``key``, leaf first; what is given makes one that is none."""
        line = f"{self.name} line"
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([]))
            .issuer_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, line)]))
            .public_key(cast("ec.EllipticCurvePublicKey", load_der_public_key(key.spki)))
            .serial_number(serial)
            .not_valid_before(START)
            .not_valid_after(END)
            .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
            .add_extension(
                x509.KeyUsage(not agrees, False, False, False, agrees, False, False, False, False),
                critical=True,
            )
        )
        if names is not None:
            said = x509.Name([x509.NameAttribute(which, text) for which, text in names])
            alternative = x509.SubjectAlternativeName([x509.DirectoryName(said)])
            builder = builder.add_extension(alternative, critical=True)
        if use is not None:
            builder = builder.add_extension(x509.ExtendedKeyUsage([use]), critical=False)
        leaf = builder.sign(key_of(line), hashes.SHA384(), ecdsa_deterministic=True)
        made = (leaf, issue(line, f"{self.name} root", depth=0))
        return parse_chain(
            b"".join(each.public_bytes(Encoding.PEM) for each in made), understood=EK_UNDERSTOOD
        )
