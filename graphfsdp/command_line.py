"""What the commands of the command line share: how they read flags and print lines."""

import argparse
from typing import NoReturn

from rich.console import Console

from graphfsdp.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """Reports a bad flag as every other bad input is reported: one line, no usage block."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; '{self.prog} --help' lists every flag")


def print_line(console: Console, text: str, style: str | None = None) -> None:
    """Print one line, not wrapped, and with nothing in it taken for markup."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
