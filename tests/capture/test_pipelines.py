"""torch's pipeline schedules as captured iterations, on ranks of a pipeline."""

import pathlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import get_total_norm

import graphfsdp
from graphfsdp import ConfigError, Phase
from graphfsdp.optim import FusedAdam
from helpers import set_lr
from pipeline_models import (
    KINDS,
    SECONDS,
    Tower,
    adam,
    batch,
    check_failing_rank,
    data_parallel,
    loss_of,
    modules_of,
    parameters_of,
    schedule_of,
    tensor_parallel,
    whole,
)
from ranks import RankPool, on_ranks, rank_device
from sharding_helpers import ADAM_EPS, assert_equal_tensors, learning_rate

NUM_STEPS = 14


def given(optim: torch.optim.Optimizer) -> Iterator[Any]:
    """Yield batches with their numbers; the learning rate changes with each."""
    torch.manual_seed(7)
    for index in range(NUM_STEPS):
        set_lr(optim, learning_rate(index))
        yield index, *batch(index)


def trained(schedule: Any, optim: torch.optim.Optimizer, **options: Any) -> dict[str, Tensor]:
    """Train; return losses, norms and parameters of this rank."""
    found: dict[str, Tensor] = {}
    with graphfsdp.capture(schedule, optim, **options) as step:
        for index, x, target in given(optim):
            found[f"loss {index}"] = step(x, target=target)
            if step.grad_norm is not None:
                found[f"norm {index}"] = step.grad_norm
        if step.phase is not Phase.EAGER:
            assert step.report().num_calls["replay"] == NUM_STEPS - 4
            step.verify(2)
    for place, module in enumerate(modules_of(schedule)):
        found |= {f"{name} {place}": buffer.clone() for name, buffer in module.named_buffers()}
    return found | {
        name: getattr(p, "full_tensor", p.detach)().clone()
        for name, p in parameters_of(schedule).items()
    }


def by_hand(schedule: Any, optim: Any, x: Tensor, target: Tensor) -> Tensor | None:
    """Train on a batch with torch's schedule alone; the last rank of a loop has the losses."""
    losses: list[Tensor] = []
    args = (x,) if dist.get_rank() == 0 else ()
    schedule.step(*args, target=target, losses=losses)
    optim.step()
    optim.zero_grad()
    return torch.stack(losses).detach().mean() if losses else None


def eagerly_by_torch(schedule: Any) -> dict[str, Tensor]:
    optim = adam(schedule)
    losses = {f"loss {i}": by_hand(schedule, optim, *each) for i, *each in given(optim)}
    found = {name: loss for name, loss in losses.items() if loss is not None}
    return found | {name: p.detach().clone() for name, p in parameters_of(schedule).items()}


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zero bubble", "zbv", "dual"])
@on_ranks("ranks2")
def test_it_trains_as_torchs_own_loop_whatever_is_evaluated_between_steps(name: str) -> None:
    kind = KINDS[name]
    expected = eagerly_by_torch(schedule_of(kind, dropout=0.2))
    schedule = schedule_of(kind, dropout=0.2)
    optim = adam(schedule)
    is_last = dist.get_rank() == (0 if kind.style == "v" else 1)
    got: dict[str, Tensor] = {}
    with graphfsdp.capture(schedule, optim) as step:
        for index, x, target in given(optim):
            got[f"loss {index}"] = step(x, target=target)
            if index % 2:  # others go straight on
                continue
            x, target = batch(100 + index % 4)
            loss, output = step.evaluate(x, target=target), step.evaluate(x)
            assert (output is not None) == is_last
            if is_last:
                parts = zip(output.chunk(4), target.chunk(4), strict=True)
                assert torch.equal(loss, torch.stack([loss_of(*each) for each in parts]).mean())
        assert step.report().num_calls["replay"] == NUM_STEPS - 4
    losses = [float(loss) for loss in got.values()]
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, losses)
    assert everyone[0] == everyone[1]
    assert len(set(losses)) == NUM_STEPS
    got |= {name: p.detach() for name, p in parameters_of(schedule).items()}
    assert ("loss 0" in expected) == is_last
    assert_equal_tensors(expected, {key: got[key] for key in expected})


