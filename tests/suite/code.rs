//! Interpreter sessions in a real guest, through the command.

use pvmm_tests::cli::{Said, User};

fn json(said: &Said) -> serde_json::Value {
    serde_json::from_slice(&said.stdout).unwrap_or_else(|e| panic!("{e}: {said:?}"))
}

#[test]
fn code_keeps_its_state_gives_every_form_and_heeds_its_time() {
    let user = User::new();
    let id = user.detached(&[]);
    let code = |rest: &[&str]| user.pvmm([&["code", &id], rest].concat());

    let said = code(&["-c", "x = 6 * 7\nprint('set')"]);
    assert_eq!((said.code, said.text()), (Some(0), "set"), "{said:?}");
    let said = code(&["-c", "x"]);
    assert_eq!((said.code, said.text()), (Some(0), "42"), "{said:?}");
    let said = user.pvmm_with_input(["code", &id], b"class T:\n  def _repr_html_(self): return '<b>'\n  def _repr_png_(self): return b'\\x89P'\n");
    assert_eq!(said.code, Some(0), "{said:?}");
    let told = json(&code(&[
        "--json",
        "-c",
        "import sys\nprint('o')\nprint('e', file=sys.stderr)\ndisplay({'a': x})\nT()",
    ]));
    assert_eq!((&told["stdout"], &told["stderr"]), (&"o\n".into(), &"e\n".into()), "{told}");
    assert_eq!(told["displays"][0]["application/json"]["a"], 42);
    assert_eq!(told["result"]["text/html"], "<b>");
    assert_eq!(told["result"]["image/png"], "iVA=");

    let said = code(&["-c", "1/0"]);
    assert_eq!(said.code, Some(1));
    assert!(said.stderr.contains("ZeroDivisionError") && said.stderr.contains("<cell"), "{said:?}");
    let said = code(&["--timeout", "1s", "-c", "x = 'kept'\nwhile True: pass"]);
    assert_eq!(said.code, Some(124), "{said:?}");
    assert!(said.stderr.contains("KeyboardInterrupt"), "{said:?}");
    assert_eq!(code(&["-c", "x"]).text(), "'kept'");

    assert_eq!(code(&["--session", "two", "-c", "'x' in globals()"]).text(), "False");
    let listed = json(&code(&["--list", "--json"]));
    let names: Vec<_> = listed.as_array().unwrap().iter().map(|it| &it["session"]).collect();
    assert_eq!(names, ["python", "two"], "{listed}");
    assert_eq!(code(&["--session", "two", "--close"]).code, Some(0));
    assert_eq!(code(&["--session", "two", "--close"]).code, Some(2));
    let said = code(&["-c", "import os; os._exit(3)"]);
    assert_eq!(said.code, Some(125), "{said:?}");
    assert_eq!(code(&["-c", "'x' in globals()"]).text(), "False");
    // The base template has no Node, and says so.
    assert_eq!(code(&["--lang", "node", "-c", "1"]).code, Some(127));
    assert_eq!(user.pvmm(["kill", &id]).code, Some(0));
}
