"""Whether training repeats itself bit for bit: exact recovery rests on it, and a kernel may break it without an error.

Owns: running one pass twice from the same start and comparing the gradients. Must not: change the state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from moe_ckpt.megatron.state import TrainingState, buffers, restore_buffers, restore_small_state, small_state
from moe_ckpt.megatron.step import clear_gradients
from moe_ckpt.snapshot.device_hash import hashes_of


def differing_gradients(state: TrainingState, run_pass: Callable[[], object]) -> list[str]:
    """Return the parameters whose gradients differ between two runs of a pass. Collective, as the pass is.

    `run_pass` runs forward and backward and reduces gradients; generators, buffers and gradients are afterwards as they
    were or clear.
    """
    first, second = (_gradients_of(state, run_pass) for _ in range(2))
    return [name for name in first if first[name] != second[name]]


def _gradients_of(state: TrainingState, run_pass: Callable[[], object]) -> Mapping[str, str]:
    start, kept = small_state(state), buffers(state)
    clear_gradients(state)
    run_pass()
    # hashes, no copies: a second set of gradients may not fit into the device's memory
    hashes = hashes_of(
        {
            f"{index}.{name}": [parameter.main_grad]  # type: ignore[attr-defined]
            for index, chunk in enumerate(state.model)
            for name, parameter in chunk.named_parameters()
        }
    )
    restore_small_state(state, start)
    restore_buffers(state, kept)
    clear_gradients(state)
    return hashes
