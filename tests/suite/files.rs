//! Large files into a guest and out of it: every byte is compared, and memory use does not depend
//! on their size.

use std::fs;
use std::io::{Read, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use pvmm::agent::{Agent, FileWriteOptions};
use pvmm_tests::cli::User;

const PATIENCE: Duration = Duration::from_secs(60);
const MIB: u64 = 1 << 20;
/// How much memory use may grow, whatever the size of the file.
const SLACK_KIB: u64 = 8 << 10;

/// The bytes of a test file, one MiB at a time. They differ everywhere in the file, and are cheap
/// to make.
struct Pattern(Vec<u8>);

impl Pattern {
    fn new() -> Self {
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let words = (0..MIB / 8).flat_map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state.to_le_bytes()
        });
        Self(words.collect())
    }

    fn mib(&mut self, number: u64) -> &[u8] {
        for page in self.0.chunks_mut(4096) {
            page[..8].copy_from_slice(&number.to_le_bytes());
        }
        &self.0
    }
}

/// Returns the resident memory of a process without guest memory. Mappings of 64 MiB and more count
/// as guest memory.
fn own_kib(pid: i64) -> u64 {
    let smaps = fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap();
    let field = |line: &str, name: &str| -> Option<u64> {
        line.strip_prefix(name)?.split_whitespace().next()?.parse().ok()
    };
    let (mut is_guest, mut sum) = (false, 0);
    for line in smaps.lines() {
        if let Some(size) = field(line, "Size:") {
            is_guest = size >= 64 << 10;
        }
        sum += field(line, "Rss:").filter(|_| !is_guest).unwrap_or(0);
    }
    sum
}

