"""Checks that training repeats bit for bit, and makes a GPU repeat itself.

Exact recovery relies on repetition, and a kernel may break repetition without an error.

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
    """Make CUDA repeat itself bit for bit. Call before CUDA starts.

    Kernels without a deterministic form give a warning.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Transformer Engine's attention
    os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    os.environ.setdefault("NCCL_ALGO", "Ring")  # the order of sums
    # sums in the NVLink switch have an order of their own
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    # torch.compile's choices depend on earlier compilations of the process. A
    # replacement process would also compile everything again
    torch._dynamo.config.disable = True
    torch.use_deterministic_algorithms(True, warn_only=True)


def require_repeatable(
    ranks: Ranks, state: TrainingState, run_pass: Callable[[], object], setting: str
) -> None:
    """Check that two passes over one batch give the same gradients. Collective.

    Args:
        ranks: The ranks that run the pass together.
        state: This rank's training state.
        run_pass: Runs forward and backward and reduces gradients; collective.
        setting: The name of the setting that asks for the check.

    Raises:
        ConfigError: Gradients differ on a rank. Raised on all ranks; the error names
            the setting.
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

    Collective, as the pass is. Afterwards generators and buffers are as before, and
    gradients are clear.

    Args:
        state: This rank's training state.
        run_pass: Runs forward and backward and reduces gradients.
    """
    first, second = (_gradients_of(state, run_pass) for _ in range(2))
    return [name for name in first if first[name] != second[name]]


def _gradients_of(
    state: TrainingState, run_pass: Callable[[], object]
) -> Mapping[str, str]:
    start, kept = small_state(state), buffers(state)
    clear_gradients(state)
    run_pass()
    # hashes in place of copies: a second set of gradients may not fit into the device's
    # memory
    hashes = hashes_of(
        {
            f"{index}.{name}": [parameter.main_grad]  # type: ignore[attr-defined]
            for index, chunk in enumerate(state.model)
            for name, parameter in chunk.named_parameters()
            if hasattr(parameter, "main_grad")  # else the parameter is frozen
        }
    )
    restore_small_state(state, start)
    restore_buffers(state, kept)
    clear_gradients(state)
    # the data-parallel wrapper overlaps by the number of micro-batches of the first
    # pass, and would take the number of this pass for the number of each iteration
    forget_communication(state.model)
    return hashes
