//! The launcher, as a program that starts small shell commands.

use comm::store::Store;
use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// What the nodes of a job know.
const SECRET: &str = "0123456789abcdef0123456789abcdef";

/// `launch` with these words before the command, which is a shell's.
fn launch(words: &str, script: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_shardloom"));
    command.arg("launch").args(words.split_whitespace()).args(["--", "sh", "-c", script]);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    for name in ["RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "SHARDLOOM_SECRET"] {
        command.env_remove(name);
    }
    if words.contains("--nnodes") {
        command.env("SHARDLOOM_SECRET", SECRET);
    }
    command
}

struct Ended {
    status: i32,
    stdout: String,
    stderr: String,
}

fn ended(output: Output) -> Ended {
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    let status = output.status.code().expect("the launcher is not killed");
    Ended { status, stdout: text(output.stdout), stderr: text(output.stderr) }
}

fn run(words: &str, script: &str) -> Ended {
    ended(launch(words, script).output().unwrap())
}

fn sorted(text: &str) -> Vec<&str> {
    let mut lines: Vec<&str> = text.lines().collect();
    lines.sort_unstable();
    lines
}

fn eventually(what: &str, mut is: impl FnMut() -> bool) {
    let started = Instant::now();
    while !is() {
        assert!(started.elapsed() < Duration::from_secs(60), "{what} has not come");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Whether a process is there, and no zombie.
fn lives(pid: &str) -> bool {
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.trim())).unwrap_or_default();
    stat.rsplit_once(')').is_some_and(|(_, rest)| !rest.trim_start().starts_with(['Z', 'X']))
}

fn read_soon(path: &Path) -> String {
    eventually(&path.display().to_string(), || {
        fs::read_to_string(path).is_ok_and(|text| text.ends_with('\n'))
    });
    fs::read_to_string(path).unwrap()
}

