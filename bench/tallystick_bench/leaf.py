"""Measurements of policy leaf, each in a process of its own: how much is logged, in which form, and how often it counts.

Each function returns plain numbers; ``bench`` judges them.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from tallystick.errors import Mismatch
from tallystick.execution.dispatch.jitter import Jitter
from tallystick.execution.job import Job, find_source
from tallystick.execution.noise.calibration import calibrate
from tallystick.execution.rounding.context import RecordingContext
from tallystick.execution.rounding.grids import ACTIVATIONS
from tallystick.execution.rounding.leaves import LeafSites
from tallystick.execution.session.session import Session
from tallystick.execution.step import backward_of, run_step
from tallystick.jobs.resnet50 import ResNet
from tallystick.numerics.dense import encode_dense
from tallystick.numerics.grid_table import GridTable
from tallystick.numerics.log import Kind, SiteAddress, SparseEntries, decode, encode
from tallystick.numerics.policy import Policy, find_policy

DIRECTIONS: Mapping[Kind, str] = {Kind.ACTIVATION: "forward", Kind.ACTIVATION_GRADIENT: "backward"}
LOUD = 2.0**17  # noise in units of the last place, so that straddles are seen on a small network
LOUD_FLOOR = (
    -20
)  # of the quanta, above that noise for every b_r, so that all quanta grow with each bit removed


def entries() -> dict[str, dict[str, int]]:
    """Return the elements of all sites of one step, forward and backward, from shapes alone (meta device).

    ResNet-50 for 32x32 images at batch 64; GPT-2 (124 M) at 8 sequences of 63 tokens, if transformers is there. Its
    attention calls dropout as a function; ``attention_dropout`` holds what a module in its place would add, both ways.
    """
    with torch.device("meta"):
        model = ResNet(64, (3, 4, 6, 3)).double()
    images = torch.empty(64, 3, 32, 32, dtype=torch.float64, device="meta")
    found = {"resnet50": _counted(model, lambda m: m(images))}
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError:
        return found
    config = GPT2Config(use_cache=False, attn_implementation="eager")  # pyright: ignore[reportCallIssue]: reaches the base class
    with torch.device("meta"):
        language = GPT2LMHeadModel(config).train().double()
    tokens = torch.zeros(8, 63, dtype=torch.int64, device="meta")
    mask = torch.zeros(8, 1, 63, 63, dtype=torch.float64, device="meta")
    found["gpt2"] = _counted(language, lambda m: m(input_ids=tokens, attention_mask=mask).logits)
    found["gpt2"]["attention_dropout"] = 2 * 12 * 8 * 12 * 63 * 63
    return found


class _Passing:
    """A context that rounds nothing."""

    def activation(self, kind: Kind, ordinal: int, x: Tensor, *, name: str) -> Tensor:
        return x


def _counted(model: nn.Module, output: Any) -> dict[str, int]:
    sites = LeafSites(model)
    with sites.rounding(_Passing(), 0):
        torch.autograd.backward(output(model).sum())
    found = dict.fromkeys(DIRECTIONS.values(), 0)
    for (kind, _), size in sites.sizes.items():
        found[DIRECTIONS[Kind(kind)]] += size
    return found


@dataclass
class _SizingContext(RecordingContext):
    """Keeps the log of activations in both forms."""

    sizes: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])
    held: dict[tuple[str, str], list[bytes]] = field(default_factory=dict[tuple[str, str], list[bytes]])

    def activation(self, kind: Kind, ordinal: int, x: Tensor, *, name: str) -> Tensor:
        out = super().activation(kind, ordinal, x, name=name)
        payload = self.payloads.get(SiteAddress(self.rank, self._micro_batch, kind, ordinal))
        n = x.numel()
        logged = SparseEntries.none(n, 1) if payload is None else decode(payload, n, 1)
        way = DIRECTIONS[kind]
        found = self.sizes.setdefault(way, {"elements": 0, "entries": 0})
        found["elements"] += n
        found["entries"] += len(logged)
        self.held.setdefault((way, "sparse"), []).append(encode(logged) if len(logged) else b"")
        self.held.setdefault((way, "dense"), []).append(encode_dense(logged))
        return out

    def measured(self) -> dict[str, dict[str, int]]:
        """Return elements, entries and bytes by direction; a direction's sites are compressed together."""
        for (way, form), parts in self.held.items():
            whole = b"".join(parts)
            self.sizes[way][form] = len(whole)
            self.sizes[way][f"{form}_zlib"] = len(zlib.compress(whole, 6))
        return self.sizes


