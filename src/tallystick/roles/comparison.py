"""What a run states beside what repeating gave: records, states, logs, and what noise explains of a difference."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from tallystick.commit.encoding import hex_float, parse_hex_float
from tallystick.commit.state import Entry, summarise
from tallystick.dispute.verdict import record_claims
from tallystick.errors import InvalidInput, Mismatch, Nondeterminism
from tallystick.execution.noise.calibration import REPEATS, calibrate
from tallystick.execution.noise.measured import SiteNoise
from tallystick.execution.noise.survey import Backward
from tallystick.execution.rounding.breaches import Violation
from tallystick.execution.rounding.grids import (
    is_noise_only,
    may_be_lifted,
    reach_of,
    scale_exponent,
    scale_exponents,
)
from tallystick.execution.session.session import Session
from tallystick.execution.snapshot import load_state, state_entries
from tallystick.execution.step import StepOutcome, backward_of, under_log
from tallystick.numerics.grid_table import GridTable, SiteGrid
from tallystick.numerics.log import Kind
from tallystick.numerics.policy import Policy
from tallystick.roles.audit_report import (
    BATCH_DIGEST,
    EVERYTHING,
    FINGERPRINT,
    MOST_NOISE,
    About,
    Deviation,
    SegmentResult,
    VerdictName,
    near,
)
from tallystick.roles.replay import Replay
from tallystick.run.documents import StepRecord
from tallystick.run.transcript import Transcript
from tallystick.store.files import RunDirectory

DOCUMENT = "document/"  # what the names of a state's settings, grids and place in the run begin with
OPTIMIZER = "document/optimizer"
LOSS = "loss"  # the name of its site
FAR_LOSS = 0.25  # of itself: noise in data carries a loss no farther
TO_EXCUSE = 12
"""Jittered repetitions before somebody is accused of a gradient: what two values leave of each other may move in one of three.

Not of a loss, whose band is hardly wider than the last places of its sum.
"""


def farther_than_trained(
    before: Mapping[str, Entry], own: Mapping[str, Entry], stated: Mapping[str, Entry]
) -> str | None:
    """Return the first tensor whose stated values lie ``MOST_NOISE`` times farther from ``own`` than training carried its kind.

    Noise above the bands may turn a gradient's direction; it does not make a step a hundred times as long. Weights are one
    kind, buffers another, and each of the optimizer's numbers: a single tensor's own gradient may be rounded to nothing here
    and not there.
    """
    apart: dict[str, tuple[str, float, float]] = {}
    carried: dict[str, float] = {}
    for name, mine in own.items():
        was, theirs = before.get(name), stated.get(name)
        if mine.dtype not in ("F32", "F64") or was is None or theirs is None:
            continue
        if not mine.dtype == was.dtype == theirs.dtype or not mine.shape == was.shape == theirs.shape:
            return name
        kind = kind_of(name)
        values = [
            np.frombuffer(entry.data, dtype="<f8" if mine.dtype == "F64" else "<f4").astype(np.float64)
            for entry in (was, mine, theirs)
        ]
        carried[kind] = max(carried.get(kind, 0.0), _distance(values[1], values[0]))
        apart[name] = kind, _distance(values[2], values[1]), _largest(values[1])
    for name, (kind, distance, largest) in apart.items():
        if distance > MOST_NOISE * carried[kind] + 2.0**-16 * largest:
            return name
    return None


def kind_of(name: str) -> str:
    """Return what kind of numbers an entry of a state holds."""
    if name.startswith("optimizer/"):
        return name.rpartition("/")[2]
    return "buffer" if "/buffer/" in name else "weight"


def _distance(x: np.ndarray, y: np.ndarray) -> float:
    """Return the largest difference; infinities and NaN of masks that are the same on both sides are none."""
    other = (x != y) & ~(np.isnan(x) & np.isnan(y))
    difference = np.abs(x[other] - y[other])
    return float(np.where(np.isnan(difference), np.inf, difference).max(initial=0.0))


def _largest(x: np.ndarray) -> float:
    return float(np.abs(x[np.isfinite(x)]).max(initial=0.0))


def may_follow_from_data(deviation: Deviation) -> bool:
    """Whether floating noise in a step's data can lead to a deviation of it.

    It leads to no other rate, to no loss far away, and to no grid that the policy does not have.
    """
    if deviation.about in ("schedule", "policy"):
        return False
    if deviation.about != "loss":
        return True
    try:
        own, stated = (parse_hex_float(text, what="loss") for text in (deviation.own, deviation.stated))
    except InvalidInput:  # a record that states none
        return False
    return abs(own - stated) <= FAR_LOSS * max(abs(own), abs(stated))


def excusable(ours: StepRecord, theirs: StepRecord) -> tuple[bool, ...]:
    """Return of two records what noise in data may explain of their difference; what it may not sorts first.

    That hyper-parameters are the same, that losses lie near each other, that the data differ, and that nothing else does.
    """
    own, stated = (str(each.loss) for each in (ours, theirs))
    loss = Deviation(ours.step, "mismatch", "loss", None, own, stated, "loss")
    same = replace(theirs, batch=ours.batch)
    reached = replace(same, loss=ours.loss, fingerprint=ours.fingerprint)
    return (
        record_claims(ours) == record_claims(reached),
        own == stated or may_follow_from_data(loss),
        ours.batch != theirs.batch,
        record_claims(ours) == record_claims(same),
    )


def with_near_rates(ours: StepRecord, theirs: StepRecord) -> StepRecord:
    """Return a record with the other one's hyper-parameters where they are the same one, as libraries compute it."""
    own = {(group, name): value for group, name, value in ours.schedule}

    def nearest(place: tuple[int, str], value: str | bool | int | None) -> str | bool | int | None:
        mine = own.get(place)
        if not (isinstance(mine, str) and isinstance(value, str)):
            return value
        numbers = (parse_hex_float(text, what=place[1]) for text in (mine, value))
        return mine if near(*numbers) else value

    return replace(theirs, schedule=tuple((g, n, nearest((g, n), value)) for g, n, value in theirs.schedule))


