"""Audits: an iteration as written trains like a replay, and tells where Python decides unseen."""

import copy
import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from counting_net import mean_square
from graphfsdp import GuardError
from graphfsdp.optim import FusedAdam
from helpers import (
    NUM_STEPS,
    Case,
    assert_alive,
    assert_same_run,
    run,
    run_as_eager,
)
from hidden_count import Unseen
from ranks import on_ranks
from sharding_helpers import adam, assert_same_training, make_net
from sharding_helpers import train as train_sharded
from zoo import ZOO, features


@pytest.mark.parametrize(
    ("name", "optimizer"),
    # The operators of an optimizer are not audited.
    [*((name, "fused_adam") for name in ZOO), ("mlp", "adamw"), ("gpt", "adamw")],
)
def test_audited_iterations_train_with_the_same_bits(
    name: str, optimizer: str, device: torch.device
) -> None:
    expected = run(ZOO[name], "none", device, optimizer=optimizer)
    got = run(ZOO[name], "full_iteration", device, optimizer=optimizer, audit=2)
    assert_alive(expected)
    assert_same_run(expected, got)
    calls = got.report.num_calls
    assert got.report.num_captures == 1
    assert calls["replay"] + calls["audit"] == len(got.outputs) - 4
    assert calls["audit"] == (len(got.outputs) - 5) // 2


@on_ranks("ranks2")
@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_ranks_audit_together_and_train_with_the_same_bits(strategy: str) -> None:
    runs = []
    for options in ({"scope": "none"}, {"audit": 1}):
        model = make_net(strategy)
        runs.append(train_sharded(model, adam(model), **options))
    assert_same_training(*runs)
    assert runs[1].report.num_calls["audit"] == NUM_STEPS - 5


class OfAFile:
    """A loss with a factor that a file holds."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "factor"
        self.file.write_text("2.0")

    def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
        return mean_square(model, x) * float(self.file.read_text())

    def case(self, changed_at: int) -> Case:
        """Return a training before whose n-th call the factor becomes another one."""

        def setup(model: nn.Module, optimizer: object) -> Callable[[], object]:
            self.file.write_text("2.0")
            calls = itertools.count(1)
            return lambda: next(calls) == changed_at and self.file.write_text("3.0")

        return Case(lambda: nn.Linear(4, 4), features(4), self, setup)


def test_what_a_file_decides_is_found_and_named_by_the_next_audit(
    tmp_path: Path, device: torch.device
) -> None:
    loss_fn = OfAFile(tmp_path)
    model = nn.Linear(4, 4).to(device)
    twin = copy.deepcopy(model)
    x = torch.ones(3, 4, device=device)
    optim, its = FusedAdam(model.parameters()), FusedAdam(twin.parameters())
    eager = graphfsdp.capture(twin, its, loss_fn=loss_fn, scope="none")
    with graphfsdp.capture(model, optim, loss_fn=loss_fn, audit=4) as step:
        for _ in range(12):  # audited are the ninth and the thirteenth call
            assert torch.equal(step(x), eager(x))
        assert step.report().num_calls["audit"] == 1
        loss_fn.file.write_text("3.0")
        eager(x)
        with pytest.raises(GuardError, match=r"aten\.mul.* was given 2\.0 .* and 3\.0") as caught:
            step(x)
        for words in ("after 8 replays", "since replay 5", f"{__file__}:", "Remedy:"):
            assert words in str(caught.value)
        assert torch.equal(model.weight, twin.weight)  # the audited call has trained as written
    eager.close()


@pytest.mark.parametrize("on_change", ["recapture", "eager"])
def test_training_goes_on_as_on_change_says(tmp_path: Path, on_change: str) -> None:
    case = OfAFile(tmp_path).case(changed_at=12)
    options: dict[str, Any] = {"num_steps": 24, "audit": 1, "on_change": on_change}
    run_as_eager(case, torch.device("cpu"), **options)


def test_what_moves_now_and_then_is_let_go_of_or_refused(tmp_path: Path) -> None:
    state: dict[str, int] = {"calls": 0, "epochs": 0}
    late = tmp_path / "late"

    def counts(model: nn.Module, x: Tensor) -> Tensor:
        state["calls"] += 1
        if state["calls"] % 5 == 0:
            logging.getLogger("audits").info("five more")
            state["epochs"] += 1
        return mean_square(model, x)

    def decides(model: nn.Module, x: Tensor) -> Tensor:
        state["epochs"] += late.exists()
        return mean_square(model, x) * (2 if state["epochs"] > 1_000 else 1)

    def train(loss_fn: Callable[[nn.Module, Tensor], Tensor]) -> int:
        state.update(calls=0, epochs=0)
        model = nn.Linear(4, 4)
        optim = FusedAdam(model.parameters())
        options: Any = {"loss_fn": loss_fn, "audit": 1, "warmup_steps": 2}
        with graphfsdp.capture(model, optim, **options) as step:
            for index in range(12):
                if index == 6:
                    late.touch()
                step(torch.ones(3, 4))
            return step.report().num_calls["audit"]

    assert train(counts) == 8
    late.unlink()
    with pytest.raises(GuardError, match="'epochs'"):
        train(decides)


def test_another_step_over_the_same_model_is_no_difference() -> None:
    model = nn.Linear(4, 4)
    x = torch.ones(3, 4)
    optim = FusedAdam(model.parameters())
    with graphfsdp.capture(model, optim, loss_fn=mean_square, audit=1) as first:
        for _ in range(6):
            first(x)
        with graphfsdp.capture(model, optim, loss_fn=mean_square, audit=1) as second:
            for _ in range(6):
                second(x)
                first(x)
        before = first.report().num_calls["audit"]
        first(x)
        assert first.report().num_calls["audit"] == before + 1


def test_when_audits_are_due(monkeypatch: pytest.MonkeyPatch) -> None:
    def due(every: Any) -> list[int]:
        """Return behind how many replays Python runs again."""
        runs, model, found = Unseen(None), nn.Linear(1, 1), list[int]()

        def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
            next(runs)
            return mean_square(model, x)

        options: dict[str, Any] = {"loss_fn": loss_fn, "audit": every, "warmup_steps": 1}
        with graphfsdp.capture(model, FusedAdam(model.parameters()), **options) as step:
            step(torch.ones(1, 1)), step(torch.ones(1, 1))
            for done in range(3_100):
                before = runs.num_calls
                step(torch.ones(1, 1))
                found += [done] * (runs.num_calls - before)
        return found

    assert due(1_000) == [1_000, 2_000, 3_000]
    monkeypatch.delenv("GRAPHFSDP_AUDIT")
    assert due("auto") == [*(2**n for n in range(11)), 2_048, 3_072]
    monkeypatch.setenv("GRAPHFSDP_AUDIT", "2000")
    assert due("auto") == [2_000]
    assert due(0) == []
