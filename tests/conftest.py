"""The `device` fixture, seeds, time limits, and what is skipped on a machine without a GPU."""

import contextlib
import faulthandler
import gc
import os
import random
import signal
import sys
import types
import zlib
from collections.abc import Generator, Iterator
from typing import Any

# Before torch is imported: child processes inherit the first, cuBLAS reads the second once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # or Triton 3.9 warns; our kernels choose

# Tests count replays, and calls of Python: audits have tests of their own, which ask for them.
os.environ.setdefault("GRAPHFSDP_AUDIT", "0")

import hypothesis
import numpy
import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from cuda_stand_in.cannot import reasons_of
from cuda_stand_in.library import is_below, take_races
from ranks import chosen_device, gpu_ranks, gpu_ranks4, launched2, ranks1, ranks2, ranks4  # noqa: F401  (fixtures)
from time_limits import Limit, slowdown

TIME_LIMIT_S = 120
POOLS = {"ranks1", "ranks2", "ranks4"}
SEED_VARIABLE = "GRAPHFSDP_TEST_SEED"

hypothesis.settings.register_profile(
    "graphfsdp",
    deadline=None,  # a shared machine stalls; the time limit of a test is below
    max_examples=25,
    derandomize=False,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile(
    "ci", hypothesis.settings.get_profile("graphfsdp"), derandomize=True
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "graphfsdp"))


class TimeLimitError(BaseException):
    """A test ran too long.

    Not an Exception: code under test that catches Exception must not swallow it, and hypothesis
    must not take it for a failing example and run the test again and again to shrink it.
    """


def pytest_configure(config: pytest.Config) -> None:
    # Threads split sums differently, and the tests ask for equal bits on machines of all sizes.
    torch.set_num_threads(1)
    # A shell starts what runs in the background deaf to Ctrl-C, and tests press it.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # While tests run, pytest holds file descriptor 2; here it still is the terminal.
    config.stash[_TERMINAL] = os.dup(2)


def pytest_unconfigure() -> None:
    gc.unfreeze()  # extension modules complain about what is not collected at the end


_TERMINAL = pytest.StashKey[int]()


def _fixtures_of(item: Any) -> set[str]:
    return {*getattr(item, "fixturenames", ()), getattr(item.function, "pool", "")}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if chosen_device() == "cuda":
        items[:] = [item for item in items if POOLS & _fixtures_of(item)]
    for item in items:
        for marker, needed in (("gpu", 1), ("multi_gpu", 2)):
            if item.get_closest_marker(marker) and num_devices < needed:
                reason = f"needs {needed} CUDA device(s), this machine has {num_devices}"
                item.add_marker(pytest.mark.skip(reason=reason))
        if item.get_closest_marker("gpu") and is_below():
            for reason in reasons_of(item.nodeid):
                item.add_marker(pytest.mark.skip(reason=f"above the stand-in: {reason}"))
    # What only a GPU can tell comes first, so that a run that is cut short has told it.
    items.sort(key=lambda item: num_devices > 0 and not item.get_closest_marker("gpu"))


_DEVICES = [pytest.param("cpu", id="cpu")]
if torch.cuda.is_available():
    _DEVICES.append(pytest.param("cuda", id="cuda", marks=pytest.mark.gpu))


