//! NCCL where there may be none: presence is asked for, and absence is an error that reaches every rank.

use comm::nccl::{self, Nccl};
use comm::store;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

#[test]
fn without_nccl_every_rank_hears_why() {
    if let Ok(version) = nccl::version() {
        assert!(version >= (2, 0, 0), "{version:?}");
        return;
    }
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let started = Instant::now();
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let address = &address;
            scope.spawn(move || {
                let timeout = Duration::from_secs(30);
                let store = Arc::new(store::join(rank, 2, address, timeout).unwrap());
                let text = Nccl::join(store.clone(), "world", rank, 2, timeout).unwrap_err().to_string();
                assert!(text.contains("NCCL is not available") && text.contains("libnccl.so.2"), "{text}");
                store.finish(timeout).unwrap();
            });
        }
    });
    assert!(started.elapsed() < Duration::from_secs(20));
}
