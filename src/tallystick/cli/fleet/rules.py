"""tally rules: check a file of rules, hold an owner's evidence against it, grant a licence; torch only opens a run's batches."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Annotated

import typer

from tallystick.cli.fleet.inspection import LogKind, read_package
from tallystick.cli.options import (
    AsJson,
    JobName,
    Out,
    PerhapsTrusted,
    argument,
    choose_source,
    load_trusted,
    option,
)
from tallystick.cli.terminal import answer, done, say
from tallystick.errors import InvalidInput, Mismatch, StoreError
from tallystick.fleet.compliance.compliance import judge_rules
from tallystick.fleet.compliance.dossier import (
    LARGEST_FLOP,
    Dossier,
    FleetAnswer,
    GrantedLicence,
    RunFacts,
    judge_fleet,
    licence_statement,
    named_by_others,
    read_licence,
)
from tallystick.fleet.compliance.rules import RULES_LIMIT, Rules, parse_rules
from tallystick.fleet.enclave.neutral_result import NeutralResult, read_result
from tallystick.fleet.inspection.judging import InspectionVerdict
from tallystick.fleet.provenance.batch_opening import (
    OPENING_LIMIT,
    BatchOpening,
    OpenedBatch,
    open_batch,
    parse_batch_opening,
    take_apart,
)
from tallystick.fleet.provenance.owner_findings import OwnerFindings
from tallystick.fleet.provenance.submission import DeclaredRun, OwnerFolder
from tallystick.fleet.provenance.transcripts import (
    Precommit,
    RunReport,
    verify_report,
)
from tallystick.fleet.registry.ledger import RegistryLedger
from tallystick.fleet.registry.reconcile import Stream, reconcile
from tallystick.reports.rules import rules_page, rules_verdict_page
from tallystick.signing.dsse import ENVELOPE_LIMIT, Envelope, parse_envelope, sign_statement
from tallystick.signing.keys import PublicKey
from tallystick.store.documents import read_document
from tallystick.store.files import RunDirectory, read_whole, write_whole
from tallystick.store.keys import load_key, load_public_key

app = typer.Typer(help="Rules about training: check them, hold evidence against them.", no_args_is_help=True)
EXIT_CODES = {"pass": 0, "fail": 1, "unknown": 3}
CLAIMS = ("runs", "complete", "fleet")

Claims = Annotated[
    list[str] | None,
    option("--claim", "runs|complete|fleet", "Which claims decide; by default all three."),
]
RulesFile = Annotated[Path, argument("RULES", "A file of rules, TOML (spec/rules.md).")]


def register(parent: typer.Typer) -> None:
    """Add ``tally rules`` to ``parent``."""
    parent.add_typer(app, name="rules")


@app.command()
def show(rules: RulesFile, as_json: AsJson = False) -> int:
    """Show what a file of rules asks, and the evidence that each rule needs; 2 if it is malformed."""
    answer(rules_page(_rules(rules)), as_json=as_json)
    return 0


@app.command("judge")
def judge(
    rules: RulesFile,
    findings: Annotated[
        Path, argument("FINDINGS", "What `tally monitor verify --findings` wrote; your own, nobody signs it.")
    ],
    folder: Annotated[Path, argument("DIR", "What the owner handed over, opened: runs/ and chips/.")],
    results: Annotated[
        list[Path] | None, option("--result", "FILE", "A neutral run's result; may be repeated.")
    ] = None,
    licences: Annotated[list[Path] | None, option("--licence", "FILE", "A licence; may be repeated.")] = None,
    keys: Annotated[
        list[Path] | None,
        option("--known", "FILE", "Public key of a neutral place or licensor; may be repeated."),
    ] = None,
    registry: Annotated[
        Path | None, option("--registry", "DIR", "The registry, for fleet completeness.")
    ] = None,
    owner: Annotated[str | None, option("--owner", "NAME", "The owner's name in the registry.")] = None,
    streams: Annotated[
        list[Path] | None, option("--stream", "FILE", "An independent list of chips; may be repeated.")
    ] = None,
    inspections: Annotated[
        list[Path] | None, option("--inspection", "DIR", "A sealed inspection package; may be repeated.")
    ] = None,
    trust: PerhapsTrusted = None,
    logs: LogKind = "chip",
    claims: Claims = None,
    as_json: AsJson = False,
) -> int:
    """Hold an owner's evidence against rules: 0 if the claims asked for pass, 1 if one fails, 3 if it cannot be told."""
    asked = asked_claims(claims)
    if registry is None and (streams or inspections or owner):
        raise InvalidInput("--owner, --stream, --inspection: need --registry")
    if (registry is None) != (owner is None):
        raise InvalidInput("--registry: needs --owner, the owner's name in it")
    if not folder.is_dir():
        raise StoreError(f"{folder}: there is no such folder")
    asked_for, found = _rules(rules), read_document(OwnerFindings, findings)
    known = [load_public_key(path) for path in keys or []]
    packages = [read_package(place, load_trusted(trust), logs, []) for place in inspections or []]
    dossier = Dossier(
        found,
        tuple(_runs(folder)),
        tuple(_result(path, known) for path in results or []),
        tuple(_licence(path, known) for path in licences or []),
        _fleet(registry, owner, found, streams or [], packages),
    )
    verdict = judge_rules(asked_for, dossier)
    answer(rules_verdict_page(verdict, asked), as_json=as_json)
    return EXIT_CODES[verdict.asked(asked)]


