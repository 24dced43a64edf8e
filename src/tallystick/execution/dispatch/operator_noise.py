"""How far each operator's result can move from one machine to another, by the operator's own structure.

An operator that rounds once, or whose roundings do not cancel, moves by a unit in the last place of its result. An operator
that cancels inside moves by more, and by how much follows from what it cancels:

* ``inputs``: its error is that of inputs moved by their last bit (backward stability: contractions, reductions, statistics,
  transforms, solvers). Moved inputs also make the machine's own roundings inside fall anew, so noise grows with the length
  of a cancelling sum as the machine's own error does.
* ``length``: where terms are added one by one, a sum of one sign is off by the root of their number, not by its last bit.
* ``straight``: where all of a long sum is added one by one and makes a single number, that holds of each term: a sum that
  cancels is small beside its error, and no other number of the same call shows how large that is.
* ``beside``: the result is the product of an argument and a factor with an absolute error of a last bit of 1, which no moved
  input shows: ``x`` times ``1 + erf(x)`` in the tails of a GELU.

Zero stays zero, as what is masked or never written is zero everywhere; where zero comes about by cancellation, moved inputs
do not cancel. Whole numbers up to ``WHOLE`` stay only where ``whole`` says that the operator computes them without an error:
masks, counts, one-hot rows. A probability of 1.0 is a rounded number like any other.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tallystick.execution.dispatch.calls import Arguments, Operator, argument_named, table_name
from tallystick.execution.dispatch.table import BUCKETS, CHOICES, EXACT, RANDOM, STATEFUL

WHOLE: Mapping[torch.dtype, float] = {
    torch.float32: 2.0**11, torch.complex64: 2.0**11, torch.float64: 2.0**26, torch.complex128: 2.0**26,
}  # fmt: skip
"""Formats that move by their last place, and up to which whole numbers are taken for counts: their sums are exact."""
SIXTEEN_BIT = frozenset({torch.bfloat16, torch.float16})
ATTENTION_UNITS = 8.0
"""Last places of float32 by which attention's scores move where its probabilities are rounded to sixteen bits inside."""
SHARE = 2.0**-13
"""Of sixteen-bit results, those whose float32 numbers lie within four last places of a boundary: 8 of 2**16."""
FEWEST = 16
"""Sixteen-bit results that move in every call, but at most one in ``ONE_IN``: what is rare must be seen to be measured."""
ONE_IN = 6
SHORT = 16.0
"""Root of the number of terms from which on sums are taken to be off by more than their last place (docs/adr/0025)."""

APART = 1.5
"""Units by which a result moves at least whose inputs were moved by one: the two never undo each other."""

Length = Callable[[Arguments, Tensor, int], float]
"""Terms of result ``number`` of a call."""


def _products(args: Arguments, result: Tensor, number: int) -> float:
    return [x for x in args if isinstance(x, Tensor)][-2].shape[-1]


def _window(args: Arguments, result: Tensor, number: int) -> float:
    return args[1].numel() / args[1].shape[0]


def _window_backward(args: Arguments, result: Tensor, number: int) -> float:
    gradient, weight = args[0], args[2]
    if number == 2:
        return 1  # of a bias: a sum of its own, see ``handlers``
    return weight.numel() / weight.shape[1] if number == 0 else gradient.numel() / gradient.shape[1]


def _reduced(args: Arguments, result: Tensor, number: int) -> float:
    return (args[0][number] if isinstance(args[0], (list, tuple)) else args[0]).numel() / result.numel()


def _squares(args: Arguments, result: Tensor, number: int) -> float:
    # Of all elements it is no long sum, see ``rows``.
    is_whole = result.numel() == 1 and (len(args) < 2 or args[1] in (None, 2))
    return 1 if is_whole else _reduced(args, result, number)


def _scattered(args: Arguments, result: Tensor, number: int) -> float:
    return max(
        (x.numel() for x in tree_leaves(args) if isinstance(x, Tensor) and x.dtype == torch.int64), default=1
    )


