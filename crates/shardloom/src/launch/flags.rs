//! torchrun's flags, parsed once into a [`Job`] that nothing downstream needs to check again.

use super::logs::{LogPlan, Std};
use super::machine;
use crate::{Error, Result};
use clap::Args;
use clap::builder::FalseyValueParser;
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

/// What was typed. Each flag is also known with underscores, and takes its default from PET_<NAME>.
#[derive(Args, Clone, Debug)]
pub struct Flags {
    /// Number of nodes: N, or MIN:MAX to start with as many as come in time
    #[arg(long, env = "PET_NNODES", default_value = "1", value_name = "N|MIN:MAX")]
    nnodes: String,
    /// Ranks on this node: a number, or auto (GPUs if any, else cores), gpu, cpu
    #[arg(long, alias = "nproc_per_node", env = "PET_NPROC_PER_NODE", default_value = "1")]
    nproc_per_node: String,
    /// How nodes meet: static (by --node-rank and --master-addr) or c10d (at --rdzv-endpoint)
    #[arg(long, alias = "rdzv_backend", env = "PET_RDZV_BACKEND", default_value = "static")]
    rdzv_backend: String,
    /// HOST:PORT at which nodes meet
    #[arg(long, alias = "rdzv_endpoint", env = "PET_RDZV_ENDPOINT", default_value = "")]
    rdzv_endpoint: String,
    /// The job's name, the same on all nodes
    #[arg(long, alias = "rdzv_id", env = "PET_RDZV_ID", default_value = "none")]
    rdzv_id: String,
    /// Seconds of the meeting: join_timeout, last_call_timeout, keep_alive_interval, keep_alive_max_attempt
    #[arg(long, alias = "rdzv_conf", env = "PET_RDZV_CONF", default_value = "", value_name = "KEY=VALUE,…")]
    rdzv_conf: String,
    /// One node, a free port, a name of its own
    #[arg(long, env = "PET_STANDALONE", value_parser = FalseyValueParser::new())]
    standalone: bool,
    /// How often all ranks are started again after one failed
    #[arg(long, alias = "max_restarts", env = "PET_MAX_RESTARTS", default_value_t = 0)]
    max_restarts: u32,
    /// Seconds between two looks at the other nodes (workers of this one are waited for, not polled)
    #[arg(long, alias = "monitor_interval", env = "PET_MONITOR_INTERVAL", default_value_t = 0.1)]
    monitor_interval: f64,
    /// ROLE_NAME of the workers, and the prefix of their lines
    #[arg(long, env = "PET_ROLE", default_value = "default")]
    role: String,
    /// Accepted: the command is always run as it stands
    #[arg(long, alias = "no_python", env = "PET_NO_PYTHON", value_parser = FalseyValueParser::new())]
    no_python: bool,
    /// Folder for the workers' logs
    #[arg(long, alias = "log_dir", env = "PET_LOG_DIR")]
    log_dir: Option<PathBuf>,
    /// Streams that go to files only: 0 none, 1 stdout, 2 stderr, 3 both; or by local rank, as in 0:3,1:2
    #[arg(short = 'r', long, env = "PET_REDIRECTS", default_value = "0")]
    redirects: String,
    /// Streams that go to files and, with a prefix, to the console; values as for --redirects
    #[arg(short = 't', long, env = "PET_TEE", default_value = "0")]
    tee: String,
    /// Local ranks whose output is shown on the console, as in 0,1
    #[arg(long, alias = "local_ranks_filter", env = "PET_LOCAL_RANKS_FILTER", default_value = "")]
    local_ranks_filter: String,
    /// Which node this is (static)
    #[arg(long, alias = "node_rank", env = "PET_NODE_RANK", default_value_t = 0)]
    node_rank: usize,
    /// Address of node 0 (static)
    #[arg(long, alias = "master_addr", env = "PET_MASTER_ADDR", default_value = "127.0.0.1")]
    master_addr: String,
    /// Port of node 0 (static); 29500 for several nodes, a free one otherwise
    #[arg(long, alias = "master_port", env = "PET_MASTER_PORT")]
    master_port: Option<u16>,
    /// What this node is called in messages
    #[arg(long, alias = "local_addr", env = "PET_LOCAL_ADDR")]
    local_addr: Option<String>,
    /// Signals passed on to the workers
    #[arg(
        long,
        alias = "signals_to_handle",
        env = "PET_SIGNALS_TO_HANDLE",
        default_value = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    )]
    signals_to_handle: String,
    /// Seconds a worker has to end after SIGTERM before SIGKILL
    #[arg(long, alias = "grace_period", env = "PET_GRACE_PERIOD", default_value_t = 30.0)]
    grace_period: f64,
    /// Whether cores are divided among the ranks of this node: auto or none
    #[arg(long, env = "PET_AFFINITY", default_value = "auto")]
    affinity: String,
    /// Workers of PyTorch can use the store: it demands no secret, and serves whoever reaches its port
    #[arg(long, alias = "plain_store", env = "PET_PLAIN_STORE", value_parser = FalseyValueParser::new())]
    plain_store: bool,
    /// What each rank runs
    #[arg(trailing_var_arg = true, required = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// A job as this node sees it.
