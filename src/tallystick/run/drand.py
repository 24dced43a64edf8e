"""drand's beacon: which second a round is published at, and whether a signature is that round's.

The League of Entropy's network ``quicknet`` signs the SHA-256 of a round's number (eight bytes, big-endian) with BLS on curve
BLS12-381, signatures in G1 and its key in G2 (drand's scheme ``bls-unchained-g1-rfc9380``; hash to curve: RFC 9380, 8.8.1).
What a round says is the SHA-256 of its signature. https://docs.drand.love/docs/specification
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from hashlib import sha256

from tallystick.errors import InvalidInput, Mismatch

SIGNATURE_BYTES = 48  # of a point of G1, compressed
TAG = b"BLS_SIG_BLS12381G1_XMD:SHA-256_SSWU_RO_NUL_"


@dataclass(frozen=True)
class DrandNetwork:
    """A network by the name that announcements call it.

    Attributes:
        source: that name.
        key: the network's, a point of G2, compressed.
        genesis: the UTC second of round 1.
        period: seconds between two rounds.
    """

    source: str
    key: bytes
    genesis: int
    period: int

    def time_of(self, number: int) -> int:
        """Return the UTC second at which a round is published.

        Raises:
            InvalidInput: there is no round 0.
        """
        if number < 1:
            raise InvalidInput(f"{self.source}: round {number}: rounds count from 1")
        return self.genesis + (number - 1) * self.period

    def value_of(self, number: int, signature: bytes) -> bytes:
        """Return the 32 bytes that a round says.

        Raises:
            InvalidInput: no signature, or the library that verifies it is not installed.
            Mismatch: it is not the round's.
        """
        if len(signature) != SIGNATURE_BYTES:
            raise InvalidInput(
                f"{self.source}: a round's signature has {SIGNATURE_BYTES} bytes, given are {len(signature)}; what a round "
                "says is made of it"
            )
        message = sha256(number.to_bytes(8, "big")).digest()
        if not _is_signed(message, signature, self.key):
            raise Mismatch(f"{self.source}: the signature given is not of round {number}")
        return sha256(signature).digest()


QUICKNET = DrandNetwork(
    "drand/quicknet",
    bytes.fromhex(
        "83cf0f2896adee7eb8b5f01fcad3912212c437e0073e911fb90022d3e760183c8c4b450b6a0a6c3ac6a5776a2d106451"
        "0d1fec758c921cc22b0e17e63aaf4bcb5ed66304de9cf809bd274ca73bab4af5a6e9c76a4bc09e76eae8991ef5ece45a"
    ),
    1692803367,
    3,
)
NETWORKS = {each.source: each for each in (QUICKNET,)}


def verify_time(source: str, number: int, second: int) -> None:
    """Return if a round is published at that second, as far as its source is known here.

    Raises:
        InvalidInput: it is another second; with both.
    """
    network = NETWORKS.get(source)
    if network is not None and (own := network.time_of(number)) != second:
        raise InvalidInput(f"{source}: round {number} is published at {own}, stated is {second}")


def spoken(source: str, number: int, given: bytes) -> bytes:
    """Return what a beacon said in a round: of a known network by the signature ``given``, else what is given as it is.

    Raises:
        InvalidInput, Mismatch: as ``DrandNetwork.value_of``.
    """
    network = NETWORKS.get(source)
    return given if network is None else network.value_of(number, given)


def _is_signed(message: bytes, signature: bytes, key: bytes) -> bool:
    deepest = sys.getrecursionlimit()
    try:
        names = ("bls.g2_primitives", "bls.hash_to_curve", "bls.point_compression", "optimized_bls12_381")
        primitives, hashing, points, curve = (importlib.import_module(f"py_ecc.{name}") for name in names)
    except ImportError as problem:
        raise InvalidInput(
            "drand's signatures are verified by py_ecc: pip install tallystick[drand]"
        ) from problem
    finally:
        sys.setrecursionlimit(
            deepest
        )  # which it raises to what no stack has room for: a nested document would end the process
    number, *of_key = (int.from_bytes(part, "big") for part in (signature, key[:48], key[48:]))
    try:
        point = points.decompress_G1(number)
        if not primitives.subgroup_check(point):
            return False
    except ValueError:  # no point of the curve
        return False
    own = hashing.hash_to_G1(message, TAG, sha256)
    return bool(curve.pairing(curve.G2, point) == curve.pairing(points.decompress_G2(tuple(of_key)), own))