class NormByRanks:
    """The norm of one process's gradients, added as a pipeline adds it, beside its own.

    Both add N squares of K tensors in float32, in some order. Each sum of n terms has a relative
    error of at most n u with u = eps / 2, each of its squares one of u, and a root takes half of
    it and u of its own: a norm of norms is off by (N + K + 5) u / 2 at most (to first order; the
    sum over ranks is in float64). Two of them differ by twice as much.
    """

    def __init__(self, names: list[str], names_by_rank: list[list[str]]) -> None:
        self._places = [[names.index(name) for name in each] for each in names_by_rank]

    def __call__(self, held: Any, device: torch.device) -> Tensor:
        whole = held[()]
        alone = get_total_norm(whole, foreach=True)
        parts = [[whole[place] for place in places] for places in self._places]
        squares = [get_total_norm(part, foreach=True).double().square() for part in parts]
        norm = torch.stack(squares).sum().sqrt().float()
        num_terms = sum(each.numel() for each in whole) + len(whole) + 5
        bound = num_terms * torch.finfo(torch.float32).eps / 2
        assert abs(float(norm) - float(alone)) <= bound * float(alone)
        return norm


@pytest.mark.parametrize("name", KINDS)
@on_ranks("ranks2")
def test_it_trains_as_one_process(name: str) -> None:
    """Bit for bit, with as many micro-batches, a power of two, and the norm in the same order."""
    # Breadth first goes backward from the last micro-batch on: of two, the order does not matter.
    kind, count = KINDS[name], 2 if name == "looped bfs" else 4
    schedule = schedule_of(kind, n_microbatches=count)
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, list(parameters_of(schedule)))
    model = whole()
    optim = FusedAdam(model.parameters(), lr=0.02, eps=ADAM_EPS)
    norm = NormByRanks([name for name, _ in model.named_parameters()], by_rank)
    alone = {}
    options: dict[str, Any] = {"scope": "none", "microbatches": count, "max_grad_norm": 0.5}
    options["loss_fn"] = lambda model, x, target: loss_of(model(x), target)
    with (
        mock.patch("graphfsdp._capture.iteration.global_norm", norm),
        graphfsdp.capture(model, optim, **options) as step,
    ):
        for index, x, target in given(optim):
            alone[f"loss {index}"] = step(x, target)
            assert step.grad_norm is not None
            alone[f"norm {index}"] = step.grad_norm
    assert max(float(value) for key, value in alone.items() if "norm" in key) > 0.5  # is clipped
    got = trained(schedule, adam(schedule), max_grad_norm=0.5)
    alone |= {name: model.get_parameter(name).detach() for name in parameters_of(schedule)}
    seen = [got.pop(f"seen {place}") for place in range(kind.num_virtual)]
    if dist.get_rank() == 0:  # what nobody has seen is not in there: made-up input, say
        assert torch.equal(seen[0], model.seen)
    assert all(each.isfinite().all() for each in seen)
    assert_equal_tensors(alone, got)


FINDING_OUT = pytest.mark.skipif(
    torch.torch_version.TorchVersion(torch.__version__) >= "2.15",
    reason="torch finds out shapes by a collective of its own, which only its timeout ends",
)


@pytest.mark.parametrize(
    ("name", "num_ranks", "index", "num_ops"),
    [
        pytest.param("1f1b", 2, 0, 5, marks=FINDING_OUT),
        ("gpipe", 3, 1, 40),
        ("interleaved", 2, 3, 90),
        ("1f1b", 3, 5, 30),
    ],
    ids=["finding out shapes", "warm-up of three", "capture", "replay of three"],
)
def test_a_rank_that_fails_frees_the_others(
    name: str, num_ranks: int, index: int, num_ops: int
) -> None:
    check_failing_rank(RankPool(num_ranks), name, index, num_ops)


