"""One folder for a job: found again after a restart, waited for no longer than told, and no other job's meanwhile."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch.distributed as dist

from launcher.config import compose_settings
from launcher.entry import start
from moe_ckpt.elastic.status_page import StatusPage
from moe_ckpt.elastic.torchrun import read_launch
from moe_ckpt.errors import ConfigError
from moe_ckpt.linux import start_ticks
from moe_ckpt.run_folder import find_run_folder, open_run_folder, wait_for_run_folder
from moe_ckpt.run_lock import Holder
from tests.launcher.errors import error_of
from tests.ranks import rank_store, run_ranks
from tests.training import fast


def start_without_torchruns_store() -> str:
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    return error_of(start, compose_settings(fast("ckpt=moevement", "run.dir=null")))


def test_where_the_job_hosts_its_own_store_it_has_to_know_its_folder() -> None:
    wanted = "a folder that all nodes see, where the job hosts its own store (TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1)"
    assert run_ranks(2, start_without_torchruns_store) == [f"run.dir: got null, wanted {wanted}"] * 2


def wait_in_vain(timeout_s: float) -> str:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    return error_of(wait_for_run_folder, timeout_s)


def test_the_folder_is_waited_for_as_long_as_told() -> None:
    assert run_ranks(1, wait_in_vain, 0.05) == ["run.dir: got no folder from rank 0 in 0.05 s"]


def wait_with_a_page(folder: str) -> bool:
    """Look for a folder that no rank makes; return whether this rank counted as waiting then."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port)}
    page = StatusPage(Path(folder) / "page")
    run, launch = compose_settings(fast()).job.folder, replace(read_launch(), global_rank=1)
    seen = list[bool]()

    @contextmanager
    def waits() -> Iterator[None]:
        with page.waits():
            seen.append(page.waiting)
            yield

    with pytest.raises(ConfigError, match="got no folder from rank 0"):
        find_run_folder(run, launch, Path(folder), 0.05, waits)
    return seen == [True] and not page.waiting


def test_a_rank_that_waits_for_the_folder_counts_as_waiting(tmp_path: Path) -> None:
    """Its supervisor would kill it as hung where rank 0 imports for minutes."""
    assert run_ranks(1, wait_with_a_page, str(tmp_path)) == [True]


def open_folder(path: str) -> str:
    """Open a folder as the ranks of a run without supervisors do; return how that went."""
    launch = read_launch()
    dist.init_process_group("gloo", store=rank_store(), rank=launch.global_rank, world_size=launch.world_size)
    try:
        return open_run_folder(compose_settings(fast(f"run.dir={path}")).job.folder, launch).run_id
    except ConfigError as error:
        return str(error)


def test_a_run_without_supervisors_has_its_folder_for_itself(tmp_path: Path) -> None:
    mine = run_ranks(2, open_folder, str(tmp_path))
    assert len(set(mine)) == 1
    assert run_ranks(2, open_folder, str(tmp_path)) == mine, "the same agent's"
    other = Holder(host=socket.gethostname(), agent_pid=os.getpid(), start_ticks=start_ticks(os.getpid()), job="")
    (tmp_path / "lock").write_text(json.dumps(asdict(other)))
    got = f"got {str(tmp_path)!r}, which the run of process {os.getpid()} uses"
    assert run_ranks(2, open_folder, str(tmp_path)) == [f"run.dir: {got}, wanted a folder of its own for every run"] * 2
