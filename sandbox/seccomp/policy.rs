//! The reader of `x86_64.policy`, which says what each kind of thread may ask of the kernel.
//!
//! The build script compiles filters from the rules, and the suite compares the rules with the
//! calls that it has traced. Both include this file, so that they read the same policy.

use std::collections::BTreeMap;

/// The rules of every kind of thread.
#[derive(Debug, Default)]
pub struct Policy {
    /// In the order of the file.
    pub threads: Vec<Thread>,
}

/// The rules of one kind of thread, with those of its groups.
#[derive(Debug)]
pub struct Thread {
    pub name: String,
    pub rules: Vec<Rule>,
}

/// A permission to make a system call, or the error that answers one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    pub call: String,
    /// All of them must hold.
    pub conditions: Vec<Condition>,
    /// The call is not made, and returns this error.
    pub error: Option<u32>,
    /// The suite need not come across the call.
    pub rare: bool,
    pub reason: String,
    /// The line of the file.
    pub line: usize,
}

/// A condition on the lower 32 bits of an argument: its bits in `mask` equal `value`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Condition {
    pub argument: u8,
    pub mask: u32,
    pub value: u32,
}

impl Condition {
    #[allow(dead_code)] // Only the suite asks.
    pub fn holds(&self, value: u64) -> bool {
        value as u32 & self.mask == self.value
    }
}

/// The definitions that rules refer to.
#[derive(Default)]
struct Names {
    constants: BTreeMap<String, u32>,
    /// The names of the arguments of a call.
    arguments: BTreeMap<String, Vec<String>>,
    groups: BTreeMap<String, Vec<Rule>>,
}

enum Section {
    Constants,
    Arguments,
    Group(String),
    Thread(Thread),
}

impl Policy {
    /// Reads a policy. An error names the line.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut policy = Self::default();
        let mut names = Names::default();
        let mut section = None;
        for (number, line) in (1..).zip(text.lines()) {
            let line = line.trim();
            let at = |what: String| format!("line {number}: {what}: {line}");
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            if let Some(title) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
                policy.threads.extend(section.take().and_then(finished));
                section = Some(names.begin(title).map_err(at)?);
                continue;
            }
            match section.as_mut().ok_or_else(|| at("outside of a section".to_owned()))? {
                Section::Constants => names.constant(line),
                Section::Arguments => names.signature(line),
                Section::Group(group) => names
                    .rule(line, number)
                    .and_then(|rule| add(names.groups.entry(group.clone()).or_default(), rule)),
                Section::Thread(thread) => {
                    names.rule(line, number).and_then(|rule| add(&mut thread.rules, rule))
                }
            }
            .map_err(at)?;
        }
        policy.threads.extend(section.and_then(finished));
        Ok(policy)
    }
}

fn finished(section: Section) -> Option<Thread> {
    match section {
        Section::Thread(thread) => Some(thread),
        _ => None,
    }
}

/// Adds a rule, unless another one already permits what it permits.
fn add(rules: &mut Vec<Rule>, rule: Rule) -> Result<(), String> {
    let covers = |other: &Rule| {
        other.call == rule.call
            && (other.conditions.is_empty()
                || rule.conditions.is_empty()
                || other.conditions == rule.conditions)
    };
    match rules.iter().find(|other| covers(other)) {
        Some(other) => Err(format!("line {} says as much", other.line)),
        None => {
            rules.push(rule);
            Ok(())
        }
    }
}

impl Names {
    fn begin(&self, title: &str) -> Result<Section, String> {
        let (kind, rest) = title.split_once(' ').unwrap_or((title, ""));
        match kind {
            "constants" => Ok(Section::Constants),
            "arguments" => Ok(Section::Arguments),
            "group" => Ok(Section::Group(rest.trim().to_owned())),
            "thread" => {
                let (name, groups) = rest.split_once(':').unwrap_or((rest, ""));
                let mut rules = Vec::new();
                for group in groups.split(',').map(str::trim).filter(|group| !group.is_empty()) {
                    let group = self.groups.get(group).ok_or("there is no such group")?;
                    group.iter().try_for_each(|rule| add(&mut rules, rule.clone()))?;
                }
                Ok(Section::Thread(Thread { name: name.trim().to_owned(), rules }))
            }
            _ => Err("a section is constants, arguments, group or thread".to_owned()),
        }
    }

    fn constant(&mut self, line: &str) -> Result<(), String> {
        let (name, value) = line.split_once('=').ok_or("a constant is NAME = VALUE")?;
        let value = self.number(value.trim())?;
        self.constants.insert(name.trim().to_owned(), value);
        Ok(())
    }

    fn signature(&mut self, line: &str) -> Result<(), String> {
        let mut words = line.split_whitespace().map(str::to_owned);
        let call = words.next().ok_or("a call and its arguments")?;
        self.arguments.insert(call, words.collect());
        Ok(())
    }

    /// Reads `[rare] CALL [(CONDITION, …)] [-> ERROR]: REASON`.
    fn rule(&self, line: &str, number: usize) -> Result<Rule, String> {
        let (head, reason) = line.split_once(": ").ok_or("a rule needs a reason")?;
        let (head, error) = match head.split_once("->") {
            Some((head, error)) => (head, Some(self.number(error.trim())?)),
            None => (head, None),
        };
        let (head, rare) = match head.strip_prefix("rare ") {
            Some(head) => (head, true),
            None => (head, false),
        };
        let (call, conditions) = head.split_once('(').unwrap_or((head, ")"));
        let call = call.trim().to_owned();
        let conditions = conditions.trim().strip_suffix(')').ok_or("a ) is missing")?;
        let conditions = conditions.split(',').map(str::trim).filter(|it| !it.is_empty());
        let conditions =
            conditions.map(|it| self.condition(&call, it)).collect::<Result<_, _>>()?;
        let reason = reason.trim().to_owned();
        if reason.is_empty() {
            return Err("a rule needs a reason".to_owned());
        }
        Ok(Rule { call, conditions, error, rare, reason, line: number })
    }

    /// Reads `NAME = VALUE` or `NAME & MASK = VALUE`, where NAME is that of an argument.
    fn condition(&self, call: &str, text: &str) -> Result<Condition, String> {
        let (left, value) = text.split_once('=').ok_or("a condition is NAME = VALUE")?;
        let (name, mask) = match left.split_once('&') {
            Some((name, mask)) => (name, self.number(mask.trim())?),
            None => (left, u32::MAX),
        };
        let value = self.number(value.trim())?;
        let arguments = self.arguments.get(call).ok_or("[arguments] does not name the call")?;
        let place = arguments.iter().position(|argument| argument == name.trim());
        let argument = place.ok_or("the call has no such argument")? as u8;
        Ok(Condition { argument, mask, value })
    }

    /// Reads numbers and names of constants, joined by `|`.
    fn number(&self, text: &str) -> Result<u32, String> {
        text.split('|').map(str::trim).try_fold(0, |sum, part| {
            let named = self.constants.get(part).copied();
            let hex = || u32::from_str_radix(part.strip_prefix("0x")?, 16).ok();
            let value = named.or_else(hex).or_else(|| part.parse().ok());
            value.map(|value| sum | value).ok_or_else(|| format!("{part} is no number"))
        })
    }
}
