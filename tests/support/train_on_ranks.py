"""The command line on two ranks, several times after each other, since a start takes seconds."""

import contextlib
import gc
import io
import os
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.run import main as torchrun_main

import forked_programs
import training_helpers
from graphfsdp import cli
from ranks import RankPool

# A global batch of 8 sequences: 4 micro-batches of one process, 2 of each of two.
SMALL = [*training_helpers.SMALL, "--global-batch-size", "8", "--train-iters", "10", "--lr", "3e-3"]
SMALL += ["--lr-warmup-iters", "4", "--eval-interval", "5", "--eval-iters", "3", "--device", "cpu"]


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str


def run_both(
    launched: RankPool,
    runs: Mapping[str, list[str]],
    of_rank_1: Mapping[str, list[str]] = MappingProxyType({}),
) -> dict[str, list[Answer]]:
    """Call the command line on both ranks, run after run, each in a new process group.

    ``of_rank_1`` are flags that rank 1 alone gets. Returns what each rank printed and how it ended.
    """
    # What the processes of ``launched2`` meet in, hosted as torchrun does.
    stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in runs]
    calls = [
        (store.port, (flags, [*flags, *of_rank_1.get(name, ())]))
        for store, (name, flags) in zip(stores, runs.items(), strict=True)
    ]
    answers = launched.run(_run_all, calls, limit_s=300)
    return {name: both for name, *both in zip(runs, *answers, strict=True)}


def train_both(launched: RankPool, runs: Mapping[str, list[str]]) -> None:
    """Do the same; all must end well."""
    for name, answers in run_both(launched, runs).items():
        assert [answer.code for answer in answers] == [0, 0], (name, answers)


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


def _run_all(calls: list[tuple[int, tuple[list[str], list[str]]]]) -> list[Answer]:
    """Do the runs, as a rank."""
    cli._SAY_FIRST_S = 0.0  # no launcher acts on the end of a run here
    answers = []
    for port, arguments in calls:
        os.environ["MASTER_PORT"] = str(port)
        shown, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(errors):
            code = cli.main(arguments[int(os.environ["RANK"])])
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
