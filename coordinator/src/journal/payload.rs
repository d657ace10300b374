//! Numbers, texts and lists as bytes. Reading checks every count against what is left before anything is allocated for it.

/// The bytes end before the value does, or go on behind it, or are no value of its type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Short;

/// Appends values.
#[derive(Debug, Default)]
pub(super) struct Writer {
    bytes: Vec<u8>,
}

impl Writer {
    pub(super) fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }

    pub(super) fn u8(&mut self, value: u8) {
        self.bytes.push(value);
    }

    pub(super) fn flag(&mut self, value: bool) {
        self.u8(value.into());
    }

    pub(super) fn u32(&mut self, value: u32) {
        self.bytes.extend(value.to_le_bytes());
    }

    pub(super) fn u64(&mut self, value: u64) {
        self.bytes.extend(value.to_le_bytes());
    }

    /// All bits, so that the value is the same one again.
    pub(super) fn f32(&mut self, value: f32) {
        self.u32(value.to_bits());
    }

    pub(super) fn text(&mut self, text: &str) {
        self.count(text.len());
        self.bytes.extend(text.as_bytes());
    }

    pub(super) fn ids(&mut self, ids: &[u32]) {
        self.list(ids, |out, &id| out.u32(id));
    }

    pub(super) fn list<T>(&mut self, items: &[T], put: impl Fn(&mut Self, &T)) {
        self.count(items.len());
        for item in items {
            put(self, item);
        }
    }

    pub(super) fn optional<T>(&mut self, value: Option<T>, put: impl FnOnce(&mut Self, T)) {
        self.flag(value.is_some());
        if let Some(value) = value {
            put(self, value);
        }
    }

    fn count(&mut self, count: usize) {
        self.u32(u32::try_from(count).expect("a request has far fewer than 2^32 parts"));
    }
}

/// Takes values off.
#[derive(Debug)]
pub(super) struct Reader<'a> {
    bytes: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes }
    }

    /// Nothing is left.
    pub(super) fn end(&self) -> Result<(), Short> {
        if self.bytes.is_empty() { Ok(()) } else { Err(Short) }
    }

    pub(super) fn u8(&mut self) -> Result<u8, Short> {
        Ok(self.take(1)?[0])
    }

    pub(super) fn flag(&mut self) -> Result<bool, Short> {
        match self.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(Short),
        }
    }

    pub(super) fn u32(&mut self) -> Result<u32, Short> {
        Ok(u32::from_le_bytes(self.take(4)?.try_into().expect("four bytes")))
    }

    pub(super) fn u64(&mut self) -> Result<u64, Short> {
        Ok(u64::from_le_bytes(self.take(8)?.try_into().expect("eight bytes")))
    }

    pub(super) fn f32(&mut self) -> Result<f32, Short> {
        Ok(f32::from_bits(self.u32()?))
    }

    pub(super) fn text(&mut self) -> Result<String, Short> {
        let length = self.u32()? as usize;
        let bytes = self.take(length)?;
        std::str::from_utf8(bytes).map(str::to_owned).map_err(|_| Short)
    }

    pub(super) fn ids(&mut self) -> Result<Vec<u32>, Short> {
        self.list(Self::u32)
    }

    pub(super) fn list<T>(
        &mut self,
        mut get: impl FnMut(&mut Self) -> Result<T, Short>,
    ) -> Result<Vec<T>, Short> {
        let count = self.u32()? as usize;
        // Every item takes at least four bytes: a number, or the length of a text.
        if count > self.bytes.len() / 4 {
            return Err(Short);
        }
        (0..count).map(|_| get(self)).collect()
    }

    pub(super) fn optional<T>(
        &mut self,
        get: impl FnOnce(&mut Self) -> Result<T, Short>,
    ) -> Result<Option<T>, Short> {
        if self.flag()? { get(self).map(Some) } else { Ok(None) }
    }

    fn take(&mut self, count: usize) -> Result<&'a [u8], Short> {
        let (taken, rest) = self.bytes.split_at_checked(count).ok_or(Short)?;
        self.bytes = rest;
        Ok(taken)
    }
}
