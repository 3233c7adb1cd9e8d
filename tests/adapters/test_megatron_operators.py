"""Operators are found at their place in the whole model, each byte of them is owned once, and pieces go back whole."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec

from launcher.config import compose_settings
from launcher.launch import read_launch
from launcher.layout import fit_layout
from launcher.loop import Trainer
from launcher.model import transformer_config
from launcher.parallel import choose_device, form_groups, join_job
from moe_ckpt.adapters.megatron_operators import (
    RankOperators,
    bare_model,
    front_to_back,
    locate,
    shard_identity,
    stage_group,
)
from moe_ckpt.adapters.megatron_state import TrainingState, named_state, sharded_state
from moe_ckpt.adapters.megatron_step import clear_gradients
from moe_ckpt.adapters.megatron_wipe import StateWiper
from moe_ckpt.errors import CheckpointLoadError, ConfigError
from moe_ckpt.store.codec import BUFFER, COMPUTE, MASTER, PartKey
from moe_ckpt.store.snapshot import Piece
from moe_ckpt.types import OperatorId, OperatorKind
from tests.adapters.stage import build_stage
from tests.ranks import rank_store, run_ranks
from tests.training import fast

NUM_LAYERS, NUM_EXPERTS = 4, 4
SIZE = (f"model.num_layers={NUM_LAYERS}", f"model.num_experts={NUM_EXPERTS}")
EP2_DP2 = ("parallel.pp=2", "parallel.ep=2", "parallel.dp=2")
EP2_DP4 = ("parallel.pp=1", "parallel.ep=2", "parallel.dp=4")  # each expert on two ranks
UNSHARDED = "train.distributed_optimizer=false"
BIAS = ("model.moe_balancing=bias", "model.moe_score_function=sigmoid")

Parts = dict[PartKey, torch.Tensor]
Tensors = dict[str, torch.Tensor]


# --- the table


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A job, what its stages' operators are called, and the bytes of a parameter: whole state, compute weights."""

    world_size: int
    overrides: tuple[str, ...]
    stages: tuple[list[str], ...]
    full_bytes: int = 12
    compute_bytes: int = 2


@dataclass(frozen=True, kw_only=True)
class Described:
    """What a rank says of its stage's table, and, by other means, of its parameters and buffers."""

    stage: int
    operators: list[str]
    full_bytes: int
    compute_bytes: int
    sizes: dict[str, int]
    buffer_bytes: int


def _moe_layer(layer: int) -> list[str]:
    return [f"layer {layer}", f"layer {layer} gate", *(f"layer {layer} expert {i}" for i in range(NUM_EXPERTS))]


SHAPES = {
    "experts on 2 of 4 ranks": Shape(
        world_size=4,
        overrides=(*EP2_DP2, *BIAS),
        stages=(
            ["embedding", *_moe_layer(0), *_moe_layer(1)],
            [*_moe_layer(2), *_moe_layer(3), "final norm", "output"],
        ),
    ),
    "experts on 4 of 4 ranks, not sharded": Shape(
        world_size=4,
        overrides=(*EP2_DP4, UNSHARDED, "precision=fp16"),
        stages=(["embedding", *(name for layer in range(4) for name in _moe_layer(layer)), "final norm", "output"],),
    ),
    "a dense layer, shared experts, fp32": Shape(
        world_size=2,
        overrides=(
            "parallel.pp=2",
            "model.num_dense_layers=1",
            "model.shared_expert_ffn_hidden_size=32",
            "precision=fp32",
        ),
        stages=(["embedding", "layer 0", *_moe_layer(1)], [*_moe_layer(2), *_moe_layer(3), "final norm", "output"]),
        compute_bytes=4,
    ),
    "tied embeddings on two stages, fp16": Shape(
        world_size=2,
        overrides=("parallel.pp=2", "model.tied_embeddings=true", "precision=fp16"),
        stages=(
            ["embedding", *_moe_layer(0), *_moe_layer(1)],
            [*_moe_layer(2), *_moe_layer(3), "final norm", "output"],
        ),
    ),
    "tied embeddings on one stage": Shape(
        world_size=1,
        overrides=("model.tied_embeddings=true",),
        stages=(["embedding", *(name for layer in range(4) for name in _moe_layer(layer)), "final norm"],),
    ),
    "dense, learned positions": Shape(
        world_size=1,
        overrides=("model.num_experts=0", "model.position_embedding=learned"),
        stages=(["embedding", "layer 0", "layer 1", "layer 2", "layer 3", "final norm", "output"],),
    ),
}


