//! The names under which descriptors are watched.

/// A watched descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Token {
    /// The link to the guest.
    Link,
    /// The listener for control clients.
    Control,
    Client(u32),
    /// A question to an upstream resolver.
    Question(u32),
    /// The host's socket of a connection.
    Connection(u32),
    /// The host's socket of an association over UDP.
    Association(u32),
}

impl From<Token> for u64 {
    fn from(token: Token) -> Self {
        let (kind, number) = match token {
            Token::Link => (0, 0),
            Token::Control => (1, 0),
            Token::Client(number) => (2, number),
            Token::Question(number) => (3, number),
            Token::Connection(number) => (4, number),
            Token::Association(number) => (5, number),
        };
        kind << 32 | Self::from(number)
    }
}

impl From<u64> for Token {
    fn from(bits: u64) -> Self {
        let number = bits as u32;
        match bits >> 32 {
            0 => Self::Link,
            1 => Self::Control,
            2 => Self::Client(number),
            3 => Self::Question(number),
            4 => Self::Connection(number),
            _ => Self::Association(number),
        }
    }
}
