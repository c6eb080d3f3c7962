//! The job's secret: processes show each other that they know it without saying it, so that a stranger who
//! finds a port open can neither join nor learn it. It does not encrypt what follows.

use std::io::{self, Read};

/// The environment variable that the launcher passes it in.
pub const VARIABLE: &str = "SHARDLOOM_SECRET";

pub(crate) const PROOF: usize = 32;

/// The secret of this job, where it has one.
pub(crate) fn from_environment() -> Option<Vec<u8>> {
    let secret = std::env::var_os(VARIABLE)?.into_encoded_bytes();
    Some(secret).filter(|secret| !secret.is_empty())
}

/// Bytes that nobody has used before.
pub(crate) fn nonce() -> io::Result<[u8; 32]> {
    let mut bytes = [0; 32];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// HMAC-SHA-256 (RFC 2104) of a message under the secret.
pub(crate) fn prove(secret: &[u8], message: &[&[u8]]) -> [u8; PROOF] {
    let mut key = [0; 64];
    match secret.len() {
        0..=64 => key[..secret.len()].copy_from_slice(secret),
        _ => key[..32].copy_from_slice(&sha256(secret)),
    }
    let inner = sha256(&[&key.map(|b| b ^ 0x36)[..], &message.concat()].concat());
    sha256(&[&key.map(|b| b ^ 0x5c)[..], &inner].concat())
}

/// Compares without telling by the time it takes where they differ.
pub(crate) fn same(a: &[u8; PROOF], b: &[u8; PROOF]) -> bool {
    a.iter().zip(b).fold(0, |differing, (a, b)| differing | (a ^ b)) == 0
}

/// FIPS 180-4.
fn sha256(message: &[u8]) -> [u8; 32] {
    let mut padded = message.to_vec();
    padded.push(0x80);
    padded.resize((padded.len() + 8).next_multiple_of(64) - 8, 0);
    padded.extend((message.len() as u64 * 8).to_be_bytes());
    let (primes, mut state) = (first_primes(), [0u32; 8]);
    // The first 32 bits of the fractional parts of square and cube roots of primes.
    for (word, &prime) in state.iter_mut().zip(&primes) {
        *word = root_fraction(prime, 2);
    }
    let constants = primes.map(|prime| root_fraction(prime, 3));
    for block in padded.chunks_exact(64) {
        let mut w = [0u32; 64];
        for (word, bytes) in w.iter_mut().zip(block.chunks_exact(4)) {
            *word = bytes.iter().fold(0, |word, &byte| word << 8 | u32::from(byte));
        }
        for i in 16..64 {
            let s0 = w[i - 15].rotate_right(7) ^ w[i - 15].rotate_right(18) ^ (w[i - 15] >> 3);
            let s1 = w[i - 2].rotate_right(17) ^ w[i - 2].rotate_right(19) ^ (w[i - 2] >> 10);
            w[i] = w[i - 16].wrapping_add(s0).wrapping_add(w[i - 7]).wrapping_add(s1);
        }
        let [mut a, mut b, mut c, mut d, mut e, mut f, mut g, mut h] = state;
        for i in 0..64 {
            let s1 = e.rotate_right(6) ^ e.rotate_right(11) ^ e.rotate_right(25);
            let choice = (e & f) ^ (!e & g);
            let first = h.wrapping_add(s1).wrapping_add(choice).wrapping_add(constants[i]).wrapping_add(w[i]);
            let s0 = a.rotate_right(2) ^ a.rotate_right(13) ^ a.rotate_right(22);
            let second = s0.wrapping_add((a & b) ^ (a & c) ^ (b & c));
            (h, g, f, e, d, c, b, a) = (g, f, e, d.wrapping_add(first), c, b, a, first.wrapping_add(second));
        }
        for (word, add) in state.iter_mut().zip([a, b, c, d, e, f, g, h]) {
            *word = word.wrapping_add(add);
        }
    }
    let mut digest = [0; 32];
    digest
        .chunks_exact_mut(4)
        .zip(state)
        .for_each(|(bytes, word)| bytes.copy_from_slice(&word.to_be_bytes()));
    digest
}

fn first_primes() -> [u64; 64] {
    let mut primes = [0; 64];
    let mut candidates = (2u64..).filter(|n| (2..*n).take_while(|d| d * d <= *n).all(|d| n % d != 0));
    primes.iter_mut().for_each(|prime| *prime = candidates.next().unwrap_or(0));
    primes
}

/// The first 32 bits of the fractional part of the square or cube root, by bisection in whole numbers.
fn root_fraction(n: u64, degree: u32) -> u32 {
    // The largest r with r^degree <= n * 2^(32 * degree); its low 32 bits are the fraction.
    let (mut low, mut high) = (0u128, 1u128 << 37);
    while high - low > 1 {
        let middle = (low + high) / 2;
        let fits = middle.pow(degree) <= u128::from(n) << (32 * degree);
        if fits { low = middle } else { high = middle }
    }
    low as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    #[test]
    fn digests_are_those_of_the_standards() {
        let abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(hex(&sha256(b"abc")), abc);
        let empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        assert_eq!(hex(&sha256(b"")), empty);
        let jefe = "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843";
        assert_eq!(hex(&prove(b"Jefe", &[b"what do ya want ", b"for nothing?"])), jefe);
        let long = "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54";
        let message = b"Test Using Larger Than Block-Size Key - Hash Key First";
        assert_eq!(hex(&prove(&[0xaa; 131], &[message])), long);
    }
}
