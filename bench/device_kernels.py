"""Time of rounding a site on a CUDA device: Triton kernels and tensor operations, beside a copy of the same memory.

    python bench/device_kernels.py [--elements N] [--rounds N]

A row: grid, dtype, what was done, milliseconds (median), ns per element, GB/s of the memory that a perfect kernel
moves (values read, old values read, results written), and that as a share of the device's copy rate measured in
the same run. Transfers of the entries and the host's wait for them are in the time. Exit code 3: no device.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from functools import partial

import torch

from tallystick.numerics import rounding_tensors, rounding_triton
from tallystick.numerics.grid_table import SiteGrid

KEY = (1, 2)
GRIDS = {
    "gradient, fp32": (SiteGrid(0, -16, -5, True, [0]), torch.float32, torch.float32),
    "gradient rows, fp32": (SiteGrid(0, -16, -5, True, [0] * 1024), torch.float32, torch.float32),
    "gradient, fp64": (SiteGrid(24, -44, -21, False, [0]), torch.float64, torch.float64),
    "state": (SiteGrid(24, -47, -149), torch.float64, torch.float32),
}


def seconds(act: Callable[[], object], rounds: int) -> float:
    """Median seconds of ``act``, the device idle before and after; three more rounds go first, unmeasured."""
    taken: list[float] = []
    for _ in range(rounds + 3):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        first.record()
        act()
        last.record()
        torch.cuda.synchronize()
        taken.append(first.elapsed_time(last) / 1e3)
    return statistics.median(taken[3:])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--elements", type=int, default=1 << 25, help="a multiple of 1024 (default 2**25)")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("device_kernels: torch sees no CUDA device; nothing was measured", file=sys.stderr)
        return 3
    n, device = options.elements, torch.device("cuda")
    if n % 1024 or n <= 0:
        parser.error(f"--elements {n}: not a positive multiple of 1024")
    if not rounding_triton.has_triton(device):
        print("device_kernels: triton is not installed, or this is not CUDA", file=sys.stderr)
        return 3
    a, b = (torch.empty(n, dtype=torch.float64, device=device) for _ in range(2))
    copied = 16 * n / seconds(lambda: b.copy_(a), options.rounds)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; copy {copied / 1e9:.0f} GB/s")
    print(
        f"{'site':20} {'path':8} {'act':8} {'ms':>9} {'ns/el':>8} {'GB/s':>7} {'of copy':>8} {'entries':>8}"
    )
    for name, (grid, source, target) in GRIDS.items():
        x = torch.randn(n, device=device, dtype=source)
        out = torch.empty(n, device=device, dtype=target)
        old = None if grid.scales.size else (x * (1 + 2.0**-12)).to(target)
        moved = n * (x.element_size() + out.element_size() + (0 if old is None else old.element_size()))
        paths = {
            "triton": (rounding_triton.record_triton, rounding_triton.follow_triton),
            "tensor": (rounding_tensors.record_tensor, rounding_tensors.follow_tensor),
        }
        logs = []
        for path, (record, follow) in paths.items():
            log = record(x, grid, out=out, old=old, key=KEY, name="site")
            logs.append((log, out.clone()))
            common = {"out": out, "old": old, "key": KEY, "name": "site"}
            acts = {
                "record": partial(record, x, grid, **common),
                "follow": partial(follow, x, grid, log, **common),
            }
            for act, run in acts.items():
                taken = seconds(run, options.rounds)
                rate = moved / taken
                print(
                    f"{name:20} {path:8} {act:8} {taken * 1e3:9.3f} {taken / n * 1e9:8.3f} {rate / 1e9:7.0f}"
                    f" {rate / copied:8.1%} {len(log):8}"
                )
        if logs[0][0] != logs[1][0] or not torch.equal(logs[0][1], logs[1][1]):
            print(f"device_kernels: {name}: the two paths differ", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