fn signal(child: &Child, name: &str) {
    let kill = Command::new("kill").args([format!("-{name}"), child.id().to_string()]).status();
    assert!(kill.unwrap().success());
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// `<log_dir>/<run_id>_<rand>`.
fn only_entry(dir: &Path) -> PathBuf {
    let entries: Vec<PathBuf> = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(entries.len(), 1, "{entries:?}");
    entries[0].clone()
}

#[test]
fn workers_find_torchruns_environment() {
    let names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK \
                 ROLE_WORLD_SIZE ROLE_NAME MASTER_ADDR TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS \
                 TORCHELASTIC_RUN_ID TORCHELASTIC_USE_AGENT_STORE OMP_NUM_THREADS";
    let script = format!(
        "for n in {names}; do eval v=\\$$n; all=\"$all $v\"; done; echo $all; \
         echo all $SHARDLOOM_SECRET ${{#SHARDLOOM_SECRET}} $MASTER_PORT >&2; basename $TORCHELASTIC_ERROR_FILE >&2"
    );
    let ended = run("--nproc-per-node 2 --role r --max-restarts 3 --rdzv-id job", &script);
    let rest = "127.0.0.1 0 3 job True 1";
    let want = [format!("0 0 2 2 0 1 0 2 r {rest}"), format!("1 1 2 2 0 1 1 2 r {rest}")];
    assert_eq!(sorted(&ended.stdout), want);
    // One secret and one port for all.
    let lines = sorted(&ended.stderr);
    assert!(lines[0] == lines[1] && lines[0].contains(" 32 "), "{lines:?}");
    assert_eq!(lines[2..], ["error.json", "error.json"]);
    assert_eq!(ended.status, 0);
}

#[test]
fn what_the_user_set_stays_and_defaults_come_from_the_environment() {
    let mut command = launch("", "echo $OMP_NUM_THREADS $LOCAL_WORLD_SIZE $MASTER_PORT");
    let port = free_port().to_string();
    command.env("OMP_NUM_THREADS", "5").env("PET_NPROC_PER_NODE", "2").env("PET_MASTER_PORT", &port);
    let ended = ended(command.output().unwrap());
    let line = format!("5 2 {port}");
    assert_eq!(ended.stdout.lines().collect::<Vec<_>>(), [&line, &line], "{}", ended.stderr);
    for (value, len) in [("1", 32), ("0", 4)] {
        let mut standalone = launch("", "echo ${#TORCHELASTIC_RUN_ID}");
        let standalone = self::ended(standalone.env("PET_STANDALONE", value).output().unwrap());
        assert_eq!(standalone.stdout, format!("{len}\n"), "{}", standalone.stderr);
    }
}

#[test]
fn cores_are_divided() {
    let script = "grep Cpus_allowed_list /proc/self/status | cut -f2";
    if std::thread::available_parallelism().unwrap().get() < 2 {
        return println!("skipped: there is one core");
    }
    let divided = run("--nproc-per-node 2", script).stdout;
    let divided: Vec<&str> = divided.lines().collect();
    assert_ne!(divided[0], divided[1]);
    let free = run("--nproc-per-node 2 --affinity none", script).stdout;
    let free: Vec<&str> = free.lines().collect();
    assert_eq!(free[0], free[1]);
}

#[test]
fn logs_tee_and_filter() {
    let dir = tempfile::tempdir().unwrap();
    let words = |more: &str| format!("--nproc-per-node 2 --log-dir {} {more}", dir.path().display());
    let script = "echo out $RANK; echo err $RANK >&2";
    let tee = run(&words("--tee 3 --role w"), script);
    assert_eq!(sorted(&tee.stdout), ["[w0]:out 0", "[w1]:out 1"]);
    assert_eq!(sorted(&tee.stderr), ["[w0]:err 0", "[w1]:err 1"]);
    let run_dir = only_entry(dir.path());
    assert!(run_dir.file_name().unwrap().to_str().unwrap().starts_with("none_"));
    for rank in 0..2 {
        let log = |name: &str| fs::read_to_string(run_dir.join(format!("attempt_0/{rank}/{name}"))).unwrap();
        assert_eq!(log("stdout.log"), format!("out {rank}\n"));
        assert_eq!(log("stderr.log"), format!("err {rank}\n"));
    }
    fs::remove_dir_all(&run_dir).unwrap();

    let some = run(&words("-r 0:1 --tee 1:2 --local-ranks-filter 1 --rdzv-id a/b"), script);
    assert_eq!((some.stdout.as_str(), some.stderr.as_str()), ("out 1\n", "[default1]:err 1\n"));
    let run_dir = only_entry(dir.path());
    assert!(run_dir.file_name().unwrap().to_str().unwrap().starts_with("a_b_"));
    // Hidden from the console, but not lost.
    assert_eq!(fs::read_to_string(run_dir.join("attempt_0/0/stderr.log")).unwrap(), "err 0\n");
}

#[test]
fn lines_of_ranks_do_not_mix() {
    let script =
        "for i in 1 2 3 4 5 6 7 8; do printf aaaa$RANK; sleep 0.01; echo bbbb$RANK; done; printf end";
    let ended = run("--nproc-per-node 3", script);
    let whole = |line: &&str| ["aaaa0bbbb0", "aaaa1bbbb1", "aaaa2bbbb2"].contains(line);
    let (lines, rest): (Vec<&str>, Vec<&str>) = ended.stdout.lines().partition(whole);
    assert_eq!((lines.len(), rest), (24, vec!["end"; 3]), "{}", ended.stdout);
}

#[test]
fn the_first_failure_is_shown_first() {
    // Rank 1 says why and takes its time to end; rank 0 fails of it, sooner.
    let dir = tempfile::tempdir().unwrap();
    let script = r#"if [ $RANK = 1 ]; then
        printf '%s' '{"message":{"message":"no such\nweight","extraInfo":{"timestamp":"1"}}}' > $TORCHELASTIC_ERROR_FILE
        echo > DIR/said; sleep 100
      fi; while [ ! -e DIR/said ]; do sleep 0.05; done; sleep 0.1; exit 4"#;
    let ended = run("--nproc-per-node 2", &script.replace("DIR", &dir.path().display().to_string()));
    assert_eq!(ended.status, 1);
    let text = &ended.stderr;
    assert!(text.starts_with("shardloom: rank 1 failed: "), "{text}");
    assert!(
        text.contains("it says: no such\n    weight\n") && text.contains("after it: rank 0: exit status 4"),
        "{text}"
    );
}

#[test]
fn without_a_message_its_last_words_and_its_log_are_shown() {
    let dir = tempfile::tempdir().unwrap();
    let words = format!("--nproc-per-node 2 -r 3 --log-dir {}", dir.path().display());
    let script = "[ $RANK = 0 ] && sleep 60; for i in $(seq 99); do echo line $i >&2; done; kill -9 $$";
    let ended = run(&words, script);
    let text = &ended.stderr;
    assert!(text.starts_with("shardloom: rank 1 failed: ended by SIGKILL (local rank 1 on "), "{text}");
    assert!(text.contains("\n    line 99\n") && !text.contains("line 70\n"), "{text}");
    assert!(text.contains("attempt_0/1/stderr.log\n") && !text.contains("rank 0"), "{text}");
}

#[test]
fn ranks_start_again_as_often_as_they_may() {
    let script = "echo $TORCHELASTIC_RESTART_COUNT; [ $TORCHELASTIC_RESTART_COUNT = 2 ]";
    let enough = run("--max-restarts 2", script);
    assert_eq!((enough.status, enough.stdout.as_str()), (0, "0\n1\n2\n"), "{}", enough.stderr);
    assert!(enough.stderr.contains("start again, 2 of 2"));
    let few = run("--max_restarts=1", script);
    assert_eq!((few.status, few.stdout.as_str()), (1, "0\n1\n"));
    assert!(few.stderr.contains("attempt 1)"), "{}", few.stderr);
}

#[test]
fn signals_are_passed_on() {
    for (name, code, status) in [("TERM", 0, 0), ("INT", 5, 1), ("HUP", 0, 0)] {
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().display();
        let script = format!(
            "trap 'echo got {name}; exit {code}' {name}; echo > {at}/ready$RANK; while :; do sleep 0.02; done"
        );
        let child = launch("--nproc-per-node 2", &script).spawn().unwrap();
        (0..2).for_each(|rank| drop(read_soon(&dir.path().join(format!("ready{rank}")))));
        signal(&child, name);
        let ended = ended(child.wait_with_output().unwrap());
        assert_eq!(ended.stdout, format!("got {name}\ngot {name}\n"), "{}", ended.stderr);
        assert_eq!(ended.status, status);
    }
}

#[test]
fn what_nohup_ignores_stays_ignored() {
    let dir = tempfile::tempdir().unwrap();
    let launch = launch("", &format!("echo > {}/ready; sleep 0.3; echo done", dir.path().display()));
    let mut nohup = Command::new("sh");
    nohup.args(["-c", "trap '' HUP; exec \"$@\"", "sh"]).arg(launch.get_program()).args(launch.get_args());
    let child = nohup.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    read_soon(&dir.path().join("ready"));
    signal(&child, "HUP");
    let ended = ended(child.wait_with_output().unwrap());
    assert_eq!((ended.status, ended.stdout.as_str(), ended.stderr.as_str()), (0, "done\n", ""));
}

#[test]
fn the_whole_tree_ends_with_a_rank_and_with_the_launcher() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path().display();
    // Rank 0 takes no notice of SIGTERM; its child must go as well.
    let script = format!(
        "[ $RANK = 1 ] && {{ while [ ! -s {at}/child ]; do sleep 0.02; done; exit 1; }}
         trap '' TERM; sleep 100 & echo $! > {at}/child; wait; sleep 100"
    );
    let ended = run("--nproc-per-node 2 --grace-period 0.5", &script);
    assert!(ended.status == 1 && ended.stderr.contains("rank 1 failed: exit status 1"), "{}", ended.stderr);
    assert!(!lives(&read_soon(&dir.path().join("child"))));

    let script = format!("echo $$ > {at}/worker$RANK; exec sleep 100");
    let mut child = launch("--nproc-per-node 2", &script).spawn().unwrap();
    let workers = [0, 1].map(|rank| read_soon(&dir.path().join(format!("worker{rank}"))));
    child.kill().unwrap();
    child.wait().unwrap();
    eventually("the workers' end", || !workers.iter().any(|worker| lives(worker)));
}