def _global_name(name: str) -> str:
    """Return a parameter's name with the expert's global number in place of the local one."""
    local = NUM_EXPERTS // parallel_state.get_expert_model_parallel_world_size()
    first = local * parallel_state.get_expert_model_parallel_rank()
    return re.sub(r"(?<=local_experts\.)\d+", lambda match: str(first + int(match[0])), name)


def _describe(overrides: tuple[str, ...]) -> Described:
    state, _ = build_stage(*SIZE, *overrides)
    table = RankOperators(state).table
    chunk = state.model[0]
    assert table.full_bytes.shape == table.compute_bytes.shape == (stage_group().size(), len(table.operators))
    return Described(
        stage=parallel_state.get_pipeline_model_parallel_rank(),
        operators=[str(operator) for operator in table.operators],
        full_bytes=int(table.full_bytes.sum()),
        compute_bytes=int(table.compute_bytes.sum()),
        sizes={_global_name(name): parameter.numel() for name, parameter in chunk.named_parameters()},
        buffer_bytes=sum(buffer.nbytes for _, buffer in chunk.named_buffers()),
    )


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_table_lists_every_operator_and_counts_every_parameter_once(shape: Shape) -> None:
    ranks = run_ranks(shape.world_size, _describe, shape.overrides)
    for stage, operators in enumerate(shape.stages):
        described = [rank for rank in ranks if rank.stage == stage]
        assert len(described) == shape.world_size // len(shape.stages)
        num_parameters = sum({name: size for rank in described for name, size in rank.sizes.items()}.values())
        buffer_bytes = sum(rank.buffer_bytes for rank in described)
        for rank in described:
            assert rank.operators == operators
            assert rank.full_bytes == shape.full_bytes * num_parameters + buffer_bytes
            assert rank.compute_bytes == shape.compute_bytes * num_parameters + buffer_bytes


# --- who owns what


@dataclass(frozen=True, kw_only=True)
class Owned:
    """A piece that a rank takes: its range in a whole of `size` elements, and the values in it."""

    stage: int
    key: PartKey
    start: int
    end: int
    size: int
    values: set[float]


def _expert_number(name: str, num_local_layers: int) -> int | None:
    """Return a number for an expert's global layer and id, from the parameter's name and the place of this rank."""
    match = re.search(r"decoder\.layers\.(\d+)\..*local_experts\.(\d+)\.", _global_name(name))
    if match is None:
        return None
    layer = int(match[1]) + num_local_layers * parallel_state.get_pipeline_model_parallel_rank()
    return 1 + layer * NUM_EXPERTS + int(match[2])  # up to 16: bf16 holds it exactly


def _owned_after_numbering(overrides: tuple[str, ...]) -> list[Owned]:
    state, _ = build_stage(*SIZE, *overrides)
    num_local_layers = NUM_LAYERS // parallel_state.get_pipeline_model_parallel_world_size()
    sizes: dict[str, int] = {}
    for name, parameter in bare_model(state.model[0]).named_parameters():
        sizes[f"model0.{name}"] = parameter.numel()
        number = _expert_number(name, num_local_layers)
        parameter.data.fill_(0 if number is None else number)
    cast("Any", state.optimizer).reload_model_params()
    operators = RankOperators(state)
    everything = range(len(operators.table.operators))
    pieces = [*operators.pieces(everything, ()), *operators.pieces((), everything)]
    stage = parallel_state.get_pipeline_model_parallel_rank()
    return [
        Owned(stage=stage, key=key, start=start, end=end, size=sizes[key.tensor], values=set(piece.flatten().tolist()))
        for key, piece, (start, end) in pieces
    ]


