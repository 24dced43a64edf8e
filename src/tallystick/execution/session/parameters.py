"""The parameters that an optimizer trains, and the form of the state that it keeps of them."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import (
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage] # the only way to step out of a mode
)
from torch.utils._pytree import tree_leaves

from tallystick.errors import InvalidInput, Nondeterminism, TallyError
from tallystick.execution.dispatch.jitter import Jitter, JitterMode
from tallystick.execution.joint_optimizer import parts_of
from tallystick.execution.session.arithmetic import stepping_in_float64

OF_A_SCALER = ("grad_scale", "found_inf")  # what a gradient scaler leaves on an optimizer for its next step
NOT_ITS_OWN = ("defaults", "param_groups", "state", *OF_A_SCALER)
"""What is copied of an optimizer otherwise, or not at all."""


class TrainedParameters:
    """What an optimizer trains of a model.

    Args:
        model: whose parameters.
        optimizer: that trains some of them.

    Attributes:
        named: the parameters with their names, in the model's order.
        form: of each, by position, what the optimizer keeps of it: the form of a state that can be loaded.
        keys: the names of the optimizer's floating state tensors.
        densified: parameters whose gradients came sparse.

    Raises:
        InvalidInput: the optimizer holds a tensor that is no parameter of the model, or a copy of it cannot take steps.
        Nondeterminism: its steps change what no checkpoint holds.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
        named = [(name, p) for name, p in model.named_parameters() if id(p) in owned]
        unknown = owned - {id(p) for _, p in named}
        if unknown:
            raise InvalidInput(
                f"the optimizer holds {len(unknown)} tensors that are no parameters of the model; nobody could name "
                "their updates: make them the model's, as a module of its own beside the others"
            )
        self.named = [(name, p) for name, p in named if p.requires_grad]
        self.densified: set[str] = set()
        self.form = self.replica_step(2)
        self.keys = sorted(
            {
                key
                for values in self.form.values()
                for key, value in values.items()
                if isinstance(value, Tensor)
                and value.is_floating_point()
                and key not in ("step", "parameter")
            }
        )

    def state_of(self, parameter: Tensor) -> Any:
        """Return what the optimizer keeps of a parameter; empty before it has stepped."""
        return self.optimizer.state.get(parameter, {})

    def floating_state(self) -> Iterator[tuple[str, str, Tensor]]:
        """Every floating tensor that the optimizer keeps, with the parameter's name and its key."""
        for name, p in self.named:
            for key, value in self.state_of(p).items():
                if isinstance(value, Tensor) and value.is_floating_point():
                    yield name, key, value

    def verify_no_gradients(self, step: int) -> None:
        """Return if no gradient is there already when a step's backward pass begins, or all are zero.

        Raises:
            Nondeterminism: one is, by name.
        """
        with torch.no_grad(), _disable_current_modes():  # no part of the step
            left = next((name for name, p in self.named if p.grad is not None and bool(p.grad.any())), None)
        if left is not None:
            raise Nondeterminism(
                f"step {step}: {left} has a gradient from before the step, which nobody could repeat with it; call "
                "optimizer.zero_grad() after each optimizer.step(), take micro-batches within one step, or give prepare() "
                "the loss=; what trains in turn, as a GAN does, is not taken"
            )

    def densify_gradients(self) -> None:
        """Make sparse gradients dense, and keep the names of their parameters."""
        for name, p in self.named:
            if p.grad is not None and p.grad.is_sparse:
                self.densified.add(name)
                p.grad = p.grad.to_dense()

    def verify_gradients_are_named(self) -> None:
        """Return if every parameter that has a gradient has trained from the beginning.

        Raises:
            Nondeterminism: one has not.
        """
        known = {id(p) for _, p in self.named}
        for index, group in enumerate(self.optimizer.param_groups):
            for p in group["params"]:
                if p.grad is not None and id(p) not in known:
                    raise Nondeterminism(
                        f"optimizer group {index}: a parameter of shape {list(p.shape)} trains that did not when the run was "
                        "prepared; freeze and unfreeze by way of learning rates"
                    )

    def replica_step(
        self,
        steps: int,
        jitter: Jitter | None = None,
        gradients: Sequence[Tensor | None] | None = None,
        *,
        exact: bool = False,
    ) -> dict[int, dict[str, Any]]:
        """Run the optimizer on slices of the parameters in float64 and return its state by parameter position.

        The parameters' slices stand under the key ``parameter``. ``gradients`` (made-up ones by default) are used for
        the first step and, with random factors, for the others; with ``jitter`` the last step's arithmetic is disturbed.
        Random factors differ between instruction sets; if ``exact``, -3/4 of the same gradients, in reverse order along
        dimension 0, takes their place: the same numbers everywhere.
        """
        found: dict[int, dict[str, Any]] = {}
        generator = torch.Generator().manual_seed(1)
        for part in parts_of(self.optimizer):
            found |= self._replica_step_of(part, steps, jitter, gradients, generator, exact=exact)
        return found

    def _replica_step_of(
        self,
        optimizer: torch.optim.Optimizer,
        steps: int,
        jitter: Jitter | None,
        gradients: Sequence[Tensor | None] | None,
        generator: torch.Generator,
        *,
        exact: bool,
    ) -> dict[int, dict[str, Any]]:
        """Do ``replica_step`` for one of several optimizers."""
        clone, chosen = self._replica(optimizer)
        before = _own_values(clone)
        for number in range(steps):
            for position, replica in chosen.items():
                factor = torch.randn(replica.shape, generator=generator, dtype=torch.float64).float().double()
                given = gradients[position] if gradients is not None else None
                if gradients is not None and given is None:
                    continue
                replica.grad = _gradient(given, factor, number, exact=exact)
            with ExitStack() as stack:
                if jitter is not None and number == steps - 1:
                    stack.enter_context(JitterMode(jitter))
                stack.enter_context(stepping_in_float64(clone))
                with _naming(clone):
                    clone.step()
        _verify_kept(clone, before)
        return {
            position: {"parameter": r.detach(), **clone.state.get(r, {})} for position, r in chosen.items()
        }

    def _replica(
        self, optimizer: torch.optim.Optimizer
    ) -> tuple[torch.optim.Optimizer, dict[int, nn.Parameter]]:
        """Return a copy of an optimizer without state and hooks, and the slices that it trains, by parameter position."""
        clone, own = without_state(optimizer), dict[int, nn.Parameter]()
        order = {id(p): position for position, (_, p) in enumerate(self.named)}
        chosen: dict[int, nn.Parameter] = {}
        for group in optimizer.param_groups:
            params: list[nn.Parameter] = []
            for p in group["params"]:
                params.append(nn.Parameter(slice_of(p), requires_grad=p.requires_grad))
                own[id(p)] = params[-1]
                if id(p) in order:
                    chosen[order[id(p)]] = params[-1]
            clone.param_groups.append({**group, "params": params})
        with _naming(clone):
            copy_what_is_its_own(optimizer, clone, own)
        return clone, chosen


