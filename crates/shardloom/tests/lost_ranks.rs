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

/// Sends a signal to rank 1 when it has trained some steps; what the job said in the end.
fn after(signal: &str, group: &str, timeout_s: f64) -> String {
    let dir = tempfile::tempdir().unwrap();
    let mut job = train(dir.path(), group, timeout_s);
    let metrics = dir.path().join("metrics.jsonl");
    let started = Instant::now();
    while fs::read_to_string(&metrics).map_or(0, |text| text.lines().count()) < 3 {
        let late = started.elapsed() > Duration::from_secs(120) || job.try_wait().unwrap().is_some();
        if late {
            let _ = job.kill();
            panic!("no steps: {}", String::from_utf8_lossy(&job.wait_with_output().unwrap().stderr));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let pid = process_of(&job, 1).expect("rank 1 runs").to_string();
    assert!(Command::new("kill").args([signal, &pid]).status().unwrap().success());
    let output = job.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn a_killed_rank_ends_the_job_and_is_named() {
    for group in ["shm", "tcp"] {
        let text = after("-KILL", group, 600.0);
        assert!(text.starts_with("shardloom: rank 1 failed: ended by SIGKILL"), "{group}: {text}");
    }
}

#[test]
fn a_stopped_rank_ends_the_job_when_the_timeout_does() {
    for group in ["shm", "tcp"] {
        let text = after("-STOP", group, 5.0);
        for word in ["rank 0 waited ", " in group ", "rank 1 did not come"] {
            assert!(text.contains(word), "{group}: {text}");
        }
    }
}

fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// One rank as the variables of a launcher make it, with none to end it.
fn rank(dir: &Path, rank: usize, world: usize, port: u16, timeout_s: f64) -> Command {
    let mut command = command(dir, "auto", timeout_s);
    command.args(["--set", "train.global_batch=6"]);
    let variables = [("RANK", rank), ("WORLD_SIZE", world), ("MASTER_PORT", port.into())];
    command.envs(variables.map(|(name, value)| (name, value.to_string())));
    command
}

/// What a rank that fails says.
fn said(rank: Child) -> String {
    let output = rank.wait_with_output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{text}");
    text
}

/// One of three dies before the third has come.
#[test]
fn a_rank_that_dies_while_ranks_meet_ends_the_others_and_is_named() {
    let (dir, port) = (tempfile::tempdir().unwrap(), free_port());
    let start = |number| rank(dir.path(), number, 3, port, 600.0).spawn().unwrap();
    let (first, mut second) = (start(0), start(1));
    let store = Store::connect(&format!("127.0.0.1:{port}"), Duration::from_secs(60)).unwrap();
    // The keys of a job that was not started again.
    store.wait(&["shardloom//world/seat/1"], Duration::from_secs(60)).unwrap();
    second.kill().unwrap();
    second.wait().unwrap();
    let (text, pid) = (said(first), second.id());
    assert!(text.contains(&format!("rank 1 of the job (process {pid} on ")), "{text}");
    // The timeout was ten minutes.
    assert!(text.contains(" has ended") && text.contains("waited "), "{text}");
}

#[test]
fn ranks_that_are_no_world_say_why_they_do_not_meet() {
    let dir = tempfile::tempdir().unwrap();
    let start =
        |number, world, port, timeout_s| rank(dir.path(), number, world, port, timeout_s).spawn().unwrap();
    // WORLD_SIZE that disagrees.
    let port = free_port();
    for text in [start(0, 2, port, 600.0), start(1, 3, port, 600.0)].map(said) {
        assert!(text.contains("WORLD_SIZE differs") && text.contains(&port.to_string()), "{text}");
    }
    // The same rank twice: rank 2 never comes, so only the doubt about rank 1 can end them.
    let port = free_port();
    let ranks = [(0, 3), (1, 3), (1, 3)].map(|(number, world)| start(number, world, port, 600.0));
    for text in ranks.map(said) {
        assert!(text.contains("two processes are rank 1"), "{text}");
    }
    // Nobody at the other end.
    let port = free_port();
    let text = said(start(1, 2, port, 1.0));
    for words in [&format!("127.0.0.1:{port}"), "attempts over", "refused"] {
        assert!(text.contains(words), "{text}");
    }
    // Somebody else at this end.
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let text = said(start(0, 2, port, 600.0));
    assert!(text.contains(&port.to_string()) && text.contains("in use"), "{text}");
    // Another secret.
    let port = free_port();
    let secret = |number, secret| {
        rank(dir.path(), number, 2, port, 600.0).env("SHARDLOOM_SECRET", secret).spawn().unwrap()
    };
    let (mut first, second) = (secret(0, "right"), secret(1, "wrong"));
    let text = said(second);
    assert!(text.contains("refused the job's secret (SHARDLOOM_SECRET)"), "{text}");
    // Who knows it still waits for another who does.
    assert!(first.try_wait().unwrap().is_none());
    first.kill().unwrap();
    first.wait().unwrap();
}
