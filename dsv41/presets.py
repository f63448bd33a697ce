"""Model configs by name: the release, and smaller models that keep every mechanism of it.

| name     | what it is for                                                                                 |
|----------|------------------------------------------------------------------------------------------------|
| `tiny`   | every mechanism in 11 small layers; equal to the config of the recorded `golden/tiny`          |
| `odd`    | no number in common with `tiny` or `full`: shows what is hard-coded                            |
| `kernel` | the real head, window and index sizes on a narrow model; equal to `golden/kernel_dims`         |
| `h200`   | the release at full depth and width, 128 routed experts, small Engram tables: fits one H200    |
| `full`   | the release                                                                                    |

The release is written once, in its own spelling and nesting; every other preset is what it changes.
"""

from collections.abc import Mapping
from typing import Any

from dsv41.config import ModelConfig, engram_primes

RELEASE: Mapping[str, Any] = {
    "architectures": ["DeepseekV41ForCausalLM"],
    "model_type": "deepseek_v41",
    "dtype": "bfloat16",
    "transformers_version": "5.6.0",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "image_token_id": 129264,
    "quantization_config": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [32, 32],
        "scale_fmt": "ue8m0",
        "expert_dtype": "fp4",
    },
    "text_config": {
        "model_type": "deepseek_v41_text",
        "vocab_size": 129280,
        "hidden_size": 5120,
        "moe_intermediate_size": 2304,
        "num_hidden_layers": 40,
        "num_attention_heads": 64,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 1280,
        "o_lora_rank": 1024,
        "o_groups": 8,
        "hidden_act": "silu",
        "swiglu_limit": 10.0,
        "rms_norm_eps": 1e-20,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "tie_word_embeddings": False,
        "max_position_embeddings": 1048576,
        "rope_theta": 10000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 65536,
        },
        "n_routed_experts": 384,
        "n_shared_experts": 1,
        "num_experts_per_tok": 6,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "sliding_window": 128,
        "compress_ratios": [0] * 2 + [2] * 18 + [1] * 20 + [0] * 3,  # the last three are the draft stages
        "compress_rope_theta": 160000,
        "kv_source_layer_ids": [2, 8, 14, 20],
        "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 512,
        "candidate_source_layer_id": 20,
        "candidate_topk_blocks": 2048,
        "candidate_block_size": 8,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-06,
        "engram_layer_ids": [1, 14],
        "engram_num_embeddings": [384006168, 384016682],
        "engram_max_ngram_size": 4,
        "engram_vocab_size": 16000000,
        "engram_n_heads": 8,
        "engram_head_dim": 256,
        "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": 99092,
        "num_nextn_predict_layers": 3,
        "dspark_block_size": 5,
        "dspark_noise_token_id": 128799,
        "dspark_target_layer_ids": [37, 38, 39],
        "dspark_markov_rank": 256,
        "dspark_n_routed_experts": 128,
        "dspark_num_experts_per_tok": 3,
    },
    "vision_config": {
        "model_type": "deepseek_v41_vision",
        "num_hidden_layers": 32,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "intermediate_size": 2816,
        "patch_size": 14,
        "rope_theta": 10000,
        "downsample_ratio": 3,
        "max_image_tokens": 1024,
        "min_pixels": 295936,
        "max_wh_ratio": None,
    },
}

TINY: Mapping[str, Any] = {
    "image_token_id": 511,
    "text_config": {
        "vocab_size": 512,
        "hidden_size": 128,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 11,
        "num_attention_heads": 8,
        "head_dim": 64,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 64,
        "o_lora_rank": 32,
        "o_groups": 4,
        "swiglu_limit": 2.0,  # low enough to clamp something
        "max_position_embeddings": 4096,
        "rope_scaling": {"factor": 8, "original_max_position_embeddings": 64},
        "n_routed_experts": 12,
        "num_experts_per_tok": 3,
        "sliding_window": 8,
        "compress_ratios": [0] * 2 + [2] * 5 + [1] * 4 + [0] * 3,
        "kv_source_layer_ids": [2, 5, 7],
        "index_source_layer_ids": [2, 3, 5, 7, 9],
        "index_n_heads": 16,
        "index_head_dim": 64,
        "index_topk": 8,
        "candidate_source_layer_id": 7,
        "candidate_topk_blocks": 4,
        "candidate_block_size": 4,
        "engram_layer_ids": [1, 5],
        "engram_vocab_size": 97,
        "engram_n_heads": 3,
        "engram_head_dim": 64,
        "engram_compressed_vocab_size": 382,
        "dspark_noise_token_id": 505,
        "dspark_target_layer_ids": [8, 9, 10],
        "dspark_markov_rank": 32,
        "dspark_n_routed_experts": 8,
        "dspark_num_experts_per_tok": 2,
    },
    "vision_config": {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "patch_size": 4,
        "max_image_tokens": 64,
        "min_pixels": 256,
    },
}

