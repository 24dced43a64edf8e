"""The chip registry's deeds and rules: who made, moved, lost and scrapped which chips; pure functions over facts.

Format and rules: spec/registry.md. A deed is one signed statement about a lot of chips. A rule takes the deed, the
parties and the named chips as they stand, and returns them as they stand afterwards, or refuses with the reason:

    deed = parse_entry(line).deed
    changes = apply_deed(deed, view, number)      # ProtocolViolation: "chip 0102..: is owned by acme, not by zeta"

Nothing here reads a file. Signatures are checked by ``verify_signatures`` with the keys that the parties had before
the deed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol, cast

from tallystick.commit.encoding import (
    HASH_BYTES,
    INTEGER_LIMIT,
    Fields,
    canonical_json,
    digest,
    frame,
    parse_canonical_json,
    parse_hex,
)
from tallystick.errors import InvalidInput, ProtocolViolation
from tallystick.signing.keys import PublicKey, Signer, parse_public_key

FORMAT = "tallystick/registry-deed/1"
DEED_TAG = "tallystick/registry-deed/1"
MOST_CHIPS_IN_A_DEED = 10_000
LARGEST_ENTRY = 4 << 20  # bytes of one line
REGISTRY = "registry"  # the party that keeps it and signs heads, parties and exemptions
ROLES = ("authority", "maker", "owner", "inspector")

FABRICATED, ACTIVE, DAMAGED, LOST, IN_REPAIR, RETIRED = (
    "fabricated", "active", "damaged", "lost", "in repair", "retired",
)  # fmt: skip
DRAWN_FROM = (ACTIVE, DAMAGED, IN_REPAIR)  # chips of these statuses stand in the frame of a draw
OUTCOMES = ("passed", "failed", "refused", "absent")

_CHIP = re.compile(r"(?:[0-9a-f]{2}){7,33}", re.ASCII)  # a UEID in hexadecimal (RFC 9711: 7 to 33 bytes)
_NAME = re.compile(r"[0-9A-Za-z][0-9A-Za-z._:/-]{0,63}", re.ASCII)
_KEY = re.compile(r"(?:[0-9a-f]{64})?", re.ASCII)


class Chip(NamedTuple):
    """One chip as the registry knows it; ``entry`` is the number of the last deed about it."""

    chip: str
    model: str
    maker: str
    serial: str
    key: str  # SHA-256 of its device key's SubjectPublicKeyInfo, or empty
    board: str
    owner: str
    custodian: str
    status: str
    exempt_until: int
    inspected: int  # time of the last inspection that it passed
    entry: int

    def encode(self) -> bytes:
        """Return the canonical JSON that the state commits to; no field holds a character that JSON escapes."""
        return (
            f'{{"board":"{self.board}","chip":"{self.chip}","custodian":"{self.custodian}","entry":{self.entry},'
            f'"exempt_until":{self.exempt_until},"inspected":{self.inspected},"key":"{self.key}",'
            f'"maker":"{self.maker}","model":"{self.model}","owner":"{self.owner}","serial":"{self.serial}",'
            f'"status":"{self.status}"}}'
        ).encode("ascii")


@dataclass(frozen=True)
class Party:
    """Who may sign what: a name, roles, and the key in force."""

    name: str
    roles: tuple[str, ...]
    key: PublicKey


@dataclass(frozen=True)
class Model:
    """A kind of chip and the most that one does in a day, in any precision it supports."""

    name: str
    vendor: str
    flop_per_chip_day: int


@dataclass(frozen=True)
class Deed:
    """One statement: ``kind`` says which of the forms in ``KINDS`` ``body`` has. ``nonce`` makes repeated deeds differ."""

    kind: str
    time: int
    nonce: str
    registry: str
    body: Mapping[str, object]

    def encode(self) -> bytes:
        """Return the canonical JSON that is signed and stored."""
        return self._encoded

    @cached_property
    def _encoded(self) -> bytes:
        # A lot's deed is asked for its bytes by signer, reader and log, and forming them costs most of all.
        return canonical_json(
            {
                "format": FORMAT,
                "kind": self.kind,
                "time": self.time,
                "nonce": self.nonce,
                "registry": self.registry,
                "body": dict(self.body),
            }
        )


@dataclass(frozen=True)
class Entry:
    """A deed with its signatures, in ascending order of the signers' names."""

    deed: Deed
    signatures: tuple[tuple[str, bytes], ...]

    def encode(self) -> bytes:
        """Return the line of the log, without its end."""
        deed = self.deed.encode()
        signed = canonical_json([[name, signature.hex()] for name, signature in self.signatures])
        return b'{"deed":' + deed + b',"signatures":' + signed + b"}"


