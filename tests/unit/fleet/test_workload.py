from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tallystick.errors import InvalidInput
from tallystick.fleet.sampling import workload
from tallystick.fleet.sampling.planner import PlanQuestion, Stratum, guaranteed_detection, guaranteed_shares
from tallystick.fleet.sampling.workload import DrawRound, Inspection, make_plan, parse_fleet, plan_next

H100 = 1e15 * 86400
CHINCHILLA = PlanQuestion(5.76e23, (Stratum("all", 10**5, H100),), 0.1, 365.0, 30.0, 0.9)
WORLD = PlanQuestion(9.9e24, (Stratum("all", 10**7, 3 * H100),), 0.1, 365.0, 30.0, 0.9)
FLEET = {
    "format": "tallystick/fleet/1",
    "strata": [
        {"name": "a", "chips": 500, "flop_per_chip_day": 8.64e19, "owner": "north"},
        {"name": "b", "chips": 500, "flop_per_chip_day": 86400000000000000000, "owner": "south", "exempt": False},
    ],
    "inspection": {"chips_per_inspector_year": 500, "cost_per_chip": 20, "cost_per_inspector_year": 1e5, "currency": "EUR"},
    "risks": {"spoof": 0.01, "tamper": 0.005},
    "losses_allowed": 3,
    "rounds": [{"stratum": "a", "chips": 500, "drawn": 6, "inspected": 4, "refused": 1, "unreached": 1, "lost": 0}],
}  # fmt: skip


def encoded(**changes: object) -> bytes:
    return json.dumps({**FLEET, **changes}).encode()


def test_the_worlds_plan_takes_232_inspectors_and_a_cost() -> None:
    plan = make_plan(WORLD, Inspection(cost_per_chip=100.0, cost_per_inspector_year=200_000.0))
    assert plan.published is not None
    assert plan.published.samples_per_year == 231_572
    assert plan.published.inspectors == 232
    assert plan.published.cost_per_year == 231_572 * 100.0 + 232 * 200_000.0
    assert make_plan(WORLD).published.cost_per_year is None  # type: ignore[union-attr]


def test_a_plan_carries_three_answers() -> None:
    plan = make_plan(CHINCHILLA)
    assert plan.published is not None
    assert plan.exact is not None
    assert plan.guaranteed is not None
    assert plan.published.samples_per_year == 13_267
    assert plan.exact.samples_per_period == (1014,)
    assert plan.guaranteed.samples_per_period == (1085,)
    assert plan.guaranteed.samples_per_year == math.ceil(365 * 1085 / 30)
    assert min(plan.exact.detection, plan.guaranteed.detection) >= 0.9
    assert plan.warnings == ()


def test_a_fleet_too_small_for_the_run_is_said_in_words() -> None:
    plan = make_plan(replace(CHINCHILLA, threshold_flop=1.27e26, strata=(Stratum("all", 1000, H100),)))
    assert (plan.published, plan.exact) == (None, None)
    assert plan.guaranteed is not None
    assert "does not fit the monitored chips in 365 days" in plan.warnings[0]


def test_warnings_name_what_weakens_a_plan() -> None:
    def warned(**changes: object) -> str:
        return " ".join(make_plan(replace(CHINCHILLA, **changes)).warnings)  # pyright: ignore[reportArgumentType]

    exempt = Stratum("schools", 1000, H100, exempt=True)
    assert "no sample finds it" in warned(strata=(*CHINCHILLA.strata, exempt))
    assert "inspecting every chip" in warned(threshold_flop=10 * H100)
    assert "Eq. 1 loses much to longer runs" in warned(threshold_flop=0.5 * 1e5 * H100 * 365)
    assert "shorter than a period" in warned(run_days=20.0)


def test_exempt_chips_and_missing_risks_stand_among_the_exclusions() -> None:
    exempt = Stratum("schools", 1, H100, exempt=True)
    words = " ".join(make_plan(replace(CHINCHILLA, strata=(*CHINCHILLA.strata, exempt))).exclusions)
    assert "1 exempt chips can do 3.154e+22 FLOP in 365 days" in words
    assert "no risk was stated" in words
    assert "no risk was stated" not in " ".join(make_plan(replace(CHINCHILLA, spoof=0.01)).exclusions)


def test_a_hundred_owners_audited_alone_cost_a_hundred_times_the_pool() -> None:
    strata = tuple(Stratum(f"s{n}", 10**5, H100, owner=f"o{n}") for n in range(100))
    plan = make_plan(PlanQuestion(1.27e26, strata, 0.1, 365.0, 30.0, 0.9))
    assert plan.published is not None
    assert (plan.published.samples_per_year, plan.audited_separately) == (6_017, 601_700)
    assert make_plan(CHINCHILLA).audited_separately is None


