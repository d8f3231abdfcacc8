//! Running commands: what comes out, how they end, and what is left afterwards.

use pvmm::exec::{ExecRequest, ExecStatus};

use crate::fixture::Fixture;

#[test]
fn exec_argv_gives_output_and_code() {
    let fixture = Fixture::start();
    let output = fixture
        .agent()
        .exec(&ExecRequest::argv(["sh", "-c", "echo out; echo err >&2; exit 7"]))
        .unwrap();
    assert_eq!(output.stdout.bytes, b"out\n");
    assert_eq!(output.stderr.bytes, b"err\n");
    assert_eq!(output.status.status, ExecStatus::Exited { code: 7 });
    assert_eq!(output.status.shell_code(), 7);
}
