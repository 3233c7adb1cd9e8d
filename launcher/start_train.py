"""`moe-ckpt train`: checks the settings, then becomes torchrun on launcher/train.py.

    moe-ckpt train --nproc-per-node=4 +ckpt=moevement [OVERRIDES]

An error in the settings is one line here; under torchrun 30 lines of torchrun follow.
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
from moe_ckpt.elastic.torchrun_variables import require_spares
from moe_ckpt.errors import exit_status
from moe_ckpt.torchrun_options import (
    add_torchrun_options,
    count_nodes,
    count_processes,
    torchrun_command,
)

_SCRIPT = Path(__file__).with_name("train.py")


def main(arguments: Sequence[str]) -> int:
    """Replace this process by torchrun.

    Args:
        arguments: The words of the command line.

    Returns:
        The exit status after help, or after one message about an error. Otherwise the
        function does not return.
    """

    def start() -> None:
        command = train_command(arguments)
        if command:
            # torchrun takes the place of this process: signals go to torchrun, and the
            # exit status is that of torchrun
            os.execv(command[0], command)

    return exit_status(start)


def train_command(arguments: Sequence[str]) -> list[str]:
    """Return the torchrun command of a training.

    Args:
        arguments: Options of torchrun and overrides, in any order.

    Returns:
        The words of the command; none for `--help` and `--cfg`, which are answered
        here.

    Raises:
        ConfigError: An option is unknown, a setting is wrong, or the layout does not
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
        spare_nodes = settings.job.runtime.spare_nodes
        require_spares(num_nodes, spare_nodes)
        layout = check_job(settings, num_processes * (num_nodes - spare_nodes))
        # the first of several nodes has as many ranks as each node, and has the ranks
        # of the first stage
        require_host_memory(settings, layout, range(num_processes), is_idle=True)
    return torchrun_command(options, [str(_SCRIPT), *options.overrides])


def parse_train(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line of a training.

    Args:
        arguments: Options of torchrun and overrides, in any order.

    Returns:
        The options, with those of torchrun, and the overrides as `overrides`.

    Raises:
        ConfigError: An option is unknown, or a setting has two values.
    """
    return parse(_parser(), arguments)


def _parser() -> Parser:
    parser = make_parser("moe-ckpt train", DESCRIPTION)
    add_torchrun_options(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
