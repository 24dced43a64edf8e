"""What the registry knows: chips, parties and models as they stand, and the signed events that change them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, NamedTuple, Protocol

from tallystick.commit.codec import Document
from tallystick.commit.encoding import canonical_json
from tallystick.commit.field_rules import At, Hex, Size, Whole
from tallystick.errors import InvalidInput
from tallystick.fleet.registry.event_bodies import BODIES, Body
from tallystick.signing.keys import PublicKey

FORMAT = "tallystick/registry-deed/1"
EVENT_TAG = "tallystick/registry-deed/1"
EVENT_TYPE = "application/vnd.tallystick.registry-deed+json"
LARGEST_ENTRY = 4 << 20  # bytes of one line
REGISTRY = "registry"  # the party that keeps it and signs heads, parties and exemptions
FABRICATED, ACTIVE, DAMAGED, LOST, IN_REPAIR, RETIRED = (
    "fabricated", "active", "damaged", "lost", "in repair", "retired",
)  # fmt: skip
DRAWN_FROM = (ACTIVE, DAMAGED, IN_REPAIR)  # chips of these statuses stand in the frame of a draw


class Chip(NamedTuple):
    """One chip as the registry knows it; ``entry`` is the number of the last event about it."""

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
class RegistryEvent(Document, form=FORMAT, what="event"):
    """One statement: ``kind`` says which of the forms in ``BODIES`` its body has. ``nonce`` makes repeated events differ."""

    kind: str
    time: Whole
    nonce: Annotated[str, Hex(16)]
    registry: str
    body: Mapping[str, object]

    def encode(self) -> bytes:
        """Return the canonical JSON that is signed and stored."""
        return self._encoded

    @cached_property
    def _encoded(self) -> bytes:
        # A lot's event is asked for its bytes by signer, reader and log, and forming them costs most of all.
        return canonical_json(self.fields())

    @cached_property
    def said(self) -> Body:
        """What the body says.

        Raises:
            InvalidInput: an unknown kind, or a body of another form.
        """
        if self.kind not in BODIES:
            raise InvalidInput(f"event: kind {self.kind[:40]!r} is unknown; known are {', '.join(BODIES)}")
        if self.kind == "open" and self.registry:
            raise InvalidInput("open: names no registry")
        return BODIES[self.kind].read(dict(self.body), what=self.kind)


@dataclass(frozen=True)
class RegistryEntry(Document, what="registry entry", limit=LARGEST_ENTRY):
    """An event with its signatures, in ascending order of the signers' names."""

    event: Annotated[RegistryEvent, At("deed")]
    signatures: tuple[tuple[str, Annotated[bytes, Hex(), Size(1, 256)]], ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        names = [name for name, _ in self.signatures]
        if names != sorted(set(names)):
            raise InvalidInput("registry entry: signers must be in ascending order, none twice")

    def encode(self) -> bytes:
        """Return the line of the log, without its end."""
        event = self.event.encode()
        signed = canonical_json([[name, signature.hex()] for name, signature in self.signatures])
        return b'{"deed":' + event + b',"signatures":' + signed + b"}"


class View(Protocol):
    """What a rule may look at: parties, models, and the chips that stand now."""

    @property
    def registry_id(self) -> str:
        """Return the digest of the opening event, or an empty text before it."""
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
    """What an event changes; ``marks`` are serial numbers and device keys that chips get now, as (kind, mark, chip)."""

    marks: list[tuple[str, str, str]] = field(default_factory=list[tuple[str, str, str]])
    chips: dict[str, Chip] = field(default_factory=dict[str, Chip])
    parties: list[Party] = field(default_factory=list[Party])
    models: list[Model] = field(default_factory=list[Model])
