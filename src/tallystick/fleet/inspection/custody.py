"""A chain of custody: who had what when, each link signed and bound to the one before (spec/inspection.md section 4).

A link is made by the party that acts; a hand-over is signed by giver and taker. Nothing can be taken out, put in
or exchanged without a signature of somebody who was there, and the chain's end is part of the sealed result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tallystick.commit.encoding import (
    HASH_BYTES,
    Fields,
    canonical_json,
    digest,
    frame,
    parse_canonical_json,
    parse_hex,
)
from tallystick.errors import InvalidInput, Mismatch
from tallystick.signing.keys import PublicKey, Signer

FORMAT = "tallystick/custody-link/1"
LINK_TAG = "tallystick/custody-link/1"
LARGEST_LINK = 1 << 16
MOST_LINKS = 100_000
ACTIONS = ("begin", "take", "hand over", "seal")
START = bytes(HASH_BYTES)


@dataclass(frozen=True)
class Link:
    """One act: ``items`` are SHA-256 digests of what it is about, ``before`` that of the link before."""

    number: int
    before: bytes
    time: int
    action: str
    party: str
    to: str
    items: tuple[bytes, ...]
    signatures: tuple[tuple[str, bytes], ...] = ()

    def facts(self) -> bytes:
        """Return the canonical JSON that is signed."""
        return canonical_json(
            {
                "format": FORMAT,
                "number": self.number,
                "before": self.before.hex(),
                "time": self.time,
                "action": self.action,
                "party": self.party,
                "to": self.to,
                "items": [item.hex() for item in self.items],
            }
        )

    def encode(self) -> bytes:
        """Return the one encoding, canonical JSON of facts and signatures."""
        signed = canonical_json([[name, signature.hex()] for name, signature in self.signatures])
        return b'{"facts":' + self.facts() + b',"signatures":' + signed + b"}"

    def digest(self) -> bytes:
        """Return the 32 bytes by which the next link names this one."""
        return digest(LINK_TAG, self.encode())


def add_link(
    chain: Sequence[Link],
    action: str,
    signers: Mapping[str, Signer],
    *,
    items: Sequence[bytes],
    time: int,
    to: str = "",
) -> Link:
    """Return the next link of ``chain``: by the one signer, or from the first to the party ``to``, signed by both.

    Raises:
        InvalidInput: an unknown action, or another number of signers than it needs.
    """
    party = next((name for name in signers if name != to), "")
    if (
        action not in ACTIONS
        or set(signers) != {party, to} - {""}
        or not party
        or (action == "hand over") != bool(to)
    ):
        raise InvalidInput(
            f"custody: {action!r} by {', '.join(signers) or 'nobody'}; must be one of {', '.join(ACTIONS)}"
        )
    before = chain[-1].digest() if chain else START
    link = Link(len(chain), before, time, action, party, to, tuple(items))
    message = frame(LINK_TAG, link.facts())
    signatures = tuple((name, signers[name].sign(message)) for name in sorted(signers))
    return Link(link.number, before, time, action, party, to, link.items, signatures)


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
    return tuple(_parse_link(line) for line in lines)


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


def _parse_link(line: bytes) -> Link:
    top = Fields(
        parse_canonical_json(line, what="custody link", limit=LARGEST_LINK), what="custody link",
        names=("facts", "signatures"),
    )  # fmt: skip
    names = ("format", "number", "before", "time", "action", "party", "to", "items")
    facts = Fields(top.value("facts"), what="custody link", names=names)
    facts.constant("format", FORMAT)
    signatures: list[tuple[str, bytes]] = []
    for item in top.items("signatures"):
        match item:
            case [str(name), str(signature)] if len(signature) <= 512:
                signatures.append(
                    (name, parse_hex(signature, n_bytes=len(signature) // 2, what="custody link"))
                )
            case _:
                raise InvalidInput("custody link: a signature must be [party, hexadecimal]")
    if facts.text("action") not in ACTIONS:
        raise InvalidInput(f"custody link: action must be one of {', '.join(ACTIONS)}")
    return Link(
        facts.integer("number"),
        parse_hex(facts.text("before"), n_bytes=HASH_BYTES, what="custody link: before"),
        facts.integer("time"),
        facts.text("action"),
        facts.text("party"),
        facts.text("to"),
        facts.hashes("items"),
        tuple(signatures),
    )
