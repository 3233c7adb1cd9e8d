"""Write a synthetic failure trace.

    python scripts/write_trace.py [--seed 0] > traces/synthetic_6h.csv

Nodes disappear at random times, exponentially far apart, and come back later. Most
nodes disappear alone, some in bursts, as in the traces of spot instances that the
MoEvement paper uses. Columns: seconds, add|remove, number of nodes; see
moe_ckpt/faults/traces.py.
"""

from __future__ import annotations

import argparse
import random
import sys

ALONE = 0.6  # share of the faults that take one node
LARGEST = 4  # nodes of a burst
AWAY_S = (150.0, 400.0)  # until the nodes come back


def events(*, hours: float, count: int, seed: int) -> list[tuple[int, str, int]]:
    """Return the events of a trace, in order of time.

    Args:
        hours: Length of the trace.
        count: How many times nodes disappear.
        seed: Seed of the random numbers.

    Returns:
        Each event as (time in seconds, `add` or `remove`, number of nodes).
    """
    generator = random.Random(seed)
    # a Poisson process with this number of points
    times_s = sorted(generator.uniform(0, 3600 * hours) for _ in range(count))
    lines: list[tuple[int, str, int]] = []
    for at_s in times_s:
        num_nodes = 1 if generator.random() < ALONE else generator.randint(2, LARGEST)
        lines.append((int(at_s), "remove", num_nodes))
        lines.append((int(at_s + generator.uniform(*AWAY_S)), "add", num_nodes))
    return sorted(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hours", type=float, default=6.0)
    parser.add_argument("--count", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print("t_s,event,arg")
    for at_s, event, count in [
        (0, "add", 12),
        *events(hours=options.hours, count=options.count, seed=options.seed),
    ]:
        print(f"{at_s},{event},{count}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
