"""Examples work: the example of an own loop survives deaths, and job scripts parse.

After a death the loop must end with the same state as without a death.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from launcher.faults.carry_out import carry_out
from launcher.prove.compare import first_changed, read_digests
from launcher.report.__main__ import main as report
from launcher.status import main as status_of
from moe_ckpt import loop, own_loop
from moe_ckpt.config import CheckConfig
from moe_ckpt.door import attached_command
from moe_ckpt.elastic.orphans import GRACE_S
from moe_ckpt.faults.schedule import Kill
from moe_ckpt.megatron.state import TrainingState
from moe_ckpt.own_loop import LoopConfig
from moe_ckpt.run_settings import Command, ckpt_config, parse_run
from tests.harness.gloo.ranks import CONTEXT
from tests.harness.jobs import noise as clocked
from tests.harness.jobs.agent import run_job
from tests.harness.jobs.run_files import (
    EVENTS_OF_A_KILLED_RUN,
    EVENTS_OF_EVERY_RUN,
    RESULT_KEYS,
    kinds_of_events,
)
from tests.scenarios import ROOT
from tests.waits import START_S, WAIT_S

OWN_LOOP = ROOT / "examples" / "own_loop.py"


def run_own_loop(run: Path) -> int:
    """Run the example as a process of torchrun does; return the exit status."""
    # the filter and the number of threads of processes that torchrun starts; tests have
    # others
    warnings.simplefilter("default")
    torch.set_num_threads(1)
    sys.argv = [str(OWN_LOOP), str(run)]
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(OWN_LOOP), run_name="__main__")
    return int(ended.value.code or 0)


def add_noise() -> None:
    """Make a gradient differ in each pass, and the loop check for such differences."""
    noise, schedule_of = itertools.count(), loop.get_forward_backward_func

    def noisy(**options: Any) -> Any:
        losses = schedule_of()(**options)
        next(options["model"].parameters()).main_grad.add_(next(noise))
        return losses

    loop.get_forward_backward_func = lambda: noisy
    own_loop.LoopConfig = functools.partial(own_loop.LoopConfig, check_determinism=True)  # type: ignore[misc]


def ended_of(
    folder: Path, *kills: Kill, setup: Callable[[], None] | None = None
) -> tuple[int | None, str]:
    """Run the example as a job of two ranks.

    Args:
        folder: The folder of the logs and of the run folder `run`.
        kills: Faults to inject.
        setup: Called in the agent before ranks are forked.

    Returns:
        The exit status, and the output of all processes.
    """
    folder.mkdir(exist_ok=True)
    run = folder / "run"
    agent = CONTEXT.Process(
        target=run_job, args=(functools.partial(run_own_loop, run), 2, folder, setup)
    )
    agent.start()
    try:
        assert not kills or carry_out(kills, run, ranks_per_node=1)
        agent.join(START_S)
    finally:
        agent.kill()
    return agent.exitcode, "".join(path.read_text() for path in folder.glob("*.log"))


def losses_in(log: str) -> dict[str, str]:
    """Return printed losses by iteration; an iteration printed twice has one loss."""
    found: dict[str, str] = {}
    for iteration, loss in re.findall(r"iteration (\d+): loss (\S+)", log):
        assert found.setdefault(iteration, loss) == loss
    return found


ALL_EXPERTS: dict[str, dict[str, Any]] = {
    "gemini": {"every_iters": 2},
    "checkfreq": {"every_iters": 2},
    "moc": {"every_iters": 2, "k_snapshot": 4, "k_persist": 4},
    "moetion": {"every_iters": 2, "boost": 0, "experts": 4, "remote_experts": 4},
    "flowcheck": {"max_lag_iters": 0},
}
IN_FULL = [name for name in ALL_EXPERTS if name != "gemini"]
DIGESTS = CheckConfig(
    digest_every_iters=1,
    digest_tensors=True,
    leave_out="nothing",
)


def promise_the_state(policy: str) -> None:
    """Let no pass repeat itself; the loop has run.exactness=state, and logs digests."""
    clocked.add_noise()
    changes = {
        "ckpt": ckpt_config(policy, **ALL_EXPERTS[policy]),
        "exactness": "state",
        "checks": DIGESTS,
    }
    exact = own_loop.LoopConfig

    def promising(**options: Any) -> LoopConfig:
        return exact(**options | changes)

    own_loop.LoopConfig = promising  # type: ignore[misc,assignment]


def differ_by_rank() -> None:
    """Let replicas build different weights; the run begins with the first replica's."""
    train = own_loop.train_elastic

    def train_apart(
        config: LoopConfig, build: Callable[[], TrainingState], *parts: Any
    ) -> int:
        def build_apart() -> TrainingState:
            state = build()
            with torch.no_grad():
                next(state.model[0].parameters()).add_(int(os.environ["RANK"]))
            return state

        return train(config, build_apart, *parts)

    own_loop.train_elastic = train_apart  # type: ignore[assignment]


