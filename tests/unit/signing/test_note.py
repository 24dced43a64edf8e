from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tallystick.errors import InvalidInput, Mismatch
from tallystick.signing.keys import ed25519_key, generate_key
from tallystick.signing.note import (
    COSIGNATURE,
    NOTE,
    Note,
    NoteKey,
    NoteSigner,
    parse_note,
    parse_vkey,
)

# The worked example in the documentation of golang.org/x/mod/sumdb/note, where this format comes from.
GO_VKEY = "PeterNeumann+c74f20a3+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW"
GO_TEXT = (
    "If you think cryptography is the answer to your problem,\nthen you don't know what your problem is.\n"
)
GO_LINE = "\u2014 PeterNeumann x08go/ZJkuBS9UG/SffcvIAQxVBtiFupLLr8pAcElZInNIuGUgYN1FFYC2pZSNXgKvqfqdngotpRZb6KE6RyyBwJnAM=\n"
GO_NOTE = (GO_TEXT + "\n" + GO_LINE).encode()
SPEC_VKEY = "example.com/foo+530d903a+AekyeRrm56hApGFkyQR4ZCbV54Id2LKaANYcrnKv3U2k"
SPEC_NOTE = (
    "This is an example message.\n\n\u2014 example.com/foo "
    "Uw2QOkn8srV1yJGh2VYRlL1Tnagv1YEq6TfXppzi2ONncAlTgK7Ztg1ERYNZXsYjOBH3mFXmRKuwHjG1Yu72IneyaQM=\n"
).encode()


def log_signer(number: int = 1, name: str = "log.example/a", kind: int = NOTE) -> NoteSigner:
    key = ed25519_key(bytes([number]) * 32)
    return NoteSigner(NoteKey(name, kind, key.public_key), key)


@pytest.mark.parametrize(("vkey", "note"), [(GO_VKEY, GO_NOTE), (SPEC_VKEY, SPEC_NOTE)])
def test_published_notes_verify_under_their_published_keys(vkey: str, note: bytes) -> None:
    key = parse_vkey(vkey)
    parsed = parse_note(note)
    assert str(key) == vkey
    assert parsed.verify([key]) == {key: None}
    assert parsed.encode() == note
    with pytest.raises(Mismatch, match="signature of"):
        parse_note(note.replace(b"m", b"n", 1)).verify([key])


def test_the_published_key_signs_the_published_bytes() -> None:
    import base64

    seed = base64.b64decode("AYEKFALVFGyNhPJEMzD1QIDr+Y7hfZx09iUvxdXHKDFz")[1:]
    key = ed25519_key(seed)
    signer = NoteSigner(NoteKey("PeterNeumann", NOTE, key.public_key), key)
    assert signer.sign(Note(GO_TEXT)).encode() == GO_NOTE


def test_an_unknown_key_is_ignored_and_nobody_signed() -> None:
    other = log_signer(2, "PeterNeumann").key
    assert parse_note(GO_NOTE).verify([other]) == {}


def test_a_cosignature_signs_its_time() -> None:
    witness = log_signer(3, "witness.example/w", COSIGNATURE)
    note = witness.sign(log_signer().sign(Note("a\nb\n")), now=1_700_000_000)
    assert note.verify([witness.key]) == {witness.key: 1_700_000_000}
    line = note.find(witness.key)
    assert line is not None
    later = (1_700_000_001).to_bytes(8, "big") + line.signature[8:]
    forged = note.with_signature(type(line)(line.name, line.key_id, later))
    with pytest.raises(Mismatch, match=r"signature of witness\.example/w"):
        forged.verify([witness.key])


def test_one_key_as_log_and_as_witness_has_two_ids() -> None:
    assert log_signer(1, "x", NOTE).key.key_id != log_signer(1, "x", COSIGNATURE).key.key_id


@pytest.mark.parametrize(
    ("note", "reason"),
    [
        (GO_TEXT.encode(), "an empty line"),
        (GO_TEXT.encode() + b"\n", "an empty line"),
        (GO_NOTE[:-1], "ending in a newline"),
        (b"\x01" + GO_NOTE, "control characters"),
        (b"\xff" + GO_NOTE, "is not UTF-8"),
        (GO_NOTE.replace(b"PeterNeumann ", b"Peter Neumann "), "not base64"),
        (GO_NOTE.replace(b"PeterNeumann ", b"Peter+Neumann "), "no plus"),
        (GO_NOTE + b"Unexpected line.\n", "must begin with a dash"),
        (GO_NOTE + GO_LINE.encode(), "two lines"),
        (GO_NOTE.replace(b"nAM=", b"nAN="), "another spelling of its base64"),
        (GO_NOTE.replace(b"nAM=", b"nAM"), "not base64"),
        (b"t\n\n" + "\u2014 a AAAAAA==\n".encode(), "too short"),
        (GO_TEXT.encode() + b"\n" + GO_LINE.encode() * 65, "65 signatures exceed"),
        (b"\n\n" + GO_LINE.encode(), "must be there"),
        (b"a" * (1 << 16) + GO_NOTE, "exceed the limit"),
    ],
)
def test_a_malformed_note_is_refused(note: bytes, reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason):
        parse_note(note)


@pytest.mark.parametrize(
    ("vkey", "reason"),
    [
        ("PeterNeumann+c74f20a3", r"must be name\+id\+base64"),
        (GO_VKEY.replace("c74f20a3", "c74f20a4"), "the id is"),
        (GO_VKEY.replace("c74f20a3", "C74F20A3"), "the id is"),
        ("PeterNeumann+cc469956+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TWBADKEY==", "33 bytes|spelling"),
        ("PeterNeumann+173116ae+ZRpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW", "type 0x65"),
        (GO_VKEY.replace("PeterNeumann", "Peter Neumann"), "no space"),
        ("x+00000000+AQ" + "A" * 42, "small order"),
        ("a" * 600, "exceed the limit"),
    ],
)
def test_a_malformed_key_is_refused(vkey: str, reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason):
        parse_vkey(vkey)


def test_a_signer_needs_its_own_key_and_the_right_kind_of_signature() -> None:
    key = ed25519_key(b"\x05" * 32)
    with pytest.raises(InvalidInput, match="another one's"):
        NoteSigner(log_signer().key, key)
    with pytest.raises(InvalidInput, match="a cosignature has a time"):
        log_signer(kind=COSIGNATURE).sign(Note("a\n"))
    with pytest.raises(InvalidInput, match="a cosignature has a time"):
        log_signer().sign(Note("a\n"), now=3)
    with pytest.raises(InvalidInput, match=r"2\*\*63"):
        log_signer(kind=COSIGNATURE).sign(Note("a\n"), now=2**63)
    with pytest.raises(InvalidInput, match="must be ed25519"):
        NoteKey("x", NOTE, generate_key("ecdsa-p256").public_key)


@given(st.binary(max_size=300) | st.binary(max_size=60).map(lambda b: GO_NOTE[:40] + b + GO_NOTE[60:]))
def test_arbitrary_bytes_are_refused_or_are_the_one_encoding_of_a_note(data: bytes) -> None:
    try:
        note = parse_note(data)
    except InvalidInput:
        return
    assert note.encode() == data
