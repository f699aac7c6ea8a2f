"""Every test: one torch thread, a folder of its own, and nothing left behind."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from zlib import crc32

import psutil
import pytest
import torch

from emulator import Hosts
from emulator.network import lacking
from forked import get_over_with
from suite_minutes import SuiteMinutes

# A shell starts what it runs in the background with interrupts ignored, and programs inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
START_WORKERS = {"cases", "conversions", "distributed", "faults", "launch", "mutants", "parity", "recommended"}
torch.set_num_threads(1)  # workers are forked: a parallel region here would leave them a broken thread pool


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path.parent))


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    environment = dict(os.environ)
    processes, threads = _children(), set(threading.enumerate())
    yield
    deadline = time.monotonic() + 3
    while (left := _left(processes, threads)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left, f"left behind: {left}"
    changed = {name for name in environment.keys() | os.environ.keys() if environment.get(name) != os.environ.get(name)}
    torchs_own = {"TORCHINDUCTOR_CACHE_DIR"}  # set when its compiler is first imported
    sklearns_own = {"KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"}  # set when it is first imported
    assert changed <= {"PYTEST_CURRENT_TEST", *torchs_own, *sklearns_own}, f"environment changed: {changed}"


@pytest.fixture(autouse=True)
def _quick_starts_no_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "quick" in request.keywords:
        for module, name in ((os, "fork"), (subprocess, "Popen")):
            monkeypatch.setattr(module, name, _refused)


def _refused(*given: Any, **how: Any) -> Any:
    raise AssertionError("a quick test starts a process: take pytest.mark.quick from its file")


def _children() -> set[psutil.Process]:
    try:  # to look through all processes of the machine takes longer than most tests
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return set()
    return set(psutil.Process().children(recursive=True))


def _left(before: set[psutil.Process], threads: set[threading.Thread]) -> list[str]:
    processes = [child for child in _children() - before if child.status() != psutil.STATUS_ZOMBIE]
    alive = [thread.name for thread in threading.enumerate() if thread not in threads and not thread.daemon]
    return [str(process) for process in processes] + alive


@pytest.fixture(scope="session")
def _ready_to_fork() -> None:
    get_over_with()


@pytest.fixture(autouse=True)
def _workers_are_forked_from_what_is_ready(request: pytest.FixtureRequest) -> None:
    """In the folders whose tests start workers, each of which would otherwise load and do it again."""
    if request.path.parent.name in START_WORKERS:
        request.getfixturevalue("_ready_to_fork")


@pytest.fixture
def hosts() -> Iterator[Callable[..., Hosts]]:
    """Makes hosts for the length of the test, ``hosts(2, rate=1e8)``; skips it where none can be made."""
    with ExitStack() as up:

        def make(count: int, **how: Any) -> Hosts:
            made = Hosts(count, **how)
            if why := lacking(made.link):
                pytest.skip(why)
            return up.enter_context(made)

        yield make


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Where several processes run the suite: a ``realtime`` test runs while the others run none.

    Around the whole protocol, so that waiting counts towards no test's timeout.
    """
    if not hasattr(item.config, "workerinput"):
        return (yield)
    folder = item.config._tmp_path_factory.getbasetemp().parent
    kind = fcntl.LOCK_EX if "realtime" in item.keywords else fcntl.LOCK_SH
    with (folder / "door").open("w+") as door, (folder / "room").open("w+") as room:
        # Locks of a process: not those of what it forks, and gone with it. Who waits for the room keeps the door.
        fcntl.lockf(door, fcntl.LOCK_EX)
        fcntl.lockf(room, kind)
        fcntl.lockf(door, fcntl.LOCK_UN)
        return (yield)


BY_ITSELF = ("test_what_the_page_shows_runs",)  # a scope for each row


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``-n 2 --dist loadscope``: each process takes the next file as soon as it is free."""
    from xdist.scheduler import LoadScopeScheduling

    class Files(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return nodeid if any(one in nodeid for one in BY_ITSELF) else nodeid.partition("::")[0]

    config.option.loadscopereorder = False  # small files come last, so that both end at nearly the same time
    return Files(config, log)


# Fixtures of tests/launch that start an engine, hosts with a server, or programs on stand-ins for hosts.
ENGINES = frozenset({"apart", "check", "cluster", "server", "servers", "start", "wired"})


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part", metavar="I/N", help="of the tests marked long only every N-th, from the I-th; 0/4 to 3/4"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(SuiteMinutes(config))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.part:
        part, parts = map(int, config.option.part.split("/"))
        others = [one for one in items if "long" in one.keywords and crc32(one.nodeid.encode()) % parts != part % parts]
        config.hook.pytest_deselected(items=others)
        left_out = set(others)
        items[:] = [one for one in items if one not in left_out]
    _mark_engines(items)
    if torch.cuda.device_count() == 0:
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="no CUDA device here"))


def _mark_engines(items: list[pytest.Item]) -> None:
    """Mark tests that need an engine, but for the first test of each file and fixture, which runs in every suite."""
    seen: set[tuple[Path, str]] = set()
    for item in items:
        if item.path.parent.name == "launch" and "long" not in item.keywords:
            used = {(item.path, name) for name in ENGINES.intersection(getattr(item, "fixturenames", ()))}
            if used and used <= seen:
                item.add_marker(pytest.mark.engine)
            seen |= used
