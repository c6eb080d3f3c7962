use super::{Store, Waited};
use crate::error::Place;
use crate::{Error, Result};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Exchanges of small host bytes among the ranks of a group, through a store.
#[derive(Debug)]
pub struct Exchange {
    store: Arc<Store>,
    group: String,
    scope: String,
    rank: usize,
    size: usize,
    timeout: Duration,
    issued: AtomicU64,
}

/// A rank that joins a group.
pub(crate) struct Joining<'a> {
    pub store: Arc<Store>,
    /// The group's name in the store.
    pub scope: &'a str,
    /// The one that users see.
    pub name: &'a str,
    pub rank: usize,
    pub size: usize,
    pub timeout: Duration,
}

impl Joining<'_> {
    /// With the others of the group, which is of this kind; nobody else has taken this rank's place.
    pub fn exchange(&self, kind: &str) -> Result<Exchange> {
        let Joining { store, scope, rank, size, timeout, .. } = self;
        if rank >= size {
            let what = format!("{kind} {scope}: there is no rank {rank} in a group of {size}");
            return Err(Error::Argument { op: "join", what });
        }
        let exchange = Exchange::new(store.clone(), &format!("{kind} {scope}"), *rank, *size, *timeout);
        exchange.claim()?;
        Ok(exchange)
    }
}

impl Exchange {
    /// Groups that exist at the same time in one store need different names.
    pub fn new(store: Arc<Store>, group: &str, rank: usize, size: usize, timeout: Duration) -> Self {
        let scope = store.scope(&format!("exchange/{group}"));
        Exchange { store, group: group.to_string(), scope, rank, size, timeout, issued: AtomicU64::new(0) }
    }

    /// Where its keys are: a name that no other group of this store has or had.
    pub(crate) fn scope(&self) -> &str {
        &self.scope
    }

    /// Fails where this rank of this group was taken already: two processes were started as the same one.
    fn claim(&self) -> Result<()> {
        if self.store.add(&format!("{}/rank {}", self.scope, self.rank), 1)? == 1 {
            return Ok(());
        }
        let what = format!("there are two ranks {} in {}", self.rank, self.group);
        Err(Error::Argument { op: "join", what })
    }

    /// Every rank's bytes, in rank order.
    pub fn exchange(&self, bytes: &[u8], what: &str) -> Result<Vec<Vec<u8>>> {
        let number = self.issued.fetch_add(1, Ordering::Relaxed);
        let started = Instant::now();
        self.store.set(&self.key(number, self.rank), bytes)?;
        let keys: Vec<String> = (0..self.size).map(|rank| self.key(number, rank)).collect();
        let names: Vec<&str> = keys.iter().map(String::as_str).collect();
        match self.store.wait_until(&names, self.timeout)? {
            Waited::Done => {}
            Waited::TimedOut => return Err(self.timed_out(&names, what, started)?),
            Waited::Failed(failure) => {
                let place = Place { rank: self.rank, group: &self.group, op: "exchange", what, started };
                return Err(Error::of_failure(&failure, &place));
            }
        }
        let all = names.iter().map(|key| self.store.get_now(key)).collect::<Result<_>>()?;
        // Who has come to this exchange has read the one before it.
        if let Some(before) = number.checked_sub(1) {
            self.store.delete(&self.key(before, self.rank))?;
        }
        Ok(all)
    }

    fn timed_out(&self, keys: &[&str], what: &str, started: Instant) -> Result<Error> {
        let mut missing = Vec::new();
        for (rank, key) in keys.iter().enumerate() {
            if !self.store.check(&[key])? {
                missing.push(rank);
            }
        }
        Ok(Error::Timeout {
            rank: self.rank,
            group: self.group.clone(),
            op: "exchange",
            what: what.to_string(),
            seconds: started.elapsed().as_secs_f64(),
            missing: crate::error::list_ranks(missing),
        })
    }

    fn key(&self, number: u64, rank: usize) -> String {
        format!("{}/{number}/{rank}", self.scope)
    }
}
