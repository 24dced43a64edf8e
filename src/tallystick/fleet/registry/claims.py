"""What a registry's head proves to a stranger: who owns a chip, that nobody else does, and which chips are drawn from.

Formats: spec/registry.md sections 5 and 7. Everything here is checked offline, with the registry's public key alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated

from tallystick.commit.codec import Document
from tallystick.commit.directory import MapProof, parse_map_proof, verify_lookup
from tallystick.commit.encoding import Fields, parse_canonical_json
from tallystick.commit.field_rules import Hash, Via
from tallystick.commit.merkle import leaf_hash, root
from tallystick.errors import InvalidInput, Mismatch
from tallystick.fleet.registry.facts import DRAWN_FROM, Chip, Model
from tallystick.fleet.registry.heads import SignedHead, verify_extension, verify_head
from tallystick.fleet.sampling.draw import DrawnStratum
from tallystick.signing.keys import PublicKey

PROOF_FORMAT = "tallystick/registry-proof/1"
LARGEST_PROOF = 1 << 24
LARGEST_FRAME = 1 << 30
FLEET_FORMAT = "tallystick/fleet/1"
PROVABLE = ("chip", "serial", "key", "party", "model")


def _read_map_proof(value: object, what: str) -> MapProof:
    return parse_map_proof(value, what=what)


def _older_fields(head: SignedHead | None) -> object:
    return None if head is None else head.fields()


def _read_older(value: object, what: str) -> SignedHead | None:
    return None if value is None else SignedHead.read(value, what)


@dataclass(frozen=True)
class RegistryProof(Document, form=PROOF_FORMAT, what="registry proof", limit=LARGEST_PROOF):
    """What the state under a signed head has for one key, and that the head goes on from an older one."""

    head: Annotated[SignedHead, Via(SignedHead.fields, SignedHead.read)]
    key: str
    proof: Annotated[MapProof, Via(MapProof.fields, _read_map_proof)]
    since: Annotated[SignedHead | None, Via(_older_fields, _read_older)] = None
    extension: tuple[Hash, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.key.partition("/")[0] not in PROVABLE or not self.key.isascii():
            raise InvalidInput(
                f"registry proof: key {self.key[:80]!r} must begin with one of {', '.join(PROVABLE)}"
            )


def verify_registry_proof(proof: RegistryProof, key: PublicKey) -> bytes | None:
    """Return the one value that the state has for the proof's key, None if it has none.

    Raises:
        Mismatch: a head that ``key`` did not sign, another state, or a log that does not go on from the older head.
        InvalidInput: a malformed path.
    """
    head = verify_head(proof.head, key)
    if proof.since is not None:
        verify_extension(verify_head(proof.since, key), head, proof.extension)
    elif proof.extension:
        raise InvalidInput("registry proof: an extension without an older head")
    return verify_lookup(proof.proof, proof.key.encode("ascii"), head.state_root)


def verify_owner(proof: RegistryProof, key: PublicKey, *, chip: str, owner: str) -> Chip:
    """Return the chip if ``owner`` and nobody else owns it under the proof's head.

    A chip has one place in the state (``commit.directory``), so the record shown is the only one.

    Raises:
        Mismatch: it is not registered, or somebody else owns it; or as verify_registry_proof.
        InvalidInput: the proof is about something else, or malformed.
    """
    if proof.key != f"chip/{chip}":
        raise InvalidInput(f"registry proof: is about {proof.key}, not about chip {chip}")
    value = verify_registry_proof(proof, key)
    if value is None:
        raise Mismatch(f"chip {chip}: is not registered under this head")
    found = parse_chip(value)
    if found.owner != owner:
        raise Mismatch(f"chip {chip}: is owned by {found.owner}, {owner} is claimed")
    return found


def parse_chip(value: bytes) -> Chip:
    """Return the chip whose record is exactly ``value``.

    Raises:
        InvalidInput: any other bytes.
    """
    fields = Fields(
        parse_canonical_json(value, what="chip record", limit=1 << 16), what="chip record", names=Chip._fields
    )
    whole = ("exempt_until", "inspected", "entry")
    chip = Chip(*(fields.integer(name) if name in whole else fields.text(name) for name in Chip._fields))  # pyright: ignore[reportArgumentType]
    if chip.encode() != value:
        raise InvalidInput("chip record: holds a character that no record has")
    return chip


# ------------------------------------------------------------------------------------------------ frames


@dataclass(frozen=True)
class DrawFrame:
    """The chips that a draw takes from, in the order of its positions: by stratum (model), then by name."""

    lines: tuple[tuple[str, str, str], ...]  # stratum, chip, owner

    def encode(self) -> bytes:
        """Return the list as text, one chip a line."""
        return b"".join(_line(*line) + b"\n" for line in self.lines)

    def root(self) -> bytes:
        """Return the root over the lines, which an announcement names as ``registry``."""
        return root([leaf_hash(_line(*line)) for line in self.lines])

    def strata(self) -> dict[str, list[str]]:
        """Return the chips of each stratum; position i of a draw is item i."""
        found: dict[str, list[str]] = {}
        for stratum, chip, _ in self.lines:
            found.setdefault(stratum, []).append(chip)
        return found

    def owners(self) -> dict[str, str]:
        """Return who owned each chip when the list was made."""
        return {chip: owner for _, chip, owner in self.lines}

    def frames(self, samples: Mapping[str, int]) -> tuple[DrawnStratum, ...]:
        """Return what an announcement says about the strata, ``samples`` of each.

        Raises:
            InvalidInput: samples for a stratum that the list does not have, or none for one that it has.
        """
        strata = self.strata()
        if set(samples) != set(strata):
            odd = sorted(set(samples) ^ set(strata))[0]
            raise InvalidInput(
                f"frame: samples must be given for each of its strata and no other; {odd} is not both"
            )
        return tuple(DrawnStratum(name, len(chips), samples[name]) for name, chips in sorted(strata.items()))


def make_frame(chips: Iterable[Chip], *, now: int) -> DrawFrame:
    """Return the chips to draw from at second ``now``: in use or usable, and not exempt then.

    Raises:
        InvalidInput: there is none.
    """
    lines = sorted(
        (chip.model, chip.chip, chip.owner)
        for chip in chips
        if chip.status in DRAWN_FROM and chip.exempt_until <= now
    )
    if not lines:
        raise InvalidInput("frame: no chip can be drawn from")
    return DrawFrame(tuple(lines))


def parse_frame(data: bytes) -> DrawFrame:
    """Return the list whose encoding is exactly ``data``.

    Raises:
        InvalidInput: any other bytes, or chips out of order.
    """
    if len(data) > LARGEST_FRAME:
        raise InvalidInput(f"frame: {len(data)} bytes exceed the limit of {LARGEST_FRAME}")
    lines: list[tuple[str, str, str]] = []
    try:
        rows = data.decode("ascii").split("\n")
    except UnicodeDecodeError as problem:
        raise InvalidInput(f"frame: byte {problem.start} is not ASCII") from None
    if rows[-1] or len(rows) < 2:
        raise InvalidInput("frame: must be lines, each with its end")
    for at, row in enumerate(rows[:-1], start=1):
        parts = row.split(" ")
        if len(parts) != 3 or not all(part and part.isprintable() for part in parts):
            raise InvalidInput(f"frame: line {at} must be stratum, chip and owner with one space between")
        line = (parts[0], parts[1], parts[2])
        if lines and lines[-1][:2] >= line[:2]:
            raise InvalidInput(f"frame: line {at} is out of order or there twice")
        lines.append(line)
    return DrawFrame(tuple(lines))


def fleet_fields(chips: Iterable[Chip], models: Mapping[str, Model], *, now: int) -> dict[str, object]:
    """Return the fleet file (spec/plan.md 8) of the registry: strata by model, exempt chips apart.

    Raises:
        InvalidInput: a chip of a model that is not declared.
    """
    counts: dict[tuple[str, bool], int] = {}
    for chip in chips:
        if chip.status in DRAWN_FROM:
            which = (chip.model, chip.exempt_until > now)
            counts[which] = counts.get(which, 0) + 1
    strata: list[object] = []
    for (model, exempt), count in sorted(counts.items()):
        if model not in models:
            raise InvalidInput(f"fleet: model {model} is not declared")
        strata.append(
            {
                "name": f"{model}/exempt" if exempt else model,
                "chips": count,
                "flop_per_chip_day": models[model].flop_per_chip_day,
                "exempt": exempt,
            }
        )
    return {"format": FLEET_FORMAT, "strata": strata}


def _line(stratum: str, chip: str, owner: str) -> bytes:
    return f"{stratum} {chip} {owner}".encode("ascii")
