use crate::arena::Hold;
use crate::{Error, Result};
use device::{Buffer, Dtype, Matrix};
use std::fmt;
use std::sync::{Arc, Weak};

/// Dimensions, outermost first.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Shape(Vec<usize>);

impl Shape {
    pub fn dims(&self) -> &[usize] {
        &self.0
    }

    pub fn numel(&self) -> usize {
        self.0.iter().product()
    }
}

impl<const N: usize> From<[usize; N]> for Shape {
    fn from(dims: [usize; N]) -> Self {
        Shape(dims.to_vec())
    }
}

impl From<Vec<usize>> for Shape {
    fn from(dims: Vec<usize>) -> Self {
        Shape(dims)
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.0)
    }
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.0)
    }
}

/// A shape over a flat buffer. Contiguous, row-major. Cloning shares the storage; when the last clone goes,
/// its place in the arena is free again.
#[derive(Clone, Debug)]
pub struct Tensor {
    buffer: Buffer,
    shape: Shape,
    hold: Option<Arc<Hold>>,
}

impl Tensor {
    /// A tensor over memory that somebody else keeps (weights, batch, constants).
    pub fn over(buffer: Buffer, shape: impl Into<Shape>) -> Result<Self> {
        Self::new(buffer, shape.into(), None)
    }

    pub(crate) fn held(buffer: Buffer, shape: Shape, hold: Hold) -> Result<Self> {
        Self::new(buffer, shape, Some(Arc::new(hold)))
    }

    fn new(buffer: Buffer, shape: Shape, hold: Option<Arc<Hold>>) -> Result<Self> {
        if buffer.len() != shape.numel() {
            return Err(Error::shape("Tensor::new", format!("{} elements", buffer.len()), &shape));
        }
        Ok(Tensor { buffer, shape, hold })
    }

    pub fn buffer(&self) -> &Buffer {
        &self.buffer
    }

    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    pub fn dtype(&self) -> Dtype {
        self.buffer.dtype()
    }

    /// (rows, cols) of a two-dimensional tensor.
    pub fn rows_cols(&self, op: &'static str) -> Result<(usize, usize)> {
        match self.shape.dims() {
            [rows, cols] => Ok((*rows, *cols)),
            _ => Err(Error::shape(op, "[rows, cols]", &self.shape)),
        }
    }

    /// The tensor as a matrix operand. Panics on another number of dimensions than two, which callers have
    /// checked with [`Tensor::rows_cols`].
    pub fn matrix(&self) -> Matrix<'_> {
        let [rows, cols] = *self.shape.dims() else { panic!("matrix() of a tensor of shape {}", self.shape) };
        Matrix::new(&self.buffer, rows, cols)
    }

    /// Rows `start..start + rows` of a two-dimensional tensor.
    pub fn rows(&self, start: usize, rows: usize) -> Result<Tensor> {
        let (_, cols) = self.rows_cols("Tensor::rows")?;
        let buffer = self.buffer.slice(start * cols, rows * cols)?;
        Ok(Tensor { buffer, shape: [rows, cols].into(), hold: self.hold.clone() })
    }

    /// A mark of this storage that does not hold it.
    pub(crate) fn mark(&self) -> Option<Weak<Hold>> {
        self.hold.as_ref().map(Arc::downgrade)
    }

    pub(crate) fn is_marked(&self, mark: &Weak<Hold>) -> bool {
        self.hold.as_ref().is_some_and(|hold| std::ptr::eq(Arc::as_ptr(hold), mark.as_ptr()))
    }

    /// Whether nobody else holds this storage, so that it may be overwritten in place.
    pub fn is_unique(&self) -> bool {
        self.hold.as_ref().is_some_and(|hold| Arc::strong_count(hold) == 1)
    }
}
