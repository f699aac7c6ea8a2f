"""CPU minutes of the suite for each folder of tests: measured around each test, printed and compared with budgets."""

from __future__ import annotations

import resource
from collections import defaultdict
from collections.abc import Iterator

import pytest

# CPU minutes of all processes of a folder's tests, a quarter more than two cores need. Only their sum is ever lowered.
BUDGETS = {"cases": 0.4, "conversions": 0.4, "distributed": 17.7, "faults": 4.9, "gpu": 0.2, "launch": 6.5}
BUDGETS |= {"mutants": 2.6, "parity": 6.0, "recommended": 0.4, "unit": 8.9}
_USED = "cpu seconds"


def cpu_seconds() -> float:
    """Return user and system time of this process and of all children that have ended."""
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in spent)


class SuiteMinutes:
    """Plugin: adds the CPU seconds of each test to its last report, and sums them where the suite is controlled."""

    def __init__(self, config: pytest.Config) -> None:
        self.begun = 0.0
        self.minutes: defaultdict[str, float] = defaultdict(float)
        whole = config.args_source == pytest.Config.ArgsSource.TESTPATHS and not config.option.keyword
        self.held = whole and config.option.markexpr == "not long and not engine"

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self) -> None:
        self.begun = cpu_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Iterator[None]:
        report = yield
        if call.when == "teardown":
            report.user_properties.append((_USED, cpu_seconds() - self.begun))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            folder = report.nodeid.split("/")[1]
            self.minutes[folder] += dict(report.user_properties).get(_USED, 0.0) / 60

    def over(self) -> list[str]:
        return [
            f"tests/{folder} took {spent:.1f} CPU minutes; its budget is {BUDGETS.get(folder, 'missing')}: "
            "make tests cheaper, or move further rows to `make long` with longer(...)"
            for folder, spent in self.minutes.items()
            if self.held and spent > BUDGETS.get(folder, -1.0)
        ]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.exitstatus == pytest.ExitCode.OK and self.over():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if sum(self.minutes.values()) < 1:
            return
        shares = ", ".join(f"{folder} {spent:.1f}" for folder, spent in sorted(self.minutes.items()))
        terminalreporter.write_line(f"CPU minutes: {shares}; together {sum(self.minutes.values()):.1f}")
        for line in self.over():
            terminalreporter.write_line(f"FAILED {line}", red=True)
