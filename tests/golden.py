"""Golden data (outputs of the release's own reference) for the tests. Missing data fails the test that asks
for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dsv41.config import EngineConfig
from dsv41.model.attention import Shared
from dsv41.model.decoder import DecoderLayer, Flow, Turn
from dsv41.model.inputs import StepInputs, StepOutput, empty_index
from dsv41.model.plan import LayerPlan
from dsv41.ops import records
from dsv41.ops.hyper.reference import collapse
from dsv41.runner.load import Model, blueprint, load
from dsv41.runner.stepper import HandRequest, Stepper

GOLDEN = Path(__file__).resolve().parents[2] / "shared" / "golden"
MODES = {"bf16": "bf16", "fp32": "fp32q", "fp32-noquant": "fp32nq"}


@cache
def tensors(name: str) -> dict[str, Tensor]:
    """One golden file, e.g. `tiny/golden/prompts` or `units/gate`."""
    return load_file(GOLDEN / f"{name}.safetensors")


@cache
def model(
    name: str,
    numerics: str,
    overrides: tuple[str, ...] = (),
    backends: str | None = None,
    device: str = "cpu",
) -> Model:
    """A golden checkpoint under one arithmetic mode."""
    directory = str(GOLDEN / name / "model")
    plan = blueprint(directory, numerics=numerics, device=device, overrides=overrides, backends=backends)
    return load(plan, features=True)


def prompts(name: str, images: bool = False) -> list[tuple[str, int]]:
    """(prompt, row) of every golden prompt; image prompts only when asked for."""
    found = []
    for key, ids in sorted(tensors(f"{name}/golden/prompts").items()):
        prompt, kind = key.split(".")
        if kind == "ids" and (images or not prompt.startswith("img")):
            found += [(prompt, row) for row in range(len(ids))]
    return found


def image_embeddings(name: str, numerics: str, prompt: str) -> tuple[list[bool], Tensor] | None:
    """Which positions of an image prompt belong to an image, and the rows that replace their embeddings."""
    types = tensors(f"{name}/golden/prompts").get(f"{prompt}.types")
    if types is None:
        return None
    types = types[0]
    weights = checkpoint(name)
    rows = torch.zeros(len(types), weights["image_start"].shape[-1])
    for kind, parameter in ((0, "image_start"), (2, "image_newline"), (3, "image_end")):
        rows[types == kind] = weights[parameter].float()
    vision, mode = tensors(f"{name}/golden/vision"), MODES[numerics]
    spans = sorted(key for key in vision if key.startswith(f"{prompt}.") and key.endswith(f".aligner_{mode}"))
    rows[types == 1] = torch.cat([vision[key].float() for key in spans])
    return (types >= 0).tolist(), rows


@cache
def checkpoint(name: str) -> dict[str, Tensor]:
    merged: dict[str, Tensor] = {}
    for shard in sorted((GOLDEN / name / "model").glob("*.safetensors")):
        merged |= load_file(shard)
    return merged


@dataclass
class Session:
    """One request of a golden prompt in a stepper of its own; `feed` runs its next rows and returns their
    output."""

    name: str
    numerics: str
    prompt: str
    row: int = 0
    stepper: Stepper = field(init=False)
    request: HandRequest = field(init=False)

    def __post_init__(self) -> None:
        self.stepper = Stepper(
            model(self.name, self.numerics), EngineConfig(max_requests=1, max_context_tokens=512)
        )
        self.request = admit(self.stepper, self.name, self.numerics, self.prompt, self.row)

    @property
    def num_uncomputed(self) -> int:
        return len(self.request.tokens) - self.request.num_computed

    def step(self, count: int) -> StepInputs:
        """The inputs of the next `count` rows. Nothing is computed."""
        return self.stepper.prepare([(self.request, count)]).step

    def feed(self, count: int) -> StepOutput:
        return self.stepper.step([(self.request, count)])

    @torch.inference_mode()
    def logits(self, count: int) -> Tensor:
        return self.stepper.model.decoder.logits(self.feed(count).hidden)

    def prefill(self, chunks: tuple[int, ...] = ()) -> Tensor:
        """Logits of the whole prompt, fed in `chunks` and then the rest. [S, V]"""
        rest = self.num_uncomputed - sum(chunks)
        return torch.cat([self.logits(count) for count in (*chunks, rest)])

    def decode(self) -> Tensor:
        """Teacher-forced decode with the golden tokens, one a step. [N, V]"""
        rows = []
        for token in decode_tokens(self.name, self.prompt, self.row):
            self.request.tokens.append(token)
            rows.append(self.logits(1))
        return torch.cat(rows)


def admit(stepper: Stepper, name: str, numerics: str, prompt: str, row: int) -> HandRequest:
    ids = tensors(f"{name}/golden/prompts")[f"{prompt}.ids"][row]
    request = stepper.add(ids.tolist())
    images = image_embeddings(name, numerics, prompt)
    if images is not None:
        request.image_rows, request.embeddings = tuple(images[0]), images[1]
    return request


def decode_tokens(name: str, prompt: str, row: int) -> list[int]:
    """What teacher-forced decode feeds, in every mode: the greedy tokens of the bf16 run without the last."""
    return tensors(f"{name}/golden/logits_bf16")[f"{prompt}.tokens"][row, :-1].tolist()


@cache
@torch.inference_mode()
def together(
    name: str, numerics: str, backends: str | None = None, device: str = "cpu"
) -> dict[tuple[str, int], tuple[Tensor, Tensor]]:
    """(prefill [S, V], decode [N, V]) logits of every golden prompt, all of them in the same steps of one
    stepper."""
    loaded = model(name, numerics, backends=backends, device=device)
    names = prompts(name, images=True)
    stepper = Stepper(loaded, EngineConfig(max_requests=len(names), max_context_tokens=512))
    requests = [admit(stepper, name, numerics, *key) for key in names]

    def run() -> list[Tensor]:
        counts = [len(request.tokens) - request.num_computed for request in requests]
        output = stepper.step(list(zip(requests, counts, strict=True)))
        assert (output.fault_layer == -1).all()
        order = sorted(range(len(requests)), key=lambda number: counts[number])  # of the step's rows
        parts = loaded.decoder.logits(output.hidden).split([counts[number] for number in order])
        return [parts[order.index(number)] for number in range(len(requests))]

    prefill, decode = run(), []
    for tokens in zip(*(decode_tokens(name, *key) for key in names), strict=True):
        for request, token in zip(requests, tokens, strict=True):
            request.tokens.append(token)
        decode.append(torch.cat(run()))
    return dict(zip(names, zip(prefill, torch.stack(decode, 1), strict=True), strict=True))


def truth(name: str, numerics: str, prompt: str, row: int) -> tuple[Tensor, Tensor]:
    """The golden (prefill, decode) logits of the mode that corresponds to `numerics`."""
    file = tensors(f"{name}/golden/logits_{MODES[numerics]}")
    return file[f"{prompt}.prefill"][row], file[f"{prompt}.decode"][row]


class Recorder(TorchDispatchMode):
    """Keeps the results of every op of this package, in call order: `calls[name]` is a list of (arguments,
    result).

    `instead[name](arguments, result)` is what the caller gets in place of the result that was kept.
    """

    def __init__(self, instead: dict[str, Callable[[tuple, Any], Any]] | None = None) -> None:
        super().__init__()
        self.calls: dict[str, list[tuple[tuple, Any]]] = {}
        self.instead = instead or {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.namespace != "dsv41":
            return result
        name = func._schema.name.split("::")[1]
        self.calls.setdefault(name, []).append((args, result))
        return self.instead[name](args, result) if name in self.instead else result


@dataclass
class ForcedLayer:
    """One layer run on the golden stream of that layer. `ours` uses the names and shapes of the dump, without
    B."""

    plan: LayerPlan
    golden: dict[str, Tensor]
    ours: dict[str, Tensor]


@dataclass
class ForcedStep:
    """All layers of one dump, each fed the golden stream; the caches carry our own rows from step to step."""

    step: StepInputs
    golden: dict[str, Tensor]  # what has no layer, without B
    rows: Tensor | None  # the query rows that the big `*_rows` tensors of a reduced dump keep
    layers: list[ForcedLayer]


def dump(
    name: str, numerics: str, prompt: str, stage: str
) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """(what has no layer, by layer) of one layer dump, batch dimension removed."""
    loose: dict[str, Tensor] = {}
    layers: list[dict[str, Tensor]] = [{} for _ in model(name, numerics).plan]
    for key, value in tensors(f"{name}/golden/layers_{stage}_{prompt}_{MODES[numerics]}").items():
        layer, dot, rest = key.partition(".")
        flat = key in ("rows", "token") or rest.startswith(
            ("gate_", "shared_")
        )  # these have no batch dimension
        (layers[int(layer[1:])] if dot else loose)[rest or key] = value if flat else value[0]
    return loose, layers


STAGES = ("prefill", "decode0", "decode1")


@torch.inference_mode()
def force(name: str, numerics: str, prompt: str, stages: tuple[str, ...] = STAGES) -> dict[str, ForcedStep]:
    """The prefill and the first two decode steps of a prompt, layer by layer on golden streams."""
    session, steps = Session(name, numerics, prompt), {}
    for stage in stages:
        loose, layers = dump(name, numerics, prompt, stage)
        if stage != "prefill":
            session.request.tokens.append(int(loose["token"]))
        steps[stage] = _forced_step(session, loose, layers)
    return steps


forced = cache(force)


def _forced_step(session: Session, loose: dict[str, Tensor], layers: list[dict[str, Tensor]]) -> ForcedStep:
    stepper, count = session.stepper, session.num_uncomputed
    decoder, caches = stepper.model.decoder, stepper.caches
    prepared = stepper.prepare([(session.request, count)])
    step = prepared.step
    turn = Turn(step, decoder.rotations(step), step.attention.row_request >= 0)
    done = []
    shared = Shared(None, empty_index(step.token_ids), torch.zeros(step.num_rows, dtype=torch.bool))
    for plan, layer, golden in zip(decoder.plan, decoder.layers, layers, strict=True):
        recorder = Recorder({"select": lambda args, _, golden=golden: _golden_selection(args, golden)})
        with recorder:
            if layer.engram is not None:
                written = layer.engram(golden["engram_in"], step, decoder.token_map)
            flow = Flow(golden["stream_in"], golden["pre_mix_in"], turn.valid)
            flow, shared = layer(flow, turn, caches, shared)
        ours = _named(recorder.calls, layer, plan, step)
        ours |= {"stream_out": flow.streams, "pre_mix_out": flow.mix}
        ours |= _stored(session, plan, step)
        if layer.engram is not None:
            ours["stream_in"] = written
        done.append(ForcedLayer(plan, golden, ours))
    stepper.worker.advance(prepared)
    session.request.num_computed += count
    return ForcedStep(step, loose, loose.get("rows"), done)


def _golden_selection(args: tuple, golden: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """`select` with the golden choice, so that what follows is not judged by a tie in what was chosen."""
    page_table, k, num_blocks, block_states, page_states = args[3], args[7], args[8], args[9], args[11]
    states = torch.full((len(golden["topk"]), k), -1, dtype=torch.int32)
    states[:, : golden["topk"].shape[1]] = golden["topk"]
    slots = slots_of(states, page_table, page_states)
    blocks = torch.full((len(states), num_blocks), -1, dtype=torch.int32)
    if num_blocks:
        for row, mask in enumerate(golden["candidates"]):
            chosen = mask[::block_states].nonzero().squeeze(1)
            blocks[row, : len(chosen)] = chosen
    return states, slots, blocks, torch.zeros(len(states), dtype=torch.bool)


def slots_of(states: Tensor, page_table: Tensor, page_states: int) -> Tensor:
    """The cache slots of states of the request in slot 0."""
    page = page_table[0][states.clamp(min=0) // page_states]
    return torch.where(states < 0, -1, page * page_states + states % page_states).to(torch.int32)


def _named(calls: dict, layer: DecoderLayer, plan: LayerPlan, step: StepInputs) -> dict[str, Tensor]:
    """The recorded ops of one layer under the dump's names."""
    result = {name: [result for _, result in made] for name, made in calls.items()}
    args = {name: [args for args, _ in made] for name, made in calls.items()}
    up, output_up = (-2, -1)  # the fp8 products outside `project_inputs`; an Engram's own comes before them
    ours = {
        "attn_norm_in": collapse(*args["hyper_collapse"][0][:2]),
        "attn_in": args["project_inputs"][0][0],
        "qr": args["linear_fp8"][up][0],
        "attn_q": result["publish_window"][0],
        "attn_o": result["sparse_attention"][0],
        "o_lora": args["linear_fp8"][output_up][0],
        "attn_out": result["linear_fp8"][output_up],
        "stream_mid": result["hyper_update"][0][0],
        "ffn_norm_in": collapse(result["hyper_update"][0][0], args["hyper_update"][0][4]),
        "ffn_in": args["experts"][0][0],
        "ffn_out": result["experts"][0],
    }
    for half, coefficients in zip(("attn", "ffn"), result["hyper_coefficients"], strict=True):
        for part, value in zip(("pre", "post", "comb"), coefficients, strict=False):
            ours[f"hc_{half}_{part}"] = value
    ids, weights = result["route"][0]
    ours["gate_map"] = expert_map(ids, weights, layer.moe.gate.shape[0])
    if plan.owns_kv:
        closing = step.attention.state_write[plan.ratio] >= 0
        ours["latent"] = result["compress"][0][closing]
    if plan.owns_index:
        ours["index_q"], ours["index_weights"] = result["index_query"][0]
        ours["topk"], _, blocks, _ = result["select"][0]
        select = args["select"][0]
        max_states = int(select[5].max())
        ours["index_score"] = torch.ops.dsv41.index_scores(
            *select[:6], max_states, *select[10:12], select[13]
        )
        if plan.publishes_candidates:
            ours["candidates"] = block_mask(blocks, max_states, select[9])
    if layer.engram is not None:
        ours["engram_hash"] = result["engram_hash"][0]
        ours["engram_rows"], ours["engram_kv"] = result["engram_lookup"][0], result["linear_fp8"][0]
        ours["engram_rows"] = ours["engram_rows"].unflatten(1, (ours["engram_hash"].shape[1], -1))
    return ours


