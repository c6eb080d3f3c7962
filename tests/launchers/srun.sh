#!/bin/sh
# The job under Slurm's srun, which only says who is who: rank 0 serves the store.
. "$(dirname "$0")/job.sh"
need srun "apt-get install slurm-client slurmctld slurmd munge"
if ! sinfo >/dev/null 2>&1; then
    echo "skipped: srun is installed, but no Slurm answers (with-slurm.sh srun.sh starts one)"
    exit 0
fi
same_job srun srun --ntasks "$RANKS" --overcommit
