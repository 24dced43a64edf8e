from __future__ import annotations

import io
import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from rich.console import Console

from tallystick.dispute.operator_list import Operator
from tallystick.dispute.rulings import Accusation
from tallystick.dispute.verdict import LogObjection
from tallystick.evidence.verification import Check, Verification
from tallystick.execution.noise.freedom import Freedom
from tallystick.numerics.budget import most_moves
from tallystick.numerics.log import (
    Frame,
    Kind,
    SiteAddress,
    SparseEntries,
    encode,
    encode_decision,
    encode_frame,
)
from tallystick.reports.audit import AuditPage, ClaimPage
from tallystick.reports.dispute import dispute_page
from tallystick.reports.layout import counted, duration, printable, share
from tallystick.reports.run import RunSummary, read_run
from tallystick.reports.verification import verification_page
from tallystick.roles.initial_state import Beginning
from tallystick.roles.operator_dispute import Cost, OperatorResult
from tallystick.roles.referee import DisputeResult
from tallystick.run.documents import (
    UNANNOUNCED,
    JobRecord,
    Notes,
    PolicyRecord,
    SiteRecord,
    Specification,
    StepRecord,
)
from tallystick.store.files import RunDirectory, frame_digest

SPECIFICATION = Specification(
    job=JobRecord("tallystick.jobs.digits", "11" * 32, {"width": "8"}, None),
    policy=PolicyRecord("fp32", {"recalibrate_every": 100}),
    seed=7,
    steps=3,
    checkpoint_every=2,
    accumulation=1,
    world_size=1,
    initial_state="22" * 32,
    versions={"torch": "2.13.0"},
    sites=(
        SiteRecord("loss", "loss", (), "F32"),
        SiteRecord("gradient", "weight", (10, 10), "F32"),
        SiteRecord("gradient", "bias", (10,), "F32"),
        SiteRecord("state", "weight/parameter", (10, 10), "F32"),
    ),
    notes=Notes(lifted_casts=("aten::_to_copy in softmax",)),
)
FRAME = encode_frame(
    Frame.of(
        {
            SiteAddress(0, 0, Kind.GRADIENT, 0): encode(
                SparseEntries(100, 1, np.array([5, 9, 70]), np.array([0, 1, 1]))
            ),
            SiteAddress(0, 0, Kind.DECISION, 0): encode_decision(
                -30, SparseEntries(64, 2, np.array([1, 2]), np.array([3, 0]))
            ),
        }
    )
)


def step_record(step: int) -> StepRecord:
    root = "44" * 32 if SPECIFICATION.is_checkpoint(step) else None
    loss = (2.0 / (step + 1)).hex()
    return StepRecord(step, 0, 1, "33" * 32, frame_digest(FRAME), len(FRAME), loss, (), False, "55" * 8, root)


def written(path: Path, steps: int) -> RunDirectory:
    directory = RunDirectory(path)
    directory.create()
    directory.write_document(directory.specification_path, SPECIFICATION.encode())
    for step in range(steps):
        directory.append_step(step - step % 2, FRAME, step_record(step), durable=False)
    if steps == SPECIFICATION.steps:
        directory.write_document(directory.statement_path, directory.load_partial().statement().encode())
    return directory


def shown(page: object) -> str:
    file = io.StringIO()
    Console(file=file, width=80, markup=False, highlight=False).print(page)
    text = file.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    return text


def joined(page: object) -> str:
    return " ".join(shown(page).split())


# ------------------------------------------------------------------------------------------------ runs


def test_a_finished_run_has_its_roots_and_the_size_of_its_log_by_kind(tmp_path: Path) -> None:
    fields = read_run(written(tmp_path / "run", 3)).fields()

    assert (fields["finished"], fields["steps"], fields["parameters"]) == (True, 3, 110)
    assert fields["state_root"] == "44" * 32
    assert fields["log_bytes"] == 3 * len(FRAME)
    assert fields["log_bytes_per_step"] == len(FRAME)
    assert fields["log_bits_per_parameter_step"] == pytest.approx(8 * len(FRAME) / 110)
    kinds = fields["log_kinds"]
    assert isinstance(kinds, dict)
    assert kinds["gradient"]["entries"] == 9
    assert kinds["decision"] == {
        "bytes": kinds["decision"]["bytes"],
        "payloads": 3,
        "entries": 6,
        "residues": 0,
    }
    assert sum(kind["bytes"] for kind in kinds.values()) == fields["log_bytes"]
    assert fields["freedom_estimate"] == pytest.approx(2 * 9 / (3 * 211))
    assert json.dumps(fields)


