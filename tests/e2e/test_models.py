"""Models of many kinds, recorded here and followed under other instruction sets: no byte of their state differs."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tallystick.errors import Nondeterminism
from tallystick.evidence.run_verifier import verify_run
from tallystick.execution.determinism import Profile, parse_profile
from tallystick.execution.job import find_source
from tallystick.execution.step import map_tensors
from tallystick.numerics.policy import find_policy
from tallystick.reports.run import read_run
from tallystick.roles import auditor
from tallystick.roles.auditor import audit
from tallystick.roles.trainer import Order, record
from tallystick.store.files import RunDirectory

MODELS = Path(__file__).parent / "models"
OTHER = parse_profile("sse4,threads=1")
MORE = {"avx2": parse_profile("avx2,threads=2"), "jitter": parse_profile("native,jitter")}
FAMILIES = ["vit", "t5", "lstm", "mixture_of_experts", "unet", "lora", "wasserstein_gan"]
SHORT, LONG = 12, 100
ENDS = {"ranked_pairs": 48}  # where training diverges by itself: plain training does too
CASES: dict[str, tuple[str, dict[str, str]]] = {
    "mixture_of_experts": ("mixture_of_experts", {}),
    "masked_autoencoder": ("masked_autoencoder", {}),
    "t5_buckets": ("relative_positions", {}),
    "t5": ("relative_positions", {"model": "transformers"}),
    "constant_channel": ("constant_channel", {}),
    "average_0.9": ("averaged_weights", {"decay": "0.9"}),
    "average_0.9999": ("averaged_weights", {"decay": "0.9999"}),
    "average_by_hand": ("averaged_weights", {"decay": "0.9999", "by": "hand"}),
    "wasserstein_gan": ("wasserstein_gan", {}),
    "graph_network": ("graph_network", {}),
    "tied_text": ("small_text", {}),
    "growing_inputs": ("growing_inputs", {}),
    "gated_halves": ("gated_halves", {}),
    "max_aggregation": ("max_aggregation", {}),
    "self_distilled": ("self_distilled", {}),
    "answer_bank": ("answer_bank", {}),
    "zero_head": ("zero_head", {}),
    "ranked_pairs": ("ranked_pairs", {"seed": "11"}),
    "losses_in_turn": ("losses_in_turn", {}),
    "offset_at_first": ("offset_at_first", {}),
    "frozen_weights": ("frozen_parts", {}),
    "frozen_biases": ("frozen_parts", {"frozen": "bias"}),
    "buckets_copied": ("whole_numbers", {"how": "copy"}),
    "buckets_cast": ("whole_numbers", {"how": "long"}),
    "buckets_floored": ("whole_numbers", {"how": "floor"}),
    "centred_twice": ("centred_twice", {}),
    "centred_slowly": ("centred_twice", {"rate": "1e-6"}),
    **{family: ("families", {"family": family}) for family in ("vit", "lstm", "unet", "lora")},
}
LED = {("self_distilled", "fp32"): 0, ("constant_channel", "fp32"): LONG}
"""What is nothing but noise may lead these runs in so many steps and more: one that begins at its optimum; and the scales of six
channels before a batch norm, which undoes them, so that their whole gradient is what cancels (docs/adr/0026, "What is open")."""
Run = Callable[[str, str, int], RunDirectory]


def job_file(case: str) -> str:
    return str(MODELS / f"{CASES[case][0]}.py")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Run:
    @functools.cache
    def made(case: str, policy: str, steps: int) -> RunDirectory:
        directory = RunDirectory(tmp_path_factory.mktemp(case.replace(".", "_")) / "run")
        source = find_source(job_file(case))
        wanted = Order(source, CASES[case][1], find_policy(policy), steps=steps, checkpoint_every=steps)
        record(wanted, directory)
        return directory

    return made


def answer(run: str, case: str, policy: str, steps: int, *, jitter: bool = False) -> dict[str, Any]:
    """Return what an audit here says, and a digest of the weights that plain training from the same ones leads to here."""
    directory = RunDirectory(Path(run))
    report = audit(directory, find_source(job_file(case)), jitter=jitter)
    trained = _trained_plainly(directory, case, torch.float64 if policy == "fp64" else torch.float32, steps)
    return {
        "verdict": report.verdict, "differing": report.differing_elements, "steps": report.steps,
        "first": str(report.first), "plain": trained, "moved": report.freedom.moved + report.freedom.decisions_moved,
    }  # fmt: skip


def elsewhere(profile: Profile, *arguments: object) -> dict[str, Any]:
    """Return ``answer(*arguments)`` from a process under ``profile``."""
    code = f"import json, sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); from test_models import answer; "
    code += f"print(json.dumps(answer(*{arguments!r}, jitter={profile.jitter})))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, check=False, env={**os.environ, **profile.environment()},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def _trained_plainly(run: RunDirectory, case: str, dtype: torch.dtype, steps: int) -> str:
    job = find_source(job_file(case)).build(CASES[case][1])
    entries = run.load_checkpoint(0)
    for module in (job.model, *job.extra.values()):
        module.to(dtype)
    with torch.no_grad():
        for name, p in job.model.named_parameters():
            p.copy_(
                torch.from_numpy(np.frombuffer(entries[f"model/{name}"].data, "<f4").copy()).reshape(p.shape)
            )
    for module in job.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # masks are not what is to differ
        elif isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0

    def place(_: str, tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    for step in range(steps):
        job.loss(job.model, map_tensors(job.batch(step), place, "batch")).backward()
        job.optimizer.step()
        job.model.zero_grad()
    state = hashlib.sha256()
    for p in job.model.parameters():
        state.update(p.detach().numpy().tobytes())
    return state.hexdigest()


def follows(recorded: Run, case: str, policy: str, steps: int) -> None:
    if case == "t5":
        pytest.importorskip("transformers")
    run = recorded(case, policy, steps)
    found = elsewhere(OTHER, str(run.path), case, policy, steps)

    assert (found["differing"], found["steps"]) == (0, steps), found
    is_led = steps >= LED.get((case, policy), steps + 1)
    assert found["verdict"] in ({"match", "not_accepted"} if is_led else {"match"}), found
    # Control: without the log this pair ends elsewhere; else it shows nothing.
    dtype = torch.float64 if policy == "fp64" else torch.float32
    if _trained_plainly(run, case, dtype, steps) == found["plain"]:
        pytest.skip("inconclusive: this processor trains alike under both instruction sets")


@pytest.mark.parametrize(
    ("case", "policy"),
    [(case, "fp32") for case in list(CASES)[::4]] + [(case, "fp64") for case in list(CASES)[1::8]],
)
def test_models_of_many_kinds_are_followed(recorded: Run, case: str, policy: str) -> None:
    """A quarter of them, and an eighth under ``fp64``; the slow test has both of all, for a hundred steps."""
    follows(recorded, case, policy, SHORT)


@pytest.mark.parametrize("policy", ["fp32", "fp64", "bf16"])
def test_a_slow_average_goes_where_it_would_without_rounding(policy: str, tmp_path: Path) -> None:
    run, steps, decay = RunDirectory(tmp_path / "run"), 30, 0.9999
    source = find_source(str(MODELS / "averaged_weights.py"))
    settings = {"decay": str(decay), "by": "hand"}
    record(Order(source, settings, find_policy(policy), steps=steps, checkpoint_every=1), run)
    states = [run.load_checkpoint(step) for step in range(steps + 1)]
    names = [name for name, _ in source.build(settings).model.named_parameters()]

    def values(step: int, entry: str) -> np.ndarray:
        return np.frombuffer(states[step][entry].data, "<f4").astype(np.float64)

    off = way = 0.0  # of all tensors: one that hardly moves shows how far float32 itself rounds
    for name in names:
        start = average = values(0, f"extra/average/{name}")
        for step in range(steps):
            average = decay * average + (1 - decay) * values(step + 1, f"model/{name}")
        off += float(np.square(values(steps, f"extra/average/{name}") - average).sum())
        way += float(np.square(average - start).sum())
    assert off <= 0.01**2 * way


@pytest.mark.parametrize("policy", ["fp32", "fp64", "leaf"])
@pytest.mark.parametrize(
    "case",
    [
        "growing_inputs",
        "gated_halves",
        "max_aggregation",
        "buckets_copied",
        "buckets_cast",
        "buckets_floored",
        "centred_twice",
    ],
)
@pytest.mark.parametrize("jitter", [False, True])
def test_models_that_were_accused_or_refused_are_followed(
    recorded: Run, case: str, policy: str, jitter: bool
) -> None:
    report = audit(recorded(case, policy, SHORT), find_source(job_file(case)), jitter=jitter)
    assert report.verdict == "match", report.first


@pytest.mark.parametrize("policy", ["fp32", "fp64"])
def test_a_run_that_was_calibrated_early_verifies_and_its_log_is_counted(recorded: Run, policy: str) -> None:
    run = recorded("growing_inputs", policy, SHORT)

    found, log = verify_run(run), read_run(run).log

    assert found.verdict == "match", [check.detail for check in found.checks]
    assert log is not None
    assert log.kinds["calibration"].payloads > 0, "no gradient outgrew its noise: this test shows nothing"
    assert log.kinds["calibration"].entries == 0


FLAT = """
import torch
from torch import nn
from tallystick.execution.job import Job

