"""Worker pools: results, limits, kills, fairness, and no process left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop

from server.errors import Draining, InvalidRequest, QueueFull, WorkerDied, WorkerKilled, WorkerTimeout
from server.grammar.matching import WORKER_MODULES as grammar_modules
from server.publishing import checks
from server.text.worker_tasks import WORKER_MODULES as text_modules
from server.workers.pool import MAX_WAITING, WorkerPool
from server.workers.worker_main import Limits
from server.workers.worker_process import WorkerTemplate
from tests.server.helpers import worker_tasks as tasks
from tests.server.helpers.worker_processes import LIMITS, WAIT_S, with_pool, workers_of

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return the directories of the workers that are started from now on."""
    started: list[Path] = []
    fork = WorkerTemplate.fork

    def counted(template: WorkerTemplate, scratch: Path) -> tuple[socket.socket, socket.socket]:
        started.append(scratch)
        return fork(template, scratch)

    monkeypatch.setattr(WorkerTemplate, "fork", counted)
    return started


async def until_exists(path: Path) -> None:
    while not path.exists():
        await asyncio.sleep(0.002)


async def until_gone(pid: int) -> None:
    """Wait until a process has ended; a zombie has."""
    # It may end between two looks.
    with contextlib.suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_result_comes_back_and_the_worker_is_used_again(loop: Any) -> None:
    async def test(pool: WorkerPool) -> None:
        assert await pool.run("a", WAIT_S, tasks.add, 2, 3) == 5
        first, second = [await pool.run("a", WAIT_S, tasks.pid_of_worker) for _ in range(2)]
        assert first == second != os.getpid()

    with_pool(test, loop=loop)


class Argument:
    """An argument that knows whether it was packed."""

    is_packed = False

    def __reduce__(self) -> tuple[type, tuple[str, ...]]:
        self.is_packed = True
        return str, ()


def test_a_task_is_packed_when_its_turn_has_come(tmp_path: Path) -> None:
    async def test(pool: WorkerPool) -> None:
        first = asyncio.create_task(pool.run("a", WAIT_S, tasks.wait_for, tmp_path / "go"))
        argument = Argument()
        second = asyncio.create_task(pool.run("a", WAIT_S, str, argument))
        await pool.run("b", WAIT_S, tasks.add, 1, 1)
        assert not argument.is_packed
        (tmp_path / "go").touch()
        await asyncio.gather(first, second)
        assert argument.is_packed

    with_pool(test)


def test_a_peraxis_error_comes_through_as_it_is() -> None:
    async def test(pool: WorkerPool) -> None:
        with pytest.raises(InvalidRequest, match=r"^no$") as caught:
            await pool.run("a", WAIT_S, tasks.refuse)
        assert caught.value.param == "messages"

    with_pool(test)


def test_a_defect_of_a_task_is_raised_with_its_traceback() -> None:
    async def test(pool: WorkerPool) -> None:
        with pytest.raises(RuntimeError, match="LookupError: a defect"):
            await pool.run("a", WAIT_S, tasks.fail)
        assert await pool.run("a", WAIT_S, tasks.add, 2, 3) == 5

    with_pool(test)


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_task_is_killed_at_its_deadline_and_the_next_one_runs(loop: Any, tmp_path: Path) -> None:
    async def test(pool: WorkerPool) -> None:
        with pytest.raises(WorkerTimeout, match=r"not done after 0.5 s"):
            await pool.run("a", 0.5, tasks.wait_for, tmp_path / "never")
        assert await pool.run("a", WAIT_S, tasks.add, 2, 3) == 5

    with_pool(test, num_workers=1, loop=loop)


def test_a_task_cannot_use_more_memory_than_its_limit() -> None:
    async def test(pool: WorkerPool) -> None:
        assert await pool.run("a", WAIT_S, tasks.allocate, 100 << 20) == 100 << 20
        with pytest.raises(WorkerDied, match="needed more than 256 MiB of memory"):
            await pool.run("a", WAIT_S, tasks.allocate, 1 << 30)
        assert await pool.run("a", WAIT_S, tasks.add, 2, 3) == 5

    with_pool(test)


def test_memory_that_tasks_keep_does_not_add_up() -> None:
    async def test(pool: WorkerPool) -> None:
        pids = {await pool.run("a", WAIT_S, tasks.hoard, 100 << 20) for _ in range(8)}
        assert len(pids) == 2

    with_pool(test)


