"""Requests of a hostile tenant, page or client, and the variants that they are about. Sends nothing.

The variants are written into the registry as they are, because an upload refuses most of them.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal, NamedTuple

from bench.engine import publish
from bench.synthetic import LlamaShapes, write_norm_delta
from deltastore.base import Base
from deltastore.format.files import GENERATION_FILE
from deltastore.registry import Registry
from deltastore.registry.records import ArtifactFacts, ReportFile
from deltastore.registry.variants import REPORTS

# Attacks that run at once are of these tenants, in turn.
TENANTS = ("hostile", "hostile-2")
TENANT = TENANTS[0]
# Another one, with the names of many versions, which would make lists of the first one long.
HOARDER = "hoarder"
# To compare with: other honest tenants, and the hostile one without its trick.
FULL_BATCH, LONG_BATCH, ONE_QUEUE, FEW_CONNECTIONS, READ_STREAMS, PLAIN_BATCH = (
    "full-batch",
    "long-batch",
    "one-queue",
    "few-connections",
    "read-streams",
    "plain-batch",
)
TOKENIZER = "tokenizer.json"
LOOPING = b"{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
JSON = {"Content-Type": "application/json"}
BYTES = {"Content-Type": "application/octet-stream"}
# A form that a page of another site posts without asking first.
CROSS_SITE = {
    "Origin": "https://evil.example",
    "Sec-Fetch-Site": "cross-site",
    "Content-Type": "multipart/form-data; boundary=x",
}
FORM = b'--x\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\nx\r\n--x--\r\n'


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the attacks."""

    prompt_chars: int = 8 << 20
    num_patterns: int = 2300
    body_bytes: int = (8 << 20) - 4096
    num_versions: int = 1000  # of one variant, all of them inactive
    report_bytes: int = 200 << 10
    num_reports: int = 200  # versions with a long report
    num_public: int = 1000  # public variants
    num_cold: int = 12  # variants with large tokenizers
    tokenizer_bytes: int = 32 << 20
    num_connections: int = 320  # of those that hold connections, or a place in the queue
    num_copies: int = 128  # `n` of a request
    num_held: int = 320  # versions of one variant, each for one request that goes on
    held_tokens: int = 1000  # of each sequence of such a request
    kept_tokens: int = 400  # of a sequence that holds pages of the KV cache
    num_batch: int = 64  # connections that fill the batch
    long_prompt: int = 1500  # tokens
    num_new: int = 32
    num_prompts: int = 150  # of one call
    num_names: int = 100_000  # of versions of one tenant
    num_ruled: int = 8  # variants with rules of a generation config, and as many without


SMALL_SIZES = Sizes(
    prompt_chars=1 << 16, num_patterns=20, body_bytes=1 << 18, num_versions=5, report_bytes=1 << 10, num_reports=3,
    num_public=5, num_cold=2, tokenizer_bytes=1 << 16, num_connections=16, num_copies=4, num_held=16,
    held_tokens=4, kept_tokens=4, num_batch=8, long_prompt=16, num_new=4, num_prompts=8, num_names=5000,
    num_ruled=2,
)  # fmt: skip


