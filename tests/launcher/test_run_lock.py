"""A run's folder is one job's at a time; all lives and restarts of a job's ranks have it."""

from __future__ import annotations

import json
import os
import re
import socket
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from moe_ckpt import run_lock
from moe_ckpt.errors import ConfigError
from moe_ckpt.linux import start_ticks
from moe_ckpt.run_lock import Holder, release_lock, take_lock
from tests.ranks import rank_store, run_ranks

LIVES = Holder(host=socket.gethostname(), agent_pid=os.getpid(), start_ticks=start_ticks(os.getpid()), job="7")
GONE = replace(LIVES, start_ticks=1)  # its pid is another's now
ELSEWHERE = replace(LIVES, host="far-away")


def write(run: Path, holder: Holder) -> None:
    (run / "lock").write_text(json.dumps(asdict(holder)))


def read(run: Path) -> Holder:
    return Holder(**json.loads((run / "lock").read_text()))


def refusal(run: Path) -> str:
    """Try to take a folder; return why it is not to be had, or nothing where it is taken now."""
    try:
        take_lock(run)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A job that torchrun calls 8 and keeps a store for."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "8")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    return monkeypatch


def test_a_job_has_a_folder_in_all_its_lives_until_it_leaves_it(tmp_path: Path, job: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        take_lock(tmp_path)
    assert read(tmp_path) == replace(LIVES, agent_pid=os.getppid(), start_ticks=start_ticks(os.getppid()), job="8")
    for _ in range(2):
        release_lock(tmp_path)
        assert (tmp_path / "lock").read_text() == ""


@pytest.mark.parametrize("content", ["", json.dumps(asdict(GONE)), '{"host"'], ids=["empty", "gone", "torn"])
def test_the_lock_of_a_dead_job_is_taken_over(tmp_path: Path, job: pytest.MonkeyPatch, content: str) -> None:
    (tmp_path / "lock").write_text(content)
    take_lock(tmp_path)
    assert read(tmp_path).job == "8"
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_another_jobs_folder_is_refused_and_stays_its_own(tmp_path: Path, job: pytest.MonkeyPatch) -> None:
    write(tmp_path, LIVES)
    got = f"got {str(tmp_path)!r}, which the run of process {os.getpid()} uses"
    assert refusal(tmp_path) == f"run.dir: {got}, wanted a folder of its own for every run"
    release_lock(tmp_path)
    assert read(tmp_path) == LIVES


def test_the_refusal_for_another_machines_job_names_its_lock(tmp_path: Path, job: pytest.MonkeyPatch) -> None:
    write(tmp_path, ELSEWHERE)
    hint = f"process {os.getpid()} of far-away uses, .* remove '{tmp_path}/lock'"
    assert re.search(hint, refusal(tmp_path))


@pytest.mark.parametrize(
    ("holder", "name", "has_store", "passes"),
    [
        (ELSEWHERE, "7", True, True),  # started again on other machines, with the same --rdzv-id
        (ELSEWHERE, "none", True, False),
        (LIVES, "7", True, False),  # torchrun's store would know
        (LIVES, "7", False, True),  # rank 0 is at another agent of this machine now
        (ELSEWHERE, "7", False, True),
        (ELSEWHERE, "none", False, True),
        (ELSEWHERE, "", False, False),  # not of torchrun's
    ],
)
def test_without_a_store_another_agents_job_is_known_by_its_name(
    tmp_path: Path, job: pytest.MonkeyPatch, holder: Holder, name: str, has_store: bool, passes: bool
) -> None:
    job.setenv("TORCHELASTIC_RUN_ID", name)
    job.setenv("TORCHELASTIC_USE_AGENT_STORE", str(has_store))
    holder = replace(holder, job=name)
    write(tmp_path, holder)
    assert (refusal(tmp_path) == "") is passes
    assert (read(tmp_path) == holder) is not passes


def test_a_folder_that_is_known_to_be_ours_is_ours(tmp_path: Path, job: pytest.MonkeyPatch) -> None:
    for holder in (LIVES, ELSEWHERE):
        write(tmp_path, holder)
        take_lock(tmp_path, is_ours=True)
        assert read(tmp_path).job == "8"


NUM_ROUNDS = 20


def compete(base: str) -> list[bool]:
    """Be a job that wants folders of one that is gone; return where it was the one that has got it."""
    run_lock.agent_pid = os.getpid
    store, world_size = rank_store(), int(os.environ["WORLD_SIZE"])

    def meet(place: str) -> None:
        store.add(place, 1)
        while store.add(place, 0) < world_size:
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
