//! Secrets: a guest with placeholders, a real TLS server, and the value on the one way it may take.

use std::net::SocketAddrV4;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pvmm_egress::secrets::{NewSecret, Placeholders, SecretValue, SecretsDocument};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, ServerConfig};

use super::fixture::{DnsServer, End, Guest, UdpServer, Upstream};
use super::http;

const VALUE: &str = "hunter2-hunter2-hunter2";

/// An authority of the test's own, and servers with certificates of it.
struct World {
    authority: String,
    issuer: Issuer<'static, KeyPair>,
    dns: DnsServer,
    dir: tempfile::TempDir,
    port: u16,
}

impl World {
    /// Makes an authority and a DNS server that leads these names to loopback.
    fn new(names: &[&str]) -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let authority = params.self_signed(&key).unwrap().pem();
        let table: Vec<_> = names.iter().map(|name| (*name, "127.0.0.1")).collect();
        let dns = DnsServer::start(&table);
        let dir = tempfile::tempdir().unwrap();
        Self { authority, issuer: Issuer::new(params, key), dns, dir, port: 0 }
    }

    /// Starts a server with a certificate for a name.
    fn server(&mut self, name: &str) -> Upstream {
        let server = Upstream::tls(self.certificate(name));
        self.port = server.address.port();
        server
    }

    /// Returns the settings of a server with a certificate for a name.
    fn certificate(&self, name: &str) -> Arc<ServerConfig> {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        let key = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
        let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![certificate.der().clone()], key)
            .unwrap();
        Arc::new(config)
    }

    /// Starts a gateway with the secret TOKEN for api.example, and what the guest is told of it.
    fn guest(&self, authorities: &str, flags: &[&str]) -> (Guest, Placeholders) {
        let secret = NewSecret {
            name: "TOKEN".to_owned(),
            host: "api.example".to_owned(),
            value: SecretValue::new(VALUE.to_owned()),
        };
        let (document, shown) = SecretsDocument::new(vec![secret], authorities.to_owned()).unwrap();
        let path: PathBuf = self.dir.path().join("secrets");
        std::fs::write(&path, document.to_bytes().unwrap()).unwrap();
        let (resolver, port) = (self.dns.address.to_string(), self.port.to_string());
        let own = ["--resolver", &resolver, "--named-port", &port, "--secrets-fd", "6"];
        let loopback = ["--names-into", "127.0.0.0/8"];
        let flags = [&own[..], &loopback, flags].concat();
        (Guest::start_with_secrets(&path, &flags), shown)
    }
}

/// Returns a client that trusts only this authority.
fn client(authority: &str, name: &str) -> ClientConnection {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(authority.as_bytes()).unwrap()).unwrap();
    let mut config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    let name = ServerName::try_from(name.to_owned()).unwrap();
    ClientConnection::new(Arc::new(config), name).unwrap()
}

fn request(host: &str, token: &str) -> String {
    format!(
        "POST /{token} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {token}\r\n\
         Content-Length: {}\r\n\r\n{token}",
        token.len()
    )
}

fn last(host: &str) -> String {
    format!("GET / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n")
}

fn heard(server: &Upstream) -> String {
    server.heard().iter().map(|bytes| String::from_utf8_lossy(bytes).into_owned()).collect()
}

fn at(server: &Upstream) -> SocketAddrV4 {
    server.address
}

#[test]
fn secret_reaches_the_headers_of_its_host_and_nothing_else() {
    let mut world = World::new(&["api.example"]);
    let server = world.server("api.example");
    let (mut guest, shown) = world.guest(&world.authority, &["--allow-host", "api.example"]);
    guest.resolve("api.example.").unwrap();
    let token = &shown.variables[0].1;
    let requests = [request("api.example", token), request("api.example", token)].concat();
    let (first, second) = requests.split_at(requests.len() / 2 - 70);
    let tls = client(&shown.authority, "api.example");
    let last = last("api.example");
    let pieces = [&first[..60], &first[60..], second, &last].map(str::as_bytes);
    let answer = guest.exchange_tls(at(&server), tls, &pieces).unwrap();
    assert!(answer.starts_with(b"HTTP/1.1 200 OK"), "{}", String::from_utf8_lossy(&answer));
    let expected = request("api.example", token)
        .replace(&format!("Bearer {token}"), &format!("Bearer {VALUE}"));
    assert_eq!(heard(&server), [&expected, &expected, &last].map(String::as_str).concat());
    let status = guest.status();
    assert_eq!(status["secrets"][0]["uses"], 2);
    assert_eq!(status["secrets"][0]["host"], "api.example");
    assert!(!status.to_string().contains(VALUE) && !guest.log().contains(VALUE));
    assert_eq!(status["rules"][0]["connections"], 1);
}

