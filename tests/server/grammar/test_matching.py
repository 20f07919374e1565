"""Grammars in this process: masks, forced tokens, ends, and vocabularies of every kind of tokenizer."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema_rs
import pytest
from transformers import PreTrainedTokenizerFast

from server.errors import EngineFailed, InvalidRequest
from server.grammar import matching
from server.grammar.grammar import Grammar, ToolSchema, any_object, calls_of, matching_schema
from server.grammar.matching import (
    MAX_AHEAD,
    NewSampled,
    NextMasks,
    Vocabulary,
    advance_all,
    make_matcher,
    opening_masks,
    read_vocabulary,
    reading_vocabulary,
)
from server.text.tokenizer import LoadedTokenizer
from server.text.worker_tasks import NotLoaded
from tests.helpers.tiny_models import make_tokenizer
from tests.server.helpers.tokenizer_kinds import KINDS

EOS = 257
TENANT = "default"
SCHEMAS: dict[str, dict[str, Any]] = {
    "object": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 6},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "choices": {"anyOf": [{"const": "yes"}, {"enum": [1, 2.5, None]}, {"type": "boolean"}]},
    "array": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 4},
    "pattern": {"type": "string", "pattern": "^[a-f]{2,5}$"},
    "definitions": {
        "$defs": {
            "point": {"type": "array", "prefixItems": [{"enum": [0, 1]}, {"enum": [0, 1]}], "items": False}
        },
        "type": "object",
        "properties": {"at": {"$ref": "#/$defs/point"}},
        "required": ["at"],
        "additionalProperties": False,
    },
}


FORMATS = ("date-time", "date", "time", "duration", "uuid", "email", "hostname", "ipv4", "ipv6", "uri")
TYPES: tuple[dict[str, Any], ...] = (
    {"type": "string", "maxLength": 100},
    {"type": "integer", "minimum": 0, "maximum": 10**6},
    {"type": "number"},
    {"type": "boolean"},
    {"enum": ["x", "y", "z"]},
    {"type": "string", "pattern": "^[A-Z]{2,5}-[0-9]{1,6}$"},
    {"type": "array", "items": {"type": "string", "format": "uuid"}, "maxItems": 1000},
)
LARGE: dict[str, dict[str, Any]] = {
    "200 properties": {"type": "object", "properties": {f"field_{i}": TYPES[i % 7] for i in range(200)}},
    "1000 values": {"enum": [f"place {i} of the world" for i in range(1000)]},
    "100 formats": {
        "type": "object",
        "properties": {
            f"{name}-{i}": {"type": "string", "format": name} for name in FORMATS for i in range(10)
        },
    },
    "100 lengths": {
        "type": "object",
        "properties": {
            f"t{i}": {"type": "string", "minLength": i, "maxLength": 1000 + i} for i in range(100)
        },
    },
}


@pytest.fixture(autouse=True)
def without_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the limits of a worker's task from this process."""
    monkeypatch.setattr(matching, "allow", lambda limits: None)


@pytest.fixture
def tokenizer() -> LoadedTokenizer:
    return LoadedTokenizer(make_tokenizer())


