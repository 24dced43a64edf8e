"""Deviations of repeated passes from a plain one, site by site."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tallystick.errors import Nondeterminism
from tallystick.execution.noise.measured import LEAST_TENSOR, MOSTLY, SiteNoise
from tallystick.execution.noise.safety import safety_for
from tallystick.execution.rounding.grids import (
    UNSEEN,
    blocks_for,
    is_noise_only,
    scale_exponents,
    settled_scales,
)
from tallystick.execution.session.session import Session
from tallystick.execution.session.sites import Site
from tallystick.numerics.log import Kind
from tallystick.numerics.tensor_measures import block_differences, block_rms


class Deviations:
    """Deviations so far, against the plain repetition whose gradients are ``first``."""

    def __init__(self, session: Session, first: list[Tensor | None]) -> None:
        self.session = session
        self.first = first
        self.noise: dict[Site, SiteNoise] = {}
        self.sizes: list[float] = []
        policy = session.policy
        for ordinal, gradient in enumerate(first):
            if gradient is None or gradient.numel() == 0:
                continue
            name = session.parameters[ordinal][0]
            place = (Kind.GRADIENT, ordinal)
            previous = session.table.sites.get(place) if session.step else None
            blocks = previous.scales.size if previous is not None else blocks_for(gradient, policy.row_scales)
            rms = block_rms(gradient, blocks)
            if not np.isfinite(rms).all():
                raise Nondeterminism(
                    f"gradient of {name} is not finite at step {session.step}; there is no noise to measure"
                )
            if not rms.any():
                scales = np.full(blocks, UNSEEN) if previous is None else previous.scales.astype(np.int64)
            elif previous is None or is_noise_only(previous):
                scales = settled_scales(None, rms, policy.row_scales)
            else:
                scales = settled_scales(previous.scales.astype(np.int64), rms, policy.row_scales)
            whole = float(np.sqrt(np.mean(np.square(rms))))
            self.noise[place] = SiteNoise(
                0.0, scales, whole, 0.0, gradient.numel(), rms, np.zeros(blocks), np.zeros(blocks), dims=gradient.dim()
            )  # fmt: skip

    def forget_means(self) -> None:
        """Forget how large deviations were on average; how large the largest were stays."""
        for noise in self.noise.values():
            noise.block_mean = np.zeros_like(noise.block_mean)

    def compare(self, again: list[Tensor | None]) -> None:
        """Take note of another repetition's gradients, and how large all their deviations together are, by what they weigh.

        Those of a float32 step in float64 say how large gradients are but for all noise.
        """
        self.sizes.append(0.0)
        for ordinal, (x, y) in enumerate(zip(self.first, again, strict=True)):
            noise = self.noise.get((Kind.GRADIENT, ordinal))
            if noise is None or x is None or y is None:
                continue
            largest, mean = block_differences(x, y, noise.scales.size)
            if x.dtype == torch.float32 and y.dtype == torch.float64:
                noise.exact = float(block_rms(y, 1)[0])
            if noise.rms > noise.largest:
                weights = np.exp2(noise.scales.astype(np.float64))
                self.sizes[-1] += float(mean @ weights) * noise.elements / weights.size
            self._raise((Kind.GRADIENT, ordinal), largest, mean)
            if x.numel() < LEAST_TENSOR:
                plain, other = (each.detach().reshape(-1).double() for each in (x, y))
                apart = (plain - other).abs()
                is_noise = ((apart > 0.0) & (plain.abs() <= MOSTLY * apart)).cpu().numpy()
                noise.noisy = is_noise | noise.noisy if noise.noisy.size else is_noise

    def compare_outputs(self, again: list[Tensor | None], *, whole: bool) -> None:
        """Take note of what the numbers of a loss do to gradients: bands need be no wider, so it counts as less noise."""
        for ordinal, (x, y) in enumerate(zip(self.first, again, strict=True)):
            noise = self.noise.get((Kind.GRADIENT, ordinal))
            if noise is None or x is None or y is None:
                continue
            largest, _ = block_differences(x, y, noise.scales.size)
            share = 1.0 if whole else 2.0 ** -safety_for(self.session.policy, noise)
            self._raise((Kind.GRADIENT, ordinal), share * largest, np.zeros_like(largest))

    def compare_buffers(self, plain: dict[str, Tensor], again: dict[str, Tensor]) -> None:
        """Take note of another repetition's floating buffers."""
        ordinals = {site.name: site.ordinal for site in self.session.sites if site.kind == Kind.BUFFER}
        for name, x in plain.items():
            y = again.get(name)
            if y is None or x.numel() == 0 or not x.is_floating_point():
                continue
            self._scalar_site((Kind.BUFFER, ordinals[name]), x, y)

    def compare_loss(self, x: float, y: float) -> None:
        """Take note of another repetition's loss."""
        self._scalar_site(
            (Kind.LOSS, 0), torch.tensor([x], dtype=torch.float64), torch.tensor([y], dtype=torch.float64)
        )

    def _scalar_site(self, place: Site, x: Tensor, y: Tensor) -> None:
        if place not in self.noise:
            rms = block_rms(x.contiguous(), 1)
            scales = scale_exponents(rms) if rms.any() else np.zeros(1, dtype=np.int64)
            cancels = bool(x.min() < 0.0) and bool(x.max() > 0.0)
            self.noise[place] = SiteNoise(0.0, scales, float(rms[0]), 0.0, x.numel(), cancels=cancels)
        self._raise(place, *block_differences(x.contiguous(), y.contiguous(), 1))

    def _raise(self, place: Site, largest: np.ndarray, mean: np.ndarray) -> None:
        noise = self.noise[place]
        if not np.isfinite(largest).all():
            raise Nondeterminism(
                f"{self.session.site_name(place)}: is not finite when the step is repeated; there is no noise to measure"
            )
        with np.errstate(over="ignore"):
            relative = largest * np.exp2(-noise.scales.astype(np.float64))
        noise.relative = max(noise.relative, float(np.max(relative)))
        noise.largest = max(noise.largest, float(largest.max()))
        noise.block_mean = np.maximum(noise.block_mean, mean)
        if noise.block_largest is not None:
            noise.block_largest = np.maximum(noise.block_largest, largest)
