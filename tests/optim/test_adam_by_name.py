"""Adam by the name of its library."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from graphfsdp.errors import ConfigError
from graphfsdp.optim import FusedAdam, make_adam

NUMBERS: dict[str, Any] = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.2}


@pytest.mark.parametrize("backend", ["auto", "native", "torch"])
@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_each_backend_can_be_captured_and_takes_the_same_steps(
    device: torch.device, backend: str, adam_w_mode: bool
) -> None:
    def train(name: str, scope: str) -> Tensor:
        torch.manual_seed(0)
        model = nn.Linear(4, 3).to(device)
        groups: list[dict[str, Any]] = [
            {"params": [model.weight]},
            {"params": model.bias, "lr": 0.2},
        ]
        optimizer = make_adam(groups, **NUMBERS, backend=name, adam_w_mode=adam_w_mode)
        with graphfsdp.capture(
            model, optimizer, scope=scope, loss_fn=lambda m, x: m(x).square().mean()
        ) as step:
            for _ in range(8):
                step(torch.randn(5, 4).to(device))
        return model.weight.detach().clone()

    found = train(backend, "full_iteration")
    assert torch.equal(found, train(backend, "none"))
    torch.testing.assert_close(found, train("native", "none"))


def test_names_select_classes_and_settings_go_through() -> None:
    model = nn.Linear(2, 2)
    ours = make_adam(model.named_parameters(), **NUMBERS, max_grad_norm=1.0)
    assert isinstance(ours, FusedAdam)
    assert ours.settings.max_grad_norm == 1.0
    for mode, cls in ((True, torch.optim.AdamW), (False, torch.optim.Adam)):
        theirs = make_adam(model.parameters(), backend="torch", adam_w_mode=mode, amsgrad=True)
        assert type(theirs) is cls
        group = theirs.param_groups[0]
        assert group["fused"]
        assert group["amsgrad"]


def test_what_a_backend_does_not_know_is_named() -> None:
    params = list(nn.Linear(2, 2).parameters())
    with pytest.raises(ConfigError, match=r"AdamW does not know master_weights\. Remedy"):
        make_adam(params, backend="torch", master_weights=True)
    with pytest.raises(ConfigError, match="one of 'auto', 'native', 'torch', 'te', 'apex'; got"):
        make_adam(params, backend="cuda")


@pytest.fixture
def package_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that is imported from first; modules from it are forgotten afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    names = ("apex", "amp_C", "transformer_engine")
    for name in [name for name in sys.modules if name.split(".")[0] in names]:
        monkeypatch.delitem(sys.modules, name)
    importlib.invalidate_caches()
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] in names]:
        del sys.modules[name]


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    importlib.invalidate_caches()


FUSED_ADAM = """
import torch
class FusedAdam(torch.optim.AdamW):
    def __init__(self, params, lr, betas, eps, weight_decay, adam_w_mode, capturable):
        self.made = (adam_w_mode, capturable)
        super().__init__(params, lr, betas, eps, weight_decay, fused=True)
"""


def test_transformer_engine_is_made_capturable(package_folder: Path) -> None:
    write(
        package_folder,
        {
            "transformer_engine/__init__.py": "",
            "transformer_engine/pytorch/__init__.py": "",
            "transformer_engine/pytorch/optimizers.py": FUSED_ADAM,
        },
    )
    made: Any = make_adam(nn.Linear(2, 2).parameters(), **NUMBERS, backend="te")
    assert type(made).__module__ == "transformer_engine.pytorch.optimizers"
    assert made.made == (True, True)
    assert made.param_groups[0]["betas"] == (0.8, 0.9)


@pytest.mark.parametrize("failure", ["RuntimeError", "OSError", "ImportError"])
def test_a_transformer_engine_that_cannot_be_imported_is_reported(
    package_folder: Path, failure: str
) -> None:
    write(package_folder, {"transformer_engine/__init__.py": f"raise {failure}('no cudnn')"})
    with pytest.raises(ConfigError, match=r"needs Transformer Engine.*no cudnn.*--no-build-iso"):
        make_adam(nn.Linear(2, 2).parameters(), backend="te")


def test_nvidias_apex_is_made_capturable(package_folder: Path) -> None:
    write(
        package_folder,
        {"amp_C.py": "", "apex/__init__.py": "", "apex/optimizers.py": FUSED_ADAM},
    )
    made: Any = make_adam(nn.Linear(2, 2).parameters(), backend="apex", adam_w_mode=False)
    assert type(made).__module__ == "apex.optimizers"
    assert made.made == (False, True)


APEX_METADATA = "Metadata-Version: 2.1\nName: apex\nVersion: 0.9.10.dev0\n"


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (
            {"apex/__init__.py": "", "apex-0.9.10.dev0.dist-info/METADATA": APEX_METADATA},
            r"package apex 0\.9\.10\.dev0 is another one.*Pyramid.*pip uninstall apex",
        ),
        (
            {"apex/__init__.py": "", "apex/optimizers.py": FUSED_ADAM},
            "needs apex's CUDA extensions.*amp_C.*github.com/NVIDIA/apex",
        ),
        (
            {
                "amp_C.py": "",
                "apex/__init__.py": "",
                "apex/optimizers.py": FUSED_ADAM.replace(", capturable):", "):").replace(
                    "(adam_w_mode, capturable)", "None"
                ),
            },
            "too old to be captured",
        ),
        ({}, "NVIDIA's apex, which is not installed"),
    ],
    ids=["of PyPI", "without CUDA", "old", "none"],
)
def test_an_apex_that_is_of_no_use_is_recognised(
    package_folder: Path, files: dict[str, str], words: str
) -> None:
    write(package_folder, files)
    with pytest.raises(ConfigError, match=words):
        make_adam(nn.Linear(2, 2).parameters(), backend="apex")
