"""Signed notes: a text and the signatures of named keys under it (C2SP signed-note 1.0.0, tlog-cosignature 1.0).

    signer = NoteSigner(NoteKey("example.org/log", NOTE, key.public_key), key)
    data = signer.sign(Note(text)).encode()
    parse_note(data).verify([vkey])         # {vkey: None}; a witness's value is the second it signed at

A key is known by its name and four bytes, so what decides is the public key that the reader holds, written as
a *vkey*: ``name+id+base64(type, key)``. Two types are known, both Ed25519: 0x01 signs the text; 0x04 is a
witness's cosignature, which signs a time together with the text. What an unknown key says is never looked at.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace

from tallystick.commit.encoding import INTEGER_LIMIT
from tallystick.errors import InvalidInput
from tallystick.signing.keys import ED25519, PublicKey, Signer, parse_public_key

NOTE, COSIGNATURE = 0x01, 0x04
NOTE_LIMIT = 1 << 16  # bytes
SIGNATURE_LIMIT = 64  # lines; the format asks readers to take at least 16
VKEY_LIMIT = 512  # characters

_DASH = "\u2014 "
_SPKI = bytes.fromhex(
    "302a300506032b6570032100"
)  # RFC 8410: what stands before the 32 bytes of an Ed25519 key
_ID_BYTES, _TIME_BYTES, _SIGNATURE_BYTES = 4, 8, 64


@dataclass(frozen=True)
class NoteKey:
    """A public key under the name and for the one purpose that it has in notes.

    Raises:
        InvalidInput: a malformed name, another type, or a key that is not Ed25519.
    """

    name: str
    kind: int
    key: PublicKey

    def __post_init__(self) -> None:
        _check_name(self.name)
        if self.kind not in (NOTE, COSIGNATURE):
            raise InvalidInput(f"note key {self.name}: type {self.kind:#04x} is not 0x01 or 0x04")
        if self.key.algorithm != ED25519:
            raise InvalidInput(f"note key {self.name}: must be {ED25519}, is {self.key.algorithm}")

    @property
    def material(self) -> bytes:
        """The type and the 32 bytes of the key."""
        return bytes([self.kind]) + self.key.raw

    @property
    def key_id(self) -> bytes:
        """Four bytes that find the key's line in a note; they identify nobody."""
        return hashlib.sha256(self.name.encode() + b"\n" + self.material).digest()[:_ID_BYTES]

    def __str__(self) -> str:
        """Return the vkey."""
        return f"{self.name}+{self.key_id.hex()}+{base64.b64encode(self.material).decode()}"


@dataclass(frozen=True)
class NoteSignature:
    """One line under a note: whose it claims to be, and the signature's bytes."""

    name: str
    key_id: bytes
    signature: bytes

    @property
    def line(self) -> str:
        """The line with its newline."""
        return f"{_DASH}{self.name} {base64.b64encode(self.key_id + self.signature).decode()}\n"


@dataclass(frozen=True)
class Note:
    """A text that ends in a newline, and the signatures under it; nothing of it is verified yet."""

    text: str
    signatures: tuple[NoteSignature, ...] = ()

    def encode(self) -> bytes:
        """Return the note's bytes."""
        return (self.text + "\n" + "".join(signature.line for signature in self.signatures)).encode()

    def find(self, key: NoteKey) -> NoteSignature | None:
        """Return the line of ``key``, if there is one."""
        wanted = (key.name, key.key_id)
        return next((line for line in self.signatures if (line.name, line.key_id) == wanted), None)

    def with_signature(self, signature: NoteSignature) -> Note:
        """Return the note with ``signature`` in place of an earlier one of the same key."""
        others = [s for s in self.signatures if (s.name, s.key_id) != (signature.name, signature.key_id)]
        return replace(self, signatures=(*others, signature))

    def verify(self, keys: Iterable[NoteKey]) -> dict[NoteKey, int | None]:
        """Return which of ``keys`` signed, with the time (seconds since 1970) that a cosignature states.

        Raises:
            InvalidInput: a known key's line has another length, or a time out of range.
            Mismatch: a known key's line is not its signature; one false line is enough.
        """
        found: dict[NoteKey, int | None] = {}
        for key in keys:
            line = self.find(key)
            if line is not None:
                found[key] = _verify(self.text, key, line.signature)
        return found


@dataclass(frozen=True)
class NoteSigner:
    """A key that signs notes under a name: as a log, or with a time as a witness."""

    key: NoteKey
    signer: Signer

    def __post_init__(self) -> None:
        if self.signer.public_key != self.key.key:
            raise InvalidInput(f"note key {self.key.name}: the private key is another one's")

    def sign(self, note: Note, *, now: int | None = None) -> Note:
        """Return ``note`` with this key's signature; ``now``, in seconds since 1970, is for cosignatures.

        Raises:
            InvalidInput: a malformed text, or a time missing, out of range or not asked for.
        """
        _check_text(note.text)
        if (now is None) == (self.key.kind == COSIGNATURE):
            raise InvalidInput(f"note key {self.key.name}: a cosignature has a time, a note's signature none")
        if now is None:
            signature = self.signer.sign(note.text.encode())
        else:
            message = _cosigned(note.text, now)
            signature = now.to_bytes(_TIME_BYTES, "big") + self.signer.sign(message)
        return note.with_signature(NoteSignature(self.key.name, self.key.key_id, signature))


