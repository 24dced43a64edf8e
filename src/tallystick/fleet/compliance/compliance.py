"""Do the declared runs and the chips keep the rules? Each rule's answer and its evidence, and three claims apart; pure.

    verdict = judge_rules(rules, dossier)
    verdict.correct, verdict.complete, verdict.fleet          # pass, fail or unknown; unknown is never a pass

A declared run that was not found correct can break a rule (its owner says so itself) but never keep one. What the rules
say holds of declared runs; that these are all runs, the second claim says, and that no chip is missing, the third.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from tallystick.commit.encoding import HASH_BYTES, Fields, parse_hex, parse_json
from tallystick.errors import InvalidInput
from tallystick.fleet.compliance.rules import (
    Compute,
    Data,
    Evaluation,
    HyperParameter,
    Licence,
    Mitigation,
    NoTraining,
    Reporting,
    Rule,
    Rules,
    Unit,
    shown,
)
from tallystick.fleet.enclave.neutral import COMPLETED
from tallystick.fleet.enclave.neutral_result import Result
from tallystick.fleet.inspection.judging import Verdict as InspectionVerdict
from tallystick.fleet.provenance.batch_opening import OpenedBatch
from tallystick.fleet.provenance.transcripts import Report
from tallystick.fleet.provenance.verification import Answer
from tallystick.fleet.registry.events import DRAWN_FROM, Chip
from tallystick.fleet.registry.reconcile import Finding as Disagreement
from tallystick.run.transcript import Transcript
from tallystick.signing.dsse import Statement, Subject, known_fields

LICENCE_TYPE = "https://tallystick/training-licence/v0.1"
PRECOMMIT_DIGEST = "tallystickPrecommit"
OWNER_REPORT_LIMIT = 1 << 28
LARGEST_FLOP = 10**40
STATUSES = ("exact", "torn", "unexplained", "doubtful", "empty")


def worst(answers: Iterable[Answer]) -> Answer:
    """Return ``fail`` if one fails, else ``unknown`` if one is, else ``pass``."""
    found = set(answers)
    return "fail" if "fail" in found else "unknown" if "unknown" in found else "pass"


# ------------------------------------------------------------------------------------------------ evidence


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


# ------------------------------------------------------------------------------------------------- judging


@dataclass(frozen=True)
class Observation:
    """What one run or chip says of a rule: ``subject`` names it, ``text`` has both values."""

    subject: str
    answer: Answer
    text: str

    def fields(self) -> dict[str, object]:
        """Return the observation as JSON."""
        return {"subject": self.subject, "answer": self.answer, "text": self.text}


@dataclass(frozen=True)
class RuleVerdict:
    """One rule: its answer about what was declared, with every observation and what the answer leaves out."""

    rule: Rule
    answer: Answer
    observations: tuple[Observation, ...]

    def fields(self) -> dict[str, object]:
        """Return the verdict as JSON."""
        return {
            "id": self.rule.id,
            "kind": self.rule.kind,
            "answer": self.answer,
            "needs": list(self.rule.needs),
            "observations": [each.fields() for each in self.observations],
            "excluded": self.rule.excluded,
        }


@dataclass(frozen=True)
class RulesVerdict:
    """Whether what was declared keeps the rules, and three answers on how far that reaches; they stay apart.

    Attributes:
        correct: the declared runs took place as declared.
        complete: the snapshots shown belong to declared runs.
        fleet: no chip is missing; ``reasons`` says why this answer.
        verdicts: every rule's own answer, about what was declared and shown.
        excluded: what none of the answers covers.
    """

    rules: Rules
    owner: str
    correct: Answer
    complete: Answer
    fleet: Answer
    assurance: str
    verdicts: tuple[RuleVerdict, ...]
    reasons: tuple[str, ...]
    excluded: tuple[str, ...]

    @property
    def kept(self) -> Answer:
        """Whether what was declared and shown keeps every rule."""
        return worst(each.answer for each in self.verdicts)

    def asked(self, claims: Sequence[str]) -> Answer:
        """Return the worst of the rules' answers and those of the claims named ``runs``, ``complete`` and ``fleet``."""
        answers: dict[str, Answer] = {"runs": self.correct, "complete": self.complete, "fleet": self.fleet}
        return worst([self.kept, *(answers[claim] for claim in claims)])

    def fields(self) -> dict[str, object]:
        """Return the verdict as JSON."""
        return {
            "rules": self.rules.name,
            "rules_digest": self.rules.digest,
            "owner": self.owner,
            "rules_kept": self.kept,
            "declared_run_correctness": self.correct,
            "declared_run_completeness": self.complete,
            "fleet_completeness": self.fleet,
            "assurance": self.assurance,
            "verdicts": [each.fields() for each in self.verdicts],
            "fleet_reasons": list(self.reasons),
            "excluded": list(self.excluded),
        }


