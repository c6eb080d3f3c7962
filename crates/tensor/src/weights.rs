//! What a model is made of, as shapes: weights, the items they are fused into, and blocks that use them.

use crate::{Block, Error, Result, Shape};
use device::Buffer;

/// How a weight starts when there is no checkpoint to read it from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    Normal { std: f32 },
    Constant(f32),
}

/// A named weight: shape only, no storage.
#[derive(Clone, Debug)]
pub struct WeightSpec {
    /// Its Hugging Face name.
    pub name: String,
    pub shape: Shape,
    pub init: Init,
}

impl WeightSpec {
    pub fn is_matrix(&self) -> bool {
        self.shape.dims().len() >= 2
    }
}

/// Weights that lie side by side and serve as one operand (q ‖ k ‖ v, gate ‖ up), or a single weight. Members
/// agree in all dimensions but the first.
#[derive(Clone, Debug)]
pub struct Item {
    /// Whether it has a gradient and is updated.
    pub trainable: bool,
    pub members: Vec<WeightSpec>,
}

impl Item {
    pub fn numel(&self) -> usize {
        self.members.iter().map(|member| member.shape.numel()).sum()
    }

    /// The shape of the members stacked along the first dimension.
    pub fn shape(&self) -> Shape {
        let mut dims = self.members[0].shape.dims().to_vec();
        dims[0] = self.members.iter().map(|member| member.shape.dims()[0]).sum();
        dims.into()
    }
}

/// Which item of a model: what the tape remembers instead of a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ItemId(pub usize);

/// Which constant of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConstantId(pub usize);

/// A table that is a function of the configuration alone (RoPE's angles): never saved, never sharded.
#[derive(Clone)]
pub struct Constant {
    pub name: &'static str,
    pub shape: Shape,
    pub values: std::sync::Arc<dyn Fn() -> Vec<f32> + Send + Sync>,
}

impl std::fmt::Debug for Constant {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Constant({} {})", self.name, self.shape)
    }
}

/// A model without storage: blocks in order, the items they use, constants. The last block ends in the loss.
/// An item used by two blocks is a tie: one weight with two uses.
#[derive(Debug, Default)]
pub struct Model {
    pub items: Vec<Item>,
    pub constants: Vec<Constant>,
    pub blocks: Vec<Box<dyn Block>>,
}

impl Model {
    /// Adds one item of the given members.
    pub fn item(&mut self, members: Vec<WeightSpec>) -> ItemId {
        assert!(!members.is_empty(), "an item has at least one member");
        self.items.push(Item { trainable: true, members });
        ItemId(self.items.len() - 1)
    }

    pub fn constant(&mut self, constant: Constant) -> ConstantId {
        self.constants.push(constant);
        ConstantId(self.constants.len() - 1)
    }

    pub fn block(&mut self, block: impl Block + 'static) {
        self.blocks.push(Box::new(block));
    }

    /// Freezes every weight whose name `is_frozen`, and tells how many there are. Weights that serve as one operand
    /// (q, k and v; gate and up) are frozen together or not at all.
    pub fn freeze(&mut self, is_frozen: impl Fn(&str) -> bool) -> Result<usize> {
        let mut count = 0;
        for item in &mut self.items {
            let frozen = item.members.iter().filter(|member| is_frozen(&member.name)).count();
            if frozen != 0 && frozen != item.members.len() {
                let names: Vec<&str> = item.members.iter().map(|member| member.name.as_str()).collect();
                let what = format!("freeze all of {} or none: they are one operand", names.join(", "));
                return Err(Error::Config(what));
            }
            item.trainable = frozen == 0;
            count += frozen;
        }
        Ok(count)
    }

    /// Number of parameters; tied ones count once.
    pub fn num_params(&self) -> usize {
        self.items.iter().map(Item::numel).sum()
    }
}

/// Where an item's gradient goes.
#[derive(Clone, Debug)]
pub struct Grad {
    pub buffer: Buffer,
    /// Whether something is there already, to be added to.
    pub accumulate: bool,
}

/// Where weights are right now. Implemented by whoever gathers them.
pub trait Weights {
    /// The item's values in the compute dtype.
    fn get(&self, item: ItemId) -> Result<Buffer>;

    /// Where to write the item's gradient, or None where the item is frozen. Each call is followed by one
    /// write, so the next call says `accumulate`.
    fn grad(&self, item: ItemId) -> Result<Option<Grad>>;
}