def without_supervisors() -> None:
    """Let torchrun's processes train without supervisors and save whole checkpoints."""
    differ_by_rank()
    supervised, dense = own_loop.LoopConfig, ckpt_config("dense", every_iters=4)
    own_loop.LoopConfig = lambda **options: supervised(**options | {"ckpt": dense})  # type: ignore[misc,assignment]


def end_earlier() -> None:
    """Request fewer iterations than a checkpoint has."""
    without_supervisors()
    dense = own_loop.LoopConfig
    own_loop.LoopConfig = lambda **options: dense(**options | {"num_iterations": 4})  # type: ignore[misc,assignment]


def train_otherwise() -> None:
    """Request other batches than those with which the run has saved states."""
    without_supervisors()
    dense = own_loop.LoopConfig
    own_loop.LoopConfig = lambda **options: dense(**options | {"num_micro_batches": 1})  # type: ignore[misc,assignment]


def change_an_input(text: Path) -> None:
    """Add an input file to the loop, which rank 0 changes in iteration 3."""
    train = own_loop.train_elastic
    own_loop.LoopConfig = functools.partial(own_loop.LoopConfig, inputs=(str(text),))  # type: ignore[misc]

    def train_on_it(
        config: LoopConfig, build: Any, forward_step: Any, batches: Any, *rest: Any
    ) -> int:
        def changing(iteration: int) -> Any:
            if (iteration, os.environ["RANK"]) == (3, "0"):
                text.write_text("other")
            return batches(iteration)

        return train(config, build, forward_step, changing, *rest)

    own_loop.train_elastic = train_on_it


def result_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "result.json").read_text())


