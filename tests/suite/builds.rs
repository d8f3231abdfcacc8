//! Templates from Dockerfiles and archives, with real guests.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

use pvmm_tests::cli::{Said, User};
use tempfile::TempDir;

const DOCKERFILE: &str = "\
FROM python:3-slim
ENV GREETING=\"hello from a build\"
WORKDIR /app
COPY --chown=user app/ .
RUN python3 main.py > out.txt && \\
    stat -c '%U %a' main.py >> out.txt
USER user
RUN id -un > /home/user/who
CMD [\"cat\", \"out.txt\"]
";

/// A context with one program in it.
struct Context(TempDir);

impl Context {
    fn new() -> Self {
        let context = Self(TempDir::new().unwrap());
        fs::create_dir(context.path("app")).unwrap();
        let program = "import os; print(os.environ['GREETING'], os.getcwd())\n";
        fs::write(context.path("app/main.py"), program).unwrap();
        context
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn words(&self, name: &str, dockerfile: &str) -> Vec<String> {
        let file = self.path("Dockerfile");
        fs::write(&file, dockerfile).unwrap();
        let path = |path: &Path| path.to_str().unwrap().to_owned();
        let words = ["template", "build", name, "--dockerfile"].map(str::to_owned);
        words.into_iter().chain([path(&file), "--context".into(), path(self.0.path())]).collect()
    }

    fn build(&self, user: &User, name: &str, dockerfile: &str) -> Said {
        user.pvmm(self.words(name, dockerfile))
    }
}

/// A template that is removed after the test.
struct Built<'a>(&'a User, &'a str);

impl Drop for Built<'_> {
    fn drop(&mut self) {
        self.0.pvmm(["template", "rm", self.1]);
    }
}

fn kept(said: &Said) -> usize {
    said.stderr.lines().filter(|line| line.ends_with("(kept)")).count()
}

#[test]
fn dockerfile_is_built_in_steps_and_a_second_build_keeps_them() {
    let (user, context) = (User::new(), Context::new());
    let built = Built(&user, "suite-dockerfile");
    let said = context.build(&user, built.1, DOCKERFILE);
    assert_eq!((said.code, said.text()), (Some(0), built.1), "{said:?}");
    assert!(said.stderr.contains("Step 4/7: RUN python3 main.py"), "{said:?}");
    let line = "cat /app/out.txt /home/user/who; ls -A /tmp; stat -c '%U %a' /tmp /root";
    let run = user.pvmm(["run", "--template", built.1, "--", "sh", "-c", line]);
    let expected = "hello from a build /app\nuser 644\nuser\nroot 1777\nroot 700";
    assert_eq!(run.text(), expected, "{run:?}");
    let said =
        user.pvmm(["run", "--template", built.1, "--", "sh", "-c", "echo $GREETING; pwd; id -un"]);
    assert_eq!(said.text(), "hello from a build\n/app\nuser", "{said:?}");
    let inspected = user.pvmm(["template", "inspect", built.1, "--json"]);
    let manifest: serde_json::Value = serde_json::from_slice(&inspected.stdout).unwrap();
    assert_eq!(manifest["source"]["settings"]["cmd"][0], "cat", "{manifest}");
    assert_eq!(manifest["source"]["settings"]["user"], "user");

    let again = context.build(&user, built.1, DOCKERFILE);
    assert_eq!((again.code, kept(&again)), (Some(0), 7), "{again:?}");

    // Another last step begins after the others, and what they left is there.
    let changed = DOCKERFILE.replace("id -un >", "cat /app/out.txt >");
    let third = context.build(&user, built.1, &changed);
    assert_eq!((third.code, kept(&third)), (Some(0), 4), "{third:?}");
    let run = user.pvmm(["run", "--template", built.1, "--", "cat", "/home/user/who"]);
    assert_eq!(run.text(), "hello from a build /app\nuser 644", "{run:?}");

    // A file of the context is part of the key.
    fs::write(context.path("app/main.py"), "raise SystemExit(5)\n").unwrap();
    let fourth = context.build(&user, built.1, DOCKERFILE);
    assert_eq!((fourth.code, kept(&fourth)), (Some(2), 0), "{fourth:?}");
    assert!(fourth.stderr.contains("exit code 5"), "{fourth:?}");
}

#[test]
fn build_that_fails_says_at_which_line_and_leaves_nothing() {
    let (user, context) = (User::new(), Context::new());
    let failing = "FROM base\nRUN echo some words; exit 3\n";
    let said = context.build(&user, "suite-failing", failing);
    assert_eq!(said.code, Some(2), "{said:?}");
    let error = "error: line 2 of the Dockerfile: the command failed with exit code 3";
    assert!(said.stderr.contains("some words\n") && said.stderr.contains(error), "{said:?}");
    // There is no network without a rule.
    let reaching = "FROM base\nRUN ip -o link | grep -v ' lo:' || exit 4\n";
    let said = context.build(&user, "suite-reaching", reaching);
    assert!(said.stderr.contains("exit code 4"), "{said:?}");
    let unknown = context.build(&user, "suite-unknown", "FROM alpine:3\nRUN true\n");
    assert_eq!(unknown.code, Some(2));
    assert!(unknown.stderr.contains("there is no template \"alpine:3\""), "{unknown:?}");
    assert!(user.pvmm(["template", "inspect", "suite-failing"]).code != Some(0));
}

#[test]
fn build_that_is_interrupted_or_left_alone_ends_its_sandbox() {
    let (user, context) = (User::new(), Context::new());
    let words = context.words("suite-interrupted", "FROM base\nRUN echo ready; sleep 1000\n");
    let begin = |words: Vec<String>| {
        let mut child = user.spawn(words);
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        assert!(lines.by_ref().any(|line| line.unwrap() == "ready"));
        (child, lines)
    };
    // As if the program that started it had been killed.
    let (mut child, lines) = begin([vec!["--end-with-stdin".to_owned()], words.clone()].concat());
    drop(child.stdin.take().unwrap());
    assert_eq!(child.wait().unwrap().code(), Some(143));
    drop(lines);
    let (mut child, _lines) = begin(words);
    let kill = std::process::Command::new("kill").args(["-INT", &child.id().to_string()]).status();
    assert!(kill.unwrap().success());
    assert_eq!(child.wait().unwrap().code(), Some(130));
}

#[test]
fn archive_of_a_root_filesystem_becomes_a_template() {
    let (user, dir) = (User::new(), TempDir::new().unwrap());
    let built = Built(&user, "suite-archive");
    let archive = dir.path().join("rootfs.tar.gz");
    let line = "tar -cz --exclude=./proc --exclude=./sys --exclude=./dev --exclude=./run \
                --exclude=./tmp -C / .";
    fs::write(&archive, user.run(line).stdout).unwrap();
    let path = archive.to_str().unwrap();
    let said = user.pvmm(["template", "build", built.1, "--tar", path]);
    assert_eq!(said.code, Some(0), "{said:?}");
    let line = "python3 -c 'print(6*7)'; stat -c %U /workspace";
    let run = user.pvmm(["run", "--template", built.1, "--", "sh", "-c", line]);
    assert_eq!(run.text(), "42\nuser", "{run:?}");

    fs::write(&archive, "no archive at all, but long enough to be read as the head of one")
        .unwrap();
    let said = user.pvmm(["template", "build", "suite-no-archive", "--tar", path]);
    assert_eq!(said.code, Some(2), "{said:?}");
    assert!(said.stderr.contains("cannot read the root filesystem"), "{said:?}");
}
