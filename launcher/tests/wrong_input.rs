//! Wrong input on the real command: one `error:` line that names field and fix, the documented exit
//! code, and nothing left behind. None of it needs KVM, since input is checked before anything is
//! made.
#![allow(clippy::unwrap_used)] // All of this file is test code, its fixture included.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// A user with an empty home: no cache, no VMs.
struct User {
    home: tempfile::TempDir,
}

impl User {
    fn new() -> Self {
        Self { home: tempfile::tempdir().unwrap() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.home.path().join(name)
    }

    fn pvmm<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Output {
        self.command(args).output().unwrap()
    }

    fn command<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pvmm"));
        command.args(args).stdin(Stdio::null()).current_dir(self.home.path());
        command.env("PVMM_RUNTIME_DIR", self.path("run")).env("XDG_CACHE_HOME", self.path("cache"));
        command.env("XDG_DATA_HOME", self.path("data")).env_remove("PVMM_BOOT_TIMEOUT");
        command
    }

    /// Runs pvmm and checks the shape of its refusal: code, one error line, at most one hint, no
    /// data.
    fn refused(&self, args: &str, code: i32) -> String {
        self.check(self.pvmm(args.split(' ')), args, code)
    }

    fn check(&self, output: Output, args: &str, code: i32) -> String {
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{args}: {error}");
        let lines: Vec<&str> = error.lines().collect();
        assert!(lines[0].starts_with("error: "), "{args}: {error}");
        let hints = lines[1..].iter().filter(|line| line.starts_with("hint: ")).count();
        assert!(hints == lines.len() - 1 && hints <= 1, "{args}: {error}");
        assert!(output.stdout.is_empty(), "{args}: wrote data");
        assert!(!self.path("run").exists(), "{args}: left a runtime directory");
        error
    }
}

#[test]
fn ports_that_make_no_sense_or_are_taken_are_refused() {
    let user = User::new();
    for args in
        ["run -p 8080:0 -- true", "run -p x -- true", "run -p 70000:80 -- true", "port vm a:b"]
    {
        assert!(user.refused(args, 2).contains("HOST:GUEST"), "{args}");
    }
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let output = user.pvmm(["run", "-p", &format!("{port}:80"), "--", "true"]);
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.contains(&format!("127.0.0.1:{port}")), "{error}");
}

#[test]
fn run_with_impossible_sizes_names_flag_and_fix() {
    let user = User::new();
    for (args, flag, fix) in [
        ("run --cpus 0 -- true", "--cpus", "1 to 32"),
        ("run --cpus 33 -- true", "--cpus", "1 to 32"),
        ("run --memory 1M -- true", "--memory", "32M"),
        ("run --memory 18446744073709551616 -- true", "--memory", "too large"),
        ("run --memory lots -- true", "--memory", "512M"),
        ("run --disk-size 1M -- true", "--disk-size", "16M"),
        ("run --timeout 0 -- true", "--timeout", "1ms"),
        ("run --timeout 5y -- true", "--timeout", "30s"),
        ("run --env =x -- true", "--env", "KEY=VALUE"),
        ("run --env PVMM_NOT_SET_HERE -- true", "--env", "KEY=VALUE"),
        ("run --workdir tmp -- true", "--workdir", "absolute"),
        ("run --name a/b -- true", "--name", "letters"),
        ("run --name 0123456789ab -- true", "--name", "another name"),
    ] {
        let error = user.refused(args, 2);
        assert!(error.contains(flag) && error.contains(fix), "{args}: {error}");
    }
}

#[test]
fn run_with_kernel_that_is_none_names_flag_and_fix() {
    let user = User::new();
    fs::write(user.path("text"), "this is not a kernel\n").unwrap();
    fs::write(user.path("empty"), "").unwrap();
    fs::write(user.path("rootfs"), ext4()).unwrap();
    for kernel in ["missing", "text", "empty", "."] {
        let error = user.refused(&format!("run --kernel {kernel} --rootfs rootfs -- true"), 2);
        assert!(error.contains("--kernel"), "{error}");
    }
}

