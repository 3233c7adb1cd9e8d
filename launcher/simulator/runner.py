"""Simulations carried out: of one policy, of an experiment's cases. No torch, and
nothing printed.
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
    """The result of a simulation: `first` is its first run."""

    simulation: Simulation
    saving: Saving
    prediction: Prediction
    first: Outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A result of an experiment, by the names of its case, policy and variant."""

    case: str
    policy: str
    variant: str
    result: Result


def run_simulation(simulation: Simulation) -> Result:
    """Simulate as many runs as are asked for. Raises ConfigError for what cannot be
    had.
    """
    setup, general = simulation.setup, simulation.general
    saving = plan_saving(simulation.policy, setup)
    # the faults of a plan are the same in all
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
    """Yield the results of an experiment's cases with its policies in its variants;
    `arguments` have the last word.

    Of all cases and policies, where they are not named.
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
    """Return the overrides without those that a later one overrides again; `$KEY`
    becomes the value of KEY.
    """
    by_key = {
        override.lstrip("+").partition("=")[0]: override for override in overrides
    }
    values = {key: override.partition("=")[2] for key, override in by_key.items()}
    return [Template(override).safe_substitute(values) for override in by_key.values()]
