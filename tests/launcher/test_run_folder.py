"""A job has one run folder, which no other job uses meanwhile.

A restart finds the folder again, and ranks wait for the folder no longer than allowed.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from launcher.config import compose_settings
from launcher.entry import start
from moe_ckpt.elastic.job_store import part_of
from moe_ckpt.elastic.torchrun_variables import read_launch
from moe_ckpt.errors import ConfigError
from moe_ckpt.linux import boot_id, pid_namespace, start_ticks
from moe_ckpt.run_folder import JOB, find_run_folder, open_run_folder
from moe_ckpt.run_lock import Holder
from moe_ckpt.run_secret import SECRET_FILE, make_secret, read_secret, ticket_of
from tests.harness.gloo.ranks import rank_store, run_ranks
from tests.harness.jobs.training import fast
from tests.launcher.errors import error_of
from tests.waits import WAIT_S

STRANGER = 54321
"""User ID of another user."""


def start_without_torchruns_store() -> str:
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    return error_of(start, compose_settings(fast("ckpt=moevement", "run.dir=null")))


def test_where_the_job_hosts_its_own_store_it_has_to_know_its_folder() -> None:
    wanted = (
        "a folder that all nodes see, where the job hosts its own store"
        " (TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1)"
    )
    assert (
        run_ranks(2, start_without_torchruns_store)
        == [f"run.dir: got null, wanted {wanted}"] * 2
    )


def host_store() -> dist.TCPStore:
    """Start a store that this process takes for the store of its agent."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ |= {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
    }
    return store


def found_by(rank: int, run_dir: str, timeout_s: float = WAIT_S) -> Any:
    """Return the path of the folder that a rank finds, or the rank's error message."""
    folder = replace(compose_settings(fast()).job.folder, dir=run_dir or None)
    try:
        return str(
            find_run_folder(
                folder, replace(read_launch(), global_rank=rank), timeout_s
            ).path
        )
    except ConfigError as error:
        return str(error)


def wait_in_vain() -> str:
    store = host_store()
    return found_by(1, "", 0.05) if store else ""


def test_the_folder_is_waited_for_as_long_as_told() -> None:
    assert run_ranks(1, wait_in_vain) == [
        "run.dir: got no folder from rank 0 in 0.05 s"
    ]


def find_where_a_stranger_writes_the_store(real: str, planted: str) -> list[str]:
    """Let rank 0 make a folder, and let another user name another folder in the store.

    The store has no authentication.

    Returns:
        The paths that rank 0, then rank 1, then rank 0 again find.
    """
    store = host_store()
    first = found_by(0, real)
    part_of(store, JOB).set("run_folder", planted)
    return [first, found_by(1, real), found_by(0, real)]


def find_where_a_stranger_names_a_folder_first(planted: str) -> Any:
    store = host_store()
    part_of(store, JOB).set("run_folder", planted)
    return [found_by(0, ""), found_by(1, "")]


def test_a_folder_that_all_users_may_write_is_not_taken_from_the_store(
    tmp_path: Path,
) -> None:
    """All users may write the folder, as with /tmp.

    A checkpoint that another user puts there contains pickles.
    """
    planted = tmp_path / "planted"
    planted.mkdir()
    planted.chmod(0o1777)
    (planted / "run.json").write_text('{"run_id": "planted", "clock_origin_unix_s": 0}')
    [found] = run_ranks(1, find_where_a_stranger_names_a_folder_first, str(planted))
    wanted = (
        f"run.dir: got {str(planted)!r} of user {os.geteuid()}, wanted a folder of this"
        " user's"
    )
    assert found == [wanted] * 2


def test_a_link_to_the_newest_run_that_cannot_be_made_ends_no_job(
    tmp_path: Path,
) -> None:
    (tmp_path / "outputs" / "latest").mkdir(parents=True)
    [(found, *_)] = run_ranks(1, find_without_a_name, str(tmp_path))
    assert Path(found).is_relative_to(tmp_path / "outputs")
    assert [
        path.name
        for path in (tmp_path / "outputs").iterdir()
        if path.name.startswith(".")
    ] == []


def test_a_folder_that_a_setting_names_is_not_looked_up_in_the_store(
    tmp_path: Path,
) -> None:
    real, planted = str(tmp_path / "real"), tmp_path / "planted"
    planted.mkdir()
    [found] = run_ranks(1, find_where_a_stranger_writes_the_store, real, str(planted))
    assert found == [real] * 3
    assert not list(planted.iterdir())


def find_first(run_dir: str) -> str:
    store = host_store()
    return found_by(0, run_dir) if store else ""


