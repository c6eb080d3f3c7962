//! Ranks as processes over sockets: as on several machines, and with shared memory as on one.

mod conformance;
mod processes;

use comm::store::Store;
use comm::{Group, tcp};
use conformance::Rank;
use device::cpu::Cpu;
use processes::{Me, me, run, run_killed};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

const LONG: Duration = Duration::from_secs(60);
/// As if each rank were on a machine of its own.
const FAR: &[(&str, &str)] = &[("SHARDLOOM_TCP_SHM", "0")];

fn join(me: &Me, timeout: Duration) -> Arc<dyn Group> {
    tcp::join(me.store.clone(), "world", me.rank, me.size, timeout).unwrap()
}

fn on_cpu(group: Arc<dyn Group>) -> Rank {
    Rank::new(group, Arc::new(Cpu::new()))
}

fn conform(me: &Me) {
    let rank = on_cpu(join(me, LONG));
    conformance::all(&rank);
    if conformance::ranks(&[2, 3]).contains(&me.size) {
        conformance::large(&rank);
    }
    (0..2).for_each(|seed| conformance::random(&rank, seed, 40));
}

#[test]
fn every_call_at_every_size_between_machines() {
    match me() {
        Some(me) => conform(&me),
        None => {
            [1, 2, 3, 4, 5, 8]
                .into_iter()
                .for_each(|size| run("every_call_at_every_size_between_machines", size, FAR));
        }
    }
}

#[test]
fn every_call_at_every_size_within_a_machine() {
    match me() {
        Some(me) => conform(&me),
        None => {
            let sizes = conformance::ranks(&[2, 3, 5]);
            sizes.into_iter().for_each(|size| run("every_call_at_every_size_within_a_machine", size, &[]));
        }
    }
}

#[test]
fn a_mismatch_is_an_error_on_every_rank() {
    match me() {
        Some(me) => processes::mismatch(&on_cpu(join(&me, LONG))),
        None => [FAR, &[]].iter().for_each(|far| run("a_mismatch_is_an_error_on_every_rank", 3, far)),
    }
}

#[test]
fn a_killed_rank_fails_the_others_long_before_the_timeout() {
    match me() {
        Some(me) => processes::killed(&on_cpu(join(&me, LONG))),
        None => {
            let test = "a_killed_rank_fails_the_others_long_before_the_timeout";
            [FAR, &[]].iter().for_each(|far| run_killed(test, far));
        }
    }
}

#[test]
fn a_rank_killed_midway_fails_the_others_too() {
    match me() {
        Some(me) => processes::killed_midway(&on_cpu(join(&me, LONG))),
        None => {
            let test = "a_rank_killed_midway_fails_the_others_too";
            [FAR, &[]].iter().for_each(|far| run_killed(test, far));
        }
    }
}

#[test]
fn a_timeout_names_who_is_missing() {
    match me() {
        Some(me) => me.timeout(&on_cpu(join(&me, processes::TIMEOUT))),
        None => [FAR, &[]].iter().for_each(|far| run("a_timeout_names_who_is_missing", 3, far)),
    }
}

#[test]
fn strangers_do_not_keep_a_job_with_a_secret_from_meeting() {
    let secret = [("SHARDLOOM_SECRET", "only between us")];
    let Some(me) = me() else {
        let server = Store::serve_with("127.0.0.1:0", Some(secret[0].1.into())).unwrap();
        let address = server.address().to_string();
        let test = "strangers_do_not_keep_a_job_with_a_secret_from_meeting";
        return processes::finish(processes::start(test, 3, &address, &secret));
    };
    if me.rank == 2 {
        // The others listen and wait for this one. Where they do is for everyone on the machine to find out;
        // it takes the ports of their processes from the kernel, as a stranger would.
        std::thread::sleep(Duration::from_millis(300));
        for port in listening_ports() {
            let Ok(mut stranger) = TcpStream::connect(("127.0.0.1", port)) else { continue };
            let _ = stranger.write_all(b"shardtcpGET / HTTP/1.1 and more than enough to be a greeting, but no proof of anything at all");
            let _ = stranger.set_read_timeout(Some(Duration::from_millis(100)));
            let mut answer = [0; 100];
            let _ = stranger.read(&mut answer);
            // Another, who says nothing and stays.
            std::mem::forget(TcpStream::connect(("127.0.0.1", port)));
        }
    }
    let group = join(&me, LONG);
    assert_eq!(group.exchange(&[me.rank as u8], "who").unwrap(), [[0], [1], [2]]);
}

/// Ports on which processes of this test listen.
fn listening_ports() -> Vec<u16> {
    let mine = std::env::current_exe().unwrap();
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
    let listening = table.lines().skip(1).filter_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let port = u16::from_str_radix(fields[1].rsplit(':').next()?, 16).ok()?;
        (fields[3] == "0A").then_some((port, format!("socket:[{}]", fields[9])))
    });
    let listening: Vec<(u16, String)> = listening.collect();
    let mut ports = Vec::new();
    for process in std::fs::read_dir("/proc").unwrap().flatten() {
        if std::fs::read_link(process.path().join("exe")).ok() != Some(mine.clone()) {
            continue;
        }
        let descriptors = std::fs::read_dir(process.path().join("fd")).into_iter().flatten().flatten();
        let targets = descriptors.filter_map(|entry| std::fs::read_link(entry.path()).ok());
        for target in targets {
            ports.extend(
                listening
                    .iter()
                    .filter(|(_, socket)| target.as_os_str() == socket.as_str())
                    .map(|(port, _)| *port),
            );
        }
    }
    ports
}

