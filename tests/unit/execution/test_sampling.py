"""``grid_sample``: the cell that a place lies in is decided where the gradient of the grid, or the nearest element, jumps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

MODES = ("bilinear", "nearest")
PADDINGS = ("zeros", "border", "reflection")
EPS = {torch.float32: 2.0**-23, torch.float64: 2.0**-52}


def places(x: Tensor, sizes: tuple[int, ...], aligned: bool) -> Tensor:
    """The grid that stands for places ``x`` in units of elements, of an image with these sides (each of them the same)."""
    size = sizes[0]
    scaled = (2.0 * x / (size - 1) - 1.0) if aligned else ((2.0 * x + 1.0) / size - 1.0)
    return scaled.reshape(1, *(1,) * (len(sizes) - 1), -1, len(sizes))


def image(sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    count = torch.tensor(sizes).prod().item()
    return torch.cos(torch.arange(float(2 * count), dtype=dtype)).reshape(1, 2, *sizes)


def sampler(
    sizes: tuple[int, ...], mode: str, padding: str, aligned: bool, trains: str = "grid"
) -> Callable[[Tensor], Tensor]:
    """Samples at eight places along the axes, or with ``trains="image"`` an image that they scale at places that stand still."""

    def sample(x: Tensor) -> Tensor:
        picture = image(sizes, x.dtype)
        places_of = x if trains == "grid" else x.detach()
        if trains == "image":
            picture = picture * x[:1]
        grid = places(F.pad(places_of, (0, len(sizes) * 8 - 8), value=0.7), sizes, aligned)
        return F.grid_sample(picture, grid, mode=mode, padding_mode=padding, align_corners=aligned).reshape(
            -1
        )

    return sample


UPPER = 2.0**-8


def beside(point: float, away: float, dtype: torch.dtype) -> Tensor:
    return torch.tensor((1.3, 0.8, 2.21, point + away, 2.7, 0.17, 1.9, 2.83), dtype=dtype)


FORMS = [
    (sizes, mode, padding, aligned, point)
    for sizes in ((5, 5), (5, 5, 5))
    for mode in MODES
    for padding in PADDINGS
    for aligned in (False, True)
    for point in ((2.0, 3.0) if mode == "bilinear" else (2.5, 0.5))
]


@pytest.mark.parametrize(("sizes", "mode", "padding", "aligned", "point"), FORMS)
def test_a_follower_is_in_the_recorded_cell(
    sizes: tuple[int, ...], mode: str, padding: str, aligned: bool, point: float, branches: Any
) -> None:
    dtype = getattr(torch, branches.policy.compute)
    away = 1e-13 if dtype == torch.float64 else 1e-6
    sample = sampler(sizes, mode, padding, aligned)
    point -= UPPER if mode == "bilinear" else 0.0
    trainer = branches.record(sample, beside(point, away, dtype))
    assert len(trainer.frame) > 0

    follower = branches.follow(sample, beside(point, -away, dtype), trainer.frame)

    close = 1e-10 if dtype == torch.float64 else 1e-4
    assert follower.violations == []
    torch.testing.assert_close(follower.output, trainer.output, atol=close, rtol=0.0)
    torch.testing.assert_close(follower.gradient, trainer.gradient, atol=close, rtol=0.0)
    alone = branches.record(sample, beside(point, -away, dtype))
    apart = (alone.output - trainer.output).abs().max() + (alone.gradient - trainer.gradient).abs().max()
    assert apart > 1e-3
    far = beside(point, -0.02, dtype)
    follower = branches.follow(sample, far, trainer.frame)
    assert follower.violations and all("twice the band" in each.rule for each in follower.violations)
    assert torch.equal(follower.gradient, branches.record(sample, far).gradient)


@pytest.mark.parametrize("padding", ["zeros", "border"])
@pytest.mark.parametrize("aligned", [False, True])
def test_a_place_beyond_the_image_is_no_decision(padding: str, aligned: bool, branches: Any) -> None:
    dtype = getattr(torch, branches.policy.compute)
    x = torch.tensor((1.3, -2.0, 7.0, 100.0, -55.0, 0.17, 1.9, 1e6), dtype=dtype)
    assert len(branches.record(sampler((5, 5), "bilinear", padding, aligned), x).frame) == 0


def test_places_far_beyond_the_image_widen_no_band(branches: Any) -> None:
    """Perspective near the camera's plane: a place of 30,000 elements away made a model of depth too noisy to record."""
    dtype = getattr(torch, branches.policy.compute)
    near = beside(2.0 - UPPER - 0.004, 0.0, dtype)
    far = torch.cat((near[:6], torch.tensor([3e4, -3e4], dtype=dtype)))
    for x in (near, far):
        found = branches.record(sampler((5, 5), "bilinear", "zeros", False), x)
        assert len(found.frame) == 0
        assert found.gradient.isfinite().all()
    torch.testing.assert_close(found.gradient[6:], torch.zeros(2, dtype=dtype))


def test_an_image_alone_is_trained_without_decisions_by_bilinear_samples(branches: Any) -> None:
    dtype = getattr(torch, branches.policy.compute)
    x = beside(2.0 - UPPER, 0.0, dtype)
    assert len(branches.record(sampler((5, 5), "bilinear", "zeros", False, "image"), x).frame) == 0
    nearest = branches.record(sampler((5, 5), "nearest", "zeros", False, "image"), beside(2.5, 0.0, dtype))
    assert len(nearest.frame) == 2, "of the sample, and of the gradient of the image"