def find_in(run_dir: str) -> list[str]:
    """Return the folders that ranks 0 and 1 find, twice, as after a restart."""
    store = host_store()
    return [found_by(rank, run_dir) for rank in (0, 1, 0, 1)] if store else []


def test_a_new_folder_is_found_again_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [(first, *others)] = run_ranks(1, find_without_a_name, str(tmp_path))
    assert Path(first).is_relative_to(tmp_path / "outputs")
    assert others == [first] * 3


def find_without_a_name(work_dir: str) -> list[str]:
    os.chdir(work_dir)
    return find_in("")


def test_no_stranger_can_read_the_secret_of_a_run(tmp_path: Path) -> None:
    [found] = run_ranks(1, find_in, str(tmp_path / "run"))
    secret = Path(found[0]) / SECRET_FILE
    assert (len(secret.read_text()), secret.stat().st_mode & 0o777) == (64, 0o600)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's files")
@pytest.mark.parametrize("mode", [0o700, 0o755, 0o777, 0o1777])
def test_a_folder_of_another_user_is_refused(tmp_path: Path, mode: int) -> None:
    run = tmp_path / "run"
    run.mkdir()
    os.chown(run, STRANGER, STRANGER)
    run.chmod(mode)
    wanted = (
        f"run.dir: got {str(run)!r} of user {STRANGER}, wanted a folder of this user's"
    )
    assert run_ranks(1, find_first, str(run)) == [wanted]
    assert not list(run.iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's files")
@pytest.mark.parametrize(
    "plant",
    [
        pytest.param(
            lambda secret: os.chown(secret, STRANGER, STRANGER), id="of another user"
        ),
        pytest.param(lambda secret: secret.chmod(0o640), id="of another mode"),
        pytest.param(lambda secret: secret.write_text(""), id="empty"),
        pytest.param(
            lambda secret: (
                secret.rename(secret.with_name("s"))
                .parent.joinpath("secret")
                .symlink_to("s")
            ),
            id="a link",
        ),
    ],
)
def test_a_secret_that_others_may_know_is_refused(
    tmp_path: Path, plant: Callable[[Path], object]
) -> None:
    make_secret(tmp_path)
    secret = tmp_path / SECRET_FILE
    plant(secret)
    with pytest.raises(ConfigError, match=rf"^run.dir: .*the run's secret '{secret}'"):
        read_secret(secret)


def test_a_copy_of_a_secret_may_be_a_link_as_kubernetes_makes_it(
    tmp_path: Path,
) -> None:
    make_secret(tmp_path)
    (tmp_path / "copy").symlink_to(SECRET_FILE)
    assert read_secret(tmp_path / "copy", "--secret") == read_secret(
        tmp_path / SECRET_FILE
    )


def test_each_start_of_a_job_has_another_token(tmp_path: Path) -> None:
    make_secret(tmp_path)
    make_secret(tmp_path)
    secret = read_secret(tmp_path / SECRET_FILE)
    tickets = [ticket_of(secret, job, None) for job in ("first", "first", "second")]
    assert tickets[0] == tickets[1]
    assert tickets[0].token != tickets[2].token
    assert secret not in {ticket.token for ticket in tickets}


def open_folder(path: str) -> str:
    """Open a folder as the ranks of a run without supervisors do.

    Returns:
        The ID of the run, or the error message.
    """
    launch = read_launch()
    dist.init_process_group(
        "gloo",
        store=rank_store(),
        rank=launch.global_rank,
        world_size=launch.world_size,
    )
    try:
        return open_run_folder(
            compose_settings(fast(f"run.dir={path}")).job.folder, launch
        ).run_id
    except ConfigError as error:
        return str(error)


def test_a_run_without_supervisors_has_its_folder_for_itself(tmp_path: Path) -> None:
    mine = run_ranks(2, open_folder, str(tmp_path))
    assert len(set(mine)) == 1
    assert run_ranks(2, open_folder, str(tmp_path)) == mine, "the same agent's"
    other = Holder(
        host=socket.gethostname(),
        boot=boot_id(),
        pid_namespace=pid_namespace(),
        agent_pid=os.getpid(),
        start_ticks=start_ticks(os.getpid()),
        job="",
        job_id="",
    )
    (tmp_path / "lock").write_text(json.dumps(asdict(other)))
    got = f"got {str(tmp_path)!r}, which the run of process {os.getpid()} uses"
    assert (
        run_ranks(2, open_folder, str(tmp_path))
        == [f"run.dir: {got}, wanted a folder of its own for every run"] * 2
    )
