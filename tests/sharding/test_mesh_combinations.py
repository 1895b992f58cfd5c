"""Combinations that hypothesis picks: mesh, strategy, microbatches, precision, accumulation."""

import hypothesis.strategies as st
import torch
from hypothesis import HealthCheck, given, settings

import graphfsdp
from parallel_models import (
    TP_AXES,
    assert_trains_as_one,
    expert_parallel,
    part_of_axis,
    plain_model,
    tensor_parallel,
    train_parts,
    whole_batches,
)
from ranks import RankPool
from sharding_helpers import (
    STRATEGIES,
    adam,
    assert_same_training,
    hybrid_mesh,
    hybrid_net,
    my_part,
    train,
)

NUM_CALLS = 7
PRECISIONS = ("fp32", "bf16", "bf16 communication")


def model_parallel(kind: str, strategy: str, outer: str | None, microbatches: int) -> None:
    """Captured equals eager bit for bit, and both the whole model in float64."""
    mesh = hybrid_mesh((2, 2), TP_AXES)
    runs = []
    for scope in ("none", "full_iteration"):
        if kind == "expert":
            model = expert_parallel(strategy)
            parts = [list(my_part(batch)) for batch in whole_batches()[:NUM_CALLS]]
        else:
            model = tensor_parallel(strategy, sequence=kind == "sequence", outer=outer)
            parts = [part_of_axis(batch, mesh, "dp") for batch in whole_batches()[:NUM_CALLS]]
        runs.append(train_parts(model, parts, scope=scope, microbatches=microbatches))
    assert_same_training(*runs)
    plain = plain_model("mixture" if kind == "expert" else "feed")
    expected = train_parts(plain, whole_batches()[:NUM_CALLS], scope="none")
    group = torch.distributed.group.WORLD if kind == "expert" else mesh.get_group("dp")
    assert group is not None
    assert_trains_as_one(runs[1], expected, group)


def data_parallel(
    strategy: str, outer: str, microbatches: int, precision: str, after: bool
) -> None:
    """Captured equals eager bit for bit."""
    policy = graphfsdp.MixedPrecisionPolicy(
        param_dtype=None if precision == "fp32" else torch.bfloat16,
        grad_comm_dtype=torch.bfloat16 if precision == "bf16 communication" else None,
    )
    runs = []
    for scope in ("none", "full_iteration"):
        model = hybrid_net(
            strategy, outer, mp_policy=policy, reshard_after_forward=after, dropout=0.2
        )
        torch.manual_seed(torch.distributed.get_rank())
        runs.append(
            train(
                model,
                adam(model),
                scope=scope,
                microbatches=microbatches,
                num_steps=NUM_CALLS,
                skip_nonfinite=True,
            )
        )
    assert_same_training(*runs)


def few(count: int) -> settings:
    return settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )


@few(2)
@given(
    kind=st.sampled_from(["feed", "sequence", "expert"]),
    strategy=st.sampled_from(STRATEGIES),
    outer=st.sampled_from([None, "no_shard", "optim"]),
    microbatches=st.sampled_from([1, 3]),
)
def test_model_parallel_combinations_train_as_one_rank(
    ranks4: RankPool, kind: str, strategy: str, outer: str | None, microbatches: int
) -> None:
    outer = "no_shard" if strategy == "no_shard" and outer else outer
    ranks4.run(model_parallel, kind, strategy, outer, microbatches)


@few(2)
@given(
    strategy=st.sampled_from(STRATEGIES),
    outer=st.sampled_from(["no_shard", "optim"]),
    microbatches=st.sampled_from([1, 3]),
    precision=st.sampled_from(PRECISIONS),
    after=st.booleans(),
)
def test_hybrid_combinations_replay_as_eager(
    ranks4: RankPool, strategy: str, outer: str, microbatches: int, precision: str, after: bool
) -> None:
    outer = "no_shard" if strategy == "no_shard" else outer
    ranks4.run(data_parallel, strategy, outer, microbatches, precision, after)
