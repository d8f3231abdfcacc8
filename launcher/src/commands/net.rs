//! `pvmm net`: shows and changes what a VM's guest may reach, by asking its egress process.

use pvmm_egress::policy::PolicyDocument;
use serde_json::{Value, json};

use crate::cli::NetArgs;
use crate::exit::{Failure, Outcome};
use crate::output::{self, Table};
use pvmm_sandbox::net::{self, ask};
use pvmm_sandbox::vm_dir::{Base, VmEntry};

/// The exit code of a check whose target is denied.
const DENIED: u8 = 1;

pub fn net(args: NetArgs) -> Outcome {
    let words: Vec<&str> = args.words.iter().map(String::as_str).collect();
    match words.as_slice() {
        ["check", vm, target] => check(&find(vm)?, target, args.json),
        [vm] => {
            let vm = find(vm)?;
            if !(args.allow.is_empty() && args.allow_host.is_empty() && args.deny.is_empty()) {
                return change(&vm, &args);
            }
            show(&vm, args.json)
        }
        _ => Err(Failure::usage("one VM at a time, or: pvmm net check VM NAME:PORT")),
    }
}

fn find(name: &str) -> Result<VmEntry, Failure> {
    let vm = Base::open()?.find(name)?;
    vm.require_running()?;
    if !vm.has_egress() {
        let message = format!("'{}' has no network with a policy", vm.label());
        return Err(Failure::usage(message).hint("start it with: pvmm run --net"));
    }
    Ok(vm)
}

/// Replaces the policy as a whole, in the process and in the VM's directory.
fn change(vm: &VmEntry, args: &NetArgs) -> Outcome {
    net::change(vm, |policy| {
        for rule in &args.allow {
            put(policy, rule, |policy| &mut policy.allow);
        }
        for rule in &args.allow_host {
            put(policy, rule, |policy| &mut policy.allow_host);
        }
        for rule in &args.deny {
            put(policy, rule, |policy| &mut policy.deny);
        }
    })?;
    Ok(0)
}

/// Puts a rule into one list of a policy, and out of the others.
fn put(
    policy: &mut PolicyDocument,
    rule: &str,
    list: impl Fn(&mut PolicyDocument) -> &mut Vec<String>,
) {
    for list in [&mut policy.allow, &mut policy.allow_host, &mut policy.deny] {
        list.retain(|old| old != rule);
    }
    list(policy).push(rule.to_owned());
}

fn check(vm: &VmEntry, target: &str, json: bool) -> Outcome {
    let verdict = ask(vm, &json!({ "check": target }))?;
    let allowed = verdict["allowed"] == true;
    if json {
        output::json(&verdict)?;
    } else if allowed {
        output::line(&format!("allowed by {}", text(&verdict["rule"])))?;
    } else {
        output::line(&format!("denied: {}", text(&verdict["message"])))?;
    }
    Ok(if allowed { 0 } else { DENIED })
}

fn show(vm: &VmEntry, json: bool) -> Outcome {
    let status = ask(vm, &json!({ "status": {} }))?;
    if json {
        output::json(&status)?;
        return Ok(0);
    }
    let bytes = |value: &Value| output::bytes(value.as_u64().unwrap_or_default());
    let mut rules = Table::new(&["RULE", "", "CONNECTIONS", "OUT", "IN"]);
    for rule in rows(&status["rules"]) {
        rules.row(vec![
            text(&rule["rule"]),
            text(&rule["action"]),
            rule["connections"].to_string(),
            bytes(&rule["bytes_out"]),
            bytes(&rule["bytes_in"]),
        ]);
    }
    rules.print()?;
    let mut secrets = Table::new(&["SECRET", "HOST", "REQUESTS"]);
    for secret in rows(&status["secrets"]) {
        let (name, host) = (text(&secret["name"]), text(&secret["host"]));
        secrets.row(vec![name, host, secret["uses"].to_string()]);
    }
    if !rows(&status["secrets"]).is_empty() {
        output::line("")?;
        secrets.print()?;
    }
    let mut denied = Table::new(&["DENIED", "ADDRESS", "PORT", "TIMES", "WHY"]);
    for attempt in rows(&status["denied"]) {
        denied.row(vec![
            text(&attempt["name"]),
            text(&attempt["address"]),
            port(attempt),
            attempt["count"].to_string(),
            text(&attempt["reason"]),
        ]);
    }
    if !rows(&status["denied"]).is_empty() {
        output::line("")?;
        denied.print()?;
    }
    Ok(0)
}

/// Returns the port of a denied attempt, with its protocol if it is not the usual one. A question
/// to the resolver has none.
fn port(attempt: &Value) -> String {
    match (attempt["port"].as_u64(), attempt["protocol"].as_str()) {
        (Some(port), Some("udp")) => format!("{port}/udp"),
        (Some(port), _) => port.to_string(),
        (None, _) => "-".to_owned(),
    }
}

fn rows(value: &Value) -> &[Value] {
    value.as_array().map(Vec::as_slice).unwrap_or_default()
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or("-").to_owned()
}
