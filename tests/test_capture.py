"""`graphfsdp.capture` and the captured step: outputs, phases, counts, arguments."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from helpers import (
    Case,
    assert_same_run,
    assert_same_state,
    make_optimizer,
    no_host_sync,
    quick_garbage_collection,
    run,
    set_lr,
    snapshot,
)
from torch import Tensor, nn
from zoo import GPT, WIDTH, ZOO, Squared, WithOutput, loss_with_extras

import graphfsdp
from graphfsdp import CapturedStep, Phase
from graphfsdp.optim import FusedAdam


def make_step(
    device: torch.device, name: str = "mlp", optimizer: str = "fused_adam", **options: Any
) -> tuple[CapturedStep, nn.Module, torch.optim.Optimizer, Callable[[], tuple[Any, ...]]]:
    """Return a step, its model and optimizer, and a source of batches."""
    quick_garbage_collection()
    case = ZOO[name]
    torch.manual_seed(3)
    model = case.make().to(device)
    optim = make_optimizer(optimizer, model.parameters(), device)
    options.setdefault("loss_fn", case.loss_fn)
    step = graphfsdp.capture(model, optim, **options)
    generator = torch.Generator().manual_seed(4)
    return step, model, optim, lambda: case.batch(generator).to(device).args


@pytest.mark.parametrize("max_grad_norm", [None, 0.05, float("inf")])
def test_scope_none_equals_a_loop_written_by_hand(
    max_grad_norm: float | None, device: torch.device
) -> None:
    step, model, optim, next_batch = make_step(
        device, "gpt", "adamw", scope="none", max_grad_norm=max_grad_norm
    )
    torch.manual_seed(5)
    losses = []
    for _ in range(6):
        losses.append(step(*next_batch()))
    state = snapshot(model, optim)

    step, model, optim, next_batch = make_step(device, "gpt", "adamw", scope="none")
    step.close()
    torch.manual_seed(5)
    for expected in losses:
        optim.zero_grad()
        loss = model(*next_batch())
        loss.backward()
        if max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm, foreach=True)
        optim.step()
        assert torch.equal(loss, expected)
    assert_same_state(snapshot(model, optim), state)


@pytest.mark.parametrize("num_calls", range(1, 9))
@pytest.mark.parametrize("warmup_steps", [1, 3])
def test_n_calls_train_as_n_eager_calls_do(
    num_calls: int, warmup_steps: int, device: torch.device
) -> None:
    options: dict[str, Any] = {
        "num_steps": num_calls,
        "warmup_steps": warmup_steps,
        "max_grad_norm": 0.1,
    }
    expected = run(ZOO["mlp"], "none", device, **options)
    assert_same_run(expected, run(ZOO["mlp"], "full_iteration", device, **options))


def test_recording_may_be_the_first_call_without_the_optimizer(device: torch.device) -> None:
    options: dict[str, Any] = {"num_steps": 5, "warmup_steps": 0}
    if device.type == "cuda":
        pytest.skip("CUDA libraries initialise themselves in a warm-up")
    expected = run(ZOO["mlp"], "none", device, num_steps=5)
    assert_same_run(expected, run(ZOO["mlp"], "forward_backward", device, **options))


def test_outputs_are_the_callers_to_keep(device: torch.device) -> None:
    step, _, _, next_batch = make_step(device, "extras")
    outputs, copies = [], []
    for _ in range(8):
        output = step(*next_batch())
        leaves = torch.utils._pytree.tree_leaves(output)
        assert not any(leaf.requires_grad for leaf in leaves)
        outputs.append(leaves)
        copies.append([leaf.clone() for leaf in leaves])
    for leaves, kept in zip(outputs, copies, strict=True):
        assert all(torch.equal(leaf, copy) for leaf, copy in zip(leaves, kept, strict=True))
    storages = [leaf.untyped_storage().data_ptr() for leaves in outputs for leaf in leaves[:3]]
    assert len(set(storages)) == len(storages)


def test_writing_into_outputs_disturbs_nothing(device: torch.device) -> None:
    expected = run(ZOO["extras"], "none", device)

    def spoiled(scope: str) -> list[Tensor]:
        case = ZOO["extras"]
        torch.manual_seed(0)
        model = case.make().to(device)
        optim = make_optimizer("fused_adam", model.parameters(), device)
        generator = torch.Generator().manual_seed(1)
        losses = []
        with graphfsdp.capture(model, optim, scope=scope, loss_fn=case.loss_fn) as step:
            for index in range(len(expected.outputs)):
                set_lr(optim, 0.02 / (1 + index))
                batch = case.batch(generator).to(device).args
                output = step(*batch)
                losses.append(output[0].clone())
                for leaf in torch.utils._pytree.tree_leaves(output):
                    leaf.zero_()
                for tensor in batch:
                    tensor.fill_(float("nan"))
        return losses

    for scope in ("none", "forward_backward", "full_iteration"):
        for loss, outputs in zip(spoiled(scope), expected.outputs, strict=True):
            assert torch.equal(loss, outputs[0]), scope


@pytest.mark.parametrize(
    "make",
    [
        lambda model, x, y: [y, y],
        lambda model, x, y: [y, y.t()],
        lambda model, x, y: [y, y[:1], y.view(-1)],
        lambda model, x, y: [x, x, x[:2]],
        lambda model, x, y: [model.layers[0].weight, model.layers[0].weight.data[1:]],
        lambda model, x, y: [y.real, y.detach()],
    ],
    ids=["twice", "transposed", "sliced", "inputs", "weights", "detached"],
)
@pytest.mark.parametrize("scope", ["none", "full_iteration"])
def test_no_two_outputs_share_memory(
    make: Callable[..., list[Tensor]], scope: str, device: torch.device
) -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        y = x * 2
        return model(x), make(model, x, y)

    step, model, _, next_batch = make_step(device, scope=scope, loss_fn=loss_fn)
    kept: list[Tensor] = []
    for _ in range(7):
        _, outputs = step(*next_batch())
        kept.extend(outputs)
    inside = [*model.parameters(), *torch.utils._pytree.tree_leaves(step._inputs.args)]  # type: ignore[union-attr]
    places = [tensor.untyped_storage().data_ptr() for tensor in (*kept, *inside)]
    numel = [tensor.untyped_storage().nbytes() for tensor in (*kept, *inside)]
    assert all(numel)
    assert len(set(places)) == len(places)


def test_phases_follow_one_another(device: torch.device) -> None:
    step, _, _, next_batch = make_step(device, warmup_steps=2)
    seen = []
    for _ in range(4):
        seen.append(step.phase)
        step(*next_batch())
    assert seen == [Phase.WARMUP, Phase.WARMUP, Phase.WARMUP, Phase.REPLAY]
    step.close()
    assert step.phase is Phase.CLOSED


def test_scope_none_never_captures(device: torch.device) -> None:
    step, _, _, next_batch = make_step(device, scope="none")
    for _ in range(6):
        assert step.phase is Phase.EAGER
        step(*next_batch())
    assert step.report().num_captures == 0
    assert step.report().num_calls == {"eager": 6}


def test_closing_is_idempotent_and_final(device: torch.device) -> None:
    for num_calls in (0, 1, 4, 6):
        step, model, _, next_batch = make_step(device)
        for _ in range(num_calls):
            step(*next_batch())
        step.close()
        step.close()
        with pytest.raises(graphfsdp.PhaseError, match="closed.*capture again"):
            step(*next_batch())
        assert step.report().phase == "closed"
        assert not any(param._post_accumulate_grad_hooks for param in model.parameters())


def test_leaving_the_context_closes_even_on_an_error(device: torch.device) -> None:
    step, *_ = make_step(device)
    with pytest.raises(KeyError), step as entered:
        assert entered is step
        raise KeyError
    assert step.phase is Phase.CLOSED


def test_the_model_trains_on_by_hand_after_closing(device: torch.device) -> None:
    step, model, optim, next_batch = make_step(device)
    for _ in range(6):
        step(*next_batch())
    step.close()
    before = [param.detach().clone() for param in model.parameters()]
    optim.zero_grad()
    assert all(param.grad is None for param in model.parameters())
    model(*next_batch()).backward()
    optim.step()
    assert not any(
        torch.equal(param, old) for param, old in zip(model.parameters(), before, strict=True)
    )


def test_the_model_can_be_captured_again_after_closing(device: torch.device) -> None:
    def train(*scopes: str) -> dict[str, Tensor]:
        step, model, optim, next_batch = make_step(device, scope=scopes[0])
        for scope in scopes:
            if step.phase is Phase.CLOSED:
                step = graphfsdp.capture(model, optim, scope=scope)
            for _ in range(7):
                step(*next_batch())
            step.close()
        return snapshot(model, optim)

    expected = train("none", "none", "none")
    assert_same_state(expected, train("full_iteration", "forward_backward", "full_iteration"))


def test_two_captured_models_do_not_disturb_each_other(device: torch.device) -> None:
    def train(scope: str) -> list[Tensor]:
        first, _, _, next_batch = make_step(device, scope=scope)
        second, _, _, next_ids = make_step(device, "gpt", scope=scope)
        return [step for _ in range(9) for step in (first(*next_batch()), second(*next_ids()))]

    for one, other in zip(train("none"), train("full_iteration"), strict=True):
        assert torch.equal(one, other)


def test_evaluation_between_replays_disturbs_nothing(device: torch.device) -> None:
    def train(scope: str) -> dict[str, Tensor]:
        step, model, optim, next_batch = make_step(device, "conv_net", scope=scope)
        for _ in range(8):
            step(*next_batch())
            model.eval()
            with torch.no_grad():
                model(*next_batch())
            model.train()
        return snapshot(model, optim)

    assert_same_state(train("none"), train("full_iteration"))


def test_seeding_between_replays_reaches_them(device: torch.device) -> None:
    def losses(scope: str) -> list[Tensor]:
        step, _, _, next_batch = make_step(device, scope=scope)
        found = []
        for index in range(10):
            torch.manual_seed(index // 2)
            found.append(step(*next_batch()))
        return found

    for one, other in zip(losses("none"), losses("full_iteration"), strict=True):
        assert torch.equal(one, other)


def test_a_replay_runs_no_python_of_model_autograd_or_optimizer(device: torch.device) -> None:
    step, _, _, next_batch = make_step(device, "gpt", max_grad_norm=1.0)
    for _ in range(5):
        step(*next_batch())
    batch = next_batch()
    seen: set[str] = set()

    def hook(frame: FrameType, event: str, arg: object) -> None:
        if event == "call":
            seen.add(f"{frame.f_code.co_filename}:{frame.f_code.co_qualname}")

    sys.setprofile(hook)
    try:
        step(*batch)
    finally:
        sys.setprofile(None)
    assert any(name.endswith("step.py:CapturedStep._replay") for name in seen)
    engine = ("/torch/autograd/__init__.py", "/torch/autograd/function.py")
    model_and_optimizer = ("/torch/nn/", "/torch/optim/", "zoo.py", "FusedAdam.step")
    forbidden = (*engine, *model_and_optimizer, "iteration.py")
    assert not [name for name in seen if any(part in name for part in forbidden)]


@pytest.mark.parametrize("optimizer", ["fused_adam", "adamw", "sgd"])
def test_a_replay_reads_nothing_on_the_host(optimizer: str, device: torch.device) -> None:
    step, _, optim, next_batch = make_step(device, "gpt", optimizer, max_grad_norm=1.0)
    for _ in range(5):
        step(*next_batch())
    for index in range(3):
        batch = next_batch()
        set_lr(optim, 0.01 / (index + 1))
        with no_host_sync(device):
            step(*batch)


def test_hooks_of_optimizer_and_parameters_run_only_until_the_capture(device: torch.device) -> None:
    step, model, optim, next_batch = make_step(device)
    counts = {"step": 0, "gradient": 0}

    def on_step(*args: object) -> None:
        counts["step"] += 1

    def on_gradient(grad: Tensor) -> None:
        counts["gradient"] += 1

    optim.register_step_pre_hook(on_step)
    next(model.parameters()).register_hook(on_gradient)
    for _ in range(8):
        step(*next_batch())
    assert counts == {"step": 4, "gradient": 4}


@pytest.mark.parametrize("value", [0.01, 1e9])
def test_grad_norm_is_that_of_the_gradients_before_clipping(
    value: float, device: torch.device
) -> None:
    step, model, _, next_batch = make_step(device, max_grad_norm=float("inf"))
    assert step.grad_norm is None
    norms: list[Tensor] = []
    for _ in range(7):
        step(*next_batch())
        assert step.grad_norm is not None
        norms.append(step.grad_norm)
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        assert torch.equal(norms[-1], torch.nn.utils.get_total_norm(grads, foreach=True))
    clipped, _, _, next_batch = make_step(device, max_grad_norm=value)
    clipped(*next_batch())
    assert clipped.grad_norm is not None
    assert torch.equal(clipped.grad_norm, norms[0])
    assert len({float(norm) for norm in norms}) == len(norms)


def test_an_infinite_norm_does_not_clip(device: torch.device) -> None:
    expected = run(ZOO["mlp"], "full_iteration", device)
    got = run(ZOO["mlp"], "full_iteration", device, max_grad_norm=float("inf"))
    for state in got.snapshots:
        del state["norm of the gradients"]
    assert_same_run(expected, got)


def test_without_max_grad_norm_there_is_no_norm(device: torch.device) -> None:
    step, _, _, next_batch = make_step(device)
    for _ in range(6):
        step(*next_batch())
    assert step.grad_norm is None


@pytest.mark.parametrize(
    "make",
    [
        lambda params: torch.optim.Adagrad(params, lr=0.01),
        lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
        lambda params: torch.optim.AdamW(params, lr=0.01, foreach=False),
        lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.5, centered=True),
        lambda params: torch.optim.NAdam(params, lr=0.01),
        lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, nesterov=True),
    ],
    ids=["adagrad", "adamw_foreach", "adamw_loop", "rmsprop", "nadam", "sgd_nesterov"],
)
def test_forward_backward_leaves_any_optimizer_eager(
    make: Callable[[Any], torch.optim.Optimizer], device: torch.device
) -> None:
    def train(scope: str) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = GPT().to(device)
        optim = make(model.parameters())
        generator = torch.Generator().manual_seed(1)
        with graphfsdp.capture(model, optim, scope=scope, max_grad_norm=0.1) as step:
            for index in range(14):
                set_lr(optim, 0.02 / (1 + index))
                step(*ZOO["gpt"].batch(generator).to(device).args)
            assert step.report().num_captures == (scope != "none")
        return snapshot(model, optim)

    assert_same_state(train("none"), train("forward_backward"))


def test_microbatches_average_gradients_and_losses(device: torch.device) -> None:
    """Equal parts of a mean have the whole's mean; a sum has another order of additions."""
    model = Squared(nn.Linear(WIDTH, 3)).to(device)
    x = torch.randn(12, WIDTH, device=device)
    grads = {}
    for microbatches in (1, 2, 3, 4):
        optim = FusedAdam(model.parameters(), lr=0.0)
        step = graphfsdp.capture(model, optim, microbatches=microbatches, warmup_steps=1)
        for _ in range(4):
            loss = step(x)
        grads[microbatches] = [param.grad.clone() for param in model.parameters()]  # type: ignore[union-attr]
        torch.testing.assert_close(loss, model(x).detach())
        step.close()
    for other in (2, 3, 4):
        torch.testing.assert_close(grads[1], grads[other], rtol=1e-5, atol=1e-7)


