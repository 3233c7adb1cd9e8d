#!/usr/bin/env bash
# Pretrain a small MoE with Megatron-LM's own loop, unchanged, on 4 local ranks (two stages, two-way expert parallelism):
#
#     examples/megatron_lm.sh                                   # with --ckpt moevement
#     examples/megatron_lm.sh --ckpt gemini --set every_iters=2 # or another policy; --ckpt none: plain, for comparison
#
# It needs a Python environment with megatron.training: megatron-core 0.19 on Python 3.12, or for a trial
# `python scripts/fetch_megatron_lm.py` and PYTHONPATH=.venv/megatron-lm-0.19.2. Without a GPU it trains on CPUs;
# on GPUs add --deterministic-mode.
cd "$(dirname "$0")/.." || exit 1
export CUDA_DEVICE_MAX_CONNECTIONS=1
exec torchrun --nproc-per-node=4 -m moe_ckpt.run "$@" -- examples/megatron_lm.py \
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 \
    --num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --disable-bias-linear \
    --pipeline-model-parallel-size 2 --expert-model-parallel-size 2 --use-distributed-optimizer \
    --micro-batch-size 2 --global-batch-size 8 --train-iters 20 --eval-interval 10 --eval-iters 1 --log-interval 1 \
    --lr 1e-3 --min-lr 1e-4 --lr-warmup-iters 2 --lr-decay-style cosine \
    --mock-data --tokenizer-type NullTokenizer --vocab-size 255 --split 90,10,0 --num-workers 0 \
    --transformer-impl local --attention-backend unfused --distributed-backend gloo --no-gradient-accumulation-fusion \
    --no-bias-swiglu-fusion --no-masked-softmax-fusion --no-persist-layer-norm
