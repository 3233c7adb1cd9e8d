"""A checkpoint of one parallel layout continues at another, with the same state.

The state is equal bit for bit, but cut in another way. The tests compare whole tensors,
put together from the parts of all ranks, by the names of moe_ckpt's operators and by
the names of Megatron's sharded state dict. Losses are equal within float summation
only: a forward pass multiplies the same numbers, but other tokens meet in one expert's
matrix, so products are added up in another order.
"""

from __future__ import annotations

import json
import logging
import random
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess

from launcher.config import Settings, compose_settings
from launcher.run import run
from moe_ckpt.events import (
    CheckpointSkipped,
    IterationCommitted,
    StateResharded,
    StateResumed,
    read_events,
)
from moe_ckpt.megatron.durable import MegatronDurableState
from moe_ckpt.megatron.operator_names import bare_model
from moe_ckpt.megatron.operators import RankOperators
from moe_ckpt.megatron.reshard import reseed
from moe_ckpt.megatron.state import TrainingState, named_state, sharded_state
from moe_ckpt.types import ParallelLayout
from tests.harness.gloo.ranks import RankFailedError, rank_store, run_ranks
from tests.harness.jobs.training import events_of, fast, losses, train
from tests.megatron.stage import StageLoop, build_stage
from tests.scenarios import BIAS, FP16_SKIPPING, PP2, TIED, UNSHARDED

FP32, BF16 = "precision=fp32", "precision=bf16"
# Relative: a sum rounds several times, by half of 2**-23 each time. bfloat16 rounds
# every activation to 8 bits.
TOLERANCE = {FP32: 1e-6, BF16: 2e-3}
# no dropout: another layout draws other masks
FOUR_LAYERS = (
    "model.num_layers=4",
    "model.hidden_dropout=0",
    "model.attention_dropout=0",
)
AT_PP2_EP2, PP2_EP2 = (
    ("parallel.pp=2", "parallel.ep=2"),
    ParallelLayout(pp=2, dp=2, ep=2, tp=1),
)
OTHERS = {
    "PP=1 EP=4": ("parallel.pp=1", "parallel.ep=4"),
    "PP=4 EP=1": ("parallel.pp=4", "parallel.ep=1"),
}
COUNTING = "model.moe_balancing=global_aux_loss"
VARIANTS: dict[str, tuple[str, ...]] = {
    "bf16, global aux loss": (BF16, COUNTING),
    "fp16 with skipped steps, dense first layer, shared experts": (
        *FP16_SKIPPING,
        *(
            "model.num_dense_layers=1",
            "model.dense_ffn_hidden_size=64",
            "model.shared_expert_ffn_hidden_size=32",
        ),
    ),
    "optimizer not sharded, aux-loss-free bias, tied embeddings": (
        *UNSHARDED,
        *BIAS,
        *TIED,
        FP32,
    ),
    "fp8 parameters": (
        *(
            "precision=fp8_fp32_fp32",
            "precision.fp8_param_gather=true",
            "precision.fp8_recipe=blockwise",
        ),
    ),
    "states with scales": (
        "precision=fp16_fp16_fp16",
        "precision.initial_loss_scale=1024.0",
    ),
}
RUN = (
    "ckpt=dense",
    "ckpt.every_iters=2",
    "train.iterations=5",
    "ckpt.keep=9",
    *FOUR_LAYERS,
    FP32,
)

Raw = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of a tensor of the whole model."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""

    offset: tuple[int, ...]
    """Position of the part in the whole tensor."""

    bits: Raw
    """Bits of the part, as integers."""


Parts = list[tuple[str, Part]]


