from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from hypothesis import given
from hypothesis import strategies as st

from tallystick.errors import InvalidInput, Mismatch
from tallystick.signing import keys
from tallystick.signing.keys import (
    ALGORITHMS,
    ed25519_key,
    generate_key,
    parse_public_key,
    parse_signing_key,
)

P = 2**255 - 19
D = -121665 * pow(121666, -1, P) % P


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_signature_verifies_under_its_key_and_message_only(algorithm: str) -> None:
    key, other = generate_key(algorithm), generate_key(algorithm)
    signature = key.sign(b"root 41")
    key.public_key.verify(signature, b"root 41", what="step 41")
    assert not key.public_key.is_signed(signature, b"root 42")
    assert not key.public_key.is_signed(signature[:-1], b"root 41")
    assert not key.public_key.is_signed(b"", b"root 41")
    with pytest.raises(Mismatch, match=rf"step 41: the signature is not of key .*{algorithm}"):
        other.public_key.verify(signature, b"root 41", what="step 41")


def test_rfc_8032_vector_2() -> None:
    key = ed25519_key(bytes.fromhex("4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb"))
    assert key.public_key.raw.hex() == "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c"
    assert key.sign(b"\x72").hex() == (
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
        "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
    )
    with pytest.raises(InvalidInput, match="must have 32 bytes, has 31"):
        ed25519_key(bytes(31))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("password", [None, b"long enough"])
def test_keys_come_back_from_their_files(algorithm: str, password: bytes | None) -> None:
    key = generate_key(algorithm)
    again = parse_signing_key(key.pem(password), password)
    assert again.public_key == key.public_key == parse_public_key(key.public_key.pem())
    assert key.public_key == parse_public_key(key.public_key.spki)
    assert key.public_key.is_signed(again.sign(b"x"), b"x")
    assert again.sign(b"x") == key.sign(b"x")
    assert len(key.public_key.raw) == {"ed25519": 32, "ecdsa-p256": 65, "ecdsa-p384": 97}[algorithm]


def test_passwords_that_are_missing_wrong_or_not_needed_are_refused() -> None:
    key = generate_key()
    with pytest.raises(InvalidInput, match="is encrypted and no password was given"):
        parse_signing_key(key.pem(b"right one"))
    with pytest.raises(InvalidInput, match="no PEM private key that this password opens"):
        parse_signing_key(key.pem(b"right one"), b"wrong one")
    with pytest.raises(InvalidInput, match="is not encrypted"):
        parse_signing_key(key.pem(), b"any")


def test_a_key_that_the_library_itself_cannot_explain_is_refused_like_any_other() -> None:
    """Found by fuzzing: the identifier of X448 before the 32 bytes of an Ed25519 key, 57 being wanted."""
    body = "MC4CAQAwBQYDK2VvBCIEIAABAgMEBQYHCAkKCwwNDg8QERITFBUWFxgZGhscHR4f"
    pem = f"-----BEGIN PRIVATE KEY-----\n{body}\n-----END PRIVATE KEY-----\n".encode()
    with pytest.raises(InvalidInput, match="is no PEM private key"):
        parse_signing_key(pem)


def test_a_private_key_is_in_no_representation() -> None:
    key = generate_key()
    body = key.pem().decode().splitlines()[1]
    assert body not in repr(key) + str(key)
    assert "private" not in repr(key).lower()


@pytest.mark.parametrize(
    "key", [rsa.generate_private_key(65537, 2048), ec.generate_private_key(ec.SECP256K1())], ids=["rsa", "k1"]
)
def test_other_algorithms_and_curves_are_refused(key: rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey) -> None:
    with pytest.raises(InvalidInput, match="must be one of ed25519"):
        parse_signing_key(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public = key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    with pytest.raises(InvalidInput, match="must be one of ed25519"):
        parse_public_key(public)


def test_an_unknown_algorithm_is_refused_by_name() -> None:
    with pytest.raises(InvalidInput, match=r"'rsa': must be one of ed25519, ecdsa-p256, ecdsa-p384"):
        generate_key("rsa")


@given(st.binary(max_size=200))
def test_noise_is_no_key(data: bytes) -> None:
    for parse in (parse_public_key, parse_signing_key):
        with pytest.raises(InvalidInput):
            parse(data)


def test_bytes_after_the_key_are_refused() -> None:
    spki = generate_key(keys.P256).public_key.spki
    with pytest.raises(InvalidInput):
        parse_public_key(spki + b"\x00")
    with pytest.raises(InvalidInput, match="20000 bytes exceed the limit"):
        parse_public_key(bytes(20000))


def add(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    """Add two points of edwards25519 (RFC 8032 5.1.4, affine)."""
    (x1, y1), (x2, y2) = a, b
    k = D * x1 * x2 * y1 * y2
    x = (x1 * y2 + x2 * y1) * pow(1 + k, -1, P)
    y = (y1 * y2 + x1 * x2) * pow(1 - k, -1, P)
    return x % P, y % P


def ordinates_of_small_order() -> set[int]:
    """Every y of a point P with 8 P = 0, from the curve's equation: multiples of one point of order 8."""
    order = 2**252 + 27742317777372353535851937790883648493
    y = 2
    while True:
        y += 1
        square = (y * y - 1) * pow(D * y * y + 1, -1, P) % P
        x = pow(square, (P + 3) // 8, P)
        if (x * x - square) % P:
            x = x * pow(2, (P - 1) // 4, P) % P
        if (x * x - square) % P:
            continue
        point, small = (x, y), (0, 1)
        for bit in bin(order)[2:]:
            small = add(small, small)
            if bit == "1":
                small = add(small, point)
        multiples = [small]
        while multiples[-1] != (0, 1):
            multiples.append(add(multiples[-1], small))
        if len(multiples) == 8:
            return {found[1] for found in multiples}


def test_every_point_of_small_order_is_refused_in_every_spelling() -> None:
    """The list in the module is exactly what the curve's own arithmetic gives."""
    spellings = {value for y in ordinates_of_small_order() for value in (y, y + P) if value < 2**255}
    listed = {int.from_bytes(raw, "little") for raw in keys._SMALL_ORDER}
    assert listed == spellings
    prefix = generate_key().public_key.spki[:-32]
    for value in spellings:
        for sign in (0, 1 << 255):
            with pytest.raises(InvalidInput, match=r"small order|no public key"):
                parse_public_key(prefix + (value | sign).to_bytes(32, "little"))


def test_under_a_key_of_small_order_one_signature_would_fit_other_messages() -> None:
    """The control: the library itself takes such a key, and a forged signature with it."""
    key = ed25519.Ed25519PublicKey.from_public_bytes(b"\x01" + bytes(31))
    forged = b"\x01" + bytes(63)  # R the neutral element, s = 0
    key.verify(forged, b"anything")
    key.verify(forged, b"anything else")
