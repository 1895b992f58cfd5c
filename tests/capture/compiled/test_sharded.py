"""Compiled pieces between the collectives of sharded models, on two ranks."""

from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from graphfsdp._capture.compiled.stretch_graph import StretchGraph
from graphfsdp._capture.cpu import compiling
from ranks import on_ranks
from sharding_helpers import make_net, replayed_as_eager
from stand_in_compilers import Compiled, as_it_is, compiling_by

MICROBATCHES = 2


def fails_on_rank_1(graph: StretchGraph) -> Compiled:
    if dist.get_rank() == 1:
        raise RuntimeError("no such luck")
    return as_it_is(graph)


def pays_on_rank_0(*runs: object) -> bool:
    return dist.get_rank() == 0


@pytest.mark.parametrize(
    ("strategy", "compiler", "compiles"),
    [
        ("optim_grads_params", as_it_is, True),
        ("optim_grads", fails_on_rank_1, True),
        ("optim", as_it_is, "auto"),
    ],
)
@on_ranks("ranks2")
def test_ranks_replay_as_eager(strategy: str, compiler: Any, compiles: bool | str) -> None:
    """Collectives stay where they were, also where the ranks keep other pieces."""
    with compiling_by(compiler), mock.patch.object(compiling, "_pays", pays_on_rank_0):
        trained = replayed_as_eager(
            lambda: make_net(strategy, 0.1), microbatches=MICROBATCHES, compile=compiles
        )
    first, *others = trained.report.compiled
    failed = (compiler is fails_on_rank_1 or compiles == "auto") and dist.get_rank() == 1
    assert first.startswith("0 of") is failed, first
    assert any("graphfsdp.reduce_scatter_" in line for line in others)
