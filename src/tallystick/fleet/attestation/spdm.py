"""What an accelerator states about itself over SPDM, read and verified offline from a file (spec/chip-log.md 8).

    (evidence,) = parse_device_file(data)
    facts = verify_device(evidence, DeviceQuestion(root, nonce, at), reference)

The file has the form that NVIDIA's tools write: for each device its certificates and one exchange of GET_MEASUREMENTS
and MEASUREMENTS (DMTF DSP0274 1.1.0, 10.11). What it shows: a genuine device answered the nonce with these measurements of
its own firmware. What it does not show: what was computed on the device, or that its firmware logs snapshots.
Little-endian numbers; pure.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, cast

from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature

from tallystick.commit.codec import Document
from tallystick.commit.encoding import digest, parse_hex, parse_json
from tallystick.commit.field_rules import At, Hex, Size
from tallystick.errors import InvalidInput, Mismatch
from tallystick.fleet.agent.chip_log import ChipHead
from tallystick.fleet.attestation.certificates import Certificate, parse_chain, verify_chain
from tallystick.signing.keys import P384, PublicKey

NONCE_TAG, UEID_TAG = "tallystick/device-nonce/1", "tallystick/device-ueid/1"
REFERENCE_FORMAT = "tallystick/measurement-reference/1"
FILE_LIMIT, MESSAGE_LIMIT = 1 << 22, 1 << 16
MOST_DEVICES = 64
VERSION, GET_MEASUREMENTS, MEASUREMENTS = 0x11, 0xE0, 0x60  # DSP0274 1.1.0, tables 4 and 5
SIGNED, ALL = 0x01, 0xFF  # Param1: a signature is wanted; Param2: all measurements
NONCE_BYTES, REQUEST_BYTES, SIGNATURE_BYTES = 32, 37, 96
DMTF, RAW = 0x01, 0x80  # measurement specification; bit 7 of a value's type: not a digest
DIGEST_BYTES = 48  # SHA-384
LARGEST_OPAQUE = 1024  # DSP0274 1.1.0, table 45
LARGEST_VALUE = 1024
LEAST_CHAIN = 4  # leaf (firmware), device, issuers, root
DEVICE_AT = 1  # the certificate of the device itself; the leaf's key changes with the firmware (DICE)
FIRMWARE_ID = 20  # of NVIDIA's opaque fields: the firmware's digest, which the leaf's certificate repeats
TCB_INFO = "2.23.133.5.4.1"  # TCG DICE attestation architecture: what a certificate says about its firmware
TEXT_FIELDS = {3: "driver", 15: "chip", 17: "project", 18: "project_sku"}
VBIOS = 6  # eight bytes, shown as 96.00.9F.00.01


@dataclass(frozen=True)
class Measurement:
    """One measured value: its index, what it is of (bit 7: raw bytes instead of a digest), and the value."""

    index: int
    kind: int
    value: bytes

    def encode(self) -> bytes:
        """Return the one encoding of its block."""
        inner = bytes([self.kind]) + len(self.value).to_bytes(2, "little") + self.value
        return bytes([self.index, DMTF]) + len(inner).to_bytes(2, "little") + inner


@dataclass(frozen=True)
class SpdmExchange:
    """A request for all measurements with a signature, and the answer (DSP0274 1.1.0, 10.11).

    Attributes:
        nonce: the asker's.
        slot: which of the device's chains signs.
        answer: Param1 and Param2 of the response.
        measurements: in order of their indices.
        device_nonce: the device's own.
        opaque: the maker's own fields.
        signature: r, then s, 48 bytes each, big-endian.
    """

    nonce: bytes
    slot: int
    answer: bytes
    measurements: tuple[Measurement, ...]
    device_nonce: bytes
    opaque: bytes
    signature: bytes

    def covered(self) -> bytes:
        """Return the bytes that the signature covers: the request, and the response without its signature."""
        record = b"".join(measurement.encode() for measurement in self.measurements)
        return (
            bytes([VERSION, GET_MEASUREMENTS, SIGNED, ALL])
            + self.nonce
            + bytes([self.slot])
            + bytes([VERSION, MEASUREMENTS])
            + self.answer
            + bytes([len(self.measurements)])
            + len(record).to_bytes(3, "little")
            + record
            + self.device_nonce
            + len(self.opaque).to_bytes(2, "little")
            + self.opaque
        )

    def encode(self) -> bytes:
        """Return the one encoding."""
        return self.covered() + self.signature

    def fields(self) -> tuple[tuple[int, bytes], ...]:
        """Return the maker's own fields as (type, value).

        Raises:
            InvalidInput: a field is cut off, or there twice.
        """
        found: dict[int, bytes] = {}
        at = 0
        while at < len(self.opaque):
            head = self.opaque[at : at + 4]
            kind, size = int.from_bytes(head[:2], "little"), int.from_bytes(head[2:], "little")
            value = self.opaque[at + 4 : at + 4 + size]
            if len(head) != 4 or len(value) != size:
                raise InvalidInput(f"measurements: the opaque field at byte {at} is cut off")
            if kind in found:
                raise InvalidInput(f"measurements: opaque field {kind} is there twice")
            found[kind] = value
            at += 4 + size
        return tuple(found.items())


def parse_exchange(data: bytes, *, what: str = "measurements") -> SpdmExchange:
    """Return the exchange whose encoding is exactly ``data``.

    Raises:
        InvalidInput: malformed, another version or message, or values beyond the standard's bounds.
    """
    if len(data) > MESSAGE_LIMIT:
        raise InvalidInput(f"{what}: {len(data)} bytes exceed the limit of {MESSAGE_LIMIT}")
    at = 0

    def take(size: int, name: str) -> bytes:
        nonlocal at
        if at + size > len(data):
            raise InvalidInput(f"{what}: {name} has {size} bytes, {len(data) - at} are left")
        at += size
        return data[at - size : at]

    def number(size: int, name: str) -> int:
        return int.from_bytes(take(size, name), "little")

    asked = take(4, "the request")
    if asked != bytes([VERSION, GET_MEASUREMENTS, SIGNED, ALL]):
        raise InvalidInput(
            f"{what}: the request begins {asked.hex()}, must be 11e001ff (SPDM 1.1, signed, all)"
        )
    nonce, slot = take(NONCE_BYTES, "the nonce"), number(1, "the slot")
    if slot > 7:
        raise InvalidInput(f"{what}: slot {slot} is none of 0 to 7")
    answered = take(2, "the response")
    if answered != bytes([VERSION, MEASUREMENTS]):
        raise InvalidInput(
            f"{what}: the response begins {answered.hex()}, must be 1160 (SPDM 1.1, MEASUREMENTS)"
        )
    answer = take(2, "the response's parameters")
    count, size = number(1, "the number of blocks"), number(3, "the record's length")
    if at + size > len(data):
        raise InvalidInput(f"{what}: the record has {size} bytes, {len(data) - at} are left")
    end = at + size
    found = tuple(_block(take, number, what) for _ in range(count))
    if at != end:
        raise InvalidInput(f"{what}: {count} blocks end at byte {at}, the record ends at {end}")
    if [m.index for m in found] != sorted({m.index for m in found}) or not found:
        raise InvalidInput(f"{what}: blocks must be there, in order of their indices, each once")
    device_nonce = take(NONCE_BYTES, "the device's nonce")
    opaque_size = number(2, "the opaque length")
    if opaque_size > LARGEST_OPAQUE:
        raise InvalidInput(f"{what}: {opaque_size} opaque bytes, the standard allows {LARGEST_OPAQUE}")
    opaque = take(opaque_size, "the opaque data")
    signature = take(SIGNATURE_BYTES, "the signature")
    if at != len(data):
        raise InvalidInput(f"{what}: {len(data) - at} bytes follow")
    return SpdmExchange(nonce, slot, answer, found, device_nonce, opaque, signature)


def _block(take: Callable[[int, str], bytes], number: Callable[[int, str], int], what: str) -> Measurement:
    index, specification = number(1, "a block's index"), number(1, "its specification")
    if index == 0 or specification != DMTF:
        raise InvalidInput(
            f"{what}: block {index} of specification {specification}; must be 1 to 255 of {DMTF} (DMTF)"
        )
    outer, kind, size = number(2, "its length"), number(1, "its type"), number(2, "its value's length")
    if outer != size + 3:
        raise InvalidInput(f"{what}: block {index} has {outer} bytes, its value calls for {size + 3}")
    if size > LARGEST_VALUE or not (kind & RAW or size == DIGEST_BYTES):
        raise InvalidInput(f"{what}: block {index}: a value of type {kind:#x} must not have {size} bytes")
    return Measurement(index, kind, take(size, f"the value of block {index}"))


@dataclass(frozen=True)
class DeviceEvidence:
    """One device's entry of a file: its architecture as stated, its certificates (leaf first), and the exchange."""

    architecture: str
    chain: tuple[Certificate, ...]
    exchange: SpdmExchange


