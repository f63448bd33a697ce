"""The config: what it reads, what it refuses and in which words, and the presets."""

import copy
import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from dsv41.config import EngineConfig, ModelConfig, Numerics, engram_primes
from dsv41.presets import PRESETS, preset
from dsv41.released import FIXED, IGNORED, SPELLING

SHARED = Path(__file__).resolve().parents[1].parent / "shared"
DATA = SHARED / "spec" / "data"
GOLDEN = {name: SHARED / "golden" / name / "model" for name in ("tiny", "kernel_dims")}


def released(**changes):
    """The tiny preset in released form, with `section__key=value` changes; `...` removes the key."""
    content = preset("tiny").to_released()
    for path, value in changes.items():
        *parents, leaf = path.split("__")
        node = content
        for parent in parents:
            node = node[parent]
        if value is ...:
            del node[leaf]
        else:
            node[leaf] = value
    return content


def text(**changes):
    return released(**{f"text_config__{key}": value for key, value in changes.items()})


def refused(content, *words):
    with pytest.raises(ValueError, match=r"^[^\n]+$") as error:
        ModelConfig.from_released(content)
    for word in words:
        assert word in str(error.value)


# --- reading and writing


def test_release_loads_and_writes_back_exactly():
    content = json.loads((DATA / "config.json").read_text())
    config = ModelConfig.load(DATA / "config.json")
    assert config.unknown_keys == ()
    assert config.to_released() == content
    assert config == preset("full")
    assert (config.num_layers, len(config.ratios), config.draft.stages) == (40, 40, 3)
    assert config.candidate_blocks * config.candidate_block_states == 16384
    assert config.engram.columns == 24
    assert config.numerics is Numerics.BF16


def test_other_released_form_configs_load():
    assert ModelConfig.load(GOLDEN["tiny"]) == preset("tiny")  # a directory
    assert ModelConfig.load(GOLDEN["kernel_dims"]) == preset("kernel")
    assert ModelConfig.load(DATA / "tiny_config.json").unknown_keys == ()


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_a_round_trip(name):
    config = preset(name)
    assert ModelConfig.from_released(json.loads(json.dumps(config.to_released()))) == config


def test_every_field_has_exactly_one_spelling():
    leaves = set()
    config = preset("full")
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        nested = dataclasses.fields(value) if dataclasses.is_dataclass(value) else []
        leaves |= {f"{field.name}.{inner.name}" for inner in nested} or {field.name}
    assert leaves - {"numerics", "unknown_keys"} == set(SPELLING)
    assert len({*SPELLING.values(), *FIXED, *IGNORED}) == len(SPELLING) + len(FIXED) + len(IGNORED)


def test_odd_shares_no_free_number_with_tiny_or_full():
    """What a component hard-codes from one preset, `odd` must expose."""
    odd = preset("odd").values()
    del odd["vision.max_wh_ratio"]  # null everywhere: the spec describes nothing else
    for other in (preset("tiny").values(), preset("full").values()):
        assert {name for name in odd if odd[name] == other[name]} == set()


def test_reading_does_not_modify_its_argument():
    content = released()
    before = copy.deepcopy(content)
    ModelConfig.from_released(content)
    assert content == before


def test_unknown_keys_are_listed_and_do_not_matter():
    content = text(new_trick=1)
    content["notes"] = {"author": "x"}
    config = ModelConfig.from_released(content)
    assert set(config.unknown_keys) == {"text_config.new_trick", "notes.author"}
    assert config == preset("tiny")
    assert config.with_overrides("index_topk=4").unknown_keys == config.unknown_keys


def test_optional_sections_may_be_missing_as_a_whole():
    content = released(vision_config=...)
    keys = [key for key in content["text_config"] if key.startswith(("engram_", "dspark_", "num_nextn_"))]
    for key in keys:
        del content["text_config"][key]
    content["text_config"]["compress_ratios"] = content["text_config"]["compress_ratios"][:11]
    config = ModelConfig.from_released(content)
    assert (config.engram.layers, config.engram.columns, config.draft.stages) == ((), 0, 0)
    assert config.vision is None
    assert ModelConfig.from_released(config.to_released()) == config


@pytest.mark.parametrize(
    "content",
    [
        released(vision_config=None),
        text(engram_layer_ids=[]),
        text(compress_ratios=[0] * 2 + [2] * 5 + [1] * 4),
    ],
)
def test_other_ways_to_say_the_same_load(content):
    config = ModelConfig.from_released(content)
    assert config.num_layers == len(config.ratios) == 11


