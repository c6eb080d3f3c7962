//! Every kernel of every device against a plain f64 reference, element by element.
//!
//! One test body per kernel runs on each device that [`harness::devices`] finds. Outputs hold NaN before a
//! kernel runs, so an element it forgets is seen; each kernel runs twice and must give the same bits.

mod attention;
mod bias;
mod elementwise;
mod embedding;
mod gemm;
mod harness;
mod head_norm;
mod layer_norm;
mod loss;
mod memory;
mod norm;
mod optim;
mod pointwise;
mod reference;
mod rope;
mod swiglu;
