import json
import os
import pathlib
import subprocess
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

import bench_results
import forked_programs
from benchmarks import gpu_check
from benchmarks.gpu_check import Part
from graphfsdp.bench.command import SHORTEST_CASE_S, parse_bench_arguments
from graphfsdp.bench.results import RESULT, Row
from time_limits import until

STOPPED = types.SimpleNamespace(monotonic=lambda: 0.0)  # a clock


def test_without_a_gpu_it_says_so_and_writes_nothing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main([]) == 2
    assert "torch sees none here" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_a_rehearsal_on_the_cpu_prints_a_table_and_writes_a_file(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    test = "def test_one(record_property):\n    record_property('speed', 3)\n"
    (tmp_path / "test_one.py").write_text(test)
    part = Part(100, (f"{tmp_path}/test_one.py::test_one",))
    monkeypatch.setattr(gpu_check, "PARTS", {"tests": part})
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    assert gpu_check.main(["--device", "cpu", "--times", "10"]) == 0
    (path,) = (tmp_path / "out").iterdir()
    document = json.loads(path.read_text())
    (part,) = document["parts"]
    assert (part["name"], document["ok"]) == ("tests", True)
    assert document["environment"]["torch"] == torch.__version__
    rows = [(row["what"], row["result"]) for row in part["rows"]]
    assert rows[0][1] == "1 passed, 0 failed, 0 skipped"
    assert rows[1:] == [("speed", "3")]
    assert "1 passed, 0 failed, 0 skipped" in capsys.readouterr().out


def test_the_tests_of_all_parts_exist_and_smoke_are_twenty_five() -> None:
    parts = {name: part.tests for name, part in gpu_check.PARTS.items() if part.tests}
    programs = {"bench", "reduce-overhead", "nodes", "optimizer"}
    assert gpu_check.PARTS.keys() - parts.keys() == programs
    assert len(parts["smoke"]) == 25
    # By themselves: beside a folder pytest does not look at what else is named of it.
    assert all((gpu_check.ROOT / path).exists() for path in parts.pop("tests"))
    names = [name.replace("DEVICE", "cpu") for part in parts.values() for name in part]
    program = "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"
    options = ("--collect-only", "-q", "-p", "no:cacheprovider", "--strict-markers")
    result = forked_programs.run_source(program, *options, *names)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> dict[Part, float]:
    """What each part is given while the clock stands still and nothing runs."""
    given: dict[Part, float] = {}

    def note(part: Part, limit_s: float, *_: Any, **__: Any) -> list[Row]:
        given[part] = limit_s
        return []

    monkeypatch.setattr(gpu_check, "run_part", note)
    monkeypatch.setattr(gpu_check, "time", STOPPED)
    monkeypatch.setattr(gpu_check, "find_environment", lambda _: bench_results.ENVIRONMENT)
    return given


def test_no_part_takes_the_seconds_of_later_ones(
    tmp_path: pathlib.Path, limits: dict[Part, float]
) -> None:
    seconds = {name: part.seconds for name, part in gpu_check.PARTS.items()}
    of_two = {name for name, part in gpu_check.PARTS.items() if part.gpus > 1}
    names = ("tests", "overlap", "optimizer")
    parts = {name: gpu_check.PARTS[name] for name in names}
    gpu_check.check(torch.device("cpu"), parts, tmp_path / "result.json", times=2.0)
    for index, name in enumerate(names):
        later = sum(seconds[other] for other in names[index + 1 :])
        assert limits[parts[name]] == 2 * (gpu_check.TOTAL_LIMIT_S - later)
    first, *_ = seconds
    assert first == "smoke"
    assert set(list(seconds)[-len(of_two) :]) == of_two
    alone = [name for name in seconds if name not in of_two]
    assert alone[-1] == "reduce-overhead"
    for group in (alone, of_two):
        assert sum(seconds[name] for name in group) <= gpu_check.TOTAL_LIMIT_S
    least = min(seconds[name] for name in ("bench", "reduce-overhead"))
    assert least - gpu_check.BENCH_START_S > SHORTEST_CASE_S


def test_what_needs_two_gpus_has_seconds_of_its_own_or_is_left_out(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, limits: dict[Part, float]
) -> None:
    parts = {n: part for n, part in gpu_check.PARTS.items() if n == "smoke" or part.gpus > 1}
    smoke, *others = parts.values()
    # The clock stands still: what smoke leaves is everybody's.
    later = sum(part.seconds for part in others)
    for num_gpus, of_smoke in ((1, gpu_check.TOTAL_LIMIT_S), (2, gpu_check.TOTAL_LIMIT_S - later)):
        limits.clear()
        monkeypatch.setattr(torch.cuda, "device_count", lambda num=num_gpus: num)
        document = gpu_check.check(torch.device("cuda"), parts, tmp_path / "result.json")
        assert document["ok"]
        assert limits[smoke] == of_smoke
        rows = [row["result"] for part in document["parts"] for row in part["rows"]]
        assert rows == ["left out: 1 of 2 GPUs are here"] * (len(parts) - len(limits))
        assert len(limits) == (len(parts) if num_gpus == 2 else 1)
    assert limits[others[-1]] == gpu_check.TOTAL_LIMIT_S


def in_place_of_programs(
    monkeypatch: pytest.MonkeyPatch,
    code: int | None,
    write: Callable[[pathlib.Path], object] = lambda _: None,
    says: str = "said before\nCUDA error",
) -> list[list[str]]:
    """Let programs end so, with what ``write`` writes; return their arguments."""
    commands: list[list[str]] = []

    def run(command: list[str], *_: object, **__: object) -> tuple[int | None, str]:
        commands.append(command)
        write(pathlib.Path(command[-1]))
        return code, says

    monkeypatch.setattr(gpu_check, "run_limited", run)
    return commands


def run_part(name: str, results: pathlib.Path, *, rehearses: bool = False) -> list[Row]:
    part, cuda = gpu_check.PARTS[name], torch.device("cuda")
    return gpu_check.run_part(part, 360, cuda, results, times=1.0, rehearses=rehearses)


@pytest.mark.parametrize(
    ("name", "code", "result"),
    [
        ("nodes", None, "stopped after 360 s"),
        ("bench", 1, "the process ended with 1: CUDA error"),
    ],
)
def test_a_program_s_rows_are_kept_and_one_that_fails_is_a_row_with_all_that_it_said(
    name: str,
    code: int | None,
    result: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = [{"what": "a node", "result": "slow", "ok": False}]
    in_place_of_programs(monkeypatch, 1, lambda path: path.write_text(json.dumps({"rows": rows})))
    assert run_part("nodes", tmp_path) == rows
    in_place_of_programs(monkeypatch, code)
    (row,) = run_part(name, tmp_path)
    assert (row["result"], row["ok"]) == (result, False)
    assert row["text"] == "said before\nCUDA error"


def test_on_a_gpu_only_its_tests_run_and_few_of_a_file_in_a_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = [f"tests/a/x.py::test[{number}]" for number in range(13)]
    says = "\n".join([*names, "tests/a/y.py::test", "14 found"])
    commands = in_place_of_programs(monkeypatch, 0, says=says)
    monkeypatch.setattr(gpu_check, "time", STOPPED)
    part = Part(100, ("tests/a", "tests/b.py::test"))
    rows = gpu_check.tests_part(part, 100, torch.device("cuda"), 1.0)
    assert [row["what"] for row in rows] == ["pytest tests/b.py::test", "pytest tests/a"]
    given = [[word for word in command if "::" in word] for command in commands]
    assert all("gpu or multi_gpu" in command for command in commands)
    wanted = [[], ["tests/b.py::test"], names[:12], names[12:], ["tests/a/y.py::test"]]
    assert sorted(given) == sorted(wanted)


def test_the_benchmark_is_a_part_whose_result_is_kept(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bad is a contender of ours that did not run, and no other one."""
    made = bench_results.result()
    ours = {"contender": "forward_backward", "reason": "CaptureError: no"}
    made.rows.append({**bench_results.FACTS, **ours})

    def write(out: pathlib.Path) -> None:
        out.mkdir()
        made.write(out / RESULT)

    commands = in_place_of_programs(monkeypatch, 0, write)
    rows = {row["what"]: row for row in run_part("bench", tmp_path)}
    case = bench_results.CASE
    captured = rows[f"{case}: full_iteration"]["result"]
    assert ", ms/step 1.500, tokens/s 85,333, init s 0.02, " in captured
    assert captured.startswith("times as fast as eager 2.50 (2.00 to 3.00), ")
    assert "losses against eager equal bit for bit" in captured
    assert rows[f"{case}: compile"]["result"] == "no compiler"
    assert rows["moe: left out"]["result"] == "no time"
    bad = f"{case}: forward_backward"
    assert rows[bad]["result"] == "CaptureError: no"
    assert [what for what, row in rows.items() if not row["ok"]] == [bad]
    assert {path.name for path in tmp_path.iterdir()} == {"bench_cpu.jsonl"}
    run_part("bench", tmp_path, rehearses=True)
    whole, small = (parse_bench_arguments(each[each.index("bench") + 1 :]) for each in commands)
    assert (whole.suite, small.suite, small.contender) == ("gpu", "quick", whole.contender)
    assert whole.budget is not None
    assert whole.budget * 60 < 360


def test_a_part_that_fails_does_not_stop_the_others(tmp_path: pathlib.Path) -> None:
    """Where each test has a process of its own, one that ends its process does not stop others."""
    (tmp_path / "test_bad.py").write_text(
        "import os\ndef test_bad():\n    assert 1 + 1 == 3\ndef test_dies():\n    os._exit(7)\n"
    )
    (tmp_path / "test_one.py").write_text("def test_one():\n    pass\n")
    bad = [f"{tmp_path}/test_bad.py::{name}" for name in ("test_bad", "test_dies")]
    one = f"{tmp_path}/test_one.py::test_one"
    parts = {"smoke": Part(80, (*bad, one)), "tests": Part(110, (one,))}
    path, cpu = tmp_path / "result.json", torch.device("cpu")
    document = gpu_check.check(cpu, parts, path, times=20.0)
    assert json.loads(path.read_text()) == document
    assert not document["ok"]
    smoke, tests = document["parts"]
    rows = {row["result"]: row for row in smoke["rows"]}
    assert list(rows) == [
        "0 passed, 1 failed, 0 skipped",
        "assert (1 + 1) == 3",
        "0 passed, 0 failed, 0 skipped",
        "pytest ended with 7",
        "1 passed, 0 failed, 0 skipped",
    ]
    assert rows["pytest ended with 7"]["what"].endswith("test_dies")
    assert "def test_bad" in rows["assert (1 + 1) == 3"]["text"]
    assert tests["ok"]
    (missing,) = gpu_check.tests_part(Part(9, (f"{tmp_path}/missing.py",)), 600, cpu, 1.0)
    assert (missing["result"], missing["ok"]) == ("ended with 4", False)
    count, late = gpu_check.tests_part(Part(9, tuple(bad[:1])), 0, cpu, 1.0)
    assert not count["ok"]
    assert late["result"].startswith("left out")


def test_a_suite_that_takes_too_long_still_reports_what_it_ran(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "test_long.py").write_text(
        "import pathlib, threading, time\ndef test_one():\n    pass\ndef test_two():\n"
        "    touch = pathlib.Path(__file__).with_name('long').touch\n"
        "    threading.Timer(0.5, touch).start()  # on a thread that no interruption comes to\n"
        "    time.sleep(600)\n"
    )
    over_when(tmp_path / "long", monkeypatch)
    counts, (late,) = gpu_check.run_tests([str(tmp_path)], 600, torch.device("cpu"))
    assert counts == {"passed": 1}
    assert "stopped after 600 s" in late["result"]
    assert "test_long.py:7: KeyboardInterrupt" in late["result"]


def over_when(path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the first limit be over when the file is there."""
    first = [True]

    def wait(program: subprocess.Popen[bytes], limit_s: float) -> int | None:
        if first:
            first.clear()
            assert until(path.exists, 100)
            return None
        return program.wait(100)

    monkeypatch.setattr(gpu_check, "wait", wait)


def test_what_hangs_is_killed_with_all_that_it_has_started(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C does not reach it, and its child holds the output, as a rank does."""
    program = (
        "import os, pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "child = os.fork()\n"
        "if child: pathlib.Path(sys.argv[1] + '.new').write_text(str(child))\n"
        "if child: os.rename(sys.argv[1] + '.new', sys.argv[1])\n"
        "print('hangs', flush=True); time.sleep(600)\n"
    )
    path = tmp_path / "child"
    over_when(path, monkeypatch)
    command = [sys.executable, "-c", program, str(path)]
    code, output = gpu_check.run_limited(command, 600, os.environ)
    assert code is None
    assert "hangs" in output
    child = int(path.read_text())
    assert until(lambda: state_of(child) in "Z-", 100)


def state_of(pid: int) -> str:
    """Return its state as the system names it, and '-' where there is none."""
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "-"
    return stat.rpartition(")")[2].split()[0]
