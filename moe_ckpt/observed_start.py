"""The start of a Python process of a command that `moe-ckpt prove` runs.

`moe-ckpt prove` puts a folder with a `sitecustomize.py` of one line, LINE, in front of
PYTHONPATH. The line makes the training loops of Megatron-LM, Megatron-Bridge and
ms-swift log digests, once a program imports one. Must not: import anything slow,
because every Python process of the command runs the line.
"""

from __future__ import annotations

import importlib.util
import sys
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path

import wrapt

from moe_ckpt.errors import ConfigError
from moe_ckpt.loop_names import LOOP_MODULES
from moe_ckpt.observation import Order, read_order

LINE = "from moe_ckpt.observed_start import enter; enter(__file__)\n"
"""The content of `sitecustomize.py`."""

NAME = "sitecustomize"


def enter(own_path: str) -> None:
    """Observe this process, and run the `sitecustomize` that was in its place.

    Args:
        own_path: The path of the `sitecustomize.py` that runs this function.
    """
    if order := read_order():
        for loop, modules in LOOP_MODULES.items():
            wrapt.register_post_import_hook(
                partial(_observe_loop, loop, order), modules.entry
            )
    _run_next(Path(own_path).parent)


def _observe_loop(loop: str, order: Order, _module: object) -> None:
    from moe_ckpt.integrations.loop_plain import ProvenRun  # noqa: PLC0415 - slow
    from moe_ckpt.integrations.loops import LOOP_IMPORTS  # noqa: PLC0415

    try:
        observed = LOOP_IMPORTS[loop]()
    except ConfigError as error:
        # a program may import the loop only for its arguments
        print(
            f"moe-ckpt prove: the loop is not observed: {error}",
            file=sys.stderr,
            flush=True,
        )
        return
    observed.use_cpu()
    observed.watch(ProvenRun(order))


def _run_next(own: Path) -> None:
    others = [entry for entry in sys.path if Path(entry).resolve() != own.resolve()]
    spec = PathFinder.find_spec(NAME, others)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules[NAME] = module
        spec.loader.exec_module(module)
