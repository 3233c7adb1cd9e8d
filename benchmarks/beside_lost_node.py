"""Time from the loss of a node to the next new iteration, beside other tools.

    python benchmarks/beside_lost_node.py --torchft PYTHON --nvrx PYTHON [--rounds 3]

torchft and nvidia-resiliency-ext run `beside_training.py`, by their public API and with
their defaults or those of their examples, each in an environment of its own:

    python3.11 -m venv torchft
    torchft/bin/pip install torch==2.13.0 numpy torchft-nightly
    python3.11 -m venv nvrx
    nvrx/bin/pip install torch==2.13.0 numpy nvidia-resiliency-ext

PYTHON is `torchft/bin/python` and `nvrx/bin/python`. Wheels of nvidia-resiliency-ext
since 0.5 ask for glibc 2.39. With an older one, all modules but that for CUPTI run if
pip gets `--no-deps --only-binary=:all: --platform=manylinux_2_39_x86_64 --target=...`.

Two nodes of one rank train on gloo. All processes of the second node are killed at
once, and never come back. A round loses one node of each job, the jobs in turns:

    torchft                 two replica groups; the lost group is started again at once
    torchft, spare          three groups, one of them a spare (`FIXED_WITH_SPARES`)
    torchft, spare, frozen  the same, but the node is frozen: nothing says it is lost
    ft_launcher             of nvidia-resiliency-ext: starts all ranks again, with a
                            node that has waited
    in-process              its `inprocess.Wrapper`, with a rank in reserve
    moe-ckpt, ...           the jobs of `lost_node.py`, as a pipeline of two ranks

Absolute times mean little on a laptop, and much of each time is a limit after which a
tool counts a silent node as lost.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from beside_training import CHECKPOINT_EVERY
from lost_node import Job, signal_all, summary
from rich.console import Console

from launcher.markdown_table import table_lines
from launcher.proc import kill_at_once
from moe_ckpt.events import IterationCommitted, StageRecovered, StateDigest
from moe_ckpt.linux import environment_of

TRAINING = Path(__file__).with_name("beside_training.py")
LOST_NODE = 1
OWN_SETTINGS = ("model=tiny", "parallel.pp=2", "run.digest_every_iters=1")
OWN_ITERATIONS = 30
OWN_JOBS = {
    "spare": "moe-ckpt, spare",
    "silent": "moe-ckpt, spare, frozen",
    "restart": "moe-ckpt, restart",
}
_NODES = 2
_EXACT = {True: "yes", False: "no", None: "-"}
# tools give no sign that a spare node is ready
_SETTLE_S = 10.0
_PATIENCE_S = 240.0
_LOOK_S = 0.02
_MARK = "BESIDE_JOB"
_NODE = "BESIDE_NODE"

Digests: TypeAlias = dict[tuple[int, int], str]
"""Digest of a rank's state after an iteration; rank 0 if all ranks have the same."""

