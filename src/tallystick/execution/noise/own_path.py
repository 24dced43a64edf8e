"""Where the follower's own rounding would have led the weights: what a log's choices came to, in the weights' own unit.

Limits on moves of a gradient say nothing of what training makes of them: an adaptive optimizer makes full steps of the smallest
gradient, a schedule makes a move cheap and its return dear, and a gradient that is called noise where it does not suit moves
nothing at all. So the optimizer's steps are taken again, of the elements that the log ever chose, with the follower's own
rounding in place of the log's (docs/adr/0026, point 29). To first order: both take their gradients where the log led.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from tallystick.execution.noise.measured import LEAST_TENSOR
from tallystick.execution.session.arithmetic import stepping_in_float64
from tallystick.execution.session.parameters import copy_what_is_its_own, without_state
from tallystick.numerics.grid_table import SiteGrid
from tallystick.numerics.rounding import round_recorded

T = TypeVar("T")
ELEMENTWISE = (
    torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.ASGD,
    torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD,
)  # fmt: skip
"""Optimizers that update each element by itself; of any other all tensors are kept whole."""
OF_ALL = ("eta", "mu", "mu_product", "step")  # what these keep of a parameter, whatever its shape: one number
USUAL = 2.0**-2
"""The share of the median way of all elements that is the least way of one: one that came back was trained too."""
STATE = SiteGrid(24, -47, -149)
"""The grid of what an optimizer writes; its band moves nothing where no log is."""
PLAIN = (bool, int, float, str)  # what a copy has from the run before each step
ROW_SLACK, LEAST_ROW = 8.0, 64
"""How much farther than a whole tensor a row may be led, and how many elements a row has at least."""
AT_ONCE_SLACK = 4.0
"""How much farther a tensor may be led of its way in a span, or of the way so far where all of a gradient is chosen."""
SPAN, SHORTEST = 64, 32
"""Steps of a span over which what a log chose is measured too, and of the last one at least, if no whole gradient was chosen."""
LEAST_SPAN = 2.0**-6
"""The share of the median way since the run began that is the least way of a span: what has come to rest is near its noise."""
LOUD_SLACK = 0.25
"""The same of a tensor of ``LEAST_ROW`` elements or more, and of its rows, whose gradient was hardly more than its noise where
the log chose; fewer add up to little, and one of them that falls otherwise is much of their mean."""
FEW_TOGETHER = f"all tensors of fewer than {LEAST_ROW} elements"
"""Together they are held as one of many: a wide layer may be written as thousands of parameters."""
NOISE_TOGETHER = f"elements that are noise, of all tensors of {LEAST_ROW} to {LEAST_TENSOR - 1} elements"
"""In a gradient that is more than noise some elements may be nothing else, as a key's bias is beside a value's, and a single
rounding leads one as far as the others go: they are held as so many of one tensor of ``LEAST_TENSOR`` elements at least."""
MOST_CHOICES = 1
"""How many times a log may choose whether a whole gradient is nothing but noise, and its trainer when to measure that: honest
parties who measure alike agree."""


@dataclass
class _Span:
    """Some steps of one parameter, from the first of them in which the log chose anything of its gradient.

    Attributes:
        first: the run's parameter before it, [n].
        apart: how far the follower's own elements were from the run's then, float64[k].
        farthest: how far the log led each since, float64[k].
        chosen: which of them had a value where it chose the whole gradient, bool[k].
        steps: how many they are.
    """

    first: Tensor
    apart: Tensor
    farthest: Tensor
    chosen: Tensor
    steps: int = 0

    def extend(self, new: int, order: Tensor) -> None:
        """Have ``new`` elements more, that were not apart, all in ``order``."""
        self.apart, self.farthest, self.chosen = (
            torch.cat((kept, kept.new_zeros(new)))[order] for kept in (self.apart, self.farthest, self.chosen)
        )

    def end_step(self, apart: Tensor) -> None:
        """Have another step, after which the elements are ``apart``."""
        self.farthest, self.steps = torch.maximum(self.farthest, (apart - self.apart).abs()), self.steps + 1


@dataclass
class _OwnTensor:
    """Elements of one parameter as the follower's own rounding leaves them.

    Attributes:
        optimizer: a copy of the run's, of these elements alone, or of all that it trains.
        p: their values, float64[k], or of the parameter's shape if it is kept whole.
        at: which they are, int64[k] in order; None for all.
        row: how many elements of the parameter are a row.
        farthest: how far each was from the run's at any time, float64[k].
        is_loud: whether the log chose in a step in which the gradient was hardly more than its noise.
        is_all: whether what the log chose of this step is the whole gradient.
        choices: how many times it chose that, a noise measured anew or not chosen in between.
        at_once: the largest share of the way so far that it was led after such a step, or of its way in ``SPAN`` steps.
        chosen: which elements ever had a value in such a step, bool[k].
        noisy: which elements were nothing but noise whenever they were chosen, bool[k].
        reached: how far each of a tensor of few elements ever was from where the run began, float64[k]; zero of others.
        span: the steps that are now measured by themselves, if any are.
    """

    optimizer: torch.optim.Optimizer
    p: nn.Parameter
    at: Tensor | None
    row: int
    farthest: Tensor
    chosen: Tensor
    reached: Tensor
    noisy: Tensor
    is_loud: bool = False
    is_all: bool = False
    choices: int = 0
    at_once: float = 0.0
    span: _Span | None = None

    def of(self, values: Tensor) -> Tensor:
        """Return of values of the whole parameter, n in any shape, those of the elements that are kept, float64[k]."""
        flat = values.detach().reshape(-1)
        return (flat if self.at is None else flat[self.at]).double()

    def begin_step(
        self, p: nn.Parameter, held: dict[str, Any], gradient: Tensor, at: Tensor, own: Tensor, noisy: Tensor | None
    ) -> None:  # fmt: skip
        """Have the gradient of the next step; ``held`` is what the run's optimizer keeps of ``p``; see ``OwnPath.note``."""
        self._extend(p, held, at)
        mine = gradient.detach().double().reshape(-1)
        mine = mine.clone() if self.at is None else mine[self.at]
        here = at if self.at is None else torch.searchsorted(self.at, at)
        mine[here] = own.double()
        self.noisy[here] &= False if noisy is None else noisy.to(at.device)[at]
        self.p.grad = mine.reshape(self.p.shape)
        if at.numel() and self.span is None:
            nothing = torch.zeros_like(self.farthest), torch.zeros_like(self.chosen)
            self.span = _Span(p.detach().clone(), self._apart(p), *nothing)
        if self.is_all and self.span is not None:
            self.chosen[here] = self.span.chosen[here] = True

    def _apart(self, p: Tensor) -> Tensor:
        """Return how far the follower's own elements are from the run's ``p``, with signs, float64[k]."""
        return self.p.detach().reshape(-1) - self.of(p)

    def end_step(self, p: nn.Parameter, *, is_general: bool) -> None:
        """Note where the step led that the run's parameter ``p`` has taken, and these too.

        As after any step of a run, floating numbers are float32 numbers; of ``general`` arithmetic rounded as states are.
        """
        for value in (self.p.detach(), *self.optimizer.state[self.p].values()):
            if isinstance(value, Tensor) and value.is_floating_point():
                if is_general and bool(value.isfinite().all()):
                    value.copy_(_rounded(value))
                else:
                    value.copy_(value.float())
        self.p.grad = None
        apart = self._apart(p)
        self.farthest = torch.maximum(self.farthest, apart.abs())
        if self.span is not None:
            self.span.end_step(apart)

    def reach(self, origin: Tensor) -> None:
        """Note how far the elements of a tensor of few are from where the run began: all of them may come back."""
        if origin.numel() < LEAST_ROW:
            self.reached = torch.maximum(self.reached, (self.p.detach().reshape(-1) - self.of(origin)).abs())

    def share_of_span(self, now: Tensor, origin: Tensor) -> float:
        """Return how far the log led the parameter ``now`` in the span, over the way that it trained in it, as ``share`` does.

        A phase at a low rate, or of small gradients, is no share of the way of the one before it, unless it is next to nothing.
        """
        span = self.span
        if span is None or (span.steps < SHORTEST and not bool(span.chosen.any())):
            return 0.0
        began, least = self.of(span.first) + span.apart, LEAST_SPAN * _median_way(now, origin)
        trained = (self.p.detach().reshape(-1) - began).abs().clamp(min=least)
        squares = self._squares(span.farthest, trained, now, span.first)
        return _mean(squares, span.chosen, now.numel())

    @staticmethod
    def _squares(led: Tensor, trained: Tensor, now: Tensor, first: Tensor) -> Tensor:
        """Return the square of how far each element was led over how far it was trained, once at most, float64[k].

        By a share of the median way at least of all elements from ``first`` to ``now``.
        """
        trained = trained.clamp(min=USUAL * _median_way(now, first))
        ratio = torch.where(led == 0.0, 0.0, led / trained)
        return torch.where(trained.isfinite(), ratio, 1.0).nan_to_num(1.0).clamp(max=1.0).square()

    def _squares_of(self, now: Tensor, first: Tensor, origin: Tensor, reached: Tensor) -> Tensor:
        began = self.of(first)
        trained = torch.maximum((self.p.detach().reshape(-1) - began).abs(), (began - self.of(origin)).abs())
        return self._squares(self.farthest, trained.clamp(min=reached), now, origin)

    def pooled(self, now: Tensor, first: Tensor, origin: Tensor) -> tuple[float, int]:
        """Return the sum of the squares of ``share`` as of a tensor of many elements, and of how many elements it is."""
        squares = self._squares_of(now, first, origin, torch.zeros_like(self.reached))
        return float(squares.sum()) / (LOUD_SLACK**2 if self.is_loud else 1.0), int((squares > 0.0).sum())

    def _alone(self, numel: int) -> Tensor:
        """Return which elements count as nothing but noise, bool[k]: none where the whole gradient was, or was chosen."""
        is_one = LEAST_ROW <= numel < LEAST_TENSOR and not self.is_loud
        return self.noisy & ~self.chosen if is_one else torch.zeros_like(self.noisy)

    def noise(self, now: Tensor, first: Tensor, origin: Tensor) -> tuple[float, int]:
        """Return the sum of the squares of those elements, and how many the tensor has."""
        squares = self._squares_of(now, first, origin, self.reached)
        return float(squares[self._alone(now.numel())].sum()), now.numel()

    def share(self, now: Tensor, first: Tensor, origin: Tensor) -> float:
        """Return how far the log led the parameter: the root of the mean square over its elements, a row's if that is much more.

        Each counts by how far it was led over its own way, once at most: from where it began, ``first``, to where the follower's
        own leads it, or to there from where the run began, ``origin``, or a share of the median way of all, or how far one of few
        elements ever was. So what else stands in a tensor trains as it likes, and pays for little. Where the log chose whole
        gradients, the mean over the elements that had values then counts as well: what has none in a step is not in it.
        """
        squares = self._squares_of(now, first, origin, self.reached)
        counted = torch.where(self._alone(first.numel()), squares * first.numel() / LEAST_TENSOR, squares)
        whole = _mean(counted, self.chosen, first.numel())
        rows = first.numel() // self.row
        if rows > 1 and self.row >= LEAST_ROW:
            at = torch.arange(first.numel(), device=squares.device) if self.at is None else self.at
            sums = torch.zeros(rows, dtype=torch.float64, device=squares.device).index_add_(
                0, at // self.row, squares
            )
            whole = max(whole, float(sums.max() / self.row) ** 0.5 / ROW_SLACK)
        return whole

    def _extend(self, p: nn.Parameter, held: dict[str, Any], at: Tensor) -> None:
        """Keep elements ``at`` of ``p`` too, as they are before the step; ``held`` is what the run's optimizer keeps of it."""
        if self.at is None:
            return
        new = at[~torch.isin(at, self.at)]
        if not new.numel():
            return
        joined, order = torch.cat((self.at, new)).sort()
        before, kept = self.optimizer.state[self.p], dict[str, Any]()
        for key, value in _picked(held, p, new).items():
            kept[key] = (
                torch.cat((before[key], value))[order] if _is_of_elements(key, held[key], p) else value
            )
        values = torch.cat((self.p.detach(), p.detach().reshape(-1)[new].double()))
        # Nothing is changed before all is there: a state that came later, of which nobody knows what it was, is a problem.
        del self.optimizer.state[self.p]
        self.at, self.p = joined, nn.Parameter(values[order])
        self.farthest, self.chosen, self.reached = (
            torch.cat((kept_of, kept_of.new_zeros(new.numel())))[order]
            for kept_of in (self.farthest, self.chosen, self.reached)
        )
        self.noisy = torch.cat((self.noisy, self.noisy.new_ones(new.numel())))[order]
        if self.span is not None:
            self.span.extend(new.numel(), order)
        # The optimizer knows its elements by the parameter that holds them.
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
        theirs = {key: own for key, (own, _) in whole.own.items()}
        copy_what_is_its_own(run, whole.optimizer, theirs)
        whole.optimizer.param_groups = [
            {
                **copy.deepcopy(
                    {name: value for name, value in group.items() if name != "params"}, dict(theirs)
                ),
                "params": [whole.own[id(p)][0] for p in group["params"]],
            }
            for group in run.param_groups
        ]
        for p in trained:
            if p in run.state:
                whole.optimizer.state[whole.own[id(p)][0]] = _picked(run.state[p], p, None)
        return whole

    def refresh(self, run: torch.optim.Optimizer) -> None:
        """Take over the run's hyperparameters, and numbers that it keeps of itself, as they are before a step.

        Whatever else it keeps is its own step's to change, and the copy's: weights that an optimizer keeps twice, above all.
        """
        for own, group in zip(self.optimizer.param_groups, run.param_groups, strict=True):
            own.update({name: value for name, value in group.items() if isinstance(value, (*PLAIN, tuple))})
        for name, value in vars(run).items():
            if isinstance(value, PLAIN):
                setattr(self.optimizer, name, value)