#[derive(Clone, Debug)]
pub struct Job {
    pub nodes: Nodes,
    pub meeting: Meeting,
    /// Ranks on this node.
    pub num_local: usize,
    pub run_id: String,
    pub conf: Conf,
    pub max_restarts: u32,
    pub monitor_interval: Duration,
    pub role: String,
    pub logs: LogPlan,
    /// This node's name in messages.
    pub host: String,
    pub signals: Vec<i32>,
    pub grace: Duration,
    pub affinity: Affinity,
    /// The store demands no secret.
    pub plain_store: bool,
    pub command: Vec<OsString>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Nodes {
    pub min: usize,
    pub max: usize,
}

/// Where nodes meet; a node on its own serves its workers there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Meeting {
    /// Node 0 serves.
    Static { node_rank: usize, host: String, port: u16 },
    /// Whoever can listen there serves.
    First { host: String, port: u16 },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Affinity {
    Divided,
    Free,
}

/// How long nodes wait for each other.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Conf {
    /// For the fewest nodes to come.
    pub join: Duration,
    /// For more to come after those.
    pub last_call: Duration,
    /// For a sign of life.
    pub keep_alive: Duration,
}

fn usage(what: impl Into<String>) -> Error {
    Error::Config(what.into())
}

impl Flags {
    pub fn resolve(self) -> Result<Job> {
        let nodes = nodes(&self.nnodes)?;
        let num_local = machine::num_ranks(&self.nproc_per_node).map_err(usage)?;
        let meeting = self.meeting(nodes)?;
        let affinity = match self.affinity.as_str() {
            "auto" => Affinity::Divided,
            "none" => Affinity::Free,
            other => return Err(usage(format!("--affinity {other}: it is auto or none"))),
        };
        let filter = local_ranks(&self.local_ranks_filter)?;
        let logs = LogPlan {
            dir: self.log_dir,
            redirects: Std::by_rank("--redirects", &self.redirects, num_local).map_err(usage)?,
            tee: Std::by_rank("--tee", &self.tee, num_local).map_err(usage)?,
            filter,
        };
        let named = self.standalone && self.rdzv_id == "none";
        Ok(Job {
            nodes,
            meeting,
            num_local,
            run_id: if named { machine::random_hex(16)? } else { self.rdzv_id },
            conf: Conf::parse(&self.rdzv_conf)?,
            max_restarts: self.max_restarts,
            monitor_interval: seconds("--monitor-interval", self.monitor_interval)?
                .max(Duration::from_millis(10)),
            role: self.role,
            logs,
            host: self.local_addr.unwrap_or_else(machine::host_name),
            signals: signals(&self.signals_to_handle)?,
            grace: seconds("--grace-period", self.grace_period)?,
            affinity,
            plain_store: self.plain_store,
            command: self.command,
        })
    }

    fn meeting(&self, nodes: Nodes) -> Result<Meeting> {
        let several = nodes.max > 1;
        if self.standalone {
            if several {
                return Err(usage(format!("--standalone is for one node, not --nnodes {}", self.nnodes)));
            }
            return Ok(Meeting::First { host: "127.0.0.1".into(), port: 0 });
        }
        match self.rdzv_backend.as_str() {
            "static" => {
                if nodes.min != nodes.max {
                    return Err(usage(format!(
                        "--nnodes {}: a range needs --rdzv-backend c10d; with static every node is counted",
                        self.nnodes
                    )));
                }
                if self.node_rank >= nodes.max {
                    let (rank, count) = (self.node_rank, nodes.max);
                    return Err(usage(format!("--node-rank {rank} does not lie below --nnodes {count}")));
                }
                let free = if several { 29500 } else { 0 };
                let (host, port) = match self.rdzv_endpoint.as_str() {
                    "" => (self.master_addr.clone(), self.master_port.unwrap_or(free)),
                    endpoint => host_port(endpoint, 29500)?,
                };
                if several && port == 0 {
                    return Err(usage("--master-port 0: several nodes need a port that all of them know"));
                }
                Ok(Meeting::Static { node_rank: self.node_rank, host, port })
            }
            "c10d" => {
                let (host, port) = match self.rdzv_endpoint.as_str() {
                    "" if several => {
                        return Err(usage("--rdzv-backend c10d needs --rdzv-endpoint HOST:PORT"));
                    }
                    "" => ("127.0.0.1".into(), 0),
                    endpoint => host_port(endpoint, 29400)?,
                };
                if several && port == 0 {
                    return Err(usage("--rdzv-endpoint: several nodes need a port that all of them know"));
                }
                Ok(Meeting::First { host, port })
            }
            other => Err(usage(format!("--rdzv-backend {other}: there are static and c10d"))),
        }
    }
}

