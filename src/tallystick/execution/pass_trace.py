"""The operators of a step as torch ran them, to be run again: a script's own step is what its noise is measured on.

A job hands over its loss, and can be asked for it again. A script's step lies somewhere between two calls of its own, and
nobody can call it. So its operators are written down while it runs, forward and backward, clipping included, with what each
reads and writes; run again under another context they take that context's decisions, draw the same random numbers, and
have the noise that is asked for. What is no operator of torch stays as it was: a number that was read, a branch of the program.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tallystick.errors import Nondeterminism
from tallystick.execution.dispatch.calls import Arguments, Operator
from tallystick.execution.dispatch.table import RANDOM

NUMBER = "aten::_local_scalar_dense"
READS = ("numpy", "tolist", "__dlpack__")  # how a program gets at a tensor's elements without an operator
DOES_NOT_FIT = (RuntimeError, IndexError, ValueError)
"""What torch raises where an operator is given a tensor of another shape than when it was written down."""
COPY = "__deepcopy__"


class OtherShapes(Nondeterminism):
    """An operator cannot be run again: what it is given has another shape, along other decisions."""


class _Geometry(NamedTuple):
    """Which elements of its memory a tensor is; of a sparse one only its shape."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...] = ()
    offset: int = -1
    is_conjugate: bool = False
    is_negative: bool = False


@dataclass(frozen=True)
class _Value:
    """A tensor among a call's arguments: the value of this number, or a view of its memory that no operator made."""

    number: int
    view: _Geometry | None = None


@dataclass(frozen=True)
class _Call:
    """One operator: its arguments with values for tensors, and the numbers of the values that it made, by place.

    ``func`` is None where the program reads its argument's elements. ``drawn`` is how many random operators came before a random
    one, and ``graded`` whether torch was to note gradients: some operators do more then.
    """

    func: Operator | None
    args: Arguments
    kwargs: dict[str, Any]
    made: tuple[tuple[int, int], ...]
    reads: frozenset[int]
    writes: frozenset[int]
    drawn: int | None = None
    graded: bool = False


@dataclass(frozen=True)
class _Given:
    """A call's arguments as they are before it."""

    args: Arguments
    kwargs: dict[str, Any]
    drawn: int | None


@dataclass(frozen=True)
class _Source:
    """A value that no operator of the step made: the tensor called ``name``, or ``held``, from outside."""

    number: int
    name: str | None
    held: Tensor


