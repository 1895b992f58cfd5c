"""Recordings as FX graphs, without a compiler: the graphs run as they are, so bits are eager's."""

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from graphfsdp.optim import FusedAdam
from helpers import Batch, Case, assert_same_state, check_against_eager, run, snapshot
from stand_in_compilers import (
    BOUNDS,
    Compiled,
    Compiler,
    RefusedError,
    StretchGraph,
    allowances,
    as_it_is,
    assert_within_a_third_of_the_bound,
    compiling,
    compiling_by,
    worker,
)
from zoo import ZOO, features
from zoo_models import WIDTH, Head, Squared

CPU = torch.device("cpu")
NUM_STEPS = 6
GRU = Case(lambda: Squared(Head(nn.GRU(5, 6, 2, batch_first=True))), features(4, 5))
CASES = {**ZOO, "gru": GRU}
MODELS = (
    *("mlp", "channels_last", "gpt", "mixture_of_experts", "lstm", "lstm_cells", "gru", "rotary"),
    *("odd_shapes", "parametrized", "moving_average", "in_place", "extras", "autocast"),
    *("encoder_layer", "embedding_bag", "norms", "float64"),
)


@pytest.fixture(autouse=True)
def _without_inductor() -> Iterator[None]:
    with compiling_by():
        yield


def lines_of(
    case: Case, compiler: Compiler = as_it_is, *, compiles: bool | str = True, **options: Any
) -> list[str]:
    """Compare compiled replays with eager bit for bit; return what the report says of pieces."""
    with compiling_by(compiler):
        trace = check_against_eager(case, CPU, compile=compiles, num_steps=NUM_STEPS, **options)
    return list(trace.report.compiled)


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        *((name, "fused_adam") for name in MODELS),
        *(("gpt", "adamw"), ("odd_shapes", "sgd"), ("float64", "adamw")),
    ],
)
def test_a_graph_computes_what_was_recorded(name: str, optimizer: str) -> None:
    lines = lines_of(CASES[name], optimizer=optimizer, microbatches=2, max_grad_norm=0.05)
    wrong = ("Error", "what was recorded", "something else")
    assert not [line for line in lines if any(word in line for word in wrong)]
    assert "in 0 pieces" not in lines[0]


def encoder_layer(dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=True, dtype=dtype)


def sequences(generator: torch.Generator) -> Batch:
    return Batch((torch.randn(2, 6, WIDTH, generator=generator),))


def test_short_attention_in_16_bits_goes_backward_in_float32() -> None:
    """As a graph that runs as it is, since no compiler takes a part in that."""
    computed: list[torch.dtype] = []

    def widened(graph: StretchGraph) -> Compiled:
        read = worker.Graph(graph.text.splitlines())
        read.widen()
        for node in read.module.graph.nodes:
            if "attention_for_cpu_backward" in str(node.target):
                computed.extend(each.kwargs["dtype"] for each in node.args[:5])
        return lambda inputs: list(read.module(*inputs))

    case = Case(
        lambda: Squared(encoder_layer(torch.bfloat16)),
        sequences,
        lambda model, x: model(x.bfloat16()),
    )
    expected = run(case, "none", CPU)
    with compiling_by(widened):
        got = run(case, "full_iteration", CPU, compile=True)
    assert computed == [torch.float32] * 5
    assert_within_a_third_of_the_bound(expected, got, BOUNDS[torch.bfloat16])
    assert " 0 pieces" not in got.report.compiled[0]


def test_equal_layers_are_compiled_once_and_random_numbers_cut_nothing() -> None:
    texts: list[str] = []

    def note(graph: StretchGraph) -> Compiled:
        texts.append(graph.text)
        return as_it_is(graph)

    def make() -> nn.Module:
        layer = [nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU(), nn.Dropout(0.2)]
        more = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH), nn.Softmax(1), nn.ELU()]
        torch.manual_seed(0)
        return Stacked(nn.Sequential(*map(copy.deepcopy, [*layer, *more])) for _ in range(6))

    first, *others = lines_of(Case(make, features(WIDTH)), note)
    num_pieces = int(first.split(" pieces")[0].split()[-1])
    assert len(set(texts)) == len(texts) <= num_pieces - 5
    assert [line for line in others if "ahead" in line or "draws" in line] == [
        "as today: aten.empty_strided.default makes memory ahead (6 times)",
        "as today: aten.bernoulli_.float draws random numbers (6 times)",
    ]


