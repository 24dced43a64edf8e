"""A maker of accelerators that answer SPDM requests: chains and evidence for tests, with keys that follow from names.

    maker = FakeMaker("maker")
    evidence = maker.device("0001").answer(nonce)

Nothing here is a device: whoever runs it holds every key.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from tallystick.commit.encoding import canonical_json
from tallystick.fleet.attestation.certificates import Certificate, parse_chain, parse_root
from tallystick.fleet.attestation.spdm import FIRMWARE_ID, TCB_INFO, DeviceEvidence, Measurement, SpdmExchange

START = datetime.datetime(2025, 1, 1, tzinfo=datetime.UTC)
END = datetime.datetime(2045, 1, 1, tzinfo=datetime.UTC)
NOW = int(datetime.datetime(2026, 6, 1, tzinfo=datetime.UTC).timestamp())
FIRMWARE = hashlib.sha384(b"device firmware 1").digest()


def key_of(name: str) -> ec.EllipticCurvePrivateKey:
    """Return the P-384 key that follows from a name."""
    return ec.derive_private_key(
        int.from_bytes(hashlib.sha256(name.encode()).digest(), "big"), ec.SECP384R1()
    )


def issue(
    subject: str,
    issuer: str,
    *,
    is_ca: bool = True,
    depth: int | None = None,
    firmware: bytes | None = None,
    signer: str | None = None,
) -> x509.Certificate:
    """Return a certificate of ``subject``'s key under ``issuer``'s; ``signer`` names another key for the signature."""
    builder = (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(_name(issuer))
        .public_key(key_of(subject).public_key())
        .serial_number(int.from_bytes(hashlib.sha256(f"{subject}/{issuer}".encode()).digest()[:8], "big") + 1)
        .not_valid_before(START)
        .not_valid_after(END)
        .add_extension(
            x509.KeyUsage(not is_ca, False, False, False, False, is_ca, is_ca, False, False), critical=True
        )
    )
    if is_ca:
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=depth), critical=True)
    if firmware is not None:
        told = x509.UnrecognizedExtension(x509.ObjectIdentifier(TCB_INFO), b"\x04\x30" + firmware)
        builder = builder.add_extension(told, critical=False)
    return builder.sign(key_of(signer or issuer), hashes.SHA384(), ecdsa_deterministic=True)


def revoke(
    issuer: str,
    serials: Sequence[int],
    *,
    start: datetime.datetime = START,
    end: datetime.datetime = END,
    signer: str | None = None,
    critical: x509.ExtensionType | None = None,
    entry_critical: bool = False,
) -> x509.CertificateRevocationList:
    """Return ``issuer``'s list of revoked serial numbers; ``signer`` names another key for the signature."""
    builder = x509.CertificateRevocationListBuilder().issuer_name(_name(issuer)).last_update(start)
    builder = builder.next_update(end)
    for serial in serials:
        entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(START)
        if entry_critical:  # as in a list for several issuers
            other = x509.CertificateIssuer([x509.DirectoryName(_name("another line"))])
            entry = entry.add_extension(other, critical=True)
        builder = builder.add_revoked_certificate(entry.build())
    if critical is not None:
        builder = builder.add_extension(critical, critical=True)
    return builder.sign(key_of(signer or issuer), hashes.SHA384(), ecdsa_deterministic=True)


def serial_of(certificate: Certificate) -> int:
    """Return a certificate's serial number."""
    return x509.load_der_x509_certificate(certificate.der).serial_number


def _name(text: str) -> x509.Name:
    """A common name; of a device its serial number too."""
    names = [x509.NameAttribute(NameOID.COMMON_NAME, text)]
    if " device " in text:
        names.append(x509.NameAttribute(NameOID.SERIAL_NUMBER, text.rpartition(" ")[2]))
    return x509.Name(names)


@dataclass(frozen=True)
class FakeDevice:
    """One accelerator: its device certificate is its maker's, its leaf's key is that of its firmware."""

    maker: str
    serial: str
    firmware: bytes = FIRMWARE

    @cached_property
    def chain(self) -> tuple[Certificate, ...]:
        """The device's certificates, leaf first, root last."""
        device, leaf = f"{self.maker} device {self.serial}", f"{self.maker} firmware {self.serial}"
        made = [
            issue(leaf, device, is_ca=False, firmware=self.firmware),
            issue(device, f"{self.maker} line"),
            issue(f"{self.maker} line", f"{self.maker} root", depth=1),
            issue(f"{self.maker} root", f"{self.maker} root"),
        ]
        return parse_chain(b"".join(certificate.public_bytes(Encoding.PEM) for certificate in made))

    def answer(
        self, nonce: bytes, values: tuple[tuple[int, bytes], ...] = ((1, bytes(48)), (2, FIRMWARE))
    ) -> DeviceEvidence:
        """Return the device's signed measurements for ``nonce``."""
        opaque = b"".join(
            kind.to_bytes(2, "little") + len(value).to_bytes(2, "little") + value
            for kind, value in (
                (3, b"1.2.3\0"),
                (6, bytes.fromhex("009f009601000000")),
                (FIRMWARE_ID, self.firmware),
            )
        )
        measurements = tuple(Measurement(index, 1, value) for index, value in values)
        own = hashlib.sha256(b"device nonce" + nonce).digest()
        exchange = SpdmExchange(nonce, 0, bytes(2), measurements, own, opaque, bytes(96))
        der = key_of(f"{self.maker} firmware {self.serial}").sign(
            exchange.covered(), ec.ECDSA(hashes.SHA384(), deterministic_signing=True)
        )
        signature = b"".join(part.to_bytes(48, "big") for part in decode_dss_signature(der))
        signed = SpdmExchange(nonce, 0, bytes(2), measurements, own, opaque, signature)
        return DeviceEvidence("FAKE", self.chain, signed)


@dataclass(frozen=True)
class FakeMaker:
    """A maker: a root, a line of products, and devices."""

    name: str

    @property
    def root(self) -> Certificate:
        """The certificate that readers pin."""
        root = issue(f"{self.name} root", f"{self.name} root")
        return parse_root(root.public_bytes(Encoding.PEM))

    def device(self, serial: str) -> FakeDevice:
        """Return the device with a serial number."""
        return FakeDevice(self.name, serial)


def encode_device_file(devices: tuple[DeviceEvidence, ...]) -> bytes:
    """Return the devices as such a file, in canonical JSON."""
    entries = [
        {
            "arch": device.architecture,
            "certificate": base64.b64encode(b"".join(c.pem() for c in device.chain)).decode(),
            "evidence": base64.b64encode(device.exchange.encode()).decode(),
            "nonce": device.exchange.nonce.hex(),
        }
        for device in devices
    ]
    return canonical_json(entries)
