"""Keys and signatures: the one seam through which every party signs and every reader verifies.

A key names its algorithm, so a signature is never checked under another one than its key's:

    ed25519       RFC 8032; 64 bytes; logs and statements
    ecdsa-p256    FIPS 186-5 over SHA-256, DER; what OpenSSF model signing asks for
    ecdsa-p384    FIPS 186-5 over SHA-384, DER; devices

What is signed is always bytes that name their purpose (a DSSE pre-authentication encoding, a signed
note, a COSE Sig_structure): this module adds no domain tag. A key on other hardware is another class
with the two members of ``Signer``. Curve arithmetic is the library's (cryptography, OpenSSL).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, cast

from cryptography.exceptions import InternalError, InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes, PublicKeyTypes
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_der_public_key,
    load_pem_private_key,
    load_pem_public_key,
)

from tallystick.errors import InvalidInput, Mismatch

ED25519, P256, P384 = "ed25519", "ecdsa-p256", "ecdsa-p384"
ALGORITHMS = (ED25519, P256, P384)
REFUSED = (ValueError, UnsupportedAlgorithm, InternalError)
"""What the library raises for a key that it cannot read; the last for an X448 key of another length."""
KEY_LIMIT = 16384  # bytes of a PEM or DER key; an encrypted P-384 key has under 500

# Points of order 1, 2, 4 and 8, sign bit cleared, non-canonical spellings too: under such a key one
# signature fits many messages, so it could neither accuse nor bind (RFC 8032 8.4 leaves them to the verifier).
_SMALL_ORDER = frozenset(
    bytes.fromhex(text)
    for text in (
        "0000000000000000000000000000000000000000000000000000000000000000",
        "0100000000000000000000000000000000000000000000000000000000000000",
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
        "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
        "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
        "eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    )
)


@dataclass(frozen=True)
class PublicKey:
    """A key that signatures are checked with: its algorithm and its SubjectPublicKeyInfo in DER."""

    algorithm: str
    spki: bytes

    @property
    def key_id(self) -> str:
        """SHA-256 of the SubjectPublicKeyInfo, 64 hexadecimal digits."""
        return hashlib.sha256(self.spki).hexdigest()

    @property
    def raw(self) -> bytes:
        """The key without wrapping: 32 bytes of Ed25519, or the uncompressed point (65 or 97 bytes)."""
        key = load_der_public_key(self.spki)
        if isinstance(key, ed25519.Ed25519PublicKey):
            return key.public_bytes_raw()
        return key.public_bytes(Encoding.X962, PublicFormat.UncompressedPoint)

    def pem(self) -> bytes:
        """Return the key as PEM text ("BEGIN PUBLIC KEY", RFC 7468)."""
        return load_der_public_key(self.spki).public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)

    def is_signed(self, signature: bytes, message: bytes) -> bool:
        """Return whether ``signature`` over ``message`` was made with this key."""
        key = load_der_public_key(self.spki)
        try:
            if isinstance(key, ed25519.Ed25519PublicKey):
                key.verify(signature, message)
            else:
                cast(ec.EllipticCurvePublicKey, key).verify(signature, message, _ecdsa(self.algorithm))
        except InvalidSignature:
            return False
        return True

    def verify(self, signature: bytes, message: bytes, *, what: str) -> None:
        """Return if ``signature`` over ``message`` was made with this key; ``what`` names it in the error.

        Raises:
            Mismatch: it was not.
        """
        if not self.is_signed(signature, message):
            raise Mismatch(f"{what}: the signature is not of key {self.key_id[:16]}.. ({self.algorithm})")


class Signer(Protocol):
    """Whoever can sign: a key in memory, a TPM, a key service."""

    @property
    def public_key(self) -> PublicKey:
        """The key that readers verify with."""
        ...

    def sign(self, message: bytes) -> bytes:
        """Return a signature over ``message`` in the form of the key's algorithm."""
        ...


@dataclass(frozen=True)
class SigningKey:
    """A private key in memory; it never appears in a representation or message."""

    public_key: PublicKey
    _private: ed25519.Ed25519PrivateKey | ec.EllipticCurvePrivateKey = field(repr=False)

    def sign(self, message: bytes) -> bytes:
        """Return a signature over ``message``."""
        if isinstance(self._private, ed25519.Ed25519PrivateKey):
            return self._private.sign(message)
        return self._private.sign(message, _ecdsa(self.public_key.algorithm, is_signing=True))

    def pem(self, password: bytes | None = None) -> bytes:
        """Return the private key as PKCS #8 PEM, encrypted where a password is given."""
        how = NoEncryption() if password is None else BestAvailableEncryption(password)
        return self._private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, how)


