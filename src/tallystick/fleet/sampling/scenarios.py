"""The evaders that the simulator plays against the planner, each with the detection that the planner claims for it.

One function a scenario, named after it; spec/simulation.md section 2 says the same in a table. H100-class chips at 10**15
FLOP a second, f = 0.1, T = 365, T_m = 30 and p = 0.9 unless a scenario says otherwise.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TypeVar

from tallystick.errors import InvalidInput
from tallystick.fleet.sampling.exact import exact_miss
from tallystick.fleet.sampling.planner import (
    PlanQuestion,
    Stratum,
    draw_size,
    guaranteed_detection,
    guaranteed_shares,
    published_samples,
)
from tallystick.fleet.sampling.simulate import AT_LEAST, EQUAL, LIMIT, Evasion, Scenario, Use
from tallystick.fleet.sampling.workload import DrawRound, plan_next

H100 = 1e15 * 86400.0  # FLOP a day, 16 bit
CHINCHILLA, PALM = 5.76e23, 2.56e24  # FLOP, Shavit 2023 table 1
RATE, YEAR, PERIOD, WANTED = 0.1, 365.0, 30.0, 0.9
_T = TypeVar("_T")
COVERAGE_ALARM = 1e-5  # of one log; a thousand logs a year then raise one false alarm in a century


def all_scenarios() -> tuple[Scenario, ...]:
    """Return every scenario, in the order of the report."""
    return (
        published_plan_of_a_small_fleet(),
        published_plan_of_a_large_fleet(),
        guaranteed_plan_of_a_year(),
        short_run_across_two_periods(),
        run_of_ten_days(),
        run_of_three_years(),
        chips_used_by_turns(),
        mixed_fleet_fast_chips(),
        mixed_fleet_slow_chips(),
        mixed_fleet_drawn_by_chip(),
        owners_in_one_pool(),
        owners_audited_apart(),
        exempt_chips_declared(),
        exempt_chips_forgotten(),
        chips_outside_the_list(),
        half_the_snapshots_suppressed(),
        all_snapshots_suppressed(),
        chips_lost_with_their_snapshots(),
        rounds_not_reached_and_caught_up(),
        spoofs_within_the_budget(),
    )


def find_scenarios(names: list[str]) -> tuple[Scenario, ...]:
    """Return the scenarios of these names, all for none.

    Raises:
        InvalidInput: an unknown name.
    """
    known = {scenario.name: scenario for scenario in all_scenarios()}
    for name in names:
        if name not in known:
            raise InvalidInput(f"scenario {name}: unknown; known are {', '.join(known)}")
    return tuple(known[name] for name in names) if names else tuple(known.values())


# ---------------------------------------------------------------------------------------------- as planned


def published_plan_of_a_small_fleet() -> Scenario:
    """Eq. 1 rounded up, and what it exactly finds."""
    question = _ask(CHINCHILLA, 1000)
    samples = math.ceil(_must(published_samples(question)))
    return _year_run("eq1-small", "Eq. 1 rounded up, 1,000 chips, a run of a year", question, samples)


def published_plan_of_a_large_fleet() -> Scenario:
    """Eq. 1 on a hundred thousand chips."""
    question = _ask(PALM, 100_000)
    samples = math.ceil(_must(published_samples(question)))
    return _year_run("eq1-large", "Eq. 1 rounded up, 100,000 chips, a run of a year", question, samples)


def guaranteed_plan_of_a_year() -> Scenario:
    """The guaranteed plan against the run length that it was asked about."""
    question = _ask(PALM, 20_000)
    return _guaranteed("guaranteed-year", "guaranteed plan, a run of a year", question, _uses(question, YEAR))


def short_run_across_two_periods() -> Scenario:
    """A run of one period's length that begins in the middle of one."""
    question = _ask(PALM, 20_000)
    uses = _uses(question, 30.0, start=15.0)
    return _guaranteed(
        "short-run", "a run of 30 days on twelve times the chips, from mid-period", question, uses
    )


