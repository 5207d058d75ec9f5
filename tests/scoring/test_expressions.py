import os
import signal
import threading

import pytest

from configs.errors import StageFailed
from tasks.core.scoring import expressions
from tasks.core.scoring.answers import same_answer


def ask_in_a_thread(question: list[str]) -> bool:
    """What the helper says, asked from a thread other than the main one."""
    found = []
    thread = threading.Thread(target=lambda: found.append(expressions._helper.ask(question)))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("huge", ["9^{9^{9^9}}", "\\sqrt{2}^{10^{10}}", "(10^{10})!", "\\sum_{n=1}^{10^9} \\sin(n^2)"])
def test_what_would_be_computed_for_ever_is_ended_and_the_next_question_answered(huge):
    # Straight to the helper: `same_answer` keeps most of this from it.
    assert ask_in_a_thread(["\\sqrt{8}", "2\\sqrt{2}"]) is True
    computing = expressions._helper.process
    assert ask_in_a_thread(["\\sqrt{2}", huge]) is False
    assert computing.returncode == -signal.SIGPROF
    assert ask_in_a_thread(["\\sqrt{8}", "2\\sqrt{2}"]) is True


@pytest.mark.timeout(300)
def test_threads_share_the_helper():
    right, wrong = [], []
    threads = [
        threading.Thread(target=lambda n=n: right.append(same_answer(f"\\sqrt{{{4 * n}}}", f"2\\sqrt{{{n}}}")))
        for n in (2, 3, 5, 7)
    ]
    threads += [
        threading.Thread(target=lambda n=n: wrong.append(same_answer(f"\\sqrt{{{n}}}", f"2\\sqrt{{{n}}}")))
        for n in (2, 3, 5, 7)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (right, wrong) == ([True] * 4, [False] * 4)


def test_a_fork_has_a_helper_of_its_own():
    assert expressions.equal("\\sqrt{20}", "2\\sqrt{5}") is True
    parents = expressions._helper.process.pid
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        answered = expressions.equal("\\sqrt{45}", "3\\sqrt{5}")
        os.write(write, b"own" if answered and expressions._helper.process.pid != parents else b"shared")
        expressions._helper.end()
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 10) == b"own"
    assert expressions._helper.process.poll() is None


def test_a_helper_that_cannot_start_is_no_wrong_answer(monkeypatch):
    monkeypatch.setattr(expressions, "__file__", "/nowhere/expressions.py")
    helper = expressions._Helper()
    with pytest.raises(StageFailed, match="math-verify does not start"):
        helper.ask(["\\sqrt{2}", "2"])
