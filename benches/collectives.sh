#!/bin/sh
# Collectives between processes of this machine: ours over shared memory and sockets beside PyTorch's gloo, where torch
# is installed (PYTHON names the interpreter that has it). Rounds of all of them take turns, so that a busy moment of
# the machine falls on each; the table shows medians over the rounds, and how many times gloo's time ours is.
#   benches/collectives.sh [RANKS [ROUNDS]]
set -eu
cd "$(dirname "$0")/.."
ranks="${1:-2}"
rounds="${2:-5}"
python="${PYTHON:-python3}"
found=$(mktemp)
trap 'rm -f "$found"' EXIT

cargo build --release --quiet -p shardloom
if "$python" -c 'import torch.distributed' 2>/dev/null; then
    groups="shm tcp gloo"
else
    echo "gloo skipped: $python has no torch"
    groups="shm tcp"
fi

# measure GROUP: "operation bytes microseconds", a line each.
measure() {
    case $1 in
    gloo) "$python" -m torch.distributed.run --nproc-per-node "$ranks" benches/gloo_collectives.py 2>/dev/null ;;
    *) ./target/release/shardloom bench collectives --ranks "$ranks" --group "$1" ;;
    esac | awk '$1 ~ /^(all_gather|reduce_scatter|all_reduce)$/ { print $1, $2, $3 }'
}

for _ in $(seq "$rounds"); do
    for group in $groups; do
        measure "$group" | sed "s/^/$group /" >>"$found"
    done
done

echo "$ranks ranks, f32, medians of $rounds rounds: microseconds, GB/s of the whole buffer, and gloo's time / ours"
sort -k2,2 -k3,3n -k1,1 -k4,4n "$found" | awk '
    function show(group, key,   us) {
        us = median[group, key]
        return us == "" ? sprintf(" %9s %7s", "-", "-") : sprintf(" %9.1f %7.2f", us, bytes[key] / us / 1e3)
    }
    function ratio(group, key) {
        return median["gloo", key] == "" ? sprintf(" %7s", "-") : sprintf(" %6.2fx", median["gloo", key] / median[group, key])
    }
    {
        key = $2 " " $3
        bytes[key] = $3
        if (!(key in seen)) { seen[key] = 1; keys[++num] = key }
        values[$1, key, ++count[$1, key]] = $4
    }
    END {
        for (both in count) {
            split(both, part, SUBSEP)
            half = int((count[both] + 1) / 2)
            low = values[part[1], part[2], half]
            high = values[part[1], part[2], count[both] - half + 1]
            median[both] = (low + high) / 2
        }
        printf "%-15s %10s %17s %17s %17s %7s %7s\n", "", "bytes", "shm", "tcp", "gloo", "shm", "tcp"
        for (i = 1; i <= num; i++) {
            split(keys[i], part, " ")
            printf "%-15s %10d%s%s%s%s%s\n", part[1], part[2], show("shm", keys[i]), show("tcp", keys[i]), \
                show("gloo", keys[i]), ratio("shm", keys[i]), ratio("tcp", keys[i])
        }
    }'
