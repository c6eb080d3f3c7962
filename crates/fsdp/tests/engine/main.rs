//! The engine on the CPU, with small models: what a setting must not change, and what it must.

mod after_forward;
mod blame;
mod harness;
mod rounding;
mod scaler;
