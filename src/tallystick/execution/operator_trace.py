"""One step as a committed list of operators: the same step every party runs, seen operator by operator.

A second dispatch mode stands inside the one that takes decisions, so that it sees what the model asked for and what came
out after decisions, portable randomness and rounding; it changes nothing. Views are no operators: an input says which part
of which earlier result it reads. What is written in place is a new result.

The trainer hashes and keeps every result; an auditor keeps them, or gives a ``watch`` and keeps nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage] # the only way to step out of a mode
)
from torch.utils._pytree import tree_leaves

from tallystick.commit.encoding import hex_float
from tallystick.commit.merkle import root as merkle_root
from tallystick.commit.state import CHUNK_BYTES, HeldState, StateSummary, summarise
from tallystick.commit.tensors import TensorDigest, chunk_hashes, digest_of, hash_later, joined
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
from tallystick.errors import InvalidInput
from tallystick.execution.dispatch.table import EMPTY, OVERWRITES, STATEFUL
from tallystick.execution.hashing import leaf_hashes
from tallystick.execution.job import Job
from tallystick.execution.rounding.context import RecordingContext
from tallystick.execution.rounding.following import FollowingContext
from tallystick.execution.session.parameters import TrainedParameters
from tallystick.execution.session.session import Session
from tallystick.execution.snapshot import CODES, held_state, live_state, state_entries
from tallystick.execution.step import StepOutcome, map_tensors, run_step
from tallystick.numerics.log import Kind

STORED = {**CODES, torch.float64: "F64", torch.bfloat16: "BF16", torch.float16: "F16"}
KINDS = {
    "F32": "<f4", "F64": "<f8", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1", "BOOL": "u1",
    "F16": "<f2", "BF16": "<u2",
}  # fmt: skip
PLACEMENT = frozenset(
    "device layout pin_memory memory_format non_blocking generator requires_grad dtype_layout".split()
)
CONSTANT = "tallystick::constant"
SMALL_CONSTANT = 4096  # bytes that stand in the list itself
NO_ROOT = bytes(32)
SOON = 1 << 16  # bytes that are hashed at once: less than handing them to another thread takes
Watch = Callable[[int, Operator, Sequence[Tensor]], None]
Array = np.ndarray


@dataclass
class Value:
    """One result: where it stands in the list, and its elements as they lie in memory, as long as they are kept."""

    source: tuple[int, int]
    dtype: str
    elements: int
    data: Tensor | Array | None
    hashes: list[bytes] | None = None
    promised: list[Future[list[bytes]]] = field(default_factory=list[Future[list[bytes]]])

    def settle(self) -> None:
        """Return when the chunk hashes that were asked for are there; until then the data must not change."""
        if self.promised:
            self.hashes, self.promised = joined(self.promised), []


@dataclass
class StepTrace:
    """A traced step.

    Attributes:
        operators: the list.
        values: results by (leaf, output); empty for an auditor.
        chunk: bytes in a chunk of a result's tree.
        incomplete: why the list cannot stand for the step, or None.
        outcome: of the step.
        summary: of the state after it.
        after: that state, if it was kept.
        held_bytes: size of all results.
    """

    operators: list[Operator]
    values: dict[tuple[int, int], Value]
    chunk: int
    incomplete: str | None
    outcome: StepOutcome | None = None
    summary: StateSummary | None = None
    after: HeldState | None = None
    held_bytes: int = 0

    def hashes(self, source: tuple[int, int]) -> list[bytes]:
        """Return a result's chunk hashes."""
        value = self.values[source]
        if value.hashes is None:
            data = np.ascontiguousarray(self.array(source))
            value.hashes = chunk_hashes(data.data if data.size else memoryview(b""), self.chunk)
        return value.hashes

    def array(self, source: tuple[int, int]) -> Array:
        """Return a result's elements as they lie in memory.

        Raises:
            InvalidInput: it was not kept.
        """
        value = self.values.get(source)
        if value is None or value.data is None:
            raise InvalidInput(f"operator {source[0]}: output {source[1]} was not kept")
        return value.data if isinstance(value.data, np.ndarray) else array_of(value.data)


