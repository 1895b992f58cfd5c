import dataclasses
import json
import pathlib
import subprocess
import time
from typing import Any

import pytest
import torch

import bench_results
import forked
from benchmarks import gpu_check, gpu_parts, gpu_programs, gpu_sharding
from graphfsdp._capture.phase import Phase
from graphfsdp.bench.clock import Window
from graphfsdp.bench.command import with_unasked
from graphfsdp.bench.records import NotRun
from graphfsdp.bench.report import write_directory


def run_gpu_check(out: pathlib.Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    program = "import runpy; runpy.run_module('benchmarks.gpu_check', None, '__main__')"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUT", str(out))
        return forked.run_source(program, *arguments)


def only_file(out: pathlib.Path) -> dict[str, Any]:
    (path,) = out.iterdir()
    document: dict[str, Any] = json.loads(path.read_text())
    return document


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path: pathlib.Path) -> None:
    result = run_gpu_check(tmp_path / "out")
    assert result.returncode == 2
    assert "torch sees none here" in result.stdout
    assert result.stderr == ""
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_rehearsal_on_the_cpu_prints_a_table_and_writes_a_file(tmp_path: pathlib.Path) -> None:
    (tmp_path / "test_one.py").write_text("def test_one():\n    pass\n")
    arguments = ["--device", "cpu", "--tests", str(tmp_path / "test_one.py")]
    arguments += ["--part", "tests", "--part", "offload"]
    result = run_gpu_check(tmp_path / "out", *arguments)
    assert result.returncode == 0, result.stdout + result.stderr
    document = only_file(tmp_path / "out")
    assert [part["name"] for part in document["parts"]] == ["tests", "offload"]
    assert document["ok"]
    assert document["environment"]["torch"] == torch.__version__
    for row in document["parts"][1]["rows"]:
        assert row["ok"]
        assert row["what"] in result.stdout
    assert "1 passed, 0 failed, 0 skipped" in result.stdout


def test_the_little_programs_are_twenty_five() -> None:
    assert len(gpu_programs.PROGRAMS) == 25
    assert set(gpu_parts.parts(rehearses=True)) == set(gpu_check.PART_NAMES)


