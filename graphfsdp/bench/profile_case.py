"""Profiles all contenders of a case, once their times are known."""

import functools
from collections.abc import Sequence
from pathlib import Path

from graphfsdp.base.nvtx import nvtx_range
from graphfsdp.bench.batches import Batch
from graphfsdp.bench.contender import Setting
from graphfsdp.bench.profiling import Step, nsys_range, profile_contender
from graphfsdp.bench.run_contender import RunningContender
from graphfsdp.bench.together import Failure, attempt, line_up

# The first one gets the profiler itself started.
NUM_PROFILE_STEPS = 4


def case_folder(folder: str, key: str) -> Path:
    """Return where the profiles of a case are kept."""
    return Path(folder) / key.replace(" ", "-")


def profile_case(
    running: Sequence[RunningContender],
    batches: Sequence[Batch],
    first_step: int,
    setting: Setting,
    *,
    folder: str | None,
    nsys: bool,
) -> None:
    """Run some more steps of each contender, under a profiler; every rank calls it.

    Args:
        running: Those that were measured.
        batches: ``NUM_PROFILE_STEPS`` of them.
        first_step: Number of the first step.
        setting: What is trained, and where.
        folder: Where rank 0 keeps profiles of torch's profiler; None for none.
        nsys: Mark the steps for Nsight Systems.
    """
    if folder is not None:
        for item in running:
            line_up(setting.ranks, setting.device)
            _profile(item, _steps(item, batches, first_step), setting, folder)
        first_step += len(batches)
    if nsys:
        with nsys_range(setting.device):
            for item in running:
                line_up(setting.ranks, setting.device)
                with nvtx_range(f"{setting.case.key}: {item.spec.name}"):
                    for step in _steps(item, batches, first_step):
                        step()
                    line_up(setting.ranks, setting.device)


def _steps(item: RunningContender, batches: Sequence[Batch], first_step: int) -> list[Step]:
    return [
        functools.partial(item.contender, batch, first_step + index)
        for index, batch in enumerate(batches)
    ]


def _profile(item: RunningContender, steps: Sequence[Step], setting: Setting, folder: str) -> None:
    path = case_folder(folder, setting.case.key)

    def run() -> None:
        if not setting.ranks.is_first:
            for step in steps:
                step()
            return
        path.mkdir(parents=True, exist_ok=True)
        profile_contender(
            steps,
            case=setting.case.key,
            contender=item.spec.name,
            device=setting.device,
            folder=path,
            nodes=item.contender.replay_nodes(),
        )

    found = attempt(run, setting.ranks)
    if isinstance(found, Failure) and setting.ranks.is_first:
        text = f"{item.spec.name} has no profile: {found.reason}\n\n{found.detail}"
        (path / f"{item.spec.name}.txt").write_text(text, encoding="utf-8")
