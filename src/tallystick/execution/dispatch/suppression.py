"""Decisions of ``torchvision.ops.nms``: which box comes next by its score, and which pairs overlap by more than the threshold."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tallystick.execution.dispatch.calls import Arguments, Operator, all_arguments
from tallystick.execution.dispatch.choices import decide_ranks
from tallystick.execution.dispatch.decisions import OperatorPass


def suppressed(here: OperatorPass, func: Operator, args: Arguments, kwargs: dict[str, Any]) -> Tensor:
    """Return the indexes of the boxes that none with a better score overlaps, best first, as torchvision's own kernel does.

    Two decisions: the order of the scores, and of each pair whether what it has in common is more than the threshold of what it
    covers. The rest is exact.
    """
    boxes, scores, threshold = all_arguments(func, args, kwargs)
    if scores.numel() < 2:
        return func(*args, **kwargs)
    order = decide_ranks(here, scores, 0, scores.sort(descending=True, stable=True).indices, largest=True)
    ranked = boxes.detach()[order]
    first, second = torch.triu_indices(len(order), len(order), 1, device=boxes.device)
    share = _shares(ranked, first, second)
    point = torch.full((), threshold, dtype=share.dtype, device=share.device)
    moved = here.forced(share, lambda _: point)
    over = torch.zeros(len(order), len(order), dtype=torch.bool, device=boxes.device)
    over[first, second] = (share if moved is None else moved) > point
    return order[_kept(over.cpu().numpy()).to(boxes.device)]


def _shares(boxes: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Return, of each pair, the area in common over the area that either covers; zero of two without any."""
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    low = torch.maximum(boxes[first, :2], boxes[second, :2])
    high = torch.minimum(boxes[first, 2:], boxes[second, 2:])
    common = (high - low).clamp(min=0.0).prod(dim=1)
    return (common / (areas[first] + areas[second] - common)).nan_to_num(0.0)


def _kept(over: np.ndarray) -> Tensor:
    """Return the ranks that stay where each that stays takes out those after it that ``over`` says it overlaps."""
    kept: list[int] = []
    out = np.zeros(len(over), dtype=np.bool_)
    for rank, row in enumerate(over):
        if not out[rank]:
            kept.append(rank)
            out |= row
    return torch.tensor(kept, dtype=torch.int64)
