"""Audits, divergences and disputes as parts of a page, from JSON that somebody else may have written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.text import Text

from tallystick.evidence.verification import quoted
from tallystick.reports.audit import MOST_SEGMENTS, STYLES, audit_headline, audit_rows, place_of
from tallystick.reports.chart import Bars, Chart, Dots, linear, named
from tallystick.reports.divergence import divergence_headline, divergence_parts
from tallystick.reports.foreign import LISTED, Foreign
from tallystick.reports.layout import (
    BAD,
    GOOD,
    QUIET,
    UNSURE,
    Card,
    Heading,
    Part,
    Pictures,
    Rows,
    Table,
    Words,
)

MOST_MOVES = 4096
LEVELS = ("checkpoints", "steps", "operators")  # in the order in which a dispute asks about them
KNOWN = frozenset("format loser outcome step rounds rounds_per_level reason moves verdict_file".split())


# -- audits ----------------------------------------------------------------------------------------


def audit_parts(given: Foreign, steps: int) -> Iterator[Part]:
    """Return what a page shows of an audit's JSON; ``steps`` are those of the run."""
    parts: list[Part] = [
        Heading(Text.assemble(audit_headline(given), " ", (given.file, QUIET)), 3),
        Rows([("steps repeated", given["steps"].text()), *audit_rows(given)]),
    ]
    spans: dict[str, list[tuple[float, float, int]]] = {GOOD: [], BAD: [], UNSURE: []}
    deviations: list[Foreign] = []
    for segment in given["segments"].items(MOST_SEGMENTS):
        start, end = segment["start"].whole(), segment["end"].whole()
        if start is None or end is None or end < start:
            continue
        spans[STYLES.get(segment["verdict"].text(), UNSURE)].append((min(start, steps), min(end, steps), 0))
        deviations += segment["deviations"].items(MOST_SEGMENTS)
    names = {GOOD: ("matches", "good"), BAD: ("deviates", "bad"), UNSURE: ("neither", "unsure")}
    bars = [Bars(*names[style], found) for style, found in spans.items() if found]
    if bars:
        axes = linear("step", 0, max(steps, 1)), named("", [""])
        parts.append(
            Pictures([Chart("Segments repeated", *axes, bars, ["What is left empty was not repeated."])])
        )
    if deviations:
        rows = [
            (d["step"].text(), place_of(d), d["own"].readable(), d["stated"].readable())
            for d in deviations[:LISTED]
        ]
        parts.append(Table(("step", "where", "repeated", "stated"), rows, numbers=(0,), things="deviation"))
        if len(deviations) > LISTED:
            parts.append(Words(f"{len(deviations) - LISTED} more deviations are not shown."))
    yield Card(parts)
    divergence = given["divergence"]
    if divergence:
        yield Heading(divergence_headline(divergence), 3)
        yield from divergence_parts(divergence)


# -- disputes --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Round:
    """One round of a bisection: where both were asked, what they said in short, and whether it was the same."""

    index: int
    trainer: str
    auditor: str
    agree: bool


def ruling_of(given: Foreign) -> Text:
    """Return what a verdict's JSON says of the loser, in its style."""
    loser, step = given["loser"].text(40), given["step"].whole()
    at = "" if step is None else f", at step {step:,}"
    if loser not in ("", "none"):
        return Text(f"the {loser} loses{at}", style=BAD)
    return Text(f"nobody loses{at}", style=GOOD if given["outcome"].text() == "agreement" else UNSURE)


def dispute_parts(given: Foreign, steps: int) -> Iterator[Part]:
    """Return what a page shows of a verdict's JSON: its words, unchecked, and the rounds as a tree that narrows."""
    rounds = [
        f"; {count.text()} rounds over {Foreign(level).text(60)}"
        for level, count in given["rounds_per_level"].members()
    ]
    others = [
        (Foreign(name).text(60), text)
        for name, value in given.members(1 << 20)
        if name not in KNOWN and (text := value.any_text())
    ]
    parts: list[Part] = [
        Heading(Text.assemble(ruling_of(given), " ", (given.file, QUIET)), 3),
        Words(f"Unchecked, the verdict's own words: {quoted(str(given['reason'].value or ''), most=2000)}"),
        Words(Text(f"outcome: {given['outcome'].word()}{''.join(rounds)}", style=QUIET)),
        *_tree(_levels(given), steps),
        *([Rows(others[:LISTED])] if others else []),
    ]
    yield Card(parts)


