//! The store over the loopback, and what speaks through it.

use comm::Error;
use comm::store::{self, Exchange, Store};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

const LONG: Duration = Duration::from_secs(30);
const SHORT: Duration = Duration::from_millis(80);

fn server() -> (store::Server, String) {
    let server = Store::serve("127.0.0.1:0").unwrap();
    let address = server.address().to_string();
    (server, address)
}

fn free_address() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

#[test]
fn keys_are_set_got_counted_checked_and_deleted() {
    let (_server, address) = server();
    let (a, b) = (Store::connect(&address, LONG).unwrap(), Store::connect(&address, LONG).unwrap());
    assert!(!a.check(&["x"]).unwrap());
    a.set("x", b"one").unwrap();
    assert_eq!(b.get("x", LONG).unwrap(), b"one");
    a.set("empty", b"").unwrap();
    assert_eq!(b.get("empty", LONG).unwrap(), b"");
    assert_eq!(a.add("n", 5).unwrap(), 5);
    assert_eq!(b.add("n", -7).unwrap(), -2);
    assert_eq!(b.get("n", LONG).unwrap(), b"-2");
    assert!(a.check(&["x", "n"]).unwrap() && !a.check(&["x", "y"]).unwrap());
    assert!(a.delete("x").unwrap() && !a.delete("x").unwrap());
    let large = vec![9; 3 << 20];
    a.set("large", &large).unwrap();
    assert_eq!(b.get("large", LONG).unwrap(), large);
}

#[test]
fn waiting_ends_when_the_last_key_comes() {
    let (_server, address) = server();
    let waiter = Store::connect(&address, LONG).unwrap();
    let setter = Store::connect(&address, LONG).unwrap();
    let thread = std::thread::spawn(move || waiter.wait(&["a", "b"], LONG));
    std::thread::sleep(SHORT);
    setter.set("a", b"").unwrap();
    std::thread::sleep(SHORT);
    assert!(!thread.is_finished());
    setter.add("b", 1).unwrap();
    thread.join().unwrap().unwrap();
}

#[test]
fn a_timeout_names_the_key_and_leaves_the_store_usable() {
    let (_server, address) = server();
    let store = Store::connect(&address, LONG).unwrap();
    let text = store.get("plan", SHORT).unwrap_err().to_string();
    assert!(text.contains("waited 0.1 s for plan") && text.contains(&address), "{text}");
    store.set("plan", b"x").unwrap();
    assert_eq!(store.get("plan", Duration::ZERO).unwrap(), b"x");
}

#[test]
fn nobody_there_says_what_was_tried() {
    let address = free_address();
    let text = Store::connect(&address, Duration::from_millis(300)).unwrap_err().to_string();
    assert!(text.contains(&address) && text.contains("attempts over ") && text.contains("refused"), "{text}");
    assert!(Store::connect("no such host:1", SHORT).is_err());
    assert!(Store::connect("nonsense", SHORT).is_err());
}

#[test]
fn who_comes_early_keeps_trying() {
    let address = free_address();
    let early = {
        let address = address.clone();
        std::thread::spawn(move || Store::connect(&address, LONG))
    };
    std::thread::sleep(SHORT);
    let _server = Store::serve(address.as_str()).unwrap();
    early.join().unwrap().unwrap();
}

#[test]
fn a_server_that_ends_is_an_error_and_not_a_wait() {
    let (server, address) = server();
    let store = Store::connect(&address, LONG).unwrap();
    let thread = std::thread::spawn(move || {
        let first = store.wait(&["x"], LONG).unwrap_err().to_string();
        (first, store.set("x", b"").unwrap_err().to_string())
    });
    std::thread::sleep(SHORT);
    drop(server);
    let (first, second) = thread.join().unwrap();
    assert!(first.contains("wait for x") && first.contains("closed"), "{first}");
    assert_eq!(first, second);
}

