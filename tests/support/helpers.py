"""Runs of one training program under several scopes, and their comparison bit for bit."""

import atexit
import gc
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import graphfsdp
from graphfsdp.base.torch_internals import not_traced
from graphfsdp.optim import FusedAdam
from hidden_count import Unseen

NUM_STEPS = 14  # 3 warm-up, 1 capture, 10 replays
OPTIMIZERS = ("fused_adam", "adamw", "sgd")


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, and any other tensor itself."""
    found: Tensor = getattr(tensor, "to_local", lambda: tensor)()
    return found


def quick_garbage_collection() -> None:
    """Leave what exists out of collections: each capture runs one, and imports left a lot."""
    gc.freeze()


atexit.register(gc.unfreeze)  # extension modules complain about what is not collected at the end


@dataclass(frozen=True)
class Batch:
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def to(self, device: torch.device) -> "Batch":
        def move(leaf: Any) -> Any:
            return leaf.to(device) if isinstance(leaf, Tensor) else leaf

        return Batch(pytree.tree_map(move, self.args), pytree.tree_map(move, self.kwargs))


@dataclass(frozen=True)
class Case:
    """A model, its batches, and how its loss is computed.

    Attributes:
        setup: Called with model and optimizer before the first call; what it returns, if anything,
            is called after each call, and then the learning rate is its business.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    loss_fn: Callable[..., Any] | None = None
    setup: Callable[[nn.Module, torch.optim.Optimizer], Callable[[], object] | None] | None = None


@dataclass
class Trace:
    """What a run left behind: everything that two runs must agree on.

    Attributes:
        outputs: Tensors that each call returned, kept as they are and read at the end.
        snapshots: Copies of all state by name, after each call.
        num_forwards: Calls of the model's forward, after each call of the step.
        report: Of the step, before it was closed.
    """

    outputs: list[list[Tensor]] = field(default_factory=list)
    snapshots: list[dict[str, Tensor]] = field(default_factory=list)
    num_forwards: list[int] = field(default_factory=list)
    report: graphfsdp.CaptureReport = field(init=False, repr=False, compare=False)


def make_optimizer(
    name: str, params: Iterable[nn.Parameter], device: torch.device
) -> torch.optim.Optimizer:
    """Return an optimizer whose learning rate may change between replays."""
    on_gpu = device.type == "cuda"
    if name == "fused_adam":
        return FusedAdam(params, lr=1e-2, weight_decay=0.1)
    lr = torch.tensor(1e-2, device=device)
    if name == "adamw":
        return torch.optim.AdamW(params, lr=lr, weight_decay=0.1, fused=True, capturable=on_gpu)
    assert name == "sgd"
    return torch.optim.SGD(params, lr=lr, momentum=0.9, weight_decay=0.1, fused=True)


