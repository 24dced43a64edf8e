"""The Triton kernels compiled and run: the same bits as the CPU kernels and as the tensor operations on the device."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import math

import pytest
import torch

from tallystick.errors import Nondeterminism
from tallystick.numerics import (
    random,
    reference,
    rounding,
    rounding_tensors,
    rounding_triton,
    tensor_measures,
)
from tallystick.numerics.grid_table import SiteGrid
from tallystick.numerics.log import SparseEntries
from tallystick.numerics.reference import ScaledBand

pytestmark = pytest.mark.gpu

KEY = (3, 0xFFFFFFFC)
N = 3 * 5 * 7 * 11 * 1021  # no multiple of a tile
GRIDS = {
    "dithered": SiteGrid(0, -16, -5, True, [0]),
    "dithered-rows": SiteGrid(0, -12, -4, True, [i % 5 - 2 for i in range(3 * 5 * 7 * 11)]),
    "dithered-short-rows": SiteGrid(0, -12, -4, True, [i % 5 - 2 for i in range(N // 11)]),
    "fp32": SiteGrid(24, -44, -21, False, [0]),
    "12-bits": SiteGrid(12, -20, -16, False, [i % 3 for i in range(15)]),
    "dense": SiteGrid(0, -5, 0, False, [0]),
    "relative": SiteGrid(24, -28, -149),
    "relative-12-bits": SiteGrid(12, -16, -149),
}
FORMS = {  # dtypes of the values, of the old ones, of the result
    "float32": (torch.float32, torch.float32, torch.float32),
    "float64": (torch.float64, torch.float64, torch.float64),
    "state": (torch.float64, torch.float32, torch.float32),
}


@pytest.fixture(autouse=True)
def needs_triton() -> None:
    if not rounding_triton.has_triton(torch.device("cuda")):
        pytest.skip("triton is not installed, or this is not CUDA: the tensor operations run instead")


def values(n: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Normal numbers of many sizes, some subnormal FP32, powers of two, zeros of both signs."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=generator, dtype=torch.float64)
    x *= torch.exp2(-torch.randint(0, 12, (n,), generator=generator, dtype=torch.float64))
    x[::97] *= 2.0**-140
    x[::89] = torch.exp2(torch.floor(torch.log2(x[::89].abs() + 1e-30)))
    x[::101], x[::103] = 0.0, -0.0
    return x.to(dtype)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", GRIDS)
def test_recording_and_following_on_the_device_give_the_bits_of_the_cpu(name: str, form: str) -> None:
    grid, (source, kept, target) = GRIDS[name], FORMS[form]
    x = values(N, 1, source)
    old = None if grid.scales.size else values(N, 2, kept)
    y = (x.double() * (1.0 + 2.0**-27) + 2.0**-20 * (grid.scales.size > 0)).to(source)
    there = [None if t is None else t.cuda() for t in (x, y, old)]
    x_there, y_there, old_there = there
    assert x_there is not None
    assert y_there is not None
    expected, out = torch.empty(N, dtype=target), torch.empty(N, dtype=target, device="cuda")

    log = rounding.round_recorded(x, grid, out=expected, old=old, key=KEY)
    found = rounding.round_recorded(x_there, grid, out=out, old=old_there, key=KEY)
    assert found == log
    assert out.cpu().numpy().tobytes() == expected.numpy().tobytes()
    by_tensor = torch.empty_like(out)
    args = {"out": by_tensor, "old": old_there, "key": KEY, "name": "w"}
    assert rounding_tensors.record_tensor(x_there, grid, **args) == log
    assert torch.equal(by_tensor, out)

    here = rounding.round_followed(y, grid, log, out=expected, old=old, key=KEY)
    on_device = rounding.round_followed(y_there, grid, log, out=out, old=old_there, key=KEY)
    assert out.cpu().numpy().tobytes() == expected.numpy().tobytes()
    counts = (here.violation, here.violations, here.near)
    assert (on_device.violation, on_device.violations, on_device.near) == counts
    assert on_device.steer == pytest.approx(here.steer, rel=1e-12)
    assert on_device.energy == pytest.approx(here.energy, rel=1e-12)
    if target == source:
        rounding.round_recorded(x_there, grid, out=x_there, old=old_there, key=KEY)
        assert torch.equal(x_there, by_tensor)


def test_the_cases_above_log_something_and_a_follower_without_the_log_differs() -> None:
    """A control: most grids have entries, and without them the device's own rounding is not the recorder's."""
    grid = GRIDS["dithered-rows"]
    x = values(N, 1, torch.float64)
    y = (x + 2.0**-20).cuda()
    expected, out = torch.empty_like(x), torch.empty_like(y)
    log = rounding.round_recorded(x, grid, out=expected, key=KEY)
    rounding.round_followed(y, grid, SparseEntries.none(N, 1), out=out, key=KEY)
    assert len(log) > 100
    assert not torch.equal(out.cpu(), expected)
    rounding.round_followed(y, grid, log, out=out, key=KEY)
    assert torch.equal(out.cpu(), expected)


def test_twenty_runs_give_one_log() -> None:
    x = values(N, 3, torch.float32).cuda()
    grid, out = GRIDS["dithered"], torch.empty_like(x)
    logs = [rounding.round_recorded(x, grid, out=out, key=KEY) for _ in range(20)]
    assert all(log == logs[0] for log in logs)
    energies = {rounding.round_followed(x, grid, logs[0], out=out, key=KEY).energy for _ in range(20)}
    assert len(energies) == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3.5e38])
@pytest.mark.parametrize("at", [0, 1023, 1024, N - 1])
def test_what_has_no_place_is_refused_by_index(bad: float, at: int) -> None:
    x = values(N, 4, torch.float64)
    x[at] = bad
    x[-1] = bad
    for site in (x, x.cuda()):
        with pytest.raises(Nondeterminism, match=f"^w: element {at} is not finite or does not fit float32"):
            rounding.round_recorded(site, GRIDS["12-bits"], out=torch.empty_like(site), key=KEY, name="w")


def test_a_site_beyond_two_to_the_31_elements_is_counted_right() -> None:
    """Zeros but for three places; the log's positions and the dither there are those of the whole site."""
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("less than 24 GiB of device memory are free")
    n, places = 2**31 + 5001, (12_345, 2**31 - 1000, 2**31 + 2001)
    grid, band = SiteGrid(0, -12, -3, True, [0]), ScaledBand(-12, -3, (0,))
    x = torch.zeros(n, dtype=torch.float32, device="cuda")
    parts = {place: values(3000, place, torch.float32) for place in places}
    for place, part in parts.items():
        x[place : place + 3000] = part.cuda()
    log = rounding.round_recorded(x, grid, out=x, key=KEY)
    for place, part in parts.items():
        expected, entries = reference.record(part.tolist(), 0, band, random.words(KEY, place, 3000).tolist())
        assert x[place : place + 3000].cpu().tolist() == expected
        inside = (log.indexes >= place) & (log.indexes < place + 3000)
        assert log.indexes[inside].tolist() == [place + entry.index for entry in entries]
        assert log.symbols[inside].tolist() == [entry.side for entry in entries]


def test_words_fingerprints_and_sums_are_those_of_the_cpu() -> None:
    device = torch.device("cuda")
    drawn = rounding_tensors.philox_words(KEY, 2**33, 1000, device).cpu().numpy()
    assert (drawn == random.words(KEY, 4 * 2**33, 4000)).all()
    x = values(N, 6, torch.float32)
    assert tensor_measures.fingerprint(x.cuda(), 9) == tensor_measures.fingerprint(x, 9)
    for blocks in (1, 15, N // 11, N):
        expected = tensor_measures.block_rms(x, blocks).tolist()
        assert tensor_measures.block_rms(x.cuda(), blocks).tolist() == pytest.approx(expected, rel=1e-12)
