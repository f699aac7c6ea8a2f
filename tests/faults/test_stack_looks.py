"""A thread is looked at from another while it calls, returns, and leaves garbage whose finalizers let others run."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import gc, sys, threading, time
from phalanx.launch.stack_frames import frames_of_thread

class Dropped:
    alive = 0

    def __init__(self):
        self.me = self
        Dropped.alive += 1

    def __del__(self):
        Dropped.alive -= 1
        time.sleep(0)

def deep(n):
    kept = Dropped()
    return deep(n - 1) if n else [Dropped() for _ in range(5)]

def drawn(n):
    yield n
    if n:
        yield from drawn(n - 1)

def work(seconds):
    thread = threading.Thread(target=watch)
    thread.start()
    end = time.monotonic() + seconds
    while time.monotonic() < end and not wrong:
        deep(12)
        list(drawn(12))
        while Dropped.alive > 200:  # one collection at a time: while one goes on in the other thread, this one waits
            time.sleep(0)
            gc.collect()
    ended.append(True)
    thread.join()

def watch():
    while not ended:
        functions = [one.function for one in frames_of_thread(main)]
        looks.append(1)
        if functions[-2:] != ["work", "<module>"]:
            wrong.append(functions)

looks, wrong, ended = [], [], []
main = threading.main_thread().ident
sys.setswitchinterval(1e-6)
gc.set_threshold(100, 5, 5)
work(3.0)
assert not wrong, wrong[0]
assert len(looks) > 500, len(looks)
"""


def test_every_look_is_a_whole_stack() -> None:
    """Until Python 3.11 a look that lets the main thread run on reads freed memory: stacks cut short, or a crash."""
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
