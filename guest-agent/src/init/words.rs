//! The agent's options on the kernel command line, all of which begin with `pvmm.`.
//!
//! The host writes them; unknown options are ignored, so that a later agent can add some.

/// The boot options of the host.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Words {
    /// The block device with the root filesystem, which is only read.
    pub root: Option<String>,
    pub root_fs_type: Option<String>,
    /// The block device that takes writes; without one, memory does.
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