def compare_step(
    record: StepRecord, outcome: StepOutcome, violations: Iterable[Violation]
) -> list[Deviation]:
    """Return everything in which one repeated step differs from its record."""
    step = record.step
    found: list[Deviation] = []

    def differs(about: About, subject: str, own: str, stated: str) -> None:
        if own != stated:
            found.append(Deviation(step, "mismatch", subject, None, own, stated, about))

    differs("data", BATCH_DIGEST, outcome.batch, record.batch)
    differs("schedule", "skipped optimizer", str(outcome.skipped), str(record.skipped))
    differs("schedule", "micro-batches", str(outcome.micro_batches), str(record.micro_batches))
    found += _compare_schedule(record, outcome)
    differs("loss", "loss", hex_float(outcome.loss), str(record.loss))
    kind: VerdictName = "mismatch" if found else "log_violation"
    found += [replace(deviation, kind=kind) for deviation in violations_of(step, violations)]
    differs("fingerprint", FINGERPRINT, f"{outcome.fingerprint:016x}", record.fingerprint)
    return found


def _compare_schedule(record: StepRecord, outcome: StepOutcome) -> list[Deviation]:
    own = {(group, name): value for group, name, value in outcome.schedule}
    stated = {(group, name): value for group, name, value in record.schedule}
    found: list[Deviation] = []
    for key in sorted(own.keys() | stated.keys()):
        mine, theirs = own.get(key), stated.get(key)
        number = parse_hex_float(theirs, what=str(key)) if isinstance(theirs, str) else None
        if mine is None or number is None or not near(mine, number):
            subject = f"hyper-parameter {key[1]} of group {key[0]}"
            found.append(
                Deviation(record.step, "mismatch", subject, None, repr(mine), repr(number), "schedule")
            )
    return found


def compare_end(session: Session, directory: RunDirectory, record: StepRecord, result: SegmentResult) -> None:
    """Compare the state at the end of a segment with the committed one, element by element if it differs."""
    entries = {entry.name: entry for entry in state_entries(session)}
    result.elements = sum(int(np.prod(entry.shape)) for entry in entries.values())
    root = summarise(entries.values()).root().hex()
    if root == record.state_root:
        return
    try:
        theirs = directory.load_committed(result.end, str(record.state_root))
    except (InvalidInput, Mismatch) as problem:
        result.deviations.append(
            Deviation(
                record.step, "mismatch", "state root", None, root, f"{record.state_root} ({problem})", "state"
            )
        )
        return
    result.differing_elements, found = compare_states(record.step, entries, theirs)
    result.deviations += found


