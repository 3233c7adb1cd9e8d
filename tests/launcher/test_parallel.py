"""Degrees of parallelism: what `auto` becomes, what does not fit, and what torchrun tells a process."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tests.preload  # noqa: F401 - imports Megatron without its warnings
from launcher.config import AUTO, ParallelConfig, Settings, compose_settings
from launcher.launch import Launch, read_launch
from launcher.layout import check_fit, fit_layout
from moe_ckpt.errors import ConfigError
from moe_ckpt.types import ParallelLayout

AUTO_ALL = ParallelConfig(pp=AUTO, dp=AUTO, ep=AUTO, tp=AUTO, ranks_per_node=AUTO)
DEGREES = st.one_of(st.just(AUTO), st.integers(1, 8))
CONFIGS = st.builds(ParallelConfig, pp=DEGREES, dp=DEGREES, ep=DEGREES, tp=DEGREES, ranks_per_node=st.just(AUTO))
TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "node-0", "MASTER_PORT": "29500"}


@pytest.fixture(scope="module")
def defaults() -> Settings:
    return compose_settings([])


def layout(pp: int, dp: int, ep: int, tp: int) -> ParallelLayout:
    return ParallelLayout(pp=pp, dp=dp, ep=ep, tp=tp)


@pytest.mark.parametrize(
    ("world_size", "changes", "expected"),
    [
        (1, {}, layout(pp=1, dp=1, ep=1, tp=1)),
        (2, {}, layout(pp=1, dp=2, ep=2, tp=1)),
        (3, {}, layout(pp=1, dp=3, ep=1, tp=1)),
        (4, {}, layout(pp=2, dp=2, ep=2, tp=1)),
        (5, {}, layout(pp=1, dp=5, ep=1, tp=1)),
        (6, {}, layout(pp=2, dp=3, ep=1, tp=1)),
        (8, {}, layout(pp=2, dp=4, ep=2, tp=1)),
        (4, {"pp": 1}, layout(pp=1, dp=4, ep=2, tp=1)),
        (4, {"pp": 4}, layout(pp=4, dp=1, ep=1, tp=1)),
        (4, {"dp": 4}, layout(pp=1, dp=4, ep=2, tp=1)),
        (4, {"dp": 1}, layout(pp=4, dp=1, ep=1, tp=1)),
        (4, {"ep": 1}, layout(pp=2, dp=2, ep=1, tp=1)),
        (8, {"ep": 4}, layout(pp=2, dp=4, ep=4, tp=1)),
        (8, {"tp": 2, "ep": 1}, layout(pp=2, dp=2, ep=1, tp=2)),
        (4, {"tp": 2}, layout(pp=1, dp=2, ep=2, tp=2)),
        (96, {"pp": 12, "dp": 8, "ep": 8, "tp": 1}, layout(pp=12, dp=8, ep=8, tp=1)),
        (8, {"pp": 2, "dp": 2, "ep": 2, "tp": 2}, layout(pp=2, dp=2, ep=2, tp=2)),
    ],
)
def test_degrees_are_fitted_to_the_processes(
    world_size: int, changes: dict[str, int | str], expected: ParallelLayout
) -> None:
    assert fit_layout(replace(AUTO_ALL, **changes), world_size, num_experts=8) == expected


@pytest.mark.parametrize("num_experts", [0, 7])
def test_auto_splits_no_experts_that_cannot_be_halved(num_experts: int) -> None:
    assert fit_layout(AUTO_ALL, 4, num_experts=num_experts) == layout(pp=2, dp=2, ep=1, tp=1)


@given(parallel=CONFIGS, world_size=st.integers(1, 64))
def test_degrees_fit_or_are_refused(parallel: ParallelConfig, world_size: int) -> None:
    try:
        fitted = fit_layout(parallel, world_size, num_experts=8)
    except ConfigError:
        return
    assert fitted.pp * fitted.dp * fitted.tp == fitted.world_size == world_size
    assert fitted.dp % fitted.ep == 0
    for name in ("pp", "dp", "ep", "tp"):
        assert getattr(parallel, name) in (AUTO, getattr(fitted, name))


@given(pp=st.integers(1, 8), replicas=st.integers(1, 8), ep=st.integers(1, 8), tp=st.integers(1, 4), data=st.data())
def test_degrees_that_fit_are_taken_whichever_of_them_are_given(
    pp: int, replicas: int, ep: int, tp: int, data: st.DataObject
) -> None:
    dp = replicas * ep
    left_out = data.draw(st.sampled_from(["", "pp", "dp"]))
    degrees: dict[str, int | str] = {"pp": pp, "dp": dp, "ep": ep, "tp": tp, "ranks_per_node": AUTO}
    parallel = ParallelConfig(**{name: AUTO if name == left_out else degree for name, degree in degrees.items()})
    assert fit_layout(parallel, pp * dp * tp, num_experts=8) == layout(pp=pp, dp=dp, ep=ep, tp=tp)


@given(world_size=st.integers(1, 4096))
def test_auto_fits_any_number_of_processes(world_size: int) -> None:
    fitted = fit_layout(AUTO_ALL, world_size, num_experts=8)
    assert fitted.world_size == world_size
    assert fitted.dp % fitted.ep == 0


@pytest.mark.parametrize(
    ("world_size", "changes", "numbers"),
    [
        (4, {"pp": 3}, "parallel.pp * parallel.tp: got 3, wanted a divisor of 4 processes"),
        (4, {"pp": 2, "tp": 4}, "parallel.pp * parallel.tp: got 8, wanted a divisor of 4 processes"),
        (4, {"pp": 2, "dp": 4}, "parallel: pp=2 * dp=4 * tp=1: got 8, wanted 4, the number of processes"),
        (8, {"pp": 2, "dp": 2, "tp": 1}, "parallel: pp=2 * dp=2 * tp=1: got 4, wanted 8, the number of processes"),
        (4, {"pp": 1, "ep": 3}, "parallel.ep: got 3, wanted a divisor of dp=4"),
        (2, {"tp": 2, "ep": 2}, "parallel.ep: got 2, wanted a divisor of dp=1"),
        (1, {"ep": 2}, "parallel.ep: got 2, wanted a divisor of dp=1"),
    ],
)
def test_degrees_that_do_not_fit_are_refused_with_the_numbers(
    world_size: int, changes: dict[str, int | str], numbers: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        fit_layout(replace(AUTO_ALL, **changes), world_size, num_experts=8)
    assert str(caught.value) == numbers


@pytest.mark.parametrize("dp", [AUTO, 1, 2])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_more_tensor_parallelism_than_processes_is_refused(world_size: int, dp: int | str) -> None:
    with pytest.raises(ConfigError, match=rf"parallel.*tp: got \d+, wanted a divisor of {world_size} processes"):
        fit_layout(replace(AUTO_ALL, dp=dp, tp=4), world_size, num_experts=8)


@pytest.mark.parametrize(
    ("layout", "section", "changes", "numbers"),
    [
        (layout(3, 1, 1, 1), "model", {}, "parallel.pp: got 3, wanted a divisor of 4 layers"),
        (layout(1, 3, 3, 1), "model", {}, "parallel.ep: got 3, wanted a divisor of model.num_experts=8"),
        (layout(1, 2, 2, 1), "model", {"num_experts": 0}, "parallel.ep: got 2, wanted 1 where model.num_experts=0"),
        (layout(1, 1, 1, 8), "model", {}, "parallel.tp: got 8, wanted a divisor of 4 attention heads or query groups"),
        (
            layout(1, 1, 1, 4),
            "model",
            {"num_query_groups": 2},
            "parallel.tp: got 4, wanted a divisor of 2 attention heads or query groups",
        ),
        (
            layout(1, 8, 1, 1),
            "train",
            {},
            "train.global_batch_size: got 16, wanted a multiple of train.micro_batch_size=4 * dp=8",
        ),
        (
            layout(1, 1, 1, 1),
            "train",
            {"micro_batch_size": 3},
            "train.global_batch_size: got 16, wanted a multiple of train.micro_batch_size=3 * dp=1",
        ),
    ],
)
def test_what_does_not_divide_over_the_layout_is_refused_with_the_numbers(
    defaults: Settings, layout: ParallelLayout, section: str, changes: dict[str, object], numbers: str
) -> None:
    settings = replace(defaults, **{section: replace(getattr(defaults, section), **changes)})
    with pytest.raises(ConfigError) as caught:
        check_fit(layout, settings.model, settings.train)
    assert str(caught.value) == numbers


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_the_default_run_fits_the_default_layout(defaults: Settings, world_size: int) -> None:
    check_fit(fit_layout(defaults.parallel, world_size, num_experts=8), defaults.model, defaults.train)


def test_a_process_learns_its_place_from_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    assert read_launch() == Launch(global_rank=5, local_rank=1, world_size=8, local_world_size=8, attempt=0)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert read_launch() == Launch(global_rank=5, local_rank=1, world_size=8, local_world_size=4, attempt=2)


@pytest.mark.parametrize("absent", [*TORCHRUN, "all"])
def test_without_torchrun_the_error_says_how_to_start(monkeypatch: pytest.MonkeyPatch, absent: str) -> None:
    missing = list(TORCHRUN) if absent == "all" else [absent]
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    for name in missing:
        monkeypatch.delenv(name)
    with pytest.raises(ConfigError, match=r"torchrun --nproc-per-node=4 launcher/train.py") as caught:
        read_launch()
    assert f"({', '.join(missing)} not set)" in str(caught.value)