# Layer 0 owns states, window layer 3 stands inside a group, the candidate source (8) is not the owner (6).
ODD: Mapping[str, Any] = {
    "bos_token_id": 3,
    "eos_token_id": 5,
    "pad_token_id": 4,
    "image_token_id": 381,
    "text_config": {
        "vocab_size": 384,
        "hidden_size": 160,
        "moe_intermediate_size": 96,
        "num_hidden_layers": 10,
        "num_attention_heads": 6,
        "head_dim": 96,
        "qk_rope_head_dim": 24,
        "q_lora_rank": 96,
        "o_lora_rank": 64,
        "o_groups": 2,
        "swiglu_limit": 1.25,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2046,
        "rope_theta": 5000,
        "rope_scaling": {
            "factor": 3,
            "beta_fast": 24,
            "beta_slow": 2,
            "original_max_position_embeddings": 48,
        },
        "n_routed_experts": 10,
        "num_experts_per_tok": 4,
        "routed_scaling_factor": 2.25,
        "sliding_window": 12,
        "compress_ratios": [1, 1, 2, 0, 2, 2, 1, 1, 1, 1, 0],
        "compress_rope_theta": 70000,
        "kv_source_layer_ids": [0, 2, 6],
        "index_source_layer_ids": [0, 2, 5, 6, 8, 9],
        "index_n_heads": 5,
        "index_head_dim": 32,
        "index_topk": 6,
        "candidate_source_layer_id": 8,
        "candidate_topk_blocks": 3,
        "candidate_block_size": 3,
        "hc_mult": 3,
        "hc_sinkhorn_iters": 7,
        "hc_eps": 1e-5,
        "engram_layer_ids": [0, 3, 6],
        "engram_max_ngram_size": 3,
        "engram_vocab_size": 41,
        "engram_n_heads": 2,
        "engram_head_dim": 32,
        "engram_pad_token_id": 4,
        "engram_compressed_vocab_size": 300,
        "num_nextn_predict_layers": 1,
        "dspark_block_size": 4,
        "dspark_noise_token_id": 377,
        "dspark_target_layer_ids": [4, 8],
        "dspark_markov_rank": 24,
        "dspark_n_routed_experts": 6,
        "dspark_num_experts_per_tok": 1,
    },
    "vision_config": {
        "num_hidden_layers": 3,
        "hidden_size": 48,
        "num_attention_heads": 3,
        "intermediate_size": 80,
        "patch_size": 6,
        "rope_theta": 3000,
        "downsample_ratio": 2,
        "max_image_tokens": 40,
        "min_pixels": 600,
    },
}

KERNEL: Mapping[str, Any] = {
    "image_token_id": 511,
    "text_config": {
        "vocab_size": 512,
        "hidden_size": 256,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 5,
        "q_lora_rank": 128,
        "o_lora_rank": 64,
        "swiglu_limit": 3.0,
        "n_routed_experts": 16,
        "compress_ratios": [0, 2, 1, 1, 1, 0],
        "kv_source_layer_ids": [1, 2],
        "index_source_layer_ids": [1, 2, 3],
        "index_topk": 64,
        "candidate_source_layer_id": 2,
        "candidate_topk_blocks": 12,
        "engram_layer_ids": [1],
        "engram_vocab_size": 127,
        "engram_n_heads": 2,
        "engram_compressed_vocab_size": 382,
        "num_nextn_predict_layers": 1,
        "dspark_noise_token_id": 505,
        "dspark_target_layer_ids": [2, 3, 4],
        "dspark_markov_rank": 64,
        "dspark_n_routed_experts": 8,
    },
    "vision_config": {
        "num_hidden_layers": 1,
        "hidden_size": 128,
        "num_attention_heads": 2,
        "intermediate_size": 128,
        "max_image_tokens": 64,
        "min_pixels": 256,
    },
}

H200: Mapping[str, Any] = {"text_config": {"n_routed_experts": 128, "engram_vocab_size": 400_000}}

CHANGES: Mapping[str, Mapping[str, Any]] = {
    "tiny": TINY,
    "odd": ODD,
    "kernel": KERNEL,
    "h200": H200,
    "full": {},
}
PRESETS = tuple(CHANGES)


def preset(name: str) -> ModelConfig:
    """The config called `name`.

    Raises:
        ValueError: no preset has that name; the sentence lists those there are.
    """
    if name not in CHANGES:
        raise ValueError(f"unknown preset {name!r}; there are {', '.join(PRESETS)}")
    released = _merge(RELEASE, CHANGES[name])
    text = released["text_config"]
    primes = engram_primes(
        layers=len(text["engram_layer_ids"]),
        orders=text["engram_max_ngram_size"] - 1,
        heads=text["engram_n_heads"],
        start=text["engram_vocab_size"],
    )
    text["engram_num_embeddings"] = [sum(map(sum, orders)) for orders in primes]
    return ModelConfig.from_released(released)


def _merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        merged[key] = _merge(base[key], value) if isinstance(value, Mapping) else value
    return merged
