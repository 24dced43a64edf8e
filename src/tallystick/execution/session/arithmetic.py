"""How a session's passes compute: precisions, noise of its own, and what is met that people should know of."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import torch

from tallystick.errors import Nondeterminism
from tallystick.execution.dispatch.decisions import OperatorFindings
from tallystick.execution.dispatch.jitter import Jitter, JitterMode
from tallystick.execution.portable_optimizers import why_not_portable
from tallystick.numerics.policy import Policy


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
        reason = why_not_portable(optimizer)
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
    def in_optimizer(self) -> Generator[None]:
        """Inside, new floating tensors are float64, and operators have the noise that there is."""
        with ExitStack() as stack:
            stack.enter_context(default_dtype(torch.float64))
            if self.jitter is not None:
                stack.enter_context(JitterMode(self.jitter))
            yield


@contextmanager
def default_dtype(dtype: torch.dtype) -> Generator[None]:
    """Inside, torch makes new floating tensors in ``dtype``."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