def parse_note(data: bytes, *, what: str = "note") -> Note:
    """Return the note that ``data`` is the one encoding of; unverified.

    Raises:
        InvalidInput: not UTF-8, control characters, no blank line, no signature, more than ``SIGNATURE_LIMIT``,
            two lines of one key, or a line of another form.
    """
    if len(data) > NOTE_LIMIT:
        raise InvalidInput(f"{what}: {len(data)} bytes exceed the limit of {NOTE_LIMIT}")
    try:
        whole = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{what}: byte {error.start} is not UTF-8") from None
    body, blank, below = whole.rpartition("\n\n")
    if not blank or not below.endswith("\n"):
        raise InvalidInput(
            f"{what}: must be a text, an empty line and lines of signatures, each ending in a newline"
        )
    text, lines = body + "\n", below.split("\n")[:-1]
    _check_text(text)
    if len(lines) > SIGNATURE_LIMIT:
        raise InvalidInput(f"{what}: {len(lines)} signatures exceed the limit of {SIGNATURE_LIMIT}")
    signatures = tuple(_parse_line(line, what) for line in lines)
    if len({(line.name, line.key_id) for line in signatures}) != len(signatures):
        raise InvalidInput(f"{what}: a key has two lines")
    return Note(text, signatures)


def parse_vkey(text: str) -> NoteKey:
    """Return the key that ``text`` writes as ``name+id+base64``.

    Raises:
        InvalidInput: another form, an id that is not the key's, another type, or a key of small order.
    """
    if len(text) > VKEY_LIMIT:
        raise InvalidInput(f"vkey: {len(text)} characters exceed the limit of {VKEY_LIMIT}")
    parts = text.split("+", 2)
    if len(parts) != 3:
        raise InvalidInput(f"vkey {text[:80]!r}: must be name+id+base64")
    name, key_id, encoded = parts
    material = decode_base64(encoded, what=f"vkey {name[:80]!r}")
    if len(material) != 33:
        raise InvalidInput(f"vkey {name[:80]!r}: type and key must have 33 bytes, have {len(material)}")
    key = NoteKey(name, material[0], parse_public_key(_SPKI + material[1:], what=f"vkey {name[:80]!r}"))
    if key.key_id.hex() != key_id:
        raise InvalidInput(f"vkey {name[:80]!r}: the id is {key_id[:16]!r}, the key's is {key.key_id.hex()}")
    return key


def decode_base64(text: str, *, what: str) -> bytes:
    """Return the bytes of standard base64 with padding (RFC 4648 section 4), in its one spelling.

    Raises:
        InvalidInput: anything else.
    """
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidInput(f"{what}: not base64") from None
    if base64.b64encode(data).decode() != text:
        raise InvalidInput(f"{what}: another spelling of its base64")
    return data


def _verify(text: str, key: NoteKey, signature: bytes) -> int | None:
    what = f"signature of {key.name}"
    if key.kind == NOTE:
        key.key.verify(signature, text.encode(), what=what)
        return None
    if len(signature) != _TIME_BYTES + _SIGNATURE_BYTES:
        raise InvalidInput(
            f"{what}: a cosignature has {_TIME_BYTES + _SIGNATURE_BYTES} bytes, not {len(signature)}"
        )
    now = int.from_bytes(signature[:_TIME_BYTES], "big")
    if now >= INTEGER_LIMIT:
        raise InvalidInput(f"{what}: its time is {now}, which exceeds 63 bits")
    key.key.verify(signature[_TIME_BYTES:], _cosigned(text, now), what=what)
    return now


def _cosigned(text: str, now: int) -> bytes:
    if not 0 <= now < INTEGER_LIMIT:
        raise InvalidInput(f"cosignature: the time must be 0 to 2**63 - 1, is {now}")
    return f"cosignature/v1\ntime {now}\n{text}".encode()


def _parse_line(line: str, what: str) -> NoteSignature:
    if not line.startswith(_DASH):
        raise InvalidInput(
            f"{what}: a signature's line must begin with a dash and a space, not {line[:20]!r}"
        )
    name, space, encoded = line.removeprefix(_DASH).partition(" ")
    _check_name(name)
    decoded = decode_base64(encoded, what=f"{what}: signature of {name[:80]!r}")
    if not space or len(decoded) <= _ID_BYTES:
        raise InvalidInput(f"{what}: the signature of {name[:80]!r} is too short")
    return NoteSignature(name, decoded[:_ID_BYTES], decoded[_ID_BYTES:])


def _check_name(name: str) -> None:
    if not 0 < len(name) < 256 or "+" in name or any(c.isspace() or not c.isprintable() for c in name):
        raise InvalidInput(f"note key name {name[:80]!r}: must be 1 to 255 characters, no space, no plus")


def _check_text(text: str) -> None:
    if not text.endswith("\n") or text == "\n":
        raise InvalidInput("note: the text must be there and end in a newline")
    if any(c < " " and c != "\n" for c in text):
        raise InvalidInput("note: the text must not hold control characters")
