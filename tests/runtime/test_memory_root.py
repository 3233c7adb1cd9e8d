"""A node's folder in shared memory: there as long as the agent that started the ranks, found again by those after."""

from __future__ import annotations

import multiprocessing
import os
import select
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from moe_ckpt.errors import ConfigError
from moe_ckpt.runtime.memory_root import open_memory_root, rank_memory, take_over
from moe_ckpt.runtime.processes import start_ticks
from moe_ckpt.store.blobs import held_path, own_path
from tests.ranks import rank_store, run_ranks
from tests.waits import START_S

WAIT_S = 30.0


def live_on(connection: Connection) -> None:
    connection.send("born")
    connection.recv()


@pytest.fixture
def start_agent() -> Iterator[Callable[[], Any]]:
    """Start a process that does nothing but live; the janitors of its folders go with it."""
    context = multiprocessing.get_context("forkserver")
    with ExitStack() as stack:

        def start() -> Any:
            mine, theirs = context.Pipe()
            agent = context.Process(target=live_on, args=(theirs,))
            agent.start()
            theirs.close()
            stack.enter_context(mine)
            stack.callback(agent.close)
            stack.callback(agent.join)
            stack.callback(agent.kill)
            assert mine.poll(START_S)
            return agent

        yield start


def open_as_guards(base: str, agent_pid: int, count: int) -> str:
    """Be so many guards of a node, one after another."""
    roots = {open_memory_root(Path(base), agent_pid) for _ in range(count)}
    assert len(roots) == 1
    return str(roots.pop())


def guards_of(base: Path, agent: Any, count: int = 2) -> Path:
    """Return the folder that guards of an agent have opened; they are gone, only its janitor is there."""
    [root] = run_ranks(1, open_as_guards, str(base), agent.pid, count)
    return Path(root)


def wait_until_gone(path: Path) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while path.exists():
        assert time.monotonic() < deadline_s, f"{path} is still there"
        time.sleep(0.001)  # a janitor tells nobody


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_folder_goes_with_its_agent_and_not_before(tmp_path: Path, start_agent, number: signal.Signals) -> None:
    staying, leaving = start_agent(), start_agent()
    stays, goes = guards_of(tmp_path, staying), guards_of(tmp_path, leaving)
    for root in (stays, goes):
        (rank_memory(root, 3) / "page").touch()
    os.kill(leaving.pid, number)
    wait_until_gone(goes)
    assert (stays / "rank0003" / "page").exists(), "its janitor did not wait"
    assert sorted(tmp_path.iterdir()) == [stays]


def test_guards_that_are_started_anew_find_their_agents_folder(tmp_path: Path, start_agent) -> None:
    agent = start_agent()
    root = guards_of(tmp_path, agent)
    rank_memory(root, 0)
    assert guards_of(tmp_path, agent) == root
    assert list(root.glob("rank*")) == [rank_memory(root, 0)]
    assert root.name.startswith(f"moe_ckpt-{agent.pid}-")
    assert root.stat().st_mode & 0o777 == rank_memory(root, 0).stat().st_mode & 0o777 == 0o700
    other = guards_of(tmp_path, start_agent())
    assert other != root


def open_and_die(base: str, agent_pid: int, output: Connection) -> None:
    """Be a guard whose output somebody reads, killed with all its process group as torchrun does."""
    os.setpgid(0, 0)
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    output.close()
    open_memory_root(Path(base), agent_pid)
    os.killpg(0, signal.SIGKILL)


def test_a_janitor_outlives_its_guards_group_and_keeps_no_output_open(tmp_path: Path, start_agent) -> None:
    agent = start_agent()
    context = multiprocessing.get_context("forkserver")
    reading, writing = context.Pipe(duplex=False)
    guard = context.Process(target=open_and_die, args=(str(tmp_path), agent.pid, writing))
    guard.start()
    writing.close()
    guard.join(WAIT_S)
    assert guard.exitcode == -signal.SIGKILL
    poll = select.poll()
    poll.register(reading.fileno(), select.POLLHUP)
    assert poll.poll(1000 * WAIT_S), "whoever reads a job's output waits for a janitor"
    [root] = tmp_path.iterdir()
    agent.kill()
    wait_until_gone(root)


def keep_on(base: str, agent_pid: int, connection: Connection) -> None:
    """Be a guard whose keeper outlives the agent and makes its folder again."""
    root = open_memory_root(Path(base), agent_pid)
    connection.send(str(root))
    wait_until_gone(root)
    (root / "rank0000" / "held").mkdir(parents=True)
    connection.send("made again")
    connection.recv()


def test_what_a_keeper_makes_after_its_agents_end_goes_with_the_keeper(tmp_path: Path, start_agent) -> None:
    agent = start_agent()
    context = multiprocessing.get_context("forkserver")
    mine, theirs = context.Pipe()
    keeper = context.Process(target=keep_on, args=(str(tmp_path), agent.pid, theirs))
    keeper.start()
    root = Path(mine.recv())
    agent.kill()
    assert mine.poll(WAIT_S)
    assert root.exists()
    keeper.kill()
    keeper.join()
    wait_until_gone(root)


