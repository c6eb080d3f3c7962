//! One worker: a process, its tree, its output, and how it ended.

use super::env;
use super::error_file;
use super::flags::{Job, signal_name};
use super::logs::{Pump, RunLogs};
use super::rendezvous::Place;
use super::watch::Event;
use crate::{Error, Result};
use comm::process;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant, SystemTime};

/// How long output may still come once the process that made it is gone.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// What the clock of the file system may lag behind.
const FILE_CLOCK: Duration = Duration::from_millis(5);

#[derive(Debug)]
pub struct Worker {
    pub rank: usize,
    pub local_rank: usize,
    child: Child,
    stdout: Pump,
    stderr: Pump,
    error_file: PathBuf,
    /// How and when it ended, once it has.
    pub ended: Option<(ExitStatus, SystemTime)>,
}

/// What every worker of an attempt is started with.
#[derive(Debug)]
pub struct Starter<'a> {
    pub job: &'a Job,
    pub place: &'a Place,
    pub logs: &'a RunLogs,
    pub attempt: u32,
    pub events: &'a Sender<Event>,
}

impl Starter<'_> {
    /// Must be called on the thread that watches: a worker ends with it.
    pub fn start(&self, local_rank: usize, cores: &[usize]) -> Result<Worker> {
        let Starter { job, place, logs, attempt, events } = self;
        let rank = place.first_rank + local_rank;
        let logs = logs.of_worker(*attempt, local_rank, &prefix(&job.role, local_rank, rank))?;
        let program = &job.command[0];
        let failed = |e: std::io::Error| {
            Error::Config(format!("cannot start {:?} as rank {rank}: {e}", program.to_string_lossy()))
        };
        let variables = env::of_worker(job, place, *attempt, local_rank, &logs.error_file);
        let mut command = Command::new(program);
        command.args(&job.command[1..]).envs(variables);
        // Several ranks would fight over what is typed.
        command.stdin(if job.num_local == 1 { Stdio::inherit() } else { Stdio::null() });
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        process::detach(&mut command, cores);
        let mut child = command.spawn().map_err(failed)?;
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        let (Some(stdout), Some(stderr)) = (stdout, stderr) else { unreachable!("both are pipes") };
        let worker = Worker {
            rank,
            local_rank,
            stdout: logs.stdout.pump(stdout).map_err(failed)?,
            stderr: logs.stderr.pump(stderr).map_err(failed)?,
            error_file: logs.error_file,
            ended: None,
            child,
        };
        let (pid, attempt, events) = (worker.child.id(), *attempt, (*events).clone());
        let wait = move || {
            // A child that cannot be waited for counts as failed.
            let status =
                process::wait_without_reaping(pid).unwrap_or_else(|_| ExitStatus::from_raw(255 << 8));
            let _ = events.send(Event::Ended { attempt, local_rank, status, at: SystemTime::now() });
        };
        std::thread::Builder::new().name("wait".into()).spawn(wait).map_err(failed)?;
        Ok(worker)
    }
}

/// `[default0]:`, or what TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE makes of it.
fn prefix(role: &str, local_rank: usize, rank: usize) -> String {
    match std::env::var("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE") {
        Ok(template) => template
            .replace("${role_name}", role)
            .replace("${local_rank}", &local_rank.to_string())
            .replace("${rank}", &rank.to_string()),
        Err(_) => format!("[{role}{local_rank}]:"),
    }
}

impl Worker {
    pub fn is_running(&self) -> bool {
        self.ended.is_none()
    }

    /// To every process of its tree.
    pub fn signal(&self, signal: i32) {
        if let Err(e) = process::signal_tree(self.child.id(), signal) {
            eprintln!("shardloom: cannot send {} to rank {}: {e}", signal_name(signal), self.rank);
        }
    }

    /// Ends what is left of its tree, lets its last output through, and lets go of it.
    pub fn reap(&mut self) {
        self.signal(signal_hook::consts::SIGKILL);
        let _ = self.child.wait();
        let deadline = Instant::now() + LAST_WORDS;
        // A process that left the tree may hold the pipes for ever.
        while !(self.stdout.is_finished() && self.stderr.is_finished()) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Its failure, if it failed before `until`: what came later is our own doing.
    pub fn failure(&self, until: SystemTime) -> Option<Failure> {
        let (status, ended) = self.ended.filter(|(status, _)| !status.success())?;
        let left = error_file::read(&self.error_file).map(|(message, at)| (message, at + FILE_CLOCK));
        // A rank may have said why it fails well before it is gone, and after another that fails of it.
        let at = left.as_ref().map_or(ended, |(_, at)| ended.min(*at));
        (at <= until).then(|| Failure {
            rank: self.rank,
            local_rank: self.local_rank,
            pid: self.child.id(),
            how: ending(status),
            at,
            words: match left {
                Some((message, _)) => Words::Message(message),
                None => Words::LastLines(self.stderr.last_lines()),
            },
            log: self.stderr.path().or(self.stdout.path()).map(PathBuf::from),
        })
    }
}

/// "exit status 3", "SIGKILL".
fn ending(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit status {code}"),
        (None, Some(signal)) => format!("ended by {}", signal_name(signal)),
        (None, None) => status.to_string(),
    }
}

/// Why a worker failed, as well as can be told.
#[derive(Clone, Debug)]
pub struct Failure {
    pub rank: usize,
    local_rank: usize,
    pid: u32,
    how: String,
    pub at: SystemTime,
    words: Words,
    log: Option<PathBuf>,
}

#[derive(Clone, Debug)]
enum Words {
    /// What it left in its error file.
    Message(String),
    LastLines(Vec<String>),
}

impl Failure {
    pub fn brief(&self) -> String {
        format!("rank {}: {}", self.rank, self.how)
    }

    /// Everything but the rank.
    pub fn describe(&self, host: &str, attempt: u32) -> String {
        let mut text = format!(
            "{} (local rank {} on {host}, pid {}, attempt {attempt})",
            self.how, self.local_rank, self.pid
        );
        let indented = |text: &str| text.trim_end().replace('\n', "\n    ");
        match &self.words {
            Words::Message(message) => text += &format!("\n  it says: {}", indented(message)),
            Words::LastLines(lines) if lines.is_empty() => text += "\n  it said nothing on stderr",
            Words::LastLines(lines) => {
                text += &format!("\n  its last words on stderr:\n    {}", indented(&lines.join("\n")));
            }
        }
        if let Some(log) = &self.log {
            text += &format!("\n  log: {}", log.display());
        }
        text
    }
}
