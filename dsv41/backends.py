"""Which implementation of every op family runs, and which byte format every cache has: one table, one rule.

There is no fallback: a choice that cannot run is an error that names the family, the choice, the reason and
the flag. The one documented exception is in `automatic`: SM100 takes FlashMLA where the fused Mega kernel
does not fit (spec/runtime.md 2.1, rules 7 and 8).

A `--backends` spec is a preset, `KEY=VALUE` items or both. Besides families and records it knows the options
of vLLM: `kv_cache_dtype` and `indexer_kv_dtype`, which stand for records and mean what the chosen attention
makes of them on this GPU, and `indexer_sparse_logits`; `attention` may carry vLLM's name of a backend.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

from dsv41.config import Numerics
from dsv41.hardware import Hardware
from dsv41.ops import records
from dsv41.ops.library import implementation

RECORD_FIELDS = ("window_record", "state_record", "index_record")
OPTIONS = ("kv_cache_dtype", "indexer_kv_dtype", "indexer_sparse_logits")
RECORDS_OF = {  # the records that a family reads or writes; the others see none
    "attention": ("window_record", "state_record"),
    "indexing": ("index_record",),
    "publish": RECORD_FIELDS,
}


@dataclass(frozen=True)
class Backends:
    """One implementation name per op family, one record name (ops/records.py) per cache."""

    attention: str = "reference"
    indexing: str = "reference"
    compression: str = "reference"
    publish: str = "reference"
    rows: str = "reference"
    projections: str = "reference"
    linear: str = "reference"
    moe: str = "reference"
    hyper: str = "reference"
    engram: str = "reference"
    window_record: str = "rows"
    state_record: str = "rows"
    index_record: str = "rows"


FAMILIES = tuple(field.name for field in fields(Backends) if field.name not in RECORD_FIELDS)
SM90 = Backends(
    attention="gluon",
    indexing="triton",
    compression="triton",
    publish="triton",
    rows="triton",
    linear="gluon",
    moe="gluon",
    hyper="triton",
    engram="triton",
    window_record="scaled_528",
    state_record="nvfp4_288",
    index_record="mxfp4_68",
)
SM100 = replace(
    SM90,
    attention="flashmla",
    indexing="reference",
    linear="reference",
    moe="reference",
    state_record="scaled_528",
)
PRESETS = {
    "cpu": Backends(),
    "sm90": SM90,
    "sm90-flashmla": replace(
        SM90,
        attention="flashmla",
        window_record="mixed_584",
        state_record="mixed_584",
        index_record="fp8_132",
    ),
    "sm100": replace(SM100, index_record="fp8_132"),
    "sm100-mega": replace(SM100, attention="mega", state_record="nvfp4_288", index_record="fp8_132"),
    "sm120": replace(
        SM100,
        attention="flashinfer",
        window_record="mixed_584",
        state_record="mixed_584",
        index_record="fp8_132",
    ),
}

# While the kernels are being verified, every machine runs the reference unless it is told otherwise.
AUTOMATIC_IS_DEFAULT = False

MAX_HEADS = {"flashmla": ("FlashMLA", 128), "flashinfer": ("FlashInfer", 128)}
MEGA_GROUP_HEADS = 8

# -- names of vLLM ------------------------------------------------------------------------------------------

ATTENTION_NAMES = {
    "FLASHMLA_SPARSE": "flashmla",
    "FLASHMLA_SPARSE_DSV4": "flashmla",
    "FLASHMLA_SPARSE_DSV41": "flashmla",
    "FLASHMLA_MEGA_ATTN_DSV41": "mega",
    "FLASHINFER_MLA_SPARSE_DSV4": "flashinfer",
    "FLASHINFER_MLA_SPARSE_DSV41": "flashinfer",
}
GENERIC_ATTENTION_NAMES = ("FLASHINFER_MLA_SPARSE", "FLASHINFER_MLA_SPARSE_SM120")

CACHE_DTYPES = ("auto", "bf16", "fp8", "fp8_ds_mla", "nvfp4_ds_mla")
INDEX_DTYPES = {"auto": "fp8_132", "fp8": "fp8_132", "mxfp4": "mxfp4_68"}
PLAIN = {"auto": ("rows", "rows"), "bf16": ("rows_bf16", "rows_bf16"), "fp8": ("rows_fp8", "rows_fp8")}
MIXED, SCALED, TRAINED = ("mixed_584",) * 2, ("scaled_528",) * 2, ("scaled_528", "nvfp4_288")
# What an attention makes of a cache dtype: (implementation, major capability) -> (window, state) record.
# The packed classes take `fp8` for their preferred packed record (spec/runtime.md 2.2).
CACHE_RECORDS = {
    ("gluon", 9): {
        "auto": TRAINED,
        "bf16": PLAIN["bf16"],
        "fp8": TRAINED,
        "fp8_ds_mla": MIXED,
        "nvfp4_ds_mla": TRAINED,
    },
    ("flashmla", 9): {"auto": MIXED, "fp8": MIXED, "fp8_ds_mla": MIXED},
    ("flashmla", 10): {"auto": SCALED, "fp8": SCALED, "fp8_ds_mla": SCALED, "nvfp4_ds_mla": TRAINED},
    ("mega", 10): {"auto": TRAINED, "fp8": TRAINED, "fp8_ds_mla": SCALED, "nvfp4_ds_mla": TRAINED},
    ("flashinfer", 10): PLAIN,
    ("flashinfer", 12): {"auto": MIXED, "fp8": MIXED, "fp8_ds_mla": MIXED},
}
REFERENCE_RECORDS = PLAIN | {"fp8_ds_mla": MIXED, "nvfp4_ds_mla": TRAINED}  # on any machine


def _attention_name(name: str) -> str:
    """Our name of an attention backend that vLLM names."""
    if name in GENERIC_ATTENTION_NAMES:
        raise ValueError(
            f"--backends attention={name} is FlashInfer's generic sparse attention, which does not read this "
            "model's caches: use attention=FLASHINFER_MLA_SPARSE_DSV41 (here attention=flashinfer)"
        )
    return ATTENTION_NAMES.get(name, name)


def _cache_records(attention: str, hardware: Hardware, dtype: str) -> tuple[str, str]:
    """(window, state) record of `kv_cache_dtype`; ValueError where this attention has none."""
    flag = f"--backends kv_cache_dtype={dtype}"
    if dtype not in CACHE_DTYPES:
        raise ValueError(f"{flag} is not one of {', '.join(CACHE_DTYPES)}")
    table = CACHE_RECORDS.get((attention, hardware.sm // 10))
    if attention == "reference":
        table = REFERENCE_RECORDS
    if table is None:
        raise ValueError(f"{flag}: attention={attention} has no caches on {hardware.name}")
    if dtype in table:
        return table[dtype]
    takes = f"attention={attention} on {hardware.name} takes {', '.join(table)}"
    if dtype == "nvfp4_ds_mla" and hardware.sm // 10 != 10:
        raise ValueError(f"{flag} is a record of SM100: {takes}")
    kind = "plain rows" if table is PLAIN else "packed records"
    raise ValueError(f"{flag}: this attention reads {kind}: {takes}")


def _index_record(hardware: Hardware, dtype: str) -> str:
    if dtype not in INDEX_DTYPES:
        raise ValueError(f"--backends indexer_kv_dtype={dtype} is not one of {', '.join(INDEX_DTYPES)}")
    if dtype == "mxfp4" and hardware.sm // 10 not in (0, 9, 10):
        raise ValueError(
            f"--backends indexer_kv_dtype=mxfp4 needs SM90 or SM100, not {hardware.name}: use fp8"
        )
    return INDEX_DTYPES[dtype]


def _with_options(
    backends: Backends, given: Iterable[str], options: dict[str, str], hardware: Hardware
) -> Backends:
    """vLLM's options as records. A record that is given as well contradicts them."""
    chosen: dict[str, str] = {}
    if "kv_cache_dtype" in options:
        pair = _cache_records(backends.attention, hardware, options["kv_cache_dtype"])
        chosen |= zip(RECORD_FIELDS, pair, strict=False)
    if "indexer_kv_dtype" in options:
        chosen["index_record"] = _index_record(hardware, options["indexer_kv_dtype"])
    for name in chosen:
        if name in given:
            option = "indexer_kv_dtype" if name == "index_record" else "kv_cache_dtype"
            raise ValueError(f"--backends: {option} already says {name}={chosen[name]}")
    backends = replace(backends, **chosen)
    sparse = options.get("indexer_sparse_logits", "off")
    if sparse not in ("on", "off"):
        raise ValueError(f"--backends indexer_sparse_logits={sparse} is not one of on, off")
    if sparse == "on":
        _refuse_sparse_logits(backends, hardware)
    return backends


