"""`graphfsdp check` judges loops as they are written, and lets them run as they would."""

from contextlib import suppress
from typing import Any

import pytest
import torch

import graphfsdp
from graphfsdp.preflight.loop import ScriptRun
from loops import JUDGED, LOOPS, Loop, make_adam, make_net


def report_of(loop: Loop, options: dict[str, Any]) -> graphfsdp.CheckReport:
    model: Any = options.get("make", make_net)()
    optimizer: Any = options.get("optim", make_adam)(model)
    torch.manual_seed(7)
    run = ScriptRun()
    with suppress(SystemExit), run.following():
        loop(model, optimizer)
    assert run.report is not None
    return run.report


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_that_a_graph_can_hold_has_no_hazard(name: str) -> None:
    loop, options = LOOPS[name]
    report = report_of(loop, options)
    kinds = {hazard.kind for hazard in report.hazards}
    assert kinds == ({graphfsdp.HazardKind.CONTROL_FLOW} if "two ways" in name else set())
    assert report.num_ops > 0
    assert sum(count for _, count in report.launches) == report.num_ops
    assert report.parts is not None


@pytest.mark.parametrize("name", JUDGED)
def test_what_a_graph_cannot_hold_is_told(name: str) -> None:
    loop, kind = JUDGED[name]
    report = report_of(loop, {})
    assert [hazard.kind.value for hazard in report.hazards] == ([kind] if kind else []), str(report)
