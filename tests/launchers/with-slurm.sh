#!/bin/sh
# with-slurm.sh COMMAND…: runs COMMAND with a Slurm of this machine alone, which ends with it. As root.
set -eu

for program in srun slurmctld slurmd munged; do
    if ! command -v $program >/dev/null; then
        echo "skipped: $program is not installed (apt-get install slurm-client slurmctld slurmd munge)"
        exit 0
    fi
done
if [ "$(id -u)" != 0 ]; then
    echo "skipped: slurmd runs as root"
    exit 0
fi

dir=$(mktemp -d)
name=$(hostname -s)
mkdir "$dir/state" "$dir/spool" "$dir/munge"
chmod 755 "$dir"
export SLURM_CONF=$dir/slurm.conf
cat >"$SLURM_CONF" <<CONF
ClusterName=here
SlurmctldHost=$name(127.0.0.1)
SlurmctldPort=16817
SlurmdPort=16818
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$dir/munge/socket
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdLogFile=$dir/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
NodeName=$name NodeAddr=127.0.0.1 CPUs=$(nproc) State=UNKNOWN
PartitionName=here Nodes=$name Default=YES MaxTime=INFINITE State=UP
CONF
head -c 128 /dev/urandom >"$dir/munge/key"
chmod 755 "$dir/munge"
chmod 400 "$dir/munge/key"

# In the foreground, so that their process numbers are ours to end.
munged --foreground --force --key-file="$dir/munge/key" --socket="$dir/munge/socket" \
    --pid-file="$dir/munge/pid" --log-file="$dir/munge/log" --seed-file="$dir/munge/seed" >/dev/null 2>&1 &
daemons=$!
trap 'kill $daemons 2>/dev/null || true; wait; rm -rf "$dir"' EXIT
sleep 0.5
slurmctld -D >/dev/null 2>&1 &
daemons="$daemons $!"
slurmd -D >/dev/null 2>&1 &
daemons="$daemons $!"

for _ in $(seq 50); do
    if [ "$(sinfo -h -o %T 2>/dev/null)" = idle ]; then
        "$@"
        exit
    fi
    sleep 0.2
done
tail -n 20 "$dir"/*.log "$dir/munge/log"
echo "failed: Slurm does not come up"
exit 1
