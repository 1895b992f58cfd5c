"""The CPU backend: what a recording keeps, drops and writes, one operator at a time."""

import sys
from collections.abc import Callable
from types import FrameType

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

import graphfsdp
from cpu_recording import record
from graphfsdp.optim import FusedAdam
from zoo import ZOO

CPU = torch.device("cpu")


def test_what_nobody_reads_is_not_in_the_program() -> None:
    x = torch.ones(3)

    def iterate() -> list[Tensor]:
        unused = x.sin()
        unused.cos().add_(1)
        return [x.exp()]

    graph, _ = record(iterate)
    assert graph.facts.op_counts == {"aten.exp.default": 1}
    assert graph.facts.num_ops == 4


def test_views_of_existing_memory_cost_nothing_in_a_replay() -> None:
    x = torch.randn(4, 6)
    graph, _ = record(lambda: [x.t()[1:3].unsqueeze(0).expand(2, 2, 4).sum()])
    assert graph.facts.op_counts == {"aten.sum.default": 1}
    x.fill_(1)
    assert float(graph.replay()[0]) == 16


KEPT: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda y: y,
    "view": lambda y: y[:, 1:],
    "transposed": lambda y: y.t(),
    "written_later": lambda y: y.add_(1),
    "view_of_written": lambda y: y.mul_(3)[0],
    "complex": lambda y: torch.complex(y, y).conj(),
    "imaginary": lambda y: torch.complex(y, y * 2).conj().imag,
    "other_dtype": lambda y: y.view(torch.int32),
    "from_split": lambda y: y.split(2, dim=1)[1],
    "from_unbind": lambda y: y.unbind(0)[2],
}


@pytest.mark.parametrize("name", KEPT)
def test_what_outlives_the_iteration_is_updated_by_replays(name: str) -> None:
    class Holder(nn.Module):
        kept: Tensor

    holder = Holder()
    x = torch.randn(3, 4)

    def iterate() -> list[Tensor]:
        y = x * 2
        holder.kept = KEPT[name](y)
        return [y.sum()]

    graph, _ = record(iterate, holder)
    kept = holder.kept
    assert graph.facts.num_escapes == 1
    for _ in range(3):
        x.normal_()
        graph.replay()
        assert holder.kept is kept
        seen = kept.clone()
        expected = KEPT[name](x * 2)
        assert torch.equal(seen.resolve_conj(), expected.resolve_conj())


def test_nothing_is_left_installed_after_a_recording() -> None:
    def fail() -> list[Tensor]:
        torch.ones(2).sum().item()
        raise KeyError

    seen: list[str] = []

    def mine(frame: FrameType, event: str, arg: object) -> None:
        seen.append(event)

    for iterate in (lambda: [torch.ones(2)], fail):
        sys.setprofile(mine)
        try:
            record(iterate)
        except KeyError:
            pass
        finally:
            left = sys.getprofile()
            sys.setprofile(None)
        assert left is mine
        assert _get_current_dispatch_mode() is None
        assert not torch.overrides._get_current_function_mode_stack()
        assert not torch.nn.modules.module._global_forward_hooks
        assert not torch.nn.modules.module._global_forward_pre_hooks
    assert "call" in seen, "the hook that was there did not go on being called"


def test_a_recording_under_cprofile_works() -> None:
    import cProfile

    profile = cProfile.Profile()
    profile.enable()
    graph, _ = record(lambda: [torch.ones(2) * 2])
    graph.replay()
    profile.disable()
    assert any(entry.code == "not a name" or entry.callcount for entry in profile.getstats())


def test_replay_does_not_depend_on_the_surrounding_modes() -> None:
    case = ZOO["mlp"]

    def losses(scope: str) -> list[Tensor]:
        torch.manual_seed(0)
        model = case.make()
        step = graphfsdp.capture(model, FusedAdam(model.parameters()), scope=scope)
        generator = torch.Generator().manual_seed(0)
        found = []
        for index in range(9):
            with torch.set_grad_enabled(index % 2 == 0):
                found.append(step(*case.batch(generator).args))
        return found

    for one, other in zip(losses("none"), losses("full_iteration"), strict=True):
        assert torch.equal(one, other)


def test_a_scalar_loss_is_not_computed_in_memory_of_another_size(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Torch warns on stderr when an out= form resizes what it is given."""
    x, y = torch.rand(256, 1, requires_grad=True), torch.rand(256, 1)

    def iterate() -> list[Tensor]:
        loss = nn.functional.mse_loss(x * 2, y)
        return [(loss * 3).detach()]

    graph, (expected,) = record(iterate)
    assert torch.equal(graph.replay()[0], expected)
    assert "resized" not in capfd.readouterr().err
