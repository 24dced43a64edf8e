from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from tallystick.errors import InvalidInput
from tallystick.fleet.sampling import exact, planner
from tallystick.fleet.sampling.planner import PlanQuestion, Stratum
from tallystick.testing import sampling_formulas

H100 = 1e15 * 86400  # FLOP per chip-day, 16 bit
GPT3, CHINCHILLA, PALM, C280B, C1T, C10T = 3.14e23, 5.76e23, 2.56e24, 9.9e24, 1.27e26, 1.3e28

# Table 1 of the paper: H, H/a and chips for a year as printed, then samples a year at 1e3, 1e5 and 1e7 chips as
# printed (three digits) and to the last chip.
TABLE_1 = [
    (GPT3, 3.64e3, 10, (243, 2.43e4, 2.43e6), (243, 24_337, 2_433_726)),
    (CHINCHILLA, 6.67e3, 19, (132, 1.33e4, 1.33e6), (132, 13_267, 1_326_718)),
    (PALM, 2.96e4, 82, (29, 2.98e3, 2.99e5), (29, 2_984, 298_511)),
    (C280B, 1.15e5, 314, (7, 771, 7.72e4), (7, 771, 77_190)),
    (C1T, 1.47e6, 4.03e3, (None, 60, 6.02e3), (None, 60, 6_017)),
    (C10T, 1.5e8, 4.12e5, (None, None, 58), (None, None, 58)),
]
CELLS = [
    (row[0], chips, printed, exact)
    for row in TABLE_1
    for chips, printed, exact in zip((10**3, 10**5, 10**7), row[3], row[4], strict=True)
]


def ask(flop: float = CHINCHILLA, chips: int = 1000, **changes: object) -> PlanQuestion:
    question = PlanQuestion(flop, (Stratum("all", chips, H100),), 0.1, 365.0, 30.0, 0.9)
    rate = changes.pop("rate", H100)
    return replace(question, strata=(Stratum("all", chips, rate),), **changes)  # pyright: ignore[reportArgumentType]


def yearly(question: PlanQuestion) -> int | None:
    samples = planner.published_samples(question)
    return None if samples is None else planner.per_year(samples, question.period_days)


# ------------------------------------------------------------------------------------------ as published


@pytest.mark.parametrize(("flop", "chips", "printed", "exact"), CELLS)
def test_table_1_in_every_cell(flop: float, chips: int, printed: float | None, exact: int | None) -> None:
    found = yearly(ask(flop, chips))
    assert found == exact
    if printed is not None and found is not None:
        assert abs(found - printed) <= max(1.0, 10.0 ** (math.floor(math.log10(printed)) - 2))


@pytest.mark.parametrize("row", TABLE_1)
def test_table_1_chip_days_and_chips_for_a_year(row: tuple[float, float, float, object, object]) -> None:
    flop, days, chips = row[:3]
    assert flop / H100 == pytest.approx(days, rel=0.005)
    assert math.ceil(flop / H100 / 365) == pytest.approx(chips, rel=0.005)


def test_table_1_is_not_reached_with_the_run_days_of_its_caption() -> None:
    rows = [yearly(ask(flop, 1000, run_days=30.0)) for flop in (GPT3, CHINCHILLA, PALM, C280B)]
    assert rows == [230, 119, 11, None]


@pytest.mark.parametrize(("flop", "samples"), [(C280B, 231_572), (1e25, 229_256)])
def test_the_worlds_chips_take_about_232_inspectors(flop: float, samples: int) -> None:
    found = yearly(ask(flop, 10**7, rate=3 * H100))
    assert found is not None
    assert found == pytest.approx(samples, abs=1)
    if flop == C280B:
        assert math.ceil(found / planner.CHIPS_PER_INSPECTOR_YEAR) == 232


