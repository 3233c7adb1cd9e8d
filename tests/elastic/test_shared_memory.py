"""A node's folder in shared memory lasts as long as its agent, and is found again.

The agent is the process that started the ranks. Ranks that the agent starts later find
the folder again.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from moe_ckpt.elastic.janitor import janitor_of
from moe_ckpt.elastic.shared_memory import (
    Ended,
    begin_rank,
    end_rank,
    open_memory_root,
    rank_memory,
    take_over,
)
from moe_ckpt.errors import ConfigError
from moe_ckpt.linux import is_stopped, pid_namespace, start_ticks
from moe_ckpt.snapshot.blobs import own_path
from tests.harness.gloo.processes import Child
from tests.harness.gloo.ranks import rank_store, run_ranks
from tests.harness.gloo.workers import wait_until
from tests.waits import WAIT_S

STRANGER = 54321
"""The user ID of another user."""


def live_on(connection: Connection) -> None:
    connection.recv()


@pytest.fixture
def start_agent(start: Callable[..., Child]) -> Callable[[], Child]:
    """Return a function that starts an agent, a process that only lives.

    The janitors of the agent's folders end with the agent.
    """
    return lambda: start(live_on)


def open_as_supervisors(base: str, agent_pid: int) -> str:
    """Act as two supervisors of a node, one after the other."""
    first, second = (str(open_memory_root(Path(base), agent_pid)) for _ in range(2))
    assert first == second
    return first


def memory_root_of(base: Path, agent: Child) -> Path:
    """Return the folder that supervisors of an agent have opened.

    The supervisors have ended, and only the folder's janitor lives.
    """
    [root] = run_ranks(1, open_as_supervisors, str(base), agent.pid)
    return Path(root)


def wait_until_gone(path: Path) -> None:
    assert wait_until(lambda: not path.exists()), f"{path} is still there"


def test_a_folder_goes_with_its_agent_and_not_before(
    tmp_path: Path, start_agent
) -> None:
    staying, leaving = start_agent(), start_agent()
    stays, goes = memory_root_of(tmp_path, staying), memory_root_of(tmp_path, leaving)
    for root in (stays, goes):
        (rank_memory(root, 3) / "page").touch()
    leaving.kill()
    wait_until_gone(goes)
    assert (stays / "rank0003" / "page").exists(), "its janitor did not wait"
    assert memory_root_of(tmp_path, staying) == stays, (
        "supervisors that are started anew find their agent's folder"
    )
    assert sorted(tmp_path.iterdir()) == [stays]
    assert (
        stays.stat().st_mode & 0o777
        == rank_memory(stays, 3).stat().st_mode & 0o777
        == 0o700
    )


def open_and_die(output: Connection, base: str, agent_pid: int) -> None:
    """Act as a supervisor whose output another process reads.

    SIGKILL to the whole process group ends the supervisor, as from torchrun.
    """
    os.setpgid(0, 0)
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    output.close()
    open_memory_root(Path(base), agent_pid)
    os.killpg(0, signal.SIGKILL)


def test_a_janitor_outlives_its_supervisors_group_and_keeps_no_output_open(
    tmp_path: Path, start, start_agent
) -> None:
    agent = start_agent()
    supervisor = start(open_and_die, str(tmp_path), agent.pid)
    assert supervisor.exit_status() == -signal.SIGKILL
    poll = select.poll()
    poll.register(supervisor.connection.fileno(), select.POLLHUP)
    assert poll.poll(1000 * WAIT_S), "a reader of the job's output waits for a janitor"
    [root] = tmp_path.iterdir()
    agent.kill()
    wait_until_gone(root)


def keep_on(connection: Connection, base: str, agent_pid: int) -> None:
    """Act as a supervisor whose daemon outlives the agent and recreates the folder."""
    root = open_memory_root(Path(base), agent_pid)
    connection.send(root)
    wait_until_gone(root)
    (root / "rank0000" / "held").mkdir(parents=True)
    connection.send("made again")
    connection.recv()


def test_a_folder_that_a_daemon_makes_after_its_agents_end_goes_with_it(
    tmp_path: Path, start, start_agent
) -> None:
    agent = start_agent()
    daemon = start(keep_on, str(tmp_path), agent.pid)
    root = daemon.hear()
    agent.kill()
    assert daemon.hear() == "made again"
    assert root.exists()
    daemon.kill()
    wait_until_gone(root)


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1]
)
def test_a_janitor_outlives_a_signal_to_all_processes_of_a_job(
    tmp_path: Path, start, start_agent, number: signal.Signals
) -> None:
    """Slurm and systemd send such a signal to all processes of a job.

    The agent ends by the signal, and the memory must be freed all the same.
    """
    agent = start_agent()
    supervisor = start(supervise, str(tmp_path), agent.pid, 1000.0)
    os.kill(supervisor.hear(), number)
    agent.kill()
    assert supervisor.exit_status() == 0
    assert wait_until(lambda: not list(tmp_path.iterdir()))


def test_a_folder_whose_supervisor_died_before_it_had_a_janitor_gets_one(
    tmp_path: Path, start_agent
) -> None:
    agent = start_agent()
    name = memory_root_of(tmp_path, agent).name
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / name).mkdir(mode=0o700)
    root = memory_root_of(tmp_path / "again", agent)
    assert root.name == name
    agent.kill()
    wait_until_gone(root)


def make_left(base: Path, name: str) -> Path:
    """Make the folder of a job that has ended, with a rank's memory."""
    root = base / f"moe_ckpt-{name}"
    root.mkdir(mode=0o700)
    (root / "rank0000").mkdir()
    return root


