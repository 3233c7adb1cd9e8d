"""Write the golden losses of the tiny preset again.

    python scripts/write_golden.py             then look at the difference

Each release of torch has separate losses: 2.11 and 2.13 draw other BF16 values from the
same generator, so initial weights differ.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch

from launcher.config import compose_settings
from launcher.run import run
from moe_ckpt.events import Evaluated, IterationCommitted
from tests.harness.gloo.ranks import rank_store, run_ranks
from tests.harness.jobs.training import LICENSE_AS_TEXT, events_of
from tests.scenarios import ROOT

GOLDEN = ROOT / "tests" / "launcher" / "golden_tiny.json"
RELEASE = ".".join(torch.__version__.split(".")[:2])
NUM_ITERATIONS = 12
# nats; BF16 sums in another order differ by far less, a changed algorithm by far more
TOLERANCE = 0.02


def losses_of_tiny(folder: Path, iterations: int) -> dict[str, list[float]]:
    """Train the tiny preset on 4 ranks.

    Args:
        folder: The run folder.
        iterations: The number of iterations.

    Returns:
        `losses` of the iterations, and `eval_losses` of the evaluations.
    """
    run_ranks(4, _train, folder, iterations, timeout_s=120)
    kinds = {"losses": IterationCommitted, "eval_losses": Evaluated}
    return {
        name: [round(event.loss, 5) for event in events_of(folder, kind)]
        for name, kind in kinds.items()
    }


def _train(folder: Path, iterations: int) -> None:
    overrides = [
        f"train.iterations={iterations}",
        f"run.dir={folder}",
        "train.lr_decay_iters=200",
        *LICENSE_AS_TEXT,
    ]
    run(
        compose_settings([*overrides, "run.progress=none", "run.tensorboard=false"]),
        store=rank_store(),
    )


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        golden = json.loads(GOLDEN.read_text()) | {
            RELEASE: losses_of_tiny(Path(folder), NUM_ITERATIONS)
        }
    GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
