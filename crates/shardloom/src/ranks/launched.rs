//! What a launcher says in the environment of the process it starts for a rank: ours and torchrun, Open MPI,
//! other MPIs, Slurm.

use crate::{Error, Result};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launched {
    pub rank: usize,
    pub world: usize,
    pub local_rank: usize,
    /// Ranks on this machine.
    pub local_world: usize,
    /// host:port at which ranks meet; none where the launcher does not say where rank 0 is.
    pub address: Option<String>,
}

/// The variables in which one kind of launcher says who a process is.
struct Launcher {
    rank: &'static str,
    world: &'static str,
    local_rank: &'static str,
    /// What tells jobs on one machine apart, for ports that do not collide.
    job: &'static [&'static str],
}

/// Ours and torchrun's; those are believed first, as they may run inside an allocation of any of the others.
const TORCHRUN: Launcher = Launcher { rank: "RANK", world: "WORLD_SIZE", local_rank: "LOCAL_RANK", job: &[] };
const OPEN_MPI: Launcher = Launcher {
    rank: "OMPI_COMM_WORLD_RANK",
    world: "OMPI_COMM_WORLD_SIZE",
    local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
    job: &["OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE"],
};
/// MPICH's and Intel's; where Slurm itself speaks PMI the two agree.
const PMI: Launcher =
    Launcher { rank: "PMI_RANK", world: "PMI_SIZE", local_rank: "MPI_LOCALRANKID", job: &["PMI_PORT"] };
const SLURM: Launcher = Launcher {
    rank: "SLURM_PROCID",
    world: "SLURM_NTASKS",
    local_rank: "SLURM_LOCALID",
    job: &["SLURM_JOB_ID"],
};

impl Launched {
    pub fn from_env() -> Result<Option<Self>> {
        Self::from(|name| std::env::var(name).ok())
    }

    /// Where ranks meet; an error that says how to tell them.
    pub fn meeting_point(&self) -> Result<&str> {
        self.address.as_deref().ok_or_else(|| {
            let (local, world) = (self.local_world, self.world);
            Error::Config(format!(
                "environment: {local} of {world} ranks are on this node, and mpirun does not say where rank 0 is: \
                 pass its host to all, as in mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 (or, in a build with \
                 --features mpi, set device.group = \"mpi\")"
            ))
        })
    }

    fn from(variable: impl Fn(&str) -> Option<String>) -> Result<Option<Self>> {
        let env = Env(&variable);
        // A batch script has its allocation's variables too, but is no task of a step.
        let batch_script = env.has("SLURM_JOB_ID") && !env.has("SLURM_STEP_ID");
        for launcher in [TORCHRUN, OPEN_MPI, PMI, SLURM] {
            if !env.has(launcher.rank) || !env.has(launcher.world) {
                continue;
            }
            if launcher.rank == SLURM.rank && batch_script {
                continue;
            }
            return env.launched(&launcher).map(Some);
        }
        Ok(None)
    }
}

/// An environment, asked by name.
struct Env<'a>(&'a dyn Fn(&str) -> Option<String>);

