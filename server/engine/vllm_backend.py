"""The engine with vLLM as its backend: our requests, queues, slots and loads; vLLM's steps, KV cache and sampling.

`EngineCore` stays: requests, tenants' fairness, slot policy, residency, events and telemetry. A sequence is given to
vLLM when the scheduler admits it, that is when its delta is in a slot, and is aborted there when it stops to run here.
So nothing is loaded, refused or validated inside a step of vLLM, whose errors end its engine.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deltastore.base import Base
from deltastore.checkpoint import Checkpoint
from deltastore.errors import NotServable
from deltastore.loader import Loader
from deltastore.registry import Registry
from deltastore.wrappers import check_text_alone
from server.deltas.fetcher import Fetcher
from server.deltas.residency import Residency
from server.engine.build import (
    FreeMemory,
    base_sizes,
    device_of,
    free_memory,
    host_cache_bytes,
    host_cache_of,
    max_batch_tokens,
    plan_memory,
    request_limits,
)
from server.engine.clients import EngineSocket
from server.engine.core import EngineCore, RequestLimits
from server.engine.engine import Engine
from server.engine.request_state import RequestState, SequenceOutput
from server.engine.sampler import GREEDY_BELOW, SampledToken, not_finite
from server.engine.scheduler import StepPlan
from server.engine.sequence import Sequence
from server.engine.vllm_admission import PAGE_TOKENS, Admission, VllmPages, longest_chunk
from server.engine.vllm_ranks import Ranks
from server.errors import EngineFailed, InvalidRequest
from server.metrics.metrics import EngineMetrics, ResidencyMetrics, Telemetry
from server.protocol.messages import EngineFacts, ScoredToken
from server.protocol.request import Request
from server.settings import Settings

log = logging.getLogger(__name__)

# That vLLM samples with.
MAX_TEMPERATURE = 2.0
CPU = torch.device("cpu")
# Names the row of a sequence in the sampling parameters that vLLM passes on.
ROW = "peraxis_row"
# The logits processor of a rank, which hands the logits of those rows over.
HELD_LOGITS = "peraxis_vllm.ranks:HeldLogits"


class Usable:
    """Stands for the model runner: an error of vLLM's step is an error of its engine, which must be started again."""

    def is_usable(self) -> bool:
        return False


def stat_logger(pages: VllmPages) -> type:
    """Return the class whose object vLLM gives the figures of each step, in place of its own for Prometheus."""
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    class Figures(PrometheusStatLogger):  # type: ignore[misc]
        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
            pages.record(scheduler_stats, iteration_stats)

        def log_engine_initialized(self) -> None:
            pass

    return Figures


@dataclass(slots=True, eq=False)
class OwnRow:
    """A sequence whose tokens our sampler draws, from logits that vLLM's step hands over."""

    output: SequenceOutput
    num_embeddings: int
    is_paused: bool  # behind each token, until our sampler has drawn it with a mask
    logits: Tensor | None = None  # [vocab] float32, of the last step
    error: Exception | None = None
    drawn_s: float = 0.0  # that drawing took in the last step
    internal_id: str = ""  # vLLM's, of a sequence that pauses
    num_given: int = 0  # tokens that vLLM has of it

    @property
    def lacks_tokens(self) -> bool:
        """True of a sequence that has paused and has another token now."""
        return self.is_paused and self.num_given < self.output.sequence.num_tokens

    def apply(self, token_ids: list[int], logits: Tensor) -> Tensor:
        """Return the row of logits ``[vocab]`` from which vLLM draws: one token alone is possible.

        Also called for a prompt that is not complete yet, so nothing is taken in here. Must not fail, because an error
        ends the engine.
        """
        try:
            if not self.is_paused:
                return self._forced(logits)
            self.logits = logits.clone()
        except Exception as error:  # noqa: BLE001  any of them fails its own request
            self.error = error
        return logits

    def _forced(self, logits: Tensor) -> Tensor:
        began = time.monotonic()
        token = self.output.sampler.draw(logits[: self.num_embeddings])
        self.drawn_s += time.monotonic() - began
        if token < 0:
            raise not_finite()
        forced = torch.full_like(logits, -torch.inf)
        forced[token] = 0.0
        return forced


