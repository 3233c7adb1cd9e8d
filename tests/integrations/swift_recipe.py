"""Trains a small MoE with ms-swift's own Megatron trainer, on CPUs.

The program does not refer to moe_ckpt. The program takes `--train-iters` and
`--eval-interval`, and ignores all other arguments. Samples differ in length.
"""
# ms-swift and the Megatron-Core that it needs are not installed:
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# The packages are imported when a function is called:
# ruff: noqa: PLC0415

import argparse
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

from tests.integrations.small_moe import SEQUENCE, VOCABULARY, settings


def model(args, _):
    from megatron.core import mpu
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        **settings(),
        pipeline_dtype=torch.bfloat16,
        params_dtype=torch.bfloat16,
        bf16=True,
        variable_seq_lengths=True,
        calculate_per_token_loss=True,
    )
    config.swiglu = False
    config.bridge = SimpleNamespace(load_weights=lambda *_: None)
    network = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(
            num_experts=4, moe_grouped_gemm=False
        ),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        pre_process=mpu.is_pipeline_first_stage(),
        post_process=mpu.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=True,
        position_embedding_type="rope",
    )
    return [network]


class Samples(torch.utils.data.Dataset):
    """Sequences of several lengths, which depend only on the seed and the index."""

    def __init__(self, length, seed):
        self.length, self.seed = length, seed

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(self.seed * 1000 + index)
        return torch.randint(
            VOCABULARY, (SEQUENCE // 2 + index % 5,), generator=generator
        )


def collate(samples, padding_to=None):
    longest = max(map(len, samples))
    rows = torch.stack(
        [
            torch.nn.functional.pad(each, (0, longest - len(each)), value=-100)
            for each in samples
        ]
    )
    return {
        "input_ids": rows.clamp(min=0),
        "labels": rows,
        "position_ids": torch.arange(longest).repeat(len(samples), 1),
    }


NOT_GIVEN = """
new_special_tokens mcore_model mcore_adapter model_dir vit_lr aligner_lr lr_decay_iters lr_wsd_decay_iters
lr_warmup_fraction virtual_pipeline_model_parallel_size fp8_recipe mtp_num_layers dsa_indexer_loss_coeff save_steps
save_total_limit metric_for_best_model num_train_epochs dataloader_prefetch_factor freeze_parameters_regex
trainable_parameters_regex
"""
"""Arguments of ms-swift that are None."""

OFF = """
padding_free check_model tp_comm_overlap async_save use_persistent_ckpt_worker is_multimodal fp16 overlap_grad_reduce
overlap_param_gather overlap_param_gather_with_optimizer_step data_parallel_random_init te_rng_tracker
apply_wd_to_qk_layernorm sequence_parallel manual_gc manual_gc_eval save_safetensors no_save_optim add_version
streaming nccl_comm_warmup enable_dft_loss enable_channel_loss data_sharding group_by_length dataloader_pin_memory
dataloader_persistent_workers
"""
"""Arguments of ms-swift that are False."""


def arguments(folder, num_iters, eval_interval):
    return SimpleNamespace(
        **dict.fromkeys(NOT_GIVEN.split()),
        **dict.fromkeys(OFF.split(), False),
        router_replay_mode="disabled",
        train_iters=num_iters,
        task_type="causal_lm",
        finetune=True,
        callbacks=["default_flow"],
        tuner_type="full",
        bf16=True,
        torch_dtype=torch.bfloat16,
        params_dtype=torch.bfloat16,
        accumulate_allreduce_grads_in_fp32=True,
        use_distributed_optimizer=True,
        seed=1234,
        optimizer="adam",
        lr=1e-3,
        min_lr=1e-4,
        weight_decay=0.01,
        clip_grad=1.0,
        adam_beta1=0.9,
        adam_beta2=0.999,
        adam_eps=1e-8,
        lr_warmup_iters=2,
        lr_warmup_init=0.0,
        lr_decay_style="cosine",
        start_weight_decay=0.01,
        end_weight_decay=0.01,
        weight_decay_incr_style="constant",
        lr_wsd_decay_style="exponential",
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=2,
        context_parallel_size=1,
        expert_model_parallel_size=2,
        expert_tensor_parallel_size=1,
        ddp_backend="gloo",
        ddp_timeout=600,
        model_info=SimpleNamespace(is_moe_model=True),
        attention_backend="unfused",
        seq_length=SEQUENCE,
        micro_batch_size=2,
        global_batch_size=8,
        num_microbatches=2,
        logging_steps=2,
        eval_steps=eval_interval,
        eval_iters=1,
        output_dir=str(folder),
        train_dataloader_shuffle=True,
        dataloader_num_workers=0,
        freeze_parameters=[],
        freeze_parameters_ratio=0.0,
        trainable_parameters=[],
    )


def seed_everything(seed, *_):
    import random

    import numpy as np
    from megatron.core import mpu, tensor_parallel

    seed += 100 * mpu.get_pipeline_model_parallel_rank()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def train(num_iters, eval_interval):
    from swift.megatron import init
    from swift.megatron.trainers import base
    from swift.megatron.trainers.trainer import MegatronTrainer
    from swift.megatron.utils import initialize_megatron, megatron_lm_utils

    init._patch__batched_p2p_ops()
    megatron_lm_utils.set_random_seed = seed_everything  # else mcore-bridge's own
    # otherwise mcore-bridge builds the model from Transformer Engine's layers
    base.get_mcore_model = model
    base.save_mcore_checkpoint = lambda *_, **__: None
    # in the working directory, which the test removes, also after a kill
    folder = Path(tempfile.mkdtemp(dir=Path.cwd()))
    (folder / "args.json").write_text("{}")
    args = arguments(folder, num_iters, eval_interval)
    initialize_megatron(args)
    template = SimpleNamespace(padding_free=False, config=None, data_collator=collate)
    MegatronTrainer(args, template).train(Samples(23, 1), Samples(9, 2))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--train-iters", type=int)
    parser.add_argument("--eval-interval", type=int)
    given, _ = parser.parse_known_args()
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    train(given.train_iters, given.eval_interval)
