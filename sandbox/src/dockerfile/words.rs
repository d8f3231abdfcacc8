//! Splits text into words and puts variables in, by the rules of Dockerfiles.

use std::iter::Peekable;
use std::str::Chars;

/// Looks up a variable.
pub type Vars<'a> = &'a dyn Fn(&str) -> Option<String>;

/// The longest text that variables may grow into; each may contain others.
const MAX_TEXT: usize = 256 << 10;

/// Splits text at spaces outside of quotes, and puts variables in.
pub fn split(text: &str, vars: Vars<'_>) -> Result<Vec<String>, String> {
    let mut lexer = Lexer { rest: text.chars().peekable(), vars, words: Vec::new() };
    let mut word = None;
    lexer.run(&mut word, true)?;
    lexer.words.extend(word);
    Ok(lexer.words)
}

/// Puts variables into text and removes its quotes, without splitting it.
pub fn expand(text: &str, vars: Vars<'_>) -> Result<String, String> {
    let mut lexer = Lexer { rest: text.chars().peekable(), vars, words: Vec::new() };
    let mut word = None;
    lexer.run(&mut word, false)?;
    Ok(word.unwrap_or_default())
}

struct Lexer<'a> {
    rest: Peekable<Chars<'a>>,
    vars: Vars<'a>,
    words: Vec<String>,
}

impl Lexer<'_> {
    fn run(&mut self, word: &mut Option<String>, splits: bool) -> Result<(), String> {
        while let Some(char) = self.rest.next() {
            match char {
                ' ' | '\t' if splits => self.words.extend(word.take()),
                '\\' => {
                    let next = self.rest.next().unwrap_or('\\');
                    word.get_or_insert_default().push(next);
                }
                '\'' => self.single(word.get_or_insert_default())?,
                '"' => self.double(word.get_or_insert_default())?,
                '$' => self.variable(word.get_or_insert_default())?,
                char => word.get_or_insert_default().push(char),
            }
            if word.as_ref().is_some_and(|word| word.len() > MAX_TEXT) {
                return Err("the text is too long".to_owned());
            }
        }
        Ok(())
    }

    fn single(&mut self, word: &mut String) -> Result<(), String> {
        loop {
            match self.rest.next() {
                Some('\'') => return Ok(()),
                Some(char) => word.push(char),
                None => return Err("a quote is not closed".to_owned()),
            }
        }
    }

    fn double(&mut self, word: &mut String) -> Result<(), String> {
        loop {
            match self.rest.next() {
                Some('"') => return Ok(()),
                Some('$') => self.variable(word)?,
                Some('\\') => match self.rest.next() {
                    Some(char @ ('"' | '$' | '\\')) => word.push(char),
                    Some(char) => word.extend(['\\', char]),
                    None => return Err("a quote is not closed".to_owned()),
                },
                Some(char) => word.push(char),
                None => return Err("a quote is not closed".to_owned()),
            }
        }
    }

    /// Reads the name after `$`: `$NAME`, `${NAME}`, `${NAME:-WORD}` or `${NAME:+WORD}`.
    fn variable(&mut self, word: &mut String) -> Result<(), String> {
        if self.rest.next_if_eq(&'{').is_none() {
            let name = self.name();
            if name.is_empty() {
                word.push('$');
            } else {
                word.push_str(&(self.vars)(&name).unwrap_or_default());
            }
            return Ok(());
        }
        let name = self.name();
        let mut rest = String::new();
        let mut depth = 1;
        for char in self.rest.by_ref() {
            depth += i32::from(char == '{') - i32::from(char == '}');
            if depth == 0 {
                break;
            }
            rest.push(char);
        }
        if name.is_empty() || depth != 0 {
            return Err(format!("${{{name}{rest} is not a variable"));
        }
        let value = (self.vars)(&name).filter(|value| !value.is_empty());
        let put = match (rest.get(..2), rest.is_empty(), value) {
            (_, true, value) => value.unwrap_or_default(),
            (Some(":-"), _, Some(value)) => value,
            (Some(":-"), _, None) => expand(&rest[2..], self.vars)?,
            (Some(":+"), _, Some(_)) => expand(&rest[2..], self.vars)?,
            (Some(":+"), _, None) => String::new(),
            _ => return Err(format!("${{{name}{rest}}}: only ':-' and ':+' are known")),
        };
        word.push_str(&put);
        Ok(())
    }

    fn name(&mut self) -> String {
        let mut name = String::new();
        while let Some(char) =
            self.rest.next_if(|char| char.is_ascii_alphanumeric() || *char == '_')
        {
            name.push(char);
        }
        name
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vars(name: &str) -> Option<String> {
        match name {
            "A" => Some("one two".to_owned()),
            "E" => Some(String::new()),
            _ => None,
        }
    }

    #[test]
    fn words_with_quotes_and_variables_are_split_and_filled() {
        let words = |text| split(text, &vars).unwrap();
        assert_eq!(words("a  b\tc"), ["a", "b", "c"]);
        assert_eq!(words(r#"x="a b" y='$A' z=\$A"#), ["x=a b", "y=$A", "z=$A"]);
        assert_eq!(words("x=$A ${A}s $E ${N}"), ["x=one two", "one twos", "", ""]);
        assert_eq!(words("${N:-d} ${A:-d} ${E:-${A}} ${A:+s} ${N:+s}")[..2], ["d", "one two"]);
        assert_eq!(expand("${E:-${A}}/x y", &vars).unwrap(), "one two/x y");
        assert_eq!(expand("5$ \"a\\n\"", &vars).unwrap(), "5$ a\\n");
    }

    #[test]
    fn words_that_are_not_closed_or_known_are_refused() {
        for bad in ["'a", "\"a", "\"a\\", "${A", "${", "${}", "${A%x}", "${A?x}"] {
            assert!(split(bad, &vars).is_err(), "{bad}");
        }
    }
}
