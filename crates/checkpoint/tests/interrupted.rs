//! Saves that are interrupted: by a failure of any of the operations they are made of, and by SIGKILL at any moment. What
//! was saved before always loads, and nothing half-written is ever taken for a checkpoint.

mod made;

use checkpoint::storage::{Disk, Storage, Target};
use checkpoint::{Reader, Result, Series, recover};
use made::{disk, load, save};
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

const NO_SPACE: i32 = 28;
const IO: i32 = 5;

/// The disk, of which operation number `fails_at` fails, and those after it too where the trouble lasts.
#[derive(Clone, Debug)]
struct Faulty(Arc<Trouble>);

#[derive(Debug)]
struct Trouble {
    fails_at: i64,
    lasts: bool,
    errno: i32,
    done: AtomicI64,
}

impl Faulty {
    fn new(fails_at: i64, lasts: bool, errno: i32) -> Self {
        Faulty(Arc::new(Trouble { fails_at, lasts, errno, done: AtomicI64::new(0) }))
    }

    fn check(&self) -> io::Result<()> {
        let Trouble { fails_at, lasts, errno, done } = &*self.0;
        let now = done.fetch_add(1, Ordering::Relaxed);
        match now == *fails_at || (*lasts && now > *fails_at) {
            true => Err(io::Error::from_raw_os_error(*errno)),
            false => Ok(()),
        }
    }

    fn target(&self, target: io::Result<Box<dyn Target>>) -> io::Result<Box<dyn Target>> {
        let (target, storage) = (target?, self.clone());
        Ok(Box::new(FaultyTarget { target, storage }))
    }
}

impl Storage for Faulty {
    fn create_dir(&self, dir: &Path) -> io::Result<()> {
        self.check().and_then(|()| Disk.create_dir(dir))
    }

    fn create(&self, path: &Path, bytes: u64) -> io::Result<Box<dyn Target>> {
        self.check()?;
        self.target(Disk.create(path, bytes))
    }

    fn open(&self, path: &Path) -> io::Result<Box<dyn Target>> {
        self.check()?;
        self.target(Disk.open(path))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.check().and_then(|()| Disk.rename(from, to))
    }

    fn link(&self, target: &str, path: &Path) -> io::Result<()> {
        self.check().and_then(|()| Disk.link(target, path))
    }

    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        self.check().and_then(|()| Disk.sync_dir(dir))
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.check().and_then(|()| Disk.remove(path))
    }
}

#[derive(Debug)]
struct FaultyTarget {
    target: Box<dyn Target>,
    storage: Faulty,
}

impl Target for FaultyTarget {
    /// A write that fails has written half.
    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        let allowed = self.storage.check();
        let len = if allowed.is_ok() { bytes.len() } else { bytes.len() / 2 };
        self.target.write_at(&bytes[..len], at).and(allowed)
    }

    fn sync(&self) -> io::Result<()> {
        self.storage.check().and_then(|()| self.target.sync())
    }
}

/// Runs `attempt` with its first, second, … operation failing until none is left to fail. `after` looks at what a
/// failed attempt left. Errors name something under `under`.
fn fail_each(
    under: &Path,
    mut attempt: impl FnMut(&Arc<dyn Storage>) -> Result<()>,
    mut after: impl FnMut(),
) -> usize {
    let mut failures = 0;
    for (errno, said) in [(NO_SPACE, "No space left on device"), (IO, "Input/output error")] {
        for lasts in [false, true] {
            for fails_at in 0.. {
                let faulty = Faulty::new(fails_at, lasts, errno);
                let storage: Arc<dyn Storage> = Arc::new(faulty.clone());
                match attempt(&storage) {
                    Ok(()) => {
                        assert!(faulty.0.done.load(Ordering::Relaxed) <= fails_at, "a failure was ignored");
                        break;
                    }
                    Err(error) => {
                        let text = error.to_string();
                        let named = text.contains(&under.display().to_string());
                        assert!(text.starts_with("cannot ") && text.contains(said) && named, "{text}");
                        failures += 1;
                    }
                }
                after();
            }
        }
    }
    failures
}

/// Everything under the name of a checkpoint is one.
fn all_whole(series: &Series) {
    for entry in std::fs::read_dir(series.dir()).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if name.starts_with("step-") && !name.contains('.') {
            load(&path, 2).unwrap();
        }
    }
}

