"""Where two sides part and why, as a compiler would say it: what, where, both values, and a cause with its standing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tallystick.commit.encoding import parse_hex_float
from tallystick.diagnosis.causes import CAUSES, Explanation
from tallystick.diagnosis.divergence import Pair, StateDivergence, TensorDivergence
from tallystick.errors import InvalidInput
from tallystick.reports.layout import BAD, GOOD, QUIET, UNSURE, counted, printable, share

if TYPE_CHECKING:
    from tallystick.diagnosis.causes import Divergence

MARKS: Mapping[str, tuple[str, str]] = {
    "confirmed": ("confirmed", GOOD),
    "fits": ("fits the signature, not confirmed", UNSURE),
    "not_confirmed": ("tried", QUIET),
}
BARS = 32  # characters of the longest bar of a histogram
MOST_BINS = 12
MOST_TENSORS = 6
LISTED = 200  # tensors in JSON


def divergence_fields(found: Divergence) -> dict[str, object]:
    """Return a divergence as JSON; scripts rely on the names."""
    cause, state = found.cause, found.state
    return {
        "own": found.own,
        "stated": found.stated,
        "step": found.step,
        "cause": None if cause is None else cause.cause,
        "cause_status": None if cause is None else cause.status,
        "findings": [
            {"cause": f.cause, "title": f.title, "status": f.status, "text": f.text} for f in found.findings
        ],
        "loss": None if found.loss is None else {"own": found.loss[0].hex(), "stated": found.loss[1].hex()},
        "after": found.after,
        "state": found.how if state is not None else None,
        "differing_elements": None if state is None else state.differing,
        "elements": None if state is None else state.elements,
        "differing_tensors": None if state is None else len(state.tensors),
        "tensors_compared": None if state is None else state.compared,
        "leading": None if state is None or state.leading is None else state.leading.name,
        "tensors": [] if state is None else [_tensor_fields(t, found.makers) for t in state.tensors[:LISTED]],
        "odd": {} if state is None else {name: list(pair) for name, pair in state.odd.items()},
        "documents": [] if state is None else list(state.documents),
        "operator": _operator_fields(found),
        "update_only": found.update_only,
        "environment": {
            name: {"own": own, "trainer": stated} for name, (own, stated) in found.environment.items()
        },
        "tries": found.tries,
        "unfinished": found.unfinished,
        "seconds": found.seconds,
        "notes": list(found.notes),
    }


def _operator_fields(found: Divergence) -> dict[str, object] | None:
    parting = found.operator
    if parting is None:
        return None
    operation, difference = parting.operation, parting.difference
    return {
        "index": operation.index,
        "name": operation.name,
        "phase": operation.phase,
        "module": operation.module,
        "result": None if difference is None else _tensor_fields(difference, {}),
    }


def _tensor_fields(tensor: TensorDivergence, makers: Mapping[str, str]) -> dict[str, object]:
    return {
        "name": tensor.name,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "elements": tensor.elements,
        "differing": tensor.differing,
        "first": _pair_fields(tensor.first),
        "worst": _pair_fields(tensor.worst),
        "relative": tensor.relative,
        "flushed": tensor.flushed,
        "ulps": []
        if tensor.distances is None
        else [list(part) for part in tensor.distances.bins() if part[2]],
        "unordered": 0 if tensor.distances is None else tensor.distances.unordered,
        "gradient_from": makers.get(_parameter(tensor.name)),
    }


def _pair_fields(pair: Pair) -> dict[str, object]:
    return {
        "element": pair.element, "index": list(pair.index), "own": pair.own, "stated": pair.stated, "ulps": pair.ulps,
    }  # fmt: skip


def _parameter(entry: str) -> str:
    return entry.removeprefix("model/")


@dataclass(frozen=True)
class DivergencePage:
    """One divergence, on a terminal or as JSON."""

    found: Divergence

    def fields(self) -> dict[str, object]:
        """Return what ``--json`` prints."""
        return divergence_fields(self.found)

    def __rich__(self) -> RenderableType:
        """Return the page; every text is shown as it is, control characters escaped."""
        found = self.found
        parts: list[RenderableType] = [self._headline()]
        parts += self._place()
        parts += self._findings()
        parts += [_line("note", text, QUIET) for text in found.notes]
        if found.environment and not any(f.cause == "library_version" for f in found.findings):
            text = ", ".join(f"{name} {a} against {b}" for name, (a, b) in found.environment.items())
            parts.append(_line("note", f"the machines differ in {text}", QUIET))
        return Group(*parts)

    def _headline(self) -> RenderableType:
        found = self.found
        if found.step is None and not found.findings and (found.state is None or found.state.is_empty):
            return Text("the same: no step and no tensor differs", style=GOOD)
        cause = found.cause
        where = f"{found.own} and {found.stated} part at step {found.step}"
        if found.step is None:
            where = "runs differ" if found.state is None else "states differ"
        if cause is None or cause.cause == "unknown":
            return Text(printable(f"error: {where}"), style=BAD)
        hedge = "" if cause.status == "confirmed" else ", it seems"
        return Text(printable(f"error[{cause.cause}]: {where}: {cause.title}{hedge}"), style=BAD)

    def _place(self) -> list[RenderableType]:
        found, state = self.found, self.found.state
        parts: list[RenderableType] = []
        if found.operator is not None:
            parts.append(_arrow(f"first operator that differs: {found.operator.operation}"))
            if found.operator.difference is not None:
                parts += self._values(found.operator.difference, found.operator.difference.first)
        elif found.update_only:
            parts.append(
                _arrow(
                    "every operator of the forward and backward pass gives the same bits; the update does not"
                )
            )
        if state is None or state.leading is None:
            return parts
        leading = state.leading
        maker = found.makers.get(_parameter(leading.name))
        after = "" if found.after is None else f" after {counted(found.after, 'step')}"
        how = ", as that repetition gives it" if found.how == "reconstructed" else ""
        parts.append(_arrow(f"{leading.name}{after}{how}" + (f"; its gradient: {maker}" if maker else "")))
        parts += self._values(leading, leading.first)
        parts.append(_line("", f"{leading.differing:,} of {leading.elements:,} elements differ ({share(leading.share)}), "
                               f"{_size(leading)}", ""))  # fmt: skip
        parts += [Text(line, style=QUIET) for line in histogram_lines(leading)]
        parts += self._others(state, leading)
        return parts

    def _values(self, tensor: TensorDivergence, pair: Pair) -> list[RenderableType]:
        found = self.found
        index = f"[{', '.join(map(str, pair.index))}]" if pair.index else ""
        width = max(len(found.own), len(found.stated), 4)
        gap = "" if pair.ulps is None else f"{counted(pair.ulps, 'ulp')} apart"
        return [
            Text(printable(f"   | element {pair.element:,} {index}")),
            Text(printable(f"   |   {found.own:<{width}}  {_readable(pair.own)}")),
            Text.assemble(
                printable(f"   |   {found.stated:<{width}}  {_readable(pair.stated)}   "), (gap, UNSURE)
            ),
        ]

    def _others(self, state: StateDivergence, leading: TensorDivergence) -> list[RenderableType]:
        rest = [t for t in state.tensors if t is not leading]
        tensors = f"{len(state.tensors)} of {state.compared} tensors"
        head = f"in all {state.differing:,} of {state.elements:,} elements in {tensors} differ"
        parts: list[RenderableType] = [_line("", head, "")]
        if rest:
            table = Table(box=None, padding=(0, 2, 0, 0), header_style=QUIET)
            for heading in ("   |   also", "differ", "of", "median ulp", "largest ulp"):
                table.add_column(heading, justify="left" if "also" in heading else "right", overflow="fold")
            for t in rest[:MOST_TENSORS]:
                table.add_row(
                    Text(printable(f"   |   {t.name}")), f"{t.differing:,}", f"{t.elements:,}", *_ulps(t)
                )
            parts.append(table)
        if len(rest) > MOST_TENSORS:
            parts.append(
                _line("", f"and {counted(len(rest) - MOST_TENSORS, 'more tensor')}; --json lists them", QUIET)
            )
        parts += [
            _line("", f"{name} is {a} on one side, {b} on the other", UNSURE)
            for name, (a, b) in state.odd.items()
        ]
        return parts

    def _findings(self) -> list[RenderableType]:
        parts: list[RenderableType] = []
        tried = [f for f in self.found.findings if f.status == "not_confirmed"]
        for finding in self.found.findings:
            if finding.status != "not_confirmed":
                parts.append(_cause(finding))
        if tried:
            words = ", ".join(f"{CAUSES[f.cause]} ({f.text.partition(' ')[0]})" for f in tried)
            parts.append(_line("tried", f"by repetition, without success: {words}", QUIET))
        if self.found.unfinished:
            parts.append(
                _line(
                    "note",
                    "the time for trying causes out was over before all were tried; --effort gives more",
                    UNSURE,
                )
            )
        return parts


def _cause(finding: Explanation) -> RenderableType:
    mark, style = MARKS[finding.status]
    text = Text.assemble(printable(finding.title), (f" [{mark}]", style), printable(f": {finding.text}"))
    return _labelled("   = cause: ", text)


def _labelled(head: str, text: Text) -> RenderableType:
    """Return ``text`` after ``head``, its further lines as far to the right."""
    table = Table.grid()
    table.add_column(no_wrap=True, style=QUIET)
    table.add_column(overflow="fold")
    table.add_row(Text(head), text)
    return table


def _arrow(text: str) -> RenderableType:
    return _labelled("  --> ", Text(printable(text)))


def _line(label: str, text: str, style: str) -> RenderableType:
    return _labelled(f"   = {label}: " if label else "   | ", Text(printable(text), style=style))


def _readable(value: str) -> str:
    try:
        number = parse_hex_float(value, what="value")
    except InvalidInput:
        return value
    return f"{value} ({number:.9g})"


def _size(tensor: TensorDivergence) -> str:
    if tensor.distances is None:
        return "whole numbers"
    if not math.isfinite(tensor.relative):
        return "not comparable in size"
    return f"by {tensor.relative:.3g} of its size"


def _ulps(tensor: TensorDivergence) -> tuple[str, str]:
    if tensor.distances is None:
        return "", ""
    worst = tensor.worst.ulps
    return f"<= {tensor.distances.quantile(0.5):,}", "NaN" if worst is None else f"{worst:,}"


def merged_bins(tensor: TensorDivergence, most: int = MOST_BINS) -> Sequence[tuple[int, int, int]]:
    """Return (lowest, highest, count) of the distances, neighbouring bins merged until there are at most ``most``."""
    if tensor.distances is None:
        return []
    bins = tensor.distances.bins()
    width = -(-len(bins) // most) or 1
    return [
        (group[0][0], group[-1][1], sum(count for _, _, count in group))
        for group in (bins[at : at + width] for at in range(0, len(bins), width))
    ]


def histogram_lines(tensor: TensorDivergence) -> list[str]:
    """Return the histogram of ulp distances as lines of text."""
    bins = merged_bins(tensor)
    if len(bins) == 0 or tensor.differing < 2:
        return []
    most = max(count for _, _, count in bins) or 1
    labels = [f"{low:,}" if low == high else f"{low:,} to {high:,}" for low, high, _ in bins]
    width = max(map(len, labels))
    return [
        f"   |   {label:>{width}} ulp  {'#' * -(-BARS * count // most):<{BARS}} {count:,}"
        for label, (_, _, count) in zip(labels, bins, strict=True)
    ]