def compare_states(
    step: int, own: Mapping[str, Entry], stated: Mapping[str, Entry]
) -> tuple[int, list[Deviation]]:
    """Return how many elements of two states differ, and one deviation for each differing entry."""
    total = 0
    found: list[Deviation] = []
    for name in sorted(own.keys() | stated.keys()):
        mine, theirs = own.get(name), stated.get(name)
        if name == OPTIMIZER and mine is not None and theirs is not None:
            if (difference := _compare_optimizers(step, mine, theirs)) is not None:
                total += 1
                found.append(difference)
            continue
        if mine is None or theirs is None or (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape):
            found.append(Deviation(step, "mismatch", name, None, _form(mine), _form(theirs), "state"))
            continue
        first, count, values = _compare_entries(mine, theirs)
        if count:
            total += count
            found.append(Deviation(step, "mismatch", name, first, values[0], values[1], "state"))
    return total, found


def _compare_optimizers(step: int, mine: Entry, theirs: Entry) -> Deviation | None:
    """Return the deviation of an optimizer's document; as a whole if its groups' settings differ, None if nothing does."""
    if bytes(mine.data) == bytes(theirs.data):
        return None
    try:
        groups = [json.loads(bytes(entry.data))["groups"] for entry in (mine, theirs)]
    except (ValueError, LookupError, TypeError):
        groups = [bytes(mine.data), bytes(theirs.data)]
    if groups[0] != groups[1]:
        return Deviation(step, "mismatch", OPTIMIZER, None, "the steps' settings", "others", "state")
    return Deviation(step, "mismatch", OPTIMIZER, 0, "the steps' plain values", "others", "state")


def _form(entry: Entry | None) -> str:
    return "absent" if entry is None else f"{entry.dtype}{list(entry.shape)}"


def _compare_entries(mine: Entry, theirs: Entry) -> tuple[int, int, tuple[str, str]]:
    width = {"F32": 4, "F64": 8, "I64": 8, "I32": 4, "I16": 2}.get(mine.dtype, 1)
    kind = {"F32": "<f4", "F64": "<f8", "I64": "<i8", "I32": "<i4", "I16": "<i2"}.get(mine.dtype, "u1")
    bits = f"<u{width}" if width > 1 else "u1"
    a, b = np.frombuffer(mine.data, dtype=bits), np.frombuffer(theirs.data, dtype=bits)
    at = np.flatnonzero(a != b)
    if at.size == 0:
        return -1, 0, ("", "")
    first = int(at[0])
    x, y = np.frombuffer(mine.data, dtype=kind)[first], np.frombuffer(theirs.data, dtype=kind)[first]
    shown = (float(x).hex(), float(y).hex()) if kind[1] == "f" else (str(x), str(y))
    return first, int(at.size), shown


def find_noisy_sites(
    replay: Replay,
    transcript: Transcript,
    start: int,
    step: int,
    frames: Mapping[int, bytes],
    state: Mapping[str, Entry],
) -> list[Deviation]:
    """Return the sites where this machine's own noise at ``step``, times the policy's ``excuse``, exceeds the band declared.

    The loudest first. ``state`` is the one after ``start`` steps; the steps in between are repeated under ``frames``.
    """
    session = replay.session
    load_state(session, state)
    try:
        for before in range(start, step):
            replay.follow(transcript.record(before), frames[before])
        declared = session.following_context(frames[step]).table
        return noisy_sites_of(session, backward_of(session, replay.job), declared)
    except InvalidInput:
        return []


def noisy_sites_of(session: Session, backward: Backward, declared: GridTable) -> list[Deviation]:
    """Return the same of the session's next step, whose passes are ``backward`` and whose bands those of ``declared``.

    Raises:
        InvalidInput: the step does not fit its data.
    """
    step = session.step
    try:
        measure = partial(calibrate, session, backward, seed=session.seed + 1, to_excuse=True)
        with under_log("where noise is measured"):
            noises = measure(repeats=REPEATS).noise
            if not session.policy.autocast:
                often = measure(repeats=TO_EXCUSE).noise
                noises |= {place: noise for place, noise in often.items() if place[0] == Kind.GRADIENT}
    except Nondeterminism as problem:
        return [
            Deviation(
                step,
                "cannot_reproduce",
                EVERYTHING,
                None,
                str(problem),
                "that noise is below the bands",
                "noise",
            )
        ]
    found: list[tuple[float, Deviation]] = []
    for place, noise in sorted(noises.items()):
        grid = declared.sites.get(place)
        if grid is None:
            grid = SiteGrid(0, session.policy.decision_band[0], 0) if place[0] == Kind.DECISION else None
        if place[0] == Kind.STATE or grid is None or is_noise_only(grid):
            continue
        if place[0] == Kind.LOSS and session.policy.excuse * noise.largest >= noise.rms:  # its scale is, too
            own, stated = f"noise {noise.largest:.3g} of {noise.rms:.3g}", "more than its noise"
            noisy = Deviation(step, "cannot_reproduce", session.site_name(place), None, own, stated, "noise")
            found.append((1.0, noisy))
            continue
        is_of_values = place[0] == Kind.BUFFER and noise.rms > 0.0
        relative = _of_buffer(session.policy, noise, grid) if is_of_values else _over_scales(noise, grid)
        if session.policy.excuse * relative > (band := reach_of(grid)):
            own, stated = f"noise {relative:.3g} of its scale", f"band {band:.3g}"
            noisy = Deviation(step, "cannot_reproduce", session.site_name(place), None, own, stated, "noise")
            found.append((relative / band, noisy))
    return [noisy for _, noisy in sorted(found, key=lambda each: -each[0])]


