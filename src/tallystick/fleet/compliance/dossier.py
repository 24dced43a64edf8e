"""An owner's evidence, parsed and verified, as rules are held against it: findings, runs, licences, the fleet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tallystick.commit.encoding import HASH_BYTES, Fields, parse_hex, parse_json
from tallystick.errors import InvalidInput
from tallystick.fleet.enclave.neutral_result import Result
from tallystick.fleet.inspection.judging import InspectionVerdict
from tallystick.fleet.provenance.batch_opening import OpenedBatch
from tallystick.fleet.provenance.transcripts import Report
from tallystick.fleet.provenance.verification import Answer
from tallystick.fleet.registry.facts import DRAWN_FROM, Chip
from tallystick.fleet.registry.reconcile import Disagreement
from tallystick.run.transcript import Transcript
from tallystick.signing.dsse import Statement, Subject, known_fields

LICENCE_TYPE = "https://tallystick/training-licence/v0.1"
PRECOMMIT_DIGEST = "tallystickPrecommit"
OWNER_REPORT_LIMIT = 1 << 28
LARGEST_FLOP = 10**40
STATUSES = ("exact", "torn", "unexplained", "doubtful", "empty")


@dataclass(frozen=True)
class SeenSnapshot:
    """A snapshot as the verification found it: what it is, and which run's state after how many steps it holds."""

    seq: int
    status: str
    run: str | None
    steps_done: int | None


@dataclass(frozen=True)
class OwnerFindings:
    """What ``tally monitor verify --json`` says of one owner, as far as rules ask: answers, findings, snapshots.

    ``runs`` holds each run's answer and its findings as (rule, severity); ``chips`` each chip's snapshots.
    """

    owner: str
    correct: Answer
    complete: Answer
    assurance: str
    runs: Mapping[str, tuple[Answer, tuple[tuple[int, str], ...]]]
    chips: Mapping[str, tuple[SeenSnapshot, ...]]
    excluded: tuple[str, ...]


@dataclass(frozen=True)
class RunFacts:
    """A declared run as its owner opened it.

    Attributes:
        name: of it.
        report: of it.
        transcript: bound to the report (``verify_report``), or None.
        batches: of the steps whose batch was opened, each bound to the report (``open_batch``).
    """

    name: str
    report: Report
    transcript: Transcript | None
    batches: Mapping[int, OpenedBatch] = field(default_factory=dict[int, OpenedBatch])


@dataclass(frozen=True)
class GrantedLicence:
    """A licence whose signature was checked: for which pre-commitment, by which key, up to how many FLOP."""

    precommit: str
    licensor: str
    most_flop: int


@dataclass(frozen=True)
class Fleet:
    """What a registry and inspections say of an owner's chips: the answer and its reasons, in words."""

    answer: Answer
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Dossier:
    """Everything that is known of one owner. ``results`` are neutral results, each with the key id that signed it."""

    findings: OwnerFindings
    runs: tuple[RunFacts, ...]
    results: tuple[tuple[str, Result], ...] = ()
    licences: tuple[GrantedLicence, ...] = ()
    fleet: Fleet = Fleet("unknown", ("no registry was held against the chips shown",))


def parse_owner_findings(data: bytes, *, what: str = "findings") -> OwnerFindings:
    """Return the findings in what ``tally monitor verify --json`` printed; it is the reader's own, and is not signed.

    Raises:
        InvalidInput: not such a document.
    """
    value = parse_json(data, what=what, limit=OWNER_REPORT_LIMIT)
    names = (
        "owner", "declared_run_correctness", "declared_run_completeness", "assurance", "runs", "chips", "excluded",
    )  # fmt: skip
    fields = known_fields(value, names, what=what)
    runs: dict[str, tuple[Answer, tuple[tuple[int, str], ...]]] = {}
    for item in fields.items("runs"):
        run = known_fields(item, ("run", "correct", "findings"), what=f"{what}: run")
        listed = [
            known_fields(each, ("rule", "severity"), what=f"{what}: finding")
            for each in run.items("findings")
        ]
        found = tuple((each.integer("rule"), each.text("severity")) for each in listed)
        runs[run.text("run")] = (_answer(run, "correct", what), found)
    chips: dict[str, tuple[SeenSnapshot, ...]] = {}
    for item in fields.items("chips"):
        chip = known_fields(item, ("ueid", "snapshots"), what=f"{what}: chip")
        chips[chip.text("ueid")] = tuple(_seen(each, what) for each in chip.items("snapshots"))
    return OwnerFindings(
        fields.text("owner"),
        _answer(fields, "declared_run_correctness", what),
        _answer(fields, "declared_run_completeness", what),
        fields.text("assurance"),
        runs,
        chips,
        fields.texts("excluded"),
    )