@dataclass(frozen=True, kw_only=True)
class Stand:
    """The state of a rank after an iteration, an evaluation and the next loss."""

    by_operator: Parts
    """Parts of tensors by operator names; empty with tensor parallelism."""

    by_key: Parts
    """Parts of tensors by the keys of Megatron's sharded state dict."""

    adam_steps: set[float]
    """Step counts of Adam."""

    loss_scales: tuple[float, ...]
    """Loss scale of each optimizer with a scaler."""

    schedule: int
    """Number of steps of the learning rate schedule."""

    eval_loss: float
    """Loss of the evaluation."""

    next_loss: float
    """Loss of the next iteration."""


def _bits(tensor: torch.Tensor) -> Raw:
    whole = tensor.detach().contiguous()
    return (
        whole.view(
            {1: torch.int8, 2: torch.int16, 4: torch.int32}[whole.element_size()]
        )
        .numpy()
        .copy()
    )


def _parts_by_operator(state: TrainingState) -> Iterator[tuple[str, Part]]:
    operators = RankOperators(state)
    for owned in operators.parameters:
        name, size = (
            f"{owned.operator}: {_leaf(owned.name)}",
            (owned.parameter.numel(),),
        )
        yield name, Part(shape=size, offset=(0,), bits=_bits(owned.weights()))
        for key, tensor, (start, _) in owned.pieces(full=True):
            yield (
                f"{name} {key.role}",
                Part(shape=size, offset=(start,), bits=_bits(tensor)),
            )
    for buffer in operators.buffers:
        bits = _bits(buffer.buffer)
        yield (
            f"{buffer.operator}: {_leaf(buffer.name)}",
            Part(shape=bits.shape, offset=(0,) * bits.ndim, bits=bits),
        )


def _leaf(name: str) -> str:
    """Return a name without the local numbers of layers and experts."""
    return re.sub(r"\.\d+(?=\.)", "", name)


def _parts_by_key(state: TrainingState) -> Iterator[tuple[str, Part]]:
    sharded, _ = save_preprocess(sharded_state(state, is_loading=False))
    for entry in nested_values(cast("Any", sharded)):
        if isinstance(entry, ShardedTensor):
            bits = _bits(cast("Any", entry.data)).reshape(
                (1,) * entry.prepend_axis_num + entry.local_shape
            )
            yield (
                entry.key,
                Part(shape=entry.global_shape, offset=entry.global_offset, bits=bits),
            )


def _stand(state: TrainingState, loop: StageLoop, iteration: int) -> Stand:
    splits_tensors = parallel_state.get_tensor_model_parallel_world_size() > 1
    scalers = [
        getattr(optimizer, "grad_scaler", None) for optimizer in state.inner_optimizers
    ]
    return Stand(
        by_operator=[] if splits_tensors else list(_parts_by_operator(state)),
        by_key=list(_parts_by_key(state)),
        # 0 where there is no parameter
        adam_steps=set(RankOperators(state).adam_steps()) - {0.0},
        loss_scales=tuple(float(scaler.scale) for scaler in scalers if scaler),
        schedule=state.scheduler.num_steps,
        eval_loss=loop.passes.evaluate(1),
        next_loss=loop.run_iteration(iteration + 1).loss,
    )


def _save(
    folder: Path,
    overrides: tuple[str, ...],
    mark: Callable[[int, int], int] | None = None,
) -> Stand:
    state, loop = build_stage(*overrides)
    for iteration in (1, 2, 3):
        loop.run_iteration(iteration)
    if mark:
        _mark_counters(state, mark)
    folder.mkdir(exist_ok=True)
    durable = MegatronDurableState(state, asynchronous=False)
    durable.start_save(folder, 3)
    assert durable.finish_save(wait=False) is not None
    return _stand(state, loop, 3)


def _mark_counters(state: TrainingState, mark: Callable[[int, int], int]) -> None:
    """Give counters values by layer and data-parallel rank.

    Counters are zero between iterations.
    """
    for module in bare_model(state.model[0]).modules():
        counts = getattr(module, "global_tokens_per_expert", None)
        if counts is not None:
            layer_number, dp_rank = (
                cast("Any", module).layer_number,
                parallel_state.get_data_parallel_rank(),
            )
            counts.copy_(torch.arange(len(counts)) + mark(layer_number, dp_rank))


