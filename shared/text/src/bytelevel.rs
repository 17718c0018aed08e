//! The GPT-2 byte alphabet: vocabularies spell each byte as one printable character.

/// The bytes `token` spells. A token with a character outside the alphabet (an added token, as a
/// rule) stands for its own UTF-8 bytes, as in the `ByteLevel` decoder.
pub(crate) fn bytes_of(token: &str) -> Vec<u8> {
    token.chars().map(byte_of).collect::<Option<_>>().unwrap_or_else(|| token.as_bytes().to_vec())
}

fn byte_of(c: char) -> Option<u8> {
    match u32::from(c) {
        // Printable Latin-1 spells itself.
        code @ (0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff) => Some(code as u8),
        // The other 68 bytes follow from U+0100 on, in byte order.
        code @ 0x100..=0x120 => Some((code - 0x100) as u8),
        code @ 0x121..=0x142 => Some((code - 0x121 + 0x7f) as u8),
        0x143 => Some(0xad),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_alphabet_spells_each_byte_once() {
        let mut bytes: Vec<u8> = (0..0x200).filter_map(char::from_u32).filter_map(byte_of).collect();
        bytes.sort_unstable();
        assert_eq!(bytes, (0..=255).collect::<Vec<u8>>());
        assert_eq!(bytes_of("Ġfoo"), b" foo");
        assert_eq!(bytes_of("ĊĉÃ©"), "\n\té".as_bytes());
        assert_eq!(bytes_of("<｜end▁of｜>"), "<｜end▁of｜>".as_bytes());
    }
}
