"""Recomputation with dropout: bit for bit the run without it, captured and eagerly."""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import graphfsdp
from helpers import Batch, Case, assert_same_run, check_against_eager, run

WIDTH = 16
Wrap = Callable[[nn.Module, Tensor], Tensor]


def plain(block: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = block(x)
    return result


def ours(block: nn.Module, x: Tensor) -> Tensor:
    return graphfsdp.recompute(plain, block, x)


def nested(block: nn.Module, x: Tensor) -> Tensor:
    return graphfsdp.recompute(ours, block, x)


def torch_with_our_contexts(block: nn.Module, x: Tensor) -> Tensor:
    result = checkpoint(
        block,
        x,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=graphfsdp.recompute_contexts,
    )
    assert isinstance(result, Tensor)
    return result


class Noise(nn.Module):
    """Draws in every way there is: out of place and written to later, in place, two results."""

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand_like(x).mul_(0.1).add_(torch.randn(x.shape[-1], device=x.device))
        scores = torch.empty_like(x).exponential_().log()
        chosen = torch.nn.functional.gumbel_softmax(x + scores, dim=-1)
        picked = torch.multinomial(x.detach().softmax(dim=-1), 2)
        rrelu: Tensor = nn.functional.rrelu(x, training=True)
        return rrelu + noise + chosen + x.gather(1, picked).sum(dim=1, keepdim=True)


class Counter(nn.Module):
    """Writes its own buffer, as a moving average does."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.total.lerp_(x.detach().mean(dim=0), 0.1)
        return x - self.total


class Blocks(nn.Module):
    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        self.wrap = wrap
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(WIDTH, WIDTH),
                nn.BatchNorm1d(WIDTH),
                nn.ReLU(inplace=True),
                nn.Dropout(0.3),
                Counter(),
                Noise(),
                nn.AlphaDropout(0.2),
            )
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.wrap(block, x)
            x = x + torch.rand_like(x)  # drawn between two recomputed calls
        return x.square().mean()


def case(wrap: Wrap) -> Case:
    def batch(generator: torch.Generator) -> Batch:
        return Batch((torch.randn(12, WIDTH, generator=generator),))

    return Case(lambda: Blocks(wrap), batch)


@pytest.mark.parametrize(
    ("wrap", "microbatches"), [(ours, 1), (ours, 3), (nested, 1), (torch_with_our_contexts, 1)]
)
def test_a_captured_run_with_recomputation_equals_the_eager_one_without(
    wrap: Wrap, microbatches: int, device: torch.device
) -> None:
    got = check_against_eager(case(wrap), device, microbatches=microbatches)
    assert_same_run(run(case(plain), "none", device, microbatches=microbatches), got)


def attention(query: Tensor, *, heads: int, dropout: float) -> Tensor:
    query = query.unflatten(-1, (heads, -1)).transpose(1, 2)
    return nn.functional.scaled_dot_product_attention(query, query, query, dropout_p=dropout)


def assert_same_gradient(function: Callable[..., Tensor], x: Tensor, **options: Any) -> None:
    gradients: list[Tensor] = []
    for call in (function, functools.partial(graphfsdp.recompute, function)):
        torch.manual_seed(0)
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            out = call(x * 2, **options)
        gradients += torch.autograd.grad(out.float().square().sum(), x)
    assert torch.equal(*gradients)


def test_attention_dropout_keyword_arguments_and_autocast(device: torch.device) -> None:
    x = torch.randn(2, 5, 8, device=device, requires_grad=True)
    assert_same_gradient(attention, x, heads=2, dropout=0.5)


def test_a_random_operator_may_return_numbers_beside_tensors(device: torch.device) -> None:
    """As CUDA's flash attention does: its lengths are no numbers of arguments."""

    def function(x: Tensor) -> Tensor:
        noise, width, zero = torch.ops.graphfsdp_test.draw(x.detach())
        assert (width, zero) == (3, 0)
        out: Tensor = (x * noise).square() * width
        return out

    with torch.library._scoped_library("graphfsdp_test", "FRAGMENT") as library:
        library.define(
            "draw(Tensor x) -> (Tensor, int, int)", tags=(torch.Tag.nondeterministic_seeded,)
        )
        library.impl("draw", lambda x: (torch.rand_like(x), 3, 0), "CompositeExplicitAutograd")
        assert_same_gradient(function, torch.randn(8, device=device, requires_grad=True))


def test_two_backward_passes_repeat_the_same_draws(device: torch.device) -> None:
    x = torch.randn(64, device=device, requires_grad=True)
    out = graphfsdp.recompute(lambda y: torch.rand_like(y).mul_(2) * y * y, x)
    first = torch.autograd.grad(out.sum(), x, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(out.sum(), x)[0])


def test_only_the_mask_is_kept(device: torch.device) -> None:
    """A byte per element, against twelve for what dropout and gelu keep without recomputation."""
    numel = 1 << 16
    sizes: list[int] = []

    def function(x: Tensor) -> Tensor:
        return nn.functional.dropout(nn.functional.gelu(x).exp(), 0.5)

    x = torch.randn(numel, device=device, requires_grad=True)
    first, _ = graphfsdp.recompute_contexts()
    with first:
        function(x)
    for drawn in first._drawn:  # type: ignore[attr-defined]
        kept = torch.utils._pytree.tree_leaves([drawn.written, drawn.result])
        sizes += [item.nbytes for item in kept if isinstance(item, Tensor)]
    # CUDA's fused kernel has two results, and the other one cannot be told from the mask.
    assert sum(sizes) == (numel if device.type == "cpu" else 5 * numel)


def test_what_was_kept_goes_with_the_graph(device: torch.device) -> None:
    x = torch.randn(64, device=device, requires_grad=True)
    seen: list[weakref.ref[Tensor]] = []

    def function(x: Tensor) -> Tensor:
        noise = torch.rand_like(x)
        seen.append(weakref.ref(noise.untyped_storage()))  # type: ignore[arg-type]
        return x * noise

    out = graphfsdp.recompute(function, x)
    out.sum().backward()
    del out
    assert seen
    assert seen[0]() is None


def test_a_function_that_draws_otherwise_the_second_time_is_named(device: torch.device) -> None:
    x = torch.randn(4, device=device, requires_grad=True)
    draws = iter((torch.rand_like, torch.randn_like))
    out = graphfsdp.recompute(lambda y: next(draws)(y) * y, x)
    with pytest.raises(graphfsdp.GraphFSDPError, match=r"aten.rand_like.*draws with aten.randn"):
        out.sum().backward()


def test_a_random_result_that_is_returned_may_be_overwritten(device: torch.device) -> None:
    x = torch.randn(64, device=device, requires_grad=True)

    def function(y: Tensor) -> tuple[Tensor, Tensor]:
        noise = torch.rand_like(y)
        return noise, (noise * y).square()

    noise, out = graphfsdp.recompute(function, x)
    expected = 2 * noise * noise * x.detach()
    noise.zero_()
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x)[0], expected)


def attends(dropout: float) -> Case:
    """Attention whose dropout is a number, which the operator's name does not tell."""

    def block(model: nn.Module, x: Tensor) -> Tensor:
        return attention(model(x)[None], heads=2, dropout=dropout)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        result = checkpoint(block, model, x, use_reentrant=False, preserve_rng_state=False)
        assert isinstance(result, Tensor)
        return result.square().mean()

    return Case(lambda: nn.Linear(WIDTH, WIDTH), case(plain).batch, loss_fn)


def test_attention_without_dropout_can_be_recomputed_by_torch(device: torch.device) -> None:
    check_against_eager(attends(0.0), device)
    with pytest.raises(graphfsdp.CaptureError, match="draws random numbers while"):
        run(attends(0.5), "full_iteration", device)