def test_a_failed_allocation_in_rust_ends_the_worker_alone() -> None:
    async def test(pool: WorkerPool) -> None:
        with pytest.raises(WorkerDied, match="of memory, or crashed"):
            await pool.run("a", WAIT_S, tasks.normalize_to_a_terabyte)
        assert await pool.run("a", WAIT_S, tasks.add, 2, 3) == 5

    with_pool(test)


def test_a_task_cannot_use_more_processor_time_than_its_limit() -> None:
    async def test(pool: WorkerPool) -> None:
        with pytest.raises(WorkerDied, match="needed more than 1 s of processor time"):
            await pool.run("a", WAIT_S, tasks.spin)

    with_pool(test, limits=Limits(memory_bytes=256 << 20, cpu_s=1.0))


def test_a_worker_that_something_else_killed_is_not_said_to_lack_memory() -> None:
    async def test(pool: WorkerPool) -> None:
        with pytest.raises(WorkerDied, match="was killed by signal 9"):
            await pool.run("a", WAIT_S, tasks.kill_itself)

    with_pool(test)


def test_a_result_that_is_too_large_is_refused() -> None:
    async def test(pool: WorkerPool) -> None:
        assert len(await pool.run("a", WAIT_S, tasks.make_text, 30 << 20)) == 30 << 20
        with pytest.raises(WorkerDied, match="made a result of"):
            await pool.run("a", WAIT_S, tasks.make_text, 65 << 20)

    with_pool(test)


def test_what_a_task_prints_does_not_reach_the_parent() -> None:
    async def test(pool: WorkerPool) -> None:
        assert await pool.run("a", WAIT_S, tasks.write_to_standard_streams) == ""

    with_pool(test)


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_cancelled_call_kills_its_worker_and_frees_the_permit(loop: Any, tmp_path: Path) -> None:
    async def test(pool: WorkerPool) -> None:
        call = asyncio.create_task(pool.run("a", WAIT_S, tasks.spin, tmp_path / "started"))
        await until_exists(tmp_path / "started")
        call.cancel()
        assert await pool.run("a", WAIT_S, tasks.add, 2, 3) == 5
        await until_gone(int((tmp_path / "started").read_text()))

    with_pool(test, num_workers=1, loop=loop)


def test_a_share_that_fills_its_permits_does_not_delay_another() -> None:
    async def test(pool: WorkerPool) -> None:
        slow = [asyncio.create_task(pool.run("slow", WAIT_S, tasks.spin)) for _ in range(8)]
        assert await pool.run("other", WAIT_S, tasks.add, 2, 3) == 5
        assert not any(call.done() for call in slow)
        for call in slow:
            call.cancel()
        await asyncio.gather(*slow, return_exceptions=True)

    with_pool(test)


def test_many_shares_of_one_tenant_do_not_delay_another_of_several() -> None:
    async def test() -> None:
        pool = WorkerPool(2, LIMITS, several_tenants=True)
        async with asyncio.timeout(WAIT_S):
            slow = [asyncio.create_task(pool.run(("slow", name), WAIT_S, tasks.spin)) for name in "abcd"]
            assert await pool.run(("other", "a"), WAIT_S, tasks.add, 2, 3) == 5
            assert not any(call.done() for call in slow)
            for call in slow:
                call.cancel()
            await asyncio.gather(*slow, return_exceptions=True)
            await pool.close()

    asyncio.run(test())


def test_a_share_has_a_bounded_queue() -> None:
    async def test(pool: WorkerPool) -> None:
        calls = [asyncio.create_task(pool.run("a", WAIT_S, tasks.spin)) for _ in range(MAX_WAITING + 2)]
        done, waiting = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        assert [type(call.exception()) for call in done] == [QueueFull]
        for call in waiting:
            call.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    with_pool(test, num_workers=1)


def test_a_share_comes_back_to_the_worker_that_served_it(tmp_path: Path) -> None:
    async def test(pool: WorkerPool) -> None:
        both = [
            asyncio.create_task(pool.run(share, WAIT_S, tasks.wait_for, tmp_path / "go")) for share in "ab"
        ]
        (tmp_path / "go").touch()
        first, second = await asyncio.gather(*both)
        assert first != second
        for _ in range(3):
            assert await pool.run("b", WAIT_S, tasks.pid_of_worker) == second
            assert await pool.run("a", WAIT_S, tasks.pid_of_worker) == first

    with_pool(test)


def test_work_that_kills_its_worker_never_takes_that_of_another_tenant() -> None:
    async def test(pool: WorkerPool) -> None:
        await pool.warm()
        honest = await pool.run(("honest", "v"), WAIT_S, tasks.pid_of_worker)
        for number in range(3):
            with pytest.raises(WorkerDied):
                await pool.run(("hostile", number), WAIT_S, tasks.normalize_to_a_terabyte)
        assert await pool.run(("honest", "v"), WAIT_S, tasks.pid_of_worker) == honest

    with_pool(test)


