"""Every surprise of a captured step, silent ones first, each with its test.

Each test asserts what happens now; a comment says what one would expect. When a check is added,
the test moves to the second table and asserts the error.

Silent:

| surprise                                                 | test                                  |
|----------------------------------------------------------|---------------------------------------|
| print and logging in forward fall silent                 | side_effects_happen_until_the_capture |
| a list that grows by one per call stops growing          | a_log_of_activations_stops_growing    |
| a tensor that is held from the recorded iteration changes| a_kept_activation_is_overwritten      |
| .grad holds clipped or unclipped values, by optimizer    | gradients_after_clipping_differ       |
| the model writes into a copy of the batch                | the_batch_is_not_written              |
| outputs are snapshots, not views of weights              | outputs_do_not_follow_the_weights     |
| the last batch's values live on in the static inputs     | static_inputs_keep_the_last_batch     |
| a gradient hook's clipping is recorded, its Python is not| gradient_hooks_are_recorded           |
| the weights may be read while a CUDA replay still runs   | (CUDA orders them on the stream)      |

Loud, each silent elsewhere (tests/test_guarded_footguns.py):

| surprise                                              | test                                     |
|-------------------------------------------------------|------------------------------------------|
| a batch of 1 into a static input of 8                 | a_batch_of_one_raises                    |
| a float weight decay of torch's fused optimizers      | a_float_weight_decay_of_torch_is_guarded |
| the loss of each call is the same tensor              | losses_are_distinct                      |
| zero_grad() cuts the graph's gradients off            | zero_grad_does_no_harm                   |
| state that is replaced instead of updated             | replaced_state_raises                    |
| backward through a graph made before a replay         | an_old_graph_raises                      |
| retry of a swallowed host read                        | a_swallowed_read_raises                  |
| parameters moved by .data, .to() or assign=True       | moved_parameters_raise                   |
| a Python number that the model counts up              | a_python_counter_raises                  |
| numbers from NumPy's generators                       | numpy_randomness_raises                  |
| an `if` on Python state that changes later            | a_branch_on_python_state_raises          |
| a global or a closure that changes                    | changed_globals_raise                    |
| a list that the loss function reads                   | a_changed_list_raises                    |
| numbers from Python's generators                      | python_randomness_raises                 |
| model.eval() after the capture                        | training_mode_raises                     |
| a Dropout whose p is changed                          | module_attributes_raise                  |
| requires_grad_(False) after the capture               | freezing_after_the_capture_raises        |
| a hook that is registered after the capture           | late_hooks_raise                         |
| a module that replaces another                        | a_replaced_module_raises                 |
| an autocast that ends after the capture               | autocast_around_the_call_raises          |
"""

import pathlib
import re

import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from footgun_net import NUM_EAGER, Net, inputs, start
from graphfsdp.optim import FusedAdam


def test_side_effects_happen_until_the_capture(
    device: torch.device, capsys: pytest.CaptureFixture[str]
) -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        print("forward of", tuple(x.shape))
        loss: Tensor = model(x)
        return loss

    step, *_ = start(device, loss_fn)
    for _ in range(8):
        step(inputs(device))
    # Intuitive: eight lines.
    assert capsys.readouterr().out == "forward of (8, 4)\n" * NUM_EAGER


def test_a_log_of_activations_stops_growing(device: torch.device) -> None:
    log: list[Tensor] = []

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = model(x)
        log.append(x.detach().sum())
        return loss

    step, *_ = start(device, loss_fn)
    for index in range(8):
        step(inputs(device) + index)
    # Intuitive: eight entries.
    assert len(log) == NUM_EAGER
    # The entry of the recording follows the replays, the ones before do not.
    total = float(inputs(device).sum())
    assert float(log[0]) == pytest.approx(total)
    assert float(log[3]) == pytest.approx(total + 32 * 7)


