"""Three processes that change the same variants of one registry while they are killed and stopped at random.

No file of a registry is ever locked: `flock` fails in every process. Each process writes a line before a change and
another after its acknowledgement, from which `run` checks that no acknowledged change was lost.

A program, `python -m tests.deltastore.helpers.stress DIRECTORY REGISTRY SECONDS SEED`, because it forks; the processes
keep their logs and caches in the directory. It prints JSON.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path, PurePath
from typing import Any, NoReturn
from unittest.mock import patch

from deltastore.errors import RegistryError, RegistryUnavailable, UsageError, VariantNotFound
from deltastore.registry import Registry, uploads
from deltastore.registry.claims import is_bucket
from deltastore.registry.object_cache import ObjectCache
from deltastore.registry.store import SmallFiles
from deltastore.registry.variants import VariantDirectory
from tests.deltastore.helpers.crash_storage import artifact, digest_of, push

NAMES, SEEDS = ("a", "b"), range(5)
NUM_PROCESSES = 3
# Weights of the changes.
CHANGES = {"publish": 8, "promote": 4, "delete": 2, "end": 1, "collect": 5, "read": 4}
# In place of a day, because no lock tells that an upload's process has died.
ABANDONED_AFTER_S = 20
CACHE_BYTES = 1 << 24
# A run on a slow machine goes on until so many of each have happened, for at most `PATIENCE_S` more.
MIN_KILLS, MIN_ACKNOWLEDGED = 4, 4
PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class Findings:
    """The counts of acknowledged publications, promotions and collections, and what is wrong with the registry."""

    num_acknowledged: dict[str, int]
    num_kills: int
    problems: list[str]


def run(directory: Path, location: str, seconds: float, seed: int) -> Findings:
    """Stress a registry that does not exist yet, then check it against what was acknowledged."""
    draw = random.Random(seed)
    logs = [directory / f"log-{number}" for number in range(NUM_PROCESSES)]
    processes = [_start(location, log, draw.randrange(1 << 30)) for log in logs]
    end = time.monotonic() + seconds
    num_kills = 0
    while time.monotonic() < end or (
        time.monotonic() < end + PATIENCE_S
        and (num_kills < MIN_KILLS or min(_acknowledged(logs).values()) < MIN_ACKNOWLEDGED)
    ):
        # A machine that is late needs longer lives for its changes.
        time.sleep(draw.uniform(0.02, 0.3) * (10 if time.monotonic() >= end else 1))
        index = draw.randrange(NUM_PROCESSES)
        if draw.random() < 0.3:
            os.kill(processes[index], signal.SIGSTOP)
            time.sleep(draw.uniform(0.05, 0.3))
            os.kill(processes[index], signal.SIGCONT)
            continue
        _kill(processes[index])
        num_kills += 1
        processes[index] = _start(location, logs[index], draw.randrange(1 << 30))
    for process in processes:
        _kill(process)
    lines = [line for log in logs for line in _lines(log)]
    problems = [*_problems(_opened(location, directory / "cache"), lines)]
    return Findings(_acknowledged(logs), num_kills, problems)


def _acknowledged(logs: list[Path]) -> dict[str, int]:
    """Count the acknowledged changes of the kinds that a run must have."""
    done = Counter(line["kind"] for log in logs for line in _lines(log) if line["is_done"])
    return {kind: done[kind] for kind in ("publish", "promote", "collect")}


def _start(location: str, log: Path, seed: int) -> int:
    # The parent makes no call of a bucket before the last fork: obstore's threads do not survive one.
    process = os.fork()
    if process == 0:
        work(location, log, seed)
    return process


def _opened(location: str, cache: Path) -> Registry:
    if not is_bucket(location):
        return Registry.open(location, None)
    # Not before the last fork, either.
    from deltastore.registry.bucket import client

    # The tests' S3 server may take long on a busy machine.
    client.SMALL_TIMEOUT = client.SMALL_RETRY_TIMEOUT = timedelta(seconds=60)
    return Registry.open(location, ObjectCache(cache, CACHE_BYTES))


def _kill(process: int) -> None:
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)


def _lines(log: Path) -> Iterator[dict[str, Any]]:
    for line in log.read_bytes().splitlines():
        # A kill may cut the last one short.
        with suppress(ValueError):
            yield json.loads(line)


def _problems(registry: Registry, lines: list[dict[str, Any]]) -> Iterator[str]:
    """Yield what contradicts the acknowledged changes."""
    acknowledged = [line for line in lines if line["is_done"]]
    yield from (line["problem"] for line in lines if line["problem"])
    for report in (registry.check(), (registry.gc(), registry.check())[1]):
        yield from (f"{finding.path}: {finding.problem}" for finding in report.findings)
    for name in NAMES:
        mine = [line for line in acknowledged if line["name"] == name]
        directory = VariantDirectory(registry.files, "default", name)
        history = directory.history()
        digests: dict[int, str] = {}
        for line in (line for line in mine if line["kind"] == "publish"):
            if digests.setdefault(line["version"], line["digest"]) != line["digest"]:
                yield f"{name}@{line['version']} was acknowledged with two digests"
        for version, digest in digests.items():
            # The records of deleted versions are removed.
            if history.is_live(version) and directory.record(version).digest != digest:
                yield f"{name}@{version} has other bytes than were acknowledged"
        for line in mine:
            if line["kind"] == "delete" and history.state.is_live(line["version"]):
                yield f"{name}@{line['version']} is there although its deletion was acknowledged"
        # Of every deletion that was begun, acknowledged or not.
        begun = [line for line in lines if line["name"] == name and line["kind"] in ("delete", "end")]
        if not begun and set(digests) - set(history.live):
            yield f"versions of {name} are missing"
        yield from _chain_problems(registry.files, directory.path, mine)


def _chain_problems(
    files: SmallFiles, directory: PurePath, acknowledged: list[dict[str, Any]]
) -> Iterator[str]:
    """Yield what is wrong with the order of a variant's changes, of which gc has kept the newest."""
    paths = [directory / name for name in sorted(files.names(directory)) if name.startswith("state-")]
    entries = [(raw, json.loads(raw)) for raw in map(files.read, paths)]
    for (raw, before), (_, after), path in zip(entries, entries[1:], paths[1:], strict=False):
        if after["after"] != hashlib.sha256(raw).hexdigest():
            yield f"{path} was not made after the entry before it"
        if not _deleted(before) <= _deleted(after):
            yield f"{path} has a deleted version again"
        if after["deleted_through"] < before["deleted_through"]:
            yield f"{path} takes a deletion back"
    if paths and paths[0].name == "state-000001.json":
        promoted = {line["version"] for line in acknowledged if line["kind"] == "promote"}
        for version in sorted(promoted - {entry["active"] for _, entry in entries}):
            yield f"the promotion of {directory.name}@{version} was lost"


