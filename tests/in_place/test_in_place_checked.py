"""`graphfsdp check` says of each loop what `capture_in_place` does with it."""

from contextlib import suppress
from typing import Any, NoReturn

import pytest
import torch
from test_in_place import LOOPS, REFUSED, Loop, make_adam, make_net

import graphfsdp
from graphfsdp.preflight.loop import ScriptLoops


class Checked(SystemExit):
    pass


def reports_of(loop: Loop, options: dict[str, Any]) -> list[graphfsdp.CheckReport]:
    reports = []

    def stop(report: graphfsdp.CheckReport) -> NoReturn:
        reports.append(report)
        raise Checked

    model: Any = options.get("make", make_net)()
    optimizer: Any = options.get("optim", make_adam)(model)
    torch.manual_seed(7)
    with suppress(Checked), ScriptLoops("cuda", stop).following():
        loop(model, optimizer)
    return reports


@pytest.mark.parametrize("name", LOOPS)
def test_what_is_captured_has_no_hazard(name: str) -> None:
    loop, options, _ = LOOPS[name]
    (report,) = reports_of(loop, options)
    assert report.ok, str(report)
    assert report.num_ops > 0


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_never_promised(name: str) -> None:
    reports = reports_of(REFUSED[name][0], {})
    assert not any(report.ok for report in reports)
    # Whose are the parameters that it puts in the place of the model's?
    assert len(reports) == (name != "functional_call")