class Stacked(nn.Module):
    """Layers each of which has a say in the loss, so that each takes another part of a gradient."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        means = []
        for layer in self.layers:
            x = layer(x)
            means.append(x.square().mean())
        return x.square().mean() + torch.stack(means).square().sum()


class Padded(nn.Module):
    """Goes on with memory that is written in part, behind what is in no compiled piece."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh().sin()
        padded = x.new_empty(len(x), WIDTH + 5)
        padded[:, :WIDTH] = hidden.detach().cos().exp()
        weight = torch.ops.tests_compiled.doubled(padded)[:, :WIDTH]
        out: Tensor = self.last(hidden * weight).square().mean()
        return out


def test_memory_that_nobody_has_written_is_no_reason_to_drop_a_piece() -> None:
    num_runs = itertools.count(1)

    def makes_other_memory(graph: StretchGraph) -> Compiled:
        class Fills(torch.fx.Interpreter):
            def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
                result = super().call_function(target, args, kwargs)
                return result.fill_(next(num_runs)) if "empty" in str(target) else result

        return lambda inputs: list(Fills(nn.Module(), graph=graph._graph).run(*inputs))

    first, *others = lines_of(Case(Padded, features(WIDTH)), makes_other_memory)
    assert " 0 pieces" not in first
    assert not any("something else" in line for line in others), others


class Mixed(nn.Module):
    """Holds what no compiler is given: others' operators, complex numbers, draws, bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 3)
        self.generator = torch.Generator().manual_seed(5)
        self.register_buffer("state", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.ops.tests_compiled.doubled(self.first(x).tanh())
        with torch.no_grad():
            state = self.get_buffer("state").mul_(0.5).add_(hidden[0])
            state.view(torch.uint8)[WIDTH // 2 :].bitwise_and_(254)
        noise = torch.empty_like(hidden).normal_(generator=self.generator)
        turned = torch.view_as_complex(hidden.view(-1, WIDTH // 2, 2)) * (1 + 1j)
        kept = torch.bernoulli(hidden.detach().sigmoid())  # of numbers that the model computes
        hidden = torch.view_as_real(turned).flatten(1) * kept + 0.1 * noise
        out: Tensor = self.last(torch.nn.functional.gelu(hidden).sin()).exp().square().mean()
        return out, turned.conj()


@torch.library.custom_op("tests_compiled::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2


doubled.register_fake(torch.empty_like)
doubled.register_autograd(lambda context, grad: grad * 2)


def test_what_cannot_be_compiled_runs_as_recorded_and_is_named() -> None:
    first, *others = lines_of(Case(Mixed, features(WIDTH), lambda model, x: model(x)))
    assert " 0 pieces" not in first
    for name, reason in (
        ("tests_compiled.doubled.default", "is no operator of torch"),
        ("aten.view_as_complex.default", "computes with complex numbers"),
        ("aten.bernoulli.default", "draws random numbers"),
        ("aten.normal_.default", "draws random numbers"),
        ("graphfsdp.fused_adam_.default", "is one kernel already"),
    ):
        assert any(line.startswith(f"as today: {name} {reason}") for line in others), others


def raises(graph_or_inputs: object) -> Any:
    raise RuntimeError("no such luck")


def spoiled(spoil: Any) -> Compiler:
    def compile_graph(graph: StretchGraph) -> Compiled:
        function = as_it_is(graph)
        return lambda inputs: spoil(inputs, function(inputs))

    return compile_graph


def in_float64(graph: StretchGraph) -> Compiled:
    """Return what rounds otherwise than eager mode, as a compiler's sums do."""
    function = as_it_is(graph)

    def compute(inputs: list[Tensor]) -> list[Tensor]:
        wide = [each.double() if each.is_floating_point() else each for each in inputs]
        results = function(wide)
        for own, written in zip(inputs, wide, strict=True):
            own.copy_(written)
        return [each.float() if each.dtype == torch.float64 else each for each in results]

    return compute


def test_a_gradient_that_is_nothing_but_rounding_refuses_no_piece() -> None:
    """A bias before batch statistics has such a one; these are written before it is there."""

    def make() -> nn.Module:
        layers = [each for _ in range(6) for each in (nn.Linear(4, 4), nn.BatchNorm1d(4))]
        return Squared(nn.Sequential(*layers, nn.Linear(4, 2)))

    with compiling_by(in_float64):
        trace = run(Case(make, features(4)), "full_iteration", CPU, compile=True)
    assert not any("something else" in line for line in trace.report.compiled)
    assert "in 0 pieces" not in trace.report.compiled[0]
    # And of which an optimizer of many operators makes a whole step, all of which can be undone.
    model = Squared(nn.Linear(4, 4), nn.BatchNorm1d(4), *[nn.Tanh()] * 40, nn.Linear(4, 2))
    optimizer = torch.optim.Adagrad(model.parameters())
    with (
        compiling_by(in_float64),
        graphfsdp.capture(model, optimizer, compile=True, warmup_steps=1) as step,
    ):
        step(torch.randn(8, 4)), step(torch.randn(8, 4))
        assert not any("something else" in line for line in step.report().compiled)


