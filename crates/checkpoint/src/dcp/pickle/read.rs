//! The machine that reads pickles.

use super::{Class, Made, Object, Pickle, Value, op};
use std::collections::HashMap;

type Read<T> = std::result::Result<T, String>;

/// Reads a pickle of protocol 2 to 5. Memory is a fixed multiple of the input: every length is checked against what is
/// left of it before anything is made, each instruction makes at most one object, and nothing here recurses.
pub(crate) fn read(input: &[u8]) -> Read<Pickle<'_>> {
    let mut machine = Machine {
        input,
        at: 0,
        stack: Vec::new(),
        marks: Vec::new(),
        memo: HashMap::new(),
        objects: Vec::new(),
    };
    let root = machine.run().map_err(|what| format!("{what} (at byte {} of its pickle)", machine.at))?;
    Ok(Pickle { objects: machine.objects, root })
}

struct Machine<'a> {
    input: &'a [u8],
    at: usize,
    stack: Vec<Value<'a>>,
    /// Lengths of the stack at each mark.
    marks: Vec<usize>,
    /// By number, which a pickle is free to choose.
    memo: HashMap<u32, Value<'a>>,
    objects: Vec<Object<'a>>,
}

impl<'a> Machine<'a> {
    fn run(&mut self) -> Read<Value<'a>> {
        let (proto, version) = (self.byte()?, self.byte()?);
        if proto != op::PROTO || !(2..=5).contains(&version) {
            return Err("not a pickle of protocol 2 to 5".into());
        }
        loop {
            let code = self.byte()?;
            if code == op::STOP {
                return self.pop();
            }
            self.instruction(code)?;
        }
    }

    fn instruction(&mut self, code: u8) -> Read<()> {
        match code {
            op::PROTO => self.take(1).map(drop),
            op::FRAME => self.frame(),
            op::MARK => {
                self.marks.push(self.stack.len());
                Ok(())
            }
            op::POP => self.pop_any(),
            op::POP_MARK => self.pop_mark().map(drop),
            op::DUP => {
                let top = self.top()?;
                self.push(top)
            }
            op::BINGET | op::LONG_BINGET | op::BINPUT | op::LONG_BINPUT | op::MEMOIZE => self.remember(code),
            op::NONE | op::NEWTRUE | op::NEWFALSE => self.constant(code),
            op::BININT | op::BININT1 | op::BININT2 | op::LONG1 | op::LONG4 | op::BINFLOAT => {
                self.number(code)
            }
            op::SHORT_BINUNICODE | op::BINUNICODE | op::BINUNICODE8 | op::SHORT_BINSTRING | op::BINSTRING => {
                self.text(code)
            }
            op::SHORT_BINBYTES | op::BINBYTES | op::BINBYTES8 | op::BYTEARRAY8 => self.bytes(code),
            op::EMPTY_TUPLE | op::TUPLE1 | op::TUPLE2 | op::TUPLE3 | op::TUPLE => self.tuple(code),
            op::EMPTY_LIST | op::EMPTY_SET => self.make(Object::List(Vec::new())),
            op::LIST | op::FROZENSET => {
                let values = self.pop_mark()?;
                self.make(Object::List(values))
            }
            op::APPEND => {
                let value = self.pop()?;
                self.extend(vec![value])
            }
            op::APPENDS | op::ADDITEMS => {
                let values = self.pop_mark()?;
                self.extend(values)
            }
            op::EMPTY_DICT => self.make(Object::Dict(Vec::new())),
            op::DICT => {
                let values = self.pop_mark()?;
                self.make(Object::Dict(pairs(&values)?))
            }
            op::SETITEM => {
                let (value, key) = (self.pop()?, self.pop()?);
                self.set(&[key, value])
            }
            op::SETITEMS => {
                let values = self.pop_mark()?;
                self.set(&values)
            }
            op::GLOBAL | op::STACK_GLOBAL => self.class(code),
            op::NEWOBJ | op::REDUCE => self.call(),
            op::BUILD => self.build(),
            op::BINPERSID => {
                let name = self.pop()?;
                self.make(Object::Outside(name))
            }
            other => Err(format!("instruction {other:#04x}, which no checkpoint needs")),
        }
    }

    fn take(&mut self, len: usize) -> Read<&'a [u8]> {
        let rest = &self.input[self.at..];
        if len > rest.len() {
            return Err(format!("truncated: it asks for {len} bytes, and {} are left", rest.len()));
        }
        self.at += len;
        Ok(&rest[..len])
    }

    fn byte(&mut self) -> Read<u8> {
        Ok(self.take(1)?[0])
    }

    /// A little-endian number of up to 8 bytes.
    fn unsigned(&mut self, len: usize) -> Read<u64> {
        let bytes = self.take(len)?;
        Ok(bytes.iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte)))
    }

    /// The bytes after a length of `len` bytes.
    fn counted(&mut self, len: usize) -> Read<&'a [u8]> {
        let count = self.unsigned(len)?;
        self.take(usize::try_from(count).unwrap_or(usize::MAX))
    }

    fn line(&mut self) -> Read<&'a str> {
        let rest = &self.input[self.at..];
        let end = rest.iter().position(|&byte| byte == b'\n').ok_or("truncated within a name")?;
        self.at += end + 1;
        utf8(&rest[..end])
    }

    fn push(&mut self, value: Value<'a>) -> Read<()> {
        self.stack.push(value);
        Ok(())
    }

    fn make(&mut self, object: Object<'a>) -> Read<()> {
        let index = u32::try_from(self.objects.len()).map_err(|_| "it has too many objects")?;
        self.objects.push(object);
        self.push(Value::Object(index))
    }

    /// The newest value above the last mark.
    fn top(&self) -> Read<Value<'a>> {
        let floor = self.marks.last().copied().unwrap_or(0);
        match self.stack.last() {
            Some(value) if self.stack.len() > floor => Ok(*value),
            _ => Err("it takes from an empty stack".into()),
        }
    }

    fn pop(&mut self) -> Read<Value<'a>> {
        let value = self.top()?;
        self.stack.pop();
        Ok(value)
    }

    fn pop_any(&mut self) -> Read<()> {
        if self.marks.last() == Some(&self.stack.len()) {
            self.marks.pop();
            return Ok(());
        }
        self.pop().map(drop)
    }

    fn pop_mark(&mut self) -> Read<Vec<Value<'a>>> {
        let mark = self.marks.pop().ok_or("it asks for a mark that was never set")?;
        Ok(self.stack.split_off(mark))
    }

    /// Frames help those who read from a stream; here only a lie about their length would matter.
    fn frame(&mut self) -> Read<()> {
        let length = self.unsigned(8)?;
        let left = (self.input.len() - self.at) as u64;
        if length > left {
            return Err(format!("truncated: a frame of {length} bytes, and {left} are left"));
        }
        Ok(())
    }

    fn remember(&mut self, code: u8) -> Read<()> {
        let number = match code {
            op::MEMOIZE => self.memo.len() as u32,
            op::BINGET | op::BINPUT => self.unsigned(1)? as u32,
            _ => self.unsigned(4)? as u32,
        };
        if matches!(code, op::BINGET | op::LONG_BINGET) {
            let value = self.memo.get(&number).copied();
            return self
                .push(value.ok_or_else(|| format!("it refers to value {number}, which was never kept"))?);
        }
        let top = self.top()?;
        self.memo.insert(number, top);
        Ok(())
    }

    fn constant(&mut self, code: u8) -> Read<()> {
        self.push(match code {
            op::NEWTRUE => Value::Bool(true),
            op::NEWFALSE => Value::Bool(false),
            _ => Value::None,
        })
    }

    fn number(&mut self, code: u8) -> Read<()> {
        let value = match code {
            op::BININT1 => Value::Int(self.unsigned(1)? as i64),
            op::BININT2 => Value::Int(self.unsigned(2)? as i64),
            op::BININT => Value::Int(i64::from(self.unsigned(4)? as u32 as i32)),
            op::BINFLOAT => {
                let bytes = self.take(8)?;
                Value::Float(f64::from_bits(bytes.iter().fold(0, |bits, &byte| bits << 8 | u64::from(byte))))
            }
            _ => {
                let bytes = self.counted(if code == op::LONG1 { 1 } else { 4 })?;
                let negative = bytes.last().is_some_and(|byte| byte & 0x80 != 0);
                let mut padded = [if negative { 0xff } else { 0 }; 8];
                let room = padded.get_mut(..bytes.len()).ok_or("a number of more than 64 bits")?;
                room.copy_from_slice(bytes);
                Value::Int(i64::from_le_bytes(padded))
            }
        };
        self.push(value)
    }

    fn text(&mut self, code: u8) -> Read<()> {
        let bytes = self.counted(match code {
            op::SHORT_BINUNICODE | op::SHORT_BINSTRING => 1,
            op::BINUNICODE8 => 8,
            _ => 4,
        })?;
        self.push(Value::Str(utf8(bytes)?))
    }

    fn bytes(&mut self, code: u8) -> Read<()> {
        let bytes = self.counted(match code {
            op::SHORT_BINBYTES => 1,
            op::BINBYTES => 4,
            _ => 8,
        })?;
        self.push(Value::Bytes(bytes))
    }

    fn tuple(&mut self, code: u8) -> Read<()> {
        let len = match code {
            op::EMPTY_TUPLE => 0,
            op::TUPLE1 => 1,
            op::TUPLE2 => 2,
            op::TUPLE3 => 3,
            _ => {
                let values = self.pop_mark()?;
                return self.make(Object::Tuple(values));
            }
        };
        let mut values = Vec::with_capacity(len);
        for _ in 0..len {
            values.push(self.pop()?);
        }
        values.reverse();
        self.make(Object::Tuple(values))
    }

    fn top_object(&mut self) -> Read<&mut Object<'a>> {
        let top = self.top()?;
        let Value::Object(index) = top else { return Err(format!("it puts something into {top:?}")) };
        self.objects.get_mut(index as usize).ok_or_else(|| "an object that is not there".into())
    }

    fn extend(&mut self, more: Vec<Value<'a>>) -> Read<()> {
        match self.top_object()? {
            Object::List(values) => values.extend(more),
            _ => return Err("it appends to something that is no list".into()),
        }
        Ok(())
    }

    fn set(&mut self, values: &[Value<'a>]) -> Read<()> {
        let more = pairs(values)?;
        match self.top_object()? {
            Object::Dict(entries) => entries.extend(more),
            _ => return Err("it sets keys of something that is no dictionary".into()),
        }
        Ok(())
    }

    fn class(&mut self, code: u8) -> Read<()> {
        let (module, name) = if code == op::GLOBAL {
            (self.line()?, self.line()?)
        } else {
            match (self.pop()?, self.pop()?) {
                (Value::Str(name), Value::Str(module)) => (module, name),
                _ => return Err("a class whose name is no text".into()),
            }
        };
        let class = Class::find(module, name).ok_or_else(|| {
            format!(
                "it names {}.{}, which no checkpoint needs. Pickles can run code when Python loads them; this one \
                 was not run",
                shown(module),
                shown(name)
            )
        })?;
        self.push(Value::Class(class))
    }

    /// A call becomes a record of itself, except that an empty OrderedDict is a dictionary.
    fn call(&mut self) -> Read<()> {
        let (args, class) = (self.pop()?, self.pop()?);
        let Value::Class(class) = class else { return Err("it calls something that is no class".into()) };
        let Value::Object(index) = args else { return Err("a class called with no tuple".into()) };
        let Some(Object::Tuple(values)) = self.objects.get(index as usize) else {
            return Err("a class called with no tuple".into());
        };
        if class == Class::OrderedDict {
            if !values.is_empty() {
                return Err("an OrderedDict made from something".into());
            }
            return self.make(Object::Dict(Vec::new()));
        }
        self.make(Object::Made(Box::new(Made { class, args, state: None })))
    }

    fn build(&mut self) -> Read<()> {
        let state = self.pop()?;
        match self.top_object()? {
            Object::Made(made) if made.state.is_none() => made.state = Some(state),
            // What torch hangs on to an OrderedDict (`_metadata`) is of no use here.
            Object::Dict(_) => {}
            _ => return Err("it gives a state to something that takes none".into()),
        }
        Ok(())
    }
}

