"""Simulates training under faults: predicts the cost of policies, and ranks them.

    python -m launcher.simulate [model=qwen_moe] [cluster=h200] [ckpt=gemini]
                                [mtbf_s=1800] ...
    python -m launcher.simulate +experiment=table3

`python -m launcher.simulate --help` lists every setting.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from launcher.overrides import help_text, make_parser, parse
from launcher.simulator.comparison import compare
from launcher.simulator.config import (
    compose_machine,
    compose_request,
    compose_simulation,
    compose_yaml,
)
from launcher.simulator.plan_lines import host_memory, plan_lines
from launcher.simulator.planning import rank_policies
from launcher.simulator.published_page import read_cells, write_page
from launcher.simulator.run_folder import write_run
from launcher.simulator.runner import Result, Row, run_experiment, run_simulation
from moe_ckpt.errors import exit_status
from moe_ckpt.sim.saving import Recovery

_NOTHING = "-"
_DESCRIPTION = (
    "Simulates training under faults: predicts ETTR, overhead and memory of policies,"
    " and ranks them.\n"
    "\n"
    "    python -m launcher.simulate [OVERRIDES]\n"
    "    python -m launcher.simulate plan=true model=deepseek_moe cluster=h200"
    " mtbf_s=1800"
)


def main(arguments: Sequence[str]) -> int:
    """Simulate as the arguments say, or print one message about an error.

    Args:
        arguments: The words of the command line.

    Returns:
        The exit status.
    """
    return exit_status(lambda: _answer(arguments))


def _answer(arguments: Sequence[str]) -> None:
    parser = make_parser("python -m launcher.simulate", _DESCRIPTION)
    options = parse(parser, arguments)
    if options.help:
        print(parser.format_help(), help_text("simulate", options.overrides), sep="\n")
    elif options.cfg:
        print(compose_yaml(options.overrides), end="")
    else:
        _simulate(options.overrides)


def _simulate(arguments: Sequence[str]) -> None:
    general, experiment = compose_request(arguments)
    if general.real is not None:
        cluster, timing = compose_machine(arguments)
        for line in compare(Path(general.real), cluster, timing.iteration_s):
            print(line)
        return
    if general.page is not None:
        rest = [argument for argument in arguments if not argument.startswith("page=")]
        write_page(Path(general.page), rest, read_cells())
        return
    if experiment.cases:
        print_rows(run_experiment(arguments))
        return
    if general.plan:
        log = lambda what: print(f"simulating {what}", file=sys.stderr)  # noqa: E731
        for line in plan_lines(rank_policies(arguments, report=log), arguments):
            print(line)
        return
    result = run_simulation(compose_simulation(arguments))
    if general.out is not None:
        write_run(Path(general.out), result)
    for line in lines_of(result):
        print(line)


def lines_of(result: Result) -> list[str]:
    """Return a readable result, one line per fact."""
    setup, saving, prediction = (
        result.simulation.setup,
        result.saving,
        result.prediction,
    )
    costs, ledger = setup.costs, result.first.ledger
    formula = _NOTHING if prediction.formula is None else f"{prediction.formula:.4f}"
    parts = {
        "of use": ledger.useful_s,
        "stalls": ledger.stall_s,
        "trained again": ledger.again_s,
    }
    parts["recovering"] = ledger.recovery_s
    return [
        (
            f"job            {setup.job.layout} on {setup.cluster.name},"
            f" {setup.job.num_micro_batches} micro-batches"
        ),
        f"iteration      {costs.iteration_s:.4g} s",
        f"policy         {saving.name}: {cadence(result)}",
        (
            f"overhead       {prediction.overhead * costs.iteration_s:.4g} s an"
            f" iteration ({prediction.overhead:.2%})"
        ),
        f"host memory    {host_memory(result)} GB a node",
        (
            f"faults         {prediction.num_faults:.4g}, {prediction.recovery_s:.6g} s"
            " for them in all"
        ),
        (
            f"ETTR           {prediction.ettr:.4f} (+- {prediction.spread:.4f} between"
            f" runs; closed formula {formula})"
        ),
        f"lost tokens    {prediction.plt:.2%} (PLT; MLT {prediction.mlt:.2%})",
        f"the first run  {result.first.iterations} iterations in"
        f" {ledger.wall_s:.6g} s: "
        + ", ".join(
            f"{name} {seconds / ledger.wall_s:.2%}" for name, seconds in parts.items()
        ),
    ]


def cadence(result: Result) -> str:
    """Return in words how often a policy saves."""
    saving = result.saving
    durable = (
        f"whole checkpoints every {saving.durable.every_iters} iterations"
        if saving.durable
        else ""
    )
    if not saving.settled.repeat:
        return durable or "saves nothing"
    interval = int(saving.settled.interval_iters)
    if saving.recovery is Recovery.LOCAL:
        num_slots = saving.settled.repeat[0].num_slots
        snapshots = f"window {num_slots}" + (
            f" every {interval} iterations" if interval > num_slots else ""
        )
    else:
        snapshots = (
            f"snapshots every {interval} iterations"
            if interval > 1
            else "snapshots every iteration"
        )
    return f"{snapshots}, {durable}" if durable else snapshots


def print_rows(rows: Iterable[Row]) -> None:
    """Print the results of an experiment, each as soon as it is there."""
    head = (
        "case",
        "policy",
        "variant",
        "interval",
        "overhead",
        "recovery, s",
        "ETTR",
        "formula",
        "lost tokens",
    )
    form = "{:<22} {:<12} {:<8} {:>8} {:>9} {:>12} {:>8} {:>8} {:>12}"
    print(form.format(*head))
    for row in rows:
        result = row.result
        prediction = result.prediction
        formula = (
            _NOTHING if prediction.formula is None else f"{prediction.formula:.3f}"
        )
        values = (
            f"{prediction.overhead:.1%}",
            f"{prediction.recovery_s:.0f}",
            f"{prediction.ettr:.3f}",
            formula,
        )
        names = (
            row.case,
            row.policy,
            row.variant,
            int(result.saving.settled.interval_iters) or _NOTHING,
        )
        print(form.format(*names, *values, f"{prediction.plt:.2%}"), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
