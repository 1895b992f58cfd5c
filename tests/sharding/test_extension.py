"""Weights with fsdp_pre_all_gather and fsdp_post_all_gather: torchao's, as FSDP2 runs them."""

import importlib.util
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy as theirs  # noqa: N813
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.testing._internal.two_tensor import TwoTensor

import graphfsdp
from graphfsdp import CaptureError, ConfigError
from graphfsdp.config import MixedPrecisionPolicy
from helpers import NUM_STEPS
from ranks import on_ranks, rank_device
from sharding_helpers import (
    Training,
    adam,
    assert_equal_tensors,
    assert_same_training,
    hybrid_mesh,
    replayed_as_eager,
    train,
)

torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="torchao is not installed"
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)) for _ in range(2)
        )
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.head(x).square().mean()
        return out


def make(shard: Any = graphfsdp.fully_shard, kind: str = "float8", **options: Any) -> Any:
    torch.manual_seed(0)
    model = Net().to(rank_device())
    if kind == "float8":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        chosen = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
        convert_to_float8_training(model.blocks, config=chosen)
    else:
        from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig
        from torchao.quantization import quantize_
        from torchao.quantization.quantize_.common import KernelPreference

        config = MXFP8TrainingOpConfig(kernel_preference=KernelPreference.EMULATED)
        quantize_(model.blocks, config, filter_fn=lambda each, _: isinstance(each, nn.Linear))
    for block in model.blocks:
        shard(block, **options)
    return shard(model, **options)


def data(index: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * index + dist.get_rank())
    return torch.randn(64, 32, generator=generator).to(rank_device())


def trained(model: Any, scope: str, **options: Any) -> Training:
    options |= {"scope": scope, "data": [(data(index),) for index in range(NUM_STEPS)]}
    return train(model, adam(model), max_grad_norm=None, **options)


@torchao
@pytest.mark.parametrize("kind", ["float8", "mxfp8"])
@on_ranks("ranks2")
def test_losses_are_those_of_fsdp2(kind: str) -> None:
    dtypes: dict[str, Any] = {}
    if kind == "mxfp8":  # whose wrapper asks for the dtype to gather in
        dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    found = []
    for shard, policy in ((fsdp2, theirs), (graphfsdp.fully_shard, MixedPrecisionPolicy)):
        model = make(shard, kind, mp_policy=policy(**dtypes))
        optim = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses = []
        for index in range(5):
            loss = model(data(index))
            loss.backward()
            optim.step()
            optim.zero_grad()
            losses.append(loss.detach())
        found.append(losses)
    assert_equal_tensors(*found)


@torchao
@pytest.mark.parametrize(
    "options", [{}, {"strategy": "optim"}, {"strategy": "no_shard"}, {"kind": "mxfp8"}]
)
@on_ranks("ranks2")
def test_replays_equal_eager(options: dict[str, Any]) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    given = [(data(index),) for index in range(NUM_STEPS)]
    replayed_as_eager(
        lambda: make(mp_policy=policy, **options), data=given, max_grad_norm=None, microbatches=2
    )


@torchao
@on_ranks("ranks2")
def test_scales_are_computed_ahead_at_the_beginning_of_an_iteration() -> None:
    """After the optimizer they would be memory that another iteration has made, which is refused.

    One all-reduce for all weights, and the numbers of scales that each gather finds for itself.
    """
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    def iterate(model: Any, optimizer: Any, x: Tensor, *, at_first: bool) -> Tensor:
        if at_first:
            precompute_float8_dynamic_scale_for_fsdp(model)
        loss: Tensor = model(x)
        loss.backward()
        optimizer.step()
        if not at_first:
            precompute_float8_dynamic_scale_for_fsdp(model)
        return loss.detach()

    first, last = (partial(iterate, at_first=at_first) for at_first in (True, False))
    runs = [
        trained(make(), "full_iteration"),
        *(trained(make(), scope, iteration=first) for scope in ("none", "full_iteration")),
    ]
    assert_same_training(*runs[:2])
    assert_same_training(*runs[1:])
    with pytest.raises(CaptureError):
        trained(make(), "full_iteration", iteration=last)


