"""One file that holds everything a stranger needs to check a claim about a run (spec/evidence-bundle.md 1).

    {"format":"tallystick/bundle/1","members":[[kind,name,size,sha256],..]}    one line of canonical JSON
    the members' bytes, back to back, in that order

No compression, no paths, no nesting: what a reader allocates is bounded by what it was sent. The same members make the
same file. Names are digests; nothing is ever written under them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tallystick.commit.encoding import HASH_BYTES, canonical_json, parse_document, parse_hex
from tallystick.errors import InvalidInput, Mismatch

FORMAT = "tallystick/bundle/1"
BUNDLE_LIMIT = 1 << 28  # bytes
INDEX_LIMIT = 1 << 20
MEMBER_LIMIT = 4096  # members

# kind -> most bytes of one member
KINDS: Mapping[str, int] = {
    "announcement": 1 << 20,  # of a sampled audit
    "checkpoint": 1 << 16,  # of a log, beside those in log proofs
    "dispute": 1 << 27,  # down to one operator; checked by dispute.record
    "key": 1 << 14,  # SubjectPublicKeyInfo in DER, named by its key id
    "log-proof": 1 << 17,  # named by the SHA-256 of the document it is about
    "model-signature": 1 << 24,
    "run": 1 << 12,  # run.json
    "specification": 1 << 26,
    "specification-proof": 1 << 13,
    "statement": 1 << 24,  # in-toto in DSSE
    "verdict": 1 << 24,  # verdict.json: the moves of a dispute down to one step
}
NAMED_OTHERWISE = ("key", "log-proof", "run")


@dataclass(frozen=True)
class Member:
    """One document of a bundle; its name follows from what it is, so that a bundle has one spelling.

    A key has its key id, a run its root, a log proof the SHA-256 of the document it is about, all else its own SHA-256.

    Raises:
        InvalidInput: an unknown kind, a name of another form, or more bytes than the kind allows.
    """

    kind: str
    name: str
    data: bytes

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidInput(f"bundle: kind {self.kind[:40]!r} is not one of {', '.join(KINDS)}")
        parse_hex(self.name, n_bytes=HASH_BYTES, what=f"bundle: name of a {self.kind}")
        if len(self.data) > KINDS[self.kind]:
            raise InvalidInput(
                f"bundle: {self.kind} {self.name}: {len(self.data)} bytes exceed the limit of {KINDS[self.kind]}"
            )
        if self.kind not in NAMED_OTHERWISE and self.name != self.digest:
            raise InvalidInput(
                f"bundle: {self.kind} {self.name}: must be named by its SHA-256, {self.digest}"
            )

    @property
    def digest(self) -> str:
        """SHA-256 of the data, in hexadecimal."""
        return hashlib.sha256(self.data).hexdigest()


def named(kind: str, data: bytes) -> Member:
    """Return ``data`` as a member of a kind that is named by its own SHA-256."""
    return Member(kind, hashlib.sha256(data).hexdigest(), data)


@dataclass(frozen=True)
class Bundle:
    """Members by kind, then name, both ascending; no name twice in a kind."""

    members: tuple[Member, ...]

    def of(self, kind: str) -> tuple[Member, ...]:
        """Return the members of ``kind``."""
        return tuple(member for member in self.members if member.kind == kind)

    def encode(self) -> bytes:
        """Return the bundle's bytes."""
        index = [[member.kind, member.name, len(member.data), member.digest] for member in self.members]
        head = canonical_json({"format": FORMAT, "members": index})
        return b"".join([head, b"\n", *(member.data for member in self.members)])


def make_bundle(members: Iterable[Member]) -> Bundle:
    """Return the bundle of ``members`` in their order; the same document given twice is one member.

    Raises:
        InvalidInput: two documents of one kind and name, or too many members or bytes.
    """
    found: dict[tuple[str, str], Member] = {}
    for member in members:
        if found.setdefault((member.kind, member.name), member) != member:
            raise InvalidInput(f"bundle: two different members are {member.kind} {member.name}")
    bundle = Bundle(tuple(found[place] for place in sorted(found)))
    size = sum(len(member.data) for member in bundle.members)
    if len(found) > MEMBER_LIMIT or size > BUNDLE_LIMIT - INDEX_LIMIT:
        raise InvalidInput(
            f"bundle: {len(found)} members of {size} bytes exceed {MEMBER_LIMIT} or {BUNDLE_LIMIT}"
        )
    return bundle


def parse_bundle(data: bytes) -> Bundle:
    """Return the bundle that ``data`` is the one encoding of.

    Raises:
        InvalidInput: another format, unknown kinds, members out of order or too large, bytes missing or left over.
        Mismatch: a member has another digest than the index states.
    """
    if len(data) > BUNDLE_LIMIT:
        raise InvalidInput(f"bundle: {len(data)} bytes exceed the limit of {BUNDLE_LIMIT}")
    end = data.find(b"\n", 0, INDEX_LIMIT + 1)
    if end < 0:
        raise InvalidInput(f"bundle: has no index in its first {INDEX_LIMIT} bytes")
    fields = parse_document(
        data[:end], FORMAT, what="bundle: index", limit=INDEX_LIMIT, names=("format", "members")
    )
    lines = [_line(item) for item in fields.items("members")]
    if len(lines) > MEMBER_LIMIT:
        raise InvalidInput(f"bundle: {len(lines)} members exceed the limit of {MEMBER_LIMIT}")
    places = [(kind, name) for kind, name, _, _ in lines]
    if places != sorted(set(places)):
        raise InvalidInput("bundle: members must ascend by kind and name, none twice")
    at = end + 1
    stated = at + sum(size for _, _, size, _ in lines)
    if stated != len(data):
        raise InvalidInput(f"bundle: the index speaks of {stated} bytes, there are {len(data)}")
    members: list[Member] = []
    for kind, name, size, digest in lines:
        part = data[at : at + size]
        if (own := hashlib.sha256(part).hexdigest()) != digest:
            raise Mismatch(
                f"bundle: {kind} {name} has SHA-256 {own}, the index says {digest}",
                where=f"bundle: {kind} {name}",
                own=own,
                stated=digest,
            )
        members.append(Member(kind, name, part))
        at += size
    return Bundle(tuple(members))


def _line(item: object) -> tuple[str, str, int, str]:
    match item:
        case [str(kind), str(name), int(size), str(digest)] if type(size) is int and size >= 0:
            parse_hex(digest, n_bytes=HASH_BYTES, what=f"bundle: digest of {name[:80]!r}")
            return kind, name, size, digest
        case _:
            raise InvalidInput("bundle: a member must be [kind, name, size, sha256]")
