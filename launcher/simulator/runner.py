"""Runs simulations: of one policy, and of the cases of an experiment.

The module imports no torch and prints nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from string import Template

from launcher.simulator.config import Simulation, compose_request, compose_simulation
from moe_ckpt.sim.cluster import simulate
from moe_ckpt.sim.ettr import Prediction, predict
from moe_ckpt.sim.policies import plan_saving
from moe_ckpt.sim.saving import Saving
from moe_ckpt.sim.timeline import Outcome


@dataclass(frozen=True, kw_only=True, eq=False)
class Result:
    """The result of a simulation."""

    simulation: Simulation
    """Inputs of the simulation."""

    saving: Saving
    """Saves of the policy, with costs."""

    prediction: Prediction
    """Averages over all runs."""

    first: Outcome
    """Outcome of the first run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A result of an experiment."""

    case: str
    """Name of the case."""

    policy: str
    """Name of the policy."""

    variant: str
    """Name of the variant."""

    result: Result
    """Result of the simulation."""


def run_simulation(simulation: Simulation) -> Result:
    """Simulate all runs of a simulation.

    Raises:
        ConfigError: The policy is impossible here, or a fault names a rank that the job
            lacks.
    """
    setup, general = simulation.setup, simulation.general
    saving = plan_saving(simulation.policy, setup)
    # without an MTBF the faults are planned, and all runs would be the same
    num_runs = general.runs if general.mtbf_s is not None else 1
    outcomes = [
        simulate(setup, saving, simulation.kills(run), duration_s=general.duration_s)
        for run in range(num_runs)
    ]
    return Result(
        simulation=simulation,
        saving=saving,
        prediction=predict(setup, saving, outcomes),
        first=outcomes[0],
    )


def run_experiment(
    arguments: Sequence[str],
    *,
    cases: Collection[str] = (),
    policies: Collection[str] = (),
) -> Iterator[Row]:
    """Yield the results of an experiment: each case with each policy in each variant.

    Args:
        arguments: The overrides of the command line, which override those of the
            experiment.
        cases: The names of the cases to run; empty: all cases.
        policies: The names of the policies to run; empty: all policies.

    Raises:
        ConfigError: A setting is wrong, or a policy is impossible.
    """
    _, experiment = compose_request(arguments)
    rest = [
        argument
        for argument in arguments
        if argument.lstrip("+").partition("=")[0] != "experiment"
    ]
    for case, of_case in experiment.cases.items():
        for policy, of_policy in experiment.policies.items():
            if case not in (cases or [case]) or policy not in (policies or [policy]):
                continue
            for variant, of_variant in experiment.variants.items():
                overrides = latest([*of_case, *of_policy, *of_variant, *rest])
                result = run_simulation(compose_simulation(overrides))
                yield Row(case=case, policy=policy, variant=variant, result=result)


def latest(overrides: Sequence[str]) -> list[str]:
    """Return the last override of each key, in the order of first occurrence.

    `$KEY` in an override becomes the value of KEY.
    """
    by_key = {
        override.lstrip("+").partition("=")[0]: override for override in overrides
    }
    values = {key: override.partition("=")[2] for key, override in by_key.items()}
    return [Template(override).safe_substitute(values) for override in by_key.values()]
