"""tally report: one run as one HTML file; without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from tallystick.cli.options import AnyRun, AsJson, existing_run, option
from tallystick.cli.terminal import answer
from tallystick.errors import InvalidInput, StoreError
from tallystick.reports.layout import GOOD, UNSURE, DonePage, Row

FILE = "report.html"
VERDICT = "verdict.json"
Out = Annotated[
    Path | None, option("--out", "FILE", f"Where to write the page; by default DIR/{FILE}.", short="-o")
]
Audits = Annotated[
    list[Path] | None, option("--audit", "FILE", "What tally audit --out wrote; may be repeated.")
]
Disputes = Annotated[
    list[Path] | None,
    option("--dispute", "PATH", f"A verdict, or a directory with a {VERDICT}; may be repeated."),
]
Bands = Annotated[Path | None, option("--bands", "FILE", "What tally calibrate --out wrote: measured noise.")]


def report(
    run: AnyRun,
    out: Out = None,
    audit: Audits = None,
    dispute: Disputes = None,
    bands: Bands = None,
    as_json: AsJson = False,
) -> int:
    """Write one self-contained HTML file: summary, loss, log, noise, audits, divergence, dispute, and what it shows."""
    directory = existing_run(run)
    given = [*(audit or []), *(dispute or []), *([bands] if bands else [])]
    for path in given:
        if not path.exists():
            raise StoreError(f"{path}: there is no such file")

    from tallystick.reports.document import Sources, find_sources, read_document
    from tallystick.reports.run import read_run

    beside = find_sources(directory)
    sources = Sources(
        [*beside.audits, *(audit or [])],
        [*beside.disputes, *(_verdict(path) for path in dispute or [])],
        bands if bands is not None else beside.bands,
    )
    document = read_document(directory, read_run(directory), sources)
    target = out if out is not None else run / FILE
    if target.is_dir():
        raise InvalidInput(f"--out {target}: is a directory; give a file's name")
    data = document.html().encode("utf-8")
    directory.write_document(target, data)
    values = {
        "file": str(target),
        "bytes": len(data),
        "verdict": document.verdict,
        "problems": document.problems,
    }
    rows: list[Row] = [
        ("verdict", document.verdict.replace("_", " ")),
        *(("not read", text) for text in document.problems),
    ]
    style = UNSURE if document.problems else GOOD
    answer(DonePage(f"written: {target}, {len(data):,} bytes", values, rows, style), as_json=as_json)
    return 0


def _verdict(path: Path) -> Path:
    return path / VERDICT if path.is_dir() else path