@pytest.mark.parametrize(
    ("rate", "samples"), [(0.01, 48_640), (0.03, 21_243), (0.1, 13_267), (0.3, 12_608), (1.0, 12_606)]
)
def test_more_snapshots_save_little_beyond_three_a_period(rate: float, samples: int) -> None:
    assert yearly(ask(chips=10**5, snapshots_per_day=rate)) == samples


@pytest.mark.parametrize(
    ("period", "rate", "samples"),
    [
        (7, 0.03, 3_872), (7, 0.1, 1_456), (7, 0.3, 835),
        (30, 0.03, 1_235), (30, 0.1, 771), (30, 0.3, 733),
        (90, 0.03, 786), (90, 0.1, 733), (90, 0.3, 733),
    ],
)  # fmt: skip
def test_longer_periods_need_fewer_samples_a_year(period: float, rate: float, samples: int) -> None:
    assert yearly(ask(C280B, 10**5, period_days=float(period), snapshots_per_day=rate)) == samples


def test_pooled_owners_cost_a_hundredth_of_owners_audited_alone() -> None:
    assert yearly(ask(C1T, 10**7)) == 6_017
    assert yearly(ask(C1T / 100, 10**5)) == 6_017


def test_a_run_that_fills_the_fleet_still_has_an_answer_and_a_larger_one_none() -> None:
    whole = ask(H100 * 365 * 1000)
    assert planner.published_samples(whole) is not None
    assert planner.published_samples(replace(whole, threshold_flop=H100 * 365 * 1000 * 1.001)) is None
    assert planner.published_samples(replace(whole, snapshots_per_day=1e3)) == 0.0
    assert yearly(replace(whole, snapshots_per_day=1e3)) == 1


# ----------------------------------------------------------------------------------------------- evasion


def test_longer_runs_on_fewer_chips_cost_at_most_three_percent_up_to_a_fifth_of_the_fleet() -> None:
    ratios = planner.evasion_ratios(range(1, 101), [b / 1000 for b in range(1, 201)], 0.9)
    assert ratios.shape == (100, 200)
    assert round(float(ratios.min()), 4) == 0.9703
    assert ratios.min() == ratios[99, 199]
    assert ratios[0] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("share", "ratio", "limit"), [(0.2, 0.9703, 0.8730), (0.5, 0.9009, 0.8100), (0.9, 0.6612, 0.5934)]
)
def test_longer_runs_pay_when_they_take_much_of_the_fleet(share: float, ratio: float, limit: float) -> None:
    assert round(planner.longer_run_detection(100, share, 0.9) / 0.9, 4) == ratio
    assert round(planner.endless_run_detection(share, 0.9), 4) == limit


def test_shorter_runs_on_more_chips_are_found_more_often() -> None:
    days = (5, 10, 30, 90, 365)
    found = [round(planner.shorter_run_detection(PALM / H100, 10**4, 20, t, 0.1), 4) for t in days]
    assert found == [0.9951, 0.9842, 0.8607, 0.4880, 0.1504]
    with pytest.raises(InvalidInput, match="does not fit 10000 chips and 2 days"):
        planner.shorter_run_detection(PALM / H100, 10**4, 20, 2, 0.1)


@given(st.floats(0.001, 0.999), st.floats(1.0, 1000.0), st.floats(1.0, 3.0))
def test_lemma_1_splitting_never_helps(b: float, g: float, further: float) -> None:
    def spread(times: float) -> float:
        return -times * math.expm1(math.log(b) / times) - (1 - b)

    assert spread(1.0) == pytest.approx(0.0, abs=1e-12)
    assert spread(g) >= -1e-12
    assert spread(g * further) >= spread(g) - 1e-9


def test_lemma_1_has_the_corrected_derivative_not_the_printed_one() -> None:
    g, b, h = 3.0, 0.4, 1e-5
    numeric = ((g + h) * (1 - b ** (1 / (g + h))) - (g - h) * (1 - b ** (1 / (g - h)))) / (2 * h)
    assert round(numeric, 4) == 0.0382
    assert numeric == pytest.approx(1 - b ** (1 / g) * (1 - math.log(b) / g), rel=1e-6)
    assert round(1 - (1 - 1 / g) * b ** (1 / g), 3) == 0.509


