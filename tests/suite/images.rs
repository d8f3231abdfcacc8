//! Container images as templates, made by a published tool, with real guests.

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use pvmm_tests::cli::{self, User};
use pvmm_tests::network;
use serde_json::{Value, json};
use tempfile::TempDir;

/// Makes an image of two layers: a small system, and a change in which a file is gone.
const MAKE: &str = "set -e
umoci init --layout app && umoci new --image app:one
umoci unpack --image app:one lower
mkdir lower/rootfs/bin lower/rootfs/etc lower/rootfs/srv
cp \"$(command -v busybox)\" lower/rootfs/bin/busybox
ln -s busybox lower/rootfs/bin/sh
echo old > lower/rootfs/etc/gone
umoci repack --image app:one lower
umoci config --image app:one --config.entrypoint /bin/busybox --config.cmd env \
    --config.env GREETING=hello --config.workingdir /srv
umoci unpack --image app:one upper
rm upper/rootfs/etc/gone && echo new > upper/rootfs/etc/new
umoci repack --image app:one upper";

/// The address of the registry that speaks TLS: not the loopback one, to which plain HTTP is
/// spoken.
const ADDRESS: &str = "10.9.0.1";

/// Makes an authority, and a certificate of [`ADDRESS`] that it has signed.
const CERTIFY: &str = "set -e
new() { openssl req -x509 -newkey rsa:2048 -nodes -days 2 \"$@\"; }
new -subj /CN=authority -keyout ca.key -out ca.pem
new -subj /CN=registry -CA ca.pem -CAkey ca.key -addext subjectAltName=IP:10.9.0.1 \
    -addext basicConstraints=critical,CA:FALSE -keyout key.pem -out cert.pem";

/// A registry of Debian's, on a port of this host, with files in a folder.
struct Registry {
    process: Child,
    address: String,
    auth: PathBuf,
    dir: PathBuf,
}

impl Registry {
    /// Starts a registry that asks for a name and a password.
    fn with_password(dir: &Path) -> Self {
        // The password "p" of the user "u", as htpasswd writes it.
        let password = "u:$2b$05$asaiFt6c2CPeEg5fMMDrSO7QOH7DYa1DEr9Gg0XPoyiKpZXAQRvm.\n";
        fs::write(dir.join("htpasswd"), password).unwrap();
        let auth = json!({ "htpasswd": { "realm": "test", "path": dir.join("htpasswd") } });
        Self::start(dir, "127.0.0.1", &auth, &json!({}))
    }

    /// Starts a registry that speaks TLS and asks for a token of the server at `tokens`.
    fn with_tokens(dir: &Path, tokens: &str) -> Self {
        let cert = dir.join("cert.pem");
        let tls = json!({ "certificate": &cert, "key": dir.join("key.pem") });
        let realm = format!("https://{tokens}/token");
        let auth = json!({ "token": {
            "realm": realm, "service": "registry", "issuer": "tokens",
            "rootcertbundle": dir.join("ca.pem"),
        } });
        Self::start(dir, ADDRESS, &auth, &tls)
    }

    fn start(dir: &Path, host: &str, auth: &Value, tls: &Value) -> Self {
        let address = format!("{host}:{}", free_port(host));
        let login = json!({ "auths": { &address: { "auth": "dTpw" } } });
        fs::write(dir.join("auth.json"), login.to_string()).unwrap();
        let config = json!({
            "version": 0.1,
            "storage": { "filesystem": { "rootdirectory": dir.join("storage") } },
            "http": { "addr": &address, "secret": "of this test", "tls": tls },
            "auth": auth,
        });
        fs::write(dir.join("config.json"), config.to_string()).unwrap();
        let mut program =
            Command::new(cli::cached("tools/docker-registry/unpacked/usr/bin/docker-registry"));
        program.arg("serve").arg(dir.join("config.json")).stderr(Stdio::null());
        let process = program.stdout(Stdio::null()).spawn().unwrap();
        let until = Instant::now() + Duration::from_secs(60);
        while TcpStream::connect(&address).is_err() {
            assert!(Instant::now() < until, "the registry does not listen");
            std::thread::sleep(Duration::from_millis(100));
        }
        Self { process, address, auth: dir.join("auth.json"), dir: dir.into() }
    }

    /// Lets a command know the password and the authority.
    fn known_to<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        let authority = self.dir.join("ca.pem");
        if authority.exists() {
            command.env("SSL_CERT_FILE", authority);
        }
        command.env("REGISTRY_AUTH_FILE", &self.auth)
    }

    fn push(&self, image: &str, name: &str) {
        let to = format!("docker://{}/{name}", self.address);
        let plain = format!("--dest-tls-verify={}", self.dir.join("ca.pem").exists());
        let mut skopeo = Command::new("skopeo");
        skopeo.args(["copy", &plain, image, &to]);
        let said = self.known_to(&mut skopeo).output().unwrap();
        assert!(said.status.success(), "{said:?}");
    }
}

