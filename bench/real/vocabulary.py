"""Train a byte-level BPE tokenizer of any size on the sources of the Python installation, and cache it."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

MAX_TEXT_BYTES = 48 << 20
TRAINED_TOKENS = 60_000
PAD = "<pad>"


def byte_level_bpe(num_tokens: int, cache: Path) -> PreTrainedTokenizerFast:
    """Return a tokenizer of `num_tokens` tokens, the same for every call on one machine.

    Local text gives too few merges for a large vocabulary. Pairs of trained tokens, which real text rarely holds, fill
    it up in a fixed order.
    """
    file = cache / f"tokenizer-{num_tokens}.json"
    if not file.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".part")
        _filled(_trained(min(num_tokens, TRAINED_TOKENS)), num_tokens).save(str(partial))
        partial.rename(file)
    return PreTrainedTokenizerFast(tokenizer_file=str(file), pad_token=PAD)


def _trained(num_tokens: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=num_tokens,
        special_tokens=[PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    return tokenizer


def _texts() -> Iterator[str]:
    """Yield Python sources of the standard library and of the installed packages, in the order of their paths."""
    total = 0
    for key in ("stdlib", "purelib"):
        for path in sorted(Path(sysconfig.get_path(key)).rglob("*.py")):
            text = path.read_text(errors="ignore")
            total += len(text)
            if total > MAX_TEXT_BYTES:
                return
            yield text


def _filled(trained: Tokenizer, num_tokens: int) -> Tokenizer:
    document = json.loads(trained.to_str())
    vocabulary, merges = document["model"]["vocab"], document["model"]["merges"]
    tokens = [token for token in vocabulary if token != PAD]
    for joined, pair in _joined(tokens):
        if len(vocabulary) >= num_tokens:
            break
        if joined not in vocabulary:
            vocabulary[joined] = len(vocabulary)
            merges.append(list(pair))
    return Tokenizer.from_str(json.dumps(document))


def _joined(tokens: list[str]) -> Iterator[tuple[str, tuple[str, str]]]:
    for second in tokens:
        for first in tokens:
            yield first + second, (first, second)
