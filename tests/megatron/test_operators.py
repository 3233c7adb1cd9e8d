"""Operators have a position in the whole model, and each byte has exactly one owner.

Loaded pieces restore the whole state.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, cast

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_mtp_block_spec,
)

import launcher.model
from launcher.model import transformer_config
from moe_ckpt.errors import CheckpointLoadError, ConfigError
from moe_ckpt.megatron.fp8_parameters import is_fp8_parameter
from moe_ckpt.megatron.groups import shard_identity, stage_group
from moe_ckpt.megatron.operator_names import bare_model, front_to_back, locate
from moe_ckpt.megatron.operators import RankOperators
from moe_ckpt.megatron.state import TrainingState, named_state, sharded_state
from moe_ckpt.megatron.state_wiper import StateWiper
from moe_ckpt.megatron.step import apply_update, clear_gradients, unscale_gradients
from moe_ckpt.snapshot.codec import BUFFER, COMPUTE, MASTER, MOMENTS, PartKey
from moe_ckpt.types import OperatorId, OperatorKind, ReadyGradients
from tests.harness.gloo.ranks import run_ranks
from tests.megatron.stage import (
    FP16,
    Tensors,
    build_stage,
    compute_parts,
    copied,
    differing,
    everything,
    full_parts,
    join,
    names_of,
    stage_number,
    trained_stage,
)
from tests.scenarios import BIAS, TIED, UNSHARDED

NUM_LAYERS, NUM_EXPERTS = 4, 4
SIZE = (f"model.num_layers={NUM_LAYERS}", f"model.num_experts={NUM_EXPERTS}")
EP2_DP2 = ("parallel.pp=2", "parallel.ep=2", "parallel.dp=2")
# each expert is on two ranks
EP2_DP4 = ("parallel.pp=1", "parallel.ep=2", "parallel.dp=4")
FP8_PARAMETERS = ("precision=fp8_fp32_fp32", "precision.fp8_param_gather=true")


@dataclass(frozen=True)
class Shape:
    """A job, and the operators that its stages must have."""

    world_size: int
    """Number of ranks."""

    overrides: tuple[str, ...]
    """Overrides of the settings."""

    stages: tuple[list[str], ...]
    """Names of the operators of each stage."""

    compute_bytes: int = 2
    """Bytes of one element of the compute weights."""


class Owned(NamedTuple):
    """A piece that a rank takes."""

    key: PartKey
    """Key of the piece."""

    start: int
    """Index of the piece's first element in the flattened whole."""

    end: int
    """Index after the piece's last element."""

    size: int
    """Number of elements of the whole."""

    values: set[float]
    """Distinct values in the piece."""


@dataclass(frozen=True, kw_only=True)
class Described:
    """A rank's position, the table of the rank's stage, and the rank's tensors."""

    stage: int
    """Stage of the rank."""

    shard: tuple[int, ...]
    """Global rank, and rank on each axis: pp, tp, ep, etp, dp."""

    operators: list[str]
    """Names of the operators in the table."""

    full_bytes: int
    """Bytes of the whole state in the table, over all ranks and operators."""

    compute_bytes: int
    """Bytes of the compute weights in the table, over all ranks and operators."""

    sizes: dict[str, int]
    """Number of elements of each parameter of this rank, by name with the global number
    of the expert. Counted without the table.
    """

    buffer_bytes: int
    """Bytes of this rank's buffers. Counted without the table."""

    owned: list[Owned]
    """Pieces that this rank takes."""


def _moe_layers(*layers: int) -> list[str]:
    parts = ["", " gate", *(f" expert {i}" for i in range(NUM_EXPERTS))]
    return [f"layer {layer}{part}" for layer in layers for part in parts]


