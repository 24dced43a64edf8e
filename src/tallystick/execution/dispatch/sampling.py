"""Decisions of ``grid_sample``: between which elements of an image a place of the grid lies, or which of them is the nearest.

Bilinear samples are continuous, and the gradient of their grid jumps from one cell to the next; the nearest element jumps halfway
between two. Bicubic samples are smooth (Keys 1981, "Cubic convolution interpolation", section III). Places of sixteen bits are
looked up in float32: they are rounded as coarsely as elements lie, and each device's kernel rounds them otherwise.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from tallystick.execution.dispatch.calls import (
    Arguments,
    Handler,
    Operator,
    all_arguments,
)
from tallystick.execution.dispatch.decisions import OperatorPass

BILINEAR, NEAREST = 0, 1  # torch's numbers for modes of interpolation
REFLECTION = 2  # and for a padding
SURE = 8.0
"""How far above the border between two cells a place is moved, in rounding errors of its own: kernels that round in another
order, or less often, find it in the cell that was decided."""
UPPER = 2.0**-8
"""How far below a border, in sides of a cell, a place still counts as above it. Where training begins with no warp at all, an
identity or whole offsets, every place lies on a border, on the side that its rounding errors take: all of them would be
decisions, and the gradient of the warp theirs. It is wider than the narrowest band, up to images of 400 elements a side."""


def _sampled(at: int) -> Handler:
    """Return a handler of a sampler, or of its backward pass, whose image and grid are arguments ``at`` and ``at + 1``."""

    def handle(here: OperatorPass, func: Operator, args: Arguments, kwargs: dict[str, Any]) -> Any:
        given = all_arguments(func, args, kwargs)
        image, grid, mode, padding, aligned = given[at : at + 5]
        if grid.dtype in (torch.bfloat16, torch.float16):
            wide = tuple(each.float() if isinstance(each, Tensor) else each for each in given)
            return tree_map_only(Tensor, lambda found: found.to(grid.dtype), handle(here, func, wide, {}))
        is_backward = at > 0
        wants_image, wants_grid = given[-1] if is_backward else (True, False)
        if grid.numel() == 0 or not (mode == NEAREST or (mode == BILINEAR and wants_grid)):
            return func(*given)
        decided = _in_cells(
            here, image, grid, mode == NEAREST, aligned=aligned, reflected=padding == REFLECTION
        )
        moved = (*given[: at + 1], decided, *given[at + 2 :])
        if mode == NEAREST or not wants_image:
            return func(*moved)
        # The gradient of the image does not jump, and is that of the places as they are.
        return func(*given[:-1], [True, False])[0], func(*moved[:-1], [False, True])[1]

    return handle


def _in_cells(
    here: OperatorPass, image: Tensor, grid: Tensor, nearest: bool, *, aligned: bool, reflected: bool
) -> Tensor:
    """Return the grid with every place clearly in one cell.

    Borders of cells lie at whole numbers, or halfway between them where the ``nearest`` element is wanted; of two as near it is
    the even one, as torch has it.

    Args:
        here: the pass that the sampler is of.
        image: what is sampled, (N, C, H, W) or (N, C, D, H, W).
        grid: places along W, H and D in its last dimension, from -1 to 1.
        nearest: whether the nearest element is taken.
        aligned: whether -1 and 1 are the centres of the outermost elements, and not their far sides.
        reflected: whether there are borders beyond the image, without end.
    """
    sizes = torch.tensor(image.shape[:1:-1], dtype=torch.float64, device=grid.device)
    scale, shift = ((sizes - 1.0) / 2.0, 0.0) if aligned else (sizes / 2.0, -0.5)
    offset, wide = 0.5 * nearest, grid.detach().double()
    place = (wide + 1.0) * scale + shift
    if not reflected:  # beyond the image nothing jumps, and how far beyond says nothing of the noise within
        place = place.clamp(min=-2.0).minimum(sizes + 1.0)
    border = torch.round(place - offset) + offset
    if not reflected:
        border = border.clamp(min=offset - 1.0).minimum(sizes - offset)
    point = border if nearest else border - UPPER
    flat = point.reshape(-1)
    moved = here.forced(place, lambda _: flat, 1.0)
    decided = place if moved is None else moved
    least = (SURE * torch.finfo(grid.dtype).eps * ((wide.abs() + 1.0) * scale + 1.0)).clamp(max=0.25)
    is_even = torch.remainder(border + offset, 2.0) == 0.0
    above = (decided > point) | ((decided == point) & is_even) if nearest else decided >= point
    sure = torch.where(above, torch.maximum(decided, border + least), decided)
    if nearest:
        sure = torch.where(above, sure, torch.minimum(decided, border - least))
    found = ((sure - shift) / scale - 1.0).to(grid.dtype)
    return torch.where((sure != place) & (scale > 0.0), found, grid.detach())


SAMPLE_HANDLERS: dict[str, Handler] = {
    **{f"aten::grid_sampler_{dims}d": _sampled(0) for dims in (2, 3)},
    **{f"aten::grid_sampler_{dims}d_backward": _sampled(1) for dims in (2, 3)},
}
