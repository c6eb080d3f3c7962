//! Algorithms of matrix products, chosen by timing and remembered on disk.
//!
//! The choices of one kind of GPU and one version of the library are a text: a first line that names both, then one
//! line a product, `shape: algorithm`, the algorithm being the library's own bytes in hexadecimal. The same text is
//! what ranks exchange, so that all of them compute alike, and what lies in the cache folder, so that the next run
//! computes as this one did.

use super::device::Cuda;
use super::gemm::{self, Algorithm};
use super::module::{Launch, args};
use super::nvrtc::{ELEMENTWISE, cache_path, store};
use super::stream::Stream;
use crate::{Buffer, Gemm, Matrix, Memory, OperandShape, ProductShape, Result};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// Operands start at multiples of this, as tensors of a step do.
const ALIGN_BYTES: usize = 256;

/// Choices by product, with what they are valid for.
#[derive(Debug, Default, PartialEq)]
struct Choices {
    valid_for: String,
    by_product: BTreeMap<String, [u64; 8]>,
}

impl Choices {
    fn parse(text: &str) -> Choices {
        let mut lines = text.lines();
        let valid_for = lines.next().unwrap_or_default().to_string();
        let by_product = lines.filter_map(|line| {
            let (product, words) = line.split_once(": ")?;
            let words = words.split(' ').map(|word| u64::from_str_radix(word, 16).ok());
            let words: Vec<u64> = words.collect::<Option<_>>()?;
            Some((product.to_string(), words.try_into().ok()?))
        });
        Choices { valid_for, by_product: by_product.collect() }
    }

    fn text(&self) -> String {
        let line = |(product, words): (&String, &[u64; 8])| {
            let words: Vec<String> = words.iter().map(|word| format!("{word:x}")).collect();
            format!("{product}: {}\n", words.join(" "))
        };
        format!("{}\n", self.valid_for) + &self.by_product.iter().map(line).collect::<String>()
    }
}

impl Cuda {
    fn choices_valid_for(&self) -> String {
        format!("{} sm_{} cuBLASLt {}", self.context.name, self.context.arch, gemm::library_version())
    }

    /// Choices for these products: remembered ones, and the others timed now.
    pub(super) fn choose_products(
        &self,
        stream: &Stream,
        products: &[ProductShape],
        room: &Arc<dyn Memory>,
    ) -> Result<String> {
        let valid_for = self.choices_valid_for();
        let path = cache_path("products", &valid_for, "txt");
        let read = || path.as_ref().and_then(|path| std::fs::read_to_string(path).ok());
        let known = read().map(|text| Choices::parse(&text)).filter(|known| known.valid_for == valid_for);
        let mut known = known.unwrap_or(Choices { valid_for: valid_for.clone(), ..Choices::default() });
        let mut mine = Choices { valid_for, ..Choices::default() };
        let mut news = false;
        for product in products {
            let name = product.to_string();
            let chosen = match known.by_product.get(&name) {
                Some(words) => Some(*words),
                None => self.time_product(stream, product, room)?.map(|algorithm| algorithm.data),
            };
            let Some(words) = chosen else { continue };
            news |= known.by_product.insert(name.clone(), words).is_none();
            mine.by_product.insert(name, words);
        }
        if let Some(path) = path.filter(|_| news) {
            store(&path, known.text().as_bytes());
        }
        Ok(mine.text())
    }

    /// None where the room does not suffice.
    fn time_product(
        &self,
        stream: &Stream,
        product: &ProductShape,
        room: &Arc<dyn Memory>,
    ) -> Result<Option<Algorithm>> {
        let ProductShape { a, b, c, input, output } = *product;
        let bytes = [
            (a.span() * input.bytes()).next_multiple_of(ALIGN_BYTES),
            (b.span() * input.bytes()).next_multiple_of(ALIGN_BYTES),
        ];
        if bytes[0] + bytes[1] + c.span() * output.bytes() > room.bytes() || c.span() == 0 {
            return Ok(None);
        }
        let buffers = [
            Buffer::new(room.clone(), 0, input, a.span())?,
            Buffer::new(room.clone(), bytes[0], input, b.span())?,
            Buffer::new(room.clone(), bytes[0] + bytes[1], output, c.span())?,
        ];
        // Zeros would be faster than what a run computes with.
        for (seed, operand) in buffers[..2].iter().enumerate() {
            let (n, launch) = (operand.len(), Launch::new(1024, 256));
            let name = format!("noise_{input}");
            self.launch(stream, &ELEMENTWISE, &name, launch, args![operand, n, seed])?;
        }
        let [a, b, c] = [(&buffers[0], a), (&buffers[1], b), (&buffers[2], c)].map(matrix);
        self.products().time(stream, &Gemm { a, b, c, beta: 0.0 }).map(Some)
    }

    pub(super) fn adopt_products(&self, text: &str) {
        let choices = Choices::parse(text);
        if choices.valid_for == self.choices_valid_for() {
            let algorithms = choices.by_product.into_iter().map(|(name, data)| (name, Algorithm { data }));
            self.products().adopt(algorithms.collect::<HashMap<_, _>>());
        }
    }
}

fn matrix((buffer, shape): (&Buffer, OperandShape)) -> Matrix<'_> {
    let OperandShape { rows, cols, stride, transposed } = shape;
    Matrix { buffer, rows, cols, stride, transposed }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_survive_their_text_and_what_is_broken_is_left_out() {
        let by_product = [
            ("bf16 8x4 * 6x4^t = bf16 8x6".to_string(), [1, 2, 3, 4, 5, 6, 7, u64::MAX]),
            ("bf16 8x6/64^t * 8x4 = f32 6x4".to_string(), [0; 8]),
        ];
        let choices = Choices { valid_for: "a GPU, a version".into(), by_product: by_product.into() };
        assert_eq!(Choices::parse(&choices.text()), choices);
        let broken = choices.text() + "bf16 1x1 * 1x1 = bf16 1x1: 1 2 3\nnonsense\nx: 1 2 3 4 5 6 7 g\n";
        assert_eq!(Choices::parse(&broken), choices);
        assert_eq!(Choices::parse("").by_product.len(), 0);
    }
}
