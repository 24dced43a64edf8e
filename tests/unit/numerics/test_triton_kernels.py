"""What only the Triton kernels have: tiles, pieces, positions beyond 2**31, what leaves a device, what is compiled.

The rounding rule itself is tested in test_kernels.py, on one body with the other forms. Here the kernels are
interpreted; that they compile for a device, and to what, is asked of the compiler, without a device.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from tallystick.errors import InvalidInput, Nondeterminism
from tallystick.numerics import random, reference, rounding, rounding_triton, tensor_measures
from tallystick.numerics.grid_table import SiteGrid
from tallystick.numerics.log import SparseEntries
from tallystick.numerics.reference import LoggedElement, ScaledBand

pytest.importorskip(
    "triton", reason="triton is not installed: its kernels are neither interpreted nor compiled"
)
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("TRITON_INTERPRET is not 1: here triton compiles, see tests/gpu", allow_module_level=True)

from tallystick.numerics.kernels import triton_launch

KEY = (7, 0xFFFFFFF9)
COMPILE = Path(__file__).with_name("compile_for_device.py")


def draws(n: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = np.random.Generator(np.random.PCG64(seed))
    return torch.from_numpy(generator.normal(size=n)).to(dtype)


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    def set_sizes(tile: int, tiles_a_piece: int) -> None:
        monkeypatch.setattr(triton_launch, "TILE", tile)
        monkeypatch.setattr(triton_launch, "PIECE", tile * tiles_a_piece)

    return set_sizes


# ------------------------------------------------------------------------------------------ tiles and pieces


@pytest.mark.parametrize("n", [1, 15, 16, 17, 63, 64, 65, 200])
@pytest.mark.parametrize(("tile", "per_piece"), [(16, 1), (16, 5), (64, 1), (256, 1)])
def test_neither_tiles_nor_pieces_show_in_what_comes_out(
    n: int, tile: int, per_piece: int, tiles: Callable[[int, int], None]
) -> None:
    grid = SiteGrid(0, -6, -3, True, [0])
    x = draws(n, n)
    y = x + 2.0**-7
    expected, out = torch.empty_like(x), torch.empty_like(x)
    log = rounding.record_cpu(x, grid, out=expected, old=None, key=KEY, name="w")
    tiles(tile, per_piece)

    assert rounding_triton.record_triton(x, grid, out=out, old=None, key=KEY, name="w") == log
    assert torch.equal(out, expected)
    found = rounding_triton.follow_triton(y, grid, log, out=out, old=None, key=KEY, name="w")
    assert torch.equal(out, expected)
    assert found == rounding.follow_cpu(y, grid, log, out=expected, old=None, key=KEY, name="w")


def test_without_the_log_the_follower_of_the_test_before_differs() -> None:
    grid = SiteGrid(0, -6, -3, True, [0])
    x = draws(200, 200)
    here, there = torch.empty_like(x), torch.empty_like(x)
    log = rounding_triton.record_triton(x, grid, out=here, old=None, key=KEY, name="w")
    rounding_triton.follow_triton(
        x + 2.0**-7, grid, SparseEntries.none(200, 1), out=there, old=None, key=KEY, name="w"
    )
    assert len(log) > 10
    assert int((here != there).sum()) > 3


@pytest.mark.parametrize(
    "logged", [[0], [15, 16], [31, 32, 33], list(range(100)), list(range(0, 100, 16)), []]
)
def test_every_entry_reaches_its_own_element(logged: list[int], tiles: Callable[[int, int], None]) -> None:
    """Entries at both ends of a mask's word, a tile and a piece; several programs mark them."""
    tiles(16, 2)
    n, grid = 100, SiteGrid(0, -6, 0, False, [0])
    x = torch.full((n,), reference.T_FIXED - 2.0**-7, dtype=torch.float64)
    sides = np.array([i % 2 for i in range(len(logged))], dtype=np.int64)
    entries = SparseEntries(n, 1, np.array(logged, dtype=np.int64), sides)

    found = rounding_triton.follow_triton(x, grid, entries, out=x, old=None, key=KEY, name="w")

    up = {i for i, side in zip(logged, sides, strict=True) if side}
    assert x.tolist() == [float(i in up) for i in range(n)]
    assert (found.violations, found.near) == (0, n)