def one_forked(function: Any, args: tuple[Any, ...], num_processes: int) -> None:
    """Do what torch.multiprocessing.spawn does, in a process that has imported torch."""
    assert num_processes == 1
    with forked.forked(function, 0, *args) as process:
        done = process.ended()
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", gpu_check.PART_NAMES[1:])
def test_every_part_runs_on_a_machine_without_a_gpu(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.multiprocessing.spawn", one_forked)
    programs = gpu_parts.parts(rehearses=True)[name]
    rows = [row for program in programs.values() for row in program(torch.device("cpu"))]
    assert rows
    assert [row for row in rows if not row.ok] == []
    assert json.dumps([row.data for row in rows])


def test_how_much_communication_runs_beside_computation() -> None:
    comm, compute = [(0.0, 4.0), (3.0, 5.0), (8.0, 9.0)], [(1.0, 2.0), (4.5, 8.5), (1.5, 3.0)]
    assert gpu_sharding.length(comm) == 6.0
    assert gpu_sharding.covered(comm, compute) == 2.0 + 0.5 + 0.5
    numbers = {"loss": 1.0, "peak_bytes": 100, "comm_us": 6.0, "hidden_us": 3.0}
    found: dict[str, dict[str, Any]] = {
        "torch fully_shard": numbers,
        "one after the other": {**numbers, "num_prefetches": 0},
        "overlap": {**numbers, "num_prefetches": 3, "peak_bytes": 120},
        "overlap and pool": {**numbers, "num_prefetches": 3, "loss": 2.0},
    }
    _, plain, more_memory, other_loss = gpu_sharding.overlap_rows(found, "gpt")
    assert (plain.result, plain.ok) == (
        "0 gathers begun ahead, peak 0 MiB, 1.00 of FSDP2's, 50% of communication beside "
        "computation",
        True,
    )
    assert not more_memory.ok
    assert not other_loss.ok
    found["overlap"] = {"error": "Traceback\nRuntimeError: no"}
    found["one after the other"] = {**numbers, "comm_us": 0.0, "hidden_us": 0.0}
    assert not gpu_sharding.overlap_rows(found, "gpt")[1].ok, "nothing was seen, nothing is judged"
    failed = gpu_sharding.overlap_rows(found, "gpt")[2]
    assert (failed.result, failed.ok) == ("RuntimeError: no", False)


def test_a_gpu_part_of_an_optimizer_is_judged_by_bandwidth_and_speed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = torch.device("cuda")
    names = ("torch AdamW(fused=True), fp32", "FusedAdam, fp32", "FusedAdam, main weights")
    times = dict(zip(names, (1000.0, 500.0, 2000.0), strict=True))

    def windows(*_: object) -> dict[str, list[Window]]:
        return {name: [Window((ms,), 0.0, 0.0)] * 2 for name, ms in times.items()}

    monkeypatch.setattr(gpu_parts, "interleave", windows)

    def judge(ceiling: float, *, by_graph: bool) -> list[bool]:
        moved = dict.fromkeys(names, 28.0)
        steps: dict[str, Any] = dict.fromkeys(names)
        rows = gpu_parts.speed_rows(
            moved, 10, ceiling, device, (1, 1), steps, "x", by_graph=by_graph
        )
        return [row.ok for row in rows]

    assert judge(600.0, by_graph=True) == [True, True, False]  # 560 and 140 bytes/s
    assert judge(600.0, by_graph=False) == [True, True, True]
    assert judge(700.0, by_graph=True) == [True, False, False]
    times["FusedAdam, fp32"] = 1100.0
    assert judge(100.0, by_graph=True) == [True, False, True]


def test_rows_of_a_part_that_is_killed_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"what": "a", "result": "b", "ok": True}
    said = json.dumps({"rows": [row], "error": "it did not end"}) + '\n{"rows": [half'

    def late(command: list[str], timeout: float, **_: object) -> None:
        raise subprocess.TimeoutExpired(command, timeout, said.encode(), b"warnings")

    monkeypatch.setattr("benchmarks.gpu_check.subprocess.run", late)
    part = gpu_check.programs_part("overlap", torch.device("cpu"), 5, 5, rehearses=True)
    stopped = {"what": "gpt-tiny", "result": "stopped after 5 s", "ok": False}
    assert part["rows"] == [row, stopped]
    assert part["error"] == "gpt-tiny:\nwarnings\nstopped after 5 s"

    def crash(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, -11, said, "Segmentation fault")

    monkeypatch.setattr("benchmarks.gpu_check.subprocess.run", crash)
    part = gpu_check.programs_part("overlap", torch.device("cpu"), 5, 5, rehearses=True)
    assert part["rows"][0] == row
    assert "ended with -11" in part["error"]
    assert "Segmentation fault" in part["error"]