def _by_layer(layer_number: int, dp_rank: int) -> int:
    return 100 * layer_number


def _by_rank(layer_number: int, dp_rank: int) -> int:
    return 100 * layer_number + dp_rank


def _load(folder: Path, saved_at: ParallelLayout, overrides: tuple[str, ...]) -> Stand:
    state, loop = build_stage(*overrides)
    assert MegatronDurableState(state, asynchronous=False).load(folder, saved_at) == 3
    return _stand(state, loop, 3)


def _whole(ranks: Iterable[Parts]) -> dict[str, Raw]:
    """Put the parts of all ranks together.

    Copies must agree, and no part may be missing.
    """
    parts: dict[str, list[Part]] = defaultdict(list)
    for rank in ranks:
        for name, part in rank:
            parts[name].append(part)
    return {name: _put_together(name, found) for name, found in parts.items()}


def _put_together(name: str, parts: list[Part]) -> Raw:
    whole, known = (
        np.zeros(parts[0].shape, parts[0].bits.dtype),
        np.zeros(parts[0].shape, bool),
    )
    for part in parts:
        assert part.shape == whole.shape, name
        region = tuple(
            slice(start, start + size)
            for start, size in zip(part.offset, part.bits.shape, strict=True)
        )
        assert np.array_equal(whole[region][known[region]], part.bits[known[region]]), (
            f"{name}: copies differ"
        )
        whole[region], known[region] = part.bits, True
    assert known.all(), f"{name}: incomplete"
    return whole


def _assert_same_tensors(expected: dict[str, Raw], found: dict[str, Raw]) -> None:
    # weights of tied embeddings have a copy where PP > 1
    copies = {
        name for name in expected.keys() ^ found.keys() if name.startswith("output: ")
    }
    assert found.keys() - copies == expected.keys() - copies
    assert [
        name
        for name in found.keys() - copies
        if not np.array_equal(expected[name], found[name])
    ] == []


def _assert_same_state(before: list[Stand], after: list[Stand]) -> None:
    _assert_same_tensors(
        _whole(rank.by_key for rank in before), _whole(rank.by_key for rank in after)
    )
    if before[0].by_operator and after[0].by_operator:
        _assert_same_tensors(
            _whole(rank.by_operator for rank in before),
            _whole(rank.by_operator for rank in after),
        )
    for rank in after:
        assert rank.adam_steps == before[0].adam_steps
        assert rank.loss_scales == before[0].loss_scales[: len(rank.loss_scales)]
        assert rank.schedule == before[0].schedule


@pytest.fixture(scope="module")
def saved(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], tuple[Path, list[Stand]]]:
    """Return a function that trains a variant at PP=2/EP=2 on 4 ranks and saves it.

    Each variant is trained once.
    """
    kept: dict[str, tuple[Path, list[Stand]]] = {}

    def save(variant: str) -> tuple[Path, list[Stand]]:
        if variant not in kept:
            folder = tmp_path_factory.mktemp("saved") / "checkpoint"
            mark = _by_layer if COUNTING in VARIANTS[variant] else None
            kept[variant] = (
                folder,
                run_ranks(
                    4,
                    _save,
                    folder,
                    (*FOUR_LAYERS, *VARIANTS[variant], *AT_PP2_EP2),
                    mark,
                ),
            )
        return kept[variant]

    return save


