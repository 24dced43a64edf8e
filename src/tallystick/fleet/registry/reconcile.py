"""Do independent streams agree with the registry? Maker's output, customs, operators' inventories and inspections.

Nobody's list is trusted: each stream was made by somebody else, and what one party hides another one's stream
shows. Findings, not verdicts; rules and their names: spec/registry.md section 6. Pure.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from tallystick.commit.codec import Document
from tallystick.commit.field_rules import Match, Whole
from tallystick.errors import InvalidInput
from tallystick.fleet.registry.facts import FABRICATED, LOST, RETIRED, Chip

FORMAT = "tallystick/registry-stream/1"
LARGEST_STREAM = 1 << 30
SEEN_TWICE = "seen-twice"
MAKER, CUSTOMS, INVENTORY, INSPECTION = "maker", "customs", "inventory", "inspection"
_KIND = re.compile("|".join((CUSTOMS, INSPECTION, INVENTORY, MAKER)), re.ASCII)


@dataclass(frozen=True)
class Stream(Document, form=FORMAT, what="stream", limit=LARGEST_STREAM):
    """What one party saw: chips by name, and units of models where names were not taken down.

    ``party`` is the maker, the owner whose site it was, or the importer; ``other`` the exporter of a customs
    stream, else empty. ``complete`` says that everything the party has is listed, so what is missing is missing.

    Raises:
        InvalidInput: an unknown kind, or a chip named twice.
    """

    kind: Annotated[str, Match(_KIND, "one of customs, inspection, inventory, maker")]
    source: str
    party: str
    other: str
    time: int
    complete: bool
    chips: tuple[str, ...]
    units: Mapping[str, Whole]

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(set(self.chips)) != len(self.chips):
            twice = next(chip for chip, count in Counter(self.chips).items() if count > 1)
            raise InvalidInput(f"stream: chip {twice[:80]} is listed twice")


@dataclass(frozen=True)
class Disagreement(Document, what="disagreement"):
    """One disagreement: the rule's name, the chip (empty for counts), the party asked to explain, and words."""

    rule: str
    chip: str
    party: str
    words: str


def reconcile(chips: Iterable[Chip], streams: Sequence[Stream]) -> list[Disagreement]:
    """Return every disagreement between the registry's chips and ``streams``, in a fixed order.

    Without findings the streams and the registry fit together; that the streams saw everything is not said.
    """
    known = {chip.chip: chip for chip in chips}
    findings = [finding for stream in streams for finding in _compare(known, stream)]
    findings += _seen_twice([s for s in streams if s.kind in (INVENTORY, INSPECTION)])
    findings += _counts(known, [s for s in streams if s.kind == MAKER])
    return sorted(findings, key=lambda f: (f.rule, f.party, f.chip, f.words))


def _compare(known: Mapping[str, Chip], stream: Stream) -> list[Disagreement]:
    found: list[Disagreement] = []
    for name in stream.chips:
        chip = known.get(name)
        if chip is None:
            found.append(
                Disagreement(
                    "unregistered", name, stream.party, f"{stream.source} saw it; no event registers it"
                )
            )
        elif problem := _disagrees(chip, stream):
            found.append(Disagreement(problem[0], name, stream.party, f"{stream.source}: {problem[1]}"))
    if stream.complete:
        listed = set(stream.chips)
        missing = (chip for chip in known.values() if chip.chip not in listed and _should_have(chip, stream))
        found += [
            Disagreement(
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


def _seen_twice(streams: Sequence[Stream]) -> list[Disagreement]:
    """Chips that two parties' lists hold at once: one identity on two chips, or one chip shown twice."""
    seen: defaultdict[str, list[Stream]] = defaultdict(list)
    for stream in streams:
        for name in stream.chips:
            seen[name].append(stream)
    found: list[Disagreement] = []
    for name, where in seen.items():
        parties = sorted({stream.party for stream in where})
        if len(parties) > 1:
            found.append(
                Disagreement(SEEN_TWICE, name, parties[0], f"is in the lists of {' and '.join(parties)}")
            )
    return found


def _counts(known: Mapping[str, Chip], streams: Sequence[Stream]) -> list[Disagreement]:
    """Makers' counted output against the chips registered for them, model by model."""
    registered = Counter((chip.maker, chip.model) for chip in known.values())
    stated: Counter[tuple[str, str]] = Counter()
    for stream in streams:
        for model, count in stream.units.items():
            stated[stream.party, model] += count
    found: list[Disagreement] = []
    for (maker, model), count in sorted(stated.items()):
        if (have := registered[maker, model]) != count:
            words = f"{count} of {model} left the line, {have} are registered"
            found.append(Disagreement("other-count", "", maker, words))
    return found
