//! Where the output of workers goes: to the console line by line, to files, or both.

use crate::{Error, Result};
use std::collections::{BTreeSet, VecDeque};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// Lines kept of what a worker said last.
const TAIL_LINES: usize = 20;
/// A line longer than this is shown in parts, which may then mix with others' lines.
const LONGEST_LINE: usize = 1 << 20;

/// A choice of standard streams, numbered as torchrun does: 1 stdout, 2 stderr, 3 both.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Std(u8);

impl Std {
    pub const OUT: Std = Std(1);
    pub const ERR: Std = Std(2);

    fn has(self, stream: Std) -> bool {
        self.0 & stream.0 != 0
    }

    /// "3" for all ranks, or "0:1,2:3" by local rank.
    pub fn by_rank(flag: &str, text: &str, num_ranks: usize) -> std::result::Result<Vec<Std>, String> {
        let wrong = |part: &str, what: &str| format!("{flag} {text}: {part:?} {what}");
        let choice = |part: &str| match part.trim().parse() {
            Ok(number @ 0..=3) => Ok(Std(number)),
            _ => Err(wrong(part, "is not 0 (none), 1 (stdout), 2 (stderr) or 3 (both)")),
        };
        if !text.contains(':') {
            return Ok(vec![choice(text)?; num_ranks]);
        }
        let mut choices = vec![Std::default(); num_ranks];
        for part in text.split(',') {
            let (rank, number) =
                part.split_once(':').ok_or_else(|| wrong(part, "is not of the form RANK:NUMBER"))?;
            let place = rank.trim().parse().ok().and_then(|rank: usize| choices.get_mut(rank));
            *place.ok_or_else(|| wrong(rank, "is not a local rank"))? = choice(number)?;
        }
        Ok(choices)
    }
}

/// What the user wants of output.
#[derive(Clone, Debug, Default)]
pub struct LogPlan {
    pub dir: Option<PathBuf>,
    /// By local rank: streams that go to files only.
    pub redirects: Vec<Std>,
    /// By local rank: streams that go to files and, with a prefix, to the console.
    pub tee: Vec<Std>,
    /// Local ranks that are shown on the console.
    pub filter: Option<BTreeSet<usize>>,
}

/// The folder of one run: `<log_dir>/<run_id>_<rand>`.
#[derive(Debug)]
pub struct RunLogs {
    plan: LogPlan,
    dir: PathBuf,
    /// Made by us for want of another, with nothing in it that anyone asked for: removed in the end.
    passing: Option<PathBuf>,
}

impl RunLogs {
    pub fn create(plan: &LogPlan, run_id: &str) -> Result<Self> {
        let asked = |std: &Std| *std != Std::default();
        let writes = plan.redirects.iter().chain(&plan.tee).any(asked);
        let own_root = || -> Result<PathBuf> {
            Ok(std::env::temp_dir().join(format!("shardloom_{}", super::machine::random_hex(4)?)))
        };
        let root = plan.dir.clone().map_or_else(own_root, Ok)?;
        let passing = (plan.dir.is_none() && !writes).then(|| root.clone());
        // A name may hold what a path must not.
        let name: String = run_id.chars().map(|c| if c == '/' || c == '\0' { '_' } else { c }).collect();
        let dir = root.join(format!("{name}_{}", super::machine::random_hex(4)?));
        fs::create_dir_all(&dir).map_err(|e| Error::file(&dir, e))?;
        Ok(RunLogs { plan: plan.clone(), dir, passing })
    }