def batch(step):
    x = torch.randn(16, 16)
    return (torch.ones_like(x) if step in (FLAT_STEPS) else x), torch.arange(16) % 4

def build(settings):
    model = nn.Sequential(nn.Linear(16, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    return Job(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3), batch=batch, steps=8,
               loss=lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1]))
"""


def test_a_decision_on_zeros_that_only_noise_moves_accuses_nobody(tmp_path: Path) -> None:
    """A batch norm of constants gives zeros here, and whatever is left of their cancellation elsewhere."""
    path = tmp_path / "flat.py"

    def order() -> Order:
        return Order(find_source(str(path)), {}, find_policy("fp32"), steps=8, checkpoint_every=8)

    path.write_text(FLAT.replace("FLAT_STEPS", "0,"))
    with pytest.raises(
        Nondeterminism, match="its input is all zeros, and something else under last-bit noise"
    ):
        record(order(), RunDirectory(tmp_path / "first"))
    path.write_text(FLAT.replace("FLAT_STEPS", "6,"))
    run = RunDirectory(tmp_path / "later")
    record(order(), run)
    report = audit(run, find_source(str(path)), jitter=True)
    # Every byte follows, as zeros keep their scale; no gradient here is noise that would have that step measured.
    assert report.verdict == "match", report.first
    assert all(segment.differing_elements == 0 for segment in report.segments)


@pytest.mark.parametrize("policy", ["fp32", "fp64"])
def test_a_gradient_that_was_quieter_in_between_keeps_its_band(policy: str, tmp_path: Path) -> None:
    """Its trainer does: the floor cannot fall. An auditor who went by the noise in between did not accept it, in step 40."""
    source, run = find_source(str(MODELS / "quiet_between.py")), RunDirectory(tmp_path / "run")
    record(Order(source, {"steps": "44"}, find_policy(policy), steps=44, checkpoint_every=44), run)
    report = audit(run, source)
    assert report.verdict == "match", report.first


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["fp32", "fp64"])
@pytest.mark.parametrize("case", CASES)
def test_models_of_many_kinds_are_followed_for_long(recorded: Run, case: str, policy: str) -> None:
    follows(recorded, case, policy, ENDS.get(case, LONG))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["fp32", "fp64"])
@pytest.mark.parametrize("case", FAMILIES)
@pytest.mark.parametrize("profile", MORE)
def test_models_of_each_family_are_followed_under_more_profiles(
    recorded: Run, profile: str, case: str, policy: str
) -> None:
    if case == "t5":
        pytest.importorskip("transformers")
    found = elsewhere(MORE[profile], str(recorded(case, policy, LONG).path), case, policy, LONG)
    assert (found["verdict"], found["differing"], found["steps"]) == ("match", 0, LONG), found
    if not found["moved"]:  # control: without the log the follower's own roundings would have led elsewhere
        pytest.skip(
            "inconclusive: no rounding or decision of this follower is another one than the trainer's"
        )


@pytest.mark.parametrize("policy", ["fp32", "fp64"])
def test_a_segment_is_held_against_the_noise_of_the_calibration_before_it(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bands are as wide as noise was then; the step that it begins with has a thousandth of that."""
    run, source = RunDirectory(tmp_path / "run"), find_source(job_file("offset_at_first"))
    record(Order(source, {}, find_policy(policy), steps=24, checkpoint_every=6), run)

    segment, whole = audit(run, source, steps=(12, 18)), audit(run, source)

    assert (segment.verdict, whole.verdict) == ("match", "match"), segment.first
    assert segment.steps == 6
    assert segment.freedom.elements * 4 == whole.freedom.elements
    # Control: by what its own first step has, it is not.
    monkeypatch.setattr(auditor, "measured_before", lambda *given: None)
    assert audit(run, source, steps=(12, 18)).verdict == "not_accepted"