def alike(name: str) -> list[str]:
    """Fail on all ranks alike: the groups are not given up, though ranks send unequally."""
    schedule = schedule_of(KINDS[name])
    optim = adam(schedule)
    heard = []
    with graphfsdp.capture(schedule, optim) as step:
        for index in range(8):
            x, target = batch(index)
            if index in (1, 5):  # its own eager step sends unequally too
                schedule.step(*([x] if dist.get_rank() == 0 else []), target=target)
            if index == 0:
                with pytest.raises(ConfigError, match="without a target"):
                    step(x)
            if index in (0, 6):
                with pytest.raises(graphfsdp.GraphFSDPError) as caught:
                    step(x[:6], target=target[:6])
                heard.append(str(caught.value))
            step(x, target=target)
    schedule = schedule_of(KINDS[name], shard=add_read)
    with graphfsdp.capture(schedule, adam(schedule)) as step:
        for index in range(6):
            x, target = batch(index)
            if index < 3:
                step(x, target=target)
                continue
            with pytest.raises(graphfsdp.CaptureError) as refused:
                step(x, target=target)
            heard.append(str(refused.value))
    return heard


def outer_ranks_fail(name: str) -> str:
    """Two ranks fail, and the one between them waits for the one that has asked first."""
    schedule = schedule_of(KINDS[name])
    with graphfsdp.capture(schedule, adam(schedule)) as step:
        x, target = batch(0)
        step(x, target=target)
        rank = dist.get_rank()
        time.sleep((0.0, 1.5, 0.5)[rank])
        with pytest.raises(graphfsdp.GraphFSDPError) as caught:
            step(x, **({"target": target} if rank == 1 else {}))
        assert step.phase is Phase.BROKEN
        return str(caught.value)


def test_two_ranks_that_fail_free_the_one_between_them() -> None:
    pool = RankPool(3)
    try:
        heard = pool.run(outer_ranks_fail, "1f1b", limit_s=SECONDS)
        assert all("target is missing" in text for text in heard)
    finally:
        pool.close(force=True)


class Reads(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        _ = x.sum().item()
        return x


def add_read(module: nn.Module) -> None:
    assert isinstance(module, Tower)
    module.blocks["reads"] = Reads()


def test_ranks_that_fail_alike_go_on() -> None:
    pool = RankPool(3)
    try:
        for first, later, *refused in pool.run(alike, "gpipe"):
            assert "a batch of 6 rows cannot be split into 4 equal microbatches" in first
            assert "shape" in later
            assert len(refused) == 3
            assert all("host" in text and "aborted" not in text for text in refused), refused
    finally:
        pool.close()


def captured(
    kind: str = "1f1b", optimizer: Any = None, of_capture: Any = None, **of_schedule: Any
) -> None:
    schedule = schedule_of(KINDS[kind], **of_schedule)
    graphfsdp.capture(schedule, adam(schedule, **(optimizer or {})), **(of_capture or {}))


def clip() -> None:
    graphfsdp.clip_grad_norm_(schedule_of(KINDS["1f1b"]), 1.0)


def check() -> None:
    schedule = schedule_of(KINDS["1f1b"])
    graphfsdp.check(schedule, adam(schedule), batch(0)[0])


def save() -> None:
    """Save stages that are called alike."""
    stage = pipelining.PipelineStage(nn.Linear(3, 3), dist.get_rank(), 2, rank_device())
    graphfsdp.save("nowhere", pipelining.ScheduleGPipe(stage, 2, loss_of))


IN_OPTIMIZER = "max_grad_norm and skip_nonfinite of graphfsdp"
UNLIKE = "Remedy: Schedule1F1B"  # zero bubbles take gradients that they find
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "no loss": (lambda: captured(loss_fn=None), "no loss_fn"),
    "another loss": (lambda: captured(of_capture={"loss_fn": loss_of}), "loss_fn of its own"),
    "microbatches": (
        lambda: captured(of_capture={"microbatches": 2}),
        "n_microbatches of the Schedule1F1B",
    ),
    "clips": (lambda: captured(optimizer={"max_grad_norm": 1.0}), IN_OPTIMIZER),
    "skips": (lambda: captured(optimizer={"skip_nonfinite": True}), IN_OPTIMIZER),
    "decoupled": (lambda: captured("zero bubble", {"use_decoupled_grad": True}), UNLIKE),
    "sharded": (
        lambda: captured("zero bubble", shard=partial(graphfsdp.fully_shard, strategy="no_shard")),
        UNLIKE,
    ),
    "clip_grad_norm_": (clip, "a pipeline's schedule, max_grad_norm of"),
    "check": (check, "check a stage's module with a loss of its own; or capt"),
    "save": (save, "two stages of the pipeline call a part 'bias'"),
}


