"""How a session's passes compute: precisions, noise of its own, and what is met that people should know of."""

from __future__ import annotations

import inspect
from collections.abc import Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tallystick.errors import Nondeterminism
from tallystick.execution.dispatch.decisions import OperatorFindings
from tallystick.execution.dispatch.jitter import Jitter, JitterMode
from tallystick.execution.dispatch.operator_noise import SIXTEEN_BIT
from tallystick.execution.joint_optimizer import parts_of
from tallystick.execution.portable_optimizers import why_not_portable
from tallystick.numerics.policy import Policy

CASTS = frozenset({"bfloat16", "float16", "half"})


@dataclass(frozen=True)
class Arithmetic:
    """How passes compute.

    Attributes:
        policy: grids and bands.
        compute: dtype of the model's tensors.
        precision: dtype of operators.
        smooth: operators outside the table that the job declares continuous.
        jitter: last-bit noise for the whole step; None for the machine's own arithmetic.
        widens: whether operators compute in float64 whatever they are given.
        findings: what the operators met so far.
    """

    policy: Policy
    compute: torch.dtype
    precision: torch.dtype
    smooth: frozenset[str] = frozenset()
    jitter: Jitter | None = None
    widens: bool = False
    findings: OperatorFindings = field(default_factory=OperatorFindings)

    @classmethod
    def of(cls, policy: Policy, *, smooth: frozenset[str], jitter: Jitter | None) -> Arithmetic:
        """Return the policy's own arithmetic."""
        return cls(policy, getattr(torch, policy.storage), getattr(torch, policy.compute), smooth, jitter)

    @property
    def is_portable(self) -> bool:
        """Whether the optimizer's arithmetic is portable, so that the state has no sites."""
        return self.policy.optimizer_arithmetic == "portable"

    def chosen_for(self, optimizer: torch.optim.Optimizer) -> Arithmetic:
        """Return the same with the optimizer's arithmetic chosen, where the policy leaves that open.

        Raises:
            Nondeterminism: it is to be portable, and this optimizer's is not.
        """
        reason = next(filter(None, map(why_not_portable, parts_of(optimizer))), None)
        if self.policy.optimizer_arithmetic == "auto":
            chosen = "portable" if reason is None else "general"
            return replace(self, policy=replace(self.policy, optimizer_arithmetic=chosen))
        if self.is_portable and reason is not None:
            raise Nondeterminism(f"optimizer: its arithmetic is to be portable, but {reason}")
        return self

    def autocast(self, device: str, *, enabled: bool) -> AbstractContextManager[object]:
        """Inside, torch chooses precisions on that kind of device, if the policy says so."""
        if not self.policy.autocast:
            return nullcontext()
        return torch.autocast(device, self.precision, enabled=enabled)

    @contextmanager
    def in_optimizer(self, optimizer: torch.optim.Optimizer) -> Generator[None]:
        """Inside, as in ``stepping_in_float64``, and operators have the noise that there is."""
        with ExitStack() as stack:
            stack.enter_context(stepping_in_float64(optimizer))
            if self.jitter is not None:
                stack.enter_context(JitterMode(self.jitter))
            yield


class _LiftedCasts(TorchDispatchMode):
    """Have casts to 16 bits leave float64 as it is."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func``."""
        kwargs = kwargs or {}
        if kwargs.get("dtype") in SIXTEEN_BIT and args and isinstance(args[0], Tensor):
            kwargs = {**kwargs, "dtype": torch.promote_types(args[0].dtype, kwargs["dtype"])}
        return func(*args, **kwargs)


@contextmanager
def stepping_in_float64(optimizer: torch.optim.Optimizer) -> Generator[None]:
    """Inside, new floating tensors are float64, and what ``optimizer`` casts to 16 bits stays so.

    Such a cast jumps, and has no site.
    """
    casts = any(_casts_down(type(part)) for part in parts_of(optimizer))
    with default_dtype(torch.float64), _LiftedCasts() if casts else nullcontext():
        yield


@cache
def _casts_down(kind: type[torch.optim.Optimizer]) -> bool:
    """Whether the module of an optimizer's step casts to 16 bits, as Muon's does."""
    step: Any = inspect.unwrap(kind.step)
    found = [step, *getattr(step, "__globals__", {}).values()]
    codes = [getattr(inspect.unwrap(each), "__code__", None) for each in found if inspect.isfunction(each)]
    return any(CASTS.intersection(code.co_names) for code in codes if code is not None)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Generator[None]:
    """Inside, torch makes new floating tensors in ``dtype``."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
