"""Numbers of a group that a graph holds, or reads from a tensor: what may not be changed."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import graphfsdp
from graphfsdp.errors import GuardError
from graphfsdp.optim import FusedAdam

adamw = partial(torch.optim.AdamW, fused=True)
CHANGES: list[Callable[[dict[str, Any]], object]] = [
    lambda group: group.update(lr=torch.tensor(0.5)),
    lambda group: group.update(lr=0.5),
    lambda group: setattr(group["lr"], "data", torch.tensor(0.1)),
]


@pytest.mark.parametrize(
    ("make", "lr", "change", "words"),
    [
        (
            torch.optim.SGD,
            0.1,
            lambda group: group.pop("momentum"),
            r"'momentum' of group 0 .* now missing",
        ),
        *(
            (make, torch.tensor(0.1), change, "group 0")
            for make in (adamw, FusedAdam)
            for change in CHANGES
        ),
    ],
)
def test_what_a_graph_cannot_follow_is_refused(
    make: Any, lr: Any, change: Callable[[dict[str, Any]], object], words: str
) -> None:
    model = nn.Linear(4, 3)
    optimizer = make(model.parameters(), lr=lr.clone() if isinstance(lr, torch.Tensor) else lr)
    with graphfsdp.capture(model, optimizer, loss_fn=lambda m, x: m(x).sum()) as step:
        for _ in range(5):
            step(torch.ones(2, 4))
        if isinstance(lr, torch.Tensor):
            optimizer.param_groups[0]["lr"].fill_(0.5)  # which the graph reads
            step(torch.ones(2, 4))
        change(optimizer.param_groups[0])
        with pytest.raises(GuardError, match=words):
            step(torch.ones(2, 4))