class View(Protocol):
    """What a rule may look at: parties, models, and the chips that stand now."""

    @property
    def registry_id(self) -> str:
        """Return the digest of the opening deed, or an empty text before it."""
        ...

    def party(self, name: str) -> Party | None:
        """Return the party of this name."""
        ...

    def model(self, name: str) -> Model | None:
        """Return the model of this name."""
        ...

    def chips(self, names: Sequence[str]) -> dict[str, Chip]:
        """Return those of the named chips that are registered."""
        ...

    def holders(self, kind: str, marks: Sequence[str]) -> dict[str, str]:
        """Return which chip has each of these marks (``serial`` or ``key``), where one has."""
        ...


@dataclass
class Changes:
    """What a deed changes; ``marks`` are serial numbers and device keys that chips get now, as (kind, mark, chip)."""

    marks: list[tuple[str, str, str]] = field(default_factory=list[tuple[str, str, str]])
    chips: dict[str, Chip] = field(default_factory=dict[str, Chip])
    parties: list[Party] = field(default_factory=list[Party])
    models: list[Model] = field(default_factory=list[Model])


# --------------------------------------------------------------------------------------------- signing


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
        key = _key(str(entry.deed.body["key"])) if opening else _must_know(view, name).key
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


# ----------------------------------------------------------------------------------------------- kinds


@dataclass(frozen=True)
class Kind:
    """One kind of deed: ``read`` refuses malformed bodies, ``signers`` says who must sign, ``apply`` is its rule."""

    read: Callable[[Deed], object]
    signers: Callable[[Deed, View], set[str]]
    apply: Callable[[Deed, View, int], Changes]


def _open(deed: Deed, view: View, number: int) -> Changes:
    body = _body(deed, "name", "key")
    return Changes(parties=[Party(REGISTRY, ("authority",), _key(body.text("key")))])


def _read_open(deed: Deed) -> None:
    body = _body(deed, "name", "key")
    _name(body.text("name"), "registry")
    _key(body.text("key"))
    if deed.registry:
        raise InvalidInput("open: names no registry")


def _party(deed: Deed, view: View, number: int) -> Changes:
    body = _body(deed, "name", "roles", "key")
    name, roles = body.text("name"), body.texts("roles")
    if name == REGISTRY and "authority" not in roles:
        raise ProtocolViolation("party: the registry stays an authority")
    return Changes(parties=[Party(name, roles, _key(body.text("key")))])


def _read_party(deed: Deed) -> None:
    body = _body(deed, "name", "roles", "key")
    _name(body.text("name"), "party")
    roles = body.texts("roles")
    if not roles or list(roles) != sorted(set(roles)) or not set(roles) <= set(ROLES):
        raise InvalidInput(f"party: roles must be some of {', '.join(sorted(ROLES))}, in order, none twice")
    _key(body.text("key"))


def _party_signers(deed: Deed, view: View) -> set[str]:
    """A new key is introduced by the authority; who already has one signs with it too, unless it is revoked by the authority."""
    name = _body(deed, "name", "roles", "key").text("name")
    return {REGISTRY} | ({name} if view.party(name) is not None else set())


def _revoke(deed: Deed, view: View, number: int) -> Changes:
    """The authority alone replaces a key that was stolen or lost."""
    body = _body(deed, "name", "key", "reason")
    old = _must_know(view, body.text("name"))
    return Changes(parties=[Party(old.name, old.roles, _key(body.text("key")))])