ONE_STAGE = (["embedding", *_moe_layers(0, 1, 2, 3), "final norm", "output"],)
TWO_STAGES = (
    ["embedding", *_moe_layers(0, 1)],
    [*_moe_layers(2, 3), "final norm", "output"],
)
SHAPES = {
    "experts on 2 of 4 ranks": Shape(4, (*EP2_DP2, *BIAS), TWO_STAGES),
    "experts on 2 of 4 ranks, not sharded": Shape(
        4, (*EP2_DP2, *UNSHARDED), TWO_STAGES
    ),
    "experts on 4 of 4 ranks": Shape(4, EP2_DP4, ONE_STAGE),
    "experts on 4 of 4 ranks, not sharded": Shape(
        4, (*EP2_DP4, *UNSHARDED, "precision=fp16"), ONE_STAGE
    ),
    "3 ranks, which divide no parameter": Shape(
        3, ("parallel.dp=3", *UNSHARDED, "precision=fp32"), ONE_STAGE, 4
    ),
    "a dense layer, shared experts": Shape(
        2,
        (
            "parallel.pp=2",
            "model.num_dense_layers=1",
            "model.shared_expert_ffn_hidden_size=32",
            "precision=fp32",
        ),
        (["embedding", "layer 0", *_moe_layers(1)], TWO_STAGES[1]),
        4,
    ),
    "tied embeddings on two stages": Shape(
        2, ("parallel.pp=2", *TIED, "precision=fp16"), TWO_STAGES
    ),
    "tied embeddings on one stage": Shape(1, TIED, (ONE_STAGE[0][:-1],)),
    "dense, learned positions": Shape(
        1,
        ("model.num_experts=0", "model.position_embedding=learned"),
        (
            [
                "embedding",
                "layer 0",
                "layer 1",
                "layer 2",
                "layer 3",
                "final norm",
                "output",
            ],
        ),
    ),
}
EXPERT_NUMBERS = {
    # at most 16, which bf16 holds exactly
    f"layer {layer} expert {expert}": 1 + layer * NUM_EXPERTS + expert
    for layer in range(NUM_LAYERS)
    for expert in range(NUM_EXPERTS)
}


def _global_name(name: str) -> str:
    """Return a parameter's name with the global number of its expert."""
    local = NUM_EXPERTS // parallel_state.get_expert_model_parallel_world_size()
    first = local * parallel_state.get_expert_model_parallel_rank()
    return re.sub(
        r"(?<=local_experts\.)\d+", lambda match: str(first + int(match[0])), name
    )


def _expert_number(name: str) -> int:
    """Return the number of a parameter's expert; 0 for other operators.

    The number follows from the name and the position of this rank.
    """
    match = re.search(
        r"decoder\.layers\.(\d+)\..*local_experts\.(\d+)\.", _global_name(name)
    )
    num_local_layers = (
        NUM_LAYERS // parallel_state.get_pipeline_model_parallel_world_size()
    )
    first = num_local_layers * stage_number()
    return (
        EXPERT_NUMBERS[f"layer {first + int(match[1])} expert {match[2]}"]
        if match
        else 0
    )


def _describe(overrides: tuple[str, ...]) -> Described:
    """Describe a stage whose parameters have the number of their expert as values."""
    state, _ = build_stage(*SIZE, *overrides)
    chunk = state.model[0]
    sizes: dict[str, int] = {}
    for name, parameter in bare_model(chunk).named_parameters():
        sizes[name] = parameter.numel()
        parameter.data.fill_(_expert_number(name))
    cast("Any", state.optimizer).reload_model_params()
    operators, shard = RankOperators(state), shard_identity()
    table, each = operators.table, everything(operators)
    assert (
        table.full_bytes.shape
        == table.compute_bytes.shape
        == (stage_group().size(), len(table.operators))
    )
    return Described(
        stage=stage_number(),
        shard=(
            shard.global_rank,
            shard.pp_rank,
            shard.tp_rank,
            shard.ep_rank,
            shard.etp_rank,
            shard.dp_rank,
        ),
        operators=[str(operator) for operator in table.operators],
        full_bytes=int(table.full_bytes.sum()),
        compute_bytes=int(table.compute_bytes.sum()),
        sizes={_global_name(name): size for name, size in sizes.items()},
        buffer_bytes=sum(buffer.nbytes for _, buffer in chunk.named_buffers()),
        owned=[
            Owned(
                key,
                start,
                end,
                sizes[key.tensor.removeprefix("model0.")],
                set(piece.flatten().tolist()),
            )
            for key, piece, (start, end) in [
                *operators.pieces(each, ()),
                *operators.pieces((), each),
            ]
        ],
    )


