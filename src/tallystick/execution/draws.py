"""Random operators in a job's ``build`` and ``batch``: the same bits on every processor (spec/random.md 8).

The integers are torch's own: its generator on the CPU is integer arithmetic, the default one and a job's own alike, so seeds,
states and the integer draws (randint, randperm, random_) stay what they are. What torch makes of them in floating point differs
between instruction sets; that is done here, in binary64 and rounded once. Around every call the default generator is
seeded from the run's seed, the use and the step; a job that seeds it anew, or brings a generator, draws from that seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tallystick.execution.dispatch.randomness import UNIT24, bound_arguments
from tallystick.numerics.kernels import random_words
from tallystick.numerics.random import COEFFICIENTS, inverse_normal, portable_log, stream_key

Floats = npt.NDArray[np.float64]
Whole = npt.NDArray[np.int64]
AT_A_TIME = 1 << 16  # elements drawn at once: what is drawn does not depend on it


class PortableDraws(TorchDispatchMode):
    """Inside, random operators on the CPU give the same bits on every processor; everything else is torch's own."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run ``func``, or draw what it draws."""
        kwargs = kwargs or {}
        draw = _DRAWS.get(func._schema.name.removeprefix("aten::").rstrip("_"))
        if draw is not None:
            given = bound_arguments(func, args, kwargs)
            like = _like(func, given)
            if like is not None and _is_ours(like, given.get("generator")):
                return draw(func, given, like)
        return func(*args, **kwargs)


@contextmanager
def portable_draws(seed: int, use: str, step: int = 0) -> Generator[None]:
    """Inside, draw portably, by default from the stream of ``use`` (ASCII) at ``step``; the caller's generator is put back.

    Raises:
        InvalidInput: ``seed`` or ``step`` is outside [0, 2**64).
    """
    low, high = stream_key(seed, use, step, 0, 0, 0)
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(high << 32 | low)
    try:
        with PortableDraws():
            yield
    finally:
        torch.set_rng_state(before)


def drawing_portably(batch: Callable[[int], Any], seed: int) -> Callable[[int], Any]:
    """Return ``batch`` with every call inside ``portable_draws`` of its step."""

    def portable(step: int) -> Any:
        with portable_draws(seed, "batch", step):
            return batch(step)

    return portable


def _like(func: Any, given: dict[str, Any]) -> Tensor | None:
    """Return the tensor to be written, or a new one like what is to be returned; None where that is not for us."""
    x = given.get("self", given.get("input"))
    if isinstance(x, Tensor):
        if func._schema.is_mutable:
            return x
        dtype, device = given.get("dtype"), given.get("device")
        dtype = dtype if isinstance(dtype, torch.dtype) else None
        return torch.empty_like(x, dtype=dtype, device=device if isinstance(device, torch.device) else None)
    sizes = [v.shape for v in (given.get("mean"), given.get("std")) if isinstance(v, Tensor)]
    if sizes:
        found = next(v for v in (given["mean"], given["std"]) if isinstance(v, Tensor))
        return found.new_empty(torch.broadcast_shapes(*sizes))
    if "size" not in given or given.get("names") is not None or "out" in given:
        return None
    dtype, device = given.get("dtype"), given.get("device")
    if given.get("layout") not in (None, torch.strided, 0):
        return None
    return torch.empty(
        given["size"],
        dtype=dtype if isinstance(dtype, torch.dtype) else torch.get_default_dtype(),
        device=device if isinstance(device, (torch.device, str)) else None,
    )


def _is_ours(like: Tensor, generator: torch.Generator | None) -> bool:
    """Whether the generator is one of the CPU's; what another device draws of its own stays that device's."""
    if like.device.type == "meta" or like.is_complex() or type(like) not in (Tensor, torch.nn.Parameter):
        return False
    return generator is None or generator.device.type == "cpu"


def _drawn(
    like: Tensor, generator: torch.Generator | None, bits: int, change: Callable[[Whole, slice], Any]
) -> Tensor:
    """Fill ``like``, in the order of its indexes, with what ``change`` makes of whole numbers below ``2**bits``."""
    out = torch.empty(like.shape, dtype=torch.float64 if like.dtype == torch.float64 else torch.float32)
    if not like.is_floating_point():
        out = torch.empty(like.shape, dtype=torch.float64)
    flat = out.reshape(-1).numpy()
    for start in range(0, flat.size, AT_A_TIME):
        here = slice(start, min(start + AT_A_TIME, flat.size))
        whole = torch.empty(here.stop - here.start, dtype=torch.int64)
        whole.random_(0, 1 << bits, generator=generator)
        flat[here] = change(whole.numpy(), here)
    with torch.no_grad():
        return like.copy_(out)


def _open_unit(whole: Whole) -> Floats:
    return (whole.astype(np.float64) + 0.5) * 2.0**-32


