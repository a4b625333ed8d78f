"""Models with several modalities, saved whole, as on the hub; text alone is asked of them."""

from typing import Any

from dense import ALTERNATING, MINISTRAL3, NOT_PER_LAYER, rope
from experts import FLOOR
from kind import WINDOW, kind, wrapper
from latent import EVERY_HEAD, MISTRAL4
from recurrent import CONVOLUTIONS

TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
PIXTRAL = {**TOWER, "model_type": "pixtral", "head_dim": 16}
QWEN = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64, "patch_size": 14}
SECTIONS: dict[str, Any] = {"mrope_section": [2, 3, 3]}  # of a head's frequencies: for time, height and width
HALF = rope(mrope_interleaved=True, mrope_section=[2, 1, 1], partial_rotary_factor=0.5)  # of each head


def ids(*names: str) -> dict[str, Any]:
    """Special tokens under their config keys, from 500 on."""
    return {name: 500 + i for i, name in enumerate(names)}


IMAGES = ids("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
AROUND = ids("image_token_index", "boi_token_index", "eoi_token_index")
PLAIN = kind("", "llama")

WRAPPERS = {
    "gemma3_full": wrapper(
        "SigLIP before Gemma 3: 4 B and more",
        "gemma3",
        kind("", "gemma3_text", query_pre_attn_scalar=16, layer_types=ALTERNATING),
        seed=2,
        vision_config={**TOWER, "model_type": "siglip_vision_model"},
        mm_tokens_per_image=4,
        **AROUND,
    ),
    "gemma4_full": wrapper(
        "Gemma 4 with images",
        "gemma4",
        kind("", "gemma4_text", layer_types=ALTERNATING, **NOT_PER_LAYER),
        vision_config={**TOWER, "num_key_value_heads": 2, "head_dim": 16},
        audio_config=None,
        **ids(
            "image_token_id",
            "boi_token_id",
            "eoi_token_id",
            "audio_token_id",
            "boa_token_id",
            "eoa_token_id",
            "video_token_id",
        ),
    ),
    "qwen2_vl": wrapper(
        "rotary positions in three sections",
        "qwen2_vl",
        kind("", "qwen2_vl_text", rope_parameters=rope(**SECTIONS)),
        vision_config={"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2},
        **IMAGES,
    ),
    "qwen2_5_vl": wrapper(
        "the same, windows in the vision tower",
        "qwen2_5_vl",
        kind("", "qwen2_5_vl_text", rope_parameters=rope(**SECTIONS)),
        vision_config={**QWEN, "fullatt_block_indexes": [1]},
        **IMAGES,
    ),
    "qwen3_vl": wrapper(
        "interleaved sections, image features into several layers",
        "qwen3_vl",
        kind("", "qwen3_vl_text", rope_parameters=rope(mrope_interleaved=True, **SECTIONS)),
        vision_config={**QWEN, "deepstack_visual_indexes": [0, 1]},
        **IMAGES,
    ),
    "qwen3_vl_moe": wrapper(
        "and experts",
        "qwen3_vl_moe",
        kind("", "qwen3_vl_moe_text", rope_parameters=rope(mrope_interleaved=True, **SECTIONS)),
        vision_config={**QWEN, "deepstack_visual_indexes": [0, 1]},
        **IMAGES,
    ),
    "qwen3_5_full": wrapper(
        "Qwen 3.5 as published",
        "qwen3_5",
        kind("", "qwen3_5_text", rope_parameters=HALF),
        vision_config=QWEN,
        **IMAGES,
    ),
    "qwen3_5_moe_full": wrapper(
        "and experts", "qwen3_5_moe", kind("", "qwen3_5_moe_text", rope_parameters=HALF), vision_config=QWEN, **IMAGES
    ),
    "mistral3": wrapper(
        "Pixtral before Mistral",
        "mistral3",
        kind("", "mistral", sliding_window=None),
        vision_config=PIXTRAL,
        image_token_index=500,
    ),
    "mistral3_ministral3": wrapper(
        "Pixtral before Ministral 3",
        "mistral3",
        kind("", "ministral3", rope_parameters=MINISTRAL3),
        vision_config=PIXTRAL,
        image_token_index=500,
    ),
    "mistral4": wrapper(
        "Pixtral before Mistral 4's latent attention",
        "mistral3",
        kind("", "mistral4", head_dim=8, **MISTRAL4),
        vision_config=PIXTRAL,
        image_token_index=500,
    ),
    "llava": wrapper(
        "CLIP before Llama",
        "llava",
        PLAIN,
        vision_config={**TOWER, "model_type": "clip_vision_model", "projection_dim": 32},
        image_token_index=500,
    ),
    "internvl": wrapper(
        "InternViT before Qwen 2",
        "internvl",
        kind("", "qwen2"),
        vision_config={**TOWER, "image_size": [28, 28], "patch_size": [14, 14]},
        image_token_id=500,
    ),
    "smolvlm": wrapper("SigLIP before Llama", "smolvlm", PLAIN, vision_config=TOWER, image_token_id=500),
    "llama4_full": wrapper(
        "Llama 4 as published",
        "llama4",
        kind("", "llama4_text", attention_chunk_size=WINDOW, floor_scale=FLOOR),
        part="language_model",  # in transformers 5.24 the whole ends in an AttributeError without images
        vision_config={**TOWER, "intermediate_size": 128}
        | dict.fromkeys(("vision_output_dim", "projector_input_dim", "projector_output_dim"), 64),
        **AROUND,
    ),
    "glm4v": wrapper(
        "GLM 4 with images, rotary positions in three sections",
        "glm4v",
        kind("", "glm4v_text", rope_parameters=rope(partial_rotary_factor=1.0, **SECTIONS)),
        vision_config={**QWEN, "image_size": 28},
        **ids(
            "image_token_id",
            "video_token_id",
            "image_start_token_id",
            "image_end_token_id",
            "video_start_token_id",
            "video_end_token_id",
        ),
    ),
    "kimi_k25": wrapper(
        "MoonViT before DeepSeek-V3's layers",
        "kimi_k25",
        kind("", "deepseek_v3", **EVERY_HEAD),
        vision_config={
            key: TOWER[key] for key in TOWER if "size" not in key or key in ("hidden_size", "intermediate_size")
        },
    ),
    "lfm2_vl": wrapper(
        "SigLIP 2 before LFM2's convolutions",
        "lfm2_vl",
        kind("", "lfm2", layer_types=CONVOLUTIONS, full_attn_idxs=[1, 3]),
        vision_config={**TOWER, "model_type": "siglip2_vision_model"},
        image_token_id=500,
        projector_hidden_size=32,
    ),
}