@pytest.mark.parametrize(
    ("world_size", "overrides"),
    [
        (4, EP2_DP2),
        (4, (*EP2_DP2, UNSHARDED)),
        (4, EP2_DP4),
        (4, (*EP2_DP4, UNSHARDED)),
        (3, ("parallel.dp=3", UNSHARDED, "precision=fp32")),  # 3 divides no parameter
    ],
    ids=str,
)
def test_every_expert_is_found_and_owned_exactly_once(world_size: int, overrides: tuple[str, ...]) -> None:
    owned = [piece for rank in run_ranks(world_size, _owned_after_numbering, overrides) for piece in rank]
    numbers = {f"layer {i} expert {j}": 1 + i * NUM_EXPERTS + j for i in range(NUM_LAYERS) for j in range(NUM_EXPERTS)}
    assert {piece.key.operator for piece in owned} >= numbers.keys()
    for piece in owned:
        if piece.key.role in (COMPUTE, MASTER) and piece.start < piece.end:
            assert piece.values == {numbers.get(piece.key.operator, 0)}, piece.key
    wholes: dict[tuple[int, PartKey], list[Owned]] = {}
    for piece in owned:
        wholes.setdefault((piece.stage, piece.key), []).append(piece)
    roles = {(stage, key.operator, key.tensor): set[str]() for stage, key in wholes}
    for (stage, key), pieces in wholes.items():
        roles[stage, key.operator, key.tensor].add(key.role)
        elements = [element for piece in pieces for element in range(piece.start, piece.end)]
        assert sorted(elements) == list(range(pieces[0].size)), key
    assert set(map(frozenset, roles.values())) == {frozenset({"compute", "master", "exp_avg", "exp_avg_sq"})}


def _shard() -> tuple[int, ...]:
    build_stage(*SIZE, *EP2_DP2)
    shard = shard_identity()
    return shard.global_rank, shard.pp_rank, shard.tp_rank, shard.ep_rank, shard.etp_rank, shard.dp_rank


def test_shard_identity_names_the_place_on_every_axis() -> None:
    assert run_ranks(4, _shard) == [(0, 0, 0, 0, 0, 0), (1, 0, 0, 1, 0, 1), (2, 1, 0, 0, 0, 0), (3, 1, 0, 1, 0, 1)]


# --- taking and putting back


def _trained(overrides: tuple[str, ...], num_iterations: int = 2) -> tuple[TrainingState, Trainer, RankOperators]:
    state, trainer = build_stage(*overrides)
    for iteration in range(1, num_iterations + 1):
        trainer.run_iteration(iteration)
    return state, trainer, RankOperators(state)


def _everything(operators: RankOperators) -> range:
    return range(len(operators.table.operators))


def _names(operators: RankOperators) -> set[str]:
    return {str(operator) for operator in operators.table.operators}


def _kept(pieces: list[Piece]) -> Parts:
    return {key: tensor.detach().clone() for key, tensor, _ in pieces}


def _held_by_operators(state: TrainingState) -> Tensors:
    """Return copies of the state without generators, schedule and loss scalers, which belong to no operator."""
    elsewhere = re.compile(r"rng\.|scheduler\.|optimizer\d+\.(scaler\.|\d+\.lr$)")
    return {name: tensor.clone() for name, tensor in named_state(state) if not elsewhere.match(name)}


def _differing(before: Tensors, after: Tensors) -> set[str]:
    assert before.keys() == after.keys()
    return {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}


