"""Pools of processes that are started once per session and run functions as ranks of a group.

Importing torch takes longer than most tests, so the processes stay. A test hands a pool a
function that lives at module level; every rank calls it with the same arguments, and the results
come back in rank order. What a rank prints or raises comes back too. A pool that failed or hung
is thrown away, and the next call starts a new one, so no test inherits a broken process group.
"""

import contextlib
import datetime
import faulthandler
import functools
import gc
import inspect
import multiprocessing
import multiprocessing.connection
import multiprocessing.context
import os
import pathlib
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from time_limits import Limit, until

GROUP_TIMEOUT_S = 3600  # nobody may have to wait for it: a pool's limits are over before
GRACE_S = 2  # for the other ranks after one has failed: some wait for it in a collective
START_LIMIT_S = 90
BACKEND_VARIABLE = "GRAPHFSDP_TEST_RANKS"  # "nccl": pools that are gloo's otherwise
PRELOADED = ("torch", "torch._dynamo", "torch.distributed.tensor", "pytest", "graphfsdp")


def fork_server() -> multiprocessing.context.ForkServerContext:
    """Return how to fork from one process that imports torch and does nothing else."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


class RankError(AssertionError):
    """A function failed on a rank, or did not end."""


@dataclass(frozen=True)
class _Answer:
    """What a rank sends back."""

    failure: str | None
    result: Any = None


@dataclass
class _Worker:
    process: multiprocessing.process.BaseProcess
    connection: multiprocessing.connection.Connection
    stack_file: pathlib.Path


class RankPool:
    """The ranks of one process group, as processes that wait for functions."""

    def __init__(self, num_ranks: int, device_type: str = "cpu", *, joins: bool = True) -> None:
        """Prepare.

        Args:
            num_ranks: How many processes there are.
            device_type: What they compute on.
            joins: They make a process group. Otherwise they are what a launcher starts:
                processes without a group that find their rank in the environment.
        """
        self.num_ranks = num_ranks
        self.device_type = device_type
        self.joins = joins
        self._workers: list[_Worker] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, function: Callable[..., Any], *args: Any, limit_s: float = 60.0) -> list[Any]:
        """Call ``function(*args)`` on every rank.

        Args:
            function: Lives at module level; it may use the default process group.
            *args: What can be pickled.
            limit_s: After so many seconds of an idle machine the ranks are ended; three times
                that on GPUs.

        Returns:
            One result per rank.

        Raises:
            RankError: it failed on some rank, or did not end on some rank.
        """
        self._start()
        limit_s *= 3 if self.device_type == "cuda" else 1  # each kernel is a call of Python there
        payload = pickle.dumps((function, args))
        try:
            for worker in self._workers:
                worker.connection.send_bytes(payload)
            answers = self._collect(limit_s)
        except BaseException:
            self.close(force=True)
            raise
        if all(answer is not None and answer.failure is None for answer in answers):
            return [answer.result for answer in answers if answer is not None]
        stacks = self._stacks([rank for rank, answer in enumerate(answers) if answer is None])
        self.close(force=True)
        raise RankError(_describe(answers, stacks, limit_s))

    def close(self, *, force: bool = False) -> None:
        """End the processes.

        Args:
            force: Kill them; otherwise they leave the process group in peace.
        """
        for worker in self._workers:
            worker.connection.close()
        for worker in self._workers:
            if not force:
                worker.process.join(10)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
        self._workers = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _start(self) -> None:
        if self._workers:
            return
        self._folder = tempfile.TemporaryDirectory()
        folder = pathlib.Path(self._folder.name)
        context = fork_server()
        for rank in range(self.num_ranks):
            ours, theirs = context.Pipe()
            stack_file = folder / f"stack{rank}"
            if self.joins:
                begin = functools.partial(
                    _join, rank, self.num_ranks, self.device_type, str(folder)
                )
            else:
                begin = functools.partial(_take_place, rank, self.num_ranks)
            process = context.Process(target=_serve, args=(begin, stack_file, theirs), daemon=True)
            process.start()
            theirs.close()
            self._workers.append(_Worker(process, ours, stack_file))
        answers = self._collect(START_LIMIT_S)
        if any(answer is None or answer.failure for answer in answers):
            self.close(force=True)
            raise RankError(_describe(answers, {}, START_LIMIT_S))

    def _collect(self, limit_s: float) -> list[_Answer | None]:
        """Wait for one answer of each rank; None for those that sent none in time."""
        answers: list[_Answer | None] = [None] * len(self._workers)
        waiting = {worker.connection: rank for rank, worker in enumerate(self._workers)}
        limit, has_failed = Limit(limit_s), False
        while waiting and (left_s := limit.left_s()):
            for ready in multiprocessing.connection.wait(list(waiting), left_s):
                assert isinstance(ready, multiprocessing.connection.Connection)
                rank = waiting.pop(ready)
                try:
                    answer = pickle.loads(ready.recv_bytes())
                except (EOFError, ConnectionResetError):
                    self._workers[rank].process.join(10)
                    code = self._workers[rank].process.exitcode
                    answer = _Answer(f"the process ended with exit code {code}")
                answers[rank] = answer
                if answer.failure is not None and not has_failed:
                    limit, has_failed = Limit(GRACE_S), True
        return answers

    def _stacks(self, ranks: list[int]) -> dict[int, str]:
        """Return where each of these ranks is now."""
        for rank in ranks:
            pid = self._workers[rank].process.pid
            if pid is not None and self._workers[rank].process.is_alive():
                os.kill(pid, signal.SIGUSR1)
        files = {rank: self._workers[rank].stack_file for rank in ranks}
        if ranks:
            until(lambda: all(file.stat().st_size for file in files.values()), 5)
            time.sleep(0.5)  # they are written line by line
        return {rank: file.read_text() for rank, file in files.items()}


def _describe(answers: list[_Answer | None], stacks: dict[int, str], limit_s: float) -> str:
    parts = []
    for rank, answer in enumerate(answers):
        if answer is None:
            stack = stacks.get(rank, "")
            parts.append(f"rank {rank} did not end (limit {limit_s:g} s); it is at\n{stack}")
        elif answer.failure is not None:
            parts.append(f"rank {rank} failed:\n{answer.failure}")
        else:
            parts.append(f"rank {rank} succeeded")
    return "\n".join(parts)


@contextlib.contextmanager
def lost_pool(num_ranks: int) -> Iterator[RankPool]:
    """A pool of one's own, whose ranks or groups nobody can use afterwards."""
    pool = RankPool(num_ranks)
    try:
        yield pool
    finally:
        pool.close(force=True)


