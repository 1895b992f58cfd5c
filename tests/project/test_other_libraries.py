"""Loops of Accelerate and Lightning Fabric: captured, their numbers stay.

Each is compared with the library's own uncaptured loop. They run where the library is installed.
"""

import functools
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from test_examples import run_example
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import graphfsdp
from graphfsdp.data import load_corpus
from graphfsdp.optim import FusedAdam
from helpers import assert_same_state, snapshot

NUM_STEPS = 16


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x), y)


def by_accelerate(precision: str, *training: Any) -> tuple[Any, ...]:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    accelerate.state.AcceleratorState._reset_state()  # one per process, with one precision
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision)
    return (*accelerator.prepare(*training), accelerator.backward)


def by_fabric(precision: str, *training: Any) -> tuple[Any, ...]:
    module = pytest.importorskip("lightning.fabric", reason="lightning is not installed")
    fabric = module.Fabric(accelerator="cpu", devices=1, precision=precision)
    net, inner, scheduler, loader = training
    batches = fabric.setup_dataloaders(loader)
    return (*fabric.setup(net, inner), scheduler, batches, fabric.backward)


@pytest.mark.parametrize(
    ("prepare", "precision", "is_whole"),
    [
        *((by_accelerate, "no", False), (by_accelerate, "bf16", False)),
        (by_fabric, "32-true", False),
        # Fabric insists on ``fabric.backward`` there, so the loop's body is captured as it is.
        (by_fabric, "bf16-mixed", True),
    ],
)
def test_a_loop_of_a_library(
    prepare: Callable[..., tuple[Any, ...]], precision: str, is_whole: bool
) -> None:
    def train(captured: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Linear(4, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 1)
        )
        inner = FusedAdam(net.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(inner, T_max=NUM_STEPS)
        x = torch.randn(8 * NUM_STEPS, 4)
        data = TensorDataset(x, x.sum(dim=1, keepdim=True))
        loader = DataLoader(data, batch_size=8, shuffle=True)
        model, optimizer, scheduler, batches, backward = prepare(
            precision, net, inner, schedule, loader
        )

        def iteration(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = loss_fn(model, x, y)
            backward(loss)
            optimizer.step()
            return loss.detach()

        chosen: dict[str, Any] = {"iteration": iteration} if is_whole else {"loss_fn": loss_fn}
        run: Any = functools.partial(iteration, model, optimizer)
        losses = []
        with ExitStack() as stack:
            if captured:
                run = stack.enter_context(graphfsdp.capture(model, optimizer, **chosen))
            for batch in batches:
                losses.append(run(*batch))
                scheduler.step()
        return losses, snapshot(net, inner)

    expected, state = train(False)
    got, same_state = train(True)
    assert len(got) == NUM_STEPS
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert_same_state(state, same_state)


@pytest.mark.filterwarnings("ignore")  # the libraries' own
def test_adapters_are_trained_and_nothing_else() -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    *lines, last = run_example("lora.py")
    losses = [float(line.split()[3]) for line in lines]
    assert losses[-1] < losses[0] < 4.2  # a uniform guess is at 4.16
    assert all("(replay)" in line for line in lines)
    assert last == "17,408 numbers were trained, 90,432 were not"


@pytest.mark.filterwarnings("ignore")  # the libraries' own
def test_a_data_set_on_disk_becomes_a_file_of_tokens(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: number for number, word in enumerate(("<|endoftext|>", "?", "a", "b", "c"))}
    model = tokenizers.models.WordLevel(words, unk_token="?")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    parts = {"train": {"text": ["a b c", "c d"]}, "more": {"input_ids": [[2, 3]]}}
    expected = {"train": [2, 3, 4, 0, 4, 1, 0], "more": [2, 3, 0]}
    for name, columns in parts.items():
        datasets.Dataset.from_dict(columns).save_to_disk(str(tmp_path / name))
        target = tmp_path / f"{name}.npy"
        run_example("dataset_to_tokens.py", str(tmp_path / name), str(tmp_path), str(target))
        assert load_corpus(str(target), held_out_percent=10).train.tolist() == expected[name][:-1]
