"""What is measured of whole tensors, on any device: fingerprints, root mean squares, deviations."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tallystick.numerics.kernels import measures, native
from tallystick.numerics.reference import GOLDEN
from tallystick.numerics.rounding_triton import has_triton, triton

KINDS = {torch.float32: 0, torch.float64: 1}
SAMPLES = 1 << 16  # elements of a tensor that are looked at, at most
CHUNK = 1 << 20  # elements held in temporaries at a time on devices without a fused kernel
MASK32 = 0xFFFFFFFF


def fingerprint(tensor: Tensor, ordinal: int) -> int:
    """Return the 64-bit fingerprint of ``tensor``'s float32 values as tensor number ``ordinal``.

    A locator, not a commitment: two different states have equal fingerprints with probability
    about 2**-64 by accident, and on purpose whenever somebody takes the trouble.
    """
    values = tensor.detach().reshape(-1)
    base = ordinal << 40
    if values.device.type == "cpu" and values.dtype in (torch.float32, torch.float64):
        return measures.fingerprint(values.contiguous().numpy(), base, threads=torch.get_num_threads())
    values = values.to(torch.float32)
    if has_triton(values.device):
        return triton().fingerprint(values.contiguous(), base)
    return fingerprint_tensor(values, base)


def fingerprint_bits(tensor: Tensor) -> int:
    """Return a number that changes with every bit of a tensor, up to 2**-64."""
    return fingerprint(tensor.detach().contiguous().reshape(-1).view(torch.float32), 0)


def fingerprint_all(tensors: Iterable[Tensor], known: Container[int] = ()) -> int:
    """Return the fingerprint of a state: the sum of those of its tensors, numbered in the order given, modulo 2**64.

    Tensors that are not empty and whose address is ``known`` are left out.
    """
    total, table, kept = 0, list[tuple[int, int, int, int]](), list[Tensor]()
    for ordinal, tensor in enumerate(tensors):
        kind = KINDS.get(tensor.dtype)
        if kind is None or tensor.device.type != "cpu":
            total += fingerprint(tensor, ordinal)
            continue
        if tensor.numel() and tensor.data_ptr() in known:
            continue
        kept.append(tensor if tensor.is_contiguous() else tensor.contiguous())
        table.append((kept[-1].data_ptr(), tensor.numel(), ordinal << 40, kind))
    return (total + measures.fingerprints(table, threads=torch.get_num_threads())) % (1 << 64)


def fingerprint_each(tensors: Iterable[Tensor], most: int) -> list[int]:
    """Return a number for each contiguous tensor in host memory that changes with its first ``most`` float32 values."""
    return measures.fingerprint_each(
        [(x.data_ptr(), min(x.numel(), most), 0, KINDS[x.dtype]) for x in tensors]
    )


def fingerprint_tensor(values: Tensor, base: int) -> int:
    """Return the fingerprint of flat float32 values from weight ``base`` on, by tensor operations."""
    total = 0
    for start in range(0, values.numel(), CHUNK):
        bits = values[start : start + CHUNK].contiguous().view(torch.int32).to(torch.int64) & MASK32
        position = torch.arange(start, start + bits.numel(), device=values.device, dtype=torch.int64) + base
        weight = (position * (GOLDEN - (1 << 64))) | 1
        total += int(((bits + 1) * weight).sum().item())
    return total % (1 << 64)


def block_rms(x: Tensor, blocks: int) -> npt.NDArray[np.float64]:
    """Return the root mean square of each of ``blocks`` equal leading blocks of ``x``, in binary64."""
    if has_triton(x.device, x):
        return block_rms_triton(x, blocks)
    if x.device.type != "cpu":
        return block_rms_tensor(x, blocks)
    return np.sqrt(block_square_sums(x, blocks) / max(x.numel() // blocks, 1))


def block_square_sums(x: Tensor, blocks: int) -> npt.NDArray[np.float64]:
    """Return the sum of squares, in binary64, of each of ``blocks`` equal leading blocks of ``x`` in host memory."""
    rows = x.numel() // blocks
    sums = np.empty(blocks, dtype=np.float64)
    if blocks == 1 and 0 < rows <= native.CHUNK and x.dtype in KINDS and x.is_contiguous():
        sums[0] = measures.square_sum(x.data_ptr(), KINDS[x.dtype], rows)
    else:
        measures.block_square_sums(_flat(x), rows, sums, threads=torch.get_num_threads())
    return sums


def sampled_rms(tensors: Sequence[Tensor]) -> npt.NDArray[np.float64]:
    """Return the root mean square of an even sample of each tensor; 0 of one without elements.

    Of a flat tensor it is ``block_rms(x[::sample_stride(x)], 1)``; on the CPU without a copy of the sample.
    """
    found = np.zeros(len(tensors), dtype=np.float64)
    table, counts, places = list[tuple[int, int, int, int]](), list[int](), list[int]()
    for place, x in enumerate(tensors):
        kind = KINDS.get(x.dtype)
        if not x.numel():
            continue
        stride = sample_stride(x)
        if kind is None or x.device.type != "cpu" or not x.is_contiguous():
            found[place] = block_rms(x.detach().reshape(-1)[::stride].contiguous(), 1)[0]
            continue
        counts.append(-(-x.numel() // stride))
        places.append(place)
        table.append((x.data_ptr(), counts[-1], stride, kind))
    if table:
        found[places] = np.sqrt(measures.sampled_square_sums(table) / counts)
    return found


def sample_stride(x: Tensor) -> int:
    """Return the distance between the elements of a tensor's even sample, at most ``SAMPLES`` of them."""
    return -(-x.numel() // SAMPLES) or 1


def block_rms_triton(x: Tensor, blocks: int) -> npt.NDArray[np.float64]:
    """Return what ``block_rms`` does, by the Triton kernels."""
    return np.sqrt(triton().block_square_sums(x, blocks) / max(x.numel() // blocks, 1))


def block_rms_tensor(x: Tensor, blocks: int) -> npt.NDArray[np.float64]:
    """Return what ``block_rms`` does, by tensor operations."""
    rows = x.numel() // blocks
    norms = torch.linalg.vector_norm(x.detach().reshape(blocks, rows), dim=1, dtype=torch.float64)
    return np.sqrt(norms.square().cpu().numpy() / max(rows, 1))


def block_differences(
    x: Tensor, y: Tensor, blocks: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return the largest ``|x - y|`` in each of ``blocks`` equal leading blocks, and the mean, in binary64.

    Infinity where a difference is infinite or not a number; 0 for blocks without elements.
    """
    rows = x.numel() // blocks
    if x.device.type != "cpu":
        return block_differences_tensor(x, y, blocks)
    largest, total = np.zeros(blocks, dtype=np.float64), np.zeros(blocks, dtype=np.float64)
    measures.block_differences(_flat(x), _flat(y), rows, largest, total, threads=torch.get_num_threads())
    return largest, total / max(rows, 1)


def block_differences_tensor(
    x: Tensor, y: Tensor, blocks: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return what ``block_differences`` does, by tensor operations."""
    if not x.numel():
        return np.zeros(blocks, dtype=np.float64), np.zeros(blocks, dtype=np.float64)
    difference = (x.detach().double() - y.detach().double()).abs_()
    difference.nan_to_num_(nan=torch.inf, posinf=torch.inf)
    rows = difference.reshape(blocks, -1)
    return rows.amax(dim=1).cpu().numpy(), rows.mean(dim=1).cpu().numpy()


def _flat(tensor: Tensor) -> npt.NDArray[np.floating]:
    return tensor.detach().reshape(-1).numpy()
