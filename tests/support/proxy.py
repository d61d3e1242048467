"""Stand between an MQTT client and its broker and break the connection in the ways that networks do.

Packets are passed on whole, so that single ones can be lost. Each direction of each connection has two threads: one
reads, one writes what is due.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Literal

from support.broker import HOST, free_port

Side = Literal["client", "broker"]
SIDES: tuple[Side, ...] = ("client", "broker")
Due = queue.Queue[tuple[float, bytes] | None]  # when a packet is written; None is the end
PUBACK = 4
WAITING_PACKETS = 64  # per direction; then nothing more is read, as on a real way


class Proxy:
    """Passes connections to `port` on, from a port of its own. A context manager.

    `delay_s` holds each packet back for so long.
    """

    def __init__(self, port: int, *, delay_s: float = 0.0) -> None:
        self.port = free_port()
        self.delay_s = delay_s
        self.dropped: Counter[tuple[Side, int]] = Counter()  # by sender and packet type
        self._target = port
        self._to_drop: Counter[tuple[Side, int]] = Counter()
        self._flowing: dict[Side, threading.Event] = {side: threading.Event() for side in SIDES}
        self._listener: socket.socket | None = None
        self._sockets: set[socket.socket] = set()
        self._lock = threading.Lock()

    def __enter__(self) -> Proxy:
        self.up()
        return self

    def __exit__(self, *_: object) -> None:
        self.resume()
        self.down()

    # ---- faults

    def stall(self, *senders: Side) -> None:
        """Stop passing on what these, or both, send, without closing anything: both ends believe in the connection."""
        for sender in senders or SIDES:
            self._flowing[sender].clear()

    def resume(self) -> None:
        for flowing in self._flowing.values():
            flowing.set()

    def cut(self) -> None:
        """Close every connection; new ones are taken."""
        with self._lock:
            sockets = list(self._sockets)
        for sock in sockets:
            close(sock)

    def down(self) -> None:
        """Close everything; new connections are refused."""
        listener, self._listener = self._listener, None
        if listener is not None:
            close(listener)
        self.cut()

    def up(self) -> None:
        """Take connections, again."""
        self.resume()
        self._listener = socket.create_server((HOST, self.port))
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def drop_next(self, sender: Side, packet_type: int) -> None:
        """Lose the next packet of a type that comes from there; `dropped` counts it."""
        with self._lock:
            self._to_drop[sender, packet_type] += 1

    # ---- what passes on

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the listener was closed
            while True:
                client, _ = listener.accept()
                try:
                    self._connect(client)
                except OSError:  # no broker: the client sees its connection end
                    close(client)

    def _connect(self, client: socket.socket) -> None:
        broker = socket.create_connection((HOST, self._target))
        for sock in (client, broker):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            self._sockets |= {client, broker}
        self._pass_on("client", client, broker)
        self._pass_on("broker", broker, client)

    def _pass_on(self, sender: Side, source: socket.socket, sink: socket.socket) -> None:
        due: Due = queue.Queue(WAITING_PACKETS)
        for target in (lambda: self._read(sender, source, due), lambda: self._write(sender, sink, source, due)):
            threading.Thread(target=target, daemon=True).start()

    def _read(self, sender: Side, source: socket.socket, due: Due) -> None:
        with contextlib.suppress(OSError):
            for packet in packets(source, self._flowing[sender]):
                if not self._is_dropped(sender, packet[0] >> 4):
                    due.put((time.monotonic() + self.delay_s, packet))
        due.put(None)

    def _write(self, sender: Side, sink: socket.socket, source: socket.socket, due: Due) -> None:
        with contextlib.suppress(OSError):
            while (item := due.get()) is not None:
                time.sleep(max(0.0, item[0] - time.monotonic()))  # the delay that was asked for
                self._flowing[sender].wait()
                sink.sendall(item[1])
        for sock in (sink, source):
            close(sock)
        with self._lock:
            self._sockets -= {sink, source}
        with contextlib.suppress(queue.Empty):
            while True:  # the reader may wait for room
                due.get_nowait()

    def _is_dropped(self, sender: Side, packet_type: int) -> bool:
        with self._lock:
            if not self._to_drop[sender, packet_type]:
                return False
            self._to_drop[sender, packet_type] -= 1
            self.dropped[sender, packet_type] += 1
            return True


def packets(source: socket.socket, flowing: threading.Event) -> Iterator[bytes]:
    """Yield whole MQTT packets until the other end closes; nothing is read while `flowing` is not set."""
    data = b""
    while True:
        length = packet_length(data)
        if length is None or len(data) < length:
            flowing.wait()
            more = source.recv(1 << 14)
            if not more:
                return
            data += more
            continue
        yield data[:length]
        data = data[length:]


def packet_length(data: bytes) -> int | None:
    """Return the length of the first packet, header included; None when its header is not complete."""
    value = 0
    for index in range(1, min(len(data), 5)):
        value |= (data[index] & 0x7F) << (7 * (index - 1))
        if not data[index] & 0x80:
            return index + 1 + value
    return None


def close(sock: socket.socket) -> None:
    """Close a socket on which another thread may be waiting."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()
