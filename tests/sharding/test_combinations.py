"""Combinations that hypothesis picks of what sharding offers: captured equals a plain eager run."""

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

import graphfsdp
from ranks import rank_device
from recomputing_models import Recomputing
from sharding_helpers import (
    FEW_STEPS,
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
    "bf16_comm": graphfsdp.MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, grad_comm_dtype=torch.bfloat16
    ),
    "decoupled": graphfsdp.MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, main_grads_dtype=torch.bfloat16, use_decoupled_grad=True
    ),
}
# Who runs what again in the backward pass, and with how much dropout.
WAYS = (("block_reentrant", 0.0), ("segment_ours", 0.3), ("part_ours", 0.3), ("none", 0.3))
OPTIONS = st.fixed_dictionaries(
    {
        "strategy": st.sampled_from(STRATEGIES),
        "outer": st.sampled_from(["none", "no_shard", "optim"]),
        "policy": st.sampled_from(sorted(POLICIES)),
        "microbatches": st.sampled_from([1, 3]),
        "recomputes": st.sampled_from(WAYS),
        "meta": st.booleans(),
        "overlap": st.booleans(),
        "reshard_after_forward": st.sampled_from([None, True, False]),
        "evaluates": st.booleans(),
    }
)

# Units whose turn is yet to come were once taken for ones that were skipped: the end of a reentrant
# checkpoint is not that of the backward pass.
REENTRANT = {
    "strategy": "optim_grads_params",
    "outer": "optim",
    "policy": "bf16_comm",
    "microbatches": 3,
    "recomputes": ("block_reentrant", 0.0),
    "meta": False,
    "overlap": True,
    "reshard_after_forward": False,
    "evaluates": False,
}


def combined(options: dict[str, Any], *, plain: bool) -> Training:
    """Train; ``plain`` is eager, from constructors, keeps activations and overlaps nothing."""
    meta = options["meta"] and not plain
    way, dropout = options["recomputes"]
    torch.manual_seed(0)
    make = functools.partial(Recomputing, "none" if plain else way, dropout)
    model = on_meta(make) if meta else make().to(rank_device())
    policy = POLICIES[options["policy"]]
    faster: dict[str, Any] = {
        "overlap": not plain and options["overlap"],
        "reshard_after_forward": options["reshard_after_forward"],
    }
    if options["outer"] != "none":
        num_inner = dist.get_world_size() // 2
        faster |= {"mesh": hybrid_mesh((2, num_inner)), "outer_strategy": options["outer"]}
    shard(model, options["strategy"], mp_policy=policy, **faster)
    if meta:
        graphfsdp.materialize(model)
    optim = adam(model)
    if options["evaluates"] and not plain:
        model.eval()
        with torch.no_grad():
            model(*my_part(batches(1)[0]))
        model.train()
    torch.manual_seed(dist.get_rank())
    scope = "none" if plain else "full_iteration"
    return train(
        model,
        optim,
        scope=scope,
        num_steps=FEW_STEPS,
        microbatches=options["microbatches"],
        skip_nonfinite=True,
    )


def compare(options: dict[str, Any]) -> None:
    captured = combined(options, plain=False)
    assert_same_training(combined(options, plain=True), captured)
    assert_replayed(captured, FEW_STEPS)


@pytest.mark.parametrize(("ranks", "max_examples"), [("ranks2", 3), ("ranks4", 1)])
def test_combinations_change_no_bit(
    request: pytest.FixtureRequest, ranks: str, max_examples: int
) -> None:
    # Without shrinking: each example starts two trainings on every rank.
    phases = [Phase.explicit, Phase.generate]

    @settings(max_examples=max_examples, deadline=None, phases=phases)
    @given(OPTIONS)
    @example(REENTRANT)
    def each(options: dict[str, Any]) -> None:
        if options["strategy"] == "no_shard" and options["outer"] == "optim":
            options = options | {"outer": "no_shard"}  # refused by name
        request.getfixturevalue(ranks).run(compare, options)

    each()