@given(
    st.floats(1.0, 300.0),
    st.floats(1.0, 3.0),
    st.floats(0.01, 1.0),
    st.floats(1.0, 500.0),
    st.floats(0.001, 2.0),
)
def test_theorem_1_as_a_property(
    days: float, longer: float, fill: float, samples: float, rate: float
) -> None:
    work = fill * 1000 * days
    short = planner.shorter_run_detection(work, 1000, samples, days, rate)
    assert short >= planner.shorter_run_detection(work, 1000, samples, days * longer, rate) - 1e-9


@given(st.floats(0.001, 0.999), st.floats(1.0, 200.0), st.floats(1.0, 5.0), st.floats(0.01, 0.999))
def test_longer_runs_approach_the_endless_one_from_above(
    b: float, k: float, further: float, p: float
) -> None:
    here, beyond = planner.longer_run_detection(k, b, p), planner.longer_run_detection(k * further, b, p)
    assert beyond <= here + 1e-12
    assert planner.endless_run_detection(b, p) <= beyond + 1e-12


# -------------------------------------------------------------------------------------------- monotonicity

QUESTIONS = st.builds(
    lambda share, chips, f, run, period, p, rate: PlanQuestion(
        share * chips * rate * run, (Stratum("all", chips, rate),), f, run, period, p
    ),
    st.floats(0.001, 0.9),
    st.integers(10, 10**7),
    st.floats(0.01, 2.0),
    st.floats(60.0, 1000.0),
    st.floats(5.0, 60.0),
    st.floats(0.05, 0.99),
    st.floats(1e17, 1e21),
)
GROWTH = st.floats(1.01, 3.0)


def more_of(question: PlanQuestion, name: str, by: float) -> PlanQuestion:
    stratum = question.strata[0]
    if name == "chips":
        return replace(question, strata=(replace(stratum, chips=math.ceil(stratum.chips * by)),))
    if name == "flop_per_chip_day":
        return replace(question, strata=(replace(stratum, flop_per_chip_day=stratum.flop_per_chip_day * by),))
    if name == "probability":
        return replace(question, probability=1 - (1 - question.probability) / by)
    return replace(question, **{name: getattr(question, name) * by})


@pytest.mark.parametrize(
    ("name", "grows"),
    [
        ("threshold_flop", False), ("chips", True), ("flop_per_chip_day", True),
        ("snapshots_per_day", False), ("run_days", True), ("probability", True),
    ],
)  # fmt: skip
@settings(max_examples=60)
@given(question=QUESTIONS, by=GROWTH)
def test_eq_1_is_monotone(name: str, grows: bool, question: PlanQuestion, by: float) -> None:
    before, after = (
        planner.published_samples(question),
        planner.published_samples(more_of(question, name, by)),
    )
    assume(before is not None and after is not None)
    assert before is not None
    assert after is not None
    assert after >= before * (1 - 1e-9) if grows else after <= before * (1 + 1e-9)


@settings(max_examples=60)
@given(question=QUESTIONS, by=GROWTH)
def test_a_longer_period_needs_more_samples_in_it_and_fewer_in_a_year(
    question: PlanQuestion, by: float
) -> None:
    longer = more_of(question, "period_days", by)
    for find in (planner.published_samples, lambda q: (planner.guaranteed_shares(q) or [None])[0]):
        before, after = find(question), find(longer)
        if before is not None and after is not None:
            assert after >= before * (1 - 1e-9)
            assert after / longer.period_days <= before / question.period_days * (1 + 1e-9)


