"""The command `moe-ckpt`: one name for the launcher's programs.

The command works in a checkout and in an installed wheel. A wheel has the launcher and
its settings in `moe_ckpt/_app`, and so installs no top-level package with a name that
others may use. Must not: import the launcher before a command is chosen.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from moe_ckpt import __version__

_PACKAGE = Path(__file__).resolve().parent
COMMANDS = {
    "train": (
        "train a model: moe-ckpt train --nproc-per-node=4 +ckpt=moevement [OVERRIDES]"
    ),
    "run": (
        "train with a script of your own: moe-ckpt run --nproc-per-node=4 [OPTIONS] --"
        " SCRIPT ARGUMENTS"
    ),
    "prove": (
        "run a training command with and without faults, and compare: moe-ckpt prove --"
        " COMMAND"
    ),
    "check": "another name of prove",
    "demo": "train on 4 local processes, kill two of them, compare the results",
    "inject": "kill or stop ranks of a running job",
    "status": "what the ranks of a run are doing",
    "report": "a page about one run or several",
    "compare": "policies on one job under the same faults",
    "server": (
        "hold checkpoints on a machine that trains nothing: moe-ckpt server RUN_FOLDER"
        " (ckpt.servers=hosts)"
    ),
    "simulate": "simulate a policy on a cluster, or rank all of them: plan=true",
    "door": (
        "let the variable MOE_CKPT attach to programs of this environment: moe-ckpt"
        " door install|remove"
    ),
    "profile": "this machine's constants for the simulator, from runs",
}
"""Help text of each command, by the command's name."""

_MODULES = {
    "check": "launcher.prove",
    "door": "moe_ckpt.door_file",
    "train": "launcher.start_train",
    "run": "moe_ckpt.start_run",
    "inject": "launcher.inject_fault",
    "profile": "launcher.cluster_profile",
    "server": "moe_ckpt.server",
}
_OF_LAUNCHER = (
    "hydra",
    "jinja2",
    "omegaconf",
    "orjson",
    "plotly",
    "rich",
    "tensorboard",
    "tokenizers",
)
"""Packages of the extra `launcher` in pyproject.toml, by their import names."""
_USAGE = 2


def app_root() -> Path:
    """Return the folder that holds launcher/ and conf/.

    The folder is the checkout, or the copy in an installed wheel.
    """
    installed = _PACKAGE / "_app"
    return installed if installed.is_dir() else _PACKAGE.parent


def program(name: str) -> str:
    """Return the module that a command runs."""
    return _MODULES.get(name, f"launcher.{name}")


def usage() -> str:
    """Return the text of `moe-ckpt --help`."""
    lines = (f"  {name:10}{text}" for name, text in COMMANDS.items())
    return "\n".join(
        ["usage: moe-ckpt COMMAND [ARGUMENTS]; moe-ckpt COMMAND --help", "", *lines]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status."""
    name, *rest = [*(sys.argv[1:] if arguments is None else arguments)] or ["--help"]
    if name in ("-h", "--help"):
        print(usage())
        return 0
    if name == "--version":
        print(__version__)
        return 0
    if name not in COMMANDS:
        print(
            f"moe-ckpt: got {name}, wanted one of {', '.join(COMMANDS)}",
            file=sys.stderr,
        )
        return _USAGE
    sys.path.insert(0, str(app_root()))
    sys.argv = [f"moe-ckpt {name}", *rest]
    try:
        runpy.run_module(program(name), run_name="__main__", alter_sys=True)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _OF_LAUNCHER:
            raise
        wanted = "the launcher's: pip install 'moe-ckpt[launcher]'"
        print(
            f"moe-ckpt {name}: got no package {missing}, wanted {wanted}",
            file=sys.stderr,
        )
        return _USAGE
    return 0


if __name__ == "__main__":
    sys.exit(main())