#[test]
fn other_host_keeps_its_own_tls_and_gets_the_placeholder() {
    let mut world = World::new(&["api.example", "other.example"]);
    let server = world.server("other.example");
    let (mut guest, shown) = world.guest(&world.authority, &["--allow-host", "other.example"]);
    guest.resolve("other.example.").unwrap();
    let token = &shown.variables[0].1;
    // The client trusts the server's own authority only: nothing was opened on the way.
    let tls = client(&world.authority, "other.example");
    let request = request("other.example", token) + &last("other.example");
    guest.exchange_tls(at(&server), tls, &[request.as_bytes()]).unwrap();
    assert_eq!(heard(&server), request);
}

#[test]
fn plain_http_never_gets_the_value() {
    let mut world = World::new(&["api.example"]);
    let upstream = Upstream::start(b"plain");
    world.port = upstream.address.port();
    let (mut guest, shown) = world.guest(&world.authority, &["--allow-host", "api.example"]);
    guest.resolve("api.example.").unwrap();
    let request = request("api.example", &shown.variables[0].1);
    assert_eq!(guest.exchange(at(&upstream), request.as_bytes()), End::Closed(b"plain".to_vec()));
    assert_eq!(heard(&upstream), request);
}

#[test]
fn d15_server_that_is_not_the_host_gets_nothing() {
    // Neither with a certificate of an unknown authority nor with one for another name.
    for (name, trusted) in [("api.example", false), ("evil.example", true)] {
        let mut world = World::new(&["api.example"]);
        let server = world.server(name);
        let authorities = if trusted { world.authority.clone() } else { String::new() };
        let (mut guest, shown) = world.guest(&authorities, &["--allow-host", "api.example"]);
        guest.resolve("api.example.").unwrap();
        let tls = client(&shown.authority, "api.example");
        let request = request("api.example", &shown.variables[0].1);
        let answer = guest.exchange_tls(at(&server), tls, &[request.as_bytes()]).unwrap();
        let answer = String::from_utf8_lossy(&answer).into_owned();
        assert!(answer.starts_with("HTTP/1.1 502 ") && answer.contains("certificate"), "{answer}");
        assert_eq!(guest.denials(), ["server-tls"]);
        assert_eq!(heard(&server), "");
    }
}

#[test]
fn d14_request_with_another_host_on_the_same_connection_is_refused() {
    let mut world = World::new(&["api.example"]);
    let server = world.server("api.example");
    let (mut guest, shown) = world.guest(&world.authority, &["--allow-host", "api.example"]);
    guest.resolve("api.example.").unwrap();
    let token = &shown.variables[0].1;
    let tls = client(&shown.authority, "api.example");
    let request = request("evil.example", token);
    let answer = guest.exchange_tls(at(&server), tls, &[request.as_bytes()]).unwrap();
    assert!(answer.starts_with(b"HTTP/1.1 400 "));
    assert_eq!(guest.denials(), ["request-refused"]);
    assert_eq!(guest.status()["secrets"][0]["uses"], 0);
    assert!(!heard(&server).contains(VALUE));
}

#[test]
fn secret_works_where_the_address_is_allowed_without_a_name() {
    let mut world = World::new(&["api.example"]);
    let server = world.server("api.example");
    let flags = ["--allow", "127.0.0.0/8", "--allow-host", "api.example"];
    let (mut guest, shown) = world.guest(&world.authority, &flags);
    let tls = client(&shown.authority, "api.example");
    let request = request("api.example", &shown.variables[0].1) + &last("api.example");
    guest.exchange_tls(at(&server), tls, &[request.as_bytes()]).unwrap();
    assert!(heard(&server).contains(VALUE));
}

