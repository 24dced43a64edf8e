"""CPU tests repeated on a CUDA device; skipped, saying so, where torch sees none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tallystick.execution.dispatch.jitter import Jitter
from tallystick.execution.job import find_source
from tallystick.numerics.grid_table import SiteGrid
from tallystick.numerics.optimizers import SgdNumbers, adam_numbers, adam_step, sgd_step
from tallystick.numerics.policy import find_policy
from tallystick.numerics.random import words
from tallystick.numerics.rounding import round_followed, round_recorded
from tallystick.numerics.rounding_tensors import philox_words
from tallystick.numerics.tensor_measures import fingerprint
from tallystick.roles.auditor import audit
from tallystick.roles.trainer import Order, record
from tallystick.store.files import RunDirectory

pytestmark = pytest.mark.gpu

GRIDS = [
    SiteGrid(0, -16, -5, True, [0, 1, -2, 3]),
    SiteGrid(24, -44, -21, False, [0]),
    SiteGrid(14, -20, -16, False, [1]),
]


@pytest.mark.parametrize("job", ["digits", "text"])
@pytest.mark.parametrize("policy", ["fp64", "fp32"])
@pytest.mark.parametrize(("trainer", "auditor"), [("cpu", "cuda"), ("cuda", "cpu")])
def test_a_run_recorded_on_one_device_matches_on_the_other(
    job: str, policy: str, trainer: str, auditor: str, tmp_path: Path
) -> None:
    run = RunDirectory(tmp_path / "run")
    order = Order(find_source(job), {}, find_policy(policy), steps=100, device=trainer)

    record(order, run)
    report = audit(run, order.source, device=auditor)

    assert report.verdict == "match", str(report.first)
    assert report.differing_elements == 0


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_tensor_path_on_the_device_equals_the_cpu_kernel(grid: SiteGrid, dtype: torch.dtype) -> None:
    x = torch.randn(4096, generator=torch.Generator().manual_seed(1), dtype=dtype)
    here, there = (
        torch.empty_like(x, dtype=torch.float64),
        torch.empty(4096, dtype=torch.float64, device="cuda"),
    )

    entries = round_recorded(x, grid, out=here, key=(3, 4))
    on_device = round_recorded(x.cuda(), grid, out=there, key=(3, 4))
    followed = round_followed(x.cuda(), grid, entries, out=there, key=(3, 4))

    assert entries == on_device
    assert torch.equal(here, there.cpu())
    assert followed.violations == 0
    assert fingerprint(x, 2) == fingerprint(x.cuda(), 2)


def test_philox_on_the_device_draws_the_same_words() -> None:
    drawn = philox_words((5, 6), 2**33, 1000, torch.device("cuda")).cpu().numpy()

    assert (drawn == words((5, 6), 4 * 2**33, 4000)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_portable_optimizers_on_the_device_equal_the_cpu_kernel(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(6)
    drawn = [torch.randn(100_003, generator=generator) * 2.0 ** (4 * k - 8) for k in range(4)]
    here = [drawn[0].to(dtype), drawn[1].to(dtype), drawn[2], drawn[3].abs()]
    there = [tensor.cuda() for tensor in here]
    for step in (1, 2, 1000):
        numbers = adam_numbers(step, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, decoupled=True)
        for p, g, m, v in (here, there):
            adam_step(p, g, m, v, numbers, name="weight")
    nesterov = SgdNumbers(0.1, 1e-3, 0.9, 1.0, True)
    for p, g, b, _ in (here, there):
        sgd_step(p, g, b, nesterov, first=False, name="weight")
        sgd_step(p, g, None, nesterov, first=False, name="weight")

    for a, b in zip(here, there, strict=True):
        assert a.numpy().tobytes() == b.cpu().numpy().tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_jitter_on_the_device_moves_what_it_moves_on_the_cpu(dtype: torch.dtype) -> None:
    x = torch.randn(70, 1001, generator=torch.Generator().manual_seed(8)).to(dtype)
    here, there = Jitter(11), Jitter(11)

    for _ in range(2):
        moved = here.around(torch.ops.aten.tanh.default, (x,), {}, lambda *_: x.clone())
        on_device = there.around(torch.ops.aten.tanh.default, (x.cuda(),), {}, lambda *_: x.cuda())

        assert not torch.equal(moved, x)
        assert torch.equal(moved, on_device.cpu())