def _differing_after_full_round_trip(overrides: tuple[str, ...]) -> tuple[set[str], set[str], set[str]]:
    """Return what the wipe changed, what differs after all came back, and all names."""
    state, _, operators = _trained(overrides)
    everything = _everything(operators)
    kept = _kept([*operators.pieces(everything, ()), *operators.buffer_pieces(everything)])
    before, adam_steps = _held_by_operators(state), operators.adam_steps()
    assert adam_steps == (2.0,) * len(state.inner_optimizers)
    StateWiper(state).wipe()
    wiped = _differing(before, _held_by_operators(state))
    operators.load(kept, _names(operators), (), adam_steps)
    assert operators.adam_steps() == adam_steps
    return wiped, _differing(before, _held_by_operators(state)), set(before)


@pytest.mark.parametrize(
    "overrides",
    [
        (*EP2_DP2, *BIAS),
        EP2_DP4,
        (*EP2_DP4, UNSHARDED, *BIAS),
        (*EP2_DP4, UNSHARDED, "precision=fp32"),
        (*EP2_DP4, "precision=fp32"),
        (*EP2_DP2, "precision=fp16", "precision.initial_loss_scale=1024.0", "model.tied_embeddings=true"),
    ],
    ids=", ".join,
)
def test_full_pieces_bring_everything_back_on_every_rank(overrides: tuple[str, ...]) -> None:
    for wiped, differing, names in run_ranks(4, _differing_after_full_round_trip, overrides):
        assert {name for name in names if not name.endswith("local_tokens_per_expert")} <= wiped
        assert differing == set()


def _step_counts_after_a_load_that_was_cut_off() -> set[float]:
    """Return those of all parameters two iterations and one more after a checkpoint's load came as far as its files."""
    state, trainer, operators = _trained(EP2_DP2)
    everything = _everything(operators)
    kept = _kept([*operators.pieces(everything, ()), *operators.buffer_pieces(everything)])
    adam_steps = operators.adam_steps()
    sharded_state(state, is_loading=True)
    operators.load(kept, _names(operators), (), adam_steps)
    trainer.run_iteration(3)
    return {float(tensor) for name, tensor in named_state(state) if name.endswith(".step")}


def test_step_counts_are_right_after_a_checkpoint_s_load_was_cut_off() -> None:
    assert run_ranks(4, _step_counts_after_a_load_that_was_cut_off) == [{3.0}] * 4


def _differing_after_compute_round_trip(overrides: tuple[str, ...]) -> tuple[set[str], set[str], bool]:
    """Return what differs after compute weights came back, all names, and whether this rank held pieces only."""
    state, _, operators = _trained((*overrides, *BIAS))
    everything = _everything(operators)
    kept = _kept([*operators.pieces((), everything), *operators.buffer_pieces(everything)])
    before = _held_by_operators(state)
    StateWiper(state).wipe()
    operators.load(kept, (), _names(operators), ())
    num_held = sum(tensor.numel() for key, tensor in kept.items() if key.role == COMPUTE)
    num_parameters = sum(parameter.numel() for parameter in state.model[0].parameters())
    return _differing(before, _held_by_operators(state)), set(before), num_held < num_parameters


@pytest.mark.parametrize("overrides", [EP2_DP4, (*EP2_DP4, UNSHARDED)], ids=", ".join)
def test_compute_pieces_bring_back_weights_and_buffers_alone(overrides: tuple[str, ...]) -> None:
    for differing, names, held_pieces_only in run_ranks(4, _differing_after_compute_round_trip, overrides):
        assert held_pieces_only
        assert differing == {name for name in names if name.startswith("optimizer")}


def _restored_by_a_mixed_load() -> tuple[set[str], set[str]]:
    """Load one expert whole, one gate's weights, nothing else; return what came back of the model, and of masters."""
    state, _, operators = _trained(("model.num_layers=1", "parallel.ep=1", *BIAS))
    everything = _everything(operators)
    full, compute = operators.pieces(everything, ()), operators.pieces((), everything)
    kept = _kept([*full, *compute, *operators.buffer_pieces(everything)])
    before = _held_by_operators(state)
    StateWiper(state).wipe()
    operators.load(kept, {"layer 0 expert 1"}, {"layer 0 gate"}, operators.adam_steps())
    after = _held_by_operators(state)
    same = {name for name in before if name.startswith("model") and torch.equal(before[name], after[name])}
    masters = {str(key) for key, now, _ in full if key.role == MASTER and torch.equal(kept[key], now)}
    return same, masters


