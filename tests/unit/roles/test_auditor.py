"""What noise excuses: no state farther away than training goes, and none of those that honest rounding gives."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tallystick.commit.encoding import hex_float
from tallystick.commit.state import Entry
from tallystick.execution.noise.freedom import Excess
from tallystick.execution.noise.measured import Calibration, SiteNoise
from tallystick.execution.rounding.breaches import Violation
from tallystick.execution.rounding.grids import site_grid
from tallystick.execution.step import StepOutcome
from tallystick.numerics.grid_table import GridTable
from tallystick.numerics.log import Kind
from tallystick.numerics.policy import BF16, FP32, FP64, Policy
from tallystick.roles import comparison
from tallystick.roles.audit_report import (
    EVERYTHING,
    MOST_NOISE,
    About,
    AuditReport,
    Deviation,
    SegmentResult,
    VerdictName,
)
from tallystick.roles.auditor import accept
from tallystick.roles.comparison import compare_states, compare_step, farther_than_trained, is_excused
from tallystick.run.documents import StepRecord
from tallystick.run.transcript import state_fingerprint


def state(**values: list[float]) -> dict[str, Entry]:
    names = {"w": "model/w", "b": "model/b", "m": "optimizer/w/exp_avg", "r": "model/buffer/r"}
    return {
        names[key]: Entry(names[key], "F32", (len(value),), np.array(value, dtype="<f4").tobytes())
        for key, value in values.items()
    }


BEFORE = state(w=[1.0, 2.0], b=[0.0], m=[0.0, 0.0], r=[0.0, -np.inf, np.nan])
OWN = state(w=[1.125, 2.0], b=[0.0], m=[0.25, 0.0], r=[0.5, -np.inf, np.nan])


@pytest.mark.parametrize(
    ("stated", "far"),
    [
        (OWN, None),  # masks of infinity among them
        (OWN | state(b=[0.125]), None),  # rounded to nothing here and not there, as long as weights go
        (OWN | state(w=[1.125 + 0.125 * MOST_NOISE, 2.0]), None),
        (OWN | state(w=[1.125 + 0.13 * MOST_NOISE, 2.0]), "model/w"),
        (OWN | state(w=[3.375, 6.0]), "model/w"),
        (OWN | state(w=[np.nan, 2.0]), "model/w"),
        (OWN | state(m=[0.25 + 0.26 * MOST_NOISE, 0.0]), "optimizer/w/exp_avg"),
        (OWN | state(r=[0.5, np.inf, np.nan]), "model/buffer/r"),
        (OWN | state(r=[0.5, -np.inf, 0.0]), "model/buffer/r"),
        (OWN | state(w=[1.0]), "model/w"),
    ],
)
def test_noise_excuses_no_state_farther_away_than_training_goes(
    stated: dict[str, Entry], far: str | None
) -> None:
    assert farther_than_trained(BEFORE, OWN, stated) == far


def test_the_fingerprint_of_entries_is_that_of_the_specification() -> None:
    """spec/transcript.md 3, worked example; whole numbers and documents have no part in it."""
    entries = {
        name: Entry(name, "F32", (len(value),), np.array(value, dtype="<f4").tobytes())
        for name, value in {"b": [0.5], "a": [1.0, -2.0]}.items()
    }
    entries["0"] = Entry("0", "I64", (1,), bytes(8))
    assert f"{state_fingerprint(entries):016x}" == "082b6bc9bdca7c17"


def test_eight_times_the_way_trained_is_the_most_and_a_states_own_size_excuses_last_bits_alone() -> None:
    for times, far in ((7.9, None), (8.1, "model/w")):
        assert farther_than_trained(BEFORE, OWN, OWN | state(w=[1.125 + 0.125 * times, 2.0])) == far
    still = state(w=[1.0, 2.0])  # not trained at all: what is allowed is 2**-15
    for apart, far in ((2.0**-16, None), (2.0**-14, "model/w")):
        assert farther_than_trained(still, still, state(w=[1.0 + apart, 2.0])) == far


# -- verdicts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("segments", "verdict"),
    [
        ([], "cannot_reproduce"),
        (["match", "match"], "match"),
        (["match", "not_accepted"], "not_accepted"),
        (["not_accepted", "cannot_reproduce", "match"], "cannot_reproduce"),
        (["cannot_reproduce", "not_accepted", "mismatch"], "mismatch"),
        (["match", "log_violation", "mismatch"], "log_violation"),
        (["mismatch", "log_violation"], "mismatch"),
    ],
)
def test_what_accuses_outweighs_what_is_open_and_of_what_accuses_the_first_decides(
    segments: list[VerdictName], verdict: str
) -> None:
    found = [SegmentResult(n, n + 1, each) for n, each in enumerate(segments)]
    report = AuditReport("run", "native", "00" * 32, found)
    assert report.verdict == verdict


RECORD = StepRecord(
    step=3, rank=0, micro_batches=1, batch="00" * 32, log="11" * 32, log_bytes=0, loss=hex_float(0.5),
    schedule=((0, "lr", hex_float(0.125)),), skipped=False, fingerprint="0" * 16, state_root=None,
)  # fmt: skip


def outcome(**changes: Any) -> StepOutcome:
    made: dict[str, Any] = {
        "loss": 0.5, "batch": "00" * 32, "fingerprint": 0, "micro_batches": 1, "skipped": False, "schedule": [(0, "lr", 0.125)],
    }  # fmt: skip
    return StepOutcome(**(made | changes))


@pytest.mark.parametrize(
    ("changes", "subject"),
    [
        ({"batch": "01" * 32}, "batch digest"),
        ({"skipped": True}, "skipped optimizer"),
        ({"micro_batches": 2}, "micro-batches"),
        ({"loss": float(np.nextafter(0.5, 1.0))}, "loss"),
        ({"fingerprint": 1}, "state fingerprint"),
        ({"schedule": [(0, "lr", 0.25)]}, "hyper-parameter lr of group 0"),
        ({"schedule": [(0, "lr", -0.125)]}, "hyper-parameter lr of group 0"),
        ({"schedule": []}, "hyper-parameter lr of group 0"),
    ],
)
def test_everything_that_a_record_says_is_compared(changes: dict[str, Any], subject: str) -> None:
    assert compare_step(RECORD, outcome(), []) == []
    (found,) = compare_step(RECORD, outcome(**changes), [])
    assert (found.step, found.kind, found.subject) == (3, "mismatch", subject)


@pytest.mark.parametrize(("bits", "alike"), [(-52, True), (-37, True), (-35, False), (-21, False)])
def test_a_schedule_may_differ_by_two_to_the_minus_thirty_six(bits: int, alike: bool) -> None:
    """Of the value: libraries differ in the last bits of a cosine, and nobody trains with what one of them would give."""
    for sign in (1.0, -1.0):
        found = compare_step(RECORD, outcome(schedule=[(0, "lr", 0.125 * (1.0 + sign * 2.0**bits))]), [])
        assert (found == []) == alike


@pytest.mark.parametrize(
    ("own", "stated", "alike"),
    [
        (0.125, math.inf, False), (math.inf, 0.125, False), (0.125, -math.inf, False), (math.inf, -math.inf, False),
        (math.inf, math.inf, True), (0.125, math.nan, False), (math.nan, 0.125, False), (math.nan, math.nan, True),
    ],
)  # fmt: skip
def test_no_infinite_hyper_parameter_is_near_a_finite_one(own: float, stated: float, alike: bool) -> None:
    """An infinite eps froze what did not suit, and momentum that was infinite once could be anything after: 100 % (0.0 %)."""
    record = replace(RECORD, schedule=((0, "eps", hex_float(stated)),))
    assert (compare_step(record, outcome(schedule=[(0, "eps", own)]), []) == []) == alike


def test_a_log_is_to_blame_where_nothing_else_is() -> None:
    breach = [Violation("step 3: gradient of w", 5, "a rule")]
    assert [(d.kind, d.subject, d.element) for d in compare_step(RECORD, outcome(), breach)] == [
        ("log_violation", "gradient of w", 5)
    ]
    both = compare_step(RECORD, outcome(batch="01" * 32), breach)
    assert [d.kind for d in both] == ["mismatch", "mismatch"]
    later = compare_step(RECORD, outcome(fingerprint=1), breach)
    assert [d.kind for d in later] == ["log_violation", "mismatch"]


def test_noise_excuses_no_data_and_no_schedule_and_no_other_gradient() -> None:
    one = Deviation(1, "mismatch", "model/a.weight", 0, "0x1", "0x2", "state")
    everything, elsewhere = replace(one, subject="everything"), replace(one, subject="gradient b.weight")
    assert is_excused(one, [everything])
    assert not is_excused(one, [elsewhere])
    assert not is_excused(one, [])
    about: tuple[About, ...] = ("data", "schedule", "copied log", "copied state", "committed state")
    assert not any(is_excused(replace(one, about=each), [everything]) for each in about)


def test_a_step_says_what_its_deviations_are_about() -> None:
    other = compare_step(
        RECORD,
        outcome(batch="01" * 32, loss=2.0, skipped=True, micro_batches=7, schedule=[], fingerprint=1),
        [],
    )
    assert [each.about for each in other] == ["data", *["schedule"] * 3, "loss", "fingerprint"]


def test_a_limit_that_a_log_exceeds_is_neither_match_nor_accusation() -> None:
    result = SegmentResult(0, 4)
    accept(result, [])
    assert (result.verdict, result.deviations) == ("match", [])
    accept(result, [(2, Excess("roundings moved so far", "3 at most", "4"))])
    assert (result.verdict, result.first_step) == ("not_accepted", 2)


@pytest.mark.parametrize("policy", [FP32, FP64, BF16], ids=["fp32", "fp64", "bf16"])
def test_before_somebody_is_accused_of_a_gradient_a_step_is_repeated_often_enough_for_what_is_rare(
    monkeypatch: pytest.MonkeyPatch, policy: Policy
) -> None:
    """A gate whose input lies near its threshold: one repetition of three moves it, by its whole last place; no loss."""
    places = [(Kind.GRADIENT, 0), (Kind.LOSS, 0)]
    table = GridTable({at: site_grid(policy, at[0], -10, np.zeros(1, dtype=np.int64)) for at in places})
    session: Any = SimpleNamespace(
        policy=policy,
        seed=1,
        step=3,
        following_context=lambda frame: SimpleNamespace(table=table),
        site_name=str,
    )
    for name in ("load_state", "backward_of"):
        monkeypatch.setattr(comparison, name, lambda *given: None)

    def calibrate(*given: object, repeats: int, **more: object) -> Calibration:
        relative = 1.0 if repeats >= 12 else 0.0
        noise = SiteNoise(relative, np.zeros(1, dtype=np.int64), 1.0, relative)
        return Calibration(dict.fromkeys(places, noise))

    monkeypatch.setattr(comparison, "calibrate", calibrate)
    replay: Any = SimpleNamespace(session=session, job=None)
    transcript: Any = None
    found = comparison.find_noisy_sites(replay, transcript, 3, 3, {3: b""}, {})
    assert [each.subject for each in found] == ([] if policy is BF16 else [str(places[0])])


def test_a_loss_that_is_noisy_excuses_no_state() -> None:
    """Its last places reach no weight: a step trained on the negative gradient was nobody's fault where they lay in its band."""
    loss, bias, weights = (
        Deviation(3, "cannot_reproduce", name, None, "", "", "noise") for name in ("loss", "gradient b", "w")
    )
    state = replace(weights, kind="mismatch", about="fingerprint")
    assert not is_excused(state, [loss])
    assert is_excused(state, [loss, bias]) and is_excused(state, [bias])
    assert is_excused(replace(state, subject="loss", about="loss"), [loss])


