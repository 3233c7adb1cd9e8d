"""Pretrains a small MoE with Megatron-Bridge's own `pretrain`, on CPUs.

The program does not refer to moe_ckpt. The program takes `--train-iters`,
`--eval-interval`, `--save` and `--load`, and ignores all other arguments.
"""
# Megatron-Bridge and the Megatron-Core that it needs are not installed:
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

import argparse

import torch
import torch.distributed as dist

from tests.integrations.small_moe import SEQUENCE, VOCABULARY, settings

# guarded: processes that write checkpoints import this file again, without stand-ins
if __name__ == "__main__":
    from megatron.bridge.models.gpt_provider import GPTModelProvider, local_layer_spec
    from megatron.bridge.training.config import (
        CheckpointConfig,
        ConfigContainer,
        DistributedDataParallelConfig,
        DistributedInitConfig,
        LoggerConfig,
        MockGPTDatasetConfig,
        OptimizerConfig,
        SchedulerConfig,
        TokenizerConfig,
        TrainingConfig,
        ValidationConfig,
    )
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain


def model():
    return GPTModelProvider(
        **settings(),
        transformer_layer_spec=local_layer_spec,
        seq_length=SEQUENCE,
        pipeline_dtype=torch.float32,
        vocab_size=VOCABULARY,
    )


def recipe(num_iters, eval_interval, **folders):
    return ConfigContainer(
        model=model(),
        train=TrainingConfig(
            train_iters=num_iters, global_batch_size=8, micro_batch_size=2
        ),
        # No evaluation after a load: a plain process draws a seed at its first
        # evaluation. In the count of an attached process, the first evaluation is in
        # an earlier iteration, so the attached process would not draw.
        validation=ValidationConfig(
            eval_interval=None if folders["load"] else eval_interval, eval_iters=1
        ),
        optimizer=OptimizerConfig(
            optimizer="adam",
            lr=1e-3,
            min_lr=1e-4,
            weight_decay=0.01,
            use_distributed_optimizer=True,
        ),
        scheduler=SchedulerConfig(
            start_weight_decay=0.01,
            end_weight_decay=0.01,
            lr_decay_style="cosine",
            lr_warmup_iters=2,
            lr_decay_iters=num_iters,
            override_opt_param_scheduler=True,
        ),
        ddp=DistributedDataParallelConfig(use_distributed_optimizer=True),
        dataset=MockGPTDatasetConfig(
            seq_length=SEQUENCE,
            random_seed=1234,
            reset_attention_mask=False,
            reset_position_ids=False,
            eod_mask_loss=False,
            num_dataset_builder_threads=1,
            dataloader_type="single",
            num_workers=0,
            persistent_workers=False,
            pin_memory=False,
            data_sharding=True,
        ),
        logger=LoggerConfig(log_interval=1, skip_train_metrics_log=True),
        tokenizer=TokenizerConfig(
            tokenizer_type="NullTokenizer", vocab_size=VOCABULARY - 1
        ),
        checkpoint=CheckpointConfig(
            ckpt_format="torch_dist",
            save_interval=2,
            load_optim=False,
            load_rng=False,
            **folders,
        ),
        dist=DistributedInitConfig(distributed_backend="gloo"),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--save")
    parser.add_argument("--load")
    parser.add_argument("--train-iters", type=int)
    parser.add_argument("--eval-interval", type=int)
    given, _ = parser.parse_known_args()
    # initialized here: Bridge's own initialization has a barrier that needs a device
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    pretrain(
        recipe(
            given.train_iters, given.eval_interval, save=given.save, load=given.load
        ),
        forward_step,
    )
