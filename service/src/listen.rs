//! Accepts connections on TCP and Unix sockets and serves requests on them.
//!
//! The number of connections is bounded, and each step of a connection has a deadline.

use std::fs;
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use pvmm_sandbox::Failure;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{Semaphore, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio_rustls::TlsAcceptor;

use crate::options::Listen;

/// The most connections at a time.
const MAX_CONNECTIONS: usize = 2048;
/// How long a client may take for the head of a request, and may be idle between two.
const HEAD_TIME: Duration = Duration::from_secs(120);
/// How long a TLS handshake may take.
const HANDSHAKE_TIME: Duration = Duration::from_secs(10);
/// The rest after a failed accept: descriptors may be exhausted.
const REST: Duration = Duration::from_millis(100);
/// How long requests may go on after a shutdown was asked for.
const GRACE: Duration = Duration::from_secs(10);

enum Socket {
    Tcp(TcpListener),
    Unix(UnixListener),
}

/// A bound socket. A Unix socket that this server has made is removed with it.
pub struct Bound {
    socket: Socket,
    /// The address, as clients write it.
    pub url: String,
    own_path: Option<PathBuf>,
}

impl Drop for Bound {
    fn drop(&mut self) {
        if let Some(path) = &self.own_path {
            let _ = fs::remove_file(path);
        }
    }
}

/// Binds a place to listen on.
pub async fn bind(listen: &Listen, with_tls: bool) -> Result<Bound, Failure> {
    let failed = |error: io::Error| {
        Failure::usage(format!("--listen {listen}: {error}"))
            .hint("choose another address, or end the server that has it")
    };
    match listen {
        Listen::Tcp(address) => {
            warn_if_open(*address, with_tls);
            let socket = TcpListener::bind(address).await.map_err(failed)?;
            let address = socket.local_addr().map_err(failed)?;
            Ok(Bound { socket: Socket::Tcp(socket), url: url(address, with_tls), own_path: None })
        }
        Listen::Unix(path) => {
            remove_stale(path).await.map_err(failed)?;
            let socket = UnixListener::bind(path).map_err(failed)?;
            fs::set_permissions(path, fs::Permissions::from_mode(0o600)).map_err(failed)?;
            let (url, own_path) = (listen.to_string(), Some(path.clone()));
            Ok(Bound { socket: Socket::Unix(socket), url, own_path })
        }
    }
}

/// Takes a socket that listens already. Its path, if it has one, stays when the server ends.
pub fn take(socket: OwnedFd, with_tls: bool) -> Result<Bound, Failure> {
    let failed = |error: io::Error| {
        Failure::usage(format!("a socket of LISTEN_FDS: {error}"))
            .hint("write ListenStream= with ADDR:PORT or a path in the socket unit")
    };
    let tcp = std::net::TcpListener::from(socket);
    tcp.set_nonblocking(true).map_err(failed)?;
    if let Ok(address) = tcp.local_addr() {
        warn_if_open(address, with_tls);
        let socket = Socket::Tcp(TcpListener::from_std(tcp).map_err(failed)?);
        return Ok(Bound { socket, url: url(address, with_tls), own_path: None });
    }
    let unix = std::os::unix::net::UnixListener::from(OwnedFd::from(tcp));
    let address = unix.local_addr().map_err(failed)?;
    let path = address.as_pathname().ok_or_else(|| failed(io::ErrorKind::Unsupported.into()))?;
    let url = Listen::Unix(path.to_owned()).to_string();
    let socket = Socket::Unix(UnixListener::from_std(unix).map_err(failed)?);
    Ok(Bound { socket, url, own_path: None })
}

/// Returns the address of a server as clients on this host write it.
fn url(mut address: SocketAddr, with_tls: bool) -> String {
    if address.ip().is_unspecified() {
        address.set_ip(match address {
            SocketAddr::V4(_) => std::net::Ipv4Addr::LOCALHOST.into(),
            SocketAddr::V6(_) => std::net::Ipv6Addr::LOCALHOST.into(),
        });
    }
    format!("{}://{address}", if with_tls { "https" } else { "http" })
}

fn warn_if_open(address: SocketAddr, with_tls: bool) {
    if !address.ip().is_loopback() && !with_tls {
        log::warn!("{address}: tokens cross the network as they are; use --tls-cert");
    }
}

/// Removes a socket that a dead server left; refuses anything else.
async fn remove_stale(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
        Ok(metadata) if !metadata.file_type().is_socket() => {
            Err(io::Error::new(io::ErrorKind::AlreadyExists, "a file is there"))
        }
        Ok(_) if tokio::net::UnixStream::connect(path).await.is_ok() => {
            Err(io::ErrorKind::AddrInUse.into())
        }
        Ok(_) => fs::remove_file(path),
    }
}

