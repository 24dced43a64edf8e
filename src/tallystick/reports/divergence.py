"""Where two sides part and why, as a compiler would say it: what, where, both values, and a cause with its standing.

A terminal and a page show what the JSON says, whoever wrote it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from tallystick.reports.chart import Axis, Bars, Chart, named
from tallystick.reports.foreign import LARGEST_DISTANCE, Foreign
from tallystick.reports.layout import (
    BAD,
    GOOD,
    QUIET,
    UNSURE,
    DonePage,
    Lines,
    Part,
    Table,
    Words,
    counted,
    picked,
    share,
)

if TYPE_CHECKING:
    from tallystick.diagnosis.causes import Divergence
    from tallystick.diagnosis.divergence import TensorDivergence

MARKS: Mapping[str, tuple[str, str]] = {
    "confirmed": ("confirmed", BAD),
    "fits": ("fits the signature, not confirmed", UNSURE),
}
BARS = 32  # characters of the longest bar of a histogram
MOST_BINS = 12
MOST_TENSORS = 6  # on a terminal; a page has LISTED, JSON this many:
KEPT = 200
EDGE, NOTE = "   | ", "   = note: "


def divergence_page(found: Divergence) -> DonePage:
    """Return one divergence; every text is shown as it is, control characters escaped."""
    values = divergence_fields(found)
    headline = divergence_headline(Foreign(values))
    parts = list(divergence_parts(Foreign(values)))
    return DonePage(headline.plain, values, [], str(headline.style), parts)


def divergence_fields(found: Divergence) -> dict[str, object]:
    """Return a divergence as JSON; scripts rely on the names."""
    cause, state, parting = found.cause, found.state, found.operator
    unknown = ("state", "differing_elements", "elements", "differing_tensors", "tensors_compared", "leading")
    stated: dict[str, object] = {**dict.fromkeys(unknown), "tensors": [], "odd": {}, "documents": []}
    if state is not None:
        stated = {
            "state": found.how,
            "differing_elements": state.differing,
            "elements": state.elements,
            "differing_tensors": len(state.tensors),
            "tensors_compared": state.compared,
            "leading": None if state.leading is None else state.leading.name,
            "tensors": [_tensor_fields(tensor, found.makers) for tensor in state.tensors[:KEPT]],
            "odd": state.odd,
            "documents": state.documents,
        }
    operator = None
    if parting is not None:
        difference = parting.difference
        operator = {
            **picked(parting.operation, "index name phase module"),
            "result": None if difference is None else _tensor_fields(difference, {}),
        }
    return {
        **picked(found, "own stated step after update_only tries unfinished seconds notes"),
        "cause": None if cause is None else cause.cause,
        "cause_status": None if cause is None else cause.status,
        "findings": [picked(finding, "cause title status text") for finding in found.findings],
        "loss": None if found.loss is None else {"own": found.loss[0].hex(), "stated": found.loss[1].hex()},
        **stated,
        "operator": operator,
        "environment": {
            name: {"own": own, "trainer": theirs} for name, (own, theirs) in found.environment.items()
        },
    }


def _tensor_fields(tensor: TensorDivergence, makers: Mapping[str, str]) -> dict[str, object]:
    distances = tensor.distances
    return {
        **picked(tensor, "name dtype shape elements differing relative flushed"),
        "first": picked(tensor.first, "element index own stated ulps"),
        "worst": picked(tensor.worst, "element index own stated ulps"),
        "ulps": [] if distances is None else [each for each in distances.bins() if each[2]],
        "median_ulp": None if distances is None else distances.quantile(0.5),
        "unordered": 0 if distances is None else distances.unordered,
        "gradient_from": makers.get(tensor.name.removeprefix("model/")),
    }


# -- what is shown ---------------------------------------------------------------------------------


def divergence_headline(given: Foreign) -> Text:
    """Return where the sides part and the likeliest cause, in its style."""
    step, findings = given["step"].text(), list(given["findings"].items())
    differs = any(given[name].value for name in ("tensors", "odd", "documents"))
    if not (step or findings or differs):
        return Text("the same: no step and no tensor differs", style=GOOD)
    own, stated = _sides(given)
    where = f"{own} and {stated} part at step {step}"
    if not step:
        where = "states differ" if given["state"].text() else "runs differ"
    if not findings or findings[0]["cause"].text() == "unknown":
        return Text(f"error: {where}", style=BAD)
    hedge = "" if findings[0]["status"].text() == "confirmed" else ", it seems"
    return Text(f"error[{findings[0]['cause'].text(40)}]: {where}: {_title(findings[0])}{hedge}", style=BAD)


def divergence_parts(given: Foreign) -> Iterator[Part]:
    """Return the first operator and the leading tensor that differ, the causes, and what was not found out."""
    sides, operator = _sides(given), given["operator"]
    if operator:
        where = (
            f"operator {operator['index'].text()}, {operator['name'].text(100)}, {operator['phase'].text(20)} pass of "
            f"{operator['module'].text(200) or 'the loss function'}"
        )
        yield Words(Text.assemble("first operator that differs: ", (where, "bold")), "  --> ")
        if operator["result"]:
            yield _pair(operator["result"], sides)
    elif given["update_only"].value is True:
        words = "every operator of the forward and backward pass gives the same bits; the update does not"
        yield Words(words, "  --> ")
    yield from _tensors(given, sides)
    yield from _findings(list(given["findings"].items()))
    if given["unfinished"].value is True:
        words = "the time for trying causes out was over before all were tried; --effort gives more"
        yield Words(Text(words, style=UNSURE), NOTE)
    for note in given["notes"].items():
        yield Words(Text(note.text(1000), style=QUIET), NOTE)
    environment = [
        f"{Foreign(name).text(40)} {pair['own'].text(80)} against {pair['trainer'].text(80)}"
        for name, pair in given["environment"].members()
    ]
    if environment and all(f["cause"].text() != "library_version" for f in given["findings"].items()):
        yield Words(Text(f"the machines differ in {', '.join(environment)}", style=QUIET), NOTE)


def _sides(given: Foreign) -> tuple[str, str]:
    return given["own"].text(200) or "one side", given["stated"].text(200) or "the other"


def _title(finding: Foreign) -> str:
    return finding["title"].text(200) or finding["cause"].word()


def _tensors(given: Foreign, sides: tuple[str, str]) -> Iterator[Part]:
    tensors, name, after = list(given["tensors"].items()), given["leading"].text(), given["after"].whole()
    if not tensors:
        return
    leading = next((t for t in tensors if t["name"].text() == name), tensors[0])
    maker = leading["gradient_from"].text(200)
    words = "" if after is None else f" after {counted(after, 'step')}"
    words += ", as that repetition gives it" if given["state"].text() == "reconstructed" else ""
    words += f"; its gradient: {maker}" if maker else ""
    yield Words(Text.assemble((leading["name"].text(200), "bold"), words), "  --> ")
    yield _pair(leading, sides)
    yield Words(f"{_of_elements(leading)} elements differ{_size(leading)}", EDGE)
    bins = _merged_bins(leading)
    if bins:
        yield Distances(f"Distances in {leading['name'].text(200)}", bins)
    words = f"in all {_of_elements(given, 'differing_elements')} elements"
    if given["differing_tensors"].whole() is not None:
        words += f" in {given['differing_tensors'].text()} of {given['tensors_compared'].text()} tensors"
    yield Words(f"{words} differ", EDGE)
    rows = [
        (
            t["name"].text(200),
            t["differing"].text(),
            t["elements"].text(),
            _at_most(t),
            _largest(t),
        )
        for t in tensors
        if t is not leading
    ]
    if rows:
        columns = ("also", "differ", "of", "median ulp", "largest ulp")
        yield Table(columns, rows, numbers=(1, 2, 3, 4), things="tensor", most=MOST_TENSORS, lead=EDGE + "  ")
    for name, pair in given["odd"].members():
        own, stated = (each.text() for each in [*pair.items(2), Foreign(None), Foreign(None)][:2])
        words = f"{Foreign(name).text(200)} is {own} on one side, {stated} on the other"
        yield Words(Text(words, style=UNSURE), EDGE)


def _of_elements(given: Foreign, name: str = "differing") -> str:
    return f"{given[name].text()} of {given['elements'].text()}"


def _at_most(tensor: Foreign) -> str:
    median = tensor["median_ulp"].text()
    return f"<= {median}" if median else ""


def _largest(tensor: Foreign) -> str:
    return tensor["worst"]["ulps"].text() or ("NaN" if tensor["median_ulp"].text() else "")


def _size(tensor: Foreign) -> str:
    differing, elements, relative = (tensor[name].number() for name in ("differing", "elements", "relative"))
    part = "" if differing is None or not elements else f" ({share(differing / elements)})"
    if relative is not None:
        return f"{part}, by {relative:.3g} of its size"
    return f"{part}, {'not comparable in size' if tensor['median_ulp'].text() else 'whole numbers'}"


def _pair(tensor: Foreign, sides: tuple[str, str]) -> Lines:
    """Return the first element that differs, with both values."""
    first, width = tensor["first"], max(4, *map(len, sides))
    index = ", ".join(each.text() for each in first["index"].items(16))
    ulps = first["ulps"].whole(LARGEST_DISTANCE)
    own, stated = (
        f"  {side:<{width}}  {first[name].readable()}"
        for side, name in zip(sides, ("own", "stated"), strict=True)
    )
    gap = "" if ulps is None else f"   {counted(ulps, 'ulp')} apart"
    head = f"element {first['element'].text()}" + (f" [{index}]" if index else "")
    return Lines([head, own, Text.assemble(stated, (gap, UNSURE))], EDGE)


def _findings(found: Sequence[Foreign]) -> Iterator[Part]:
    for finding in found:
        status = finding["status"].text(40)
        if status in MARKS:
            mark, style = MARKS[status]
            words = ((_title(finding), "bold"), (f" [{mark}]", style), f": {finding['text'].text(1000)}")
            yield Words(Text.assemble(*words), "   = cause: ")
    tried = [
        f"{_title(f)} ({f['text'].text(1000)})" for f in found if f["status"].text(40) == "not_confirmed"
    ]
    if tried:
        words = f"by repetition, without success: {', '.join(tried)}"
        yield Words(Text(words, style=QUIET), "   = tried: ")


# -- how far apart ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Distances(Part):
    """How many elements lie how far apart: (lowest, highest, count); bars of a chart, or of text on a terminal."""

    kind = "pictures"
    title: str
    bins: Sequence[tuple[int, int, int]]

    def __rich__(self) -> RenderableType:
        most, width = max(count for _, _, count in self.bins) or 1, max(map(len, self._labels))
        lines = [
            Text(f"{label:>{width}} ulp  {'#' * -(-BARS * count // most):<{BARS}} {count:,}", style=QUIET)
            for label, (_, _, count) in zip(self._labels, self.bins, strict=True)
        ]
        return Lines(lines, EDGE + "  ")

    @property
    def charts(self) -> list[Chart]:
        """The chart of a page, on an axis of roots so that small counts show."""
        most = max(count for _, _, count in self.bins) or 1
        rows = named("ulp", self._labels, [f"{count:,}" for _, _, count in self.bins])
        bars = Bars("", "0", [(0, count, row) for row, (_, _, count) in enumerate(self.bins)])
        return [Chart(self.title, Axis("", 0, most, (), "root"), rows, [bars])]

    @property
    def _labels(self) -> list[str]:
        return [f"{low:,}" if low == high else f"{low:,} to {high:,}" for low, high, _ in self.bins]


def _merged_bins(tensor: Foreign) -> list[tuple[int, int, int]]:
    """Return (lowest, highest, count) of the distances in ulp, neighbours merged until there are at most MOST_BINS."""
    bins: list[tuple[int, int, int]] = []
    for part in tensor["ulps"].items(64):
        numbers = [number for each in part.items(3) if (number := each.whole(LARGEST_DISTANCE)) is not None]
        if len(numbers) == 3:
            bins.append((numbers[0], numbers[1], numbers[2]))
    width = -(-len(bins) // MOST_BINS) or 1
    groups = [bins[at : at + width] for at in range(0, len(bins), width)]
    return [(group[0][0], group[-1][1], sum(count for _, _, count in group)) for group in groups]
