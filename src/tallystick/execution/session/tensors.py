"""The tensors of a model and of the modules beside it: named, converted to the policy's dtype, given back."""

from __future__ import annotations

import functools
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from tallystick.errors import EditedOutside, InvalidInput
from tallystick.execution.session.arithmetic import Arithmetic


class Place(NamedTuple):
    """Where a floating tensor stands: its name, the module that holds it, and what it is called there."""

    name: str
    owner: nn.Module
    key: str

    def find(self) -> Tensor | None:
        """Return the floating tensor that stands there now, if there is one."""
        tensor = getattr(self.owner, self.key, None)
        return tensor if isinstance(tensor, Tensor) and tensor.is_floating_point() else None


class ModelTensors:
    """Every parameter and buffer of a model and of further modules, those it was prepared with.

    Args:
        model: whose optimizer trains ``trained``.
        extra: further modules by name.
        trained: the parameters that the optimizer changes, by ``id``.
    """

    def __init__(
        self, model: nn.Module, extra: Mapping[str, nn.Module], trained: frozenset[int] = frozenset()
    ) -> None:
        self.model = model
        self.modules = [("model", model), *((f"extra/{name}", module) for name, module in extra.items())]
        self.trained = trained
        self._places = list(self._floating_places())
        self._dtypes: dict[str, torch.dtype] = {}
        self._names = self.names()

    @functools.cached_property
    def is_recurrent(self) -> bool:
        """Whether the model has recurrent layers."""
        return any(isinstance(each, nn.RNNBase) for _, module in self.modules for each in module.modules())

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next((p.device for p in self.model.parameters()), torch.device("cpu"))

    def floating(self) -> Iterator[tuple[str, Tensor]]:
        """Every floating parameter and buffer there is now, of those it was prepared with.

        ``find_other`` goes through the modules themselves; a step after which there are others is refused.
        """
        for place in self._places:
            tensor = place.find()
            if tensor is not None:
                yield place.name, tensor

    def slow(self) -> Iterator[tuple[str, Tensor]]:
        """Tensors that something other than the optimizer changes: buffers, frozen parameters, extra modules."""
        for name, tensor in self.floating():
            if id(tensor) not in self.trained:
                yield name, tensor

    def slow_values(self) -> Iterator[tuple[str, Tensor]]:
        """The same tensors without their history."""
        for name, tensor in self.slow():
            yield name, tensor.detach()

    def floating_buffers(self) -> list[tuple[nn.Module, str, Tensor]]:
        """Return every registered floating buffer with the module that holds it and what it is called there."""
        places = [place for place in self._places if "/buffer/" in place.name]
        found = [(place.owner, place.key, getattr(place.owner, place.key)) for place in places]
        return [each for each in found if each[2].is_floating_point()]

    def whole_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Every buffer of whole numbers."""
        for prefix, module in self.modules:
            for name, buffer in module.named_buffers():
                if not buffer.is_floating_point():
                    yield f"{prefix}/buffer/{name}", buffer

    def all_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor that a forward pass may change, integer buffers included."""
        yield from self.slow_values()
        yield from self.whole_buffers()

    def all(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor there is now, trained ones included, without its history."""
        for name, tensor in self.floating():
            yield name, tensor.detach()
        yield from self.whole_buffers()

    def put_back(self, values: Mapping[str, Tensor]) -> None:
        """Give tensors that a pass or the program has changed, or assigned anew, the ``values`` that they had, by name."""
        with torch.no_grad():
            for name, tensor in self.all():
                if name in values and not torch.equal(tensor, values[name].to(tensor.dtype)):
                    tensor.copy_(values[name])

    def standing(self) -> list[tuple[Place, Tensor]]:
        """Return which floating tensor stands where now; others may be assigned to their places."""
        return [(place, tensor) for place in self._places if (tensor := place.find()) is not None]

    @contextmanager
    def in_place(self, stood: Iterable[tuple[Place, Tensor]]) -> Generator[None]:
        """Inside, these tensors stand where they stood before."""
        now = self.standing()
        _assign(stood)
        try:
            yield
        finally:
            _assign(now)

    def convert(self, arithmetic: Arithmetic) -> None:
        """Give every floating tensor the policy's dtype and a contiguous layout; values become float32 values.

        Raises:
            InvalidInput: a tensor of no shape or another dtype, or one that shares memory with another; by name.
        """
        self._refuse_what_has_no_values()
        compute, storages = arithmetic.compute, dict[int, list[tuple[int, int, str]]]()
        with torch.no_grad():
            for name, tensor in self.floating():
                if compute == torch.float32 and tensor.dtype != torch.float32:
                    raise InvalidInput(
                        f"{name} is {tensor.dtype}; policy {arithmetic.policy.name} needs float32: convert it by .float()"
                    )
                if tensor.numel():
                    beside = storages.setdefault(tensor.untyped_storage().data_ptr(), [])
                    start, end = _extent(tensor)
                    for first, last, other in beside:
                        if start < last and first < end:
                            raise InvalidInput(
                                f"{name} shares memory with {other} without being the same parameter; tie them as one"
                            )
                    if beside:  # parts of one flat tensor: each gets memory of its own
                        tensor.data = tensor.data.clone()
                    beside.append((start, end, name))
                self._dtypes[name] = tensor.dtype
                if tensor.dtype != compute:
                    tensor.data = tensor.data.to(torch.float32).to(compute)
                elif compute == torch.float64:
                    tensor.data = tensor.data.to(torch.float32).to(torch.float64)
                if not tensor.is_contiguous():
                    tensor.data = tensor.data.contiguous()

    def _refuse_what_has_no_values(self) -> None:
        for prefix, module in self.modules:
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                if is_lazy(tensor):
                    raise InvalidInput(
                        f"{prefix}/{name} has no shape yet ({type(tensor).__name__}); a tensor needs its shape and values before "
                        "step 0: let build call the model once on a batch, or give the layer its input size"
                    )
            for name, parameter in module.named_parameters():
                if not parameter.is_floating_point():
                    raise InvalidInput(
                        f"{prefix}/{name} is {parameter.dtype}; a parameter must be floating: of complex numbers keep a real "
                        "one and use view_as_complex, register what is not trained as a buffer"
                    )

    def give_back(self) -> None:
        """Give every tensor the dtype that it came with."""
        with torch.no_grad():
            for name, tensor in self.floating():
                if name in self._dtypes and tensor.dtype != self._dtypes[name]:
                    tensor.data = tensor.data.to(self._dtypes[name])

    def names(self) -> list[object]:
        """Return what shows whether the modules hold other tensors: names, which parameters they are, and buffers' shapes."""
        found: list[object] = []
        for prefix, module in self.modules:
            found += [(f"{prefix}/{name}", id(p)) for name, p in module.named_parameters()]
            found += [
                f"{prefix}/buffer/{name} of shape {list(b.shape)}" for name, b in module.named_buffers()
            ]
        return found

    def find_other(self) -> str | None:
        """Return a tensor that the modules hold and were not prepared with, or that one is gone; None if all is as it was."""
        now = self.names()
        if now == self._names:
            return None
        return next((str(name) for name in now if name not in self._names), "a tensor is gone")

    def modes(self) -> dict[str, bool]:
        """Return of every module whether it is in training mode, by name."""
        return {
            f"{prefix}/{name}".rstrip("/"): each.training
            for prefix, module in self.modules
            for name, each in module.named_modules()
        }

    def verify_modes(self, before: Mapping[str, bool], step: int) -> None:
        """Return if every module is in the mode that it was in when ``before`` was taken: no checkpoint holds it.

        Raises:
            EditedOutside: one is not; by name.
        """
        for name, mode in self.modes().items():
            if before.get(name, mode) != mode:
                word = "train" if before[name] else "eval"
                raise EditedOutside(
                    f"step {step}: after the step {name} is no longer in {word} mode, and no checkpoint says so: whoever "
                    f"begins at one computes otherwise; put it back with .{word}()"
                )

    def _floating_places(self) -> Iterator[Place]:
        for prefix, module in self.modules:
            modules = dict(module.named_modules())  # get_submodule is nothing that a scripted module has
            for names, label in (
                (module.named_parameters(), prefix),
                (module.named_buffers(), f"{prefix}/buffer"),
            ):
                for name, tensor in names:
                    if tensor.is_floating_point():
                        path, _, key = name.rpartition(".")
                        yield Place(f"{label}/{name}", modules[path], key)


def _assign(stood: Iterable[tuple[Place, Tensor]]) -> None:
    for place, tensor in stood:
        if place.find() is not tensor:
            setattr(place.owner, place.key, tensor)


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's first byte and of the one behind its last."""
    apart = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (apart + 1) * tensor.element_size()
