"""A node's folder in shared memory: there as long as the agent that started the ranks, found again by those after."""

from __future__ import annotations

import os
import select
import shutil
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from moe_ckpt.elastic.shared_memory import open_memory_root, rank_memory, take_over
from moe_ckpt.errors import ConfigError
from moe_ckpt.linux import start_ticks
from moe_ckpt.snapshot.blobs import own_path
from tests.elastic.processes import Child
from tests.elastic.workers import wait_until
from tests.ranks import rank_store, run_ranks
from tests.waits import WAIT_S


def live_on(connection: Connection) -> None:
    connection.recv()


@pytest.fixture
def start_agent(start: Callable[..., Child]) -> Callable[[], Child]:
    """Return what starts a process that does nothing but live; the janitors of its folders go with it."""
    return lambda: start(live_on)


def open_as_supervisors(base: str, agent_pid: int) -> str:
    """Be two supervisors of a node, one after the other."""
    first, second = (str(open_memory_root(Path(base), agent_pid)) for _ in range(2))
    assert first == second
    return first


def memory_root_of(base: Path, agent: Child) -> Path:
    """Return the folder that supervisors of an agent have opened; they are gone, only its janitor is there."""
    [root] = run_ranks(1, open_as_supervisors, str(base), agent.pid)
    return Path(root)


def wait_until_gone(path: Path) -> None:
    assert wait_until(lambda: not path.exists()), f"{path} is still there"


def test_a_folder_goes_with_its_agent_and_not_before(tmp_path: Path, start_agent) -> None:
    staying, leaving = start_agent(), start_agent()
    stays, goes = memory_root_of(tmp_path, staying), memory_root_of(tmp_path, leaving)
    for root in (stays, goes):
        (rank_memory(root, 3) / "page").touch()
    leaving.kill()
    wait_until_gone(goes)
    assert (stays / "rank0003" / "page").exists(), "its janitor did not wait"
    assert memory_root_of(tmp_path, staying) == stays, "supervisors that are started anew find their agent's folder"
    assert sorted(tmp_path.iterdir()) == [stays]
    assert stays.stat().st_mode & 0o777 == rank_memory(stays, 3).stat().st_mode & 0o777 == 0o700


def open_and_die(output: Connection, base: str, agent_pid: int) -> None:
    """Be a supervisor whose output another process reads, killed with all its process group as torchrun does."""
    os.setpgid(0, 0)
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    output.close()
    open_memory_root(Path(base), agent_pid)
    os.killpg(0, signal.SIGKILL)


def test_a_janitor_outlives_its_supervisors_group_and_keeps_no_output_open(tmp_path: Path, start, start_agent) -> None:
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
    """Be a supervisor whose daemon outlives the agent and makes its folder again."""
    root = open_memory_root(Path(base), agent_pid)
    connection.send(root)
    wait_until_gone(root)
    (root / "rank0000" / "held").mkdir(parents=True)
    connection.send("made again")
    connection.recv()


def test_a_folder_that_a_daemon_makes_after_its_agents_end_goes_with_it(tmp_path: Path, start, start_agent) -> None:
    agent = start_agent()
    daemon = start(keep_on, str(tmp_path), agent.pid)
    root = daemon.hear()
    agent.kill()
    assert daemon.hear() == "made again"
    assert root.exists()
    daemon.kill()
    wait_until_gone(root)


def test_a_folder_whose_supervisor_died_before_it_had_a_janitor_gets_one(tmp_path: Path, start_agent) -> None:
    agent = start_agent()
    name = memory_root_of(tmp_path, agent).name
    (tmp_path / "again" / name).mkdir(parents=True)
    root = memory_root_of(tmp_path / "again", agent)
    assert root.name == name
    agent.kill()
    wait_until_gone(root)


