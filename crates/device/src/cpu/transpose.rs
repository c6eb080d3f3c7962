//! Transposition, in squares that fit the vector registers.

#[cfg(target_arch = "x86_64")]
use super::float::{Level, level};

/// The side of a square: the lanes of the widest vectors.
const SIDE: usize = 16;

/// `dst`, of `cols` rows one after another, becomes the transpose of `src`, of `rows` rows `stride` apart.
pub fn transpose(src: &[f32], stride: usize, (rows, cols): (usize, usize), dst: &mut [f32]) {
    let dst = &mut dst[..rows * cols];
    for row in (0..rows).step_by(SIDE) {
        for col in (0..cols).step_by(SIDE) {
            let (height, width) = (SIDE.min(rows - row), SIDE.min(cols - col));
            let (from, to) = (&src[row * stride + col..], &mut dst[col * rows + row..]);
            #[cfg(target_arch = "x86_64")]
            if height == SIDE && width == SIDE && level() == Level::Avx512 {
                // SAFETY: `level` has found AVX-512 on this host.
                unsafe { square(from, stride, to, rows) };
                continue;
            }
            for j in 0..width {
                for i in 0..height {
                    to[j * rows + i] = from[i * stride + j];
                }
            }
        }
    }
}

/// One whole square: pairs, then fours, then quarters of vectors change places.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn square(src: &[f32], src_stride: usize, dst: &mut [f32], dst_stride: usize) {
    use std::arch::x86_64::*;
    assert!((SIDE - 1) * src_stride + SIDE <= src.len() && (SIDE - 1) * dst_stride + SIDE <= dst.len());
    // SAFETY: sixteen elements from each of the sixteen rows lie inside `src`, as just asserted.
    let rows: [__m512; SIDE] =
        std::array::from_fn(|i| unsafe { _mm512_loadu_ps(src.as_ptr().add(i * src_stride)) });
    let mut fours = rows;
    for first in (0..SIDE).step_by(4) {
        let [a, b, c, d] = [rows[first], rows[first + 1], rows[first + 2], rows[first + 3]];
        let [ab_low, ab_high] =
            [_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)].map(|pair| _mm512_castps_pd(pair));
        let [cd_low, cd_high] =
            [_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d)].map(|pair| _mm512_castps_pd(pair));
        fours[first] = _mm512_castpd_ps(_mm512_unpacklo_pd(ab_low, cd_low));
        fours[first + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(ab_low, cd_low));
        fours[first + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(ab_high, cd_high));
        fours[first + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(ab_high, cd_high));
    }
    for i in 0..4 {
        let [a, b, c, d] = [fours[i], fours[4 + i], fours[8 + i], fours[12 + i]];
        let (ab_even, ab_odd) = (_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xdd>(a, b));
        let (cd_even, cd_odd) = (_mm512_shuffle_f32x4::<0x88>(c, d), _mm512_shuffle_f32x4::<0xdd>(c, d));
        let columns = [
            _mm512_shuffle_f32x4::<0x88>(ab_even, cd_even),
            _mm512_shuffle_f32x4::<0x88>(ab_odd, cd_odd),
            _mm512_shuffle_f32x4::<0xdd>(ab_even, cd_even),
            _mm512_shuffle_f32x4::<0xdd>(ab_odd, cd_odd),
        ];
        for (quarter, column) in columns.into_iter().enumerate() {
            // SAFETY: sixteen elements of each of the sixteen rows lie inside `dst`, as asserted above.
            unsafe { _mm512_storeu_ps(dst.as_mut_ptr().add((4 * quarter + i) * dst_stride), column) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::float::tests::at_every_level;
    use super::*;

    #[test]
    fn rows_become_columns_at_every_level() {
        for (rows, cols) in [(1, 1), (16, 16), (48, 32), (35, 50), (7, 33)] {
            let stride = cols + 3;
            let src: Vec<f32> = (0..rows * stride).map(|i| i as f32).collect();
            let want: Vec<f32> = (0..rows * cols).map(|i| src[i % rows * stride + i / rows]).collect();
            let got = at_every_level(|| {
                let mut dst = vec![-1.0; rows * cols];
                transpose(&src, stride, (rows, cols), &mut dst);
                dst
            });
            assert!(got.iter().all(|got| *got == want), "{rows} × {cols}");
        }
    }
}