@cache
def _described(name: str) -> list[Described]:
    return run_ranks(SHAPES[name].world_size, _describe, SHAPES[name].overrides)


@pytest.fixture(scope="module", params=SHAPES)
def described(request: pytest.FixtureRequest) -> tuple[Shape, list[Described]]:
    return SHAPES[request.param], _described(request.param)


def test_table_lists_every_operator_and_counts_every_parameter_once(
    described: tuple[Shape, list[Described]],
) -> None:
    shape, ranks = described
    for stage, operators in enumerate(shape.stages):
        in_stage = [rank for rank in ranks if rank.stage == stage]
        assert len(in_stage) == shape.world_size // len(shape.stages)
        num_parameters = sum(
            {
                name: size for rank in in_stage for name, size in rank.sizes.items()
            }.values()
        )
        buffer_bytes = sum(rank.buffer_bytes for rank in in_stage)
        for rank in in_stage:
            assert rank.operators == operators
            assert rank.full_bytes == 12 * num_parameters + buffer_bytes
            assert (
                rank.compute_bytes
                == shape.compute_bytes * num_parameters + buffer_bytes
            )


def test_every_expert_is_found_and_owned_exactly_once(
    described: tuple[Shape, list[Described]],
) -> None:
    shape, ranks = described
    for stage, operators in enumerate(shape.stages):
        wholes: dict[PartKey, list[Owned]] = {}
        for piece in (
            piece for rank in ranks if rank.stage == stage for piece in rank.owned
        ):
            wholes.setdefault(piece.key, []).append(piece)
        assert {key.operator for key in wholes} == set(operators)
        roles = {(key.operator, key.tensor): set[str]() for key in wholes}
        for key, pieces in wholes.items():
            roles[key.operator, key.tensor].add(key.role)
            elements = [
                element for piece in pieces for element in range(piece.start, piece.end)
            ]
            assert sorted(elements) == list(range(pieces[0].size)), key
            if key.role in (COMPUTE, MASTER):
                assert set().union(*(piece.values for piece in pieces)) == {
                    EXPERT_NUMBERS.get(key.operator, 0)
                }, key
        assert all(found == {COMPUTE, MASTER, *MOMENTS} for found in roles.values())


def test_shard_identity_names_the_position_on_every_axis() -> None:
    shards = [rank.shard for rank in _described("experts on 2 of 4 ranks")]
    assert shards == [
        (0, 0, 0, 0, 0, 0),
        (1, 0, 0, 1, 0, 1),
        (2, 1, 0, 0, 0, 0),
        (3, 1, 0, 1, 0, 1),
    ]


def _held_by_operators(state: TrainingState) -> Tensors:
    """Return copies of all tensors that belong to operators.

    Generators, schedule and loss scalers belong to no operator.
    """
    elsewhere = re.compile(r"rng\.|scheduler\.|optimizer\d+\.(scaler\.|\d+\.lr$)")
    held = {
        name: tensor.clone()
        for name, tensor in named_state(state)
        if not elsewhere.match(name)
    }
    return held | {
        f"{name}.computed": weights.clone() for name, weights in _fp8_values(state)
    }


