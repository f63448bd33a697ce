"""How the released `config.json` spells what `dsv41.config` calls by our names.

The file is nested, so every key here is a dotted path. Only `model/weights.py` shares that spelling.
Plain dicts come in and go out: the dataclasses are unknown here. Only the standard library is imported.
"""

import difflib
import json
from collections.abc import Iterable, Mapping
from typing import Any

# Our name -> the released key. A dot on the left is a nested dataclass of `ModelConfig`.
SPELLING: Mapping[str, str] = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "pad_token": "pad_token_id",
    "image_token": "image_token_id",
    "vocab_size": "text_config.vocab_size",
    "hidden_size": "text_config.hidden_size",
    "num_layers": "text_config.num_hidden_layers",
    "num_heads": "text_config.num_attention_heads",
    "head_dim": "text_config.head_dim",
    "rope_dim": "text_config.qk_rope_head_dim",
    "q_rank": "text_config.q_lora_rank",
    "o_rank": "text_config.o_lora_rank",
    "o_groups": "text_config.o_groups",
    "window_tokens": "text_config.sliding_window",
    "ratios": "text_config.compress_ratios",
    "kv_sources": "text_config.kv_source_layer_ids",
    "index_sources": "text_config.index_source_layer_ids",
    "index_heads": "text_config.index_n_heads",
    "index_dim": "text_config.index_head_dim",
    "index_topk": "text_config.index_topk",
    "candidate_source": "text_config.candidate_source_layer_id",
    "candidate_blocks": "text_config.candidate_topk_blocks",
    "candidate_block_states": "text_config.candidate_block_size",
    "num_experts": "text_config.n_routed_experts",
    "experts_per_token": "text_config.num_experts_per_tok",
    "expert_dim": "text_config.moe_intermediate_size",
    "route_scale": "text_config.routed_scaling_factor",
    "swiglu_limit": "text_config.swiglu_limit",
    "norm_eps": "text_config.rms_norm_eps",
    "copies": "text_config.hc_mult",
    "sinkhorn_iters": "text_config.hc_sinkhorn_iters",
    "hyper_eps": "text_config.hc_eps",
    "rope_theta": "text_config.rope_theta",
    "compressed_rope_theta": "text_config.compress_rope_theta",
    "yarn.factor": "text_config.rope_scaling.factor",
    "yarn.beta_fast": "text_config.rope_scaling.beta_fast",
    "yarn.beta_slow": "text_config.rope_scaling.beta_slow",
    "yarn.original_tokens": "text_config.rope_scaling.original_max_position_embeddings",
    "max_tokens": "text_config.max_position_embeddings",
    "engram.layers": "text_config.engram_layer_ids",
    "engram.num_rows": "text_config.engram_num_embeddings",
    "engram.max_ngram": "text_config.engram_max_ngram_size",
    "engram.search_start": "text_config.engram_vocab_size",
    "engram.heads": "text_config.engram_n_heads",
    "engram.dim": "text_config.engram_head_dim",
    "engram.pad_token": "text_config.engram_pad_token_id",
    "engram.compressed_vocab": "text_config.engram_compressed_vocab_size",
    "draft.stages": "text_config.num_nextn_predict_layers",
    "draft.block_tokens": "text_config.dspark_block_size",
    "draft.noise_token": "text_config.dspark_noise_token_id",
    "draft.target_layers": "text_config.dspark_target_layer_ids",
    "draft.markov_rank": "text_config.dspark_markov_rank",
    "draft.num_experts": "text_config.dspark_n_routed_experts",
    "draft.experts_per_token": "text_config.dspark_num_experts_per_tok",
    "vision.num_layers": "vision_config.num_hidden_layers",
    "vision.hidden_size": "vision_config.hidden_size",
    "vision.num_heads": "vision_config.num_attention_heads",
    "vision.intermediate_size": "vision_config.intermediate_size",
    "vision.patch": "vision_config.patch_size",
    "vision.rope_theta": "vision_config.rope_theta",
    "vision.downsample": "vision_config.downsample_ratio",
    "vision.max_tokens": "vision_config.max_image_tokens",
    "vision.min_pixels": "vision_config.min_pixels",
    "vision.max_wh_ratio": "vision_config.max_wh_ratio",
}

MODEL_TYPE = "deepseek_v41"
# Names that only the flat inference/config.json of the release uses.
INFERENCE_KEYS = ("dim", "n_layers", "n_heads", "moe_inter_dim", "window_size", "n_activated_experts")

# The implementation computes these and nothing else, so another value must stop the load.
FIXED: Mapping[str, Any] = {
    "model_type": MODEL_TYPE,
    "dtype": "bfloat16",
    "quantization_config.quant_method": "fp8",
    "quantization_config.activation_scheme": "dynamic",
    "quantization_config.weight_block_size": [32, 32],
    "quantization_config.scale_fmt": "ue8m0",
    "quantization_config.expert_dtype": "fp4",
    "text_config.model_type": "deepseek_v41_text",
    "text_config.num_key_value_heads": 1,
    "text_config.hidden_act": "silu",
    "text_config.attention_bias": False,
    "text_config.tie_word_embeddings": False,
    "text_config.rope_scaling.rope_type": "yarn",
    "text_config.n_shared_experts": 1,
    "text_config.scoring_func": "sqrtsoftplus",
    "text_config.topk_method": "noaux_tc",
    "text_config.norm_topk_prob": True,
    "vision_config.model_type": "deepseek_v41_vision",
}
# Absent means the fixed value: the release's own inference/config.json lacks norm_topk_prob, yet it is true.
FIXED_IF_PRESENT = frozenset(
    {
        "dtype",
        "text_config.model_type",
        "text_config.norm_topk_prob",
        "vision_config.model_type",
    }
)

