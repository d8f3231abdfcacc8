//! DNS messages: the guest's questions and their answers, and the answers of an upstream resolver.
//!
//! The functions are pure. The guest gets IPv4 addresses only: no other record leads it anywhere,
//! and an HTTPS record would bring it the key to an encrypted hello.

use std::net::Ipv4Addr;

use hickory_proto::op::{Edns, Message, MessageType, OpCode, Query, ResponseCode};
use hickory_proto::rr::rdata::A;
use hickory_proto::rr::{DNSClass, Name, RData, Record, RecordType};

use crate::policy::normal_name;

/// The most addresses in an answer; an answer with these fits in 512 bytes.
pub const ADDRESSES_MAX: usize = 12;
/// The longest question that is read.
pub const QUESTION_MAX: usize = 512;
/// The size of an upstream answer over UDP that no common path fragments.
pub const UPSTREAM_UDP_MAX: u16 = 1232;
// The most aliases that are followed.
const ALIASES_MAX: usize = 16;

/// A question of the guest.
#[derive(Clone, Debug)]
pub struct Question {
    id: u16,
    recursion_desired: bool,
    query: Query,
    /// The name, if it is one that a rule can have.
    pub name: Option<String>,
}

/// The result of asking an upstream resolver for the addresses of a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The addresses, perhaps none, and for how many seconds they hold.
    Found {
        addresses: Vec<Ipv4Addr>,
        ttl: u32,
    },
    NoSuchName,
    Failed,
}

/// A reply of an upstream resolver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// Not an answer to this question; perhaps forged.
    Foreign,
    /// Cut off, to be asked for again over TCP.
    Truncated,
    Answer(Outcome),
}

/// Reads a question of the guest. Returns None if it is malformed or not one question.
pub fn read_question(bytes: &[u8]) -> Option<Question> {
    if bytes.len() > QUESTION_MAX {
        return None;
    }
    let mut message = Message::from_vec(bytes).ok()?;
    let header = message.metadata;
    if header.message_type != MessageType::Query || header.op_code != OpCode::Query {
        return None;
    }
    let query = message.queries.pop()?;
    if !message.queries.is_empty() || query.query_class() != DNSClass::IN {
        return None;
    }
    let name = text_of(query.name());
    Some(Question { id: header.id, recursion_desired: header.recursion_desired, query, name })
}

impl Question {
    pub fn asks_addresses(&self) -> bool {
        self.query.query_type() == RecordType::A
    }

    /// Answers with addresses, perhaps none.
    pub fn answer(&self, addresses: &[Ipv4Addr], ttl: u32) -> Option<Vec<u8>> {
        let record = |address: &Ipv4Addr| {
            Record::from_rdata(self.query.name().clone(), ttl, RData::A(A(*address)))
        };
        self.message(ResponseCode::NoError, addresses.iter().take(ADDRESSES_MAX).map(record))
    }

    pub fn refuse(&self) -> Option<Vec<u8>> {
        self.message(ResponseCode::Refused, [])
    }

    pub fn no_such_name(&self) -> Option<Vec<u8>> {
        self.message(ResponseCode::NXDomain, [])
    }

    pub fn fail(&self) -> Option<Vec<u8>> {
        self.message(ResponseCode::ServFail, [])
    }

    fn message(
        &self,
        code: ResponseCode,
        records: impl IntoIterator<Item = Record>,
    ) -> Option<Vec<u8>> {
        let mut message = Message::response(self.id, OpCode::Query);
        message.metadata.response_code = code;
        message.metadata.recursion_desired = self.recursion_desired;
        message.metadata.recursion_available = true;
        message.add_query(self.query.clone());
        message.add_answers(records);
        message.to_vec().ok()
    }
}

/// Writes a question for an upstream resolver.
pub fn write_question(id: u16, name: &str) -> Option<Vec<u8>> {
    let mut message = Message::new(id, MessageType::Query, OpCode::Query);
    message.metadata.recursion_desired = true;
    message.add_query(Query::query(fully_qualified(name)?, RecordType::A));
    let mut edns = Edns::new();
    edns.set_max_payload(UPSTREAM_UDP_MAX);
    message.set_edns(edns);
    message.to_vec().ok()
}

/// Reads a reply to the question that `write_question` wrote.
pub fn read_reply(bytes: &[u8], id: u16, name: &str) -> Reply {
    let (Ok(message), Some(asked)) = (Message::from_vec(bytes), fully_qualified(name)) else {
        return Reply::Foreign;
    };
    let header = message.metadata;
    let same = |query: &Query| {
        *query.name() == asked
            && query.query_type() == RecordType::A
            && query.query_class() == DNSClass::IN
    };
    let ours = header.id == id
        && header.message_type == MessageType::Response
        && message.queries.len() == 1
        && message.queries.iter().all(same);
    if !ours {
        return Reply::Foreign;
    }
    if header.truncation {
        return Reply::Truncated;
    }
    Reply::Answer(match header.response_code {
        ResponseCode::NoError => follow(&message.answers, asked),
        ResponseCode::NXDomain => Outcome::NoSuchName,
        _ => Outcome::Failed,
    })
}