@pytest.fixture(scope="session", params=_DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    """The CPU always, and the GPU where there is one."""
    return torch.device(request.param)


def _seed_of(item: pytest.Item) -> int:
    base = int(os.environ.get(SEED_VARIABLE, "0"))
    return zlib.crc32(item.nodeid.encode()) ^ base


@pytest.fixture(autouse=True)
def _fixed_seed(request: pytest.FixtureRequest) -> Iterator[None]:
    """Give each test its own fixed seed, and the next one the generators as they were."""
    seed = _seed_of(request.node)
    python_state, numpy_state = random.getstate(), numpy.random.get_state()
    cpu_state = torch.get_rng_state()
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    yield
    random.setstate(python_state)
    numpy.random.set_state(numpy_state)
    torch.set_rng_state(cpu_state)


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    """Let no test know what others have compiled: it changes what counts as read by a module."""
    places = (("torch._dynamo.utils", "counters"), ("torch._dynamo.eval_frame", "cached_backends"))
    notes: list[Any] = [getattr(sys.modules.get(name), key, {}) for name, key in places]
    before = [dict(each) for each in notes]
    for each in notes:
        each.clear()
    yield
    for each, was in zip(notes, before, strict=True):
        each.clear()
        each.update(was)


@pytest.fixture(autouse=True)
def _no_modes_left() -> Iterator[None]:
    """Let the test fail that left a mode on, and not those that run behind it."""
    yield
    left: list[object] = []
    while (dispatch := _get_current_dispatch_mode()) is not None:
        dispatch.__exit__(None, None, None)
        left.append(dispatch)
    while torch._C._len_torch_function_stack():
        left.append(torch.overrides._pop_mode())
    assert not left, left


@pytest.fixture(autouse=True)
def _quick_garbage_collection() -> Iterator[None]:
    """Leave what exists out of collections: each capture runs one, and imports left a lot."""
    gc.collect()  # what the last test left; quick, since all before it is frozen
    gc.freeze()
    yield
    is_on = gc.isenabled()
    gc.enable()
    assert is_on, "the collector was left off"


@pytest.fixture(autouse=True)
def _deterministic_kernels(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """On a GPU choose kernels that give equal bits twice, or replay could not equal eager."""
    on_gpu = request.node.get_closest_marker("gpu") is not None
    if on_gpu:
        # Filling every empty tensor would put kernels into the graph that users do not have.
        monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
        torch.use_deterministic_algorithms(True)
    yield
    if on_gpu:
        torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _no_races(request: pytest.FixtureRequest) -> Iterator[None]:
    """Above the stand-in: in no graph do two nodes touch the same memory at the same time."""
    yield
    if request.node.get_closest_marker("gpu") and is_below():
        races = take_races()
        assert not races, races


@contextlib.contextmanager
def _time_limit(item: pytest.Item) -> Iterator[None]:
    marker = item.get_closest_marker("time_limit")
    seconds = float(marker.args[0]) if marker else TIME_LIMIT_S
    seconds *= 3 if chosen_device() == "cuda" else 1

    limit = Limit(seconds)

    def wait(left_s: float) -> None:
        signal.setitimer(signal.ITIMER_REAL, left_s)
        # A signal handler cannot interrupt C code that hangs: then show every stack and end.
        last_s = left_s + 60 * slowdown()
        faulthandler.dump_traceback_later(last_s, exit=True, file=item.config.stash[_TERMINAL])

    def stop(signum: int, frame: types.FrameType | None) -> None:
        left_s = limit.left_s()
        if not left_s:
            raise TimeLimitError(f"{item.nodeid} ran longer than {seconds:g} s of an idle machine")
        wait(left_s)

    previous = signal.signal(signal.SIGALRM, stop)
    wait(seconds)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    with _time_limit(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        base = os.environ.get(SEED_VARIABLE, "0")
        text = f"torch.manual_seed({_seed_of(item)}), from {SEED_VARIABLE}={base}"
        report.sections.append(("seed", text))
        if item.get_closest_marker("gpu"):
            _note_lost_device(item)
    return report


_LOST = pytest.StashKey[str]()


def _note_lost_device(item: pytest.Item) -> None:
    """After an illegal access, say, every later call of CUDA in this process fails as well."""
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        item.config.stash[_LOST] = f"CUDA is lost to this process since {item.nodeid}: {error}"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    lost = item.config.stash.get(_LOST, None)
    if lost is not None:
        # Here, since xdist would begin again with the test that failed. So it tells of a crash in
        # this one, which another process then runs.
        if "PYTEST_XDIST_WORKER" in os.environ:
            os._exit(1)
        pytest.exit(lost)
