"""Checks that all ranks have read the same inputs.

A replacement, or a process on another node, reads its inputs anew: data, tokenizer,
script. If an input has changed meanwhile, or differed from the start, the replacement
would train on other samples than the dead process, without any error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
import xxhash

from moe_ckpt.collectives import Ranks, gather_results, reduce_extremes
from moe_ckpt.errors import DataError

Inputs = Mapping[str, str]
"""Content identities (`moe_ckpt.content`), by the name of the setting that names the
input.
"""


def require_equal(ranks: Ranks, mine: Inputs) -> None:
    """Require the same content on all ranks that have read an input. Collective.

    Args:
        ranks: All ranks of the job.
        mine: The inputs of this rank.

    Raises:
        DataError: Ranks have read different inputs. Raised on all ranks.
    """
    # 53 bits: the float64 reduction carries integers of this size exactly
    number = xxhash.xxh3_64_intdigest(json.dumps(mine, sort_keys=True).encode()) >> 11
    device = torch.device(torch.cuda.current_device())
    # one small reduction at any number of ranks: hashes are equal if the largest is the
    # smallest
    extremes = reduce_extremes(
        ranks, device, largest={"largest": number}, smallest={"smallest": number}
    )
    if extremes["largest"] == extremes["smallest"]:
        return
    of_each = gather_results(ranks, lambda: mine, DataError)
    names = sorted({name for inputs in of_each for name in inputs})
    found_by_name = {name: _ranks_by_content(name, of_each) for name in names}
    if differences := [
        _describe(name, found)
        for name, found in found_by_name.items()
        if len(found) > 1
    ]:
        raise DataError("; ".join(differences))


def _ranks_by_content(name: str, of_each: list[Inputs]) -> dict[str, list[int]]:
    """Return the ranks that have read each content of an input.

    Ranks of other stages may not have read the input.
    """
    found: dict[str, list[int]] = {}
    for rank, inputs in enumerate(of_each):
        if name in inputs:
            found.setdefault(inputs[name], []).append(rank)
    return found


def _describe(name: str, found: Mapping[str, list[int]]) -> str:
    parts = [
        f"{content} on ranks {', '.join(map(str, ranks))}"
        for content, ranks in found.items()
    ]
    return (
        f"{name}: got {' and '.join(parts)}, wanted the same content on all ranks for"
        " as long as the job runs"
    )
