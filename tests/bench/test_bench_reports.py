import dataclasses
import pathlib
import re
from typing import get_args

import pytest

from bench_results import case, result
from graphfsdp.bench import report, tables
from graphfsdp.bench.options import BenchOptions, parse_bench_arguments
from graphfsdp.bench.records import Spread
from graphfsdp.bench.report import make_directory, write_directory
from graphfsdp.bench.workloads import SuiteName, suite
from graphfsdp.errors import ConfigError


@pytest.mark.parametrize(
    ("spread", "word"),
    [
        (Spread(1.0, 0.9, 1.2), "about equal"),
        (Spread(0.98, 0.97, 0.99), "about equal"),
        (Spread(1.05, 0.9, 1.2), "within the noise"),
        (Spread(1.05, 1.04, 1.06), "faster"),
        (Spread(1.8, 0.9, 2.0), "faster"),
        (Spread(0.5, 0.4, 0.6), "slower"),
    ],
)
def test_a_ratio_near_one_is_called_so(spread: Spread, word: str) -> None:
    assert tables.verdict(spread) == word


def cell(table: tables.Table, row: str, column: str) -> str:
    (cells,) = (cells for cells in table.rows if cells[0] == row)
    return cells[table.heading.index(column)]


def test_the_tables_show_the_numbers_of_the_records() -> None:
    speed = tables.speed_table(case(stated_tflops=12.0))
    assert cell(speed, "full_iteration", "ms/step") == "1.500"
    assert cell(speed, "full_iteration", "times as fast as eager") == "2.50 (2.00 to 3.00)"
    assert cell(speed, "full_iteration", "which is") == "faster"
    assert cell(speed, "eager", "which is") == "reference"
    assert cell(speed, "eager", "tokens/s") == "25,600"
    assert cell(speed, "eager", "MFU") == "10.0%"
    assert cell(tables.speed_table(case()), "eager", "MFU") == "2400.0% of measured"
    start = tables.start_table(case())
    assert cell(start, "eager", "init s") == "0.02"
    assert cell(start, "eager", "peak memory") == "256.0 MiB"
    overview = tables.overview(result())
    assert overview.heading == ("workload", "eager", "full_iteration")
    assert overview.rows == (("gpt-tiny fp32, 4 x 32 tokens", "5.00", "1.50 (2.50x)"),)


def test_the_markdown_has_every_table_and_what_is_missing() -> None:
    text = report.markdown(result(), [pathlib.Path("crossover.png")])
    assert "![crossover.png](crossover.png)" in text
    assert "| compile | no compiler |" in text
    assert "- moe: no time" in text
    assert "not verified by MLCommons" in text
    assert "6 N + 12 L C T" in text
    widths = [line.count(" |") for line in text.splitlines() if line.startswith("| full_iter")]
    assert widths == [15, 8]


def test_a_directory_holds_everything_and_is_never_overwritten(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("matplotlib")
    out = make_directory(str(tmp_path / "a" / "out"))
    write_directory(result(), out)
    write_directory(result(cases=(case(), case(1.0))), out)
    names = {path.name for path in out.iterdir()}
    assert names == {"result.json", "report.md", "crossover.png"}
    assert (out / "crossover.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="nothing is overwritten"):
        make_directory(str(out))


def test_without_matplotlib_the_rest_is_written(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    write_directory(result(), tmp_path)
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".md"}


def test_flags_make_the_product_of_workloads_precisions_and_batch_sizes() -> None:
    flags = "--workload gpt-tiny llama-tiny --dtype fp32 bf16 --batch-size 1 4 --no-memory"
    options = parse_bench_arguments(flags.split())
    planned = options.cases("cpu")
    assert [each.case.key for each in planned][:4] == [
        *("gpt-tiny fp32 x1", "gpt-tiny fp32 x4", "gpt-tiny bf16 x1", "gpt-tiny bf16 x4")
    ]
    assert len(planned) == 8
    assert not any(each.memory for each in planned)
    own_size = parse_bench_arguments(["--workload", "gpt-3m"]).cases("cpu")
    assert [each.case.batch_size for each in own_size] == [8]


def test_without_workloads_the_device_chooses_the_suite() -> None:
    assert BenchOptions().cases("cpu") == suite("cpu")
    assert BenchOptions().cases("cuda") == suite("gpu")
    assert BenchOptions(suite="quick", contender=("compile",)).cases("cpu")[0].contenders == (
        "compile",
    )
    for name in get_args(SuiteName):
        assert len({each.case.key for each in suite(name)}) == len(suite(name)) > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--suite", "expected one argument; 'graphfsdp bench --help'"),
        ("--workload nothing", "no workload 'nothing'"),
        ("--contender nothing", "no contender 'nothing'"),
        ("--seconds 0", "--seconds must be greater than 0"),
        ("--seconds inf", "--seconds must be greater than 0"),
        ("--budget nan", "--budget must be greater than 0"),
        ("--threads 0", "--threads must be at least 1"),
        ("--workload gpt-tiny --batch-size 0", "--batch-size must be at least 1"),
        ("--suite cpu --workload gpt-tiny", "give one of them"),
        ("--data x --random-tokens", "give one"),
        ("--dtype fp8", "invalid choice"),
        ("--batch-size 4", "goes with --workload"),
        ("--suite quick --dtype bf16", "goes with --workload"),
    ],
)
def test_flags_that_cannot_work_are_refused_by_name(arguments: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_bench_arguments(arguments.split()).cases("cpu")


def test_the_table_of_cpu_time_is_there_on_a_cpu_alone() -> None:
    (row,) = tables.cpu_overview(result()).rows
    assert row == ("gpt-tiny fp32, 4 x 32 tokens", "2.00", "2.00 (1.00x)")
    facts = dataclasses.replace(result().environment, gpu="NVIDIA Z")
    assert tables.cpu_overview(result(environment=facts)).rows == ()
