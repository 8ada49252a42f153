"""Which test runs which line: a plugin of pytest for `tests/mutants.py`.

With RECORD in the environment it records the lines that each test runs, and its seconds. With NOW it
writes down the test that has begun, and ends the process if that test takes far longer than recorded.
"""

from __future__ import annotations

import faulthandler
import json
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import coverage
import pytest

RECORD = "MEGACKPT_MUTANTS_RECORD"
"""A folder: lines and seconds of this process are added to those in it."""

NOW = "MEGACKPT_MUTANTS_NOW"
"""A file whose text is the test that has begun last."""

SECONDS = "MEGACKPT_MUTANTS_SECONDS"
"""A JSON file of the seconds that each test is known to take."""


def pytest_configure(config: pytest.Config) -> None:
    """Start what the environment asks for."""
    if RECORD in os.environ and os.environ.get("PYTEST_XDIST_WORKER", "no worker") != "no worker":
        config.pluginmanager.register(Recorder(Path(os.environ[RECORD])))
    if NOW in os.environ:
        config.pluginmanager.register(Watch(Path(os.environ[NOW]), Path(os.environ[SECONDS])))


class Recorder:
    """Lines of the package that each test of this process runs, on all its threads."""

    def __init__(self, folder: Path) -> None:
        self._stem = folder / f"process-{os.getpid()}"
        self._coverage = coverage.Coverage(
            data_file=f"{self._stem}.lines", config_file=False, source=["megackpt"], concurrency="thread"
        )
        self._coverage.start()
        self._seconds: dict[str, float] = defaultdict(float)
        self._not_passed: set[str] = set()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Name the test of the lines that follow."""
        self._coverage.switch_context(item.nodeid)
        result = yield
        self._coverage.switch_context("")
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the seconds of a test's phase; one that does not pass here can prove nothing."""
        self._seconds[report.nodeid] += report.duration
        if not report.passed:
            self._not_passed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        """Write what was recorded."""
        self._coverage.stop()
        self._coverage.save()
        passed = {name: s for name, s in self._seconds.items() if name not in self._not_passed}
        Path(f"{self._stem}.json").write_text(json.dumps(passed))


class Watch:
    """Says which test runs, and ends the process when one hangs."""

    def __init__(self, now: Path, seconds: Path) -> None:
        self._now = now
        self._seconds: dict[str, float] = json.loads(seconds.read_text())
        self._traces: TextIO = now.with_suffix(".hang").open("w")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Bound the time of a test: far above what is recorded, because the machine may be busy."""
        self._now.write_text(item.nodeid)
        limit = 60 + 10 * self._seconds.get(item.nodeid, 30)
        faulthandler.dump_traceback_later(limit, exit=True, file=self._traces)
        result = yield
        faulthandler.cancel_dump_traceback_later()
        return result
