"""Tiny randomly initialised models of the families of `timm`, a module each: the smallest there is, cut down where it lets us."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import timm
from timm.models import convmixer, metaformer, mlp_mixer, mvitv2, nest, volo
from torch import nn

from zoo_models import Tiny
from zoo_trained import CLASSES, builder, classified, labelled

SIDE = 64
VIT: dict[str, Any] = {"embed_dim": 48, "depth": 2, "num_heads": 3}
STAGES: dict[str, Any] = {"depths": (1, 1, 2, 1), "dims": (16, 24, 32, 48)}

# The side of the images where it is another, and what is given to make a smaller one, or one for smaller images.
MODELS: dict[str, dict[str, Any]] = {
    "beit_base_patch16_224": VIT | {"img_size": SIDE},
    "test_byobnet": {},
    "mobileone_s0": {},
    "botnet26t_256": {"img_size": SIDE},
    "lambda_resnet26t": {},
    "cait_xxs24_224": {"img_size": SIDE, "depth": 2, "embed_dim": 48, "num_heads": 4},
    "coat_lite_tiny": {"img_size": SIDE},
    "convit_tiny": {"img_size": SIDE, "depth": 3, "local_up_to_layer": 2},
    "convnext_atto": STAGES,
    "cpubone_nano": {},
    "crossvit_9_240": {},
    "cs3darknet_focus_s": {},
    "cspnext_tiny": {},
    "davit_tiny": {"depths": (1, 1, 1, 1), "embed_dims": (16, 32, 48, 64), "num_heads": (1, 2, 3, 4)},
    "deit_tiny_distilled_patch16_224": VIT | {"img_size": SIDE},
    "densenet121": {"growth_rate": 8, "block_config": (2, 2, 2, 2)},
    "dla46_c": {},
    "dpn48b": {},
    "edgenext_xx_small": {},
    "efficientformer_l1": {"side": 224, "depths": (1, 1, 1, 2), "embed_dims": (16, 24, 32, 48)},
    "efficientformerv2_s0": {"img_size": SIDE},
    "test_efficientnet": {},
    "efficientnet_b0": {},
    "efficientvim_m1": {},
    "efficientvit_b0": {},
    "efficientvit_m0": {"img_size": SIDE},
    "eva02_tiny_patch14_224": VIT | {"img_size": 56},
    "fasternet_t0": {},
    "ghostnet_050": {},
    "hardcorenas_a": {},
    "hgnetv2_b0": {},
    "hiera_tiny_224": {"img_size": SIDE, "embed_dim": 16, "stages": (1, 1, 2, 1)},
    "hrnet_w18_small": {},
    "iformer_t": {},
    "inception_next_atto": {"depths": (1, 1, 2, 1)},
    "lcnetv2_small": {},
    "levit_128s": {"img_size": SIDE, "embed_dim": (32, 48, 64), "num_heads": (2, 3, 4), "depth": (1, 1, 1)},
    "lowformer_b0": {},
    "mambaout_femto": {"depths": (1, 1, 2, 1), "dims": (16, 24, 32, 48)},
    "coatnet_nano_rw_224": {"img_size": SIDE},
    "maxvit_pico_rw_256": {"img_size": SIDE},
    "mobilenetv3_small_050": {},
    "mobilenetv4_conv_small_035": {},
    "mobilevit_xxs": {},
    "mobilevitv2_050": {},
    "naflexvit_base_patch16_gap": VIT,
    "nextvit_small": {"depths": (1, 1, 5, 1)},
    "test_nfnet": {},
    "pit_ti_224": {"img_size": SIDE},
    "pvt_v2_b0": {"depths": (1, 1, 1, 1)},
    "rdnet_tiny": {},
    "regnety_002": {},
    "repghostnet_050": {},
    "repvit_m0_9": {},
    "res2net50_48w_2s": {"layers": (1, 1, 1, 1), "base_width": 8},
    "resnest14d": {},
    "test_resnet": {},
    "resnet10t": {},
    "resnetv2_18": {"layers": (1, 1, 1, 1)},
    "rexnet_100": {"width_mult": 0.25},
    "selecsls42": {},
    "legacy_seresnet18": {"layers": (1, 1, 1, 1)},
    "sequencer2d_s": {"img_size": SIDE, "layers": (1, 1, 1, 1), "embed_dims": (16, 32, 32, 32)},
    "shvit_s1": {},
    "skresnet18": {"layers": (1, 1, 1, 1)},
    "starnet_s050": {},
    "swiftformer_xs": {},
    "swin_tiny_patch4_window7_224": {"img_size": SIDE, "window_size": 4, "embed_dim": 24, "depths": (1, 1, 1, 1)},
    "swinv2_tiny_window8_256": {"img_size": SIDE, "window_size": 4, "embed_dim": 24, "depths": (1, 1, 1, 1)},
    "swinv2_cr_tiny_224": {"img_size": SIDE, "window_size": 2, "embed_dim": 24, "depths": (1, 1, 1, 1)},
    "tiny_vit_5m_224": {"embed_dims": (16, 32, 48, 64), "num_heads": (1, 2, 3, 4), "depths": (1, 1, 1, 1)},
    "tnt_s_patch16_224": {"img_size": SIDE, "embed_dim": 48, "inner_dim": 16, "num_heads_outer": 3, "depth": 2},
    "tresnet_m": {"layers": (1, 1, 1, 1)},
    "twins_svt_small": {"img_size": SIDE, "embed_dims": (16, 32, 48, 64), "num_heads": (1, 2, 3, 4), "depths": (1, 1, 1, 1)},
    "visformer_tiny": {"img_size": SIDE, "embed_dim": 48, "depth": (1, 1, 1)},
    "test_vit": {"img_size": SIDE},
    "vit_tiny_r_s16_p8_224": {"img_size": SIDE, "embed_dim": 48, "depth": 2},
    "test_vit_relpos": {"img_size": SIDE},
    "samvit_base_patch16": VIT | {"img_size": SIDE, "window_size": 2, "global_attn_indexes": (1,)},
    "ese_vovnet19b_slim_dw": {},
    "xception41p": {},
    "xcit_nano_12_p16_224": {"img_size": SIDE, "embed_dim": 48, "depth": 2, "num_heads": 3},
}  # fmt: skip


new: dict[str, Any] = {"num_classes": CLASSES}
placed: dict[str, Any] = {**new, "img_size": SIDE}
LAYER_NORMS = [metaformer.LayerNorm2dNoBias] * 2 + [metaformer.LayerNormNoBias] * 2
MIXER: dict[str, Any] = {**placed, "num_blocks": 2, "embed_dim": 48}
POOL: dict[str, Any] = {
    "downsample_norm": None, "mlp_act": nn.GELU, "mlp_bias": True, "norm_layers": metaformer.GroupNorm1,
    "layer_scale_init_values": 1e-5, "res_scale_init_values": None, "use_mlp_head": False,
}  # fmt: skip


def small_caformer() -> nn.Module:
    mixers = [metaformer.SepConv] * 2 + [metaformer.Attention] * 2
    return metaformer.MetaFormer(
        token_mixers=mixers, norm_layers=LAYER_NORMS, depths=(1, 1, 1, 1), dims=(16, 24, 32, 64), **new
    )


def small_mvit() -> nn.Module:
    shape = mvitv2.MultiScaleVitCfg(depths=(1, 1, 2, 1), embed_dim=16)
    return mvitv2.MultiScaleVit(shape, img_size=(SIDE, SIDE), **new)


# Those that take no other numbers than their own by their names.
BUILT: dict[str, Callable[[], nn.Module]] = {
    "caformer_s18": small_caformer,
    "poolformer_s12": lambda: metaformer.MetaFormer(**POOL, **STAGES, **new),
    "convmixer_768_32": lambda: convmixer.ConvMixer(48, 2, **new),
    "mixer_s32_224": lambda: mlp_mixer.MlpMixer(**MIXER),
    "gmlp_ti16_224": lambda: mlp_mixer.MlpMixer(
        mlp_ratio=6, block_layer=mlp_mixer.SpatialGatingBlock, mlp_layer=mlp_mixer.GatedMlp, **MIXER
    ),
    "resmlp_12_224": lambda: mlp_mixer.MlpMixer(
        mlp_ratio=4, block_layer=mlp_mixer.ResBlock, norm_layer=mlp_mixer.Affine, **MIXER
    ),
    "mvitv2_tiny": small_mvit,
    "nest_tiny": lambda: nest.Nest(embed_dims=(16, 32, 48), num_heads=(1, 2, 3), depths=(1, 1, 1), **placed),
    "volo_d1_224": lambda: volo.VOLO(
        [1, 1, 1, 1], embed_dims=[24, 32, 32, 32], num_heads=[2, 4, 4, 4], use_aux_head=False, **placed
    ),
}


def tiny_models() -> list[Tiny]:
    """One or a few of each module."""
    result: list[Tiny] = []
    for name, given in MODELS.items():
        side = given.get("img_size", given.get("side", SIDE))
        kwargs = {key: value for key, value in given.items() if key != "side"}
        make = partial(timm.create_model, name, pretrained=False, num_classes=CLASSES, **kwargs)
        result.append(Tiny(f"timm/{name}", "timm", builder(make, classified, labelled(3, side, side))))
    for name, make in BUILT.items():
        result.append(Tiny(f"timm/{name}", "timm", builder(make, classified, labelled(3, SIDE, SIDE))))
    return result
