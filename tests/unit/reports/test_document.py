"""The HTML page: complete, self-contained, and deaf to what a hostile run directory holds."""

from __future__ import annotations

import json
import math
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tallystick.execution.job import find_source
from tallystick.numerics.policy import find_policy
from tallystick.reports.chart import Bars, Chart, Line, figure, linear, named, ticks
from tallystick.reports.divergence import divergence_headline, divergence_parts
from tallystick.reports.document import Sources, find_sources, read_document
from tallystick.reports.document_parts import dispute_parts
from tallystick.reports.foreign import Foreign
from tallystick.reports.layout import Card, Pictures
from tallystick.reports.run import read_run
from tallystick.roles.trainer import Order, record
from tallystick.store.files import RunDirectory

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&\x1b[31m\u202e{{7*7}}"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    directory = RunDirectory(tmp_path_factory.mktemp("page") / "run")
    order = Order(
        find_source("digits"), {"width": "4", "batch": "8"}, find_policy("fp32"), steps=6, checkpoint_every=3
    )
    record(order, directory)
    return directory


class Reader(HTMLParser):
    """Every tag with its attributes, and all text."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def page(run: RunDirectory, **sources: Any) -> Reader:
    reader = Reader()
    reader.feed(read_document(run, read_run(run), Sources(**sources)).html())
    return reader


def must_be_inert(reader: Reader) -> None:
    assert {tag for tag, _ in reader.tags} <= {
        "html", "head", "meta", "title", "style", "body", "header", "h1", "h2", "h3", "p", "span", "pre",
        "h4", "div", "table", "tr", "th", "td", "details", "summary", "sup", "svg", "text", "tspan", "path", "polyline",
        "circle", "rect",
    }  # fmt: skip
    for tag, attributes in reader.tags:
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            assert name not in ("href", "src", "srcset", "action"), (tag, name)
            assert name == "xmlns" or "http" not in (value or ""), (tag, name, value)
    assert "\x1b" not in reader.text
    assert "\u202e" not in reader.text


def written(path: Path, value: object) -> Path:
    path.write_text(json.dumps(value))
    return path


AUDIT = {
    "verdict": "mismatch",
    "first_step": 4,
    "steps": 6,
    "profile": "native",
    "differing_elements": 12,
    "freedom": {"fraction": 0.01, "moved": 3},
    "environment": {"torch": {"own": "1", "trainer": "2"}},
    "segments": [
        {"start": 0, "end": 3, "verdict": "match", "deviations": []},
        {
            "start": 3, "end": 6, "verdict": "mismatch",
            "deviations": [{"step": 4, "subject": "loss", "element": None, "own": "0x1.0p+0", "stated": "0x1.8p+0"}],
        },
    ],
    "divergence": {
        "own": "here", "stated": "trainer", "step": 4, "after": 5, "leading": "model/w",
        "differing_elements": 12, "elements": 100,
        "findings": [{"cause": "other_rate", "title": "another learning rate", "status": "confirmed", "text": "1.5 times"}],
        "tensors": [
            {
                "name": "model/w", "elements": 20, "differing": 12, "ulps": [[1, 1, 5], [2, 3, 7]],
                "first": {
                    "element": 3, "index": [0, 3], "own": "0x1.0000000000000p+0", "stated": "0x1.8000000000000p+0", "ulps": 9,
                },
                "worst": {"ulps": 11},
            }
        ],
        "notes": ["a note"],
    },
}  # fmt: skip
VERDICT: dict[str, Any] = {
    "format": "tallystick/dispute-verdict/1",
    "loser": "trainer",
    "outcome": "fault",
    "step": 4,
    "rounds": 2,
    "rounds_per_level": {"checkpoints": 1, "steps": 1},
    "reason": "step 4: wrong",
    "moves": [["trainer", 3, "aa"], ["auditor", 3, "aa"], ["trainer", 4, "ab"], ["auditor", 4, "ab"]],
}


def test_the_page_of_an_honest_run_has_its_parts_and_loads_nothing(run: RunDirectory) -> None:
    reader = page(run)

    must_be_inert(reader)
    root = run.load_transcript().root().hex()
    for text in (
        root,
        "Loss as recorded",
        "Noise against band",
        "not audited",
        "What this shows",
        "Nothing was repeated",
    ):
        assert text in reader.text
    assert sum(tag == "polyline" for tag, _ in reader.tags) == 2
    policy = next(a["content"] for tag, a in reader.tags if tag == "meta" and "http-equiv" in a)
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"


def test_audits_divergence_and_dispute_are_shown(run: RunDirectory, tmp_path: Path) -> None:
    audits, disputes = [written(tmp_path / "a.json", AUDIT)], [written(tmp_path / "v.json", VERDICT)]

    reader = page(run, audits=audits, disputes=disputes)

    must_be_inert(reader)
    for text in (
        "mismatch", "step 4: mismatch", "another learning rate", "0x1.8000000000000p+0 (1.5)", "12 of 100 elements",
        "the trainer loses, at step 4", 'Unchecked, the verdict\'s own words: "step 4: wrong"',
        "at 3: aa = aa", "agreed at 4, differ at 6", "steps: 3 to 6", "2 to 3", "The judge repeated one step", "a note",
    ):  # fmt: skip
        assert text in reader.text


@pytest.mark.parametrize(
    ("verdicts", "gravest"),
    [
        (["match", "not_accepted"], "not_accepted"),
        (["not_accepted", "cannot_reproduce", "match"], "cannot_reproduce"),
        (["cannot_reproduce", "not_accepted", "log_violation"], "log_violation"),
        (["log_violation", "not_accepted", "mismatch"], "mismatch"),
        (["match"], "match"),
    ],
)
def test_the_gravest_verdict_is_the_pages(
    run: RunDirectory, tmp_path: Path, verdicts: list[str], gravest: str
) -> None:
    audits = [
        written(tmp_path / f"{i}.json", {"verdict": verdict, "steps": 6})
        for i, verdict in enumerate(verdicts)
    ]

    assert read_document(run, read_run(run), Sources(audits)).verdict == gravest


def test_an_audit_that_does_not_accept_accuses_nobody_on_the_page(run: RunDirectory, tmp_path: Path) -> None:
    audit = {
        "verdict": "not_accepted", "first_step": 4, "steps": 6, "freedom": {"moved": 400, "move_budget": 32},
        "segments": [{"start": 0, "end": 6, "verdict": "not_accepted", "deviations": []}],
    }  # fmt: skip

    document = read_document(run, read_run(run), Sources([written(tmp_path / "a.json", audit)]))
    reader = Reader()
    reader.feed(document.html())

    must_be_inert(reader)
    assert {a["class"] for tag, a in reader.tags if tag == "span" and "badge" in str(a.get("class"))} == {
        "badge unsure"
    }
    for text in (
        "not accepted",
        "400 roundings by this log, of 32 that noise explains at most",
        "That anybody lied",
    ):
        assert text in reader.text
    assert "could not be reached" not in reader.text


def hostile(value: Any) -> Any:
    if isinstance(value, dict):
        return {f"{name}": hostile(item) for name, item in value.items()} | {HOSTILE: HOSTILE}
    if isinstance(value, list):
        return [hostile(item) for item in value]
    return HOSTILE if isinstance(value, str) else value


def test_markup_in_every_text_of_every_file_stays_text(run: RunDirectory, tmp_path: Path) -> None:
    nasty = hostile(AUDIT)
    nasty["divergence"]["operator"] = {
        "index": 1,
        "name": HOSTILE,
        "phase": HOSTILE,
        "module": HOSTILE,
        "result": None,
    }
    verdict = {**hostile(VERDICT), "rounds_per_level": {HOSTILE: 1, "steps": 1}}
    verdict["moves"] = [["trainer", 3, HOSTILE], ["auditor", 3, HOSTILE]]
    audits = [written(tmp_path / "<b>a.json", nasty)]

    reader = page(run, audits=audits, disputes=[written(tmp_path / "v.json", verdict)])

    must_be_inert(reader)
    assert "{{7*7}}" in reader.text
    assert "<script>alert(1)</script>" in reader.text


def test_a_hostile_transcript_stays_text(run: RunDirectory, tmp_path: Path) -> None:
    """A trainer chooses job path, settings, site names and versions."""
    specification = json.loads(run.specification_path.read_bytes())
    specification["job"]["path"] = HOSTILE
    specification["job"]["settings"] = {HOSTILE: HOSTILE}
    specification["versions"] = {HOSTILE: HOSTILE}
    other = RunDirectory(tmp_path / "<img src=x>")
    other.path.mkdir()
    from tallystick.commit.encoding import canonical_json

    other.specification_path.write_bytes(canonical_json(specification))
    other.records_path.write_bytes(run.records_path.read_bytes())

    reader = page(other)

    must_be_inert(reader)
    assert "<script>alert(1)</script>" in reader.text
    assert "not finished" in reader.text
    assert "Not everything could be read" in reader.text  # no logs and no states lie there


@pytest.mark.parametrize(
    "value",
    [
        [], "text", 5, {}, {"verdict": 5}, {"verdict": None, "segments": {"a": 1}}, {"segments": [1, None, {"start": "x"}]},
        {"divergence": {"tensors": [None, {"first": 5, "ulps": [[1], ["a", 2, 3], [1, 2, -5]]}], "findings": 7, "notes": {}}},
        {"verdict": "match", "first_step": -1, "steps": 1e400, "freedom": [1]},
        {"first_step": 10**400, "steps": 10**400, "segments": [{"start": 0, "end": 10**300}]},
    ],
)  # fmt: skip
def test_unknown_forms_are_left_out_and_nothing_breaks(run: RunDirectory, tmp_path: Path, value: Any) -> None:
    file = written(tmp_path / "x.json", value)

    reader = page(run, audits=[file], disputes=[file])

    must_be_inert(reader)


@pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"a": NaN'])
def test_files_that_are_no_json_are_named_as_problems(run: RunDirectory, tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "x.json"
    file.write_bytes(data)

    document = read_document(run, read_run(run), Sources([file], [], file))

    assert len(document.problems) == 2
    assert all("x.json" in text or "calibration" in text for text in document.problems)
    assert document.verdict == "none"


def test_unknown_levels_of_a_dispute_are_drawn_too(run: RunDirectory, tmp_path: Path) -> None:
    verdict = {
        **VERDICT,
        "rounds_per_level": {"checkpoints": 1, "steps": 1, "operators": 2},
        "moves": [
            *VERDICT["moves"],
            ["trainer", 40, "aa"], ["auditor", 40, "bb"],
            {"party": "trainer", "index": 20, "commitment": "cc", "level": "operators"},
            {"party": "auditor", "index": 20, "commitment": "cc", "level": "operators"},
        ],
        "operator": {"name": "aten::mm", "module": "head"},
    }  # fmt: skip

    reader = page(run, disputes=[written(tmp_path / "v.json", verdict)])

    assert "operators: 0 to 41" in reader.text
    assert "agreed at 20, differ at 40" in reader.text
    assert "aten::mm" in reader.text


def test_files_in_the_run_directory_itself_are_found(run: RunDirectory) -> None:
    names = ("audit.json", "audit-2.json", "verdict.json")
    for name in names:
        written(run.path / name, {})
    try:
        found = find_sources(run)
    finally:
        for name in names:
            (run.path / name).unlink()

    assert [path.name for path in found.audits] == ["audit-2.json", "audit.json"]
    assert [path.name for path in found.disputes] == ["verdict.json"]
    assert found.bands is None


def test_a_divergence_without_fields_says_nothing() -> None:
    assert list(divergence_parts(Foreign({}))) == []
    assert divergence_headline(Foreign({})).plain == "the same: no step and no tensor differs"


# -- pictures ---------------------------------------------------------------------------------------


def drawn(points: list[tuple[float, float]], title: str = "t") -> str:
    return Chart(title, linear("x", 0, len(points)), linear("y", 0, 50), [Line("", "0", points)]).svg()


def test_a_long_line_is_thinned_and_keeps_its_peaks() -> None:
    points = [(float(i), 1.0) for i in range(100_000)]
    points[77_777] = (77_777.0, 50.0)

    coordinates = re.search(r'points="([^"]*)"', drawn(points))
    assert coordinates is not None
    pairs = [tuple(map(float, pair.split(","))) for pair in coordinates[1].split()]
    assert len(pairs) <= 600
    lowest = min(y for _, y in pairs)
    assert sum(y == lowest for _, y in pairs) == 1


@pytest.mark.parametrize(
    "points",
    [[], [(0.0, 1.0)], [(0.0, 0.0), (1.0, 0.0)], [(0.0, float("nan"))], [(0.0, float("inf")), (1.0, 2.0)]],
)
def test_lines_with_little_in_them_can_be_drawn(points: list[tuple[float, float]]) -> None:
    svg = drawn(points, "t<")

    assert svg.startswith("<svg")
    assert not re.search(r"nan|inf\b", svg.lower())
    assert "t<" not in svg


def test_names_are_escaped_wherever_a_chart_holds_them() -> None:
    svg = figure(
        "<t>",
        [
            Chart(
                "<c>",
                linear("<x>", 0, 1),
                named("<y>", ["<r>"], ["<f>"]),
                [Bars("<m>", "0", [(0, 9, 0)])],
                ["<n>"],
            )
        ],
    )
    assert svg.count("&lt;") == 8
    assert not re.search("<[tcxyrfmn]>", svg)
    assert svg.count("<rect") == 3  # the bar, kept inside, its sample in the legend, and the paper


def test_the_levels_of_a_dispute_narrow_each_other() -> None:
    (card,) = dispute_parts(Foreign(VERDICT), 6)
    assert isinstance(card, Card)
    (charts,) = [part.charts for part in card.parts if isinstance(part, Pictures)]
    assert [chart.title for chart in charts if isinstance(chart, Chart)] == [
        "checkpoints: 0 to 6",
        "steps: 3 to 6",
    ]


def test_a_range_of_the_largest_numbers_is_drawn() -> None:
    largest = sys.float_info.max
    axis = linear("x", -largest, largest, padding=0.05)
    assert all(math.isfinite(tick) for tick in (axis.low, axis.high, *(value for value, _ in axis.ticks)))


def test_ticks_are_round() -> None:
    assert ticks(0.0, 10.0) == [0, 2, 4, 6, 8, 10]
    assert ticks(3.0, 3.0) == [3.0]
