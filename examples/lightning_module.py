"""A module for Lightning's Trainer, with the two lines that let tally record and follow it.

tally record --policy fp32 --run runs/lightning -- python examples/lightning_module.py
tally audit runs/lightning -- python examples/lightning_module.py

Without tally it trains, and does nothing else.
"""

from __future__ import annotations

from typing import Any

import lightning
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tallystick.integrations.lightning import TallystickLightningCallback  # 1


def spirals(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points of two interleaved spirals, the same on every machine."""
    rng = np.random.default_rng(0)
    turn, arm = rng.uniform(0.5, 3.0, count), rng.integers(0, 2, count)
    angle = turn * 3.0 + np.pi * arm
    points = np.stack([turn * np.cos(angle), turn * np.sin(angle)], axis=1) + rng.normal(
        0.0, 0.05, (count, 2)
    )
    return torch.from_numpy(points.astype(np.float32).round(4)), torch.from_numpy(arm)


class Spirals(lightning.LightningModule):
    """Tells the arms of two spirals apart."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(2, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2)
        )

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        """Return the loss of a batch."""
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        """Log the share that is told apart rightly."""
        self.log("right", (self.net(batch[0]).argmax(1) == batch[1]).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> Any:
        """Return an optimizer whose rate falls by half after each epoch."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}


torch.manual_seed(0)
data = TensorDataset(*spirals(640))
trainer = lightning.Trainer(
    max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, gradient_clip_val=1.0, accumulate_grad_batches=2, callbacks=[TallystickLightningCallback()],  # 2
)  # fmt: skip
trainer.fit(Spirals(), DataLoader(data, batch_size=32, shuffle=True), DataLoader(data, batch_size=640))
print(f"{float(trainer.callback_metrics['right']):.1%} right")
