"""What a judge says of records and of a segment's middle by itself; the trainer's own states may convict it all the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tallystick.dispute.terms import Ruling
from tallystick.roles import step_judge
from tallystick.roles.findings import contradiction, other_state
from tallystick.roles.step_judge import StepFinding, StepJudge

NOBODY, TRAINER = Ruling("none", "nobody misstates it"), Ruling("trainer", "its loss is another")


@pytest.mark.parametrize(
    ("rulings", "step"),
    [([NOBODY, TRAINER], 1), ([None, NOBODY, TRAINER], 2), ([NOBODY, None, NOBODY], 0)],
)
def test_a_record_that_blames_nobody_hides_none_that_blames_somebody(
    monkeypatch: pytest.MonkeyPatch, rulings: list[Ruling | None], step: int
) -> None:
    def ruled(_: object, at: int) -> StepFinding | None:
        ruling, records = rulings[at], ("", "")
        return None if ruling is None else StepFinding(at, ruling, "fault", records)

    monkeypatch.setattr(StepJudge, "rule_on_records", ruled)
    judge: Any = object.__new__(StepJudge)
    assert judge._rule_on_any(range(len(rulings))).step == step


@pytest.mark.parametrize(("seen", "held"), [("judges", "the judge's own"), ("another", None)])
@pytest.mark.parametrize("is_claimed", [True, False])
def test_a_past_is_held_against_nobody_whose_records_have_another(
    monkeypatch: pytest.MonkeyPatch, seen: str, held: str | None, is_claimed: bool
) -> None:
    """The auditor's, whose machine may have rounded otherwise than the judge's; the trainer's where it alone is judged."""
    prints = {"judges": f"{7:016x}", "another": f"{8:016x}"}

    def records(of: str) -> SimpleNamespace:
        return SimpleNamespace(record=lambda _: SimpleNamespace(fingerprint=prints[of]))

    for name, other in {"load_state": lambda *_: None, "copied_state": lambda _: {}}.items():
        monkeypatch.setattr(step_judge, name, other)
    monkeypatch.setattr(step_judge, "hold", lambda _: "the judge's own")
    judge: Any = object.__new__(StepJudge)
    seat = SimpleNamespace(frame=lambda _: b"")
    judge.seats = {"trainer": seat, "auditor": seat} if is_claimed else {"trainer": seat}
    judge.transcript = records("judges" if is_claimed else seen)
    judge.auditors_transcript = records(seen if is_claimed else "another")
    judge.replay = SimpleNamespace(session=None, follow=lambda *_: (SimpleNamespace(fingerprint=7), None))
    assert judge._repeated(SimpleNamespace(entries={}), 0, 2) == held


@pytest.mark.parametrize("is_evidence", [True, False])
def test_what_bytes_show_convicts_though_something_else_is_false_too(
    monkeypatch: pytest.MonkeyPatch, is_evidence: bool
) -> None:
    """And then by bytes: processes of the judge's that make another thing of the job have no say."""
    first, shown = other_state(3, "own", "another"), contradiction(3, "a disk is gone", "its root")
    monkeypatch.setattr(step_judge, "find_noisy_sites", lambda *_: [])
    judge: Any = object.__new__(StepJudge)
    judge.seats, judge.replay, judge.by_bytes = {"trainer": None}, None, False
    judge.transcript = SimpleNamespace(record=lambda _: None)
    judge._faults = lambda *_: [first, shown] if is_evidence else [first]
    ruling = judge._rule_on_states(SimpleNamespace(agreed=3), SimpleNamespace(entries={}), b"", None)
    assert ruling == Ruling("trainer", str(shown if is_evidence else first))
    assert judge.by_bytes == is_evidence