def _levels(given: Foreign) -> list[tuple[str, list[_Round]]]:
    """Put the moves into rounds, and rounds into levels: claims at one position next to each other are one round."""
    counts = sorted(
        given["rounds_per_level"].members(MOST_MOVES),
        key=lambda level: LEVELS.index(level[0]) if level[0] in LEVELS else len(LEVELS),
    )
    names = [
        Foreign(name).text(60) for name, count in counts for _ in range(min(count.whole() or 0, MOST_MOVES))
    ]
    found: list[tuple[str, list[_Round]]] = []
    waiting: dict[str, tuple[int, str]] = {}
    number = 0
    for party, index, commitment, level in _claims(given["moves"].items(MOST_MOVES)):
        other = waiting.pop("auditor" if party == "trainer" else "trainer", None)
        waiting = {party: (index, commitment)}
        if other is None or other[0] != index:
            continue
        trainer, auditor = (commitment, other[1]) if party == "trainer" else (other[1], commitment)
        name = level or (names[number] if number < len(names) else "further")
        if not found or found[-1][0] != name:
            found.append((name, []))
        found[-1][1].append(_Round(index, trainer[:8], auditor[:8], trainer == auditor))
        waiting, number = {}, number + 1
    return found


def _claims(moves: Iterable[Foreign]) -> Iterator[tuple[str, int, str, str]]:
    """Return party, position, commitment and level of each move that has them, be it a list or an object."""
    for move in moves:
        parts = [*move.items(4), Foreign(None)]
        if move:
            where = move["position"] if move["index"].value is None else move["index"]
            parts = [move["party"], where, move["commitment"], move["level"]]
        if len(parts) >= 4:
            party, index = parts[0].text(20), parts[1].whole()
            level = parts[3].text(60) if isinstance(parts[3].value, str) else ""
            if party in ("trainer", "auditor") and index is not None:
                yield party, index, parts[2].text(80), level


def _tree(levels: Sequence[tuple[str, list[_Round]]], steps: int) -> Iterator[Part]:
    """Return a chart for each level: a row is the interval in dispute, each question halves it."""
    low, high = 0, max(steps, 1)
    charts: list[Chart] = []
    for name, rounds in levels:
        if any(not low <= one.index <= high for one in rounds):
            low, high = 0, max(one.index for one in rounds) + 1  # positions of its own
        first, last = low, high
        spans: list[tuple[float, float, int]] = []
        asked: dict[bool, list[tuple[float, float, float]]] = {True: [], False: []}
        for row, one in enumerate(rounds):
            spans.append((low, high, row))
            asked[one.agree].append((one.index, row + 0.5, 5))
            low, high = (one.index, high) if one.agree else (low, one.index)
        said = [
            f"at {one.index:,}: {one.trainer} {'=' if one.agree else '≠'} {one.auditor}" for one in rounds
        ]
        marks = [
            Bars("in dispute", "quiet", [*spans, (low, high, len(rounds))]),
            Dots("asked: the same" if asked[True] else "", "good", asked[True]),
            Dots("asked: not the same" if asked[False] else "", "bad", asked[False], "diamond"),
        ]
        rows = named(
            "", ["" for _ in range(len(rounds) + 1)], [*said, f"agreed at {low:,}, differ at {high:,}"]
        )
        charts.append(
            Chart(f"{name}: {first:,} to {last:,}", linear("", first, max(last, first + 1)), rows, marks)
        )
    if charts:
        yield Heading("Rounds of the bisection", 4)
        yield Pictures(charts)