def run_of_ten_days() -> Scenario:
    """A run shorter than a period, just before an inspection: few chips hold a snapshot, and many were used."""
    question = _ask(CHINCHILLA, 2_000)
    uses = _uses(question, 10.0, start=20.0)
    return _guaranteed("very-short-run", "a run of 10 days on a third of the fleet", question, uses)


def run_of_three_years() -> Scenario:
    """A run three times as long on a third of the chips."""
    question = _ask(PALM, 20_000)
    return _guaranteed(
        "long-run", "a run of three years on a third of the chips", question, _uses(question, 3 * YEAR)
    )


def chips_used_by_turns() -> Scenario:
    """A new set of chips in every period, so that no log grows."""
    question = _ask(CHINCHILLA, 2_000)
    each = question.visible_flop / (12 * PERIOD * H100)
    uses = tuple(
        use for turn in range(12) for use in _whole_and_part(0, each, turn * PERIOD, (turn + 1) * PERIOD)
    )
    return _guaranteed("by-turns", "other chips in every period", question, uses)


# ------------------------------------------------------------------------------------------- mixed fleets


def mixed_fleet_fast_chips() -> Scenario:
    """The evader uses the fastest chips only."""
    question = _mixed()
    uses = _whole_and_part(0, question.visible_flop / (YEAR * 4 * H100), 25.0, 390.0)
    return _guaranteed("mixed-fast", "three kinds of chips, the fastest used", question, uses)


def mixed_fleet_slow_chips() -> Scenario:
    """The evader uses the slowest chips only, for two thirds of a year."""
    question = _mixed()
    uses = _whole_and_part(2, question.visible_flop / (240.0 * H100 / 3), 0.0, 240.0)
    return _guaranteed("mixed-slow", "three kinds of chips, the slowest used", question, uses)


def mixed_fleet_drawn_by_chip() -> Scenario:
    """As many chips as the guaranteed plan draws, but of each kind in proportion to its chips."""
    question = _mixed()
    total = sum(_drawn(question))
    samples = tuple(math.ceil(total * s.chips / question.chips) for s in question.monitored)
    used = question.visible_flop / (YEAR * 4 * H100)
    return Scenario(
        "mixed-by-chip",
        "the same, but drawn by chip instead of by FLOP",
        question,
        _whole_and_part(0, used, 25.0, 390.0),
        (samples,) * 13,
        _exact(question.monitored[0].chips, used, samples[0]),
        LIMIT,
    )


# ----------------------------------------------------------------------------------------------- collusion


def owners_in_one_pool() -> Scenario:
    """Ten owners train together; all chips are one frame."""
    strata = tuple(Stratum(f"owner-{at}", 2_000, H100, owner=f"owner-{at}") for at in range(10))
    question = PlanQuestion(PALM, strata, RATE, YEAR, PERIOD, WANTED)
    each = question.visible_flop / (YEAR * H100) / 10
    uses = tuple(use for at in range(10) for use in _whole_and_part(at, each, 25.0, 390.0))
    return _guaranteed("collusion-pooled", "ten owners share the run, one pool", question, uses)


def owners_audited_apart() -> Scenario:
    """An owner too small for the threshold is left alone, and does half of the run."""
    small, large = Stratum("small", 15, H100, owner="small"), Stratum("large", 2_000, H100, owner="large")
    question = PlanQuestion(CHINCHILLA, (small, large), RATE, YEAR, PERIOD, WANTED)
    alone = replace(question, strata=(large,))
    samples = math.ceil(_must(published_samples(alone)))
    half = question.visible_flop / (YEAR * H100) / 2
    uses = (*_whole_and_part(0, half, 25.0, 390.0), *_whole_and_part(1, half, 25.0, 390.0))
    return Scenario(
        "collusion-apart",
        "two owners share the run, the one too small for it alone is not inspected",
        question,
        uses,
        ((0, samples),) * 13,
        _exact(large.chips, half, samples),
        LIMIT,
    )


# ------------------------------------------------------------------------------------- what the list lacks


