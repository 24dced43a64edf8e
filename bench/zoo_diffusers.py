"""Tiny randomly initialised models of the main architectures of `diffusers`: U-Nets, transformers and autoencoders.

Denoisers are trained to find the noise that is drawn in the step, as its guides have it, autoencoders to give their input again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import diffusers
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo_batches import Batch, randn
from zoo_models import Tiny
from zoo_trained import builder

SIDE, TEXT = 16, 8
TIMES = 1000
Shape = tuple[int, ...]
DOWN, UP = ("DownBlock2D", "CrossAttnDownBlock2D"), ("CrossAttnUpBlock2D", "UpBlock2D")
BLOCKS: dict[str, Any] = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 8}
ENCODER: dict[str, Any] = BLOCKS | {"down_block_types": ("DownEncoderBlock2D",) * 2}
CODER: dict[str, Any] = ENCODER | {"up_block_types": ("UpDecoderBlock2D",) * 2}
CROSS: dict[str, Any] = BLOCKS | {"cross_attention_dim": 32, "attention_head_dim": 8}
HEADS: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2}


def denoised(model: nn.Module, clean: Tensor, with_noise: str, **more: Tensor) -> Tensor:
    """The usual loss: how far the noise that the model finds is from the one that was added, at times drawn for each sample."""
    noise = torch.randn_like(clean)
    times = torch.randint(0, TIMES, (clean.shape[0],), device=clean.device)
    if with_noise == "flow":
        share = (times / TIMES).view(-1, *[1] * (clean.dim() - 1))
        mixed, wanted = (1.0 - share) * clean + share * noise, noise - clean
    else:
        scheduler = diffusers.DDPMScheduler(num_train_timesteps=TIMES)
        mixed, wanted = scheduler.add_noise(clean, noise, times), noise
    found = model(mixed, timestep=times, **more, return_dict=False)[0]
    return F.mse_loss(found[:, : wanted.shape[1]], wanted)


def coded(model: Any, clean: Tensor) -> Tensor:
    """How far the input is from what the decoder makes of a sample of its code, and that from the standard distribution."""
    given = model.encode(clean)
    if hasattr(given, "latent_dist"):
        code = given.latent_dist
        return F.mse_loss(model.decode(code.sample()).sample, clean) + 1e-3 * code.kl().mean()
    return F.mse_loss(
        model.decode(given.latents if hasattr(given, "latents") else given.latent).sample, clean
    )


def quantized(model: Any, clean: Tensor) -> Tensor:
    found = model(clean)
    return F.mse_loss(found.sample, clean) + found.commit_loss.mean()


def of_shape(shape: Shape, **more: Shape) -> Callable[[torch.Generator], Batch]:
    """Two samples of a shape, and what they are to follow from: ids where a shape's name ends in s, else numbers."""

    def batch(generator: torch.Generator) -> Batch:
        result: Batch = {"clean": randn(generator, 2, *shape)}
        for name, each in more.items():
            whole = name == "class_labels"
            result[name] = (
                torch.randint(0, 5, (2,), generator=generator) if whole else randn(generator, 2, *each)
            )
        return result

    return batch


def small_unet(**kwargs: Any) -> nn.Module:
    return diffusers.UNet2DModel(
        SIDE, attention_head_dim=8, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"), **BLOCKS, **kwargs,
    )  # fmt: skip


def small_condition(**kwargs: Any) -> nn.Module:
    return diffusers.UNet2DConditionModel(SIDE, down_block_types=DOWN, up_block_types=UP, **CROSS, **kwargs)


def small_unet_3d() -> nn.Module:
    down, up = ("DownBlock3D", "CrossAttnDownBlock3D"), ("CrossAttnUpBlock3D", "UpBlock3D")
    return diffusers.UNet3DConditionModel(SIDE, down_block_types=down, up_block_types=up, **CROSS)


