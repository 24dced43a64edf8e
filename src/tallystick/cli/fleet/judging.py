"""tally fleet: which claim holds for which chips and dates, at which level, and what the next one lacks."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tallystick.cli.fleet.chip_evidence import HandedFiles, Lists, check_handed
from tallystick.cli.fleet.inspection import read_package
from tallystick.cli.fleet.observing import moment_of
from tallystick.cli.fleet.rules import EXIT_CODES, Claims, asked_claims
from tallystick.cli.options import AsJson, argument, choose_source, load_trusted, option
from tallystick.cli.terminal import answer, say
from tallystick.commit.encoding import parse_hex
from tallystick.errors import InvalidInput, Mismatch, StoreError
from tallystick.fleet.agent.chip_log import LogLimits, NumberedFinding, Severity, read_log
from tallystick.fleet.agent.chip_record import LoggedRecord
from tallystick.fleet.attestation.assurance import (
    TOKEN_LIMIT,
    Attestation,
    CheckedEvidence,
    parse_attestation,
)
from tallystick.fleet.compliance.case import CASE_LIMIT, CaseChip, CaseOwner, FleetCase, parse_case
from tallystick.fleet.compliance.dossier import judge_fleet, named_by_others, reconciled_chips
from tallystick.fleet.compliance.verdict import worst
from tallystick.fleet.inspection.extraction import attested_chips
from tallystick.fleet.inspection.judging import ChipVerdict, InspectionVerdict
from tallystick.fleet.inspection.package import InspectionPackage
from tallystick.fleet.provenance.observation import ObservationPlan
from tallystick.fleet.provenance.owner_findings import owner_findings
from tallystick.fleet.provenance.verification import Answer, OwnerVerdict
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
    from tallystick.integrations.watching import Inquiry, KnownChip
    from tallystick.signing.keys import PublicKey

app = typer.Typer(help="Hold a fleet against its plan, with all evidence there is.", no_args_is_help=True)
SEVERITIES: Mapping[Answer, Severity] = {"fail": "violation", "unknown": "unknown", "pass": "note"}
SLACK_MS = 120_000  # by which clocks may differ
FIELDS = {"runs": "correct", "complete": "complete", "fleet": "fleet"}  # of a verdict, by claim


def register(parent: typer.Typer) -> None:
    """Add ``tally fleet`` to ``parent``."""
    parent.add_typer(app, name="fleet")


@app.callback()
def group() -> None:
    """Keep ``judge`` a command of its own."""


@app.command()
def judge(
    case: Annotated[Path, argument("CASE", "Plan, registry, inspections, owners and chips, TOML.")],
    claims: Claims = None,
    html: Annotated[Path | None, option("--html", "FILE", "Write the report as one page.")] = None,
    findings: Annotated[
        Path | None,
        option("--findings", "DIR", "Write each owner's findings there, for `tally rules judge`."),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Say which claim holds for which chips and dates, at which level: 0 all pass, 1 one fails, 3 it cannot be told."""
    asked = asked_claims(claims)
    stated = parse_case(read_whole(case, limit=CASE_LIMIT, what="a case"), what=str(case))
    reading, started = _Reading.of(stated, case.parent), time.perf_counter()

    owners: list[OwnerReport] = []
    for owner in stated.owner:
        owners.append(reading.judge(owner))
        if findings is not None:
            findings.mkdir(parents=True, exist_ok=True)
            shown = owner_findings(owners[-1].verdict, owners[-1].chips)
            write_whole(findings / f"{len(owners):03d}.json", shown.encode())
    plan = stated.plan
    facts: dict[str, object] = {
        "beacon": plan.beacon, "since": plan.since, "until": plan.until,
        "snapshots_per_day": plan.snapshots_per_day, "claims": ", ".join(asked),
    }  # fmt: skip
    report = FleetReport(owners, time.perf_counter() - started, str(case.parent.absolute()), facts)
    if html is not None:
        write_whole(html, report.page())
    answer(report, as_json=as_json)
    return EXIT_CODES[worst(getattr(each.verdict, FIELDS[claim]) for each in owners for claim in asked)]


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
        """Read what the reader's own case names.

        Raises:
            InvalidInput, Mismatch, StoreError: something of it is malformed, does not hold or is not there.
        """
        plan, chips, streams = case.plan, None, list[Stream]()
        nonce = (
            None if plan.nonce is None else parse_hex(plan.nonce, n_bytes=len(plan.nonce) // 2, what="nonce")
        )
        parse_hex(plan.beacon, n_bytes=32, what="beacon")
        for owner in case.owner:
            if not (folder / owner.folder).is_dir():
                raise StoreError(
                    f"{folder / owner.folder}: there is no such folder, of owner {owner.name[:80]}"
                )
            for chip in owner.chip:
                parse_hex(chip.ueid, n_bytes=len(chip.ueid) // 2, what="ueid")
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
        seen = seen_at_inspections(inspections, [folder / place for place in places])
        found = reconcile(chips, streams) if chips is not None else []
        made = cls(case, folder, nonce, chips, streams, latest_of(inspections), *seen, found)
        for owner in case.owner:
            made.inquiry(owner)
        return made

    def judge(self, owner: CaseOwner) -> OwnerReport:
        """Return the report on one owner; what it handed over and nobody can read is unknown, and hinders no other's verdict."""
        from tallystick.integrations.watching import OwnerFolder, verify_owner

        folder, inquiry = self.folder / owner.folder, self.inquiry(owner)
        own = owner.job or self.case.plan.job
        job = str(self.folder / own) if own is not None and (self.folder / own).is_file() else own

        def source_of(stated: str) -> JobSource:
            return choose_source(job, stated)

        known = {chip.ueid: self.known(owner, chip, folder) for chip in self._watched(owner)}
        try:
            verdict, views, evidence = verify_owner(
                owner.name, OwnerFolder(folder), known, source_of, inquiry, progress=say
            )
        except (InvalidInput, Mismatch, StoreError) as problem:
            text = f"what {owner.name[:80]} handed over cannot be read: {str(problem)[:300]}"
            found = (NumberedFinding(123, "hand-over", None, text, "unknown"),)
            nothing = OwnerVerdict(owner.name, "unknown", "unknown", "unknown", 0, (), found, ())
            return OwnerReport(nothing, [], [], plan=inquiry.plan)
        verdict = self.with_fleet(verdict, owner, [view.ueid for view in views if view.log])
        return OwnerReport(verdict, views, evidence, plan=inquiry.plan)

    def _watched(self, owner: CaseOwner) -> list[CaseChip]:
        """Return the chips of an owner that it had in the time asked for."""
        until = moment_of(self.case.plan.until, "until")
        return [each for each in owner.chip if each.since is None or moment_of(each.since, "since") < until]

    def inquiry(self, owner: CaseOwner) -> Inquiry:
        """Return how an owner is verified."""
        from tallystick.integrations.watching import Inquiry, Plausibility

        plan = self.case.plan
        limits = LogLimits(
            rate=None if plan.least_rate is None else _thousandths(plan.least_rate, "least_rate"),
            idle_share=plan.idle_share,
        )
        watched = self._watched(owner)
        use = {chip.ueid: chip.hours for chip in watched if chip.hours is not None}
        begins = {chip.ueid: moment_of(chip.since, "since") for chip in watched if chip.since is not None}
        ends = {chip.ueid: moment_of(chip.until, "until") for chip in watched if chip.until is not None}
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
                ends,
            ),
        )

    def known(self, owner: CaseOwner, chip: CaseChip, folder: Path) -> KnownChip:
        """Return what is known of one chip; what its owner handed over and does not hold speaks against it.

        Raises:
            InvalidInput, StoreError: a key or a file that the case names is none, or is not there: the reader's own mistake.
        """
        from tallystick.integrations.watching import KnownChip

        key = load_public_key(self.folder / chip.key)
        found = list(self.failed.get(chip.ueid, []))
        records, log = list[LoggedRecord](), folder / "chips" / chip.ueid
        with suppress(InvalidInput, StoreError):  # who verifies it says so
            records, _ = read_log(ChipDirectory(log).frames() if log.is_dir() else [], key)
        token = self._token(chip, key, found)
        seen = self._seen(chip.ueid, self.case.plan.until)
        heads = [] if token is None else [token.head]
        for each in self.attested.get(chip.ueid, []):
            # An inspection after the time asked for may have seen what was logged since the hand-over.
            if each in seen and records and _is_in(token, records) and each.head.seq > records[-1].record.seq:
                last, shown = each.head.seq, records[-1].record.seq
                text = f"an inspection later than the time asked for saw record {last}, the last shown is {shown}: ask for more"
                found.append(NumberedFinding(121, "evidence", shown, text, "unknown"))
            else:
                heads.append(each.head)
        fresh = token or next((each for each in reversed(seen) if _is_in(each, records)), None)
        is_registered = self._other_key(chip.ueid, key.key_id) is None
        evidence = CheckedEvidence(
            known_key=is_registered,
            attestation=fresh,
            inspected=bool(self._seen(chip.ueid, chip.since or self.case.plan.since)),
            reconciled=is_registered and chip.ueid in self._reconciled(owner),
        )
        try:
            shown = check_handed(self._handed(chip), records, key, self.nonce or b"")
            evidence = replace(evidence, quote=shown.quote, endorsed=shown.endorsed)
        except (InvalidInput, Mismatch) as problem:
            found.append(_does_not_hold(problem))
        return KnownChip(key, tuple(heads), evidence, tuple(found), goes_on=True)

    def _token(self, chip: CaseChip, key: PublicKey, found: list[NumberedFinding]) -> Attestation | None:
        """Return what a chip attested for the case's nonce; None, and why in ``found``, if that does not hold."""
        if chip.attestation is None:
            return None
        try:
            data = read_whole(self.folder / chip.attestation, limit=TOKEN_LIMIT, what="an attestation")
            return self._attested(data, key, chip.ueid)
        except (InvalidInput, Mismatch) as problem:
            found.append(_does_not_hold(problem))
            return None

    def _seen(self, ueid: str, since: str) -> list[Attestation]:
        """Return what a chip attested at inspections that it passed after a date and before now."""
        earliest, now = moment_of(since, "since"), time.time() * 1000
        times = {each.order.chip_nonce(ueid): 1000 * each.order.issued for each in self.inspections}
        return [
            each
            for each in self.attested.get(ueid, [])
            if earliest - SLACK_MS <= times.get(each.nonce, 0) <= now + SLACK_MS
        ]

    def with_fleet(self, verdict: OwnerVerdict, owner: CaseOwner, shown: Iterable[str]) -> OwnerVerdict:
        """Return a verdict that also says whether chips are missing, as far as registry, lists and inspections can tell."""
        if self.chips is None:
            return verdict
        later = {chip.ueid for chip in owner.chip}.difference(chip.ueid for chip in self._watched(owner))
        left = {chip.ueid for chip in owner.chip if chip.until is not None}
        there = [*(ueid for ueid in shown if ueid not in left), *later]
        disagreements = self._disagreements if self.streams else None
        named = named_by_others(owner.name, self.streams)
        said = judge_fleet(owner.name, self.chips, there, disagreements, self.inspections, named)
        severity: Severity = SEVERITIES[said.answer]
        found = [NumberedFinding(122, "fleet", None, reason, severity) for reason in said.reasons]
        for chip in owner.chip:
            own = load_public_key(self.folder / chip.key).key_id
            if (stated := self._other_key(chip.ueid, own)) is not None:
                text = f"chip {chip.ueid[-8:]}: its key is {own[:16]}.., registered is {stated[:16]}.."
                found.append(NumberedFinding(122, "key", None, text))
        keyless = sorted(chip.chip for chip in self.chips if chip.chip in there and not chip.key)
        if keyless:
            text = f"no device key is registered for chip {keyless[0]}"
            found.append(NumberedFinding(122, "key", None, text, "unknown"))
        listed, folder = {chip.ueid for chip in owner.chip}, self.folder / owner.folder / "chips"
        more = (
            sorted(path.name for path in folder.iterdir() if path.name not in listed)
            if folder.is_dir()
            else []
        )
        if more:
            text = f"{owner.name[:80]} shows chip {more[0][:80]}, which is not in the case"
            found.append(NumberedFinding(122, "chip", None, text, "unknown"))
        is_open = keyless or more
        is_broken = any(each.severity == "violation" for each in found)
        return replace(
            verdict,
            fleet="fail" if is_broken else "unknown" if is_open else said.answer,
            findings=(*verdict.findings, *found),
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

    def _other_key(self, ueid: str, own: str) -> str | None:
        """Return the key that is registered for a chip, where it is another one than ``own``."""
        stated = next((chip.key for chip in self.chips or () if chip.chip == ueid), "")
        return stated if stated and stated != own else None

    def _reconciled(self, owner: CaseOwner) -> frozenset[str]:
        return reconciled_chips(owner.name, self.chips or (), self.streams, self._disagreements)


def _is_superseded(chip: ChipVerdict, later: Iterable[InspectionVerdict]) -> bool:
    """Whether a chip passed one of the ``later`` inspections, after one that it did not pass."""
    name = chip.target.chip
    passed = (each for verdict in later for each in verdict.chips if each.passed)
    return not chip.passed and any(each.target.chip == name for each in passed)


def latest_of(verdicts: Iterable[InspectionVerdict]) -> list[InspectionVerdict]:
    """Return inspections in the order of time, without failures of chips that passed a later one."""
    ordered = sorted(verdicts, key=lambda verdict: verdict.order.issued)
    return [
        replace(
            verdict,
            chips=tuple(chip for chip in verdict.chips if not _is_superseded(chip, ordered[number + 1 :])),
        )
        for number, verdict in enumerate(ordered)
    ]


def seen_at_inspections(
    verdicts: Sequence[InspectionVerdict], places: Sequence[Path]
) -> tuple[dict[str, list[Attestation]], dict[str, list[NumberedFinding]]]:
    """Return what chips attested where they passed, in the order of time, and by UEID why others failed their inspection.

    A failure before an inspection that was passed is no violation any more, and no pass either.
    """
    attested: dict[str, list[Attestation]] = {}
    failed: dict[str, list[NumberedFinding]] = {}
    ordered = sorted(zip(verdicts, places, strict=True), key=lambda each: each[0].order.issued)
    for number, (verdict, place) in enumerate(ordered):
        for ueid, stated in attested_chips(verdict, InspectionPackage(place).load_files()).items():
            attested.setdefault(ueid, []).append(stated)
        later = [each for each, _ in ordered[number + 1 :]]
        for chip in verdict.failures:
            is_earlier, reasons = _is_superseded(chip, later), "; ".join(chip.reasons)[:200] or chip.outcome
            text = f"failed {'an earlier' if is_earlier else 'its'} inspection: {reasons}"
            severity: Severity = "unknown" if is_earlier else "violation"
            found = NumberedFinding(120, "inspection", None, text, severity)
            failed.setdefault(chip.target.chip, []).append(found)
    return attested, failed


def _is_in(attested: Attestation | None, records: Sequence[LoggedRecord]) -> bool:
    """Whether a chip attested a record of the log that is shown."""
    return attested is not None and any(
        (r.record.seq, r.digest) == (attested.head.seq, attested.head.digest) for r in records
    )


def _does_not_hold(problem: Exception) -> NumberedFinding:
    return NumberedFinding(121, "evidence", None, f"does not hold: {str(problem)[:200]}", "unknown")


def _thousandths(rate: float, name: str) -> int:
    if not 0.001 <= rate < 1e6:
        raise InvalidInput(f"{name} must be from 0.001 to 1e6, is {rate:g}")
    return round(1000 * rate)