class Call(NamedTuple):
    """One HTTP request."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Attack:
    """Requests that are sent again and again, on so many connections.

    Args:
        call: the request of each number.
        manner: "ask" waits for each reply, "hold" sends requests once and reads next to nothing, "pipeline" keeps
            requests under way.
        tenant: whose key the requests have; None is no key.
        control: what is sent to be compared with; None for the same client that sends to a sink.
        is_own_control: as a control, the hostile tenant itself sends it, as often as the attack; else other honest
            tenants do, which fill the batch.
        keys: the server gives tenants keys.
        few_connections: the server has fewer connections than the attack.
    """

    kind: str
    call: Callable[[int], Call]
    num_connections: int = 8
    manner: Literal["ask", "hold", "pipeline"] = "ask"
    tenant: str | None = TENANT
    control: str | None = None
    is_own_control: bool = False
    keys: bool = True
    few_connections: bool = False


def attacks(sizes: Sizes) -> dict[str, Attack]:
    """Return all attacks by kind; the first ten in the order of the patterns that they stand for."""
    plain, many = "/generate?variant=plain", sizes.num_connections
    body = sizes.body_bytes
    long_prompt = " ".join(f"x{token}" for token in range(1, sizes.long_prompt + 1))
    chat = {"messages": [{"role": "user", "content": "x1"}], "max_new_tokens": 4}
    prompt = {"prompt": "x1 x2 x3", "max_new_tokens": sizes.num_new}
    held = {"prompt": "x1 x2 x3", "max_new_tokens": sizes.held_tokens, "n": sizes.num_copies}
    scored = {"model": "plain", "prompt": "x1 x2 x3", "max_tokens": sizes.held_tokens, "n": sizes.num_copies}
    stream = {**scored, "logprobs": 20, "stream": True}
    unknown = Call("GET", "/me", {"X-API-Key": f"pxk_{'0' * 12}_{'0' * 64}"})
    found = [
        Attack("probe-variant", lambda _: get("/v1/models/probe")),
        Attack("long-reports", lambda n: get(f"/variants/fat-{n % 4}" if n % 5 else "/variants"), 4),
        Attack("json-values", lambda n: _values(n, body)),
        Attack("slow-registry-calls", lambda n: _many(n, sizes.num_versions)),
        Attack("long-lists", lambda n: get(("/v1/models", "/variants", "/me", "/variants/probe")[n % 4])),
        Attack(
            "slow-readers",
            lambda _: get("/docs/swagger-ui-bundle.js"),
            many,
            manner="hold",
            tenant=None,
            few_connections=True,
        ),
        Attack("full-queue", lambda _: post(plain, prompt), many, control=FULL_BATCH),
        Attack(
            "cold-tokenizers",
            lambda n: post(f"/generate?variant=cold-{n % sizes.num_cold}", prompt),
            2 * sizes.num_cold,
        ),
        Attack(
            "many-sequences",
            lambda n: post(
                plain, {"prompt": f"x{n % 1000} {long_prompt}", "max_new_tokens": 4, "n": sizes.num_copies}
            ),
            many,
            control=LONG_BATCH,
        ),
        Attack(
            "cross-site-page",
            lambda n: Call("POST", f"/variants?name=page-{n % 100}", CROSS_SITE, FORM),
            tenant=None,
            keys=False,
        ),
        Attack("looping-template", lambda _: post("/generate?variant=loops", chat)),
        Attack("backtracking-decoder", lambda _: post("/generate?variant=backtracks", prompt)),
        Attack(
            "growing-normalizer", lambda _: post("/generate?variant=grows", {**prompt, "prompt": "x y x"})
        ),
        Attack("long-prompts", lambda _: post(plain, {"prompt": "x1 " * (sizes.prompt_chars // 3)}), 4),
        Attack("large-schemas", lambda n: _schema(n, sizes.num_patterns)),
        # Each version has a queue of its own in the scheduler, so that all requests begin.
        Attack(
            "begun-queue",
            lambda n: post(f"/generate?variant=held@{n % sizes.num_held + 1}", held),
            many,
            control=ONE_QUEUE,
        ),
        # At 1.1B a dozen of them fill the KV cache for as long as they decode, and the others wait for pages.
        Attack(
            "full-kv-cache",
            lambda n: post(
                plain, {"prompt": f"x{n % 1000} {long_prompt}", "max_new_tokens": sizes.kept_tokens}
            ),
            sizes.num_batch,
            control=LONG_BATCH,
        ),
        Attack(
            "pipelining",
            lambda _: unknown,
            many,
            manner="pipeline",
            tenant=None,
            control=FEW_CONNECTIONS,
            few_connections=True,
        ),
        # Each is read just fast enough not to be dropped.
        Attack(
            "unread-streams",
            lambda _: post("/v1/completions", stream),
            many,
            manner="hold",
            control=READ_STREAMS,
        ),
        Attack("unfit-prompts", lambda n: _unfit(n, sizes), 4),
        # Each variant has other rules, of which the slowest.
        Attack(
            "sampling-rules",
            lambda n: post(f"/generate?variant=ruled-{n % sizes.num_ruled}", prompt),
            sizes.num_batch,
            control=PLAIN_BATCH,
        ),
        Attack(
            "upload-heads",
            lambda n: Call("POST", f"/variants?name=head-{n}", BYTES, bytes(64)),
            16,
            tenant=HOARDER,
        ),
    ]
    controls = [
        Attack(FULL_BATCH, lambda _: post("/generate", {**prompt, "prompt": "w1 w2 w3"}), sizes.num_batch),
        # Of the base's own tokens: as many as those of `many-sequences`.
        Attack(
            LONG_BATCH,
            lambda n: post(
                "/generate", {"prompt": f"w{n % 1000} {long_prompt.replace('x', 'w')}", "max_new_tokens": 4}
            ),
            sizes.num_batch,
        ),
        Attack(ONE_QUEUE, lambda _: post(plain, held), many, is_own_control=True),
        Attack(READ_STREAMS, lambda _: post("/v1/completions", stream), many, is_own_control=True),
        Attack(
            PLAIN_BATCH,
            lambda n: post(f"/generate?variant=plain-{n % sizes.num_ruled}", prompt),
            sizes.num_batch,
            is_own_control=True,
        ),
        Attack(FEW_CONNECTIONS, lambda _: unknown, sizes.num_batch, tenant=None, is_own_control=True),
    ]
    return {attack.kind: attack for attack in [*found, *controls]}


def publish_hostile(
    registry: Registry,
    directory: Path,
    shapes: LlamaShapes,
    files: Mapping[str, bytes],
    base: Base,
    sizes: Sizes,
    tenant: str = TENANT,
) -> None:
    """Publish a hostile tenant's variants of a base; `files` are those of a sound tokenizer."""
    grows = _sequence("normalizer", [_replaced("x", "y" * 10**6), _replaced("y", "z" * 10**6)])
    pattern = {"Regex": r"x*(?!x)\D\d"}
    backtracks = _sequence("decoder", [_replaced("x", "x" * 20_000), _replaced(pattern, "")])
    padding = {"model": {**json.loads(files[TOKENIZER])["model"], "padding": "x" * sizes.tokenizer_bytes}}
    hostile = {
        "plain": dict(files),
        "loops": {**files, "chat_template.jinja": LOOPING},
        "backtracks": _edited(files, backtracks),
        "grows": _edited(files, grows),
        **{f"cold-{number}": _edited(files, padding) for number in range(sizes.num_cold)},
        **{
            f"ruled-{number}": {**files, GENERATION_FILE: _rules(number, shapes.vocabulary)}
            for number in range(sizes.num_ruled)
        },
        **{f"plain-{number}": dict(files) for number in range(sizes.num_ruled)},
    }
    for seed, (name, own) in enumerate(hostile.items(), 1000):
        path = directory / f"{name}.safetensors"
        write_norm_delta(path, shapes, seed, own, base)
        publish(registry, path, name, tenant)
        path.unlink()
    for number in range(sizes.num_held):
        # The same bytes again would be the same version.
        path = directory / "held.safetensors"
        write_norm_delta(path, shapes, 2000 + number, dict(files), base)
        publish(registry, path, "held", tenant)
        path.unlink()
    report: dict[str, Any] = {"details": [[]] * (sizes.report_bytes // 4)}
    # `probe` and `many` stay on their first version.
    for name in ("probe", "many"):
        for _ in range(sizes.num_versions):
            _publish_bytes(registry, tenant, name, base, activate=False)
    for number in range(sizes.num_reports):
        _publish_bytes(registry, tenant, f"fat-{number % 4}", base, report=report)


def publish_public(registry: Registry, base: Base, sizes: Sizes) -> None:
    """Publish what lists of all tenants have, and the names of one that has many, beside `publish_hostile`."""
    names = [f"public-{number}" for number in range(sizes.num_public)]
    for name in names:
        _publish_bytes(registry, TENANT, name, base)
    _write_names(registry, sizes.num_names)
    for name in ("probe", *names):
        registry.set_visibility(TENANT, name, "public")


def get(path: str) -> Call:
    return Call("GET", path, {})


def post(path: str, document: Mapping[str, Any]) -> Call:
    return Call("POST", path, JSON, json.dumps(document).encode())


def _publish_bytes(
    registry: Registry,
    tenant: str,
    name: str,
    base: Base,
    report: Mapping[str, Any] | None = None,
    *,
    activate: bool = True,
) -> None:
    """Publish bytes that are no artifact: nothing loads this version."""
    facts = ArtifactFacts(8, 8, base.fingerprint, "both", report or {})
    with registry.open_upload(None) as upload:
        upload.write(secrets.token_bytes(64))
        registry.publish(upload.seal(), facts, tenant=tenant, name=name, activate=activate)


def _write_names(registry: Registry, num_names: int) -> None:
    """Write the names of versions as uploads leave them, ten of a variant, without uploading them."""
    directory = Path(registry.root) / REPORTS / HOARDER
    directory.mkdir()
    for number in range(num_names):
        digest, token = f"{number:064x}", f"{number:032x}"
        file = ReportFile(f"variant-{number // 10}", 1 + number % 10, digest, 200_000, token)
        (directory / file.file_name).touch()


_BODIES: dict[tuple[str | int, ...], bytes] = {}


def _values(number: int, num_bytes: int) -> Call:
    """Return a body of so many bytes whose values are empty lists or numbers, in a field that takes any JSON."""
    field, item = ("tools", "response_format", "messages")[number % 3], ("[],", "1e9,")[number // 3 % 2]
    if (field, item, num_bytes) not in _BODIES:
        lists = (item * (num_bytes // len(item))).removesuffix(",")
        parts = {
            "tools": f'"tools":[{{"type":"function","function":{{"name":"f","parameters":{{"x":[{lists}]}}}}}}],'
            '"messages":[{"role":"user","content":"x1"}]',
            "response_format": '"response_format":{"type":"json_schema","json_schema":{"name":"o","schema":'
            f'{{"x":[{lists}]}}}}}},"messages":[{{"role":"user","content":"x1"}}]',
            "messages": f'"messages":[{{"role":"user","content":[{lists}]}}]',
        }
        _BODIES[field, item, num_bytes] = f'{{"model":"plain","max_tokens":4,{parts[field]}}}'.encode()
    return Call("POST", "/v1/chat/completions", JSON, _BODIES[field, item, num_bytes])


def _unfit(number: int, sizes: Sizes) -> Call:
    """Return a call of many prompts of token ids, the last of them too high, or of one prompt that fills its body."""
    field = ("prompts", "ids")[number % 2]
    if (field, sizes.body_bytes) not in _BODIES:
        if field == "prompts":
            prompt = [1] * sizes.long_prompt
            ids: Any = [prompt] * (sizes.num_prompts - 1) + [[*prompt[1:], (1 << 31) - 1]]
        else:
            ids = [1] * (sizes.body_bytes // 2 - 64)
        document = {"model": "plain", "max_tokens": 1, "prompt": ids}
        _BODIES[field, sizes.body_bytes] = json.dumps(document, separators=(",", ":")).encode()
    return Call("POST", "/v1/completions", JSON, _BODIES[field, sizes.body_bytes])


def _many(number: int, num_versions: int) -> Call:
    """Return a call that reads or changes a variant of many versions."""
    choices = (
        Call("PATCH", "/variants/many", JSON, b'{"active": %d}' % (number % num_versions + 1)),
        get("/variants/many"),
        get("/v1/models/many@999999"),
    )
    return choices[number % len(choices)]


_SCHEMAS = count()


def _schema(number: int, num_patterns: int) -> Call:
    """Return a request with a schema that no earlier one had."""
    patterns = {
        f"p{index}": {"type": "string", "pattern": f"^.*{index}x{number}x{next(_SCHEMAS)}.*$"}
        for index in range(num_patterns)
    }
    schema = {"type": "object", "properties": patterns, "required": ["p0"]}
    document = {
        "model": "plain",
        "prompt": "x1",
        "max_tokens": 16,
        "response_format": {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}},
    }
    return post("/v1/completions", document)


def _rules(number: int, vocabulary: int) -> bytes:
    """Return a generation config with as many token ids as one may have, and what takes longest to sample."""
    words = [[number + 1, (number + word) % vocabulary] for word in range(2048)]
    config = {
        "do_sample": True,
        "typical_p": 0.9,
        "top_p": 0.95,
        "no_repeat_ngram_size": 4,
        "bad_words_ids": words,
    }
    return json.dumps(config).encode()


def _edited(files: Mapping[str, bytes], changes: Mapping[str, Any]) -> dict[str, bytes]:
    """Return a tokenizer's files with some parts of its `tokenizer.json` replaced."""
    return {**files, TOKENIZER: json.dumps(json.loads(files[TOKENIZER]) | changes).encode()}


def _sequence(part: str, steps: list[dict[str, Any]]) -> dict[str, Any]:
    kinds = {"normalizer": "normalizers", "decoder": "decoders"}
    return {part: {"type": "Sequence", kinds[part]: steps}}


def _replaced(pattern: str | dict[str, str], content: str) -> dict[str, Any]:
    return {
        "type": "Replace",
        "pattern": {"String": pattern} if isinstance(pattern, str) else pattern,
        "content": content,
    }


CONTROLS = (FULL_BATCH, LONG_BATCH, ONE_QUEUE, FEW_CONNECTIONS, READ_STREAMS, PLAIN_BATCH)
KINDS = tuple(kind for kind in attacks(SMALL_SIZES) if kind not in CONTROLS)