#[test]
fn wrong_usage_is_status_2_and_says_what_to_do() {
    for (words, hint) in [("--nproc-per-nod 2", "--nproc-per-node"), ("--nnodes x", "MIN:MAX")] {
        let ended = run(words, "true");
        assert!(ended.status == 2 && ended.stderr.contains(hint), "{}: {}", ended.status, ended.stderr);
    }
    let mut missing = Command::new(env!("CARGO_BIN_EXE_shardloom"));
    let missing = ended(missing.args(["launch", "--", "/no/such/program"]).output().unwrap());
    assert!(missing.status == 2 && missing.stderr.contains("/no/such/program"), "{}", missing.stderr);
}

/// A rank of ours leaves its own words.
#[test]
fn train_writes_the_error_file() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_shardloom"));
    command.args(["launch", "-r", "3", "--", env!("CARGO_BIN_EXE_shardloom"), "train", "/no/run.toml"]);
    let ended = ended(command.output().unwrap());
    assert!(ended.stderr.contains("rank 0 failed: exit status 2"), "{}", ended.stderr);
    assert!(ended.stderr.contains("it says: /no/run.toml"), "{}", ended.stderr);
}

#[test]
fn a_port_in_use_is_named() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let ended = run(&format!("--master-port {port}"), "true");
    assert_eq!(ended.status, 1);
    for word in [&port.to_string(), "in use", "--standalone"] {
        assert!(ended.stderr.contains(word), "{}", ended.stderr);
    }
}

