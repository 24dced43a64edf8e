"""One run as one HTML file: its order, loss, log, bands, audits, divergence and dispute, with pictures; no torch.

Everything shown comes from files that somebody else may have written. Files are read up to a limit, fields of an unknown
form are left out, every text is escaped, and the page loads nothing and runs nothing.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tallystick.commit.encoding import parse_hex_float
from tallystick.errors import InvalidInput, StoreError
from tallystick.evidence.verification import quoted
from tallystick.numerics.grid_table import GridTable
from tallystick.numerics.log import Kind
from tallystick.numerics.policy import policy_of
from tallystick.reports.chart import (
    Chart,
    Line,
    Round,
    Spread,
    Stretch,
    TreeLevel,
    bars_svg,
    spread_svg,
    strip_svg,
    tree_svg,
)
from tallystick.reports.layout import printable, share
from tallystick.reports.run import RunReport
from tallystick.run.calibration import CalibrationChoice, parse_calibration
from tallystick.store.files import RunDirectory, read_whole

if TYPE_CHECKING:
    from jinja2 import Template

LIMIT = 1 << 25  # bytes of an audit's or a dispute's JSON
LISTED = 40  # deviations, tensors, findings shown of each
MOST_MOVES = 4096
NOISE_ONLY = -1
TEMPLATE = "document.html.j2"
STANDINGS: Mapping[str, str] = {
    "match": "good", "agreement": "good", "confirmed": "bad", "mismatch": "bad", "log_violation": "bad", "fault": "bad",
    "not_accepted": "unsure",
}  # fmt: skip
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
class Document:
    """What the template shows; ``problems`` says what could not be read."""

    report: RunReport
    audits: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    disputes: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    bands: dict[str, Any] = field(default_factory=dict[str, Any])
    problems: list[str] = field(default_factory=list[str])

    @property
    def verdict(self) -> str:
        """The gravest of the audits' verdicts; ``none`` without audits."""
        found = {str(audit["verdict"]) for audit in self.audits}
        for verdict in ("mismatch", "log_violation", "cannot_reproduce", "not_accepted", "match"):
            if verdict in found:
                return verdict
        return "none"

    def html(self) -> str:
        """Return the page."""
        return _template().render(
            run=self._run(), pictures=self._pictures(), audits=self.audits, disputes=self.disputes, bands=self.bands,
            problems=[printable(problem) for problem in self.problems], verdict=self.verdict,
            standing=STANDINGS.get(self.verdict, "unsure"), proves=self._proves(),
        )  # fmt: skip

    def _run(self) -> dict[str, Any]:
        report = self.report
        stated = report.specification
        per_step, bits = report.log_bytes_per_step, report.log_bits_per_parameter_step
        rows: list[tuple[str, str]] = [
            ("directory", report.directory),
            (
                "state",
                "finished"
                if report.finished
                else f"not finished: {report.steps:,} of {stated.steps:,} steps",
            ),
            ("job", stated.job.path),
            (
                "settings",
                " ".join(f"{n}={v}" for n, v in sorted(stated.job.settings.items())) or "the job's own",
            ),
            ("job source", stated.job.source_digest),
            ("dataset", stated.job.dataset_digest or "none stated"),
            ("policy", stated.policy.name),
            ("steps", f"{report.steps:,}, a committed state every {stated.checkpoint_every:,}"),
            ("seed", str(stated.seed)),
            ("parameters", f"{report.parameters:,}"),
            (
                "root",
                report.transcript.root().hex() if report.finished else "none before the run is finished",
            ),
            ("final state", report.transcript.checkpoints()[-1].state_root),
        ]
        if per_step is not None and bits is not None:
            rows.append(("log", f"{per_step:,.1f} bytes a step, {bits:.3g} bits a parameter and step"))
        if report.freedom_estimate is not None:
            rows.append(
                (
                    "freedom",
                    f"about {share(report.freedom_estimate)} of roundings were a log's to choose; an audit measures it",
                )
            )
        rows.append(("versions", ", ".join(f"{k} {v}" for k, v in stated.versions.items())))
        parameters = ", ".join(f"{name} {value}" for name, value in sorted(stated.policy.parameters.items()))
        rows.append(("policy's numbers", parameters))
        return {
            "rows": [(name, printable(text)) for name, text in rows],
            "name": printable(Path(report.directory).name),
        }

    def _pictures(self) -> dict[str, str]:
        records = self.report.transcript.records
        loss = [(float(r.step), parse_hex_float(r.loss, what="loss")) for r in records if r.loss is not None]
        marks = [
            (float(step), f"step {step}: {_word(audit['verdict'])}")
            for audit in self.audits
            if (step := audit["first_step"]) is not None
        ][:4]
        log = [(float(r.step), float(r.log_bytes)) for r in records]
        return {
            "loss": Chart("Loss as recorded", "step", "loss", [Line("loss", loss)], marks).svg(),
            "log": Chart("Log", "step", "bytes", [Line("bytes", log)], from_zero=True).svg(),
        }

    def _proves(self) -> list[tuple[str, str]]:
        key = self.verdict if self.verdict in PROVES else "accused"
        parts = [PROVES[key]]
        if any(dispute["outcome"] in ("fault", "both_acceptable") for dispute in self.disputes):
            parts.append(DISPUTED)
        return parts


