"""Whatever happens during a save, the checkpoints before it are there; damage is named.

And saves in the background: what happens there meanwhile is training.
"""

import contextlib
import os
import random
import re
import shutil
import signal
import tempfile
import threading
import time
import unittest.mock
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import graphfsdp
from checkpoint_helpers import Holding, Setup, contents, digests, make, train_plainly
from cuda_stand_in import library
from cuda_stand_in.orders import chosen
from forked_programs import forked
from graphfsdp.optim import FusedAdam
from ranks import on_ranks
from time_limits import until

NUM_KILLS = 52
UNFINISHED = ".unfinished-"


@pytest.fixture
def fast_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory if there is one: a kill takes nothing from the system's cache either."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


def model_of(step: int) -> tuple[nn.Module, FusedAdam]:
    """Return a model whose every number says which step it is of."""
    model = nn.Linear(64, 32)
    optimizer = FusedAdam(model.parameters(), lr=0.1)
    model(torch.zeros(1, 64)).sum().backward()
    optimizer.step()
    with torch.no_grad():
        for tensor in numbers(model, optimizer):
            tensor.fill_(step)
    return model, optimizer


def numbers(model: nn.Module, optimizer: FusedAdam) -> list[Tensor]:
    states = [state for param in optimizer.state.values() for state in param.values()]
    return [*model.parameters(), *states]


def is_all(step: int, model: nn.Module, optimizer: FusedAdam) -> bool:
    return all(bool((tensor == step).all()) for tensor in numbers(model, optimizer))


def loaded_step(root: Path) -> int:
    """Load the latest checkpoint and check that it is all of one step."""
    model, optimizer = model_of(-1)
    step = graphfsdp.load(root, model, optimizer).step
    assert is_all(step, model, optimizer)
    return step


def kill_saves(root: Path, seed: int) -> None:
    """Kill a process that saves, again and again at random moments.

    It forks, so it runs in a process of its own: one thread, and everything imported before.
    """
    random.seed(seed)
    torch.set_num_threads(1)
    graphfsdp.save(root, *model_of(1), step=1)
    latest, step, advances, interrupted = root / "latest", 1, 0, 0
    for _ in range(NUM_KILLS):
        written_ns = latest.stat().st_mtime_ns
        child = os.fork()
        while child == 0:
            step += 1
            graphfsdp.save(root, *model_of(step), step=step, keep_last=2)
        until(lambda before=written_ns: latest.stat().st_mtime_ns != before, 30)  # type: ignore[misc]
        time.sleep(random.random() * 0.03)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        interrupted += any(path.name.startswith(UNFINISHED) for path in root.iterdir())
        now = loaded_step(root)
        assert now >= step, f"step {step} was complete, now {now} is the latest"
        advances += now > step
        step = now
    assert advances > NUM_KILLS // 2
    assert interrupted > 0  # some kills did fall into a save


def test_a_kill_at_any_moment_leaves_the_last_complete_checkpoint(fast_folder: Path) -> None:
    with forked(kill_saves, fast_folder, random.randrange(1000)) as process:
        done = process.ended()
    assert done.returncode == 0, done.stderr


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


@pytest.mark.parametrize("name", ["data-00000-0.safetensors", "manifest.json"])
@pytest.mark.parametrize("how", ["flipped", "cut", "longer", "gone", "swapped"])
def test_damage_is_found_and_named_before_anything_is_written(
    how: str, name: str, tmp_path: Path
) -> None:
    other_folder = graphfsdp.save(tmp_path, *model_of(1), step=1)
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


@pytest.mark.parametrize("text", ["[" * 100_000, '{"format": "", "version": Infinity}', "[]", "{"])
def test_a_manifest_of_somebody_else_is_damage(text: str, tmp_path: Path) -> None:
    manifest = graphfsdp.save(tmp_path, *model_of(1)) / "manifest.json"
    manifest.write_text(text)
    with pytest.raises(graphfsdp.CheckpointDamagedError, match=r"manifest\.json is damaged"):
        graphfsdp.load(tmp_path, *model_of(2))


def _no_space(handle: int) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("act", "kind", "words"),
    [
        (
            *("save", graphfsdp.CheckpointError),
            "(?s)^rank 1: the checkpoint cannot be written.*No space left on",
        ),
        (
            "load",
            graphfsdp.CheckpointDamagedError,
            r"(?s)^the checkpoint.*data-00001-0\.safetensors",
        ),
    ],
)
@on_ranks("ranks2")
def test_what_fails_on_one_rank_fails_on_all(
    act: str, kind: type[Exception], words: str, tmp_path: Path
) -> None:
    model, optimizer = make(Setup("optim_grads_params"))
    train_plainly(model, optimizer, 1)
    folder = graphfsdp.save(tmp_path, model, optimizer, step=1)
    fsync = _no_space if dist.get_rank() == 1 and act == "save" else os.fsync
    if dist.get_rank() == 1 and act == "load":
        flip(folder / "data-00001-0.safetensors", -1)
    dist.barrier()
    train_plainly(model, optimizer, 1)
    before = digests(contents(model, optimizer))
    with unittest.mock.patch.object(os, "fsync", fsync), pytest.raises(kind, match=words):
        getattr(graphfsdp, act)(tmp_path, model, optimizer, step=2 if act == "save" else 1)
    assert digests(contents(model, optimizer)) == before
    if act == "save":
        graphfsdp.load(tmp_path, model, optimizer)  # the one before
        assert (tmp_path / "latest").read_text() == "step-00000001\n"


