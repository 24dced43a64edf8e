"""Where the follower's own rounding would have led the weights: what a log's choices came to, in the weights' own unit.

Limits on moves of a gradient say nothing of what training makes of them: an adaptive optimizer makes full steps of the smallest
gradient, a schedule makes a move cheap and its return dear, and a gradient that is called noise where it does not suit moves
nothing at all. So the optimizer's steps are taken again, of the elements that the log ever chose, with the follower's own
rounding in place of the log's (docs/adr/0026, point 29). To first order: both take their gradients where the log led.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from tallystick.execution.session.arithmetic import default_dtype
from tallystick.execution.session.parameters import OF_A_SCALER, without_state

T = TypeVar("T")
ELEMENTWISE = (
    torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.ASGD,
    torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD,
)  # fmt: skip
"""Optimizers that update each element by itself; of any other all tensors are kept whole."""
OF_ALL = ("eta", "mu", "mu_product", "step")  # what these keep of a parameter, whatever its shape: one number
SETTLED = 2.0**-4
"""The share of its own size that counts as the way that a tensor was trained where it hardly trains any more."""
NOT_ITS_OWN = ("defaults", "param_groups", "state", *OF_A_SCALER)
"""What is copied of an optimizer otherwise, or not at all."""
ROW_SLACK, LEAST_ROW = 8.0, 16
"""How much farther than a whole tensor a row may be led, over its own way, and how many elements a row has at least."""


def shares_of(ways: Tensor, trained: Tensor) -> Tensor:
    """Return ``ways`` over the ways trained, elementwise; infinity for one over none, and for what is no finite number."""
    shares = torch.where(ways == 0.0, 0.0, ways / trained)
    return torch.where((ways + trained).isfinite(), shares, math.inf)


@dataclass
class _OwnTensor:
    """Elements of one parameter as the follower's own rounding leaves them.

    Attributes:
        optimizer: a copy of the run's, of these elements alone, or of all that it trains.
        p: their values, float64[k], or of the parameter's shape if it is kept whole.
        at: which they are, int64[k] in order; None for all.
        is_chosen: of a parameter that is kept whole, bool[n]: which elements the log chose.
        row: how many elements of the parameter are a row.
        ways: how far from these it was at any time, L2, by row and last of the whole, float64[rows + 1].
        is_loud: whether the log chose in a step in which the gradient was hardly more than its noise.
    """

    optimizer: torch.optim.Optimizer
    p: nn.Parameter
    at: Tensor | None
    is_chosen: Tensor
    row: int
    ways: Tensor
    is_loud: bool = False

    @property
    def places(self) -> Tensor:
        """The elements that the log chose, int64[k], in order; all of them where others led it, and it chose none."""
        if self.at is not None:
            return self.at
        return (self.is_chosen if bool(self.is_chosen.any()) else ~self.is_chosen).nonzero().reshape(-1)

    def own(self) -> Tensor:
        """Return the values that are kept, float64[k], or of a parameter that is kept whole [n]."""
        return self.p.detach().reshape(-1).clone()

    def chosen(self, values: Tensor) -> Tensor:
        """Return of values of the whole parameter, n in any shape, those of the elements that the log chose, float64[k]."""
        return values.detach().reshape(-1)[self.places].double()

    def lengths(self, values: Tensor, at: Tensor) -> Tensor:
        """Return the L2 size of numbers that belong to elements ``at``, both [k], by row and last of all, float64[rows + 1]."""
        squares = values.square()
        rows = torch.zeros(len(self.ways) - 1, dtype=torch.float64, device=values.device)
        rows.index_add_(0, at // self.row, squares)
        return torch.cat((rows, squares.sum().reshape(1))).sqrt().cpu()

    def everywhere(self, values: Tensor) -> Tensor:
        """Return the same of sizes of the elements chosen, [k], as if all had their median: a few large ones lend nothing."""
        if not values.numel():
            return torch.zeros_like(self.ways)
        order = values.argsort()
        order = order[(self.places // self.row)[order].argsort(stable=True)]
        counts = torch.bincount(self.places // self.row, minlength=len(self.ways) - 1)
        middle = (counts.cumsum(0) - counts + (counts - 1).clamp(min=0) // 2).clamp(max=values.numel() - 1)
        rows = torch.where(counts > 0, values[order][middle], 0.0) * self.row**0.5
        whole = values.median() * (self.row * len(counts)) ** 0.5
        return torch.cat((rows, whole.reshape(1))).cpu()

    def begin_step(
        self, p: nn.Parameter, held: dict[str, Any], gradient: Tensor, at: Tensor, own: Tensor
    ) -> None:
        """Have the gradient of the next step; ``held`` is what the run's optimizer keeps of ``p``; see ``OwnPath.note``."""
        self._extend(p, held, at)
        mine = gradient.detach().double().reshape(-1)
        mine = mine.clone() if self.at is None else mine[self.at]
        mine[at if self.at is None else torch.searchsorted(self.at, at)] = own.double()
        self.p.grad = mine.reshape(self.p.shape)

    def end_step(self, p: nn.Parameter) -> None:
        """Note where the step led that the run's parameter ``p`` has taken, and these too."""
        # As after any step of a run, floating numbers are float32 numbers.
        for value in (self.p.detach(), *self.optimizer.state[self.p].values()):
            if isinstance(value, Tensor) and value.is_floating_point():
                value.copy_(value.float())
        self.p.grad = None
        kept = torch.arange(p.numel(), device=p.device) if self.at is None else self.at
        apart = p.detach().reshape(-1)[kept].double() - self.own()
        self.ways = torch.maximum(self.ways, self.lengths(apart, kept))

    def shares(self, now: Tensor, first: Tensor) -> Tensor:
        """Return how far each row was led, and last the whole, over its way; they began as ``first`` and the run's are ``now``.

        That way is of all elements, or, where these hardly train, of the size of those chosen, as if all were as large. Of a
        loud gradient it is that of those chosen alone, likewise: what else stands in the tensor trains as it likes, and pays for
        nothing.
        """
        own, began = now.detach().reshape(-1).double(), first.detach().reshape(-1).double()
        own = self.own() if self.at is None else own.index_copy(0, self.at, self.own())
        trained = self.lengths(own - began, torch.arange(own.numel(), device=own.device))
        size = SETTLED * self.chosen(first).abs()
        if self.is_loud:
            trained = self.everywhere(torch.maximum((self.chosen(own) - self.chosen(first)).abs(), size))
        shares = shares_of(self.ways, torch.maximum(trained, self.everywhere(size)))
        # A row of which the log chose nothing was led by others, and counts in the whole.
        return torch.where(self.lengths(torch.ones_like(size), self.places) > 0.0, shares, 0.0)

    def _extend(self, p: nn.Parameter, held: dict[str, Any], at: Tensor) -> None:
        """Keep elements ``at`` of ``p`` too, as they are before the step; ``held`` is what the run's optimizer keeps of it."""
        if self.at is None:
            self.is_chosen[at] = True
            return
        new = at[~torch.isin(at, self.at)]
        if not new.numel():
            return
        self.at, order = torch.cat((self.at, new)).sort()
        kept = self.optimizer.state.pop(self.p)
        for key, value in _picked(held, p, new).items():
            kept[key] = torch.cat((kept[key], value))[order] if _is_of_elements(key, held[key], p) else value
        # The optimizer knows its elements by the parameter that holds them.
        values = torch.cat((self.p.detach(), p.detach().reshape(-1)[new].double()))
        self.p = nn.Parameter(values[order])
        self.optimizer.state[self.p] = kept
        self.optimizer.param_groups[0]["params"] = [self.p]


