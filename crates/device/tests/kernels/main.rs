//! Every kernel of every device against a plain f64 reference, element by element.
//!
//! One test body per kernel runs on each device that [`harness::devices`] finds. Outputs hold NaN before a
//! kernel runs, so an element it forgets is seen; each kernel runs twice and must give the same bits.

mod attention;
mod elementwise;
mod embedding;
mod gemm;
mod harness;
mod loss;
mod memory;
mod norm;
mod optim;
mod reference;
mod rope;
mod swiglu;