#[test]
fn strangers_are_shown_the_door_and_nobody_else_notices() {
    let (_server, address) = server();
    let store = Store::connect(&address, LONG).unwrap();
    let greeting = [0, 0xce, 0xf7, 0x85, 0x3c];
    let tails: [&[u8]; 6] = [
        &[],
        &[99],
        &[0],
        &[1, 255, 255, 255, 255, 255, 255, 255, 255],
        &[5, 0, 0, 0, 0, 0, 0, 0, 1],
        &[200; 64],
    ];
    for tail in tails {
        for greeted in [true, false] {
            let mut stranger = TcpStream::connect(&address).unwrap();
            stranger.set_read_timeout(Some(LONG)).unwrap();
            let start: &[u8] = if greeted { &greeting } else { b"GET / HTTP/1.1" };
            stranger.write_all(&[start, tail].concat()).unwrap();
            let _ = stranger.shutdown(std::net::Shutdown::Write);
            // The connection ends, with nothing said.
            let mut answer = Vec::new();
            let _ = stranger.read_to_end(&mut answer);
            assert!(answer.is_empty());
        }
    }
    // Half a message, and then silence, on a connection that stays open.
    let mut slow = TcpStream::connect(&address).unwrap();
    slow.write_all(&greeting[..3]).unwrap();
    store.set("still", b"here").unwrap();
    assert_eq!(store.get("still", LONG).unwrap(), b"here");
}

/// The bytes PyTorch's client sends and expects.
#[test]
fn the_wire_is_pytorchs() {
    let (_server, address) = server();
    let mut wire = TcpStream::connect(&address).unwrap();
    wire.set_read_timeout(Some(LONG)).unwrap();
    let string = |text: &str| [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat();
    let one = 1u64.to_le_bytes();
    let mut talk = |request: &[&[u8]], want: &[u8]| {
        wire.write_all(&request.concat()).unwrap();
        let mut got = vec![0; want.len()];
        wire.read_exact(&mut got).unwrap();
        assert_eq!(got, want, "{request:?}");
    };
    talk(&[&[0], &0x3C85_F7CEu32.to_le_bytes()], &[]);
    talk(&[&[13], &77u32.to_le_bytes()], &77u32.to_le_bytes());
    talk(&[&[5], &one, &string("k")], &[1]);
    talk(&[&[2], &string("k"), &string("a"), &string("b")], &string("a"));
    talk(&[&[2], &string("k"), &string(""), &string("b")], &string("b"));
    talk(&[&[2], &string("k"), &string("b"), &string("c")], &string("c"));
    talk(&[&[2], &string("k"), &string("b"), &string("d")], &string("c"));
    talk(&[&[1], &string("k"), &string("v"), &[3], &string("k")], &string("v"));
    talk(&[&[5], &one, &string("k")], &[0]);
    talk(&[&[6], &one, &string("k")], &[0]);
    talk(&[&[6], &one, &string("absent"), &[12]], &[1]);
    talk(&[&[4], &string("n"), &(-3i64).to_le_bytes()], &(-3i64).to_le_bytes());
    talk(&[&[9], &string("k"), &string("w"), &[10], &one, &string("k")], &string("vw"));
    talk(&[&[11], &one, &string("m"), &string("1"), &[3], &string("m")], &string("1"));
    talk(&[&[7]], &3i64.to_le_bytes());
    talk(&[&[8], &string("k")], &1i64.to_le_bytes());
    talk(&[&[8], &string("k")], &0i64.to_le_bytes());
    // Ours: what is to be set when the connection ends; the last word counts.
    talk(
        &[&[0x57], &string("end"), &string("a"), &[0x57], &string("end"), &string("b"), &[7]],
        &2i64.to_le_bytes(),
    );
    drop(wire);
    let store = Store::connect(&address, LONG).unwrap();
    assert_eq!(store.get("end", LONG).unwrap(), b"b");
}

#[test]
fn a_world_joins_exchanges_and_says_goodbye() {
    let (address, world) = (free_address(), 4);
    std::thread::scope(|scope| {
        for rank in 0..world {
            let address = &address;
            scope.spawn(move || {
                let store = Arc::new(store::join(rank, world, address, LONG).unwrap());
                assert_eq!(store.server().is_some(), rank == 0);
                for name in ["world", "world", "other"] {
                    let exchange = Exchange::new(store.clone(), name, rank, world, LONG);
                    for round in 0..3 {
                        let all = exchange.exchange(&[rank as u8, round], "round").unwrap();
                        assert_eq!(all, (0..world).map(|r| vec![r as u8, round]).collect::<Vec<_>>());
                    }
                }
                // Those who leave late still have the store.
                std::thread::sleep(Duration::from_millis(50 * rank as u64));
                assert_eq!(store.get("nothing", Duration::ZERO).ok(), None);
                store.finish(LONG).unwrap();
            });
        }
    });
}

#[test]
fn an_exchange_that_is_missing_ranks_names_them() {
    let address = free_address();
    let store = Arc::new(store::join(0, 3, &address, LONG).unwrap());
    let exchange = Exchange::new(store.clone(), "shard", 0, 3, SHORT);
    let error = exchange.exchange(b"hash", "plan hash").unwrap_err();
    let Error::Timeout { missing, what, group, .. } = &error else { panic!("{error}") };
    assert_eq!((missing.as_str(), what.as_str(), group.as_str()), ("ranks 1, 2", "plan hash", "shard"));
    let text = store.finish(SHORT).unwrap_err().to_string();
    assert!(text.contains("1 of 3 ranks had said goodbye"), "{text}");
}

#[test]
fn a_taken_port_is_an_error() {
    let (_server, address) = server();
    let text = store::join(0, 1, &address, SHORT).unwrap_err().to_string();
    assert!(text.contains(&address) && text.contains("cannot listen"), "{text}");
}

/// A rank that is a process of its own: it joins at the address and then dies, or ends in another way.
fn process_that(ends: &str, address: &str) -> std::process::Child {
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "a_rank_that_ends_is_heard_of_by_all_who_wait", "--nocapture"]);
    command.env(ENDS, ends).env(ADDRESS, address).spawn().unwrap()
}