def parse_device_file(data: bytes, *, what: str = "device evidence") -> tuple[DeviceEvidence, ...]:
    """Return the devices in a file as NVIDIA's tools write it: a JSON list of {arch, certificate, evidence, nonce, ..}.

    What stands there besides (versions of driver and VBIOS, say) is nobody's signed word and is left out.

    Raises:
        InvalidInput: malformed, no device or too many, or a stated nonce that is not the request's.
    """
    value = parse_json(data, what=what, limit=FILE_LIMIT)
    if not isinstance(value, list) or not 1 <= len(cast("list[object]", value)) <= MOST_DEVICES:
        raise InvalidInput(f"{what}: must be a list of 1 to {MOST_DEVICES} devices")
    found: list[DeviceEvidence] = []
    for at, item in enumerate(cast("list[object]", value)):
        where = f"{what}: device {at}"
        match item:
            case {
                "arch": str(arch),
                "certificate": str(chain),
                "evidence": str(message),
                "nonce": str(nonce),
            }:
                pass
            case _:
                raise InvalidInput(f"{where}: arch, certificate, evidence and nonce must be there, as text")
        exchange = parse_exchange(_base64(message, where), what=where)
        if parse_hex(nonce.lower(), n_bytes=NONCE_BYTES, what=f"{where}: nonce") != exchange.nonce:
            raise InvalidInput(
                f"{where}: states nonce {nonce[:16]}.., the request has {exchange.nonce.hex()[:16]}.."
            )
        found.append(DeviceEvidence(arch[:40], parse_chain(_base64(chain, where), what=where), exchange))
    return tuple(found)


