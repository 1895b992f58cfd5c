"""Scripts of FSDP2's users print the same with either import, and what else they do each day.

A loop in torchtitan's style, with tensor parallelism and mixed precision.
"""

import contextlib
import functools
import inspect
import io
import pathlib
import re
import warnings
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn

import everyday_scripts
import graphfsdp
from counting_net import mean_square
from cuda_stand_in.library import is_below
from overlap_helpers import Journal, short_up_to
from ranks import on_ranks, rank_device
from sharding_helpers import (
    ASKS_SUBCLASSES,
    FEW_STEPS,
    STRATEGIES,
    assert_equal_tensors,
    batches,
    make_net,
    my_part,
    raises_on_rank,
    replayed_as_eager,
)

SOURCE = pathlib.Path(everyday_scripts.__file__).read_text()
SCRIPTS = re.findall(r"^def (\w+)\(\) -> None:", SOURCE, re.MULTILINE)
# What ranks without rows, and meshes of two axes, could change; two ranks run the others, and the
# first one too, since it asks for less on four.
ON_FOUR = (
    *("means_norms_and_averages_of_weights", "gradients_of_functions_of_a_weight"),
    *("copies_and_files", "pipelines", "uneven_tensor_parallelism", "the_loop_of_torchtitan"),
)
# Gradients of operators on sharded parameters are refused below torch 2.13, whose own fully_shard
# fails on the others.
IN_NEWER = (
    *("gradients_of_functions_of_a_weight", "several_modules_in_one_unit"),
    *("frozen_weights_of_every_dtype_in_one_group", "units_inside_their_own_forward_pass"),
    "steps_and_iterations_that_torch_compiles",
)
TABLE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "fsdp2.md"


# Where weights lie in another way, and none is gathered twice: what could be seen of it.
WITH_ANY_STRATEGY = (
    *("layers_that_freeze_and_thaw", "unsharded_ahead_and_never_resharded"),
    *("one_forward_one_backward", "units_that_the_last_microbatch_skips"),
    "units_inside_their_own_forward_pass",
)


def scripts(package: str) -> dict[str, Any]:
    theirs = "from torch.distributed.fsdp import ("
    assert SOURCE.count(theirs) == 1
    source = SOURCE.replace(theirs, f"from {package} import (")
    found: dict[str, Any] = {"__name__": package}
    exec(compile(source, f"scripts of {package}", "exec"), found)
    return found


def printed(script: Callable[[], None]) -> list[str]:
    said = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(said):
        warnings.simplefilter("ignore")
        script()
    return said.getvalue().splitlines()


def compare_scripts(names: Collection[str], *strategies: str) -> None:
    theirs, ours = scripts("torch.distributed.fsdp"), scripts("graphfsdp")
    for name in names:
        if name in IN_NEWER and not ASKS_SUBCLASSES:
            continue
        expected = printed(theirs[name])
        assert expected, name
        for strategy in strategies or (None,):
            if strategy is not None:
                ours["fully_shard"] = functools.partial(graphfsdp.fully_shard, strategy=strategy)
            assert printed(ours[name]) == expected, (name, strategy)


@on_ranks("ranks2")
def test_scripts_print_the_same_with_either_import() -> None:
    compare_scripts([name for name in SCRIPTS if name not in (*ON_FOUR[1:], *WITH_ANY_STRATEGY)])


@on_ranks("ranks4")
def test_scripts_print_the_same_with_either_import_on_four_ranks() -> None:
    assert set(ON_FOUR) < set(SCRIPTS)
    compare_scripts(ON_FOUR)


@on_ranks("ranks2")
def test_scripts_print_the_same_with_any_strategy() -> None:
    compare_scripts(WITH_ANY_STRATEGY, *STRATEGIES)


@pytest.mark.skipif(ASKS_SUBCLASSES, reason="gradients of operators on rows are right from 2.13 on")
@on_ranks("ranks2")
def test_gradients_of_operators_on_parameters_are_refused_by_older_torch() -> None:
    with raises_on_rank(graphfsdp.ConfigError, "has reached the sharded parameter", "full_tensor"):
        scripts("graphfsdp")[IN_NEWER[0]]()


@pytest.mark.gpu
@on_ranks("gpu_ranks")
def test_a_model_and_a_batch_in_the_cpus_memory_are_moved_to_the_gpu() -> None:
    outputs = []
    for shard in (torch_fsdp.fully_shard, graphfsdp.fully_shard):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).eval()
        ignored = model[1].bias.to(rank_device())
        model[1].bias = nn.Parameter(ignored)
        shard(model[0])
        shard(model, ignored_params={model[1].bias})
        held = (*model.parameters(), *model.buffers())
        assert {tensor.device for tensor in held} == {rank_device()}
        outputs.append(model(torch.linspace(0, 1, 32, device="cpu").view(4, 8)))
    assert_equal_tensors(*([output.detach()] for output in outputs))


