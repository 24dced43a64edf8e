"""One step as a committed list of operators: the same step every party runs, seen operator by operator.

A second dispatch mode stands inside the one that takes decisions, so that it sees what the model asked for and what came
out after decisions, portable randomness and rounding; it changes nothing. The trainer hashes and keeps every result; an
auditor keeps them, or gives a ``watch`` and keeps nothing.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tallystick.commit.state import CHUNK_BYTES, HeldState, summarise
from tallystick.commit.tensors import TensorDigest, digest_of
from tallystick.dispute.operator_list import (
    ADAM,
    BATCH,
    END,
    LOAD,
    ROUND,
    SGD,
    STORE,
    Geometry,
    Input,
    Operator,
    Output,
)
from tallystick.execution.dispatch.table import EMPTY, OVERWRITES, STATEFUL
from tallystick.execution.hashing import leaf_hashes
from tallystick.execution.job import Job
from tallystick.execution.operator_attributes import attributes_of, update_numbers, written_by
from tallystick.execution.operator_writer import ListWriter, Watch
from tallystick.execution.pass_trace import storage_key
from tallystick.execution.rounding.context import RecordingContext
from tallystick.execution.rounding.following import FollowingContext
from tallystick.execution.session.parameters import TrainedParameters
from tallystick.execution.session.session import Session
from tallystick.execution.snapshot import held_state, live_state, state_entries
from tallystick.execution.step import map_tensors, run_step
from tallystick.execution.step_trace import KINDS, StepTrace, Value
from tallystick.numerics.log import Kind

RELU_OR_POOL = ("aten::relu", "aten::relu_", "aten::max_pool2d_with_indices")  # whose decision the list names


class StepTracer(TorchDispatchMode):
    """Sees one step operator by operator, and has a ``ListWriter`` write it down."""

    def __init__(self, writer: ListWriter) -> None:
        super().__init__()
        self.writer = writer
        self._updates: list[tuple[int, list[str]]] = []
        self._pending: list[tuple[str, nn.Parameter, dict[str, object], list[Input | None]]] = []
        self._context: Any = None

    # -- the operators of torch ------------------------------------------------------------------

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # compiled modules are refused

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` and write down what it did."""
        kwargs, writer = kwargs or {}, self.writer
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        name: str = func._schema.name
        written = written_by(func, args, kwargs) if func._schema.is_mutable or name in STATEFUL else []
        if name.startswith("aten::_foreach") and given:
            return self._each(func, args, kwargs, written)
        operands = writer.operands(given, unread=args[0] if name in OVERWRITES else None)
        call = int(torch.default_generator.initial_seed()) if name == "aten::bernoulli_" else None
        for tensor in written:
            writer.preserve(tensor)
        result = func(*args, **kwargs)
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        fresh = self._fresh(results, written)
        if not fresh:
            return result
        if name in EMPTY:
            writer.leave_unfilled(fresh)
            return result
        attributes = attributes_of(func, args, kwargs, given)
        if call is not None:
            attributes["call"] = call
        takes = name in RELU_OR_POOL and given[0].is_floating_point() and given[0].numel() > 0
        if self._context is not None and takes:
            attributes["decision"] = int(self._context._ordinal)
        writer.write(name, func._schema.overload_name, attributes, operands, fresh)
        return result

    def _each(self, func: Any, args: Any, kwargs: Any, written: list[Tensor]) -> Any:
        """Write a list operator as one operator for each tensor of its first list."""
        lists, writer = list(args[0]), self.writer
        others = [leaf for leaf in tree_leaves((args[1:], kwargs)) if isinstance(leaf, Tensor)]
        operands = [writer.operands([tensor, *others]) for tensor in lists]
        for tensor in written:
            writer.preserve(tensor)
        result = func(*args, **kwargs)
        results = list(result) if result is not None else lists
        if any(isinstance(value, (tuple, list)) for value in args[1:]):
            writer.give_up(f"operator {func}: two lists")
            return result
        for tensor, operand, each in zip(lists, operands, results, strict=True):
            attributes = attributes_of(func, (tensor, *args[1:]), kwargs, [tensor, *others])
            writer.write(func._schema.name, func._schema.overload_name, attributes, operand, [each])
        return result

    def _fresh(self, results: list[Tensor], written: list[Tensor]) -> list[Tensor]:
        """Return results that are no views of what was there before, then what was written in place."""
        changed = {storage_key(tensor) for tensor in written}
        found = [t for t in results if storage_key(t) not in changed and self.writer.find(t) is None]
        return found + written

    # -- what the session tells ------------------------------------------------------------------

    @contextmanager
    def micro_batch(self, number: int, context: object) -> Generator[None]:
        """Inside, operators belong to micro-batch ``number``."""
        where = self.writer.where
        where.phase, where.micro_batch, self._context = "forward", number, context
        try:
            with self:
                yield
        finally:
            where.phase, where.micro_batch, self._context = "clip", 0, None

    @contextmanager
    def clipping(self) -> Generator[None]:
        """Inside, gradients are clipped."""
        self.writer.where.phase, self.writer.where.micro_batch = "clip", 0
        with self:
            yield

    def load_batch(self, batch: Any) -> Any:
        """Write the batch's tensors into the list and return it with tensors of their own memory."""

        def one(where: str, tensor: Tensor) -> Tensor:
            own = tensor.detach().clone(memory_format=torch.contiguous_format)
            self.writer.write(BATCH, "", {}, [], [own], place=(where, "load"))
            return own

        return map_tensors(batch, one, "batch")

    def before_round(self, x: Tensor, out: Tensor) -> list[Input | None]:
        """Return what a rounding site is about to read."""
        found = self.writer.operands([x])
        self.writer.preserve(out)
        return found

    def after_round(
        self, kind: Kind, ordinal: int, out: Tensor, operands: list[Input | None], name: str
    ) -> None:
        """Write a rounding site down."""
        if kind == Kind.STATE:
            self.writer.give_up("the optimizer has general arithmetic, whose operators are not in the list")
            return
        attributes = {"kind": int(kind), "ordinal": ordinal}
        self.writer.write(ROUND, "", attributes, operands, [out], place=(name, "round"))

    def before_update(self, trained: TrainedParameters) -> None:
        """Note what the optimizer will read: every gradient, and the state as it is."""
        names = {id(p): name for name, p in trained.named}
        self._pending = []
        for group in trained.optimizer.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                held = trained.state_of(p)
                old = _kept_of("betas" in group, held)
                operands = self.writer.operands([p.grad, p, *old.values()])
                for tensor in (p, *old.values()):
                    self.writer.preserve(tensor)
                self._pending.append((names[id(p)], p, update_numbers(group, held), operands))

    def after_update(self, trained: TrainedParameters) -> None:
        """Write the optimizer's updates down, one for each parameter."""
        writer = self.writer
        lazily = writer.trace.chunk == CHUNK_BYTES
        for name, p, numbers, operands in self._pending:
            adam = "beta1" in numbers
            new = _kept_of(adam, trained.state_of(p))
            narrow = p.data if p.dtype == torch.float32 else p.data.to(torch.float32)
            at, results = len(writer.trace.operators), [narrow, *new.values()]
            place = (name, "update")
            writer.write(ADAM if adam else SGD, "", numbers, operands, results, place=place, lazily=lazily)
            if narrow is not p.data:
                value = writer.trace.values.get((at, 0)) or Value((at, 0), "F32", narrow.numel(), None)
                writer.hold(p.data, value)
            if lazily:
                self._updates.append((at, [f"model/{name}", *(f"optimizer/{name}/{key}" for key in new)]))
        self._pending = []

    # -- around the step -------------------------------------------------------------------------

    def begin(self, session: Session, agreed: HeldState) -> None:
        """Write down the loads: every tensor of the agreed state, which the session is in."""
        writer = self.writer
        writer.where.names = {module: name for name, module in session.model.named_modules()}
        roots = {entry.name: entry.tensor_root for entry in agreed.summary.entries}
        for name, tensor in sorted(live_state(session).items()):
            entry = agreed.entries.get(name)
            if entry is None:
                writer.give_up(f"state entry {name} is not in the agreed state")
                continue
            if not tensor.is_contiguous() or tensor.untyped_storage().nbytes() != tensor.nbytes:
                writer.give_up(f"state entry {name} lies in memory otherwise than in row order")
            at = len(writer.trace.operators)
            data = np.frombuffer(entry.data, dtype=KINDS[entry.dtype])
            root = roots[name]
            if writer.trace.chunk != CHUNK_BYTES:
                flat = memoryview(entry.data).cast("B")
                root = digest_of(entry.dtype, data.size, flat, writer.trace.chunk).root
            value = Value((at, 0), entry.dtype, data.size, data)
            writer.trace.values[(at, 0)] = value
            writer.hold(tensor, value)
            shape = tuple(entry.shape)
            output = Output(TensorDigest(entry.dtype, data.size, root), Geometry(shape, contiguous(shape)))
            writer.append(Operator(LOAD, "", name, "load", 0, {}, (), (output,)), [])

    def finish(self, session: Session) -> None:
        """Write down what the step stores, and the root of the state after it."""
        writer = self.writer
        if writer.keep:
            after = held_state(session, writer.pool)
            summary = after.summary
            writer.trace.after = after
        else:
            after, summary = None, summarise(state_entries(session), pool=writer.pool, leaves=leaf_hashes)
        writer.trace.summary = summary
        live = live_state(session)
        stored = {entry.name: entry for entry in summary.entries}
        if writer.hashed:
            writer.fill_in(
                {
                    (at, number): stored[name].tensor_root
                    for at, names in self._updates
                    for number, name in enumerate(names)
                }
            )
        for entry in summary.entries:
            tensor = live.get(entry.name)
            operands = [] if tensor is None else writer.operands([tensor])
            fields = entry.fields() if writer.hashed else {**entry.fields(), "tensor_root": ""}
            writer.write(STORE, "", {"entry": fields}, operands, [], place=(entry.name, "store"))
        root = summary.root().hex() if writer.hashed else ""
        writer.write(END, "", {"state_root": root}, [], [], place=("state", "store"))
        if after is not None:
            writer.let_go(live, after)


