"""`moe-ckpt run`: checks the settings, then becomes torchrun on `moe_ckpt.run`.

    moe-ckpt run --nproc-per-node=4 [OPTIONS] -- SCRIPT ARGUMENTS

A mistake is one line here; under torchrun 30 lines of its own follow.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from moe_ckpt.arguments import Parser, parse_before_program
from moe_ckpt.errors import exit_status
from moe_ckpt.run import require_guarded
from moe_ckpt.run_settings import add_run_options, parse_run, run_words
from moe_ckpt.torchrun_options import add_torchrun_options, torchrun_command

_DESCRIPTION = (
    "Trains with a script of Megatron-LM, Megatron-Bridge or ms-swift, unchanged, and"
    " fault tolerance."
)


def main(arguments: Sequence[str]) -> int:
    """Become torchrun. The function returns only after one message about a mistake."""

    def start() -> None:
        command = run_command(arguments)
        # torchrun takes the place of this process, so that signals and the exit status
        # are torchrun's own
        os.execv(command[0], command)

    return exit_status(start)


def run_command(arguments: Sequence[str]) -> list[str]:
    """Return the torchrun command of an attached run.

    Args:
        arguments: Options of torchrun and of `moe_ckpt.run`, in any order, and the
            program that trains.

    Returns:
        The words of the command.

    Raises:
        ConfigError: An unknown option, a wrong setting, or a program that cannot be
            run.
    """
    options, program = parse_start(arguments)
    words = [*run_words(options), "--", *program]
    require_guarded(parse_run(words).command)
    return torchrun_command(options, ["-m", "moe_ckpt.run", *words])


def parse_start(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options of a command line, and the words of the program.

    Raises:
        ConfigError: An unknown option, or an option without its value.
    """
    parser = Parser(prog="moe-ckpt run", description=_DESCRIPTION)
    add_run_options(parser)
    add_torchrun_options(parser)
    return parse_before_program(parser, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
