//! Ranks as threads of this process.

mod conformance;

use comm::{Error, Group, Reduction, local};
use conformance::Rank;
use device::Dtype;
use device::cpu::Cpu;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

const LONG: Duration = Duration::from_secs(60);

/// Runs `body` once per handle, each in a thread of its own that holds the only handle of its rank.
fn in_threads(handles: Vec<Arc<dyn Group>>, body: impl Fn(Rank) + Send + Sync) {
    std::thread::scope(|scope| {
        for handle in handles {
            let body = &body;
            scope.spawn(move || body(on_cpu(handle)));
        }
    });
}

fn on_cpu(group: Arc<dyn Group>) -> Rank {
    Rank::new(group, Arc::new(Cpu::new()))
}

/// That nobody has waited for the timeout, however busy the machine is.
fn quick(started: Instant) {
    assert!(started.elapsed() < LONG / 2, "took {:?}", started.elapsed());
}

#[test]
fn every_collective_at_every_size() {
    for size in [1, 2, 3, 4, 5, 8] {
        in_threads(local::group("world", size, LONG), |rank| conformance::all(&rank));
    }
}

#[test]
fn random_calls_on_random_sub_groups() {
    for size in conformance::ranks(&[1, 2, 4, 5]) {
        in_threads(local::group("world", size, LONG), |rank| {
            (0..3).for_each(|seed| conformance::random(&rank, seed, 60));
        });
    }
}

#[test]
fn large_buffers() {
    for size in conformance::ranks(&[3]) {
        in_threads(local::group("world", size, LONG), |rank| conformance::large(&rank));
    }
}

#[test]
fn a_mesh_has_a_group_per_axis() {
    in_threads(local::group("world", 8, LONG), |rank| conformance::mesh(rank.group));
}

#[test]
fn many_in_flight_and_on_two_streams() {
    in_threads(local::group("world", 3, LONG), |rank: Rank| {
        let one = rank.buffer_of(&[1.0f32]);
        let sums: Vec<_> = (0..50).map(|i| rank.buffer_of(&[(i * rank.group.rank()) as f32; 7])).collect();
        for (i, sum) in sums.iter().enumerate() {
            rank.group.all_reduce(&rank.side, sum, Reduction::Sum, "many").unwrap();
            if i % 10 == 0 {
                rank.group.all_reduce(&rank.compute, &one, Reduction::Max, "between").unwrap();
            }
        }
        rank.side.synchronize().unwrap();
        for (i, sum) in sums.iter().enumerate() {
            assert_eq!(rank.values::<f32>(sum), [(3 * i) as f32; 7]);
        }
    });
}

#[test]
fn a_mismatch_is_an_error_on_every_rank() {
    let started = Instant::now();
    in_threads(local::group("world", 3, LONG), |rank: Rank| {
        let odd = rank.group.rank() == 1;
        let buffer = if odd { rank.zeros(Dtype::F32, 5) } else { rank.zeros(Dtype::F32, 4) };
        let error = rank.group.all_reduce(&rank.compute, &buffer, Reduction::Sum, "layers.3").unwrap_err();
        let Error::Mismatch { group, mine, theirs, .. } = &error else { panic!("{error}") };
        assert_eq!(group, "world");
        let both = format!("{mine} {theirs}");
        assert!(both.contains("4 f32") && both.contains("5 f32") && both.contains("layers.3"), "{both}");
        // The group stays broken, with the same story.
        let again = rank.group.exchange(&[], "after").unwrap_err();
        assert_eq!(again.to_string(), error.to_string());
    });
    quick(started);
}

#[test]
fn different_operations_are_a_mismatch_and_travel_through_a_side_stream() {
    in_threads(local::group("world", 2, LONG), |rank: Rank| {
        let buffer = rank.zeros(Dtype::F32, 4);
        let issued = if rank.group.rank() == 0 {
            rank.group.all_reduce(&rank.side, &buffer, Reduction::Sum, "norm")
        } else {
            rank.group.broadcast(&rank.side, &buffer, 0, "norm")
        };
        let text = match issued {
            // The other rank may have failed the group before this one issued its call.
            Err(error) => error.to_string(),
            Ok(()) => rank.side.synchronize().unwrap_err().to_string(),
        };
        assert!(text.contains("all_reduce") && text.contains("broadcast from rank 0"), "{text}");
    });
}

#[test]
fn a_dropped_rank_fails_the_others_at_once() {
    let started = Instant::now();
    in_threads(local::group("world", 4, LONG), |rank: Rank| {
        rank.group.exchange(&[], "start").unwrap();
        if rank.group.rank() == 2 {
            return;
        }
        let buffer = rank.zeros(Dtype::Bf16, 9);
        let error = rank.group.all_reduce(&rank.compute, &buffer, Reduction::Sum, "layers.0").unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, Error::PeerLost { peer: 2, .. }), "{text}");
        assert!(text.contains("rank 2 left the group (its handle was dropped)"), "{text}");
    });
    quick(started);
}

