"""One run as one page: its order, loss, log, bands, audits, divergence and dispute, with pictures; no torch.

Everything shown comes from files that somebody else may have written. Files are read up to a limit, fields of an unknown
form are left out, every text is escaped, and the page loads nothing and runs nothing.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.text import Text

from tallystick.commit.encoding import parse_hex_float
from tallystick.errors import InvalidInput, StoreError
from tallystick.numerics.grid_table import GridTable
from tallystick.numerics.log import Kind
from tallystick.numerics.policy import policy_of
from tallystick.reports.audit import STYLES
from tallystick.reports.chart import Chart, Dots, Line, Mark, Upright, linear, named, powers
from tallystick.reports.document_parts import audit_parts, dispute_parts, ruling_of
from tallystick.reports.foreign import Foreign
from tallystick.reports.layout import (
    GOOD,
    QUIET,
    UNSURE,
    Card,
    Heading,
    Page,
    Part,
    Pictures,
    Rows,
    Table,
    Words,
)
from tallystick.reports.run import RunSummary
from tallystick.reports.webpage import html
from tallystick.run.calibration import CalibrationChoice, SiteChoice, parse_calibration
from tallystick.store.files import RunDirectory, read_whole

Counts = defaultdict[str, Counter[int]]  # by kind of site: how many have which exponent

LIMIT = 1 << 25  # bytes of an audit's or a dispute's JSON
MOST_MARKS = 4  # first deviations marked in the picture of the loss
NOISE_ONLY = -1
PROVES: Mapping[str, tuple[str, str]] = {
    "none": (
        "Nothing was repeated. This page shows what the trainer states.",
        "That any step was computed, or computed from the stated data; tally audit repeats the run and shows that.",
    ),
    "match": (
        "Whoever made the audit repeated every step of the segments marked as matching, from the trainer's committed states, "
        "with the job's own code and data, and reached the committed states bit for bit; no log entry said what honest "
        "arithmetic could not have said.",
        "That the job or its data are what anybody wants; that an honest-looking log did not choose among the roundings that "
        "it was free to choose (see freedom); anything about steps that were not repeated; that this page, which is no "
        "signed evidence, shows what the audit found: repeat it, or verify the signed statement.",
    ),
    "accused": (
        "From the trainer's own committed state, the stated step could not be reached by whoever made the audit, on a machine "
        "whose own noise lies within the declared bands.",
        "Who is right: the auditor may be lying or at fault. A dispute decides that. The cause that is named is confirmed only "
        "where it says so; a cause that fits is a guess that nothing contradicts.",
    ),
    "cannot_reproduce": (
        "Nothing about the trainer: this machine, code or data could not repeat the run.",
        "That the run is right, or that it is wrong.",
    ),
    "not_accepted": (
        "Whoever made the audit repeated the segments shown and reached the committed states bit for bit, along a log that moves "
        "more than that machine's own noise explains, or more than was accepted.",
        "That anybody lied: noise that this machine does not have, or a stricter limit, gives the same verdict. Nor that "
        "nobody did: by such a log training may have been steered.",
    ),
}
DISPUTED = (
    "The judge repeated one step from the state that both sides agree on, with the job's own code and data, and compared both "
    "claims with every state that honest arithmetic within the declared bands can give.",
    "Anything about other steps: the loser is wrong at this one, the winner is not thereby right everywhere else.",
)


@dataclass(frozen=True)
class Sources:
    """Which files to show beside the run; ``audits`` and ``disputes`` are JSON, ``bands`` a calibration's choice."""

    audits: Sequence[Path] = ()
    disputes: Sequence[Path] = ()
    bands: Path | None = None


def find_sources(directory: RunDirectory) -> Sources:
    """Return the files that lie in the run directory itself: ``audit*.json``, ``verdict*.json`` and ``bands.json``."""
    bands = directory.path / "bands.json"
    return Sources(
        sorted(directory.path.glob("audit*.json")),
        sorted(directory.path.glob("verdict*.json")),
        bands if os.path.lexists(bands) else None,
    )


