//! Operation graphs, and the execution plans made of them.

use super::descriptor::{Address, Descriptor, Handle, Result};
use super::library::{Failure, Library};
use cudarc::cudnn::sys::{
    cudnnBackendAttributeName_t as Name, cudnnBackendDescriptorType_t as Kind,
    cudnnBackendHeurMode_t as HeuristicsMode,
};
pub use cudarc::cudnn::sys::{
    cudnnDataType_t as Type, cudnnPointwiseMode_t as Pointwise, cudnnReduceTensorOp_t as Reduce,
};
use std::ffi::c_void;

/// Bytes to which every address given to a graph is aligned.
pub const ALIGNMENT: usize = 16;

/// batch, head, row, column
pub type Dims = [i64; 4];

/// A tensor of the graph. Its number is its unique id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tensor(usize);

/// Where a tensor's elements are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In device memory, at an address given when the plan runs.
    Memory,
    /// Between two operations, nowhere in memory.
    Virtual,
    /// One number in host memory, read when the plan is run.
    Host,
}

/// How much of each batch of a product is there, where that differs: i32 for each batch.
#[derive(Clone, Copy, Debug, Default)]
pub struct Extent {
    pub m: Option<Tensor>,
    pub n: Option<Tensor>,
    pub k: Option<Tensor>,
    /// Whether the rest of the product is zero.
    pub padded: bool,
}

/// A graph under construction.
pub struct Graph {
    library: &'static Library,
    handle: Handle,
    tensors: Vec<Descriptor>,
    operations: Vec<Descriptor>,
}

impl Graph {
    pub fn new(library: &'static Library, handle: Handle) -> Self {
        Graph { library, handle, tensors: Vec::new(), operations: Vec::new() }
    }

    pub fn tensor(&mut self, place: Place, dtype: Type, dims: Dims, strides: Dims) -> Result<Tensor> {
        self.ragged(place, dtype, dims, strides, None)
    }

    /// A tensor whose batches start at `offsets` (i32, one more than there are batches) instead of the first
    /// stride's multiples.
    pub fn ragged(
        &mut self,
        place: Place,
        dtype: Type,
        dims: Dims,
        strides: Dims,
        offsets: Option<Tensor>,
    ) -> Result<Tensor> {
        let tensor = Tensor(self.tensors.len());
        let descriptor = Descriptor::new(self.library, Kind::CUDNN_BACKEND_TENSOR_DESCRIPTOR)?;
        descriptor.set(Name::CUDNN_ATTR_TENSOR_DATA_TYPE, &[dtype])?;
        descriptor.set(Name::CUDNN_ATTR_TENSOR_DIMENSIONS, &dims)?;
        descriptor.set(Name::CUDNN_ATTR_TENSOR_STRIDES, &strides)?;
        descriptor.set(Name::CUDNN_ATTR_TENSOR_UNIQUE_ID, &[tensor.0 as i64])?;
        descriptor.set(Name::CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, &[ALIGNMENT as i64])?;
        match place {
            Place::Memory => {}
            Place::Virtual => descriptor.set(Name::CUDNN_ATTR_TENSOR_IS_VIRTUAL, &[true])?,
            Place::Host => descriptor.set(Name::CUDNN_ATTR_TENSOR_IS_BY_VALUE, &[true])?,
        }
        if let Some(offsets) = offsets {
            let offsets = &self.tensors[offsets.0];
            descriptor.set_descriptors(Name::CUDNN_ATTR_TENSOR_RAGGED_OFFSET_DESC, [offsets])?;
        }
        descriptor.finalize()?;
        self.tensors.push(descriptor);
        Ok(tensor)
    }

    /// One f32 that is given when the plan runs.
    pub fn number(&mut self) -> Result<Tensor> {
        self.tensor(Place::Host, Type::CUDNN_DATA_FLOAT, [1; 4], [1; 4])
    }

    /// An i32 for each of `count` batches.
    pub fn per_batch(&mut self, count: i64) -> Result<Tensor> {
        self.tensor(Place::Memory, Type::CUDNN_DATA_INT32, [count, 1, 1, 1], [1; 4])
    }