def logits_processor(rows: Mapping[str, OwnRow]) -> type:
    """Return the class of vLLM's logits processor that has `rows`, by vLLM's ids, applied."""
    from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

    class OwnSampler(AdapterLogitsProcessor):  # type: ignore[misc]
        def is_argmax_invariant(self) -> bool:
            return False

        def new_req_logits_processor(self, params: Any) -> Any:
            name = (params.extra_args or {}).get(ROW)
            return None if name is None else rows[name].apply

    return OwnSampler


class VllmCore(EngineCore):
    """The step: give vLLM what was admitted, take back what has stopped, and turn its tokens into events."""

    def __init__(
        self,
        llm: Any,  # vLLM's LLMEngine
        manager: Any,  # the plugin's DeltaManager, or Ranks
        scheduler: Admission,
        residency: Residency,
        telemetry: Telemetry,
        limits: RequestLimits,
        pages: VllmPages,
        rows: dict[str, OwnRow],
    ) -> None:
        super().__init__(Usable(), scheduler, residency, telemetry, limits)  # type: ignore[arg-type]
        self._admission = scheduler
        self._pages = pages
        self._rows = rows  # by vLLM's id
        self._llm = llm
        self._manager = manager
        self._given: dict[Sequence, str] = {}  # vLLM's id of each sequence that it has
        self._sequences: dict[str, Sequence] = {}
        self._num_given = 0

    def step(self) -> bool:
        self._manager.check_alive()
        is_busy = super().step()
        self._abort_stopped()
        return is_busy

    def _check(self, request: Request, first_mask: bytes | None) -> None:
        num_tokens = self._llm.model_config.get_vocab_size()
        if request.num_embeddings > num_tokens:
            raise InvalidRequest(
                f"{request.version} has a vocabulary of {request.num_embeddings} tokens, and this server has room for "
                f"{num_tokens}: its operator can raise --max-added-tokens"
            )
        super()._check(request, first_mask)

    def _execute(self, plan: StepPlan) -> None:
        began, num_generated = time.monotonic(), Counter[Sequence]()
        self._sampling_s = 0.0
        self._abort_stopped()
        for sequence in plan.batch:
            state = self._requests.find(sequence.request_id)
            if state is None:
                continue
            if state.started_at is None:
                state.started_at = began
                self._waiting.remove(state)
                self._telemetry.runs(state.request)
            with self._requests.failing_alone(state):
                if (name := self._given.get(sequence)) is None:
                    self._give(state, sequence)
                elif (row := self._rows.get(name)) is not None and row.lacks_tokens:
                    self._go_on(state, row)
        outputs = self._llm.step()
        self._charge_draws()
        fault = self._manager.take_fault()
        for output in outputs:
            given = self._sequences.get(output.request_id)
            if given is None or (state := self._requests.find(given.request_id)) is None:
                continue
            with self._requests.failing_alone(state):
                if fault is not None and given.version is not None:
                    raise EngineFailed(fault)
                if given.needs_prompt_logits and output.prompt_logprobs:
                    self._take_prompt_logprobs(state, given, output.prompt_logprobs)
                if given.index == 0 and not given.generated_ids:
                    state.num_cached = output.num_cached_tokens or 0
                num_generated[given] += self._take(state, given, output.outputs[0])
        self._preempt_for_pages()
        self._admission.add_costs(plan, num_generated)
        variants = {sequence.version for sequence in plan.batch} - {None}
        self._charge(plan, began, len({s.request_id for s in plan.batch}), len(variants))

    def _charge_draws(self) -> None:
        """Charge what our sampler took inside vLLM's step to the sequences that it drew for."""
        costs = [(row.output.sequence, row.drawn_s) for row in self._rows.values() if row.drawn_s]
        if costs:
            self._charge_sampling(costs, sum(seconds for _, seconds in costs))
        for row in self._rows.values():
            row.drawn_s = 0.0

    def _give(self, state: RequestState, sequence: Sequence) -> None:
        """Give vLLM a sequence with all tokens that it has so far."""
        self._num_given += 1
        name = f"{sequence.id}#{self._num_given}"
        output, num_embeddings = state.outputs[sequence.index], state.request.num_embeddings
        row = None
        is_hot = state.request.sampling_params.temperature > MAX_TEMPERATURE
        if output.is_constrained or output.sampler.is_own or is_hot:
            # With ranks, its logits come from another process, behind the step.
            is_paused = output.is_constrained or isinstance(self._manager, Ranks)
            row = self._rows[name] = OwnRow(output, num_embeddings, is_paused)
        self._given[sequence], self._sequences[name] = name, sequence
        if row is not None and row.is_paused:
            self._go_on(state, row)
        else:
            prompt, params = self._prompt(sequence, 0), self._params(state, sequence, row)
            self._llm.add_request(name, prompt, params, lora_request=self._lora(sequence))

    def _go_on(self, state: RequestState, row: OwnRow) -> None:
        """Give vLLM the tokens that it lacks of a sequence that pauses behind each token.

        vLLM calls this a session with streamed input: it keeps the pages, and drops the token that it has drawn.
        """
        sequence = row.output.sequence
        name = self._given[sequence]
        request = self._llm.input_processor.process_inputs(
            row.internal_id or name,
            self._prompt(sequence, row.num_given),
            self._params(state, sequence, row),
            self._llm.get_supported_tasks(),
            lora_request=self._lora(sequence),
            resumable=True,
        )
        if row.internal_id:
            request.external_req_id = name
        else:
            self._llm.input_processor.assign_request_id(request)
            row.internal_id = request.request_id
        row.num_given = sequence.num_tokens
        self._llm.output_processor.add_request(request, None, None, 0)
        # Both extend their list by the next tokens; between processes each has one of its own.
        request.prompt_token_ids = list(request.prompt_token_ids)
        self._llm.engine_core.add_request(request)

    def _prompt(self, sequence: Sequence, begin: int) -> dict[str, Any]:
        """Return a sequence's tokens from a position on, as vLLM takes them."""
        token_ids = sequence.token_ids(begin, sequence.num_tokens)
        return {"prompt_token_ids": token_ids, "cache_salt": sequence.tenant}

    def _lora(self, sequence: Sequence) -> Any:
        """Return the LoRA request that carries a sequence's delta; None for the base."""
        from vllm.lora.request import LoRARequest

        if sequence.version is None:
            return None
        delta = self._residency.find(sequence.version)
        if delta is None:
            raise EngineFailed(f"{sequence.version} was scheduled and is not resident")
        return LoRARequest(sequence.version, delta.slot.index + 1, delta.digest)

    def _params(self, state: RequestState, sequence: Sequence, row: OwnRow | None) -> Any:
        """Return vLLM's sampling parameters for a sequence; those of a row of ours leave vLLM nothing to draw."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        own = state.request.sampling_params
        prompt_logprobs = own.prompt_logprobs if sequence.needs_prompt_logits else None
        if row is not None:
            return SamplingParams(
                prompt_logprobs=prompt_logprobs,
                max_tokens=1 if row.is_paused else own.max_new_tokens - sequence.num_generated,
                temperature=0.0,
                logprobs=None if row.is_paused else own.logprobs,
                stop_token_ids=[] if row.is_paused else sorted(own.stop_token_ids),
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
                extra_args={ROW: self._given[sequence]},
            )
        is_greedy = own.temperature < GREEDY_BELOW
        return SamplingParams(
            max_tokens=own.max_new_tokens - sequence.num_generated,
            temperature=0.0 if is_greedy else own.temperature,
            top_p=1.0 if is_greedy else own.top_p,
            top_k=0 if is_greedy else own.top_k,
            min_p=0.0 if is_greedy else own.min_p,
            repetition_penalty=own.repetition_penalty,
            logprobs=own.logprobs,
            prompt_logprobs=prompt_logprobs,
            stop_token_ids=sorted(own.stop_token_ids),
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )

    def _take(self, state: RequestState, sequence: Sequence, output: Any) -> int:
        """Send a sequence's new tokens, or hold its logits until its mask is there. Return the number of tokens."""
        row = self._rows.get(self._given[sequence])
        if row is not None and row.error is not None:
            raise row.error
        if row is not None and row.is_paused:
            return self._hold(state, sequence, row)
        for position, token_id in enumerate(output.token_ids):
            if (found := self._requests.find_output(sequence.request_id, sequence.index)) is None:
                return position
            logprob: float | None = None
            top: tuple[tuple[int, float], ...] = ()
            if output.logprobs:
                logprob, top = _scored(
                    output.logprobs[position], token_id, state.request.sampling_params.logprobs
                )
            found[1].sampler.add(token_id)
            self._send(state, sequence, found[1], SampledToken(token_id, logprob, top))
            sequence.num_computed_tokens = sequence.num_tokens - 1
        return len(output.token_ids)

    def _take_prompt_logprobs(self, state: RequestState, sequence: Sequence, scored: Any) -> None:
        """Send the log-probabilities of a prompt, which vLLM gives by position, none for the first."""
        num_top = state.request.sampling_params.prompt_logprobs
        following = zip(sequence.prompt_ids[1:], scored[1:], strict=True)
        tokens = [ScoredToken(token_id, *_scored(one, token_id, num_top)) for token_id, one in following]
        state.outputs[sequence.index].add_prompt_logprobs(tokens)

    def _hold(self, state: RequestState, sequence: Sequence, row: OwnRow) -> int:
        """Hold the logits of a sequence that has paused for `sample_masked`, or draw without a mask."""
        assert row.logits is not None
        logits, row.logits = row.logits, None
        sequence.num_computed_tokens = sequence.num_tokens
        if row.output.is_constrained:
            self._held.hold(row.output, logits, time.monotonic())
        else:
            self._sample_each([(sequence, logits)], torch.stack)
        return 1

    def _preempt_for_pages(self) -> None:
        """Take the pages of a sequence that waits for its mask, if others wait for pages."""
        self._telemetry.preempted(self._pages.take_preempted())
        victim = self._admission.preempt_one_that_awaits_its_mask() if self._pages.is_short else None
        if victim is not None:
            self._telemetry.preempted(1)
            if (found := self._requests.find_output(victim.request_id, victim.index)) is not None:
                self._requests.preempted(found[1])

    def _abort_stopped(self) -> None:
        names = [self._given.pop(s) for s in self._admission.take_stopped() if s in self._given]
        for name in names:
            del self._sequences[name]
            self._rows.pop(name, None)
        if names:
            self._llm.abort_request(names)
            if not self._given:
                self._pages.emptied()


