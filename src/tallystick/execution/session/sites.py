"""The sites of a step that a specification lists, and their rounding in one step."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from tallystick.execution.rounding.context import RoundingContext
from tallystick.execution.session.parameters import TrainedParameters
from tallystick.execution.session.tensors import ModelTensors
from tallystick.numerics.log import Kind
from tallystick.numerics.policy import Policy
from tallystick.numerics.random import stream_key
from tallystick.numerics.rounded_sites import NO_KEY, Key

Site = tuple[Kind, int]


@dataclass(frozen=True)
class SiteSpec:
    """One gradient, state, buffer or loss site as the specification lists it."""

    kind: Kind
    ordinal: int
    name: str
    shape: tuple[int, ...]
    blocks: int = 0


def list_sites(
    tensors: ModelTensors, trained: TrainedParameters, *, is_portable: bool, follows_up: bool
) -> list[SiteSpec]:
    """Return the sites of every step: loss, gradients, what the optimizer writes, buffers and what follows it."""
    sites = [SiteSpec(Kind.LOSS, 0, "loss", (), 1)]
    for ordinal, (name, p) in enumerate(trained.named):
        sites.append(SiteSpec(Kind.GRADIENT, ordinal, name, tuple(p.shape), 1))
    names = ["parameter", *trained.keys]
    for position, (name, p) in enumerate([] if is_portable else trained.named):
        for offset, key in enumerate(names):
            sites.append(
                SiteSpec(Kind.STATE, position * len(names) + offset, f"{name}/{key}", tuple(p.shape))
            )
    for ordinal, (name, buffer) in enumerate(tensors.slow()):
        shape = tuple(buffer.shape)
        sites.append(SiteSpec(Kind.BUFFER, ordinal, name, shape, 1))
        if follows_up:
            after = slow_ordinal(trained, ordinal, is_portable=is_portable)
            sites.append(SiteSpec(Kind.STATE, after, name, shape))
    return sites


def slow_ordinal(trained: TrainedParameters, buffer: int, *, is_portable: bool) -> int:
    """Return the state site of a buffer that changes after the optimizer: those of the optimizer come first."""
    return buffer + (0 if is_portable else len(trained.named) * (1 + len(trained.keys)))


class StepObserver(Protocol):
    """Who watches a step operator by operator; it changes nothing."""

    def micro_batch(self, number: int, context: object) -> AbstractContextManager[None]:
        """Be inside the forward and backward pass of one micro-batch."""
        ...

    def clipping(self) -> AbstractContextManager[None]:
        """Be where gradients are clipped."""
        ...

    def load_batch(self, batch: Any) -> Any:
        """Take note of the step's data; what is returned is used."""
        ...

    def before_round(self, x: Tensor, out: Tensor) -> list[Any]:
        """Take note of what a site reads."""
        ...

    def after_round(self, kind: Kind, ordinal: int, out: Tensor, operands: list[Any], name: str) -> None:
        """Take note of what a site wrote."""
        ...

    def before_update(self, trained: TrainedParameters) -> None:
        """Take note of what the optimizer reads."""
        ...

    def after_update(self, trained: TrainedParameters) -> None:
        """Take note of what the optimizer wrote."""
        ...


@dataclass(frozen=True)
class SiteRounding:
    """Rounds the sites of one step, and lets whoever watches it write that down.

    Attributes:
        context: records, follows or measures.
        policy: which sites are dithered.
        step, seed, rank: of the dither streams.
        observer: who watches the step, if anybody.
    """

    context: RoundingContext
    policy: Policy
    step: int
    seed: int
    rank: int
    observer: StepObserver | None

    def gradient_key(self, ordinal: int) -> Key:
        """Return the dither stream of a gradient site in this step."""
        return self._stream("dither", ordinal) if self.policy.dithered else NO_KEY

    def gradient(self, ordinal: int, x: Tensor, out: Tensor, name: str) -> None:
        """Round the gradient of the parameter called ``name``."""
        key, site = self.gradient_key(ordinal), f"gradient of {name}"
        self._round(Kind.GRADIENT, ordinal, x, out, key, f"step {self.step}: {site}", site)

    def buffer(self, ordinal: int, x: Tensor, name: str) -> None:
        """Round a buffer in place."""
        key = self._stream("dither-buffer", ordinal) if self.policy.dithered_buffers else NO_KEY
        self._round(Kind.BUFFER, ordinal, x, x, key, name, name)

    def state(self, ordinal: int, new: Tensor, old: Tensor, out: Tensor, name: str) -> None:
        """Round what the optimizer, or what follows it, made of a tensor that was ``old``."""
        new = new.double().contiguous()
        if self.observer is not None:
            self.observer.after_round(Kind.STATE, ordinal, out, [], name)
        self.context.round(
            Kind.STATE, ordinal, new, out=out, old=old, name=f"step {self.step}: {name} after the optimizer"
        )

    def _stream(self, purpose: str, ordinal: int) -> Key:
        return stream_key(self.seed, purpose, self.step, self.rank, 0, ordinal)

    def _round(
        self, kind: Kind, ordinal: int, x: Tensor, out: Tensor, key: Key, name: str, site: str
    ) -> None:
        operands = None if self.observer is None else self.observer.before_round(x, out)
        self.context.round(kind, ordinal, x, out=out, key=key, name=name)
        if self.observer is not None and operands is not None:
            self.observer.after_round(kind, ordinal, out, operands, site)
