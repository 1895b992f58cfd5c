"""Ranks train as one: strategies, meshes, model parallelism, models that do more with weights.

And combinations that hypothesis picks of what sharding offers, captured as a plain eager run;
iteration=fn of sharded models.
"""

import copy
import functools
import itertools
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import graphfsdp
from graphfsdp.optim import FusedAdam
from helpers import (
    assert_same_states,
    local_part,
    quick_garbage_collection,
)
from iterations import gan, make_trained, train_by
from parallel_models import (
    TP_AXES,
    part_of_axis,
    plain_model,
    tensor_parallel,
    whole_batches,
)
from ranks import on_ranks, rank_device
from recomputing_models import Recomputing
from sharding_helpers import (
    FEW_STEPS,
    HYBRID_AXES,
    STRATEGIES,
    Block,
    Training,
    adam,
    assert_equal_tensors,
    assert_replayed,
    assert_same_training,
    assert_trains_as_whole,
    batches,
    full_gradients,
    full_parameters,
    hybrid_mesh,
    make_net,
    my_part,
    num_steps_of,
    on_meta,
    replayed_as_eager,
    shard,
    train,
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
    outer = faster.pop("outer_strategy", None)
    make = functools.partial(make_net, strategy, dtype=torch.float64, outer_strategy=outer)
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
    """Ranks that have other experts are in moe/test_moe.py."""
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
        "outer": st.sampled_from([None, "no_shard", "optim"]),
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
        "outer_strategy": options["outer"],
    }
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


WIDTH = 8


class Stack(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x).square().mean()
        return out


class Twice(Stack):
    """Units that run twice in a forward pass, one of them with statistics."""

    def __init__(self) -> None:
        super().__init__(Block(WIDTH), nn.BatchNorm1d(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.relu(super().forward(x) + x))


class Recurrent(Stack):
    """An LSTM as a unit: torch keeps a second list of its weights."""

    def __init__(self) -> None:
        super().__init__(nn.LSTM(WIDTH, WIDTH, batch_first=True))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks[0](x[:, None])[0]).square().mean()
        return out


class _OwnWeightGradient(torch.autograd.Function):
    """A linear map whose backward adds to the weight's gradient buffer by itself."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.get_main_grad = weight.get_main_grad  # type: ignore[attr-defined]
        assert weight.grad_added_to_main_grad is False  # type: ignore[attr-defined]
        return inputs @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        inputs, weight = ctx.saved_tensors
        ctx.get_main_grad().addmm_(grads[0].t(), inputs)
        # A dummy, as fused layers return one for autograd's sake.
        return grads[0] @ weight, torch.full_like(weight, float("nan"))


class OwnLinear(nn.Linear):
    """A linear layer in the manner of a fused weight-gradient GEMM, where there is a buffer."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, bias=False)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        if not hasattr(self.weight, "get_main_grad"):
            return super().forward(input)
        result: Tensor = _OwnWeightGradient.apply(input, self.weight)  # type: ignore[no-untyped-call]
        return result