def _over_scales(noise: SiteNoise, grid: SiteGrid) -> float:
    """Return the largest deviation over the scales declared, those that bands are relative to.

    But over this machine's own, less an octave, where that is more: no honest recorder declares less than a block's values
    have, and over what another gradient has, or none, noise is as large as one likes.
    """
    if noise.block_largest is None or noise.block_largest.size != grid.scales.size:
        return noise.relative
    scales = grid.scales.astype(np.int64)
    if noise.block_rms is not None and noise.block_rms.size == scales.size:
        scales = np.maximum(scales, scale_exponents(noise.block_rms) - 1)
    with np.errstate(over="ignore"):
        return float(np.max(noise.block_largest * np.exp2(-scales.astype(np.float64))))


def _of_buffer(policy: Policy, noise: SiteNoise, grid: SiteGrid) -> float:
    """Return the same of a buffer: over the scale of its values here, or the one declared where that may be its noise's."""
    scale = scale_exponent(noise.rms)
    if may_be_lifted(policy, Kind.BUFFER, grid):
        scale = max(scale, int(grid.scales[0]))
    return math.ldexp(noise.largest, -scale)


def is_excused(deviation: Deviation, noisy: Iterable[Deviation]) -> bool:
    """Whether noise above the declared bands at the sites ``noisy`` can be the cause of ``deviation``.

    A flipped branch and an activation reach everything; a gradient or a buffer reaches its own tensor, and so the state's
    fingerprint; a loss reaches nothing but itself; nothing reaches the data, the schedule, what the policy allows, a state's
    documents, or which entries of which form it has.

    Where noise cannot be measured a loss may lie however far away: a branch on a number read out of a tensor leads to any.
    """
    names = [site.subject for site in noisy]
    if not names or deviation.is_evidence or deviation.about in ("data", "schedule", "policy"):
        return False
    if deviation.about == "state" and _is_of_form(deviation):
        return False
    if (
        EVERYTHING in names
        or any(name.startswith(("decision", "activation")) for name in names)
        or (deviation.about == "fingerprint" and set(names) != {LOSS})
    ):
        return True
    return any(_is_about(name.split(" ", 1)[-1], deviation.subject) for name in names)


def _is_of_form(deviation: Deviation) -> bool:
    """Whether a state's deviation is in its settings, grids or place in the run, or in which entries of which form it has.

    But for what the optimizer keeps of a parameter: that may hang on whether it ever had a gradient.
    """
    if deviation.subject == OPTIMIZER:
        return deviation.element is None
    is_entry = "/" in deviation.subject and not deviation.subject.startswith("optimizer/")
    return deviation.subject.startswith(DOCUMENT) or (is_entry and deviation.element is None)


def _is_about(name: str, subject: str) -> bool:
    """Whether ``subject`` has the whole of ``name`` in it: ``1.weight`` is no part of ``model/11.weight``."""
    return re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.])", subject) is not None


def violations_of(step: int, violations: Iterable[Violation]) -> list[Deviation]:
    """Return what a log's violations at ``step`` are as deviations."""
    return [
        Deviation(
            step, "log_violation", violation.site.removeprefix(f"step {step}: "),
            violation.element if violation.element >= 0 else None, violation.rule, "that the log is honest",
            "policy" if violation.is_of_policy else "log",
        )
        for violation in violations
    ]  # fmt: skip
