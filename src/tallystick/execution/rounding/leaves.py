"""The 2024 paper's sites: outputs of leaf modules and gradients of their inputs, rounded where they arise.

Hooks stand on the modules for the length of one micro-batch; the model is not wrapped. Sites are numbered as the
forward pass comes to them, the gradient of an input with its input, so the order of the backward pass does not matter:

* each floating tensor that a leaf module (one without submodules) returns is an ``activation``;
* each floating tensor that it is given and that needs a gradient is an ``activation_gradient``: what this module
  sends back for it, before it is added to what others send back;
* so is what the whole model returns, in as far as a leaf has not just rounded it, and the gradient of it.

The gradient passes an activation's rounding unchanged (straight through). What lies between two leaves, functional
operators, keeps its noise up to the next site, as in the paper. A module that is called again, by the job or because
a checkpoint recomputes it in the backward pass, has new sites.

Refused by name: scripted modules, leaf modules that return anything but tensors in tuples, lists and dicts, and
gradients of rounded gradients. Not rounded: integers, sparse tensors, tensors without elements.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils._python_dispatch import (
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage] # the only way to step out of a mode
)
from torch.utils._pytree import tree_map

from tallystick.errors import Nondeterminism
from tallystick.numerics.log import Kind

Site = tuple[int, int]
PLAIN = (int, float, bool, complex, str, bytes, torch.dtype, torch.device, torch.Size)


class ActivationContext(Protocol):
    """Where activations are rounded."""

    def activation(self, kind: Kind, ordinal: int, x: Tensor, *, name: str) -> Tensor:
        """Return ``x`` rounded as site ``(kind, ordinal)``; a new tensor, or ``x`` itself."""
        ...


class LeafSites:
    """Installs the rounding hooks on a model's leaf modules.

    Attributes:
        names: what people call the sites met so far.
        layers: the class of the module of each of them.
        sizes: elements of each of them in the last micro-batch.
    """

    def __init__(self, model: nn.Module) -> None:
        self.names: dict[Site, str] = {}
        self.layers: dict[Site, str] = {}
        self.sizes: dict[Site, int] = {}
        self._model = model
        self._context: ActivationContext | None = None
        self._next: dict[Kind, int] = {}
        self._calls: dict[str, int] = {}
        self._rounded: list[weakref.ref[Tensor]] = []
        self._step = 0
        for name, module in model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                raise Nondeterminism(
                    f"module {name or 'model'} is scripted, its parts cannot be rounded; give the module before torch.jit.script"
                )

    @contextmanager
    def rounding(self, context: ActivationContext, step: int) -> Generator[None]:
        """Inside, the model's leaf modules round under ``context``; sites are numbered from 0."""
        self._context, self._step = context, step
        self._next = {Kind.ACTIVATION: 0, Kind.ACTIVATION_GRADIENT: 0}
        self._calls, self._rounded = {}, []
        handles: list[Any] = []
        try:
            for name, module in self._model.named_modules():
                if not any(True for _ in module.children()):
                    handles.append(module.register_forward_pre_hook(self._entering(name), with_kwargs=True))
                    handles.append(module.register_forward_hook(self._leaving(name)))
            handles.append(self._model.register_forward_hook(self._leaving_model))
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._context, self._rounded = None, []

    # -- hooks -------------------------------------------------------------------------------

    def _entering(self, name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            self._calls[name] = self._calls.get(name, 0) + 1
            called = self._called(name, module)
            in_place = bool(getattr(module, "inplace", False))

            def watch(value: Any) -> Any:
                return self._watched(value, called, module, in_place) if isinstance(value, Tensor) else value

            return tree_map(watch, (args, kwargs))

        return hook

    def _leaving(self, name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            called = self._called(name, module)

            def one(value: Any) -> Any:
                if isinstance(value, Tensor):
                    return self._output(value, called, module)
                if value is None or isinstance(value, PLAIN):
                    return value
                raise Nondeterminism(
                    f"module {called} returns a {type(value).__name__}; policy leaf rounds tensors in tuples, lists and dicts"
                )

            return tree_map(one, output)

        return hook

    def _leaving_model(self, module: nn.Module, args: Any, output: Any) -> Any:
        def one(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if not any(value is rounded() for rounded in self._rounded):
                value = self._output(value, "model", module)
            return self._watched(value, "the model's output", module, in_place=False)

        found = tree_map(one, output)
        self._rounded = []
        return found

    def _called(self, name: str, module: nn.Module) -> str:
        again = self._calls.get(name, 1)
        return (name or type(module).__name__) + (f" (call {again})" if again > 1 else "")

    # -- one tensor --------------------------------------------------------------------------

    def _site(self, kind: Kind, name: str, module: nn.Module, numel: int) -> int:
        ordinal = self._next[kind]
        self._next[kind] = ordinal + 1
        self.names[(kind, ordinal)] = name
        self.layers[(kind, ordinal)] = type(module).__name__
        self.sizes[(kind, ordinal)] = numel
        return ordinal

    def _output(self, x: Tensor, name: str, module: nn.Module) -> Tensor:
        if not _has_site(x, name):
            return x
        ordinal = self._site(Kind.ACTIVATION, f"output of {name}", module, x.numel())
        rounded = self._round(Kind.ACTIVATION, ordinal, x)
        if rounded is not x:
            rounded = _straight_through(x, rounded)
        self._rounded = [
            *self._rounded[-7:],
            weakref.ref(rounded),
        ]  # a model returns what its last leaves returned
        return rounded

    def _watched(self, x: Tensor, name: str, module: nn.Module, in_place: bool) -> Tensor:
        """Return ``x`` for the module alone, so that the gradient that comes back is this module's."""
        if not (torch.is_grad_enabled() and x.requires_grad and _has_site(x, name)):
            return x
        ordinal = self._site(Kind.ACTIVATION_GRADIENT, f"gradient at {name}", module, x.numel())
        own = (
            x.clone() if in_place else x.view_as(x)
        )  # a view that is written to loses its place in the graph
        own.register_hook(lambda gradient: self._gradient(gradient, ordinal, name))
        return own

    def _gradient(self, gradient: Tensor, ordinal: int, name: str) -> Tensor:
        if gradient.requires_grad:
            raise Nondeterminism(
                f"gradient at {name}: is differentiated again, and its rounding has no derivative; use policy fp64"
            )
        if not _has_site(gradient, name):
            return gradient
        return self._round(Kind.ACTIVATION_GRADIENT, ordinal, gradient)

    def _round(self, kind: Kind, ordinal: int, x: Tensor) -> Tensor:
        """Return ``x`` rounded, in its own memory layout, or ``x`` itself where the site is passed through."""
        assert self._context is not None, "a backward pass ran after its micro-batch was over"
        with torch.no_grad(), _disable_current_modes():
            dense = x.detach().contiguous()
            name = f"step {self._step}: {self.names[(kind, ordinal)]}"
            rounded = self._context.activation(kind, ordinal, dense, name=name)
            if rounded is dense:
                return x
            return rounded if x.is_contiguous() else torch.empty_like(x).copy_(rounded)


class _StraightThrough(torch.autograd.Function):
    """Takes the rounded value's place in the forward pass, and does nothing in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounded: list[Tensor]) -> Tensor:
        return rounded.pop()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


def _straight_through(x: Tensor, rounded: Tensor) -> Tensor:
    """Return ``rounded`` with the gradient of ``x``; it travels in a list, as an input would come back as a view."""
    return _StraightThrough.apply(x, [rounded]) if torch.is_grad_enabled() and x.requires_grad else rounded  # pyright: ignore[reportReturnType]


def _has_site(x: Tensor, name: str) -> bool:
    if not x.is_floating_point() or x.layout != torch.strided or x.numel() == 0:
        return False
    if is_functorch_wrapped_tensor(x):
        raise Nondeterminism(
            f"{name}: runs inside torch.func or vmap, where its output stands for several values; policy leaf rounds one "
            "value as it is computed; call the module outside of it, or use policy fp64"
        )
    if x.dtype != torch.float64:
        raise Nondeterminism(f"{name}: a tensor of {x.dtype}; policy leaf computes in float64")
    return True
