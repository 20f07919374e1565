"""Files of uploads that cannot be used are refused with one clear error, whatever they do to those that read them."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from deltastore.errors import ArtifactError, PeraxisError
from server.errors import WorkerDied, WorkerTimeout
from server.text.worker_tasks import WORKER_MODULES, check_text_files
from server.workers.pool import LOAD_LIMITS, WORK_LIMITS, WorkerPool
from server.workers.worker_main import Limits
from tests.helpers.tiny_models import CHAT_TEMPLATE, VOCAB_SIZE, make_tokenizer
from tests.server.helpers.texts import Texts, changed, files_of, make_texts, replace, sequence

WAIT_S = 240.0
DEEP = 100_000
# Values that a parser may not expect in place of any other.
HOSTILE_VALUES: list[Any] = [
    None, True, -1, 2**31, 2**63, 10**30, 1e308, "", "\ud800", "x" * 10_000, "(((((", "(?P<", [], [[]], {},
    {"type": "x"}, {"type": "Sequence"}, ["a", 1], float("nan"), float("inf"), "../../etc/passwd",
    {"a": {"b": {"c": []}}},
]  # fmt: skip


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    return make_texts(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return files_of(make_tokenizer(2, CHAT_TEMPLATE), tmp_path_factory.mktemp("own"))


class Checks:
    """Checks of uploads in a pool that lives as long as the module."""

    def __init__(self, base_dir: Path) -> None:
        self._base_dir = base_dir
        self._runner = asyncio.Runner()
        self._pool = self._runner.run(_make_pool())

    def check(
        self, files: Mapping[str, bytes], deadline_s: float = WAIT_S, limits: Limits | None = None
    ) -> None:
        checking = self._pool.run(
            "a", deadline_s, check_text_files, dict(files), self._base_dir, VOCAB_SIZE, limits=limits
        )
        self._runner.run(checking)

    def refusal(self, files: Mapping[str, bytes]) -> PeraxisError | None:
        """Return the error that refuses an upload, or None. Any other exception is a defect."""
        try:
            self.check(files)
        except (ArtifactError, WorkerDied, WorkerTimeout) as error:
            return error
        return None

    def close(self) -> None:
        self._runner.run(self._pool.close())
        self._runner.close()


async def _make_pool() -> WorkerPool:
    return WorkerPool(1, LOAD_LIMITS, WORKER_MODULES)


@pytest.fixture(scope="module")
def checks(texts: Texts) -> Iterator[Checks]:
    checks = Checks(texts.base_dir)
    yield checks
    checks.close()


def mutations(document: Any, chance: random.Random) -> Iterator[Any]:
    """Yield copies of a JSON document, each with one value replaced or left out."""
    paths = list(paths_of(document))
    for value in HOSTILE_VALUES:
        yield with_value(document, chance.choice(paths), value)
    for path in chance.sample(paths, min(15, len(paths))):
        yield without(document, path)


def paths_of(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of all values but those of long tables, of which the first three stand for all."""
    keys = list(document) if isinstance(document, dict) else list(range(len(document)))
    for key in keys[:3] if len(keys) > 40 else keys:
        yield (*path, key)
        if isinstance(document[key], dict | list):
            yield from paths_of(document[key], (*path, key))


