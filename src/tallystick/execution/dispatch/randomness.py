"""Random operators of a step, drawn from Philox on whatever device asks (spec/random.md).

Every call has its own stream, keyed by run seed, step, rank, micro-batch and the number of the
call; every element its own word. The number of the call lives in torch's default generator (as its
initial seed): activation checkpointing saves and restores that generator, so a recomputed
forward pass repeats its numbers without being told. A program that seeds it goes on counting from there;
one that asks for a new seed (``torch.seed``) is given one from a stream too, not the system's entropy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tallystick.errors import Nondeterminism
from tallystick.numerics.kernels import random_words
from tallystick.numerics.random import (
    keep_threshold,
    normal,
    permutation,
    portable_log,
    randint,
    stream_key,
    uniform01,
)
from tallystick.numerics.rounded_sites import Key
from tallystick.numerics.rounding_tensors import philox_words

SEED_BITS = 53  # of what ``torch.seed`` returns
UNIT24 = 2.0**-24  # uniform numbers have 24 bits, so that float32 and float64 hold the same ones


class RandomStream:
    """The random operators of one micro-batch; ``start`` begins the next one."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._place = (0, 0, 0)

    def start(self, step: int, rank: int, micro_batch: int) -> None:
        """Begin the streams of one micro-batch at call 0."""
        self._place = (step, rank, micro_batch)
        torch.default_generator.manual_seed(0)

    @contextmanager
    def seeding(self) -> Generator[None]:
        """Inside, torch's default generators take a new seed, where they are asked for one, from the next call's stream.

        Whatever Python calls them by way of ``torch.random``, ``torch.default_generator`` and ``torch.cuda``. A seed of the
        system's entropy would give no other machine the same numbers.
        """
        torch_random: Any = torch.random
        own, others = torch.default_generator, torch.cuda.default_generators
        stand_in = _Reseeded(own, self._new_seed)
        stand_ins = tuple(_Reseeded(each, self._new_seed) for each in others)
        torch_random.default_generator = torch.default_generator = stand_in
        torch.cuda.default_generators = stand_ins
        try:
            yield
        finally:
            torch_random.default_generator = torch.default_generator = own
            if torch.cuda.default_generators is stand_ins:  # else torch has found its devices meanwhile
                torch.cuda.default_generators = others

    def _new_seed(self) -> int:
        return int(randint(self._next_key(), 0, 1, 0, 1 << SEED_BITS)[0])

    def _next_key(self) -> Key:
        call = torch.default_generator.initial_seed()
        torch.default_generator.manual_seed(call + 1)
        step, rank, micro_batch = self._place
        return stream_key(self._seed, "operator", step, rank, micro_batch, call)

    def draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the random operator ``func`` returns, drawn from the next call's stream.

        Raises:
            Nondeterminism: an overload that has no portable form.
        """
        given = bound_arguments(func, args, kwargs)
        if given.get("generator") is not None:
            raise _own_generator(func)
        name = func._schema.name.removeprefix("aten::")
        method = getattr(self, f"_draw_{name.rstrip('_')}", None)
        if method is None:
            raise Nondeterminism(f"operator {func}: has no portable form")
        return method(func, given)

    def thresholds(self, func: Any, generator: object, probability: Tensor) -> Tensor:
        """Return the float64 numbers in [0, 1) that a Bernoulli draw of ``func`` compares ``probability`` with.

        Raises:
            Nondeterminism: it has a generator of its own.
        """
        if generator is not None:
            raise _own_generator(func)
        words = self._words(probability.numel(), probability.device)
        return (words.double() * 2.0**-32).reshape(probability.shape)

    def waits(self, func: Any, generator: object, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """Return the float64 numbers of an exponential distribution of rate 1 by which ``func`` chooses among weights.

        Raises:
            Nondeterminism: it has a generator of its own.
        """
        if generator is not None:
            raise _own_generator(func)
        return self._exponential(shape, device)

    # One method an operator; ``given`` maps the schema's argument names to values.

    def _draw_native_dropout(self, func: Any, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
        x, p, train = given["input"], given["p"], given["train"]
        if train is False or p == 0.0:
            return x.clone(), torch.ones_like(x, dtype=torch.bool)
        keep = self._kept(x.shape, x.device, 1.0 - p)
        scale = 0.0 if p == 1.0 else 1.0 / (1.0 - p)
        return keep.to(x.dtype).mul_(scale).mul_(x), keep

    def _draw_bernoulli(self, func: Any, given: dict[str, Any]) -> Tensor:
        x, p = given["self"], given["p"]
        if (
            func._schema.is_mutable
            and x.device.type == "cpu"
            and x.dtype == torch.float32
            and x.is_contiguous()
        ):
            threshold, threads = keep_threshold(float(p)), torch.get_num_threads()
            random_words.keep(*self._next_key(), 0, threshold, x.detach().numpy(), threads=threads)
            return x
        drawn = self._kept(x.shape, x.device, float(p))
        return x.copy_(drawn) if func._schema.is_mutable else drawn.to(x.dtype)

    def _draw_uniform(self, func: Any, given: dict[str, Any]) -> Tensor:
        x, low, high = given["self"], float(given["from"]), float(given["to"])
        return x.copy_(low + (high - low) * self._uniform(x.shape, x.device))

    def _draw_rand(self, func: Any, given: dict[str, Any]) -> Tensor:
        device, dtype = _where(given)
        return self._uniform(given["size"], device).to(dtype)

    def _draw_rand_like(self, func: Any, given: dict[str, Any]) -> Tensor:
        x = given["self"]
        return self._uniform(x.shape, x.device).to(given.get("dtype") or x.dtype)

    def _draw_normal(self, func: Any, given: dict[str, Any]) -> Tensor:
        mean, std = given["mean"], given["std"]
        if func._schema.is_mutable:
            x = given["self"]
            return x.copy_(float(mean) + float(std) * self._normal(x.shape, x.device))
        spread = [each.detach() for each in (mean, std) if isinstance(each, Tensor)]
        if not spread:
            device, dtype = _where(given)
            return (mean + std * self._normal(given["size"], device)).to(dtype)
        like = torch.broadcast_tensors(*spread)[0]
        return (mean + std * self._normal(like.shape, like.device)).to(spread[0].dtype)

    def _draw_exponential(self, func: Any, given: dict[str, Any]) -> Tensor:
        x = given["self"]
        return x.copy_(self._exponential(x.shape, x.device) / float(given["lambd"]))

    def _draw_geometric(self, func: Any, given: dict[str, Any]) -> Tensor:
        x, p = given["self"], float(given["p"])
        scale = -float(portable_log(np.asarray([1.0 - p]))[0]) if 0.0 < p < 1.0 else math.inf
        return x.copy_((self._exponential(x.shape, x.device) / scale).ceil_().clamp_(min=1.0))

    def _draw_randn(self, func: Any, given: dict[str, Any]) -> Tensor:
        device, dtype = _where(given)
        return self._normal(given["size"], device).to(dtype)

    def _draw_randn_like(self, func: Any, given: dict[str, Any]) -> Tensor:
        x = given["self"]
        return self._normal(x.shape, x.device).to(given.get("dtype") or x.dtype)

    def _draw_randint(self, func: Any, given: dict[str, Any]) -> Tensor:
        device, dtype = _where(given, default=torch.int64)
        drawn = randint(self._next_key(), 0, math.prod(given["size"]), given.get("low", 0), given["high"])
        return torch.from_numpy(drawn).reshape(given["size"]).to(device, dtype)

    def _draw_randint_like(self, func: Any, given: dict[str, Any]) -> Tensor:
        x = given["self"]
        drawn = randint(self._next_key(), 0, x.numel(), given.get("low", 0), given["high"])
        return torch.from_numpy(drawn).reshape(x.shape).to(x.device, given.get("dtype") or x.dtype)

    def _draw_random(self, func: Any, given: dict[str, Any]) -> Tensor:
        x, low, high = given["self"], given.get("from", 0), given.get("to")
        if high is None:
            bits = 24 if x.dtype == torch.float32 else 53 if x.is_floating_point() else None
            high = (1 << bits) + 1 if bits else torch.iinfo(x.dtype).max
        return x.copy_(
            torch.from_numpy(randint(self._next_key(), 0, x.numel(), low or 0, high)).reshape(x.shape)
        )

    def _draw_randperm(self, func: Any, given: dict[str, Any]) -> Tensor:
        device, dtype = _where(given, default=torch.int64)
        return torch.from_numpy(permutation(self._next_key(), given["n"])).to(device, dtype)

    def _words(self, count: int, device: torch.device) -> Tensor:
        key = self._next_key()
        if device.type == "cpu":
            out = np.empty(count, dtype=np.uint32)
            random_words.philox_words(*key, 0, out, threads=torch.get_num_threads())
            return torch.from_numpy(out.astype(np.int64))
        return philox_words(key, 0, -(-count // 4), device)[:count]

    def _kept(self, shape: Any, device: torch.device, p: float) -> Tensor:
        if device.type != "cpu":
            return (self._words(math.prod(shape), device) < keep_threshold(p)).reshape(shape)
        kept = np.empty(shape, dtype=np.bool_)
        random_words.keep(*self._next_key(), 0, keep_threshold(p), kept, threads=torch.get_num_threads())
        return torch.from_numpy(kept)

    def _uniform(self, shape: Any, device: torch.device) -> Tensor:
        return ((self._words(math.prod(shape), device) >> 8).double() * UNIT24).reshape(shape)

    def _exponential(self, shape: Any, device: torch.device) -> Tensor:
        drawn = -portable_log(uniform01(self._next_key(), 0, math.prod(shape)))
        return torch.from_numpy(drawn).reshape(shape).to(device)

    def _normal(self, shape: Any, device: torch.device) -> Tensor:
        return torch.from_numpy(normal(self._next_key(), 0, math.prod(shape))).reshape(shape).to(device)


class _Reseeded(torch.Generator):
    """In a step, stands for one of torch's default generators; a new seed is what ``draw`` returns."""

    def __new__(cls, own: torch.Generator, draw: Callable[[], int]) -> _Reseeded:
        make: Any = super().__new__
        return make(cls, device=own.device)

    def __init__(self, own: torch.Generator, draw: Callable[[], int]) -> None:
        self._own, self._draw = own, draw
        for name in (
            "manual_seed", "initial_seed", "get_state", "set_state", "get_offset", "set_offset", "clone_state",
            "graphsafe_get_state", "graphsafe_set_state",
        ):  # fmt: skip
            setattr(self, name, getattr(own, name))

    def seed(self) -> int:
        number = self._draw()
        self._own.manual_seed(number)
        return number


def _own_generator(func: Any) -> Nondeterminism:
    return Nondeterminism(f"operator {func}: uses a generator of its own, which other devices cannot repeat")


def bound_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by the names that the operator's schema gives them, defaults included."""
    given: dict[str, Any] = {}
    for position, declared in enumerate(func._schema.arguments):
        if position < len(args):
            given[declared.name] = args[position]
        elif declared.name in kwargs:
            given[declared.name] = kwargs[declared.name]
        elif declared.has_default_value():
            given[declared.name] = declared.default_value
    return given


def _where(given: dict[str, Any], default: torch.dtype | None = None) -> tuple[torch.device, torch.dtype]:
    device, dtype = given.get("device") or torch.device("cpu"), given.get("dtype")
    if not isinstance(dtype, torch.dtype):  # not given: the schema's own default is a number
        dtype = default or torch.get_default_dtype()
    return torch.device(device), dtype