class Penalized(Stack):
    """Its blocks compute a penalty on their weights in their own forward."""

    def __init__(self) -> None:
        super().__init__(PenalizedLinear(WIDTH, WIDTH), PenalizedLinear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x, first = self.blocks[0](x)
        x, second = self.blocks[1](x)
        loss: Tensor = self.head(x).square().mean() + 0.1 * (first + second)
        return loss


class PenalizedLinear(nn.Linear):
    def forward(self, input: Tensor) -> Any:  # noqa: A002
        return super().forward(input), self.weight.square().sum()


class Contrast(nn.Module):
    """An encoder and its running average, which the forward pass updates.

    The writes reach weights that were gathered ahead, or for the microbatch before.
    """

    def __init__(self) -> None:
        super().__init__()
        query = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4))
        self.blocks = nn.ModuleList([query, copy.deepcopy(query).requires_grad_(False)])

    def forward(self, x: Tensor) -> Tensor:
        query, key = self.blocks
        with torch.no_grad():
            for slow, fast in zip(key.parameters(), query.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
            target = key(x)
        loss: Tensor = (query(x) - target - 1).square().mean()
        return loss


KINDS: dict[str, Any] = {
    "runs twice": Twice,
    "recurrent": Recurrent,
    "adds to gradients": lambda: Stack(OwnLinear(), OwnLinear()),
    "penalized": Penalized,
    "averages": Contrast,
}


@pytest.mark.parametrize(
    ("kind", "strategy", "microbatches"),
    [
        ("runs twice", "optim_grads", 1),
        ("runs twice", "optim_grads_params", 1),
        ("recurrent", "optim", 1),
        ("recurrent", "optim_grads_params", 1),
        *(("adds to gradients", strategy, 2) for strategy in STRATEGIES),
        *(("penalized", strategy, 1) for strategy in STRATEGIES),
        ("averages", "optim", 2),
        ("averages", "optim_grads_params", 1),
    ],
)
@on_ranks("ranks2")
def test_what_layers_do_with_weights_is_right(kind: str, strategy: str, microbatches: int) -> None:
    num_steps = num_steps_of(strategy, "optim_grads_params")

    def make(strategy: str | None, **options: Any) -> nn.Module:
        torch.manual_seed(0)
        model: nn.Module = KINDS[kind]().to(rank_device(), torch.float64)
        return model if strategy is None else shard(model, strategy, **options)

    generator = torch.Generator().manual_seed(5)
    drawn = torch.randn(num_steps, 12, WIDTH, generator=generator, dtype=torch.float64)
    whole = drawn.to(rank_device())
    # Interleaved, so that each microbatch has the same rows however many ranks there are. Where
    # statistics are to be those of one process, each rank has all rows.
    apart = slice(None) if kind == "runs twice" else slice(dist.get_rank(), None, 2)
    data = [(x[apart],) for x in whole]
    options: dict[str, Any] = {"microbatches": microbatches}
    got = replayed_as_eager(
        partial(make, strategy),
        eager=partial(make, strategy, overlap=False),
        num_steps=num_steps,
        data=data,
        **options,
    )
    assert_trains_as_whole(got, whole=make(None), data=[(x,) for x in whole], **options)


ROUNDING = 1e-6  # of a norm that is summed in parts, over some steps of 0.01 at most


def make(name: str, **options: Any) -> tuple[list[nn.Module], Any]:
    """Return models, sharded if there are options, and an optimizer for each, or only one."""

    def shard(model: nn.Module) -> None:
        for module in (*list(model.children())[1:3], model) if options else ():
            graphfsdp.fully_shard(module, **options)

    def adam(model: nn.Module) -> FusedAdam:
        return FusedAdam(model.parameters(), lr=1e-2, eps=1e-2)

    return make_trained(name, rank_device(), adam, adam, shard=shard)


def iterated(
    name: str, scope: str | None, num_steps: int, *, apart: bool, options: dict[str, Any]
) -> list[dict[str, Tensor]]:
    """Return results and weights, whole ones unless ``apart``: only this rank's rows.

    ``apart``: ranks have batches and random numbers of their own.
    """
    quick_garbage_collection()
    models, optimizers = make(name, **options)
    rank = dist.get_rank() if apart else 0
    torch.manual_seed(10 + rank)
    generator = torch.Generator().manual_seed(20 + rank)

    def state_of() -> dict[str, Tensor]:
        found = {}
        for at, model in enumerate(models):
            parts = {key: local_part(p).detach().clone() for key, p in model.named_parameters()}
            for key, weight in (parts if apart else full_parameters(model)).items():
                found[f"{key} of model {at}"] = weight
        return found

    data = (torch.randn(8, 6, generator=generator).to(rank_device()) for _ in range(num_steps))
    return train_by(name, models, optimizers, data, scope, state_of)


@functools.cache
def alone(name: str) -> list[dict[str, Tensor]]:
    return iterated(name, None, FEW_STEPS, apart=False, options={})


@pytest.mark.parametrize(
    ("ranks", "name", "options"),
    [
        ("ranks2", "gan", {"strategy": "optim_grads_params"}),
        ("ranks2", "gradient_penalty", {"strategy": "optim_grads_params"}),
        ("ranks2", "moving_average", {"strategy": "optim_grads_params"}),
        ("ranks2", "gan", {"strategy": "optim", "overlap": False}),
        ("ranks2", "moving_average", {"strategy": "optim_grads", "outer_strategy": "no_shard"}),
        ("ranks2", "moving_average", {"strategy": "no_shard"}),
        (
            *("ranks4", "moving_average"),
            {
                "strategy": "optim_grads_params",
                "outer_strategy": "optim",
                "reshard_after_forward": False,
            },
        ),
    ],
)
@on_ranks()
def test_iterations_train_sharded_models_as_one_process_and_replay_as_eager(
    name: str, options: dict[str, Any]
) -> None:
    num_steps = num_steps_of(options["strategy"], "optim_grads_params")
    if "outer_strategy" in options:
        options = {**options, "mesh": hybrid_mesh()}
    # Ranks that do the same reduce to what one process has, so the plain loop is the reference.
    sharded = iterated(name, None, FEW_STEPS, apart=False, options=options)
    for index, (expected, got) in enumerate(zip(alone(name), sharded, strict=True)):
        for key, value in expected.items():
            largest = float((value - got[key]).abs().max())
            assert largest <= ROUNDING, f"{key} after iteration {index}: {largest}"
    plain = iterated(name, None, FEW_STEPS, apart=True, options=options)
    eager, captured = (
        iterated(name, scope, num_steps, apart=True, options=options)
        for scope in ("none", "full_iteration")
    )
    assert_same_states(plain, eager[:FEW_STEPS])
    assert_same_states(eager, captured)


@on_ranks("ranks2")
def test_a_sharded_iteration_is_verified_evaluated_and_captured_again() -> None:
    models, optimizers = make("gan", strategy="optim_grads_params")

    def score(models: list[nn.Module], real: Tensor) -> Tensor:
        out: Tensor = models[1](real)
        return out.mean()

    step = graphfsdp.capture(
        models, optimizers, iteration=gan, loss_fn=score, verify=3, on_change="recapture"
    )
    with step:
        for index in range(16):
            step(torch.randn(8 if index % 3 else 6, 6, device=rank_device()))
            assert not step.evaluate(torch.ones(4, 6, device=rank_device())).requires_grad
        assert step.report().num_calls["capture"] == 2
        assert step.report().num_calls["replay"] >= 6
        step.verify(2)


@on_ranks("ranks2")
def test_a_sharded_iteration_is_captured_ahead_of_time() -> None:
    runs = []
    for batch in (None, torch.zeros(8, 6, device=rank_device())):
        models, optimizers = make("gan", strategy="optim_grads_params")
        torch.manual_seed(dist.get_rank())
        args: dict[str, Any] = {} if batch is None else {"example_batch": batch}
        with graphfsdp.capture(models, optimizers, iteration=gan, **args) as step:
            generator = torch.Generator().manual_seed(dist.get_rank())
            for _ in range(7):
                step(torch.randn(8, 6, generator=generator).to(rank_device()))
        runs.append([weight for model in models for weight in full_parameters(model).values()])
    assert_equal_tensors(*runs)
