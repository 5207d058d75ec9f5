"""A TCP relay to the MLflow server that can fail as a network does, and ways to look at what has arrived."""

import contextlib
import socket
import threading
import time


class Wire:
    """Relays until it fails, in one of three ways, and again once it is mended.

    `cut` ends every connection and any new one; `hang` leaves new ones without an answer; `mute` loses every answer to a request that has `lost` in it.
    """

    def __init__(self, uri: str):
        host, _, port = uri.rpartition("/")[2].partition(":")
        self.target = (host, int(port))
        self.server = socket.create_server(("127.0.0.1", 0))
        self.uri = f"http://127.0.0.1:{self.server.getsockname()[1]}"
        self.whole = threading.Event()
        self.whole.set()
        self.lost: bytes | None = None
        self.pairs: list[socket.socket] = []
        self.refused = self.muted = 0
        self.hanging = False
        threading.Thread(target=self._serve, daemon=True).start()

    def cut(self) -> None:
        self.whole.clear()
        for end in self.pairs:
            _close(end)

    def hang(self) -> None:
        self.hanging = True
        self.cut()

    def mend(self) -> None:
        if self.hanging:  # clients would wait for what was asked before
            self.cut()
        self.lost, self.hanging = None, False
        self.whole.set()

    def mute(self, lost: bytes) -> None:
        self.lost = lost

    def close(self) -> None:
        self.cut()
        self.server.close()

    def _serve(self) -> None:
        while True:
            try:
                near, _ = self.server.accept()
            except OSError:
                return
            if not self.whole.is_set():
                self.refused += 1
                self.pairs.append(near)
                if not self.hanging:
                    _close(near)
                continue
            far = socket.create_connection(self.target)
            self.pairs += [near, far]
            muted = threading.Event()
            threading.Thread(target=self._ask, args=(near, far, muted), daemon=True).start()
            threading.Thread(target=self._answer, args=(near, far, muted), daemon=True).start()

    def _ask(self, near: socket.socket, far: socket.socket, muted: threading.Event) -> None:
        try:
            while data := near.recv(65536):
                if self.lost is not None and self.lost in data:
                    muted.set()
                far.sendall(data)
        except OSError:
            pass
        _close(near)
        _close(far)

    def _answer(self, near: socket.socket, far: socket.socket, muted: threading.Event) -> None:
        try:
            while data := far.recv(65536):
                if muted.is_set():
                    self.muted += 1
                    break
                near.sendall(data)
        except OSError:
            pass
        _close(near)
        _close(far)


def _close(end: socket.socket) -> None:
    # `close` alone does not wake a thread that waits in `recv`.
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()


def history(tracking, run_id: str, name: str) -> list[tuple[int, float]]:
    """Steps and values of a metric, in the order in which they were logged."""
    return [(m.step, m.value) for m in tracking.client.get_metric_history(run_id, name)]


def wait_for(condition, seconds=120):
    """Whether the condition comes true in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.1)
    return False
