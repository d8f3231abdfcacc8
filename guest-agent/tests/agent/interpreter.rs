//! Interpreter sessions, with the real interpreters: state, outputs by type, errors, interrupts,
//! ends.

use std::fs;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use pvmm::agent::{
    Agent, AgentError, CodeEvent, CodeOutput, CodeRequest, Language, RunStatus, SessionOptions,
};

use crate::fixture::{Fixture, in_time, wait_for};

fn python(agent: &Agent) -> String {
    agent.open_session(&SessionOptions::new(Language::Python)).unwrap().session
}

fn node(agent: &Agent) -> String {
    agent.open_session(&SessionOptions::new(Language::Node)).unwrap().session
}

fn run(agent: &Agent, session: &str, code: &str) -> CodeOutput {
    // A call that hangs is a failure and not a hanging suite.
    let request = CodeRequest::new(code).timeout(Duration::from_secs(20));
    agent.run_code(session, &request).unwrap()
}

/// The last expression's value as text.
fn value(agent: &Agent, session: &str, code: &str) -> String {
    let output = run(agent, session, code);
    assert_eq!(output.error, None, "{code}");
    output.result.unwrap_or_else(|| panic!("{code} has no value")).text("text/plain").unwrap()
}

fn thrown(agent: &Agent, session: &str, code: &str) -> (String, String, String) {
    let output = run(agent, session, code);
    assert_eq!(output.report.status, RunStatus::Error {});
    let error = output.error.unwrap();
    (error.name, error.value, error.traceback)
}

#[test]
fn python_state_outputs_and_values_persist_across_calls() {
    let fixture = Fixture::start();
    let agent = fixture.agent();
    let s = python(&agent);
    assert_eq!(run(&agent, &s, "import math\nx = 41").result, None);
    assert_eq!(value(&agent, &s, "x + 1"), "42");
    assert_eq!(value(&agent, &s, "_ * 2"), "84");
    assert_eq!(run(&agent, &s, "x;").result, None);
    let output = run(
        &agent,
        &s,
        "import sys, os\nprint('out')\nprint('err', file=sys.stderr)\nos.system('echo sub')\n'v'",
    );
    assert_eq!(output.stdout, b"out\nsub\n");
    assert_eq!(output.stderr, b"err\n");
    assert_eq!(output.result.unwrap().text("text/plain").unwrap(), "'v'");
    assert_eq!(output.report.status, RunStatus::Ok {});
    assert_eq!(output.report.run, 5);
    assert_eq!(value(&agent, &s, "__name__"), "'__main__'");
    let code = "class A: pass\nimport pickle\ntype(pickle.loads(pickle.dumps(A()))).__name__";
    assert_eq!(value(&agent, &s, code), "'A'");
    assert_eq!(thrown(&agent, &s, "input()").0, "EOFError");
}

#[test]
fn spare_interpreter_is_taken_with_the_settings_of_a_request_and_only_once() {
    let fixture = Fixture::start();
    let agent = fixture.agent();
    agent.open_spare_session(Language::Python).unwrap();
    agent.open_spare_session(Language::Python).unwrap();
    assert!(agent.sessions().unwrap().is_empty());
    let pid = |options: &SessionOptions| agent.open_session(options).unwrap().pid;
    let env = |name: &[u8]| vec![(name.to_vec(), b"a=b c".to_vec())];
    // One that cannot become what is asked for stays.
    let other = SessionOptions { env: env(b"PYTHONPATH"), ..SessionOptions::new(Language::Python) };
    let started = pid(&other);
    let cwd = Some(b"/usr".to_vec());
    let wanted = SessionOptions { env: env(b"WORD"), cwd, ..other };
    let wanted = SessionOptions { name: Some("mine".into()), ..wanted };
    let taken = pid(&wanted);
    assert!(taken < started, "started before: {taken}, {started}");
    let seen = "import os; os.getcwd(), os.environ['WORD'], 'PVMM_SPARE' in os.environ";
    assert_eq!(value(&agent, "mine", seen), "('/usr', 'a=b c', False)");
    assert!(pid(&SessionOptions::new(Language::Python)) > started);
    let missing = SessionOptions { cwd: Some(b"/no/such".to_vec()), name: None, ..wanted };
    agent.open_spare_session(Language::Python).unwrap();
    assert!(agent.open_session(&missing).is_err());
}