def test_an_unfinished_run_says_so_and_has_no_root(tmp_path: Path) -> None:
    report = read_run(written(tmp_path / "run", 1))

    fields = report.fields()
    assert (fields["finished"], fields["steps"], fields["steps_ordered"], fields["root"]) == (
        False,
        1,
        3,
        None,
    )
    assert fields["state_root"] == SPECIFICATION.initial_state
    assert "not finished: 1 of 3 steps" in joined(report)
    assert "committed after 0 steps" in joined(report)
    directory = written(tmp_path / "unannounced", 1)
    document = replace(SPECIFICATION, steps=UNANNOUNCED).encode()
    directory.write_document(directory.specification_path, document)
    unannounced = read_run(directory)
    assert "not finished: 1 step " in joined(unannounced), "a script has not said how many"


def test_a_run_without_a_step_divides_nothing_by_zero(tmp_path: Path) -> None:
    report = read_run(written(tmp_path / "run", 0))

    assert report.fields()["log_bytes_per_step"] is None
    assert report.fields()["log_bits_per_parameter_step"] is None
    assert report.fields()["freedom_estimate"] is None
    assert "log empty" in joined(report)


def test_the_page_of_a_run_names_what_was_changed_in_the_job(tmp_path: Path) -> None:
    page = joined(read_run(written(tmp_path / "run", 3)))

    for part in (
        "width=8",
        "seed 7",
        "casts lifted aten::_to_copy in softmax",
        "2 in the first step",
        "torch 2.13.0",
    ):
        assert part in page


def test_a_log_of_other_bytes_is_a_note_and_no_failure(tmp_path: Path) -> None:
    directory = written(tmp_path / "run", 3)
    directory.log_path(2).write_bytes(FRAME[:-1] + b"\x7f")

    report = read_run(directory)

    assert report.log is None
    assert report.log_problem is not None
    assert "the log's digest is" in report.log_problem
    assert "not read" in joined(report)


def test_a_resumed_run_counts_what_was_recorded_now(tmp_path: Path) -> None:
    report = read_run(written(tmp_path / "run", 3), recorded_now=1, seconds={"step": 2.0})

    assert "recorded 1 step under policy fp32; the run has 3" in joined(report.summary())
    assert "step 2.0 s" in joined(report.summary())


# ---------------------------------------------------------------------------------------------- audits


@dataclass(frozen=True)
class Deviation:
    step: int
    kind: str
    subject: str
    element: int | None
    own: str
    stated: str


@dataclass
class Segment:
    start: int
    end: int
    verdict: str = "match"
    deviations: list[Deviation] = field(default_factory=list)
    differing_elements: int = 0
    elements: int = 100

    @property
    def first_step(self) -> int | None:
        return min((deviation.step for deviation in self.deviations), default=None)


def freedom() -> Freedom:
    return Freedom(
        near=5, elements=2000, moved=3, expected_moves=2.0, decisions_moved=2, decisions_far=1, expected_decisions=0.5,
        largest_steer=0.001, largest_move=0.0005, silenced_parameters=10, widest_band_ratio=2.0, choices=3,
        path=0.25, distance=50.0,
    )  # fmt: skip


@dataclass
class Phases:
    seconds: dict[str, float] = field(default_factory=lambda: {"step": 1.25, "load": 0.5})


@dataclass
class Report:
    """The audit's findings as the auditor hands them over."""

    verdict: str
    segments: list[Segment]
    first: Deviation | None = None
    directory: str = "/runs/one"
    profile: str = "sse4,threads=1"
    steps: int = 4
    differing_elements: int = 0
    freedom: Freedom = field(default_factory=freedom)
    environment: dict[str, tuple[str, str]] = field(default_factory=lambda: {"threads": ("1", "2")})
    phases: Phases = field(default_factory=Phases)
    sample: None = None
    beginning: Beginning | None = None