def judge_rules(rules: Rules, dossier: Dossier) -> RulesVerdict:
    """Return what the evidence says about the rules."""
    judge = _Judge(dossier)
    verdicts = tuple(judge.rule(rule) for rule in rules.rules)
    excluded = dict.fromkeys((*dossier.findings.excluded, *(rule.excluded for rule in rules.rules)))
    return RulesVerdict(
        rules,
        dossier.findings.owner,
        dossier.findings.correct,
        dossier.findings.complete,
        dossier.fleet.answer,
        dossier.findings.assurance,
        verdicts,
        dossier.fleet.reasons,
        tuple(excluded),
    )


class _Judge:
    """Holds one owner's evidence against one rule after the other."""

    def __init__(self, dossier: Dossier) -> None:
        self.dossier = dossier
        self.by_root = {facts.report.run: facts for facts in dossier.runs}
        self.unopened = sorted(set(dossier.findings.runs) - set(self.by_root))

    def rule(self, rule: Rule) -> RuleVerdict:
        body = rule.body
        if isinstance(body, NoTraining):
            found = self._chips(body)
        else:
            asked = (self._run(rule, facts) for facts in self.dossier.runs)
            found = [each for each in asked if each is not None]
            found += [
                Observation(f"run {root[:16]}..", "unknown", "was verified and not opened")
                for root in self.unopened
            ]
        return RuleVerdict(rule, worst(each.answer for each in found), tuple(found))

    # -- runs --------------------------------------------------------------------------------

    def _run(self, rule: Rule, facts: RunFacts) -> Observation | None:
        """Return what a run says of a rule, or None where the rule is not about it."""
        if rule.above_flop is not None:
            total, why = self._lineage(facts)
            own = Fraction(facts.report.totals.flop)
            if total is None and own <= rule.above_flop:
                text = f"whether it is above {shown(rule.above_flop)} FLOP cannot be told: {why}"
                return Observation(facts.name, "unknown", text)
            if total is not None and total <= rule.above_flop:
                if (claimed := self._line(facts)) == "pass":
                    return None
                text = f"{shown(total)} FLOP of lineage are stated, but their correctness is {claimed}"
                return Observation(facts.name, "unknown", text)
        answer, text = self._ask(rule.body, facts)
        correct = self._correct(facts)
        if answer == "pass" and correct != "pass":
            answer = "unknown"
            text += f"; but the run's own correctness is {correct}"
        if answer == "pass" and facts.transcript is None:
            answer = "unknown"
            text += "; but its transcript was not shown, or is not what its report commits to"
        return Observation(facts.name, answer, text)

    def _correct(self, facts: RunFacts) -> Answer:
        return self.dossier.findings.runs.get(facts.report.run, ("unknown", ()))[0]

    def _ask(self, body: object, facts: RunFacts) -> tuple[Answer, str]:
        match body:
            case Compute():
                return self._compute(body, facts)
            case Data():
                return self._data(body, facts)
            case HyperParameter():
                return self._hyper(body, facts)
            case Evaluation():
                return self._evaluation(body, facts)
            case Reporting():
                return self._reporting(body, facts)
            case Licence():
                return self._licence(body, facts)
            case Mitigation():
                return self._mitigation(body, facts)
            case _:
                raise AssertionError(body)

    def _compute(self, rule: Compute, facts: RunFacts) -> tuple[Answer, str]:
        own = Fraction(facts.report.totals.flop)
        total, why = (own, "") if rule.scope == "run" else self._lineage(facts)
        what = f"of a {shown(rule.most_flop)} FLOP limit per {rule.scope}"
        if total is None:
            answer: Answer = "fail" if own > rule.most_flop else "unknown"
            return answer, f"at least {shown(own)} FLOP {what}; {why}"
        if total > rule.most_flop:
            return "fail", f"{shown(total)} FLOP {what}"
        line = self._correct(facts) if rule.scope == "run" else self._line(facts)
        if line != "pass":
            return "unknown", f"{shown(total)} FLOP {what} are stated; their correctness is {line}"
        return "pass", f"{shown(total)} FLOP {what}"

    def _lineage(self, facts: RunFacts) -> tuple[Fraction | None, str]:
        """Return the FLOP of a run and of all that it continues, or None and why that is not known."""
        total, seen = Fraction(0), set[str]()
        share = Fraction(1)
        while True:
            report = facts.report
            if report.run in seen:
                return None, "its lineage runs in a circle"
            seen.add(report.run)
            total += report.totals.flop * share
            lineage = report.precommit.lineage
            if lineage.kind == "initialised":
                return total, ""
            parent = self.by_root.get(lineage.parent or "")
            done = lineage.steps_done or 0
            if parent is None:
                return None, f"run {str(lineage.parent)[:16]}.., which it continues, was not shown"
            if not 0 <= done <= parent.report.steps:
                return None, f"it continues after {done} steps a run of {parent.report.steps}"
            share = Fraction(done, parent.report.steps)
            facts = parent

    def _line(self, facts: RunFacts) -> Answer:
        """Return the worst correctness in a lineage that ``_lineage`` has found to be whole."""
        found: list[Answer] = [self._correct(facts)]
        while (parent := self.by_root.get(facts.report.precommit.lineage.parent or "")) is not None:
            found.append(self._correct(parent))
            facts = parent
        return worst(found)

    def _data(self, rule: Data, facts: RunFacts) -> tuple[Answer, str]:
        if rule.unit == "record":
            return _records(rule, facts)
        used = _used(rule.unit, facts)
        if used is None:
            return "unknown", f"its {rule.unit} digests were not shown"
        if bad := sorted(used & rule.forbidden):
            return "fail", f"used {rule.unit} {bad[0][:16]}.., which is forbidden ({len(bad)} in all)"
        if lacks := sorted(rule.required - used):
            return (
                "fail",
                f"did not use {rule.unit} {lacks[0][:16]}.., which is required ({len(lacks)} in all)",
            )
        if rule.forbidden and facts.report.precommit.data is None:
            return "unknown", "its data were not committed before it began"
        return (
            "pass",
            f"{len(used)} different {rule.unit} digests, none forbidden, all required ones among them",
        )

    def _hyper(self, rule: HyperParameter, facts: RunFacts) -> tuple[Answer, str]:
        if facts.transcript is None:
            return "unknown", "its specification was not opened"
        values = _values(rule, facts.transcript)
        if not values:
            return "unknown", f"{rule.where} {rule.name} is not stated"
        for value in values:
            held = _listed(value, rule.bounds.one_of) if rule.bounds.one_of else _number(value)
            if problem := rule.bounds.problem(held):
                return "fail", f"{rule.where} {rule.name} {problem}"
        numbers = [held for value in values if isinstance(held := _number(value), Fraction)]
        if len(numbers) == len(values) > 1:
            said = f"lies from {shown(min(numbers))} to {shown(max(numbers))}"
        else:
            said = f"is {', '.join(values[:3])}{', ..' if len(values) > 3 else ''}"
        return "pass", f"{rule.where} {rule.name} {said}"

    def _evaluation(self, rule: Evaluation, facts: RunFacts) -> tuple[Answer, str]:
        final = facts.report.checkpoints[-1][1] if facts.report.checkpoints else ""
        answers: list[tuple[Answer, str]] = []
        for signer, result in self.dossier.results:
            bound = any(item.binding == "state" and item.digest == final for item in result.inputs)
            if signer not in rule.places or result.program != rule.program or not bound:
                continue
            value = result.value(rule.output)
            if result.outcome.status != COMPLETED or value is None:
                answers.append(("unknown", f"the neutral run gave no {rule.output}: {result.outcome.status}"))
            elif problem := rule.bounds.problem(value):
                answers.append(("fail", f"{rule.output} {problem}"))
            else:
                said = value if isinstance(value, str) else shown(value)
                answers.append(("pass", f"{rule.output} is {said}"))
        if not answers:
            return (
                "unknown",
                f"no place known to the rule ran program {rule.program[:16]}.. on its last state",
            )
        return min(answers, key=lambda each: ("fail", "unknown", "pass").index(each[0]))

    def _reporting(self, rule: Reporting, facts: RunFacts) -> tuple[Answer, str]:
        severities = {severity for number, severity in self._found(facts) if number == 102}
        if "violation" in severities:
            return "fail", "a chip of the run never logged its pre-commitment"
        if rule.data_precommitted and facts.report.precommit.data is None:
            return "fail", "its data were not committed before it began"
        if severities:
            return "unknown", "a chip of the run was not shown"
        matched = sum(
            each.run == facts.report.run for chip in self.dossier.findings.chips.values() for each in chip
        )
        if matched < rule.least_snapshots:
            return "fail", f"{matched} snapshots of it are matched, {rule.least_snapshots} are asked for"
        return (
            "pass",
            f"pre-committed on every chip of it ({len(facts.report.precommit.ranks)}), snapshots matched: {matched}",
        )

    def _found(self, facts: RunFacts) -> tuple[tuple[int, str], ...]:
        return self.dossier.findings.runs.get(facts.report.run, ("unknown", ()))[1]

    def _licence(self, rule: Licence, facts: RunFacts) -> tuple[Answer, str]:
        wanted = facts.report.precommit.digest().hex()
        held = [
            each
            for each in self.dossier.licences
            if each.precommit == wanted and each.licensor in rule.licensors
        ]
        if not held:
            return "fail", f"no licence for pre-commitment {wanted[:16]}.. was shown"
        most = max(each.most_flop for each in held)
        flop = facts.report.totals.flop
        text = f"{shown(Fraction(flop))} FLOP, licensed are {shown(Fraction(most))}"
        return ("pass" if flop <= most else "fail"), text

    def _mitigation(self, rule: Mitigation, facts: RunFacts) -> tuple[Answer, str]:
        if self._mitigates(rule, facts):
            return "pass", "is itself the mitigation of another"
        answers: list[tuple[Answer, str]] = []
        for other in self.dossier.runs:
            lineage = other.report.precommit.lineage
            if (lineage.parent, lineage.steps_done) != (facts.report.run, facts.report.steps):
                continue
            used = _used(rule.unit, other)
            if rule.required and (used is None or rule.required - used):
                found: Answer = "unknown" if used is None else "fail"
                answers.append((found, f"{other.name} does not use all data that the mitigation asks for"))
                continue
            answer, text = (
                ("pass", "") if rule.evaluation is None else self._evaluation(rule.evaluation, other)
            )
            if answer == "pass" and self._correct(other) != "pass":
                answer, text = "unknown", f"its own correctness is {self._correct(other)}"
            answers.append((answer, f"{other.name} continues its last state{': ' + text if text else ''}"))
        if not answers:
            return "fail", "no declared run continues its last state"
        return min(answers, key=lambda each: ("pass", "unknown", "fail").index(each[0]))

    def _mitigates(self, rule: Mitigation, facts: RunFacts) -> bool:
        """Whether a run goes on from another's last state on all data that the mitigation asks for."""
        lineage = facts.report.precommit.lineage
        parent = self.by_root.get(lineage.parent or "")
        if parent is None or lineage.steps_done != parent.report.steps:
            return False
        used = _used(rule.unit, facts)
        return not rule.required or (used is not None and not rule.required - used)

    # -- chips -------------------------------------------------------------------------------

    def _chips(self, rule: NoTraining) -> list[Observation]:
        shown_chips = self.dossier.findings.chips
        found: list[Observation] = []
        for ueid in sorted(rule.chips or shown_chips):
            name = f"chip {ueid[-8:]}"
            if ueid not in shown_chips:
                found.append(Observation(name, "unknown", "was not shown"))
                continue
            answer, text = _rest(shown_chips[ueid], rule.least_snapshots)
            found.append(Observation(name, answer, text))
        if not found:
            found.append(Observation("chips", "unknown", "none was shown"))
        return found


