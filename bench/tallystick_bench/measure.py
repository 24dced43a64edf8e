"""Measurements that need a process of their own; ``bench`` starts that process and judges what came back.

Each function returns plain numbers. Nothing here decides what is good enough.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tallystick.errors import InvalidInput, Mismatch
from tallystick.execution.job import Job, find_shipped, find_source
from tallystick.numerics.policy import Policy, find_policy
from tallystick.roles.plain_loop import PlainLoop, Times

# The memory of a plain loop is measured without session, trainer and auditor.
if TYPE_CHECKING:
    from tallystick.execution.session.session import Session
    from tallystick.run.documents import StepRecord

Say = Callable[[str], None]
SCORE = "held_out_loss"
COMPUTE: Mapping[str, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "leaf": torch.float64,
}


class MemoryRun:
    """A job recorded in memory: everything a trainer does in a step but writing files."""

    def __init__(self, job: Job, policy: Policy, seed: int, device: str = "cpu") -> None:
        from tallystick.roles.trainer import open_session

        self.job, self.policy, self.seed, self.device = job, policy, seed, device
        self.session = open_session(job, policy, seed, device=device)
        self._before = self.session.table

    def calibrate(self, repeats: int = 2) -> float:
        """Measure the noise of the next step and return the seconds that took."""
        from tallystick.execution.noise.calibration import calibrate
        from tallystick.execution.step import backward_of

        started = time.perf_counter()
        backward = backward_of(self.session, self.job)
        measured = calibrate(self.session, backward, repeats=repeats, seed=self.seed)
        self.session.table = self.session.grids_for(self.session.table, measured)
        return time.perf_counter() - started

    def begin(self) -> float:
        """Calibrate as before the first step, whose grids are part of the initial state; return the seconds."""
        seconds = self.calibrate()
        self._before = self.session.table
        return seconds

    def calibrate_if_due(self) -> float | None:
        """Calibrate where a trainer would; return the seconds, or None."""
        due = self.session.step > 0 and self.session.is_calibration_step(self.session.step)
        return self.calibrate(repeats=1) if due else None

    def step(self) -> tuple[StepRecord, bytes, Times]:
        """Record one step; return its record, its log frame and the seconds of each phase and in all."""
        from tallystick.execution.step import run_step
        from tallystick.roles.run_writer import step_record

        session, number, started = self.session, self.session.step, time.perf_counter()
        phases = dict(session.seconds)
        context = session.recording_context(self._before)
        outcome = run_step(session, self.job, context)
        frame = context.finish()
        session.settle(context)
        self._before = context.table
        record = step_record(number, outcome, frame, None)
        return record, frame, _since(phases, session.seconds, started, self.device)


def _since(before: Mapping[str, float], now: Mapping[str, float], started: float, device: str) -> Times:
    if device != "cpu":
        torch.cuda.synchronize()
    times = {phase: now[phase] - before[phase] for phase in now}
    return {**times, "total": time.perf_counter() - started}


def _tiny_job() -> Job:
    """Return a job of no size whose step uses what every step uses."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Dropout(), nn.Linear(4, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-1.0, 1.0, parameter.numel()).reshape(parameter.shape))
    data = torch.linspace(-1.0, 1.0, 64).reshape(16, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    return Job(model, optimizer, lambda step: data, lambda net, x: net(x).square().mean(), steps=2)


def load_kernels(policy: Policy) -> None:
    """Record and audit two steps of a tiny job, so that no later time or peak holds a library's start."""
    from tallystick.roles.replay import Replay
    from tallystick.roles.trainer import open_session

    run, followed = MemoryRun(_tiny_job(), policy, seed=0), _tiny_job()
    run.begin()
    replay = Replay(followed, open_session(followed, policy, 0))
    replay.session.table, replay.session.base = run.session.table, run.session.base
    for _ in range(2):
        record, frame, _ = run.step()
        _follow(replay, record, frame, "cpu")


def overhead(
    job: str,
    policy: str,
    rounds: int,
    warm_up: int,
    say: Say,
    settings: Mapping[str, str] | None = None,
    device: str = "cpu",
) -> dict[str, Any]:
    """Return the seconds of plain, recorded and audited steps that took turns in this process.

    Plain is the job's own loop in the policy's precision, and ``best`` the fastest that a user would run: float32, with the
    optimizer's fused kernels where torch has any. The auditor follows in memory what the trainer has just logged. ``rounds``
    are measured after ``warm_up`` more. Each step's seconds stand by phase, with ``total``; calibrations are timed apart.
    ``settings`` are the job's; all compute on ``device``.

    Raises:
        Mismatch: the audited step is not the recorded one.
    """
    from tallystick.roles.replay import Replay
    from tallystick.roles.trainer import open_session

    source, chosen = find_source(job), find_policy(policy)
    load_kernels(chosen)
    given = dict(settings or {})
    plain = PlainLoop(source.build(given), COMPUTE[policy], device=device)
    best = PlainLoop(source.build(given), torch.float32, device=device)
    fuse(best.job.optimizer)
    run = MemoryRun(source.build(given), chosen, 0, device)
    first, again = run.begin(), list[float]()
    say(f"first calibration {first:.2f} s")
    followed = source.build(given)
    replay = Replay(followed, open_session(followed, chosen, 0, device=device))
    replay.session.table, replay.session.base = run.session.table, run.session.base
    measured: list[dict[str, Times]] = []
    sizes: list[int] = []
    for number in range(warm_up + rounds):
        found = {"plain": plain.step(number), "best": best.step(number)}
        due = run.calibrate_if_due()
        again += [] if due is None else [due]
        record, frame, found["record"] = run.step()
        found["audit"] = _follow(replay, record, frame, device)
        seconds = ", ".join(f"{who} {times['total']:.3f} s" for who, times in found.items())
        say(f"round {number + 1}/{warm_up + rounds}: {seconds}")
        measured += [found] if number >= warm_up else []
        sizes += [len(frame)] if number >= warm_up else []
    if not again:
        again.append(run.calibrate(repeats=1))
    return {
        "rounds": measured,
        "first_calibration": first,
        "calibration": statistics.median(again),
        "calibrations_due": sum(run.session.is_calibration_step(step) for step in range(1, run.job.steps)),
        "job_steps": run.job.steps,
        "state_root": _seconds_of_root(run.session),
        "copy": _seconds_to_copy([p.detach() for p in run.job.model.parameters()]),
        "log_bytes": statistics.median(sizes),
        "parameters": sum(p.numel() for p in run.job.model.parameters()),
        "threads": torch.get_num_threads(),
    }


def _seconds_of_root(session: Session) -> float:
    from tallystick.commit.state import summarise
    from tallystick.execution.snapshot import state_entries

    started = time.perf_counter()
    summarise(state_entries(session)).root()
    return time.perf_counter() - started


def fuse(optimizer: torch.optim.Optimizer) -> None:
    """Have torch's optimizer take its step in one kernel, where it has one; before its first step."""
    for group in optimizer.param_groups:
        if "fused" in group:
            group["fused"] = True


def _seconds_to_copy(tensors: list[Tensor], times: int = 5) -> float:
    """Return the median seconds of one copy of all tensors into memory that is there already."""
    copies = [torch.empty_like(tensor) for tensor in tensors]
    taken: list[float] = []
    for _ in range(times + 1):
        started = time.perf_counter()
        for tensor, copy in zip(tensors, copies, strict=True):
            copy.copy_(tensor)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[1:])


