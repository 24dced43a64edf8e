"""A survey of one step: it agrees with calibration, leaves the session alone, and its files are read strictly."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from tallystick.errors import InvalidInput, ProtocolViolation
from tallystick.execution.noise import calibration
from tallystick.execution.noise.calibration import calibrate
from tallystick.execution.noise.survey import (
    JITTER,
    Pass,
    Reference,
    elsewhere,
    read_pass,
    read_reference,
    survey_step,
    write_pass,
    write_reference,
)
from tallystick.execution.snapshot import state_entries
from tallystick.execution.step import backward_of
from tallystick.numerics.log import Kind
from tallystick.numerics.policy import POLICIES, find_policy

MODELS = pytest.mark.parametrize("model", ["convolutions", "transformer", "sparse", "frozen"])


def alone(session: Any, job: Any, **more: Any) -> Any:
    return survey_step(
        session,
        backward_of(session, job),
        repeats=2,
        seed=0,
        others=more.get("others", lambda reference: ()),
        advance=lambda what: None,
    )


@MODELS
@pytest.mark.parametrize("policy", ["fp64", "fp32"])
def test_a_survey_finds_what_calibration_finds_and_leaves_the_session_as_it_was(
    model: str, policy: str, zoo: Any, open_job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By jitter alone: whether float64 says more of a gradient that is nothing but noise hangs on the processor."""
    monkeypatch.setattr(calibration, "in_float64", lambda session: nullcontext())
    job = zoo.build({"model": model, "accumulation": "2"})
    session = open_job(job, POLICIES[policy])
    before = {entry.name: bytes(entry.data) for entry in state_entries(session)}
    found = calibrate(session, backward_of(session, job))
    survey = alone(session, job)
    assert {entry.name: bytes(entry.data) for entry in state_entries(session)} == before
    assert all(p.grad is None for p in job.model.parameters())
    assert survey.table == found.table
    compared = 0
    for place, noise in found.noise.items():
        measured = survey.sites.get(place)
        if measured is None or place[0] == Kind.STATE:
            continue
        compared += 1
        assert measured.relative.get(JITTER, 0.0) == noise.relative
        if place[0] == Kind.GRADIENT:
            assert measured.in_scale[JITTER].largest == noise.relative
            assert measured.in_rms[JITTER].count == 2 * measured.numel
    assert compared > 3


def test_distributions_are_over_the_rms_and_the_ulp(zoo: Any, open_job: Any) -> None:
    job = zoo.build({})
    session = open_job(job, POLICIES["fp32"])

    def others(reference: Reference) -> Any:
        plain = reference.plain
        moved = {n: g.double() + 0.25 * g.double().square().mean().sqrt() for n, g in plain.gradients.items()}
        yield "moved", Pass(moved, plain.buffers, plain.loss, plain.samples)

    survey = alone(session, job, others=others)
    checked = 0
    for place, measured in survey.sites.items():
        if place[0] != Kind.GRADIENT or not measured.noise.rms:
            continue
        checked += 1
        spread = measured.in_rms["moved"]
        assert spread.largest == pytest.approx(0.25, rel=1e-6)
        assert spread.quantile(0.5) == pytest.approx(0.25, rel=0.13)
        # An ulp of a value as large as the rms is 2**-23 to 2**-24 of it.
        assert measured.in_ulp["moved"].quantile(0.01) < 0.25 * 2**24 < measured.in_ulp["moved"].largest * 8
        assert measured.relative["moved"] == pytest.approx(
            float((0.25 * measured.noise.rms * np.exp2(-measured.noise.scales.astype(float))).max()), rel=1e-6
        )
    assert checked > 3


@MODELS
def test_a_pass_elsewhere_goes_through_files_and_the_same_arithmetic_has_no_noise(
    model: str, zoo: Any, open_job: Any, tmp_path: Path
) -> None:
    policy = find_policy("fp32", optimizer_arithmetic="general")
    job, twin = (zoo.build({"model": model}) for _ in range(2))
    session, other = open_job(job, policy), open_job(twin, policy)
    buffers = {site.name: site.ordinal for site in session.sites if site.kind == Kind.BUFFER}

    def others(reference: Reference) -> Any:
        write_reference(tmp_path / "reference", reference)
        branches, slices = read_reference(tmp_path / "reference", len(other.parameters))
        write_pass(tmp_path / "pass", elsewhere(other, backward_of(other, twin), branches, slices), buffers)
        yield "twin", read_pass(tmp_path / "pass", buffers)

    survey = alone(session, job, others=others)
    seen = [(m.name, m.relative["twin"], m.relative.get(JITTER)) for m in survey.sites.values() if m.in_rms]
    assert {Kind(place[0]) for place, m in survey.sites.items() if "twin" in m.relative} >= {
        Kind.GRADIENT,
        Kind.LOSS,
        Kind.STATE,
    }
    assert all(noise == 0.0 for _, noise, _ in seen)
    assert sum(bool(jittered) for _, _, jittered in seen) > 4, (
        "the control: jitter is seen by the same comparison"
    )


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"loss": torch.zeros(2)}, "holds no loss"),
        ({}, "holds no loss"),
        ({"loss": torch.zeros(1), "weights/0": torch.zeros(1)}, "weights/0 is not asked for"),
        ({"loss": torch.zeros(1), "gradient/x": torch.zeros(1)}, "gradient/x is not asked for"),
        ({"loss": torch.zeros(1), "new/0": torch.zeros(1)}, "new/0 is not asked for"),
        ({"loss": torch.zeros(1), "buffer/7": torch.zeros(1)}, "buffer/7 is not asked for"),
    ],
)
def test_an_answer_that_was_not_asked_for_is_refused(tensors: Any, reason: str, tmp_path: Path) -> None:
    safetensors.torch.save_file(tensors, tmp_path / "pass")
    with pytest.raises(InvalidInput, match=reason):
        read_pass(tmp_path / "pass", {"model/buffer/a": 0})


def test_what_is_no_safetensors_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pass").write_bytes(b"\x80\x04\x95pickle")
    for path in (tmp_path / "pass", tmp_path / "absent"):
        with pytest.raises(InvalidInput, match="not a safetensors file"):
            read_pass(path, {})
        with pytest.raises(InvalidInput, match="not a safetensors file"):
            read_reference(path, 3)


def test_an_answer_of_another_shape_is_refused(zoo: Any, open_job: Any) -> None:
    job = zoo.build({})
    session = open_job(job, POLICIES["fp32"])

    def others(reference: Reference) -> Any:
        plain = reference.plain
        first = min(plain.gradients)
        cut = {**plain.gradients, first: plain.gradients[first].reshape(-1)}
        yield "cut", Pass(cut, plain.buffers, plain.loss, plain.samples)

    with pytest.raises(InvalidInput, match=r"cut: .* has shape"):
        alone(session, job, others=others)
    with pytest.raises(ProtocolViolation, match="no step is open"):
        _ = session.open_step
    alone(session, job)
