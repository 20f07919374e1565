"""A model of a disk that loses power: what is durable before every change, and a disk that is full besides."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from deltastore.registry.storage import MODE
from tests.deltastore.helpers.crash_storage import SteppedStorage

Tree = dict[Path, bytes | None]  # None is a directory
Luck = Callable[[], bool]


@dataclass(frozen=True)
class Moment:
    """A model of the disk: durable contents, and unsynced changes that it may hold or not."""

    base: Path
    durable: dict[Path, dict[str, int]]  # names in each directory; a directory is -1
    pending: tuple[tuple[Path, dict[str, int | None]], ...]  # changes of names, each within one directory
    written: dict[int, bytes]
    synced: dict[int, bytes]

    def surviving(self, keeps_name: Luck, keeps_bytes: Luck) -> Tree:
        """Return the contents after a restart; the arguments say for each unsynced change if the disk had it."""
        names = {directory: dict(entries) for directory, entries in self.durable.items()}
        for directory, change in self.pending:
            if keeps_name():
                apply(names[directory], change)
        tree: Tree = {}
        self._collect(self.base, names, keeps_bytes, tree)
        return tree

    def _collect(
        self, directory: Path, names: dict[Path, dict[str, int]], keeps_bytes: Luck, tree: Tree
    ) -> None:
        for name, node in names[directory].items():
            path = directory / name
            if node < 0:
                tree[path] = None
                self._collect(path, names, keeps_bytes, tree)
            else:
                tree[path] = self.written[node] if keeps_bytes() else self.synced[node]


class VolatileStorage(SteppedStorage):
    """Storage that tracks what is durable and records the disk's state before every change, for tests of power loss.

    A file's bytes are durable after its fsync, a name after its directory's. The two names of a rename within one
    directory change together; every other change is lost or kept independently. With `fails_at`, that fsync fails and
    the file's bytes are lost; the next fsync succeeds without them, as on Linux.
    """

    def __init__(self, base: Path, fails_at: int | None = None) -> None:
        super().__init__()
        self.base = base
        self.fails_at = fails_at
        self.num_fsyncs = 0
        self.moments: list[Moment] = []
        self.nodes: dict[Path, int] = {}  # what a name means now
        self.durable: dict[Path, dict[str, int]] = {base: {}}
        self.pending: list[tuple[Path, dict[str, int | None]]] = []
        self.written: dict[int, bytes] = {}
        self.synced: dict[int, bytes] = {}
        self.lost: set[int] = set()
        self.open: dict[int, int] = {}
        self.positions: dict[int, int] = {}
        for path in sorted(base.rglob("*")):
            self._adopt(path)

    def now(self) -> Moment:
        durable = {directory: dict(names) for directory, names in self.durable.items()}
        return Moment(self.base, durable, tuple(self.pending), dict(self.written), dict(self.synced))

    def stop(self, name: str) -> None:
        self.stop_at = None
        raise KeyboardInterrupt  # the process ends, the machine goes on

    def step(self, name: str) -> None:
        super().step(name)
        self.moments.append(self.now())

    def make_dir(self, path: Path) -> None:
        super().make_dir(path)
        self.nodes[path] = -1
        self.durable[path] = {}
        self.pending.append((path.parent, {path.name: -1}))

    def create(self, path: Path, mode: int = MODE) -> int:
        fd = super().create(path, mode)
        self._begin(path, fd)
        return fd

    def open_again(self, path: Path) -> int:
        fd = super().open_again(path)
        self.open[fd], self.positions[fd] = self.nodes[path], 0
        return fd

    def write_some(self, fd: int, data: memoryview) -> None:
        super().write_some(fd, data)
        old, position = self.written[self.open[fd]], self.positions[fd]
        self.positions[fd] += len(data)
        self.written[self.open[fd]] = old[:position] + bytes(data) + old[self.positions[fd] :]

    def truncate(self, fd: int, num_bytes: int) -> None:
        super().truncate(fd, num_bytes)
        self.written[self.open[fd]] = self.written[self.open[fd]][:num_bytes]

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        node = self.nodes[target] = self.nodes.pop(source)
        if source.parent == target.parent:
            self.pending.append((target.parent, {source.name: None, target.name: node}))
        else:
            self.pending += [(target.parent, {target.name: node}), (source.parent, {source.name: None})]

    def link(self, source: Path, target: Path) -> None:
        super().link(source, target)
        self.nodes[target] = self.nodes[source]
        self.pending.append((target.parent, {target.name: self.nodes[source]}))

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        self.nodes.pop(path)
        self.pending.append((path.parent, {path.name: None}))

    def sync_file(self, fd: int) -> None:
        node = self.open[fd]
        if self._fails():
            self.lost.add(node)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if node not in self.lost:
            self.synced[node] = self.written[node]

    def sync_dir(self, path: Path) -> None:
        if self._fails():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        for directory, change in self.pending:
            if directory == path:
                apply(self.durable[directory], change)
        self.pending = [(directory, change) for directory, change in self.pending if directory != path]

    def _fails(self) -> bool:
        self.num_fsyncs += 1
        return self.num_fsyncs - 1 == self.fails_at

    def _adopt(self, path: Path) -> None:
        node = -1 if path.is_dir() else len(self.written)
        self.nodes[path] = self.durable[path.parent][path.name] = node
        if node < 0:
            self.durable[path] = {}
        else:
            self.written[node] = self.synced[node] = path.read_bytes()

    def _begin(self, path: Path, fd: int) -> None:
        node = len(self.written)
        self.nodes[path] = self.open[fd] = node
        self.positions[fd] = 0
        self.written[node] = self.synced[node] = b""
        self.pending.append((path.parent, {path.name: node}))


class FullStorage(VolatileStorage):
    """A volatile disk without a free byte at first: it takes what was freed, and refuses every byte more."""

    def __init__(self, base: Path) -> None:
        super().__init__(base)
        self.capacity = self._used()

    def write_some(self, fd: int, data: memoryview) -> None:
        end = self.positions[fd] + len(data)
        if self._used() + max(end - len(self.written[self.open[fd]]), 0) > self.capacity:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write_some(fd, data)

    def _used(self) -> int:
        return sum(len(self.written[node]) for node in set(self.nodes.values()) if node >= 0)


def apply(names: dict[str, int], change: dict[str, int | None]) -> None:
    for name, node in change.items():
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


def rebuild(base: Path, tree: Tree) -> None:
    """Replace everything in `base`."""
    shutil.rmtree(base)
    base.mkdir()
    for path, data in tree.items():  # a directory comes before what is in it
        if data is None:
            path.mkdir()
        else:
            path.write_bytes(data)