def _follow(replay: Any, record: StepRecord, frame: bytes, device: str) -> Times:
    from tallystick.roles.comparison import compare_step

    phases, started = dict(replay.session.seconds), time.perf_counter()
    outcome, context = replay.follow(record, frame)
    deviations = compare_step(record, outcome, context.violations)
    times = _since(phases, replay.session.seconds, started, device)
    if deviations:
        raise Mismatch(str(deviations[0]))
    return times


def memory(job: str, policy: str, role: str, steps: int, directory: str) -> dict[str, Any]:
    """Return the peak resident memory of this process, bytes, after ``role`` did its work, and before it began.

    ``plain`` trains: under fp64 wholly in float64, under fp32 in float32 (under bf16 with autocast) with an optimizer on
    float64 copies.
    ``record`` writes a run with a calibration and a checkpoint every second step to ``directory``, ``audit`` repeats it.

    Raises:
        Mismatch: the audit's verdict is not ``match``.
    """
    source = find_source(job)
    if role == "plain":
        PlainLoop(_tiny_job(), COMPUTE[policy]).step(0)
        before = peak_memory()
        loop = PlainLoop(source.build({}), COMPUTE[policy], masters=policy in ("fp32", "bf16"))
        for number in range(steps):
            loop.step(number)
        return {"peak": peak_memory(), "before": before}
    from tallystick.roles.auditor import audit
    from tallystick.roles.trainer import Order, record
    from tallystick.store.files import RunDirectory

    load_kernels(find_policy(policy))
    before = peak_memory()
    if role == "record":
        rounding = find_policy(policy, recalibrate_every=2)
        record(Order(source, {}, rounding, checkpoint_every=2, steps=steps), RunDirectory(Path(directory)))
    else:
        report = audit(RunDirectory(Path(directory)), source)
        if report.verdict != "match":
            raise Mismatch(f"audit of {directory}: {report.verdict}, {report.first}")
    return {"peak": peak_memory(), "before": before}


