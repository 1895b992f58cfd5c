"""Runs the test suite in a process of its own and reads what it reports."""

import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.environment import ROOT

GRACE_S = 20
MAX_CHARACTERS = 6000


@dataclass(frozen=True)
class SuiteResult:
    """Counts of the suite, and what went wrong.

    Attributes:
        failures: Name and traceback of each test that failed or broke.
        skips: Name and reason of each test that was skipped.
        error: Why the counts are not to be trusted, None if they are.
    """

    num_passed: int
    num_failed: int
    num_skipped: int
    failures: dict[str, str]
    skips: dict[str, str]
    error: str | None


def run_suite(paths: Sequence[str], limit_s: float, options: Sequence[str] = ()) -> SuiteResult:
    """Run pytest on ``paths``; past the limit it is asked to stop and to report so far.

    Args:
        paths: Files and folders.
        limit_s: Seconds.
        options: More for pytest's command line.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "report.xml"
        # A plugin that happens to be installed may warn, and here a warning is an error.
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        command += [f"--junitxml={report}", *options, *paths]
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # Shells start background jobs with SIGINT ignored, and children inherit that.
            preexec_fn=_hear_interrupts,
        )
        late = False
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            late = True
            process.send_signal(signal.SIGINT)
            try:
                output, _ = process.communicate(timeout=GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                output, _ = process.communicate()
        if not report.exists():
            error = f"pytest ended with {process.returncode}:\n{output[-MAX_CHARACTERS:]}"
            return SuiteResult(0, 0, 0, {}, {}, error)
        # A test that was interrupted has an entry without a name.
        cases = [case for case in ElementTree.parse(report).iter("testcase") if case.get("name")]
        error = ""
        if late:
            places = [line for line in output.splitlines() if line.endswith("KeyboardInterrupt")]
            where = "; ".join(["the counts are of what ran", *places])
            error = f"stopped after {limit_s:.0f} s; {where}"
        elif process.returncode not in (0, 1):
            error = f"pytest ended with {process.returncode}:\n{output[-MAX_CHARACTERS:]}"
        return _count(cases, error or None)


def _hear_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _name(case: ElementTree.Element) -> str:
    return f"{case.get('classname', '')}.{case.get('name', '')}"


def _count(cases: Iterable[ElementTree.Element], error: str | None) -> SuiteResult:
    failures: dict[str, str] = {}
    skips: dict[str, str] = {}
    num_passed = 0
    for case in cases:
        outcomes = {element.tag: element for element in case}
        bad = outcomes.get("failure", outcomes.get("error"))
        if bad is not None:
            failures[_name(case)] = (bad.text or bad.get("message") or "")[-MAX_CHARACTERS:]
        elif "skipped" in outcomes:
            skips[_name(case)] = outcomes["skipped"].get("message") or ""
        else:
            num_passed += 1
    return SuiteResult(num_passed, len(failures), len(skips), failures, skips, error)
