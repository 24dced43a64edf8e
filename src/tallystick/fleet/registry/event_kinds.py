"""The rules of each kind of event: who signs it, and what it changes; what it says is in ``event_bodies``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tallystick.errors import ProtocolViolation
from tallystick.fleet.registry.event_bodies import (
    Exemption,
    Fabrication,
    Inspected,
    KeyRevocation,
    Lot,
    ModelEntry,
    Mounting,
    Packaging,
    PartyEntry,
    RegistryOpening,
    RepairReturn,
    Retirement,
    StatusReport,
    Transfer,
)
from tallystick.fleet.registry.facts import (
    ACTIVE,
    DAMAGED,
    FABRICATED,
    IN_REPAIR,
    LOST,
    REGISTRY,
    RETIRED,
    Changes,
    Chip,
    Model,
    Party,
    RegistryEvent,
    View,
)


@dataclass(frozen=True)
class EventKind:
    """One kind of event: ``signers`` says who must sign what its body says, ``apply`` is its rule."""

    signers: Callable[[Any, View], set[str]]
    apply: Callable[[RegistryEvent, Any, View, int], Changes]


def _open(event: RegistryEvent, body: RegistryOpening, view: View, number: int) -> Changes:
    return Changes(parties=[Party(REGISTRY, ("authority",), body.key)])


def _party(event: RegistryEvent, body: PartyEntry, view: View, number: int) -> Changes:
    if body.name == REGISTRY and "authority" not in body.roles:
        raise ProtocolViolation("party: the registry stays an authority")
    return Changes(parties=[Party(body.name, body.roles, body.key)])


def _party_signers(body: PartyEntry, view: View) -> set[str]:
    """A new key is introduced by the authority; who already has one signs with it too, unless it is revoked by the authority."""
    return {REGISTRY} | ({body.name} if view.party(body.name) is not None else set())


def _revoke(event: RegistryEvent, body: KeyRevocation, view: View, number: int) -> Changes:
    old = must_know(view, body.name)
    return Changes(parties=[Party(old.name, old.roles, body.key)])


def _model(event: RegistryEvent, body: ModelEntry, view: View, number: int) -> Changes:
    model = Model(body.name, body.vendor, int(body.flop_per_chip_day))
    old = view.model(model.name)
    if old is not None and model.flop_per_chip_day < old.flop_per_chip_day:
        raise ProtocolViolation(
            f"model {model.name}: its rate may rise (a faster precision is found) and not fall from "
            f"{old.flop_per_chip_day} to {model.flop_per_chip_day}"
        )
    return Changes(models=[model])


def _fab(event: RegistryEvent, body: Fabrication, view: View, number: int) -> Changes:
    maker, model = body.maker, body.model
    _must_have_role(view, maker, "maker")
    if view.model(model) is None:
        raise ProtocolViolation(f"fab: model {model} is not declared")
    if known := view.chips(body.chips):
        chip = next(iter(known.values()))
        raise ProtocolViolation(f"chip {chip.chip}: is registered already, by entry {chip.entry}")
    made = {
        name: Chip(name, model, maker, "", "", "", maker, maker, FABRICATED, 0, 0, number)
        for name in body.chips
    }
    return Changes(chips=made)


def _package(event: RegistryEvent, body: Packaging, view: View, number: int) -> Changes:
    rows = body.chips
    chips = _named(view, body.named())
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
        _must_hold(chip, body.maker)
        if chip.serial:
            raise ProtocolViolation(f"chip {name}: was packaged as {chip.serial}")
        if chip.status != FABRICATED:
            raise ProtocolViolation(f"chip {name}: is {chip.status}, only fabricated chips are packaged")
        changed[name] = chip._replace(serial=serial, key=key, status=ACTIVE, entry=number)
    return Changes(given, changed)


def _board(event: RegistryEvent, body: Mounting, view: View, number: int) -> Changes:
    before = (ACTIVE, DAMAGED, IN_REPAIR)
    return _change(event, body, view, number, before, holder=body.holder, board=body.board)


def _transfer(event: RegistryEvent, body: Transfer, view: View, number: int) -> Changes:
    giver, taker = body.giver, body.taker
    _must_have_role(view, taker, "owner")
    return _change(
        event, body, view, number, (ACTIVE, DAMAGED), holder=giver, owned_by=giver, owner=taker, custodian=taker
    )  # fmt: skip


def _report(
    status: str, before: tuple[str, ...]
) -> Callable[[RegistryEvent, StatusReport, View, int], Changes]:
    """Loss, damage, and chips found again: the owner's word."""

    def apply(event: RegistryEvent, body: StatusReport, view: View, number: int) -> Changes:
        return _change(event, body, view, number, before, owned_by=body.owner, status=status)

    return apply