#[test]
fn an_endpoint_that_is_silent_or_no_store_is_given_up() {
    let port = free_port();
    let words = format!("--nnodes 2 --node-rank 1 --master-port {port} --rdzv-conf join_timeout=1");
    let silent = run(&words, "true");
    assert!(silent.status == 1 && silent.stderr.contains("attempts over "), "{}", silent.stderr);
    assert!(silent.stderr.contains(&format!("127.0.0.1:{port}")) && silent.stderr.contains("refused"));

    let stranger = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = stranger.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for mut stream in stranger.incoming().flatten() {
            let _ = stream.write_all(b"220 mail.example.org ESMTP\r\n");
        }
    });
    let words =
        format!("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{port} --rdzv-conf join_timeout=3");
    let garbage = run(&words, "true");
    assert!(garbage.status == 1 && garbage.stderr.contains("not a store"), "{}", garbage.stderr);
}

#[test]
fn garbage_on_the_port_does_not_disturb() {
    let (port, dir) = (free_port(), tempfile::tempdir().unwrap());
    let go = dir.path().join("go");
    let script = format!("while [ ! -e {} ]; do sleep 0.02; done; echo fine", go.display());
    let child = launch(&format!("--master-port {port}"), &script).spawn().unwrap();
    eventually("the launcher", || TcpStream::connect(("127.0.0.1", port)).is_ok());
    let mut stranger = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let mut answer = Vec::new();
    let _ = stranger.read_to_end(&mut answer);
    fs::write(&go, "").unwrap();
    let ended = ended(child.wait_with_output().unwrap());
    assert_eq!((answer.len(), ended.status, ended.stdout.as_str()), (0, 0, "fine\n"));
}

#[test]
fn a_stranger_is_refused_and_the_job_goes_on() {
    let short = Duration::from_secs(3);
    for (plain, kind) in [("", "secret"), ("--plain-store", "plain")] {
        let dir = tempfile::tempdir().unwrap();
        let port = free_port();
        let go = dir.path().join("go");
        let script = format!("while [ ! -e {} ]; do sleep 0.02; done; echo $SHARDLOOM_STORE", go.display());
        let child = launch(&format!("--master-port {port} {plain}"), &script).spawn().unwrap();
        eventually("the launcher", || TcpStream::connect(("127.0.0.1", port)).is_ok());
        let address = format!("127.0.0.1:{port}");
        let stranger = Store::connect_with(&address, short, None);
        let guess = Store::connect_with(&address, short, Some(b"guess".to_vec())).unwrap_err().to_string();
        assert!(guess.contains("SHARDLOOM_SECRET"), "{guess}");
        assert_eq!(stranger.is_ok(), kind == "plain", "{stranger:?}");
        fs::write(&go, "").unwrap();
        let ended = ended(child.wait_with_output().unwrap());
        assert_eq!((ended.status, ended.stdout), (0, format!("{kind}\n")), "{}", ended.stderr);
    }
}

#[test]
fn several_nodes_are_told_to_share_a_secret() {
    let mut command = launch("--nnodes 2", "true");
    let ended = ended(command.env_remove("SHARDLOOM_SECRET").output().unwrap());
    assert_eq!(ended.status, 2);
    for word in ["SHARDLOOM_SECRET", "on all of them", "--plain-store"] {
        assert!(ended.stderr.contains(word), "{}", ended.stderr);
    }
}

/// Two launchers with these words each.
fn two_nodes(words: [String; 2], script: &str) -> [Ended; 2] {
    let nodes = words.map(|words| launch(&words, script).spawn().unwrap());
    nodes.map(|node| ended(node.wait_with_output().unwrap()))
}

fn static_nodes(more: &str) -> [String; 2] {
    let port = free_port();
    // The second has another number of ranks.
    [0, 1].map(|node| {
        let ranks = node + 1;
        format!("--nnodes 2 --node-rank {node} --nproc-per-node {ranks} --master-port {port} {more}")
    })
}

const WHO: &str =
    "echo $RANK $LOCAL_RANK $GROUP_RANK $WORLD_SIZE $GROUP_WORLD_SIZE; echo $SHARDLOOM_SECRET >&2";