DEVIATION = Deviation(
    3, "mismatch", "step 3: gradient of head.weight", 1234, "0x1.8000000000000p+1", "0x1.0000000000000p+1"
)
WRONG = Report(
    "mismatch",
    [Segment(0, 2), Segment(2, 4, "mismatch", [DEVIATION, replace(DEVIATION, subject="loss")], 7)],
    DEVIATION,
    differing_elements=7,
)


@pytest.mark.parametrize(
    ("beginning", "said"),
    [
        (Beginning(1000, 0), None),
        (
            Beginning(1000, 20),
            "20 of 1,000 trained parameters begin with other bits than this machine draws",
        ),
        (Beginning(5, 0, ("a", "b", "c", "d")), "a, b, c, .. differ from them in their last bits"),
    ],
)
def test_what_nobody_compared_of_the_first_state_is_said(beginning: Beginning, said: str | None) -> None:
    page = AuditPage(Report("match", [Segment(0, 4)], beginning=beginning), 2.0)  # pyright: ignore[reportArgumentType]
    assert page.fields()["beginning"] == asdict(beginning)
    text = joined(page)
    assert ("beginning" in text, said is None or said in text) == (said is not None, True)


def test_a_match_has_no_first_step_and_says_what_was_free() -> None:
    page = AuditPage(Report("match", [Segment(0, 2), Segment(2, 4)]), 2.0)  # pyright: ignore[reportArgumentType]

    fields = page.fields()
    assert (fields["verdict"], fields["first_step"], fields["first"]) == ("match", None, None)
    assert fields["freedom"] == {
        "fraction": 0.0025, "elements": 2000, "near": 5, "moved": 3, "expected_moves": 2.0, "move_budget": most_moves(2.0),
        "decisions_moved": 2, "decisions_far": 1, "expected_decisions": 0.5, "decision_budget": most_moves(0.5),
        "largest_move": 0.0005, "largest_steer": 0.001, "fullest_step": 0.0, "fullest_gradient": 0.0, "path_steer": 0.005,
        "silenced_parameters": 10, "weighed_share": 0.0, "widest_band_ratio": 2.0, "choices": 3,
    }  # fmt: skip
    assert fields["environment"] == {"threads": {"own": "1", "trainer": "2"}}
    assert fields["seconds"] == {"step": 1.25, "load": 0.5, "total": 2.0}
    text = joined(page)
    for part in (
        "match: 4 steps repeated",
        "2 of 2 match",
        "0.25 % of 2,000",
        "the widest band is 2 times this machine's own",
        f"3 roundings by this log, of {most_moves(2.0)} that noise explains at most (2 expected), and 2 decisions, "
        f"1 of {most_moves(0.5)} farther than noise reaches",
        "0.05 % of a step's gradient by this log, 0.1 % within the budget",
        "the weights were led by 0.5 % of the distance trained",
        "10 parameters with a gradient that is nothing but noise",
        "threads 1 (trainer: 2)",
        "step 1.2 s, load 0.5 s",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("segments", "is_said"),
    [([(0, 2), (2, 4)], False), ([(0, 2)], False), ([(2, 4)], True), ([(0, 2), (4, 6)], True), ([], False)],
)
def test_an_audit_of_some_segments_says_that_it_does_not_bound_the_run(
    segments: list[tuple[int, int]], is_said: bool
) -> None:
    report = Report("match", [Segment(*segment) for segment in segments])
    text = joined(AuditPage(report, 2.0))  # pyright: ignore[reportArgumentType]
    assert ("only an audit of all steps bounds it" in text) == is_said


def test_a_mismatch_names_step_tensor_element_and_both_values() -> None:
    page = AuditPage(WRONG, 2.0)  # pyright: ignore[reportArgumentType]

    fields = page.fields()
    assert (fields["verdict"], fields["first_step"], fields["differing_elements"]) == ("mismatch", 3, 7)
    assert fields["first"] == {
        "step": 3, "kind": "mismatch", "subject": DEVIATION.subject, "element": 1234,
        "own": DEVIATION.own, "stated": DEVIATION.stated,
    }  # fmt: skip
    text = joined(page)
    for part in (
        "mismatch at step 3: gradient of head.weight",
        "step 3, gradient of head.weight, element 1,234",
        "here 0x1.8000000000000p+1 (3)",
        "trainer 0x1.0000000000000p+1 (2)",
        "2:4 mismatch from step 3 on, 7 elements differ at its end",
        "and 1 more deviation",
    ):
        assert part in text


