"""The optimizer's numbers: read, set, and kept to 40 significant bits."""

from __future__ import annotations

import math
from typing import Any

import torch

SCHEDULE_BITS = 40  # hyper-parameters are kept to 40 significant bits: libraries differ in the 53rd
Schedule = list[tuple[int, str, float]]
"""(group, name, value) of each of an optimizer's numbers."""


def read_hyperparameters(optimizer: torch.optim.Optimizer) -> Schedule:
    """Return the optimizer's numbers now: (group, name, value); pairs as ``betas.0`` and ``betas.1``, without None."""
    found: Schedule = []
    for index, group in enumerate(optimizer.param_groups):
        for name, value in sorted(group.items()):
            if isinstance(value, float):
                found.append((index, name, value))
            elif isinstance(value, (tuple, list)) and name != "params":
                found += [(index, f"{name}.{i}", float(v)) for i, v in enumerate(value) if v is not None]
    return found


def set_hyperparameter(optimizer: torch.optim.Optimizer, index: int, name: str, value: float) -> None:
    """Set one number under the name ``read_hyperparameters`` gives it; what has that value already stays the object it is.

    A whole number in a pair, and a list, are committed as such.
    """
    group = optimizer.param_groups[index]
    base, _, position = name.partition(".")
    if position:
        values = list(group[base])
        if values[int(position)] == value:
            return
        values[int(position)] = value
        group[base] = values if isinstance(group[base], list) else tuple(values)
    else:
        group[name] = value


def snap_schedule(optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
    """Keep the numbers of the optimizer and of its scheduler, if it has one, to 40 significant bits."""
    for index, name, value in read_hyperparameters(optimizer):
        snapped = snap(value)
        if snapped != value:
            set_hyperparameter(optimizer, index, name, snapped)
    schedulers = [] if scheduler is None else [scheduler]
    for each in schedulers:
        schedulers += getattr(each, "_schedulers", [])  # of a sequence, each holds its own
        rates = getattr(each, "_last_lr", None)
        if isinstance(rates, list):
            each._last_lr = [snap(float(rate)) for rate in rates]


def snap(value: float) -> float:
    """Return ``value`` rounded to 40 significant bits, ties to even."""
    if value == 0.0 or not math.isfinite(value):
        return value
    mantissa, exponent = math.frexp(value)
    return math.ldexp(round(math.ldexp(mantissa, SCHEDULE_BITS)), exponent - SCHEDULE_BITS)