def _refuse_sparse_logits(backends: Backends, hardware: Hardware) -> None:
    """Scores of the candidates' states alone (spec/runtime.md 2.2)."""
    flag = "--backends indexer_sparse_logits=on"
    if backends.index_record != "mxfp4_68":
        raise ValueError(f"{flag} needs the fp4 index cache: use indexer_kv_dtype=mxfp4")
    if hardware.sm // 10 != 10:
        raise ValueError(f"{flag} needs SM100, not {hardware.name}")
    raise ValueError(f"{flag}: no implementation of indexing has it, indexing={backends.indexing} neither")


def _records_for(backends: Backends, numerics: Numerics) -> Backends:
    """`rows` stands for plain rows of the numerics' own dtype. Packed records quantise, so they need bf16
    numerics."""
    rows = "rows_bf16" if numerics is Numerics.BF16 else "rows_fp32"
    chosen = {name: getattr(backends, name) for name in RECORD_FIELDS}
    for name, record in chosen.items():
        if record != "rows":
            records.get_record(record)
        if record not in ("rows", rows) and numerics is not Numerics.BF16:
            raise ValueError(
                f"--backends {name}={record} cannot hold {numerics.value} numerics: use {name}={rows}"
            )
    return replace(
        backends, **{name: rows if record == "rows" else record for name, record in chosen.items()}
    )


