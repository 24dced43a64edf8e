"""Rules of operators that sum over windows: convolution and pooling in two dimensions, and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from tallystick.dispute.bounds.formulas import Formula, Indexes, Point, Read, Sum
from tallystick.dispute.bounds.operands import (
    Rule,
    UnknownFormError,
    allow_only,
    fixed_at,
    flat_of,
    indices_of,
    position_of,
    slot_of,
    wanted_output,
)
from tallystick.dispute.bounds.sums import dot_product
from tallystick.dispute.operator_list import Operator


def _window(op: Operator) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int], int]:
    if op.attributes.get("transposed") is not False:
        raise UnknownFormError(f"operator {op.name}: transposed")
    stride, padding, dilation = (op.integers(name) for name in ("stride", "padding", "dilation"))
    if len(stride) != 2 or len(padding) != 2 or len(dilation) != 2:
        raise UnknownFormError(f"operator {op.name}: only two dimensions are in the table")
    return (
        (stride[0], stride[1]),
        (padding[0], padding[1]),
        (dilation[0], dilation[1]),
        int(op.number("groups")),
    )


def _product_of(op: Operator, output: int, read: Read, a: tuple[int, list[Indexes]], b: tuple[int, list[Indexes]],
                finish: Callable[[float, float, float], tuple[float, float]] | None = None) -> Sum:  # fmt: skip
    """A sum of products over listed positions of two inputs."""
    count = int(a[1][0].size)

    def left(at: Indexes) -> tuple[Indexes, ...]:
        return tuple(axis[at] for axis in a[1])

    def right(at: Indexes) -> tuple[Indexes, ...]:
        return tuple(axis[at] for axis in b[1])

    return dot_product(op, output, count, (a[0], left), (b[0], right), read, finish)


def _convolution(op: Operator, output: int, element: int, read: Read) -> Formula:
    stride, padding, dilation, groups = _window(op)
    x, w = slot_of(op, "input"), slot_of(op, "weight")
    n, o, oy, ox = position_of(op.outputs[output].view.shape, element)
    shape, kernel = op.inputs[x].view.shape, op.inputs[w].view.shape
    c, ky, kx = (axis.reshape(-1) for axis in indices_of(kernel[1:]))
    iy, ix = oy * stride[0] - padding[0] + ky * dilation[0], ox * stride[1] - padding[1] + kx * dilation[1]
    ok = (iy >= 0) & (iy < shape[2]) & (ix >= 0) & (ix < shape[3])
    c, ky, kx, iy, ix = c[ok], ky[ok], kx[ok], iy[ok], ix[ok]
    first = o // (kernel[0] // groups) * kernel[1]
    bias = 0.0
    if op.slot("bias") is not None:
        bias = float(
            read(slot_of(op, "bias"), flat_of(op.inputs[slot_of(op, "bias")].view, fixed_at((o,))))[0]
        )

    def finish(total: float, magnitude: float, each: float) -> tuple[float, float]:
        return total + bias, (each + 2.0) * (magnitude + abs(bias))

    zero = 0 * c
    return _product_of(
        op, output, read, (x, [n + zero, first + c, iy, ix]), (w, [o + zero, c, ky, kx]), finish
    )


def _convolution_backward(op: Operator, output: int, element: int, read: Read) -> Formula:
    stride, padding, dilation, groups = _window(op)
    g, x, w = slot_of(op, "grad_output"), slot_of(op, "input"), slot_of(op, "weight")
    out, shape, kernel = (op.inputs[slot].view.shape for slot in (g, x, w))
    which = wanted_output(op, output)
    position = position_of(op.outputs[output].view.shape, element)
    per_group = kernel[0] // groups
    if which == 2:
        n, y, xx = (a.reshape(-1) for a in indices_of((out[0], out[2], out[3])))
        o = position[0]
        return dot_product(op, output, int(n.size), (g, lambda k: (n[k], o + 0 * k, y[k], xx[k])), 1.0, read)
    if which == 1:
        o, c, ky, kx = position
        n, y, xx = (a.reshape(-1) for a in indices_of((out[0], out[2], out[3])))
        iy, ix = y * stride[0] - padding[0] + ky * dilation[0], xx * stride[1] - padding[1] + kx * dilation[1]
        ok = (iy >= 0) & (iy < shape[2]) & (ix >= 0) & (ix < shape[3])
        n, y, xx, iy, ix = n[ok], y[ok], xx[ok], iy[ok], ix[ok]
        channel = o // per_group * kernel[1] + c
        return _product_of(op, output, read, (g, [n, o + 0 * n, y, xx]), (x, [n, channel + 0 * n, iy, ix]))
    n, c, iy, ix = position
    group, inside = divmod(c, kernel[1])
    o, ky, kx = (a.reshape(-1) for a in indices_of((per_group, kernel[2], kernel[3])))
    o = o + group * per_group
    ny, nx = iy + padding[0] - ky * dilation[0], ix + padding[1] - kx * dilation[1]
    oy, ox = ny // stride[0], nx // stride[1]
    ok = (ny % stride[0] == 0) & (nx % stride[1] == 0)
    ok &= (oy >= 0) & (oy < out[2]) & (ox >= 0) & (ox < out[3])
    o, ky, kx, oy, ox = o[ok], ky[ok], kx[ok], oy[ok], ox[ok]
    if not o.size:
        return Point(0.0, exact=True)
    return _product_of(op, output, read, (g, [n + 0 * o, o, oy, ox]), (w, [o, inside + 0 * o, ky, kx]))


def _pool_form(op: Operator) -> tuple[tuple[int, int], tuple[int, int]]:
    kernel = op.integers("kernel_size")
    stride = op.integers("stride") or kernel
    if len(kernel) == 1:
        kernel = (kernel[0], kernel[0])
    if len(stride) == 1:
        stride = (stride[0], stride[0])
    for name in ("ceil_mode",):
        allow_only(op, name, False, None)
    if any(op.integers("padding")) or op.attributes.get("divisor_override") is not None:
        raise UnknownFormError(f"operator {op.name}: padding or a divisor of its own")
    return (kernel[0], kernel[1]), (stride[0], stride[1])


def _avg_pool(op: Operator, output: int, element: int, read: Read) -> Formula:
    kernel, stride = _pool_form(op)
    slot = slot_of(op, "self")
    n, c, y, x = position_of(op.outputs[output].view.shape, element)
    ky, kx = (a.reshape(-1) for a in indices_of(kernel))
    area = float(kernel[0] * kernel[1])

    def finish(total: float, magnitude: float, each: float) -> tuple[float, float]:
        return total / area, (each + 2.0) * magnitude / area

    def place(k: Indexes) -> tuple[Indexes, ...]:
        return n + 0 * k, c + 0 * k, y * stride[0] + ky[k], x * stride[1] + kx[k]

    return dot_product(op, output, int(ky.size), (slot, place), 1.0, read, finish)


def _avg_pool_backward(op: Operator, output: int, element: int, read: Read) -> Formula:
    kernel, stride = _pool_form(op)
    slot = slot_of(op, "grad_output")
    out = op.inputs[slot].view.shape
    n, c, y, x = position_of(op.outputs[output].view.shape, element)
    ky, kx = (a.reshape(-1) for a in indices_of(kernel))
    oy, ox = (y - ky) // stride[0], (x - kx) // stride[1]
    ok = ((y - ky) % stride[0] == 0) & ((x - kx) % stride[1] == 0)
    ok &= (oy >= 0) & (oy < out[2]) & (ox >= 0) & (ox < out[3])
    oy, ox = oy[ok], ox[ok]
    area = float(kernel[0] * kernel[1])
    if not oy.size:
        return Point(0.0, exact=True)

    def finish(total: float, magnitude: float, each: float) -> tuple[float, float]:
        return total / area, (2.0 * each + 2.0) * magnitude / area

    return dot_product(
        op, output, int(oy.size), (slot, lambda k: (n + 0 * k, c + 0 * k, oy[k], ox[k])), 1.0, read, finish
    )


def _max_pool_backward(op: Operator, output: int, element: int, read: Read) -> Formula:
    slot, indices = slot_of(op, "grad_output"), slot_of(op, "indices")
    shape, out = op.outputs[output].view.shape, op.inputs[slot].view.shape
    n, c, y, x = position_of(shape, element)
    oy, ox = (a.reshape(-1) for a in indices_of(out[2:]))
    where = (n + 0 * oy, c + 0 * oy, oy, ox)
    chosen = np.asarray(read(indices, flat_of(op.inputs[indices].view, where)), dtype=np.int64)
    hits = np.flatnonzero(chosen == y * shape[3] + x)
    if not hits.size:
        return Point(0.0, exact=True)
    return dot_product(
        op, output, int(hits.size),
        (slot, lambda k: (n + 0 * k, c + 0 * k, oy[hits[k]], ox[hits[k]])), 1.0, read,
    )  # fmt: skip


WINDOWS: Mapping[str, Rule] = {
    "aten::convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
    "aten::avg_pool2d": _avg_pool,
    "aten::avg_pool2d_backward": _avg_pool_backward,
    "aten::max_pool2d_with_indices_backward": _max_pool_backward,
}
"""The rules by operator."""
