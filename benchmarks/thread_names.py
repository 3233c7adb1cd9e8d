"""Run a program so that /proc shows the names that its threads have in Python.

    torchrun --nproc-per-node=4 benchmarks/thread_names.py launcher/train.py [OVERRIDES]

Python up to 3.13 does not set the names of threads in the kernel. Here each process
that a supervisor forks looks for threads once a second, and writes the names of the
threads to /proc/self/task/*/comm. The main thread of a process keeps its name, because
threads of libraries inherit that name. benchmarks/iteration_cpu.py runs this program.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import threading
import time
from pathlib import Path

LOOKER = "name-threads"
LOOK_S = 1.0


def name_threads() -> None:
    """Write the names of this process's threads, except the main one."""
    for thread in threading.enumerate():
        if thread is threading.main_thread() or thread.native_id is None:
            continue
        comm = Path(f"/proc/self/task/{thread.native_id}/comm")
        with contextlib.suppress(OSError):  # the thread has ended
            comm.write_text(thread.name)  # Linux takes 15 characters


def _look_for_ever() -> None:
    while True:
        name_threads()
        time.sleep(LOOK_S)


def _begin() -> None:
    threading.Thread(target=_look_for_ever, name=LOOKER, daemon=True).start()


def main() -> None:
    # not in the supervisor: a process that forks must have a single thread
    os.register_at_fork(after_in_child=_begin)
    del sys.argv[0]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