impl Env<'_> {
    fn get(&self, name: &str) -> Option<String> {
        (self.0)(name).filter(|value| !value.trim().is_empty())
    }

    fn has(&self, name: &str) -> bool {
        self.get(name).is_some()
    }

    fn number(&self, name: &str) -> Result<Option<usize>> {
        let Some(text) = self.get(name) else { return Ok(None) };
        let wrong = |_| Error::Config(format!("environment: {name} = {text:?} is not a number"));
        text.trim().parse().map(Some).map_err(wrong)
    }

    fn launched(&self, launcher: &Launcher) -> Result<Launched> {
        let rank = self.number(launcher.rank)?.unwrap_or(0);
        let world = self.number(launcher.world)?.unwrap_or(0);
        if rank >= world {
            return Err(Error::Config(format!(
                "environment: {} = {rank} does not lie below {} = {world}",
                launcher.rank, launcher.world
            )));
        }
        let local_rank = self.number(launcher.local_rank)?.unwrap_or(rank);
        let host = match self.get("MASTER_ADDR") {
            Some(host) => Some(host),
            None => self.head(launcher, world)?,
        };
        let port = match self.number("MASTER_PORT")? {
            Some(port) => u16::try_from(port)
                .map_err(|_| Error::Config(format!("environment: MASTER_PORT = {port} is not a port")))?,
            None => self.port(launcher),
        };
        let address = host.map(|host| match host.contains(':') {
            true => format!("[{host}]:{port}"),
            false => format!("{host}:{port}"),
        });
        // Where a launcher does not say, all ranks are taken to be here; sockets must then be asked for.
        let said =
            ["LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE"]
                .iter()
                .find_map(|name| self.number(name).transpose())
                .transpose()?;
        let local_world = match (said, self.number("SLURM_NNODES")?) {
            (Some(here), _) => here,
            (None, Some(nodes)) if launcher.rank == SLURM.rank => world.div_ceil(nodes.max(1)),
            _ => world,
        };
        Ok(Launched { rank, world, local_rank, local_world, address })
    }

    /// The host of rank 0, as far as the launcher says.
    fn head(&self, launcher: &Launcher, world: usize) -> Result<Option<String>> {
        let here = || Ok(Some("127.0.0.1".to_string()));
        match launcher.rank {
            "SLURM_PROCID" => {
                let list = self.get("SLURM_STEP_NODELIST").or_else(|| self.get("SLURM_JOB_NODELIST"));
                let nodes = self.number("SLURM_STEP_NUM_NODES")?.or(self.number("SLURM_NNODES")?);
                match (nodes, list) {
                    (Some(1), _) => here(),
                    // Tasks are numbered from the first node of the list. The launch node, where srun was
                    // called, may be none of the job's.
                    (_, Some(list)) => first_host(&list).map(Some),
                    (_, None) => {
                        self.get("SLURM_LAUNCH_NODE_IPADDR").map_or_else(here, |head| Ok(Some(head)))
                    }
                }
            }
            "RANK" => here(),
            _ => {
                let local_sizes = ["OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"];
                let local = local_sizes.iter().find_map(|name| self.number(name).transpose()).transpose()?;
                if local.is_none_or(|local| local == world) { here() } else { Ok(None) }
            }
        }
    }

    /// A port that all ranks of a job find alike, and other jobs hardly ever: below the range from which systems
    /// hand out ports themselves.
    fn port(&self, launcher: &Launcher) -> u16 {
        let Some(job) = launcher.job.iter().find_map(|name| self.get(name)) else { return 29500 };
        let step = self.get("SLURM_STEP_ID").unwrap_or_default();
        // FNV-1a.
        let mix = |hash: u32, byte: u8| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193);
        let hash = job.bytes().chain(step.bytes()).fold(0x811c_9dc5, mix);
        20000 + (hash % 9000) as u16
    }
}

