"""Degrees of parallelism: `auto`, degrees that do not fit, and torchrun's variables."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tests.preload  # noqa: F401 - imports Megatron without its warnings
from launcher.config import AUTO, ParallelConfig, Settings, compose_settings
from launcher.layout import check_fit, check_supervised, fit_layout
from launcher.train import choose_warnings
from moe_ckpt.elastic.torchrun_variables import Launch, read_launch
from moe_ckpt.errors import ConfigError
from moe_ckpt.types import ParallelLayout
from tests.launcher.errors import error_of

AUTO_ALL = ParallelConfig(pp=AUTO, dp=AUTO, ep=AUTO, tp=AUTO, ranks_per_node=AUTO)
DEGREES = st.one_of(st.just(AUTO), st.integers(1, 8))
CONFIGS = st.builds(
    ParallelConfig,
    pp=DEGREES,
    dp=DEGREES,
    ep=DEGREES,
    tp=DEGREES,
    ranks_per_node=st.just(AUTO),
)
TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "node-0",
    "MASTER_PORT": "29500",
}


@pytest.fixture(scope="module")
def defaults() -> Settings:
    return compose_settings([])


def layout(pp: int, dp: int, ep: int, tp: int) -> ParallelLayout:
    return ParallelLayout(pp=pp, dp=dp, ep=ep, tp=tp)


def fitted(
    world_size: int, num_experts: int = 8, **changes: int | str
) -> ParallelLayout:
    return fit_layout(replace(AUTO_ALL, **changes), world_size, num_experts=num_experts)


@pytest.mark.parametrize(
    ("world_size", "changes", "expected"),
    [
        (1, {}, layout(1, 1, 1, 1)),
        (2, {}, layout(1, 2, 2, 1)),
        (3, {}, layout(1, 3, 1, 1)),
        (4, {}, layout(2, 2, 2, 1)),
        (6, {}, layout(2, 3, 1, 1)),
        (8, {}, layout(2, 4, 2, 1)),
        (4, {"pp": 1}, layout(1, 4, 2, 1)),
        (4, {"dp": 4}, layout(1, 4, 2, 1)),
        (4, {"dp": 1}, layout(4, 1, 1, 1)),
        (4, {"ep": 1}, layout(2, 2, 1, 1)),
        (8, {"ep": 4}, layout(2, 4, 4, 1)),
        (8, {"tp": 2, "ep": 1}, layout(2, 2, 1, 2)),
        (4, {"tp": 2}, layout(1, 2, 2, 2)),
        (4, {"num_experts": 0}, layout(2, 2, 1, 1)),
        # auto splits no experts that cannot be halved
        (4, {"num_experts": 7}, layout(2, 2, 1, 1)),
    ],
)
def test_degrees_are_fitted_to_the_processes(
    world_size: int, changes: dict[str, int], expected: ParallelLayout
) -> None:
    assert fitted(world_size, **changes) == expected


@given(
    parallel=st.one_of(st.just(AUTO_ALL), CONFIGS),
    world_size=st.one_of(st.integers(1, 64), st.integers(1, 4096)),
)
def test_degrees_fit_or_are_refused(parallel: ParallelConfig, world_size: int) -> None:
    try:
        found = fit_layout(parallel, world_size, num_experts=8)
    except ConfigError:
        assert parallel != AUTO_ALL, "auto fits any number of processes"
        return
    assert found.pp * found.dp * found.tp == found.world_size == world_size
    assert found.dp % found.ep == 0
    for name in ("pp", "dp", "ep", "tp"):
        assert getattr(parallel, name) in (AUTO, getattr(found, name))


@given(
    pp=st.integers(1, 8),
    replicas=st.integers(1, 8),
    ep=st.integers(1, 8),
    tp=st.integers(1, 4),
    data=st.data(),
)
def test_degrees_that_fit_are_taken_whichever_of_them_are_given(
    pp: int, replicas: int, ep: int, tp: int, data: st.DataObject
) -> None:
    dp = replicas * ep
    left_out = data.draw(st.sampled_from(["", "pp", "dp"]))
    degrees: dict[str, int | str] = {
        "pp": pp,
        "dp": dp,
        "ep": ep,
        "tp": tp,
        "ranks_per_node": AUTO,
    }
    parallel = ParallelConfig(
        **{
            name: AUTO if name == left_out else degree
            for name, degree in degrees.items()
        }
    )
    assert fit_layout(parallel, pp * dp * tp, num_experts=8) == layout(
        pp=pp, dp=dp, ep=ep, tp=tp
    )


@pytest.mark.parametrize(
    ("world_size", "changes", "numbers"),
    [
        (
            4,
            {"pp": 3},
            "parallel.pp * parallel.tp: got 3, wanted a divisor of 4 processes",
        ),
        (
            4,
            {"pp": 2, "tp": 4},
            "parallel.pp * parallel.tp: got 8, wanted a divisor of 4 processes",
        ),
        (
            4,
            {"pp": 2, "dp": 4},
            "parallel: pp=2 * dp=4 * tp=1: got 8, wanted 4, the number of processes",
        ),
        (
            8,
            {"pp": 2, "dp": 2, "tp": 1},
            "parallel: pp=2 * dp=2 * tp=1: got 4, wanted 8, the number of processes",
        ),
        (4, {"pp": 1, "ep": 3}, "parallel.ep: got 3, wanted a divisor of dp=4"),
        (2, {"tp": 2, "ep": 2}, "parallel.ep: got 2, wanted a divisor of dp=1"),
        (1, {"ep": 2}, "parallel.ep: got 2, wanted a divisor of dp=1"),
    ],
)
def test_degrees_that_do_not_fit_are_refused_with_the_numbers(
    world_size: int, changes: dict[str, int], numbers: str
) -> None:
    assert error_of(fitted, world_size, **changes) == numbers


@pytest.mark.parametrize("dp", [AUTO, 1, 2])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_more_tensor_parallelism_than_processes_is_refused(
    world_size: int, dp: int | str
) -> None:
    wanted = rf"parallel.*tp: got \d+, wanted a divisor of {world_size} processes"
    assert re.match(wanted, error_of(fitted, world_size, dp=dp, tp=4))


BATCH = "train.global_batch_size: got 16, wanted a multiple of train"
HEADS = "attention heads or query groups"


@pytest.mark.parametrize(
    ("layout", "changes", "numbers"),
    [
        (layout(3, 1, 1, 1), {}, "parallel.pp: got 3, wanted a divisor of 4 layers"),
        (
            layout(1, 3, 3, 1),
            {},
            "parallel.ep: got 3, wanted a divisor of model.num_experts=8",
        ),
        (
            layout(1, 2, 2, 1),
            {"num_experts": 0},
            "parallel.ep: got 2, wanted 1 where model.num_experts=0",
        ),
        (layout(1, 1, 1, 8), {}, f"parallel.tp: got 8, wanted a divisor of 4 {HEADS}"),
        (
            layout(1, 1, 1, 4),
            {"num_query_groups": 2},
            f"parallel.tp: got 4, wanted a divisor of 2 {HEADS}",
        ),
        (layout(1, 8, 1, 1), {}, f"{BATCH}.micro_batch_size=4 * dp=8"),
        (
            layout(1, 1, 1, 1),
            {"micro_batch_size": 3},
            f"{BATCH}.micro_batch_size=3 * dp=1",
        ),
    ],
)
def test_settings_that_a_layout_does_not_divide_are_refused(
    defaults: Settings, layout: ParallelLayout, changes: dict[str, int], numbers: str
) -> None:
    of_train = {
        name: value for name, value in changes.items() if name == "micro_batch_size"
    }
    of_model = {name: value for name, value in changes.items() if name not in of_train}
    model, train = (
        replace(defaults.model, **of_model),
        replace(defaults.train, **of_train),
    )
    assert error_of(check_fit, layout, model, train) == numbers


@pytest.mark.parametrize(
    ("pp", "num_dense_layers", "is_sharded", "is_refused"),
    [
        (2, 2, False, True),
        (2, 3, False, True),
        (2, 1, False, False),
        (1, 2, False, False),
        (2, 2, True, False),
    ],
)
def test_a_supervised_stage_without_experts_needs_a_sharded_optimizer(
    defaults: Settings,
    pp: int,
    num_dense_layers: int,
    is_sharded: bool,
    is_refused: bool,
) -> None:
    model = replace(defaults.model, num_dense_layers=num_dense_layers)
    train = replace(defaults.train, distributed_optimizer=is_sharded)
    if not is_refused:
        check_supervised(layout(pp, 2, 2, 1), model, train)
        return
    said = error_of(check_supervised, layout(pp, 2, 2, 1), model, train)
    assert said.startswith(
        "train.distributed_optimizer: got False, wanted true where a stage has no"
        " experts (model."
    )


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_the_default_run_fits_the_default_layout(
    defaults: Settings, world_size: int
) -> None:
    check_fit(
        fit_layout(defaults.parallel, world_size, num_experts=8),
        defaults.model,
        defaults.train,
    )


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Set the environment that torchrun gives.

    Variables that only agents of several attempts or nodes set are deleted.
    """
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    for name in ("TORCHELASTIC_RESTART_COUNT", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_a_process_learns_its_position_from_torchrun(
    torchrun: pytest.MonkeyPatch,
) -> None:
    launch = Launch(
        global_rank=5, local_rank=1, world_size=8, local_world_size=8, attempt=0
    )
    assert read_launch() == launch
    torchrun.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    torchrun.setenv("LOCAL_WORLD_SIZE", "4")
    assert read_launch() == replace(launch, local_world_size=4, attempt=2)


@pytest.mark.parametrize(
    "missing", [*([name] for name in TORCHRUN), list(TORCHRUN)], ids=", ".join
)
def test_without_torchrun_the_error_says_how_to_start(
    torchrun: pytest.MonkeyPatch, missing: list[str]
) -> None:
    for name in missing:
        torchrun.delenv(name)
    message = error_of(read_launch, "launcher/train.py")
    assert f"({', '.join(missing)} not set)" in message
    assert "torchrun --nproc-per-node=4 launcher/train.py" in message


def test_warnings_of_kernels_that_do_not_repeat_are_shown_once() -> None:
    """With `run.exactness=bitwise`, torch only warns of such kernels.

    A replay with such a kernel would end in another state.
    """
    told = (
        "index_put_ does not have a deterministic implementation, but you set warn_only"
    )
    registry: dict[Any, Any] = {}  # the registry of the module that warns
    with warnings.catch_warnings(record=True) as shown:
        choose_warnings()
        for _ in range(2):
            for text in (told, "Transformer Engine is not installed"):
                warnings.warn_explicit(
                    text,
                    UserWarning,
                    "x.py",
                    1,
                    module="torch.autograd.graph",
                    registry=registry,
                )
    assert [str(warning.message) for warning in shown] == [told]