@pytest.mark.parametrize(
    ("name", "grows"),
    [
        ("threshold_flop", False), ("chips", True), ("flop_per_chip_day", True),
        ("snapshots_per_day", False), ("run_days", True), ("probability", True),
    ],
)  # fmt: skip
@settings(max_examples=60)
@given(question=QUESTIONS, by=GROWTH)
def test_the_guarantee_is_monotone(name: str, grows: bool, question: PlanQuestion, by: float) -> None:
    other = more_of(question, name, by)
    before, after = planner.guaranteed_shares(question), planner.guaranteed_shares(other)
    assume(before is not None and after is not None)
    assert before is not None
    assert after is not None
    drawn, later = before[0] * question.chips, after[0] * other.chips
    assert later >= drawn * (1 - 1e-9) if grows else later <= drawn * (1 + 1e-9)


@settings(max_examples=60)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 40), st.floats(0.01, 1.0), st.floats(5.0, 70.0))
def test_exact_detection_grows_with_chips_used_samples_and_snapshots(
    chips: int, used: int, samples: int, rate: float, run: float
) -> None:
    assume(used < chips and samples < chips)
    here = exact.exact_miss(chips, used, samples, run, 20.0, rate)
    assert here is not None
    for other in (
        exact.exact_miss(chips, used + 1, samples, run, 20.0, rate),
        exact.exact_miss(chips, used, samples + 1, run, 20.0, rate),
        exact.exact_miss(chips, used, samples, run, 20.0, rate * 2),
        exact.exact_miss(chips, used + 0.5, samples, run, 20.0, rate),
    ):
        assert other is not None
        assert other <= here + 1e-12


# ---------------------------------------------------------------------------------------------- exactness


def enumerated_miss(chips: int, used: float, samples: int, run: float, period: float, rate: float) -> float:
    """The sum over every set that every period may draw; a chip's log counts when it is drawn last."""
    full, days = math.floor(used), planner.exposures(run, period)
    part = (used - full) * run
    behind = [days] * full + ([[max(0.0, part - k * period) for k in range(len(days))]] if part else [])
    sets = list(itertools.combinations(range(chips), samples))
    total = 0.0
    for drawn in itertools.product(sets, repeat=len(days)):
        miss = 1.0
        for chip, its_days in enumerate(behind):
            last = next((k for k, one in enumerate(drawn) if chip in one), None)
            miss *= 1.0 if last is None else math.exp(-rate * its_days[last])
        total += miss
    return total / len(sets) ** len(days)


@settings(max_examples=60)
@given(st.integers(1, 6), st.floats(0.1, 6.0), st.integers(0, 6), st.floats(1.0, 60.0), st.floats(0.01, 2.0))
@example(chips=6, used=2.5, samples=5, run=60.0, rate=0.1)
@example(chips=5, used=5.0, samples=5, run=45.0, rate=0.1)
@example(chips=1, used=0.5, samples=1, run=45.0, rate=0.1)
def test_exact_miss_is_the_sum_over_every_draw_of_small_fleets(
    chips: int, used: float, samples: int, run: float, rate: float
) -> None:
    assume(used <= chips and samples <= chips and math.comb(chips, samples) ** 3 <= 8000)
    found = exact.exact_miss(chips, used, samples, run, 20.0, rate)
    assert found == pytest.approx(enumerated_miss(chips, used, samples, run, 20.0, rate), rel=1e-9)


@settings(max_examples=60)
@given(st.integers(2, 60), st.integers(1, 60), st.integers(1, 60), st.floats(0.01, 2.0))
def test_one_period_is_the_hypergeometric_sum(chips: int, used: int, samples: int, rate: float) -> None:
    assume(used <= chips and samples <= chips)
    silent = math.exp(-rate * 30.0)
    terms = [
        math.comb(used, h) * math.comb(chips - used, samples - h) * silent**h
        for h in range(min(used, samples) + 1)
    ]
    found = exact.exact_miss(chips, used, samples, 30.0, 30.0, rate)
    assert found == pytest.approx(math.fsum(terms) / math.comb(chips, samples), rel=1e-9)


