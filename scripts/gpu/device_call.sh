#!/usr/bin/env bash
# Run all checks that one machine with one GPU can do in nine minutes, cheap failures
# first. Run in the root of the checkout, with the folder .gpu of scripts/gpu/pack.sh:
#
#     OUT=FOLDER bash scripts/gpu/device_call.sh [STEP...]
#     CPU=1 OUT=FOLDER bash scripts/gpu/device_call.sh       a rehearsal without a GPU
#                                                            and without .gpu
#
# Without a STEP: the steps of a first call, or with CPU=1 all steps that need no CUDA.
# Each step has a separate time limit, writes its result to $OUT/summary.txt and stops
# no other step. TOTAL is the limit of all steps together, in seconds. No network is
# used. Logs, events and a built wheel are written to $OUT.
set -u
begun=$SECONDS
total=${TOTAL:-540}
site=${SITE:-/tmp/moe-ckpt-site}
te_site=$site-te
work=$(mktemp -d)
on_cpu=$([ "${CPU:-0}" = 1 ] && echo --cpu)
python=${PYTHON:-$([ -n "$on_cpu" ] && ls .venv/bin/python 2> /dev/null || command -v python3)}
mkdir -p "$OUT" "$work/logs"
export PYTHONUNBUFFERED=1 PYTORCH_NVML_BASED_CUDA_CHECK=1 OMP_NUM_THREADS=1 PYTHONPATH="$site:$PWD"

say() { echo "[$((SECONDS - begun)) s] $*" | tee -a "$OUT/summary.txt"; }
left() { echo $((total - SECONDS + begun)); }
pack_logs() { tar -C "$work" -czf "$OUT/logs.tar.gz" logs; }

# step NAME LIMIT LINES COMMAND...: run a command and report its last LINES. The command
# does not start if less than half of LIMIT is left. @LIMIT@ in COMMAND becomes the
# number of seconds in which the command has to end by itself.
step() {
    local name=$1 limit=$2 lines=$3 status said
    shift 3
    if [ "$(left)" -lt $((limit / 2)) ]; then
        say "$name: not begun, $(left) s are left"
        return 1
    fi
    [ "$(left)" -lt "$limit" ] && limit=$(left)
    # SIGINT, once: Python unwinds, and ends jobs that are in other sessions
    timeout --foreground -s INT -k 5 "$limit" "${@//@LIMIT@/$((limit - 20))}" > "$work/logs/$name.log" 2>&1
    status=$?
    said=$(grep -v '^$' "$work/logs/$name.log" | tail -n "$lines" | cut -c1-900)
    say "$name: status $status: $said"
    pack_logs
    return $status
}

# accept NAME LIMIT STAGE...: run stages of the acceptance, one after another
accept() {
    local name=$1 limit=$2
    shift 2
    step "$name" "$limit" 2 "$python" scripts/gpu_acceptance.py ${on_cpu:---small} --out "$work/acceptance" "$@"
}

