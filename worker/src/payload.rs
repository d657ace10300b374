//! HOT PATH: buffers that become the payload of a result without a copy, and come back when the bytes have left.

use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;

/// Element of a payload: fixed-point sums or plain outputs.
pub(crate) trait Element: bytemuck::Pod + Default + Send + 'static {
    fn little_endian(self) -> Self;
}

impl Element for i64 {
    fn little_endian(self) -> Self {
        self.to_le()
    }
}

impl Element for f32 {
    fn little_endian(self) -> Self {
        Self::from_bits(self.to_bits().to_le())
    }
}

/// Buffers that are not in use. At most as many as results were ever on their way at the same time.
#[derive(Debug)]
pub(crate) struct Buffers<T> {
    free: Mutex<Vec<Vec<T>>>,
}

impl<T: Element> Buffers<T> {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self { free: Mutex::new(Vec::new()) })
    }

    /// A buffer of `len` elements with old contents.
    pub(crate) fn take(self: &Arc<Self>, len: usize) -> Buffer<T> {
        let mut data =
            self.free.lock().unwrap_or_else(PoisonError::into_inner).pop().unwrap_or_default();
        data.resize(len, T::default());
        Buffer { data, home: Arc::clone(self) }
    }
}

/// A buffer on loan.
#[derive(Debug)]
pub(crate) struct Buffer<T: Element> {
    data: Vec<T>,
    home: Arc<Buffers<T>>,
}

impl<T: Element> Buffer<T> {
    pub(crate) fn as_mut_slice(&mut self) -> &mut [T] {
        &mut self.data
    }

    pub(crate) fn as_slice(&self) -> &[T] {
        &self.data
    }

    /// The elements in little-endian order.
    pub(crate) fn into_bytes(mut self) -> Bytes {
        if cfg!(target_endian = "big") {
            self.data.iter_mut().for_each(|value| *value = value.little_endian());
        }
        Bytes::from_owner(self)
    }
}

impl<T: Element> AsRef<[u8]> for Buffer<T> {
    fn as_ref(&self) -> &[u8] {
        bytemuck::cast_slice(&self.data)
    }
}

impl<T: Element> Drop for Buffer<T> {
    fn drop(&mut self) {
        let data = std::mem::take(&mut self.data);
        self.home.free.lock().unwrap_or_else(PoisonError::into_inner).push(data);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_comes_back_when_its_bytes_are_gone() {
        let buffers = Buffers::<i64>::new();
        let mut buffer = buffers.take(2);
        buffer.as_mut_slice().copy_from_slice(&[1, -2]);
        let address = buffer.as_slice().as_ptr();
        let bytes = buffer.into_bytes();
        assert_eq!(bytes[..8], 1i64.to_le_bytes());
        assert_eq!(bytes[8..], (-2i64).to_le_bytes());
        let other = buffers.take(2);
        assert_ne!(other.as_slice().as_ptr(), address);
        drop(bytes);
        assert_eq!(buffers.take(1).as_slice().as_ptr(), address);
    }
}