def _kept_of(adam: bool, held: Any) -> dict[str, Tensor]:
    """Return the tensors that a portable optimizer keeps of a parameter, in the order of its update's operands."""
    keys = ("exp_avg", "exp_avg_sq", "step") if adam else ("momentum_buffer",)
    return {key: held[key] for key in keys if isinstance(held.get(key), Tensor)}


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a tensor in row order."""
    found: list[int] = []
    step = 1
    for size in reversed(shape):
        found.append(step)
        step *= max(size, 1)
    return tuple(reversed(found))


def trace_step(
    session: Session,
    job: Job,
    agreed: HeldState,
    context: FollowingContext | RecordingContext,
    *,
    chunk: int,
    keep: bool,
    hashed: bool = True,
    watch: Watch | None = None,
) -> StepTrace:
    """Run the session's next step from ``agreed``, which it is in, under ``context``, and return its list.

    Args:
        session: of which party.
        job: whose step is run.
        agreed: the state before it.
        context: how it rounds.
        chunk: bytes in a chunk of a result's tree.
        keep: whether results are kept, and the state after the step.
        hashed: whether what is kept is hashed too; without that the list has no roots and can be compared, not committed to.
        watch: called with every operator and its results, before they can change.

    Raises:
        InvalidInput, Nondeterminism: as ``run_step``.
    """
    writer = ListWriter(chunk=chunk, keep=keep, hashed=keep and hashed, watch=watch)
    tracer = StepTracer(writer)
    if job.after_step is not None or session.extra:
        writer.give_up("the job changes tensors outside the model and the optimizer")
    if session.policy.name not in ("fp32", "fp64"):
        writer.give_up(f"policy {session.policy.name} has no operator table")
    try:
        tracer.begin(session, agreed)
        session.listeners.observer = tracer
        with writer.where.named_modules():
            writer.trace.outcome = run_step(session, job, context)
        context.finish()
        session.settle(context)
        tracer.finish(session)
    finally:
        session.listeners.observer = None
        writer.pool.shutdown(cancel_futures=True)
    return writer.trace
