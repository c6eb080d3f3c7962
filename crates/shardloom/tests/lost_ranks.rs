//! Ranks that end before their time, or stop, in the middle of training.

use comm::store::Store;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Two processes that train for ever.
fn train(dir: &Path, group: &str, timeout_s: f64) -> Child {
    command(dir, group, timeout_s).args(["--ranks", "2"]).spawn().unwrap()
}

/// A training that does not end.
fn command(dir: &Path, group: &str, timeout_s: f64) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_shardloom"));
    command.current_dir(root()).args(["train", "examples/quickstart/RUN.toml"]);
    for set in [
        "train.steps=1000000".to_string(),
        "train.global_batch=2".into(),
        "data.seq_len=32".into(),
        "log.every=1".into(),
        "device.kind=\"cpu\"".into(),
        format!("device.group=\"{group}\""),
        format!("device.timeout_s={timeout_s}"),
        format!("output.dir=\"{}\"", dir.display()),
        "output.model=false".into(),
        "log.sinks=[\"jsonl\"]".into(),
    ] {
        command.args(["--set", &set]);
    }
    for name in ["RANK", "WORLD_SIZE", "SHARDLOOM_SECRET"] {
        command.env_remove(name);
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// The process of a rank, among the launcher's children.
fn process_of(launcher: &Child, rank: usize) -> Option<u32> {
    let wanted = format!("RANK={rank}");
    let tasks = fs::read_dir(format!("/proc/{}/task", launcher.id())).ok()?;
    let children = tasks.flatten().filter_map(|task| fs::read_to_string(task.path().join("children")).ok());
    let children: Vec<u32> = children
        .flat_map(|list| list.split(' ').filter_map(|pid| pid.parse().ok()).collect::<Vec<_>>())
        .collect();
    children.into_iter().find(|pid| {
        let variables = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        variables.split(|&byte| byte == 0).any(|variable| variable == wanted.as_bytes())
    })
}

/// Sends a signal to rank 1 when it has trained some steps; how long the job lasted after it, and what it said.
fn after(signal: &str, group: &str, timeout_s: f64) -> (Duration, String) {
    let dir = tempfile::tempdir().unwrap();
    let mut job = train(dir.path(), group, timeout_s);
    let metrics = dir.path().join("metrics.jsonl");
    let started = Instant::now();
    while fs::read_to_string(&metrics).map_or(0, |text| text.lines().count()) < 3 {
        let late = started.elapsed() > Duration::from_secs(60) || job.try_wait().unwrap().is_some();
        if late {
            let _ = job.kill();
            panic!("no steps: {}", String::from_utf8_lossy(&job.wait_with_output().unwrap().stderr));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let pid = process_of(&job, 1).expect("rank 1 runs").to_string();
    assert!(Command::new("kill").args([signal, &pid]).status().unwrap().success());
    let sent = Instant::now();
    let output = job.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    (sent.elapsed(), String::from_utf8(output.stderr).unwrap())
}

#[test]
fn a_killed_rank_ends_the_job_and_is_named() {
    for group in ["shm", "tcp"] {
        let (lasted, text) = after("-KILL", group, 600.0);
        assert!(lasted < Duration::from_secs(5), "{group}: {lasted:?}");
        assert!(text.starts_with("shardloom: rank 1 failed: ended by SIGKILL"), "{group}: {text}");
    }
}

#[test]
fn a_stopped_rank_ends_the_job_when_the_timeout_does() {
    for group in ["shm", "tcp"] {
        let (lasted, text) = after("-STOP", group, 1.0);
        assert!(lasted < Duration::from_secs(8), "{group}: {lasted:?}");
        for word in ["rank 0 waited 1.", " in group ", "rank 1 did not come"] {
            assert!(text.contains(word), "{group}: {text}");
        }
    }
}

/// Without a launcher that would end them: one of three dies before the third has come.
#[test]
fn a_rank_that_dies_while_ranks_meet_ends_the_others_and_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let rank = |rank: usize| {
        let mut command = command(dir.path(), "auto", 600.0);
        let variables = [("RANK", rank), ("WORLD_SIZE", 3), ("MASTER_PORT", port.into())];
        command.args(["--set", "train.global_batch=3"]);
        command.envs(variables.map(|(name, value)| (name, value.to_string()))).spawn().unwrap()
    };
    let (first, mut second) = (rank(0), rank(1));
    let store = Store::connect(&format!("127.0.0.1:{port}"), Duration::from_secs(60)).unwrap();
    // The keys of a job that was not started again.
    store.wait(&["shardloom//world/seat/1"], Duration::from_secs(60)).unwrap();
    second.kill().unwrap();
    second.wait().unwrap();
    let (output, pid) = (first.wait_with_output().unwrap(), second.id());
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains(&format!("rank 1 of the job (process {pid} on ")), "{text}");
    // The timeout was ten minutes.
    assert!(text.contains(" has ended") && text.contains("waited "), "{text}");
}
