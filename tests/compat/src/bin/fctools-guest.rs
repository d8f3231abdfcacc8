//! The guest that the tests of fctools expect: a first process that answers HTTP on vsock port 8000
//! and gRPC on port 9000, and reboots on Ctrl-Alt-Del.
//!
//! What the calls have to answer follows from those tests. gRPC is spoken by hand: four calls with
//! one number each need no generated code.

use std::io;
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use h2::server::{self, SendResponse};
use h2::{RecvStream, SendStream};
use http::{HeaderMap, Request, Response};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_vsock::{VMADDR_CID_ANY, VsockAddr, VsockListener, VsockStream};

const HTTP: u32 = 8000;
const GRPC: u32 = 9000;

fn main() -> io::Result<()> {
    // A process of its own watches the keys: on a restored processor that is emulated, permission
    // for a port ends in a fault (QEMU wants a task register that is not busy, KVM restores it
    // busy), which must not end the guest. SAFETY: there is one thread, and no memory is passed.
    if unsafe { libc::fork() } == 0 {
        ctrl_alt_del()?;
        // SAFETY: no memory is passed; nothing here has anything to lose.
        unsafe { libc::reboot(libc::RB_AUTOBOOT) };
    }
    serve()
}

#[tokio::main(flavor = "current_thread")]
async fn serve() -> io::Result<()> {
    tokio::join!(
        listen(HTTP, |stream| Box::pin(http_call(stream))),
        listen(GRPC, |stream| Box::pin(grpc(stream)))
    );
    // A machine without vsock has nobody to listen to, and lives on.
    std::future::pending().await
}

/// Waits for the last of the three keys. The kernel has no driver for a keyboard, so its controller
/// is asked by hand.
fn ctrl_alt_del() -> io::Result<()> {
    const DATA: u16 = 0x60;
    const STATUS: u16 = 0x64;
    const FULL: u8 = 1;
    const DELETE: u8 = 0x71;
    // SAFETY: no memory is passed; from here on this process may use these ports.
    if unsafe { libc::ioperm(DATA.into(), 5, 1) } != 0 {
        return Err(io::Error::last_os_error());
    }
    loop {
        while port(STATUS) & FULL != 0 {
            if port(DATA) == DELETE {
                return Ok(());
            }
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn port(number: u16) -> u8 {
    let value: u8;
    // SAFETY: reads a port that this process may use; no memory is touched.
    unsafe { std::arch::asm!("in al, dx", in("dx") number, out("al") value, options(nomem, nostack)) };
    value
}

type Served = std::pin::Pin<Box<dyn Future<Output = io::Result<()>> + Send>>;

async fn listen(port: u32, serve: fn(VsockStream) -> Served) {
    let Ok(listener) = VsockListener::bind(VsockAddr::new(VMADDR_CID_ANY, port)) else { return };
    while let Ok((stream, _)) = listener.accept().await {
        tokio::spawn(serve(stream));
    }
}

/// `POST /ping {"a": 4, "b": 5}` is answered with their product.
async fn http_call(mut stream: VsockStream) -> io::Result<()> {
    let mut request = Vec::new();
    while !request.ends_with(b"}") {
        if stream.read_buf(&mut request).await? == 0 {
            return Ok(());
        }
    }
    let text = String::from_utf8_lossy(&request).into_owned();
    let numbers = text.rsplit("\r\n").next().unwrap_or_default();
    let numbers = numbers.split(|c: char| !c.is_ascii_digit()).filter_map(|n| n.parse::<u32>().ok());
    let body = format!(r#"{{"c":{}}}"#, numbers.product::<u32>());
    let len = body.len();
    let answer = format!(
        "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len}\r\n\r\n{body}"
    );
    stream.write_all(answer.as_bytes()).await
}

async fn grpc(stream: VsockStream) -> io::Result<()> {
    let mut connection = server::handshake(stream).await.map_err(io::Error::other)?;
    while let Some(call) = connection.accept().await {
        let (request, respond) = call.map_err(io::Error::other)?;
        tokio::spawn(answer(request, respond));
    }
    Ok(())
}

async fn answer(
    request: Request<RecvStream>,
    mut respond: SendResponse<Bytes>,
) -> Result<(), h2::Error> {
    let method = request.uri().path().rsplit('/').next().unwrap_or_default().to_owned();
    let head = Response::builder().header("content-type", "application/grpc");
    let mut out = respond.send_response(head.body(()).expect("a head"), false)?;
    let numbers = read_numbers(request.into_body()).await?;
    let first = numbers.first().copied().unwrap_or(0);
    match method.as_str() {
        "Unary" => send(&mut out, first * first)?,
        "ClientStreaming" => send(&mut out, numbers.iter().product())?,
        "ServerStreaming" => (0..first).try_for_each(|_| send(&mut out, first))?,
        _ => numbers.iter().try_for_each(|number| send(&mut out, *number))?,
    }
    let mut trailers = HeaderMap::new();
    trailers.insert("grpc-status", "0".parse().expect("a value"));
    out.send_trailers(trailers)
}

/// The number in each message: five bytes of frame, a tag, a varint.
async fn read_numbers(mut body: RecvStream) -> Result<Vec<u32>, h2::Error> {
    let mut bytes = BytesMut::new();
    while let Some(chunk) = body.data().await {
        let chunk = chunk?;
        body.flow_control().release_capacity(chunk.len())?;
        bytes.extend_from_slice(&chunk);
    }
    let mut numbers = Vec::new();
    let mut rest = &bytes[..];
    while let Some((frame, more)) = rest.split_at_checked(5) {
        let len = u32::from_be_bytes([frame[1], frame[2], frame[3], frame[4]]) as usize;
        let Some((message, more)) = more.split_at_checked(len) else { break };
        numbers
            .push(message.iter().skip(1).rev().fold(0, |n, byte| n << 7 | u32::from(byte & 0x7f)));
        rest = more;
    }
    Ok(numbers)
}

fn send(out: &mut SendStream<Bytes>, number: u32) -> Result<(), h2::Error> {
    let mut message = BytesMut::new();
    message.put_u8(8);
    let mut left = number;
    while left >= 0x80 {
        message.put_u8(left as u8 | 0x80);
        left >>= 7;
    }
    message.put_u8(left as u8);
    let mut frame = BytesMut::new();
    frame.put_u8(0);
    frame.put_u32(message.len() as u32);
    frame.extend_from_slice(&message);
    out.send_data(frame.freeze(), false)
}
