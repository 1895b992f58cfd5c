"""Offloaded optimizer state: loads, checkpoints, late groups, schedulers, the trainer, refusals."""

import copy
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import graphfsdp
from adam_helpers import (
    Net,
    assert_equal,
    copies_of,
    load_in_place,
    make_params,
    make_twins,
    set_grads,
    take_steps,
)
from graphfsdp.errors import ConfigError, GraphFSDPError
from graphfsdp.optim import (
    Adafactor,
    CPUOffload,
    FusedAdam,
    FusedSGD,
    ParamSchedule,
    ParamScheduler,
)
from graphfsdp.optim.fused.device_optimizer import DeviceOptimizer
from graphfsdp.training.build import make_optimizer
from graphfsdp.training.config import TrainConfig
from graphfsdp.training.gpt import GPT
from offload_helpers import KINDS, NARROW, SHAPES


@pytest.mark.parametrize("kind", ["adam", "remainders", "fp8", "sgd"])
def test_states_go_to_and_from_the_optimizer_without_offload(kind: str) -> None:
    dtype, make = KINDS[kind]

    def offloaded(params: list[nn.Parameter]) -> CPUOffload:
        return CPUOffload(make(params), offload_fraction=0.5)

    for source_of, target_of in ((make, offloaded), (offloaded, make), (offloaded, offloaded)):
        params = make_params(SHAPES, dtype)
        source = source_of(params)
        for _ in range(2):
            set_grads(params)
            source.step(found_inf=torch.zeros(()))
        twins = copies_of(params)
        target = target_of(twins)
        if target_of is offloaded:  # a state that exists is written in place
            load_in_place(source, target)
        else:
            target.load_state_dict(copy.deepcopy(source.state_dict()))
        third = copy.deepcopy(target)
        others = third.param_groups[0]["params"]
        take_steps(2, source, target, third)
        assert_equal(params, twins)
        assert_equal(params, others)


@pytest.mark.parametrize("to_offload", [True, False])
def test_checkpoints_are_those_of_the_optimizer_that_was_given(
    tmp_path: Path, to_offload: bool
) -> None:
    def make(seed: int, offload: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = Net().to(NARROW)
        optimizer = FusedAdam(model.parameters(), lr=0.1, master_weights=True)
        return model, CPUOffload(optimizer, offload_fraction=0.5) if offload else optimizer

    def train_plainly(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
        torch.manual_seed(seed)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(3, 6, dtype=NARROW)).backward()
            optimizer.step()

    model, optimizer = make(0, not to_offload)
    train_plainly(model, optimizer, 5)
    graphfsdp.save(tmp_path / "saved", model, optimizer)
    other, resumed = make(1, to_offload)
    graphfsdp.load(tmp_path / "saved", other, resumed)
    for m, o in ((model, optimizer), (other, resumed)):
        train_plainly(m, o, 6)
    assert_equal(list(model.parameters()), list(other.parameters()))


def test_what_is_read_for_offloaded_state_never_lies_on_the_device() -> None:
    param = nn.Parameter(torch.zeros(4, 4, device="meta"))
    other = nn.Parameter(torch.zeros(4, 4, device="meta"))
    optimizer = CPUOffload(FusedAdam([param, other]), offload_fraction=0.5)
    assert optimizer.state_device(param) == torch.device("cpu")
    assert optimizer.state_device(other) == torch.device("meta")


def test_where_state_lies_is_chosen_once_for_all_parameters_and_anew_for_a_group_that_joins() -> (
    None
):
    class Counting(CPUOffload):
        num_choices = 0

        @property
        def offloaded(self) -> list[torch.Tensor]:
            self.num_choices += 1
            return super().offloaded

    params = [nn.Parameter(torch.zeros(4, device="meta")) for _ in range(6)]
    optimizer = Counting(FusedAdam(params[:4]), offload_fraction=0.5)
    places = [optimizer.state_device(param).type for param in params[:4]]
    assert places == ["cpu", "cpu", "meta", "meta"]
    assert optimizer.num_choices == 1
    optimizer.add_param_group({"params": params[4:]})
    places = [optimizer.state_device(param).type for param in params]
    assert places == ["cpu", "cpu", "cpu", "meta", "meta", "meta"]
    assert optimizer.num_choices == 2


def test_a_group_that_joins_keeps_the_others_states() -> None:
    params, twins = make_twins(SHAPES)
    ours: DeviceOptimizer = CPUOffload(FusedAdam(params[:2], lr=0.1), offload_fraction=1)
    theirs: DeviceOptimizer = FusedAdam(twins[:2], lr=0.1)
    for index in range(4):
        set_grads(params, twins)
        for optimizer, members in ((ours, params), (theirs, twins)):
            if index == 2:
                optimizer.add_param_group({"params": members[2:], "lr": 0.01})
            optimizer.step()
    assert_equal(params, twins)
    assert ours.state[params[0]]["step"].item() == 4


def test_a_scheduler_of_the_given_optimizer_goes_on_steering() -> None:
    (param,) = make_params([(3, 3)])
    inner = FusedAdam([param], lr=torch.tensor(0.5))
    scheduler = ParamScheduler(inner, ParamSchedule(10))
    optimizer = CPUOffload(inner)
    take_steps(1, optimizer)
    with warnings.catch_warnings():  # torch has not seen a step of the inner one
        warnings.simplefilter("ignore")
        scheduler.step()
    assert optimizer.param_groups[0]["lr"].item() == pytest.approx(0.45)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: CPUOffload(Adafactor(p)), "takes a FusedAdam.* got Adafactor"),  # type: ignore[arg-type]
        (lambda p: CPUOffload(torch.optim.AdamW(p)), "got AdamW"),  # type: ignore[arg-type]
        (lambda p: CPUOffload(CPUOffload(FusedAdam(p))), "got CPUOffload"),
        (lambda p: CPUOffload(FusedAdam(p), offload_fraction=1.5), r"in \[0, 1\], got 1\.5"),
        (lambda p: CPUOffload(FusedAdam(p), bucket_bytes=0), "bucket_bytes must be at least 1"),
    ],
)
def test_what_cannot_be_offloaded_is_refused(make: Callable[..., object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make(make_params())


def test_an_optimizer_that_has_stepped_is_refused() -> None:
    params = make_params()
    optimizer = FusedAdam(params)
    take_steps(1, optimizer)
    with pytest.raises(GraphFSDPError, match=r"has state already.* load_state_dict"):
        CPUOffload(optimizer)


def test_the_trainer_offloads_when_its_flag_is_given() -> None:
    model = GPT(TrainConfig().gpt(256))
    flags = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.25}
    config = TrainConfig(cuda_graph_scope="forward_backward", **flags)  # type: ignore[arg-type]
    optimizer = make_optimizer(config, model, sharded=False)
    assert isinstance(optimizer, CPUOffload)
    assert 0 < len(optimizer.offloaded) < len(list(model.parameters()))
    assert type(make_optimizer(TrainConfig(), model, sharded=False)) is FusedAdam


def test_wrong_numbers_are_refused_when_they_change() -> None:
    params = make_params()
    optimizer = CPUOffload(FusedSGD(params))
    take_steps(1, optimizer)
    optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(ConfigError, match="has no buffers"):
        optimizer.step()
    optimizer.param_groups[0].update(momentum=0.0, lr=-1.0)
    with pytest.raises(ConfigError, match="lr of parameter group 0"):
        optimizer.step()