@pytest.mark.parametrize("form", ["apart", "over the values", "over the old ones"])
def test_the_result_may_lie_over_what_it_is_made_of(form: str, tiles: Callable[[int, int], None]) -> None:
    tiles(16, 2)
    grid = SiteGrid(12, -20, -149)
    x, old = draws(50, 1, torch.float32), draws(50, 2, torch.float32)
    expected = torch.empty_like(x)
    log = rounding.record_cpu(x, grid, out=expected, old=old, key=KEY, name="w")
    for follow in (False, True):
        a, b = x.clone(), old.clone()
        out = {"apart": torch.empty_like(a), "over the values": a, "over the old ones": b}[form]
        if follow:
            rounding_triton.follow_triton(a, grid, log, out=out, old=b, key=KEY, name="w")
        else:
            assert rounding_triton.record_triton(a, grid, out=out, old=b, key=KEY, name="w") == log
        assert torch.equal(out, expected)


def test_a_multiple_is_narrowed_to_fp32_with_ties_to_even() -> None:
    """An absolute grid of unit quanta holds integers beyond 2**24, of which FP32 holds not all."""
    wide = (
        [2.0**24 + k for k in range(8)] + [2.0**25 + k for k in range(8)] + [2.0**53 - 1, 2.0**52 + 2.0**28]
    )
    x = torch.tensor(wide + [-value for value in wide], dtype=torch.float64)
    out = torch.empty(x.numel())
    rounding_triton.record_triton(x, SiteGrid(0, -8, 0, False, [0]), out=out, old=None, key=KEY, name="w")
    assert torch.equal(out, x.float())
    assert not torch.equal(out.double(), x)


def test_every_kind_of_fp32_is_widened_and_narrowed_to_itself() -> None:
    """FP32 itself as the grid: subnormals, both ends of every binade, the largest value, both zeros."""
    bits = [e << 23 | m for e in range(255) for m in (0, 1, 0x400000, 0x7FFFFF)]
    bits += [1 << k for k in range(23)] + [(1 << k) - 1 for k in range(1, 23)]
    x = torch.tensor(bits + [b - (1 << 31) for b in bits], dtype=torch.int32).view(torch.float32)
    out = torch.empty_like(x)
    entries = rounding_triton.record_triton(
        x, SiteGrid(24, -300, -149, False, [0]), out=out, old=None, key=KEY, name="w"
    )
    assert len(entries) == 0
    assert torch.equal(out.view(torch.int32), (x + 0.0).view(torch.int32))


# ------------------------------------------------------------------------------------- positions beyond 2**31

FAR = (2**31 - 64, 2**32 - 32, 2**34 - 64, 2**40 + 128)


@pytest.mark.parametrize("dithered", [False, True])
@pytest.mark.parametrize(
    ("origin", "tile", "rows"),
    [
        *((origin, 32, 0) for origin in FAR),
        *((origin, 32, 2**31 - 3) for origin in FAR),
        (2**31 - 1024, 1024, 1000),
        (2**34 - 1024, 1024, 1000),
    ],
)
def test_positions_beyond_two_to_the_31_are_those_of_the_reference(
    origin: int, tile: int, rows: int, dithered: bool, tiles: Callable[[int, int], None]
) -> None:
    """A piece of a site too large to hold: only its origin is large. Blocks begin and end within most pieces."""
    tiles(tile, 1000)
    n = tile * 2 + 3
    blocks = (origin + n) // rows + 1 if rows else 1
    scales = torch.arange(blocks, dtype=torch.int32) % 3 - 1
    numel = blocks * (rows or origin + n)
    grid = triton_launch.KernelGrid(0, -6, -3, dithered, scales, sys.float_info.max, KEY)
    x, out = draws(n, origin % 1000), torch.empty(n, dtype=torch.float64)

    packed, count, bad = triton_launch._record_piece(piece_of(x, out, origin, numel), grid, n)

    words = random.words(KEY, origin, n).tolist() if dithered else None
    each = tuple(int(scales[reference.block_of(origin + i, numel, blocks)]) for i in range(n))
    values, entries = reference.record(x.tolist(), 0, ScaledBand(-6, -3, each), words)
    assert out.tolist() == values
    assert bad == triton_launch.NOWHERE.value
    assert packed.tolist() == [2 * (origin + e.index) + e.side for e in entries]
    assert count == len(entries) > 5

    y = x + 2.0**-7
    unlogged = next(i for i in range(n) if i not in {e.index for e in entries})
    stated = sorted([*entries, LoggedElement(unlogged, 0)], key=lambda e: e.index)
    used = np.array([2 * (origin + e.index) + e.side for e in stated])
    head = triton_launch._follow_piece(piece_of(y, out, origin, numel), grid, used)
    values, violations = reference.follow(y.tolist(), stated, 0, ScaledBand(-6, -3, each), words)
    assert out.tolist() == values
    assert int(head[1]) == len(violations)
    assert int(head[2]) == (origin + violations[0] if violations else triton_launch.NOWHERE.value)

    x[35], y[36] = math.nan, math.inf
    assert triton_launch._record_piece(piece_of(x, out, origin, numel), grid, n)[2] == origin + 35
    assert triton_launch._follow_piece(piece_of(y, out, origin, numel), grid, used)[3] == origin + 36


