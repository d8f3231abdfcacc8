//! Checks that every case of `docs/bad-input.md` has a test, and that every test that it names
//! exists.
//!
//! A test has the number of its case in its name, or in its comment.

use std::collections::HashSet;

/// The groups of cases of which each case must have a test.
const GROUPS: [char; 10] = ['a', 'b', 'c', 'd', 'e', 'f', 'g', 'h', 'i', 'j'];

/// The cases in the sources: names of functions, and numbers in their names and in comments.
#[derive(Default)]
pub struct Tests {
    functions: HashSet<String>,
    cases: HashSet<String>,
}

impl Tests {
    /// Adds the functions and cases of one source file.
    pub fn add(&mut self, source: &str) {
        for line in source.lines().map(str::trim_start) {
            let rest = ["pub ", "async "]
                .iter()
                .fold(line, |line, word| line.strip_prefix(word).unwrap_or(line));
            if let Some(name) = rest.strip_prefix("fn ") {
                let end = name.find(|c: char| !c.is_ascii_alphanumeric() && c != '_');
                let name = &name[..end.unwrap_or(name.len())];
                self.functions.insert(name.to_owned());
                self.cases.extend(name.split('_').filter(|word| is_case(word)).map(str::to_owned));
            } else if let Some(comment) = line.strip_prefix("//") {
                let words = comment.split([' ', ':', ',']);
                let cases = words.map(str::to_ascii_lowercase).filter(|word| is_case(word));
                self.cases.extend(cases);
            }
        }
    }

    /// Returns the cases of the page that have no test, and the tests that it names and that do not
    /// exist.
    pub fn missing(&self, page: &str) -> Vec<String> {
        let mut faults = Vec::new();
        for line in page.lines().filter(|line| line.starts_with('|')) {
            let number = line.split('|').nth(1).unwrap_or_default().trim().to_ascii_lowercase();
            let checked = is_case(&number) && number.starts_with(GROUPS);
            if checked && !self.cases.contains(&number) {
                faults.push(format!("docs/bad-input.md: no test is called {number}_…"));
            }
            let named = line.split('`').skip(1).step_by(2);
            let is_test = |word: &&str| word.contains('_') && !word.contains(['/', '.', ' ']);
            for name in named.filter(is_test).filter(|name| !self.functions.contains(*name)) {
                faults.push(format!("docs/bad-input.md names {name}, which is no test"));
            }
        }
        faults
    }
}

/// Returns whether a word is one letter and a number.
fn is_case(word: &str) -> bool {
    let mut letters = word.chars();
    letters.next().is_some_and(|c| c.is_ascii_lowercase())
        && word.len() > 1
        && letters.all(|c| c.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_case_and_missing_test_are_named() {
        let mut tests = Tests::default();
        tests
            .add("fn a1_ring_is_refused() {}\n    pub fn other_is_refused_b2() {}\n/// C3: too.\n");
        let page = "| A1 | x | y |\n| B2 | x | y |\n| C3 | x | y |\n| class | CVE | `a1_ring_is_refused` |\n";
        assert_eq!(tests.missing(page), Vec::<String>::new());
        let page = "| A2 | x | y |\n| class | CVE-1_2 | `gone_test`, `a/b_c.rs` |\n";
        assert_eq!(tests.missing(page).len(), 2, "{:?}", tests.missing(page));
    }
}
