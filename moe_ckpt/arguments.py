"""The parser of every command of this project: an error is a ConfigError of one line.

Pure: standard library only.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

from moe_ckpt.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """Raises ConfigError where argparse would print a usage and end the process.

    Options have no abbreviations: an abbreviation of today is ambiguous with an option
    of tomorrow. Line breaks of descriptions are kept.

        parser = Parser(
            prog="moe-ckpt status", description="Show what a run's ranks are doing."
        )
    """

    def __init__(
        self,
        *,
        prog: str | None = None,
        description: str | None = None,
        epilog: str | None = None,
        add_help: bool = True,
    ) -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            add_help=add_help,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError with argparse's message, which names the word."""
        raise ConfigError(f"{message}; `{self.prog} --help` lists all options")


def parse_before_program(
    parser: Parser, arguments: Sequence[str]
) -> tuple[argparse.Namespace, list[str]]:
    """Return the options of a command that starts a program, and the program's words.

    Args:
        parser: The options of the command, without positional arguments.
        arguments: Options, and then the program with its arguments: all words after
            `--`, or from the first word that is no option.

    Raises:
        ConfigError: An unknown option, or an option without its value.
    """
    parser.add_argument(
        "program",
        nargs=argparse.REMAINDER,
        metavar="-- PROGRAM",
        help="what is started",
    )
    options = parser.parse_args(arguments)
    program = options.program[1:] if options.program[:1] == ["--"] else options.program
    return options, program
