//! Tests that run commands through a port, with a socket in the place of the virtio-serial device.
//!
//! The client writes single frames, so that it can also send invalid sequences.

use std::os::unix::net::UnixStream;

use super::*;

/// The client's end of a port that serves one command.
struct Client {
    stream: UnixStream,
    server: thread::JoinHandle<io::Result<()>>,
}

/// The complete output and the outcome of a command.
struct Said {
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    credit: usize,
    outcome: Outcome,
}

impl Client {
    fn run(script: &str) -> Client {
        Client::open(&["/bin/bash", "-c", script], "/", None)
    }

    fn open(argv: &[&str], cwd: &str, terminal: Option<sys::Size>) -> Client {
        let (stream, device) = UnixStream::pair().unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        sys::set_nonblocking(&device).unwrap();
        let server = thread::spawn(move || {
            let mut port = Port::new(File::from(OwnedFd::from(device)));
            port.serve_one(|_| {})?;
            while !port.outgoing.is_empty() {
                let fd = Waiting { fd: Some(port.device.as_fd()), events: WRITABLE };
                let [events] = sys::poll([fd], None)?;
                port.transfer(events & WRITABLE)?;
            }
            Ok(())
        });
        let request = Request {
            argv: argv.iter().map(|word| word.as_bytes().to_vec()).collect(),
            env: vec![(b"PATH".to_vec(), b"/usr/bin:/bin".to_vec())],
            cwd: cwd.as_bytes().to_vec(),
            time_since_epoch: Duration::ZERO,
            terminal,
        };
        let mut client = Client { stream, server };
        client.send(Kind::Open, &serde_json::to_vec(&request).unwrap());
        client
    }

    fn send(&mut self, kind: Kind, payload: &[u8]) {
        let mut bytes = Vec::new();
        frame::encode(&mut bytes, kind, payload);
        self.stream.write_all(&bytes).unwrap();
    }

    /// Waits for the first output, so that later frames reach a running command.
    fn wait_for_output(&mut self) -> Vec<u8> {
        let frame = frame::read(&mut self.stream).unwrap().unwrap();
        assert_eq!(frame.kind, Kind::Stdout);
        frame.payload
    }

    fn finish(mut self) -> Said {
        let (mut stdout, mut stderr, mut credit) = (Vec::new(), Vec::new(), 0);
        let outcome = loop {
            let frame = frame::read(&mut self.stream).unwrap().unwrap();
            match frame.kind {
                Kind::Stdout => stdout.extend(frame.payload),
                Kind::Stderr => stderr.extend(frame.payload),
                Kind::Credit => {
                    credit += u32::from_le_bytes(frame.payload.try_into().unwrap()) as usize;
                }
                Kind::Exit => break serde_json::from_slice(&frame.payload).unwrap(),
                other => panic!("{other:?} from the host"),
            }
        };
        self.server.join().unwrap().unwrap();
        Said { stdout, stderr, credit, outcome }
    }
}

#[test]
fn command_that_writes_to_both_streams_keeps_them_apart() {
    let said = Client::run("echo out; echo err >&2; exit 7").finish();
    assert_eq!((&said.stdout[..], &said.stderr[..]), (&b"out\n"[..], &b"err\n"[..]));
    assert_eq!(said.outcome, Outcome { code: 7, message: None });
}

#[test]
fn command_ended_by_a_signal_reports_it_as_a_shell_does() {
    assert_eq!(Client::run("kill -SEGV $$").finish().outcome.code, 128 + 11);
}

#[test]
fn command_that_does_not_exist_is_127_with_a_reason() {
    let outcome = Client::open(&["/no/such/program"], "/", None).finish().outcome;
    assert_eq!(outcome.code, 127);
    assert!(outcome.message.unwrap().contains("/no/such/program"));
}

#[test]
fn command_in_a_missing_directory_is_not_started() {
    let outcome = Client::open(&["/bin/true"], "/no/such/dir", None).finish().outcome;
    assert_eq!(outcome.code, 125);
}

#[test]
fn stdin_that_was_taken_is_credited() {
    let mut client = Client::run("cat");
    client.send(Kind::Stdin, &[b'x'; 10_000]);
    client.send(Kind::StdinEnd, &[]);
    let said = client.finish();
    assert_eq!((said.stdout.len(), said.credit), (10_000, 10_000));
}

#[test]
fn stdin_beyond_the_window_ends_the_command() {
    let mut client = Client::run("sleep 60");
    for _ in 0..=STDIN_WINDOW / DATA_CHUNK + 4 {
        client.send(Kind::Stdin, &[0; DATA_CHUNK]);
    }
    assert_eq!(client.finish().outcome.code, 128 + 15);
}

#[test]
fn signal_reaches_the_whole_process_group() {
    let mut client = Client::run("trap 'exit 3' INT; (sleep 60) & echo ready; wait");
    client.wait_for_output();
    client.send(Kind::Signal, &[libc::SIGINT as u8]);
    assert_eq!(client.finish().outcome.code, 3);
}

#[test]
fn hang_up_ends_a_command_that_ignores_being_asked() {
    let mut client = Client::run("trap '' TERM; echo ready; while :; do sleep 0.1; done");
    client.wait_for_output();
    client.send(Kind::HangUp, &[]);
    assert_eq!(client.finish().outcome.code, 128 + 9);
}

#[test]
fn child_that_keeps_the_pipes_does_not_keep_the_port() {
    let began = Instant::now();
    let said = Client::run("sleep 15 & echo done").finish();
    assert_eq!(said.stdout, b"done\n");
    assert!(began.elapsed() < Duration::from_secs(10));
}

#[test]
fn output_that_nobody_reads_ends_its_writer() {
    let mut client = Client::run("yes; exit 9");
    client.wait_for_output();
    client.send(Kind::CloseOutput, &[1]);
    assert_eq!(client.finish().outcome.code, 9);
}

#[test]
fn command_with_a_terminal_has_its_size_and_its_keys() {
    let argv = ["/bin/bash", "-c", "size=$(stty size); echo $size; exec sleep 60"];
    let mut client = Client::open(&argv, "/", Some((24, 81)));
    assert_eq!(client.wait_for_output(), b"24 81\r\n");
    client.send(Kind::Stdin, b"\x03");
    assert_eq!(client.finish().outcome.code, 128 + 2);
}