    /// The folder of one worker in one attempt, and its two streams.
    pub fn of_worker(&self, attempt: u32, local_rank: usize, prefix: &str) -> Result<WorkerLogs> {
        let dir = self.dir.join(format!("attempt_{attempt}")).join(local_rank.to_string());
        fs::create_dir_all(&dir).map_err(|e| Error::file(&dir, e))?;
        let shown = self.plan.filter.as_ref().is_none_or(|filter| filter.contains(&local_rank));
        let choice = |choices: &[Std]| choices.get(local_rank).copied().unwrap_or_default();
        let (redirect, tee) = (choice(&self.plan.redirects), choice(&self.plan.tee));
        let stream = |std: Std, name: &str, console: Console| -> Result<Stream> {
            // Who names a folder for logs wants logs, also without saying which.
            let to_file = redirect.has(std) || tee.has(std) || self.plan.dir.is_some();
            let to_console = shown && (tee.has(std) || !redirect.has(std));
            let path = dir.join(name);
            let file = to_file.then(|| File::create(&path).map_err(|e| Error::file(&path, e))).transpose()?;
            Ok(Stream {
                path: to_file.then_some(path),
                file,
                console: to_console.then_some(console),
                prefix: if tee.has(std) { prefix.to_string() } else { String::new() },
                tail: Arc::default(),
            })
        };
        Ok(WorkerLogs {
            stdout: stream(Std::OUT, "stdout.log", Console::Out)?,
            stderr: stream(Std::ERR, "stderr.log", Console::Err)?,
            error_file: dir.join("error.json"),
        })
    }
}

impl Drop for RunLogs {
    fn drop(&mut self) {
        if let Some(root) = &self.passing {
            let _ = fs::remove_dir_all(root);
        }
    }
}

/// Where one worker's output goes.
#[derive(Debug)]
pub struct WorkerLogs {
    pub stdout: Stream,
    pub stderr: Stream,
    pub error_file: PathBuf,
}

#[derive(Clone, Copy, Debug)]
enum Console {
    Out,
    Err,
}

impl Console {
    /// In one piece. A console that is gone is no reason for the job to end.
    fn write(self, bytes: &[u8]) {
        let _ = match self {
            Console::Out => {
                let mut out = io::stdout().lock();
                out.write_all(bytes).and_then(|()| out.flush())
            }
            Console::Err => io::stderr().lock().write_all(bytes),
        };
    }
}

#[derive(Debug)]
pub struct Stream {
    path: Option<PathBuf>,
    file: Option<File>,
    console: Option<Console>,
    prefix: String,
    tail: Arc<Mutex<Tail>>,
}

/// What is left of a stream once it is being read: the end of what was said, and where the rest is.
#[derive(Debug)]
pub struct Pump {
    thread: JoinHandle<()>,
    path: Option<PathBuf>,
    tail: Arc<Mutex<Tail>>,
}

impl Stream {
    /// Reads on a thread until the end.
    pub fn pump(self, from: impl Read + Send + 'static) -> io::Result<Pump> {
        let (path, tail) = (self.path.clone(), self.tail.clone());
        let thread = std::thread::Builder::new().name("output".into()).spawn(move || self.copy(from))?;
        Ok(Pump { thread, path, tail })
    }

    fn copy(mut self, mut from: impl Read) {
        let mut lines = Lines::new(&self.prefix);
        let mut buffer = vec![0; 64 << 10];
        loop {
            let read = match from.read(&mut buffer) {
                Ok(0) => break,
                Ok(read) => &buffer[..read],
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(_) => break,
            };
            if let Some(file) = &mut self.file
                && let Err(e) = file.write_all(read)
            {
                eprintln!("shardloom: {}: {e}; no more is written there", display(&self.path));
                self.file = None;
            }
            lock(&self.tail).push(read);
            if let Some(console) = self.console {
                lines.push(read, |whole| console.write(whole));
            }
        }
        if let Some(console) = self.console {
            lines.finish(|rest| console.write(rest));
        }
    }
}

fn display(path: &Option<PathBuf>) -> String {
    path.as_deref().unwrap_or(Path::new("log")).display().to_string()
}

impl Pump {
    pub fn is_finished(&self) -> bool {
        self.thread.is_finished()
    }

    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    pub fn last_lines(&self) -> Vec<String> {
        lock(&self.tail).lines()
    }
}

fn lock(tail: &Mutex<Tail>) -> MutexGuard<'_, Tail> {
    tail.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Gathers bytes into whole lines with a prefix each. A carriage return also ends one, so that progress shows.
struct Lines<'a> {
    prefix: &'a [u8],
    pending: Vec<u8>,
    starts: Start,
}

#[derive(Clone, Copy, PartialEq)]
enum Start {
    Line,
    AfterReturn,
    Inside,
}

impl<'a> Lines<'a> {
    fn new(prefix: &'a str) -> Self {
        Lines { prefix: prefix.as_bytes(), pending: Vec::new(), starts: Start::Line }
    }