def _scored(
    scored: Mapping[int, Any],  # vLLM's `Logprob` by token
    token_id: int,
    num_top: int | None,
) -> tuple[float, tuple[tuple[int, float], ...]]:
    """Return a token's log-probability, and the likeliest tokens with theirs."""
    ranked = sorted(scored.items(), key=lambda item: item[1].rank)
    return scored[token_id].logprob, tuple((number, one.logprob) for number, one in ranked)[:num_top]


def build_vllm_engine(
    settings: Settings,
    registry: Registry,
    metrics: EngineMetrics,
    socket: EngineSocket,
    stopping: threading.Event,
) -> Engine:
    """Load the base into vLLM and build the engine that serves it on `socket`. Raises as `build_engine`."""
    num_ranks = settings.tensor_parallel_size
    logging.getLogger("vllm").setLevel(logging.WARNING)
    logging.getLogger("vllm.peraxis").setLevel(logging.INFO)
    device, checkpoint = device_of(settings.device), Checkpoint.open(settings.base)
    check_text_alone(checkpoint.stored_config)
    if num_ranks > 1 and device.type == "cpu":
        # Each rank would take all cores.
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // num_ranks)))
    dtype, slot_bytes, base_bytes = base_sizes(settings, checkpoint, device)
    base = Base.of(checkpoint)
    cache_bytes = host_cache_bytes(settings)
    free = free_memory(device, cache_bytes, base_bytes, num_ranks)
    memory = _memory_of(settings, free, dtype, slot_bytes)
    pages, rows = VllmPages(), dict[str, OwnRow]()
    llm = _llm_of(settings, device, dtype, memory, checkpoint.tied, pages, rows)
    num_slots = memory.num_slots
    residency_metrics = ResidencyMetrics(metrics)
    if num_ranks > 1:
        # Logits that ranks send are drawn from on the CPU, whatever their device.
        from server.kernels import sampling_cpu

        sampling_cpu.compiled_kernels()
        manager = tables = Ranks(llm, rows, cache_bytes, slot_bytes, residency_metrics)
        host_cache, load_device = manager.host_cache, CPU
        slots, rank_bytes = manager.slots(num_slots), sum(share.slot_bytes for share in manager.shares)
    else:
        host_cache, load_device = host_cache_of(cache_bytes, slot_bytes, device, residency_metrics), device
        (manager,) = llm.collective_rpc(_manager_of)
        tables, slots, rank_bytes = manager.tables, manager.slots, slot_bytes
    fetcher = Fetcher(Loader(load_device, settings.load_threads), host_cache, registry, tables)
    residency = Residency(slots, fetcher, residency_metrics, on_load_ended=socket.wake)
    longest = int(llm.model_config.max_model_len)
    limits = request_limits(settings, min(longest, memory.max_positions), longest)
    pages.longest = longest
    scheduler = Admission(pages, residency, settings.max_num_seqs, max_batch_tokens(settings, device))
    core = VllmCore(llm, manager, scheduler, residency, Telemetry(metrics), limits, pages, rows)
    metrics.host_cache_limit_bytes.set(cache_bytes)
    metrics.slots.set(num_slots)
    used = {"slots": num_slots * rank_bytes, "kv": memory.kv_cache_bytes, "base": base_bytes}
    for kind, num_bytes in used.items():
        metrics.device_memory_bytes.labels(kind=kind).set(num_bytes)
    facts = EngineFacts(base, limits.max_model_len, slot_bytes, num_slots, longest=longest)
    return Engine(core, residency, socket, facts, metrics)


