"""Guards of sharded models: DTensors are looked at through to this rank's rows."""

from typing import Any

import pytest
import torch
from torch import nn

import graphfsdp
from graphfsdp.optim import FusedAdam
from ranks import on_ranks

# A change, how it is undone, and how it is told.
CHANGES = (
    (
        "rows.data = rows.data.clone()",
        "rows.data = data",
        r"parameter '0\.weight' was at address .* in other memory",
    ),
    (
        "weight._local_tensor = rows.clone()",
        "weight._local_tensor = rows",
        r"parameter '0\.weight' was at address .* in other memory",
    ),
    (
        "weight.requires_grad_(False)",
        "weight.requires_grad_(True)",
        r"parameter '0\.weight' was trained .* now frozen",
    ),
    (
        "handle = weight.register_hook(print)",
        "handle.remove()",
        r"gradient hook .* of parameter '0\.weight'",
    ),
    (
        "model.set_gradient_divide_factor(4.0)",
        "model.set_gradient_divide_factor(3.0)",
        r"gradient_divide_factor",
    ),
    *(
        (f"model.{setter}(False)", f"model.{setter}(True)", f"{name} of .* was on .* now off")
        for setter, name in (
            ("set_requires_gradient_sync", "requires_gradient_sync"),
            ("set_is_last_backward", "is_last_microbatch"),
            ("set_requires_all_reduce", "requires_all_reduce"),
        )
    ),
)


@on_ranks("ranks1")
def test_changes_of_a_sharded_model_are_refused_by_name() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    graphfsdp.fully_shard(model).set_gradient_divide_factor(3.0)
    optim = FusedAdam(model.parameters(), lr=0.01)
    x = torch.randn(5, 4)
    with graphfsdp.capture(model, optim, loss_fn=lambda model, x: model(x).square().mean()) as step:
        for _ in range(5):
            step(x)
        with torch.no_grad():
            model(x)
        weight = model[0].weight
        names = {"model": model, "weight": weight, "rows": weight._local_tensor}
        names["data"] = names["rows"].data
        for change, undo, match in CHANGES:
            exec(change, names)
            with pytest.raises(graphfsdp.GuardError, match=match) as caught:
                step(x)
            assert len(caught.value.changes) == 1, caught.value
            exec(undo, names)
            step(x)
        assert step.report().num_calls["replay"] == 1 + len(CHANGES)
