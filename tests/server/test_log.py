"""Log lines as text and as JSON, with the request that they belong to and without messages that may quote a prompt."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deltastore.errors import RegistryError
from server.log import configure_logging
from server.protocol.request import RequestContext, current_request
from server.registry_calls import BackgroundThreads
from server.settings import Settings

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CONTEXT = RequestContext("req-1", f"00-{TRACE}-00f067aa0ba902b7-01")
SECRET = "the tenant's words"

log = logging.getLogger("server.test_log")


@pytest.fixture
def configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., io.StringIO]]:
    """Return a function that configures logging with some settings and returns the stream of its lines."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], logging.getLogger("server").level

    def configure(**given: Any) -> io.StringIO:
        stream = io.StringIO()
        monkeypatch.setattr("sys.stderr", stream)
        # Taken away first, because `force` would close pytest's handlers.
        root.handlers[:] = []
        configure_logging("http-1", Settings(base=tmp_path, registry=str(tmp_path), **given))
        return stream

    yield configure
    root.handlers[:] = handlers
    logging.getLogger("server").setLevel(level)


def fail(cause: Exception) -> None:
    try:
        raise cause
    except Exception as error:
        raise RegistryError("the disk failed") from error


def logged_failure() -> None:
    try:
        fail(ValueError(SECRET))
    except RegistryError:
        log.exception("it failed")


def test_a_json_line_has_time_level_role_process_logger_and_message(
    configured: Callable[..., io.StringIO],
) -> None:
    stream = configured(log_format="json")
    log.info("two\nlines %s", '"quoted"', extra={"fields": {"status": 200}})
    (line,) = stream.getvalue().splitlines()
    document = json.loads(line)
    assert document.pop("time").endswith("+00:00")
    assert document.pop("process") > 0
    assert document == {
        "level": "INFO", "role": "http-1", "logger": "server.test_log", "message": 'two\nlines "quoted"', "status": 200
    }  # fmt: skip


def test_lines_of_a_request_and_of_its_threads_name_it(configured: Callable[..., io.StringIO]) -> None:
    async def work() -> None:
        current_request.set(CONTEXT)
        log.info("on the event loop")
        await asyncio.create_task(asyncio.to_thread(log.info, "on a thread"))
        await BackgroundThreads(1, "test").run(log.info, "on a background thread")

    stream = configured(log_format="json")
    asyncio.run(work())
    log.info("of no request")
    *lines, last = map(json.loads, stream.getvalue().splitlines())
    assert [(line["request_id"], line["trace_id"]) for line in lines] == [("req-1", TRACE)] * 3
    assert not {"request_id", "trace_id"} & last.keys()


def test_a_line_may_name_another_request_than_its_tasks(configured: Callable[..., io.StringIO]) -> None:
    stream = configured(log_format="json")
    log.info("x", extra={"request_id": "req-2", "trace_id": None})
    document = json.loads(stream.getvalue())
    assert document["request_id"] == "req-2"
    assert "trace_id" not in document


def test_a_text_line_ends_with_its_request(configured: Callable[..., io.StringIO]) -> None:
    stream = configured()
    log.info("hello", extra={"request_id": "req-1"})
    log.info("hello")
    first, second = stream.getvalue().splitlines()
    assert first.endswith("server.test_log: hello [request req-1]")
    assert second.endswith("server.test_log: hello")


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_traceback_hides_messages_that_are_not_our_own(
    configured: Callable[..., io.StringIO], log_format: str
) -> None:
    stream = configured(log_format=log_format)
    logged_failure()
    text = stream.getvalue()
    assert SECRET not in text
    assert "ValueError: (message hidden: --log-prompts shows it)" in text
    assert "RegistryError: the disk failed" in text
    assert "in logged_failure" in text


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_server_that_logs_prompts_shows_every_message(
    configured: Callable[..., io.StringIO], log_format: str
) -> None:
    stream = configured(log_format=log_format, log_prompts=True)
    logged_failure()
    assert SECRET in stream.getvalue()


def test_a_message_holds_no_line_of_a_client_s_choosing(configured: Callable[..., io.StringIO]) -> None:
    stream = configured()
    log.warning("refused: %s", "a\n2026-01-01 INFO forged\r\x1b[2J\u2028end")
    try:
        raise RegistryError("a\nforged")
    except RegistryError as error:
        log.warning("failed", exc_info=error)
    lines = stream.getvalue().splitlines()
    assert r"a\n2026-01-01 INFO forged\r\x1b[2J\u2028end" in lines[0]
    assert lines[-1] == r"RegistryError: a\nforged"
