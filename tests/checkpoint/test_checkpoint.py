"""`graphfsdp.save` and `graphfsdp.load`: what comes back, and what does not fit."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

import graphfsdp
from adam_helpers import make_muon
from checkpoint_helpers import Holding, addresses, contents, digests
from graphfsdp.optim import FusedAdam
from ranks import RankPool, on_ranks


class Small(nn.Module):
    """Dropout, a buffer that changes, tied weights and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 4)
        self.tied = nn.Linear(4, 6)
        self.tied.weight = self.first.weight
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.dropout(self.norm(self.first(x)), 0.2, self.training)
        loss: Tensor = self.tied(self.last(hidden)).square().mean() + self.frozen.sum() * 0
        return loss


def small(
    device: torch.device, seed: int
) -> tuple[Small, FusedAdam, torch.optim.lr_scheduler.LRScheduler]:
    torch.manual_seed(seed)
    model = Small().to(device)
    optimizer = FusedAdam(model.parameters(), lr=0.05, weight_decay=0.1)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)


def run(step: Any, scheduler: Any, device: torch.device, first: int, last: int) -> list[Tensor]:
    """Train on batches that depend on the iteration's number alone."""
    losses = []
    for index in range(first, last):
        generator = torch.Generator().manual_seed(index)
        losses.append(step(torch.randn(8, 4, generator=generator).to(device)))
        scheduler.step()
    return losses


@pytest.mark.parametrize("scope", ["none", "full_iteration"])
@pytest.mark.parametrize("saved_scope", ["none", "full_iteration"])
def test_a_run_that_loads_midway_goes_on_like_the_one_that_saved(
    saved_scope: str, scope: str, device: torch.device, tmp_path: Path
) -> None:
    """The loading one is in the middle of its replays, and is not captured again."""
    model, optimizer, scheduler = small(device, 0)
    with graphfsdp.capture(model, optimizer, scope=saved_scope, max_grad_norm=1.0) as step:
        run(step, scheduler, device, 0, 7)
        graphfsdp.save(tmp_path, model, optimizer, objects={"lr": scheduler}, step=7)
        expected = run(step, scheduler, device, 7, 19)
    other, its_optimizer, its_scheduler = small(device, 1)
    with graphfsdp.capture(other, its_optimizer, scope=scope, max_grad_norm=1.0) as step:
        run(step, its_scheduler, device, 100, 109)
        before = addresses(other, its_optimizer)
        loaded = graphfsdp.load(tmp_path, other, its_optimizer, objects={"lr": its_scheduler})
        assert (loaded.step, loaded.path) == (7, tmp_path / "step-00000007")
        assert addresses(other, its_optimizer) == before
        got = run(step, its_scheduler, device, 7, 19)
        assert step.report().num_captures == (scope == "full_iteration")
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert digests(contents(model, optimizer)) == digests(contents(other, its_optimizer))
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, other.get_buffer(name)), name
    assert its_scheduler.get_last_lr() == scheduler.get_last_lr()


def test_generators_are_saved_and_set(device: torch.device, tmp_path: Path) -> None:
    import random

    import numpy

    def draw() -> list[Any]:
        return [
            torch.rand(3).tolist(),
            torch.rand(3, device=device).tolist(),
            random.random(),
            numpy.random.rand(),
            numpy.random.randn(),
        ]

    model = nn.Linear(2, 2)
    draw()
    graphfsdp.save(tmp_path, model)
    expected = draw()
    graphfsdp.load(tmp_path, model, rng=False)
    assert draw() != expected
    graphfsdp.load(tmp_path, model)
    assert draw() == expected


def test_nothing_in_a_checkpoint_is_a_pickle(tmp_path: Path) -> None:
    """Everything is JSON or raw bytes behind JSON: reading it cannot run code."""
    model, optimizer, scheduler = small(torch.device("cpu"), 0)
    folder = graphfsdp.save(tmp_path, model, optimizer, objects={"lr": scheduler})
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["data-00000-0.safetensors", "manifest.json"]
    json.loads((folder / "manifest.json").read_text())
    read = load_file(folder / names[0])
    assert torch.equal(read["model.first.weight"], model.first.weight)