def without_state(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return a copy of an optimizer without parameters, state and hooks."""
    clone = copy.copy(optimizer)
    for name, value in vars(optimizer).items():  # those of a subclass, which copying leaves out
        if name not in vars(clone) and not callable(value) and name not in OF_A_SCALER:
            setattr(clone, name, value)
    clone.param_groups = []
    clone.state = defaultdict(dict)
    for name in list(vars(clone)):
        if name.endswith("_hooks") and isinstance(getattr(clone, name), OrderedDict):
            setattr(clone, name, OrderedDict())
    return clone


def copy_what_is_its_own(
    optimizer: torch.optim.Optimizer, clone: torch.optim.Optimizer, own: Mapping[int, Tensor]
) -> None:
    """Give a ``clone`` copies of what an optimizer's class keeps of itself.

    Args:
        optimizer: that is copied.
        clone: the copy so far.
        own: the clone's parameters, by the number of the optimizer's object: they take its place in whatever is kept.
    """
    for name, value in vars(optimizer).items():
        if name not in NOT_ITS_OWN and not name.endswith("_hooks") and not callable(value):
            setattr(clone, name, copy.deepcopy(value, dict(own)))


def _own_values(optimizer: torch.optim.Optimizer) -> dict[str, list[Any]]:
    """Return what an optimizer of another's making keeps of itself by attribute: numbers, texts and copies of tensors."""
    if type(optimizer).__module__.startswith("torch.optim"):
        return {}
    return {
        name: [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in tree_leaves(value)]
        for name, value in vars(optimizer).items()
        if name not in NOT_ITS_OWN and not name.endswith("_hooks")
    }


def _verify_kept(optimizer: torch.optim.Optimizer, before: Mapping[str, list[Any]]) -> None:
    """Return if steps have changed nothing of what an optimizer keeps of itself, ``before``.

    Raises:
        Nondeterminism: they have; by name.
    """
    for name, values in _own_values(optimizer).items() if before else ():
        old = before.get(name, [])
        if len(old) != len(values) or not all(map(_is_same, old, values)):
            raise Nondeterminism(
                f"optimizer {type(optimizer).__name__}: a step changes its attribute {name}, which no checkpoint holds, so that "
                "nobody can go on from one; keep it in ``state`` or ``param_groups``"
            )


def _is_same(old: Any, new: Any) -> bool:
    if isinstance(old, Tensor) and isinstance(new, Tensor):
        return old.shape == new.shape and torch.equal(old.nan_to_num(), new.nan_to_num())
    return old is new or (isinstance(old, (bool, int, float, str)) and old == new)


@contextmanager
def _naming(clone: torch.optim.Optimizer) -> Generator[None]:
    """Inside, whatever a copy raises is said of its class, but what this package says itself.

    Raises:
        InvalidInput: it raised that.
    """
    try:
        yield
    except TallyError:
        raise
    except Exception as problem:
        raise InvalidInput(
            f"optimizer {type(clone).__name__}: a copy of it, of slices of its parameters, cannot take a step "
            f"({type(problem).__name__}: {str(problem)[:200]}); keep what belongs to a parameter in its ``state``"
        ) from problem


def _gradient(given: Tensor | None, factor: Tensor, number: int, *, exact: bool) -> Tensor:
    """Return the gradient of a slice in step ``number`` of a replica."""
    if given is None:
        return factor
    real = slice_of(given).float().double()
    if exact:
        return -0.75 * (real.flip(0) if real.dim() else real) if number % 2 else real
    return real if number == 0 else (real * factor).float().double()


def slice_of(tensor: Tensor) -> Tensor:
    """Return a corner of at most 4096 elements, float64 on the CPU, the number of dimensions kept."""
    small = tensor.detach()
    while small.numel() > 4096:
        axis = int(np.argmax(small.shape))
        small = small.narrow(axis, 0, max(1, small.shape[axis] // 2))
    return small.cpu().double().clone()