@dataclass
class PageContents:
    """What the page shows; ``problems`` says what could not be read."""

    report: RunSummary
    audits: list[Foreign] = field(default_factory=list[Foreign])
    disputes: list[Foreign] = field(default_factory=list[Foreign])
    bands: Sequence[Part] = ()
    problems: list[str] = field(default_factory=list[str])

    @property
    def verdict(self) -> str:
        """The gravest of the audits' verdicts; ``none`` without audits."""
        found = {audit["verdict"].text(40) for audit in self.audits}
        for verdict in ("mismatch", "log_violation", "cannot_reproduce", "not_accepted", "match"):
            if verdict in found:
                return verdict
        return "none"

    def html(self) -> str:
        """Return the page."""
        parts = [*self._problems(), *self._run(), *self.bands, *self._others(), *self._proves()]
        said = "not audited" if self.verdict == "none" else self.verdict.replace("_", " ")
        badges = [Text("dispute: ", style=each.style) + each for each in map(ruling_of, self.disputes)]
        name = Path(self.report.directory).name
        return html(Page(said, STYLES.get(self.verdict, UNSURE), parts, name, badges))

    def _problems(self) -> Iterator[Part]:
        if self.problems:
            words = [Words(Text("Not everything could be read:", style=UNSURE)), *map(Words, self.problems)]
            yield Card(words)

    def _run(self) -> Iterator[Part]:
        stated, records = self.report.specification, self.report.transcript.records
        numbers = ", ".join(f"{name} {value}" for name, value in sorted(stated.policy.parameters.items()))
        loss = [(float(r.step), parse_hex_float(r.loss, what="loss")) for r in records if r.loss is not None]
        marks = [
            (float(step), f"step {step}: {audit['verdict'].word()}")
            for audit in self.audits
            if (step := audit["first_step"].whole()) is not None
        ][:MOST_MARKS]
        yield Heading("Run")
        yield Rows([("state", self.report.state()), *self.report.rows(), ("policy's numbers", numbers)])
        yield from self.report.kind_table()
        yield Heading("Training")
        yield Pictures(
            [
                _over_steps("Loss as recorded", "loss", loss, marks),
                _over_steps(
                    "Log", "bytes", [(float(r.step), float(r.log_bytes)) for r in records], from_zero=True
                ),
            ]
        )

    def _others(self) -> Iterator[Part]:
        yield Heading("Audits")
        if not self.audits:
            commands = (
                "tally audit DIR --out audit.json writes one, tally report DIR --audit audit.json shows it."
            )
            yield Words(Text(f"None was given. {commands}", style=QUIET))
        yield from (part for audit in self.audits for part in audit_parts(audit, self.report.steps))
        yield Heading("Dispute")
        if not self.disputes:
            yield Words(
                Text("None was given; tally dispute writes a verdict that --dispute shows.", style=QUIET)
            )
        ordered = self.report.specification.steps
        yield from (part for dispute in self.disputes for part in dispute_parts(dispute, ordered))

    def _proves(self) -> Iterator[Part]:
        found = [PROVES[self.verdict if self.verdict in PROVES else "accused"]]
        if any(each["outcome"].text() in ("fault", "both_acceptable") for each in self.disputes):
            found.append(DISPUTED)
        yield Heading("What this shows")
        for shows, shows_not in found:
            yield Card([Heading(Text("It shows", style=GOOD), 3), Words(shows)])
            yield Card([Heading(Text("It does not show", style=UNSURE), 3), Words(shows_not)])


def _over_steps(
    title: str,
    label: str,
    points: Sequence[tuple[float, float]],
    marks: Sequence[tuple[float, str]] = (),
    *,
    from_zero: bool = False,
) -> Chart:
    """Return one line over the run's steps, with ``marks`` across it."""
    real = [(x, y) for x, y in points if math.isfinite(y)]
    xs, ys = [*(x for x, _ in real), *(x for x, _ in marks)], [y for _, y in real] or [0.0]
    y = linear(label, 0.0, 1.06 * max(ys)) if from_zero else linear(label, min(ys), max(ys), padding=0.06)
    x = linear("step", min(xs, default=0.0), max(xs, default=1.0))
    placed = [Upright("", "bad", *mark, place) for place, mark in enumerate(marks)]
    return Chart(title, x, y, [Line("", "0", real), *placed], [] if real else ["nothing to draw"])


def read_document(directory: RunDirectory, report: RunSummary, sources: Sources) -> PageContents:
    """Return the page's contents; a file that cannot be used is a problem on the page, not an error."""
    found = PageContents(report)
    for paths, kept in ((sources.audits, found.audits), (sources.disputes, found.disputes)):
        for path in paths:
            try:
                kept.append(_load(path, directory.path))
            except (InvalidInput, StoreError) as problem:
                found.problems.append(str(problem))
    if found.report.log_problem is not None:
        found.problems.append(f"the log was not read: {found.report.log_problem}")
    choice: CalibrationChoice | None = None
    if sources.bands is not None:
        try:
            choice = parse_calibration(_bytes(sources.bands, directory.path))
        except (InvalidInput, StoreError) as problem:
            found.problems.append(str(problem))
    try:
        found.bands = _bands(directory, report, choice)
    except (InvalidInput, StoreError) as problem:
        found.problems.append(f"bands: {problem}")
    return found


