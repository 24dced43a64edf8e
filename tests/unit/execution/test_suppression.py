"""torchvision's ``nms``, by operators whose jumps are logged: what its own kernel gives, and the trainer's branches elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tallystick.errors import Nondeterminism

THRESHOLD = 0.5


def own_kernel(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Suppress greedily, pair by pair."""
    kept: list[int] = []
    for at in scores.argsort(descending=True, stable=True).tolist():
        if all(float(_share(boxes[at], boxes[other])) <= iou_threshold for other in kept):
            kept.append(at)
    return torch.tensor(kept, dtype=torch.int64)


def _share(x: Tensor, y: Tensor) -> Tensor:
    sides = (torch.minimum(x[2:], y[2:]) - torch.maximum(x[:2], y[:2])).clamp(min=0)
    common = sides.prod()
    return common / ((x[2:] - x[:2]).prod() + (y[2:] - y[:2]).prod() - common)


@pytest.fixture(scope="module", autouse=True)
def nms() -> Iterator[None]:
    """The operator as torchvision declares it, where that is not there."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    try:
        torch.ops.torchvision.nms.default  # noqa: B018
    except AttributeError:
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.impl("nms", own_kernel, "CPU")
        library.define(
            "roi_align(Tensor input, Tensor rois, float spatial_scale, int pooled_height, int pooled_width, "
            "int sampling_ratio, bool aligned) -> Tensor"
        )
        library.impl("roi_align", lambda pixels, boxes, *_: boxes[:, 1:].sum() * pixels.mean((2, 3)), "CPU")
    yield
    library._destroy()  # or it is there for whatever comes after


def weighed(which: str) -> Any:
    """A function of four numbers that suppresses boxes: one number is the score of the last, or says how wide it is."""

    def function(x: Tensor) -> Tensor:
        boxes = torch.tensor(
            [[0.0, 0.0, 2.0, 2.0], [5.0, 5.0, 7.0, 7.0], [0.0, 0.0, 2.0, 1.0]], dtype=x.dtype
        )
        scores = torch.tensor([0.9, 0.8, 0.7], dtype=x.dtype)
        if which == "score":
            scores = torch.cat((scores[:2], x.detach()[:1]))
        else:
            boxes = torch.cat((boxes[:2], torch.stack((*boxes[2, :3], x.detach()[0]))[None]))
        kept = torch.ops.torchvision.nms(boxes, scores, THRESHOLD)
        weights = torch.zeros(3, dtype=x.dtype).index_fill(0, kept, 1.0) + (kept[0] + 2 * kept[-1]) * 0.1
        return (x[:3] * weights).square()

    return function


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("count", [0, 1, 2, 30])
def test_what_is_kept_is_what_torchvision_keeps(count: int, seed: int, branches: Any) -> None:
    generator = torch.Generator().manual_seed(seed)
    corners = torch.rand(count, 2, generator=generator) * 10.0
    boxes = torch.cat((corners, corners + torch.rand(count, 2, generator=generator) * 8.0), 1)
    scores = torch.rand(count, generator=generator)
    kept: list[Tensor] = []

    def function(x: Tensor) -> Tensor:
        kept.append(torch.ops.torchvision.nms(boxes, scores, 0.3))
        return x

    branches.record(function, torch.ones(2))

    assert torch.equal(kept[0], own_kernel(boxes, scores, 0.3))


def test_samples_that_follow_from_the_size_of_a_box_are_refused(branches: Any) -> None:
    x = torch.linspace(-1.0, 1.0, 4, dtype=getattr(torch, branches.policy.compute))

    def function(samples: int) -> Callable[[Tensor], Tensor]:
        def pooled(x: Tensor) -> Tensor:
            boxes = torch.tensor([[0.0, 0.0, 0.0, 1.0, 1.0]], dtype=x.dtype)
            pixels = x.detach().reshape(1, 1, 2, 2)
            return x * torch.ops.torchvision.roi_align(pixels, boxes, 1.0, 1, 1, samples, False).sum()

        return pooled

    assert branches.record(function(2), x).output.isfinite().all()
    for samples in (0, -1):
        with pytest.raises(Nondeterminism, match=r"torchvision.roi_align.*sampling_ratio=2, say"):
            branches.record(function(samples), x)


@pytest.mark.parametrize(("which", "at"), [("score", 0.9), ("width", 1.0)])
def test_a_follower_keeps_what_the_trainer_kept(which: str, at: float, branches: Any) -> None:
    dtype = getattr(torch, branches.policy.compute)
    away = 1e-13 if dtype == torch.float64 else 2e-7
    x = torch.tensor([at, 0.5, 0.25], dtype=dtype)
    trainers, auditors = x.clone(), x.clone()
    trainers[0] += away
    auditors[0] -= away
    function = weighed(which)

    trainer = branches.record(function, trainers)
    alone = branches.record(function, auditors)
    follower = branches.follow(function, auditors, trainer.frame)

    assert not torch.allclose(alone.gradient, trainer.gradient), (
        "both take the same branch: this shows nothing"
    )
    assert torch.allclose(follower.gradient, trainer.gradient)
    assert follower.violations == []