def test_other_results_of_microbatches_are_stacked(device: torch.device) -> None:
    step, model, _, next_batch = make_step(device, "extras", microbatches=3)
    for _ in range(6):
        (x,) = next_batch()
        with torch.no_grad():
            parts = [loss_with_extras(model, part) for part in x.chunk(3)]
        _, extras = step(x)
        for name in ("input", "transposed", "correct"):
            assert torch.equal(extras[name], torch.stack([part[1][name] for part in parts])), name


def test_keyword_arguments_may_come_in_any_order(device: torch.device) -> None:
    model = Squared(nn.Linear(WIDTH, 3)).to(device)

    def loss_fn(model: nn.Module, *, x: Tensor, weight: Tensor) -> Tensor:
        loss: Tensor = model(x) * weight
        return loss

    step = graphfsdp.capture(model, FusedAdam(model.parameters()), loss_fn=loss_fn)
    x, weight = torch.randn(4, WIDTH, device=device), torch.tensor(2.0, device=device)
    for _ in range(5):
        step(x=x, weight=weight)
    expected = 3.0 * model(x).detach()
    assert torch.equal(step(weight=torch.tensor(3.0, device=device), x=x), expected)


def test_dictionaries_in_a_batch_may_have_their_keys_in_any_order(device: torch.device) -> None:
    model = Squared(nn.Linear(WIDTH, 3)).to(device)

    def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = model(batch["x"]) * batch["weight"]
        return loss

    step = graphfsdp.capture(model, FusedAdam(model.parameters()), loss_fn=loss_fn)
    x, weight = torch.randn(4, WIDTH, device=device), torch.tensor(2.0, device=device)
    for _ in range(5):
        step({"x": x, "weight": weight})
    expected = 3.0 * model(x).detach()
    assert torch.equal(step({"weight": torch.tensor(3.0, device=device), "x": x}), expected)


