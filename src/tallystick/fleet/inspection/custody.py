"""A chain of custody: who had what when, each link signed and bound to the one before (spec/inspection.md section 4).

A link is made by the party that acts; a hand-over is signed by giver and taker. Nothing can be taken out, put in
or exchanged without a signature of somebody who was there, and the chain's end is part of the sealed result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from tallystick.commit.codec import Document
from tallystick.commit.encoding import HASH_BYTES, canonical_json, digest, parse_canonical_json
from tallystick.commit.field_rules import Elsewhere, Hash
from tallystick.errors import InvalidInput, Mismatch
from tallystick.signing.dsse import Envelope, parse_envelope, sign_payload
from tallystick.signing.keys import PublicKey, Signer

FORMAT = "tallystick/custody-link/1"
LINK_TAG = "tallystick/custody-link/1"
LINK_TYPE = "application/vnd.tallystick.custody-link+json"
LARGEST_LINK = 1 << 24  # bytes of the act: a seal names the findings of all chips, in 67 bytes each
MOST_LINKS = 100_000
Action = Literal["begin", "take", "hand over", "seal"]
START = bytes(HASH_BYTES)


@dataclass(frozen=True)
class Link(Document, form=FORMAT, what="custody link"):
    """One act: ``items`` are SHA-256 digests of what it is about, ``before`` that of the link before.

    A document of its own is the DSSE envelope with the act as payload; ``signatures`` are the envelope's.
    """

    number: int
    before: Hash
    time: int
    action: Action
    party: str
    to: str
    items: tuple[Hash, ...]
    signatures: Annotated[tuple[tuple[str, bytes], ...], Elsewhere()] = ()

    def envelope(self) -> Envelope:
        """Return the act in its envelope."""
        return Envelope(LINK_TYPE, canonical_json(self.fields()), self.signatures)

    def encode(self) -> bytes:
        """Return the one encoding of the envelope, canonical JSON."""
        return self.envelope().encode()

    @classmethod
    def parse(cls, data: bytes, *, what: str | None = None) -> Link:
        """Return the link whose encoding is exactly ``data``.

        Raises:
            InvalidInput: any other bytes.
        """
        what = what or cls._what
        envelope = parse_envelope(data, what=what, limit=LARGEST_LINK)
        said = parse_canonical_json(envelope.payload_of(LINK_TYPE, what=what), what=what, limit=LARGEST_LINK)
        link = replace(cls.read(said, what=what), signatures=envelope.signatures)
        if link.encode() != data:
            raise InvalidInput(f"{what}: is not written as its one encoding")
        return link

    def digest(self) -> bytes:
        """Return the 32 bytes by which the next link names this one."""
        return digest(LINK_TAG, self.encode())


def add_link(
    chain: Sequence[Link],
    action: Action,
    signers: Mapping[str, Signer],
    *,
    items: Sequence[bytes],
    time: int,
    to: str = "",
) -> Link:
    """Return the next link of ``chain``: by the one signer, or from the first to the party ``to``, signed by both.

    Raises:
        InvalidInput: another number of signers than the action needs, or more items than a reader takes.
    """
    party = next((name for name in signers if name != to), "")
    if set(signers) != {party, to} - {""} or not party or (action == "hand over") != bool(to):
        raise InvalidInput(
            f"custody: {action!r} by {', '.join(signers) or 'nobody'}; a hand over is by two parties, another act by one"
        )
    before = chain[-1].digest() if chain else START
    link = Link(len(chain), before, time, action, party, to, tuple(items))
    payload = link.envelope().payload
    if len(payload) > LARGEST_LINK:
        raise InvalidInput(f"custody: a link of {len(payload)} bytes exceeds the limit of {LARGEST_LINK}")
    ordered = [signers[name] for name in sorted(signers)]
    return replace(link, signatures=sign_payload(LINK_TYPE, payload, ordered).signatures)


def parse_chain(data: bytes) -> tuple[Link, ...]:
    """Return the links whose encodings are the lines of ``data``.

    Raises:
        InvalidInput: any other bytes.
    """
    if data and not data.endswith(b"\n"):
        raise InvalidInput("custody: the last line has no end")
    lines = data.split(b"\n")[:-1]
    if len(lines) > MOST_LINKS:
        raise InvalidInput(f"custody: {len(lines)} links exceed the limit of {MOST_LINKS}")
    return tuple(Link.parse(line) for line in lines)


def encode_chain(chain: Sequence[Link]) -> bytes:
    """Return the lines that parse_chain reads."""
    return b"".join(link.encode() + b"\n" for link in chain)


def verify_chain(chain: Sequence[Link], keys: Mapping[str, PublicKey]) -> str:
    """Return who has the items at the end: every link follows the one before and is signed by those who acted.

    Raises:
        Mismatch: a link is missing, exchanged or signed by another key; a party acts that has nothing in hand; time
            runs backwards.
    """
    if not chain or chain[0].action != "begin":
        raise Mismatch("custody: must begin with a begin")
    before, holder, time = START, chain[0].party, chain[0].time
    for number, link in enumerate(chain):
        what = f"custody link {number}"
        if link.number != number or link.before != before:
            raise Mismatch(f"{what}: does not follow the one before; a link is missing or exchanged")
        if link.time < time:
            raise Mismatch(f"{what}: is of second {link.time}, the one before of {time}")
        if link.party != holder:
            raise Mismatch(f"{what}: {link.party} acts, {holder} has custody")
        if number and (link.action == "begin" or chain[number - 1].action == "seal"):
            raise Mismatch(f"{what}: {link.action} after {chain[number - 1].action}")
        wanted = sorted({link.party, link.to} - {""})
        if len(link.signatures) != len(wanted):
            raise Mismatch(
                f"{what}: must be signed by {', '.join(wanted)}, has {len(link.signatures)} signatures"
            )
        for name in wanted:
            if name not in keys:
                raise Mismatch(f"{what}: no key of {name} is known")
            if not link.envelope().signers([keys[name]]):
                raise Mismatch(f"{what}: the signature is not of key {keys[name].key_id[:16]}.. of {name}")
        holder, before, time = link.to or link.party, link.digest(), link.time
    return holder
