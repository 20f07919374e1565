"""Time steps of the model, plain, paged and delta-enabled with many variants in a batch; prompts; and count slots."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from bench.gpu.measure import (
    BASE_TRAFFIC,
    RESIDENT,
    BenchSizes,
    Blueprint,
    Rows,
    base_of,
    captured,
    make_resident,
    seconds,
    step_limit,
)
from server.deltas.layers import attach
from server.deltas.resident import BatchContext, ResidentDelta, arena
from server.engine.build import CUDA_SHARE, DEFAULT_MAX_SLOTS
from server.model.attention import AttentionMetadata, Chunk, PagedAttention

PAGE_TOKENS = 16  # as the server's
SLOT_SLACK = 1.15  # of the one-bit plan, as the server's
CPU_MEMORY = 64 << 20  # stands in for a device's where there is none


@dataclass(slots=True)
class StepBench:
    """One model, which becomes paged and then delta-enabled."""

    model: PreTrainedModel
    sizes: BenchSizes
    device: torch.device
    rows: Rows
    attention: PagedAttention | None = None
    context: BatchContext | None = None
    deltas: list[ResidentDelta] = field(default_factory=list)

    @property
    def pages_each(self) -> int:
        """Number of pages of one sequence in a decode step."""
        return self.sizes.context // PAGE_TOKENS + 1

    @torch.inference_mode()
    def plain(self) -> dict[int, float]:
        """Time transformers' own steps and prompts; return seconds of a step by its tokens."""
        found = {}
        for tokens in self.sizes.tokens:
            ids = self._ids(tokens, self.sizes.context)
            cache = DynamicCache(config=self.model.config)
            self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)

            def step(ids: Tensor = ids[:, -1:], cache: DynamicCache = cache) -> None:
                self.model(input_ids=ids, past_key_values=cache, use_cache=True)
                # Removes the new token.
                cache.crop(-1)

            found[tokens] = seconds(step, self.device, self.sizes.repeats)
            name = f"{tokens} tokens: plain transformers"
            self.rows.put("base traffic", name, 1e3 * found[tokens], note="DynamicCache, no graph")
        for tokens in self.sizes.prompts:
            ids = self._ids(1, tokens)

            def prompt(ids: Tensor = ids) -> None:
                self.model(input_ids=ids, use_cache=False, logits_to_keep=1)

            self._put_prompt(tokens, "plain transformers", prompt)
        return found

    @torch.inference_mode()
    def page(self) -> dict[int, float]:
        """Make the model attend to a paged cache; return seconds of a step by its tokens, without hooks."""
        self.attention = PagedAttention(self.model, PAGE_TOKENS)
        self.model(input_ids=self._ids(1, 3), use_cache=False)
        decode_pages = max(self.sizes.tokens) * self.pages_each
        prompt_pages = max(self.sizes.prompts) // PAGE_TOKENS + 1
        self.attention.allocate(max(decode_pages, prompt_pages) + 1)
        found = {}
        for tokens in self.sizes.tokens:
            with self._decoding(tokens, 0) as step:
                run, note = captured(step, self.device)
                found[tokens] = seconds(run, self.device, self.sizes.repeats)
            name = f"{tokens} tokens: paged, no deltas possible"
            self.rows.put("base traffic", name, 1e3 * found[tokens], note=note)
        return found

    def fit(self, drawing: Blueprint) -> None:
        """Hook all layers, allocate every slot that fits, and fill the first ones with deltas."""
        self.context = attach(self.model, base_of(self.model))
        slot_bytes = int(SLOT_SLACK * drawing.device_bytes)
        slot_bytes += -slot_bytes % 256
        num_slots = min(DEFAULT_MAX_SLOTS, self._free_bytes() // slot_bytes)
        slots = arena(num_slots, slot_bytes, self.device)
        assert self.attention is not None
        cache = self.attention.bytes_per_token * PAGE_TOKENS * max(self.sizes.tokens) * self.pages_each
        self.rows.put("fit", "slot", slot_bytes / 1e6, note=f"{drawing.device_bytes / 1e6:.1f} MB of it used")
        self.rows.put(
            "fit",
            "variants resident beside base and cache",
            num_slots,
            met=num_slots >= RESIDENT,
            note=f"cache {cache / 1e9:.2f} GB; at most {DEFAULT_MAX_SLOTS} are taken",
        )
        max_rows = max(*self.sizes.tokens, *self.sizes.prompts)
        self.context.allocate(num_slots, max_rows, self.device)
        self.deltas = make_resident(self.context.tables, slots[: max(self.sizes.variants)], drawing)

    @torch.inference_mode()
    def decode(self) -> dict[int, float]:
        """Time steps with each number of variants; return seconds of the base's step by its tokens."""
        base: dict[int, float] = {}
        for tokens, k in self.sizes.compositions():
            if k > len(self.deltas):
                continue
            with self._decoding(tokens, k) as step:
                if not k:
                    eager = seconds(step, self.device, self.sizes.repeats)
                    name = f"{tokens} tokens: delta-enabled, without a graph"
                    self.rows.put("base traffic", name, 1e3 * eager)
                run, note = captured(step, self.device)
                spent = seconds(run, self.device, self.sizes.repeats)
            base.setdefault(tokens, spent)
            times = spent / base[tokens]
            met = times <= step_limit(k) if k else None
            name = f"{tokens} tokens, {k or 'no'} variants"
            self.rows.put("decode", name, 1e3 * spent, met=met, note=f"{times:.2f} of base; {note}")
        return base

    @torch.inference_mode()
    def prefill(self) -> None:
        """Time one prompt at a time, of the base and of a variant."""
        for tokens in self.sizes.prompts:
            for who, delta in (("base", None), ("one variant", self.deltas[0])):
                pages = list(range(1, 2 + (tokens - 1) // PAGE_TOKENS))
                with self._running([Chunk(0, tokens, pages)], [delta]) as forward:
                    self._put_prompt(tokens, who, forward)

    def compare(self, plain: dict[int, float], paged: dict[int, float], base: dict[int, float]) -> None:
        """Compare the base's speed on a delta-enabled model with that of the model without hooks."""
        for tokens, spent in base.items():
            for against, other in (("plain transformers", plain), ("paged, no deltas possible", paged)):
                speed = other[tokens] / spent
                name = f"{tokens} tokens: of the speed of {against}"
                self.rows.put("base traffic", name, speed, met=speed >= BASE_TRAFFIC)

    def _put_prompt(self, tokens: int, who: str, run: Callable[[], object]) -> None:
        spent = seconds(run, self.device, max(2, self.sizes.repeats // 4))
        note = f"{tokens / spent:.0f} tokens/s"
        self.rows.put("prefill", f"{tokens} tokens: {who}", 1e3 * spent, note=note)

    @contextmanager
    def _decoding(self, tokens: int, num_variants: int) -> Iterator[Callable[[], Tensor]]:
        """Prepare a decode step with one token of each of `tokens` sequences, spread over the variants."""
        each, context = self.pages_each, self.sizes.context
        chunks = [Chunk(context, 1, range(1 + i * each, 1 + (i + 1) * each)) for i in range(tokens)]
        owners = [self.deltas[i * num_variants // tokens] if num_variants else None for i in range(tokens)]
        with self._running(chunks, owners) as forward:
            yield forward

    @contextmanager
    def _running(
        self, chunks: Sequence[Chunk], deltas: Sequence[ResidentDelta | None]
    ) -> Iterator[Callable[[], Tensor]]:
        """Prepare a pass over `chunks` that computes their last tokens' logits; its inputs are on the device."""
        assert self.attention is not None
        positions = [chunk.start + i for chunk in chunks for i in range(chunk.num_tokens)]
        ends = torch.tensor([chunk.num_tokens for chunk in chunks]).cumsum(0) - 1
        inputs = {
            "input_ids": self._ids(1, len(positions)),
            "position_ids": torch.tensor([positions], device=self.device),
            "logits_to_keep": ends.to(self.device),
        }
        with ExitStack() as step:
            if self.context is not None:
                num_tokens = [chunk.num_tokens for chunk in chunks]
                step.enter_context(self.context.step(deltas, num_tokens, [1] * len(chunks)))
            metadata = AttentionMetadata.of(chunks, PAGE_TOKENS, self.device)
            step.enter_context(self.attention.step(metadata))
            yield lambda: self.model(**inputs, use_cache=False).logits

    def _ids(self, rows: int, tokens: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(0)
        size = (rows, tokens)
        return torch.randint(0, self.sizes.vocabulary, size, generator=generator, device=self.device)

    def _free_bytes(self) -> int:
        if self.device.type != "cuda":
            return CPU_MEMORY
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self.device)[0] * CUDA_SHARE)