/// Returns a port that was free a moment ago.
fn free_port(host: &str) -> u16 {
    TcpListener::bind((host, 0)).unwrap().local_addr().unwrap().port()
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn image_of_a_registry_is_fetched_once_and_its_parts_are_checked() {
    let (user, dir) = (User::new(), TempDir::new().unwrap());
    shell(MAKE, dir.path());
    let registry = Registry::with_password(dir.path());
    registry.push(&image_of(dir.path()), "team/app:v1");
    let reference = format!("{}/team/app:v1", registry.address);
    let pvmm = |words: &[&str]| {
        let mut command = user.command(words);
        let output = registry.known_to(&mut command).output().unwrap();
        let text = [output.stdout, output.stderr].concat();
        (output.status.code(), String::from_utf8(text).unwrap())
    };

    let denied = user.pvmm(["run", "--image", &reference]);
    assert_eq!(denied.code, Some(2), "{denied:?}");
    assert!(denied.stderr.contains("wants other credentials"), "{denied:?}");
    let (_, said) = pvmm(&["run", "--image", &reference]);
    assert!(said.contains("GREETING=hello"), "{said}");
    let missing = format!("{}/team/other:v1", registry.address);
    let (code, said) = pvmm(&["template", "build", "suite-image", "--image", &missing]);
    assert!(code == Some(2) && said.contains("has no image"), "{said}");

    // A layer that has changed in the registry is refused.
    fs::remove_dir_all(cli::cached("oci")).unwrap();
    let blobs = dir.path().join("storage/docker/registry/v2/blobs/sha256");
    for folder in
        fs::read_dir(blobs).unwrap().flat_map(|it| fs::read_dir(it.unwrap().path()).unwrap())
    {
        let data = folder.unwrap().path().join("data");
        let bytes = fs::read(&data).unwrap();
        if bytes.starts_with(b"\x1f\x8b") {
            fs::write(&data, [&bytes[..bytes.len() - 1], b"x"].concat()).unwrap();
        }
    }
    let (code, said) = pvmm(&["template", "build", "suite-image", "--image", &reference]);
    assert!(code == Some(2) && said.contains("other bytes"), "{said}");
    remove_templates(&user);
}

#[test]
fn image_of_a_registry_with_tokens_is_fetched_over_tls() {
    network::isolated(|| {
        network::host(&["address", "add", &format!("{ADDRESS}/32"), "dev", "lo"]);
        let (user, dir) = (User::new(), TempDir::new().unwrap());
        shell(MAKE, dir.path());
        shell(CERTIFY, dir.path());
        let tokens = format!("{ADDRESS}:{}", free_port(ADDRESS));
        let _tokens = Tokens::start(dir.path(), &tokens);
        let registry = Registry::with_tokens(dir.path(), &tokens);
        registry.push(&image_of(dir.path()), "team/app:v1");
        let reference = format!("{}/team/app:v1", registry.address);
        let build = ["template", "build", "suite-image", "--image", &reference];
        // Without the authority, then without the password.
        let said = user.pvmm(build);
        assert!(said.code == Some(2) && said.stderr.contains("cannot reach"), "{said:?}");
        let mut command = user.command(build);
        let said = command.env("SSL_CERT_FILE", dir.path().join("ca.pem")).output().unwrap();
        let text = String::from_utf8_lossy(&said.stderr);
        assert!(text.contains("wants other credentials"), "{text}");
        let mut command = user.command(["run", "--image", &reference]);
        let said = registry.known_to(&mut command).output().unwrap();
        assert!(String::from_utf8_lossy(&said.stdout).contains("GREETING=hello"), "{said:?}");
        remove_templates(&user);
    });
}

/// The server to which the registry sends for tokens.
struct Tokens(Child);

impl Tokens {
    fn start(dir: &Path, address: &str) -> Self {
        let (host, port) = address.split_once(':').unwrap();
        let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("serve/registry_tokens.py");
        let mut python = Command::new("python3");
        python.arg(program).args([host, port]).arg(dir);
        let mut process = python.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "listening\n");
        Self(process)
    }
}

impl Drop for Tokens {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns the image of [`MAKE`] as skopeo names it.
fn image_of(dir: &Path) -> String {
    format!("oci:{}:one", dir.join("app").display())
}

fn shell(script: &str, dir: &Path) {
    let done = Command::new("sh").args(["-c", script]).current_dir(dir).output().unwrap();
    assert!(done.status.success(), "{done:?}");
}

#[test]
fn image_of_two_layers_runs_with_its_settings_and_a_changed_one_is_refused() {
    let (user, dir) = (User::new(), TempDir::new().unwrap());
    shell(MAKE, dir.path());
    let image = format!("{}:one", dir.path().join("app").display());
    let said = user.pvmm(["run", "--image", &image]);
    assert!(said.text().contains("GREETING=hello"), "{said:?}");
    let line = "pwd; cd /etc; ls new gone";
    let said = user.pvmm(["run", "--image", &image, "--", "sh", "-c", line]);
    assert_eq!(said.text(), "/srv\nnew", "{said:?}");

    for layer in layers(dir.path()) {
        fs::write(layer, "other bytes").unwrap();
    }
    let built = ["template", "build", "suite-image", "--image", &image];
    let said = user.pvmm(built);
    assert_eq!(said.code, Some(2), "{said:?}");
    assert!(said.stderr.contains("other bytes"), "{said:?}");
    remove_templates(&user);
}

/// Removes the templates of images, of which none was half built.
fn remove_templates(user: &User) {
    let list = user.pvmm(["template", "ls", "--json"]);
    let rows: serde_json::Value = serde_json::from_slice(&list.stdout).unwrap();
    for row in rows.as_array().unwrap() {
        let name = row["name"].as_str().unwrap();
        assert_ne!(name, "suite-image");
        if name.starts_with("image-") {
            user.pvmm(["template", "rm", name]);
        }
    }
}

/// Returns the files of an image that are compressed, which are its layers.
fn layers(dir: &Path) -> Vec<PathBuf> {
    let blobs = fs::read_dir(dir.join("app/blobs/sha256")).unwrap();
    let compressed = |path: &PathBuf| fs::read(path).unwrap().starts_with(b"\x1f\x8b");
    blobs.map(|blob| blob.unwrap().path()).filter(compressed).collect()
}
