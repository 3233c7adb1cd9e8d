"""The agreement of all ranks on the inputs that each of them has read.

A replacement, and a process on another node, reads its inputs anew: data, tokenizer, script.
If an input has changed meanwhile, or was another one from the start, the replacement would
train on other samples than the process that it replaces, without an error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
import xxhash

from moe_ckpt.collectives import Ranks, gather_results
from moe_ckpt.errors import DataError

Inputs = Mapping[str, str]
"""Content identities (`moe_ckpt.content`) by the names of the settings that name the inputs."""


def require_equal(ranks: Ranks, mine: Inputs) -> None:
    """Require that all ranks have read the same inputs. Collective.

    Args:
        ranks: All ranks of the job.
        mine: The inputs of this rank.

    Raises:
        DataError: Ranks have read different inputs; on all ranks.
    """
    # shifted, so that int64 has its negative, too
    number = xxhash.xxh3_64_intdigest(json.dumps(mine, sort_keys=True).encode()) >> 2
    extremes = torch.tensor([number, -number], device=torch.cuda.current_device())
    # one small reduction, however many ranks there are: equal where the largest is the smallest
    ranks.reduce(extremes, "max")
    if int(extremes[0]) == -int(extremes[1]):
        return
    of_each = gather_results(ranks, lambda: mine, DataError)
    names = sorted({name for inputs in of_each for name in inputs})
    raise DataError("; ".join(_difference(name, of_each) for name in names if _differs(name, of_each)))


def _differs(name: str, of_each: list[Inputs]) -> bool:
    return len({inputs.get(name) for inputs in of_each}) > 1


def _difference(name: str, of_each: list[Inputs]) -> str:
    by_content: dict[str, list[int]] = {}
    for rank, inputs in enumerate(of_each):
        by_content.setdefault(inputs.get(name, "nothing"), []).append(rank)
    parts = [f"{content} on ranks {', '.join(map(str, ranks))}" for content, ranks in by_content.items()]
    return f"{name}: got {' and '.join(parts)}, wanted the same content on all ranks for as long as the job runs"