def test_folders_of_agents_that_are_gone_are_removed_and_no_others(
    tmp_path: Path, start_agent
) -> None:
    gone, lives, opens = start_agent(), start_agent(), start_agent()
    here = pid_namespace()
    started, gone_started = start_ticks(lives.pid), start_ticks(gone.pid)
    left = [
        f"{gone.pid}-{gone_started}-{here}",
        f"{lives.pid}-{started - 1}-{here}",
        f"1-{started}-{here + 1}",
    ]
    kept = [f"{lives.pid}-{started}-{here}", "mine", "test-1"]
    for name in left + kept:
        make_left(tmp_path, name)
    gone.kill()
    root = memory_root_of(tmp_path, opens)
    assert {path.name for path in tmp_path.iterdir()} == {
        root.name,
        *(f"moe_ckpt-{name}" for name in kept),
    }


def lock(connection: Connection, path: Path) -> None:
    """Act as a process of a container that has a file or folder locked."""
    fd = os.open(path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_SH)
    connection.send("locked")
    connection.recv()


@pytest.mark.parametrize(
    "locked",
    [".", "janitor"],
    ids=["by a supervisor", "by its janitor, between two starts"],
)
def test_the_folder_of_another_container_stays_while_a_process_has_it_locked(
    tmp_path: Path, start, start_agent, locked: str
) -> None:
    """The pids of another container mean nothing in this PID namespace."""
    root = make_left(tmp_path, f"1-5-{pid_namespace() + 1}")
    (root / "janitor").touch()
    process = start(lock, root / locked)
    assert process.hear() == "locked"
    agent = start_agent()
    memory_root_of(tmp_path, agent)
    assert root.exists()
    process.kill()
    memory_root_of(tmp_path, agent)
    assert not root.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's files")
def test_the_folder_of_another_user_stays(tmp_path: Path, start_agent) -> None:
    root = make_left(tmp_path, f"1-5-{pid_namespace() + 1}")
    os.chown(root, STRANGER, STRANGER)
    memory_root_of(tmp_path, start_agent())
    assert (root / "rank0000").exists()


# Another user cannot put anything in place of the job's folder.


def open_planted(base: str, agent_pid: int) -> str:
    """Act as a supervisor; return the error, or an empty text without an error."""
    try:
        open_memory_root(Path(base), agent_pid)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "plant",
    [
        pytest.param(lambda path: path.mkdir(mode=0o777), id="open to others"),
        pytest.param(lambda path: path.mkdir(mode=0o710), id="open to a group"),
        pytest.param(
            lambda path: path.symlink_to(path.parent), id="a link to a folder"
        ),
        pytest.param(lambda path: path.symlink_to("nowhere"), id="a link to nothing"),
        pytest.param(lambda path: path.touch(), id="a file"),
        pytest.param(
            lambda path: (path.mkdir(mode=0o700), os.chown(path, STRANGER, STRANGER)),
            id="of another user",
            marks=pytest.mark.skipif(
                os.geteuid() != 0, reason="only root can make another user's files"
            ),
        ),
    ],
)
def test_what_is_planted_in_place_of_the_folder_is_not_used(
    tmp_path: Path, start_agent, plant: Callable[[Path], object]
) -> None:
    agent = start_agent()
    path = tmp_path / f"moe_ckpt-{agent.pid}-{start_ticks(agent.pid)}-{pid_namespace()}"
    before = os.umask(0)
    try:
        plant(path)
    finally:
        os.umask(before)
    [error] = run_ranks(1, open_planted, str(tmp_path), agent.pid)
    assert error.startswith(
        f"runtime.shared_memory: got {str(tmp_path)!r}, wanted a folder in"
    )
    assert not path.is_dir() or path.is_symlink() or not list(path.iterdir())