@functools.cache
def _template() -> Template:
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("tallystick.reports", "."), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    # Our own drawings, escaped where they were made.
    environment.filters["svg"] = lambda text: Markup(str(text))
    return environment.get_template(TEMPLATE)


def read_document(directory: RunDirectory, report: RunReport, sources: Sources) -> Document:
    """Return the page's contents; a file that cannot be used is a problem on the page, not an error."""
    found = Document(report)
    for path in sources.audits:
        value = _load(path, directory.path, found.problems)
        if value is not None:
            found.audits.append(_audit(value, path.name, report.steps))
    for path in sources.disputes:
        value = _load(path, directory.path, found.problems)
        if value is not None:
            found.disputes.append(_dispute(value, path.name, report.specification.steps))
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


def _load(path: Path, run: Path, problems: list[str]) -> dict[str, Any] | None:
    try:
        value: object = json.loads(_bytes(path, run))
    except (InvalidInput, StoreError) as problem:
        problems.append(str(problem))
        return None
    except (ValueError, RecursionError):
        problems.append(f"{path}: is not JSON")
        return None
    if not isinstance(value, dict):
        problems.append(f"{path}: is not a JSON object")
        return None
    return {str(name): item for name, item in value.items()}


# -- what other people's JSON may hold -------------------------------------------------------------


def _text(value: object, limit: int = 400) -> str:
    """``value`` as short text without control characters; empty for what is no text or number."""
    if isinstance(value, bool) or value is None:
        return "" if value is None else str(value).lower()
    if isinstance(value, (int, float)):
        return _count(value)
    return printable(value[:limit]) + (".." if len(value) > limit else "") if isinstance(value, str) else ""


def _count(value: float) -> str:
    if isinstance(value, int):
        return f"{value:,}" if abs(value) < 1 << 63 else "a very large number"
    return f"{value:.6g}"


def _word(value: object) -> str:
    return _text(value, 60).replace("_", " ")


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53 else None


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _table(value: object) -> dict[str, Any]:
    return {str(name): item for name, item in value.items()} if isinstance(value, dict) else {}


def _items(value: object, limit: int = LISTED) -> list[Any]:
    return list(value[:limit]) if isinstance(value, list) else []


# -- audits ----------------------------------------------------------------------------------------


