"""Operators on rows that cancel inside: float32 in, computed in float64, each result rounded once (spec/policies.md 8).

A fused float32 operator that cancels inside is as far off as its terms are large, and machines differ by as much: by 1e-2
of a gradient where a classifier is sure. What is computed here from equal inputs is equal on every processor, or differs
where two float64 evaluations straddle a rounding boundary of float32 (``numerics.rows``). Under ``fp64`` four operators keep
their relative accuracy by another form, and batch norm adds up its statistics pairwise: a processor's own kernel adds them
one by one and is off by 2**6 times what a CUDA device's is. Of sixteen-bit activations it takes them in float64 as well.

A result has the dtype, shape and meaning that torch gives it. Tensors of other dtypes, layouts and types go to torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tallystick.execution.dispatch.calls import Arguments, Operator, all_arguments, table_name
from tallystick.numerics import rows
from tallystick.numerics.rows import CHUNK, Form, Groups
from tallystick.numerics.tensor_measures import block_square_sums

NARROW = (torch.float32,)
BOTH = (torch.float32, torch.float64)  # of operators whose form is more accurate in float64 too
SIXTEEN_BIT = frozenset({torch.bfloat16, torch.float16})
DENSE = (Tensor, torch.nn.Parameter)
SUM, MEAN = 2, 1  # of a loss, as torch numbers reductions
LEAST_SQUARES = 2.0**-900  # a sum of squares of float64 numbers below which some of them may be lost
Row = Callable[..., Any]
RowHandler = Callable[[object, Operator, Arguments, dict[str, Any]], Any]


def _handler(rule: Row, dtypes: tuple[torch.dtype, ...] = NARROW, *, mixed: bool = False) -> RowHandler:
    """Return a handler that calls ``rule`` with the operator's arguments in the schema's order, defaults filled in.

    Tensors that are not dense or not of one of ``dtypes``, calls without elements, and those that ``rule`` answers with
    None (torch says what is wrong with them) go to torch. With ``mixed`` tensors of sixteen bits beside float32 ones become
    float32, and so is the first result of such a call narrowed again.
    """

    def handle(here: object, func: Operator, args: Arguments, kwargs: dict[str, Any]) -> Any:
        given = all_arguments(func, args, kwargs)
        narrow = _narrow_of(given) if mixed else None
        if narrow is not None:
            given = [
                value.float() if isinstance(value, Tensor) and value.dtype is narrow else value
                for value in given
            ]
        tensors = [value for value in given if isinstance(value, Tensor)]
        floats = [tensor for tensor in tensors if tensor.dtype.is_floating_point]
        if (
            floats
            and floats[0].dtype in dtypes
            and all(tensor.dtype is floats[0].dtype for tensor in floats)
            and all(map(_is_dense, tensors))
            and floats[0].numel()
        ):
            found = rule(*given)
            if found is not None:
                return found if narrow is None else (_narrowed(found[0], narrow), *found[1:])
        return func(*args, **kwargs)

    return handle


def _is_dense(x: Tensor) -> bool:
    """Whether it is a plain tensor with numbers in some memory: autograd's zeros have none."""
    return type(x) in DENSE and x.layout is torch.strided and not x._is_zerotensor()


def _narrow_of(given: Sequence[Any]) -> torch.dtype | None:
    """Return the sixteen-bit dtype that stands beside float32 in a call, or None."""
    found = {value.dtype for value in given if isinstance(value, Tensor) and value.dtype.is_floating_point}
    return next(iter(found & SIXTEEN_BIT)) if torch.float32 in found and len(found) == 2 else None


def _narrowed(result: Tensor | None, narrow: torch.dtype) -> Tensor | None:
    return None if result is None else result.to(narrow)


# -- softmax -------------------------------------------------------------------------------------


def _softmax(form: Form) -> Row:
    def rule(x: Tensor, dim: int, cast: bool | torch.dtype | None) -> Any:
        if cast not in (False, None, x.dtype) or not _is_dim(x, dim):
            return None
        return rows.softmax(x, dim, form)

    return rule