def test_only_the_named_operators_are_loaded() -> None:
    ((weights, masters),) = run_ranks(1, _restored_by_a_mixed_load)
    expert = "decoder.layers.0.mlp.experts.local_experts.1"
    gate = "decoder.layers.0.mlp.router"
    prefix = "model0.module.module."
    assert weights == {
        f"{prefix}{expert}.linear_fc1.weight",
        f"{prefix}{expert}.linear_fc2.weight",
        f"{prefix}{gate}.weight",
        f"{prefix}{gate}.expert_bias",
        f"{prefix}{gate}.local_tokens_per_expert",
    }
    assert masters == {
        f"master of model0.{expert}.linear_fc1.weight (layer 0 expert 1)",
        f"master of model0.{expert}.linear_fc2.weight (layer 0 expert 1)",
    }


def _without(parts: Parts, key: PartKey) -> Parts:
    return {other: tensor for other, tensor in parts.items() if other != key}


def _too_short(parts: Parts, key: PartKey) -> Parts:
    return parts | {key: parts[key].view(-1)[:-1]}


def _of_another_type(parts: Parts, key: PartKey) -> Parts:
    return parts | {key: parts[key].to(torch.float64)}


def _refusals() -> list[tuple[str, str]]:
    """Return, for each damage to each role's first part, the part's name and what the error says."""
    _, _, operators = _trained(BIAS, num_iterations=0)
    everything = _everything(operators)
    buffer_pieces = operators.buffer_pieces(everything)
    full = _kept([*operators.pieces(everything, ()), *buffer_pieces])
    compute = _kept([*operators.pieces((), everything), *buffer_pieces])
    names = _names(operators)
    found: list[tuple[str, str]] = []
    for damage in (_without, _too_short, _of_another_type):
        for role in ("master", "exp_avg", "exp_avg_sq", BUFFER):
            key = next(key for key in full if key.role == role)
            with pytest.raises(CheckpointLoadError) as error:
                operators.load(damage(full, key), names, (), operators.adam_steps())
            found.append((str(key), str(error.value)))
        key = next(key for key in compute if key.role == COMPUTE)
        with pytest.raises(CheckpointLoadError) as error:
            operators.load(damage(compute, key), (), names, ())
        found.append((str(key), str(error.value)))
    return found


def test_a_missing_or_unfitting_part_is_refused_by_name() -> None:
    (refusals,) = run_ranks(1, _refusals)
    assert len(refusals) == 15
    for key, message in refusals:
        assert message.startswith(f"{key}: got "), message
    assert sum(": got nothing, wanted " in message for _, message in refusals) == 5


# --- freezing


def _with_gradient(state: TrainingState, trainer: Trainer, operators: RankOperators) -> dict[str, bool]:
    """Return which parameters gathered a gradient, by operator and name."""
    clear_gradients(state)
    trainer._runner.train_on(1)
    return {
        f"{owned.operator}: {owned.name.rpartition('.mlp.')[2]}": bool(
            cast("Any", owned.parameter).main_grad.count_nonzero() > 0
        )
        for owned in operators.parameters
    }


def _frozen_and_not() -> tuple[dict[str, bool], ...]:
    state, trainer, operators = _trained(("parallel.pp=1", "parallel.ep=1", "train.global_batch_size=4"), 0)
    some = {"embedding", "layer 0", "layer 0 expert 1", "layer 1 gate", "output"}
    found: list[dict[str, bool]] = []
    for frozen in (some, _names(operators), set[str]()):
        operators.freeze(frozen)
        found.append(_with_gradient(state, trainer, operators))
    operators.freeze(some)
    operators.freeze(())
    found.append(_with_gradient(state, trainer, operators))
    cast("Any", state.model[0]).ddp_config.overlap_grad_reduce = True
    operators.freeze(some)
    found.append({str(owned.operator): owned.parameter.requires_grad for owned in operators.parameters})
    return tuple(found)