def test_warm_starts_all_workers_ahead() -> None:
    async def test(pool: WorkerPool) -> None:
        await pool.warm()
        pids = {worker.pid for worker in workers_of(os.getpid())}
        assert len(pids) == 2
        assert await pool.run("a", WAIT_S, tasks.pid_of_worker) in pids

    with_pool(test)


def test_warm_starts_no_more_workers_than_it_is_asked_for() -> None:
    async def test(pool: WorkerPool) -> None:
        for _ in range(2):
            await pool.warm(1)
            assert len(workers_of(os.getpid())) == 1

    with_pool(test)


def test_a_task_that_comes_while_all_workers_start_leaves_no_worker_too_many() -> None:
    async def test(pool: WorkerPool) -> None:
        warming = asyncio.create_task(pool.warm())
        # The workers are being started, and none is idle yet.
        await asyncio.sleep(0)
        await pool.run("a", WAIT_S, tasks.pid_of_worker)
        await warming
        async with asyncio.timeout(WAIT_S):
            while len(workers_of(os.getpid())) > 2:
                await asyncio.sleep(0.01)

    with_pool(test)


def test_workers_have_the_niceness_of_their_pool_above_their_parent_s() -> None:
    async def test() -> None:
        pool = WorkerPool(1, LIMITS, niceness=7)
        await pool.warm()
        (worker,) = workers_of(os.getpid())
        assert worker.nice() == min(19, os.nice(0) + 7)
        await pool.close()

    asyncio.run(test())


def test_a_worker_imports_the_named_modules_and_not_its_parent_s_program() -> None:
    async def test() -> None:
        pool = WorkerPool(1, LIMITS, modules=("colorsys",))
        modules = await pool.run("a", WAIT_S, tasks.imported)
        await pool.close()
        assert "colorsys" in modules
        assert not modules & {"pytest", "torch", "transformers", "fastapi"}

    asyncio.run(test())


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_pool_works_on_a_thread_and_leaves_nothing_when_it_ends(loop: Any) -> None:
    async def test(pool: WorkerPool) -> None:
        assert await pool.run("a", WAIT_S, tasks.add, 2, 3) == 5
        with pytest.raises(WorkerTimeout):
            await pool.run("a", 0.2, tasks.spin)

    with ThreadPoolExecutor(1) as thread:
        thread.submit(with_pool, test, loop=loop).result()


def test_closing_ends_running_and_waiting_work_at_once(tmp_path: Path) -> None:
    async def test(pool: WorkerPool) -> None:
        running = asyncio.create_task(pool.run("a", WAIT_S, tasks.spin, tmp_path / "started"))
        waiting = asyncio.create_task(pool.run("a", WAIT_S, tasks.add, 2, 3))
        await until_exists(tmp_path / "started")
        await pool.close()
        assert not workers_of(os.getpid())
        results = await asyncio.gather(running, waiting, return_exceptions=True)
        assert [type(result) for result in results] == [Draining, Draining]

    with_pool(test, num_workers=1)


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_closing_ends_workers_that_are_starting(loop: Any, forked: list[Path]) -> None:
    async def test(pool: WorkerPool) -> None:
        asked = [asyncio.create_task(pool.run(share, WAIT_S, tasks.add, 2, 3)) for share in "ab"]
        while len(forked) < 2:
            await asyncio.sleep(0)
        await pool.close()
        results = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(result) for result in results] == [Draining, Draining]

    with_pool(test, loop=loop)


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("num_started", range(4))
def test_a_start_that_is_cancelled_leaves_no_worker(loop: Any, num_started: int, forked: list[Path]) -> None:
    async def test(pool: WorkerPool) -> None:
        await pool.warm(num_started)
        warming = asyncio.create_task(pool.warm())
        while len(forked) < 3:
            await asyncio.sleep(0)
        warming.cancel()
        await asyncio.wait({warming})
        await pool.close()

    with_pool(test, num_workers=3, loop=loop)


def test_work_that_kills_workers_in_a_row_starts_one_for_each(forked: list[Path]) -> None:
    async def test(pool: WorkerPool) -> None:
        for _ in range(4):
            with pytest.raises(WorkerTimeout):
                await pool.run("hostile", 0.1, tasks.spin)
        assert await pool.run("a", WAIT_S, tasks.add, 2, 3) == 5

    with_pool(test)
    assert len(forked) == 5
    assert not any(directory.exists() for directory in forked)