@torchao
@on_ranks("ranks2")
def test_main_weights_are_saved_and_loaded_under_a_live_graph(tmp_path: Path) -> None:
    model, plain, fresh = make(), Net().to(rank_device()), make()
    for block in plain.blocks:
        graphfsdp.fully_shard(block)
    graphfsdp.fully_shard(plain)
    with graphfsdp.capture(model, adam(model)) as step:
        for index in range(6):
            step(data(index))
        graphfsdp.save(tmp_path / "step", model)
        for other in (plain, fresh):
            graphfsdp.load(tmp_path / "step", other)
            for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
                assert torch.equal(ours.full_tensor(), theirs.full_tensor())
        expected = step(data(7))
        step(data(8))
        graphfsdp.load(tmp_path / "step", model)
        assert torch.equal(step(data(7)), expected)
    assert torch.equal(fresh(data(7)), expected)


class Doubled(Tensor):
    """A wrapper of a test: gathers values and a column of ones, and gives twice the values."""

    held: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Doubled":
        make_one: Any = Tensor._make_wrapper_subclass
        made: Doubled = make_one(
            cls, inner.shape, dtype=inner.dtype, device=inner.device, strides=inner.stride()
        )
        made.held = inner
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def bare(value: Any) -> Any:
            return value.held if isinstance(value, Doubled) else value

        result = func(*map(bare, args), **{k: bare(v) for k, v in (kwargs or {}).items()})
        keeps = func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
        return cls(result) if keeps else result

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["held"], None

    @staticmethod
    def __tensor_unflatten__(parts: Any, context: None, shape: Any, stride: Any) -> "Doubled":
        return Doubled(parts["held"])

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        inner = self.held
        assert mesh.ndim == 1
        assert outer_size == (8, 3)
        assert outer_stride == (3, 1)
        assert isinstance(module, nn.Linear)
        assert mp_policy.param_dtype is torch.bfloat16
        return (inner.bfloat16(), inner.new_ones(inner.shape[0], 1)), inner.shape

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        values, ones = outputs
        assert (values.shape, ones.shape, metadata[1]) == ((8, 3), (8, 1), 3)
        made = (values * ones * 2).to(dtype)
        return made, (made,)


class Scaled(Doubled):
    """Wraps two tensors, as Transformer Engine's quantised parameters do."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["held", "held"], None


@pytest.mark.parametrize("options", [{}, {"outer_strategy": "optim"}])
@on_ranks("ranks4")
def test_several_tensors_are_gathered_on_two_mesh_axes(options: dict[str, Any]) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    linear: Any = nn.Linear(3, 8).to(rank_device())
    values = linear.weight.detach().clone()
    linear.weight = nn.Parameter(Doubled(values.clone()))
    graphfsdp.fully_shard(linear, hybrid_mesh(), mp_policy=policy, **options)
    linear(torch.ones(2, 3, device=rank_device())).sum().backward()
    assert linear.weight.grad is not None
    assert torch.equal(linear.weight.grad.full_tensor(), torch.full_like(values, 2.0))
    torch.optim.SGD(linear.parameters(), lr=1.0, foreach=False).step()
    linear.unshard()
    assert torch.equal(linear.weight, 2 * (values - 2).bfloat16())


@on_ranks("ranks2")
def test_what_cannot_be_cut_is_refused_by_name() -> None:
    linear = nn.Linear(3, 9)
    linear.weight = nn.Parameter(Doubled(linear.weight.detach()))
    with pytest.raises(ConfigError, match=r"'weight' of shape \(9, 3\) has fsdp_pre_all_gather"):
        graphfsdp.fully_shard(linear)
    linear = nn.Linear(3, 8)
    linear.weight = nn.Parameter(Scaled(linear.weight.detach()))
    with pytest.raises(ConfigError, match=r"is a Scaled, .* this one wraps \['held', 'held'\] on"):
        graphfsdp.fully_shard(linear)
    linear.weight = nn.Parameter(Doubled(torch.ones(8, 3)))
    with pytest.raises(ConfigError, match=r"is a Doubled, .* goes neither with CPUOffloadPolicy"):
        graphfsdp.fully_shard(linear, offload_policy=graphfsdp.CPUOffloadPolicy())


@on_ranks("ranks2")
def test_wrappers_that_do_not_say_what_is_gathered() -> None:
    """Quantised weights with their scales, say: the error's remedy keeps them, on each rank."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).to(rank_device())
    values = model[0].weight.detach()
    wrapped = nn.Parameter(TwoTensor(values, values.clone()), requires_grad=False)
    model[0].weight = wrapped
    with pytest.raises(ConfigError, match=r"'0\.weight' is a TwoTensor, which wraps \['a', 'b'\]"):
        graphfsdp.fully_shard(model)
    graphfsdp.fully_shard(model, ignored_params={wrapped})
    out = model(torch.ones(3, 4, device=rank_device()))
    assert type(out) is TwoTensor
    assert model[0].weight is wrapped