def _rest(snapshots: Sequence[SeenSnapshot], least: int) -> tuple[Answer, str]:
    """Return whether a chip held one and the same declared state in all its snapshots of memory."""
    if torn := [each.seq for each in snapshots if each.status == "torn"]:
        return "fail", f"snapshot {torn[0]} holds two states that follow each other"
    if strange := [each.seq for each in snapshots if each.status == "unexplained"]:
        return "fail", f"snapshot {strange[0]} belongs to no declared run"
    states = list(dict.fromkeys((each.run, each.steps_done) for each in snapshots if each.status == "exact"))
    if len(states) > 1:
        (one, at), (other, then) = states[:2]
        return "fail", f"held run {str(one)[:8]}.. after {at} steps, then {str(other)[:8]}.. after {then}"
    if doubtful := [each.seq for each in snapshots if each.status == "doubtful"]:
        return "unknown", f"snapshot {doubtful[0]} is claimed for a step that could not be repeated"
    count = sum(each.status == "exact" for each in snapshots)
    if count < least:
        return "unknown", f"{count} snapshots of memory, {least} are asked for"
    return "pass", f"the same state in all {count} snapshots of memory"


def _used(unit: Unit, facts: RunFacts) -> set[str] | None:
    """Return the digests of a run's batches, or of its data set; None if they were not shown."""
    if facts.transcript is None:
        return None
    if unit == "batch":
        return {record.batch for record in facts.transcript.records}
    stated = facts.transcript.specification.job.dataset_digest
    return None if stated is None else {stated}


