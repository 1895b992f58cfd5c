"""What a capture refuses: op, module path and source line; and that nothing is left of it."""

import math
import re
from dataclasses import dataclass

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import graphfsdp
from graphfsdp.optim import FusedAdam
from helpers import assert_same_state, line_of, snapshot
from probe import Inner, Program, batches, check_captured, check_refused, make_probe

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Rule:
    """A program that must be refused; its line is marked ``# refused``."""

    program: Program
    op: str
    message: str
    cpu_only: bool = False


RULES: dict[str, Rule] = {}


def rule(op: str, message: str, *, cpu_only: bool = False):  # type: ignore[no-untyped-def]
    def register(program: Program) -> Program:
        RULES[program.__name__] = Rule(program, op, message, cpu_only)  # type: ignore[attr-defined]
        return program

    return register


SCALAR = "aten._local_scalar_dense.default"
HOST = "reads a value of the iteration on the host"
SHAPE = "returns a tensor whose shape depends on values"
GENERATOR = "reads or sets the state of a random generator"


@rule(SCALAR, HOST)
def item(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h * h.sum().item()  # refused


@rule(SCALAR, HOST)
def float_of_a_buffer(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h * float(self.gate[0])  # refused


@rule(SCALAR, HOST)
def int_of_the_batch(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h * int(x[0, 0])  # refused


@rule(SCALAR, HOST)
def branch(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    if h.sum() > 0:  # refused
        return h * 2
    return h


@rule(SCALAR, HOST)
def assertion(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    assert h.isfinite().all()  # refused
    return h


@rule(SCALAR, HOST)
def membership(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h * (7.0 in x)  # refused


@rule(SCALAR, HOST)
def math_function(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h * math.sqrt(self.extra.detach().abs().sum())  # refused


@rule(SCALAR, HOST)
def index_by_tensor_as_number(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h * [1.0, 2.0][x[0].argmax() % 2]  # refused


@rule(SCALAR, HOST)
def random_number(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    if torch.rand((), device=h.device).item() < 0.5:  # refused
        return h * 2
    return h


@rule("aten.equal.default", HOST)
def equal(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h * torch.equal(h, x)  # refused


@rule("aten.allclose.default", HOST)
def allclose(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h * torch.allclose(h, x)  # refused


@rule("Tensor.tolist", HOST)
def tolist(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h * x.tolist()[0][0]  # refused


@rule("Tensor.cpu", HOST)
def cpu(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h * h.detach().cpu().max().to(h.device)  # refused


@rule(r"Tensor.to\('cpu'\)", HOST)
def to_cpu(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h * h.detach().to("cpu").max().to(h.device)  # refused


@rule(r"Tensor.to\('cpu'\)", HOST)
def to_device_keyword(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h * h.detach().to(device="cpu").max().to(h.device)  # refused


@rule("Tensor.numpy", HOST, cpu_only=True)
def to_numpy(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h * float(x.numpy()[0, 0])  # refused


@rule("Tensor.__array__", HOST, cpu_only=True)
def numpy_function(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h * float(numpy.asarray(x)[0, 0])  # refused


@rule("Tensor.__repr__", HOST)
def printed(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    print(h)  # refused
    return h


@rule("Tensor.__format__", HOST)
def formatted(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    f"{h.sum():.3f}"  # refused
    return h


@rule("aten.nonzero.default", SHAPE)
def nonzero(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h[torch.nonzero(x[:, 0] > 0).flatten()]  # refused


@rule("aten.nonzero.default", SHAPE)
def where_with_one_argument(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h[torch.where(x[:, 0] > 0)]  # refused


@rule("aten.index.Tensor", SHAPE)
def boolean_mask(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h[x > 0]  # refused


@rule("aten.masked_select.default", SHAPE)
def masked_select(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h.masked_select(x > 0)  # refused


@rule("aten.index_put_.default", SHAPE)
def values_under_a_mask(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    h = h.clone()
    h[x[:, 0] > 0] = x.mean(dim=0)  # refused
    return h


@rule(r"aten\._?unique.*", SHAPE)
def unique(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h * torch.unique(x.round()).sum()  # refused


@rule(r"aten.unique_consecutive.*", SHAPE)
def unique_consecutive(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h * torch.unique_consecutive(x.round()).sum()  # refused


@rule(r"aten.repeat_interleave.*", SHAPE)
def repeat_interleave(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return torch.repeat_interleave(h, (x[:, 0] > 0).long() + 1, dim=0)  # refused


@rule(r"aten.bincount.*", SHAPE)
def bincount(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h * torch.bincount((x[:, 0] > 0).long()).sum()  # refused


@rule(SCALAR, HOST)
def one_hot_of_unknown_width(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h * functional.one_hot((x[:, 0] > 0).long()).sum()  # refused


@rule("torch.Generator.get_state", GENERATOR)
def get_rng_state(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    torch.get_rng_state()  # refused
    return h


@rule("torch.Generator.manual_seed", GENERATOR, cpu_only=True)
def manual_seed(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    torch.manual_seed(3)  # refused
    return h


@rule("torch.Generator.set_state", GENERATOR)
def set_rng_state(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    torch.set_rng_state(STATE)  # refused
    return h


@rule("torch.Generator.manual_seed", GENERATOR)
def seed_own_generator(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    OWN.manual_seed(3)  # refused
    return h


@rule("torch.Generator.get_state", GENERATOR)
def checkpoint(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    from torch.utils.checkpoint import checkpoint

    out = checkpoint(torch.sin, h, use_reentrant=False)  # refused
    assert isinstance(out, Tensor)
    return out


@rule("aten.resize_.default", "grows a storage inside the iteration", cpu_only=True)
def grown_storage(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    buffer = torch.empty(2)
    buffer.resize_(4).copy_(h[0].detach())  # refused
    return h * buffer


@rule(r".*", "layout torch.sparse_coo has no storage")
def sparse(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    indices = torch.zeros(1, 8, dtype=torch.int64, device=h.device)
    matrix = torch.sparse_coo_tensor(indices, h.detach(), (1, 4), check_invariants=False)
    return h * torch.sparse.sum(matrix)  # not reached


STATE = torch.get_rng_state()
OWN = torch.Generator()
UNMARKED = ("sparse",)


@pytest.mark.parametrize("name", RULES)
def test_refused_by_name_and_rolled_back(name: str, device: torch.device) -> None:
    rule = RULES[name]
    if rule.cpu_only and device.type != "cpu":
        pytest.skip("this program is legal on CUDA, or fails before it reaches a capture")
    error = check_refused(rule.program, device)
    assert error.op is not None
    assert re.fullmatch(rule.op, error.op)
    assert rule.message in str(error)
    assert "Remedy: " in str(error)
    if name not in UNMARKED:
        assert error.module_path == "body.inner"
        assert error.source is not None
        assert error.source.file == __file__
        assert error.source.line == line_of(rule.program, "# refused")
        assert error.source.function == name
        assert f"{__file__}:{error.source.line} in {name}" in str(error)
        assert "body.inner" in str(error)


@pytest.mark.parametrize("name", ["item", "boolean_mask", "get_rng_state"])
@pytest.mark.parametrize(
    "options",
    [
        {"microbatches": 2},
        {"max_grad_norm": 0.1},
        {"scope": "forward_backward"},
    ],
    ids=str,
)
def test_refused_whatever_the_options(
    name: str, options: dict[str, object], device: torch.device
) -> None:
    if "max_grad_norm" in options:
        step, *_ = make_probe(RULES[name].program, device, **options)
        for x in batches(device, 3):
            step(x)
        with pytest.raises(graphfsdp.CaptureError):
            step(batches(device, 1)[0])
        return
    check_refused(RULES[name].program, device, **options)


def test_a_swallowed_refusal_still_ends_the_capture(device: torch.device) -> None:
    def swallow(self: Inner, h: Tensor, x: Tensor) -> Tensor:
        try:
            return h * h.sum().item()  # refused
        except Exception:
            return h * h.sum()

    error = check_refused(swallow, device)
    assert error.op == SCALAR
    assert error.source is not None
    assert error.source.line == line_of(swallow, "# refused")


def test_the_first_of_several_swallowed_refusals_is_reported(device: torch.device) -> None:
    def swallow(self: Inner, h: Tensor, x: Tensor) -> Tensor:
        for read in (lambda: x.tolist(), lambda: h.sum().item()):
            try:
                read()
            except graphfsdp.CaptureError:
                pass
        return h

    assert check_refused(swallow, device).op == "Tensor.tolist"


def test_a_read_in_a_backward_is_refused_at_its_line(device: torch.device) -> None:
    class Read(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, h: Tensor) -> Tensor:
            return h.clone()

        @staticmethod
        def backward(ctx: object, *grads: Tensor) -> Tensor:
            return grads[0] * float(grads[0].abs().max())  # refused

    def program(self: Inner, h: Tensor, x: Tensor) -> Tensor:
        out: Tensor = Read.apply(h)  # type: ignore[no-untyped-call]
        return out

    error = check_refused(program, device)
    assert error.op == SCALAR
    assert error.source is not None
    assert error.source.line == line_of(Read.backward, "# refused")


def test_a_read_in_the_loss_function_is_refused_outside_any_module(device: torch.device) -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = model(x)
        return loss * loss.detach().item()  # refused

    step, *_ = make_probe(lambda self, h, x: h, device, loss_fn=loss_fn)
    for x in batches(device, 3):
        step(x)
    with pytest.raises(graphfsdp.CaptureError) as caught:
        step(batches(device, 1)[0])
    assert caught.value.module_path is None
    assert caught.value.source is not None
    assert caught.value.source.line == line_of(loss_fn, "# refused")


def test_a_read_in_the_optimizer_is_refused_after_parameters_were_written(
    device: torch.device,
) -> None:
    class Careless(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            super().step()
            float(self.param_groups[0]["params"][0].sum())  # refused

    torch.manual_seed(0)
    model = nn.Linear(4, 1).to(device)
    optim = Careless(model.parameters(), lr=0.1, momentum=0.9)
    step = graphfsdp.capture(model, optim, loss_fn=lambda model, x: model(x).mean())
    for x in batches(device, 3):
        step(x)
    before = snapshot(model, optim)
    with pytest.raises(graphfsdp.CaptureError) as caught:
        step(batches(device, 1)[0])
    assert caught.value.source is not None
    assert caught.value.source.line == line_of(Careless.step, "# refused")
    assert_same_state(before, snapshot(model, optim))


def test_a_failed_capture_can_be_tried_again(device: torch.device) -> None:
    reads = {"on": True}

    def program(self: Inner, h: Tensor, x: Tensor) -> Tensor:
        if reads["on"] and h.sum().item() > 1e9:
            return h * 2
        return h * self.gate

    def train(scope: str) -> list[tuple[Tensor, dict[str, Tensor]]]:
        reads["on"] = True
        step, model, optim = make_probe(program, device, scope=scope)
        found = []
        for index, x in enumerate(batches(device, 12)):
            if index == 3 and scope != "none":
                for _ in range(2):
                    with pytest.raises(graphfsdp.CaptureError):
                        step(x)
                    assert step.phase is graphfsdp.Phase.WARMUP
                reads["on"] = False
            found.append((step(x), snapshot(model, optim)))
        assert step.report().num_captures == (scope != "none")
        return found

    for expected, got in zip(train("none"), train("full_iteration"), strict=True):
        assert torch.equal(expected[0], got[0])
        assert_same_state(expected[1], got[1])


def rebound_buffer(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    self.gate = self.gate * 0.9 + h.detach().mean(dim=0)
    return h * self.gate


def rebound_attribute(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    self.attribute = self.attribute * 0.9 + h.detach().mean(dim=0)
    return h * self.attribute


def rebound_data(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    self.gate.data = self.gate * 0.9 + h.detach().mean(dim=0)
    return h * self.gate


@pytest.mark.parametrize(
    ("program", "name"),
    [(rebound_buffer, "body.inner.gate"), (rebound_attribute, "body.inner.attribute")],
)
def test_state_that_is_replaced_is_refused(
    program: Program, name: str, device: torch.device
) -> None:
    error = check_refused(program, device)
    assert f"replaced {name!r}" in str(error)
    assert "copy_" in str(error)


def test_state_whose_data_is_replaced_is_refused() -> None:
    error = check_refused(rebound_data, CPU)
    assert "gave 'body.inner.gate' new memory" in str(error)
    assert error.module_path == "body.inner"


def test_state_outside_the_model_that_is_replaced_is_refused() -> None:
    history = [torch.zeros(4)]

    def program(self: Inner, h: Tensor, x: Tensor) -> Tensor:
        out = h + history[0]  # refused
        history[0] = 0.5 * history[0] + h.detach().mean(dim=0)
        return out

    step, *_ = make_probe(program, CPU)
    for x in batches(CPU, 3):
        step(x)
    with pytest.raises(graphfsdp.CaptureError, match="then dropped it") as caught:
        step(batches(CPU, 1)[0])
    assert caught.value.source is not None
    assert caught.value.source.line == line_of(program, "# refused")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:Using `torch.compile.module.`:UserWarning")
def test_compiled_functions_and_modules_are_refused_on_a_cpu() -> None:
    function = torch.compile(lambda h: h * 2, backend="eager")
    layer = torch.compile(nn.Linear(4, 4), backend="eager")
    for compiled in (function, layer):

        def program(self: Inner, h: Tensor, x: Tensor, compiled=compiled) -> Tensor:  # type: ignore[no-untyped-def]
            out: Tensor = compiled(h)  # refused
            return out

        error = check_refused(program, CPU)
        assert error.op == "torch.compile"
        assert "compiled by torch.compile" in str(error)
        assert error.source is not None
        assert error.source.line == line_of(program, "# refused")


@pytest.mark.filterwarnings("ignore:Using `torch.compile.module.`:UserWarning")
def test_a_compiled_model_is_refused_on_a_cpu() -> None:
    model = torch.compile(nn.Linear(4, 1), backend="eager")
    optim = FusedAdam(model.parameters())
    step = graphfsdp.capture(model, optim, loss_fn=lambda model, x: model(x).mean())
    for x in batches(CPU, 3):
        step(x)
    with pytest.raises(graphfsdp.CaptureError, match=r"compiled by torch\.compile"):
        step(batches(CPU, 1)[0])


def test_higher_order_operators_are_refused() -> None:
    def program(self: Inner, h: Tensor, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.higher_order.cond(
            x.sum() > 0, lambda h: h * 2, lambda h: h.clone(), (h.detach(),)
        )
        return h + out

    assert "higher-order operator" in str(check_refused(program, CPU))


LIBRARY = torch.library.Library("graphfsdp_tests", "FRAGMENT")
LIBRARY.define("silent_add(Tensor x, Tensor y) -> Tensor")
LIBRARY.define("honest_add(Tensor(a!) x, Tensor y) -> Tensor")


def _add(x: Tensor, y: Tensor) -> Tensor:
    return x.add_(y).clone()


for _name in ("silent_add", "honest_add"):
    LIBRARY.impl(_name, _add, "CompositeExplicitAutograd")


def test_a_custom_operator_that_writes_in_secret_is_refused_on_a_cpu() -> None:
    def program(self: Inner, h: Tensor, x: Tensor) -> Tensor:
        shift = torch.ops.graphfsdp_tests.silent_add(self.gate, x[0])  # refused
        return h * shift

    error = check_refused(program, CPU)
    assert error.op == "graphfsdp_tests.silent_add.default"
    assert "without saying so in its schema" in str(error)
    assert "torch.float32 tensor of shape (4,)" in str(error)
    assert error.source is not None
    assert error.source.line == line_of(program, "# refused")


def test_a_custom_operator_that_declares_its_writes_is_captured(device: torch.device) -> None:
    def program(self: Inner, h: Tensor, x: Tensor) -> Tensor:
        shift: Tensor = torch.ops.graphfsdp_tests.honest_add(self.gate, x[0])
        return h * shift

    check_captured(program, device)


ALLOWED: dict[str, Program] = {
    "fixed_one_hot": lambda self, h, x: h * functional.one_hot((x[:, 0] > 0).long(), 4),
    "to_the_same_device": lambda self, h, x: h.to(x.device) * self.gate.to(h),
    "to_dtype": lambda self, h, x: h.to(torch.float64).float(),
    "masked_fill": lambda self, h, x: h.masked_fill(x > 0, 0.25),
    "where": lambda self, h, x: torch.where(x > 0, h, 0.0),
    "repeat_of_known_size": lambda self, h, x: torch.repeat_interleave(
        h, (x[:, 0] * 0).long() + 2, dim=0, output_size=16
    ),
    "nonzero_static": lambda self, h, x: h * torch.nonzero_static(x[0] > 0, size=4).sum(),
    "index_by_integers": lambda self, h, x: h[x[:, 0].argsort()],
    "iteration_over_rows": lambda self, h, x: torch.stack([row.cumprod(0) for row in h]),
    "shapes_and_metadata": lambda self, h, x: h * h.shape[0] / len(h) * h.dim() / h.numel(),
    "einsum": lambda self, h, x: torch.einsum("bi,bj->b", h, x),
    "assigned_under_a_mask": lambda self, h, x: h.clone().index_put(
        (x > 0,), torch.tensor(1.0, device=h.device)
    )
    if h.device.type == "cpu"
    else h.masked_fill(x > 0, 1.0),
    "random": lambda self, h, x: h * torch.rand_like(h) + torch.randn(4, device=h.device),
    "permutation": lambda self, h, x: h[torch.randperm(8, device=h.device)],
    "multinomial": lambda self, h, x: h[torch.multinomial(x.abs() + 1, 2)[:, 0]],
    "literal": lambda self, h, x: h * torch.full((4,), 2.0, device=h.device),
    "detached_writes": lambda self, h, x: h + self.gate.copy_(h.detach().mean(dim=0)),
    "data_attribute": lambda self, h, x: h + h.data.mean() + self.extra.data,
    "sort_and_topk": lambda self, h, x: h.sort(dim=0).values + h.topk(2).values.sum(),
    "dtype_view": lambda self, h, x: h + x.view(torch.int32).remainder(7).float(),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_what_a_graph_can_hold_is_captured(name: str, device: torch.device) -> None:
    check_captured(ALLOWED[name], device)


CONSTANT_READS: dict[str, Program] = {
    "float": lambda self, h, x: h * float(torch.ones(3).sum()),
    "tolist": lambda self, h, x: h * torch.arange(1, 4).tolist()[1],
    "numpy": lambda self, h, x: h * float(torch.full((2,), 3.0).numpy()[0]),
    "literal": lambda self, h, x: h * torch.tensor([0.5, 2.0])[1].item(),
    "branch": lambda self, h, x: h * 2 if torch.zeros(()) < 1 else h,
    "mask": lambda self, h, x: h[:, torch.arange(4) < 2],
    "nonzero": lambda self, h, x: h[:, torch.eye(4).nonzero()[:, 0]],
    "cpu": lambda self, h, x: h * torch.ones(4).cpu().to("cpu"),
    "printed": lambda self, h, x: h * len(repr(torch.ones(2))),
    "shape": lambda self, h, x: h * torch.tensor(x.shape)[0].item(),
}


@pytest.mark.parametrize("name", CONSTANT_READS)
def test_reads_of_constants_are_captured_on_a_cpu(name: str) -> None:
    check_captured(CONSTANT_READS[name], CPU)


def test_a_constant_stops_being_one_when_it_is_written() -> None:
    def program(self: Inner, h: Tensor, x: Tensor) -> Tensor:
        total = torch.zeros(4)
        total += h.detach().mean(dim=0)
        return h * total[0].item()  # refused

    error = check_refused(program, CPU)
    assert error.source is not None
    assert error.source.line == line_of(program, "# refused")


def test_a_view_of_a_constant_that_is_written_taints_all_of_it() -> None:
    def program(self: Inner, h: Tensor, x: Tensor) -> Tensor:
        total = torch.zeros(4)
        total[2:].copy_(h.detach()[0, :2])
        return h * float(total[3])

    check_refused(program, CPU)


def test_a_literal_starts_anew_in_every_replay() -> None:
    def program(self: Inner, h: Tensor, x: Tensor) -> Tensor:
        total = torch.tensor([0.0, 1.0, 2.0, 3.0])
        total += h.detach().mean(dim=0)
        total[0] = 7.0
        return h * total

    check_captured(program, CPU)


def test_the_rules_end_with_the_recording(device: torch.device) -> None:
    """Between calls the program may read whatever it likes."""
    step, model, _ = make_probe(lambda self, h, x: h, device)
    for x in batches(device, 8):
        loss = step(x)
        assert math.isfinite(loss.item())
        assert model.body.inner.gate.tolist() == [0.5] * 4
        torch.get_rng_state()
        assert not any("forward" in str(hook) for hook in model._forward_hooks)