@dataclass(frozen=True)
class MeasurementReference(Document, form=REFERENCE_FORMAT, what="measurement reference", limit=FILE_LIMIT):
    """Values that a reader accepts: for each index that matters, the digests of known firmware.

    Raises:
        InvalidInput: out of order, or nothing to compare.
    """

    allowed: Annotated[
        tuple[
            tuple[int, Annotated[tuple[Annotated[bytes, Hex(DIGEST_BYTES)], ...], Size(1, FILE_LIMIT)]], ...
        ],
        At("measurements"),
    ]

    def __post_init__(self) -> None:
        super().__post_init__()
        indices = [index for index, _ in self.allowed]
        if not indices or indices != sorted(set(indices)) or not 1 <= indices[0] <= indices[-1] <= 255:
            raise InvalidInput(f"{self.label()}: indices must be there, 1 to 255, in order, each once")


@dataclass(frozen=True)
class DeviceQuestion:
    """What a reader pins and asks: a maker's root, the nonce that the device must answer, and the moment (seconds)."""

    root: Certificate
    nonce: bytes
    at: int


@dataclass(frozen=True)
class DeviceFacts:
    """What a device was found to be, all of it under its maker's signatures.

    Attributes:
        name, serial: of the device's own certificate.
        ueid: the identity that a chip's log must carry to be this device's (``device_ueid``).
        measurements: that it signed.
        compared: indices that the reference names; all of them matched.
        versions: of driver, VBIOS and so on, as the device states them.
    """

    name: str
    serial: str
    ueid: bytes
    measurements: tuple[Measurement, ...]
    compared: tuple[int, ...]
    versions: tuple[tuple[str, str], ...]