def test_frozen_operators_get_no_gradient() -> None:
    ((some, everything, nothing, undone, overlapped),) = run_ranks(1, _frozen_and_not)
    frozen = {"layer 0", "layer 0 expert 1", "layer 1 gate", "output"}
    assert some == {name: name.partition(":")[0] not in frozen for name in some}
    assert everything == {name: name.startswith("embedding:") for name in everything}
    assert all(nothing.values())
    assert all(undone.values())
    assert all(overlapped.values())


# --- names


class _Mlp(torch.nn.Module):
    def __init__(self, local_expert_indices: list[int]) -> None:
        super().__init__()
        self.local_expert_indices = local_expert_indices


class _Layer(torch.nn.Module):
    def __init__(self, layer_number: int, local_expert_indices: list[int]) -> None:
        super().__init__()
        self.layer_number = layer_number
        self.mlp = _Mlp(local_expert_indices)


class _Mtp(torch.nn.Module):
    """A multi-token prediction layer, with the name that Megatron's version gives to the layer inside."""

    def __init__(self, inner_name: str) -> None:
        super().__init__()
        self.add_module(inner_name, _Layer(5, [2, 3]))


def _names_only(inner_name: str = "transformer_layer") -> torch.nn.Module:
    """Return the second stage of a GPT as far as `locate` looks at it: layers 2 and 3, experts 2 and 3, MTP modules."""
    model = torch.nn.Module()
    model.decoder = torch.nn.Module()
    model.decoder.layers = torch.nn.ModuleList([_Layer(3, [2, 3]), _Layer(4, [2, 3])])
    model.mtp = torch.nn.Module()
    model.mtp.layers = torch.nn.ModuleList([_Mtp(inner_name), _Mtp(inner_name)])
    return model


@pytest.mark.parametrize(
    ("name", "operator"),
    [
        ("embedding.word_embeddings.weight", "embedding"),
        ("embedding.position_embeddings.weight", "embedding"),
        ("rotary_pos_emb.inv_freq", "embedding"),
        ("decoder.layers.0.self_attention.linear_qkv.weight", "layer 2"),
        ("decoder.layers.1.mlp.linear_fc1.weight", "layer 3"),
        ("decoder.layers.1.mlp.shared_experts.linear_fc1.weight", "layer 3"),
        ("decoder.layers.1.mlp.shared_experts.gate_weight", "layer 3"),
        ("decoder.layers.0.mlp.router.weight", "layer 2 gate"),
        ("decoder.layers.0.mlp.router.expert_bias", "layer 2 gate"),
        ("decoder.layers.1.mlp.experts.local_experts.1.linear_fc2.weight", "layer 3 expert 3"),
        ("decoder.layers.0.mlp.experts.linear_fc1.weight0", "layer 2 expert 2"),
        ("decoder.layers.1.mlp.experts.linear_fc2.weight1", "layer 3 expert 3"),
        ("decoder.layers.1.mlp.experts.linear_fc2.bias0", "layer 3 expert 2"),
        ("decoder.final_layernorm.weight", "final norm"),
        ("output_layer.weight", "output"),
        ("mtp.layers.1.eh_proj.weight", "mtp 1 layer 0"),
        ("mtp.layers.0.enorm.weight", "mtp 0 layer 0"),
        ("mtp.layers.0.final_layernorm.weight", "mtp 0 layer 0"),
        ("mtp.layers.0.{inner}.self_attention.linear_proj.weight", "mtp 0 layer 0"),
        ("mtp.layers.0.{inner}.mlp.router.weight", "mtp 0 layer 0 gate"),
        ("mtp.layers.1.{inner}.mlp.experts.local_experts.0.linear_fc1.weight", "mtp 1 layer 0 expert 2"),
        ("mtp.layers.1.{inner}.mlp.experts.linear_fc1.weight1", "mtp 1 layer 0 expert 3"),
    ],
)
@pytest.mark.parametrize("inner_name", ["transformer_layer", "mtp_model_layer"])
def test_a_name_is_at_its_operator(name: str, operator: str, inner_name: str) -> None:
    assert str(locate(_names_only(inner_name), name.format(inner=inner_name))) == operator


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("decoder.layers.0.mlp.experts.weight1", r"'mlp\.experts\.weight1' holds several experts"),
        ("decoder.layers.0.mlp.experts.weight2", "one weight an expert"),
        ("decoder.layers.0.mlp.experts.linear_fc1.weight", "one weight an expert"),
        ("encoder.layers.0.mlp.linear_fc1.weight", r"'encoder\.layers\.0\.mlp\.linear_fc1\.weight' is in no operator"),
        ("decoder.position.weight", "is in no operator"),
        ("vision_model.weight", "is in no operator"),
    ],
)
def test_what_is_in_no_operator_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        locate(_names_only(), name)