def rank_device() -> torch.device:
    """Return the device of the rank that this process is."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def world_group() -> dist.ProcessGroup:
    found = dist.group.WORLD
    assert found is not None
    return found


def _serve(
    begin: Callable[[], None],
    stack_path: pathlib.Path,
    connection: multiprocessing.connection.Connection,
) -> None:
    """Be a rank: answer calls until the pool closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to everybody
    with stack_path.open("w") as stack_file:
        faulthandler.register(signal.SIGUSR1, stack_file, all_threads=True)
        connection.send_bytes(pickle.dumps(_attempt(begin)))
        while True:
            try:
                payload = connection.recv_bytes()
            except (EOFError, OSError):
                break
            connection.send_bytes(_answer(payload))
        if dist.is_initialized():
            dist.destroy_process_group()


def _take_place(rank: int, num_ranks: int) -> None:
    torch.set_num_threads(1)
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks}
    places["LOCAL_WORLD_SIZE"] = num_ranks
    os.environ.update({name: str(value) for name, value in places.items()})
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}


def _join(rank: int, num_ranks: int, device_type: str, folder: str) -> None:
    torch.set_num_threads(1)
    options: dict[str, Any] = {}
    if device_type == "cuda":
        torch.cuda.set_device(rank)
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        options = {"device_id": torch.device("cuda", rank)}
    dist.init_process_group(
        "nccl" if device_type == "cuda" else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=num_ranks,
        timeout=datetime.timedelta(seconds=GROUP_TIMEOUT_S),
        **options,
    )


def _answer(payload: bytes) -> bytes:
    def call() -> Any:
        function, args = pickle.loads(payload)
        torch.manual_seed(0)
        return function(*args)

    answer = _attempt(call)
    gc.freeze()  # each capture collects garbage; what is here now is none
    try:
        return pickle.dumps(answer)
    except Exception:
        return pickle.dumps(_Answer(f"the result cannot be sent:\n{traceback.format_exc()}"))


def _attempt(function: Callable[..., Any], *args: Any) -> _Answer:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            # torch 2.15 tells of what selective checkpoints inside units will do one day.
            warnings.filterwarnings("ignore", "A saved_tensors_hooks context")
            return _Answer(None, function(*args))
    except BaseException:
        text = traceback.format_exc()
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        return _Answer(text)


def _session(num_ranks: int, device_type: str = "cpu", *, joins: bool = True) -> Iterator[RankPool]:
    pool = RankPool(num_ranks, device_type, joins=joins)
    yield pool
    pool.close()


def chosen_device() -> str:
    """Return what ranks of pools compute on that run on gloo unless somebody wants NCCL."""
    return "cuda" if os.environ.get(BACKEND_VARIABLE) == "nccl" else "cpu"


@pytest.fixture(scope="session")
def ranks1() -> Iterator[RankPool]:
    yield from _session(1, chosen_device())


@pytest.fixture(scope="session")
def ranks2() -> Iterator[RankPool]:
    yield from _session(2, chosen_device())


@pytest.fixture(scope="session")
def ranks4() -> Iterator[RankPool]:
    yield from _session(4, chosen_device())


@pytest.fixture(scope="session")
def launched2() -> Iterator[RankPool]:
    """Two processes as a launcher starts them; what they run makes a process group itself."""
    yield from _session(2, joins=False)


@pytest.fixture(scope="session")
def gpu_ranks() -> Iterator[RankPool]:
    """One NCCL rank per GPU, two at most; for tests that are marked ``gpu``."""
    yield from _session(min(2, torch.cuda.device_count()), "cuda")


@pytest.fixture(scope="session")
def gpu_ranks4() -> Iterator[RankPool]:
    if torch.cuda.device_count() < 4:
        pytest.skip("needs four GPUs")
    yield from _session(4, "cuda")


def on_ranks(fixture: str = "") -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Make a test of a function that every rank of a pool runs, and that checks by itself.

    Without a name of a pool, each row of the test's table begins with one, as ``ranks``.
    """

    def decorate(body: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(request: pytest.FixtureRequest, **arguments: Any) -> None:
            pool = fixture or arguments.pop("ranks")
            request.getfixturevalue(pool).run(_run_body, test, arguments)

        names = ["request"] if fixture else ["request", "ranks"]
        wanted = [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names
        ]
        own = inspect.signature(body).parameters.values()
        test.pool = fixture  # type: ignore[attr-defined]
        test.__signature__ = inspect.Signature([*wanted, *own])  # type: ignore[attr-defined]
        return test

    return decorate


def _run_body(test: Any, arguments: dict[str, Any]) -> None:
    try:
        test.__wrapped__(**arguments)
    finally:
        # A rank has a copy of the fixture, which nobody else undoes: the process stays.
        for argument in arguments.values():
            if isinstance(argument, pytest.MonkeyPatch):
                argument.undo()
