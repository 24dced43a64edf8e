"""What a capture does with each operator, by the operator table: run it, take a decision before it, draw for it, or refuse it."""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from tallystick.errors import Nondeterminism
from tallystick.execution.determinism import filling_results
from tallystick.execution.dispatch.boundaries import is_float
from tallystick.execution.dispatch.buckets import BUCKET_HANDLERS
from tallystick.execution.dispatch.calls import (
    Arguments,
    Handler,
    Operator,
    all_arguments,
    argument_named,
    declared,
    table_name,
)
from tallystick.execution.dispatch.choices import CHOICE_HANDLERS, sampled_from
from tallystick.execution.dispatch.decisions import OperatorPass
from tallystick.execution.dispatch.rows import ROW_HANDLERS
from tallystick.execution.dispatch.sampling import SAMPLE_HANDLERS
from tallystick.execution.dispatch.suppression import suppressed
from tallystick.execution.dispatch.table import (
    COMPARED,
    COMPARISONS,
    CUT,
    EXACT,
    INSTEAD,
    LATTICES,
    LOGICAL,
    RANDOM,
    RESTRICTED,
    SMOOTH,
    SWITCHES,
    UNSET,
    WHOLE,
)

QUOTIENTS = {"aten::floor_divide": "floor", "aten::remainder": "floor", "aten::fmod": "trunc"}
"""Operators that take the whole part of a quotient, and how."""
REMAINDERS = ("aten::remainder", "aten::fmod")
PIECE = 2**12
"""Results of a convolution, of one channel, that a processor adds up at a time into the gradient of its weights; of an image
at least."""


def _plain(here: OperatorPass, func: Operator, args: Arguments, kwargs: dict[str, Any]) -> Any:
    result = func(*args, **kwargs)
    if isinstance(result, Tensor) and not result.is_floating_point() and not result.is_complex():
        _refuse_whole_numbers(func, args, kwargs)
    return result


