//! Interpreter sessions in a real guest, through `pvmm code`.

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
    // The base template has no Node.
    assert_eq!(code(&["--lang", "node", "-c", "1"]).code, Some(127));
    assert_eq!(user.pvmm(["kill", &id]).code, Some(0));
}

/// The guest has Debian's matplotlib and pandas; `make soak` makes its template.
#[test]
#[ignore = "make soak"]
fn soak_figures_and_tables_of_real_packages_come_out() {
    let user = User::new();
    let id = user.detached(&["--template", "soak-science", "--memory", "1G"]);
    let code = |text: &str| {
        let told = json(&user.pvmm(["code", &id, "--json", "--timeout", "5m", "-c", text]));
        assert!(told["error"].is_null(), "{told}");
        println!("code: {} ms for {text:?}", told["duration_ms"]);
        told
    };
    // Returns the number of figures, and checks that each is a PNG.
    let figures = |told: &serde_json::Value| {
        let shown = told["displays"].as_array().unwrap();
        for figure in shown {
            let png = figure["image/png"].as_str().unwrap_or_default();
            assert!(png.starts_with("iVBORw0KGgo") && png.len() > 4000, "{told}");
        }
        shown.len()
    };
    let left_open = code("import matplotlib.pyplot as plt\nplt.plot([1, 4, 9])\nNone");
    assert_eq!(figures(&left_open), 1, "{left_open}");
    let shown = code("for n in (1, 2):\n  plt.plot([n])\n  plt.show()\nprint('after')");
    assert_eq!((figures(&shown), &shown["stderr"]), (2, &"".into()), "{shown}");
    assert_eq!(figures(&code("1")), 0);

    let table = code("import pandas as pd\npd.DataFrame({'a': [1, 2], 'b': ['x', 'y']})");
    let html = table["result"]["text/html"].as_str().unwrap_or_default();
    assert!(html.contains("<table") && html.contains("<td>y</td>"), "{table}");
    let text = table["result"]["text/plain"].as_str().unwrap();
    assert!(text.contains("1  2  y"), "{table}");
    assert_eq!(user.pvmm(["kill", &id]).code, Some(0));
}