@pytest.mark.parametrize("padding", PADDINGS)
def test_bicubic_samples_have_a_gradient_that_does_not_jump(padding: str, branches: Any) -> None:
    dtype = getattr(torch, branches.policy.compute)
    sample = sampler((5, 5), "bicubic", padding, True)
    for point in (0.0, 2.0, 3.0, 4.0):
        below, above = (branches.record(sample, beside(point, away, dtype)) for away in (-1e-5, 1e-5))
        assert len(below.frame) == len(above.frame) == 0
        torch.testing.assert_close(below.gradient, above.gradient, atol=1e-3, rtol=0.0)


@pytest.mark.parametrize("size", [4, 5])
def test_of_two_elements_as_near_the_even_one_is_taken_as_torch_does(size: int, branches: Any) -> None:
    """Whole numbers of quarters, which every kernel computes exactly."""
    dtype = getattr(torch, branches.policy.compute)
    picture = torch.arange(1.0, size + 1.0, dtype=dtype).reshape(1, 1, 1, size)
    x = (torch.arange(-size, size + 1.0, dtype=dtype) / size).reshape(1, 1, -1, 1)

    def sample(x: Tensor) -> Tensor:
        grid = torch.cat((x, torch.zeros_like(x)), dim=-1)
        return F.grid_sample(picture, grid, mode="nearest", align_corners=False).reshape(-1)

    if size == 4:  # a fifth is no sum of powers of two
        assert torch.equal(branches.record(sample, x).output, sample(x))
    follower = branches.follow(sample, x, branches.record(sample, x).frame)
    assert follower.violations == []


def test_the_gradient_of_the_image_is_that_of_the_places_as_they_are(branches: Any) -> None:
    dtype = getattr(torch, branches.policy.compute)
    at = places(torch.tensor([1.0, 2.0, 3.0, 2.0 - UPPER / 2, 1.5, 0.25], dtype=dtype), (5, 5), True)

    def sample(x: Tensor) -> Tensor:
        return F.grid_sample(x.reshape(1, 1, 5, 5), at * 1.0 + 0.0 * x.sum(), align_corners=True).reshape(-1)

    x = torch.cos(torch.arange(25.0, dtype=dtype))
    found = branches.record(sample, x)
    leaf = x.clone().requires_grad_()
    y = F.grid_sample(leaf.reshape(1, 1, 5, 5), at, align_corners=True).reshape(-1)
    (y * torch.linspace(1.0, 2.0, 3, dtype=dtype)).sum().backward()
    assert torch.equal(found.gradient, leaf.grad)


def test_a_side_of_one_element_has_no_cells_to_choose_from(branches: Any) -> None:
    dtype = getattr(torch, branches.policy.compute)

    def sample(x: Tensor) -> Tensor:
        return F.grid_sample(
            torch.ones(1, 1, 1, 1, dtype=x.dtype), x.reshape(1, 1, 4, 2), align_corners=True
        ).reshape(-1)

    found = branches.record(sample, beside(0.3, 0.0, dtype) / 4.0)
    assert found.gradient.isfinite().all() and not found.gradient.any()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_places_of_sixteen_bits_are_looked_up_in_float32(
    dtype: torch.dtype, mode: str, branches: Any
) -> None:
    grid = places(torch.linspace(0.3, 3.4, 16), (5, 5), aligned=False).to(dtype)
    picture = image((5, 5), torch.float32).to(dtype)

    def sample(x: Tensor) -> Tensor:
        found = F.grid_sample(picture.to(x.dtype), x, mode=mode, align_corners=False)
        return found.to(dtype).reshape(-1)

    narrow = branches.record(sample, grid)
    wide = F.grid_sample(picture.float(), grid.float(), mode=mode, align_corners=False).to(dtype)
    assert narrow.output.dtype == narrow.gradient.dtype == dtype
    assert torch.equal(narrow.output, wide.reshape(-1))


@pytest.mark.parametrize("size", [7, 100, 400])
@pytest.mark.parametrize("aligned", [False, True])
def test_what_is_handed_to_the_kernel_is_in_the_cell_that_was_decided(
    size: int, aligned: bool, branches: Any
) -> None:
    """Every place beside every border, a rounding error off, as far as any kernel's own arithmetic puts it: above, undecided."""
    dtype = getattr(torch, branches.policy.compute)
    at = torch.arange(float(size), dtype=torch.float64)[1:-1]
    grid = (2.0 * at / (size - 1) - 1.0) if aligned else ((2.0 * at + 1.0) / size - 1.0)
    steps = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0], dtype=torch.float64)
    x = (grid.unsqueeze(1) + steps * EPS[dtype] / 2).reshape(-1).to(dtype)
    ramp = torch.arange(float(size), dtype=dtype).square().reshape(1, 1, 1, size)

    def sample(x: Tensor) -> Tensor:
        both = torch.stack((x, torch.zeros_like(x)), dim=-1).reshape(1, 1, -1, 2)
        return F.grid_sample(ramp, both, align_corners=aligned).reshape(-1)

    found = branches.record(sample, x)
    assert len(found.frame) == 0
    scale = (size - 1) / 2.0 if aligned else size / 2.0
    slope = ((2.0 * at + 1.0) * scale).repeat_interleave(len(steps))  # of a square between two whole numbers
    weights = torch.linspace(1, 2, x.numel(), dtype=torch.float64)
    torch.testing.assert_close(
        found.gradient.double() / weights, slope, rtol=1e-4 if dtype == torch.float32 else 1e-12, atol=0.0
    )
