"""Settings of a simulation: every choice composes, degrees fit a cluster, and every mistake is named."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields

import pytest
from omegaconf import DictConfig, OmegaConf

from launcher.config import CONF_DIR
from launcher.simulation import (
    GROUPS,
    ExperimentConfig,
    compose_machine,
    compose_request,
    compose_simulation,
)
from moe_ckpt.errors import ConfigError
from moe_ckpt.sim.hardware import ClusterConfig
from moe_ckpt.types import ParallelLayout

KINDS = {"cluster": ClusterConfig, "experiment": ExperimentConfig}
FILES = sorted(path for group in KINDS for path in (CONF_DIR / group).glob("*.yaml"))
EXPERIMENTS = [path.stem for path in FILES if path.parent.name == "experiment" and path.stem != "none"]


def message_of(*arguments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        compose_simulation(arguments)
    return str(caught.value)


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_yaml_spells_out_every_key(path: object) -> None:
    config = OmegaConf.load(path)  # type: ignore[arg-type]
    assert isinstance(config, DictConfig)
    group = str(path).split("/")[-2]
    assert list(config) == [field.name for field in fields(KINDS[group])]


@pytest.mark.parametrize("group", GROUPS)
def test_the_comment_beside_a_default_names_all_choices(group: str) -> None:
    lines = (CONF_DIR / "simulate.yaml").read_text().splitlines()
    comment = next(line for line in lines if line.startswith(f"  - {group}:"))
    if group in KINDS:
        choices = {path.stem for path in (CONF_DIR / group).glob("*.yaml")} - {"measured"}  # by `make profile`
        assert choices == set(comment.rpartition(": ")[2].split(", "))


@pytest.mark.parametrize("name", ["a100_azure", "h100_ib", "h200", "local"])
def test_every_cluster_composes(name: str) -> None:
    cluster, timing = compose_machine([f"cluster={name}"])
    in_file = OmegaConf.to_container(OmegaConf.load(CONF_DIR / "cluster" / f"{name}.yaml"))
    assert asdict(cluster) == in_file
    assert cluster.name == name
    assert timing.iteration_s is None


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_composes_in_its_first_and_last_row(name: str) -> None:
    _, experiment = compose_request([f"+experiment={name}"])
    assert experiment.name == name
    assert experiment.cases
    cases, policies = list(experiment.cases.values()), list(experiment.policies.values())
    for case, policy in ((cases[0], policies[0]), (cases[-1], policies[-1])):
        overrides = [*case, *(text.replace("$mtbf_s", "600") for text in policy)]
        compose_simulation([text for text in overrides if not text.startswith("fault")])


@pytest.mark.parametrize(
    ("overrides", "layout"),
    [
        (("cluster=h200",), ParallelLayout(pp=1, dp=128, ep=8, tp=1)),
        (("cluster=a100_azure", "parallel.pp=12"), ParallelLayout(pp=12, dp=8, ep=8, tp=1)),
        (("cluster=h200", "parallel.tp=2", "parallel.pp=4"), ParallelLayout(pp=4, dp=16, ep=4, tp=2)),
        (("cluster=h200", "model=moe_llava"), ParallelLayout(pp=1, dp=128, ep=4, tp=1)),
        (
            ("cluster=h200", "model.num_experts=0", "model.dense_ffn_hidden_size=4096"),
            ParallelLayout(pp=1, dp=128, ep=1, tp=1),
        ),
        (("cluster=h200", "cluster.gpu_memory_bytes=20e9"), ParallelLayout(pp=2, dp=64, ep=8, tp=1)),
    ],
)
def test_degrees_fit_the_cluster(overrides: Sequence[str], layout: ParallelLayout) -> None:
    assert compose_simulation(overrides).setup.job.layout == layout


def test_auto_prefers_stages_that_divide_the_batch() -> None:
    assert compose_simulation(["batch.global_batch_size=96"]).setup.job.num_micro_batches >= 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("cluster=nonesuch",), "cluster/nonesuch"),
        (("cluster.gpus=8",), "cluster.gpus: no such setting, wanted one of the keys"),
        (("cluster.nodes=0",), "cluster.nodes: got 0, wanted more than 0"),
        (("cluster.nodes=many",), "cluster.nodes: "),
        (("mtbf_s=0",), "mtbf_s: got 0.0, wanted more than 0 seconds, or null"),
        (("duration_s=-1",), "duration_s: got -1.0, wanted more than 0 seconds"),
        (("runs=0",), "runs: got 0, wanted at least 1"),
        (("scope=rack",), "scope: got 'rack', wanted one of process, node"),
        (("popularity_skew=1",), "popularity_skew: got 1.0, wanted at least 0 and less than 1"),
        (("parallel.pp=7",), "parallel.pp * parallel.tp: got 7, wanted a divisor of 96 GPUs"),
        (("parallel.dp=5",), "parallel.dp: got 5, wanted"),
        (("parallel.ranks_per_node=4",), "parallel.ranks_per_node: got 4, wanted auto or cluster.gpus_per_node=8"),
        (("model=deepseek_671b",), "cluster.gpu_memory_bytes: got 80000000000.0, wanted at least"),
        (("mtbf_s=600", "fault=poisson"), "fault.kind: got 'poisson', wanted none where mtbf_s=600"),
        (("fault=state_loss",), "fault.kind: got 'state_loss', wanted none, at, poisson or trace"),
        (("batch.sequence_length=0",), "batch.sequence_length: got 0, wanted at least 1"),
        (("formats.full_bytes=0",), "formats.full_bytes: got 0.0, wanted more than 0"),
        (("ckpt=gemini", "ckpt.mtbf_s=-1"), "ckpt.mtbf_s: got -1.0, wanted more than 0"),
    ],
)
def test_a_mistake_is_named(arguments: Sequence[str], says: str) -> None:
    message = message_of(*arguments)
    assert says in message
    assert message.startswith(says.partition(":")[0]) or "nonesuch" in says


def test_faults_of_an_mtbf_last_longer_than_the_run() -> None:
    simulation = compose_simulation(["mtbf_s=600", "duration_s=43200", "seed=3"])
    kills = [simulation.kills(run) for run in (0, 0, 1)]
    assert kills[0] == kills[1] != kills[2]
    assert all(kill.scope == "node" and kill.rank is not None for kill in kills[0])
    assert kills[0][-1].after_s is not None
    assert kills[0][-1].after_s > 43200


def test_it_starts_without_torch() -> None:
    program = "import sys, launcher.simulate; sys.exit('torch' in sys.modules or 'megatron' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, cwd=CONF_DIR.parent).returncode == 0


def test_help_lists_every_key() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "launcher.simulate", "--help"],
        check=True,
        cwd=CONF_DIR.parent,
        capture_output=True,
        text=True,
    ).stdout
    assert all(re.search(rf"\b{field.name}: ", shown) for field in fields(ClusterConfig))
    assert "table3" in shown
