"""Number formats of MoEvement's Table 7: a run with a lost state ends bit for bit.

The reference is the uninterrupted run. The digest covers payloads, scales and step
counts. Formats, policies and moments of a death are paired.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from allpairspy import AllPairs

from launcher.config import Settings, compose_settings
from launcher.run import run
from moe_ckpt.config import RECOVERIES
from moe_ckpt.engine.session import Session
from moe_ckpt.errors import ConfigError
from moe_ckpt.events import StateLost, StateResumed
from moe_ckpt.ports import TrainingHooks
from moe_ckpt.snapshot.codec import COMPUTE, EXP_AVG, EXP_AVG_SQ, MASTER, scale_of
from moe_ckpt.state_format import StateFormat
from moe_ckpt.types import Phase
from tests.harness.gloo.ranks import RankFailedError, rank_store, run_ranks
from tests.harness.jobs.campaign import Fault, Point, lose_nodes, survive
from tests.harness.jobs.references import outcome_of, uninterrupted
from tests.harness.jobs.training import Kill, events_of, fast, losing, train

E4M3 = torch.float8_e4m3fn
SCALED = (torch.float16, E4M3, torch.uint8)
PP2_DP2 = ("parallel.pp=2", "parallel.ep=2", "train.iterations=8")
TIED = "fp16_fp16_fp16 model.tied_embeddings=true"
REMAINDERS = (
    "bf16 precision.master=remainder precision.exp_avg=fp8 precision.exp_avg_sq=fp16"
)
GROUPED = "bf16 model.moe_grouped_gemm=true"
DELAYED = "fp8_fp16_fp8 precision.fp8_recipe=delayed precision.fp8_amax_history_len=3"
GROUPED_DELAYED = (
    "fp8_fp32_fp32 precision.fp8_recipe=delayed model.moe_grouped_gemm=true"
)
GROUPED_FP8 = "fp8_fp16_fp8 model.moe_grouped_gemm=true"
BLOCKWISE = "fp8_fp16_fp8 precision.fp8_recipe=blockwise"
FP8_PARAMETERS = "fp8_fp32_fp32 precision.fp8_param_gather=true"
FP8_PARAMETERS_IN_BLOCKS = (
    f"{FP8_PARAMETERS} precision.fp8_recipe=blockwise model.moe_grouped_gemm=true"
)
FP8_PARAMETERS_DELAYED = (
    f"{FP8_PARAMETERS} precision.fp8_recipe=delayed precision.fp8_amax_history_len=3"
)
FP8_PARAMETERS_AND_MOMENTS = (
    f"{FP8_PARAMETERS} precision.exp_avg=fp8 precision.exp_avg_sq=fp16"
)
FP8_STORED = (
    FP8_PARAMETERS,
    FP8_PARAMETERS_IN_BLOCKS,
    FP8_PARAMETERS_DELAYED,
    FP8_PARAMETERS_AND_MOMENTS,
)


def _full(*rows: str) -> list[Any]:
    return [pytest.param(row, marks=pytest.mark.full) for row in rows]


@pytest.mark.parametrize(
    "precision",
    [
        *("fp16_fp16_fp16", REMAINDERS, GROUPED_DELAYED),
        *_full(
            "fp8_fp32_fp32",
            DELAYED,
            "fp8_fp16_fp32",
            "fp8_fp16_fp8",
            "fp8_fp8_fp8",
            GROUPED,
            GROUPED_FP8,
        ),
        *_full(BLOCKWISE, *FP8_STORED),
    ],
)
@pytest.mark.parametrize("recovery", RECOVERIES)
def test_a_lost_state_is_rebuilt_in_every_format(
    recovery: str, precision: str, tmp_path: Path
) -> None:
    training = (*PP2_DP2, *f"precision={precision}".split(" "))
    result = train(
        4,
        tmp_path,
        *training,
        *losing((5, 0, "backward"), (6, 1, "step")),
        "ckpt.window=3",
        f"ckpt.recovery={recovery}",
    )
    assert len(events_of(tmp_path, StateLost, 0)) == 1
    assert outcome_of(tmp_path, result) == uninterrupted(4, *training)


@pytest.mark.parametrize("recovery", RECOVERIES)
def test_a_fault_after_an_evaluation_leaves_the_scales_of_a_run_without(
    recovery: str, tmp_path: Path
) -> None:
    """Evaluation passes note largest values, too.

    No recovery repeats an evaluation.
    """
    training = (
        "parallel.pp=2",
        "train.iterations=8",
        "precision=fp8_fp16_fp32",
        "precision.fp8_recipe=delayed",
    )
    evaluating = (*training, "train.eval_every_iters=2", "train.eval_batches=1")
    result = train(
        2,
        tmp_path,
        *evaluating,
        *losing((5, 0, "backward"), (7, 1, "step")),
        "ckpt.window=2",
        f"ckpt.recovery={recovery}",
    )
    assert len(events_of(tmp_path, StateLost, 0)) == 1
    assert outcome_of(tmp_path, result) == uninterrupted(2, *evaluating)


@pytest.mark.parametrize(
    "precision",
    [
        GROUPED_FP8,
        REMAINDERS,
        *_full("fp16_fp16_fp16", "fp8_fp16_fp8", GROUPED, GROUPED_DELAYED, *FP8_STORED),
    ],
)
def test_a_resumed_run_is_exact_in_every_format(precision: str, tmp_path: Path) -> None:
    training = (*PP2_DP2, *f"precision={precision}".split(" "))
    dense = ("ckpt=dense", "ckpt.every_iters=3", *training)
    with pytest.raises(RankFailedError, match="died"):
        train(
            4,
            tmp_path,
            *dense,
            kill=Kill(ranks=(0, 1, 2, 3), iteration=5, phase="start"),
        )
    result = train(4, tmp_path, *dense)
    assert [event.iteration for event in events_of(tmp_path, StateResumed)] == [3]
    assert outcome_of(tmp_path, result) == uninterrupted(4, *training)


FORMATS = [
    *(TIED, "fp8_fp32_fp32", "fp8_fp16_fp32", "fp8_fp16_fp8", "fp8_fp8_fp8"),
    *(
        REMAINDERS,
        DELAYED,
        GROUPED_FP8,
        FP8_PARAMETERS_IN_BLOCKS,
        FP8_PARAMETERS_DELAYED,
        FP8_PARAMETERS_AND_MOMENTS,
    ),
]
POLICIES: dict[str, tuple[str, ...]] = {
    "moevement": ("ckpt.window=2",),
    "gemini": ("ckpt.every_iters=3",),
    "checkfreq": ("ckpt.every_iters=3",),
    "moc": ("ckpt.k_snapshot=4", "ckpt.k_persist=4"),
    "moetion": ("ckpt.experts=4", "ckpt.remote_experts=4"),
}
"""Settings by policy.

