"""What a plan asks of chips, and what of it a log shows: what was not observed is unknown, silence has its probability."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tallystick.cli.fleet.observing import plan_of
from tallystick.errors import InvalidInput
from tallystick.fleet.agent.chip_log import ChipHead
from tallystick.fleet.agent.chip_record import (
    DAY_MS,
    NO_RECORD,
    Boot,
    Clocks,
    Event,
    Firmware,
    Genesis,
    LoggedRecord,
    Record,
    SelfTest,
    Snapshot,
    sign_record,
)
from tallystick.fleet.attestation.assurance import Assurance, Attestation
from tallystick.fleet.provenance.matcher import SnapshotMatch
from tallystick.fleet.provenance.observation import (
    HOUR_MS,
    ObservationPlan,
    chance_of_empty,
    check_observed,
    check_together,
    is_fresh,
    seconds_within,
)
from tallystick.fleet.provenance.verification import ChipView, judge_owner
from tallystick.signing.keys import ed25519_key

KEY = ed25519_key(b"\7" * 32)
UEID = bytes(17)
NAME = UEID.hex()
FIRST = 1_770_000_000_000
TEST = SelfTest(True, bytes(32))
FULL = Snapshot(256, 23, 5800, bytes(32), bytes(32), b"")
EMPTY = replace(FULL, pages=0, size=0)
GOOD = SnapshotMatch("exact", 2, (), 0, 0, 5800)
PLAN = ObservationPlan(1000, FIRST, FIRST + 20 * DAY_MS)


def log_of(
    events: list[tuple[Event, float]], *, rate: int = 1000, off: float = 0.0, wall: bool = True
) -> list[LoggedRecord]:
    """Return a log of events, each so many days of use after the one before; ``off`` days pass besides before the second."""
    log, active, idle = list[LoggedRecord](), 0, 0
    genesis = Genesis("maker", "model", "simulated", bytes(32), "local")
    for event, days in [(genesis, 0.0), (Boot(bytes(16)), 0.0), *events]:
        active += int(days * DAY_MS)
        idle += int(off * DAY_MS) if len(log) == 2 else 0
        clocks = Clocks(min(len(log), 1), active, active, FIRST + active + idle if wall else None)
        previous = log[-1].digest if log else NO_RECORD
        log.append(
            sign_record(Record(len(log), previous, UEID, Firmware(bytes(32), 1), clocks, rate, event), KEY)
        )
    return log


def attested(log: list[LoggedRecord], days: float = 0.0, *, boots: int = 1) -> Attestation:
    """Return what the chip attests so many days after its last record."""
    head = ChipHead(log[-1].record.seq, log[-1].digest)
    uptime = (log[-1].record.clocks.uptime + int(days * DAY_MS)) // 1000
    return Attestation(UEID, b"", head, boots, uptime, False, "simulated")


def found(
    log: list[LoggedRecord], attestation: Attestation | None = None, plan: ObservationPlan = PLAN
) -> set[tuple[int, str]]:
    """Return rules and severities; the log's last record is attested for the reader, if nothing else is."""
    attestation = attestation if attestation is not None or not log else attested(log)
    return {(each.rule, each.severity) for each in check_observed(NAME, log, attestation, plan)}


DAILY: list[tuple[Event, float]] = [(FULL, 1.0)] * 20


def test_a_chip_that_was_watched_as_asked_has_no_finding() -> None:
    assert found(log_of(DAILY)) == set()


@pytest.mark.parametrize(("days", "rules"), [(10.0, set[Any]()), (9.8, {(116, "unknown")})])
def test_the_time_after_the_last_record_is_the_attestations_to_show(days: float, rules: set[Any]) -> None:
    log = log_of(DAILY[:10])
    assert found(log) == {(116, "unknown"), (119, "unknown")}
    plan = replace(PLAN, use={NAME: 200.0})
    assert found(log, attested(log, days), plan) == rules
    assert found(log, attested(log, days, boots=2), plan) == {(116, "unknown")}, "it has booted since"
    assert not is_fresh(log, replace(attested(log), head=ChipHead(3, log[3].digest)))


