#!/bin/bash
# Two nodes imitated by network namespaces: launchers meet over a link of their own, once by number (static) and
# once at an endpoint (c10d), and the job trains as on one machine. Then a node loses its link: the other must end
# and say whom it lost. As root.
. "$(dirname "$0")/job.sh"
export SHARDLOOM_SECRET="two nodes of $$"
need ip "apt-get install iproute2"
if ! ip netns add shardloom-a 2>/dev/null; then
    echo "skipped: this machine allows no network namespaces"
    exit 0
fi
ip netns add shardloom-b
trap 'ip netns del shardloom-a; ip netns del shardloom-b; rm -rf "$work"' EXIT
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

on b --node-rank 1 --master-addr 10.77.0.1 -- sleep 60 >"$work/b" 2>&1 &
b=$!
on a --node-rank 0 --master-addr 10.77.0.1 -- sleep 60 >"$work/a" 2>&1 &
a=$!
sleep 2
ip -n shardloom-b link set shl-b down
if wait $a || wait $b; then
    echo "failed: a cut link went unnoticed"
    exit 1
fi
cat "$work/a" "$work/b"
if ! grep -q 'node 1 (node-b) has given no sign of life' "$work/a" || ! grep -q '10.77.0.1:29500' "$work/b"; then
    echo "failed: the node that was lost is not named"
    exit 1
fi
echo "passed: two nodes meet by static and c10d, and notice a cut link"