def test_norm_topk_prob_absent_means_true():
    assert ModelConfig.from_released(text(norm_topk_prob=...)) == preset("tiny")


def test_load_says_what_is_wrong_with_the_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        ModelConfig.load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        ModelConfig.load(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="not valid JSON"):
        ModelConfig.load(tmp_path)


# --- refusing


def test_flat_layouts_are_refused():
    inference = json.loads((DATA / "inference_config.json").read_text())
    refused(inference, "flat keys", "vocab_size, dim", "expected the released nested config.json")
    v4 = {"model_type": "deepseek_v4", "hidden_size": 4096, "num_hidden_layers": 43}
    refused(v4, "flat keys (hidden_size, num_hidden_layers", "'deepseek_v4'", "text_config")
    refused({}, "no text_config object")
    refused([], "JSON object", "list")


@pytest.mark.parametrize("model_type", ["deepseek_v4", "deepseek_v41x", "DEEPSEEK_V41", None, 41])
def test_other_model_types_are_refused(model_type):
    refused(released(model_type=model_type), "model_type", repr(model_type))


@pytest.mark.parametrize("key", [key for key in FIXED if key != "model_type"])
def test_fixed_values_are_fixed(key):
    path = key.replace(".", "__")
    refused(released(**{path: "other"}), key, "'other'", repr(FIXED[key]))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("text_config__norm_topk_prob", False),
        ("text_config__norm_topk_prob", 1),
        ("text_config__n_shared_experts", 2),
        ("text_config__n_shared_experts", True),
        ("text_config__num_key_value_heads", 8),
        ("text_config__attention_bias", True),
        ("quantization_config__weight_block_size", [128, 128]),
        ("quantization_config__quant_method", ...),
        ("text_config__scoring_func", ...),
    ],
)
def test_fixed_values_in_disguise(path, value):
    refused(released(**{path: value}), path.replace("__", "."))


def test_missing_keys_are_named_in_one_sentence():
    refused(text(head_dim=..., hc_mult=...), "lacks text_config.head_dim, text_config.hc_mult")
    refused(released(vision_config__patch_size=...), "vision_config.patch_size")
    refused(
        text(engram_layer_ids=...), "text_config.engram_layer_ids"
    )  # part of a section is not its absence
    refused(text(dspark_markov_rank=...), "text_config.dspark_markov_rank")
    refused(released(eos_token_id=...), "eos_token_id")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("vocab_size", "512", "an integer"),
        ("vocab_size", 512.0, "an integer"),
        ("num_hidden_layers", True, "an integer"),
        ("hidden_size", None, "an integer"),
        ("hc_eps", math.nan, "a finite number"),
        ("rope_theta", math.inf, "a finite number"),
        ("rope_theta", 10**400, "a finite number"),
        ("swiglu_limit", False, "a finite number"),
        ("swiglu_limit", "10", "a finite number"),
        ("kv_source_layer_ids", 2, "a list of integers"),
        ("compress_ratios", [0, 0, 2.0], "a list of integers"),
        ("index_source_layer_ids", [True], "a list of integers"),
    ],
)
def test_wrong_types_are_refused(key, value, words):
    refused(text(**{key: value}), f"text_config.{key} is", words)


RATIOS = [
    0,
    0,
    2,
    2,
    2,
    2,
    2,
    1,
    1,
    1,
    1,
    0,
    0,
    0,
]  # tiny's; sources [2, 5, 7], index sources [2, 3, 5, 7, 9]


