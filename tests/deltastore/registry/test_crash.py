"""After a crash, a power loss or a failure of any change, the registry holds everything that it acknowledged."""

from __future__ import annotations

import errno
import json
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from deltastore.errors import RegistryUnavailable, StorageFull
from deltastore.registry import Registry
from deltastore.registry.storage import RESERVE_SIZES
from tests.deltastore.helpers.crash_storage import (
    STEPS,
    RefusingStorage,
    SteppedStorage,
    View,
    artifact,
    digest_of,
    push,
    stored,
    view,
)
from tests.deltastore.helpers.volatile_storage import FullStorage, Moment, Tree, VolatileStorage, rebuild

REPOSITORY = Path(__file__).resolve().parents[3]
NEEDS_ROOM = ("make_dir", "create", "write", "fsync", "fsync_dir", "rename", "link")
CHANGES = (*NEEDS_ROOM, "truncate", "unlink")
# Steps that a full disk has a reserve for.
RESERVED = (
    "activate",
    "delete a version",
    "delete a version of a pruned variant",
    "delete a variant",
    "delete a public variant",
    "make a variant public",
    "make a public variant private",
    "take over a public name",
    "quarantine",
)


def never() -> bool:
    return False


def always() -> bool:
    return True


def outcomes(world: Path, step: str, scratch: Path) -> tuple[View, View]:
    """The states that a user may see around a step."""
    root = Path(shutil.copytree(world, scratch / "undisturbed"))
    registry = Registry(root, SteppedStorage())
    before = view(registry)
    STEPS[step](registry)
    after = view(registry)
    shutil.rmtree(root)
    return before, after


def assert_whole(root: Path, step: str, allowed: list[View], after: View) -> None:
    """Check that the registry shows an allowed state, is clean, and accepts the same step again."""
    registry = Registry(root, SteppedStorage())
    assert view(registry) in allowed
    assert registry.check().findings == ()
    STEPS[step](registry)
    assert view(registry) == after
    registry.gc()
    report = registry.check()
    assert report.findings == ()
    assert all(note.problem.startswith("quarantined") for note in report.notes)


def chance(seed: int) -> Callable[[], bool]:
    coins = random.Random(seed)
    return lambda: coins.random() < 0.5


def survivors(moment: Moment, seed: int) -> Iterator[Tree]:
    """Yield the disks that a restart may find after a power loss at one moment."""
    yield moment.surviving(never, never)
    yield moment.surviving(always, never)
    yield moment.surviving(never, always)
    yield moment.surviving(chance(seed), chance(seed + 1))
    yield moment.surviving(chance(seed + 2), chance(seed + 3))


def distinct(trees: Iterable[Tree]) -> list[Tree]:
    return list({tuple(sorted(tree.items())): tree for tree in trees}.values())


def assert_survives(storage: VolatileStorage, step: str, base: Path, before: View, after: View) -> None:
    """Check every disk that a power loss during a finished step may leave, and those of one after it."""
    found = (tree for n, moment in enumerate(storage.moments) for tree in survivors(moment, 10 * n))
    for tree in distinct(found):
        rebuild(base, tree)
        assert_whole(base / "registry", step, [before, after], after)
    for tree in distinct(survivors(storage.now(), 0)):
        rebuild(base, tree)
        assert_whole(base / "registry", step, [after], after)


@pytest.mark.parametrize("step", STEPS)
def test_after_a_power_loss_the_registry_is_as_before_the_step_or_as_after_it(
    step: str, world: Path, scratch: Path
) -> None:
    before, after = outcomes(world, step, scratch)
    base = scratch / "disk"
    shutil.copytree(world, base / "registry")
    storage = VolatileStorage(base)
    STEPS[step](Registry(base / "registry", storage))
    assert len(storage.moments) > 5
    assert_survives(storage, step, base, before, after)


