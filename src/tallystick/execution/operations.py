"""The operators of one step in their order, with module and phase, and the first one on which two repetitions part.

A dispatch mode inside the step's own sees every operator with its result as the step goes on with it, decisions of the
log obeyed. Digests are kept, not tensors: memory stays that of the step. Optimizers whose arithmetic is portable run no
operators.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage]
)
from torch.utils._pytree import tree_leaves

from tallystick.execution.dispatch.table import RANDOM
from tallystick.execution.job import Batch, Job
from tallystick.execution.session.session import Session

# Gradients of look-ups: sums whose order devices do not agree on.
SCATTERS = frozenset(
    f"aten::{name}"
    for name in """
    embedding_dense_backward _embedding_bag_backward _embedding_bag_dense_backward index_add index_put _index_put_impl_
    _unsafe_index_put index_reduce scatter_add scatter_reduce
    """.split()
)
VIEWS = frozenset(
    f"aten::{name}"
    for name in """
    alias as_strided detach expand permute reshape select slice squeeze t transpose unsqueeze view _unsafe_view
    """.split()
)


@dataclass(frozen=True)
class Operation:
    """One operator of a step.

    Attributes:
        index: in the order of execution, from 0.
        name: ``aten::addmm``.
        phase: ``forward`` or ``backward``.
        module: path of the module that called it, or whose call it is the gradient of; empty for the loss function.
        digest: of its results.
    """

    index: int
    name: str
    phase: str
    module: str
    digest: bytes

    def __str__(self) -> str:
        return (
            f"operator {self.index}, {self.name}, {self.phase} pass of {self.module or 'the loss function'}"
        )


@dataclass
class Watch:
    """What watching a step brings.

    Attributes:
        operations: every operator that computes floating numbers, in order; views are left out.
        wanted: index of an operator whose results are to be kept, or None.
        results: those results, copied.
        makers: data pointer of a tensor to the operator that made it last.
    """

    wanted: int | None = None
    operations: list[Operation] = field(default_factory=list[Operation])
    results: list[Tensor] = field(default_factory=list[Tensor])
    makers: dict[int, Operation] = field(default_factory=dict[int, Operation])

    @property
    def random_modules(self) -> tuple[str, ...]:
        """Modules that drew random numbers in the forward pass, in order."""
        return tuple(dict.fromkeys(o.module for o in self.operations if o.name in RANDOM))

    def modules_before_random(self) -> frozenset[str]:
        """Modules whose forward pass came before any random number was drawn; all if none was."""
        found: set[str] = set()
        for operation in self.operations:
            if operation.name in RANDOM:
                break
            found.add(operation.module)
        return frozenset(found)


@contextmanager
def watching(session: Session, job: Job, watch: Watch) -> Generator[None]:
    """Inside, note every operator of the job's loss and of the backward pass into ``watch``.

    The mode is entered within the step's own, so that it sees operators as the step goes on with them. Hooks on the
    model tell whose an operator is; all is as it was at the end.
    """
    stack: list[str] = []
    handles: list[Any] = []
    for name, module in job.model.named_modules():

        def enter(_: nn.Module, __: Any, name: str = name) -> None:
            stack.append(name)

        def leave(_: nn.Module, __: Any, ___: Any) -> None:
            stack.pop()

        handles.append(module.register_forward_pre_hook(enter))
        handles.append(module.register_forward_hook(leave, always_call=True))
    mode, own_loss = _WatchMode(watch, stack), job.loss

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        with mode:
            return own_loss(model, batch)

    job.loss = loss
    session.listeners.around_backward = lambda: mode
    try:
        yield
    finally:
        job.loss = own_loss
        session.listeners.around_backward = None
        for handle in handles:
            handle.remove()


class _WatchMode(TorchDispatchMode):
    def __init__(self, watch: Watch, stack: list[str]) -> None:
        super().__init__()
        self._watch, self._stack = watch, stack
        self._modules: dict[int, str] = {}  # by number of the autograd node

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # Autograd numbers its nodes; the node of an operator is made just before the operator runs.
        node: Any = torch._C._current_autograd_node()  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
        if node is None:
            phase, module = "forward", self._stack[-1] if self._stack else ""
            number: int = torch._C._autograd._get_sequence_nr()  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
            # The first operator seen with a number made the node; later ones make none, such as a counter's.
            self._modules.setdefault(number - 1, module)
        else:
            phase, module = "backward", self._modules.get(node._sequence_nr(), "")
        result = func(*args, **(kwargs or {}))
        with _disable_current_modes():  # what follows is no part of the step
            self._note(str(func._schema.name), phase, module, result)
        return result

    def _note(self, name: str, phase: str, module: str, result: Any) -> None:
        floating = [t for t in tree_leaves(result) if isinstance(t, Tensor) and t.is_floating_point()]
        if not floating or name in VIEWS:
            return  # a view has the pointer of what it shows, whose maker is known
        watch = self._watch
        hashed = hashlib.blake2b(digest_size=16)
        dense = [t.detach().to_dense() if t.layout != torch.strided else t.detach() for t in floating]
        for tensor in dense:
            hashed.update(f"{tensor.dtype}{list(tensor.shape)}".encode())
            hashed.update(_bytes_of(tensor))
        operation = Operation(len(watch.operations), name, phase, module, hashed.digest())
        watch.operations.append(operation)
        for tensor in floating:
            if tensor.layout == torch.strided:
                watch.makers[tensor.data_ptr()] = operation
        if operation.index == watch.wanted:
            watch.results = [tensor.clone() for tensor in dense]


def _bytes_of(tensor: Tensor) -> memoryview | bytes:
    plain = tensor.cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().data if plain.numel() else b""


def first_difference(own: Watch, other: Watch) -> Operation | None:
    """Return the first operator of ``own`` whose results are not those of ``other``; None if all are the same."""
    for mine, theirs in zip(own.operations, other.operations, strict=False):
        if (mine.name, mine.digest) != (theirs.name, theirs.digest):
            return mine
    if len(own.operations) > len(other.operations):
        return own.operations[len(other.operations)]
    return None
