"""`graphfsdp check` judges loops as they are written, and lets them run as they would."""

import json
from typing import Any

import pytest

import loops
from graphfsdp.cli import main
from loops import JUDGED, LOOPS


def report_of(name: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    code = main(["check", "--json", loops.__file__, name])
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert code == bool(report["hazards"])
    return report


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_that_a_graph_can_hold_has_no_hazard(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    report = report_of(name, capsys)
    kinds = [hazard["kind"] for hazard in report["hazards"]]
    assert kinds == (["control-flow"] if "two ways" in name else [])
    assert report["num_ops"] > 0
    assert sum(launch["count"] for launch in report["launches"]) == report["num_ops"]
    assert report["parts"] is not None


@pytest.mark.parametrize("name", JUDGED)
def test_what_a_graph_cannot_hold_is_told(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    kind = JUDGED[name][1]
    report = report_of(name, capsys)
    kinds = [hazard["kind"] for hazard in report["hazards"]]
    assert kinds == ([kind] if kind else []), report
