"""A torch that is newer than what was tested is told of, once, and used."""

import os
import pathlib
import re
import subprocess
import sys
import warnings

import pytest

from graphfsdp.newer_torch import NEWEST_TESTED, warn_if_newer

ROOT = pathlib.Path(__file__).resolve().parents[2]
MAJOR, MINOR = map(int, NEWEST_TESTED.split("."))
NEXT = f"{MAJOR}.{MINOR + 1}"
TRAIN = f"""
import torch
torch.__version__ = torch.torch_version.TorchVersion("{NEXT}.0.dev20261001+cpu")
import graphfsdp
import graphfsdp.optim
model = torch.nn.Linear(4, 1)
optimizer = graphfsdp.optim.FusedAdam(model.parameters(), lr=0.1)
loss_fn = lambda model, x: model(x).square().mean()
with graphfsdp.capture(model, optimizer, loss_fn=loss_fn) as step:
    for _ in range(4):
        step(torch.randn(2, 4))
    print(step.phase.name)
"""


@pytest.mark.parametrize(
    ("version", "is_newer"),
    [
        *((f"{NEXT}{rest}", True) for rest in (".0", ".0.dev20261001+cu130", ".0a0+git0123abc")),
        *((version, True) for version in (f"{NEXT}.1+cpu", f"{MAJOR}.{MINOR + 10}.0")),
        (f"{MAJOR + 1}.0.0", True),
        *((f"{NEWEST_TESTED}{rest}", False) for rest in (".0", ".1+cu130", ".0.dev20260801")),
        *(("2.11.0+cpu", False), ("2.9.1", False)),
    ],
)
def test_newer_releases_are_told_of_and_patches_are_not(version: str, is_newer: bool) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_if_newer(version)
    texts = [str(one.message) for one in caught]
    assert len(texts) == is_newer
    for text in texts:
        assert f"torch {version} is newer than {NEWEST_TESTED}" in text
        assert "Remedy: " in text


def run(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *options, "-c", TRAIN],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )


def test_importing_warns_once_at_the_users_line_and_captures_work() -> None:
    done = run()
    assert done.stderr.count("is newer than") == 1
    assert "<string>:4: UserWarning: torch" in done.stderr
    assert done.stdout.strip() == "REPLAY"


def test_the_warning_can_be_turned_off_and_comes_from_one_rank() -> None:
    assert run("-W", "ignore::UserWarning").stderr == ""
    assert run(LOCAL_RANK="1").stderr == ""


def test_the_newest_tested_release_is_the_newest_that_is_tested() -> None:
    found = re.search(
        r"^NEWEST_TORCH \?= (\d+\.\d+)\.", (ROOT / "Makefile").read_text(), re.MULTILINE
    )
    assert found
    assert found[1] == NEWEST_TESTED
