"""Read a checkpoint's files beside the weights.

A delta carries its tokenizer, chat template and generation config. No code that a checkpoint brings is run.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from compressor.names import listed, warn
from deltastore.checkpoint import Checkpoint
from deltastore.errors import ArtifactError, CheckpointError, UsageError, failures_as, shown
from deltastore.format.files import (
    GENERATION_FILE,
    MAX_NAMED_TEMPLATES,
    NAMED_TEMPLATES,
    TOKENIZER_FILES,
    tokenizer_paths,
)
from deltastore.format.header import parse_json
from deltastore.format.layout import MAX_FILE_BYTES

TOKENIZER_FILE, TEMPLATE_FILE = "tokenizer.json", "chat_template.jinja"
# Files that a tokenizer can be made of, and those that no artifact carries.
VOCABULARIES = ("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model")
FOREIGN_VOCABULARIES = (
    "tekken.json", "*.tiktoken", "tiktoken.model", "tokenizer.model.*", "sentencepiece.bpe.model", "bpe.model",
)  # fmt: skip
PROBE_TEXT = "A probe: 1 + 2 = 3"
# They tell normalisations and prefixes apart.
PROBE_TEXTS = (PROBE_TEXT, "line by line\n\ttwo  spaces", "\u00e9\u4e2d\u6587 \U0001f600 \ufb01 \u2460")
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
NUM_PROBE_PIECES = 200
# Written by transformers; no token depends on it.
FREE_GENERATION = frozenset({
    "transformers_version", "_from_model_config", "output_attentions", "output_hidden_states", "output_logits",
    "output_scores", "return_dict_in_generate", "use_cache",
})  # fmt: skip


def own_files(base: Checkpoint, finetune: Checkpoint) -> dict[str, bytes]:
    """Return the files that a fine-tune does not share with its base, in an artifact's order.

    All files of a tokenizer go together, because a mixture of two tokenizers is invalid; chat templates go alone.

    Raises:
        CheckpointError: a file is too large or not what its name says, or a tokenizer that no server can load.
        UsageError: a tokenizer that is converted by a package which is not installed.
    """
    files, own = {}, tokenizer_files(finetune)
    if own and not (_has_vocabulary(finetune.path) or _has_vocabulary(base.path)):
        warn(
            f"{finetune.path}: left out {listed([*own])}: neither it nor the base has a vocabulary to read them with"
        )
        tokenizer = {}
    else:
        tokenizer = usable_tokenizer(finetune.path, base.path)
    if tokenizer and tokenizer != tokenizer_files(base):
        tokenizer = own if own and all(map(is_template, own)) else tokenizer
        _check_tokenizer(finetune.path, tokenizer)
        files.update(tokenizer)
    # As texts, because 257 equals 257.0 in Python, which no server takes for an id.
    if json.dumps(_generation_settings(finetune), sort_keys=True) != json.dumps(
        _generation_settings(base), sort_keys=True
    ):
        files[GENERATION_FILE] = generation_file(finetune)
    return files


def usable_tokenizer(finetune: Path, base: Path) -> dict[str, bytes]:
    """Return the files of a fine-tune's tokenizer, with `tokenizer.json` among them; none if it has no tokenizer.

    One without a vocabulary, or with that of the base, is completed by the base's files. One with another vocabulary
    is converted by transformers.

    Raises:
        CheckpointError: a vocabulary that cannot be converted, or added tokens that the completed tokenizer lacks.
        UsageError: a vocabulary that is converted by a package which is not installed.
    """
    own, foreign = _tokenizer_files(finetune), _foreign_vocabularies(finetune)
    if TOKENIZER_FILE in own or not (own or foreign):
        return own
    vocabularies = [*(name for name in VOCABULARIES if name in own), *foreign]
    if all(_is_same_file(finetune / name, base / name) for name in vocabularies):
        completed = {**_tokenizer_files(base), **own}
        own = {name: completed[name] for name in sorted(completed, key=_order)}
    if TOKENIZER_FILE not in own:
        own = _converted(finetune, own, foreign, base)
    _check_added_tokens(finetune, own)
    return own


def is_template(name: str) -> bool:
    """Return True for the name of a file that is a chat template."""
    return name == TEMPLATE_FILE or name.startswith(f"{NAMED_TEMPLATES}/")


def _order(name: str) -> tuple[int, str]:
    """Return a key that sorts names as an artifact has them."""
    return (TOKENIZER_FILES.index(name) if name in TOKENIZER_FILES else len(TOKENIZER_FILES)), name


def _foreign_vocabularies(directory: Path) -> list[str]:
    """Return the names of vocabularies that no artifact carries."""
    return sorted(path.name for pattern in FOREIGN_VOCABULARIES for path in directory.glob(pattern))


def _has_vocabulary(directory: Path) -> bool:
    return any((directory / name).is_file() for name in (TOKENIZER_FILE, *VOCABULARIES)) or bool(
        _foreign_vocabularies(directory)
    )


def _is_same_file(one: Path, other: Path) -> bool:
    return other.is_file() and one.read_bytes() == other.read_bytes()


def _converted(
    directory: Path, files: Mapping[str, bytes], foreign: Sequence[str], base: Path
) -> dict[str, bytes]:
    """Return a tokenizer's files as transformers saves them once it has converted its vocabulary.

    A SentencePiece model alone is of the base's class.
    """
    names = [*(name for name in files if not is_template(name)), *foreign]
    named = f"{directory}: its tokenizer is {', '.join(names)} without a {TOKENIZER_FILE}"
    missing = [package for package in ("sentencepiece", "google.protobuf") if not _is_installed(package)]
    if missing and any(name.endswith(".model") for name in names):
        raise UsageError(
            f"{named}, and converting it needs {missing[0]}: pip install 'peraxis[sentencepiece]', or save the "
            "tokenizer in its fast form there"
        )
    # Deferred, because the import takes seconds.
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    with (
        tempfile.TemporaryDirectory(prefix="tokenizer-") as scratch,
        failures_as(
            lambda reason: CheckpointError(
                f"{named}, and transformers cannot convert it ({reason}): save the tokenizer in its fast form there"
            )
        ),
    ):
        source, out = Path(scratch) / "source", Path(scratch) / "out"
        of_pieces = [name for name in names if name.endswith(".model")]
        _write_files(source, {**(_class_of(base) if of_pieces else {}), **files})
        for name in (*foreign, "config.json"):
            shutil.copyfile(directory / name, source / name)
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False, local_files_only=True)
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise ValueError(f"it is a {type(tokenizer).__name__}, which has no fast form")
        # transformers makes a tokenizer of nothing where it finds no vocabulary.
        if not set(tokenizer(PROBE_TEXT, add_special_tokens=False)["input_ids"]) - {tokenizer.unk_token_id}:
            raise ValueError("it has no vocabulary")
        if len(of_pieces) == 1 and "vocab.json" not in names:
            _check_pieces(source / of_pieces[0], tokenizer)
        tokenizer.save_pretrained(out)
        return _tokenizer_files(out)


def _class_of(base: Path) -> dict[str, bytes]:
    """Return the base's tokenizer_config.json, which names class and special tokens, without the tokens of its own."""
    path = base / "tokenizer_config.json"
    with failures_as(partial(_no_tokenizer, path)):
        document = json.loads(_content(path)) if path.is_file() else {}
        document.pop("added_tokens_decoder", None)
    return {path.name: json.dumps(document).encode()} if document else {}