console = Console(highlight=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """What the loss of a node has cost."""

    committed_s: float
    """Seconds until the next new iteration."""

    whole_s: float
    """Seconds until an iteration with all ranks."""

    again_here: int
    """Iterations that a surviving node ran again."""

    again_there: int
    """Iterations that the node in place of the lost one ran again."""

    new_workers: int
    """Number of workers that were started since the loss."""

    is_exact: bool | None
    """Whether all digests are those of a run without a loss; None if there are none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A line of the log of `beside_training.py`."""

    unix_s: float
    pid: int
    node: int
    step: int = 0
    """Iterations that are done; 0 as the process starts."""

    began_unix_s: float = 0.0
    participants: int = 0
    digest: str = ""


class OtherJob:
    """A job of another tool, until `stop`.

    Args:
        folder: The folder of all logs.
        tool: What `beside_training.py` is to run under.
        launch: Returns the command of a node and what it has in its environment. An
            empty word of the command stands for the training.
        num_nodes: Number of nodes that are started, with the spare one.
        coordinator: A command beside the nodes, if the tool needs one.
    """

    def __init__(
        self,
        folder: Path,
        tool: str,
        launch: Callable[[int], tuple[list[str], dict[str, str]]],
        *,
        num_nodes: int,
        coordinator: Sequence[str] = (),
    ) -> None:
        folder.mkdir()
        self._folder, self._tool, self._launch = folder, tool, launch
        self._num_nodes, self._coordinator = num_nodes, coordinator
        self._mark = uuid.uuid4().hex
        self._children: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start the nodes, and wait for the first iterations."""
        if self._coordinator:
            self._start("coordinator", self._coordinator, {})
        # a spare node of ft_launcher has no worker that could write a line
        num_workers = _NODES if self._tool == "ft_launcher" else self._num_nodes
        for node in range(self._num_nodes):
            self.start_node(node)
            if node >= LOST_NODE:
                # the nodes that come first train
                wanted = min(node + 1, num_workers)
                self.wait_for(lambda n=wanted: len(self._started()) >= n, "worker")
        time.sleep(_SETTLE_S)
        # in the middle between two checkpoints
        middle = CHECKPOINT_EVERY // 2
        self.wait_for(
            lambda: self.newest() % CHECKPOINT_EVERY == middle, "first iterations"
        )

    def start_node(self, node: int) -> None:
        """Start a node, or the machine that comes in its place."""
        command, environment = self._launch(node)
        training = [str(TRAINING), self._tool, str(self._folder)]
        words = [each for word in command for each in ([word] if word else training)]
        self._start(f"node{node}", words, {**environment, _NODE: str(node)})

    def lines(self) -> list[Line]:
        return [
            Line(**json.loads(text))
            for path in self._folder.glob("*.jsonl")
            for text in path.read_text().splitlines(keepends=True)
            if text.endswith("\n")
        ]

    def _started(self) -> set[int]:
        return {line.pid for line in self.lines()}

    def newest(self) -> int:
        return max((line.step for line in self.lines()), default=0)

    def lose_node(
        self, expected: Digests, *, is_frozen: bool, is_replaced: bool
    ) -> Loss:
        """Lose the second node, and wait for the next new iteration.

        Args:
            expected: The digests of a run without a loss.
            is_frozen: Whether the node is frozen and not killed.
            is_replaced: Whether the node is started again at once.
        """
        lost = self._processes_of(LOST_NODE)
        lost_unix_s = time.time()
        if is_frozen:
            signal_all(lost, signal.SIGSTOP)
        else:
            kill_at_once(lost)
        if is_replaced:
            self.start_node(LOST_NODE)

        begun: list[Line] = []

        def new() -> list[Line]:
            # an iteration that had all gradients before the loss may end after it
            lines = self.lines()
            begun[:] = [line for line in lines if line.began_unix_s < lost_unix_s]
            before = max(line.step for line in begun)
            return [
                line
                for line in lines
                if line.began_unix_s > lost_unix_s and line.step > before
            ]

        def whole() -> list[Line]:
            return [line for line in new() if line.participants == _NODES]

        self.wait_for(lambda: len(whole()) > _NODES, "new iterations with all ranks")
        signal_all(lost, signal.SIGKILL)
        before = max(line.step for line in begun)
        late = [line for line in self.lines() if line.unix_s > lost_unix_s]
        again = {
            (line.node, line.step)
            for line in late
            if line.began_unix_s > lost_unix_s and line.step <= before
        }
        here = sum(node == 0 for node, _ in again)
        return Loss(
            committed_s=min(line.unix_s for line in new()) - lost_unix_s,
            whole_s=min(line.unix_s for line in whole()) - lost_unix_s,
            again_here=here,
            again_there=len(again) - here,
            new_workers=sum(not line.step for line in late),
            is_exact=_agree(
                {(0, line.step): line.digest for line in late if line.step}, expected
            ),
        )

    def wait_for(self, is_there: Callable[[], bool], what: str) -> None:
        """Wait for a state of the job's files. A failure ends this process."""
        until_s = time.monotonic() + _PATIENCE_S
        while not is_there():
            if time.monotonic() > until_s:
                logs = sorted(self._folder.glob("*.log"))
                sys.exit(f"no {what}\n" + "\n".join(map(Path.read_text, logs)))
            time.sleep(_LOOK_S)

    def stop(self) -> None:
        signal_all(self._processes_of(None), signal.SIGKILL)
        for child in self._children:
            child.wait()

    def _start(
        self, name: str, command: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        inherited = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
        # with this variable the in-process wrapper asks the GPU's driver before it
        # calls the function again, and ends the job where there is no driver
        inherited.pop("LOCAL_RANK", None)
        with (self._folder / f"{name}.log").open("a") as log:
            child = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                env={
                    **inherited,
                    **environment,
                    "TMPDIR": str(self._folder),
                    _MARK: self._mark,
                },
                start_new_session=True,
            )
        self._children.append(child)

    def _processes_of(self, node: int | None) -> list[int]:
        """Return the processes of a node, or of the job.

        A daemon of the wrapper is no child of the process that has started it.
        """
        pids = [int(each.name) for each in Path("/proc").glob("[0-9]*")]
        found: list[int] = []
        for pid in pids:
            environment = environment_of(pid)
            if environment.get(_MARK) != self._mark:
                continue
            if node is None or environment.get(_NODE) == str(node):
                found.append(pid)
        return found


def torchft_job(folder: Path, python: Path, *, has_spare: bool) -> OtherJob:
    """Start replica groups of one rank, and a lighthouse."""
    port, stores = _free_port(), [_free_port() for _ in range(_NODES + 1)]

    def launch(node: int) -> tuple[list[str], dict[str, str]]:
        group = ["--nproc-per-node=1", "--master-addr=127.0.0.1"]
        command = [str(python.with_name("torchrun")), *group]
        return [*command, f"--master-port={stores[node]}", ""], {
            "REPLICA_GROUP_ID": str(node),
            "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}",
        }

    return OtherJob(
        folder,
        "torchft-spare" if has_spare else "torchft",
        launch,
        num_nodes=_NODES + has_spare,
        coordinator=[  # as in torchft's README
            str(python.with_name("torchft_lighthouse")),
            *("--min_replicas", "1", "--quorum_tick_ms", "100"),
            *("--join_timeout_ms", "10000", "--bind", f"127.0.0.1:{port}"),
        ],
    )


def ft_launcher_job(folder: Path, python: Path) -> OtherJob:
    """Start nodes of ft_launcher: the first hosts its store, and the third waits."""
    port = _free_port()

    def launch(node: int) -> tuple[list[str], dict[str, str]]:
        module = "nvidia_resiliency_ext.fault_tolerance.launcher"
        return [
            *(str(python), "-m", module),
            *(f"--nnodes={_NODES}:{_NODES + 1}", "--nproc-per-node=1"),
            *("--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=beside"),
            *(f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1"),
            f"--rdzv-conf=is_host={int(node == 0)}",
            "",
        ], {}

    return OtherJob(folder, "ft_launcher", launch, num_nodes=_NODES + 1)


def in_process_job(folder: Path, python: Path) -> OtherJob:
    """Start ranks that restart in their process: the third is in reserve."""
    ports = {
        name: str(_free_port())
        for name in ("MASTER_PORT", "WRAPPER_PORT", "TRAINING_PORT")
    }

    def launch(node: int) -> tuple[list[str], dict[str, str]]:
        ranks = {"RANK": str(node), "WORLD_SIZE": str(_NODES + 1)}
        # each look at the wrapper's store is a warning otherwise
        quiet = {"TORCH_CPP_LOG_LEVEL": "error"}
        host = {"MASTER_ADDR": "127.0.0.1"}
        return [str(python), ""], {**ports, **ranks, **host, **quiet}

    return OtherJob(folder, "in-process", launch, num_nodes=_NODES + 1)


def reference_digests(python: Path) -> Digests:
    """Train in one process without a tool and without a loss."""
    with tempfile.TemporaryDirectory() as folder:
        command = [str(python), str(TRAINING), "reference", folder]
        subprocess.run(command, check=True, env={**os.environ, _NODE: "0"})
        (log,) = Path(folder).glob("*.jsonl")
        lines = [Line(**json.loads(text)) for text in log.read_text().splitlines()]
    return {(0, line.step): line.digest for line in lines if line.step}


def own_digests() -> Digests:
    """Train a job of moe-ckpt without a loss."""
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder) / "job", OWN_SETTINGS, has_spare=False, per_node=1)
        try:
            job.wait_for(lambda: job.newest() > OWN_ITERATIONS, "iterations")
            return {
                (logged.global_rank, logged.event.iteration): logged.event.digest
                for _, logged in job.logged()
                if isinstance(logged.event, StateDigest)
            }
        finally:
            job.stop()


