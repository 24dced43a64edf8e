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

from tallystick.execution.dispatch.calls import Arguments, Handler, Operator, argument_named
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
        image, grid = args[at : at + 2]
        if grid.dtype in (torch.bfloat16, torch.float16):
            wide = (each.float() if isinstance(each, Tensor) else each for each in args)
            return tree_map_only(
                Tensor, lambda found: found.to(grid.dtype), handle(here, func, (*wide,), kwargs)
            )
        mode = argument_named(func, args, kwargs, "interpolation_mode")
        wanted = argument_named(
            func, args, kwargs, "output_mask"
        )  # in a backward pass, whether of the grid too
        jumps = mode == NEAREST or (mode == BILINEAR and wanted is not None and wanted[1])
        if not jumps or grid.numel() == 0:
            return func(*args, **kwargs)
        aligned = bool(argument_named(func, args, kwargs, "align_corners"))
        reflected = argument_named(func, args, kwargs, "padding_mode") == REFLECTION
        decided = _in_cells(here, image, grid, 0.5 * (mode == NEAREST), aligned=aligned, reflected=reflected)
        return func(*args[: at + 1], decided, *args[at + 2 :], **kwargs)

    return handle


def _in_cells(
    here: OperatorPass, image: Tensor, grid: Tensor, offset: float, *, aligned: bool, reflected: bool
) -> Tensor:
    """Return the grid with every place clearly in one cell; borders of cells lie at ``offset`` + whole numbers.

    Args:
        here: the pass that the sampler is of.
        image: what is sampled, (N, C, H, W) or (N, C, D, H, W).
        grid: places along W, H and D in its last dimension, from -1 to 1.
        offset: 0 between the centres of elements, 0.5 halfway.
        aligned: whether -1 and 1 are the centres of the outermost elements, and not their far sides.
        reflected: whether there are borders beyond the image, without end.
    """
    sizes = torch.tensor(image.shape[:1:-1], dtype=torch.float64, device=grid.device)
    scale, shift = ((sizes - 1.0) / 2.0, 0.0) if aligned else (sizes / 2.0, -0.5)
    wide = grid.detach().double()
    place = (wide + 1.0) * scale + shift
    if not reflected:  # beyond the image nothing jumps, and how far beyond says nothing of the noise within
        place = place.clamp(min=-2.0).minimum(sizes + 1.0)
    border = torch.round(place - offset) + offset
    if not reflected:
        border = border.clamp(min=offset - 1.0).minimum(sizes - offset)
    point = border - UPPER
    flat = point.reshape(-1)
    moved = here.forced(place, lambda _: flat, 1.0)
    decided = place if moved is None else moved
    least = (SURE * torch.finfo(grid.dtype).eps * ((wide.abs() + 1.0) * scale + 1.0)).clamp(max=0.25)
    sure = torch.where((decided >= point) & (decided < border + least), border + least, decided)
    found = ((sure - shift) / scale - 1.0).to(grid.dtype)
    return torch.where((sure != place) & (scale > 0.0), found, grid.detach())


SAMPLE_HANDLERS: dict[str, Handler] = {
    **{f"aten::grid_sampler_{dims}d": _sampled(0) for dims in (2, 3)},
    **{f"aten::grid_sampler_{dims}d_backward": _sampled(1) for dims in (2, 3)},
}