def test_a_loop_of_ones_own_ends_with_the_same_state_after_a_death(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Processes, because the whole run from the fork to the end is the subject."""
    jobs = {
        "alone": ended_of(tmp_path / "alone", setup=differ_by_rank),
        "killed": ended_of(
            tmp_path / "killed",
            Kill(rank=1, iteration=5, phase="forward"),
            setup=differ_by_rank,
        ),
        "plain": ended_of(tmp_path / "plain", setup=without_supervisors),
    }
    assert [status for status, _ in jobs.values()] == [0, 0, 0], jobs
    assert [name for name, (_, log) in jobs.items() if "Warning" in log] == []
    losses = {name: losses_in(log) for name, (_, log) in jobs.items()}
    assert losses["killed"] == losses["plain"] == losses["alone"]
    assert set(losses["alone"]) == {str(iteration) for iteration in range(1, 9)}
    results = {name: result_of(tmp_path / name / "run") for name in jobs}
    assert {tuple(result["digest_per_rank"]) for result in results.values()} == {
        (*results["alone"]["digest_per_rank"],)
    }
    assert {name: result["faults_survived"] for name, result in results.items()} == {
        "alone": 0,
        "killed": 1,
        "plain": 0,
    }
    assert all(result.keys() == RESULT_KEYS for result in results.values())
    status, log = ended_of(tmp_path / "plain", setup=end_earlier)
    assert status != 0
    assert "error: num_iterations: got 4, wanted at least 8, done" in log
    assert "Traceback" not in log
    status, log = ended_of(tmp_path / "plain", setup=train_otherwise)
    assert status != 0
    assert "\n  num_micro_batches: got 1, wanted 2\n" in log
    run = tmp_path / "killed" / "run"
    assert kinds_of_events(run, 2) >= EVENTS_OF_A_KILLED_RUN
    assert kinds_of_events(tmp_path / "plain" / "run", 2) >= EVENTS_OF_EVERY_RUN | {
        "CheckpointSaved"
    }
    assert status_of([str(run)]) == 0
    loss, digest = results["killed"]["loss"], results["killed"]["digest"]
    assert (
        f"ended: iteration 8, loss {loss:.4f}, digest {digest}"
        in capsys.readouterr().out
    )
    assert report([str(run), "--format", "md"]) == 0
    page = capsys.readouterr().out
    assert "moevement" in page
    assert "finished" in page


@pytest.mark.parametrize(
    "policy",
    ["gemini", *(pytest.param(name, marks=pytest.mark.full) for name in IN_FULL)],
)
def test_a_loop_of_ones_own_has_a_state_from_before_after_each_death(
    tmp_path: Path,
    policy: str,
) -> None:
    """Processes, because states in their memory before a kill are compared."""
    kills = (
        Kill(rank=1, iteration=4, phase="forward"),
        Kill(rank=0, iteration=6, phase="backward"),
        Kill(rank=1, iteration=8, phase="step"),
    )
    setup = functools.partial(promise_the_state, policy)
    status, log = ended_of(tmp_path / "noisy", *kills, setup=setup)
    assert status == 0, log
    run = tmp_path / "noisy" / "run"
    result, digests = result_of(run), read_digests(run)
    assert (result["faults_survived"], result["exactness"]) == (len(kills), "state")
    assert digests.exactness == "state"
    assert len(digests.returns) == len(kills) * 2
    assert first_changed(digests, may_be_older=False) is None
    if policy != "flowcheck":  # flowcheck trains no logged iteration again
        assert max(map(len, digests.states.values())) > 1, "else a replay would pass"


def test_a_loop_of_ones_own_ends_where_a_replacement_reads_another_input(
    tmp_path: Path,
) -> None:
    """Processes, because only the replacement of a process reads the file again."""
    text = tmp_path / "text"
    text.write_text("first")
    kill = Kill(rank=1, iteration=5, phase="forward")
    status, log = ended_of(
        tmp_path / "changed", kill, setup=functools.partial(change_an_input, text)
    )
    assert status != 0
    assert (
        log.count("error: inputs[0]: text: got 5 bytes"),
        log.count("Traceback"),
    ) == (1, 0), log


def test_a_loop_of_ones_own_ends_where_a_pass_does_not_repeat_itself(
    tmp_path: Path,
) -> None:
    status, log = ended_of(tmp_path / "noisy", setup=add_noise)
    assert status != 0
    assert log.count("error: check_determinism: gradients that differ: got '0.") == 1
    assert "Traceback" not in log
    assert not (tmp_path / "noisy" / "run" / "result.json").exists()


def test_an_error_of_a_supervisor_in_a_loop_of_ones_own_is_one_line(
    tmp_path: Path,
) -> None:
    """Processes, because ranks use a common store to print an error only once."""
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "run").write_text("a file, and no folder")
    status, log = ended_of(tmp_path / "job")
    assert status == 1
    assert (
        log.count("error: run.dir: got "),
        log.count("error: "),
        log.count("Traceback"),
    ) == (1, 1, 0), log


def test_the_slurm_script_starts_a_run_that_parses(tmp_path: Path) -> None:
    """Uses stand-ins: `srun` runs the command on two nodes, `torchrun` writes words."""
    of_nodes = [tmp_path / f"node{number}" for number in range(2)]
    for name, text in {
        "scontrol": "echo node-1; echo node-2",
        "srun": (
            "[ \"$1 $2\" = '--no-kill --kill-on-bad-exit=0' ] && shift 2\n"
            'for number in 0 1; do SLURM_NODEID=$number "$@"; done'
        ),
        "torchrun": f"printf '%s\\n' \"$@\" > {tmp_path}/node$SLURM_NODEID",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    variables = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "node-[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": "7",
    }
    command = [
        "bash",
        str(ROOT / "examples" / "slurm.sbatch"),
        "pretrain_gpt.py",
        "--num-layers",
        "2",
    ]
    subprocess.run(command, env=variables, check=True, cwd=tmp_path)
    commands = [path.read_text().splitlines() for path in of_nodes]
    assert [words[0] for words in commands] == ["--node-rank=0", "--node-rank=1"]
    [words, other] = [words[1:] for words in commands]
    assert words == other
    run_at = words.index("moe_ckpt.run")
    start, own = words[: run_at + 1], words[run_at + 1 :]
    assert start == [
        *("--nnodes=2", "--nproc-per-node=8"),
        *("--master-addr=node-1", "--master-port=29500", "--rdzv-id=7"),
        *("-m", "moe_ckpt.run"),
    ]
    settings = parse_run(own)
    assert settings.command == Command(
        name="pretrain_gpt.py", is_module=False, arguments=("--num-layers", "2")
    )
    assert (settings.job.runtime.spare_nodes, settings.job.folder.dir) == (
        1,
        f"{tmp_path}/outputs/7",
    )


def test_the_slurm_script_saves_and_queues_the_job_again(tmp_path: Path) -> None:
    """Processes, because a shell's trap and a wait for its child are the subject."""
    ready, order = tmp_path / "ready", tmp_path / "order"
    os.mkfifo(ready)
    for name, text in {
        "scontrol": f'[ "$1" = requeue ] && echo "$@" >> {order}; echo node-1',
        "srun": (
            "tail -f /dev/null & child=$!\n"
            f"trap 'kill $child; echo saved >> {order}; exit 1' TERM\n"
            f"echo ready > {ready}; wait"
        ),
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    job = subprocess.Popen(
        ["bash", str(ROOT / "examples" / "slurm.sbatch"), "pretrain_gpt.py"],
        env={
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "SLURM_JOB_NODELIST": "node-1",
            "SLURM_JOB_NUM_NODES": "1",
            "SLURM_JOB_ID": "7",
        },
        cwd=tmp_path,
    )
    assert ready.read_text() == "ready\n"
    job.terminate()
    assert job.wait(WAIT_S) == 128 + signal.SIGTERM
    assert order.read_text().splitlines() == ["saved", "requeue 7"]


def kubernetes_objects() -> dict[str, Any]:
    """Return the objects of the example by kind."""
    text = (ROOT / "examples" / "kubernetes.yaml").read_text()
    return {each["kind"]: each for each in yaml.safe_load_all(text)}


def test_the_kubernetes_job_has_shared_memory_and_its_options_parse() -> None:
    objects = kubernetes_objects()
    job, runtime = objects["TrainJob"]["spec"], objects["TrainingRuntime"]
    assert job["runtimeRef"] == {
        "kind": "TrainingRuntime",
        "name": runtime["metadata"]["name"],
    }
    [of_nodes] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    pods = of_nodes["template"]["spec"]
    pod = pods["template"]["spec"]
    [container] = pod["containers"]
    # Trainer adds the command and torchrun's variables to the container by these names
    step = of_nodes["template"]["metadata"]["labels"]
    assert step == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert (of_nodes["name"], container["name"]) == ("node", "node")
    assert (pods["completionMode"], pod["restartPolicy"]) == ("Indexed", "Never")
    mounted = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    [shared] = [
        volume for volume in pod["volumes"] if volume["name"] == mounted["/dev/shm"]
    ]
    assert shared["emptyDir"]["medium"] == "Memory"
    trainer = job["trainer"]
    variables = {variable["name"]: variable["value"] for variable in trainer["env"]}
    command = attached_command(
        variables["MOE_CKPT"], ["python", *trainer["command"][1:], *trainer["args"]]
    )
    settings = parse_run(command[2:])
    spare_nodes = settings.job.runtime.spare_nodes
    [rule] = pods["successPolicy"]["rules"]
    assert spare_nodes == trainer["numNodes"] - rule["succeededCount"] == 1
    assert pod["terminationGracePeriodSeconds"] > max(
        2 * GRACE_S, settings.job.runtime.stop_save_s
    )
    [shared_folder] = [path for path, name in mounted.items() if name == "runs"]
    assert Path(settings.job.folder.dir or "").is_relative_to(shared_folder)


def test_the_kubernetes_objects_have_fields_that_trainer_knows() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    for kind, written in kubernetes_objects().items():
        assert written["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
        read = getattr(models, f"TrainerV1alpha1{kind}").from_dict(written)
        # the models leave out fields that they do not know
        assert read.to_dict() == written
