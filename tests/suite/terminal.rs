//! `pvmm run -it` and `pvmm exec -it` at a terminal.

use pvmm_tests::cli::User;
use pvmm_tests::terminal::Terminal;

#[test]
fn shell_in_a_vm_is_one_a_person_can_use() {
    let user = User::new();
    let mut run = user.command(["run", "-it", "--", "bash", "--norc"]);
    run.env("PS1", "never").env("TERM", "xterm-256color");
    let mut terminal = Terminal::start(run, 33, 111);
    terminal.sees("# ");
    assert!(terminal.is_raw());
    terminal.types("echo $TERM; stty size; tty\r").sees("xterm-256color");
    terminal.sees("33 111").sees("/dev/pts/").sees("# ");
    terminal.resizes(40, 100).types("stty size\r").sees("40 100").sees("# ");
    // Line editing by the shell: two letters are deleted, then one is inserted at the start.
    terminal.types("cho edXX\x7f\x7fited\x01e\r").sees("edited\r\n").sees("# ");
    // Line editing by the terminal, for programs that do not edit lines.
    terminal.types("read -p say: x; echo \"<$x>\"\r").sees("<$x>\"\r\n").sees("say:");
    terminal.types("abX\x7fc\r").sees("<abc>").sees("# ");
    // Ctrl-C ends the program in the guest, and the shell runs on.
    terminal.types("sh -c 'echo wait; exec sleep 600'\r").sees("wait\r\n");
    terminal.types("\x03").sees("# ").types("echo code $?\r").sees("code 130").sees("# ");
    // A program that uses the whole screen.
    let curses = "import curses; curses.wrapper(lambda s: (s.addstr(10, 5, 'drawn'), s.getkey()))";
    terminal.types(&format!("python3 -c \"{curses}\"\r")).sees("\x1b[11;6Hdrawn");
    terminal.types("q").sees("# ").types("exit 9\r");
    assert_eq!(terminal.ends(), Some(9));
    assert!(!terminal.is_raw());
}

#[test]
fn terminal_is_given_back_however_the_session_ends() {
    let user = User::new();
    let vm = user.detached(&[]);
    let session = || {
        let mut terminal = Terminal::start(user.command(["exec", "-it", &vm, "--", "sh"]), 24, 80);
        terminal.sees("# ");
        assert!(terminal.is_raw());
        terminal
    };
    let mut left = session();
    left.types("sleep 600\r").sees("600\r\n").types("\x1d\x1d\x1d");
    assert_eq!(left.ends(), Some(129));
    assert!(!left.is_raw());

    let mut hung_up = session();
    // SAFETY: no memory is passed; the signal goes to a child of this test.
    #[allow(unsafe_code)]
    unsafe {
        libc::kill(hung_up.pid(), libc::SIGHUP);
    }
    assert_eq!(hung_up.ends(), Some(129));
    assert!(!hung_up.is_raw());

    // The screen modes that a program has set are reset too.
    let mut orphan = session();
    orphan.types("printf '\\033[?1049h\\033[?25l'; echo on; sleep 600\r").sees("on\r\n");
    assert_eq!(user.pvmm(["kill", "--signal", "KILL", &vm]).code, Some(0));
    orphan.sees("\x1b[?25h\x1b[?1049l");
    assert_eq!(orphan.ends(), Some(125));
    assert!(!orphan.is_raw());

    let said = user.pvmm(["run", "-t", "--", "true"]);
    assert_eq!(said.code, Some(2));
    assert!(said.stderr.contains("-t: standard input is not a terminal"), "{said:?}");
}