Snapshots of moc and moetion hold all experts, so nothing is lost.
"""

MOMENTS = [Phase.BACKWARD, Phase.FORWARD, Phase.STEP, Phase.BETWEEN]
DEFAULT_ROWS = [[TIED, "gemini", Phase.BACKWARD]]
OTHER_ROWS = [
    list(row)
    for row in AllPairs(
        [FORMATS, list(POLICIES), MOMENTS], previously_tested=DEFAULT_ROWS
    )
]
AXES = (FORMATS, POLICIES, MOMENTS)


def test_every_pair_of_format_policy_and_moment_is_in_a_row() -> None:
    for one, other in itertools.combinations(range(len(AXES)), 2):
        pairs = {(row[one], row[other]) for row in [*DEFAULT_ROWS, *OTHER_ROWS]}
        assert pairs == set(itertools.product(AXES[one], AXES[other]))


@pytest.mark.parametrize(
    ("precision", "policy", "moment"),
    [
        *DEFAULT_ROWS,
        *(pytest.param(*row, marks=pytest.mark.full) for row in OTHER_ROWS),
    ],
)
def test_ranks_die_and_the_run_is_exact(
    precision: str, policy: str, moment: Phase, tmp_path: Path
) -> None:
    unknown: dict[str, Any] = {"replaying": None, "executed": None}
    lost: dict[str, Any] = {
        "kills": [3],
        "then": lose_nodes,
        "fetched": policy not in ("checkfreq", "moc"),
    }
    if policy == "checkfreq":
        lost["resumed"] = "local disk"
    faults = [
        Fault(
            name="a process", at=[Point(1, moment, 5)], back_to=range(2, 6), **unknown
        ),
        Fault(
            name="a node",
            at=[Point(0, Phase.REDUCE, 9)],
            back_to=range(2, 10),
            **unknown,
            **lost,
        ),
    ]
    training = ("train.iterations=11", *f"precision={precision}".split(" "))
    survive(tmp_path, faults, *training, ckpt=policy, settings=POLICIES[policy])


def test_a_checkpoint_of_another_format_is_refused_by_name(tmp_path: Path) -> None:
    training = (
        "ckpt=dense",
        "ckpt.every_iters=2",
        "train.iterations=2",
        "train.lr_decay_iters=4",
        "parallel.pp=2",
    )
    train(2, first := tmp_path / "first", *training, "precision=fp8_fp16_fp8")
    format_and_settings = (
        r"saved by model \w+ in FP8/FP16/FP8\+FP16, wanted model \w+\n   "
        r" precision.fp8: got False, wa"
    )
    with pytest.raises(RankFailedError, match=format_and_settings):
        train(
            2, tmp_path / "second", *training, "precision=bf16", f"train.resume={first}"
        )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("precision=fp8_fp16_fp8", "train.distributed_optimizer=false"),
            r"train\.distributed_optimizer: got False",
        ),
        (
            ("precision=fp16", "precision.fp8=true"),
            r"precision\.dtype: got 'fp16', wanted bf16 where precision\.fp8",
        ),
        (
            ("precision=fp32", "precision.master=remainder"),
            r"precision\.dtype: got 'fp32', wanted bf16 where prec",
        ),
        (
            ("precision.master=fp4",),
            r"precision\.master: got 'fp4', wanted one of fp32, fp16, remainder, fp8",
        ),
        (
            ("precision.fp8_recipe=mxfp8",),
            (
                r"precision\.fp8_recipe: got 'mxfp8', wanted one of tensorwise,"
                r" blockwise, de"
            ),
        ),
        (
            ("precision.fp8_param_gather=true",),
            r"precision\.fp8: got False, wanted true where precision\.fp8_param_gather",
        ),
        (
            ("precision=fp8_fp16_fp8", "precision.fp8_param_gather=true"),
            (
                r"precision\.master: got 'fp16', wanted fp32 where"
                r" precision\.fp8_param_gather=true"
            ),
        ),
        (
            (
                *FP8_PARAMETERS_AND_MOMENTS.replace(
                    "fp8_fp32", "precision=fp8_fp32", 1
                ).split(),
                "precision.fp8_recipe=delayed",
            ),
            (
                r"precision\.fp8_recipe: got 'delayed', wanted tensorwise or blockwise"
                r" where precision\.fp8_param_gather"
            ),
        ),
        (
            (
                "precision=fp8_fp32_fp32",
                "precision.fp8_param_gather=true",
                "train.distributed_optimizer=false",
            ),
            (
                r"train\.distributed_optimizer: got False, wanted true where"
                r" precision\.fp8_param_gather=true"
            ),
        ),
        (
            ("precision.fp8_amax_history_len=0",),
            r"precision\.fp8_amax_history_len: got 0, wanted at least 1",
        ),
        (
            (
                "precision=fp8_fp32_fp32",
                "precision.fp8_recipe=delayed",
                "train.recompute=full",
            ),
            (
                r"train\.recompute: got 'full', wanted none with"
                r" precision\.fp8_recipe=delayed"
            ),
        ),
        (
            ("precision.exp_avg=int8",),
            r"precision\.exp_avg: got 'int8', wanted one of fp32, bf16, fp16, fp8",
        ),
    ],
)
def test_a_format_that_cannot_be_is_one_error(
    overrides: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    with pytest.raises((RankFailedError, ConfigError), match=message):
        train(2, tmp_path, "ckpt=moevement", "train.iterations=2", *overrides)


# --- contents of a snapshot


def _parts_of_window(
    settings: Settings,
) -> list[list[tuple[str, str, torch.dtype, int]]]:
    """Return the parts of each slot of this rank's newest window.

    Returns:
        For each slot, the tensor, role, type and number of elements of each part.
    """
    sessions: list[TrainingHooks] = []
    run(
        settings,
        store=rank_store(),
        around_hooks=lambda hooks: sessions.append(hooks) or hooks,
    )
    (session,) = sessions
    assert isinstance(session, Session)
    assert session.in_memory is not None
    window = session.in_memory.parts.memory.snapshots.windows()[0]
    return [
        [
            (part.key.tensor, part.key.role, part.dtype, part.numel)
            for part in s.header.parts
        ]
        for s in window.snapshots
    ]


TORCH = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp8": E4M3,
}


@pytest.mark.parametrize(
    "precision",
    [
        *(
            "bf16",
            "fp32 train.distributed_optimizer=false",
            "fp16_fp16_fp16",
            "fp8_fp16_fp8",
        ),
        *_full("fp8_fp32_fp32", "fp8_fp16_fp32", "fp8_fp8_fp8", REMAINDERS),
        *_full(BLOCKWISE, FP8_PARAMETERS_IN_BLOCKS, FP8_PARAMETERS_AND_MOMENTS),
    ],
)
def test_a_slot_holds_the_bytes_of_the_formula(precision: str, tmp_path: Path) -> None:
    """Slot k holds its operators in full, and later operators as compute weights.

    The test compares numbers of elements. Scales take 4 bytes for each tensor.
    """
    overrides = (
        *PP2_DP2,
        *f"precision={precision}".split(" "),
        "ckpt=moevement",
        "ckpt.window=3",
    )
    settings = compose_settings((*fast(*overrides), f"run.dir={tmp_path}"))
    stored = settings.precision.state_format
    for slots in run_ranks(4, _parts_of_window, settings):
        taken = [
            {tensor: size for tensor, role, _, size in parts if role == MASTER}
            for parts in slots
        ]
        for index, parts in enumerate(slots):
            later = {
                tensor: size
                for others in taken[index + 1 :]
                for tensor, size in others.items()
            }
            compute = later if stored.derives_compute else later | taken[index]
            for role, sizes in (
                (MASTER, taken[index]),
                (EXP_AVG, taken[index]),
                (EXP_AVG_SQ, taken[index]),
                (COMPUTE, compute),
            ):
                found = {
                    tensor: size for tensor, of, _, size in parts if of == role and size
                }
                assert found == {
                    tensor: size for tensor, size in sizes.items() if size
                }, (role, index)
                scales = {tensor for tensor, of, _, _ in parts if of == scale_of(role)}
                dtypes = {
                    tensor: dtype
                    for tensor, of, dtype, size in parts
                    if of == role and size
                }
                assert set(dtypes.values()) <= _dtypes_of(
                    stored, role, settings.precision.dtype
                ), (role, dtypes)
                scaled = {
                    tensor
                    for tensor, dtype in dtypes.items()
                    if dtype in SCALED and (role != COMPUTE or dtype != torch.float16)
                }
                assert scales >= scaled
        assert len(slots) == 3


def _dtypes_of(stored: StateFormat, role: str, activations: str) -> set[torch.dtype]:
    if role == COMPUTE:
        # FP8 compute weights: of linear layers in the decoder only, and as bytes with
        # FP8 parameters
        return {
            TORCH[stored.compute],
            TORCH[activations],
            *({torch.uint8} if stored.compute == "fp8" else ()),
        }
    chosen = {
        MASTER: stored.master,
        EXP_AVG: stored.exp_avg,
        EXP_AVG_SQ: stored.exp_avg_sq,
    }[role]
    return {torch.int16 if chosen == "remainder" else TORCH[chosen]}
