"""A float32 step as float64 computes it: what its own deviation is measured against (docs/adr/0026).

No model of operators is needed: whatever cancels inside one shows as the difference of two evaluations of the same step,
from the same values, along the same branches, with the same random numbers.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

from tallystick.execution.dispatch.decisions import OperatorFindings
from tallystick.execution.session.session import Session

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
STRICT = (nn.RNNBase, nn.RNNCellBase, *CONVOLUTIONS)


@contextmanager
def in_float64(session: Session) -> Generator[None]:
    """Inside, the session's passes compute in float64; tensors, policy and findings are as they were afterwards.

    Parameters that get a gradient and floating buffers are float64 copies: gradients are float64 then, and what a forward
    pass writes to a buffer is gone at the end. Frozen parameters stay float32: every operator widens what it reads of them, but
    for those of ``STRICT`` modules, of which torch compares the types before.
    """
    modules = (session.model, *session.extra.values())
    learning = {id(p): p for module in modules for p in module.parameters() if p.requires_grad}
    strict = [each for module in modules for each in module.modules() if isinstance(each, STRICT)]
    learning |= {id(p): p for module in strict for p in module.parameters(recurse=False)}
    held = [(p, p.data) for p in learning.values()]
    buffers = session.tensors.floating_buffers()
    own = session.arithmetic
    wide = replace(
        own,
        policy=replace(own.policy, compute="float64"),
        compute=torch.float64,
        precision=torch.float64,
        jitter=None,
        widens=True,
        findings=OperatorFindings(refused=None if own.findings.refused is None else []),
    )
    try:
        with torch.no_grad():
            for p, data in held:
                p.data = data.double()
            for owner, key, tensor in buffers:
                setattr(owner, key, tensor.double())
        with session.computing(wide):
            yield
    finally:
        for p, data in held:
            p.grad = None
            p.data = data
        for owner, key, tensor in buffers:
            setattr(owner, key, tensor)