#[test]
fn a_panicking_rank_fails_the_others_at_once() {
    let started = Instant::now();
    let mut handles = local::group("world", 2, LONG);
    let (mine, theirs) = (handles.remove(0), handles.remove(0));
    let thread = std::thread::spawn(move || {
        let _theirs = theirs;
        std::panic::resume_unwind(Box::new("test"));
    });
    let text = mine.exchange(&[1], "plan").unwrap_err().to_string();
    assert!(text.contains("rank 1 left the group (its thread panicked)"), "{text}");
    assert!(thread.join().is_err());
    quick(started);
}

#[test]
fn a_rank_whose_stream_failed_does_not_keep_the_others_waiting() {
    let started = Instant::now();
    in_threads(local::group("world", 2, LONG), |rank: Rank| {
        let buffer = rank.zeros(Dtype::F32, 4);
        if rank.group.rank() == 1 {
            let device::Stream::Cpu(side) = &rank.side else { unreachable!() };
            let (go, gate) = channel::<()>();
            let broken = device::Error::argument("test", "broken kernel");
            side.submit(move || gate.recv().map_or(Ok(()), |()| Err(broken))).unwrap();
            rank.group.all_reduce(&rank.side, &buffer, Reduction::Sum, "norm").unwrap();
            go.send(()).unwrap();
            assert!(rank.side.synchronize().unwrap_err().to_string().contains("broken kernel"));
            // Stays in the group until the other has heard.
            assert!(rank.group.exchange(&[], "end").is_err());
        } else {
            let error = rank.group.all_reduce(&rank.compute, &buffer, Reduction::Sum, "norm").unwrap_err();
            assert!(matches!(error, Error::PeerLost { peer: 1, .. }), "{error}");
        }
    });
    quick(started);
}

#[test]
fn leaving_after_the_last_collective_harms_nobody() {
    let mut handles = local::group("world", 2, LONG);
    let (zero, one) = (handles.remove(0), handles.remove(0));
    let thread = std::thread::spawn(move || {
        let rank = on_cpu(one);
        let buffer = rank.buffer_of(&[2.0f32]);
        // Issued, and the handle gone before it has run.
        rank.group.all_reduce(&rank.side, &buffer, Reduction::Sum, "last").unwrap();
        let Rank { group, device, compute, side, .. } = rank;
        drop(group);
        side.synchronize().unwrap();
        assert_eq!(device.read_vec::<f32>(&compute, &buffer).unwrap(), [5.0]);
    });
    std::thread::sleep(Duration::from_millis(100));
    let rank = on_cpu(zero);
    let buffer = rank.buffer_of(&[3.0f32]);
    rank.group.all_reduce(&rank.compute, &buffer, Reduction::Sum, "last").unwrap();
    assert_eq!(rank.values::<f32>(&buffer), [5.0]);
    thread.join().unwrap();
}

#[test]
fn a_timeout_says_who_waited_for_whom_and_what_for() {
    let handles = local::group("shard", 4, Duration::from_secs(2));
    let two: Vec<Arc<dyn Group>> = vec![handles[0].clone(), handles[3].clone()];
    let (send, errors) = channel();
    in_threads(two, move |rank: Rank| {
        let buffer = rank.zeros(Dtype::F32, 2);
        let error = rank.group.all_reduce(&rank.compute, &buffer, Reduction::Max, "grad norm").unwrap_err();
        send.send(error.to_string()).unwrap();
    });
    for text in errors {
        assert!(text.contains("in all_reduce of grad norm in group shard"), "{text}");
        assert!(text.contains("ranks 1, 2 did not come") && text.contains(" waited "), "{text}");
    }
    // Who comes late is told the same instead of waiting.
    let late = handles[1].exchange(&[], "late").unwrap_err();
    assert!(matches!(late, Error::Timeout { .. }), "{late}");
}

#[test]
fn wrong_arguments_are_found_before_anything_is_issued() {
    let group = &local::group("world", 1, LONG)[0];
    let rank = on_cpu(group.clone());
    let (two, three, half) =
        (rank.zeros(Dtype::F32, 2), rank.zeros(Dtype::F32, 3), rank.zeros(Dtype::Bf16, 2));
    assert!(group.all_gather(&rank.compute, &two, &three, "x").is_err());
    assert!(group.all_gather(&rank.compute, &two, &half, "x").is_err());
    assert!(group.reduce_scatter(&rank.compute, &two, &three, "x").is_err());
    assert!(group.broadcast(&rank.compute, &two, 1, "x").is_err());
    assert!(group.all_reduce(&rank.compute, &rank.zeros(Dtype::U8, 1), Reduction::Sum, "x").is_err());
    assert!(group.all_reduce(&device::Stream::Null, &two, Reduction::Sum, "x").is_err());
    let region = rank.zeros(Dtype::F32, 4);
    let (front, shifted) = (region.slice(0, 2).unwrap(), region.slice(1, 2).unwrap());
    assert!(group.all_gather(&rank.compute, &front, &shifted, "x").is_err());
    // None of which harmed the group.
    group.all_reduce(&rank.compute, &two, Reduction::Sum, "x").unwrap();
}
