import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from graphfsdp.bench.contenders import Contender, ContenderSpec, Setting, find_contenders
from graphfsdp.bench.measure import Job, measure_case
from graphfsdp.bench.options import BenchOptions
from graphfsdp.bench.records import CaseResult
from graphfsdp.bench.workloads import Case, find_workload
from graphfsdp.data.batches import Batch
from graphfsdp.training.ranks import Ranks
from ranks import RankPool


def these_ranks() -> Ranks:
    return Ranks(dist.get_rank(), dist.get_world_size(), dist.get_rank(), 2, launched=True)


class Silent(Contender):
    """Would train nothing, and asks no other rank for anything."""

    def train(self, batch: Batch) -> Tensor:
        raise AssertionError("the other rank could not even build this")


def fail_on_last(setting: Setting) -> Contender:
    if setting.ranks.rank == setting.ranks.size - 1:
        raise RuntimeError("this rank alone")
    return Silent()


def measure_on_rank() -> CaseResult:
    case = Case(find_workload("gpt-tiny"), "fp32", 1)
    setting = Setting(case, torch.device("cpu"), ranks=these_ranks())
    specs = [
        *find_contenders(("pytorch", "fsdp2")),
        ContenderSpec("lame", "fails on one rank", fail_on_last),
        *find_contenders(("full_iteration",))[1:],
    ]
    return measure_case(
        Job(setting, options=BenchOptions(seconds=0.1, random_tokens=True)), lambda *_: None, specs
    )


@pytest.mark.slow
def test_ranks_measure_together_and_leave_out_what_fails_on_one_of_them(ranks2: RankPool) -> None:
    results = ranks2.run(measure_on_rank, limit_s=110)
    for case in results:
        assert [own.name for own in case.contenders] == [
            *("eager", "pytorch", "fsdp2", "full_iteration")
        ]
        (lame,) = case.not_run
        assert lame.reason == "rank 1: RuntimeError: this rank alone"
        captured = case.find("full_iteration")
        assert captured.parity.bit_exact
        for name in ("pytorch", "fsdp2"):
            # Sums in another order.
            assert case.find(name).parity.early_difference < 1e-4
    shapes = [[len(window) for window in case.contenders[0].timing.step_ms] for case in results]
    assert shapes[0] == shapes[1], "the ranks did not run the same rounds"
    losses = [case.contenders[0].parity.last_loss for case in results]
    assert losses[0] != losses[1], "the ranks trained on the same batches"