def test_folders_of_agents_that_are_gone_are_removed_and_no_others(tmp_path: Path, start_agent) -> None:
    gone, lives, opens = start_agent(), start_agent(), start_agent()
    counted_by = int(memory_root_of(tmp_path, lives).name.rpartition("-")[2])
    started, gone_started = start_ticks(lives.pid), start_ticks(gone.pid)
    left = [f"{gone.pid}-{gone_started}-{counted_by}", f"{lives.pid}-{started - 1}-{counted_by}"]
    kept = [f"{lives.pid}-{started}-{counted_by}", f"{gone.pid}-{gone_started}-{counted_by + 1}", "mine", "test-1"]
    for name in left + kept:
        (tmp_path / f"moe_ckpt-{name}" / "rank0000").mkdir(parents=True)
    gone.kill()
    root = memory_root_of(tmp_path, opens)
    assert {path.name for path in tmp_path.iterdir()} == {root.name, *(f"moe_ckpt-{name}" for name in kept)}


@pytest.mark.parametrize("base", ["missing", "file", "/proc"])
def test_a_base_that_is_no_folder_that_can_be_written_is_named(tmp_path: Path, base: str) -> None:
    (tmp_path / "file").touch()
    wanted = rf"^runtime.shared_memory: got '?{tmp_path / base}'?, wanted a folder in memory that can be written"
    with pytest.raises(ConfigError, match=wanted):
        open_memory_root(tmp_path / base, os.getpid())


# What earlier ranks left is taken over, whatever numbers torchrun has given the nodes.

Memory = dict[str, str]
"""Whose blobs lie where: contents by path."""

OWN = {"rank0000/own": "0", "rank0001/own": "1"}


def fill(root: Path, memory: Memory) -> None:
    for place, content in memory.items():
        folder = root / place
        folder.mkdir(parents=True)
        (folder / "blob").write_text(content)


def content_of(root: Path) -> Memory:
    return {str(blob.parent.relative_to(root)): blob.read_text() for blob in root.rglob("blob")}


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
            {"rank0002/own": "2", "rank0002/held/rank0004": "4", "rank0003/held/rank0000": "0"},
            range(2),
            {"rank0000/own": "0", "rank0000/held/rank0002": "2", "rank0000/held/rank0004": "4"},
            id="own memory is held, and copies are their owners' own",
        ),
        pytest.param(
            {"rank0002/held/rank0003": "copy", "rank0003/own": "own"},
            range(2),
            {"rank0000/held/rank0003": "own", "rank0002/held/rank0003": "copy"},
            id="an owner's before a copy",
        ),
        pytest.param(
            {"rank0000/own": "0", "rank0000/held/rank0004": "4", "rank0001/held/rank0005": "5"},
            range(4, 6),
            {"rank0004/own": "4", "rank0005/own": "5", "rank0004/held/rank0000": "0"},
            id="upwards",
        ),
        pytest.param(
            {"rank0000/own": "newer", "rank0002/held/rank0000": "older", "rank0000/held/rank0002": "copy"},
            range(2),
            {"rank0000/own": "newer", "rank0000/held/rank0002": "copy", "rank0002/held/rank0000": "older"},
            id="own memory is not replaced",
        ),
    ],
)
def test_what_earlier_ranks_left_is_found_under_todays_numbers(
    tmp_path: Path, before: Memory, ranks: range, after: Memory
) -> None:
    fill(tmp_path, before)
    for _ in range(2):  # supervisors that are started anew do it again
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
    """Be one of the supervisors of a node: take over, then let a worker publish."""
    rank, store = int(os.environ["RANK"]), rank_store()
    store.add("ready", 1)
    while store.add("ready", 0) < 4:
        pass
    take_over(Path(root), range(4))
    own = own_path(rank_memory(Path(root), rank))
    own.mkdir(exist_ok=True)
    (own / "new").touch()


def test_supervisors_of_a_node_take_over_at_once_before_a_quick_worker(tmp_path: Path) -> None:
    others = range(100, 300)
    before = {f"rank{4 + rank:04d}/held/rank{rank:04d}": f"{rank}" for rank in range(4)}
    fill(tmp_path, before | {f"rank0007/held/rank{rank:04d}": f"{rank}" for rank in others})
    run_ranks(4, start_as_supervisor, str(tmp_path))
    after = {f"rank{rank:04d}/own": f"{rank}" for rank in range(4)}
    assert content_of(tmp_path) == after | {f"rank0000/held/rank{rank:04d}": f"{rank}" for rank in others}
