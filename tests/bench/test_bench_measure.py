import dataclasses
import math
import multiprocessing
import os
import pathlib
import re
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import forked_programs
from bench_results import CASE, ENVIRONMENT, contender, result
from graphfsdp.bench import measure
from graphfsdp.bench.command import BenchOptions, parse_bench_arguments
from graphfsdp.bench.contenders import (
    Contender,
    ContenderSpec,
    Setting,
    Window,
    find_contenders,
    initial_model,
    learning_rate,
    own_contender,
)
from graphfsdp.bench.measure import (
    MIN_ROUNDS,
    NUM_WARMUP_STEPS,
    compare_losses,
    make_schedule,
    measure_case,
    run_case,
    time_window,
)
from graphfsdp.bench.results import REFERENCE, Result, Row, Table, case_table, overview
from graphfsdp.bench.workloads import (
    SUITES,
    Case,
    DtypeName,
    SuiteName,
    batch_source,
)
from graphfsdp.config import Scope
from graphfsdp.data import Batch
from graphfsdp.errors import ConfigError
from graphfsdp.training.ranks import Ranks
from ranks import RankPool, fork_server


def setting_on(device: torch.device, *contenders: str) -> Setting:
    return Setting(Case("gpt-tiny", "fp32", 1, contenders), device, seconds=0.2)


class Faulty:
    def __init__(self, last_step: int) -> None:
        self.steps_left = last_step
        self.closed = False

    def train(self, batch: Batch) -> Tensor:
        self.steps_left -= 1
        if self.steps_left < 0:
            raise RuntimeError("broken on purpose")
        return torch.zeros((), device=batch[0].device)

    def close(self) -> None:
        self.closed = True

    def contender(self, _: Setting) -> Contender:
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        captured: Any = self
        return Contender(self.train, optimizer, captured)


def faulty(name: str, contender: Callable[[Setting], Contender]) -> ContenderSpec:
    return ContenderSpec(name, "fails", contender)


def test_windows_of_contenders_are_pairs_and_who_cannot_run_is_listed_with_the_reason() -> None:
    broken = [Faulty(2), Faulty(NUM_WARMUP_STEPS + 3)]

    def refuse(setting: Setting) -> Contender:
        raise ConfigError("not here.\n\nA remedy that is not the reason.")

    specs = [
        *find_contenders(("pytorch", "full_iteration")),
        faulty("never", refuse),
        faulty("in warm-up", broken[0].contender),
        faulty("in a window", broken[1].contender),
    ]
    rows = measure_case(setting_on(torch.device("cpu")), specs=specs)
    assert {row["contender"]: row["reason"] for row in rows if "reason" in row} == {
        "never": "ConfigError: not here.",
        "in warm-up": "RuntimeError: broken on purpose",
        "in a window": "RuntimeError: broken on purpose",
    }
    assert [contender.closed for contender in broken] == [True, True]
    ran = [row for row in rows if "step_ms" in row]
    assert [row["contender"] for row in ran] == ["eager", "pytorch", "full_iteration"]
    assert ran[-1]["bit_exact"], "captured, and not the losses of eager"
    (windows,) = {tuple(len(window) for window in row["step_ms"]) for row in ran}
    assert len(windows) >= MIN_ROUNDS
    for row in ran:
        assert all(step > 0 for window in row["step_ms"] for step in window)
        assert len(row["cpu_ms"]) == len(windows)
        assert row["num_steps"] == NUM_WARMUP_STEPS + 2 + sum(windows)


def test_without_the_reference_there_is_no_case(device: torch.device) -> None:
    specs = [faulty(REFERENCE, Faulty(0).contender)]
    with pytest.raises(ConfigError, match=r"reference \(eager\) cannot run .* broken on purpose"):
        measure_case(setting_on(device), specs=specs)


def test_a_case_without_time_measures_the_reference_and_names_the_others(
    device: torch.device,
) -> None:
    eager, late = measure_case(dataclasses.replace(setting_on(device, "pytorch"), limit_s=1e-9))
    assert eager["contender"] == "eager"
    assert len(eager["step_ms"]) == 1
    assert late["contender"] == "pytorch"
    assert late["reason"] == "the time for this case was over before"


