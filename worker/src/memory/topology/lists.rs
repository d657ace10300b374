//! Lists of numbers as the kernel writes them: `0-3,8,10-11`.

/// Longest list that is believed: more processors or nodes than any machine has.
const LENGTH_MAX: usize = 1 << 16;

/// The numbers, in the order of the text; nothing if it is no list.
pub(super) fn parse_list(text: &str) -> Option<Vec<u32>> {
    let mut numbers = Vec::new();
    for part in text.trim().split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.trim().parse::<u32>().ok()?, last.trim().parse::<u32>().ok()?);
        if first > last || (last - first) as usize >= LENGTH_MAX - numbers.len() {
            return None;
        }
        numbers.extend(first..=last);
    }
    Some(numbers)
}
