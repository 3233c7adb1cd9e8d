"""Megatron-LM's options: those that are exact, and those that are refused.

Owns: both tables, with the tests of each exact option and the reason of each refusal.
An option in neither table changes neither the course of an iteration nor the state
after an iteration, or snapshots contain the changed state anyway. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from moe_ckpt.config import require
from moe_ckpt.errors import ConfigError
from moe_ckpt.megatron.layer_split import MEGATRON_LM_FIELDS, LayerSplit

LAYER_SHAPE = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "moe_ffn_hidden_size",
    "moe_layer_freq",
    "moe_shared_expert_intermediate_size",
    "params_dtype",
)
"""Settings of all loops that shape the saved tensors."""

COURSE = (
    "seed",
    "data_seed",
    "random_seed",
    "split",
    "micro_batch_size",
    "calculate_per_token_loss",
    "hidden_dropout",
    "attention_dropout",
    "moe_router_topk",
    "moe_router_load_balancing_type",
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
    "moe_expert_capacity_factor",
    "moe_router_bias_update_rate",
)
"""Settings of all loops that decide the results of a replay.

The settings of the optimizer are not among them.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """An option of Megatron-LM that may only have certain values."""

    option: str
    """The name of the option in the parsed arguments."""

    allowed: tuple[Any, ...]
    """The only allowed values; the first is assumed for a version without the option.
    """

    reason: str
    """The reason of the refusal, for an error and for docs/attach.md."""

    @property
    def flag(self) -> str:
        """The option as on a command line."""
        return "--" + self.option.replace("_", "-")

    def require_allowed(self, setting: str, settings: object) -> None:
        """Require that a loop's settings give the option an allowed value.

        Args:
            setting: The name of the setting, for an error.
            settings: The settings of a loop, with the option as an attribute.

        Raises:
            ConfigError: The option has another value.
        """
        # an option that this version lacks cannot be on
        got = getattr(settings, self.option, self.allowed[0])
        wanted = " or ".join(repr(value) for value in self.allowed[:2])
        require(
            got in self.allowed,
            setting,
            got,
            f"{wanted} with moe_ckpt.run: {self.reason}",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Exact:
    """Options that are exact."""

    options: str
    """The options, as the documentation names them, in Markdown."""

    tests: tuple[str, ...]
    """The tests that prove exactness."""


_JOBS, _LOSSES = (
    "tests/integrations/test_megatron_lm.py",
    "tests/launcher/test_recipes.py",
)
EXACT: Sequence[Exact] = (
    Exact(
        options="`--calculate-per-token-loss`",
        tests=(
            f"{_LOSSES}: overlapped, loss per token, tied",
            f"{_JOBS}: overlapped, per token",
        ),
    ),
    Exact(
        options=(
            "`--overlap-param-gather`, `--overlap-grad-reduce`, with several buckets"
        ),
        tests=(
            f"{_LOSSES}: overlapped, loss per token, tied",
            f"{_JOBS}: overlapped, per token",
        ),
    ),
    Exact(
        options=(
            "frozen parameters (`requires_grad` is off before the model is wrapped)"
        ),
        tests=(f"{_LOSSES}: frozen base", f"{_JOBS}: frozen base, growing batches"),
    ),
    Exact(
        options="`--step-batch-size-schedule`",
        tests=(f"{_JOBS}: frozen base, growing batches",),
    ),
    Exact(options="`--context-parallel-size`", tests=(f"{_JOBS}: context parallel",)),
    Exact(
        options="`--mtp-num-layers`",
        tests=(f"{_LOSSES}: tokens further ahead", f"{_JOBS}: tokens further ahead"),
    ),
    Exact(
        options=(
            "virtual stages (`--num-virtual-stages-per-pipeline-rank`): all stages go"
            " back together, with `ckpt.recovery=gradients` the lost rank alone"
        ),
        tests=(f"{_JOBS}: virtual stages",),
    ),
    Exact(
        options="`--use-precision-aware-optimizer` with moments of 16 bits",
        tests=(f"{_JOBS}: precision-aware optimizer", "tests/launcher/test_formats.py"),
    ),
    Exact(
        options="`--bf16`, untied embeddings, `--swiglu`",
        tests=(f"{_JOBS}: bf16, overlapped reduction",),
    ),
    Exact(
        options=(
            "`--fp16` with loss scaling, expert bias, an auxiliary loss, `--rerun-mode"
            " validate_results`"
        ),
        tests=(f"{_JOBS}: fp16, balanced by bias and loss",),
    ),
    Exact(
        options=(
            "`--dataloader-type external`: iterators with or without `state_dict`, of"
            " each virtual stage"
        ),
        tests=(
            *(f"{_JOBS}: external iterator", f"{_JOBS}: external iterator with state"),
            f"{_JOBS}: external iterators of virtual stages",
        ),
    ),
    Exact(
        options="full recomputation, `--num-workers 1`",
        tests=(f"{_JOBS}: recomputed, loader processes",),
    ),
)


def _off(reason: str, *options: str) -> list[Refusal]:
    return [
        Refusal(option=option, allowed=(False, None, 0, [], "none"), reason=reason)
        for option in options
    ]


_ONE = (None, 1)
_GRAPHS = "a captured graph leaves out the hooks of each step"
_NOT_THE_STATE = "snapshots do not hold its state"
_OTHER_STEP = "the split optimizer step would leave it out"
_DRAWS = (
    "its draws in an evaluation are in no log: training after a recovery would draw"
    " others"
)
_TWICE = "a pass that runs twice in an iteration is logged twice"
AGAIN = (
    "`train`, which a recovery enters again, opens its output: the trace would be"
    " doubled or cut off"
)
_OTHER_LOOP = "it changes the loop that is entered again after a recovery"
OTHER_LIBRARY = "another library would replace or restart the same processes"
REFUSALS: Sequence[Refusal] = (
    Refusal(option="cuda_graph_impl", allowed=(None, "none"), reason=_GRAPHS),
    *_off(_GRAPHS, "optimizer_cuda_graph", "enable_cuda_graph", "external_cuda_graph"),
    *_off(
        "the step and its gathering overlap", "overlap_param_gather_with_optimizer_step"
    ),
    *_off(
        "its buffers belong to one communicator",
        "nccl_ub",
        "tp_comm_overlap",
        "use_sharp",
    ),
    *_off(
        "groups are formed anew without it",
        "nccl_communicator_config_path",
        "high_priority_stream_groups",
    ),
    *_off(
        "it sends tensors of the host, for which the job's groups have no backend on"
        " a GPU",
        "log_straggler",
    ),
    *_off(
        _NOT_THE_STATE,
        "use_megatron_fsdp",
        "use_torch_fsdp2",
        "init_model_with_meta_device",
    ),
    *_off(
        _NOT_THE_STATE, "use_layer_wise_distributed_optimizer", "optimizer_cpu_offload"
    ),
    *_off(
        "its layers need Transformer Engine, and Megatron-LM's loop was not tried on"
        " a GPU",
        "fp8_param_gather",
    ),
    *_off(
        _NOT_THE_STATE,
        "reuse_grad_buf_for_mxfp8_param_ag",
        "use_transformer_engine_op_fuser",
    ),
    Refusal(option="optimizer", allowed=("adam",), reason=_NOT_THE_STATE),
    Refusal(
        option="num_distributed_optimizer_instances",
        allowed=_ONE,
        reason=_NOT_THE_STATE,
    ),
    Refusal(
        option="moe_token_dispatcher_type",
        allowed=("alltoall", "allgather"),
        reason="its buffers outlive groups",
    ),
    *_off(
        _OTHER_STEP,
        "qk_clip",
        "log_max_attention_logit",
        "log_num_zeros_in_grad",
        "vision_pretraining",
    ),
    *_off("its gradients are clipped by a norm of their own", "mtp_detach_heads"),
    *_off(
        _DRAWS,
        "moe_input_jitter_eps",
        "moe_router_force_load_balancing",
        "moe_router_force_biased",
    ),
    *_off(
        "a pass that is cut off leaves gradients behind",
        "defer_embedding_wgrad_compute",
    ),
    *_off(_TWICE, "check_for_spiky_loss"),
    Refusal(
        option="rerun_mode", allowed=("validate_results", "disabled"), reason=_TWICE
    ),
    *_off("its samples depend on how often they were read", "fim_data"),
    Refusal(option="gtp_weight_remat_size", allowed=_ONE, reason="not tried"),
    Refusal(option="expert_gtp_weight_remat_size", allowed=_ONE, reason="not tried"),
    *_off("ranks of one stage would not be consecutive", "use_tp_pp_dp_mapping"),
    *_off(
        "the number of samples of an iteration must not change",
        "decrease_batch_size_if_needed",
    ),
    *_off(
        "the number of samples of an iteration must not change",
        "phase_transition_iterations",
    ),
    *_off(
        _OTHER_LOOP,
        "iterations_to_skip",
        "perform_rl_step",
        "skip_train",
        "lazy_mpu_init",
    ),
    *_off(
        _OTHER_LOOP,
        "moe_use_upcycling",
        "hybrid_context_parallel",
        "fake_process_group",
    ),
    *_off(AGAIN, "profile", "run_workload_inspector_server", "moe_routing_trace_path"),
    *_off(
        "the position in several or whole validation sets",
        "full_validation",
        "multiple_validation_sets",
    ),
    Refusal(
        option="dataloader_type", allowed=("single", "external"), reason="not tried"
    ),
    *_off(_OTHER_LOOP, "moe_expert_rank_capacity_factor", "gpu_sniff_test_interval"),
    *_off(
        "its passes have another order of transfers: not tried",
        "overlap_moe_expert_parallel_comm",
    ),
    *_off(
        "not tried",
        "fine_grained_activation_offloading",
        "cpu_offloading_num_layers",
        "fp4",
    ),
    *_off("conf/runtime has the timeouts", "distributed_timeout_seconds_after_init"),
    *_off("a supervisor ends its worker on SIGTERM", "exit_signal_handler"),
    *_off(
        "SIGTERM and runtime.notice_file end a job",
        "exit_interval",
        "exit_duration_in_mins",
    ),
    *_off("processes of an abandoned save outlive their generation", "async_save"),
    *_off(
        OTHER_LIBRARY,
        "enable_ft_package",
        "inprocess_restart",
        "non_persistent_ckpt_type",
        "adlr_autoresume",
    ),
)


DETERMINISTIC = "deterministic_mode"
"""The option of kernels that repeat an iteration bit for bit on a GPU."""

# by the name of a library, which has its own way to start, end or checkpoint the
# processes: the variable and the imported module that show the library
_LIBRARIES = {
    "lm-resiliency": ("LM_RESILIENCY_TORCHRUN_BOOTSTRAP", "lm_resiliency"),
    "nvidia-resiliency-ext's ft_launcher": ("FT_RANK_MONITOR_IPC_SOCKET", ""),
    "torchft": ("TORCHFT_LIGHTHOUSE", "torchft"),
}


def require_alone(environment: Collection[str], modules: Collection[str]) -> None:
    """Refuse other active libraries for fault tolerance.

    A library is active if its variable is set or the script has imported its module.
    For nvidia-resiliency-ext only the variable of its launcher counts, because
    Megatron-Core itself imports the package. The options of the package are in
    `REFUSALS`.

    Args:
        environment: The names of environment variables.
        modules: The names of imported modules.

    Raises:
        ConfigError: Such a library is active.
    """
    for library, (variable, module) in _LIBRARIES.items():
        sign = (
            f"the variable {variable}"
            if variable in environment
            else f"its import {module}"
        )
        if variable in environment or module in modules:
            raise ConfigError(
                f"moe_ckpt.run: got {library} ({sign}), wanted one of the two:"
                f" {OTHER_LIBRARY}"
            )


def require_supported(arguments: Any) -> None:
    """Refuse options that cannot be exact.

    Args:
        arguments: Megatron-LM's parsed arguments.

    Raises:
        ConfigError: Such an option is set, a stage has no layers, or a stage has no
            experts and the optimizer is not sharded.
    """
    for refusal in REFUSALS:
        refusal.require_allowed(refusal.flag, arguments)
    split = LayerSplit.of(arguments, MEGATRON_LM_FIELDS, "--{}")
    split.require_layers()
    is_sharded = arguments.use_distributed_optimizer
    split.require_experts(is_sharded=is_sharded, setting="--use-distributed-optimizer")


def option_table() -> list[str]:
    """Return the table of options in docs/attach.md, as lines of Markdown.

    The exact options come first, then the refused options.
    """
    rows = [
        "| option | exact, or wanted | test, or reason of the refusal |",
        "| --- | --- | --- |",
    ]
    rows += [
        f"| {each.options} | exact | {'; '.join(f'`{test}`' for test in each.tests)} |"
        for each in EXACT
    ]
    for refusal in REFUSALS:
        values = [f"`{value}`" for value in refusal.allowed if value is not None]
        wanted = "off" if False in refusal.allowed else " or ".join(values)
        rows.append(f"| `{refusal.flag}` | {wanted} | {refusal.reason} |")
    why = (
        "only such kernels repeat an iteration bit for bit, as `run.exactness=bitwise`"
        " needs it"
    )
    return [
        *rows,
        (
            "| `--deterministic-mode` | on, on a GPU, for `run.exactness=bitwise` |"
            f" {why} |"
        ),
    ]


if __name__ == "__main__":
    print("\n".join(option_table()))
