"""A client of Megatron-LM's `pretrain` with the options of production recipes, on CPUs.

The client has a stand-in for attention over context-parallel ranks, and takes
moe_ckpt's stand-in for a fused Adam. Arguments beside those of Megatron-LM:

    --train-only PATTERN   freezes all parameters whose names do not match
    --stateful             gives external iterators a state
    --storage-takes-s S    makes each save last S seconds longer
"""
# Megatron-Core's annotations differ between the installed release and that of
# Megatron-LM's wheel:
# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportFunctionMemberAccess=false, reportOptionalMemberAccess=false
# pyright: reportCallIssue=false, reportMissingImports=false

import copy
import importlib
import re
import sys
import time
from functools import partial
from types import SimpleNamespace

import torch
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.datasets.blended_megatron_dataset_builder import (
    BlendedMegatronDatasetBuilder,
)
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.optimizer import OptimizerConfig
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer import dot_product_attention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.utils import get_batch_on_this_cp_rank
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import (
    gpt_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import parse_and_validate_args

from moe_ckpt.standins import precision_adam


def loss_of(mask, per_token):
    total, count = (per_token.float().view(-1) * mask.view(-1)).sum(), mask.sum()
    report = {"lm loss": torch.stack([total, count]).detach()}
    return (
        (total, count.int(), report)
        if get_args().calculate_per_token_loss
        else (total / count, report)
    )


def forward_step(batches, model):
    batch = next(batches)
    # so that ranks differ in the number of tokens that count
    batch["loss_mask"][:, : int(batch["tokens"][0, 0]) % 4] = 0.0
    group = parallel_state.get_context_parallel_group()
    batch = (
        get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=group)
        if group.size() > 1
        else batch
    )
    masked = {"loss_mask": batch["loss_mask"]} if get_args().mtp_num_layers else {}
    output = model(
        batch["tokens"], batch["position_ids"], None, labels=batch["labels"], **masked
    )
    return output, partial(loss_of, batch["loss_mask"])


class Stream:
    """Samples without random access.

    As with `iter(DataLoader)`, the first read for training draws a seed from torch.

    Args:
        seed: Seed of the samples; data-parallel ranks get different samples.
        is_open: Whether the first read draws no seed.
    """

    def __init__(self, seed, is_open=False):
        self.generator = torch.Generator().manual_seed(
            seed + parallel_state.get_data_parallel_rank()
        )
        self.is_open = is_open

    def __next__(self):
        if not self.is_open:
            self.is_open = torch.empty((), dtype=torch.int64).random_() is not None
        args = get_args()
        words = torch.randint(
            args.padded_vocab_size,
            (args.micro_batch_size, args.seq_length + 1),
            generator=self.generator,
        )
        positions = torch.arange(args.seq_length).expand(args.micro_batch_size, -1)
        tokens, labels = words[:, :-1].contiguous(), words[:, 1:].contiguous()
        return {
            "tokens": tokens,
            "labels": labels,
            "position_ids": positions,
            "loss_mask": torch.ones(labels.shape),
        }


class StatefulStream(Stream):
    def state_dict(self):
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state):
        self.generator.set_state(state["generator"])


def datasets(sizes, vp_stage=None):
    if get_args().dataloader_type == "external":
        kind = StatefulStream if get_args().stateful else Stream
        return kind(1), kind(1000, is_open=True), None
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


class GatheredAttention(dot_product_attention.DotProductAttention):
    """Megatron's local attention over keys and values of all context-parallel ranks."""

    def __init__(self, config, layer_number, attn_mask_type, *arguments, **options):
        alone = copy.copy(config)
        alone.context_parallel_size = 1  # Megatron's attention refuses others
        super().__init__(
            alone, layer_number, AttnMaskType.arbitrary, *arguments, **options
        )

    def forward(self, query, key, value, *_, **__):
        group = parallel_state.get_context_parallel_group()
        gather = partial(
            tensor_parallel.gather_from_sequence_parallel_region, group=group
        )
        half = query.shape[0] // 2
        starts = [
            [rank * half, (2 * group.size() - 1 - rank) * half]
            for rank in range(group.size())
        ]
        positions = torch.tensor(
            [start + i for pair in starts for start in pair for i in range(half)]
        )
        mine = positions.view(group.size(), -1)[group.rank()]
        return super().forward(
            query,
            gather(key),
            gather(value),
            (positions > mine[:, None])[None, None],
            None,
        )


def freeze(pattern, chunks):
    """Freeze all parameters whose names do not match a pattern."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            parameter.requires_grad_(re.search(pattern, name) is not None)
    return chunks


def slow_down_storage(seconds):
    """Make each save of a checkpoint last some seconds longer."""
    save = dist_checkpointing.save

    def saved(*arguments, **options):
        time.sleep(seconds)
        return save(*arguments, **options)

    dist_checkpointing.save = saved


def own_arguments(parser):
    parser.add_argument("--train-only")
    parser.add_argument("--stateful", action="store_true")
    parser.add_argument("--storage-takes-s", type=float, default=0.0)
    return parser


def use_fused_adam():
    """Put the CPU reference of the fused Adam in place of Transformer Engine's Adam.

    `--use-precision-aware-optimizer` looks for Transformer Engine's Adam.
    """
    precision_adam.install()
    check = OptimizerConfig.__post_init__

    def checked(config):
        with precision_adam.importable():
            check(config)

    OptimizerConfig.__post_init__ = checked


def main():
    # the check of --context-parallel-size asks for these properties
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(major=10)
    if "--step-batch-size-schedule" in sys.argv:
        at = sys.argv.index("--global-batch-size")
        del sys.argv[at : at + 2]
    args = parse_and_validate_args(own_arguments)
    if args.use_precision_aware_optimizer:
        use_fused_adam()
    if args.context_parallel_size > 1:
        for module in ("models.gpt.gpt_layer_specs", "models.backends"):
            importlib.import_module(
                f"megatron.core.{module}"
            ).DotProductAttention = GatheredAttention
    container = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    if args.train_only:
        container.model.pre_wrap_hooks.append(partial(freeze, args.train_only))
    if args.storage_takes_s:
        slow_down_storage(args.storage_takes_s)
    pretrain(container, datasets, ModelType.encoder_or_decoder, forward_step)


if __name__ == "__main__":
    main()