def exempt_chips_declared() -> Scenario:
    """Exempt chips do what they can, the rest of the run happens on monitored ones; the plan knows."""
    question = _ask(PALM, 20_000, exempt=20)
    used = question.visible_flop / (YEAR * H100)
    uses = (Use(None, 20, 25.0, 390.0), *_whole_and_part(0, used, 25.0, 390.0))
    return _guaranteed(
        "exempt-declared", "20 exempt chips do their part, the plan counts them", question, uses
    )


def exempt_chips_forgotten() -> Scenario:
    """The same evader against a plan that forgot the exempt chips."""
    declared, forgot = _ask(PALM, 20_000, exempt=20), _ask(PALM, 20_000)
    used = declared.visible_flop / (YEAR * H100)
    (samples,) = _drawn(forgot)
    uses = (Use(None, 20, 25.0, 390.0), *_whole_and_part(0, used, 25.0, 390.0))
    return Scenario(
        "exempt-forgotten",
        "20 exempt chips do their part, the plan does not count them",
        forgot,
        uses,
        ((samples,),) * 13,
        _exact(20_000, used, samples),
        LIMIT,
    )


def chips_outside_the_list() -> Scenario:
    """A registry with gaps: a third of the run's chips are in no list."""
    question = _ask(PALM, 20_000)
    used = question.visible_flop / (YEAR * H100)
    (samples,) = _drawn(question)
    hidden = round(used / 3)
    uses = (Use(None, hidden, 25.0, 390.0), *_whole_and_part(0, used - hidden, 25.0, 390.0))
    return Scenario(
        "registry-gap",
        "a third of the run on chips that no list holds",
        question,
        uses,
        ((samples,),) * 13,
        _exact(20_000, used - hidden, samples),
        LIMIT,
    )


# ------------------------------------------------------------------------------------- tampering and losses


def half_the_snapshots_suppressed() -> Scenario:
    """Every other snapshot never reaches a log, and nobody counts: a run of one period with few snapshots."""
    question = _ask(CHINCHILLA, 1_000, rate=0.02)
    (samples,) = _drawn(question)
    used = question.visible_flop / (PERIOD * H100)
    return Scenario(
        "suppressed-half",
        "half of the snapshots suppressed in a run of 30 days, f = 0.02, no coverage test",
        question,
        _uses(question, PERIOD),
        ((samples,),),
        1.0 - _must(exact_miss(1_000, used, samples, PERIOD, PERIOD, 0.01)),
        LIMIT,
        Evasion(suppressed=0.5),
    )


def all_snapshots_suppressed() -> Scenario:
    """No snapshot reaches a log; an empty log speaks once e**(-f d) is below the false alarm rate of the coverage test."""
    question = _ask(CHINCHILLA, 1_000)
    (samples,) = _drawn(question)
    used = question.visible_flop / (YEAR * H100)
    silent = math.log(1.0 / COVERAGE_ALARM) / RATE  # days of use after which no snapshot at all is a finding
    rounds = sum(YEAR - back * PERIOD >= silent for back in range(13))
    whole = math.floor(used)
    # Every chip whose use is long enough tells surely: the run is found if any of these rounds draws one.
    claim = 1.0 - _must(exact_miss(1_000, float(whole), samples, rounds * PERIOD, PERIOD, 1e6))
    return Scenario(
        "suppressed-all",
        "all snapshots suppressed, empty logs held against hours of use",
        question,
        (Use(0, whole, 25.0, 390.0),),
        ((samples,),) * 13,
        claim,
        LIMIT,
        Evasion(suppressed=1.0),
        COVERAGE_ALARM,
    )


def chips_lost_with_their_snapshots() -> Scenario:
    """The first chips with a snapshot are reported lost before anybody can draw them."""
    question = replace(_ask(PALM, 20_000), losses_allowed=8)
    return _guaranteed(
        "losses", "the first 8 chips with a snapshot reported lost, 8 allowed", question,
        _uses(question, YEAR), Evasion(losses=8),
    )  # fmt: skip


