"""Attributes of the operators in a step's list: what a call was given beside its tensors, and an update's numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from tallystick.commit.encoding import hex_float
from tallystick.dispute.operator_list import (
    Input,
)
from tallystick.execution.dispatch.table import STATEFUL

PLACEMENT = frozenset(
    "device layout pin_memory memory_format non_blocking generator requires_grad dtype_layout".split()
)


def written_by(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that ``func`` writes in place, in the order of its arguments."""
    found: list[Tensor] = []
    for position, declared in enumerate(func._schema.arguments):
        if declared.alias_info is not None and declared.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(declared.name)
            found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    if func._schema.name in STATEFUL and not found:
        found += [value for value in args[3:5] if isinstance(value, Tensor)]
    return found


def attributes_of(func: Any, args: Any, kwargs: Any, given: Sequence[Tensor]) -> dict[str, object]:
    """Return what a call was given beside its tensors, defaults filled in; tensors are named by their place in ``given``."""
    order = {id(tensor): number for number, tensor in reversed(list(enumerate(given)))}
    found: dict[str, object] = {}
    for position, declared in enumerate(func._schema.arguments):
        if declared.name in PLACEMENT:
            continue
        if position < len(args):
            value = args[position]
        elif declared.name in kwargs:
            value = kwargs[declared.name]
        else:
            value = declared.default_value
        found[declared.name] = _attribute(value, order)
    return found


def _attribute(value: Any, order: Mapping[int, int]) -> object:
    if isinstance(value, Tensor):
        return {"input": order[id(value)]}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return {"float": hex_float(value)}
    if isinstance(value, (list, tuple)):
        return [_attribute(item, order) for item in value]
    return {"name": str(value)}


def renumbered(attributes: Mapping[str, object], operands: Sequence[Input | None]) -> dict[str, object]:
    """Return attributes that name inputs by their place among those that are known."""
    places: dict[int, int | None] = {}
    count = 0
    for number, operand in enumerate(operands):
        places[number] = None if operand is None else count
        count += operand is not None

    def one(value: object) -> object:
        if isinstance(value, dict) and set(value) == {"input"}:
            place = places[value["input"]]
            return None if place is None else {"input": place}
        if isinstance(value, list):
            return [one(item) for item in value]
        return value

    return {name: one(value) for name, value in attributes.items()}


def update_numbers(group: Mapping[str, Any], held: Mapping[str, Any]) -> dict[str, object]:
    """Return an update's numbers as attributes."""

    def real(value: Any) -> dict[str, str]:
        return {"float": hex_float(float(value))}

    if "betas" in group:
        done = held.get("step")
        step = 1 + (int(done.item()) if isinstance(done, Tensor) else 0)
        return {
            "lr": real(group["lr"]), "beta1": real(group["betas"][0]), "beta2": real(group["betas"][1]),
            "eps": real(group["eps"]), "weight_decay": real(group["weight_decay"]), "step": step,
            "decoupled": bool(group.get("decoupled_weight_decay", False)),
        }  # fmt: skip
    return {
        "lr": real(group["lr"]), "momentum": real(group["momentum"]), "dampening": real(group["dampening"]),
        "weight_decay": real(group["weight_decay"]), "nesterov": bool(group["nesterov"]),
        "first": held.get("momentum_buffer") is None,
    }  # fmt: skip
