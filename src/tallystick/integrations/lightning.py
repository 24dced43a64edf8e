"""Lightning's Trainer, and Fabric, recorded or followed by ``tally``.

For instance::

    from tallystick.integrations.lightning import TallystickLightningCallback      # 1
    trainer = Trainer(max_epochs=1, callbacks=[TallystickLightningCallback()])     # 2

    from tallystick.integrations.lightning import attach                  # 1
    model, optimizer = fabric.setup(model, optimizer)
    attach(model, optimizer)                                              # 2
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from tallystick.errors import InvalidInput, Nondeterminism
from tallystick.roles.attached import Attached
from tallystick.roles.attached import attach as attach_plain

PLAIN = ("32-true", "32", 32)


class TallystickLightningCallback(Callback):
    """Attaches a module's parameters, its optimizer and schedule when training begins, and ends the run when it ends.

    Args:
        smooth, resumable: as for ``tallystick.attach``.

    Attributes:
        run: the handle, once training has begun.
    """

    def __init__(self, *, smooth: tuple[str, ...] = (), resumable: bool = False) -> None:
        self._given: dict[str, Any] = {"smooth": smooth, "resumable": resumable}
        self.run: Attached | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach.

        Raises:
            Nondeterminism: the Trainer has a precision of its own.
            InvalidInput: it has several processes, or the module several optimizers.
        """
        if trainer.precision not in PLAIN:
            raise Nondeterminism(
                f"Trainer: precision={trainer.precision}: leave it out; tally record --policy fp64 or bf16 says so for the run"
            )
        if trainer.world_size != 1 or len(trainer.optimizers) != 1:
            raise InvalidInput(
                f"Trainer: {trainer.world_size} processes and {len(trainer.optimizers)} optimizers; a run has one of each"
            )
        schedules = [each.scheduler for each in trainer.lr_scheduler_configs]
        self.run = attach_plain(
            pl_module, trainer.optimizers[0], schedules[0] if schedules else None, **self._given
        )

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin a step: the module's own ``forward`` need not be called in it."""
        if self.run is not None:
            self.run.open_step()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the run."""
        if self.run is not None:
            self.run.finish()


def attach(model: nn.Module, optimizer: Any, scheduler: Any = None, **more: Any) -> Attached:
    """Attach what ``fabric.setup`` has returned, without what it wrapped it in; ``more`` is as for ``tallystick.attach``."""
    return attach_plain(getattr(model, "module", model), optimizer, scheduler, **more)
