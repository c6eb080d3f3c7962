//! A group of one rank.

mod conformance;

use comm::{Group, Reduction, Solo};
use device::cpu::Cpu;
use device::null::Null;
use device::{Device, Dtype, Profile, Stream};
use std::sync::Arc;

#[test]
fn one_rank_checks_its_arguments_like_many() {
    let device: Arc<dyn Device> = Arc::new(Null::new(Profile::Cpu));
    let group = Solo::new("world", device.clone());
    assert_eq!((group.name(), group.rank(), group.size()), ("world", 0, 1));
    let buffer = |dtype, len| device.alloc_buffer(dtype, len, "test").unwrap();
    let (four, also, five) = (buffer(Dtype::F32, 4), buffer(Dtype::F32, 4), buffer(Dtype::F32, 5));
    let stream = &Stream::Null;
    group.all_gather(stream, &four, &also, "x").unwrap();
    group.all_gather(stream, &four, &four, "x").unwrap();
    group.reduce_scatter(stream, &four, &also, "x").unwrap();
    group.all_reduce(stream, &four, Reduction::Sum, "x").unwrap();
    group.broadcast(stream, &four, 0, "x").unwrap();
    assert_eq!(group.exchange(b"me", "x").unwrap(), [b"me"]);
    assert!(group.all_gather(stream, &four, &five, "x").is_err());
    assert!(group.reduce_scatter(stream, &five, &four, "x").is_err());
    assert!(group.broadcast(stream, &four, 1, "x").is_err());
}

#[test]
fn one_rank_conforms() {
    let device: Arc<dyn Device> = Arc::new(Cpu::new());
    let group = Arc::new(Solo::new("world", device.clone()));
    conformance::all(&conformance::Rank::new(group, device));
}