def parse(spec: str) -> tuple[str | None, dict[str, str]]:
    """`preset`, `key=value,...` or `preset,key=value,...` -> (preset or None, the items)."""
    name, overrides = None, {}
    for position, item in enumerate(part.strip() for part in spec.split(",")):
        key, equals, value = item.partition("=")
        if not equals and position == 0:
            name = item
        elif equals and key in FAMILIES + RECORD_FIELDS + OPTIONS and key not in overrides:
            overrides[key] = value
        else:
            known = ", ".join(FAMILIES + RECORD_FIELDS + OPTIONS)
            raise ValueError(f"--backends: '{item}' is not KEY=VALUE with a key of {known}, each once")
    return name, overrides


# -- what can run -------------------------------------------------------------------------------------------


def reasons(backends: Backends, hardware: Hardware) -> dict[str, str | None]:
    """For every family, why its chosen implementation cannot run here (None: it can)."""
    return {family: reason(backends, family, getattr(backends, family), hardware) for family in FAMILIES}


def reason(backends: Backends, family: str, impl: str, hardware: Hardware) -> str | None:
    """Why an implementation cannot run here on the records of `backends`."""
    chosen = [getattr(backends, name) for name in RECORDS_OF.get(family, ())]
    try:
        why_not = implementation(family, impl).why_not
    except ValueError as missing:
        return str(missing)
    answers = (why_not(hardware, record) for record in chosen or [None])
    return next((answer for answer in answers if answer is not None), None)


def refusal(backends: Backends, hardware: Hardware, heads: int = 0, groups: int = 0) -> str | None:
    """The sentence that ends a run of these backends, or None. `heads` and output `groups` of one rank are
    checked where they are known (not 0)."""
    misfit = _topology(backends.attention, heads, groups)
    if misfit is not None:
        return f"--backends attention={backends.attention} cannot run this model: {misfit}"
    for family, why in reasons(backends, hardware).items():
        if why is not None:
            impl = getattr(backends, family)
            return f"--backends {family}={impl} cannot run on {hardware.name}: {why}"
    return None


def _topology(attention: str, heads: int, groups: int) -> str | None:
    """Why the heads and output groups of one rank do not fit (spec/runtime.md 2.2)."""
    package, most = MAX_HEADS.get(attention, ("", heads))
    if heads > most:
        return f"{package} has at most {most} heads, not {heads}"
    if attention == "mega" and heads and heads != groups * MEGA_GROUP_HEADS:
        return f"Mega needs exactly {MEGA_GROUP_HEADS} heads in each output group, not {heads} in {groups}"
    return None


def query_heads(backends: Backends) -> int:
    """How many query heads the attention implementation wants at least; publishing pads to them."""
    return getattr(implementation("attention", backends.attention), "QUERY_HEADS", 0)


# -- the choice ---------------------------------------------------------------------------------------------


def automatic(hardware: Hardware, heads: int = 0, groups: int = 0) -> str:
    """The preset that fits a machine (spec/runtime.md 2.1, rules 6 to 8).

    SM100 takes Mega where nothing speaks against it, else FlashMLA. SM120 has one attention and never tries
    another. Raises ValueError for a GPU that has no attention here.
    """
    major = hardware.sm // 10
    if major == 0:
        return "cpu"
    if major == 10:
        mega = refusal(PRESETS["sm100-mega"], hardware, heads, groups)
        return "sm100" if mega else "sm100-mega"
    if major not in (9, 12):
        raise ValueError(
            f"no preset fits {hardware.name}: attention has kernels for SM90, SM100 and SM120; "
            "--backends cpu runs the reference on any GPU"
        )
    return f"sm{10 * major}"


def choose(
    hardware: Hardware, numerics: Numerics, spec: str | None = None, heads: int = 0, groups: int = 0
) -> Backends:
    """The backends that `spec` names, whether or not they can run here.

    Raises ValueError for an unknown preset, family, record or option, and for a record or option that the
    chosen attention does not have on this hardware.
    """
    name, overrides = parse(spec) if spec else (None, {})
    if name is None:
        name = automatic(hardware, heads, groups) if AUTOMATIC_IS_DEFAULT else "cpu"
    if name not in PRESETS:
        raise ValueError(f"--backends: no preset '{name}'; there are {', '.join(PRESETS)}")
    options = {key: overrides.pop(key) for key in OPTIONS if key in overrides}
    if "attention" in overrides:
        overrides["attention"] = _attention_name(overrides["attention"])
    backends = _with_options(replace(PRESETS[name], **overrides), overrides, options, hardware)
    return _records_for(backends, numerics)


def select(
    hardware: Hardware, numerics: Numerics, spec: str | None = None, heads: int = 0, groups: int = 0
) -> Backends:
    """The backends of a run: what `spec` says, otherwise the default.

    Raises ValueError as `choose` does, and for a choice that cannot run on this hardware, before any weight
    is read. It never takes another implementation instead.
    """
    backends = choose(hardware, numerics, spec, heads, groups)
    refused = refusal(backends, hardware, heads, groups)
    if refused is not None:
        raise ValueError(refused)
    return backends
