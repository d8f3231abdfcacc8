//! Processes with a terminal: line editing, job control, sizes, full-screen programs.

use std::io::Write;
use std::time::{Duration, Instant};

use pvmm::exec::{ExecRequest, ExecStatus, ExitStatus, Process, ProcessEvent, Stdin, WindowSize};

use crate::fixture::Fixture;

const SIZE: WindowSize = WindowSize { rows: 24, columns: 80 };

/// A process at whose terminal the test sits.
struct Session {
    process: Process,
    keys: Stdin,
    screen: String,
}

impl Session {
    fn start(fixture: &Fixture, request: ExecRequest) -> Self {
        let request = request.env("PS1", "$ ").env("TERM", "xterm").terminal(SIZE);
        let mut process = fixture.agent().start(&request).unwrap();
        let keys = process.take_stdin().unwrap();
        Self { process, keys, screen: String::new() }
    }

    fn shell(fixture: &Fixture) -> Self {
        let shell = ["bash", "--norc", "--noprofile", "-i"];
        let mut this = Self::start(fixture, ExecRequest::argv(shell));
        this.sees("$ ");
        this
    }

    fn types(&mut self, keys: &str) -> &mut Self {
        self.keys.write_all(keys.as_bytes()).unwrap();
        self
    }

    /// Waits until the text is on the screen, and takes everything up to it off.
    fn sees(&mut self, text: &str) -> &mut Self {
        let deadline = Instant::now() + Duration::from_secs(10);
        loop {
            if let Some(at) = self.screen.find(text) {
                self.screen.drain(..at + text.len());
                return self;
            }
            match self.process.next_event(Some(deadline)).unwrap() {
                Some(ProcessEvent::Stdout(bytes)) => {
                    self.screen += &String::from_utf8_lossy(&bytes);
                }
                other => panic!("{text:?} did not come: {other:?} after {:?}", self.screen),
            }
        }
    }

    fn resizes(&mut self, rows: u16, columns: u16) -> &mut Self {
        self.process.signaller().resize(WindowSize { rows, columns }).unwrap();
        self
    }

    fn ends(self) -> ExitStatus {
        drop(self.keys);
        self.process.wait().unwrap()
    }
}

#[test]
fn terminal_is_one_and_has_its_size_and_its_changes() {
    let fixture = Fixture::start();
    let mut session = Session::shell(&fixture);
    session.types("tty; stty size\r").sees("/dev/pts/").sees("24 80");
    session.resizes(50, 132).types("stty size\r").sees("50 132");
    // In two pieces, so that the echo of the line is not taken for its output.
    session.types("trap 'echo chan''ged' WINCH; echo s''et\r").sees("set\r\n").sees("$ ");
    session.resizes(30, 90).types("\r").sees("changed");
    session.types("exit 7\r");
    assert_eq!(session.ends().shell_code(), 7);
}

#[test]
fn terminal_edits_lines() {
    let fixture = Fixture::start();
    let mut session = Session::shell(&fixture);
    // Two characters taken back; then to the front of the line and something before it.
    session.types("cho one-twoXX\x7f\x7f\x01e\r").sees("one-two\r\n");
    // The line before, by the arrow.
    session.types("\x1b[A\r").sees("one-two\r\n");
    session.types("exit\r");
    assert!(session.ends().success());
    // A program that leaves editing to the terminal: a letter of two bytes goes as a whole.
    let mut session = Session::start(&fixture, ExecRequest::shell("read x; echo \"<$x>\""));
    session.types("aä\x7fb\r").sees("<ab>");
    assert!(session.ends().success());
}

#[test]
fn ctrl_c_interrupts_the_foreground_job_and_the_shell_goes_on() {
    let fixture = Fixture::start();
    let mut session = Session::shell(&fixture);
    // It speaks for itself, so that the key does not come before it has the terminal.
    session.types("sh -c 'echo begun; exec sleep 60'\r").sees("begun\r\n");
    session.types("\x03").sees("^C").sees("$ ");
    session.types("echo code $?\r").sees("code 130");
    // And Ctrl-Z stops it, to go on later.
    session.types("sh -c 'echo again; exec sleep 60'\r").sees("again\r\n");
    session.types("\x1a").sees("Stopped");
    session.types("jobs; kill %1; fg; wait\r").sees("exec sleep 60");
    session.types("exit 3\r").types("exit 3\r");
    assert_eq!(session.ends().shell_code(), 3);
}

#[test]
fn ctrl_c_reaches_a_program_that_no_shell_has_given_the_terminal() {
    let fixture = Fixture::start();
    let mut session = Session::start(&fixture, ExecRequest::argv(["sleep", "5"]));
    session.types("\x03").sees("^C");
    assert_eq!(session.ends().shell_code(), 130);
}

#[test]
fn full_screen_program_draws_scrolls_and_leaves() {
    let fixture = Fixture::start();
    let file = fixture.path("lines");
    let lines: String = (1..=200).map(|n| format!("line number {n}\n")).collect();
    std::fs::write(&file, lines).unwrap();
    let mut session =
        Session::start(&fixture, ExecRequest::argv(["less".as_ref(), file.as_os_str()]));
    session.sees("line number 23");
    session.types("G").sees("line number 200");
    session.types("?number 77\r").sees("line \u{1b}[7mnumber 77");
    session.types("q");
    assert!(session.ends().success());
}

#[test]
fn end_of_input_ends_a_shell() {
    let fixture = Fixture::start();
    let session = Session::shell(&fixture);
    assert!(session.ends().success());
}

#[test]
fn terminal_belongs_to_the_user_and_ends_with_its_process() {
    let fixture = Fixture::start();
    let line = "stat -c %u $(tty); (sleep 60; echo late) & exit 5";
    let mut session = Session::start(&fixture, ExecRequest::shell(line).user("12345:12345"));
    session.sees("12345");
    let begun = Instant::now();
    let status = session.ends();
    assert_eq!(status.status, ExecStatus::Exited { code: 5 });
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
}

#[test]
fn output_of_a_terminal_arrives_complete() {
    let fixture = Fixture::start();
    let request = ExecRequest::shell("seq 100000").terminal(SIZE);
    let output = fixture.agent().exec(&request).unwrap();
    let expected: String = (1..=100_000).map(|n| format!("{n}\r\n")).collect();
    assert!(output.stdout.bytes == expected.as_bytes(), "{} bytes", output.stdout.bytes.len());
}
