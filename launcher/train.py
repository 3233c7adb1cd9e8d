"""Train a Mixture-of-Experts model with Megatron-Core and a checkpoint policy.

    torchrun --nproc-per-node=4 launcher/train.py [ckpt=dense] [model=small] [train.iterations=50] ...

`python launcher/train.py --help` lists every setting.
"""

from __future__ import annotations

import gc
import logging
import sys
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import hydra

from launcher.config import CONF_DIR, Settings, compose_settings, group_choice_without_plus
from moe_ckpt.errors import MoeCkptError

if TYPE_CHECKING:
    from launcher.elastic import RankPlace

_FAILED = 1


def main(arguments: Sequence[str]) -> int:
    """Train, show help, or say in one message why not; return the exit status."""
    if any(argument.startswith("-") for argument in arguments):
        return _show_with_hydra(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    logging.getLogger("megatron").setLevel(logging.ERROR)  # notes to Megatron's own training script
    warnings.filterwarnings("ignore", module=r"(megatron|torch|moe_ckpt\.adapters)\.")  # every rank: what a CPU lacks
    try:
        settings = compose_settings(arguments)
        from launcher.elastic import guard_rank, wants_guard  # noqa: PLC0415 - seconds of imports: not for help
        from launcher.launch import read_launch  # noqa: PLC0415

        if wants_guard(settings):
            return guard_rank(settings, read_launch(), lambda place, life: _train_guarded(settings, place, life))
        _train(settings)
    except MoeCkptError as error:
        return _say(error)
    return 0


def _train(settings: Settings) -> None:
    from launcher.run import run  # noqa: PLC0415

    gc.freeze()  # what was imported stays: Megatron collects garbage at every save
    run(settings)


def _train_guarded(settings: Settings, place: RankPlace, life: int) -> int:
    """Be one of a rank's trainers; return its exit status."""
    from launcher.run import run_guarded  # noqa: PLC0415

    try:
        run_guarded(settings, place, life)
    except MoeCkptError as error:
        return _say(error)
    return 0


def _say(error: MoeCkptError) -> int:
    from launcher.launch import say_once  # noqa: PLC0415

    say_once(str(error))
    return _FAILED


def _show_with_hydra(arguments: Sequence[str]) -> int:
    """Let Hydra answer `--help`, `--cfg job`, `--info` and the like."""
    sys.argv[1:] = [group_choice_without_plus(argument) for argument in arguments]
    hydra.main(config_path=str(CONF_DIR), config_name="config", version_base="1.3")(lambda _: None)()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