impl Job {
    /// One node, a free port, output to the console.
    pub fn on_this_machine(num_ranks: usize, command: Vec<OsString>) -> Result<Self> {
        Ok(Job {
            nodes: Nodes { min: 1, max: 1 },
            meeting: Meeting::First { host: "127.0.0.1".into(), port: 0 },
            num_local: num_ranks,
            run_id: machine::random_hex(16)?,
            conf: Conf::parse("")?,
            max_restarts: 0,
            monitor_interval: Duration::from_millis(100),
            role: "default".into(),
            logs: LogPlan::default(),
            host: machine::host_name(),
            signals: SIGNALS[..4].iter().map(|(_, number)| *number).collect(),
            grace: Duration::from_secs(30),
            affinity: Affinity::Divided,
            plain_store: false,
            command,
        })
    }
}

impl Conf {
    fn parse(text: &str) -> Result<Self> {
        let mut conf = Conf {
            join: Duration::from_secs(600),
            last_call: Duration::from_secs(30),
            keep_alive: Duration::from_secs(15),
        };
        let (mut interval, mut attempts) = (5.0, 3.0);
        for pair in text.split(',').map(str::trim).filter(|pair| !pair.is_empty()) {
            let (key, value) = pair
                .split_once('=')
                .ok_or_else(|| usage(format!("--rdzv-conf: {pair:?} is not of the form key=value")))?;
            let number: f64 = value
                .parse()
                .map_err(|_| usage(format!("--rdzv-conf: {key} = {value:?} is not a number")))?;
            seconds(key, number)?;
            match key {
                "join_timeout" | "timeout" => conf.join = seconds(key, number)?,
                "last_call_timeout" => conf.last_call = seconds(key, number)?,
                "keep_alive_interval" => interval = number,
                "keep_alive_max_attempt" => attempts = number,
                // Known to torchrun, and of no consequence here.
                "read_timeout" | "close_timeout" | "heartbeat_timeout" | "is_host" => {}
                _ => {
                    let known =
                        "join_timeout, last_call_timeout, keep_alive_interval, keep_alive_max_attempt";
                    return Err(usage(format!("--rdzv-conf: there is no {key:?}, but {known}")));
                }
            }
        }
        // Nodes give a sign of life every second: who misses three of them in a row may be lost.
        conf.keep_alive = seconds("keep_alive_interval", interval * attempts)?.max(Duration::from_secs(3));
        Ok(conf)
    }
}

fn seconds(name: &str, value: f64) -> Result<Duration> {
    Duration::try_from_secs_f64(value).map_err(|e| usage(format!("{name} {value}: {e}")))
}

fn nodes(text: &str) -> Result<Nodes> {
    let (min, max) = text.split_once(':').unwrap_or((text, text));
    match (min.trim().parse(), max.trim().parse()) {
        (Ok(min), Ok(max)) if 1 <= min && min <= max => Ok(Nodes { min, max }),
        _ => Err(usage(format!("--nnodes {text}: it is a number from 1, or MIN:MAX"))),
    }
}

fn host_port(endpoint: &str, default_port: u16) -> Result<(String, u16)> {
    // More than one colon and no brackets: an IPv6 address without a port.
    let bare = !endpoint.starts_with('[') && endpoint.matches(':').count() > 1;
    let (host, port) = match endpoint.rsplit_once(':') {
        Some((host, port)) if !bare && !endpoint.ends_with(']') => (host, Some(port)),
        _ => (endpoint, None),
    };
    let wrong = || usage(format!("--rdzv-endpoint {endpoint}: it is HOST or HOST:PORT"));
    let port = port.map_or(Ok(default_port), |port| port.parse().map_err(|_| wrong()))?;
    let host = host.trim_matches(['[', ']']);
    if host.is_empty() { Err(wrong()) } else { Ok((host.to_string(), port)) }
}

fn local_ranks(text: &str) -> Result<Option<BTreeSet<usize>>> {
    let ranks: BTreeSet<usize> = text
        .split(',')
        .map(str::trim)
        .filter(|rank| !rank.is_empty())
        .map(|rank| {
            rank.parse().map_err(|_| usage(format!("--local-ranks-filter {text}: {rank:?} is not a rank")))
        })
        .collect::<Result<_>>()?;
    Ok(Some(ranks).filter(|ranks| !ranks.is_empty()))
}