# --------------------------------------------------------------------------------------------- re-planning


def done(drawn: int, **changes: int) -> DrawRound:
    unseen = changes.get("refused", 0) + changes.get("unreached", 0)
    return DrawRound("all", changes.pop("chips", 10**5), drawn, drawn - unseen, **changes)


def test_full_rounds_leave_the_next_draw_as_it_was() -> None:
    (draw,) = plan_next(CHINCHILLA, [done(1085), done(1085)])
    assert (draw.samples, draw.catch_up, draw.failures, draw.lost) == (1085, 0, 0, 0)


def test_chips_not_reached_are_caught_up() -> None:
    (draw,) = plan_next(CHINCHILLA, [done(1085, unreached=300), done(1085)])
    assert draw.samples == draw.catch_up + 1085
    assert 290 <= draw.catch_up <= 300


def test_a_round_and_its_catch_up_find_as_much_as_one_full_round() -> None:
    (share,) = guaranteed_shares(CHINCHILLA) or ()
    (draw,) = plan_next(CHINCHILLA, [done(500)])
    missed = (1 - 500 / 10**5) * (1 - draw.samples / 10**5)  # of a chip drawn in neither
    assert missed <= (1 - share) ** 2
    assert (1 - 500 / 10**5) * (1 - (draw.samples - 1) / 10**5) > (1 - share) ** 2


def test_a_shortfall_is_caught_up_once() -> None:
    history = [done(500)]
    (first,) = plan_next(CHINCHILLA, history)
    (second,) = plan_next(CHINCHILLA, [*history, done(first.samples)])
    (before,) = plan_next(CHINCHILLA, [done(first.samples), *history])
    assert first.catch_up > 500
    assert second.catch_up == 0
    assert before.catch_up == first.catch_up  # what was drawn earlier knows nothing of a later period


def test_a_refusal_is_a_failure_and_not_a_smaller_sample() -> None:
    (draw,) = plan_next(CHINCHILLA, [done(1085, refused=300)])
    assert (draw.samples, draw.catch_up, draw.failures) == (1085, 0, 300)


def test_losses_within_the_allowance_change_nothing_and_beyond_it_raise_the_sample() -> None:
    question = replace(CHINCHILLA, losses_allowed=5)
    (share,) = guaranteed_shares(question) or ()
    full = math.ceil(share * 10**5)
    (within,) = plan_next(question, [done(full), done(full, lost=5)])
    (beyond,) = plan_next(question, [done(full), done(full, lost=6)])
    assert (within.samples, within.catch_up, within.lost) == (full, 0, 5)
    assert beyond.samples > full
    assert beyond.lost == 6


def test_later_losses_count_with_more_periods() -> None:
    (early,) = plan_next(CHINCHILLA, [done(1085, lost=20), done(1085)])
    (late,) = plan_next(CHINCHILLA, [done(1085), done(1085, lost=20)])
    assert early.samples < late.samples


def test_losses_that_could_hide_the_run_are_refused() -> None:
    with pytest.raises(InvalidInput, match="300 chips lost, with up to 300 periods of use, could hide a run"):
        plan_next(CHINCHILLA, [done(1085, lost=300)])


def test_rounds_of_strangers_and_sums_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(InvalidInput, match="no monitored stratum of that name"):
        plan_next(CHINCHILLA, [DrawRound("other", 10, 1, 1)])
    with pytest.raises(InvalidInput, match="must add up to 10 drawn"):
        DrawRound("all", 100, 10, 8, refused=1)
    with pytest.raises(InvalidInput, match="101 drawn, there were 100 chips"):
        DrawRound("all", 100, 101, 101)
    with pytest.raises(InvalidInput, match="must not be negative"):
        DrawRound("all", 100, 1, 2, refused=-1)


@given(st.lists(st.integers(0, 2000), min_size=1, max_size=6))
def test_a_catch_up_never_leaves_less_than_the_guarantee(drawn: list[int]) -> None:
    (share,) = guaranteed_shares(CHINCHILLA) or ()
    (draw,) = plan_next(CHINCHILLA, [done(n) for n in drawn])
    for start in range(len(drawn)):  # a chip that left a snapshot in every period since, in none before
        missed = math.prod(1 - n / 10**5 for n in drawn[start:]) * (1 - draw.samples / 10**5)
        assert missed <= (1 - share) ** (len(drawn) - start + 1) + 1e-12
        # one that left a snapshot in period `start` alone, and meets every draw since
        assert missed <= 1 - share
    assert guaranteed_detection(CHINCHILLA, [draw.samples]) >= 0.9


# -------------------------------------------------------------------------------------------- fleet file


