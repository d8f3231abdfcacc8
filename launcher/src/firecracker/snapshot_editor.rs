//! Firecracker's `snapshot-editor`: the commands of the original, on pvmm's two snapshot files.

use std::path::Path;

use pvmm::snapshot::{StateFile, rebase};

use super::args::code;

const USAGE: &str = "\
snapshot-editor edit-memory rebase --memory-path FILE --diff-path FILE
snapshot-editor info-vmstate version --vmstate-path FILE
snapshot-editor info-vmstate vcpu-states --vmstate-path FILE
snapshot-editor info-vmstate vm-state --vmstate-path FILE
";

/// Runs the command in `words` and returns the exit code of the process.
pub fn run(words: &[String]) -> u8 {
    match perform(words) {
        Ok(text) => super::print(&text),
        Err(message) => {
            eprintln!("Error: {message}");
            code::GENERIC
        }
    }
}

fn perform(words: &[String]) -> Result<String, String> {
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let described = |path: &str| StateFile::describe(Path::new(path)).map_err(|e| format!("{e:#}"));
    match words[..] {
        ["edit-memory", "rebase", "--memory-path", memory, "--diff-path", differences]
        | ["edit-memory", "rebase", "--diff-path", differences, "--memory-path", memory] => {
            rebase(Path::new(memory), Path::new(differences))
                .map_err(|error| format!("{error:#}"))?;
            Ok(String::new())
        }
        ["info-vmstate", "version", "--vmstate-path", path] => {
            Ok(format!("v{}\n", described(path)?.version))
        }
        ["info-vmstate", "vcpu-states", "--vmstate-path", path] => {
            let vcpus = described(path)?.vcpus.into_iter().enumerate();
            Ok(vcpus.map(|(index, text)| format!("vcpu {index}:\n{text}\n")).collect())
        }
        ["info-vmstate", "vm-state", "--vmstate-path", path] => {
            Ok(format!("{}\n", described(path)?.machine))
        }
        ["--help" | "-h"] => Ok(USAGE.to_owned()),
        _ => Err(format!("these words are none of\n{USAGE}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(line: &str) -> Result<String, String> {
        perform(&line.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn words_of_another_shape_and_files_that_are_none_are_refused() {
        assert_eq!(said("--help").as_deref(), Ok(USAGE));
        for line in
            ["", "edit-memory rebase", "info-vmstate version --vmstate-path", "edit-vmstate"]
        {
            assert!(said(line).unwrap_err().contains("none of"), "{line}");
        }
        assert!(said("info-vmstate version --vmstate-path /no/such").is_err());
        assert!(said("edit-memory rebase --diff-path /no --memory-path /no").is_err());
    }
}