def set_lr(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Change the learning rate of every group, in place where it is a tensor."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(value)
        else:
            group["lr"] = value


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return copies of everything that an iteration may change, by name."""
    found: dict[str, Tensor] = {}
    for name, param in model.named_parameters():
        found[f"parameter {name}"] = param
        for kind in ("grad", "decoupled_grad"):
            grad = getattr(param, kind, None)
            if grad is not None:
                found[f"{kind} of {name}"] = grad
    found |= {f"buffer {name}": buffer for name, buffer in model.named_buffers()}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                found[f"attribute {path}.{name}"] = value
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for index, param in enumerate(params):
        for name, value in optimizer.state.get(param, {}).items():
            if isinstance(value, Tensor):
                found[f"state {name} of parameter {index}"] = value
    copies = {name: tensor.detach().clone() for name, tensor in found.items()}
    copies["generator of the cpu"] = torch.get_rng_state()
    if any(param.is_cuda for param in model.parameters()):
        copies["generator of the gpu"] = torch.cuda.get_rng_state()
    return copies


def assert_same_state(expected: dict[str, Tensor], got: dict[str, Tensor], when: str = "") -> None:
    assert list(expected) == list(got), (
        f"{when}: {set(expected) ^ set(got)} exist on one side only, or in another order"
    )
    for name, tensor in expected.items():
        assert same_bits(tensor, got[name]), (
            f"{when}: {name} differs{_difference(tensor, got[name])}"
        )


def assert_same_states(
    expected: list[dict[str, Tensor]], got: list[dict[str, Tensor]], when: str = ""
) -> None:
    for index, (one, other) in enumerate(zip(expected, got, strict=True)):
        assert_same_state(one, other, f"{when} call {index}")


def _difference(left: Tensor, right: Tensor) -> str:
    if left.shape != right.shape or left.dtype != right.dtype:
        return f": {left.dtype} {tuple(left.shape)} and {right.dtype} {tuple(right.shape)}"
    return f" by up to {float((left.double() - right.double()).abs().max())}"


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Tell whether two tensors are equal in dtype, shape and contents, NaN being equal to NaN."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(left, right) or bool(
        ((left == right) | (left.isnan() & right.isnan())).all()
    )


class PlainStep:
    """What users write without graphfsdp."""

    grad_norm: Tensor | None = None

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        loss_fn: Callable[..., Any] | None,
        iteration: Callable[..., Any] | None = None,
        max_grad_norm: float | None = None,
        **of_graphs: Any,
    ) -> None:
        assert of_graphs.keys() <= {"on_change", "max_graphs"}, of_graphs
        self._trained = model, optimizer
        self._loss_fn = loss_fn
        self._iteration = iteration
        self._max_grad_norm = max_grad_norm

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model, optimizer = self._trained
        model.zero_grad()
        if self._iteration is not None:
            output = self._iteration(model, optimizer, *args, **kwargs)
        else:
            output = (self._loss_fn or nn.Module.__call__)(model, *args, **kwargs)
            output = getattr(output, "loss", output)
            pytree.tree_leaves(output)[0].backward()
            if self._max_grad_norm is not None:
                self.grad_norm = nn.utils.clip_grad_norm_(
                    model.parameters(), self._max_grad_norm, foreach=True
                )
            optimizer.step()
        return pytree.tree_map_only(Tensor, Tensor.detach, output)


def run(
    case: Case,
    scope: str,
    device: torch.device,
    *,
    optimizer: str | Callable[[list[nn.Parameter]], torch.optim.Optimizer] = "fused_adam",
    num_steps: int = NUM_STEPS,
    seed: int = 0,
    between: Callable[[Any, nn.Module, int], object] | None = None,
    **options: Any,
) -> Trace:
    """Train a case for some calls; batch, learning rate and generators change between them.

    The scope "plain" is a loop without graphfsdp. ``between`` is called after each call, with the
    step, the model, and how many calls there were before.
    """
    torch.manual_seed(seed)
    model = case.make().to(device)
    params = [param for param in model.parameters() if param.requires_grad]
    optim = (
        make_optimizer(optimizer, params, device)
        if isinstance(optimizer, str)
        else optimizer(params)
    )
    generator = torch.Generator().manual_seed(seed + 1)
    after_call = None if case.setup is None else case.setup(model, optim)
    trace = Trace()
    num_forwards = count_forwards(model)
    quick_garbage_collection()
    options["loss_fn"] = case.loss_fn
    with (
        nullcontext(PlainStep(model, optim, **options))
        if scope == "plain"
        else graphfsdp.capture(model, optim, scope=scope, **options)
    ) as step:
        for index in range(num_steps):
            if case.setup is None:
                set_lr(optim, 0.02 / (1 + index))
            torch.rand((), device=device)  # somebody else draws from the generator in between
            batch = case.batch(generator).to(device)
            leaves = pytree.tree_leaves(step(*batch.args, **batch.kwargs))
            trace.outputs.append([leaf for leaf in leaves if leaf is not None])
            if after_call is not None:
                after_call()
            if between is not None:
                between(step, model, index)
            state = snapshot(model, optim)
            if step.grad_norm is not None:
                state["norm of the gradients"] = step.grad_norm
            trace.snapshots.append(state)
            trace.num_forwards.append(num_forwards())
        if isinstance(step, graphfsdp.CapturedStep):
            trace.report = step.report()
    return trace


def assert_same_run(expected: Trace, got: Trace) -> None:
    assert len(expected.outputs) == len(got.outputs)
    calls = zip(expected.outputs, got.outputs, strict=True)
    for index, (left, right) in enumerate(calls):
        assert len(left) == len(right)
        for position, (one, other) in enumerate(zip(left, right, strict=True)):
            assert same_bits(one, other), f"call {index}: output {position}: {one} and {other}"
        assert_same_state(expected.snapshots[index], got.snapshots[index], f"call {index}")


def assert_alive(trace: Trace) -> None:
    """Refuse a run in which a frozen value could go unseen: nothing may stand still or explode."""
    losses = [outputs[0] for outputs in trace.outputs]
    assert all(loss.isfinite().all() for loss in losses), losses
    assert len({float(loss) for loss in losses}) == len(losses), "two calls had the same loss"
    for before, after in zip(trace.snapshots, trace.snapshots[1:], strict=False):
        changed = [n for n in after if n not in before or not same_bits(before[n], after[n])]
        assert any(name.startswith("parameter") for name in changed)
        assert any("grad of" in name for name in changed)


def without_compiling(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a captured run for its eager one, which refuses to compile."""
    return {name: value for name, value in options.items() if name != "compile"}


def run_as_eager(
    case: Case,
    device: torch.device,
    *,
    scope: str = "full_iteration",
    beside: str = "none",
    **options: Any,
) -> Trace:
    """Run a case captured and in another scope; compare bit for bit; return the captured run."""
    expected = run(case, beside, device, **without_compiling(options))
    got = run(case, scope, device, **options)
    assert_alive(expected)
    assert_same_run(expected, got)
    return got


def check_against_eager(
    case: Case, device: torch.device, *, scope: str = "full_iteration", **options: Any
) -> Trace:
    """Do the same, and count captures and calls of Python."""
    got = run_as_eager(case, device, scope=scope, **options)
    assert got.report.num_captures == 1
    assert got.report.num_calls["replay"] == len(got.outputs) - 4
    assert got.num_forwards[3:] == [got.num_forwards[3]] * (len(got.outputs) - 3)
    return got


def count_forwards(model: nn.Module) -> Callable[[], int]:
    """Count the calls of a model's forward from now on; the result returns how many there were."""
    forwards = Unseen(None)

    def hook(module: nn.Module, args: object) -> None:
        next(forwards)

    # torch 2.15 traces hooks, and would compile anew for each count.
    model.register_forward_pre_hook(not_traced(hook))
    return lambda: forwards.num_calls


class Operators(TorchDispatchMode):
    """Tells somebody of each operator that has run inside it: its name and its arguments."""

    def __init__(self, note: Callable[[str, Any], object]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._note = note

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._note(str(func), args)
        return result


class OpNames(Operators):
    """Collects the names of the operators that run inside it."""

    def __init__(self) -> None:
        self.names: list[str] = []
        super().__init__(lambda name, args: self.names.append(name))


@contextmanager
def no_host_sync(device: torch.device) -> Iterator[None]:
    """Fail if the body reads a device value on the host."""
    if device.type == "cuda":
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # once it is on, torch says that it is a prototype
                torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return
    with OpNames() as seen:
        yield
    reads = [name for name in seen.names if "_local_scalar_dense" in name or "nonzero" in name]
    assert not reads, reads
    assert seen.names, "no operator was seen at all"


def line_of(function: Callable[..., Any], marker: str) -> int:
    """Return the number of the line of a function that ends with ``# marker``."""
    lines, first = inspect.getsourcelines(function)
    found = [first + index for index, line in enumerate(lines) if line.rstrip().endswith(marker)]
    assert len(found) == 1, (marker, found)
    return found[0]
