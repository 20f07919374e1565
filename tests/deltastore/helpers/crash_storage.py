"""Storage that stops at a chosen change: the process dies, the power fails, the disk refuses.

Also the steps that the registry's crash tests interrupt, and, run as a program, their victims: `kill` dies at
every change in turn, `publish` and `churn` work against each other in two processes.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from deltastore.errors import VariantNotFound
from deltastore.registry import Publication, Registry
from deltastore.registry.records import ArtifactFacts, VersionRecord, Visibility
from deltastore.registry.storage import MODE, Storage
from deltastore.registry.uploads import kernel_id

FACTS = ArtifactFacts(
    data_start=4096,
    device_bytes=1000,
    base_fingerprint="ab" * 32,
    method="both",
    fidelity={"held_out": {"kl": 0.5, "agreement": 0.75}},
)
View = dict[str, object]


class SteppedStorage(Storage):
    """Storage that counts changes from 0 and, from number `stop_at` on, calls `stop` in place of each."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.stop_at = stop_at
        self.calls: list[str] = []

    def stop(self, name: str) -> None:
        raise NotImplementedError(name)

    def step(self, name: str) -> None:
        self.calls.append(name)
        if self.stop_at is not None and len(self.calls) > self.stop_at:
            self.stop(name)

    def make_dir(self, path: Path) -> None:
        self.step("make_dir")
        super().make_dir(path)

    def create(self, path: Path, mode: int = MODE) -> int:
        self.step("create")
        return super().create(path, mode)

    def write(self, fd: int, data: memoryview) -> None:
        half = len(data) // 2
        self.write_some(fd, data[:half])
        self.step("write")  # which may stop halfway
        self.write_some(fd, data[half:])

    def write_some(self, fd: int, data: memoryview) -> None:
        super().write(fd, data)

    def truncate(self, fd: int, num_bytes: int) -> None:
        self.step("truncate")
        super().truncate(fd, num_bytes)

    def fsync(self, fd: int) -> None:
        self.step("fsync")
        self.sync_file(fd)

    def fsync_dir(self, path: Path) -> None:
        self.step("fsync_dir")
        self.sync_dir(path)

    def sync_file(self, fd: int) -> None:
        """The kernel outlives the process, so a killed process needs no real fsync."""

    def sync_dir(self, path: Path) -> None:
        """A killed process needs no real fsync of directories either."""

    def rename(self, source: Path, target: Path) -> None:
        self.step("rename")
        super().rename(source, target)

    def link(self, source: Path, target: Path) -> None:
        self.step("link")
        super().link(source, target)

    def unlink(self, path: Path) -> None:
        self.step("unlink")
        super().unlink(path)


class KillStorage(SteppedStorage):
    """Kill the process by SIGKILL, so that no `finally` runs."""

    def stop(self, name: str) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class RefusingStorage(SteppedStorage):
    """Let one change, counted among those of some kinds, raise; later changes succeed."""

    def __init__(self, stop_at: int | None, error: BaseException, kinds: tuple[str, ...]) -> None:
        super().__init__(stop_at)
        self.error = error
        self.kinds = kinds
        self.has_raised = False

    def step(self, name: str) -> None:
        if name in self.kinds:
            super().step(name)

    def stop(self, name: str) -> None:
        if not self.has_raised:
            self.has_raised = True
            raise self.error


def artifact(seed: int, num_bytes: int = 3000) -> bytes:
    """Return bytes to publish; the registry does not interpret them."""
    return random.Random(seed).randbytes(num_bytes)


def digest_of(seed: int) -> str:
    return hashlib.sha256(artifact(seed)).hexdigest()


def stored(seed: int) -> VersionRecord:
    """Return a record that has the bytes of `artifact(seed)`, for calls that take an object by its record."""
    return VersionRecord(
        tenant="default",
        name="any",
        version=1,
        digest=digest_of(seed),
        size_bytes=len(artifact(seed)),
        data_start=FACTS.data_start,
        device_bytes=FACTS.device_bytes,
        base_fingerprint=FACTS.base_fingerprint,
        chunk_sha256=(digest_of(seed),),
        created_at="2026-01-01T00:00:00.000+00:00",
        method=FACTS.method,
        report="0" * 32,
        activate=True,
    )


def push(
    registry: Registry, data: bytes, name: str, tenant: str = "default", activate: bool = True
) -> Publication:
    """Upload and publish."""
    with registry.open_upload(None) as upload:
        upload.write(data)
        return registry.publish(upload.seal(), FACTS, tenant=tenant, name=name, activate=activate)


