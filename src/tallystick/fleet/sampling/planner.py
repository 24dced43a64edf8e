"""How many chips to inspect so that a run of H FLOP on them is found with probability p.

Formulas, sources, proofs and limits: spec/plan.md. Three answers to one question, from the published to the guaranteed:

    published     Eq. 1 of Shavit 2023 (arXiv 2303.11341): samples as if drawn with replacement, one run length
    exact         the same run, drawn without replacement, logs that persist from period to period
    guaranteed    holds against every schedule: longer, shorter, split, on any mix of chips

Days, FLOP and chips throughout; probabilities lie in (0, 1). Nothing here draws random numbers, reads a file
or needs torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tallystick.errors import InvalidInput

DAYS_PER_YEAR = 365  # Table 1 counts a year so
CHIPS_PER_INSPECTOR_YEAR = 1000  # Shavit 2023, footnote 5: "1000 or more"
MOST_CHIPS = 10**12
LEAST, MOST = 1e-9, 1e45  # of days, rates and FLOP; products of all of them stay within binary64
MOST_ROUNDS = 10**5  # inspections within one run; a century of hourly ones stays below
MOST_EXACT_ROUNDS = 1000
MOST_FACTORS = 10**6  # of the probability that a draw takes no used chip
MOST_LONG_SUMS = 128  # states whose chances are taken from whole numbers of any length
EXACT_WORK = 500_000  # rounds x states**2 of one exact evaluation; keeps a plan within a second

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Stratum:
    """Chips of one kind and owner. ``flop_per_chip_day`` is the highest rate of any precision they support."""

    name: str
    chips: int
    flop_per_chip_day: float
    owner: str = ""
    exempt: bool = False

    def __post_init__(self) -> None:
        what = f"stratum {self.name!r}"
        _whole(f"{what}: chips", self.chips, least=1, most=MOST_CHIPS)
        _positive(f"{what}: FLOP per chip-day", self.flop_per_chip_day)


@dataclass(frozen=True)
class PlanQuestion:
    """What is to be found, on which chips, how surely; raises InvalidInput where an argument is out of range.

    ``threshold_flop`` H is the compute after the first H: detection is planned for runs of at least 2 H.
    ``probability`` covers spoofing and tampering too, so drawing must reach probability + spoof + tamper.
    ``losses_allowed`` chips may be reported lost during a run without weakening the guarantee.
    """

    threshold_flop: float
    strata: tuple[Stratum, ...]
    snapshots_per_day: float
    run_days: float
    period_days: float
    probability: float
    spoof: float = 0.0
    tamper: float = 0.0
    losses_allowed: int = 0

    def __post_init__(self) -> None:
        _positive("threshold FLOP", self.threshold_flop)
        _positive("snapshots per day", self.snapshots_per_day)
        _positive("run days", self.run_days)
        _positive("period days", self.period_days)
        if not 0.0 < self.probability < 1.0:
            raise InvalidInput(f"probability {self.probability}: must lie between 0 and 1")
        for name, risk in (("spoof", self.spoof), ("tamper", self.tamper)):
            if not 0.0 <= risk < 1.0:
                raise InvalidInput(f"{name} risk {risk}: must be at least 0 and below 1")
        if not self.sampling_probability < 1.0:
            raise InvalidInput(
                f"probability {self.probability}: with risks {self.spoof} and {self.tamper} the draw would have "
                f"to succeed with {self.sampling_probability:.6g}, which must be below 1"
            )
        _whole("losses allowed", self.losses_allowed, least=0, most=MOST_CHIPS)
        if self.run_days / self.period_days > MOST_ROUNDS:
            raise InvalidInput(
                f"period days {self.period_days}: a run of {self.run_days} days has more than {MOST_ROUNDS} periods"
            )
        names = [stratum.name for stratum in self.strata]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise InvalidInput(f"stratum {twice[0]!r}: named twice")
        if not self.monitored:
            raise InvalidInput(
                "fleet: at least one stratum must be monitored, all are exempt or there is none"
            )

    @property
    def monitored(self) -> tuple[Stratum, ...]:
        """The strata that log and are drawn from."""
        return tuple(stratum for stratum in self.strata if not stratum.exempt)

    @property
    def chips(self) -> int:
        """Monitored chips."""
        return sum(stratum.chips for stratum in self.monitored)

    @property
    def flop_per_day(self) -> float:
        """What all monitored chips together do in a day."""
        return math.fsum(stratum.chips * stratum.flop_per_chip_day for stratum in self.monitored)

    @property
    def exempt_flop(self) -> float:
        """What exempt chips can do within the run's days, unseen."""
        exempt = (s.chips * s.flop_per_chip_day for s in self.strata if s.exempt)
        return math.fsum(exempt) * self.run_days

    @property
    def visible_flop(self) -> float:
        """What a run of the threshold must do on monitored chips; not positive if it needs none of them."""
        return self.threshold_flop - self.exempt_flop

    @property
    def sampling_probability(self) -> float:
        """What drawing must reach so that all errors together stay within 1 - probability (union bound)."""
        return self.probability + self.spoof + self.tamper

    @property
    def evidence(self) -> float:
        """-log of the miss probability that drawing may leave, in nats."""
        return -math.log1p(-self.sampling_probability)

    @property
    def seen(self) -> float:
        """p_w: the probability that a chip in use for one whole period holds a snapshot of it."""
        return snapshot_probability(self.snapshots_per_day, self.period_days)