def test_old_checkpoints_go_and_a_step_can_be_chosen(tmp_path: Path) -> None:
    model = nn.Linear(1, 1, bias=False)
    for step in (5, 10, 15, 15):
        with torch.no_grad():
            model.weight.fill_(step + len(list(tmp_path.iterdir())) / 100)
        last = model.weight.item()
        graphfsdp.save(tmp_path, model, step=step, keep_last=2)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["latest", "step-00000010", "step-00000015.1"]
    assert graphfsdp.load(tmp_path, model).step == 15
    assert model.weight.item() == last
    assert graphfsdp.load(tmp_path, model, step=10).step == 10
    assert int(model.weight) == 10
    with pytest.raises(graphfsdp.CheckpointError, match=r"no checkpoint of step 5.*step=10, 15"):
        graphfsdp.load(tmp_path, model, step=5)
    assert graphfsdp.save(tmp_path, model).name == "step-00000016"
    with pytest.raises(graphfsdp.CheckpointError, match="nothing has been saved there"):
        graphfsdp.load(tmp_path / "latest", model)


def test_who_goes_back_keeps_what_the_run_goes_on_from(tmp_path: Path) -> None:
    """And not the later ones in its place, which may be damaged."""
    model = nn.Linear(1, 1, bias=False)

    def save(step: int) -> list[str]:
        graphfsdp.save(tmp_path, model, step=step, keep_last=2)
        return sorted(path.name for path in tmp_path.iterdir())

    for step in (10, 20):
        save(step)
    graphfsdp.load(tmp_path, model, step=10)
    assert save(15) == ["latest", "step-00000010", "step-00000015", "step-00000020"]
    assert graphfsdp.load(tmp_path, model).step == 15
    assert save(20) == ["latest", "step-00000015", "step-00000020.1"]


def trained(model: nn.Module, kind: Any = FusedAdam, **options: Any) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = kind(model.parameters(), **options)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    return optimizer


def bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = [t.clone() for state in optimizer.state.values() for t in state.values()]
    return [*(p.detach().clone() for p in model.parameters()), *states]


def test_everything_that_does_not_fit_is_listed_and_nothing_is_written(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 4), "b": nn.Linear(4, 2), "old": nn.Linear(1, 1)})
    graphfsdp.save(tmp_path, model, trained(model, amsgrad=True), rng=False)
    other = nn.ModuleDict({"a": nn.Linear(3, 4), "b": nn.Linear(5, 2), "new": nn.Linear(1, 1)})
    optimizer = trained(other, amsgrad=True)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    before = bits(other, optimizer)
    with pytest.raises(graphfsdp.CheckpointMismatchError) as caught:
        graphfsdp.load(tmp_path, other, optimizer, objects={"lr": scheduler})
    text = str(caught.value)
    for expected in (
        "model: 'b.weight': saved [2, 4], here [2, 5]",
        "model: 'new.weight' is missing in the checkpoint",
        "model: 'new.bias' is missing in the checkpoint",
        "model: 'old.weight' is in the checkpoint, but not in the model",
        "optimizer: 'new.bias' was not trained by the saved optimizer",
        "optimizer: the checkpoint has a state of 'old.bias', which this one does not train",
        "objects: 'lr' is missing in the checkpoint",
        "nothing was loaded",
    ):
        assert expected in text, expected
    assert all(torch.equal(a, b) for a, b in zip(before, bits(other, optimizer), strict=True))


def two_groups(model: nn.Linear) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [{"params": [model.weight]}]
    return FusedAdam([*groups, {"params": [model.bias], "weight_decay": 0.5}])


MISFITS: list[tuple[Callable[..., Any], Callable[..., Any], str]] = [
    (partial(trained, amsgrad=True), trained, "was saved with amsgrad=True"),
    (partial(trained, maximize=True), trained, "was saved with maximize=True"),
    (partial(trained, bias_correction=False), trained, "was saved with bias_correction=False"),
    (
        partial(trained, weight_decay=0.1),
        partial(trained, adam_w_mode=False),
        "decoupled_weight_decay=True",
    ),
    (two_groups, trained, "parameters of group 0 were saved with hyper-parameters that are not"),
    (trained, partial(trained, kind=torch.optim.AdamW), "saved from FusedAdam, here a AdamW"),
    (lambda model: None, partial(trained, kind=torch.optim.SGD), "saved without one"),
]


@pytest.mark.parametrize(("saved", "here", "said"), MISFITS)
def test_another_update_rule_is_reported_before_anything_is_written(
    saved: Callable[..., Any], here: Callable[..., Any], said: str, tmp_path: Path
) -> None:
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    graphfsdp.save(tmp_path, model, saved(model), rng=False)
    optimizer = here(other)
    before = bits(other, optimizer)
    with pytest.raises(graphfsdp.CheckpointMismatchError, match=said):
        graphfsdp.load(tmp_path, other, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, bits(other, optimizer), strict=True))


