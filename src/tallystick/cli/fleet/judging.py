"""tally fleet: which claim holds for which chips and dates, at which level, and what the next one lacks."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tallystick.cli.fleet.chip_evidence import HandedFiles, Lists, check_handed
from tallystick.cli.fleet.inspection import read_package
from tallystick.cli.fleet.observing import moment_of
from tallystick.cli.options import AsJson, argument, choose_source, load_trusted, option
from tallystick.cli.terminal import answer, say
from tallystick.commit.encoding import parse_hex
from tallystick.errors import InvalidInput, Mismatch, StoreError
from tallystick.fleet.agent.chip_log import LogLimits, NumberedFinding, Severity, read_log
from tallystick.fleet.attestation.assurance import (
    TOKEN_LIMIT,
    Attestation,
    CheckedEvidence,
    parse_attestation,
)
from tallystick.fleet.compliance.case import CASE_LIMIT, CaseChip, CaseOwner, FleetCase, parse_case
from tallystick.fleet.compliance.dossier import judge_fleet, reconciled_chips
from tallystick.fleet.compliance.verdict import worst
from tallystick.fleet.inspection.extraction import attested_chips
from tallystick.fleet.inspection.judging import InspectionVerdict
from tallystick.fleet.inspection.package import InspectionPackage
from tallystick.fleet.provenance.observation import ObservationPlan
from tallystick.fleet.provenance.owner_findings import owner_findings
from tallystick.fleet.provenance.verification import Answer
from tallystick.fleet.registry.facts import Chip
from tallystick.fleet.registry.ledger import RegistryLedger
from tallystick.fleet.registry.reconcile import Disagreement, Stream, reconcile
from tallystick.reports.monitoring import FleetReport, OwnerReport
from tallystick.store.chips import ChipDirectory
from tallystick.store.documents import read_document
from tallystick.store.files import read_whole, write_whole
from tallystick.store.keys import load_public_key

if TYPE_CHECKING:
    from tallystick.execution.job import JobSource
    from tallystick.fleet.provenance.verification import OwnerVerdict
    from tallystick.integrations.watching import Inquiry, KnownChip
    from tallystick.signing.keys import PublicKey

app = typer.Typer(help="Hold a fleet against its plan, with all evidence there is.", no_args_is_help=True)
EXIT_CODES = {"pass": 0, "fail": 1, "unknown": 3}
SEVERITIES: Mapping[Answer, Severity] = {"fail": "violation", "unknown": "unknown", "pass": "note"}
CLAIMS = {"runs": "correct", "complete": "complete", "fleet": "fleet"}


def register(parent: typer.Typer) -> None:
    """Add ``tally fleet`` to ``parent``."""
    parent.add_typer(app, name="fleet")


@app.callback()
def group() -> None:
    """Keep ``judge`` a command of its own."""


@app.command()
def judge(
    case: Annotated[Path, argument("CASE", "Plan, registry, inspections, owners and chips, TOML.")],
    claims: Annotated[
        list[str] | None,
        option("--claim", "runs|complete|fleet", "Which claims decide; by default all three."),
    ] = None,
    html: Annotated[Path | None, option("--html", "FILE", "Write the report as one page.")] = None,
    findings: Annotated[
        Path | None,
        option("--findings", "DIR", "Write each owner's findings there, for `tally rules judge`."),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Say which claim holds for which chips and dates, at which level: 0 all pass, 1 one fails, 3 it cannot be told."""
    from tallystick.integrations.watching import OwnerFolder, verify_owner

    asked = tuple(claims or CLAIMS)
    if odd := [claim for claim in asked if claim not in CLAIMS]:
        raise InvalidInput(f"--claim {odd[0]}: must be one of {', '.join(CLAIMS)}")
    stated = parse_case(read_whole(case, limit=CASE_LIMIT, what="a case"), what=str(case))
    reading, started = _Reading.of(stated, case.parent), time.perf_counter()

    def source_of(job: str) -> JobSource:
        return choose_source(stated.plan.job, job)

    owners: list[OwnerReport] = []
    for owner in stated.owner:
        folder = case.parent / owner.folder
        if not folder.is_dir():
            raise StoreError(f"{folder}: there is no such folder, of owner {owner.name[:80]}")
        inquiry = reading.inquiry(owner)
        known = {chip.ueid: reading.known(owner, chip, folder) for chip in owner.chip}
        found = verify_owner(owner.name, OwnerFolder(folder), known, source_of, inquiry, progress=say)
        shown = [chip.ueid for chip in found[1] if chip.log]
        verdict = reading.with_fleet(found[0], owner, shown)
        owners.append(OwnerReport(verdict, *found[1:], plan=inquiry.plan))
        if findings is not None:
            findings.mkdir(parents=True, exist_ok=True)
            name = f"{len(owners):03d}.json"
            write_whole(findings / name, owner_findings(verdict, found[1]).encode())
    plan = stated.plan
    facts: dict[str, object] = {
        "beacon": plan.beacon, "since": plan.since, "until": plan.until,
        "snapshots_per_day": plan.snapshots_per_day, "claims": ", ".join(asked),
    }  # fmt: skip
    report = FleetReport(owners, time.perf_counter() - started, str(case.parent.absolute()), facts)
    if html is not None:
        write_whole(html, report.page())
    answer(report, as_json=as_json)
    return EXIT_CODES[worst(getattr(each.verdict, CLAIMS[claim]) for each in owners for claim in asked)]


