"""The command line: ``graphfsdp COMMAND ...``, also as ``python -m graphfsdp COMMAND ...``."""

import functools
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console

import graphfsdp
from graphfsdp.command_line import print_line
from graphfsdp.errors import CheckpointError, ConfigError, GraphFSDPError

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130  # as a shell reports a process that Ctrl-C ended
# A launcher ends all processes when one has ended: the first one needs time to say why.
_SAY_FIRST_S = 5.0


@dataclass(frozen=True)
class Command:
    name: str
    summary: str
    run: Callable[[Sequence[str]], int | None]  # returns an exit code other than 0


def _train(arguments: Sequence[str]) -> None:
    # Here, since the trainer is much to import for another command's help.
    from graphfsdp.training.arguments import parse_train_arguments
    from graphfsdp.training.loop import train

    train(parse_train_arguments(arguments), Console())


def _plan(arguments: Sequence[str]) -> None:
    from graphfsdp.planning.command import run_plan

    run_plan(arguments, Console())


def _bench(arguments: Sequence[str]) -> int:
    from graphfsdp.bench.command import run_bench

    return run_bench(arguments, Console())


def _check(arguments: Sequence[str]) -> int:
    from graphfsdp.preflight.command import run_check

    return run_check(arguments)


def _checkpoint(arguments: Sequence[str]) -> int:
    from graphfsdp.checkpoint.convert import run_checkpoint_command

    say = functools.partial(print_line, Console())
    try:
        return 0 if run_checkpoint_command(arguments, say) else EXIT_FAILED
    except CheckpointError as error:
        if arguments[:1] != ["diff"]:
            raise
        # 1 says that two differ, as with the diff of files
        _complain_of_rank(str(error))
        return EXIT_BAD_INPUT


COMMANDS = (
    Command("train", "train a GPT with the whole iteration in one graph", _train),
    Command("bench", "measure what the capture brings, beside what people use instead", _bench),
    Command("plan", "tell what each rank of a training run will need, without the ranks", _plan),
    Command("checkpoint", "show, convert and compare checkpoints", _checkpoint),
    Command("check", "tell what a graph could not hold of a training program", _check),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 done; 1 failed, hazards or differences found; 2 bad input; 130 interrupted.

    Of several processes that a launcher has started, the first on each machine tells of bad
    input and interruption, which are common to all. A failure may be one rank's alone, so that
    rank tells of it.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    speaks = os.environ.get("LOCAL_RANK", "0") == "0"
    errors = Console(stderr=True, quiet=not speaks)
    try:
        return _dispatch(arguments)
    except SystemExit as done:  # argparse, after printing a help
        return done.code if isinstance(done.code, int) else 0
    except KeyboardInterrupt:
        print_line(errors, "interrupted; what was logged so far is kept")
        return EXIT_INTERRUPTED
    except ConfigError as error:
        print_line(errors, f"error: {' '.join(str(error).split())}")
        if not speaks:
            time.sleep(_SAY_FIRST_S)
        return EXIT_BAD_INPUT
    except torch.OutOfMemoryError as error:
        reason = str(error).split(". ")[0]
        _complain_of_rank(f"{reason}; try a smaller --micro-batch-size or --bf16")
        return EXIT_FAILED
    except (GraphFSDPError, OSError) as error:
        _complain_of_rank(str(error))
        return EXIT_FAILED


def _dispatch(arguments: list[str]) -> int:
    if arguments[:1] in (["-h"], ["--help"]):
        print_line(Console(), _usage())
        return 0
    if arguments[:1] == ["--version"]:
        print_line(Console(), f"graphfsdp {graphfsdp.__version__}")
        return 0
    known = ", ".join(command.name for command in COMMANDS)
    if not arguments:
        raise ConfigError(f"no command given; expected {known}: graphfsdp --help explains")
    for command in COMMANDS:
        if command.name == arguments[0]:
            return command.run(arguments[1:]) or 0
    raise ConfigError(f"unknown command {arguments[0]!r}; expected {known}")


def _usage() -> str:
    commands = "\n".join(f"  {command.name:<10} {command.summary}" for command in COMMANDS)
    return (
        f"usage: graphfsdp COMMAND ...\n\ncommands:\n{commands}\n\n"
        f"'graphfsdp COMMAND --help' lists a command's flags; --version prints the version"
    )


def _complain_of_rank(text: str) -> None:
    several = os.environ.get("WORLD_SIZE", "1") != "1"
    prefix = f"rank {os.environ.get('RANK', '?')}: " if several else ""
    print_line(Console(stderr=True), f"{prefix}error: {text}")