def test_a_folder_whose_guard_was_killed_before_it_had_a_janitor_gets_one(tmp_path: Path, start_agent) -> None:
    agent = start_agent()
    name = guards_of(tmp_path, agent).name
    (tmp_path / "again" / name).mkdir(parents=True)
    root = guards_of(tmp_path / "again", agent)
    assert root.name == name
    agent.kill()
    wait_until_gone(root)


def test_folders_of_agents_that_are_gone_are_removed_and_no_others(tmp_path: Path, start_agent) -> None:
    gone, lives, opens = start_agent(), start_agent(), start_agent()
    counted_by = int(guards_of(tmp_path, lives).name.rpartition("-")[2])
    started, gone_started = start_ticks(lives.pid), start_ticks(gone.pid)
    left = [f"{gone.pid}-{gone_started}-{counted_by}", f"{lives.pid}-{started - 1}-{counted_by}"]
    kept = [f"{lives.pid}-{started}-{counted_by}", f"{gone.pid}-{gone_started}-{counted_by + 1}", "mine", "test-1"]
    for name in left + kept:
        (tmp_path / f"moe_ckpt-{name}" / "rank0000").mkdir(parents=True)
    gone.kill()
    gone.join()
    root = guards_of(tmp_path, opens)
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
            {"rank0000/own": "0", "rank0001/own": "1", "rank0000/held/rank0002": "2"},
            range(2),
            {"rank0000/own": "0", "rank0001/own": "1", "rank0000/held/rank0002": "2"},
            id="the same numbers",
        ),
        pytest.param(
            {"rank0002/own": "2", "rank0003/own": "3"},
            range(2),
            {"rank0000/held/rank0002": "2", "rank0000/held/rank0003": "3"},
            id="what was this node's is held for who has the numbers now",
        ),
        pytest.param(
            {"rank0002/held/rank0000": "0", "rank0003/held/rank0001": "1"},
            range(2),
            {"rank0000/own": "0", "rank0001/own": "1"},
            id="what was held for others is who has their numbers now",
        ),
        pytest.param(
            {"rank0002/own": "2", "rank0002/held/rank0004": "4", "rank0003/held/rank0000": "0"},
            range(2),
            {"rank0000/own": "0", "rank0000/held/rank0002": "2", "rank0000/held/rank0004": "4"},
            id="all kinds at once",
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
            id="what a rank has is not replaced",
        ),
    ],
)
def test_what_earlier_ranks_left_is_found_under_todays_numbers(
    tmp_path: Path, before: Memory, ranks: range, after: Memory
) -> None:
    fill(tmp_path, before)
    for _ in range(2):  # guards that are started anew do it again
        take_over(tmp_path, ranks)
        assert content_of(tmp_path) == after


def test_numbers_that_go_round_lose_nothing(tmp_path: Path) -> None:
    fill(tmp_path, {"rank0000/own": "0", "rank0000/held/rank0001": "1"})
    for rank in (1, 2, 0, 1, 0):
        take_over(tmp_path, range(rank, rank + 1))
        assert own_path(tmp_path / "rank0000").exists() == (rank == 0)
        assert sorted(content_of(tmp_path).values()) == ["0", "1"]
    assert content_of(tmp_path) == {
        str(own_path(Path("rank0000"))): "0",
        str(held_path(Path("rank0000"), 1)): "1",
    }


def test_memory_is_taken_over_once_even_if_a_rank_drops_its_own(tmp_path: Path) -> None:
    fill(tmp_path, {"rank0000/own": "newer", "rank0002/held/rank0000": "older"})
    take_over(tmp_path, range(2))
    shutil.rmtree(own_path(tmp_path / "rank0000"))
    take_over(tmp_path, range(2))
    assert content_of(tmp_path) == {"rank0002/held/rank0000": "older"}


NUM_HELD = 200


def start_as_guard(root: str) -> None:
    """Be one of the guards of a node: take over, then let a trainer publish."""
    rank, store = int(os.environ["RANK"]), rank_store()
    store.add("ready", 1)
    while store.add("ready", 0) < 4:
        pass
    take_over(Path(root), range(4))
    own = own_path(rank_memory(Path(root), rank))
    own.mkdir(exist_ok=True)
    (own / "new").touch()


def test_guards_of_a_node_take_over_at_once_before_a_quick_trainer(tmp_path: Path) -> None:
    before = {f"rank{4 + rank:04d}/held/rank{rank:04d}": f"{rank}" for rank in range(4)}
    before |= {f"rank0007/held/rank{rank:04d}": f"{rank}" for rank in range(100, 100 + NUM_HELD)}
    fill(tmp_path, before)
    run_ranks(4, start_as_guard, str(tmp_path))
    after = {f"rank{rank:04d}/own": f"{rank}" for rank in range(4)}
    after |= {f"rank0000/held/rank{rank:04d}": f"{rank}" for rank in range(100, 100 + NUM_HELD)}
    assert content_of(tmp_path) == after
