//! The engine on the CPU, with small models: what a setting must not change, and what it must.

mod after_forward;
mod blame;
mod first;
mod gpu;
mod hand;
mod harness;
mod offload;
mod rounding;
mod scaler;
