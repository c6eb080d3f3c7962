#!/bin/sh
# Collectives between processes of this machine: ours over shared memory and sockets, and PyTorch's gloo where
# torch is installed (PYTHON names the interpreter that has it). Both count bytes of the whole buffer / time.
#   benches/collectives.sh [RANKS]
set -eu
cd "$(dirname "$0")/.."
ranks="${1:-2}"
python="${PYTHON:-python3}"
cargo build --release --quiet -p shardloom
for group in shm tcp; do
    ./target/release/shardloom bench collectives --ranks "$ranks" --group "$group"
done
if "$python" -c 'import torch.distributed' 2>/dev/null; then
    "$python" -m torch.distributed.run --nproc-per-node "$ranks" benches/gloo_collectives.py 2>/dev/null
else
    echo "gloo skipped: $python has no torch"
fi