def _uniform(func: Any, given: dict[str, Any], like: Tensor) -> Tensor:
    low, high = float(given.get("from", 0.0)), float(given.get("to", 1.0))
    bits, unit = (53, 2.0**-53) if like.dtype == torch.float64 else (24, UNIT24)
    if like.dtype == torch.float32:
        low, high = float(np.float32(low)), float(np.float32(high))
        width = float(np.float32(high - low))
    else:
        width = high - low
    return _drawn(like, given.get("generator"), bits, lambda whole, _: whole * unit * width + low)


def _normal(func: Any, given: dict[str, Any], like: Tensor) -> Tensor:
    mean, std = (_spread(given.get(name, plain), like) for name, plain in (("mean", 0.0), ("std", 1.0)))

    def change(whole: Whole, here: slice) -> Floats:
        drawn = np.empty(whole.size)
        random_words.normal(whole, COEFFICIENTS, drawn)
        return drawn * std(here) + mean(here)

    return _drawn(like, given.get("generator"), 32, change)


def _spread(value: Any, like: Tensor) -> Callable[[slice], Any]:
    if not isinstance(value, Tensor):
        return lambda _: float(value)
    flat = value.detach().cpu().double().expand(like.shape).reshape(-1).numpy()
    return lambda here: flat[here]


def _bernoulli(func: Any, given: dict[str, Any], like: Tensor) -> Tensor:
    p = given.get("p")
    chance = _spread(given["self"].clone() if p is None else p, like)
    return _drawn(like, given.get("generator"), 24, lambda whole, here: whole * UNIT24 < chance(here))


def _dropout(func: Any, given: dict[str, Any], like: Tensor) -> tuple[Tensor, Tensor]:
    x, p = given["input"], float(given["p"])
    if given["train"] is False:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    kept = _drawn(like, None, 24, lambda whole, _: whole * UNIT24 < 1.0 - p)
    return kept * x * (0.0 if p == 1.0 else 1.0 / (1.0 - p)), kept.bool()


def _exponential(func: Any, given: dict[str, Any], like: Tensor) -> Tensor:
    rate = float(given["lambd"])
    return _drawn(like, given.get("generator"), 32, lambda w, _: -portable_log(_open_unit(w)) / rate)


def _geometric(func: Any, given: dict[str, Any], like: Tensor) -> Tensor:
    p = float(given["p"])
    scale = float(portable_log(np.asarray([1.0 - p]))[0]) if 0.0 < p < 1.0 else -math.inf
    return _drawn(
        like, given.get("generator"), 32,
        lambda w, _: np.maximum(np.ceil(portable_log(_open_unit(w)) / scale), 1.0),
    )  # fmt: skip


def _multinomial(func: Any, given: dict[str, Any], like: Tensor) -> Tensor:
    """Draw by row: with replacement by the sums so far, without by the smallest of exponential numbers over weights."""
    x, count, generator = given["self"].detach().cpu().double(), given["num_samples"], given.get("generator")
    rows = x.reshape(-1, x.shape[-1]).numpy()
    if not np.isfinite(rows).all() or (rows < 0).any() or (rows.sum(axis=1) <= 0).any():
        return func(
            given["self"], count, given["replacement"], generator=generator
        )  # refused there, in torch's words
    if not given["replacement"] and count > rows.shape[1]:
        return func(given["self"], count, given["replacement"], generator=generator)
    found = np.empty((len(rows), count), dtype=np.int64)
    for at, row in enumerate(rows):
        drawn = torch.empty(count if given["replacement"] else row.size, dtype=torch.float64)
        u = _drawn(drawn, generator, 32, lambda whole, _: _open_unit(whole)).numpy()
        if given["replacement"]:
            upto = np.cumsum(row)
            last = int(np.flatnonzero(row)[-1])
            found[at] = np.minimum(np.searchsorted(upto, u * upto[-1], side="right"), last)
        else:
            with np.errstate(divide="ignore"):
                found[at] = np.argsort(-portable_log(u) / row, kind="stable")[:count]
    return torch.from_numpy(found.reshape(*x.shape[:-1], count)).to(given["self"].device)


def _erfinv(func: Any, given: dict[str, Any], like: Tensor) -> Tensor:
    """Give the inverse error function, on which truncated normal numbers rest: torch's differs between instruction sets."""
    x = given["self"].detach().cpu().double().numpy()
    u = (x + 1.0) * 0.5
    inside = (u > 0.0) & (u < 1.0)
    y = inverse_normal(np.where(inside, u, 0.5)) * math.sqrt(0.5)
    y = np.where(inside, y, np.where(np.abs(x) == 1.0, np.copysign(np.inf, x), np.nan))
    with torch.no_grad():
        return like.copy_(torch.from_numpy(y))


_DRAWS: dict[str, Callable[[Any, dict[str, Any], Tensor], Any]] = {
    "uniform": _uniform, "rand": _uniform, "rand_like": _uniform,
    "normal": _normal, "randn": _normal, "randn_like": _normal,
    "bernoulli": _bernoulli, "native_dropout": _dropout, "exponential": _exponential,
    "geometric": _geometric, "multinomial": _multinomial,
    "erfinv": _erfinv, "special_erfinv": _erfinv,
}  # fmt: skip