const SIGNALS: &[(&str, i32)] = {
    use signal_hook::consts::*;
    &[
        ("SIGTERM", SIGTERM),
        ("SIGINT", SIGINT),
        ("SIGHUP", SIGHUP),
        ("SIGQUIT", SIGQUIT),
        ("SIGUSR1", SIGUSR1),
        ("SIGUSR2", SIGUSR2),
        ("SIGKILL", SIGKILL),
        ("SIGSEGV", SIGSEGV),
        ("SIGABRT", SIGABRT),
        ("SIGBUS", SIGBUS),
        ("SIGFPE", SIGFPE),
        ("SIGILL", SIGILL),
        ("SIGPIPE", SIGPIPE),
    ]
};

/// "SIGTERM", or "signal 42" where it has no common name.
pub fn signal_name(signal: i32) -> String {
    let known = SIGNALS.iter().find(|(_, number)| *number == signal);
    known.map_or_else(|| format!("signal {signal}"), |(name, _)| name.to_string())
}

fn signals(text: &str) -> Result<Vec<i32>> {
    let catchable = &SIGNALS[..6];
    let named = text.split(',').map(str::trim).filter(|name| !name.is_empty());
    named
        .map(|name| {
            let known = catchable.iter().find(|(known, _)| *known == name.to_ascii_uppercase());
            let names: Vec<&str> = catchable.iter().map(|(name, _)| *name).collect();
            known.map(|(_, number)| *number).ok_or_else(|| {
                usage(format!("--signals-to-handle: {name:?} is none of {}", names.join(", ")))
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        flags: Flags,
    }

    fn resolve(line: &str) -> std::result::Result<Job, String> {
        let words = std::iter::once("launch").chain(line.split_whitespace());
        let cli = Cli::try_parse_from(words).map_err(|e| e.to_string())?;
        cli.flags.resolve().map_err(|e| e.to_string())
    }

    #[test]
    fn both_spellings_and_a_command_with_flags_of_its_own() {
        for line in ["--nproc-per-node 3 -- run --nnodes 9", "--nproc_per_node=3 run --nnodes 9"] {
            let job = resolve(line).unwrap();
            assert_eq!((job.num_local, job.command.len()), (3, 3), "{line}");
            assert_eq!(job.nodes, Nodes { min: 1, max: 1 });
        }
    }

    #[test]
    fn where_nodes_meet() {
        let meeting = |line: &str| resolve(&format!("{line} -- x")).unwrap().meeting;
        let at = |node_rank, host: &str, port| Meeting::Static { node_rank, host: host.into(), port };
        let first = |host: &str, port| Meeting::First { host: host.into(), port };
        assert_eq!(meeting(""), at(0, "127.0.0.1", 0));
        assert_eq!(meeting("--master_port 7"), at(0, "127.0.0.1", 7));
        assert_eq!(meeting("--nnodes 2 --node_rank 1 --master_addr h"), at(1, "h", 29500));
        assert_eq!(meeting("--standalone"), first("127.0.0.1", 0));
        assert_eq!(meeting("--nnodes 1:4 --rdzv-backend c10d --rdzv-endpoint h"), first("h", 29400));
        assert_eq!(meeting("--nnodes 2 --rdzv_backend=c10d --rdzv_endpoint=[::1]:5"), first("::1", 5));
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (line, word) in [
            ("--nproc_pernode 2 -- x", "nproc-per-node"),
            ("--nnodes 0 -- x", "MIN:MAX"),
            ("--nnodes 3:2 -- x", "MIN:MAX"),
            ("--nnodes 1:2 -- x", "c10d"),
            ("--nnodes 2 --node-rank 2 -- x", "--node-rank 2"),
            ("--standalone --nnodes 2 -- x", "--standalone"),
            ("--rdzv-backend etcd -- x", "etcd"),
            ("--rdzv-backend c10d --nnodes 2 -- x", "--rdzv-endpoint"),
            ("--rdzv-conf join_timeot=3 -- x", "join_timeout"),
            ("--nproc-per-node 0 -- x", "--nproc-per-node"),
            ("--nproc-per-node many -- x", "many"),
            ("--signals-to-handle SIGKILL -- x", "SIGKILL"),
            ("-t 4 -- x", "--tee"),
            ("-r 0:1,7:1 -- x", "--redirects"),
            ("--local-ranks-filter a -- x", "local-ranks-filter"),
            ("--monitor-interval=-1 -- x", "monitor-interval"),
            ("--nproc-per-node 2", "COMMAND"),
        ] {
            let text = resolve(line).unwrap_err();
            assert!(text.contains(word), "{line}: {text}");
        }
    }

    #[test]
    fn seconds_of_the_meeting() {
        let conf =
            Conf::parse("join_timeout=5, last_call_timeout=0.5,keep_alive_interval=1,is_host=1").unwrap();
        assert_eq!(conf.join, Duration::from_secs(5));
        assert_eq!(conf.last_call, Duration::from_millis(500));
        assert_eq!(conf.keep_alive, Duration::from_secs(3));
    }
}
