"""Checkpoints of meshes with two axes: saved there, loaded on one axis or one device, and back."""

from pathlib import Path

from checkpoint_helpers import Setup, load_on_ranks, save_on_ranks
from ranks import RankPool

ONE_DEVICE = (1, Setup(None))
ONE_AXIS = (2, Setup("optim_grads_params"))
REPEATED = (4, Setup("optim_grads_params", "bf16", "no_shard"))
CUT_TWICE = (4, Setup("optim_grads_params", "fp32", "optim"))
ZERO_ONE = (4, Setup("optim", "bf16", "optim"))
WAYS = (ONE_DEVICE, ONE_AXIS, REPEATED, CUT_TWICE, ZERO_ONE)
# Each way of loading with those of saving that it meets.
PAIRS = {
    ONE_DEVICE: (REPEATED, CUT_TWICE),
    ONE_AXIS: (CUT_TWICE, ZERO_ONE),
    REPEATED: (CUT_TWICE, ONE_AXIS),
    CUT_TWICE: (ONE_DEVICE, REPEATED),
}


def test_checkpoints_go_between_one_axis_and_two(
    tmp_path: Path, ranks1: RankPool, ranks2: RankPool, ranks4: RankPool
) -> None:
    pools = {1: ranks1, 2: ranks2, 4: ranks4}
    paths = {way: tmp_path / str(index) for index, way in enumerate(WAYS)}
    saved = {
        way: pools[way[0]].run(save_on_ranks, paths[way], way[1], limit_s=90)[0] for way in WAYS
    }
    for way, sources in PAIRS.items():
        found = pools[way[0]].run(
            load_on_ranks, [paths[source] for source in sources], way[1], limit_s=90
        )
        for rank, results in enumerate(found):
            for source, got in zip(sources, results, strict=True):
                differing = [name for name, bits in saved[source].items() if got[name] != bits]
                assert not differing, f"rank {rank} of {way}, saved by {source}: {differing}"
                assert got.keys() == saved[source].keys()
