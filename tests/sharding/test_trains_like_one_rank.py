"""Ranks train as one: strategies, meshes, options, model parallelism; evaluation."""

import functools
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist

import graphfsdp
from parallel_models import (
    TP_AXES,
    part_of_axis,
    plain_model,
    tensor_parallel,
    whole_batches,
)
from ranks import on_ranks, rank_device
from sharding_helpers import (
    HYBRID_AXES,
    STRATEGIES,
    adam,
    assert_equal_tensors,
    assert_trains_as_whole,
    batches,
    full_gradients,
    full_parameters,
    hybrid_mesh,
    make_net,
    my_part,
    num_steps_of,
    replayed_as_eager,
)

TO_FEW: dict[str, Any] = {"reshard_after_forward": 2}  # of four ranks keep what they have gathered


@pytest.mark.parametrize(
    ("ranks", "strategy", "microbatches", "options"),
    [
        ("ranks1", "optim_grads_params", 3, {}),
        ("ranks2", "no_shard", 3, {}),
        ("ranks2", "optim", 1, {"optimizer": "adamw"}),
        ("ranks2", "optim_grads", 3, {}),
        ("ranks2", "optim_grads_params", 3, {}),
        ("ranks2", "optim_grads_params", 1, {"optimizer": "adamw", "reshard_after_forward": True}),
        ("ranks4", "optim", 3, {}),
        ("ranks4", "optim_grads_params", 3, {"reshard_after_forward": False}),
        ("ranks4", "optim_grads", 3, {"outer_strategy": "no_shard"}),
        ("ranks4", "optim_grads_params", 3, {"outer_strategy": "optim"}),
        *(("ranks4", strategy, 3, TO_FEW) for strategy in STRATEGIES),
        ("ranks4", "optim_grads_params", 3, {"overlap": False, **TO_FEW}),
        *(
            pytest.param(*row, {}, marks=pytest.mark.gpu, id="-".join(map(str, row)))
            for row in itertools.product(["gpu_ranks"], STRATEGIES, (1, 3))
        ),
    ],
)
@on_ranks()
def test_ranks_train_as_one_and_replay_as_eager(
    strategy: str, microbatches: int, options: dict[str, Any]
) -> None:
    """Captured, with options that change no bit, as an eager run without them."""
    faster = dict(options)
    optimizer = faster.pop("optimizer", "fused_adam")
    axes = {}
    if "outer_strategy" in faster:
        axes = {"mesh": hybrid_mesh(), "outer_strategy": faster.pop("outer_strategy")}
    make = functools.partial(make_net, strategy, dtype=torch.float64, **axes)
    got = replayed_as_eager(
        functools.partial(make, **faster),
        optimizer,
        num_steps_of(dist.get_world_size(), 1, 2),
        eager=functools.partial(make, overlap=False),
        microbatches=microbatches,
    )
    assert_trains_as_whole(got, optimizer)
    # It steps on all shards in one operation.
    counts = got.report.op_counts
    assert counts.get("graphfsdp.fused_adam_.default", 0) == (optimizer == "fused_adam")


@pytest.mark.parametrize(
    ("sequence", "strategy", "outer", "microbatches"),
    [
        (False, "optim", None, 3),
        (False, "optim_grads_params", None, 1),  # of parameters on two meshes
        (False, "no_shard", "no_shard", 1),
        (True, "optim_grads_params", None, 1),
        (True, "optim_grads", "optim", 3),
    ],
)
@on_ranks("ranks4")
def test_parallel_modules_train_as_one_rank_and_replay_as_eager(
    sequence: bool, strategy: str, outer: str | None, microbatches: int
) -> None:
    """Ranks that have other experts are in moe/test_moe_ranks.py."""
    num_steps = num_steps_of((strategy, outer), ("optim_grads_params", None))
    mesh = hybrid_mesh((2, 2), TP_AXES)
    assert len({param.device_mesh for param in tensor_parallel().parameters()}) > 1
    got = replayed_as_eager(
        functools.partial(tensor_parallel, strategy, sequence=sequence, outer=outer),
        num_steps=num_steps,
        data=[part_of_axis(batch, mesh, "dp") for batch in whole_batches()[:num_steps]],
        microbatches=microbatches,
    )
    whole = plain_model().to(rank_device())
    assert_trains_as_whole(got, whole=whole, group=mesh.get_group("dp"))


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
@on_ranks("ranks2")
def test_evaluation_between_captured_steps(strategy: str) -> None:
    """Evaluation passes between training steps see the newest weights and disturb nothing."""
    num_steps = num_steps_of(strategy, "optim_grads_params")
    runs = []
    for evaluates in (False, True):
        model = make_net(strategy)
        optim = adam(model)
        losses = []
        with graphfsdp.capture(model, optim, max_grad_norm=1.0) as step:
            for index, batch in enumerate(batches(num_steps)):
                if evaluates:
                    with_grad = index % 2 == 1  # and nobody calls backward
                    plain = make_net(None)
                    plain.load_state_dict(full_parameters(model), strict=False)  # head is tied
                    with torch.set_grad_enabled(with_grad):
                        got, expected = model(*my_part(batch)), plain(*my_part(batch))
                    assert torch.equal(got, expected), f"before call {index}"
                    assert got.requires_grad == with_grad
                    del got, expected
                losses.append(step(*my_part(batch)))
        runs.append((losses, full_parameters(model)))
    for before, after in zip(*runs, strict=True):
        assert_equal_tensors(before, after)


@on_ranks("ranks4")
def test_axes_of_a_deeper_mesh_are_named() -> None:
    """Also one with an outer axis of a single rank, which is as if there were none."""
    deep, flat = hybrid_mesh((1, 2, 2), ("pp", *HYBRID_AXES)), hybrid_mesh()
    inner, outer = {"shard_axis": HYBRID_AXES[1]}, {"replicate_axis": HYBRID_AXES[0]}
    same: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"mesh": deep, **inner, **outer}, {"mesh": flat}),
        ({"mesh": deep, **inner}, {"mesh": flat[HYBRID_AXES[1]]}),
        ({"mesh": hybrid_mesh((1, 4))}, {}),
    ]
    for pair in same:
        found = []
        for options in pair:
            model = make_net("optim_grads_params", **options)
            model(*my_part(batches(1)[0])).backward()
            found.append(full_gradients(model))
        assert found[0]
        assert_equal_tensors(*found)
