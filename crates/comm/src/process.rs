//! What processes of ranks need and the standard library has no safe call for: a session of their own, an end
//! together with whoever started them, signals to a whole tree, and cores.

use std::io;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, ExitStatus};

/// Makes the process that `command` starts the leader of a session, and thereby of a process group, which
/// [`signal_tree`] reaches as a whole; has the kernel kill it when the *thread* that spawns it ends, so spawn
/// from one that lives as long as the process should; and binds it to `cores`, if there are any.
pub fn detach(command: &mut Command, cores: &[usize]) {
    let cores = (!cores.is_empty()).then(|| core_set(cores));
    let parent = std::process::id();
    let prepare = move || {
        // SAFETY: these calls take no pointers.
        let orphaned = unsafe {
            // It fails only for a leader, which a process just forked is not.
            libc::setsid();
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            libc::getppid() as u32 != parent
        };
        if orphaned {
            return Err(io::ErrorKind::Interrupted.into());
        }
        if let Some(cores) = &cores {
            // SAFETY: the pointer is to a set of the size that is given. Cores that are taken away between
            // their count and this call are no reason not to start.
            unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), cores) };
        }
        Ok(())
    };
    // SAFETY: between fork and exec only system calls are made; nothing is allocated and no lock is taken.
    unsafe { command.pre_exec(prepare) };
}

/// Sends `signal` to every process of the tree whose leader was started with [`detach`], but for those that
/// left it for a session of their own. No error where all are gone already.
pub fn signal_tree(leader: u32, signal: i32) -> io::Result<()> {
    let leader = i32::try_from(leader).ok().filter(|leader| *leader > 1);
    let leader = leader.ok_or(io::ErrorKind::InvalidInput)?;
    // SAFETY: takes no pointers.
    if unsafe { libc::kill(-leader, signal) } == 0 {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    if error.raw_os_error() == Some(libc::ESRCH) { Ok(()) } else { Err(error) }
}

/// Ends this process at once: nothing of it is tidied up, so nothing that hangs can hold it up.
pub fn end_now(status: i32) -> ! {
    // SAFETY: takes no pointers, and does not return.
    unsafe { libc::_exit(status) }
}

/// Sleeps until a child has ended, and leaves it to be reaped: until then its number, and that of its group,
/// belong to nobody else, so the rest of its tree can still be reached safely.
pub fn wait_without_reaping(child: u32) -> io::Result<ExitStatus> {
    loop {
        // SAFETY: all zeros is a value of this plain structure.
        let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
        // SAFETY: the pointer is to a structure of the type that is asked for.
        let code = unsafe { libc::waitid(libc::P_PID, child, &mut info, libc::WEXITED | libc::WNOWAIT) };
        if code == 0 {
            // SAFETY: after waitid the structure is of the kind that has a status.
            let status = unsafe { info.si_status() };
            let exited = info.si_code == libc::CLD_EXITED;
            return Ok(ExitStatus::from_raw(if exited { (status & 0xff) << 8 } else { status & 0x7f }));
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// The cores this process may run on.
pub fn allowed_cores() -> io::Result<Vec<usize>> {
    let mut set = core_set(&[]);
    // SAFETY: the pointer is to a set of the size that is given.
    if unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut set) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the index lies within the set.
    let holds = |core: &usize| unsafe { libc::CPU_ISSET(*core, &set) };
    Ok((0..libc::CPU_SETSIZE as usize).filter(holds).collect())
}

fn core_set(cores: &[usize]) -> libc::cpu_set_t {
    // SAFETY: all zeros is the empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    for core in cores.iter().filter(|core| **core < libc::CPU_SETSIZE as usize) {
        // SAFETY: the index lies within the set.
        unsafe { libc::CPU_SET(*core, &mut set) };
    }
    set
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Stdio;

    #[test]
    fn a_tree_is_ended_as_a_whole_and_its_leader_waits_to_be_reaped() {
        let mut command = Command::new("sh");
        command.args(["-c", "sleep 60 & sleep 60"]).stdout(Stdio::piped());
        detach(&mut command, &[]);
        let mut child = command.spawn().unwrap();
        signal_tree(child.id(), libc::SIGTERM).unwrap();
        for _ in 0..2 {
            assert_eq!(wait_without_reaping(child.id()).unwrap().signal(), Some(libc::SIGTERM));
        }
        // The pipe ends once the grandchild, which holds it too, has ended.
        let mut output = String::new();
        io::Read::read_to_string(&mut child.stdout.take().unwrap(), &mut output).unwrap();
        assert_eq!(child.wait().unwrap().signal(), Some(libc::SIGTERM));
        signal_tree(child.id(), libc::SIGTERM).unwrap();
        assert!(signal_tree(0, libc::SIGTERM).is_err() && signal_tree(u32::MAX, libc::SIGTERM).is_err());
    }

    #[test]
    fn a_process_is_bound_to_its_cores() {
        let core = *allowed_cores().unwrap().last().unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", "grep Cpus_allowed_list /proc/self/status; exit 7"]).stdout(Stdio::piped());
        detach(&mut command, &[core]);
        let child = command.spawn().unwrap();
        assert_eq!(wait_without_reaping(child.id()).unwrap().code(), Some(7));
        let output = child.wait_with_output().unwrap();
        let line = String::from_utf8(output.stdout).unwrap();
        assert_eq!(line.split_whitespace().last(), Some(core.to_string().as_str()));
    }
}