def _fp8_values(state: TrainingState) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the values of FP8 parameters that forward passes multiply.

    An FP8 parameter keeps a copy, which has to follow payloads and scales.
    """
    for name, parameter in state.model[0].named_parameters():
        if is_fp8_parameter(parameter):
            yield name, cast("Any", parameter).dequantize()


def _make_round_trips(overrides: tuple[str, ...]) -> None:
    """Wipe the state and load full pieces; then do the same with compute pieces."""
    state, _ = trained_stage(*overrides, iterations=2)
    operators = RankOperators(state)
    full, compute = full_parts(operators), compute_parts(operators)
    before, adam_steps = _held_by_operators(state), operators.adam_steps()
    assert adam_steps == (2.0,) * len(state.inner_optimizers)
    assert (COMPUTE in {key.role for key in full}) == (
        "precision.fp8_recipe=delayed" in overrides
    )
    StateWiper(state).wipe()
    kept_zero = {
        name
        for name in before
        if name.endswith(("local_tokens_per_expert", ".amax_history"))
    }
    assert before.keys() - differing(before, _held_by_operators(state)) <= kept_zero
    operators.load(full, names_of(operators), (), adam_steps)
    assert operators.adam_steps() == adam_steps
    assert differing(before, _held_by_operators(state)) == set()
    StateWiper(state).wipe()
    operators.load(compute, (), names_of(operators), ())
    masters_are_weights = "precision=fp32" in overrides
    lost = (
        ".exp_avg",
        ".exp_avg_sq",
        ".step",
        *(() if masters_are_weights else (".master",)),
    )
    assert differing(before, _held_by_operators(state)) == {
        name for name in before if name.endswith(lost)
    }
    num_held = sum(
        tensor.numel() for key, tensor in compute.items() if key.role == COMPUTE
    )
    assert num_held < sum(
        parameter.numel() for parameter in state.model[0].parameters()
    ), "it held pieces only"


@pytest.mark.parametrize(
    "overrides",
    [
        (*EP2_DP2, *BIAS),
        (*EP2_DP4, *BIAS),
        (*EP2_DP4, *UNSHARDED, *BIAS),
        (*EP2_DP4, *UNSHARDED, "precision=fp32"),
        (*EP2_DP4, *FP8_PARAMETERS, "precision.fp8_recipe=blockwise"),
        (*EP2_DP4, *FP8_PARAMETERS, "precision.fp8_recipe=delayed"),
        pytest.param((*EP2_DP4, *FP8_PARAMETERS), marks=pytest.mark.full),
        pytest.param(
            (*EP2_DP4, "precision=fp8_fp32_fp32", "precision.fp8_recipe=blockwise"),
            marks=pytest.mark.full,
        ),
        (*EP2_DP4, "precision=fp32"),
        (*EP2_DP2, *FP16, *TIED),
    ],
    ids=", ".join,
)
def test_full_pieces_bring_everything_back_on_every_rank(
    overrides: tuple[str, ...],
) -> None:
    """Compute pieces restore only weights and buffers."""
    run_ranks(4, _make_round_trips, overrides)


def _step_counts_after_a_load_that_was_cut_off() -> set[float]:
    """Train two iterations, cut off a checkpoint's load, and train one iteration.

    The load is cut off before the checkpoint's files are read. Afterwards the state
    from before the load is loaded in place of the checkpoint.

    Returns:
        The distinct step counts of all parameters.
    """
    state, worker = trained_stage("parallel.ep=2", "parallel.dp=2", iterations=2)
    operators = RankOperators(state)
    kept, adam_steps = full_parts(operators), operators.adam_steps()
    sharded_state(state, is_loading=True)
    operators.load(kept, names_of(operators), (), adam_steps)
    worker.run_iteration(3)
    return {
        float(tensor) for name, tensor in named_state(state) if name.endswith(".step")
    }


def test_step_counts_are_right_after_a_checkpoint_s_load_was_cut_off() -> None:
    assert run_ranks(2, _step_counts_after_a_load_that_was_cut_off) == [{3.0}] * 2


def _restored_by_a_mixed_load() -> tuple[set[str], set[str]]:
    """Load one expert whole and one gate's weights into a wiped state.

    Returns:
        The names of the model's tensors that were restored, and of restored masters.
    """
    state, _ = trained_stage("model.num_layers=1", *BIAS, iterations=2)
    operators = RankOperators(state)
    kept = full_parts(operators) | compute_parts(operators)
    before = _held_by_operators(state)
    StateWiper(state).wipe()
    operators.load(kept, {"layer 0 expert 1"}, {"layer 0 gate"}, operators.adam_steps())
    same = before.keys() - differing(before, _held_by_operators(state))
    now = copied(operators.pieces(everything(operators), ()))
    masters = {
        str(key)
        for key, tensor in now.items()
        if key.role == MASTER and torch.equal(kept[key], tensor)
    }
    return {name for name in same if name.startswith("model")}, masters


def test_only_the_named_operators_are_loaded() -> None:
    ((weights, masters),) = run_ranks(1, _restored_by_a_mixed_load)
    expert = "decoder.layers.0.mlp.experts.local_experts.1"
    gate = "decoder.layers.0.mlp.router"
    loaded = {f"{expert}.linear_fc1.weight", f"{expert}.linear_fc2.weight"}
    in_gate = {
        f"{gate}.weight",
        f"{gate}.expert_bias",
        f"{gate}.local_tokens_per_expert",
    }
    assert weights == {f"model0.module.module.{name}" for name in loaded | in_gate}
    assert masters == {f"master of model0.{name} (layer 0 expert 1)" for name in loaded}


def _types_of_biases_before_and_after_going_back() -> list[torch.dtype]:
    """Return the dtypes of a gate's bias at three points of training.

    The points are before the first pass, after the first iteration, and after going
    back to the first state.
    """
    state, worker = build_stage("model.num_layers=1", "precision=fp16", *BIAS)
    operators = RankOperators(state)
    first, adam_steps = full_parts(operators), operators.adam_steps()
    (bias,) = (each for each in operators.buffers if each.name.endswith("expert_bias"))
    types = [bias.buffer.dtype]
    worker.run_iteration(1)
    types.append(bias.buffer.dtype)
    operators.load(first, names_of(operators), (), adam_steps)
    return [*types, bias.buffer.dtype]


def test_a_trained_rank_goes_back_to_the_state_before_its_first_pass() -> None:
    """In the first pass, Megatron converts a gate's 16-bit bias to float32."""
    assert run_ranks(1, _types_of_biases_before_and_after_going_back) == [
        [torch.float16, torch.float32, torch.float16]
    ]