@dataclass(frozen=True, slots=True)
class VllmMemory:
    """How the memory of all ranks is divided: slots, the KV cache, and the longest request that it holds.

    `max_positions` are the tokens of the base's own longest context.
    """

    num_slots: int
    kv_cache_bytes: int
    max_model_len: int
    max_positions: int


def _memory_of(settings: Settings, free: FreeMemory, dtype: torch.dtype, slot_bytes: int) -> VllmMemory:
    """Divide memory as for the native engine, with keys and values of the size that most architectures have."""
    # Deferred, as all of transformers is until the base is known to fit.
    from transformers import AutoConfig

    from server.model.loader import has_any_length, max_positions

    config = AutoConfig.from_pretrained(settings.base).get_text_config()
    num_heads = int(config.num_attention_heads)
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // num_heads)
    # Each rank has one at least.
    num_kv_heads = max(
        int(getattr(config, "num_key_value_heads", None) or num_heads), settings.tensor_parallel_size
    )
    page_bytes = PAGE_TOKENS * 2 * int(config.num_hidden_layers) * num_kv_heads * head_dim * dtype.itemsize
    own = max_positions(config)
    longest = settings.max_model_len or own
    if longest > own and not has_any_length(config):
        longest = own
    max_pages = -(-settings.max_num_seqs * longest // PAGE_TOKENS) + 1
    plan = plan_memory(settings, free, slot_bytes, page_bytes, max_pages)
    # One page less: vLLM keeps one for padding, too.
    max_model_len = min(longest, (plan.num_pages - 1) * PAGE_TOKENS)
    return VllmMemory(plan.num_slots, plan.num_pages * page_bytes, max_model_len, own)


def _llm_of(
    settings: Settings,
    device: torch.device,
    dtype: torch.dtype,
    memory: VllmMemory,
    tied: bool,
    pages: VllmPages,
    rows: Mapping[str, OwnRow],
) -> Any:
    """Start vLLM's engine in this process, and that of each rank if there are several.

    Raises:
        NotServable: vLLM or the plugin is missing, or vLLM does not serve this base.
    """
    try:
        import peraxis_vllm  # noqa: F401 - vLLM finds it by its entry point
        from vllm import EngineArgs, LLMEngine
    except ImportError as error:
        raise NotServable(
            f"--backend vllm: {error}: install vllm and peraxis-vllm beside peraxis, name their interpreter with "
            "--engine-python, or serve with --backend native"
        ) from error
    max_tokens, num_ranks = max_batch_tokens(settings, device), settings.tensor_parallel_size
    arguments = EngineArgs(
        str(settings.base),
        skip_tokenizer_init=True,
        # A bar would stand between the lines of a log in JSON.
        use_tqdm_on_load=False,
        dtype=str(dtype).removeprefix("torch."),
        tensor_parallel_size=num_ranks,
        distributed_executor_backend="mp" if num_ranks > 1 else None,
        enable_lora=True,
        max_loras=memory.num_slots,
        max_lora_rank=8,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=memory.max_model_len,
        max_num_batched_tokens=max_tokens,
        enable_chunked_prefill=True,
        # So that a long prompt leaves tokens of a step to others.
        long_prefill_token_threshold=longest_chunk(max_tokens),
        logits_processors=[HELD_LOGITS if num_ranks > 1 else logits_processor(rows)],
        # A step that has returned reads no slot any more, so one that is free can be written.
        async_scheduling=False,
        kv_cache_memory_bytes=memory.kv_cache_bytes // num_ranks,
        additional_config={
            "peraxis": {"slot_headroom": settings.slot_headroom, "num_slots": memory.num_slots}
        },
        **_changes(settings, memory, tied),
    )
    try:
        return LLMEngine.from_engine_args(arguments, stat_loggers=[stat_logger(pages)])
    except NotServable:
        raise
    except Exception as error:
        raise NotServable(
            f"vLLM cannot serve this base: {type(error).__name__}: {error}: serve it with --backend native"
        ) from error


def _changes(settings: Settings, memory: VllmMemory, tied: bool) -> dict[str, Any]:
    """Return the arguments with which vLLM has rows for tokens that variants add, and positions for their contexts.

    Args:
        tied: as transformers loads the base, whatever its configuration says.
    """
    from peraxis_vllm import LOAD_FORMAT
    from transformers import AutoConfig

    changed: dict[str, int] = {}
    arguments: dict[str, Any] = {}
    config = AutoConfig.from_pretrained(settings.base)
    text = config.get_text_config()
    if settings.max_added_tokens:
        changed["vocab_size"] = int(text.vocab_size) + settings.max_added_tokens
        arguments["load_format"] = LOAD_FORMAT
    if bool(getattr(text, "tie_word_embeddings", tied)) != tied:
        changed["tie_word_embeddings"] = tied
    if memory.max_model_len > memory.max_positions:
        changed["max_position_embeddings"] = memory.max_model_len
    if not changed:
        return arguments
    # A configuration of a model for more than text keeps that of its text in a field.
    names = [name for name in config.sub_configs if getattr(config, name, None) is text]
    return {**arguments, "hf_overrides": {names[0]: changed} if names else changed}


def _manager_of(worker: Any) -> Any:
    return worker.model_runner.lora_manager
