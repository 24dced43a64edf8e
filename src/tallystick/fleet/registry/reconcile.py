"""Do independent streams agree with the registry? Maker's output, customs, operators' inventories and inspections.

Nobody's list is trusted: each stream was made by somebody else, and what one party hides another one's stream
shows. Findings, not verdicts; rules and their names: spec/registry.md section 6. Pure.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tallystick.commit.encoding import INTEGER_LIMIT, canonical_json, parse_document
from tallystick.errors import InvalidInput
from tallystick.fleet.registry.facts import FABRICATED, LOST, RETIRED, Chip

FORMAT = "tallystick/registry-stream/1"
LARGEST_STREAM = 1 << 30
MAKER, CUSTOMS, INVENTORY, INSPECTION = "maker", "customs", "inventory", "inspection"
KINDS = (CUSTOMS, INSPECTION, INVENTORY, MAKER)


@dataclass(frozen=True)
class Stream:
    """What one party saw: chips by name, and units of models where names were not taken down.

    ``party`` is the maker, the owner whose site it was, or the importer; ``other`` the exporter of a customs
    stream, else empty. ``complete`` says that everything the party has is listed, so what is missing is missing.
    """

    kind: str
    source: str
    party: str
    other: str
    time: int
    complete: bool
    chips: tuple[str, ...]
    units: Mapping[str, int]

    def encode(self) -> bytes:
        """Return the one encoding, canonical JSON."""
        return canonical_json(
            {
                "format": FORMAT,
                "kind": self.kind,
                "source": self.source,
                "party": self.party,
                "other": self.other,
                "time": self.time,
                "complete": self.complete,
                "chips": list(self.chips),
                "units": dict(self.units),
            }
        )


@dataclass(frozen=True)
class Finding:
    """One disagreement: the rule's name, the chip (empty for counts), the party asked to explain, and words."""

    rule: str
    chip: str
    party: str
    words: str

    def fields(self) -> dict[str, object]:
        """Return the finding as plain data."""
        return {"rule": self.rule, "chip": self.chip, "party": self.party, "words": self.words}


def parse_stream(data: bytes) -> Stream:
    """Return the stream whose encoding is exactly ``data``.

    Raises:
        InvalidInput: any other bytes, an unknown kind, or a chip named twice.
    """
    names = ("format", "kind", "source", "party", "other", "time", "complete", "chips", "units")
    fields = parse_document(data, FORMAT, what="stream", limit=LARGEST_STREAM, names=names)
    kind = fields.text("kind")
    if kind not in KINDS:
        raise InvalidInput(f"stream: kind {kind[:40]!r} must be one of {', '.join(KINDS)}")
    chips = fields.texts("chips")
    if len(set(chips)) != len(chips):
        twice = next(chip for chip, count in Counter(chips).items() if count > 1)
        raise InvalidInput(f"stream: chip {twice[:80]} is listed twice")
    units: dict[str, int] = {}
    for model, count in fields.mapping("units").items():
        if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count < INTEGER_LIMIT:
            raise InvalidInput(f"stream: units of {model[:80]} must be a whole number, not negative")
        units[model] = count
    return Stream(
        kind, fields.text("source"), fields.text("party"), fields.text("other"), fields.integer("time"),
        fields.boolean("complete"), chips, units,
    )  # fmt: skip


def reconcile(chips: Iterable[Chip], streams: Sequence[Stream]) -> list[Finding]:
    """Return every disagreement between the registry's chips and ``streams``, in a fixed order.

    Without findings the streams and the registry fit together; that the streams saw everything is not said.
    """
    known = {chip.chip: chip for chip in chips}
    findings = [finding for stream in streams for finding in _compare(known, stream)]
    findings += _seen_twice([s for s in streams if s.kind in (INVENTORY, INSPECTION)])
    findings += _counts(known, [s for s in streams if s.kind == MAKER])
    return sorted(findings, key=lambda f: (f.rule, f.party, f.chip, f.words))


def _compare(known: Mapping[str, Chip], stream: Stream) -> list[Finding]:
    found: list[Finding] = []
    for name in stream.chips:
        chip = known.get(name)
        if chip is None:
            found.append(
                Finding("unregistered", name, stream.party, f"{stream.source} saw it; no deed registers it")
            )
        elif problem := _disagrees(chip, stream):
            found.append(Finding(problem[0], name, stream.party, f"{stream.source}: {problem[1]}"))
    if stream.complete:
        listed = set(stream.chips)
        missing = (chip for chip in known.values() if chip.chip not in listed and _should_have(chip, stream))
        found += [
            Finding(
                "missing", chip.chip, stream.party,
                f"registered as {chip.status} with {stream.party}, not in the list of {stream.source}",
            )
            for chip in missing
        ]  # fmt: skip
    return found


def _disagrees(chip: Chip, stream: Stream) -> tuple[str, str] | None:
    """The rule and words of what a listed chip contradicts, None if nothing."""
    if stream.kind == MAKER:
        if chip.maker != stream.party:
            return "other-maker", f"made by {stream.party}, registered as made by {chip.maker}"
        return None
    if chip.status == RETIRED:
        return "seen-though-retired", f"is there; retired by entry {chip.entry}"
    if stream.kind == CUSTOMS:
        if stream.party not in (chip.owner, chip.custodian):
            return (
                "moved-unregistered",
                f"went from {stream.other} to {stream.party}; registered with {chip.custodian} for {chip.owner}",
            )
        return None
    if chip.status == LOST:
        return "seen-though-lost", f"is there; reported lost by entry {chip.entry}"
    if stream.party not in (chip.custodian, chip.owner):
        return "held-by-another", f"is with {stream.party}; registered with {chip.custodian} for {chip.owner}"
    return None


def _should_have(chip: Chip, stream: Stream) -> bool:
    if stream.kind == MAKER:
        return chip.maker == stream.party
    return (
        stream.kind in (INVENTORY, INSPECTION)
        and chip.custodian == stream.party
        and chip.status not in (LOST, RETIRED, FABRICATED)
    )


def _seen_twice(streams: Sequence[Stream]) -> list[Finding]:
    """Chips that two parties' lists hold at once: one identity on two chips, or one chip shown twice."""
    seen: defaultdict[str, list[Stream]] = defaultdict(list)
    for stream in streams:
        for name in stream.chips:
            seen[name].append(stream)
    found: list[Finding] = []
    for name, where in seen.items():
        parties = sorted({stream.party for stream in where})
        if len(parties) > 1:
            found.append(
                Finding("seen-twice", name, parties[0], f"is in the lists of {' and '.join(parties)}")
            )
    return found


def _counts(known: Mapping[str, Chip], streams: Sequence[Stream]) -> list[Finding]:
    """Makers' counted output against the chips registered for them, model by model."""
    registered = Counter((chip.maker, chip.model) for chip in known.values())
    stated: Counter[tuple[str, str]] = Counter()
    for stream in streams:
        for model, count in stream.units.items():
            stated[stream.party, model] += count
    found: list[Finding] = []
    for (maker, model), count in sorted(stated.items()):
        if (have := registered[maker, model]) != count:
            words = f"{count} of {model} left the line, {have} are registered"
            found.append(Finding("other-count", "", maker, words))
    return found
