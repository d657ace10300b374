//! Dates for templates that state the current day: `strftime` for a given second, in UTC and in English.

const DAYS: [&str; 7] =
    ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const SECONDS_PER_DAY: i64 = 86_400;

struct Moment {
    year: i64,
    /// From 1.
    month: i64,
    day: i64,
    day_of_year: i64,
    /// From Sunday, 0.
    weekday: i64,
    hour: i64,
    minute: i64,
    second: i64,
}

/// Formats a moment given in seconds since 1970. Directives that are not known stay as they are.
pub(super) fn format(unix_seconds: i64, pattern: &str) -> String {
    let moment = Moment::new(unix_seconds);
    let mut out = String::new();
    let mut rest = pattern.chars();
    while let Some(c) = rest.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut ahead = rest.clone();
        let mut directive = ahead.next();
        let unpadded = directive == Some('-');
        if unpadded {
            directive = ahead.next();
        }
        match directive.and_then(|directive| moment.directive(directive, unpadded)) {
            Some(text) => {
                out.push_str(&text);
                rest = ahead;
            }
            None => out.push('%'),
        }
    }
    out
}

impl Moment {
    /// Civil date from days (Hinnant, "chrono-compatible low-level date algorithms"): eras of 400 years from 1 March 0000.
    fn new(unix_seconds: i64) -> Self {
        let days = unix_seconds.div_euclid(SECONDS_PER_DAY);
        let seconds = unix_seconds.rem_euclid(SECONDS_PER_DAY);
        let shifted = days + 719_468;
        let era = shifted.div_euclid(146_097);
        let day_of_era = shifted.rem_euclid(146_097);
        let year_of_era =
            (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let from_march = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let shifted_month = (5 * from_march + 2) / 153;
        let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
        let year = year_of_era + era * 400 + i64::from(month <= 2);
        let leap = (year % 4 == 0 && year % 100 != 0) || year % 400 == 0;
        let before = [0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334];
        let day = from_march - (153 * shifted_month + 2) / 5 + 1;
        let month_start: i64 = before[usize::try_from(month - 1).unwrap_or(0)];
        Self {
            year,
            month,
            day,
            day_of_year: month_start + day + i64::from(leap && month > 2),
            weekday: (days + 4).rem_euclid(7),
            hour: seconds / 3_600,
            minute: seconds / 60 % 60,
            second: seconds % 60,
        }
    }

    fn directive(&self, directive: char, unpadded: bool) -> Option<String> {
        let number = |value: i64, width: usize| {
            if unpadded { value.to_string() } else { format!("{value:0width$}") }
        };
        let name = |names: &[&str], index: i64| {
            usize::try_from(index)
                .ok()
                .and_then(|at| names.get(at).copied())
                .unwrap_or("")
                .to_owned()
        };
        let short = |name: String| name.chars().take(3).collect::<String>();
        let hour12 = if self.hour % 12 == 0 { 12 } else { self.hour % 12 };
        let all = |pattern: &str| {
            pattern
                .chars()
                .map(|c| {
                    if c.is_alphabetic() {
                        self.directive(c, false).unwrap_or_default()
                    } else {
                        c.to_string()
                    }
                })
                .collect()
        };
        Some(match directive {
            'Y' => self.year.to_string(),
            'y' => number(self.year.rem_euclid(100), 2),
            'm' => number(self.month, 2),
            'd' => number(self.day, 2),
            'e' if unpadded => self.day.to_string(),
            'e' => format!("{:2}", self.day),
            'H' => number(self.hour, 2),
            'I' => number(hour12, 2),
            'M' => number(self.minute, 2),
            'S' => number(self.second, 2),
            'j' => number(self.day_of_year, 3),
            'f' => "000000".to_owned(),
            'p' => if self.hour < 12 { "AM" } else { "PM" }.to_owned(),
            'A' => name(&DAYS, self.weekday),
            'a' => short(name(&DAYS, self.weekday)),
            'B' => name(&MONTHS, self.month - 1),
            'b' | 'h' => short(name(&MONTHS, self.month - 1)),
            'w' => self.weekday.to_string(),
            'u' => if self.weekday == 0 { 7 } else { self.weekday }.to_string(),
            'F' => all("Y-m-d"),
            'T' | 'X' => all("H:M:S"),
            'R' => all("H:M"),
            'D' | 'x' => all("m/d/y"),
            'c' => all("a b e H:M:S Y"),
            'z' | 'Z' => String::new(),
            'n' => "\n".to_owned(),
            't' => "\t".to_owned(),
            '%' => "%".to_owned(),
            _ => return None,
        })
    }
}