def test_a_log_that_begins_too_late_leaves_what_was_before_unknown() -> None:
    early = replace(PLAN, since=FIRST - DAY_MS, until=FIRST + 19 * DAY_MS)
    assert (116, "unknown") in found(log_of(DAILY), plan=early)
    assert found(log_of(DAILY), plan=replace(PLAN, since=FIRST - 60_000)) == set(), (
        "clocks may be off a little"
    )


def test_without_a_wall_clock_nothing_says_when_a_chip_was_watched() -> None:
    assert found(log_of(DAILY, wall=False)) == {(116, "unknown")}
    assert found([]) == set(), "rule 3 speaks of that"


@pytest.mark.parametrize(("rate", "rules"), [(1000, set[Any]()), (999, {(117, "violation")})])
def test_no_chip_is_watched_at_a_lower_rate_than_asked(rate: int, rules: set[Any]) -> None:
    assert found(log_of(DAILY, rate=rate)) == rules


def test_a_lower_rate_before_the_time_asked_for_is_nobodys_business() -> None:
    log = log_of(DAILY)
    slow = [replace(log[at], record=replace(log[at].record, rate=1)) for at in range(3)] + log[3:]
    assert found(slow, plan=replace(PLAN, since=FIRST + 5 * DAY_MS)) == set()
    assert (117, "violation") in found(slow)


@pytest.mark.parametrize(("days", "severity"), [(200.0, "violation"), (9.3, "violation"), (9.1, "unknown")])
def test_silence_has_its_probability(days: float, severity: str) -> None:
    """No snapshot in 9.21 days at one a day has a chance of 1e-4; a log of nothing but its boot, and an attestation of now."""
    log, plan = log_of([]), replace(PLAN, until=FIRST + int(days * DAY_MS))
    finding, *others = check_observed(NAME, log, attested(log, days), plan)
    assert (finding.rule, finding.severity) == (118, severity)
    assert "chance" in finding.text and f"{days:.1f} days of use" in finding.text
    assert [each.name for each in others] == ["silence"] * (days > 100.0)


@pytest.mark.parametrize(("gap", "rules"), [(11.8, set[Any]()), (12.0, {(118, "violation")})])
def test_a_burst_of_snapshots_makes_up_for_no_silence(gap: float, rules: set[Any]) -> None:
    """Fifteen in eight hours, and none in two weeks, were as many as one a day: of 22 to come 12.4 days have a chance of 1e-4."""
    events: list[tuple[Event, float]] = [*[(FULL, 0.02)] * 20, (TEST, gap), *[(FULL, 0.5)] * 20]
    log = log_of(events)
    days = 20 * 0.02 + gap + 10
    plan = replace(PLAN, until=FIRST + int(days * DAY_MS))
    assert found(log, plan=plan) == rules


def test_a_few_suppressed_on_every_chip_are_many_together() -> None:
    """Four of fifteen have a chance of 1e-3 on one chip, and none on fifty."""
    log = log_of([*[(FULL, 3.0)] * 4, (TEST, 3.0)])
    plan = replace(PLAN, until=FIRST + 15 * DAY_MS)
    assert found(log, plan=plan) == set()
    assert check_together([(NAME, log, None)], plan) == []
    [finding] = check_together([(NAME, log, None)] * 50, plan)
    assert (finding.rule, finding.severity) == (118, "violation")
    assert "all 50 chips: 200 snapshots" in finding.text
    matches: dict[int, Any] = dict.fromkeys(range(2, 6), ("0" * 64, GOOD))
    chips = [replace(view(log, matches), ueid=f"{n:034x}") for n in range(50)]
    assert judge_owner("o", chips, [], plan=plan).verdict == "fail"
    assert judge_owner("o", chips[:1], [], plan=plan).verdict == "pass"


