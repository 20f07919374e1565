"""Errors of calls to a server: no answer, a refusal, or an answer that is not a Peraxis server's."""

from __future__ import annotations

from deltastore.errors import PeraxisError


class NoAnswer(PeraxisError):
    """The connection broke, or the answer took too long."""


class NoServer(NoAnswer):
    """No connection could be made."""


class ServerRefused(PeraxisError):
    """The server answered with an error.

    Args:
        message: One line with the way out.
        status: The HTTP status.
        code: The server's code of the error; None if the answer has none, such as a proxy's.
        retry_after_s: The seconds after which the server takes the call again; None if it does not say.
    """

    def __init__(
        self, message: str, status: int, code: str | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s


class AuthenticationFailed(ServerRefused):
    """The server asks for a key, does not know it, or does not let it make this call."""

    exit_code = 4


class UnexpectedReply(PeraxisError):
    """An answer that a Peraxis server of this version does not give."""