#[test]
fn whatever_fails_the_checkpoint_before_it_loads() {
    let dir = tempfile::tempdir().unwrap();
    let series = Series::new(dir.path().join("checkpoints"), disk());
    let (first, second) = (series.path(1), series.path(2));
    let reset = || {
        series.recover().unwrap();
        let _ = std::fs::remove_dir_all(&second);
        if !first.exists() {
            save(&disk(), &first, 1, 2).unwrap();
        }
    };
    reset();
    let attempt = |storage: &Arc<dyn Storage>| {
        save(storage, &second, 2, 2)?;
        let series = Series::new(series.dir(), storage.clone());
        series.point(2)?;
        series.prune(1)
    };
    let failures = fail_each(dir.path(), attempt, || {
        all_whole(&series);
        let latest = series.latest().unwrap();
        let step = load(latest.path.as_ref().expect("there is always one"), 3).unwrap();
        assert!(latest.broken.is_empty() && (step == 1 || second.exists()), "{latest:?}");
        reset();
    });
    assert!(failures > 100, "{failures}");
}

#[test]
fn whatever_fails_a_checkpoint_that_is_replaced_stays_or_is_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("checkpoints/step-000001");
    let mut stayed = 0;
    save(&disk(), &path, 7, 1).unwrap();
    let failures = fail_each(
        dir.path(),
        |storage| save(storage, &path, 8, 2),
        || {
            recover(&Disk, &path).unwrap();
            match load(&path, 3).unwrap() {
                7 => stayed += 1,
                step => assert_eq!(step, 8),
            }
            assert_eq!(std::fs::read_dir(dir.path().join("checkpoints")).unwrap().count(), 1);
            save(&disk(), &path, 7, 1).unwrap();
        },
    );
    assert!(stayed > 100 && stayed < failures, "{stayed} of {failures}");
}

/// The folder to which this process saves until it is killed.
const SAVES_TO: &str = "SHARDLOOM_TEST_SAVES_TO";

/// Not a test of its own: what `killed_at_any_moment` starts and kills. Says each step when it is saved.
#[test]
fn saves_until_killed() {
    let Some(dir) = std::env::var_os(SAVES_TO) else { return };
    let series = Series::new(PathBuf::from(dir), disk());
    series.recover().unwrap();
    let mut step = series.latest().unwrap().path.map_or(0, |path| load(&path, 1).unwrap());
    loop {
        step += 1;
        save(&disk(), &series.path(step), step, 2).unwrap();
        println!("saved {step}");
        series.point(step).unwrap();
        series.prune(2).unwrap();
        // Every third is saved once more, in the place of itself.
        if step.is_multiple_of(3) {
            save(&disk(), &series.path(step), step, 3).unwrap();
        }
    }
}

#[test]
fn killed_at_any_moment() {
    const KILLS: usize = 60;
    let dir = tempfile::tempdir().unwrap();
    let series = Series::new(dir.path().join("checkpoints"), disk());
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let seed = since.as_nanos() as u64 | 1;
    let (mut random, mut halves, mut last) = (seed, 0, 0);
    for round in 0..KILLS {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "saves_until_killed", "--nocapture"])
            .env(SAVES_TO, series.dir())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        // Killed some time after its first save, so that every one gets further than the one before.
        let mut steps = Vec::new();
        while let Some(Ok(line)) = lines.next() {
            if let Some((_, step)) = line.split_once("saved ") {
                steps.push(step.parse::<u64>().unwrap());
                break;
            }
        }
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        std::thread::sleep(Duration::from_micros(random % 30_000));
        child.kill().unwrap();
        child.wait().unwrap();
        steps.extend(
            lines
                .map_while(io::Result::ok)
                .filter_map(|line| line.strip_prefix("saved ")?.parse::<u64>().ok()),
        );
        let said = format!("round {round}, seed {seed}");
        let names = std::fs::read_dir(series.dir()).unwrap().map(|entry| entry.unwrap().file_name());
        halves +=
            usize::from(names.map(|name| name.to_string_lossy().into_owned()).any(|name| name.contains('.')));
        all_whole(&series);
        series.recover().unwrap();
        let latest = series.latest().unwrap();
        assert!(latest.broken.is_empty(), "{said}: {:?}", latest.broken);
        let step = load(&latest.path.expect("the first save was waited for"), 1 + round % 4).expect(&said);
        let saved = *steps.last().expect(&said);
        assert!(step >= saved && step >= last, "{said}: step {step}, saved {saved}, before {last}");
        assert!(Reader::open(series.path(step)).unwrap().verify().is_empty(), "{said}");
        last = step;
    }
    println!("{KILLS} kills, {halves} of them in the middle of a save; step {last}");
    assert!(halves > 0, "no kill came in the middle of a save");
}