def with_value(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    copy = json.loads(json.dumps(document))
    parent = copy
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    return copy


def without(document: Any, path: tuple[Any, ...]) -> Any:
    copy = json.loads(json.dumps(document))
    parent = copy
    for key in path[:-1]:
        parent = parent[key]
    del parent[path[-1]]
    return copy


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("filename", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_a_mutated_file_is_used_or_refused_and_nothing_else(
    filename: str, seed: int, checks: Checks, files: dict[str, bytes]
) -> None:
    chance = random.Random(seed)
    generation = {
        "eos_token_id": [1, 2],
        "do_sample": True,
        "temperature": 0.5,
        "top_k": 3,
        "max_new_tokens": 9,
    }
    originals = {**files, "generation_config.json": json.dumps(generation).encode()}
    refusals = [
        checks.refusal({**originals, filename: json.dumps(document).encode("utf-8", "surrogatepass")})
        for document in mutations(json.loads(originals[filename]), chance)
    ]
    messages = [str(refusal) for refusal in refusals if isinstance(refusal, ArtifactError)]
    assert messages
    assert all(message.startswith("the upload: its ") and "/tmp" not in message for message in messages)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("filename", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_damaged_bytes_are_used_or_refused_and_nothing_else(
    filename: str, seed: int, checks: Checks, files: dict[str, bytes]
) -> None:
    chance = random.Random(seed)
    for _ in range(12):
        content = bytearray(files[filename])
        for _ in range(chance.randint(1, 4)):
            content[chance.randrange(len(content))] = chance.randrange(256)
        cut = chance.choice([len(content), chance.randrange(len(content))])
        refusal = checks.refusal({**files, filename: bytes(content[:cut])})
        assert refusal is None or "/tmp" not in str(refusal)


@pytest.mark.parametrize(
    "document",
    [
        "[" * DEEP, '{"a":' * DEEP, "", "null", "[]", '"x"', "1", "{}", '{"version": "9"}', "\ufeff{}", "{'a': 1}",
    ],
)  # fmt: skip
@pytest.mark.parametrize("filename", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_documents_of_another_form_are_refused(
    filename: str, document: str, checks: Checks, files: dict[str, bytes]
) -> None:
    usable = (filename, document) in {("tokenizer_config.json", "{}"), ("generation_config.json", "{}")}
    usable |= filename == "tokenizer_config.json" and document == '{"version": "9"}'
    usable |= filename == "generation_config.json" and document == '{"version": "9"}'
    if usable:
        checks.check({**files, filename: document.encode()})
        return
    with pytest.raises(ArtifactError, match="the upload: its "):
        checks.check({**files, filename: document.encode()})


@pytest.mark.parametrize(
    "config",
    [
        {"tokenizer_class": "NoSuchTokenizer"},
        {"tokenizer_class": "SiglipTokenizer"},
        {"tokenizer_class": 7},
        {"tokenizer_class": ["LlamaTokenizer"]},
        {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "tokenizer_class": "Evil"},
        {"added_tokens_decoder": {"x": {"content": "y"}}},
        {"added_tokens_decoder": {"1": 7}},
        {"added_tokens_decoder": []},
        {"extra_special_tokens": 5},
        {"model_max_length": "x", "truncation_side": "up"},
        {"chat_template": 5},
        {"chat_template": {"default": 5}},
        {"bos_token": {"content": 5}},
        {"clean_up_tokenization_spaces": "yes"},
    ],
)
def test_a_strange_tokenizer_config_is_used_or_refused(
    config: dict[str, Any], checks: Checks, files: dict[str, bytes]
) -> None:
    refusal = checks.refusal({**files, "tokenizer_config.json": json.dumps(config).encode()})
    assert refusal is None or str(refusal).startswith("the upload: its tokenizer")


@pytest.mark.parametrize(
    "generation",
    [
        {"eos_token_id": "two"},
        {"eos_token_id": {"a": 1}},
        {"eos_token_id": [[1]]},
        {"eos_token_id": list(range(5000))},
        {"do_sample": True, "temperature": -1},
        {"do_sample": True, "temperature": 10**400},
        {"do_sample": True, "temperature": float("nan")},
        {"do_sample": True, "top_k": True},
        {"max_new_tokens": 2.5},
        {"max_new_tokens": -5},
        {"repetition_penalty": "1"},
        {"repetition_penalty": 0},
    ],
)
def test_a_generation_config_that_no_request_could_use_is_refused(
    generation: dict[str, Any], checks: Checks
) -> None:
    with pytest.raises(ArtifactError, match=r"the upload: its generation_config\.json cannot be used|JSON"):
        checks.check({"generation_config.json": json.dumps(generation).encode()})


@pytest.mark.parametrize("part", ["normalizer", "decoder"])
def test_two_steps_of_a_million_characters_kill_only_the_check(
    part: str, checks: Checks, files: dict[str, bytes]
) -> None:
    steps = sequence(f"{part}s", replace("a", "a" * 10**6), replace("a", "a" * 10**6))
    # Processor time that no machine takes to fill the memory.
    limits = Limits(WORK_LIMITS.memory_bytes, cpu_s=600.0)
    with pytest.raises(WorkerDied, match="of memory, or crashed"):
        checks.check(changed(files, **{part: steps}), 600.0, limits)
    checks.check(files)


def test_a_decoder_that_backtracks_without_end_is_stopped(checks: Checks, files: dict[str, bytes]) -> None:
    pattern = {"type": "Replace", "pattern": {"Regex": r"x*(?!x)\D\d"}, "content": ""}
    decoder = sequence("decoders", replace("e", "x" * 200_000), pattern)
    with pytest.raises((WorkerDied, WorkerTimeout)):
        checks.check(changed(files, decoder=decoder), deadline_s=3.0)


@pytest.mark.parametrize(
    "template",
    [
        b"{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        b"{{ 'x' * 4000000000 }}",
    ],
)
def test_a_template_that_would_die_is_refused(
    template: bytes, checks: Checks, files: dict[str, bytes]
) -> None:
    with pytest.raises((WorkerDied, WorkerTimeout)):
        checks.check({**files, "chat_template.jinja": template}, deadline_s=3.0)


@pytest.mark.parametrize(
    "template", [b"{{ raise_exception('no user turns') }}", b"{{ messages[7].role.x }}", b"{{ 1 / 0 }}"]
)
def test_a_template_may_refuse_the_probe(template: bytes, checks: Checks, files: dict[str, bytes]) -> None:
    checks.check({**files, "chat_template.jinja": template})
    checks.check({"chat_template.jinja": template})


def test_a_file_that_is_larger_than_any_model_s_is_named(checks: Checks) -> None:
    with pytest.raises(
        ArtifactError, match=r"its generation_config\.json has 1048577 bytes, more than 1048576"
    ):
        checks.check({"generation_config.json": b" " * (1 << 20 | 1)})
