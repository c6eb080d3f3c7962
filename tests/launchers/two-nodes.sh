#!/bin/bash
# Two nodes imitated by network namespaces: launchers meet over a link of their own, once by number (static) and
# once at an endpoint (c10d), and the job trains, over tcp, as on one machine. Then a node loses its link, while ranks
# sleep and while they train: both sides must end and say whom they lost. As root.
. "$(dirname "$0")/job.sh"
export SHARDLOOM_SECRET="two nodes of $$"
need ip "apt-get install iproute2"
if ! ip netns add shardloom-a 2>/dev/null; then
    echo "skipped: this machine allows no network namespaces"
    exit 0
fi
ip netns add shardloom-b
trap 'kill $(jobs -p) 2>/dev/null || true; ip netns del shardloom-a; ip netns del shardloom-b; rm -rf "$work"' EXIT
ip link add shl-a netns shardloom-a type veth peer name shl-b netns shardloom-b
for side in a:1 b:2; do
    ns=shardloom-${side%:*}
    ip -n "$ns" addr add "10.77.0.${side#*:}/24" dev "shl-${side%:*}"
    ip -n "$ns" link set "shl-${side%:*}" up
    ip -n "$ns" link set lo up
done

# on SIDE WORDS…: a launcher on that node.
on() {
    ip netns exec "shardloom-$1" "$SHARDLOOM" launch --nnodes 2 --nproc-per-node "$RANKS" --local-addr "node-$1" \
        --rdzv-conf join_timeout=20,keep_alive_interval=1 "${@:2}"
}

who='echo $RANK of $WORLD_SIZE on node $GROUP_RANK, $MASTER_ADDR'
for how in static c10d; do
    case $how in
    static) a="--node-rank 0 --master-addr 10.77.0.1" b="--node-rank 1 --master-addr 10.77.0.1" ;;
    c10d) a="--rdzv-backend c10d --rdzv-endpoint 10.77.0.1:29400" b=$a ;;
    esac
    on b $b -- sh -c "$who" >"$work/b" &
    on a $a -- sh -c "$who" >"$work/a"
    wait $!
    sort "$work/a" "$work/b"
    if [ "$(sort "$work/a" "$work/b" | grep -c "of $((2 * RANKS)) ")" != $((2 * RANKS)) ]; then
        echo "failed: nodes that meet by $how"
        exit 1
    fi
done

# Trains as on one machine.
static="--master-addr 10.77.0.1"
"$SHARDLOOM" train "$(run_file alone)" --ranks $((2 * RANKS))
run=$(run_file nodes)
on b --node-rank 1 $static -- "$SHARDLOOM" train "$run" >"$work/b" 2>&1 &
if ! on a --node-rank 0 $static -- "$SHARDLOOM" train "$run" >"$work/a" 2>&1 || ! wait $! ||
    [ "$(losses alone)" != "$(losses nodes)" ]; then
    cat "$work/a" "$work/b"
    echo "failed: $((2 * RANKS)) ranks on two nodes do not train as on one"
    exit 1
fi

# cut READY WORDS…: runs WORDS on both nodes, and cuts the link when READY succeeds; both must fail.
cut() {
    on b --node-rank 1 $static -- "${@:2}" >"$work/b" 2>&1 &
    b=$!
    on a --node-rank 0 $static -- "${@:2}" >"$work/a" 2>&1 &
    a=$!
    for _ in $(seq 600); do
        if $1; then break; fi
        sleep 0.1
    done
    ip -n shardloom-b link set shl-b down
    if wait $a || wait $b; then
        cat "$work/a" "$work/b"
        echo "failed: a cut link went unnoticed"
        exit 1
    fi
    ip -n shardloom-b link set shl-b up
    cat "$work/a" "$work/b"
}

trains() {
    [ "$(grep -c loss "$work/long/metrics.jsonl" 2>/dev/null)" -ge 3 ] 2>/dev/null
}
(cd "$here/../.." && cut trains "$SHARDLOOM" train examples/quickstart/RUN.toml --set train.steps=1000000 \
    --set train.global_batch=$((2 * RANKS)) --set data.seq_len=32 --set device.kind=cpu --set log.sinks='["jsonl"]' \
    --set log.every=1 --set output.model=false --set "output.dir=\"$work/long\"") || exit 1
if ! grep -q 'node 1 (node-b)\|rank [23]' "$work/a" || ! grep -q '10.77.0.1\|rank [01]' "$work/b"; then
    echo "failed: ranks that train do not say whom they lost"
    exit 1
fi

sleep_well() {
    sleep 2
}
cut sleep_well sleep 60
if ! grep -q 'node 1 (node-b) has given no sign of life' "$work/a" || ! grep -q '10.77.0.1:29500' "$work/b"; then
    echo "failed: the node that was lost is not named"
    exit 1
fi
echo "passed: two nodes meet by static and c10d, train over tcp, and notice a cut link"
