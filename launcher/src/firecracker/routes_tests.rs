//! Tests of every path with a body that is accepted, and of bodies that are refused.

use super::*;

fn asked(method: Method, path: &str, body: &str) -> Result<Routed, Refusal> {
    route(method, path, Some(body.as_bytes()).filter(|body| !body.is_empty()))
}

fn put(path: &str, body: &str) -> ApiCall {
    asked(Method::Put, path, body).unwrap_or_else(|refusal| panic!("{path}: {refusal:?}")).request
}

fn refused(method: Method, path: &str, body: &str) -> String {
    let refusal = asked(method, path, body).unwrap_err();
    assert_eq!(refusal.status, 400);
    refusal.message
}

#[test]
fn every_put_with_its_least_body_is_known() {
    for (path, body) in [
        ("/boot-source", r#"{"kernel_image_path":"k","initrd_path":null,"boot_args":null}"#),
        ("/machine-config", r#"{"vcpu_count":1,"mem_size_mib":128,"smt":null,"huge_pages":"2M"}"#),
        ("/cpu-config", "{}"),
        ("/drives/rootfs", r#"{"drive_id":"rootfs","is_root_device":true,"path_on_host":"/r"}"#),
        ("/network-interfaces/1", r#"{"iface_id":"1","host_dev_name":"tap0","guest_mac":null}"#),
        ("/vsock", r#"{"guest_cid":3,"uds_path":"/v","vsock_id":"v1"}"#),
        ("/entropy", "{}"),
        ("/balloon", r#"{"amount_mib":0,"deflate_on_oom":true}"#),
        ("/logger", r#"{"log_path":"/l","level":"Warning","show_level":true}"#),
        ("/metrics", r#"{"metrics_path":"/m"}"#),
        ("/serial", r#"{"serial_out_path":"/s"}"#),
        ("/mmds", r#"{"a":{"b":"c"}}"#),
        ("/mmds/config", r#"{"network_interfaces":["1"],"version":"V2"}"#),
        ("/actions", r#"{"action_type":"InstanceStart"}"#),
        ("/actions", r#"{"action_type": "SendCtrlAltDel"}"#),
        ("/snapshot/create", r#"{"snapshot_path":"/s","mem_file_path":"/m"}"#),
        ("/snapshot/load", r#"{"snapshot_path":"/s","mem_file_path":"/m"}"#),
        ("/pvmm/fork", r#"{"socket":"/f"}"#),
        ("/pvmm/fork/load", r#"{"socket":"/f"}"#),
        ("/pvmm/checkpoint", ""),
        ("/pvmm/rollback", "{}"),
        ("/pvmm/exec", r#"{"argv":["true"]}"#),
    ] {
        put(path, body);
    }
    let load = r#"{"load":{"snapshot_path":"/s","mem_backend":{"backend_type":"Uffd","backend_path":"/u"}},
                   "drive_overrides":[{"drive_id":"rootfs","path_on_host":"/r"}]}"#;
    let ApiCall::LoadSnapshot(load) = put("/pvmm/snapshot/load", load) else { panic!() };
    assert_eq!(load.drive_overrides.len(), 1);
}

#[test]
fn path_with_slashes_too_many_at_its_ends_is_the_same() {
    assert_eq!(asked(Method::Get, "//version/", "").unwrap().request, ApiCall::GetVersion);
    assert_eq!(asked(Method::Get, "/", "").unwrap().request, ApiCall::GetInstance);
}

#[test]
fn i2_field_that_is_unknown_given_twice_or_of_another_type_is_refused() {
    for body in [
        r#"{"vcpu_count":1,"mem_size_mib":128,"colour":1}"#,
        r#"{"vcpu_count":1,"vcpu_count":2,"mem_size_mib":128}"#,
        r#"{"vcpu_count":1}"#,
        r#"{"vcpu_count":NaN,"mem_size_mib":128}"#,
        r#"{"vcpu_count":"1","mem_size_mib":128}"#,
        r#"[1]"#,
        "{",
        "\u{0}",
    ] {
        let message = refused(Method::Put, "/machine-config", body);
        assert!(message.starts_with("An error occurred when deserializing"), "{message}");
    }
    let message =
        refused(Method::Put, "/snapshot/load", r#"{"snapshot_path":"/s","drive_overrides":[]}"#);
    assert!(message.contains("unknown field `drive_overrides`"), "{message}");
}

#[test]
fn i2_body_nested_ten_thousand_deep_is_refused() {
    let deep = "[".repeat(10_000) + &"]".repeat(10_000);
    assert!(refused(Method::Put, "/mmds", &deep).contains("recursion"));
}

#[test]
fn i4_path_that_is_no_text_is_refused() {
    let body = b"{\"kernel_image_path\":\"/\xff\"}";
    let refusal = route(Method::Put, "/boot-source", Some(body)).unwrap_err();
    assert!(refusal.message.starts_with("An error occurred when deserializing"), "{refusal:?}");
}

#[test]
fn i3_number_that_does_not_fit_is_refused() {
    for body in [
        r#"{"vcpu_count":4294967296,"mem_size_mib":128}"#,
        r#"{"vcpu_count":-1,"mem_size_mib":128}"#,
        r#"{"vcpu_count":1,"mem_size_mib":18446744073709551616}"#,
        r#"{"vcpu_count":1,"mem_size_mib":-128}"#,
        r#"{"vcpu_count":1,"mem_size_mib":1.5}"#,
    ] {
        refused(Method::Put, "/machine-config", body);
    }
}

#[test]
fn i9_id_that_is_empty_odd_or_another_than_in_the_body_is_refused() {
    let body = r#"{"drive_id":"a","is_root_device":false,"path_on_host":"/r"}"#;
    for path in ["/drives", "/drives/", "/drives/a/b", "/drives/a-b", "/drives/..", "/drives/b"] {
        refused(Method::Put, path, body);
    }
    put("/drives/a", body);
}

#[test]
fn method_or_path_that_is_unknown_is_refused_by_name() {
    let message = refused(Method::Get, "/nothing", "");
    assert_eq!(message, "Invalid request method and/or path: GET nothing.");
    for (method, path) in [
        (Method::Get, "/boot-source"),
        (Method::Get, "/vm"),
        (Method::Put, "/vm"),
        (Method::Put, "/snapshot/sideways"),
        (Method::Patch, "/boot-source"),
        (Method::Delete, "/vm"),
        (Method::Put, "/machine-config/more"),
    ] {
        let body = if method == Method::Get { "" } else { "{}" };
        assert!(refused(method, path, body).contains("Invalid request method"), "{path}");
    }
}

#[test]
fn request_with_the_wrong_presence_of_a_body_is_refused() {
    assert_eq!(refused(Method::Get, "/version", "{}"), "GET request cannot have a body.");
    assert_eq!(refused(Method::Put, "/actions", ""), "Empty PUT request.");
    assert_eq!(refused(Method::Patch, "/vm", ""), "Empty PATCH request.");
    assert_eq!(refused(Method::Patch, "/machine-config", "{}"), "Empty PATCH request.");
    asked(Method::Patch, "/balloon/hinting/start", "").unwrap();
}

#[test]
fn deprecated_fields_are_taken_and_marked() {
    for (path, body) in [
        ("/vsock", r#"{"guest_cid":3,"uds_path":"/v","vsock_id":"v1"}"#),
        ("/snapshot/load", r#"{"snapshot_path":"/s","mem_file_path":"/m"}"#),
        ("/mmds/config", r#"{"network_interfaces":["1"]}"#),
        ("/machine-config", r#"{"vcpu_count":1,"mem_size_mib":128,"cpu_template":"T2"}"#),
    ] {
        assert!(asked(Method::Put, path, body).unwrap().deprecated.is_some(), "{path}");
    }
    let plain = asked(Method::Put, "/vsock", r#"{"guest_cid":3,"uds_path":"/v"}"#);
    assert_eq!(plain.unwrap().deprecated, None);
}

#[test]
fn cpu_config_is_read_strictly_and_its_errors_name_the_field() {
    let body = r#"{"kvm_capabilities":["!56"],
                   "cpuid_modifiers":[{"leaf":"0x7","subleaf":"0x0","flags":1,"modifiers":[
                       {"register":"ebx","bitmap":"0b0xxxxx"}]}],
                   "msr_modifiers":[{"addr":"0x10a","bitmap":"0b00"}]}"#;
    let ApiCall::PutCpuConfig(modifiers) = put("/cpu-config", body) else { panic!() };
    assert_eq!((modifiers.cpuid[0].bitmap.clear, modifiers.msrs.len()), (1 << 5, 1));
    for (from, to, field) in [
        ("\"ebx\"", "\"ebp\"", "cpuid_modifiers[0].modifiers[0].register"),
        ("0b0xxxxx", "0b2", "cpuid_modifiers[0].modifiers[0].bitmap"),
        ("msr_modifiers", "reg_modifiers", "reg_modifiers: is for aarch64"),
        ("\"!56\"", "56", "kvm_capabilities[0]"),
        ("\"addr\"", "\"address\"", "msr_modifiers[0].address"),
    ] {
        let message = refused(Method::Put, "/cpu-config", &body.replace(from, to));
        assert!(message.contains(field), "{message}");
    }
    assert_eq!(refused(Method::Put, "/cpu-config", ""), "Empty PUT request.");
}

#[test]
fn load_without_memory_or_with_two_is_refused() {
    let both = r#"{"snapshot_path":"/s","mem_file_path":"/m",
                   "mem_backend":{"backend_type":"File","backend_path":"/m"}}"#;
    assert!(refused(Method::Put, "/snapshot/load", both).contains("too many fields"));
    let none = refused(Method::Put, "/snapshot/load", r#"{"snapshot_path":"/s"}"#);
    assert!(none.contains("missing field: either `mem_backend` or `mem_file_path` is required"));
}

#[test]
fn what_is_not_here_is_known_and_says_so() {
    for (method, path) in [
        (Method::Put, "/pmem/p"),
        (Method::Patch, "/pmem/p"),
        (Method::Put, "/hotplug/memory"),
        (Method::Patch, "/hotplug/memory"),
        (Method::Get, "/hotplug/memory"),
        (Method::Delete, "/drives/a"),
    ] {
        let body = if matches!(method, Method::Get | Method::Delete) { "" } else { "{}" };
        let ApiCall::Unsupported(what) = asked(method, path, body).unwrap().request else {
            panic!("{path}")
        };
        assert!(what.refusal().message.contains("not supported yet"));
    }
}

#[test]
fn fields_in_an_array_are_refused_at_every_depth() {
    let positional = [
        ("/logger", "[null, null]"),
        ("/entropy", r#"{"rate_limiter": [null, null]}"#),
        ("/actions", r#"["InstanceStart"]"#),
        (
            "/snapshot/load",
            r#"{"snapshot_path":"s","mem_file_path":"m","network_overrides":[["a","b"]]}"#,
        ),
    ];
    for (path, body) in positional {
        assert!(refused(Method::Put, path, body).contains("an array stands"), "{path}");
    }
    put("/mmds", "[1, [2]]");
    put("/pvmm/exec", r#"{"argv": ["true"]}"#);
}
