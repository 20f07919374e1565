"""An ingress keeps replicas that answer late, and forgets those that have died."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("ray", reason="needs the extra ray: pip install -e '.[ray]'")

from ray.exceptions import RayActorError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from server.errors import EngineRestarted, QueueFull
from server.protocol.messages import CallDone, DeltaState, ResidencyAnswer, encode
from server.scale import replica_link
from server.scale.engines import ReplicaState
from server.scale.replica_link import ReplicaLink
from tests.server.helpers.simulation import version

FINGERPRINT = "f" * 64
RECORD = version("tuned")


class Replica:
    """One that answers at once, never (`late`), or has died."""

    def __init__(self, name: str) -> None:
        self.name, self.manner = name, "prompt"

    async def get_async(self) -> Any:
        if self.manner == "late":
            await asyncio.Event().wait()
        if self.manner == "dead":
            raise RayActorError
        return ReplicaState(self.name, FINGERPRINT, ())


class Answer(Replica):
    """The answer of a replica to a call."""

    def __init__(self, replica: Replica, answer: bytes) -> None:
        super().__init__(replica.name)
        self.manner, self._answer = replica.manner, answer

    async def get_async(self) -> Any:
        await super().get_async()
        return self._answer


class Engines:
    """A handle of replicas."""

    def __init__(self, *names: str) -> None:
        self.replicas = [Replica(name) for name in names]
        self.answer = b""

    def options(self, **_: Any) -> Engines:
        return self

    def broadcast(self, method: str, *_: object) -> Engines:
        self._method = method
        return self

    async def _fetch_replica_results_async(self) -> list[Replica]:
        if not self.replicas:
            raise RayServeException("no replica is there")
        if self._method == "state":
            return self.replicas
        return [Answer(replica, self.answer) for replica in self.replicas]


@pytest.fixture(autouse=True)
def soon_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_link, "ANSWER_S", 0.05)


def with_link(talk: Callable[[ReplicaLink, Engines], Awaitable[None]]) -> None:
    """Let `talk` use a link that has seen two replicas."""

    async def main() -> None:
        engines = Engines("first", "second")
        link = ReplicaLink("ingress", cast(DeploymentHandle[Any], engines))
        link._facts = cast(Any, SimpleNamespace(base=SimpleNamespace(fingerprint=FINGERPRINT)))
        await link._look()
        await talk(link, engines)

    asyncio.run(main())


@pytest.mark.parametrize("late", [["first"], ["first", "second"]])
def test_replicas_that_answer_late_are_still_there(late: list[str]) -> None:
    async def talk(link: ReplicaLink, engines: Engines) -> None:
        for replica in engines.replicas:
            replica.manner = "late" if replica.name in late else "prompt"
        await link._look()
        link.check_ready()
        assert set(link._states) == {"first", "second"}

    with_link(talk)


def test_a_replica_that_has_died_is_forgotten_and_the_other_one_is_there() -> None:
    async def talk(link: ReplicaLink, engines: Engines) -> None:
        engines.replicas[0].manner = "dead"
        await link._look()
        link.check_ready()
        assert set(link._states) == {"second"}
        engines.replicas[1].manner = "dead"
        await link._look()
        with pytest.raises(EngineRestarted):
            link.check_ready()

    with_link(talk)


def test_without_replicas_there_is_no_engine() -> None:
    async def talk(link: ReplicaLink, engines: Engines) -> None:
        engines.replicas = []
        await link._look()
        with pytest.raises(EngineRestarted):
            link.check_ready()

    with_link(talk)


def test_a_question_is_answered_by_the_replicas_that_are_in_time() -> None:
    async def talk(link: ReplicaLink, engines: Engines) -> None:
        state = DeltaState("device", False, 3)
        engines.answer = encode(ResidencyAnswer(0, (state,)))
        engines.replicas[0].manner = "late"
        assert await link.residency_of(["a@1"], "acme") == (state,)

    with_link(talk)


def test_what_a_replica_answers_to_an_unload_is_told_also_while_another_one_is_late() -> None:
    async def talk(link: ReplicaLink, engines: Engines) -> None:
        engines.answer = encode(CallDone(0, None))
        await link.load("unload", RECORD)
        engines.replicas[1].manner = "late"
        engines.answer = encode(CallDone(0, QueueFull("too many calls wait")))
        with pytest.raises(QueueFull, match="too many calls"):
            await link.load("unload", RECORD)

    with_link(talk)


def test_while_one_is_late_the_states_of_all_stay() -> None:
    async def talk(link: ReplicaLink, engines: Engines) -> None:
        first, second = engines.replicas
        first.manner, second.manner = "late", "dead"
        await link._look()
        assert set(link._states) == {"first", "second"}
        first.manner = "prompt"
        await link._look()
        assert set(link._states) == {"first"}

    with_link(talk)
