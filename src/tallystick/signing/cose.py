"""COSE_Sign1 over deterministic CBOR: what chips and collectors sign (RFC 9052, RFC 8949 4.2.1).

    data = sign1(payload, CHIP_RECORD, signer)
    payload = open_sign1(data, CHIP_RECORD, key, what="record 12", limit=4096)

A value has one encoding: bytes whose re-encoding differs are refused, as are floats, tags, text that is not
UTF-8 and integers beyond 64 bits. The protected header names algorithm, purpose and key, so that a
signature made for one purpose opens nothing else; the unprotected header is empty.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import cbor2
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature

from tallystick.errors import InvalidInput, Mismatch
from tallystick.signing.keys import ED25519, P256, P384, PublicKey, Signer

CHIP_RECORD = "application/vnd.tallystick.chip-record+cbor"
RECEIPT = "application/vnd.tallystick.receipt+cbor"
EAT = "application/eat+cwt"  # RFC 9711 section 4.3.1
ALGORITHMS = {ED25519: -8, P256: -7, P384: -35}  # EdDSA, ES256 and ES384, IANA COSE registry
DEPTH_LIMIT = 8  # nesting of arrays and maps; a record needs two
SIGN1_TAG = 18
_HALVES = {P256: 32, P384: 48}  # bytes of r, and of s


@dataclass(frozen=True)
class OpenedSign1:
    """An opened COSE_Sign1: its payload, the bytes that were signed, and the key's identity."""

    payload: bytes
    covered: bytes
    key_id: bytes


def encode_cbor(value: object) -> bytes:
    """Return the one encoding of ``value``: ints below 2**64, bytes, text, bool, None, lists and maps of them.

    Raises:
        InvalidInput: anything else, or nested deeper than ``DEPTH_LIMIT``.
    """
    _must_be_plain(value, "CBOR", 0)
    return cbor2.dumps(value, canonical=True)


def parse_cbor(data: bytes, *, what: str, limit: int) -> object:
    """Return the value whose one encoding is exactly ``data``, at most ``limit`` bytes.

    Raises:
        InvalidInput: too long, malformed, another spelling of its value, or a type that has no place here.
    """
    if len(data) > limit:
        raise InvalidInput(f"{what}: {len(data)} bytes exceed the limit of {limit}")
    _must_be_shallow(data, what)
    try:
        value: object = cbor2.loads(data)
        _must_be_plain(value, what, 0)
        again = cbor2.dumps(value, canonical=True)
    except (cbor2.CBORError, ValueError, TypeError, OverflowError, RecursionError, MemoryError) as problem:
        raise InvalidInput(f"{what}: is no CBOR of the kinds allowed ({problem})") from None
    if again != data:
        raise InvalidInput(f"{what}: is not the deterministic encoding of its value")
    return value


def sign1(payload: bytes, purpose: str, signer: Signer) -> bytes:
    """Return a tagged COSE_Sign1 of ``payload``, signed by ``signer`` for ``purpose``.

    Raises:
        InvalidInput: a key of another algorithm than ``ALGORITHMS``.
    """
    key = signer.public_key
    protected = _protected(key, purpose)
    signature = signer.sign(_sig_structure(protected, payload))
    if half := _HALVES.get(key.algorithm):
        r, s = decode_dss_signature(signature)
        signature = r.to_bytes(half, "big") + s.to_bytes(half, "big")
    return cbor2.dumps(cbor2.CBORTag(SIGN1_TAG, [protected, {}, payload, signature]), canonical=True)


def peek_sign1(data: bytes, *, what: str, limit: int) -> tuple[bytes, bytes]:
    """Return protected header and payload without looking at the signature; nothing of it is to be believed.

    Raises:
        InvalidInput: not a strict COSE_Sign1.
    """
    protected, payload, _ = _parts(data, what, limit)
    return protected, payload


def open_sign1(data: bytes, purpose: str, key: PublicKey, *, what: str, limit: int) -> OpenedSign1:
    """Return what ``key`` signed for ``purpose`` in ``data``.

    Raises:
        InvalidInput: malformed, or another algorithm or purpose.
        Mismatch: signed by another key, or the signature does not fit.
    """
    protected, payload, signature = _parts(data, what, limit)
    header = parse_cbor(protected, what=f"{what}: protected header", limit=512)
    if not isinstance(header, dict) or set(cast("dict[object, object]", header)) != {1, 3, 4}:
        raise InvalidInput(f"{what}: the protected header must hold algorithm, content type and key id")
    stated = cast("dict[int, object]", header)
    if stated[3] != purpose:
        raise InvalidInput(f"{what}: was signed as {str(stated[3])[:80]!r}, {purpose!r} is needed")
    if stated[4] != bytes.fromhex(key.key_id):
        shown = stated[4].hex()[:16] if isinstance(stated[4], bytes) else "none"
        raise Mismatch(f"{what}: names key {shown}.., must be of key {key.key_id[:16]}..")
    if protected != _protected(key, purpose):
        raise InvalidInput(f"{what}: algorithm {stated[1]!r} is not that of the key ({key.algorithm})")
    covered = _sig_structure(protected, payload)
    if half := _HALVES.get(key.algorithm):
        if len(signature) != 2 * half:
            raise InvalidInput(
                f"{what}: a signature on this curve has {2 * half} bytes, not {len(signature)}"
            )
        r, s = (int.from_bytes(signature[at : at + half], "big") for at in (0, half))
        signature = encode_dss_signature(r, s)
    key.verify(signature, covered, what=what)
    return OpenedSign1(payload, covered, bytes.fromhex(key.key_id))