#[test]
fn spare_interpreter_finds_packages_that_were_installed_after_its_start() {
    let (fixture, home) = (Fixture::start(), tempfile::tempdir().unwrap());
    let agent = fixture.agent();
    agent.open_spare_session(Language::Python).unwrap();
    let line = "import site; print(site.getusersitepackages())";
    let place = Command::new("python3").args(["-c", line]).env("HOME", home.path()).output();
    let place = String::from_utf8(place.unwrap().stdout).unwrap();
    fs::create_dir_all(place.trim()).unwrap();
    fs::write(format!("{}/late.py", place.trim()), "word = 7\n").unwrap();
    let env = vec![(b"HOME".to_vec(), home.path().to_str().unwrap().into())];
    let options = SessionOptions { env, ..SessionOptions::named(Language::Python, "mine") };
    agent.open_session(&options).unwrap();
    assert_eq!(value(&agent, "mine", "import late; late.word"), "7");
}

#[test]
fn python_value_comes_in_every_form_it_has() {
    let fixture = Fixture::start();
    let agent = fixture.agent();
    let s = python(&agent);
    let code = "class T:\n  def _repr_html_(self): return '<b>é</b>'\n  def _repr_png_(self): return b'\\x89PNG'\n  def __repr__(self): return 'T!'\nT()";
    let bundle = run(&agent, &s, code).result.unwrap();
    assert_eq!(bundle.text("text/html").unwrap(), "<b>é</b>");
    assert_eq!(bundle.get("image/png"), Some(&b"\x89PNG"[..]));
    assert_eq!(bundle.text("text/plain").unwrap(), "T!");
    let bundle = run(&agent, &s, "{'a': [1, None]}").result.unwrap();
    assert_eq!(bundle.text("application/json").unwrap(), r#"{"a": [1, null]}"#);
    let code = "class M:\n  def _repr_mimebundle_(self, include=None, exclude=None): return {'text/x-own': 'o', 'application/json': {'k': 1}}\nM()";
    let bundle = run(&agent, &s, code).result.unwrap();
    assert_eq!(bundle.text("text/x-own").unwrap(), "o");
    assert_eq!(bundle.text("application/json").unwrap(), r#"{"k": 1}"#);
    // One that fails is told on standard error and costs nothing else.
    let code = "class F:\n  def _repr_html_(self): raise ValueError('bad html')\n  def __repr__(self): return 'F'\nF()";
    let output = run(&agent, &s, code);
    assert_eq!(output.result.unwrap().parts, [("text/plain".to_owned(), b"F".to_vec())]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("bad html"));
    assert_eq!(output.report.status, RunStatus::Ok {});
    let output = run(&agent, &s, "print(1)\ndisplay(T(), 7)\nprint(2)");
    assert_eq!(output.displays.len(), 2);
    assert_eq!(output.displays[0].get("image/png"), Some(&b"\x89PNG"[..]));
    assert_eq!(output.displays[1].text("text/plain").unwrap(), "7");
    assert_eq!(output.result, None);
}

#[test]
fn python_output_and_displays_keep_their_order_and_stream() {
    let fixture = Fixture::start();
    let agent = fixture.agent();
    let s = python(&agent);
    let code = "import time\nfor i in range(3):\n  print('p', i)\n  display(i)\ntime.sleep(1.5)\nprint('last')";
    let begun = Instant::now();
    let mut run = agent.start_code(&s, &CodeRequest::new(code)).unwrap();
    let mut said = String::new();
    loop {
        match run.next_event(None).unwrap().unwrap() {
            CodeEvent::Stdout(bytes) => {
                said += &String::from_utf8(bytes).unwrap();
                assert!(said.ends_with("last\n") || begun.elapsed() < Duration::from_millis(1400));
            }
            CodeEvent::Display(bundle) => {
                said += &format!("[{}]", bundle.text("text/plain").unwrap())
            }
            CodeEvent::Ended(_) => break,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(said, "p 0\n[0]p 1\n[1]p 2\n[2]last\n");
}

#[test]
fn python_lines_for_a_shell_run_in_one() {
    let fixture = Fixture::start();
    let agent = fixture.agent();
    let s = python(&agent);
    let output = run(&agent, &s, "if True:\n  !echo \"it's $((6 * 7))\"; exit 3\n_exit_code");
    assert_eq!(output.stdout, b"it's 42\n");
    assert_eq!(output.result.unwrap().text("text/plain").unwrap(), "3");
    // Text is text, and the line that is wrong is shown.
    assert_eq!(value(&agent, &s, "len(\"\"\"\n!echo\n\"\"\")"), "7");
    assert!(thrown(&agent, &s, "!true\nx = (").2.contains("x = ("));
}

#[test]
fn python_errors_name_type_value_and_the_code_s_own_lines() {
    let fixture = Fixture::start();
    let agent = fixture.agent();
    let s = python(&agent);
    let (name, text, trace) = thrown(&agent, &s, "def f():\n  return 1 / 0\nf()");
    assert_eq!((&name[..], &text[..]), ("ZeroDivisionError", "division by zero"));
    assert!(trace.contains("<cell 1>") && trace.contains("return 1 / 0"), "{trace}");
    assert!(!trace.contains("evaluate"), "the driver's own frames are no concern: {trace}");
    assert_eq!(thrown(&agent, &s, "x = (").0, "SyntaxError");
    assert_eq!(thrown(&agent, &s, "raise SystemExit(3)").0, "SystemExit");
    assert_eq!(thrown(&agent, &s, "def r(): r()\nr()").0, "RecursionError");
    let nested = "try:\n  {}['k']\nexcept KeyError as e:\n  raise ValueError('outer') from e";
    let (_, _, trace) = thrown(&agent, &s, nested);
    assert!(trace.contains("KeyError") && trace.contains("direct cause"), "{trace}");
    assert_eq!(value(&agent, &s, "1"), "1");
}

#[test]
fn python_awaits_at_the_top() {
    let fixture = Fixture::start();
    let agent = fixture.agent();
    let s = python(&agent);
    run(&agent, &s, "import asyncio\nasync def f(x):\n  await asyncio.sleep(0.01)\n  return x * 2");
    assert_eq!(value(&agent, &s, "y = await f(4)\nawait f(y)"), "16");
    assert_eq!(value(&agent, &s, "y"), "8");
    let late = CodeRequest::new("await asyncio.sleep(600)").timeout(Duration::from_millis(300));
    let output = agent.run_code(&s, &late).unwrap();
    assert!(output.report.timed_out);
    assert_eq!(output.error.unwrap().name, "KeyboardInterrupt");
    assert_eq!(value(&agent, &s, "await f(y)"), "16");
}

#[test]
fn python_code_out_of_time_is_interrupted_and_the_session_goes_on() {
    let fixture = Fixture::start();
    let agent = fixture.agent();
    let s = python(&agent);
    for code in [
        "while True: x = 1",
        "import time; x = 1; time.sleep(600)",
        "import os; x = 1; os.system('sleep 600')",
    ] {
        let begun = Instant::now();
        let request = CodeRequest::new(code).timeout(Duration::from_millis(400));
        let output = agent.run_code(&s, &request).unwrap();
        assert!(output.report.timed_out, "{code}");
        assert!(begun.elapsed() < Duration::from_secs(4), "{code}");
        if !code.contains("os.system") {
            let error = output.error.unwrap();
            assert_eq!(error.name, "KeyboardInterrupt", "{code}");
            assert!(!error.traceback.contains("in interrupt"), "{}", error.traceback);
        }
        assert_eq!(value(&agent, &s, "x"), "1");
    }
    let shown = run(&agent, &s, "print('a' * 10)\nx");
    assert_eq!(shown.stdout, b"aaaaaaaaaa\n");
}

#[test]
fn python_code_that_heeds_no_interrupt_is_killed_after_the_grace() {
    let fixture = Fixture::start();
    let agent = fixture.agent();
    let s = python(&agent);
    let code = "import time, subprocess\nsubprocess.Popen(['setsid', 'sleep', '610'])\nprint('partial', flush=True)\nwhile True:\n  try:\n    while True: time.sleep(0.01)\n  except KeyboardInterrupt: pass";
    let request = CodeRequest {
        timeout: Some(Duration::from_millis(300)),
        grace: Some(Duration::from_millis(300)),
        ..CodeRequest::new(code)
    };
    let output = agent.run_code(&s, &request).unwrap();
    assert!(output.report.timed_out);
    assert!(matches!(output.report.status, RunStatus::Died { status: Some(_) }), "{output:?}");
    assert_eq!(output.stdout, b"partial\n");
    let refused = agent.run_code(&s, &CodeRequest::new("1")).unwrap_err();
    assert_eq!(refused.errno(), Some(libc::ENOENT), "{refused}");
    assert!(agent.sessions().unwrap().is_empty());
}

#[test]
fn interpreter_that_ends_itself_is_told_with_its_status() {
    let fixture = Fixture::start();
    let agent = fixture.agent();
    let s = python(&agent);
    let output = run(&agent, &s, "import os\nprint('bye', flush=True)\nos._exit(3)");
    let RunStatus::Died { status: Some(status) } = output.report.status else {
        panic!("{output:?}")
    };
    assert_eq!(status, pvmm::exec::ExecStatus::Exited { code: 3 });
    assert_eq!(output.stdout, b"bye\n");
}

#[test]
fn session_outlives_its_connection_and_an_abandoned_call_is_interrupted() {
    let fixture = Fixture::start();
    let first = fixture.agent();
    let options = SessionOptions::named(Language::Python, "mine");
    first.open_session(&options).unwrap();
    run(&first, "mine", "x = 'kept'\nimport time");
    let mut endless = first
        .start_code("mine", &CodeRequest::new("print('on', flush=True)\nwhile True: time.sleep(1)"))
        .unwrap();
    assert!(matches!(endless.next_event(None).unwrap(), Some(CodeEvent::Stdout(_))));
    let second = fixture.agent();
    let busy = second.run_code("mine", &CodeRequest::new("1")).unwrap_err();
    assert!(
        matches!(&busy, AgentError::Refused(refusal) if format!("{:?}", refusal.code) == "Busy"),
        "{busy}"
    );
    assert!(second.sessions().unwrap()[0].busy);
    drop(endless);
    drop(first);
    let session = second.open_session(&options).unwrap();
    assert_eq!(session.session, "mine");
    wait_for("the session", || second.run_code("mine", &CodeRequest::new("1")).is_ok());
    assert_eq!(value(&second, "mine", "x"), "'kept'");
    let taken = SessionOptions { reuse: false, ..options };
    assert_eq!(second.open_session(&taken).unwrap_err().errno(), Some(libc::EEXIST));
}

#[test]
fn sessions_are_apart_listed_capped_and_closed() {
    in_time(|| {
        let fixture = Fixture::start();
        let agent = fixture.agent();
        let (a, b) = (python(&agent), python(&agent));
        run(&agent, &a, "x = 'a'");
        assert_eq!(thrown(&agent, &b, "x").0, "NameError");
        let listed = agent.sessions().unwrap();
        assert_eq!(listed.len(), 2);
        assert!(listed.iter().all(|it| it.version.starts_with("3.") && !it.busy), "{listed:?}");
        let mut running = agent
            .start_code(&a, &CodeRequest::new("print(1, flush=True)\nwhile True: pass"))
            .unwrap();
        running.next_event(None).unwrap();
        agent.close_session(&a).unwrap();
        let ended = loop {
            if let Some(CodeEvent::Ended(report)) = running.next_event(None).unwrap() {
                break report;
            }
        };
        assert!(matches!(ended.status, RunStatus::Died { .. }));
        assert_eq!(agent.close_session(&a).unwrap_err().errno(), Some(libc::ENOENT));
        assert_eq!(agent.sessions().unwrap().len(), 1);
        for wrong in ["", "a/b", &"x".repeat(65)] {
            assert!(agent.open_session(&SessionOptions::named(Language::Python, wrong)).is_err());
        }
        let nowhere = SessionOptions {
            program: Some("/no/python".into()),
            ..SessionOptions::new(Language::Python)
        };
        assert_eq!(agent.open_session(&nowhere).unwrap_err().errno(), Some(libc::ENOENT));
        let wrong = SessionOptions {
            program: Some("false".into()),
            ..SessionOptions::new(Language::Python)
        };
        let refused = agent.open_session(&wrong).unwrap_err();
        assert!(refused.to_string().contains("did not start"), "{refused}");
        wait_for("the failed one to be gone", || agent.sessions().unwrap().len() == 1);
    });
}

#[test]
fn output_without_end_is_capped_held_and_costs_no_memory() {
    let fixture = Fixture::start();
    let agent = fixture.agent();
    let s = python(&agent);
    run(&agent, &s, "1");
    let before = fixture.private_kib();
    let request =
        CodeRequest { output_limit: Some(1000), ..CodeRequest::new("print('x' * 50_000_000)") };
    let output = agent.run_code(&s, &request).unwrap();
    assert_eq!(output.stdout.len(), 1000);
    assert_eq!(output.report.stdout.total, 50_000_001);
    assert!(output.truncated);
    // A client that does not read holds the code up, and may still interrupt it.
    let flood = CodeRequest::new("while True: print('x' * 1000)").timeout(Duration::from_secs(1));
    let mut slow = agent.start_code(&s, &flood).unwrap();
    thread::sleep(Duration::from_millis(2500));
    assert!(fixture.private_kib() < before + 2048, "{before}, {}", fixture.private_kib());
    let report = loop {
        if let Some(CodeEvent::Ended(report)) = slow.next_event(None).unwrap() {
            break report;
        }
    };
    assert!(report.timed_out);
    assert_eq!(report.status, RunStatus::Error {});
    let output = run(
        &agent,
        &s,
        "class B:\n  def _repr_png_(self): return b'x' * (17 << 20)\n  def __repr__(self): return 'B'\nB()",
    );
    assert_eq!(output.result.unwrap().get("image/png"), None);
    let big = run(&agent, &s, "class C:\n  def _repr_png_(self): return b'x' * (15 << 20)\nC()")
        .result
        .unwrap();
    assert_eq!(big.get("image/png").unwrap().len(), 15 << 20);
}

#[test]
fn hostile_code_on_the_driver_s_descriptor_ends_its_session_only() {
    let fixture = Fixture::start();
    let agent = fixture.agent();
    let (bad, good) = (python(&agent), python(&agent));
    let code = "import os, stat\nfor fd in os.listdir('/proc/self/fd'):\n  try:\n    if stat.S_ISSOCK(os.fstat(int(fd)).st_mode): os.write(int(fd), b'\\xff' * 100)\n  except OSError: pass";
    let output = run(&agent, &bad, code);
    assert!(matches!(output.report.status, RunStatus::Died { .. }), "{output:?}");
    assert_eq!(value(&agent, &good, "1"), "1");
    // Closing its own outputs, forking without an end, and threads that go on printing.
    let s = python(&agent);
    assert_eq!(run(&agent, &s, "import os\nos.fork() == 0").report.status, RunStatus::Ok {});
    assert_eq!(value(&agent, &s, "2"), "2");
    run(
        &agent,
        &s,
        "import threading, time\ndef bg():\n  time.sleep(0.2); print('later')\nthreading.Thread(target=bg).start()",
    );
    thread::sleep(Duration::from_millis(500));
    assert_eq!(run(&agent, &s, "0").stdout, b"later\n");
    run(&agent, &s, "import os\nos.close(1)\nos.close(2)");
    assert_eq!(value(&agent, &s, "3"), "3");
    agent.close_session(&good).unwrap();
}

#[test]
fn node_state_values_await_and_errors() {
    let fixture = Fixture::start();
    let agent = fixture.agent();
    let s = node(&agent);
    assert_eq!(run(&agent, &s, "const x = 41; let y = 1").result, None);
    assert_eq!(value(&agent, &s, "x + y"), "42");
    let output = run(&agent, &s, "console.log('out'); console.error('err'); ({a: [1, null]})");
    assert_eq!((&output.stdout[..], &output.stderr[..]), (&b"out\n"[..], &b"err\n"[..]));
    let bundle = output.result.unwrap();
    assert_eq!(bundle.text("application/json").unwrap(), r#"{"a":[1,null]}"#);
    assert_eq!(value(&agent, &s, "{b: 2}"), "{ b: 2 }");
    let code = "display({_repr_html_: () => '<i>h</i>', _repr_png_: () => Buffer.from([137, 80])})";
    let shown = run(&agent, &s, code).displays;
    assert_eq!(shown[0].text("text/html").unwrap(), "<i>h</i>");
    assert_eq!(shown[0].get("image/png"), Some(&[137, 80][..]));
    assert_eq!(
        value(&agent, &s, "await new Promise(r => setTimeout(() => r('late'), 20))"),
        "'late'"
    );
    assert_eq!(value(&agent, &s, "require('path').basename('/a/b')"), "'b'");
    let (name, text, trace) = thrown(&agent, &s, "function f() { null.x }\nf()");
    assert_eq!(name, "TypeError");
    assert!(text.contains("null") && trace.contains("at f"), "{trace}");
    assert_eq!(thrown(&agent, &s, "let z = (").0, "SyntaxError");
    assert_eq!(thrown(&agent, &s, "await Promise.reject(new RangeError('r'))").0, "RangeError");
    assert_eq!(thrown(&agent, &s, "throw 7").1, "7");
    assert_eq!(value(&agent, &s, "x"), "41");
}

#[test]
fn node_code_out_of_time_is_interrupted_and_the_session_goes_on() {
    let fixture = Fixture::start();
    let agent = fixture.agent();
    let s = node(&agent);
    run(&agent, &s, "const kept = 5");
    for code in ["while (true) {}", "await new Promise(() => {})"] {
        let request = CodeRequest::new(code).timeout(Duration::from_millis(400));
        let output = agent.run_code(&s, &request).unwrap();
        assert!(output.report.timed_out, "{code}");
        assert_eq!(output.error.unwrap().name, "Interrupted", "{code}");
        assert_eq!(value(&agent, &s, "kept"), "5");
    }
    let died = run(&agent, &s, "process.exit(4)");
    assert!(matches!(died.report.status, RunStatus::Died { .. }));
}

/// As much of matplotlib as a session asks of it, for machines that have none.
const STAND_IN: &str = "figures = {}
class Figure:
  def savefig(self, to, **options): to.write(b'\\x89PNG' + options['format'].encode())
def plot(*_): figures[1] = Figure()
def get_fignums(): return list(figures)
def figure(number): return figures[number]
def close(which): figures.clear()";

#[test]
fn figure_that_the_code_left_open_comes_out_once() {
    let fixture = Fixture::start();
    let agent = fixture.agent();
    let s = python(&agent);
    std::fs::create_dir(fixture.path("matplotlib")).unwrap();
    std::fs::write(fixture.path("matplotlib/__init__.py"), "").unwrap();
    std::fs::write(fixture.path("matplotlib/pyplot.py"), STAND_IN).unwrap();
    let path = format!("import sys\nsys.path.insert(0, {:?})", fixture.folder.path());
    let code = format!("{path}\nimport matplotlib.pyplot as plt\nplt.plot([1, 4, 9])");
    let shown = run(&agent, &s, &code).displays;
    assert_eq!((shown.len(), shown[0].get("image/png")), (1, Some(&b"\x89PNGpng"[..])));
    assert!(run(&agent, &s, "1").displays.is_empty());
}