def _running(args: Arguments, result: Tensor, number: int) -> float:
    return max(args[0].shape, default=1)


@dataclass(frozen=True)
class Noise:
    """What moves where an operator runs.

    Attributes:
        inputs: the first so many arguments are moved before it runs; none with 0.
        length: how many terms a result has, where they are added one after the other; None where that is not so, or sums
            are built as trees.
        beside: position of an argument whose last bit is added to that of the result; None for none.
        whole: whether whole numbers make whole numbers without an error.
        unless: an argument and the value with which nothing cancels: then ``inputs`` do not move.
        touched: whether the result is an argument in which only some elements are new.
        straight: whether moved inputs move by as many units as ``length`` says.
    """

    inputs: int = 0
    length: Length | None = None
    beside: int | None = None
    whole: bool = False
    unless: tuple[str, Any] | None = None
    touched: bool = False
    straight: bool = False

    @property
    def sixteenths(self) -> float:
        """Which share of sixteen-bit results moves where noise of the float32 numbers behind them meets a rounding boundary."""
        return 0.0 if self.whole and not self.inputs else SHARE

    def units(self, args: Arguments, result: Tensor, number: int, moved: bool) -> float:
        """Return by how many units in the last place result ``number`` of a call moves, whose inputs were moved or not."""
        terms = 1 if self.length is None or result.numel() == 0 else self.length(args, result, number)
        return max(APART if moved else 1.0, math.sqrt(terms) / SHORT)

    def input_units(self, args: Arguments) -> float:
        """Return by how many units in the last place the inputs of a call move."""
        terms = max((x.numel() for x in args if isinstance(x, Tensor)), default=1) if self.straight else 1
        return max(1.0, math.sqrt(terms) / SHORT)

    def moved_inputs(self, func: Operator, args: Arguments, kwargs: dict[str, Any]) -> int:
        """Return how many of the first arguments move in this call."""
        if self.unless is None:
            return self.inputs
        name, value = self.unless
        return 0 if argument_named(func, args, kwargs, name) == value else self.inputs


ALL = 1 << 10  # arguments
MOVES: Mapping[str, tuple[str, tuple[object, ...]]] = {
    **dict.fromkeys(
        ("aten::index_put", "aten::_index_put_impl_", "aten::put"), ("accumulate", (None, False))
    ),
    **dict.fromkeys(("aten::scatter_reduce", "aten::index_reduce"), ("reduce", ("amax", "amin"))),
    "aten::linalg_vector_norm": ("ord", (math.inf, -math.inf)),
    "aten::norm": ("p", (math.inf, -math.inf)),
    "aten::div": ("rounding_mode", ("floor", "trunc")),
    **dict.fromkeys(
        ("aten::sum", "aten::cumsum", "aten::prod", "aten::cumprod"),
        ("dtype", (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)),
    ),
}
"""Operators that only choose or move values, or give whole numbers, where that argument is one of these."""
OF_ONE = {"aten::sum": "", "aten::mean": "", "aten::linalg_vector_norm": "ord", "aten::norm": "p"}
"""Operators that leave one element as it is, up to its sign, with the argument that names a norm's order."""


def _noises(noise: Noise, names: str) -> dict[str, Noise]:
    return {f"aten::{name}": noise for name in names.split()}


