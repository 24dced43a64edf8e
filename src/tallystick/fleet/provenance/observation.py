"""Was a chip observed as a plan asks: at that rate, over that time? What was not is unknown (spec/monitoring.md 6).

    plan = ObservationPlan(rate=1000, since=.., until=.., use={ueid: 240.0})
    check_observed(name, log, attested, plan)       ->  findings 116 to 119; none if it was

Pure. The time after a log's last record is the chip's attestation's to show, hours of use a meter's or an inspection's.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from tallystick.errors import InvalidInput
from tallystick.fleet.agent.chip_log import LogLimits, NumberedFinding, snapshots_of
from tallystick.fleet.agent.chip_record import DAY_MS, Boot, LoggedPrecommit, LoggedRecord
from tallystick.fleet.attestation.assurance import Attestation
from tallystick.fleet.sampling.coverage import LARGEST_MEAN, at_most, deficit_p_value

HOUR_MS = DAY_MS // 24
LEAST_OFF = 0.01
"""Share of the time asked for that a chip may be without a live agent, and nobody has to say whether it was in use then."""


@dataclass(frozen=True)
class ObservationPlan:
    """What a plan asks of every chip, and what is known of its use from elsewhere.

    Attributes:
        rate: snapshots, in thousandths per day in use.
        since, until: milliseconds since 1970.
        use: hours between the two in which a chip (UEID, hexadecimal) was in use, by a meter or an inspection.
        begins, ends: when a chip came to this owner, and when it left it, where that is within the time; milliseconds since 1970.
        now: the reader's clock; None where it is not known. No log is later.
        limits: the reader's: with what probability an honest chip may be accused, and how far clocks may be off.

    Raises:
        InvalidInput: no rate, no time, or more hours of use than there are.
    """

    rate: int
    since: int
    until: int
    use: Mapping[str, float] = field(default_factory=dict[str, float])
    now: int | None = None
    limits: LogLimits = field(default_factory=LogLimits)
    begins: Mapping[str, int] = field(default_factory=dict[str, int])
    ends: Mapping[str, int] = field(default_factory=dict[str, int])

    def __post_init__(self) -> None:
        if self.rate < 1:
            raise InvalidInput(
                f"plan: {self.rate / 1000:g} snapshots a day; one in a thousand days is the least"
            )
        if self.since >= self.until:
            raise InvalidInput(f"plan: from {date_of(self.since)} until {date_of(self.until)} is no time")
        for ueid in {**self.begins, **self.ends}:
            begin, end = self.time_of(ueid)
            if begin >= end:
                raise InvalidInput(
                    f"plan: chip {ueid[-8:]} from {date_of(begin)} until {date_of(end)} is no time"
                )
        for ueid, hours in self.use.items():
            begin, end = self.time_of(ueid)
            most = (end - begin) / HOUR_MS
            if not 0.0 <= hours <= most:
                raise InvalidInput(
                    f"plan: chip {ueid[-8:]} in use for {hours:g} hours; there are 0 to {most:g}"
                )

    def time_of(self, ueid: str) -> tuple[int, int]:
        """Return from when until when a chip was to be watched."""
        return max(self.since, self.begins.get(ueid, self.since)), min(
            self.until, self.ends.get(ueid, self.until)
        )

    def of(self, ueid: str) -> ObservationPlan:
        """Return what is asked of one chip."""
        since, until = self.time_of(ueid)
        use = {ueid: self.use[ueid]} if ueid in self.use else {}
        return replace(self, since=since, until=until, use=use, begins={}, ends={})

    def of_others(self, ueid: str, log: Sequence[LoggedRecord]) -> set[int]:
        """Return the counters of snapshots of before the chip came to this owner, or after it left: others explain them."""
        begin, end = self.begins.get(ueid, -math.inf), self.ends.get(ueid, math.inf)
        walls = ((logged.record.seq, logged.record.clocks.wall) for logged, _ in snapshots_of(log))
        return {seq for seq, wall in walls if wall is not None and not begin <= wall <= end}


@dataclass(frozen=True)
class _Stretch:
    """The time between two records, or after the last up to an attestation: wall clock, time in use, and the rate in force."""

    begin: int
    end: int
    active: int
    rate: int
    seq: int

    def share(self, plan: ObservationPlan) -> float:
        """Return how much of it lies in the time that is asked for."""
        inside = min(self.end, plan.until) - max(self.begin, plan.since)
        return min(1.0, max(0, inside) / (self.end - self.begin)) if self.end > self.begin else 0.0


def date_of(wall: int) -> str:
    """Return milliseconds since 1970 as people write them, to the minute."""
    try:
        return datetime.fromtimestamp(wall / 1000, UTC).strftime("%Y-%m-%d %H:%M")
    except (OverflowError, OSError, ValueError):
        return f"millisecond {wall}"


def is_fresh(log: Sequence[LoggedRecord], attested: Attestation | None) -> bool:
    """Whether a chip has attested, since it last booted, that its log ends where the one handed over does."""
    if attested is None or not log:
        return False
    head, last = attested.head, log[-1]
    return (head.seq, head.digest, attested.boots) == (
        last.record.seq, last.digest, last.record.clocks.boots,
    )  # fmt: skip


def attested_part(log: Sequence[LoggedRecord], attested: Attestation | None) -> Sequence[LoggedRecord]:
    """Return a log up to the record that its chip attested, if that is one of it; else all of it."""
    if attested is not None:
        for at, logged in enumerate(log):
            if (logged.record.seq, logged.digest) == (attested.head.seq, attested.head.digest):
                return log[: at + 1]
    return log


def check_observed(
    ueid: str, log: Sequence[LoggedRecord], attested: Attestation | None, plan: ObservationPlan
) -> list[NumberedFinding]:
    """Return what a chip's ``log`` lacks of what ``plan`` asks for; nothing of a log without records, of which rule 3 speaks."""
    if not log:
        return []
    plan = plan.of(ueid)
    name, found = f"chip {ueid[-8:]}", list[NumberedFinding]()
    stretches = _stretches(log, attested)
    if stretches is None:
        text = f"{name}: a record has no wall clock; when the chip was watched cannot be told"
        return [NumberedFinding(116, "time", None, text, "unknown")]
    found += _check_time(name, log, stretches, attested, plan)
    inside = [(each, each.share(plan)) for each in stretches]
    slower = [(each, each.active * share) for each, share in inside if each.rate < plan.rate]
    if sum(active for _, active in slower) > plan.limits.slack:
        slow = next(each for each, active in slower if active > 0.0)
        text = f"{name}: {slow.rate / 1000:g} snapshots a day from record {slow.seq} on, {plan.rate / 1000:g} are asked for"
        found.append(NumberedFinding(117, "rate", slow.seq, text))
    active = sum(each.active * share for each, share in inside)
    taken, hours = len(snapshots_within(log, plan)), plan.use.get(ueid)
    found += _check_silence(name, taken, active, plan, is_idle=hours == 0.0)
    found += _check_gap(name, longest_gap(log, attested, plan), active, plan)
    return found + _check_use(name, hours, active, plan)