@dataclass
class PassTrace:
    """The operators of one step, written down by the ``Capture`` that runs them.

    Args:
        named: the model's tensors by name, and whatever else a repetition finds by its name.

    Attributes:
        parts: the number of the first call of each micro-batch, in order.
        losses: the loss of each micro-batch that had a backward pass, by micro-batch.
        gradients: what the step has come to when its optimizer steps, by parameter.
        is_in_call: whether an operator of the step runs: what is read then, the program does not read.
    """

    named: Mapping[str, Tensor]
    parts: list[int] = field(default_factory=list[int])
    losses: dict[int, _Value] = field(default_factory=dict[int, _Value])
    gradients: dict[str, _Value] = field(default_factory=dict[str, _Value])
    is_in_call: bool = False

    def __post_init__(self) -> None:
        self._names = {memory_of(tensor): name for name, tensor in self.named.items()}
        self._memory: dict[int, dict[_Geometry, int]] = {}
        self._alive: dict[int, StorageWeakRef] = {}
        self._memory_of: list[int] = []  # of each value
        self._layouts: dict[int, _Geometry] = {}  # of each that has memory of its own
        self._calls: list[_Call] = []
        self._sources: list[_Source] = []
        self._outside: list[Tensor] = []
        self._last: list[int] | None = None
        self._needed: list[bool] = []
        self._end = -1  # the last call that is needed

    # -- writing ---------------------------------------------------------------------------------

    def begin_part(self) -> None:
        """Write the next micro-batch from here on."""
        self.parts.append(len(self._calls))

    def read(self, func: Operator, args: Arguments, kwargs: dict[str, Any]) -> _Given:
        """Return a call's arguments with values for tensors, before it runs."""
        drawn = torch.default_generator.initial_seed() if func._schema.name in RANDOM else None
        return _Given(self._values(args), self._values(kwargs), drawn)

    def write(self, func: Operator, given: _Given, result: Any) -> None:
        """Write down the call that ``given`` are the arguments of, with its result."""
        made: list[tuple[int, int]] = []
        results = _tensors(result)
        for place, tensor in enumerate(results):
            key, geometry = memory_of(tensor), _geometry(tensor)
            known = self._memory.get(key)
            if known is None:
                known = self._memory[key] = {}
                self._alive[key] = StorageWeakRef(_storage_of(tensor))
                self._layouts[len(self._memory_of)] = geometry
            if geometry not in known:
                known[geometry] = len(self._memory_of)
                made.append((place, len(self._memory_of)))
                self._memory_of.append(key)
        reads = frozenset(self._memory_of[value.number] for value in _values_in((given.args, given.kwargs)))
        writes = frozenset(map(memory_of, results)) | (reads if func._schema.is_mutable else frozenset())
        self._calls.append(
            _Call(
                func,
                given.args,
                given.kwargs,
                tuple(made),
                reads,
                writes,
                given.drawn,
                torch.is_grad_enabled(),
            )
        )

    def follows(self, func: Operator, args: Arguments, kwargs: dict[str, Any]) -> bool:
        """Whether any tensor that a call reads, or leaves in part as it was, is one that the step computed, or of the model."""
        is_all = func._schema.is_mutable and args[0].nbytes == args[0].untyped_storage().nbytes()
        return self.has_made(args[1:] if is_all else args, tuple(kwargs.values()))

    def has_made(self, *given: Any) -> bool:
        """Whether any tensor among these is one that the step computed, or of the model."""
        keys = set(map(memory_of, _tensors(given)))
        return not keys.isdisjoint(self._alive) or not keys.isdisjoint(self._names)

    def take(self, result: Any) -> Any:
        """Take a call's result for something from outside, whatever wrote to its memory before, and return it."""
        for tensor in _tensors(result):
            self._memory.pop(memory_of(tensor), None)
            self._alive.pop(memory_of(tensor), None)
        return result

    def note_read(self, tensor: Tensor) -> None:
        """Take note that the program reads the elements of a tensor, unless that is from outside."""
        if not self.is_in_call and self.has_made(tensor):
            value = self._value(tensor)
            self._calls.append(_Call(None, (value,), {}, (), frozenset({memory_of(tensor)}), frozenset()))

    @contextmanager
    def noting_reads(self) -> Generator[None]:
        """Inside, what the program reads is noted; operators that give it a number are calls like any other."""

        def noting(name: str) -> Callable[..., Any]:
            plain = getattr(Tensor, name)

            def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
                self.note_read(tensor)
                return plain(tensor, *args, **kwargs)

            return read

        own = {name: vars(Tensor).get(name) for name in (*READS, COPY)}  # the others are of the class below
        for name in READS:
            setattr(Tensor, name, noting(name))
        setattr(Tensor, COPY, _copied)
        try:
            yield
        finally:
            for name, plain in own.items():
                delattr(Tensor, name) if plain is None else setattr(Tensor, name, plain)

    def note_loss(self, loss: Tensor) -> None:
        """Take ``loss`` for that of the micro-batch being written."""
        self.losses[len(self.parts) - 1] = self._value(loss)

    def end(self, gradients: Mapping[str, Tensor]) -> None:
        """Take ``gradients``, by parameter, for what the step has come to.

        Raises:
            Nondeterminism: no operator of the step made one; by name.
        """
        for name, gradient in gradients.items():
            if not self.has_made(gradient):
                raise Nondeterminism(
                    f"gradient of {name}: no operator of this step made it, so that nobody can tell its noise; compute it by "
                    "torch's operators, by backward()"
                )
            self.gradients[name] = self._value(gradient)

    def _values(self, given: Any) -> Any:
        if isinstance(given, Tensor):
            return self._value(given)
        if isinstance(given, (tuple, list)):
            return type(given)(self._values(item) for item in given)
        if isinstance(given, dict):
            return {name: self._values(item) for name, item in given.items()}
        return given

    def _value(self, tensor: Tensor) -> _Value:
        key, geometry = memory_of(tensor), _geometry(tensor)
        known = self._memory.get(key)
        if known is not None and geometry in known:
            return _Value(known[geometry])
        if known and (key in self._names or key in self._alive):
            return _Value(next(iter(known.values())), geometry)
        known = self._memory.setdefault(key, {})
        name = self._names.get(key)
        held = tensor if name is None else self.named[name]
        if name is None:
            self._outside.append(tensor)  # its memory is nobody else's as long as it lives
            held = tensor.detach().clone()  # and whoever owns it may write to it before it is read again
        own = _geometry(held) if name is not None else geometry
        number = known[own] = len(self._memory_of)
        self._memory_of.append(key)
        self._sources.append(_Source(number, name, held))
        return _Value(number, None if own == geometry else geometry)

    # -- what came of it -------------------------------------------------------------------------

    @property
    def _results(self) -> tuple[_Value, ...]:
        return (*self.gradients.values(), *self.losses.values())

    def outside(self) -> list[tuple[int, Tensor]]:
        """Return the tensors from outside that gradients, losses or named tensors follow from, in order of their use.

        Each is as it was when it was first read, and stands beside its memory.
        """
        live, _ = self._live()
        found = ((self._memory_of[source.number], source) for source in self._sources if source.name is None)
        return [(memory, source.held) for memory, source in found if memory in live]

    def _live(self) -> tuple[set[int], list[bool]]:
        """Return the memory, and which calls, gradients, losses or named tensors follow from."""
        live = {self._memory_of[value.number] for value in self._results} | set(self._names)
        calls = [False] * len(self._calls)
        for at in reversed(range(len(self._calls))):
            call = self._calls[at]
            if not live.isdisjoint(call.writes):
                live |= call.reads
                calls[at] = True
        return live, calls

    def still_alive(self) -> dict[int, StorageWeakRef]:
        """Return the memory that the step's operators made of named tensors and somebody still holds."""
        computed = set(self._names)
        for call in self._calls:
            if not computed.isdisjoint(call.reads):
                computed |= call.writes
        return {key: ref for key, ref in self._alive.items() if key in computed and not ref.expired()}

    # -- running it again ------------------------------------------------------------------------

    def repetition(self, named: Mapping[str, Tensor]) -> Repetition:
        """Return a new run of the operators, over the tensors ``named``."""
        if self._last is None:
            self._last, self._needed = [-1] * len(self._memory_of), self._live()[1]
            self._end = max((at for at, needed in enumerate(self._needed) if needed), default=-1)
            for at, call in enumerate(self._calls):
                for value in _values_in((call.args, call.kwargs)):
                    self._last[value.number] = at
        values: list[Tensor | None] = [None] * len(self._memory_of)
        written = {memory for call in self._calls for memory in call.writes}
        for source in self._sources:
            if source.name is not None:
                values[source.number] = named[source.name].detach()
            else:
                is_written = self._memory_of[source.number] in written
                values[source.number] = source.held.clone() if is_written else source.held
        return Repetition(self, values, {value.number for value in self._results})

    def calls_of(self, part: int) -> Iterator[tuple[int, _Call]]:
        """The calls of one micro-batch, with their numbers."""
        end = self.parts[part + 1] if part + 1 < len(self.parts) else len(self._calls)
        return enumerate(self._calls[self.parts[part] : end], self.parts[part])

    def is_before_needed(self, at: int) -> bool:
        """Whether anything that is asked for follows from a call after this one."""
        return at < self._end

    def is_needed(self, at: int) -> bool:
        """Whether anything that is asked for follows from this call."""
        return self._needed[at]

    def laid_out(self, number: int, result: Tensor) -> Tensor:
        """Return a value that has memory of its own in the order in which its elements lay there when it was written down.

        A kernel of another precision, or under other instructions, may leave them in another one; views are of that memory.
        """
        was = self._layouts.get(number)
        is_other = was is not None and was.shape == result.shape and result.layout == torch.strided
        if was is None or not is_other or result.stride() == was.stride or 0 in was.stride:
            return result
        with torch.no_grad():
            return torch.empty_strided(was.shape, was.stride, dtype=result.dtype, device=result.device).copy_(
                result
            )

    def is_last(self, number: int, at: int) -> bool:
        """Whether no call after ``at`` reads this value."""
        assert self._last is not None
        return self._last[number] <= at


