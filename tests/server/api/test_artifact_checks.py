"""Checks of artifacts in worker processes: their results, and checks that do not end as they should."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import psutil
import pytest

from compressor.config import CompressConfig
from compressor.pipeline import compress
from deltastore.base import Base
from deltastore.checkpoint import Checkpoint
from deltastore.errors import ArtifactError, ArtifactTooLarge, BaseMismatch
from deltastore.registry.records import ArtifactFacts
from server.errors import Draining, QueueFull
from server.publishing import checks
from server.publishing.checks import ArtifactChecks
from server.workers import worker_process
from server.workers.worker_process import WorkerTemplate
from tests.server.helpers.live_server import ROOT, Artifacts
from tests.server.helpers.worker_processes import workers_of

GIGABYTE = 1_000_000_000
# Modules that an HTTP process imports for uploads and bodies.
TORCH_FREE = "server.publishing.checks, server.api.json_io, server.web_server"


@pytest.fixture(scope="module")
def base(artifacts: Artifacts) -> Base:
    return Base.of(Checkpoint.open(artifacts.base))


def run(
    base_dir: Path, what: Callable[[ArtifactChecks], Coroutine[Any, Any, ArtifactFacts]]
) -> ArtifactFacts:
    """Run `what` with workers, and end them."""

    async def main() -> ArtifactFacts:
        checks = ArtifactChecks(base_dir)
        try:
            return await what(checks)
        finally:
            await checks.close()

    return asyncio.run(main())


def check(base_dir: Path, path: Path, base: Base, slot_bytes: int = GIGABYTE) -> ArtifactFacts:
    return run(base_dir, lambda checks: checks.check("default", path, path.stat().st_size, base, slot_bytes))


def with_tokenizer(artifacts: Artifacts, directory: Path, **steps: Any) -> Path:
    """Make an artifact whose tokenizer.json has other steps, without the compressor's checks."""
    finetune = shutil.copytree(artifacts.base.parent / "finetune-1", directory / "finetune")
    path = finetune / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **steps}))
    with patch("compressor.sources._check_tokenizer"), patch("compressor.pipeline.check_written"):
        compress(CompressConfig(str(artifacts.base), str(finetune), directory / "delta", method="scalar"))
    return directory / "delta"


def replace(pattern: str, content: str) -> dict[str, Any]:
    """Return a step of a tokenizer."""
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


def test_the_facts_of_a_valid_artifact_come_back(artifacts: Artifacts, base: Base) -> None:
    facts = check(artifacts.base, artifacts.plain, base)
    assert (facts.base_fingerprint, facts.method) == (base.fingerprint, "scalar")


def test_a_check_waits_for_its_prepared_worker_and_starts_no_other(artifacts: Artifacts, base: Base) -> None:
    async def prepare_and_check(checks: ArtifactChecks) -> ArtifactFacts:
        checks.prepare()
        checks.prepare()
        facts = await checks.check("default", artifacts.plain, 1, base, GIGABYTE)
        checks.prepare()
        assert await checks.check("default", artifacts.plain, 1, base, GIGABYTE) == facts
        return facts

    with patch.object(WorkerTemplate, "fork", autospec=True, side_effect=WorkerTemplate.fork) as forked:
        run(artifacts.base, prepare_and_check)
    assert forked.call_count == 1


def test_a_worker_that_is_being_prepared_ends_with_the_checks(artifacts: Artifacts) -> None:
    async def main() -> None:
        checks = ArtifactChecks(artifacts.base)
        checks.prepare()
        while not forked.call_count:
            await asyncio.sleep(0)
        await checks.close()

    with patch.object(WorkerTemplate, "fork", autospec=True, side_effect=WorkerTemplate.fork) as forked:
        asyncio.run(main())
    _, left = psutil.wait_procs(workers_of(os.getpid()), timeout=240)
    assert not left


def test_an_error_keeps_its_class(artifacts: Artifacts, base: Base) -> None:
    with pytest.raises(BaseMismatch, match="the upload: made from base"):
        check(artifacts.base, artifacts.foreign, base)
    with pytest.raises(ArtifactTooLarge, match="a slot has 10"):
        check(artifacts.base, artifacts.plain, base, slot_bytes=10)


def test_a_check_that_ends_its_process_refuses_the_artifact(artifacts: Artifacts, base: Base) -> None:
    class Abort:
        """Ends the worker that unpickles it, as a failed allocation in Rust does."""

        def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
            return os.abort, ()

    with pytest.raises(ArtifactError, match=r"the upload cannot be checked: .* crashed"):
        run(artifacts.base, lambda checks: checks.check("default", cast(Path, Abort()), 1, base, GIGABYTE))


def test_a_worker_that_is_killed_from_outside_or_does_not_start_says_nothing_of_the_artifact(
    artifacts: Artifacts, base: Base, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Kill:
        """Ends the worker that unpickles it, as the kernel does when memory runs out."""

        def __reduce__(self) -> tuple[Callable[[int], None], tuple[int]]:
            return signal.raise_signal, (signal.SIGKILL,)

    with pytest.raises(QueueFull, match="cannot be checked now: the work was killed by signal 9: send it"):
        run(artifacts.base, lambda checks: checks.check("default", cast(Path, Kill()), 1, base, GIGABYTE))
    # Its first message is never read, however early it comes.
    monkeypatch.setattr(worker_process.WorkerProcess, "_receive", lambda _: asyncio.Event().wait())
    monkeypatch.setattr(worker_process, "START_S", 0.01)
    with pytest.raises(
        QueueFull, match=r"cannot be checked now: a worker process was not ready after 0\.01 s"
    ):
        check(artifacts.base, artifacts.plain, base)


def test_a_tokenizer_that_aborts_its_process_refuses_the_artifact(
    artifacts: Artifacts, base: Base, tmp_path: Path
) -> None:
    steps = [replace("e", "x" * 10**6), replace("x", "y" * 10**6)]
    path = with_tokenizer(artifacts, tmp_path, normalizer={"type": "Sequence", "normalizers": steps})
    with pytest.raises(ArtifactError, match="the upload cannot be checked"):
        check(artifacts.base, path, base)


def test_a_tokenizer_that_cannot_be_loaded_refuses_the_artifact_without_a_path_of_the_server(
    artifacts: Artifacts, base: Base, tmp_path: Path
) -> None:
    path = with_tokenizer(artifacts, tmp_path, model={"type": "Unknown"})
    with pytest.raises(ArtifactError, match="the upload") as refused:
        check(artifacts.base, path, base)
    assert "/tmp" not in str(refused.value)


def test_a_check_that_takes_too_long_refuses_the_artifact(
    artifacts: Artifacts, base: Base, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "CHECK_S", 0.0)
    with pytest.raises(ArtifactError, match="takes too long to check"):
        check(artifacts.base, artifacts.plain, base)


def test_a_check_that_fails_in_an_unforeseen_way_refuses_the_artifact(artifacts: Artifacts) -> None:
    with pytest.raises(ArtifactError, match="the upload cannot be read: its check failed"):
        check(artifacts.base, artifacts.plain, cast(Base, None))


def test_a_check_during_shutdown_is_refused_as_draining(artifacts: Artifacts, base: Base) -> None:
    async def after_the_end(checks: ArtifactChecks) -> ArtifactFacts:
        await checks.close()
        return await checks.check("default", artifacts.plain, 1, base, GIGABYTE)

    with pytest.raises(Draining):
        run(artifacts.base, after_the_end)


def test_an_http_process_needs_no_torch_for_uploads() -> None:
    program = f"import sys, {TORCH_FREE}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0