def with_ratio(layer, ratio):
    return [*RATIOS[:layer], ratio, *RATIOS[layer + 1 :]]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        # 1, 2: blocks of 32
        ({"hidden_size": 100}, ["hidden_size is 100", "multiple of 32"]),
        ({"q_lora_rank": 40}, ["q_lora_rank is 40", "multiple of 32"]),
        ({"o_lora_rank": 40}, ["o_lora_rank is 40", "multiple of 32"]),
        ({"moe_intermediate_size": 48}, ["moe_intermediate_size is 48", "multiple of 32"]),
        ({"head_dim": 80}, ["head_dim is 80", "multiple of 32"]),
        ({"index_head_dim": 48}, ["index_head_dim is 48", "multiple of 32"]),
        ({"engram_head_dim": 16}, ["engram_head_dim is 16", "multiple of 32"]),
        # 3, 4: rotation and output groups
        ({"qk_rope_head_dim": 15}, ["qk_rope_head_dim is 15", "even"]),
        ({"qk_rope_head_dim": 66}, ["qk_rope_head_dim is 66", "head_dim 64"]),
        ({"index_head_dim": 32, "qk_rope_head_dim": 48}, ["qk_rope_head_dim is 48", "index_head_dim 32"]),
        ({"o_groups": 3}, ["num_attention_heads is 8", "o_groups 3"]),
        ({"rope_theta": 1}, ["rope_theta is 1.0", "at least 2"]),
        # 5: residual copies
        ({"hc_mult": 1}, ["hc_mult is 1", "at least 2"]),
        ({"hc_mult": 5}, ["hc_mult is 5", "2 to 4"]),
        # 6: who shares what
        ({"compress_ratios": RATIOS[:-1]}, ["compress_ratios has 13 entries", "needs 14"]),
        ({"compress_ratios": [*RATIOS, 0]}, ["compress_ratios has 15 entries", "needs 14"]),
        ({"compress_ratios": with_ratio(12, 1)}, ["compress_ratios of layer 12 is 1", "draft stage"]),
        ({"compress_ratios": with_ratio(4, -1)}, ["compress_ratios of layer 4 is -1", "0, 1 or 2"]),
        ({"compress_ratios": with_ratio(4, 3)}, ["compress_ratios of layer 4 is 3", "0, 1 or 2"]),
        (
            {"compress_ratios": with_ratio(1, 2)},
            ["compress_ratios of layer 1 is 2", "no source at or before"],
        ),
        ({"compress_ratios": with_ratio(6, 1)}, ["of layer 6 is 1", "2 of layer 5", "kv_source_layer_ids"]),
        ({"compress_ratios": with_ratio(5, 0)}, ["kv_source_layer_ids has layer 5", "no states"]),
        ({"compress_ratios": with_ratio(9, 0)}, ["index_source_layer_ids has layer 9", "no states"]),
        (
            {"index_source_layer_ids": [2, 3, 7, 9]},
            ["kv_source_layer_ids has layer 5", "index_source_layer_ids"],
        ),
        (
            {"kv_source_layer_ids": [2, 5, 11]},
            ["kv_source_layer_ids has layer 11", "num_hidden_layers is 11"],
        ),
        ({"kv_source_layer_ids": [-1, 2]}, ["kv_source_layer_ids has layer -1"]),
        ({"kv_source_layer_ids": [5, 2, 7]}, ["kv_source_layer_ids has layer 2 after layer 5", "ascend"]),
        ({"index_source_layer_ids": [2, 2, 3]}, ["index_source_layer_ids has layer 2 after layer 2"]),
        ({"candidate_source_layer_id": -2}, ["candidate_source_layer_id is -2", "at least -1"]),
        ({"candidate_source_layer_id": 8}, ["candidate_source_layer_id is 8", "index_source_layer_ids"]),
        ({"candidate_source_layer_id": 5}, ["candidate_source_layer_id is 5", "layer 5 is 2 and must be 1"]),
        (
            {"kv_source_layer_ids": [2, 5, 7, 9]},
            ["index_source_layer_ids has layer 9", "candidate_source_layer_id 7", "states of layer 9"],
        ),
        ({"candidate_topk_blocks": 2}, ["index_topk is 8", "candidate_topk_blocks 2", "only 5 states"]),
        ({"index_topk": 14}, ["index_topk is 14", "only 13 states"]),
        # 7: Engram
        ({"engram_num_embeddings": [1025, 1460]}, ["engram_num_embeddings of layer 5 is 1460", "1459"]),
        ({"engram_num_embeddings": [1025]}, ["engram_num_embeddings has 1 entries for 2 layers"]),
        ({"engram_n_heads": 4}, ["engram_num_embeddings of layer 1 is 1025", "primes"]),
        ({"engram_layer_ids": [1, 11]}, ["engram_layer_ids has layer 11"]),
        ({"engram_layer_ids": [5, 1]}, ["engram_layer_ids has layer 1 after layer 5"]),
        ({"engram_max_ngram_size": 1}, ["engram_max_ngram_size is 1", "at least 2"]),
        ({"engram_compressed_vocab_size": 513}, ["engram_compressed_vocab_size is 513", "vocab_size is 512"]),
        ({"engram_pad_token_id": 512}, ["engram_pad_token_id is 512", "vocab_size is 512"]),
        ({"engram_vocab_size": 2**40}, ["engram_vocab_size is 1099511627776", "at most"]),
        # 8: experts
        ({"num_experts_per_tok": 13}, ["num_experts_per_tok is 13", "n_routed_experts is 12"]),
        ({"n_routed_experts": 0}, ["n_routed_experts is 0", "positive"]),
        # 9: draft
        ({"dspark_target_layer_ids": [9, 10, 11]}, ["dspark_target_layer_ids has layer 11"]),
        ({"dspark_target_layer_ids": []}, ["dspark_target_layer_ids is empty"]),
        ({"dspark_noise_token_id": 512}, ["dspark_noise_token_id is 512", "vocab_size is 512"]),
        (
            {"dspark_num_experts_per_tok": 9},
            ["dspark_num_experts_per_tok is 9", "dspark_n_routed_experts is 8"],
        ),
        ({"num_nextn_predict_layers": -1}, ["num_nextn_predict_layers -1"]),
        # 12 and plain ranges
        ({"max_position_embeddings": 4095}, ["max_position_embeddings is 4095", "even"]),
        ({"sliding_window": 0}, ["sliding_window is 0", "positive"]),
        ({"index_topk": -8}, ["index_topk is -8", "positive"]),
        ({"rms_norm_eps": 0.0}, ["rms_norm_eps is 0.0", "positive"]),
    ],
)
def test_broken_rules_are_refused(changes, words):
    refused(text(**changes), *words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vision_config__hidden_size": 72}, ["vision_config.hidden_size is 72", "num_attention_heads 4"]),
        ({"vision_config__max_image_tokens": 9}, ["vision_config.max_image_tokens is 9", "at least 10"]),
        ({"vision_config__patch_size": 0}, ["vision_config.patch_size is 0", "positive"]),
        ({"text_config__rope_scaling__factor": 0.5}, ["rope_scaling.factor is 0.5", "at least 1"]),
        ({"text_config__rope_scaling__beta_fast": 0.5}, ["beta_fast is 0.5", "beta_slow is 1"]),
        ({"image_token_id": 512}, ["image_token_id is 512", "vocab_size is 512"]),
        ({"bos_token_id": -1}, ["bos_token_id is -1", "at least 0"]),
    ],
)
def test_broken_rules_outside_the_text_section_are_refused(changes, words):
    refused(released(**changes), *words)


