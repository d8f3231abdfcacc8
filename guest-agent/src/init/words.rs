//! The kernel command line's words for the agent, all of which begin with `pvmm.`.
//! The host writes them; words that are not known are left for a later agent.

/// What the host asks of the boot.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Words {
    /// Block device with the root filesystem, which is only ever read.
    pub root: Option<String>,
    pub root_fs_type: Option<String>,
    /// Block device that takes what is written; memory takes it without one.
    pub upper: Option<String>,
    pub hostname: Option<String>,
}

impl Words {
    pub fn parse(command_line: &str) -> Self {
        let mut words = Self::default();
        for word in command_line.split_ascii_whitespace() {
            let Some((name, value)) = word.split_once('=') else { continue };
            let slot = match name {
                "pvmm.root" => &mut words.root,
                "pvmm.rootfstype" => &mut words.root_fs_type,
                "pvmm.upper" => &mut words.upper,
                "pvmm.hostname" => &mut words.hostname,
                _ => continue,
            };
            *slot = Some(value.to_owned()).filter(|value| !value.is_empty());
        }
        words
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_among_others_are_found() {
        let words = Words::parse("quiet root=/dev/sda pvmm.root=/dev/vda pvmm.new=1 pvmm.upper=\n");
        assert_eq!(words, Words { root: Some("/dev/vda".into()), ..Words::default() });
    }

    #[test]
    fn words_given_twice_take_the_last() {
        let words = Words::parse("pvmm.hostname=a pvmm.hostname=b");
        assert_eq!(words.hostname.as_deref(), Some("b"));
    }
}