@dataclass(frozen=True)
class _Reading:
    """What a case names, read: the registry, what others say of it, inspections.

    Attributes:
        attested, failed: by UEID, what chips attested at inspections that they passed, and why others failed theirs.
    """

    case: FleetCase
    folder: Path
    nonce: bytes | None
    chips: Sequence[Chip] | None
    streams: Sequence[Stream]
    inspections: Sequence[InspectionVerdict]
    attested: Mapping[str, Sequence[Attestation]]
    failed: Mapping[str, Sequence[NumberedFinding]]
    _disagreements: list[Disagreement] = field(default_factory=list[Disagreement])

    @classmethod
    def of(cls, case: FleetCase, folder: Path) -> _Reading:
        plan, chips, streams = case.plan, None, list[Stream]()
        nonce = (
            None if plan.nonce is None else parse_hex(plan.nonce, n_bytes=len(plan.nonce) // 2, what="nonce")
        )
        parse_hex(plan.beacon, n_bytes=32, what="beacon")
        if case.registry is not None:
            with RegistryLedger(folder / case.registry.directory) as ledger:
                ledger.load_head()
                chips = list(ledger.each_chip())
            streams = [read_document(Stream, folder / file) for file in case.registry.streams]
        places, trust = (
            ([], []) if case.inspection is None else (case.inspection.packages, case.inspection.trust)
        )
        named = [text.partition("=") for text in trust]
        keys = load_trusted([f"{name}={folder / file}" if file else name for name, _, file in named])
        inspections = [read_package(folder / place, keys, "chip", []) for place in places]
        attested, failed = seen_at_inspections(inspections, [folder / place for place in places])
        found = reconcile(chips, streams) if chips is not None else []
        return cls(case, folder, nonce, chips, streams, inspections, attested, failed, found)

    def inquiry(self, owner: CaseOwner) -> Inquiry:
        """Return how an owner is verified."""
        from tallystick.integrations.watching import Inquiry, Plausibility

        plan = self.case.plan
        limits = LogLimits(
            rate=None if plan.least_rate is None else _thousandths(plan.least_rate, "least_rate"),
            idle_share=plan.idle_share,
        )
        use = {chip.ueid: chip.hours for chip in owner.chip if chip.hours is not None}
        begins = {chip.ueid: moment_of(chip.since, "since") for chip in owner.chip if chip.since is not None}
        most = plan.flop_per_chip_second
        return Inquiry(
            bytes.fromhex(plan.beacon),
            plan.segments,
            plan.largest,
            plausibility=None if most is None else Plausibility(most, plan.least_utilisation),
            limits=limits,
            memory_records=plan.memory,
            plan=ObservationPlan(
                _thousandths(plan.snapshots_per_day, "snapshots_per_day"),
                moment_of(plan.since, "since"),
                moment_of(plan.until, "until"),
                use,
                round(time.time() * 1000),
                limits,
                begins,
            ),
        )

    def known(self, owner: CaseOwner, chip: CaseChip, folder: Path) -> KnownChip:
        """Return what is known of one chip; what its owner handed over and does not hold speaks against it."""
        from tallystick.integrations.watching import KnownChip

        parse_hex(chip.ueid, n_bytes=len(chip.ueid) // 2, what="ueid")
        key = load_public_key(self.folder / chip.key)
        found = list(self.failed.get(chip.ueid, []))
        attested = list(self.attested.get(chip.ueid, []))
        asked = self.nonce or b""
        if chip.attestation is not None:
            token = read_whole(self.folder / chip.attestation, limit=TOKEN_LIMIT, what="an attestation")
            try:
                attested.append(self._attested(token, key, chip.ueid))
            except (InvalidInput, Mismatch) as problem:
                found.append(_does_not_hold(chip.ueid, problem))
        last = max(attested, key=lambda each: (each.head.seq, each.uptime), default=None)
        evidence = CheckedEvidence(
            known_key=True,
            attestation=last,
            inspected=chip.ueid in self.attested,
            reconciled=chip.ueid in self._reconciled(owner),
        )
        log = folder / "chips" / chip.ueid
        if log.is_dir():
            records, _ = read_log(ChipDirectory(log).frames(), key)
            try:
                shown = check_handed(self._handed(chip), records, key, asked)
                evidence = replace(evidence, quote=shown.quote, endorsed=shown.endorsed)
            except (InvalidInput, Mismatch) as problem:
                found.append(_does_not_hold(chip.ueid, problem))
        return KnownChip(key, tuple(each.head for each in attested), evidence, tuple(found))

    def with_fleet(self, verdict: OwnerVerdict, owner: CaseOwner, shown: Iterable[str]) -> OwnerVerdict:
        """Return a verdict that also says whether chips are missing, as far as registry, lists and inspections can tell."""
        if self.chips is None:
            return verdict
        known, there = {chip.chip: chip for chip in self.chips}, list(shown)
        disagreements = self._disagreements if self.streams else None
        said = judge_fleet(owner.name, self.chips, there, disagreements, self.inspections)
        severity: Severity = SEVERITIES[said.answer]
        found = [NumberedFinding(122, "fleet", None, reason, severity) for reason in said.reasons]
        for chip in owner.chip:
            stated = known[chip.ueid].key if chip.ueid in known else ""
            own = load_public_key(self.folder / chip.key).key_id
            if stated and stated != own:
                text = f"chip {chip.ueid[-8:]}: its key is {own[:16]}.., registered is {stated[:16]}.."
                found.append(NumberedFinding(122, "key", None, text))
        is_broken = any(each.severity == "violation" for each in found)
        return replace(
            verdict, fleet="fail" if is_broken else said.answer, findings=(*verdict.findings, *found)
        )

    def _attested(self, token: bytes, key: PublicKey, ueid: str) -> Attestation:
        if self.nonce is None:
            raise InvalidInput("attestation: the case has no nonce that it could answer")
        stated = parse_attestation(token, key, self.nonce)
        if stated.ueid.hex() != ueid:
            raise Mismatch(f"attestation: is of chip {stated.ueid.hex()}")
        return stated

    def _handed(self, chip: CaseChip) -> HandedFiles:
        def at(file: str | None) -> Path | None:
            return None if file is None else self.folder / file

        lists = Lists(tuple(self.folder / file for file in chip.crl), chip.require_crl)
        return HandedFiles(
            at(chip.tpm), at(chip.tpm_key), at(chip.tpm_enrolment), at(chip.enroller), at(chip.pcrs), at(chip.device),
            at(chip.device_root), at(chip.measurements), at(chip.endorsement), None, lists,
        )  # fmt: skip

    def _reconciled(self, owner: CaseOwner) -> frozenset[str]:
        return reconciled_chips(owner.name, self.chips or (), self.streams, self._disagreements)


def seen_at_inspections(
    verdicts: Sequence[InspectionVerdict], places: Sequence[Path]
) -> tuple[dict[str, list[Attestation]], dict[str, list[NumberedFinding]]]:
    """Return what chips attested where they passed, and by UEID why others failed their inspection."""
    attested: dict[str, list[Attestation]] = {}
    failed: dict[str, list[NumberedFinding]] = {}
    for verdict, place in zip(verdicts, places, strict=True):
        for ueid, stated in attested_chips(verdict, InspectionPackage(place).load_files()).items():
            attested.setdefault(ueid, []).append(stated)
        for chip in verdict.failures:
            ueid, reasons = chip.target.chip, "; ".join(chip.reasons)[:200] or chip.outcome
            text = f"failed its inspection: {reasons}"
            failed.setdefault(ueid, []).append(NumberedFinding(120, "inspection", None, text))
    return attested, failed


def _does_not_hold(ueid: str, problem: Exception) -> NumberedFinding:
    return NumberedFinding(121, "evidence", None, f"does not hold: {str(problem)[:200]}", "unknown")


def _thousandths(rate: float, name: str) -> int:
    if not 0.001 <= rate < 1e6:
        raise InvalidInput(f"{name} must be from 0.001 to 1e6, is {rate:g}")
    return round(1000 * rate)