#[test]
fn two_nodes_meet() {
    let [first, second] = two_nodes(static_nodes(""), WHO);
    assert_eq!(first.stdout, "0 0 0 3 2\n", "{}", first.stderr);
    assert_eq!(sorted(&second.stdout), ["1 0 1 3 2", "2 1 1 3 2"], "{}", second.stderr);
    assert_eq!((first.status, second.status), (0, 0));
    let secrets: Vec<&str> = first.stderr.lines().chain(second.stderr.lines()).collect();
    assert_eq!(secrets, [SECRET; 3]);

    let at = format!(
        "--rdzv-backend c10d --rdzv-endpoint localhost:{} --rdzv-id x --nproc-per-node 2",
        free_port()
    );
    let nodes = two_nodes([0, 1].map(|_| format!("--nnodes 2 {at}")), WHO);
    let all = nodes.iter().map(|node| node.stdout.as_str()).collect::<String>();
    assert_eq!(sorted(&all), ["0 0 0 4 2", "1 1 0 4 2", "2 0 1 4 2", "3 1 1 4 2"], "{}", nodes[0].stderr);
}

#[test]
fn fewer_nodes_are_enough_after_a_last_call() {
    let at = format!("--rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{}", free_port());
    let alone = run(&format!("--nnodes 1:2 {at} --rdzv-conf last_call_timeout=0.2"), WHO);
    assert_eq!(alone.stdout, "0 0 0 1 1\n", "{}", alone.stderr);
    let missed = run(&format!("--nnodes 2:3 {at} --rdzv-conf join_timeout=0.2"), WHO);
    assert!(missed.status == 1 && missed.stderr.contains("1 of 2 nodes came"), "{}", missed.stderr);
}

#[test]
fn a_failure_ends_the_other_node_and_both_start_again() {
    let script = "if [ $TORCHELASTIC_RESTART_COUNT = 1 ]; then echo again; exit 0; fi
                  if [ $RANK = 2 ]; then echo broken >&2; exit 7; fi; exec sleep 100";
    let [first, second] = two_nodes(static_nodes("--max-restarts 1"), script);
    assert_eq!(
        (first.stdout.as_str(), second.stdout.as_str()),
        ("again\n", "again\nagain\n"),
        "{}",
        first.stderr
    );
    assert_eq!((first.status, second.status), (0, 0));

    let [first, second] = two_nodes(static_nodes(""), script);
    assert_eq!((first.status, second.status), (1, 1));
    for node in [first, second] {
        let says = node.stderr.contains("rank 2 failed: exit status 7") && node.stderr.contains("broken");
        assert!(says, "{}", node.stderr);
    }
}

#[test]
fn a_node_that_is_killed_ends_the_job() {
    for killed in [0, 1] {
        let words = static_nodes("--rdzv-conf keep_alive_interval=1,keep_alive_max_attempt=5");
        let dir = tempfile::tempdir().unwrap();
        let script = format!("echo > {}/ready$RANK; exec sleep 100", dir.path().display());
        let mut nodes = words.map(|words| launch(&words, &script).spawn().unwrap());
        (0..3).for_each(|rank| drop(read_soon(&dir.path().join(format!("ready{rank}")))));
        nodes[killed].kill().unwrap();
        let [first, second] = nodes;
        let (left, mut gone) = if killed == 0 { (second, first) } else { (first, second) };
        gone.wait().unwrap();
        let left = ended(left.wait_with_output().unwrap());
        let says = if killed == 0 { "the node that serves" } else { "node 1 (" };
        assert!(left.status == 1 && left.stderr.contains(says), "{}", left.stderr);
    }
}

#[test]
fn nodes_of_different_jobs_or_the_same_number_do_not_meet() {
    let port = free_port();
    let words = |node: usize, more: &str| {
        format!("--nnodes 2 --node-rank {node} --master-port {port} --rdzv-conf join_timeout=60 {more}")
    };
    let first = launch(&words(0, ""), "true").spawn().unwrap();
    let other = run(&words(1, "--rdzv-id other"), "true");
    assert!(other.status == 1 && other.stderr.contains("--rdzv-id"), "{}", other.stderr);
    let mut stranger = launch(&words(1, ""), "true");
    let stranger = ended(stranger.env("SHARDLOOM_SECRET", "guess").output().unwrap());
    assert!(stranger.status == 1 && stranger.stderr.contains("SHARDLOOM_SECRET"), "{}", stranger.stderr);
    let second = run(&words(1, ""), "true");
    let first = ended(first.wait_with_output().unwrap());
    assert_eq!((first.status, second.status), (0, 0), "{} {}", first.stderr, second.stderr);
}
