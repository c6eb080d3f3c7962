//! error.json: a rank's own words about its failure, in torchrun's shape, for whoever started it.

use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// Where the launcher of this process wants to read about its failure.
pub const VARIABLE: &str = "TORCHELASTIC_ERROR_FILE";

/// Leaves `message` for the launcher, if there is one. The first message stays: what fails later follows from it.
pub fn write(message: &str) {
    let Some(path) = std::env::var_os(VARIABLE).filter(|path| !path.is_empty()) else { return };
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let extra = json!({ "timestamp": seconds.to_string() });
    let text = json!({ "message": { "message": message, "extraInfo": extra } }).to_string();
    // The failure itself is reported elsewhere too: this file not being written must not hide it.
    if let Ok(mut file) = fs::File::create_new(path) {
        let _ = std::io::Write::write_all(&mut file, text.as_bytes());
    }
}

/// Has panics leave their message too.
pub fn write_on_panic() {
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        write(&info.to_string());
        before(info);
    }));
}

/// What a worker left, and when.
pub fn read(path: &Path) -> Option<(String, SystemTime)> {
    let written = fs::metadata(path).and_then(|metadata| metadata.modified()).ok()?;
    let text = fs::read_to_string(path).ok().filter(|text| !text.trim().is_empty())?;
    Some((message(&text), written))
}

/// PyTorch's workers leave a call stack beside the message, or a message that is a plain string.
fn message(text: &str) -> String {
    let Ok(value) = serde_json::from_str::<Value>(text) else { return text.trim().to_string() };
    let words = |value: &Value| value.as_str().map(str::to_string);
    let message = &value["message"];
    words(&message["extraInfo"]["py_callstack"])
        .or_else(|| words(&message["message"]))
        .or_else(|| words(message))
        .unwrap_or_else(|| text.trim().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_of_all_shapes() {
        for (text, want) in [
            (r#"{"message":{"message":"plain","extraInfo":{"timestamp":"1"}}}"#, "plain"),
            (
                r#"{"message":{"message":"m","extraInfo":{"py_callstack":"Traceback","timestamp":"1"}}}"#,
                "Traceback",
            ),
            (r#"{"message":"old","timestamp":1}"#, "old"),
            ("{\"mess", "{\"mess"),
            ("[1]", "[1]"),
        ] {
            assert_eq!(message(text), want);
        }
    }
}
