"""Operators on rows that cancel inside: softmax, its logarithm, layer, batch and group norm, forward and backward.

Every function takes float32 (softmax also float64) rows, computes in float64 and rounds each result once. Softmax and its
logarithm have forms that keep their relative accuracy where a row is sure of one element: ``log1p`` of the other
exponentials, ``expm1`` of the log-probability, differences from the gradient at the largest probability.

On the CPU rows.c does it: the same bits on every processor and with any number of threads. On other devices tensor code in
chunks of ``CHUNK`` elements does it, the readable form of the definition, whose bits before the one rounding are the
library's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from tallystick.numerics.kernels import native

CHUNK = 1 << 20  # elements that are widened at a time
TYPES = {torch.float32: 0, torch.float64: 1}
SURE = 0.35  # log-probabilities closer to 0 are those of a sure choice (rows.c)


class Form(IntEnum):
    """Which function of a row."""

    SOFTMAX = 0
    SAFE_SOFTMAX = 1  # zero where every element is minus infinity
    LOG_SOFTMAX = 2


def softmax(x: Tensor, dim: int, form: Form) -> Tensor:
    """Return softmax of ``x``, or its logarithm, along ``dim``; contiguous, of the dtype of ``x``."""
    return _along(dim, (x,), lambda out, rows: _softmax_rows(rows[0], out, form))


def softmax_backward(g: Tensor, y: Tensor, dim: int, form: Form) -> Tensor:
    """Return the gradient of the input, from that of the result ``y``; contiguous, of the dtype of ``y``.

    With probabilities p it is ``p * sum_j (g - g_j) p_j``: what ``p * (g - sum_j g_j p_j)`` is where they add up to 1, as
    rounded ones do not.
    """
    return _along(dim, (g, y), lambda out, rows: _softmax_backward_rows(rows[0], rows[1], out, form))


def _along(dim: int, given: tuple[Tensor, ...], work: Callable[[Tensor, Sequence[Tensor]], None]) -> Tensor:
    """Return the result of ``work(out, rows)``, both as matrices whose rows run along ``dim`` of the tensors."""
    given = tuple(tensor.contiguous() for tensor in given)
    out = given[0].new_empty(
        given[0].shape
    )  # a contiguous tensor may have other strides, where a dimension is 1
    if not out.numel():
        return out
    shape = out.shape or torch.Size((1,))
    n = shape[dim]
    inner = shape[dim % len(shape) :].numel() // n  # not a stride: that of one row has no meaning
    if inner == 1:
        work(out.view(-1, n), [tensor.view(-1, n) for tensor in given])
        return out
    target, cubes = out.view(-1, n, inner), [tensor.view(-1, n, inner) for tensor in given]
    width = min(inner, max(1, CHUNK // n))
    height = max(1, CHUNK // (n * width))
    for top in range(0, target.shape[0], height):
        for left in range(0, inner, width):
            parts = [cube[top : top + height, :, left : left + width].transpose(1, 2) for cube in cubes]
            rows = [part.reshape(-1, n).contiguous() for part in parts]
            found = torch.empty_like(rows[0])
            work(found, rows)
            target[top : top + height, :, left : left + width] = found.view(parts[0].shape).transpose(1, 2)
    return out


def _softmax_rows(x: Tensor, out: Tensor, form: Form) -> None:
    rows, n = x.shape
    if _is_cpu(x):
        arguments = (x.data_ptr(), out.data_ptr(), TYPES[x.dtype], int(form))
        native.on_rows("tally_softmax", rows, n, *arguments, threads=torch.get_num_threads())
        return
    for part in _chunks(rows, n):
        out[part] = softmax_form(x[part].double(), form)


def softmax_form(x: Tensor, form: Form) -> Tensor:
    """Return softmax of float64 rows, or its logarithm: what rows.c computes, in tensor operations."""
    top = x.amax(1, keepdim=True)
    away = x - top
    tied = away == 0.0
    weights = away.exp()
    rest = torch.where(tied, 0.0, weights).sum(1, keepdim=True) + (tied.sum(1, keepdim=True) - 1)
    if form == Form.LOG_SOFTMAX:
        return away - torch.log1p(rest)
    found = weights / (1.0 + rest)
    return torch.where(top == -torch.inf, 0.0, found) if form == Form.SAFE_SOFTMAX else found


def _softmax_backward_rows(g: Tensor, y: Tensor, out: Tensor, form: Form) -> None:
    rows, n = y.shape
    if _is_cpu(y):
        arguments = (g.data_ptr(), y.data_ptr(), out.data_ptr(), TYPES[y.dtype], int(form))
        native.on_rows("tally_softmax_backward", rows, n, *arguments, threads=torch.get_num_threads())
        return
    for part in _chunks(rows, n):
        out[part] = softmax_backward_form(g[part].double(), y[part].double(), form)


def softmax_backward_form(g: Tensor, y: Tensor, form: Form) -> Tensor:
    """Return the gradient of float64 rows: what rows.c computes, in tensor operations."""
    if form == Form.LOG_SOFTMAX:
        total = g.sum(1, keepdim=True)
        return torch.where(y.abs() < SURE, (g - total) - torch.expm1(y) * total, g - y.exp() * total)
    away = g - g.gather(1, y.argmax(1, keepdim=True))
    return y * (away - (away * y).sum(1, keepdim=True))


def _is_cpu(x: Tensor) -> bool:
    return x.device.type == "cpu"


def _has_kernel(x: Tensor) -> bool:
    """Whether rows.c takes groups of such rows."""
    return _is_cpu(x) and x.dtype is torch.float32


def _chunks(rows: int, width: int) -> Iterator[slice]:
    height = max(1, CHUNK // max(1, width))
    for top in range(0, rows, height):
        yield slice(top, top + height)


# -- layer norm ----------------------------------------------------------------------------------


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the normalised rows of a float32 matrix, and mean and 1 / sqrt(variance + eps) of each row.

    Args:
        x: contiguous, of at least one column.
        weight: contiguous, of one row's elements.
        bias: the same.
        eps: as torch has it.
    """
    rows, n = x.shape
    out, mean, rstd = x.new_empty(x.shape), x.new_empty(rows), x.new_empty(rows)
    if _is_cpu(x):
        addresses = tuple(_address(t) for t in (x, weight, bias, out, mean, rstd))
        native.on_rows("tally_layer_norm", rows, n, *addresses, eps, threads=torch.get_num_threads())
        return out, mean, rstd
    for part in _chunks(rows, n):
        wide = x[part].double()
        middle = wide.mean(1, keepdim=True)
        wide -= middle
        inverse = 1.0 / torch.sqrt(wide.square().mean(1, keepdim=True) + eps)
        wide *= inverse
        if weight is not None:
            wide *= weight
        if bias is not None:
            wide += bias
        out[part], mean[part], rstd[part] = wide, middle.squeeze(1), inverse.squeeze(1)
    return out, mean, rstd