/// Returns the peak memory of the agent, which is the first process of the guest.
fn agent_peak_kib(agent: &Agent) -> u64 {
    let status = agent.read_file("/proc/1/status", MIB).unwrap();
    let status = String::from_utf8(status).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Streams a file into a guest and out of it, compares every byte, and checks memory use.
fn copies_match(mib: u64, disk: &str) {
    let user = User::new();
    let vm = user.detached(&["--disk-size", disk]);
    let listed = user.pvmm(["ps", "--json"]);
    let listed: serde_json::Value = serde_json::from_slice(&listed.stdout).unwrap();
    let pid = listed[0]["pid"].as_i64().unwrap();
    let socket = user.runtime().join(&vm).join("run/vsock.sock");
    let agent = Agent::connect(&socket, Instant::now() + PATIENCE).unwrap();
    // The first copy makes everything that is made only once.
    copy(&agent, 8, &mut || {});
    let (vmm, inside) = (own_kib(pid), agent_peak_kib(&agent));
    let mut most = vmm;
    let begun = Instant::now();
    copy(&agent, mib, &mut || most = most.max(own_kib(pid)));
    let took = begun.elapsed();
    let peak = agent_peak_kib(&agent);
    println!(
        "files: {mib} MiB in and out in {took:?}; VMM {vmm} KiB, at most {most}; agent {inside} KiB, at most {peak}"
    );
    assert!(most <= vmm + SLACK_KIB, "the VMM had {vmm} KiB and then {most}");
    assert!(peak <= inside + SLACK_KIB, "the agent had {inside} KiB and then {peak}");
    assert_eq!(user.pvmm(["kill", &vm]).code, Some(0));
}

fn copy(agent: &Agent, mib: u64, look: &mut dyn FnMut()) {
    let path = Path::new("/root/large");
    let mut writer = agent.open_write(path, &FileWriteOptions::default()).unwrap();
    let mut pattern = Pattern::new();
    for number in 0..mib {
        writer.write_all(pattern.mib(number)).unwrap();
        if number % 16 == 0 {
            look();
        }
    }
    assert_eq!(writer.finish().unwrap(), mib * MIB);
    let mut reader = agent.open_read(path, None).unwrap();
    let mut buffer = vec![0; MIB as usize];
    for number in 0..mib {
        reader.read_exact(&mut buffer).unwrap();
        assert!(buffer == pattern.mib(number), "MiB {number} is another");
        if number % 16 == 0 {
            look();
        }
    }
    assert_eq!(reader.read(&mut buffer).unwrap(), 0, "there is more than was written");
}

#[test]
fn large_file_in_and_out_matches_with_flat_memory() {
    copies_match(64, "1G");
}

#[test]
#[ignore = "make soak"]
fn soak_file_of_2_gb_in_and_out_matches_with_flat_memory() {
    copies_match(2048, "3G");
}

#[test]
fn folder_in_and_out_keeps_what_a_folder_is() {
    let user = User::new();
    let vm = user.detached(&[]);
    let place = tempfile::TempDir::new().unwrap();
    let at = |name: &str| place.path().join(name);
    let text = |path: &Path| path.to_str().unwrap().to_owned();
    let make =
        "mkdir -p in/empty in/deep/er; echo hello > in/deep/er/file; chmod 750 in/deep/er/file
        ln in/deep/er/file in/same; ln -s deep/er/file in/link; ln -s /etc/passwd in/away
        truncate -s 300M in/sparse; echo end >> in/sparse; chmod 555 in/empty
        for i in $(seq 200); do echo $i > in/deep/$i; done; touch in/$(printf '%0200d' 7)
        mkfifo in/fifo";
    let made = std::process::Command::new("sh").args(["-c", make]).current_dir(&place).status();
    assert!(made.unwrap().success());
    let said = user.pvmm(["cp", "-r", &text(&at("in")), &format!("{vm}:/srv")]);
    assert_eq!(said.code, Some(0), "{said:?}");
    assert!(said.stderr.contains("left out") && said.stderr.contains("fifo"), "{said:?}");

    let look = "cd /srv/in; stat -c '%a %u %h' same; readlink link away; stat -c %a empty; \
                ls deep | wc -l; [ $(stat -c %b sparse) -lt 1000 ] && tail -c 4 sparse; \
                [ same -ef deep/er/file ] && cat link; ls | wc -l; chown 1000:1000 same";
    let looked = user.pvmm(["exec", &vm, "--", "sh", "-c", look]);
    let expected = "750 0 2\ndeep/er/file\n/etc/passwd\n555\n201\nend\nhello\n7";
    assert_eq!(looked.text(), expected, "{looked:?}");

    // The folder is copied back with owners, the second time over existing files.
    for _ in 0..2 {
        let said = user.pvmm(["cp", "-a", &format!("{vm}:/srv/in/."), &text(&at("out"))]);
        assert_eq!(said.code, Some(0), "{said:?}");
    }
    let look = "cd out; stat -c '%a %u %h' same; readlink link away; stat -c %a empty; \
                ls deep | wc -l; [ $(stat -c %b sparse) -lt 1000 ] && tail -c 4 sparse; \
                [ same -ef deep/er/file ] && cat link; ls | wc -l; ls -A | grep -c pvmm";
    let out = std::process::Command::new("sh").args(["-c", look]).current_dir(&place).output();
    let out = String::from_utf8(out.unwrap().stdout).unwrap();
    assert_eq!(out, expected.replace("750 0 2", "750 1000 2") + "\n0\n");

    let missing = user.pvmm(["cp", &format!("{vm}:/nowhere"), &text(&at("x"))]);
    assert_eq!(missing.code, Some(2), "{missing:?}");
    assert_eq!(user.pvmm(["kill", &vm]).code, Some(0));
}

#[test]
fn watch_tells_what_happens_and_ends_with_its_folder() {
    use std::io::{BufRead, BufReader};

    let user = User::new();
    let vm = user.detached(&[]);
    let exec =
        |line: &str| assert_eq!(user.pvmm(["exec", &vm, "--", "sh", "-c", line]).code, Some(0));
    exec("mkdir -p /srv/watched/sub");
    let mut watch = user.spawn(["watch", "-r", &format!("{vm}:/srv/watched")]);
    let mut lines = BufReader::new(watch.stdout.take().unwrap()).lines().map(Result::unwrap);
    // The first line tells of the first event after the watch has begun.
    let touch = std::thread::scope(|scope| {
        let first = scope.spawn(|| lines.next());
        while !first.is_finished() {
            exec("touch /srv/watched/begun; sleep 0.2; rm -f /srv/watched/begun");
        }
        first.join().unwrap()
    });
    assert!(touch.unwrap().contains("begun"));
    exec("cd /srv/watched/sub; echo x > file; mv file other; rm other");
    for told in ["created    sub/file", "written    sub/file", "moved-to   sub/other"] {
        assert!(lines.any(|line| line == told), "{told}");
    }
    exec("rm -r /srv/watched");
    assert!(lines.any(|line| line.starts_with("gone")));
    assert_eq!(watch.wait().unwrap().code(), Some(0));
    assert_eq!(user.pvmm(["watch", &format!("{vm}:/nowhere")]).code, Some(2));
    assert_eq!(user.pvmm(["kill", &vm]).code, Some(0));
}
