"""What a TPM 2.0 states about a chip's device key and log, verified offline (spec/chip-log.md 7).

    found = verify_tpm(parse_tpm_evidence(data), question, reference)

Two statements, both signed by an attestation key that the reader knows beforehand: that the device key lies in the same TPM
and cannot leave it (TPM2_Certify), and what had booted when the log's head was asked for (TPM2_Quote over the reader's
nonce). Structures follow the TCG's "Trusted Platform Module Library, Part 2: Structures", 1.59; all numbers big-endian.
Pure: no TPM is needed to verify. ``tallystick.integrations.tpm`` is what speaks to one.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from tallystick.commit.codec import Document
from tallystick.commit.field_rules import Hex, Match, hexed
from tallystick.errors import InvalidInput
from tallystick.signing.keys import P256, P384, PublicKey

EVIDENCE_FORMAT = "tallystick/tpm-evidence/1"
REFERENCE_FORMAT = "tallystick/pcr-reference/1"
CERTIFY_TAG, QUOTE_TAG = "tallystick/tpm-certify/1", "tallystick/tpm-quote/1"
EVIDENCE_LIMIT = 1 << 16

MAGIC = b"\xffTCG"  # TPM_GENERATED_VALUE: no restricted key signs other data that begins so
CERTIFY, QUOTE = 0x8017, 0x8018  # TPM_ST_ATTEST_CERTIFY, TPM_ST_ATTEST_QUOTE
ECC, ECDSA, NULL = 0x0023, 0x0018, 0x0010  # TPM_ALG_ID
HASHES = {0x000B: "sha256", 0x000C: "sha384"}
CURVES = {3: (P256, 32, 0x000B), 4: (P384, 48, 0x000C)}  # TPM_ECC_CURVE: algorithm, bytes of a number, hash
HIERARCHIES = {"owner": 0x40000001, "endorsement": 0x4000000B, "platform": 0x4000000C}
LARGEST_DATA = 64  # bytes of qualifying data; the standard's limit is a digest's size
PCRS = 24
NAME_BYTES = (34, 50)  # of a key's name under SHA-256 and SHA-384

FIXED_TPM, FIXED_PARENT, ORIGIN = 1 << 1, 1 << 4, 1 << 5  # TPMA_OBJECT
RESTRICTED, DECRYPT, SIGN = 1 << 16, 1 << 17, 1 << 18
BOUND = FIXED_TPM | FIXED_PARENT | ORIGIN  # made in the TPM, and neither it nor its parent can leave


@dataclass(frozen=True)
class TpmPublic:
    """The public area of a signing key on a TPM (TPMT_PUBLIC, ECC with ECDSA).

    Attributes:
        name_hash: TPM_ALG_ID of the hash in the key's name.
        attributes: TPMA_OBJECT.
        policy: digest of an authorisation policy, or empty.
        curve: TPM_ECC_CURVE, 3 (P-256) or 4 (P-384).
        x, y: the point, each as long as the curve's numbers.
    """

    name_hash: int
    attributes: int
    policy: bytes
    curve: int
    x: bytes
    y: bytes

    def encode(self) -> bytes:
        """Return the one encoding."""
        scheme = struct.pack(">5H", NULL, ECDSA, CURVES[self.curve][2], self.curve, NULL)
        return (
            struct.pack(">HHI", ECC, self.name_hash, self.attributes)
            + _sized(self.policy)
            + scheme
            + _sized(self.x)
            + _sized(self.y)
        )

    def name(self) -> bytes:
        """Return the key's name: the hash's identifier and the digest of the public area."""
        return struct.pack(">H", self.name_hash) + hashlib.new(HASHES[self.name_hash], self.encode()).digest()

    def qualified_name(self, hierarchy: str) -> bytes:
        """Return the name that the key has as a primary key of ``hierarchy``."""
        hashed = hashlib.new(HASHES[self.name_hash], struct.pack(">I", HIERARCHIES[hierarchy]) + self.name())
        return struct.pack(">H", self.name_hash) + hashed.digest()

    def key(self) -> PublicKey:
        """Return the key that signatures are checked with.

        Raises:
            InvalidInput: the point is not on its curve.
        """
        algorithm, _, _ = CURVES[self.curve]
        curve = ec.SECP256R1() if algorithm == P256 else ec.SECP384R1()
        numbers = ec.EllipticCurvePublicNumbers(
            int.from_bytes(self.x, "big"), int.from_bytes(self.y, "big"), curve
        )
        try:
            found = numbers.public_key()
        except ValueError:
            raise InvalidInput("TPM key: the point is not on its curve") from None
        return PublicKey(algorithm, found.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo))


@dataclass(frozen=True)
class Certified:
    """What TPM2_Certify states: the name of a key that the TPM holds."""

    name: bytes
    qualified_name: bytes

    def encode(self) -> bytes:
        """Return the one encoding (TPMS_CERTIFY_INFO)."""
        return _sized(self.name) + _sized(self.qualified_name)


@dataclass(frozen=True)
class Quoted:
    """What TPM2_Quote states: which registers of one bank were read, ascending, and the digest over them."""

    bank: int
    registers: tuple[int, ...]
    digest: bytes

    def encode(self) -> bytes:
        """Return the one encoding (TPMS_QUOTE_INFO)."""
        mask = sum(1 << register for register in self.registers)
        return struct.pack(">IHB", 1, self.bank, PCRS // 8) + mask.to_bytes(3, "little") + _sized(self.digest)


@dataclass(frozen=True)
class TpmStatement:
    """What a TPM signed (TPMS_ATTEST).

    Attributes:
        signer: qualified name of the attestation key.
        data: qualifying data of whoever asked.
        clock: milliseconds that the TPM was powered.
        resets, restarts: how often it was reset, and resumed since.
        safe: whether the clock cannot have run backwards.
        firmware: version of the TPM's own.
        content: what is stated.
    """

    signer: bytes
    data: bytes
    clock: int
    resets: int
    restarts: int
    safe: bool
    firmware: int
    content: Certified | Quoted

    def encode(self) -> bytes:
        """Return the one encoding: the bytes that the TPM signed."""
        kind = CERTIFY if isinstance(self.content, Certified) else QUOTE
        return (
            MAGIC
            + struct.pack(">H", kind)
            + _sized(self.signer)
            + _sized(self.data)
            + struct.pack(">QIIBQ", self.clock, self.resets, self.restarts, self.safe, self.firmware)
            + self.content.encode()
        )


class _Reader:
    """Takes fields off the front of bytes that somebody sent."""

    def __init__(self, data: bytes, what: str) -> None:
        self.data, self.what, self.at = data, what, 0

    def take(self, size: int, name: str) -> bytes:
        if self.at + size > len(self.data):
            left = len(self.data) - self.at
            raise InvalidInput(f"{self.what}: {name} has {size} bytes, {left} are left")
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, size: int, name: str) -> int:
        return int.from_bytes(self.take(size, name), "big")

    def one_of(self, allowed: Mapping[int, object] | tuple[int, ...], name: str, *, size: int = 2) -> int:
        value = self.number(size, name)
        if value not in allowed:
            raise InvalidInput(
                f"{self.what}: {name} is {value:#x}, must be {' or '.join(f'{v:#x}' for v in allowed)}"
            )
        return value

    def sized(self, name: str, sizes: tuple[int, ...] | range) -> bytes:
        size = self.number(2, f"the length of {name}")
        if size not in sizes:
            raise InvalidInput(f"{self.what}: {name} must not have {size} bytes")
        return self.take(size, name)

    def name(self, name: str) -> bytes:
        found = self.sized(name, NAME_BYTES)
        known = HASHES.get(int.from_bytes(found[:2], "big"))
        if known is None or len(found) != 2 + hashlib.new(known).digest_size:
            raise InvalidInput(f"{self.what}: {name} is no name under SHA-256 or SHA-384")
        return found

    def end(self) -> None:
        if self.at != len(self.data):
            raise InvalidInput(f"{self.what}: {len(self.data) - self.at} bytes follow")


def parse_tpm_public(data: bytes, *, what: str = "TPM key") -> TpmPublic:
    """Return the public area whose encoding is exactly ``data``.

    Raises:
        InvalidInput: malformed, another kind of key, or a point that is not on its curve.
    """
    reader = _Reader(data, what)
    reader.one_of((ECC,), "the type")
    name_hash = reader.one_of(HASHES, "the name's hash")
    attributes = reader.number(4, "the attributes")
    policy = reader.sized("the policy", (0, hashlib.new(HASHES[name_hash]).digest_size))
    reader.one_of((NULL,), "the symmetric cipher")
    reader.one_of((ECDSA,), "the scheme")
    hashed = reader.one_of(HASHES, "the scheme's hash")
    curve = reader.one_of(CURVES, "the curve")
    _, size, wanted = CURVES[curve]
    if hashed != wanted:
        raise InvalidInput(f"{what}: {HASHES[hashed]} does not go with this curve, {HASHES[wanted]} does")
    reader.one_of((NULL,), "the key derivation")
    x, y = reader.sized("x", (size,)), reader.sized("y", (size,))
    reader.end()
    found = TpmPublic(name_hash, attributes, policy, curve, x, y)
    found.key()
    return found


def parse_tpm_statement(data: bytes, *, what: str = "TPM statement") -> TpmStatement:
    """Return the statement whose encoding is exactly ``data``.

    Raises:
        InvalidInput: malformed, not made by a TPM, or neither a certification nor a quote of one bank.
    """
    reader = _Reader(data, what)
    if reader.take(4, "the magic") != MAGIC:
        raise InvalidInput(
            f"{what}: begins with {data[:4].hex()}, what a TPM makes begins with {MAGIC.hex()}"
        )
    kind = reader.one_of((CERTIFY, QUOTE), "the kind")
    signer = reader.name("the signer's name")
    extra = reader.sized("the qualifying data", range(LARGEST_DATA + 1))
    clock, resets = reader.number(8, "the clock"), reader.number(4, "the resets")
    restarts = reader.number(4, "the restarts")
    safe = reader.one_of((0, 1), "the clock's safety", size=1)
    firmware = reader.number(8, "the firmware's version")
    if kind == CERTIFY:
        content: Certified | Quoted = Certified(reader.name("the key's name"), reader.name("its full name"))
    else:
        reader.one_of((1,), "the number of banks", size=4)
        bank = reader.one_of(HASHES, "the bank")
        reader.one_of((PCRS // 8,), "the length of the selection", size=1)
        mask = int.from_bytes(reader.take(3, "the selection"), "little")
        registers = tuple(register for register in range(PCRS) if mask >> register & 1)
        content = Quoted(bank, registers, reader.sized("the registers' digest", (32, 48)))
    reader.end()
    return TpmStatement(signer, extra, clock, resets, restarts, bool(safe), firmware, content)


Registers = tuple[tuple[int, Annotated[bytes, Hex()]], ...]
Signed = tuple[Annotated[TpmStatement, hexed(parse_tpm_statement)], Annotated[bytes, Hex()]]


@dataclass(frozen=True)
class TpmEvidence(Document, form=EVIDENCE_FORMAT, what="TPM evidence", limit=EVIDENCE_LIMIT):
    """What an owner hands over: both public areas, both statements with their signatures (r, then s), the registers.

    Raises:
        InvalidInput: a statement in the other's place, a signature of another length, or other registers than were quoted.
    """

    attestation_key: Annotated[TpmPublic, hexed(parse_tpm_public)]
    device_key: Annotated[TpmPublic, hexed(parse_tpm_public)]
    certification: Signed
    quote: Signed
    registers: Registers

    def __post_init__(self) -> None:
        super().__post_init__()
        what, content = self.label(), self.quote[0].content
        size = 2 * CURVES[self.attestation_key.curve][1]
        for name, (_, signature) in (("certification", self.certification), ("quote", self.quote)):
            if len(signature) != size:
                raise InvalidInput(
                    f"{what}: signature of {name} must have {size} bytes, has {len(signature)}"
                )
        if not isinstance(self.certification[0].content, Certified) or not isinstance(content, Quoted):
            raise InvalidInput(f"{what}: a certification and a quote are needed, in their places")
        _check_registers(self.registers, HASHES[content.bank], what)
        if tuple(register for register, _ in self.registers) != content.registers:
            raise InvalidInput(f"{what}: other registers than those that were quoted")


@dataclass(frozen=True)
class PcrReference(Document, form=REFERENCE_FORMAT, what="PCR reference", limit=EVIDENCE_LIMIT):
    """What a machine must have booted: values of registers of one bank, from a machine that the reader trusts.

    Raises:
        InvalidInput: no register, one twice or out of order, or a value of another length.
    """

    bank: Annotated[str, Match(re.compile("|".join(HASHES.values())), " or ".join(HASHES.values()))]
    registers: Registers

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_registers(self.registers, self.bank, self.label())
        if not self.registers:
            raise InvalidInput(f"{self.label()}: names no register, so nothing that booted would be compared")


def _sized(data: bytes) -> bytes:
    return struct.pack(">H", len(data)) + data


def _check_registers(registers: Registers, bank: str, what: str) -> None:
    size = hashlib.new(bank).digest_size
    for register, value in registers:
        if not 0 <= register < PCRS or len(value) != size:
            raise InvalidInput(
                f"{what}: register {register} with {len(value)} bytes: must be below {PCRS}, with {size} bytes"
            )
    numbers = [register for register, _ in registers]
    if numbers != sorted(set(numbers)):
        raise InvalidInput(f"{what}: registers must be in order, each once")
