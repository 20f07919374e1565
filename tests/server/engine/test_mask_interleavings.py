"""Steps, masks, faulty masks and cancellations in any order: each request gets its own tokens."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from deltastore.checkpoint import Checkpoint
from server.engine.core import EngineCore, RequestLimits
from server.engine.kv_cache_manager import KVCacheManager
from server.engine.model_runner import ModelRunner
from server.engine.scheduler import Scheduler
from server.engine.slot_policy import SchedulerConstants
from server.metrics.metrics import EngineMetrics, Telemetry
from server.model.loader import PAGE_TOKENS, ServedModel, load_model
from server.protocol.messages import DoneEvent, ErrorEvent, Event, FinishEvent, Mask, TokenEvent
from server.protocol.request import Request, SamplingParams, token_ids_of
from tests.helpers.tiny_models import VOCAB_SIZE, make_pair
from tests.server.engine.helpers.masks import branching, pack
from tests.server.helpers.residency import CPU, ResidencyHarness, running_residency
from tests.server.helpers.served import generate, same_up_to_a_tie

NUM_PAGES = 6  # with the padding page: too few for three sequences to end
NUM_NEW = 8
MAX_STEPS = 2000
PROMPTS = tuple(tuple(range(start, start + length)) for start, length in ((3, 15), (90, 29), (7, 12)))
ACTIONS = ("step", "mask", "stale", "twice", "stop", "cancel", "faulty")
WEIGHTED = (*("step", "mask") * 8, *ACTIONS)

# The tokens and margins of transformers for a prompt, free or constrained.
Reference = dict[tuple[int, bool], tuple[list[int], list[float]]]


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """The parts of an engine that examples share."""

    model: ServedModel
    harness: ResidencyHarness
    reference: Reference


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parts]:
    directory = tmp_path_factory.mktemp("model")
    base = make_pair("llama", directory, seed=31, changes=()).base
    model = load_model(Checkpoint.open(base), CPU, torch.float32, threading.Event())
    model.attention.allocate(NUM_PAGES)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    plain.generation_config.eos_token_id = None
    reference = {
        (number, is_constrained): generate(
            plain, list(prompt), NUM_NEW, branching if is_constrained else None
        )
        for number, prompt in enumerate(PROMPTS)
        for is_constrained in (False, True)
    }
    with running_residency(directory) as harness:
        yield Parts(model, harness, reference)


@dataclass(slots=True, eq=False)
class Asked:
    """A request, and what came of it."""

    request: Request
    prompt: int
    is_whole: bool = True  # nothing has cut it short
    fails: bool = False
    events: list[Event] = field(default_factory=list)
    generated: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    owed: dict[int, None] = field(default_factory=dict)  # sequences whose mask was not sent

    @property
    def is_constrained(self) -> bool:
        return self.request.sampling_params.is_constrained

    @property
    def has_ended(self) -> bool:
        return bool(self.events) and isinstance(self.events[-1], DoneEvent | ErrorEvent)

    def on_event(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, TokenEvent):
            self.generated[event.index].append(event.token_id)
            if self.is_constrained:
                self.owed[event.index] = None
        elif isinstance(event, FinishEvent):
            self.owed.pop(event.index, None)
        elif isinstance(event, ErrorEvent):
            self.owed.clear()

    def mask(self, index: int, allowed: set[int] | None = None, ahead: int = 0) -> Mask:
        tokens = self.generated[index]
        bits = pack(branching(tokens) if allowed is None else allowed, VOCAB_SIZE)
        return Mask(self.request.id, index, len(tokens) + ahead, bits)


class Client:
    """Acts on an engine in the order that an example chooses."""

    def __init__(self, core: EngineCore, asked: list[Asked]) -> None:
        self.core = core
        self.asked = asked
        for one in asked:
            first = pack(branching([]), VOCAB_SIZE) if one.is_constrained else None
            core.add_request(one.request, one.on_event, 0.0, first)

    def act(self, action: str, number: int) -> None:
        owing = [(one, index) for one in self.asked for index in one.owed]
        if action == "step":
            self.step()
        elif owing:
            self._act_on(action, *owing[number % len(owing)])

    def step(self) -> None:
        self.core.sample_masked()
        self.core.step()

    def _act_on(self, action: str, one: Asked, index: int) -> None:
        """Act on a sequence whose mask was not sent."""
        if action in ("mask", "twice"):
            if action == "twice":
                self.core.set_mask(one.mask(index, {1}))
            self.core.set_mask(one.mask(index))
            one.owed.pop(index, None)
        elif action == "stale":
            self.core.set_mask(one.mask(index, {1}, ahead=-1))
        elif action == "stop":
            one.is_whole = False
            self.core.stop_sequence(one.request.id, index)
        elif action == "cancel":
            one.is_whole = False
            self.core.cancel(one.request.id)
        else:
            one.is_whole, one.fails = False, True
            self.core.set_mask(one.mask(index, {1}, ahead=1))

    def end(self) -> None:
        """Send all masks until every request has ended."""
        for _ in range(MAX_STEPS):
            if all(one.has_ended for one in self.asked):
                return
            for one in self.asked:
                for index in list(one.owed):
                    self._act_on("mask", one, index)
            self.step()
        raise AssertionError("requests never end")


@st.composite
def requests(draw: st.DrawFn) -> list[Asked]:
    rows = draw(
        st.lists(
            st.tuples(
                st.integers(0, len(PROMPTS) - 1), st.sampled_from([True, True, False]), st.integers(1, 2)
            ),
            min_size=1,
            max_size=4,
        )
    )
    made = []
    for number, (prompt, is_constrained, n) in enumerate(rows):
        sampling: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": NUM_NEW, "n": n}
        params = SamplingParams(**sampling, is_constrained=is_constrained)
        request = Request(
            f"r{number}", f"t{number % 2}", None, None, token_ids_of(PROMPTS[prompt]), VOCAB_SIZE, params
        )
        made.append(Asked(request, prompt))
    return made


@settings(max_examples=20, deadline=None)
@given(
    asked=requests(), actions=st.lists(st.tuples(st.sampled_from(WEIGHTED), st.integers(0, 9)), max_size=50)
)
def test_each_request_gets_its_own_tokens_in_any_order_of_what_happens(
    parts: Parts, asked: list[Asked], actions: list[tuple[str, int]]
) -> None:
    kv_cache = KVCacheManager(NUM_PAGES, PAGE_TOKENS)
    constants = SchedulerConstants(reserve_tokens=0)
    residency = parts.harness.residency
    scheduler = Scheduler(kv_cache, residency, max_num_seqs=4, max_batch_tokens=24, constants=constants)
    telemetry = Telemetry(EngineMetrics())
    limits = RequestLimits(
        max_open=16, has_shares=False, max_model_len=100, load_timeout_s=60.0, mask_timeout_s=60.0
    )
    client = Client(EngineCore(ModelRunner(parts.model), scheduler, residency, telemetry, limits), asked)
    for action, number in actions:
        client.act(action, number)
    client.end()
    assert kv_cache.num_available == kv_cache.num_pages
    assert not scheduler.running
    for one in asked:
        tokens, margins = parts.reference[one.prompt, one.is_constrained]
        last = one.events[-1]
        assert isinstance(last, ErrorEvent) == one.fails, last
        for generated in one.generated.values():
            num = len(generated)
            assert same_up_to_a_tie(generated, tokens[:num], margins)
            assert num == NUM_NEW or not one.is_whole
        assert len(one.generated) == one.request.sampling_params.n or not one.is_whole
