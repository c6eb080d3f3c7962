# Sourced by the scripts beside it: one tiny job, started by different launchers, which must all train the same.
#
# SHARDLOOM names the binary (target/debug/shardloom unless set), RANKS how many ranks (2 unless set).
set -eu

here=$(cd "$(dirname "$0")" && pwd)
SHARDLOOM=${SHARDLOOM:-$here/../../target/debug/shardloom}
RANKS=${RANKS:-2}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# need PROGRAM PACKAGE: skips, saying so, where the program is not installed.
need() {
    if ! command -v "$1" >/dev/null; then
        echo "skipped: $1 is not installed ($2)"
        exit 0
    fi
}

# run_file NAME: writes the job's configuration and prints its path.
run_file() {
    cat >"$work/$1.toml" <<TOML
[model]
path = "$here/../reference/llama3"
[data]
kind = "batches"
path = "$here/../reference/llama3/io.safetensors"
[train]
steps = 4
global_batch = 4
[optimizer]
lr = 1e-3
[device]
kind = "cpu"
timeout_s = 30
[output]
dir = "$work/$1"
model = false
[log]
sinks = ["jsonl"]
TOML
    echo "$work/$1.toml"
}

# losses NAME: the losses of that job.
losses() {
    sed -E 's/.*"loss":([^,}]*).*/\1/' "$work/$1/metrics.jsonl"
}

# same_job NAME COMMAND…: runs COMMAND with the job's arguments and compares its losses with --ranks'.
same_job() {
    name=$1
    shift
    "$SHARDLOOM" train "$(run_file alone)" --ranks "$RANKS"
    if ! "$@" "$SHARDLOOM" train "$(run_file "$name")" >"$work/output" 2>&1; then
        cat "$work/output"
        echo "failed: under $name"
        exit 1
    fi
    if [ "$(losses alone)" != "$(losses "$name")" ]; then
        echo "failed: under $name other losses than with --ranks $RANKS:"
        losses alone
        losses "$name"
        exit 1
    fi
    echo "passed: $RANKS ranks under $name train as with --ranks $RANKS"
}
