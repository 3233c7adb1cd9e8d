"""Simulate training under faults: predict what checkpoint policies cost, and rank them.

    python -m launcher.simulate [model=qwen_moe] [cluster=h200] [ckpt=gemini] [mtbf_s=1800] ...
    python -m launcher.simulate +experiment=table3

`python -m launcher.simulate --help` lists every setting.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from launcher.config import show_with_hydra
from launcher.simulated import Result, Row, run_experiment, run_simulation
from launcher.simulation import GROUPS, compose_request, compose_simulation
from moe_ckpt.errors import MoeCkptError
from moe_ckpt.sim.saving import Recovery

_FAILED = 1
_NOTHING = "-"


def main(arguments: Sequence[str]) -> int:
    """Simulate what the arguments say, or say in one message why not; return the exit status."""
    if any(argument.startswith("-") for argument in arguments):
        return show_with_hydra("simulate", arguments, GROUPS)
    try:
        _simulate(arguments)
    except MoeCkptError as error:
        print(f"error: {error}", file=sys.stderr)
        return _FAILED
    return 0


def _simulate(arguments: Sequence[str]) -> None:
    _, experiment = compose_request(arguments)
    if experiment.cases:
        print_rows(run_experiment(arguments))
        return
    result = run_simulation(compose_simulation(arguments))
    for line in lines_of(result):
        print(line)


def lines_of(result: Result) -> list[str]:
    """Return a result for people, a line for each fact."""
    setup, saving, prediction = result.simulation.setup, result.saving, result.prediction
    costs, ledger = setup.costs, result.first.ledger
    formula = _NOTHING if prediction.formula is None else f"{prediction.formula:.4f}"
    parts = {"of use": ledger.useful_s, "stalls": ledger.stall_s, "trained again": ledger.again_s}
    parts["recovering"] = ledger.recovery_s
    return [
        f"job            {setup.job.layout} on {setup.cluster.name}, {setup.job.num_micro_batches} micro-batches",
        f"iteration      {costs.iteration_s:.4g} s",
        f"policy         {saving.name}: {cadence(result)}",
        f"overhead       {prediction.overhead * costs.iteration_s:.4g} s an iteration ({prediction.overhead:.2%})",
        f"host memory    {saving.host_bytes(setup) / 1e9:.4g} GB a node",
        f"faults         {prediction.num_faults:.4g}, {prediction.recovery_s:.6g} s for them in all",
        f"ETTR           {prediction.ettr:.4f} (+- {prediction.spread:.4f} between runs; closed formula {formula})",
        f"lost tokens    {prediction.lost_tokens:.2%}",
        f"the first run  {result.first.iterations} iterations in {ledger.wall_s:.6g} s: "
        + ", ".join(f"{name} {seconds / ledger.wall_s:.2%}" for name, seconds in parts.items()),
    ]


def cadence(result: Result) -> str:
    """Return how often a policy saves, in words."""
    saving = result.saving
    durable = f"whole checkpoints every {saving.durable.every_iters} iterations" if saving.durable else ""
    if not saving.later.repeat:
        return durable or "saves nothing"
    interval = interval_iters(result)
    if saving.recovery is Recovery.LOCAL:
        snapshots = f"window {interval}"
    else:
        snapshots = f"snapshots every {interval} iterations" if interval > 1 else "snapshots every iteration"
    return f"{snapshots}, {durable}" if durable else snapshots


def interval_iters(result: Result) -> int:
    """Return the iterations from one window or whole snapshot to the next; 0 without any."""
    later = result.saving.later
    begins = sum(take.slot == 0 for take in later.repeat)
    return later.period // begins if begins else 0


def print_rows(rows: Iterable[Row]) -> None:
    """Print an experiment's results as they come."""
    head = ("case", "policy", "variant", "interval", "overhead", "recovery, s", "ETTR", "formula", "lost tokens")
    form = "{:<22} {:<12} {:<8} {:>8} {:>9} {:>12} {:>8} {:>8} {:>12}"
    print(form.format(*head))
    for row in rows:
        result = row.result
        prediction = result.prediction
        formula = _NOTHING if prediction.formula is None else f"{prediction.formula:.3f}"
        values = (f"{prediction.overhead:.1%}", f"{prediction.recovery_s:.0f}", f"{prediction.ettr:.3f}", formula)
        names = (row.case, row.policy, row.variant, interval_iters(result) or _NOTHING)
        print(form.format(*names, *values, f"{prediction.lost_tokens:.2%}"), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