# The last supervisor of a node removes the node's memory, also if a janitor ends before
# the janitor has removed the memory.

W, F, G = Ended.WELL, Ended.FOR_GOOD, Ended.TO_GO_ON


@pytest.mark.parametrize(
    ("ends", "stays"),
    [
        pytest.param([W, W], False, id="trained to the end"),
        pytest.param([W], True, id="one has yet to end"),
        pytest.param([F], True, id="one has failed, the other saves"),
        pytest.param([F, G], False, id="one has failed for good"),
        pytest.param([G, F], False, id="one has failed for good, the last"),
        pytest.param([W, F], False, id="one has failed after the end"),
        pytest.param([G, G], True, id="to be started again"),
        pytest.param([W, G], True, id="one is to be started again"),
    ],
)
def test_a_nodes_memory_is_removed_once_no_start_will_use_it(
    tmp_path: Path, ends: Sequence[Ended], stays: bool
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    for rank in (4, 5):
        begin_rank(root, rank)
    for rank, how in zip((4, 5), ends, strict=False):
        end_rank(root, rank, range(4, 6), how)
    assert root.exists() is stays


def test_a_rank_that_is_started_again_has_not_ended(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    for rank in (0, 1):
        begin_rank(root, rank)
        end_rank(root, rank, range(2), Ended.TO_GO_ON)
    begin_rank(root, 0)
    end_rank(root, 1, range(2), Ended.FOR_GOOD)
    assert root.exists(), "rank 0 uses it"
    end_rank(root, 0, range(2), Ended.WELL)
    assert not root.exists()
    # another process may have removed the folder
    end_rank(root, 0, range(2), Ended.WELL)
    assert not root.exists()


# Another process sends SIGCONT to a process that a signal has stopped.


def supervise(
    connection: Connection, base: str, agent_pid: int, patience_s: float
) -> None:
    """Act as a supervisor that ends with its agent.

    The supervisor sends the pid of its janitor, and then a message at each SIGCONT.
    """
    root = open_memory_root(Path(base), agent_pid, patience_s=patience_s)
    begin_rank(root, 0)
    signal.signal(signal.SIGCONT, lambda *_: connection.send("goes on"))
    agent = os.pidfd_open(agent_pid)
    assert janitor_of(root) is not None, "it is noted once the folder is open"
    connection.send(janitor_of(root))
    poll = select.poll()
    poll.register(agent, select.POLLIN)
    poll.poll()


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    assert wait_until(lambda: is_stopped(pid))


def test_a_supervisor_that_was_stopped_goes_on(
    tmp_path: Path, start, start_agent
) -> None:
    supervisor = start(supervise, str(tmp_path), start_agent().pid, 0.5)
    assert supervisor.hear()
    stop(supervisor.pid)
    assert supervisor.hear() == "goes on"


def test_a_job_that_is_suspended_with_its_agent_stays_so(
    tmp_path: Path, start, start_agent
) -> None:
    agents = start_agent(), start_agent()
    suspended, other = (
        start(supervise, str(tmp_path), agent.pid, 0.5) for agent in agents
    )
    for process in (suspended, other):
        assert process.hear()
    stop(agents[0].pid)
    stop(suspended.pid)
    for _ in range(3):
        stop(other.pid)
        assert other.hear() == "goes on"
    assert is_stopped(suspended.pid)
    os.kill(agents[0].pid, signal.SIGCONT)
    assert suspended.hear() == "goes on"


def test_a_stopped_supervisor_ends_with_its_agent_and_its_memory_goes(
    tmp_path: Path, start, start_agent
) -> None:
    agent = start_agent()
    supervisor = start(supervise, str(tmp_path), agent.pid, 1000.0)
    assert supervisor.hear()
    stop(supervisor.pid)
    agent.kill()
    assert supervisor.exit_status() == 0
    assert wait_until(lambda: not list(tmp_path.iterdir()))


def test_a_janitor_that_was_stopped_is_let_go_on_by_the_next_job(
    tmp_path: Path, start, start_agent
) -> None:
    agent = start_agent()
    supervisor = start(supervise, str(tmp_path), agent.pid, 1000.0)
    stop(supervisor.hear())
    agent.kill()
    assert supervisor.exit_status() == 0
    [left] = tmp_path.iterdir()
    memory_root_of(tmp_path, start_agent())
    wait_until_gone(left)


# Jobs in separate PID namespaces, as containers have: pids begin at 1, and all
# processes end with process 1. So the agent's end kills the janitor.

_CLONE_NEWNS, _CLONE_NEWPID = 0x00020000, 0x20000000
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000
_libc = ctypes.CDLL(None, use_errno=True)


def can_have_namespaces() -> bool:
    command = ["unshare", "--fork", "--pid", "--mount-proc", "true"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


needs_namespaces = pytest.mark.skipif(
    not can_have_namespaces(), reason="this user cannot make a PID namespace"
)


def be_first_process(main: Callable[[], object]) -> int:
    """Run `main` as process 1 of a PID namespace that has its own /proc.

    To be called in a child process: the calling process can afterwards fork no process
    in the namespace from which the caller came.

    Returns:
        The exit status of process 1.
    """
    _check(_libc.unshare(_CLONE_NEWNS | _CLONE_NEWPID))
    first = os.fork()
    if first == 0:
        status = 1
        try:
            _check(_libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None))
            _check(_libc.mount(b"proc", b"/proc", b"proc", 0, None))
            main()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])