def test_on_a_gpu_only_its_tests_run_and_on_several_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Any] = []

    def run_pytest(arguments: Any, limit_s: float) -> tuple[list[Any], str]:
        seen.extend([limit_s, list(arguments)])
        return [], ""

    monkeypatch.setattr(gpu_check, "run_pytest", run_pytest)
    monkeypatch.setattr("benchmarks.gpu_check.importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr("benchmarks.gpu_check.os.cpu_count", lambda: 16)
    gpu_check.suite_part(["tests"], 100, torch.device("cuda"))
    wanted = ["-m", "gpu or multi_gpu", "-p", "xdist", "-n", "6", "--dist", "loadfile"]
    wanted.append("tests")
    assert seen == [100, wanted]


def test_no_part_takes_the_seconds_of_later_ones(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: dict[str, float] = {}

    def note(name: str, device: Any, limit_s: float, *_: float, rehearses: bool) -> dict[str, Any]:
        limits[name] = limit_s
        return {"rows": [], "error": None}

    monkeypatch.setattr(gpu_check, "programs_part", note)
    names, path = ("parity-fp32", "overlap", "optimizer"), tmp_path / "result.json"
    gpu_check.check(torch.device("cpu"), names, [], path, times=2.0)
    budgets = gpu_check.BUDGETS_S
    assert sum(budgets.values()) <= gpu_check.TOTAL_LIMIT_S
    for index, name in enumerate(names):
        later = sum(budgets[other] for other in names[index + 1 :])
        assert 0 < 2 * (gpu_check.TOTAL_LIMIT_S - later) - limits[name] < 30
    assert next(iter(budgets)) == "smoke"
    assert list(budgets)[-1] == gpu_check.REDUCE_OVERHEAD


def test_a_little_program_that_fails_tells_its_whole_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(part: str, command: list[str], limit_s: float) -> subprocess.CompletedProcess[str]:
        rows = [{"what": command[2], "result": "equal", "ok": True}]
        bad = command[2] == "clipping"
        error = "Traceback (most recent call last):\n  ...\nRuntimeError: no" if bad else None
        document = {"rows": [] if bad else rows, "error": error}
        return subprocess.CompletedProcess(command, 0, f"said\n{json.dumps(document)}", "")

    monkeypatch.setattr(gpu_check, "_run", run)
    part = gpu_check.programs_part("smoke", torch.device("cpu"), 100, 100, rehearses=True)
    assert [row["what"] for row in part["rows"]] == list(gpu_programs.PROGRAMS)
    (bad,) = (row for row in part["rows"] if not row["ok"])
    assert (bad["what"], bad["result"]) == ("clipping", "RuntimeError: no")
    assert part["error"].startswith("clipping:\nTraceback (most recent call last):\n  ...")
    late = gpu_check.programs_part("smoke", torch.device("cpu"), 0, 100, rehearses=True)
    assert late["rows"][0]["result"].startswith("left out")


def test_a_little_program_compares_eager_and_captured() -> None:
    program, device = gpu_programs.PROGRAMS["two layers"], torch.device("cpu")
    (row,) = gpu_programs.compare("two", program, device)
    assert row.ok
    assert "equal bit for bit" in row.result
    calls = {Phase.REPLAY: lambda loss: loss + 1}
    changed = dataclasses.replace(
        program, call=lambda step, x: calls.get(step.phase, torch.clone)(step(x))
    )
    (row,) = gpu_programs.compare("two", changed, device)
    assert (row.result, row.ok) == ("loss of step 4 differs by 1", False)


def fake_bench(monkeypatch: pytest.MonkeyPatch, returncode: int = 0) -> list[list[str]]:
    """Put a result that nobody measured in the place of the command's; returns its arguments."""
    calls: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        asked = with_unasked(bench_results.case())
        write_directory(
            bench_results.result(cases=(asked,)),
            pathlib.Path(command[command.index("--out") + 1]),
            plots=returncode == 0,
        )
        return subprocess.CompletedProcess(command, returncode, "said before", "CUDA error")

    monkeypatch.setattr("benchmarks.gpu_check.subprocess.run", run)
    return calls


def test_the_benchmark_is_a_part_whose_result_and_picture_are_kept(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = fake_bench(monkeypatch)
    part = gpu_check.bench_part(torch.device("cuda"), 360, tmp_path)
    assert part["error"] is None
    rows = {row["what"]: row for row in part["rows"]}
    captured = rows["gpt-tiny fp32, 4 x 32 tokens: full_iteration"]
    assert captured["result"].startswith("ms/step 1.500, p95 ")
    assert "times as fast as eager 2.50 (2.00 to 3.00), " in captured["result"]
    assert "losses against eager equal bit for bit" in captured["result"]
    assert rows["gpt-tiny fp32, 4 x 32 tokens: compile"]["result"] == "no compiler"
    assert all(row["ok"] for row in part["rows"])
    assert {row["result"] for row in part["rows"] if "moe" in row["what"]} == {"left out: no time"}
    assert not any("pytorch" in what for what in rows), "nobody asked for it"
    assert {path.name for path in tmp_path.iterdir()} == {"bench_cpu.json", "bench_cpu.png"}
    (command,) = calls
    assert command[command.index("--suite") + 1] == "gpu"
    assert float(command[command.index("--budget") + 1]) * 60 < 360
    gpu_check.bench_part(torch.device("cpu"), 60, tmp_path, rehearses=True)
    assert calls[1][calls[1].index("--suite") + 1] == "quick"


def test_a_contender_of_ours_that_did_not_run_on_a_gpu_is_not_good(tmp_path: pathlib.Path) -> None:
    ours = NotRun("full_iteration", "", "CaptureError: no")
    case = dataclasses.replace(bench_results.case(), not_run=(ours,))
    write_directory(bench_results.result(cases=(case,)), tmp_path, plots=False)
    rows = gpu_check.bench_rows(tmp_path, tmp_path / "results")
    (row,) = (row for row in rows if row["result"] == "CaptureError: no")
    assert not row["ok"]


def test_a_benchmark_that_fails_is_an_error_of_its_part(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_bench(monkeypatch, returncode=1)
    part = gpu_check.bench_part(torch.device("cuda"), 360, tmp_path)
    assert part["rows"] == []
    assert part["error"] == "the process ended with 1\nsaid beforeCUDA error"


def test_a_difference_is_named() -> None:
    eager = {"loss of step 0": torch.tensor(1.0), "parameter a": torch.zeros(3)}
    other = {**eager, "parameter a": torch.tensor([0.0, 0.5, 0.0])}
    assert gpu_programs.first_difference(eager, eager) is None
    assert gpu_programs.first_difference(eager, other) == "parameter a differs by 0.5"


def test_a_part_that_fails_does_not_stop_the_others(tmp_path: pathlib.Path) -> None:
    (tmp_path / "test_bad.py").write_text("def test_bad():\n    assert 1 + 1 == 3\n")
    (tmp_path / "test_one.py").write_text("def test_one():\n    pass\n")
    document = gpu_check.check(
        torch.device("cpu"), ["no-such-part", "tests"], [str(tmp_path)], tmp_path / "result.json"
    )
    assert json.loads((tmp_path / "result.json").read_text()) == document
    assert not document["ok"]
    broken, tests = document["parts"]
    assert "Traceback" in broken["error"]
    assert "KeyError: 'no-such-part'" in broken["error"]
    assert [row["result"] for row in tests["rows"]] == [
        "1 passed, 1 failed, 0 skipped",
        "assert (1 + 1) == 3",
    ]
    assert "def test_bad" in next(iter(tests["data"]["failures"].values()))


def test_a_suite_that_takes_too_long_still_reports_what_it_ran(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = tmp_path / "begun"
    (tmp_path / "test_long.py").write_text(
        "import time\ndef test_one():\n    pass\n"
        f"def test_two():\n    open({str(begun)!r}, 'w').close(), time.sleep(600)\n"
    )

    class Late(subprocess.Popen[str]):
        """Whose time is over as soon as the second test has begun."""

        def communicate(self, input: str | None = None, timeout: float | None = None) -> Any:  # noqa: A002
            while timeout == 100 and not begun.exists():
                time.sleep(0.05)
            return super().communicate(input, 0 if timeout == 100 else timeout)

    monkeypatch.setattr("benchmarks.gpu_check.subprocess.Popen", Late)
    part = gpu_check.suite_part([str(tmp_path)], limit_s=100)
    assert part["rows"][0]["result"] == "1 passed, 0 failed, 0 skipped"
    assert "stopped after 100 s" in part["error"]
    assert "test_long.py:5: KeyboardInterrupt" in part["error"]


def test_a_suite_that_cannot_be_collected_is_not_taken_for_a_good_one(
    tmp_path: pathlib.Path,
) -> None:
    (tmp_path / "test_broken.py").write_text("import no_such_module\n")
    part = gpu_check.suite_part([str(tmp_path)], limit_s=60)
    assert part["error"]
    assert not part["rows"][0]["ok"]


def test_the_message_of_a_traceback_is_found() -> None:
    assert gpu_check.last_line("def f():\nE   ValueError: no\nE   more\n\nx.py:3: E") == (
        "ValueError: no"
    )
    assert gpu_check.last_line("Traceback\n  line\nRuntimeError: CUDA\n") == "RuntimeError: CUDA"
    assert gpu_check.last_line("") == ""
