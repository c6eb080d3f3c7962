//! A model's files on rank 0's machine alone: two processes, of which one cannot see them.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

fn reference() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference/llama3").canonicalize().unwrap()
}

fn config(out: &Path, more: &str) -> String {
    format!(
        r#"
        model = {{ path = "model", config = "{reference}/config.json" {more} }}
        data = {{ kind = "batches", path = "{reference}/io.safetensors" }}
        train = {{ steps = 3, global_batch = 4 }}
        optimizer.lr = 1e-3
        device = {{ kind = "cpu", timeout_s = 60 }}
        output.dir = "{out}"
        log.sinks = ["jsonl"]
        "#,
        reference = reference().display(),
        out = out.display()
    )
}

/// One rank of two, in its own folder, where "model" may be.
fn start(dir: &Path, file: &Path, rank: usize, port: u16) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_shardloom"));
    command.current_dir(dir).arg("train").arg(file);
    let (rank, port) = (rank.to_string(), port.to_string());
    for (name, value) in [
        ("RANK", rank.as_str()),
        ("LOCAL_RANK", &rank),
        ("WORLD_SIZE", "2"),
        ("LOCAL_WORLD_SIZE", "2"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", &port),
    ] {
        command.env(name, value);
    }
    command.env_remove("SHARDLOOM_SECRET");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Trains as two processes; their statuses and what they said.
fn train(root: &Path, more: &str, see_files: [bool; 2]) -> [(bool, String); 2] {
    let file = root.join("run.toml");
    std::fs::write(&file, config(&root.join("out"), more)).unwrap();
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let children = [0, 1].map(|rank| {
        let dir = root.join(format!("machine{rank}"));
        std::fs::create_dir_all(&dir).unwrap();
        if see_files[rank] && !dir.join("model").exists() {
            std::os::unix::fs::symlink(reference(), dir.join("model")).unwrap();
        }
        start(&dir, &file, rank, port)
    });
    children.map(|child| {
        let out = child.wait_with_output().unwrap();
        (out.status.success(), String::from_utf8_lossy(&out.stderr).into_owned())
    })
}

#[test]
fn the_other_rank_is_sent_what_it_owns() {
    let [plain, hidden] = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    for (root, see_files) in [(&plain, [true, true]), (&hidden, [true, false])] {
        for (ended_well, said) in train(root.path(), "", see_files) {
            assert!(ended_well, "{said}");
        }
    }
    let model = |root: &Path| std::fs::read(root.join("out/model/model.safetensors")).unwrap();
    assert!(model(plain.path()) == model(hidden.path()), "the same weights, however they came");
}

#[test]
fn what_is_missing_is_said() {
    for (more, see_files, words) in [
        ("", [false, true], "model"),
        (", load = \"each\"", [true, false], "model"),
        (", freeze = [\"*norm*\"]", [true, false], "model.freeze"),
    ] {
        let root = tempfile::tempdir().unwrap();
        let ranks = train(root.path(), more, see_files);
        assert!(ranks.iter().all(|(ended_well, _)| !ended_well), "{ranks:?}");
        assert!(ranks.iter().any(|(_, said)| said.contains(words)), "{ranks:?}");
    }
}