def _check_pieces(path: Path, tokenizer: Any) -> None:
    """Check that a tokenizer splits texts as the SentencePiece model does that it was converted from.

    Raises:
        ValueError: It does not.
    """
    from sentencepiece import SentencePieceProcessor

    original = SentencePieceProcessor()
    try:
        original.LoadFromFile(str(path))
    except (OSError, RuntimeError):
        # tiktoken's form has the same name.
        return
    special = (original.IsControl, original.IsByte, original.IsUnknown)
    ids = [each for each in range(original.GetPieceSize()) if not any(test(each) for test in special)]
    words = [original.IdToPiece(each) for each in ids]
    # The longest pieces, which another algorithm makes of other parts.
    longest = " ".join(sorted(words, key=len)[-NUM_PROBE_PIECES:]).replace("\u2581", " ")
    for text in (*PROBE_TEXTS, f"a{longest}"):
        wanted = [original.IdToPiece(each) for each in original.EncodeAsIds(text)]
        found = tokenizer.convert_ids_to_tokens(tokenizer(text, add_special_tokens=False)["input_ids"])
        if found != wanted:
            raise ValueError(
                f"as {type(tokenizer).__name__} it splits {text[:40]!r} otherwise than SentencePiece"
            )


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def _write_files(directory: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)