/// The connections of all sockets.
pub struct Connections {
    router: Router,
    tls: Option<TlsAcceptor>,
    slots: Arc<Semaphore>,
    /// Turns true when the server shuts down.
    stop: watch::Sender<bool>,
}

impl Connections {
    /// Prepares to serve requests with `router`.
    pub fn new(router: Router, tls: Option<TlsAcceptor>) -> Self {
        let slots = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        Self { router, tls, slots, stop: watch::Sender::new(false) }
    }

    /// Accepts connections on a socket until the server shuts down.
    pub fn serve(&self, bound: Bound) -> JoinHandle<()> {
        let (router, tls) = (self.router.clone(), self.tls.clone());
        let (slots, mut stop) = (Arc::clone(&self.slots), self.stop.subscribe());
        tokio::spawn(async move {
            let mut open = JoinSet::new();
            loop {
                let Ok(slot) = Arc::clone(&slots).acquire_owned().await else { break };
                let accepted = tokio::select! {
                    _ = stop.wait_for(|stop| *stop) => break,
                    accepted = accept(&bound) => accepted,
                };
                let Ok(stream) = accepted else {
                    tokio::time::sleep(REST).await;
                    continue;
                };
                let (router, stop) = (router.clone(), stop.clone());
                let tls = tls.clone().filter(|_| matches!(bound.socket, Socket::Tcp(_)));
                open.spawn(async move {
                    let _slot = slot;
                    if let Some(stream) = secure(stream, tls).await {
                        converse(stream, router, stop).await;
                    }
                });
                while open.try_join_next().is_some() {}
            }
            let _ =
                tokio::time::timeout(GRACE, async { while open.join_next().await.is_some() {} })
                    .await;
        })
    }

    /// Tells all sockets to stop.
    pub fn stop(&self) {
        self.stop.send_replace(true);
    }
}

/// Serves the requests of one connection. At a shutdown, the request that runs is the last.
async fn converse(stream: Box<dyn Stream>, router: Router, mut stop: watch::Receiver<bool>) {
    let service = TowerToHyperService::new(router);
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIME)
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades();
    let mut connection = std::pin::pin!(connection);
    let ended = tokio::select! {
        ended = connection.as_mut() => Some(ended),
        _ = stop.wait_for(|stop| *stop) => None,
    };
    let ended = match ended {
        Some(ended) => ended,
        None => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        log::debug!("a connection failed: {error}");
    }
}

trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

async fn accept(bound: &Bound) -> io::Result<Box<dyn Stream>> {
    match &bound.socket {
        Socket::Tcp(socket) => {
            let (stream, _) = socket.accept().await?;
            let _ = stream.set_nodelay(true);
            Ok(Box::new(stream))
        }
        Socket::Unix(socket) => Ok(Box::new(socket.accept().await?.0)),
    }
}

async fn secure(stream: Box<dyn Stream>, tls: Option<TlsAcceptor>) -> Option<Box<dyn Stream>> {
    let Some(tls) = tls else { return Some(stream) };
    match tokio::time::timeout(HANDSHAKE_TIME, tls.accept(stream)).await {
        Ok(Ok(stream)) => Some(Box::new(stream)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn passed_socket_keeps_its_address_and_its_path() {
        let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = tcp.local_addr().unwrap();
        assert_eq!(take(tcp.into(), true).unwrap().url, format!("https://{address}"));
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("serve.sock");
        let unix = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let bound = take(unix.into(), true).unwrap();
        assert_eq!(bound.url, format!("unix:{}", path.display()));
        let (client, served) = tokio::join!(tokio::net::UnixStream::connect(&path), accept(&bound));
        assert!(client.is_ok() && served.is_ok());
        drop(bound);
        assert!(path.exists());
    }
}
