"""``graphfsdp bench compare``: what counts as worse, and what is not compared at all."""

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

import bench_results
from graphfsdp.bench.compare import WORSE, Verdict, compare, judge, ratio_interval, run_compare
from graphfsdp.bench.records import (
    BenchResult,
    CaseResult,
    ContenderResult,
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
    name: str, ms: float, *, jitter: float = 0.0, bit_exact: bool = True
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
INEXACT = with_full(5.0, bit_exact=False)


@pytest.mark.parametrize(
    ("old", "new", "tolerance", "verdict", "ratio"),
    [
        # Everything takes three times as long: the ratio is what it was.
        (OLD, with_full(15.0, eager=30.0), 0.05, Verdict.SAME, 1.0),
        # Each time is shorter than it was, but eager has become twice as fast.
        (OLD, with_full(4.0, eager=5.0), 0.05, Verdict.SLOWER, 1.25 / 2.0),
        (with_full(4.0, eager=5.0), OLD, 0.05, Verdict.FASTER, 2.0 / 1.25),
        (OLD, with_full(5.2), 0.05, Verdict.SAME, 5 / 5.2),
        (OLD, with_full(5.2), 0.01, Verdict.SLOWER, 5 / 5.2),
        (OLD, INEXACT, 0.05, Verdict.INEXACT, 1.0),
        (INEXACT, OLD, 0.05, Verdict.SAME, 1.0),
        # Nothing is said of what one of the two did not measure.
        (OLD, MORE, 0.05, Verdict.SAME, 1.0),
        (MORE, OLD, 0.05, Verdict.SAME, 1.0),
    ],
    ids=[
        *("slower machine", "slower contender", "faster", "tolerated", "not tolerated"),
        *("lost bits", "found bits", "new", "absent"),
    ],
)
def test_what_counts_as_worse(
    old: BenchResult, new: BenchResult, tolerance: float, verdict: Verdict, ratio: float
) -> None:
    (change,) = compare(old, new, tolerance)
    assert (change.contender, change.verdict) == ("full_iteration", verdict)
    assert change.ratio == pytest.approx(ratio)


def test_noise_is_unclear_and_closes_no_gate() -> None:
    (change,) = compare(OLD, with_full(6.5, jitter=0.9))
    assert change.verdict not in WORSE
    assert change.low < 1 < change.high


def test_what_no_longer_runs_is_worse() -> None:
    gone = result(EAGER, contender("x", 1), not_run=[NotRun("full_iteration", "", "it crashed")])
    lost = compare(with_full(5.0, contender("x", 1)), gone)[0]
    assert (lost.verdict, lost.reason) == (Verdict.LOST, "it crashed")
    assert set(WORSE) == {Verdict.LOST, Verdict.SLOWER, Verdict.INEXACT}


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"cpu": "another CPU"}, "cpu some CPU -> another CPU"),
        ({"num_threads": 2}, "num_threads 1 -> 2"),
        ({"device": "cuda", "gpu": "H200"}, "device cpu -> cuda; gpu None -> H200"),
        ({"num_ranks": 2, "backend": "gloo"}, "num_ranks 1 -> 2; backend None -> gloo"),
    ],
)
def test_another_machine_is_refused_by_name(changed: dict[str, Any], named: str) -> None:
    other = result(*OLD.cases[0].contenders, **changed)
    with pytest.raises(ConfigError, match="different machines") as refused:
        compare(OLD, other)
    assert named in str(refused.value)


def test_other_work_is_refused_by_name() -> None:
    def of(**changed: Any) -> BenchResult:
        workload = dataclasses.replace(WORKLOAD, **changed)
        return result(EAGER, contender("full_iteration", 5.0), workload=workload)

    with pytest.raises(ConfigError, match=r"which have tiny fp32 x4 and big fp32 x4"):
        compare(OLD, of(name="big"))
    with pytest.raises(ConfigError, match=r"tiny fp32 x4 is other work.*num_parameters 1000 -> 9"):
        compare(OLD, of(num_parameters=9))
    with pytest.raises(ConfigError, match="data text -> random"):
        compare(OLD, of(data="random"))


def test_what_cannot_be_answered_is_refused() -> None:
    with pytest.raises(ConfigError, match="no contender beside 'eager' ran in the same case"):
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


def test_the_command_prints_a_table_and_ends_as_a_gate(tmp_path: Path) -> None:
    other = dataclasses.replace(OLD.cases[0], workload=dataclasses.replace(WORKLOAD, name="other"))
    results = {
        "old": dataclasses.replace(OLD, cases=(*OLD.cases, other)),
        "slow": with_full(8.0),
        "noisy": with_full(6.5, jitter=0.9),
    }
    for name, value in results.items():
        (tmp_path / name).mkdir()
        write_result(value, tmp_path / name / "result.json")
    old = str(tmp_path / "old")
    console = Console(file=(tmp_path / "shown").open("w"))
    with console.file:
        assert run_compare([old, str(tmp_path / "slow" / "result.json")], console) == 1
        assert run_compare([old, old], console) == 0
        assert run_compare([old, str(tmp_path / "slow"), "--tolerance", "0.5"], console) == 0
        assert run_compare([old, str(tmp_path / "noisy")], console) == 0
    shown = (tmp_path / "shown").read_text()
    for text in ("full_iteration", "slower", "other fp32 x4: not in B",
                 "1 of 1 contenders are worse (tolerance 5%)",
                 "0 of 1 contenders are worse (tolerance 50%)",
                 "unclear: the rounds scatter"):  # fmt: skip
        assert text in shown


def test_the_command_refuses_what_is_no_result(tmp_path: Path) -> None:
    console = Console(quiet=True)
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be read"):
        run_compare([str(tmp_path / "absent"), str(tmp_path / "absent")], console)
    with pytest.raises(ConfigError, match="not a result of graphfsdp bench"):
        run_compare([str(tmp_path / "x.json"), str(tmp_path / "x.json")], console)
    with pytest.raises(ConfigError, match="bench compare --help"):
        run_compare(["one"], console)
