"""Checkpoints that do not fit are reported whole, and what cannot be saved by name."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from checkpoint_helpers import Holding
from graphfsdp.optim import FusedAdam


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


def sgd(model: nn.Linear) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


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
    (trained, torch.optim.AdamW, "saved from FusedAdam, here a AdamW"),
    (lambda model: None, sgd, "saved without one"),
]


@pytest.mark.parametrize(("saved", "here", "said"), MISFITS)
def test_another_update_rule_is_reported_before_anything_is_written(
    saved: Callable[..., Any], here: Callable[..., Any], said: str, tmp_path: Path
) -> None:
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    graphfsdp.save(tmp_path, model, saved(model), rng=False)
    optimizer = here(other if here is not torch.optim.AdamW else other.parameters())
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