def generate_key(algorithm: str = ED25519) -> SigningKey:
    """Return a new key from the operating system's randomness.

    Raises:
        InvalidInput: an algorithm that is not in ``ALGORITHMS``.
    """
    makers: dict[str, Callable[[], PrivateKeyTypes]] = {
        ED25519: ed25519.Ed25519PrivateKey.generate,
        P256: lambda: ec.generate_private_key(ec.SECP256R1()),
        P384: lambda: ec.generate_private_key(ec.SECP384R1()),
    }
    if algorithm not in makers:
        raise InvalidInput(f"key algorithm {algorithm!r}: must be one of {', '.join(ALGORITHMS)}")
    return _signing_key(makers[algorithm](), "the new key")


def ed25519_key(seed: bytes) -> SigningKey:
    """Return the Ed25519 key of a 32-byte ``seed`` (RFC 8032 5.1.5); for vectors, tests and simulations.

    Raises:
        InvalidInput: another length.
    """
    if len(seed) != 32:
        raise InvalidInput(f"Ed25519 seed: must have 32 bytes, has {len(seed)}")
    return _signing_key(ed25519.Ed25519PrivateKey.from_private_bytes(seed), "the seed's key")


def parse_signing_key(data: bytes, password: bytes | None = None, *, what: str = "private key") -> SigningKey:
    """Return the private key in PEM ``data`` (PKCS #8, or SEC 1 of OpenSSL).

    Raises:
        InvalidInput: not a PEM key, a password missing or wrong, or another algorithm. What the
            file holds is never repeated in the message.
    """
    if len(data) > KEY_LIMIT:
        raise InvalidInput(f"{what}: {len(data)} bytes exceed the limit of {KEY_LIMIT}")
    try:
        key = load_pem_private_key(data, password)
    except TypeError:
        reason = "is encrypted and no password was given" if password is None else "is not encrypted"
        raise InvalidInput(f"{what}: the key {reason}") from None
    except REFUSED:
        raise InvalidInput(f"{what}: is no PEM private key that this password opens") from None
    return _signing_key(key, what)


def parse_public_key(data: bytes, *, what: str = "public key") -> PublicKey:
    """Return the public key in PEM or DER (SubjectPublicKeyInfo) ``data``.

    Raises:
        InvalidInput: malformed, another spelling than DER's one, another algorithm or curve, or an
            Ed25519 point of small order.
    """
    if len(data) > KEY_LIMIT:
        raise InvalidInput(f"{what}: {len(data)} bytes exceed the limit of {KEY_LIMIT}")
    is_pem = data.startswith(b"-----BEGIN")
    try:
        key = load_pem_public_key(data) if is_pem else load_der_public_key(data)
    except REFUSED:
        raise InvalidInput(f"{what}: is no public key in PEM or DER") from None
    public = _public_key(key, what)
    if not is_pem and public.spki != data:
        raise InvalidInput(f"{what}: is another spelling of key {public.key_id[:16]}..")
    return public


def _signing_key(key: PrivateKeyTypes, what: str) -> SigningKey:
    if not isinstance(key, ed25519.Ed25519PrivateKey | ec.EllipticCurvePrivateKey):
        raise InvalidInput(f"{what}: must be one of {', '.join(ALGORITHMS)}, is {type(key).__name__}")
    return SigningKey(_public_key(key.public_key(), what), key)


def _public_key(key: PublicKeyTypes, what: str) -> PublicKey:
    if isinstance(key, ed25519.Ed25519PublicKey):
        raw = key.public_bytes_raw()
        if raw[:31] + bytes([raw[31] & 0x7F]) in _SMALL_ORDER:
            raise InvalidInput(f"{what}: the Ed25519 point {raw.hex()} has small order")
        algorithm = ED25519
    elif isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP256R1):
        algorithm = P256
    elif isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP384R1):
        algorithm = P384
    else:
        raise InvalidInput(f"{what}: must be one of {', '.join(ALGORITHMS)}, is {type(key).__name__}")
    return PublicKey(algorithm, key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo))


def _ecdsa(algorithm: str, *, is_signing: bool = False) -> ec.ECDSA:
    """Signatures are the same twice (RFC 6979) where the library can."""
    hashed = hashes.SHA256() if algorithm == P256 else hashes.SHA384()
    try:
        return ec.ECDSA(hashed, deterministic_signing=is_signing)
    except UnsupportedAlgorithm:
        return ec.ECDSA(hashed)