/// Follows aliases from a name to its addresses. Records of other names are ignored.
fn follow(records: &[Record], mut name: Name) -> Outcome {
    let mut ttl = u32::MAX;
    for _ in 0..ALIASES_MAX {
        let (mut addresses, mut alias) = (Vec::new(), None);
        for record in records.iter().filter(|record| record.name == name) {
            match &record.data {
                RData::A(A(address)) if addresses.len() < ADDRESSES_MAX => {
                    ttl = ttl.min(record.ttl);
                    addresses.push(*address);
                }
                RData::CNAME(target) => alias = Some((target.0.clone(), record.ttl)),
                _ => {}
            }
        }
        match alias {
            Some((target, alias_ttl)) if addresses.is_empty() => {
                ttl = ttl.min(alias_ttl);
                name = target;
            }
            _ => return Outcome::Found { addresses, ttl: if ttl == u32::MAX { 0 } else { ttl } },
        }
    }
    Outcome::Failed
}

fn fully_qualified(name: &str) -> Option<Name> {
    let mut name = Name::from_labels(name.split('.').map(str::as_bytes)).ok()?;
    name.set_fqdn(true);
    Some(name)
}

fn text_of(name: &Name) -> Option<String> {
    let labels: Option<Vec<&str>> =
        name.iter().map(|label| std::str::from_utf8(label).ok().filter(is_plain)).collect();
    normal_name(&labels?.join("."))
}

// A dot inside a label would make another name of it.
fn is_plain(label: &&str) -> bool {
    !label.contains('.')
}

#[cfg(test)]
mod tests {
    use hickory_proto::rr::rdata::CNAME;

    use super::*;

    fn name(text: &str) -> Name {
        fully_qualified(text).unwrap()
    }

    fn reply(id: u16, asked: &str, records: Vec<Record>) -> Vec<u8> {
        let mut message = Message::response(id, OpCode::Query);
        message.add_query(Query::query(name(asked), RecordType::A));
        message.add_answers(records);
        message.to_vec().unwrap()
    }

    fn a(owner: &str, ttl: u32, last: u8) -> Record {
        Record::from_rdata(name(owner), ttl, RData::A(A(Ipv4Addr::new(1, 1, 1, last))))
    }

    fn alias(owner: &str, target: &str) -> Record {
        Record::from_rdata(name(owner), 30, RData::CNAME(CNAME(name(target))))
    }

    fn found(last: &[u8], ttl: u32) -> Reply {
        let addresses = last.iter().map(|last| Ipv4Addr::new(1, 1, 1, *last)).collect();
        Reply::Answer(Outcome::Found { addresses, ttl })
    }

    #[test]
    fn question_is_read_and_answered_with_its_own_id() {
        let question = read_question(&write_question(7, "Example.com").unwrap()).unwrap();
        assert_eq!(question.name.as_deref(), Some("example.com"));
        assert!(question.asks_addresses());
        let answer = question.answer(&[Ipv4Addr::new(1, 1, 1, 1)], 9).unwrap();
        assert_eq!(read_reply(&answer, 7, "example.com"), found(&[1], 9));
        let refused = Message::from_vec(&question.refuse().unwrap()).unwrap();
        assert_eq!(refused.metadata.response_code, ResponseCode::Refused);
    }

    #[test]
    fn longest_answer_fits_in_512_bytes() {
        let long = format!("{0}.{0}.{0}.{1}", "a".repeat(63), "b".repeat(59));
        let question = read_question(&write_question(7, &long).unwrap()).unwrap();
        let answer = question.answer(&[Ipv4Addr::new(1, 1, 1, 1); 40], 9).unwrap();
        assert!(answer.len() <= 512, "{}", answer.len());
    }

    #[test]
    fn reply_is_followed_through_aliases_and_nothing_else() {
        let records = vec![
            alias("a.example", "b.example"),
            a("b.example", 60, 1),
            a("evil.example", 60, 9),
            a("b.example", 20, 2),
        ];
        assert_eq!(read_reply(&reply(7, "a.example", records), 7, "a.example"), found(&[1, 2], 20));
    }

    #[test]
    fn reply_with_a_loop_of_aliases_fails() {
        let records = vec![alias("a.example", "b.example"), alias("b.example", "a.example")];
        let read = read_reply(&reply(7, "a.example", records), 7, "a.example");
        assert_eq!(read, Reply::Answer(Outcome::Failed));
    }

    #[test]
    fn reply_to_another_question_is_foreign() {
        let bytes = reply(7, "a.example", vec![a("a.example", 60, 1)]);
        assert_eq!(read_reply(&bytes, 8, "a.example"), Reply::Foreign);
        assert_eq!(read_reply(&bytes, 7, "b.example"), Reply::Foreign);
        assert_eq!(read_reply(&bytes[..20], 7, "a.example"), Reply::Foreign);
        assert_eq!(
            read_reply(&write_question(7, "a.example").unwrap(), 7, "a.example"),
            Reply::Foreign
        );
    }

    #[test]
    fn message_that_is_not_one_question_is_not_read() {
        assert!(read_question(&reply(7, "a.example", vec![])).is_none());
        assert!(read_question(&[0; 12]).is_none());
        assert!(read_question(&[0xff; 200]).is_none());
        let good = write_question(7, "a.example").unwrap();
        for at in 0..good.len() {
            for value in 0..=255 {
                let mut changed = good.clone();
                changed[at] = value;
                read_question(&changed);
                read_reply(&changed, 7, "a.example");
            }
        }
    }
}
