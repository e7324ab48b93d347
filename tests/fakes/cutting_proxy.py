"""A proxy before a real server that breaks downloads off: the first `cuts` of them, each after `after` bytes."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from urllib.parse import urlsplit


class CuttingProxy:
    """`starts`: the first byte that each download asked for. `after` counts the answer's head, too."""

    def __init__(self, server: str, cuts: int, after: int) -> None:
        self._target = (str(urlsplit(server).hostname), int(urlsplit(server).port or 80))
        self._cuts = cuts
        self._after = after
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.starts: list[int] = []

    def run(self) -> None:
        with suppress(OSError):  # closed: the end
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._relay, args=(client,), daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _relay(self, client: socket.socket) -> None:
        with client, socket.create_connection(self._target) as server, suppress(OSError):
            connection = _Connection()
            threading.Thread(target=self._requests, args=(client, server, connection), daemon=True).start()
            while answer := server.recv(2**16):
                cut = connection.left is not None and len(answer) >= connection.left
                client.sendall(answer[: connection.left] if cut else answer)
                if cut:
                    for end in (client, server):
                        end.shutdown(socket.SHUT_RDWR)
                    return
                if connection.left is not None:
                    connection.left -= len(answer)

    def _requests(self, client: socket.socket, server: socket.socket, connection: _Connection) -> None:
        with suppress(OSError):
            while request := client.recv(2**16):
                connection.left = None
                if request.startswith(b"GET /api/exports/"):
                    start = re.search(rb"range: bytes=(\d+)-", request, re.IGNORECASE)
                    self.starts.append(int(start[1]) if start else 0)
                    if self._cuts > 0:
                        self._cuts -= 1
                        connection.left = self._after
                server.sendall(request)
            server.shutdown(socket.SHUT_RDWR)


@dataclass
class _Connection:
    """`left`: bytes of the answer until it is cut; None: it is whole."""

    left: int | None = None


@contextmanager
def cutting_proxy(server: str, cuts: int, after: int = 50_000) -> Iterator[CuttingProxy]:
    proxy = CuttingProxy(server, cuts, after)
    thread = threading.Thread(target=proxy.run, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.close()
        thread.join(10)