@pytest.mark.parametrize(
    ("flop", "chips", "exact", "closed", "replaced"),
    [
        (GPT3, 10**3, 205, 216, 242), (GPT3, 10**5, 20_567, 21_520, 24_232),
        (CHINCHILLA, 10**3, 120, 120, 127), (CHINCHILLA, 10**5, 12_007, 11_975, 12_753),
        (PALM, 10**3, 28, 30, 29), (PALM, 10**5, 2_908, 2_912, 2_955),
        (C280B, 10**3, 7, 8, 7), (C280B, 10**5, 769, 769, 771), (C1T, 10**5, 59, 61, 60),
    ],
)  # fmt: skip
def test_one_draw_without_replacement(
    flop: float, chips: int, exact: int, closed: int, replaced: int
) -> None:
    used, seen = math.ceil(flop / H100 / 365), planner.snapshot_probability(0.1, 30.0)
    assert sampling_formulas.one_draw_samples(chips, round(used * seen), 0.9) == exact
    assert sampling_formulas.attribute_samples(chips, used * seen, 0.9) == closed
    assert math.ceil(math.log(0.1) / math.log1p(-used / chips * seen)) == replaced


@pytest.mark.parametrize(
    ("flop", "chips", "samples", "detection"),
    [
        (CHINCHILLA, 10**3, 10.808, 0.9105), (CHINCHILLA, 10**5, 1090.358, 0.9104),
        (PALM, 10**3, 2.356, 0.9109), (PALM, 10**5, 245.256, 0.9104),
    ],
)  # fmt: skip
def test_logs_that_persist_find_more_than_eq_1_says(
    flop: float, chips: int, samples: float, detection: float
) -> None:
    question = ask(flop, chips, run_days=360.0)
    found = planner.published_samples(question)
    assert found == pytest.approx(samples, abs=6e-4)
    assert found is not None
    assert round(sampling_formulas.independent_detection(question, found), 4) == detection


@pytest.mark.parametrize(
    ("flop", "chips", "needed"),
    [
        (CHINCHILLA, 10**3, 10.311),
        (CHINCHILLA, 10**5, 1040.611),
        (PALM, 10**3, 2.244),
        (PALM, 10**5, 234.063),
    ],
)
def test_samples_needed_when_logs_persist(flop: float, chips: int, needed: float) -> None:
    question = ask(flop, chips, run_days=360.0)
    assert sampling_formulas.independent_detection(question, needed + 0.001) >= 0.9
    assert sampling_formulas.independent_detection(question, needed - 0.001) < 0.9


@pytest.mark.parametrize("chips", [10**3, 10**5, 10**7])
@pytest.mark.parametrize("flop", [GPT3, CHINCHILLA, PALM])
def test_exact_samples_are_the_fewest(flop: float, chips: int) -> None:
    found = exact.exact_samples(ask(flop, chips))
    assert found is not None
    samples, detection = found
    assert detection >= 0.9
    fewer = exact.exact_miss(chips, flop / H100 / 365, samples - 1, 365.0, 30.0, 0.1)
    assert fewer is not None
    assert fewer > 0.1


def test_the_exact_sum_declines_where_it_would_take_too_long() -> None:
    assert exact.exact_miss(10**7, 10**6, 10**5, 365.0, 30.0, 0.1) is None
    assert exact.exact_miss(10**7, 10**6, 10, 365.0, 30.0, 0.1) is not None
    assert exact.exact_miss(10**7, 10, 10, 1001.0, 1.0, 0.1) is None
    assert exact.exact_miss(10**7, 10, 10, 1000.0, 1.0, 0.1) is not None
    with pytest.raises(InvalidInput, match="run on 11 of 10 chips"):
        exact.exact_miss(10, 11, 1, 365.0, 30.0, 0.1)


