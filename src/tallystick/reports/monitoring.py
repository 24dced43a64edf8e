"""What was found out about owners and their chips: a page for a terminal, JSON, and one HTML file."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tallystick.fleet.agent.chip_log import NumberedFinding, snapshots_of
from tallystick.fleet.provenance.owner_findings import status_of
from tallystick.fleet.provenance.verification import ChipView, OwnerVerdict, RunEvidence
from tallystick.reports.layout import BAD, GOOD, UNSURE, Row, counted, page, printable
from tallystick.reports.memorisation import MemoryReport, power_in_words

STYLES = {"pass": GOOD, "fail": BAD, "unknown": UNSURE}
COLOURS = {
    "exact": "#1a7f37",
    "torn": "#9a6700",
    "unexplained": "#cf222e",
    "doubtful": "#6e7781",
    "empty": "#d0d7de",
}
WORDS = {
    "exact": "matches a step of a declared run",
    "torn": "torn: matches two steps page by page",
    "unexplained": "belongs to no declared run",
    "doubtful": "claimed for a step that could not be repeated",
    "empty": "of no memory: nothing was registered",
}
CLAIMS = (
    ("correct", "declared-run correctness"),
    ("complete", "declared-run completeness"),
    ("fleet", "fleet completeness"),
)


@dataclass(frozen=True)
class OwnerReport:
    """One owner: the verdict, and what it rests on."""

    verdict: OwnerVerdict
    chips: Sequence[ChipView]
    evidence: Sequence[RunEvidence]

    def fields(self) -> dict[str, object]:
        """Return the report as JSON."""
        return {
            **self.verdict.fields(),
            "chips": [
                {
                    "ueid": chip.ueid,
                    "assurance": chip.assurance.fields(),
                    "records": len(chip.log),
                    "snapshots": [
                        {
                            "seq": seq,
                            "status": status_of(chip, seq),
                            "run": None if found is None else found[0],
                            "match": None if found is None else found[1].fields(),
                        }
                        for seq, found in sorted(chip.matches.items())
                    ],
                }
                for chip in self.chips
            ],
            "memory": {
                item.report.run: item.memory.fields() for item in self.evidence if item.memory is not None
            },
            "segments": [
                {**outcome.fields(), "run": item.report.run, "reasons": list(selected.reasons)}
                for item in self.evidence
                for selected, outcome in zip(item.selected, item.outcomes, strict=True)
            ],
        }

    def __rich__(self) -> RenderableType:
        """Return the report for people."""
        verdict = self.verdict
        rows: list[Row] = [
            (name, Text(getattr(verdict, field), style=STYLES[getattr(verdict, field)]))
            for field, name in CLAIMS
        ]
        counts = count_statuses(self.chips)
        told = ", ".join(f"{number} {status}" for status, number in counts.items() if number)
        rows.append(
            ("snapshots", f"{sum(counts.values())} on {counted(len(self.chips), 'chip')}: {told or 'none'}")
        )
        for item in self.evidence:
            if item.memory is not None:
                rows.append((f"memory {item.report.run[:9]}..", power_in_words(item.memory)))
            repeated = sum(outcome.end - outcome.start for outcome in item.outcomes)
            rows.append(
                (f"run {item.report.run[:12]}..", f"{repeated} of {item.report.steps} steps repeated")
            )
        rows.append(("assurance", f"L{verdict.assurance}, the least of its chips"))
        for finding in all_findings(verdict):
            style = {"violation": BAD, "unknown": UNSURE, "note": ""}[finding.severity]
            rows.append((f"finding {finding.rule}", Text(finding.text, style=style)))
        rows.append(("not covered", "; ".join(verdict.excluded)))
        return page(f"{verdict.owner}: {verdict.verdict}", STYLES[verdict.verdict], rows)


@dataclass(frozen=True)
class FleetReport:
    """Several owners, how long it took, and where everything lies."""

    owners: Sequence[OwnerReport]
    seconds: float
    place: str
    facts: Mapping[str, object]

    def fields(self) -> dict[str, object]:
        """Return the report as JSON."""
        return {
            "owners": [owner.fields() for owner in self.owners],
            "seconds": round(self.seconds, 1),
            "place": self.place,
            **self.facts,
        }

    def __rich__(self) -> RenderableType:
        """Return the report for people."""
        table = Table(box=None, padding=(0, 1), title="in short", title_justify="left", title_style="bold")
        for heading in ("  owner", "verdict", "runs correct", "runs complete", "fleet complete", "assurance"):
            table.add_column(heading)
        for owner in self.owners:
            v = owner.verdict
            cells = [Text(text, style=STYLES[text]) for text in (v.verdict, v.correct, v.complete, v.fleet)]
            table.add_row(f"  {printable(v.owner)}", *cells, f"L{v.assurance}")
        end = Text(f"everything lies in {self.place}, took {self.seconds:.0f} s")
        return Group(*self.owners, table, end)

    def page(self) -> bytes:
        """Return one HTML file without scripts or references to other files."""
        body = "".join(_section(owner) for owner in self.owners)
        facts = "".join(
            f"<li>{_e(name.replace('_', ' '))}: {_e(value)}</li>" for name, value in self.facts.items()
        )
        legend = "".join(
            f'<li><svg width="12" height="12"><circle cx="6" cy="6" r="5" fill="{COLOURS[name]}"/></svg> {_e(text)}</li>'
            for name, text in WORDS.items()
        )
        return _PAGE.format(body=body, facts=facts, legend=legend, summary=_summary(self.owners)).encode()


def count_statuses(chips: Sequence[ChipView]) -> dict[str, int]:
    """Return how many snapshots have each status."""
    counts = dict.fromkeys(WORDS, 0)
    for chip in chips:
        for seq in chip.matches:
            counts[status_of(chip, seq)] += 1
    return counts


def all_findings(verdict: OwnerVerdict) -> list[NumberedFinding]:
    """Return the findings on an owner's runs, then those on its chips."""
    return [*(finding for run in verdict.runs for finding in run.findings), *verdict.findings]