def covered_bytes(protected: bytes, payload: bytes) -> bytes:
    """Return the bytes a signature covers; two signatures over the same ones are one statement."""
    return _sig_structure(protected, payload)


def _parts(data: bytes, what: str, limit: int) -> tuple[bytes, bytes, bytes]:
    if data[:2] != b"\xd2\x84":
        raise InvalidInput(f"{what}: is no COSE_Sign1 (tag {SIGN1_TAG} and an array of four)")
    value = parse_cbor(data[1:], what=what, limit=limit)
    match value:
        case [bytes(protected), dict() as unprotected, bytes(payload), bytes(signature)] if not unprotected:
            return protected, payload, signature
        case _:
            raise InvalidInput(f"{what}: must be [protected, {{}}, payload, signature]")


def _protected(key: PublicKey, purpose: str) -> bytes:
    if key.algorithm not in ALGORITHMS:
        raise InvalidInput(
            f"key {key.key_id[:16]}..: {key.algorithm} signs no chip log; must be {' or '.join(ALGORITHMS)}"
        )
    header = {1: ALGORITHMS[key.algorithm], 3: purpose, 4: bytes.fromhex(key.key_id)}
    return cbor2.dumps(header, canonical=True)


def _sig_structure(protected: bytes, payload: bytes) -> bytes:
    return cbor2.dumps(["Signature1", protected, b"", payload], canonical=True)


def _must_be_plain(value: object, what: str, depth: int) -> None:
    if value is None or isinstance(value, bool | bytes | str):
        return
    if isinstance(value, int):
        if not -(2**63) <= value < 2**64:
            raise InvalidInput(f"{what}: an integer exceeds 64 bits")
        return
    if depth == DEPTH_LIMIT:
        raise InvalidInput(f"{what}: nested deeper than {DEPTH_LIMIT}")
    if isinstance(value, list):
        for item in cast("list[object]", value):
            _must_be_plain(item, what, depth + 1)
    elif isinstance(value, dict):
        for key, item in cast("dict[object, object]", value).items():
            if isinstance(key, bool) or not isinstance(key, int | str):
                raise InvalidInput(f"{what}: a map's key must be an integer or text")
            _must_be_plain(key, what, depth + 1)
            _must_be_plain(item, what, depth + 1)
    else:
        raise InvalidInput(f"{what}: a {type(value).__name__} has no place here")


def _must_be_shallow(data: bytes, what: str) -> None:
    """Return if the nesting is bounded and every declared length lies within ``data``; reads heads only."""
    at, waiting = 0, [1]
    while waiting:
        if waiting[-1] == 0:
            waiting.pop()
            continue
        waiting[-1] -= 1
        if at >= len(data):
            raise InvalidInput(f"{what}: ends within a value")
        major, short = data[at] >> 5, data[at] & 31
        extra = {24: 1, 25: 2, 26: 4, 27: 8}.get(short, 0)
        if short > 27 or at + 1 + extra > len(data):
            raise InvalidInput(f"{what}: byte {at} begins no value of a definite length")
        number = int.from_bytes(data[at + 1 : at + 1 + extra], "big") if extra else short
        at += 1 + extra
        if major in (2, 3):
            at += number
        elif major in (4, 5):
            items = number * (2 if major == 5 else 1)
            if items > len(data) - at:
                raise InvalidInput(f"{what}: declares {items} items, {len(data) - at} bytes are left")
            if len(waiting) > DEPTH_LIMIT:
                raise InvalidInput(f"{what}: nested deeper than {DEPTH_LIMIT}")
            waiting.append(items)
        elif major == 6 or (major == 7 and short not in (20, 21, 22)):
            raise InvalidInput(f"{what}: byte {at - 1 - extra} begins a tag, float or simple value")
    if at != len(data):
        raise InvalidInput(
            f"{what}: {len(data) - at} bytes follow the value"
            if at < len(data)
            else f"{what}: ends within a value"
        )
