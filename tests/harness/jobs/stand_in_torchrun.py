"""A program in torchrun's place, for tests of commands that start torchrun.

The program leaves a run folder that the test has prepared. That takes milliseconds,
whereas torchrun and its ranks need ten seconds for imports alone. Tests marked `full`
start the real torchrun with the same commands.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from moe_ckpt.events import WorkerStarted
from tests.report_runs import Timed, line_of

_PID = 4194305  # above the largest pid of Linux
_PROGRAM = f"""#!{sys.executable} -I
import json, shutil, subprocess, sys
from pathlib import Path

here = Path(__file__).parent
run = next(Path(word.removeprefix("run.dir=")) for word in sys.argv if word.startswith("run.dir="))
with (here / "commands").open("a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
prepared = here / run.name
for lines in prepared.glob("struck/*"):
    worker = subprocess.Popen(["sleep", "100"])
    (run / "events").mkdir(parents=True)
    (run / "events" / lines.name).write_text(lines.read_text().replace("{_PID}", str(worker.pid)))
    (here / "signals").write_text(str(-worker.wait()))
if (prepared / "run").is_dir():
    shutil.copytree(prepared / "run", run, dirs_exist_ok=True)
    described = json.loads((run / "run.json").read_text())
    script = next(at for at, word in enumerate(sys.argv) if word.endswith("train.py"))
    (run / "run.json").write_text(json.dumps(described | {{"command": sys.argv[script:]}}))
sys.exit((prepared / "status").exists())
"""


class StandIn:
    """The program, and the runs that the program leaves.

    Runs are identified by the names of their folders.

    Args:
        folder: The folder of the program and of the prepared runs.
        monkeypatch: Makes commands find the program in place of torchrun.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        folder.mkdir()
        program = folder / "torchrun"
        program.write_text(_PROGRAM)
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(folder / "python"))

    def run_of(self, name: str) -> Path:
        """Return the folder for all files of the run with this name."""
        path = self._folder / name / "run"
        path.mkdir(parents=True, exist_ok=True)
        return path

    def fail(self, name: str) -> None:
        """Let the run with this name end with status 1."""
        (self._folder / name).mkdir(parents=True, exist_ok=True)
        (self._folder / name / "status").touch()

    def wait_for_kill(self, name: str, rank: int, events: Sequence[Timed]) -> None:
        """Let a rank's first worker live until a signal ends the worker.

        Args:
            name: The name of the run.
            rank: The rank.
            events: Events of the worker after its `WorkerStarted`.
        """
        started = (
            0.0,
            WorkerStarted(pid=_PID, host="here", incarnation=0, device="cpu"),
        )
        path = self._folder / name / "struck" / f"rank{rank:04d}.jsonl"
        path.parent.mkdir(parents=True)
        path.write_text(
            "".join(line_of(t_s, rank, event) for t_s, event in [started, *events])
        )

    @property
    def commands(self) -> list[list[str]]:
        """The arguments of each start of the program, in order."""
        return [
            json.loads(line)
            for line in (self._folder / "commands").read_text().splitlines()
        ]

    @property
    def struck_by(self) -> int:
        """The signal that ended the worker of `wait_for_kill`."""
        return int((self._folder / "signals").read_text())
