//! Python's pickles, as far as a checkpoint needs them, and as data only.
//!
//! A pickle is a program for a small stack machine, and in Python it may call anything. Here it may not:
//! [`read`](read::read) knows the classes of a fixed [list](Class), refuses every other name, and makes plain records of
//! the ones it knows. Nothing is looked up, called or imported.

mod class;
mod read;
mod write;

pub(crate) use class::Class;
pub(crate) use read::read;
pub(crate) use write::Pickler;

/// One value of a pickle. Text and bytes are where they were in the input.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Value<'a> {
    None,
    Bool(bool),
    Int(i64),
    Float(f64),
    Str(&'a str),
    Bytes(&'a [u8]),
    Class(Class),
    /// Index of an [`Object`].
    Object(u32),
}

/// A value that holds others. They lie in one list and name each other by index: a pickle may refer to the same object
/// many times, or to itself, and neither costs memory or depth.
#[derive(Debug)]
pub(crate) enum Object<'a> {
    Tuple(Vec<Value<'a>>),
    List(Vec<Value<'a>>),
    Dict(Vec<(Value<'a>, Value<'a>)>),
    /// What a class was called with, and the state it was given afterwards.
    Made(Box<Made<'a>>),
    /// A name for something kept outside of the pickle: torch's storages.
    Outside(Value<'a>),
}

#[derive(Debug)]
pub(crate) struct Made<'a> {
    pub class: Class,
    pub args: Value<'a>,
    pub state: Option<Value<'a>>,
}

/// A pickle that has been read.
#[derive(Debug)]
pub(crate) struct Pickle<'a> {
    objects: Vec<Object<'a>>,
    pub root: Value<'a>,
}

impl<'a> Pickle<'a> {
    fn object(&self, value: Value<'a>) -> Option<&Object<'a>> {
        match value {
            Value::Object(index) => self.objects.get(index as usize),
            _ => None,
        }
    }

    pub fn tuple(&self, value: Value<'a>) -> Option<&[Value<'a>]> {
        match self.object(value)? {
            Object::Tuple(values) => Some(values),
            _ => None,
        }
    }

    pub fn list(&self, value: Value<'a>) -> Option<&[Value<'a>]> {
        match self.object(value)? {
            Object::List(values) => Some(values),
            _ => None,
        }
    }

    pub fn dict(&self, value: Value<'a>) -> Option<&[(Value<'a>, Value<'a>)]> {
        match self.object(value)? {
            Object::Dict(entries) => Some(entries),
            _ => None,
        }
    }

    pub fn made(&self, value: Value<'a>) -> Option<&Made<'a>> {
        match self.object(value)? {
            Object::Made(made) => Some(made),
            _ => None,
        }
    }

    pub fn outside(&self, value: Value<'a>) -> Option<Value<'a>> {
        match self.object(value)? {
            Object::Outside(name) => Some(*name),
            _ => None,
        }
    }

    /// The fields of an instance of `class`: the dictionary it was built with.
    pub fn fields(&self, value: Value<'a>, class: Class) -> Option<Fields<'_, 'a>> {
        let made = self.made(value).filter(|made| made.class == class)?;
        self.dict(made.state?).map(Fields)
    }
}

/// Fields of an instance, by name.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fields<'p, 'a>(&'p [(Value<'a>, Value<'a>)]);

impl<'a> Fields<'_, 'a> {
    /// The field's value, `None` where it is absent. The last of several counts, as it would in Python.
    pub fn get(&self, name: &str) -> Option<Value<'a>> {
        self.0.iter().rev().find(|(key, _)| *key == Value::Str(name)).map(|(_, value)| *value)
    }
}

/// Opcodes of protocols 2 to 5.
mod op {
    pub const MARK: u8 = b'(';
    pub const STOP: u8 = b'.';
    pub const POP: u8 = b'0';
    pub const POP_MARK: u8 = b'1';
    pub const DUP: u8 = b'2';
    pub const BINFLOAT: u8 = b'G';
    pub const BININT: u8 = b'J';
    pub const BININT1: u8 = b'K';
    pub const BININT2: u8 = b'M';
    pub const NONE: u8 = b'N';
    pub const BINPERSID: u8 = b'Q';
    pub const REDUCE: u8 = b'R';
    pub const SHORT_BINSTRING: u8 = b'U';
    pub const BINSTRING: u8 = b'T';
    pub const BINUNICODE: u8 = b'X';
    pub const APPEND: u8 = b'a';
    pub const BUILD: u8 = b'b';
    pub const GLOBAL: u8 = b'c';
    pub const DICT: u8 = b'd';
    pub const EMPTY_DICT: u8 = b'}';
    pub const APPENDS: u8 = b'e';
    pub const BINGET: u8 = b'h';
    pub const LONG_BINGET: u8 = b'j';
    pub const LIST: u8 = b'l';
    pub const EMPTY_LIST: u8 = b']';
    pub const BINPUT: u8 = b'q';
    pub const LONG_BINPUT: u8 = b'r';
    pub const SETITEM: u8 = b's';
    pub const TUPLE: u8 = b't';
    pub const EMPTY_TUPLE: u8 = b')';
    pub const SETITEMS: u8 = b'u';
    pub const PROTO: u8 = 0x80;
    pub const NEWOBJ: u8 = 0x81;
    pub const TUPLE1: u8 = 0x85;
    pub const TUPLE2: u8 = 0x86;
    pub const TUPLE3: u8 = 0x87;
    pub const NEWTRUE: u8 = 0x88;
    pub const NEWFALSE: u8 = 0x89;
    pub const LONG1: u8 = 0x8a;
    pub const LONG4: u8 = 0x8b;
    pub const BINBYTES: u8 = b'B';
    pub const SHORT_BINBYTES: u8 = b'C';
    pub const SHORT_BINUNICODE: u8 = 0x8c;
    pub const BINUNICODE8: u8 = 0x8d;
    pub const BINBYTES8: u8 = 0x8e;
    pub const EMPTY_SET: u8 = 0x8f;
    pub const ADDITEMS: u8 = 0x90;
    pub const FROZENSET: u8 = 0x91;
    pub const STACK_GLOBAL: u8 = 0x93;
    pub const MEMOIZE: u8 = 0x94;
    pub const FRAME: u8 = 0x95;
    pub const BYTEARRAY8: u8 = 0x96;
}
