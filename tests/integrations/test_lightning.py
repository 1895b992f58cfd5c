"""Lightning's training with captured parts: its own numbers, bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from helpers import quick_garbage_collection

try:
    import lightning.pytorch as pl
except ImportError:
    pl = pytest.importorskip("pytorch_lightning", reason="lightning is not installed")

from graphfsdp.integrations.lightning import CapturedTraining

# Warnings of the library's own.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.time_limit(300)]


class Net(pl.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2))
        self.head = nn.Linear(8, 1)
        self.seen: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.mse_loss(self.head(self.net(batch[0])), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validation", self.head(self.net(batch[0])).mean())

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        norm = self.head.weight.grad
        assert norm is not None
        self.log("norm", norm.norm())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(outputs["loss"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def fit(net: Any, path: Path, *, captured: bool, resume: Path | None = None, **options: Any) -> Any:
    quick_garbage_collection()
    x = torch.linspace(-1, 1, 26 * 4).reshape(26, 4)
    data = TensorDataset(x, x.sum(dim=1, keepdim=True))
    torch.manual_seed(1)
    trainer = pl.Trainer(
        **{"max_epochs": 2, "enable_checkpointing": False} | options,
        accelerator="cpu",
        devices=1,
        logger=pl.loggers.CSVLogger(str(path)),
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[CapturedTraining(keep="all")] if captured else [],
    )
    loader = DataLoader(data, batch_size=4, shuffle=True)
    trainer.fit(net, loader, DataLoader(data, batch_size=13), ckpt_path=resume)
    return trainer


def assert_same(one: Any, other: Any) -> None:
    assert all(torch.equal(a, b) for a, b in zip(one.seen, other.seen, strict=True))
    for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5, "max_epochs": 4},
        {"precision": "bf16-mixed"},
    ],
    ids=["accumulated and clipped", "bf16"],
)
def test_a_captured_step_has_lightning_s_bits(options: dict[str, Any], tmp_path: Path) -> None:
    plain, captured = Net(), Net()
    one = fit(plain, tmp_path / "plain", captured=False, **options)
    other = fit(captured, tmp_path / "captured", captured=True, **options)
    assert one.global_step == other.global_step
    assert_same(plain, captured)
    logs = [
        (tmp_path / way / "lightning_logs" / "version_0" / "metrics.csv").read_text()
        for way in ("plain", "captured")
    ]
    assert logs[0] == logs[1]
    assert "loss_epoch" in logs[0]
    (callback,) = (c for c in other.callbacks if isinstance(c, CapturedTraining))
    assert callback.report is not None
    assert any(part.num_replays for part in callback.report.parts)


def test_checkpoints_are_lightning_s(tmp_path: Path) -> None:
    """A captured training saves, and the library's own goes on from there, and the reverse."""
    ends = []
    for first, second in ((False, False), (True, False), (False, True)):
        saved = tmp_path / f"{first}{second}.ckpt"
        fit(Net(), tmp_path, captured=first).save_checkpoint(saved)
        net = Net()
        fit(net, tmp_path, captured=second, resume=saved, max_epochs=4)
        ends.append(net)
    assert_same(ends[0], ends[1])
    assert_same(ends[0], ends[2])


class Adversarial(pl.LightningModule):  # type: ignore[misc]
    """Two optimizers in manual optimization, one part frozen at a time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.maker = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 4))
        self.critic = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        self.seen: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        softplus = nn.functional.softplus
        of_maker, of_critic = self.optimizers()
        self.toggle_optimizer(of_maker)
        loss = softplus(-self.critic(self.maker(batch[0]))).mean()
        of_maker.zero_grad()
        self.manual_backward(loss)
        of_maker.step()
        self.untoggle_optimizer(of_maker)
        self.toggle_optimizer(of_critic)
        gap = softplus(self.critic(self.maker(batch[0]).detach()) - self.critic(batch[0])).mean()
        of_critic.zero_grad()
        self.manual_backward(gap)
        of_critic.step()
        self.untoggle_optimizer(of_critic)
        self.log_dict({"loss": loss, "gap": gap})

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen += [each.clone() for each in self.trainer.callback_metrics.values()]

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(part.parameters(), 1e-2) for part in (self.maker, self.critic)]


class Counting(Net):
    """Goes two ways by the number of the batch, has a parameter and a count of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("count", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.count += 1
        loss = super().training_step(batch, batch_idx) * self.scale.exp()
        return loss * (2 if batch_idx % 2 else 1)


@pytest.mark.parametrize("kind", [Adversarial, Counting])
def test_a_module_may_do_what_lightning_allows(kind: Any, tmp_path: Path) -> None:
    plain, captured = kind(), kind()
    for net in (plain, captured):
        fit(net, tmp_path, captured=net is captured, max_epochs=4)
    assert len(plain.seen) > 20
    assert_same(plain, captured)