def _read_revoke(deed: Deed) -> None:
    body = _body(deed, "name", "key", "reason")
    _name(body.text("name"), "party")
    _key(body.text("key"))
    _text(body.text("reason"), "reason")


def _model(deed: Deed, view: View, number: int) -> Changes:
    body = _body(deed, "name", "vendor", "flop_per_chip_day")
    model = Model(body.text("name"), body.text("vendor"), int(body.text("flop_per_chip_day")))
    old = view.model(model.name)
    if old is not None and model.flop_per_chip_day < old.flop_per_chip_day:
        raise ProtocolViolation(
            f"model {model.name}: its rate may rise (a faster precision is found) and not fall from "
            f"{old.flop_per_chip_day} to {model.flop_per_chip_day}"
        )
    return Changes(models=[model])


def _read_model(deed: Deed) -> None:
    body = _body(deed, "name", "vendor", "flop_per_chip_day")
    _name(body.text("name"), "model")
    _name(body.text("vendor"), "vendor")
    if re.fullmatch(r"[1-9][0-9]{0,29}", body.text("flop_per_chip_day"), re.ASCII) is None:
        raise InvalidInput(
            "model: flop_per_chip_day must be decimal digits, at most 30, without a leading zero"
        )


def _fab(deed: Deed, view: View, number: int) -> Changes:
    body = _body(deed, "maker", "model", "chips")
    maker, model = body.text("maker"), body.text("model")
    _must_have_role(view, maker, "maker")
    if view.model(model) is None:
        raise ProtocolViolation(f"fab: model {model} is not declared")
    names = body.texts("chips")
    if known := view.chips(names):
        chip = next(iter(known.values()))
        raise ProtocolViolation(f"chip {chip.chip}: is registered already, by entry {chip.entry}")
    made = {
        name: Chip(name, model, maker, "", "", "", maker, maker, FABRICATED, 0, 0, number) for name in names
    }
    return Changes(chips=made)


def _read_fab(deed: Deed) -> None:
    body = _body(deed, "maker", "model", "chips")
    _name(body.text("maker"), "maker")
    _name(body.text("model"), "model")
    _lot(body)


def _package(deed: Deed, view: View, number: int) -> Changes:
    body = _body(deed, "maker", "chips")
    maker, rows = body.text("maker"), _rows(body, 3)
    chips = _named(view, [row[0] for row in rows])
    changed: dict[str, Chip] = {}
    given: list[tuple[str, str, str]] = []
    for kind, at in (("serial", 1), ("key", 2)):
        marks = [row[at] for row in rows if row[at]]
        given += [(kind, row[at], row[0]) for row in rows if row[at]]
        if len(set(marks)) != len(marks):
            raise ProtocolViolation(f"package: one {kind} on two chips")
        for mark, holder in view.holders(kind, marks).items():
            raise ProtocolViolation(f"package: {kind} {mark} is that of chip {holder} already")
    for name, serial, key in rows:
        chip = chips[name]
        _must_hold(chip, maker)
        if chip.serial:
            raise ProtocolViolation(f"chip {name}: was packaged as {chip.serial}")
        if chip.status != FABRICATED:
            raise ProtocolViolation(f"chip {name}: is {chip.status}, only fabricated chips are packaged")
        changed[name] = chip._replace(serial=serial, key=key, status=ACTIVE, entry=number)
    return Changes(given, changed)


def _read_package(deed: Deed) -> None:
    body = _body(deed, "maker", "chips")
    _name(body.text("maker"), "maker")
    for name, serial, key in _rows(body, 3):
        _chip(name)
        _name(serial, "serial")
        if _KEY.fullmatch(key) is None:
            raise InvalidInput(f"package: device key {key[:80]!r} must be 64 hexadecimal digits or empty")
    _distinct([row[0] for row in _rows(body, 3)])