class Repetition:
    """One run of a trace's operators over its ``values``; those ``kept``, losses and gradients, are there at its end.

    Attributes:
        read: what the program read, float64, before the last call that gradients, losses or named tensors follow from.
    """

    def __init__(self, trace: PassTrace, values: list[Tensor | None], kept: set[int]) -> None:
        self._trace, self._values, self._kept = trace, values, kept
        self.read: list[Tensor] = []

    def run(self, part: int) -> None:
        """Run the calls of a micro-batch.

        Raises:
            OtherShapes: an operator does not fit what another decision made of the shapes.
        """
        for at, call in self._trace.calls_of(part):
            may_steer = self._trace.is_before_needed(at)
            is_read = call.func is None or call.func._schema.name == NUMBER
            try:
                given = self._given(call.args)
                if call.func is None or is_read:
                    if may_steer:
                        self.read.append(given[0].detach().to(torch.float64).reshape(-1).clone())
                    continue
                if call.drawn is not None:
                    torch.default_generator.manual_seed(call.drawn)  # what is computed again draws the same
                torch.set_grad_enabled(call.graded)
                result = call.func(*given, **self._given(call.kwargs))
            except DOES_NOT_FIT as problem:
                if not self._trace.is_needed(at) and not (is_read and may_steer):
                    continue  # a statistic of the program's own, say
                raise OtherShapes(
                    f"operator {call.func}: cannot be run again along other decisions ({_first_line(problem)}); where shapes "
                    "follow from decisions give prepare() the step's loss=, which is asked again"
                ) from problem
            if (
                torch.Tag.dynamic_output_shape in call.func.tags and may_steer
            ):  # a program may take it for a number
                shapes = [size for tensor in _tensors(result) for size in tensor.shape]
                self.read.append(torch.tensor(shapes, dtype=torch.float64))
            if call.made:
                results = _tensors(result)
                for place, number in call.made:
                    done = self._is_done_with(number, at)
                    self._values[number] = None if done else self._trace.laid_out(number, results[place])
            for value in _values_in((call.args, call.kwargs)):
                if self._is_done_with(value.number, at):
                    self._values[value.number] = None

    def _is_done_with(self, number: int, at: int) -> bool:
        return self._trace.is_last(number, at) and number not in self._kept

    def value(self, value: _Value) -> Tensor:
        """Return a value as it is now."""
        held = self._values[value.number]
        if held is None:
            raise ValueError("what made it could not be run again")
        return (
            held
            if value.view is None
            else torch.as_strided(held, value.view.shape, value.view.stride, value.view.offset)
        )

    def _given(self, given: Any) -> Any:
        if isinstance(given, _Value):
            return self.value(given)
        if isinstance(given, (tuple, list)):
            return type(given)(self._given(item) for item in given)
        if isinstance(given, dict):
            return {name: self._given(item) for name, item in given.items()}
        return given


