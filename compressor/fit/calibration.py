"""Calibration text as token sequences of one length: from a file, a data set, or the fine-tune itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressor.config import Calibration
from compressor.decoder.decoder import Decoder
from compressor.decoder.sampling import sample
from compressor.fit.record_files import file_records
from compressor.fit.records import Chat, Completion, parse_record
from compressor.sources import has_tokenizer, load_tokenizer
from deltastore.errors import CheckpointError, UsageError, failures_as
from deltastore.hub import HUB_ID

MIN_SEQUENCES = (
    16  # of given text; validation and test text take 8, and fewer than 8 say little of a distribution
)
CHARS_PER_TOKEN = 16  # read of a text file, more than any language needs
MESSAGE_MARK = "3f1c9a27"  # rendered in place of a user's message, to find where it begins
HELD_OUT_PART = 10  # the share of sequences that validation and test text take together
MIN_HELD_OUT = 8
DATASETS = {"c4": ("allenai/c4", "en")}  # short names, and the hub's name and configuration
# Names of files, where there may be none.
FILE_SUFFIXES = (".txt", ".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".gz")
DATE = "01 Jan 2025"  # chat templates write today's date unless they are given another
MAX_REASON_CHARS = 200


def calibration_text(
    calibration: Calibration,
    finetune: Decoder,
    on_tokens: Callable[[int], Any] | None = None,
    base: Path | None = None,
) -> list[Tensor]:  # [length] int64 each
    """Return at most `samples` sequences of ids that are valid for the fine-tune; none for the text `none`.

    The same arguments give the same sequences. Of a file or data set the first records are taken. A sequence begins
    with a record; more follow until it is full. A completion is followed by the fine-tune's end token.

    Args:
        on_tokens: called with the number of tokens sampled since the last call.
        base: the directory of the base, whose tokenizer completes the fine-tune's.

    Raises:
        UsageError: no such file or data set, a record of another form, too little text, a length above the model's.
        CheckpointError: no usable tokenizer, or no chat template where records need one.
    """
    if calibration.text == "none":
        return []
    _check_length(calibration, finetune)
    if calibration.text == "self":
        generator = torch.Generator().manual_seed(calibration.seed)
        prompts = _prompts(calibration, finetune, generator, base)
        return list(sample(finetune, prompts, calibration.length, generator, on_tokens))
    sequences = _given_text(calibration, finetune, base)
    largest = max(int(sequence.max()) for sequence in sequences)
    if largest >= finetune.num_embeddings:
        raise CheckpointError(
            f"{finetune.weights.path}: its tokenizer gives id {largest} and its embedding has "
            f"{finetune.num_embeddings} rows: the two are not of one model"
        )
    return sequences


def num_held_out(count: int) -> int:
    """Return how many of `count` sequences are validation or test text: a tenth, at least 8 and at most half."""
    return min(max(MIN_HELD_OUT, math.ceil(count / HELD_OUT_PART)), count // 2)


def split_text(sequences: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return training, validation and test sequences; of the last `num_held_out`, every other one is test text."""
    cut = len(sequences) - num_held_out(len(sequences))
    return list(sequences[:cut]), list(sequences[cut::2]), list(sequences[cut + 1 :: 2])


def with_random_tokens(sequences: Sequence[Tensor], num_ids: int, part: float) -> list[Tensor]:
    """Replace a part of the tokens by random ids below `num_ids`; the same sequences give the same result.

    Random tokens widen layer inputs; otherwise other directions stay unconstrained.
    """
    generator = torch.Generator().manual_seed(len(sequences))
    replaced_sequences = []
    for ids in sequences:
        replaced = torch.rand(ids.shape, generator=generator) < part
        replaced_sequences.append(
            torch.where(replaced, torch.randint(num_ids, ids.shape, generator=generator), ids)
        )
    return replaced_sequences