def _total(here: OperatorPass, func: Operator, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """Add up or multiply floating numbers as whole ones: a cast of each, which jumps, then sums that do not."""
    x, dtype = args[0], argument_named(func, args, kwargs, "dtype")
    if is_float(x) and x.numel() and dtype is not None and not (dtype.is_floating_point or dtype.is_complex):
        args = (_cast_to(here, func, x, dtype).to(dtype), *args[1:])
    return _plain(here, func, args, kwargs)


def _refuse_whole_numbers(func: Operator, args: Arguments, kwargs: dict[str, Any]) -> None:
    if table_name(func) not in WHOLE and any(map(is_float, tree_leaves((args, kwargs)))):
        raise Nondeterminism(
            f"operator {func}: makes whole numbers of floating ones, which jump, and has no decision site; "
            "make them by long(), int(), floor or round before it"
        )


def _unset(here: OperatorPass, func: Operator, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """Run an operator that leaves memory unset with torch filling it: whoever reads it has no number, here as elsewhere."""
    with filling_results(True):
        return func(*args, **kwargs)


def _read(here: OperatorPass, func: Operator, args: Arguments, kwargs: dict[str, Any]) -> Any:
    if is_float(args[0]):
        here.findings.read.add(table_name(func))
    return func(*args, **kwargs)


def _unknown(here: OperatorPass, func: Operator, args: Arguments, kwargs: dict[str, Any]) -> Any:
    name = table_name(func)
    if _is_of_shapes(args, kwargs):
        return func(*args, **kwargs)
    if name not in here.smooth and any(map(_is_real_or_complex, tree_leaves((args, kwargs)))):
        here.findings.unknown.add(name)
        if name in INSTEAD:
            raise Nondeterminism(
                f"operator {func}: not in the operator table, as it jumps and has no decision site; instead: {INSTEAD[name]}"
            )
        raise Nondeterminism(
            f"operator {func}: not in the operator table, so nobody can say whether its output jumps; "
            f'if it and its derivative are continuous, declare it to the Job, to prepare() or to attach(): smooth=("{name}",); '
            "if not, write it with operators whose jumps are logged (where, relu, max, sort, round and the like)"
        )
    return func(*args, **kwargs)


def _is_real_or_complex(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _is_of_shapes(args: Arguments, kwargs: dict[str, Any]) -> bool:
    """Whether a call makes tensors of the device ``meta``, which have no numbers: autograd asks so for a sum's shape."""
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    is_asked = str(kwargs.get("device")) == "meta"
    return is_asked or (bool(tensors) and all(each.device.type == "meta" for each in tensors))


def _restricted(func: Operator, handler: Handler | None = None) -> Handler:
    """Return a handler that refuses the forms of ``func`` that jump, and leaves the others to ``handler``, or to torch."""
    restriction = RESTRICTED[table_name(func)]
    position, default = declared(func, restriction.argument)

    def handle(here: OperatorPass, func: Operator, args: Arguments, kwargs: dict[str, Any]) -> Any:
        value = args[position] if position < len(args) else kwargs.get(restriction.argument, default)
        if value is not None and restriction.jumps(value):
            _refuse_jumping_form(func, args, kwargs)
        return func(*args, **kwargs) if handler is None else handler(here, func, args, kwargs)

    return handle


def _refuse_jumping_form(func: Operator, args: Arguments, kwargs: dict[str, Any]) -> None:
    restriction = RESTRICTED[table_name(func)]
    value = argument_named(func, args, kwargs, restriction.argument)
    if value is not None and restriction.jumps(value) and any(map(is_float, tree_leaves((args, kwargs)))):
        raise Nondeterminism(
            f"operator {func}: jumps with {restriction.argument}={value}, and has no decision site; "
            f"{restriction.reason}"
        )


def _switch(here: OperatorPass, func: Operator, args: Arguments, kwargs: dict[str, Any]) -> Any:
    name = table_name(func)
    switch = SWITCHES[name]
    x = args[switch.argument]
    if name in COMPARISONS and isinstance(args[1], Tensor):
        return _compare_tensors(here, func, args, kwargs)
    if not is_float(x) or x.numel() == 0:
        return func(*args, **kwargs)
    points = sorted(set(switch.points(args, kwargs)))
    if name == "aten::threshold_backward" and points == [0.0]:
        return func(*args, **kwargs)  # of a ReLU: the branch was decided at its input and shows in its output
    if name == "aten::threshold" and points == [0.0]:
        raise Nondeterminism(
            f"operator {func}: threshold 0 cannot be told from a ReLU in the backward pass; use relu or where"
        )
    if not points:
        return func(*args, **kwargs)
    values = torch.tensor(points, dtype=x.dtype, device=x.device)

    def nearest(flat: Tensor) -> Tensor:
        if len(points) == 1:
            return values[0]
        return values[(flat.unsqueeze(1) - values).abs().argmin(dim=1)]

    if name == "aten::relu" and x.is_contiguous() and not func._schema.is_mutable:
        return here.rectified(func, x)
    spacing = min((high - low for low, high in pairwise(points)), default=math.inf)
    moved = here.forced(x, nearest, spacing)
    if moved is not None:
        if func._schema.is_mutable:
            x.copy_(moved)
        else:
            args = (*args[: switch.argument], moved, *args[switch.argument + 1 :])
    return func(*args, **kwargs)


def _compare_tensors(here: OperatorPass, func: Operator, args: Arguments, kwargs: dict[str, Any]) -> Any:
    x, y = args[0], args[1]
    if not (is_float(x) or is_float(y)) or (x.numel() == 0 or y.numel() == 0):
        return func(*args, **kwargs)
    dtype = torch.promote_types(x.dtype, y.dtype)
    x, y = torch.broadcast_tensors(x.to(dtype), y.to(dtype))
    flat = y.reshape(-1)
    moved = here.forced(x, lambda _: flat)
    if moved is None:
        return func(*args, **kwargs)
    if func._schema.is_mutable:
        args[0].copy_(moved)
        return func(*args, **kwargs)
    return func(moved, y, *args[2:], **kwargs)


def _equal(here: OperatorPass, func: Operator, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """Ask whether two tensors are the same, for the program to branch on: a decision of each pair of elements."""
    same_shape = args[0].shape == args[1].shape
    return _compare_tensors(here, func, args, kwargs) if same_shape else func(*args, **kwargs)


def _angle(here: OperatorPass, func: Operator, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """Take the angle of points, which jumps by a whole turn where they cross the left half of the first axis."""
    y, x = args[0] + 0.0, args[1] + 0.0  # no zero has a sign
    dtype = torch.promote_types(y.dtype, x.dtype)
    if not dtype.is_floating_point or 0 in (y.numel(), x.numel()):
        return func(*args, **kwargs)
    y, x = torch.broadcast_tensors(y.to(dtype), x.to(dtype))
    is_left, zero = x < 0.0, torch.zeros((), dtype=dtype, device=y.device)
    # How far each point is from the cut, which begins where both are zero.
    asked = torch.where(is_left, y, x.abs() + y.abs())
    moved = here.forced(asked, lambda _: zero)
    result = torch.atan2(y if moved is None else torch.where(is_left, moved, y), x)
    return args[0].copy_(result) if func._schema.is_mutable else result


def _logical(here: OperatorPass, func: Operator, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """Ask of two tensors whether they are zero, which jumps there: a decision of each that is floating."""
    asked: list[Tensor] = []
    for x in args[:2]:
        zero = torch.zeros((), dtype=x.dtype, device=x.device)
        moved = here.forced(x, lambda _, zero=zero: zero) if is_float(x) and x.numel() else None
        asked.append(x if moved is None else moved)
    if func._schema.is_mutable:
        asked[0] = args[0] if asked[0] is args[0] else args[0].copy_(asked[0])
    return func(*asked, *args[2:], **kwargs)


def _lattice(here: OperatorPass, func: Operator, args: Arguments, kwargs: dict[str, Any]) -> Any:
    x = args[0]
    if not is_float(x) or x.numel() == 0:
        return func(*args, **kwargs)
    name = table_name(func)
    if name in RESTRICTED:
        _refuse_jumping_form(func, args, kwargs)
    offset = LATTICES[name]
    moved = here.forced(x, lambda flat: torch.round(flat - offset) + offset, 1.0)
    if moved is None:
        return func(*args, **kwargs)
    if func._schema.is_mutable:
        x.copy_(moved)
        return func(*args, **kwargs)
    return func(moved, *args[1:], **kwargs)


def _cast(here: OperatorPass, func: Operator, args: Arguments, kwargs: dict[str, Any]) -> Any:
    x, dtype = args[0], kwargs.get("dtype")
    if not is_float(x) or dtype is None or x.numel() == 0:
        return func(*args, **kwargs)
    return func(_cast_to(here, func, x, dtype), *args[1:], **kwargs)


def _copy(here: OperatorPass, func: Operator, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """Copy numbers into a tensor, which is a cast where that has another dtype."""
    x, source = args[0], args[1]
    if not is_float(source) or source.dtype == x.dtype or source.numel() == 0:
        return func(*args, **kwargs)
    return func(x, _cast_to(here, func, source, x.dtype), *args[2:], **kwargs)


def _cast_to(here: OperatorPass, func: Operator, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what is to be cast to ``dtype``: ``x``, moved to where the log has it if that gives another whole number."""
    if dtype.is_complex:
        return x
    if not dtype.is_floating_point:
        moved = here.forced(x, torch.round, 1.0)
        return x if moved is None else moved
    if (
        torch.finfo(dtype).eps > torch.finfo(here.compute).eps
        and torch.finfo(x.dtype).eps < torch.finfo(dtype).eps
    ):
        here.findings.unknown.add(table_name(func))
        raise Nondeterminism(
            f"cast from {x.dtype} to {dtype}: a jump of {torch.finfo(dtype).eps:.1e} inside a step that computes in "
            f"{here.compute}; leave the cast (or autocast) out, or use a policy made for it"
        )
    return x


def _divided(here: OperatorPass, func: Operator, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """Divide to whole numbers, or give what that leaves: the quotient jumps at every one, and what follows from it is exact."""
    name = table_name(func)
    mode = QUOTIENTS.get(name) or argument_named(func, args, kwargs, "rounding_mode")
    x, y = args[0], args[1]
    if mode is None or not (is_float(x) or is_float(y)):
        return func(*args, **kwargs)
    quotient = torch.div(x, y)
    moved = here.forced(quotient, torch.round, 1.0) if quotient.numel() else None
    whole = (torch.floor if mode == "floor" else torch.trunc)(quotient if moved is None else moved)
    result = torch.where(whole == 0, x, x - whole * y) if name in REMAINDERS else whole  # y may be infinite
    return x.copy_(result) if func._schema.is_mutable else result


def _grouped(here: OperatorPass, func: Operator, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """Multiply group by group in float64, for which torch has no kernel: groups of rows, of columns, or of what is added up."""
    a, b, ends = args[0], args[1], argument_named(func, args, kwargs, "offs")
    if a.dtype != torch.float64:
        return func(*args, **kwargs)
    if ends is None:
        return torch.bmm(a, b)
    last = [int(end) for end in ends]
    parts = [slice(start, end) for start, end in zip([0, *last], last, strict=False)]
    if a.dim() == b.dim() == 2:
        return torch.stack([a[:, part] @ b[part] for part in parts])
    if a.dim() == 2:
        result = a.new_zeros(a.shape[0], b.shape[2])
        for number, part in enumerate(parts):
            result[part] = a[part] @ b[number]
    else:
        result = a.new_zeros(a.shape[1], b.shape[1])
        for number, part in enumerate(parts):
            result[:, part] = a[number] @ b[:, part]
    return result


@cache
def _adds_up_narrowly(device: str) -> bool:
    """Whether convolutions of bfloat16 add up in bfloat16: on processors without instructions for it."""
    supported: Any = torch.ops.mkldnn._is_mkldnn_bf16_supported  # pyright: ignore[reportPrivateUsage]
    return device == "cpu" and not supported()


def _convolution(here: OperatorPass, func: Operator, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """Run a convolution of bfloat16 in float32 and round once, where the machine's own kernel would round every partial sum.

    The gradient of a bias, of float32 or float64, is summed by itself, and on a processor that of float32 weights in pieces:
    oneDNN adds one by one, and is off by 5 to 17 times more, with AVX-512 also by ten times more than without.
    """
    if table_name(func) == "aten::convolution_backward" and args[0].dtype in (torch.float32, torch.float64):
        return _convolution_backward(func, all_arguments(func, args, kwargs))
    if args[0].dtype is not torch.bfloat16 or not _adds_up_narrowly(args[0].device.type):
        return func(*args, **kwargs)
    wide = (x.float() if isinstance(x, Tensor) else x for x in args)
    return tree_map_only(Tensor, Tensor.bfloat16, func(*wide, **kwargs))


def _convolution_backward(func: Operator, args: Arguments) -> tuple[Tensor | None, ...]:
    """Return the gradients of input, weights and bias, those of the weights and of the bias added up in float64."""
    gradient, x, rest, mask = args[0], args[1], args[2:-1], args[-1]
    images = gradient.shape[0]
    at_once, places = images, math.prod(args[2].shape[2:])
    if places > 1 and gradient.dtype is torch.float32 and gradient.device.type == "cpu" and mask[1]:
        at_once = max(1, PIECE // max(1, math.prod(gradient.shape[2:])))
    is_split = at_once < images
    whole = [mask[0], mask[1] and not is_split, False]
    found = func(gradient, x, *rest, whole) if any(whole) else (None, None, None)
    weight, bias = found[1], None
    if is_split:
        pieces = zip(gradient.split(at_once), x.split(at_once), strict=True)
        parts = (func(g, given, *rest, [False, True, False])[1] for g, given in pieces)
        weight = sum(parts, start=torch.zeros(args[2].shape, dtype=torch.float64)).to(gradient.dtype)
    if mask[2]:
        total = gradient.sum(list(range(2, gradient.dim()))).sum(0, dtype=torch.float64)
        bias = total.to(gradient.dtype)
    return (found[0], weight, bias)


def _random(here: OperatorPass, func: Operator, args: Arguments, kwargs: dict[str, Any]) -> Any:
    if func._schema.name == "aten::multinomial":
        return sampled_from(here, func, args, kwargs)
    if func._schema.name in ("aten::bernoulli", "aten::bernoulli_"):
        p = argument_named(func, args, kwargs, "p")
        probability = args[0] if p is None else p
        if is_float(probability):
            return _bernoulli(here, func, args, kwargs, probability)
    return here.random.draw(func, args, kwargs)


def _bernoulli(
    here: OperatorPass, func: Operator, args: Arguments, kwargs: dict[str, Any], probability: Tensor
) -> Tensor:
    """Compare computed probabilities with portable uniform numbers: a decision where the two are close."""
    p = probability.detach().double()
    point = here.random.thresholds(func, kwargs.get("generator"), p)
    flat = point.reshape(-1)
    moved = here.forced(p, lambda _: flat) if p.numel() else None
    drawn = (p if moved is None else moved) > point
    return args[0].copy_(drawn) if func._schema.is_mutable else drawn.to(args[0].dtype)


def _refuse_random(here: OperatorPass, func: Operator, args: Arguments, kwargs: dict[str, Any]) -> Any:
    if argument_named(func, args, kwargs, "dropout_p") == 0.0:
        return func(*args, **kwargs)
    instead = INSTEAD.get(table_name(func))
    raise Nondeterminism(
        f"operator {func}: draws random numbers that other devices cannot repeat; replaced are dropout, bernoulli, "
        "multinomial, rand*, randint, randperm, uniform_, normal, exponential_ and geometric_"
        + (f"; instead: {instead}" if instead else "")
    )


OWN_HANDLERS: dict[str, Handler] = {
    **BUCKET_HANDLERS,
    **SAMPLE_HANDLERS,
    **dict.fromkeys(("aten::div", *QUOTIENTS), _divided),
    **dict.fromkeys(("aten::convolution", "aten::convolution_backward"), _convolution),
    **dict.fromkeys(("aten::sum", "aten::cumsum", "aten::prod", "aten::cumprod"), _total),
    **dict.fromkeys(LOGICAL, _logical),
    "aten::atan2": _angle,
    "aten::equal": _equal,
    "aten::_to_copy": _cast,
    "aten::copy_": _copy,
    "aten::_grouped_mm": _grouped,
    "aten::_local_scalar_dense": _read,
    "torchvision::nms": suppressed,
}


def _of_real_numbers(handler: Handler) -> Handler:
    """Return ``handler`` for an operator that jumps of complex numbers, with whole powers excepted."""

    def handle(here: OperatorPass, func: Operator, args: Arguments, kwargs: dict[str, Any]) -> Any:
        given = [each for each in args[:2] if isinstance(each, Tensor)]
        if any(each.is_complex() and each.numel() for each in given) and not _is_smooth_power(func, args):
            raise Nondeterminism(
                f"operator {func}: jumps, of complex numbers, and has no decision site; instead: write it with the real and the "
                "imaginary part (atan2 and hypot for angle and size)"
            )
        return handler(here, func, args, kwargs)

    return handle


def _is_smooth_power(func: Operator, args: Arguments) -> bool:
    """Whether a power is a whole one, or one of a positive number: neither jumps."""
    if table_name(func) != "aten::pow":
        return False
    base, power = args[:2]
    is_whole = isinstance(power, (int, float)) and float(power).is_integer()
    return is_whole or (isinstance(base, (int, float)) and base > 0)


def handler_for(func: Operator) -> Handler:
    """Return what is done with calls of ``func``."""
    handler = _handler_for(func, table_name(func))
    return _of_real_numbers(handler) if table_name(func) in CUT | COMPARED else handler


def _handler_for(func: Operator, name: str) -> Handler:
    for key in (name, f"{name}.{func._schema.overload_name}"):
        if key in CHOICE_HANDLERS:
            return CHOICE_HANDLERS[key]
    if name in ROW_HANDLERS and not func._schema.is_mutable:
        return _restricted(func, ROW_HANDLERS[name]) if name in RESTRICTED else ROW_HANDLERS[name]
    if name in RANDOM:
        return _random
    if torch.Tag.nondeterministic_seeded in func.tags:
        return _refuse_random
    if name in SWITCHES:
        return _switch
    if name in LATTICES:
        return _lattice
    if name in RESTRICTED:
        return _restricted(func)
    if name in OWN_HANDLERS:
        return OWN_HANDLERS[name]
    if name in UNSET:
        return _unset
    return _plain if name in SMOOTH or name in EXACT or name.startswith("prim::") else _unknown