def peak_memory() -> int:
    """Return the largest resident size of this process so far, bytes."""
    import resource
    import sys

    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2): bytes there, kibibytes elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def control(
    directory: str, out: str, jitter: bool, job: str | None = None, device: str = "cpu"
) -> dict[str, Any]:
    """Train a recorded job plainly from its committed initial weights; write the final ones to ``out``.

    Same precision, data, schedule and dropout masks as the run in ``directory``; no site and no log. The file holds
    the weights in the order of the model's parameters, little-endian, in the precision of the policy. ``job`` is its source,
    by default the shipped one that the run names. It computes on ``device``.
    """
    from tallystick.execution.dispatch.jitter import Jitter
    from tallystick.execution.dispatch.randomness import RandomStream
    from tallystick.store.files import RunDirectory, storing

    run = RunDirectory(Path(directory))
    stated = run.load_specification()
    source = find_shipped(stated.job.path) if job is None else find_source(job)
    built = source.build(stated.job.settings, stated.seed)
    initial = run.load_committed(0, stated.initial_state)
    with torch.no_grad():
        for name, parameter in built.model.named_parameters():
            values = torch.frombuffer(bytearray(initial[f"model/{name}"].data), dtype=torch.float32)
            parameter.copy_(values.reshape(parameter.shape))
    noise = Jitter(20241) if jitter else None
    loop = PlainLoop(
        built, COMPUTE[stated.policy.name], stream=RandomStream(stated.seed), jitter=noise, device=device
    )
    for number in range(stated.steps):
        loop.step(number)
    weights = torch.cat([p.detach().reshape(-1) for p in built.model.parameters()])
    with storing(out):
        Path(out).write_bytes(weights.cpu().numpy().tobytes())
    return {"weights": weights.numel(), "bytes_each": weights.element_size()}


def curve(job: str, arithmetic: str, steps: int | None, seed: int, points: int, say: Say) -> dict[str, Any]:
    """Return the held-out loss of one training at ``points`` evenly spaced steps, as ``[steps done, loss]``.

    Initial weights, data and dropout masks follow from ``seed`` alone, so that trainings of one seed differ in their
    arithmetic only. ``arithmetic`` is ``plain fp64``, ``plain fp32`` or ``plain bf16`` (torch's own loop in that precision,
    bf16 under autocast), or a policy, ``leaf`` with its bits (``leaf 26``). ``steps`` is None for the job's own number. Of a
    policy the log's size comes too.

    Raises:
        InvalidInput: the job has no held-out loss, or there is no such arithmetic.
    """
    from tallystick.execution.dispatch.randomness import RandomStream

    source, (name, _, more) = find_source(job), arithmetic.partition(" ")
    settings = {"init_seed": str(seed), "data_seed": str(seed)}
    built = source.build(settings if steps is None else {**settings, "steps": str(steps)})
    length, bits = built.steps, 0
    if name == "plain":
        if more not in COMPUTE:
            raise InvalidInput(
                f"arithmetic {arithmetic}: unknown; known are {', '.join(COMPUTE)}, plain or as a policy"
            )
        loop = PlainLoop(built, COMPUTE[more], stream=RandomStream(seed))
        run = None
    else:
        loop, run = None, MemoryRun(built, find_policy(name, b_r=int(more) if more else None), seed)
        run.begin()
    found: list[tuple[int, float]] = []
    for number in range(length):
        if loop is not None:
            loop.step(number)
        elif run is not None:
            run.calibrate_if_due()
            _, frame, _ = run.step()
            bits += 8 * len(frame)
        done = number + 1
        if done * points // length > number * points // length:
            found.append((done, _score(job, built)))
            say(f"{job}, {arithmetic}, seed {seed}: step {done}/{length}, held-out loss {found[-1][1]:.4f}")
    parameters = sum(p.numel() for p in built.model.parameters())
    size = None if run is None else bits / length / parameters
    return {"points": found, "parameters": parameters, "log_bits_per_parameter_step": size}


def _score(name: str, job: Job) -> float:
    scores = {} if job.evaluate is None else job.evaluate(job.model)
    if SCORE not in scores:
        raise InvalidInput(f"job {name}: evaluate gives no {SCORE}, it gives {sorted(scores)}")
    return scores[SCORE]