def _check(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def train_in_container(base: Path, end: Ended | None) -> None:
    """Act as an agent whose two supervisors end in a given way.

    With None, the supervisors record no end, as if they were killed.
    """

    def supervise(agent_pid: int, rank: int) -> None:
        memory = begin_rank(open_memory_root(base, agent_pid), rank)
        (memory / "snapshot").write_bytes(b"state")
        if end:
            end_rank(memory.parent, rank, range(2), end)

    agent_pid = os.getpid()
    assert agent_pid == 1
    for rank in range(2):
        child = os.fork()
        if child == 0:
            try:
                supervise(agent_pid, rank)
            finally:
                os._exit(0)
        os.waitpid(child, 0)


def be_containers(
    connection: Connection, base: Path, ends: Sequence[Ended | None]
) -> None:
    """Run a container for each end; send the number of folders after each container."""
    for end in ends:
        child = os.fork()  # a process can make only one namespace
        if child == 0:
            os._exit(be_first_process(lambda: train_in_container(base, end)))  # noqa: B023
        assert os.waitpid(child, 0)[1] == 0
        connection.send(len(list(base.iterdir())))


@needs_namespaces
def test_ten_jobs_in_containers_leave_nothing(
    tmp_path: Path, start: Callable[..., Child]
) -> None:
    """Needs real namespaces: only the kernel ends a janitor with its container."""
    ends = [W, F, None, G, None] * 2 + [W]
    containers = start(be_containers, tmp_path, ends)
    assert [containers.hear() for _ in ends] == [end in (None, G) for end in ends]


@pytest.mark.parametrize("base", ["missing", "file", "/proc"])
def test_a_base_that_is_no_folder_that_can_be_written_is_named(
    tmp_path: Path, base: str
) -> None:
    (tmp_path / "file").touch()
    wanted = (
        rf"^runtime.shared_memory: got '?{tmp_path / base}'?, wanted a folder in memory"
        r" that can be written"
    )
    with pytest.raises(ConfigError, match=wanted):
        open_memory_root(tmp_path / base, os.getpid())


# Ranks take over the data of earlier ranks, however torchrun has numbered the nodes.

Memory = dict[str, str]
"""Contents of blobs, by the path of the blob's folder."""

OWN = {"rank0000/own": "0", "rank0001/own": "1"}


def fill(root: Path, memory: Memory) -> None:
    for path, content in memory.items():
        folder = root / path
        folder.mkdir(parents=True)
        (folder / "blob").write_text(content)


def content_of(root: Path) -> Memory:
    return {
        str(blob.parent.relative_to(root)): blob.read_text()
        for blob in root.rglob("blob")
    }


@pytest.mark.parametrize(
    ("before", "ranks", "after"),
    [
        pytest.param({}, range(2), {}, id="nothing was left"),
        pytest.param(
            OWN | {"rank0000/held/rank0002": "2"},
            range(2),
            OWN | {"rank0000/held/rank0002": "2"},
            id="the same numbers",
        ),
        pytest.param(
            {
                "rank0002/own": "2",
                "rank0002/held/rank0004": "4",
                "rank0003/held/rank0000": "0",
            },
            range(2),
            {
                "rank0000/own": "0",
                "rank0000/held/rank0002": "2",
                "rank0000/held/rank0004": "4",
            },
            id="own memory is held, and copies are their owners' own",
        ),
        pytest.param(
            {"rank0002/held/rank0003": "copy", "rank0003/own": "own"},
            range(2),
            {"rank0000/held/rank0003": "own", "rank0002/held/rank0003": "copy"},
            id="an owner's before a copy",
        ),
        pytest.param(
            {
                "rank0000/own": "0",
                "rank0000/held/rank0004": "4",
                "rank0001/held/rank0005": "5",
            },
            range(4, 6),
            {"rank0004/own": "4", "rank0005/own": "5", "rank0004/held/rank0000": "0"},
            id="upwards",
        ),
        pytest.param(
            {
                "rank0000/own": "newer",
                "rank0002/held/rank0000": "older",
                "rank0000/held/rank0002": "copy",
            },
            range(2),
            {
                "rank0000/own": "newer",
                "rank0000/held/rank0002": "copy",
                "rank0002/held/rank0000": "older",
            },
            id="own memory is not replaced",
        ),
    ],
)
def test_what_earlier_ranks_left_is_found_under_todays_numbers(
    tmp_path: Path, before: Memory, ranks: range, after: Memory
) -> None:
    fill(tmp_path, before)
    for _ in range(2):  # restarted supervisors take over again
        take_over(tmp_path, ranks)
        assert content_of(tmp_path) == after


def test_numbers_that_go_round_lose_nothing(tmp_path: Path) -> None:
    before = {"rank0000/own": "0", "rank0000/held/rank0001": "1"}
    fill(tmp_path, before)
    for rank in (1, 2, 0, 1, 0):
        take_over(tmp_path, range(rank, rank + 1))
        assert own_path(tmp_path / "rank0000").exists() == (rank == 0)
        assert sorted(content_of(tmp_path).values()) == ["0", "1"]
    assert content_of(tmp_path) == before


def test_memory_is_taken_over_once_even_if_a_rank_drops_its_own(tmp_path: Path) -> None:
    fill(tmp_path, {"rank0000/own": "newer", "rank0002/held/rank0000": "older"})
    take_over(tmp_path, range(2))
    shutil.rmtree(own_path(tmp_path / "rank0000"))
    take_over(tmp_path, range(2))
    assert content_of(tmp_path) == {"rank0002/held/rank0000": "older"}


def start_as_supervisor(root: str) -> None:
    """Act as a supervisor of a node: take over, then publish as a quick worker does."""
    rank, store = int(os.environ["RANK"]), rank_store()
    store.add("ready", 1)
    while store.add("ready", 0) < 4:
        pass
    take_over(Path(root), range(4))
    own = own_path(rank_memory(Path(root), rank))
    own.mkdir(exist_ok=True)
    (own / "new").touch()


def test_supervisors_of_a_node_take_over_at_once_before_a_quick_worker(
    tmp_path: Path,
) -> None:
    others = range(100, 300)
    before = {f"rank{4 + rank:04d}/held/rank{rank:04d}": f"{rank}" for rank in range(4)}
    fill(
        tmp_path,
        before | {f"rank0007/held/rank{rank:04d}": f"{rank}" for rank in others},
    )
    run_ranks(4, start_as_supervisor, str(tmp_path))
    after = {f"rank{rank:04d}/own": f"{rank}" for rank in range(4)}
    assert content_of(tmp_path) == after | {
        f"rank0000/held/rank{rank:04d}": f"{rank}" for rank in others
    }