@pytest.mark.parametrize(
    ("variant", "layout"),
    [
        pytest.param("bf16, global aux loss", "PP=1 EP=4", marks=pytest.mark.full),
        # two optimizers and loss scalers become one; a stage has no experts
        ("fp16 with skipped steps, dense first layer, shared experts", "PP=4 EP=1"),
        ("optimizer not sharded, aux-loss-free bias, tied embeddings", "PP=1 EP=4"),
        pytest.param("fp8 parameters", "PP=1 EP=4", marks=pytest.mark.full),
    ],
)
def test_state_is_the_same_bit_for_bit_and_loss_nearly(
    variant: str, layout: str, saved: Any
) -> None:
    folder, before = saved(variant)

    after = run_ranks(
        4, _load, folder, PP2_EP2, (*FOUR_LAYERS, *VARIANTS[variant], *OTHERS[layout])
    )

    _assert_same_state(before, after)
    tolerance = TOLERANCE[FP32 if FP32 in VARIANTS[variant] else BF16]
    assert after[0].eval_loss == pytest.approx(before[0].eval_loss, rel=tolerance)
    assert after[0].next_loss == pytest.approx(before[0].next_loss, rel=tolerance)


def _warnings_of_a_load(folder: Path, overrides: tuple[str, ...]) -> list[str]:
    state, _ = build_stage(*overrides)
    warned, handler = list[str](), logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("moe_ckpt.megatron.durable").addHandler(handler)
    MegatronDurableState(state, asynchronous=False).load(folder, PP2_EP2)
    return warned


@pytest.mark.full
@pytest.mark.parametrize(
    ("variant", "num_warnings"),
    [("states with scales", 1), ("bf16, global aux loss", 0)],
)
def test_states_with_a_scale_for_each_shard_are_said_to_change(
    variant: str, num_warnings: int, saved: Any
) -> None:
    folder, _ = saved(variant)
    overrides = (*FOUR_LAYERS, *VARIANTS[variant], *OTHERS["PP=1 EP=4"])
    warned, *others = run_ranks(4, _warnings_of_a_load, folder, overrides)
    assert others == [[]] * 3
    assert sum("have a scale for each shard" in line for line in warned) == num_warnings


def test_counters_in_the_comparison_above_tell_layers_apart(saved: Any) -> None:
    """Megatron does not save the counters, so zeros would be right by chance."""
    whole = _whole(rank.by_operator for rank in saved("bf16, global aux loss")[1])
    counters = {
        bits.tobytes()
        for name, bits in whole.items()
        if name.endswith("global_tokens_per_expert")
    }
    assert len(counters) == 4


def test_counters_that_belong_to_a_rank_are_refused(tmp_path: Path) -> None:
    overrides = (*FOUR_LAYERS, FP32, COUNTING)
    run_ranks(4, _save, tmp_path / "checkpoint", (*overrides, *AT_PP2_EP2), _by_rank)
    with pytest.raises(
        RankFailedError,
        match=r"buffer decoder\.layers\.\d\.mlp\.router\.global_tokens_per_exp",
    ):
        run_ranks(
            4,
            _load,
            tmp_path / "checkpoint",
            PP2_EP2,
            (*overrides, *OTHERS["PP=1 EP=4"]),
        )


def test_a_dense_model_goes_to_another_degree_of_tensor_parallelism(
    tmp_path: Path,
) -> None:
    model = (*FOUR_LAYERS, FP32, "model.num_experts=0", "parallel.ep=1")
    saved_at = ParallelLayout(pp=2, dp=1, ep=1, tp=2)
    before = run_ranks(
        4, _save, tmp_path / "checkpoint", (*model, "parallel.pp=2", "parallel.tp=2")
    )
    after = run_ranks(
        2,
        _load,
        tmp_path / "checkpoint",
        saved_at,
        (*model, "parallel.pp=1", "parallel.tp=1"),
    )
    _assert_same_state(before, after)
    assert after[0].eval_loss == pytest.approx(before[0].eval_loss, rel=TOLERANCE[FP32])
    assert after[0].next_loss == pytest.approx(before[0].next_loss, rel=TOLERANCE[FP32])


def _load_with_megatron_alone(folder: Path, overrides: tuple[str, ...]) -> Parts:
    state, _ = build_stage(*overrides)
    model: Any = bare_model(state.model[0])
    loaded = cast(
        "Any",
        dist_checkpointing.load({"model": model.sharded_state_dict()}, str(folder)),
    )
    model.load_state_dict(loaded["model"])
    return list(_parts_by_operator(state))


