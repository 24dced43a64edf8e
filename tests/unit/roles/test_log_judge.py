"""What a judge says of a log by itself; the trainer's own states may convict it all the same."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from tallystick.dispute.verdict import LogObjection
from tallystick.errors import Nondeterminism
from tallystick.execution.rounding.breaches import Violation
from tallystick.roles import log_judge
from tallystick.roles.log_judge import LogRuling, rule_on_log

BREACH = Violation("gradient site 1", -1, "floor 2**1000, the policy has 2**3", is_of_policy=True)


def ruled(patch: pytest.MonkeyPatch, step: Any, *, ends: bool = True, violations: Any = ()) -> LogRuling:
    """The ruling on a log under which ``step`` is what becomes of the step; noise may explain the data."""
    context = SimpleNamespace(
        violations=list(violations),
        doubts=set[str](),
        edges=set[str](),
        leaves_open=False,
        finish=lambda: None,
    )
    for name, other in {
        "load_state": lambda *_: None,
        "_doubting": lambda *_: context,
        "adopting": lambda *_: nullcontext(),
        "run_step": step,
    }.items():
        patch.setattr(log_judge, name, other)
    replay: Any = SimpleNamespace(
        session=None, job=None, ends_without=lambda *_: ends, may_be_noise=lambda _: True
    )
    transcript: Any = SimpleNamespace(record=lambda _: SimpleNamespace(batch="own"))
    return rule_on_log(lambda _: b"", transcript, replay, LogObjection("00" * 32, 3, "log", -1, "fails"), {})


@pytest.mark.parametrize("why", ["the step does not end here under this log", "loss is inf"])
@pytest.mark.parametrize(("ends", "loser"), [(True, "trainer"), (False, "none")])
def test_a_log_under_which_the_step_fails_is_its_writers_fault_if_it_ends_without(
    monkeypatch: pytest.MonkeyPatch, why: str, ends: bool, loser: str
) -> None:
    def fails(*_: object) -> None:
        raise Nondeterminism(f"step 3: {why}")

    assert ruled(monkeypatch, fails, ends=ends).ruling.loser == loser


@pytest.mark.parametrize(("violations", "loser"), [([BREACH], "trainer"), ([], "none")])
def test_data_that_noise_explains_excuse_no_breach_of_the_policy(
    monkeypatch: pytest.MonkeyPatch, violations: list[Violation], loser: str
) -> None:
    other = SimpleNamespace(batch="another")
    assert ruled(monkeypatch, lambda *_: other, violations=violations).ruling.loser == loser