def check_together(
    logs: Sequence[tuple[str, Sequence[LoggedRecord], Attestation | None]], plan: ObservationPlan
) -> list[NumberedFinding]:
    """Return whether all chips of an owner together have fewer snapshots than the plan's rate calls for: a few of each add up."""
    asked = [(log, attested, plan.of(ueid)) for ueid, log, attested in logs if log]
    taken = sum(len(snapshots_within(log, own)) for log, _, own in asked)
    active = sum(1000.0 * seconds_within(log, attested, own) for log, attested, own in asked)
    return [
        each
        for each in _check_silence(f"all {len(logs)} chips", taken, active, plan)
        if each.severity == "violation" and len(logs) > 1
    ]


def longest_gap(log: Sequence[LoggedRecord], attested: Attestation | None, plan: ObservationPlan) -> float:
    """Return the longest time in use without a snapshot within the time asked for, in milliseconds."""
    longest = gap = 0.0
    taken = {logged.record.seq for logged, _ in snapshots_of(log)}
    for each in _stretches(log, attested) or []:
        gap = 0.0 if each.seq in taken else gap
        gap += each.active * each.share(plan)
        longest = max(longest, gap)
    return longest


def snapshots_within(log: Sequence[LoggedRecord], plan: ObservationPlan) -> list[int]:
    """Return the counters of the snapshots taken in the time that is asked for."""
    return [
        logged.record.seq
        for logged, _ in snapshots_of(log)
        if logged.record.clocks.wall is not None and plan.since <= logged.record.clocks.wall <= plan.until
    ]


