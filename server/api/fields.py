"""Fields that the bodies of OpenAI's two calls lack: one policy for them.

A field that OpenAI's calls, vLLM's request schemas or transformers' `generate()` have and that this server lacks is
refused by name, unless its value asks for nothing. A field that none of them has is ignored, and the reply's head names
it, because clients send names of their own.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache

import msgspec
from msgspec import Raw, Struct

from server.errors import InvalidRequest
from server.fairness import FairBudget

log = logging.getLogger(__name__)

# Values that ask for nothing, by field; null always does. None: no value asks for anything.
NEUTRAL: Mapping[str, tuple[object, ...] | None] = {
    # OpenAI's.
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "metadata": None,
    "modalities": (["text"],),
    "moderation": (),
    "prediction": None,
    "prompt_cache_key": None,
    "prompt_cache_options": None,
    "prompt_cache_retention": None,
    "safety_identifier": None,
    "service_tier": None,
    "store": None,
    "suffix": ("",),
    "user": None,
    "verbosity": ("medium",),
    "web_search_options": (),
    # Of the other of the two calls.
    "add_generation_prompt": (True,),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "echo": (False,),
    "max_completion_tokens": (),
    "messages": (),
    "parallel_tool_calls": (True, False),
    "prompt": (),
    "reasoning_effort": ("none",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    # vLLM's.
    "allowed_token_ids": (),
    "cache_salt": (),
    "documents": ([],),
    "ec_transfer_params": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "include_reasoning": (True,),
    "kv_transfer_params": (),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "media_io_kwargs": ({},),
    "mm_payload": None,
    "mm_processor_kwargs": ({},),
    "priority": (0,),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "repetition_detection": (),
    "request_id": None,
    "return_mm_kwargs": (False,),
    "return_prompt_text": (False,),
    "return_token_ids": (False,),
    "return_token_offsets": (False,),
    "return_tokens_as_token_ids": (False,),
    "routed_experts_prompt_start": None,
    "session_id": None,
    "spaces_between_special_tokens": (True,),
    "stream_interval": None,
    "thinking_token_budget": (),
    "truncate_prompt_tokens": (),
    "truncation_side": None,
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "watermarking": (False,),
    # transformers'; others of its names set what the engine does by itself.
    "bad_words_ids": ([],),
    "begin_suppress_tokens": ([],),
    "constraints": ([],),
    "diversity_penalty": (0,),
    "do_sample": (),
    "early_stopping": (False,),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "eos_token_id": (),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "guidance_scale": (1,),
    "length_penalty": (1,),
    "max_length": (),
    "max_new_tokens": (),
    "max_time": (),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "penalty_alpha": (0,),
    "renormalize_logits": (False,),
    "sequence_bias": (),
    "stop_strings": ([],),
    "suppress_tokens": ([],),
    "top_h": (),
    "typical_p": (1,),
}
# Ignored names that one reply tells, and characters of each.
MAX_TOLD, MAX_TOLD_CHARS = 16, 64
# Names that the log of a process tells. A tenant may have as many told as it leaves to others.
MAX_LOGGED = 256

members = msgspec.json.Decoder(dict[str, Raw])


def ignored_fields(kind: type[Struct], body: bytes | bytearray) -> tuple[str, ...]:
    """Return the names of fields of a body that no API has.

    Args:
        kind: what the body was parsed as.
        body: a valid one.

    Raises:
        InvalidRequest: a field asks for something that this server lacks.
    """
    ignored = []
    for name, value in members.decode(body).items():
        if name in _served(kind):
            continue
        if name not in NEUTRAL:
            ignored.append(name)
        elif not _is_neutral(name, msgspec.json.decode(value)):
            raise InvalidRequest(f"{name} is not supported by this server: leave it out", name)
    return tuple(ignored)


class IgnoredNames:
    """The names of ignored fields that the log has told. Event loop only."""

    def __init__(self) -> None:
        self._logged: set[str] = set()
        self._budget = FairBudget(MAX_LOGGED, "names of ignored fields")

    def tell(self, names: tuple[str, ...], tenant: str) -> None:
        """Tell the log each name that it has not told, while the tenant has some left."""
        for name in (each[:MAX_TOLD_CHARS] for each in names):
            if name not in self._logged and self._budget.has(tenant, 1):
                self._budget.take(tenant, 1)
                self._logged.add(name)
                log.info("a client sent the field %r, which no API has: it is ignored", name)


def told(names: tuple[str, ...]) -> str:
    """Return names for the head of a reply."""
    shown = [name[:MAX_TOLD_CHARS].encode("ascii", "replace").decode() for name in names[:MAX_TOLD]]
    return ", ".join(
        "".join(char if char.isprintable() and char != "," else "?" for char in name) for name in shown
    )


def _is_neutral(name: str, value: object) -> bool:
    neutral = NEUTRAL[name]
    return value is None or neutral is None or value in neutral


@cache
def _served(kind: type[Struct]) -> frozenset[str]:
    return frozenset(kind.__struct_encode_fields__)
