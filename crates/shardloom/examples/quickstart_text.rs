//! Makes the text of `examples/quickstart`: small tales of animals that share, find, meet and count.
//!
//! ```sh
//! cargo run --example quickstart_text > examples/quickstart/tales.jsonl
//! ```

const NUMBERS: [&str; 21] = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
    "twenty",
];

/// Name, animal, and the words for her or him.
const ANIMALS: [(&str, &str, &str, &str); 8] = [
    ("Tilda", "fox", "She", "her"),
    ("Bram", "hare", "He", "his"),
    ("Oda", "owl", "She", "her"),
    ("Jory", "badger", "He", "his"),
    ("Wenna", "goose", "She", "her"),
    ("Pask", "mole", "He", "his"),
    ("Mirl", "otter", "She", "her"),
    ("Corin", "crow", "He", "his"),
];

/// One and several.
const THINGS: [(&str, &str); 8] = [
    ("plum", "plums"),
    ("nut", "nuts"),
    ("pear", "pears"),
    ("button", "buttons"),
    ("feather", "feathers"),
    ("candle", "candles"),
    ("pebble", "pebbles"),
    ("bun", "buns"),
];

/// Where one goes, and for what.
const PLACES: [(&str, &str); 6] = [
    ("mill", "flour"),
    ("well", "water"),
    ("market", "salt"),
    ("forest", "firewood"),
    ("meadow", "honey"),
    ("harbour", "news"),
];

const DAYS: [&str; 6] =
    ["rainy morning", "windy evening", "bright day", "cold night", "misty dawn", "warm afternoon"];

/// A small generator, so that the text is the same on every machine.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((self.0 >> 33) % n as u64) as usize
    }

    fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())]
    }

    /// Two different ones.
    fn two<T: Copy>(&mut self, all: &[T]) -> (T, T) {
        let first = self.below(all.len());
        let second = (first + 1 + self.below(all.len() - 1)) % all.len();
        (all[first], all[second])
    }
}

fn count(number: usize, (one, several): (&str, &str)) -> String {
    format!("{} {}", NUMBERS[number], if number == 1 { one } else { several })
}

fn capital(word: &str) -> String {
    word[..1].to_uppercase() + &word[1..]
}

fn tale(random: &mut Random) -> String {
    let ((name, animal, she, her), (friend, other, he, _)) = random.two(&ANIMALS);
    let thing = random.of(&THINGS);
    let (place, errand) = random.of(&PLACES);
    let day = random.of(&DAYS);
    match random.below(4) {
        0 => {
            let had = 2 + random.below(11);
            let gave = 1 + random.below(had - 1);
            format!(
                "{name} the {animal} had {}. {she} gave {} to {friend} the {other}. {} minus {} is {}, so {name} \
                 had {} left. {friend} thanked {name}, for who shares is never alone.",
                count(had, thing),
                count(gave, thing),
                capital(NUMBERS[had]),
                NUMBERS[gave],
                NUMBERS[had - gave],
                count(had - gave, thing),
            )
        }
        1 => {
            let (had, found) = (1 + random.below(9), 1 + random.below(9));
            format!(
                "On a {day} {name} the {animal} went to the {place} with {}. There {} found {} more. {} plus {} is \
                 {}, so {} carried {} home.",
                count(had, thing),
                she.to_lowercase(),
                NUMBERS[found],
                capital(NUMBERS[had]),
                NUMBERS[found],
                NUMBERS[had + found],
                she.to_lowercase(),
                count(had + found, thing),
            )
        }
        2 => format!(
            "On a {day} {name} the {animal} met {friend} the {other}. \"Where do you go?\" asked {name}. \"To the \
             {place}, for {errand},\" said {friend}. {he} walked on to the {place}, and {name} went {her} own way."
        ),
        _ => {
            let from = random.below(15);
            let names: Vec<&str> = NUMBERS[from..from + 5].to_vec();
            format!(
                "{name} the {animal} counted {} {}: {}. After {} comes {}.",
                her,
                thing.1,
                names.join(", "),
                names[4],
                NUMBERS[from + 5]
            )
        }
    }
}

fn main() {
    let mut random = Random(2024);
    for _ in 0..900 {
        // No tale has a character that JSON would write otherwise than quotation marks.
        println!("{{\"text\": \"{}\"}}", tale(&mut random).replace('"', "\\\""));
    }
}
