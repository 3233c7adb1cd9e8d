"""Makes a simulation of a composed configuration: a job on a cluster, a policy, faults.

The module imports no torch. Besides `launcher.config`, only this module uses OmegaConf,
for conf/simulate.yaml.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from omegaconf import DictConfig, OmegaConf

from launcher.config import (
    AUTO,
    Kinds,
    ModelConfig,
    ParallelConfig,
    choice_of,
    compose_as,
    require_complete,
    section_of,
)
from launcher.faults.config import FAULT_CONFIGS, FaultConfig
from launcher.parameters import operator_parameters, padded_vocab_size
from moe_ckpt.config import (
    CKPT_CONFIGS,
    CkptConfig,
    require,
    require_all_at_least,
    require_choice,
)
from moe_ckpt.faults.schedule import SCOPES, Kill, poisson_kills
from moe_ckpt.sim.costs import GRADIENT_BYTES, TimingConfig, estimate
from moe_ckpt.sim.hardware import GPU_MEMORY_SHARE, ClusterConfig
from moe_ckpt.sim.job import BatchConfig, FormatsConfig, Job, ModelShape
from moe_ckpt.sim.saving import Setup, Switches
from moe_ckpt.sim.skew import skewed_popularity
from moe_ckpt.types import ParallelLayout

GROUPS = ("ckpt", "model", "parallel", "cluster", "fault", "experiment")
"""Groups of settings that a command line can choose from."""

_BYTE_VOCABULARY = 256


@dataclass(frozen=True, kw_only=True)
class ExperimentConfig:
    """Many simulations: every case with every policy in every variant.

    See conf/experiment/.
    """

    name: str
    """Name of the experiment."""

    cases: dict[str, list[str]]
    """Overrides of each case (row of the table), by name."""

    policies: dict[str, list[str]]
    """Overrides of each policy, by name."""

    variants: dict[str, list[str]]
    """Overrides of each variant, by name."""


@dataclass(frozen=True, kw_only=True)
class GeneralConfig:
    """The keys of conf/simulate.yaml that belong to no group.

    Raises:
        ConfigError: A value is out of range.
    """

    duration_s: float
    """Simulated training time of a run, in seconds."""

    mtbf_s: float | None
    """Mean time between failures of the whole job, in seconds. None: the settings of
    `fault` give the faults.
    """

    scope: str
    """Extent of a failure of `mtbf_s`: `process` or `node`."""

    seed: int
    """Seed of the first run; each next run has the next seed."""

    runs: int
    """Number of runs to average."""

    popularity_skew: float
    """Unevenness of tokens over experts, from 0 (even) to 1 (all to one expert).

    MoEvement, Appendix D.
    """

    plan: bool
    """Whether to rank policies with their parameters by ETTR."""

    out: str | None
    """New folder for the first run, in the form of a real run. None: no folder."""

    real: str | None
    """Folder of a real run to simulate and to compare with. None: no comparison."""

    page: str | None
    """File for the published cells and the predictions. None: no page."""

    def __post_init__(self) -> None:
        require(
            0 < self.duration_s < np.inf,
            "duration_s",
            self.duration_s,
            "more than 0 seconds",
        )
        mtbf_s = self.mtbf_s
        require(
            mtbf_s is None or 0 < mtbf_s < np.inf,
            "mtbf_s",
            mtbf_s,
            "more than 0 seconds, or null",
        )
        require_choice("scope", self.scope, SCOPES)
        require_all_at_least("", self, seed=0, runs=1)
        require(
            0 <= self.popularity_skew < 1,
            "popularity_skew",
            self.popularity_skew,
            "at least 0 and less than 1",
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Simulation:
    """All inputs of a simulation."""

    setup: Setup
    """The job on the cluster, with its costs."""

    policy: CkptConfig
    """The checkpoint policy."""

    model: ModelConfig
    """The model, as configured."""

    fault: FaultConfig
    """The faults if there is no MTBF."""

    general: GeneralConfig
    """The keys that belong to no group."""

    composed_yaml: str
    """All settings, as YAML."""

    def kills(self, run: int) -> tuple[Kill, ...]:
        """Return the kills of a run, by the run's seed.

        Args:
            run: The number of the run, from 0.

        Raises:
            ConfigError: A fault names a rank that the job lacks.
        """
        general, world_size = self.general, self.setup.job.layout.world_size
        if general.mtbf_s is None:
            return self.fault.kills(world_size)
        # more kills than a run can meet
        count = 2 * int(general.duration_s / general.mtbf_s) + 100
        return poisson_kills(
            mtbf_s=general.mtbf_s,
            count=count,
            seed=general.seed + run,
            world_size=world_size,
            scope=general.scope,
        )


def compose_request(arguments: Sequence[str]) -> tuple[GeneralConfig, ExperimentConfig]:
    """Return the request without the job.

    The cases of an experiment may have to complete the job.

    Args:
        arguments: The overrides of the command line.

    Raises:
        ConfigError: A setting is wrong. The error names the setting.
    """
    return compose_as("simulate", arguments, GROUPS, _to_request, _ALL_KINDS)


def compose_machine(arguments: Sequence[str]) -> tuple[ClusterConfig, TimingConfig]:
    """Return the settings of the machines alone.

    A comparison with a real run needs no more, because the real run brings the job.

    Args:
        arguments: The overrides of the command line.

    Raises:
        ConfigError: A setting is wrong. The error names the setting.
    """
    return compose_as("simulate", arguments, GROUPS, _to_machine, _ALL_KINDS)


def compose_simulation(arguments: Sequence[str]) -> Simulation:
    """Return the simulation that overrides describe.

    Args:
        arguments: The overrides of the command line.

    Raises:
        ConfigError: A setting is wrong. The error names the setting.
    """
    return compose_as("simulate", arguments, GROUPS, _to_simulation, _ALL_KINDS)


def compose_yaml(arguments: Sequence[str]) -> str:
    """Return all settings of the simulator as YAML.

    Args:
        arguments: The overrides of the command line.

    Raises:
        ConfigError: A setting is wrong. The error names the setting.
    """
    return compose_as("simulate", arguments, GROUPS, OmegaConf.to_yaml, _ALL_KINDS)


def shape_of(
    model: ModelConfig, *, sequence_length: int, skewness: float = 0.0, seed: int = 0
) -> ModelShape:
    """Return the operators of a model.

    A vocabulary whose size follows from the data counts as the vocabulary of bytes.

    Args:
        model: The model.
        sequence_length: The tokens of a sequence.
        skewness: The unevenness of a layer's tokens over experts; 0: equal shares.
        seed: The seed of uneven shares.
    """
    wanted = _BYTE_VOCABULARY if model.vocab_size == AUTO else int(model.vocab_size)
    layout = ParallelLayout(pp=1, dp=1, ep=1, tp=1)
    counted = list(
        operator_parameters(model, padded_vocab_size(wanted, layout), sequence_length)
    )
    return ModelShape(
        operators=tuple(operator for operator, _ in counted),
        parameters=np.array([count for _, count in counted], np.int64),
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        topk=model.moe_topk,
        popularity=skewed_popularity(model.num_experts, skewness, seed=seed),
    )


def _to_request(config: DictConfig) -> tuple[GeneralConfig, ExperimentConfig]:
    scalars = [field.name for field in fields(GeneralConfig)]
    require_complete(config, sorted([*_KINDS, *scalars]))
    general = OmegaConf.create({"general": {name: config[name] for name in scalars}})
    return section_of(general, "general", GeneralConfig), section_of(
        config, "experiment", ExperimentConfig
    )


def _to_machine(config: DictConfig) -> tuple[ClusterConfig, TimingConfig]:
    return section_of(config, "cluster", ClusterConfig), section_of(
        config, "timing", TimingConfig
    )


def _to_simulation(config: DictConfig) -> Simulation:
    composed_yaml = OmegaConf.to_yaml(config)
    general, _ = _to_request(config)
    cluster, model = (
        section_of(config, "cluster", ClusterConfig),
        section_of(config, "model", ModelConfig),
    )
    batch, formats = (
        section_of(config, "batch", BatchConfig),
        section_of(config, "formats", FormatsConfig),
    )
    length, skewness = batch.sequence_length, general.popularity_skew
    shape = shape_of(
        model, sequence_length=length, skewness=skewness, seed=general.seed
    )
    layout = fit_cluster(
        section_of(config, "parallel", ParallelConfig), cluster, shape, formats, batch
    )
    job = Job(shape, layout, batch, formats)
    setup = Setup(
        job=job,
        cluster=cluster,
        costs=estimate(job, cluster, section_of(config, "timing", TimingConfig)),
        mtbf_s=general.mtbf_s,
        switches=section_of(config, "switches", Switches),
    )
    fault = section_of(
        config, "fault", FAULT_CONFIGS[choice_of(config, "fault.kind", FAULT_CONFIGS)]
    )
    wanted = "none, at, poisson or trace: a simulation has no state to overwrite"
    require(fault.kind != "state_loss", "fault.kind", fault.kind, wanted)
    if general.mtbf_s is not None:
        require(
            fault.kind == "none",
            "fault.kind",
            fault.kind,
            f"none where mtbf_s={general.mtbf_s:g} says what fails",
        )
    return Simulation(
        setup=setup,
        policy=section_of(
            config, "ckpt", CKPT_CONFIGS[choice_of(config, "ckpt.policy", CKPT_CONFIGS)]
        ),
        model=model,
        fault=fault,
        general=general,
        composed_yaml=composed_yaml,
    )


def fit_cluster(
    parallel: ParallelConfig,
    cluster: ClusterConfig,
    shape: ModelShape,
    formats: FormatsConfig,
    batch: BatchConfig,
) -> ParallelLayout:
    """Return the degrees of parallelism for a cluster.

    With `auto`, EP stays within a node. The number of stages is the least with which
    the job fits into the GPUs' memory and the batch divides by the data-parallel ranks;
    if no number does both, the least that fits.

    Args:
        parallel: The degrees asked for.
        cluster: The cluster.
        shape: The operators of the model.
        formats: The bytes of a parameter.
        batch: The batch.

    Raises:
        ConfigError: No degrees fit. The error has the numbers.
    """
    world_size, per_node = cluster.num_gpus, cluster.gpus_per_node
    wanted = f"auto or cluster.gpus_per_node={per_node}"
    require(
        parallel.ranks_per_node in (AUTO, per_node),
        "parallel.ranks_per_node",
        parallel.ranks_per_node,
        wanted,
    )
    tp = 1 if parallel.tp == AUTO else int(parallel.tp)
    wanted = f"a divisor of {world_size} GPUs, cluster.nodes * cluster.gpus_per_node"
    require(world_size % tp == 0, "parallel.tp", tp, wanted)
    if parallel.pp != AUTO:
        pp = int(parallel.pp)
        require(
            world_size % (pp * tp) == 0, "parallel.pp * parallel.tp", pp * tp, wanted
        )
        chosen = _layout(parallel, pp, world_size // (pp * tp), tp, cluster, shape)
    else:
        stages = [pp for pp in _divisors(world_size // tp) if pp <= shape.num_layers]
        layouts = [
            _layout(parallel, pp, world_size // (pp * tp), tp, cluster, shape)
            for pp in stages
        ]
        # few stages, because a pipeline's bubbles grow with the number of stages
        chosen = _smallest_fitting(layouts, cluster, shape, formats, batch)
    degrees = f"{chosen.dp} = {world_size} GPUs / (pp={chosen.pp} * tp={tp})"
    require(parallel.dp in (AUTO, chosen.dp), "parallel.dp", parallel.dp, degrees)
    return chosen


def _smallest_fitting(
    layouts: Sequence[ParallelLayout],
    cluster: ClusterConfig,
    shape: ModelShape,
    formats: FormatsConfig,
    batch: BatchConfig,
) -> ParallelLayout:
    have = GPU_MEMORY_SHARE * cluster.gpu_memory_bytes
    fitting = [
        layout for layout in layouts if _gpu_bytes(layout, shape, formats) <= have
    ]
    least = (
        min(_gpu_bytes(layout, shape, formats) for layout in layouts) / GPU_MEMORY_SHARE
    )
    wanted = f"at least {least:.3g}, or more of cluster.nodes={cluster.nodes}"
    require(bool(fitting), "cluster.gpu_memory_bytes", cluster.gpu_memory_bytes, wanted)
    divides = (
        layout
        for layout in fitting
        if batch.global_batch_size % (batch.micro_batch_size * layout.dp) == 0
    )
    # if none divides the batch, `Job` raises the error that names the numbers
    return next(divides, fitting[0])


def _layout(
    parallel: ParallelConfig,
    pp: int,
    dp: int,
    tp: int,
    cluster: ClusterConfig,
    shape: ModelShape,
) -> ParallelLayout:
    if parallel.ep != AUTO:
        return ParallelLayout(pp=pp, dp=dp, ep=int(parallel.ep), tp=tp)
    most = max(1, cluster.gpus_per_node // tp)
    degrees = [
        ep
        for ep in _divisors(dp)
        if ep <= most and shape.num_experts and shape.num_experts % ep == 0
    ]
    return ParallelLayout(pp=pp, dp=dp, ep=max(degrees, default=1), tp=tp)


def _gpu_bytes(
    layout: ParallelLayout, shape: ModelShape, formats: FormatsConfig
) -> float:
    """Return the bytes that a GPU needs if stages are even.

    The bytes are weights, gradients, and the GPU's part of the state.
    """
    is_expert = np.array([operator.expert is not None for operator in shape.operators])
    experts, others = (
        float(shape.parameters[is_expert].sum()),
        float(shape.parameters[~is_expert].sum()),
    )
    held = (experts / layout.ep + others) / (layout.pp * layout.tp)
    return (
        held * (formats.compute_bytes + GRADIENT_BYTES)
        + (experts + others) / layout.world_size * formats.full_bytes
    )


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


_KINDS: Kinds = {
    "ckpt": CKPT_CONFIGS,
    "model": ModelConfig,
    "parallel": ParallelConfig,
    "cluster": ClusterConfig,
    "fault": FAULT_CONFIGS,
    "experiment": ExperimentConfig,
    "batch": BatchConfig,
    "formats": FormatsConfig,
    "timing": TimingConfig,
    "switches": Switches,
}
_ALL_KINDS: Kinds = {**_KINDS, "": GeneralConfig}
"""All groups, with the keys that belong to no group, for errors about unknown keys."""