@pytest.mark.parametrize("how", ["boot", "steps"])
def test_no_record_makes_time_in_use_that_its_clocks_do_not_have(how: str) -> None:
    """A boot that claims thirteen days of use while the machine was off, or two minutes in every millisecond."""
    log = log_of(DAILY)
    forged: list[LoggedRecord] = []
    for at, logged in enumerate(log):
        clocks = logged.record.clocks
        if how == "boot" and at >= 12:  # the chip was off for ten days, and says that it was not
            uptime = 0 if at == 12 else clocks.uptime - log[12].record.clocks.uptime
            event = Boot(bytes(16)) if at == 12 else logged.record.event
            record = replace(
                logged.record, clocks=replace(clocks, boots=clocks.boots + 1, uptime=uptime), event=event
            )
        elif how == "steps" and at >= 12:
            back = log[11].record.clocks.wall
            assert back is not None
            record = replace(logged.record, clocks=replace(clocks, wall=back + at))
        else:
            record = logged.record
        forged.append(replace(logged, record=record))
    plan = PLAN if how == "boot" else replace(PLAN, until=FIRST + 10 * DAY_MS)
    whole = 20.0 if how == "boot" else 10.0
    assert seconds_within(forged, None, plan) == pytest.approx((whole - (how == "boot")) * 86400, rel=1e-3)


def test_snapshots_outside_the_time_asked_for_do_not_count() -> None:
    log = log_of([*[(FULL, 0.01)] * 20, (TEST, 20.0)])
    plan = replace(PLAN, since=FIRST + DAY_MS, until=FIRST + 20 * DAY_MS)
    said = [each.text for each in check_observed(NAME, log, attested(log), plan) if each.rule == 118]
    assert any(": 0 snapshots in the time asked for" in text for text in said), said


@pytest.mark.parametrize(
    ("use", "rules"),
    [(None, {(119, "unknown")}), (480.0, set[Any]()), (488.0, {(119, "unknown")}), (0.0, set[Any]())],
)
def test_time_without_a_live_agent_is_unknown_unless_somebody_says_how_long_the_chip_was_in_use(
    use: float | None, rules: set[Any]
) -> None:
    log = log_of(DAILY, off=5.0)
    plan = replace(PLAN, until=FIRST + 25 * DAY_MS, use={} if use is None else {NAME: use})
    assert found(log, plan=plan) == rules


def view(log: list[LoggedRecord], matches: dict[int, Any]) -> ChipView:
    return ChipView(NAME, log, (), Assurance(0, ()), matches, attested=attested(log))


def test_an_owner_of_empty_snapshots_and_no_run_passes_only_if_a_meter_says_that_nothing_ran() -> None:
    """18 of 18 snapshots of no memory, and nothing declared: that was a pass."""
    log = log_of([(EMPTY, 1.0)] * 18)
    chip = view(log, dict.fromkeys(range(2, 20)))
    plan = replace(PLAN, until=FIRST + 18 * DAY_MS)
    answers = {
        hours: judge_owner(
            "o", [chip], [], plan=plan if hours is None else replace(plan, use={NAME: hours})
        ).verdict
        for hours in (None, 0.0, 10.0, 100.0, 432.0)
    }
    assert answers == {None: "unknown", 0.0: "pass", 10.0: "pass", 100.0: "unknown", 432.0: "fail"}
    assert judge_owner("o", [chip], []).verdict == "unknown"


def test_without_a_plan_nothing_passes() -> None:
    log = log_of(DAILY)
    chip = view(log, dict.fromkeys(range(2, 22), ("0" * 64, GOOD)))
    bare = judge_owner("o", [chip], [])
    assert (bare.complete, [each.rule for each in bare.findings]) == ("unknown", [115])
    assert judge_owner("o", [chip], [], plan=PLAN).complete == "pass"


@pytest.mark.parametrize(
    ("full", "taken", "hours", "chance"),
    [(0, 18, 432.0, 0.0), (18, 18, 0.0, 1.0), (0, 2, 216.0, 0.25), (1, 2, 216.0, 0.75), (0, 18, 0.0, 1.0)],
)
def test_how_likely_empty_snapshots_are_of_a_chip_in_use(
    full: int, taken: int, hours: float, chance: float
) -> None:
    assert chance_of_empty(full, taken, hours, 432 * 3600.0) == pytest.approx(chance, abs=1e-12)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"rate": 0}, "0 snapshots a day"),
        ({"until": FIRST}, "is no time"),
        ({"use": {NAME: 480.1}}, "in use for 480.1 hours; there are 0 to 480"),
        ({"use": {NAME: -1.0}}, "in use for -1 hours"),
    ],
)
def test_a_plan_that_asks_for_nothing_is_refused(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem):
        replace(PLAN, **change)


