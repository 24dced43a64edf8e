"""Do the declared runs and the chips keep the rules? Each rule's answer and its evidence, and three claims apart; pure.

    verdict = judge_rules(rules, dossier)
    verdict.correct, verdict.complete, verdict.fleet          # pass, fail or unknown; unknown is never a pass

A declared run that was not found correct can break a rule (its owner says so itself) but never keep one. What the rules
say holds of declared runs; that these are all runs, the second claim says, and that no chip is missing, the third.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

from tallystick.fleet.compliance.dossier import Dossier, RunFacts
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
from tallystick.fleet.compliance.verdict import RuleObservation, RulesVerdict, RuleVerdict, worst
from tallystick.fleet.enclave.neutral import COMPLETED
from tallystick.fleet.provenance.owner_findings import SeenSnapshot
from tallystick.fleet.provenance.verification import Answer
from tallystick.run.transcript import Transcript


def judge_rules(rules: Rules, dossier: Dossier) -> RulesVerdict:
    """Return what the evidence says about the rules."""
    judge = _Judge(dossier)
    verdicts = tuple(judge.rule(rule) for rule in rules.rules)
    found = dossier.findings.verdict
    excluded = dict.fromkeys((*found.excluded, *(rule.excluded for rule in rules.rules)))
    return RulesVerdict(
        rules,
        found.owner,
        found.correct,
        found.complete,
        dossier.fleet.answer,
        f"L{found.assurance}",
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
                RuleObservation(f"run {root[:16]}..", "unknown", "was verified and not opened")
                for root in self.unopened
            ]
        return RuleVerdict(rule, worst(each.answer for each in found), tuple(found))

    # -- runs --------------------------------------------------------------------------------

    def _run(self, rule: Rule, facts: RunFacts) -> RuleObservation | None:
        """Return what a run says of a rule, or None where the rule is not about it."""
        if rule.above_flop is not None:
            total, why = self._lineage(facts)
            own = Fraction(facts.report.totals.flop)
            if total is None and own <= rule.above_flop:
                text = f"whether it is above {shown(rule.above_flop)} FLOP cannot be told: {why}"
                return RuleObservation(facts.name, "unknown", text)
            if total is not None and total <= rule.above_flop:
                if (claimed := self._line(facts)) == "pass":
                    return None
                text = f"{shown(total)} FLOP of lineage are stated, but their correctness is {claimed}"
                return RuleObservation(facts.name, "unknown", text)
        answer, text = self._ask(rule.body, facts)
        correct = self._correct(facts)
        if answer == "pass" and correct != "pass":
            answer = "unknown"
            text += f"; but the run's own correctness is {correct}"
        if answer == "pass" and facts.transcript is None:
            answer = "unknown"
            text += "; but its transcript was not shown, or is not what its report commits to"
        return RuleObservation(facts.name, answer, text)

    def _correct(self, facts: RunFacts) -> Answer:
        return self.dossier.findings.correctness_of(facts.report.run)

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
        severities = {
            each.severity for each in self.dossier.findings.findings_on(facts.report.run) if each.rule == 102
        }
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

    def _chips(self, rule: NoTraining) -> list[RuleObservation]:
        shown_chips = self.dossier.findings.chips
        found: list[RuleObservation] = []
        for ueid in sorted(rule.chips or shown_chips):
            name = f"chip {ueid[-8:]}"
            if ueid not in shown_chips:
                found.append(RuleObservation(name, "unknown", "was not shown"))
                continue
            answer, text = _rest(shown_chips[ueid], rule.least_snapshots)
            found.append(RuleObservation(name, answer, text))
        if not found:
            found.append(RuleObservation("chips", "unknown", "none was shown"))
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