def test_losses_are_compared_bit_for_bit_and_by_size() -> None:
    reference = torch.linspace(4, 3, 20)
    assert compare_losses(reference, reference.clone())["bit_exact"]
    other = reference.clone()
    other[12] += 0.5
    found = compare_losses(reference, other)
    assert not found["bit_exact"]
    assert (found["early_difference"], found["max_difference"]) == (0.0, 0.5)
    other[3] = math.nan
    assert compare_losses(reference, other)["max_difference"] is None
    assert compare_losses(other, other)["bit_exact"]


def test_a_window_times_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([1_000_000, 3_000_000, 9_000_000])
    work = iter([0, 4_000_000])
    monkeypatch.setattr(time, "perf_counter_ns", lambda: next(ticks))
    monkeypatch.setattr(time, "process_time_ns", lambda: next(work))
    done: list[str] = []
    steps = [lambda: done.append("a"), lambda: done.append("b")]
    window = time_window(steps, torch.device("cpu"))
    assert done == ["a", "b"]
    assert window == Window(step_ms=(2.0, 6.0), cpu_ms=2.0)
    assert window.mean_ms == 4.0


@given(st.lists(st.floats(0.05, 5000), min_size=1, max_size=10), st.floats(0.1, 100))
def test_a_schedule_has_enough_rounds_and_fits_where_it_can(
    step_ms: list[float], seconds: float
) -> None:
    num_rounds, num_steps = make_schedule(step_ms, seconds)
    assert num_rounds >= MIN_ROUNDS
    assert num_steps >= 2
    planned_s = num_rounds * num_steps * math.fsum(step_ms) / 1e3
    least_s = MIN_ROUNDS * 2 * math.fsum(step_ms) / 1e3
    assert planned_s <= max(seconds, least_s) * 1.001


def fail_on_last(setting: Setting) -> Contender:
    if setting.ranks.rank == setting.ranks.size - 1:
        raise RuntimeError("this rank alone")
    # Which asks no other rank for anything, and is never asked for a step.
    return Faulty(0).contender(setting)


def measure_on_rank() -> list[Row]:
    these = Ranks(dist.group.WORLD, dist.get_rank(), dist.get_world_size(), launched=True)
    setting = dataclasses.replace(setting_on(torch.device("cpu")), ranks=these)
    specs = [
        *find_contenders(("pytorch", "fsdp2")),
        faulty("lame", fail_on_last),
        *find_contenders(("full_iteration",))[1:],
    ]
    return measure_case(setting, specs=specs)


def test_ranks_measure_together_and_leave_out_what_fails_on_one_of_them(ranks2: RankPool) -> None:
    results = ranks2.run(measure_on_rank, limit_s=110)
    eager = []
    for found in results:
        rows = {row["contender"]: row for row in found}
        assert list(rows) == ["eager", "pytorch", "fsdp2", "full_iteration", "lame"]
        assert rows["lame"]["reason"] == "rank 1: RuntimeError: this rank alone"
        assert rows["full_iteration"]["bit_exact"]
        for name in ("pytorch", "fsdp2"):
            # Sums in another order.
            assert rows[name]["early_difference"] < 1e-4
        eager.append(rows["eager"])
    shapes = [[len(window) for window in row["step_ms"]] for row in eager]
    assert shapes[0] == shapes[1], "the ranks did not run the same rounds"


def misbehaves(sender: Connection, setting: Setting) -> None:
    def measure_case(setting: Setting, turn: Callable[[str], object]) -> None:
        turn("pytorch")
        how = setting.case.contenders
        if how == ("refuses",):
            raise ConfigError("no such text")
        if how == ("exits",):
            os._exit(3)
        if how == ("dies",):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)

    vars(measure).update(measure_case=measure_case)
    tell(sender, setting)


tell = measure._tell


