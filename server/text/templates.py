"""Renders tenants' chat templates in a child process with a memory limit, which is killed if it takes too long.

Jinja's sandbox keeps a template from reading the host; it bounds neither its time nor its memory.
"""

from __future__ import annotations

import multiprocessing
import resource
import threading
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

from server.errors import InvalidRequest

RENDER_S = 5.0
START_S = 60.0
MEMORY_BYTES = 1 << 30  # on top of what the worker needs to start
MAX_CHARACTERS = 8 << 20


class TemplateWorker:
    """Renders one template at a time; replaces a process that was killed or died at the next call. Thread-safe."""

    def __init__(self, render_s: float = RENDER_S) -> None:
        self.render_s = render_s
        self._lock = threading.Lock()
        self._process: SpawnProcess | None = None
        self._connection: Connection | None = None

    def render(self, template: str, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        """Render `messages` with `template`, up to the opening of the assistant's turn.

        Args:
            variables: further variables of the template, such as special tokens.

        Raises:
            InvalidRequest: the template refuses the messages, fails, or takes longer than `render_s`.
        """
        with self._lock:
            connection = self._ready()
            try:
                connection.send((template, messages, variables))
                if not connection.poll(self.render_s):
                    raise InvalidRequest(
                        f"the chat template was not done after {self.render_s:g} s", "messages"
                    )
                text, error = connection.recv()
            except (InvalidRequest, EOFError, OSError) as failure:
                self._kill()
                if isinstance(failure, InvalidRequest):
                    raise
                raise InvalidRequest("the chat template needed too much memory", "messages") from failure
        if error is not None:
            raise InvalidRequest(f"the chat template refuses these messages: {error}", "messages")
        return str(text)

    def close(self) -> None:
        """Kill the process."""
        with self._lock:
            self._kill()

    def _ready(self) -> Connection:
        """Return the connection to a live process, started if need be."""
        if self._process is None or not self._process.is_alive() or self._connection is None:
            self._kill()
            context = multiprocessing.get_context("spawn")
            self._connection, child_end = context.Pipe()
            self._process = context.Process(
                target=_work, args=(child_end,), name="chat-templates", daemon=True
            )
            self._process.start()
            child_end.close()
            if not self._connection.poll(START_S):
                raise InvalidRequest("the chat template worker did not start: try again", "messages")
            self._connection.recv()
        return self._connection

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = None


def _work(connection: Connection) -> None:
    """Run the child process: render each template received and send text or an error, until the parent closes."""
    from transformers.utils.chat_template_utils import render_jinja_template

    _limit_memory()
    connection.send(None)
    while True:
        try:
            template, messages, variables = connection.recv()
        except EOFError:
            return
        connection.send(_render(render_jinja_template, template, messages, variables))


def _render(render: Any, template: str, messages: Any, variables: Any) -> tuple[str | None, str | None]:
    from jinja2 import TemplateError

    try:
        rendered, _ = render([messages], chat_template=template, add_generation_prompt=True, **variables)
    except (
        TemplateError,
        ArithmeticError,
        AttributeError,
        LookupError,
        MemoryError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        return None, f"{type(error).__name__}: {error}"[:500]
    if len(rendered[0]) > MAX_CHARACTERS:
        return None, f"it makes {len(rendered[0])} characters, more than {MAX_CHARACTERS}"
    return rendered[0], None


def _limit_memory() -> None:
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
