"""Rules as data: strict files, one answer a rule, three claims apart; what is unknown never passes."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tallystick.cli.main import main
from tallystick.commit.encoding import canonical_json, digest
from tallystick.errors import InvalidInput
from tallystick.fleet.agent.chip_log import NumberedFinding, Severity
from tallystick.fleet.attestation.assurance import Assurance
from tallystick.fleet.compliance.compliance import judge_rules
from tallystick.fleet.compliance.dossier import (
    Dossier,
    FleetAnswer,
    GrantedLicence,
    RunFacts,
    judge_fleet,
    licence_statement,
    read_licence,
)
from tallystick.fleet.compliance.rules import RULES_LIMIT, parse_rules
from tallystick.fleet.compliance.verdict import RulesVerdict
from tallystick.fleet.enclave.neutral import NeutralInput, scalar_output, verdict_output
from tallystick.fleet.enclave.neutral_result import NeutralOutcome, NeutralResult
from tallystick.fleet.inspection.inspection import InspectionResult, OrderedChip, WorkOrder
from tallystick.fleet.inspection.judging import ChipVerdict, InspectionVerdict
from tallystick.fleet.provenance.batch_opening import OpenedBatch
from tallystick.fleet.provenance.matcher import SnapshotMatch
from tallystick.fleet.provenance.owner_findings import (
    OwnerFindings,
    SeenSnapshot,
    SnapshotStatus,
    owner_findings,
)
from tallystick.fleet.provenance.transcripts import (
    Lineage,
    ReportOpening,
    RunReport,
    Totals,
    even_shards,
    make_precommit,
    make_report,
)
from tallystick.fleet.provenance.verification import Answer, ChipView, OwnerVerdict, RunVerdict
from tallystick.fleet.registry.facts import Chip
from tallystick.fleet.registry.reconcile import Disagreement
from tallystick.run.documents import JobRecord, PolicyRecord, SiteRecord, Specification, StepRecord
from tallystick.run.transcript import Transcript
from tallystick.signing.dsse import sign_statement
from tallystick.signing.keys import ed25519_key
from tallystick.store.keys import write_key

UEID = "01" * 17
PLACE, LICENSOR = "aa" * 32, "bb" * 32
PROGRAM = "cc" * 32
STEPS = 6
HEAD = 'format = "tallystick/rules/1"\nname = "test"\n'


def hexed(*parts: object) -> str:
    return digest("test/1", *(str(part).encode() for part in parts)).hex()


def rule(kind: str, **fields: object) -> str:
    lines = [f"{name} = {json.dumps(value)}" for name, value in {"id": "r", "kind": kind, **fields}.items()]
    return "\n".join(["[[rule]]", *lines, ""])


def transcript(name: str, settings: dict[str, str], dataset: str | None) -> Transcript:
    specification = Specification(
        job=JobRecord("job", hexed("job"), settings, dataset), policy=PolicyRecord("fp32", {}), seed=1, steps=STEPS,
        checkpoint_every=2, accumulation=1, world_size=1, initial_state=hexed(name, 0), versions={},
        sites=(SiteRecord("loss", "loss", (), "F32"),),
    )  # fmt: skip
    records = tuple(
        StepRecord(
            step=step, rank=0, micro_batches=1, batch=hexed("batch", name, step), log=hexed(name, "log", step),
            log_bytes=10, loss=None, schedule=((0, "lr", (0.1 / (step + 1)).hex()),), skipped=False,
            fingerprint="0" * 16, state_root=hexed(name, step + 1) if step % 2 else None,
        )
        for step in range(STEPS)
    )  # fmt: skip
    return Transcript(specification, records)


def run(
    name: str = "a",
    *,
    flop: int = 1000,
    after: tuple[RunFacts, int] | None = None,
    settings: dict[str, str] | None = None,
    dataset: str | None = None,
    data: bool = True,
) -> RunFacts:
    documents = transcript(name, {"width": "8"} if settings is None else settings, dataset)
    opening = ReportOpening(digest("secret", name.encode()), even_shards({"model/w": 10}, 1))
    lineage = Lineage("initialised") if after is None else Lineage("continued", after[0].report.run, after[1])
    batches = [record.batch for record in documents.records] if data else None
    precommit = make_precommit(
        documents.specification, opening, ranks=[UEID], lineage=lineage, batches=batches
    )
    return RunFacts(name, make_report(documents, opening, precommit, Totals(flop, 10, 10)), documents)


def seen(*states: tuple[SnapshotStatus, str | None, int | None]) -> tuple[SeenSnapshot, ...]:
    return tuple(SeenSnapshot(at + 2, *state) for at, state in enumerate(states))


def dossier(
    *runs: RunFacts,
    correct: Answer = "pass",
    complete: Answer = "pass",
    found: tuple[tuple[int, Severity], ...] = (),
    snapshots: tuple[SeenSnapshot, ...] | None = None,
    **more: object,
) -> Dossier:
    first = runs[0].report.run if runs else None
    shown = seen(("exact", first, 2), ("exact", first, 3)) if snapshots is None else snapshots
    noted = tuple(NumberedFinding(number, "x", None, "x", severity) for number, severity in found)
    verdicts = tuple(RunVerdict(each.report.run, correct, noted) for each in runs)
    verdict = OwnerVerdict("owner", correct, complete, "unknown", 1, verdicts, (), ("memory",))
    return Dossier(OwnerFindings(verdict, {UEID: shown}), runs, **more)  # pyright: ignore[reportArgumentType]


def with_verdicts(held: Dossier, *verdicts: RunVerdict) -> Dossier:
    verdict = replace(held.findings.verdict, runs=verdicts)
    return replace(held, findings=OwnerFindings(verdict, held.findings.chips))


def judged(text: str, held: Dossier) -> RulesVerdict:
    return judge_rules(parse_rules((HEAD + text).encode()), held)


def answer(text: str, held: Dossier) -> tuple[Answer, str]:
    verdict = judged(text, held)
    return verdict.kept, "; ".join(each.text for each in verdict.verdicts[0].observations)


# ------------------------------------------------------------------------------------------- one rule each


def test_compute_is_counted_per_run_and_per_lineage() -> None:
    parent = run("parent", flop=900)
    child = run("child", flop=500, after=(parent, 4))
    per_run, per_lineage = (rule("compute", scope=scope, most_flop=1000) for scope in ("run", "lineage"))
    assert answer(per_run, dossier(parent, child))[0] == "pass"
    # 500 FLOP of its own and 4 of the parent's 6 steps: 1100
    kept, text = answer(per_lineage, dossier(parent, child))
    assert (kept, "1100 FLOP of a 1000 FLOP limit per lineage" in text) == ("fail", True)
    assert answer(rule("compute", scope="lineage", most_flop=1100), dossier(parent, child))[0] == "pass"
    kept, text = answer(rule("compute", scope="lineage", most_flop=1100), dossier(child))
    assert (kept, "was not shown" in text) == ("unknown", True)
    assert (
        answer(rule("compute", scope="lineage", most_flop=499), dossier(child))[0] == "fail"
    )  # whatever its parent


def test_many_short_runs_do_not_slip_below_a_limit() -> None:
    runs = [run("0", flop=400)]
    for at in range(1, 4):
        runs.append(run(str(at), flop=400, after=(runs[-1], STEPS)))
    text = rule("compute", scope="lineage", most_flop=1500)
    verdict = judged(text, dossier(*runs))
    assert [each.answer for each in verdict.verdicts[0].observations] == ["pass", "pass", "pass", "fail"]
    assert (
        answer(rule("compute", scope="run", most_flop=1500), dossier(*runs))[0] == "pass"
    )  # what it would slip by


def test_a_lineage_in_a_circle_is_unknown() -> None:
    one = run("one")
    two = run("two", after=(one, 2))
    circle = replace(
        one.report, precommit=replace(one.report.precommit, lineage=Lineage("continued", two.report.run, 2))
    )
    held = dossier(replace(one, report=circle), two)
    assert answer(rule("compute", scope="lineage", most_flop=1e6), held)[0] == "unknown"


def test_a_run_that_continues_after_its_parents_end_has_no_known_lineage() -> None:
    parent = run("parent", flop=1)
    for after, expected in ((STEPS, "pass"), (STEPS + 1, "unknown")):
        child = run("child", flop=1, after=(parent, after))
        assert answer(rule("compute", scope="lineage", most_flop=1000), dossier(parent, child))[0] == expected


def test_forbidden_and_required_data_go_by_their_committed_digests() -> None:
    held = dossier(run("a", dataset=hexed("set")))
    used, other = hexed("batch", "a", 3), hexed("batch", "b", 3)
    assert answer(rule("data", forbidden=[other]), held)[0] == "pass"
    assert answer(rule("data", forbidden=[other, used]), held)[0] == "fail"
    assert answer(rule("data", required=[used]), held)[0] == "pass"
    assert answer(rule("data", required=[used, other]), held)[0] == "fail"
    assert answer(rule("data", unit="dataset", forbidden=[hexed("set")]), held)[0] == "fail"
    assert answer(rule("data", unit="dataset", required=[hexed("set")]), held)[0] == "pass"
    assert answer(rule("data", unit="dataset", forbidden=[other]), dossier(run("a")))[0] == "unknown"
    assert answer(rule("data", forbidden=[other]), dossier(run("a", data=False)))[0] == "unknown"
    unopened = replace(run("a"), transcript=None)
    assert answer(rule("data", forbidden=[other]), dossier(unopened))[0] == "unknown"


FORM = hexed("form")


def opened(name: str, count: int = STEPS, form: str | None = FORM) -> RunFacts:
    """A run whose first ``count`` batches were opened, of two records each."""
    batches = {
        step: OpenedBatch(
            hexed("batch", name, step),
            form,
            () if form is None else (hexed(name, step, 0), hexed(name, step, 1)),
            "odd",
        )
        for step in range(count)
    }
    return replace(run(name), batches=batches)


def of_records(**fields: object) -> str:
    return rule("data", unit="record", **{"forms": [FORM], **fields})


def test_a_forbidden_record_is_found_in_any_opened_batch_and_its_absence_needs_all_of_them() -> None:
    used, other = hexed("a", 3, 1), hexed("b", 3, 1)
    assert answer(of_records(forbidden=[other]), dossier(opened("a")))[0] == "pass"
    found, text = answer(of_records(forbidden=[other, used]), dossier(opened("a")))
    assert found == "fail" and "step 3 used record" in text
    assert answer(of_records(forbidden=[used]), dossier(opened("a", 4)))[0] == "fail"
    found, text = answer(of_records(forbidden=[used]), dossier(opened("a", 3)))
    assert found == "unknown" and "batches of 3 of 6 steps" in text
    assert answer(of_records(forbidden=[other]), dossier(run("a")))[0] == "unknown"


def test_a_required_record_is_there_once_or_is_known_to_be_missing() -> None:
    used, other = hexed("a", 3, 1), hexed("b", 3, 1)
    assert answer(of_records(required=[used]), dossier(opened("a", 4)))[0] == "pass"
    assert answer(of_records(required=[used]), dossier(opened("a", 3)))[0] == "unknown"
    assert answer(of_records(required=[used, other]), dossier(opened("a")))[0] == "fail"


def test_absence_in_another_form_or_in_what_cannot_be_taken_apart_says_nothing() -> None:
    other = hexed("b", 3, 1)
    for held in (opened("a", form=hexed("transposed")), opened("a", form=None)):
        for wanted in ({"forbidden": [other]}, {"required": [other]}):
            assert answer(of_records(**wanted), dossier(held))[0] == "unknown"
    found = answer(of_records(forbidden=[hexed("a", 3, 1)]), dossier(opened("a", form=hexed("transposed"))))
    assert found[0] == "fail"  # what is there is there, in any layout


def test_records_keep_a_rule_only_in_a_run_that_is_correct_open_and_committed_beforehand() -> None:
    text, whole = of_records(forbidden=[hexed("b", 3, 1)]), opened("a")
    assert answer(text, dossier(whole, correct="unknown"))[0] == "unknown"
    assert answer(text, dossier(replace(whole, transcript=None)))[0] == "unknown"
    late = replace(whole, report=run("a", data=False).report)
    assert answer(text, dossier(late))[0] == "unknown"
    verdict = judged(text, dossier(whole)).verdicts[0]
    assert "changed by one bit" in str(verdict.fields()["excluded"])
    assert "the batch of every step, opened under the report" in verdict.rule.needs


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"name": "lr", "where": "schedule", "most": 0.1}, "pass"),
        ({"name": "lr", "where": "schedule", "most": 0.09}, "fail"),
        ({"name": "lr", "where": "schedule", "least": 0.02}, "fail"),
        ({"name": "beta", "where": "schedule", "most": 1}, "unknown"),
        ({"name": "lr", "where": "schedule", "one_of": [str(0.1 / n) for n in range(1, 21)]}, "pass"),
        ({"name": "lr", "where": "schedule", "one_of": [str(0.1 / n) for n in range(2, 21)]}, "fail"),
        ({"name": "width", "where": "setting", "least": 8, "most": 8}, "pass"),
        ({"name": "width", "where": "setting", "most": 7.5}, "fail"),
        ({"name": "depth", "where": "setting", "most": 4}, "unknown"),
        ({"name": "policy", "where": "specification", "one_of": ["fp32", "fp64"]}, "pass"),
        ({"name": "policy", "where": "specification", "one_of": ["fp64"]}, "fail"),
        ({"name": "policy", "where": "specification", "most": 1}, "fail"),
        ({"name": "steps", "where": "specification", "most": 6}, "pass"),
    ],
)
def test_hyper_parameters_keep_their_bounds_in_every_step(fields: dict[str, object], expected: str) -> None:
    assert answer(rule("hyperparameter", **fields), dossier(run("a")))[0] == expected


def test_a_setting_that_would_take_for_ever_to_read_is_no_number() -> None:
    held = dossier(run("a", settings={"width": "1e999999999"}))
    assert answer(rule("hyperparameter", name="width", where="setting", most=1), held)[0] == "fail"


def neutral_result(
    facts: RunFacts, status: str = "completed", program: str = PROGRAM, at: int = -1
) -> NeutralResult:
    state = NeutralInput("state", "state", facts.report.checkpoints[at][1], "checkpoint/6")
    schema = (verdict_output("harmless"), scalar_output("score", 0.0, 1.0, 11))
    values = {"harmless": "pass", "score": 7} if status == "completed" else {}
    return NeutralResult("00" * 32, program, (state,), schema, NeutralOutcome(status, values), "", "")


EVALUATION = {"program": PROGRAM, "places": [PLACE]}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"output": "harmless", "one_of": ["pass"]}, "pass"),
        ({"output": "harmless", "one_of": ["fail"]}, "fail"),
        ({"output": "score", "least": 0.7}, "pass"),
        ({"output": "score", "most": 0.69}, "fail"),
        ({"output": "other", "most": 1}, "unknown"),
    ],
)
def test_an_evaluation_is_a_neutral_result_on_the_last_state(
    fields: dict[str, object], expected: str
) -> None:
    facts = run("a")
    text = rule("evaluation", **EVALUATION, **fields)
    assert answer(text, dossier(facts, results=((PLACE, neutral_result(facts)),)))[0] == expected


def test_an_evaluation_of_something_else_says_nothing() -> None:
    facts = run("a")
    text = rule("evaluation", **EVALUATION, output="score", least=0.5)
    for signer, result in (
        (LICENSOR, neutral_result(facts)),
        (PLACE, neutral_result(facts, program="dd" * 32)),
        (PLACE, neutral_result(facts, at=0)),
        (PLACE, neutral_result(run("b"))),
        (PLACE, neutral_result(facts, "time limit")),
    ):
        assert answer(text, dossier(facts, results=((signer, result),)))[0] == "unknown"
    worse = replace(
        neutral_result(facts), outcome=NeutralOutcome("completed", {"harmless": "pass", "score": 1})
    )
    both = ((PLACE, neutral_result(facts)), (PLACE, worse))
    assert answer(text, dossier(facts, results=both))[0] == "fail"  # the worst of two counts


def test_reporting_asks_for_commitments_beforehand_and_snapshots() -> None:
    text = rule("reporting", data_precommitted=True, least_snapshots=2)
    assert answer(text, dossier(run("a")))[0] == "pass"
    assert answer(text, dossier(run("a"), found=((102, "violation"),)))[0] == "fail"
    assert answer(text, dossier(run("a"), found=((102, "unknown"),)))[0] == "unknown"
    assert answer(text, dossier(run("a", data=False)))[0] == "fail"
    assert answer(text, dossier(run("a"), snapshots=()))[0] == "fail"


def test_a_licence_is_for_one_pre_commitment_and_so_many_flop() -> None:
    facts = run("a", flop=1000)
    wanted = facts.report.precommit.digest().hex()
    text = rule("licence", licensors=[LICENSOR])
    for licence, expected in (
        (GrantedLicence(wanted, LICENSOR, 1000), "pass"),
        (GrantedLicence(wanted, LICENSOR, 999), "fail"),
        (GrantedLicence(wanted, PLACE, 1000), "fail"),
        (GrantedLicence("00" * 32, LICENSOR, 1000), "fail"),
    ):
        assert answer(text, dossier(facts, licences=(licence,)))[0] == expected
    small = rule("licence", licensors=[LICENSOR], above_flop=1000)
    assert answer(small, dossier(facts))[0] == "pass"  # it concerns no run
    assert judged(small, dossier(facts)).verdicts[0].observations == ()


@pytest.mark.parametrize("correct", ["fail", "unknown"])
def test_a_threshold_spares_no_run_whose_flop_are_only_stated(correct: Answer) -> None:
    """Whoever states too little would be below every threshold."""
    small = rule("licence", licensors=[LICENSOR], above_flop=1000)
    assert answer(small, dossier(run("a", flop=1)))[0] == "pass"
    assert answer(small, dossier(run("a", flop=1), correct=correct))[0] == "unknown"
    parent = run("parent", flop=1)
    child = run("child", flop=1, after=(parent, STEPS))
    held = dossier(parent, child)
    stated = (RunVerdict(parent.report.run, correct, ()), RunVerdict(child.report.run, "pass", ()))
    doubted = with_verdicts(held, *stated)
    for text in (small, rule("compute", scope="lineage", most_flop=1000)):
        assert [each.answer for each in judged(text, held).verdicts[0].observations] in ([], ["pass"] * 2)
        found = judged(text, doubted).verdicts[0].observations
        assert [each.answer for each in found] == ["unknown", "unknown"]


def test_a_mitigation_continues_the_last_state_on_the_data_asked_for() -> None:
    base = run("base")
    good, early = run("good", after=(base, STEPS)), run("early", after=(base, 2))
    text = rule("mitigation", required=[hexed("batch", "good", 0)])
    assert answer(text, dossier(base, good))[0] == "pass"
    assert answer(text, dossier(base))[0] == "fail"
    assert answer(text, dossier(base, early))[0] == "fail"
    assert answer(rule("mitigation", required=[hexed("else")]), dossier(base, good))[0] == "fail"
    only = judged(rule("mitigation", required=[hexed("batch", "early", 0)]), dossier(base, early))
    assert [each.answer for each in only.verdicts[0].observations] == [
        "fail",
        "fail",
    ]  # early mitigates nothing
    evaluated = rule(
        "mitigation", required=[hexed("batch", "good", 0)], **EVALUATION, output="harmless", one_of=["pass"]
    )
    assert answer(evaluated, dossier(base, good))[0] == "unknown"
    assert answer(evaluated, dossier(base, good, results=((PLACE, neutral_result(base)),)))[0] == "unknown"
    assert answer(evaluated, dossier(base, good, results=((PLACE, neutral_result(good)),)))[0] == "pass"


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ([("exact", "r", 6), ("exact", "r", 6)], "pass"),
        ([("exact", "r", 6), ("exact", "r", 5)], "fail"),
        ([("exact", "r", 6), ("exact", "s", 6)], "fail"),
        ([("exact", "r", 6), ("torn", "r", 6), ("exact", "r", 6)], "fail"),
        ([("exact", "r", 6), ("unexplained", None, None), ("exact", "r", 6)], "fail"),
        ([("exact", "r", 6), ("doubtful", None, None), ("exact", "r", 6)], "unknown"),
        ([("exact", "r", 6), ("empty", None, None)], "unknown"),
        ([], "unknown"),
    ],
)
def test_a_chip_at_rest_holds_one_state(
    states: list[tuple[str, str | None, int | None]], expected: str
) -> None:
    assert answer(rule("no-training"), dossier(snapshots=seen(*states)))[0] == expected
    assert answer(rule("no-training", chips=["02" * 17]), dossier(snapshots=seen(*states)))[0] == "unknown"


# ---------------------------------------------------------------------------------------- answers and claims


def test_a_run_that_was_not_found_correct_keeps_no_rule_and_can_break_one() -> None:
    text = rule("compute", scope="run", most_flop=1000)
    for correct in ("fail", "unknown"):
        assert answer(text, dossier(run("a", flop=1000), correct=correct))[0] == "unknown"
        assert answer(text, dossier(run("a", flop=1001), correct=correct))[0] == "fail"


def test_runs_that_were_verified_and_not_opened_leave_rules_open() -> None:
    facts = run("a")
    held = dossier(facts)
    unopened = replace(held, runs=())
    assert answer(rule("compute", scope="run", most_flop=1e9), unopened)[0] == "unknown"
    assert answer(rule("compute", scope="run", most_flop=1e9), with_verdicts(held))[0] == "unknown"


@pytest.mark.parametrize("correct", ["pass", "fail", "unknown"])
@pytest.mark.parametrize("complete", ["pass", "fail", "unknown"])
@pytest.mark.parametrize("fleet", ["pass", "fail", "unknown"])
def test_claims_stay_apart_and_unknown_is_never_a_pass(
    correct: Answer, complete: Answer, fleet: Answer
) -> None:
    held = dossier(run("a"), correct=correct, complete=complete, fleet=FleetAnswer(fleet, ()))
    verdict = judged(rule("compute", scope="run", most_flop=1e9), held)
    assert (verdict.correct, verdict.complete, verdict.fleet) == (correct, complete, fleet)
    answers = {verdict.kept, correct, complete, fleet}
    expected = "fail" if "fail" in answers else "unknown" if "unknown" in answers else "pass"
    assert verdict.asked(("runs", "complete", "fleet")) == expected
    assert verdict.asked(("fleet",)) != "pass" or (verdict.kept, fleet) == ("pass", "pass")
    assert "memory" in verdict.excluded
    assert any("chips not shown" in each for each in verdict.excluded)


def chip(name: str, owner: str = "owner", status: str = "active") -> Chip:
    return Chip(name, "gx1", "fab", "SN", "", "", owner, owner, status, 0, 0, 1)


def inspected(passed: bool, ueid: str = UEID) -> InspectionVerdict:
    target = OrderedChip(ueid, "gx1", "SN", "", "", "owner")
    order = WorkOrder("ab" * 32, 1, bytes(32), 0, "watch", "owner", 1, 2, bytes(32), (), 0, (target,))
    found = ChipVerdict(target, "seen", () if passed else ("seal case is broken",), passed)
    return InspectionVerdict(order, InspectionResult(order.digest(), "watch", 2, (), ()), (found,))


def test_a_fleet_is_complete_only_with_registry_streams_and_inspection() -> None:
    there, good = [chip(UEID)], [inspected(True)]
    assert judge_fleet("owner", there, [UEID], [], good, [UEID]).answer == "pass"
    assert judge_fleet("owner", there, [UEID], [], good).answer == "unknown"  # nobody else's list names it
    assert judge_fleet("owner", [chip(UEID, status="lost")], [UEID], [], good, [UEID]).answer == "unknown"
    assert judge_fleet("owner", there, [UEID], None, good).answer == "unknown"
    assert judge_fleet("owner", there, [UEID], [], []).answer == "unknown"
    assert judge_fleet("owner", there, [UEID], [], [inspected(False)]).answer == "fail"
    assert judge_fleet("owner", there, [UEID, "02" * 17], [], good).answer == "fail"
    assert judge_fleet("owner", [*there, chip("02" * 17)], [UEID], [], good).answer == "fail"
    assert (
        judge_fleet("owner", [*there, chip("02" * 17, status="retired")], [UEID], [], good, [UEID]).answer
        == "pass"
    )
    assert judge_fleet("owner", [*there, chip("02" * 17, "other")], [UEID], [], good, [UEID]).answer == "pass"
    assert judge_fleet("owner", [chip(UEID, "other")], [UEID], [], good).answer == "fail"
    stray = Disagreement("unregistered", "02" * 17, "owner", "customs saw it")
    assert judge_fleet("owner", there, [UEID], [stray], good).answer == "fail"


def test_what_concerns_another_owner_neither_accuses_nor_clears() -> None:
    elsewhere, both = "02" * 17, [chip(UEID), chip("02" * 17, "other")]
    assert judge_fleet("owner", both, [UEID], [], [inspected(True)], [UEID]).answer == "pass"
    assert judge_fleet("owner", both, [UEID], [], [inspected(True, elsewhere)], [UEID]).answer == "unknown"
    either = [inspected(True), inspected(False, elsewhere)]
    assert judge_fleet("owner", both, [UEID], [], either, [UEID]).answer == "pass"
    theirs = Disagreement("missing", elsewhere, "other", "not in the list")
    assert judge_fleet("owner", both, [UEID], [theirs], [inspected(True)]).answer == "unknown"
    assert judge_fleet("other", both, [elsewhere], [theirs], [inspected(True, elsewhere)]).answer == "fail"


# ------------------------------------------------------------------------------------------------- files

GOOD = HEAD + rule("compute", scope="run", most_flop=1e25)
BAD: list[tuple[str, str]] = [
    ("", "field 'format' is missing"),
    ("x = ", "not TOML"),
    (GOOD.replace("rules/1", "rules/2"), "format must be"),
    (HEAD + "rule = []", "must have 1 to 1000 rules"),
    (GOOD + 'more = "x"\n', "field 'more' is unknown to kind compute"),
    ("extra = 1\n" + GOOD, "field 'extra' is unknown"),
    (GOOD.replace("compute", "computing"), "kind must be one of"),
    (GOOD.replace("1e+25", "nan"), "most_flop must be a finite number"),
    (GOOD.replace("1e+25", "-1"), "most_flop must not be negative"),
    (GOOD.replace("1e+25", '"1e25"'), "most_flop must be a finite number"),
    (GOOD.replace("1e+25", "true"), "most_flop must be a finite number"),
    (GOOD.replace("1e+25", "1e41"), "exceeds 1e40"),
    (GOOD.replace("1e+25", "1" + "0" * 60), "exceeds 1e40"),
    (GOOD.replace('"run"', '"chip"'), "scope must be one of run, lineage"),
    (GOOD + rule("no-training"), "two rules are called 'r'"),
    (GOOD.replace('"r"', '"a b"'), "id 'a b' must be"),
    (HEAD + rule("data"), "must forbid or require some data"),
    (HEAD + rule("data", forbidden=["00" * 31]), "must be 64 lower-case hexadecimal digits"),
    (HEAD + rule("data", forbidden=["00" * 32], required=["00" * 32]), "and not the same"),
    (HEAD + rule("data", forbidden=["00" * 32, "00" * 32]), "none twice"),
    (HEAD + rule("hyperparameter", name="lr", where="schedule"), "must have least or most, or else one_of"),
    (HEAD + rule("hyperparameter", name="lr", where="schedule", most=1, one_of=["x"]), "or else one_of"),
    (HEAD + rule("hyperparameter", name="lr", where="schedule", least=2, most=1), "least 2 is above most 1"),
    (HEAD + rule("hyperparameter", name="lr", where="specification", most=1), "name must be one of"),
    (
        HEAD + rule("evaluation", program=PROGRAM, output="x", places=[], least=1),
        "places must name at least one",
    ),
    (HEAD + rule("licence", licensors=[]), "licensors must name at least one"),
    (HEAD + rule("mitigation", required=[], output="x"), "field 'program' is missing"),
    (HEAD + rule("no-training", least_snapshots=1), "must be 2 or more"),
    (HEAD + rule("no-training", above_flop=1), "field 'above_flop' is unknown"),
    (HEAD + rule("reporting", least_snapshots=True), "must be a whole number"),
    (HEAD + "[[rule]]\nid = 'x'\nkind." + ".".join("a" * 3000) + " = 1\n", "nested deeper than 8"),
    (HEAD + "[[rule]]\nid = 'x'\nkind = " + "[" * 3000 + "]" * 3000 + "\n", "nested deeper"),
]


@pytest.mark.parametrize(("text", "reason"), BAD, ids=[reason for _, reason in BAD])
def test_a_file_with_one_fault_is_refused_by_name(text: str, reason: str) -> None:
    assert parse_rules(GOOD.encode()).rules[0].needs
    with pytest.raises(InvalidInput) as problem:
        parse_rules(text.encode())
    assert reason in str(problem.value)


def test_large_files_and_other_bytes_are_refused() -> None:
    with pytest.raises(InvalidInput, match="exceed the limit"):
        parse_rules(b"#" * (RULES_LIMIT + 1))
    with pytest.raises(InvalidInput, match="is not UTF-8"):
        parse_rules(b"\xff")
    assert parse_rules(GOOD.encode()).digest != parse_rules(GOOD.encode() + b"#").digest


@given(st.text(max_size=200))
def test_no_text_makes_anything_but_a_refusal(text: str) -> None:
    with pytest.raises(InvalidInput):
        parse_rules((HEAD + text).encode("utf-8", "surrogatepass"))


def test_a_licence_survives_signing_and_no_change() -> None:
    key = ed25519_key(bytes(32))
    statement = licence_statement(bytes(32), 10**25, "x")
    assert read_licence(statement, LICENSOR) == GrantedLicence("00" * 32, LICENSOR, 10**25)
    assert sign_statement(statement, key)
    for change in ({"mostFlop": "-1"}, {"mostFlop": "1e3"}, {"mostFlop": "9" * 50}, {"mostFlop": 3}):
        with pytest.raises(InvalidInput):
            read_licence(replace(statement, predicate=change), LICENSOR)
    with pytest.raises(InvalidInput, match="predicateType"):
        read_licence(replace(statement, predicate_type="x"), LICENSOR)


# ------------------------------------------------------------------------------------------ command line


def findings_of(report: RunReport) -> OwnerFindings:
    verdict = OwnerVerdict(
        "owner", "pass", "pass", "unknown", 1, (RunVerdict(report.run, "pass", ()),), (), ("memory",)
    )
    return OwnerFindings(verdict, {UEID: (SeenSnapshot(2, "exact", report.run, 2),)})


def test_findings_are_read_strictly() -> None:
    good = findings_of(run("a").report)
    assert OwnerFindings.parse(good.encode()) == good
    fields = good.fields()
    said = good.verdict.fields()
    changes: list[dict[str, object]] = [
        {"verdict": said | {"declared_run_correctness": "passed"}},
        {"verdict": said | {"runs": [{}]}},
        {"verdict": said | {"runs": [run.fields() for run in good.verdict.runs * 2]}},
        {"verdict": said | {"assurance": 1}},
        {"verdict": said | {"assurance": "L5"}},
        {"verdict": said | {"excluded": [1]}},
        {"verdict": said | {"verdict": "fail"}},
        {"chips": {UEID: [{"seq": 1}]}},
        {"format": "tallystick/owner-findings/2"},
    ]
    for change in changes:
        with pytest.raises(InvalidInput):
            OwnerFindings.parse(canonical_json(fields | change))
    with pytest.raises(InvalidInput, match="not the canonical encoding"):
        OwnerFindings.parse(good.encode() + b"\n")


def test_what_the_verification_writes_is_what_rules_read() -> None:
    root = "12" * 32
    match = SnapshotMatch("exact", 4, (), 0, 0, 10)
    view = ChipView(UEID, [], [], Assurance(0, ()), {2: (root, match), 3: None})
    finding = NumberedFinding(105, "segment", 0, "differs", "unknown")
    verdict = OwnerVerdict(
        "owner", "unknown", "pass", "unknown", 0, (RunVerdict(root, "unknown", (finding,)),), (), ("memory",)
    )
    found = OwnerFindings.parse(owner_findings(verdict, [view]).encode())
    assert (found.verdict, found.correctness_of(root)) == (verdict, "unknown")
    assert (found.findings_on(root), found.findings_on("34" * 32)) == ((finding,), ())
    assert found.chips == {
        UEID: (SeenSnapshot(2, "exact", root, 4), SeenSnapshot(3, "unexplained", None, None))
    }


def test_rules_are_judged_from_the_command_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    facts = run("a")
    assert facts.transcript is not None
    place = tmp_path / "owner" / "runs"
    (place / "a").mkdir(parents=True)
    documents = facts.transcript
    (place / "a" / "specification.json").write_bytes(documents.specification.encode())
    (place / "a" / "steps.jsonl").write_bytes(documents.encode_records())
    (place / "a" / "run.json").write_bytes(documents.statement().encode())
    (place / "a.report.json").write_bytes(facts.report.encode())
    opening = ReportOpening(digest("secret", b"a"), even_shards({"model/w": 10}, 1))
    (place / "a.opening.json").write_bytes(opening.encode())
    (place / "a.precommit.json").write_bytes(facts.report.precommit.encode())
    findings, rules = tmp_path / "findings.json", tmp_path / "rules.toml"
    findings.write_bytes(findings_of(facts.report).encode())
    write_key(tmp_path / "licensor", key := ed25519_key(b"\5" * 32))
    rules.write_text(
        HEAD
        + rule("compute", scope="lineage", most_flop=1000)
        + rule("licence", licensors=[key.public_key.key_id]).replace('"r"', '"licence"')
    )

    def tally(*arguments: object, code: int = 0) -> dict[str, object]:
        assert main(["rules", *map(str, arguments), "--json"]) == code
        return json.loads(capfd.readouterr().out)

    judge = ("judge", rules, findings, tmp_path / "owner")
    assert len(tally("show", rules)["list"]) == 2  # pyright: ignore[reportArgumentType]
    assert tally(*judge, code=1)["rules_kept"] == "fail"
    licence = (
        "licence",
        place / "a.precommit.json",
        "--key",
        tmp_path / "licensor",
        "--out",
        tmp_path / "licence",
    )
    tally(*licence, "--most-flop", "1e3")
    shown = (*judge, "--licence", tmp_path / "licence", "--known", tmp_path / "licensor.pub")
    assert tally(*shown, "--claim", "runs", "--claim", "complete")["verdict"] == "pass"
    found = tally(*shown, code=3)
    assert (found["fleet_completeness"], found["declared_run_correctness"]) == ("unknown", "pass")
    assert "is not signed by" in str(tally(*judge, "--licence", tmp_path / "licence", code=1)["error"])
    assert tally(*licence, "--most-flop", "1.5e25")["most_flop"] == "15" + "0" * 24  # not binary64's
    assert tally(*licence, "--most-flop", "1e40")["most_flop"] == "1" + "0" * 40
    for wrong in ("1e41", "-1", "1.5", "nan", "1_000", "1e-3", "0x10"):
        assert "must be a whole number up to 1e40" in str(
            tally(*licence, f"--most-flop={wrong}", code=2)["error"]
        )
    tally(*licence, "--most-flop", "999")
    assert tally(*shown, code=1)["rules_kept"] == "fail"
    assert "must be one of runs" in str(tally(*judge, "--claim", "all", code=2)["error"])
    assert "needs --owner" in str(tally(*judge, "--registry", tmp_path, code=2)["error"])
    assert main(["rules", *map(str, judge)]) == 1
    assert "fleet completeness         unknown" in capfd.readouterr().out
    # another report than the transcript's: nothing is opened, so nothing passes
    (place / "a.report.json").write_bytes(replace(facts.report, data="00" * 32).encode())
    tally(*licence, "--most-flop", "1e3")
    assert "not what its report commits to" in str(tally(*shown, "--claim", "runs", code=3))


def test_fractions_of_a_parent_are_exact() -> None:
    parent = run("parent", flop=10**19 + 1)
    child = run("child", flop=0, after=(parent, 3))
    most = Fraction(10**19 + 1, 2)
    assert answer(rule("compute", scope="lineage", most_flop=int(most)), dossier(child, parent))[0] == "fail"
    assert (
        answer(rule("compute", scope="lineage", most_flop=int(most) * 2 + 1), dossier(child, parent))[0]
        == "pass"
    )