def test_a_run_that_cannot_be_reproduced_accuses_nobody() -> None:
    deviation = Deviation(0, "cannot_reproduce", "dataset", None, "aa", "bb")
    report = Report("cannot_reproduce", [Segment(0, 4, "cannot_reproduce", [deviation])], deviation)

    text = joined(AuditPage(report, 1.0))  # pyright: ignore[reportArgumentType]

    assert "cannot reproduce at step 0: dataset (nothing is said about the trainer)" in text


def test_what_is_not_accepted_accuses_nobody_and_says_what_is_accepted() -> None:
    first = Deviation(3, "not_accepted", "roundings moved so far", None, "31 at most", "400")
    report = Report(
        "not_accepted",
        [Segment(0, 2), Segment(2, 4, "not_accepted", [first])],
        first,
        freedom=replace(freedom(), moved=400, path=1.0, distance=0.0),
    )
    page = AuditPage(report, 1.0)  # pyright: ignore[reportArgumentType]

    fields = page.fields()
    assert (fields["verdict"], fields["first_step"]) == ("not_accepted", 3)
    assert fields["first"] == {
        "step": 3, "kind": "not_accepted", "subject": "roundings moved so far", "element": None,
        "own": "31 at most", "stated": "400",
    }  # fmt: skip
    assert cast("dict[str, object]", fields["freedom"])["path_steer"] is None, (
        "no bound, and JSON has no infinity"
    )
    assert json.loads(json.dumps(fields, allow_nan=False)) == fields
    text = joined(page)
    for part in (
        "not accepted at step 3: roundings moved so far (every byte follows from the log; nobody is accused)",
        "1 of 2 match",
        "2:4 not accepted from step 3 on",
        f"400 roundings by this log, of {most_moves(2.0)} that noise explains at most",
        "accepted 31 at most found 400",
    ):
        assert part in text
    assert "mismatch" not in text


CLAIM = ClaimPage("/runs/one", "/runs/claim", "native", 6, None, 0, "ab" * 32, "ab" * 32, {"total": 1.0})


def test_a_claim_matches_only_if_the_roots_are_one_and_nothing_deviated() -> None:
    assert CLAIM.verdict == "match"
    assert replace(CLAIM, root="cd" * 32).verdict == "mismatch"
    assert replace(CLAIM, first_step=2).verdict == "mismatch"
    assert "tally dispute run /runs/one /runs/claim" in joined(replace(CLAIM, root="cd" * 32, first_step=2))
    assert "tally dispute" not in joined(CLAIM)
    objection = LogObjection("11" * 32, 2, "gradient of w", 5, "too far from a boundary")
    lying = joined(replace(CLAIM, first_step=2, objection=objection))
    assert "mismatch: first deviation at step 2" in lying
    assert "to the log of step 2, gradient of w, element 5: too far from a boundary" in lying
    assert "the roots differ; first deviation at step 2" in joined(
        replace(CLAIM, root="cd" * 32, first_step=2)
    )


# ----------------------------------------------------------------------------------- verdicts and proofs


RULING = DisputeResult(
    "trainer", 27, 7, {"checkpoints": 2, "steps": 5}, "step 27: the committed batch is not the job's",
    [("trainer", 30, "ab" * 32)],
)  # fmt: skip


def test_a_ruling_names_loser_step_and_rounds() -> None:
    page = dispute_page(RULING, "/runs/verdict.json")

    assert page.fields()["moves"] == [["trainer", 30, "ab" * 32]]
    assert (page.fields()["operator"], page.fields()["objection"]) == (None, None)
    text = joined(page)
    for part in (
        "the trainer loses at step 27",
        "7 rounds: 2 over checkpoints, 5 over steps",
        "verdict.json",
    ):
        assert part in text
    assert "operator" not in text