def test_no_noise_reaches_settings_grids_or_which_entries_a_state_has() -> None:
    """But for what an optimizer keeps of a parameter, which it may have once that had a gradient."""
    loud = [Deviation(3, "cannot_reproduce", EVERYTHING, None, "", "", "noise")]

    def first(name: str, own: bytes | None, stated: bytes | None) -> Deviation:
        states = [{} if x is None else {name: Entry(name, "U8", (len(x),), x)} for x in (own, stated)]
        (found,) = compare_states(3, *states)[1]
        return found

    groups = [b'{"groups":[%d],"plain":%d}' % each for each in ((1, 1), (20, 1), (1, 20))]
    assert not is_excused(first("document/optimizer", groups[0], groups[1]), loud)
    assert is_excused(first("document/optimizer", groups[0], groups[2]), loud)
    assert not is_excused(first("document/grids", b"a", b"b"), loud)
    assert not is_excused(first("document/optimizer", None, groups[0]), loud)
    assert not is_excused(first("model/extra", None, b"a"), loud)
    assert is_excused(first("model/counts", b"a", b"b"), loud)
    assert is_excused(first("optimizer/weight/step", None, b"a"), loud)
    same = {"document/optimizer": Entry("document/optimizer", "U8", (1,), b"x")}
    assert compare_states(3, same, same) == (0, [])


