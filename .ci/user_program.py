"""A user's program beside an optim.py and a capture.py of their own; .ci/run runs it."""

import importlib.resources
import pathlib
import sys

import torch

import capture
import graphfsdp
import optim
from graphfsdp.optim import FusedAdam


def train(scope: str) -> list[torch.Tensor]:
    """Return the losses of a few steps on changing batches."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 1))
    optimizer = FusedAdam(model.parameters(), lr=1e-2)

    def loss_fn(model: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        return (model(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()

    with graphfsdp.capture(model, optimizer, loss_fn=loss_fn, scope=scope) as step:
        losses = [step(torch.randn(4, 8)) for _ in range(8)]
        if scope != "none":
            step.report().html("report.html")  # its parts are data files of the wheel
        return losses


def main() -> None:
    """Check the installed package from the outside."""
    here = pathlib.Path(__file__).parent
    for module in (optim, capture):
        if pathlib.Path(module.__file__).parent != here:
            sys.exit(f"import {module.__name__} gave {module.__file__}, not the user's own module")
    installed = pathlib.Path(graphfsdp.__file__).parent
    if "site-packages" not in installed.parts:
        sys.exit(f"import graphfsdp gave {installed}, not the installed package")
    if not importlib.resources.files("graphfsdp").joinpath("py.typed").is_file():
        sys.exit("the wheel has no py.typed: type checkers would ignore the annotations")
    if not importlib.resources.files("graphfsdp.training").joinpath("mllog_rules.yaml").is_file():
        sys.exit("the wheel has no rules for train --mllog")
    if not callable(graphfsdp.capture):
        sys.exit(f"graphfsdp.capture is {graphfsdp.capture!r}, not a function")
    strangers = {path.name.split("-")[0] for path in installed.parent.iterdir()} & {
        *("capture", "optim", "tests", "examples", "benchmarks", "_capture"),
    }
    if strangers:
        sys.exit(f"the wheel adds top-level names besides graphfsdp: {sorted(strangers)}")
    eager, replayed = train("none"), train("full_iteration")
    if not all(map(torch.equal, eager, replayed)):
        sys.exit(f"replay differs from eager: {eager} against {replayed}")
    print(f"{optim.OWNER}; {capture.OWNER}; {len(eager)} losses equal eager's bit for bit")


if __name__ == "__main__":
    main()