    /// c = a · b for each batch and head; where `b` has fewer heads, groups of heads of `a` share one.
    pub fn matmul(&mut self, a: Tensor, b: Tensor, c: Tensor, extent: &Extent) -> Result<()> {
        let how = Descriptor::new(self.library, Kind::CUDNN_BACKEND_MATMUL_DESCRIPTOR)?;
        how.set(Name::CUDNN_ATTR_MATMUL_COMP_TYPE, &[Type::CUDNN_DATA_FLOAT])?;
        if extent.padded {
            how.set(Name::CUDNN_ATTR_MATMUL_PADDING_VALUE, &[0.0f64])?;
        }
        how.finalize()?;
        let mut tensors = vec![
            (Name::CUDNN_ATTR_OPERATION_MATMUL_ADESC, a),
            (Name::CUDNN_ATTR_OPERATION_MATMUL_BDESC, b),
            (Name::CUDNN_ATTR_OPERATION_MATMUL_CDESC, c),
        ];
        let named = |name, tensor: Option<Tensor>| tensor.map(|tensor| (name, tensor));
        tensors.extend(named(Name::CUDNN_ATTR_OPERATION_MATMUL_GEMM_M_OVERRIDE_DESC, extent.m));
        tensors.extend(named(Name::CUDNN_ATTR_OPERATION_MATMUL_GEMM_N_OVERRIDE_DESC, extent.n));
        tensors.extend(named(Name::CUDNN_ATTR_OPERATION_MATMUL_GEMM_K_OVERRIDE_DESC, extent.k));
        self.operation(
            Kind::CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR,
            (Name::CUDNN_ATTR_OPERATION_MATMUL_DESC, &how),
            &tensors,
        )
    }

    /// y = mode(x)
    pub fn unary(&mut self, mode: Pointwise, x: Tensor, y: Tensor) -> Result<()> {
        let how = self.pointwise(mode, Type::CUDNN_DATA_FLOAT)?;
        self.pointwise_operation(how, &[(X, x), (Y, y)])
    }

    /// y = mode(x, b), where `b` may have one column, or be one number.
    pub fn binary(&mut self, mode: Pointwise, x: Tensor, b: Tensor, y: Tensor) -> Result<()> {
        let how = self.pointwise(mode, Type::CUDNN_DATA_FLOAT)?;
        self.pointwise_operation(how, &[(X, x), (B, b), (Y, y)])
    }

    /// y = index along `axis` of each element of x
    pub fn index(&mut self, x: Tensor, axis: i64, y: Tensor) -> Result<()> {
        let how = self.pointwise(Pointwise::CUDNN_POINTWISE_GEN_INDEX, Type::CUDNN_DATA_FLOAT)?;
        how.set(Name::CUDNN_ATTR_POINTWISE_AXIS, &[axis])?;
        self.pointwise_operation(how, &[(X, x), (Y, y)])
    }

    /// y = x compared with b
    pub fn compare(&mut self, mode: Pointwise, x: Tensor, b: Tensor, y: Tensor) -> Result<()> {
        let how = self.pointwise(mode, Type::CUDNN_DATA_BOOLEAN)?;
        self.pointwise_operation(how, &[(X, x), (B, b), (Y, y)])
    }

    /// y = x where t, b elsewhere
    pub fn select(&mut self, t: Tensor, x: Tensor, b: Tensor, y: Tensor) -> Result<()> {
        let how = self.pointwise(Pointwise::CUDNN_POINTWISE_BINARY_SELECT, Type::CUDNN_DATA_FLOAT)?;
        self.pointwise_operation(how, &[(X, x), (B, b), (T, t), (Y, y)])
    }

    /// Reduces each dimension along which `y` is shorter than `x`.
    pub fn reduce(&mut self, operator: Reduce, x: Tensor, y: Tensor) -> Result<()> {
        let how = Descriptor::new(self.library, Kind::CUDNN_BACKEND_REDUCTION_DESCRIPTOR)?;
        how.set(Name::CUDNN_ATTR_REDUCTION_COMP_TYPE, &[Type::CUDNN_DATA_FLOAT])?;
        how.set(Name::CUDNN_ATTR_REDUCTION_OPERATOR, &[operator])?;
        how.finalize()?;
        self.operation(
            Kind::CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR,
            (Name::CUDNN_ATTR_OPERATION_REDUCTION_DESC, &how),
            &[
                (Name::CUDNN_ATTR_OPERATION_REDUCTION_XDESC, x),
                (Name::CUDNN_ATTR_OPERATION_REDUCTION_YDESC, y),
            ],
        )
    }

    /// The elements of `x` seen with the dims and strides of `y`.
    pub fn reshape(&mut self, x: Tensor, y: Tensor) -> Result<()> {
        let operation = Descriptor::new(self.library, Kind::CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR)?;
        operation.set_descriptors(Name::CUDNN_ATTR_OPERATION_RESHAPE_XDESC, [&self.tensors[x.0]])?;
        operation.set_descriptors(Name::CUDNN_ATTR_OPERATION_RESHAPE_YDESC, [&self.tensors[y.0]])?;
        operation.finalize()?;
        self.operations.push(operation);
        Ok(())
    }

    fn pointwise(&self, mode: Pointwise, math: Type) -> Result<Descriptor> {
        let how = Descriptor::new(self.library, Kind::CUDNN_BACKEND_POINTWISE_DESCRIPTOR)?;
        how.set(Name::CUDNN_ATTR_POINTWISE_MODE, &[mode])?;
        how.set(Name::CUDNN_ATTR_POINTWISE_MATH_PREC, &[math])?;
        Ok(how)
    }

