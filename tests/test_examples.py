"""Examples do what they say: the loop of one's own lives through a death and ends where it ends without one."""

from __future__ import annotations

import functools
import json
import runpy
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.faults.carry_out import carry_out
from moe_ckpt.faults.schedule import Kill
from tests.agent import run_job
from tests.ranks import CONTEXT
from tests.scenarios import ROOT
from tests.waits import START_S

OWN_LOOP = ROOT / "examples" / "own_loop.py"


def run_own_loop(run: Path) -> int:
    """Be what torchrun starts; return the exit status."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # as torchrun has it
    sys.argv = [str(OWN_LOOP), str(run)]
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(OWN_LOOP), run_name="__main__")
    return int(ended.value.code or 0)


def result_of(folder: Path, *kills: Kill) -> dict[str, Any]:
    folder.mkdir()
    run = folder / "run"
    agent = CONTEXT.Process(target=run_job, args=(functools.partial(run_own_loop, run), 2, folder, None))
    agent.start()
    try:
        assert not kills or carry_out(kills, run, ranks_per_node=1)
        agent.join(START_S)
        assert agent.exitcode == 0, [path.read_text() for path in folder.glob("*.log")]
    finally:
        agent.kill()
    return json.loads((run / "result.json").read_text())


def test_a_loop_of_ones_own_ends_with_the_same_state_after_a_death(tmp_path: Path) -> None:
    alone = result_of(tmp_path / "alone")
    killed = result_of(tmp_path / "killed", Kill(rank=1, iteration=5, phase="forward"))
    assert (alone["faults_survived"], killed["faults_survived"]) == (0, 1)
    assert killed["digest_per_rank"] == alone["digest_per_rank"]