def array_of(tensor: Tensor) -> Array:
    """Return a flat tensor's elements as an array that shares its memory; booleans are bytes, bfloat16 its bits."""
    if tensor.dtype == torch.bool:
        return tensor.view(torch.uint8).numpy()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy()
    return tensor.numpy()


def storage_key(tensor: Tensor) -> int:
    """Return what tells the memory of ``tensor`` from any other while somebody holds on to it."""
    return int(tensor.untyped_storage()._cdata)  # pyright: ignore[reportPrivateUsage] # torch's own weak references use it


def whole(tensor: Tensor) -> Tensor:
    """Return all of the memory that ``tensor`` is a view of, flat."""
    storage = tensor.detach().untyped_storage()
    count = storage.nbytes() // tensor.element_size()
    flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return flat.set_(storage, 0, (count,), (1,))  # pyright: ignore[reportArgumentType]


class StepTracer(TorchDispatchMode):
    """Writes the list of one step; see the module's docstring.

    Args:
        chunk: bytes in a chunk of a result's tree.
        keep, hashed: whether results are kept, and hashed.
        watch: called with every operator and its results, before they can change.
    """

    def __init__(self, *, chunk: int, keep: bool, hashed: bool, watch: Watch | None = None) -> None:
        super().__init__()
        self.trace = StepTrace([], {}, chunk, None)
        self.keep, self.hashed, self.watch = keep, hashed, watch
        self._current: dict[int, tuple[StorageWeakRef, Value]] = {}
        self._pool = ThreadPoolExecutor(max(1, min(4, os.cpu_count() or 1)))
        self._phase, self._micro_batch = "forward", 0
        self._modules: list[str] = []
        self._names: dict[nn.Module, str] = {}
        self._by_sequence: dict[int, str] = {}
        self._updates: list[tuple[int, list[str]]] = []
        self._hooks: list[Any] = []
        self._context: Any = None
        self._unfilled: set[int] = set()

    # -- the operators of torch ------------------------------------------------------------------

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # compiled modules are refused

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` and write down what it did."""
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        name: str = func._schema.name
        written = _written(func, args, kwargs) if func._schema.is_mutable or name in STATEFUL else []
        if name.startswith("aten::_foreach") and given:
            return self._each(func, args, kwargs, written)
        operands = self._operands(given, unread=args[0] if name in OVERWRITES else None)
        call = self._call_number() if name == "aten::bernoulli_" else None
        for tensor in written:
            self.preserve(tensor)
        result = func(*args, **kwargs)
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        fresh = self._fresh(results, written)
        if not fresh:
            return result
        if name in EMPTY:
            self._unfilled |= {storage_key(tensor) for tensor in fresh}
            return result  # nothing has been computed; what fills it is an operator
        attributes = _attributes(func, args, kwargs, given)
        if call is not None:
            attributes["call"] = call
        if self._context is not None and name in (
            "aten::relu",
            "aten::relu_",
            "aten::max_pool2d_with_indices",
        ):
            attributes["decision"] = int(self._context._ordinal)
        self._write(name, func._schema.overload_name, attributes, operands, fresh)
        return result

    def _each(self, func: Any, args: Any, kwargs: Any, written: list[Tensor]) -> Any:
        """Write a list operator as one operator for each tensor of its first list."""
        lists = list(args[0])
        others = [leaf for leaf in tree_leaves((args[1:], kwargs)) if isinstance(leaf, Tensor)]
        operands = [self._operands([tensor, *others]) for tensor in lists]
        for tensor in written:
            self.preserve(tensor)
        result = func(*args, **kwargs)
        results = list(result) if result is not None else lists
        if any(isinstance(value, (tuple, list)) for value in args[1:]):
            self.give_up(f"operator {func}: two lists")
            return result
        for tensor, operand, each in zip(lists, operands, results, strict=True):
            attributes = _attributes(func, (tensor, *args[1:]), kwargs, [tensor, *others])
            self._write(func._schema.name, func._schema.overload_name, attributes, operand, [each])
        return result

    def _call_number(self) -> int:
        return int(torch.default_generator.initial_seed())

    def _fresh(self, results: list[Tensor], written: list[Tensor]) -> list[Tensor]:
        """Return results that are no views of what was there before, then what was written in place."""
        changed = {storage_key(tensor) for tensor in written}
        found: list[Tensor] = []
        for tensor in results:
            key = storage_key(tensor)
            if key in changed or self._find(tensor) is not None:
                continue
            found.append(tensor)
        return found + written

    def _find(self, tensor: Tensor) -> Value | None:
        held = self._current.get(storage_key(tensor))
        return None if held is None or held[0].expired() else held[1]

    def _operands(self, tensors: Sequence[Tensor], *, unread: object = None) -> list[Input | None]:
        found: list[Input | None] = []
        for tensor in tensors:
            if tensor is unread:
                found.append(None)
                continue
            value = self._find(tensor)
            if value is None:
                value = self._constant(tensor)
            dtype = STORED.get(tensor.dtype, "")
            if value is None or not dtype:
                found.append(None)
                continue
            view = Geometry(tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))
            found.append(Input(value.source, dtype, view))
        return found

    def _constant(self, tensor: Tensor) -> Value | None:
        """Write a small tensor that no operator made into the list; None for memory not yet filled."""
        if storage_key(tensor) in self._unfilled:
            return None
        with _disable_current_modes():
            flat = whole(tensor)
            if flat.nbytes > SMALL_CONSTANT or tensor.dtype not in STORED:
                return None
            data = array_of(flat).tobytes()
        at = len(self.trace.operators)
        self._write(CONSTANT, "", {"data": data.hex()}, [], [tensor])
        return None if len(self.trace.operators) == at else self._find(tensor)

    def preserve(self, tensor: Tensor) -> None:
        """Copy what is kept of ``tensor`` before its memory is written to."""
        value = self._find(tensor)
        if value is None or not isinstance(value.data, Tensor):
            return
        if storage_key(value.data) == storage_key(tensor):
            value.settle()
            with _disable_current_modes():
                value.data = value.data.clone()

    def _write(
        self,
        name: str,
        overload: str,
        attributes: Mapping[str, object],
        operands: Sequence[Input | None],
        results: Sequence[Tensor],
        *,
        module: str | None = None,
        phase: str | None = None,
        lazily: bool = False,
    ) -> None:
        known = [operand for operand in operands if operand is not None]
        if len(known) != len(operands):
            if name not in OVERWRITES:
                self.give_up(f"operator {name}: reads a tensor that no operator of the step made")
            attributes = _renumbered(attributes, operands)
        at = len(self.trace.operators)
        outputs: list[Output] = []
        with _disable_current_modes():
            for number, tensor in enumerate(results):
                outputs.append(self._register((at, number), tensor, lazily=lazily))
        sequence: Any = torch._C._current_autograd_node()  # pyright: ignore[reportAttributeAccessIssue, reportPrivateUsage]
        backward = sequence is not None
        if phase is None:
            phase = "backward" if backward and self._phase == "forward" else self._phase
        if module is None:
            if backward:
                module = self._by_sequence.get(int(sequence._sequence_nr()), "")
            else:
                module = self._modules[-1] if self._modules else ""
                self._by_sequence[_sequence() - 1] = module
        operator = Operator(
            name, overload, module, phase, self._micro_batch, dict(attributes), tuple(known), tuple(outputs)
        )
        self.trace.operators.append(operator)
        if self.watch is not None:
            with _disable_current_modes():
                self.watch(at, operator, results)

    def _register(self, source: tuple[int, int], tensor: Tensor, *, lazily: bool = False) -> Output:
        flat = whole(tensor)
        dtype = STORED.get(tensor.dtype)
        if dtype is None or tensor.device.type != "cpu":
            self.give_up(f"a tensor of {tensor.dtype} on {tensor.device} has no digest here")
            dtype = "U8"
        value = Value(source, dtype, flat.numel(), None)
        if self.keep:
            value.data = flat
            self.trace.values[source] = value
            self.trace.held_bytes += flat.nbytes
            if self.hashed and not lazily and self.trace.incomplete is None:
                view = array_of(flat).data if flat.numel() else memoryview(b"")
                if view.nbytes > SOON:
                    value.promised = hash_later(view, self.trace.chunk, self._pool, leaf_hashes)
                else:
                    value.hashes = chunk_hashes(view, self.trace.chunk)
        storage = tensor.untyped_storage()
        self._current[storage_key(tensor)] = (StorageWeakRef(storage), value)
        self._unfilled.discard(storage_key(tensor))
        view = Geometry(tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))
        return Output(TensorDigest(dtype, flat.numel(), NO_ROOT), view)

    def give_up(self, why: str) -> None:
        """Say why the list cannot stand for the step; the first reason counts."""
        if self.trace.incomplete is None:
            self.trace.incomplete = why

    # -- what the session tells ------------------------------------------------------------------

    @contextmanager
    def micro_batch(self, number: int, context: object) -> Generator[None]:
        """Inside, operators belong to micro-batch ``number``."""
        self._phase, self._micro_batch, self._context = "forward", number, context
        try:
            with self:
                yield
        finally:
            self._phase, self._micro_batch, self._context = "clip", 0, None

    @contextmanager
    def clipping(self) -> Generator[None]:
        """Inside, gradients are clipped."""
        self._phase, self._micro_batch = "clip", 0
        with self:
            yield

    def load_batch(self, batch: Any) -> Any:
        """Write the batch's tensors into the list and return it with tensors of their own memory."""

        def one(where: str, tensor: Tensor) -> Tensor:
            own = tensor.detach().clone(memory_format=torch.contiguous_format)
            self._write(BATCH, "", {}, [], [own], module=where, phase="load")
            return own

        return map_tensors(batch, one, "batch")

    def before_round(self, x: Tensor, out: Tensor) -> list[Input | None]:
        """Return what a rounding site is about to read."""
        found = self._operands([x])
        self.preserve(out)
        return found

    def after_round(
        self, kind: Kind, ordinal: int, out: Tensor, operands: list[Input | None], name: str
    ) -> None:
        """Write a rounding site down."""
        if kind == Kind.STATE:
            self.give_up("the optimizer has general arithmetic, whose operators are not in the list")
            return
        attributes = {"kind": int(kind), "ordinal": ordinal}
        self._write(ROUND, "", attributes, operands, [out], module=name, phase="round")

    def before_update(self, trained: TrainedParameters) -> None:
        """Note what the optimizer will read: every gradient, and the state as it is."""
        self._pending: list[tuple[str, nn.Parameter, Input | None, dict[str, Any], list[Input | None]]] = []
        names = {id(p): name for name, p in trained.named}
        for group in trained.optimizer.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                held = trained.state_of(p)
                keys = ("exp_avg", "exp_avg_sq", "step") if "betas" in group else ("momentum_buffer",)
                old = [held[key] for key in keys if isinstance(held.get(key), Tensor)]
                operands = self._operands([p.grad, p, *old])
                for tensor in (p, *old):
                    self.preserve(tensor)
                numbers = _numbers(group, held)
                self._pending.append((names[id(p)], p, None, numbers, operands))

    def after_update(self, trained: TrainedParameters) -> None:
        """Write the optimizer's updates down, one for each parameter."""
        for name, p, _, numbers, operands in self._pending:
            held = trained.state_of(p)
            adam = "beta1" in numbers
            keys = ("exp_avg", "exp_avg_sq", "step") if adam else ("momentum_buffer",)
            new = [held[key] for key in keys if isinstance(held.get(key), Tensor)]
            narrow = p.data if p.dtype == torch.float32 else p.data.to(torch.float32)
            results = [narrow, *new]
            lazily = self.trace.chunk == CHUNK_BYTES
            at = len(self.trace.operators)
            self._write(
                ADAM if adam else SGD,
                "",
                numbers,
                operands,
                results,
                module=name,
                phase="update",
                lazily=lazily,
            )
            if narrow is not p.data:
                value = self.trace.values.get((at, 0)) or Value((at, 0), "F32", narrow.numel(), None)
                storage = p.data.untyped_storage()
                self._current[storage_key(p.data)] = (StorageWeakRef(storage), value)
            entries = [f"model/{name}", *(f"optimizer/{name}/{key}" for key in keys if key in held)]
            if lazily:
                self._updates.append((at, entries))  # pyright: ignore[reportArgumentType]
        self._pending = []

    # -- around the step -------------------------------------------------------------------------

    def begin(self, session: Session, agreed: HeldState) -> None:
        """Write down the loads: every tensor of the agreed state, which the session is in."""
        for module_name, module in session.model.named_modules():
            self._names[module] = module_name
        roots = {entry.name: entry.tensor_root for entry in agreed.summary.entries}
        for name, tensor in sorted(live_state(session).items()):
            entry = agreed.entries.get(name)
            if entry is None:
                self.give_up(f"state entry {name} is not in the agreed state")
                continue
            at = len(self.trace.operators)
            data = np.frombuffer(entry.data, dtype=KINDS[entry.dtype])
            root = roots[name]
            if self.trace.chunk != CHUNK_BYTES:
                root = digest_of(
                    entry.dtype, data.size, memoryview(entry.data).cast("B"), self.trace.chunk
                ).root
            value = Value((at, 0), entry.dtype, data.size, data)
            self.trace.values[(at, 0)] = value
            storage = tensor.untyped_storage()
            self._current[storage_key(tensor)] = (StorageWeakRef(storage), value)
            view = Geometry(tuple(entry.shape), contiguous(tuple(entry.shape)))
            operator = Operator(
                LOAD, "", name, "load", 0, {}, (), (Output(TensorDigest(entry.dtype, data.size, root), view),)
            )
            self.trace.operators.append(operator)
            if self.watch is not None:
                self.watch(at, operator, [])

    def finish(self, session: Session) -> None:
        """Write down what the step stores, and the root of the state after it."""
        if self.keep:
            after = held_state(session, self._pool)
            summary = after.summary
            self.trace.after = after
        else:
            after, summary = None, summarise(state_entries(session), pool=self._pool, leaves=leaf_hashes)
        self.trace.summary = summary
        live = live_state(session)
        stored = {entry.name: entry for entry in summary.entries}
        if self.hashed:
            lazily = {
                (at, number): stored[name].tensor_root
                for at, names in self._updates
                for number, name in enumerate(names)
            }
            self._fill_in(lazily)
        for entry in summary.entries:
            tensor = live.get(entry.name)
            operands = [] if tensor is None else self._operands([tensor])
            fields = entry.fields() if self.hashed else {**entry.fields(), "tensor_root": ""}
            self._write(STORE, "", {"entry": fields}, operands, [], module=entry.name, phase="store")
        root = summary.root().hex() if self.hashed else ""
        self._write(END, "", {"state_root": root}, [], [], module="state", phase="store")
        if after is not None:
            self._let_go(live, after)

    def _let_go(self, live: Mapping[str, Tensor], after: HeldState) -> None:
        """Keep no tensor of the session's, which goes on to other steps; the copied state does not."""
        for name, tensor in live.items():
            value = self._find(tensor)
            if value is None or not isinstance(value.data, Tensor):
                continue
            if storage_key(value.data) == storage_key(tensor) and value.dtype == after.entries[name].dtype:
                value.settle()
                value.data = np.frombuffer(after.entries[name].data, dtype=KINDS[value.dtype])
            else:
                self.preserve(tensor)

    def _fill_in(self, lazily: Mapping[tuple[int, int], bytes]) -> None:
        """Put the roots of all results into the list."""
        for at, operator in enumerate(self.trace.operators):
            if operator.name == LOAD or not operator.outputs:
                continue
            outputs: list[Output] = []
            for number, output in enumerate(operator.outputs):
                root = lazily.get((at, number))
                if root is None:
                    value = self.trace.values[(at, number)]
                    value.settle()
                    root = NO_ROOT if value.hashes is None else merkle_root(value.hashes)
                outputs.append(Output(replace(output.tensor, root=root), output.view))
            self.trace.operators[at] = replace(operator, outputs=tuple(outputs))

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(cancel_futures=True)

    @contextmanager
    def named_modules(self) -> Generator[None]:
        """Inside, operators know in which module they ran."""
        hooks = nn.modules.module

        def enter(module: nn.Module, _: Any) -> None:
            self._modules.append(self._names.get(module, ""))

        def leave(module: nn.Module, _: Any, __: Any) -> None:
            if self._modules:
                self._modules.pop()

        handles = [hooks.register_module_forward_pre_hook(enter), hooks.register_module_forward_hook(leave)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._modules = []


def _sequence() -> int:
    """Return the number that the next node of the backward graph gets; the operator being run has the one before."""
    numbers: Any = torch.autograd
    return int(numbers._get_sequence_nr())


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
    tracer = StepTracer(chunk=chunk, keep=keep, hashed=keep and hashed, watch=watch)
    if job.after_step is not None or session.extra:
        tracer.give_up("the job changes tensors outside the model and the optimizer")
    if session.policy.name not in ("fp32", "fp64"):
        tracer.give_up(f"policy {session.policy.name} has no operator table")
    try:
        tracer.begin(session, agreed)
        session.listeners.observer = tracer
        with tracer.named_modules():
            tracer.trace.outcome = run_step(session, job, context)
        context.finish()
        session.settle(context)
        tracer.finish(session)
    finally:
        session.listeners.observer = None
        tracer.close()
    return tracer.trace


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that ``func`` writes in place, in the order of its arguments."""
    found: list[Tensor] = []
    for position, declared in enumerate(func._schema.arguments):
        if declared.alias_info is not None and declared.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(declared.name)
            found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    if func._schema.name in STATEFUL and not found:
        found += [value for value in args[3:5] if isinstance(value, Tensor)]
    return found


def _attributes(func: Any, args: Any, kwargs: Any, given: Sequence[Tensor]) -> dict[str, object]:
    order = {id(tensor): number for number, tensor in reversed(list(enumerate(given)))}
    found: dict[str, object] = {}
    for position, declared in enumerate(func._schema.arguments):
        if declared.name in PLACEMENT:
            continue
        if position < len(args):
            value = args[position]
        elif declared.name in kwargs:
            value = kwargs[declared.name]
        else:
            value = declared.default_value
        found[declared.name] = _attribute(value, order)
    return found


def _attribute(value: Any, order: Mapping[int, int]) -> object:
    if isinstance(value, Tensor):
        return {"input": order[id(value)]}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return {"float": hex_float(value)}
    if isinstance(value, (list, tuple)):
        return [_attribute(item, order) for item in value]
    return {"name": str(value)}


def _renumbered(attributes: Mapping[str, object], operands: Sequence[Input | None]) -> dict[str, object]:
    """Return attributes that name inputs by their place among those that are known."""
    places: dict[int, int | None] = {}
    count = 0
    for number, operand in enumerate(operands):
        places[number] = None if operand is None else count
        count += operand is not None

    def one(value: object) -> object:
        if isinstance(value, dict) and set(value) == {"input"}:
            place = places[value["input"]]
            return None if place is None else {"input": place}
        if isinstance(value, list):
            return [one(item) for item in value]
        return value

    return {name: one(value) for name, value in attributes.items()}


def _numbers(group: Mapping[str, Any], held: Mapping[str, Any]) -> dict[str, object]:
    """Return an update's numbers as attributes."""

    def real(value: Any) -> dict[str, str]:
        return {"float": hex_float(float(value))}

    if "betas" in group:
        done = held.get("step")
        step = 1 + (int(done.item()) if isinstance(done, Tensor) else 0)
        return {
            "lr": real(group["lr"]), "beta1": real(group["betas"][0]), "beta2": real(group["betas"][1]),
            "eps": real(group["eps"]), "weight_decay": real(group["weight_decay"]), "step": step,
            "decoupled": bool(group.get("decoupled_weight_decay", False)),
        }  # fmt: skip
    return {
        "lr": real(group["lr"]), "momentum": real(group["momentum"]), "dampening": real(group["dampening"]),
        "weight_decay": real(group["weight_decay"]), "nesterov": bool(group["nesterov"]),
        "first": held.get("momentum_buffer") is None,
    }  # fmt: skip
