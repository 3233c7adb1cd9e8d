"""Trains a Mixture-of-Experts model with Megatron-Core and a checkpoint policy.

    torchrun --nproc-per-node=4 launcher/train.py [ckpt=dense] [model=small]
                                                  [train.iterations=50] ...

`python launcher/train.py --help` lists every setting.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from moe_ckpt.agent import end_with_agent

if __name__ == "__main__":
    # if this file was not installed, `launcher` is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    # before anything slow: if the agent is killed during the imports, this process ends
    # too
    end_with_agent()

from launcher.overrides import help_text, make_parser, parse
from moe_ckpt.arguments import Parser
from moe_ckpt.elastic.torchrun_variables import read_launch, require_spares
from moe_ckpt.errors import MoeCkptError
from moe_ckpt.run import report_error

_FAILED = 1
DESCRIPTION = (
    "Trains a Mixture-of-Experts model with Megatron-Core and fault tolerance from"
    " moe_ckpt."
)
_EXAMPLE = "\n\n    torchrun --nproc-per-node=4 launcher/train.py [OVERRIDES]"


def main(arguments: Sequence[str]) -> int:
    """Train, show help, or print one message about an error.

    Args:
        arguments: The words of the command line.

    Returns:
        The exit status.
    """
    parser = make_parser("launcher/train.py", DESCRIPTION + _EXAMPLE)
    try:
        options = parse(parser, arguments)
        if show(parser, options):
            return 0
        return _train(options.overrides)
    except MoeCkptError as error:
        report_error(str(error))
        return _FAILED


def show(parser: Parser, options: argparse.Namespace) -> bool:
    """Print the output of `--help` or `--cfg`.

    Args:
        parser: The parser of the command.
        options: The parsed options.

    Returns:
        Whether either option was given.
    """
    if options.help:
        print(parser.format_help(), help_text("config", options.overrides), sep="\n")
    elif options.cfg:
        from launcher.config import compose_settings  # noqa: PLC0415 - Hydra: not for help

        print(compose_settings(options.overrides).composed_yaml, end="")
    return bool(options.help or options.cfg)


def _train(overrides: Sequence[str]) -> int:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    # shows the choice of `ckpt.window=auto`
    logging.getLogger("moe_ckpt.engine.session").setLevel(logging.INFO)
    # hides notes that are for Megatron's own training script
    logging.getLogger("megatron").setLevel(logging.ERROR)
    choose_warnings()
    from launcher.config import compose_settings  # noqa: PLC0415 - Hydra: not for help
    from launcher.job_checks import check_job  # noqa: PLC0415
    from launcher.memory import require_host_memory  # noqa: PLC0415

    settings = compose_settings(overrides)
    # before the imports below, so that a start that cannot work is refused at once
    launch = read_launch("launcher/train.py")
    spare_nodes = settings.job.runtime.spare_nodes
    require_spares(launch.num_nodes, spare_nodes)
    num_nodes = launch.num_nodes - spare_nodes
    layout = check_job(settings, num_nodes * launch.local_world_size)
    # a spare node may become any node
    is_spare = launch.node >= num_nodes
    for node in range(num_nodes) if is_spare else [launch.node]:
        here = launch.as_node(node, num_nodes).local_ranks
        require_host_memory(settings, layout, here, is_idle=False)
    # imports of seconds: not for help, not for a mistyped key
    from launcher.entry import start  # noqa: PLC0415

    return start(settings)


def choose_warnings() -> None:
    """Hide irrelevant warnings of each rank, and keep those of unrepeatable kernels.

    Hidden warnings say that a device lacks something. With `run.exactness=bitwise` an
    unrepeatable kernel only warns, but a replay would end in another state.
    """
    warnings.filterwarnings("ignore", module=r"(megatron|torch|moe_ckpt)\.")
    warnings.filterwarnings(
        "once", message=r"(?s).*(does not have a deterministic|nondeterministic)"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