@dataclass
class _Whole:
    """A copy of an optimizer with all that it trains, whose update of a parameter may hang on any other.

    Attributes:
        optimizer: the copy.
        own: its parameters, by the number of the run's object, and that object.
    """

    optimizer: torch.optim.Optimizer
    own: dict[int, tuple[nn.Parameter, nn.Parameter]]

    @classmethod
    def of(cls, run: torch.optim.Optimizer) -> _Whole:
        """Return a copy of ``run`` and of its parameters and state, float64, as they are."""
        trained = [p for group in run.param_groups for p in group["params"]]
        whole = cls(
            without_state(run),
            {id(p): (nn.Parameter(p.detach().to(torch.float64, copy=True)), p) for p in trained},
        )
        whole.optimizer.param_groups = [
            {**group, "params": [whole.own[id(p)][0] for p in group["params"]]} for group in run.param_groups
        ]
        for p in trained:
            if p in run.state:
                whole.optimizer.state[whole.own[id(p)][0]] = _picked(run.state[p], p, None)
        return whole

    def refresh(self, run: torch.optim.Optimizer) -> None:
        """Take over the run's hyperparameters, and whatever else it keeps of itself, as they are before a step."""
        theirs = {key: own for key, (own, _) in self.own.items()}
        for own, group in zip(self.optimizer.param_groups, run.param_groups, strict=True):
            own.update(
                {
                    name: copy.deepcopy(value, dict(theirs))
                    for name, value in group.items()
                    if name != "params"
                }
            )
        for name, value in vars(run).items():
            if name not in NOT_ITS_OWN and not name.endswith("_hooks") and not callable(value):
                setattr(self.optimizer, name, copy.deepcopy(value, dict(theirs)))


