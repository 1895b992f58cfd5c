import pathlib
import re
from typing import get_args

import pytest

from bench_results import CASE, ENVIRONMENT, contender, result
from graphfsdp.bench.command import BenchOptions, parse_bench_arguments
from graphfsdp.bench.results import Result, Table, case_table, overview
from graphfsdp.bench.workloads import SUITES, SuiteName
from graphfsdp.errors import ConfigError


def test_a_result_file_reads_back_as_it_was(tmp_path: pathlib.Path) -> None:
    result().write(tmp_path / "result.jsonl")
    assert Result.read(tmp_path) == Result.read(tmp_path / "result.jsonl") == result()
    assert [path.name for path in tmp_path.iterdir()] == ["result.jsonl"]


def test_a_result_of_another_version_is_refused(tmp_path: pathlib.Path) -> None:
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


def test_a_contender_beside_nobody_has_no_ratio() -> None:
    alone = Result({"environment": ENVIRONMENT}, [contender("compile", (1.0,))])
    assert alone.ratios(CASE, "compile") == []
    assert alone.left_out == {}
    assert result().left_out == {"moe": "no time"}
    assert result().reasons() == {"compile": "no compiler"}


def test_flags_make_the_product_of_workloads_precisions_and_batch_sizes() -> None:
    flags = "--workload gpt-tiny llama-tiny --dtype fp32 bf16 --batch-size 1 4"
    options = parse_bench_arguments(flags.split())
    planned = options.cases("cpu")
    assert [each.key for each in planned][:4] == [
        *("gpt-tiny fp32 x1", "gpt-tiny fp32 x4", "gpt-tiny bf16 x1", "gpt-tiny bf16 x4")
    ]
    assert len(planned) == 8
    own_size = parse_bench_arguments(["--workload", "gpt-3m"]).cases("cpu")
    assert [each.batch_size for each in own_size] == [8]


def test_without_workloads_the_device_chooses_the_suite() -> None:
    assert BenchOptions().cases("cpu") == SUITES["cpu"]
    assert BenchOptions().cases("cuda") == SUITES["gpu"]
    assert BenchOptions(suite="quick", contender=("compile",)).cases("cpu")[0].contenders == (
        "compile",
    )
    for name in get_args(SuiteName):
        assert len({each.key for each in SUITES[name]}) == len(SUITES[name]) > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--suite", "expected one argument; 'graphfsdp bench --help'"),
        ("--workload nothing", "no workload 'nothing'"),
        ("--contender nothing", "no contender 'nothing'"),
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