def test_the_batch_is_moved_to_the_models_device(device: torch.device) -> None:
    """Batches on the CPU train as batches on the model's device do."""
    case = ZOO["mlp"]
    moved = run(case, "full_iteration", device)
    torch.manual_seed(0)
    model = case.make().to(device)
    optim = make_optimizer("fused_adam", model.parameters(), device)
    generator = torch.Generator().manual_seed(1)
    step = graphfsdp.capture(model, optim)
    for index, outputs in enumerate(moved.outputs):
        set_lr(optim, 0.02 / (1 + index))
        torch.rand((), device=device)
        (x,) = case.batch(generator).args
        loss = step(x)
        x.fill_(float("nan"))  # the caller's memory is free as soon as the call returns
        assert torch.equal(loss, outputs[0])


def test_parameters_that_only_the_optimizer_knows_are_trained(device: torch.device) -> None:
    def train(scope: str) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        model = Squared(nn.Linear(WIDTH, 3)).to(device)
        outside = nn.Parameter(torch.ones(3, device=device))
        groups = [{"params": list(model.parameters())}, {"params": [outside]}]
        optim = FusedAdam(groups, lr=0.01)

        def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
            loss: Tensor = model(x) + (outside * x[:, :3]).square().mean()
            return loss

        step = graphfsdp.capture(model, optim, loss_fn=loss_fn, scope=scope)
        for index in range(8):
            step(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(index)).to(device))
        assert outside.grad is not None
        return outside.detach(), outside.grad

    expected, got = train("none"), train("full_iteration")
    assert torch.equal(expected[0], got[0])
    assert torch.equal(expected[1], got[1])
    assert not torch.equal(got[0], torch.ones(3, device=device))