def small_spatio_temporal() -> nn.Module:
    return diffusers.UNetSpatioTemporalConditionModel(
        SIDE, 4, 4, ("DownBlockSpatioTemporal", "CrossAttnDownBlockSpatioTemporal"),
        ("CrossAttnUpBlockSpatioTemporal", "UpBlockSpatioTemporal"), block_out_channels=(32, 64), layers_per_block=1,
        addition_time_embed_dim=8, projection_class_embeddings_input_dim=24, cross_attention_dim=32,
        num_attention_heads=2, num_frames=2,
    )  # fmt: skip


def small_unet_1d() -> nn.Module:
    return diffusers.UNet1DModel(
        32, block_out_channels=(32, 32, 64), extra_in_channels=64, in_channels=2, out_channels=2
    )


def small_dc() -> nn.Module:
    sides: dict[str, Any] = {}
    for part in ("encoder", "decoder"):
        sides |= {
            f"{part}_block_types": ("ResBlock", "EfficientViTBlock"),
            f"{part}_block_out_channels": (16, 32),
            f"{part}_layers_per_block": (1, 1),
            f"{part}_qkv_multiscales": ((), (5,)),
        }
    return diffusers.AutoencoderDC(latent_channels=4, attention_head_dim=8, **sides)


D: Any = diffusers
WORDS = {"encoder_hidden_states": (TEXT, 32)}
POOLED = WORDS | {"pooled_projections": (32,)}
LATENT, VIDEO = (4, SIDE, SIDE), (4, 2, SIDE, SIDE)
CONTEXT: dict[str, Any] = {"joint_attention_dim": 32, "caption_projection_dim": 32, "sample_size": SIDE}

# What makes each, how noise is added, and the batch.
DENOISERS: dict[str, tuple[Callable[[], nn.Module], str, Callable[[torch.Generator], Batch]]] = {
    "UNet1DModel": (small_unet_1d, "steps", of_shape((2, 32))),
    "UNet2DModel": (small_unet, "steps", of_shape((3, SIDE, SIDE))),
    "UNet2DModel_classes": (
        partial(small_unet, num_class_embeds=5, dropout=0.1, resnet_time_scale_shift="scale_shift"),
        "steps",
        of_shape((3, SIDE, SIDE), class_labels=()),
    ),
    "UNet2DConditionModel": (small_condition, "steps", of_shape(LATENT, **WORDS)),
    "UNet2DConditionModel_linear": (
        partial(small_condition, use_linear_projection=True, transformer_layers_per_block=2, dropout=0.1),
        "steps",
        of_shape(LATENT, **WORDS),
    ),
    "UNet3DConditionModel": (small_unet_3d, "steps", of_shape(VIDEO, **WORDS)),
    "UNetSpatioTemporalConditionModel": (
        small_spatio_temporal,
        "steps",
        of_shape((2, 4, SIDE, SIDE), encoder_hidden_states=(1, 32), added_time_ids=(3,)),
    ),
    "DiTTransformer2DModel": (
        lambda: D.DiTTransformer2DModel(sample_size=SIDE, norm_num_groups=4, dropout=0.1, **HEADS),
        "steps",
        of_shape(LATENT, class_labels=()),
    ),
    "PixArtTransformer2DModel": (
        lambda: D.PixArtTransformer2DModel(
            sample_size=SIDE, norm_num_groups=4, cross_attention_dim=32, caption_channels=32, **HEADS
        ),
        "steps",
        of_shape(LATENT, **WORDS),
    ),
    "SD3Transformer2DModel": (
        lambda: D.SD3Transformer2DModel(
            in_channels=4, out_channels=4, pooled_projection_dim=32, pos_embed_max_size=SIDE, qk_norm="rms_norm",
            **CONTEXT, **HEADS,
        ),
        "flow",
        of_shape(LATENT, **POOLED),
    ),
    "AuraFlowTransformer2DModel": (
        lambda: D.AuraFlowTransformer2DModel(
            num_mmdit_layers=1, num_single_dit_layers=1, attention_head_dim=16, num_attention_heads=2,
            pos_embed_max_size=SIDE * SIDE, **CONTEXT,
        ),
        "flow",
        of_shape(LATENT, **WORDS),
    ),
    "SanaTransformer2DModel": (
        lambda: D.SanaTransformer2DModel(
            in_channels=4, out_channels=4, num_cross_attention_heads=2, cross_attention_head_dim=16,
            cross_attention_dim=32, caption_channels=32, sample_size=SIDE, **HEADS,
        ),
        "flow",
        of_shape(LATENT, **WORDS),
    ),
    "WanTransformer3DModel": (
        lambda: D.WanTransformer3DModel(
            in_channels=4, out_channels=4, text_dim=32, freq_dim=32, ffn_dim=64, rope_max_seq_len=32, **HEADS
        ),
        "flow",
        of_shape(VIDEO, **WORDS),
    ),
    "CogVideoXTransformer3DModel": (
        lambda: D.CogVideoXTransformer3DModel(
            in_channels=4, out_channels=4, time_embed_dim=16, text_embed_dim=32, sample_width=SIDE, sample_height=SIDE,
            sample_frames=5, max_text_seq_length=TEXT, dropout=0.1, **HEADS,
        ).float(),  # its places are float64, which is refused
        "steps",
        of_shape((2, 4, SIDE, SIDE), **WORDS),
    ),
}  # fmt: skip