def test_a_fleet_file_is_read_field_by_field() -> None:
    fleet = parse_fleet(encoded())
    assert [s.name for s in fleet.strata] == ["a", "b"]
    assert fleet.strata[1] == Stratum("b", 500, 8.64e19, "south")
    assert fleet.inspection == Inspection(500.0, 20.0, 1e5, "EUR")
    assert (fleet.risks.spoof, fleet.risks.tamper, fleet.losses_allowed) == (0.01, 0.005, 3)
    assert fleet.rounds == (DrawRound("a", 500, 6, 4, 1, 1, 0),)


def test_all_but_the_format_may_be_left_out() -> None:
    assert parse_fleet(b'{"format": "tallystick/fleet/1"}') == workload.FleetFile()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "fleet file: must be an object"),
        (b"{}", "field 'format' is missing"),
        (b'{"format": "tallystick/fleet/2"}', "format must be 'tallystick/fleet/1', is 'tallystick/fleet/2'"),
        (encoded(chips=4), "fleet file: field 'chips' is unknown"),
        (b'{"format": "x", "format": "x"}', "field 'format' stands twice"),
        (encoded(strata={}), "strata must be a list"),
        (encoded(strata=[4]), "strata[0]: must be an object"),
        (encoded(strata=[{"name": "a", "chips": 5}]), "strata[0]: field 'flop_per_chip_day' is missing"),
        (encoded(strata=[{"name": "a", "chips": 5.5, "flop_per_chip_day": 1}]), "chips must be a whole number, is 5.5"),
        (encoded(strata=[{"name": "a", "chips": True, "flop_per_chip_day": 1}]), "chips must be a whole number, is True"),
        (encoded(strata=[{"name": "a", "chips": 0, "flop_per_chip_day": 1}]), "chips 0: must be a whole number from 1"),
        (encoded(strata=[{"name": "a", "chips": 5, "flop_per_chip_day": "1"}]), "flop_per_chip_day must be a number"),
        (encoded(strata=[{"name": "a", "chips": 5, "flop_per_chip_day": 10**400}]), "exceeds binary64"),
        (encoded(strata=[{"name": "a", "chips": 5, "flop_per_chip_day": 1, "x": 1}]), "strata[0]: field 'x' is unknown"),
        (encoded(strata=[{"name": "a", "chips": 5, "flop_per_chip_day": 1, "exempt": 1}]), "exempt must be true or false"),
        (b'{"format": "tallystick/fleet/1", "risks": {"spoof": NaN}}', "NaN is no number"),
        (encoded(inspection={"chips_per_inspector_year": 0}), "chips per inspector-year 0.0: must be a positive number"),
        (encoded(inspection={"cost_per_chip": -1}), "cost per chip -1.0: must be a number, not negative"),
        (encoded(inspection={"cost": 1}), "inspection: field 'cost' is unknown"),
        (encoded(rounds=[{"stratum": "a", "chips": 5, "drawn": 2, "inspected": 1}]), "must add up to 2 drawn"),
        (b" " * (workload.LARGEST_FLEET_FILE + 1), "exceed the limit"),
    ],
    ids=range(24),
)  # fmt: skip
def test_other_documents_are_refused(data: bytes, reason: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        parse_fleet(data)
    assert reason in str(refused.value)


@given(st.binary(max_size=60) | st.text(alphabet='{}[]":,0123456789.eformatxNI', max_size=60).map(str.encode))
def test_nothing_but_invalid_input_leaves_the_parser(data: bytes) -> None:
    with pytest.raises(InvalidInput):
        parse_fleet(data)


# ------------------------------------------------------------------------------------------------ the page


def test_the_plan_page_shows_what_the_planner_gives() -> None:
    page = (Path(__file__).parents[3] / "spec" / "plan.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| (\d+) \| ([\d.]+) \| (\d+) \| (\d+) \| ([\d.]+) \| (\d+) \| ([\d.]+) \|$", page, re.MULTILINE
    )
    assert [int(row[0]) for row in rows] == [10**3, 10**5, 10**7]
    for row in rows:
        plan = make_plan(replace(CHINCHILLA, strata=(Stratum("all", int(row[0]), H100),)))
        assert plan.published is not None
        assert plan.exact is not None
        assert plan.guaranteed is not None
        assert row == (
            f"{plan.question.chips}",
            f"{plan.published.samples_per_period[0]:.3f}",
            f"{plan.published.samples_per_year}",
            f"{plan.exact.samples_per_period[0]}",
            f"{plan.exact.detection:.4f}",
            f"{plan.guaranteed.samples_per_period[0]}",
            f"{plan.guaranteed.detection:.4f}",
        )