def test_a_loss_that_is_nothing_but_noise_is_nobodys_whatever_its_scale(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run that begins at its optimum: zero here, 4e-13 there, and bands of when it was measured far above both."""
    place = (Kind.LOSS, 0)
    table = GridTable({place: site_grid(FP32, Kind.LOSS, -20, np.zeros(1, dtype=np.int64))})
    session: Any = SimpleNamespace(policy=FP32, seed=1, step=4, site_name=lambda place: "loss")
    for rms, noisy in ((0.0, True), (2.0**-41, True), (2.0**-39, False)):
        noise = SiteNoise(2.0**-41, np.zeros(1, dtype=np.int64), rms, 2.0**-41)
        monkeypatch.setattr(
            comparison, "calibrate", lambda *given, noise=noise, **more: Calibration({place: noise})
        )
        found = comparison.noisy_sites_of(session, lambda context: None, table)
        assert [each.subject for each in found] == (["loss"] if noisy else [])


@pytest.mark.parametrize(
    ("declared", "noise", "noisy"),
    [
        ((-7, -7), 2.0**-30, False),
        ((-7, -19), 2.0**-30, False),  # another gradient's
        ((-7, -1000), 2.0**-30, False),  # none
        ((-7, -7), 2.0**-12, True),
        ((-7, -9), 1.5 * 2.0**-20, False),  # over the own scale less an octave, 2**-8
        ((-7, -7), 2.0**-18, False),
        ((-9, -9), 2.0**-18, True),  # the control: were the values as small, it were noise
    ],
)
def test_noise_is_relative_to_no_scale_that_the_gradient_does_not_have(
    declared: tuple[int, int], noise: float, noisy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that was not taken, or taken on other rows of a table, declares less than these values have."""
    place = (Kind.GRADIENT, 0)
    table = GridTable({place: site_grid(FP32, Kind.GRADIENT, -10, np.array(declared, dtype=np.int64))})
    session: Any = SimpleNamespace(policy=FP32, seed=1, step=4, site_name=str)
    size = 2.0**-10 if declared[0] == -9 else 2.0**-7
    measured = SiteNoise(
        noise / size, np.full(2, math.log2(size), dtype=np.int64), size, noise,
        block_rms=np.full(2, size), block_largest=np.full(2, noise),
    )  # fmt: skip
    monkeypatch.setattr(comparison, "calibrate", lambda *given, **more: Calibration({place: measured}))
    found = comparison.noisy_sites_of(session, lambda context: None, table)
    assert bool(found) is noisy, found


def test_noise_is_to_blame_from_the_declared_band_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under fp32 twice what is measured here is taken for possible, docs/adr/0025."""
    place, band = (Kind.GRADIENT, 0), 2.0**-10
    table = GridTable({place: site_grid(FP32, Kind.GRADIENT, -10, np.zeros(1, dtype=np.int64))})
    session: Any = SimpleNamespace(
        policy=FP32,
        seed=1,
        step=3,
        following_context=lambda frame: SimpleNamespace(table=table),
        site_name=lambda place: "gradient w",
    )
    replay: Any = SimpleNamespace(session=session, job=None)
    transcript: Any = None
    for name in ("load_state", "backward_of"):
        monkeypatch.setattr(comparison, name, lambda *given: None)
    for relative, noisy in ((band / 2, False), (band / 2 * 1.001, True)):
        noise = SiteNoise(relative, np.zeros(1, dtype=np.int64), 1.0, relative)
        monkeypatch.setattr(
            comparison, "calibrate", lambda *given, noise=noise, **more: Calibration({place: noise})
        )
        found = comparison.find_noisy_sites(replay, transcript, 3, 3, {3: b""}, {})
        assert [(each.kind, each.subject) for each in found] == [("cannot_reproduce", "gradient w")] * noisy


@pytest.mark.parametrize(
    ("largest", "band", "scale", "noisy"),
    [
        (2.0**-10, -9, -20, True), (2.0**-30, -9, -20, False), (2.0**-29, -9, -20, True), (2.0**-20, -9, 0, False),
        (2.0**-24, -10, -20, True), (2.0**-31, -10, 3, False),
    ],
)  # fmt: skip
def test_what_excuses_of_a_mean_of_noise_is_its_noise_over_what_was_declared(
    monkeypatch: pytest.MonkeyPatch, largest: float, band: int, scale: int, *, noisy: bool
) -> None:
    """Its own measurement gives it a scale at which its noise is within the widest band, whatever it is."""
    place = (Kind.BUFFER, 0)
    table = GridTable({place: site_grid(FP32, Kind.BUFFER, band, np.full(1, scale))})
    session: Any = SimpleNamespace(policy=FP32, seed=1, step=3, site_name=str)
    lifted = SiteNoise(2.0**-12, np.zeros(1, dtype=np.int64), 2.0**-20, largest, 512)
    monkeypatch.setattr(comparison, "calibrate", lambda *given, **more: Calibration({place: lifted}))
    found = comparison.noisy_sites_of(session, lambda context: None, table)
    assert bool(found) is noisy, found