def _refusals() -> None:
    """Remove, shorten and cast the first part of each role; each load must fail."""
    state, _ = build_stage(*BIAS)
    operators = RankOperators(state)
    names, full, compute = (
        names_of(operators),
        full_parts(operators),
        compute_parts(operators),
    )
    as_full, as_compute = (names, (), operators.adam_steps()), ((), names, ())
    for role in (MASTER, *MOMENTS, BUFFER, COMPUTE):
        parts, arguments = (compute, as_compute) if role == COMPUTE else (full, as_full)
        key = next(key for key in parts if key.role == role)
        rest = {other: tensor for other, tensor in parts.items() if other != key}
        with pytest.raises(
            CheckpointLoadError, match=f"^{re.escape(str(key))}: got nothing, wanted "
        ):
            operators.load(rest, *arguments)
        for unfitting in (parts[key].view(-1)[:-1], parts[key].to(torch.float64)):
            with pytest.raises(
                CheckpointLoadError, match=f"^{re.escape(str(key))}: got (?!nothing)"
            ):
                operators.load(rest | {key: unfitting}, *arguments)


def test_a_missing_or_unfitting_part_is_refused_by_name() -> None:
    run_ranks(1, _refusals)


def _freeze() -> None:
    """Freeze some operators, all, none, and some again.

    Only embeddings accumulate gradients although they are frozen.
    """
    state, worker = build_stage("train.global_batch_size=4")
    operators = RankOperators(state)
    all_names, some = (
        names_of(operators),
        {"embedding", "layer 0", "layer 0 expert 1", "layer 1 gate", "output"},
    )
    for frozen in (some, all_names, set[str](), some, set[str]()):
        operators.freeze(frozen)
        clear_gradients(state)
        worker.passes.train_on(1)
        for owned in operators.parameters:
            has_gradient = bool(cast("Any", owned.parameter).main_grad.any())
            assert has_gradient == (
                str(owned.operator) not in frozen - {"embedding"}
            ), (owned.name, frozen)
    operators.freeze(some)
    _step_without_frozen(state, operators, some)
    cast("Any", state.model[0]).ddp_config.overlap_grad_reduce = True
    operators.freeze(some)
    assert all(owned.parameter.requires_grad for owned in operators.parameters), (
        "overlapping needs every gradient"
    )


def _step_without_frozen(
    state: TrainingState, operators: RankOperators, frozen: set[str]
) -> None:
    """Take a step from the gradients that are present.

    Frozen operators keep masters, moments and step counts.
    """
    before = optimizer_states(operators)
    unscale_gradients(state)
    operators.drop_frozen_gradients()
    apply_update(
        state,
        ReadyGradients(
            overflows=(False,) * len(state.inner_optimizers),
            total_norm=1.0,
            loss_scale=1.0,
        ),
    )
    after = optimizer_states(operators)
    for name, state_before in before.items():
        same = all(
            torch.equal(tensor, after[name][role])
            for role, tensor in state_before.items()
        )
        assert same == (name[0] in frozen), name


