"""A process that torchrun starts knows its agent from the first moment on, and ends with it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
WAIT_S = 30.0
NEVER_IMPORTED = "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(3600)\n"
AGENT = "import subprocess, sys; subprocess.run([sys.executable, *sys.argv[1:]])"
ORPHAN = """
import os, sys
from moe_ckpt.runtime.parent import agent_pid
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


def test_an_agent_killed_while_its_processes_import_leaves_no_orphan(tmp_path: Path) -> None:
    (tmp_path / "hydra.py").write_text(NEVER_IMPORTED)
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", AGENT, str(ROOT / "launcher" / "train.py")]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout
        pid = int(agent.stdout.readline())
        worker = os.pidfd_open(pid)
        poll = select.poll()
        poll.register(worker, select.POLLIN)
        try:
            agent.kill()
            assert poll.poll(1000 * WAIT_S), "it is still there"
        finally:
            if not poll.poll(0):
                signal.pidfd_send_signal(worker, signal.SIGKILL)
            os.close(worker)


def test_the_agent_is_who_it_was_at_first_also_for_those_that_are_forked() -> None:
    done = subprocess.run([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, text=True, timeout=WAIT_S)
    assert done.stdout.splitlines()[1:] == ["True True"]


def test_to_know_it_nothing_slow_is_imported() -> None:
    imported = "import sys, moe_ckpt.runtime.parent; print({'torch', 'hydra', 'numpy'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", imported], stdout=subprocess.PIPE, text=True, timeout=WAIT_S)
    assert done.stdout == "set()\n"
