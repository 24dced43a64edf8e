"""A chain of custody: who had what when, each link signed and bound to the one before (spec/inspection.md section 4).

A link is made by the party that acts; a hand-over is signed by giver and taker. Nothing can be taken out, put in
or exchanged without a signature of somebody who was there, and the chain's end is part of the sealed result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from tallystick.commit.codec import Document
from tallystick.commit.encoding import HASH_BYTES, canonical_json, digest, frame
from tallystick.commit.field_rules import At, Hash, Hex, Size
from tallystick.errors import InvalidInput, Mismatch
from tallystick.signing.keys import PublicKey, Signer

FORMAT: Literal["tallystick/custody-link/1"] = "tallystick/custody-link/1"
LINK_TAG = "tallystick/custody-link/1"
LARGEST_LINK = 1 << 16
MOST_LINKS = 100_000
Action = Literal["begin", "take", "hand over", "seal"]
START = bytes(HASH_BYTES)


@dataclass(frozen=True)
class Link(Document, what="custody link", limit=LARGEST_LINK):
    """One act: ``items`` are SHA-256 digests of what it is about, ``before`` that of the link before."""

    number: Annotated[int, At("facts", "number")]
    before: Annotated[bytes, At("facts", "before"), Hex(HASH_BYTES)]
    time: Annotated[int, At("facts", "time")]
    action: Annotated[Action, At("facts", "action")]
    party: Annotated[str, At("facts", "party")]
    to: Annotated[str, At("facts", "to")]
    items: Annotated[tuple[Hash, ...], At("facts", "items")]
    signatures: tuple[tuple[str, Annotated[bytes, Hex(), Size(0, 256)]], ...] = ()
    form: Annotated[Literal["tallystick/custody-link/1"], At("facts", "format")] = FORMAT

    def facts(self) -> bytes:
        """Return the canonical JSON that is signed."""
        return canonical_json(self.fields()["facts"])

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
        InvalidInput: another number of signers than the action needs.
    """
    party = next((name for name in signers if name != to), "")
    if set(signers) != {party, to} - {""} or not party or (action == "hand over") != bool(to):
        raise InvalidInput(
            f"custody: {action!r} by {', '.join(signers) or 'nobody'}; a hand over is by two parties, another act by one"
        )
    before = chain[-1].digest() if chain else START
    link = Link(len(chain), before, time, action, party, to, tuple(items))
    message = frame(LINK_TAG, link.facts())
    signatures = tuple((name, signers[name].sign(message)) for name in sorted(signers))
    return replace(link, signatures=signatures)


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
        if [name for name, _ in link.signatures] != wanted:
            raise Mismatch(f"{what}: must be signed by {', '.join(wanted)}")
        for name, signature in link.signatures:
            if name not in keys:
                raise Mismatch(f"{what}: no key of {name} is known")
            keys[name].verify(signature, frame(LINK_TAG, link.facts()), what=what)
        holder, before, time = link.to or link.party, link.digest(), link.time
    return holder