# Known, written back, and without effect on inference.
IGNORED: Mapping[str, Any] = {
    "architectures": ["DeepseekV41ForCausalLM"],
    "transformers_version": "5.6.0",
    "text_config.attention_dropout": 0.0,
    "text_config.initializer_range": 0.02,
    "text_config.use_cache": True,
}


def read(released: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The raw values of a released config by our names, and the keys that nobody here knows.

    Raises:
        ValueError: another layout or model, or a fixed value that differs.
    """
    check_layout(released)
    flat = flatten(released)
    if flat.get("vision_config", 0) is None:  # a text-only config may say so
        del flat["vision_config"]
    for key in FIXED:
        if key in flat:
            check_fixed(key, flat[key])
        elif key not in FIXED_IF_PRESENT:
            raise ValueError(f"the config lacks {key}; only {FIXED[key]!r} is supported")
    known = {*SPELLING.values(), *FIXED, *IGNORED}
    values = {name: flat[key] for name, key in SPELLING.items() if key in flat}
    return values, tuple(key for key in flat if key not in known)


def write(values: Mapping[str, Any]) -> dict[str, Any]:
    """The nested released form of values by our names; a section without values is left out."""
    flat = {**FIXED, **IGNORED, **{SPELLING[name]: value for name, value in values.items()}}
    if not any(name.startswith("vision.") for name in values):
        flat = {key: value for key, value in flat.items() if not key.startswith("vision_config.")}
    released: dict[str, Any] = {}
    for key, value in flat.items():
        *parents, leaf = key.split(".")
        node = released
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = list(value) if isinstance(value, tuple | list) else value
    return released


def flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` as `{"a.b": 1}`."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        path = f"{prefix}{key}"
        flat.update(flatten(value, path + ".") if isinstance(value, Mapping) else {path: value})
    return flat


def check_layout(released: Any) -> None:
    """Refuse what is not the nested config of exactly this model.

    A flat reader would find some keys and default the rest; a prefix test on the type would take V4 for V4.1.
    """
    if not isinstance(released, Mapping):
        raise ValueError(f"a config must be a JSON object, not {type(released).__name__}")
    if not isinstance(released.get("text_config"), Mapping):
        leaves = {key.rsplit(".", 1)[-1] for key in SPELLING.values() if key.startswith("text_config.")}
        flat = [key for key in released if key in leaves or key in INFERENCE_KEYS]
        found = f"flat keys ({', '.join(flat[:4])}, ...)" if flat else "no text_config object"
        if released.get("model_type", MODEL_TYPE) != MODEL_TYPE:
            found += f" and model_type {released['model_type']!r}"
        raise ValueError(
            f"found {found}; expected the released nested config.json: model_type {MODEL_TYPE!r} with "
            "text_config, vision_config and quantization_config objects"
        )
    if released.get("model_type") != MODEL_TYPE:
        raise ValueError(
            f"model_type is {released.get('model_type')!r}, but this package runs {MODEL_TYPE!r} only"
        )


def check_fixed(key: str, value: Any) -> None:
    """Refuse another value than the one the implementation computes. `True` is not 1 here."""
    expected = FIXED[key]
    if type(value) is not type(expected) or value != expected:
        raise ValueError(f"{key} is {value!r}, but only {expected!r} is supported")


def resolve(key: str) -> str:
    """Our name of a key given in either spelling (`text_config.` may be left out), or the key in `FIXED`.

    Raises:
        ValueError: no such key; the sentence lists close matches.
    """
    ours = {released: name for name, released in SPELLING.items()}
    if key in SPELLING:
        return key
    for path in (key, f"text_config.{key}", f"quantization_config.{key}"):
        if path in ours or path in FIXED:
            return ours.get(path, path)
    names = {
        name for path in (*SPELLING, *SPELLING.values(), *FIXED) for name in (path, path.rsplit(".", 1)[-1])
    }
    close = difflib.get_close_matches(key, sorted(names), n=3)
    hint = f"; close matches: {', '.join(close)}" if close else ""
    raise ValueError(f"unknown config key {key!r}{hint}")


def parse_overrides(overrides: str | Iterable[str]) -> list[tuple[str, Any]]:
    """Flat changes from `key=value` strings (JSON values, else strings) and JSON objects, in order.

    Raises:
        ValueError: an item is neither.
    """
    changes: list[tuple[str, Any]] = []
    for item in [overrides] if isinstance(overrides, str) else overrides:
        if item.lstrip().startswith("{"):
            try:
                changes.extend(flatten(json.loads(item)).items())
            except ValueError as error:
                raise ValueError(f"override {item!r} is not valid JSON: {error}") from error
            continue
        key, equals, text = item.partition("=")
        if not equals or not key.strip():
            raise ValueError(f"override {item!r} must be key=value or a JSON object")
        try:
            value = json.loads(text)
        except ValueError:  # a bare word
            value = text.strip()
        changes.extend(flatten({key.strip(): value}).items())
    return changes