@dataclass
class OwnPath:
    """The elements that a log ever chose, as the follower's own rounding leaves them; from where an audit begins.

    Attributes:
        first, origin: all parameters, by number, as an audit and as the run began.
        tensors: by number of the parameter.
        is_general: whether the run's optimizer computes in torch's own arithmetic, so that its states are sites.
        problem: why a copy of the optimizer cannot take its steps; None if it can.
    """

    first: Sequence[Tensor]
    origin: Sequence[Tensor]
    is_general: bool = False
    tensors: dict[int, _OwnTensor] = field(default_factory=dict[int, _OwnTensor])
    problem: str | None = None
    _wholes: dict[int, _Whole] = field(default_factory=dict[int, _Whole])  # by the number of the run's object
    _fresh: set[int] = field(default_factory=set[int])

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
        is_all: bool = False,
        is_measured: bool = False,
        noisy: Tensor | None = None,
    ) -> None:
        """Note the gradient of a step that the run's optimizer has not taken yet.

        Args:
            run: the optimizer of this parameter.
            ordinal: number of the parameter among those that train.
            p: the parameter.
            gradient: as the log has it rounded, any shape of n elements.
            at: int64[k], in order: elements for which the follower's own is another one.
            own: float[k]: which.
            is_loud: whether the gradient is hardly more than its noise.
            is_all: whether it is all of the gradient that the log chose.
            is_measured: whether noise was measured in this step.
            noisy: bool[n]: which elements were nothing but noise when it was; None if that is not known.
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
            if id(run) in self._wholes and id(run) not in self._fresh:
                self._attempt(run, lambda: self._wholes[id(run)].refresh(run))
                self._fresh.add(id(run))
        if known is not None:
            self.tensors[ordinal], kept = known, known
            kept.is_loud |= is_loud and at.numel() > 0
            was_all, kept.is_all = kept.is_all, is_all and at.numel() > 0
            kept.choices += kept.is_all and (is_measured or not was_all)
            self._attempt(run, lambda: kept.begin_step(p, run.state.get(p, {}), gradient, at, own, noisy))

    def step(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Take the steps of the gradients noted since the last, after the run's optimizer took its own on ``parameters``."""
        noted = {ordinal: own for ordinal, own in self.tensors.items() if own.p.grad is not None}
        with torch.no_grad():
            for optimizer in {id(own.optimizer): own.optimizer for own in noted.values()}.values():
                with stepping_in_float64(optimizer):
                    self._attempt(optimizer, optimizer.step)
            for ordinal, own in noted.items():
                p = parameters[ordinal][1]
                own.end_step(p, is_general=self.is_general)
                own.reach(self.origin[ordinal])
                if own.is_all:
                    own.at_once = max(own.at_once, own.share(p, self.first[ordinal], self.origin[ordinal]))
                if own.span is not None and own.span.steps == SPAN:
                    own.at_once = max(own.at_once, own.share_of_span(p, self.origin[ordinal]))
                    own.span = None
        self._fresh.clear()

    def shares(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> dict[str, float]:
        """Return how far the log led those of ``parameters`` that are kept, by name, in the unit of the policy's limit."""
        shares = {
            parameters[ordinal][0]: max(
                own.share(parameters[ordinal][1], self.first[ordinal], self.origin[ordinal])
                / (LOUD_SLACK if own.is_loud and parameters[ordinal][1].numel() >= LEAST_ROW else 1.0),
                max(own.at_once, own.share_of_span(parameters[ordinal][1], self.origin[ordinal]))
                / AT_ONCE_SLACK,
            )
            for ordinal, own in self.tensors.items()
        }
        for what, measure, lowest, most in (
            (FEW_TOGETHER, _OwnTensor.pooled, 0, LEAST_ROW),
            (NOISE_TOGETHER, _OwnTensor.noise, LEAST_ROW, LEAST_TENSOR),
        ):
            pooled = [
                measure(own, parameters[n][1], self.first[n], self.origin[n])
                for n, own in self.tensors.items()
                if lowest <= parameters[n][1].numel() < most
            ]
            led, elements = sum(squares for squares, _ in pooled), sum(numel for _, numel in pooled)
            if led:
                shares[what] = (led / max(elements, most)) ** 0.5
        return shares

    @property
    def choices(self) -> int:
        """How many times the log chose a whole gradient, of all parameters together."""
        return sum(own.choices for own in self.tensors.values())

    def _begun_whole(self, run: torch.optim.Optimizer, p: nn.Parameter) -> _OwnTensor:
        """Return a parameter of an optimizer that is copied whole, as it is before the step."""
        whole = self._wholes[id(run)] = self._wholes.get(id(run)) or _Whole.of(run)
        own = whole.own[id(p)][0]
        return _OwnTensor(whole.optimizer, own, None, _row_of(p), *_nothing(own))

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
    return _OwnTensor(optimizer, own, at, _row_of(p), *_nothing(own))


def _median_way(now: Tensor, first: Tensor) -> float:
    return float((now.detach() - first).abs().double().median())


def _mean(squares: Tensor, chosen: Tensor, numel: int) -> float:
    """Return the root of the mean over ``numel`` elements, or over those ``chosen`` if that is more, of the squares of some."""
    means = [squares.sum() / numel, *([squares[chosen].mean()] if bool(chosen.any()) else [])]
    return float(max(means)) ** 0.5


def _nothing(own: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return that no element of ``own`` was led, none was chosen, none reached anything, and all may be noise: four of [k]."""
    flat = own.detach().reshape(-1)
    none = torch.zeros_like(flat, dtype=torch.bool)
    return torch.zeros_like(flat), none, torch.zeros_like(flat), ~none


def _rounded(value: Tensor) -> Tensor:
    """Return float64 numbers, all finite, as a state site rounds them that no log moves (spec/rounding.md 3)."""
    flat = value.contiguous().reshape(-1)
    out = torch.empty_like(flat)
    round_recorded(flat, STATE, out=out, old=flat, name="a state of the auditor's own")
    return out.reshape(value.shape)


def _row_of(p: Tensor) -> int:
    """Return how many elements of a parameter are a row: all of them, if it has no second dimension."""
    return p.numel() // p.shape[0] if p.dim() > 1 and p.numel() else max(p.numel(), 1)


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
