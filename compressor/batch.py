"""Deltas of many fine-tunes of one base: `peraxis compress --all FILE.toml`.

Fine-tunes are compressed one after the other, each as a run of its own would do it, and the base is opened and hashed
once. A record beside the artifacts tells which are finished, so that the command can be given again after any end.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import huggingface_hub
from pydantic import TypeAdapter, ValidationError

from compressor.config import (
    Calibration,
    CompressConfig,
    FitSettings,
    OptionField,
    config_of,
    options_of,
)
from compressor.model_card import CARD
from compressor.pipeline import (
    CompressResult,
    OpenedBase,
    check_agreement,
    compress,
    measure_rival,
    settings_of,
)
from deltastore.console import flag_of, printable
from deltastore.errors import ArtifactError, PeraxisError, StorageFull, UsageError, shown
from deltastore.format.artifact import Artifact
from deltastore.hub import UNWANTED, WANTED, HubModel, find_on_hub, is_hub_id
from deltastore.registry.records import is_name

# Keys of the file beside options, and those of the options that it does not take: they are said otherwise here.
BASE, OUT, FINETUNES, FINETUNE = "base", "out", "finetunes", "finetune"
NOT_OPTIONS = frozenset({BASE, OUT, FINETUNE, "resume"})
REPORT = "report"
RECORD = "finished.json"
WEIGHTS = ".safetensors"


@dataclass(frozen=True, slots=True)
class Entry:
    """One fine-tune of a file."""

    name: str
    config: CompressConfig


@dataclass(frozen=True, slots=True)
class Batch:
    """A file of fine-tunes, parsed and checked."""

    base: str
    out: Path  # the directory of the artifacts
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of one fine-tune; figures are None for one that failed."""

    name: str
    out: Path
    state: Literal["made", "kept", "failed"]
    seconds: float
    digest: str | None = None  # SHA-256, 64 hex digits
    artifact_bytes: int | None = None
    full_bytes: int | None = None  # of the fine-tune at 16 bits
    fidelity: Mapping[str, Any] = field(default_factory=dict)  # as the artifact's manifest has it
    rival: Mapping[str, Any] | None = None  # as `Rival.as_json`, where it was asked for
    error: str | None = None

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "out": str(self.out),
            "state": self.state,
            "seconds": self.seconds,
            "digest": None if self.digest is None else f"sha256:{self.digest}",
            "artifact_bytes": self.artifact_bytes,
            "full_bytes": self.full_bytes,
            "fidelity": dict(self.fidelity),
            **({} if self.rival is None else {"rival": dict(self.rival)}),
            "error": self.error,
        }


def read_batch(file: Path, progress: bool = False) -> Batch:
    """Read a TOML file of fine-tunes.

    It has `base`, `out` (the artifacts' directory), a table `finetunes.NAME` with `finetune` for each fine-tune, and
    options of `compress` by their flags' names, for all fine-tunes at the top and for one in its table. Paths count
    from the working directory.

    Raises:
        UsageError: no such file, no TOML, an unknown key, a value of another type or out of its range.
    """
    document = _document(file)
    _check_keys(document, {BASE, OUT, FINETUNES, *_options()} - {REPORT}, str(file))
    base, out = (_text(document, key, str(file)) for key in (BASE, OUT))
    tables = document.get(FINETUNES)
    if not isinstance(tables, dict) or not tables:
        raise UsageError(f"{file}: it has no fine-tune: give each a table such as [{FINETUNES}.NAME]")
    common = _values(document, str(file))
    entries, reports = [], dict[Path, str]()
    for name, table in tables.items():
        where = f"{file}: {FINETUNES}.{printable(name)}"
        if not is_name(name):
            raise UsageError(
                f"{where}: it names a file and a variant: give letters, digits, '.', '_' and '-', 64 at most"
            )
        if not isinstance(table, dict):
            raise UsageError(f'{where}: it is no table: write {FINETUNE} = "DIR_OR_HUB_ID" below [{where}]')
        _check_keys(table, {FINETUNE, *_options()}, where)
        config = _config(where, base, _text(table, FINETUNE, where), Path(out) / f"{name}{WEIGHTS}", {
            **common, **_values(table, where), "progress": progress,
        })  # fmt: skip
        if config.report is not None and (other := reports.setdefault(config.report.resolve(), name)) != name:
            raise UsageError(f"{where}: {REPORT} {config.report} is that of {other}: give each a directory")
        entries.append(Entry(name, config))
    return Batch(base, Path(out), tuple(entries))


def _document(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}: give a TOML file of fine-tunes") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"{file}: it is no TOML ({error}): correct it there") from error


@cache
def _options() -> Mapping[str, tuple[str, OptionField]]:
    """Return each option that the file takes by its flag's name, with its own name."""
    options = {**options_of(CompressConfig), **options_of(FitSettings), **options_of(Calibration)}
    return {
        (option.option.flag or flag_of(name))[2:]: (name, option)
        for name, option in options.items()
        if name not in NOT_OPTIONS
    }