def _stored(session: Session, plan: LayerPlan, step: StepInputs) -> dict[str, Tensor]:
    """What the step left in the caches of one layer, read back through the record format."""
    loaded, caches, page = session.stepper.model, session.stepper.caches, session.stepper.engine.page_tokens
    config, backends, meta = loaded.config, loaded.backends, step.attention

    def read(record: str, cache: Tensor, slots: Tensor, page_states: int, dim: int) -> Tensor:
        dtype = loaded.decoder.context.dtype
        return records.read_slots(record, cache, slots, page_states, dim, config.rope_dim, dtype)

    window = caches.window[plan.layer]
    ours = {"window_kv": read(backends.window_record, window, meta.window_write, page, config.head_dim)}
    if plan.owns_kv:
        slots, size = meta.state_write[plan.ratio], page // plan.ratio
        slots = slots[slots >= 0]
        states, keys = caches.states[plan.layer], caches.index_k[plan.layer]
        ours["compress_kv"] = read(backends.state_record, states, slots, size, config.head_dim)
        ours["index_k"] = read(backends.index_record, keys, slots, size, config.index_dim)
    return ours


def expert_map(ids: Tensor, weights: Tensor, num_experts: int) -> Tensor:
    """Chosen ids [T, k] and weights as a map [T, E]: the order inside k means nothing."""
    return torch.zeros(len(ids), num_experts).scatter_(1, ids.long(), weights.float())


def block_mask(blocks: Tensor, num_states: int, block_states: int) -> Tensor:
    """Blocks [T, C] as the mask of the states in them, bool [T, S]."""
    block = torch.arange(num_states) // block_states
    return (blocks.unsqueeze(-1) == block).any(1)


def rel(a: Tensor, b: Tensor) -> float:
    """rms(a - b) / rms(b)"""
    a, b = a.double(), b.double()
    return float((a - b).square().mean().sqrt() / b.square().mean().sqrt().clamp(min=1e-300))


def prompt_error(logits: Tensor, golden: Tensor) -> float:
    """rms(logits - golden) / std(golden) over everything given."""
    return float((logits - golden).square().mean().sqrt() / golden.std())


def row_error(logits: Tensor, golden: Tensor) -> Tensor:
    """Per row: rms(logits - golden) / std(golden). [n, V] -> [n]"""
    return (logits - golden).square().mean(-1).sqrt() / golden.std(-1)
