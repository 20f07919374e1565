"""Calls of a registry on a volume that hangs, fails and comes back."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from deltastore.errors import RegistryError, RegistryUnavailable, RegistryUnwritable
from server import registry_calls as calls_module
from server.registry_calls import NUM_CALLS, RegistryCalls

# Short for tests that wait for it. A call that must be answered has the default deadline, or 30 s.
DEADLINE_S = 0.2


@dataclass(slots=True)
class Volume:
    """A volume that answers, hangs until it answers again, or fails."""

    answers: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None
    num_calls: int = 0

    def __post_init__(self) -> None:
        self.answers.set()

    def read(self) -> str:
        self.num_calls += 1
        assert self.answers.wait(60)
        if self.error is not None:
            raise self.error
        return "read"


@asynccontextmanager
async def watched(calls: RegistryCalls) -> AsyncIterator[None]:
    watching = asyncio.create_task(calls.watch())
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.wait({watching})


async def until_failing(calls: RegistryCalls, is_failing: bool) -> None:
    async with asyncio.timeout(30):
        while (calls.failure is not None) != is_failing:
            await asyncio.sleep(0.01)


@pytest.fixture
def volume() -> Volume:
    return Volume()


def calls_of(volume: Volume) -> RegistryCalls:
    return RegistryCalls("/mnt/registry", volume.read)


def hasty_calls_of(volume: Volume, where: str = "/mnt/registry") -> RegistryCalls:
    return RegistryCalls(where, volume.read, DEADLINE_S)


def test_a_call_is_answered_on_another_thread(volume: Volume) -> None:
    async def main() -> None:
        calls = calls_of(volume)
        assert await calls.run(volume.read, None) == await calls.run_long(volume.read, None) == "read"
        assert await calls.run(threading.get_ident, None) != threading.get_ident()

    asyncio.run(main())


def test_a_probe_that_fails_in_an_unknown_way_is_a_failure_and_is_made_again(volume: Volume) -> None:
    async def main() -> None:
        calls = calls_of(volume)
        volume.error = ValueError("no answer that the client knows")
        async with watched(calls):
            await until_failing(calls, True)
            with pytest.raises(RegistryUnavailable, match="cannot be probed: ValueError: no answer"):
                calls.check()
            volume.error = None
            await until_failing(calls, False)

    asyncio.run(main())


def test_an_error_of_the_call_is_raised_and_is_no_failure_of_the_volume(volume: Volume) -> None:
    async def main() -> None:
        calls = calls_of(volume)
        async with watched(calls):
            volume.error = RegistryError("a record is damaged")
            with pytest.raises(RegistryError, match="a record is damaged"):
                await calls.run(volume.read, None)
            assert calls.failure is None

    asyncio.run(main())


def test_calls_of_a_volume_that_hangs_fail_at_once_and_without_a_thread_until_it_answers(
    volume: Volume,
) -> None:
    async def main() -> None:
        calls = hasty_calls_of(volume)
        volume.answers.clear()
        async with watched(calls):
            with pytest.raises(RegistryUnavailable, match="/mnt/registry did not answer"):
                await calls.run(volume.read, None)
            long = asyncio.create_task(calls.run_long(volume.read, None))
            # The probe finds out, and ends the call that may take 30 s.
            with pytest.raises(RegistryUnavailable, match="/mnt/registry does not answer"):
                await long
            num_calls = volume.num_calls
            for _ in range(10 * NUM_CALLS):
                with pytest.raises(RegistryUnavailable, match="does not answer"):
                    await calls.run(volume.read, None)
                with pytest.raises(RegistryUnavailable, match="does not answer"):
                    await calls.run_long(volume.read, None)
            # Probes alone go on.
            assert volume.num_calls <= num_calls + 1
            volume.answers.set()
            await until_failing(calls, False)
            assert await calls.run_long(volume.read, None) == "read"

    asyncio.run(main())


def test_a_call_that_expires_as_the_volume_is_found_to_hang_does_not_end_the_watch(volume: Volume) -> None:
    async def main() -> None:
        calls = hasty_calls_of(volume)
        volume.answers.clear()
        async with watched(calls):
            while not volume.num_calls:
                await asyncio.sleep(0.01)
            late = asyncio.create_task(calls.run(volume.read, None))
            while volume.num_calls < 2:
                await asyncio.sleep(0.01)
            # The deadlines of the probe and of the call pass in one turn of the event loop.
            time.sleep(2 * DEADLINE_S)
            with pytest.raises(RegistryUnavailable):
                await late
            volume.answers.set()
            await until_failing(calls, False)
            assert await calls.run_long(volume.read, None) == "read"

    asyncio.run(main())


@pytest.mark.parametrize(("where", "kind"), [("/mnt/registry", "volume"), ("s3://models/registry", "bucket")])
def test_what_hangs_is_called_by_its_kind(volume: Volume, where: str, kind: str) -> None:
    async def main() -> None:
        calls = hasty_calls_of(volume, where)
        volume.answers.clear()
        async with watched(calls):
            await until_failing(calls, True)
            assert calls.failure is not None
            assert f"the registry's {kind} does not answer" in calls.failure.public
            assert f"{where} does not answer: check that the {kind} can be reached" in str(calls.failure)
            volume.answers.set()

    asyncio.run(main())


def test_a_call_that_is_late_fails_alone_and_asks_for_a_probe(volume: Volume) -> None:
    stuck = threading.Event()

    async def upload() -> str:
        await asyncio.to_thread(stuck.wait, 60)
        return "uploaded"

    async def main() -> None:
        # Its deadline is one that no probe misses, however busy the machine is.
        calls = calls_of(volume)
        async with watched(calls):
            uploading = asyncio.create_task(calls.unless_hanging(upload()))
            other = asyncio.create_task(calls.run_long(lambda: stuck.wait(60), "other"))
            num_probes = volume.num_calls
            with pytest.raises(RegistryUnavailable, match="did not answer a call within"):
                await calls.run(lambda: stuck.wait(60), "evil")
            async with asyncio.timeout(30):
                while volume.num_calls == num_probes:
                    await asyncio.sleep(0.01)
            assert calls.failure is None
            stuck.set()
            assert await uploading == "uploaded"
            assert await other

    asyncio.run(main())


def test_late_calls_of_two_tenants_leave_threads_to_the_others(
    volume: Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls_module, "MAX_LATE", NUM_CALLS)
    stuck = threading.Event()

    async def answered(calls: RegistryCalls, tenant: str | None) -> None:
        async with asyncio.timeout(30):
            while True:
                with contextlib.suppress(RegistryUnavailable):
                    assert await calls.run(volume.read, tenant) == "read"
                    return
                await asyncio.sleep(0.01)

    async def errors_of_late_calls(calls: RegistryCalls, tenant: str) -> str:
        late = (calls.run(lambda: stuck.wait(60), tenant) for _ in range(NUM_CALLS))
        return repr(await asyncio.gather(*late, return_exceptions=True))

    async def main() -> None:
        calls = hasty_calls_of(volume)
        async with watched(calls), asyncio.timeout(60):
            for tenant in ("evil", "worse"):
                while "too many calls of its registry that are late" not in await errors_of_late_calls(
                    calls, tenant
                ):
                    pass
            async with asyncio.TaskGroup() as others:
                # While both go on to call.
                others.create_task(errors_of_late_calls(calls, "evil"))
                others.create_task(errors_of_late_calls(calls, "worse"))
                others.create_task(answered(calls, "honest"))
                others.create_task(answered(calls, None))
            stuck.set()
            await answered(calls, "evil")

    asyncio.run(main())


def test_the_lists_of_a_tenant_are_read_one_after_the_other_with_rests_and_those_of_others_meanwhile(
    volume: Volume,
) -> None:
    busy_s = 0.1
    runs: list[tuple[float, float]] = []
    running = 0
    held = threading.Event()

    def read() -> None:
        nonlocal running
        running += 1
        assert running == 1
        begin = time.monotonic()
        end_s = time.thread_time() + busy_s
        while time.thread_time() < end_s:
            pass
        running -= 1
        runs.append((begin, time.monotonic()))

    async def main() -> None:
        calls = calls_of(volume)
        async with asyncio.TaskGroup() as lists:
            for _ in range(4):
                lists.create_task(calls.run_list(read, "evil"))
        for (_, ended), (begun, _) in itertools.pairwise(runs):
            assert begun - ended >= busy_s * 0.9
        holding = asyncio.create_task(calls.run_list(lambda: held.wait(60), "evil"))
        # Though one of a tenant hangs.
        assert (
            await calls.run_list(volume.read, "honest") == await calls.run_list(volume.read, None) == "read"
        )
        held.set()
        assert await holding

    asyncio.run(main())


def test_a_list_is_not_read_beside_a_late_one_of_its_tenant(
    volume: Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls_module, "LONG_CALL_S", DEADLINE_S)
    num_begun = 0

    def stuck() -> None:
        nonlocal num_begun
        num_begun += 1
        assert volume.answers.wait(60)

    async def main() -> None:
        calls = hasty_calls_of(volume)
        volume.answers.clear()
        for _ in range(3):
            with pytest.raises(RegistryUnavailable, match="did not answer a call within"):
                await calls.run_list(stuck, "evil")
        assert num_begun == 1
        volume.answers.set()

    asyncio.run(main())


def test_a_failure_of_one_file_while_the_registry_answers_is_logged_once(
    volume: Volume, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RegistryUnavailable("variants/acme/a/1.json: Input/output error")

    async def main() -> None:
        calls = calls_of(volume)
        for _ in range(3):
            with pytest.raises(RegistryUnavailable):
                await calls.run_list(fail, "acme")

    asyncio.run(main())
    assert [record.getMessage() for record in caplog.records] == [
        "a call of the registry failed: variants/acme/a/1.json: Input/output error"
    ]


def test_a_call_of_the_same_key_is_not_made_again_while_it_hangs(volume: Volume) -> None:
    stuck, num_calls = threading.Event(), 0

    def hang() -> None:
        nonlocal num_calls
        num_calls += 1
        assert stuck.wait(60)

    async def main() -> None:
        calls = hasty_calls_of(volume)
        async with watched(calls):
            for _ in range(5):
                with pytest.raises(RegistryUnavailable):
                    await calls.run(hang, "evil", "one file")
                await until_failing(calls, False)
            assert num_calls == 1
            stuck.set()
            async with asyncio.timeout(30):
                while num_calls == 1:
                    await asyncio.sleep(0.01)
                    try:
                        await calls.run(hang, "evil", "one file")
                    except RegistryUnavailable:
                        continue

    asyncio.run(main())


def test_a_volume_that_fails_is_called_on_and_logged_once(
    volume: Volume, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(calls_module, "RETRY_S", 0.01)
    caplog.set_level("INFO")

    async def main() -> None:
        calls = calls_of(volume)
        async with watched(calls):
            volume.error = RegistryUnavailable("/mnt/registry is gone: mount its volume again")
            for _ in range(3):
                with pytest.raises(RegistryUnavailable, match="is gone"):
                    await calls.run(volume.read, None)
            await until_failing(calls, True)
            with pytest.raises(RegistryUnavailable, match="is gone"):
                calls.check()
            num_calls = volume.num_calls
            async with asyncio.timeout(30):
                while volume.num_calls < num_calls + 3:
                    await asyncio.sleep(0.01)
            volume.error = None
            await until_failing(calls, False)
            calls.check()

    asyncio.run(main())
    # The first call may fail before the probe that finds out.
    messages = [record.message for record in caplog.records if not record.message.startswith("a call of")]
    assert len(caplog.records) <= len(messages) + 1
    assert [message.split(":")[0] for message in messages] == [
        "the registry cannot be read; what is in memory is served on",
        "the registry can be read again",
    ]
    assert "mount its volume again" in messages[0]


def test_a_registry_that_can_only_be_read_is_no_failure_and_is_logged_once(
    volume: Volume, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(calls_module, "PROBE_S", 0.01)
    volume.error = RegistryUnwritable("/mnt/registry is read-only")

    async def main() -> None:
        calls = calls_of(volume)
        async with watched(calls), asyncio.timeout(30):
            while volume.num_calls < 3:
                await asyncio.sleep(0.01)
            assert calls.unwritable is volume.error
            assert calls.failure is None
            calls.check()
            volume.error = None
            while calls.unwritable is not None:
                await asyncio.sleep(0.01)

    asyncio.run(main())
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "the registry cannot be written; all requests for tokens are served on",
        "the registry can be written again",
    ]
