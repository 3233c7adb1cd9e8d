"""A model that cannot fit into memory is refused before it is built.

The check counts the bytes of weights and optimizer states.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.config import compose_settings
from launcher.job_checks import check_job
from launcher.memory import host_memory_bytes, require_room, state_bytes
from launcher.parameters import count_parameters, padded_vocab_size
from launcher.start_train import train_command
from moe_ckpt.errors import ConfigError
from moe_ckpt.types import ParallelLayout

ONE = ParallelLayout(pp=1, dp=1, ep=1, tp=1)
HAS_GPU = Path("/proc/driver/nvidia").exists()


def bytes_of(num_ranks: int, *overrides: str) -> list[float]:
    settings = compose_settings(["model=tiny", "model.vocab_size=256", *overrides])
    layout = check_job(settings, num_ranks)
    return [state_bytes(settings, layout, rank) for rank in range(num_ranks)]


def num_parameters() -> int:
    settings = compose_settings(["model=tiny"])
    return count_parameters(settings.model, padded_vocab_size(256, ONE))[0]


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        ((), 2 + 4 + 4 + 4),
        (("precision=fp32",), 4 + 4 + 4),
        (("precision.master=remainder",), 2 + 2 + 4 + 4),
        (("precision=fp16_fp16_fp16",), 2 + 2 + 2 + 2),
    ],
)
def test_one_rank_has_all_bytes_of_each_parameter(
    overrides: tuple[str, ...], wanted: int
) -> None:
    assert bytes_of(1, *overrides) == [wanted * num_parameters()]


@pytest.mark.parametrize(
    "split", ["parallel.pp=2", "parallel.pp=4", "parallel.ep=4", "parallel.tp=4"]
)
def test_the_ranks_of_a_job_share_the_optimizer_states(split: str) -> None:
    """All ranks together have the optimizer states of one rank, and no more.

    The weights of all ranks have at least the bytes of one rank's weights, and at most
    four times as many.
    """
    sizes = bytes_of(4, split, *(["parallel.pp=1"] if "pp" not in split else []))
    weights = sum(sizes) - 12 * num_parameters()
    assert 2 * num_parameters() <= weights <= 4 * 2 * num_parameters()


def test_without_a_sharded_optimizer_each_replica_has_all_states() -> None:
    sizes = bytes_of(
        2, "parallel.pp=1", "parallel.ep=1", "train.distributed_optimizer=false"
    )
    assert sizes == [14 * num_parameters()] * 2


def test_what_has_no_room_is_one_error_with_the_model_and_both_sizes() -> None:
    settings = compose_settings(["model=tiny"])
    require_room(settings, 1e9, 1e9, "memory of its GPU")
    with pytest.raises(ConfigError) as caught:
        require_room(settings, 3e9, 1e9, "memory of its GPU")
    wanted = "wanted at most 1 GB, the memory of its GPU"
    assert str(caught.value).startswith(
        f"model: got 'tiny, 3 GB of weights and optimizer states', {wanted}"
    )


def test_this_machine_has_memory() -> None:
    assert 0 < host_memory_bytes(is_idle=True) <= host_memory_bytes(is_idle=False)


@pytest.mark.skipif(
    HAS_GPU, reason="a machine with a GPU builds models in the memory of the GPU"
)
def test_a_model_that_is_too_large_is_refused_before_torchrun_starts() -> None:
    with pytest.raises(
        ConfigError,
        match=(
            r"^model: got 'deepseek_671b, .* GB of weights and optimizer states',"
            r" wanted"
        ),
    ):
        train_command(["--nproc-per-node=2", "model=deepseek_671b"])
