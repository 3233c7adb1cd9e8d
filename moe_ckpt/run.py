r"""Runs an unchanged script of Megatron-LM, Megatron-Bridge or ms-swift.

Checkpoints are in memory, and dead workers are replaced.

    torchrun --nproc-per-node=4 -m moe_ckpt.run [--ckpt moevement] [--set window=4] \
        [--config F] -- pretrain_gpt.py ...

The process that torchrun starts imports all slow modules and supervises; the script
runs in the workers that this process forks. `--plain`, or `--ckpt none`, runs the
script without supervisors and without an attachment, for comparison.
"""

from __future__ import annotations

import ast
import importlib
import logging
import multiprocessing.util
import os
import runpy
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from moe_ckpt.agent import end_with_agent

if __name__ == "__main__":
    # before anything slow: an agent that is killed during the imports leaves no orphan
    end_with_agent()

from moe_ckpt.config import require
from moe_ckpt.elastic.torchrun_variables import (
    Launch,
    is_launched,
    read_launch,
    write_error_file,
)
from moe_ckpt.errors import ConfigError, MoeCkptError
from moe_ckpt.exactness import BITWISE
from moe_ckpt.loop_names import LOOP_MODULES
from moe_ckpt.run_settings import Command, RunSettings, parse_run

if TYPE_CHECKING:
    from moe_ckpt.elastic_worker import Worker
    from moe_ckpt.integrations.loops import Loop

_FAILED = 1


def main(arguments: Sequence[str]) -> int:
    """Run the program that the arguments name, and return its exit status.

    After an error the result is 1, with one message.
    """
    logging.getLogger("megatron").setLevel(logging.ERROR)
    logging.getLogger("moe_ckpt").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module=r"(megatron|torch|moe_ckpt)\.")
    try:
        _require_outermost()
        settings = parse_run(arguments)
        imports = require_guarded(settings.command)
        launch = read_launch("-m moe_ckpt.run -- " + settings.command.name)
        return start(settings, launch, imports)
    except MoeCkptError as error:
        report_error(str(error))
        return _FAILED


def start(settings: RunSettings, launch: Launch, imports: Sequence[str]) -> int:
    """Run one rank: run the program unchanged, or supervise workers that run it.

    Args:
        settings: The settings of the run.
        launch: This rank's position in the job.
        imports: Modules of Megatron that workers share.

    Returns:
        The exit status.

    Raises:
        ConfigError: Settings that cannot work.
    """
    # seconds of imports
    from moe_ckpt.integrations.loops import LOOP_IMPORTS  # noqa: PLC0415
    from moe_ckpt.integrations.megatron_lm_options import require_alone  # noqa: PLC0415

    require_alone(os.environ, sys.modules)
    loop = LOOP_IMPORTS[settings.loop]()
    if settings.is_plain:
        if not loop.use_cpu() and settings.job.exactness == BITWISE:
            from moe_ckpt.megatron.determinism import make_deterministic  # noqa: PLC0415

            # a plain run is compared with attached runs, bit for bit
            make_deterministic()
        if settings.job.checks.digest_every_iters:
            from moe_ckpt.integrations.loop_plain import PlainRun  # noqa: PLC0415

            loop.watch(PlainRun(settings))
        return run_program(settings.command)
    wanted = f"another policy: {settings.loop} saves and loads whole states by itself"
    require(
        settings.job.ckpt.in_memory is not None,
        "--ckpt",
        settings.job.ckpt.policy,
        wanted,
    )
    from moe_ckpt.integrations.other_loops import refuse_other_loops  # noqa: PLC0415
    from moe_ckpt.run_elastic import run_elastic  # noqa: PLC0415

    # before the first fork: all workers share these imports
    loop.import_attachment()
    refuse_other_loops(settings.loop)
    # with these modules imported, a worker starts a second earlier
    for name in imports:
        importlib.import_module(name)
    from moe_ckpt.loop import warm_up  # noqa: PLC0415

    return run_elastic(
        settings.job,
        launch,
        lambda worker: _work(settings, loop, worker),
        warm_up=lambda: warm_up(settings.job, launch, loop.use_cpu),
    )


def _work(settings: RunSettings, loop: Loop, worker: Worker) -> int:
    """Attach to the loop of this worker's process, and run the program.

    Returns:
        The program's exit status.

    Raises:
        MoeCkptError: Settings that cannot work, or a program that never trains.
    """
    from moe_ckpt.loop import join_run  # noqa: PLC0415

    joined = join_run(worker, use_cpu=loop.use_cpu)
    attachment = loop.attach(joined, settings)
    status = run_program(settings.command)
    joined.retire()
    wanted = f"a program that calls {loop.entry_function}: nothing was protected"
    require(
        bool(status) or attachment.has_trained, "SCRIPT", settings.command.name, wanted
    )
    return status


def run_program(command: Command) -> int:
    """Run a script or module as `python` would, and end its processes.

    Returns:
        The exit status.
    """
    sys.argv = [command.name, *command.arguments]
    status = 0
    try:
        if command.is_module:
            runpy.run_module(command.name, run_name="__main__", alter_sys=True)
        else:
            # `run_path` leaves the script's folder out of the path, but `python SCRIPT`
            # puts the folder first
            sys.path.insert(0, str(Path(command.name).resolve().parent))
            runpy.run_path(command.name, run_name="__main__")
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        status = (
            ended.code if isinstance(ended.code, int) else _FAILED if ended.code else 0
        )
    # ends this process's managers and daemonic processes, and waits for all its other
    # ones: the end of an interpreter does that, but this process ends by `os._exit`
    cast("Any", multiprocessing.util)._exit_function()
    return status


def _require_outermost() -> None:
    """Raise ConfigError in a program that already runs under moe_ckpt.run."""
    from moe_ckpt.integrations.loop_seams import is_attached  # noqa: PLC0415

    loops = [sys.modules.get(modules.training) for modules in LOOP_MODULES.values()]
    wanted = "one attachment a process: this program runs under moe_ckpt.run already"
    require(not any(map(is_attached, loops)), "moe_ckpt.run", "a second one", wanted)


def require_guarded(command: Command) -> list[str]:
    """Return the modules of Megatron that a script imports.

    Processes that Megatron-LM spawns, for example to write checkpoints, import the
    script again.

    Raises:
        ConfigError: The script is missing, or trains on import.
    """
    if command.is_module:
        return []
    try:
        parsed = ast.parse(Path(command.name).read_text())
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"SCRIPT: got {command.name!r}, wanted a Python script ({error})"
        ) from error
    guards = [
        node
        for node in parsed.body
        if isinstance(node, ast.If) and "__name__" in ast.dump(node.test)
    ]
    wanted = (
        'one that trains under `if __name__ == "__main__":` only, as processes that it'
        " spawns import it again"
    )
    require(bool(guards), "SCRIPT", command.name, wanted)
    imported = [
        node.module or "" for node in parsed.body if isinstance(node, ast.ImportFrom)
    ]
    return [name for name in imported if name.startswith("megatron.")]


def report_error(message: str) -> None:
    """Print an error; in a job only the first rank that gets here prints."""
    if not is_launched():
        print(f"error: {message}", file=sys.stderr)
        return
    from moe_ckpt.elastic.job_store import say_once  # noqa: PLC0415

    write_error_file(f"error: {message}")
    say_once(message)


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # extension modules such as triton's complain about the end of an interpreter that
    # forked
    os._exit(status)
