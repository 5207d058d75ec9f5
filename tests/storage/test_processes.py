import subprocess
import sys

from tasks.core.storage import processes


def test_a_process_is_found_by_its_id_and_start():
    pid, started = processes.myself()
    assert processes.find(pid, started).pid == pid


def test_a_process_that_has_the_id_of_another_now_is_not_that_one():
    pid, started = processes.myself()
    assert processes.find(pid, started - 60) is None


def test_a_process_that_has_ended_is_not_found():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        started = processes.psutil.Process(process.pid).create_time()
    assert processes.find(process.pid, started) is None
