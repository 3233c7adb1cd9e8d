"""Recipes of Megatron-Bridge that an attachment refuses, by option: before and now.

    python benchmarks/recipes.py

Before: before the options of `EXACT_SINCE` were exact. recipes.csv has the 54
pretraining recipes of v0.6.0 that train experts, or are set up for experts, with the
settings that an attachment has or had to handle. An empty cell is Megatron's default.
Settings are effective ones: the settings that result from `comm_overlap`,
`mixed_precision` and the backend of the flex dispatcher on the recipe's GPU, with at
least two data-parallel replicas. The benchmark runs no recipe.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from moe_ckpt.integrations.megatron_lm_options import REFUSALS, Refusal  # noqa: E402

RECIPES = Path(__file__).with_name("recipes.csv")
EXACT_SINCE = (  # options that were refused at commit 0b0d713
    *(
        "overlap_param_gather",
        "use_precision_aware_optimizer",
        "calculate_per_token_loss",
    ),
    *(
        "virtual_pipeline_model_parallel_size",
        "context_parallel_size",
        "mtp_num_layers",
        "frozen_parameters",
    ),
)
SPEED = (  # options that change how bytes move, but neither model nor update
    *(
        "moe_token_dispatcher_type",
        "cuda_graph_impl",
        "tp_comm_overlap",
        "overlap_moe_expert_parallel_comm",
    ),
    *(
        "async_save",
        "fp8_param_gather",
        "reuse_grad_buf_for_mxfp8_param_ag",
        "use_megatron_fsdp",
    ),
)
Recipe = Mapping[str, str]


def read_recipes() -> Sequence[Recipe]:
    """Return the recipes: name, kind of model, and settings as text.

    A setting is empty if the recipe has Megatron's default.
    """
    with RECIPES.open(newline="") as file:
        return list(csv.DictReader(file))


def refused_now(recipe: Recipe) -> list[Refusal]:
    """Return the refusals that a recipe meets now."""
    return [
        each
        for each in REFUSALS
        if recipe.get(each.option) and recipe[each.option] not in map(str, each.allowed)
    ]


def refused_before(recipe: Recipe) -> list[str]:
    """Return the options of a recipe that were refused before the change.

    Options that are refused now were refused before, too.
    """
    return [option for option in EXACT_SINCE if recipe[option]] + [
        each.option for each in refused_now(recipe)
    ]


def lines() -> list[str]:
    """Return the result as lines of Markdown."""
    recipes = read_recipes()
    now = {
        recipe["recipe"]: [refusal.option for refusal in refused_now(recipe)]
        for recipe in recipes
    }
    others = {
        name: [option for option in options if option not in SPEED]
        for name, options in now.items()
    }
    num_before = _count(recipes, lambda recipe: bool(refused_before(recipe)))
    num_other_models = _count(recipes, lambda recipe: recipe["model"] != "gpt")
    return [
        (
            f"{len(recipes)} recipes: {num_before} refused before;"
            f" {sum(map(bool, now.values()))} now as they are written,"
        ),
        (
            f"{sum(map(bool, others.values()))} with settings of speed changed on the"
            " command line."
        ),
        f"{num_other_models} train hybrid or vision-language models: not tried.",
        "",
        *_table_of_options(recipes),
        "",
        *(
            f"- {name}: {', '.join(options)}"
            for name, options in now.items()
            if options
        ),
    ]


def _table_of_options(recipes: Sequence[Recipe]) -> list[str]:
    used = {
        name: _count(recipes, lambda recipe, name=name: bool(recipe[name]))
        for name in EXACT_SINCE
    }
    refused = [
        (each, _count(recipes, lambda recipe, each=each: each in refused_now(recipe)))
        for each in REFUSALS
    ]
    return [
        *("| option | recipes | now |", "| --- | --- | --- |"),
        *(f"| `{name}` | {times} | exact |" for name, times in used.items()),
        *(
            f"| `{each.option}` | {times} | refused: {each.reason} |"
            for each, times in refused
            if times
        ),
    ]


def _count(recipes: Sequence[Recipe], is_counted: Callable[[Recipe], bool]) -> int:
    return sum(map(is_counted, recipes))


if __name__ == "__main__":
    print("\n".join(lines()))
