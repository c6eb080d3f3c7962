//! The names a checkpoint's pickles may contain.

use crate::Dtype;

/// A class or function of Python's that a checkpoint may name. Each is a mark on a record, never something to call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Class {
    Metadata,
    TensorStorage,
    TensorProperties,
    Chunk,
    BytesStorage,
    Index,
    StorageInfo,
    StorageMeta,
    MemoryFormat,
    Layout,
    Size,
    Path,
    OrderedDict,
    RebuildTensor,
    RebuildTyped,
    /// `None` for the dtypes of torch that [`Dtype`] does not have.
    Dtype(Option<Dtype>),
    Storage(Dtype),
    UntypedStorage,
}

const DCP: &str = "torch.distributed.checkpoint.metadata";

const CLASSES: &[(&str, &str, Class)] = &[
    (DCP, "Metadata", Class::Metadata),
    (DCP, "TensorStorageMetadata", Class::TensorStorage),
    (DCP, "TensorProperties", Class::TensorProperties),
    (DCP, "ChunkStorageMetadata", Class::Chunk),
    (DCP, "BytesStorageMetadata", Class::BytesStorage),
    (DCP, "MetadataIndex", Class::Index),
    (DCP, "StorageMeta", Class::StorageMeta),
    (DCP, "_MEM_FORMAT_ENCODING", Class::MemoryFormat),
    // FSDP1's sharded tensors kept their properties in a class of their own.
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties", Class::TensorProperties),
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING", Class::MemoryFormat),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo", Class::StorageInfo),
    ("torch.serialization", "_get_layout", Class::Layout),
    ("torch", "Size", Class::Size),
    ("pathlib", "PosixPath", Class::Path),
    ("pathlib", "PurePosixPath", Class::Path),
    ("pathlib", "WindowsPath", Class::Path),
    ("pathlib._local", "PosixPath", Class::Path),
    ("pathlib._local", "WindowsPath", Class::Path),
    ("collections", "OrderedDict", Class::OrderedDict),
    ("torch._utils", "_rebuild_tensor_v2", Class::RebuildTensor),
    ("torch._utils", "_rebuild_tensor_v3", Class::RebuildTyped),
    ("torch.storage", "UntypedStorage", Class::UntypedStorage),
    ("torch", "UntypedStorage", Class::UntypedStorage),
];

/// torch's names: of the dtype, and of the storage where there is one.
const DTYPES: &[(Dtype, &str, Option<&str>)] = &[
    (Dtype::F64, "float64", Some("DoubleStorage")),
    (Dtype::F32, "float32", Some("FloatStorage")),
    (Dtype::Bf16, "bfloat16", Some("BFloat16Storage")),
    (Dtype::F16, "float16", Some("HalfStorage")),
    (Dtype::F8E4m3, "float8_e4m3fn", None),
    (Dtype::F8E5m2, "float8_e5m2", None),
    (Dtype::I64, "int64", Some("LongStorage")),
    (Dtype::I32, "int32", Some("IntStorage")),
    (Dtype::I16, "int16", Some("ShortStorage")),
    (Dtype::I8, "int8", Some("CharStorage")),
    (Dtype::U64, "uint64", None),
    (Dtype::U32, "uint32", None),
    (Dtype::U16, "uint16", None),
    (Dtype::U8, "uint8", Some("ByteStorage")),
    (Dtype::Bool, "bool", Some("BoolStorage")),
];

/// Dtypes an entry may have that nobody here asks for.
const OTHER_DTYPES: &[&str] = &[
    "complex32",
    "complex64",
    "complex128",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
];

impl Class {
    pub fn find(module: &str, name: &str) -> Option<Class> {
        let listed = CLASSES.iter().find(|(m, n, _)| *m == module && *n == name);
        listed.map(|(_, _, class)| *class).or_else(|| (module == "torch").then(|| of_torch(name))?)
    }

    /// Module and name, for writing. The newest of several.
    pub fn name(self) -> Option<(&'static str, &'static str)> {
        let of_dtype = |dtype: Dtype| DTYPES.iter().find(|(known, _, _)| *known == dtype);
        match self {
            Class::Dtype(dtype) => of_dtype(dtype?).map(|(_, name, _)| ("torch", *name)),
            Class::Storage(dtype) => of_dtype(dtype).and_then(|(_, _, storage)| Some(("torch", (*storage)?))),
            class => {
                let listed = CLASSES.iter().find(|(_, _, known)| *known == class);
                listed.map(|(module, name, _)| (*module, *name))
            }
        }
    }
}

fn of_torch(name: &str) -> Option<Class> {
    if OTHER_DTYPES.contains(&name) {
        return Some(Class::Dtype(None));
    }
    DTYPES.iter().find_map(|(dtype, of_dtype, of_storage)| match name {
        name if name == *of_dtype => Some(Class::Dtype(Some(*dtype))),
        name if Some(name) == *of_storage => Some(Class::Storage(*dtype)),
        _ => None,
    })
}
