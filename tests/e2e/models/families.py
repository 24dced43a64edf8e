"""Small models of four families, as their papers have them: a vision transformer, an LSTM, a denoising U-Net, LoRA on a base."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tallystick.execution.job import Job

SIDE, CLASSES, WIDTH, VOCABULARY = 16, 5, 32, 40
Batch = tuple[Tensor, ...]


class VisionTransformer(nn.Module):
    """Class logits of images (n, 3, side, side), in patches of four pixels, with a class token and learned positions."""

    def __init__(self) -> None:
        super().__init__()
        patches = (SIDE // 4) ** 2
        self.embed = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.randn(1, patches + 1, WIDTH) * 0.02)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 64, 0.1, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(len(x), -1, -1), x), dim=1) + self.positions
        return self.head(self.encoder(x)[:, 0])


class Recurrent(nn.Module):
    """Logits of the next token of texts (n, length), by two layers of LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.lstm, self.dropout = nn.LSTM(WIDTH, 48, 2, batch_first=True), nn.Dropout(0.1)
        self.head = nn.Linear(48, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.dropout(self.lstm(self.embed(tokens))[0]))


def _residual(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.GroupNorm(4, inputs), nn.SiLU(), nn.Conv2d(inputs, outputs, 3, padding=1),
        nn.GroupNorm(4, outputs), nn.SiLU(), nn.Conv2d(outputs, outputs, 3, padding=1),
    )  # fmt: skip


class UNet(nn.Module):
    """The noise in images (n, 3, side, side) at times (n,): down, attention, and up again with what was skipped."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.time = nn.Conv2d(3, 16, 3, padding=1), nn.Linear(16, 32)
        self.down, self.narrow = _residual(16, 16), nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.middle, self.attention = _residual(32, 32), nn.MultiheadAttention(32, 2, batch_first=True)
        self.widen, self.up = nn.ConvTranspose2d(32, 16, 4, stride=2, padding=1), _residual(32, 16)
        self.outputs = nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, images: Tensor, times: Tensor) -> Tensor:
        angles = times[:, None] * torch.exp2(-torch.arange(8, dtype=images.dtype))
        x = self.inputs(images)
        skipped = x + self.down(x)
        x = self.narrow(skipped) + self.time(torch.cat((angles.sin(), angles.cos()), 1))[:, :, None, None]
        x = x + self.middle(x)
        flat = x.flatten(2).transpose(1, 2)
        x = x + self.attention(flat, flat, flat, need_weights=False)[0].transpose(1, 2).reshape(x.shape)
        return self.outputs(self.up(torch.cat((skipped, self.widen(x)), 1)))


class LowRank(nn.Module):
    """A frozen linear layer and two narrow ones beside it, which begin at nothing; rows to rows."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, 4, bias=False)
        self.b, self.dropout = nn.Linear(4, base.out_features, bias=False), nn.Dropout(0.05)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * self.b(self.dropout(self.a(x)))


class Adapted(nn.Module):
    """Class logits of texts (n, length): a frozen encoder whose linear layers have adapters of rank four, and a new head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(
            nn.ModuleList((LowRank(nn.Linear(WIDTH, 96)), LowRank(nn.Linear(96, WIDTH)), nn.LayerNorm(WIDTH)))
            for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for up, down, norm in self.blocks:  # pyright: ignore[reportGeneralTypeIssues]
            x = norm(x + down(F.gelu(up(x)) + x.mean(1, keepdim=True).repeat(1, 1, 3)))
        return self.head(x.mean(1))


def _images(rng: np.random.Generator, n: int = 12) -> tuple[Tensor, Tensor]:
    labels = rng.integers(0, CLASSES, n)
    pixels = rng.integers(0, 96, (n, 3, SIDE, SIDE)) + 32 * labels[:, None, None, None]
    return torch.from_numpy((pixels / 255.0).astype(np.float32)), torch.from_numpy(labels)


def _texts(rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    labels = rng.integers(0, CLASSES, 12)
    tokens = (rng.integers(0, 8, (12, 20)) * np.arange(1, 21) + 7 * labels[:, None]) % VOCABULARY
    return torch.from_numpy(tokens), torch.from_numpy(labels)


def _noised(rng: np.random.Generator) -> Batch:
    images, _ = _images(rng, 6)
    noise = torch.from_numpy(rng.integers(-128, 128, images.shape).astype(np.float32) / 64.0)
    times = torch.from_numpy(rng.integers(0, 32, len(images)).astype(np.float32))
    kept = (1.0 - times / 32.0)[:, None, None, None]
    return images * kept + noise * (1.0 - kept), times, noise


def _classified(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def _next_token(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0][:, :-1]).transpose(1, 2), batch[0][:, 1:])


def _denoised(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch[0], batch[1]), batch[2])


FAMILIES: dict[str, tuple[type[nn.Module], Callable[[np.random.Generator], Batch], Callable[..., Tensor]]] = {
    "vit": (VisionTransformer, _images, _classified),
    "lstm": (Recurrent, _texts, _next_token),
    "unet": (UNet, _noised, _denoised),
    "lora": (Adapted, _texts, _classified),
}


def build(settings: Mapping[str, str]) -> Job:
    """Return the job; ``family`` and ``steps`` are its settings."""
    make, data, loss = FAMILIES[settings.get("family", "vit")]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make()
    trained = [p for p in model.parameters() if p.requires_grad]
    return Job(
        model=model,
        optimizer=torch.optim.AdamW(trained, lr=2e-3),
        batch=lambda step: data(np.random.default_rng(step)),
        loss=loss,
        steps=int(settings.get("steps", "100")),
    )