def _section(owner: OwnerReport) -> str:
    verdict = owner.verdict
    claims = "".join(
        f'<li>{_e(name)}: <b class="{getattr(verdict, field)}">{getattr(verdict, field)}</b></li>'
        for field, name in CLAIMS
    )
    findings = "".join(
        f'<li class="{f.severity}">rule {f.rule}, {_e(f.name)}: {_e(f.text)}</li>'
        for f in all_findings(verdict)
    )
    segments = "".join(
        f"<tr><td>{outcome.start} to {outcome.end}</td><td>{_e(', '.join(selected.reasons))}</td>"
        f'<td class="{"pass" if outcome.verdict == "match" else "fail"}">{_e(outcome.verdict)}</td>'
        f"<td>{_e(outcome.text)}</td></tr>"
        for item in owner.evidence
        for selected, outcome in zip(item.selected, item.outcomes, strict=True)
    )
    memory = "".join(
        MemoryReport(item.report.run, item.memory).section()
        for item in owner.evidence
        if item.memory is not None
    )
    return (
        f'<section><h2>{_e(verdict.owner)}: <span class="{verdict.verdict}">{verdict.verdict}</span></h2>'
        f"<ul>{claims}<li>assurance: L{verdict.assurance}, the least of its chips</li></ul>"
        f"<h3>Snapshots over time</h3>{_timeline(owner.chips)}"
        f"<h3>Findings</h3><ul>{findings or '<li>none</li>'}</ul>"
        f"<h3>Repeated segments</h3><table><tr><th>steps</th><th>why</th><th>verdict</th><th></th></tr>{segments}</table>"
        f"<h3>Memory of the claimed data</h3>{memory or '<p>Was not asked for: nothing is known of it.</p>'}"
        f"<p>Not covered: {_e('; '.join(verdict.excluded))}.</p></section>"
    )


def _timeline(chips: Sequence[ChipView]) -> str:
    """Return a row of marks for each chip, at the active time of its snapshots."""
    width, left, row = 760, 120, 26
    end = max((chip.log[-1].record.clocks.active for chip in chips if chip.log), default=0) or 1
    parts: list[str] = []
    for number, chip in enumerate(chips):
        y = row * number + 18
        parts.append(f'<text x="0" y="{y + 4}">{_e(chip.ueid[-8:])}</text>')
        parts.append(f'<line x1="{left}" x2="{left + width}" y1="{y}" y2="{y}" stroke="#d0d7de"/>')
        for logged, _ in snapshots_of(chip.log):
            seq = logged.record.seq
            status = status_of(chip, seq)
            x = left + width * logged.record.clocks.active / end
            found = chip.matches[seq]
            step = "" if found is None else f", after step {found[1].steps_done}"
            title = _e(f"record {seq}: {WORDS[status]}{step}")
            parts.append(
                f'<circle cx="{x:.1f}" cy="{y}" r="6" fill="{COLOURS[status]}"><title>{title}</title></circle>'
            )
    height = row * len(chips) + 30
    days = end / 86_400_000
    parts.append(f'<text x="{left}" y="{height - 4}">0</text>')
    parts.append(f'<text x="{left + width}" y="{height - 4}" text-anchor="end">{days:.3g} days in use</text>')
    label = "Snapshots of each chip over its active time"
    return (
        f'<svg class="timeline" role="img" aria-label="{label}" viewBox="0 0 {left + width + 10} {height}" width="100%">'
        f"{''.join(parts)}</svg>"
    )


def _summary(owners: Sequence[OwnerReport]) -> str:
    rows = "".join(
        f"<tr><td>{_e(v.owner)}</td>"
        + "".join(f'<td class="{text}">{text}</td>' for text in (v.verdict, v.correct, v.complete, v.fleet))
        + f"<td>L{v.assurance}</td></tr>"
        for v in (owner.verdict for owner in owners)
    )
    heads = ("owner", "verdict", "runs correct", "runs complete", "fleet complete", "assurance")
    return f"<table><tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr>{rows}</table>"


def _e(value: object) -> str:
    return html.escape(printable(str(value)))


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Tallystick: chips and declared runs</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1f2328; }}
table {{ border-collapse: collapse; }} td, th {{ padding: .2rem .8rem .2rem 0; text-align: left; vertical-align: top; }}
tr + tr td {{ border-top: 1px solid #d0d7de; }} .timeline text {{ font: 13px system-ui, sans-serif; fill: #59636e; }}
section {{ border-top: 2px solid #d0d7de; margin-top: 2rem; }} ul.plain {{ list-style: none; padding: 0; }}
.wide {{ overflow-x: auto; }} .pass {{ color: #1a7f37; }} .fail, .violation {{ color: #cf222e; }} .unknown {{ color: #9a6700; }}
</style></head><body>
<h1>Chips and declared runs</h1>
{summary}
<ul class="plain">{legend}</ul>
{body}
<section><h2>How this was done</h2><ul>{facts}</ul></section>
</body></html>
"""
