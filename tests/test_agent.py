"""A process that torchrun starts has its agent's pid at once, and ends with the agent.

Processes, because deaths of agents and forks are the subject.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from tests.harness.gloo.processes import Watch
from tests.scenarios import ROOT
from tests.waits import WAIT_S

LONG_IMPORT = "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(120)\n"
AGENT = "import subprocess, sys; subprocess.run([sys.executable, *sys.argv[1:]])"
ORPHAN = """
import os, sys
from moe_ckpt.agent import agent_pid
reading, writing = os.pipe()
if os.fork() == 0:
    started_by = agent_pid()
    os.close(writing)
    os.read(reading, 1)  # until its parent is gone
    if os.fork() == 0:
        print(started_by == agent_pid(), os.getppid() != started_by, flush=True)
    else:
        os.wait()
else:
    os.close(reading)
    print(os.getpid(), flush=True)
"""


def test_an_agent_killed_while_its_processes_import_leaves_no_orphan(
    tmp_path: Path, stack: ExitStack
) -> None:
    (tmp_path / "hydra.py").write_text(LONG_IMPORT)
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, "-c", AGENT, str(ROOT / "launcher" / "train.py")]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, text=True
    ) as agent:
        assert agent.stdout
        worker = Watch(stack, int(agent.stdout.readline()))
        agent.kill()
        worker.wait_for_end()


def test_forked_processes_know_the_same_agent_as_their_parent() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ORPHAN],
        stdout=subprocess.PIPE,
        text=True,
        timeout=WAIT_S,
    )
    assert done.stdout.splitlines()[1:] == ["True True"]


def test_the_agent_is_known_before_anything_slow_is_imported() -> None:
    imported = (
        "import sys, moe_ckpt.agent; print({'torch', 'hydra', 'numpy'} &"
        " sys.modules.keys())"
    )
    done = subprocess.run(
        [sys.executable, "-c", imported],
        stdout=subprocess.PIPE,
        text=True,
        timeout=WAIT_S,
    )
    assert done.stdout == "set()\n"
