"""Was the claimed data trained on? What a model remembers of it, segment by segment; pure (spec/monitoring.md 7).

    memory = judge_memory(losses)
    memory.doubtful          # segments whose data look unseen: repeat these

Source: Choi, Shavit and Duvenaud, "Tools for Verifying Neural Models' Training Data", 2023, arXiv 2307.00682. With L the loss,
W_i the weights at the end of segment i and V records that no step visits:

    M(d, i) = mean of L(v, W_i) over V  -  L(d, W_i)             how much better d is known than unseen records
    change(d, i) = M(d, i) - M(d, i - 1)                         greatest for what segment i trained on

A record **falls below** if its change is less than the p-quantile of the unseen records' own. Of records that were not trained
on, a share p falls below; so if a share k of the claimed data was not, at least k p of it does: k is at most (share below) / p.

Two limits. The bound is one-sided: data that a model learns nothing of by themselves (easy, or much like the rest) fall
below although they were trained on, so nobody is accused by this test; a doubtful segment is one to repeat exactly.
Data that were trained on and not claimed do not show at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from tallystick.errors import InvalidInput
from tallystick.fleet.sampling.coverage import binomial_interval

QUANTILE = (
    0.5  # the bound is tightest near the median: fewer fall below at lower ones, but each counts for more
)
TOLERATED = (
    0.5  # largest share of a segment's data that may be unseen, for all that is known, if it is confirmed
)
FALSE_ALARM = 0.05
LEAST_RECORDS = 8

Floats = npt.NDArray[np.float64]
SegmentVerdict = Literal["confirmed", "doubtful"]


@dataclass(frozen=True)
class MemoryLosses:
    """Losses of single records under each committed state.

    Attributes:
        borders: the states, as steps done; segment i lies between border i and i + 1.
        claimed: for each segment, (states, its records).
        unseen: (states, records that no step visits).
    """

    borders: tuple[int, ...]
    claimed: tuple[Floats, ...]
    unseen: Floats

    def __post_init__(self) -> None:
        states = len(self.borders)
        if states < 2 or len(self.claimed) != states - 1:
            raise InvalidInput(
                f"memory: {states} states have {states - 1} segments, losses are of {len(self.claimed)}"
            )
        for name, losses in (
            ("unseen", self.unseen),
            *((f"segment {i}", c) for i, c in enumerate(self.claimed)),
        ):
            if losses.ndim != 2 or losses.shape[0] != states or losses.shape[1] < LEAST_RECORDS:
                raise InvalidInput(
                    f"memory: losses of {name} have shape {losses.shape}, must be ({states}, {LEAST_RECORDS} or more)"
                )
            if not np.isfinite(losses).all():
                raise InvalidInput(f"memory: a loss of {name} is not finite")


@dataclass(frozen=True)
class SegmentMemory:
    """What is remembered of one segment's claimed data.

    Attributes:
        start, end: its steps.
        records: of it that were looked at.
        below: how many of them fall below.
        most_unseen: upper bound of the share of its data that was not trained on.
        learned: the segment in which its data were learned, where that is another one; else None.
    """

    start: int
    end: int
    records: int
    below: int
    most_unseen: float
    learned: tuple[int, int] | None

    @property
    def verdict(self) -> SegmentVerdict:
        """``confirmed`` where at most the tolerated share can be unseen, else ``doubtful``: unknown is never a pass."""
        return "confirmed" if self.most_unseen <= TOLERATED else "doubtful"

    def __str__(self) -> str:
        text = f"steps {self.start} to {self.end}: {self.below} of {self.records} records fall below, "
        text += f"at most {100 * self.most_unseen:.0f} % can be unseen"
        if self.learned is not None:
            text += f"; they were learned in steps {self.learned[0]} to {self.learned[1]}"
        return text

    def fields(self) -> dict[str, object]:
        """Return the facts as JSON."""
        return {**asdict(self), "verdict": self.verdict}


@dataclass(frozen=True)
class RunMemory:
    """What is remembered of a run's claimed data.

    Attributes:
        segments: in order.
        below: (data of segment, state's segment): share of the data that falls below; small on the diagonal where data were
            learned when it is claimed, and growing again to the right as they are forgotten.
        unseen: records that served as unseen.
        quantile: of their changes, which a record falls below or not.
        false_alarm: probability that any of the bounds is wrong.
    """

    segments: tuple[SegmentMemory, ...]
    below: tuple[tuple[float, ...], ...]
    unseen: int
    quantile: float = QUANTILE
    false_alarm: float = FALSE_ALARM

    @property
    def has_power(self) -> bool:
        """Whether at least half of the segments are confirmed: else this model remembers too little to tell."""
        return 2 * sum(s.verdict == "confirmed" for s in self.segments) >= len(self.segments)

    @property
    def least_bound(self) -> float:
        """The bound on the unseen share that a segment has at best: its most records, not one of them below."""
        return smallest_detectable(
            max(segment.records for segment in self.segments), len(self.segments),
            false_alarm=self.false_alarm, quantile=self.quantile,
        )  # fmt: skip

    @property
    def doubtful(self) -> tuple[SegmentMemory, ...]:
        """The segments to repeat: none where the test has no power, as all of them would be."""
        return tuple(s for s in self.segments if s.verdict == "doubtful") if self.has_power else ()

    def fields(self) -> dict[str, object]:
        """Return the facts as JSON."""
        names = ("has_power", "unseen", "quantile", "false_alarm", "least_bound", "below")
        facts: dict[str, object] = {name: getattr(self, name) for name in names}
        return {**facts, "segments": [segment.fields() for segment in self.segments]}


def judge_memory(
    losses: MemoryLosses, *, false_alarm: float = FALSE_ALARM, quantile: float = QUANTILE
) -> RunMemory:
    """Return what is remembered; every bound holds at once with probability 1 - ``false_alarm``.

    The bound of one segment is Clopper and Pearson's on the share below, over the quantile; the threshold itself is estimated
    from the unseen records, so there should be several times as many of them.

    Raises:
        InvalidInput: a probability out of range.
    """
    if not (0.0 < quantile < 1.0 and 0.0 < false_alarm < 1.0):
        raise InvalidInput(
            f"memory: quantile {quantile} and false alarm {false_alarm} must lie between 0 and 1"
        )
    known = losses.unseen.mean(axis=1, keepdims=True)
    thresholds = np.quantile(np.diff(known - losses.unseen, axis=0), quantile, axis=1)
    counts = [
        (np.diff(known - claimed, axis=0) < thresholds[:, None]).sum(axis=1) for claimed in losses.claimed
    ]
    confidence = 1.0 - 2.0 * false_alarm / len(counts)  # one-sided, for all segments together
    segments: list[SegmentMemory] = []
    for at, (below, claimed) in enumerate(zip(counts, losses.claimed, strict=True)):
        records = claimed.shape[1]
        bounds = [min(1.0, binomial_interval(int(b), records, confidence)[1] / quantile) for b in below]
        # Momentum goes on learning a segment's data after it: the first place counts, and only for data unlearned in their own.
        best = next((i for i, bound in enumerate(bounds) if bound <= TOLERATED), at)
        elsewhere = best != at and bounds[at] >= 1.0
        segments.append(
            SegmentMemory(
                losses.borders[at], losses.borders[at + 1], records, int(below[at]), bounds[at],
                (losses.borders[best], losses.borders[best + 1]) if elsewhere else None,
            )
        )  # fmt: skip
    rows = tuple(
        tuple(float(b) / c.shape[1] for b in row) for row, c in zip(counts, losses.claimed, strict=True)
    )
    return RunMemory(tuple(segments), rows, losses.unseen.shape[1], quantile, false_alarm)


def smallest_detectable(
    records: int, segments: int, *, false_alarm: float = FALSE_ALARM, quantile: float = QUANTILE
) -> float:
    """Return the bound on the unseen share where not one of ``records`` falls below: what no run can be better than.

    Raises:
        InvalidInput: no records or segments.
    """
    if records < 1 or segments < 1:
        raise InvalidInput(f"memory: {records} records in {segments} segments")
    return min(1.0, binomial_interval(0, records, 1.0 - 2.0 * false_alarm / segments)[1] / quantile)


def spread(records: Sequence[int], wanted: int, order: Sequence[int]) -> list[tuple[int, int]]:
    """Return ``wanted`` places (batch, record) out of batches of the sizes ``records``, in the random ``order`` given."""
    places = [(batch, record) for batch, size in enumerate(records) for record in range(size)]
    return sorted(places[at] for at in order[:wanted])
