//! The printable alphabet that byte-level tokenizers write bytes in.

/// The character of each byte: itself where it is printable Latin-1, else the next unused one from U+0100 on.
pub(crate) fn alphabet() -> [char; 256] {
    let mut next = 0x100_u32;
    std::array::from_fn(|byte| {
        let byte = u32::try_from(byte).expect("below 256");
        let printable = matches!(byte, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
        let code = if printable {
            byte
        } else {
            next += 1;
            next - 1
        };
        char::from_u32(code).expect("codes below U+0200 are characters")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(byte: u8, expected: char) {
        assert_eq!(alphabet()[usize::from(byte)], expected);
    }

    #[test]
    fn is_the_published_alphabet() {
        check(b'A', 'A');
        check(b' ', 'Ġ');
        check(b'\n', 'Ċ');
        check(0xAD, 'Ń');
        check(0xFF, 'ÿ');
    }
}