const ENDS: &str = "STORE_TEST_ENDS";
const ADDRESS: &str = "STORE_TEST_ADDRESS";

#[test]
fn a_rank_that_ends_is_heard_of_by_all_who_wait() {
    if let Ok(ends) = std::env::var(ENDS) {
        let store = store::join(2, 3, &std::env::var(ADDRESS).unwrap(), LONG).unwrap();
        store.stand_for(2).unwrap();
        store.set("joined", b"").unwrap();
        match ends.as_str() {
            // SAFETY: ends this process, at once.
            "killed" => unsafe {
                libc::kill(libc::getpid(), libc::SIGKILL);
            },
            "well" => store.finish(LONG).unwrap(),
            _ => {}
        }
        return;
    }
    for ends in ["killed", "early", "well"] {
        let address = free_address();
        let first = Arc::new(store::join(0, 3, &address, LONG).unwrap());
        let second = Arc::new(store::join(1, 3, &address, LONG).unwrap());
        first.stand_for(0).unwrap();
        second.stand_for(1).unwrap();
        let mut third = process_that(ends, &address);
        first.get("joined", LONG).unwrap();
        assert_eq!(third.wait().unwrap().success(), ends != "killed");
        let heard = |store: &Arc<Store>, rank, timeout| {
            let exchange = Exchange::new(store.clone(), "plan", rank, 3, timeout);
            exchange.exchange(b"x", "plan hash").unwrap_err()
        };
        if ends == "well" {
            // It is missed, but it did nothing wrong.
            let error = heard(&first, 0, Duration::from_millis(900));
            assert!(matches!(&error, Error::Timeout { missing, .. } if missing == "ranks 1, 2"), "{error}");
            assert!(second.wait(&["x"], SHORT).is_err());
            continue;
        }
        // Long before the timeout.
        let error = heard(&first, 0, LONG).to_string();
        let who = format!("rank 2 of the job (process {} on ", third.id());
        assert!(error.contains("exchange of plan hash in group plan") && error.contains(&who), "{error}");
        assert!(error.ends_with(") has ended"), "{error}");
        let error = second.wait(&["x"], LONG).unwrap_err().to_string();
        assert!(error.contains(&who), "{error}");
        let error = first.finish(LONG).unwrap_err().to_string();
        assert!(error.contains(&who), "{error}");
    }
}

/// One whose place another has taken stands for nobody.
#[test]
fn who_only_looks_in_does_not_disturb() {
    let address = free_address();
    let first = Arc::new(store::join(0, 2, &address, LONG).unwrap());
    first.stand_for(0).unwrap();
    drop(store::join(1, 2, &address, LONG).unwrap());
    let exchange = Exchange::new(first.clone(), "plan", 0, 2, Duration::from_millis(700));
    assert!(matches!(exchange.exchange(b"x", "hash").unwrap_err(), Error::Timeout { .. }));
}
