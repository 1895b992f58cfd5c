"""The report of a sharded step."""

from typing import Any

import torch

import graphfsdp
from graphfsdp._capture.report.tables import Role
from ranks import RankPool
from sharding_helpers import adam, batches, full_parameters, make_net, my_part

NUM_CALLS = 7


def train(strategy: str, *, measure: bool) -> tuple[list[torch.Tensor], graphfsdp.CaptureReport]:
    model = make_net(strategy)
    with graphfsdp.capture(model, adam(model, "fused_adam"), max_grad_norm=1.0) as step:
        losses = []
        for index, batch in enumerate(batches(NUM_CALLS)):
            losses.append(step(*my_part(batch)))
            report = step.report(measure=measure and index >= 4)
    return [*losses, *full_parameters(model).values()], report


def measured_and_not(strategy: str) -> dict[str, Any]:
    plain, _ = train(strategy, measure=False)
    measured, report = train(strategy, measure=True)
    roles = {buffer.name: buffer.role for buffer in report.buffers()}
    return {
        "equal": all(torch.equal(a, b) for a, b in zip(plain, measured, strict=True)),
        "collectives": dict(report.by_kind["collective"]),
        "collective_us": sum(
            report.node_us[node.index] for node in report.nodes() if node.kind.value == "collective"
        ),
        "parameters": [name for name, role in roles.items() if role is Role.PARAMETER],
        "gradients": [name for name, role in roles.items() if role is Role.GRADIENT],
        "modules": {node.site.module for node in report.nodes()},
    }


def test_report_of_a_sharded_step_counts_collectives_and_measures_them(ranks2: RankPool) -> None:
    for result in ranks2.run(measured_and_not, "optim_grads_params"):
        assert result["equal"]
        collectives = result["collectives"]
        assert collectives["graphfsdp.all_gather_.default"] > 1
        assert collectives["graphfsdp.reduce_scatter_.default"] > 1
        assert result["collective_us"] > 0
        assert result["parameters"]
        assert result["gradients"]
        assert any(name and "." in name for name in result["modules"])