def rounds_not_reached_and_caught_up() -> Scenario:
    """In every third round the inspectors reach only half of the chips; the next draw makes up for it."""
    question = _ask(PALM, 20_000)
    history: list[DrawRound] = []
    for at in range(14):
        (following,) = plan_next(question, history)
        missed = following.samples // 2 if at % 3 == 2 and at < 13 else 0
        history.append(DrawRound("fleet", 20_000, following.samples, following.samples - missed, 0, missed))
    return Scenario(
        "caught-up",
        "half of every third draw not reached, made up for by the next",
        question,
        _uses(question, YEAR),
        tuple((past.inspected,) for past in history),
        guaranteed_detection(question, _drawn(question)),
        AT_LEAST,
    )


def spoofs_within_the_budget() -> Scenario:
    """Three of a hundred false transcripts are believed; the plan draws more for it."""
    question = replace(_ask(PALM, 20_000), spoof=0.03)
    made = _guaranteed(
        "spoof-budget", "3 % of false transcripts believed, the plan draws for 0.93", question,
        _uses(question, YEAR), Evasion(spoofed=0.03),
    )  # fmt: skip
    return replace(made, claim=WANTED)


# -------------------------------------------------------------------------------------------------- building


def _ask(flop: float, chips: int, *, exempt: int = 0, rate: float = RATE) -> PlanQuestion:
    strata = (Stratum("fleet", chips, H100),)
    if exempt:
        strata += (Stratum("exempt", exempt, H100, exempt=True),)
    return PlanQuestion(flop, strata, rate, YEAR, PERIOD, WANTED)


def _mixed() -> PlanQuestion:
    strata = (
        Stratum("fast", 1_000, 4 * H100),
        Stratum("middle", 10_000, H100),
        Stratum("slow", 9_000, H100 / 3),
    )
    return PlanQuestion(PALM, strata, RATE, YEAR, PERIOD, WANTED)


def _drawn(question: PlanQuestion) -> list[int]:
    shares = _must(guaranteed_shares(question))
    return [draw_size(share, s.chips) for share, s in zip(shares, question.monitored, strict=True)]


def _guaranteed(
    name: str, words: str, question: PlanQuestion, uses: tuple[Use, ...], evasion: Evasion | None = None
) -> Scenario:
    """The guaranteed plan until the inspection after the run's last day."""
    drawn = _drawn(question)
    rounds = math.ceil(max(use.end for use in uses) / question.period_days)
    return Scenario(
        name, words, question, uses, (tuple(drawn),) * rounds,
        guaranteed_detection(question, drawn), AT_LEAST, evasion or Evasion(),
    )  # fmt: skip


def _year_run(name: str, words: str, question: PlanQuestion, samples: int) -> Scenario:
    chips = question.monitored[0].chips
    used = question.visible_flop / (YEAR * H100)
    return Scenario(
        name, words, question, _uses(question, YEAR), ((samples,),) * 13, _exact(chips, used, samples), EQUAL
    )


def _uses(question: PlanQuestion, days: float, *, start: float | None = None) -> tuple[Use, ...]:
    """The whole run on the first monitored stratum, by default ending with a period: the least favourable start."""
    if start is None:
        start = math.ceil(days / question.period_days) * question.period_days - days
    used = question.visible_flop / (days * question.monitored[0].flop_per_chip_day)
    return _whole_and_part(0, used, start, start + days)


def _whole_and_part(stratum: int, used: float, start: float, end: float) -> tuple[Use, ...]:
    """``used`` chips from start to end; the last of them for the fraction left, at the end."""
    whole = math.floor(used)
    uses = [Use(stratum, whole, start, end)] if whole else []
    if (part := used - whole) > 0.0:
        uses.append(Use(stratum, 1, end - part * (end - start), end))
    return tuple(uses)


def _exact(chips: int, used: float, samples: int, *, rate: float = RATE) -> float:
    return 1.0 - _must(exact_miss(chips, used, samples, YEAR, PERIOD, rate))


def _must(value: _T | None) -> _T:
    assert value is not None  # the scenarios are chosen so that the planner has an answer
    return value
