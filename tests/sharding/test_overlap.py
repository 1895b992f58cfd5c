"""Prefetch and reductions under way, weights that are gathered again: they change no bit.

In which order; units that run again in backward, and weights that few ranks keep for it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import graphfsdp
from overlap_helpers import NUM_BLOCKS, Journal, Watch, inputs, make_stack, short_up_to
from ranks import on_ranks, rank_device
from recomputing_models import Recomputing
from sharding_helpers import (
    FEW_STEPS,
    Training,
    adam,
    assert_equal_tensors,
    assert_replayed,
    assert_same_training,
    batches,
    buffers,
    full_parameters,
    make_net,
    my_part,
    num_steps_of,
    shard,
    train,
    unit_of,
)


def journals(*, joins: int = 0, **options: Any) -> list[list[str]]:
    """Note two iterations; collectives are joined up to so many bytes."""
    model = make_stack(**options)
    lines: list[list[str]] = []
    model.prepare_shards()
    for x in inputs(2):
        with Journal(model) as journal, short_up_to(joins):
            model(x).backward()
        lines.append(journal.lines)
        model.zero_grad()
    return lines


@pytest.mark.parametrize("reshards", [None, True])
@on_ranks("ranks2")
def test_the_next_unit_is_gathered_before_this_one_computes(reshards: bool | None) -> None:
    """In the first iteration nothing is known; the second goes one unit ahead, both ways.

    A root that was kept for backward is gathered once, and the last block ahead of it all the same.
    """
    first, second = journals(reshard_after_forward=reshards)
    assert not [line for line in first if line.startswith("begin all_gather")]
    blocks = [f"blocks.{index}/0" for index in range(NUM_BLOCKS)]
    forward = ["all_gather root/0", "all_gather root/1", f"begin all_gather {blocks[0]}"]
    for here, following in zip(blocks, [*blocks[1:], None], strict=True):
        forward.append(f"wait {here}")
        forward += [f"begin all_gather {following}"] * (following is not None)
    assert second[: len(forward)] == forward
    gathers = [line for line in second[len(forward) :] if "all_gather" in line]
    again = [line for line in gathers if line.startswith("all_gather root/")]
    assert len(again) == (1 if reshards else 0)  # backward asks for one of its two buffers
    assert gathers == again + [f"begin all_gather {name}" for name in reversed(blocks)]
    options: dict[str, Any] = {"overlap": False, "reshard_after_forward": reshards}
    lines = [line for pair in journals(**options) for line in pair]
    assert not [line for line in lines if "begin" in line or "wait" in line]


@on_ranks("ranks2")
def test_small_units_are_gathered_and_reduced_together() -> None:
    """All that fit; of a stack whose blocks fit in pairs two each time."""
    sizes = {buffer.whole_bytes for buffer in buffers(make_stack().blocks)}
    assert len(sizes) == 1
    for joins, num_reductions in ((1 << 20, 1), (2 * max(sizes), 3)):  # the root's is one more
        first, second = journals(joins=joins)
        num_gathers = NUM_BLOCKS * max(sizes) // min(joins, NUM_BLOCKS * max(sizes))
        gathers = [line for line in second if "all_gather" in line]
        assert gathers == ["all_gather root/0", "all_gather root/1"] + (
            ["begin all_gather several"] * 2 * num_gathers
        )
        assert not [line for line in first if line.startswith("begin all_gather")]
        for lines in (first, second):
            assert sum("reduce_scatter" in line for line in lines) == num_reductions


@pytest.mark.gpu
@on_ranks("gpu_ranks")
def test_a_backward_pass_ends_on_the_stream_that_it_was_called_on() -> None:
    model = make_stack()
    ends: list[torch.cuda.Stream] = []
    model.prepare_shards()
    schedule = unit_of(model).schedule
    settle = schedule.settle
    side = torch.cuda.Stream()

    def noting() -> None:
        ends.append(torch.cuda.current_stream())
        settle()

    with torch.cuda.stream(side), pytest.MonkeyPatch.context() as patch:
        old = model(*inputs(1))
        patch.setattr(schedule, "settle", noting)
        old.backward(retain_graph=True)
    assert ends
    assert set(ends) == {side}
    # An old loss must not hold the stream of its own pass, for which a capture cannot wait.
    with graphfsdp.capture(model, adam(model)) as step:
        for x in inputs(6):
            step(x)
        assert step.phase is graphfsdp.Phase.REPLAY
    assert old.grad_fn is not None


ORDERS = ([0, 1, 2, 3], [0, 2, 3], [3, 2, 1, 0], [0, 0, 1, 1], [2], [0, 1, 2, 3, 1])


def changes_its_order(model: Any, plain: bool) -> list[Tensor]:
    """Another order in each iteration, evaluation in between; it falls back and is right.

    Whole weights that somebody keeps are never overwritten.
    """
    optim = adam(model)
    values: list[Tensor] = []
    aliases: list[tuple[Tensor, Tensor]] = []
    model.blocks[1].down.register_forward_hook(  # inside the unit: a whole weight
        lambda module, args, out: aliases.append(
            (module.weight.detach().t(), module.weight.detach().t().clone())
        )
    )
    for index, x in enumerate(inputs(3 * len(ORDERS))):
        # Each order twice, so that the second time goes by what the first has recorded.
        model.order = ORDERS[(index // 2) % len(ORDERS)]
        if index % 3 == 0:
            with torch.no_grad():
                values.append(model(x))
            assert not any(buffer.full is not None for buffer in buffers(model))
        loss = model(x)
        loss.backward()
        values += [loss.detach(), graphfsdp.clip_grad_norm_(model, 0.5)]
        optim.step()
        optim.zero_grad()
        assert not any(buffer.is_prefetched for buffer in buffers(model))
        assert not any(buffer.full is not None for buffer in buffers(model))
        assert all(torch.equal(alias, copy) for alias, copy in aliases)
        del aliases[:-2]
    return [*values, *full_parameters(model).values()]


def gradients_of(model: nn.Module) -> list[Tensor]:
    grads: list[Any] = [param.grad for param in model.parameters()]
    model.zero_grad()
    return [grad.to_local() for grad in grads]


def infers(model: Any, plain: bool) -> list[Tensor]:
    """Its first passes are in torch.inference_mode, and others between those that train."""
    values: list[Tensor] = []
    for x in inputs(3):
        with torch.inference_mode():
            values += [model(x) for _ in range(2)]
        model(x).backward()
        values += gradients_of(model)
    return values


def infers_in_part(model: Any, plain: bool) -> list[Tensor]:
    """What it begins to gather inside of torch.inference_mode is used outside of it."""
    mode = torch.inference_mode()
    model.blocks[1].register_forward_pre_hook(lambda *_: mode.__enter__(), prepend=True)
    model.blocks[1].register_forward_hook(lambda *_: mode.__exit__(None, None, None))
    of_two = 2 * buffers(model.blocks[1])[0].whole_bytes
    with torch.no_grad(), short_up_to(of_two):
        return [model(x) for x in inputs(3)]


def autocasts(model: Any, plain: bool) -> list[Tensor]:
    """To another dtype than its weights have, around the backward pass as well."""
    values: list[Tensor] = []
    for x in inputs(3):
        with torch.autocast(x.device.type, torch.float16):
            loss = model(x)
            loss.backward()
        values += [loss.detach(), *gradients_of(model)]
    return values


def writes_its_weights(model: Any, plain: bool) -> list[Tensor]:
    """A hook writes weights after they were gathered ahead, which gathers them again."""

    def write(change: Callable[[Any], object]) -> None:
        with torch.no_grad():
            for param in model.blocks[1].parameters():
                change(param.to_local())

    def clip(module: nn.Module, args: Any) -> None:
        write(lambda local: local.clamp_(-0.05, 0.05))

    model.blocks[0].norm.register_forward_pre_hook(clip)
    values: list[Tensor] = []
    for x in inputs(4):
        loss = model(x)
        loss.backward()
        values += [loss.detach(), *gradients_of(model)]
        write(lambda local: local.add_(0.3))
    return values


class BoomError(RuntimeError):
    """What a model raises."""


@contextmanager
def failing(module: nn.Module, *, in_backward: bool) -> Iterator[None]:
    def fail(*_: Any) -> None:
        raise BoomError

    if in_backward:
        handle = module.register_full_backward_hook(fail)
    else:
        handle = module.register_forward_pre_hook(fail)
    try:
        with pytest.raises(BoomError):
            yield
    finally:
        handle.remove()


def fails(model: Any, plain: bool) -> list[Tensor]:
    """Every rank fails in the middle, with gathers and reductions under way; then all goes on."""
    values: list[Tensor] = []
    for index, x in enumerate(inputs(8)):
        if index in (2, 4, 6) and not plain:
            with failing(model.blocks[2].norm, in_backward=index == 4):
                model(x.clone().requires_grad_()).backward()
            if index < 6:  # a plain loop that catches an error knows nothing of abandon_iteration
                model.abandon_iteration()
                assert not any(buffer.is_prefetched for buffer in buffers(model))
                model.zero_grad()
        model(x).backward()
        values += gradients_of(model)
    return values


def accumulates(model: Any, plain: bool) -> list[Tensor]:
    """no_sync, two backward passes of one forward, a backward inside a forward."""
    x, y, z = inputs(3)
    values: list[Tensor] = []
    for _ in range(3):
        with model.no_sync():
            model(x).backward()
        model(y).backward()
        loss = model(z)
        loss.backward(retain_graph=True)
        loss.backward()
        probe = z.clone().requires_grad_()
        values += [*torch.autograd.grad(model(probe), probe), *gradients_of(model)]
    return values


@pytest.mark.parametrize(
    ("does", "precision"),
    [
        (changes_its_order, {}),
        (infers, {}),
        (infers, {"gather_format": "float8"}),
        (infers_in_part, {}),
        (autocasts, {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16}),
        (writes_its_weights, {}),
        (fails, {}),
        (accumulates, {}),
    ],
)
@on_ranks("ranks2")
def test_numbers_are_those_without_overlap(
    does: Callable[[Any, bool], list[Tensor]], precision: dict[str, Any]
) -> None:
    """And a failure leaves none, beside a model that has not failed."""
    policy = graphfsdp.MixedPrecisionPolicy(**precision)
    runs = [does(make_stack(mp_policy=policy, overlap=not plain), plain) for plain in (True, False)]
    assert_equal_tensors(*runs)


def captured_after_failures(fails_at: Sequence[int], **options: Any) -> int:
    """Calls fail in the middle and are made again; return how often the recording waits."""
    model = make_stack()
    is_failing = False

    def fail(*_: object) -> None:
        if is_failing:
            raise ArithmeticError

    model.blocks[2].norm.register_forward_pre_hook(fail)
    with graphfsdp.capture(model, adam(model), **options) as step, short_up_to(0):
        for index, x in enumerate(inputs(6)):
            is_failing = index in fails_at
            if is_failing:
                with pytest.raises(ArithmeticError):
                    step(x)
                is_failing = False
            step(x)  # never refused as another path than that of the last warm-up
        assert step.report().num_captures == 1
        return step.report().op_counts["graphfsdp.wait_.default"]


@on_ranks("ranks1")
def test_whatever_happened_before_a_capture_it_overlaps() -> None:
    # A wait for each block in both passes, and one for each reduction of five units.
    usual = 2 * NUM_BLOCKS + NUM_BLOCKS + 1
    assert captured_after_failures((2, 3)) == usual
    assert captured_after_failures((), warmup_steps=1) == usual


@on_ranks("ranks2")
def test_weights_that_backward_keeps_are_gathered_once() -> None:
    model = make_stack(reshard_after_forward=False)
    model.prepare_shards()
    with Journal(model) as journal, short_up_to(0):
        for part, x in enumerate(inputs(3)):
            model.set_requires_gradient_sync(part == 2)
            model.set_reshard_after_backward(part == 2)
            model(x).backward()
    gathers = [line for line in journal.lines if "all_gather" in line]
    assert len(gathers) == len(set(gathers)) == len(buffers(model))


@on_ranks("ranks2")
def test_all_gathers_have_a_communicator_made_once() -> None:
    groups = []
    for _ in range(2):  # the second model uses those of the first
        model: Any = make_net("optim_grads_params")
        model.prepare_shards()
        for buffer in buffers(model):
            assert (buffer.gather_group is not buffer.mesh.inner) == buffer.sharded
            assert buffer.gather_group.size() == buffer.mesh.inner.size()
            groups += [buffer.gather_group] * buffer.sharded
    shared: Any = make_net("optim_grads_params", overlap=False)
    shared.prepare_shards()
    assert all(buffer.gather_group is buffer.mesh.inner for buffer in buffers(shared))
    assert len({id(group) for group in groups}) == 1


@on_ranks("ranks4")
def test_passes_that_run_again_or_several_times() -> None:
    for way in ("block_torch", "part_reentrant", "block_ours"):
        runs = []
        for few in (True, 2):
            torch.manual_seed(0)
            model: Any = Recomputing(way, 0.0).to(rank_device())
            shard(model, "optim_grads_params", reshard_after_forward=few)
            runs.append(train(model, adam(model), num_steps=FEW_STEPS))
        assert_same_training(*runs)
    grads = []
    for few in (True, 2):
        model = make_net("optim_grads_params", reshard_after_forward=few)
        parts = [my_part(batch) for batch in batches(2)]
        loss: Tensor = model(*parts[0]) * model(*parts[1])  # each unit twice in one pass
        with torch.no_grad():
            model(*parts[1])
        loss.backward()
        loss = model(*parts[1])
        model.set_reshard_after_forward(True)  # no longer to few
        loss.backward()
        found: list[Any] = [p.grad for p in model.parameters() if p.grad is not None]
        grads.append([grad.full_tensor() for grad in found])
    assert all(map(torch.equal, *grads))


@on_ranks("ranks4")
def test_backward_gathers_from_two_ranks() -> None:
    """Forward gathers from all; each rank keeps half of the whole weights between."""
    sizes: list[int] = []

    model: Any = make_net("optim_grads_params", reshard_after_forward=2)
    cut = [each for each in buffers(model) if each.sharded and each.layout.total_numel]
    watch = Watch("all_gather", lambda whole, part: sizes.append(whole.numel() // part.numel()))
    with watch:
        loss = model(*my_part(batches(1)[0]))
    assert sizes == [4] * len(cut)
    for buffer in cut:
        assert buffer.copy is None
        kept = buffer._part
        assert kept is not None
        assert 2 * kept.numel() == buffer.layout.total_numel
        assert buffer.few_ranks is not None
        ranks = dist.get_process_group_ranks(buffer.few_ranks)
        assert ranks == [0, 1] or ranks == [2, 3]
        assert dist.get_rank() in ranks
    with watch:
        loss.backward()
    assert set(sizes[len(cut) :]) == {2}
    assert all(buffer._part is None for buffer in buffers(model))


# By name: whether the block, a segment of blocks or a part of a block runs again, and by whom;
# with how much dropout, which torch's own would draw anew.
WAYS = {
    "optim": (("block_torch", 0.0), ("segment_reentrant", 0.0)),
    "optim_grads_params": (
        *(("block_reentrant", 0.0), ("segment_torch", 0.0), ("part_torch", 0.0)),
        *(("block_selective", 0.0), ("part_selective", 0.0)),
        *(("part_reentrant", 0.0), ("block_ours", 0.3), ("part_ours", 0.3)),
    ),
}


def trained(way: str, strategy: str, dropout: float, scope: str) -> Training:
    torch.manual_seed(0)
    model = shard(Recomputing(way, dropout).to(rank_device()), strategy)
    return train(model, adam(model), scope=scope, num_steps=num_steps_of(strategy, "optim"))


def num_collectives(training: Training) -> dict[str, int]:
    counts = training.report.op_counts
    return {op: counts[f"graphfsdp.{op}.default"] for op in ("all_gather_", "reduce_scatter_")}


@pytest.mark.parametrize("strategy", WAYS)
@on_ranks("ranks2")
def test_recomputation_in_a_graph_changes_no_bit_and_gathers_no_more(strategy: str) -> None:
    """Compare with runs that keep all activations; at last one where small units go together."""
    with short_up_to(0):
        usual = {
            dropout: trained("none", strategy, dropout, "full_iteration")
            for dropout in {dropout for _, dropout in WAYS[strategy]}
        }
        for way, dropout in WAYS[strategy]:
            got = trained(way, strategy, dropout, "full_iteration")
            assert_same_training(usual[dropout], got)
            assert_replayed(got, num_steps_of(strategy, "optim"))
            assert num_collectives(got) == num_collectives(usual[dropout]), way
    assert_same_training(got, trained(way, strategy, dropout, "none"))
