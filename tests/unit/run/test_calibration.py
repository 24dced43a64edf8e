"""The document that a calibration writes: one encoding, and everything else refused with its reason."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tallystick.commit.encoding import canonical_json
from tallystick.errors import InvalidInput
from tallystick.run.calibration import (
    LIMIT,
    MOST_SITES,
    CalibrationChoice,
    SiteChoice,
    parse_calibration,
)

CHOICE = CalibrationChoice(
    policy="fp32",
    parameters={"gradient_floor": -4, "safety": 4, "recalibrate_every": 50},
    job="tallystick.jobs.digits",
    source_digest="ab" * 32,
    settings={"width": "8"},
    seed=3,
    steps=(0, 32),
    repeats=2,
    profiles=("sse4,threads=1",),
    log_bits=0.25,
    freedom=2.0**-10,
    sites=(
        SiteChoice("gradient", "head.weight", -14, -5, {"jitter": 1e-6, "sse4,threads=1": 0.0}),
        SiteChoice("decision", "decision 0", None, None, {}),
    ),
)


def test_a_choice_comes_back_as_it_was() -> None:
    assert parse_calibration(CHOICE.encode()) == CHOICE


def changed(**fields: object) -> bytes:
    return canonical_json({**json.loads(CHOICE.encode()), **fields})


SITE = json.loads(CHOICE.encode())["sites"][0]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "calibration"),
        (CHOICE.encode() + b"\n", "calibration"),
        (CHOICE.encode()[:-1], "calibration"),
        (b"[" * 100000, "calibration"),
        (b" " * (LIMIT + 1), str(LIMIT)),
        (changed(format="tallystick/calibration/2"), "format"),
        (changed(extra=1), "unknown"),
        (changed(parameters={"safety": "4"}), "'safety' must be an integer"),
        (changed(parameters={"safety": True}), "'safety' must be an integer"),
        (changed(policy=4), "policy must be a string"),
        (changed(sites=[1]), "site"),
        (changed(sites=[SITE] * (MOST_SITES + 1)), f"must have 0 to {MOST_SITES} items"),
        (changed(sites=[{**SITE, "kind": "weights"}]), "decision, gradient, loss, state, is 'weights'"),
        (changed(sites=[{**SITE, "name": "x" * 600}]), "must have 0 to 512 characters, has 600"),
        (changed(sites=[{**SITE, "largest": {"jitter": "-0x1.0000000000000p+0"}}]), "must be at least 0, is"),
        (changed(sites=[{**SITE, "largest": {"jitter": "nan"}}]), "must be at least 0, is"),
        (changed(sites=[{**SITE, "largest": {"jitter": "1e-6"}}]), "is not a hexadecimal float"),
        (changed(sites=[{**SITE, "band": "-14"}]), "band must be an integer"),
        (changed(measured={"profiles": [], "repeats": 0, "steps": [0]}), "repeats must be 1 to"),
        (changed(measured={"profiles": [], "repeats": 1, "steps": []}), "steps must be ascending"),
        (changed(measured={"profiles": [], "repeats": 1, "steps": [3, 3]}), "steps must be ascending"),
        (changed(measured={"profiles": [], "repeats": 1, "steps": [-1]}), "steps must be ascending"),
    ],
)
def test_anything_else_is_refused_with_its_reason(data: bytes, reason: str) -> None:
    with pytest.raises(InvalidInput, match="calibration") as refused:
        parse_calibration(data)
    assert reason in str(refused.value)
    assert len(str(refused.value)) < 400


def test_two_choices_that_differ_have_two_encodings() -> None:
    assert replace(CHOICE, seed=4).encode() != CHOICE.encode()
