"""The price of frozen experts in a grouped layer: weight gradients that nothing uses.

    python benchmarks/grouped.py

Prints the processor seconds of a layer's forward and backward pass in this process. A
replay computes weight gradients of frozen experts, and drops the gradients. Transformer
Engine's `GroupedLinear` asks its first weight alone whether weight gradients are
computed (2.9 to 2.18). So experts of one layer skip weight gradients all together or
not at all. Experts in modules of their own skip weight gradients one by one.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F  # noqa: N812

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from moe_ckpt.standins.grouped_linear import GroupedLinear  # noqa: E402

NUM_EXPERTS, HIDDEN, FFN, TOKENS = 8, 512, 512, 4096
_REPEATS = 9
SAID = (
    f"{NUM_EXPERTS} experts of {HIDDEN} x {FFN}, SwiGLU, {TOKENS} tokens, FP32, one"
    " thread"
)


def main() -> int:
    print(SAID)
    print("\n".join(rows()))
    return 0


def rows() -> Sequence[str]:
    """Return the rows of a table.

    A row has the number of frozen experts, the seconds if experts skip gradients one by
    one, the seconds otherwise, and the price.
    """
    torch.set_num_threads(1)
    layers = [_linear(HIDDEN, 2 * FFN), _linear(FFN, HIDDEN)]
    found: list[str] = []
    for frozen in (NUM_EXPERTS // 4, NUM_EXPERTS // 2, 3 * NUM_EXPERTS // 4):
        grouped, alone = _compared(layers, frozen)
        found.append(
            f"| {frozen} of {NUM_EXPERTS} | {alone:.3f} | {grouped:.3f} |"
            f" {grouped / alone - 1:+.0%} |"
        )
    return found


def _linear(input_size: int, output_size: int) -> GroupedLinear:
    alone = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    return GroupedLinear(
        NUM_EXPERTS,
        input_size,
        output_size,
        config=SimpleNamespace(params_dtype=torch.float32),
        init_method=lambda weight: torch.nn.init.normal_(weight, std=0.02),
        bias=False,
        pg_collection=SimpleNamespace(ep=alone, expt_dp=alone),
    )


def _compared(layers: Sequence[GroupedLinear], frozen: int) -> tuple[float, float]:
    """Compare passes of the layers.

    Returns:
        Median processor seconds with all weight gradients, and without the weight
        gradients of frozen experts.
    """
    measured: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(_REPEATS):
        # in turn, so that both meet the same speed of the machine
        for is_grouped, seconds in measured.items():
            for layer in layers:
                for index, weight in enumerate(layer.weights):
                    weight.requires_grad_(is_grouped or index >= frozen)
            seconds.append(_pass(layers))
    return statistics.median(measured[True]), statistics.median(measured[False])


def _pass(layers: Sequence[GroupedLinear]) -> float:
    tokens = torch.ones(TOKENS, HIDDEN, requires_grad=True)
    shares = [TOKENS // NUM_EXPERTS] * NUM_EXPERTS
    started_s = time.process_time()
    gate, up = layers[0](tokens, shares)[0].chunk(2, dim=-1)
    output, _ = layers[1](F.silu(gate) * up, shares)
    output.sum().backward()
    return time.process_time() - started_s


if __name__ == "__main__":
    sys.exit(main())