#[test]
fn run_with_rootfs_that_is_none_names_flag_and_fix() {
    let user = User::new();
    fs::write(user.path("text"), "this is not an image\n").unwrap();
    for (rootfs, fix) in [(".", "mke2fs"), ("missing", "image"), ("text", "image")] {
        let error = user.refused(&format!("run --rootfs {rootfs} -- true"), 2);
        assert!(error.contains("--rootfs") && error.contains(fix), "{error}");
    }
}

#[test]
fn run_with_unknown_template_names_it() {
    let user = User::new();
    let error = user.refused("run --template nonesuch -- true", 2);
    assert!(error.contains("--template") && error.contains("nonesuch"), "{error}");
    assert!(user.refused("run --template ../x -- true", 2).contains("--template"));
}

#[test]
fn run_with_bad_console_file_names_flag() {
    let error = User::new().refused("run --console /nonexistent/x -- true", 2);
    assert!(error.contains("--console"), "{error}");
}

#[test]
fn run_without_command_says_where_it_goes() {
    let error = User::new().refused("run", 2);
    assert!(error.contains("after '--'"), "{error}");
    let error = User::new().refused("run python3", 2);
    assert!(error.contains("after '--'"), "{error}");
}

#[test]
fn run_with_bad_boot_timeout_names_the_variable() {
    let user = User::new();
    let output =
        user.command(["run", "--", "true"]).env("PVMM_BOOT_TIMEOUT", "x").output().unwrap();
    assert!(user.check(output, "PVMM_BOOT_TIMEOUT=x", 2).contains("PVMM_BOOT_TIMEOUT"));
}

#[test]
fn run_without_a_place_for_the_cache_names_the_variable() {
    let user = User::new();
    let mut command = user.command(["run", "--", "true"]);
    let output = command.env("XDG_CACHE_HOME", "/dev/null/x").output().unwrap();
    assert!(user.check(output, "no cache", 2).contains("XDG_CACHE_HOME"));
}

#[test]
fn run_with_endless_runtime_directory_names_the_variable() {
    let user = User::new();
    let long = user.path(&"x".repeat(100));
    let output =
        user.command(["run", "--", "true"]).env("PVMM_RUNTIME_DIR", &long).output().unwrap();
    assert!(user.check(output, "long", 2).contains("PVMM_RUNTIME_DIR"));
    assert!(!long.exists());
}

#[test]
fn run_in_runtime_directory_of_others_is_refused() {
    let user = User::new();
    let open = user.path("open");
    fs::create_dir(&open).unwrap();
    fs::set_permissions(&open, fs::Permissions::from_mode(0o777)).unwrap();
    let output =
        user.command(["run", "--", "true"]).env("PVMM_RUNTIME_DIR", &open).output().unwrap();
    assert!(user.check(output, "open", 2).contains("0700"));
}

#[test]
fn verbs_about_unknown_vm_say_so() {
    let user = User::new();
    for args in [
        "exec nonesuch -- true",
        "cp nonesuch:/etc/hosts .",
        "logs nonesuch",
        "kill nonesuch",
        "rm nonesuch",
    ] {
        let error = user.refused(args, 2);
        assert!(error.contains("'nonesuch'") && error.contains("pvmm ps"), "{args}: {error}");
    }
}

#[test]
fn cp_between_wrong_places_says_how() {
    let user = User::new();
    assert!(user.refused("cp a b", 2).contains("VM:PATH"));
    assert!(user.refused("cp a:/x b:/y", 2).contains("both"));
    assert!(user.refused("cp missing vm:/x", 2).contains("missing"));
    assert!(user.refused("cp vm: x", 2).contains("VM:PATH"));
}

#[test]
fn unknown_words_are_refused_with_a_way_on() {
    let user = User::new();
    for args in ["frob", "run --frob -- true", "ps extra", "kill -s INT x", "completions tcsh"] {
        user.refused(args, 2);
    }
}

#[test]
fn hostile_text_in_an_argument_stays_on_one_line() {
    let user = User::new();
    let name = "x\n\n\u{1b}[31merror: fake";
    let output = user.pvmm(["logs", name]);
    let error = user.check(output, "logs", 2);
    assert!(!error.contains('\u{1b}'), "{error:?}");
}

