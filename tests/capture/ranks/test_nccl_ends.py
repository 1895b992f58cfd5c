"""Graphs that hold NCCL's communicators: groups end, ranks fail, die and stand still, nobody waits.

Each rank is a process of its own. Above the stand-in streams run when something waits for them, so
that launches return before their work is done, and an abort or an end of a communicator waits for
graphs as NCCL's does.
"""

import datetime
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import FileStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed import destroy_process_group as imported_by_name
from torch.distributed.device_mesh import DeviceMesh

import graphfsdp
from counting_net import mean_square as loss_of
from cuda_stand_in import library
from forked_programs import forked
from graphfsdp.optim import FusedAdam
from time_limits import until

pytestmark = [pytest.mark.gpu, pytest.mark.multi_gpu, pytest.mark.time_limit(300)]

NUM_RANKS = 2
# torch 2.15 aborts one communicator after the other: a rank whose graph is under way ends then.
ABORTS_IN_TURN = torch.torch_version.TorchVersion(torch.__version__) >= "2.15"
WIDTH = 16
GONE, STOPPED = 3, 4  # exit codes of ranks that are to die


def sharded(group: dist.ProcessGroup | None = None) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)).cuda()
    mesh = None if group is None else DeviceMesh.from_group(group, "cuda")
    graphfsdp.fully_shard(model[0], mesh)
    graphfsdp.fully_shard(model, mesh)
    return model


def batch(rows: int = 8) -> Tensor:
    return torch.randn(rows, WIDTH, device="cuda")


def captured(num_calls: int, model: nn.Module | None = None) -> graphfsdp.CapturedStep:
    model = sharded() if model is None else model
    step = graphfsdp.capture(model, FusedAdam(model.parameters(), lr=1e-3), loss_fn=loss_of)
    for _ in range(num_calls):
        step(batch())
    return step


# What a rank does; what it returns is its exit code.


def ends_all(rank: int) -> None:
    step = captured(6)
    imported_by_name()
    with pytest.raises(graphfsdp.PhaseError, match="destroy_process_group"):
        step(batch())


def ends_the_group_of_the_shards(rank: int) -> None:
    group = dist.new_group()
    other = captured(5)  # over the world: it lives on
    step = captured(6, sharded(group))
    dist.destroy_process_group(group)
    with pytest.raises(graphfsdp.PhaseError, match="destroy_process_group"):
        step(batch())
    # It replays on, and as eager: verify compares from the same state, bit for bit.
    assert other.phase is graphfsdp.Phase.REPLAY
    x = batch()
    other(x)
    other.verify(2)
    assert other.report().num_calls["replay"] == 2
    dist.destroy_process_group()


