import dataclasses
import io
import pathlib
import re
from typing import get_args

import pytest
from rich.console import Console

from bench_results import case, result
from graphfsdp.bench import records, report, tables
from graphfsdp.bench.options import BenchOptions, make_parser, parse_bench_arguments
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


def test_differences_of_losses_are_said_with_their_size() -> None:
    parity = records.ParityRecord(20, 0.0, True, None, 0.0, 1.0)
    assert tables.parity_text(parity) == "equal bit for bit (20 steps)"
    apart = records.ParityRecord(20, 0.25, False, 3, 1e-6, 1.0)
    assert tables.parity_text(apart) == "1.0e-06 in the first steps, 2.5e-01 in 20"
    lost = records.ParityRecord(20, None, False, 3, 1e-6, None)
    assert tables.parity_text(lost) == "not finite"


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


def test_who_ran_in_no_case_is_told_with_the_first_reason() -> None:
    tried = dataclasses.replace(
        case(), not_run=(records.NotRun("fsdp2", "", "no group"), records.NotRun("eager", "", "x"))
    )
    found = tables.reasons(result(cases=(case(), tried, tried)))
    assert found == {"compile": "no compiler", "fsdp2": "no group"}


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


def test_a_terminal_gets_a_table_that_fits() -> None:
    out = io.StringIO()
    Console(file=out, width=160).print(tables.short_table(case()).rich())
    assert "2.50 (2.00 to 3.00)" in out.getvalue()


def test_the_environment_is_told_in_one_sentence() -> None:
    facts = dataclasses.replace(
        result().environment, gpu="NVIDIA Z", driver="1", cuda="13.0", load_average=3.0
    )
    assert tables.environment_text(facts) == (
        "Measured 2026-01-02 on NVIDIA Z, torch 2.13.0, CUDA 13.0, driver 1, Python 3.11; other "
        "programs ran meanwhile (load average 3.0)."
    )
    assert "on some CPU (2 cores), 1 thread," in tables.environment_text(result().environment)


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


def test_the_help_names_every_workload_and_contender() -> None:
    text = make_parser().format_help()
    for name in ("gpt2-124m", "moe-180m", "zoo-conv", "full_iteration", "megatron_fsdp"):
        assert name in text