    fn pointwise_operation(&mut self, how: Descriptor, tensors: &[(Name, Tensor)]) -> Result<()> {
        how.finalize()?;
        let kind = Kind::CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR;
        self.operation(kind, (Name::CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, &how), tensors)
    }

    fn operation(&mut self, kind: Kind, how: (Name, &Descriptor), tensors: &[(Name, Tensor)]) -> Result<()> {
        let operation = Descriptor::new(self.library, kind)?;
        operation.set_descriptors(how.0, [how.1])?;
        for &(name, tensor) in tensors {
            operation.set_descriptors(name, [&self.tensors[tensor.0]])?;
        }
        operation.finalize()?;
        self.operations.push(operation);
        Ok(())
    }

    /// The first plan the heuristics name that can be built.
    pub fn plan(self) -> Result<Plan> {
        let graph = Descriptor::new(self.library, Kind::CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR)?;
        graph.set_descriptors(Name::CUDNN_ATTR_OPERATIONGRAPH_OPS, &self.operations)?;
        graph.set(Name::CUDNN_ATTR_OPERATIONGRAPH_HANDLE, &[self.handle])?;
        graph.finalize()?;

        let heuristics = Descriptor::new(self.library, Kind::CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR)?;
        heuristics.set_descriptors(Name::CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, [&graph])?;
        heuristics.set(Name::CUDNN_ATTR_ENGINEHEUR_MODE, &[HeuristicsMode::CUDNN_HEUR_MODE_A])?;
        heuristics.finalize()?;
        let configs = heuristics
            .get_descriptors(Name::CUDNN_ATTR_ENGINEHEUR_RESULTS, Kind::CUDNN_BACKEND_ENGINECFG_DESCRIPTOR)?;

        let mut refusal = Failure::unsupported("heuristics", "no engine is named for this graph");
        for config in configs {
            match self.build(&config) {
                Ok((plan, workspace_bytes)) => {
                    let mut parts = self.operations;
                    parts.extend(self.tensors);
                    parts.extend([graph, config]);
                    return Ok(Plan { library: self.library, plan, workspace_bytes, _parts: parts });
                }
                Err(failure) => refusal = failure,
            }
        }
        Err(refusal)
    }

    fn build(&self, config: &Descriptor) -> Result<(Descriptor, usize)> {
        let plan = Descriptor::new(self.library, Kind::CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR)?;
        plan.set(Name::CUDNN_ATTR_EXECUTION_PLAN_HANDLE, &[self.handle])?;
        plan.set_descriptors(Name::CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, [config])?;
        plan.finalize()?;
        let bytes = plan.get_i64(Name::CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE)?;
        Ok((plan, bytes as usize))
    }
}

const X: Name = Name::CUDNN_ATTR_OPERATION_POINTWISE_XDESC;
const B: Name = Name::CUDNN_ATTR_OPERATION_POINTWISE_BDESC;
const T: Name = Name::CUDNN_ATTR_OPERATION_POINTWISE_TDESC;
const Y: Name = Name::CUDNN_ATTR_OPERATION_POINTWISE_YDESC;

/// Something that can be run, any number of times.
pub struct Plan {
    library: &'static Library,
    plan: Descriptor,
    pub workspace_bytes: usize,
    /// What the plan was made of, alive for as long as it is.
    _parts: Vec<Descriptor>,
}

impl Plan {
    /// Runs on the handle's stream, with an address for every tensor that is not virtual.
    ///
    /// # Safety
    /// Each device address is valid for its tensor's dims and strides until the work has run, `workspace` for
    /// `workspace_bytes`, and each host address is that of an f32.
    pub unsafe fn run(
        &self,
        handle: Handle,
        tensors: &[(Tensor, *mut c_void)],
        workspace: usize,
    ) -> Result<()> {
        let ids: Vec<i64> = tensors.iter().map(|(tensor, _)| tensor.0 as i64).collect();
        let addresses: Vec<Address> = tensors.iter().map(|&(_, address)| Address(address)).collect();
        let pack = Descriptor::new(self.library, Kind::CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR)?;
        pack.set(Name::CUDNN_ATTR_VARIANT_PACK_WORKSPACE, &[Address(workspace as *mut c_void)])?;
        pack.set(Name::CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, &addresses)?;
        pack.set(Name::CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, &ids)?;
        pack.finalize()?;
        // SAFETY: handle, plan and pack are alive; the caller vouches for the addresses.
        let status = unsafe { (self.library.execute)(handle.0, self.plan.raw(), pack.raw()) };
        self.library.check("cudnnBackendExecute", status)
    }
}