def test_an_error_of_the_model_passes_through_and_the_step_goes_on(device: torch.device) -> None:
    """In every phase: warm-up, capture, and (as nothing of the model runs) never in a replay."""
    calls = {"count": 0}

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        calls["count"] += 1
        if calls["count"] in (2, 5):
            raise KeyError(calls["count"])
        loss: Tensor = model(x)
        return loss

    step, model, optim, next_batch = make_step(device, loss_fn=loss_fn)
    reference, twin, twin_optim, _ = make_step(device, scope="none")
    torch.manual_seed(0)
    states = []
    for _ in range(10):
        batch = next_batch()
        before = snapshot(model, optim)
        try:
            step(*batch)
        except KeyError:
            assert_same_state(
                {k: v for k, v in before.items() if "grad" not in k},
                {k: v for k, v in snapshot(model, optim).items() if "grad" not in k},
            )
        else:
            states.append((batch, snapshot(model, optim)))
    assert step.phase is Phase.REPLAY
    torch.manual_seed(0)
    for batch, state in states:
        reference(*batch)
        assert_same_state(state, snapshot(twin, twin_optim))


def test_a_step_that_calls_itself_while_it_records_is_refused(device: torch.device) -> None:
    calls = {"count": 0}

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        calls["count"] += 1
        if calls["count"] == 4:
            step(x)
        loss: Tensor = model(x)
        return loss

    step, _, _, next_batch = make_step(device, loss_fn=loss_fn)
    for _ in range(3):
        step(*next_batch())
    with pytest.raises(graphfsdp.PhaseError, match="must not call the step"):
        step(*next_batch())
    step(*next_batch())
    assert step.phase is Phase.REPLAY


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scope": "everything"}, "'everything'.*'none', 'forward_backward', 'full_iteration'"),
        ({"warmup_steps": 0}, "warmup_steps.*at least 1, got 0"),
        ({"warmup_steps": -1, "scope": "none"}, "warmup_steps.*got -1"),
        ({"warmup_steps": True}, "warmup_steps.*got True"),
        ({"warmup_steps": 2.0}, r"warmup_steps.*got 2\.0"),
        ({"microbatches": 0}, "microbatches.*at least 1, got 0"),
        ({"max_grad_norm": 0.0}, r"max_grad_norm.*positive.*got 0\.0"),
        ({"max_grad_norm": float("nan")}, "max_grad_norm.*got nan"),
        ({"backend": "tpu"}, "'tpu'.*'auto', 'cuda' or 'cpu'"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    model = mlp_of_one()
    with pytest.raises(graphfsdp.ConfigError, match=message):
        graphfsdp.capture(model, FusedAdam(model.parameters()), **options)


def mlp_of_one() -> nn.Module:
    return Squared(nn.Linear(1, 1))


def test_a_backend_for_another_device_is_refused(device: torch.device) -> None:
    model = mlp_of_one().to(device)
    other = "cuda" if device.type == "cpu" else "cpu"
    with pytest.raises(graphfsdp.ConfigError, match=f"'{other}' backend.*Remedy"):
        graphfsdp.capture(model, FusedAdam(model.parameters()), backend=other)


def test_what_is_no_model_or_no_optimizer_is_refused() -> None:
    model = mlp_of_one()
    with pytest.raises(graphfsdp.ConfigError, match=r"model must be.*got function"):
        graphfsdp.capture(mlp_of_one, FusedAdam(model.parameters()))  # type: ignore[arg-type]
    with pytest.raises(graphfsdp.ConfigError, match=r"optimizer must be.*got Linear"):
        graphfsdp.capture(model, nn.Linear(1, 1))  # type: ignore[arg-type]
    frozen = mlp_of_one().requires_grad_(False)
    with pytest.raises(graphfsdp.ConfigError, match="nothing to train"):
        graphfsdp.capture(frozen, FusedAdam(frozen.parameters()))


def test_a_model_on_two_devices_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    optim = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with pytest.raises(graphfsdp.ConfigError, match=r"'0.weight' on cpu, '1.weight' on meta"):
        graphfsdp.capture(model, optim)


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (lambda model, x: 1.0, "the loss is a float"),
        (lambda model, x: None, "the loss is a NoneType"),
        (lambda model, x: (), "the loss is a tuple"),
        (lambda model, x: {"loss": model(x)}, "the loss is a dict"),
        (lambda model, x: model.layers(x), r"a tensor of shape \(12, 3\)"),
        (lambda model, x: model(x).detach(), "no trainable parameter contributed"),
        (lambda model, x: (model(x), 3), "returned a int beside the loss"),
        (lambda model, x: (model(x), {"name": "x"}), "returned a str beside the loss"),
    ],
)
def test_a_loss_that_cannot_be_trained_on_is_refused(
    loss_fn: Callable[..., Any], message: str, device: torch.device
) -> None:
    step, model, optim, next_batch = make_step(device, loss_fn=loss_fn)
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(graphfsdp.InvalidLossError, match=message):
        step(*next_batch())
    assert all(
        torch.equal(param, old) for param, old in zip(model.parameters(), before, strict=True)
    )
    assert not optim.state


def test_a_loss_of_one_element_need_not_be_0_dimensional(device: torch.device) -> None:
    case = ZOO["mlp"]
    wide = Case(case.make, case.batch, lambda model, x: model(x).view(1, 1))
    expected, got = run(wide, "none", device), run(wide, "full_iteration", device)
    assert got.outputs[-1][0].shape == (1, 1)
    assert_same_run(expected, got)


def test_the_default_loss_takes_the_loss_of_an_output(device: torch.device) -> None:
    torch.manual_seed(0)
    model = WithOutput().to(device)
    step = graphfsdp.capture(model, FusedAdam(model.parameters()))
    for _ in range(6):
        x = torch.randn(4, WIDTH, device=device)
        expected = model(x).loss.detach()
        assert torch.equal(step(x), expected)
