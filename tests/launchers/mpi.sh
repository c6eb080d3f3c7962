#!/bin/sh
# Groups on the site's MPI: comm's conformance suite under mpirun, then the job with device.group = "mpi", which must
# train as with --ranks. Builds with the feature mpi.
RANKS=${RANKS:-4}
. "$(dirname "$0")/job.sh"
need mpirun "apt-get install openmpi-bin"
need mpicc "apt-get install libopenmpi-dev libclang-dev"
need cargo "https://rustup.rs"
cd "$here/../.."
tests=$(cargo test --quiet -p comm --features mpi --test mpi --no-run --message-format json |
    sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' | tail -n 1)
for ranks in ${SIZES:-1 2 3 4}; do
    if ! mpirun --allow-run-as-root --oversubscribe -n "$ranks" "$tests" --nocapture >"$work/output" 2>&1 ||
        [ "$(grep -c conforms "$work/output")" != "$ranks" ]; then
        cat "$work/output"
        echo "failed: $ranks ranks over MPI do not conform"
        exit 1
    fi
    echo "passed: $ranks ranks over MPI conform"
done
cargo build --quiet -p shardloom --features mpi
cp target/debug/shardloom "$work/shardloom"
SHARDLOOM=$work/shardloom
# over_mpi COMMAND…: as ranks of Open MPI that talk through it.
over_mpi() {
    mpirun --allow-run-as-root --oversubscribe -n "$RANKS" "$@" --set device.group=mpi
}
same_job mpi over_mpi
