"""The one step that trainer, auditor and judge all run; only the context differs."""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tallystick.commit.encoding import canonical_json, frame
from tallystick.errors import (
    InvalidInput,
    JobFailed,
    Nondeterminism,
    OtherProgram,
    StepFailed,
    StoreError,
    TallyError,
)
from tallystick.execution.dispatch.rows import RowOperators
from tallystick.execution.job import NAMED, Batch, Job, words_of
from tallystick.execution.rounding.context import RoundingContext
from tallystick.execution.session.session import Session

BATCH_TAG = "tallystick/batch/1"
PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True)
class StepOutcome:
    """What one step produced besides the state.

    Attributes:
        batch: hexadecimal digest of the step's data.
        micro_batches: how many were accumulated.
        loss: as rounded at its site.
        schedule: hyper-parameters used, as (group, name, value).
        skipped: whether the optimizer was not stepped.
        fingerprint: of the state after the step.
    """

    batch: str
    micro_batches: int
    loss: float
    schedule: list[tuple[int, str, float]]
    skipped: bool
    fingerprint: int


def run_step(session: Session, job: Job, context: RoundingContext, batch: Batch | None = None) -> StepOutcome:
    """Run step ``session.step`` of ``job`` under ``context`` and go to the next one; ``batch`` is ``draw_batch``'s.

    Raises:
        EditedOutside: what is trained was changed since the step before, by the job's own ``batch`` or anything else.
        JobFailed: the job's loss, its backward pass, optimizer, scheduler or ``after_step`` raised something.
    """
    step = session.step
    batch = draw_batch(session, job) if batch is None else batch
    session.state.verify_left(step)
    with session.stepping(context) as opened:
        forward_backward(session, job, batch, context)
        with _blaming(f"step {step}: the optimizer or scheduler", session, torch.float64):
            job.optimizer.step()
            job.model.zero_grad(set_to_none=True)  # of parameters, too, that the optimizer does not hold
            if job.scheduler is not None:
                job.scheduler.step()
        if job.after_step is not None:
            before, modes = session.state.trained_marks(), session.tensors.modes()
            with opened.following_up(), _blaming(f"after_step({step})", session, torch.float64):
                job.after_step(step)
            session.state.verify_trained(before, step)
            session.tensors.verify_modes(modes, step)
        fingerprint = opened.finish()
    session.step = step + 1
    session.state.leave(fingerprint)
    return StepOutcome(
        batch_digest(batch), job.accumulation, opened.loss, opened.schedule, opened.skipped, fingerprint
    )


@contextmanager
def _blaming(what: str, session: Session, dtype: torch.dtype) -> Generator[None]:
    """Inside, what the job's own code or torch raises is said to be the job's; what this package raises stays as it is."""
    try:
        yield
    except NAMED:
        raise
    except BaseException as problem:
        raised = traceback.extract_tb(problem.__traceback__)[-1].filename
        if PACKAGE in Path(raised).parents and PACKAGE / "jobs" not in Path(raised).parents:
            raise
        words, hint = words_of(problem), ""
        text = f"{type(problem).__name__}: {words}"
        if (operator := words.partition(" does not have a deterministic implementation"))[1]:
            raise JobFailed(
                f"job: {what}: torch has no way to compute {operator[0]} that gives the same twice; use another operator"
            ) from problem
        if "dtype" in text or "scalar type" in text:
            cast = ", and torch.float64 where noise is measured" if dtype == torch.float32 else ""
            cast += ", layers under autocast in torch.bfloat16" if session.policy.autocast else ""
            hint = (
                f"; policy {session.policy.name} hands over model, extra and batch in {dtype}{cast} here; a tensor that the "
                "job makes elsewhere is what it was: make a module one of Job's extra, cast a tensor with .to(other.dtype)"
            )
        raise JobFailed(f"job: {what} raised {text}{hint}") from problem


