"""Threads beside a rank's own: the one that listens, and those of gloo at the end of a program."""

import textwrap
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from forked_programs import run_to_their_ends
from graphfsdp._capture.ranks import ranks
from graphfsdp.base.collectives import Interruptible
from graphfsdp.base.rank_agreement import RankStore
from ranks import on_ranks, world_group


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks at threads on Linux only")
@on_ranks("ranks2")
def test_the_workers_of_gloo_are_found_by_their_name() -> None:
    dist.all_reduce(torch.ones(100_000))
    ranks.await_gloo_threads()
    states = list(ranks._gloo_states())
    assert len(states) >= 2
    assert set(states) == {"S"}


@on_ranks("ranks2")
def test_an_old_question_is_answered_by_nobody() -> None:
    """The listening thread may look late, when the calls after the one asked about failed too."""
    store = RankStore([world_group()], "late looks")
    whereabouts = ranks.Whereabouts(store)
    asked = ""
    for _ in range(2):
        whereabouts.enter("iteration", Interruptible(lambda: None))
        assert whereabouts.come_out(silent_s=30.0)
        whereabouts.leave()
        asked = asked or store.get("asked") or ""
    dist.barrier()
    store.put("asked", asked)
    whereabouts.answer()
    assert not store.has(["lost"])


FAILS = "raise KeyError('the end')"
DESTROYS = "dist.destroy_process_group()"
ENDS_OF_RANKS = [("", FAILS), (DESTROYS, f"step.close(); {DESTROYS}")]  # of the first, the second
ENDS = {
    "nothing": "",
    "exception": FAILS,
    "cycle": "step.me = step",
    "thread": "import threading; threading.Thread(target=lambda: step(x)).start()",
}
ON_A_RANK = """
    import torch, torch.distributed as dist, graphfsdp
    from graphfsdp.optim import FusedAdam
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    model = torch.nn.Linear(3, 1)
    graphfsdp.fully_shard(model)
    step = graphfsdp.capture(
        model, FusedAdam(model.parameters()), loss_fn=lambda m, x: m(x).sum(), warmup_steps=1
    )
    for _ in range(4):
        step(torch.ones(2, 3))
    print(step.phase.value)
"""
ALONE = """
    import torch, graphfsdp
    model = torch.nn.Linear(3, 1)
    optim = graphfsdp.optim.FusedAdam(model.parameters())
    step = graphfsdp.capture(model, optim, loss_fn=lambda m, x: m(x).sum(), warmup_steps=1)
    x = torch.ones(2, 3)
    for _ in range(4):
        step(x)
    graph = step._runner._recordings.latest.graph
    close = graph.close
    def note():
        print("closed")
        close()
    graph.close = note
"""


def test_programs_that_never_close_their_step_end_in_peace_also_ranks_in_any_order(
    tmp_path: Path,
) -> None:
    programs = [(textwrap.dedent(ALONE), end, "closed") for end in ENDS.values()]
    for index, ends in enumerate(ENDS_OF_RANKS):
        for rank, end in enumerate(ends):
            place = f"store, rank = 'file://{tmp_path}/store{index}', {rank}\n"
            programs.append((place + textwrap.dedent(ON_A_RANK), end, "replay"))
    ended = run_to_their_ends(tmp_path, *(program + end for program, end, _ in programs))
    for (program, end, said), done in zip(programs, ended, strict=True):
        assert done.stdout.split() == [said], (program, end, done.stderr)
        assert done.returncode == int(end == FAILS), (program, end, done.stderr)
        assert ("the end" in done.stderr) is (end == FAILS)
        assert "terminate" not in done.stderr