def closed(properties: dict[str, Any], definitions: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the schema of an object that has all of these properties and no others."""
    names = list(properties)
    closing = {"required": names, "additionalProperties": False}
    return {"$defs": definitions or {}, "type": "object", "properties": properties, **closing}


def vocabulary_of(key: str = "k", rows: int = 259, eos: tuple[int, ...] = (EOS,)) -> Vocabulary:
    return Vocabulary(key, rows, eos)


def allowed(mask: bytes) -> set[int]:
    return {token for token in range(8 * len(mask)) if mask[token // 8] >> token % 8 & 1}


def advanced(tokenizer: LoadedTokenizer, vocabulary: Vocabulary, new: NewSampled) -> NextMasks:
    """Advance a sequence as a lane does: make its matcher if it has none."""
    read_vocabulary(tokenizer, vocabulary, TENANT)
    (result,) = advance_all(vocabulary, TENANT, [new], [])
    if isinstance(result, Exception):
        raise result
    return make_matcher(vocabulary, TENANT, new) if result is None else result


def sampled(
    tokenizer: LoadedTokenizer, grammar: Grammar, name: str, vocabulary: Vocabulary, seed: int
) -> list[int]:
    """Draw tokens that the masks allow until the sequence ends, as the engine of a random model would."""
    drawing = random.Random(seed)
    tokens: list[int] = []
    while True:
        following = advanced(tokenizer, vocabulary, NewSampled(name, grammar, 0, tuple(tokens)))
        for mask in following.masks:
            choices = sorted(allowed(mask))
            if not choices or (token := drawing.choice(choices)) in vocabulary.eos_token_ids:
                return tokens
            tokens.append(token)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", SCHEMAS)
def test_every_draw_matches_its_schema(name: str, seed: int, tokenizer: LoadedTokenizer) -> None:
    grammar = matching_schema(SCHEMAS[name])
    tokens = sampled(tokenizer, grammar, f"{name}-{seed}", vocabulary_of(), seed)
    jsonschema_rs.validate(SCHEMAS[name], json.loads(tokenizer.decode(tokens)))


@pytest.mark.parametrize("name", LARGE)
def test_large_schemas_of_ordinary_kinds_are_within_the_limits(name: str, tokenizer: LoadedTokenizer) -> None:
    schema = closed({"first": LARGE[name], "second": closed({"inner": LARGE[name]})})
    grammar = matching_schema(schema, is_strict=True)
    assert reading_vocabulary(tokenizer, vocabulary_of(), opening_masks, grammar).masks
    beginning = tuple(tokenizer.encode('{"first":', 99, False, "prompt"))
    new = NewSampled(name, grammar, 0, beginning)
    assert allowed(advanced(tokenizer, vocabulary_of(), new).masks[-1])


def test_forced_tokens_come_ahead_and_each_mask_allows_one_of_them(tokenizer: LoadedTokenizer) -> None:
    opening = reading_vocabulary(
        tokenizer, vocabulary_of(), opening_masks, matching_schema(SCHEMAS["object"])
    )
    assert tokenizer.decode(list(opening.forced)) == '{"name":"'
    assert [allowed(mask) for mask in opening.masks[:-1]] == [{token} for token in opening.forced]
    assert len(allowed(opening.masks[-1])) > 1


def test_masks_ahead_are_bounded(tokenizer: LoadedTokenizer) -> None:
    grammar = matching_schema({"const": "x" * 1000})
    opening = reading_vocabulary(tokenizer, vocabulary_of(), opening_masks, grammar)
    assert len(opening.masks) == MAX_AHEAD


def test_an_end_token_is_allowed_only_where_the_grammar_may_end(tokenizer: LoadedTokenizer) -> None:
    grammar, vocabulary = matching_schema({"type": "integer"}), vocabulary_of()
    assert EOS not in allowed(advanced(tokenizer, vocabulary, NewSampled("e", grammar, 0, ())).masks[-1])
    digit = tokenizer.encode("7", 10, False, "prompt")
    assert EOS in allowed(
        advanced(tokenizer, vocabulary, NewSampled("e", grammar, 0, tuple(digit))).masks[-1]
    )


def test_where_nothing_may_follow_no_token_is_allowed(tokenizer: LoadedTokenizer) -> None:
    grammar = matching_schema({"enum": [True]})
    tokens = tuple(tokenizer.encode("true", 10, False, "prompt"))
    assert not allowed(advanced(tokenizer, vocabulary_of(), NewSampled("t", grammar, 0, tokens)).masks[-1])


def test_a_variant_without_end_tokens_ends_when_nothing_may_follow(tokenizer: LoadedTokenizer) -> None:
    grammar = matching_schema({"type": "array", "items": {"enum": [1]}, "maxItems": 2})
    tokens = sampled(tokenizer, grammar, "none", vocabulary_of("without", eos=()), 0)
    assert isinstance(json.loads(tokenizer.decode(tokens)), list)


def test_a_matcher_goes_on_where_it_was_and_is_made_again_when_it_is_lost(tokenizer: LoadedTokenizer) -> None:
    grammar, vocabulary = any_object(), vocabulary_of()
    tokens = tuple(tokenizer.encode('{"a":[1,2', 99, False, "prompt"))
    whole = advanced(tokenizer, vocabulary, NewSampled("whole", grammar, 0, tokens))
    advanced(tokenizer, vocabulary, NewSampled("parts", grammar, 0, tokens[:4]))
    assert advanced(tokenizer, vocabulary, NewSampled("parts", grammar, 4, tokens[4:])) == whole
    assert advance_all(vocabulary, TENANT, [NewSampled("lost", grammar, 4, tokens[4:])], []) == [None]
    assert advance_all(vocabulary, TENANT, [NewSampled("parts", grammar, 9, ())], ["parts"]) == [None]


def test_a_token_outside_the_mask_fails_its_own_sequence(tokenizer: LoadedTokenizer) -> None:
    good = NewSampled("good", any_object(), 0, ())
    bad = NewSampled("bad", any_object(), 0, tuple(tokenizer.encode("x", 9, False, "prompt")))
    advanced(tokenizer, vocabulary_of(), good)
    results = advance_all(vocabulary_of(), TENANT, [bad, good], [])
    assert [type(result) for result in results] == [EngineFailed, NextMasks]


def test_sequences_of_a_grammar_that_is_not_compiled_wait_for_a_call_of_their_own(
    tokenizer: LoadedTokenizer,
) -> None:
    vocabulary, new = vocabulary_of("new"), NewSampled("n", matching_schema(SCHEMAS["choices"]), 0, ())
    read_vocabulary(tokenizer, vocabulary, TENANT)
    assert advance_all(vocabulary, TENANT, [new], []) == [None]
    made = make_matcher(vocabulary, TENANT, new)
    other = NewSampled("another sequence", new.grammar, 0, ())
    assert advance_all(vocabulary, TENANT, [new, other], []) == [made, made]


def test_a_call_ends_after_its_slice_with_the_results_of_the_first_sequences(
    tokenizer: LoadedTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    news = [NewSampled(f"slice-{number}", any_object(), 0, ()) for number in range(3)]
    advanced(tokenizer, vocabulary_of(), news[0])
    monkeypatch.setattr(matching, "SLICE_CPU_S", -1.0)
    assert len(advance_all(vocabulary_of(), TENANT, news, [])) == 1


def test_a_step_that_takes_too_long_ends_its_own_sequence(
    tokenizer: LoadedTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = NewSampled("slow", any_object(), 0, ())
    advanced(tokenizer, vocabulary_of(), slow)
    with monkeypatch.context() as patch:
        patch.setattr(matching, "MAX_STEP_CPU_S", -1.0)
        (result,) = advance_all(vocabulary_of(), TENANT, [slow], [])
    assert isinstance(result, InvalidRequest)
    assert "a step took too much time" in str(result)
    assert result.param == "response_format"


def test_a_mask_has_a_bit_for_each_row_and_none_behind(tokenizer: LoadedTokenizer) -> None:
    for rows in (250, 259, 300):
        vocabulary = vocabulary_of(f"rows-{rows}", rows)
        mask = reading_vocabulary(tokenizer, vocabulary, opening_masks, any_object()).masks[-1]
        assert len(mask) == 4 * -(-rows // 32)
        assert max(allowed(mask)) < min(rows, 259)


@pytest.mark.parametrize("kind", ["byte level", "llama"])
def test_tokenizers_of_language_models_are_supported(kind: str) -> None:
    loaded = LoadedTokenizer(PreTrainedTokenizerFast(tokenizer_object=KINDS[kind]()))
    grammar = matching_schema(closed({"the cat": {"enum": ["sat on"]}}))
    tokens = sampled(loaded, grammar, kind, Vocabulary(kind, len(loaded.fast), ()), 1)
    assert json.loads(loaded.decode(tokens)) == {"the cat": "sat on"}


@pytest.mark.parametrize("kind", ["word level", "word piece", "metaspace"])
def test_a_tokenizer_whose_tokens_are_no_bytes_is_refused(kind: str) -> None:
    loaded = LoadedTokenizer(PreTrainedTokenizerFast(tokenizer_object=KINDS[kind]()))
    with pytest.raises(InvalidRequest, match="the output cannot be constrained"):
        reading_vocabulary(loaded, Vocabulary(kind, len(loaded.fast), ()), opening_masks, any_object())


def test_a_worker_that_lacks_the_vocabulary_says_so(tokenizer: LoadedTokenizer) -> None:
    with pytest.raises(NotLoaded):
        opening_masks(tokenizer, vocabulary_of("unread"), any_object())


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "poem"}, "Invalid type: poem"),
        ({"type": "string", "pattern": "("}, "unclosed group"),
        ({"not": {"type": "string"}}, "Unimplemented keys"),
        ({"$ref": "https://example.org/schema"}, "https"),
        ({"type": "string", "format": "poem"}, "poem"),
    ],
)
def test_a_schema_that_cannot_be_used_is_refused_with_its_field(
    schema: dict[str, Any], reason: str, tokenizer: LoadedTokenizer
) -> None:
    grammar = matching_schema(schema, is_strict=True)
    with pytest.raises(
        InvalidRequest, match=f"^response_format: the schema cannot be used: .*{reason}"
    ) as error:
        reading_vocabulary(tokenizer, vocabulary_of(), opening_masks, grammar)
    assert error.value.param == "response_format"
    assert "%json" not in str(error.value)


def test_each_tool_s_schema_finds_its_own_definitions(tokenizer: LoadedTokenizer) -> None:
    def tool(name: str, value: str) -> ToolSchema:
        return ToolSchema(name, closed({"v": {"$ref": "#/$defs/v"}}, {"v": {"const": value}}))

    grammar = calls_of([tool("first", "1"), tool("second", "2")], may_repeat=False)
    seen = set()
    for seed in range(8):
        tokens = sampled(tokenizer, grammar, f"tools-{seed}", vocabulary_of(), seed)
        (call,) = json.loads(tokenizer.decode(tokens))
        seen.add((call["name"], call["arguments"]["v"]))
    assert seen == {("first", "1"), ("second", "2")}


def test_a_schema_that_would_fail_at_its_first_step_is_refused_by_its_trial(
    tokenizer: LoadedTokenizer,
) -> None:
    patterns = {f"p{i}": {"type": "string", "pattern": f"^.*{i}x.*$"} for i in range(2300)}
    schema = {"type": "object", "properties": {"z": {"type": "string"}, **patterns}, "required": ["z"]}
    with pytest.raises(InvalidRequest, match="too complex"):
        reading_vocabulary(tokenizer, vocabulary_of(), opening_masks, matching_schema(schema))


def test_a_schema_whose_trial_took_too_long_is_refused_each_time(
    tokenizer: LoadedTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammar, vocabulary = matching_schema({"const": "a schema of this test"}), vocabulary_of()
    monkeypatch.setattr(matching, "MAX_TRIAL_CPU_S", -1.0)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="too much time to compile") as refused:
            reading_vocabulary(tokenizer, vocabulary, opening_masks, grammar)
        assert refused.value.param == "response_format"