def optimizer_states(
    operators: RankOperators,
) -> dict[tuple[str, str], dict[str, torch.Tensor]]:
    return {
        (str(owned.operator), owned.name): {
            role: tensor.clone() for role, tensor in owned.optimizer_state().items()
        }
        for owned in operators.parameters
    }


def test_frozen_operators_get_no_gradient_and_no_update() -> None:
    run_ranks(1, _freeze)


def _module(**parts: Any) -> torch.nn.Module:
    """Return a module with these attributes and submodules."""
    module = torch.nn.Module()
    for name, part in parts.items():
        setattr(module, name, part)
    return module


def _layer(layer_number: int) -> torch.nn.Module:
    return _module(layer_number=layer_number, mlp=_module(local_expert_indices=[2, 3]))


def _names_only(inner_name: str = "transformer_layer") -> torch.nn.Module:
    """Return the second stage of a GPT, with only the parts that `locate` reads.

    The stage has layers 2 and 3, experts 2 and 3, and two modules of multi-token
    prediction (MTP).

    Args:
        inner_name: The name of the layer inside an MTP layer, which depends on
            Megatron's version.
    """
    mtp = [_module(**{inner_name: _layer(5)}) for _ in range(2)]
    return _module(
        decoder=_module(layers=torch.nn.ModuleList([_layer(3), _layer(4)])),
        mtp=_module(layers=torch.nn.ModuleList(mtp)),
    )


NAMES = {
    "embedding.word_embeddings.weight": "embedding",
    "embedding.position_embeddings.weight": "embedding",
    "rotary_pos_emb.inv_freq": "embedding",
    "decoder.layers.0.self_attention.linear_qkv.weight": "layer 2",
    "decoder.layers.1.mlp.linear_fc1.weight": "layer 3",
    "decoder.layers.1.mlp.shared_experts.linear_fc1.weight": "layer 3",
    "decoder.layers.1.mlp.shared_experts.gate_weight": "layer 3",
    "decoder.layers.0.mlp.router.weight": "layer 2 gate",
    "decoder.layers.0.mlp.router.expert_bias": "layer 2 gate",
    "decoder.layers.1.mlp.experts.local_experts.1.linear_fc2.weight": (
        "layer 3 expert 3"
    ),
    "decoder.layers.0.mlp.experts.linear_fc1.weight0": "layer 2 expert 2",
    "decoder.layers.1.mlp.experts.linear_fc2.weight1": "layer 3 expert 3",
    "decoder.layers.1.mlp.experts.linear_fc2.bias0": "layer 3 expert 2",
    "decoder.layers.0.self_attention.linear_qkv.scaling_fwd.scale": "layer 2",
    "decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.scaling_fwd.scale": (
        "layer 2 expert 3"
    ),
    # experts of a grouped layer share one tensor of scales
    "decoder.layers.0.mlp.experts.linear_fc1.scaling_fwd.scale": "layer 2",
    "decoder.final_layernorm.weight": "final norm",
    "output_layer.weight": "output",
    "mtp.layers.1.eh_proj.weight": "mtp 1 layer 0",
    "mtp.layers.0.enorm.weight": "mtp 0 layer 0",
    "mtp.layers.0.final_layernorm.weight": "mtp 0 layer 0",
    "mtp.layers.0.{inner}.self_attention.linear_proj.weight": "mtp 0 layer 0",
    "mtp.layers.0.{inner}.mlp.router.weight": "mtp 0 layer 0 gate",
    "mtp.layers.1.{inner}.mlp.experts.local_experts.0.linear_fc1.weight": (
        "mtp 1 layer 0 expert 2"
    ),
    "mtp.layers.1.{inner}.mlp.experts.linear_fc1.weight1": "mtp 1 layer 0 expert 3",
}


