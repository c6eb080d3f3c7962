#!/bin/sh
# The job under our own launcher.
. "$(dirname "$0")/job.sh"
same_job launch "$SHARDLOOM" launch --nproc-per-node "$RANKS" --
