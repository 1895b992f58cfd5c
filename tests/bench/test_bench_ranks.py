import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from graphfsdp.bench.contenders import Contender, ContenderSpec, Setting, find_contenders
from graphfsdp.bench.measure import Job, measure_case
from graphfsdp.bench.results import Row
from graphfsdp.bench.workloads import Case, find_workload
from graphfsdp.data import Batch
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


def measure_on_rank() -> list[Row]:
    case = Case(find_workload("gpt-tiny"), "fp32", 1)
    setting = Setting(case, torch.device("cpu"), ranks=these_ranks())
    specs = [
        *find_contenders(("pytorch", "fsdp2")),
        ContenderSpec("lame", "fails on one rank", fail_on_last),
        *find_contenders(("full_iteration",))[1:],
    ]
    return measure_case(Job(setting, seconds=0.1), specs=specs)


@pytest.mark.slow
def test_ranks_measure_together_and_leave_out_what_fails_on_one_of_them(ranks2: RankPool) -> None:
    results = ranks2.run(measure_on_rank, limit_s=110)
    eager = []
    for found in results:
        rows = {row["contender"]: row for row in found}
        assert list(rows) == ["eager", "pytorch", "fsdp2", "full_iteration", "lame"]
        assert rows["lame"]["reason"] == "rank 1: RuntimeError: this rank alone"
        assert rows["full_iteration"]["bit_exact"]
        for name in ("pytorch", "fsdp2"):
            # Sums in another order.
            assert rows[name]["early_difference"] < 1e-4
        eager.append(rows["eager"])
    shapes = [[len(window) for window in row["step_ms"]] for row in eager]
    assert shapes[0] == shapes[1], "the ranks did not run the same rounds"
    assert eager[0]["last_loss"] != eager[1]["last_loss"], "the ranks trained on the same batches"