@pytest.mark.parametrize(
    ("how", "limit_s", "reason"),
    [
        ("refuses", 100, "^no such text$"),
        ("exits", 100, "its process ended with exit code 3 in the turn of pytorch: .*--contender"),
        ("dies", 100, "its process was ended by signal SIGKILL in the turn of pytorch"),
        ("hangs", 100, "there was no progress for 1 s"),
        ("hangs", 0.5, "the time for this case was over"),
    ],
)
def test_a_contender_that_takes_its_process_down_is_named_with_a_remedy(
    how: str, limit_s: float, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, before = fork_server(), set(multiprocessing.active_children())
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: context)
    monkeypatch.setattr(measure, "_tell", misbehaves)
    if how == "hangs":
        monkeypatch.setattr(measure, "SILENCE_LIMIT_S", 1.0)
    setting = dataclasses.replace(setting_on(torch.device("cpu"), how), limit_s=limit_s)
    with pytest.raises(ConfigError, match=reason):
        run_case(setting)
    assert set(multiprocessing.active_children()) == before


@pytest.mark.time_limit(300)
def test_the_command_measures_in_a_child_and_keeps_a_directory(tmp_path: pathlib.Path) -> None:
    out = tmp_path / "out"
    program = "import runpy; runpy.run_module('graphfsdp', None, '__main__')"
    flags = ["bench", "--workload", "gpt-tiny"]
    flags += ["--batch-size", "1", "--seconds", "0.3", "--out", str(out)]
    flags += ["--contender", "full_iteration", "fsdp2"]
    done = forked_programs.run_source(program, *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    result = Result.read(out)
    rows = {row["contender"]: row for row in result.rows}
    assert list(rows) == ["eager", "fsdp2", "full_iteration"]
    assert result.cases == [result.rows[0]["case"]]
    assert rows["fsdp2"]["max_difference"] < 1e-3
    assert [path.name for path in out.iterdir()] == ["result.jsonl"]
    assert result.head["options"]["seconds"] == 0.3
    assert str(tmp_path) not in (out / "result.jsonl").read_text()
    assert "full_iteration" in done.stdout


def test_a_result_file_reads_back_and_one_of_another_version_does_not(
    tmp_path: pathlib.Path,
) -> None:
    result().write(tmp_path / "result.jsonl")
    assert Result.read(tmp_path) == Result.read(tmp_path / "result.jsonl") == result()
    assert [path.name for path in tmp_path.iterdir()] == ["result.jsonl"]
    (tmp_path / "result.jsonl").write_text('{"kind": "graphfsdp_bench", "version": 2}')
    with pytest.raises(ConfigError, match="of version 2, not 3"):
        Result.read(tmp_path)


def cell(table: Table, row: str, column: str) -> str:
    (cells,) = (cells for cells in table.rows if cells[0] == row)
    return cells[table.heading.index(column)]


def test_the_tables_show_the_numbers_of_the_lines() -> None:
    table = case_table(result(), CASE)
    assert cell(table, "full_iteration", "ms/step") == "1.500"
    assert cell(table, "full_iteration", "times as fast as eager") == "2.50 (2.00 to 3.00)"
    assert cell(table, "eager", "losses against eager") == "reference"
    assert cell(table, "eager", "tokens/s") == "25,600"
    assert cell(table, "eager", "init s") == "0.02"
    table = overview(result())
    assert table.heading == ("workload", "eager", "full_iteration")
    assert table.rows == (("gpt-tiny fp32, 4 x 32 tokens", "5.00", "1.50 (2.50x)"),)
    # Beside nobody there is no ratio.
    alone = Result({"environment": ENVIRONMENT}, [contender("compile", (1.0,))])
    assert alone.ratios(CASE, "compile") == []
    assert alone.reasons() == {}
    assert result().reasons() == {"compile": "no compiler", "moe": "no time"}


def test_flags_make_the_product_of_workloads_precisions_and_batch_sizes_or_name_a_suite() -> None:
    flags = "--workload gpt-tiny llama-tiny --dtype fp32 bf16 --batch-size 1 4"
    options = parse_bench_arguments(flags.split())
    planned = options.cases("cpu")
    assert [each.key for each in planned][:4] == [
        *("gpt-tiny fp32 x1", "gpt-tiny fp32 x4", "gpt-tiny bf16 x1", "gpt-tiny bf16 x4")
    ]
    assert len(planned) == 8
    own_size = parse_bench_arguments(["--workload", "gpt-3m"]).cases("cpu")
    assert [each.batch_size for each in own_size] == [8]
    # Without workloads the device chooses the suite.
    assert BenchOptions().cases("cpu") == SUITES["cpu"]
    assert BenchOptions().cases("cuda") == SUITES["gpu"]
    assert BenchOptions(suite="quick", contender=["compile"]).cases("cpu")[0].contenders == (
        "compile",
    )
    for name in get_args(SuiteName):
        assert len({each.key for each in SUITES[name]}) == len(SUITES[name]) > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--suite", "expected one argument; 'graphfsdp bench --help'"),
        ("--workload nothing", "argument --workload: invalid choice: 'nothing'"),
        ("--contender nothing", "argument --contender: invalid choice: 'nothing'"),
        ("--seconds 0", "--seconds must be greater than 0"),
        ("--seconds inf", "--seconds must be greater than 0"),
        ("--budget nan", "--budget must be greater than 0"),
        ("--workload gpt-tiny --batch-size 0", "--batch-size must be at least 1"),
        ("--suite cpu --workload gpt-tiny", "give one of them"),
        ("--dtype fp8", "invalid choice"),
        ("--batch-size 4", "goes with --workload"),
        ("--suite quick --dtype bf16", "goes with --workload"),
    ],
)
def test_flags_that_cannot_work_are_refused_by_name(arguments: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_bench_arguments(arguments.split()).cases("cpu")


TINY = ("gpt-tiny", "llama-tiny", "zoo-encoder", "zoo-conv")
NUM_STEPS = 14


def source_of(
    name: str, device: torch.device, *, dtype: DtypeName = "fp32", ranks: Ranks | None = None
) -> tuple[Setting, Callable[[int], Batch]]:
    setting = Setting(Case(name, dtype, 2), device, ranks=ranks or Ranks())
    return setting, batch_source(setting.case, device, setting.ranks)


def losses_of(name: str, dtype: DtypeName, scope: Scope, device: torch.device) -> Tensor:
    setting, source = source_of(name, device, dtype=dtype)
    contender = own_contender(setting, scope)
    try:
        losses = [contender(source(step), step) for step in range(NUM_STEPS)]
        assert contender.optimizer.param_groups[0]["lr"] == learning_rate(NUM_STEPS - 1)
        return torch.stack(losses)
    finally:
        contender.close()


# The twelve architectures are in tests/capture/test_model_zoo.py.
@pytest.mark.parametrize("name", TINY[:2])
def test_every_kind_of_workload_replays_bit_for_bit(name: str, device: torch.device) -> None:
    dtype: DtypeName = "bf16" if name == "llama-tiny" else "fp32"
    eager = losses_of(name, dtype, Scope.NONE, device)
    assert eager.isfinite().all()
    assert eager.unique().numel() == NUM_STEPS
    assert torch.equal(losses_of(name, dtype, Scope.FULL_ITERATION, device), eager)


@pytest.mark.parametrize("name", TINY)
def test_batches_depend_on_step_and_ranks_and_weights_fit(name: str, device: torch.device) -> None:
    _, source = source_of(name, device, ranks=Ranks(rank=0, size=2))
    _, other_rank = source_of(name, device, ranks=Ranks(rank=1, size=2))
    first, second, again, elsewhere = source(5), source(6), source(5), other_rank(5)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], second[0])
    assert not torch.equal(first[0], elsewhere[0])
    assert all(tensor.device.type == device.type for tensor in first)
    # Weights of a case in bf16 begin with values that it has.
    model = initial_model(Setting(Case(name, "bf16", 1), torch.device("cpu")))
    for param in model.parameters():
        assert param.dtype == torch.float32
        assert torch.equal(param, param.bfloat16().float())
