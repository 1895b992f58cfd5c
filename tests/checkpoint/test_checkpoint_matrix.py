"""Saved on any ranks, strategy, precision and mesh, loaded on any others: the same bits.

Every two strategies, numbers of ranks and precisions of 24 ways on one axis meet, and with them
meshes of two axes and model-parallel ranks.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from checkpoint_helpers import (
    SETUPS,
    Setup,
    load_on_ranks,
    save_on_ranks,
)
from ranks import RankPool

Way = tuple[int, Setup]  # number of ranks, and how the model is cut

SAVED = tuple(zip((1, 2, 4, 1, 1, 2, 2, 1), SETUPS, strict=True))
LOADED = tuple(zip((1, 1, 1, 1, 2, 1, 1, 4), SETUPS, strict=True))
# Each way of loading with those of saving that it meets.
PAIRS = {LOADED[n]: [SAVED[(n + k) % 8] for k in (6, 1, 3)] for n in range(8)}

ONE_DEVICE = (1, Setup(None))
ONE_AXIS = (2, Setup("optim_grads_params"))
REPEATED = (4, Setup("optim_grads_params", "bf16", "no_shard"))
CUT_TWICE = (4, Setup("optim_grads_params", "fp32", "optim"))
ZERO_ONE = (4, Setup("optim", "bf16", "optim"))
AXES = {
    ONE_DEVICE: [REPEATED, CUT_TWICE],
    ONE_AXIS: [CUT_TWICE, ZERO_ONE],
    REPEATED: [CUT_TWICE, ONE_AXIS],
    CUT_TWICE: [ONE_DEVICE, REPEATED],
}


# Main weights beside bf16 ones in the optimizer, or in the model.
NARROW = (1, Setup(None, "bf16"))
SHARDED_NARROW = (2, Setup("optim_grads_params", "bf16"))
MAIN_WEIGHTS = {
    SHARDED_NARROW: [ONE_DEVICE, NARROW],
    ONE_DEVICE: [SHARDED_NARROW, NARROW],
    NARROW: [SHARDED_NARROW, ONE_DEVICE],
}

# What ranks share out by tensors or by experts are whole parameters there.
TENSORS, EXPERTS = (4, Setup(None, model="tensor")), (4, Setup(None, model="expert"))
FEED, MIXTURE = (1, Setup(None, model="feed")), (1, Setup(None, model="mixture"))
PARALLEL = {
    FEED: [TENSORS],
    (2, Setup("optim_grads_params", model="feed")): [TENSORS],
    TENSORS: [FEED],
    MIXTURE: [EXPERTS],
    (2, Setup("optim_grads_params", model="mixture")): [EXPERTS],
    EXPERTS: [MIXTURE],
}


@pytest.fixture(scope="module")
def pools(ranks1: RankPool, ranks2: RankPool, ranks4: RankPool) -> dict[int, RankPool]:
    return {1: ranks1, 2: ranks2, 4: ranks4}


def check(root: Path, pairs: Mapping[Way, Iterable[Way]], pools: dict[int, RankPool]) -> None:
    saved: dict[Way, tuple[Path, dict[str, str]]] = {}
    for source in dict.fromkeys(way for sources in pairs.values() for way in sources):
        path = root / str(len(saved))
        saved[source] = path, pools[source[0]].run(save_on_ranks, path, source[1], limit_s=90)[0]
    for way, sources in pairs.items():
        paths = [saved[source][0] for source in sources]
        found = pools[way[0]].run(load_on_ranks, paths, way[1], limit_s=110)
        for rank, results in enumerate(found):
            for source, got in zip(sources, results, strict=True):
                expected = dict(saved[source][1])
                if way == NARROW:  # no main weight of what is frozen, one of what never stepped
                    del expected["frozen"]
                    never = {"frozen", "unused step", "unused exp_avg", "unused exp_avg_sq"}
                    got = {name: bits for name, bits in got.items() if name not in never}
                differing = [name for name, bits in expected.items() if got[name] != bits]
                assert not differing, f"rank {rank} of {way}, saved by {source}: {differing}"
                assert got.keys() == expected.keys()


@pytest.mark.parametrize(
    "pairs",
    [PAIRS, AXES, MAIN_WEIGHTS, PARALLEL],
    ids=["every two", "axes", "main weights", "model-parallel"],
)
def test_a_checkpoint_loads_elsewhere_with_the_same_bits(
    pairs: Mapping[Way, Iterable[Way]], tmp_path: Path, pools: dict[int, RankPool]
) -> None:
    check(tmp_path, pairs, pools)
