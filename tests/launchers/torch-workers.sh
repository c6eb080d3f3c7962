#!/bin/sh
# PyTorch's own processes under our launcher: with --plain-store they meet in its store, which speaks their protocol.
. "$(dirname "$0")/job.sh"
PYTHON=${PYTHON:-python3}
need "$PYTHON" "apt-get install python3"
if ! "$PYTHON" -c 'import torch.distributed' 2>/dev/null; then
    echo "skipped: $PYTHON has no torch (pip install torch; PYTHON names another interpreter)"
    exit 0
fi
if ! "$SHARDLOOM" launch --plain-store --nproc-per-node "$RANKS" -- "$PYTHON" "$here/torch_workers.py" \
    >"$work/output" 2>&1 || [ "$(grep -c "agree on" "$work/output")" != "$RANKS" ]; then
    cat "$work/output"
    echo "failed: PyTorch's ranks do not meet in our store"
    exit 1
fi
echo "passed: $RANKS ranks of PyTorch meet in our store and sum over gloo"