def test_exposures_are_those_of_the_least_favourable_start() -> None:
    assert planner.exposures(70.0, 30.0) == [70.0, 40.0, 10.0]
    assert planner.exposures(60.0, 30.0) == [60.0, 30.0]
    assert planner.exposures(7.0, 30.0) == [7.0]
    for start in range(1, 31):  # the first inspection comes `start` days after the run began
        days = [min(start + 30.0 * k, 70.0) for k in range(5) if start + 30.0 * k <= 100.0]
        assert all(a >= b for a, b in zip(sorted(days, reverse=True), [70.0, 40.0, 10.0], strict=False))
        assert len(days) >= 3


# --------------------------------------------------------------------------------------------- guarantee


@settings(max_examples=150)
@given(
    st.integers(2, 40), st.floats(5.0, 400.0), st.floats(1.0, 100.0), st.integers(1, 40), st.floats(0.01, 1.0)
)
def test_no_run_length_escapes_the_guarantee(
    chips: int, chip_days: float, run: float, samples: int, rate: float
) -> None:
    assume(chip_days / run <= chips and samples <= chips)
    question = PlanQuestion(chip_days * H100, (Stratum("all", chips, H100),), rate, 365.0, 20.0, 0.5)
    miss = exact.exact_miss(chips, chip_days / run, samples, run, 20.0, rate)
    assert miss is not None
    assert 1.0 - miss >= planner.guaranteed_detection(question, [samples]) - 1e-12


@settings(max_examples=150)
@given(st.data())
def test_no_schedule_escapes_the_guarantee(data: st.DataObject) -> None:
    chips, periods = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    samples, rate = data.draw(st.integers(1, chips)), data.draw(st.floats(0.01, 0.5))
    use = data.draw(st.lists(st.floats(0.0, 30.0), min_size=chips * periods, max_size=chips * periods))
    assume(sum(use) > 1.0)
    sets = list(itertools.combinations(range(chips), samples))
    miss = 0.0
    for drawn in itertools.product(sets, repeat=periods):
        days = [0.0] * chips  # of use behind a chip when it is drawn last
        for period, one in enumerate(drawn):
            for chip in one:
                days[chip] = sum(use[chip * periods : chip * periods + period + 1])
        miss += math.exp(-rate * sum(days)) / len(sets) ** periods
    question = PlanQuestion(sum(use) * H100, (Stratum("all", chips, H100),), rate, 365.0, 30.0, 0.5)
    assert 1.0 - miss >= planner.guaranteed_detection(question, [samples]) - 1e-12


def test_the_guarantee_needs_as_much_as_eq_1_when_the_run_takes_little_of_the_fleet() -> None:
    for flop, chips, samples in ((CHINCHILLA, 10**5, 1085), (PALM, 10**7, 24_507)):
        question = ask(flop, chips)
        shares = planner.guaranteed_shares(question)
        assert shares is not None
        assert planner.draw_size(shares[0], chips) == samples
        assert (
            planner.guaranteed_detection(question, [samples])
            >= 0.9
            > (planner.guaranteed_detection(question, [samples - 1]))
        )


def test_the_guarantee_holds_where_eq_1_gives_way_to_longer_runs() -> None:
    question = ask(0.9 * H100 * 30 * 10**5, 10**5, run_days=30.0, snapshots_per_day=1.0)
    published = planner.published_samples(question)
    shares = planner.guaranteed_shares(question)
    assert published is not None
    assert shares is not None
    assert planner.guaranteed_detection(question, [math.ceil(published)]) < 0.9
    assert planner.guaranteed_detection(question, [planner.draw_size(shares[0], 10**5)]) >= 0.9


@settings(max_examples=100)
@given(QUESTIONS, st.integers(0, 50))
def test_the_guaranteed_draw_reaches_what_was_asked_or_nothing_does(
    question: PlanQuestion, losses: int
) -> None:
    question = replace(question, losses_allowed=losses)
    shares = planner.guaranteed_shares(question)
    everything = planner.guaranteed_detection(question, [question.chips])
    if shares is None:
        assert everything < question.probability
    else:
        drawn = planner.draw_size(shares[0], question.chips)
        assert planner.guaranteed_detection(question, [drawn]) >= question.probability - 1e-9
        assert everything >= question.probability - 1e-9
    if losses == 0:
        assert everything == pytest.approx(planner.best_detection(question), rel=1e-9)


