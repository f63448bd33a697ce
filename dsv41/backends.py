"""Which implementation of every op family runs, and which byte format every cache has: one table, one rule.

There is no fallback: a choice that cannot run is an error that names the family, the choice, the reason and
the flag.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from dsv41.config import Numerics
from dsv41.hardware import Hardware
from dsv41.ops import records
from dsv41.ops.library import implementation

RECORD_FIELDS = ("window_record", "state_record", "index_record")
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
PRESETS = {
    "cpu": Backends(),
    "sm90": Backends(
        attention="gluon",
        indexing="triton",
        compression="triton",
        publish="triton",
        rows="triton",
        window_record="scaled_528",
        state_record="nvfp4_288",
        index_record="mxfp4_68",
    ),
}


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
    """`preset`, `family=impl,...` or `preset,family=impl,...` -> (preset or None, overrides)."""
    name, overrides = None, {}
    for position, item in enumerate(part.strip() for part in spec.split(",")):
        key, equals, value = item.partition("=")
        if not equals and position == 0:
            name = item
        elif equals and key in FAMILIES + RECORD_FIELDS and key not in overrides:
            overrides[key] = value
        else:
            known = ", ".join(FAMILIES + RECORD_FIELDS)
            raise ValueError(f"--backends: '{item}' is not KEY=VALUE with a key of {known}, each once")
    return name, overrides


def reasons(backends: Backends, hardware: Hardware) -> dict[str, str | None]:
    """For every family, why its chosen implementation cannot run here (None: it can)."""
    return {family: _reason(backends, family, hardware) for family in FAMILIES}


def _reason(backends: Backends, family: str, hardware: Hardware) -> str | None:
    chosen = [getattr(backends, name) for name in RECORDS_OF.get(family, ())]
    try:
        why_not = implementation(family, getattr(backends, family)).why_not
    except ValueError as missing:
        return str(missing)
    answers = (why_not(hardware, record) for record in chosen or [None])
    return next((answer for answer in answers if answer is not None), None)


def query_heads(backends: Backends) -> int:
    """How many query heads the attention implementation wants at least; publishing pads to them."""
    return getattr(implementation("attention", backends.attention), "QUERY_HEADS", 0)


def select(hardware: Hardware, numerics: Numerics, spec: str | None = None) -> Backends:
    """The backends of a run: the preset of the hardware unless `spec` says otherwise.

    Raises ValueError for an unknown preset, family or record, and for a choice that cannot run on this
    hardware.
    """
    name, overrides = parse(spec) if spec else (None, {})
    name = name or "cpu"
    if name not in PRESETS:
        raise ValueError(f"--backends: no preset '{name}'; there are {', '.join(PRESETS)}")
    backends = _records_for(replace(PRESETS[name], **overrides), numerics)
    for family, reason in reasons(backends, hardware).items():
        if reason is not None:
            raise ValueError(
                f"--backends {family}={getattr(backends, family)} cannot run on {hardware.name}: {reason}"
            )
    return backends