@app.command()
def licence(
    precommit: Annotated[Path, argument("PRECOMMIT", "The pre-commitment of the run to be licensed.")],
    most_flop: Annotated[str, option("--most-flop", "N", "The most FLOP, such as 1e25 or 10000000.")],
    key: Annotated[str, option("--key", "FILE", "The licensor's private key, or env:NAME.")],
    out: Out,
    as_json: AsJson = False,
) -> int:
    """Sign a licence to train what a pre-commitment commits to."""
    committed = read_document(Precommit, precommit)
    flop = _whole(most_flop)
    if flop is None or flop > LARGEST_FLOP:
        raise InvalidInput(f"--most-flop {most_flop[:60]}: must be a whole number up to 1e40")
    signer = load_key(key)
    statement = licence_statement(committed.digest(), flop, signer.public_key.key_id)
    write_whole(out, sign_statement(statement, signer))
    values = {"licence": str(out), "precommit": committed.digest().hex(), "most_flop": str(flop)}
    return done(f"licensed: {out}", values, as_json=as_json)


@app.command("open")
def open_records(
    run: Annotated[Path, argument("RUN", "Your own finished run, recorded with --chip.")],
    steps: Annotated[
        list[int] | None, option("--step", "N", "Only this step; may be repeated. By default all.", least=0)
    ] = None,
    out: Annotated[Path | None, option("--out", "DIR", "Where to; by default RUN.batches.")] = None,
    job: JobName = None,
    as_json: AsJson = False,
) -> int:
    """Open the batches of a run, as its owner, for rules about single records: they show all of their data."""
    from tallystick.integrations.committing import open_batches

    specification = RunDirectory(run).load_specification()
    source = choose_source(job, specification.job.path)
    chosen = sorted(set(steps)) if steps else list(range(specification.steps))
    place = run.with_name(f"{run.name}.batches") if out is None else out
    tenth = max(1, len(chosen) // 10)

    def progress(batch: int, of: int) -> None:
        if batch % tenth == 0:
            say(f"batch {batch} of {of}")

    written = open_batches(run, source, chosen, place, progress)
    values = {"openings": str(place), "batches": len(chosen), "bytes": written}
    return done(f"opened: {place}", values, as_json=as_json)


@app.command()
def records(
    openings: Annotated[list[Path], argument("OPENING..", "Opened batches.")],
    report: Annotated[
        Path | None, option("--report", "FILE", "The run's report, which must commit to them.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """List the digests of the records in opened batches, and their form: what rules of unit record name."""
    stated = None if report is None else read_document(RunReport, report)
    listed: list[dict[str, object]] = []
    rows: list[tuple[str, str]] = []
    for path in openings:
        opening = _opening(path)
        found = take_apart(opening.batch) if stated is None else open_batch(opening, stated)
        listed.append({"step": opening.step, **found.fields()})
        rows += [
            (f"step {opening.step}", f"batch {found.digest}"),
            ("form", found.form or f"none: {found.problem}"),
        ]
        rows += [(f"record {at}", each) for at, each in enumerate(found.records)]
    said = "bound to the report" if stated else "not held against any report"
    values = {"bound": stated is not None, "batches": listed}
    return done(f"{len(listed)} opened, {said}", values, as_json=as_json, rows=rows)


def asked_claims(given: Sequence[str] | None) -> tuple[str, ...]:
    """Return the claims that decide.

    Raises:
        InvalidInput: one is none.
    """
    asked = tuple(given or CLAIMS)
    if odd := [claim for claim in asked if claim not in CLAIMS]:
        raise InvalidInput(f"--claim {odd[0]}: must be one of {', '.join(CLAIMS)}")
    return asked


def _whole(text: str) -> int | None:
    """Return the whole number that a text writes in decimal, to its last digit: binary64 has no 1e25."""
    found = re.fullmatch(r"([0-9]{1,41})(?:\.([0-9]{1,41}))?(?:[eE]\+?([0-9]{1,2}))?", text, re.ASCII)
    if found is None:
        return None
    exact = Fraction(int(found[1] + (found[2] or ""))) * Fraction(10) ** (
        int(found[3] or 0) - len(found[2] or "")
    )
    return int(exact) if exact.denominator == 1 else None


def _rules(path: Path) -> Rules:
    return parse_rules(read_whole(path, limit=RULES_LIMIT, what="rules"), what=str(path))


def _fleet(
    registry: Path | None,
    owner: str | None,
    found: OwnerFindings,
    streams: Sequence[Path],
    inspections: Sequence[InspectionVerdict],
) -> FleetAnswer:
    """Return whether chips are missing, as far as the registry, the streams and the inspections can tell."""
    if registry is None or owner is None:
        return FleetAnswer("unknown", ("no registry was held against the chips shown",))
    lists = [read_document(Stream, path) for path in streams]
    with RegistryLedger(registry) as ledger:
        ledger.load_head()
        chips = list(ledger.each_chip())
    named = named_by_others(owner, lists)
    return judge_fleet(
        owner, chips, found.chips, reconcile(chips, lists) if lists else None, inspections, named
    )


def _runs(folder: Path) -> list[RunFacts]:
    """Return the declared runs; a transcript that its report does not bind is as good as none, and said."""
    found: list[RunFacts] = []
    for run in OwnerFolder(folder).runs():
        transcript = None
        try:
            transcript = run.directory.load_transcript()
            verify_report(run.report, run.opening, transcript)
        except (InvalidInput, Mismatch) as problem:
            say(f"{run.name}: {problem}")
            transcript = None
        found.append(RunFacts(run.name, run.report, transcript, _batches(run)))
    return found


def _batches(run: DeclaredRun) -> dict[int, OpenedBatch]:
    """Return the batches that the run's report binds; one that it does not is as good as none, and said."""
    found: dict[int, OpenedBatch] = {}
    for path in run.batches():
        try:
            opening = _opening(path)
            found[opening.step] = open_batch(opening, run.report)
        except (InvalidInput, Mismatch) as problem:
            say(f"{run.name}: {problem}")
    return found


def _opening(path: Path) -> BatchOpening:
    return parse_batch_opening(
        read_whole(path, limit=OPENING_LIMIT, what="the opening of a batch"), what=str(path)
    )


def _signed(path: Path, known: Sequence[PublicKey]) -> tuple[Envelope, PublicKey]:
    envelope = parse_envelope(read_whole(path, limit=ENVELOPE_LIMIT, what="a statement"), what=str(path))
    signers = envelope.signers(known)
    if not signers:
        raise Mismatch(f"{path}: is not signed by any of the {len(known)} keys given with --known")
    return envelope, signers[0]


def _result(path: Path, known: Sequence[PublicKey]) -> tuple[str, NeutralResult]:
    envelope, signer = _signed(path, known)
    return signer.key_id, read_result(envelope.statement(what=str(path)), what=str(path))


def _licence(path: Path, known: Sequence[PublicKey]) -> GrantedLicence:
    envelope, signer = _signed(path, known)
    return read_licence(envelope.statement(what=str(path)), signer.key_id, what=str(path))