OPERATOR_NOISE: Mapping[str, Noise] = {
    # One operation of IEEE 754 each: right to the last bit everywhere, and the same for whole numbers.
    **_noises(
        Noise(whole=True),
        """
        _foreach_div _foreach_mul _pack_padded_sequence_backward _prelu_kernel complex div hardtanh_backward imag
        leaky_relu_backward mul native_dropout_backward nll_loss2d_backward nll_loss_backward real square
        """,
    ),
    # x + alpha y with or without fused multiply-add: the product is rounded or not.
    **_noises(Noise(ALL, whole=True, unless=("alpha", 1)), "_foreach_add _foreach_sub add rsub sub"),
    **_noises(
        Noise(ALL, whole=True),
        "_foreach_addcdiv _foreach_addcmul _foreach_lerp addcdiv addcmul addr cross lerp linalg_cross tanh_backward",
    ),
    # Sums of products and of squares: blocks and lanes differ, within them terms are added one by one.
    **_noises(
        Noise(ALL, _products, whole=True),
        "_grouped_mm addbmm addmm addmv baddbmm bmm linear matmul mm mv",
    ),
    **_noises(Noise(ALL, _products, whole=True, straight=True), "dot vdot"),
    **_noises(
        Noise(ALL, _window, whole=True),
        "_convolution convolution convolution_overrideable cudnn_convolution mkldnn_convolution slow_conv3d_forward thnn_conv2d",
    ),
    **_noises(Noise(ALL, _window_backward, whole=True), "convolution_backward"),
    **_noises(Noise(ALL, _squares), "_foreach_norm linalg_vector_norm norm"),
    **_noises(
        Noise(ALL, _scattered, whole=True, touched=True),
        "index_add index_put index_reduce put scatter_add scatter_reduce",
    ),
    **_noises(
        Noise(ALL, _scattered, whole=True),
        """
        _coalesce _embedding_bag _embedding_bag_backward _embedding_bag_dense_backward _embedding_bag_forward_only
        coalesce embedding_dense_backward
        """,
    ),
    **_noises(Noise(ALL, _running, whole=True), "cumprod cumsum prod"),
    # Sums that torch builds as trees, and those of a few terms.
    **_noises(
        Noise(ALL, whole=True),
        """
        _adaptive_avg_pool2d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d
        _adaptive_avg_pool3d_backward _segment_reduce_backward _trilinear _upsample_nearest_exact1d_backward
        _upsample_nearest_exact2d_backward _upsample_nearest_exact3d_backward adaptive_avg_pool1d
        adaptive_max_pool2d_backward adaptive_max_pool3d_backward affine_grid_generator avg_pool1d
        avg_pool2d avg_pool2d_backward avg_pool3d avg_pool3d_backward binary_cross_entropy col2im einsum
        huber_loss l1_loss linear_backward mean mse_loss nll_loss2d_forward nll_loss_forward
        reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward
        replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward segment_reduce
        smooth_l1_loss soft_margin_loss sum sum_to_size trace upsample_nearest1d_backward
        upsample_nearest2d_backward upsample_nearest3d_backward
        """,
    ),
    # Statistics and what divides by them; softmax and attention; transforms and solvers; recurrent cells.
    **_noises(
        Noise(ALL),
        """
        _cdist_backward _cdist_forward _efficient_attention_backward _efficient_attention_forward
        _euclidean_dist _fft_c2c _fft_c2r _fft_r2c _flash_attention_backward _flash_attention_forward
        _fused_rms_norm _linalg_det _linalg_slogdet _linalg_solve_ex _log_softmax _log_softmax_backward_data
        _logcumsumexp _safe_softmax _scaled_dot_product_attention_math _scaled_dot_product_cudnn_attention
        _scaled_dot_product_cudnn_attention_backward _scaled_dot_product_efficient_attention
        _scaled_dot_product_efficient_attention_backward _scaled_dot_product_flash_attention
        _scaled_dot_product_flash_attention_backward _scaled_dot_product_flash_attention_for_cpu
        _scaled_dot_product_flash_attention_for_cpu_backward
        _scaled_dot_product_fused_attention_overrideable _softmax _softmax_backward_data
        _thnn_fused_gru_cell _thnn_fused_gru_cell_backward _thnn_fused_lstm_cell
        _thnn_fused_lstm_cell_backward_impl _upsample_bicubic2d_aa _upsample_bicubic2d_aa_backward
        _upsample_bilinear2d_aa _upsample_bilinear2d_aa_backward _weight_norm_interface
        binary_cross_entropy_with_logits cholesky digamma inverse layer_norm lgamma linalg_cholesky_ex
        linalg_inv_ex linalg_lu_solve linalg_matrix_exp linalg_solve_ex linalg_solve_triangular logaddexp
        logaddexp2 logcumsumexp logit logsumexp   native_group_norm
        native_layer_norm norm_except_dim polygamma rms_norm std std_mean triangular_solve upsample_bicubic2d
        upsample_bicubic2d_backward upsample_bilinear2d upsample_bilinear2d_backward upsample_linear1d
        upsample_linear1d_backward upsample_trilinear3d upsample_trilinear3d_backward var var_mean
        """,
    ),
    **_noises(
        Noise(ALL, _reduced),
        """
        _fused_rms_norm_backward _weight_norm_interface_backward batch_norm_backward
        cudnn_batch_norm_backward native_batch_norm_backward native_group_norm_backward
        native_layer_norm_backward
        """,
    ),
    **_noises(Noise(1, _reduced), " ".join(name.removeprefix("aten::") for name in STATEFUL)),
    # x (1 + erf x) / 2 and the like, and their derivatives.
    **_noises(Noise(beside=0), "gelu gelu_backward"),
}
"""By table name; an operator that is not here moves by a unit of its result, whole numbers too."""