def storage_key(tensor: Tensor) -> int:
    """Return what tells the memory of ``tensor`` from any other while somebody holds on to it."""
    return int(tensor.untyped_storage()._cdata)  # pyright: ignore[reportPrivateUsage] # torch's own weak references use it


def memory_of(tensor: Tensor) -> int:
    """Return what tells a tensor's memory from any other; a sparse one's is that of its values, below zero.

    Raises:
        Nondeterminism: it has none of its own, as within ``torch.func``.
    """
    try:
        return storage_key(tensor) if tensor.layout == torch.strided else ~storage_key(tensor._values())
    except NotImplementedError as problem:
        raise Nondeterminism(
            "the step computes with torch.func's wrapped tensors, whose operators cannot be run again by themselves; give "
            "prepare() the step's loss=, or write it without torch.func"
        ) from problem


def _storage_of(tensor: Tensor) -> torch.UntypedStorage:
    return (tensor if tensor.layout == torch.strided else tensor._values()).untyped_storage()


def _geometry(tensor: Tensor) -> _Geometry:
    if tensor.layout != torch.strided:
        return _Geometry(tensor.dtype, tuple(tensor.shape))
    offset = int(tensor.storage_offset())
    return _Geometry(
        tensor.dtype, tuple(tensor.shape), tensor.stride(), offset, tensor.is_conj(), tensor.is_neg()
    )


def _tensors(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, (tuple, list)):
        return [tensor for item in result for tensor in _tensors(item)]
    return []


def _values_in(given: Any) -> Iterator[_Value]:
    if isinstance(given, _Value):
        yield given
    elif isinstance(given, (tuple, list)):
        for item in given:
            yield from _values_in(item)
    elif isinstance(given, dict):
        for item in given.values():
            yield from _values_in(item)


def _first_line(problem: BaseException) -> str:
    return str(problem).split("\n", 1)[0][:120]


def _copied(tensor: Tensor, memo: dict[int, Any]) -> Any:
    """Copy a tensor as ``copy.deepcopy`` does, by an operator: torch copies the memory, of which nobody sees whose it is."""
    if id(tensor) not in memo:
        if not tensor.is_leaf:
            raise RuntimeError("only tensors that the program made can be copied by deepcopy: copy .detach()")
        result = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        for name, value in vars(tensor).items():
            setattr(result, name, copy.deepcopy(value, memo))
        result.grad = None if tensor.grad is None else _copied(tensor.grad, memo)
        memo[id(tensor)] = result
    return memo[id(tensor)]