def _records(rule: Data, facts: RunFacts) -> tuple[Answer, str]:
    """Return what the opened batches say of single records: one found is found, absence needs every step's batch."""
    opened, steps = facts.batches, facts.report.steps
    used = {record: step for step, batch in sorted(opened.items(), reverse=True) for record in batch.records}
    if bad := sorted(used.keys() & rule.forbidden):
        return (
            "fail",
            f"step {used[bad[0]]} used record {bad[0][:16]}.., which is forbidden ({len(bad)} in all)",
        )
    lacks = sorted(rule.required - used.keys())
    if rule.forbidden or lacks:
        wanted = f"record {lacks[0][:16]}.., which is required, was not found, and " if lacks else ""
        if len(opened) < steps:
            return "unknown", f"{wanted}the batches of {len(opened)} of {steps} steps were opened"
        for step, batch in sorted(opened.items()):
            if batch.form is None:
                return "unknown", f"{wanted}the batch of step {step} cannot be taken apart: {batch.problem}"
            if batch.form not in rule.forms:
                form = f"records of form {batch.form[:16]}.., for which the rule's digests were not made"
                return "unknown", f"{wanted}step {step} has {form}"
    if lacks:
        return "fail", f"did not use record {lacks[0][:16]}.., which is required ({len(lacks)} in all)"
    if rule.forbidden and facts.report.precommit.data is None:
        return "unknown", "its data were not committed before it began"
    return (
        "pass",
        f"{len(used)} different records in {len(opened)} batches, none forbidden, all required ones among them",
    )


