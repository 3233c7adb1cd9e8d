"""Settings of a simulation: choices compose, degrees fit, and errors name keys."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from operator import attrgetter

import pytest
from omegaconf import OmegaConf

from launcher.config import CONF_DIR
from launcher.simulator.config import (
    Simulation,
    compose_machine,
    compose_request,
    compose_simulation,
)
from moe_ckpt.sim.hardware import ClusterConfig
from moe_ckpt.types import ParallelLayout
from tests.launcher.errors import error_of

CHOICES = {
    # `make profile` writes `measured`
    group: {path.stem for path in (CONF_DIR / group).glob("*.yaml")} - {"measured"}
    for group in ("cluster", "experiment")
}


@pytest.fixture(scope="module")
def defaults() -> Simulation:
    return compose_simulation([])


@pytest.mark.parametrize("group", CHOICES)
def test_the_comment_beside_a_default_names_all_choices(group: str) -> None:
    lines = (CONF_DIR / "simulate.yaml").read_text().splitlines()
    comment = next(line for line in lines if line.startswith(f"  - {group}:"))
    assert CHOICES[group] == set(comment.rpartition(": ")[2].split(", "))


@pytest.mark.parametrize("name", sorted(CHOICES["cluster"]))
def test_every_cluster_composes(name: str) -> None:
    cluster, timing = compose_machine([f"cluster={name}"])
    assert asdict(cluster) == OmegaConf.to_container(
        OmegaConf.load(CONF_DIR / "cluster" / f"{name}.yaml")
    )
    assert (cluster.name, timing.iteration_s) == (name, None)


@pytest.mark.parametrize("name", sorted(CHOICES["experiment"] - {"none"}))
def test_every_experiment_composes_in_its_first_and_last_row(name: str) -> None:
    _, experiment = compose_request([f"+experiment={name}"])
    assert experiment.name == name
    assert experiment.cases
    cases, policies = (
        list(experiment.cases.values()),
        list(experiment.policies.values()),
    )
    for case, policy in ((cases[0], policies[0]), (cases[-1], policies[-1])):
        overrides = [*case, *(text.replace("$mtbf_s", "600") for text in policy)]
        compose_simulation([text for text in overrides if not text.startswith("fault")])


@pytest.mark.parametrize(
    ("overrides", "degrees"),
    [
        (["cluster=h200"], (1, 128, 8, 1)),
        (["cluster=a100_azure", "parallel.pp=12"], (12, 8, 8, 1)),
        (["cluster=h200", "parallel.tp=2", "parallel.pp=4"], (4, 16, 4, 2)),
        (["cluster=h200", "model=moe_llava"], (1, 128, 4, 1)),
        (
            ["cluster=h200", "model.num_experts=0", "model.dense_ffn_hidden_size=4096"],
            (1, 128, 1, 1),
        ),
        (["cluster=h200", "cluster.gpu_memory_bytes=20e9"], (2, 64, 8, 1)),
    ],
)
def test_degrees_fit_the_cluster(
    overrides: Sequence[str], degrees: tuple[int, int, int, int]
) -> None:
    pp, dp, ep, tp = degrees
    assert compose_simulation(overrides).setup.job.layout == ParallelLayout(
        pp=pp, dp=dp, ep=ep, tp=tp
    )


def test_auto_prefers_stages_that_divide_the_batch() -> None:
    assert (
        compose_simulation(["batch.global_batch_size=96"]).setup.job.num_micro_batches
        >= 1
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("cluster=nonesuch",), "cluster/nonesuch"),
        (("cluster.gpus=8",), "cluster.gpus: no such setting, wanted one of the keys"),
        (("cluster.nodes=many",), "cluster.nodes: "),
        (("runs=0",), "runs: got 0, wanted at least 1"),
        (
            ("parallel.pp=7",),
            "parallel.pp * parallel.tp: got 7, wanted a divisor of 96 GPUs",
        ),
        (("parallel.dp=5",), "parallel.dp: got 5, wanted"),
        (
            ("parallel.ranks_per_node=4",),
            "parallel.ranks_per_node: got 4, wanted auto or cluster.gpus_per_node=8",
        ),
        (
            ("model=deepseek_671b",),
            "cluster.gpu_memory_bytes: got 80000000000.0, wanted at least",
        ),
        (
            ("mtbf_s=600", "fault=poisson"),
            "fault.kind: got 'poisson', wanted none where mtbf_s=600",
        ),
        (
            ("fault=state_loss",),
            "fault.kind: got 'state_loss', wanted none, at, poisson or trace",
        ),
    ],
)
def test_a_mistake_is_named(arguments: Sequence[str], says: str) -> None:
    message = error_of(compose_simulation, arguments)
    assert says in message
    assert message.startswith(says.partition(":")[0]) or "nonesuch" in says


@pytest.mark.parametrize(
    ("part", "key", "value", "says"),
    [
        ("setup.cluster", "nodes", 0, "cluster.nodes: got 0, wanted more than 0"),
        (
            "general",
            "mtbf_s",
            0.0,
            "mtbf_s: got 0.0, wanted more than 0 seconds, or null",
        ),
        (
            "general",
            "duration_s",
            -1.0,
            "duration_s: got -1.0, wanted more than 0 seconds",
        ),
        ("general", "scope", "rack", "scope: got 'rack', wanted one of process, node"),
        (
            "general",
            "popularity_skew",
            1.0,
            "popularity_skew: got 1.0, wanted at least 0 and less than 1",
        ),
        (
            "setup.job.batch",
            "sequence_length",
            0,
            "batch.sequence_length: got 0, wanted at least 1",
        ),
        (
            "setup.job.formats",
            "full_bytes",
            0.0,
            "formats.full_bytes: got 0.0, wanted more than 0",
        ),
    ],
)
def test_a_value_that_cannot_be_is_named(
    defaults: Simulation, part: str, key: str, value: object, says: str
) -> None:
    assert error_of(replace, attrgetter(part)(defaults), **{key: value}).startswith(
        says
    )


def test_faults_of_an_mtbf_last_longer_than_the_run() -> None:
    simulation = compose_simulation(["mtbf_s=600", "duration_s=43200", "seed=3"])
    kills = [simulation.kills(run) for run in (0, 0, 1)]
    assert kills[0] == kills[1] != kills[2]
    assert all(kill.scope == "node" and kill.rank is not None for kill in kills[0])
    assert (kills[0][-1].after_s or 0.0) > 43200


def run_python(*arguments: str) -> str:
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, check=True, cwd=CONF_DIR.parent, capture_output=True, text=True
    ).stdout


def test_it_starts_without_torch() -> None:
    program = (
        "import sys, launcher.simulate; print('torch' in sys.modules or 'megatron' in"
        " sys.modules)"
    )
    assert run_python("-c", program) == "False\n"


def test_help_lists_every_key() -> None:
    shown = run_python("-m", "launcher.simulate", "--help")
    assert all(
        re.search(rf"\b{field.name}: ", shown) for field in fields(ClusterConfig)
    )
    assert "table3" in shown
