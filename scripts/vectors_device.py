"""Write the test vectors of TPM and device evidence.

TPM structures and SPDM messages are written out here, straight from the standards that spec/chip-log.md 7 and 8 name; nothing
imports the package. Certificates and curves are the library's, with signatures that are the same every time (RFC 6979).

    python scripts/vectors_device.py vectors
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
import struct
import sys
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import NameOID
from vector_cases import Case, canonical, write_cases

UEID = b"\x01" + bytes(range(16))
HEAD = (7, hashlib.sha384(b"head").digest())
NONCE = hashlib.sha256(b"nonce").digest()
OWNER, ENDORSEMENT, NOBODY = 0x40000001, 0x4000000B, 0x40000007
BOUND, RESTRICTED, SIGN, USER = 1 << 1 | 1 << 4 | 1 << 5, 1 << 16, 1 << 18, 1 << 6
NOW = 1_780_000_000  # in 2026


def write(root: Path) -> None:
    """Write every case below ``root``, the vectors folder; what stood there goes."""
    write_cases(root / "tpm-evidence", tpm_cases())
    write_cases(root / "device-evidence", device_cases())


def frame(tag: str, *parts: bytes) -> bytes:
    """The digest of parts under a tag, spec/state-commitment.md."""
    data = bytes([len(tag)]) + tag.encode() + b"".join(len(p).to_bytes(8, "little") + p for p in parts)
    return hashlib.sha256(data).digest()


def private(name: str, curve: ec.EllipticCurve) -> ec.EllipticCurvePrivateKey:
    return ec.derive_private_key(int.from_bytes(hashlib.sha256(name.encode()).digest(), "big") >> 8, curve)


def spki(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def signed(key: ec.EllipticCurvePrivateKey, data: bytes, half: int) -> bytes:
    hashed = hashes.SHA256() if half == 32 else hashes.SHA384()
    der = key.sign(data, ec.ECDSA(hashed, deterministic_signing=True))
    return b"".join(part.to_bytes(half, "big") for part in decode_dss_signature(der))


# -- TPM ---------------------------------------------------------------------------------------------


def sized(data: bytes) -> bytes:
    return struct.pack(">H", len(data)) + data


class TpmKey:
    """A key as a TPM shows it: SHA-256 names."""

    def __init__(self, name: str, half: int, attributes: int, hierarchy: int) -> None:
        self.half = half
        self.private = private(name, ec.SECP256R1() if half == 32 else ec.SECP384R1())
        point = self.private.public_key().public_bytes(Encoding.X962, PublicFormat.UncompressedPoint)[1:]
        kind = struct.pack(">HHI", 0x0023, 0x000B, attributes) + sized(b"")
        kind += struct.pack(
            ">5H", 0x0010, 0x0018, 0x000B if half == 32 else 0x000C, 3 if half == 32 else 4, 0x0010
        )
        self.public = kind + sized(point[:half]) + sized(point[half:])
        self.name = b"\0\x0b" + hashlib.sha256(self.public).digest()
        self.full_name = b"\0\x0b" + hashlib.sha256(struct.pack(">I", hierarchy) + self.name).digest()


def statement(kind: int, signer: TpmKey, data: bytes, content: bytes, **change: Any) -> bytes:
    head = change.get("magic", b"\xffTCG") + struct.pack(">H", kind)
    named = change.get("named", signer.full_name)
    return (
        head
        + sized(named)
        + sized(data)
        + struct.pack(">QIIBQ", 123456, 5, 1, change.get("safe", 1), 0x20240125)
        + content
    )


def registers_of(count: int = 8) -> list[tuple[int, bytes]]:
    return [(at, hashlib.sha256(b"register %d" % at).digest()) for at in range(count)]


def tpm(half: int = 32, **change: Any) -> Case:
    """The case of an honest TPM; ``change`` replaces parts of it."""
    signer = TpmKey(
        change.get("signer_name", "attestation"),
        half,
        change.get("signer_bits", BOUND | RESTRICTED | SIGN | USER),
        ENDORSEMENT,
    )
    device = TpmKey(
        "device", half, change.get("device_bits", BOUND | SIGN | USER), change.get("hierarchy", OWNER)
    )
    certified = change.get("certified", device)
    ueid, place = change.get("ueid", UEID), change.get("head", HEAD)
    key_id = hashlib.sha256(spki(device.private)).digest()
    asked = frame(
        "tallystick/tpm-quote/1",
        ueid,
        key_id,
        place[0].to_bytes(8, "little"),
        place[1],
        change.get("nonce", NONCE),
    )
    held = change.get("registers", registers_of())
    hashed = hashlib.sha256 if half == 32 else hashlib.sha384
    shown = hashed(b"".join(value for _, value in change.get("quoted", held))).digest()
    mask = sum(1 << register for register, _ in held).to_bytes(3, "little")
    quoted = (
        struct.pack(">IHB", 1, change.get("bank", 0x000B), 3) + mask + sized(shown) + change.get("after", b"")
    )
    marks = {name: change[name] for name in ("magic", "named", "safe") if name in change}
    certification = statement(
        0x8017, signer, frame("tallystick/tpm-certify/1", change.get("certify_ueid", UEID)),
        sized(certified.name) + sized(certified.full_name),
    )  # fmt: skip
    quote = statement(change.get("kind", 0x8018), signer, asked, change.get("content", quoted), **marks)
    signature = signed(signer.private, quote, half)
    if "turned" in change:
        signature = signature[:-1] + bytes([signature[-1] ^ 1])
    evidence = {
        "attestation_key": change.get("attestation_key", signer.public).hex(),
        "certification": [certification.hex(), signed(signer.private, certification, half).hex()],
        "device_key": device.public.hex(),
        "format": "tallystick/tpm-evidence/1",
        "quote": [quote.hex(), signature.hex()],
        "registers": [[register, value.hex()] for register, value in change.get("told", held)],
    }
    reference = {
        "bank": change.get("reference_bank", "sha256"),
        "format": "tallystick/pcr-reference/1",
        "registers": [
            [register, value.hex()] for register, value in change.get("reference", registers_of()[:5])
        ],
    }
    known = TpmKey("attestation", half, 0, ENDORSEMENT)
    return {
        "evidence": change.get("text", canonical(evidence)).decode(),
        "attestation_key": spki(known.private).hex(),
        "device_key": spki(device.private).hex(),
        "ueid": UEID.hex(),
        "head": [HEAD[0], HEAD[1].hex()],
        "nonce": NONCE.hex(),
        "reference": canonical(reference).decode(),
    }


def tpm_cases() -> dict[str, tuple[str, Case]]:
    facts = {
        "clock": 123456,
        "resets": 5,
        "restarts": 1,
        "safe": True,
        "firmware": 0x20240125,
        "compared": list(range(5)),
    }
    found: dict[str, tuple[str, Case]] = {
        "p256": ("Device and attestation key on P-256.", {**tpm(), "facts": facts}),
        "p384": ("Both on P-384.", {**tpm(48), "facts": facts}),
        "more_registers": (
            "All 24 registers quoted, five compared.",
            {**tpm(registers=[(at, hashlib.sha256(b"register %d" % at).digest()) for at in range(24)]), "facts": facts},
        ),
        "clock_not_safe": ("The TPM's clock may have gone back: a fact.", {**tpm(safe=0), "facts": facts | {"safe": False}}),
    }  # fmt: skip

    def refused(name: str, why: str, reason: str, half: int = 32, **change: Any) -> None:
        found[f"{name}_fail"] = (why, {**tpm(half, **change), "reason": reason})

    other = TpmKey("another device", 32, BOUND | SIGN | USER, OWNER)
    refused("nonce", "The quote answers another nonce.", "quote answers", nonce=bytes(32))
    refused("head", "The quote is over another record.", "quote answers", head=(8, HEAD[1]))
    refused(
        "head_digest",
        "The quote is over another record with that counter.",
        "quote answers",
        head=(7, bytes(48)),
    )
    refused(
        "chip", "The key was certified for another chip.", "certification answers", certify_ueid=bytes(17)
    )
    refused(
        "attestation_key",
        "Another TPM's attestation key signs.",
        "attestation key is",
        signer_name="another TPM",
    )
    refused(
        "not_restricted",
        "The attestation key may sign anything, so it could sign what no TPM made.",
        "attestation key: attributes",
        signer_bits=BOUND | SIGN | USER,
    )
    refused(
        "may_decrypt",
        "The attestation key decrypts too.",
        "attestation key: attributes",
        signer_bits=BOUND | RESTRICTED | SIGN | USER | 1 << 17,
    )
    refused(
        "movable",
        "The device key may be duplicated out of the TPM.",
        "device key: attributes",
        device_bits=SIGN | USER | 1 << 5,
    )
    refused(
        "imported",
        "The device key was made elsewhere.",
        "device key: attributes",
        device_bits=1 << 1 | 1 << 4 | SIGN | USER,
    )
    refused("other_key", "Another key was certified.", "certifies key", certified=other)
    refused(
        "null_hierarchy",
        "The device key is of the null hierarchy, whose keys are anew after each reset.",
        "certifies key",
        hierarchy=NOBODY,
    )
    refused(
        "other_signer",
        "The quote names another signer than the attestation key.",
        "not by that key",
        named=other.full_name,
    )
    refused(
        "signature", "One bit of the quote's signature is turned.", "signature is not of key", turned=True
    )
    refused(
        "registers",
        "The values shown do not hash to what was quoted.",
        "registers hash to",
        quoted=registers_of()[::-1],
    )
    refused(
        "other_boot",
        "Register 4, the boot loader, has another value.",
        "register 4 is",
        reference=[(4, bytes(32))],
    )
    refused(
        "not_quoted",
        "The reference asks for register 9, which was not quoted.",
        "register 9 was not quoted",
        reference=[(9, bytes(32))],
    )
    refused("no_reference", "The reference names no register.", "names no register", reference=[])
    refused(
        "reference_bank",
        "The reference is of another bank.",
        "the reference is of sha384",
        reference_bank="sha384",
        reference=[(0, bytes(48))],
    )
    refused("magic", "The quote does not begin as what a TPM makes.", "begins with", magic=b"\xffTCH")
    refused(
        "two_certifications",
        "A certification stands where the quote belongs.",
        "in their places",
        kind=0x8017,
        content=sized(other.name) + sized(other.full_name),
    )
    refused("trailing", "A byte follows in the quote.", "1 bytes follow", after=b"\0")
    refused("safe", "The clock's safety is neither yes nor no.", "safety is 0x2", safe=2)
    refused("bank", "A bank of SHA-1.", "the bank is 0x4", bank=0x0004)
    refused(
        "told_registers",
        "Fewer registers shown than quoted.",
        "other registers than those",
        told=registers_of()[:-1],
    )
    honest = json.loads(tpm()["evidence"])
    cut = {**honest, "quote": [honest["quote"][0][:-2], honest["quote"][1]]}
    refused("cut", "The quote's last byte is missing.", "bytes, 31 are left", text=canonical(cut))
    spaced = json.dumps(honest, sort_keys=True).encode()
    refused("spaces", "The same document with spaces.", "not the canonical encoding", text=spaced)
    off = bytes.fromhex(honest["device_key"])
    wrong = {**honest, "device_key": (off[:-1] + bytes([off[-1] ^ 1])).hex()}
    refused(
        "not_on_curve",
        "The device key's point is not on its curve.",
        "not on its curve",
        text=canonical(wrong),
    )
    rsa = {**honest, "device_key": "0001" + honest["device_key"][4:]}
    refused("rsa", "The device key says it is RSA.", "the type is 0x1", text=canonical(rsa))
    mixed = bytearray.fromhex(honest["device_key"])
    mixed[15] = 0x0C
    refused(
        "hash",
        "A P-256 key with SHA-384.",
        "does not go with this curve",
        text=canonical({**honest, "device_key": mixed.hex()}),
    )
    huge = bytearray.fromhex(honest["quote"][0])
    huge[6:8] = b"\xff\xff"
    refused(
        "huge",
        "The signer's name declares 65535 bytes.",
        "must not have 65535",
        text=canonical({**honest, "quote": [huge.hex(), honest["quote"][1]]}),
    )
    return found


# -- devices -----------------------------------------------------------------------------------------

FIRMWARE = hashlib.sha384(b"device firmware").digest()


def name_of(text: str) -> x509.Name:
    names = [x509.NameAttribute(NameOID.COMMON_NAME, text)]
    return x509.Name(names + [x509.NameAttribute(NameOID.SERIAL_NUMBER, "0042")] * (text == "device"))


def issue(subject: str, issuer: str, **change: Any) -> x509.Certificate:
    curve = change.get("curve", ec.SECP384R1())
    is_ca = change.get("is_ca", True)
    usage = x509.KeyUsage(
        not is_ca, False, False, False, False, change.get("signs", is_ca), False, False, False
    )
    builder = (
        x509.CertificateBuilder()
        .subject_name(name_of(subject))
        .issuer_name(name_of(change.get("issuer_name", issuer)))
        .public_key(private(subject, curve).public_key())
        .serial_number(1 + len(subject))
        .not_valid_before(datetime.datetime(2025, 1, 1, tzinfo=datetime.UTC))
        .not_valid_after(datetime.datetime(change.get("until", 2045), 1, 1, tzinfo=datetime.UTC))
        .add_extension(usage, True)
    )
    if is_ca:
        builder = builder.add_extension(x509.BasicConstraints(True, change.get("depth")), True)
    if (told := change.get("firmware")) is not None:
        oid = x509.ObjectIdentifier("2.23.133.5.4.1")
        builder = builder.add_extension(
            x509.UnrecognizedExtension(oid, b"\x04\x30" + told), change.get("critical", False)
        )
    return builder.sign(
        private(change.get("signer", issuer), ec.SECP384R1()), hashes.SHA384(), ecdsa_deterministic=True
    )


def chain(**change: Any) -> list[x509.Certificate]:
    """Leaf, device, line and root; ``leaf``, ``device`` and ``line`` change one of them."""
    return [
        issue("firmware", "device", **{"is_ca": False, "firmware": FIRMWARE, **change.get("leaf", {})}),
        issue("device", "line", **change.get("device", {})),
        issue("line", "root", **{"depth": 1, **change.get("line", {})}),
        issue("root", "root"),
    ]


def block(index: int, value: bytes, kind: int = 1, specification: int = 1, size: int | None = None) -> bytes:
    inner = bytes([kind]) + struct.pack("<H", len(value)) + value
    return bytes([index, specification]) + struct.pack("<H", len(inner) if size is None else size) + inner


def tlv(kind: int, value: bytes) -> bytes:
    return struct.pack("<HH", kind, len(value)) + value


VALUES = [block(1, bytes(48)), block(2, hashlib.sha384(b"vbios").digest()), block(5, b"\x01\x02\x03", 0x81)]
OPAQUE = tlv(3, b"550.1\0") + tlv(6, bytes.fromhex("009f009601000000")) + tlv(20, FIRMWARE)


def exchange(**change: Any) -> bytes:
    record = b"".join(change.get("values", VALUES))
    opaque = change.get("opaque", OPAQUE)
    request = (
        change.get("request", b"\x11\xe0\x01\xff")
        + change.get("asked", NONCE)
        + bytes([change.get("slot", 0)])
    )
    answer = (
        change.get("answer", b"\x11\x60")
        + bytes(2)
        + bytes([change.get("count", len(change.get("values", VALUES)))])
    )
    answer += change.get("length", len(record)).to_bytes(3, "little") + record
    answer += (
        hashlib.sha256(b"the device's nonce").digest()
        + struct.pack("<H", change.get("opaque_length", len(opaque)))
        + opaque
    )
    key = private("firmware", change.get("curve", ec.SECP384R1()))
    signature = signed(key, request + answer, 48)
    if "turned" in change:
        signature = bytes([signature[0] ^ 1]) + signature[1:]
    return request + answer + signature + change.get("after", b"")


def device(
    certificates: list[x509.Certificate] | None = None, message: bytes | None = None, **change: Any
) -> Case:
    shown = chain() if certificates is None else certificates
    message = exchange() if message is None else message
    pem = b"".join(certificate.public_bytes(Encoding.PEM) for certificate in shown)
    entry = {
        "arch": "HOPPER",
        "certificate": base64.b64encode(change.get("pem", pem)).decode(),
        "driver_version": "550.1",
        "evidence": base64.b64encode(message).decode(),
        "nonce": message[4:36].hex(),
    } | change.get("entry", {})
    root = change.get("root", issue("root", "root"))
    allowed = change.get("allowed", [[2, [hashlib.sha384(b"vbios").hexdigest(), bytes(48).hex()]]])
    reference = {"format": "tallystick/measurement-reference/1", "measurements": allowed}
    return {
        "file": json.dumps(change.get("file", [entry])),
        "root": root.public_bytes(Encoding.PEM).decode(),
        "nonce": NONCE.hex(),
        "at": change.get("at", NOW),
        "reference": canonical(reference).decode(),
    }


def device_cases() -> dict[str, tuple[str, Case]]:
    facts = {
        "name": "device",
        "serial": "0042",
        "ueid": (
            b"\x01" + frame("tallystick/device-ueid/1", spki(private("device", ec.SECP384R1())))[:16]
        ).hex(),
        "measurements": {"1": bytes(48).hex(), "2": hashlib.sha384(b"vbios").hexdigest(), "5": "010203"},
        "compared": [2],
        "versions": {"driver": "550.1", "vbios": "96.00.9F.00.01"},
    }
    found: dict[str, tuple[str, Case]] = {
        "honest": (
            "Leaf, device, line and root; three measurements, one of them raw.",
            {**device(), "facts": facts},
        ),
        "root_not_sent": (
            "The chain ends below the root, which the reader has anyway.",
            {**device(chain()[:3]), "facts": facts},
        ),
        "slot": (
            "The device signed with the chain in slot 3.",
            {**device(message=exchange(slot=3)), "facts": facts},
        ),
        "no_firmware_id": (
            "The device states no firmware digest in its opaque data.",
            {**device(message=exchange(opaque=OPAQUE[:22])), "facts": facts},
        ),
    }

    def refused(name: str, why: str, reason: str, case: Case) -> None:
        found[f"{name}_fail"] = (why, {**case, "reason": reason})

    def chained(name: str, why: str, reason: str, **change: Any) -> None:
        refused(name, why, reason, device(chain(**change)))

    def sent(name: str, why: str, reason: str, **change: Any) -> None:
        refused(name, why, reason, device(message=exchange(**change)))

    sent("nonce", "The device answers another nonce.", "answers nonce", asked=bytes(32))
    refused(
        "stated_nonce",
        "The file states another nonce than the request has.",
        "states nonce",
        device(entry={"nonce": "00" * 32}),
    )
    sent("signature", "One bit of the signature is turned.", "signature is not of key", turned=True)
    good = exchange()
    refused(
        "measurement",
        "One bit of a measurement is turned.",
        "signature is not of key",
        device(message=good[:60] + bytes([good[60] ^ 1]) + good[61:]),
    )
    sent(
        "version",
        "An SPDM 1.2 request: its signatures cover other bytes.",
        "request begins",
        request=b"\x12\xe0\x01\xff",
    )
    sent("unsigned", "The request asks for no signature.", "request begins", request=b"\x11\xe0\x00\xff")
    sent("error", "The device answered ERROR.", "response begins", answer=b"\x11\x7f")
    sent("slot_8", "There is no slot 8.", "slot 8", slot=8)
    sent("twice", "One measurement stands there twice.", "each once", values=[VALUES[0], VALUES[0]])
    sent("order", "Measurements out of order.", "in order", values=[VALUES[1], VALUES[0]])
    sent("none", "No measurement.", "must be there", values=[])
    sent("index_0", "Index 0.", "block 0", values=[block(0, bytes(48))])
    sent(
        "specification",
        "A block of another specification than DMTF's.",
        "specification 2",
        values=[block(1, bytes(48), specification=2)],
    )
    sent("short_digest", "A digest of 32 bytes.", "must not have 32 bytes", values=[block(1, bytes(32))])
    sent(
        "block_size", "A block longer than its value.", "calls for 51", values=[block(1, bytes(48), size=52)]
    )
    sent("count", "One block fewer stated than are there.", "blocks end at", count=2)
    sent("record_length", "The record declares more than is there.", "the record has", length=1 << 20)
    sent(
        "opaque_length", "More opaque bytes than the standard allows.", "standard allows", opaque=bytes(1025)
    )
    sent("opaque_cut", "The last opaque field is cut off.", "cut off", opaque=tlv(3, b"550")[:-1])
    sent(
        "opaque_twice",
        "One opaque field stands there twice.",
        "is there twice",
        opaque=tlv(3, b"1") + tlv(3, b"2"),
    )
    sent("trailing", "A byte follows the signature.", "1 bytes follow", after=b"\0")
    refused("cut", "The last byte of the signature is missing.", "95 are left", device(message=good[:-1]))
    refused(
        "huge", "More bytes than any exchange has.", "exceed the limit", device(message=good + bytes(1 << 16))
    )
    refused(
        "not_allowed",
        "A measurement that the reader does not accept.",
        "measurement 2 is",
        device(allowed=[[2, [bytes(48).hex()]]]),
    )
    refused(
        "not_measured",
        "The reader asks for an index that was not measured.",
        "measurement 9 is missing",
        device(allowed=[[9, [bytes(48).hex()]]]),
    )
    refused("no_reference", "A reference that names nothing.", "indices must be there", device(allowed=[]))
    refused(
        "root", "Another maker's root.", "is not signed by", device(root=issue("other root", "other root"))
    )
    refused(
        "same_name_root",
        "A root of the same name with another key.",
        "is not signed by",
        device(chain()[:3], root=issue("root", "root", signer="other root"))
        | {
            "root": issue("root", "root", curve=ec.SECP256R1(), signer="root")
            .public_bytes(Encoding.PEM)
            .decode()
        },
    )
    chained(
        "link",
        "The leaf is signed by somebody else with the device's name.",
        "is not signed by",
        leaf={"signer": "stranger"},
    )
    chained(
        "issuer_name", "The leaf names another issuer.", "is not signed by", leaf={"issuer_name": "stranger"}
    )
    chained(
        "not_ca",
        "The device's certificate may not sign others.",
        "must not sign certificates",
        device={"is_ca": False},
    )
    chained(
        "not_cert_sign",
        "The line's key usage leaves signing certificates out.",
        "must not sign certificates",
        line={"signs": False},
    )
    chained(
        "depth", "The line may stand above leaves' issuers of none.", "may stand 0 above", line={"depth": 0}
    )
    chained("expired", "The device's certificate has ended.", "the moment is", device={"until": 2026})
    refused("not_yet", "A moment before all of it.", "the moment is", device(at=1))
    chained(
        "critical",
        "A critical extension that nobody here understands.",
        "is not understood",
        leaf={"critical": True},
    )
    chained(
        "other_firmware",
        "The certificate was issued for other firmware than the device states.",
        "was issued for another",
        leaf={"firmware": bytes(48)},
    )
    chained("curve", "The leaf's key is on P-256.", "signs with ecdsa-p256", leaf={"curve": ec.SECP256R1()})
    chained(
        "leaf_is_ca",
        "The leaf is itself an authority.",
        "none of a key that signs data",
        leaf={"is_ca": True},
    )
    refused(
        "short_chain",
        "Leaf and root alone: no device's own certificate.",
        "2 certificates",
        device([issue("firmware", "root", is_ca=False), issue("root", "root")]),
    )
    refused(
        "order_of_chain",
        "Device before leaf.",
        "must not sign certificates",
        device([chain()[1], chain()[0], *chain()[2:]]),
    )
    refused(
        "long_chain",
        "Eleven certificates.",
        "at most can be a chain",
        device(chain() + [issue("root", "root")] * 7),
    )
    refused("not_pem", "No certificate at all.", "no certificates in PEM", device(pem=b"hello"))
    refused(
        "between",
        "Text between two certificates.",
        "not the one PEM spelling",
        device(pem=b"text\n" + b"".join(c.public_bytes(Encoding.PEM) for c in chain())),
    )
    refused("not_base64", "The evidence is no base64.", "is no base64", device(entry={"evidence": "%%"}))
    refused("no_device", "An empty list.", "list of 1 to", device(file=[]))
    refused(
        "missing",
        "No certificate field.",
        "must be there, as text",
        device(file=[{"arch": "HOPPER", "evidence": "", "nonce": ""}]),
    )
    return found


if __name__ == "__main__":
    write(Path(sys.argv[1]))