def batched(sequences: Sequence[Tensor], max_tokens: int) -> list[Tensor]:  # [sequences, tokens] int64 each
    """Stack sequences of equal length in their order, at most `max_tokens` in a batch, or one sequence."""
    by_length: dict[int, list[Tensor]] = {}
    for sequence in sequences:
        by_length.setdefault(len(sequence), []).append(sequence)
    return [
        torch.stack(alike[first : first + step])
        for length, alike in by_length.items()
        for step in [max(1, max_tokens // length)]
        for first in range(0, len(alike), step)
    ]


def _check_length(calibration: Calibration, finetune: Decoder) -> None:
    most = getattr(finetune.config.get_text_config(), "max_position_embeddings", None)
    if most is not None and calibration.length > most:
        raise UsageError(
            f"a calibration length of {calibration.length} tokens: {finetune.weights.path} takes at most {most}"
        )


def _given_text(calibration: Calibration, finetune: Decoder, base: Path | None) -> list[Tensor]:
    """Return sequences of a file or data set."""
    directory = next((path for path in (finetune.weights.path, base) if path and has_tokenizer(path)), None)
    if directory is None:
        raise CheckpointError(
            f"{finetune.weights.path}: there is no tokenizer in it, which {calibration.text} needs: copy the model's "
            "tokenizer.json there, or give `text='self'`"
        )
    tokenizer = load_tokenizer(directory, base)
    max_chars = calibration.samples * calibration.length * CHARS_PER_TOKEN
    # Closed, so that the process that reads a file ends with the last record that is needed.
    with closing(_records(calibration.text, tokenizer, max_chars)) as texts:
        packed = _packed(texts, _prefix(tokenizer), calibration.length)
        sequences = [torch.tensor(ids) for ids in islice(packed, calibration.samples)]
    if len(sequences) < min(calibration.samples, MIN_SEQUENCES):
        raise UsageError(
            f"{calibration.text}: its text makes {len(sequences)} sequences of {calibration.length} tokens, "
            f"too few: give more text, at least {MIN_SEQUENCES} sequences, or `text='self'`"
        )
    return sequences


def _packed(texts: Iterable[list[int]], prefix: list[int], length: int) -> Iterator[list[int]]:
    """Yield sequences that begin with a record, or with `prefix` and the next part of a record longer than one."""
    sequence: list[int] = []
    for ids in texts:
        sequence = sequence + ids
        if len(sequence) < length:
            continue
        yield sequence[:length]
        step = length - len(prefix)
        for first in range(length, len(sequence) - step + 1, step):
            yield prefix + sequence[first : first + step]
        sequence = []


def _prefix(tokenizer: Any) -> list[int]:
    """Return the beginning-of-text id if the tokenizer puts it before every text."""
    ids: list[int] = tokenizer("")["input_ids"]
    return ids[:1] if ids[:1] == [tokenizer.bos_token_id] else []


def _prompts(
    calibration: Calibration, finetune: Decoder, generator: torch.Generator, base: Path | None
) -> Tensor:  # [samples, tokens] int64
    """Return the prompts of sampled text: the chat template up to a user's message, or a random token."""
    directory = finetune.weights.path
    tokenizer = load_tokenizer(directory, base) if has_tokenizer(directory) else None
    if opening := _user_turn(directory, tokenizer):
        prompts = torch.tensor([opening]).expand(calibration.samples, -1)
    else:
        usable = _usable_tokens(finetune, tokenizer)
        firsts = usable[torch.randint(len(usable), (calibration.samples, 1), generator=generator)]
        prefix = torch.tensor([_prefix(tokenizer) if tokenizer is not None else []], dtype=torch.int64)
        prompts = torch.cat([prefix.expand(calibration.samples, -1), firsts], dim=1)
    if prompts.shape[1] >= calibration.length:
        raise UsageError(
            f"a calibration length of {calibration.length} tokens: "
            f"the fine-tune's chat template alone takes {prompts.shape[1]}"
        )
    return prompts


def _user_turn(directory: Path, tokenizer: Any | None) -> list[int]:
    """Return the ids that open a user's turn, so that the model writes the turn itself; none without a template."""
    if tokenizer is None or tokenizer.chat_template is None:
        return []
    message = [{"role": "user", "content": MESSAGE_MARK}]
    text = _chat_text(Chat(message), f"{directory}: `text` self", tokenizer)
    return _token_ids(text.partition(MESSAGE_MARK)[0], str(directory), tokenizer, add_special_tokens=False)


def _usable_tokens(finetune: Decoder, tokenizer: Any | None) -> Tensor:
    """Return the ids that stand for text, or all ids without a tokenizer."""
    count = finetune.num_embeddings
    if tokenizer is None:
        return torch.arange(count)
    special = set(tokenizer.all_special_ids)
    return torch.tensor([token for token in range(min(count, len(tokenizer))) if token not in special])


def _records(source: str, tokenizer: Any, max_chars: int) -> Generator[list[int]]:
    """Yield the ids of each record of a source.

    Args:
        source: a file of records or of plain text, or a data set as NAME or NAME:CONFIG.
        max_chars: how much is read of a text, and at most as many records.

    Raises:
        UsageError: no such file or data set, or a record of another form.
        CheckpointError: chat records, and a tokenizer without a chat template.
    """
    path = Path(source)
    is_file = path.is_file() or path.name.lower().endswith(FILE_SUFFIXES)
    with closing(file_records(path, max_chars) if is_file else _dataset(source)) as records:
        for where, record in islice(records, max_chars):
            if ids := _record_ids(record, where, tokenizer, max_chars):
                yield ids


def _chat_text(chat: Chat, where: str, tokenizer: Any) -> str:
    """Render a conversation by the tokenizer's chat template.

    Args:
        where: names the record in errors.

    Raises:
        UsageError: messages or tools that the template refuses.
        CheckpointError: no chat template.
    """
    if tokenizer.chat_template is None:
        raise CheckpointError(
            f"{where}: the fine-tune has no chat template: give records of text, or `text='self'`"
        )
    with failures_as(
        lambda reason: UsageError(f"{where}: the fine-tune's chat template refuses these messages: {reason}")
    ):
        return str(
            tokenizer.apply_chat_template(chat.messages, tools=chat.tools, tokenize=False, date_string=DATE)
        )


def _token_ids(text: str, where: str, tokenizer: Any, **options: Any) -> list[int]:
    """Return the ids of a text.

    Raises:
        UsageError: text that the tokenizer refuses, such as a lone surrogate.
    """
    with failures_as(
        lambda reason: UsageError(f"{where}: the fine-tune's tokenizer cannot encode it: {reason}")
    ):
        return list(tokenizer(text, verbose=False, **options)["input_ids"])


def _dataset(source: str) -> Generator[tuple[str, Any]]:
    """Yield the number of each record of a data set's training part, for errors, and the record; streamed."""
    name, _, config = source.partition(":")
    if not HUB_ID.fullmatch(name):
        raise UsageError(
            f"`text` {source}: no such file, and no data set's name: give a .txt or .jsonl file, self or none"
        )
    try:
        datasets = import_module("datasets")
    except ImportError as error:
        raise UsageError(
            f"`text` {source}: data sets need the datasets library: pip install 'peraxis[eval]', "
            "or give a file, or self"
        ) from error
    # Deferred, because only data sets of the hub need it.
    import httpx

    name, default = DATASETS.get(name, (name, ""))
    try:
        stream = datasets.load_dataset(name, config or default or None, split="train", streaming=True)
        for number, record in enumerate(stream, 1):
            yield f"{source}: record {number}", record
    except (OSError, ValueError, httpx.HTTPError, datasets.exceptions.DatasetsError) as error:
        raise UsageError(
            f"`text` {source}: the hub does not give this data set ({_reason(error)}): give a file, or self"
        ) from error


def _record_ids(record: Any, where: str, tokenizer: Any, max_chars: int) -> list[int]:
    """Return a record's ids; a completion is followed by the end token, as where such records are trained on."""
    found, is_rendered = parse_record(record, where), False
    if isinstance(found, Chat):
        # Some records have their conversation as text, too.
        is_rendered = tokenizer.chat_template is not None or not isinstance(record.get("text"), str)
        found = _chat_text(found, where, tokenizer) if is_rendered else str(record["text"])
    if found is None:
        return []
    text = found if isinstance(found, str) else found.prompt + found.completion
    ids = _token_ids(text[:max_chars], where, tokenizer, add_special_tokens=not is_rendered)
    end = tokenizer.eos_token_id
    return [*ids, end] if isinstance(found, Completion) and end is not None and ids[-1:] != [end] else ids


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split())[:MAX_REASON_CHARS]
