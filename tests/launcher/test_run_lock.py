"""One job at a time has a run's folder, and keeps the folder across restarts.

The folder belongs to all incarnations of the job's ranks.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import signal
import socket
from collections.abc import Callable
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from moe_ckpt import run_lock
from moe_ckpt.errors import ConfigError
from moe_ckpt.linux import boot_id, start_ticks
from moe_ckpt.run_lock import Holder, release_lock, take_lock
from tests.harness.gloo.processes import Child
from tests.harness.gloo.ranks import rank_store, run_ranks

OF_MACHINE = 0xEFFFFFFC
"""PID namespace outside of containers, in which these tests pretend to run."""

LIVES = Holder(
    host=socket.gethostname(),
    boot=boot_id(),
    pid_namespace=OF_MACHINE,
    agent_pid=os.getpid(),
    start_ticks=start_ticks(os.getpid()),
    job="7",
    job_id="number 7",
)
GONE = replace(LIVES, start_ticks=1)  # another process has the pid now
CONTAINED = replace(LIVES, pid_namespace=1)
ELSEWHERE = replace(LIVES, host="far-away", boot="another")
BOOTED = replace(LIVES, boot="the one before")


def write(run: Path, holder: Holder) -> None:
    (run / "lock").write_text(json.dumps(asdict(holder)))


def read(run: Path) -> Holder:
    return Holder(**json.loads((run / "lock").read_text()))


def refusal(run: Path, job_id: str = "") -> str:
    """Try to take a folder; return the refusal, or an empty string on success."""
    try:
        take_lock(run, job_id)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Act as a job that torchrun calls 8 and for which torchrun keeps a store."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "8")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setattr(run_lock, "pid_namespace", lambda: OF_MACHINE)
    return monkeypatch


def test_a_job_has_a_folder_in_all_its_lives_until_it_leaves_it(
    tmp_path: Path, job: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        take_lock(tmp_path, "number 8")
        assert names_in(tmp_path) == ["lock", read(tmp_path).held]
    agent = {"agent_pid": os.getppid(), "start_ticks": start_ticks(os.getppid())}
    assert read(tmp_path) == replace(LIVES, **agent, job="8", job_id="number 8")
    for _ in range(2):
        release_lock(tmp_path)
        assert (tmp_path / "lock").read_text() == ""
        assert names_in(tmp_path) == ["lock"]


def names_in(run: Path) -> list[str]:
    return sorted(path.name for path in run.iterdir())


@pytest.mark.parametrize(
    "content",
    [
        "",
        json.dumps(asdict(GONE)),
        json.dumps(asdict(BOOTED)),
        json.dumps(asdict(CONTAINED) | {"held": "lock-1"}),
        '{"host"',
    ],
    ids=[
        "empty",
        "gone",
        "of an earlier start of the machine",
        "of a container that is gone",
        "torn",
    ],
)
def test_the_lock_of_a_dead_job_is_taken_over(
    tmp_path: Path, job: pytest.MonkeyPatch, content: str
) -> None:
    (tmp_path / "lock").write_text(content)
    take_lock(tmp_path)
    assert read(tmp_path).job == "8"
    assert names_in(tmp_path) == ["lock", read(tmp_path).held]


def test_another_jobs_folder_is_refused_and_stays_its_own(
    tmp_path: Path, job: pytest.MonkeyPatch
) -> None:
    write(tmp_path, LIVES)
    got = f"got {str(tmp_path)!r}, which the run of process {os.getpid()} uses"
    assert (
        refusal(tmp_path) == f"run.dir: {got}, wanted a folder of its own for every run"
    )
    release_lock(tmp_path)
    assert read(tmp_path) == LIVES


def test_the_refusal_for_another_machines_job_names_its_lock(
    tmp_path: Path, job: pytest.MonkeyPatch
) -> None:
    write(tmp_path, ELSEWHERE)
    hint = f"process {os.getpid()} of far-away uses, .* remove '{tmp_path}/lock'"
    assert re.search(hint, refusal(tmp_path))


def hold(connection: Connection, run: Path, holder: Holder) -> None:
    """Act as a job, as seen from another container or machine.

    The job holds the folder until the test sends a message.
    """
    run_lock.agent_pid = os.getpid
    take_lock(run)
    write(run, replace(holder, held=read(run).held))
    connection.send("holds it")
    connection.recv()


@pytest.fixture
def start_holder(
    tmp_path: Path, start: Callable[..., Child]
) -> Callable[[Holder], Child]:
    def started(holder: Holder) -> Child:
        child = start(hold, tmp_path, holder)
        assert child.hear() == "holds it"
        return child

    return started


@pytest.mark.parametrize(
    ("holder", "where"),
    [
        pytest.param(
            CONTAINED,
            f"process {os.getpid()} in another container uses",
            id="another PID namespace",
        ),
        pytest.param(
            ELSEWHERE, f"process {os.getpid()} of far-away uses", id="another machine"
        ),
        pytest.param(
            BOOTED,
            f"process {os.getpid()} of {socket.gethostname()} uses",
            id="a machine of the same name",
        ),
        pytest.param(
            GONE,
            f"process {os.getpid()}, uses".replace(",", ""),
            id="a pid that is seen as another's",
        ),
    ],
)
def test_a_folder_whose_holder_lives_is_refused_wherever_that_is(
    tmp_path: Path,
    job: pytest.MonkeyPatch,
    start_holder: Callable[[Holder], Child],
    holder: Holder,
    where: str,
) -> None:
    """The holder is a process, because the kernel keeps the lock of a live process.

    The names and numbers that this process can see make no difference.
    """
    child = start_holder(holder)
    assert where in refusal(tmp_path)
    assert read(tmp_path) == holder
    child.kill()
    assert (refusal(tmp_path) == "") is (holder != ELSEWHERE), (
        "another machine's locks may not reach this one"
    )


@pytest.mark.parametrize(
    ("name", "passes"),
    [
        ("none", False),  # torchrun's name of jobs without --rdzv-id
        ("", False),
        # the job's --rdzv-id: rank 0 has moved, and the process that rank 0 left behind
        # lives, but is cut off
        ("7", True),
    ],
)
@pytest.mark.parametrize("where", [LIVES, ELSEWHERE], ids=["here", "elsewhere"])
def test_without_a_store_a_name_that_all_jobs_have_takes_no_live_jobs_folder(
    tmp_path: Path,
    job: pytest.MonkeyPatch,
    start_holder: Callable[[Holder], Child],
    where: Holder,
    name: str,
    passes: bool,
) -> None:
    job.setenv("TORCHELASTIC_RUN_ID", name)
    job.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    start_holder(replace(where, job=name))
    assert (refusal(tmp_path) == "") is passes


def test_a_machines_name_counts_outside_of_containers_only(
    tmp_path: Path, job: pytest.MonkeyPatch
) -> None:
    """Pods on several machines may share a name, and count their PIDs separately."""
    write(tmp_path, BOOTED)
    job.setattr(run_lock, "pid_namespace", lambda: OF_MACHINE + 1)
    assert "remove" in refusal(tmp_path)


def test_a_live_job_of_another_version_keeps_its_folder(
    tmp_path: Path, job: pytest.MonkeyPatch
) -> None:
    older = {
        name: value
        for name, value in asdict(LIVES).items()
        if name not in ("job_id", "held")
    }
    for there in (asdict(LIVES) | {"new": 1}, older):
        (tmp_path / "lock").write_text(json.dumps(there))
        assert f"process {os.getpid()} uses" in refusal(tmp_path)


def test_a_job_that_moved_has_its_folder_while_the_process_that_it_left_lives(
    tmp_path: Path, job: pytest.MonkeyPatch, start_holder: Callable[[Holder], Child]
) -> None:
    start_holder(ELSEWHERE)
    assert refusal(tmp_path, "number 9") != ""
    assert refusal(tmp_path, ELSEWHERE.job_id) == ""


def fork_and_end(connection: Connection, run: Path) -> None:
    """Take a folder, and leave a child process that lives on."""
    take_lock(run)
    if os.fork() == 0:
        # from the child, which has closed its parent's descriptors by then
        connection.send(os.getpid())
        signal.pause()


def test_a_process_that_a_holder_forks_does_not_keep_its_folder(
    tmp_path: Path, job: pytest.MonkeyPatch, start: Callable[..., Child]
) -> None:
    parent = start(fork_and_end, tmp_path)
    child = parent.hear()
    try:
        assert parent.exit_status() == 0
        write(tmp_path, replace(CONTAINED, held=read(tmp_path).held))
        assert refusal(tmp_path) == ""
    finally:
        os.kill(child, signal.SIGKILL)


def test_two_jobs_of_one_script_do_not_share_a_folder(
    tmp_path: Path, job: pytest.MonkeyPatch, start_holder: Callable[[Holder], Child]
) -> None:
    """Without torchrun, the process that starts both jobs is the agent of both jobs."""
    agent = replace(
        LIVES, agent_pid=os.getppid(), start_ticks=start_ticks(os.getppid())
    )
    child = start_holder(agent)
    assert "uses" in refusal(tmp_path)
    child.kill()
    assert refusal(tmp_path) == ""


def test_without_locks_in_the_file_system_another_container_is_asked_for(
    tmp_path: Path, job: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def flock(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    job.setattr(fcntl, "flock", flock)
    take_lock(tmp_path)
    assert (
        "has no locks ([Errno 37] No locks available): another container's job in it is"
        " not noticed" in caplog.text
    )
    assert names_in(tmp_path) == ["lock"]
    write(tmp_path, CONTAINED)
    assert "in another container uses" in refusal(tmp_path)
    write(tmp_path, GONE)
    assert refusal(tmp_path) == ""


@pytest.mark.parametrize(
    ("holder", "name", "has_store", "passes"),
    [
        # started again on other machines, with the same --rdzv-id
        (ELSEWHERE, "7", True, True),
        (ELSEWHERE, "none", True, False),
        (LIVES, "7", True, False),  # the same job would have the same number
        (LIVES, "7", False, True),  # rank 0 has moved to another agent of this machine
        (ELSEWHERE, "7", False, True),
        (ELSEWHERE, "none", False, True),
        (ELSEWHERE, "", False, False),  # torchrun did not start the job
    ],
)
def test_without_a_store_another_agents_job_is_known_by_its_name(
    tmp_path: Path,
    job: pytest.MonkeyPatch,
    holder: Holder,
    name: str,
    has_store: bool,
    passes: bool,
) -> None:
    job.setenv("TORCHELASTIC_RUN_ID", name)
    job.setenv("TORCHELASTIC_USE_AGENT_STORE", str(has_store))
    holder = replace(holder, job=name)
    write(tmp_path, holder)
    assert (refusal(tmp_path) == "") is passes
    assert (read(tmp_path) == holder) is not passes


def test_a_folder_of_the_same_store_is_ours(
    tmp_path: Path, job: pytest.MonkeyPatch
) -> None:
    for holder in (LIVES, ELSEWHERE, CONTAINED):
        write(tmp_path, holder)
        take_lock(tmp_path, holder.job_id)
        assert read(tmp_path).job == "8"


NUM_ROUNDS = 20


def compete(base: str) -> list[bool]:
    """Act as a job that competes for folders without a living holder.

    Returns:
        For each folder, whether this job got the folder.
    """
    run_lock.agent_pid = os.getpid
    store, world_size = rank_store(), int(os.environ["WORLD_SIZE"])

    def meet(key: str) -> None:
        store.add(key, 1)
        while store.add(key, 0) < world_size:
            pass

    got: list[bool] = []
    for number in range(NUM_ROUNDS):
        meet(f"ready{number}")
        got.append(refusal(Path(base) / str(number)) == "")
    meet("done")
    return got


def test_of_many_jobs_that_want_a_folder_at_once_one_gets_it(tmp_path: Path) -> None:
    for number in range(NUM_ROUNDS):
        (tmp_path / str(number)).mkdir()
        if number % 2:
            write(tmp_path / str(number), GONE)
    winners = zip(*run_ranks(3, compete, str(tmp_path)), strict=True)
    assert [sum(got) for got in winners] == [1] * NUM_ROUNDS
