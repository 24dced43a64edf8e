"""Which elements of a decision's input lie near a switching point, and where its sides are."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tallystick.numerics.kernels import measures, native

DTYPES = {torch.float32: np.float32, torch.float64: np.float64}
SAMPLE = 1 << 12  # elements whose rms stands for that of a decision's input
MASK = 2.0**100
"""What is as large, or infinite, masks an element (``torch.finfo(dtype).min``): nothing counts beside it, and it says nothing of
the size of others."""
NOWHERE = torch.empty(0, dtype=torch.int64)


def sampled_rms(flat: Tensor) -> float:
    """Return the rms of a decision's input, from an even sample of large ones: both parties take the same elements.

    An odd stride, so that a sample of images is not one of their borders. Masked elements do not count.
    """
    sample = flat[:: flat.numel() // SAMPLE | 1] if flat.numel() > 2 * SAMPLE else flat
    return _rms_of_unmasked(sample) or _rms_of_unmasked(flat)


def may_mask(x: Tensor) -> bool:
    """Whether any of dense numbers on the CPU may mask another: none where all squares sum to less than one of these alone."""
    n = x.numel()
    if n <= native.CHUNK:
        return not measures.square_sum(x.data_ptr(), int(x.dtype == torch.float64), n) < MASK * MASK
    return not _rms(x.detach().as_strided((n,), (1,))) * math.sqrt(n) < MASK


def _rms_of_unmasked(flat: Tensor) -> float:
    rms = _rms(flat)
    return rms if rms * math.sqrt(flat.numel()) < MASK else _rms(flat[flat.abs() < MASK])


def is_finite(flat: Tensor) -> bool:
    """Whether all elements are finite, and not so large that their squares are not."""
    return math.isfinite(_rms(flat))


def _rms(flat: Tensor) -> float:
    if flat.numel() == 0:
        return 0.0
    if flat.device.type == "cpu" and flat.dtype in (torch.float32, torch.float64):
        total = np.empty(1, dtype=np.float64)
        measures.block_square_sums(
            flat.contiguous().numpy(), flat.numel(), total, threads=torch.get_num_threads()
        )
        return math.sqrt(float(total[0]) / flat.numel())
    return float(torch.linalg.vector_norm(flat, dtype=torch.float64).item()) / math.sqrt(flat.numel())


def near_point(flat: Tensor, point: Tensor, band: float) -> Tensor:
    """Return the flat indexes of elements less than ``band`` from ``point``, ascending; one point, or one for each element."""
    if flat.device.type == "cpu" and flat.dtype in DTYPES and not point.dim():
        found = measures.near(flat.contiguous().numpy(), point.item(), band, threads=torch.get_num_threads())
        return torch.from_numpy(found)
    return ((flat - point).abs() < band).nonzero().squeeze(1)


def beside_points(flat: Tensor, point: Tensor, near: Tensor) -> Tensor:
    """Return ``near`` without the elements that lie exactly on their switching point."""
    return near[flat[near] != points_at(point, near)]


def points_at(point: Tensor, at: Tensor) -> Tensor:
    """Return the switching points of the elements ``at``."""
    return point[at] if point.dim() else point.expand(at.shape)


def neighbours(point: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values just below and above; around zero the smallest normal number, which no machine flushes."""
    tiny = torch.finfo(point.dtype).tiny
    infinity = torch.tensor(math.inf, dtype=point.dtype, device=point.device)
    below = torch.where(point == 0, -tiny, torch.nextafter(point, -infinity))
    above = torch.where(point == 0, tiny, torch.nextafter(point, infinity))
    return below, above


def is_float(value: Any) -> bool:
    """Return whether ``value`` is a tensor of floating-point numbers."""
    return isinstance(value, Tensor) and value.is_floating_point()
