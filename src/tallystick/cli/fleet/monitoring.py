"""tally monitor: declared runs against what chips saw, and a small fleet that shows it."""

from __future__ import annotations

import json
import secrets
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tallystick.cli.fleet.inspection import PerhapsReports, spoken_in
from tallystick.cli.fleet.observing import (
    Attestations,
    Nonce,
    Rate,
    Since,
    Until,
    Use,
    answered,
    plan_of,
)
from tallystick.cli.options import (
    AsJson,
    JobName,
    PerhapsTrusted,
    argument,
    choose_source,
    load_chip_keys,
    load_trusted,
    option,
)
from tallystick.cli.profiles import python
from tallystick.cli.terminal import answer, console, print_json, say
from tallystick.commit.encoding import parse_hex
from tallystick.errors import InvalidInput, StoreError, TallyError
from tallystick.fleet.agent.chip_record import DAY_MS
from tallystick.fleet.provenance.memorisation import LEAST_RECORDS
from tallystick.fleet.provenance.observation import ObservationPlan
from tallystick.fleet.provenance.owner_findings import owner_findings
from tallystick.fleet.provenance.submission import OwnerFolder, report_leaves, verify_reported
from tallystick.fleet.sampling.draw import DrawAnnouncement
from tallystick.reports.layout import GOOD, page
from tallystick.reports.monitoring import FleetReport, OwnerReport, traced_page
from tallystick.store.documents import read_document
from tallystick.store.files import storing, write_whole

if TYPE_CHECKING:
    from tallystick.execution.job import JobSource
    from tallystick.fleet.agent.chip_log import NumberedFinding
    from tallystick.fleet.attestation.assurance import Attestation
    from tallystick.integrations.watching import KnownChip
    from tallystick.signing.keys import PublicKey

app = typer.Typer(help="Check declared training runs against the logs of the chips.", no_args_is_help=True)
EXIT_CODES = {"pass": 0, "fail": 1, "unknown": 3}
PARTS: Mapping[str, int] = {"honest": 4, "unreported": 2, "glued": 2}
STORIES = {
    "honest": "one run, cut over four chips",
    "unreported": "declares the run of one chip, is silent about that of another",
    "glued": "swaps in another model's weights half-way, glues two runs into one transcript",
}
DAYS, FIRST_DAY = (
    15,
    1_770_000_000_000,
)  # of the simulated chips (tallystick.testing.watched), in milliseconds since 1970
PLAN = ObservationPlan(rate=1000, since=FIRST_DAY, until=FIRST_DAY + DAYS * DAY_MS)
EXPECTED = {"honest": "pass", "unreported": "fail", "glued": "fail"}

Keep = Annotated[
    Path | None,
    option(
        "--keep", "DIR", "A new or empty directory for everything; by default a temporary one, which stays."
    ),
]

AfterReports = Annotated[
    str,
    option(
        "--beacon",
        "HEX",
        "32 bytes that became public after the reports; of an announced drand round its signature.",
    ),
]
PerhapsAnnounced = Annotated[
    Path | None,
    option(
        "--announcement", "FILE", "The draw's: the beacon is its round's, and the runs were reported before."
    ),
]
Inspections = Annotated[
    list[Path] | None,
    option("--inspection", "DIR", "A sealed inspection package: logs must hold what its chips attested."),
]
RandomSegments = Annotated[
    int, option("--segments", "N", "Segments of each run to repeat at random.", least=1)
]
LargestSegments = Annotated[
    int, option("--largest", "N", "Segments with the largest updates to repeat too.", least=0)
]
MemoryRecords = Annotated[
    int,
    option(
        "--memory", "N", "Records of each segment to look for in the model's memory; 0 for none.", least=0
    ),
]


def register(parent: typer.Typer) -> None:
    """Add ``tally monitor`` to ``parent``."""
    parent.add_typer(app, name="monitor")