#[test]
fn template_verbs_with_wrong_input_name_it() {
    let user = User::new();
    fs::write(user.path("recipe.json"), "{\"name\": 5}").unwrap();
    for (args, word) in [
        ("template inspect nonesuch", "nonesuch"),
        ("template rm nonesuch", "nonesuch"),
        ("template build ../x --packages git", "../x"),
        ("template build base --packages git", "base"),
        ("template build data --packages ../git", "../git"),
        ("template build --recipe recipe.json", "recipe.json"),
        ("template build --recipe missing.json", "missing.json"),
    ] {
        let error = user.refused(args, 2);
        assert!(error.contains(word), "{args}: {error}");
    }
}

#[test]
fn listings_of_nothing_are_empty_and_leave_nothing() {
    let user = User::new();
    assert_eq!(user.pvmm(["ps", "-q"]).stdout, b"");
    assert_eq!(user.pvmm(["ps", "--json"]).stdout, b"[]\n");
    assert_eq!(user.pvmm(["template", "ls", "--json"]).stdout, b"[]\n");
    assert_eq!(user.pvmm(["snapshots", "--json"]).stdout, b"[]\n");
    let (alone, ls) = (user.pvmm(["snapshots"]), user.pvmm(["snapshots", "ls"]));
    assert!(alone.status.success() && alone.stdout == ls.stdout, "{alone:?}");
    assert!(!user.path("run").exists());
}

#[test]
fn doctor_as_json_agrees_with_its_exit_code() {
    let user = User::new();
    let output = user.pvmm(["doctor", "--json"]);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let expected = if report["can_run"] == true { 0 } else { 1 };
    assert_eq!(output.status.code(), Some(expected));
    for check in report["checks"].as_array().unwrap() {
        assert_eq!(check["status"] == "ok", check["fix"].is_null(), "{check}");
    }
    assert!(!user.path("run").exists());
}

#[test]
fn output_to_a_closed_pipe_ends_as_other_tools_do() {
    use std::os::unix::process::ExitStatusExt;
    let user = User::new();
    let mut command = user.command(["completions", "bash"]);
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let output = command.stdout(writer).stderr(Stdio::piped()).spawn().unwrap();
    let output = output.wait_with_output().unwrap();
    assert_eq!(output.status.signal(), Some(13));
    assert!(output.stderr.is_empty());
}

#[test]
fn man_pages_are_written_for_every_verb() {
    let user = User::new();
    fs::create_dir(user.path("man")).unwrap();
    assert!(user.pvmm(["man", "--dir", "man"]).status.success());
    for page in ["pvmm.1", "pvmm-run.1", "pvmm-template-build.1"] {
        assert!(user.path("man").join(page).exists(), "{page}");
    }
    user.refused("man --dir /nonexistent", 2);
}

/// The least that looks like an ext4 image.
fn ext4() -> Vec<u8> {
    let mut image = vec![0; 4096];
    image[1080..1082].copy_from_slice(&[0x53, 0xef]);
    image
}

#[test]
fn fixture_image_is_accepted_as_rootfs() {
    let user = User::new();
    fs::write(user.path("rootfs"), ext4()).unwrap();
    // Refused for its kernel, so the image itself was taken.
    let error = user.refused("run --kernel /dev/null --rootfs rootfs -- true", 2);
    assert!(error.contains("--kernel") && Path::new(&user.path("rootfs")).exists(), "{error}");
}

#[test]
fn scratch_in_memory_is_refused_with_both_ways_out() {
    let user = User::new();
    let args = ["run", "--", "true"];
    let refused = |dir: &str| {
        let output = user.command(args).env("PVMM_SCRATCH_DIR", dir).output().unwrap();
        user.check(output, dir, 2)
    };
    let error = refused("/dev/shm");
    assert!(error.contains("/dev/shm is on tmpfs"), "{error}");
    assert!(error.contains("PVMM_SCRATCH_DIR") && error.contains("PVMM_SCRATCH_IN_MEMORY=1"));
    assert!(refused("/no/such/folder").contains("/no/such/folder"));
}
