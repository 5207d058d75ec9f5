"""Mathematical expressions, compared by math-verify in a process of its own, which a deadline really stops.

math-verify keeps time with SIGALRM, which works in a main thread alone, and no thread of ours can stop a power tower that is being computed. Here the
kernel ends the helper when a question has taken it `CPU_SECONDS` of processor time (so that a busy machine judges as an idle one does), whatever it
is busy with, and the next question starts a new one. The file is also that process: `python -P expressions.py`, which imports nothing of ours.
"""

import atexit
import json
import os
import selectors
import subprocess
import sys
import threading
from functools import lru_cache
from typing import Any

CPU_SECONDS = 2.0
WALL_SECONDS = 60.0  # where the helper is given no processor at all
START_SECONDS = 180.0
MEMORY_BYTES = 4 * 2**30


@lru_cache(maxsize=16_384)
def equal(gold: str, answer: str) -> bool:
    """Whether math-verify takes two LaTeX expressions for equal; False where it cannot say within the deadline. Floats must agree to 12 decimals."""
    return _helper.ask([gold, answer])


@lru_cache(maxsize=16_384)
def parses(expression: str) -> bool:
    """Whether math-verify understands a LaTeX expression, within the deadline."""
    return _helper.ask([expression])


class _Helper:
    """The process that compares: started when first asked, one question at a time, begun anew when it was ended."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process: subprocess.Popen | None = None

    def ask(self, question: list[str]) -> bool:
        """The helper's answer; False where it was ended over the question. Raises StageFailed where it does not even start."""
        with self.lock:
            if self.process is None:
                self._start()
            try:
                self.process.stdin.write(json.dumps(question).encode() + b"\n")
                reply = self._reply(WALL_SECONDS)
            except BrokenPipeError:
                reply = None
            if reply is None:
                self.end()
            return reply is True

    def _start(self) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "bufsize": 0}
        # -P: the folder of this file holds modules whose names others use.
        self.process = subprocess.Popen([sys.executable, "-P", __file__], **pipes)
        reply = self._reply(START_SECONDS)
        if reply != "ready":
            self.end()
            from configs.errors import StageFailed

            raise StageFailed(
                f"math-verify does not start ({reply or 'no sign of life'}): install Ratchet with its dependencies"
            )

    def _reply(self, seconds: float) -> Any:
        """One line of the helper's, parsed; None where it ended or took too long."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            line = b""
            while not line.endswith(b"\n"):
                if not selector.select(seconds):
                    return None
                part = os.read(self.process.stdout.fileno(), 4096)
                if not part:
                    return None
                line += part
        return json.loads(line)

    def end(self) -> None:
        """Ends the helper, where there is one."""
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()


_helper = _Helper()


def _forget() -> None:
    """A forked process must not talk through its parent's pipes."""
    global _helper
    _helper = _Helper()


os.register_at_fork(after_in_child=_forget)
atexit.register(lambda: _helper.end())


def _serve() -> None:
    """The helper's side: answers a line per line until its parent is gone."""
    import resource
    import signal

    # The protocol's pipe is out of reach of anything that prints.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        judge = _judge()
    except Exception as error:  # whatever a broken installation does
        print(json.dumps(f"{type(error).__name__}: {error}"), file=out)
        return
    print(json.dumps("ready"), file=out)
    for line in sys.stdin:
        # No handler: the kernel ends the process, in the middle of a long multiplication too.
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        try:
            reply = judge(*json.loads(line))
        except Exception:  # whatever a parser does with what no parser was made for
            reply = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(reply), file=out)


def _judge() -> Any:
    import logging

    logging.disable(logging.CRITICAL)
    from math_verify import LatexExtractionConfig, parse, verify

    def parsed(text: str) -> list:
        # In dollar signs, and nothing but LaTeX: math-verify would otherwise pick any number out of a sentence.
        return parse(
            f"${text}$",
            [LatexExtractionConfig()],
            fallback_mode="no_fallback",
            extraction_mode="first_match",
            parsing_timeout=None,
        )

    def judge(gold: str, answer: str | None = None) -> bool:
        left = parsed(gold)
        if answer is None or not left:
            return bool(left)
        right = parsed(answer)
        return bool(right) and bool(verify(left, right, strict=True, float_rounding=12, timeout_seconds=None))

    judge(r"\frac{x}{2}", r"\frac{x}{2}")  # compiles the grammar
    return judge


if __name__ == "__main__":
    _serve()