def flux(model: nn.Module, clean: Tensor, **more: Tensor) -> Tensor:
    """The loss of a model of rows of patches, whose places it is told."""
    noise, times = torch.randn_like(clean), torch.rand(clean.shape[0])
    share = times.view(-1, 1, 1)
    places = torch.zeros(clean.shape[1], 3)
    places[:, 1], places[:, 2] = torch.arange(16) // 4, torch.arange(16) % 4
    words = torch.zeros(TEXT, 3)
    found = model(
        (1.0 - share) * clean + share * noise,
        timestep=times,
        img_ids=places,
        txt_ids=words,
        return_dict=False,
        **more,
    )[0]
    return F.mse_loss(found, noise - clean)


def small_flux() -> nn.Module:
    return D.FluxTransformer2DModel(
        in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip


CODERS: dict[str, Callable[[], nn.Module]] = {
    "AutoencoderKL": lambda: D.AutoencoderKL(**CODER),
    "AutoencoderTiny": lambda: D.AutoencoderTiny(
        encoder_block_out_channels=(16, 16), decoder_block_out_channels=(16, 16), num_encoder_blocks=(1, 1),
        num_decoder_blocks=(1, 1),
    ),
    "AutoencoderDC": small_dc,
    "AsymmetricAutoencoderKL": lambda: D.AsymmetricAutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2, down_block_out_channels=(16, 32),
        up_block_types=("UpDecoderBlock2D",) * 2, up_block_out_channels=(16, 32), norm_num_groups=8,
    ),
}  # fmt: skip


def tiny_models() -> list[Tiny]:
    """Denoisers, then autoencoders."""
    made: list[
        tuple[str, Callable[[], nn.Module], Callable[..., Tensor], Callable[[torch.Generator], Batch]]
    ] = [
        (name, make, partial(denoised, with_noise=kind), batch)
        for name, (make, kind, batch) in DENOISERS.items()
    ]
    made.append(("FluxTransformer2DModel", small_flux, flux, of_shape((16, 16), **POOLED)))
    made += [(name, make, coded, of_shape((3, SIDE, SIDE))) for name, make in CODERS.items()]
    oobleck = partial(D.AutoencoderOobleck, 8, [2, 2], [1, 2], 8, 4)
    made.append(("AutoencoderOobleck", oobleck, coded, of_shape((2, 64))))
    made.append(
        (
            "VQModel",
            lambda: D.VQModel(num_vq_embeddings=16, latent_channels=4, **CODER),
            quantized,
            of_shape((3, SIDE, SIDE)),
        )
    )
    return [
        Tiny(f"diffusers/{name}", "diffusers", builder(make, loss, batch)) for name, make, loss, batch in made
    ]
