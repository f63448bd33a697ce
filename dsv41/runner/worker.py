"""The worker path: a scheduler's output in, sampled token ids out. The host never waits for the device here.

    execute(output)    requests join and leave; one staged transfer; rows on the device; the model
    sample()           logits of the rows that complete their request; sampling; state for the next step
    AsyncResult.get()  waits for the step's few bytes and turns them into `TokenResult`s

The next step reads device state: step n + 1 may be executed before the results of step n are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsv41.config import EngineConfig
from dsv41.graphs.buckets import Bucket, engine_buckets
from dsv41.graphs.capture import Graphs, Recorder, Run, cuda_recorder
from dsv41.model.caches import KVCaches
from dsv41.model.inputs import StepInputs, StepOutput, Tail
from dsv41.model.layout import OPEN_ROWS
from dsv41.runner.async_output import AsyncResult
from dsv41.runner.batch import Batch, Slot, make_batch
from dsv41.runner.load import Model
from dsv41.runner.results import Gathered, gather
from dsv41.runner.rows import compute_rows, select_rows, trim_window
from dsv41.runner.sampler import LogProbs, Sampler, prompt_logprobs
from dsv41.runner.schedule import NewRequest, RunningRequest, SchedulerOutput
from dsv41.runner.start import warm_up
from dsv41.runner.state import IMAGE_BIT, Changes, RequestState, Staging


@dataclass(frozen=True)
class Prepared:
    """A step ready to run: its batch, its inputs, what was staged with it, and the captured graph that it is
    padded for, if there is one."""

    batch: Batch
    step: StepInputs
    staged: dict[str, Tensor]
    bucket: Bucket | None = None


class Worker:
    """Holds the device state of up to `max_requests` requests and computes steps for them, in the order
    given."""

    def __init__(
        self, model: Model, engine: EngineConfig, caches: KVCaches, max_pages: int, run: Run | None = None
    ) -> None:
        self.model, self.engine, self.caches = model, engine, caches
        self.run = run if run is not None else model.decoder
        device = model.device
        # One column beyond the context takes the token after the last.
        self.state = RequestState(engine.max_requests, engine.max_context_tokens + 1, max_pages, device)
        self.staging = Staging(device)
        self.sampler = Sampler(engine.max_requests, model.config.vocab_size, device, model.config.eos_token)
        self.slots: dict[int, Slot] = {}
        self.embeddings: dict[int, Tensor] = {}
        self.images: dict[int, NDArray] = {}  # the image bit of every prompt token, for requests with images
        self.masks: dict[int, Tensor] = {}  # of the next step, by request: set by the engine
        self.graphs: Graphs | None = None
        self.num_steps = 0
        self._free = list(range(engine.max_requests - 1, -1, -1))
        self._executed: tuple[Prepared, StepOutput] | None = None
        if engine.graph_rows:
            if self.state.counts.device.type != "cuda":
                raise ValueError(f"graph_rows needs a CUDA device, not {device}")
            warm_up(self)  # at sizes that compile for all, which the first bucket's may not
            self.capture(engine_buckets(model.config, engine, max_pages), cuda_recorder(device))

    @torch.inference_mode()
    def prepare(self, output: SchedulerOutput, num_rows: int | None = None) -> Prepared | None:
        """Take in a scheduler's output and build its step; None if it has no tokens. `num_rows` pads the
        rows.

        Raises ValueError for an output that does not fit what the worker holds; nothing is changed then.
        """
        self._check(output)
        if num_rows is not None and num_rows < sum(output.num_tokens.values()):
            raise ValueError(
                f"a step of {sum(output.num_tokens.values())} rows does not fit a bucket of {num_rows}"
            )
        for request_id in (*output.finished, *output.preempted):
            self._drop(request_id)
        changes = Changes()
        for request in output.new:
            self._admit(request, changes)
        for running in output.running:
            self._update(running, changes)
        if not output.num_tokens:
            if not changes.is_empty:
                self.state.apply(self.staging.send(changes.arrays()))
            return None
        batch = make_batch(
            [self.slots[request_id] for request_id in output.num_tokens], list(output.num_tokens.values())
        )
        staged = self._stage(batch, changes)
        self._recount(output)
        bucket = self._bucket(batch) if num_rows is None else None
        if bucket is None:
            return Prepared(batch, self._inputs(batch, staged, num_rows or batch.num_rows), staged)
        return Prepared(batch, self._inputs(batch, staged, bucket.rows), staged, bucket)

    def capture(self, buckets: Sequence[Bucket], record: Recorder) -> Graphs:
        """Record a graph per bucket. From now on `execute` replays one for every step that fits."""
        self.graphs = Graphs(self.run, self.caches, buckets, self.padding, record)
        return self.graphs

    def padding(self, num_rows: int, tail: int | None = None) -> StepInputs:
        """A step of padding rows alone, the last `tail` of them a tail."""
        nothing = torch.zeros(1, dtype=torch.int64, device=self.state.counts.device)
        step = self._rows(nothing, nothing, num_rows)
        if tail is None:
            return step
        return self._with_tail(step, torch.arange(num_rows - tail, num_rows, device=nothing.device))

    def _rows(self, slots: Tensor, counts: Tensor, num_rows: int) -> StepInputs:
        config, layout, impl = self.model.config, self.model.layout, self.model.backends.rows
        return compute_rows(self.state, slots, counts, num_rows, config, layout, impl)

    def _with_tail(self, step: StepInputs, rows: Tensor) -> StepInputs:
        """`rows` int64 [t] of the step go on behind the last KV source."""
        config, layout, impl = self.model.config, self.model.layout, self.model.backends.rows
        first = select_rows(step, rows)
        return step.with_tail(Tail(rows, first, trim_window(first, self.state, config, layout, impl)))

    def _bucket(self, batch: Batch) -> Bucket | None:
        """The graph for a step: none for rows that end early (decoder replay) or bring their embeddings."""
        embedded = any(slot.request_id in self.embeddings for slot in batch.slots)
        if self.graphs is None or batch.has_tail or embedded:
            return None
        tokens = max(slot.num_computed + count for slot, count in zip(batch.slots, batch.counts, strict=True))
        return self.graphs.fit(batch.num_rows, -(-int(tokens) // self.engine.page_tokens))

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> None:
        """Compute the hidden rows of a step; `sample` must follow before the next one."""
        assert self._executed is None, "the step before was not sampled"
        prepared = self.prepare(output)
        if prepared is not None:
            self.num_steps += 1
            self._executed = prepared, self.compute(prepared)

    def compute(self, prepared: Prepared) -> StepOutput:
        if prepared.bucket is None:
            return self.run(prepared.step, self.caches)
        assert self.graphs is not None, "only a step with graphs has a bucket"
        return self.graphs(prepared.bucket, prepared.step)

    @torch.inference_mode()
    def sample(self) -> AsyncResult | None:
        """Sample the requests of the executed step that reached their last token. None if no step was
        executed."""
        if self._executed is None:
            return None
        (prepared, output), self._executed = self._executed, None
        batch, staged = prepared.batch, prepared.staged
        slots = staged["sample_slots"]
        positions = self.state.num_computed[slots] + staged["sample_counts"]  # of the tokens to come
        active = [batch.slots[number].index for number in batch.sampled]
        sampled = self.sampler.sample(
            self.model.decoder.logits(output.hidden[staged["sample_rows"]]),
            slots,
            positions,
            staged["sample_prompts"],
            active,
            self._masks(batch),
        )
        accepted = self._accepted(batch, staged, positions, sampled.tokens)
        self.state.tokens[slots, positions] = sampled.tokens.to(torch.int32)
        prompt = self._prompt_logprobs(batch, output)
        faults = output.fault_layer[: batch.num_rows].clone()  # a graph's next replay writes its output again
        top_n = tuple(self.sampler.admitted[index].top_n for index in active)
        first = {number: batch.slots[number].num_computed + 1 for number in prompt}
        gathered = Gathered(batch, self.num_steps, top_n, first)
        result = gather(gathered, faults, sampled, list(prompt.values()))
        self.advance(prepared, accepted)
        for number in set(batch.sampled):
            batch.slots[number].length += 1
        return result

    def _accepted(
        self, batch: Batch, staged: dict[str, Tensor], positions: Tensor, tokens: Tensor
    ) -> Tensor | None:
        """How many drafts of each request slot the model drew itself, int64 [R]. None without drafts."""
        if not batch.num_drafts.any():
            return None
        slots, index = staged["sample_slots"], staged["sample_index"]
        differs = self.state.tokens[slots, positions] != tokens
        is_last = index == staged["sample_drafts"]
        stop = torch.where(differs | is_last, index, OPEN_ROWS)
        accepted = torch.full_like(self.state.num_computed, OPEN_ROWS)
        accepted = accepted.scatter_reduce(0, slots, stop, "amin")
        return torch.where(accepted == OPEN_ROWS, 0, accepted)

    def advance(self, prepared: Prepared, accepted: Tensor | None = None) -> None:
        """The rows of a step are computed: the next step of its requests starts behind them, or behind the
        last accepted draft."""
        staged = prepared.staged
        slots, counts = staged["slots"], staged["step_counts"]
        if accepted is not None:
            counts = counts - staged["step_drafts"] + accepted[slots]
        self.state.num_computed.index_add_(0, slots, counts)
        for slot, count in zip(prepared.batch.slots, prepared.batch.counts.tolist(), strict=True):
            slot.num_computed += count

    def open_rows(self, request_id: int, layer: int) -> Tensor:
        """The open-group rows of a request at a ratio-2 KV source, a view of the cache: float32 [OPEN_ROWS,
        2d]"""
        first = self.slots[request_id].index * OPEN_ROWS
        return self.caches.open_groups[layer][first : first + OPEN_ROWS]

    def _check(self, output: SchedulerOutput) -> None:
        """Refuse, before anything is changed, what the worker cannot compute."""
        gone = {*output.finished, *output.preempted}
        held = {request_id: slot for request_id, slot in self.slots.items() if request_id not in gone}
        if len(held) + len(output.new) > self.engine.max_requests:
            raise ValueError(
                f"the worker holds {len(held)} requests already and {len(output.new)} are new (max_requests"
                f" {self.engine.max_requests})"
            )
        left = {request_id: slot.length - slot.num_computed for request_id, slot in held.items()}
        for request in output.new:
            if request.request_id in left:
                raise ValueError(f"request {request.request_id} is new but already held by the worker")
            self._check_room(request.request_id, len(request.tokens))
            left[request.request_id] = len(request.tokens) - request.num_computed
        for running in output.running:
            if running.request_id not in held:
                raise ValueError(f"request {running.request_id} is running but not held by the worker")
            left[running.request_id] = self._check_running(held[running.request_id], running)
        for request_id, count in output.num_tokens.items():
            if request_id not in left:
                raise ValueError(f"request {request_id} is scheduled but neither new nor held by the worker")
            if not 1 <= count <= left[request_id]:
                raise ValueError(
                    f"request {request_id} has {left[request_id]} tokens to compute, not {count}"
                )

    def _check_running(self, slot: Slot, running: RunningRequest) -> int:
        """How many tokens are left to compute with what `running` brings."""
        if slot.drafts:
            raise ValueError(f"request {slot.request_id} is scheduled before its drafts' results are read")
        left = len(running.tokens) or slot.length - slot.num_computed
        self._check_room(slot.request_id, slot.num_computed + left)
        drafts = running.draft_tokens
        room = min(OPEN_ROWS - 1, self.state.max_tokens - 1 - slot.num_computed - left)
        if len(drafts) > room:
            raise ValueError(f"request {slot.request_id} has {len(drafts)} draft tokens and room for {room}")
        depends = not self.sampler.draws_rows_alone(slot.index) or slot.request_id in self.masks
        if drafts and depends:
            raise ValueError(
                f"request {slot.request_id} has penalties or a token mask: each token depends on the last"
            )
        return left + len(drafts)

    def _recount(self, output: SchedulerOutput) -> None:
        """Penalties count a forced token in the place of the sampled one."""
        for running in output.running:
            if running.tokens:
                slot = self.slots[running.request_id]
                self.sampler.recount(slot.index, self.state.tokens[slot.index, slot.num_prompt : slot.length])

    def _check_room(self, request_id: int, num_tokens: int) -> None:
        if num_tokens >= self.state.max_tokens:
            raise ValueError(
                f"request {request_id} has {num_tokens} tokens, more than max_context_tokens"
                f" {self.state.max_tokens - 1}"
            )

    def _drop(self, request_id: int) -> None:
        slot = self.slots.pop(request_id, None)
        if slot is not None:  # a request may end before it ever ran
            self.sampler.release(slot.index)
            self.embeddings.pop(request_id, None)
            self.images.pop(request_id, None)
            self._free.append(slot.index)

    def _admit(self, request: NewRequest, changes: Changes) -> None:
        index = self._free.pop()
        trims = self.engine.decoder_replay and request.params.prompt_logprobs is None
        tail_start = max(0, request.num_prompt - self.model.config.window_tokens) if trims else 0
        tokens = np.asarray(request.tokens, dtype=np.int64)
        if request.image_rows is not None:
            self.images[request.request_id] = np.where(request.image_rows, IMAGE_BIT, 0)
            tokens[: request.num_prompt] |= self.images[request.request_id]
        changes.put("tokens", index * self.state.max_tokens, tokens)
        counts = np.array([request.num_computed, request.hit_tokens, request.replay_start, tail_start])
        changes.put("counts", index * 4, counts)
        self.slots[request.request_id] = Slot(
            request.request_id,
            index,
            request.num_prompt,
            len(tokens),
            request.num_computed,
            tail_start,
            0,
            0,
            request.params.prompt_logprobs,
        )
        self._append_pages(request.request_id, request.pages, request.window_pages, changes)
        self.sampler.admit(
            index, request.params, request.tokens[: request.num_prompt], request.tokens[request.num_prompt :]
        )
        if request.embeddings is not None:
            self.embeddings[request.request_id] = request.embeddings
        for layer, rows in (request.open_groups or {}).items():
            self.open_rows(request.request_id, layer).copy_(rows)

    def _update(self, running: RunningRequest, changes: Changes) -> None:
        self._append_pages(running.request_id, running.new_pages, running.new_window_pages, changes)
        slot = self.slots[running.request_id]
        row = slot.index * self.state.max_tokens
        if running.tokens:
            tokens = np.array(running.tokens, dtype=np.int64)
            images = self.images.get(running.request_id, tokens[:0])[slot.num_computed :]
            tokens[: len(images)] |= images[: len(tokens)]
            changes.put("tokens", row + slot.num_computed, tokens)
            slot.length = slot.num_computed + len(tokens)
        if running.draft_tokens:
            changes.put("tokens", row + slot.length, np.array(running.draft_tokens, dtype=np.int64))
            slot.drafts, slot.length = running.draft_tokens, slot.length + len(running.draft_tokens)

    def _append_pages(
        self, request_id: int, pages: Sequence[int], window_pages: Sequence[int], changes: Changes
    ) -> None:
        slot = self.slots[request_id]
        start = slot.index * self.state.max_pages
        changes.put("pages", start + slot.num_pages, np.asarray(pages, dtype=np.int64))
        changes.put("window_pages", start + slot.num_window_pages, np.asarray(window_pages, dtype=np.int64))
        slot.num_pages += len(pages)
        slot.num_window_pages += len(window_pages)

    def _stage(self, batch: Batch, changes: Changes) -> dict[str, Tensor]:
        sampled, numbers = [batch.slots[number] for number in batch.sampled], list(batch.sampled)
        sample_drafts = batch.num_drafts[numbers]
        arrays = changes.arrays() | {
            "slots": np.array([slot.index for slot in batch.slots]),
            "step_counts": batch.counts,
            "tail_rows": batch.tail_rows if batch.has_tail else np.empty(0, dtype=np.int64),
            "sample_rows": batch.sample_rows,
            "sample_slots": np.array([slot.index for slot in sampled], dtype=np.int64),
            "sample_counts": batch.counts[numbers] - sample_drafts + batch.sample_index,
            "sample_index": batch.sample_index,
            "sample_drafts": sample_drafts,
            "step_drafts": batch.num_drafts,
            "sample_prompts": np.array([slot.num_prompt for slot in sampled], dtype=np.int64),
        }
        staged = self.staging.send(arrays)
        self.state.apply(staged)
        return staged

    def _inputs(self, batch: Batch, staged: dict[str, Tensor], num_rows: int) -> StepInputs:
        """The step of a batch; rows above the batch's own are padding."""
        step = self._with_images(batch, self._rows(staged["slots"], staged["step_counts"], num_rows))
        return self._with_tail(step, staged["tail_rows"]) if batch.has_tail else step

    def _with_images(self, batch: Batch, step: StepInputs) -> StepInputs:
        """Rows for the step's image positions, where a request of it has any."""
        if not any(slot.request_id in self.embeddings for slot in batch.slots):
            return step
        parts = []
        for slot, count in zip(batch.slots, batch.counts.tolist(), strict=True):
            part = torch.zeros((count, self.model.config.hidden_size))
            own = self.embeddings.get(slot.request_id)
            if own is not None:
                chunk = own[slot.num_computed : slot.num_computed + count]
                part[: len(chunk)] = chunk
            parts.append(part)
        parts.append(torch.zeros((step.num_rows - batch.num_rows, self.model.config.hidden_size)))
        dtype = getattr(torch, self.model.config.numerics.dtype_name)
        return step.with_embeddings(torch.cat(parts).to(device=step.positions.device, dtype=dtype))

    def _masks(self, batch: Batch) -> Tensor | None:
        """bool [S, V] of the token masks of the sampled requests, if any has one."""
        wanted = [self.masks.get(batch.slots[number].request_id) for number in batch.sampled]
        if not any(mask is not None for mask in wanted):
            return None
        everything = torch.ones(self.model.config.vocab_size, dtype=torch.bool)
        rows = [everything if mask is None else mask for mask in wanted]
        return torch.stack(rows).to(self.state.tokens.device)

    def _prompt_logprobs(self, batch: Batch, output: StepOutput) -> dict[int, tuple[Tensor, LogProbs]]:
        """By number in the batch: the prompt tokens after the step's rows, and their log-probabilities."""
        found = {}
        for number, (slot, count) in enumerate(zip(batch.slots, batch.counts.tolist(), strict=True)):
            last = min(slot.num_computed + count, slot.num_prompt - 1)  # the last token has no successor
            if slot.prompt_logprobs is None or slot.num_computed >= last:
                continue
            rows = torch.from_numpy(batch.hidden_rows(number)[: last - slot.num_computed])
            logits = self.model.decoder.logits(output.hidden[rows.to(output.hidden.device)])
            following = self.state.tokens[slot.index, slot.num_computed + 1 : last + 1]
            ids = (following & (IMAGE_BIT - 1)).long()
            found[number] = (ids, prompt_logprobs(logits, ids, slot.prompt_logprobs))
        return found
