"""What of CUDA's captures needs no driver: which operator made which node; what errors mean."""

from array import array
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from cpu_recording import CPU
from graphfsdp._capture.cuda.errors import explain, find_capture_error
from graphfsdp._capture.cuda.recorder import CudaRecorder
from graphfsdp._capture.trace.program_facts import NodeFacts, ProgramFacts, Role
from graphfsdp.errors import CaptureError
from helpers import OpNames

GRAPH, STREAM = 77, 5


class PlayedDriver:
    """A driver whose graph grows by what is put into it.

    Attributes:
        num_listed: Nodes that were listed so far, each as often as it was.
        turn: How far the list of its nodes is turned round, which is for the driver to choose.
        made: What operators launch, others than by their names.
        ordered: Names of nodes that were made to wait for each other; None refuses that.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.turn = 0
        self.num_listed = 0
        self.made = {"copy_": ["memcpy"], "mm": ["memset", "kernel gemm"], "t": [], "detach": []}
        self.ordered: list[tuple[str, str]] | None = []

    def capturing_graph(self, stream: int) -> int | None:
        return GRAPH if stream == STREAM else None

    def count(self, graph: int) -> int | None:
        assert graph == GRAPH
        return len(self.names)

    def nodes(self, graph: int) -> "array[int] | None":
        assert graph == GRAPH
        self.num_listed += len(self.names)
        handles = array("Q", range(len(self.names)))
        return handles[self.turn :] + handles[: self.turn]

    def name(self, node: int) -> str:
        return self.names[node]

    def new_stream(self) -> int | None:
        return None

    def order(self, graph: int, earlier: int, later: int) -> bool:
        assert graph == GRAPH
        if self.ordered is None:
            return False
        self.ordered.append((self.names[earlier], self.names[later]))
        return True


class Kernels(OpNames):
    """Below the recorder: each operator launches kernels, as on a GPU."""

    def __init__(self, driver: PlayedDriver) -> None:
        super().__init__()
        self._driver = driver

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func._schema.name.removeprefix("aten::")
        self._driver.names += self._driver.made.get(name, [f"kernel {name}"])
        return func(*args, **(kwargs or {}))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x).tanh()).sum()
        return out


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> PlayedDriver:
    class Stream:
        cuda_stream = STREAM

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream())
    return PlayedDriver()


def capture(
    driver: PlayedDriver | None,
    after: tuple[str, ...] = (),
    run: Callable[[Model, Tensor], Tensor] | None = None,
) -> ProgramFacts:
    """Record a forward and a backward pass, or what is to run in their place."""
    model, x = Model(), torch.ones(2, 4)
    recorder = CudaRecorder(model, CPU, driver)  # type: ignore[arg-type] # which is played
    with Kernels(driver or PlayedDriver()), recorder.watching():
        loss = model(x) if run is None else run(model, x)
        if run is None:
            loss.backward()
        result = loss.detach().clone()
        del loss
    if driver is not None:
        driver.names += after
    return recorder.describe([result], GRAPH)


def kernels_of(nodes: list[NodeFacts], op: str) -> list[tuple[str, ...]]:
    return [node.kernels for node in nodes if node.op.startswith(f"aten.{op}.")]


def exchanging(model: Model, x: Tensor) -> Tensor:
    out: Tensor = torch.ops._c10d_functional.wait_tensor(model(x))
    return out


def test_a_long_capture_lists_each_node_a_few_times_and_attributes_it(played: PlayedDriver) -> None:
    num_operators = 3000

    def run(model: Model, x: Tensor) -> Tensor:
        for _ in range(num_operators):
            x = x.tanh()
        return x.sum()

    nodes = list(capture(played, run=run).nodes)
    assert kernels_of(nodes, "tanh") == [("kernel tanh",)] * num_operators
    # 256 * 257 / 2 at the beginning, then a geometric series
    assert played.num_listed < 33_000 + 8 * num_operators


@pytest.mark.parametrize("turn", [0, 1, 3])
def test_each_node_of_the_graph_belongs_to_the_operator_that_made_it(
    played: PlayedDriver, turn: int
) -> None:
    played.turn = turn
    nodes = list(capture(played).nodes)
    assert [sorted(kernels) for kernels in kernels_of(nodes, "mm")] == [
        ["kernel gemm", "memset"]
    ] * 5
    assert set(kernels_of(nodes, "t")) == {()}
    assert kernels_of(nodes, "tanh_backward") == [("kernel tanh_backward",)]
    made = [kernel for node in nodes for kernel in node.kernels]
    assert made == played.names if turn == 0 else sorted(made) == sorted(played.names)
    modules = [node.site.module for node in nodes if node.op == "aten.mm.default"]
    assert modules == ["first", "second", "second", "second", "first"]
    # Nodes that no operator made are told apart.
    last = list(capture(played, after=("kernel stray",)).nodes)[-1]
    assert last.op == "(no operator)"
    assert last.kernels == ("kernel stray",)


@pytest.mark.parametrize("turn", [0, 1, 3])
def test_each_collective_waits_for_the_one_that_was_issued_before(
    played: PlayedDriver, turn: int
) -> None:
    played.turn = turn
    first, second, third = (f"kernel ncclDevKernel_{kind}" for kind in ("A", "B", "C"))
    played.made |= {"tanh": ["kernel tanh", first], "sum": [second], "tanh_backward": [third]}
    capture(played)
    assert played.ordered == [(first, second), (second, third)]
    # Those that nobody can put in order are refused.
    played.made |= {"mm": ["kernel ncclDevKernel_A"]}
    played.ordered = None
    with pytest.raises(CaptureError, match="cannot be put in one order"):
        capture(played)


def test_collectives_of_others_are_refused_where_kernels_have_no_names(
    played: PlayedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert capture(played, run=exchanging).nodes
    monkeypatch.setattr(played, "name", lambda node: "kernel")
    assert capture(played).nodes
    with pytest.raises(CaptureError, match="R545") as caught:
        capture(played, run=exchanging)
    assert caught.value.op == "_c10d_functional.wait_tensor.default"


def test_without_a_driver_operators_are_noted_all_the_same() -> None:
    program = capture(None)
    assert {node.kernels for node in program.nodes} == {()}
    assert len(program.nodes) > 10
    roles = [buffer.role for buffer in program.buffers]
    assert roles.count(Role.OUTPUT) == 1
    assert roles.count(Role.OTHER) == 3  # the batch and two weights


# cudaGetErrorString of CUDA 13.0, and the name that torch adds in newer releases.
MESSAGES = {
    900: ("cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"),
    901: (
        "cudaErrorStreamCaptureInvalidated",
        "operation failed due to a previous error during capture",
    ),
    902: (
        "cudaErrorStreamCaptureMerge",
        "operation would result in a merge of two independent capture sequences",
    ),
    903: ("cudaErrorStreamCaptureUnmatched", "capture was not initiated in this stream"),
    904: ("cudaErrorStreamCaptureUnjoined", "capturing stream has unjoined work"),
    905: (
        "cudaErrorStreamCaptureIsolation",
        "dependency created on uncaptured work in another stream",
    ),
    906: (
        "cudaErrorStreamCaptureImplicit",
        "operation would make the legacy stream depend on a capturing blocking stream: "
        "disallowed implicit dependency",
    ),
    907: (
        "cudaErrorCapturedEvent",
        "operation not permitted on an event last recorded in a capturing stream",
    ),
    908: (
        "cudaErrorStreamCaptureWrongThread",
        "attempted to terminate a thread-local capture sequence from another thread",
    ),
}


@pytest.mark.parametrize("who", ["Triton Error [CUDA]", "CUDA driver error"])
def test_the_first_launch_of_a_kernel_is_told_from_a_host_read(who: str) -> None:
    error = find_capture_error(f"{who}: {MESSAGES[900][1]}")
    assert error is not None
    assert error.code == 900
    assert "launched for the first time" in str(error)
    assert "warmup_steps" in str(error)


@pytest.mark.parametrize("code", MESSAGES)
def test_every_code_is_found_by_name_by_text_and_by_number(code: int) -> None:
    name, text = MESSAGES[code]
    for message in (
        f"CUDA error: {text}\nSearch for `{name}' in https://docs.nvidia.com for details.",
        f"CUDA error: {text}",
        f"AcceleratorError: CUDA error: {name}",
        f"CUDA error {code} in a driver call",
        f"CUDA error: ({code}) something",
    ):
        found = find_capture_error(message)
        assert found is not None, message
        assert found.code == code, message
        assert found.name == name
        assert f"CUDA error {code} ({name}): " in str(found)
        assert "Remedy: " in str(found)


@pytest.mark.parametrize(
    "message",
    ["", "CUDA error: out of memory", "CUDA error 700: illegal address", "found 900 tokens"],
)
def test_other_errors_are_left_alone(message: str) -> None:
    assert explain(RuntimeError(message)) is None


def chain(*messages: str) -> RuntimeError:
    """Return the last of several errors, each raised while the one before was handled."""
    previous: RuntimeError | None = None
    for message in messages:
        error = RuntimeError(message)
        error.__context__ = previous
        previous = error
    assert previous is not None
    return previous


def of_a_cause() -> RuntimeError:
    error = RuntimeError("capture failed")
    error.__cause__ = RuntimeError("CUDA error: cudaErrorStreamCaptureUnjoined")
    error.__context__ = RuntimeError("CUDA error: cudaErrorStreamCaptureMerge")
    return error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        # Ending a capture that an illegal call broke raises 901, which tells nobody anything.
        (chain(f"CUDA error: {MESSAGES[900][1]}", f"CUDA error: {MESSAGES[901][1]}"), 900),
        (chain("shapes differ", f"CUDA error: {MESSAGES[901][1]}", "and so on"), 901),
        (of_a_cause(), 904),
    ],
    ids=["the first one", "among other errors", "a cause before a context"],
)
def test_what_happened_is_found_in_a_chain_of_errors(error: RuntimeError, code: int) -> None:
    found = explain(error)
    assert found is not None
    assert found.code == code
