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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deltastore.base import Base
from deltastore.checkpoint import Checkpoint
from deltastore.errors import NotServable
from deltastore.loader import Loader
from deltastore.registry import Registry
from deltastore.user_cache import user_cache_dir
from server.deltas.fetcher import Fetcher
from server.deltas.residency import Residency
from server.engine.build import (
    MASK_S,
    FreeMemory,
    base_sizes,
    device_of,
    free_memory,
    host_cache_bytes,
    host_cache_of,
    max_batch_tokens,
    plan_memory,
)
from server.engine.clients import EngineSocket
from server.engine.core import EngineCore, RequestLimits
from server.engine.engine import Engine
from server.engine.kv_cache_manager import KVCacheManager
from server.engine.request_state import RequestState, SequenceOutput
from server.engine.sampler import GREEDY_BELOW, SampledToken, not_finite
from server.engine.scheduler import Scheduler, StepPlan
from server.engine.sequence import Sequence
from server.errors import EngineFailed, InvalidRequest
from server.metrics.metrics import EngineMetrics, ResidencyMetrics, Telemetry
from server.protocol.messages import EngineFacts
from server.protocol.request import Request
from server.settings import Settings

log = logging.getLogger(__name__)

# vLLM's on the CPU; those on CUDA are smaller.
PAGE_TOKENS = 128
# Share of the KV cache in use from which a sequence that waits in vLLM waits for pages.
FULL = 0.9
# Names the row of a sequence in the sampling parameters that vLLM passes on.
ROW = "peraxis_row"
# Read when vLLM is imported; what the operator has set stays.
ENVIRONMENT = {
    # The engine in this process, which our own processes surround already.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    # It would log to standard output, on which a server prints one line.
    "VLLM_CONFIGURE_LOGGING": "0",
    # The second one has not run with deltas yet.
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    # HTTP processes need the cores, too, and would wait for a thread that spins on a core of its own.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


class Usable:
    """Stands for the model runner: an error of vLLM's step is an error of its engine, which must be started again."""

    def is_usable(self) -> bool:
        return False


class VllmPages(KVCacheManager):
    """Stands for the KV cache, which is vLLM's: any sequence has pages. The figures are those of vLLM's last step."""

    def __init__(self) -> None:
        super().__init__(2, PAGE_TOKENS)
        self.longest = 0  # tokens of a sequence
        self._usage = 0.0
        self._prefix_counts = 0, 0
        self.num_preempted = 0  # sequences that vLLM has preempted since `take_preempted`
        self.is_short = False  # vLLM has sequences that wait for pages

    @property
    def max_tokens(self) -> int:
        return self.longest

    @property
    def usage(self) -> float:
        return self._usage

    def take_prefix_counts(self) -> tuple[int, int]:
        counts, self._prefix_counts = self._prefix_counts, (0, 0)
        return counts

    def take_preempted(self) -> int:
        """Return how many sequences vLLM has preempted since the last call."""
        number, self.num_preempted = self.num_preempted, 0
        return number

    def cache_full_pages(self, sequence: Sequence) -> None:
        pass

    def record(self, scheduler: Any, iteration: Any) -> None:
        """Take the figures of a step: vLLM's SchedulerStats and IterationStats, each None if there are none."""
        if scheduler is not None:
            found, before = scheduler.prefix_cache_stats, self._prefix_counts
            self._usage = scheduler.kv_cache_usage
            self._prefix_counts = before[0] + found.queries, before[1] + found.hits
            self.is_short = scheduler.num_waiting_reqs > 0 and self._usage > FULL
        if iteration is not None:
            self.num_preempted += iteration.num_preempted_reqs


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
        own = logits[: self.num_embeddings].cpu()
        if not own.amax().isfinite():
            raise not_finite()
        token = self.output.sampler.draw(own)
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


class Admission(Scheduler):
    """Chooses the sequences that vLLM has: in fair order, each when its delta is in a slot."""

    def __init__(self, pages: VllmPages, residency: Residency, max_num_seqs: int) -> None:
        super().__init__(pages, residency, max_num_seqs, max_num_seqs + 1)
        self._stopped: list[Sequence] = []

    def plan(self, now: float, on_admit: Callable[[Sequence], None] = lambda sequence: None) -> StepPlan:
        plan = StepPlan()
        self._now = now
        self._slot_policy.update(now, lambda sequence: self._preempt(sequence, plan))
        while (first := self._queue.first()) is not None:
            if len(self._running) >= self._max_num_seqs:
                self._preempt_for(first, plan)
            if len(self._running) >= self._max_num_seqs:
                break
            self._start(first)
            first.queue.charge(
                self._constants.prompt_token_cost * (first.num_prompt_tokens - first.num_charged_tokens)
            )
            first.num_charged_tokens = first.num_prompt_tokens
            on_admit(first)
        for sequence in self.running:
            if not sequence.awaits_mask:
                plan.add(sequence, 1)
        return plan

    def preempt_one_that_awaits_its_mask(self) -> Sequence | None:
        """Preempt one of the sequences that hold pages without using them, of the tenant that was served most."""
        waiting = [sequence for sequence in self._running.values() if sequence.awaits_mask]
        if not waiting:
            return None
        victim = max(waiting, key=lambda sequence: (sequence.queue.tenant.counter, sequence.num_tokens))
        self._preempt(victim, StepPlan())
        return victim

    def add_costs(self, plan: StepPlan, num_generated: Counter[Sequence]) -> None:
        """Note what a step of vLLM gave each sequence, and its share of reading its delta."""
        num_sharing = Counter(sequence.version for sequence in plan.batch)
        for sequence in plan.batch:
            cost = self._constants.generated_token_cost * num_generated[sequence]
            if sequence.version is not None:
                cost += self._constants.delta_cost_tokens / num_sharing[sequence.version]
            plan.costs.append((sequence.queue, cost))

    def take_stopped(self) -> list[Sequence]:
        """Return the sequences that ran and run no more since the last call."""
        stopped, self._stopped = self._stopped, []
        return stopped

    def _stop(self, sequence: Sequence) -> None:
        super()._stop(sequence)
        self._stopped.append(sequence)


class VllmCore(EngineCore):
    """The step: give vLLM what was admitted, take back what has stopped, and turn its tokens into events."""

    def __init__(
        self,
        llm: Any,  # vLLM's LLMEngine
        manager: Any,  # the plugin's DeltaManager
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
        is_busy = super().step()
        self._abort_stopped()
        return is_busy

    def _check(self, request: Request, first_mask: bytes | None) -> None:
        params = request.sampling_params
        for is_asked, what in (
            (params.prompt_logprobs is not None, "log-probabilities of the prompt"),
            (request.num_embeddings > self._llm.model_config.get_vocab_size(), "a variant with added tokens"),
        ):
            if is_asked:
                raise InvalidRequest(f"this server runs vLLM, which does not serve {what}: leave it out")
        super()._check(request, first_mask)

    def _execute(self, plan: StepPlan) -> None:
        began, num_generated = time.monotonic(), Counter[Sequence]()
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
        fault = self._manager.take_fault()
        for output in outputs:
            given = self._sequences.get(output.request_id)
            if given is None or (state := self._requests.find(given.request_id)) is None:
                continue
            with self._requests.failing_alone(state):
                if fault is not None and given.version is not None:
                    raise EngineFailed(fault)
                num_generated[given] += self._take(state, given, output.outputs[0])
        self._preempt_for_pages()
        self._admission.add_costs(plan, num_generated)
        self._scheduler.charge(plan, time.monotonic())
        variants = {sequence.version for sequence in plan.batch} - {None}
        self._telemetry.step(time.monotonic() - began, len({s.request_id for s in plan.batch}), len(variants))

    def _give(self, state: RequestState, sequence: Sequence) -> None:
        """Give vLLM a sequence with all tokens that it has so far."""
        self._num_given += 1
        name = f"{sequence.id}#{self._num_given}"
        output, num_embeddings = state.outputs[sequence.index], state.request.num_embeddings
        row = None
        if output.is_constrained or output.sampler.is_own:
            row = self._rows[name] = OwnRow(output, num_embeddings, output.is_constrained)
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
        if row is not None:
            return SamplingParams(
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
                scored = output.logprobs[position]
                logprob = scored[token_id].logprob
                ranked = sorted(scored.items(), key=lambda item: item[1].rank)
                top = tuple((number, value.logprob) for number, value in ranked)
                top = top[: state.request.sampling_params.logprobs]
            found[1].sampler.add(token_id)
            self._send(state, sequence, found[1], SampledToken(token_id, logprob, top))
            sequence.num_computed_tokens = sequence.num_tokens - 1
        return len(output.token_ids)

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


def build_vllm_engine(
    settings: Settings,
    registry: Registry,
    metrics: EngineMetrics,
    socket: EngineSocket,
    stopping: threading.Event,
) -> Engine:
    """Load the base into vLLM and build the engine that serves it on `socket`. Raises as `build_engine`."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("VLLM_CACHE_ROOT", str(user_cache_dir() / "vllm"))
    logging.getLogger("vllm").setLevel(logging.WARNING)
    logging.getLogger("vllm.peraxis").setLevel(logging.INFO)
    device, checkpoint = device_of(settings.device), Checkpoint.open(settings.base)
    dtype, slot_bytes, base_bytes = base_sizes(settings, checkpoint, device)
    base = Base.of(checkpoint)
    cache_bytes = host_cache_bytes(settings)
    free = free_memory(device, cache_bytes, base_bytes)
    memory = _memory_of(settings, free, dtype, slot_bytes)
    pages, rows = VllmPages(), dict[str, OwnRow]()
    llm = _llm_of(settings, device, dtype, slot_bytes, memory, pages, rows)
    num_slots = memory.num_slots
    (manager,) = llm.collective_rpc(_manager_of)
    residency_metrics = ResidencyMetrics(metrics)
    host_cache = host_cache_of(cache_bytes, slot_bytes, device, residency_metrics)
    fetcher = Fetcher(Loader(device, settings.load_threads), host_cache, registry, manager.tables)
    residency = Residency(manager.slots, fetcher, residency_metrics, on_load_ended=socket.wake)
    max_model_len = int(llm.model_config.max_model_len)
    limits = RequestLimits(
        settings.max_num_seqs + settings.max_queue, max_model_len, settings.load_timeout, MASK_S
    )
    pages.longest = max_model_len
    scheduler = Admission(pages, residency, settings.max_num_seqs)
    core = VllmCore(llm, manager, scheduler, residency, Telemetry(metrics), limits, pages, rows)
    metrics.host_cache_limit_bytes.set(cache_bytes)
    metrics.slots.set(num_slots)
    used = {"slots": num_slots * slot_bytes, "kv": memory.kv_cache_bytes, "base": base_bytes}
    for kind, num_bytes in used.items():
        metrics.device_memory_bytes.labels(kind=kind).set(num_bytes)
    return Engine(core, residency, socket, EngineFacts(base, max_model_len, slot_bytes, num_slots), metrics)


@dataclass(frozen=True, slots=True)
class VllmMemory:
    """How memory is divided: slots, the KV cache, and the longest request that it holds."""

    num_slots: int
    kv_cache_bytes: int
    max_model_len: int


def _memory_of(settings: Settings, free: FreeMemory, dtype: torch.dtype, slot_bytes: int) -> VllmMemory:
    """Divide memory as for the native engine, with keys and values of the size that most architectures have."""
    # Deferred, as all of transformers is until the base is known to fit.
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(settings.base).get_text_config()
    num_heads = int(config.num_attention_heads)
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // num_heads)
    num_kv_heads = int(getattr(config, "num_key_value_heads", None) or num_heads)
    page_bytes = PAGE_TOKENS * 2 * int(config.num_hidden_layers) * num_kv_heads * head_dim * dtype.itemsize
    longest = int(getattr(config, "max_position_embeddings", 0) or 2048)
    longest = min(settings.max_model_len or longest, longest)
    max_pages = -(-settings.max_num_seqs * longest // PAGE_TOKENS) + 1
    plan = plan_memory(settings, free, slot_bytes, page_bytes, max_pages)
    # One page less: vLLM keeps one for padding, too.
    max_model_len = min(longest, (plan.num_pages - 1) * PAGE_TOKENS)
    return VllmMemory(plan.num_slots, plan.num_pages * page_bytes, max_model_len)


def _llm_of(
    settings: Settings,
    device: torch.device,
    dtype: torch.dtype,
    slot_bytes: int,
    memory: VllmMemory,
    pages: VllmPages,
    rows: Mapping[str, OwnRow],
) -> Any:
    """Start vLLM's engine in this process.

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
    max_tokens = max_batch_tokens(settings, device)
    arguments = EngineArgs(
        str(settings.base),
        skip_tokenizer_init=True,
        # A bar would stand between the lines of a log in JSON.
        use_tqdm_on_load=False,
        dtype=str(dtype).removeprefix("torch."),
        enable_lora=True,
        max_loras=memory.num_slots,
        max_lora_rank=8,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=memory.max_model_len,
        max_num_batched_tokens=max_tokens,
        enable_chunked_prefill=True,
        # So that a long prompt leaves tokens of a step to others.
        long_prefill_token_threshold=max_tokens // 2,
        logits_processors=[logits_processor(rows)],
        async_scheduling=False,
        kv_cache_memory_bytes=memory.kv_cache_bytes,
        additional_config={"peraxis": {"slot_bytes": slot_bytes, "num_slots": memory.num_slots}},
    )
    try:
        return LLMEngine.from_engine_args(arguments, stat_loggers=[stat_logger(pages)])
    except NotServable:
        raise
    except Exception as error:
        raise NotServable(
            f"vLLM cannot serve this base: {type(error).__name__}: {error}: serve it with --backend native"
        ) from error


def _manager_of(worker: Any) -> Any:
    return worker.model_runner.lora_manager
