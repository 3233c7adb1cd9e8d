"""`moe-ckpt train`: checks the settings, then becomes torchrun on launcher/train.py.

    moe-ckpt train --nproc-per-node=4 +ckpt=moevement [OVERRIDES]

A mistake is one line here; under torchrun 30 lines of its own follow.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from launcher.overrides import make_parser, parse
from launcher.train import DESCRIPTION, show
from moe_ckpt.arguments import Parser
from moe_ckpt.errors import exit_status
from moe_ckpt.torchrun_options import (
    add_torchrun_options,
    count_nodes,
    count_processes,
    torchrun_command,
)

_SCRIPT = Path(__file__).with_name("train.py")


def main(arguments: Sequence[str]) -> int:
    """Become torchrun; return only after help, or after one message about a mistake."""

    def start() -> None:
        command = train_command(arguments)
        if command:
            # torchrun takes the place of this process: a signal, and the exit status,
            # are torchrun's own
            os.execv(command[0], command)

    return exit_status(start)


def train_command(arguments: Sequence[str]) -> list[str]:
    """Return the torchrun command of a training.

    Args:
        arguments: Options of torchrun and overrides, in any order.

    Returns:
        The words of the command; none after `--help` and `--cfg`, which are answered
        here.

    Raises:
        ConfigError: An unknown option, a wrong setting, or a layout that does not
            divide.
    """
    options = parse_train(arguments)
    if show(_parser(), options):
        return []
    from launcher.config import compose_settings  # noqa: PLC0415 - Hydra: not for help
    from launcher.job_checks import check_job  # noqa: PLC0415
    from launcher.memory import require_host_memory  # noqa: PLC0415

    settings = compose_settings(options.overrides)
    num_processes, num_nodes = count_processes(options), count_nodes(options)
    if num_processes is not None and num_nodes is not None:
        layout = check_job(settings, num_processes * num_nodes)
        # the first node of several has as many ranks as each, and those of the first
        # stage
        require_host_memory(settings, layout, range(num_processes), is_idle=True)
    return torchrun_command(options, [str(_SCRIPT), *options.overrides])


def parse_train(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options of a training, those of torchrun among them, and its
    overrides. Raises ConfigError.
    """
    return parse(_parser(), arguments)


def _parser() -> Parser:
    parser = make_parser("moe-ckpt train", DESCRIPTION)
    add_torchrun_options(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
