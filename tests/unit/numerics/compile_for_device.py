"""Compiles every Triton kernel for a device that need not be there, and prints what must not be in it.

Run by test_triton_kernels.py in a process where triton compiles. The host code of the kernels runs on CPU tensors
with a launch that compiles only, so that argument types are the real ones. A line: `plain` or `fused` (with fused
multiply-adds allowed, as a control), the architecture, the kernel, and the instructions found, or `none`.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from tallystick.errors import Nondeterminism
from tallystick.numerics import rounding_triton
from tallystick.numerics.grid_table import SiteGrid
from tallystick.numerics.kernels import triton_launch
from tallystick.numerics.log import SparseEntries

UNWANTED = re.compile(
    r"\bfma\.\S+|\.ftz\b|\.approx\b|\b(?:add|sub|mul|div|sqrt|cvt)\.\S*f32\S*|\batom\.\S+|\bred\.\S+"
)
RULES = [
    (SiteGrid(0, -8, -3, True, [0]), torch.float32, torch.float32),
    (SiteGrid(0, -8, -3, True, [0] * 5), torch.float64, torch.float64),
    (SiteGrid(12, -20, -16, False, [0] * 1000), torch.float32, torch.float64),
    (SiteGrid(24, -47, -149), torch.float64, torch.float32),
]


class Device:
    """The part of a Triton driver that compiling asks for."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.target.arch

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def suppress_refusal() -> Iterator[None]:
    """The launch below reports one bad element, at position 1."""
    try:
        yield
    except Nondeterminism as error:
        assert "element 1 " in str(error)


def main() -> None:
    for capability in (80, 90):
        driver.set_active(Device(capability))
        for fused in (False, True):
            compile_all(capability, fused)


def compile_all(capability: int, fused: bool) -> None:
    def launch(kernel: Any, programs: int, *arguments: Any, **options: Any) -> None:
        made = kernel.warmup(*arguments, grid=(programs,), **options, enable_fp_fusion=fused)
        found = sorted(set(UNWANTED.findall(made.asm["ptx"]))) or ["none"]
        print("fused" if fused else "plain", capability, kernel.__name__, *found)
        for argument in arguments:
            if isinstance(argument, torch.Tensor):
                argument.fill_(1)  # one entry, and one bad element at position 1

    triton_launch._launch = launch
    for grid, dtype, target in RULES if not fused else RULES[:1]:
        x, out = torch.zeros(5000, dtype=dtype), torch.zeros(5000, dtype=target)
        old = None if grid.scales.size else torch.zeros(5000, dtype=target)
        entries = SparseEntries(5000, 1, np.array([3]), np.array([1]))
        common = {"out": out, "old": old, "name": "w"}
        with suppress_refusal():
            rounding_triton.record_triton(x, grid, key=(1, 2), **common)
        with suppress_refusal():
            rounding_triton.follow_triton(x, grid, entries, key=(1, 2**32 - 1), **common)
    triton_launch.philox_words((1, 2), 0, 7, torch.device("cpu"))
    triton_launch.fingerprint(torch.zeros(5000), 5 << 40)
    triton_launch.block_square_sums(torch.zeros(5000), 5)


if __name__ == "__main__":
    main()
