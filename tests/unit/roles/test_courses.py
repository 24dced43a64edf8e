"""What other arithmetics come to decides whether anybody is accused over a program: by cases."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from tallystick.commit.state import Entry
from tallystick.execution.noise.freedom import Freedom
from tallystick.roles.audit_report import About, AuditReport, Deviation, SegmentResult, VerdictName
from tallystick.roles.courses import Moved, ProgramCourse, find_doubt, have_moved_otherwise, moved_between
from tallystick.roles.initial_state import Beginning
from tallystick.roles.run_writer import Phases

STATED = 2.0
RATE = "hyper-parameter lr of group 0"
HERE = {"w": {str(k): 1.0 for k in range(32)}}
ELSEWHERE = {"w": {str(k): 1.5 for k in range(32)}}


def differing(
    step: int, about: About, own: object, stated: object = STATED, kind: VerdictName = "mismatch"
) -> Deviation:
    subjects = {"data": "batch digest", "schedule": RATE, "loss": "loss", "fingerprint": "state fingerprint"}
    here, there = (value.hex() if isinstance(value, float) else str(value) for value in (own, stated))
    return Deviation(step, kind, subjects.get(about, "gradient of w"), None, here, there, about)


def course(*found: Deviation, moved: Moved | None = None) -> ProgramCourse:
    return ProgramCourse(0, found, HERE if moved is None else moved)


def loss(step: int, own: float, stated: float = STATED) -> Deviation:
    return differing(step, "loss", own, stated)


def log(step: int) -> Deviation:
    return differing(step, "log", "3 of 3 entries", "that the log is honest", "log_violation")


NEAR = 1.0 + 2.0**-20
GARBAGE = differing(0, "data", "aa", "garbage")
ROUNDED = differing(0, "data", "bb", "garbage")


@pytest.mark.parametrize(
    ("own", "others", "is_doubted"),
    [
        ([loss(1, 1.0)], [[]], True),  # two validation losses tie here, and not there
        ([loss(1, 1.0)], [[loss(1, 1.7)]], True),  # a factor made of chaos is another one everywhere
        ([loss(1, 1.0)], [[loss(1, NEAR)]], False),  # it is the trainer's
        ([loss(1, 1.0), loss(5, 1.0)], [[loss(1, 1.7), loss(5, NEAR)]], True),  # carried on by what it was
        ([loss(1, 1.0), log(1)], [[loss(1, NEAR), log(1)]], False),
        ([log(1)], [[]], True),
        ([log(1)], [[log(1)]], False),
        ([log(3)], [[log(1)], [log(3)]], False),  # noise in one of them is not the cause here
        ([log(1)], [[log(3)], [log(3)]], False),
        ([log(1)], [[log(3)], [log(2)]], True),
        ([GARBAGE], [[GARBAGE]], False),
        ([GARBAGE], [[ROUNDED]], True),
        ([GARBAGE, loss(0, 1.9)], [[ROUNDED, loss(0, 1.9)]], True),
        ([GARBAGE, loss(3, 1.0)], [[ROUNDED, loss(3, NEAR)]], False),  # one digest hides no loss
        ([GARBAGE, differing(3, "schedule", 0.1)], [[ROUNDED, differing(3, "schedule", 0.1)]], False),
        ([GARBAGE, differing(3, "schedule", 0.1)], [[ROUNDED, differing(3, "schedule", 0.3)]], True),
        ([GARBAGE, differing(3, "schedule", 0.1)], [[ROUNDED]], True),
        (
            [GARBAGE, loss(0, 1.9), differing(3, "schedule", 0.1)],  # a rate that follows losses down
            [[ROUNDED, loss(0, 2.1), differing(3, "schedule", 0.1)]],
            True,
        ),
        ([differing(2, "schedule", 0.1)], [[differing(2, "schedule", 0.1 + 2.0**-50)]], False),
        ([differing(2, "schedule", "True", "False")], [[differing(2, "schedule", "True", "False")]], False),
        ([differing(2, "schedule", "True", "False")], [[log(2)]], True),
        ([GARBAGE, differing(4, "policy", "1", "2")], [[ROUNDED]], False),
        ([loss(1, math.nan, 1.0)], [[loss(1, 2.0, 1.0)]], True),
        ([loss(1, 1.0, math.nan)], [[loss(1, 1.0, math.nan)]], False),
    ],
)
def test_what_arithmetics_do_not_have_in_common_accuses_nobody(
    own: list[Deviation], others: list[list[Deviation]], is_doubted: bool
) -> None:
    found = find_doubt(course(*own), {f"other {n}": course(*each) for n, each in enumerate(others)})
    assert (found is not None) == is_doubted
    if found is not None:
        assert found.kind == "cannot_reproduce" and found.own.endswith("it depends on the arithmetic")


def test_a_log_that_deviates_of_a_loss_is_no_loss() -> None:
    site = Deviation(1, "log_violation", "loss", None, "scale 2**1", "that the log is honest", "log")
    own, other = ProgramCourse(0, [loss(1, 1.0), site], HERE), ProgramCourse(0, [loss(1, 1.0)], HERE)
    assert find_doubt(own, {"other": other}) is None


def test_further_arithmetics_are_asked_before_anything_is_said_of_a_single_one() -> None:
    own, others = course(log(3)), {"other": course(log(1))}
    assert find_doubt(own, others, is_whole=False) is None
    assert find_doubt(course(log(1)), {"other": course(log(3))}, is_whole=False) is None
    assert find_doubt(own, others) is not None


def test_a_step_that_leads_elsewhere_is_told_from_single_roundings() -> None:
    assert find_doubt(course(log(1)), {"other": course(log(1), moved=ELSEWHERE)}) is not None
    rounded = {"w": {**HERE["w"], "3": 1.0 + 2.0**-12, "30": 1.0 - 2.0**-12}}
    assert not have_moved_otherwise(HERE, rounded)
    few = {f"b{k}": {"0": 1.0} for k in range(4)}
    assert not have_moved_otherwise(few, {**few, "b1": {"0": 2.0}})
    assert have_moved_otherwise(few, {name: {"0": 2.0} for name in few})
    assert not have_moved_otherwise(HERE, few)


def test_what_hardly_more_than_noise_moves_is_left_out() -> None:
    def entry(name: str, *values: float) -> Entry:
        return Entry(name, "F32", (len(values),), np.array(values, dtype="<f4").tobytes())

    def entries(*found: Entry) -> dict[str, Entry]:
        return {each.name: each for each in found}

    before = entries(entry("model/w", 1.0, 2.0), entry("model/b", 0.0, 0.0), entry("model/still", 1.0))
    after = entries(
        entry("model/w", 1.5, 2.0), entry("model/b", 0.25, 0.5), entry("model/still", 1.0),
        entry("optimizer/w/exp_avg", 0.5, 0.0), entry("optimizer/b/exp_avg", 2.0**-20, 2.0**-21),
        Entry("optimizer/w/count", "I64", (1,), bytes(8)),
    )  # fmt: skip
    found = moved_between(before, after, quiet=2.0**-15)
    assert found == {"model/w": {"0": 1.5}, "optimizer/w/exp_avg": {"0": 0.5}}
    still = moved_between(before, before, quiet=2.0**-15)
    assert set(still) == {"model/w", "model/b", "model/still"}


def test_a_course_is_what_accuses_in_a_segment_and_the_same_as_another_up_to_its_first_step() -> None:
    noise = differing(0, "noise", "1", "2", "cannot_reproduce")
    found = ProgramCourse.of(SegmentResult(0, 4, "mismatch", [noise, loss(1, 1.0)]), HERE)
    assert [each.about for each in found.deviations] == ["loss"]
    assert course().first == math.inf
    assert found.is_as(course(loss(1, 1.0), loss(2, 3.0)))
    for other in (
        course(loss(1, 1.5)),
        course(loss(2, 1.0)),
        course(loss(1, 1.0), moved=ELSEWHERE),
        course(),
    ):
        assert not found.is_as(other)


def test_a_report_is_the_same_read_by_another_process() -> None:
    """With infinities; of the freedom all numbers that are shown, and none of the sums that they come of."""
    freedom = Freedom(near=3, elements=7, moved=2, expected_moves=0.5, largest_steer=math.inf, path=2.0)
    beginning = Beginning(10, 4, ("model/a",), None, ("model/b",), 1)
    segments = [SegmentResult(0, 4, "mismatch", [loss(1, 1.0)], 3, 9), SegmentResult(4, 8)]
    report = AuditReport(
        "run",
        "avx2",
        "ab" * 32,
        segments,
        freedom,
        {"threads": ("1", "2")},
        Phases({"step": 1.5}),
        None,
        beginning,
    )
    again = AuditReport.parse(json.loads(json.dumps(report.document())), None)
    assert again == report
    assert again.freedom.fields() == freedom.fields()
    freedom.near = np.int64(5)  # pyright: ignore[reportAttributeAccessIssue]  (a sum that numpy has made)
    assert AuditReport.parse(json.loads(json.dumps(report.document())), None).freedom.near == 5
    assert AuditReport.parse(AuditReport("run", "native", "").document(), None).beginning is None
