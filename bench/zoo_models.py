"""Tiny randomly initialised models of the architectures of the installed `transformers` package."""

import dataclasses
import re
import sys
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers
from transformers import PretrainedConfig, image_transforms
from transformers.loss import loss_utils  # noqa: F401 # has its modules loaded, for ``tiny_models`` to mend
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from zoo_batches import AUDIO_LMS, HEAD, IMAGE, VOCAB, WIDTH, Batch, batch, count_tokens, multimodal

Build = Callable[[], tuple[torch.nn.Module, Callable[[int], Batch]]]


class Tiny(NamedTuple):
    name: str
    family: str
    build: Build


FAMILIES = {
    "multimodal": "IMAGE_TEXT_TO_TEXT",
    "object_detection": "OBJECT_DETECTION",
    "image_classification": "IMAGE_CLASSIFICATION",
    "audio_classification": "AUDIO_CLASSIFICATION",
    "ctc": "CTC",
    "seq2seq_lm": "SEQ_TO_SEQ_CAUSAL_LM",
    "masked_lm": "MASKED_LM",
    "sequence_classification": "SEQUENCE_CLASSIFICATION",
    "causal_lm": "CAUSAL_LM",
}

# The first pattern that an attribute's name has in it gives the most that the attribute's integers may be.
RULES: tuple[tuple[str, int], ...] = (
    (r"kernel|stride|factor|merge|temporal|(?<!attention_)window|_per_sec|ratio|mult|conv_width", 10**9),
    (r"conv1d|group_size|_period$|_offset$|^(num_)?labels|_id$|_index$|^seed$|num_channels", 10**9),
    (r"audio_channels|hash_(?!buckets)", 10**9),
    (r"attention_window$", 8),
    (r"num_embeddings|codebook_size|hash_buckets", 64),
    (r"vocab_size", VOCAB),
    (r"tokens_per_image$|num_image_tokens", 16),
    (r"(image|crop|tile|img)_size$|^input_size$", IMAGE),
    (r"num_queries|num_denoising|patch_size$", 8),
    (r"(kv|key_value)_(n_)?heads|num_query_groups", 2),
    (r"^mamba_n(um)?_heads", 8),
    (r"head_(dim|size)|^d_kv$|^d_head$|kv_channels|headdim|^mamba_d_head", HEAD),
    (r"heads?(_per_layer)?$|^num_heads|_heads_", 4),
    (r"first_k_dense|num_dense_layers|nextn|shared_experts?$|interval|sparse_step|^n_groups?$", 1),
    (r"topk_group|expert_group|mamba_n_?groups", 1),
    (r"top_?k|experts_per_tok|^moe_k$", 2),
    (r"experts$|expert_num$", 4),
    (r"num_res_blocks", 1),
    (r"layers?$|depths?$|num_blocks?|block_repeats|layers_per_stack|numb_of_layers", 2),
    (r"position|length|max_len|_ctx|context|query_tokens|latents?_", 128),
    (r"(size|dim|width|channels?|rank|d_model|n_embd|d_ff|dff|d_inner|d_latents|dim_ff|filters)s?$", WIDTH),
    (r"(size_mlp|size_global)$", WIDTH),
)
DEFAULTS = {"head_dim": HEAD, "vocab_size": 32, "num_experts_per_tok": 2}
PASS = {"num_experts", "num_local_experts", "moe_intermediate_size"}
RESNET: Batch = {
    "embedding_size": 16,
    "hidden_sizes": [16] * 4,
    "depths": [1] * 4,
    "out_indices": [1, 2, 3, 4],
}
LETTERS = {48 + digit: 65 + digit for digit in range(10)}
IMAGE_TOKENS = {"<image>": 99} | {f"IMGIMG{str(i).translate(LETTERS)}Z": 128 + i for i in range(64)}
AXES = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
OVERRIDES: dict[str, dict[str, Any]] = {
    "reformer": {"axial_pos_shape": (4, 4), "axial_pos_embds_dim": (32, 32), "max_position_embeddings": 16},
    "swin|donut-swin": {"image_size": 64, "embed_dim": 16, "num_heads": (2, 2, 2, 2), "window_size": 2},
    "emu3.vq_config": {"base_channels": 32, "hidden_size": 32, "channel_multiplier": [1, 1, 1, 1]},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "ernie4_5_vl_moe.text_config": {"rope_parameters": AXES | {"mrope_section": [3, 3, 2]}},
    "mllama.vision_config": {"intermediate_layers_indices": [0, 1], "vision_output_dim": 192},
    "(llava_next.*|llava_onevision|granite4_vision)": {"image_grid_pinpoints": [[32, 64]]},
    "(chameleon|janus).vq_config": {"channel_multiplier": [1, 1, 1, 1], "base_channels": 32},
    "pix2struct.vision_config|kosmos-2.5.vision_config": {"patch_embed_hidden_size": 192},
    "glm4v_moe.text_config": {"rope_parameters": AXES | {"mrope_section": [1, 1, 2]}},
    "d_fine": {
        "image_size": 64
    },  # at 32 its last maps have one place, and every bias before a batch norm cancels
    "efficientnet": {
        "width_coefficient": 0.05,
        "depth_coefficient": 0.1,
        "hidden_dim": 64,
        "initializer_range": 0.5,
    },
    "molmo2.vision_config": {"image_size": [32, 32], "num_position_embeddings": 16},
    "bit": {"num_groups": 4},
    "granite4_vision": {"downsample_rate": "2/4", "deepstack_layer_map": [[-1, 0]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "pvt": {"hidden_sizes": (16, 16, 16, 16), "num_attention_heads": (1, 2, 2, 2)},
    "deepseek_vl_hybrid.high_res_vision_config": {"global_attn_indexes": [0]},
    "flaubert": {"bos_index": 0},
    "deepseek_ocr2.text_config": {"mlp_layer_types": ["dense", "sparse"]},
    "molmo2": {"image_patch_id": 99},
    "levit": {"image_size": 64, "patch_size": 16, "hidden_sizes": (32, 32, 32)},
    "xlstm": {"qk_dim_factor": 1.0},
    ".*swinv2": {"embed_dim": 16, "num_heads": (2, 2, 2, 2), "window_size": 4},
    "lilt": {"hidden_size": 96},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_ssm": 128},
    "blt": {"num_hidden_layers": 2, "encoder_hash_byte_group_vocab": 64},
    "bamba": {"attn_layer_indices": [1]},
    "nemotron_h_omni.vision_config": {"video_temporal_patch_size": 2},
    "(gptj|codegen)": {"rotary_dim": 8},
    "mistral_large4.text_config": {"kv_source_layers": [0, 1, 2, 3]},
    "xmod": {"default_language": "en_XX"},
    "minicpm(v4_6|v4_7|_ocr).vision_config": {"insert_layer_id": 0},
    "nemotron": {"num_key_value_heads": 2},
    "deepseek_ocr2.*sam_config": {"downsample_channels": [64, 64]},
    "kosmos-2.*": {"latent_query_num": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "dbrx.attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0},
    "step3p7.text_config": {"sliding_window": 8},
    "molmo2.adapter_config": {"vision_feature_layer": [1, 0]},
    "glm5_next.text_config": {"index_kpool": 2},
    "vibevoice_asr": {"acoustic_tokenizer_chunk_size": 3200},
    "mobilenet_v[12]": {"depth_multiplier": 0.25},
    "focalnet": {"embed_dim": 16, "focal_levels": (1, 1, 1, 1)},
    "lw_detr": {"projector_scale_factors": [1.0]},
    "mobilevitv2": {"image_size": 64, "width_multiplier": 0.25},
    "lw_detr.backbone_config": {"num_windows": 4},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "ReformerModelWithLMHead": {"is_decoder": True},
    "qwen.*omni.*_thinker": {"vision_start_token_id": 120},
    "inkling.*audio_config": {"mel_vocab_size": 16},
    "mllama.text_config": {"cross_attention_layers": [1]},
    ".*tokenizer_encoder_config": {"num_filters": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1},
    "muse_(glimmer|spark)": {"out_hidden_size": 256},
    "(chameleon|emu3)": {"vocabulary_map": IMAGE_TOKENS},
    "cvt": {"depth": (1, 2, 3), "num_heads": (1, 2, 4)},
    "layoutlmv3": {"coordinate_size": 11, "shape_size": 10},
    "vipllava": {"vision_feature_layer": (-1, -2)},
    "hunyuan_vl.text_config": {"rope_parameters": AXES},
    "hiera": {"embed_dim": 16, "num_heads": (1, 2, 2, 2)},
    "llama4.vision_config": {"intermediate_size": 256},
    "aria": {"projector_patch_to_query_dict": {16: 8}},
    "gemma3n.*": {"num_kv_shared_layers": 0},
    "idefics": {"freeze_text_layers": False},
    "cohere_compass_text|cohere_compass.text_config": {
        "layer_types": ["full_attention"] * 2,
        "rope_parameters": {"full_attention": AXES},
    },
    "(glm4v|glm46v|glm_ocr|qwen2_vl|qwen2_5_vl|glmga|paddleocr_vl|qwen2_5_omni_thinker).text_config": {
        "rope_parameters": AXES
    },
    "qwen4_exp.*": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "dots3_note.text_config|dots3_note_text": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 32,
        "swa_kv_lora_rank": 32,
        "swa_head_dim": 32,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 16,
    },
    "gemma4": {
        "vision_config": {
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 16,
            "patch_size": 8,
            "pooling_kernel_size": 2,
            "position_embedding_size": 16,
        }
    },
    "perceiver": {
        "num_latents": 8,
        "d_latents": 32,
        "num_self_attends_per_block": 1,
        "num_blocks": 1,
        "num_cross_attention_heads": 1,
        "image_size": 32,
        "max_position_embeddings": 16,
    },
}


def limit(name: str, value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(limit(name, one) for one in value)
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    return min(value, next((most for pattern, most in RULES if re.search(pattern, name)), value))


def token_id(name: str, value: Any) -> Any:
    if isinstance(value, list):
        return [token_id(name, one) for one in value]
    if value is None and not re.match("(image|video|audio)_token_", name):
        return 0 if name == "pad_token_id" else None
    if isinstance(value, int) and value < 10:
        return value
    return 100 + zlib.crc32(re.sub(r"_token_(id|index)$", "", name).encode()) % 89


def kept_layers(lists: list[Any], count: int) -> list[int]:
    """The indices of a few layers that between them have every kind that the per-layer lists name."""
    kept: list[int] = []
    seen: set[tuple[int, str]] = set()
    for index in range(count):
        kinds = {(number, repr(one[index])) for number, one in enumerate(lists)}
        if not kinds <= seen and len(kept) < 4:
            kept.append(index)
            seen |= kinds
    return kept if len(kept) > 1 else [0, 1]


def rope(parameters: dict[str, Any], head: int) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, given in parameters.items():
        value = given
        if isinstance(value, dict):
            value = rope(value, head)
        elif key.endswith("section") and isinstance(value, (list, tuple)):
            total = max(1, sum(value) * HEAD // head)
            value = [total // len(value) + (i < total % len(value)) for i in range(len(value))]
        elif key in ("short_factor", "long_factor") and value is not None:
            value = [1.0] * max(1, len(value) * HEAD // head)
        result[key] = value
    return result


def shrunk(  # noqa: C901 # one rule after the other
    config: PretrainedConfig, path: str, owner: str = ""
) -> PretrainedConfig:
    """The configuration made anew, its integers limited and its layers and sub-configurations cut down."""
    values = {key: value for key, value in vars(config).items() if not key.startswith("_")}
    kwargs: dict[str, Any] = {}
    layers = values.get("num_hidden_layers") or values.get("num_layers")
    lists = {k: v for k, v in values.items() if isinstance(v, (list, tuple)) and len(v) == layers}
    kept = kept_layers(list(lists.values()), layers) if lists and type(layers) is int and layers > 2 else None
    heads = values.get("num_attention_heads")
    head = values.get("head_dim") or (values.get("hidden_size") or 0) // (heads if type(heads) is int else 1)
    for field in dataclasses.fields(config):
        name = field.name
        value = values.get(config.attribute_map.get(name, name))
        if name.startswith("_") or (value is None and field.default is not None):
            continue
        if isinstance(value, PretrainedConfig) and value.model_type == "timm_backbone":
            kwargs[name] = transformers.ResNetConfig(**RESNET)
        elif isinstance(value, PretrainedConfig):
            kwargs[name] = shrunk(value, f"{path}.{name}")
        elif re.search(r"_token_(id|index)$", name):
            kwargs[name] = token_id(name, value)
        elif kept and name in lists:
            kwargs[name] = limit(name, type(lists[name])(lists[name][index] for index in kept))
        elif kept and name in ("num_hidden_layers", "num_layers"):
            kwargs[name] = len(kept)
        elif isinstance(value, dict) and name.startswith("rope"):
            kwargs[name] = rope(value, head or HEAD)
        elif name in DEFAULTS and value is None:
            kwargs[name] = DEFAULTS[name]
        elif re.search(r"(kv|key_value)_heads$", name) and "kv_lora_rank" in values:
            kwargs[name] = 4
        elif field.default is not None or name in PASS:
            kwargs[name] = limit(name, value)
    kwargs |= {name: 0.0 for name in ("mask_time_prob", "mask_feature_prob") if name in kwargs}
    if config.is_encoder_decoder:
        kwargs |= {k: 0 for k in ("decoder_start_token_id", "pad_token_id") if kwargs.get(k) is None}
    if out := vars(config).get("_out_indices"):
        most = (len(kept) if kept else limit("num_layers", layers)) if isinstance(layers, int) else max(out)
        kwargs["out_indices"] = sorted({min(index, most) for index in out})
    for key, change in OVERRIDES.items():
        if re.fullmatch(key, path) or re.fullmatch(key, owner):
            kwargs |= change
    return type(config)(**kwargs)


def builder(class_name: str, model_type: str, family: str) -> Build:
    def build() -> tuple[torch.nn.Module, Callable[[int], Batch]]:
        model_class = getattr(transformers, class_name)
        default = (model_class.config_class or CONFIG_MAPPING[model_type])()
        config = shrunk(default, default.model_type, class_name)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = model_class(config)
        model.train()
        if family == "multimodal" or re.match(AUDIO_LMS, class_name):
            count = count_tokens(model)
            return model, lambda step: multimodal(model, count, step)
        return model, lambda step: batch(model, family, step)

    return build


def tiny_models() -> list[Tiny]:
    """Patches the losses that import a function on tensors only where Pillow, unneeded, is installed."""
    for name, module in list(sys.modules.items()):
        if name.startswith("transformers.loss."):
            vars(module).setdefault("center_to_corners_format", image_transforms.center_to_corners_format)
    result: dict[str, Tiny] = {}
    for family, part in FAMILIES.items():
        for model_type, classes in getattr(modeling_auto, f"MODEL_FOR_{part}_MAPPING_NAMES").items():
            for one in (classes,) if isinstance(classes, str) else classes:
                result.setdefault(one, Tiny(f"{family}/{one}", family, builder(one, model_type, family)))
    return list(result.values())
