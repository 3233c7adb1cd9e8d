"""A ranking of policies in words. No torch.

The text has the assumptions, the policies in groups, and the command of the best policy
that loses no tokens.
"""

from __future__ import annotations

import math
import shlex
import statistics
import textwrap
from collections.abc import Iterator, Sequence

from launcher.simulator.planning import Candidate, command_of, num_spares
from launcher.simulator.runner import Result

_ROW = "{:<58} {:>8} {:>9} {:>9} {:>14} {:>12}"
_HEAD = ("policy", "ETTR", "+-", "overhead", "host GB a node", "lost tokens")
_NOTHING = "-"
# quantiles of Student's t, two-sided 5 %, for 1 to 10 degrees of freedom
_T_QUANTILES = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)


def plan_lines(
    candidates: Sequence[Candidate], arguments: Sequence[str]
) -> Iterator[str]:
    """Yield the lines of a ranking.

    The best policy comes first, with the policies whose ETTR the runs do not
    distinguish from the best ETTR.

    Args:
        candidates: The candidates, the best first, impossible candidates last.
        arguments: The overrides of the command line.
    """
    possible = [(each, each.result) for each in candidates if each.result is not None]
    if possible:
        best = possible[0][1]
        yield from _assumptions(best)
        ties = [
            pair
            for pair in possible
            if is_tied(best.prediction.ettrs, pair[1].prediction.ettrs)
        ]
        yield from _table(
            "The best, and policies that these runs do not tell from it:", ties
        )
        yield from _table(
            "The others:", [pair for pair in possible if pair not in ties]
        )
    refused = [each for each in candidates if each.result is None]
    if refused:
        yield "\nNot possible here:\n"
        yield from (
            f"{' '.join(each.overrides):<58} {each.refusal}" for each in refused
        )
    lossless = next((pair for pair in possible if pair[0].is_lossless), None)
    if lossless is not None:
        candidate, result = lossless
        if spares := num_spares(candidate):
            nodes = result.simulation.setup.cluster.nodes + spares
            yield (
                f"\nThe last {spares} of {nodes} nodes are spare ones; $NODE_RANK is a"
                " node's number, from 0, and $HOST the address of node 0."
            )
        yield "\nThe best policy that loses no tokens, as a command for each node:\n"
        yield f"    {_wrapped(command_of(candidate, arguments))}"


def is_tied(best: Sequence[float], other: Sequence[float]) -> bool:
    """Return whether the ETTRs of two policies differ only by chance.

    The test is a paired t-test at 5 %: the mean difference must be at most t times its
    standard error. With one run, any difference counts.

    Args:
        best: The ETTR of the better policy in each run.
        other: The ETTR of the other policy in each run, under the same faults.
    """
    differences = [one - two for one, two in zip(best, other, strict=True)]
    if len(differences) == 1:
        return differences == [0.0]
    quantile = _T_QUANTILES[min(len(differences) - 1, len(_T_QUANTILES)) - 1]
    return statistics.fmean(differences) <= quantile * statistics.stdev(
        differences
    ) / math.sqrt(len(differences))


def host_memory(result: Result) -> str:
    """Return the host memory of a node in GB, as text.

    A dash if the policy keeps nothing in host memory, or its paper does not give the
    size.
    """
    saving = result.saving
    return (
        _NOTHING
        if saving.memory is None
        else f"{saving.host_bytes(result.simulation.setup) / 1e9:.4g}"
    )


def _assumptions(result: Result) -> Iterator[str]:
    simulation = result.simulation
    setup, general = simulation.setup, simulation.general
    cluster, costs = setup.cluster, setup.costs
    seeds = range(general.seed, general.seed + general.runs)
    yield (
        f"{simulation.model.name} on {cluster.nodes} nodes of {cluster.gpus_per_node}"
        f" GPUs ({cluster.name}), {setup.job.layout}: {costs.iteration_s:.3g} s an"
        " iteration without checkpoints."
    )
    yield (
        f"A {general.scope} is lost every {general.mtbf_s:g} s on average; mean of"
        f" {len(seeds)} runs of {general.duration_s / 3600:.3g} h, with the same faults"
        f" for all policies (seeds {seeds[0]} to {seeds[-1]})."
    )


def _table(title: str, rows: Sequence[tuple[Candidate, Result]]) -> Iterator[str]:
    if not rows:
        return
    yield f"\n{title}\n"
    yield _ROW.format(*_HEAD)
    for candidate, result in rows:
        prediction = result.prediction
        times = (
            f"{prediction.ettr:.4f}",
            f"{prediction.spread:.4f}",
            f"{prediction.overhead:.2%}",
        )
        yield _ROW.format(
            " ".join(candidate.overrides),
            *times,
            host_memory(result),
            f"{prediction.plt:.2%}",
        )


def _wrapped(words: Sequence[str]) -> str:
    """Return a command for a shell, in lines of about 100 characters.

    The shell replaces variables in words.
    """
    quoted = [f'"{word}"' if "$" in word else shlex.quote(word) for word in words]
    return " \\\n        ".join(
        textwrap.wrap(
            " ".join(quoted), 100, break_long_words=False, break_on_hyphens=False
        )
    )