def snapshot_probability(snapshots_per_day: float, days: float) -> float:
    """1 - e**(-f d): the probability that ``days`` of use leave at least one snapshot."""
    return -math.expm1(-snapshots_per_day * days)


# ------------------------------------------------------------------------------------------ as published


def published_samples(question: PlanQuestion) -> float | None:
    """Eq. 1: samples per period, not rounded. None if no run of the threshold fits the chips and the days.

    Mixed fleets: a C becomes the sum of all a_j C_j, which is exact if each chip is drawn in proportion to its rate.
    """
    hit = hit_probability(question)
    if hit is None or hit <= 0.0:
        return None
    per_sample = -math.log1p(-hit) if hit < 1.0 else math.inf
    return question.evidence / per_sample * question.period_days / question.run_days


def hit_probability(question: PlanQuestion) -> float | None:
    """The probability that one sampled chip is used in the run and holds a snapshot; None as in published_samples."""
    if question.visible_flop <= 0.0:
        return None
    share = question.visible_flop / (question.run_days * question.flop_per_day)
    return None if share > 1.0 else share * question.seen


def per_year(samples_per_period: float, period_days: float) -> int:
    """Samples per year of 365 days, rounded up, at least one."""
    return max(1, math.ceil(DAYS_PER_YEAR * samples_per_period / period_days))


def longer_run_detection(times: float, share: float, probability: float) -> float:
    """p_d(k), appendix C.1: a run k times as long on k times fewer chips, samples planned for k = 1.

    ``share`` b = H / (C a T) of the fleet, in (0, 1); falls with k, towards ``endless_run_detection``.
    """
    _share(share)
    samples = math.log1p(-probability) / math.log1p(-share)
    return -math.expm1(times * samples * math.log1p(-share / times))


def endless_run_detection(share: float, probability: float) -> float:
    """1 - (1 - p)**(b / -ln(1 - b)): what appendix C.1's evasion leaves, however long the run."""
    _share(share)
    return -math.expm1(math.log1p(-probability) * share / -math.log1p(-share))


def evasion_ratios(times: Sequence[float], shares: Sequence[float], probability: float) -> Floats:
    """p_d(k) / p over run lengths k (rows) and shares b (columns), float64: the figure of appendix C.1."""
    rows = [[longer_run_detection(k, b, probability) / probability for b in shares] for k in times]
    return np.array(rows, dtype=np.float64).reshape(len(times), len(shares))


def shorter_run_detection(
    chip_days: float, chips: int, samples: float, days: float, snapshots_per_day: float
) -> float:
    """p_d(t), theorem 1: ``chip_days`` of work done in ``days``, ``samples`` of ``chips`` drawn once afterwards.

    Grows as ``days`` falls. Raises InvalidInput if the work does not fit the chips and the days.
    """
    share = chip_days / (chips * days)
    if not 0.0 < share <= 1.0:
        raise InvalidInput(f"run of {chip_days} chip-days: does not fit {chips} chips and {days} days")
    hit = share * snapshot_probability(snapshots_per_day, days)
    return -math.expm1(samples * math.log1p(-hit)) if hit < 1.0 else 1.0


# -------------------------------------------------------------------------------------------- exact forms


def exposures(run_days: float, period_days: float) -> list[float]:
    """Days of use a chip has behind it at each inspection of a run, last inspection first.

    The least favourable start of the run within a period: T, T - T_m, .. while positive (spec/plan.md section 3).
    """
    rounds = math.ceil(run_days / period_days)
    days = (run_days - back * period_days for back in range(rounds))
    return [value for value in days if value > 0.0]


# ------------------------------------------------------------------------------------------ the guarantee


