"""Hugging Face's Trainer with captured updates: the numbers of the Trainer, bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from helpers import quick_garbage_collection

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

from transformers import TrainerCallback  # noqa: E402

from graphfsdp.integrations.transformers import CapturedTrainer, CapturedTraining  # noqa: E402

# Warnings of the libraries' own.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.time_limit(300)]

SIZES = {
    "vocab_size": 40,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
}


class Sentences(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Padded, and not a multiple of the batch."""

    def __init__(self) -> None:
        self.ids = torch.randint(3, 40, (21, 8), generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        shown = (torch.arange(8) < 8 - index % 4).long()
        labels = torch.where(shown > 0, self.ids[index], -100)
        return {"input_ids": self.ids[index], "attention_mask": shown, "labels": labels}


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module
    if kind == "llama":  # is told how many words all batches of an update have
        config = transformers.LlamaConfig(**SIZES, attention_dropout=0.2, use_cache=False)
        model = transformers.LlamaForCausalLM(config)
    else:
        model = transformers.BertForMaskedLM(transformers.BertConfig(**SIZES))
    return model


def trainer_of(cls: Any, path: Path, kind: str = "bert", **settings: Any) -> Any:
    quick_garbage_collection()
    defaults = {
        "num_train_epochs": 3,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "save_strategy": "no",
        "logging_steps": 1,
    }
    arguments = transformers.TrainingArguments(
        output_dir=str(path), use_cpu=True, report_to=[], disable_tqdm=True, **defaults | settings
    )
    sentences = Sentences()
    return cls(
        model=model_of(kind), args=arguments, train_dataset=sentences, eval_dataset=sentences
    )


def logs_of(trainer: Any) -> list[dict[str, Any]]:
    told = ("loss", "grad_norm", "learning_rate", "eval_loss", "step")
    return [{k: v for k, v in log.items() if k in told} for log in trainer.state.log_history]


def assert_same_weights(one: nn.Module, other: nn.Module) -> None:
    for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("llama", {"gradient_accumulation_steps": 2}),
        ("bert", {"gradient_accumulation_steps": 2, "bf16": True, "max_grad_norm": 0.0}),
        ("bert", {"optim": "sgd", "label_smoothing_factor": 0.1, "max_grad_norm": 0.5}),
    ],
    ids=["accumulated", "bf16", "smoothed"],
)
def test_an_update_as_one_graph_has_the_trainer_s_bits(
    kind: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    plain = trainer_of(transformers.Trainer, tmp_path, kind, **settings)
    plain.train()
    captured = trainer_of(CapturedTrainer, tmp_path, kind, **settings)
    captured.train()
    assert logs_of(plain) == logs_of(captured)
    assert_same_weights(plain.model, captured.model)


def test_checkpoints_and_evaluations_are_the_trainer_s(tmp_path: Path) -> None:
    """One trainer saves and the other goes on."""
    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 8, "num_train_epochs": 2}
    settings |= {"eval_strategy": "steps", "eval_steps": 5, "weight_decay": 0.1}
    ends = []
    for first, second in (
        (transformers.Trainer, transformers.Trainer),
        (CapturedTrainer, CapturedTrainer),
        (CapturedTrainer, transformers.Trainer),
    ):
        path = tmp_path / f"{first.__name__}{second.__name__}"
        for cls in (first, second):
            trainer = trainer_of(cls, path, **settings)
            saved = path / "checkpoint-8"
            trainer.train(resume_from_checkpoint=str(saved) if saved.exists() else None)
        ends.append(trainer)
    for other in ends[1:]:
        assert logs_of(ends[0]) == logs_of(other)
        assert_same_weights(ends[0].model, other.model)


class Watcher(TrainerCallback):  # type: ignore[misc]
    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Look at gradients."""


def test_what_it_cannot_do_is_refused_by_name(tmp_path: Path) -> None:
    trainer = trainer_of(CapturedTrainer, tmp_path, torch_empty_cache_steps=2)
    with pytest.raises(graphfsdp.ConfigError, match=r"torch_empty_cache_steps=2\. Remedy: leave"):
        trainer.train()
    trainer = trainer_of(CapturedTrainer, tmp_path)
    trainer.add_callback(Watcher())
    with pytest.raises(graphfsdp.ConfigError, match=r"Watcher has on_pre_optimizer_step.*on_step_"):
        trainer.train()
    trainer = trainer_of(CapturedTrainer, tmp_path, optim="adafactor")
    with pytest.raises(graphfsdp.CaptureError, match="Adafactor") as caught:
        trainer.train()
    assert "the callback CapturedTraining" in caught.value.__notes__[0]


class Weighted(CapturedTrainer):
    """A loss of the user's own, which counts in Python."""

    weight = 0.5

    def compute_loss(self, model: nn.Module, inputs: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, inputs, **kwargs)
        return loss * self.weight


def test_a_number_that_a_loss_of_one_s_own_reads_is_guarded(tmp_path: Path) -> None:
    class Change(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, *others: Any, **kwargs: Any) -> None:
            if state.global_step == 7:
                trainer.weight = 2.0

    trainer = trainer_of(Weighted, tmp_path)
    trainer._capture_options["on_change"] = "raise"
    trainer.args.dataloader_drop_last = True
    trainer.add_callback(Change())
    with pytest.raises(graphfsdp.GuardError, match=r"'weight' of .* is now 2\.0"):
        trainer.train()


class Own(transformers.Trainer):  # type: ignore[misc, name-defined]
    """With a training step of its own, which looks at its loss, as trainers of TRL do."""

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = super().training_step(model, inputs, *args, **kwargs)
        return loss if loss.item() < 1e9 else loss * 0


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_a_trainer_of_any_class_is_captured_in_parts(kind: str, tmp_path: Path) -> None:
    settings = {"gradient_accumulation_steps": 2, "eval_strategy": "epoch", "max_grad_norm": 0.5}
    plain = trainer_of(Own, tmp_path, kind, **settings)
    plain.train()
    captured = trainer_of(Own, tmp_path, kind, **settings)
    callback = CapturedTraining(keep="all")
    captured.add_callback(callback)
    captured.train()
    assert logs_of(captured) == logs_of(plain)
    assert_same_weights(captured.model, plain.model)
    assert callback.report is not None
    assert any(part.num_replays for part in callback.report.parts), str(callback.report)
    inherits = trainer_of(type("Captured", (CapturedTrainer, Own), {}), tmp_path, kind, **settings)
    inherits.train()
    assert logs_of(inherits) == logs_of(plain)
    assert_same_weights(inherits.model, plain.model)
    assert not any(isinstance(c, CapturedTraining) for c in inherits.callback_handler.callbacks)
