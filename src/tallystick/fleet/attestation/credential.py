"""A secret that only one TPM can read, and only while it holds one key: TPM2_MakeCredential in Python; pure.

    credential = make_credential(endorsement_key, name, secret)      # TPM2_ActivateCredential gives the secret back

Source: TCG, "Trusted Platform Module Library", 1.59, Part 1: key derivation (KDFa, KDFe), credential protection, and
secret sharing under an elliptic curve. The TPM unwraps a seed with its endorsement key, and from the seed and the **name**
of the other key a cipher key and a MAC key: another key's name gives other keys, and the TPM refuses. Whoever answers with the
secret therefore has, in one TPM, the endorsement key and a key of that name.

Endorsement keys on P-256 after the TCG's template L-2 (SHA-256 names, AES-128 in CFB) are supported; no RSA.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.serialization import load_der_public_key

from tallystick.errors import InvalidInput
from tallystick.fleet.attestation.tpm import NAME_BYTES
from tallystick.signing.keys import P256, PublicKey

SECRET_BYTES = 32  # the most that a credential under SHA-256 can hold
CURVE_BYTES = 32
CIPHER_BITS, HASH_BITS = 128, 256
BLOCK = 16


@dataclass(frozen=True)
class Credential:
    """What TPM2_ActivateCredential takes.

    Attributes:
        blob: content of TPM2B_ID_OBJECT: the MAC, sized, and the encrypted secret.
        seed: content of TPM2B_ENCRYPTED_SECRET: the point whose product with the endorsement key gives the seed.
    """

    blob: bytes
    seed: bytes


def make_credential(
    endorsement_key: PublicKey,
    name: bytes,
    secret: bytes,
    *,
    ephemeral: ec.EllipticCurvePrivateKey | None = None,
) -> Credential:
    """Return ``secret`` for the TPM that has ``endorsement_key``, to be read only while it holds the key called ``name``.

    ``ephemeral`` is for tests alone; by default it is fresh.

    Raises:
        InvalidInput: an endorsement key that is not on P-256, a name of another length, or a secret of more than 32 bytes.
    """
    if endorsement_key.algorithm != P256:
        raise InvalidInput(
            f"endorsement key: is {endorsement_key.algorithm}, credentials are made for {P256}"
        )
    if len(name) not in NAME_BYTES or not 0 < len(secret) <= SECRET_BYTES:
        raise InvalidInput(
            f"credential: a name has {NAME_BYTES} bytes, a secret 1 to {SECRET_BYTES}, these have {len(name)} and {len(secret)}"
        )
    theirs = load_der_public_key(endorsement_key.spki)
    if not isinstance(theirs, ec.EllipticCurvePublicKey):
        raise InvalidInput("endorsement key: is no elliptic-curve key")
    mine = ec.generate_private_key(ec.SECP256R1()) if ephemeral is None else ephemeral
    shared = mine.exchange(ec.ECDH(), theirs)
    own, other = _point(mine.public_key()), _point(theirs)
    seed = derive_from_exchange(shared, "IDENTITY", own[0], other[0])
    cipher_key = derive(seed, "STORAGE", name, b"", CIPHER_BITS)
    hidden = _encrypt(cipher_key, _sized(secret))
    mac_key = derive(seed, "INTEGRITY", b"", b"", HASH_BITS)
    mac = hmac.digest(mac_key, hidden + name, "sha256")
    return Credential(_sized(mac) + hidden, _sized(own[0]) + _sized(own[1]))


def derive(key: bytes, label: str, u: bytes, v: bytes, bits: int) -> bytes:
    """Return ``bits`` bits of KDFa under SHA-256: HMAC in counter mode over label, contexts and length."""
    found = b""
    for counter in range(1, -(-bits // HASH_BITS) + 1):
        message = struct.pack(">I", counter) + label.encode("ascii") + b"\0" + u + v + struct.pack(">I", bits)
        found += hmac.digest(key, message, "sha256")
    return found[: bits // 8]


def derive_from_exchange(shared: bytes, label: str, u: bytes, v: bytes) -> bytes:
    """Return the 256 bits of KDFe under SHA-256: the hash of a counter, the shared x, label and both parties' x."""
    message = struct.pack(">I", 1) + shared + label.encode("ascii") + b"\0" + u + v
    return hashlib.sha256(message).digest()


def _encrypt(key: bytes, data: bytes) -> bytes:
    """AES in CFB mode of whole blocks from a zero vector, as a TPM encrypts; block by block."""
    encryptor = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
    found, last = b"", bytes(BLOCK)
    for at in range(0, len(data), BLOCK):
        stream = encryptor.update(last)
        last = bytes(a ^ b for a, b in zip(data[at : at + BLOCK], stream, strict=False))
        found += last
    return found


def _point(key: ec.EllipticCurvePublicKey) -> tuple[bytes, bytes]:
    numbers = key.public_numbers()
    return numbers.x.to_bytes(CURVE_BYTES, "big"), numbers.y.to_bytes(CURVE_BYTES, "big")


def _sized(data: bytes) -> bytes:
    return struct.pack(">H", len(data)) + data