def _check_keys(table: Mapping[str, Any], known: set[str], where: str) -> None:
    for key in table:
        if _spelt(key) in known:
            continue
        if _spelt(key) == REPORT:
            way_out = f"give it in the table of each fine-tune: one card is written to a {REPORT}"
        elif near := get_close_matches(_spelt(key), known, 1):
            way_out = f"did you mean {near[0]}?"
        else:
            way_out = f"give one of {', '.join(sorted(known))}"
        raise UsageError(f"{where}: unknown key {shown(key)}: {way_out}")


def _spelt(key: str) -> str:
    return key.replace("_", "-")


def _text(table: Mapping[str, Any], key: str, where: str) -> str:
    value = table.get(key)
    if not isinstance(value, str) or not value:
        found = "is missing" if value is None else f"is {shown(str(value))}"
        raise UsageError(f'{where}: {key} {found}: write {key} = "..." with a text')
    return value


def _values(table: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the options of a table by their own names, each checked for its type."""
    values: dict[str, Any] = {}
    for key, value in table.items():
        if (known := _options().get(_spelt(key))) is None:
            continue
        name, option = known
        if name in values:
            raise UsageError(f"{where}: {key} is there twice: give it once")
        try:
            # As JSON, because there a number is not taken for a text or a truth value, and a text is a path.
            values[name] = TypeAdapter(option.kind).validate_json(json.dumps(value), strict=True)
        except (TypeError, ValidationError) as error:
            # A date or a time is no value of JSON.
            way_out = "write it as a text, in quotation marks"
            reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else way_out
            raise UsageError(f"{where}: {key} {shown(str(value))}: {reason}") from error
    return values


def _config(where: str, base: str, finetune: str, out: Path, options: Mapping[str, Any]) -> CompressConfig:
    try:
        config = config_of(base=base, finetune=finetune, out=out, **options)
    except UsageError as error:
        raise error.about(where) from error
    # Progress of this fine-tune that a killed run left is always gone on with.
    return replace(config, resume=config.fit_settings is not None)


def compress_all(batch: Batch) -> list[Outcome]:
    """Make the artifact of every fine-tune, one after the other; a failed one is reported on stderr and passed over.

    An artifact that an earlier run of the same inputs finished is kept, if neither it nor they have changed. A
    fine-tune that is fetched from the hub for this is removed from huggingface_hub's cache before the next is fetched.

    Raises:
        CheckpointError: the base cannot be read.
        StorageFull, UsageError: the directory of the artifacts cannot be written to.
    """
    base = OpenedBase(batch.base)
    base.checkpoint()
    record = Record.read(batch.out)
    base_files = _digest(base.directory, lambda name: not name.endswith(WEIGHTS))
    outcomes = []
    for entry in batch.entries:
        started = time.perf_counter()
        try:
            outcome = _compressed(entry, base, base_files, record)
        except PeraxisError as error:
            line = " ".join(str(error).split())
            print(f"{entry.name}: {line}", file=sys.stderr)
            outcome = Outcome(entry.name, entry.config.out, "failed", 0.0, error=line)
        outcomes.append(replace(outcome, seconds=time.perf_counter() - started))
    return outcomes


def _compressed(entry: Entry, base: OpenedBase, base_files: str, record: Record) -> Outcome:
    config = entry.config
    found = find_on_hub(config.finetune) if is_hub_id(config.finetune) else None
    inputs = _inputs(config, base, base_files, found)
    kept = record.kept(entry, inputs)
    if kept is not None and (config.rival is None or kept.rival is not None):
        return kept
    if found is not None and found.missing_bytes:
        record.note_fetched(found)
    try:
        with _errors_of_resume():
            result = compress(config, base) if kept is None else measure_rival(config, base)
    finally:
        # Behind a kill, what the run before had fetched is used first.
        record.forget_fetched()
    record.note(entry.name, inputs, result)
    return Outcome(
        entry.name,
        config.out,
        "made" if kept is None else "kept",
        result.seconds,
        result.digest,
        result.artifact_bytes,
        result.full_bytes,
        result.manifest.fidelity,
        None if result.rival is None else result.rival.as_json(),
    )


@contextmanager
def _errors_of_resume() -> Iterator[None]:
    """Name the way out of progress that another run left, where no flag decides on it."""
    try:
        yield
    except UsageError as error:
        said = str(error).replace("leave `resume` away to begin anew", "remove it to begin anew")
        error.args = (said,)
        raise


def _inputs(config: CompressConfig, base: OpenedBase, base_files: str, found: HubModel | None) -> str:
    """Return the SHA-256 of all that decides an artifact's bytes."""
    identity = base.identity(config.progress)
    text = None if config.fit_settings is None else config.fit_settings.calibration.text
    parts = {
        "version": version("peraxis"),
        "base": [identity.id, identity.fingerprint, base_files],
        # A hub's commit names its content, so that a finished fine-tune is not fetched again.
        "finetune": _digest(Path(config.finetune)) if found is None else [found.id, found.commit],
        "settings": settings_of(config),
        "text": _file_digest(Path(text)) if text is not None and Path(text).is_file() else text,
        "device": None if config.fit_settings is None else config.fit_settings.torch_device().type,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _digest(directory: Path, wanted: Callable[[str], bool] = lambda name: True) -> str:
    """Return the SHA-256 of the names and contents of a checkpoint's files."""
    paths = {path for pattern in WANTED for path in directory.rglob(pattern) if path.is_file()}
    unwanted = {path for pattern in UNWANTED for path in directory.glob(pattern)}
    names = {str(path.relative_to(directory)): path for path in paths - unwanted}
    listed = [(name, _file_digest(path)) for name, path in sorted(names.items()) if wanted(name)]
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Record:
    """The finished artifacts of a directory: `finished.json` in it, replaced as a whole when one more is finished."""

    def __init__(self, path: Path, finished: dict[str, Any], fetched: dict[str, str]) -> None:
        self._path = path
        self._finished = (
            finished  # by name: the digest of its inputs, its own digest, its bytes at 16 bits, its rival
        )
        self._fetched = fetched  # hub ids by commit, of models that this command downloads

    @classmethod
    def read(cls, directory: Path) -> Record:
        """Make the directory if it is missing, and read its record; a damaged one counts as none.

        Raises:
            UsageError: the directory cannot be made or written to.
        """
        path = directory / RECORD
        try:
            directory.mkdir(parents=True, exist_ok=True)
            document = json.loads(path.read_bytes()) if path.is_file() else {}
            finished, fetched = (document.get(key, {}) for key in ("finished", "fetched"))
            if not (isinstance(finished, dict) and isinstance(fetched, dict)):
                raise ValueError
        except OSError as error:
            raise UsageError(f"{directory}: {error.strerror}: give another {OUT} in the file") from error
        except (ValueError, AttributeError, RecursionError):
            print(f"{path}: it is damaged: the artifacts are made again", file=sys.stderr)
            finished, fetched = {}, {}
        return cls(path, finished, fetched)

    def kept(self, entry: Entry, inputs: str) -> Outcome | None:
        """Return the outcome of an artifact that is there as it was finished, from the same inputs; else None.

        Raises:
            FidelityError: it agrees less with its fine-tune than is asked for now.
        """
        noted, config = self._finished.get(entry.name), entry.config
        if not isinstance(noted, dict) or noted.get("inputs") != inputs or not config.out.is_file():
            return None
        if config.report is not None and not (config.report / CARD).is_file():
            return None
        digest = _file_digest(config.out)
        if digest != noted.get("digest"):
            return None
        try:
            with Artifact.open(config.out) as artifact:
                fidelity, size_bytes = artifact.manifest.fidelity, artifact.size_bytes
        except ArtifactError:
            return None
        if (held_out := fidelity.get("held_out")) is not None:
            check_agreement(config, held_out["agreement"])
        full_bytes, rival = noted.get("full_bytes"), noted.get("rival") if config.rival else None
        return Outcome(entry.name, config.out, "kept", 0.0, digest, size_bytes, full_bytes, fidelity, rival)

    def note(self, name: str, inputs: str, result: CompressResult) -> None:
        """Note a finished artifact. Raises StorageFull."""
        self._finished[name] = {
            "inputs": inputs,
            "digest": result.digest,
            "full_bytes": result.full_bytes,
            "rival": None if result.rival is None else result.rival.as_json(),
        }
        self._write()

    def note_fetched(self, model: HubModel) -> None:
        """Note a model before it is downloaded. Raises StorageFull."""
        self._fetched[model.commit] = model.id
        self._write()

    def forget_fetched(self) -> None:
        """Remove the models that this command downloaded from huggingface_hub's cache. Raises StorageFull."""
        if not self._fetched:
            return
        cached = huggingface_hub.scan_cache_dir(huggingface_hub.constants.HF_HUB_CACHE)
        cached.delete_revisions(*_commits(cached.repos, self._fetched)).execute()
        self._fetched.clear()
        self._write()

    def _write(self) -> None:
        partial = self._path.with_name(f".{RECORD}")
        content = json.dumps({"finished": self._finished, "fetched": self._fetched}, indent=2)
        try:
            with partial.open("w") as opened:
                opened.write(content)
                opened.flush()
                os.fsync(opened.fileno())
            os.replace(partial, self._path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise StorageFull(
                f"{self._path}: {error.strerror}: free some space there and run the same command again"
            ) from error


def _commits(repos: Iterable[Any], fetched: Mapping[str, str]) -> list[str]:
    """Return the commits in the cache that were fetched."""
    return [
        revision.commit_hash
        for repo in repos
        for revision in repo.revisions
        if fetched.get(revision.commit_hash) == repo.repo_id
    ]
