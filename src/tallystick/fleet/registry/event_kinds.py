"""The rules of each kind of deed: what its body holds, who signs it, and what it changes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from tallystick.commit.encoding import (
    HASH_BYTES,
    INTEGER_LIMIT,
    Fields,
    parse_hex,
)
from tallystick.errors import InvalidInput, ProtocolViolation
from tallystick.fleet.registry.facts import (
    ACTIVE,
    DAMAGED,
    FABRICATED,
    IN_REPAIR,
    LOST,
    REGISTRY,
    RETIRED,
    ROLES,
    Changes,
    Chip,
    Deed,
    Model,
    Party,
    View,
)
from tallystick.signing.keys import PublicKey, parse_public_key

MOST_CHIPS_IN_A_DEED = 10_000
OUTCOMES = ("passed", "failed", "refused", "absent")
_CHIP = re.compile(r"(?:[0-9a-f]{2}){7,33}", re.ASCII)  # a UEID in hexadecimal (RFC 9711: 7 to 33 bytes)
_NAME = re.compile(r"[0-9A-Za-z][0-9A-Za-z._:/-]{0,63}", re.ASCII)
_KEY = re.compile(r"(?:[0-9a-f]{64})?", re.ASCII)


@dataclass(frozen=True)
class Kind:
    """One kind of deed: ``read`` refuses malformed bodies, ``signers`` says who must sign, ``apply`` is its rule."""

    read: Callable[[Deed], object]
    signers: Callable[[Deed, View], set[str]]
    apply: Callable[[Deed, View, int], Changes]


def _open(deed: Deed, view: View, number: int) -> Changes:
    body = _body(deed, "name", "key")
    return Changes(parties=[Party(REGISTRY, ("authority",), party_key(body.text("key")))])


def _read_open(deed: Deed) -> None:
    body = _body(deed, "name", "key")
    _name(body.text("name"), "registry")
    party_key(body.text("key"))
    if deed.registry:
        raise InvalidInput("open: names no registry")


def _party(deed: Deed, view: View, number: int) -> Changes:
    body = _body(deed, "name", "roles", "key")
    name, roles = body.text("name"), body.texts("roles")
    if name == REGISTRY and "authority" not in roles:
        raise ProtocolViolation("party: the registry stays an authority")
    return Changes(parties=[Party(name, roles, party_key(body.text("key")))])


def _read_party(deed: Deed) -> None:
    body = _body(deed, "name", "roles", "key")
    _name(body.text("name"), "party")
    roles = body.texts("roles")
    if not roles or list(roles) != sorted(set(roles)) or not set(roles) <= set(ROLES):
        raise InvalidInput(f"party: roles must be some of {', '.join(sorted(ROLES))}, in order, none twice")
    party_key(body.text("key"))


def _party_signers(deed: Deed, view: View) -> set[str]:
    """A new key is introduced by the authority; who already has one signs with it too, unless it is revoked by the authority."""
    name = _body(deed, "name", "roles", "key").text("name")
    return {REGISTRY} | ({name} if view.party(name) is not None else set())


def _revoke(deed: Deed, view: View, number: int) -> Changes:
    """The authority alone replaces a key that was stolen or lost."""
    body = _body(deed, "name", "key", "reason")
    old = must_know(view, body.text("name"))
    return Changes(parties=[Party(old.name, old.roles, party_key(body.text("key")))])


def _read_revoke(deed: Deed) -> None:
    body = _body(deed, "name", "key", "reason")
    _name(body.text("name"), "party")
    party_key(body.text("key"))
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


def must_know(view: View, name: str) -> Party:
    """Return the party of this name.

    Raises:
        ProtocolViolation: it is not registered.
    """
    party = view.party(name)
    if party is None:
        raise ProtocolViolation(f"party {name}: is not registered")
    return party


def _must_have_role(view: View, name: str, role: str) -> None:
    party = must_know(view, name)
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


def party_key(text: str) -> PublicKey:
    """Return the public key that a deed states in hexadecimal.

    Raises:
        InvalidInput: it is none.
    """
    return parse_public_key(parse_hex(text, n_bytes=len(text) // 2, what="key"), what="key")
