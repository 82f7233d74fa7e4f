"""A network between a client and Postgres that does to connections what failing networks and failovers do.

It forwards bytes, in threads of its own. `arm` sets a fault for the next message that the client sends on a
connection that is already in use.
"""

from __future__ import annotations

import queue
import socket
import ssl
import threading
from contextlib import suppress
from types import TracebackType
from typing import Literal, Self

Fault = Literal["lose the answer", "lose the question", "deliver late", "hang"]


class Proxy:
    """Listens on a port of its own and connects to the server's."""

    def __init__(self, port: int, *, tls: ssl.SSLContext | None = None) -> None:
        self._target = port
        self._tls = tls
        self._fault: Fault | None = None
        self._before = 0
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._late: list[tuple[socket.socket, bytes]] = []
        self._late_answers: queue.Queue[bytes] = queue.Queue()
        self.faults = 0
        """How many faults there were."""
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for each in self._sockets:
            _end(each)

    def arm(self, fault: Fault | None, *, after: int = 0) -> None:
        """Do this to the next message, or to one after some others; nothing, for None."""
        with self._lock:
            self._fault, self._before = fault, after

    def deliver_late(self) -> bytes:
        """Let the server have the messages that were held back; return what it answers to the last one."""
        said = b""
        for server, message in self._late:
            server.sendall(message)
            said = self._late_answers.get(timeout=60)
            _end(server)
        self._late.clear()
        return said

    def _taken(self, message: bytes) -> Fault | None:
        """Take the fault, unless the connection is only being made or ended."""
        with self._lock:
            fault = self._fault
            # P, B, Q begin a statement; what has no such letter is the start of a connection.
            if fault is None or message[:1] not in b"PBQ":
                return None
            if self._before:
                self._before -= 1
                return None
            self._fault = None
            self.faults += 1
            return fault

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            if self._tls is not None:
                asked = client.recv(8)
                assert asked[4:] == b"\x04\xd2\x16\x2f", "the client did not ask for TLS"
                client.sendall(b"S")
                client = self._tls.wrap_socket(client, server_side=True)
            server = socket.create_connection(("127.0.0.1", self._target))
        except OSError:
            _end(client)
            return
        self.connections += 1
        self._sockets += (client, server)
        fault: list[Fault] = []
        threading.Thread(target=self._back, args=(client, server, fault), daemon=True).start()
        with suppress(OSError):
            while message := client.recv(1 << 20):
                taken = self._taken(message)
                if taken is not None:
                    fault.append(taken)
                if taken == "deliver late":
                    self._late.append((server, message))
                    _end(client)
                    return
                if taken == "lose the question":
                    break
                server.sendall(message)
        _end(client)
        if not fault:
            _end(server)

    def _back(self, client: socket.socket, server: socket.socket, fault: list[Fault]) -> None:
        with suppress(OSError):
            while answer := server.recv(1 << 20):
                if "deliver late" in fault:
                    self._late_answers.put(answer)
                elif "lose the answer" in fault:
                    break  # The server has done it, and nobody hears of it.
                elif "hang" not in fault:
                    client.sendall(answer)
        _end(client)
        _end(server)


def _end(each: socket.socket) -> None:
    with suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)
    each.close()