_USUAL = Noise()


@cache
def find_noise(func: Operator) -> Noise | None:
    """Return what moves where ``func`` runs; None if it moves nothing: it copies, chooses, or draws portable numbers."""
    name = table_name(func)
    exact = name in EXACT | RANDOM | BUCKETS or {name, f"{name}.{func._schema.overload_name}"} & CHOICES
    return None if exact else OPERATOR_NOISE.get(name, _USUAL)


def only_moves(func: Operator, args: Arguments, kwargs: dict[str, Any]) -> bool:
    """Whether this call of an operator that may add only puts values into places, or chooses between them."""
    name, values = MOVES.get(table_name(func), ("", ()))
    is_moved = bool(values) and argument_named(func, args, kwargs, name) in values
    return is_moved or (table_name(func) in OF_ONE and _adds_up_one(func, args, kwargs))


def _adds_up_one(func: Operator, args: Arguments, kwargs: dict[str, Any]) -> bool:
    """Whether each result is made of one element alone: its sum and mean, and its size where that is a norm, as it is."""
    x, dims = args[0], argument_named(func, args, kwargs, "dim")
    order = argument_named(func, args, kwargs, OF_ONE[table_name(func)])
    if not isinstance(x, Tensor) or x.is_complex() or order not in (None, 1, 2):  # of complex numbers a root
        return False
    if dims is None or dims == [] or not x.dim():
        return x.numel() == 1
    return math.prod(x.shape[d] for d in ([dims] if isinstance(dims, int) else dims)) == 1


@cache
def written_by(func: Operator) -> frozenset[int]:
    """Return the positions of the arguments that ``func`` writes into; keyword-only ones are counted on."""
    return frozenset(
        position
        for position, declared in enumerate(func._schema.arguments)
        if declared.alias_info is not None and declared.alias_info.is_write
    )


class Sixteen(enum.Enum):
    """How the noise of sixteen-bit results comes about, always that of float32 numbers behind them."""

    ACCUMULATED = "sums, repeated in float32 and rounded once"
    ATTENTION = "probabilities are rounded to sixteen bits inside: its own kernel, with scores moved"
    ELSE = "a small share of the results"


def sixteen_bit(func: Operator, noise: Noise, args: Arguments, kwargs: dict[str, Any]) -> Sixteen:
    """Return how sixteen-bit results of this call move; ``ELSE`` where there are none."""
    floats = [x.dtype for x in tree_leaves(args) if isinstance(x, Tensor) and x.is_floating_point()]
    if not floats or not SIXTEEN_BIT.issuperset(floats[:1]):
        return Sixteen.ELSE
    if "scaled_dot_product" in table_name(func):
        return Sixteen.ATTENTION
    if (
        func._schema.is_mutable
        or noise.touched
        or not noise.whole
        or not noise.moved_inputs(func, args, kwargs)
    ):
        return Sixteen.ELSE
    return Sixteen.ACCUMULATED if SIXTEEN_BIT.issuperset(floats) else Sixteen.ELSE
