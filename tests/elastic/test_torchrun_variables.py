"""torchrun's report ends with this project's error.

Also, a variable that the user has set is distinguished from one that torchrun has set,
and a machine may be another node than torchrun's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import (
    ChildFailedError,
    ProcessFailure,
)

from moe_ckpt.elastic.torchrun_variables import (
    Launch,
    export_launch,
    read_launch,
    require_spares,
    write_error_file,
)
from scripts.write_configuration import ROOT
from tests.launcher.errors import error_of


def report_of(path: Path) -> str:
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(path))
    return str(ChildFailedError("train.py", {0: failure}))


def test_the_report_names_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    assert "To enable traceback see" in report_of(path)
    write_error_file("error: train.lr: got 0, wanted more")
    said = report_of(path)
    assert "traceback : error: train.lr: got 0, wanted more\n" in said
    assert "To enable traceback see" not in said


@pytest.mark.parametrize("path", ["", "/nowhere/error.json"])
def test_without_a_file_nothing_is_written(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", path)
    write_error_file("error: train.lr: got 0, wanted more")


@pytest.mark.parametrize(
    ("before", "at_start", "wanted"),
    [
        ({}, {}, False),
        ({"OMP_NUM_THREADS": "3"}, {}, True),
        ({"OMP_NUM_THREADS": "1"}, {}, True),
        ({"TORCHELASTIC_RUN_ID": "none", "OMP_NUM_THREADS": "3"}, {}, True),
        ({"TORCHELASTIC_RUN_ID": "none", "OMP_NUM_THREADS": "1"}, {}, False),
        (
            {"TORCHELASTIC_RUN_ID": "none", "OMP_NUM_THREADS": "1"},
            {"OMP_NUM_THREADS": "1"},
            True,
        ),
    ],
)
def test_a_variable_of_the_user_is_told_from_one_of_torchrun(
    before: dict[str, str], at_start: dict[str, str], wanted: bool
) -> None:
    """The asking process is a child of an agent that is started with `at_start`.

    The agent then sets `before` in its environment, as torchrun does. The test needs
    two processes: the child reads the environment of another process, which the kernel
    keeps as of the start of that process.
    """
    child = (
        "import moe_ckpt.elastic.torchrun_variables as t;"
        " print(t.is_set_by_user('OMP_NUM_THREADS', '1'))"
    )
    agent = (
        f"import os, subprocess, sys; os.environ.update({before!r});"
        f" subprocess.run([sys.executable, '-c', {child!r}])"
    )
    environment = {"PYTHONPATH": str(ROOT), **at_start}
    said = subprocess.run(
        [sys.executable, "-c", agent],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    assert said.stdout == f"{wanted}\n"


SPARE = Launch(global_rank=7, local_rank=1, world_size=8, local_world_size=2, attempt=0)
"""The last rank of four nodes."""


def test_a_process_on_a_spare_node_gets_the_rank_and_variables_of_its_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken = SPARE.as_node(1, 3)
    assert (taken.global_rank, taken.world_size) == (3, 6)
    assert (taken.node, taken.num_nodes, taken.local_ranks) == (1, 3, range(2, 4))
    monkeypatch.setattr(os, "environ", {"MASTER_ADDR": "a", "MASTER_PORT": "1"})
    os.environ |= {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    export_launch(taken)
    assert read_launch() == taken
    names = ("ROLE_RANK", "ROLE_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    assert [os.environ[name] for name in names] == ["3", "6", "1", "3"]


def test_a_job_has_nodes_beside_its_spare_ones() -> None:
    require_spares(SPARE.num_nodes, 3)
    assert error_of(require_spares, SPARE.num_nodes, 4) == (
        "runtime.spare_nodes: got 4, wanted less than torchrun's --nnodes=4, which"
        " counts spare nodes, too"
    )