def _board(deed: Deed, view: View, number: int) -> Changes:
    body = _body(deed, "holder", "board", "chips")
    return _change(
        deed, view, number, (ACTIVE, DAMAGED, IN_REPAIR), holder=body.text("holder"), board=body.text("board")
    )


def _read_board(deed: Deed) -> None:
    body = _body(deed, "holder", "board", "chips")
    _name(body.text("holder"), "holder")
    _name(body.text("board"), "board")
    _lot(body)


def _transfer(deed: Deed, view: View, number: int) -> Changes:
    body = _body(deed, "from", "to", "chips")
    giver, taker = body.text("from"), body.text("to")
    _must_have_role(view, taker, "owner")
    return _change(
        deed, view, number, (ACTIVE, DAMAGED), holder=giver, owned_by=giver, owner=taker, custodian=taker
    )


def _read_transfer(deed: Deed) -> None:
    body = _body(deed, "from", "to", "chips")
    giver, taker = _name(body.text("from"), "from"), _name(body.text("to"), "to")
    if giver == taker:
        raise InvalidInput(f"transfer: from and to are both {giver}")
    _lot(body)


def _report(status: str, before: tuple[str, ...]) -> Callable[[Deed, View, int], Changes]:
    """Loss, damage, and chips found again: the owner's word."""

    def apply(deed: Deed, view: View, number: int) -> Changes:
        owner = _body(deed, "owner", "chips", "reason").text("owner")
        return _change(deed, view, number, before, owned_by=owner, status=status)

    return apply


def _read_report(deed: Deed) -> None:
    body = _body(deed, "owner", "chips", "reason")
    _name(body.text("owner"), "owner")
    _text(body.text("reason"), "reason")
    _lot(body)


def _rma(deed: Deed, view: View, number: int) -> Changes:
    body = _body(deed, "from", "to", "chips")
    giver, taker = body.text("from"), body.text("to")
    _must_have_role(view, taker, "maker")
    return _change(deed, view, number, (ACTIVE, DAMAGED), holder=giver, custodian=taker, status=IN_REPAIR)


def _return(deed: Deed, view: View, number: int) -> Changes:
    """Chips come back from repair to their owner; a chip of the maker's own may replace one that is retired with it."""
    body = _body(deed, "from", "to", "chips", "replaced")
    maker, owner = body.text("from"), body.text("to")
    pairs = _pairs(body)
    back = list(body.texts("chips"))
    chips = _named(view, [*back, *(name for pair in pairs for name in pair)])
    changed: dict[str, Chip] = {}
    for name in [*back, *(old for old, _ in pairs)]:
        chip = chips[name]
        if chip.status != IN_REPAIR or chip.custodian != maker or chip.owner != owner:
            raise ProtocolViolation(
                f"chip {name}: is {chip.status} with {chip.custodian} for {chip.owner}, not in repair with {maker} for {owner}"
            )
    for name in back:
        changed[name] = chips[name]._replace(custodian=owner, status=ACTIVE, entry=number)
    for old, new in pairs:
        fresh = chips[new]
        if fresh.owner != maker or fresh.status != ACTIVE:
            raise ProtocolViolation(
                f"chip {new}: is {fresh.status} and owned by {fresh.owner}; {maker} cannot give it"
            )
        changed[old] = chips[old]._replace(status=RETIRED, entry=number)
        changed[new] = fresh._replace(owner=owner, custodian=owner, entry=number)
    return Changes(chips=changed)


def _read_return(deed: Deed) -> None:
    body = _body(deed, "from", "to", "chips", "replaced")
    _name(body.text("from"), "from")
    _name(body.text("to"), "to")
    names = [*body.texts("chips"), *(name for pair in _pairs(body) for name in pair)]
    if not 0 < len(names) <= MOST_CHIPS_IN_A_DEED:
        raise InvalidInput(f"return: {len(names)} chips; must be 1 to {MOST_CHIPS_IN_A_DEED}")
    _distinct(names)