def write_more(inputs: list[Tensor], results: list[Tensor]) -> list[Tensor]:
    torch._foreach_mul_([tensor for tensor in inputs if tensor.is_floating_point()], 1.01)
    return results


def writes_wrong(graph: StretchGraph) -> Compiled:
    function = as_it_is(graph)

    def run(inputs: list[Tensor]) -> list[Tensor]:
        numbers = [tensor for tensor in inputs if tensor.is_floating_point()]
        before = [tensor.clone() for tensor in numbers]
        results = function(inputs)
        for old, new in zip(before, numbers, strict=True):
            new.add_(new - old)
        return results

    return run


WRONG: dict[str, tuple[Compiler, str]] = {
    "does not compile": (raises, "RuntimeError: no such luck"),
    "does not run": (lambda graph: raises, "RuntimeError: no such luck"),
    "is beyond the bound": (
        spoiled(lambda inputs, results: [each * 1.001 for each in results]),
        "it computes something else, by",
    ),
    "is NaN": (
        spoiled(lambda inputs, results: [each * float("nan") for each in results]),
        "it computes something else, by nan",
    ),
    "lacks a result": (spoiled(lambda inputs, results: results[1:]), "it returns other tensors"),
    "has other strides": (
        spoiled(lambda inputs, results: [torch.stack([r, r], -1)[..., 0] for r in results]),
        "a result has other strides",
    ),
    "writes what it reads": (spoiled(write_more), "it writes what was only read"),
    "writes wrong numbers": (writes_wrong, "it computes something else"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_piece_is_found_and_does_not_run(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It was tried on numbers that are put back, so training is eager's, bit for bit."""
    compiler, reason = WRONG[what]
    first, *others = lines_of(ZOO["extras"], compiler)
    assert "0 of" in first
    assert any(reason in line for line in others)
    assert reason in caplog.text


def every_other(first: int) -> Compiler:
    count = itertools.count(first)
    return lambda graph: raises(graph) if next(count) % 2 else as_it_is(graph)


def refuses_relu(graph: StretchGraph) -> Compiled:
    relu = torch.ops.aten.relu.default
    why = {at: "is refused" for at, node in enumerate(graph.nodes) if node.op is relu}
    if why:
        raise RefusedError(why)
    return as_it_is(graph)


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        (every_other(0), "RuntimeError"),
        (every_other(1), "RuntimeError"),
        (refuses_relu, "aten.relu.default is refused"),
    ],
)
def test_pieces_between_those_that_fail_hand_on_what_these_look_at(
    compiler: Compiler, reason: str
) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return Stacked(encoder_layer() for _ in range(4))

    first, *others = lines_of(Case(make, sequences), compiler)
    assert " 0 pieces" not in first
    assert any(line.startswith(f"as today: {reason}") for line in others), others


def test_a_compilation_that_is_ended_leaves_the_step_as_recorded() -> None:
    def ends(graph: StretchGraph) -> Compiled:
        raise KeyboardInterrupt

    states = []
    for options in ({"scope": "none"}, {"compile": True}):
        torch.manual_seed(0)
        model = Squared(nn.Linear(WIDTH, 16), nn.Dropout(0.2), nn.Tanh())
        optimizer = FusedAdam(model.parameters(), lr=1e-2)
        with (
            compiling_by(ends),
            graphfsdp.capture(model, optimizer, warmup_steps=1, **options) as step,
        ):
            for index in range(5):
                is_compiled = index == 1 and "compile" in options
                with pytest.raises(KeyboardInterrupt) if is_compiled else nullcontext():
                    step(torch.randn(4, WIDTH))
            assert "scope" in options or "did not end" in str(step.report())
        states.append(snapshot(model, optimizer))
    assert_same_state(states[0], states[1])


@pytest.mark.parametrize("compiles", [True, "auto"])
@pytest.mark.parametrize("make", [FusedAdam, partial(torch.optim.AdamW, fused=True)])
def test_a_trial_copies_neither_weights_nor_optimizer_state(
    make: Callable[..., torch.optim.Optimizer],
    compiles: bool | str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copied: list[int] = []
    undone = compiling._undone

    def counting(written: Sequence[Tensor], generators: Sequence[torch.Generator]) -> Any:
        copied.append(sum(tensor.nbytes for tensor in written))
        return undone(written, generators)

    monkeypatch.setattr(compiling, "_undone", counting)
    model = Squared(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, 64))
    with graphfsdp.capture(model, make(model.parameters()), compile=compiles) as step:
        for _ in range(5):
            step(torch.randn(4, WIDTH))
        if compiles is True:
            assert " 0 pieces" not in step.report().compiled[0]
    padding = 64 * len(list(model.parameters()))  # between gradients
    assert copied == [pytest.approx(sum(p.nbytes for p in model.parameters()), abs=padding)]


def test_auto_drops_what_is_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: 0.0, perf_counter_ns=partial(next, ticks))
    monkeypatch.setattr(compiling, "time", clock)

    def slow(inputs: list[Tensor], results: list[Tensor]) -> list[Tensor]:
        assert [next(ticks) for _ in range(1000)]  # it takes long
        return results

    lines = lines_of(ZOO["model_output"], spoiled(slow), compiles="auto")
    assert "as today: 1 pieces, which are no faster compiled" in lines
    assert "in 1 pieces" in lines_of(ZOO["model_output"], spoiled(slow))[0]