def test_all_that_a_script_may_import_is_in_the_table() -> None:
    """Also what the installed release of torch has and the one that this was written for not."""
    text = TABLE.read_text()
    listed = set(re.findall(r"^\| `(\w+)", text, re.MULTILINE))
    described = {"works", "works differently", "ignored", "refused", "torch's own"}
    rows = re.findall(r"^\| `\w+[^|]*\| ([^|:]+)[|:]", text, re.MULTILINE)
    assert {row.strip() for row in rows} <= described, sorted({row.strip() for row in rows})
    methods = [name for name in vars(torch_fsdp.FSDPModule) if not name.startswith("_")]
    arguments = list(inspect.signature(torch_fsdp.fully_shard).parameters)
    wanted = {*torch_fsdp.__all__, *methods, *arguments}
    assert wanted - listed == set()
    for name in methods:
        theirs = inspect.signature(getattr(torch_fsdp.FSDPModule, name)).parameters
        assert name in vars(graphfsdp.FSDPModule), name
        assert list(inspect.signature(getattr(graphfsdp.FSDPModule, name)).parameters) == list(
            theirs
        ), name
    own = inspect.signature(graphfsdp.fully_shard).parameters
    assert set(arguments) <= set(own)
    for name in torch_fsdp.__all__:
        is_fsdp2 = "_fully_shard" in getattr(torch_fsdp, name).__module__
        has_word = f"| `{name}" in text and f"| `{name}` | refused" not in text
        assert hasattr(graphfsdp, name) or not (is_fsdp2 and has_word), name


def in_one_unit() -> Any:
    torch.manual_seed(0)
    model: Any = everyday_scripts.Head()
    graphfsdp.fully_shard([model.norm, model.head])
    return graphfsdp.fully_shard(model)


def divided() -> Any:
    model = graphfsdp.fully_shard(everyday_scripts.whole_model())
    model.set_gradient_divide_factor(3.0)
    return model


def renamed() -> Any:
    torch.manual_seed(0)
    model = everyday_scripts.Generating()
    graphfsdp.register_fsdp_forward_method(model, "generate")
    graphfsdp.fully_shard(model)
    graphfsdp.register_fsdp_forward_method(model, "generate")
    return model


def generated(model: Any, x: Tensor) -> Tensor:
    loss: Tensor = model.generate(x, scale=2.0).square().mean()
    return loss


def ignoring() -> Any:
    model = everyday_scripts.whole_model().to(rank_device())  # nobody moves what is ignored
    return graphfsdp.fully_shard(model, ignored_params={model[1][0].bias.requires_grad_(False)})


def casted() -> Any:
    return graphfsdp.fully_shard(everyday_scripts.whole_model().double()).float()


def parallelized() -> Any:
    return scripts("graphfsdp")["parallelized"]()


MADE = (in_one_unit, divided, renamed, ignoring, casted, parallelized)


@pytest.mark.parametrize("make", MADE)
@on_ranks("ranks2")
def test_a_graph_trains_what_the_words_have_made(make: Callable[[], Any]) -> None:
    part = 0 if make is parallelized else None  # else of this rank
    data = [(everyday_scripts.batch(index, part),) for index in range(FEW_STEPS)]
    loss_fn = generated if make is renamed else mean_square
    replayed_as_eager(make, num_steps=FEW_STEPS, data=data, loss_fn=loss_fn)


@on_ranks("ranks2")
def test_weights_of_several_modules_are_gathered_and_reduced_once() -> None:
    model = in_one_unit()
    model.prepare_shards()
    with Journal(model) as journal, short_up_to(0):
        mean_square(model, everyday_scripts.batch(0)).backward()
    mine = [line for line in journal.lines if line.endswith("norm + head/0") and "wait" not in line]
    gather, reduction = "all_gather norm + head/0", "begin reduce_scatter norm + head/0"
    assert mine == [gather, gather, reduction]  # for forward, for backward


@pytest.mark.parametrize(
    ("ranks", "strategy", "outer"),
    [
        ("ranks4", "optim_grads_params", "optim"),
        ("ranks4", "optim", "no_shard"),
        *(
            pytest.param("gpu_ranks", strategy, None, marks=pytest.mark.gpu)
            for strategy in STRATEGIES
        ),
    ],
)
@on_ranks()
def test_what_lies_in_the_cpus_memory_trains_as_it_does_elsewhere(
    strategy: str, outer: str | None
) -> None:
    losses: list[list[Tensor]] = []
    weights = []
    for policy in (
        None,
        graphfsdp.CPUOffloadPolicy(),
        graphfsdp.CPUOffloadPolicy(pin_memory=False),
    ):
        options: dict[str, Any] = {} if policy is None else {"offload_policy": policy}
        model = make_net(strategy, outer_strategy=outer, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
        losses.append([])
        for batch in batches(6):
            loss = model(*my_part(batch))
            loss.backward()
            if rank_device().type == "cpu":  # else ranks would need gloo for it beside NCCL
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.detach())
        mine: list[Any] = [getattr(p, "to_local", p.detach)() for p in model.parameters()]
        weights.append([local.detach().cpu().clone() for local in mine])
        moments: Any = [state["exp_avg"] for state in optimizer.state.values()]
        device = torch.device("cpu") if policy is not None else rank_device()
        assert {moment.to_local().device for moment in moments} == {device}
    assert_equal_tensors(losses[1] + weights[1], losses[2] + weights[2])
    if rank_device().type == "cpu" or is_below():
        assert_equal_tensors(losses[0] + weights[0], losses[1] + weights[1])
    else:  # AdamW rounds otherwise on a GPU: by less than 1e-7 in each step of a rate of 0.01
        torch.testing.assert_close(
            losses[0] + weights[0], losses[1] + weights[1], rtol=0, atol=1e-5, check_device=False
        )
