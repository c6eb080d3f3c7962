#!/bin/sh
# Whole steps of two ranks with a core each, ours and PyTorch FSDP2's over gloo in turn (PYTHON names the interpreter that
# has torch and transformers): the 58 M model, 256 x 4 tokens a rank, f32, clipping and AdamW. Ours also without sharding.
#   benches/cpu-ranks.sh [ROUNDS]
set -eu
cd "$(dirname "$0")/.."
rounds="${1:-3}"
python="${PYTHON:-python3}"
peer="benches/h200/torch_fsdp2.py --device cpu --size 60m --seq 256 --rows 4 --compute f32 --steps 5 --warm-up 2"
rate() { sed -n 's/.*"tokens_per_s": *\([0-9.]*\).*/\1/p' | tail -n 1; }
ours() { ./target/release/shardloom bench step --ranks 2 --steps 5 --warm-up 2 --set "shard.strategy=$1" 2>/dev/null | rate; }
theirs() {
    export WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29533
    RANK=1 "$python" $peer >/dev/null 2>&1 &
    RANK=0 "$python" $peer 2>/dev/null | rate
    wait
}
cargo build --release --quiet -p shardloom
if ! "$python" -c 'import torch.distributed, transformers' 2>/dev/null; then
    echo "PyTorch skipped: $python has no torch and transformers"
    theirs() { echo; }
fi
echo "tokens/s    full    none  full/none  PyTorch  full/PyTorch"
for round in $(seq "$rounds"); do
    full="$(ours full)" none="$(ours none)" torch="$(theirs)"
    echo "$round $full $none ${torch:-0}" | awk '{
        printf "%8s %7.0f %7.0f %10.2f", $1, $2, $3, $2 / $3
        if ($4 > 0) printf " %8.0f %13.2f", $4, $2 / $4
        print ""
    }'
done