def test_auto_compiles_nothing_if_all_of_it_together_is_no_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raced: list[int] = []

    def pays(today: Sequence[int], compiled: Sequence[int]) -> bool:
        raced.append(len(compiled))
        return len(raced) == 1  # the only piece by itself

    monkeypatch.setattr(compiling, "_pays", pays)
    lines = lines_of(ZOO["model_output"], compiles="auto")
    assert raced == [7, 7]
    assert "as today: 1 pieces, which are no faster compiled" in lines


def test_a_replay_that_fails_is_undone_and_one_beyond_the_bound_is_found() -> None:
    gains: list[float] = []  # as if other kernels had rounded; none: no memory

    def brittle(inputs: list[Tensor], results: list[Tensor]) -> list[Tensor]:
        if not gains:
            raise MemoryError("no memory is left")
        return [each * gains[-1] for each in results]

    def loss_and_more(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        out = model(x)
        return out.square().mean(), torch.complex(out, out)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Tanh())
    optimizer = FusedAdam(model.parameters(), lr=1e-2)
    x = torch.randn(12, WIDTH)
    with (
        compiling_by(spoiled(brittle)),
        graphfsdp.capture(model, optimizer, loss_fn=loss_and_more, compile=True) as step,
    ):
        gains.append(1 + 2**-22)
        for _ in range(5):
            step(x)
        before = snapshot(model, optimizer)
        gains.clear()
        with pytest.raises(MemoryError):
            step(x)
        state = snapshot(model, optimizer)
        assert_same_state({name: before[name] for name in state}, state)
        gains.append(1 + 2**-8)
        with pytest.raises(graphfsdp.VerificationError, match="result 0 differs in 1 of 1"):
            step.verify()
        now = snapshot(model, optimizer)
        assert_same_state(state, {name: now[name] for name in state})
        gains.append(1 + 2**-22)
        step(x)
        step.verify(2)


def test_what_vanishes_by_cancelling_has_the_scale_of_what_belongs_to_it() -> None:
    small, bound = 2.0**-30, BOUNDS[torch.float32]
    largest = {
        "result 0": (small, 2.0),
        "the gradient of 'last.weight'": (2.0, 2.0),
        "the gradient of 'last.bias'": (small, 2.0),
        "buffer 'norm.running_mean'": (small, 1.0),
        "buffer 'norm.running_var'": (1.0, 1.0),
        "buffer 'other.mean'": (small, small),
        "optimizer state, exp_avg of parameter 0 of group 0": (small, 0.5),
        "optimizer state, exp_avg of parameter 1 of group 0": (0.5, 0.5),
        "optimizer state, exp_avg_sq of parameter 1 of group 0": (small, small),
        "parameter 'last.weight'": (4.0, 4.0),
        "parameter 'last.bias'": (1.0, 1.0),
    }
    expected = {name: torch.tensor([one]).double() for name, (one, _) in largest.items()}
    before = {name: each.clone() for name, each in expected.items() if name.startswith("parameter")}
    before["parameter 'last.weight'"] -= 0.25
    allowed = allowances(expected, before, bound)
    assert allowed == {
        name: bound * scale + 0.5 * (name in before) for name, (_, scale) in largest.items()
    }


def test_evaluation_and_each_kind_of_batch_are_compiled() -> None:
    def run(compiles: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = Squared(nn.Linear(WIDTH, 16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 3))
        optimizer = FusedAdam(model.parameters(), lr=1e-2)
        found = []
        with graphfsdp.capture(
            model, optimizer, on_change="recapture", compile=compiles, warmup_steps=1
        ) as step:
            for index in range(12):
                x = torch.randn(4 + 4 * (index % 2), WIDTH)
                found += [step(x), step.evaluate(x)]
            assert bool(step.report().compiled) is compiles
        return found

    for one, other in zip(run(False), run(True), strict=True):
        assert torch.equal(one, other)