def _rma(event: RegistryEvent, body: Transfer, view: View, number: int) -> Changes:
    _must_have_role(view, body.taker, "maker")
    return _change(
        event, body, view, number, (ACTIVE, DAMAGED), holder=body.giver, custodian=body.taker, status=IN_REPAIR
    )  # fmt: skip


def _return(event: RegistryEvent, body: RepairReturn, view: View, number: int) -> Changes:
    """Chips come back from repair to their owner; a chip of the maker's own may replace one that is retired with it."""
    maker, owner = body.giver, body.taker
    chips = _named(view, body.named())
    changed: dict[str, Chip] = {}
    for name in [*body.chips, *(old for old, _ in body.replaced)]:
        chip = chips[name]
        if chip.status != IN_REPAIR or chip.custodian != maker or chip.owner != owner:
            raise ProtocolViolation(
                f"chip {name}: is {chip.status} with {chip.custodian} for {chip.owner}, not in repair with {maker} for {owner}"
            )
    for name in body.chips:
        changed[name] = chips[name]._replace(custodian=owner, status=ACTIVE, entry=number)
    for old, new in body.replaced:
        fresh = chips[new]
        if fresh.owner != maker or fresh.status != ACTIVE:
            raise ProtocolViolation(
                f"chip {new}: is {fresh.status} and owned by {fresh.owner}; {maker} cannot give it"
            )
        changed[old] = chips[old]._replace(status=RETIRED, entry=number)
        changed[new] = fresh._replace(owner=owner, custodian=owner, entry=number)
    return Changes(chips=changed)


def _retire(event: RegistryEvent, body: Retirement, view: View, number: int) -> Changes:
    _must_have_role(view, body.witness, "inspector")
    before = (FABRICATED, ACTIVE, DAMAGED, IN_REPAIR)
    return _change(event, body, view, number, before, owned_by=body.owner, status=RETIRED)


def _exempt(event: RegistryEvent, body: Exemption, view: View, number: int) -> Changes:
    return _change(event, body, view, number, (ACTIVE, DAMAGED, IN_REPAIR), exempt_until=body.until)


def _inspected(event: RegistryEvent, body: Inspected, view: View, number: int) -> Changes:
    _must_have_role(view, body.inspector, "inspector")
    chips = _named(view, body.named())
    changed = {
        name: chips[name]._replace(
            inspected=event.time if outcome == "passed" else chips[name].inspected, entry=number
        )
        for name, outcome in body.chips
    }
    return Changes(chips=changed)


def _by(*fields: str) -> Callable[[object, View], set[str]]:
    return lambda body, view: {getattr(body, field) for field in fields}


def _by_registry(body: object, view: View) -> set[str]:
    return {REGISTRY}


KINDS: dict[str, EventKind] = {
    "open": EventKind(_by_registry, _open),
    "party": EventKind(_party_signers, _party),
    "revoke": EventKind(_by_registry, _revoke),
    "model": EventKind(_by_registry, _model),
    "fab": EventKind(_by("maker"), _fab),
    "package": EventKind(_by("maker"), _package),
    "board": EventKind(_by("holder"), _board),
    "transfer": EventKind(_by("giver", "taker"), _transfer),
    "loss": EventKind(_by("owner"), _report(LOST, (FABRICATED, ACTIVE, DAMAGED))),
    "found": EventKind(_by("owner"), _report(ACTIVE, (LOST,))),
    "damage": EventKind(_by("owner"), _report(DAMAGED, (ACTIVE,))),
    "rma": EventKind(_by("giver", "taker"), _rma),
    "return": EventKind(_by("giver", "taker"), _return),
    "retire": EventKind(_by("owner", "witness"), _retire),
    "exempt": EventKind(_by_registry, _exempt),
    "inspected": EventKind(_by("inspector"), _inspected),
}


def _change(
    event: RegistryEvent,
    body: Lot,
    view: View,
    number: int,
    before: tuple[str, ...],
    *,
    holder: str | None = None,
    owned_by: str | None = None,
    **fields: str | int,
) -> Changes:
    """Give every chip of the lot new ``fields``, if its status allows it and the parties named hold and own it."""
    changed: dict[str, Chip] = {}
    for name, chip in _named(view, body.chips).items():
        if chip.status not in before:
            raise ProtocolViolation(
                f"chip {name}: is {chip.status}; {event.kind} is for chips that are {' or '.join(before)}"
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