def test_a_config_that_exists_is_valid():
    with pytest.raises(ValueError, match="index_topk is 4096"):
        dataclasses.replace(preset("tiny"), index_topk=4096)


# --- overrides


@pytest.mark.parametrize(
    "override",
    [
        "window_tokens=5",
        "sliding_window=5",
        "text_config.sliding_window=5",
        '{"window_tokens": 5}',
        '{"text_config": {"sliding_window": 5}}',
    ],
)
def test_overrides_take_either_spelling(override):
    config = preset("tiny").with_overrides([override])
    assert config == dataclasses.replace(preset("tiny"), window_tokens=5)
    assert config == preset("tiny").with_overrides(override)
    assert config == preset("tiny").with_overrides(["window_tokens=7", "sliding_window=9", override])


def test_overrides_of_nested_and_special_fields():
    config = preset("tiny").with_overrides(
        [
            "yarn.factor=2",
            "rope_scaling.beta_slow=3",
            "vision_config.patch_size=8",
            "numerics=fp32",
            "vision.max_tokens=32",
        ]
    )
    assert (config.yarn.factor, config.yarn.beta_slow) == (2.0, 3.0)
    assert (config.vision.patch, config.vision.max_tokens) == (8, 32)
    assert config.numerics is Numerics.FP32
    assert config.with_overrides("vision=null").vision is None
    assert config.with_overrides("vision=null").numerics is Numerics.FP32
    assert config.with_overrides("draft.stages=0").draft.stages == 0
    assert config.with_overrides("norm_topk_prob=true") == config