@contextmanager
def under_log(what: str = "under this log") -> Generator[None]:
    """Inside, a step is repeated under a log, or to measure noise, which may be why the job's own code or torch raises something.

    Whether the log is to blame for what is not a number, is no branch of the step, or is raised shows where the step is
    repeated without it (``Replay.ends_without``).

    Raises:
        StepFailed: it did, or this package did of what the job gave or the log says.
        JobFailed: there is not enough memory, which is no matter of the log.
    """
    try:
        yield
    except (Nondeterminism, OtherProgram, StoreError):
        raise
    except (TallyError, MemoryError, RuntimeError) as problem:
        text = words_of(problem).partition("\n")[0][:200]
        lacking = (MemoryError, torch.OutOfMemoryError)
        if isinstance(problem, lacking) or isinstance(problem.__cause__, lacking):
            raise JobFailed(
                f"the step does not end here: {text or 'there is not enough memory'}"
            ) from problem
        raise StepFailed(f"the step does not end here {what}: {text}") from problem


def draw_batch(session: Session, job: Job) -> Batch:
    """Return the data of the session's next step; within a step torch's default dtype is the policy's, and they are others."""
    session.state.note()
    return job.batch(session.step)


def forward_backward(session: Session, job: Job, batch: Batch, context: RoundingContext) -> None:
    """Run forward and backward passes of all micro-batches, and clip; the gradients are left on the parameters."""
    if session.listeners.observer is not None:
        batch = session.listeners.observer.load_batch(batch)
    parts, opened = split_batch(batch, job.accumulation), session.open_step
    for number, part in enumerate(parts):
        with opened.micro_batch(number):
            with _blaming(f"step {session.step}: loss", session, session.arithmetic.compute):
                loss = _verified(job.loss(job.model, session_batch(session, part)), session.step)
                loss = loss / job.accumulation
            with _blaming(f"step {session.step}: the backward pass", session, session.arithmetic.compute):
                opened.backward(loss)
        opened.note_loss(loss)
    session.trained.densify_gradients()
    if job.clip_norm is not None:
        observer = session.listeners.observer
        with RowOperators(), nullcontext() if observer is None else observer.clipping():
            torch.nn.utils.clip_grad_norm_(job.model.parameters(), job.clip_norm, foreach=False)


def _verified(loss: object, step: int) -> Tensor:
    """Return what a job gives for its loss.

    Raises:
        InvalidInput: it is not one floating number that depends on a parameter.
    """
    if not isinstance(loss, Tensor) or loss.is_complex():
        got = loss.dtype if isinstance(loss, Tensor) else type(loss).__name__
        raise InvalidInput(f"job: step {step}: loss must be a tensor of one real number, got {got}")
    if loss.numel() != 1:
        raise InvalidInput(f"job: loss must be one number, got shape {list(loss.shape)}")
    if not loss.requires_grad:
        raise InvalidInput(
            f"job: step {step}: loss depends on no parameter by way of gradients; has it a comparison, argmax, detach or no_grad?"
        )
    return loss


def backward_of(session: Session, job: Job, batch: Batch | None = None) -> Callable[[RoundingContext], None]:
    """Return the forward and backward pass of the session's next step, for calibration."""
    data = draw_batch(session, job) if batch is None else batch
    return lambda context: forward_backward(session, job, data, context)


def session_batch(session: Session, batch: Batch) -> Batch:
    """Return ``batch`` on the model's device with floating tensors in the policy's dtype."""
    device, compute = session.tensors.device, session.arithmetic.compute

    def place(tensor: Tensor) -> Tensor:
        return tensor.to(device, compute) if tensor.is_floating_point() else tensor.to(device)

    return _mapped(batch, place)


def split_batch(batch: Batch, parts: int) -> list[Batch]:
    """Return ``parts`` equal cuts of ``batch`` along dimension 0 of its tensors.

    Raises:
        InvalidInput: a tensor's first dimension is not a multiple of ``parts``.
    """
    if parts == 1:
        return [batch]

    def cut(number: int) -> Callable[[Tensor], Tensor]:
        def one(tensor: Tensor) -> Tensor:
            if tensor.dim() == 0 or tensor.shape[0] % parts:
                raise InvalidInput(
                    f"batch: a tensor of shape {list(tensor.shape)} cannot be cut into {parts} micro-batches along dimension 0"
                )
            size = tensor.shape[0] // parts
            return tensor[number * size : (number + 1) * size]

        return one

    return [_mapped(batch, cut(number)) for number in range(parts)]


