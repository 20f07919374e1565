"""A request for tokens as the engine takes it: plain values that can be sent to another process."""

from __future__ import annotations

from dataclasses import dataclass, field

from deltastore.registry.records import VersionRecord
from server.errors import InvalidRequest
from server.protocol.sampling_params import SamplingParams
from server.request_context import trace_id_of


@dataclass(frozen=True, slots=True)
class Request:
    """One request. Its version is resolved before and stays the same until its last token."""

    id: str
    tenant: str
    name: str | None  # the variant's name as the client wrote it; None is the base
    record: VersionRecord | None  # without its fidelity report, which may be long; None is the base
    prompt_ids: tuple[int, ...]
    num_embeddings: int  # rows of the variant's embedding; token ids are below it
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    traceparent: str | None = None  # of the HTTP request, as W3C's Trace Context has it

    @property
    def version(self) -> str | None:
        """The label of the version, whose delta has a slot; None is the base."""
        return None if self.record is None else self.record.label

    @property
    def digest(self) -> str | None:
        """The SHA-256 of the delta's artifact; None is the base."""
        return None if self.record is None else self.record.digest

    @property
    def log_fields(self) -> dict[str, str | None]:
        """Fields of log lines about the request: its X-Request-Id, which its own id begins with, and its trace."""
        return {"request_id": self.id.rpartition("-")[0], "trace_id": trace_id_of(self.traceparent)}

    def check(self, max_model_len: int) -> None:
        """Refuse a request that no step could serve.

        Args:
            max_model_len: most tokens of prompt and output together.

        Raises:
            InvalidRequest: names the field at fault.
        """
        if not self.prompt_ids:
            raise InvalidRequest("the prompt is empty: it has no tokens", "prompt")
        if not 0 <= min(self.prompt_ids) <= max(self.prompt_ids) < self.num_embeddings:
            raise InvalidRequest(f"token ids must be from 0 to {self.num_embeddings - 1}", "prompt")
        num_prompt, num_new = len(self.prompt_ids), self.sampling_params.max_new_tokens
        if num_prompt + num_new > max_model_len:
            raise InvalidRequest(
                f"{num_prompt} prompt tokens and {num_new} new ones are {num_prompt + num_new}, more than the "
                f"{max_model_len} that fit: shorten the prompt or lower max_new_tokens",
                "max_new_tokens" if num_prompt < max_model_len else "prompt",
            )