@app.command()
def verify(
    folder: Annotated[Path, argument("DIR", "What the owner hands over: runs/ and chips/.")],
    chips: Annotated[
        list[str], option("--chip", "UEID=FILE", "A chip of the owner and its public key; may be repeated.")
    ],
    beacon: AfterReports,
    announcement: PerhapsAnnounced = None,
    reports: PerhapsReports = None,
    segments: RandomSegments = 2,
    largest: LargestSegments = 1,
    memory: MemoryRecords = 0,
    job: JobName = None,
    inspections: Inspections = None,
    trust: PerhapsTrusted = None,
    rate: Rate = None,
    since: Since = None,
    until: Until = None,
    use: Use = None,
    attestations: Attestations = None,
    nonce: Nonce = None,
    html: Annotated[Path | None, option("--html", "FILE", "Write the report as one page.")] = None,
    findings: Annotated[
        Path | None, option("--findings", "FILE", "Write what was found, for `tally rules judge`.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Match an owner's snapshots with the declared runs, repeat parts of them, and say what follows."""
    from tallystick.integrations.watching import Inquiry, verify_owner

    if not folder.is_dir():
        raise StoreError(f"{folder}: there is no such folder")
    if 0 < memory < LEAST_RECORDS:
        raise InvalidInput(f"--memory {memory}: {LEAST_RECORDS} records or more are needed, or 0")
    keys = load_chip_keys(chips)
    asked = answered(attestations or [], nonce, keys)
    known = _known_chips(keys, *_inspected(inspections or [], trust), asked)
    place = OwnerFolder(folder)
    inquiry = Inquiry(
        _spoken(beacon, place, announcement, reports),
        segments,
        largest,
        memory_records=memory,
        plan=plan_of(rate, since, until, use or [], keys),
    )

    def source_of(stated: str) -> JobSource:
        return choose_source(job, stated)

    started = time.perf_counter()
    found = verify_owner(folder.name, place, known, source_of, inquiry, progress=say)
    shown = OwnerReport(*found, plan=inquiry.plan)
    if findings is not None:
        write_whole(findings, owner_findings(shown.verdict, shown.chips).encode())
    if html is not None:
        facts = {"beacon": beacon, "random_segments": segments, "largest_segments": largest}
        write_whole(html, FleetReport([shown], time.perf_counter() - started, str(folder), facts).page())
    answer(shown, as_json=as_json)
    return EXIT_CODES[shown.verdict.verdict]


def _spoken(beacon: str, place: OwnerFolder, announcement: Path | None, reports: Path | None) -> bytes:
    """Return what the beacon said, bound to an announcement if there is one.

    Raises:
        InvalidInput, StoreError: no value, or one of the two without the other.
        Mismatch: not the announced round's, or a run that was not reported before it.
    """
    if (announcement is None) != (reports is None):
        raise InvalidInput("--announcement: needs --reports DIR, all that was handed in, and the reverse")
    if announcement is None or reports is None:
        return parse_hex(beacon, n_bytes=32, what="--beacon")
    made = read_document(DrawAnnouncement, announcement)
    verify_reported(place.runs(), report_leaves(reports), (made.reports, made.reports_count))
    return spoken_in(made, beacon, None)


@app.command()
def trace(
    folder: Annotated[Path, argument("DIR", "What the owner hands over: runs/ and chips/.")],
    chip: Annotated[str, option("--chip", "UEID=FILE", "The chip and its public key.")],
    snapshot: Annotated[int, option("--snapshot", "N", "The record of its log.", least=0)],
    job: JobName = None,
    as_json: AsJson = False,
) -> int:
    """Say which declared run, step, rank and slices one snapshot is of; 3 if of none."""
    from tallystick.integrations.tracing import trace_snapshot
    from tallystick.integrations.watching import KnownChip

    if not folder.is_dir():
        raise StoreError(f"{folder}: there is no such folder")
    ((ueid, key),) = load_chip_keys([chip]).items()
    started = time.perf_counter()
    found = trace_snapshot(
        OwnerFolder(folder), ueid, snapshot, KnownChip(key), lambda stated: choose_source(job, stated)
    )
    seconds = time.perf_counter() - started
    answer(traced_page(found, f"chip {ueid}, snapshot {snapshot}", seconds), as_json=as_json)
    return 0 if found.parts else 3


@app.command()
def report(
    run: Annotated[Path, argument("RUN", "A finished run, recorded with --chip.")],
    chips: Annotated[list[Path], option("--chip", "DIR", "A chip of the run; may be repeated.")],
    job: JobName = None,
    as_json: AsJson = False,
) -> int:
    """Report a finished run with salted commitments: its data, states, totals and the snapshots taken of it."""
    from tallystick.fleet.agent.agent import boot_log
    from tallystick.integrations.committing import beside, report_run
    from tallystick.store.chips import ChipDirectory
    from tallystick.store.files import RunDirectory
    from tallystick.store.keys import load_public_key

    source = choose_source(job, RunDirectory(run).load_specification().job.path)
    shown = [ChipDirectory(path) for path in chips]
    logs = {chip: boot_log(chip, load_public_key(chip.key_path.with_name("chip.key.pub"))) for chip in shown}
    made = report_run(run, source, logs)
    facts = {
        "run": made.run,
        "chip_ms": made.totals.chip_ms,
        "flop": made.totals.flop,
        "tokens": made.totals.tokens,
        "snapshots": len(made.snapshots),
        "report": str(beside(run, "report")),
    }
    if as_json:
        print_json(facts)
    else:
        console().print(page("reported", GOOD, [(name, str(value)) for name, value in facts.items()]))
    return 0


@app.command()
def memory(
    run: Annotated[Path, argument("RUN", "A finished run directory.")],
    beacon: Annotated[
        str, option("--beacon", "HEX", "32 bytes that became public after the run was committed.")
    ],
    records: Annotated[
        int, option("--records", "N", "Records of each segment to look at.", least=LEAST_RECORDS)
    ] = 64,
    job: JobName = None,
    svg: Annotated[Path | None, option("--svg", "FILE", "Draw data against segments.")] = None,
    as_json: AsJson = False,
) -> int:
    """Look for a run's claimed data in its states: 0 found, 3 doubtful or not to be told. Accuses nobody."""
    from tallystick.fleet.provenance.memorisation import judge_memory
    from tallystick.integrations.memorising import measure_memory
    from tallystick.integrations.run_replayer import RunReplayer
    from tallystick.reports.memorisation import MemoryReport
    from tallystick.store.files import RunDirectory

    spoken = parse_hex(beacon, n_bytes=32, what="--beacon")
    directory = RunDirectory(run)
    replayer = RunReplayer(directory, choose_source(job, directory.load_specification().job.path))
    losses = measure_memory(
        replayer, beacon=spoken, records=records, progress=lambda done, of: say(f"state {done} of {of}")
    )
    shown = MemoryReport(replayer.transcript.root().hex(), judge_memory(losses))
    if svg is not None:
        write_whole(svg, shown.svg().encode())
    answer(shown, as_json=as_json)
    return 0 if shown.verdict == "confirmed" else 3


@app.command()
def demo(keep: Keep = None, as_json: AsJson = False) -> int:
    """Watch eight simulated chips, one honest owner and two who cheat, from snapshot to verdict."""
    from tallystick.execution.job import find_shipped
    from tallystick.integrations.watching import Inquiry, OwnerFolder, Plausibility, verify_owner

    started = time.perf_counter()
    place = _prepared(keep)
    say("eight simulated chips, three owners, real training", style="bold")
    ueids = _ueids()
    with ThreadPoolExecutor(max_workers=2) as pool:
        list(pool.map(lambda owner: _train(place, owner, ueids[owner]), PARTS))
    beacon = secrets.token_bytes(32)
    say(f"- the reports are there; the beacon speaks: {beacon.hex()[:16]}..")
    owners: list[OwnerReport] = []
    for owner in PARTS:
        folder = OwnerFolder(place / owner)
        known = {ueid: inspect_chip(folder.path / "chips" / ueid) for ueid in ueids[owner]}
        inquiry = Inquiry(beacon, plausibility=Plausibility(1e6), plan=PLAN)
        say(f"- inspecting the chips of {owner}")
        owners.append(
            OwnerReport(*verify_owner(owner, folder, known, find_shipped, inquiry, progress=lambda _: None))
        )
    facts = {
        "beacon": beacon.hex(),
        "simulated_days": DAYS,
        "snapshots_per_chip_day": 1,
        "random_segments_per_run": 2,
        "job": "digits, 60 steps, policy fp32",
    }
    report = FleetReport(owners, time.perf_counter() - started, str(place), facts)
    write_whole(place / "report.html", report.page())
    write_whole(place / "report.json", json.dumps(report.fields(), indent=2).encode())
    if as_json:
        print_json(report.fields())
    else:
        console().print(report)
        say(f"the page: {place}/report.html")
    right = all(owner.verdict.verdict == EXPECTED[owner.verdict.owner] for owner in owners)
    return 0 if right else 1


def _known_chips(
    keys: Mapping[str, PublicKey],
    inspected: Mapping[str, Sequence[Attestation]],
    failed: Mapping[str, Sequence[NumberedFinding]],
    asked: Mapping[str, Sequence[Attestation]],
) -> dict[str, KnownChip]:
    """Return what is known of chips: their keys, what they attested where they were inspected or asked, and where they failed."""
    from tallystick.fleet.attestation.assurance import CheckedEvidence
    from tallystick.integrations.watching import KnownChip

    known: dict[str, KnownChip] = {}
    for ueid, key in keys.items():
        seen = [*inspected.get(ueid, []), *asked.get(ueid, [])]
        last = max(seen, key=lambda each: (each.head.seq, each.uptime), default=None)
        evidence = CheckedEvidence(known_key=True, attestation=last, inspected=ueid in inspected)
        known[ueid] = KnownChip(key, tuple(each.head for each in seen), evidence, tuple(failed.get(ueid, [])))
    return known


def _inspected(
    packages: Sequence[Path], trust: Sequence[str] | None
) -> tuple[Mapping[str, Sequence[Attestation]], Mapping[str, Sequence[NumberedFinding]]]:
    """Return what chips attested at inspections that they passed, and why others failed theirs."""
    from tallystick.cli.fleet.inspection import read_package
    from tallystick.cli.fleet.judging import seen_at_inspections

    keys = load_trusted(trust)
    return seen_at_inspections([read_package(place, keys, "chip", []) for place in packages], packages)


def _ueids() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for owner, count in PARTS.items():
        found[owner] = [(b"\x01" + secrets.token_bytes(16)).hex() for _ in range(count)]
    return found


def _train(place: Path, owner: str, ueids: Sequence[str]) -> None:
    """Play one owner in a process of its own."""
    say(f"- {owner}: {STORIES[owner]}")
    arguments = [
        "-m",
        "tallystick.testing.watched",
        owner,
        "--out",
        str(place / owner),
        "--chips",
        ",".join(ueids),
    ]
    child = subprocess.run(
        python(*arguments), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )  # fmt: skip
    if child.returncode == 130 or child.returncode < 0:
        raise KeyboardInterrupt
    if child.returncode:
        said = child.stderr.strip().rpartition("\n")[2]
        raise TallyError(f"demo: owner {owner} ended with exit code {child.returncode}: {said}")


def inspect_chip(path: Path) -> KnownChip:
    """Go to a chip: take its key as it was registered, and have its log's head attested for a fresh nonce."""
    from tallystick.fleet.agent.agent import boot_log
    from tallystick.fleet.attestation.assurance import CheckedEvidence, attest_head, parse_attestation
    from tallystick.integrations.watching import KnownChip
    from tallystick.store.chips import ChipDirectory
    from tallystick.store.keys import load_key, load_public_key

    chip = ChipDirectory(path)
    public = load_public_key(chip.key_path.with_name("chip.key.pub"))
    nonce = secrets.token_bytes(32)
    log = boot_log(chip, public)
    token = attest_head(log[-1], nonce, bytes(16), "simulated", load_key(str(chip.key_path)))
    attested = parse_attestation(token, public, nonce)
    return KnownChip(public, (attested.head,), CheckedEvidence(known_key=True, attestation=attested))


def _prepared(keep: Path | None) -> Path:
    if keep is None:
        return Path(tempfile.mkdtemp(prefix="tallystick-monitor-"))
    with storing(f"{keep}: cannot be created"):
        if keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
            raise StoreError(f"{keep}: exists and is not empty; choose another directory")
        keep.mkdir(parents=True, exist_ok=True)
    return keep
