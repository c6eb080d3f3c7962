//! Who is to blame: ranks whose plans differ, and gradients that are not numbers.

use super::{Engine, Groups};
use crate::{Error, Plan, Result};

/// All ranks have the same plan, or hear in what theirs differs.
pub(super) fn agree(plan: &Plan, groups: &Groups) -> Result<()> {
    let (world, mine) = (&groups.world, plan.fingerprint.to_le_bytes());
    if world.exchange(&mine, "plan fingerprint")?.iter().all(|theirs| *theirs == mine) {
        return Ok(());
    }
    // Every rank has seen the same fingerprints, so all of them come here.
    let (rank, mine) = (world.rank(), plan.description());
    let all = world.exchange(mine.join("\n").as_bytes(), "plan description")?;
    for (peer, theirs) in all.iter().enumerate().filter(|(peer, _)| *peer != rank) {
        let theirs = String::from_utf8_lossy(theirs);
        let differ = differences(&mine, &theirs.lines().collect::<Vec<_>>());
        if !differ.is_empty() {
            return Err(Error::PlansDiffer { rank, peer, what: differ.join("; ") });
        }
    }
    let (rank, peer) = (0, 1);
    Err(Error::PlansDiffer { rank, peer, what: "they come from different builds of this program".into() })
}

/// "key is a here and b there" for each line that differs.
fn differences(mine: &[String], theirs: &[&str]) -> Vec<String> {
    let value = |line: &str| line.split_once(" = ").map_or(String::new(), |(_, value)| value.to_string());
    let pairs = mine.iter().zip(theirs).filter(|(mine, theirs)| mine != *theirs);
    pairs
        .map(|(mine, theirs)| {
            let key = mine.split(" = ").next().unwrap_or_default();
            format!("{key} is {} here and {} there", value(mine), value(theirs))
        })
        .collect()
}

impl Engine {
    /// Why the last step's update was not made: on which rank, in which unit a gradient is not finite. All ranks call
    /// it, after a [`super::Report`] that says so, and get the same answer.
    pub fn blame(&self, step: u64) -> Result<Error> {
        let fixed = &self.fixed;
        let settings = &fixed.plan.settings;
        let knows_rank = settings.ranks == 1 || settings.checks_gradients();
        let scalars = &fixed.scalars;
        let squares = if settings.checks_gradients() { &scalars.local_squares } else { &scalars.squares };
        let squares: Vec<f32> = fixed.device.read_vec(&fixed.compute, squares)?;
        // The backward goes from the last unit to the first: what came first is the cause.
        let bad = |unit: &usize| !squares[*unit].is_finite();
        let units: Vec<usize> = (0..squares.len()).rev().filter(bad).collect();
        let bytes: Vec<u8> = units.iter().flat_map(|unit| (*unit as u64).to_le_bytes()).collect();
        let all = fixed.groups.world.exchange(&bytes, "units with bad gradients")?;
        let of = |bytes: &Vec<u8>| -> Vec<usize> {
            bytes.chunks_exact(8).map(|b| b.iter().rev().fold(0, |n, &b| n << 8 | usize::from(b))).collect()
        };
        let ranks: Vec<Vec<usize>> = all.iter().map(of).collect();
        let first = ranks.iter().filter_map(|units| units.first()).max();
        let name =
            |unit: &usize| fixed.plan.layout.units.get(*unit).map_or("?", |unit| &unit.name).to_string();
        let place = match first {
            None => "of no unit alone, but their sum".to_string(),
            Some(unit) if !knows_rank => {
                format!("of {} (train.check_gradients = true tells the rank)", name(unit))
            }
            Some(unit) => {
                let on: Vec<String> = (0..ranks.len())
                    .filter(|rank| ranks[*rank].contains(unit))
                    .map(|rank| rank.to_string())
                    .collect();
                let word = if on.len() == 1 { "rank" } else { "ranks" };
                format!("of {} on {word} {}", name(unit), on.join(", "))
            }
        };
        Ok(Error::NotFinite { step, place })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_differs_is_said() {
        let mine = ["ranks = 2", "prefetch = 1"].map(String::from);
        assert_eq!(differences(&mine, &["ranks = 2", "prefetch = 3"]), ["prefetch is 1 here and 3 there"]);
        assert!(differences(&mine, &["ranks = 2", "prefetch = 1"]).is_empty());
    }
}