def _audit(given: dict[str, Any], name: str, steps: int) -> dict[str, Any]:
    verdict = _text(given.get("verdict"), 40) or "unknown"
    freedom = _table(given.get("freedom"))
    fraction, moved = _number(freedom.get("fraction")), _whole(freedom.get("moved"))
    budget = _whole(freedom.get("move_budget"))
    explained = "" if budget is None else f", of {budget:,} that noise explains at most"
    rows = [
        ("steps repeated", _text(given.get("steps"))),
        ("profile", _text(given.get("profile"))),
        ("elements that differ", _text(given.get("differing_elements"))),
        ("freedom", "" if fraction is None else f"{share(fraction)} of roundings were a log's to choose"),
        ("moved", "" if moved is None else f"{moved:,} roundings by this log{explained}"),
        ("environment", _environment(given.get("environment"))),
    ]
    stretches: list[Stretch] = []
    deviations: list[dict[str, str]] = []
    for segment in map(_table, _items(given.get("segments"), MOST_MOVES)):
        start, end = _whole(segment.get("start")), _whole(segment.get("end"))
        if start is None or end is None or end < start:
            continue
        standing = STANDINGS.get(_text(segment.get("verdict")), "unsure")
        stretches.append(Stretch(start, end, standing))
        deviations += [_deviation(item) for item in _items(segment.get("deviations"))]
    divergence = given.get("divergence")
    return {
        "file": printable(name),
        "verdict": verdict,
        "word": _word(verdict),
        "standing": STANDINGS.get(verdict, "unsure"),
        "first_step": _whole(given.get("first_step")),
        "rows": [(label, text) for label, text in rows if text],
        "strip": strip_svg("Segments repeated", stretches, steps) if stretches else "",
        "deviations": deviations[:LISTED],
        "more": max(0, len(deviations) - LISTED),
        "divergence": divergence_view(_table(divergence)) if isinstance(divergence, dict) else None,
    }


def _environment(value: object) -> str:
    parts = [
        f"{_text(name, 40)} {_text(_table(pair).get('own'), 80)} (trainer: {_text(_table(pair).get('trainer'), 80)})"
        for name, pair in list(_table(value).items())[:LISTED]
    ]
    return ", ".join(parts)


def _deviation(value: object) -> dict[str, str]:
    item = _table(value)
    return {name: _text(item.get(name)) for name in ("step", "kind", "subject", "element", "own", "stated")}


