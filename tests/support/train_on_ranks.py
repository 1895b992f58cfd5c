"""The command line on two ranks, several times after each other, since a start takes seconds."""

import contextlib
import gc
import io
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.run import main as torchrun_main

import forked_programs
import training_helpers
from graphfsdp import cli
from ranks import RankPool
from training_helpers import TEXT as TEXT

# A global batch of 8 sequences: 4 micro-batches of one process, 2 of each of two.
SMALL = [*training_helpers.SMALL, "--global-batch-size", "8", "--train-iters", "10", "--lr", "3e-3"]
SMALL += ["--lr-warmup-iters", "4", "--eval-interval", "5", "--eval-iters", "3", "--device", "cpu"]


@dataclass(frozen=True)
class Run:
    """One call of the command line on both ranks."""

    name: str
    arguments: tuple[list[str], list[str]]  # of each rank


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str


@dataclass
class Plan:
    """Runs of two ranks, and what came of them."""

    folder: Path
    runs: list[Run] = field(default_factory=list)
    done: dict[str, list[Answer]] = field(default_factory=dict)

    def add(self, name: str, flags: list[str], *, of_rank_1: tuple[str, ...] = ()) -> None:
        """Add a run of two ranks; ``of_rank_1`` are flags that rank 1 alone gets."""
        own = ["train", *SMALL, "--data", TEXT, "--out", str(self.folder / name), *flags]
        self.runs.append(Run(name, (own, [*own, *of_rank_1])))

    def execute(self, launched: RankPool) -> None:
        """Do the runs, each in a new process group."""
        stores = [launchers_store() for _ in self.runs]
        ports = [store.port for store in stores]
        first, second = launched.run(_run_all, self.runs, ports, limit_s=300)
        for run, *answers in zip(self.runs, first, second, strict=True):
            self.done[run.name] = answers

    def answers(self, name: str) -> list[Answer]:
        """What each rank printed and how it ended."""
        return self.done[name]


# Options of torchrun: its ranks are forked from it, and so need not import torch anew.
FORKS = ("--run-path", "--start-method=fork")


@contextlib.contextmanager
def torchrun(*arguments: str) -> Iterator[forked_programs.Forked]:
    """Start two ranks as the README says; the launcher itself need not import torch anew."""
    options = ("--nproc-per-node=2", "--standalone")  # at a port that the system chooses
    with forked_programs.forked(_launch, [*options, *arguments]) as launcher:
        try:
            yield launcher
        finally:
            if launcher.is_alive():
                launcher.send_signal(signal.SIGTERM)  # it ends its ranks; a kill would leave them
                launcher.ended()


def launchers_store() -> TCPStore:
    """Host what the processes of ``launched2`` meet in, as torchrun does."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _run_all(runs: list[Run], ports: list[int]) -> list[Answer]:
    """Do the runs, as a rank."""
    cli._SAY_FIRST_S = 0.0  # no launcher acts on the end of a run here
    answers = []
    for run, port in zip(runs, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        shown, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(errors):
            code = cli.main(run.arguments[int(os.environ["RANK"])])
        answers.append(Answer(code, shown.getvalue(), errors.getvalue()))
        gc.collect()
        gc.freeze()  # each capture collects garbage; what is here now is none
    return answers


def _launch(arguments: list[str]) -> None:
    os.register_at_fork(after_in_child=_forget_handlers)
    torchrun_main(arguments)


def _forget_handlers() -> None:
    """Be a new process, which has none of the launcher's."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
