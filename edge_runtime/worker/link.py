"""Carry frames between this worker and its supervisor over one socket. No meaning, only transport."""

from __future__ import annotations

import select
import socket
import threading

from edge_runtime.worker.frames import FrameReader, FromWorker, ToWorker, encode_frame

_READ_BLOCK = 1 << 16


class LinkClosedError(Exception):
    """The supervisor is gone: nobody is left to work for."""


class Link:
    """The worker's end of the socket pair. Any thread may send; one thread receives."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._socket.setblocking(True)
        self._lock = threading.Lock()
        self._reader = FrameReader(ToWorker)
        self._pending: list[ToWorker] = []
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def send(self, message: FromWorker) -> None:
        """Write one frame whole; waits while the supervisor is not reading. Raises LinkClosedError."""
        self.send_bytes(encode_frame(message))

    def send_bytes(self, data: bytes) -> None:
        """Write raw bytes whole. Raises LinkClosedError."""
        with self._lock:
            try:
                self._socket.sendall(data)
            except OSError as error:
                raise LinkClosedError(str(error)) from error

    def receive(self, timeout_s: float | None) -> list[ToWorker]:
        """Return the frames that have come in; wait for bytes at most `timeout_s` (0 = not at all, None = for ever).

        The list may be empty after a wait: the bytes of a frame can come in pieces. Raises LinkClosedError at the end
        of the stream and FrameError for bytes that are no frame.
        """
        if self._pending:
            frames, self._pending = self._pending, []
            return frames
        if not self._poll.poll(None if timeout_s is None else timeout_s * 1000):
            return []
        try:
            data = self._socket.recv(_READ_BLOCK)
        except OSError as error:
            raise LinkClosedError(str(error)) from error
        if not data:
            raise LinkClosedError("end of stream")
        return list(self._reader.feed(data))

    def receive_one(self) -> ToWorker:
        """Wait for one frame; those that came with it are kept for `receive`. Raises as `receive`."""
        while not (frames := self.receive(None)):
            pass
        self._pending = frames[1:]
        return frames[0]

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self._socket.close()
