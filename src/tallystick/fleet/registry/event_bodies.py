"""What each kind of event says: its body, as a document (spec/registry.md section 3)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from tallystick.commit.codec import Document
from tallystick.commit.encoding import kind_of, parse_hex
from tallystick.commit.field_rules import At, HashText, Match, Via, Whole
from tallystick.errors import InvalidInput
from tallystick.signing.keys import PublicKey, parse_public_key

MOST_CHIPS_IN_AN_EVENT = 10_000
_CHIP = re.compile(r"(?:[0-9a-f]{2}){7,33}", re.ASCII)  # a UEID in hexadecimal (RFC 9711: 7 to 33 bytes)
_NAME = re.compile(r"[0-9A-Za-z][0-9A-Za-z._:/-]{0,63}", re.ASCII)
_KEY = re.compile(r"(?:[0-9a-f]{64})?", re.ASCII)
_RATE = re.compile(r"[1-9][0-9]{0,29}", re.ASCII)


def _read_key(value: object, what: str) -> PublicKey:
    if not isinstance(value, str):
        raise InvalidInput(f"{what} must be a string, is {kind_of(value)}")
    return parse_public_key(parse_hex(value, n_bytes=len(value) // 2, what=what), what=what)


def _read_words(value: object, what: str) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= 1000 or not value.isprintable():
        raise InvalidInput(f"{what}: must be 1 to 1000 printable characters")
    return value


def _key_text(key: PublicKey) -> str:
    return key.spki.hex()


ChipName = Annotated[str, Match(_CHIP, "7 to 33 bytes of UEID in lower-case hexadecimal")]
Name = Annotated[str, Match(_NAME, "1 to 64 letters, digits or . _ : / -")]
DeviceKey = Annotated[str, Match(_KEY, "64 hexadecimal digits or empty")]
Rate = Annotated[str, Match(_RATE, "decimal digits, at most 30, without a leading zero")]
PartyKey = Annotated[PublicKey, Via(_key_text, _read_key)]
Reason = Annotated[str, Via(str, _read_words)]
Role = Literal["authority", "inspector", "maker", "owner"]
Giver = Annotated[str, At("from"), Match(_NAME, "1 to 64 letters, digits or . _ : / -")]
Taker = Annotated[str, At("to"), Match(_NAME, "1 to 64 letters, digits or . _ : / -")]


class Body(Document):
    """What an event says; one about parties and models names no chip."""

    def named(self) -> list[str]:
        """Return the chips that the event is about, in its own order."""
        return []


class NamedChips(Body):
    """What an event about chips says.

    Raises:
        InvalidInput: no chip, too many, or one twice.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        names = self.named()
        if not 0 < len(names) <= MOST_CHIPS_IN_AN_EVENT:
            raise InvalidInput(f"{self.label()}: {len(names)} chips; must be 1 to {MOST_CHIPS_IN_AN_EVENT}")
        if len(set(names)) != len(names):
            raise InvalidInput(f"{self.label()}: a chip is named twice")


class Lot(NamedChips):
    """What an event says of chips that it lists by name alone."""

    chips: tuple[str, ...]

    def named(self) -> list[str]:
        """Return the chips."""
        return list(self.chips)


@dataclass(frozen=True)
class RegistryOpening(Body, what="open"):
    """A registry begins: its name, and the key that signs its heads."""

    name: Name
    key: PartyKey


@dataclass(frozen=True)
class PartyEntry(Body, what="party"):
    """A party is registered, or gets other roles or another key."""

    name: Name
    roles: tuple[Role, ...]
    key: PartyKey

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.roles or list(self.roles) != sorted(set(self.roles)):
            raise InvalidInput(f"party: roles {', '.join(self.roles)}: must be some, in order, none twice")


@dataclass(frozen=True)
class KeyRevocation(Body, what="revoke"):
    """The authority alone replaces a key that was stolen or lost."""

    name: Name
    key: PartyKey
    reason: Reason


@dataclass(frozen=True)
class ModelEntry(Body, what="model"):
    """A kind of chip is declared, or its rate raised."""

    name: Name
    vendor: Name
    flop_per_chip_day: Rate


@dataclass(frozen=True)
class Fabrication(Lot, what="fab"):
    """Chips came off a maker's line."""

    maker: Name
    model: Name
    chips: tuple[ChipName, ...]


@dataclass(frozen=True)
class Packaging(NamedChips, what="package"):
    """Chips get their serial numbers and, where they have one, device keys."""

    maker: Name
    chips: tuple[tuple[ChipName, Name, DeviceKey], ...]

    def named(self) -> list[str]:
        """Return the chips."""
        return [name for name, _, _ in self.chips]


@dataclass(frozen=True)
class Mounting(Lot, what="board"):
    """Chips are put on a board."""

    holder: Name
    board: Name
    chips: tuple[ChipName, ...]


@dataclass(frozen=True)
class Transfer(Lot, what="transfer"):
    """Chips go from one party to another: sold, or sent in for repair."""

    giver: Giver
    taker: Taker
    chips: tuple[ChipName, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.giver == self.taker:
            raise InvalidInput(f"transfer: from and to are both {self.giver}")


@dataclass(frozen=True)
class StatusReport(Lot, what="report"):
    """An owner's word on its chips: lost, found again or damaged."""

    owner: Name
    chips: tuple[ChipName, ...]
    reason: Reason


@dataclass(frozen=True)
class RepairReturn(NamedChips, what="return"):
    """Chips come back from repair; a chip of the maker's own may replace one that is retired with it."""

    giver: Giver
    taker: Taker
    chips: tuple[ChipName, ...]
    replaced: tuple[tuple[ChipName, ChipName], ...]

    def named(self) -> list[str]:
        """Return the chips, and behind them those replaced, each with its successor."""
        return [*self.chips, *(name for pair in self.replaced for name in pair)]


@dataclass(frozen=True)
class Retirement(Lot, what="retire"):
    """Chips are destroyed before an inspector's eyes; ``evidence`` is the digest of what shows it."""

    owner: Name
    witness: Name
    chips: tuple[ChipName, ...]
    evidence: HashText

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.owner == self.witness:
            raise InvalidInput("retire: the owner cannot be its own witness")


@dataclass(frozen=True)
class Exemption(Lot, what="exempt"):
    """Chips stand outside draws up to a second; 0 ends an exemption."""

    chips: tuple[ChipName, ...]
    until: Whole
    reason: Reason


@dataclass(frozen=True)
class Inspected(NamedChips, what="inspected"):
    """An inspection's outcome, chip by chip; ``result`` is the digest of its sealed result."""

    inspector: Name
    result: HashText
    chips: tuple[tuple[ChipName, Literal["passed", "failed", "refused", "absent"]], ...]

    def named(self) -> list[str]:
        """Return the chips."""
        return [name for name, _ in self.chips]


BODIES: Mapping[str, type[Body]] = {
    "open": RegistryOpening, "party": PartyEntry, "revoke": KeyRevocation, "model": ModelEntry, "fab": Fabrication,
    "package": Packaging, "board": Mounting, "transfer": Transfer, "rma": Transfer, "return": RepairReturn,
    "loss": StatusReport, "found": StatusReport, "damage": StatusReport, "retire": Retirement, "exempt": Exemption,
    "inspected": Inspected,
}  # fmt: skip
