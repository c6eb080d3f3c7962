#!/usr/bin/env bash
# Checkpoints between Shardloom and real PyTorch, there and back, number by number. Needs Python with torch, transformers
# and safetensors (PYTHON=…, python3 by default), and says so and passes where they are not installed.
#   tests/interop/dcp.sh [SHARDLOOM]
set -euo pipefail
cd "$(dirname "$0")/../.."
python="${PYTHON:-python3}"
for module in torch transformers safetensors; do
    if ! "$python" -c "import $module" 2>/dev/null; then
        echo "skipped: $python has no $module"
        exit 0
    fi
done
shardloom="${1:-}"
if [ -z "$shardloom" ]; then
    cargo build --release --locked -p shardloom
    shardloom=target/release/shardloom
fi
script=tests/interop/dcp.py
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 HF_HUB_DISABLE_PROGRESS_BARS=1 TQDM_DISABLE=1

reference=tests/reference/llama3
cat > "$work/run.toml" <<'TOML'
[data]
kind = "batches"
[train]
steps = 12
global_batch = 4
[optimizer]
lr = 1e-3
weight_decay = 0.1
decay = "all"
[device]
kind = "cpu"
[log]
sinks = ["jsonl"]
TOML

ours() { # OUTPUT FLAGS…: trains
    local out=$1
    shift
    "$shardloom" train "$work/run.toml" --set output.dir="$out" --set model.path="$reference" \
        --set data.path="$reference/io.safetensors" "$@"
}
losses() { # OUTPUT FIRST LAST: what was logged
    "$python" -c 'import json,sys; print(json.dumps([r["loss"] for r in map(json.loads, open(sys.argv[1]+"/metrics.jsonl")) if int(sys.argv[2]) <= r["step"] <= int(sys.argv[3])]))' "$@"
}
curve() { # FIRST LAST: PyTorch's losses
    "$python" -c 'import json,sys; print(json.dumps(json.load(open(sys.argv[1]))["curves"]["clip1"]["loss"][int(sys.argv[2])-1:int(sys.argv[3])]))' "$reference/curve.json" "$@"
}
fsdp2() { # CHECKPOINT FIRST LAST [SAVE_TO]: two ranks of PyTorch
    "$python" -m torch.distributed.run --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0 \
        "$script" go-on "$reference" "$@" 2> "$work/fsdp2.log" || { cat "$work/fsdp2.log" >&2; return 1; }
}
compare() { # WHAT A B BOUND
    echo "$1"
    "$python" "$script" close "$2" "$3" "$4"
}

for name in llama31-tied qwen2 llama3; do
    reference=tests/reference/$name six=$work/$name
    ours "$six" --ranks 2 --set train.steps=6
    "$shardloom" checkpoint export "$six" --to dcp --files 3 --out "$six-dcp"
    ours "$six-on" --ranks 2 --resume "$six"
    theirs=$(fsdp2 "$six-dcp" 7 12)
    compare "$name: 6 steps here, exported, 6 steps of FSDP2, against PyTorch's curve" "$theirs" "$(curve 7 12)" 2e-5
    compare "$name: the same against 6 more steps here" "$theirs" "$(losses "$six-on" 7 12)" 1e-6
    compare "$name: from_pretrained on the native checkpoint of step 6: the loss of step 7" \
        "$("$python" "$script" pretrained "$reference" "$(readlink -f "$six/checkpoints/latest")" 7)" \
        "$(losses "$six-on" 7 7)" 1e-6
done

fsdp2 "$six-dcp" 7 9 "$work/dcp9" > "$work/nine.json"
"$shardloom" checkpoint import "$work/dcp9" --from dcp --model "$reference" --out "$work/nine"
ours "$work/twelve" --ranks 2 --resume "$work/nine"
compare "then saved by PyTorch after step 9, imported, 3 steps here" \
    "$(losses "$work/twelve" 10 12)" "$(curve 10 12)" 2e-5

"$shardloom" checkpoint import "$reference/dcp-step6" --model "$reference" --out "$work/imported"
ours "$work/imported-on" --resume "$work/imported"
compare "an older PyTorch's checkpoint imported, 6 steps here" "$(losses "$work/imported-on" 7 12)" "$(curve 7 12)" 2e-5

echo "from_pretrained on the native checkpoint of step 12: logits, against PyTorch's own weights after 12 steps"
"$python" "$script" logits "$reference" "$(readlink -f "$work/twelve/checkpoints/latest")" "$reference/after12.safetensors"
echo "all held"
