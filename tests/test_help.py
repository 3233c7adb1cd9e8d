"""`--help` and an unknown option of every command, in one table."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest

from moe_ckpt import cli
from tests.help_of_all import ROOT, UNKNOWN
from tests.made_once import made_once

LAUNCHER = (
    "train",
    "start_train",
    "simulate",
    "inject_fault",
    "status",
    "report",
    "compare",
    "prove",
    "demo",
)
COMMANDS = (
    *("moe-ckpt", *(f"moe-ckpt {name}" for name in cli.COMMANDS)),
    *(f"-m launcher.{name}" for name in (*LAUNCHER, "cluster_profile")),
    *(
        "-m moe_ckpt.cli",
        "-m moe_ckpt.run",
        "-m moe_ckpt.start_run",
        "-m moe_ckpt.server",
        "-m moe_ckpt.door_file",
    ),
)
SCRIPTS = tuple(
    f"scripts/{name}.py"
    for name in (
        *(
            "fetch_megatron_lm",
            "gpu_acceptance",
            "hosts",
            "install_browser",
            "run_on_hosts",
        ),
        *("test_releases", "write_configuration", "write_trace"),
    )
)
"""Scripts without those that import training code for seconds.

These are endurance, write_captures and write_golden.
"""

NEEDED = {
    "door": ["install"],
    "door_file": ["install"],
    "server": ["job"],
    "cluster_profile": ["run"],
    "profile": ["run"],
    "hosts": ["down"],
    "run_on_hosts": ["1", "job"],
    "test_releases": ["--torch", "2.15.0"],
}
"""Required arguments, by the last word of a command."""

SLOW = ("torch", "megatron", "transformer_engine", "hydra")
"""Packages whose import takes seconds."""


def run_all() -> dict[str, dict[str, tuple[int, str, list[str]]]]:
    """Return results of each command with `--help` and with an unknown option.

    A separate process runs the commands, because the process of a test has imported
    torch, and tests check whether `--help` imports torch.

    Returns:
        By command and option: exit status, output, and imported slow packages.
    """
    entries = {
        entry: NEEDED.get(re.split(r"[ ./]", entry.removesuffix(".py"))[-1], [])
        for entry in (*COMMANDS, *SCRIPTS)
    }
    words = json.dumps([entries, SLOW])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120"}
    command = [sys.executable, "-m", "tests.help_of_all", words]
    said = subprocess.run(
        command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True
    ).stdout
    found: dict[str, Any] = json.loads(said)
    return found


@pytest.mark.parametrize("entry", [*COMMANDS, *SCRIPTS])
def test_help_is_shown_and_an_unknown_option_refused_by_name(entry: str) -> None:
    status, said, _ = made_once(run_all)[entry]["--help"]
    assert status == 0, said
    assert said.startswith("usage: "), said
    assert "torch.distributed" not in said
    status, said, _ = made_once(run_all)[entry][UNKNOWN]
    assert status != 0, said
    assert UNKNOWN in said
    assert "Traceback" not in said


@pytest.mark.parametrize("entry", COMMANDS)
def test_help_imports_nothing_slow(entry: str) -> None:
    assert made_once(run_all)[entry]["--help"][2] == []


def test_the_help_of_a_command_names_no_file_of_a_checkout() -> None:
    """A wheel has none of the files of a checkout."""
    said = made_once(run_all)["moe-ckpt train"]["--help"][1]
    assert re.findall(r"\b(?:launcher|scripts|docs|benchmarks)/\S+", said) == []
