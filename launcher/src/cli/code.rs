//! Arguments of `pvmm code`.

use std::time::Duration;

use clap::Args;

use super::TEMPLATE;
use crate::args;

/// Run code in an interpreter session whose variables stay
#[derive(Debug, Args)]
#[command(help_template = TEMPLATE, before_help = "\
Examples:
  pvmm code web -c 'x = 6 * 7'
  pvmm code web -c x                         the value of the last expression is printed
  pvmm code web --json -c 'df.describe()'    every form of it: text, HTML, PNG, JSON
  pvmm code web --lang node -c 'await fetch(url)'
  pvmm code web --session mine < script.py
  pvmm code web --list
  pvmm code web --session mine --close

A session is started on first use and keeps its state until it is closed, ends, or its VM does.
Exits 1 if the code threw, 124 if --timeout interrupted it.
")]
pub struct Code {
    /// Id, the start of an id, or name
    pub vm: String,
    /// The code; standard input without it
    #[arg(short, long, value_name = "CODE")]
    pub code: Option<String>,
    /// Name of the session [default: the language's name]
    #[arg(short, long, value_name = "NAME")]
    pub session: Option<String>,
    /// Language of the session
    #[arg(short, long, value_name = "LANG", default_value = "python")]
    pub lang: CodeLanguage,
    /// Interrupt the code after this long; the session goes on: 30s, 500ms, 5m
    #[arg(long, value_name = "TIME", value_parser = args::duration)]
    pub timeout: Option<Duration>,
    /// Everything as one JSON document, each output by MIME type
    #[arg(long)]
    pub json: bool,
    /// List the sessions
    #[arg(long, conflicts_with_all = ["code", "close", "session", "timeout"])]
    pub list: bool,
    /// End the session
    #[arg(long, conflicts_with_all = ["code", "timeout"])]
    pub close: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum CodeLanguage {
    Python,
    Node,
}

impl CodeLanguage {
    pub fn language(self) -> pvmm::agent::Language {
        match self {
            Self::Python => pvmm::agent::Language::Python,
            Self::Node => pvmm::agent::Language::Node,
        }
    }

    pub fn of(language: pvmm::agent::Language) -> Self {
        match language {
            pvmm::agent::Language::Python => Self::Python,
            pvmm::agent::Language::Node => Self::Node,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Python => "python",
            Self::Node => "node",
        }
    }

    /// Returns the interpreter to look for in the guest.
    pub fn program(self) -> &'static str {
        match self {
            Self::Python => "python3",
            Self::Node => "node",
        }
    }
}