def test_megatron_alone_loads_the_weights(saved: Any) -> None:
    folder, before = saved("bf16, global aux loss")
    overrides = (
        *FOUR_LAYERS,
        *VARIANTS["bf16, global aux loss"],
        "parallel.pp=1",
        "parallel.ep=2",
    )

    loaded = _whole(run_ranks(2, _load_with_megatron_alone, folder, overrides))

    weights = {
        name: bits for name, bits in loaded.items() if name.endswith(("weight", "bias"))
    }
    expected = _whole(rank.by_operator for rank in before)
    _assert_same_tensors(
        {
            name: bits
            for name, bits in expected.items()
            if name.endswith(("weight", "bias"))
        },
        weights,
    )


def _generators(state: TrainingState) -> dict[str, bytes]:
    rng = {
        name: tensor.numpy().tobytes()
        for name, tensor in named_state(state)
        if name.startswith("rng.")
    }
    return rng | {
        "numpy": cast("Any", np.random.get_state())[1].tobytes(),
        "python": repr(random.getstate()).encode(),
    }


def _generators_around_a_load(folder: Path) -> list[dict[str, bytes]]:
    """Return the states of the generators at four moments.

    Returns:
        The generators when a run starts, after a load of iteration 3, as seeded for
        iteration 3, and as seeded for iteration 4.
    """
    state, _ = build_stage(
        *FOUR_LAYERS, *VARIANTS["bf16, global aux loss"], *PP2, "parallel.ep=1"
    )
    run_seed, found = torch.initial_seed(), [_generators(state)]
    MegatronDurableState(state, asynchronous=False).load(folder, PP2_EP2)
    found.append(_generators(state))
    for iteration in (3, 4):
        reseed(run_seed, iteration)
        found.append(_generators(state))
    return found


def test_generators_are_seeded_by_stage_and_iteration(saved: Any) -> None:
    folder, _ = saved("bf16, global aux loss")
    ranks = run_ranks(4, _generators_around_a_load, folder)
    for fresh, loaded, seeded, seeded_for_next in ranks:
        assert loaded == seeded
        for other in (fresh, seeded_for_next):
            assert [name for name in loaded if loaded[name] == other[name]] == []
    assert ranks[0][1] == ranks[1][1], (
        "one stage: Megatron drops alike on all its replicas"
    )
    assert ranks[0][1] != ranks[2][1]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run at PP=2/EP=2 with checkpoints after iterations 2, 4 and 5."""
    folder = tmp_path_factory.mktemp("finished")
    train(4, folder, *RUN, *AT_PP2_EP2)
    return folder


@pytest.fixture
def interrupted(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished run, as if the run had died after iteration 2."""
    copy = shutil.copytree(finished, tmp_path / "interrupted")
    for later in ("iter_0000004", "iter_0000005"):
        shutil.rmtree(copy / "checkpoints" / later)
    return copy


