//! Backend descriptors: created, given attributes, finalised, destroyed.

use super::library::{Failure, Library, Opaque};
use cudarc::cudnn::sys::{
    cudnnBackendAttributeName_t as Name, cudnnBackendAttributeType_t as Type,
    cudnnBackendDescriptorType_t as Kind, cudnnBackendHeurMode_t, cudnnDataType_t, cudnnPointwiseMode_t,
    cudnnReduceTensorOp_t,
};
use std::ffi::c_void;
use std::ptr;

pub type Result<T> = std::result::Result<T, Failure>;

/// A Rust type that cuDNN reads under one attribute type.
///
/// # Safety
/// The type has the size and meaning cuDNN gives to `TYPE`.
pub unsafe trait Attribute: Copy {
    const TYPE: Type;
}

/// A `cudnnHandle_t` as an attribute.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct Handle(pub Opaque);

/// An address, of the device or (for tensors by value) of the host.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct Address(pub *mut c_void);

/// A `cudnnBackendDescriptor_t` as an attribute.
#[derive(Clone, Copy)]
#[repr(transparent)]
struct Raw(Opaque);

macro_rules! attribute {
    ($($rust:ty => $kind:ident),* $(,)?) => {$(
        // SAFETY: int64_t, bool, float and double are i64, bool, f32 and f64; C enums are 32-bit; the rest are pointers.
        unsafe impl Attribute for $rust {
            const TYPE: Type = Type::$kind;
        }
    )*};
}

attribute! {
    i64 => CUDNN_TYPE_INT64,
    f32 => CUDNN_TYPE_FLOAT,
    f64 => CUDNN_TYPE_DOUBLE,
    bool => CUDNN_TYPE_BOOLEAN,
    cudnnDataType_t => CUDNN_TYPE_DATA_TYPE,
    cudnnPointwiseMode_t => CUDNN_TYPE_POINTWISE_MODE,
    cudnnReduceTensorOp_t => CUDNN_TYPE_REDUCTION_OPERATOR_TYPE,
    cudnnBackendHeurMode_t => CUDNN_TYPE_HEUR_MODE,
    Handle => CUDNN_TYPE_HANDLE,
    Address => CUDNN_TYPE_VOID_PTR,
    Raw => CUDNN_TYPE_BACKEND_DESCRIPTOR,
}

/// One backend descriptor; destroyed when dropped.
pub struct Descriptor {
    library: &'static Library,
    raw: Opaque,
}

impl Descriptor {
    pub fn new(library: &'static Library, kind: Kind) -> Result<Self> {
        let mut raw = ptr::null_mut();
        // SAFETY: `raw` is where the new descriptor goes.
        let status = unsafe { (library.descriptor_create)(kind as u32, &mut raw) };
        library.check("cudnnBackendCreateDescriptor", status)?;
        Ok(Descriptor { library, raw })
    }

    pub fn raw(&self) -> Opaque {
        self.raw
    }

    pub fn set<T: Attribute>(&self, name: Name, values: &[T]) -> Result<()> {
        let (count, data) = (values.len() as i64, values.as_ptr().cast());
        // SAFETY: the descriptor is alive, and `values` are `count` elements of the type named; they are
        // copied before the call returns.
        let status =
            unsafe { (self.library.descriptor_set)(self.raw, name as u32, T::TYPE as u32, count, data) };
        self.library.check("cudnnBackendSetAttribute", status)
    }

    pub fn set_descriptors<'a>(
        &self,
        name: Name,
        values: impl IntoIterator<Item = &'a Descriptor>,
    ) -> Result<()> {
        let raw: Vec<Raw> = values.into_iter().map(|descriptor| Raw(descriptor.raw)).collect();
        self.set(name, &raw)
    }

    pub fn finalize(&self) -> Result<()> {
        // SAFETY: the descriptor is alive.
        let status = unsafe { (self.library.descriptor_finalize)(self.raw) };
        self.library.check("cudnnBackendFinalize", status)
    }

    pub fn get_i64(&self, name: Name) -> Result<i64> {
        let (mut value, mut count) = (0i64, 0i64);
        // SAFETY: the descriptor is alive and there is room for the one element asked for.
        let status = unsafe {
            (self.library.descriptor_get)(
                self.raw,
                name as u32,
                Type::CUDNN_TYPE_INT64 as u32,
                1,
                &mut count,
                (&raw mut value).cast(),
            )
        };
        self.library.check("cudnnBackendGetAttribute", status)?;
        Ok(value)
    }

    /// The descriptors of `kind` that an attribute holds.
    pub fn get_descriptors(&self, name: Name, kind: Kind) -> Result<Vec<Descriptor>> {
        let room = self.get_raw(name, &mut [])?;
        let found = (0..room).map(|_| Descriptor::new(self.library, kind)).collect::<Result<Vec<_>>>()?;
        let mut raw: Vec<Raw> = found.iter().map(|descriptor| Raw(descriptor.raw)).collect();
        let count = self.get_raw(name, &mut raw)?;
        Ok(found.into_iter().take(count).collect())
    }

    fn get_raw(&self, name: Name, raw: &mut [Raw]) -> Result<usize> {
        let mut count = 0i64;
        let room = raw.len() as i64;
        let data = if raw.is_empty() { ptr::null_mut() } else { raw.as_mut_ptr().cast() };
        // SAFETY: the descriptor is alive; at most `room` descriptors, all alive, are filled in.
        let status = unsafe {
            (self.library.descriptor_get)(self.raw, name as u32, Raw::TYPE as u32, room, &mut count, data)
        };
        self.library.check("cudnnBackendGetAttribute", status)?;
        Ok(count as usize)
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: alive, and nobody has it any more.
        unsafe { (self.library.descriptor_destroy)(self.raw) };
    }
}