def test_a_run_of_few_chip_days_cannot_be_found_surely() -> None:
    question = ask(10 * H100, 1000)
    assert planner.guaranteed_shares(question) is None
    assert exact.exact_samples(question) is None
    assert planner.best_detection(question) == pytest.approx(1 - math.exp(-1.0))
    assert planner.guaranteed_shares(replace(question, probability=0.63)) is not None


MIXED = (Stratum("fast", 300, 4 * H100), Stratum("slow", 2000, H100))


def test_a_mixed_fleet_is_sampled_in_proportion_to_compute() -> None:
    question = replace(ask(PALM), strata=MIXED)
    shares = planner.guaranteed_shares(question)
    assert shares is not None
    assert shares[0] / shares[1] == pytest.approx(4.0, rel=0.02)
    evidence = [
        -math.log1p(-s * question.seen) / m.flop_per_chip_day for s, m in zip(shares, MIXED, strict=True)
    ]
    assert evidence[0] == pytest.approx(evidence[1], rel=1e-12)


def test_sampling_a_mixed_fleet_by_chip_leaves_the_fast_chips_to_the_evader() -> None:
    question = replace(ask(PALM), strata=MIXED)
    shares = planner.guaranteed_shares(question)
    assert shares is not None
    drawn = [planner.draw_size(share, s.chips) for share, s in zip(shares, MIXED, strict=True)]
    by_chip = [round(sum(drawn) * s.chips / question.chips) for s in MIXED]
    assert sum(by_chip) == sum(drawn)
    assert planner.guaranteed_detection(question, drawn) >= 0.9
    assert planner.guaranteed_detection(question, by_chip) < 0.75
    with pytest.raises(InvalidInput, match="1 sample sizes: the fleet has 2 monitored strata"):
        planner.guaranteed_detection(question, [1])


def test_a_fleet_cut_into_equal_strata_is_the_same_fleet() -> None:
    whole, halves = (
        ask(PALM, 2000),
        replace(ask(PALM), strata=(Stratum("a", 500, H100), Stratum("b", 1500, H100))),
    )
    assert planner.published_samples(halves) == pytest.approx(planner.published_samples(whole))
    assert (planner.guaranteed_shares(halves) or ())[1] == (planner.guaranteed_shares(whole) or ())[0]


@pytest.mark.parametrize(("share", "flop"), [(0.01, 3.15e25), (0.05, 1.58e26), (0.2, 6.31e26)])
def test_exempt_chips_hide_flop_not_a_share(share: float, flop: float) -> None:
    strata = (Stratum("seen", 10**5, H100), Stratum("schools", round(share * 1e5), H100, exempt=True))
    question = replace(ask(1e27), strata=strata)
    assert question.exempt_flop == pytest.approx(flop, rel=0.005)
    assert question.visible_flop == 1e27 - question.exempt_flop
    plain = replace(question, strata=strata[:1])
    assert (planner.guaranteed_shares(question) or ())[0] > (planner.guaranteed_shares(plain) or ())[0]


def test_exempt_chips_that_can_do_the_whole_run_leave_no_plan() -> None:
    strata = (Stratum("seen", 10**5, H100), Stratum("schools", 1000, H100, exempt=True))
    question = replace(ask(1e25), strata=strata)
    assert question.visible_flop < 0
    assert planner.published_samples(question) is None
    assert planner.guaranteed_shares(question) is None
    assert exact.exact_samples(question) is None
    assert planner.guaranteed_detection(question, [10**5]) == 0.0
    assert planner.best_detection(question) == 0.0


def test_allowed_losses_cost_samples_and_too_many_leave_no_plan() -> None:
    question = ask(CHINCHILLA, 10**5)
    shares = [planner.guaranteed_shares(question, losses=n) for n in (0, 1, 20, 200, 250)]
    drawn = [None if s is None else planner.draw_size(s[0], 10**5) for s in shares]
    assert drawn[0] == 1085
    assert drawn[0] < drawn[1] < drawn[2] < drawn[3]  # type: ignore[operator]
    assert drawn[4] is None