def layer_norm_backward(
    dy: Tensor, x: Tensor, rstd: Tensor, weight: Tensor | None, wanted: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of ``x``, weight and bias, those of weight and bias in float64.

    The mean is computed anew: rounded to float32 it is coarse where a row's offset is large beside its spread.

    Args:
        dy: contiguous float32 matrix.
        x: the same.
        rstd: one number for each row, as the forward pass returned it.
        weight: contiguous, of one row's elements.
        wanted: whether the gradient of ``x``, and those of weight and bias.
    """
    rows, n = x.shape
    dx = x.new_empty(x.shape) if wanted[0] else None
    if _is_cpu(x):
        chunk = native.rows_in_chunk(n)
        sums = x.new_zeros((-(-rows // chunk), 2, n), dtype=torch.float64) if wanted[1] else None
        addresses = tuple(_address(t) for t in (dy, x, rstd, weight, dx, sums))
        native.on_rows(
            "tally_layer_norm_backward", rows, n, *addresses, chunk, threads=torch.get_num_threads()
        )
        if sums is None:
            return dx, None, None
        total = sums[0]
        for part in sums[1:]:  # in one order, whatever the library's reduction does
            total += part
        return dx, total[0], total[1]
    along, plain = x.new_zeros(n, dtype=torch.float64), x.new_zeros(n, dtype=torch.float64)
    for part in _chunks(rows, n):
        wide, g, inverse = x[part].double(), dy[part].double(), rstd[part, None].double()
        unit = (wide - wide.mean(1, keepdim=True)) * inverse
        along += (g * unit).sum(0)
        plain += g.sum(0)
        if dx is not None:
            a = g if weight is None else g * weight
            second = (a * unit).mean(1, keepdim=True)
            dx[part] = inverse * ((a - a.mean(1, keepdim=True)) - unit * second)
    return (dx, along, plain) if wanted[1] else (dx, None, None)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


# -- batch and group norm: rows are the elements of one channel of one example -------------------


class _Groups(ctypes.Structure):
    """``Groups`` of rows.c."""

    _fields_ = tuple((name, ctypes.c_int64) for name in ("first", "step", "members", "channels"))


@dataclass(frozen=True)
class Groups:
    """Which rows are normalised together.

    Attributes:
        examples, channels: row ``n * channels + c`` is channel c of example n.
        together: channels of one example that make a group; None for one channel of all examples.
    """

    examples: int
    channels: int
    together: int | None = None

    @property
    def count(self) -> int:
        """The number of groups."""
        return self.channels if self.together is None else self.examples * self.channels // self.together

    @property
    def members(self) -> int:
        """Rows in a group."""
        return self.examples if self.together is None else self.together

    def described(self) -> _Groups:
        """Return what rows.c takes."""
        first, step = (1, self.channels) if self.together is None else (self.together, 1)
        return _Groups(first=first, step=step, members=self.members, channels=self.channels)

    def gathered(self, per_row: Tensor) -> Tensor:
        """Return numbers of rows as (count, members)."""
        if self.together is None:
            return per_row.view(self.examples, self.channels).t()
        return per_row.view(self.count, self.together)

    def spread(self, per_group: Tensor) -> Tensor:
        """Return numbers of groups as numbers of rows."""
        if self.together is None:
            return per_group.repeat(self.examples)
        return per_group.repeat_interleave(self.together)


def group_norm(
    x: Tensor, groups: Groups, weight: Tensor | None, bias: Tensor | None, eps: float,
    given: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the normalised matrix, and mean, biased variance and 1 / sqrt(variance + eps) of each group, in float64.

    Args:
        x: contiguous float32 or float64 matrix.
        groups: of its rows.
        weight: contiguous, of one number for each channel.
        bias: the same.
        eps: as torch has it.
        given: mean and variance to use in place of the group's own, float64.
    """
    rows, n = x.shape
    out = x.new_empty(x.shape)
    mean, variance = given or (
        x.new_zeros(groups.count, dtype=torch.float64),
        x.new_zeros(groups.count, dtype=torch.float64),
    )
    if _has_kernel(x):
        inverse, described = torch.empty_like(mean), groups.described()
        addresses = tuple(_address(t) for t in (x, weight, bias, out, mean, variance, inverse))
        native.on_rows(
            "tally_group_norm", groups.count, n, *addresses, ctypes.addressof(described), eps, given is not None,
            size=n * groups.members, threads=torch.get_num_threads(),
        )  # fmt: skip
        return out, mean, variance, inverse
    if given is None:
        size = n * groups.members
        mean = _row_sums(x, torch.zeros_like(mean), groups, False) / size
        variance = _row_sums(x, mean, groups, True) / size
    inverse = 1.0 / torch.sqrt(variance + eps)
    middle, factor = groups.spread(mean), groups.spread(inverse)
    shift = torch.zeros_like(middle)
    if weight is not None:
        factor = factor * weight.double().repeat(groups.examples)
    if bias is not None:
        shift = bias.double().repeat(groups.examples)
    for part in _chunks(rows, n):
        out[part] = (x[part].double() - middle[part, None]) * factor[part, None] + shift[part, None]
    return out, mean, variance, inverse


def group_norm_backward(
    dy: Tensor, x: Tensor, groups: Groups, weight: Tensor | None, inverse: Tensor, given: Tensor | None, wanted: bool
) -> tuple[Tensor | None, Tensor, Tensor]:  # fmt: skip
    """Return the gradient of ``x`` if ``wanted``, and for each channel the sums of ``dy * (x - mean) * inverse`` and of ``dy``.

    Args:
        dy: contiguous float32 or float64 matrix.
        x: the same.
        groups: of their rows.
        weight: contiguous, of one number for each channel.
        inverse: 1 / sqrt(variance + eps) of each group, float64.
        given: the mean of each group if mean and inverse do not depend on ``x``; else the mean is computed anew, see
            ``layer_norm_backward``.
        wanted: whether the gradient of ``x`` is.
    """
    rows, n = x.shape
    dx = x.new_empty(x.shape) if wanted else None
    size = n * groups.members
    if _has_kernel(x):
        sums = inverse.new_zeros((groups.count if groups.together is None else rows, 2))
        described = groups.described()
        addresses = tuple(_address(t) for t in (dy, x, weight, given, inverse, dx, sums))
        native.on_rows(
            "tally_group_norm_backward", groups.count, n, *addresses, ctypes.addressof(described), given is not None,
            size=size, threads=torch.get_num_threads(),
        )  # fmt: skip
        if groups.together is not None:
            sums = folded_sum(sums.view(groups.examples, -1).t()).view(-1, 2)
        return dx, sums[:, 0], sums[:, 1]
    sums = inverse.new_zeros((rows, 2))
    mean = given if given is not None else _row_sums(x, torch.zeros_like(inverse), groups, False) / size
    middle, scale = groups.spread(mean), groups.spread(inverse)
    for part in _chunks(rows, n):
        g = dy[part].double()
        sums[part, 0] = (g * (x[part].double() - middle[part, None])).sum(1) * scale[part]
        sums[part, 1] = g.sum(1)
    total = folded_sum(sums.view(groups.examples, -1).t()).view(-1, 2)
    if dx is None:
        return dx, total[:, 0], total[:, 1]
    slope = torch.ones_like(scale) if weight is None else weight.double().repeat(groups.examples)
    shift, factor = torch.zeros_like(scale), torch.zeros_like(scale)
    if given is None:
        factor, shift = (
            groups.spread(folded_sum(groups.gathered(sums[:, k] * slope)) / size) for k in (0, 1)
        )
    factor = factor * scale
    for part in _chunks(rows, n):
        found = dy[part].double() * slope[part, None] - shift[part, None]
        found -= (x[part].double() - middle[part, None]) * factor[part, None]
        dx[part] = found * scale[part, None]
    return dx, total[:, 0], total[:, 1]


def _row_sums(x: Tensor, mean: Tensor, groups: Groups, squared: bool) -> Tensor:
    """Return for each group the sum of ``x - mean``, or of its square."""
    middle = groups.spread(mean)
    sums = torch.empty_like(middle)
    for part in _chunks(*x.shape):
        wide = x[part].double() - middle[part, None]
        sums[part] = (wide.square() if squared else wide).sum(1)
    return folded_sum(groups.gathered(sums))


def folded_sum(x: Tensor) -> Tensor:
    """Return the sum over the last dimension, in an order that no library chooses: halves are added to each other."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = torch.cat((x[..., :half] + x[..., half : 2 * half], x[..., 2 * half :]), dim=-1)
    return x.squeeze(-1)
