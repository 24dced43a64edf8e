"""Adam, AdamW and SGD in arithmetic that every machine repeats bit for bit (spec/optimizers.md).

Binary64 addition, subtraction, multiplication, division and square root, each rounded by itself, in one written
order; operands and results are float32 values. So there is nothing to log: from one state, one gradient and
one set of numbers there is one next state. Tensors on the CPU go through one fused pass, others through the same
operations one by one. Both equal :mod:`tallystick.numerics.reference` bit for bit.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from tallystick.errors import Nondeterminism
from tallystick.numerics.kernels import optimizer_updates
from tallystick.numerics.reference import FP32_LARGEST
from tallystick.numerics.tensor_measures import KINDS

CHUNK = 1 << 22  # elements held in temporaries at a time on devices without a fused kernel
ADAM_TENSORS = ("parameter", "exp_avg", "exp_avg_sq")
SGD_TENSORS = ("parameter", "momentum_buffer")


@dataclass(frozen=True)
class AdamNumbers:
    """The numbers of one Adam or AdamW step, the same for every element.

    Attributes:
        keep: what the parameter is multiplied by first: 1 - lr * weight_decay for AdamW, 1 for Adam.
        decay: what of the parameter is added to the gradient: 0 for AdamW, weight_decay for Adam.
        beta1, fresh1, beta2, fresh2: betas, and 1 less each.
        rate: lr over the first bias correction.
        unbias: 1 over the square root of the second bias correction.
        eps: added to the denominator.
    """

    keep: float
    decay: float
    beta1: float
    fresh1: float
    beta2: float
    fresh2: float
    rate: float
    unbias: float
    eps: float


@dataclass(frozen=True)
class SgdNumbers:
    """The numbers of one SGD step: learning rate, weight decay, momentum, 1 - dampening, and Nesterov's variant."""

    lr: float
    decay: float
    momentum: float
    fresh: float
    nesterov: bool