def lose_own_node(name: str, folder: Path, expected: Digests) -> Loss:
    """Lose a node of one of the jobs of `lost_node.py`."""
    job = Job(folder, OWN_SETTINGS, has_spare=name != "restart", per_node=1)
    try:
        lost_unix_s = time.time()
        recovery = job.lose_node(is_silent=name == "silent")
        logged = job.logged()
    finally:
        job.stop()
    again, digests = [0] * _NODES, {}
    seen: set[tuple[int, int]] = set()
    for when, each in logged:
        event, is_late = each.event, when > lost_unix_s
        if isinstance(event, StageRecovered) and is_late:
            again[each.global_rank] += event.replayed_iters
        elif isinstance(event, IterationCommitted):
            iteration = each.global_rank, event.iteration
            again[each.global_rank] += is_late and iteration in seen
            seen.add(iteration)
        elif isinstance(event, StateDigest) and is_late:
            digests[each.global_rank, event.iteration] = event.digest
    return Loss(
        committed_s=recovery.committed_s,
        whole_s=recovery.committed_s,
        again_here=again[0],
        again_there=again[LOST_NODE],
        new_workers=recovery.new_processes,
        is_exact=_agree(digests, expected),
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--torchft", type=Path, required=True)
    parser.add_argument("--nvrx", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    # torchrun sets this variable for nodes of several ranks only
    os.environ["OMP_NUM_THREADS"] = "1"
    expected, own = reference_digests(options.torchft), own_digests()
    rounds = [
        measure_round(options.torchft, options.nvrx, expected, own)
        for _ in range(options.rounds)
    ]
    show(rounds)
    return 0


def measure_round(
    torchft: Path, nvrx: Path, expected: Digests, own: Digests
) -> dict[str, Loss]:
    """Lose one node of each job, and return the losses by name."""
    found: dict[str, Loss] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        others = {
            "torchft": torchft_job(folder / "a", torchft, has_spare=False),
            "torchft, spare": torchft_job(folder / "b", torchft, has_spare=True),
            "torchft, spare, frozen": torchft_job(
                folder / "c", torchft, has_spare=True
            ),
            "ft_launcher": ft_launcher_job(folder / "d", nvrx),
            "in-process": in_process_job(folder / "e", nvrx),
        }
        for name, job in others.items():
            try:
                job.start()
                found[name] = job.lose_node(
                    expected,
                    is_frozen="frozen" in name,
                    is_replaced=name == "torchft",
                )
            finally:
                job.stop()
            console.print(name, found[name])
        for job, name in OWN_JOBS.items():
            found[name] = lose_own_node(job, folder / job, own)
            console.print(name, found[name])
    return found


def show(rounds: Sequence[dict[str, Loss]]) -> None:
    """Print the table of all rounds, in Markdown."""
    head = (
        "job, median (least to most)",
        "loss to the next new iteration, s",
        "to one with all ranks, s",
        "iterations again: survivor, other",
        "new workers",
        "exact",
    )
    rows: list[list[str]] = []
    for name in rounds[0]:
        losses = [each[name] for each in rounds]
        here = _span([loss.again_here for loss in losses])
        there = _span([loss.again_there for loss in losses])
        rows.append(
            [
                name,
                summary([loss.committed_s for loss in losses]),
                summary([loss.whole_s for loss in losses]),
                f"{here}, {there}",
                _span([loss.new_workers for loss in losses]),
                " ".join(sorted({_EXACT[loss.is_exact] for loss in losses})),
            ]
        )
    print("\n".join(table_lines(head, rows)))


def _span(values: Sequence[int]) -> str:
    least, most = min(values), max(values)
    return str(least) if least == most else f"{least} to {most}"


def _agree(digests: Digests, expected: Digests) -> bool | None:
    """Return whether known digests agree; None if none of them is known."""
    known = [each for each in digests if each in expected]
    return all(digests[each] == expected[each] for each in known) if known else None


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


if __name__ == "__main__":
    sys.exit(main())