def test_a_kept_activation_is_overwritten(device: torch.device) -> None:
    kept: dict[str, Tensor] = {}

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        kept["mean"] = x.mean()
        loss: Tensor = model(x)
        return loss

    step, *_ = start(device, loss_fn)
    seen = []
    for index in range(8):
        step(torch.full((8, 4), float(index), device=device))
        seen.append(kept["mean"])
    # Intuitive: 0 to 7. From the recording on it is one tensor; clone what is to be kept, or
    # return it from loss_fn.
    assert [float(mean) for mean in seen] == [0, 1, 2, 7, 7, 7, 7, 7]


def test_gradients_after_clipping_differ(device: torch.device) -> None:
    """FusedAdam scales while it reads; torch's optimizers need the scaled gradient in .grad."""
    norms = {}
    for name in ("fused_adam", "sgd"):
        model = Net().to(device)
        optim: torch.optim.Optimizer = FusedAdam(model.parameters())
        if name == "sgd":
            optim = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        step = graphfsdp.capture(model, optim, max_grad_norm=0.01)
        for _ in range(6):
            step(inputs(device))
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        norms[name] = float(torch.nn.utils.get_total_norm(grads))
        assert step.grad_norm is not None
        assert float(step.grad_norm) > 0.01
    # Intuitive: the same. step.grad_norm is the norm before clipping with both.
    assert norms["sgd"] == pytest.approx(0.01, rel=1e-3)
    assert norms["fused_adam"] > 0.02


def test_the_batch_is_not_written(device: torch.device) -> None:
    step, *_ = start(device, lambda model, x: model(x.mul_(2)))
    x = inputs(device)
    for _ in range(6):
        step(x)
    # As by hand it would be: x doubled in each call.
    assert torch.equal(x, inputs(device))


def test_outputs_do_not_follow_the_weights(device: torch.device) -> None:
    step, model, _ = start(device, lambda model, x: (model(x), model.layer.weight), lr=0.1)
    for _ in range(6):
        _, weight = step(inputs(device))
    # By hand one would hold the parameter itself. This is its value in the forward pass.
    assert not torch.equal(weight, model.layer.weight)


def test_static_inputs_keep_the_last_batch(device: torch.device) -> None:
    step, *_ = start(device)
    x = inputs(device)
    step(x)
    assert step._runner._recordings.latest is not None
    x.zero_()
    assert torch.equal(step._runner._recordings.latest.inputs.args[0], inputs(device))
    step.close()
    assert step._runner._recordings.latest is None


def test_gradient_hooks_are_recorded(device: torch.device) -> None:
    calls: list[None] = []
    step, model, _ = start(device)

    def halve(grad: Tensor) -> Tensor:
        calls.append(None)
        return grad / 2

    model.layer.weight.register_hook(halve)
    for _ in range(8):
        step(inputs(device))
    expected = torch.autograd.grad(model(inputs(device)), model.layer.weight)[0]
    # The operators of the hook are in the graph, its Python ran four times.
    assert model.layer.weight.grad is not None
    torch.testing.assert_close(model.layer.weight.grad, expected)
    assert len(calls) == NUM_EAGER + 1


def test_the_tables_list_every_test() -> None:
    assert __doc__ is not None
    loud = pathlib.Path(__file__).parents[1] / "guards" / "test_guarded_footguns.py"
    both = pathlib.Path(__file__).read_text() + loud.read_text()
    names = set(re.findall(r'^(?:def test_|    "(?=\w+": \())(\w+)', both, re.MULTILINE))
    listed = {line.split("|")[2].strip() for line in __doc__.splitlines() if line.count("|") == 3}
    helpers = {
        "a_change_after_the_capture_raises",
        "the_tables_list_every_test",
        "a_counter_in_a_buffer_counts",
        "a_changed_weight_is_seen_when_it_is_written_in_place",
        "autocast_around_the_loop_uses_no_stale_weights",
    }
    assert names - helpers == {name for name in listed if name.replace("_", "").isalnum()} - {
        "test"
    }
