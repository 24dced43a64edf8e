"""Which optimizers have portable arithmetic, and their step on a session's parameters (spec/optimizers.md).

The optimizer itself stays torch's: this puts the same tensors under the same keys into its state, so that
checkpoints and ``state_dict`` do not change, and leaves its own ``step`` nothing to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tallystick.errors import Nondeterminism
from tallystick.numerics.optimizers import Marks, adam_numbers, adam_step, sgd_numbers, sgd_step

ADAM_OPTIONS = {"lr", "betas", "eps", "weight_decay"}
SGD_OPTIONS = {"lr", "momentum", "dampening", "weight_decay"}
SWITCHES = {"amsgrad", "maximize", "capturable", "differentiable", "fused"}  # only off
FREE = {"params", "foreach", "nesterov", "decoupled_weight_decay", "initial_lr", "param_names"}


def why_not_portable(optimizer: torch.optim.Optimizer) -> str | None:
    """Return the reason why ``optimizer`` needs general arithmetic; None if it is one of the portable ones."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
        return f"{type(optimizer).__name__} is not torch's own Adam, AdamW or SGD"
    numbers = SGD_OPTIONS if type(optimizer) is torch.optim.SGD else ADAM_OPTIONS
    for index, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            if name in SWITCHES and value:
                return f"group {index} has {name} switched on"
            if name in numbers and not _is_number(value):
                return f"group {index} has {name} = {value!r}, not a plain number"
            if name not in numbers | SWITCHES | FREE and not isinstance(value, (int, float, str, bool)):
                return f"group {index} has an option {name} that is not known here"
    if any(p.is_complex() for group in optimizer.param_groups for p in group["params"]):
        return "it trains complex numbers"
    return None


def _is_number(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return len(value) == 2 and all(map(_is_number, value))
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def portable_step(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], step: int, marks: Marks | None = None
) -> None:
    """Update every parameter that has a gradient, already rounded; the gradient is gone then.

    ``names`` gives the parameters' names by ``id``, ``step`` the session's step, both for messages. ``marks`` takes the
    fingerprints of what is written, where it is known by its address.

    Raises:
        Nondeterminism: a result is not finite, or an option was changed to one that is not portable.
    """
    reason = why_not_portable(optimizer)
    if reason is not None:
        raise Nondeterminism(
            f"step {step}: the optimizer's arithmetic is stated to be portable, but {reason}"
        )
    if (
        getattr(optimizer, "grad_scale", None) is not None
        or getattr(optimizer, "found_inf", None) is not None
    ):
        raise Nondeterminism(
            f"step {step}: a gradient scaler leaves the scaling to the optimizer; unscale before the step"
        )
    is_sgd = type(optimizer) is torch.optim.SGD
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is None:
                continue
            gradient, p.grad = p.grad, None
            if not p.is_contiguous():
                p.data = p.data.contiguous()
            name = f"step {step}: {names[id(p)]}"
            (_sgd if is_sgd else _adam)(optimizer.state, group, p, gradient, name, marks)


def _adam(
    state: dict[Any, Any],
    group: dict[str, Any],
    p: nn.Parameter,
    gradient: Tensor,
    name: str,
    marks: Marks | None,
) -> None:
    held = state[p]
    if not held:
        held["step"] = torch.zeros((), dtype=torch.float32)
        held["exp_avg"], held["exp_avg_sq"] = _zeros(p), _zeros(p)
    held["step"] += 1
    beta1, beta2 = group["betas"]
    numbers = adam_numbers(
        int(held["step"].item()),
        lr=float(group["lr"]),
        betas=(float(beta1), float(beta2)),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        decoupled=bool(group.get("decoupled_weight_decay", False)),
    )
    mean, square = _single(held, "exp_avg"), _single(held, "exp_avg_sq")
    adam_step(p.data, gradient, mean, square, numbers, name=name, marks=marks)


def _sgd(
    state: dict[Any, Any],
    group: dict[str, Any],
    p: nn.Parameter,
    gradient: Tensor,
    name: str,
    marks: Marks | None,
) -> None:
    momentum = float(group["momentum"])
    fresh, nesterov = 1.0 - float(group["dampening"]), bool(group["nesterov"])
    numbers = sgd_numbers(float(group["lr"]), float(group["weight_decay"]), momentum, fresh, nesterov)
    if momentum == 0.0:
        sgd_step(p.data, gradient, None, numbers, first=False, name=name, marks=marks)
        return
    held = state[p]
    first = held.get("momentum_buffer") is None
    if first:
        held["momentum_buffer"] = _zeros(p)
    sgd_step(p.data, gradient, _single(held, "momentum_buffer"), numbers, first=first, name=name, marks=marks)


def _zeros(p: Tensor) -> Tensor:
    return torch.zeros(p.shape, dtype=torch.float32, device=p.device)


def _single(held: dict[str, Any], key: str) -> Tensor:
    """Return a state tensor, made float32 and contiguous in its place first."""
    if held[key].dtype != torch.float32 or not held[key].is_contiguous():
        held[key] = held[key].to(torch.float32).contiguous()
    return held[key]