def test_a_ruling_on_an_operator_says_which_and_what_it_cost() -> None:
    op = Operator("aten::mm", "default", "hidden", "forward", 0, {}, (), ())
    cost = Cost(120, 4_000, 300, 90_000, 2_048, {"judge": 0.001})
    found = OperatorResult(
        "trainer", "element 3 is 23, must be 22", 7, 12, op, Accusation(0, 3), cost, step_seconds=0.5
    )
    page = dispute_page(replace(RULING, operator=found), "v", "/runs/dispute.json")

    fields = page.fields()["operator"]
    assert isinstance(fields, dict)
    assert (fields["index"], fields["element"], fields["fallback"]) == (12, [0, 3], None)
    assert fields["share_of_step"] == pytest.approx(0.002)
    text = joined(page)
    for part in ("12 of 120: aten::mm of hidden, forward", "2,048 B, 0.20% of a step's time", "dispute.json"):
        assert part in text


def test_a_ruling_on_the_whole_step_says_why_no_operator_was_judged() -> None:
    found = OperatorResult(
        None, "no operator lies outside its error bound", 0, None, None, None, Cost(9, 1, 1, 0, 0, {})
    )

    assert "judged instead: no operator lies outside its error bound" in joined(
        dispute_page(replace(RULING, operator=found), "v")
    )


def test_an_objection_to_a_log_is_part_of_the_answer() -> None:
    objection = LogObjection("11" * 32, 27, "gradient of w", 5, "too far from a boundary")
    fields = dispute_page(replace(RULING, objection=objection), "v").fields()["objection"]

    assert fields == objection.fields()


def test_a_dispute_about_nothing_has_no_loser() -> None:
    result = DisputeResult("none", None, 0, {}, "both sides reached the same state", outcome="agreement")

    text = joined(dispute_page(result, "v"))

    assert "nobody loses" in text
    assert "0 rounds" in text


def test_a_verification_says_what_it_does_not_show_whether_it_passed_or_not() -> None:
    passed = Verification("run /x", "that water is wet", [Check(1, "it parses", "passed", "2 records")])
    failed = replace(
        passed,
        verdict="mismatch",
        checks=[Check(1, "it parses", "failed", "root is ab, not cd"), Check(2, "it agrees")],
    )

    assert "consistent: run /x" in joined(verification_page(passed))
    text = joined(verification_page(failed))
    for part in ("does not fit together: check 1 failed", "root is ab, not cd", "it agrees: not reached"):
        assert part in text
    for page in (passed, failed):
        assert "This does not show that water is wet." in joined(verification_page(page))
    assert verification_page(failed).fields()["checks"] == [
        {"number": 1, "claim": "it parses", "outcome": "failed", "detail": "root is ab, not cd"},
        {"number": 2, "claim": "it agrees", "outcome": "not reached", "detail": ""},
    ]


# ---------------------------------------------------------------------------------------------- layout


def test_a_strangers_control_characters_are_escaped_and_markup_is_text(tmp_path: Path) -> None:
    assert printable("a\x1b[31mb\u202ec\n") == "a\\x1b[31mb\\u202ec\\n"
    assert printable("Zürich ±1") == "Zürich ±1"

    stated = replace(SPECIFICATION, job=JobRecord("[bold]x[/bold]\x1b[2J", "11" * 32, {}, None))
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    directory.write_document(directory.specification_path, stated.encode())
    assert "[bold]x[/bold]\\x1b[2J" in joined(read_run(directory))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (counted(1, "step"), "1 step"),
        (counted(0, "round"), "0 rounds"),
        (counted(1024, "step"), "1,024 steps"),
        (share(0.0), "0 %"),
        (share(0.00238), "0.238 %"),
        (duration({"a": 0.04, "b": 2.0}), "b 2.0 s, a 0.0 s"),
        (duration({}), "nothing was timed"),
    ],
)
def test_numbers_are_written_for_people(text: str, expected: str) -> None:
    assert text == expected


def test_reports_load_no_torch() -> None:
    import subprocess
    import sys

    names = "tallystick.reports." + ", tallystick.reports.".join(("audit", "dispute", "run", "verification"))
    code = f"import sys, {names}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_report_without_a_loss_shows_none() -> None:
    from tallystick.run.transcript import Transcript

    record = replace(step_record(0), loss=None)
    report = RunSummary("/x", Transcript(SPECIFICATION, (record,)), finished=False)

    assert report.fields()["loss"] is None
    assert "loss" not in joined(report)