/// The first host of Slurm's "node[07-09,12],other".
fn first_host(list: &str) -> Result<String> {
    let wrong = || Error::Config(format!("environment: SLURM_JOB_NODELIST = {list:?} names no host"));
    let mut host = String::new();
    let mut rest = list.trim();
    while let Some(next) = rest.chars().next().filter(|c| *c != ',') {
        if next == '[' {
            let (inside, after) = rest[1..].split_once(']').ok_or_else(wrong)?;
            host += inside.split([',', '-']).next().unwrap_or_default();
            rest = after;
        } else {
            host.push(next);
            rest = &rest[next.len_utf8()..];
        }
    }
    if host.is_empty() { Err(wrong()) } else { Ok(host) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn env(pairs: &[(&str, &str)]) -> Result<Option<Launched>> {
        Launched::from(|name| pairs.iter().find(|(n, _)| *n == name).map(|(_, value)| value.to_string()))
    }

    fn full(pairs: &[(&str, &str)]) -> (usize, usize, usize, String) {
        let launched = env(pairs).unwrap().unwrap();
        let address = launched.meeting_point().unwrap().to_string();
        (launched.rank, launched.world, launched.local_rank, address)
    }

    #[test]
    fn torchruns_environment_is_read_and_checked() {
        assert_eq!(env(&[("RANK", "0")]).unwrap(), None);
        let pairs = [("RANK", "3"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "1"), ("MASTER_PORT", "7")];
        assert_eq!(full(&pairs), (3, 4, 1, "127.0.0.1:7".into()));
        assert!(env(&[("RANK", "4"), ("WORLD_SIZE", "4")]).unwrap_err().to_string().contains("WORLD_SIZE"));
        assert!(env(&[("RANK", "x"), ("WORLD_SIZE", "4")]).unwrap_err().to_string().contains("RANK"));
        let port = env(&[("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_PORT", "70000")]);
        assert!(port.unwrap_err().to_string().contains("MASTER_PORT"));
    }

    #[test]
    fn slurms_tasks() {
        let task = [("SLURM_PROCID", "5"), ("SLURM_NTASKS", "8"), ("SLURM_LOCALID", "1")];
        let with = |more: &[(&'static str, &'static str)]| full(&[&task[..], more].concat());
        assert_eq!(with(&[]), (5, 8, 1, "127.0.0.1:29500".into()));
        assert_eq!(with(&[("SLURM_LAUNCH_NODE_IPADDR", "10.0.0.9")]).3, "10.0.0.9:29500");
        let list = ("SLURM_JOB_NODELIST", "gpu[07-09,12],login");
        assert_eq!(with(&[list, ("SLURM_LAUNCH_NODE_IPADDR", "10.0.0.9")]).3, "gpu07:29500");
        assert_eq!(with(&[list, ("SLURM_NNODES", "1")]).3, "127.0.0.1:29500");
        let step = [("SLURM_JOB_ID", "77"), ("SLURM_STEP_ID", "0"), ("MASTER_ADDR", "head")];
        let (address, next) = (with(&step).3, with(&[("SLURM_JOB_ID", "78"), step[1], step[2]]).3);
        assert!(address.starts_with("head:2") && address != next, "{address} {next}");
        // The batch script itself is no task.
        assert_eq!(env(&[&task[..], &[("SLURM_JOB_ID", "77")]].concat()).unwrap(), None);
        // A launcher inside an allocation decides.
        assert_eq!(with(&[("RANK", "0"), ("WORLD_SIZE", "2")]).0, 0);
    }

    #[test]
    fn the_first_of_a_list() {
        for (list, first) in [
            ("a", "a"),
            ("a,b", "a"),
            ("n[3-4]", "n3"),
            ("n[003,007-9]-ib,x", "n003-ib"),
            ("r[1-2]n[05-06]", "r1n05"),
        ] {
            assert_eq!(first_host(list).unwrap(), first);
        }
        for list in ["", ",a", "n[3"] {
            assert!(first_host(list).is_err(), "{list}");
        }
    }

    #[test]
    fn mpis_ranks() {
        let open = [("OMPI_COMM_WORLD_RANK", "2"), ("OMPI_COMM_WORLD_SIZE", "4")];
        let local = [("OMPI_COMM_WORLD_LOCAL_RANK", "0"), ("OMPI_COMM_WORLD_LOCAL_SIZE", "2")];
        let head = [("MASTER_ADDR", "h"), ("SLURM_PROCID", "0"), ("SLURM_NTASKS", "2")];
        let scattered = env(&[open, local].concat()).unwrap().unwrap();
        let error = scattered.meeting_point().unwrap_err().to_string();
        assert!(error.contains("2 of 4 ranks") && error.contains("MASTER_ADDR"), "{error}");
        assert_eq!(full(&[&open[..], &local, &head].concat()), (2, 4, 0, "h:29500".into()));
        assert_eq!(full(&[("PMI_RANK", "1"), ("PMI_SIZE", "2")]), (1, 2, 1, "127.0.0.1:29500".into()));
    }
}
