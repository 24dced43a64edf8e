"""A plan in whole chips: samples, inspectors, cost, the fleet file it is made from, and what to draw next.

The formulas are the planner's; this module rounds, adds up, and says in words what a plan assumes and leaves out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn, cast

from tallystick.errors import InvalidInput
from tallystick.fleet.sampling.exact import exact_samples
from tallystick.fleet.sampling.planner import (
    CHIPS_PER_INSPECTOR_YEAR,
    MOST_CHIPS,
    PlanQuestion,
    Stratum,
    best_detection,
    draw_size,
    endless_run_detection,
    guaranteed_detection,
    guaranteed_shares,
    hit_probability,
    per_year,
    published_samples,
)
from tallystick.fleet.tables import read_table

FLEET_FORMAT = "tallystick/fleet/1"
LARGEST_FLEET_FILE = 1 << 24
LARGE_SHARE = 0.2  # appendix C.1 states its bound on longer runs up to this share of the fleet


@dataclass(frozen=True)
class Inspection:
    """What a year of inspecting takes; costs are in ``currency`` and may be left out."""

    chips_per_inspector_year: float = CHIPS_PER_INSPECTOR_YEAR
    cost_per_chip: float | None = None
    cost_per_inspector_year: float | None = None
    currency: str = ""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.chips_per_inspector_year) and self.chips_per_inspector_year > 0.0):
            raise InvalidInput(
                f"chips per inspector-year {self.chips_per_inspector_year}: must be a positive number"
            )
        for name, cost in (("chip", self.cost_per_chip), ("inspector-year", self.cost_per_inspector_year)):
            if cost is not None and not (math.isfinite(cost) and cost >= 0.0):
                raise InvalidInput(f"cost per {name} {cost}: must be a number, not negative")

    def inspectors(self, samples: int) -> int:
        """Inspectors for ``samples`` chips a year, rounded up."""
        return math.ceil(samples / self.chips_per_inspector_year)

    def cost(self, samples: int) -> float | None:
        """What ``samples`` chips a year cost; None where no cost is known."""
        if self.cost_per_chip is None and self.cost_per_inspector_year is None:
            return None
        return samples * (self.cost_per_chip or 0.0) + self.inspectors(samples) * (
            self.cost_per_inspector_year or 0.0
        )


@dataclass(frozen=True)
class DrawRound:
    """What became of one draw. ``chips`` is the frame it was drawn from, ``lost`` what left it unseen since the last.

    ``refused`` chips were withheld or could not be shown: failures, each a finding. ``unreached`` ones were not
    visited for the inspectors' own reasons, settled before anything was known about them.
    """

    stratum: str
    chips: int
    drawn: int
    inspected: int
    refused: int = 0
    unreached: int = 0
    lost: int = 0

    def __post_init__(self) -> None:
        what = f"round of stratum {self.stratum!r}"
        counts = (self.drawn, self.inspected, self.refused, self.unreached, self.lost)
        if min(counts) < 0 or not 0 < self.chips <= MOST_CHIPS:
            raise InvalidInput(f"{what}: counts must not be negative, and there must be chips")
        if self.inspected + self.refused + self.unreached != self.drawn:
            raise InvalidInput(
                f"{what}: {self.inspected} inspected, {self.refused} refused and {self.unreached} unreached "
                f"must add up to {self.drawn} drawn"
            )
        if self.drawn > self.chips:
            raise InvalidInput(f"{what}: {self.drawn} drawn, there were {self.chips} chips")


@dataclass(frozen=True)
class Risks:
    """Probabilities of an accepted spoof and of unnoticed tampering."""

    spoof: float = 0.0
    tamper: float = 0.0


@dataclass(frozen=True)
class FleetFile:
    """What a fleet file says; ``strata`` is empty where the command line describes the chips."""

    strata: tuple[Stratum, ...] = ()
    inspection: Inspection = field(default_factory=Inspection)
    risks: Risks = field(default_factory=Risks)
    losses_allowed: int = 0
    rounds: tuple[DrawRound, ...] = ()


@dataclass(frozen=True)
class Workload:
    """Chips to inspect: per period of each monitored stratum, per year in all, and the people and money it takes."""

    samples_per_period: tuple[float, ...]
    samples_per_year: int
    inspectors: int
    cost_per_year: float | None
    detection: float


@dataclass(frozen=True)
class NextDraw:
    """What to draw next from one stratum after a history of rounds."""

    stratum: str
    samples: int
    catch_up: int
    failures: int
    lost: int


@dataclass(frozen=True)
class Plan:
    """Three answers to one question, best detection by any plan, and words for what they rest on.

    ``published`` is Eq. 1 and None where no run of the threshold fits; ``exact`` is None where exact_samples is;
    ``guaranteed`` is None where inspecting every chip would not do.
    """

    question: PlanQuestion
    inspection: Inspection
    published: Workload | None
    exact: Workload | None
    guaranteed: Workload | None
    best_detection: float
    share_of_fleet: float
    endless_run_detection: float | None
    audited_separately: int | None
    next_draws: tuple[NextDraw, ...]
    assumptions: tuple[str, ...]
    exclusions: tuple[str, ...]
    warnings: tuple[str, ...]


def make_plan(
    question: PlanQuestion, inspection: Inspection | None = None, rounds: Sequence[DrawRound] = ()
) -> Plan:
    """Return the plan for ``question``; ``rounds`` are those of the last run length, oldest first."""
    inspection = inspection or Inspection()
    hit, samples = hit_probability(question), published_samples(question)
    published = None
    if samples is not None:
        published = _workload(question, inspection, (samples,), question.sampling_probability)
    found = exact_samples(question)
    exact = None if found is None else _workload(question, inspection, (found[0],), found[1])
    guaranteed, shares = None, guaranteed_shares(question)
    if shares is not None:
        drawn = [draw_size(share, s.chips) for share, s in zip(shares, question.monitored, strict=True)]
        guaranteed = _workload(question, inspection, tuple(drawn), guaranteed_detection(question, drawn))
    share = max(0.0, question.visible_flop) / (question.run_days * question.flop_per_day)
    return Plan(
        question,
        inspection,
        published,
        exact,
        guaranteed,
        best_detection(question),
        share,
        endless_run_detection(hit, question.sampling_probability)
        if hit is not None and 0.0 < hit < 1.0
        else None,
        _separately(question),
        plan_next(question, rounds) if rounds and shares is not None else (),
        _assumptions(question),
        _exclusions(question),
        _warnings(question, share, guaranteed is not None),
    )


def plan_next(question: PlanQuestion, rounds: Sequence[DrawRound]) -> tuple[NextDraw, ...]:
    """Return what to draw next from each monitored stratum, given the rounds of the last run length, oldest first.

    The strata of ``question`` are the chips there are now. A smaller sample than today's plan needs is caught up,
    since logs persist. Losses beyond the allowed ones count with every period they stood in the frame (spec/plan.md
    section 6).

    Raises:
        InvalidInput: a round of an unknown stratum, or losses that could hide the whole run.
    """
    by_name = {
        stratum.name: [r for r in rounds if r.stratum == stratum.name] for stratum in question.monitored
    }
    if unknown := sorted({r.stratum for r in rounds} - set(by_name)):
        raise InvalidInput(
            f"round of stratum {unknown[0]!r}: the fleet has no monitored stratum of that name"
        )
    lost = sum(r.lost for r in rounds)
    periods = question.losses_allowed
    if lost > question.losses_allowed:
        periods = sum(r.lost * (at + 1) for history in by_name.values() for at, r in enumerate(history))
    shares = guaranteed_shares(question, losses=periods)
    if shares is None:
        raise InvalidInput(
            f"losses: {lost} chips lost, with up to {periods} periods of use, could hide a run of "
            f"{question.threshold_flop:.4g} FLOP or leave too little of it; no sample makes up for that, investigate them"
        )
    draws: list[NextDraw] = []
    for stratum, share in zip(question.monitored, shares, strict=True):
        history = by_name[stratum.name]
        owed = (
            1.0  # of the probability that a chip goes undrawn; a round above the share pays for earlier ones
        )
        for past in history:
            reached = (past.drawn - past.unreached) / past.chips
            owed = min(1.0, owed * (1.0 - share) / (1.0 - reached)) if reached < 1.0 else 1.0
        samples, regular = (
            draw_size(1.0 - (1.0 - share) * owed, stratum.chips),
            draw_size(share, stratum.chips),
        )
        samples = max(samples, regular)
        failures, gone = sum(r.refused for r in history), sum(r.lost for r in history)
        draws.append(NextDraw(stratum.name, samples, samples - regular, failures, gone))
    return tuple(draws)


def _workload(
    question: PlanQuestion, inspection: Inspection, samples: tuple[float, ...], detection: float
) -> Workload:
    yearly = per_year(math.fsum(samples), question.period_days)
    return Workload(samples, yearly, inspection.inspectors(yearly), inspection.cost(yearly), detection)


def _separately(question: PlanQuestion) -> int | None:
    """Eq. 1 samples a year if every owner were audited alone for its part of the threshold; None for one owner."""
    owners = sorted({stratum.owner for stratum in question.monitored})
    if len(owners) < 2 or question.visible_flop <= 0.0:
        return None
    total = 0
    for owner in owners:
        own = tuple(s for s in question.monitored if s.owner == owner)
        part = math.fsum(s.chips * s.flop_per_chip_day for s in own) / question.flop_per_day
        alone = PlanQuestion(
            question.visible_flop * part, own, question.snapshots_per_day, question.run_days,
            question.period_days, question.sampling_probability,
        )  # fmt: skip
        samples = published_samples(alone)
        if samples is None:
            return None
        total += per_year(samples, question.period_days)
    return total


# ------------------------------------------------------------------------------------------------- words


def _assumptions(question: PlanQuestion) -> tuple[str, ...]:
    kept = question.run_days + question.period_days
    return (
        "the run is the compute after the first H: detection holds for runs of at least 2 H in all",
        f"every monitored chip takes snapshots at random times, {question.snapshots_per_day:g} a day in use, "
        "which its owner can neither foresee nor suppress",
        f"a chip keeps its log for {kept:g} days (run and one period) and its log names the run that left it there",
        "no chip computes faster than the stated rate in any precision it supports",
        "a run is found by the inspection after its last period; reports are committed before the sample is drawn",
        "the chips of a period are drawn uniformly without replacement, independently of other periods",
        "a chip that was drawn and cannot be shown counts as a failure",
    )


def _exclusions(question: PlanQuestion) -> tuple[str, ...]:
    exempt = tuple(s for s in question.strata if s.exempt)
    words = ["chips outside the list: smuggled, legacy or consumer chips", "runs below the threshold"]
    if exempt:
        words.append(
            f"{sum(s.chips for s in exempt):,} exempt chips can do {question.exempt_flop:.4g} FLOP in "
            f"{question.run_days:g} days unseen, and more in longer runs"
        )
    if not (question.spoof or question.tamper):
        words.append("accepted spoofs and unnoticed tampering: no risk was stated, none is in the budget")
    if not question.losses_allowed:
        words.append("chips lost before they are drawn: none are allowed for")
    return tuple(words)


def _warnings(question: PlanQuestion, share: float, reachable: bool) -> tuple[str, ...]:
    words: list[str] = []
    if question.visible_flop <= 0.0:
        words.append(
            f"exempt chips alone can do {question.exempt_flop:.4g} FLOP, the threshold is "
            f"{question.threshold_flop:.4g}: such a run needs no monitored chip and no sample finds it"
        )
    elif not reachable:
        words.append(
            f"inspecting every chip in every period finds such a run with {best_detection(question):.4g}, "
            f"{question.sampling_probability:.6g} is asked for"
            + (f", {question.losses_allowed} losses allowed" if question.losses_allowed else "")
        )
    if share > 1.0:
        words.append(
            f"a run of the threshold does not fit the monitored chips in {question.run_days:g} days: "
            "Eq. 1 has no answer; the guaranteed plan finds longer runs"
        )
    elif share > LARGE_SHARE:
        words.append(
            f"the run may take {share:.3g} of the fleet: Eq. 1 loses much to longer runs on fewer chips; "
            "use the guaranteed plan"
        )
    if question.run_days < question.period_days:
        words.append(
            f"a run of {question.run_days:g} days is shorter than a period of {question.period_days:g}: "
            "Eq. 1 counts snapshots of a whole period; use the guaranteed plan"
        )
    return tuple(words)


# ------------------------------------------------------------------------------------------- fleet file


def parse_fleet(data: bytes) -> FleetFile:
    """Return the fleet that a JSON document describes (spec/plan.md section 8); people write it.

    Raises:
        InvalidInput: not such a document, an unknown or repeated field, or a value out of range.
    """
    what = "fleet file"
    if len(data) > LARGEST_FLEET_FILE:
        raise InvalidInput(f"{what}: {len(data)} bytes exceed the limit of {LARGEST_FLEET_FILE}")
    try:
        value: object = json.loads(
            data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant
        )
    except (UnicodeDecodeError, RecursionError, ValueError) as problem:
        raise InvalidInput(f"{what}: not JSON ({problem})") from problem
    if not isinstance(value, dict):
        raise InvalidInput(f"{what}: must be an object")
    top = cast("dict[str, object]", value)
    if "format" not in top:
        raise InvalidInput(f"{what}: field 'format' is missing")
    if (stated := top.pop("format")) != FLEET_FORMAT:
        raise InvalidInput(f"{what}: format must be {FLEET_FORMAT!r}, is {ascii(stated)[:80]}")
    return read_table(FleetFile, top, what)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values = dict(pairs)
    if len(values) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"field {ascii(next(n for n in names if names.count(n) > 1))[:80]} stands twice")
    return values


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")