def _deleted(state: dict[str, Any]) -> set[int]:
    numbers = set(range(state["deleted_through"] + 1))
    return numbers.union(*(range(first, last + 1) for first, last in state["deleted"]))


def _refuse_lock(fd: int, operation: int) -> NoReturn:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def work(location: str, log: Path, seed: int) -> NoReturn:
    """Make changes until this process is killed."""
    uploads.ABANDONED_AFTER_S = ABANDONED_AFTER_S
    draw = random.Random(seed)
    # The cache of a bucket is local and may be locked.
    refusing = nullcontext() if is_bucket(location) else patch.object(fcntl, "flock", _refuse_lock)
    with refusing, log.open("ab", buffering=0) as lines:
        registry = _opened(location, log.with_suffix(".cache"))
        while True:
            (kind,) = draw.choices(list(CHANGES), list(CHANGES.values()))
            name = draw.choice(NAMES)
            line: dict[str, object] = {"kind": kind, "name": name, "is_done": False, "problem": ""}
            lines.write(json.dumps(line).encode() + b"\n")
            try:
                line |= _change(registry, kind, name, draw)
            except (VariantNotFound, UsageError):
                continue
            except (RegistryError, RegistryUnavailable) as error:
                line["problem"] = f"{kind} failed: {error}"
            lines.write(json.dumps({**line, "is_done": not line["problem"]}).encode() + b"\n")


def _change(registry: Registry, kind: str, name: str, draw: random.Random) -> dict[str, object]:
    if kind == "collect":
        registry.gc()
        return {}
    if kind == "publish":
        seed = draw.choice(SEEDS)
        published = push(registry, artifact(seed), name, activate=draw.random() < 0.7).record
        return {
            "version": published.version,
            "digest": digest_of(seed),
            "problem": _unreadable(registry, name, published.version),
        }
    if kind == "end":
        registry.delete("default", name)
        return {}
    record = draw.choice(registry.variant("default", name).versions)
    if kind == "read":
        return {"problem": _unreadable(registry, name, record.version)}
    if kind == "promote":
        registry.activate("default", name, record.version)
    else:
        registry.delete("default", name, record.version)
    return {"version": record.version}


def _unreadable(registry: Registry, name: str, version: int) -> str:
    """Read a version's object as a load does; return what is wrong with it, or "" also if it is deleted by now."""
    try:
        record = registry.resolve("default", name, version)
        while True:
            try:
                data = registry.object_path(record).read_bytes()
                break
            except FileNotFoundError:
                if registry.recover(record):
                    continue
                if registry.is_live(record):
                    return f"the object of {record.label} is missing"
                return ""
    except VariantNotFound:
        return ""
    return "" if len(data) == record.size_bytes else f"the object of {record.label} is damaged"


if __name__ == "__main__":
    directory, location, seconds, seed = sys.argv[1:]
    print(json.dumps(asdict(run(Path(directory), location, float(seconds), int(seed)))))
