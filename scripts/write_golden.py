"""Write the golden losses of the tiny preset again: `python scripts/write_golden.py`, then look at the difference."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from moe_ckpt.events import Evaluated, IterationCommitted
from tests.launcher.test_golden import GOLDEN, first_iterations_of_tiny
from tests.ranks import run_ranks
from tests.training import events_of

NUM_ITERATIONS = 12
TOLERANCE = 0.02  # nats; bf16 sums in another order differ by far less, a changed algorithm by far more


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run_ranks(4, first_iterations_of_tiny, folder, NUM_ITERATIONS, timeout_s=120)
        golden = {
            "tolerance": TOLERANCE,
            "losses": [round(event.loss, 5) for event in events_of(folder, IterationCommitted)],
            "eval_losses": [round(event.loss, 5) for event in events_of(folder, Evaluated)],
        }
    GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
