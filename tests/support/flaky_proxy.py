"""A TCP proxy in front of the MLflow server that fails like a network."""

import contextlib
import socket
import threading


class FlakyProxy:
    """Relays all connections until one of three failures is switched on; `restore` ends it.

    - `disconnect` closes every connection and refuses new ones.
    - `hang` closes every connection and leaves new ones without an answer.
    - `lose_answers` relays requests, but not the answers to those that contain `part`.
    """

    def __init__(self, uri: str):
        host, _, port = uri.rpartition("/")[2].partition(":")
        self.target = (host, int(port))
        self.server = socket.create_server(("127.0.0.1", 0))
        self.uri = f"http://127.0.0.1:{self.server.getsockname()[1]}"
        self.refused = self.lost = 0
        self._relaying = threading.Event()
        self._relaying.set()
        self._lost_part: bytes | None = None
        self._hanging = False
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def disconnect(self) -> None:
        self._relaying.clear()
        for end in self._sockets:
            _close(end)

    def hang(self) -> None:
        self._hanging = True
        self.disconnect()

    def lose_answers(self, part: bytes) -> None:
        self._lost_part = part

    def restore(self) -> None:
        if self._hanging:  # clients would wait for the answers to their earlier requests
            self.disconnect()
        self._lost_part, self._hanging = None, False
        self._relaying.set()

    def close(self) -> None:
        self.disconnect()
        self.server.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self.server.accept()
            except OSError:
                return
            if not self._relaying.is_set():
                self.refused += 1
                self._sockets.append(client)
                if not self._hanging:
                    _close(client)
                continue
            server = socket.create_connection(self.target)
            self._sockets += [client, server]
            lose_answer = threading.Event()
            for relay in (self._relay_requests, self._relay_answers):
                threading.Thread(target=relay, args=(client, server, lose_answer), daemon=True).start()

    def _relay_requests(self, client: socket.socket, server: socket.socket, lose_answer: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(65536):
                if self._lost_part is not None and self._lost_part in data:
                    lose_answer.set()
                server.sendall(data)
        _close(client)
        _close(server)

    def _relay_answers(self, client: socket.socket, server: socket.socket, lose_answer: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(65536):
                if lose_answer.is_set():
                    self.lost += 1
                    break
                client.sendall(data)
        _close(client)
        _close(server)


def _close(end: socket.socket) -> None:
    # `close` alone does not wake a thread that waits in `recv`.
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()
