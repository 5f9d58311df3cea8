"""CPU of the processes below this one, from the start of a node to its end."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from deployments.witness import append_line
from workflows.bench_cpu import REST, NodeCpu

WORKS_S = 0.3
WORK = f"""
import time
while input():
    until = time.process_time() + {WORKS_S}
    while time.process_time() < until:
        pass
    print(flush=True)
"""


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_a_child_works_in_a_node_counts_and_what_it_works_between_nodes_does_not(tmp_path: Path) -> None:
    nodes = tmp_path / "nodes.jsonl"
    with subprocess.Popen([sys.executable, "-c", WORK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:

        def work() -> None:
            print("now", file=child.stdin, flush=True)
            child.stdout.readline()

        with NodeCpu(nodes, "rollout", [2, 3]) as cpu:
            for event in ("started", "done"):
                append_line(nodes, node="rollout[1]", event=event)
            for event in ("started", "done"):
                append_line(nodes, node="rollout[2]", event=event)
            wait_until(lambda: len(cpu.spent) == 1)
            work()
            append_line(nodes, node="train[2]", event="started")
            append_line(nodes, node="rollout[3]", event="started")
            time.sleep(0.2)  # a reading that comes late would leave out what is asked for here
            work()
            append_line(nodes, node="rollout[3]", event="done")
            wait_until(lambda: len(cpu.spent) == 2)
        print(file=child.stdin, flush=True)
    assert WORKS_S - 0.05 <= cpu.spent[1][REST] <= 1.9 * WORKS_S