def _retire(deed: Deed, view: View, number: int) -> Changes:
    body = _body(deed, "owner", "witness", "chips", "evidence")
    owner = body.text("owner")
    _must_have_role(view, body.text("witness"), "inspector")
    before = (FABRICATED, ACTIVE, DAMAGED, IN_REPAIR)
    return _change(deed, view, number, before, owned_by=owner, status=RETIRED)


def _read_retire(deed: Deed) -> None:
    body = _body(deed, "owner", "witness", "chips", "evidence")
    if _name(body.text("owner"), "owner") == _name(body.text("witness"), "witness"):
        raise InvalidInput("retire: the owner cannot be its own witness")
    parse_hex(body.text("evidence"), n_bytes=HASH_BYTES, what="retire: evidence")
    _lot(body)


def _exempt(deed: Deed, view: View, number: int) -> Changes:
    body = _body(deed, "chips", "until", "reason")
    until = body.integer("until")
    return _change(deed, view, number, (ACTIVE, DAMAGED, IN_REPAIR), exempt_until=until)


def _read_exempt(deed: Deed) -> None:
    body = _body(deed, "chips", "until", "reason")
    if not 0 <= body.integer("until") < INTEGER_LIMIT:
        raise InvalidInput("exempt: until must not be negative; 0 ends an exemption")
    _text(body.text("reason"), "reason")
    _lot(body)


def _inspected(deed: Deed, view: View, number: int) -> Changes:
    body = _body(deed, "inspector", "result", "chips")
    _must_have_role(view, body.text("inspector"), "inspector")
    rows = _rows(body, 2)
    chips = _named(view, [name for name, _ in rows])
    changed = {
        name: chips[name]._replace(
            inspected=deed.time if outcome == "passed" else chips[name].inspected, entry=number
        )
        for name, outcome in rows
    }
    return Changes(chips=changed)


def _read_inspected(deed: Deed) -> None:
    body = _body(deed, "inspector", "result", "chips")
    _name(body.text("inspector"), "inspector")
    parse_hex(body.text("result"), n_bytes=HASH_BYTES, what="inspected: result")
    rows = _rows(body, 2)
    for name, outcome in rows:
        _chip(name)
        if outcome not in OUTCOMES:
            raise InvalidInput(f"inspected: outcome {outcome[:40]!r} must be one of {', '.join(OUTCOMES)}")
    _distinct([name for name, _ in rows])


def _by(*names: str) -> Callable[[Deed, View], set[str]]:
    return lambda deed, view: {REGISTRY if name == REGISTRY else str(deed.body[name]) for name in names}


KINDS: dict[str, Kind] = {
    "open": Kind(_read_open, _by(REGISTRY), _open),
    "party": Kind(_read_party, _party_signers, _party),
    "revoke": Kind(_read_revoke, _by(REGISTRY), _revoke),
    "model": Kind(_read_model, _by(REGISTRY), _model),
    "fab": Kind(_read_fab, _by("maker"), _fab),
    "package": Kind(_read_package, _by("maker"), _package),
    "board": Kind(_read_board, _by("holder"), _board),
    "transfer": Kind(_read_transfer, _by("from", "to"), _transfer),
    "loss": Kind(_read_report, _by("owner"), _report(LOST, (FABRICATED, ACTIVE, DAMAGED))),
    "found": Kind(_read_report, _by("owner"), _report(ACTIVE, (LOST,))),
    "damage": Kind(_read_report, _by("owner"), _report(DAMAGED, (ACTIVE,))),
    "rma": Kind(_read_transfer, _by("from", "to"), _rma),
    "return": Kind(_read_return, _by("from", "to"), _return),
    "retire": Kind(_read_retire, _by("owner", "witness"), _retire),
    "exempt": Kind(_read_exempt, _by(REGISTRY), _exempt),
    "inspected": Kind(_read_inspected, _by("inspector"), _inspected),
}


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


# ---------------------------------------------------------------------------------------------- inside