def test_front_to_back_is_the_order_of_the_forward_pass() -> None:
    kinds = OperatorKind
    block = OperatorId(kind=kinds.BLOCK, layer=0)
    gate = OperatorId(kind=kinds.GATE, layer=0)
    experts = [OperatorId(kind=kinds.EXPERT, layer=0, expert=i) for i in (0, 2, 10)]
    ordered = [
        OperatorId(kind=kinds.EMBEDDING),
        block,
        gate,
        *experts,
        OperatorId(kind=kinds.BLOCK, layer=1),
        OperatorId(kind=kinds.GATE, layer=1),
        OperatorId(kind=kinds.EXPERT, layer=1, expert=0),
        OperatorId(kind=kinds.BLOCK, layer=10),
        OperatorId(kind=kinds.FINAL_NORM),
        OperatorId(kind=kinds.BLOCK, layer=0, mtp_depth=0),
        OperatorId(kind=kinds.GATE, layer=0, mtp_depth=0),
        OperatorId(kind=kinds.EXPERT, layer=0, expert=1, mtp_depth=0),
        OperatorId(kind=kinds.BLOCK, layer=0, mtp_depth=1),
        OperatorId(kind=kinds.OUTPUT),
    ]
    scattered = sorted(ordered, key=str)
    assert scattered != ordered
    assert sorted(scattered, key=front_to_back) == ordered
    assert len({front_to_back(operator) for operator in ordered}) == len(ordered)


def _mtp_operators() -> tuple[set[str], set[str]]:
    """Return the operators of Megatron's own GPT with one multi-token prediction module: of MTP, and all others."""
    settings = compose_settings(fast("model.num_layers=1"))
    launch = read_launch()
    layout = fit_layout(settings.parallel, launch.world_size, num_experts=settings.model.num_experts)
    join_job(launch, on_gpu=choose_device(launch, deterministic=True), store=rank_store())
    form_groups(layout, settings.train.seed)
    config = transformer_config(settings, layout)
    config.mtp_num_layers = 1
    layers = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    model = GPTModel(
        config,
        cast("Any", layers),
        vocab_size=256,
        max_sequence_length=16,
        mtp_block_spec=cast("Any", get_gpt_mtp_block_spec(config, layers, use_transformer_engine=False)),
        position_embedding_type="rope",
    )
    found = [(name, str(locate(model, name))) for name, _ in [*model.named_parameters(), *model.named_buffers()]]
    mtp = {operator for name, operator in found if name.startswith("mtp.")}
    return mtp, {operator for name, operator in found if not name.startswith("mtp.")}


def test_every_parameter_of_megatrons_mtp_module_is_located() -> None:
    ((mtp, others),) = run_ranks(1, _mtp_operators)
    assert mtp == {f"mtp 0 {name}" for name in _moe_layer(0)}
    assert others == {"embedding", *_moe_layer(0), "final norm", "output"}