@pytest.mark.parametrize("case", REFUSED)
@on_ranks("ranks2")
def test_what_a_pipeline_cannot_do_is_refused(case: str) -> None:
    refused, words = REFUSED[case]
    with pytest.raises(ConfigError, match=words):
        refused()


@on_ranks("ranks2")
def test_an_iteration_of_ones_own_runs_a_schedule() -> None:
    losses = eagerly_by_torch(schedule_of(KINDS["1f1b"], dropout=0.2))
    schedule = schedule_of(KINDS["1f1b"], dropout=0.2)
    optim = adam(schedule)
    with graphfsdp.capture(schedule, optim, iteration=by_hand) as step:
        for index, x, target in given(optim):
            loss = step(x, target)
            assert (loss is None) == (dist.get_rank() == 0)
            assert loss is None or torch.equal(loss, losses[f"loss {index}"])
        assert step.report().num_calls["replay"] == NUM_STEPS - 4


@on_ranks("ranks4")
def test_stages_may_be_parallel_in_themselves() -> None:
    mesh = init_device_mesh(rank_device().type, (2, 2), mesh_dim_names=("pp", "inner"))
    group, kind = mesh.get_group("pp"), KINDS["interleaved"]
    alone = schedule_of(kind, group=group)
    expected = trained(alone, adam(alone), scope="none", max_grad_norm=0.5)
    blocks = data_parallel(mesh["inner"], "optim_grads_params", "optim_grads")
    for shard in (blocks, tensor_parallel(mesh["inner"])):
        runs = []
        for scope in ("none", "full_iteration"):
            schedule = schedule_of(kind, group=group, shard=shard)
            runs.append(trained(schedule, adam(schedule), scope=scope, max_grad_norm=0.5))
        assert_equal_tensors(*runs)
        # All copies are given the same batch, so they do what one pipeline does, to rounding.
        for key, value in expected.items():
            torch.testing.assert_close(runs[1][key], value, rtol=1e-4, atol=1e-6, msg=key)


def trained_on(
    schedule: Any, optim: Any, indices: range, *, folder: str = "", at: int = -1
) -> list[Tensor]:
    """Train on some batches; load a checkpoint into the live graph before one of them."""
    losses = []
    with graphfsdp.capture(schedule, optim, max_grad_norm=0.5, warmup_steps=1) as step:
        for index in indices:
            if index == at:
                graphfsdp.load(folder, schedule, optim)
            x, target = batch(index)
            losses.append(step(x, target=target))
    return losses


@on_ranks("ranks2")
def test_checkpoints_know_of_no_stages(tmp_path: pathlib.Path) -> None:
    folder = str(tmp_path)
    first = schedule_of(KINDS["interleaved"])
    optim = adam(first)
    trained_on(first, optim, range(4))
    graphfsdp.save(folder, first, optim)
    expected = trained_on(first, optim, range(4, 8))

    model = whole()  # without a pipeline, and back
    plain = FusedAdam(model.parameters(), lr=0.5, eps=ADAM_EPS)
    graphfsdp.load(folder, model, plain)
    graphfsdp.save(folder + "/plain", model, plain)
    second = schedule_of(KINDS["1f1b"])
    optim = adam(second)
    got = trained_on(second, optim, range(8), folder=folder + "/plain", at=4)[4:]
    for one, other in zip(expected, got, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=0)
    third = schedule_of(KINDS["interleaved"])
    optim = adam(third)
    got = trained_on(third, optim, range(8), folder=folder, at=4)[4:]
    assert_equal_tensors(expected, got)