def divergence_view(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the template shows of a divergence's JSON, fields of another form left out."""
    tensors = [_tensor(item) for item in _items(given.get("tensors"))]
    leading = next(
        (t for t in tensors if t["name"] == _text(given.get("leading"))), tensors[0] if tensors else None
    )
    operator = _table(given.get("operator"))
    result = operator.get("result")
    findings = [
        {
            "title": _text(item.get("title"), 200) or _word(item.get("cause")),
            "status": _text(item.get("status"), 40),
            "text": _text(item.get("text"), 1000),
        }
        for item in map(_table, _items(given.get("findings")))
    ]
    differing, elements = _whole(given.get("differing_elements")), _whole(given.get("elements"))
    return {
        "step": _text(given.get("step")),
        "own": _text(given.get("own"), 200) or "one side",
        "stated": _text(given.get("stated"), 200) or "the other",
        "findings": [f for f in findings if f["status"] in ("confirmed", "fits")],
        "tried": [f for f in findings if f["status"] == "not_confirmed"],
        "leading": leading,
        "tensors": tensors,
        "after": _text(given.get("after")),
        "state": _text(given.get("state"), 40),
        "total": ""
        if differing is None or elements is None
        else f"{differing:,} of {elements:,} elements differ",
        "operator": {
            "where": f"operator {_text(operator.get('index'))}, {_text(operator.get('name'), 100)}, "
            f"{_text(operator.get('phase'), 20)} pass of {_text(operator.get('module'), 200) or 'the loss function'}",
            "result": _tensor(result) if isinstance(result, dict) else None,
        }
        if operator
        else None,
        "update_only": given.get("update_only") is True,
        "notes": [_text(note, 1000) for note in _items(given.get("notes"))],
        "histogram": bars_svg(f"Distances in {leading['name']}, in ulp", leading["bars"]) if leading else "",
    }


def _tensor(value: object) -> dict[str, Any]:
    item = _table(value)
    first, worst = _table(item.get("first")), _table(item.get("worst"))
    bars: list[tuple[str, int]] = []
    for part in _items(item.get("ulps"), 64):
        numbers = [_whole_or_large(each) for each in _items(part, 3)]
        if len(numbers) == 3 and None not in numbers:
            low, high, count = numbers
            bars.append((f"{low:,}" if low == high else f"{low:,} to {high:,}", count or 0))
    return {
        "name": _text(item.get("name"), 200),
        "elements": _text(item.get("elements")),
        "differing": _text(item.get("differing")),
        "element": _text(first.get("element")),
        "index": ", ".join(_text(each) for each in _items(first.get("index"), 16)),
        "own": _readable(first.get("own")),
        "stated": _readable(first.get("stated")),
        "ulps": _text(first.get("ulps")),
        "largest": _text(worst.get("ulps")),
        "source": _text(item.get("gradient_from"), 200),
        "bars": bars,
    }


def _whole_or_large(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 64 else None


def _readable(value: object) -> str:
    text = _text(value, 80)
    try:
        return f"{text} ({parse_hex_float(text, what='value'):.9g})"
    except InvalidInput:
        return text


# -- disputes --------------------------------------------------------------------------------------


def _dispute(given: dict[str, Any], name: str, steps: int) -> dict[str, Any]:
    loser, outcome = _text(given.get("loser"), 40), _text(given.get("outcome"), 40)
    ruling = f"the {loser} loses" if loser not in ("", "none") else "nobody loses"
    step = _whole(given.get("step"))
    if step is not None:
        ruling += f", at step {step:,}"
    levels = _levels(given, steps)
    rounds = [
        (_text(level, 60), _text(count))
        for level, count in list(_table(given.get("rounds_per_level")).items())[:LISTED]
    ]
    known = {
        "format",
        "loser",
        "outcome",
        "step",
        "rounds",
        "rounds_per_level",
        "reason",
        "moves",
        "verdict_file",
    }
    others = [(_text(key, 60), _other(value)) for key, value in given.items() if key not in known]
    return {
        "file": printable(name),
        "ruling": ruling,
        "standing": "bad" if loser not in ("", "none") else ("good" if outcome == "agreement" else "unsure"),
        "outcome": outcome,
        "word": _word(outcome),
        "reason": quoted(str(given.get("reason", "")), most=2000),
        "rounds": rounds,
        "tree": tree_svg("Rounds of the bisection", levels, ruling) if levels else "",
        "others": [(key, text) for key, text in others if text][:LISTED],
    }


def _other(value: object) -> str:
    """A field that this version does not know: shown in short as it is."""
    if isinstance(value, (dict, list)):
        return _text(json.dumps(value, ensure_ascii=True)[:2000], 400)
    return _text(value)


def _levels(given: Mapping[str, Any], steps: int) -> list[TreeLevel]:
    """Put the moves into rounds, and rounds into levels: claims at one position next to each other are one round."""
    names = [
        (_text(name, 60), _whole(count) or 0) for name, count in _table(given.get("rounds_per_level")).items()
    ]
    asked: list[tuple[str | None, Round]] = []
    waiting: dict[str, tuple[int, str, str | None]] = {}
    for move in _items(given.get("moves"), MOST_MOVES):
        claim = _claim(move)
        if claim is None:
            continue
        party, index, commitment, level = claim
        other = waiting.pop("auditor" if party == "trainer" else "trainer", None)
        if other is None or other[0] != index:
            waiting = {party: (index, commitment, level)}
            continue
        pair = (commitment, other[1]) if party == "trainer" else (other[1], commitment)
        asked.append((level, Round(index, pair[0][:8], pair[1][:8], pair[0] == pair[1])))
        waiting = {}
    return _nested(_named(asked, names), steps)


def _claim(move: object) -> tuple[str, int, str, str | None] | None:
    if isinstance(move, dict):
        item = _table(move)
        parts: list[object] = [
            item.get("party"),
            item.get("index", item.get("position")),
            item.get("commitment"),
            item.get("level"),
        ]
    else:
        parts = [*_items(move, 4), None]
    if len(parts) < 4:
        return None
    party, index, commitment = _text(parts[0], 20), _whole(parts[1]), _text(parts[2], 80)
    level = parts[3] if isinstance(parts[3], str) else None
    return None if party not in ("trainer", "auditor") or index is None else (party, index, commitment, level)


def _named(
    asked: Iterable[tuple[str | None, Round]], names: Sequence[tuple[str, int]]
) -> list[tuple[str, list[Round]]]:
    """Give each round its level: its own name for it, else by the counts of rounds per level."""
    found: list[tuple[str, list[Round]]] = []
    left = [name for name, count in names for _ in range(min(count, MOST_MOVES))]
    for number, (level, one) in enumerate(asked):
        name = level or (left[number] if number < len(left) else "further")
        if not found or found[-1][0] != name:
            found.append((name, []))
        found[-1][1].append(one)
    return found


def _nested(levels: Sequence[tuple[str, list[Round]]], steps: int) -> list[TreeLevel]:
    """Give each level the interval that the one before it left; one with positions outside of that has its own."""
    found: list[TreeLevel] = []
    low, high = 0, max(steps, 1)
    for name, rounds in levels:
        if any(not low <= one.index <= high for one in rounds):
            low, high = 0, max(one.index for one in rounds) + 1
        found.append(TreeLevel(name, low, high, rounds))
        for one in rounds:
            low, high = (one.index, high) if one.agree else (low, one.index)
    return found


# -- bands -----------------------------------------------------------------------------------------


def _bands(directory: RunDirectory, report: RunReport, choice: CalibrationChoice | None) -> dict[str, Any]:
    """Return bands by kind of site in the last committed state, what they say of noise, and what was measured."""
    stated = report.specification
    safety = policy_of(stated.policy.name, stated.policy.parameters).safety
    done = report.transcript.checkpoints()[-1].steps_done
    table = GridTable.decode(directory.load_entry(done, "document/grids"))
    bands: dict[str, Counter[int]] = {}
    special: dict[str, Counter[str]] = {}
    for (number, _), grid in table.sites.items():
        kind = Kind(number).name.lower()
        if grid.residue_bits or grid.band == NOISE_ONLY:
            special.setdefault(kind, Counter())[
                "by residues" if grid.residue_bits else "nothing but noise"
            ] += 1
        else:
            bands.setdefault(kind, Counter())[grid.band] += 1
    measured: dict[str, Counter[int]] = {}
    for site in () if choice is None else choice.sites:
        largest = max(site.largest.values(), default=0.0)
        if 0.0 < largest < math.inf and site.band != NOISE_ONLY:
            measured.setdefault(site.kind, Counter())[math.ceil(math.log2(largest))] += 1
    spreads = [
        Spread(
            kind.replace("_", " "),
            [(float(b), n) for b, n in sorted(bands.get(kind, Counter[int]()).items())],
            []
            if kind in measured
            else [(float(b - safety), n) for b, n in sorted(bands.get(kind, Counter[int]()).items())],
            [(float(b), n) for b, n in sorted(measured.get(kind, Counter[int]()).items())],
        )
        for kind in sorted(bands.keys() | measured.keys())
    ]
    names = (
        "band of a site",
        f"its noise is at most this (band / 2^{safety})",
        "largest noise measured by a calibration",
    )
    rows = [
        {
            "kind": kind.replace("_", " "),
            "sites": sum(bands.get(kind, Counter[int]()).values())
            + sum(special.get(kind, Counter[str]()).values()),
            "lowest": min(bands[kind]) if kind in bands else None,
            "highest": max(bands[kind]) if kind in bands else None,
            "measured": max(measured[kind]) if kind in measured else None,
            "special": ", ".join(
                f"{count:,} {name}" for name, count in special.get(kind, Counter[str]()).items()
            ),
        }
        for kind in sorted(bands.keys() | special.keys() | measured.keys())
    ]
    return {
        "svg": spread_svg(
            "Noise against band, by kind of site", "relative to the site's scale", spreads, names
        ),
        "rows": rows,
        "after": done,
        "measured": choice is not None,
    }