@settings(max_examples=100)
@given(st.integers(1, 8), st.integers(0, 8), st.integers(1, 12), st.floats(0.05, 0.5))
def test_losing_the_chips_with_snapshots_stays_within_the_allowance(
    used: int, lost: int, samples: int, rate: float
) -> None:
    chips, seen = 12, planner.snapshot_probability(rate, 30.0)
    miss = 0.0  # one period: the evader loses chips that hold snapshots, then the draw comes
    for informative in range(used + 1):
        chance = math.comb(used, informative) * seen**informative * (1 - seen) ** (used - informative)
        left = max(0, informative - lost)
        miss += chance * math.comb(chips - left, samples) / math.comb(chips, samples)
    question = PlanQuestion(
        used * 30 * H100, (Stratum("all", chips, H100),), rate, 365.0, 30.0, 0.5, losses_allowed=lost
    )
    assert 1 - miss >= planner.guaranteed_detection(question, [samples]) - 1e-12


def test_the_miss_budget_holds_every_error() -> None:
    question = ask(CHINCHILLA, 10**5, probability=0.89, tamper=0.01)
    assert question.sampling_probability == pytest.approx(0.9)
    assert yearly(question) == pytest.approx(13_267, abs=1)
    assert round(0.9 * 0.99, 3) == 0.891  # if independent; the budget does not count on it
    with pytest.raises(InvalidInput, match=r"would have to succeed with 1\.1, which must be below 1"):
        replace(question, spoof=0.2)


@pytest.mark.parametrize(
    ("share", "p", "segments"),
    [(0.01, 0.9, 230), (0.01, 0.99, 459), (0.001, 0.9, 2_302), (0.001, 0.99, 4_603)],
)
def test_segments_to_check(share: float, p: float, segments: int) -> None:
    assert sampling_formulas.segments_to_check(share, p) == segments


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"threshold_flop": 0.0}, "threshold FLOP 0.0: must be a positive number"),
        ({"threshold_flop": 1e46}, "threshold FLOP 1e+46: must lie in [1e-09, 1e+45]"),
        ({"run_days": 1e-10}, "run days 1e-10: must lie in [1e-09, 1e+45]"),
        ({"threshold_flop": math.inf}, "threshold FLOP inf: must be a positive number"),
        ({"snapshots_per_day": -0.1}, "snapshots per day -0.1: must be a positive number"),
        ({"run_days": math.nan}, "run days nan: must be a positive number"),
        ({"period_days": 0.0}, "period days 0.0: must be a positive number"),
        ({"period_days": 1e-3}, "more than 100000 periods"),
        ({"probability": 1.0}, "probability 1.0: must lie between 0 and 1"),
        ({"probability": math.nan}, "probability nan: must lie between 0 and 1"),
        ({"spoof": -0.1}, "spoof risk -0.1: must be at least 0 and below 1"),
        ({"tamper": 1.0}, "tamper risk 1.0: must be at least 0 and below 1"),
        ({"losses_allowed": -1}, "losses allowed -1: must be a whole number from 0"),
        ({"strata": ()}, "at least one stratum must be monitored"),
        ({"strata": (MIXED[0], MIXED[0])}, "stratum 'fast': named twice"),
    ],
)
def test_arguments_out_of_range_are_refused(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        replace(ask(), **changes)  # pyright: ignore[reportArgumentType]
    assert reason in str(refused.value)


@pytest.mark.parametrize(("chips", "rate"), [(0, H100), (10**12 + 1, H100), (1, 0.0), (1, math.inf)])
def test_strata_out_of_range_are_refused(chips: int, rate: float) -> None:
    with pytest.raises(InvalidInput, match="stratum 'x': "):
        Stratum("x", chips, rate)
