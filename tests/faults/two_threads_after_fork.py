"""A program: forks many workers that use autograd in several threads at once; prints how many were ended by a signal.

Other processes keep the cores busy meanwhile, so that threads are stopped in the middle of what they do.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from phalanx.launch.worker_process import renew_autograd

FORKS, THREADS, BUSY = 150, 2, 2


def compute() -> None:
    layers, together = [nn.Linear(16, 5) for _ in range(THREADS)], threading.Barrier(THREADS)

    def work(layer: nn.Linear) -> None:
        together.wait()
        layer(torch.ones(4, 16)).sum().backward()

    with ThreadPoolExecutor(THREADS, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        list(pool.map(work, layers))


def main(renewing: bool) -> int:
    nn.Linear(300, 300)(torch.ones(300, 300)).sum().backward()  # the parent has an engine that computed
    ended = 0
    for _ in range(FORKS):
        pid = os.fork()
        if pid == 0:
            if renewing:
                renew_autograd()
            compute()
            os._exit(0)
        ended += os.waitpid(pid, 0)[1] != 0
    return ended


if __name__ == "__main__":
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(BUSY)]
    try:
        print(main(renewing=sys.argv[1:] != ["as-it-is"]))
    finally:
        for one in busy:
            one.kill()
