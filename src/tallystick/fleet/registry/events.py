"""The chip registry's events: signed, parsed, verified and applied; pure functions over facts.

Format and rules: spec/registry.md. An event is one signed statement about a lot of chips. A rule takes the event, the
parties and the named chips as they stand, and returns them as they stand afterwards, or refuses with the reason:

    event = parse_entry(line).event
    changes = apply_event(event, view, number)      # ProtocolViolation: "chip 0102..: is owned by acme, not by zeta"

Nothing here reads a file. Signatures are checked by ``verify_signatures`` with the keys that the parties had before
the event.
"""

from __future__ import annotations

from collections.abc import Mapping

from tallystick.commit.encoding import digest
from tallystick.errors import ProtocolViolation
from tallystick.fleet.registry.event_bodies import RegistryOpening
from tallystick.fleet.registry.event_kinds import KINDS, must_know
from tallystick.fleet.registry.facts import EVENT_TAG, EVENT_TYPE, Changes, RegistryEntry, RegistryEvent, View
from tallystick.signing.dsse import pre_authentication_encoding
from tallystick.signing.keys import Signer


def sign_event(event: RegistryEvent, signers: Mapping[str, Signer]) -> RegistryEntry:
    """Return the entry with the signatures of ``signers``, by party."""
    message = event_message(event.encode())
    return RegistryEntry(event, tuple((name, signers[name].sign(message)) for name in sorted(signers)))


def event_message(encoded: bytes) -> bytes:
    """Return the bytes that a party signs, as DSSE has them; the log keeps signatures without envelopes."""
    return pre_authentication_encoding(EVENT_TYPE, encoded)


def parse_entry(line: bytes) -> RegistryEntry:
    """Return the entry whose encoding is exactly ``line``.

    Raises:
        InvalidInput: any other bytes, an unknown kind, or a body of another form.
    """
    entry = RegistryEntry.parse(line)
    _ = entry.event.said  # refused here, before any rule looks at it
    return entry


def verify_signatures(entry: RegistryEntry, view: View) -> None:
    """Return if the event is signed by exactly the parties that its kind demands, with the keys they have now.

    Raises:
        ProtocolViolation: another signer, a signer missing or unknown.
        Mismatch: a signature is not of that party's key.
    """
    wanted = sorted(KINDS[entry.event.kind].signers(entry.event.said, view))
    found = [name for name, _ in entry.signatures]
    if found != wanted:
        raise ProtocolViolation(
            f"{entry.event.kind}: must be signed by {', '.join(wanted)}; is signed by {', '.join(found) or 'nobody'}"
        )
    message = event_message(entry.event.encode())
    for name, signature in entry.signatures:
        said = entry.event.said
        key = said.key if isinstance(said, RegistryOpening) else must_know(view, name).key
        key.verify(signature, message, what=f"{entry.event.kind}: {name}")


def apply_event(event: RegistryEvent, view: View, number: int) -> Changes:
    """Return what ``event``, entry ``number`` of the log, changes.

    Raises:
        ProtocolViolation: a rule of its kind forbids it; the message names chip, rule and both values.
    """
    opened = view.registry_id
    if (event.kind == "open") != (opened == ""):
        raise ProtocolViolation(f"{event.kind}: a registry is opened once, by its first event")
    if event.registry != opened:
        raise ProtocolViolation(
            f"{event.kind}: is meant for registry {event.registry[:16]}.., this is {opened[:16]}.."
        )
    return KINDS[event.kind].apply(event, event.said, view, number)


def registry_id(opening: RegistryEvent) -> str:
    """Return the name of the registry that an event opens: the digest of its bytes."""
    return digest(EVENT_TAG, opening.encode()).hex()