def seconds_within(log: Sequence[LoggedRecord], attested: Attestation | None, plan: ObservationPlan) -> float:
    """Return for how many seconds of the time asked for a live agent watched the chip."""
    stretches = _stretches(log, attested) or []
    return sum(each.active * each.share(plan) for each in stretches) / 1000.0


def seconds_used(
    log: Sequence[LoggedRecord], precommit: bytes, of_run: Collection[int]
) -> tuple[float, float]:
    """Return for how many active seconds a run used a chip at least, and at most.

    From its pre-commitment to the next one, and to the next one behind its last snapshot (``of_run`` are those of it; another
    run may be announced while it goes on), or to the log's end.
    """
    start = following = end = None
    for logged in log:
        event, active = logged.record.event, logged.record.clocks.active
        if start is None:
            start = active if isinstance(event, LoggedPrecommit) and event.digest == precommit else None
        elif logged.record.seq in of_run:
            end = None
        elif isinstance(event, LoggedPrecommit):
            following, end = (active if at is None else at for at in (following, end))
    if start is None:
        return 0.0, 0.0
    last = log[-1].record.clocks.active
    least, most = (last if at is None else at for at in (following, end))
    return (least - start) / 1000.0, (most - start) / 1000.0


def chance_of_empty(full: int, taken: int, hours: float, seconds: float) -> float:
    """Return how likely ``full`` snapshots or fewer of ``taken`` hold memory on a chip in use for ``hours`` of ``seconds``."""
    share = min(1.0, 3600.0 * hours / seconds) if seconds > 0.0 else 0.0
    return at_most(full, taken, share)


def _stretches(log: Sequence[LoggedRecord], attested: Attestation | None) -> list[_Stretch] | None:
    """Return the stretches of a log, up to its attestation; None where a record has no wall clock."""
    found: list[_Stretch] = []
    latest = log[0].record.clocks.wall or 0
    for before, after in itertools.pairwise(log):
        a, b = before.record, after.record
        if a.clocks.wall is None or b.clocks.wall is None:
            return None
        # No more than the agent's own clock and the wall's allow: neither a boot nor many short steps make time in use.
        own = b.clocks.uptime - (0 if isinstance(b.event, Boot) else a.clocks.uptime)
        begin = max(a.clocks.wall, latest)
        latest = max(b.clocks.wall, begin)
        most = min(own, round((latest - begin) * (1.0 + LEAST_OFF)))
        used = max(0, min(b.clocks.active - a.clocks.active, most))
        found.append(_Stretch(begin, latest, used, a.rate, a.seq))
    last = log[-1].record
    if last.clocks.wall is None:
        return None
    since = (
        max(0, attested.uptime * 1000 - last.clocks.uptime)
        if attested is not None and is_fresh(log, attested)
        else 0
    )
    begin = max(last.clocks.wall, latest)
    found.append(_Stretch(begin, begin + since, since, last.rate, last.seq))
    return found