def test_training_goes_on_while_one_moment_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write, original = threading.Event(), os.fsync

    def wait_then_sync(handle: Any) -> None:
        assert may_write.wait(60)
        original(handle)

    monkeypatch.setattr(os, "fsync", wait_then_sync)
    model, optimizer = model_of(1)
    with graphfsdp.AsyncSaver() as saver:
        saver.save(tmp_path, model, optimizer, step=1, rng=False)
        assert saver.is_saving
        for _ in range(5):  # the state is another one long before it is written
            optimizer.zero_grad()
            model(torch.randn(3, 64)).square().sum().backward()
            optimizer.step()
        assert saver.is_saving
        assert not (tmp_path / "latest").exists()
        may_write.set()
        assert saver.wait() == tmp_path / "step-00000001"
        memory = {tensor.data_ptr() for tensor in saver._memory.values()}
        saver.save(tmp_path, model, optimizer, step=2, rng=False)
        assert {tensor.data_ptr() for tensor in saver._memory.values()} == memory
    other, its_optimizer = model_of(-1)
    graphfsdp.load(tmp_path, other, its_optimizer, step=1)
    assert is_all(1, other, its_optimizer)
    graphfsdp.load(tmp_path, other, its_optimizer)
    pairs = zip(numbers(model, optimizer), numbers(other, its_optimizer), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.multi_gpu
@pytest.mark.gpu
def test_a_copy_is_complete_whichever_device_is_current(tmp_path: Path) -> None:
    model = nn.Linear(64, 64, device="cuda:1")
    assert torch.cuda.current_device() != 1
    # Above the stand-in nothing runs before something waits for it, as on a busy GPU.
    with (
        chosen(streams=3) if library.is_below() else contextlib.nullcontext(),
        graphfsdp.AsyncSaver() as saver,
    ):
        for number in range(10):
            for param in model.parameters():
                param.data.fill_(number)
            saver.save(tmp_path, model, rng=False)
            found = torch.cat([each.flatten() for each in saver._memory.values()])
            assert (found == number).all()


def test_a_failure_in_the_background_is_raised_by_who_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = model_of(1)
    graphfsdp.save(tmp_path, model, step=1)
    saver = graphfsdp.AsyncSaver()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", _no_space)
        saver.save(tmp_path, model, optimizer, step=2)
        with pytest.raises(graphfsdp.CheckpointError, match="No space left on device"):
            saver.wait()
    saver.save(tmp_path, model, optimizer, step=3)
    saver.close()
    with pytest.raises(graphfsdp.CheckpointError, match="was closed"):
        saver.save(tmp_path, model, optimizer)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "latest",
        "step-00000001",
        "step-00000003",
    ]


@on_ranks("ranks2")
def test_ranks_save_in_the_background_while_they_train(tmp_path: Path) -> None:
    model, optimizer = make(Setup("optim_grads_params", "bf16"))
    train_plainly(model, optimizer, 2)
    expected = digests(contents(model, optimizer))
    with graphfsdp.AsyncSaver() as saver:
        saver.save(tmp_path, model, optimizer, step=2)
        train_plainly(model, optimizer, 3)  # collectives of its own, at the same time
        saver.save(tmp_path, model, optimizer, step=5)
        train_plainly(model, optimizer, 1)
    assert dist.is_initialized()
    graphfsdp.load(tmp_path, model, optimizer, step=2)
    assert digests(contents(model, optimizer)) == expected


class Faulty(Holding):
    def state_dict(self) -> dict[Any, Any]:
        raise ValueError("no state at the moment")


@on_ranks("ranks2")
def test_an_object_that_fails_on_one_rank_ends_the_save_on_all(tmp_path: Path) -> None:
    model, optimizer = make(Setup("optim_grads_params"))
    objects = {"position": (Faulty if dist.get_rank() else Holding)({})}
    expected, match = (
        (ValueError, "^no state at the moment")
        if dist.get_rank()
        else (graphfsdp.CheckpointError, "rank 1: ValueError: no state at the moment")
    )
    with pytest.raises(expected, match=match):
        graphfsdp.save(tmp_path, model, optimizer, objects=objects)
    with (
        graphfsdp.AsyncSaver() as saver,
        pytest.raises(expected, match=match),
    ):
        saver.save(tmp_path, model, optimizer, objects=objects)
    graphfsdp.save(tmp_path, model, optimizer)  # nobody is left waiting