@pytest.mark.parametrize("inner_name", ["transformer_layer", "mtp_model_layer"])
def test_a_name_is_at_its_operator(inner_name: str) -> None:
    model = _names_only(inner_name)
    assert {
        name: str(locate(model, name.format(inner=inner_name))) for name in NAMES
    } == NAMES


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "decoder.layers.0.mlp.experts.weight1",
            r"'mlp\.experts\.weight1' holds several experts",
        ),
        ("decoder.layers.0.mlp.experts.weight2", "one weight an expert"),
        ("decoder.layers.0.mlp.experts.linear_fc1.weight", "one weight an expert"),
        (
            "encoder.layers.0.mlp.linear_fc1.weight",
            r"'encoder\.layers\.0\.mlp\.linear_fc1\.weight' is in no operator",
        ),
        ("decoder.position.weight", "is in no operator"),
        ("vision_model.weight", "is in no operator"),
    ],
)
def test_a_name_outside_of_all_operators_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        locate(_names_only(), name)


def _in_layer(
    layer: int, *experts: int, mtp_depth: int | None = None
) -> list[OperatorId]:
    kinds = [
        (OperatorKind.BLOCK, None),
        (OperatorKind.GATE, None),
        *((OperatorKind.EXPERT, i) for i in experts),
    ]
    return [
        OperatorId(kind=kind, layer=layer, expert=expert, mtp_depth=mtp_depth)
        for kind, expert in kinds
    ]


def test_front_to_back_is_the_order_of_the_forward_pass() -> None:
    decoder = [*_in_layer(0, 0, 2, 10), *_in_layer(1, 0), *_in_layer(10)]
    mtp = [*_in_layer(0, 1, mtp_depth=0), *_in_layer(0, mtp_depth=1)]
    embedding, norm, output = (
        OperatorId(kind=OperatorKind(name))
        for name in ("embedding", "final norm", "output")
    )
    ordered = [embedding, *decoder, norm, *mtp, output]
    scattered = sorted(ordered, key=str)
    assert scattered != ordered
    assert sorted(scattered, key=front_to_back) == ordered
    assert len({front_to_back(operator) for operator in ordered}) == len(ordered)


def _mtp_operators() -> tuple[set[str], set[str]]:
    """Return the operators of Megatron's own GPT with one MTP module.

    Returns:
        The operators of the MTP module, and all other operators.
    """
    config = transformer_config(*join("model.num_layers=1"))
    config.mtp_num_layers = 1
    layers: Any = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    mtp_block: Any = get_gpt_mtp_block_spec(
        config, layers, use_transformer_engine=False
    )
    model = GPTModel(
        config,
        layers,
        256,
        16,
        mtp_block_spec=mtp_block,
        position_embedding_type="rope",
    )
    names = [name for name, _ in [*model.named_parameters(), *model.named_buffers()]]
    mtp = {str(locate(model, name)) for name in names if name.startswith("mtp.")}
    return mtp, {
        str(locate(model, name)) for name in names if not name.startswith("mtp.")
    }


def test_every_parameter_of_megatrons_mtp_module_is_located() -> None:
    ((mtp, others),) = run_ranks(1, _mtp_operators)
    assert mtp == {f"mtp 0 {name}" for name in _moe_layers(0)}
    assert others == {"embedding", *_moe_layers(0), "final norm", "output"}


def _freeze_what_a_script_has_frozen() -> None:
    model = launcher.model.GPTModel

    def frozen(*arguments: Any, **options: Any) -> torch.nn.Module:
        stage = model(*arguments, **options)
        for name, parameter in stage.named_parameters():
            parameter.requires_grad_("experts" in name)
        return stage

    launcher.model.GPTModel = frozen
    state, _ = build_stage("parallel.pp=1")
    operators = RankOperators(state)
    before = {
        owned.name: owned.parameter.requires_grad for owned in operators.parameters
    }
    assert set(before.values()) == {True, False}
    for names in (set(names_of(operators)), set[str]()):
        operators.freeze(names)
        assert {
            owned.name: owned.parameter.requires_grad for owned in operators.parameters
        } == before


def test_parameters_that_a_script_has_frozen_stay_frozen() -> None:
    run_ranks(1, _freeze_what_a_script_has_frozen)
