"""Pretrains a small MoE on mock data through Megatron-LM's own `pretrain`.

The program contains nothing of moe_ckpt.
"""

from functools import partial

import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import (
    BlendedMegatronDatasetBuilder,
)
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import (
    gpt_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import parse_and_validate_args


def loss_of(mask, per_token):
    total, count = (per_token.float().view(-1) * mask.view(-1)).sum(), mask.sum()
    return total / count, {"lm loss": torch.stack([total, count]).detach()}


def forward_step(batches, model):
    on_edge = (
        parallel_state.is_pipeline_first_stage()
        or parallel_state.is_pipeline_last_stage()
    )
    batch = next(batches) if on_edge else {}
    output = model(
        batch.get("tokens"), batch.get("position_ids"), None, labels=batch.get("labels")
    )
    return output, partial(loss_of, batch.get("loss_mask"))


def datasets(sizes):
    shape = {
        "sequence_length": get_args().seq_length,
        "random_seed": get_args().seed,
        "split": get_args().split,
    }
    masks = {
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "eod_mask_loss": False,
    }
    config = GPTDatasetConfig(
        **shape,
        **masks,
        create_attention_mask=False,
        tokenizer=build_tokenizer(get_args()),
    )
    return BlendedMegatronDatasetBuilder(
        MockGPTDataset, sizes, lambda: True, config
    ).build()


datasets.is_distributed = True
if __name__ == "__main__":
    args = parse_and_validate_args()
    container = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(container, datasets, ModelType.encoder_or_decoder, forward_step)
