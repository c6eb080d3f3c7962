use crate::{Error, Group, Result};
use std::sync::Arc;

/// Ranks as a grid with named axes: a group per axis, of the ranks that differ from this one in that axis only.
///
/// The last axis runs fastest: on axes `replicate` 2 and `shard` 4, ranks 0 to 3 are one `shard` group, and
/// ranks 0 and 4 one `replicate` group. So the last axis holds neighbours, usually of one machine.
#[derive(Debug)]
pub struct Mesh {
    world: Arc<dyn Group>,
    axes: Vec<Axis>,
}

#[derive(Debug)]
struct Axis {
    name: String,
    group: Arc<dyn Group>,
}

impl Mesh {
    /// Every rank of `world` calls it with the same axes, whose sizes multiply to the number of ranks. Blocks
    /// while the groups are made.
    pub fn new(world: Arc<dyn Group>, axes: &[(&str, usize)]) -> Result<Self> {
        check(axes, world.size())?;
        let me = world.rank();
        let mut made = Vec::new();
        for (index, &(name, size)) in axes.iter().enumerate() {
            let stride: usize = axes[index + 1..].iter().map(|&(_, size)| size).product();
            let first = me - me / stride % size * stride;
            let ranks: Vec<usize> = (0..size).map(|step| first + step * stride).collect();
            let group = world.split(&ranks, name)?.ok_or_else(|| error(axes, "split gave no group"))?;
            made.push(Axis { name: name.to_string(), group });
        }
        Ok(Mesh { world, axes: made })
    }

    /// All ranks.
    pub fn world(&self) -> &Arc<dyn Group> {
        &self.world
    }

    /// This rank's group along an axis.
    pub fn axis(&self, name: &str) -> Result<&Arc<dyn Group>> {
        let found = self.axes.iter().find(|axis| axis.name == name);
        found.map(|axis| &axis.group).ok_or_else(|| {
            let names: Vec<&str> = self.axes.iter().map(|axis| axis.name.as_str()).collect();
            let what = format!("there is no axis {name}; there are {}", names.join(", "));
            Error::Argument { op: "Mesh::axis", what }
        })
    }

    /// Names and sizes.
    pub fn axes(&self) -> impl Iterator<Item = (&str, usize)> {
        self.axes.iter().map(|axis| (axis.name.as_str(), axis.group.size()))
    }
}

fn error(axes: &[(&str, usize)], what: &str) -> Error {
    let axes: Vec<String> = axes.iter().map(|(name, size)| format!("{name} {size}")).collect();
    Error::Argument { op: "Mesh::new", what: format!("axes {}: {what}", axes.join(" × ")) }
}

fn check(axes: &[(&str, usize)], ranks: usize) -> Result<()> {
    let product = axes.iter().try_fold(1usize, |product, &(_, size)| product.checked_mul(size));
    if product != Some(ranks) {
        let product = product.map_or("too many".to_string(), |product| product.to_string());
        return Err(error(axes, &format!("they make {product} ranks, there are {ranks}")));
    }
    for (index, (name, _)) in axes.iter().enumerate() {
        if axes[..index].iter().any(|(before, _)| before == name) {
            return Err(error(axes, &format!("{name} is named twice")));
        }
    }
    Ok(())
}
