"""Witnesses of a job: what its routers did and what each expert's state was, noted without the code under test.

`note_tokens` and `note_states` are setups: an agent calls them before it forks the ranks of its job.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from megatron.core.transformer.moe.router import TopKRouter

from launcher.loop import MegatronLoop, StageRunner
from moe_ckpt.elastic.status_page import StatusPage
from moe_ckpt.megatron.operators import RankOperators

Tokens = dict[int, dict[int, list[int]]]
"""By iteration, by layer: tokens that each expert was given."""


def note_tokens(folder: Path) -> None:
    """Let every worker write what its routers do: iteration, layer, generation, tokens of each expert."""
    generation, now = _note_generation(), {"iteration": 0}
    train_on, forward = StageRunner.train_on, cast("Any", TopKRouter.forward)

    def noted_train_on(self: StageRunner, iteration: int) -> Any:
        now["iteration"] = iteration
        try:
            return train_on(self, iteration)
        finally:
            now["iteration"] = 0

    def noted_forward(self: TopKRouter, *arguments: Any, **options: Any) -> Any:
        probabilities, routing_map = forward(self, *arguments, **options)
        if now["iteration"]:
            counts = routing_map.sum(dim=0, dtype=torch.int64).tolist()
            _write(folder, "tokens", [now["iteration"], cast("Any", self).layer_number - 1, generation[0], counts])
        return probabilities, routing_map

    StageRunner.train_on = noted_train_on  # type: ignore[method-assign]
    TopKRouter.forward = noted_forward  # type: ignore[method-assign]


def tokens_in(folder: Path, generation: int, iterations: range) -> Tokens:
    """Return what was noted of iterations that a generation completed, over all ranks."""
    tokens: Tokens = defaultdict(dict)
    for path in sorted(folder.glob("tokens*")):
        for iteration, layer, noted_in, counts in map(json.loads, path.read_text().splitlines()):
            if noted_in == generation and iteration in iterations:
                before = tokens[iteration].get(layer, [0] * len(counts))
                tokens[iteration][layer] = [old + new for old, new in zip(before, counts, strict=True)]
    return tokens


def note_states(folder: Path) -> None:
    """Let every worker write hashes of its operators wherever it logs a digest of its state."""
    generation, built = _note_generation(), list[RankOperators]()
    build, digest = RankOperators.__init__, MegatronLoop.digest

    def noted_build(self: RankOperators, *arguments: Any) -> None:
        build(self, *arguments)
        built[:] = [self]

    def noted_digest(self: MegatronLoop) -> str:
        _write(folder, "states", [generation[0], built[0].digests()])
        return digest(self)

    RankOperators.__init__ = noted_build  # type: ignore[method-assign]
    MegatronLoop.digest = noted_digest  # type: ignore[method-assign]


def states_of(folder: Path, global_rank: int, generation: int, first: int) -> dict[int, dict[str, str]]:
    """Return by iteration the hashes of a rank's operators that a generation noted, from iteration `first` on."""
    rows = map(json.loads, (folder / f"states{global_rank}").read_text().splitlines())
    return dict(enumerate((hashes for noted_in, hashes in rows if noted_in == generation), start=first))


def lost_by_hand(
    tokens: Tokens, saved_at: Callable[[int, int], int], back_to: int, layers: Sequence[int], num_experts: int
) -> list[list[int]]:
    """Return what experts lose, by layer: what came after each was saved, up to the iteration gone back to."""
    return [
        [
            sum(tokens[iteration][layer][expert] for iteration in range(saved_at(layer, expert) + 1, back_to + 1))
            for expert in range(num_experts)
        ]
        for layer in layers
    ]


def _note_generation() -> list[int]:
    """Return a list with the generation that the calling process is in, from then on."""
    generation, join = [0], StatusPage.join

    def noted_join(self: StatusPage, number: int) -> None:
        generation[0] = number
        join(self, number)

    StatusPage.join = noted_join  # type: ignore[method-assign]
    return generation


def _write(folder: Path, name: str, row: list[Any]) -> None:
    with (folder / f"{name}{os.environ['RANK']}").open("a") as file:
        file.write(json.dumps(row) + "\n")
