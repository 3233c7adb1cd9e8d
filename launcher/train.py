"""Train a Mixture-of-Experts model with Megatron-Core and a checkpoint policy.

    torchrun --nproc-per-node=4 launcher/train.py [ckpt=dense] [model=small] [train.iterations=50] ...

`python launcher/train.py --help` lists every setting.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from moe_ckpt.agent import end_with_agent

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # where this file was not installed under its name
    end_with_agent()  # before anything slow: an agent that is killed during the imports leaves no orphan

from launcher.config import GROUPS, compose_settings, show_with_hydra
from moe_ckpt import __version__
from moe_ckpt.elastic.torchrun import read_launch
from moe_ckpt.errors import MoeCkptError
from moe_ckpt.run import report_error

_FAILED = 1


def main(arguments: Sequence[str]) -> int:
    """Train, show help, or say in one message why not; return the exit status."""
    if "--version" in arguments:
        print(f"moe-ckpt {__version__}")
        return 0
    if any(argument.startswith("-") for argument in arguments):
        return show_with_hydra("config", arguments, GROUPS)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    logging.getLogger("moe_ckpt.engine.session").setLevel(logging.INFO)  # what ckpt.window=auto chooses
    logging.getLogger("megatron").setLevel(logging.ERROR)  # notes to Megatron's own training script
    choose_warnings()
    try:
        settings = compose_settings(arguments)
        # before the imports below, so that a start without torchrun is refused at once
        read_launch("launcher/train.py")
        from launcher.entry import start  # noqa: PLC0415 - seconds of imports: not for help, not for a mistyped key

        return start(settings)
    except MoeCkptError as error:
        report_error(str(error))
        return _FAILED


def choose_warnings() -> None:
    """Hide the warnings of each rank about a device that lacks something, but not those of kernels that do not repeat.

    With `train.deterministic` such a kernel only warns; a replay would then end elsewhere.
    """
    warnings.filterwarnings("ignore", module=r"(megatron|torch|moe_ckpt\.megatron)\.")
    warnings.filterwarnings("once", message=r"(?s).*(does not have a deterministic|nondeterministic)")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