def test_overrides_apply_together_and_never_adjust():
    tiny = preset("tiny")
    with pytest.raises(
        ValueError, match=r"compress_ratios has 11 backbone entries, but .*num_hidden_layers is 4"
    ):
        tiny.with_overrides('{"num_layers": 4}')
    with pytest.raises(ValueError, match="compress_ratios has 11 backbone entries"):
        tiny.with_overrides("num_layers=14")  # not the draft stages' entries either
    shorter = {
        "num_layers": 5,
        "compress_ratios": [0, 0, 2, 2, 2],
        "kv_sources": [2],
        "index_sources": [2, 3],
        "candidate_source": -1,
        "engram": {"layers": [1], "num_rows": [1025]},
        "draft": {"target_layers": [3, 4]},
    }
    config = tiny.with_overrides(json.dumps(shorter))
    assert (config.num_layers, config.ratios, config.draft.stages) == (5, (0, 0, 2, 2, 2), 3)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("window_token=5", ["unknown config key 'window_token'", "window_tokens"]),
        ("text_config.sliding_windows=5", ["text_config.sliding_window"]),
        ("engram.hads=5", ["engram.heads"]),
        ("zzzz=1", ["unknown config key 'zzzz'"]),
        ("window_tokens", ["key=value"]),
        ("=5", ["key=value"]),
        ("{window", ["not valid JSON"]),
        ("window_tokens=wide", ["sliding_window is 'wide'", "an integer"]),
        ("hyper_eps=NaN", ["hc_eps is nan"]),
        ("hidden_act=gelu", ["hidden_act is 'gelu'", "'silu'"]),
        ("numerics=fp16", ["numerics is 'fp16'", "bf16, fp32, fp32-noquant"]),
        ("ratios=[0]", ["compress_ratios has 1 entries"]),
    ],
)
def test_bad_overrides_are_refused(override, words):
    with pytest.raises(ValueError, match=r"^[^\n]+$") as error:
        preset("tiny").with_overrides([override])
    for word in words:
        assert word in str(error.value)


# --- Engram primes, numerics, the engine, imports


def test_primes_equal_the_release():
    constants = json.loads((DATA / "engram_constants.json").read_text())
    expected = constants["primes_[layer][ngram 2..4][head]"]
    primes = preset("full").engram.primes()
    assert [[list(heads) for heads in orders] for orders in primes] == expected
    assert [sum(map(sum, orders)) for orders in primes] == constants["rows_per_layer"]


def test_primes_include_the_start_and_are_never_reused():
    """Against the rule as spec/model.md 6.2 words it: restart every time, skip what is used."""
    assert engram_primes(1, 2, 3, 97) == (((97, 101, 103), (107, 109, 113)),)
    used = []
    for _ in range(2 * 3):
        found, number = 0, 64
        while found < 2:
            if number not in used and all(number % divisor for divisor in range(2, number)):
                used.append(number)
                found += 1
            number += 1
    assert [p for orders in engram_primes(2, 3, 2, 64) for heads in orders for p in heads] == used


def test_numerics():
    described = {choice.value: (choice.dtype_name, choice.quantised) for choice in Numerics}
    assert described == {
        "bf16": ("bfloat16", True),
        "fp32": ("float32", True),
        "fp32-noquant": ("float32", False),
    }


def test_unknown_preset_lists_the_names():
    with pytest.raises(ValueError, match=r"unknown preset 'big'; there are tiny, odd, kernel, h200, full"):
        preset("big")


def test_h200_is_the_release_with_fewer_experts_and_smaller_tables():
    full, h200 = preset("full").values(), preset("h200").values()
    changed = {name for name in full if full[name] != h200[name]}
    assert changed == {"num_experts", "engram.search_start", "engram.num_rows"}
    assert h200["num_experts"] == 128


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"page_tokens": 0}, "page_tokens is 0"),
        ({"page_tokens": 33}, "page_tokens is 33"),
        ({"max_batch_tokens": -8}, "max_batch_tokens is -8"),
        ({"max_requests": True}, "max_requests is True"),
        ({"max_context_tokens": 4096.0}, "max_context_tokens is 4096.0"),
        ({"engram_tables": "cloud"}, r"engram_tables is 'cloud'.*device, host, disk"),
        ({"deterministic": 1}, "deterministic is 1"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_engine_config_refuses(changes, words):
    with pytest.raises(ValueError, match=words):
        EngineConfig(**changes)


def test_engine_config_against_a_model():
    EngineConfig().validate(preset("tiny"))
    with pytest.raises(ValueError, match="max_context_tokens is 8192, but the model ends at 4096"):
        EngineConfig(max_context_tokens=8192).validate(preset("tiny"))


def test_config_imports_only_the_standard_library():
    script = "import sys, dsv41.presets; print([m for m in ('torch', 'numpy', 'triton') if m in sys.modules])"
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
