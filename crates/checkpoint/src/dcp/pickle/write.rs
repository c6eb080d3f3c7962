//! Pickles of protocol 2, as plain as they can be.

use super::{Class, op};
use std::collections::HashMap;

/// Writes values one after another; containers are opened and closed by the caller. Classes and the texts that occur
/// many times are kept in the memo.
#[derive(Debug)]
pub(crate) struct Pickler {
    bytes: Vec<u8>,
    memo: HashMap<String, u32>,
}

impl Pickler {
    pub fn new() -> Self {
        Pickler { bytes: vec![op::PROTO, 2], memo: HashMap::new() }
    }

    pub fn finish(mut self) -> Vec<u8> {
        self.bytes.push(op::STOP);
        self.bytes
    }

    fn put(&mut self, key: String) {
        let number = self.memo.len() as u32;
        self.memo.insert(key, number);
        self.bytes.push(op::LONG_BINPUT);
        self.bytes.extend(number.to_le_bytes());
    }

    /// Whether it could be taken from the memo.
    fn get(&mut self, key: &str) -> bool {
        let Some(number) = self.memo.get(key) else { return false };
        self.bytes.push(op::LONG_BINGET);
        self.bytes.extend(number.to_le_bytes());
        true
    }

    pub fn class(&mut self, class: Class) {
        let (module, name) = class.name().expect("only classes with a name in torch are written");
        let line = format!("c{module}\n{name}\n");
        if !self.get(&line) {
            self.bytes.extend(line.as_bytes());
            self.put(line);
        }
    }

    pub fn none(&mut self) {
        self.bytes.push(op::NONE);
    }

    pub fn bool(&mut self, value: bool) {
        self.bytes.push(if value { op::NEWTRUE } else { op::NEWFALSE });
    }

    pub fn int(&mut self, value: i64) {
        match i32::try_from(value) {
            Ok(small) => {
                self.bytes.push(op::BININT);
                self.bytes.extend(small.to_le_bytes());
            }
            Err(_) => {
                self.bytes.extend([op::LONG1, 8]);
                self.bytes.extend(value.to_le_bytes());
            }
        }
    }

    pub fn float(&mut self, value: f64) {
        self.bytes.push(op::BINFLOAT);
        self.bytes.extend(value.to_be_bytes());
    }

    pub fn text(&mut self, value: &str) {
        let key = format!("X{value}");
        if self.get(&key) {
            return;
        }
        self.bytes.push(op::BINUNICODE);
        self.bytes.extend((value.len() as u32).to_le_bytes());
        self.bytes.extend(value.as_bytes());
        self.put(key);
    }

    /// A tuple of what `inside` writes.
    pub fn tuple(&mut self, inside: impl FnOnce(&mut Self)) {
        self.bytes.push(op::MARK);
        inside(self);
        self.bytes.push(op::TUPLE);
    }

    pub fn list(&mut self, inside: impl FnOnce(&mut Self)) {
        self.bytes.extend([op::EMPTY_LIST, op::MARK]);
        inside(self);
        self.bytes.push(op::APPENDS);
    }

    /// A dictionary; `inside` writes keys and values in turn.
    pub fn dict(&mut self, inside: impl FnOnce(&mut Self)) {
        self.bytes.extend([op::EMPTY_DICT, op::MARK]);
        inside(self);
        self.bytes.push(op::SETITEMS);
    }

    /// `class(*args)`.
    pub fn call(&mut self, class: Class, args: impl FnOnce(&mut Self)) {
        self.class(class);
        self.tuple(args);
        self.bytes.push(op::REDUCE);
    }

    /// An instance of `class`, with what `state` writes as its state.
    pub fn instance(&mut self, class: Class, state: impl FnOnce(&mut Self)) {
        self.bare(class);
        state(self);
        self.bytes.push(op::BUILD);
    }

    /// An instance of `class` that has no state.
    pub fn bare(&mut self, class: Class) {
        self.class(class);
        self.bytes.extend([op::EMPTY_TUPLE, op::NEWOBJ]);
    }

    /// A name for what lies outside of the pickle.
    pub fn outside(&mut self, name: impl FnOnce(&mut Self)) {
        self.tuple(name);
        self.bytes.push(op::BINPERSID);
    }

    /// `torch.Size`.
    pub fn size(&mut self, dims: &[usize]) {
        self.call(Class::Size, |p| p.tuple(|p| dims.iter().for_each(|&dim| p.int(dim as i64))));
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Value, read};
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let mut pickler = Pickler::new();
        pickler.tuple(|p| {
            p.text("name");
            p.text("name");
            p.int(1 << 40);
            p.int(-1);
            p.float(0.1);
            p.dict(|p| {
                p.text("key");
                p.bool(true);
            });
            p.size(&[3, 4]);
            p.instance(Class::Chunk, |p| p.dict(|_| {}));
        });
        let bytes = pickler.finish();
        let read = read(&bytes).unwrap();
        let values = read.tuple(read.root).unwrap();
        let plain =
            [Value::Str("name"), Value::Str("name"), Value::Int(1 << 40), Value::Int(-1), Value::Float(0.1)];
        assert_eq!(values[..5], plain);
        assert_eq!(read.dict(values[5]).unwrap(), [(Value::Str("key"), Value::Bool(true))]);
        let size = read.made(values[6]).unwrap();
        let dims = read.tuple(read.tuple(size.args).unwrap()[0]).unwrap();
        assert_eq!((size.class, dims), (Class::Size, &[Value::Int(3), Value::Int(4)][..]));
        assert!(read.fields(values[7], Class::Chunk).is_some());
    }
}