def ends_with_an_iteration(rank: int) -> None:
    def iterate(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
        loss_of(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()

    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = graphfsdp.capture(model, optimizer, iteration=iterate)
    for _ in range(7):
        step(batch())
    dist.destroy_process_group()


def ends_with_python(rank: int) -> None:
    globals()["kept"] = captured(6)


def drops_the_step_first(rank: int) -> None:
    captured(6)
    dist.destroy_process_group()


def aborts(rank: int) -> None:
    """As programs do that start anew after the loss of a rank."""
    step = captured(6)
    began = time.monotonic()
    if rank == 1:
        time.sleep(3)
        os._exit(0)
    step(batch())  # waits for the other rank
    dist.distributed_c10d._abort_process_group()
    assert time.monotonic() - began < 60
    with pytest.raises(graphfsdp.GraphFSDPError):
        step(batch())


def fails(rank: int, kind: str) -> None:
    step, index = captured(6), 6
    began = time.monotonic()
    with pytest.raises(graphfsdp.GraphFSDPError) as caught:  # noqa: PT012
        while True:
            index += 1
            if index == 9 and rank == 0 and kind == "batch":
                began = time.monotonic()
                step(batch(rows=4))
            if index == 9 and rank == 0 and kind == "guard":
                step._engine.model.eval()
            float(step(batch()))
    took = time.monotonic() - began
    if rank == 0:
        own = graphfsdp.BatchMismatchError if kind == "batch" else graphfsdp.GuardError
        assert type(caught.value) is own
    else:
        assert type(caught.value) is graphfsdp.RankFailedError
        assert re.search(r"rank 0 of 2 failed in iteration 9", str(caught.value))
    assert step.phase is graphfsdp.Phase.BROKEN
    print(f"took {took:.1f} s")
    with pytest.raises(graphfsdp.PhaseError, match="load"):
        step(batch())
    step.close()
    dist.destroy_process_group()


def refuses_alone(rank: int) -> None:
    """In a capture, between two collectives."""
    model = sharded()

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        loss = loss_of(model, x)
        if rank == 0 and torch.cuda.is_current_stream_capturing():
            loss.item()
        return loss

    step = graphfsdp.capture(
        model, FusedAdam(model.parameters()), loss_fn=loss_fn, warmup_steps=1, max_grad_norm=1.0
    )
    step(batch())
    with pytest.raises(graphfsdp.CaptureError, match="reads a value of the iteration"):
        step(batch())


def loses_a_rank(rank: int, how: str, lost: int = 1) -> None:
    step = captured(6)
    mine = torch.device("cuda", torch.cuda.current_device())
    if how == "killed beside":  # a model need not be on the device that is current
        torch.cuda.set_device(1 - rank)
    for index in range(40):
        if rank == lost and index == 4:
            if how.startswith("killed"):
                os.kill(os.getpid(), signal.SIGKILL)
            elif how == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif how == "asleep":
                time.sleep(1000)
        float(step(batch().to(mine)))


def loses_a_rank_at_its_end(rank: int) -> None:
    step = captured(6)
    if rank == 1:
        os._exit(GONE)
    step(batch())
    dist.destroy_process_group()  # waits for what is in flight


def store_of(rank: int, folder: Path, *, hosted: bool) -> Any:
    """Return the store; the first rank hosts it, as without a launcher, or it is a file."""
    if not hosted:
        return FileStore(str(folder / "store"), NUM_RANKS)
    port = folder / "port"
    if rank == 0:
        store = TCPStore("127.0.0.1", 0, NUM_RANKS, is_master=True, wait_for_workers=False)
        (folder / "new").write_text(str(store.port))
        (folder / "new").rename(port)
        return store
    assert until(port.exists, 60)
    return TCPStore("127.0.0.1", int(port.read_text()), NUM_RANKS, is_master=False)


def run_rank(
    program: Callable[[int], None],
    rank: int,
    folder: str,
    timeout_s: float,
    lazy: bool,
    hosted: bool,
) -> None:
    os.setsid()  # what is stopped is woken when the shell that has started the tests ends
    if library.is_below() and lazy:
        library.choose(streams=3 + rank)
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl",
        store=store_of(rank, Path(folder), hosted=hosted),
        rank=rank,
        world_size=NUM_RANKS,
        timeout=datetime.timedelta(seconds=timeout_s),
        device_id=torch.device("cuda", rank),
    )
    program(rank)
    sys.stdout.flush()


@contextmanager
def ranks(
    program: Callable[[int], None],
    folder: Path,
    *,
    timeout_s: float = 1000,
    lazy: bool = True,
    hosted: bool = False,
) -> Iterator[list[Any]]:
    """Start a process for each rank; the test ends them."""
    settings = (str(folder), timeout_s, lazy, hosted)
    with ExitStack() as stack:
        yield [
            stack.enter_context(forked(run_rank, program, rank, *settings))
            for rank in range(NUM_RANKS)
        ]


def ends_of(
    program: Callable[[int], None], folder: Path, *, lazy: bool = True
) -> list[CompletedProcess[str]]:
    with ranks(program, folder, lazy=lazy) as started:
        return [process.ended() for process in started]


@pytest.fixture(autouse=True)
def _nccl_never_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_STAND_IN_NCCL_LIMIT_S", "1000")


@pytest.mark.parametrize("lazy", [False, True], ids=["at_once", "later"])
@pytest.mark.parametrize(
    "program",
    [
        ends_all,
        ends_the_group_of_the_shards,
        ends_with_an_iteration,
        ends_with_python,
        drops_the_step_first,
    ],
)
def test_a_job_ends_whoever_still_holds_a_step(
    program: Callable[[int], None], lazy: bool, tmp_path: Path
) -> None:
    for ended in ends_of(program, tmp_path, lazy=lazy):
        assert ended.returncode == 0, ended.stdout + ended.stderr


def test_a_program_may_abort_its_groups_while_a_rank_is_missing(tmp_path: Path) -> None:
    for ended in ends_of(aborts, tmp_path):
        assert ended.returncode == 0, ended.stdout + ended.stderr


def test_a_rank_that_refuses_alone_in_a_capture_leaves_nobody_in_nccls_registration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which waits on the host for all local ranks, on a machine with an NVSwitch."""
    monkeypatch.delenv("NCCL_GRAPH_REGISTER", raising=False)
    monkeypatch.setenv("CUDA_STAND_IN_NVLS", "1")
    for ended in ends_of(refuses_alone, tmp_path):
        assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize("kind", ["batch", "guard"])
def test_a_rank_that_fails_in_a_replay_frees_the_others(kind: str, tmp_path: Path) -> None:
    for rank, ended in enumerate(ends_of(partial(fails, kind=kind), tmp_path)):
        if rank == 1 and ended.returncode == 1 and ABORTS_IN_TURN:
            assert re.search(r"rank 0 of 2 failed in iteration 9", ended.stderr)
            assert "so this process ends" in ended.stderr
            continue
        assert ended.returncode == 0, ended.stdout + ended.stderr
        took = re.search(r"took ([\d.]+) s", ended.stdout)
        assert took is not None
        assert float(took[1]) < 15


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("killed", "no sign of life of rank 1 of 2"),
        ("killed beside", "no sign of life of rank 1 of 2"),
        ("stopped", "no sign of life of rank 1 of 2"),
        ("asleep", "rank 1 of 2 lives, but has not launched as much"),
    ],
)
def test_a_rank_that_is_lost_in_a_replay_is_named_and_the_others_end(
    how: str, says: str, tmp_path: Path
) -> None:
    with ranks(partial(loses_a_rank, how=how), tmp_path, timeout_s=8) as started:
        ended = started[0].ended()
        assert ended.returncode == 1, ended.stdout + ended.stderr
        assert "rank 0 of 2: iteration 11 was launched and did not come to its end" in ended.stderr
        assert says in ended.stderr
        assert "timeout of 8 s" in ended.stderr
        assert "load the last checkpoint" in ended.stderr


def test_the_lost_rank_may_be_the_one_that_hosts_the_store(tmp_path: Path) -> None:
    program = partial(loses_a_rank, how="stopped", lost=0)
    with ranks(program, tmp_path, timeout_s=8, hosted=True) as started:
        ended = started[1].ended()
        assert ended.returncode == 1, ended.stdout + ended.stderr
        assert "the store of the process group does not answer" in ended.stderr
        assert "rank 0" in ended.stderr


def test_who_waits_for_a_lost_rank_at_the_end_of_the_job_ends_too(tmp_path: Path) -> None:
    with ranks(loses_a_rank_at_its_end, tmp_path, timeout_s=8) as started:
        ended = started[0].ended()
        assert ended.returncode == 1, ended.stdout + ended.stderr
        assert "no sign of life of rank 1 of 2" in ended.stderr
