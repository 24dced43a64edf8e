"""What a dispute took is added up as parties on machines of their own would wait for each other."""

from __future__ import annotations

import pytest

from tallystick.roles.costs import Ledger, Spent
from tallystick_bench.spending import beyond_segment, ledger_fields, step_of


def test_what_both_do_at_once_counts_once_and_turns_add_up() -> None:
    ledger = Ledger(steps=[Spent(2.0, 4.0), Spent(1.0, 2.0), Spent(9.0, 9.0)])
    ledger.spent = {
        ("trainer", "load"): Spent(50.0, 50.0),
        ("trainer", "segment"): Spent(50.0, 50.0),
        ("trainer", "traced"): Spent(5.0, 9.0),
        ("trainer", "roots"): Spent(1.0, 2.0),
        ("trainer", "list"): Spent(0.25, 0.5),
        ("auditor", "segment"): Spent(70.0, 70.0),
        ("auditor", "traced"): Spent(4.0, 10.0),
        ("auditor", "examination"): Spent(3.0, 5.0),
        ("judge", "ruling"): Spent(0.5, 0.25),
    }

    assert step_of(ledger) == Spent(2.0, 4.0)
    # traced and roots, less the step that belongs to the segment: 4 s of the trainer, 2 s of the auditor
    assert beyond_segment(ledger) == Spent(4.0 + 0.25 + 3.0 + 0.5, 7.0 + 0.5 + 5.0 + 0.25)
    assert ledger.of("trainer") == Spent(106.25, 111.5)
    assert ledger.of("judge", "moves") == Spent()


def test_a_step_that_was_traced_apart_from_the_segment_counts_in_full() -> None:
    ledger = Ledger(steps=[Spent(1.0, 1.0)])
    ledger.spent = {("trainer", "list"): Spent(3.0, 3.0), ("auditor", "examination"): Spent(2.0, 2.0)}

    assert beyond_segment(ledger) == Spent(5.0, 5.0)


def test_time_is_charged_though_the_work_fails() -> None:
    ledger = Ledger()
    with pytest.raises(ValueError, match="no"), ledger.charging("judge", "ruling"):
        raise ValueError("no")

    assert set(ledger.spent) == {("judge", "ruling")}
    assert ledger_fields(ledger)["judge"]["ruling"]["wall"] >= 0.0
