"""flowcheck under faults: all ranks go back to the newest iteration that every checkpoint server has made, exactly."""

from __future__ import annotations

from pathlib import Path

from moe_ckpt.adapters.megatron_operators import RankOperators
from moe_ckpt.types import Phase
from tests.campaign import Fault, Point, all_go_back, call_is_a_point, lose_nodes, survive
from tests.scenarios import FP16_SKIPPING, TIED, UNSHARDED

RANKS = range(4)


def loading_is_a_point() -> None:
    """Let a rank enter RECOVERY once more when it loads a snapshot."""
    call_is_a_point(RankOperators, "load", Phase.RECOVERY)


def newest(iteration: int) -> range:
    """The iterations that all servers may have when a fault strikes in `iteration`: they lag by at most two."""
    return range(max(0, iteration - 3), iteration + 1)


def faults() -> list[Fault]:
    again = Point(1, Phase.RECOVERY)
    return [
        all_go_back("in the first iteration", 0, Point(2, Phase.BACKWARD, 1), replaying=()),
        all_go_back("as an iteration begins", newest(4), Point(0, Phase.FORWARD, 4)),
        all_go_back("in backward", newest(6), Point(3, Phase.BACKWARD, 6)),
        all_go_back("while gradients are reduced", newest(8), Point(1, Phase.REDUCE, 8)),
        all_go_back("between update and gather", newest(10), Point(0, Phase.STEP, 10, skip=1)),
        all_go_back("while gradients are handed over", newest(12), Point(2, Phase.SNAPSHOT, 12)),
        all_go_back("between iterations", newest(14), Point(3, Phase.BETWEEN, 14)),
        all_go_back("again while all go back", newest(16), Point(1, Phase.BACKWARD, 16), again),
        all_go_back("a node", newest(19), Point(0, Phase.REDUCE, 19), kills=[2], then=lose_nodes, fetched=True),
        all_go_back("two of a stage", newest(22), Point(2, Phase.REDUCE, 22), kills=[2, 3]),
    ]


def test_flowcheck_goes_back_to_its_servers(tmp_path: Path) -> None:
    training = ("train.iterations=24", *FP16_SKIPPING, *TIED, *UNSHARDED)
    survive(tmp_path, faults(), *training, ckpt="flowcheck", setup=loading_is_a_point)
