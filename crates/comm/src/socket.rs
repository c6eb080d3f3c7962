//! What sockets between ranks need and the standard library has no call for.

use std::io;
use std::net::TcpStream;
use std::os::fd::AsRawFd;

/// Has the kernel ask now and then whether the peer's machine is there, also when nothing is said.
pub(crate) fn keep_alive(socket: &TcpStream) -> io::Result<()> {
    let options = [
        (libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1),
        (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, 2),
        (libc::IPPROTO_TCP, libc::TCP_KEEPINTVL, 1),
        (libc::IPPROTO_TCP, libc::TCP_KEEPCNT, 5),
    ];
    for (level, name, value) in options {
        let value: libc::c_int = value;
        let (from, len) = ((&raw const value).cast(), size_of::<libc::c_int>() as libc::socklen_t);
        // SAFETY: the value is an int that outlives the call.
        if unsafe { libc::setsockopt(socket.as_raw_fd(), level, name, from, len) } != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}
