"""tally draw, tally inspect: from committed reports to a sample, from the sample to orders, findings and a verdict."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Annotated

import typer

from tallystick.cli.options import (
    AsJson,
    Now,
    Out,
    OwnKey,
    Trusted,
    argument,
    load_trusted,
    option,
    parse_counts,
    parse_named,
    second_of,
)
from tallystick.cli.terminal import answer, done, say
from tallystick.commit.encoding import parse_hex
from tallystick.commit.merkle import root as merkle_root
from tallystick.errors import InvalidInput, Mismatch
from tallystick.fleet.inspection.extraction import ChipLogReader
from tallystick.fleet.inspection.inspection import (
    LARGEST_DOCUMENT,
    LARGEST_LOG,
    ORDER_TYPE,
    RESULT_TYPE,
    SEEN,
    InspectionFinding,
    InspectionResult,
    WorkOrder,
    make_order,
    open_document,
    read_extraction,
)
from tallystick.fleet.inspection.judging import InspectionVerdict, judge
from tallystick.fleet.inspection.package import InspectionPackage
from tallystick.fleet.provenance.submission import report_leaves
from tallystick.fleet.registry.claims import LARGEST_FRAME, parse_frame
from tallystick.fleet.registry.facts import REGISTRY, Chip
from tallystick.fleet.registry.ledger import RegistryLedger
from tallystick.fleet.sampling.draw import DrawAnnouncement, draw_sample
from tallystick.reports.inspection import verdict_page
from tallystick.run.drand import NETWORKS, spoken, verify_time
from tallystick.signing.dsse import sign_payload
from tallystick.signing.keys import PublicKey
from tallystick.store.documents import read_document
from tallystick.store.files import read_whole, write_whole
from tallystick.store.keys import load_key, load_public_key

draws = typer.Typer(
    help="Draw the chips to inspect, from reports committed before the beacon spoke.", no_args_is_help=True
)
inspecting = typer.Typer(
    help="Inspect chips: orders, offline packages, findings, verdicts.", no_args_is_help=True
)

FrameFile = Annotated[Path, option("--frame", "FILE", "What `tally registry frame` wrote.")]
Announced = Annotated[Path, argument("FILE", "What `tally draw announce` wrote.")]
Beacon = Annotated[
    str,
    option(
        "--beacon", "HEX", "What the announced beacon round said: of drand its signature, which is verified."
    ),
]
_REPORTS = option(
    "--reports", "DIR", "The owners' reports as they were handed in: all *.report.json below it."
)
ReportFolder = Annotated[Path, _REPORTS]
PerhapsReports = Annotated[Path | None, _REPORTS]
LogKind = Annotated[
    str, option("--logs", "chip|plain", "What the chips' logs are; plain: any file that the chip signed.")
]
Package = Annotated[Path, argument("DIR", "The inspection package.")]


def register(parent: typer.Typer) -> None:
    """Add ``tally draw`` and ``tally inspect`` to ``parent``."""
    parent.add_typer(draws, name="draw")
    parent.add_typer(inspecting, name="inspect")


# -------------------------------------------------------------------------------------------------- draws


@draws.command()
def announce(
    frame: FrameFile,
    samples: Annotated[
        list[str], option("--samples", "STRATUM=N", "Chips to draw of each stratum, as planned.")
    ],
    period: Annotated[int, option("--period", "N", "Number of the period, from 0.")],
    reports: ReportFolder,
    closed: Annotated[int, option("--reports-closed", "SECOND", "When they closed.")],
    source: Annotated[str, option("--beacon-source", "NAME", "Whose beacon will speak.")],
    beacon_round: Annotated[int, option("--beacon-round", "N", "In which of its rounds.")],
    out: Out,
    beacon_time: Annotated[
        int | None, option("--beacon-time", "SECOND", "When that round is published; drand's is known.")
    ] = None,
    now: Now = None,
    as_json: AsJson = False,
) -> int:
    """Write the announcement that is published before the beacon speaks."""
    listed = parse_frame(read_whole(frame, limit=LARGEST_FRAME, what="a frame"))
    if beacon_time is None:
        if source not in NETWORKS:
            raise InvalidInput(
                f"--beacon-source {source}: when its rounds are published is not known; give --beacon-time"
            )
        beacon_time = NETWORKS[source].time_of(beacon_round)
    verify_time(source, beacon_round, beacon_time)
    given, second = report_leaves(reports), second_of(now)
    made = DrawAnnouncement(
        period, merkle_root(given), len(given), closed, listed.root(), source, beacon_round, beacon_time,
        listed.frames(parse_counts(samples, option="--samples", what="stratum")),
    )  # fmt: skip
    if not closed <= second < beacon_time:
        raise InvalidInput(
            f"draw: reports close at {closed}, the beacon speaks at {beacon_time}, now is {second}: it is announced in between"
        )
    write_whole(out, made.encode())
    facts = {
        "file": str(out), "period": period, "frame": made.registry.hex(), "beacon": f"{source} {beacon_round}",
        "beacon_time": beacon_time, "reports": made.reports.hex(), "reports_count": len(given),
    }  # fmt: skip
    return done("announced; publish it before the beacon speaks", facts, as_json=as_json)


@draws.command()
def sample(
    announcement: Announced,
    beacon: Beacon,
    frame: Annotated[Path | None, option("--frame", "FILE", "To name the chips drawn.")] = None,
    claimed: Annotated[
        str | None, option("--digest", "HEX", "Compare with this draw; 1 if it is another.")
    ] = None,
    now: Now = None,
    as_json: AsJson = False,
) -> int:
    """Draw, or draw again, the sample that announcement and beacon determine."""
    made = read_document(DrawAnnouncement, announcement)
    drawn = draw_sample(made, spoken_in(made, beacon, now))
    found = drawn.digest().hex()
    if claimed is not None and claimed != found:
        raise Mismatch(f"draw: its digest is {found}, {claimed} is claimed")
    chips: dict[str, list[str]] = {}
    if frame is not None:
        strata = _strata(frame, made)
        chips = {name: [strata[name][int(at)] for at in places] for name, places in drawn.samples.items()}
    positions = {name: [int(at) for at in places] for name, places in drawn.samples.items()}
    drawn_chips = chips or positions
    rows = [("digest", found), *((name, ", ".join(map(str, each))) for name, each in drawn_chips.items())]
    return done(
        "drawn", {"digest": found, "positions": positions, "chips": chips}, as_json=as_json, rows=rows
    )


# ------------------------------------------------------------------------------------------------- orders


@inspecting.command()
def order(
    announcement: Announced,
    beacon: Beacon,
    frame: FrameFile,
    registry: Annotated[Path, option("--registry", "DIR", "The registry's directory.")],
    inspector: Annotated[str, option("--inspector", "NAME", "Who inspects.")],
    due: Annotated[int, option("--due", "SECOND", "Until when.")],
    key: OwnKey,
    out: Annotated[Path, option("--out", "DIR", "Where to write one order for each place.")],
    seals: Annotated[list[str] | None, option("--seal", "NAME", "A seal that must be intact.")] = None,
    photos: Annotated[int, option("--photos", "N", "Pictures of each chip.", least=0)] = 1,
    now: Now = None,
    as_json: AsJson = False,
) -> int:
    """Write a signed work order for each place where drawn chips are. Orders are secret until the inspection."""
    made = read_document(DrawAnnouncement, announcement)
    drawn, strata = draw_sample(made, spoken_in(made, beacon, now)), _strata(frame, made)
    names = [strata[name][int(at)] for name, places in drawn.samples.items() for at in places]
    second, signer = second_of(now), load_key(key)
    with RegistryLedger(registry) as ledger:
        head = ledger.load_head().head
        chips = ledger.chips(names)
    if missing := [name for name in names if name not in chips]:
        raise Mismatch(f"chip {missing[0]}: was drawn and is not registered")
    places: dict[str, list[Chip]] = {}
    for chip in chips.values():
        places.setdefault(chip.custodian, []).append(chip)
    out.mkdir(parents=True, exist_ok=True)
    files: list[str] = []
    for custodian, here in sorted(places.items()):
        made_order = make_order(
            here, registry=head.registry, entries=head.entries, draw=drawn.digest(), period=made.period,
            inspector=inspector, custodian=custodian, issued=second, due=due,
            nonce=secrets.token_bytes(32), seals=seals or ["case"], photos=photos,
        )  # fmt: skip
        place = out / f"order-{custodian.replace('/', '_')}.json"
        write_whole(place, sign_payload(ORDER_TYPE, made_order.encode(), [signer]).encode())
        place.chmod(0o600)
        files.append(str(place))
    return done(f"{len(names)} chips at {len(places)} places", {"files": files}, as_json=as_json)


@inspecting.command()
def pack(
    order_file: Annotated[Path, argument("ORDER", "A signed work order.")],
    directory: Annotated[Path, argument("DIR", "The package to make.")],
    key: OwnKey,
    trust: Trusted,
    now: Now = None,
    as_json: AsJson = False,
) -> int:
    """Make the offline package of an order; its inspector begins the chain of custody."""
    data = read_whole(order_file, limit=2 * LARGEST_DOCUMENT, what="a signed document")
    encoded, issuer = open_document(ORDER_TYPE, data, load_trusted(trust))
    if issuer != REGISTRY:
        raise Mismatch(f"work order: is signed by {issuer}, must be signed by {REGISTRY}")
    made = WorkOrder.parse(encoded)
    InspectionPackage(directory).begin(data, made, load_key(key), now=second_of(now))
    checklist = str(directory / "checklist.txt")
    facts = {"directory": str(directory), "chips": len(made.targets), "checklist": checklist}
    return done(f"package for {made.inspector} at {made.custodian}", facts, as_json=as_json)


@inspecting.command()
def record(
    directory: Package,
    chip: Annotated[str, argument("CHIP", "Its UEID in hexadecimal.")],
    key: OwnKey,
    outcome: Annotated[str, option("--outcome", "WORD", "seen, refused, absent or unreached.")] = SEEN,
    serial: Annotated[str, option("--serial", "TEXT", "The serial number on the part.")] = "",
    log: Annotated[Path | None, option("--log", "FILE", "The log that the chip gave.")] = None,
    evidence: Annotated[Path | None, option("--evidence", "FILE", "What it signed with the nonce.")] = None,
    device_key: Annotated[Path | None, option("--device-key", "FILE", "Its public key.")] = None,
    seals: Annotated[list[str] | None, option("--seal", "NAME=STATE", "intact, broken, missing.")] = None,
    photos: Annotated[list[Path] | None, option("--photo", "FILE", "A picture.")] = None,
    note: Annotated[str, option("--note", "TEXT", "Anything else.")] = "",
    now: Now = None,
    as_json: AsJson = False,
) -> int:
    """Record what was found of one chip; its files are kept by digest and enter the chain of custody."""
    second = second_of(now)
    states: list[list[str]] = []
    for text in seals or []:
        name, equals, state = text.partition("=")
        if not equals:
            raise InvalidInput(f"--seal {text}: must have the form NAME=STATE")
        states.append([name, state])
    public = b"" if device_key is None else load_public_key(device_key).spki
    seen: dict[str, object] = {
        "chip": chip,
        "outcome": outcome,
        "time": second,
        "serial": serial,
        "note": note,
    }
    seen |= {"key": public.hex(), "seals": states, "log": "", "evidence": "", "photos": []}
    finding = InspectionFinding.read(seen)
    made = InspectionPackage(directory).record(
        finding, load_key(key), now=second,
        log=_file(log), evidence=_file(evidence), photos=[_file(photo) for photo in photos or []],
    )  # fmt: skip
    return done(f"chip {chip}: {outcome}", made.fields(), as_json=as_json)


@inspecting.command("hand-over")
def hand_over(
    directory: Package,
    giver: Annotated[str, option("--from", "PARTY=KEYFILE", "Who gives the package away.")],
    taker: Annotated[str, option("--to", "PARTY=KEYFILE", "Who takes it.")],
    now: Now = None,
    as_json: AsJson = False,
) -> int:
    """Hand the package over to somebody else, signed by both."""
    (first, one), (second, other) = (
        parse_named(text, option="--from, --to", form="PARTY=KEYFILE") for text in (giver, taker)
    )
    signers = {first: load_key(one), second: load_key(other)}
    link = InspectionPackage(directory).hand_over(first, second, signers, now=second_of(now))
    return done(f"{first} handed over to {second}", {"link": link.number}, as_json=as_json)


@inspecting.command()
def seal(directory: Package, key: OwnKey, now: Now = None, as_json: AsJson = False) -> int:
    """Seal the package: sign all findings; nothing can be recorded after it."""
    result = InspectionPackage(directory).seal(load_key(key), now=second_of(now))
    facts = {
        "result": result.digest().hex(), "findings": len(result.findings), "links": len(result.custody),
    }  # fmt: skip
    return done("sealed", facts, as_json=as_json)


@inspecting.command()
def check(
    directory: Package,
    trust: Trusted,
    frame: Annotated[Path | None, option("--frame", "FILE", "The list drawn from, for --rounds.")] = None,
    rounds: Annotated[Path | None, option("--rounds", "FILE", "Write the rounds for the next plan.")] = None,
    body: Annotated[
        Path | None, option("--deed-body", "FILE", "Write the body of the registry's event.")
    ] = None,
    earlier: Annotated[
        list[Path] | None,
        option("--earlier", "DIR", "A sealed package of before, whose logs must go on; may be repeated."),
    ] = None,
    logs: LogKind = "chip",
    as_json: AsJson = False,
) -> int:
    """Import a sealed package and judge it; 1 if a chip failed, was refused, absent or not reported."""
    verdict = read_package(directory, load_trusted(trust), logs, earlier or [])
    made, result = verdict.order, verdict.result
    if rounds is not None:
        if frame is None:
            raise InvalidInput("--rounds: needs --frame, the list that was drawn from")
        chips = {
            name: len(names)
            for name, names in parse_frame(read_whole(frame, limit=LARGEST_FRAME, what="a frame"))
            .strata()
            .items()
        }
        fields = [vars(each) for each in verdict.rounds(chips)]
        write_whole(rounds, json.dumps({"rounds": fields}, indent=1).encode())
        say(f"{rounds}: written")
    if body is not None:
        row = {"inspector": made.inspector, "result": result.digest().hex(), "chips": verdict.event_rows()}
        write_whole(body, json.dumps(row).encode())
        say(f"{body}: written")
    answer(verdict_page(verdict), as_json=as_json)
    return 1 if verdict.failures else 0


def read_package(
    directory: Path, keys: dict[str, PublicKey], logs: str, earlier: list[Path]
) -> InspectionVerdict:
    """Return what a sealed package comes to; ``logs`` is chip or plain, ``earlier`` are packages of before.

    Raises:
        InvalidInput, StoreError: malformed, or missing.
        Mismatch: a signature or the chain of custody does not hold.
    """
    if logs not in ("chip", "plain") or (earlier and logs == "plain"):
        raise InvalidInput(f"--logs {logs}: must be chip or plain; --earlier is for chip logs")
    package = InspectionPackage(directory)
    encoded, issuer = open_document(ORDER_TYPE, package.load("order.json"), keys)
    made = WorkOrder.parse(encoded)
    if issuer != REGISTRY:
        raise Mismatch(f"work order: is signed by {issuer}, must be signed by {REGISTRY}")
    found, party = open_document(RESULT_TYPE, package.load("result.json"), keys)
    result = InspectionResult.parse(found)
    if party != made.inspector:
        raise Mismatch(f"inspection: the result is signed by {party}, the order is for {made.inspector}")
    reader = read_extraction if logs == "plain" else ChipLogReader(_logs_of(earlier, keys))
    return judge(made, result, keys, package.load_files(), reader)


def _logs_of(packages: list[Path], keys: dict[str, PublicKey]) -> dict[str, list[bytes]]:
    """Return the logs that sealed packages hold, by chip."""
    found: dict[str, list[bytes]] = {}
    for directory in packages:
        package = InspectionPackage(directory)
        files = package.load_files()
        for finding in InspectionResult.parse(
            open_document(RESULT_TYPE, package.load("result.json"), keys)[0]
        ).findings:
            if finding.log in files:
                found.setdefault(finding.chip, []).append(files[finding.log])
    return found


def _strata(frame: Path, announcement: DrawAnnouncement) -> dict[str, list[str]]:
    listed = parse_frame(read_whole(frame, limit=LARGEST_FRAME, what="a frame"))
    if listed.root() != announcement.registry:
        raise Mismatch(
            f"frame: its root is {listed.root().hex()}, announced is {announcement.registry.hex()}"
        )
    strata = listed.strata()
    if {name: len(chips) for name, chips in strata.items()} != {f.name: f.chips for f in announcement.strata}:
        raise Mismatch("frame: its strata are not those announced")
    return strata


def _file(path: Path | None) -> bytes:
    return b"" if path is None else read_whole(path, limit=LARGEST_LOG, what="a file of an inspection")


def spoken_in(made: DrawAnnouncement, beacon: str, now: int | None) -> bytes:
    """Return what the announced beacon said: of drand by its signature, else what is given.

    Raises:
        InvalidInput: it has not spoken yet, the announcement states another second, or no value.
        Mismatch: the signature is not the round's.
    """
    if len(beacon) > 128:
        raise InvalidInput("--beacon: must be at most 128 hexadecimal digits")
    verify_time(made.beacon_source, made.beacon_round, made.beacon_time)
    if (second := second_of(now)) < made.beacon_time:
        raise InvalidInput(
            f"--beacon: round {made.beacon_round} speaks at {made.beacon_time}, now is {second}: nobody can know its value yet"
        )
    given = parse_hex(beacon, n_bytes=len(beacon) // 2, what="--beacon")
    return spoken(made.beacon_source, made.beacon_round, given)
