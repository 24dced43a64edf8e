"""ResNet-50 for 32x32 images in 10 classes (He et al. 2016, with a 3x3 stem and no first max-pool), as on CIFAR-10.

Bottleneck blocks 3, 4, 6, 3 with batch norm and functional ReLU; SGD with momentum 0.9 and weight decay on a cosine
schedule. 23,520,842 parameters at the default width. The data are scikit-learn's 1797 handwritten digits, as in
``tallystick.jobs.digits``: each pixel of 8x8 repeated four times in both directions, in three equal channels, so that
nothing has to be downloaded and every machine has the same bytes. Shortcuts that change nothing are empty
``Sequential`` modules, hence leaf modules, as in the model that the 2024 paper trained.

Settings, all optional:
    steps=100            optimizer steps, and the length of the schedule
    batch=64             images a step, over all micro-batches
    accumulation=1       micro-batches a step; divides batch
    width=64             channels of the first stage; the stages have 4, 8, 16 and 32 times as many
    blocks=3,4,6,3       or 1,1,1,1 for trying things out
    learning_rate=0.01   at the start
    weight_decay=0.0005
    init_seed=0          torch's seed for the initial weights
    data_seed=0          Philox's seed for the order of the images

Needs the extra ``tallystick[jobs]``.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, cross_entropy, relu

from tallystick.execution.job import Job
from tallystick.jobs.digits import (
    CLASSES,
    LARGEST_SEED,
    MOMENTUM,
    MOST_STEPS,
    Digits,
    choice,
    initial_weights,
    parse_settings,
    read_digits,
    real,
    scoring,
    visited,
    whole,
)
from tallystick.jobs.text import check_divides

EXPANSION = 4
REPEAT = 4  # 8 pixels a side become 32


@dataclass(frozen=True)
class ResNet50Settings:
    """The settings of this job; the module's docstring says what they are."""

    steps: int = whole(100, 1, MOST_STEPS)
    batch: int = whole(64, 2, 4096)  # batch norm needs two
    accumulation: int = whole(1, 1, 4096)
    width: int = whole(64, 1, 1024)
    blocks: str = choice("3,4,6,3", "1,1,1,1")
    learning_rate: float = real(0.01, 0.0, 10.0)
    weight_decay: float = real(5e-4, 0.0, 1.0)
    init_seed: int = whole(0, 0, LARGEST_SEED)
    data_seed: int = whole(0, 0, LARGEST_SEED)


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions with batch norm, around them a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = EXPANSION * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output, (n, 4 * width, h / stride, w / stride)."""
        y = relu(self.norm1(self.conv1(x)))
        y = relu(self.norm2(self.conv2(y)))
        return relu(self.norm3(self.conv3(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Logits (n, 10) of images (n, 3, 32, 32)."""

    def __init__(self, width: int, blocks: tuple[int, ...]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        stages: list[nn.Module] = []
        inputs = width
        for stage, count in enumerate(blocks):
            layers: list[nn.Module] = []
            for block in range(count):
                stride = 2 if stage and not block else 1
                layers.append(Bottleneck(inputs, width << stage, stride))
                inputs = EXPANSION * width << stage
            stages.append(nn.Sequential(*layers))
        self.stages = nn.Sequential(*stages)
        self.linear = nn.Linear(inputs, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        x = self.stages(relu(self.norm1(self.conv1(images))))
        return self.linear(avg_pool2d(x, 4).flatten(1))


def build(settings: Mapping[str, str]) -> Job:
    """Return the job.

    Raises:
        InvalidInput: an unknown setting, a value out of range, or no scikit-learn.
    """
    chosen = parse_settings(ResNet50Settings, settings, job="resnet50")
    check_divides("resnet50", accumulation=chosen.accumulation, batch=chosen.batch)
    data = read_digits()
    training, held_out = data.split()
    with initial_weights(chosen.init_seed):
        model = ResNet(chosen.width, tuple(map(int, chosen.blocks.split(","))))
    optimizer = torch.optim.SGD(
        model.parameters(), lr=chosen.learning_rate, momentum=MOMENTUM, weight_decay=chosen.weight_decay
    )

    def batch(step: int) -> tuple[Tensor, Tensor]:
        at = visited(step, chosen.batch, len(training.labels), chosen.data_seed)
        return enlarged(training.take(at))

    return Job(
        model=model,
        optimizer=optimizer,
        batch=batch,
        loss=_loss,
        steps=chosen.steps,
        scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=chosen.steps),
        accumulation=chosen.accumulation,
        dataset_digest=data.digest,
        evaluate=functools.partial(_evaluate, held_out),
    )


def enlarged(digits: Digits) -> tuple[Tensor, Tensor]:
    """Return images (n, 3, 32, 32), float32 from 0 to 1, exact; labels (n,), int64."""
    images, labels = digits.tensors()
    large = images.repeat_interleave(REPEAT, dim=2).repeat_interleave(REPEAT, dim=3)
    return large.expand(-1, 3, -1, -1).contiguous(), labels


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return cross_entropy(model(images), labels)


def _evaluate(held_out: Digits, model: nn.Module) -> dict[str, float]:
    right, loss = 0.0, 0.0
    with scoring(model) as placed:
        images, labels = map(placed, enlarged(held_out))
        for part, wanted in zip(images.split(64), labels.split(64), strict=True):
            logits = model(part)
            right += (logits.argmax(dim=1) == wanted).sum().item()
            loss += cross_entropy(logits, wanted, reduction="sum").item()
    return {"held_out_loss": loss / len(labels), "held_out_accuracy": right / len(labels)}
