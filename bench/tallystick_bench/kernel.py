"""Throughput of the CPU kernels, beside copying and beside torch's own optimizers, in one process and taking turns.

Returns plain numbers; ``bench`` judges them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tallystick.numerics.grid_table import SiteGrid
from tallystick.numerics.optimizers import SgdNumbers, adam_numbers, adam_step, sgd_step
from tallystick.numerics.rounding import round_recorded, round_recorded_residues
from tallystick.numerics.tensor_measures import block_rms, fingerprint

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.float32}
GRIDS = {  # as calibration typically chooses them, at a scale of 2**-9
    "fp64": SiteGrid(24, -44, -21, False, [-9]),
    "fp32": SiteGrid(0, -18, -5, True, [-9]),
    "bf16": SiteGrid(0, -4, -3, True, [-9], residue_bits=1),
}


def kernel(policy: str, elements: int, rounds: int) -> dict[str, Any]:
    """Return the median seconds of each pass over ``elements`` numbers of the policy's dtype, and the bytes it moves.

    Bytes are those that must be read and written once; all passes take turns, ``rounds`` times after one that is
    thrown away. ``copies`` is the median, over the turns, of the time of copying in that turn over a pass's own: other work on
    the machine slows both. The optimizers are AdamW and SGD with momentum and weight decay.
    """
    dtype, grid = DTYPES[policy], GRIDS[policy]
    generator = torch.Generator().manual_seed(1)
    gradient = torch.randn(elements, generator=generator).mul_(2.0**-9).to(dtype)
    out = torch.empty_like(gradient)
    rounded = torch.empty_like(gradient)

    def rounding(into: Tensor) -> object:
        record = round_recorded_residues if grid.residue_bits else round_recorded
        return record(gradient, grid, out=into, key=(1, 2))

    rounding(rounded)
    parameter = torch.randn(elements, generator=generator).to(dtype)
    first, second = torch.zeros(elements), torch.zeros(elements)
    numbers = adam_numbers(3, lr=1e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, decoupled=True)
    heavy = SgdNumbers(1e-4, 5e-4, 0.9, 1.0, False)
    wide = gradient.element_size()
    passes: dict[str, tuple[Callable[[], Any], int]] = {
        "scale": (lambda: block_rms(gradient, 1), wide),
        "copy": (lambda: out.copy_(gradient), 2 * wide),
        "round": (lambda: rounding(out), 2 * wide),
        "fingerprint": (lambda: fingerprint(parameter, 1), wide),
        "adamw": (
            lambda: adam_step(parameter, rounded, first, second, numbers, name="weight"),
            3 * wide + 16,
        ),
        "sgd": (lambda: sgd_step(parameter, rounded, first, heavy, first=False, name="weight"), 3 * wide + 8),
        "torch adamw": (_torch_step(parameter, rounded, "adamw"), 7 * wide),
        "torch sgd": (_torch_step(parameter, rounded, "sgd"), 5 * wide),
    }
    seconds: dict[str, list[float]] = {name: [] for name in passes}
    for turn in range(rounds + 1):
        for name, (run, _) in passes.items():
            started = time.perf_counter()
            run()
            if turn:
                seconds[name].append(time.perf_counter() - started)
    return {
        "seconds": {name: statistics.median(each) for name, each in seconds.items()},
        "copies": {
            name: statistics.median(c / own for c, own in zip(seconds["copy"], each, strict=True))
            for name, each in seconds.items()
        },
        "bytes": {name: elements * size for name, (_, size) in passes.items()},
        "elements": elements,
        "threads": torch.get_num_threads(),
        "rounds": rounds,
    }


def _torch_step(parameter: Tensor, gradient: Tensor, kind: str) -> Callable[[], object]:
    """Return a step of torch's own foreach optimizer in the policy's precision, on tensors of its own."""
    weight = nn.Parameter(parameter.clone())
    weight.grad = gradient
    if kind == "adamw":
        return torch.optim.AdamW([weight], lr=1e-4, foreach=True).step
    return torch.optim.SGD([weight], lr=1e-4, momentum=0.9, weight_decay=5e-4, foreach=True).step