#[test]
fn a_wrong_secret_is_refused() {
    let server = Store::serve_with("127.0.0.1:0", Some(b"right".to_vec())).unwrap();
    let address = server.address().to_string();
    let connect = |secret: Option<&[u8]>| {
        Store::connect_with(&address, Duration::from_secs(3), secret.map(<[u8]>::to_vec))
    };
    let text = connect(Some(b"wrong")).unwrap_err().to_string();
    assert!(text.contains("refused the job's secret"), "{text}");
    let text = connect(None).unwrap_err().to_string();
    assert!(text.contains("SHARDLOOM_SECRET"), "{text}");
    connect(Some(b"right")).unwrap().set("a", b"b").unwrap();
    // A server without one does not understand, and says nothing.
    let open = Store::serve_with("127.0.0.1:0", None).unwrap();
    let text = Store::connect_with(&open.address().to_string(), LONG, Some(b"x".to_vec()));
    assert!(text.unwrap_err().to_string().contains("refused the job's secret"));
}

/// Two namespaces with a cable between them, for as long as it lives.
struct Cable {
    ends: [String; 2],
}

impl Cable {
    /// None where this machine does not allow it.
    fn lay() -> Option<Self> {
        let id = std::process::id();
        let cable = Cable { ends: [format!("shl{id}a"), format!("shl{id}b")] };
        let [a, b] = &cable.ends;
        let ok = ip(&["netns", "add", a])
            && ip(&["netns", "add", b])
            && ip(&["-n", a, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", b])
            && [(a, "10.77.0.1/24"), (b, "10.77.0.2/24")].iter().all(|(end, address)| {
                ip(&["-n", end, "address", "add", address, "dev", "cable"])
                    && ip(&["-n", end, "link", "set", "cable", "up"])
                    && ip(&["-n", end, "link", "set", "lo", "up"])
            });
        ok.then_some(cable)
    }
}

impl Drop for Cable {
    fn drop(&mut self) {
        for end in &self.ends {
            ip(&["netns", "delete", end]);
        }
    }
}

fn ip(arguments: &[&str]) -> bool {
    let output = std::process::Command::new("ip").args(arguments).output();
    output.is_ok_and(|output| output.status.success())
}

#[test]
fn two_machines_of_two_ranks_notice_that_the_link_is_cut() {
    const TEST: &str = "two_machines_of_two_ranks_notice_that_the_link_is_cut";
    const RANK: &str = "CUT_TEST_RANK";
    const READY: &str = "CUT_TEST_READY";
    if let Ok(rank) = std::env::var(RANK) {
        return until_cut(rank.parse().unwrap(), &std::env::var(READY).unwrap());
    }
    let dir = std::env::temp_dir().join(format!("shardloom cut {}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let Some(cable) = Cable::lay() else {
        return println!("skipped: this machine lets us make no network namespaces");
    };
    let start = |rank: usize| {
        std::process::Command::new("ip")
            .args(["netns", "exec", &cable.ends[rank / 2]])
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", TEST, "--nocapture"])
            .env(RANK, rank.to_string())
            .env(READY, dir.join(rank.to_string()))
            .stdout(std::process::Stdio::piped())
            .stderr(std::process::Stdio::piped())
            .spawn()
            .unwrap()
    };
    let mut children: Vec<_> = (0..4).map(start).collect();
    // Until all have begun to work, or one has ended before its time.
    let started = std::time::Instant::now();
    while (0..4).any(|rank| !dir.join(rank.to_string()).exists())
        && children.iter_mut().all(|child| child.try_wait().unwrap().is_none())
    {
        assert!(started.elapsed() < LONG, "the ranks do not begin");
        std::thread::sleep(Duration::from_millis(50));
    }
    std::fs::remove_dir_all(&dir).unwrap();
    assert!(ip(&["-n", &cable.ends[1], "link", "set", "cable", "down"]));
    let cut = std::time::Instant::now();
    for (rank, child) in children.into_iter().enumerate() {
        let output = child.wait_with_output().unwrap();
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        println!(
            "{:.1} s, {}",
            cut.elapsed().as_secs_f64(),
            out.lines().find(|line| line.contains("told")).unwrap_or("")
        );
        assert!(output.status.success(), "rank {rank}: {out} {err}");
        // It did work before.
        assert!(out.contains("told") && !out.contains("after 0 calls"), "rank {rank}: {out}");
    }
    assert!(cut.elapsed() < LONG, "{:?}", cut.elapsed());
}

fn until_cut(rank: usize, ready: &str) {
    const PATIENCE: Duration = Duration::from_secs(300);
    let store = Arc::new(comm::store::join(rank, 4, "10.77.0.1:29577", PATIENCE).unwrap());
    let rank = on_cpu(tcp::join(store, "world", rank, 4, PATIENCE).unwrap());
    let buffer = rank.zeros(device::Dtype::F32, 200_000);
    for calls in 0.. {
        let done = rank.group.all_reduce(&rank.compute, &buffer, comm::Reduction::Sum, "grads");
        if let Err(error) = done {
            println!("rank {} was told after {calls} calls: {error}", rank.group.rank());
            assert!(matches!(error, comm::Error::PeerLost { .. }), "{error}");
            return;
        }
        if calls == 3 {
            std::fs::write(ready, "").unwrap();
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}