def _values(rule: HyperParameter, transcript: Transcript) -> list[str]:
    """Return every value that the run states for a hyper-parameter, as texts, repeated ones once, in order."""
    specification = transcript.specification
    if rule.where == "setting":
        found = [specification.job.settings[rule.name]] if rule.name in specification.job.settings else []
    elif rule.where == "specification":
        stated: Mapping[str, object] = {
            "accumulation": specification.accumulation, "checkpoint_every": specification.checkpoint_every,
            "policy": specification.policy.name, "seed": specification.seed, "steps": specification.steps,
            "world_size": specification.world_size,
        }  # fmt: skip
        found = [str(stated[rule.name])]
    else:
        found = [
            str(value)
            for record in transcript.records
            for _, name, value in record.schedule
            if name == rule.name
        ]
    return list(dict.fromkeys(found))


def _listed(text: str, one_of: Sequence[str]) -> str:
    """Return the listed text that writes the same number as ``text`` does; ``text`` itself if there is none."""
    own = _number(text)
    if text in one_of or isinstance(own, str):
        return text
    return next((each for each in one_of if _number(each) == own), text)


def _number(text: str) -> Fraction | str:
    """Return the finite number that a text writes, decimal or as a hexadecimal float; any other text as it is."""
    try:
        value = float.fromhex(text) if "0x" in text else float(text)
    except (ValueError, OverflowError):
        return text
    return Fraction(value) if math.isfinite(value) else text


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
