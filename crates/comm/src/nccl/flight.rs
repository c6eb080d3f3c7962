//! What a group has issued on its streams and has not seen the end of.

use device::cuda::Event;
use std::collections::VecDeque;
use std::time::Instant;

/// A point in a stream's work.
pub(super) trait Point {
    fn has_passed(&self) -> device::Result<bool>;
}

impl Point for Event {
    fn has_passed(&self) -> device::Result<bool> {
        Event::has_passed(self)
    }
}

/// One of any kind.
pub(super) type AnyPoint = Box<dyn Point + Send>;

impl Point for AnyPoint {
    fn has_passed(&self) -> device::Result<bool> {
        (**self).has_passed()
    }
}

/// One call: what it is, for errors.
#[derive(Clone, Debug)]
pub(super) struct Issued {
    /// Among the calls of the whole group; the same on all ranks.
    pub number: u64,
    pub op: &'static str,
    pub what: String,
    /// Of a message: with whom.
    pub peer: Option<usize>,
    /// When its stream came to it; before that, when it was issued.
    pub since: Instant,
}

struct Flight<P> {
    issued: Issued,
    before: P,
    after: P,
    /// Its stream has come to it.
    runs: bool,
}

/// Calls in the order in which they were issued.
pub(super) struct Flights<P> {
    list: VecDeque<Flight<P>>,
    /// How many the whole group took part in.
    num_collectives: u64,
    last: Option<Issued>,
}

impl<P: Point> Flights<P> {
    pub fn new() -> Self {
        Flights { list: VecDeque::new(), num_collectives: 0, last: None }
    }

    pub fn len(&self) -> usize {
        self.list.len()
    }

    /// A call that was issued between two points of its stream.
    pub fn add(&mut self, op: &'static str, what: &str, peer: Option<usize>, before: P, after: P) {
        self.num_collectives += u64::from(peer.is_none());
        let issued =
            Issued { number: self.num_collectives, op, what: what.to_string(), peer, since: Instant::now() };
        self.last = Some(issued.clone());
        self.list.push_back(Flight { issued, before, after, runs: false });
    }

    /// Forgets what has ended, and notes what has begun. Which of those that run has done so for longest?
    pub fn look(&mut self, now: Instant) -> device::Result<Option<Issued>> {
        let mut left = VecDeque::with_capacity(self.list.len());
        for mut flight in self.list.drain(..) {
            if flight.after.has_passed()? {
                continue;
            }
            if !flight.runs && flight.before.has_passed()? {
                flight.runs = true;
                flight.issued.since = now;
            }
            left.push_back(flight);
        }
        self.list = left;
        let running = self.list.iter().filter(|flight| flight.runs);
        Ok(running.min_by_key(|flight| flight.issued.since).map(|flight| flight.issued.clone()))
    }

    /// The last call that was issued.
    pub fn last(&self) -> Option<&Issued> {
        self.last.as_ref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    #[derive(Clone, Default)]
    struct Flag(Arc<AtomicBool>);

    impl Flag {
        fn pass(&self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }

    impl Point for Flag {
        fn has_passed(&self) -> device::Result<bool> {
            Ok(self.0.load(Ordering::Relaxed))
        }
    }

    struct Broken;

    impl Point for Broken {
        fn has_passed(&self) -> device::Result<bool> {
            Err(device::Error::argument("test", "broken"))
        }
    }

    #[test]
    fn time_counts_from_when_the_stream_has_come_to_a_call() {
        let (mut flights, begin) = (Flights::new(), Instant::now());
        let points: Vec<(Flag, Flag)> = (0..3).map(|_| Default::default()).collect();
        for (index, (before, after)) in points.iter().enumerate() {
            let what = format!("layers.{index}");
            flights.add("all_gather", &what, None, before.clone(), after.clone());
        }
        // Issued, and behind other work of their streams: nobody waits for them yet.
        assert!(flights.look(begin).unwrap().is_none());
        points[1].0.pass();
        let second = begin + Duration::from_secs(5);
        assert_eq!(flights.look(second).unwrap().map(|issued| issued.since), Some(second));
        // Another stream comes to the first call later.
        points[0].0.pass();
        let longest = flights.look(second + Duration::from_secs(5)).unwrap().unwrap();
        assert_eq!((longest.what.as_str(), longest.number, longest.since), ("layers.1", 2, second));
        points[1].1.pass();
        let longest = flights.look(second + Duration::from_secs(6)).unwrap().unwrap();
        assert_eq!((longest.what.as_str(), longest.since), ("layers.0", second + Duration::from_secs(5)));
        points[0].1.pass();
        points[2].1.pass();
        assert!(flights.look(second).unwrap().is_none() && flights.len() == 0);
        assert_eq!(flights.last().map(|last| last.what.as_str()), Some("layers.2"));
    }

    #[test]
    fn messages_are_not_counted_among_the_calls_of_all() {
        let mut flights = Flights::new();
        flights.add("send", "hidden", Some(3), Flag::default(), Flag::default());
        flights.add("all_reduce", "norm", None, Flag::default(), Flag::default());
        assert_eq!(flights.last().map(|last| last.number), Some(1));
    }

    #[test]
    fn a_failure_of_the_device_is_heard() {
        let mut flights = Flights::new();
        flights.add("all_reduce", "norm", None, Broken, Broken);
        assert!(flights.look(Instant::now()).is_err());
    }
}
