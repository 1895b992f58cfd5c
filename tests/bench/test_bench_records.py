import json
import math
import pathlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench_results import result
from graphfsdp.bench import records
from graphfsdp.bench.records import (
    Distribution,
    read_result,
    to_data,
    write_result,
)
from graphfsdp.errors import ConfigError


def test_a_result_file_reads_back_as_it_was(tmp_path: pathlib.Path) -> None:
    write_result(result(), tmp_path / "result.json")
    assert read_result(tmp_path / "result.json") == result()
    assert read_result(tmp_path) == result()
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_what_is_not_finite_becomes_none() -> None:
    parity = records.ParityRecord(1, math.nan, False, 0, math.inf, -math.inf)
    data = to_data(parity)
    assert data["max_difference"] is data["early_difference"] is data["last_loss"] is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "paired"}, "is not a result of graphfsdp bench"),
        ({"schema_version": 1}, "schema version 1, this graphfsdp reads 2"),
        ({"speed": 1}, "BenchResult.*unexpected keyword argument 'speed'"),
        ({"cases": [{}]}, "CaseResult.*missing 3 required positional arguments: 'workload'"),
        ({"cases": 1}, "not as this graphfsdp writes results: 'int' object is not iterable"),
    ],
)
def test_a_file_that_is_no_result_is_refused_by_name(
    tmp_path: pathlib.Path, change: dict[str, object], message: str
) -> None:
    (tmp_path / "result.json").write_text(json.dumps({**to_data(result()), **change}))
    with pytest.raises(ConfigError, match=message):
        read_result(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{", '"a"'])
def test_a_file_that_is_no_json_object_is_refused(tmp_path: pathlib.Path, text: str) -> None:
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(ConfigError, match="result of graphfsdp bench"):
        read_result(tmp_path)


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=40))
def test_a_distribution_has_the_middle_and_the_tails_of_numpy(values: list[float]) -> None:
    found = Distribution.of(values)
    assert (found.num_steps, found.maximum) == (len(values), max(values))
    assert found.mean == pytest.approx(float(np.mean(values)))
    quantiles = [float(np.quantile(values, share)) for share in (0.05, 0.5, 0.95, 0.99)]
    assert [found.p5, found.median, found.p95, found.p99] == pytest.approx(quantiles)
