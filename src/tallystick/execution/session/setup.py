"""What cannot be repeated on another machine is refused before the first step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tallystick.execution.joint_optimizer import JointScheduler, parts_of

REFUSED_OPTIMIZERS = {
    "LBFGS": "it calls its closure several times a step and branches on the loss; take one that steps once, as Adam",
    "SparseAdam": "it needs sparse gradients, summed in an order that differs between devices; take Adam, they are made dense",
}
REFUSED_SCHEDULERS = {
    "ReduceLROnPlateau": "it branches on the loss, whose last bits differ between machines; take one of the step number, or "
    "attach none and step it yourself between the steps by what a few digits say: scheduler.step(round(loss, 3))"
}


def find_unrepeatable(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> Iterator[str]:
    """Give why other machines cannot repeat model, optimizer and scheduler, each by name and with what to do instead."""
    parts = parts_of(optimizer)
    schedulers = scheduler.parts if isinstance(scheduler, JointScheduler) else [scheduler]
    for what, thing, refused in (
        *(("optimizer", part, REFUSED_OPTIMIZERS) for part in parts),
        *(("scheduler", each, REFUSED_SCHEDULERS) for each in schedulers),
    ):
        for kind in (base.__name__ for base in type(thing).__mro__):
            if kind in refused:
                yield f"{what} {kind}: {refused[kind]}"
    for part, name, value in ((each, *item) for each in parts for item in vars(each).items()):
        held = next((leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.optim.Optimizer)), None)
        if held is not None:
            yield (
                f"optimizer {type(part).__name__}: holds another one, a {type(held).__name__}, as {name}; "
                "give that one, with its parameters in groups, or several as a list"
            )
    for index, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            if isinstance(value, Tensor):
                yield f"optimizer group {index}: {name} is a tensor; give a plain number"
        if group.get("capturable"):
            yield (
                f"optimizer group {index}: capturable optimizers keep their counters on the device; switch it off"
            )
        if group.get("differentiable"):
            yield (
                f"optimizer group {index}: differentiable is {group['differentiable']}, False is needed: what is trained is "
                "rounded in place, which has no derivative; leave it out"
            )
    for name, module in model.named_modules():
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            yield f"module {name or 'model'} is compiled; leave torch.compile out where tally records"