fn pairs<'a>(values: &[Value<'a>]) -> Read<Vec<(Value<'a>, Value<'a>)>> {
    if !values.len().is_multiple_of(2) {
        return Err("a key without a value".into());
    }
    Ok(values.chunks_exact(2).map(|pair| (pair[0], pair[1])).collect())
}

fn utf8(bytes: &[u8]) -> Read<&str> {
    std::str::from_utf8(bytes).map_err(|_| "text that is not UTF-8".into())
}

/// A foreign name as an error shows it: not longer than a name would be.
fn shown(name: &str) -> String {
    name.chars().take(80).flat_map(char::escape_debug).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pickle(body: &[u8]) -> Vec<u8> {
        [&[op::PROTO, 2], body, b"."].concat()
    }

    #[test]
    fn foreign_names_are_refused_and_named() {
        let system = pickle(b"cos\nsystem\n(X\x02\x00\x00\x00lstR");
        let error = read(&system).unwrap_err();
        assert!(error.contains("os.system") && error.contains("was not run"), "{error}");
        let stacked =
            [&[op::PROTO, 4, 0x8c, 8], &b"builtins"[..], &[0x8c, 4], b"eval", &[0x93], b"."].concat();
        assert!(read(&stacked).unwrap_err().contains("builtins.eval"));
        // Names of modules a checkpoint does use, but not these.
        for name in ["torch\nload", "torch._utils\n_import_dotted_name", "collections\ndeque"] {
            let body = format!("c{name}\n");
            assert!(read(&pickle(body.as_bytes())).is_err(), "{name}");
        }
    }

    #[test]
    fn numbers_texts_and_shared_objects() {
        // ([], the same list, -2, 300, 1.5), the list then gets an item.
        let body = b"(]q\x07h\x07J\xfe\xff\xff\xffM\x2c\x01G\x3f\xf8\x00\x00\x00\x00\x00\x00tq\x08h\x07X\x03\x00\x00\x00abca0";
        let bytes = pickle(body);
        let read = read(&bytes).unwrap();
        let values = read.tuple(read.root).unwrap();
        assert_eq!(values[0], values[1]);
        assert_eq!(read.list(values[1]).unwrap(), [Value::Str("abc")]);
        assert_eq!(values[2..], [Value::Int(-2), Value::Int(300), Value::Float(1.5)]);
    }

    #[test]
    fn lies_about_lengths_are_refused() {
        for body in [
            &b"X\xff\xff\xff\x7f"[..],
            b"\x8d\xff\xff\xff\xff\xff\xff\xff\xff",
            b"B\xff\xff\xff\xff",
            b"\x8b\xff\xff\xff\xff",
        ] {
            assert!(read(&pickle(body)).unwrap_err().contains("truncated"));
        }
        assert!(read(&pickle(b"r\xff\xff\xff\xff")).unwrap_err().contains("empty stack"));
        assert!(read(&pickle(b"t")).is_err() && read(&pickle(b"(0")).is_err() && read(b"").is_err());
    }
}
