"""``graphfsdp bench compare``: what counts as worse, and what is not compared at all."""

import dataclasses
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

import bench_results
from graphfsdp.bench.compare import (
    Verdict,
    compare,
    judge,
    ratio_interval,
    run_compare,
)
from graphfsdp.bench.records import (
    NOT_ASKED,
    BenchResult,
    CaseResult,
    ContenderResult,
    MemoryRecord,
    NotRun,
    ParityRecord,
    PeakFacts,
    TimingRecord,
    WorkloadFacts,
    write_result,
)
from graphfsdp.errors import ConfigError

ENVIRONMENT = bench_results.result().environment
WORKLOAD = dataclasses.replace(bench_results.case().workload, name="tiny")
# Each round is slow or fast for all contenders alike: what the ratios have to see through.
WEATHER = (1.0, 3.0, 1.5, 0.7, 2.0, 1.1, 1.0, 5.0)


def contender(
    name: str, ms: float, *, jitter: float = 0.0, bit_exact: bool = True, memory: int = 1000
) -> ContenderResult:
    generator = random.Random(name)
    windows = [ms * mood * (1 + jitter * generator.uniform(-1, 1)) for mood in WEATHER]
    return dataclasses.replace(
        bench_results.contender(name),
        timing=TimingRecord(
            step_ms=tuple((window, window) for window in windows),
            host_ms=tuple(windows),
            cpu_ms=tuple(windows),
        ),
        parity=ParityRecord(16, 0.0, bit_exact, None if bit_exact else 3, 0.0, 2.0),
        memory=MemoryRecord(how="", process_bytes=memory),
    )


def result(
    *contenders: ContenderResult,
    not_run: Sequence[NotRun] = (),
    workload: WorkloadFacts = WORKLOAD,
    **environment: Any,
) -> BenchResult:
    case = CaseResult(workload, PeakFacts(None, 1.0, ""), contenders, tuple(not_run))
    return BenchResult(
        environment=dataclasses.replace(ENVIRONMENT, **environment),
        options={}, command="", seed=0, cases=(case,),
    )  # fmt: skip


EAGER = contender("eager", 10.0)


def with_full(ms: float, *others: ContenderResult, eager: float = 10.0, **how: Any) -> BenchResult:
    return result(contender("eager", eager), contender("full_iteration", ms, **how), *others)


OLD = with_full(5.0)
MORE = with_full(5.0, contender("fsdp2", 9.0))
UNASKED = dataclasses.replace(
    OLD,
    cases=(dataclasses.replace(OLD.cases[0], not_run=(NotRun("fsdp2", "", NOT_ASKED),)),),
)
INEXACT = with_full(5.0, bit_exact=False)


@pytest.mark.parametrize(
    ("old", "new", "tolerance", "verdict", "ratio", "is_regression"),
    [
        # Everything takes three times as long: the ratio is what it was.
        (OLD, with_full(15.0, eager=30.0), 0.05, Verdict.SAME, 1.0, False),
        # Each time is shorter than it was, but eager has become twice as fast.
        (OLD, with_full(4.0, eager=5.0), 0.05, Verdict.SLOWER, 1.25 / 2.0, True),
        (with_full(4.0, eager=5.0), OLD, 0.05, Verdict.FASTER, 2.0 / 1.25, False),
        (OLD, with_full(5.2), 0.05, Verdict.SAME, 5 / 5.2, False),
        (OLD, with_full(5.2), 0.01, Verdict.SLOWER, 5 / 5.2, True),
        (OLD, INEXACT, 0.05, Verdict.SAME, 1.0, True),
        (INEXACT, OLD, 0.05, Verdict.SAME, 1.0, False),
        (OLD, MORE, 0.05, Verdict.NEW, None, False),
        (MORE, OLD, 0.05, Verdict.ABSENT, None, False),
        (MORE, UNASKED, 0.05, Verdict.ABSENT, None, False),
    ],
    ids=[
        *("slower machine", "slower contender", "faster", "tolerated", "not tolerated"),
        *("lost bits", "found bits", "new", "absent", "not asked for"),
    ],
)
def test_what_counts_as_worse(
    old: BenchResult,
    new: BenchResult,
    tolerance: float,
    verdict: Verdict,
    ratio: float | None,
    is_regression: bool,
) -> None:
    found = compare(old, new, tolerance=tolerance)
    change = found.changes[-1]
    assert (change.verdict, change.is_regression) == (verdict, is_regression)
    assert change.ratio == (None if ratio is None else pytest.approx(ratio))
    assert found.regressions == ((change,) if is_regression else ())


def test_noise_is_unclear_and_closes_no_gate() -> None:
    found = compare(OLD, with_full(6.5, jitter=0.9))
    (change,) = found.changes
    assert change.verdict in (Verdict.UNCLEAR, Verdict.SAME)
    assert found.regressions == ()
    assert change.low is not None
    assert change.high is not None
    assert change.low < 1 < change.high


def test_what_no_longer_runs_is_a_regression() -> None:
    gone = result(EAGER, contender("x", 1), not_run=[NotRun("full_iteration", "", "it crashed")])
    lost = compare(with_full(5.0, contender("x", 1)), gone).changes[0]
    assert (lost.verdict, lost.reason, lost.is_regression) == (Verdict.LOST, "it crashed", True)