    fn push(&mut self, bytes: &[u8], emit: impl FnMut(&[u8])) {
        let ends = |byte: &u8| matches!(byte, b'\n' | b'\r');
        match bytes.iter().rposition(ends) {
            Some(last) => {
                self.pending.extend(&bytes[..=last]);
                self.flush(emit);
                self.pending.extend(&bytes[last + 1..]);
            }
            None => {
                self.pending.extend(bytes);
                if self.pending.len() > LONGEST_LINE {
                    self.flush(emit);
                }
            }
        }
    }

    /// What is left without an end of line gets one: the next to speak is somebody else.
    fn finish(&mut self, emit: impl FnMut(&[u8])) {
        if !self.pending.is_empty() {
            self.pending.push(b'\n');
            self.flush(emit);
        }
    }

    fn flush(&mut self, mut emit: impl FnMut(&[u8])) {
        let mut whole = Vec::with_capacity(self.pending.len() + self.prefix.len());
        for &byte in &self.pending {
            let closes_return = self.starts == Start::AfterReturn && byte == b'\n';
            if self.starts != Start::Inside && !closes_return {
                whole.extend(self.prefix);
            }
            whole.push(byte);
            self.starts = match byte {
                b'\n' => Start::Line,
                b'\r' => Start::AfterReturn,
                _ => Start::Inside,
            };
        }
        self.pending.clear();
        emit(&whole);
    }
}

/// The last lines of a stream.
#[derive(Debug, Default)]
struct Tail {
    whole: VecDeque<String>,
    partial: Vec<u8>,
}

impl Tail {
    /// More of one line than anyone reads in an error.
    const LONGEST: usize = 2000;

    fn push(&mut self, bytes: &[u8]) {
        for part in bytes.split_inclusive(|byte| *byte == b'\n') {
            let room = Self::LONGEST.saturating_sub(self.partial.len());
            self.partial.extend(&part[..part.len().min(room)]);
            if part.ends_with(b"\n") {
                self.whole.push_back(text(&self.partial));
                self.partial.clear();
                if self.whole.len() > TAIL_LINES {
                    self.whole.pop_front();
                }
            }
        }
    }

    fn lines(&self) -> Vec<String> {
        let partial = Some(text(&self.partial)).filter(|line| !line.is_empty());
        self.whole.iter().cloned().chain(partial).collect()
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).trim_end().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pushed(prefix: &str, parts: &[&str]) -> Vec<String> {
        let mut shown = Vec::new();
        let mut lines = Lines::new(prefix);
        for part in parts {
            lines.push(part.as_bytes(), |whole| shown.push(String::from_utf8(whole.to_vec()).unwrap()));
        }
        lines.finish(|rest| shown.push(String::from_utf8(rest.to_vec()).unwrap()));
        shown
    }

    #[test]
    fn only_whole_lines_leave() {
        assert_eq!(pushed("", &["a", "b\nc", "d\n", "e"]), ["ab\n", "cd\n", "e\n"]);
        assert_eq!(pushed("[x0]:", &["a\nb\nc", "\n\n"]), ["[x0]:a\n[x0]:b\n", "[x0]:c\n[x0]:\n"]);
        assert_eq!(pushed(">", &["1%\r", "2%\r", "\n", "x\r\n"]), [">1%\r", ">2%\r", "\n", ">x\r\n"]);
    }

    #[test]
    fn the_tail_is_short() {
        let mut tail = Tail::default();
        (0..50).for_each(|i| tail.push(format!("line {i}\n").as_bytes()));
        tail.push(&[b'x'; 5000]);
        let lines = tail.lines();
        assert_eq!((lines.len(), lines[0].as_str()), (TAIL_LINES + 1, "line 30"));
        assert_eq!(lines.last().unwrap().len(), Tail::LONGEST);
    }

    #[test]
    fn streams_by_rank() {
        assert_eq!(Std::by_rank("-r", "3", 2).unwrap(), [Std(3), Std(3)]);
        assert_eq!(Std::by_rank("-r", "1:2", 2).unwrap(), [Std(0), Std(2)]);
        assert!(Std::by_rank("-r", "5", 2).is_err());
    }
}
