"""``graphfsdp checkpoint show|convert|diff``: the words after it, and what each does."""

import argparse
from collections.abc import Callable, Sequence
from typing import NoReturn

from graphfsdp.checkpoint.convert import convert, describe, differences, open_any
from graphfsdp.errors import ConfigError


class _Parser(argparse.ArgumentParser):
    """Reports a bad word as every other bad input is reported: one line, no usage block."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; '{self.prog} --help' explains")


def run_checkpoint_command(arguments: Sequence[str], say: Callable[[str], None]) -> bool:
    """Run ``show``, ``convert`` or ``diff``.

    Args:
        arguments: The words after ``graphfsdp checkpoint``.
        say: Prints one line.

    Returns:
        False where ``diff`` has found a difference.

    Raises:
        ConfigError: the words cannot be understood.
        CheckpointError: a checkpoint cannot be read or written.
    """
    given = _make_parser().parse_args(arguments)
    if given.command == "show":
        opened = open_any(given.path, given.step)
        for line in describe(opened, verify=given.verify, tensors=given.tensors):
            say(line)
        return True
    if given.command == "convert":
        say(f"written: {convert(given.source, given.target, step=given.step, dtype=given.dtype)}")
        return True
    found = False
    for line in differences(open_any(given.left), open_any(given.right)):
        found = True
        say(line)
    if not found:
        say("equal, bit for bit")
    return not found


def _make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="graphfsdp checkpoint", description="Look at, convert and compare checkpoints."
    )
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    paths = "a folder of checkpoints (its latest), one checkpoint, a .safetensors or a .pt file"
    show = commands.add_parser("show", help="what is inside")
    show.add_argument("path", help=paths)
    show.add_argument("--step", type=int, metavar="N", help="which checkpoint of a folder")
    show.add_argument("--tensors", action="store_true", help="list every tensor")
    show.add_argument("--verify", action="store_true", help="compare every checksum")
    change = commands.add_parser("convert", help="write it in another form")
    change.add_argument("source", help=paths)
    change.add_argument(
        "target", help="a new .safetensors file (the model), a new .pt file (a full state dict of "
        "model and optimizer), or a folder, for a checkpoint",
    )  # fmt: skip
    change.add_argument("--step", type=int, metavar="N", help="which checkpoint of a folder")
    change.add_argument(
        "--dtype", metavar="NAME", help="of the model's tensors in a file, such as bfloat16"
    )
    diff = commands.add_parser(
        "diff", help="compare two; exit code 1 where they differ, 2 where one cannot be read"
    )
    diff.add_argument("left", help=paths)
    diff.add_argument("right", help=paths)
    return parser