def licence_statement(precommit: bytes, most_flop: int, licensor: str) -> Statement:
    """Return the licence to train what ``precommit`` (its digest) commits to, with at most so many FLOP, to be signed."""
    subject = Subject("precommit", {PRECOMMIT_DIGEST: precommit.hex()})
    return Statement((subject,), LICENCE_TYPE, {"licensor": licensor, "mostFlop": str(most_flop)})


def read_licence(statement: Statement, signer: str, *, what: str = "licence") -> GrantedLicence:
    """Return the licence that a statement grants; that key ``signer`` signed it is for the caller to know.

    Raises:
        InvalidInput: another predicate, or a field missing or malformed.
    """
    if statement.predicate_type != LICENCE_TYPE:
        raise InvalidInput(
            f"{what}: predicateType must be {LICENCE_TYPE}, is {statement.predicate_type[:80]!a}"
        )
    text = known_fields(statement.predicate, ("mostFlop",), what=what).text("mostFlop")
    if not text.isascii() or not text.isdigit() or len(text) > 41 or int(text) > LARGEST_FLOP:
        raise InvalidInput(f"{what}: mostFlop must be a decimal number up to 1e40, is {ascii(text)[:50]}")
    precommit = statement.digest_of("precommit", PRECOMMIT_DIGEST) or ""
    parse_hex(precommit, n_bytes=HASH_BYTES, what=f"{what}: pre-commitment")
    return GrantedLicence(precommit, signer, int(text))


def judge_fleet(
    owner: str,
    registered: Sequence[Chip],
    shown_chips: Iterable[str],
    disagreements: Sequence[Disagreement] | None,
    inspections: Sequence[InspectionVerdict],
) -> Fleet:
    """Return whether chips are missing: the registry's chips of ``owner`` against those shown, streams and inspections.

    ``disagreements`` is None where no independent stream was held against the registry. A pass needs all of it: every
    registered chip shown, streams that agree, and an inspection of the owner's chips without failures. What concerns others
    accuses nobody: another's inspected chips are left aside, another's streams that disagree leave the answer open.
    """
    known, there = {chip.chip: chip for chip in registered}, set(shown_chips)
    own = {name for name, chip in known.items() if chip.owner == owner}
    bad: list[str] = []
    for name, chip in sorted(known.items()):
        if chip.owner == owner and chip.status in DRAWN_FROM and name not in there:
            bad.append(f"chip {name} is registered to {owner} and was not shown")
    for name in sorted(there):
        if name not in known:
            bad.append(f"chip {name} was shown and is not registered")
        elif known[name].owner != owner:
            bad.append(f"chip {name} was shown by {owner} and is registered to {known[name].owner}")
    unclear: list[str] = []
    for each in disagreements or ():
        concerns = each.party == owner or each.chip in own | there
        words = f"{each.rule}: chip {each.chip or '-'}, {each.words}"
        (bad if concerns else unclear).append(words)
    for verdict in inspections:
        bad += [
            f"chip {chip.target.chip}: failed its inspection ({'; '.join(chip.reasons)[:200]})"
            for chip in verdict.failures
            if chip.target.chip in own | there
        ]
    if bad:
        return Fleet("fail", tuple(bad))
    if disagreements is None:
        unclear.append("no independent stream was held against the registry")
    if not any(chip.passed and chip.target.chip in own for verdict in inspections for chip in verdict.chips):
        unclear.append("no drawn chip was inspected")
    return (
        Fleet("unknown", tuple(unclear))
        if unclear
        else Fleet("pass", (f"{len(there)} chips shown, all registered",))
    )


def _answer(fields: Fields, name: str, what: str) -> Answer:
    match fields.text(name):
        case "pass":
            return "pass"
        case "fail":
            return "fail"
        case "unknown":
            return "unknown"
        case other:
            raise InvalidInput(f"{what}: {name} must be pass, fail or unknown, is {ascii(other)[:40]}")


def _seen(value: object, what: str) -> SeenSnapshot:
    what = f"{what}: snapshot"
    fields = known_fields(value, ("seq", "status", "run", "match"), what=what)
    status = fields.text("status")
    if status not in STATUSES:
        raise InvalidInput(f"{what}: status must be one of {', '.join(STATUSES)}, is {ascii(status)[:40]}")
    steps = None
    if fields.value("match") is not None:
        match = known_fields(fields.value("match"), ("steps_done",), what=what)
        steps = None if match.value("steps_done") is None else match.integer("steps_done")
    return SeenSnapshot(fields.integer("seq"), status, fields.optional_text("run"), steps)