def _check_added_tokens(directory: Path, files: Mapping[str, bytes]) -> None:
    """Refuse added tokens that only `added_tokens.json` names: beside tokenizer.json, transformers does not read it."""
    _check_tokenizer(directory, files)
    listed = json.loads(files.get("added_tokens.json", b"{}"))
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(files[TOKENIZER_FILE].decode())
    config = json.loads(files.get("tokenizer_config.json", b"{}"))
    decoder = config.get("added_tokens_decoder") if isinstance(config, dict) else None
    known = {
        str(token.get("content")): index
        for index, token in (decoder.items() if isinstance(decoder, dict) else ())
        if isinstance(token, dict)
    }
    for token, index in listed.items() if isinstance(listed, dict) else ():
        if tokenizer.token_to_id(token) != index and known.get(token) != str(index):
            raise CheckpointError(
                f"{directory / 'added_tokens.json'}: it gives token {shown(token)} the id {shown(index)}, and the "
                f"base's {TOKENIZER_FILE}, which completes it, does not: save the fine-tune's whole tokenizer there"
            )


def tokenizer_files(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Return the tokenizer files of a checkpoint, by name."""
    return _tokenizer_files(checkpoint.path)


def _tokenizer_files(directory: Path) -> dict[str, bytes]:
    paths = tokenizer_paths(directory)
    num_named = sum(name.startswith(f"{NAMED_TEMPLATES}/") for name in paths)
    if num_named > MAX_NAMED_TEMPLATES:
        raise CheckpointError(
            f"{directory / NAMED_TEMPLATES}: {num_named} chat templates, more than the {MAX_NAMED_TEMPLATES} "
            "that a delta carries: remove those that no client names"
        )
    return {name: _content(path) for name, path in paths.items()}


def generation_file(checkpoint: Checkpoint) -> bytes:
    """Return the generation config in force: the checkpoint's file, or the token ids of its configuration."""
    path = checkpoint.path / GENERATION_FILE
    if path.is_file():
        return _content(path)
    ids = {key: checkpoint.config[key] for key in TOKEN_IDS if checkpoint.config.get(key) is not None}
    return json.dumps(ids, indent=2).encode() + b"\n"


def _check_tokenizer(directory: Path, files: Mapping[str, bytes]) -> None:
    """Refuse files that `tokenizers` or JSON cannot parse; transformers is not needed for that."""
    from tokenizers import Tokenizer

    for name, content in files.items():
        with failures_as(partial(_no_tokenizer, directory / name)):
            if name == TOKENIZER_FILE:
                Tokenizer.from_str(content.decode())
            elif name.endswith(".json"):
                json.loads(content)


def _no_tokenizer(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{path}: it is no tokenizer ({reason}): fetch the fine-tune's tokenizer again")


def _content(path: Path) -> bytes:
    if (size := path.stat().st_size) > MAX_FILE_BYTES:
        raise CheckpointError(
            f"{path}: {size} bytes, more than the {MAX_FILE_BYTES} that a delta carries of one file"
        )
    return path.read_bytes()


def _generation_settings(checkpoint: Checkpoint) -> Mapping[str, Any]:
    where = checkpoint.path / GENERATION_FILE
    try:
        document = parse_json(generation_file(checkpoint), str(where))
    except ArtifactError as error:
        raise CheckpointError(str(error)) from error
    if not isinstance(document, dict):
        raise CheckpointError(f"{where}: it holds no JSON object")
    return {key: value for key, value in document.items() if key not in FREE_GENERATION and value is not None}


def usable_ids(facts: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """Return the special token ids of a configuration that a model can use: whole numbers below its rows.

    Ids that are null stay; of a list, the usable ones stay.

    Args:
        rows: of the model's embedding.
    """
    usable: dict[str, Any] = {}
    for key in (key for key in TOKEN_IDS if key in facts):
        value = facts[key]
        ids = [
            each
            for each in (value if isinstance(value, list) else [value])
            if type(each) is int and 0 <= each < rows
        ]
        if ids or value is None:
            usable[key] = ids if isinstance(value, list) else value
    return usable


def has_tokenizer(directory: Path) -> bool:
    """Return True if a checkpoint has any of a tokenizer's files."""
    return bool(tokenizer_paths(directory) or _foreign_vocabularies(directory))


def load_tokenizer(directory: Path, base: Path | None = None) -> Any:
    """Return the checkpoint's transformers tokenizer.

    Args:
        base: the directory of the base, whose files complete a partial tokenizer as `usable_tokenizer` does.

    Raises:
        CheckpointError: no tokenizer, or one that cannot be loaded.
    """
    # Deferred, because the import takes seconds.
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory(prefix="tokenizer-") as scratch:
        source = directory
        if base is not None and not (directory / TOKENIZER_FILE).is_file():
            source = Path(scratch)
            _write_files(source, usable_tokenizer(directory, base))
            shutil.copyfile(directory / "config.json", source / "config.json")
        with failures_as(
            lambda reason: CheckpointError(f"{directory}: its tokenizer cannot be loaded: {reason}")
        ):
            return AutoTokenizer.from_pretrained(source, trust_remote_code=False)