def test_a_worker_that_ended_while_it_was_idle_is_not_taken(forked: list[Path]) -> None:
    async def test(pool: WorkerPool) -> None:
        pid = await pool.run("a", WAIT_S, tasks.pid_of_worker)
        os.kill(pid, signal.SIGKILL)
        await until_gone(pid)
        assert not pool.is_running
        assert await pool.run("a", WAIT_S, tasks.pid_of_worker) != pid

    with_pool(test)
    assert len(forked) == 2


def test_a_worker_has_a_directory_and_no_open_file_of_another(forked: list[Path]) -> None:
    async def test(pool: WorkerPool) -> None:
        await pool.warm()
        found = await asyncio.gather(*(pool.run(share, WAIT_S, tasks.surroundings) for share in "ab"))
        assert {directory for directory, _ in found} == {str(each) for each in forked}
        for _, files in found:
            # Beside the standard streams, which lead nowhere.
            (connection,) = [each for each in files if each != os.devnull]
            assert connection.startswith("socket:")

    with_pool(test)


def test_pools_share_what_their_workers_import() -> None:
    async def test(pool: WorkerPool) -> None:
        other = WorkerPool(1, LIMITS)
        parents = {await each.run("a", WAIT_S, os.getppid) for each in (pool, other)}
        await other.close()
        assert len(parents) == 1

    with_pool(test)


def test_a_template_that_was_killed_ends_its_workers_and_is_replaced(tmp_path: Path) -> None:
    async def test(pool: WorkerPool) -> None:
        template = await pool.run("a", WAIT_S, os.getppid)
        call = asyncio.create_task(pool.run("a", WAIT_S, tasks.spin, tmp_path / "started"))
        await until_exists(tmp_path / "started")
        os.kill(template, signal.SIGKILL)
        with pytest.raises(WorkerKilled, match="was ended with the process that it was forked from"):
            await call
        await until_gone(int((tmp_path / "started").read_text()))
        assert await pool.run("a", WAIT_S, os.getppid) != template

    with_pool(test)


def test_a_module_that_cannot_be_imported_is_a_worker_that_does_not_start() -> None:
    async def test() -> None:
        pool = WorkerPool(1, LIMITS, modules=("server.no_such_module",))
        for _ in range(2):
            with pytest.raises(WorkerKilled, match="did not start"):
                await pool.run("a", WAIT_S, tasks.add, 2, 3)
        await pool.close()

    asyncio.run(test())


@pytest.mark.parametrize("modules", [text_modules, grammar_modules, checks.MODULES])
def test_a_template_has_one_thread_when_it_forks(modules: tuple[str, ...]) -> None:
    async def test() -> None:
        pool = WorkerPool(1, LIMITS, modules)
        template = await pool.run("a", WAIT_S, os.getppid)
        await pool.close()
        assert psutil.Process(template).num_threads() == 1

    asyncio.run(test())


PARENT = """
import asyncio, pathlib, sys
from server.workers.worker_main import Limits
from server.workers.pool import WorkerPool
from tests.server.helpers import worker_tasks as tasks
from tests.server.helpers.worker_processes import LIMITS, WAIT_S, with_pool, workers_of

async def main():
    pool = WorkerPool(2, Limits(256 << 20, 30.0))
    work = asyncio.create_task(pool.run("a", 60.0, tasks.spin, pathlib.Path(sys.argv[1])))
    await pool.run("b", 60.0, tasks.add, 2, 3)
    {then}

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("then", "how"),
    [
        ("await work", signal.SIGKILL),
        ("await work", signal.SIGTERM),
        ("await work", signal.SIGINT),
        ("", None),
    ],
)
def test_no_worker_outlives_its_parent_even_one_that_spins(
    then: str, how: signal.Signals | None, tmp_path: Path
) -> None:
    started = tmp_path / "started"
    program = PARENT.format(
        then=then or "while not pathlib.Path(sys.argv[1]).exists(): await asyncio.sleep(0.002)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program, str(started)], cwd=ROOT, stderr=subprocess.DEVNULL
    )

    async def test() -> None:
        async with asyncio.timeout(WAIT_S):
            await until_exists(started)
            pids = [worker.pid for worker in workers_of(parent.pid)]
            if how is not None:
                parent.send_signal(how)
            for pid in (*pids, int(started.read_text()), parent.pid):
                await until_gone(pid)

    try:
        asyncio.run(test())
    finally:
        parent.kill()
        parent.wait()