def power(base: float, exponent: int) -> float:
    """Return ``base`` to a whole power by squaring, lowest bit first: the library's ``pow`` differs between platforms."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result = result * base
        base = base * base
        exponent >>= 1
    return result


@lru_cache(maxsize=64)  # the same for every tensor of a group
def adam_numbers(
    step: int, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, decoupled: bool
) -> AdamNumbers:
    """Return the numbers of step ``step``, counted from 1; ``decoupled`` is AdamW.

    Raises:
        Nondeterminism: a beta is below 0 or so large that its bias correction is not above 0.
    """
    correction1, correction2 = 1.0 - power(betas[0], step), 1.0 - power(betas[1], step)
    if min(betas) < 0.0 or not (correction1 > 0.0 and correction2 > 0.0):
        raise Nondeterminism(
            f"Adam: betas {betas} give bias corrections {correction1!r} and {correction2!r} at step {step}; "
            "both must be above 0"
        )
    return AdamNumbers(
        keep=1.0 - lr * weight_decay if decoupled else 1.0,
        decay=0.0 if decoupled else weight_decay,
        beta1=betas[0],
        fresh1=1.0 - betas[0],
        beta2=betas[1],
        fresh2=1.0 - betas[1],
        rate=lr / correction1,
        unbias=1.0 / math.sqrt(correction2),
        eps=eps,
    )


sgd_numbers = lru_cache(maxsize=64)(SgdNumbers)  # the same for every tensor of a group


class Marks:
    """Fingerprints taken by the pass that writes the tensors, so that no other pass reads them.

    Args:
        ordinals: the number of each floating tensor in the state's fingerprint, by its address.

    ``taken`` is the sum of those taken, ``held`` the addresses of their tensors.
    """

    def __init__(self, ordinals: Mapping[int, int]) -> None:
        self.ordinals = ordinals
        self.taken = 0
        self.held: set[int] = set()

    def bases(self, *tensors: Tensor) -> optimizer_updates.Bases:
        """Return what a kernel needs to take those of ``tensors``; nothing if one of them has no number."""
        numbers = [self.ordinals.get(tensor.data_ptr()) for tensor in tensors]
        return tuple(number << 40 for number in numbers if number is not None) if None not in numbers else ()

    def add(self, taken: int, *tensors: Tensor) -> None:
        """Note the sum of the fingerprints of ``tensors``."""
        self.taken += taken
        self.held |= {tensor.data_ptr() for tensor in tensors}


def adam_step(
    parameter: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    numbers: AdamNumbers,
    *,
    name: str,
    marks: Marks | None = None,
) -> None:
    """Update ``parameter`` and both moments in place, ``name`` being the parameter's name for messages.

    ``parameter`` and ``gradient`` are contiguous, float32 or float64, and hold float32 values; ``exp_avg`` and
    ``exp_avg_sq`` are contiguous float32 of the same numel and device.

    Raises:
        Nondeterminism: a result is not finite as float32; the message names tensor and element.
    """
    if parameter.device.type == "cpu":
        at = _update(parameter, gradient, exp_avg, exp_avg_sq)
        bases = () if marks is None else marks.bases(parameter, exp_avg, exp_avg_sq)
        good, taken = optimizer_updates.adam(at, _in_c(numbers), threads=torch.get_num_threads(), bases=bases)
        if marks is not None and bases:
            marks.add(taken, parameter, exp_avg, exp_avg_sq)
    else:
        rows = [_row(tensor) for tensor in (parameter, gradient, exp_avg, exp_avg_sq)]
        good = _adam_tensor(rows[0], rows[1], rows[2], rows[3], numbers)
    if not good:
        raise _not_finite(name, (parameter, exp_avg, exp_avg_sq), ADAM_TENSORS)


def sgd_step(
    parameter: Tensor, gradient: Tensor, buffer: Tensor | None, numbers: SgdNumbers, *, first: bool, name: str,
    marks: Marks | None = None,
) -> None:  # fmt: skip
    """Update ``parameter``, and ``buffer`` where there is momentum, in place; tensors are as in ``adam_step``.

    ``buffer`` is None without momentum; ``first`` says that it holds nothing yet and becomes the gradient.

    Raises:
        Nondeterminism: a result is not finite as float32; the message names tensor and element.
    """
    if parameter.device.type == "cpu":
        held = () if buffer is None else (buffer,)
        written = (parameter, *held)
        bases = () if marks is None else marks.bases(*written)
        at = _update(parameter, gradient, *held)
        good, taken = optimizer_updates.sgd(
            at, _sgd_in_c(numbers, first), threads=torch.get_num_threads(), bases=bases
        )
        if marks is not None and bases:
            marks.add(taken, *written)
    else:
        row = None if buffer is None else _row(buffer)
        good = _sgd_tensor(_row(parameter), _row(gradient), row, numbers, first=first)
    if not good:
        tensors = (parameter,) if buffer is None else (parameter, buffer)
        raise _not_finite(name, tensors, SGD_TENSORS)


def _update(parameter: Tensor, gradient: Tensor, *state: Tensor) -> optimizer_updates.Update:
    """Return where the kernels find these tensors."""
    tensors, n = (parameter, gradient, *state), parameter.numel()
    if any(not tensor.is_contiguous() or tensor.numel() != n for tensor in tensors):
        raise ValueError("tensors of different lengths, or not contiguous")
    kind = KINDS.get(parameter.dtype)
    if kind is None or gradient.dtype != parameter.dtype or any(x.dtype != torch.float32 for x in state):
        raise TypeError(
            f"{parameter.dtype} parameter, {gradient.dtype} gradient; both must be float32 or float64, and the state float32"
        )
    at, slope, *held = (tensor.data_ptr() for tensor in tensors)
    return optimizer_updates.Update(at, slope, tuple(held), kind, n)


@lru_cache(maxsize=64)
def _in_c(n: AdamNumbers) -> ctypes.Array[ctypes.c_double]:
    plain = (n.keep, n.decay, n.beta1, n.fresh1, n.beta2, n.fresh2, n.rate, n.unbias, n.eps)
    return (ctypes.c_double * len(plain))(*plain)


@lru_cache(maxsize=64)
def _sgd_in_c(n: SgdNumbers, first: bool) -> optimizer_updates.Sgd:
    momentum, fresh = (0.0, 1.0) if first else (n.momentum, n.fresh)
    return optimizer_updates.Sgd(n.lr, n.decay, momentum, fresh, n.momentum, n.nesterov)


def _row(tensor: Tensor) -> Tensor:
    """Return all elements as one dimension of the same memory."""
    return tensor.detach().view(-1)


def _not_finite(name: str, tensors: tuple[Tensor, ...], keys: tuple[str, ...]) -> Nondeterminism:
    for tensor, key in zip(tensors, keys, strict=False):
        bad = (~(_row(tensor).abs() <= FP32_LARGEST)).nonzero()
        if bad.numel():
            where = f"{name}/{key}: element {int(bad[0].item())}"
            return Nondeterminism(f"{where} is not finite or does not fit float32 after the optimizer")
    raise AssertionError(f"{name}: a result was found not to be finite, and all of them are")


def _narrow(wide: Tensor, out: Tensor) -> bool:
    """Write the float32 values nearest to ``wide`` into ``out``, -0.0 as +0.0; return whether all are finite."""
    narrow = wide.to(torch.float32) + 0.0
    out.copy_(narrow)
    return bool((narrow.abs() <= FP32_LARGEST).all())


def _adam_tensor(p: Tensor, g: Tensor, m: Tensor, v: Tensor, n: AdamNumbers) -> bool:
    good = True
    for start in range(0, p.numel(), CHUNK):
        place = slice(start, start + CHUNK)
        x = p[place].double()
        y = g[place].double() + n.decay * x
        x = x * n.keep
        mean = n.beta1 * m[place].double() + n.fresh1 * y
        square = n.beta2 * v[place].double() + n.fresh2 * (y * y)
        x = x - (n.rate * mean) / (square.sqrt() * n.unbias + n.eps)
        good &= _narrow(x, p[place]) & _narrow(mean, m[place]) & _narrow(square, v[place])
    return good


def _sgd_tensor(p: Tensor, g: Tensor, held: Tensor | None, n: SgdNumbers, *, first: bool) -> bool:
    good = True
    for start in range(0, p.numel(), CHUNK):
        place = slice(start, start + CHUNK)
        x = p[place].double()
        y = g[place].double() + n.decay * x
        if held is not None:
            b = y if first else n.momentum * held[place].double() + n.fresh * y
            y = y + n.momentum * b if n.nesterov else b
            good &= _narrow(b, held[place])
        good &= _narrow(x - n.lr * y, p[place])
    return good
