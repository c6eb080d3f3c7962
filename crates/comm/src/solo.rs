use crate::group::{agree_on_split, check_all_to_all, check_parts, check_peer, check_root};
use crate::{Group, Reduction, Result, reduce};
use device::{Buffer, Device, Stream};
use std::sync::Arc;

/// A group of one rank, on any device: what would be moved is at its place already, or one copy away.
#[derive(Debug)]
pub struct Solo {
    name: String,
    device: Arc<dyn Device>,
}

impl Solo {
    pub fn new(name: &str, device: Arc<dyn Device>) -> Self {
        Solo { name: name.to_string(), device }
    }

    fn copy(&self, stream: &Stream, src: &Buffer, dst: &Buffer) -> Result<()> {
        if src.address() == dst.address() {
            return Ok(());
        }
        Ok(self.device.copy(stream, src, dst)?)
    }
}

impl Group for Solo {
    fn name(&self) -> &str {
        &self.name
    }

    fn rank(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        1
    }

    fn all_gather(&self, stream: &Stream, src: &Buffer, dst: &Buffer, what: &str) -> Result<()> {
        check_parts("all_gather", what, src, dst, self)?;
        self.copy(stream, src, dst)
    }

    fn reduce_scatter(&self, stream: &Stream, src: &Buffer, dst: &Buffer, what: &str) -> Result<()> {
        reduce::supports("reduce_scatter", src.dtype())?;
        check_parts("reduce_scatter", what, dst, src, self)?;
        self.copy(stream, src, dst)
    }

    fn all_reduce(&self, _: &Stream, buffer: &Buffer, _: Reduction, _: &str) -> Result<()> {
        reduce::supports("all_reduce", buffer.dtype())
    }

    fn broadcast(&self, _: &Stream, _: &Buffer, root: usize, what: &str) -> Result<()> {
        check_root("broadcast", what, root, self)
    }

    fn all_to_all(&self, stream: &Stream, src: &Buffer, dst: &Buffer, what: &str) -> Result<()> {
        check_all_to_all(what, src, dst, self)?;
        self.copy(stream, src, dst)
    }

    fn send(&self, _: &Stream, _: &Buffer, to: usize, what: &str) -> Result<()> {
        check_peer("send", what, to, self)
    }

    fn receive(&self, _: &Stream, _: &Buffer, from: usize, what: &str) -> Result<()> {
        check_peer("receive", what, from, self)
    }

    fn exchange(&self, bytes: &[u8], _: &str) -> Result<Vec<Vec<u8>>> {
        Ok(vec![bytes.to_vec()])
    }

    fn split(&self, ranks: &[usize], name: &str) -> Result<Option<Arc<dyn Group>>> {
        let rank = agree_on_split(self, ranks, name)?;
        Ok(rank.map(|_| Arc::new(Solo::new(name, self.device.clone())) as Arc<dyn Group>))
    }
}
