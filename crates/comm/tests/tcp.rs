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
    if me.size == 2 || me.size == 3 {
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
            [2, 3, 5]
                .into_iter()
                .for_each(|size| run("every_call_at_every_size_within_a_machine", size, &[]));
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
fn a_killed_rank_fails_the_others_within_a_second() {
    match me() {
        Some(me) => processes::killed(&on_cpu(join(&me, LONG))),
        None => {
            let test = "a_killed_rank_fails_the_others_within_a_second";
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
        Some(me) => processes::timeout(&on_cpu(join(&me, Duration::from_millis(700)))),
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
        Store::connect_with(&address, Duration::from_secs(1), secret.map(<[u8]>::to_vec))
    };
    let text = connect(Some(b"wrong")).unwrap_err().to_string();
    assert!(text.contains("refused the job's secret"), "{text}");
    let text = connect(None).unwrap_err().to_string();
    assert!(text.contains("SHARDLOOM_SECRET"), "{text}");
    connect(Some(b"right")).unwrap().set("a", b"b").unwrap();
    // A server without one does not understand, and says nothing.
    let open = Store::serve_with("127.0.0.1:0", None).unwrap();
    let text = Store::connect_with(&open.address().to_string(), Duration::from_secs(1), Some(b"x".to_vec()));
    assert!(text.unwrap_err().to_string().contains("refused the job's secret"));
}
