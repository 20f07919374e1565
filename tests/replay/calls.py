"""Every route with every role, tokens in every form, and what is refused, asked of one server with keys."""

from __future__ import annotations

import re
from typing import Any

from tests.replay.asking import OCTETS, Asker
from tests.replay.world import World

ALL = ("", "wrong", "inference", "metrics", "publish", "admin")
CHAT = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0, "max_tokens": 4}
PROMPT = {"prompt": "hello", "temperature": 0, "max_tokens": 4}
GENERATE = {"prompt": "hello", "temperature": 0, "max_new_tokens": 4}
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}


def of_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the `response_format` of a schema."""
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def ask_roles(world: World, public: Asker, admin: Asker) -> None:
    """Ask every route with every role."""
    plain = world.inputs.artifacts.plain.read_bytes()
    on_public: list[tuple[str, str, dict[str, Any]]] = [
        ("POST", "/generate?variant=plain", {"json": GENERATE}),
        ("POST", "/v1/completions", {"json": {"model": "plain", **PROMPT}}),
        ("POST", "/v1/chat/completions", {"json": {"model": "chatty", **CHAT}}),
        ("POST", "/tokenize", {"json": {"model": "plain", "prompt": "hello"}}),
        ("POST", "/detokenize", {"json": {"model": "plain", "tokens": [104, 105]}}),
        ("POST", "/v1/load_lora_adapter", {"json": {"lora_name": "plain", "lora_path": "plain"}}),
        ("GET", "/v1/models", {}),
        ("GET", "/v1/models/plain", {}),
        ("POST", "/v1/unload_lora_adapter", {"json": {"lora_name": "plain"}}),
        ("GET", "/me", {}),
        ("GET", "/health", {}),
        ("GET", "/ready", {}),
        ("GET", "/openapi.json", {}),
        ("GET", "/docs", {}),
        ("GET", "/docs/swagger-ui.css", {}),
        ("GET", "/variants", {}),
        ("GET", "/nowhere", {}),
        ("PUT", "/generate", {}),
    ]
    on_admin: list[tuple[str, str, dict[str, Any]]] = [
        ("POST", "/variants?name=again", {"content": plain, "headers": OCTETS}),
        ("GET", "/variants", {}),
        ("GET", "/variants/again", {}),
        ("PATCH", "/variants/again", {"json": {"active": 1}}),
        ("POST", "/variants/again/load", {}),
        ("POST", "/variants/again/pin", {}),
        ("POST", "/variants/again/unpin", {}),
        ("POST", "/variants/again/unload", {}),
        ("GET", "/variants/again/artifact", {}),
        ("DELETE", "/variants/again", {}),
        ("GET", "/metrics", {}),
        ("GET", "/stats", {}),
        ("GET", "/keys", {}),
        ("POST", "/keys", {"json": {"tenant": "acme", "roles": ["nonsense"]}}),
        ("DELETE", "/keys/nothing", {}),
        ("GET", "/tenants", {}),
        ("PUT", "/tenants/other", {"json": {"max_running": 3}}),
        ("GET", "/v1/models", {}),
        ("GET", "/v1/models/plain", {}),
        ("GET", "/me", {}),
        ("GET", "/health", {}),
        ("GET", "/ready", {}),
        ("GET", "/openapi.json", {}),
        ("GET", "/docs", {}),
        ("GET", "/docs/swagger-ui.css", {}),
    ]
    for port, asker, calls in (("public", public, on_public), ("admin", admin, on_admin)):
        _check_whole(asker, [(method, path.partition("?")[0]) for method, path, _ in calls])
        for method, path, options in calls:
            for role in ALL:
                is_shown = path != "/metrics" or role not in {"metrics", "admin"}
                if is_shown:
                    asker.ask(f"{port} port", role, method, path, **options)


def _check_whole(asker: Asker, asked: list[tuple[str, str]]) -> None:
    """Raise AssertionError if a call of the port's OpenAPI document is not among those that are asked."""
    described = asker.send("", "GET", "/openapi.json").json()["paths"]
    missing = [
        (method, template)
        for template, methods in described.items()
        for method in methods
        if not any(
            method.upper() == other and re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", template), path)
            for other, path in asked
        )
    ]
    assert not missing, missing


