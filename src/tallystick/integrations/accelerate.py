"""A loop over Hugging Face's accelerate, recorded or followed by ``tally``.

For instance::

    from tallystick.integrations.accelerate import attach      # 1
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    attach(accelerator, model, optimizer, scheduler)           # 2
"""

from __future__ import annotations

from typing import Any

from torch import nn

from tallystick.errors import InvalidInput, Nondeterminism
from tallystick.roles.attached import Attached
from tallystick.roles.attached import attach as attach_plain


def attach(
    accelerator: Any, model: nn.Module, optimizer: Any, scheduler: Any = None, **more: Any
) -> Attached:
    """Attach what ``accelerator.prepare`` has returned, without what it wrapped it in; ``more`` is as for ``tallystick.attach``.

    Raises:
        Nondeterminism: the accelerator has a precision of its own.
        InvalidInput: it has several processes.
    """
    if accelerator.mixed_precision not in (None, "no"):
        raise Nondeterminism(
            f"Accelerator: mixed_precision={accelerator.mixed_precision}: leave it out; tally record --policy bf16 has "
            "an autocast of its own"
        )
    if accelerator.num_processes != 1:
        raise InvalidInput(f"Accelerator: {accelerator.num_processes} processes; a recorded run has one")
    return attach_plain(accelerator.unwrap_model(model), optimizer, scheduler, **more)
