//! NVIDIA GPUs, loaded at run time.

pub mod cudnn;

use crate::Result;

#[derive(Clone, Debug)]
pub struct Stream {}

#[derive(Clone, Debug)]
pub struct Event {}

impl Stream {
    pub fn record(&self) -> Result<Event> {
        Ok(Event {})
    }
    pub fn wait(&self, _event: &Event) -> Result<()> {
        Ok(())
    }
    pub fn synchronize(&self) -> Result<()> {
        Ok(())
    }
}
