"""Write the test vectors of TPM and device evidence.

TPM structures and SPDM messages are written out here, straight from the standards that spec/chip-log.md 7 and 8 name; nothing
imports the package. Certificates, curves and AES in CFB are the library's, with signatures that are the same every time
(RFC 6979).

    python scripts/vectors_device.py vectors
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import hmac
import json
import struct
import sys
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.decrepit.ciphers.modes import CFB
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
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
    write_cases(root / "tpm-enrolment", enrolment_cases())
    write_cases(root / "device-evidence", device_cases())
    write_cases(root / "revocation", revocation_cases())


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


# -- enrolment ---------------------------------------------------------------------------------------

EPHEMERAL, SECRET = 0x1234567, hashlib.sha256(b"secret").digest()
TPM_NAMES = ((1, "id:54414C59"), (2, "software"), (3, "id:00010002"))


def kdfa(key: bytes, label: bytes, u: bytes, bits: int) -> bytes:
    message = struct.pack(">I", 1) + label + b"\0" + u + struct.pack(">I", bits)
    return hmac.digest(key, message, "sha256")[: bits // 8]


def credential(theirs: ec.EllipticCurvePrivateKey, name: bytes) -> tuple[bytes, bytes]:
    """TPM2_MakeCredential for an endorsement key on P-256, with an ephemeral key that is always the same."""
    mine = ec.derive_private_key(EPHEMERAL, ec.SECP256R1())
    here, there = (
        key.public_key().public_bytes(Encoding.X962, PublicFormat.UncompressedPoint)[1:]
        for key in (mine, theirs)
    )
    shared = mine.exchange(ec.ECDH(), theirs.public_key())
    seed = hashlib.sha256(struct.pack(">I", 1) + shared + b"IDENTITY\0" + here[:32] + there[:32]).digest()
    cipher = Cipher(algorithms.AES(kdfa(seed, b"STORAGE", name, 128)), CFB(bytes(16))).encryptor()
    hidden = cipher.update(sized(SECRET)) + cipher.finalize()
    mac = hmac.digest(kdfa(seed, b"INTEGRITY", b"", 256), hidden + name, "sha256")
    return sized(mac) + hidden, sized(here[:32]) + sized(here[32:])


def ek_chain(
    key: ec.EllipticCurvePrivateKey, *, use: str = "2.23.133.8.1", names: Any = TPM_NAMES, agrees: bool = True,
    ends: int = 2045, signer: str = "tpm line", unknown: bool = False,
) -> tuple[list[x509.Certificate], x509.Certificate]:  # fmt: skip
    """An endorsement certificate under a line under a root."""

    def named(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    def certificate(subject: x509.Name, issuer: str, public: Any, end: int) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder().subject_name(subject).issuer_name(named(issuer)).public_key(public)
            .serial_number(int.from_bytes(hashlib.sha256(subject.public_bytes() + issuer.encode()).digest()[:8], "big") + 1)
            .not_valid_before(datetime.datetime(2025, 1, 1, tzinfo=datetime.UTC))
            .not_valid_after(datetime.datetime(end, 1, 1, tzinfo=datetime.UTC))
        )  # fmt: skip

    def authority(subject: str, issuer: str) -> x509.Certificate:
        made = certificate(named(subject), issuer, private(subject, ec.SECP384R1()).public_key(), 2045)
        made = made.add_extension(x509.BasicConstraints(True, None), critical=True).add_extension(
            x509.KeyUsage(False, False, False, False, False, True, False, False, False), critical=True
        )
        return made.sign(private(issuer, ec.SECP384R1()), hashes.SHA384(), ecdsa_deterministic=True)

    leaf = certificate(x509.Name([]), "tpm line", key.public_key(), ends)
    leaf = leaf.add_extension(x509.BasicConstraints(False, None), critical=True).add_extension(
        x509.KeyUsage(not agrees, False, False, False, agrees, False, False, False, False), critical=True
    )
    leaf = leaf.add_extension(x509.ExtendedKeyUsage([x509.ObjectIdentifier(use)]), critical=False)
    told = x509.Name(
        [x509.NameAttribute(x509.ObjectIdentifier(f"2.23.133.2.{at}"), text) for at, text in names]
    )
    leaf = leaf.add_extension(x509.SubjectAlternativeName([x509.DirectoryName(told)]), critical=True)
    if unknown:
        leaf = leaf.add_extension(
            x509.UnrecognizedExtension(x509.ObjectIdentifier("1.2.3"), b"\5\0"), critical=True
        )
    made = leaf.sign(private(signer, ec.SECP384R1()), hashes.SHA384(), ecdsa_deterministic=True)
    return [made, authority("tpm line", "tpm root")], authority("tpm root", "tpm root")


def enrolment(half: int = 32, **change: Any) -> Case:
    """The case of an honest request and its answer; ``change`` replaces parts of it."""
    endorsement = private("endorsement", ec.SECP256R1())
    chain, root = ek_chain(endorsement, **change.get("certificate", {}))
    signer = TpmKey("attestation", half, change.get("bits", BOUND | RESTRICTED | SIGN | USER), ENDORSEMENT)
    pem = "".join(each.public_bytes(Encoding.PEM).decode() for each in chain[: change.get("shown", 2)])
    request = canonical(
        {"attestation_key": signer.public.hex(), "endorsement": pem, "format": "tallystick/tpm-enrolment-request/1",
         **change.get("fields", {})}
    )  # fmt: skip
    blob, seed = credential(endorsement, signer.name)
    named = frame("tallystick/tpm-enrolment-request/1", request)
    case: Case = {
        "request": request.decode(), "root": root.public_bytes(Encoding.PEM).decode(), "at": change.get("at", NOW),
        "ephemeral": f"{EPHEMERAL:x}", "secret": SECRET.hex(),
        "answer": frame("tallystick/tpm-answer/1", named, change.get("read", SECRET)).hex(),
    }  # fmt: skip
    if "reason" in change:
        return {**case, "reason": change["reason"]}
    der = chain[0].public_bytes(Encoding.DER)
    facts = {
        "credential": blob.hex(), "seed": seed.hex(), "name": signer.name.hex(), "certificate": hashlib.sha256(der).hexdigest(),
        "tpm": [text for _, text in TPM_NAMES],
    }  # fmt: skip
    return {**case, "facts": facts}


def enrolment_cases() -> dict[str, tuple[str, Case]]:
    def bad(why: str, reason: str, **change: Any) -> tuple[str, Case]:
        return why, enrolment(reason=reason, **change)

    other_maker = ((1, "TALY"), *TPM_NAMES[1:])
    return {
        "p256": ("An attestation key on P-256, under an endorsement key on P-256.", enrolment()),
        "p384": ("An attestation key on P-384: its name decides, not its curve.", enrolment(48)),
        "other-secret_fail": bad("The answer of a TPM that read another secret.", "the answer is not that", read=bytes(32)),
        "unrestricted_fail": bad("A key that signs whatever it is given.", "attributes are", bits=BOUND | SIGN | USER),
        "not-fixed_fail": bad("A key that can leave its TPM.", "attributes are", bits=RESTRICTED | SIGN | USER),
        "other-use_fail": bad("A certificate of another use.", "must be for 2.23.133.8.1", certificate={"use": "2.23.133.8.3"}),
        "signs-data_fail": bad("Its key usage is to sign.", "none of a key that agrees keys", certificate={"agrees": False}),
        "no-version_fail": bad("It does not name the version.", "must name 2.23.133.2.3", certificate={"names": TPM_NAMES[:2]}),
        "maker-twice_fail": bad("Two makers.", "names it 2 times", certificate={"names": (*TPM_NAMES, TPM_NAMES[0])}),
        "maker-in-letters_fail": bad("No identifier.", "id: and eight digits", certificate={"names": other_maker}),
        "expired_fail": bad("It held until 2026.", "the moment is", certificate={"ends": 2026}),
        "not-yet_fail": bad("Before it begins.", "the moment is", at=1_700_000_000),
        "other-signer_fail": bad("Signed by somebody else.", "is not signed by", certificate={"signer": "nobody"}),
        "no-line_fail": bad("The issuer is missing.", "is not signed by", shown=1),
        "unknown-extension_fail": bad("It might forbid this use.", "critical extension 1.2.3", certificate={"unknown": True}),
        "further-field_fail": bad("It might ask for something.", "unknown", fields={"more": 1}),
        "no-certificate_fail": bad("Nothing vouches for the TPM.", "no certificates in PEM", fields={"endorsement": ""}),
    }  # fmt: skip


# -- devices -----------------------------------------------------------------------------------------

FIRMWARE = hashlib.sha384(b"device firmware").digest()


def name_of(text: str) -> x509.Name:
    names = [x509.NameAttribute(NameOID.COMMON_NAME, text)]
    return x509.Name(names + [x509.NameAttribute(NameOID.SERIAL_NUMBER, "0042")] * (text == "device"))


def issue(subject: str, issuer: str, **change: Any) -> x509.Certificate:
    curve = change.get("curve", ec.SECP384R1())
    is_ca = change.get("is_ca", True)
    usage = x509.KeyUsage(
        not is_ca,
        False,
        False,
        False,
        False,
        change.get("signs", is_ca),
        change.get("lists", False),
        False,
        False,
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


# -- revocation --------------------------------------------------------------------------------------


def revoked(issuer: str, *serials: int, **change: Any) -> x509.CertificateRevocationList:
    """A list of ``issuer``, from 2025 to 2045 unless ``change`` says otherwise."""
    builder = (
        x509.CertificateRevocationListBuilder().issuer_name(name_of(issuer))
        .last_update(datetime.datetime(change.get("since", 2025), 1, 1, tzinfo=datetime.UTC))
        .next_update(datetime.datetime(change.get("until", 2045), 1, 1, tzinfo=datetime.UTC))
    )  # fmt: skip
    for serial in serials:
        moment = datetime.datetime(2025, 6, 1, tzinfo=datetime.UTC)
        builder = builder.add_revoked_certificate(
            x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(moment).build()
        )
    if change.get("delta"):
        builder = builder.add_extension(x509.DeltaCRLIndicator(1), critical=True)
    return builder.sign(
        private(change.get("signer", issuer), ec.SECP384R1()), hashes.SHA384(), ecdsa_deterministic=True
    )


def revocation_cases() -> dict[str, tuple[str, Case]]:
    """Device, line and root; serial numbers are 7 and 5, one more than the length of a name."""
    lists_too = {"lists": True}
    below = chain(device=lists_too, line=lists_too)[1:3]
    root = issue("root", "root", lists=True)
    silent = issue("root", "root")

    def case(*lists: x509.CertificateRevocationList, pinned: x509.Certificate = root, **more: Any) -> Case:
        return {
            "chain": "".join(each.public_bytes(Encoding.PEM).decode() for each in below),
            "root": pinned.public_bytes(Encoding.PEM).decode(),
            "lists": [each.public_bytes(Encoding.DER).hex() for each in lists], "at": NOW, "required": False, **more,
        }  # fmt: skip

    def known(status: str, *names: str) -> Case:
        return {"facts": {"status": status, "not_checked": list(names)}}

    def bad(why: str, reason: str, *lists: x509.CertificateRevocationList, **more: Any) -> tuple[str, Case]:
        return why, {**case(*lists, **more), "reason": reason}

    line, top = revoked("line"), revoked("root")
    device_name, line_name = (each.subject.rfc4514_string() for each in below)
    return {
        "none-given": ("Nothing is known, and said so.", {**case(), **known("not checked", device_name, line_name)}),
        "one-given": ("The line's list alone.", {**case(line), **known("not checked", line_name)}),
        "all-given": ("A list for each, and all are asked for.", {**case(line, top, required=True), **known("checked")}),
        "others-revoked": (
            "Other numbers, and this number of another issuer.",
            {**case(revoked("line", 5, 8), revoked("root", 7), revoked("elsewhere", 5, 7)), **known("checked")},
        ),
        "device-revoked_fail": bad("The device.", "certificate 7 ", revoked("line", 7), top),
        "line-revoked_fail": bad("The line.", "certificate 5 ", line, revoked("root", 5)),
        "revoked-in-an-old-list_fail": bad(
            "A newer list does not name it, one that is no longer in force does.", "certificate 7 ",
            line, revoked("line", 7, until=2026), top,
        ),
        "no-longer-in-force_fail": bad("Who has no newer one?", "the moment is", revoked("line", until=2026), top),
        "not-yet-in-force_fail": bad("It begins in 2030.", "the moment is", revoked("line", since=2030), top),
        "other-signature_fail": bad("Anybody can write a name.", "is not signed by", revoked("line", signer="nobody"), top),
        "may-not-list_fail": bad("Its key usage has no cRLSign.", "must not sign revocation lists", line, top, pinned=silent),
        "delta_fail": bad("What changed since another list.", "critical extension", revoked("line", delta=True), top),
        "missing-and-asked-for_fail": bad("The root's list is missing.", "must be checked", line, required=True),
    }  # fmt: skip


# -- messages ----------------------------------------------------------------------------------------


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
