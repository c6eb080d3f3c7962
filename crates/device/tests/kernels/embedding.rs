use super::harness::{Bed, FLOATS, Random, Tolerance, beds, twice};
use device::{Dtype, Embedding, EmbeddingGrad};

const VOCAB: usize = 19;
const SHAPES: [(usize, usize); 4] = [(1, 8), (7, 65), (33, 513), (130, 1)];

fn ids(random: &mut Random, tokens: usize) -> Vec<i32> {
    (0..tokens).map(|_| random.below(VOCAB) as i32).collect()
}

#[test]
fn rows_are_looked_up_exactly() {
    for bed in &beds() {
        for dtype in FLOATS {
            for (tokens, cols) in SHAPES {
                let mut random = Random::new((tokens * cols) as u64);
                let table = bed.random(&mut random, dtype, VOCAB * cols, 1.0);
                let ids = ids(&mut random, tokens);
                let (id_buffer, out) = (bed.ints(&ids), bed.poisoned(dtype, tokens * cols));
                let (table_buffer, out_buffer) = (&table.buffer, &out);
                let args = Embedding {
                    table: table_buffer,
                    ids: &id_buffer,
                    out: out_buffer,
                    tokens,
                    vocab: VOCAB,
                    cols,
                };
                bed.device.embedding(&bed.stream, &args).unwrap();
                let row = |&id: &i32| table.values[id as usize * cols..][..cols].to_vec();
                let want: Vec<f64> = ids.iter().flat_map(row).collect();
                assert_eq!(bed.read(&out), want, "{}: {tokens}×{cols} {dtype}", bed.device.name());
            }
        }
    }
}

#[test]
fn gradients_of_a_row_are_summed() {
    for bed in &beds() {
        for dtype in FLOATS {
            for table_dtype in [dtype, Dtype::F32] {
                for (tokens, cols) in SHAPES {
                    backward(bed, dtype, table_dtype, tokens, cols);
                }
            }
        }
    }
}

fn backward(bed: &Bed, dtype: Dtype, table_dtype: Dtype, tokens: usize, cols: usize) {
    let mut random = Random::new((tokens + cols) as u64);
    let dout = bed.random(&mut random, dtype, tokens * cols, 1.0);
    let before = bed.random(&mut random, table_dtype, VOCAB * cols, 1.0);
    let ids = ids(&mut random, tokens);
    let mut order: Vec<i32> = (0..tokens as i32).collect();
    order.sort_by_key(|&token| ids[token as usize]);
    let (id_buffer, order_buffer) = (bed.ints(&ids), bed.ints(&order));
    for accumulate in [false, true] {
        let name = bed.device.name();
        let case = format!(
            "{name}: embedding_grad {tokens}×{cols} {dtype} → {table_dtype}, accumulate {accumulate}"
        );
        let [got] = twice(&case, || {
            let dtable =
                if accumulate { bed.copy_of(&before) } else { bed.poisoned(table_dtype, VOCAB * cols) };
            let args = EmbeddingGrad {
                dout: &dout.buffer,
                ids: &id_buffer,
                order: &order_buffer,
                dtable: &dtable,
                tokens,
                vocab: VOCAB,
                cols,
                accumulate,
            };
            bed.device.embedding_grad(&bed.stream, &args).unwrap();
            [bed.read(&dtable)]
        });
        let mut want = if accumulate { before.values.clone() } else { vec![0.0; VOCAB * cols] };
        for (token, &id) in ids.iter().enumerate() {
            for i in 0..cols {
                want[id as usize * cols + i] += dout.values[token * cols + i];
            }
        }
        Tolerance::new(table_dtype, 1).check(&case, &got, &want);
    }
}

#[test]
fn an_id_outside_the_table_is_an_error_where_the_host_can_see_it() {
    let bed = &beds()[0];
    let (table, out) = (bed.poisoned(Dtype::F32, VOCAB), bed.poisoned(Dtype::F32, 1));
    for id in [-1, VOCAB as i32] {
        let ids = bed.ints(&[id]);
        let args = Embedding { table: &table, ids: &ids, out: &out, tokens: 1, vocab: VOCAB, cols: 1 };
        assert!(bed.device.embedding(&bed.stream, &args).is_err());
    }
}