def guaranteed_shares(question: PlanQuestion, losses: int | None = None) -> tuple[float, ...] | None:
    """The share of each monitored stratum to draw per period so that every schedule is found; None if none suffices.

    sigma_j = (1 - e**(-lambda a_j T_m)) / p_w gives every FLOP the same evidence lambda, wherever and whenever it is
    done. Without losses lambda = -ln(1 - p) / H. Each of ``losses`` (by default the allowed ones) may take away
    one period's evidence of one chip of the fastest stratum.
    """
    lost = question.losses_allowed if losses is None else losses
    evidence = _evidence_per_flop(question, lost)
    if evidence is None:
        return None
    rates = [stratum.flop_per_chip_day * question.period_days for stratum in question.monitored]
    return tuple(min(1.0, -math.expm1(-evidence * rate) / question.seen) for rate in rates)


def guaranteed_detection(question: PlanQuestion, samples: Sequence[int], losses: int | None = None) -> float:
    """What drawing ``samples`` from each monitored stratum in every period finds at least, whatever the schedule."""
    lost = question.losses_allowed if losses is None else losses
    if len(samples) != len(question.monitored):
        raise InvalidInput(
            f"{len(samples)} sample sizes: the fleet has {len(question.monitored)} monitored strata"
        )
    least = math.inf
    for stratum, drawn in zip(question.monitored, samples, strict=True):
        _whole(f"stratum {stratum.name!r}: samples", drawn, least=0, most=stratum.chips)
        work = stratum.flop_per_chip_day * question.period_days
        share = drawn / stratum.chips
        if share < 1.0:
            least = min(least, -math.log1p(-share * question.seen) / work)
        else:
            least = min(least, question.snapshots_per_day * question.period_days / work)
    # Drawing more never helps the evader, so the best bound of any smaller balanced draw holds.
    return max(0.0, -math.expm1(-_net_evidence(question, lost, min(least, _peak(question, lost)))))


def best_detection(question: PlanQuestion) -> float:
    """What inspecting every monitored chip in every period finds at least: 1 - e**(-f H / a), the limit of any plan."""
    fastest = max(stratum.flop_per_chip_day for stratum in question.monitored)
    return -math.expm1(-question.snapshots_per_day * max(0.0, question.visible_flop) / fastest)


def draw_size(share: float, chips: int) -> int:
    """The fewest whole chips that are at least ``share`` of ``chips``."""
    return min(chips, math.ceil(share * chips))


def _evidence_per_flop(question: PlanQuestion, lost: int) -> float | None:
    """The least lambda whose net evidence is -ln(1 - p); None if there is none."""
    low, high = 0.0, _peak(question, lost)
    if question.visible_flop <= 0.0 or _net_evidence(question, lost, high) < question.evidence:
        return None
    if lost == 0:
        return min(high, question.evidence / question.visible_flop)
    for _ in range(200):
        middle = 0.5 * (low + high)
        if middle in (low, high):
            break
        enough = _net_evidence(question, lost, middle) >= question.evidence
        low, high = (low, middle) if enough else (middle, high)
    return high


def _net_evidence(question: PlanQuestion, lost: int, evidence: float) -> float:
    """Return lambda H - L (-ln(1 - sigma)), sigma the share of the fastest stratum: what L lost chip-periods leave, in nats.

    1 - sigma = (E - q) / p_w with E = e**(-lambda a T_m) and q = e**(-f T_m).
    """
    total = evidence * max(0.0, question.visible_flop)
    if lost == 0:
        return total
    left = math.exp(-evidence * _fastest_work(question)) - math.exp(
        -question.snapshots_per_day * question.period_days
    )
    return total + lost * math.log(left / question.seen) if left > 0.0 else -math.inf


def _peak(question: PlanQuestion, lost: int) -> float:
    """The lambda of the largest net evidence, at most that of inspecting every chip: E = q / (1 - L a T_m / H)."""
    work, flop = _fastest_work(question), question.visible_flop
    snapshots = question.snapshots_per_day * question.period_days
    if lost == 0:
        return snapshots / work
    ratio = lost * work / flop if flop > 0.0 else math.inf
    return max(0.0, (snapshots + math.log1p(-ratio)) / work) if ratio < 1.0 else 0.0


def _fastest_work(question: PlanQuestion) -> float:
    """FLOP of one period on a chip of the fastest stratum."""
    return max(stratum.flop_per_chip_day for stratum in question.monitored) * question.period_days


# ------------------------------------------------------------------------------------------------- inside


def _positive(what: str, value: float) -> None:
    if not (value > 0.0 and math.isfinite(value)):
        raise InvalidInput(f"{what} {value}: must be a positive number")
    if not LEAST <= value <= MOST:
        raise InvalidInput(f"{what} {value}: must lie in [{LEAST:g}, {MOST:g}]")


def _whole(what: str, value: int, *, least: int, most: int) -> None:
    if not least <= value <= most:
        raise InvalidInput(f"{what} {value}: must be a whole number from {least} to {most}")


def _share(value: float) -> None:
    if not 0.0 < value < 1.0:
        raise InvalidInput(f"share {value}: must lie between 0 and 1")