def test_options_state_a_plan() -> None:
    chips = [NAME]
    plan = plan_of("1.5", "2026-02-02T02:40:00Z", "2026-02-03", [f"{NAME}=3"], chips)
    assert plan is not None and plan.now is not None and plan.now > FIRST
    assert replace(plan, now=None) == ObservationPlan(1500, FIRST, 1_770_076_800_000, {NAME: 3.0})
    assert plan_of(None, None, None, [], chips) is None


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (("1", None, None, []), "go together"),
        ((None, None, None, [f"{NAME}=1"]), "go together"),
        (("x", "2026-01-01", "2026-01-02", []), "--snapshots-per-day x: must be a number"),
        (("nan", "2026-01-01", "2026-01-02", []), "must be a number"),
        (("1", "yesterday", "2026-01-02", []), "--since yesterday: must be a date"),
        (("1", "2026-01-01", "2026-13-02", []), "--until 2026-13-02: must be a date"),
        (("1", "2026-01-01", "2026-01-02", ["ab=1"]), "--use ab=1: must be UEID=HOURS"),
        (("1", "2026-01-01", "2026-01-02", [NAME]), "must be UEID=HOURS"),
        (("1", "2026-01-02", "2026-01-01", []), "is no time"),
        (("0.0001", "2026-01-01", "2026-01-02", []), "one in a thousand days is the least"),
    ],
)
def test_options_that_state_no_plan_are_refused(given: tuple[Any, ...], problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem):
        plan_of(given[0], given[1], given[2], given[3], [NAME])


def test_hours_are_of_this_many_milliseconds() -> None:
    assert HOUR_MS == 3_600_000


def test_a_log_is_no_later_than_the_readers_clock() -> None:
    log = log_of(DAILY)
    for days, rules in ((19.0, {(116, "unknown")}), (20.0, set[Any]())):
        assert found(log, plan=replace(PLAN, now=FIRST + int(days * DAY_MS))) == rules
    short = log_of(DAILY[:10])
    ages = replace(PLAN, now=FIRST + 20 * DAY_MS, use={NAME: 200.0})
    assert found(short, attested(short, 1e6), ages) == {(116, "unknown")}, "uptime of 2,700 years"


def test_a_chips_own_clock_may_drift_after_its_last_record() -> None:
    log = log_of([(FULL, 1.0)] * 10)
    plan = replace(PLAN, use={NAME: 200.0})
    assert found(log, attested(log, 10 * 0.995), plan) == set()
    assert found(log, attested(log, 10 * 0.98), plan) == {(116, "unknown")}


def test_a_lower_rate_that_was_raised_as_the_time_began_is_none() -> None:
    log = log_of(DAILY)
    slow = [replace(log[at], record=replace(log[at].record, rate=1)) for at in range(2)] + log[2:]
    assert found(slow, plan=replace(PLAN, since=FIRST + DAY_MS - 60_000)) == set(), "a minute of it"
    assert found(slow, plan=replace(PLAN, since=FIRST + DAY_MS - 240_000)) == {(117, "violation")}


def test_a_chip_that_was_off_all_the_time_has_no_snapshots_to_show() -> None:
    log = log_of([(TEST, 0.0)], off=20.0)
    assert found(log, plan=replace(PLAN, use={NAME: 0.0})) == set()
    assert found(log) == {(118, "unknown"), (119, "unknown")}


def test_walls_that_step_back_and_forth_count_no_time_twice() -> None:
    log = log_of([(TEST, 0.001)] * 400)
    stepped: list[LoggedRecord] = []
    for at, logged in enumerate(log):
        clocks = logged.record.clocks
        assert clocks.wall is not None
        wall = clocks.wall - (118_000 if at % 2 else 0)
        stepped.append(replace(logged, record=replace(logged.record, clocks=replace(clocks, wall=wall))))
    assert seconds_within(stepped, None, PLAN) <= 1.01 * 0.4 * 86400


def test_whoever_has_no_attestation_of_now_is_told_so() -> None:
    """Of two logs that a restored disk has written, an owner shows the one that it likes."""
    log = log_of(DAILY)
    for attestation, rules in (
        (attested(log), []), (None, [116]), (attested(log[:-1]), [116]), (attested(log, boots=2), [116]),
    ):  # fmt: skip
        assert [each.rule for each in check_observed(NAME, log, attestation, PLAN)] == rules
