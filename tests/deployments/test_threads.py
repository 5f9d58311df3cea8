import asyncio
import subprocess
import sys
import threading
import time

import pytest

from deployments.threads import in_thread


async def give_up(call):
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(in_thread(call), 0.05)


def test_the_result_and_the_error_of_a_call_arrive():
    def fail():
        raise KeyError("lost")

    assert asyncio.run(in_thread(divmod, 7, 2)) == (3, 1)
    with pytest.raises(KeyError, match="lost"):
        asyncio.run(in_thread(fail))


def test_a_loop_ends_although_a_call_does_not():
    never, entered = threading.Event(), threading.Event()

    def wait():
        entered.set()
        never.wait()

    begun = time.monotonic()
    asyncio.run(give_up(wait))
    assert entered.is_set()
    assert time.monotonic() - begun < 5.0
    never.set()


def test_a_call_that_ends_after_the_loop_disturbs_nobody(recwarn):
    go, gone = threading.Event(), threading.Event()

    def wait():
        go.wait()
        gone.set()

    asyncio.run(give_up(wait))
    go.set()
    assert gone.wait(5.0)
    time.sleep(0.05)
    assert not recwarn.list


def test_what_a_process_frees_it_need_not_ask_for_again():
    program = """
import resource
from deployments.threads import keep_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        [b"rows" * 250_000 for _ in range(8)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

keep_memory()
faults()
print(faults())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert int(done.stdout) < 1000  # each of the ten times takes 2000 pages
