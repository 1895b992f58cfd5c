"""Combinations of what sharding offers: a captured run equals an eager one that uses none of it."""

import functools
from typing import Any

import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from test_sharded_recompute import Recomputing

import graphfsdp
from helpers import NUM_STEPS
from ranks import RankPool, rank_device
from sharding_helpers import (
    STRATEGIES,
    Training,
    adam,
    assert_replayed,
    assert_same_training,
    batches,
    hybrid_mesh,
    my_part,
    on_meta,
    shard,
    train,
)

POLICIES = {
    "fp32": graphfsdp.MixedPrecisionPolicy(),
    "bf16": graphfsdp.MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, grad_comm_dtype=torch.float32
    ),
    "decoupled": graphfsdp.MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, main_grads_dtype=torch.bfloat16, use_decoupled_grad=True
    ),
}
OPTIONS = st.fixed_dictionaries(
    {
        "strategy": st.sampled_from(STRATEGIES),
        "outer": st.sampled_from(["none", "no_shard", "optim"]),
        "policy": st.sampled_from(sorted(POLICIES)),
        "microbatches": st.sampled_from([1, 3]),
        "way": st.sampled_from(["block_reentrant", "segment_ours", "part_ours", "part_reentrant"]),
        "meta": st.booleans(),
        "overlap": st.booleans(),
        "pool": st.booleans(),
        "evaluates": st.booleans(),
    }
)


def combined(options: dict[str, Any], *, plain: bool) -> Training:
    """Train; ``plain`` is eager, from constructors, keeps activations and overlaps nothing."""
    meta = options["meta"] and not plain
    torch.manual_seed(0)
    make = functools.partial(Recomputing, "none" if plain else options["way"], 0.0)
    model = on_meta(make) if meta else make().to(rank_device())
    policy = POLICIES[options["policy"]]
    hybrid: dict[str, Any] = {}
    if options["outer"] != "none":
        hybrid = {"mesh": hybrid_mesh((2, 1)), "outer_strategy": options["outer"]}
    faster = {"overlap": not plain and options["overlap"], "buffer_pool": options["pool"]}
    shard(model, options["strategy"], mp_policy=policy, **faster, **hybrid)
    if meta:
        graphfsdp.materialize(model)
    extra: dict[str, Any] = {"use_decoupled_grad": True} if policy.use_decoupled_grad else {}
    optim = adam(model, **extra)
    if options["evaluates"] and not plain:
        model.eval()
        with torch.no_grad():
            model(*my_part(batches(1)[0]))
        model.train()
    return train(
        model,
        optim,
        scope="none" if plain else "full_iteration",
        microbatches=options["microbatches"],
        num_steps=NUM_STEPS,
    )


def compare(options: dict[str, Any]) -> None:
    captured = combined(options, plain=False)
    assert_same_training(combined(options, plain=True), captured)
    assert_replayed(captured)


def test_combinations_change_no_bit(ranks2: RankPool) -> None:
    # Without shrinking: each example starts two trainings on every rank.
    @settings(max_examples=3, deadline=None, phases=[Phase.generate])
    @given(OPTIONS)
    def check(options: dict[str, Any]) -> None:
        if options["strategy"] == "no_shard" and options["outer"] == "optim":
            options = options | {"outer": "no_shard"}  # refused by name
        ranks2.run(compare, options)

    check()
