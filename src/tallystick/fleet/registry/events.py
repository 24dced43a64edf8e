"""The chip registry's deeds: signed, parsed, verified and applied; pure functions over facts.

Format and rules: spec/registry.md. A deed is one signed statement about a lot of chips. A rule takes the deed, the
parties and the named chips as they stand, and returns them as they stand afterwards, or refuses with the reason:

    deed = parse_entry(line).deed
    changes = apply_deed(deed, view, number)      # ProtocolViolation: "chip 0102..: is owned by acme, not by zeta"

Nothing here reads a file. Signatures are checked by ``verify_signatures`` with the keys that the parties had before
the deed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from tallystick.commit.encoding import (
    INTEGER_LIMIT,
    Fields,
    digest,
    frame,
    parse_canonical_json,
    parse_hex,
)
from tallystick.errors import InvalidInput, ProtocolViolation
from tallystick.fleet.registry.event_kinds import KINDS, must_know, party_key
from tallystick.fleet.registry.facts import (
    DEED_TAG,
    FORMAT,
    LARGEST_ENTRY,
    Changes,
    Deed,
    Entry,
    View,
)
from tallystick.signing.keys import Signer


def sign_deed(deed: Deed, signers: Mapping[str, Signer]) -> Entry:
    """Return the entry with the signatures of ``signers``, by party."""
    message = deed_message(deed.encode())
    return Entry(deed, tuple((name, signers[name].sign(message)) for name in sorted(signers)))


def deed_message(encoded: bytes) -> bytes:
    """Return the bytes that a party signs."""
    return frame(DEED_TAG, encoded)


def parse_entry(line: bytes) -> Entry:
    """Return the entry whose encoding is exactly ``line``.

    Raises:
        InvalidInput: any other bytes, an unknown kind, or a body of another form.
    """
    value = parse_canonical_json(line, what="registry entry", limit=LARGEST_ENTRY)
    top = Fields(value, what="registry entry", names=("deed", "signatures"))
    fields = Fields(
        top.value("deed"), what="deed", names=("format", "kind", "time", "nonce", "registry", "body")
    )
    fields.constant("format", FORMAT)
    kind = fields.text("kind")
    if kind not in KINDS:
        raise InvalidInput(f"deed: kind {kind[:40]!r} is unknown; known are {', '.join(KINDS)}")
    deed = Deed(
        kind, fields.integer("time"), fields.text("nonce"), fields.text("registry"), fields.mapping("body")
    )
    if not 0 <= deed.time < INTEGER_LIMIT:
        raise InvalidInput(f"deed: time {deed.time} must not be negative")
    parse_hex(deed.nonce, n_bytes=16, what="deed: nonce")
    KINDS[kind].read(deed)
    pairs: list[tuple[str, bytes]] = []
    for item in top.items("signatures"):
        match item:
            case [str(name), str(signature)] if 0 < len(signature) <= 512:
                pairs.append(
                    (name, parse_hex(signature, n_bytes=len(signature) // 2, what="deed: signature"))
                )
            case _:
                raise InvalidInput("registry entry: a signature must be [party, hexadecimal]")
    names = [name for name, _ in pairs]
    if names != sorted(set(names)):
        raise InvalidInput("registry entry: signers must be in ascending order, none twice")
    return Entry(deed, tuple(pairs))


def verify_signatures(entry: Entry, view: View) -> None:
    """Return if the deed is signed by exactly the parties that its kind demands, with the keys they have now.

    Raises:
        ProtocolViolation: another signer, a signer missing or unknown.
        Mismatch: a signature is not of that party's key.
    """
    wanted = sorted(KINDS[entry.deed.kind].signers(entry.deed, view))
    found = [name for name, _ in entry.signatures]
    if found != wanted:
        raise ProtocolViolation(
            f"{entry.deed.kind}: must be signed by {', '.join(wanted)}; is signed by {', '.join(found) or 'nobody'}"
        )
    message = deed_message(entry.deed.encode())
    for name, signature in entry.signatures:
        opening = entry.deed.kind == "open"
        key = party_key(str(entry.deed.body["key"])) if opening else must_know(view, name).key
        key.verify(signature, message, what=f"{entry.deed.kind}: {name}")


def apply_deed(deed: Deed, view: View, number: int) -> Changes:
    """Return what ``deed``, entry ``number`` of the log, changes.

    Raises:
        ProtocolViolation: a rule of its kind forbids it; the message names chip, rule and both values.
    """
    opened = view.registry_id
    if (deed.kind == "open") != (opened == ""):
        raise ProtocolViolation(f"{deed.kind}: a registry is opened once, by its first deed")
    if deed.registry != opened:
        raise ProtocolViolation(
            f"{deed.kind}: is meant for registry {deed.registry[:16]}.., this is {opened[:16]}.."
        )
    return KINDS[deed.kind].apply(deed, view, number)


def chips_of(deed: Deed) -> list[str]:
    """Return the chips that a deed is about, in its own order."""
    if deed.kind in ("package", "inspected"):
        return [cast("list[str]", row)[0] for row in cast("list[object]", deed.body["chips"])]
    names = list(cast("list[str]", deed.body.get("chips", [])))
    if deed.kind == "return":
        names += [name for pair in cast("list[list[str]]", deed.body["replaced"]) for name in pair]
    return names


def registry_id(opening: Deed) -> str:
    """Return the name of the registry that a deed opens: the digest of its bytes."""
    return digest(DEED_TAG, opening.encode()).hex()