def _bytes(path: Path, run: Path) -> bytes:
    """Return a file's bytes; one that lies in the run directory may be a stranger's, and is no link."""
    return read_whole(path, limit=LIMIT, what="a file to show", follow=path.parent != run)


def _load(path: Path, run: Path) -> Foreign:
    data = _bytes(path, run)
    try:
        value: object = json.loads(data)
    except (ValueError, RecursionError) as problem:
        raise InvalidInput(f"{path}: is not JSON") from problem
    if not isinstance(value, dict):
        raise InvalidInput(f"{path}: is not a JSON object")
    return Foreign(value, path.name)


# -- bands -----------------------------------------------------------------------------------------


def _bands(directory: RunDirectory, report: RunSummary, choice: CalibrationChoice | None) -> list[Part]:
    """Return bands by kind of site in the last committed state, what they say of noise, and what was measured."""
    stated = report.specification
    safety = policy_of(stated.policy.name, stated.policy.parameters).safety
    done = report.transcript.checkpoints()[-1].steps_done
    bands, special = _stated_bands(GridTable.decode(directory.load_entry(done, "document/grids")))
    measured = _measured(() if choice is None else choice.sites)
    rows = [
        (
            kind.replace("_", " "),
            f"{bands[kind].total() + special[kind].total():,}",
            *(f"2^{end(bands[kind])}" if bands[kind] else "" for end in (min, max)),
            f"2^{max(measured[kind])}" if measured[kind] else "",
            ", ".join(f"{count:,} {name}" for name, count in special[kind].items()),
        )
        for kind in sorted(bands.keys() | special.keys() | measured.keys())
    ]
    columns = ("kind of site", "sites", "smallest band", "largest band", "largest noise measured", "others")
    words = (
        "Within its band from a rounding boundary an element's rounding is logged; a band is chosen from measured noise. "
        f"Powers of two, relative to the size of the site, in the state after {done} steps as its file has it"
    )
    if choice is None:
        words += "; a larger dot stands for more sites. Give the calibration's own measurements with --bands"
    shown = any(bands.values()) or any(measured.values())
    charts = [_band_chart(bands, measured, safety)] if shown else []
    return [
        Heading("Noise and bands"),
        Words(Text(f"{words}.", style=QUIET)),
        Pictures(charts),
        Table(columns, rows, numbers=(1, 2, 3, 4)),
    ]


def _stated_bands(table: GridTable) -> tuple[Counts, defaultdict[str, Counter[str]]]:
    """Return how many sites of each kind have which band, and how many have none, with the reason."""
    bands, special = defaultdict[str, Counter[int]](Counter), defaultdict[str, Counter[str]](Counter)
    for (number, _), grid in table.sites.items():
        kind = Kind(number).name.lower()
        if grid.residue_bits or grid.band == NOISE_ONLY:
            special[kind]["by residues" if grid.residue_bits else "nothing but noise"] += 1
        else:
            bands[kind][grid.band] += 1
    return bands, special


def _measured(sites: Iterable[SiteChoice]) -> Counts:
    """Return how many sites of each kind have which largest measured noise, rounded up to a power of two."""
    found = defaultdict[str, Counter[int]](Counter)
    for site in sites:
        largest = max(site.largest.values(), default=0.0)
        if 0.0 < largest < math.inf and site.band != NOISE_ONLY:
            found[site.kind][math.ceil(math.log2(largest))] += 1
    return found


def _band_chart(bands: Counts, measured: Counts, safety: int) -> Chart:
    """Return a row for each kind of site: its bands, and the noise that was measured or that the bands say it has."""
    kinds = sorted(bands.keys() | measured.keys())

    def dots(counts: Counts, less: int = 0, leave: Counts | None = None) -> list[tuple[float, float, float]]:
        return [
            (exponent - less, row + 0.5, min(9.0, 3.0 + 1.2 * math.log2(1 + count)))
            for row, kind in enumerate(kinds)
            if leave is None or not leave[kind]
            for exponent, count in sorted(counts[kind].items())
        ]

    drawn: list[tuple[str, str, list[tuple[float, float, float]], str]] = [
        (f"its noise is at most this (band / 2^{safety})", "unsure", dots(bands, safety, measured), "arrow"),
        ("largest noise measured by a calibration", "bad", dots(measured), "diamond"),
        ("band of a site", "0", dots(bands), "dot"),
    ]
    marks: list[Mark] = [Dots(*given) for given in drawn if given[2]]
    ends = [x for _, _, points, _ in drawn for x, _, _ in points]
    x = powers("relative to the site's scale", 2, math.floor(min(ends)) - 3, math.ceil(max(ends)) + 2)
    rows = named("", [kind.replace("_", " ") for kind in kinds])
    return Chart("Noise against band, by kind of site", x, rows, marks)