def _run_and_listen(settings: Settings) -> list[str]:
    """Run, and return this rank's warnings."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("moe_ckpt").addHandler(handler)
    run(settings, store=rank_store())
    return said


def test_a_run_goes_on_at_another_layout(interrupted: Path, finished: Path) -> None:
    settings = compose_settings(
        (*fast(*RUN, *PP2, "parallel.ep=1"), f"run.dir={interrupted}")
    )
    [told] = [line for said in run_ranks(2, _run_and_listen, settings) for line in said]

    assert "iter_0000002: saved at PP=2 DP=2 EP=2 TP=1, goes on at PP=" in told
    assert "not bit for bit" in told
    for global_rank in range(2):
        [event] = events_of(interrupted, StateResharded, global_rank)
        assert (event.iteration, event.saved_at) == (2, "PP=2 DP=2 EP=2 TP=1")
    assert not events_of(interrupted, CheckpointSkipped)
    expected = {
        iteration: loss for iteration, loss in losses(finished).items() if iteration > 2
    }
    went_on = _losses_since_resharding(interrupted)
    assert went_on[3] == pytest.approx(expected[3], rel=TOLERANCE[FP32])
    assert went_on == pytest.approx(expected, rel=1e-5), (
        "gradients are sums over ranks, and Adam divides by their size"
    )
    assert json.loads(
        (interrupted / "checkpoints/iter_0000005/COMMITTED.json").read_text()
    )["identity"]["layout"]["pp"]


def _losses_since_resharding(folder: Path) -> dict[int, float]:
    events = [
        entry.event for entry in read_events(folder / "events" / "rank0000.jsonl")
    ]
    last = max(
        number
        for number, event in enumerate(events)
        if isinstance(event, StateResharded)
    )
    return {
        event.iteration: event.loss
        for event in events[last:]
        if isinstance(event, IterationCommitted)
    }


def test_with_dropout_the_other_layout_is_exact_again_in_itself(tmp_path: Path) -> None:
    settings = (*RUN, "model.hidden_dropout=0.1", "model.attention_dropout=0.1")
    train(
        4,
        tmp_path / "saved",
        *settings,
        *AT_PP2_EP2,
        "train.iterations=2",
        "train.lr_decay_iters=5",
    )
    resume = (*settings, *PP2, "parallel.ep=1", f"train.resume={tmp_path / 'saved'}")

    once = train(2, tmp_path / "once", *resume)
    shutil.rmtree(tmp_path / "once/checkpoints/iter_0000005")
    resumed = train(2, tmp_path / "once", *resume)

    assert resumed["digest_per_rank"] == once["digest_per_rank"]
    assert [
        event.iteration for event in events_of(tmp_path / "once", StateResumed)
    ] == [2, 4]
    assert [
        event.iteration for event in events_of(tmp_path / "once", StateResharded)
    ] == [2]


def test_sparse_snapshots_begin_where_a_checkpoint_of_another_layout_ends(
    finished: Path, tmp_path: Path
) -> None:
    resume = (
        "ckpt=moevement",
        "train.iterations=7",
        "train.lr_decay_iters=5",
        *FOUR_LAYERS,
        FP32,
    )
    result = train(
        4, tmp_path, *resume, *OTHERS["PP=4 EP=1"], f"train.resume={finished}"
    )
    assert result["iteration"] == 7
    assert [event.iteration for event in events_of(tmp_path, StateResharded)] == [5]


@pytest.mark.parametrize(
    ("world_size", "overrides", "message"),
    [
        (2, ("parallel.tp=2",), r"parallel\.tp: got 2, wanted 1 for a MoE model"),
        (
            2,
            ("parallel.pp=1", "model.hidden_size=64"),
            r"\n  model.hidden_size: got 64, wanted 32\n",
        ),
        (2, ("parallel.pp=1", "train.lr=0.123"), r"0\.123"),
    ],
)
def test_what_cannot_be_is_said(
    world_size: int, overrides: tuple[str, ...], message: str, interrupted: Path
) -> None:
    with pytest.raises(RankFailedError, match=message):
        train(world_size, interrupted, *RUN, *overrides)


def test_a_layout_that_pads_the_vocabulary_otherwise_is_refused(tmp_path: Path) -> None:
    model = (
        "model.num_experts=0",
        "model.num_attention_heads=6",
        "model.hidden_size=48",
        "model.moe_ffn_hidden_size=48",
    )
    settings = (
        *RUN,
        *model,
        "train.sequence_length=24",
        "train.iterations=2",
        "parallel.ep=1",
    )
    train(2, tmp_path, *settings, "parallel.tp=2")
    with pytest.raises(
        RankFailedError,
        match=r"word_embeddings\.weight got 256 rows, wanted 384: parallel\.tp",
    ):
        train(3, tmp_path, *settings, "parallel.tp=3")
