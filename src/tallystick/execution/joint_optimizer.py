"""Several optimizers over one model, each of which takes a part of every step: one optimizer, to whoever asks for its state.

Muon, say, trains matrices, and AdamW whatever else there is. They take their steps one after another, on gradients that are all
there before the first does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tallystick.errors import InvalidInput, Nondeterminism

Optimizer = torch.optim.Optimizer


class JointState(MutableMapping[Tensor, Any]):
    """What several optimizers keep of their parameters, each of its own; ``of`` gives the optimizer that trains one."""

    def __init__(self, parts: Sequence[Optimizer], of: Callable[[Tensor], Optimizer]) -> None:
        self._parts, self._optimizer_of = parts, of

    def __getitem__(self, p: Tensor) -> Any:
        return self._optimizer_of(p).state[p]

    def get(self, p: Tensor, default: Any = None) -> Any:
        """Return what is kept of a parameter, or ``default``; nothing is begun."""
        return self._optimizer_of(p).state.get(p, default)

    def __contains__(self, p: object) -> bool:
        return any(p in part.state for part in self._parts)

    def __setitem__(self, p: Tensor, value: Any) -> None:
        self._optimizer_of(p).state[p] = value

    def __delitem__(self, p: Tensor) -> None:
        del self._optimizer_of(p).state[p]

    def __iter__(self) -> Iterator[Tensor]:
        for part in self._parts:
            yield from part.state

    def __len__(self) -> int:
        return sum(len(part.state) for part in self._parts)

    def clear(self) -> None:
        """Forget everything."""
        for part in self._parts:
            part.state.clear()


class JointOptimizer(Optimizer):
    """The optimizers ``parts``, as one; what each is, it stays.

    Raises:
        InvalidInput: there are none, one is given twice, or two train one parameter.
    """

    def __init__(
        self, parts: Sequence[Optimizer]
    ) -> None:  # nothing of it is torch's: that would make groups of its own
        self.parts = list(parts)
        if not self.parts:
            raise InvalidInput("optimizer: an empty list was given; give at least one torch.optim.Optimizer")
        if len({id(part) for part in self.parts}) < len(self.parts):
            raise InvalidInput(f"optimizer: a list of {len(self.parts)} has one twice; give each once")
        self._owners = self._found_owners()

    def _found_owners(self) -> dict[int, Optimizer]:
        found = dict[int, Optimizer]()
        for part in self.parts:
            for p in (p for group in part.param_groups for p in group["params"]):
                other = found.setdefault(id(p), part)
                if other is not part:
                    raise InvalidInput(
                        f"optimizers {type(other).__name__} and {type(part).__name__} both train a parameter of shape "
                        f"{list(p.shape)}; each is one optimizer's"
                    )
        return found

    def verify_owners(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Return if every parameter of these names is trained by the optimizer that trained it before.

        Raises:
            InvalidInput: two train one.
            Nondeterminism: another one does; by name.
        """
        found = self._found_owners()
        for name, p in named:
            before, now = self._owners.get(id(p)), found.get(id(p))
            if before is not None and now is not before:
                new = "no optimizer" if now is None else type(now).__name__
                raise Nondeterminism(
                    f"{name} was trained by {type(before).__name__}, and is by {new} now; each parameter stays with one optimizer"
                )
        self._owners = found

    def part_of(self, p: Tensor) -> Optimizer:
        """Return the optimizer that trains a parameter, which may have come since.

        Raises:
            KeyError: none does.
        """
        if id(p) not in self._owners:
            self._owners = self._found_owners()
        return self._owners[id(p)]

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Their groups, in order; each is the optimizer's own."""
        return [group for part in self.parts for group in part.param_groups]

    @property
    def state(self) -> JointState:  # pyright: ignore[reportIncompatibleVariableOverride]
        """What they keep."""
        return JointState(self.parts, self.part_of)


class JointScheduler:
    """Several schedulers, as one that is part of a state."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = self._schedulers = list(parts)  # torch's name for those within another

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all."""
        return {"schedulers": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put each into its own."""
        for part, own in zip(self.parts, state["schedulers"], strict=True):
            part.load_state_dict(own)


def joined(optimizer: Optimizer | Sequence[Optimizer]) -> Optimizer:
    """Return one optimizer: the one that is given, or several as one.

    Raises:
        InvalidInput: something else was given, or as ``JointOptimizer``.
    """
    given: Any = optimizer
    if isinstance(given, Optimizer):
        return given
    for each in given if isinstance(given, (list, tuple)) else [given]:
        if not isinstance(each, Optimizer):
            raise InvalidInput(
                f"optimizer is a {type(each).__name__}; give a torch.optim.Optimizer, or a list of them"
            )
    return given[0] if len(given) == 1 else JointOptimizer(given)


def joined_schedule(scheduler: Any) -> Any:
    """Return one scheduler, likewise; None for none.

    Raises:
        InvalidInput: something is given that has no state.
    """
    given: Any = scheduler
    parts = [each for each in (given if isinstance(given, (list, tuple)) else [given]) if each is not None]
    for each in parts:
        if not hasattr(each, "state_dict"):
            raise InvalidInput(
                f"scheduler is a {type(each).__name__}; give one with a state_dict, as torch's, or a list of them"
            )
    return None if not parts else parts[0] if len(parts) == 1 else JointScheduler(parts)


def parts_of(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers that one consists of: itself, or several."""
    return optimizer.parts if isinstance(optimizer, JointOptimizer) else [optimizer]


def part_of(optimizer: Optimizer, p: Tensor) -> Optimizer:
    """Return the optimizer that trains a parameter: the one, or of several which."""
    return optimizer.part_of(p) if isinstance(optimizer, JointOptimizer) else optimizer