def log_forms(
    job: str, b_r: int, tau: str, steps: int, settings: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the size of the last of ``steps`` steps' activation log: sparse and dense, plain and compressed."""
    source, policy = find_source(job), find_policy("leaf", b_r=b_r, tau=tau)
    built = source.build(dict(settings or {}))
    session = Session(
        built.model, built.optimizer, policy=policy, seed=0, scheduler=built.scheduler, extra=built.extra,
        smooth=frozenset(built.smooth), follows_up=built.after_step is not None,
    )  # fmt: skip
    session.prepare()
    try:
        before, sizes = GridTable(), dict[str, dict[str, int]]()
        thresholds: dict[str, dict[str, float]] = {}
        for step in range(steps):
            if session.is_calibration_step(step):
                found = calibrate(session, backward_of(session, built))
                session.table = found.table
                thresholds = thresholds or _by_kind(found.thresholds)
                before = before if step else session.table
            base = GridTable() if session.is_calibration_step(step) else session.base
            context = _SizingContext(policy, before, current=session.table, base=base)
            run_step(session, built, context)
            context.finish()
            session.settle(context)
            before, sizes = context.table, context.measured()
        return {"sizes": sizes, "thresholds": thresholds}
    finally:
        session.close()


def _by_kind(thresholds: list[Any]) -> dict[str, dict[str, float]]:
    """Return, for each kind of layer and direction, the smallest thresholds and the mean divergence in quanta."""
    found: dict[str, dict[str, float]] = {}
    for one in thresholds:
        name = f"{one.layer} {'gradient' if one.gradient else 'output'}"
        kept = found.setdefault(name, {"observed": 0.5, "closed": 0.5, "divergence": 0.0, "straddles": 0})
        kept["observed"] = min(kept["observed"], 0.25 if one.observed is None else one.observed)
        kept["closed"] = min(kept["closed"], one.closed)
        kept["divergence"] = max(kept["divergence"], one.mean)
        kept["straddles"] += one.straddles
    return found


def corrections(steps: int) -> list[dict[str, int]]:
    """Return, for ``b_r`` from 32 down to 26, how many elements a follower took from the log in ``steps`` steps.

    A small network without exact ties, followed under noise of ``LOUD`` last places in forward and backward pass, so
    that there is something to count. The floor of all quanta lies above that noise.

    Raises:
        Mismatch: a step was not followed exactly.
    """
    found: list[dict[str, int]] = []
    for b_r in range(32, 25, -1):
        policy = find_policy("leaf", b_r=b_r)
        assert policy.activation is not None
        policy = replace(policy, activation=replace(policy.activation, lowest_floor=LOUD_FLOOR))
        frames, prints, first = _recorded_loudly(policy, steps)
        found.append({"b_r": b_r, "corrections": _followed_loudly(policy, frames, prints, first)})
    return found


def _small_job() -> Job:
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 96), nn.Tanh(), nn.LayerNorm(96), nn.Linear(96, 12))
    return Job(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01), steps=100,
        batch=lambda step: torch.randn(256, 12, generator=torch.Generator().manual_seed(100 + step)),
        loss=lambda m, x: (m(x) - torch.cos(3.0 * x)).square().mean(),
    )  # fmt: skip


def _small_session(job: Job, policy: Policy, jitter: bool) -> Session:
    """A session whose forward and backward passes alone are loud: portable arithmetic has no noise."""
    noise = Jitter(5, LOUD) if jitter else None
    session = Session(job.model, job.optimizer, policy=policy, seed=1, jitter=noise)
    session.prepare()
    return session


def _recorded_loudly(policy: Policy, steps: int) -> tuple[list[bytes], list[int], GridTable]:
    job = _small_job()
    session = _small_session(job, policy, jitter=False)
    frames: list[bytes] = []
    prints: list[int] = []
    first = GridTable()
    for step in range(steps):
        before = session.table
        if session.is_calibration_step(step):
            session.table = calibrate(session, backward_of(session, job), seed=3, units=LOUD).table
            if not step:
                before = first = session.table
        context = session.recording_context(before)
        prints.append(run_step(session, job, context).fingerprint)
        frames.append(context.finish())
        session.settle(context)
    session.close()
    return frames, prints, first


def _followed_loudly(policy: Policy, frames: list[bytes], prints: list[int], first: GridTable) -> int:
    job = _small_job()
    session = _small_session(job, policy, jitter=True)
    session.table = first
    total = 0
    for step, frame in enumerate(frames):
        context = session.following_context(frame)
        outcome = run_step(session, job, context)
        context.finish()
        session.settle(context)
        if outcome.fingerprint != prints[step] or context.violations:
            raise Mismatch(f"b_r {session.policy.parameters()['b_r']}: step {step} was not followed exactly")
        total += sum(site.moved for (kind, _), site in context.freedom.sites.items() if kind in ACTIVATIONS)
    session.close()
    return total


def halving(steps: int) -> dict[str, Any]:
    """Return ``corrections`` and how far they are from halving."""
    found = corrections(steps)
    return {"found": found, "score": halving_score([one["corrections"] for one in found])}


def halving_score(counts: list[int]) -> float:
    """Return the largest distance of a count from half the one before it, in standard deviations of that difference."""
    worst = 0.0
    for more, fewer in pairwise(counts):
        worst = max(worst, abs(fewer - more / 2) / math.sqrt(max(more / 4 + fewer, 1.0)))
    return worst