def batch_digest(batch: Batch) -> str:
    """Return the hexadecimal digest of a batch: its structure, and name, dtype, shape and bytes of every tensor.

    Raises:
        InvalidInput: it holds something other than tensors, plain values, tuples, lists and string-keyed dicts.
    """
    hashed = hashlib.sha256()
    for part in _parts(batch, "batch"):
        hashed.update(part)
    return hashed.hexdigest()


def batch_bytes(batch: Batch) -> bytes:
    """Return the very bytes that ``batch_digest`` hashes: what opens a batch (``fleet.provenance.batch_opening``).

    Raises:
        InvalidInput: as batch_digest.
    """
    return b"".join(_parts(batch, "batch"))


def _parts(value: Any, where: str) -> Iterator[bytes]:
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.is_nested or value.is_complex():
            raise InvalidInput(
                f"{where}: sparse, nested and complex tensors have no digest; use to_dense, to_padded_tensor, view_as_real"
            )
        plain = value.detach().cpu().contiguous()
        data = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
        head = canonical_json([str(plain.dtype).removeprefix("torch."), list(plain.shape)])
        yield frame(BATCH_TAG, where.encode(), head, data)
    elif isinstance(value, Mapping):
        for key in sorted(value):
            if not isinstance(key, str):
                raise InvalidInput(f"{where}: keys must be strings, got {key!r}")
            yield from _parts(value[key], f"{where}.{key}")
    elif isinstance(value, (tuple, list)):
        yield frame(BATCH_TAG, where.encode(), str(len(value)).encode())
        for index, item in enumerate(value):
            yield from _parts(item, f"{where}[{index}]")
    elif isinstance(value, int) and not -(2**63) < value < 2**63:
        raise InvalidInput(f"{where}: the whole number {value} has more than 63 bits; use a tensor or a text")
    elif value is None or isinstance(value, (bool, int, str)):
        yield frame(BATCH_TAG, where.encode(), canonical_json(value))
    elif isinstance(value, float):
        yield frame(BATCH_TAG, where.encode(), canonical_json(value.hex()))
    else:
        raise InvalidInput(
            f"{where}: a {type(value).__name__} has no digest; use tensors, numbers, strings, tuples, lists and dicts"
        )


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _mapped(item, change) for key, item in value.items()}
    if isinstance(value, tuple):
        items = [_mapped(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [_mapped(item, change) for item in value]
    return value


def map_tensors(value: Any, change: Callable[[str, Tensor], Tensor], where: str) -> Any:
    """Return a batch with every tensor changed; ``change`` also gets its place, in the order of ``batch_digest``."""
    if isinstance(value, Tensor):
        return change(where, value)
    if isinstance(value, Mapping):
        return {key: map_tensors(value[key], change, f"{where}.{key}") for key in sorted(value)}
    if isinstance(value, (tuple, list)):
        items = [map_tensors(item, change, f"{where}[{index}]") for index, item in enumerate(value)]
        if isinstance(value, list):
            return items
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


def verify_batches_are_pure(job: Job) -> None:
    """Return if ``job.batch`` gives the same data for a step whenever it is asked.

    Raises:
        Nondeterminism: it does not; the message names the step.
    """
    last = max(job.steps - 1, 0)
    before = [batch_digest(job.batch(step)) for step in (0, last)]
    job.batch(last // 2)
    after = [batch_digest(job.batch(step)) for step in (last, 0)]
    for step, first, second in ((0, before[0], after[1]), (last, before[1], after[0])):
        if first != second:
            raise Nondeterminism(
                f"job: batch({step}) gave digest {first[:16]}.. and later {second[:16]}..; it must depend on the step alone, "
                "so choose records by the step, not from an iterator; draw from torch without a seed, or seed from the step the "
                "generator that draws (random's and numpy's too)"
            )