def _check_time(
    name: str,
    log: Sequence[LoggedRecord],
    stretches: Sequence[_Stretch],
    attested: Attestation | None,
    plan: ObservationPlan,
) -> list[NumberedFinding]:
    begin, end, slack = stretches[0].begin, stretches[-1].end, plan.limits.slack
    tail = slack + plan.limits.drift * stretches[-1].active  # by the chip's own clock
    found: list[NumberedFinding] = []
    if plan.now is not None and end > plan.now + tail:
        text = f"{name}: its log goes on until {date_of(end)}, which is later than now, {date_of(plan.now)}"
        found.append(NumberedFinding(116, "time", log[-1].record.seq, text, "unknown"))
    if begin > plan.since + slack:
        text = (
            f"{name}: its log begins at {date_of(begin)}; from {date_of(plan.since)} on it was to be watched"
        )
        found.append(NumberedFinding(116, "time", log[0].record.seq, text, "unknown"))
    if not is_fresh(log, attested):
        text = f"{name}: no attestation for the reader's nonce names the last record, {log[-1].record.seq}"
        found.append(NumberedFinding(116, "time", log[-1].record.seq, text, "unknown"))
    if end < plan.until - tail:
        text = f"{name}: is watched until {date_of(end)}; until {date_of(plan.until)} it was to be"
        found.append(NumberedFinding(116, "time", log[-1].record.seq, text, "unknown"))
    return found


def _check_silence(
    name: str, taken: int, active: float, plan: ObservationPlan, *, is_idle: bool = False
) -> list[NumberedFinding]:
    mean = plan.rate / 1000.0 * active / DAY_MS
    chance = deficit_p_value(taken, min(mean, LARGEST_MEAN))
    days = f"{active / DAY_MS:.1f} days of use"
    asked = f"{mean:.1f} were to be expected at {plan.rate / 1000:g} a day in {days}; chance {chance:.1e}"
    if chance < plan.limits.false_alarm:
        text = f"{name}: {taken} snapshots in the time asked for, where {asked}"
        return [NumberedFinding(118, "silence", None, text)]
    if taken == 0 and not is_idle:
        text = f"{name}: no snapshot in the time asked for, so nothing of it was seen; {asked}"
        return [NumberedFinding(118, "silence", None, text, "unknown")]
    return []


def _check_gap(name: str, gap: float, active: float, plan: ObservationPlan) -> list[NumberedFinding]:
    """Find the longest silence unlikely: of m snapshots to be expected, m + 1 times may be as long at most."""
    rate = plan.rate / 1000.0 / DAY_MS
    chance = min(1.0, (rate * active + 1.0) * math.exp(-rate * gap))
    if chance >= plan.limits.false_alarm:
        return []
    asked = f"at {plan.rate / 1000:g} a day; chance {chance:.1e} at most"
    text = f"{name}: {gap / DAY_MS:.1f} days of use without a snapshot, {asked}"
    return [NumberedFinding(118, "silence", None, text)]


def _check_use(name: str, hours: float | None, active: float, plan: ObservationPlan) -> list[NumberedFinding]:
    whole = plan.until - plan.since
    if hours is not None:
        if hours * HOUR_MS <= active * (1.0 + plan.limits.drift) + plan.limits.slack:
            return []
        # The time between a last record and a loss of power is in no log.
        text = f"{name}: in use for {hours:g} hours, watched for {active / HOUR_MS:.1f} of them"
        return [NumberedFinding(119, "use unwatched", None, text, "unknown")]
    off = whole - active
    if off <= LEAST_OFF * whole + plan.limits.slack:
        return []
    text = (
        f"{name}: without a live agent for {off / HOUR_MS:.1f} of {whole / HOUR_MS:.1f} hours; no meter and no inspection says "
        "that it was not in use"
    )
    return [NumberedFinding(119, "use unknown", None, text, "unknown")]