def make_world(root: Path) -> None:
    """Make a registry with every kind of file, all of them durable."""
    registry = Registry(root, SteppedStorage())
    for seed in (1, 2):
        push(registry, artifact(seed), "a")
    push(registry, artifact(3), "a", activate=False)
    push(registry, artifact(2), "b")
    push(registry, artifact(4), "c", tenant="third")
    for seed in (1, 2, 3):
        push(registry, artifact(seed), "pruned")
    registry.delete("default", "pruned", 2)
    push(registry, artifact(5), "gone")
    registry.delete("default", "gone")
    push(registry, artifact(6), "sick")
    registry.quarantine(stored(6), "a test broke it")
    push(registry, artifact(7), "dropped")
    registry.quarantine(stored(7), "a test broke it, and no version needs it")
    (root / "objects" / digest_of(7)).write_bytes(b"rotten")  # as if the quarantine had been cut short
    registry.delete("default", "dropped")
    registry.set_visibility("default", "b", "public")
    push(registry, artifact(2), "gone", tenant="other")
    (root / "uploads" / f"{kernel_id()}-{'0' * 32}.part").write_bytes(b"half an upl")


def view(registry: Registry) -> View:
    """Collect everything that a user can see of a registry."""
    variants = registry.variants()
    seen: View = {
        f"{variant.tenant}/{variant.name}": (
            variant.active,
            variant.visibility,
            [(r.version, r.digest) for r in variant.versions],
        )
        for variant in variants
    }
    needed = [record for variant in variants for record in variant.versions]
    seen["quarantined"] = {record.digest for record in needed if registry.is_quarantined(record)}
    return seen


def delete(registry: Registry, name: str, version: int | None = None) -> None:
    with suppress(VariantNotFound):  # deleted already, where this is the second try
        registry.delete("default", name, version)


def show(registry: Registry, name: str, visibility: Visibility, tenant: str = "default") -> None:
    registry.set_visibility(tenant, name, visibility)


STEPS: dict[str, Callable[[Registry], object]] = {
    "publish": lambda registry: push(registry, artifact(9), "a"),
    "publish without activating": lambda registry: push(registry, artifact(9), "a", activate=False),
    "publish for a new tenant": lambda registry: push(registry, artifact(9), "new", tenant="new"),
    "publish the bytes of another variant": lambda registry: push(registry, artifact(1), "b"),
    "publish the same bytes again": lambda registry: push(registry, artifact(1), "a"),
    "publish under a deleted name": lambda registry: push(registry, artifact(5), "gone"),
    "activate": lambda registry: registry.activate("default", "a", 1),
    "delete a version": lambda registry: delete(registry, "a", 1),
    "delete a version of a pruned variant": lambda registry: delete(registry, "pruned", 1),
    "delete a variant": lambda registry: delete(registry, "a"),
    "delete a public variant": lambda registry: delete(registry, "b"),
    "make a variant public": lambda registry: show(registry, "a", "public"),
    "make a public variant public again": lambda registry: show(registry, "b", "public"),
    "make a public variant private": lambda registry: show(registry, "b", "private"),
    "take over a public name": lambda registry: show(registry, "gone", "public", "other"),
    "publish for a public name": lambda registry: push(registry, artifact(9), "b"),
    "quarantine": lambda registry: registry.quarantine(stored(4), "a test broke it too"),
    "heal": lambda registry: push(registry, artifact(6), "sick"),
    "collect": lambda registry: registry.gc(),
}


def kill_at_every_step(step: str, base: Path) -> list[int]:
    """Run a step in children that die at their first, second... change, each on its own copy of `base/world`.

    Returns the signal that ended each, the last of them 0: it came through.
    """
    signals: list[int] = []
    while not signals or signals[-1]:
        root = base / str(len(signals))
        shutil.copytree(base / "world", root)
        child = os.fork()
        if child == 0:
            STEPS[step](Registry(root, KillStorage(len(signals))))
            os._exit(0)
        signals.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    return signals


def publish_many(root: Path, name: str, seeds: range) -> list[tuple[int, str]]:
    registry = Registry(root)
    records = [push(registry, artifact(seed), name).record for seed in seeds]
    return [(record.version, record.digest) for record in records]


def churn(root: Path, name: str, rounds: int) -> None:
    """Repeatedly publish the same bytes, check that they are stored and delete them."""
    registry = Registry(root)
    for _ in range(rounds):
        push(registry, artifact(1), name)
        record = registry.resolve("default", name)
        assert _read(registry, record) == artifact(1), "collected under a live version"
        registry.delete("default", name)


def _read(registry: Registry, record: VersionRecord) -> bytes:
    """Read an object as a load does: a gc that began before its publication may have set it aside for a moment."""
    while True:
        try:
            return registry.object_path(record).read_bytes()
        except FileNotFoundError:
            assert registry.recover(record), "collected under a live version"


if __name__ == "__main__":
    mode, directory, what, *rest = sys.argv[1:]
    if mode == "kill":
        print(json.dumps(kill_at_every_step(what, Path(directory))))
    elif mode == "publish":
        print(json.dumps(publish_many(Path(directory), what, range(*map(int, rest)))))
    else:
        churn(Path(directory), what, int(rest[0]))