def _softmax_backward(form: Form) -> Row:
    def rule(grad_output: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Any:
        if input_dtype != output.dtype or grad_output.shape != output.shape or not _is_dim(output, dim):
            return None
        return rows.softmax_backward(grad_output, output, dim, form)

    return rule


def _is_dim(x: Tensor, dim: int) -> bool:
    rank = max(x.dim(), 1)
    return -rank <= dim < rank


def _slices(x: Tensor) -> Iterator[slice]:
    """Cut dimension 0 so that a slice of ``x`` has ``CHUNK`` elements, or as few as there can be."""
    height = max(1, CHUNK // (x.numel() // x.shape[0]))
    for top in range(0, x.shape[0], height):
        yield slice(top, top + height)


def _logsumexp(x: Tensor, dim: list[int], keepdim: bool) -> Any:
    if x.dim() == 0 or not dim or not all(_is_dim(x, d) for d in dim):
        return None
    if 0 in [d % x.dim() for d in dim]:
        return torch.logsumexp(x.double(), dim, keepdim).to(x.dtype)
    parts = [torch.logsumexp(x[part].double(), dim, keepdim).to(x.dtype) for part in _slices(x)]
    return torch.cat(parts)


# -- layer norm ----------------------------------------------------------------------------------


def _layer_norm(
    x: Tensor, normalized_shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> Any:
    inner = len(normalized_shape)
    shape = x.shape
    given = [list(each.shape) for each in (weight, bias) if each is not None]
    if not inner or any(sizes != list(normalized_shape) for sizes in (list(shape[-inner:]), *given)):
        return None
    matrix = x.contiguous().view(-1, shape[-inner:].numel())
    out, mean, rstd = rows.layer_norm(matrix, _dense(weight), _dense(bias), eps)
    per_row = (*shape[:-inner], *(1,) * inner)
    return out.view(shape), mean.view(per_row), rstd.view(per_row)


def _layer_norm_backward(
    grad_out: Tensor, x: Tensor, normalized_shape: list[int], mean: Tensor, rstd: Tensor, weight: Tensor | None,
    bias: Tensor | None, output_mask: list[bool],
) -> Any:  # fmt: skip
    n = x.shape[-len(normalized_shape) :].numel()
    dx, dw, db = rows.layer_norm_backward(
        grad_out.contiguous().view(-1, n), x.contiguous().view(-1, n), rstd.reshape(-1), _dense(weight),
        (output_mask[0], output_mask[1] or output_mask[2]),
    )  # fmt: skip
    return (
        None if dx is None else dx.view(x.shape),
        dw.to(x.dtype).view(normalized_shape) if dw is not None and output_mask[1] else None,
        db.to(x.dtype).view(normalized_shape) if db is not None and output_mask[2] else None,
    )


def _rms_norm(x: Tensor, normalized_shape: list[int], weight: Tensor | None, eps: float | None) -> Any:
    n = x.shape[-len(normalized_shape) :].numel()
    matrix = x.contiguous().view(-1, n)
    floor = torch.finfo(x.dtype).eps if eps is None else eps
    out, rstd = torch.empty_like(matrix), matrix.new_empty(matrix.shape[0])
    for part in _slices(matrix):
        wide = matrix[part].double()
        inverse = 1.0 / torch.sqrt(wide.square().mean(1, keepdim=True) + floor)
        out[part] = wide * inverse if weight is None else wide * inverse * weight.reshape(-1)
        rstd[part] = inverse.squeeze(1)
    per_row = (*x.shape[: -len(normalized_shape)], *(1,) * len(normalized_shape))
    return out.view(x.shape), rstd.view(per_row)


def _rms_norm_backward(
    grad_out: Tensor, x: Tensor, normalized_shape: list[int], rstd: Tensor, weight: Tensor | None, output_mask: list[bool]
) -> Any:  # fmt: skip
    n = x.shape[-len(normalized_shape) :].numel()
    matrix, dy, inverses = x.contiguous().view(-1, n), grad_out.contiguous().view(-1, n), rstd.reshape(-1, 1)
    dx, dw = torch.empty_like(matrix), x.new_zeros(n, dtype=torch.float64)
    for part in _slices(matrix):
        inverse, g = inverses[part].double(), dy[part].double()
        unit = matrix[part].double() * inverse
        a = g if weight is None else g * weight.reshape(-1)
        dx[part] = inverse * (a - unit * (a * unit).mean(1, keepdim=True))
        dw += (g * unit).sum(0)
    return (
        dx.view(x.shape) if output_mask[0] else None,
        dw.to(x.dtype).view(normalized_shape) if output_mask[1] else None,
    )


def _dense(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


# -- group and batch norm: rows are the elements of one channel of one example -------------------


def _laid_out_as(x: Tensor, out: Tensor) -> Tensor:
    """Return ``out`` in the memory format of ``x``, as torch's norms do."""
    for rank, layout in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if x.dim() == rank and not x.is_contiguous() and x.is_contiguous(memory_format=layout):
            return out.view(x.shape).contiguous(memory_format=layout)
    return out.view(x.shape)


def _group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, n: int, channels: int, size: int, group: int, eps: float
) -> Any:  # fmt: skip
    matrix, groups = x.contiguous().view(n * channels, size), Groups(n, channels, channels // group)
    out, mean, _, inverse = rows.group_norm(matrix, groups, _dense(weight), _dense(bias), eps)
    return (
        _laid_out_as(x, out),
        mean.to(x.dtype).view(n, group),
        inverse.to(x.dtype).view(n, group),
    )


def _group_norm_backward(
    grad_out: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, n: int, channels: int, size: int, group: int,
    output_mask: list[bool],
) -> Any:  # fmt: skip
    inverse = rstd.double().reshape(-1)
    groups = Groups(n, channels, channels // group)
    return _normed_backward(grad_out, x, groups, weight, inverse, None, output_mask)


def _normed_backward(
    grad_out: Tensor, x: Tensor, groups: Groups, weight: Tensor | None, inverse: Tensor, given: Tensor | None,
    output_mask: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    count = groups.examples * groups.channels
    dy, matrix = grad_out.contiguous().view(count, -1), x.contiguous().view(count, -1)
    dx, dw, db = rows.group_norm_backward(dy, matrix, groups, _dense(weight), inverse, given, output_mask[0])
    return (
        None if dx is None else _laid_out_as(x, dx),
        dw.to(x.dtype) if output_mask[1] else None,
        db.to(x.dtype) if output_mask[2] else None,
    )


def _batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None,
    training: bool, momentum: float, eps: float,
) -> Any:  # fmt: skip
    if x.dim() < 2 or (not training and (running_mean is None or running_var is None)):
        return None
    groups = Groups(*x.shape[:2])
    given = None
    if not training and running_mean is not None and running_var is not None:
        given = running_mean.double(), running_var.double()
    matrix = x.contiguous().view(groups.examples * groups.channels, -1)
    out, mean, variance, inverse = rows.group_norm(matrix, groups, _dense(weight), _dense(bias), eps, given)
    out = _laid_out_as(x, out)
    if not training:
        return out, x.new_empty(0), x.new_empty(0)
    size = groups.examples * matrix.shape[1]
    for running, fresh in ((running_mean, mean), (running_var, variance * (size / max(size - 1, 1)))):
        if running is not None:
            running.copy_((1.0 - momentum) * running.double() + momentum * fresh)
    return out, mean.to(x.dtype), inverse.to(x.dtype)


def _batch_norm_backward(
    grad_out: Tensor, x: Tensor, weight: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None,
    save_mean: Tensor | None, save_invstd: Tensor | None, train: bool, eps: float, output_mask: list[bool],
) -> Any:  # fmt: skip
    groups = Groups(*x.shape[:2])
    if train and save_invstd is not None:
        inverse, given = save_invstd.double(), None
    elif not train and running_mean is not None and running_var is not None:
        inverse, given = 1.0 / torch.sqrt(running_var.double() + eps), running_mean.double()
    else:
        return None
    return _normed_backward(grad_out, x, groups, weight, inverse, given, output_mask)


def _cudnn_batch_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None,
    training: bool, momentum: float, eps: float,
) -> Any:  # fmt: skip
    found = _batch_norm(x, weight, bias, running_mean, running_var, training, momentum, eps)
    return None if found is None else (*found, x.new_empty(0, dtype=torch.uint8))


def _cudnn_batch_norm_backward(
    x: Tensor, grad_output: Tensor, weight: Tensor, running_mean: Tensor | None, running_var: Tensor | None,
    save_mean: Tensor | None, save_var: Tensor | None, eps: float, reserve: Tensor,
) -> Any:  # fmt: skip
    return _batch_norm_backward(
        grad_output, x, weight, running_mean, running_var, save_mean, save_var, True, eps, [True] * 3
    )


# -- norms and losses ----------------------------------------------------------------------------


class RowOperators(TorchDispatchMode):
    """Inside, row operators are computed as within a step's passes, and all else as torch does."""

    def __torch_dispatch__(self, func: Operator, types: Any, args: Arguments = (), kwargs: Any = None) -> Any:
        """Run ``func``, by its rule if it is one of them."""
        handler = None if func._schema.is_mutable else ROW_HANDLERS.get(table_name(func))
        if handler is None:
            return func(*args, **kwargs or {})
        return handler(None, func, args, kwargs or {})


def _whole_norm(x: Tensor) -> Tensor | None:
    """Return the 2-norm of all elements; None where float64 squares of float64 numbers leave their range.

    A processor's own kernel adds float32 numbers one by one: of 6 million it is off by up to 3.6e-4, which clipping hands to
    every gradient.
    """
    if x.device.type != "cpu":
        return torch.linalg.vector_norm(x, dtype=torch.float64).to(x.dtype)
    squares = float(block_square_sums(x.contiguous(), 1)[0])
    if x.dtype is torch.float64 and not LEAST_SQUARES <= squares < math.inf:
        return None
    return torch.tensor(math.sqrt(squares), dtype=torch.float64).to(x.dtype)


def _vector_norm(
    x: Tensor, order: Any, dim: list[int] | None, keepdim: bool, dtype: torch.dtype | None
) -> Any:
    if dtype is not None:
        return None
    dims = [d % x.dim() for d in dim or () if x.dim() and _is_dim(x, d)]
    is_whole = len(dims) == len(dim or ()) and len(set(dims)) == len(dims) and len(dims) in (0, x.dim())
    if order == 2 and is_whole:
        whole = _whole_norm(x)
        return None if whole is None else whole.reshape([1] * x.dim() if keepdim else [])
    if x.dtype is torch.float64:
        return None
    return torch.linalg.vector_norm(x, order, dim, keepdim, dtype=torch.float64).to(x.dtype)


def _foreach_norm(here: object, func: Operator, args: Arguments, kwargs: dict[str, Any]) -> Any:
    tensors, order, dtype = all_arguments(func, args, kwargs)
    if order == 2 and dtype is None and all(x.dtype in BOTH and x.numel() and _is_dense(x) for x in tensors):
        found = [_whole_norm(x) for x in tensors]
        if all(norm is not None for norm in found):
            return found
    return func(*args, **kwargs)


def _norm(x: Tensor, order: Any, *where: Any) -> Any:
    if len(where) not in (0, 2):  # with a dtype
        return None
    dim, keepdim = where or (None, False)
    return _vector_norm(x, 2 if order is None else order, dim, keepdim, None)


def _bce_with_logits(
    logits: Tensor, target: Tensor, weight: Tensor | None, pos_weight: Tensor | None, reduction: int
) -> Any:  # fmt: skip
    """Terms that are all positive: ``(1 - t) x``, or ``-t x`` for negative x, and ``log1p(exp(-|x|))``."""
    if target.shape != logits.shape or logits.dim() == 0:
        return None
    out = torch.empty_like(logits, memory_format=torch.contiguous_format) if not reduction else None
    total = logits.new_zeros((), dtype=torch.float64)
    # one dimension is cut, so what is broadcast along the others may stay as it is
    wider = [None if each is None else each.expand(logits.shape) for each in (weight, pos_weight)]
    for part in _slices(logits):
        x, t = logits[part].double(), target[part].double()
        weights, positive = (None if each is None else each[part].double() for each in wider)
        up = t if positive is None else positive * t
        loss = torch.where(x >= 0.0, (1.0 - t) * x, -up * x)
        loss += (up + (1.0 - t)) * torch.log1p(torch.exp(-x.abs()))
        if weights is not None:
            loss *= weights
        if out is None:
            total += loss.sum()
        else:
            out[part] = loss
    return (
        out if out is not None else (total / logits.numel() if reduction == MEAN else total).to(logits.dtype)
    )


ROW_HANDLERS: dict[str, RowHandler] = {
    "aten::_log_softmax": _handler(_softmax(Form.LOG_SOFTMAX), BOTH),
    "aten::_log_softmax_backward_data": _handler(_softmax_backward(Form.LOG_SOFTMAX), BOTH),
    "aten::_softmax": _handler(_softmax(Form.SOFTMAX)),
    "aten::_safe_softmax": _handler(_softmax(Form.SAFE_SOFTMAX)),
    "aten::_softmax_backward_data": _handler(_softmax_backward(Form.SOFTMAX), BOTH),
    "aten::logsumexp": _handler(_logsumexp),
    "aten::native_layer_norm": _handler(_layer_norm),
    "aten::native_layer_norm_backward": _handler(_layer_norm_backward),
    "aten::_fused_rms_norm": _handler(_rms_norm),
    "aten::_fused_rms_norm_backward": _handler(_rms_norm_backward),
    "aten::native_group_norm": _handler(_group_norm),
    "aten::native_group_norm_backward": _handler(_group_norm_backward),
    "aten::native_batch_norm": _handler(_batch_norm, BOTH, mixed=True),
    "aten::native_batch_norm_backward": _handler(_batch_norm_backward, BOTH, mixed=True),
    "aten::cudnn_batch_norm": _handler(_cudnn_batch_norm, BOTH, mixed=True),
    "aten::cudnn_batch_norm_backward": _handler(_cudnn_batch_norm_backward, BOTH, mixed=True),
    "aten::_foreach_norm": _foreach_norm,
    "aten::linalg_vector_norm": _handler(_vector_norm, BOTH),
    "aten::norm": _handler(_norm, BOTH),
    "aten::binary_cross_entropy_with_logits": _handler(_bce_with_logits, BOTH),
}
"""The operators, by their names in the operator table."""
