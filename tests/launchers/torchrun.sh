#!/bin/sh
# The job under torchrun, whose agent serves the store; and then a failing one, whose error torchrun must show.
. "$(dirname "$0")/job.sh"
need torchrun "pip install torch"
if torchrun --no-python --nproc-per-node "$RANKS" "$SHARDLOOM" train /no/such/run.toml >"$work/output" 2>&1; then
    echo "failed: torchrun did not see the failure"
    exit 1
fi
if ! grep -q 'error_file *: */.*error.json' "$work/output" || ! grep -q '/no/such/run.toml' "$work/output"; then
    cat "$work/output"
    echo "failed: torchrun does not show the rank's own message"
    exit 1
fi
same_job torchrun torchrun --no-python --standalone --nproc-per-node "$RANKS"