def piece_of(x: torch.Tensor, out: torch.Tensor, origin: int, numel: int) -> triton_launch._Piece:
    return triton_launch._Piece(origin, numel, *map(triton_launch._bits, (x, out, x)))


@pytest.mark.parametrize("first", [0, 2**29 - 5, 2**32 - 3, 2**40])
@pytest.mark.parametrize("blocks", [0, 1, 5, 9])
def test_the_words_of_a_stream_are_those_of_the_cipher(
    first: int, blocks: int, tiles: Callable[[int, int], None]
) -> None:
    tiles(16, 1)
    drawn = triton_launch.philox_words(KEY, first, blocks, torch.device("cpu"))
    assert drawn.dtype == torch.int64
    assert drawn.tolist() == random.words(KEY, 4 * first, 4 * blocks).tolist()


@pytest.mark.parametrize("n", [0, 1, 16, 77])
@pytest.mark.parametrize("ordinal", [0, 3, 2**22, 2**24 - 1])
def test_fingerprints_are_those_of_the_tensor_operations(
    n: int, ordinal: int, tiles: Callable[[int, int], None]
) -> None:
    """The last ordinals' positions lie beyond 2**63, and beyond 2**64 less one tensor."""
    tiles(16, 1)
    x = draws(n, n, torch.float32)
    x[: n // 3] = -0.0
    bits = x.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    golden = reference.GOLDEN
    expected = sum(
        (b + 1) * (((ordinal << 40) + i) * golden % 2**64 | 1) for i, b in enumerate(bits.tolist())
    )
    assert triton_launch.fingerprint(x, ordinal << 40) == expected % 2**64


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("blocks", "rows"), [(1, 1), (1, 1000), (7, 13), (30, 1), (3, 64), (2, 0)])
def test_the_rms_of_a_block_is_that_of_the_cpu(
    dtype: torch.dtype,
    blocks: int,
    rows: int,
    tiles: Callable[[int, int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tiles(32, 1)
    x = draws(blocks * rows, rows, dtype) * 2.0**40
    monkeypatch.setattr(tensor_measures, "has_triton", lambda *_: False)
    expected = tensor_measures.block_rms(x, blocks)
    assert tensor_measures.block_rms_triton(x, blocks).tolist() == pytest.approx(expected.tolist(), rel=1e-14)


# ------------------------------------------------------------------------------ what leaves, what is refused


class Fetches(TorchFunctionMode):
    """Sizes of the tensors that the host asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in {"cpu", "tolist", "item", "numpy", "to", "__bool__"}:
            self.sizes.append(args[0].numel())
        return func(*args, **(kwargs or {}))


def test_only_entries_and_a_few_sums_leave_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = SiteGrid(0, -8, -3, False, [0])
    x = draws(3000, 5)
    out = torch.empty_like(x)
    launch = triton_launch._launch

    def unseen(*args: Any, **options: Any) -> None:
        with torch._C.DisableTorchFunction():
            launch(*args, **options)

    monkeypatch.setattr(triton_launch, "_launch", unseen)
    with Fetches() as fetched:
        log = rounding_triton.record_triton(x, grid, out=out, old=None, key=KEY, name="w")
        rounding_triton.follow_triton(x, grid, log, out=out, old=None, key=KEY, name="w")

    assert 0 < len(log) < 300
    assert set(fetched.sizes) == {1, 2, len(log), 8}  # the scale, the head, the entries, the sums


def test_too_many_entries_do_not_leave_the_device_at_all() -> None:
    x = reference.T_FIXED + 2.0**-40 * torch.arange(
        4000, dtype=torch.float64
    )  # of equal ones each counts once
    grid = triton_launch.KernelGrid(
        0, -6, 0, False, torch.zeros(1, dtype=torch.int32), sys.float_info.max, KEY
    )
    found = triton_launch.record(x, grid, torch.empty_like(x), None, 756)
    assert (found.count, found.positions.size) == (4000, 0)
    with pytest.raises(Nondeterminism, match=r"^w: 4000 of 4000 elements are ambiguous"):
        rounding_triton.record_triton(
            x, SiteGrid(0, -6, 0, False, [0]), out=torch.empty_like(x), old=None, key=KEY, name="w"
        )
    half, coarser = torch.full((4000,), 0.5, dtype=torch.float64), SiteGrid(0, -4, 0, False, [0])
    entries = rounding_triton.record_triton(
        half, coarser, out=torch.empty_like(x), old=None, key=KEY, name="w"
    )
    assert len(entries) == 4000  # what a step left as it was, on a grid that became an octave coarser


def test_entries_of_another_site_are_refused_before_anything_is_written() -> None:
    grid = SiteGrid(0, -6, 0, False, [0])
    x = draws(20, 1)
    before = x.clone()
    with pytest.raises(InvalidInput, match=r"^w: entries of 1 bits for 21 elements, site has 20 of 1 bit"):
        rounding_triton.follow_triton(x, grid, SparseEntries.none(21, 1), out=x, old=None, key=KEY, name="w")
    with pytest.raises(InvalidInput, match=r"^band: 3 blocks do not divide 20 elements"):
        rounding_triton.record_triton(
            x, SiteGrid(0, -6, 0, False, [0, 0, 0]), out=x, old=None, key=KEY, name="w"
        )
    with pytest.raises(InvalidInput, match=r"^rounding: 20 elements into 19"):
        rounding_triton.record_triton(x, grid, out=x[:19], old=None, key=KEY, name="w")
    with pytest.raises(InvalidInput, match="without as many old ones"):
        rounding_triton.record_triton(x, SiteGrid(24, -47, -149), out=x, old=x[:19], key=KEY, name="w")
    assert torch.equal(x, before)


# --------------------------------------------------------------------------------------- choice, compilation


def test_the_kernels_are_chosen_on_a_cuda_device_where_triton_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda, x = torch.device("cuda"), draws(20, 1)
    assert rounding_triton.has_triton(cuda, x, None)
    assert rounding_triton.has_triton(cuda, x.float())
    assert not rounding_triton.has_triton(torch.device("cpu"), x)
    assert not rounding_triton.has_triton(torch.device("xpu"), x)
    assert not rounding_triton.has_triton(cuda, x, x.bfloat16())
    assert not rounding_triton.has_triton(cuda, x[::2])
    with monkeypatch.context() as patch:
        patch.setattr(torch.version, "hip", "6.4")
        assert not rounding_triton.has_triton(cuda, x)
    with monkeypatch.context() as patch:
        patch.setattr(rounding_triton, "find_triton", lambda: None)
        assert not rounding_triton.has_triton(cuda, x)


def test_a_tensor_on_the_cpu_never_meets_triton() -> None:
    """Not even where it is installed: nothing is imported that a CPU run does not need."""
    code = """
import sys, torch
from tallystick.numerics.grid_table import SiteGrid
from tallystick.numerics.rounding import round_recorded
from tallystick.numerics.tensor_measures import block_rms, fingerprint
x = torch.ones(9)
round_recorded(x, SiteGrid(0, -8, -3, True, [0]), out=x)
block_rms(x, 3), fingerprint(x, 1)
sys.exit("triton" in sys.modules or "tallystick.numerics.kernels.triton_launch" in sys.modules)
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


@pytest.mark.slow
def test_what_is_compiled_for_a_device_neither_contracts_nor_flushes_nor_counts_atomically() -> None:
    """Every kernel, as the host code launches it, for two generations of devices; a control fuses on purpose."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(COMPILE)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    fused = [line for line in lines if line.startswith("fused ")]
    plain = [line for line in lines if line.startswith("plain ")]
    kernels = {line.split()[2] for line in plain}
    assert kernels == {
        "record_tiles", "scan_counts", "emit_entries", "mark_entries", "follow_tiles", "fold",
        "draw_words", "weigh_bits", "square_rows",
    }  # fmt: skip
    assert [line for line in plain if not line.endswith(" none")] == []
    assert any("fma" in line for line in fused)