def with_buffer(tensor: Tensor) -> nn.Module:
    model = nn.Linear(1, 1)
    model.register_buffer("phases", tensor)
    return model


def with_hook() -> nn.Module:
    """Return a module whose state dict has copies of what it holds."""

    def copy(module: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
        state[prefix + "weight"] = state[prefix + "weight"].clone()

    model = nn.Linear(3, 2)
    model.register_state_dict_post_hook(copy)
    return model


def one_of_two() -> dict[str, Any]:
    model = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
    return {"model": model[0], "optimizer": trained(model)}


def with_common() -> dict[str, Any]:
    model = nn.Linear(1, 1)
    optimizer = trained(model, torch.optim.SGD, lr=0.1)
    optimizer.state["common"] = {"sum": torch.zeros(())}  # type: ignore[index]
    return {"model": model, "optimizer": optimizer}


UNSAVED: list[tuple[dict[str, Any], type[Exception], str]] = [
    *(
        (
            {"objects": {"it": Holding({"inner": [1, {"what": what}]})}},
            *(graphfsdp.CheckpointError, rf"objects/it\.inner\[1\]\.what is a {kind}, .* pickl"),
        )
        for what, kind in ((object(), "object"), ({3}, "set"), (b"", "bytes"))
    ),
    ({"objects": {"it": 3}}, graphfsdp.ConfigError, r"objects\['it'\] is a int"),
    *(
        (
            {"model": with_buffer(torch.zeros(16, dtype=torch.uint8).view(dtype))},
            *(graphfsdp.CheckpointError, rf"model\.phases is a tensor of {dtype} .*safetensors"),
        )  # the last one is written and not read
        for dtype in (torch.complex128, torch.float8_e8m0fnu)
    ),
    (
        {"model": with_buffer(torch.eye(2).to_sparse())},
        *(graphfsdp.CheckpointError, r"model\.phases is a tensor .* layout torch\.sparse_coo"),
    ),
    ({"model": nn.LazyLinear(3)}, ValueError, "uninitialized parameter"),  # in torch's words
    (
        {"objects": {"it": Holding({"a": torch.empty(2, device="meta")})}},
        *(graphfsdp.CheckpointError, r"objects/it\.a is a tensor .* has no values yet"),
    ),
    ({"model": with_hook()}, graphfsdp.ConfigError, "'weight' is no parameter or buffer"),
    (one_of_two(), graphfsdp.ConfigError, "parameter 2 of the optimizer's group 0 is none of"),
    (with_common(), graphfsdp.CheckpointError, "'common'.* belong to no parameter"),
    *(
        ({"step": step}, graphfsdp.ConfigError, "step must be an integer of at least 0")
        for step in ("3", 2.0, True, -1)
    ),
    ({"keep_last": 0}, graphfsdp.ConfigError, "keep_last must be an integer of at least 1"),
]


@pytest.mark.parametrize(("arguments", "error", "said"), UNSAVED)
def test_what_cannot_be_saved_is_refused_by_name_and_leaves_nothing(
    arguments: dict[str, Any], error: type[Exception], said: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=said):
        graphfsdp.save(tmp_path, **({"model": nn.Linear(1, 1)} | arguments))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("version", [1, 2])
def test_the_form_of_another_version_is_refused_by_name(version: int, tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    manifest = graphfsdp.save(tmp_path, model) / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"version": 3', f'"version": {version}'))
    said = rf"version {version}; this release reads .* 3.*the release that has saved it"
    with pytest.raises(graphfsdp.CheckpointError, match=said):
        graphfsdp.load(tmp_path, model)


def test_groups_are_matched_by_names_not_by_order(tmp_path: Path) -> None:
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    groups: list[dict[str, Any]] = [{"params": [model.weight], "lr": 0.5}]
    groups.append({"params": [model.bias], "lr": 0.25})
    graphfsdp.save(tmp_path, model, FusedAdam(groups), rng=False)
    turned: list[dict[str, Any]] = [{"params": [other.bias]}, {"params": [other.weight]}]
    optimizer = FusedAdam(turned)
    graphfsdp.load(tmp_path, other, optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.5]


def step_on(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    for index in range(num_steps):
        generator = torch.Generator().manual_seed(index)
        optimizer.zero_grad()
        x = torch.randn(4, 4, generator=generator).to(next(model.parameters()).dtype)
        model(x).square().sum().backward()
        optimizer.step()


class Counting(nn.Module):
    """A module with state that is no tensor, inside wrappers that change names."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.calls = 0

    def get_extra_state(self) -> dict[str, Any]:
        return {"calls": self.calls, "range": (1, 2.5, None), "table": torch.arange(3)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        assert state["range"] == (1, 2.5, None)
        assert torch.equal(state["table"], torch.arange(3))
        self.calls = state["calls"]


def test_extra_state_and_names_without_wrappers(tmp_path: Path) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    inner = Counting()
    inner.calls = 1
    wrapped = nn.Sequential(checkpoint_wrapper(inner))
    graphfsdp.save(tmp_path, wrapped)
    other = nn.Sequential(Counting())
    graphfsdp.load(tmp_path, other)
    assert other[0].calls == 1
    assert torch.equal(other.get_parameter("0.linear.weight"), inner.linear.weight)


def test_views_of_one_memory_come_back_with_their_values(tmp_path: Path) -> None:
    def make(values: Tensor) -> nn.Module:
        model = nn.Module()
        for name, part in {"a": values[:6], "b": values[4:], "c": values[1:3].conj()}.items():
            model.register_buffer(name, part)
        return model

    model = make(torch.randn(9, dtype=torch.complex64))
    graphfsdp.save(tmp_path, model)
    other = make(torch.zeros(9, dtype=torch.complex64))
    graphfsdp.load(tmp_path, other)
    for name, value in model.named_buffers():
        assert torch.equal(other.get_buffer(name), value), name


def own(number: int) -> Holding:
    """Return an object whose state is another one on each rank, with a large tensor in it."""
    state = {"own": torch.full((5000,), float(number)), "common": torch.arange(9000)}
    return Holding({**state, "inf": float("inf"), 3: {(4, None): [0.5, True]}})


def is_all(number: int, thing: Holding) -> bool:
    expected = own(number).state
    return thing.state.keys() == expected.keys() and all(
        torch.equal(value, expected[key]) if isinstance(value, Tensor) else value == expected[key]
        for key, value in thing.state.items()
    )


def states_of_ranks(path: Path, saves: bool) -> tuple[str, list[float]]:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(5000))
    graphfsdp.fully_shard(model)
    means = [buffer for name, buffer in model.named_buffers() if name.endswith("mean")]
    said, rank, mine, common = "", dist.get_rank(), own(-1), own(-1)
    if saves:
        for mean in means:
            mean.fill_(rank + 1)
        graphfsdp.save(path, model, objects={"own": own(rank + 1), "common": own(7)})
        for mean in means:
            mean.zero_()
    try:
        graphfsdp.load(path, model, objects={"own": mine, "common": common})
        assert is_all(rank + 1, mine)
    except graphfsdp.CheckpointMismatchError as error:
        said = str(error)
        graphfsdp.load(path, model, objects={"common": common})
    assert is_all(7, common)
    return said, [float(mean.mean()) for mean in means]


def test_what_each_rank_has_for_itself_comes_back_to_it(
    tmp_path: Path, ranks1: RankPool, ranks2: RankPool
) -> None:
    """On another number of ranks, statistics of rank 0 do, and what was equal on all."""
    assert ranks2.run(states_of_ranks, tmp_path, True) == [("", [1.0, 1.0]), ("", [2.0, 2.0])]
    said, means = ranks1.run(states_of_ranks, tmp_path, False)[0]
    assert "objects: 'own' was saved with a state of its own on each of 2 ranks; here are 1" in said
    assert "common" not in said
    assert means == [1.0, 1.0]


@on_ranks("ranks4")
def test_groups_of_ranks_save_apart(tmp_path: Path) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine, rank = dist.get_rank() // 2, dist.get_rank()
    model, other = (nn.Linear(3, 5) for _ in range(2))
    dist.broadcast(model.weight.data, 2 * mine, group=groups[mine])
    dist.broadcast(model.bias.data, 2 * mine, group=groups[mine])
    loaded = own(-1)
    folder, group = tmp_path / str(mine), groups[mine]
    graphfsdp.save(folder, model, objects={"random": own(rank)}, process_group=group)
    graphfsdp.load(folder, other, objects={"random": loaded}, process_group=group)
    assert torch.equal(other.weight, model.weight)
    assert is_all(rank, loaded)


@on_ranks("ranks2")
def test_a_unit_that_was_unsharded_by_hand_is_resharded(tmp_path: Path) -> None:
    model: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False))
    graphfsdp.fully_shard(model)
    optimizer = FusedAdam(model.parameters())  # also of frozen ones
    expected = model(torch.ones(1, 3)).detach().clone()
    model.unshard()
    graphfsdp.save(tmp_path, model, optimizer)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    model.unshard()
    graphfsdp.load(tmp_path, model)
    assert torch.equal(model(torch.ones(1, 3)), expected)


@on_ranks("ranks2")
def test_sharded_tensors_without_a_place_are_refused(tmp_path: Path) -> None:
    model = graphfsdp.fully_shard(nn.Linear(4, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for rows, shape in ((model.bias.detach(), r"\(6,\)"), (torch.ones(2), r"\(2,\)")):
        optimizer.state[model.weight]["rows"] = rows
        said = rf"weight\.rows has the shape {shape} and .* sharded parameter of the shape \(6, 4\)"
        with pytest.raises(graphfsdp.CheckpointError, match=said):
            graphfsdp.save(tmp_path, model, optimizer)
    average = Holding({"weight": model.weight.detach()})
    said = r"objects/average\.weight is sharded, .*Remedy: save it as a part of the model"
    with pytest.raises(graphfsdp.CheckpointError, match=said):
        graphfsdp.save(tmp_path, model, objects={"average": average})


def test_main_weights_that_were_saved_as_16_bits_are_refused(tmp_path: Path) -> None:
    """As Transformer Engine can: bfloat16 weights, and the 16 bits that these lack."""
    models = [nn.Linear(4, 5, bias=False, dtype=torch.bfloat16) for _ in range(2)]
    optimizers = [FusedAdam(each.parameters(), master_weights=True) for each in models]
    moments = {"exp_avg": torch.rand(5, 4), "exp_avg_sq": torch.rand(5, 4)}
    rest = torch.ones(5, 4, dtype=torch.int16)
    state = {"step": torch.tensor(1.0), **moments, "master_param": rest}
    optimizers[0].state[models[0].weight] = state
    graphfsdp.save(tmp_path, models[0], optimizers[0])
    before = models[1].weight.detach().clone()
    with pytest.raises(
        graphfsdp.CheckpointMismatchError, match=r"'master_param' of .* torch\.int16"
    ):
        graphfsdp.load(tmp_path, models[1], optimizers[1])
    assert torch.equal(models[1].weight, before)
    said = "'weight': saved in torch.bfloat16 and the bits that it lacks, here torch.float32"
    with pytest.raises(graphfsdp.CheckpointMismatchError, match=said):
        graphfsdp.load(tmp_path, nn.Linear(4, 5, bias=False))


class Own(torch.optim.Optimizer):
    """A state of another precision than its weights', and numbers that are no tensors."""

    def __init__(self, params: Any, lr: float, dtype: torch.dtype) -> None:
        super().__init__(params, {"lr": lr})
        self._dtype = dtype

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state["num"] = state.get("num", 0) + 1
                mean = state.setdefault("mean", torch.zeros_like(param).to(self._dtype))
                mean.lerp_(param.grad.to(self._dtype), 0.1)
                param.sub_((group["lr"] / state["num"] * mean).to(param.dtype))


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Own in 64 bits": partial(Own, dtype=torch.float64),
    "Own in 16 bits": partial(Own, dtype=torch.bfloat16),
    "SGD": partial(torch.optim.SGD, momentum=0.9),
    **{
        name: getattr(torch.optim, name)
        for name in ("AdamW", "RMSprop", "Adagrad", "NAdam", "Adafactor")
    },
    "FusedAdam": partial(FusedAdam, weight_decay=0.1, maximize=True, master_weights=True),
    "Muon": make_muon,
}


@pytest.mark.parametrize("num_before", [0, 1])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_other_optimizers_come_back(name: str, num_before: int, tmp_path: Path) -> None:
    dtype = torch.bfloat16 if name.startswith("Fused") else torch.float32

    def run(seed: int, num_steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Linear(4, 3, dtype=dtype)
        optimizer = OPTIMIZERS[name](model.parameters(), lr=0.01)
        step_on(model, optimizer, num_steps)
        return model, optimizer

    model, optimizer = run(0, 3)
    graphfsdp.save(tmp_path, model, optimizer)
    other, its_optimizer = run(1, num_before)
    graphfsdp.load(tmp_path, other, its_optimizer)
    for each in ((model, optimizer), (other, its_optimizer)):
        step_on(*each, 3)
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