def test_a_registry_that_is_just_being_made_survives_a_power_loss(scratch: Path) -> None:
    base = scratch / "disk"
    base.mkdir()
    root = base / "new" / "registry"
    storage = VolatileStorage(base)
    push(Registry(root, storage), artifact(9), "a")
    acknowledged = distinct(survivors(storage.now(), 0))
    moments = enumerate(storage.moments)
    for tree in [*distinct(tree for n, moment in moments for tree in survivors(moment, n)), *acknowledged]:
        rebuild(base, tree)
        registry = Registry(root, SteppedStorage())
        assert len(registry.variants()) in ((1,) if tree in acknowledged else (0, 1))
        assert registry.check().findings == ()
        assert push(registry, artifact(9), "a").active_version == 1


@pytest.mark.parametrize("step", STEPS)
def test_what_one_process_left_unsynced_is_durable_once_another_acknowledges_it(
    step: str, world: Path, scratch: Path
) -> None:
    _, after = outcomes(world, step, scratch)
    for stop_at in range(num_changes(step, world, scratch, CHANGES)):
        base = scratch / str(stop_at)
        shutil.copytree(world, base / "registry")
        storage = interrupted(base, stop_at, step)
        STEPS[step](Registry(base / "registry", storage))
        rebuild(base, storage.now().surviving(never, never))
        assert_whole(base / "registry", step, [after], after)


def test_directories_that_a_dead_process_made_are_durable_once_another_publishes(scratch: Path) -> None:
    counted = SteppedStorage()
    push(Registry(scratch / "counted", counted), artifact(9), "new", tenant="new")
    for stop_at in range(len(counted.calls)):
        base = scratch / str(stop_at)
        base.mkdir()
        storage = interrupted(base, stop_at, "publish for a new tenant")
        push(Registry(base / "registry", storage), artifact(1), "a")
        rebuild(base, storage.now().surviving(never, never))
        assert Registry(base / "registry", SteppedStorage()).resolve("default", "a").digest == digest_of(1)


def interrupted(base: Path, stop_at: int, step: str) -> VolatileStorage:
    """The disk of a process that ended at one change of a step."""
    storage = VolatileStorage(base)
    storage.stop_at = stop_at
    with pytest.raises(KeyboardInterrupt):
        STEPS[step](Registry(base / "registry", storage))
    return storage


