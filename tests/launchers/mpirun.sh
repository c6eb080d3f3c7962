#!/bin/sh
# The job under Open MPI's mpirun, which only says who is who: rank 0 serves the store.
. "$(dirname "$0")/job.sh"
need mpirun "apt-get install openmpi-bin"
same_job mpirun mpirun --allow-run-as-root --oversubscribe -n "$RANKS"