@dataclass
class OwnPath:
    """The elements that a log ever chose, as the follower's own rounding leaves them; from where an audit begins.

    Attributes:
        tensors: by number of the parameter.
        problem: why a copy of the optimizer cannot take its steps; None if it can.
    """

    tensors: dict[int, _OwnTensor] = field(default_factory=dict[int, _OwnTensor])
    problem: str | None = None
    _whole: _Whole | None = None
    _is_fresh: bool = False

    def note(
        self,
        run: torch.optim.Optimizer,
        ordinal: int,
        p: nn.Parameter,
        gradient: Tensor,
        at: Tensor,
        own: Tensor,
        *,
        is_loud: bool = False,
    ) -> None:
        """Note the gradient of a step that the run's optimizer has not taken yet.

        Args:
            run: its optimizer.
            ordinal: number of the parameter among those that train.
            p: the parameter.
            gradient: as the log has it rounded, any shape of n elements.
            at: int64[k], in order: elements for which the follower's own is another one.
            own: float[k]: which.
            is_loud: whether the gradient is hardly more than its noise.
        """
        known = self.tensors.get(ordinal)
        if type(run) in ELEMENTWISE:
            if known is None and not at.numel():
                return
            known = known or _begun(run, p, at)
            group = _group_of(run, p)
            known.optimizer.param_groups[0].update(
                {name: value for name, value in group.items() if name != "params"}
            )
        else:
            known = known or self._attempt(run, lambda: self._begun_whole(run, p))
            if self._whole is not None and not self._is_fresh:
                self._attempt(run, lambda: self._whole and self._whole.refresh(run))
                self._is_fresh = True
        if known is not None:
            self.tensors[ordinal] = known
            known.is_loud = known.is_loud or (is_loud and at.numel() > 0)
            known.begin_step(p, run.state.get(p, {}), gradient, at, own)

    def step(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Take the steps of the gradients noted since the last, after the run's optimizer took its own on ``parameters``."""
        noted = {ordinal: own for ordinal, own in self.tensors.items() if own.p.grad is not None}
        with default_dtype(torch.float64), torch.no_grad():
            for optimizer in {id(own.optimizer): own.optimizer for own in noted.values()}.values():
                self._attempt(optimizer, optimizer.step)
            for ordinal, own in noted.items():
                own.end_step(parameters[ordinal][1])
        self._is_fresh = False

    def shares(
        self, parameters: Sequence[tuple[str, nn.Parameter]], first: Sequence[Tensor]
    ) -> dict[str, float]:
        """Return how far the log led those of ``parameters`` of which it chose anything, by name, over their way.

        They began as ``first``. A row may have been led as far as the whole, over its own way; ``ROW_SLACK`` times as far where
        the gradient is never loud.
        """
        found = dict[str, float]()
        for ordinal, own in self.tensors.items():
            shares = own.shares(parameters[ordinal][1], first[ordinal])
            if len(shares) == 2 or own.row < LEAST_ROW:  # a row that is the whole, or of few elements
                shares = shares[-1:]
            shares[:-1] /= 1.0 if own.is_loud else ROW_SLACK
            found[parameters[ordinal][0]] = float(shares.max())
        return found

    def _begun_whole(self, run: torch.optim.Optimizer, p: nn.Parameter) -> _OwnTensor:
        """Return a parameter of an optimizer that is copied whole, as it is before the step."""
        self._whole = self._whole or _Whole.of(run)
        chosen = torch.zeros(p.numel(), dtype=torch.bool, device=p.device)
        return _OwnTensor(self._whole.optimizer, self._whole.own[id(p)][0], None, chosen, *_rows_of(p))

    def _attempt(self, optimizer: torch.optim.Optimizer, call: Callable[[], T]) -> T | None:
        """Return what ``call`` does with a copy of the job's own optimizer; whatever it raises is a problem, and ends nothing."""
        try:
            return call()
        except Exception as problem:  # noqa: BLE001
            self.problem = (
                f"optimizer {type(optimizer).__name__}: {type(problem).__name__}: {str(problem)[:200]}"
            )
            return None


def _begun(run: torch.optim.Optimizer, p: nn.Parameter, at: Tensor) -> _OwnTensor:
    """Return elements of a parameter as they are before the step, with an optimizer of their own."""
    own, optimizer = nn.Parameter(p.detach().reshape(-1)[at].double()), without_state(run)
    optimizer.param_groups = [{**_group_of(run, p), "params": [own]}]
    optimizer.state[own] = _picked(run.state.get(p, {}), p, at)
    return _OwnTensor(optimizer, own, at, torch.empty(0, dtype=torch.bool), *_rows_of(p))


def _rows_of(p: Tensor) -> tuple[int, Tensor]:
    """Return how many elements of a parameter are a row, and zeros for each row and the whole."""
    rows = p.shape[0] if p.dim() > 1 and p.numel() else 1
    return p.numel() // rows, torch.zeros(rows + 1, dtype=torch.float64)


def _picked(held: dict[str, Any], p: Tensor, at: Tensor | None) -> dict[str, Any]:
    """Return copies of what an optimizer keeps of a parameter, of its elements ``at`` where it is as large; None for all."""
    picked = dict[str, Any]()
    for key, value in held.items():
        if not isinstance(value, Tensor):
            picked[key] = copy.deepcopy(value)
        elif at is None or not _is_of_elements(key, value, p):
            picked[key] = value.detach().clone()
        else:
            picked[key] = value.detach().reshape(-1)[at]
        if isinstance(value, Tensor) and value.is_floating_point():
            picked[key] = picked[key].double()
    return picked


def _is_of_elements(key: str, value: Any, p: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == p.shape and key not in OF_ALL


def _group_of(optimizer: torch.optim.Optimizer, p: nn.Parameter) -> dict[str, Any]:
    return next(group for group in optimizer.param_groups if any(p is other for other in group["params"]))