@pytest.mark.parametrize("step", STEPS)
def test_a_process_killed_at_any_step_leaves_what_it_acknowledged(
    step: str, world: Path, scratch: Path
) -> None:
    before, after = outcomes(world, step, scratch)
    shutil.copytree(world, scratch / "world")
    done = subprocess.run(
        [sys.executable, "-m", "tests.deltastore.helpers.crash_storage", "kill", str(scratch), step],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    endings = json.loads(done.stdout)
    assert endings == [-signal.SIGKILL] * (len(endings) - 1) + [0]
    assert len(endings) > 5
    for number, ending in enumerate(endings):
        assert_whole(scratch / str(number), step, [before, after] if ending else [after], after)


@pytest.mark.parametrize("step", STEPS)
def test_an_interrupt_at_any_step_leaves_the_old_state_or_the_new_one(
    step: str, world: Path, scratch: Path
) -> None:
    before, after = outcomes(world, step, scratch)
    for stop_at in range(num_changes(step, world, scratch, CHANGES)):
        root = Path(shutil.copytree(world, scratch / str(stop_at)))
        with pytest.raises(KeyboardInterrupt):
            STEPS[step](Registry(root, RefusingStorage(stop_at, KeyboardInterrupt(), CHANGES)))
        assert_whole(root, step, [before, after], after)


@pytest.mark.parametrize("step", STEPS)
def test_a_disk_that_is_full_at_any_step_is_reported_and_nothing_is_left_behind(
    step: str, world: Path, scratch: Path
) -> None:
    before, after = outcomes(world, step, scratch)
    for stop_at in range(num_changes(step, world, scratch, NEEDS_ROOM)):
        root = Path(shutil.copytree(world, scratch / str(stop_at)))
        error = OSError(errno.ENOSPC if stop_at % 2 else errno.EDQUOT, "no room")
        refusal = refusal_of(step, root, RefusingStorage(stop_at, error, NEEDS_ROOM))
        if refusal:
            assert re.search(f"under {root} is full.*`peraxis registry gc --registry {root}`", refusal)
        else:
            assert step in (*RESERVED, "collect")
            assert view(Registry(root, SteppedStorage())) == after
        if view(Registry(root, SteppedStorage())) == before:
            assert files(root) <= files(world)
        assert_whole(root, step, [before, after], after)


def refusal_of(step: str, root: Path, storage: RefusingStorage) -> str:
    """Run a step and return the message with which the full disk refuses it, or "" if it succeeds."""
    try:
        STEPS[step](Registry(root, storage))
    except StorageFull as error:
        return str(error)
    return ""


@pytest.mark.parametrize("step", RESERVED)
def test_on_a_full_disk_a_step_with_a_reserve_survives_a_power_loss(
    step: str, world: Path, scratch: Path
) -> None:
    before, after = outcomes(world, step, scratch)
    base = scratch / "disk"
    shutil.copytree(world, base / "registry")
    storage = FullStorage(base)
    STEPS[step](Registry(base / "registry", storage))
    assert "truncate" in storage.calls
    assert_survives(storage, step, base, before, after)


@pytest.mark.parametrize("step", RESERVED)
def test_a_process_that_ends_while_it_uses_the_reserve_leaves_a_registry_that_sets_the_next_one_aside(
    step: str, world: Path, scratch: Path
) -> None:
    before, after = outcomes(world, step, scratch)
    base = scratch / "counted"
    shutil.copytree(world, base / "registry")
    counted = FullStorage(base)
    STEPS[step](Registry(base / "registry", counted))
    for stop_at in range(len(counted.calls)):
        base = scratch / str(stop_at)
        shutil.copytree(world, base / "registry")
        storage = FullStorage(base)
        storage.stop_at = stop_at
        with pytest.raises(KeyboardInterrupt):
            STEPS[step](Registry(base / "registry", storage))
        assert_whole(base / "registry", step, [before, after], after)
        assert (base / "registry" / "reserve" / "space").stat().st_size == RESERVE_SIZES[0]


@pytest.mark.parametrize("step", STEPS)
def test_a_step_is_never_acknowledged_after_a_failed_fsync_and_can_be_repeated(
    step: str, world: Path, scratch: Path
) -> None:
    _, after = outcomes(world, step, scratch)
    num_fsyncs = num_changes(step, world, scratch, ("fsync", "fsync_dir"))
    assert num_fsyncs > 2
    for fails_at in range(num_fsyncs):
        base = scratch / str(fails_at)
        shutil.copytree(world, base / "registry")
        storage = VolatileStorage(base, fails_at)
        with pytest.raises(RegistryUnavailable, match="nothing was acknowledged"):
            STEPS[step](Registry(base / "registry", storage))
        STEPS[step](Registry(base / "registry", storage))
        rebuild(base, storage.now().surviving(never, never))
        assert_whole(base / "registry", step, [after], after)


def test_what_was_collected_does_not_come_back_after_a_power_loss(world: Path, scratch: Path) -> None:
    root = Path(shutil.copytree(world, scratch / "disk" / "registry"))
    storage = VolatileStorage(root.parent)
    collected = Registry(root, storage).gc().objects
    assert set(collected) == {digest_of(5), digest_of(7)}
    rebuild(root.parent, storage.now().surviving(never, never))
    assert not [name for name in files(root) for digest in collected if digest in name]


def test_a_quarantined_object_stays_out_of_the_way_after_a_power_loss(world: Path, scratch: Path) -> None:
    root = Path(shutil.copytree(world, scratch / "disk" / "registry"))
    storage = VolatileStorage(root.parent)
    Registry(root, storage).quarantine(stored(1), "a test broke it")
    rebuild(root.parent, storage.now().surviving(never, never))
    assert not (root / "objects" / digest_of(1)).exists()
    assert (root / "quarantine" / digest_of(1)).read_bytes() == artifact(1)


def num_changes(step: str, world: Path, scratch: Path, kinds: tuple[str, ...]) -> int:
    """Count the changes of some kinds that a step makes."""
    storage = RefusingStorage(None, AssertionError(), kinds)
    STEPS[step](Registry(Path(shutil.copytree(world, scratch / "counted")), storage))
    return len(storage.calls)


def files(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