#[test]
fn guest_that_does_not_know_the_authority_sends_nothing() {
    let mut world = World::new(&["api.example"]);
    let server = world.server("api.example");
    let (mut guest, _) = world.guest(&world.authority, &["--allow-host", "api.example"]);
    guest.resolve("api.example.").unwrap();
    let tls = client(&world.authority, "api.example");
    assert!(guest.exchange_tls(at(&server), tls, &[b"x"]).unwrap_err().contains("certificate"));
    assert!(guest.is_alive());
}

#[test]
fn host_that_no_rule_allows_is_not_reached_for_its_secret() {
    let mut world = World::new(&["api.example"]);
    let server = world.server("api.example");
    let (mut guest, _) = world.guest(&world.authority, &[]);
    assert!(guest.resolve("api.example.").is_err());
    assert_eq!(guest.exchange(at(&server), &http("api.example")), End::Reset);
    assert!(server.heard().is_empty());
}

#[test]
fn long_bodies_pass_both_ways_unchanged() {
    const LEN: usize = 3 << 20;
    let mut world = World::new(&["api.example"]);
    let server = Upstream::tls_echo(world.certificate("api.example"), LEN);
    world.port = server.address.port();
    let (mut guest, shown) = world.guest(&world.authority, &["--allow-host", "api.example"]);
    guest.resolve("api.example.").unwrap();
    let token = shown.variables[0].1.as_bytes();
    let body: Vec<u8> = token.iter().copied().cycle().take(LEN).collect();
    let head = format!("POST / HTTP/1.1\r\nHost: api.example\r\nContent-Length: {LEN}\r\n\r\n");
    let mut pieces = vec![head.as_bytes()];
    pieces.extend(body.chunks(10_000));
    let tls = client(&shown.authority, "api.example");
    let answer = guest.exchange_tls(at(&server), tls, &pieces).unwrap();
    let start = answer.windows(4).position(|part| part == b"\r\n\r\n").unwrap() + 4;
    assert!(answer[start..] == body);
    assert!(guest.gateway_memory_kib() < 64 << 10);
    let status = guest.status();
    assert!(status["totals"]["bytes_out"].as_u64().unwrap() > LEN as u64, "{status}");
}

#[test]
fn open_connection_without_requests_costs_no_processor_time() {
    let mut world = World::new(&["api.example"]);
    let server = world.server("api.example");
    let (mut guest, shown) = world.guest(&world.authority, &["--allow-host", "api.example"]);
    guest.resolve("api.example.").unwrap();
    let mut tls = client(&shown.authority, "api.example");
    let handle = guest.connect(at(&server));
    let request = request("api.example", &shown.variables[0].1);
    let mut pieces = [request.as_bytes()].into_iter();
    let used = guest.until(|guest| {
        assert_eq!(guest.step_tls(handle, &mut tls, &mut pieces, &mut Vec::new()), None);
        (guest.status()["secrets"][0]["uses"] == 1).then_some(())
    });
    assert_eq!(used, Some(()));
    let (before, end) = (guest.gateway_ticks(), Instant::now() + Duration::from_secs(1));
    guest.until(|_| (Instant::now() >= end).then_some(()));
    let ticks = guest.gateway_ticks() - before;
    assert!(ticks < 10, "{ticks} hundredths of a second");
}

#[test]
fn quic_is_denied_while_there_are_secrets() {
    let mut world = World::new(&["api.example"]);
    let server = UdpServer::start();
    world.port = server.address.port();
    let (mut guest, _) = world.guest(&world.authority, &["--allow", "127.0.0.0/8"]);
    let handle = guest.bind_udp();
    guest.send_udp(handle, server.address, b"ping");
    let denied = guest.until(|guest| Some(guest.denials()).filter(|denials| !denials.is_empty()));
    assert_eq!((denied.unwrap(), server.heard().len()), (vec!["quic".to_owned()], 0));
}
