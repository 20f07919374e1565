"""The engine's socket: a ZeroMQ ROUTER to which every client connects. Passes bytes."""

from __future__ import annotations

import errno
import os

import zmq

from server.errors import EngineFailed
from server.protocol.messages import MAX_MESSAGE_BYTES

# Messages that wait in ZeroMQ for a client that does not read.
MAX_WAITING_MESSAGES = 10_000
# How long the last messages may take to leave after `close`.
LINGER_MS = 1000


class ClientLost(Exception):
    """A message cannot be delivered: its client is gone."""


class EngineSocket:
    """Receives from any client and sends to one by its identity. One thread uses it; `wake` may be called from any.

    Raises:
        EngineFailed: the address cannot be bound, as on a full disk.
    """

    def __init__(self, address: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        # Otherwise ZeroMQ drops messages to clients that are gone, and their requests would run on.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.set_hwm(MAX_WAITING_MESSAGES)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._socket.close(0)
            reason = os.strerror(error.errno or errno.EIO)
            raise EngineFailed(f"cannot bind the engine's socket {address}: {reason}") from error
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wakeup, zmq.POLLIN)

    def receive(self, wait_s: float) -> list[tuple[bytes, bytes]]:
        """Return what has arrived, each with its client's identity; wait up to `wait_s` for the first or for `wake`."""
        ready = dict(self._poller.poll(int(wait_s * 1000)))
        if self._wakeup in ready:
            os.eventfd_read(self._wakeup)
        received: list[tuple[bytes, bytes]] = []
        while self._socket in ready:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            if len(frames) == 2:
                received.append((frames[0], frames[1]))
        return received

    def send(self, identity: bytes, raw: bytes) -> bool:
        """Send to one client without waiting. Return False if `MAX_WAITING_MESSAGES` wait for it already.

        Raises:
            ClientLost: the client is gone.
        """
        try:
            self._socket.send_multipart([identity, raw], zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            # EHOSTUNREACH, or another error of this client's connection alone.
            raise ClientLost(identity) from error
        return True

    def wake(self) -> None:
        """End the wait in `receive`: the engine has something to do although no message came."""
        os.eventfd_write(self._wakeup, 1)

    def close(self) -> None:
        """Close after the last messages have left, or `LINGER_MS`."""
        self._socket.close(LINGER_MS)
        os.close(self._wakeup)