# unpack the packages that the machine lacks; libraries have machine code of the
# machine's GPU alone. No step finds Transformer Engine before its extension of torch is
# built: half of Transformer Engine would be taken for the whole
unpack() {
    local pip=("$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade)
    "${pip[@]}" --target "$site" .gpu/whl/*.whl || say "unpack: pip failed"
    "${pip[@]}" --target "$te_site" .gpu/te/*.whl || say "unpack: pip failed for Transformer Engine"
    "$python" - "$te_site" "$work/libnccl.so.2" << 'PYTHON' || say "unpack: Transformer Engine or NCCL failed"
import lzma, shutil, sys, tarfile  # the machine may lack xz
with tarfile.open(".gpu/transformer_engine.tar.xz") as archive:
    archive.extractall(sys.argv[1], filter="fully_trusted")
with lzma.open(".gpu/libnccl.so.2.xz") as source, open(sys.argv[2], "wb") as target:
    shutil.copyfileobj(source, target)
PYTHON
    nvidia-smi --query-gpu=name,driver_version,memory.total,compute_mode --format=csv,noheader | tee -a "$OUT/summary.txt"
}

# the extension has no wheel, and is built while steps wait for turns of the GPU
build_te() {
    local nvidia includes source
    nvidia=$("$python" -c 'import nvidia; print(list(nvidia.__path__)[0])')
    includes=$(ls -d "$nvidia"/*/include | paste -sd:)
    source=$(ls .gpu/transformer_engine_torch-*.whl .gpu/transformer_engine_torch-*.tar.gz 2> /dev/null | head -1)
    export NVTE_FRAMEWORK=pytorch NVTE_PYTORCH_FORCE_BUILD=TRUE MAX_JOBS=8 CPLUS_INCLUDE_PATH=$includes
    export PYTHONPATH=$te_site:$PYTHONPATH
    nice -n 19 "$python" -m pip wheel -q --no-deps --no-index --no-build-isolation -w "$work/te" "$source" &&
        "$python" -m pip install -q --no-index --no-deps --upgrade --target "$te_site" "$work"/te/*.whl &&
        cp "$work"/te/*.whl "$OUT/"
}

# called before steps that use Transformer Engine or must be alone on the machine: waits
# for the build; fails without Transformer Engine, except in a rehearsal
has_te() {
    [ -n "$on_cpu" ] && return
    if [ -n "$build" ]; then
        timeout $(($(left) > 160 ? $(left) - 120 : 40)) tail --pid="$build" -f /dev/null || kill -- "-$build"
        if wait "$build"; then
            export PYTHONPATH=$te_site:$PYTHONPATH
            te_is_built=1
            say "Transformer Engine is built"
        else
            say "Transformer Engine is not built: $(tail -n 2 "$work/logs/build_te.log" | cut -c1-300)"
        fi
        build=
    fi
    [ -n "$te_is_built" ]
}

facts() { accept facts 60 facts; }
probe() { step probe 100 14 "$python" scripts/gpu/nccl_probe.py $on_cpu; }
probe_same_host() {
    [ -e "$work/libnccl.so.2" ] || { say "probe_same_host: not begun without an NCCL in .gpu" && return 1; }
    step probe_same_host 100 14 env LD_PRELOAD="$work/libnccl.so.2" "$python" scripts/gpu/nccl_probe.py --same-host
}
ranks4() { accept ranks4 240 "${prefix}4" "${prefix}4kill"; }
ranks4tp() { accept ranks4tp 130 "${prefix}4tp"; }
register() { step register 45 13 "$python" scripts/gpu/register_probe.py $on_cpu --gib "$([ -n "$on_cpu" ] && echo 0.1 || echo 2)"; }

# price NAME LIMIT ARGUMENTS...: measure prices with a model that keeps the GPU busy,
# alone on the machine
price() {
    local name=$1 limit=$2 model
    shift 2
    if [ -n "$on_cpu" ]; then
        model=(--cpu --rounds 2 --block-s 4 --warm-s 2 model=tiny train.sequence_length=16 train.micro_batch_size=2
            train.global_batch_size=4)
    else
        model=(--rounds 9 --block-s 5 --warm-s 25 model=gpu_small model.moe_grouped_gemm=true train.sequence_length=2048
            train.micro_batch_size=8 train.global_batch_size=32 train.lr=3.0e-4 train.min_lr=3.0e-5)
    fi
    step "$name" "$limit" 3 "$python" scripts/gpu/price.py --out "$work/$name" --limit-s @LIMIT@ "$@" "${model[@]}"
}
price_moevement() { price price_moevement 190 --policy moevement,ckpt.window=4 --policy moevement; }
price_others() { price price_others 220 --policy gemini --policy none; }
# pipelines through host memory: NCCL kernels of a stopped rank would poll, and take
# turns of the GPU from the job that is measured
price_copies() {
    price price_copies 170 --ranks 2 --policy moevement,ckpt.window=4,parallel.ranks_per_node=1 parallel.pp=2 runtime.backend=staged
}
price_ranks4() { price price_ranks4 170 --ranks 4 --policy moevement,ckpt.window=4 parallel.pp=4 runtime.backend=staged; }

formats() { accept formats 110 formats fp8cast --at-once 2; }
attached() {
    export NCCL_ALGO=Ring NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 CUBLAS_WORKSPACE_CONFIG=:4096:8 CUDA_DEVICE_MAX_CONNECTIONS=1
    mkdir -p "$work/megatron_lm"
    "$python" -m zipfile -e .gpu/lm/*.whl "$work/megatron_lm"
    step attached 100 3 env PYTHONPATH="$work/megatron_lm:$PYTHONPATH" "$python" -m launcher.prove -- \
        "$python" -m torch.distributed.run --standalone --local-addr=127.0.0.1 --nproc-per-node=1 \
        -m moe_ckpt.run --ckpt moevement --set window=2 -- examples/megatron_lm.py \
        --num-layers 2 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 \
        --num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --moe-grouped-gemm \
        --disable-bias-linear --use-distributed-optimizer --micro-batch-size 2 --global-batch-size 8 \
        --train-iters 12 --eval-interval 100 --eval-iters 1 --log-interval 1 --lr 1e-3 --min-lr 1e-4 \
        --lr-warmup-iters 2 --lr-decay-style cosine --mock-data --tokenizer-type NullTokenizer --vocab-size 255 \
        --split 90,10,0 --num-workers 0 --transformer-impl transformer_engine --bf16 --deterministic-mode \
        --attention-backend fused
}

# steps that check correctness alone, and so may disturb each other. Of the two, SIGINT
# ends only the one in the foreground of bash
exact() {
    formats &
    attached
    wait $!
}

known="facts probe probe_same_host ranks4 register ranks4tp price_moevement price_others price_copies price_ranks4"
known="$known formats attached exact"
if [ $# -gt 0 ]; then
    steps=$*
elif [ -n "$on_cpu" ]; then
    steps="facts probe ranks4 register ranks4tp price_moevement price_others price_copies price_ranks4"
else
    steps="facts probe probe_same_host ranks4 register ranks4tp price_moevement exact"
fi
prefix=onegpu build='' te_is_built=''
if [ -z "$on_cpu" ]; then
    unpack
    set -m  # makes the build a process group, which can be ended
    build_te > "$work/logs/build_te.log" 2>&1 &
    build=$!
    set +m
fi
for name in $steps; do
    if [[ " $known " != *" $name "* ]]; then
        say "$name: got no such step, wanted some of: $known"
        continue
    fi
    case $name in
        ranks4tp | price_* | formats | attached | exact)
            has_te || { say "$name: not begun without Transformer Engine" && continue; }
            ;;
    esac
    "$name"
    status=$?
    # if NCCL refuses, the four ranks on the GPU communicate through host memory
    [ "$name" = probe ] && [ $status -ne 0 ] && prefix=ranks
done
[ -n "$build" ] && kill -- "-$build"
runs=$(cd "$work" && ls -d acceptance price_* 2> /dev/null)
tar -C "$work" -czf "$OUT/runs.tar.gz" --exclude='*.safetensors' --exclude=checkpoints $runs 2> /dev/null
pack_logs
rm -rf "$work"
cat "$OUT/summary.txt"