def _change(
    deed: Deed,
    view: View,
    number: int,
    before: tuple[str, ...],
    *,
    holder: str | None = None,
    owned_by: str | None = None,
    **fields: str | int,
) -> Changes:
    """Give every chip of the lot new ``fields``, if its status allows it and the parties named hold and own it."""
    names = [str(name) for name in cast("list[object]", deed.body["chips"])]
    changed: dict[str, Chip] = {}
    for name, chip in _named(view, names).items():
        if chip.status not in before:
            raise ProtocolViolation(
                f"chip {name}: is {chip.status}; {deed.kind} is for chips that are {' or '.join(before)}"
            )
        if holder is not None:
            _must_hold(chip, holder)
        if owned_by is not None:
            _must_own(chip, owned_by)
        changed[name] = chip._replace(**fields, entry=number)
    return Changes(chips=changed)


def _named(view: View, names: Sequence[str]) -> dict[str, Chip]:
    found = view.chips(names)
    if len(found) != len(names):
        missing = next(name for name in names if name not in found)
        raise ProtocolViolation(f"chip {missing}: is not registered")
    return found


def _must_own(chip: Chip, name: str) -> None:
    if chip.owner != name:
        raise ProtocolViolation(f"chip {chip.chip}: is owned by {chip.owner}, not by {name}")


def _must_hold(chip: Chip, name: str) -> None:
    if chip.custodian != name:
        raise ProtocolViolation(f"chip {chip.chip}: is held by {chip.custodian}, not by {name}")


def _must_know(view: View, name: str) -> Party:
    party = view.party(name)
    if party is None:
        raise ProtocolViolation(f"party {name}: is not registered")
    return party


def _must_have_role(view: View, name: str, role: str) -> None:
    party = _must_know(view, name)
    if role not in party.roles:
        raise ProtocolViolation(f"party {name}: is no {role}, it is {', '.join(party.roles)}")


def _body(deed: Deed, *names: str) -> Fields:
    return Fields(deed.body, what=deed.kind, names=names)


def _lot(body: Fields) -> None:
    names = body.texts("chips")
    if not 0 < len(names) <= MOST_CHIPS_IN_A_DEED:
        raise InvalidInput(f"deed: {len(names)} chips; must be 1 to {MOST_CHIPS_IN_A_DEED}")
    _distinct(names)


def _rows(body: Fields, width: int) -> list[list[str]]:
    rows: list[list[str]] = []
    for item in body.items("chips"):
        row = cast("list[object]", item) if isinstance(item, list) else []
        if len(row) != width or not all(isinstance(cell, str) for cell in row):
            raise InvalidInput(f"deed: each chip must be a list of {width} texts")
        rows.append(cast("list[str]", row))
    if not 0 < len(rows) <= MOST_CHIPS_IN_A_DEED:
        raise InvalidInput(f"deed: {len(rows)} chips; must be 1 to {MOST_CHIPS_IN_A_DEED}")
    return rows


def _pairs(body: Fields) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for item in body.items("replaced"):
        match item:
            case [str(old), str(new)]:
                pairs.append((old, new))
            case _:
                raise InvalidInput("return: a replacement must be [retired chip, its successor]")
    return pairs


def _distinct(names: Sequence[str]) -> None:
    for name in names:
        _chip(name)
    if len(set(names)) != len(names):
        raise InvalidInput("deed: a chip is named twice")


def _chip(name: str) -> None:
    if _CHIP.fullmatch(name) is None:
        raise InvalidInput(f"chip {name[:80]!r}: must be 7 to 33 bytes of UEID in lower-case hexadecimal")


def _name(text: str, what: str) -> str:
    if _NAME.fullmatch(text) is None:
        raise InvalidInput(f"{what} {text[:80]!r}: must be 1 to 64 letters, digits or . _ : / -")
    return text


def _text(text: str, what: str) -> None:
    if not 0 < len(text) <= 1000 or not text.isprintable():
        raise InvalidInput(f"{what}: must be 1 to 1000 printable characters")


def _key(text: str) -> PublicKey:
    return parse_public_key(parse_hex(text, n_bytes=len(text) // 2, what="key"), what="key")
