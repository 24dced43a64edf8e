"""The operator table: which operators are smooth, which jump and where, which draw random numbers.

Names are ``namespace::name`` without overload; in-place forms share their entry. An operator
on floating tensors that stands in no table is *unknown*: recording stops and names it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Points = Callable[[tuple[Any, ...], dict[str, Any]], tuple[float, ...]]


@dataclass(frozen=True)
class Switch:
    """An operator whose output or gradient jumps where argument ``argument`` crosses one of ``points``."""

    argument: int
    points: Points


def _at(*values: float) -> Points:
    return lambda args, kwargs: values


def _argument(position: int, name: str, default: float | None = None) -> Points:
    def points(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[float, ...]:
        value = args[position] if len(args) > position else kwargs.get(name, default)
        return () if value is None else (float(value),)

    return points


def _both_signs(position: int, name: str, default: float) -> Points:
    one = _argument(position, name, default)
    return lambda args, kwargs: tuple(sign * value for value in one(args, kwargs) for sign in (-1.0, 1.0))


def _range(low: int, high: int) -> Points:
    lower, upper = _argument(low, "min_val", -1.0), _argument(high, "max_val", 1.0)
    return lambda args, kwargs: lower(args, kwargs) + upper(args, kwargs)


def _softplus(beta: int, threshold: int) -> Points:
    b, t = _argument(beta, "beta", 1.0), _argument(threshold, "threshold", 20.0)
    return lambda args, kwargs: (t(args, kwargs)[0] / b(args, kwargs)[0],)


# ReLU is continuous, but its backward pass reads the branch from the output: the site is at the input.
SWITCHES: Mapping[str, Switch] = {
    "aten::relu": Switch(0, _at(0.0)),
    "aten::sign": Switch(0, _at(0.0)),
    "aten::sgn": Switch(0, _at(0.0)),
    "aten::threshold": Switch(0, _argument(1, "threshold")),
    "aten::threshold_backward": Switch(1, _argument(2, "threshold")),
    "aten::hardtanh_backward": Switch(1, _range(2, 3)),
    "aten::leaky_relu_backward": Switch(1, _at(0.0)),
    "aten::elu_backward": Switch(5, _at(0.0)),
    "aten::hardswish_backward": Switch(1, _at(-3.0, 3.0)),
    "aten::hardsigmoid_backward": Switch(1, _at(-3.0, 3.0)),
    "aten::_prelu_kernel_backward": Switch(1, _at(0.0)),
    "aten::hardshrink": Switch(0, _both_signs(1, "lambd", 0.5)),
    "aten::hardshrink_backward": Switch(1, _both_signs(2, "lambd", 0.5)),
    "aten::softshrink_backward": Switch(1, _both_signs(2, "lambd", 0.5)),
    "aten::softplus": Switch(0, _softplus(1, 2)),
    "aten::softplus_backward": Switch(1, _softplus(2, 3)),
    "aten::gt": Switch(0, _argument(1, "other")),
    "aten::ge": Switch(0, _argument(1, "other")),
    "aten::lt": Switch(0, _argument(1, "other")),
    "aten::le": Switch(0, _argument(1, "other")),
    "aten::eq": Switch(0, _argument(1, "other")),
    "aten::ne": Switch(0, _argument(1, "other")),
    "aten::any": Switch(0, _at(0.0)),
    "aten::all": Switch(0, _at(0.0)),
    "aten::logical_not": Switch(0, _at(0.0)),
    "aten::nonzero": Switch(0, _at(0.0)),
}
COMPARISONS = frozenset({"aten::gt", "aten::ge", "aten::lt", "aten::le", "aten::eq", "aten::ne"})

# Jump at every point of a lattice: offset + whole numbers.
LATTICES: Mapping[str, float] = {
    "aten::floor": 0.0,
    "aten::ceil": 0.0,
    "aten::trunc": 0.0,
    "aten::frac": 0.0,
    "aten::round": 0.5,
}

# Operators that choose an index; each has its own handler in capture.
CHOICES = frozenset(
    {
        "aten::max_pool2d_with_indices",
        "aten::max_pool3d_with_indices",
        "aten::adaptive_max_pool2d",
        "aten::adaptive_max_pool3d",
        "aten::max.dim",
        "aten::min.dim",
        "aten::argmax",
        "aten::argmin",
        "aten::topk",
        "aten::sort",
        "aten::median.dim",
        "aten::kthvalue",
    }
)

# Smooth of real numbers, and jump of complex ones, along a cut from zero or from one; or compare numbers, which complex ones have
# no decision for.
CUT = frozenset(
    f"aten::{name}"
    for name in "acos acosh angle asin asinh atan atanh log log10 log1p log2 logit pow rsqrt sqrt".split()
)
COMPARED = COMPARISONS | {
    f"aten::{name}" for name in "all any equal logical_and logical_not logical_or logical_xor nonzero".split()
}

# Ask of both their arguments whether they are zero.
LOGICAL = frozenset({"aten::logical_and", "aten::logical_or", "aten::logical_xor"})

# Ask between which of several points a number lies; each has its own handler.
BUCKETS = frozenset({"aten::bucketize", "aten::searchsorted", "aten::histc"})

# Replaced by Philox; any other operator tagged as random is refused.
RANDOM = frozenset(
    {
        "aten::native_dropout",
        "aten::bernoulli",
        "aten::bernoulli_",
        "aten::rand",
        "aten::rand_like",
        "aten::randn",
        "aten::randn_like",
        "aten::randint",
        "aten::randint_like",
        "aten::randperm",
        "aten::uniform_",
        "aten::normal_",
        "aten::normal",
        "aten::exponential_",
        "aten::geometric_",
        "aten::multinomial",
        "aten::random_",
    }
)

# Do not read what they write, although it is an argument.
OVERWRITES = frozenset({"aten::copy_", "aten::fill_", "aten::zero_"}) | {
    name for name in RANDOM if name.endswith("_")
}

# Give memory whose contents nobody may rely on.
EMPTY = frozenset(
    f"aten::{name}" for name in "empty empty_like new_empty empty_strided new_empty_strided".split()
)

# Leave memory unset.
UNSET = EMPTY | {"aten::resize_", "aten::resize_as_"}

# Move, choose by integers, or compute without rounding: equal inputs give equal outputs everywhere.
EXACT = frozenset(
    f"aten::{name}"
    for name in """
    _coalesced_ _conj _foreach_clamp_max _foreach_clamp_min _foreach_copy_
    _has_compatible_shallow_copy_type _has_same_storage_numel _index_put_impl_ _indices
    _local_scalar_dense _neg_view _nested_tensor_size _nnz _pack_padded_sequence _reshape_alias
    _reshape_copy _sparse_coo_tensor_with_dims_and_tensors _to_copy _unsafe_index _unsafe_index_put
    _unsafe_view _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d _values
    abs alias alias_copy all amax amin aminmax any arange as_strided as_strided_copy as_strided_scatter
    bitwise_and bitwise_not bitwise_or
    bitwise_xor broadcast_to cat ceil channel_shuffle chunk clamp clamp_max clamp_min clone
    constant_pad_nd contiguous copy copy_ dense_dim detach detach_ diag_embed diagonal diagonal_backward diagonal_copy
    diagonal_scatter embedding empty empty_like empty_strided eq expand expand_copy eye fill fill_ flip
    floor floor_divide fmax fmin full full_like gather ge gt hardshrink hardtanh im2col index index_copy index_fill
    index_select is_coalesced is_same_size isfinite isinf isnan isneginf isposinf le leaky_relu lift
    lift_fresh lift_fresh_copy linspace logical_and logical_not logical_or logical_xor lt masked_fill
    masked_scatter masked_scatter_backward masked_select max max_pool2d_with_indices_backward
    max_pool3d_with_indices_backward max_unpool2d max_unpool3d maximum median min minimum movedim nan_to_num
    narrow narrow_copy native_channel_shuffle ne neg
    new_empty new_empty_strided new_full new_ones new_zeros nonzero ones ones_like permute permute_copy pixel_shuffle
    pixel_unshuffle reflection_pad1d reflection_pad2d reflection_pad3d relu repeat repeat_interleave
    replication_pad1d replication_pad2d replication_pad3d resize_ resize_as_ roll rot90 round
    scalar_tensor scatter select select_backward select_copy select_scatter set_ sgn sign slice
    slice_backward slice_copy slice_scatter softshrink sparse_dim split split_with_sizes
    split_with_sizes_copy squeeze squeeze_copy stack
    sym_numel sym_size sym_stride t t_copy take threshold threshold_backward transpose transpose_copy tril tril_indices triu
    triu_indices trunc unbind unbind_copy unfold unfold_backward unfold_copy unsafe_chunk unsafe_split unsafe_split_with_sizes
    unsqueeze unsqueeze_copy upsample_nearest1d upsample_nearest2d upsample_nearest3d
    value_selecting_reduction_backward view view_as_complex view_as_real view_copy where zero zero_
    zeros zeros_like
    """.split()
)

# Give whole numbers for floating arguments, which depend on none of them, or on whether they are numbers at all.
WHOLE = frozenset(
    f"aten::{name}"
    for name in """
    _has_compatible_shallow_copy_type _indices _pack_padded_sequence full_like is_same_size isfinite
    isinf isnan isneginf isposinf new_full new_ones new_zeros ones_like zeros_like
    """.split()
)

# Continuous where training meets them; rounded differently by different machines.
SMOOTH = frozenset(
    f"aten::{name}"
    for name in """
    _adaptive_avg_pool2d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d
    _adaptive_avg_pool3d_backward _batch_norm_with_update _cdist_backward _cdist_forward _coalesce
    _convolution _ctc_loss _ctc_loss_backward _efficient_attention_backward _efficient_attention_forward
    _embedding_bag _embedding_bag_backward _embedding_bag_dense_backward _embedding_bag_forward_only
    _euclidean_dist _fft_c2c _fft_c2r _fft_r2c _flash_attention_backward _flash_attention_forward
    _foreach_add _foreach_add_ _foreach_div_ _foreach_mul _foreach_mul_ _foreach_norm _fused_rms_norm
    _fused_rms_norm_backward _grouped_mm _linalg_det _linalg_slogdet _linalg_solve_ex _log_softmax
    _log_softmax_backward_data _logcumsumexp _native_batch_norm_legit
    _native_batch_norm_legit_no_training _pack_padded_sequence_backward _prelu_kernel _safe_softmax
    _scaled_dot_product_attention_math _scaled_dot_product_cudnn_attention
    _scaled_dot_product_cudnn_attention_backward _scaled_dot_product_efficient_attention
    _scaled_dot_product_efficient_attention_backward _scaled_dot_product_flash_attention
    _scaled_dot_product_flash_attention_backward _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_flash_attention_for_cpu_backward
    _scaled_dot_product_fused_attention_overrideable _segment_reduce_backward _softmax
    _softmax_backward_data _thnn_fused_gru_cell _thnn_fused_gru_cell_backward _thnn_fused_lstm_cell
    _thnn_fused_lstm_cell_backward_impl _trilinear _upsample_bicubic2d_aa
    _upsample_bicubic2d_aa_backward _upsample_bilinear2d_aa _upsample_bilinear2d_aa_backward
    _upsample_nearest_exact1d_backward _upsample_nearest_exact2d_backward
    _upsample_nearest_exact3d_backward _weight_norm_interface _weight_norm_interface_backward acos acosh
    adaptive_avg_pool1d adaptive_max_pool2d_backward adaptive_max_pool3d_backward add addbmm addcdiv
    addcmul addmm addmv addr affine_grid_generator asin asinh atan atan2 atanh avg_pool1d avg_pool2d
    avg_pool2d_backward avg_pool3d avg_pool3d_backward baddbmm batch_norm_backward
    batch_norm_backward_elemt batch_norm_backward_reduce batch_norm_elemt
    batch_norm_gather_stats_with_counts batch_norm_stats binary_cross_entropy
    binary_cross_entropy_backward binary_cross_entropy_with_logits bmm celu cholesky coalesce col2im
    complex convolution convolution_backward convolution_overrideable cos cosh cross cudnn_batch_norm
    cudnn_batch_norm_backward cudnn_convolution cumprod cumsum digamma div dot einsum elu
    embedding_dense_backward erf erfc erfinv exp exp2 expm1 fmod gelu gelu_backward glu glu_backward
    grid_sampler_2d grid_sampler_2d_backward grid_sampler_3d grid_sampler_3d_backward
    hardsigmoid hardswish huber_loss huber_loss_backward hypot imag index_add index_put index_reduce
    inverse kl_div l1_loss layer_norm lerp lgamma linalg_cholesky_ex linalg_cross linalg_inv_ex
    linalg_lu_solve linalg_matrix_exp linalg_solve_ex linalg_solve_triangular linalg_vector_norm linear
    linear_backward log log10 log1p log2 log_sigmoid_backward log_sigmoid_forward logaddexp logaddexp2
    logcumsumexp logit logit_backward logsumexp lstm_mps_backward matmul mean miopen_batch_norm mish
    mish_backward mkldnn_convolution mkldnn_rnn_layer mkldnn_rnn_layer_backward mm mse_loss
    mse_loss_backward mul mv native_batch_norm native_batch_norm_backward native_dropout_backward
    native_group_norm native_group_norm_backward native_layer_norm native_layer_norm_backward
    nll_loss2d_backward nll_loss2d_forward nll_loss_backward nll_loss_forward norm norm_except_dim polar
    polygamma pow prod put real reciprocal reflection_pad1d_backward reflection_pad2d_backward
    reflection_pad3d_backward remainder replication_pad1d_backward replication_pad2d_backward
    replication_pad3d_backward rms_norm rsqrt rsub scaled_dot_product_attention scatter_add
    scatter_reduce segment_reduce selu sigmoid sigmoid_backward silu silu_backward sin sinc sinh
    slow_conv3d_forward smooth_l1_loss smooth_l1_loss_backward soft_margin_loss
    soft_margin_loss_backward special_erfcx special_expit special_xlog1py sqrt square std std_mean sub
    sum sum_to_size tan tanh tanh_backward thnn_conv2d trace triangular_solve upsample_bicubic2d
    upsample_bicubic2d_backward upsample_bilinear2d upsample_bilinear2d_backward upsample_linear1d
    upsample_linear1d_backward upsample_nearest1d_backward upsample_nearest2d_backward
    upsample_nearest3d_backward upsample_trilinear3d upsample_trilinear3d_backward var var_mean vdot
    xlogy
    """.split()
) | {
    "torchvision::roi_align",
    "torchvision::_roi_align_backward",
}  # of the numbers; of the boxes where RESTRICTED allows it

# Jump or draw, and have no decision site and no portable form: what to write instead.
INSTEAD: Mapping[str, str] = {
    f"aten::{name}": remedy
    for names, remedy in {
        "cummax cummin": "sort, or take amax of each part",
        "mode _unique _unique2 unique_dim unique_consecutive": "make whole numbers of them first, by round and long",
        "nanmedian": "replace what is not a number by where, and take median",
        "signbit copysign heaviside angle": "write it with where and a comparison",
        "multi_margin_loss multilabel_margin_loss_forward": "write it with relu",
        "renorm embedding_renorm": "divide by the norm, clamped, in the forward pass",
        "linalg_qr geqrf _linalg_svd _linalg_eigh linalg_eig _linalg_eigvals linalg_lu linalg_lu_factor_ex": (
            "its signs, order or pivots are each library's own: linalg.cholesky and linalg.solve have none"
        ),
        "rrelu_with_noise rrelu_with_noise_backward rrelu_with_noise_functional": (
            "leaky_relu, or slopes drawn by uniform_"
        ),
        "cauchy log_normal": "its quantile function of rand",
        "fractional_max_pool2d fractional_max_pool3d": "max_pool",
    }.items()
    for name in names.split()
}

# Write into arguments (running statistics) without saying so: only their first input may be disturbed.
STATEFUL = frozenset(
    f"aten::{name}"
    for name in "native_batch_norm cudnn_batch_norm miopen_batch_norm _native_batch_norm_legit _batch_norm_with_update".split()
)


@dataclass(frozen=True)
class Restriction:
    """A form of a listed operator that jumps: refused where ``argument`` has such a value."""

    argument: str
    jumps: Callable[[Any], bool]
    reason: str


RESTRICTED: Mapping[str, Restriction] = {
    "aten::round": Restriction("decimals", bool, "scale, round to whole numbers and scale back"),
    "aten::_embedding_bag": Restriction("mode", lambda mode: mode == 2, "look the rows up and use amax"),
    "aten::_embedding_bag_forward_only": Restriction(
        "mode", lambda mode: mode == 2, "look the rows up and use amax"
    ),
    "aten::segment_reduce": Restriction("reduce", lambda name: name in ("max", "min"), "use amax or amin"),
    **{
        f"torchvision::{name}": Restriction(
            "sampling_ratio",
            lambda ratio: ratio <= 0,
            "say how many samples: with sampling_ratio=2, say, they do not follow from the size of a box",
        )
        for name in ("roi_align", "_roi_align_backward")
    },
    **{
        f"aten::{name}": Restriction(argument, lambda order: order == 0, "count by ne and sum")
        for name, argument in (("linalg_vector_norm", "ord"), ("norm", "p"))
    },
    "aten::_cdist_forward": Restriction("p", lambda p: p < 1.0, "use abs and sum"),
    "aten::_cdist_backward": Restriction(
        "p", lambda p: p <= 1.0 or p == math.inf, "use abs and sum, or amax, whose signs are logged"
    ),
    **{
        name: Restriction("dtype", lambda dtype: dtype is not None, "bits of a rounded number jump")
        for name in ("aten::view", "aten::view_copy")
    },
}
