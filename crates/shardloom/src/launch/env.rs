//! What a worker finds in its environment: torchrun's variables, and ours.

use super::error_file;
use super::flags::Job;
use super::rendezvous::Place;
use comm::store;
use std::path::Path;

/// Shared by the processes of one job; who does not know it is a stranger.
pub const SECRET: &str = "SHARDLOOM_SECRET";
/// What [`store::MARKER`] says of a store that PyTorch's processes may use as well.
const PLAIN: &str = "plain";

pub fn of_worker(
    job: &Job,
    place: &Place,
    attempt: u32,
    local_rank: usize,
    error_file: &Path,
) -> Vec<(&'static str, String)> {
    let rank = (place.first_rank + local_rank).to_string();
    let world = place.world.to_string();
    let mut env = vec![
        ("LOCAL_RANK", local_rank.to_string()),
        ("RANK", rank.clone()),
        ("GROUP_RANK", place.node_rank.to_string()),
        ("ROLE_RANK", rank),
        ("ROLE_NAME", job.role.clone()),
        ("LOCAL_WORLD_SIZE", job.num_local.to_string()),
        ("WORLD_SIZE", world.clone()),
        ("GROUP_WORLD_SIZE", place.num_nodes.to_string()),
        ("ROLE_WORLD_SIZE", world),
        ("MASTER_ADDR", place.host.clone()),
        ("MASTER_PORT", place.port.to_string()),
        ("TORCHELASTIC_RESTART_COUNT", attempt.to_string()),
        ("TORCHELASTIC_MAX_RESTARTS", job.max_restarts.to_string()),
        ("TORCHELASTIC_RUN_ID", job.run_id.clone()),
        // The store is served by the launcher: workers must not bind the port.
        ("TORCHELASTIC_USE_AGENT_STORE", "True".into()),
        (error_file::VARIABLE, error_file.display().to_string()),
        (store::MARKER, if job.plain_store { PLAIN } else { store::WITH_SECRET }.into()),
    ];
    env.extend(place.secret.clone().map(|secret| (SECRET, secret)));
    // For workers of others: ours compute on one thread each.
    if job.num_local > 1 && std::env::var_os("OMP_NUM_THREADS").is_none() {
        env.push(("OMP_NUM_THREADS", "1".into()));
    }
    env
}
