"""CPU stand-in for the parts of `torch.cuda` that Megatron-Core calls unconditionally.

Owns: training an unmodified Megatron-Core model on CPU tensors with gloo. The stand-in
is active only without CUDA. On a machine with a GPU `enable` only defines one name that
a missing Transformer Engine leaves undefined. Must not: know models, or change the
result of a computation, except for the order of sums in products on processors that are
slow at such products (`matmul`).

The "CUDA" generator is the default CPU generator here, because Megatron's RNG tracker
forks and restores the "CUDA" generator.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed
from torch.overrides import TorchFunctionMode

from moe_ckpt.megatron import state_wiper
from moe_ckpt.standins import matmul

_CPU: Final = torch.device("cpu")
_DEVICE_METHODS: Final = frozenset(
    (torch.Tensor.cuda, torch.Tensor.type, torch.Tensor.to)
)
_active: _CudaNamesOnCpu | None = None


class _CudaNamesOnCpu(TorchFunctionMode):
    """Redirects CUDA calls to the CPU.

    Covers `device="cuda"` arguments, `.cuda()`, `.to("cuda")` and the names that
    `Tensor.type()` returns.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # one look-up first: few of the thousand calls of an iteration are of these
        # methods
        if func in _DEVICE_METHODS:
            if func is torch.Tensor.cuda:
                return args[0]
            # Megatron asserts that gradients to be clipped have the type
            # `torch.cuda.FloatTensor`
            if func is torch.Tensor.type and len(args) == 1 and not kwargs:
                return func(*args).replace("torch.", "torch.cuda.", 1)
            if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
                args = (args[0], _CPU, *args[2:])
        if not kwargs:
            return func(*args)
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        return func(*args, **kwargs)


def _is_cuda(device: Any) -> bool:
    if device is None:
        return False
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


def _ignore(*_: Any, **__: Any) -> None:
    pass


class _Stream:
    """Stands in for streams and events on a CPU.

    Work is complete when a call returns, so waits end at once.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    record = wait = wait_event = wait_stream = synchronize = _ignore

    def record_event(self, *_: Any) -> _Stream:
        return _Stream()

    def query(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    __hash__ = object.__hash__


def _get_rng_state(device: Any = None) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(
    new_state: torch.Tensor, device: Any = None, graph_safe: bool = False
) -> None:
    torch.set_rng_state(new_state)


_CUDA_STAND_INS: Final[dict[str, Any]] = {
    "torch.cuda.current_device": lambda: _CPU,
    "torch.cuda.Stream": _Stream,
    "torch.cuda.Event": _Stream,
    "torch.cuda.current_stream": _Stream,
    "torch.cuda.default_stream": _Stream,
    "torch.cuda.stream": contextlib.nullcontext,
    "torch.cuda.synchronize": _ignore,
    "torch.cuda.empty_cache": _ignore,
    "torch.cuda.nvtx.range_push": _ignore,
    "torch.cuda.nvtx.range_pop": _ignore,
    "torch.cuda.manual_seed": torch.manual_seed,
    "torch.cuda.get_rng_state": _get_rng_state,
    "torch.cuda.set_rng_state": _set_rng_state,
    "torch.cuda.random.get_rng_state": _get_rng_state,
    "torch.cuda.random.set_rng_state": _set_rng_state,
    "megatron.core.tensor_parallel.random._set_cuda_rng_state": _set_rng_state,
}


def enable() -> bool:
    """Install the stand-in in this process and thread if there is no CUDA.

    Call before the process groups are formed, from the training thread. Idempotent.

    Returns:
        Whether the stand-in is active.
    """
    global _active
    _skip_missing_transformer_engine()
    if torch.cuda.is_available():
        return False
    if _active is None:
        # otherwise Megatron spends half a second on deciding to compile nothing
        torch.compiler.set_stance("force_eager")
        for path, stand_in in _CUDA_STAND_INS.items():
            _replace(path, stand_in)
        _take_plain_split_sizes()
        matmul.multiply_in_float32(matmul.slow_formats())
        _stay_active_in_backward()
        logging.getLogger("megatron.core.tensor_parallel.random").addFilter(
            _is_not_shared_generator_note
        )
        state_wiper.around_hooks = _for_a_hook
        _active = _CudaNamesOnCpu()
        _active.__enter__()
    return True


def _replace(path: str, value: Any) -> None:
    module, name = path.rsplit(".", 1)
    target = importlib.import_module(module)
    # a name that Megatron or torch has changed raises AttributeError here; `setattr`
    # alone would have no effect
    getattr(target, name)
    setattr(target, name, value)


def _take_plain_split_sizes() -> None:
    """Make `all_to_all_single` accept split sizes in CPU tensors.

    Megatron's alltoall dispatcher copies split sizes from a GPU, but leaves split sizes
    on a CPU in their tensors.
    """
    original = torch.distributed.all_to_all_single

    def all_to_all_single(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        return original(
            output,
            input,
            _as_list(output_split_sizes),
            _as_list(input_split_sizes),
            group,
            async_op,
        )

    torch.distributed.all_to_all_single = all_to_all_single


def _as_list(sizes: Any) -> Any:
    return sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes


def _skip_missing_transformer_engine() -> None:
    """Define `te_general_gemm`, which a failed import leaves undefined in `moe_utils`.

    `moe_utils` compares the name with None.
    """
    moe_utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # type: ignore[attr-defined]


def _stay_active_in_backward() -> None:
    """Keep the mode active in `Tensor.backward`, which switches the mode off.

    Recomputation of activations in backward needs the mode.
    """
    functions = torch.autograd.function.BackwardCFunction
    original = functions.apply

    def apply(self: Any, *gradients: Any) -> Any:
        assert _active is not None
        with _active:
            return original(self, *gradients)

    functions.apply = apply  # type: ignore[method-assign]


def _for_a_hook() -> contextlib.AbstractContextManager[object]:
    """Return a context that activates the stand-in in a hook of backward.

    The mode is off in such a hook.
    """
    return _active or contextlib.nullcontext()


def _is_not_shared_generator_note(record: logging.LogRecord) -> bool:
    # the CPU generator and the "CUDA" generator are one here
    return "CPU RNG state changed" not in record.getMessage()