def test_another_base_and_memory_beside_it() -> None:
    def of(memory: int) -> BenchResult:
        return result(EAGER, contender("a", 4.0), contender("b", 2.0, memory=memory))

    found = compare(of(500), of(3000), base="a")
    change = next(c for c in found.changes if c.contender == "b")
    assert change.old is not None
    assert change.new is not None
    assert (change.old.memory_ratio, change.new.memory_ratio) == (0.5, 3.0)
    assert change.old.speedup.median == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"cpu": "another CPU"}, "cpu some CPU -> another CPU"),
        ({"num_threads": 2}, "num_threads 1 -> 2"),
        ({"device": "cuda", "gpu": "H200"}, "device cpu -> cuda; gpu None -> H200"),
        ({"num_ranks": 2, "backend": "gloo"}, "num_ranks 1 -> 2; backend None -> gloo"),
    ],
)
def test_another_machine_is_refused_by_name_unless_asked_for(
    changed: dict[str, Any], named: str
) -> None:
    other = result(*OLD.cases[0].contenders, **changed)
    with pytest.raises(ConfigError, match="different machines") as refused:
        compare(OLD, other)
    assert named in str(refused.value)
    found = compare(OLD, other, other_machine=True)
    assert not found.same_machine
    assert found.environment.keys() == changed.keys()


def test_other_work_is_refused_by_name() -> None:
    def of(**changed: Any) -> BenchResult:
        workload = dataclasses.replace(WORKLOAD, **changed)
        return result(EAGER, contender("full_iteration", 5.0), workload=workload)

    with pytest.raises(ConfigError, match=r"the first has tiny fp32 x4; the second has big fp32"):
        compare(OLD, of(name="big"))
    with pytest.raises(ConfigError, match=r"tiny fp32 x4 is other work.*num_parameters 1000 -> 9"):
        compare(OLD, of(num_parameters=9))
    with pytest.raises(ConfigError, match="data text -> random"):
        compare(OLD, of(data="random"))


def test_what_cannot_be_answered_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'fsdp2'.*did not run.*one of: eager, full_iteration"):
        compare(OLD, OLD, base="fsdp2")
    with pytest.raises(ConfigError, match="x in case tiny fp32 x4 of the second result has a win"):
        compare(OLD, result(EAGER, contender("x", 0.0)))
    with pytest.raises(ConfigError, match="no contender beside 'eager' ran in both"):
        compare(OLD, result(EAGER))
    with pytest.raises(ConfigError, match=r"--tolerance must be in \[0, 1\), got 1"):
        compare(OLD, OLD, tolerance=1.0)


ROUNDS = st.lists(st.floats(0.1, 10.0), min_size=1, max_size=12)


@settings(max_examples=20)
@given(old=ROUNDS, new=ROUNDS, factor=st.floats(0.25, 4.0))
def test_the_interval_is_repeatable_ordered_and_scales_with_the_ratios(
    old: list[float], new: list[float], factor: float
) -> None:
    low, high = ratio_interval(old, new)
    assert (low, high) == ratio_interval(old, new)
    assert min(new) / max(old) * (1 - 1e-9) <= low <= high <= max(new) / min(old) * (1 + 1e-9)
    scaled = ratio_interval(old, [factor * value for value in new])
    assert scaled == pytest.approx((factor * low, factor * high))


def test_verdicts_at_their_borders() -> None:
    assert judge(0.95, 0.9, 0.96, 0.05) is Verdict.SAME
    assert judge(0.949, 0.9, 0.999, 0.05) is Verdict.SLOWER
    assert judge(0.949, 0.9, 1.0, 0.05) is Verdict.UNCLEAR
    assert judge(1.06, 1.0, 1.1, 0.05) is Verdict.UNCLEAR
    assert judge(1.06, 1.001, 1.1, 0.05) is Verdict.FASTER


def test_the_command_prints_a_table_writes_json_and_ends_as_a_gate(tmp_path: Path) -> None:
    new = result(
        EAGER, contender("full_iteration", 8.0), torch="2.14.0", versions={"rich": "16", "x": "1"}
    )
    for name, value in (("old", OLD), ("new", new)):
        (tmp_path / name).mkdir()
        write_result(value, tmp_path / name / "result.json")
    old_file, new_file = str(tmp_path / "old"), str(tmp_path / "new" / "result.json")
    console = Console(file=(tmp_path / "shown").open("w"))
    with console.file:
        answer = run_compare([old_file, new_file, "--json", str(tmp_path / "out")], console)
        assert answer == 1
        assert run_compare([old_file, old_file], console) == 0
        assert run_compare([old_file, new_file, "--tolerance", "0.5"], console) == 0
        write_result(result(EAGER, contender("full_iteration", 6.5, jitter=0.9)), tmp_path / "x")
        assert run_compare([old_file, str(tmp_path / "x")], console) == 0
    shown = (tmp_path / "shown").read_text()
    for text in ("full_iteration", "slower", "torch: 2.13.0 -> 2.14.0", "x: None -> 1",
                 "1 of 1 contenders are worse", "nothing is worse (tolerance 50%)",
                 "1 unclear: the rounds scatter", "nothing is clearly worse"):  # fmt: skip
        assert text in shown
    data = json.loads((tmp_path / "out").read_text())
    assert data["kind"] == "graphfsdp_bench_comparison"
    assert data["changes"][0]["verdict"] == "slower"
    assert data["changes"][0]["ratio"] == pytest.approx(5 / 8)


def test_the_command_refuses_what_is_no_result(tmp_path: Path) -> None:
    console = Console(quiet=True)
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be read"):
        run_compare([str(tmp_path / "absent"), str(tmp_path / "absent")], console)
    with pytest.raises(ConfigError, match="not a result of graphfsdp bench"):
        run_compare([str(tmp_path / "x.json"), str(tmp_path / "x.json")], console)
    with pytest.raises(ConfigError, match="bench compare --help"):
        run_compare(["one"], console)
    write_result(OLD, tmp_path / "ok.json")
    path = str(tmp_path / "ok.json")
    with pytest.raises(ConfigError, match="--json"):
        run_compare([path, path, "--json", str(tmp_path / "no" / "where")], console)
