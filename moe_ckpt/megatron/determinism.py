"""Whether training repeats itself bit for bit: exact recovery rests on it, and a kernel
may break it without an error.

Owns: the settings that make a GPU repeat itself, and running one pass twice from the
same start to compare the gradients. Must not: change the state.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import torch

from moe_ckpt.collectives import Ranks, gather_results
from moe_ckpt.config import require
from moe_ckpt.errors import ConfigError
from moe_ckpt.megatron.overlapped import forget_communication
from moe_ckpt.megatron.state import (
    TrainingState,
    buffers,
    restore_buffers,
    restore_small_state,
    small_state,
)
from moe_ckpt.megatron.step import clear_gradients
from moe_ckpt.snapshot.device_hash import hashes_of


def make_deterministic() -> None:
    """Make CUDA repeat itself bit for bit; call before CUDA starts. Kernels without
    such a form warn.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Transformer Engine's attention
    os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    os.environ.setdefault("NCCL_ALGO", "Ring")  # the order of sums
    # sums in the switch have an order of their own
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    # torch.compile's choices depend on what a process compiled before; and a
    # replacement would compile all anew
    torch._dynamo.config.disable = True
    torch.use_deterministic_algorithms(True, warn_only=True)


def require_repeatable(
    ranks: Ranks, state: TrainingState, run_pass: Callable[[], object], setting: str
) -> None:
    """Run a pass twice, over one batch. Collective, as `run_pass` is.

    Raises ConfigError on all ranks, naming the setting that asks for this, if gradients
    differ on one.
    """

    def require_same() -> None:
        differing = differing_gradients(state, run_pass)
        reason = (
            f"the same from two passes over one batch ({setting}=false trains all the"
            " same)"
        )
        require(
            not differing,
            f"{setting}: gradients that differ",
            ", ".join(differing[:5]),
            reason,
        )

    gather_results(ranks, require_same, ConfigError)


def differing_gradients(
    state: TrainingState, run_pass: Callable[[], object]
) -> list[str]:
    """Return the parameters whose gradients differ between two runs of a pass.
    Collective, as the pass is.

    `run_pass` runs forward and backward and reduces gradients; generators, buffers and
    gradients are afterwards as they were or clear.
    """
    first, second = (_gradients_of(state, run_pass) for _ in range(2))
    return [name for name in first if first[name] != second[name]]


def _gradients_of(
    state: TrainingState, run_pass: Callable[[], object]
) -> Mapping[str, str]:
    start, kept = small_state(state), buffers(state)
    clear_gradients(state)
    run_pass()
    # hashes, no copies: a second set of gradients may not fit into the device's memory
    hashes = hashes_of(
        {
            f"{index}.{name}": [parameter.main_grad]  # type: ignore[attr-defined]
            for index, chunk in enumerate(state.model)
            for name, parameter in chunk.named_parameters()
            if hasattr(parameter, "main_grad")  # a frozen one has none
        }
    )
    restore_small_state(state, start)
    restore_buffers(state, kept)
    clear_gradients(state)
    # else the wrapper takes the micro-batches of this pass for those of each iteration:
    # it overlaps by their number
    forget_communication(state.model)
    return hashes