def ask_answers(world: World, public: Asker) -> None:
    """Ask for tokens in every form, whole and as streams."""

    def ask(title: str, path: str, **body: Any) -> None:
        for form in (False, True):
            public.ask(
                f"{title}, {'stream' if form else 'whole'}",
                "inference",
                "POST",
                path,
                json={**body, "stream": form},
            )

    for name in ("base", "plain", "chatty", "third@1", "shared"):
        ask(f"completion of {name}", "/v1/completions", model=name, **PROMPT)
        ask(f"answer of {name}", "/generate" if name == "base" else f"/generate?variant={name}", **GENERATE)
    ask("chat", "/v1/chat/completions", model="chatty", **CHAT)
    ask("chat without a length", "/v1/chat/completions", model="chatty", messages=CHAT["messages"])
    ask("chat without a template", "/v1/chat/completions", model="base", **CHAT)
    ask("log-probabilities", "/v1/completions", model="plain", logprobs=2, **PROMPT)
    ask(
        "chat's log-probabilities",
        "/v1/chat/completions",
        model="chatty",
        logprobs=True,
        top_logprobs=2,
        **CHAT,
    )
    ask("answer's log-probabilities", "/generate?variant=plain", logprobs=2, **GENERATE)
    ask("usage", "/v1/completions", model="plain", stream_options={"include_usage": True}, **PROMPT)
    ask("stop", "/v1/completions", model="plain", stop=["e", "o"], **{**PROMPT, "max_tokens": 40})
    ask("one token", "/v1/completions", model="plain", **{**PROMPT, "max_tokens": 1})
    ask(
        "rules",
        "/v1/completions",
        model="plain",
        repetition_penalty=1.3,
        min_p=0.1,
        top_k=5,
        top_p=0.9,
        seed=3,
        prompt="hello",
        temperature=0.8,
        max_tokens=6,
    )
    ask(
        "schema",
        "/v1/chat/completions",
        model="chatty",
        response_format=of_schema(SCHEMA),
        **{**CHAT, "max_tokens": 40},
    )
    tool = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
    ask(
        "tool",
        "/v1/chat/completions",
        model="chatty",
        tools=[tool],
        tool_choice="required",
        **{**CHAT, "max_tokens": 80},
    )
    whole = [
        ("several sequences", {"n": 3, "seed": 1, **PROMPT, "temperature": 1.0}),
        ("several prompts", {**PROMPT, "prompt": ["hello", [104, 105]]}),
        ("echo", {"echo": True, "logprobs": 1, **PROMPT}),
        ("echo alone", {"echo": True, "logprobs": 1, **PROMPT, "max_tokens": 0}),
    ]
    for title, body in whole:
        public.ask(title, "inference", "POST", "/v1/completions", json={"model": "plain", **body})
    for path in ("/tokenize", "/detokenize"):
        public.ask(
            "tokens of a conversation",
            "inference",
            "POST",
            path,
            json={"model": "chatty", "messages": CHAT["messages"]},
        )


def ask_refusals(world: World, public: Asker, admin: Asker) -> None:
    """Send what is refused for what it is: bodies, names, queries, heads and files."""
    bodies: list[tuple[str, str, Any]] = [
        ("unknown variant", "/v1/completions", {"model": "nobody", **PROMPT}),
        ("unknown version", "/v1/completions", {"model": "plain@9", **PROMPT}),
        ("unknown variant to generate", "/generate?variant=nobody", GENERATE),
        ("variant of another tenant", "/v1/completions", {"model": "theirs", **PROMPT}),
        ("unknown field of ours", "/generate", {**GENERATE, "nonsense": 1}),
        ("unknown field of OpenAI's", "/v1/completions", {"model": "plain", **PROMPT, "nonsense": 1}),
        ("field that is not served", "/v1/completions", {"model": "plain", **PROMPT, "logit_bias": {"5": 1}}),
        ("no prompt", "/v1/completions", {"model": "plain"}),
        ("empty prompt", "/generate", {**GENERATE, "prompt": ""}),
        ("long prompt", "/generate", {**GENERATE, "prompt": "x" * 9000}),
        ("wrong type", "/generate", {**GENERATE, "temperature": "warm"}),
        ("out of range", "/generate", {**GENERATE, "top_p": 7}),
        ("wrong ids", "/v1/completions", {"model": "plain", **PROMPT, "prompt": [5, 99999]}),
        ("no model", "/v1/chat/completions", CHAT),
        ("no messages", "/v1/chat/completions", {"model": "chatty", "messages": []}),
        ("wrong schema", "/v1/chat/completions", {"model": "plain", **CHAT, "response_format": of_schema({"type": 5})}),
        ("adapter without a name", "/v1/load_lora_adapter", {"lora_path": "x"}),
        ("adapter of nothing", "/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "absent"}),
        ("adapter outside", "/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/etc/passwd"}),
    ]  # fmt: skip
    for title, path, body in bodies:
        public.ask(title, "admin", "POST", path, json=body)
    raw = [
        ("no JSON", b"{"),
        ("empty", b""),
        ("a list", b"[]"),
        ("too many values", b"[" + b"[]," * 140000 + b"[]]"),
    ]
    for title, content in [*raw, ("too large", b" " * (9 << 20)), ("not UTF-8", b'{"prompt": "\xff"}')]:
        public.ask(title, "inference", "POST", "/generate", content=content)
    public.ask("two keys", "inference", "GET", "/me", {"X-API-Key": "other"})
    public.ask("key in the other header", "", "GET", "/me", {"X-API-Key": public.keys["admin"]})
    public.ask("many header fields", "admin", "GET", "/me", {f"X-{number}": "x" for number in range(300)})
    public.ask("given id", "admin", "GET", "/health", {"X-Request-Id": "mine"})
    for page in ("limit=0", "limit=1", "limit=1&after=own~chatty", "after=nobody", "nonsense=1"):
        public.ask(f"models with {page}", "admin", "GET", f"/v1/models?{page}")
        admin.ask(f"variants with {page}", "admin", "GET", f"/variants?{page}")
