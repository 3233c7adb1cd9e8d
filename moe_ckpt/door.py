"""Attachment by an environment variable alone.

For jobs whose command line belongs to another system.

    MOE_CKPT=moevement                              as `--ckpt moevement`
    MOE_CKPT="--ckpt gemini --set every_iters=5"    options of `python -m moe_ckpt.run`

`moe-ckpt door install` puts moe_ckpt_door.pth into the environment (door_file.py).
Python reads that file at each start; without the variable the file does nothing. A
process that torchrun started becomes `moe_ckpt.run` on the same program, with the same
pid. Any other process stays as it is, but cannot import a training loop of `--loop`: a
run must not look protected without being so.

Must not: import anything slow, or raise: Python only reports an exception of a .pth
file, and continues.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence

from moe_ckpt.errors import ConfigError
from moe_ckpt.loop_names import LOOP_MODULES
from moe_ckpt.refused_imports import RefusedImports

VARIABLE = "MOE_CKPT"
_LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# options of Python that take a value
_WITH_VALUE = "WX"
_FAILED = 1


def enter() -> None:
    """Become `moe_ckpt.run` if this process was started to train.

    An error ends the process after one message.
    """
    if any(name not in os.environ for name in _LAUNCHED):
        sys.meta_path.insert(0, unprotected_loops())
        return
    try:
        command = attached_command(os.environ[VARIABLE], sys.orig_argv)
    except ConfigError as error:
        if os.environ["RANK"] == "0":
            print(f"error: {error}", file=sys.stderr, flush=True)
        # no exception: Python would print the exception and start the program, which
        # would look protected
        os._exit(_FAILED)
    if os.environ["RANK"] == "0":
        print(f"moe_ckpt: {VARIABLE} attaches to {sys.orig_argv[-1]}", flush=True)
    # the program's own processes, such as compilers, must not be attached
    rest = {name: value for name, value in os.environ.items() if name != VARIABLE}
    # exec and no child: torchrun watches this pid and sends signals to it
    os.execve(sys.executable, [sys.executable, *command], rest)


def attached_command(value: str, started_as: Sequence[str]) -> list[str]:
    """Return the arguments of Python that attach to a program.

    Args:
        value: The value of the variable.
        started_as: The words that started this process.

    Raises:
        ConfigError: The value is not a command line, the process has no program to
            attach to, or the program is already attached.
    """
    try:
        options = shlex.split(value)
    except ValueError as error:
        raise ConfigError(
            f"{VARIABLE}: got {value!r}, wanted a policy or options of moe_ckpt.run"
            f" ({error})"
        ) from error
    if options and not options[0].startswith("-"):
        options = ["--ckpt", *options]
    own, program = split_command(started_as[1:])
    if program[:2] == ["-m", "moe_ckpt.run"]:
        raise ConfigError(
            f"{VARIABLE}: got {value!r} beside `-m moe_ckpt.run`, wanted one of the two"
        )
    return [*own, "-m", "moe_ckpt.run", *options, "--", *program]


def split_command(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return Python's own options, and the program with its arguments.

    The program is a script or `-m MODULE`.

    Raises:
        ConfigError: There is no script and no module.
    """
    for at, word in enumerate(words):
        before = words[at - 1] if at else ""
        if before in ("-W", "-X", "--check-hash-based-pycs"):
            continue
        if not word.startswith("-"):
            return list(words[:at]), list(words[at:])
        if word.startswith("--"):
            continue
        flags, letter, rest = _split_flags(word)
        if letter == "m":
            own = [*words[:at], *([f"-{flags}"] if flags else [])]
            return own, ["-m", *([rest] if rest else []), *words[at + 1 :]]
        if letter == "c" or word == "-":
            break
    raise ConfigError(
        f"{VARIABLE}: got a process without a script, wanted `python SCRIPT` or `python"
        " -m MODULE`"
    )


def _split_flags(word: str) -> tuple[str, str, str]:
    """Split a word of short options at its first letter out of c, m, W and X.

    Returns:
        The letters before, that letter, and the text after it.
    """
    for at, letter in enumerate(word[1:], start=1):
        if letter in f"cm{_WITH_VALUE}":
            return word[1:at], letter, word[at + 1 :]
    return word[1:], "", ""


def unprotected_loops() -> RefusedImports:
    """Return the finder that refuses the training loops in an unprotected process.

    A process is unprotected if torchrun has not started it.
    """
    wanted = (
        f"one with {', '.join(_LAUNCHED)}; unset the variable for a program that does"
        " not train"
    )
    message = (
        f"{VARIABLE}: got a process that torchrun has not started, wanted {wanted}"
    )
    return RefusedImports({loop.training: message for loop in LOOP_MODULES.values()})
