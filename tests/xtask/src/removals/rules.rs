//! The rules that [`super::run`] takes out, in the order of what they stop.

use super::Rule;

const FRAME: &str = "egress/src/frame.rs";
const POLICY: &str = "egress/src/policy.rs";
const CONNECTION: &str = "egress/src/connection.rs";
const GATEWAY: &str = "egress/src/gateway.rs";
const DATAGRAMS: &str = "egress/src/gateway/datagrams.rs";

pub const RULES: &[Rule] = &[
    // Frames.
    Rule {
        what: "the guest's hardware address",
        file: FRAME,
        text: "if Some(frame.src_addr()) != ends.guest_mac {",
        without: "if false {",
        test: "hostile::d6_spoofed_addresses_are_dropped_and_counted",
    },
    Rule {
        what: "the guest's IP address",
        file: FRAME,
        text: "if packet.src_addr() != ends.guest_ip {",
        without: "if false {",
        test: "hostile::d6_spoofed_addresses_are_dropped_and_counted",
    },
    Rule {
        what: "the sender of ARP",
        file: FRAME,
        text: "if Some(source_hardware_addr) != ends.guest_mac || !known {",
        without: "if false {",
        test: "lib::frame::tests::arp_of_another_address_is_dropped",
    },
    Rule {
        what: "no VLAN tags",
        file: FRAME,
        text: "EthernetProtocol::Unknown(0x8100 | 0x88a8 | 0x9100) => Err(Drop::Tagged),",
        without: "EthernetProtocol::Unknown(0x8100 | 0x88a8 | 0x9100) => {
            read_ipv4(frame.payload().get(4..).unwrap_or_default(), ends)
        }",
        test: "hostile::d6_tagged_frames_are_dropped",
    },
    Rule {
        what: "no IPv6",
        file: FRAME,
        text: "EthernetProtocol::Ipv6 => Err(Drop::Ipv6),",
        without: "EthernetProtocol::Ipv6 => Ok(Frame::Ignored),",
        test: "hostile::d7_ipv6_and_fragments_are_dropped",
    },
    Rule {
        what: "no fragments",
        file: FRAME,
        text: "if packet.more_frags() || packet.frag_offset() != 0 {",
        without: "if false {",
        test: "hostile::d7_ipv6_and_fragments_are_dropped",
    },
    Rule {
        what: "the checksum of a packet",
        file: FRAME,
        text: " || !packet.verify_checksum()",
        without: "",
        test: "lib::frame::tests::packet_with_a_wrong_length_or_checksum_is_dropped",
    },
    Rule {
        what: "the checksum of a datagram",
        file: FRAME,
        text: "if source_port == 0 || port == 0 || !sum {",
        without: "let _ = sum;\n    if source_port == 0 || port == 0 {",
        test: "datagrams::d16_datagram_with_a_wrong_length_or_checksum_reaches_nobody",
    },
    // Addresses.
    Rule {
        what: "an address needs a rule",
        file: POLICY,
        text: "None => Verdict::Denied(Denial::NoRule),",
        without: "None => Verdict::Allowed(\"none\".into()),",
        test: "denied::address_without_a_rule_is_reset_at_once",
    },
    Rule {
        what: "an address needs a rule, for datagrams",
        file: DATAGRAMS,
        text: "let basis = self.judge_target(to, port_of(key), now)?;",
        without: "let basis = Basis::Address { rule: \"none\".into() };",
        test: "datagrams::datagram_without_a_rule_is_refused_at_once_and_not_sent",
    },
    Rule {
        what: "special ranges are closed to `all`",
        file: POLICY,
        text: "Target::All => special.is_none(),",
        without: "Target::All => true,",
        test: "denied::d8_metadata_private_and_loopback_stay_closed_with_allow_all",
    },
    Rule {
        what: "special ranges are closed to larger networks",
        file: POLICY,
        text: "rule.allows_address(address, port) && (special.is_none() || cidr.is_special())",
        without: "{ let _ = cidr; rule.allows_address(address, port) }",
        test: "lib::policy::tests::allow_all_leaves_special_ranges_closed",
    },
    Rule {
        what: "special ranges are closed to names",
        file: POLICY,
        text: "if named || allowed { Ok(()) } else { Err(Denial::SpecialRange) }",
        without: "let _ = (named, allowed);\n        Ok(())",
        test: "denied::rebinding_name_that_leads_to_a_closed_range_is_refused",
    },
    Rule {
        what: "an answer keeps its open addresses only",
        file: GATEWAY,
        text: ".filter(|address| judge(*address).is_ok()).collect();",
        without: ".collect();",
        test: "denied::rebinding_answer_with_one_closed_address_keeps_the_others",
    },
    Rule {
        what: "an address is judged again when it is dialled",
        file: CONNECTION,
        text: "policy.judge_resolved(address, Some(self.port()))?;",
        without: "",
        test: "denied::rebinding_address_that_was_closed_since_is_not_dialled_in_place_of_an_open_one",
    },
    Rule {
        what: "the host's own addresses",
        file: CONNECTION,
        text: "if is_own(address) && !policy.opens_own_address(address, self.port()) {",
        without: "if false {",
        test: "denied::d9_address_of_the_host_is_closed_to_a_rule_for_its_network",
    },
    Rule {
        what: "the host's own addresses, for datagrams",
        file: DATAGRAMS,
        text: "if is_own(address) && !policy.opens_own_address(address, port) {",
        without: "if false {",
        test: "datagrams::d9_address_of_the_host_is_closed_to_datagrams_under_a_rule_for_its_network",
    },
    Rule {
        what: "a rule that denies an address comes first",
        file: POLICY,
        text: "self.deny.iter().any(denied).then_some(Denial::DeniedByRule)",
        without: "self.deny.iter().any(denied).then_some(Denial::DeniedByRule).filter(|_| false)",
        test: "lib::policy::tests::deny_comes_before_allow",
    },
    // Names.
    Rule {
        what: "a name needs a rule",
        file: POLICY,
        text: "(None, None) => Verdict::Denied(Denial::NameNotAllowed),",
        without: "(None, None) => Verdict::Allowed(\"none\".into()),",
        test: "denied::d10_name_without_a_rule_is_refused_and_not_asked_for",
    },
    Rule {
        what: "a rule that denies a name comes first",
        file: POLICY,
        text: "if self.deny.iter().any(|rule| rule.denies_name(name, port)) {",
        without: "if false {",
        test: "denied::deny_rule_holds_for_a_name_whose_address_is_allowed",
    },
    Rule {
        what: "the port of a rule for a name",
        file: "egress/src/policy/rule.rs",
        text: "(Some(at), Some(port)) => at.allows(port),\n                    (None, _) => is_tcp,",
        without: "(Some(_), Some(_)) => true,\n                    (None, _) => is_tcp,",
        test: "denied::port_without_a_rule_is_reset",
    },
    Rule {
        what: "a star is for whole labels",
        file: "egress/src/policy/rule.rs",
        text: "rest.len() > 1 && rest.ends_with('.')",
        without: "!rest.is_empty()",
        test: "lib::policy::tests::host_rule_matches_its_name_only",
    },
    Rule {
        what: "a client shows a name where names are shown",
        file: CONNECTION,
        text: "let must_show_name = by_name && is_named_port;",
        without: "let must_show_name = false;",
        test: "denied::connection_at_a_named_port_is_not_dialled_before_its_name_is_allowed",
    },
    Rule {
        what: "the name that a client shows",
        file: CONNECTION,
        text: "*shown = name;\n                        Err(denial)",
        without: "let _ = (shown, name, denial);\n                        Ok(true)",
        test: "denied::shown_name_without_a_rule_is_reset_before_a_byte_arrives",
    },
    Rule {
        what: "bytes wait until they are judged",
        file: CONNECTION,
        text: "while !self.held && self.writable",
        without: "while self.writable",
        test: "denied::shown_name_in_two_parts_is_held_back_until_it_is_judged",
    },
    Rule {
        what: "no encrypted hello",
        file: CONNECTION,
        text: "if by_name && !policy.allow_ech => {",
        without: "if false => {",
        test: "denied::shown_name_without_a_rule_is_reset_before_a_byte_arrives",
    },
    Rule {
        what: "a name is dialled where the resolver says",
        file: CONNECTION,
        text: "Basis::Name { name, .. } => Need::Addresses(name.clone()),\n            Basis::Address { .. } =>",
        without: "_ =>",
        test: "allowed::forged_name_is_dialled_where_it_leads_and_not_where_the_guest_points",
    },
    Rule {
        what: "answers of another resolver",
        file: "egress/src/dns.rs",
        text: "let ours = header.id == id\n        && ",
        without: "let _ = id;\n    let ours = ",
        test: "lib::dns::tests::reply_to_another_question_is_foreign",
    },
    Rule {
        what: "records of another name",
        file: "egress/src/dns.rs",
        text: ".filter(|record| record.name == name)",
        without: "",
        test: "lib::dns::tests::reply_is_followed_through_aliases_and_nothing_else",
    },
    // Datagrams.
    Rule {
        what: "no QUIC where names are judged",
        file: POLICY,
        text: "(None, Some(_)) if port.is_some_and(|port| self.is_quic(port)) => {\n                Verdict::Denied(Denial::Quic)\n            }\n            (None, Some(_)) => Verdict::Denied(Denial::Protocol),",
        without: "(None, Some(rule)) => Verdict::Allowed(rule.text.clone()),",
        test: "datagrams::quic_is_denied_where_rules_are_by_name",
    },
    Rule {
        what: "no QUIC beside secrets",
        file: DATAGRAMS,
        text: "if !secrets.is_empty() && policy.hides_name(address, port) {",
        without: "if false {\n        let _ = secrets;",
        test: "secrets::quic_is_denied_while_there_are_secrets",
    },
    // What changes while the guest runs, and bounds.
    Rule {
        what: "a new policy is for open connections",
        file: GATEWAY,
        text: "if let Err(denial) = connection.judge_again(socket, policy) {",
        without: "let _ = (&socket, policy);\n            if let Err(denial) = Ok::<(), Denial>(()) {",
        test: "control::new_policy_resets_what_it_denies_and_keeps_the_rest",
    },
    Rule {
        what: "a new policy is for open associations",
        file: GATEWAY,
        text: "        self.judge_associations(now);\n",
        without: "",
        test: "datagrams::policy_that_changes_ends_the_associations_that_it_denies",
    },
    Rule {
        what: "the bound of connections",
        file: GATEWAY,
        text: "if self.connections.has_room() { Ok(basis) } else { Err(Denial::TooMany) }",
        without: "Ok(basis)",
        test: "hostile::connections_have_a_bound_and_honest_ones_work_after_it",
    },
    Rule {
        what: "the bound of associations",
        file: "egress/src/associations.rs",
        text: "            self.evict();\n",
        without: "",
        test: "lib::associations::tests::full_table_gives_the_place_of_the_least_used_to_a_new_one",
    },
    // Secrets.
    Rule {
        what: "a secret is for its host",
        file: "egress/src/secrets.rs",
        text: "self.all.iter().filter(|secret| secret.host == host).cloned().collect()",
        without: "self.all.iter().filter(|_| !host.is_empty()).cloned().collect()",
        test: "secrets::other_host_keeps_its_own_tls_and_gets_the_placeholder",
    },
    Rule {
        what: "each request is for the host of its connection",
        file: "egress/src/requests.rs",
        text: "b\"host\" if !self.is_host(value) => {",
        without: "b\"host\" if false => {",
        test: "secrets::d14_request_with_another_host_on_the_same_connection_is_refused",
    },
    Rule {
        what: "one length of a body",
        file: "egress/src/requests.rs",
        text: "_ => return Err(Refusal(\"the length of the body is said in several ways\")),",
        without: "_ => Body::Len(0),",
        test: "lib::requests::tests::d14_request_that_can_be_read_in_two_ways_is_refused",
    },
    // The process itself.
    Rule {
        what: "no capabilities",
        file: "egress/src/confine.rs",
        text: "step(\"drop capabilities\", sys::drop_capabilities())?;",
        without: "",
        test: "process::process_has_no_rights_that_it_does_not_need",
    },
    Rule {
        what: "no core dumps",
        file: "egress/src/confine.rs",
        text: "step(\"forbid core dumps\", sys::limit(Resource::Core, 0))?;",
        without: "",
        test: "process::process_has_no_rights_that_it_does_not_need",
    },
];
