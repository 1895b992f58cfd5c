"""Whatever happens during a save, the checkpoints before it are there; damage is named."""

import contextlib
import json
import os
import random
import re
import shutil
import tempfile
import unittest.mock
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import forked_programs
import graphfsdp
from checkpoint_helpers import Setup, contents, digests, make, train_plainly
from kill_saves import UNFINISHED, is_all, loaded_step, model_of
from ranks import RankPool

NUM_KILLS = 52


@pytest.fixture
def fast_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory if there is one: a kill takes nothing from the system's cache either."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


def test_a_kill_at_any_moment_leaves_the_last_complete_checkpoint(fast_folder: Path) -> None:
    program = Path(__file__).parents[1] / "support" / "kill_saves.py"
    seed = str(random.randrange(1000))
    result = forked_programs.run_file(program, str(fast_folder), str(NUM_KILLS), seed)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["advances"] > NUM_KILLS // 2
    assert found["interrupted"] > 0  # some kills did fall into a save
    assert loaded_step(fast_folder) == found["step"]


class Stop(BaseException):
    """Stands for the end of the process: nothing catches it."""


def file_operations(monkeypatch: pytest.MonkeyPatch, act: Callable[[str, str], None]) -> None:
    """Call ``act`` with name and first argument before everything that changes a file system."""

    def patch(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def patched(*args: Any, **kwargs: Any) -> Any:
            act(name, str(args[0]))
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, patched)

    for name in ("fsync", "rename", "replace"):
        patch(os, name)
    for name in ("mkdir", "open"):
        patch(Path, name)
    patch(shutil, "rmtree")


@pytest.mark.parametrize("kind", [Stop, OSError])
def test_an_end_or_a_full_disk_at_any_operation_leaves_a_checkpoint_that_loads(
    kind: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file operation in turn is the one that does not happen any more, or fails.

    What a power cut leaves depends on their order: files are synced before they are shown.
    """
    graphfsdp.save(tmp_path / "root", *model_of(1), step=1, keep_last=1)
    for stop_at in range(1000):
        root = tmp_path / f"at{stop_at}"
        shutil.copytree(tmp_path / "root", root)
        seen: list[str] = []

        def act(name: str, path: str, seen: list[str] = seen, end: int = stop_at) -> None:
            if name == "fsync":
                path = os.readlink(f"/proc/self/fd/{path}")
            seen.append(f"{name} {Path(path).name}")
            if len(seen) > end and (kind is Stop or len(seen) == end + 1):
                raise kind(28, "No space left on device", path)

        said = ""
        with monkeypatch.context() as patch, contextlib.suppress(Stop):
            file_operations(patch, act)
            try:
                graphfsdp.save(root, *model_of(2), step=2, keep_last=1)
            except graphfsdp.CheckpointError as error:
                said = str(error)
        if said:
            assert re.search(r"written: \S+: No space left on device.*untouched", said), said
            assert not [p for p in root.iterdir() if p.name.startswith(UNFINISHED)], seen[-1]
        assert loaded_step(root) in (1, 2), seen[-1]
        # The next save is not hindered by what is left.
        graphfsdp.save(root, *model_of(3), step=3, keep_last=1)
        assert loaded_step(root) == 3, seen[-1]
        assert sorted(p.name for p in root.iterdir()) == ["latest", "step-00000003"]
        if len(seen) <= stop_at:
            break
    assert stop_at >= 12
    assert [entry for entry in seen if entry.split()[0] in ("fsync", "rename", "replace")] == [
        "fsync objects-00000.json",
        "fsync data-00000-0.safetensors",
        "fsync manifest.json",
        "fsync .unfinished-step-00000002",
        "rename .unfinished-step-00000002",
        f"fsync {root.name}",
        "fsync latest.new",
        "replace latest.new",
        f"fsync {root.name}",
        "rename step-00000001",  # the one before goes
    ]


def test_what_the_disk_refuses_while_tensors_are_written_is_explained(tmp_path: Path) -> None:
    """There they are not written by Python."""
    resource = pytest.importorskip("resource")
    graphfsdp.save(tmp_path, *model_of(1), step=1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    model = nn.Linear(1000, 1000)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(graphfsdp.CheckpointError, match=r"File too large.*untouched"):
            graphfsdp.save(tmp_path, model, step=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert loaded_step(tmp_path) == 1


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << random.randrange(8)
    path.write_bytes(bytes(content))


@pytest.mark.parametrize(
    "name", ["data-00000-0.safetensors", "objects-00000.json", "manifest.json"]
)
@pytest.mark.parametrize("how", ["flipped", "cut", "longer", "gone", "swapped"])
def test_damage_is_found_and_named_before_anything_is_written(
    how: str, name: str, tmp_path: Path
) -> None:
    other_folder = graphfsdp.save(tmp_path, *model_of(1), step=1)
    torch.rand(1)  # so that the files of objects differ
    folder = graphfsdp.save(tmp_path, *model_of(2), step=2)
    path, content = folder / name, (folder / name).read_bytes()
    places = random.sample(range(len(content)), 25) if how == "flipped" else [0]
    for place in places:
        if how == "flipped":
            flip(path, place)
        elif how == "gone":
            path.unlink()
        elif how == "swapped":  # with that of another checkpoint, which has the same size
            shutil.copyfile(other_folder / name, path)
        else:
            path.write_bytes(content[:-5] if how == "cut" else content + b"x")
        other, its_optimizer = model_of(-1)
        with pytest.raises(graphfsdp.CheckpointError) as caught:
            graphfsdp.load(tmp_path, other, its_optimizer)
        if name != "manifest.json" or how not in ("gone", "longer", "swapped"):
            assert isinstance(caught.value, graphfsdp.CheckpointDamagedError), place
            assert name in str(caught.value)
        assert is_all(-1, other, its_optimizer), place
        path.write_bytes(content)
    shutil.rmtree(folder)
    (tmp_path / "latest").write_text("step-00000001")
    assert loaded_step(tmp_path) == 1  # the one before


def fail_on_one_rank(path: Path, act: str) -> str:
    model, optimizer = make(Setup("optim_grads_params"))
    train_plainly(model, optimizer, 1)
    folder = graphfsdp.save(path, model, optimizer, step=1)
    fsync = _no_space if dist.get_rank() == 1 and act == "save" else os.fsync
    if dist.get_rank() == 1 and act == "load":
        flip(folder / "data-00001-0.safetensors", -1)
    dist.barrier()
    train_plainly(model, optimizer, 1)
    before = digests(contents(model, optimizer))
    step = 2 if act == "save" else 1
    with (
        unittest.mock.patch.object(os, "fsync", fsync),
        pytest.raises(graphfsdp.CheckpointError) as caught,
    ):
        getattr(graphfsdp, act)(path, model, optimizer, step=step)
    assert digests(contents(model, optimizer)) == before
    if act == "save":
        graphfsdp.load(path, model, optimizer)  # the one before
        assert (path / "latest").read_text() == "step-00000001\n"
    return f"{caught.typename} {caught.value}"


def _no_space(handle: int) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("act", "begin", "reason"),
    [
        ("save", "CheckpointError rank 1: the checkpoint cannot be written", "No space left on"),
        ("load", "CheckpointDamagedError the checkpoint", "data-00001-0.safetensors"),
    ],
)
def test_what_fails_on_one_rank_fails_on_all(
    act: str, begin: str, reason: str, tmp_path: Path, ranks2: RankPool
) -> None:
    first, second = ranks2.run(fail_on_one_rank, tmp_path, act)
    assert first == second
    assert first.startswith(begin)
    assert reason in first
