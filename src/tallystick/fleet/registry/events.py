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

from tallystick.commit.encoding import digest
from tallystick.errors import ProtocolViolation
from tallystick.fleet.registry.event_bodies import RegistryOpening
from tallystick.fleet.registry.event_kinds import KINDS, must_know
from tallystick.fleet.registry.facts import DEED_TAG, DEED_TYPE, Changes, Deed, Entry, View
from tallystick.signing.dsse import pre_authentication_encoding
from tallystick.signing.keys import Signer


def sign_deed(deed: Deed, signers: Mapping[str, Signer]) -> Entry:
    """Return the entry with the signatures of ``signers``, by party."""
    message = deed_message(deed.encode())
    return Entry(deed, tuple((name, signers[name].sign(message)) for name in sorted(signers)))


def deed_message(encoded: bytes) -> bytes:
    """Return the bytes that a party signs, as DSSE has them; the log keeps signatures without envelopes."""
    return pre_authentication_encoding(DEED_TYPE, encoded)


def parse_entry(line: bytes) -> Entry:
    """Return the entry whose encoding is exactly ``line``.

    Raises:
        InvalidInput: any other bytes, an unknown kind, or a body of another form.
    """
    entry = Entry.parse(line)
    _ = entry.deed.said  # refused here, before any rule looks at it
    return entry


def verify_signatures(entry: Entry, view: View) -> None:
    """Return if the deed is signed by exactly the parties that its kind demands, with the keys they have now.

    Raises:
        ProtocolViolation: another signer, a signer missing or unknown.
        Mismatch: a signature is not of that party's key.
    """
    wanted = sorted(KINDS[entry.deed.kind].signers(entry.deed.said, view))
    found = [name for name, _ in entry.signatures]
    if found != wanted:
        raise ProtocolViolation(
            f"{entry.deed.kind}: must be signed by {', '.join(wanted)}; is signed by {', '.join(found) or 'nobody'}"
        )
    message = deed_message(entry.deed.encode())
    for name, signature in entry.signatures:
        said = entry.deed.said
        key = said.key if isinstance(said, RegistryOpening) else must_know(view, name).key
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
    return KINDS[deed.kind].apply(deed, deed.said, view, number)


def registry_id(opening: Deed) -> str:
    """Return the name of the registry that a deed opens: the digest of its bytes."""
    return digest(DEED_TAG, opening.encode()).hex()
