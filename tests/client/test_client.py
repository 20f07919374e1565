"""The blocking client and the asynchronous one: the same calls, against a running server and a scripted one."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from client.answers import Generation
from client.calls import AsyncStream, Calls
from client.client import AsyncClient, Client, Stream
from client.http import AuthenticationFailed, NoAnswer, NoServer, ServerRefused, UnexpectedReply
from deltastore import console
from deltastore.errors import ArtifactError, PeraxisError, UsageError
from tests.client.helpers.cutting_proxy import cutting_proxy
from tests.client.helpers.scripted_server import (
    answer,
    break_off,
    events,
    hang_after,
    refuse,
    scripted_server,
)
from tests.server.helpers.live_server import ARTIFACT_PREFIX, Artifacts, LiveServer, eventually

NUMBERS = itertools.count()
# Makes a call of either client; arguments are a URL, options of the client, the call's name, and its arguments.
Asking = Callable[..., Any]


def ask_blocking(
    url: str, name: str, *args: Any, client: dict[str, Any] | None = None, **options: Any
) -> Any:
    with Client(url, **client or {}) as made:
        found = getattr(made, name)(*args, **options)
        if not isinstance(found, Stream):
            return found
        with found:
            return [*found], found.answer


def ask_async(url: str, name: str, *args: Any, client: dict[str, Any] | None = None, **options: Any) -> Any:
    async def ask() -> Any:
        async with AsyncClient(url, **client or {}) as made:
            found = getattr(made, name)(*args, **options)
            if not isinstance(found, AsyncStream):
                return await found
            async with found:
                return [piece async for piece in found], found.answer

    return asyncio.run(ask())


@pytest.fixture(params=[ask_blocking, ask_async], ids=["blocking", "async"])
def ask(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Asking:
    for name in ("PERAXIS_URL", "PERAXIS_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    found: Asking = request.param
    return found


@pytest.fixture
def name() -> str:
    return f"client-{next(NUMBERS)}"


def test_both_clients_have_every_call() -> None:
    calls = {name for name, found in vars(Calls).items() if inspect.isfunction(found) and name[0] != "_"}
    assert {"generate", "stream_chat", "push", "revoke_key"} < calls
    for call in calls:
        blocking, other = getattr(Client, call), getattr(AsyncClient, call)
        assert inspect.signature(blocking).parameters.keys() == inspect.signature(other).parameters.keys()
        assert blocking.__doc__ == other.__doc__
        assert "Async" not in str(inspect.signature(blocking).return_annotation)


def test_a_call_generates_as_the_server_does(server: LiveServer, ask: Asking) -> None:
    expected = server.generate("plain", max_new_tokens=6, n=2, logprobs=1).json()
    options = {"max_new_tokens": 6, "temperature": 0, "n": 2}
    found = ask(server.url, "generate", "hello", "plain", logprobs=1, **options)
    assert [each.text for each in found.outputs] == [each["text"] for each in expected["outputs"]]
    assert (found.token_ids, found.text) == (
        expected["outputs"][0]["token_ids"],
        expected["outputs"][0]["text"],
    )
    assert found.outputs[1].logprobs == expected["outputs"][1]["logprobs"]
    assert (found.version, found.digest) == (1, expected["digest"])
    assert found.usage.completion_tokens == expected["usage"]["completion_tokens"]
    pieces, streamed = ask(server.url, "stream_generate", "hello", "plain", **options)
    assert [each.token_ids for each in streamed.outputs] == [each.token_ids for each in found.outputs]
    assert [each.text for each in streamed.outputs] == [each.text for each in found.outputs]
    assert [each.finish_reason for each in streamed.outputs] == ["length", "length"]
    assert {piece.index for piece in pieces} == {0, 1}
    assert (streamed.version, streamed.digest, streamed.usage) == (found.version, found.digest, found.usage)


def test_the_base_is_generated_with_without_a_variant(server: LiveServer, ask: Asking) -> None:
    options = {"max_new_tokens": 4, "temperature": 0}
    expected = server.token_ids(max_new_tokens=4)
    for variant in (None, "base"):
        found = ask(server.url, "generate", "hello", variant, **options)
        assert (found.token_ids, found.version, found.digest) == (expected, None, None)


def test_a_chat_is_answered_whole_and_in_pieces(server: LiveServer, ask: Asking) -> None:
    options = {"temperature": 0, "max_tokens": 4, "system": "Be brief."}
    whole = ask(server.url, "chat", "chatty", "hello", **options)
    pieces, streamed = ask(server.url, "stream_chat", "chatty", "hello", **options)
    assert whole.text
    assert "".join(piece.content or "" for piece in pieces) == streamed.text == whole.text
    assert (whole.version, whole.usage, whole.finish_reason) == (
        streamed.version,
        streamed.usage,
        streamed.finish_reason,
    )
    assert whole.document["choices"][0]["message"]["content"] == whole.text
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    assert ask(server.url, "chat", "chatty@1", messages, temperature=0, max_tokens=4).text == whole.text


def test_texts_become_token_ids_and_come_back(server: LiveServer, ask: Asking) -> None:
    found = ask(server.url, "tokenize", "hello there", "chatty", add_special_tokens=False)
    assert found.count == len(found.tokens) > 1
    assert ask(server.url, "detokenize", found.tokens, "chatty") == "hello there"
    assert ask(server.url, "tokenize", [{"role": "user", "content": "hello"}], "chatty").count > 5


def test_versions_are_published_moved_and_deleted(
    server: LiveServer, artifacts: Artifacts, ask: Asking, name: str
) -> None:
    first = ask(server.url, "push", artifacts.plain, name)
    assert (first.name, first.version, first.active) == (name, 1, True)
    assert ask(server.url, "push", str(artifacts.third), name, activate=False).active is False
    assert [each.version for each in ask(server.url, "versions", name)] == [1, 2]
    assert ask(server.url, "promote", name, 2).active == 2
    assert ask(server.url, "rollback", name).active == 1
    assert ask(server.url, "set_visibility", name, "public").visibility == "public"
    assert ask(server.url, "load", f"{name}@2").version == 2
    # A first answer may come before the load has ended.
    assert eventually(lambda: ask(server.url, "pin", name).pinned)
    assert ask(server.url, "unpin", name).pinned is False
    assert ask(server.url, "unload", f"{name}@2").name == name
    assert ask(server.url, "delete", f"{name}@2").deleted == (2,)
    (listed,) = [each for each in ask(server.url, "variants") if each.name == name]
    assert (listed.active, listed.as_json()["num_versions"]) == (1, 1)
    assert ask(server.url, "delete", name).deleted == (1,)
    with pytest.raises(ServerRefused) as refused:
        ask(server.url, "variant", name)
    assert (refused.value.status, refused.value.code) == (404, "model_not_found")


def test_keys_and_limits_are_made_listed_and_taken_back(
    guarded_server: tuple[LiveServer, Path], artifacts: Artifacts, ask: Asking
) -> None:
    (server, key_file), tenant = guarded_server, f"tenant-{next(NUMBERS)}"
    url = server.url
    admin = {"key_file": key_file}
    assert ask(url, "me", client=admin).is_admin
    made = ask(url, "create_key", tenant, ["publish", "inference"], 3600, client=admin)
    assert made.expires_at is not None
    assert [each.id for each in ask(url, "keys", tenant, client=admin)] == [made.id]
    own = {"key": made.key}
    assert eventually(lambda: _is_known(ask, url, own))
    assert ask(url, "acting_tenant", client=own) == tenant
    assert ask(url, "push", artifacts.plain, "theirs", client=own).version == 1
    acting = {**admin, "tenant": tenant}
    assert [each.name for each in ask(url, "variants", client=acting)] == ["theirs"]
    limits = ask(url, "set_limits", tenant, max_pinned=3, client=admin).limits
    assert limits["max_pinned"] == 3
    assert ask(url, "set_limits", tenant, max_running=2, client=admin).limits["max_pinned"] == 3
    assert tenant in [each.name for each in ask(url, "tenants", client=admin).tenants]
    assert ask(url, "stats", client=admin).server.ready is True
    assert ask(url, "revoke_key", made.id, client=admin).id == made.id
    assert eventually(lambda: not _is_known(ask, url, own))


def _is_known(ask: Asking, url: str, client: dict[str, Any]) -> bool:
    try:
        ask(url, "me", client=client)
    except AuthenticationFailed:
        return False
    return True


def test_a_push_over_a_connection_that_breaks_makes_one_version(
    server: LiveServer, artifacts: Artifacts, ask: Asking, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("client.waiting.MAX_PAUSE_S", 0)
    lines: list[str] = []
    host, port = server.url.removeprefix("http://").split(":")
    size = artifacts.spare[1].stat().st_size
    with cutting_proxy(host, int(port), size // 2) as proxy:
        pushed = ask(proxy.url, "push", artifacts.spare[1], name, client={"tell": lines.append})
        assert len(proxy.sent) == 2
    assert pushed.version == 1
    assert lines[0].startswith("attempt 1 of 8 failed: the connection to")


def test_what_a_client_waits_for_is_logged(
    ask: Asking, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("client.waiting.MAX_PAUSE_S", 0)
    whole = answer(200, {"choices": [{"message": {"content": "Yes."}}]})
    with scripted_server(refuse(503, "overloaded", "it loads", Retry_After="0"), whole) as server:
        assert ask(server.url, "chat", "a", "Hi").text == "Yes."
    (record,) = caplog.records
    assert record.getMessage() == f"waiting up to 120 s for {server.url}: it loads"


def test_calls_of_functions_and_thoughts_are_in_a_whole_answer(ask: Asking) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    message = {"content": None, "reasoning_content": "So", "tool_calls": [call]}
    with scripted_server(
        answer(200, {"choices": [{"message": message, "finish_reason": "tool_calls"}]})
    ) as server:
        found = ask(server.url, "chat", "a", "Hi", tools=[{"type": "function"}])
    assert (found.text, found.reasoning, found.tool_calls) == ("", "So", [call])
    assert json.loads(server.received[0].body)["tools"] == [{"type": "function"}]


@pytest.mark.parametrize(
    ("call", "args"),
    [
        ("variant", ("..",)),
        ("promote", ("a@1", 2)),
        ("load", ("a@x",)),
        ("delete", ("a@",)),
        ("set_limits", ("../keys",)),
        ("set_limits", ("a",)),
        ("revoke_key", ("no id",)),
        ("push", ("gone.safetensors", "a")),
        ("push", ("gone.safetensors", "no name")),
    ],
)
def test_arguments_that_no_server_takes_are_refused_before_any_call(
    call: str, args: tuple[Any, ...], ask: Asking
) -> None:
    with scripted_server() as server, pytest.raises(UsageError) as refused:
        ask(server.url, call, *args)
    assert server.calls == []
    assert "--" not in str(refused.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "host:8000"}, "`url` 'host:8000' is no server's address"),
        ({"url": "http://u:pw@host"}, "or a `key_file`"),
        ({"url": "http://host", "key": "two words"}, "`key` holds no API key"),
        ({"url": "http://host", "key_file": "gone"}, "give `key_file` a file that holds the key"),
        ({"url": "http://host", "key": "a", "key_file": "b"}, "`key` and `key_file` both give a key"),
    ],
)
@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_errors_of_an_address_name_arguments(kind: type, options: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError) as refused:
        kind(**options)
    assert message in str(refused.value)
    assert "--" not in str(refused.value)
    assert "two words" not in str(refused.value)


@pytest.mark.parametrize(
    ("reaction", "kind"),
    [
        (answer(200, b"<html>"), UnexpectedReply),
        (answer(200, {"tenant": 1}), UnexpectedReply),
        (answer(200, b'{"tenant": "\xff"}'), UnexpectedReply),
        (refuse(401, "invalid_api_key"), AuthenticationFailed),
        (refuse(500, "internal_error"), ServerRefused),
        (answer(302, b"", Location="http://elsewhere"), ServerRefused),
        (break_off(), NoAnswer),
    ],
)
def test_failed_calls_are_told_apart_and_name_arguments(reaction: Any, kind: type, ask: Asking) -> None:
    with scripted_server(reaction) as server, pytest.raises(PeraxisError) as failed:
        ask(server.url, "me")
    assert type(failed.value) is kind
    assert "--" not in str(failed.value)


def test_where_nothing_listens_the_way_out_is_an_argument(ask: Asking) -> None:
    with scripted_server() as server:
        url = server.url
    with pytest.raises(NoServer, match="or give its address as `url`"):
        ask(url, "variants")
    with pytest.raises(NoServer, match="or `wait_s` if it is starting"):
        ask(url, "chat", "a", "Hi")
    with pytest.raises(NoServer) as gave_up:
        ask(url, "chat", "a", "Hi", client={"wait_s": 1})
    assert "`wait_s` waits longer" in gave_up.value.__notes__[0]


@pytest.mark.parametrize(
    ("stream", "last", "kind"),
    [
        ("stream_chat", None, UnexpectedReply),
        ("stream_chat", {"error": {"message": "it ended", "code": "engine_restarted"}}, ServerRefused),
        ("stream_chat", ["no chunk"], UnexpectedReply),
    ],
)
def test_an_answer_that_breaks_off_keeps_what_has_come(
    stream: str, last: Any, kind: type[PeraxisError]
) -> None:
    documents = [{"choices": [{"delta": {"content": "Hel"}}]}, *([] if last is None else [last])]
    with (
        scripted_server(events(*documents, is_whole=False)) as server,
        Client(server.url) as client,
        client.stream_chat("a", "Hi") as found,
    ):
        assert next(found).content == "Hel"
        with pytest.raises(kind):
            next(found)
        assert found.answer.text == "Hel"
        assert not found.answer.is_whole


def test_events_of_generations_that_fail_or_are_none_are_errors() -> None:
    for content, kind in (
        (b'event: token\ndata: {"index": 0, "token_id": 1, "text": "a"}\n\n', UnexpectedReply),
        (b'event: error\ndata: {"error": {"message": "it ended", "code": "x"}}\n\n', ServerRefused),
        (b'event: token\ndata: {"index": 1000000000, "token_id": 1, "text": "a"}\n\n', UnexpectedReply),
        (b'event: finish\ndata: {"index": -1, "finish_reason": "stop"}\n\n', UnexpectedReply),
        (b"event: token\ndata: 1\n\n", UnexpectedReply),
    ):
        with scripted_server(answer(200, content)) as server, Client(server.url) as client:
            found = client.stream_generate("Hi")
            with pytest.raises(kind):
                list(found)
            assert isinstance(found.answer, Generation)


def test_a_stream_that_is_left_closes_its_connection() -> None:
    chunk = {"choices": [{"delta": {"content": "Hel"}}]}
    with scripted_server(hang_after(chunk), hang_after(chunk)) as server:
        with Client(server.url) as client, client.stream_chat("a", "Hi") as stream:
            assert next(stream).content == "Hel"

        async def leave() -> str:
            async with AsyncClient(server.url) as client, client.stream_chat("a", "Hi") as stream:
                await anext(stream)
                return stream.answer.text

        assert asyncio.run(leave()) == "Hel"
        # The server ends an answer when its client has left.
        assert eventually(lambda: len(server.received) == 2)


def test_a_blocking_client_works_inside_a_running_event_loop(server: LiveServer) -> None:
    async def cell() -> bool:
        with Client(server.url) as client:
            return bool(client.models())

    assert asyncio.run(cell())


def test_threads_share_a_client(server: LiveServer) -> None:
    found: list[str] = []
    with Client(server.url) as client:

        def generate() -> None:
            found.append(client.generate("hello", "plain", max_new_tokens=4, temperature=0).text)

        threads = [threading.Thread(target=generate) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(found) == 4
    assert len({*found}) == 1


def test_a_push_shows_its_progress_only_if_it_is_asked_to(
    tmp_path: Path, ask: Asking, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "LINE_INTERVAL_S", 0)
    file = tmp_path / "tuned.safetensors"
    file.write_bytes(ARTIFACT_PREFIX + bytes(3_000_000))
    created = {"name": "a", "version": 1, "digest": "sha256:0", "size_bytes": 1, "active": True}
    replies = [refuse(404, "model_not_found"), answer(201, created)] * 2
    with scripted_server(*replies) as server:
        ask(server.url, "push", file, "a")
        assert capsys.readouterr().err == ""
        ask(server.url, "push", file, "a", progress=True)
    assert "sending tuned.safetensors: 100%" in capsys.readouterr().err
    assert server.received[1].body == file.read_bytes()


def test_a_file_that_changes_while_it_is_sent_ends_the_push(
    tmp_path: Path, ask: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "tuned.safetensors"
    file.write_bytes(ARTIFACT_PREFIX + bytes(3_000_000))

    def shorten(handler: Any) -> bytes:
        file.write_bytes(ARTIFACT_PREFIX)
        return refuse(404, "model_not_found")(handler)

    with scripted_server(shorten, answer(201, {})) as server, pytest.raises(ArtifactError, match="changed"):
        ask(server.url, "push", file, "a")


def test_the_address_comes_from_the_environment_if_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERAXIS_URL", "http://elsewhere:1/")
    with Client() as client:
        assert (client.address.url, repr(client)) == ("http://elsewhere:1", "Client('http://elsewhere:1')")
    monkeypatch.delenv("PERAXIS_URL")
    with Client() as client:
        assert client.address.url == "http://127.0.0.1:8000"


def test_importing_the_client_imports_no_torch() -> None:
    program = (
        "import sys, client.client; print({'torch', 'numpy', 'pydantic', 'server', 'typer'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