def device_ueid(key: PublicKey) -> bytes:
    """Return the UEID of a device: type RAND (RFC 9711 4.2.1.1) with 16 bytes that follow from its own key."""
    return b"\x01" + digest(UEID_TAG, key.spki)[:16]


def device_nonce(ueid: bytes, log_key: PublicKey, head: ChipHead, nonce: bytes) -> bytes:
    """Return the 32 bytes to ask a device with: they name the chip, its log's key and head, and the reader's nonce."""
    place = head.seq.to_bytes(8, "little")
    return digest(NONCE_TAG, ueid, bytes.fromhex(log_key.key_id), place, head.digest, nonce)


def verify_device(
    evidence: DeviceEvidence, question: DeviceQuestion, reference: MeasurementReference | None = None
) -> DeviceFacts:
    """Return what a device states, having checked every link from the pinned root to the measurements.

    Raises:
        Mismatch: another root or nonce, a link or signature that does not hold, or a measurement that is not allowed.
        InvalidInput: a chain too short to hold a device's own certificate, or malformed opaque fields.
    """
    what, chain, exchange = "device evidence", evidence.chain, evidence.exchange
    whole = chain if chain[-1].der == question.root.der else (*chain, question.root)
    if len(whole) < LEAST_CHAIN:
        raise InvalidInput(f"{what}: {len(whole)} certificates; leaf, device, issuer and root are needed")
    verify_chain(chain, question.root, at=question.at, what=what)  # 1
    leaf, device = chain[0], chain[DEVICE_AT]
    if leaf.key.algorithm != P384:
        raise Mismatch(f"{what}: signs with {leaf.key.algorithm}, SPDM evidence is read with {P384}")
    if exchange.nonce != question.nonce:  # 2
        raise Mismatch(
            f"{what}: answers nonce {exchange.nonce.hex()[:16]}.., asked was {question.nonce.hex()[:16]}.."
        )
    half = SIGNATURE_BYTES // 2  # 3
    r, s = (int.from_bytes(exchange.signature[at : at + half], "big") for at in (0, half))
    leaf.key.verify(encode_dss_signature(r, s), exchange.covered(), what=f"{what}: measurements")
    fields = dict(exchange.fields())
    stated = fields.get(FIRMWARE_ID)  # 4
    if stated is not None and not any(
        name == TCB_INFO and len(stated) >= DIGEST_BYTES and stated in value
        for name, value in leaf.extensions
    ):
        raise Mismatch(f"{what}: runs firmware {stated.hex()[:16]}.., its certificate was issued for another")
    held = {measurement.index: measurement for measurement in exchange.measurements}  # 5
    for index, allowed in reference.allowed if reference is not None else ():
        found = held.get(index)
        if found is None or found.value not in allowed:
            shown = "is missing" if found is None else f"is {found.value.hex()[:16]}.."
            raise Mismatch(f"{what}: measurement {index} {shown}, allowed is {allowed[0].hex()[:16]}..")
    return DeviceFacts(
        device.common_name,
        device.serial,
        device_ueid(device.key),
        exchange.measurements,
        tuple(index for index, _ in reference.allowed) if reference is not None else (),
        _versions(fields),
    )


def _versions(fields: Mapping[int, bytes]) -> tuple[tuple[str, str], ...]:
    found = [(name, _text(fields[kind])) for kind, name in TEXT_FIELDS.items() if kind in fields]
    vbios = fields.get(VBIOS, b"")
    if len(vbios) == 8:
        found.append(("vbios", ".".join(f"{vbios[at]:02X}" for at in (3, 2, 1, 0, 4))))
    return tuple(found)


def _text(value: bytes) -> str:
    text = value.rstrip(b"\0").decode("ascii", errors="replace")
    return text if text.isprintable() else value.hex()


def _base64(text: str, what: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as problem:
        raise InvalidInput(f"{what}: is no base64 ({problem})") from None
