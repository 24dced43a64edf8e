"""Made-up input, and labels, for the tiny models of ``zoo_models``: whatever a forward pass asks for by its arguments' names."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Batch = dict[str, Any]
VOCAB, WIDTH, HEAD, IMAGE, LENGTH = 192, 64, 16, 32, 16
IMAGES = 8
"""In a batch of images alone. A batch norm whose channel has two values, one of each image, makes 1 and -1 of them, whatever they
are: all gradients before it are rounding errors."""


def pick(config: Any, *names: str, default: Any = None) -> Any:
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if value is not None), default)


def randn(generator: torch.Generator, *shape: int) -> Tensor:
    """Numbers of mean 0 and deviation 1, drawn as whole ones: those of ``torch.randn`` are not the same on every processor."""
    whole = torch.randint(-1774, 1775, shape, generator=generator)
    return whole.float() / 1024.0


def ids(generator: torch.Generator, length: int = LENGTH, most: int = 96, least: int = 11) -> Tensor:
    return torch.randint(least, most, (2, length), generator=generator)


def pixels(config: Any, generator: torch.Generator, rows: int) -> Tensor:
    vision = pick(config, "vision_config", "encoder", default=config)
    size = pick(vision, "image_size", "input_size", default=IMAGE)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    channels = pick(vision, "num_channels", "in_channels", default=3)
    return randn(generator, rows, channels if isinstance(channels, int) else 3, height, width)


def audio(wanted: set[str], config: Any, generator: torch.Generator) -> Batch:
    if "input_values" in wanted:
        spectrogram = "max_length" in vars(config) and "num_mel_bins" in vars(config)
        shape = (config.max_length, config.num_mel_bins) if spectrogram else (2000,)
        return {"input_values": randn(generator, 2, *shape)}
    encoder = pick(config, "encoder_config", default=config)
    bins = pick(encoder, "num_mel_bins", "feature_projection_input_dim", "input_dim", default=80)
    if config.model_type == "whisper":
        return {"input_features": randn(generator, 2, bins, 2 * config.max_source_positions)}
    result = {"input_features": randn(generator, 2, 64, bins * (1 + 3 * ("speech5" in config.model_type)))}
    return result | ({"attention_mask": ones(2, 64)} if "attention_mask" in wanted else {})


def rows_of(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() // value.shape[-1]
    if isinstance(value, dict):
        return rows_of(next(v for v in (value.get("pooler_output"), *value.values()) if v is not None))
    return sum(rows_of(one) for one in value)


ones = functools.partial(torch.ones, dtype=torch.long)
TEXT_ONLY = "Fuyu|Gemma4Unified|DiffusionGemma|Mistral4|Emu3|Granite4Vision"
AUDIO_LMS = "AudioFlamingo3|GlmAsr|Qwen3ASR|VoxtralFor|GraniteSpeech(Plus)?For|Nemotron3_5"
RGB = (3, IMAGE, IMAGE)
GRID = torch.tensor([[1, 4, 4]] * 2)
IMAGE_INPUTS: tuple[tuple[str, Callable[[torch.Generator], Batch]], ...] = (
    ("Nemotron3_5", lambda g: {"input_features": randn(g, 2, 64, 128), "input_features_mask": ones(2, 64)}),
    ("Qwen3ASR", lambda g: {"input_features": randn(g, 2, 128, 200), "input_features_mask": ones(2, 200)}),
    ("InstructBlipFor", lambda g: {"pixel_values": randn(g, 2, *RGB), "qformer_input_ids": ids(g, 8)}),
    ("Evolla", lambda g: {"protein_input_ids": ids(g, 8, 20), "protein_attention_mask": ones(2, 8)}),
    ("PaddleOCR|Kimi", lambda g: {"pixel_values": randn(g, 32, 3, 8, 8), "image_grid_thw": GRID}),
    ("MiniCPM", lambda g: {"pixel_values": randn(g, 1, 3, 8, 256), "target_sizes": GRID[:, 1:]}),
    ("NemotronH", lambda g: {"pixel_values": randn(g, 32, 192), "image_grid_hw": GRID[:, 1:]}),
    ("Udop", lambda g: {"bbox": torch.tensor([0.1, 0.1, 0.4, 0.4]).repeat(2, LENGTH, 1)}),
    ("GraniteSpeech(Plus)?For", lambda g: {"input_features": randn(g, 2, 32, 64)}),
    ("InklingFor", lambda g: {"pixel_values": randn(g, 2, 2, 8, 8, 3)}),
    (
        "Lfm2Vl|Siglip2",
        lambda g: {
            "pixel_values": randn(g, 2, 16, 192),
            "spatial_shapes": GRID[:, 1:],
            "pixel_attention_mask": ones(2, 16),
        },
    ),
    (
        "Mllama",
        lambda g: {
            "pixel_values": randn(g, 2, 1, 4, 3, 32, 32),
            "aspect_ratio_ids": ones(2, 1),
            "aspect_ratio_mask": ones(2, 1, 4),
        },
    ),
    (
        "Pix2Struct|Kosmos2_5",
        lambda g: {"flattened_patches": torch.cat([ones(2, 16, 2).cumsum(1), randn(g, 2, 16, 192)], 2)},
    ),
    ("InstructBlipVideo", lambda g: {"pixel_values": randn(g, 2, 1, *RGB), "qformer_input_ids": ids(g, 8)}),
    (
        "Idefics|Smol",
        lambda g: {"pixel_values": randn(g, 2, 1, *RGB), "image_attention_mask": ones(2, 16, 1)},
    ),
    ("GraniteDoc", lambda g: {"pixel_values": randn(g, 2, 1, *RGB), "pixel_attention_mask": ones(2, 1) > 0}),
    (
        "DeepseekVLHy",
        lambda g: {"pixel_values": randn(g, 2, *RGB), "high_res_pixel_values": randn(g, 2, *RGB)},
    ),
    (
        "PI0",
        lambda g: {
            "pixel_values": randn(g, 2, 1, *RGB),
            "pixel_attention_mask": ones(2, 1).bool(),
            "state": randn(g, 2, 32),
            "actions": randn(g, 2, 50, 32),
        },
    ),
    (
        "Gemma4For",
        lambda g: {
            "pixel_values": randn(g, 2, 16, 192),
            "image_position_ids": torch.cartesian_prod(torch.arange(4), torch.arange(4)).repeat(2, 1, 1),
        },
    ),
    ("Inkling2", lambda g: {"pixel_values": randn(g, 8, 16, 16, 3), "image_grid_thw": GRID.clamp(max=2)}),
    (AUDIO_LMS, lambda g: {"input_features": randn(g, 2, 128, 256), "input_features_mask": ones(2, 256)}),
    (TEXT_ONLY, lambda g: {}),
    (
        "Molmo2",
        lambda g: {
            "pixel_values": randn(g, 2, 16, 192),
            "image_token_pooling": torch.arange(32).view(8, 4),
            "image_grids": torch.tensor([[2, 2, 0, 0]] * 2),
        },
    ),
)


def images(model: Any, wanted: set[str], generator: torch.Generator, rows: int = 2) -> Batch:
    name, kind = type(model).__name__, model.config.model_type
    for pattern, make in IMAGE_INPUTS:
        if re.match(pattern, name):
            return make(generator)
    if "image_grid_thw" in wanted:
        vision = pick(model.config, "vision_config", default=model.config)
        channels = pick(vision, "in_channels", "in_chans", "num_channels", default=3)
        times = pick(vision, "temporal_patch_size", "patch_temporal", default=1)
        values = randn(generator, 32, channels * times * pick(vision, "patch_size") ** 2)
        merged = {"image_merge_sizes": ones(2)} if "image_merge_sizes" in wanted else {}
        return {"pixel_values": values, "image_grid_thw": GRID, **merged}
    result: Batch = {"pixel_values": (values := pixels(model.config, generator, rows))}
    if "image_sizes" in wanted and kind != "llava":
        result["image_sizes"] = torch.tensor([list(values.shape[-2:])] * 2)
        if "granite4" in kind or "next" in kind or "onevision" in kind:
            result["pixel_values"] = values.unsqueeze(1).repeat(1, 3, 1, 1, 1)
    return result | ({"num_local_patches": [0, 0]} if "num_local_patches" in wanted else {})


def multimodal(model: Any, count: int, step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    wanted = set(inspect.signature(model.forward).parameters)
    config = model.config
    media = images(model, wanted, generator)
    kind = "image" if any(name.startswith("pixel") for name in media) or not media else "audio"
    image = pick(config, f"{kind}_token_id", f"{kind}_token_index", default=99)
    start = pick(config, "vision_start_token_id", "image_start_token_id", "boi_token_id", "boi_token_index")
    end = pick(config, "vision_end_token_id", "image_end_token_id", "eoi_token_id", "eoi_token_index")
    middle = [one for one in (start, *[image] * count, end) if one is not None]
    parts = ids(generator, 4), torch.tensor([middle] * 2, dtype=torch.long), ids(generator, LENGTH - 4)
    tokens = torch.cat(parts, 1)
    is_image = tokens == image
    result: Batch = {"input_ids": tokens, "labels": tokens.masked_fill(is_image, -100)}
    masks = ("image_embeds_position_mask", "token_type_ids", "mm_token_type_ids")
    result |= {name: is_image.long() for name in masks} | {"attention_mask": torch.ones_like(tokens)} | media
    return {name: value for name, value in result.items() if name in wanted}


def count_tokens(model: Any) -> int:
    """The number of image tokens that the model wants for one of the two images."""
    if hasattr(model.config, "latent_query_num"):
        return model.config.latent_query_num
    wanted = set(inspect.signature(model.forward).parameters)
    inputs = images(model, wanted, torch.Generator().manual_seed(0))
    name = "get_image_features" if "pixel_values" in inputs else "get_audio_features"
    owner = model if hasattr(model, name) else getattr(model, "model", None)
    if not inputs or not hasattr(owner, name):
        return 0
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        return rows_of(getattr(owner, name)(**inputs)) // 2


def batch(model: Any, family: str, step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    wanted = set(inspect.signature(model.forward).parameters)
    config = model.config
    label = torch.randint(0, 2, (2,), generator=generator)
    if family == "image_classification":
        if "input_ids" in wanted:
            return {"input_ids": ids(generator), "labels": label}
        inputs = images(model, wanted, generator, IMAGES)
        more = torch.randint(0, 2, (IMAGES,), generator=generator)
        return inputs | {"labels": more if len(inputs["pixel_values"]) == IMAGES else label}
    if family == "object_detection":
        kinds = torch.randint(0, 2, (IMAGES, 2), generator=generator)
        boxes = torch.rand(IMAGES, 2, 4, generator=generator) * 0.3 + 0.3
        targets = [{"class_labels": one, "boxes": box} for one, box in zip(kinds, boxes, strict=True)]
        return images(model, wanted, generator, IMAGES) | {"labels": targets}
    if family in ("audio_classification", "ctc"):
        label = ids(generator, 3, 30, 1) if family == "ctc" else label
        return audio(wanted, config, generator) | {"labels": label}
    vocabulary = pick(config.get_text_config(), "vocab_size", default=VOCAB)
    tokens = ids(generator, LENGTH, 30 if vocabulary < VOCAB else 96)
    if family == "sequence_classification" and isinstance(eos := pick(config, "eos_token_id"), int):
        tokens[:, -1] = eos
    if "Musicgen" in type(model).__name__:
        return {"input_ids": torch.cat([tokens] * 4), "labels": tokens[..., None].expand(2, LENGTH, 4)}
    if "VoxtralRealtime" in type(model).__name__:
        return {"input_ids": tokens, "labels": tokens, "input_features": randn(generator, 2, 128, 8 * LENGTH)}
    name = "input_ids" if "input_ids" in wanted else "inputs"
    return {name: tokens, "labels": label if family == "sequence_classification" else tokens.clone()}
