#!/usr/bin/env bash
# Prepare the folder .gpu, on a machine with pip, for a machine with one GPU and no
# network that has Python 3.12 and torch 2.11 with CUDA 13. The folder has the wheels
# that the machine lacks, and libraries with machine code of its GPU alone (sm_90: H100,
# H200). Run in the root of the checkout; needs unzip, xz and binutils. Takes half a
# minute and the time of the download; 50 MB.
#
#     bash scripts/gpu/pack.sh [sm_90]
set -euo pipefail
architecture=${1:-sm_90}
python=${PYTHON:-python3}
# kernels of Transformer Engine; the torch extension of the same release is built on the
# machine
te=2.11.0
# for NCCL_MULTI_RANK_GPU_ENABLE; jobs use torch's own NCCL
nccl=2.30.7
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
rm -rf .gpu
mkdir -p .gpu/whl .gpu/te .gpu/lm

wheel() { # wheel FOLDER REQUIREMENT...
    local folder=$1 platforms=()
    shift
    for tag in manylinux_2_28 manylinux_2_27 manylinux_2_24 manylinux_2_18 manylinux_2_17 manylinux2014 manylinux1; do
        platforms+=(--platform "${tag}_x86_64")
    done
    "$python" -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
        "${platforms[@]}" -d "$folder" "$@"
}
thin() { "$python" scripts/gpu/thin_fatbin.py "$1" "$2" "${architecture#sm_}"; }

wheel .gpu/whl hydra-core==1.3.8 omegaconf==2.3.1 msgspec xxhash megatron-core==0.16.1 \
    pydantic annotated-types typing-inspection
wheel .gpu/te "transformer-engine==$te"
core=$(unzip -p .gpu/whl/pydantic-[0-9]*.whl '*/METADATA' | sed -n 's/^Requires-Dist: \(pydantic-core==[0-9.]*\).*/\1/p')
wheel .gpu/whl "$core"
# antlr4 has a source release only
"$python" -m pip wheel -q --no-deps -w .gpu/whl antlr4-python3-runtime==4.9.3
# megatron.training, for the step `attached`
wheel .gpu/lm megatron-core==0.19.2
"$python" scripts/gpu/fetch_source.py transformer-engine-torch "$te" .gpu

wheel "$work" "transformer-engine-cu13==$te"
unzip -q "$work"/transformer_engine_cu13-*.whl -d "$work/te"
library=$work/te/transformer_engine/wheel_lib/libtransformer_engine.so
thin "$library" "$work/thin.so"
mv "$work/thin.so" "$library"
tar -C "$work/te" -cf - . | xz -T0 -1 > .gpu/transformer_engine.tar.xz

wheel "$work" "nvidia-nccl-cu13==$nccl"
unzip -q -j "$work"/nvidia_nccl_cu13-*.whl nvidia/nccl/lib/libnccl.so.2 -d "$work"
thin "$work/libnccl.so.2" "$work/thin.so"
strip -o "$work/small.so" "$work/thin.so"
xz -T0 -1 -c "$work/small.so" > .gpu/libnccl.so.2.xz
du -sh .gpu
