"""Facts of each call that `/openapi.json` tells and FastAPI does not know: bodies, statuses, media types, examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from server.api.compat.vllm_lora import LoadLoraBody, UnloadLoraBody
from server.api.openai.schemas import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from server.api.operations.docs_page import ASSETS
from server.api.schemas import GenerateBody, SourceBody

Call = tuple[str, str]

JSON = "application/json"
FILE = {"type": "string", "format": "binary"}
FORM = {"type": "object", "required": ["file"], "properties": {"file": FILE}}
TEXT = {"type": "string"}
OBJECT = {JSON: {"schema": {"type": "object"}}}
EVENTS = {"text/event-stream": {"schema": TEXT}}
OBJECT_OR_EVENTS = {**OBJECT, **EVENTS}
PLAIN_TEXT = {"text/plain": {"schema": TEXT}}
ARTIFACT = {"application/octet-stream": {"schema": FILE}}

# JSON bodies that routes parse themselves; those of the others are dependencies of the route.
OWN_BODIES: Mapping[Call, type[msgspec.Struct]] = {
    ("POST", "/generate"): GenerateBody,
    ("POST", "/v1/completions"): CompletionBody,
    ("POST", "/v1/chat/completions"): ChatBody,
    ("POST", "/tokenize"): TokenizeBody,
    ("POST", "/detokenize"): DetokenizeBody,
    ("POST", "/variants"): SourceBody,
    ("POST", "/v1/load_lora_adapter"): LoadLoraBody,
    ("POST", "/v1/unload_lora_adapter"): UnloadLoraBody,
}
# Bodies of other types.
OTHER_BODIES: Mapping[Call, Mapping[str, Any]] = {
    ("POST", "/variants"): {**ARTIFACT, "multipart/form-data": {"schema": FORM}},
}
# Contents of successful replies that are not one JSON object.
REPLIES: Mapping[Call, Mapping[str, Any]] = {
    ("POST", "/generate"): OBJECT_OR_EVENTS,
    ("POST", "/v1/completions"): OBJECT_OR_EVENTS,
    ("POST", "/v1/chat/completions"): OBJECT_OR_EVENTS,
    ("GET", "/metrics"): PLAIN_TEXT,
    ("GET", "/docs"): {"text/html": {"schema": TEXT}},
    ("GET", "/docs/{asset}"): {kind: {"schema": TEXT} for kind in ASSETS.values()},
    ("GET", "/variants/{name}/artifact"): ARTIFACT,
    ("POST", "/v1/load_lora_adapter"): PLAIN_TEXT,
    ("POST", "/v1/unload_lora_adapter"): PLAIN_TEXT,
}
# Contents of a status that differ from those of the call's other successes; a 304 has none.
REPLIES_OF_STATUS: Mapping[tuple[Call, int], Mapping[str, Any]] = {
    (("GET", "/variants/{name}/artifact"), 206): {**ARTIFACT, "multipart/byteranges": {"schema": FILE}},
}
HEADERS: Mapping[tuple[Call, int], Mapping[str, Any]] = {
    (("POST", "/variants"), 202): {
        "Location": {"required": True, "schema": TEXT, "description": "Shows how far the publication is."},
        "Retry-After": {"required": True, "schema": TEXT, "description": "Seconds until asking again helps."},
    },
}
# Statuses of errors that any call may answer: those of its credentials, its parameters, and a server that is busy or
# has failed.
COMMON = (400, 401, 403, 404, 429, 500, 503)
# Those of a call with a body: too slow, too large.
WITH_BODY = (408, 413)
# The others, by route.
MORE: Mapping[Call, Sequence[int]] = {
    ("POST", "/generate"): (409, 413, 424),
    ("POST", "/v1/completions"): (409, 413, 424),
    ("POST", "/v1/chat/completions"): (409, 413, 424),
    ("POST", "/tokenize"): (424,),
    ("POST", "/detokenize"): (424,),
    ("POST", "/variants"): (201, 202, 409, 507),
    ("POST", "/v1/load_lora_adapter"): (409, 424, 507),
    ("PATCH", "/variants/{name}"): (409, 424, 507),
    ("DELETE", "/variants/{name}"): (507,),
    ("POST", "/variants/{name}/load"): (409, 413, 424),
    ("POST", "/variants/{name}/pin"): (409, 413, 424),
    ("PUT", "/tenants/{name}"): (507,),
    ("POST", "/keys"): (201, 507),
    ("DELETE", "/keys/{key_id}"): (507,),
    ("GET", "/variants/{name}/artifact"): (206, 304, 416, 424),
}
# A body that a first try of each call can begin with.
EXAMPLES: Mapping[Call, Mapping[str, Any]] = {
    ("POST", "/generate"): {"prompt": "Hello", "max_new_tokens": 16},
    ("POST", "/v1/completions"): {"model": "base", "prompt": "Hello", "max_tokens": 16},
    ("POST", "/v1/chat/completions"): {
        "model": "base",
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 16,
    },
    ("POST", "/tokenize"): {"model": "base", "prompt": "Hello"},
    ("POST", "/detokenize"): {"model": "base", "tokens": [1, 2, 3]},
    ("POST", "/variants"): {"source": "hf://ORG/REPO@REVISION"},
    ("PATCH", "/variants/{name}"): {"active": 1},
    ("POST", "/keys"): {"tenant": "acme", "roles": ["inference"]},
    ("PUT", "/tenants/{name}"): {"requests_per_minute": 60},
}
# The groups of calls, by the first part of their paths.
TAGS: Mapping[str, str] = {
    **dict.fromkeys(("generate", "v1", "tokenize", "detokenize"), "inference"),
    "variants": "variants",
    **dict.fromkeys(("keys", "me", "tenants"), "tenants"),
}
OPERATIONS = "operations"


def tag_of(path: str) -> str:
    """Return the group of a call."""
    return TAGS.get(path.split("/")[1], OPERATIONS)


def content_of(call: Call, status: int) -> Mapping[str, Any]:
    """Return the contents of a successful reply by media type."""
    return REPLIES_OF_STATUS.get((call, status), REPLIES.get(call, OBJECT))
